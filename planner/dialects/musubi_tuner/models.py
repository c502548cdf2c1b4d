"""musubi-tuner's models and datasets, in its words and in ours."""

from __future__ import annotations

from typing import Any

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.common_bindings import find_model
from planner.dialects.base.values import as_list, integer
from planner.errors import VplanError, quoted
from planner.spec.job import Bucket

AT = "musubi-tuner 30c658c"
FAMILIES: dict[str, tuple[str, Settings]] = {
    "wan2.1-t2v-1.3b": ("wan", {"--task": "t2v-1.3B"}),
    "wan2.1-t2v-14b": ("wan", {"--task": "t2v-14B"}),
    "wan2.1-i2v-14b-480p": ("wan", {"--task": "i2v-14B"}),
    "wan2.1-i2v-14b-720p": ("wan", {"--task": "i2v-14B"}),
    "wan2.2-t2v-a14b": ("wan", {"--task": "t2v-A14B"}),
    "wan2.2-i2v-a14b": ("wan", {"--task": "i2v-A14B"}),
    "hunyuan-video": ("hv", {}),
    "hunyuan-video-1.5": ("hv_1_5", {"--task": "t2v"}),
    "qwen-image": ("qwen_image", {}),
    "qwen-image-edit": ("qwen_image", {"--model_version": "edit"}),
    "qwen-image-edit-2511": ("qwen_image", {"--model_version": "edit-2511"}),
    "z-image": ("zimage", {}),
    "z-image-turbo": ("zimage", {}),
    "flux.1-kontext-dev": ("flux_kontext", {}),
    "flux.2-dev": ("flux_2", {"--model_version": "dev"}),
    "flux.2-klein-4b": ("flux_2", {"--model_version": "klein-base-4b"}),
    "flux.2-klein-9b": ("flux_2", {"--model_version": "klein-base-9b"}),
    "krea-2": ("krea2", {}),
}
"""Model -> the beginning of its script's name (src/musubi_tuner/*_train_network.py), and what names it there."""

EQUIVALENTS = {"edit-2509": "edit", "i2v": "t2v"}
"""Words for models of the same shape -> those of the model we price (Qwen-Image-Edit's next version; HunyuanVideo 1.5
has one transformer for both tasks)."""

ENCODER_FP8 = {
    "wan": "--fp8_t5",
    "hv": "--fp8_llm",
    "hv_1_5": "--fp8_vl",
    "qwen_image": "--fp8_vl",
    "zimage": "--fp8_llm",
    "flux_kontext": "--fp8_t5",
    "flux_2": "--fp8_text_encoder",
}
UNUSABLE_FP8 = "flux_kontext"
"""The family whose flag of those ends every script that reads it: they name ``torch.float8e4m3fn``, which no torch has
(flux_kontext_train_network.py:61, flux_kontext_cache_text_encoder_outputs.py:86)."""
NETWORKS = {"hv": "lora", "zimage": "lora_zimage", "flux_kontext": "lora_flux"}
SCALED = frozenset({"wan", "qwen_image", "zimage", "hv_1_5", "flux_2", "flux_kontext", "krea2"})
SCRIPT = "src/musubi_tuner/{}_train_network.py"
FULL = tuple(f"src/musubi_tuner/{family}_train.py" for family in ("hv", "qwen_image", "zimage"))
"""Its scripts that train the whole transformer, which are read and not written."""
EDITS = ("--edit", "--edit_plus")
"""What a command says Qwen-Image-Edit with, beside ``--model_version`` (qwen_image_train_network.py at 1852ad34,
``is_edit = args.edit or args.edit_plus``)."""
WHICH = ("script", "--task", "--model_version", *EDITS, "--dit", "--dit_high_noise", "--offload_inactive_dit")


def family_of(model: str) -> str:
    """The beginning of the name of a model's scripts."""
    return FAMILIES.get(model, ("wan", {}))[0]  # of a model it has not, another binding says so


def is_full(settings: Settings) -> bool:
    """Whether a command is of a script that trains the whole transformer."""
    return str(settings.get("script", "")).endswith(FULL)


def is_script_of(family: str, settings: Settings) -> bool:
    """Whether a command is of a family's script, which trains an adapter or all."""
    network = SCRIPT.format(family)
    return str(settings.get("script", "")).endswith((network, network.replace("_train_network", "_train")))


def caches_text_and_latents_only(model: str) -> bool:
    """Whether what is cached of a clip is its latents and its caption's embedding, and no more: Wan 2.1 T2V."""
    return FAMILIES.get(model) in (("wan", {"--task": "t2v-1.3B"}), ("wan", {"--task": "t2v-14B"}))


def candidates_of(settings: Settings) -> list[str]:
    """The models that a command may mean, by its script, task and model version."""
    models = []
    for name, (family, words) in FAMILIES.items():
        plain = words or {"--model_version": None}
        plain = {key: value for key, value in plain.items() if value is not None or settings.get(key) != "original"}
        if is_script_of(family, settings) and all(settings.get(key) == value for key, value in plain.items()):
            models.append(name)
    return models


def model_of(settings: Settings) -> Fields:
    """The fields `model`, `experts` and `inactive_expert` that the settings mean. Raises a VplanError for an unknown
    model."""
    settings = settings | {name: EQUIVALENTS[value] for name in WHICH if (value := settings.get(name)) in EQUIVALENTS}
    if any(settings.get(flag) for flag in EDITS):
        settings |= {"--model_version": "edit"}
    candidates = candidates_of(settings)
    name_given = settings.get("model") or find_model(settings.get("--dit"))
    if not candidates:
        words = settings.get("--task") or settings.get("--model_version") or settings.get("script")
        fix = "supported: " + ", ".join(FAMILIES)
        raise VplanError(f"which model {quoted(words)} trains is not known here", fix)
    model = name_given if name_given in candidates else candidates[0]
    fields: Fields = {"model": model, "experts": None, "inactive_expert": "absent"}
    if lookup.model(model).experts > 1:
        fields["experts"] = "high" if "high" in str(settings.get("--dit", "")).lower() else "low"
        if settings.get("--dit_high_noise"):
            fields["experts"] = "both"
            fields["inactive_expert"] = "cpu" if settings.get("--offload_inactive_dit") else "gpu"
    return fields


def write_model(fields: Fields) -> Settings:
    """The settings that name a model and its experts. Raises an InexpressibleError for a model that the trainer does
    not have."""
    model, experts, inactive = fields["model"], fields["experts"], fields["inactive_expert"]
    if model not in FAMILIES:
        why = f"of the known models it trains {', '.join(FAMILIES)}"
        raise InexpressibleError(UnsupportedValue("model", model, next(iter(FAMILIES)), why))
    family, words = FAMILIES[model]
    settings: Settings = {"script": SCRIPT.format(family), **words, "--dit": f"models/{model}.safetensors"}
    if lookup.model(model).experts == 1 or experts != "both":
        if inactive != "absent":
            why = (
                "there is no other expert" if lookup.model(model).experts == 1 else "one expert is loaded, which trains"
            )
            raise InexpressibleError(UnsupportedValue("inactive_expert", inactive, "absent", why))
        if lookup.model(model).experts == 1:
            return settings
        return settings | {"--dit": f"models/{model}-{experts or 'low'}.safetensors"}
    if inactive == "cpu" and fields["swap_blocks"]:
        why = f"--offload_inactive_dit does not go with --blocks_to_swap ({AT} wan_train_network.py)"
        raise InexpressibleError(UnsupportedValue("inactive_expert", inactive, "gpu", why))
    settings |= {"--dit": f"models/{model}-low.safetensors", "--dit_high_noise": f"models/{model}-high.safetensors"}
    return settings | ({"--offload_inactive_dit": True} if inactive == "cpu" else {})


# ---- the dataset's file

SIZE, BATCH = "dataset:general.resolution", "dataset:general.batch_size"
FRAMES, EXTRACTION = "dataset:datasets[0].target_frames", "dataset:datasets[0].frame_extraction"
LONGEST = 129
"""``max_frames`` of datasets that take whole clips (dataset/config_utils.py)."""


IMAGES = ("image_directory", "image_jsonl_file")
"""Keys of a dataset of images, whatever the model (dataset/config_utils.py:231)."""

VIDEOS = ("video_directory", "video_jsonl_file")
SHORTEST = 1
"""``target_frames`` of a dataset of clips that does not say them (dataset/config_utils.py:68)."""


def shape_of(settings: Settings) -> Fields:
    """The fields of the samples' shapes (frames, height, width, batch, buckets) that the settings mean: those of every
    dataset of the file. Images are one frame, of a video model too."""
    model = lookup.model(model_of(settings)["model"])
    prefix = "dataset:datasets["
    numbers = {name[len(prefix) :].partition("]")[0] for name in settings if name.startswith(prefix)}
    tables = [f"{prefix}{number}]" for number in sorted(numbers)] or ["dataset:general"]
    shapes = tuple(dict.fromkeys(shape for table in tables for shape in _shapes(settings, table, model)))
    worst = max(shapes, key=lambda shape: shape.frames * shape.height * shape.width * (shape.batch_size or 1))
    batches = {shape.batch_size for shape in shapes}
    if len(batches) == 1:
        buckets = tuple(shape.replace(batch_size=None) for shape in shapes)
    else:
        buckets = tuple(sorted(shapes, key=lambda shape: shape == worst))
    fields = {"frames": worst.frames, "height": worst.height, "width": worst.width, "batch_size": worst.batch_size}
    return {**fields, "buckets": buckets if len(shapes) > 1 else ()}


def _shapes(settings: Settings, table: str, model: ModelProfile) -> list[Bucket]:
    """The shapes of one dataset's samples, with its batch size."""

    def key(name: str) -> Any:
        return settings.get(f"{table}.{name}", settings.get(f"dataset:general.{name}"))

    usual = model.shape
    size = as_list(key("resolution") or [usual.resolutions[0][1], usual.resolutions[0][0]])
    width, height = (integer(side, "resolution") for side in (size[0], size[-1]))
    batch = integer(key("batch_size") or 1, "batch_size")
    if model.kind == "image" or any(key(name) for name in IMAGES):
        lengths = [1]
    elif key("frame_extraction") == "full":
        lengths = [integer(key("max_frames") or LONGEST, "max_frames")]
    else:
        given = key("target_frames") or (SHORTEST if any(key(name) for name in VIDEOS) else usual.default_frames)
        lengths = sorted({integer(length, "target_frames") for length in as_list(given)})
    shape = {"height": height, "width": width, "batch_size": batch}
    return [Bucket.read({"frames": length, **shape}, "the dataset") for length in lengths]


def dataset_key(settings: Settings, key: str) -> Any:
    """The value of a key of the dataset's file, of the first dataset or else of the general section; None when it is
    absent."""
    return settings.get(f"dataset:datasets[0].{key}", settings.get(f"dataset:general.{key}"))


def write_shape(fields: Fields) -> Settings:
    """The settings for the samples' shapes. Raises an InexpressibleError for buckets that the trainer cannot be
    told."""
    sizes = {(bucket.height, bucket.width) for bucket in fields["buckets"]}
    lengths = sorted(bucket.frames for bucket in fields["buckets"]) or [fields["frames"]]
    odd = len(sizes) > 1 or any(bucket.batch_size for bucket in fields["buckets"]) or len(set(lengths)) < len(lengths)
    image = lookup.model(fields["model"]).kind == "image"
    if odd or (sizes and (sizes != {(fields["height"], fields["width"])} or image or len(lengths) == 1)):
        why = "a dataset has one size and one batch size, with several lengths"
        raise InexpressibleError(UnsupportedValue("buckets", fields["buckets"], (), why))
    if fields["frames"] != lengths[-1]:
        raise InexpressibleError(UnsupportedValue("frames", fields["frames"], lengths[-1], "the longest bucket counts"))
    settings: Settings = {SIZE: [fields["width"], fields["height"]], BATCH: fields["batch_size"]}
    return settings if image else settings | {FRAMES: lengths}
