"""Whether a large tensor of the card is all zero, for programs that ask that before anything was computed.

Prodigy keeps a copy of every weight that does not begin at zero (prodigyopt/prodigy.py: ``if p.any()``). Large tensors
have no values here, but where their first ones came from is known: drawn numbers are not all zero, and a copy is as
what it copies. Any other operator that writes to such a tensor ends what is known of it.
"""

from __future__ import annotations

from typing import Any

DRAWING = {
    "uniform_", "normal_", "random_", "bernoulli_", "exponential_",
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like",
}  # fmt: skip
ZEROING = {"zeros", "zeros_like", "new_zeros", "zero_"}
CARRYING = {"_to_copy", "copy_", "clone"}
TELLING = DRAWING | ZEROING | CARRYING
ASKING = "any"


class LargeZeros:
    """What is known of storages of more than `small_bytes`."""

    def __init__(self, small_bytes: int) -> None:
        self._small_bytes = small_bytes
        self._zero: dict[int, bool] = {}

    def given(self, name: str, args: Any) -> bool | None:
        """Whether what this operator gives will be all zero; None where that cannot be told. Of a copy from host RAM
        the beginning is looked at: behind zeros there can be anything."""
        if name not in TELLING:
            return None
        if name not in CARRYING:
            return name in ZEROING
        source = args[1 if name == "copy_" else 0]
        if source.is_cuda:
            return self._of(source)
        if source.device.type != "cpu" or source.numel() * source.element_size() <= self._small_bytes:
            return None
        first = source[(0,) * (source.dim() - 1)][: self._small_bytes]
        return False if bool(first.any()) else None

    def note(self, tensor: Any, zero: bool) -> None:
        """Remember what was given."""
        if self._is_whole(tensor):
            self._zero[tensor.untyped_storage().data_ptr()] = zero

    def asked(self, name: str, tensor: Any) -> bool | None:
        """Whether a tensor is all zero, where the operator asks just that and it is known."""
        return self._of(tensor) if name == ASKING else None

    def forget(self, place: int) -> None:
        """Something else may lie at this address now."""
        self._zero.pop(place, None)

    def _of(self, tensor: Any) -> bool | None:
        return self._zero.get(tensor.untyped_storage().data_ptr()) if self._is_whole(tensor) else None

    def _is_whole(self, tensor: Any) -> bool:
        """Whether it is on the card, large, and all that its storage holds."""
        nbytes = tensor.untyped_storage().nbytes()
        return bool(tensor.is_cuda and self._small_bytes < nbytes <= tensor.numel() * tensor.element_size())
