"""Two ranks train as one does: with the same global batch the losses and weights are the same, however it is split,
before and after a resume."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

from planner.launch.launch import RunRequest  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from tests.contract import training  # noqa: E402
from tests.contract.ranks import run  # noqa: E402
from tests.covering import in_turns  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.parallel.start import start  # noqa: E402

SHARDINGS = ["ddp", "zero-1", "zero-2", "zero-3", "fsdp"]
TOLERANCE = 1e-5
STEPS = 5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        yield runs.Place(root, "wan")


def alone(place: runs.Place, strategy: dict[str, Any], **job: Any) -> Path:
    """One rank with the whole global batch."""
    output = place.root / "alone" / "-".join(map(str, [*strategy.items(), *job.items()]))
    if not output.exists():
        plan = place.plan(strategy, batch_size=2, **job)
        check(training.train(place.request(output, plan, steps=STEPS).to_json(), world=1))
    return output


def request(place: runs.Place, output: Path, sharding: str, strategy: dict[str, Any], **said: Any) -> dict[str, Any]:
    job = said.pop("job", {})
    plan = place.plan({"adapter_dtype": "fp32", **strategy, "sharding": sharding}, gpus=2, **job)
    return place.request(output, plan, steps=said.pop("steps", STEPS), **said).to_json()


def check(told: list[dict[str, Any]]) -> None:
    assert [rank["outcome"] for rank in told] == ["ok"] * len(told), told


def compare(found: Path, wanted: Path) -> None:
    assert runs.losses(found) == pytest.approx(runs.losses(wanted), abs=TOLERANCE)
    ours, theirs = runs.tensors(found / "final"), runs.tensors(wanted / "final")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name].float(), tensor.float(), atol=2e-4), name


FROZEN_TOO = ("zero-3", "lora")
"""What is frozen is split as well, beside the adapters."""


@pytest.mark.parametrize(("sharding", "method"), [*in_turns(SHARDINGS, ["lora", "full"]), FROZEN_TOO])
def test_two_ranks_train_what_one_does_and_go_on_from_a_checkpoint(
    place: runs.Place, tmp_path: Path, sharding: str, method: str
) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    first = request(place, once, sharding, {}, job={"method": method}, checkpoint_every=STEPS)
    half = request(place, twice, sharding, {}, job={"method": method}, steps=3, checkpoint_every=3)
    last = {**half, "steps": STEPS, "resume": str(twice / "checkpoints" / "step-00000003")}
    for asked in (first, half, last):
        check(training.train(asked))
    compare(once, alone(place, {}, method=method))
    assert runs.losses(once) == runs.losses(twice)
    a, b = runs.tensors(once / "final"), runs.tensors(twice / "final")
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def across(place: runs.Place, output: Path, strategy: dict[str, Any], ranks: int, **said: Any) -> dict[str, Any]:
    """A request for full training with four samples per step on ``ranks`` ranks, in two or more micro-batches."""
    batch_size = said.pop("batch_size", 1 if ranks == 4 else 2)
    fields = {**strategy, "gradient_accumulation": 4 // (ranks * batch_size)}
    plan = place.plan(fields, gpus=ranks, method="full", batch_size=batch_size)
    return place.request(output, plan, **{"steps": STEPS, "checkpoint_every": 3, **said}).to_json()


@pytest.mark.parametrize(
    "strategy",
    [
        {"sharding": "fsdp", "ema": "gpu"},
        {"sharding": "zero-1", "ema": "cpu"},
        {"sharding": "zero-2", "offload_optimizer": "cpu"},
        {"sharding": "zero-3"},
    ],
)
def test_other_numbers_of_ranks_go_on_from_a_checkpoint(
    place: runs.Place, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    """Two ranks write the checkpoint, one or four resume it: losses and weights are as when the two continue."""
    check(training.train(across(place, tmp_path / "2", strategy, 2)))
    for ranks in (1, 4):
        compare(taken_up(place, tmp_path, 2, strategy, ranks), tmp_path / "2")


def taken_up(place: runs.Place, folder: Path, writers: int, strategy: dict[str, Any], ranks: int, **said: Any) -> Path:
    """Resumes a checkpoint of ``writers`` ranks on ``ranks`` ranks; returns the output folder."""
    output = folder / f"{ranks}-again"
    shutil.copytree(folder / str(writers), output)
    shutil.rmtree(output / "final")
    resume = str(output / "checkpoints" / "step-00000003")
    check(training.train(across(place, output, strategy, ranks, resume=resume, **said), world=ranks))
    return output


def test_two_copies_of_a_sharded_model_train_what_one_rank_does(place: runs.Place, tmp_path: Path) -> None:
    """Four ranks in two replicas of two; one rank resumes their checkpoint, as they do, with bit-identical results."""
    strategy = {"sharding": "fsdp", "ema": "gpu"}
    copies = {**strategy, "fsdp_replicas": 2}
    check(training.train(across(place, tmp_path / "4", copies, 4), world=4))
    alike = taken_up(place, tmp_path, 4, copies, 4)
    assert runs.losses(alike) == runs.losses(tmp_path / "4")
    compare(taken_up(place, tmp_path, 4, strategy, 1, batch_size=1), alike)
    (checkpoint,) = (tmp_path / "4" / "checkpoints").glob("step-00000003")
    written = {path.name.split("-")[1] for path in (checkpoint / "state").glob("rank-*.safetensors")}
    assert written == {"00000", "00001"}  # of the first copy alone


def test_states_that_only_as_many_ranks_can_read_are_refused_by_name(place: runs.Place, tmp_path: Path) -> None:
    """8-bit states have a constant for each block of a rank's share."""
    strategy = {"sharding": "zero-2", "optimizer": "adamw-8bit"}
    check(training.train(across(place, tmp_path, strategy, 2, steps=3)))
    resume = str(tmp_path / "checkpoints" / "step-00000003")
    (told,) = training.train(across(place, tmp_path, strategy, 1, resume=resume), world=1)
    assert told["outcome"] == "refused" and "written with ranks 2, but the plan has 1" in told["message"]
    check(training.train(across(place, tmp_path, strategy, 2, resume=resume)))


OFFLOADED = {"offload_optimizer": "cpu", "offload_params": "cpu"}
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {"gradient_accumulation": 2, "grad_buckets": "copy", "ema": "gpu"}),
    ("zero-1", {"gradient_accumulation": 2}),
    ("zero-2", {"gradient_accumulation": 2, "ema": "cpu", "offload_optimizer": "cpu"}),
    ("zero-3", {"gradient_accumulation": 2, "gradient_checkpointing": "full", **OFFLOADED}),
    ("fsdp", {"gradient_accumulation": 2, "ema": "gpu", "gradient_checkpointing": "full"}),
    ("fsdp", OFFLOADED),
]


@pytest.mark.parametrize(("sharding", "strategy"), STRATEGIES)
def test_what_else_a_plan_says_holds_at_two_ranks(
    place: runs.Place, tmp_path: Path, sharding: str, strategy: dict[str, Any]
) -> None:
    """Accumulation, moving averages and offload, resumed from a checkpoint in the middle."""
    half = request(place, tmp_path, sharding, strategy, job={"method": "full"}, steps=3, checkpoint_every=3)
    last = {**half, "steps": STEPS, "resume": str(tmp_path / "checkpoints" / "step-00000003")}
    for asked in (half, last):
        check(training.train(asked))
    same = {name: strategy[name] for name in ("gradient_accumulation", "ema") if name in strategy}
    compare(tmp_path, alone(place, same, method="full"))


def test_two_ranks_that_share_every_sample_train_what_one_does(place: runs.Place, tmp_path: Path) -> None:
    """Each rank has half of the tokens; test_context_parallel.py checks their bytes."""
    split = {"context_parallel": 2, "gradient_checkpointing": "full"}
    check(training.train(request(place, tmp_path, "none", split, job={"method": "full", "batch_size": 2})))
    compare(tmp_path, alone(place, {}, method="full"))


def test_ranks_that_read_different_weights_are_refused(place: runs.Place, tmp_path: Path) -> None:
    """If a node's model folder has another version than the others', both ranks report it with a fix."""
    shutil.copytree(place.root / "model", tmp_path / "model")
    (file,) = (tmp_path / "model").rglob("*.safetensors")
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    asked = request(place, tmp_path / "run", "ddp", {}, job={"method": "full"})
    requests = [asked, {**asked, "weights": str(tmp_path / "model")}]
    told = run(functools.partial(_train_on_two_nodes, requests))
    assert [(rank["outcome"], rank["message"]) for rank in told] == [
        ("refused", "the ranks have read different weights to begin with")
    ] * 2
    assert all("the same weights" in rank["fix"] and rank["exit_code"] == 4 for rank in told)


def _train_on_two_nodes(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Each rank trains with its own request."""
    return runs.train(RunRequest.read(requests[int(os.environ["RANK"])]))


@pytest.mark.parametrize("sharding", ["ddp", "zero-1"])
def test_ranks_wait_for_one_that_writes_for_hours(sharding: str) -> None:
    """Not only for the 10 or 30 minutes after which torch would abort: 280 GB at 20 MB/s take 4 hours."""
    told = run(functools.partial(_wait_in_seconds, sharding))
    assert all(each["seconds"] >= 280e9 / 20e6 for each in told), told


def _wait_in_seconds(sharding: str) -> dict[str, Any]:
    """The timeout of the process group for the barriers of a checkpoint."""
    job, strategy = Job(model="sdxl", frames=1, height=1024, width=1024), Strategy(sharding=sharding)
    device = torch.device("cpu")
    start(job, strategy, Machine(gpu="24GB", gpus=2), device, Path())
    group = torch.distributed.distributed_c10d._get_default_group()
    return {"seconds": group._get_backend(device).options._timeout.total_seconds()}


def test_two_ranks_run_the_same_expert_and_wait_for_no_gradient_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including all of its micro-batches."""
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    place = runs.Pair(tmp_path / "pair")
    whole = place.plan({"gradient_accumulation": 2}, batch_size=2, experts="both")
    assert runs.train(place.request(tmp_path / "whole", whole, steps=STEPS))["outcome"] == "ok"
    turns = [line["experts"] for line in runs.lines(tmp_path / "whole")]
    assert set(turns) == {"high", "low"}
    split = {"gradient_accumulation": 2, "inactive_expert": "cpu"}
    check(training.train(request(place, tmp_path / "split", "ddp", split, job={"experts": "both"})))
    assert [line["experts"] for line in runs.lines(tmp_path / "split")] == turns
    compare(tmp_path / "split", tmp_path / "whole")


def is_built() -> bool:
    """Whether async_io is already compiled for this DeepSpeed and ninja; compiling it here would take minutes."""
    root, source = Path(cpp_extension.get_default_build_root()), importlib.util.find_spec("deepspeed")
    assert source and source.origin
    folders = [next(root.glob(f"*/{name}/build.ninja"), root).parent for name in ("pin_memory", "async_io")]
    if shutil.which("ninja") is None or root.parent in folders:
        return False
    if any(str(Path(source.origin).parent) not in (folder / "build.ninja").read_text() for folder in folders):
        return False
    looks = [subprocess.run(["ninja", "-n"], cwd=folder, capture_output=True, check=False) for folder in folders]
    return all(b"no work to do" in look.stdout for look in looks)


@pytest.mark.skipif(not is_built(), reason="DeepSpeed's async_io is not built here")
def test_what_is_on_a_drive_trains_as_in_host_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and states are files there, and resume from a checkpoint. One weight in 100,000 has almost no gradient,
    so that Adam moves it differently."""
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    wide = runs.Place(tmp_path, "wide")
    strategy = {"offload_optimizer": "nvme"}
    half = request(wide, tmp_path / "nvme", "zero-3", strategy, job={"method": "full"}, steps=2, checkpoint_every=2)
    check(training.train(half))
    last = {**half, "steps": 4, "resume": str(tmp_path / "nvme" / "checkpoints" / "step-00000002")}
    told = training.train(last)
    check(told)
    plan = wide.plan({}, method="full", batch_size=2)  # the shares of its trained weights are no multiples of 512 bytes
    assert runs.train(wide.request(tmp_path / "alone", plan))["outcome"] == "ok"
    assert runs.losses(tmp_path / "nvme") == pytest.approx(runs.losses(tmp_path / "alone"), abs=TOLERANCE)
    ours, theirs = (runs.tensors(tmp_path / name / "final") for name in ("nvme", "alone"))
    assert all((ours[name] - tensor).abs().mean() < 1e-6 for name, tensor in theirs.items())
    trained = sum(tensor.numel() for tensor in theirs.values())
    assert 3 * 4 * trained <= told[0]["drive_bytes"] <= 4 * 4 * trained + 2**20
    assert not (tmp_path / "nvme" / "offload").exists()


@pytest.mark.parametrize(("sharding", "gpus", "world"), [("ddp", 2, 1), ("fsdp", 2, 1), ("none", 1, 2)])
def test_a_start_that_is_not_the_plans_is_refused(
    place: runs.Place, tmp_path: Path, sharding: str, gpus: int, world: int
) -> None:
    """Without this, each would silently train something else than the plan."""
    plan = place.plan({"sharding": sharding}, gpus=gpus)
    for told in training.train(place.request(tmp_path, plan).to_json(), world=world):
        assert told["outcome"] == "refused"
        assert f"the plan is for {gpus} processes, but accelerate found {world}" in told["message"]
    assert not (tmp_path / "checkpoints").exists()
