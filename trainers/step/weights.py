"""Loads published weights into a model that was built on ``meta``, from the safetensors files of a diffusers folder.

Tensors are read one by one as the model is allocated, so nothing is in memory twice. Missing, unexpected and misshapen
tensors are errors that name them: a partly random model would train without anybody noticing.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.launch.weight_files import check_architecture, file_names
from planner.layout.optimizer.zero_starts import ZERO_MATRIX
from planner.tape.parameter_table import is_of_adapter
from trainers.families.common.random_draws import sample_seed
from trainers.memory import swap
from trainers.step import placement

NAMED = 5
"""Tensors that an error message names; it gives only the number of the others."""


Begin = Callable[[str, Tensor], None]
"""Initialises a weight of a new adapter, given its full name."""


SHARDING_INFO, BEGINS = "DCP_SHARDING_INFO", "saved_offsets"
"""Key of the metadata of a file with shards of tensors, and the key in it that says where a shard begins
(torch.distributed.checkpoint._hf_utils)."""


class Weights:
    """The tensors of several safetensors files, by name. Files are opened once, and a tensor is read when it is needed.
    A tensor's shards may be in several files, as in torch's distributed checkpoints."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.prefix = ""
        self._where: dict[str, list[tuple[Any, list[int] | None]]] = {}
        """the files with a tensor's shards, and where each shard begins; None if the file has the whole tensor"""
        for file in (_open(folder, name) for name in names):
            begins = json.loads((file.metadata() or {}).get(SHARDING_INFO, "{}"))
            for key in file.keys():  # noqa: SIM118  # no mapping
                self._where.setdefault(key, []).append((file, begins.get(key, {}).get(BEGINS)))

    def under(self, prefix: str) -> Weights:
        """The tensors whose names begin with ``prefix``, under their names without it."""
        weights = copy.copy(self)
        weights.prefix = self.prefix + prefix
        weights._where = {key.removeprefix(prefix): kept for key, kept in self._where.items() if key.startswith(prefix)}
        return weights

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors in the weight files."""
        return frozenset(self._where)

    @torch.no_grad()
    def fill(self, name: str, weight: Tensor) -> None:
        """Copies the tensor of this name into a weight of any dtype. Raises a VplanError if their shapes differ."""
        shares = [(file.get_tensor(self.prefix + name), begin) for file, begin in self._where[name]]
        places = [
            [slice(at, at + length) for at, length in zip(begin or [0] * share.ndim, share.shape, strict=True)]
            for share, begin in shares
        ]
        shape = tuple(max(part.stop for part in parts) for parts in zip(*places, strict=True))
        if shape != weight.shape:
            shapes = f"{shape}, but the model takes {tuple(weight.shape)}"
            raise VplanError(f"{name} in {self.folder} has the shape {shapes}", "pass the weights of the plan's model")
        for (share, _), place in zip(shares, places, strict=True):
            weight[tuple(place)] = share


def published(folder: Path, profile: ModelProfile) -> Weights:
    """The weights of a diffusers folder. Raises a VplanError if it has another architecture than the plan's model."""
    check_architecture(folder, profile)
    return Weights(folder, file_names(folder))


def load(
    model: nn.Module,
    weights: Weights,
    device: torch.device,
    begin: Begin,
    trained: Weights | None = None,
    moving: swap.BlocksToHost | None = None,
    waiting: Iterable[str] = (),
) -> None:
    """Allocates a built model on the device with its weights from files.

    The weights of the blocks in ``moving`` and those named in ``waiting`` stay in host RAM. ``trained``: a checkpoint's
    weights, under the names of the trained parameters. ``begin`` initialises a new adapter.
    """
    kept = trained.names if trained else frozenset()
    wanted = {_published(name) for name, _ in model.named_parameters() if not is_of_adapter(name)}
    wanted |= saved_buffers(model).keys()
    _check_names(model, weights, wanted)

    def fill(name: str, weight: Tensor) -> None:
        if trained and name in kept:
            trained.fill(name, weight)
        elif MAGNITUDE in name:
            _fill_magnitude(name, weight, model, weights)
        elif is_of_adapter(name):
            begin(name, weight)
        else:
            weights.fill(_published(name), weight)

    on_host = frozenset(waiting) | (moving.names if moving else frozenset())
    placement.materialise(model, device, moving.filling(fill) if moving else fill, on_host)
    for name, buffer in saved_buffers(model).items():
        weights.fill(name, buffer)
    names = {name for name, _ in model.named_parameters()}
    if strange := kept - names:
        raise VplanError(f"the checkpoint has {_some(strange)}, which the model lacks", "start over with --resume no")


MAGNITUDE = ".lora_magnitude_vector."
"""Part of the names of DoRA's magnitudes, one number per row of a layer, which train in addition to the adapter (peft
tuners/lora/dora.py)."""


@torch.no_grad()
def _fill_magnitude(name: str, magnitude: Tensor, model: nn.Module, weights: Weights) -> None:
    """Initialises a DoRA's magnitudes with the row norms of the published weight, as peft does (``update_layer``). The
    norms are those of the base alone, because the adapter starts at zero. Computed in host RAM in fp32."""
    base = f"{name.partition(MAGNITUDE)[0]}.base_layer.weight"
    frozen = model.get_parameter(base)
    whole = torch.empty(frozen.shape, dtype=frozen.dtype)
    weights.fill(_published(base), whole)
    lengths = torch.linalg.vector_norm(whole.float().flatten(1), dim=1)
    magnitude.copy_(lengths.reshape(magnitude.shape))


def fresh(seed: int, init: str = "gaussian") -> Begin:
    """Initialises new adapters so that they do not change the model's output, identically on every rank. B is zero; A
    is normal with a standard deviation of 1 / rank (``gaussian``) or uniform like linear layers (``kaiming``), as in
    peft tuners/lora/layer.py. The first matrix of a LoKr is zero and the second uniform (tuners/lokr/layer.py)."""

    @torch.no_grad()
    def begin(name: str, weight: Tensor) -> None:
        if ZERO_MATRIX.search(name):
            weight.zero_()
            return
        assert ".lora_A." in name or ".lokr_w2." in name, name
        generator = torch.Generator().manual_seed(sample_seed(seed, name))
        values = torch.empty(weight.shape, dtype=torch.float32)
        if init == "gaussian" and ".lora_A." in name:
            values.normal_(0.0, 1.0 / weight.shape[0], generator=generator)
        else:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        weight.copy_(values)

    return begin


def _published(name: str) -> str:
    """A parameter's name in the published files, which do not know the adapter's ``base_layer``."""
    return name.replace(".base_layer.", ".")


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers of a model, which published weights contain, by full name."""
    tables = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tables[_published(f"{prefix}.{name}" if prefix else name)] = buffer
    return tables


def _check_names(model: nn.Module, weights: Weights, wanted: set[str]) -> None:
    in_files = weights.names
    tied = {_published(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    strange = {name for name in in_files - wanted - tied if not any(re.search(pattern, name) for pattern in ignored)}
    fix = "pass the weights of the plan's model, or download them again"
    if missing := wanted - in_files:
        raise VplanError(f"{weights.folder} lacks {_some(missing)}", fix)
    if strange:
        raise VplanError(f"{weights.folder} also has {_some(strange)}, which the model lacks", fix)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(ordered[:NAMED]) + rest


def _open(folder: Path, name: str) -> Any:
    try:
        return safe_open(folder / name, framework="pt")
    except (OSError, SafetensorError):
        raise VplanError(f"{folder / name} is damaged", "download the model again") from None
