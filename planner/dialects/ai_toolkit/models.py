"""ai-toolkit's models, datasets and samples, in its words and in ours."""

from __future__ import annotations

import math
import re

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.common_bindings import find_model
from planner.dialects.base.layer_names import chosen_layers, layer_names
from planner.dialects.base.values import as_list, integer, number
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.ai_toolkit import QUANTISED_WHOLE, UINTX
from planner.layout.trainer_terms.lora_layers import WITHOUT_EXPERTS
from planner.spec.job import QUANTISED, Bucket, ValidationShape

AT = "ai-toolkit 27a03a9"
PROCESS = "config:config.process[0]."
MODEL, TRAIN, NETWORK = f"{PROCESS}model.", f"{PROCESS}train.", f"{PROCESS}network."
DATA, SAMPLE = f"{PROCESS}datasets[0].", f"{PROCESS}sample."
ARCHES: dict[str, tuple[str, str]] = {
    "wan2.1-t2v-1.3b": ("wan21", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    "wan2.1-t2v-14b": ("wan21", "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
    "wan2.1-i2v-14b-480p": ("wan21_i2v", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"),
    "wan2.1-i2v-14b-720p": ("wan21_i2v", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
    "wan2.2-t2v-a14b": ("wan22_14b", "ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16"),
    "wan2.2-i2v-a14b": ("wan22_14b_i2v", "ai-toolkit/Wan2.2-I2V-A14B-Diffusers-bf16"),
    "wan2.2-ti2v-5b": ("wan22_5b", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"),
    "qwen-image": ("qwen_image", "Qwen/Qwen-Image"),
    "qwen-image-edit": ("qwen_image_edit", "Qwen/Qwen-Image-Edit"),
    "qwen-image-edit-2511": ("qwen_image_edit_plus:2511", "Qwen/Qwen-Image-Edit-2511"),
    "flux.1-dev": ("flux", "black-forest-labs/FLUX.1-dev"),
    "flux.1-schnell": ("flux", "black-forest-labs/FLUX.1-schnell"),
    "flex.1-alpha": ("flux", "ostris/Flex.1-alpha"),
    "flux.1-kontext-dev": ("flux_kontext", "black-forest-labs/FLUX.1-Kontext-dev"),
    "flux.2-dev": ("flux2", "black-forest-labs/FLUX.2-dev"),
    "flux.2-klein-4b": ("flux2_klein_4b", "black-forest-labs/FLUX.2-klein-base-4B"),
    "flux.2-klein-9b": ("flux2_klein_9b", "black-forest-labs/FLUX.2-klein-base-9B"),
    "krea-2": ("krea2", "krea/Krea-2-Raw"),
    "z-image": ("zimage", "Tongyi-MAI/Z-Image"),
    "z-image-turbo": ("zimage:turbo", "Tongyi-MAI/Z-Image-Turbo"),
    "ernie-image": ("ernie_image", "baidu/ERNIE-Image"),
    "anima": ("anima", "circlestone-labs/Anima-Base-v1.0-Diffusers"),
    "ideogram-4": ("ideogram4", "ideogram-ai/ideogram-4-fp8"),
    "ltx-2": ("ltx2", "Lightricks/LTX-2"),
    "ltx-2.3": ("ltx2.3", "Lightricks/LTX-2.3"),
    "ltx-2.5": ("ltx2.5", "Lightricks/LTX-2.5"),
    "chroma1-hd": ("chroma", "lodestones/Chroma1-HD"),
    "lumina-image-2.0": ("lumina2", "Alpha-VLLM/Lumina-Image-2.0"),
    "sd3.5-large": ("sd3", "stabilityai/stable-diffusion-3.5-large"),
    "sd3.5-medium": ("sd3", "stabilityai/stable-diffusion-3.5-medium"),
    "hidream-i1": ("hidream", "HiDream-ai/HiDream-I1-Full"),
    "sdxl": ("sdxl", "stabilityai/stable-diffusion-xl-base-1.0"),
}
"""Model -> ``arch`` and what ``name_or_path`` is in its examples."""

ALIASES = {"flex1": "flux"}
"""Architectures that are another's (toolkit/config_modules.py ``ModelConfig``)."""

TEXT_TOKENS = {"flux.1-schnell": 512}
"""Model -> the tokens that its prompts are filled up to, where its usual ones are fewer (toolkit/train_tools.py
``encode_prompts_flux``)."""

IGNORED, ONLY = (f"{NETWORK}network_kwargs.{name}_if_contains" for name in ("ignore", "only"))
"""Words of the names of layers that get no adapter, and of those that alone do (toolkit/lora_special.py)."""

NOISE = {"high": f"{MODEL}model_kwargs.train_high_noise", "low": f"{MODEL}model_kwargs.train_low_noise"}
"""Expert -> what says that it is trained; it is unless that says no (diffusion_models/wan22/wan22_14b_model.py)."""

SAMPLED_FROM_AN_IMAGE = ("flux_kontext", "wan21_i2v", "qwen_image_edit_plus")
"""Architectures that raise an error at a sample without ``ctrl_img`` (flux_kontext.py:213, wan21_i2v.py:415,
qwen_image_edit_plus.py:179)."""
EDITS = (*SAMPLED_FROM_AN_IMAGE, "qwen_image_edit")
"""Those that are given one in an export."""

CONTROL_PIXELS = 1024 * 1024
"""The area of a control image (diffusers pipeline_qwenimage_edit_plus.py ``VAE_IMAGE_SIZE``)."""
MATCHED = f"{MODEL}model_kwargs.match_target_res"
"""Whether control images get the sample's area instead."""


def model_of(settings: Settings) -> Fields:
    """The fields `model`, `experts` and `inactive_expert` that the settings mean. Raises a VplanError for an unknown
    model."""
    versioned = str(settings.get(f"{MODEL}arch") or "")
    arch = ALIASES.get(versioned.partition(":")[0], versioned.partition(":")[0])
    path = settings.get(f"{MODEL}name_or_path")
    candidates = [name for known in (versioned, arch) for name, (one, _) in ARCHES.items() if one == known]
    by_path = next((name for name, (_, known) in ARCHES.items() if known == path), None)
    name_given = settings.get("model") or by_path or find_model(path)
    of_arch = name_given in ARCHES and ARCHES[name_given][0].partition(":")[0] == arch  # of any version
    model = name_given if of_arch or name_given in (candidates or ARCHES) else next(iter(candidates), None)
    if model is None:
        label = f"model.arch {quoted(arch)}" if arch else f"model.name_or_path {quoted(path)}, without an arch we know,"
        arches = sorted({known for known, _ in ARCHES.values()})
        raise VplanError(f"{label} is not supported here", f"model.arch can be {', '.join(arches)}")
    return {"model": model, **_experts_of(settings, model)}


def _experts_of(settings: Settings, model: str) -> Fields:
    """Both experts are always loaded; with `low_vram` the one that does not run waits in host RAM."""
    if lookup.model(model).experts == 1:
        return {"experts": None, "inactive_expert": "absent"}
    trained = [expert for expert, key in NOISE.items() if settings.get(key, True)]
    if not trained:
        raise VplanError("neither expert is trained", "leave train_high_noise and train_low_noise out of model_kwargs")
    away = "cpu" if settings.get(f"{MODEL}low_vram") else "gpu"
    return {"experts": trained[0] if len(trained) == 1 else "both", "inactive_expert": away}


def version_of(settings: Settings, fields: Fields) -> str:
    """The version of the memory terms that applies, joined by a dash: `QUANTISED_WHOLE` when the model goes to the GPU
    whole before it is quantised, a `qtype` of `UINTX`, `WITHOUT_EXPERTS` when its experts get no adapters."""
    quantised_on_gpu = settings.get(f"{MODEL}quantize") and not settings.get(f"{MODEL}low_vram")
    decides = lookup.model(fields["model"]).trained_with("ai-toolkit", "moved-whole-without-low-vram")
    without = fields["method"] == "lora" and any(map(_names_experts, words_of(settings, IGNORED)))
    whole = quantised_on_gpu and decides
    qtype = qtype_of(settings) if settings.get(f"{MODEL}quantize") else ""
    names = [QUANTISED_WHOLE if whole else "", qtype if qtype in UINTX else "", WITHOUT_EXPERTS if without else ""]
    return "-".join(filter(None, names))


def qtype_of(settings: Settings) -> str:
    """The format that the model is quantised to, without the accuracy recovery adapter that may stand behind it."""
    return str(settings.get(f"{MODEL}qtype", "qfloat8")).partition("|")[0]


def named_layers(settings: Settings) -> tuple[str, ...] | None:
    """`lora_targets` where two lists of words choose among the linear layers of the blocks (toolkit/lora_special.py
    ``clean_name``, ``lora_name``); None where they do not. Experts that are left out alone are a version of the memory
    terms. Raises a VplanError where they leave none."""
    profile = lookup.model(model_of(settings)["model"])
    only, ignored = words_of(settings, ONLY), words_of(settings, IGNORED)
    if not only and all(map(_names_experts, ignored)):
        return None
    starts = tuple(f"{stack.list}." for stack in profile.stacks)
    layers = [layer for layer in layer_names(profile) if layer.startswith(starts)]

    def is_adapted(layer: str) -> bool:
        name = f"transformer.{layer}"
        words = (name, name.replace(".", "$$"))  # as its adapters are called
        left = not any(word in name for word in ignored)
        return left and (not only or any(word in each for word in only for each in words))

    chosen = set(filter(is_adapted, layers))
    if not chosen:
        listed = {"only_if_contains": only, "ignore_if_contains": ignored}
        said = "; ".join(f"{key} {', '.join(words)}" for key, words in listed.items() if words)
        fault = f"network_kwargs leave no layer of {profile.title} to train: {quoted(said)}"
        raise VplanError(fault, f"layers are called like transformer.{layers[0]}")
    return chosen_layers(profile, chosen.__contains__) or profile.lora.targets


def words_of(settings: Settings, key: str) -> list[str]:
    """The words of a list of a config."""
    return [str(word) for name, value in settings.items() if name.startswith(key) for word in as_list(value)]


def _names_experts(word: str) -> bool:
    return "experts" in word and "shared" not in word


def write_model(fields: Fields) -> Settings:
    """The settings that name a model and its experts. Raises an InexpressibleError for a model that the trainer does
    not have."""
    model = fields["model"]
    if model not in ARCHES:
        why = f"of the known models it trains {', '.join(ARCHES)}"
        raise InexpressibleError(UnsupportedValue("model", model, next(iter(ARCHES)), why))
    arch, path = ARCHES[model]
    settings: Settings = {f"{MODEL}arch": arch, f"{MODEL}name_or_path": path}
    if lookup.model(model).inputs.get("guidance_bypassed"):
        settings[f"{TRAIN}bypass_guidance_embedding"] = True
    experts, away = fields["experts"], fields["inactive_expert"]
    if lookup.model(model).experts == 1:
        if away != "absent":
            raise InexpressibleError(UnsupportedValue("inactive_expert", away, "absent", "there is no other expert"))
        return settings
    if experts is None or away == "absent":
        why = f"both experts are loaded, whichever trains ({AT} wan22_14b_model.py)"
        unsupported = [UnsupportedValue("experts", None, "both", why)] if experts is None else []
        unsupported += [UnsupportedValue("inactive_expert", away, "cpu", why)] if away == "absent" else []
        raise InexpressibleError(*unsupported)
    settings |= {key: False for expert, key in NOISE.items() if experts not in ("both", expert)}
    if away == "cpu":
        return settings | {f"{MODEL}low_vram": True}
    if fields["weights_dtype"] in QUANTISED:  # quantised a block at a time, which keeps the other expert away too
        raise InexpressibleError(
            UnsupportedValue("inactive_expert", "gpu", "cpu", "low_vram, which quantising needs, moves it")
        )
    return settings


# ---- shapes: sides of squares, whose area a sample of any other shape gets


def datasets_of(settings: Settings) -> list[str]:
    """What the names of the settings of each dataset begin with; of one where there are none."""
    found = (re.match(rf"{re.escape(PROCESS)}datasets\[\d+\]\.", name) for name in settings)
    return sorted({each[0] for each in found if each}) or [DATA]


def shape_of(settings: Settings) -> Fields:
    """The fields of the samples' shapes (frames, height, width, batch, buckets) that the settings of all datasets
    mean. The largest batch is that of each. Raises a VplanError where the clips' length is not said."""
    step = lookup.model(model_of(settings)["model"]).shape.size_multiple  # buckets are made of multiples
    shapes: set[tuple[int, int]] = set()
    batches = []
    for data in datasets_of(settings):
        frames = integer(settings.get(f"{data}num_frames", 1), "num_frames")
        if settings.get(f"{data}auto_frame_count") and frames <= 1:
            why = "auto_frame_count trains each clip at its own length, which is not known here"
            raise VplanError(why, "write the longest clip's num_frames beside it")
        sides = [integer(side, "resolution") for side in as_list(settings.get(f"{data}resolution") or 512)]
        shapes |= {(frames, side // step * step or step) for side in sides}
        batch = settings.get(f"{data}batch_size") or settings.get(f"{TRAIN}batch_size") or 1
        batches.append(integer(batch, "batch_size"))
    ordered = sorted(shapes, key=lambda shape: (shape[0] * shape[1] ** 2, shape))
    buckets = tuple(
        Bucket.read({"frames": frames, "height": side, "width": side}, "the dataset") for frames, side in ordered
    )
    frames, side = ordered[-1]
    shape = {"frames": frames, "height": side, "width": side, "batch_size": max(batches)}
    return {**shape, "buckets": buckets if len(buckets) > 1 else ()}


def references_of(settings: Settings) -> Fields:
    """The images beside each sample of a model that may take several (Qwen-Image-Edit-2509 and 2511, FLUX.2); None, as
    many as the model always takes, of the others. They have 1024x1024 pixels each whatever the sample has, FLUX.2's at
    most, unless ``match_target_res`` is set (qwen_image_edit_plus.py ``control_image_res``, flux2_model.py): a smaller
    sample has so many more of its own size."""
    images = max(_control_images(settings, data) for data in datasets_of(settings))
    if not images or not _takes_several(model_of(settings)["model"], str(settings.get(f"{MODEL}arch") or "")):
        return {"references": None}
    if settings.get(MATCHED):
        return {"references": images}
    return {"references": math.ceil(images * CONTROL_PIXELS / shape_of(settings)["height"] ** 2)}


def write_references(fields: Fields) -> Settings:
    """The folders of control images, of the samples' size. Raises an InexpressibleError for more than one image of a
    model that is given one."""
    model, images = fields["model"], fields["references"]
    if not _takes_several(model, ARCHES[model][0] if model in ARCHES else ""):
        if images and images > 1:
            raise InexpressibleError(UnsupportedValue("references", images, 1, f"it is given one control image ({AT})"))
        return {}
    if not images:
        return {}
    folders = ["data/my_references", *(f"data/my_references_{n}" for n in range(2, images + 1))]
    settings: Settings = {f"{DATA}control_path": folders if images > 1 else folders[0]}
    return settings if fields["height"] ** 2 == CONTROL_PIXELS else {**settings, MATCHED: True}


def _takes_several(model: str, arch: str) -> bool:
    return arch.startswith("qwen_image_edit_plus") or lookup.model(model).shape.takes_references


def _control_images(settings: Settings, data: str) -> int:
    """The folders of control images of a dataset: the three of the UI come before ``control_path``
    (toolkit/config_modules.py)."""
    names = ("control_path_1", "control_path_2", "control_path_3")
    numbered = [name for name in names if settings.get(f"{data}{name}")]
    return len(numbered) or len([folder for folder in words_of(settings, f"{data}control_path") if folder])


def write_shape(fields: Fields) -> Settings:
    """The settings for the samples' shapes. Raises an InexpressibleError for buckets or sizes that the trainer cannot
    be told."""
    buckets = fields["buckets"]
    if buckets:
        why = "resolutions are a list of sides"
        raise InexpressibleError(UnsupportedValue("buckets", buckets, (), why))
    height, width = fields["height"], fields["width"]
    if height != width:
        step = lookup.model(fields["model"]).shape.size_multiple
        side = max(step, math.isqrt(height * width) // step * step)
        why = f"resolution is one side: samples of every shape get the area of {side}x{side}"
        wrong = (
            UnsupportedValue(name, fields[name], side, why) for name in ("height", "width") if fields[name] != side
        )
        raise InexpressibleError(*wrong)
    video = lookup.model(fields["model"]).kind == "video"
    settings: Settings = {f"{DATA}resolution": [height], f"{TRAIN}batch_size": fields["batch_size"]}
    return settings | ({f"{DATA}num_frames": fields["frames"]} if video else {})


def _samples_of(settings: Settings) -> list[ValidationShape]:
    """The shapes that are sampled: each of `sample.samples` may have its own."""
    own = (re.match(rf"{re.escape(SAMPLE)}samples\[\d+\]\.", name) for name in settings)
    rules = lookup.model(model_of(settings)["model"]).shape
    shapes = []
    for sample in sorted({each[0] for each in own if each}) or [SAMPLE]:

        def given(name: str, default: int, sample: str = sample) -> object:
            return settings.get(f"{sample}{name}", settings.get(f"{SAMPLE}{name}", default))

        sizes = {name: integer(given(name, 512), f"sample.{name}") for name in ("width", "height")}
        sizes = {name: side // rules.size_multiple * rules.size_multiple for name, side in sizes.items()}
        frames = integer(given("num_frames", 1), "sample.num_frames")
        frames = rules.cut(frames)  # as the pipelines cut it
        guided = number(given("guidance_scale", 7), "guidance_scale") > 1
        shapes.append(ValidationShape.read({"frames": frames, "cfg": guided, **sizes}))
    return shapes


def makes_samples(settings: Settings) -> bool:
    """Whether there is a prompt to sample: of ``samples`` where they are listed, else of ``prompts``; with none it
    makes no sample (``SampleConfig``)."""
    names = [name for name in settings if name.startswith(f"{SAMPLE}samples")]
    if not names:
        return bool(words_of(settings, f"{SAMPLE}prompts"))
    return any(settings[name] is not None for name in names if name.endswith("].prompt"))


def validation_of(settings: Settings) -> Fields:
    """The fields of validation: a sample of 512x512 unless the settings switch it off, have no prompt, or give another
    shape (``SampleConfig``)."""
    if settings.get(f"{TRAIN}disable_sampling") or not makes_samples(settings):
        return {"validation_mode": "off", "validation": None}
    shape = shape_of(settings)
    sample = max(_samples_of(settings), key=lambda each: each.frames * each.height * each.width * (1 + each.cfg))
    trained = ValidationShape.read({name: shape[name] for name in ("frames", "height", "width")})
    return {"validation_mode": "on", "validation": None if sample == trained else sample}


def write_validation(fields: Fields) -> Settings:
    """The settings for validation samples and their shape. Raises an InexpressibleError for what the trainer cannot be
    told."""
    mode, shape = fields["validation_mode"], fields["validation"]
    trained = ValidationShape.read({name: fields[name] for name in ("frames", "height", "width")})
    if mode == "off":
        if shape is not None:
            raise InexpressibleError(UnsupportedValue("validation", shape, None, "no sample is made"))
        return {f"{TRAIN}disable_sampling": True}
    refused = []
    if mode == "offload":
        refused.append(UnsupportedValue("validation_mode", mode, "on", "it samples with the model where it is"))
    if shape == trained:
        refused.append(UnsupportedValue("validation", shape, None, "that is the job's own shape"))
    if refused:
        raise InexpressibleError(*refused)
    sample = shape or trained
    settings: Settings = {f"{SAMPLE}width": sample.width, f"{SAMPLE}height": sample.height}
    settings[f"{SAMPLE}guidance_scale"] = 5 if sample.cfg else 1
    settings |= _written_prompt(fields["model"])
    return settings | {f"{SAMPLE}num_frames": sample.frames}


def _written_prompt(model: str) -> Settings:
    """A prompt, and beside it the image that some models sample from."""
    prompt = "a prompt of yours"
    if model not in ARCHES or ARCHES[model][0].partition(":")[0] not in EDITS:
        return {f"{SAMPLE}prompts": [prompt]}
    return {f"{SAMPLE}samples[0].prompt": prompt, f"{SAMPLE}samples[0].ctrl_img": "data/my_references/sample.png"}


def samples_without_image(settings: Settings) -> bool:
    """Whether there is a prompt without a control image, which stands beside it, or in it behind ``--ctrl_img``."""
    own = {name.rpartition(".")[0] for name in settings if name.startswith(f"{SAMPLE}samples")}
    if not own:
        return any("--ctrl_img" not in prompt for prompt in words_of(settings, f"{SAMPLE}prompts"))
    images = {name.rpartition(".")[0] for name in settings if ".ctrl_img" in name and settings[name]}
    prompts = (settings.get(f"{each}.prompt") for each in own - images)
    return any(prompt is not None and "--ctrl_img" not in str(prompt) for prompt in prompts)
