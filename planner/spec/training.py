"""How a run trains, beside what decides its memory: noise levels, loss, adapters and optimizer, each by name.

The string under a field is also the help text of its flag. What a field is when it is None says the model's profile
(`[training]`), or the optimizer's own library; `planner.launch.training_settings` fills them in.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from planner.schema import CountOrZero, NotNegative, Number, Positive, Record

TimestepSampling = Literal["uniform", "logit_normal", "mode", "shifted_logit_normal", "stretched_logit_normal"]
LossWeighting = Literal["none", "bell", "cosmap", "sigma_sqrt", "min_snr"]
Objective = Literal["flow", "v", "epsilon"]
Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"]
ModeScale = Annotated[float, Field(strict=True, ge=-1.0, le=1.75, allow_inf_nan=False)]
"""Inside these bounds the levels of mode sampling grow with their share (arXiv 2403.03206, section 3.1)."""
Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]
Beta = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]
Shift = Positive | Literal["resolution"]


class TrainingSettings(Record):
    """How a run trains. None is the preset's; a run keeps what that was."""

    section: ClassVar[str] = "Training"
    """of its flags in a help page"""

    timestep_sampling: TimestepSampling | None = None
    """density of the noise levels that a flow model trains; the model's preset by default"""
    logit_mean: Number | None = None
    """mean of the levels' logit in logit_normal; above 0 is more noise (diffusers' flag of that name counts the other
    way round)"""
    logit_std: Positive | None = None
    """standard deviation of the levels' logit in logit_normal"""
    mode_scale: ModeScale | None = None
    """scale of mode sampling, -1 to 1.75"""
    timestep_shift: Shift | None = None
    """shift of the noise levels: above 1 trains more noise; or resolution, by the size of each sample"""
    loss_weighting: LossWeighting | None = None
    """weight of a sample's loss at its noise level: bell, cosmap or sigma_sqrt for flow models, else min_snr"""
    snr_gamma: Positive | None = None
    """gamma of min_snr, usually 5; switches it on"""
    prediction: Literal["epsilon", "v"] | None = None
    """what a Stable Diffusion UNet predicts: the noise (epsilon), or v"""
    guidance: NotNegative | None = None
    """guidance scale that a model with embedded guidance (FLUX dev, HunyuanVideo) is trained with"""
    caption_dropout: Share | None = None
    """share of samples that train with the empty caption, 0 to 1"""
    lora_alpha: Positive | None = None
    """LoRA alpha: adapters are scaled by alpha / rank; the rank by default"""
    lora_init: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """how adapters begin: gaussian, kaiming, or a LoRA file (.safetensors) to train on from"""
    learning_rate: Positive | None = None
    """highest learning rate; 1e-4 for lora and 1e-5 for full by default"""
    lr_scheduler: Schedule | None = None
    """learning rate schedule; constant, or constant_with_warmup with --warmup-steps, by default"""
    warmup_steps: CountOrZero | None = None
    """steps over which the learning rate rises; 0 by default"""
    weight_decay: NotNegative | None = None
    """weight decay; 0.01 by default, 0 for prodigy"""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] | None = None
    """decay of the optimizer's two averages, as 0.9,0.999"""
    epsilon: Positive | None = None
    """epsilon of AdamW or Prodigy, as 1e-8"""
    max_grad_norm: NotNegative | None = None
    """norm that gradients are clipped to; 1 by default, 0 turns clipping off"""
    ema_decay: Beta | None = None
    """highest decay of the moving average of the weights; 0.9999 by default"""


MAX_GRAD_NORM = 1.0
"""Gradient clipping of the published trainers (diffusers examples, finetrainers, DiffSynth)."""

EMA_DECAY = 0.9999
"""As diffusers' EMAModel and its training examples."""

NAMED_INITS = ("gaussian", "kaiming")
"""Ways in which adapters begin; anything else is a file."""

SIMPLE_RATE = 1e-4
"""Learning rate where nothing says one: of a step that is recorded or probed."""

_ADAM = (0.9, 0.999)
BETAS = {
    "adamw": _ADAM,
    "adamw-8bit": _ADAM,
    "adamw-8bit-paged": _ADAM,
    "lion": (0.9, 0.99),
    "prodigy": _ADAM,
}
"""Optimizers with two betas, and what their libraries take by default (torch, bitsandbytes, prodigyopt)."""

EPSILONS = {name: 1e-8 for name in BETAS if name != "lion"}


def weight_decay(optimizer: str, settings: TrainingSettings) -> float:
    """The weight decay of an optimizer: as set, else torch's 0.01, and none for Prodigy (prodigyopt)."""
    if settings.weight_decay is not None:
        return settings.weight_decay
    return 0.0 if optimizer == "prodigy" else 1e-2


def optimizer_arguments(optimizer: str, settings: TrainingSettings) -> dict[str, Any]:
    """Keyword arguments of an optimizer's class. Prodigy finds the learning rate itself, and wants 1."""
    rate = 1.0 if optimizer == "prodigy" else settings.learning_rate or SIMPLE_RATE
    arguments: dict[str, Any] = {"lr": rate, "weight_decay": weight_decay(optimizer, settings)}
    if optimizer in BETAS:
        arguments["betas"] = settings.betas or BETAS[optimizer]
    if optimizer in EPSILONS:
        arguments["eps"] = settings.epsilon or EPSILONS[optimizer]
    return arguments
