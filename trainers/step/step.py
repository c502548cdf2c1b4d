"""The one training step: builds a model under a Strategy and executes optimisation steps.

Recording (fake tensors), probing (a few real steps) and training all call these functions, so what vplan predicts
cannot drift from what it trains. Nothing here knows that a recorder exists.

`build_model` makes the model on ``meta``, `trainers.step.placement` allocates its weights, and `accumulated_step` runs
one optimisation step: `gradients` calls `forward` and backward for each micro-batch, and the `Engine` steps the
optimizer.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from planner.catalog.profiles import ModelProfile
from planner.layout.partial_training import matches
from planner.spec.job import QUANTISED, Job, Strategy
from planner.spec.training import MAX_GRAD_NORM
from planner.tape.parameter_table import is_of_adapter
from trainers import families
from trainers.families.common import random_draws
from trainers.families.common.base import Family
from trainers.families.common.model_classes import build, class_of
from trainers.memory import quantise
from trainers.memory.offload import InputsOnHost
from trainers.step import attention_kernels, backends
from trainers.step.checkpointing import set_checkpointing
from trainers.step.loss_scaling import LossScaler
from trainers.step.optimizers import OnHost, Optimizer, SteppedInBackward

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Batch = dict[str, torch.Tensor]
"""Tensors by name, samples along their first dimension, as `Family.batch` makes them; in training also each sample's
seed (`random_draws.SEEDS`), last, and the batch's weight (`WEIGHT`)."""

WEIGHT = "weight"
"""Key of a batch: the factor on its mean loss, a scalar on the CPU; 1 if absent."""


class Engine:
    """How backward and the optimizer step run. This one is for a process that trains alone;
    `trainers.parallel.parallel` has those for DDP, DeepSpeed and FSDP2."""

    max_grad_norm = MAX_GRAD_NORM
    """the norm that gradients are clipped to; 0 for none"""

    def __init__(self, scaler: LossScaler | None = None) -> None:
        self.scaler = scaler

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """A context around forward and backward of one micro-batch; ``last`` marks the last one of an optimizer
        step."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a loss to the existing ones, scaled up if fp16 needs it. ``loss``: a scalar, already
        divided by the number of micro-batches."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, trainee: Trainee) -> None:
        """Clips the gradients, steps the optimizer and frees the gradients. Does nothing if backward has stepped
        already."""
        optimizer = trainee.optimizer
        assert optimizer is not None
        if isinstance(optimizer, SteppedInBackward):
            return
        # Unscale before clipping, clip before the step: the norm must be that of the true gradients (torch.amp's recipe
        # for gradient clipping). With states in host RAM the gradients are fetched there first, and clipped there.
        on_host = optimizer if isinstance(optimizer, OnHost) else None
        stepped = list(trainee.trainable.values()) if on_host is None else on_host.take_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # only its groups are read
        if self.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(stepped, self.max_grad_norm, foreach=on_host is None)
        if self.scaler is not None:
            self.scaler.step_unless_infinite(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # frees them: samples and checkpoints come before the next backward


@dataclass
class Trainee:
    """What is trained: a model, its trainable parameters by full name, their optimizer (none when only sampling)."""

    model: nn.Module
    trainable: dict[str, nn.Parameter]
    optimizer: Optimizer | None = None
    engine: Engine = field(default_factory=Engine)


def build_model(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    config: dict[str, Any] | None = None,
    inputs: InputsOnHost | None = None,
    lora_alpha: float | None = None,
) -> nn.Module:
    """Builds the diffusers model with its adapter, dtypes and checkpointing; parameters are still on ``meta``.

    Non-persistent buffers (RoPE tables) are computed for real, as in ``from_pretrained``. ``config`` replaces the
    published architecture, for example by one with fewer blocks. ``inputs``: the host RAM for offloaded checkpoints, to
    be shared by models of which only one runs at a time. The adapter's scale is ``lora_alpha`` divided by the rank.
    """
    from diffusers.models.modeling_utils import no_init_weights

    backends.set_flags()
    named = class_of(profile.diffusers_class)
    with no_init_weights(), init_empty_weights():
        model = build(named, config or profile.config)
        families.family(profile).complete(model)
    weights = strategy.weights(job.method)
    # Dtypes and quantised layers come before the adapter: peft chooses the LoRA layer by the layer it wraps.
    cast_weights(model, compute_dtype(strategy) if weights in QUANTISED else DTYPES[weights])
    model.requires_grad_(False)
    if weights in QUANTISED:
        quantise.prepare(model, weights, compute_dtype(strategy), casts_layerwise=profile.traits.fp8_base)
    if job.method == "lora":
        add_adapter(model, job, strategy, lora_alpha)
    elif job.method == "full":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not job.trainable or matches(name, job.trainable))
    set_checkpointing(model, profile, strategy, inputs)
    families.family(profile).prepare(model)
    return model.train()


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives every parameter and persistent buffer the dtype that ``from_pretrained(torch_dtype=dtype)`` gives it.

    Non-persistent buffers are computed with the model; those in fp64 are cast to fp32. The modules named in
    ``_keep_in_fp32_modules`` stay in fp32; diffusers matches whole components of the name.
    """
    fp32_modules = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        in_fp32 = fp32_modules.intersection(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if in_fp32 else dtype)
    for module in model.modules():
        for name, table in module._buffers.items():
            if table is None or not table.is_floating_point():
                continue
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = table.to(dtype)
            elif table.dtype == torch.float64:
                module._buffers[name] = table.float()


WHOLE = 1 << 20
"""A LoKr rank so large that no matrix is split in two (peft tuners/lokr/layer.py, ``use_w2``), as SimpleTuner's
example and ai-toolkit set it. It is used as alpha too, so the scale is 1."""

NEAR_ROOT = -1
"""peft's decompose factor that splits a side into factors nearest to its square root."""


def add_adapter(model: nn.Module, job: Job, strategy: Strategy, alpha: float | None = None) -> None:
    """Adds a peft LoRA, DoRA or LoKr on ``job.lora_targets`` in ``strategy.adapter_dtype``.

    Alpha defaults to the rank, as in diffusers' examples. The forward multiplies by the scale as a plain number, so the
    scale takes no memory.
    """
    from diffusers.models.modeling_utils import no_init_weights
    from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    assert job.lora_targets, "targets are resolved before a model is built"
    targets = list(job.lora_targets)
    lokr = LoKrConfig(r=WHOLE, alpha=WHOLE, decompose_factor=job.lokr_factor or NEAR_ROOT, target_modules=targets)
    lora = LoraConfig(
        r=job.lora_rank,
        lora_alpha=alpha or job.lora_rank,  # peft only divides it
        lora_dropout=job.lora_dropout,
        target_modules=targets,
        init_lora_weights="gaussian",
        use_dora=job.adapter == "dora",
    )
    # Drawing numbers for meta tensors is slow, and training begins with its own (`trainers.step.weights`).
    with no_init_weights(), init_empty_weights(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated")  # it cannot merge; nothing here merges
        inject_adapter_in_model(lokr if job.adapter == "lokr" else lora, model)
    for name, parameter in model.named_parameters():
        if is_of_adapter(name):
            parameter.data = parameter.data.to(DTYPES[strategy.adapter_dtype])
            parameter.requires_grad_(True)
    if strategy.adapter_inputs == "shared":
        # Under autocast a matrix product casts its input anyway, so peft's cast to fp32 would be a useless copy.
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False  # what peft's `disable_input_dtype_casting` sets


def choose_kernels(model: nn.Module, profile: ModelProfile, strategy: Strategy, device: torch.device) -> None:
    """Sets up what a recording leaves out: the strategy's attention kernel, with gradients laid out as that kernel
    needs them, and compiled blocks."""
    attention_kernels.ask_for(model, strategy.attention, device)
    if attention_kernels.cudnn_runs(strategy.attention, device):
        attention_kernels.lay_out_gradients(model)
    compile_blocks(model, profile, strategy)


COMPILER = "inductor"
"""The backend of torch.compile."""


def compile_blocks(model: nn.Module, profile: ModelProfile, strategy: Strategy) -> None:
    """Compiles the forward of each repeated block in place if ``strategy.compile`` is ``blocks``; never for recording.

    This is regional compilation, as in diffusers' ``compile_repeated_blocks`` (PyTorch recipe "regional_compilation"):
    identical blocks share the compiled code. Only the forward is compiled, so what wraps a block (checkpointing, swap,
    FSDP2's gathering) is unaffected. Where torch would silently fall back to eager, the run fails instead.
    """
    if strategy.compile == "none":
        return
    assert strategy.compile == "blocks", strategy.compile
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in compiled_blocks(model, profile):
        block.forward = torch.compile(block.forward, backend=COMPILER)


def compiled_blocks(model: nn.Module, profile: ModelProfile) -> list[nn.Module]:
    """The repeated blocks. In a UNet, whose stages differ, these are the transformer blocks inside the stages."""
    if profile.traits.stages:
        repeated: Collection[str] = model._repeated_blocks  # type: ignore[assignment]  # diffusers' own attribute
        return [module for module in model.modules() if type(module).__name__ in repeated]
    return [block for stack in profile.stacks for block in model.get_submodule(stack.list).children()]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by full name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextlib.contextmanager
def autocast(strategy: Strategy, device: torch.device) -> Iterator[None]:
    """``torch.autocast`` as the strategy asks, around the model's forward only, as in accelerate."""
    if strategy.autocast == "none":
        yield
    else:
        with torch.autocast(device.type, dtype=DTYPES[strategy.autocast]):
            yield


def compute_dtype(strategy: Strategy) -> torch.dtype:
    """The dtype of the model's inputs: autocast's, else that of the weights, or, if these are quantised, the one they
    are dequantised to. Under FSDP2 it is the dtype in which weights are gathered, however the shards are stored."""
    if strategy.autocast != "none":
        return DTYPES[strategy.autocast]
    if strategy.sharding == "fsdp":
        return DTYPES[strategy.compute_dtype]
    return DTYPES.get(strategy.weights_dtype or "bf16", DTYPES[strategy.compute_dtype])


def forward(trainee: Trainee, family: Family, batch: Batch, strategy: Strategy) -> torch.Tensor:
    """The loss of one batch: a scalar with its graph, before any scaling.

    Noise and noise levels are drawn from the seeds in the batch, so they do not depend on the number of ranks or on the
    micro-batch that a sample is in.
    """
    device = next(iter(batch.values())).device
    with random_draws.from_seeds(batch.get(random_draws.SEEDS), device):
        inputs, target = family.inputs_and_target(batch)
    with autocast(strategy, device):
        outputs = trainee.model(**inputs, **family.plain_outputs)
    # Outside autocast, because accelerate wraps only the model's forward.
    return family.loss(family.prediction(outputs), target, inputs)


@torch.no_grad()
def sample_forward(trainee: Trainee, family: Family, batch: Batch, strategy: Strategy) -> Any:
    """The model's prediction for one batch of noisy latents, without a graph: one step of sampling. One tensor, or
    whatever the family's `prediction` returns."""
    inputs, _ = family.inputs_and_target(batch)
    with autocast(strategy, next(iter(batch.values())).device):
        return family.prediction(trainee.model(**inputs, **family.plain_outputs))


def accumulated_step(trainee: Trainee, family: Family, batches: Iterable[Batch], strategy: Strategy) -> torch.Tensor:
    """Runs one optimisation step on the micro-batches of this process; returns the mean of their weighted losses,
    detached.

    There must be ``gradient_accumulation`` of them. If ``batches`` is lazy, only one is on the device at a time.
    """
    loss = gradients(trainee, family, batches, strategy)
    optimizer_step(trainee)
    return loss


def optimizer_step(trainee: Trainee) -> None:
    """Runs the optimizer with the gradients of `gradients`. A probe looks for this function in the traceback of an
    out-of-memory error, to tell the optimizer from the passes."""
    trainee.engine.step(trainee)


def gradients(trainee: Trainee, family: Family, batches: Iterable[Batch], strategy: Strategy) -> torch.Tensor:
    """Runs forward and backward of the micro-batches of one optimisation step; returns the mean of their weighted
    losses, detached."""
    count, number, losses = strategy.gradient_accumulation, 0, []
    for number, batch in enumerate(batches, start=1):
        weight = float(batch.pop(WEIGHT, 1.0))
        with trainee.engine.micro_batch(last=number == count):
            loss = forward(trainee, family, batch, strategy)
            if weight != 1:
                loss = loss * weight
            trainee.engine.backward(loss if count == 1 else loss / count)
        losses.append(loss.detach())
        del loss  # and its graph with it, before the next micro-batch runs
    assert number == count, f"{number} micro-batches for a step of {count}"
    return losses[0] if count == 1 else torch.stack(losses).mean()
