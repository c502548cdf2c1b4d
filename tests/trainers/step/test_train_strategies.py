"""Each strategy that training applies changes what it should (bytes held) and nothing else (losses of the plain run).

Two ranks are in tests/contract, swapped blocks in test_swap.py.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.catalog import lookup  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.launch.launch import RunRequest  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.memory.offload import InputsOnHost  # noqa: E402
from trainers.step import attention_kernels, loss_scaling, step  # noqa: E402
from trainers.step.optimizers import OnHost  # noqa: E402
from trainers.train import TrainingRun  # noqa: E402

STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("strategies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        yield runs.Place(root, "wan")


@pytest.fixture(autouse=True)
def own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers keeps the attention that was set last for all models of a process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    monkeypatch.setattr(Registry, "_active_backend", Registry._active_backend)


class Held:
    """Bytes of one step of a run: kept by autograd on the device, sent to the host, and held by the optimizer."""

    def __init__(self, request: RunRequest) -> None:
        self.training = TrainingRun(request, runs.ReportInMemory())
        self.saved, self.packed = 0, 0
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        (batch, *_) = self.training.loader.batches(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = step.forward(self.training.trainee, self.training.family, batch, self.training.strategy)
        self.saved = sum(storages.values())
        loss.backward()
        self.training.engine.step(self.training.trainee)
        self.training.loader.close()

    @property
    def states(self) -> int:
        """Of all that is more than a number; paged states too."""
        optimizer = self.training.trainee.optimizer
        assert optimizer is not None
        return sum(
            value.numel() * value.element_size()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )

    @property
    def trained(self) -> int:
        """Elements that train."""
        return sum(parameter.numel() for parameter in self.training.trainee.trainable.values())


def held(place: runs.Place, tmp_path: Path, strategy: dict[str, Any], **job: Any) -> Held:
    return Held(place.request(tmp_path / "held", place.plan(strategy, **job), steps=1))


def losses(place: runs.Place, output: Path, strategy: dict[str, Any], **job: Any) -> list[float]:
    assert runs.train(place.request(output, place.plan(strategy, **job), steps=STEPS))["outcome"] == "ok"
    return runs.losses(output)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(
    ("mode", "blocks"), [("full", None), ("partial", 1), ("offload", None)], ids=["full", "partial", "offload"]
)
def test_checkpointing_keeps_less_and_learns_the_same(
    place: runs.Place, tmp_path: Path, method: str, mode: str, blocks: int | None
) -> None:
    strategy = {"gradient_checkpointing": mode, "checkpointed_blocks": blocks}
    plain = losses(place, tmp_path / "plain", {}, method=method)
    assert losses(place, tmp_path / "changed", strategy, method=method) == plain
    assert held(place, tmp_path, strategy, method=method).saved < held(place, tmp_path, {}, method=method).saved


@pytest.mark.parametrize("job", [{"adapter": "dora"}, {"adapter": "lokr", "lora_rank": 16}], ids=["dora", "lokr"])
def test_other_adapters_begin_as_lora_does_and_learn_the_same_where_blocks_move(
    place: runs.Place, tmp_path: Path, job: dict[str, Any]
) -> None:
    """Their layers read the base's weight beside the layer, which is in the ring of swapped blocks then."""
    plain, lora = losses(place, tmp_path / "plain", {}, **job), losses(place, tmp_path / "lora", {})
    assert plain[0] == pytest.approx(lora[0], abs=1e-5) and plain[-1] != pytest.approx(lora[-1], abs=1e-5)
    for at, strategy in enumerate(({"gradient_checkpointing": "full", "swap_blocks": 1}, {"ema": "cpu"})):
        assert losses(place, tmp_path / str(at), strategy, **job) == plain


def test_compiled_blocks_learn_the_same(place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and not translated, which would take half a minute: inductor itself rounds as it likes."""
    strategy = {"gradient_checkpointing": "full", "swap_blocks": 1}
    plain = losses(place, tmp_path / "plain", strategy)
    monkeypatch.setattr(step, "COMPILER", "eager")
    counted = torch._dynamo.utils.counters
    counted.clear()
    assert losses(place, tmp_path / "compiled", {**strategy, "compile": "blocks"}) == pytest.approx(plain, abs=1e-6)
    assert counted["stats"]["unique_graphs"] >= 1 and not counted["graph_break"]


def test_blocks_are_compiled_and_nothing_else(place: runs.Place) -> None:
    """A model as it is recorded is never compiled."""
    profile = lookup.model(place.model)
    plan = place.plan({"compile": "blocks"})
    model = step.build_model(profile, plan.job.replace(lora_targets=profile.lora.targets), plan.strategy)
    assert not any("forward" in vars(module) for module in model.modules())
    step.compile_blocks(model, profile, plan.strategy)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["blocks.0", "blocks.1"]


def test_checkpoint_offload_sends_what_blocks_hand_on_to_the_host(
    place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = InputsOnHost.pack

    def counted(self: InputsOnHost, call: int, tensor: torch.Tensor) -> Any:
        sent.append(tensor.nbytes)
        return send(self, call, tensor)

    monkeypatch.setattr(InputsOnHost, "pack", counted)
    found = held(place, tmp_path, {"gradient_checkpointing": "offload"})
    width = 2 * 12
    tokens = 2 * 2 * 3
    blocks = len(found.training.trainee.model.blocks)  # type: ignore[arg-type]
    assert sum(sent) == (blocks - 1) * tokens * width * 4  # in fp32; the first block's is made outside the blocks


@pytest.mark.parametrize("how", ["loop", "fused", "backward"])
def test_ways_to_step_learn_the_same(place: runs.Place, tmp_path: Path, how: str) -> None:
    """Inside backward nothing can be clipped, so there the first losses only: before and after one small step."""
    method = "full" if how == "backward" else "lora"
    plain = losses(place, tmp_path / "plain", {"optimizer_step": "foreach"}, method=method)
    found = losses(place, tmp_path / "changed", {"optimizer_step": how}, method=method)
    if how == "backward":
        assert found[0] == plain[0]
        assert found != plain
    else:
        assert found == pytest.approx(plain, abs=1e-6)


def test_a_step_inside_backward_leaves_no_gradient_behind(place: runs.Place, tmp_path: Path) -> None:
    found = TrainingRun(
        place.request(tmp_path, place.plan({"optimizer_step": "backward"}, method="full"), steps=1),
        runs.ReportInMemory(),
    )
    (batch,) = found.loader.batches(0)
    step.forward(found.trainee, found.family, batch, found.strategy).backward()
    assert all(parameter.grad is None for parameter in found.trainee.model.parameters())
    found.loader.close()


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("adamw", 8),
        ("adamw-8bit", None),
        ("adamw-8bit-paged", None),
        ("lion", 4),
        ("prodigy", 16),
        ("adafactor", None),
        ("came", None),
        ("muon", None),
    ],
)
def test_optimizers_hold_what_they_should_and_learn(
    place: runs.Place, tmp_path: Path, optimizer: str, states: int | None
) -> None:
    """Bytes of state a trained element: two fp32 moments, one, four; 8 bits hold less where tensors are large enough
    (4,096 elements), factored ones always. CAME has one moment and two factored, Muon one of what is a matrix."""
    found = held(place, tmp_path, {"optimizer": optimizer}, method="full")
    if states is not None:
        assert found.states == states * found.trained
    elif optimizer == "adafactor":
        assert found.states < 2 * found.trained
    elif optimizer in ("came", "muon"):
        assert 4 * found.trained < found.states < 6 * found.trained
    else:
        assert found.states <= 8 * found.trained
    plain = losses(place, tmp_path / "plain", {})
    other = losses(place, tmp_path / "other", {"optimizer": optimizer})
    assert other[0] == plain[0]
    assert all(abs(a - b) < 0.5 for a, b in zip(other, plain, strict=True))


def test_accumulation_keeps_one_micro_batch_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of data of one shape, each epoch of which is a batch."""
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    place = runs.Place(tmp_path, "wide")
    whole = losses(place, tmp_path / "whole", {}, batch_size=3)
    parts = losses(place, tmp_path / "parts", {"gradient_accumulation": 3})
    assert parts == pytest.approx(whole, abs=1e-5)
    once = TrainingRun(place.request(tmp_path / "a", place.plan(batch_size=3), steps=1), runs.ReportInMemory())
    (batch,) = once.loader.batches(0)
    split = TrainingRun(
        place.request(tmp_path / "b", place.plan({"gradient_accumulation": 3}), steps=1), runs.ReportInMemory()
    )
    pieces = list(split.loader.batches(0))
    assert len(pieces) == 3 and pieces[0]["latents"].numel() * 3 == batch["latents"].numel()
    assert torch.equal(torch.cat([piece["latents"] for piece in pieces]), batch["latents"])
    once.loader.close()
    split.loader.close()


@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_an_average_is_fp32_of_all_that_trains_and_changes_no_loss(
    place: runs.Place, tmp_path: Path, where: str
) -> None:
    strategy = {"ema": where, "weights_dtype": "bf16", "adapter_dtype": "bf16", "compute_dtype": "bf16"}
    assert losses(place, tmp_path / "with", strategy) == losses(
        place, tmp_path / "without", {**strategy, "ema": "none"}
    )
    training = TrainingRun(place.request(tmp_path / "held", place.plan(strategy), steps=1), runs.ReportInMemory())
    assert training.average is not None
    shadow = training.average.shadow
    assert sum(tensor.numel() * tensor.element_size() for tensor in shadow.values()) == 4 * sum(
        parameter.numel() for parameter in training.trainee.trainable.values()
    )
    training.loader.close()


@pytest.mark.parametrize("more", [{}, {"offload_gradients": "cpu"}, {"gradient_accumulation": 2}])
def test_an_optimizer_on_the_host_learns_the_same(place: runs.Place, tmp_path: Path, more: dict[str, Any]) -> None:
    plain = losses(place, tmp_path / "plain", {**more, "offload_gradients": "none"}, method="full")
    found = losses(place, tmp_path / "away", {"offload_optimizer": "cpu", **more}, method="full")
    assert found == pytest.approx(plain, abs=1e-6)


def test_an_optimizer_on_the_host_holds_what_the_plan_says(place: runs.Place, tmp_path: Path) -> None:
    """There a weight, its gradient and two states, in the format they are trained in; of gradients that leave at once
    nothing is left where the model is."""
    bf16 = {"weights_dtype": "bf16", "adapter_dtype": "bf16", "offload_optimizer": "cpu", "offload_gradients": "cpu"}
    training = TrainingRun(place.request(tmp_path, place.plan(bf16, method="full"), steps=1), runs.ReportInMemory())
    (batch,) = training.loader.batches(0)
    step.forward(training.trainee, training.family, batch, training.strategy).backward()
    training.loader.close()
    trained, optimizer = training.trainee.trainable.values(), training.trainee.optimizer
    assert isinstance(optimizer, OnHost) and all(parameter.grad is None for parameter in trained)
    training.engine.step(training.trainee)
    held = [*optimizer.hosts.values(), *optimizer.gradients.values()]
    held += [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    kept_in_fp32 = sum(parameter.numel() for parameter in trained if parameter.dtype == torch.float32)
    wanted = 8 * sum(parameter.numel() for parameter in trained) + 8 * kept_in_fp32
    found = {tensor.data_ptr(): tensor.nbytes for tensor in held}
    assert sum(found.values()) == wanted


def test_attention_asked_for_is_what_runs_and_learns_the_same(place: runs.Place, tmp_path: Path) -> None:
    """On the CPU torch takes flash by itself where it can, so what it took is told for both."""
    plain = losses(place, tmp_path / "plain", {})
    assert losses(place, tmp_path / "flash", {"attention": "flash"}) == pytest.approx(plain, abs=1e-6)
    told = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("plain", "flash")]
    assert [line["attention_kernel"] for line in told] == ["flash-cpu"] * 2


@pytest.mark.parametrize(
    ("name", "asked", "fault"),
    [(None, "flash", None), (None, "cudnn", "no kernel for the CPU"), ("cogvideox-2b", "flash", "is not supported by")],
)
def test_attention_is_set_everywhere_or_refused(
    place: runs.Place, name: str | None, asked: str, fault: str | None
) -> None:
    profile = lookup.model(name or place.model)
    small = profile.replace(config={**profile.config, **(runs.COG if name else {})})
    model = step.build_model(small, place.plan().job.replace(lora_targets=("to_q",)), place.plan().strategy)
    with pytest.raises(VplanError, match=fault) if fault else contextlib.nullcontext():
        attention_kernels.ask_for(model, asked, torch.device("cpu"))
    chosen = {
        getattr(module.processor, "_attention_backend", None)
        for module in model.modules()
        if hasattr(module, "processor")
    }
    assert chosen == ({None} if fault else {"_native_flash"})


FP16 = {"autocast": "fp16", "weights_dtype": "fp16"}


def test_fp16_learns_what_fp32_learns(place: runs.Place, tmp_path: Path) -> None:
    assert losses(place, tmp_path / "half", FP16) == pytest.approx(losses(place, tmp_path / "whole", {}), rel=3e-3)


def test_a_loss_scaled_too_far_leaves_out_steps_and_counts_them(
    place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first every gradient is infinite, and the weights stay; a resumed run goes on with the scale it had."""
    made = loss_scaling.LossScaler.__init__
    monkeypatch.setattr(
        loss_scaling.LossScaler, "__init__", lambda self, device: made(self, device, init_scale=2.0**24)
    )
    plan, once, twice = place.plan(FP16), tmp_path / "once", tmp_path / "twice"
    assert runs.train(place.request(once, plan, steps=STEPS))["outcome"] == "ok"
    lines = [json.loads(line) for line in (once / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["skipped_steps"] == 1 and lines[0]["loss_scale"] == 2.0**23
    for request in (
        place.request(twice, plan, steps=2),
        place.request(twice, plan, steps=STEPS, resume=str(twice / "checkpoints" / "step-00000002")),
    ):
        assert runs.train(request)["outcome"] == "ok"
    again = [json.loads(line) for line in (twice / "metrics.jsonl").read_text().splitlines()]
    told = ("loss", "loss_scale", "skipped_steps")
    assert [[line[name] for name in told] for line in again] == [[line[name] for name in told] for line in lines]


@pytest.mark.parametrize("dtype", ["nf4", "fp8", "int8"])
def test_a_quantised_base_is_smaller_and_learns_nearly_the_same(place: runs.Place, tmp_path: Path, dtype: str) -> None:
    """The weights are rounded, so the losses are near and not the same."""
    bf16 = {"weights_dtype": "bf16", "compute_dtype": "bf16", "autocast": "bf16"}
    plain = losses(place, tmp_path / "plain", bf16)
    found = losses(place, tmp_path / "found", {**bf16, "weights_dtype": dtype})
    assert found == pytest.approx(plain, rel=0.1)
    assert found != plain


def test_masters_keep_what_16_bits_would_lose(place: runs.Place, tmp_path: Path) -> None:
    """Steps of 1e-5 are lost in bf16 weights of 0.1, and not in their masters."""
    strategy = {"weights_dtype": "bf16", "compute_dtype": "bf16"}
    moved = []
    for masters in ("none", "fp32"):
        plan = place.plan({**strategy, "master_weights": masters}, method="full")
        output = tmp_path / masters
        assert (
            runs.train(place.request(output, plan, steps=40, checkpoint_every=40, learning_rate=2e-5))["outcome"]
            == "ok"
        )
        key = "blocks.0.ffn.net.0.proj.weight"
        before = runs.tensors(place.root / "model")[key].bfloat16()
        moved.append(int((runs.tensors(output / "final")[key] != before).sum()))
    assert moved[1] > 2 * moved[0]
