"""Out-of-memory messages as people paste them: every wording of torch 2.x, logs around it, and the tensor meant."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import grid
from planner.commands import cli
from planner.errors import VplanError
from planner.estimate.stages import replay_stages
from planner.foreign.oom_cause import explain, render
from planner.foreign.oom_message import allocation_bytes, format_size, parse_oom_message
from planner.layout import recordings
from planner.layout.pipeline import lay_out
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import resolve
from planner.units import GIB, MIB
from tests.planner.hand_made import LAST_FORWARD, LOADED, X, laid_out, trained

TORCH_2_0 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB (GPU 0; 23.64 GiB total capacity; "
    "22.68 GiB already allocated; 983.06 MiB free; 22.69 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management"
)
TORCH_2_1 = (
    "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 1 has a total capacty of 23.69 GiB of which 7.11 GiB is free. "
    "Process 2006998 has 256.00 MiB memory in use. Including non-PyTorch memory, this process has 16.31 GiB memory in "
    "use. Of the allocated memory 16.01 GiB is allocated by PyTorch, and 7.47 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation."
)
TORCH_2_9 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.15 GiB. GPU 0 has a total capacity of 39.56 GiB "
    "of which 1.80 GiB is free. Including non-PyTorch memory, this process has 37.61 GiB memory in use. Of the "
    "allocated memory 31.66 GiB is allocated by PyTorch, with 10.00 MiB allocated in private pools (e.g., CUDA "
    "Graphs), and 4.11 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
    "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
OTHERS = (
    "CUDA out of memory. Tried to allocate 876.00 MiB. GPU 0 has a total capacity of 23.68 GiB of which 251.06 MiB is "
    "free. Process 26126 has 9.25 GiB memory in use. Process 27 has 1.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 12.98 GiB memory in use. Of the allocated memory 12.65 GiB is allocated by PyTorch, and "
    "77.68 MiB is reserved by PyTorch but unallocated."
)
IN_A_CONTAINER = TORCH_2_9.replace("Including non-PyTorch memory, this process has", "Process 51 has")
CAPPED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 50.00 GiB is "
    "free. 23.50 GiB allowed; Including non-PyTorch memory, this process has 22.90 GiB memory in use. Of the "
    "allocated memory 22.00 GiB is allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
)


def gib(value: float) -> int:
    return round(value * GIB)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (TORCH_2_0, (GIB, 0, gib(23.64), gib(22.68), gib(22.69) - gib(22.68), 0)),
        (TORCH_2_1, (8 * GIB, 1, gib(23.69), gib(16.01), round(7.47 * MIB), 256 * MIB)),
        (TORCH_2_9, (gib(3.15), 0, gib(39.56), gib(31.66), gib(4.11), 0)),
        (OTHERS, (876 * MIB, 0, gib(23.68), gib(12.65), round(77.68 * MIB), gib(10.25))),
        (IN_A_CONTAINER, (gib(3.15), 0, gib(39.56), gib(31.66), gib(4.11), 0)),
        (CAPPED, (2 * GIB, 0, gib(23.5), 22 * GIB, 10 * MIB, 0)),
        (TORCH_2_1.replace("CUDA", "HIP"), (8 * GIB, 1, gib(23.69), gib(16.01), round(7.47 * MIB), 256 * MIB)),
    ],
)
def test_every_wording(text: str, wanted: tuple[int, ...]) -> None:
    found = parse_oom_message(text)
    told = (found.requested_bytes, found.gpu, found.capacity_bytes, found.allocated_bytes, found.unallocated_bytes)
    assert (*told, found.others_bytes) == wanted
    assert found.free_bytes is not None
    json.dumps(explain(found).to_json())


@pytest.mark.parametrize(
    ("text", "cause", "says"),
    [
        (TORCH_2_0, "need", "0.03 GiB more"),
        (TORCH_2_9, "fragmentation", "4.1 GiB that no tensor used"),
        (OTHERS, "others", "10.2 GiB of the card"),
        (TORCH_2_1, "need", "more than was free"),
    ],
)
def test_what_it_was(text: str, cause: str, says: str) -> None:
    found = explain(parse_oom_message(text))
    assert found.cause == cause and says in found.why
    assert ("expandable_segments:True" in " ".join(found.advice)) == (cause == "fragmentation")
    assert any(line.startswith("Fragmentation") for line in render(found)) == (cause == "fragmentation")


def test_what_the_message_does_not_say_is_not_claimed() -> None:
    bare = render(explain(parse_oom_message("CUDA out of memory. Tried to allocate 2.00 GiB")))
    assert not any("ragmentation" in line for line in bare) and any("does not say" in line for line in bare)
    others = render(explain(parse_oom_message(OTHERS)))
    assert any("other processes held" in line and "ragmentation" not in line for line in others)


def test_log_lines_rank_marks_and_wraps_around_it() -> None:
    wrapped = TORCH_2_9.replace(" is free. ", " is free.\n[rank1]: ")
    wrapped = wrapped.replace("39.56 GiB of", "39.56\n[rank1]:   GiB of")
    log = (
        "steps:   3%|x | 3/100 [00:10<05:00]\n+ export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/data/x/train.py", line 612, in main\n'
        '[rank1]:     optimizer.step()\n[rank1]:   File "/v/site-packages/torch/optim/adamw.py", line 9, in step\n'
        f"[rank1]: {wrapped}\n[rank1]: more\n{TORCH_2_9}\n"
    )
    found = parse_oom_message(log)
    assert (found.capacity_bytes, found.allocated_bytes) == (gib(39.56), gib(31.66))
    assert found.expandable_segments is True and found.messages == 2
    assert found.frame == "x/train.py:612 in main" and found.hint == "optimizer"
    told = explain(found)
    assert "empty the cache" in told.advice[0] and "expandable" not in " ".join(told.advice)
    assert parse_oom_message(TORCH_2_9).expandable_segments is None, "the message's own advice sets nothing"


@pytest.mark.parametrize(
    ("text", "says"),
    [("loss 0.3", "there is no"), ("the queue was Killed by its owner", "there is no"), ("", "there is no")],
)
def test_what_is_no_message(text: str, says: str) -> None:
    with pytest.raises(VplanError, match=says):
        parse_oom_message(text)


@pytest.mark.parametrize("message", [TORCH_2_0, TORCH_2_1, TORCH_2_9, OTHERS, CAPPED])
def test_a_message_is_read_however_it_is_wrapped(message: str) -> None:
    """Terminals break lines in words, and what is pasted has lost the blank that stood there."""
    numbers = parse_oom_message(message)
    for width in range(40, 72, 3):
        for wrapped in (
            "\n".join(message[at : at + width].strip() for at in range(0, len(message), width)),
            "".join(message[at : at + width].strip() for at in range(0, len(message), width)),
        ):
            assert parse_oom_message(wrapped) == numbers
    assert parse_oom_message(message.replace("capacity of", "capacityof").replace("GPU 0; ", "GPU 0;\n")) == numbers


def test_a_full_card_is_not_fragmented_alone() -> None:
    """Where tensors hold most of it, expandable segments do not help for long."""
    gaps = (
        "983.69 MiB is free. Process 99 has 22.68 GiB memory in use. Of the allocated memory {} is allocated by PyTorch"
    )
    text = f"CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacityof 23.64 GiB of which {gaps}"
    text += ", and 1.36 GiB is reserved by PyTorch but unallocated."
    full, half = (
        explain(parse_oom_message(text.format("20.50 GiB"))),
        explain(parse_oom_message(text.format("9.50 GiB"))),
    )
    assert full.cause == "fragmentation" and "20.5 GiB of 23.6 GiB" in full.why
    assert [any("checkpointing" in advice for advice in each.advice) for each in (full, half)] == [True, False]


@given(st.text(max_size=200), st.text(max_size=200))
def test_nothing_around_it_breaks_it(before: str, behind: str) -> None:
    found = parse_oom_message(f"{before}\n{OTHERS}\n{behind}")
    assert found.requested_bytes == 876 * MIB


@given(st.integers(1, 1 << 40))
def test_what_is_printed_is_read_back(nbytes: int) -> None:
    text = format_size(nbytes)
    found = parse_oom_message(f"CUDA out of memory. Tried to allocate {text}.")
    assert abs(found.requested_bytes - nbytes) <= max(1, nbytes * 0.005)
    assert allocation_bytes(nbytes) >= nbytes


@pytest.mark.parametrize(
    ("nbytes", "asked"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB)],
)
def test_requests_round_as_the_allocator_rounds(nbytes: int, asked: int) -> None:
    assert allocation_bytes(nbytes) == asked


def test_the_tensor_and_the_moment_are_found_in_the_job() -> None:
    run = laid_out(gradient_checkpointing="full")
    stages = trained(run)
    told = TORCH_2_0.replace("1024.00 MiB", format_size(2 * X))
    before = LOADED + LAST_FORWARD - 2 * X
    near = told.replace("22.68 GiB already", f"{before / MIB:.2f} MiB already")
    found = explain(parse_oom_message(near), stages)
    assert found.asked
    assert found.asked[0].nbytes == 2 * X and "temporary" in found.asked[0].tensor
    assert abs(found.asked[0].allocated_bytes - before) < X
    assert found.asked[0].phase in ("first_step", "train") and "blocks." in found.asked[0].moment
    assert any("In this job" in line for line in render(found))
    assert not any("checkpointing" in advice for advice in found.advice), "it checkpoints already"
    strange = explain(parse_oom_message(told.replace(format_size(2 * X), "777.00 MiB")), stages)
    assert strange.asked == () and any("No tensor of this job" in line for line in render(strange))


def test_a_request_is_found_with_what_was_allocated_before_it() -> None:
    """Every request of a run, told as torch would tell it, is found at its own moment."""
    run = laid_out()
    (stage,) = [entry for entry in replay_stages(run) if entry.phase == "optimizer"]
    message = dataclasses.replace(parse_oom_message(TORCH_2_0), requested_text="2.00 MiB", allocated_bytes=0)
    found = explain(message, [stage]).asked
    assert found and all(one.phase == "optimizer" for one in found)


def test_check_reads_a_log_with_and_without_the_command(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"step 9\n{TORCH_2_0}\n")
    words = ["check", "--error", str(log)]
    alone = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    assert alone["asked"] is None and alone["error"]["requested_bytes"] == GIB
    piped = CliRunner().invoke(cli, ["check", "--error", "-", "--json"], input=log.read_bytes() + b"\xff")
    assert json.loads(piped.stdout) == alone
    pasted = CliRunner().invoke(cli, ["check", "--error", log.read_text(), "--json"])
    assert json.loads(pasted.stdout) == alone
    as_file = CliRunner().invoke(cli, ["check", str(log), "--gpu", "24GB", "--json"])
    assert as_file.exit_code == 0 and json.loads(as_file.stdout) == alone
    launch = ["torchrun", "--nproc_per_node=1", "-m", "scripts.train_unet"]
    told = CliRunner().invoke(cli, [*words, "--", *launch, "--unet_config_path", "configs/unet/stage1.yaml"])
    assert told.exit_code == 0 and "decode: temporary" in told.stdout  # the card is the message's own capacity
    log.write_text("all is well")
    refused = CliRunner().invoke(cli, words)
    assert refused.exit_code == 1 and refused.stderr.count("\n") == 2


def test_the_request_that_ended_latentsync_is_the_decoded_frames_in_fp32() -> None:
    """#278: 1,024 MiB at the first validation: 16 frames x 256 channels x 256 x 256 in fp32, of the VAE's decoder."""
    job = Job(model="latentsync-1.6-stage1", method="full", frames=16, height=256, width=256)
    machine = Machine(gpu="rtx4090", host_ram=64 * GIB)
    strategy = Strategy.read(
        {
            "weights_dtype": "fp32",
            "autocast": "fp16",
            "gradient_checkpointing": "full",
            "vae_dtype": "fp16",
            "text_encoder": "resident",
            "vae": "resident",
            "sharding": "ddp",
            "grad_buckets": "copy",
            "validation_mode": "on",
            "expandable_segments": False,
        }
    )
    strategy = resolve(job, strategy, machine)
    model = lookup.model(job.model)
    configuration = Configuration.of(job, strategy, machine)
    known = recordings.load_facts(configuration, model, card_lookup.gpu("rtx4090"))
    run = lay_out(configuration, known, grid(model, job), "latentsync")
    message = dataclasses.replace(parse_oom_message(TORCH_2_0), allocated_bytes=None)
    found = explain(message, replay_stages(run))
    assert found.asked and found.asked[0].phase == "decode" and found.asked[0].nbytes == 16 * 256 * 256 * 256 * 4
    assert "slicing" in " ".join(found.advice)


@pytest.mark.parametrize("text", ["Killed", "137", "exit 137", "train.sh: line 3:  4242 Killed   python train.py",
                                  "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch"])  # fmt: skip
def test_a_process_that_the_kernel_ended_lacked_host_ram(text: str) -> None:
    answer = CliRunner().invoke(cli, ["check", "--error", text])
    assert answer.exit_code == 0, answer.output
    first, why, *helps = answer.output.splitlines()
    assert first == "The process was killed." and why.startswith("Host RAM:") and "exit code 137" in why
    assert any("--mem" in line for line in helps)


def test_a_message_that_was_cut_says_what_its_end_would() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    lines = render(explain(parse_oom_message(text)))
    assert "The card was full: it had no 2.00 GiB left, and the message does not say what held the rest." in lines
    assert any("paste the message to its end" in line and "add the command" in line for line in lines)
    assert not any("unknown" in line for line in lines)


CARD_OF = "GPU 0 has a total capacity of"


def test_frames_of_windows_and_of_debian_are_not_torch_s_own() -> None:
    text = (
        'File "E:\\ai-toolkit\\toolkit\\util\\quantize.py", line 308, in quantize_model\n    block.to("cpu")\n'
        '  File "C:\\envs\\a\\lib\\site-packages\\torch\\nn\\module.py", line 1371, in to\n    self._apply(c)\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
    )
    assert parse_oom_message(text).frame == "util/quantize.py:308 in quantize_model"
    text = text.replace("C:\\envs\\a\\lib\\site-packages\\torch\\nn\\", "/usr/lib/python3/dist-packages/torch/nn/")
    assert parse_oom_message(text).frame == "util/quantize.py:308 in quantize_model"


def test_a_message_that_ends_behind_what_is_free_proves_no_cause() -> None:
    text = f"CUDA out of memory. Tried to allocate 126.00 MiB. {CARD_OF} 23.65 GiB of which 61 MiB is free."
    found = explain(parse_oom_message(text))
    assert (found.cause, "ends before it says what held the rest" in found.why) == ("unknown", True)


def test_what_a_desktop_held_is_in_the_list() -> None:
    text = (  # https://github.com/Nerogar/OneTrainer/issues/841
        f"CUDA out of memory. Tried to allocate 108.00 MiB. {CARD_OF} 23.51 GiB of which 98.31 MiB is free. Including "
        "non-PyTorch memory, this process has 20.99 GiB memory in use. Of the allocated memory 20.58 GiB is allocated "
        "by PyTorch, and 13.10 MiB is reserved by PyTorch but unallocated."
    )
    assert any(line.split()[:3] == ["other", "processes", "2.2"] for line in render(explain(parse_oom_message(text))))


def test_a_log_that_powershell_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_bytes("CUDA out of memory. Tried to allocate 20.00 MiB.".encode("utf-16"))
    answer = CliRunner().invoke(cli, ["check", "--error", str(tmp_path / "train.log")])
    assert answer.exit_code == 0 and "20.00 MiB could not be allocated" in answer.stdout
