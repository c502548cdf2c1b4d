"""The global settings of torch's backends, the same for everything that runs the step: recorder, probe, training and
samples.

TF32: off for matrix products, on for convolutions, which are torch's defaults. A plan that says fp32 multiplies
matrices in fp32: TF32 rounds their inputs to 10 bits, which is lossy, and no option asks for it (diffusers' scripts:
``--allow_tf32``, off). It would matter only to plans that compute in fp32; under autocast and in 16 bits little is left
in fp32. `planner.estimate.roofline.peak_flops` prices both accordingly. Both are set explicitly because NVIDIA's
containers turn TF32 on for matrices (``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``), and step times would differ from the
estimate. Memory does not depend on it.

cuDNN benchmark: off. It runs every algorithm once for each new shape, so again for each bucket, with gigabytes of
workspace that no recording contains (discuss.pytorch.org/t/58768: 1.8 GB more in the first step). For SD 1.5 it gained
1 % (diffusers 0.12, optimization/fp16: 9.50 to 9.37 s).

``channels_last``: not used. It helps where convolutions follow each other; in UNets and VAEs a GroupNorm precedes
nearly every one, and CUDA's GroupNorm returns contiguous tensors (pytorch#111824, and still pytorch#191945). Each
convolution's input would be copied to the other format and back, which takes memory and traffic for which tapes would
have to be recorded again. The gain has not been measured on a GPU; revisit this when a supported torch has the kernels
of #191945.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def set_flags() -> None:
    """Sets torch's flags for this process, regardless of its environment variables."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def fewer_threads(processes: int) -> Iterator[None]:
    """A context in which torch uses ``processes`` fewer threads, to leave a core to each of that many other processes:
    a thread that waits for its part of an operator spins and occupies its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before - processes))
    try:
        yield
    finally:
        torch.set_num_threads(before)
