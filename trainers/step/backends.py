"""How torch's libraries compute, decided here for all that runs the step: recorder, probe, training, samples.

TF32. A plan that says fp32 multiplies matrices in fp32: TF32 rounds their inputs to 10 bits, which is lossy, and no
option asks for it (diffusers' scripts: ``--allow_tf32``, off). It would matter to plans that compute in fp32 alone:
under autocast and in 16 bits what is left in fp32 is small. Convolutions in fp32 use TF32, as torch has it by default,
and `planner.estimate.roofline.peak_flops` prices both so. Both are set and not left: NVIDIA's containers switch TF32 on
for matrices (``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``), and the seconds would be others than the estimate's. No memory
depends on it.

cuDNN's benchmark: off. It runs every algorithm once for each new shape, with workspaces of gigabytes that no recording
knows (discuss.pytorch.org/t/58768: 1.8 GB more in the first step), and again for each bucket. What it found for SD 1.5
was 1 % (diffusers 0.12, optimization/fp16: 9.50 to 9.37 s).

``channels_last``: nowhere. It gains where convolutions follow each other; in UNets and VAEs a GroupNorm precedes nearly
every one, and CUDA's returns contiguous tensors (pytorch#111824, and still pytorch#191945): each convolution's input
would be copied to the other format and back, which takes memory and bytes that tapes would have to be recorded anew
for. What it gains then has not been measured on a GPU; it is to be decided again when a torch that we support has the
kernels of #191945.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def set_flags() -> None:
    """Sets torch's flags for this process, whatever its environment says."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def fewer_threads(processes: int) -> Iterator[None]:
    """A context in which torch's threads leave a core to each of so many other processes: one that waits for its share
    of an operator keeps the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before - processes))
    try:
        yield
    finally:
        torch.set_num_threads(before)
