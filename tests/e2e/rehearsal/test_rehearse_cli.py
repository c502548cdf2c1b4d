"""`vplan rehearse` as it is typed: a program that asks the driver for memory, and, with a CUDA wheel, training.

The second half needs a Python with PyTorch's CUDA wheel (no GPU), named by VPLAN_CUDA_PYTHON.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import vplan
from tests.cuda_wheel import CUDA_PYTHON, needs_cuda_wheel

pytest.importorskip("elftools")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a rehearsal needs Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="a rehearsal needs a C compiler (cc)"),
]


DRIVER = """
    import ctypes, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    context, at = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    for number in range(int(sys.argv[1])):
        if cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1 << 30)):
            sys.exit(f"no room after {number} GiB")
    print("all of it")
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python without torch."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where the command runs; its temporary folder is empty after it."""
    for name in ("tmp", "run"):
        (tmp_path / name).mkdir()
    yield tmp_path / "run"
    left = [path for path in (tmp_path / "tmp").iterdir() if not path.name.endswith(".log")]
    assert left == []


def environment(place: Path, cache: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(place.parent / "tmp"), "XDG_CACHE_HOME": cache}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Libraries are compiled once for all tests here."""
    return str(tmp_path_factory.mktemp("cache"))


def rehearse(place: Path, cache: str, *words: str, code: int = 0) -> dict[str, Any]:
    command = vplan.command("rehearse", "--json", *words)
    done = subprocess.run(
        command, cwd=place, env=environment(place, cache), capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr + done.stdout
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def program(place: Path, source: str) -> str:
    path = place / "program.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def test_a_program_that_fits(place: Path, cache: str, bare_python: str) -> None:
    answer = rehearse(place, cache, "--gpu", "24GB", "--", bare_python, program(place, DRIVER), "10")
    assert answer["verdict"] == "fits"
    assert answer["device_bytes"] == (10 << 30) + answer["estimated_bytes"]
    assert answer["budget_bytes"] == round(23.5 * 2**30)


def test_a_program_that_runs_out(place: Path, cache: str, bare_python: str) -> None:
    answer = rehearse(place, cache, "--gpu", "24GB", "--", bare_python, program(place, DRIVER), "24", code=3)
    assert (answer["verdict"], answer["limit"], answer["short_of_bytes"]) == ("no", "gpu", 1 << 30)
    assert 23 << 30 < answer["device_bytes"] <= answer["budget_bytes"]


def test_a_program_that_fails_otherwise(place: Path, cache: str, bare_python: str) -> None:
    words = ["--gpu", "24GB", "--", bare_python, "-c", "raise SystemExit('it broke')"]
    error = rehearse(place, cache, *words, code=4)["error"]
    assert "exit code 1: it broke" in error["message"]
    assert "it broke" in Path(error["fix"].partition(": ")[2]).read_text()


MAPPING = """
    import mmap, sys
    with open(sys.argv[1], "rb") as file:
        whole = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    whole[0] = 1
    print(whole[0], whole[-1])
"""


OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@pytest.mark.skipif(not OVERCOMMIT.exists() or OVERCOMMIT.read_text().strip() != "0", reason="Linux's own heuristic")
def test_a_checkpoint_larger_than_ram_is_mapped(place: Path, cache: str, bare_python: str) -> None:
    """As torch maps it (aten/src/ATen/MapAllocator.cpp): private and writable. Linux would refuse."""
    program, weights = place / "map.py", place / "model.bin"
    program.write_text(textwrap.dedent(MAPPING))
    with weights.open("wb") as file:
        file.truncate(psutil.virtual_memory().total + psutil.swap_memory().total + 2**30)
    with weights.open("rb") as file, pytest.raises(OSError, match="Cannot allocate memory"):
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    rehearse(place, cache, "--gpu", "8GB", "--python", bare_python, "--", bare_python, str(program), str(weights))


def test_pinned_memory_that_nobody_writes_to_takes_no_ram(place: Path, cache: str, bare_python: str) -> None:
    """It is counted, against --host-ram too, and does not end a run on a machine that has less."""
    much = psutil.virtual_memory().total + 2**30
    source = f"""
        import ctypes, time
        cuda = ctypes.CDLL("libcuda.so.1")
        context, at = ctypes.c_void_p(), ctypes.c_void_p()
        assert cuda.cuInit(0) == 0
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert cuda.cuCtxSetCurrent(context) == 0
        assert cuda.cuMemHostAlloc(ctypes.byref(at), ctypes.c_size_t({much}), 0) == 0
        time.sleep(1)
    """
    words = ["--gpu", "8GB", "--", bare_python, program(place, source)]
    answer = rehearse(place, cache, *words)
    assert (answer["verdict"], answer["pinned_bytes"] >= much) == ("fits", True)
    answer = rehearse(place, cache, "--host-ram", "1GiB", *words, code=3)
    assert (answer["verdict"], answer["limit"]) == ("no", "host")


def test_memory_that_is_pinned_where_it_lies_is_counted_and_what_processes_share_once(
    place: Path, cache: str, bare_python: str
) -> None:
    source = """
        import ctypes, mmap, os, sys, time
        own, shared = 96 << 20, 160 << 20
        file = os.memfd_create("weights")
        os.posix_fallocate(file, 0, shared)
        for first in (True, False):
            if first and os.fork() == 0:
                break
        cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        assert cuda.cuInit(0) == 0
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert cuda.cuCtxSetCurrent(context) == 0
        kept = []
        def register(mapped, size):
            kept.append((ctypes.c_char * size).from_buffer(mapped))
            at = ctypes.c_void_p(ctypes.addressof(kept[-1]))
            assert cuda.cuMemHostRegister_v2(at, ctypes.c_size_t(size), 0) == 0
            assert cuda.cuMemHostRegister_v2(at, ctypes.c_size_t(size), 0) == 712
            return at
        register(mmap.mmap(file, shared), shared)
        register(mmap.mmap(-1, own, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), own)
        gone = register(mmap.mmap(-1, own, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), own)
        assert cuda.cuMemHostUnregister(gone) == 0
        assert cuda.cuMemHostUnregister(gone) == 713
        time.sleep(2)
    """
    answer = rehearse(place, cache, "--gpu", "8GB", "--", bare_python, program(place, source))
    assert 2 * (96 << 20) + (160 << 20) <= answer["pinned_bytes"] <= 4 * (96 << 20) + (160 << 20)
    assert (
        (160 << 20) < answer["host_ram_bytes"] < (160 << 20) + (128 << 20)
    )  # own pages that nobody wrote to take none


def test_the_time_is_bounded(place: Path, cache: str, bare_python: str) -> None:
    words = ["--gpu", "24GB", "--time-limit", "1", "--", bare_python, "-c", "import time; time.sleep(600)"]
    assert "stopped after 1 s" in rehearse(place, cache, *words, code=4)["error"]["message"]


def test_sigterm_leaves_nothing(place: Path, cache: str, bare_python: str) -> None:
    """Not even a process that has left its session and its parent."""
    source = """
        import os, subprocess, sys, time
        code = "import time; time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        open("pids", "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    """
    command = vplan.command("rehearse", "--gpu", "24GB", "--", bare_python, program(place, source))
    running = subprocess.Popen(command, cwd=place, env=environment(place, cache), stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not ((place / "pids").exists() and (place / "pids").read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    pids = [int(text) for text in (place / "pids").read_text().split()]
    assert len(pids) == 2
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 128 + signal.SIGTERM
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_report_without_its_ending_is_refused_before_anything_runs(place: Path, cache: str, bare_python: str) -> None:
    words = ["--gpu", "24GB", "--report", "page.txt", "--", bare_python, "-c", "open('ran', 'w')"]
    assert "is no .html file" in rehearse(place, cache, *words, code=1)["error"]["message"]
    assert not (place / "ran").exists()


def test_usage(place: Path, cache: str, bare_python: str) -> None:
    for words, message in ((["--gpu", "24GB"], "nothing to rehearse"), (["--", bare_python], "no card given")):
        done = subprocess.run(vplan.command("rehearse", *words), capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert message in done.stderr


COGVIDEOX = (
    *("--pretrained_model_name_or_path", "THUDM/CogVideoX-2b", "--height", "480", "--width", "720"),
    *(
        "--max_num_frames",
        "49",
        "--train_batch_size",
        "1",
        "--rank",
        "64",
        "--mixed_precision",
        "bf16",
        "--output_dir",
        "out",
    ),
)


def test_the_smallest_change_of_a_known_trainer(place: Path, cache: str, bare_python: str) -> None:
    """A program that takes memory stands for the trainer's script: `vplan check` reads names and flags alone."""
    script = place / "train_cogvideox_lora.py"
    script.write_text(textwrap.dedent(DRIVER.replace("int(sys.argv[1])", "24")))
    words = ("--gpu", "24GB", "--", bare_python, script.name, *COGVIDEOX)
    check = rehearse(place, cache, *words, code=3)["check"]
    assert (check["trainer"], check["verdict"], check["basis"]) == ("diffusers", "no", "estimated")
    assert check["fixes"][0]["change"] == ["--gradient_checkpointing"]
    assert check["missed_bytes"] == 0

    command = vplan.command("rehearse", *words)
    done = subprocess.run(
        command, cwd=place, env=environment(place, cache), capture_output=True, text=True, check=False
    )
    assert "rehearsed at least 24.45" in done.stdout
    assert "smallest change (estimated, not rehearsed):\n  --gradient_checkpointing\n" in done.stdout


def test_what_the_run_took_more_has_to_be_saved_as_well(place: Path, cache: str, bare_python: str) -> None:
    script = place / "train_cogvideox_lora.py"
    script.write_text(textwrap.dedent(DRIVER.replace("int(sys.argv[1])", "24")))
    words = ("--gpu", "24GB", "--", bare_python, script.name, *COGVIDEOX, "--gradient_checkpointing")
    answer = rehearse(place, cache, *words, code=3)
    check = answer["check"]
    assert check["missed_bytes"] == answer["device_bytes"] + answer["short_of_bytes"] - check["predicted_bytes"] > 0
    for fix in check["fixes"]:
        assert fix["estimate"]["peak"]["device_bytes"] <= answer["budget_bytes"] - check["missed_bytes"]


def test_a_command_of_nobody_is_not_predicted(place: Path, cache: str, bare_python: str) -> None:
    assert rehearse(place, cache, "--gpu", "24GB", "--", bare_python, program(place, DRIVER), "2")["check"] is None


# ---- with PyTorch's CUDA wheel

TRAINING = """
    import sys
    import torch
    torch.manual_seed(0)
    width, layers = 4096, int(sys.argv[1])
    with torch.device("cuda"):
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(5):
        model(torch.randn(64, width, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, torch.cuda.max_memory_allocated(), flush=True)
"""
WEIGHT = 4096 * 4096 * 4


@needs_cuda_wheel
def test_training_fits_and_has_lines_at_its_peak(place: Path, cache: str) -> None:
    words = ("--gpu", "24GB", "--steps", "2", "--by-line", "--", CUDA_PYTHON, program(place, TRAINING), "8")
    answer = rehearse(place, cache, *words)
    assert (answer["verdict"], answer["steps"]) == ("fits", 2)
    (rank,) = answer["ranks"]
    assert list(rank["phases"]) == ["load", "first_step", "train", "optimizer"]
    assert rank["phases"]["load"]["allocated_bytes"] == 8 * WEIGHT + 64 * 4096 * 4  # and the first batch
    # weights, gradients, two states, and the temporaries of a parameter's step, beside activations and workspaces
    assert 33 * WEIGHT <= rank["allocated_bytes"] < 36 * WEIGHT
    assert rank["allocated_bytes"] <= rank["reserved_bytes"] <= rank["device_bytes"] - rank["estimated_bytes"]
    live = answer["live"]
    assert live["at"] == "peak"
    assert abs(live["allocated_bytes"] - answer["allocated_bytes"]) < 0.02 * answer["allocated_bytes"]
    states = next(line for line in live["lines"] if line["source"] == "optimizer.step()")
    assert 16 * WEIGHT <= states["bytes"] <= 19 * WEIGHT  # two states of each weight, and temporaries of one


OWN_STEP = """
    import torch
    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["square"] = torch.zeros_like(parameter)

    optimizer.step = step.__get__(optimizer, torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for _ in range(9):
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    raise SystemExit("it should have ended before")
"""


@needs_cuda_wheel
def test_a_step_that_a_program_gives_its_optimizer_counts(place: Path, cache: str) -> None:
    """torch's hooks see the steps of classes alone; so it is in OneTrainer, under a scheduler that wraps it again."""
    answer = rehearse(place, cache, "--gpu", "8GB", "--steps", "2", "--", CUDA_PYTHON, program(place, OWN_STEP))
    assert (answer["verdict"], answer["steps"]) == ("fits", 2)
    (rank,) = answer["ranks"]
    assert list(rank["phases"]) == ["load", "first_step", "train", "optimizer"]


@needs_cuda_wheel
def test_training_runs_out_at_a_line(place: Path, cache: str) -> None:
    words = ("--gpu", "8GB", "--report", "page.html", "--", CUDA_PYTHON, program(place, TRAINING), "40")
    answer = rehearse(place, cache, *words, code=3)
    assert (answer["verdict"], answer["phase"], answer["step"]) == ("no", "optimizer", 1)
    assert answer["where"]["file"] == str(place / "program.py")
    assert answer["where"]["source"] == "optimizer.step()"
    assert answer["stack"][-1]["file"].endswith("adam.py")
    assert answer["short_of_bytes"] == WEIGHT
    live = answer["live"]
    assert live["at"] == "error"
    weights = next(line for line in live["lines"] if "Linear" in line["source"])
    assert (weights["bytes"], weights["blocks"]) == (40 * WEIGHT, 40)
    assert 40 * WEIGHT <= live["backward_bytes"] < 41 * WEIGHT  # gradients, and a workspace
    assert live["allocated_bytes"] == answer["allocated_bytes"]
    page = (place / "page.html").read_text(encoding="utf-8")
    place_of_it = f"program.py:{answer['where']['line']}</strong> <code>optimizer.step()"
    assert all(text in page for text in ("It does not fit", place_of_it, "Memory through the run", "no room for"))
    assert 'class="phase-optimizer"' in page and page.count("<path") == 2


@needs_cuda_wheel
def test_an_error_that_was_caught_does_not_hide_the_peak(place: Path, cache: str) -> None:
    source = """
        import torch
        weights = torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    """
    words = ("--gpu", "8GB", "--by-line", "--", CUDA_PYTHON, program(place, source))
    answer = rehearse(place, cache, *words)
    assert (answer["verdict"], answer["live"]["at"], answer["live"]["allocated_bytes"]) == ("tight", "peak", 6 << 30)
    assert [line["bytes"] >> 30 for line in answer["live"]["lines"]] == [5, 1]


@needs_cuda_wheel
def test_the_module_that_runs_out_is_named(place: Path, cache: str) -> None:
    source = """
        import torch
        with torch.device("cuda"):
            model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])
        model(torch.randn(1 << 19, 4096, device="cuda")).sum().backward()
    """
    answer = rehearse(place, cache, "--gpu", "24GB", "--", CUDA_PYTHON, program(place, source), code=3)
    assert (answer["phase"], answer["moment"]) == ("first_step", "forward of 1")


@needs_cuda_wheel
def test_what_vplan_sets_for_itself_is_not_handed_on(place: Path, cache: str) -> None:
    source = """
        import os
        assert "PYDANTIC_DISABLE_PLUGINS" not in os.environ
    """
    rehearse(place, cache, "--gpu", "24GB", "--", CUDA_PYTHON, program(place, source))


SMALL = """
    import time
    import torch
    ids = torch.tensor([5, 0, 7, 0], device="cuda")
    assert ids.nonzero().flatten().tolist() == [0, 2]
    assert ids[ids > 0].tolist() == [5, 7]
    assert torch.arange(5, device="cuda").float().mul(2).cumsum(0).tolist() == [0, 2, 6, 12, 20]
    assert len(set(torch.randint(0, 10**9, (8,), device="cuda").tolist())) > 1
    assert torch.equal(ids, ids.clone()) and not torch.equal(ids, ids + 1)
    mask = torch.zeros(1000, dtype=torch.bool, device="cuda")
    mask[3:9] = True
    assert torch.randn(1000, 1000, device="cuda")[mask].shape == (6, 1000)
    large = torch.randn(1000, 1000, device="cuda")
    shaped = torch.cat([large.new_zeros(600, dtype=torch.bool), torch.ones_like(large[0], dtype=torch.bool)[600:]])
    assert large[shaped].shape == (400, 1000)
    assert large.repeat_interleave(2, dim=1).shape == (1000, 2000)
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], 1.0), torch.amp.GradScaler("cuda")
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1, -1, -1, -1]
    torch.cuda.default_generators[0].get_state()
    time.sleep(1)  # it was aborted at its end now and then, probably while autograd's thread waited for Python's lock
"""


@needs_cuda_wheel
def test_small_values_are_true(place: Path, cache: str) -> None:
    words = ("--gpu", "24GB", "--steps", "0", "--", CUDA_PYTHON, program(place, SMALL))
    answer = rehearse(place, cache, *words)
    assert answer["verdict"] == "fits"
    assert not any("not computed" in note for note in answer["assumptions"])


RANKS = """
    import os
    import torch
    import torch.distributed as dist

    def exchange(rank):
        given, taken = torch.full((4,), rank + 1.0, device="cuda"), torch.empty(4, device="cuda")
        told = given[:1].clone()
        dist.all_reduce(told)
        assert told.item() == 3
        both = [dist.P2POp(dist.irecv, taken, 1 - rank), dist.P2POp(dist.isend, given, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert taken.tolist() == [2.0 - rank] * 4
        for number in range(3):  # nobody waits for what he sends
            if rank == 0:
                dist.send(torch.full((2,), float(number), device="cuda"), 1)
        for number in range(3):
            if rank == 1:
                message = torch.empty(2, device="cuda")
                dist.recv(message, 0)
                assert message.tolist() == [number] * 2
        dist.all_to_all_single(taken, torch.arange(4.0, device="cuda") + 10 * rank)
        assert taken.tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
        parts = [torch.empty(1 + rank, device="cuda") for _ in range(2)]
        dist.all_to_all(parts, [torch.full((1 + to,), 10.0 * rank + to, device="cuda") for to in range(2)])
        assert [part.tolist() for part in parts] == [[10.0 * of + rank] * (1 + rank) for of in range(2)]
        gathered = [torch.empty(4, device="cuda") for _ in range(2)] if rank == 0 else None
        dist.gather(given, gathered)
        assert rank or [part[0].item() for part in gathered] == [1, 2]

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    exchange(rank)
    open(f"exchanged-{rank}", "w").close()
    with torch.device("cuda"):
        model = torch.nn.Linear(4096, 4096, bias=False)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@needs_cuda_wheel
def test_what_two_ranks_send_to_each_other_arrives_and_they_train(place: Path, cache: str) -> None:
    launch = (CUDA_PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", program(place, RANKS))
    answer = rehearse(place, cache, "--gpu", "2x4090", "--steps", "2", "--", *launch)
    assert answer["verdict"] == "fits"
    assert all((place / f"exchanged-{rank}").exists() for rank in range(2))
    assert [(rank["rank"], rank["device"]) for rank in answer["ranks"]] == [(0, 0), (1, 1)]
    assert len({rank["allocated_bytes"] for rank in answer["ranks"]}) == 1


FSDP = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    rank, kind, width = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (2,))
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width)) for _ in range(2)]
    model = torch.nn.Sequential(*blocks).to(kind)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    batch, told = torch.randn(8, width).to(kind).bfloat16(), []
    for _ in range(4):
        loss = (model(batch).float() - 1).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.item(), norm.full_tensor().item()]
    with open(f"told-{kind}-{rank}.json", "w") as file:
        json.dump(told, file)
    if kind == "cpu":  # both have written; gloo's threads now and then abort a process that ends by itself
        dist.barrier()
        os._exit(0)
"""


@needs_cuda_wheel
@pytest.mark.parametrize("width", [32, 512])
def test_fsdp_trains_with_true_values_where_all_is_small_and_finite_ones_elsewhere(
    place: Path, cache: str, width: int
) -> None:
    """The same program on the CPU, with gloo, gives the losses and gradient norms that are true."""
    script = program(place, FSDP)
    run, two = ("-m", "torch.distributed.run"), ("--nproc_per_node", "2", script)
    words = ("--gpu", "2x4090", "--steps", "0", "--", CUDA_PYTHON, *run, *two, "cuda", str(width))
    answer = rehearse(place, cache, *words)
    told = [json.loads((place / f"told-cuda-{rank}.json").read_text()) for rank in range(2)]
    unknown = any("not computed" in note for note in answer["assumptions"])
    if width == 512:
        assert unknown and all(math.isfinite(value) for values in told for value in values)
        return
    assert not unknown
    # On a port of its own: this one shares the machine's network with whatever else has the usual port.
    subprocess.run([sys.executable, *run, "--standalone", *two, "cpu", str(width)], cwd=place, check=True)
    for rank in range(2):
        assert told[rank] == pytest.approx(json.loads((place / f"told-cpu-{rank}.json").read_text()), rel=0.01)


VALUES = """
    import torch

    # A direction of a large tensor is 0/0 of its zeros; one of zeros that are known is NaN, as on a card.
    large = torch.randn(1000, 1000, device="cuda").sum(0)
    assert not (large / large.norm()).sum().isnan()  # unknown
    zeros = torch.zeros(8, device="cuda")
    assert (zeros / zeros.norm()).sum().isnan()

    # Whether a large tensor is zero is known as it began. Prodigy asks this of every weight, and copies those that are
    # not.
    drawn = torch.nn.init.normal_(torch.empty(1000, 1000, device="cuda"))
    assert drawn.any() and torch.nn.Parameter(drawn.bfloat16().clone()).any()
    assert torch.ones(1000, 1000).to("cuda").any() and torch.randn(1000, 1000, device="cuda").any()
    zeros = torch.zeros(1000, 1000, device="cuda")
    assert not zeros.any() and not torch.zeros_like(drawn).any()
    zeros.copy_(drawn)
    assert zeros.any()
    del drawn, zeros
    assert not torch.empty(1000, 1000, device="cuda").zero_().any()
    assert torch.tensor(1.0).to("cuda").any()
    changed = torch.zeros(1000, 1000, device="cuda")
    changed[0].add_(1)
    assert not changed.any()  # unknown

    if torch.randn(1000, 1000, device="cuda").mean() > 0:  # unknown
        print("positive")
"""


@needs_cuda_wheel
def test_tensors_like_one_of_the_card_may_be_made_elsewhere(place: Path, cache: str) -> None:
    """DeepSpeed 0.19.8 keeps shapes on meta (runtime/zero/stage_1_and_2.py `round_robin_bit16_meta`): where the fill
    was repeated on such a tensor, which has no memory, the program ended with a segmentation fault."""
    source = """
        import torch
        small = torch.full((8,), 3.0, device="cuda")
        shape = torch.zeros_like(small, device="meta")
        empty = torch.empty_like(small, device="meta")
        host = torch.ones_like(small, device="cpu")
        assert shape.shape == empty.shape == (8,) and host.sum() == 8 and small.sum() == 24
    """
    told = rehearse(place, cache, "--gpu", "24GB", "--", CUDA_PYTHON, program(place, source))
    assert told["verdict"] == "fits"


@needs_cuda_wheel
def test_values_that_nobody_knows_are_told_and_are_no_nan(place: Path, cache: str) -> None:
    words = ("--gpu", "24GB", "--steps", "0", "--", CUDA_PYTHON, program(place, VALUES))
    (note,) = [note for note in rehearse(place, cache, *words)["assumptions"] if "not computed" in note]
    lines = textwrap.dedent(VALUES).splitlines()
    unknown = {number for number, line in enumerate(lines, start=1) if line.endswith("# unknown")}
    assert {int(number) for number in re.findall(r"program\.py:(\d+)", note)} == unknown, note


@needs_cuda_wheel
def test_compiled_code_is_refused_by_name(place: Path, cache: str) -> None:
    source = """
        import torch
        double = torch.compile(lambda x: x * 2 + 1)
        double(torch.ones(4096, device="cuda"))
    """
    error = rehearse(place, cache, "--gpu", "24GB", "--", CUDA_PYTHON, program(place, source), code=1)["error"]
    assert "torch.compile" in error["message"]
    assert "program.py:4" in error["message"]


@needs_cuda_wheel
def test_flex_attention_is_refused_by_name(place: Path, cache: str) -> None:
    """Uncompiled, it would compile its own inner part, and the option to leave out is not torch.compile."""
    source = """
        import torch
        from torch.nn.attention.flex_attention import flex_attention
        tokens = torch.ones(1, 2, 128, 64, device="cuda")
        flex_attention(tokens, tokens, tokens)
    """
    error = rehearse(place, cache, "--gpu", "24GB", "--", CUDA_PYTHON, program(place, source), code=1)["error"]
    assert "FlexAttention" in error["message"]
    assert "program.py:5" in error["message"]


@needs_cuda_wheel
@pytest.mark.parametrize("module", ["__main__", "torch._native.ops.bmm_outer_product.triton_kernels"])
def test_a_triton_kernel_is_refused_by_name_unless_it_is_torchs_own(place: Path, cache: str, module: str) -> None:
    """torch's own write to outputs that torch allocated, and are met in any environment that has Triton (Qwen2-VL of
    EasyAnimate was refused for one). The CUDA wheel runs without Triton, and `ci/cuda-python` does not bring it: a
    module with the entry of its kernels stands for it (triton/runtime/jit.py: `kernel[grid](...)` calls
    `JITFunction.run`, `fn` is the kernel's Python function)."""
    for folder in ("triton", "triton/runtime"):
        (place / folder).mkdir()
        (place / folder / "__init__.py").touch()
    (place / "triton" / "runtime" / "jit.py").write_text(
        "class JITFunction:\n    def __init__(self, fn): self.fn = fn\n    def run(self): raise SystemExit('ran')\n"
    )
    source = f"""
        import torch
        torch.ones(8, device="cuda")
        from triton.runtime.jit import JITFunction
        def kernel(): pass
        kernel.__module__ = {module!r}
        JITFunction(kernel).run()
    """
    own = module == "__main__"
    told = rehearse(place, cache, "--gpu", "24GB", "--", CUDA_PYTHON, program(place, source), code=int(own))
    if own:
        assert "a Triton kernel" in told["error"]["message"]
        assert "program.py:7" in told["error"]["message"]
    else:
        assert told["verdict"] == "fits"


@needs_cuda_wheel
def test_a_graph_is_refused_by_name(place: Path, cache: str) -> None:
    source = """
        import torch
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(8, device="cuda")
    """
    error = rehearse(place, cache, "--gpu", "24GB", "--", CUDA_PYTHON, program(place, source), code=1)["error"]
    assert "CUDA graphs" in error["message"]


@needs_cuda_wheel
def test_sizes_that_depend_on_values_are_not_read_from_unfilled_memory(place: Path, cache: str) -> None:
    """The card's own `nonzero` would find its count in a block that was something else before."""
    source = """
        import torch
        for _ in range(20):
            torch.empty(2**20, dtype=torch.uint8, device="cuda")
            used = torch.tensor([2**30] * 64, device="cuda")
            del used
            steps = torch.linspace(1000, 0, 1000, device="cuda")
            assert [(steps == step).nonzero().item() for step in steps[5:8]] == [5, 6, 7]
            unknown = torch.randn(1000, 1000, device="cuda") > 0
            assert unknown.nonzero().shape[1] == 2
            assert torch.randn(1000, 1000, device="cuda")[unknown].dim() == 1
            torch.zeros(1000, 1000, device="cuda")[unknown] = torch.ones(7, device="cuda")
            torch.zeros(1000, 1000, device="cuda")[unknown] = 1.0
            torch.linalg.qr(torch.randn(8, 512, 20, device="cuda"))  # cuSOLVER is asked for its workspace
        print(torch.cuda.max_memory_allocated())
    """
    words = ("--gpu", "24GB", "--steps", "0", "--", CUDA_PYTHON, program(place, source))
    answer = rehearse(place, cache, *words)
    assert answer["allocated_bytes"] < 64 * 2**20
    assert any("not computed" in note for note in answer["assumptions"])


@needs_cuda_wheel
def test_tensors_are_printed_from_host_ram(place: Path, cache: str) -> None:
    """torch counts what is not zero on the card, with modes like ours off: a count from unfilled memory."""
    source = """
        import torch
        assert str(torch.arange(3, device="cuda")) == "tensor([0, 1, 2], device='cuda:0')"
        weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        assert repr(weight) == "Parameter containing:\\ntensor([1., 1.], device='cuda:0', requires_grad=True)"
        assert str(torch.empty(0, device="cuda")) == "tensor([], device='cuda:0')"
        used = torch.full((64,), 2**30, device="cuda")
        del used
        assert str(torch.randn(1000, 1000, device="cuda")) == "tensor(..., device='cuda:0')"
    """
    words = ("--gpu", "24GB", "--steps", "0", "--host-ram", "2GiB", "--", CUDA_PYTHON, program(place, source))
    assert rehearse(place, cache, *words)["verdict"] == "fits"


@needs_cuda_wheel
def test_an_optimizer_in_host_ram_takes_none(place: Path, cache: str) -> None:
    """Weights that come from the card have no values in host RAM, nor have the optimizer's states of them."""
    source = """
        import torch
        on_card = torch.nn.Parameter(torch.randn(2**14, 2**14, device="cuda"))
        on_cpu = torch.nn.Parameter(on_card.detach().cpu().clone())
        optimizer = torch.optim.AdamW([on_cpu], fused=True)
        for step in range(3):
            (on_card * 2).sum().backward()
            on_cpu.grad = on_card.grad.cpu()
            optimizer.step()
            on_card.data.copy_(on_cpu)
            on_card.grad = None
    """
    words = ("--gpu", "24GB", "--steps", "3", "--host-ram", "2GiB", "--", CUDA_PYTHON, program(place, source))
    answer = rehearse(place, cache, *words)
    assert (answer["verdict"], answer["steps"]) == ("fits", 3)
    assert 3 * 2**30 < answer["host_ram_bytes"] < 5 * 2**30  # the clone and two states, and the program itself
    assert any("counted and not made" in note for note in answer["assumptions"])


@needs_cuda_wheel
def test_weights_that_nobody_has(place: Path, cache: str) -> None:
    """A pipeline of the hub by its name, cast on the CPU as training scripts do it, and a file at a path."""
    have = "import diffusers, transformers"
    if subprocess.run([CUDA_PYTHON, "-c", have], capture_output=True, check=False).returncode:
        pytest.skip("the Python of VPLAN_CUDA_PYTHON has no diffusers and transformers")
    source = """
        import os
        import torch
        from diffusers import AutoencoderKL, FluxTransformer2DModel
        from transformers import CLIPTokenizer
        name = "black-forest-labs/FLUX.1-dev"
        model = FluxTransformer2DModel.from_pretrained(name, subfolder="transformer", torch_dtype=torch.float32)
        model.to("cuda", dtype=torch.bfloat16)
        vae = AutoencoderKL.from_pretrained(name, subfolder="vae").to("cuda")
        assert CLIPTokenizer.from_pretrained(name, subfolder="tokenizer")("a dog").input_ids[0] == 49406
        state = torch.load("models/Wan2.1_VAE.pth", mmap=True, weights_only=True)
        assert state["conv1.weight"].shape == (32, 32, 1, 1, 1)
    """
    words = ["--gpu", "80GB", "--steps", "0", "--hollow", "black-forest-labs/FLUX.1-dev"]
    words += ["--hollow", "models/Wan2.1_VAE.pth", "--", CUDA_PYTHON, program(place, source)]
    answer = rehearse(place, cache, *words)
    assert answer["verdict"] == "fits"
    weights = 11_901_408_320 * 2 + 83_819_683 * 4
    assert weights <= answer["allocated_bytes"] < weights * 1.01
    assert 11_901_408_320 * 4 < answer["host_ram_bytes"] < 11_901_408_320 * 4 + 8 * 2**30
    (note,) = [note for note in answer["assumptions"] if "counted and not made" in note]
    assert "44.3 GiB" in note
    assert not (place / "models").exists()


@needs_cuda_wheel
def test_data_that_nobody_has(place: Path, cache: str) -> None:
    """A folder of pictures is there while the command runs, and not behind it."""
    if subprocess.run([CUDA_PYTHON, "-c", "import PIL"], capture_output=True, check=False).returncode:
        pytest.skip("the Python of VPLAN_CUDA_PYTHON has no pillow")
    source = """
        from pathlib import Path
        import numpy, torch
        from PIL import Image
        pictures = [numpy.asarray(Image.open(path)) for path in sorted(Path("data/dog").iterdir())]
        batch = torch.from_numpy(numpy.stack(pictures)).cuda().float()
        model = torch.nn.Conv2d(3, 8, 3).cuda()
        model(batch.permute(0, 3, 1, 2)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    """
    script = place / "train_dreambooth_lora_flux.py"  # the name says whose flags these are
    script.write_text(textwrap.dedent(source))
    command = [CUDA_PYTHON, script.name, "--pretrained_model_name_or_path", "black-forest-labs/FLUX.1-dev"]
    command += ["--instance_data_dir", "data/dog", "--instance_prompt", "dog", "--mixed_precision", "bf16"]
    command += ["--resolution", "256", "--train_batch_size", "4"]
    answer = rehearse(place, cache, "--gpu", "24GB", "--steps", "1", "--hollow", "data", "--", *command)
    assert (answer["verdict"], answer["steps"]) == ("fits", 1)
    assert answer["allocated_bytes"] >= 4 * 4 * (3 * 256 * 256 + 8 * 254 * 254)  # four pictures, and the output
    assert "hollow data: 4 grey samples of 256x256" in answer["assumptions"]
    assert sorted(path.name for path in place.iterdir()) == [script.name]


def test_unknown_weights_are_refused(place: Path, cache: str, bare_python: str) -> None:
    words = ["--gpu", "24GB", "--hollow", "black-forest-labs/FLUX.1-dve", "--", bare_python, "-c", "pass"]
    error = rehearse(place, cache, *words, code=1)["error"]
    assert "nothing is known of 'black-forest-labs/FLUX.1-dve'" in error["message"]
    assert "black-forest-labs/FLUX.1-dev" in error["fix"]
