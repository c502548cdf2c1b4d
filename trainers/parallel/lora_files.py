"""The LoRA files of a run: one for diffusers, one for ComfyUI, kohya's sd-scripts and musubi-tuner.

Both hold the same adapter. ComfyUI's models fuse some of diffusers' layers (q, k and v, often with the MLP's first
layer). Their adapters become one, with the sum of their ranks and block-diagonal up-weights, so that the change of the
weights is the same to the last bit.

A LoKr's two matrices have LyCORIS' names in both. One Kronecker product cannot cover several fused layers, so there is
a file for ComfyUI only if each of the LoKr's layers is a whole layer there.

A DoRA has diffusers' file only. ComfyUI divides its magnitudes by the row norms of the frozen weight (v0.3.77,
comfy/weight_adapter/base.py, ``weight_decompose``), peft by those of the changed one: the same numbers would be a
different adapter there.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

import profiles
from planner import __version__
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.file_writing import write_file
from planner.launch.checkpoints import COMFYUI_LORA, DIFFUSERS_LORA
from planner.spec.job import Job
from planner.spec.training import NAMED_INITS, TrainingSettings
from planner.tape.parameter_table import is_of_adapter
from trainers.step.experts import PARTS
from trainers.step.step import NEAR_ROOT
from trainers.step.weights import MAGNITUDE

_DEFAULT = re.compile(r"\.default(?=\.|$)")
"""peft's name for the adapter, in the names of its weights."""

_BLOCK = re.compile(r"\.(\d+)\.")


class LayerRows(NamedTuple):
    """Where one of diffusers' layers is in ComfyUI's model: rows of a layer's weight."""

    layer: str
    """name of ComfyUI's layer"""
    first_row: int
    """the first of its rows in the weight of that layer"""
    rows: int
    """all rows of the weight of ComfyUI's layer"""
    is_swapped: bool = False
    """whether the two halves of its rows are swapped there"""


class LoraFiles:
    """Writes the LoRA files of one run, for its checkpoints and its end."""

    def __init__(
        self, profile: ModelProfile, job: Job, training: TrainingSettings, samples: int, model: nn.Module
    ) -> None:
        """``samples``: size of the dataset; ``model``: with its adapters, or both experts. Raises a VplanError if
        ComfyUI has the model but the name of an adapted layer there is not known: before training, not after it."""
        self.profile, self.job, self.training, self.samples = profile, job, training, samples
        self.scale = (training.lora_alpha or job.lora_rank) / job.lora_rank
        one = model.get_submodule(PARTS["high"]) if job.experts == "both" else model
        written_for_comfyui = job.adapter != "dora" and has_comfyui_model(profile)
        self.places = comfyui_places(profile, one) if written_for_comfyui else None
        if self.places is not None:
            layers = {_layer(name) for name, _ in one.named_parameters() if is_of_adapter(name)}
            if unnamed := sorted(layers - self.places.keys()):
                fault = f"an adapter of {unnamed[0]} cannot be written for ComfyUI: its name there is not known"
                raise VplanError(fault, "leave it out of --lora-targets")
            if job.adapter == "lokr" and not all(_is_whole(one, layer, self.places[layer]) for layer in layers):
                self.places = None

    def write(self, folder: Path, trained: Mapping[str, Tensor], steps: int) -> None:
        """Writes the files of trained adapters into a folder. Two experts trained together each get a subfolder, named
        like their part. ``trained``: adapter weights by their names in the model; ``steps``: how many were done."""
        header = self._header(steps)
        for place, of_part in self._by_part(trained).items():
            target = folder / place
            target.mkdir(exist_ok=True)
            part = self.profile.traits.part
            written = {DIFFUSERS_LORA: diffusers_tensors(of_part, part, self.scale)}
            if self.places is not None and self.job.adapter == "lokr":
                written[COMFYUI_LORA] = lycoris_tensors(of_part, self.places)
            elif self.places is not None:
                written[COMFYUI_LORA] = comfyui_tensors(of_part, self.places, self.scale)
            for name, tensors in written.items():  # `save_file` would make them readable only by their owner
                write_file(target / name, save(tensors, metadata=header))

    def _by_part(self, trained: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Subfolder -> the weights that belong in it, by their names within one model."""
        if self.job.experts != "both":
            return {"": dict(trained)}
        return {
            part: {
                name.removeprefix(f"{part}."): value for name, value in trained.items() if name.startswith(f"{part}.")
            }
            for part in PARTS.values()
        }

    def _header(self, steps: int) -> dict[str, str]:
        """The file's metadata. Names that begin with ``ss_`` are those of kohya's sd-scripts, which other programs
        show."""
        law = {name: value for name, value in self.training.to_json().items() if value is not None}
        law["objective"] = self.profile.training.objective
        if law.get("lora_init") not in (None, *NAMED_INITS):  # its path is private
            law["lora_init"] = Path(law["lora_init"]).name
        return {
            "format": "pt",
            "vplan_version": __version__,
            "vplan_training_law": json.dumps(law, sort_keys=True),
            "ss_base_model_version": self.profile.name,
            "ss_num_train_items": str(self.samples),
            "ss_steps": str(steps),
            **self._network(),
            **({"vplan_expert": self.job.experts} if self.job.experts else {}),
        }

    def _network(self) -> dict[str, str]:
        if self.job.adapter == "lokr":
            arguments = {"algo": "lokr", "factor": str(self.job.lokr_factor or NEAR_ROOT)}
            return {"ss_network_module": "lycoris.kohya", "ss_network_args": json.dumps(arguments)}
        size = {"ss_network_dim": str(self.job.lora_rank), "ss_network_alpha": f"{self.scale * self.job.lora_rank:g}"}
        return size | ({"ss_network_module": "networks.lora"} if self.job.adapter == "lora" else {})


def diffusers_tensors(trained: Mapping[str, Tensor], part: str, scale: float) -> dict[str, Tensor]:
    """Adapter weights by the names of diffusers' LoRA files: ``transformer.blocks.0.attn1.to_q.lora_A.weight``, for a
    DoRA also ``transformer.blocks.0.attn1.to_q.lora_magnitude_vector``, for a LoKr ``....to_q.lokr_w1`` (peft
    utils/save_and_load.py).

    Readers take a missing alpha to be the rank, so the scale is multiplied into the up-weights.
    """
    scaled = trained if scale == 1 else {name: _with_scale(name, tensor, scale) for name, tensor in trained.items()}
    return {f"{part}.{_saved_name(name)}": tensor for name, tensor in scaled.items()}


def _saved_name(name: str) -> str:
    layer, magnitude, _ = name.partition(MAGNITUDE)
    return layer + magnitude.removesuffix(".") if magnitude else _DEFAULT.sub("", name)


def lycoris_tensors(trained: Mapping[str, Tensor], places: Mapping[str, LayerRows]) -> dict[str, Tensor]:
    """A LoKr's matrices by the names of LyCORIS' files: ``lora_unet_blocks_0_self_attn_q.lokr_w1``. They are not
    factorised, so readers scale them by 1."""
    tensors = {}
    for name, tensor in trained.items():
        layer = _layer(name)
        key = f"lora_unet_{places[layer].layer.replace('.', '_')}"
        tensors[key + _DEFAULT.sub("", name.removeprefix(layer))] = tensor
    return tensors


def _is_whole(model: nn.Module, layer: str, place: LayerRows) -> bool:
    """Whether a layer is a whole layer of ComfyUI's model, with its rows in the same order."""
    frozen = model.get_submodule(f"{layer}.base_layer")
    assert isinstance(frozen, nn.Linear | nn.Conv2d | nn.Conv3d)
    rows = frozen.out_features if isinstance(frozen, nn.Linear) else frozen.out_channels
    return not place.is_swapped and place.rows == rows


def _with_scale(name: str, tensor: Tensor, scale: float) -> Tensor:
    return (tensor.float() * scale).to(tensor.dtype) if ".lora_B." in name else tensor


def comfyui_tensors(
    trained: Mapping[str, Tensor], places: Mapping[str, LayerRows], scale: float = 1.0
) -> dict[str, Tensor]:
    """Adapter weights by the names of kohya's LoRA files: ``lora_unet_blocks_0_self_attn_q.lora_down.weight``.

    Each alpha is ``scale`` times the adapter's rank in this file, because readers divide it by that rank.
    """
    by_layer: dict[str, list[tuple[LayerRows, Tensor, Tensor]]] = {}
    for name, down in trained.items():
        if ".lora_A." in name:
            place = places[_layer(name)]
            up = trained[name.replace(".lora_A.", ".lora_B.")]
            if place.is_swapped:
                up = torch.cat(up.chunk(2)[::-1])
            by_layer.setdefault(place.layer, []).append((place, down, up))
    tensors: dict[str, Tensor] = {}
    for layer, adapters in by_layer.items():
        key = f"lora_unet_{layer.replace('.', '_')}"
        down, up = _joined(adapters)
        tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"] = down, up
        tensors[f"{key}.alpha"] = torch.tensor(scale * down.shape[0])
    return tensors


def _joined(adapters: list[tuple[LayerRows, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(down, up) of one adapter that changes a layer as several adapters do, each of them its own rows."""
    (place, down, up), *others = adapters
    if not others and up.shape[0] == place.rows:
        return down.contiguous(), up.contiguous()
    downs = torch.cat([down for _, down, _ in adapters])
    ups = up.new_zeros(place.rows, downs.shape[0])
    column = 0
    for place, down, up in adapters:
        ups[place.first_row : place.first_row + up.shape[0], column : column + down.shape[0]] = up
        column += down.shape[0]
    return downs, ups


def _layer(name: str) -> str:
    """The layer that an adapter's weight belongs to."""
    return re.split(r"\.(?:lora_[AB]|lora_magnitude_vector|lokr_w[12])\.", name)[0]


# ---- names


@cache
def _names() -> dict[str, Any]:
    return tomllib.loads(profiles.COMFYUI.read_text(encoding="utf-8"))


def has_comfyui_model(profile: ModelProfile) -> bool:
    """Whether ComfyUI itself, without custom nodes, can run a model. It does not know LatentSync's UNet."""
    table = _names().get(profile.diffusers_class)
    if table is None or profile.inputs.get("sound"):
        return False
    return not any(profile.config.get(key) for key in table.get("without", ()))


def comfyui_places(profile: ModelProfile, model: nn.Module) -> dict[str, LayerRows]:
    """Where each layer of a model, with or without adapters, is in ComfyUI's model, by diffusers' name."""
    rows = {  # not from the weight's shape: it may be packed, or split over ranks
        name.replace(".base_layer", ""): module.out_features if isinstance(module, nn.Linear) else module.out_channels
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d) and ".lora_" not in name
    }
    table = _names()[profile.diffusers_class]
    if table.get("same"):
        return {name: LayerRows(name, 0, count) for name, count in rows.items()}
    layers = {**_names()[table["extends"]]["layers"], **table["layers"]} if "extends" in table else table["layers"]
    return _stacked(rows, layers, table)


def _stacked(rows: Mapping[str, int], layers: Mapping[str, str], table: Mapping[str, Any]) -> dict[str, LayerRows]:
    """Places of layers. Those with the same name in ComfyUI are stacked row-wise, in the order of the table."""
    order = {entry: number for number, entry in enumerate(layers)}
    entries = {name: entry for name in rows if (entry := _entry(name, layers)) is not None}
    parts: dict[str, list[str]] = {}
    for name in sorted(entries, key=lambda name: order[entries[name]]):
        parts.setdefault(_numbered(layers[entries[name]], name), []).append(name)
    swapped, in_last = table.get("swapped", ()), table.get("swapped_in_last", ())
    places = {}
    for layer, names in parts.items():
        first = 0
        for name in names:
            is_swapped = entries[name] in swapped or (entries[name] in in_last and _is_last(name, rows))
            places[name] = LayerRows(layer, first, sum(rows[part] for part in names), is_swapped)
            first += rows[name]
    return places


def _entry(name: str, layers: Mapping[str, str]) -> str | None:
    """The table's entry for a layer: its name, or its name with "*" for the block's number, the first number in it;
    None if there is none."""
    return next((entry for entry in (name, _BLOCK.sub(".*.", name, count=1)) if entry in layers), None)


def _numbered(layer: str, name: str) -> str:
    """ComfyUI's name of a layer, with the block's number from diffusers' ``name`` in place of "*"."""
    number = _BLOCK.search(name)
    return layer.replace("*", number[1]) if number else layer


def _is_last(name: str, names: Iterable[str]) -> bool:
    """Whether a layer is in the last block of its list."""
    number = _BLOCK.search(name)
    assert number
    following = f"{name[: number.start()]}.{int(number[1]) + 1}."
    return not any(other.startswith(following) for other in names)
