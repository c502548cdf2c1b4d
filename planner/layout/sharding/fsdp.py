"""torch's FSDP2 (``fully_shard`` per block and over the rest) as a transformation of a recorded step.

Read in torch 2.13, torch/distributed/fsdp/_fully_shard: each parameter is split by rows of its first dimension, the
last share padded (_fsdp_param.py); a group is gathered into one buffer and copied out into its weights
(_fsdp_collectives.py); that buffer lives until the next group's copy-out in forward, and is fetched one group ahead in
backward (_fsdp_param_group.py). Everything trains in 16 bits on gathered copies; the shares keep the strategy's
storage, and gradients are added up in fp32. tests/contract reads the same bytes off the real thing.

With several copies of the model (``fsdp_replicas``, torch's HSDP) the world is that of one copy. A group's reduced
gradients are then summed over the copies in place, behind the last micro-batch: until then they add up in fp32
(``_partial_reduce_output``). Where what is trained has 16 bits, the fp32 sums of all groups wait for the end of
backward (``AllReduceState``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.layout.run import Run
from planner.layout.sharding.stage_editor import StageEditor, first_backward, spans
from planner.layout.sharding.zero import FULL, HALF, cast_to_16_bits
from planner.tape.program import Block, Stage, frees
from planner.tape.variants.precision import trained_storage

GATHERING, REDUCING, SUMMING = 1, 2, 3
"""CUDA streams of their own (``FSDPCommContext.lazy_init``): a group is gathered on the one that copies it in, and the
output of a reduce-scatter is made on the next; what is cast behind the sum over copies, on the last."""


class ParameterGroup(NamedTuple):
    """The parameters that are gathered together, in elements; ``share`` is of one rank, with its padding."""

    shares: tuple[int, ...]
    """of each parameter: gathered, it has a buffer of its own (``init_all_gather_outputs``)"""
    share: int
    stored: tuple[int, ...]
    """bytes per element of each parameter's share"""
    cast_share: int
    """of those whose storage is not 16 bits"""
    trained_share: int
    gradients: tuple[int, ...]
    """buffers of the gradients before they are reduced"""


def padded_share(rows: int, elements: int, world: int) -> int:
    """Elements of a parameter on each rank: whole rows, rounded up (``padded_sharded_size``)."""
    return -(-rows // world) * (elements // rows)


def fsdp(run: Run) -> None:
    """Splits the weights, weaves gathering and reducing into the step, and steps over the shares."""
    if run.strategy.sharding != "fsdp":
        return
    world = run.configuration.shards
    kept_in = trained_storage(run.job, run.strategy), run.strategy.weights_dtype
    split = run.shared_by_weights(_split, world, run.grid["R"], *kept_in)
    shares, groups = split.shares, split.groups
    cast_to_16_bits(run)
    offloaded = run.strategy.offload_params != "none"
    run.resize_all(split.share_bytes)
    _load_one_by_one(run, split.whole_bytes, offloaded)
    largest = max(group.share for block, group in groups.items() if block is not None)
    buffers = 1 if world == 1 else 2
    run.handover.gathered_bytes = HALF * world * (groups[None].share + buffers * largest)
    _end_blocks(run, split.blocks)
    again = run.step.copy()
    accumulates, copies = run.strategy.gradient_accumulation > 1, run.strategy.fsdp_replicas > 1
    first = _FsdpPass(run, groups, run.step)
    kept = first.insert(adds=False, sums=copies and not accumulates)
    if accumulates:
        last = _FsdpPass(run, groups, again, first.kept if copies else [])
        of_last = last.insert(adds=not copies, sums=copies)
        run.free(again, run.leftovers, at=0)
        run.accumulate = again
        kept = of_last if copies else kept
    _step_over_shares(run, shares, kept)


class _Split(NamedTuple):
    """How a model's parameters are split, whatever the shape of the samples."""

    shares: dict[str, int]
    """name -> elements of a rank's share, with its padding"""
    groups: dict[Block | None, ParameterGroup]
    whole_bytes: dict[int, int]
    """buffer -> bytes of the whole parameter, in the format of its share"""
    share_bytes: dict[int, int]
    """buffer -> bytes of the share"""
    blocks: dict[int, Block | None]
    """buffer of a gradient -> the block of its parameter"""


def _split(run: Run) -> _Split:
    table, world, stored = run.facts.parameters, run.configuration.shards, _stored_bytes(run)
    shares = {
        name: padded_share(table.rows_of(name, run.grid["R"]), elements, world)
        for name, elements in run.elements.items()
    }
    return _Split(
        shares,
        _groups(run, shares, stored),
        {run.parameters[name]: elements * stored[name] for name, elements in run.elements.items()},
        {buffer: shares[name] * stored[name] for name, buffer in run.parameters.items()},
        {buffer: run.facts.step.block_of(name) for name, buffer in run.named("gradient").items()},
    )


def _end_blocks(run: Run, blocks: Mapping[int, Block | None]) -> None:
    """Ends each block's backward behind the last gradient of its own: recordings know where a block begins, and count
    what comes before the next one as its own, such as all of a UNet's middle. ``blocks``: of the gradients."""
    stretches = []
    for moment, events in run.step.stretches:
        block, end = (moment.module_list, moment.block), len(events)
        if moment.passes == "backward" and moment.block >= 0 and not blocks.keys().isdisjoint(events):
            owners = {at: blocks[event] for at, event in enumerate(events) if event in blocks}
            if {*owners.values()} != {block}:
                end = max((at + 1 for at, owner in owners.items() if owner == block), default=end)
        stretches.append((moment, events[:end] if end < len(events) else events))
        if end < len(events):
            stretches.append((moment._replace(module_list="", block=-1), events[end:]))
    run.step.stretches = stretches


def _load_one_by_one(run: Run, whole_bytes: Mapping[int, int], offloaded: bool) -> None:
    """Each weight comes to the GPU whole, and goes once its share is cut out of it; so does the share where it waits in
    host RAM (trainers/step/placement.py, ``materialise``)."""
    for position, (moment, events) in enumerate(run.load.stretches):
        loaded = [event for event in events if event in whole_bytes]
        wholes = iter(run.add_new([whole_bytes[event] for event in loaded], "temporary", "whole weight"))
        woven = []
        for event in events:
            if event not in whole_bytes:
                woven.append(event)
                continue
            whole = next(wholes)
            woven += [whole, event, *([~event] if offloaded else []), ~whole]
        run.load.stretches[position] = (moment, woven)


def _stored_bytes(run: Run) -> dict[str, int]:
    """Name -> bytes per element of a share: the trained ones' format, or what the frozen base is loaded in."""
    gradients = run.named("gradient")
    trained = FULL if trained_storage(run.job, run.strategy) == "fp32" else HALF
    least = FULL if run.strategy.weights_dtype == "fp32" else HALF
    return {
        name: trained if name in gradients else max(least, run.sizes[buffer] // run.elements[name])
        for name, buffer in run.parameters.items()
    }


def _groups(run: Run, shares: dict[str, int], stored: dict[str, int]) -> dict[Block | None, ParameterGroup]:
    """One per block, and one (None) of everything outside them."""
    names: dict[Block | None, list[str]] = {None: []}
    for name in shares:
        names.setdefault(run.facts.step.block_of(name), []).append(name)
    gradients = run.named("gradient")
    return {
        block: ParameterGroup(
            shares=tuple(shares[name] for name in inside),
            share=sum(shares[name] for name in inside),
            stored=tuple(stored[name] for name in inside),
            cast_share=sum(shares[name] for name in inside if stored[name] != HALF),
            trained_share=sum(shares[name] for name in inside if name in gradients),
            gradients=tuple(gradients[name] for name in inside if name in gradients),
        )
        for block, inside in names.items()
    }


class _FsdpPass:
    """One forward and backward with FSDP2's buffers woven in."""

    def __init__(
        self, run: Run, groups: dict[Block | None, ParameterGroup], stage: Stage, partial: Sequence[int] = ()
    ) -> None:
        """``partial``: what earlier micro-batches reduced and has not been summed over copies, in the order made."""
        self.run, self.groups = run, groups
        self.stage, self.editor = stage, StageEditor(stage)
        self.world = run.configuration.shards
        self.kept: list[int] = []
        """Reduced gradients that outlive the pass."""

        self._partial = iter(partial)
        self._sums = False
        self._summed: list[int] = []
        """What was summed over copies and is let go when backward is over"""

        self._fetched: int | None = None
        self._reduced: int | None = None

    def insert(self, adds: bool, sums: bool) -> list[int]:
        """Weaves; returns the gradients that are kept. ``adds``: to those of an earlier micro-batch; ``sums``: over
        copies of the model."""
        self._sums = sums
        forward, backward = spans(self.stage, "forward"), spans(self.stage, "backward")
        last, turn = len(self.stage.stretches) - 1, first_backward(self.stage)
        root = self._gathered(None)
        self.editor.before(0, [*self._fetch(None), *root])
        for block, (begin, end) in forward.items():
            gathered, copied_out = self._gathered(block), self._copied_out()
            self.editor.before(begin, [*self._fetch(block), *gathered, *copied_out])
            self.editor.after(end, frees(gathered))
        self.editor.before(turn, self._copied_out())
        self._backward(list(backward.items()), turn, adds)
        gone = frees(root)
        self.editor.after(last, [*gone, *self._reduce(None, adds), *self._let_go()])
        self.editor.after(last, frees(self._summed))
        gradients_freed = {~buffer for group in self.groups.values() for buffer in group.gradients}
        without = {
            index: [event for event in events if event not in gradients_freed]
            for index, (_, events) in enumerate(self.stage.stretches)
            if not gradients_freed.isdisjoint(events)
        }
        self.editor.insert("fsdp", without)
        return self.kept

    def _backward(self, blocks: list[tuple[Block, tuple[int, int]]], turn: int, adds: bool) -> None:
        """The next group is fetched when a group's own weights have been copied out."""
        self.editor.before(turn, self._fetch(blocks[0][0]))
        for position, (block, (begin, end)) in enumerate(blocks):
            gathered, copied_out = self._gathered(block), self._copied_out()
            ahead = self._fetch(blocks[position + 1][0]) if position + 1 < len(blocks) else []
            self.editor.before(begin, [*gathered, *copied_out, *ahead])
            self.editor.after(end, [*(~buffer for buffer in gathered), *self._reduce(block, adds)])

    def _gathered(self, block: Block | None) -> list[int]:
        """A group's weights, whole and in 16 bits."""
        sizes = [HALF * share * self.world for share in self.groups[block].shares]
        return list(self.run.add_new(sizes, "buckets", "gathered weights"))

    def _fetch(self, block: Block | None) -> list[int]:
        """The buffer a group is gathered into. Shares in fp32 are cast to 16 bits, all together, and go once they are
        copied in; those from host RAM come, and are cast, one after another (``_get_param_all_gather_inputs``)."""
        if self.world == 1:
            return []
        group, run = self.groups[block], self.run
        copies, events = [], []
        if run.strategy.offload_params != "none":
            for share, itemsize in zip(group.shares, group.stored, strict=True):
                copies.append(run.new(itemsize * share, "buckets", "share from host RAM", GATHERING))
                events.append(copies[-1])
                if itemsize != HALF:
                    cast = run.new(HALF * share, "buckets", "cast share", GATHERING)
                    events += [cast, ~copies.pop()]
                    copies.append(cast)
        elif group.cast_share:
            copies = [run.new(HALF * group.cast_share, "buckets", "cast shares", GATHERING)]
            events = copies.copy()
        self._fetched = run.new(HALF * group.share * self.world, "buckets", "all-gather", GATHERING)
        return [*events, self._fetched, *(~copy for copy in copies)]

    def _copied_out(self) -> list[int]:
        """The buffer of the latest fetch goes."""
        buffer, self._fetched = self._fetched, None
        return [] if buffer is None else [~buffer]

    def _let_go(self) -> list[int]:
        """The input of the latest reduce-scatter goes."""
        buffer, self._reduced = self._reduced, None
        return [] if buffer is None else [~buffer]

    def _reduce(self, block: Block | None, adds: bool) -> list[int]:
        """A group's gradients are copied into the input of a reduce-scatter and freed; the output is kept, or added
        and freed, or on its way to host RAM. What is not summed over copies yet stays in fp32 where it is."""
        group, run = self.groups[block], self.run
        if not group.gradients:
            return []
        source = run.new(FULL * group.trained_share * self.world, "buckets", "reduce-scatter")
        output = run.new(FULL * group.trained_share, "gradient", "reduced gradients", REDUCING)
        events = [*self._let_go(), source, *(~buffer for buffer in group.gradients), output]
        self._reduced = source
        if run.strategy.fsdp_replicas > 1 and not self._sums:
            self.kept.append(output)
            return events
        return [*events, *self._as_gradient(output, group, adds)]

    def _as_gradient(self, output: int, group: ParameterGroup, adds: bool) -> list[int]:
        """A reduced group in the format of what is trained. What was summed over copies is held until backward is over,
        unless it is the gradient itself."""
        run, events, gradient = self.run, [], output
        if trained_storage(run.job, run.strategy) != "fp32":
            stream = SUMMING if self._sums else REDUCING
            gradient = run.new(HALF * group.trained_share, "gradient", "reduced gradients", stream)
            events = [gradient] if self._sums else [gradient, ~output]
        partial = next(self._partial, None)
        events += [] if partial is None else [~partial]
        stays = not adds and run.strategy.offload_params == "none"
        if self._sums and not (stays and gradient == output):
            self._summed.append(output)
        if stays:
            self.kept.append(gradient)
        elif gradient not in self._summed:
            events.append(~gradient)
        return events


def _step_over_shares(run: Run, shares: Mapping[str, int], kept: list[int]) -> None:
    """The recorded optimizer step, over what a rank holds; on the CPU when the shares are there."""
    world, gradients = run.configuration.shards, run.named("gradient")
    stages = (run.optimizer_first, run.optimizer)
    for stage in stages:
        run.drop(stage, set(gradients.values()))
    if run.strategy.offload_params != "none":
        for stage in stages:
            run.empty(stage)
        return
    itemsize = FULL if trained_storage(run.job, run.strategy) == "fp32" else HALF
    states = {buffer: name.rpartition(":")[0] for name, buffer in run.named("optimizer").items()}
    sizes = {}
    for buffer in {event for stage in stages for event in stage.ops if event >= 0}:
        if buffer in states and run.sizes[buffer] > FULL:  # the fused step's counters are single numbers
            sizes[buffer] = shares[states[buffer]] * itemsize
        else:
            sizes[buffer] = -(-run.sizes[buffer] // world)
    run.resize_all(sizes)
    for stage in stages:
        run.free(stage, kept)
