"""How a model that has no family of its own is called and trained: the `inputs` of such a profile.

`vplan record` finds it out (`trainers.recording.any_class`), `trainers.families.any_class` does it.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from planner.catalog.forward_inputs import Argument, leaves
from planner.catalog.traits import Traits
from planner.schema import Count, CountOrZero, Flag, Record, Text

FAMILY = "any-class"
"""The family of profiles that are called so, as `planner.catalog.profiles.ModelProfile` names it."""
ANY, LAST = "*", "-1"
"""In place of a block's number in the name of a parameter: any block of its list, or the last."""


class LengthSum(Record):
    """A length that is a constant and a sum of products of sizes, as FHW + T."""

    constant: int
    products: tuple[Text, ...]


class RoundedLength(Record):
    """A length that a model fills up to a multiple: a product of sizes in units, rounded up."""

    product: Text
    unit: Count


_ADAPTER = re.compile(r"\.lora_[AB]\.\w+(?=\.weight$)")
"""In the name of an adapter's matrix, as PEFT names them beside the layer's own."""


class ForwardCall(Record):
    """The arguments of `forward`, and what of its output the loss compares."""

    forward: dict[str, Any]
    """arguments as `planner.catalog.forward_inputs` describes them"""
    main: Text
    """the one that is noisy"""
    channel_axis: Count
    """of the noisy one and of the output"""
    condition: CountOrZero = 0
    """channels of the noisy one that are not latents: a mask, a first frame"""
    prediction: Literal["whole", "half"] = "whole"
    """half: the model predicts a variance too, in as many channels behind"""
    target: str = ""
    """its shape, where the output is not shaped like the latents"""
    fixed: dict[str, int] = {}
    """sizes that cannot vary"""
    sums: dict[str, LengthSum] = {}
    """lengths in the model that are sums"""
    rounded: dict[str, RoundedLength] = {}
    """lengths in the model that are rounded up, which sums may have beside products"""
    short_sides: Flag = False
    """tables of positions end before the rows and columns that tapes are usually recorded at"""
    idle: tuple[Text, ...] = ()
    """parameters that get no gradient, with `*` or `-1` for the number of their block"""
    assumed: tuple[Text, ...] = ()
    """what all of this rests on, in words"""
    traits: Traits = Traits()
    """of the model: no file of a profile holds them otherwise"""

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Self | None:
        """The call that a profile's `inputs` describe; None for a model that has a family of its own."""
        return cls.read(inputs) if "forward" in inputs else None

    def arguments(self) -> Iterator[tuple[str, Argument]]:
        """Every argument by its dotted name; one of a list with an entry per sample with the samples in front."""
        for name, tree in self.forward.items():
            for leaf, argument, per_sample in leaves(tree, name):
                yield leaf, argument.per_sample() if per_sample and argument.kind != "number" else argument

    def uses(self, letter: str) -> bool:
        """Whether a size stands anywhere in the arguments."""
        return any(letter in argument.letters for _, argument in self.arguments())

    def is_idle(self, name: str, depths: Mapping[str, int]) -> bool:
        """Whether a parameter gets no gradient in a model with so many blocks in each list. What adapts a layer gets
        none where the layer's weight gets none."""
        name = _ADAPTER.sub("", name)
        if name in self.idle or any(general in self.idle for general in _of_any_block(name)):
            return True
        for module_list, depth in depths.items():
            prefix = f"{module_list}."
            if name.startswith(prefix):
                number, _, rest = name.removeprefix(prefix).partition(".")
                if number == str(depth - 1) and f"{prefix}{LAST}.{rest}" in self.idle:
                    return True
        return False


def _of_any_block(name: str) -> Iterator[str]:
    """A parameter's name with one number of a block in it made general, for each number that it has."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            yield ".".join((*parts[:at], ANY, *parts[at + 1 :]))
