"""musubi-tuner's models and datasets, in its words and in ours."""

from __future__ import annotations

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.common_bindings import find_model
from planner.errors import VplanError, quoted

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
        raise _unknown(settings)
    model = name_given if name_given in candidates else candidates[0]
    fields: Fields = {"model": model, "experts": None, "inactive_expert": "absent"}
    if lookup.model(model).experts > 1:
        fields["experts"] = "high" if "high" in str(settings.get("--dit", "")).lower() else "low"
        if settings.get("--dit_high_noise"):
            fields["experts"] = "both"
            fields["inactive_expert"] = "cpu" if settings.get("--offload_inactive_dit") else "gpu"
    return fields


def _unknown(settings: Settings) -> VplanError:
    """The refusal of a command whose model is not known."""
    tasks = [
        words["--task"]
        for family, words in FAMILIES.values()
        if is_script_of(family, settings) and words.get("--task") is not None
    ]
    if tasks and not settings.get("--task"):
        # The parser then takes t2v-14B (wan_train_network.py), also beside a file of another model.
        fault = "no --task: which model this script trains is not said"
        return VplanError(fault, "add the one that the file of --dit is of: " + ", ".join(dict.fromkeys(tasks)))
    if tasks:
        fault = f"--task {quoted(settings['--task'])} is none that is estimated"
        return VplanError(fault, "estimated: " + ", ".join(dict.fromkeys(tasks)))
    words = settings.get("--model_version") or settings.get("script")
    return VplanError(f"which model {quoted(words)} trains is not known here", "supported: " + ", ".join(FAMILIES))


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
    settings |= {"--dit": f"models/{model}-low.safetensors", "--dit_high_noise": f"models/{model}-high.safetensors"}
    return settings | ({"--offload_inactive_dit": True} if inactive == "cpu" else {})
