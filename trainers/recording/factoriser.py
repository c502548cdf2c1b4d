"""Sizes as products of the shape's atoms, read from a recording in which every atom is a prime of its own."""

from __future__ import annotations

from collections.abc import Mapping

from planner.tape.format import Growing, Monomial


class Factoriser:
    """Reads sizes as ``coefficient * product of atoms`` from a recording at pairwise-prime atoms."""

    def __init__(self, atoms: Mapping[str, int]) -> None:
        self.atoms = dict(atoms)
        self.sizes: dict[Monomial | Growing, int] = {}
        """size -> its index in the tape's table"""

    def factor(self, number: int) -> tuple[int, tuple[int, ...]]:
        """(coefficient, exponent of each atom) whose product is the number. An atom at 1 has the exponent 0."""
        exponents = []
        for prime in self.atoms.values():
            exponent = 0
            while prime > 1 and number and number % prime == 0:
                number //= prime
                exponent += 1
            exponents.append(exponent)
        return number, tuple(exponents)

    def size(self, nbytes: int, rounded: tuple[int, int, int] | None = None) -> int:
        """The index of a size in the tape's table. ``rounded``: (exact, multiple, rounded up) of one dimension."""
        if rounded is None:
            return self._index(Monomial(*self.factor(nbytes)))
        exact, multiple, up = rounded
        return self._index(Monomial(*self.factor(nbytes // up), multiple, *self.factor(exact)))

    def growing(self, base: int, slope: int) -> int:
        """The index, in the table of sizes, of a size that is ``base + slope * block`` bytes."""
        return self._index(Growing(Monomial(*self.factor(base)), Monomial(*self.factor(slope))))

    def _index(self, size: Monomial | Growing) -> int:
        return self.sizes.setdefault(size, len(self.sizes))
