"""LatentSync, read at a229c39 (scripts/train_unet.py): stage 1."""

from __future__ import annotations

from collections.abc import Iterator

from planner.layout.run import Run, Transform
from planner.layout.single_gpu import NCCL_BYTES
from planner.layout.trainer_terms.shared import cache_kept_while_sampling, steps_by_itself
from planner.tape.program import Stage
from planner.units import MIB

HELPERS = 22_459_110 + 13_631_616
"""Parameters of S3FD and SyncNet, counted (eval/detectors/s3fd/nets.py, eval/syncnet/syncnet.py)."""


def gradients_until_backward(run: Run) -> None:
    """``optimizer.zero_grad()`` stands between forward and backward, so that the last step's gradients live through the
    next encode and forward, and through saving and validation."""
    if not steps_by_itself(run):
        return
    gradients = list(run.named("gradient").values())
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, gradients)
    run.first_step, run.step = run.step, Stage(run.step.name, list(run.step.stretches))
    backward = next(at for at, (moment, _) in enumerate(run.step.stretches) if moment.passes == "backward")
    run.free(run.step, gradients, at=backward)


def helpers(run: Run) -> None:
    """The face detector and SyncNet that score validation are loaded at the start in fp32 and stay."""
    run.add(run.load, 4 * HELPERS, "residents", "S3FD and SyncNet", at=0)


def communicator_of_one(run: Run) -> None:
    """The model is wrapped in DDP on one GPU too, over NCCL, whose communicator takes as much for one rank
    (``init_dist``; NVIDIA/nccl#2363)."""
    if run.machine.world == 1:
        run.device.outside_bytes += NCCL_BYTES


def cache_kept(run: Run) -> None:
    """Leaves the allocator's cache as it is between a step and validation: this trainer does not empty it."""
    run.empty_cache.before_validation = False


def decode_under_autocast(run: Run) -> None:
    """Validation decodes under autocast: the fp16 VAE's group norms take and give fp32, and so do the activations
    behind them, until the next convolution casts its input (``torch.autocast`` around ``pipeline(...)``)."""
    for phase, stage in run.phases.validation:
        if phase == "decode":
            for position, (moment, events) in enumerate(stage.stretches):
                stage.stretches[position] = (moment, list(_autocast(run, events)))


def copies_of_weights(run: Run) -> None:
    """Autocast keeps its 16-bit copy of each trained weight until it is left, behind the last decode: one context is
    around all of ``pipeline(...)``. It copies what convolutions and matrix products take; norms run in fp32
    (ATen/autocast_mode.cpp, ``cached_cast``)."""
    if not run.phases.validation:
        return
    first, last = run.phases.validation[0][1], run.phases.validation[-1][1]
    taken = [weight for name, weight in run.named("weight").items() if "norm" not in name]
    copies = [run.add(first, run.sizes[weight] // 2, "temporary", "cast", at=0) for weight in taken]
    run.free(last, copies)


def _autocast(run: Run, events: list[int]) -> Iterator[int]:
    """The events of decoding in 16 bits as autocast makes them."""
    activated = 0
    for event in events:
        op, nbytes = (run.program.op[event], run.sizes[event]) if event >= 0 else ("", 0)
        cast = 0
        if op == "native_group_norm" and nbytes >= MIB:  # beside its output it gives means and deviations
            run.resize(event, 2 * nbytes)
            cast = 2 * nbytes
        elif op == "silu":
            run.resize(event, 2 * nbytes)
            activated = nbytes
        elif op == "convolution":
            cast, activated = activated, 0
        if cast:
            copy = run.new(cast, "temporary", "cast")
            yield from (copy, event, ~copy)
        else:
            yield event


CHANGES_SAMPLES = True
TERMS: tuple[Transform, ...] = (
    gradients_until_backward,
    helpers,
    communicator_of_one,
    cache_kept,
    cache_kept_while_sampling,
    decode_under_autocast,
    copies_of_weights,
)


def zeroed_before_validation(run: Run) -> None:
    """With ``optimizer.zero_grad()`` written before the pipeline is called, gradients are gone by then."""
    if run.phases.validation and steps_by_itself(run):
        run.free(run.phases.validation[0][1], list(run.named("gradient").values()), at=0)


BY_VERSION: dict[str, tuple[Transform, ...]] = {"zeroed": (zeroed_before_validation,)}
"""zeroed: its script with that one line added."""
