"""trainers/memory/quantise.py and optimizers.py on the CPU: a frozen base in fp8, int8 or nf4 trains a real step and
stays what it was; every optimizer moves the weights, and one that steps inside backward as one that steps behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.spec.job import Job, Strategy
from planner.spec.training import TrainingSettings
from trainers.families import family
from trainers.recording import cuda_ops
from trainers.recording.recordings import named_tensors
from trainers.step import placement, step
from trainers.step.optimizers import SteppedInBackward, make_optimizer
from trainers.step.random_weights import randomise

GRID = {"B": 2, "F": 3, "H": 4, "W": 4, "T": 6, "R": 4}
WAN: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "ffn_dim": 192,
    "freq_dim": 32,
    "text_dim": 64,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
FLUX: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "axes_dims_rope": [16, 24, 24],
}
MODELS = {"wan2.1-t2v-1.3b": WAN, "flux.1-dev": FLUX}
EACH = pytest.mark.parametrize("name", list(MODELS))
BYTES = {"fp8": 1.0, "int8": 1.0, "nf4": 0.5}


def profile_of(name: str) -> ModelProfile:
    profile = lookup.model(name)
    return profile.model_copy(update={"config": {**profile.config, **MODELS[name]}})


def on_meta(name: str, method: str, strategy: Strategy) -> torch.nn.Module:
    profile = profile_of(name)
    targets = profile.lora.targets
    job = Job(model=name, method=method, lora_rank=4, lora_targets=targets, frames=1, height=64, width=64)
    return step.build_model(profile, job, strategy)


def built(name: str, method: str = "lora", **strategy: object) -> tuple[step.Trainee, Strategy]:
    chosen = Strategy.read({"weights_dtype": "bf16", **strategy})
    model = on_meta(name, method, chosen)
    torch.manual_seed(0)
    placement.materialise(model, "cpu", randomise)
    return step.Trainee(model, step.trainable_parameters(model)), chosen


def losses(name: str, trainee: step.Trainee, strategy: Strategy, count: int = 1) -> list[torch.Tensor]:
    kind = family(profile_of(name))
    torch.manual_seed(1)
    batch = kind.batch({**GRID, **kind.fixed}, "cpu", step.compute_dtype(strategy))
    return [step.accumulated_step(trainee, kind, [batch], strategy) for _ in range(count)]


def frozen(trainee: step.Trainee) -> dict[str, torch.Tensor]:
    trained = trainee.trainable.keys()
    return {key: tensor for key, tensor in named_tensors(trainee.model) if key not in trained}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {key: bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy()) for key, tensor in tensors.items()}


@EACH
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("weights", ["fp8", "int8", "nf4"])
def test_a_quantised_base_trains_its_adapter_and_stays_what_it_was(name: str, weights: str, checkpointing: str) -> None:
    trainee, strategy = built(name, weights_dtype=weights, gradient_checkpointing=checkpointing)
    trainee.optimizer = make_optimizer(trainee.trainable, strategy)
    before, adapters = bits(frozen(trainee)), {key: p.detach().clone() for key, p in trainee.trainable.items()}
    assert all(loss.isfinite() and loss > 0 for loss in losses(name, trainee, strategy, 2))
    assert bits(frozen(trainee)) == before
    assert all("lora_" in key and p.dtype == torch.float32 for key, p in trainee.trainable.items())
    assert all(not torch.equal(parameter, adapters[key]) for key, parameter in trainee.trainable.items())


@EACH
@pytest.mark.parametrize("weights", ["fp8", "int8", "nf4"])
def test_a_quantised_base_is_close_to_the_one_it_was_rounded_from(name: str, weights: str) -> None:
    first, second = (loss_of(name, *built(name, weights_dtype=kind)) for kind in ("bf16", weights))
    assert second == pytest.approx(first, rel=0.05)


def loss_of(name: str, trainee: step.Trainee, strategy: Strategy) -> float:
    kind = family(profile_of(name))
    torch.manual_seed(1)
    batch = kind.batch({**GRID, **kind.fixed}, "cpu", step.compute_dtype(strategy))
    with torch.no_grad():
        return float(step.forward(trainee, kind, batch, strategy))


@EACH
@pytest.mark.parametrize("weights", ["fp8", "int8", "nf4"])
def test_a_weight_takes_the_bytes_of_its_format(name: str, weights: str) -> None:
    """Scales are another 4 bytes per row (int8) or 1 per 64 weights (nf4), tables of 1 KiB a layer apart."""
    trainee, _ = built(name, weights_dtype=weights)
    layer = trainee.model.get_submodule(f"{profile_of(name).stacks[0].list}.1")
    linears = [m for key, m in layer.named_modules() if isinstance(m, torch.nn.Linear) and "norm" not in key]
    linear = max(linears, key=lambda module: module.out_features)
    parts = dict(named_tensors(linear))
    weight = {key: t.nbytes for key, t in parts.items() if key.startswith("weight") and not key.endswith("code")}
    count = linear.in_features * linear.out_features
    scales = {"fp8": 0, "int8": 5 * linear.out_features, "nf4": count // 64}[weights]
    assert sum(weight.values()) == pytest.approx(BYTES[weights] * count + scales, abs=4 * (count // 64 // 256 + 2))


@pytest.mark.parametrize("weights", ["fp8", "int8", "nf4"])
def test_what_the_recorder_loads_is_stored_in_the_same_tensors(weights: str) -> None:
    name = "wan2.1-t2v-1.3b"
    real, _ = built(name, weights_dtype=weights)
    fake = on_meta(name, "lora", Strategy(weights_dtype=weights))
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_ops.cuda_semantics():
        placement.materialise(fake, "cpu")
        told = {key: (tensor.dtype, tensor.shape) for key, tensor in named_tensors(fake)}
    assert told == {key: (tensor.dtype, tensor.shape) for key, tensor in named_tensors(real.model)}


def test_norms_embeddings_and_fp32_modules_are_not_cast() -> None:
    for weights in ("fp8", "int8", "nf4"):
        trainee, _ = built("wan2.1-t2v-1.3b", weights_dtype=weights)
        kept = {key: tensor.dtype for key, tensor in frozen(trainee).items() if "norm" in key or "time_embedder" in key}
        assert kept and set(kept.values()) <= {torch.float32, torch.bfloat16}
    assert {tensor.dtype for tensor in frozen(built("wan2.1-t2v-1.3b", weights_dtype="fp8")[0]).values()} == {
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.float32,
        *(table.dtype for _, table in trainee.model.named_buffers()),
    }


OPTIMIZERS = ["adamw", "adamw-8bit", "adamw-8bit-paged", "adafactor", "lion", "prodigy", "came", "muon"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("adapter", ["fp32", "bf16"])
def test_every_optimizer_moves_every_trained_weight(optimizer: str, adapter: str) -> None:
    name = "wan2.1-t2v-1.3b"
    trainee, strategy = built(name, optimizer=optimizer, adapter_dtype=adapter)
    trainee.optimizer = make_optimizer(trainee.trainable, strategy, TrainingSettings(learning_rate=1e-2))
    before = {key: parameter.detach().clone() for key, parameter in trainee.trainable.items()}
    assert all(loss.isfinite() for loss in losses(name, trainee, strategy, 2))
    moved = [key for key, parameter in trainee.trainable.items() if not torch.equal(parameter, before[key])]
    assert len(moved) == len(before) or (optimizer == "prodigy" and adapter == "bf16")  # its first steps are tiny


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_step_inside_backward_is_the_step_without_clipping(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "wan2.1-t2v-1.3b"
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_, **__: None)
    found = []
    for how in ("loop", "backward"):
        trainee, strategy = built(name, "full", weights_dtype="fp32", optimizer=optimizer, optimizer_step=how)
        trainee.optimizer = make_optimizer(trainee.trainable, strategy)
        assert isinstance(trainee.optimizer, SteppedInBackward) == (how == "backward")
        losses(name, trainee, strategy, 2)
        assert all(parameter.grad is None for parameter in trainee.trainable.values())
        found.append(torch.cat([parameter.detach().flatten() for parameter in trainee.trainable.values()]))
    assert torch.allclose(*found, atol=1e-6)


def test_inside_backward_there_is_one_gradient_at_a_time() -> None:
    name = "wan2.1-t2v-1.3b"
    trainee, strategy = built(name, "full", weights_dtype="fp32", optimizer_step="backward")
    trainee.optimizer = make_optimizer(trainee.trainable, strategy)
    held: list[int] = []
    for parameter in trainee.trainable.values():
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(other.grad is not None for other in trainee.trainable.values()))
        )
    losses(name, trainee, strategy)
    assert len(held) == len(trainee.trainable) and set(held) == {0}
