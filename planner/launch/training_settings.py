"""Completes a run's training settings from the model's preset; settings without effect are refused by name.

A preset is the `[training]` table of the model's profile, with its source. A model's *law* is the part of it that
says which noise levels are drawn and how errors are weighted at each. Complete settings hold exactly what affects the
run, so that those of a checkpoint and of its continuation can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.catalog.noise_density import TOKEN_DENSITIES
from planner.catalog.profiles import ModelProfile, Training
from planner.errors import VplanError, quoted
from planner.spec.job import Job, Strategy
from planner.spec.plan import Plan
from planner.spec.training import (
    BETAS,
    EMA_DECAY,
    EPSILONS,
    MAX_GRAD_NORM,
    NAMED_INITS,
    TrainingSettings,
    optimizer_arguments,
)

RATES = {"lora": 1e-4, "full": 1e-5}
"""Default learning rates of published trainers (diffusers examples/cogvideo, finetrainers examples/training)."""

LAW = {
    "timestep_sampling": "timestep_sampling",
    "logit_mean": "logit_mean",
    "logit_std": "logit_std",
    "mode_scale": "mode_scale",
    "timestep_shift": "training_shift",
    "loss_weighting": "loss_weighting",
    "snr_gamma": "snr_gamma",
    "prediction": "objective",
    "guidance": "guidance",
}
"""Setting -> the field of a profile's `[training]` that holds its preset."""

RESUMABLE = frozenset({"learning_rate", "lr_scheduler", "warmup_steps"})
"""Settings that a resumed run may change. All others would make it a different run, or are in the optimizer's state."""


WITHIN = {
    "timestep_sampling": ("logit_mean", "logit_std", "mode_scale"),
    "loss_weighting": ("snr_gamma",),
}
"""Setting -> settings that belong to its value, and are dropped when it is given anew."""


def with_options(kept: TrainingSettings, options: Mapping[str, Any]) -> TrainingSettings:
    """A plan's settings, overridden by the options of a command; None means an option was not given."""
    typed = {name: value for name in TrainingSettings.model_fields if (value := options[name]) is not None}
    gone = {inner for name in typed for inner in WITHIN.get(name, ())}
    old = {name: getattr(kept, name) for name in kept.model_fields_set - gone}
    settings = TrainingSettings.read({**old, **typed})
    if settings.lora_init is None or settings.lora_init in NAMED_INITS:
        return settings
    return settings.replace(lora_init=str(Path(settings.lora_init).expanduser().absolute()))


def check_lora_init(settings: TrainingSettings) -> None:
    """Raises a VplanError if the LoRA file that adapters start from does not exist. A resumed run does not need the
    file."""
    init = settings.lora_init
    if init is not None and init not in NAMED_INITS and not Path(init).exists():
        fix = f"pass a LoRA file, or one of {', '.join(NAMED_INITS)}"
        raise VplanError(f"--lora-init: there is no {quoted(init)}", fix)


def with_complete_settings(plan: Plan, profile: ModelProfile) -> Plan:
    """The plan with complete training settings. Raises a VplanError for settings that the model, the optimizer or the
    rest of the plan does not support."""
    return plan.replace(training=complete(plan.training, profile, plan.job, plan.strategy))


def complete(settings: TrainingSettings, profile: ModelProfile, job: Job, strategy: Strategy) -> TrainingSettings:
    """Settings with open ones filled in from the preset, and without those that have no effect."""
    settings = _with_gamma(settings)
    for reason, fix in (*_of_law(settings, profile), *_of_adapter(settings, job), *_of_optimizer(settings, strategy)):
        raise VplanError(reason, fix)
    arguments = optimizer_arguments(strategy.optimizer, settings)
    rate = 1.0 if strategy.optimizer == "prodigy" else settings.learning_rate or RATES[job.method]
    adapters = job.trains in ("lora", "dora")
    acting = _acting_law(_law(settings, profile), profile)
    acting |= {
        "caption_dropout": settings.caption_dropout or 0.0,
        "lora_alpha": settings.lora_alpha or float(job.lora_rank) if adapters else None,
        "lora_init": settings.lora_init or "gaussian" if adapters else None,
        "learning_rate": rate,
        "lr_scheduler": settings.lr_scheduler or ("constant_with_warmup" if settings.warmup_steps else "constant"),
        "warmup_steps": settings.warmup_steps or 0,
        "weight_decay": arguments["weight_decay"],
        "betas": arguments.get("betas"),
        "epsilon": arguments.get("eps"),
    }
    if strategy.optimizer_step != "backward":
        acting["max_grad_norm"] = MAX_GRAD_NORM if settings.max_grad_norm is None else settings.max_grad_norm
    if strategy.ema != "none":
        acting["ema_decay"] = EMA_DECAY if settings.ema_decay is None else settings.ema_decay
    return TrainingSettings(**acting)


def with_law(profile: ModelProfile, settings: TrainingSettings) -> ModelProfile:
    """The profile with its preset law replaced by that of the settings."""
    return profile.replace(training=_law(settings, profile))


def changes(before: Mapping[str, Any] | None, now: TrainingSettings) -> list[str]:
    """The settings that change when a run is resumed, as text. ``before``: the checkpoint's settings.

    Raises a VplanError if a setting changed that is not `RESUMABLE`.
    """
    if before is None:
        return ["the checkpoint does not say how it was trained; continuing as shown above"]
    after = now.to_json()
    other = [name for name in after if before.get(name) != after[name]]
    if changed := [name for name in other if name not in RESUMABLE]:
        set_then = [name for name in changed if before.get(name) is not None]
        then = ", ".join(f"{name} {_word(before[name])}" for name in set_then) or f"no {', '.join(changed)}"
        flags = " ".join(f"--{name.replace('_', '-')} {_word(before[name])}" for name in set_then)
        fix = f"pass {flags}" if flags else "leave them out"
        raise VplanError(f"the checkpoint was trained with {then}", f"{fix}, or start over with --resume no")
    return [f"{name} {_word(before.get(name))} -> {_word(after[name])}" for name in other]


def summary_lines(settings: TrainingSettings, profile: ModelProfile, strategy: Strategy) -> tuple[str, str]:
    """Two lines about complete settings: the law, and the optimizer and adapters."""
    value = _values(settings)
    preset = _acting_law(profile.training, profile)
    own = sorted(name for name, each in preset.items() if getattr(settings, name) != each)
    origin = f"preset of {profile.name} but for {', '.join(own)}" if own else f"preset of {profile.name}"
    schedule = value["lr_scheduler"] + (f", {value['warmup_steps']} warm-up steps" if settings.warmup_steps else "")
    rest = [strategy.optimizer, f"learning rate {value['learning_rate']} ({schedule})"]
    names = {"weight_decay": "weight decay", "betas": "betas", "max_grad_norm": "clipped at", "ema_decay": "EMA decay"}
    rest += [f"{word} {value[name]}" for name, word in names.items() if name in value]
    if settings.lora_alpha is not None:
        rest += [f"LoRA alpha {value['lora_alpha']}", f"begins {value['lora_init']}"]
    return f"training: {law_words(settings)} ({origin})", f"optimizer: {', '.join(rest)}"


def preset_words(profile: ModelProfile) -> str:
    """A model's preset law in one line."""
    return law_words(TrainingSettings(**_acting_law(profile.training, profile)))


def law_words(settings: TrainingSettings) -> str:
    """The law of complete settings in one line."""
    value = _values(settings)
    law = [f"predicts {value['prediction']}"] if "prediction" in value else []
    law += [_sampling_words(value) if "timestep_sampling" in value else "uniform timesteps"]
    if "timestep_shift" in value:
        shift = value["timestep_shift"]
        law += ["shifted by resolution" if shift == "resolution" else f"shift {shift}"]
    if (weighting := value["loss_weighting"]) != "none":
        law += [f"loss weights {weighting}" + (f" with gamma {value['snr_gamma']}" if "snr_gamma" in value else "")]
    law += [f"guidance {value['guidance']}"] if "guidance" in value else []
    if settings.caption_dropout:
        law += [f"captions dropped from {settings.caption_dropout:.0%} of samples"]
    return ", ".join(law)


def _values(settings: TrainingSettings) -> dict[str, str]:
    return {name: _word(each) for name, each in settings.to_json().items() if each is not None}


def _sampling_words(value: Mapping[str, str]) -> str:
    kind = f"{value['timestep_sampling']} noise levels"
    if value["timestep_sampling"] == "logit_normal" and (value["logit_mean"], value["logit_std"]) != ("0", "1"):
        return f"{kind} (mean {value['logit_mean']}, deviation {value['logit_std']})"
    return f"{kind} (scale {value['mode_scale']})" if "mode_scale" in value else kind


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_word, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- the law


def _with_gamma(settings: TrainingSettings) -> TrainingSettings:
    """`--snr-gamma 5` alone means min-SNR, as in diffusers' scripts."""
    if settings.snr_gamma is not None and settings.loss_weighting is None:
        return settings.replace(loss_weighting="min_snr")
    return settings


def _law(settings: TrainingSettings, profile: ModelProfile) -> Training:
    said = {field: getattr(settings, name) for name, field in LAW.items() if getattr(settings, name) is not None}
    return profile.training.replace(**said)


def _acting_law(law: Training, profile: ModelProfile) -> dict[str, Any]:
    """Setting -> value for a law, only for settings that have an effect under it."""
    kind = law.timestep_sampling
    acts = {"loss_weighting", "snr_gamma"} if law.loss_weighting == "min_snr" else {"loss_weighting"}
    if law.objective == "flow":
        acts |= {"timestep_sampling"}
        acts |= {"logit_mean", "logit_std"} if kind == "logit_normal" else set()
        acts |= {"mode_scale"} if kind == "mode" else set()
        acts |= {"timestep_shift"} if kind not in TOKEN_DENSITIES else set()
    elif takes_prediction(profile):
        acts |= {"prediction"}
    if has_guidance(profile):
        acts |= {"guidance"}
    return {name: getattr(law, field) for name, field in LAW.items() if name in acts}


def takes_prediction(profile: ModelProfile) -> bool:
    """Whether the model may be trained to predict noise or v: a Stable Diffusion UNet that makes images."""
    return profile.traits.stages and profile.kind == "image"


def has_guidance(profile: ModelProfile) -> bool:
    """Whether a guidance scale is an input of the model."""
    return bool(profile.config.get("guidance_embeds"))


def _of_law(settings: TrainingSettings, profile: ModelProfile) -> Iterator[tuple[str, str]]:
    law, title = _law(settings, profile), profile.title
    weighting, is_flow = law.loss_weighting, profile.training.objective == "flow"
    if settings.prediction is not None and not takes_prediction(profile):
        yield (
            f"--prediction: {title} always predicts {profile.training.objective}",
            "leave it out",
        )
    if settings.guidance is not None and not has_guidance(profile):
        yield f"--guidance: {title} has no guidance input", "leave it out; --validation-guidance is for samples"
    if settings.caption_dropout and profile.inputs.get("sound"):
        yield f"--caption-dropout: {title} has no captions", "leave it out"
    if not is_flow:
        yield from _of_noise_schedule(settings, law, title)
    elif weighting == "min_snr":
        fix = "use bell, cosmap, sigma_sqrt or none"
        yield f"min_snr weights the steps of a noise schedule, and {title} is a flow model", fix
    if settings.snr_gamma is not None and weighting != "min_snr":
        yield f"--snr-gamma has no effect with --loss-weighting {weighting}", "leave one of them out"
    if is_flow:
        yield from _of_noise_levels(settings, law, profile)


def _of_noise_schedule(settings: TrainingSettings, law: Training, title: str) -> Iterator[tuple[str, str]]:
    """Of a model that is trained on the steps of a noise schedule."""
    for name in ("timestep_sampling", "timestep_shift", "logit_mean", "logit_std", "mode_scale"):
        if getattr(settings, name) not in (None, "uniform"):
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag}: {title} trains all steps of its noise schedule alike", f"leave out {flag}"
    if law.loss_weighting not in ("none", "min_snr"):
        yield f"--loss-weighting {law.loss_weighting} is for flow models, and {title} is none", "use min_snr or none"
    if law.loss_weighting == "min_snr" and law.snr_gamma is None:
        yield "--loss-weighting min_snr has no gamma", "add --snr-gamma 5"


def _of_noise_levels(settings: TrainingSettings, law: Training, profile: ModelProfile) -> Iterator[tuple[str, str]]:
    """Of a flow model: how its noise levels are drawn."""
    kind = law.timestep_sampling
    of_kind = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
    for name, needed in of_kind.items():
        if getattr(settings, name) is not None and kind != needed:
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} has no effect with {kind} noise levels", f"add --timestep-sampling {needed}, or leave it out"
    if kind in TOKEN_DENSITIES:
        if settings.timestep_shift is not None:
            yield f"--timestep-shift has no effect with {kind}: its mean goes by tokens", "leave one of them out"
        if profile.experts == 2:
            yield f"{kind} does not say how two experts share the noise levels", "use uniform, logit_normal or mode"
    elif profile.experts == 2 and law.training_shift == "resolution":
        yield "a shift by resolution does not say how two experts share the noise levels", "use a number, as 5"


def _of_adapter(settings: TrainingSettings, job: Job) -> Iterator[tuple[str, str]]:
    if job.method == "lora":
        init = settings.lora_init
        if job.adapter == "dora" and init is not None and init not in NAMED_INITS:
            yield "--lora-init with a file: a DoRA's magnitudes are not read from one", "use gaussian or kaiming"
        if job.adapter == "lokr" and init is not None:
            yield "--lora-init has no effect on lokr, which begins as peft begins it", "leave it out"
        if job.adapter == "lokr" and settings.lora_alpha is not None:
            yield "--lora-alpha has no effect on lokr, whose matrices are whole", "leave it out"
        return
    for name in ("lora_alpha", "lora_init"):
        if getattr(settings, name) is not None:
            yield f"--{name.replace('_', '-')} has no effect in full training", "leave it out, or use --method lora"


def _of_optimizer(settings: TrainingSettings, strategy: Strategy) -> Iterator[tuple[str, str]]:
    name = strategy.optimizer
    if settings.betas is not None and name not in BETAS:
        yield f"--betas: {name} does not have two betas", f"leave it out, or use one of {', '.join(BETAS)}"
    if settings.epsilon is not None and name not in EPSILONS:
        yield f"--epsilon has no effect with {name}", f"leave it out, or use one of {', '.join(EPSILONS)}"
    if name == "prodigy" and settings.learning_rate not in (None, 1.0):
        yield "--learning-rate: Prodigy finds the rate itself", "leave it out"
    if settings.warmup_steps and settings.lr_scheduler == "constant":
        fix = "use --lr-scheduler constant_with_warmup, or leave out --warmup-steps"
        yield "--warmup-steps has no effect with --lr-scheduler constant", fix
    if settings.max_grad_norm and strategy.optimizer_step == "backward":
        reason = "--max-grad-norm has no effect: inside the backward pass there are no gradients to clip together"
        yield reason, "leave it out, or use another --optimizer-step"
    if settings.ema_decay is not None and strategy.ema == "none":
        yield "--ema-decay, but the plan keeps no moving average", "add --ema gpu or --ema cpu"
