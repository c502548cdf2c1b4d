"""What an estimate leaves out and what it assumes, in words."""

from __future__ import annotations

from collections.abc import Iterable

from planner.catalog.forward_call import ForwardCall
from planner.estimate.stages import ReplayedStage
from planner.layout import phases
from planner.layout.run import Run
from planner.spec.job import Strategy
from planner.tape.variants.torch_and_card import NEWEST_TRIED, is_untried
from planner.tape.variants.variant import UNPAGED
from planner.units import format_gib


def splitting_note(stage: ReplayedStage, more_bytes: int) -> tuple[str, ...]:
    """The note that a VAE's split convolutions may raise the peak by ``more_bytes``; none if they cannot."""
    if more_bytes <= 0:
        return ()
    vae, does = stage.run.facts.model.vae.class_name, f"{stage.phase}s"
    over = "splits convolutions over 2 GiB and joins them, which is counted whole"
    return (f"while it {does}, {vae} {over}: up to {format_gib(more_bytes)} more (--vae-tiling avoids it)",)


def assumptions_of(
    run: Run, played: list[ReplayedStage], unrecorded: Iterable[phases.UnrecordedPass]
) -> tuple[str, ...]:
    """What the estimate leaves out and what it assumes, in words."""
    left_out = (
        f"{entry.name.partition('-')[0]} has no recording to {entry.piece}: only its weights are counted"
        + ", and samples come encoded" * entry.elsewhere
        for entry in unrecorded
    )
    layers = [entry.run.encoding_only.by_layer for entry in played if entry.run.encoding_only.by_layer]
    words = (f"{name} is larger than the card and runs layer by layer" for name in dict.fromkeys(layers))
    apart = (
        f"{name} is larger than the card: the command that caches prompts needs its option for 8 bits or the CPU"
        for name in dict.fromkeys(name.partition("-")[0] for name in phases.encoders_left_out(run))
    )
    compiled = ("torch.compile decides what backward keeps: estimated as without it, with 10 % more margin either way",)
    more = compiled if run.strategy.compile != "none" else ()
    part = ("activations are those of full training, so this is an upper bound",) if run.job.trainable else ()
    chosen = (_CHOSEN_LAYERS,) if any(run.device.kept_for_adapters) else ()
    tried = ".".join(map(str, NEWEST_TRIED))
    newer = f"torch {run.machine.torch} is newer than what estimates were compared with ({tried})"
    untried = (newer,) if is_untried(run.machine.torch) else ()
    return (*_of_class(run), *left_out, *words, *apart, *_elastic(run.strategy), *more, *part, *chosen, *untried)


_CHOSEN_LAYERS = (
    "no recording has adapters on just these layers: their weights, gradients and states are counted, and the range "
    "takes in what a step may keep for them"
)


def _of_class(run: Run) -> tuple[str, ...]:
    """What the recording of a model that has no family of its own assumes about its inputs."""
    call = ForwardCall.of(run.facts.model.inputs)
    if call is None:
        return ()
    return (f"recorded from the signature of {run.facts.model.diffusers_class}: {'; '.join(call.assumed)}",)


def _elastic(strategy: Strategy) -> tuple[str, ...]:
    """The note about paged optimizer states, which use GPU memory only while some is free."""
    if strategy.optimizer not in UNPAGED:
        return ()
    return ("paged states are counted in host RAM; they use free GPU memory and are paged out when it is short",)
