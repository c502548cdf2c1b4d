"""What SimpleTuner's own code ends a run for before the first step, read at bc8e6ab. `check` names it beside the
estimate, and a fix or an exported plan takes back what it would end for.

Left out is what it refuses among options that are not priced at all: group offload, ControlNets, trained text encoders,
and what of DeepSpeed and FSDP `engines` and `deepspeed_config` refuse.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.dialects.base.bindings import Remark, Settings
from planner.dialects.base.values import integer, number
from planner.dialects.simpletuner import deepspeed_config, lycoris_config
from planner.dialects.simpletuner.aspect_buckets import VALIDATED_FRAMES
from planner.dialects.simpletuner.block_checkpoints import INTERVAL, ONE_BY_ONE, SEGMENTS, STRIDE
from planner.dialects.simpletuner.defaults import is_true
from planner.dialects.simpletuner.models import CONFIG, FAST_SCHEDULE, SCHEDULED, family_of, of

ARGUMENTS = "SimpleTuner's helpers/configuration/cmd_args.py"
SAFETY = "SimpleTuner's helpers/training/default_settings/safety_check.py"
TRAINER = "SimpleTuner's helpers/training/trainer.py"
OF_FAMILY = "SimpleTuner's helpers/models/{}/model.py"

NO_FP8_QUANTO = {
    **{family: family for family in ("sdxl", "sd1x", "sd3", "hidream", "sana", "sanavideo", "ltxvideo", "wan")},
    "sd2x": "sd1x",
}
"""Families that end at ``base_model_precision`` fp8-quanto -> their folder in helpers/models (``check_user_config``
there)."""

OFFLOADS_ATTENTION = (
    *("chroma", "flux", "flux2", "hunyuanvideo", "kandinsky5_image", "kandinsky5_video", "krea2", "ltxvideo2"),
    *("sd3", "wan", "z_image"),
)
"""Families of ours that take ``gradient_checkpointing_offload_attention`` (safety_check.py
``attention_activation_offload_supported_models``)."""

TEXT_ENCODERS = tuple(f"text_encoder_{number}_precision" for number in range(1, 5))
"""Quantise text encoders before they encode what is cached (helpers/training/trainer.py ``init_precision`` with
``preprocessing_models_only``); priced are encoders in 16 bits. Then they are gone, whatever it is."""

ENGINES = ("quanto", "torchao")
"""Of which a run has one: what the words of a precision end with."""

LOADED_SO = ("nf4-bnb", "int4-torchao")
"""Bases that diffusers quantises as it loads, so that their engine does not count (helpers/training/quantisation
PIPELINE_ONLY_PRESETS)."""

APART = ("-sdnq", "fp8-native", "fp8-transformerengine")
"""Ends of the precisions that no text encoder has beside a base in one of ours (cmd_args.py
``manual_only_precisions``)."""

ONE_BACKEND = {"hidream": "text_encoder_4_precision"}
"""Family -> its encoder that has the base's backend, whatever that is (helpers/models/hidream/model.py
``check_user_config``)."""

GIVES_WAY = "int4-quanto"
"""Its precision that is taken back there where the base has another."""

BY_EIGHT = ("ltxvideo2",)
"""Families whose validation makes a multiple of eight frames and one more, also where it is off
(helpers/models/ltxvideo2/model.py:1543)."""

SWAP = "musubi_blocks_to_swap"
LYCORIS_KEYS = ("multiplier", "linear_alpha")


def stops(settings: Settings) -> Iterator[Remark]:
    """The settings that it refuses, each with the reason."""
    yield from _schedule(settings)
    yield from _checkpoints(settings)
    yield from _of_family(settings)
    if is_true(of(settings, "ramtorch")) and integer(of(settings, SWAP) or 0, SWAP):
        yield Remark(SWAP, f"refused with ramtorch ({SAFETY}:85)")
    base = str(of(settings, "base_model_precision"))
    if uses_sage(settings) and "nf4" in base:
        yield Remark(
            "attention_mechanism", f"refused over base_model_precision {base}: no SageAttention ({SAFETY}:164)"
        )
    yield from refused_encoders(settings, base, str(of(settings, "quantize_via")))
    yield from _lycoris(settings)
    yield from deepspeed_config.stops(settings, settings.get("gpus", 1) * settings.get("nodes", 1))


def _schedule(settings: Settings) -> Iterator[Remark]:
    epochs, steps = (number(of(settings, name) or 0, name) for name in ("num_train_epochs", "max_train_steps"))
    if steps > 0 and epochs > 0:
        left_out = "" if f"{CONFIG}num_train_epochs" in settings else f"{epochs:g} where it is left out, and "
        why = f"{left_out}refused beside max_train_steps unless it is 0 ({ARGUMENTS}:982)"
        yield Remark("num_train_epochs", why)
    elif not steps and not epochs:
        yield Remark("max_train_steps", f"missing where num_train_epochs is 0 ({TRAINER}:3852)")


def _checkpoints(settings: Settings) -> Iterator[Remark]:
    family = family_of(settings)
    for name in (INTERVAL, STRIDE):
        if str(of(settings, name)).strip() == "0" and family in (*SEGMENTS, *ONE_BY_ONE):
            yield Remark(name, f"refused as 0: from 1, or left out ({SAFETY}:285)")
    name = "gradient_checkpointing_offload_attention"
    if is_true(of(settings, name)) and family not in OFFLOADS_ATTENTION:
        yield Remark(name, f"refused with model_family {family} ({SAFETY}:264)")


def _of_family(settings: Settings) -> Iterator[Remark]:
    """On several GPUs fp8-quanto under peft's adapters is turned into int8-quanto before a family is asked
    (``safety_check``)."""
    family, base = family_of(settings), str(of(settings, "base_model_precision"))
    several = settings.get("gpus", 1) * settings.get("nodes", 1) > 1
    turned = several and of(settings, "model_type") == "lora" and not lycoris_config.is_lycoris(settings)
    if base == "fp8-quanto" and family in NO_FP8_QUANTO and not turned:
        where = OF_FAMILY.format(NO_FP8_QUANTO[family])
        yield Remark("base_model_precision", f"refused as {base} with model_family {family} ({where})")
    flavour = str(of(settings, "model_flavour") or "")
    if (family, flavour) in SCHEDULED and not any(
        is_true(of(settings, name)) for name in (FAST_SCHEDULE, "i_know_what_i_am_doing")
    ):
        where = OF_FAMILY.format(family)
        yield Remark("model_flavour", f"refused as {flavour} without {FAST_SCHEDULE} ({where})")
    frames = integer(of(settings, VALIDATED_FRAMES) or 1, VALIDATED_FRAMES)
    if family in BY_EIGHT and frames % 8 != 1 and not is_true(of(settings, "validation_audio_only")):
        why = f"refused as {frames}: a multiple of 8, and one more ({OF_FAMILY.format(family)}:1543)"
        yield Remark(VALIDATED_FRAMES, why)


def uses_sage(settings: Settings) -> bool:
    """Whether the attention is SageAttention, which nothing in nf4 takes."""
    return "sageattention" in str(of(settings, "attention_mechanism") or "")


def refused_encoders(settings: Settings, base: str, via: str) -> Iterator[Remark]:
    """The text encoders whose precision does not go with a base, or with another's. ``base``, ``via``:
    ``base_model_precision`` and ``quantize_via``."""
    engine = "" if base in LOADED_SO or via == "pipeline" else _engine(base)
    for name in TEXT_ENCODERS:
        word = str(of(settings, name) or "no_change").lower()
        own = _engine(word)
        if word.endswith(APART) and (base != "no_change" or via == "pipeline"):
            beside = f"quantize_via {via}" if base == "no_change" else f"base_model_precision {base}"
            yield Remark(name, f"refused as {word} with {beside} ({ARGUMENTS}:860)")
        elif _has_other_backend(name, settings, word, base):
            if word != GIVES_WAY:
                where = OF_FAMILY.format(family_of(settings))
                yield Remark(name, f"refused as {word} over base_model_precision {base} ({where})")
        elif own and engine and own != engine:
            yield Remark(name, f"refused as {word}: quanto and torchao together ({TRAINER}:2502)")
        else:
            engine = engine or own


def _has_other_backend(name: str, settings: Settings, word: str, base: str) -> bool:
    mine, its = (each.rpartition("-")[2] for each in (word, base))
    return ONE_BACKEND.get(family_of(settings)) == name and "no_change" not in (word, base) and mine != its


def _engine(precision: str) -> str:
    return next((engine for engine in ENGINES if precision.endswith(engine)), "")


def _lycoris(settings: Settings) -> Iterator[Remark]:
    config = settings.get(lycoris_config.FILE)
    if not isinstance(config, dict):
        return
    rank = () if config.get("full_matrix") is True else ("linear_dim",)
    for key in (*LYCORIS_KEYS, *rank):
        if key not in config:
            yield Remark(f"lycoris_config's {key}", f"missing ({ARGUMENTS}:1181)")


def said_beside(settings: Settings, base: str, via: str) -> list[str]:
    """What a fix that quantises the base says beside it, so that its trainer starts: encoders that it does not go with
    as they are priced, in 16 bits, and attention that nf4 takes."""
    more = [f"{each.flag}: no_change" for each in refused_encoders(settings, base, via)]
    return more + (["attention_mechanism: diffusers"] if uses_sage(settings) and "nf4" in base else [])
