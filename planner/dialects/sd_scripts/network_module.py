"""``--network_module`` and ``--network_args`` of sd-scripts' scripts, read at 48d368f (``create_network`` of
networks/lora_flux.py, lora_lumina.py, lora_hunyuan_image.py and lora.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.dialects.base.bindings import Settings
from planner.errors import VplanError, quoted

OF_LAYERS = "a rank for some layers alone"
KINDS_OF_LAYERS = (
    "img_attn_dim",
    "txt_attn_dim",
    "img_mlp_dim",
    "txt_mlp_dim",
    "img_mod_dim",
    "txt_mod_dim",
    "single_dim",
)
LUMINA_KINDS = ("attn_dim", "mlp_dim", "mod_dim", "refiner_dim")
UNPRICED: Mapping[str, str] = {
    **dict.fromkeys((*KINDS_OF_LAYERS, "single_mod_dim", *LUMINA_KINDS, "network_reg_dims"), OF_LAYERS),
    "in_dims": "adapters outside the blocks",
    "embedder_dims": "adapters outside the blocks",
    "train_t5xxl": "T5-XXL is trained",
    "ggpo_sigma": "noise as large as a layer's weight",
    "algo": "LyCORIS",
    "preset": "LyCORIS",
}
"""Keys that change what is trained, and how."""

OF_U_NETS: Mapping[str, str] = {
    "conv_dim": "LoRA on 3x3 convolutions",
    "block_dims": "a rank for every block",
    "block_lr_weight": "a rank for every block",
    **dict.fromkeys(("down_lr_weight", "mid_lr_weight", "up_lr_weight"), "blocks of weight 0 are left out"),
    "algo": "LyCORIS",
    "preset": "LyCORIS",
}
"""The same of SDXL's and SD 1.5's (networks/lora.py)."""

PARTS = ("train_blocks", "train_double_block_indices", "train_single_block_indices")
"""Keys that leave blocks without adapters."""

OFF = ("", "false", "none", "all")
"""Values, in lower case, that leave a key's default as it is."""


def arguments(settings: Settings) -> dict[str, str]:
    """The keys of ``--network_args`` that do something, and their values."""
    given = settings.get("--network_args") or []
    words = [given] if isinstance(given, str) else [str(word) for word in given]
    pairs = (word.partition("=")[::2] for word in words)
    return {key: value for key, value in pairs if value.lower() not in OFF}


def refuse_unpriced(settings: Settings, module: str) -> None:
    """Raises a VplanError for adapters of another kind than ``module``'s, or on other layers."""
    given = str(settings.get("--network_module") or module)
    if given != module:
        raise VplanError(f"--network_module {quoted(given)} is not priced", f"check it with {module}")
    refuse_unknown_rank(settings)
    refuse_arguments(settings, UNPRICED)
    if settings.get("--network_train_text_encoder_only"):
        raise VplanError("--network_train_text_encoder_only is not priced", "leave it out")


def refuse_unknown_rank(settings: Settings) -> None:
    """Raises a VplanError where the rank is that of a file alone (train_network.py:671)."""
    if settings.get("--dim_from_weights") and not settings.get("--network_dim"):
        fault = "--dim_from_weights is not priced without --network_dim (the rank is that of a file)"
        raise VplanError(fault, "add --network_dim with the file's rank, which the script does not look at")


def refuse_arguments(settings: Settings, unpriced: Mapping[str, str]) -> None:
    """Raises a VplanError for a key of ``--network_args`` that is in `unpriced`."""
    for key in arguments(settings):
        if key in unpriced:
            raise VplanError(f"--network_args {key} is not priced ({unpriced[key]})", f"leave {key} out")


def notes(settings: Settings) -> Iterator[str]:
    """What of the arguments is not estimated, in words."""
    given = arguments(settings)
    if parts := [key for key in PARTS if key in given]:
        yield f"{', '.join(parts)}: some blocks have no adapters, which may need less: all are estimated with them"
    if "split_qkv" in given:
        yield "split_qkv: three adapters of the same rank where one is estimated, which takes a little more"
