"""How sure an estimate is: the range around the device peak. It comes from observed errors, not from a guess."""

from __future__ import annotations

import math

from planner.catalog.card_profiles import GpuProfile
from planner.spec.plan import Verdict

RECORDED = (0.02, 0.04)
"""(below, above) as shares of the prediction, when only recordings speak.

Beyond what holes make of the reserved peak (`planner.estimate.fragmentation`): 70 of 74 published peaks lie within
it. It was chosen with these peaks in sight, so they do not test it. Misses lean to one side, because what a recording
cannot show (encoding on the fly, a library's buffers) only adds. Rows of our own trainer will replace it.
"""


COMPILED = 0.1
"""Further down and up where torch.compile decides what backward keeps. Over its benchmark models Inductor took a tenth
less memory than eager (pytorch#93794); what compiling and tuning kernels take in the first steps is not published, and
the same tenth is assumed for it."""


UNSEEN = 0.05
"""Further down and up for AMD's cards, and down for Apple's: no run on one was compared with an estimate. What is known
of AMD's by source alone are the libraries' workspaces (0.2 to 0.4 GiB), what AOTriton accumulates in backward (an fp32
dq or none) and the context (0.45 to 0.8 GiB); of 64 GB that is 2 %, and as much again is left for what nobody wrote
down."""


BESIDE_HEAPS = 0.6
"""Further up for Apple's GPUs: what MPSGraph and Metal take beside PyTorch's heaps, which no recording shows. It is the
"other allocations" of public out-of-memory messages, over "MPS allocated". Of the five of training found, four are of
transformers: 0, 1.6, 7 and 60 % (mattmireles/gemma-tuner-multimodal#18, ace-step/ACE-Step-1.5#282, instructlab/
instructlab#2568, pytorch/pytorch#152351). The fifth, of sound that is classified, has 268 % (pytorch/pytorch#130112):
the range does not reach that. No run on a Mac was compared with an estimate."""


Sides = tuple[float, float]
"""(below, above) as shares of the prediction."""


def on_card(sides: Sides, gpu: GpuProfile) -> Sides:
    """The sides of an estimate on a card, wider for makers whose cards were never compared with a run."""
    below, above = sides
    if gpu.backend == "mps":
        return below + UNSEEN, above + BESIDE_HEAPS
    return (below + UNSEEN, above + UNSEEN) if gpu.vendor == "amd" else sides


def interval(device_bytes: int, compiled: bool = False, sides: Sides = RECORDED) -> tuple[int, int]:
    """The low and high end of an estimate in whole device bytes. ``sides``: those of a ``recorded`` estimate by
    default."""
    below, above = (side + (COMPILED if compiled else 0.0) for side in sides)
    return max(0, math.ceil(device_bytes * (1 - below))), int(device_bytes * (1 + above))


def verdict(device_bytes: int, budget_bytes: int, compiled: bool = False, sides: Sides = RECORDED) -> Verdict:
    """ "fits" if even the high end is within the budget, "no" if not even the low end is, else "tight"."""
    low, high = interval(device_bytes, compiled, sides)
    return "no" if low > budget_bytes else "fits" if high <= budget_bytes else "tight"
