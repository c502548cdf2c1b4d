"""Which of a model's weights are parameters, and the sizes of their first dimensions, for engines that shard weights.

A tape calls everything a model loads a weight, including buffers such as position tables, and knows bytes but not
shapes. FSDP2 shards a parameter by rows of its first dimension; no engine shards buffers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from planner.errors import VplanError
from planner.tape.format import DAMAGED_FIX
from planner.tape.packed_json import DAMAGES
from planner.tape.packs import read_recording

FILE = "parameters.gz"
"""Name of the file beside the tapes of a model."""

FORMAT = 1
"""Number of its format."""


class ParameterTable(NamedTuple):
    """The parameters of a published model: full name -> size of its first dimension, and the names of those that stay
    in fp32."""

    rows: Mapping[str, int] = MappingProxyType({})
    """Size of the first dimension (1 for a scalar)."""

    fp32: frozenset[str] = frozenset()
    """Those that diffusers keeps in fp32 in a model of 16 bits (``_keep_in_fp32_modules``)."""

    def is_parameter(self, name: str) -> bool:
        """Whether a weight is a parameter: one of the model's own, or of an adapter."""
        return is_of_adapter(name) or _bare(name) in self.rows

    def rows_of(self, name: str, rank: int) -> int:
        """Size of a parameter's first dimension. Adapters (peft): ``lora_A`` is rank x in, ``lora_B`` is out x rank."""
        if ".lora_A." in name:
            return rank
        return self.rows[_bare(name)]

    def elements(self, name: str, nbytes: int) -> int:
        """Elements of a parameter that a tape of 16-bit weights shows as ``nbytes``."""
        return nbytes // (4 if _bare(name) in self.fp32 and not is_of_adapter(name) else 2)


_ADAPTER = re.compile(r"\.(?:lora|lokr)_")


def is_of_adapter(name: str) -> bool:
    """Whether a weight, by its full name, belongs to an adapter (peft's LoRA, DoRA or LoKr)."""
    return _ADAPTER.search(name) is not None


def _bare(name: str) -> str:
    """The name without an adapter on its layer: peft moves a layer's own weight to ``base_layer``."""
    layer, lora, _ = name.partition(".lora_")
    return f"{layer}.weight" if lora else name.replace(".base_layer.", ".")


def read_parameters(path: Path) -> ParameterTable:
    """The table that ``vplan record`` wrote; a VplanError that names the file where it is damaged."""
    try:
        data = read_recording(path)
        if data["format"] != FORMAT:
            raise VplanError(f"{path.name} of format {data['format']}, this vplan reads {FORMAT}", "record it again")
        rows: dict[str, int] = data["rows"]
        if not all(type(count) is int and count > 0 for count in rows.values()):
            raise ValueError("rows are counts")
        return ParameterTable(rows, frozenset(data["fp32"]))
    except VplanError:
        raise
    except (*DAMAGES, LookupError, TypeError, AttributeError) as error:
        fault = f"{path.name} of {path.parent.name} is damaged ({type(error).__name__})"
        raise VplanError(fault, DAMAGED_FIX) from None
