"""kohya_ss's saved settings (JSON), as the command of sd-scripts that its GUI starts with them, read at 45088f0
(kohya_gui/lora_gui.py, finetune_gui.py, dreambooth_gui.py ``train_model``)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from planner.dialects.base import flags
from planner.dialects.base.bindings import Settings
from planner.dialects.base.dialect import Invocation
from planner.dialects.base.script import Script
from planner.dialects.sd_scripts.network_module import KINDS_OF_LAYERS, PARTS
from planner.errors import VplanError, quoted

NETWORKS = {
    "Standard": "networks.lora",
    "Kohya LoCon": "networks.lora",
    "Kohya DyLoRA": "networks.dylora",
    "LoRA-FA": "networks.lora_fa",
    "Kohya LoHa": "networks.loha",
    "Kohya LoKr": "networks.lokr",
    "Flux1": "networks.lora_flux",
    "Flux1 OFT": "networks.oft_flux",
}
"""Its types of LoRA -> sd-scripts' module; LyCORIS' are ``lycoris.kohya``."""

KINDS = ("sdxl", "sdxl_checkbox", "flux1_checkbox", "sd3_checkbox", "lumina_checkbox", "anima_checkbox")
FULL = {"sdxl": "sdxl_train.py", "flux1": "flux_train.py", "sd3": "sd3_train.py"}
LORA = {"sdxl": "sdxl_train_network.py", "flux1": "flux_train_network.py", "sd3": "sd3_train_network.py"}
BLOCKS = ("block_dims", "down_lr_weight", "mid_lr_weight", "up_lr_weight")
FLUX = (*KINDS_OF_LAYERS, "single_mod_dim", "in_dims", *PARTS, "split_qkv", "train_t5xxl")
"""What the GUI gives FLUX's adapters of itself."""

LYCORIS = (
    *("conv_dim", "conv_alpha", "use_tucker", "rank_dropout", "module_dropout", "rank_dropout_scale"),
    *("bypass_mode", "dora_wd", "use_scalar", "train_norm"),
)
LOKR = ("factor", "use_cp", "decompose_both")
"""What it gives LyCORIS' adapters, and LoKr's alone (kohya_gui/lora_gui.py ``train_model``)."""

RENAMED = {"optimizer": "optimizer_type", "max_resolution": "resolution", "sdxl_no_half_vae": "no_half_vae"}
"""The GUI's names where sd-scripts' are others."""

CACHES = ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")


def is_own(config: Mapping[str, Any]) -> bool:
    """Whether these are settings of its GUI: by keys that no script has."""
    return "LoRA_type" in config or {"max_resolution", "optimizer", "num_cpu_threads_per_process"} <= config.keys()


def script_of(config: Mapping[str, Any]) -> str:
    """The script of sd-scripts that the GUI starts."""
    kind = next((name.partition("_")[0] for name in KINDS if config.get(name)), "")
    if "LoRA_type" in config:
        return LORA.get(kind, f"{kind}_train_network.py" if kind else "train_network.py")
    if "dataset_repeats" in config and not kind:
        return "fine_tune.py"
    return FULL.get(kind, f"{kind}_train.py" if kind else "train_db.py")


def read(script: Script) -> Invocation:
    """Its settings as those of a command. Raises a VplanError for a value that is none of its flag's type."""
    config = script.config or {}
    kind = script_of(config)
    known = flags.script("sd-scripts", kind).flags
    settings: Settings = {"script": kind}
    for name, value in config.items():
        flag = known.get(f"--{RENAMED.get(name, name)}")
        if flag is not None and value not in ("", None, False, []):
            settings[flag.name] = _typed(name, value, flag)
    for cache in CACHES:
        prefix = kind.partition("_")[0].replace("flux", "flux1")
        if config.get(f"{prefix}_{cache}"):
            settings[f"--{cache}"] = True
    attention = {"xformers": "--xformers", "sdpa": "--sdpa", "True": "--xformers"}.get(str(config.get("xformers")))
    for name in ("--xformers", "--sdpa", "--max_token_length", "--network_args"):
        settings.pop(name, None)
    settings |= {attention: True} if attention else {}
    if (length := str(config.get("max_token_length", ""))) in ("150", "225"):
        settings["--max_token_length"] = int(length)
    if "LoRA_type" in config:
        settings |= _network(config)
    if extra := str(config.get("additional_parameters") or "").strip():
        settings |= flags.script("sd-scripts", kind).parse(shlex.split(extra)).values
    if processes := config.get("num_processes"):
        settings["gpus"] = int(processes)
    note = f"kohya_ss's settings, as the {kind} that its GUI starts (kohya_ss 45088f0)"
    return Invocation("sd-scripts", settings, notes=(*script.notes, note))


def _typed(name: str, value: Any, flag: flags.Flag) -> Any:
    """The GUI keeps numbers as text where a text box held them."""
    if flag.type in ("int", "float") and not isinstance(value, list):
        try:
            return int(float(value)) if flag.type == "int" else float(value)
        except ValueError:
            raise VplanError(f"{name} {quoted(value)} is no number", "save the settings again") from None
    return value


def _network(config: Mapping[str, Any]) -> Settings:
    """The network's module and arguments; a rate of 0 switches a part off (``resolve_network_train_flags``)."""
    kind = str(config["LoRA_type"])
    settings: Settings = {"--network_module": NETWORKS.get(kind, "lycoris.kohya")}
    names = (*BLOCKS, *FLUX) if kind.startswith("Flux1") else BLOCKS
    arguments = [f"{name}={config[name]}" for name in names if config.get(name)]
    if kind == "Kohya LoCon":
        arguments.append(f"conv_dim={config.get('conv_dim', 1)}")
    if kind.startswith(("LyCORIS", "LoCon")):
        algo = kind.partition("/")[2].lower() or "locon"
        keys = (*LYCORIS, *(LOKR if algo == "lokr" else ()))
        preset = [f"preset={config['LyCORIS_preset']}"] if config.get("LyCORIS_preset") else []
        arguments += [f"algo={algo}", *preset, *(f"{key}={config[key]}" for key in keys if config.get(key))]
    if arguments:
        settings["--network_args"] = arguments
    encoder, unet = (float(config.get(name) or 0) for name in ("text_encoder_lr", "unet_lr"))
    if unet and not encoder:
        settings["--network_train_unet_only"] = True
    if encoder and not unet:
        settings["--network_train_text_encoder_only"] = True
    return settings
