"""Validation samples of a training run: their settings, whether they fit in memory, and whether they are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.catalog import card_lookup, lookup
from planner.errors import NotRecordedError, VplanError, quoted
from planner.estimate.estimate import estimate
from planner.launch.launch import Preparation, Validation
from planner.layout.recordings import load_facts
from planner.spec.plan import Plan
from planner.units import format_gib
from planner.worker_process import read_json

PHASES = {"denoise": "denoising", "decode": "decoding"}
MAX_PROMPTS, MAX_PROMPT = 100, 10_000
"""Prompts of a run, and characters of a prompt."""


def fitted(plan: Plan) -> tuple[Plan, str | None]:
    """(plan, None), or (plan without samples, reason) if denoising or decoding the samples does not fit."""
    if plan.strategy.validation_mode == "off":
        return plan, None
    profile, (_, card) = lookup.model(plan.job.model), card_lookup.parse_gpus(plan.machine.gpu)
    try:
        configuration = plan.configuration
        answer = estimate(configuration, load_facts(configuration, profile, card), plan.trainer)
    except NotRecordedError:
        return plan, None
    phases = {name: answer.phases[name].device_bytes for name in PHASES if name in answer.phases}
    above = {name: nbytes for name, nbytes in phases.items() if nbytes > answer.budget_bytes}
    if not above:
        return plan, None
    worst = max(above, key=lambda name: above[name])
    needs = (
        f"{PHASES[worst]} takes {format_gib(above[worst])}, but {card.title} gives {format_gib(answer.budget_bytes)}"
    )
    strategy = plan.strategy.replace(validation_mode="off", group_offload="none", group_offload_stream=False)
    fix = "--vae-tiling, --validation-mode offload or a smaller --validation shape may"
    return plan.replace(strategy=strategy), f"no samples are made because they do not fit: {needs} ({fix})"


def prompts(plan: Plan, options: Mapping[str, Any], flag: str | None) -> tuple[str, ...]:
    """The prompts given as options, then those in a file, one per line. ``flag``: an option in use that needs samples;
    None if there is none. Raises a VplanError for unusable prompts, for ``flag`` if the plan makes no samples, and for
    --validation-guidance if it samples without guidance."""
    if plan.strategy.validation_mode == "off" and flag:
        fault = f"{flag}, but the plan makes no samples (validation_mode off)"
        raise VplanError(fault, "add --validation-mode on, so that they are planned for too")
    is_input = lookup.model(plan.job.model).config.get("guidance_embeds")
    if options.get("validation_guidance") is not None and not plan.job.guided and not is_input:
        fix = "leave it out, or set cfg = true in the plan's validation"
        raise VplanError("--validation-guidance, but the plan samples without guidance (cfg = false)", fix)
    file = options["validation_prompts"]
    texts = [*options["validation_prompt"], *(_lines(Path(file).expanduser()) if file else ())]
    if len(texts) > MAX_PROMPTS:
        raise VplanError(
            f"{len(texts)} validation prompts", f"use at most {MAX_PROMPTS}: each one is a sample to wait for"
        )
    for prompt in texts:
        if not prompt.strip() or len(prompt) > MAX_PROMPT or "\0" in prompt:
            raise VplanError(f"validation prompt {quoted(prompt)} is not a prompt", f"use 1 to {MAX_PROMPT} characters")
    return tuple(prompt.strip() for prompt in texts)


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PROMPTS * MAX_PROMPT + 1).decode("utf-8-sig")
    except OSError as error:
        raise VplanError(f"cannot read {quoted(str(path))}: {error.strerror}", "pass a file with prompts") from None
    except UnicodeDecodeError:
        raise VplanError(f"{quoted(str(path))} is not UTF-8 text", "write one prompt per line") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise VplanError(f"{quoted(str(path))} has no prompt", "write one prompt per line")
    return lines


def request(listed: str | None, options: Mapping[str, Any]) -> Validation | None:
    """The validation settings for the ranks; None if no samples are made. ``listed``: the file that lists the samples,
    if any; ``options``: the options of `vplan train`."""
    if listed is None:
        return None
    return Validation(
        prompts=listed,
        every=options["validate_every"] or 0,
        steps=options["validation_steps"],
        guidance=options["validation_guidance"],
        seed=options["seed"],
    )


def about(wanted: Preparation) -> dict[str, Any]:
    """Everything that prepared samples depend on, as JSON values: prompts, data, weights, model, shape and dtypes. They
    can be reused if it is equal."""
    job = wanted.plan.job
    shape = job.validation or job.shapes[0]
    return {
        "prompts": list(wanted.prompts),
        "data": wanted.data,
        "weights": wanted.weights,
        "model": job.model,
        "shape": [shape.frames, shape.height, shape.width],
        "dtypes": [wanted.plan.strategy.text_encoder_dtype, wanted.plan.strategy.autocast],
    }


def is_listed(wanted: Preparation) -> bool:
    """Whether the samples of a run are prepared already: listed with equal inputs, and with all files in place."""
    if wanted.validation is None:
        return True
    path = Path(wanted.validation)
    if not path.is_file():
        return False
    listing = read_json(path)
    if listing.get("about") != about(wanted):
        return False
    files = [file for sample in listing["samples"] for name, file in sample.items() if name != "name" and file]
    return all(Path(file).is_file() for file in files)
