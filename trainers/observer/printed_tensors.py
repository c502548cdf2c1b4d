"""Prints tensors of the card from host RAM.

torch turns dispatch modes off while it prints (torch/_tensor_str.py, `_str`), and asks the card how many elements are
not zero. On a virtual card that count would be whatever lies in its memory, up to billions, and torch would make as
many Python objects: DeepSpeed's stage 3, which prints all its parameters into a message that it does not show, took
over 17 GiB of host RAM so.
"""

from __future__ import annotations

from typing import Any

from .small_values import SMALL_BYTES


def install(torch: Any) -> None:
    """Replaces torch's own printing: values of a large tensor, which nobody knows, are shown as dots."""
    printing = torch._tensor_str
    in_full = printing._str
    plain = {torch.Tensor, torch.nn.Parameter}

    def shown(self: Any, *, tensor_contents: str | None = None) -> Any:
        if tensor_contents is None and type(self) in plain and self.is_cuda and self.numel():
            tensor_contents = "..."
            if self.layout == torch.strided and self.untyped_storage().nbytes() <= SMALL_BYTES:
                with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
                    tensor_contents = printing._tensor_str(self.cpu(), len("tensor("))
        return in_full(self, tensor_contents=tensor_contents)

    printing._str = shown
