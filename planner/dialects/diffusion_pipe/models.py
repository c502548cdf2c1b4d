"""diffusion-pipe's models and datasets, in its words and in ours."""

from __future__ import annotations

import re
from typing import Any

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.common_bindings import find_checkpoint, find_model
from planner.dialects.base.values import as_list, integer
from planner.errors import VplanError, quoted
from planner.spec.job import Bucket

AT = "diffusion-pipe 8f83dbf"
TYPES: dict[str, tuple[str, str]] = {
    "wan2.1-t2v-1.3b": ("wan", "ckpt_path"),
    "wan2.1-t2v-14b": ("wan", "ckpt_path"),
    "wan2.1-i2v-14b-480p": ("wan", "ckpt_path"),
    "wan2.1-i2v-14b-720p": ("wan", "ckpt_path"),
    "wan2.2-t2v-a14b": ("wan", "ckpt_path"),
    "wan2.2-i2v-a14b": ("wan", "ckpt_path"),
    "wan2.2-ti2v-5b": ("wan", "ckpt_path"),
    "hunyuan-video": ("hunyuan-video", "ckpt_path"),
    "flux.1-dev": ("flux", "diffusers_path"),
    "flux.1-kontext-dev": ("flux", "diffusers_path"),
    "flux.1-schnell": ("flux", "diffusers_path"),
    "ltx-video-2b": ("ltx-video", "diffusers_path"),
    "ltx-video-13b": ("ltx-video", "diffusers_path"),
    "qwen-image": ("qwen_image", "diffusers_path"),
    "qwen-image-edit": ("qwen_image", "diffusers_path"),
    "sd3-medium": ("sd3", "diffusers_path"),
    "sd3.5-medium": ("sd3", "diffusers_path"),
    "sd3.5-large": ("sd3", "diffusers_path"),
    "sdxl": ("sdxl", "checkpoint_path"),
}
"""Model -> ``[model] type`` and the key that names its weights (docs/supported_models.md)."""

READ_TOO: dict[str, tuple[str, ...]] = {
    "flux2": ("flux.2-dev", "flux.2-klein-4b", "flux.2-klein-9b"),
    "krea2": ("krea-2",),
    "chroma": ("chroma1-hd",),
    "lumina_2": ("lumina-image-2.0",),
    "z_image": ("z-image",),
    "hunyuan_video_15": ("hunyuan-video-1.5",),
    "hunyuan_image": ("hunyuan-image-2.1",),
    "ernie_image": ("ernie-image",),
    "ideogram4": ("ideogram-4",),
    "hidream": ("hidream-i1",),
    "anima": ("anima",),
}
"""``[model] type`` -> models that are read and not written: their files are named one by one (``diffusion_model``,
``vae``, ``text_encoders``; models/flux2.py, krea2.py, z_image.py, hunyuan_video_15.py), or in two places
(models/chroma.py: its own file and FLUX.1's folder; models/hidream.py: its folder and Llama's;
models/cosmos_predict2.py: Anima's)."""

TEXT_TOKENS = {"flux.1-schnell": 512}
"""Model -> the tokens that its prompts are filled up to, where its usual ones are fewer (models/flux.py takes what
diffusers' ``_get_t5_prompt_embeds`` has by default)."""

PATHS = ("ckpt_path", "diffusers_path", "checkpoint_path", "transformer_path", "single_file_path", "diffusion_model")
WHICH = ("config:model.type", *(f"config:model.{name}" for name in PATHS))
EXPERTS = ("low", "high")


PAIRED = {"qwen-image": "qwen-image-edit", "flux.1-dev": "flux.1-kontext-dev"}
"""Model -> the one that is trained with images to edit: both have the same ``[model] type`` and weights of the same
shapes. A sample has its image's latents beside its own where the data set has them, whatever the weights are called
(``control_latents`` in models/qwen_image.py, flux.py and flux2.py ``prepare_inputs``)."""


def model_of(settings: Settings) -> Fields:
    """The fields `model` and `experts` that the settings mean. Raises a VplanError for an unknown model."""
    kind = settings.get("config:model.type")
    candidates = [name for name, (known, _) in TYPES.items() if known == kind] or list(READ_TOO.get(str(kind), ()))
    if not candidates:
        listed = dict.fromkeys([known for known, _ in TYPES.values()] + list(READ_TOO))
        raise VplanError(f"model.type {quoted(kind)} is not supported here", f"supported: {', '.join(listed)}")
    model = settings.get("model") or named_model(settings)
    if model not in candidates:
        if len(candidates) > 1:
            raise _unnamed(settings)
        model = candidates[0]
    fields: Fields = {"model": _of_the_data(settings, str(model)), "experts": None}
    if lookup.model(fields["model"]).experts > 1:
        fields["experts"] = (
            "high" if "high" in str(settings.get("config:model.transformer_path", "")).lower() else "low"
        )
    return fields


def named_model(settings: Settings) -> str | None:
    """The model that a path names; that of the transformer alone counts before that of the whole."""
    paths = [settings.get(f"config:model.{name}") for name in reversed(PATHS)]
    return next(filter(None, (find_model(path) or find_checkpoint(path) for path in paths)), None)


def _unnamed(settings: Settings) -> VplanError:
    """The fault where no path names a model of the type, with what was looked at."""
    paths = {name: settings.get(f"config:model.{name}") for name in PATHS}
    given = ", ".join(f"{name} {quoted(path)}" for name, path in paths.items() if path)
    kind = settings["config:model.type"]
    fault = f"cannot tell which {kind} model this is from {given or 'no ' + ', '.join(PATHS)}"
    return VplanError(fault, "add --model NAME")


def edits(settings: Settings) -> bool:
    """Whether a directory of the dataset has images to edit."""
    return any(settings.get(f"{folder}control_path") for folder in _folders(settings))


def _of_the_data(settings: Settings, model: str) -> str:
    """The model as the dataset trains it, where that is here: with images to edit, or without."""
    if "dataset" not in settings:
        return model
    if edits(settings):
        return PAIRED.get(model, model)
    return {edit: plain for plain, edit in PAIRED.items()}.get(model, model)


def references_of(settings: Settings) -> Fields:
    """The images beside each sample: one of a model that may take some, by the dataset. Others have as many as
    always."""
    takes = lookup.model(model_of(settings)["model"]).shape.takes_references
    return {"references": 1 if takes and edits(settings) else None}


def write_references(fields: Fields) -> Settings:
    """No settings: files say it (``control_path``). Raises an InexpressibleError for more than one image."""
    if (images := fields["references"] or 0) > 1:
        raise InexpressibleError(UnsupportedValue("references", images, 1, "each image has one to edit (control_path)"))
    return {}


def write_model(fields: Fields) -> Settings:
    """The settings that name a model and its expert. Raises an InexpressibleError for a model that the trainer does not
    have."""
    model = fields["model"]
    if model not in TYPES:
        why = f"of the known models it trains {', '.join(TYPES)}"
        raise InexpressibleError(UnsupportedValue("model", model, next(iter(TYPES)), why))
    kind, path = TYPES[model]
    settings: Settings = {"config:model.type": kind, f"config:model.{path}": f"models/{model}"}
    if lookup.model(model).experts > 1:
        if fields["experts"] not in EXPERTS:
            why = "one run trains one expert (docs/supported_models.md, Wan2.2)"
            raise InexpressibleError(UnsupportedValue("experts", fields["experts"], "low", why))
        settings["config:model.transformer_path"] = f"models/{model}/{fields['experts']}_noise_model"
    return settings


# ---- the dataset's file: size buckets, which say exactly what a sample is

BUCKETS = "dataset:size_buckets"
BATCH = "config:micro_batch_size_per_gpu"
IMAGE_BATCH = "config:image_micro_batch_size_per_gpu"


def shape_of(settings: Settings) -> Fields:
    """The fields of the samples' shapes: from the dataset's size buckets, else from its resolutions, as squares, with
    every frame bucket. A directory's own stand before the dataset's (utils/dataset.py ``DirectoryDataset``). Images of
    a video model may have a batch of their own."""
    model = lookup.model(model_of(settings)["model"])
    rows = [row for folder in _folders(settings) for row in _rows(settings, folder)]
    shapes = list(dict.fromkeys(_bucket(row, model) for row in rows))
    batch, of_images = _batch(settings, BATCH, 1), _batch(settings, IMAGE_BATCH, None)
    if model.kind == "video" and of_images not in (None, batch):
        if all(shape.frames == 1 for shape in shapes):
            batch = of_images
        else:
            own = {"batch_size": of_images}
            shapes = [shape.model_copy(update=own) if shape.frames == 1 else shape for shape in shapes]
    worst = max(shapes, key=lambda candidate: (candidate.pixels, candidate.frames))
    shape = {"frames": worst.frames, "height": worst.height, "width": worst.width, "batch_size": batch}
    return {**shape, "buckets": tuple(shapes) if len(shapes) > 1 else ()}


def _folders(settings: Settings) -> list[str]:
    """What stands before the keys of each directory; of the dataset's own where none is named."""
    found = (re.match(r"dataset:directory\[\d+\]\.", key) for key in settings)
    return list(dict.fromkeys(match[0] for match in found if match)) or ["dataset:"]


def _rows(settings: Settings, folder: str) -> list[list[Any]]:
    """[width, height, frames] of every shape of a directory."""
    usual = lookup.model(model_of(settings)["model"]).shape
    if buckets := rows_of(settings, f"{folder}size_buckets") or rows_of(settings, BUCKETS):
        return buckets
    sizes = rows_of(settings, f"{folder}resolutions") or rows_of(settings, "dataset:resolutions")
    frames = settings.get(f"{folder}frame_buckets") or settings.get("dataset:frame_buckets")
    return [
        [*(size if isinstance(size, list) else (size, size)), item]
        for size in sizes or [[usual.resolutions[0][1], usual.resolutions[0][0]]]
        for item in as_list(frames or (1 if "dataset" in settings else usual.default_frames))
    ]


def _batch(settings: Settings, key: str, default: int | None) -> Any:
    """The largest batch of a key that is a number, or has one for each resolution."""
    batches = [row[-1] if isinstance(row, list) and row else row for row in rows_of(settings, key)]
    given = batches or [settings.get(key, default)]
    return max(integer(item, key.partition(":")[2]) for item in given) if given != [None] else None


def _bucket(row: Any, model: ModelProfile) -> Bucket:
    """[width, height, frames] as a bucket; sides are made multiples, as its buckets are, and frames are cut to one and
    a multiple of what the VAE makes one latent (models/base.py ``align_frames``)."""
    if not isinstance(row, list) or len(row) != 3:
        raise VplanError(f"the size {quoted(row)} of the dataset is not understood", "write [width, height, frames]")
    width, height, frames = (integer(side, "a size of the dataset") for side in row)
    if frames > 1:
        frames -= (frames - 1) % model.vae.temporal
    step = model.shape.size_multiple
    sides = {"width": width // step * step or step, "height": height // step * step or step}
    return Bucket.read({"frames": frames, **sides}, where="the dataset")


def rows_of(settings: Settings, key: str) -> list[Any]:
    """The items of a list, which comes flat where they are lists themselves."""
    if isinstance(settings.get(key), list):
        return list(settings[key])
    return [value for name, value in settings.items() if re.fullmatch(re.escape(key) + r"\[\d+\]", name)]


def write_shape(fields: Fields) -> Settings:
    """The settings for the samples' shapes. Raises an InexpressibleError for what the dataset's file cannot say."""
    buckets = fields["buckets"]
    shape = (fields["frames"], fields["height"], fields["width"])
    own = {bucket.batch_size for bucket in buckets if bucket.frames == 1}
    unlike = len(own) > 1 or any(bucket.batch_size for bucket in buckets if bucket.frames > 1)
    of_images = next(iter(own), None)
    if of_images and all(bucket.frames == 1 for bucket in buckets):
        unlike = True
    if unlike or len(buckets) == 1 or len(set(buckets)) < len(buckets):
        why = "size buckets share one batch size here, but for that of images beside clips"
        raise InexpressibleError(UnsupportedValue("buckets", buckets, (), why))
    worst = max(
        buckets,
        key=lambda candidate: (candidate.pixels, candidate.frames),
        default=None,
    )
    if worst and (worst.frames, worst.height, worst.width) != shape:
        size = {"frames": worst.frames, "height": worst.height, "width": worst.width}
        why = "the largest size bucket counts"
        raise InexpressibleError(*(UnsupportedValue(name, fields[name], value, why) for name, value in size.items()))
    rows = [[bucket.width, bucket.height, bucket.frames] for bucket in buckets] or [[shape[2], shape[1], shape[0]]]
    return {BUCKETS: rows, BATCH: fields["batch_size"], **({IMAGE_BATCH: of_images} if of_images else {})}
