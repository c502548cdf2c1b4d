"""What the user of `vplan record FOLDER --inputs FILE.toml` says of a model that its class does not.

    kind = "video"                        # or "image"
    text_tokens = 512                     # tokens of a prompt
    patch = [1, 2, 2]                     # latent frames, rows and columns of a cell of the grid
    lora_targets = ["to_q", "to_v"]       # layers that an adapter is put on
    vae = { spatial = 8, temporal = 4 }   # by how much it shrinks a clip
    lengths = ["16FHW+40HW+T"]            # tokens that the model joins, where several have a coefficient
    rounded.P = { product = "HW", unit = 32 }  # a length that the model fills up to a multiple, for lengths = ["P+T"]
    inputs.hidden_states = "B 16 F 2H 2W" # an argument of forward, see planner.catalog.forward_inputs

Every line is optional.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

import profiles
from planner.catalog.forward_call import RoundedLength
from planner.catalog.forward_inputs import check, length, parse_argument
from planner.errors import VplanError
from planner.schema import Count, Record, Text
from planner.untrusted import read_document


class Shrinkage(Record):
    """By how much a VAE shrinks a clip: pixels per latent, frames per latent frame."""

    spatial: Count
    temporal: Count = 1


class OwnInputs(Record):
    """The file of `--inputs`; empty when there is none."""

    kind: Literal["video", "image"] | None = None
    text_tokens: Count | None = None
    patch: tuple[Count, Count, Count] | None = None
    lora_targets: tuple[Text, ...] = ()
    vae: Shrinkage | None = None
    lengths: tuple[Text, ...] = ()
    rounded: dict[Annotated[str, Field(pattern="^[CDGPQ]$")], RoundedLength] = {}
    inputs: dict[str, Any] = {}

    @classmethod
    def of_class(cls, class_name: str) -> Self:
        """What is bundled about a class of diffusers; empty for most."""
        path = profiles.CLASSES / f"{class_name}.toml"
        return cls.from_file(path) if path.is_file() else cls()

    def beside(self, known: Self) -> Self:
        """This, and what is known where this says nothing."""
        said = {name: value for name, value in self if name in self.model_fields_set and name != "inputs"}
        return known.replace(**said, inputs={**known.inputs, **self.inputs})

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The file at a path, checked. Raises a VplanError, one line, for whatever is wrong with it."""
        data = read_document(path)
        found = cls.read(data, where=path.name)
        if found.inputs:
            check(found.inputs, path.name)
        for text in found.lengths:
            length(text, path.name, found.rounded)
        for name, entry in found.rounded.items():
            if parse_argument(entry.product, f"{path.name}: rounded.{name}").numbers != 1:
                raise VplanError(f"{path.name}: rounded.{name} is no product", 'write product = "HW"')
        return found
