"""Derives the profile of a user's own model from the config files of its folder.

The config gives the architecture. Everything else (VAE, text encoders, clip rules, LoRA layers, the training settings)
is taken from the bundled model of the same class whose config is nearest, the *lender*; if the folder is a pipeline's,
its VAE and text encoders are used. Classes come only from the bundled profiles: the text of a config never chooses what
is imported. Parameters are counted on the meta device, where a model of any size takes no memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import profiles
from planner.catalog import lookup
from planner.catalog.diffusers_folder import CONFIG, Config, Source, architecture, check_kinds
from planner.catalog.own_code import is_own
from planner.catalog.profiles import ModelProfile, TextEncoder, Vae
from planner.errors import VplanError, did_you_mean, quoted
from trainers.families.common.model_classes import class_of

MAX_PARAMETERS = 10**12
MAX_TABLES = 3 * 10**8
"""Elements of all tables that a model computes when it is built (positions, rotations): these really take memory, in
fp32 or more. The largest published one, SD3.5's, has 226 million."""

REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What diffusers and transformers raise for a config that they cannot build or run, and that the user must correct."""

INTERFACE = ("channels", "patch", "text", "caption", "image", "cross_attention_dim", "joint_attention_dim", "pooled")
"""Parts of config keys about a model's inputs and outputs, which decide whose VAE and text encoders fit it."""
INTERFACE_WEIGHT = 4.0

NOT_BUILT_FROM = (
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "trust_remote_code",
)
"""Keys of a transformers config that do not affect the architecture."""

LEVELS = ("block_out_channels", "dim_mult", "down_block_types")
"""Keys of a VAE's config with an entry per level; the number of levels decides how much the VAE shrinks a clip."""
SHRINKS = (
    "patch_size",
    "patch_size_t",
    "scale_factor_spatial",
    "scale_factor_temporal",
    "spatial_compression_ratio",
    "spatio_temporal_scaling",
    "temperal_downsample",
    "temporal_compression_ratio",
)
"""Other keys of a VAE's config that decide this."""


class Derived(NamedTuple):
    """The profile of a user's model, and notes on where its parts come from."""

    profile: ModelProfile
    notes: tuple[str, ...]


def _bundled() -> list[ModelProfile]:
    return [lookup.model(name) for name in profiles.model_names()]


def derive(source: Source, name: str) -> Derived:
    """The profile of a folder's model, of a class that a bundled model has. Raises a VplanError if the model cannot be
    built or does not fit the lender."""
    import diffusers

    same_class = [profile for profile in _bundled() if profile.diffusers_class == source.class_name]
    where = CONFIG
    check_kinds(architecture(source.config), [profile.config for profile in same_class], where)
    config = complete(source.class_name, architecture(source.config), where)
    _check_stacks(config, same_class[0], where)
    parameters = count(lambda: getattr(diffusers, source.class_name).from_config(config), where, source.class_name)

    def unlike(profile: ModelProfile) -> tuple[bool, float, bool]:
        alone = source.has_second_expert and profile.experts == 1
        far = distance(config, complete(profile.diffusers_class, profile.config, where))
        return alone, far, bool(profile.inputs.get("diffusion_forcing"))  # one config serves both ways of training

    lender = min(same_class, key=unlike)
    from_folder: list[str] = []
    vae = _vae(source, config, lender, from_folder)
    encoders, missing = encoders_of(source, lender, from_folder)
    shape = _shape(config, vae, lender)
    experts = lender.experts if not source.is_pipeline else 2 if source.has_second_expert else 1
    profile = ModelProfile.read(
        {
            **lender.to_json(),
            "traits": lookup.lent_traits(lender),
            "name": name,
            "title": name,
            "parameters": parameters,
            "experts": experts,
            "license": "your own model's",
            "aliases": (),
            "sources": (f"config: {where} of the folder recorded", f"the rest: {lender.name}"),
            "config": config,
            "vae": vae,
            "text_encoders": tuple(encoders),
            "shape": shape,
            "origin": source.origin,
            "lent_by": lender.name,
        },
        where=where,
    )
    notes = [f"of {lender.name}: " + ", ".join(_lent(from_folder))]
    if from_folder:
        notes.append("of the folder: " + ", ".join(from_folder))
    return Derived(profile, (*notes, *missing))


def _lent(from_folder: list[str]) -> list[str]:
    parts = [part for part in ("VAE", "text encoders") if part not in from_folder]
    return [*parts, "clip rules", "LoRA layers", "training objective"]


def complete(class_name: str, config: Config, where: str) -> Config:
    """The config with the class's defaults for missing keys. Raises a VplanError that names an unknown key."""
    import diffusers
    from transformers import PreTrainedModel

    named = class_of(class_name)
    settings = named.config_class if issubclass(named, PreTrainedModel) else named
    signature = inspect.signature(settings.__init__).parameters
    parameters = {name: value.default for name, value in signature.items() if name not in ("self", "kwargs", "args")}
    if settings is not named:  # transformers writes keys that are common to all models too
        config = {key: value for key, value in _harmless(config).items() if key in parameters}
    for key in config:
        if key not in parameters:
            otherwise = "a newer diffusers may support it; else remove it from a copy of the file"
            fix = did_you_mean(key, parameters, otherwise)
            of = "" if is_own(class_name) else f" of diffusers {diffusers.__version__}"
            raise VplanError(f"{where}: {class_name}{of} has no {quoted(key)}", fix)
    defaults = {key: _plain(value) for key, value in parameters.items() if value is not inspect.Parameter.empty}
    check_kinds(config, [defaults], where)
    return {**defaults, **config}


def _plain(value: Any) -> Any:
    """A default with tuples as lists, as in JSON."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _check_stacks(config: Config, like: ModelProfile, where: str) -> None:
    for stack in like.stacks:
        depth = config.get(stack.depth_key)
        blocks = len(depth) if isinstance(depth, list) else depth
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise VplanError(
                f"{where}: {stack.depth_key} {quoted(depth)} is not a number of blocks", "correct the file"
            )


def count(build: Callable[[], nn.Module], where: str, part: str) -> int:
    """The number of parameters of the model that ``build`` makes, on the meta device. Raises a VplanError if it cannot
    be built or is too large."""
    try:
        with torch.device("meta"):
            model = build()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        tables = sum(buffer.numel() for buffer in model.buffers())
    except REFUSALS as error:
        raise refusal(error, f"{part} cannot be built from {where}", "correct the file") from None
    if not 0 < parameters <= MAX_PARAMETERS:
        raise VplanError(f"{where} makes a model of {parameters:.2g} parameters", "correct the file: 1e12 at most")
    if tables > MAX_TABLES:
        raise VplanError(f"{where} makes tables of {tables:.2g} numbers", "correct its lengths and sizes")
    return parameters


def refusal(error: Exception, fault: str, fix: str) -> VplanError:
    """A VplanError for another library's error, with its message in one line."""
    complaint = " ".join(str(error).split())
    return VplanError(f"{fault} ({type(error).__name__}: {complaint[:160]})", fix)


def distance(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """How much two configs differ: numbers by their ratio (1 for a factor of two or more), other values 0 or 1."""
    total = 0.0
    for key in left.keys() | right.keys():
        weight = INTERFACE_WEIGHT if any(part in key for part in INTERFACE) else 1.0
        total += weight * _difference(left.get(key), right.get(key))
    return total


def _difference(a: Any, b: Any) -> float:
    if a == b:
        return 0.0
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in (a, b))
    return min(1.0, abs(math.log2(a / b))) if numbers else 1.0


def _vae(source: Source, config: Config, lender: ModelProfile, from_folder: list[str]) -> Vae:
    """The folder's VAE, with its parameters counted; if the folder has none, the lender's. Raises a VplanError for an
    unknown VAE, and if the model's latents do not fit the lender's VAE."""
    import diffusers

    folder_config = source.vae
    if folder_config is None:
        channels, lent = (settings.get("out_channels") for settings in (config, _completed(lender)))
        if channels != lent:
            fault = f"its latents ({channels} channels) are not those of {lender.name}'s VAE ({lent})"
            raise VplanError(fault, "name the pipeline's folder, with vae/config.json")
        return lender.vae
    where = f"vae/{CONFIG}"
    same = [
        profile.vae for profile in [lender, *_bundled()] if profile.vae.class_name == folder_config.get("_class_name")
    ]
    if not same:
        classes = sorted({profile.vae.class_name for profile in _bundled()})
        fault = f"{where}: class {quoted(folder_config.get('_class_name'))} is not known"
        raise VplanError(fault, f"supported are {', '.join(classes)}")
    class_name = same[0].class_name
    settings = complete(class_name, architecture(folder_config), where)
    near = min(same, key=lambda vae: distance(settings, complete(class_name, vae.config, where)))
    like = complete(class_name, near.config, where)
    unlike_keys = [key for key in LEVELS if len(settings.get(key) or ()) != len(like.get(key) or ())]
    unlike_keys += [key for key in SHRINKS if settings.get(key) != like.get(key)]
    if unlike_keys:
        fault = f"{where}: {unlike_keys[0]} {quoted(settings.get(unlike_keys[0]))} does not match any known VAE"
        raise VplanError(fault, f"known of {class_name} is {quoted(like.get(unlike_keys[0]))}")
    parameters = count(lambda: getattr(diffusers, class_name).from_config(settings), where, class_name)
    channels = settings.get("latent_channels", settings.get("z_dim"))
    from_folder.append("VAE")
    return near.replace(config=settings, parameters=parameters, latent_channels=channels)


def _completed(profile: ModelProfile) -> Config:
    return complete(profile.diffusers_class, profile.config, profile.name)


def encoders_of(
    source: Source, lender: ModelProfile | None, from_folder: list[str]
) -> tuple[list[TextEncoder], list[str]]:
    """The folder's text encoders, with their parameters counted, if all their classes are known; else the lender's, and
    a note that says so; without a lender none."""
    lent = list(lender.text_encoders) if lender else []
    if not source.encoders:
        return lent, [] if lender else ["text encoders are not known and not counted: name the pipeline's folder"]
    encoders = []
    for part, folder_config in source.encoders.items():
        names = folder_config.get("architectures")
        name = names[0] if isinstance(names, list) and names else folder_config.get("_class_name")
        lenders = [lender, *_bundled()] if lender else _bundled()
        same = [encoder for p in lenders for encoder in p.text_encoders if encoder.class_name == name]
        if not same:
            instead = f"the text encoders of {lender.name} are used instead" if lender else "none is counted"
            return lent, [f"{part} is a {quoted(name)}, which is not known: {instead}"]
        encoders.append(_encoder(part, architecture(folder_config), same))
    from_folder.append("text encoders")
    return encoders, []


def _encoder(part: str, config: Config, same: list[TextEncoder]) -> TextEncoder:
    from diffusers import ConfigMixin

    from trainers.recording.encoders import encoder_class

    name, where = same[0].class_name, f"{part}/{CONFIG}"
    model_class = encoder_class(same[0])
    of_diffusers = issubclass(model_class, ConfigMixin)
    accepted = inspect.signature(model_class if of_diffusers else model_class.config_class).parameters
    config = {key: value for key, value in _harmless(config).items() if key in accepted}
    check_kinds(config, [encoder.config for encoder in same], where)

    def build() -> nn.Module:
        if of_diffusers:
            model: nn.Module = model_class.from_config(config)
            return model
        settings = model_class.config_class(**config)
        settings._attn_implementation = "eager"  # other implementations may be downloaded; parameters are the same
        built: nn.Module = model_class(settings)
        return built

    parameters = count(build, where, name)
    near = min(same, key=lambda encoder: distance({key: config.get(key) for key in encoder.config}, encoder.config))
    return near.replace(config=config, parameters=parameters)


def _harmless(value: Any) -> Any:
    """A transformers config without keys, at any depth, that can name code: transformers downloads kernels."""
    if isinstance(value, list):
        return [_harmless(item) for item in value]
    if not isinstance(value, dict):
        return value
    remaining = {key: inner for key, inner in value.items() if not key.startswith("_") and key not in NOT_BUILT_FROM}
    return {
        key: _harmless(inner) for key, inner in remaining.items() if "implementation" not in key and "kernel" not in key
    }


def _shape(config: Config, vae: Vae, lender: ModelProfile) -> dict[str, Any]:
    """The lender's rules for clips, adapted to this config's patch and this VAE's frames, with sizes rounded to that
    grid."""
    rules = lender.shape
    patch = rules.patch
    if _patch(_completed(lender)) == patch:
        patch_sizes = _patch(config)
        if patch_sizes is None or 0 in patch_sizes:
            fault = f"{CONFIG}: patch_size {quoted(config.get('patch_size'))} is no cell of frames, rows and columns"
            raise VplanError(fault, "correct the file")
        patch = patch_sizes
    elif config.get("patch_size") != _completed(lender).get("patch_size"):
        fault = f"patch_size {quoted(config.get('patch_size'))} is not that of {lender.name}"
        raise VplanError(fault, f"known is {quoted(_completed(lender).get('patch_size'))}")
    cells = [vae.spatial * side for side in patch[1:]]
    multiple = rules.size_multiple
    if any(multiple % cell for cell in cells):
        multiple = math.lcm(*cells)
    sizes = dict.fromkeys(
        tuple(max(1, round(side / multiple)) * multiple for side in size) for size in rules.resolutions
    )
    step = vae.temporal if rules.frame_step == lender.vae.temporal else rules.frame_step
    usual = rules.replace(frame_step=step).cut(rules.default_frames)
    changed = {"patch": patch, "size_multiple": multiple, "resolutions": tuple(sizes), "frame_step": step}
    return {**rules.to_json(), **changed, "default_frames": usual}


def _patch(config: Config) -> tuple[int, int, int] | None:
    """Latent frames, rows and columns of a patch, from the keys that most classes have; None for other keys."""
    size = config.get("patch_size")
    if isinstance(size, list) and len(size) == 3:
        frames, rows, columns = size
        return frames, rows, columns
    if isinstance(size, int):
        return config.get("patch_size_t") or 1, size, size
    return None
