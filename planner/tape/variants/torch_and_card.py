"""What changes a step's stream of operators besides the strategy: the release of torch, and the card."""

from __future__ import annotations

from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.errors import NotRecordedError
from planner.tape.variants.precision import PLAIN_FP32, Precision

RMS_NORM_IN_FP32 = (2, 12)
"""The first torch whose CUDA autocast computes RMSNorm in fp32 (AT_FORALL_FP32 in ATen/autocast_mode.h). Earlier ones
leave it in the format of its input: 4 to 7 % less for a checkpointed step of Wan 1.3B, 10 to 18 % for any other."""

FUSED_RMS_NORM = (2, 9)
"""The first torch with a CUDA kernel for RMSNorm. Earlier ones took several operators, which are not recorded."""

NEWEST_TRIED = (2, 15)
"""The newest torch that the tapes, recorded with an earlier one, were compared with (docs/accuracy/rehearsals.md)."""

BOTH = (False, True)


class TorchAndCard(NamedTuple):
    """What a step runs on, as far as recordings differ by it."""

    torch: str | None = None
    """its release, as 2.16; None for the newest"""

    cudnn: bool = False
    """whether the card's attention is cuDNN's"""

    mps: bool = False
    """whether the card is one of Apple's GPUs"""


NEWEST = TorchAndCard()


def is_untried(torch: str | None) -> bool:
    """Whether a torch release, such as "2.16", is newer than any that was compared with the tapes."""
    return torch is not None and tuple(int(part) for part in torch.split(".")[:2]) > NEWEST_TRIED


def is_older(profile: ModelProfile, precision: Precision, torch: str | None) -> bool:
    """Whether a step under this torch differs from one under the newest. Raises a NotRecordedError for a torch before
    `FUSED_RMS_NORM`."""
    if torch is None or profile.traits.rms_norm == "none":
        return False
    version = tuple(int(part) for part in torch.split(".")[:2])
    if version < FUSED_RMS_NORM:
        least = ".".join(map(str, FUSED_RMS_NORM))
        fault = f"{profile.title} under torch {torch} is not recorded (no RMSNorm kernel)"
        raise NotRecordedError(fault, f"train with torch {least} or newer, and pass --torch {least}")
    return version < RMS_NORM_IN_FP32 and ages(profile, precision) == BOTH


def ages(profile: ModelProfile, precision: Precision) -> tuple[bool, ...]:
    """The values of "under an older torch" to record: both where it makes a difference, else the newest only."""
    return BOTH if profile.traits.rms_norm == "torch" and precision.autocast else (False,)


def attention_paths(profile: ModelProfile, precision: Precision) -> tuple[bool, ...]:
    """The values of "recorded with cuDNN's attention": both where cards differ in more than a kernel. Never in fp32."""
    return BOTH if profile.traits.attends_by_card and precision != PLAIN_FP32 else (False,)
