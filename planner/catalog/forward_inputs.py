"""What a model's `forward` is called with, in words that say each argument's shape in the sizes a tape counts in.

    hidden_states = "B 16 F 2H 2W"        # a tensor: samples, channels, latent frames, rows and columns in cells of 2x2
    timestep = "B timestep"               # the noise level of each sample, in training steps
    encoder_attention_mask = "B T ones"   # a mask that leaves nothing out
    num_frames = "number F"               # no tensor
    img_shapes = { samples = [["number F", "number H", "number W"]] }   # a list with one entry per sample
    text_encoder_layers = { blocks = "B T 2048" }   # a list with one entry per block
    guidance = "none"                     # an optional argument that is not given

A dimension is a whole number, a product of sizes (`2H`, `FHW`) or a sum of those (`FHW+T`), of which a number may be
taken away (`4F-3`). The sizes are letters of
`planner.tape.format.ATOMS`: B samples, F frames, H rows and W columns of the patch grid, T text tokens, E others.
Brackets make a tuple; a list where they hold others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from planner.errors import VplanError, did_you_mean, quoted

LETTERS = "BFHWTE"
LEVELS = ("timestep", "sigma", "timestep_as_latents", "sigma_as_latents")
"""Kinds of noise levels: in training steps, from 0 to 1, and both in the dtype of the latents."""
KINDS = ("float", "fp32", "complex", "long", "bool", "false", "ones", "zeros", *LEVELS)
"""What a tensor holds: numbers in the compute dtype, in fp32, in complex64, indices, a mask of bools that are all true
(or false), a mask of long that is all ones (or zeros), or a noise level."""
UNKNOWN = "?"
"""In place of a width that a layer of the model asks for: dry runs find it out."""
SAMPLES = "samples"
"""The only key of a table that stands for a list with one entry per sample."""
BLOCKS = "blocks"
"""The only key of a table that stands for a list with one entry per block of the model."""
_TERM = re.compile(rf"(\d*)\*?([{LETTERS}]*)", re.ASCII)
_MOST_ENTRIES = 200
_DEEPEST = 4


class Term(NamedTuple):
    """A coefficient times a product of sizes."""

    coefficient: int
    letters: str

    def at(self, grid: Mapping[str, int]) -> int:
        """Its value at a shape."""
        return self.coefficient * math.prod(grid[letter] for letter in self.letters)


class Argument(NamedTuple):
    """A tensor, or a number where ``kind`` is "number": its dimensions, each the sum of some terms."""

    dims: tuple[tuple[Term, ...], ...]
    kind: str

    def shape(self, grid: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape at a shape of clips; for a number the number itself."""
        return tuple(sum(term.at(grid) for term in terms) for terms in self.dims)

    def per_sample(self) -> Argument:
        """The tensor that holds one of these for each sample."""
        return Argument(((Term(1, "B"),), *self.dims), self.kind)

    @property
    def numbers(self) -> int:
        """The numbers of one cell of one sample: the product of all coefficients."""
        return math.prod(terms[0].coefficient for terms in self.dims)

    @property
    def letters(self) -> str:
        """The sizes it depends on."""
        return "".join(sorted({letter for terms in self.dims for term in terms for letter in term.letters}))

    @property
    def has_samples(self) -> bool:
        """Whether samples lie along its first dimension."""
        return bool(self.dims) and any("B" in term.letters for term in self.dims[0])


def parse_argument(text: object, where: str) -> Argument:
    """The argument that a text describes. Raises a VplanError that names ``where`` it stands."""
    example = 'write it like "B 16 F 2H 2W", "B T ones" or "number F"'
    if not isinstance(text, str) or not text.split():
        raise VplanError(f"{where} is {quoted(text)}, not a shape", example)
    words = text.split()
    if words == ["none"]:  # an optional argument that is not given
        return Argument((), "none")
    kind = "float"
    if words[0] == "number":
        kind, words = "number", words[1:]
        if len(words) != 1:
            raise VplanError(f'{where}: "number" needs one size behind it', example)
    elif words[-1][0].islower():
        kind = words.pop()
        if kind not in KINDS:
            raise VplanError(f"{where}: {quoted(kind)} is no kind of tensor", did_you_mean(kind, KINDS, example))
    if kind == "number" and re.fullmatch(r"\d{1,6}\.\d{1,6}", words[0], re.ASCII):
        words = [str(round(float(words[0])))]  # its value takes no memory
    return Argument(tuple(_dimension(word, where) for word in words), kind)


def _dimension(word: str, where: str) -> tuple[Term, ...]:
    terms: list[Term] = []
    for part in re.sub(r"(?<=.)-(?=\d+(\+|-|$))", "+-", word, flags=re.ASCII).split("+"):
        if terms and re.fullmatch(r"-\d{1,6}", part, re.ASCII):
            terms.append(Term(int(part), ""))
            continue
        match = _TERM.fullmatch(part)
        if match is None or not part or len(part) > 12:
            fix = f"a size is a whole number, or a product of {', '.join(LETTERS)} such as 2H or FHW+T"
            raise VplanError(f"{where}: {quoted(word)} is no size", fix)
        terms.append(Term(int(match[1] or 1), match[2]))
    return tuple(terms)


_MOST_PRODUCTS = 200


def length(text: str, where: str, names: Collection[str] = ()) -> tuple[int, tuple[str, ...]]:
    """(constant, products) of a sum such as `16FHW+T+1`, each product as often as its coefficient says. ``names``: of
    lengths that are rounded up, which may stand for a product. Raises a VplanError for what is none."""
    parts = text.split("+")
    rounded = tuple(part for part in parts if part in names)
    plain = "+".join(part for part in parts if part not in names)
    terms = _dimension(plain, where) if plain else ()
    products = [letters for count, letters in terms if letters for _ in range(min(count, _MOST_PRODUCTS + 1))]
    if len(products) > _MOST_PRODUCTS:
        raise VplanError(f"{where}: {quoted(text)} adds up too much", f"{_MOST_PRODUCTS} at most, coefficients counted")
    return sum(count for count, letters in terms if not letters), (*products, *rounded)


def leaves(tree: object, name: str) -> Iterator[tuple[str, Argument, bool]]:
    """(dotted name, argument, whether there is one per sample) of everything in an argument's description."""
    yield from _leaves(tree, name, False, 0)


def _leaves(tree: object, name: str, per_sample: bool, depth: int) -> Iterator[tuple[str, Argument, bool]]:
    if depth > _DEEPEST:
        raise VplanError(f"{name} is nested too deeply", "four levels at most")
    if isinstance(tree, dict):
        for only in (SAMPLES, BLOCKS):
            if only in tree and len(tree) > 1:
                raise VplanError(f"{name}: {only!r} stands beside other keys", "it is a list's only key")
        for key, inner in tree.items():
            yield from _leaves(
                inner, name if key == SAMPLES else f"{name}.{key}", per_sample or key == SAMPLES, depth + 1
            )
    elif isinstance(tree, list):
        for index, inner in enumerate(tree):
            yield from _leaves(inner, f"{name}.{index}", per_sample, depth + 1)
    else:
        yield name, parse_argument(tree, name), per_sample


def check(table: object, where: str) -> dict[str, Any]:
    """A table of arguments, every description in it read once. Raises a VplanError that names what is wrong."""
    if not isinstance(table, dict) or not table:
        raise VplanError(f"{where}: inputs is no table of shapes", 'write inputs.hidden_states = "B 16 F 2H 2W"')
    entries = 0
    for name, tree in table.items():
        for _ in leaves(_with_widths(tree), f"inputs.{name}"):
            entries += 1
    if entries > _MOST_ENTRIES:
        raise VplanError(f"{where}: more inputs than any model has", f"{_MOST_ENTRIES} at most")
    return table


def _with_widths(tree: Any) -> Any:
    """A description with a width for each that is not known."""
    if isinstance(tree, dict):
        return {key: _with_widths(inner) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [_with_widths(inner) for inner in tree]
    return " ".join("1" if word == UNKNOWN else word for word in tree.split()) if isinstance(tree, str) else tree
