"""Kernels of a program's own for the card, which nvcc would compile on a machine with CUDA."""

from __future__ import annotations


class IdleAdamBuilder:
    """In place of DeepSpeed's builder of its Adam for the card (deepspeed/ops/op_builder/fused_adam.py). The kernel
    updates parameters and states where they lie and allocates nothing; a virtual card's does nothing at all."""

    def load(self) -> IdleAdamBuilder:
        """The module with the kernel."""
        return self

    def multi_tensor_adam(self, *arguments: object) -> None:
        """The kernel, over lists of gradients, parameters and both states."""
