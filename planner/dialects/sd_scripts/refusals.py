"""What sd-scripts' own code ends a run for before the first step, read at 48d368f. `check` names it beside the
estimate, and neither a fix nor an exported plan contains it."""

from __future__ import annotations

from collections.abc import Iterator

from planner.dialects.base.bindings import Fields, Remark, Settings
from planner.dialects.base.dialect import Clash
from planner.dialects.kohya.dataset_tables import DATASET
from planner.dialects.sd_scripts.engine import AT

CHANGE_PIXELS = ("color_aug", "random_crop")
CHANGE_CAPTIONS = ("shuffle_caption", "caption_dropout_rate", "caption_tag_dropout_rate", "token_warmup_step")
"""Settings of a data set, or flags that stand for them."""
TEXT_CACHED_WHATEVER_CAPTIONS = ("lumina_train_network.py", "anima_train_network.py")
"""Scripts that do not ask about captions (Lumina's), or not about all of them (Anima's)."""


def _offloads_and_swaps(fields: Fields) -> bool:
    return fields["gradient_checkpointing"] == "offload" and bool(fields["swap_blocks"])


SWAPS_OR_OFFLOADS = Clash(
    _offloads_and_swaps,
    "gradient_checkpointing",
    "full",
    "--cpu_offload_checkpointing",
    f"refused with --blocks_to_swap ({AT} flux_train_network.py, flux_train.py, sd3_train_network.py)",
)


def stops(settings: Settings) -> Iterator[Remark]:
    """The settings that a script's assertions refuse, each with the reason."""
    for half in ("fp16", "bf16"):
        if settings.get(f"--full_{half}") and settings.get("--mixed_precision") != half:
            yield Remark(f"--full_{half}", f"refused without --mixed_precision {half} ({AT} train_network.py)")
    if _caches(settings, "--cache_latents"):
        for name in _named(settings, CHANGE_PIXELS):
            yield Remark(name, f"refused with --cache_latents ({AT} train_network.py)")
    if _caches(settings, "--cache_text_encoder_outputs") and not _takes_any_caption(settings):
        for name in _named(settings, CHANGE_CAPTIONS):
            yield Remark(name, f"refused with --cache_text_encoder_outputs ({AT} library/train_util.py)")
    if settings.get("--fused_backward_pass") and str(settings.get("--optimizer_type")).lower() != "adafactor":
        yield Remark(
            "--fused_backward_pass", f"refused without --optimizer_type Adafactor ({AT} library/train_util.py)"
        )


def _caches(settings: Settings, flag: str) -> bool:
    return bool(settings.get(flag) or settings.get(f"{flag}_to_disk"))


def _takes_any_caption(settings: Settings) -> bool:
    words = (str(settings.get("script")), str(settings.get("--model_type")))
    return any(word.endswith(TEXT_CACHED_WHATEVER_CAPTIONS) for word in words)


def _named(settings: Settings, names: tuple[str, ...]) -> Iterator[str]:
    """Those of the names that are set, as a flag or in the data set's file, as they are typed there."""
    for name in names:
        in_file = (key for key in settings if key.startswith(DATASET) and key.rpartition(".")[2] == name)
        if any(settings[key] for key in in_file):
            yield name
        elif settings.get(f"--{name}"):
            yield f"--{name}"
