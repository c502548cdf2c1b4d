"""The start of ranks is held against the plan: each way to go wrong without a word is refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from planner.errors import VplanError  # noqa: E402
from planner.spec.job import Machine, Strategy  # noqa: E402
from trainers.parallel.start import backend_of, check  # noqa: E402


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of two ranks that no one else is in, by torch's own backend for that."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def started(kind: DistributedType, ranks: int, sharding: str, backend: str = "fake", gpus: int = 2) -> None:
    found = SimpleNamespace(num_processes=ranks, distributed_type=kind)
    check(found, Strategy(sharding=sharding), Machine(gpu="24GB", gpus=gpus), backend)  # type: ignore[arg-type]


def test_a_start_as_planned(group: None) -> None:
    started(DistributedType.MULTI_CPU, 2, "ddp")
    started(DistributedType.MULTI_GPU, 2, "fsdp")
    started(DistributedType.DEEPSPEED, 2, "zero-3")
    started(DistributedType.NO, 1, "none", gpus=1)


def test_what_waits_in_host_ram_is_gathered_there() -> None:
    gpu, shares = torch.device("cuda"), Strategy(sharding="fsdp")
    away = shares.replace(offload_params="cpu", offload_optimizer="cpu")
    assert [backend_of(each, gpu) for each in (shares, away)] == ["nccl", "cuda:nccl,cpu:gloo"]
    assert backend_of(away, torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(
    ("kind", "ranks", "sharding", "backend", "named"),
    [
        (DistributedType.NO, 1, "ddp", "fake", "the plan is for 2 processes, but accelerate found 1"),
        (DistributedType.MULTI_CPU, 4, "ddp", "fake", "the plan is for 2 processes, but accelerate found 4"),
        (DistributedType.NO, 2, "ddp", "fake", "sharding ddp needs distributed type MULTI_CPU or MULTI_GPU, not NO"),
        (DistributedType.FSDP, 2, "fsdp", "fake", "not FSDP"),
        (DistributedType.DEEPSPEED, 2, "ddp", "fake", "not DEEPSPEED"),
        (DistributedType.MULTI_GPU, 2, "zero-2", "fake", "sharding zero-2 needs distributed type DEEPSPEED"),
        (DistributedType.MULTI_GPU, 2, "ddp", "nccl", "ranks talk through fake, and this device needs nccl"),
    ],
)
def test_a_start_that_is_another_is_refused(
    group: None, kind: DistributedType, ranks: int, sharding: str, backend: str, named: str
) -> None:
    with pytest.raises(VplanError) as refused:
        started(kind, ranks, sharding, backend)
    assert named in refused.value.message and refused.value.exit_code == 4


def test_ranks_that_have_no_group_are_refused(group: None) -> None:
    dist.destroy_process_group()
    with pytest.raises(VplanError, match="no process group of 2 ranks"):
        started(DistributedType.MULTI_CPU, 2, "ddp")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    with pytest.raises(VplanError, match="no process group of 2 ranks"):
        started(DistributedType.MULTI_CPU, 2, "ddp")
