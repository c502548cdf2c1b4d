"""Factorises sizes into the atoms of the shape, from a recording in which every atom is a different prime."""

from __future__ import annotations

from collections.abc import Mapping

from planner.catalog.card_limits import CUDNN_SAMPLES
from planner.tape.format import Growing, Monomial


class Factoriser:
    """Reads sizes as ``coefficient * product of atoms`` from a recording at pairwise-prime atoms."""

    def __init__(self, atoms: Mapping[str, int]) -> None:
        self.atoms = dict(atoms)
        self.sizes: dict[Monomial | Growing, int] = {}
        """size -> its index in the tape's table"""

    def factor(self, number: int) -> tuple[int, tuple[int, ...]]:
        """(coefficient, exponent of each atom) of a number. Atoms that are 1 have the exponent 0."""
        exponents = []
        for prime in self.atoms.values():
            exponent = 0
            while prime > 1 and number and number % prime == 0:
                number //= prime
                exponent += 1
            exponents.append(exponent)
        return number, tuple(exponents)

    def size(self, nbytes: int, rounded: tuple[int, int, int] | None = None, samples: int = 0) -> int:
        """The index of a size in the tape's table. ``rounded``: (exact, multiple, rounded up) of one dimension.

        ``samples``: the batch of an attention whose rows are rounded up only if the batch is too large for cuDNN
        (`CUDNN_SAMPLES`); 0 if they are always rounded. A batch that counts only samples and frames never is too large.
        """
        if rounded is None:
            return self._index(Monomial(*self.factor(nbytes)))
        exact, multiple, up = rounded
        rest, above = nbytes // up, 0
        if any(power and atom in ("H", "W") for atom, power in zip(self.atoms, self.factor(samples)[1], strict=True)):
            above = CUDNN_SAMPLES * (rest // samples)
        return self._index(Monomial(*self.factor(rest), multiple, *self.factor(exact), above))

    def growing(self, base: int, slope: int) -> int:
        """The index, in the table of sizes, of a size that is ``base + slope * block`` bytes."""
        return self._index(Growing(Monomial(*self.factor(base)), Monomial(*self.factor(slope))))

    def _index(self, size: Monomial | Growing) -> int:
        return self.sizes.setdefault(size, len(self.sizes))
