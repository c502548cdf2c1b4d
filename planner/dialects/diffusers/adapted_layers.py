"""What a script of diffusers' examples puts adapters on, and the aspect ratios of its samples."""

from __future__ import annotations

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import Fields, FunctionPair, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.common_bindings import require_model
from planner.dialects.base.layer_names import chosen_layers
from planner.dialects.base.values import integer, number
from planner.dialects.diffusers.models import AT, SCRIPTS
from planner.errors import VplanError, quoted
from planner.layout.adapters import is_named
from planner.layout.recordings import parameters
from planner.spec.job import Bucket

LAYERS, BLOCKS, DROPOUT, DORA = "--lora_layers", "--lora_blocks", "--lora_dropout", "--use_dora"
RATIOS, WITH_RATIOS = "--aspect_ratio_buckets", "--use_aspect_ratio_buckets"


def _listed(settings: Settings, flag: str, separator: str = ",") -> list[str]:
    return [word.strip() for word in str(settings.get(flag) or "").split(separator) if word.strip()]


def _has(fields: Fields, flag: str) -> bool:
    script = SCRIPTS.get((fields["model"], fields["method"]))
    return script is not None and flag in flags.script("diffusers", script).flags


def _targets(settings: Settings) -> Fields:
    """--lora_layers as peft takes it; SD 3's --lora_blocks puts ``transformer_blocks.N.`` before each name
    (train_dreambooth_lora_sd3.py:1261)."""
    layers, blocks = _listed(settings, LAYERS), _listed(settings, BLOCKS)
    if not layers and not blocks:
        return {"lora_targets": None}
    profile = lookup.model(require_model(settings, "--pretrained_model_name_or_path"))
    names = layers or list(profile.lora.targets)
    if blocks:
        names = [f"{profile.stacks[0].list}.{integer(block, BLOCKS)}.{name}" for block in blocks for name in names]
    if not any(is_named(row.removesuffix(".weight"), names) for row in parameters(profile.name).rows):
        fault = f"{quoted(settings.get(LAYERS, settings.get(BLOCKS)))} names no layer of {profile.name}"
        raise VplanError(fault, f"write {LAYERS} with the ends of diffusers' names, as {profile.lora.targets[0]}")
    return {"lora_targets": chosen_layers(profile, lambda layer: is_named(layer, names))}


def _write_targets(fields: Fields) -> Settings:
    targets = fields["lora_targets"]
    if targets is None or fields["method"] != "lora":
        return {}
    if not _has(fields, LAYERS):
        why = "its example has no --lora_layers"
        raise InexpressibleError(UnsupportedValue("lora_targets", targets, None, why))
    return {LAYERS: ",".join(targets)}


def _dropout(settings: Settings) -> Fields:
    return {"lora_dropout": number(settings.get(DROPOUT, 0.0), DROPOUT)}


def _write_dropout(fields: Fields) -> Settings:
    dropout = fields["lora_dropout"]
    if not dropout or fields["method"] != "lora":
        return {}
    if not _has(fields, DROPOUT):
        raise InexpressibleError(UnsupportedValue("lora_dropout", dropout, 0.0, "its example has no --lora_dropout"))
    return {DROPOUT: dropout}


def _adapter(settings: Settings) -> Fields:
    """peft's own DoRA (train_dreambooth_lora_sdxl.py:1206, ``get_lora_config``)."""
    return {"adapter": "dora" if settings.get(DORA) else "lora"}


def _write_adapter(fields: Fields) -> Settings:
    if fields["adapter"] == "lora" or fields["method"] != "lora":
        return {}
    if not _has(fields, DORA):
        raise InexpressibleError(
            UnsupportedValue("adapter", fields["adapter"], "lora", "its example has no --use_dora")
        )
    return {DORA: True}


def ratios(settings: Settings) -> tuple[Bucket, ...]:
    """The shapes of ``--aspect_ratio_buckets "h,w;h,w"``, which --resolution says nothing beside; none without it. By
    --use_aspect_ratio_buckets alone they are made of --resolution's area (src/diffusers/training_utils.py
    ``parse_buckets_string``, ``generate_aspect_ratio_buckets``)."""
    found = []
    for pair in _listed(settings, RATIOS, ";"):
        sides = [side.strip() for side in pair.split(",")]
        if len(sides) != 2 or not settings.get(WITH_RATIOS):
            why = "pairs are height,width" if settings.get(WITH_RATIOS) else f"it takes them with {WITH_RATIOS} only"
            raise VplanError(f"{RATIOS} {quoted(settings[RATIOS])}: {why} ({AT})", "mend the flag: the script stops")
        height, width = (integer(side, RATIOS) for side in sides)
        found.append(Bucket.read({"frames": 1, "height": height, "width": width}, RATIOS))
    return tuple(dict.fromkeys(found))


def _buckets(settings: Settings) -> Fields:
    shapes = ratios(settings)
    return {"buckets": shapes if len(shapes) > 1 else ()}


def _write_buckets(fields: Fields) -> Settings:
    shapes = fields["buckets"]
    if not shapes:
        return {}
    why = "shapes are pairs of height and width, with one batch size"
    if not _has(fields, RATIOS) or len(set(shapes)) < 2 or any(one.frames != 1 or one.batch_size for one in shapes):
        raise InexpressibleError(UnsupportedValue("buckets", shapes, (), why))
    pairs = ";".join(f"{shape.height},{shape.width}" for shape in shapes)
    return {RATIOS: pairs, WITH_RATIOS: True}


ADAPTED = (
    FunctionPair(("lora_targets",), (LAYERS, BLOCKS), _targets, _write_targets, {"lora_targets": f"{LAYERS}, by name"}),
    FunctionPair(("lora_dropout",), (DROPOUT,), _dropout, _write_dropout, {"lora_dropout": DROPOUT}),
    FunctionPair(("adapter",), (DORA,), _adapter, _write_adapter, {"adapter": f"lora, dora ({DORA}, SDXL)"}),
    FunctionPair(("buckets",), (RATIOS, WITH_RATIOS), _buckets, _write_buckets, {"buckets": RATIOS}),
)
