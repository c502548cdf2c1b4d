"""Swapped blocks that the ranks of a computer hold together: the same training to the bit, the bytes there once, and
nothing left of them, however a rank ends."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from planner.launch.launch import RunRequest  # noqa: E402
from planner.units import MIB  # noqa: E402
from tests.contract import ranks  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.memory import shared_ram  # noqa: E402

SWAPS = {"gradient_checkpointing": "full", "sharding": "ddp", "adapter_dtype": "fp32"}
STEPS = 4
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files are Linux's")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(folder / "home"))
        yield folder


@pytest.fixture(scope="module")
def place(root: Path) -> runs.Place:
    return runs.Place(root / "wan", "wan")


@pytest.fixture(scope="module")
def pair(root: Path) -> runs.Pair:
    return runs.Pair(root / "pair")


def request(place: runs.Place, output: Path, strategy: dict[str, Any], gpus: int = 2, **said: Any) -> dict[str, Any]:
    job = said.pop("job", {})
    plan = place.plan({**SWAPS, **strategy}, gpus=gpus, **job)
    return place.request(output, plan, **{"steps": STEPS, **said}).to_json()


def train(asked: dict[str, Any], shares: bool = True, world: int = 2) -> list[dict[str, Any]]:
    told = ranks.run(functools.partial(_train, asked, shares), world)
    assert [rank["outcome"] for rank in told] == ["ok"] * world, told
    return told


def _train(asked: dict[str, Any], shares: bool) -> dict[str, Any]:
    """Trains in a rank, whose system has no anonymous files unless it ``shares``; with what it mapped and warned of."""
    if not shares:
        del os.memfd_create
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        told = runs.train(RunRequest.read(asked))
    told["mapped"] = _mapped_files()
    told["warned"] = [str(each.message) for each in said if "share host RAM" in str(each.message)]
    return told


def _mapped_files() -> set[tuple[str, int]]:
    """(inode, bytes) of the mappings of shared blocks."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "vplan-swapped-blocks" in line]
    found: dict[str, int] = {}
    for line in lines:
        span, _, _, _, inode, *_ = line.split()
        start, end = (int(each, 16) for each in span.split("-"))
        found[inode] = found.get(inode, 0) + end - start
    return set(found.items())


def same(one: Path, other: Path) -> None:
    assert runs.losses(one) == runs.losses(other) and len(runs.losses(one)) == STEPS
    a, b = runs.tensors(one / "final"), runs.tensors(other / "final")
    assert a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


FORMATS: list[dict[str, Any]] = [
    {"swap_blocks": 1},
    {"swap_blocks": 1, "weights_dtype": "fp8", "compute_dtype": "bf16", "autocast": "bf16"},
    {"swap_blocks": 1, "weights_dtype": "int8", "compute_dtype": "bf16", "autocast": "bf16"},
    {"swap_blocks": 1, "weights_dtype": "nf4", "compute_dtype": "bf16", "autocast": "bf16"},
]


@pytest.mark.parametrize("strategy", FORMATS, ids=lambda strategy: strategy.get("weights_dtype", "fp32"))
def test_losses_and_weights_are_the_same_to_the_bit_with_and_without(
    place: runs.Place, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    """Both ranks map one file; a system that has none keeps a copy in each rank, and says so once."""
    together = train(request(place, tmp_path / "together", strategy))
    apart = train(request(place, tmp_path / "apart", strategy), shares=False)
    (mapped,) = together[0]["mapped"]
    assert together[1]["mapped"] == {mapped} and not any(rank["mapped"] for rank in apart)
    assert [len(rank["warned"]) for rank in apart] == [1, 0] and not any(rank["warned"] for rank in together)
    same(tmp_path / "together", tmp_path / "apart")


def test_both_experts_swap_from_a_file_each(pair: runs.Pair, tmp_path: Path) -> None:
    strategy, job = {"swap_blocks": 1, "inactive_expert": "cpu"}, {"experts": "both"}
    together = train(request(pair, tmp_path / "together", strategy, job=job))
    train(request(pair, tmp_path / "apart", strategy, job=job), shares=False)
    assert len(together[0]["mapped"]) == 2 and together[0]["mapped"] == together[1]["mapped"]
    same(tmp_path / "together", tmp_path / "apart")


@pytest.mark.parametrize("killed", [0, 1], ids=["the rank that made the file", "the other one"])
def test_a_killed_rank_leaves_nothing_and_the_run_goes_on_to_the_same_losses(
    place: runs.Place, tmp_path: Path, killed: int
) -> None:
    asked = request(place, tmp_path / "killed", {"swap_blocks": 1})
    codes = ranks.exit_codes(functools.partial(_train_until_killed, asked, killed, str(tmp_path)))
    assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 1  # which lost its partner
    mapped = [(tmp_path / f"mapped-{rank}").read_text() for rank in (0, 1)]
    assert mapped[0] == mapped[1] != ""
    assert mapped[0] not in _inodes_of_all_processes()
    resume = str(tmp_path / "killed" / "checkpoints" / "step-00000002")
    train({**asked, "resume": resume})
    train(request(place, tmp_path / "whole", {"swap_blocks": 1}))
    same(tmp_path / "killed", tmp_path / "whole")


def _train_until_killed(asked: dict[str, Any], killed: int, folder: str) -> None:
    """Trains in a rank; one of the ranks kills itself before its last step."""
    from trainers.train import TrainingRun

    rank, step = int(os.environ["RANK"]), TrainingRun._step

    def step_or_die(run: TrainingRun, number: int) -> None:
        if number == STEPS - 1:
            ((inode, _),) = _mapped_files()
            Path(folder, f"mapped-{rank}").write_text(inode)
            torch.distributed.barrier()
            if rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
        step(run, number)

    TrainingRun._step = step_or_die
    runs.train(RunRequest.read(asked))


def _inodes_of_all_processes() -> set[str]:
    """The inodes of the shared blocks that any process of this machine maps."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= {line.split()[4] for line in file.read_text().splitlines() if "vplan-swapped-blocks" in line}
    return found


SIZE = 48 * MIB


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_hold_the_bytes_once(root: Path, world: int) -> None:
    """By the kernel's count: of what processes share, each has its part (PSS), though all have it mapped (RSS). What a
    probe tells of a rank is without the parts of the others."""
    told = ranks.run(_hold, world)
    assert all(rank["sum"] == told[0]["sum"] for rank in told)
    assert sum(rank["held"] for rank in told) == pytest.approx(4 * SIZE, rel=0.01)
    assert all(4 * SIZE <= rank["resident"] <= 4 * SIZE + MIB for rank in told)
    assert [rank["elsewhere"] for rank in told] == [(world - 1) * 4 * SIZE // world] * world


def _hold() -> dict[str, int]:
    torch.distributed.init_process_group("gloo")
    ram = shared_ram.share_ram(CPU)
    assert ram is not None
    taken = []
    for turn in range(4):
        buffer, fills = ram.take(SIZE)
        if fills:
            buffer.random_(0, 256, generator=torch.Generator().manual_seed(turn))
        taken.append(buffer)
    ram.complete()
    resident = _mapped_bytes("Rss")
    total = sum(int(buffer.sum()) for buffer in taken)
    torch.distributed.barrier()
    held = _mapped_bytes("Pss")
    torch.distributed.barrier()
    return {"sum": total, "held": held, "resident": resident, "elsewhere": shared_ram.counted_elsewhere()}


def test_all_ranks_keep_their_own_where_one_cannot_pin_the_file(root: Path) -> None:
    told = ranks.run(_pin_in_rank_0)
    assert [rank["shares"] for rank in told] == [False, False]
    assert [len(rank["warned"]) for rank in told] == [1, 0]
    assert "could not pin" in told[0]["warned"][0] and "error 801" in told[0]["warned"][0]
    assert not any(rank["mapped"] for rank in told)


def _pin_in_rank_0() -> dict[str, Any]:
    """Asks for pinned RAM of a driver that pins in the first rank and refuses in the other (cudaErrorNotSupported)."""
    torch.distributed.init_process_group("gloo")
    code = 801 if torch.distributed.get_rank() else 0
    driver = SimpleNamespace(cudaHostRegister=lambda *_: code, cudaHostUnregister=lambda *_: 0)
    torch.cuda.cudart = lambda: driver
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ram = shared_ram.share_ram(torch.device("cuda"))
    gc.collect()
    return {"shares": ram is not None, "warned": [str(each.message) for each in said], "mapped": _mapped_files()}


def _mapped_bytes(counter: str) -> int:
    """Bytes of this process's mappings of shared blocks, by one of the kernel's counters."""
    text = Path("/proc/self/smaps").read_text()
    parts = re.findall(rf"vplan-swapped-blocks.*?\n{counter}: +(\d+) kB", text, re.DOTALL)
    return 1024 * sum(map(int, parts))
