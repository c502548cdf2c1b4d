"""Initialises adapters from a LoRA file with diffusers' names, or ComfyUI's and kohya's, with dots or underscores.

The file must have every adapter of the plan, and no others: a LoRA that is only partly there would train on as
something else. A lower rank is filled up with new rows, which leave the model as the file has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError, quoted
from planner.launch.checkpoints import DIFFUSERS_LORA
from planner.spec.job import Job
from planner.spec.training import TrainingSettings
from trainers.parallel.lora_files import LayerRows, comfyui_places, has_comfyui_model
from trainers.step.weights import Begin

_KEY = re.compile(r"(.+?)\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?:\.default)?\.weight")
_PREFIX = re.compile(r"(base_model\.model\.|diffusion_model\.|transformer\.|unet\.|lora_unet_|lora_transformer_)+")
ADAPTER_METADATA = "lora_adapter_metadata"
"""Key of a file's header under which diffusers keeps rank and alpha (diffusers loaders.lora_base)."""


class _Adapter(NamedTuple):
    """One layer's adapter, which changes the weight by ``up @ down``."""

    down: Tensor
    up: Tensor


def from_file(
    path: Path, part: str, profile: ModelProfile, job: Job, training: TrainingSettings, model: nn.Module, fresh: Begin
) -> Begin:
    """A function that initialises the adapters of a built model from a file. ``path``: the file, or the folder of a
    run's LoRA files; ``part``: in such a folder, which of two experts the model is; ``fresh``: initialises the rows
    that the file lacks. Both functions raise a VplanError for a file that does not match the plan."""
    file = _file(path, part)
    layers = {name.split(".lora_")[0]: weight for name, weight in model.named_parameters() if ".lora_B." in name}
    places = comfyui_places(profile, model) if has_comfyui_model(profile) else {}
    adapters = _adapters(file, layers, places)
    if missing := sorted(layers.keys() - adapters.keys()):
        fault = f"{file} lacks {len(missing)} of the plan's {len(layers)} adapters, such as {missing[0]}"
        raise VplanError(fault, "plan with the layers that it has: --lora-targets")
    scale = (training.lora_alpha or job.lora_rank) / job.lora_rank

    @torch.no_grad()
    def begin(name: str, weight: Tensor) -> None:
        fresh(name, weight)
        down, up = adapters[name.split(".lora_")[0]]
        rank = down.shape[0]
        if rank > job.lora_rank:
            raise VplanError(f"{file} has rank {rank}, and the plan {job.lora_rank}", f"plan with --lora-rank {rank}")
        values, place = (down, weight[:rank]) if ".lora_A." in name else (up / scale, weight[:, :rank])
        if values.numel() != place.numel():
            fault = f"{file}: the adapter of {name} has the shape {tuple(values.shape)}, not {tuple(place.shape)}"
            raise VplanError(fault, "pass a LoRA of the plan's model")
        place.copy_(values.reshape(place.shape))

    return begin


def _file(path: Path, part: str) -> Path:
    if path.is_dir():
        path = next((one for one in (path / part / DIFFUSERS_LORA, path / DIFFUSERS_LORA) if one.is_file()), path)
    if not path.is_file() or path.suffix != ".safetensors":
        raise VplanError(f"--lora-init {quoted(str(path))} is no .safetensors file", "pass a LoRA file")
    return path


def _adapters(file: Path, layers: Mapping[str, Tensor], places: Mapping[str, LayerRows]) -> dict[str, _Adapter]:
    """The file's adapters by diffusers' layers, in fp32, with the file's scale multiplied into the up-weights."""
    tensors, default = _read(file)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if match := _KEY.fullmatch(key):
            half = "down" if match[2] in ("lora_A", "lora_down", "lora.down") else "up"
            halves.setdefault(match[1], {})[half] = tensor.float()
    owners = _owners(layers, places)
    found = {}
    for name, pair in halves.items():
        called = _PREFIX.sub("", name, count=1)
        owned = owners.get(called)
        if owned is None or pair.keys() != {"down", "up"}:
            fault = f"{file} has an adapter of {quoted(name)}, which is not one of the plan's"
            raise VplanError(fault, "plan with the layers that it has: --lora-targets")
        down, up = pair["down"], pair["up"]
        alpha = tensors.get(f"{name}.alpha")
        up = up * (default if alpha is None else float(alpha) / down.shape[0])
        for layer in owned:
            place = None if called in (layer, layer.replace(".", "_")) else places[layer]
            found[layer] = _of_layer(down, up, layers[layer].shape[0], place)
    return found


def _of_layer(down: Tensor, up: Tensor, rows: int, place: LayerRows | None) -> _Adapter:
    """The adapter of one layer. From that of a fused layer it takes its own rows, and the columns not zero there."""
    if place is None or up.shape[0] == rows != place.rows:
        return _Adapter(down, up)
    up = up[place.first_row : place.first_row + rows]
    reaches = up.flatten(1).any(dim=0)
    if place.rows != rows and reaches.any():
        down, up = down[reaches], up[:, reaches]
    return _Adapter(down, torch.cat(up.chunk(2)[::-1]) if place.is_swapped else up)


def _owners(layers: Mapping[str, Tensor], places: Mapping[str, LayerRows]) -> dict[str, list[str]]:
    """Name that a file may have for a layer -> the layers of diffusers' model that it covers."""
    owners: dict[str, list[str]] = {}
    for layer in layers:
        names = {layer, layer.replace(".", "_")}
        if layer in places:
            names |= {places[layer].layer, places[layer].layer.replace(".", "_")}
        for name in names:
            owners.setdefault(name, []).append(layer)
    return owners


def _read(file: Path) -> tuple[dict[str, Tensor], float]:
    """A file's tensors, and the scale of adapters that have no alpha of their own."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # no mapping
            header = json.loads((opened.metadata() or {}).get(ADAPTER_METADATA, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise VplanError(f"{file} cannot be read: {str(error).splitlines()[0]}", "pass a LoRA file") from None
    numbers = {key.split(".")[-1]: value for key, value in header.items()} if isinstance(header, dict) else {}
    alpha, rank = numbers.get("lora_alpha"), numbers.get("r")
    if isinstance(alpha, int | float) and isinstance(rank, int | float) and rank > 0:
        return tensors, alpha / rank
    return tensors, 1.0
