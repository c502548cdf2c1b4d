"""DeepSpeed ZeRO 1 to 3 as transformations of a recorded step: what a rank keeps, and the buffers the engine adds.

DeepSpeed casts every parameter to 16 bits, keeps an fp32 master and two Adam states for its share of the trained ones,
and sends gradients through a flat bucket (read in deepspeed 0.19.8: runtime/zero/stage_1_and_2.py, stage3.py,
partitioned_param_coordinator.py; defaults of runtime/zero/config.py). Frozen parameters are split in stage 3 only.
tests/contract compares the same bytes with the real engines.

In stages 1 and 2, ranks differ in which parameters cross the borders of their shares, and so in when they allocate.
That decides fragmentation, so several ranks are replayed and the one that needs most is the answer
(`Shares.ranks_apart`).

Read `zero` first; `_stages_1_and_2` and `_stage_3` are its two halves. `Shares`, `_Bucket` and `_BucketReduction`
follow the gradients through the bucket.

Bytes of one rank, and the function that counts them. P trained parameters over N ranks; S = P / N, rounded up by
`aligned_elements` over all of them in stages 1 and 2, parameter by parameter in stage 3.

| term | stage 1 | stage 2 | stage 3 | function |
|---|---|---|---|---|
| trained weights | 2P, flat | 2P, flat | 2S, and small ones whole | `_flatten_weights`, `split_weights` |
| gradients in backward | 2P | freed by bucket | freed by bucket | `_reduce_all`, `_reduce_in_backward` |
| gradients for the step | 2 per element that a share touches | the same | 2S | `_stages_1_and_2`, `_stage_3` |
| fp32 master, two states | 12S | 12S | 12S, by sub-group | `_flatten_weights`, `_stage_3`, `_states` |
| reduce bucket, 2 x 500M | backward, and reducing behind it | backward | always | `_begin_bucket`, `_stage_3` |
| the step's copies | 2S + 4S, and AdamW's | the same | of one sub-group | `_step` |
| gathered weights | | | up to 1000M parameters and one more | `_gather` |

With `offload_optimizer`, master, states and step are in host RAM (`planner.estimate.host_ram`); of the step, only one
norm per gradient is left on the GPU.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.errors import NotEstimatedError
from planner.layout.gradient_sums import SUM_WORKSPACE
from planner.layout.run import Run
from planner.layout.run_records import ZeroSettings
from planner.layout.sharding.stage_editor import first_backward
from planner.layout.sharding.zero_weights import split_weights
from planner.tape.program import Stage

HALF, FULL = 2, 4
"""Bytes of a 16-bit and of an fp32 number."""

GATHERING, REDUCING = 1, 2
"""CUDA streams of stage 3 (``allgather_stream`` of parameter_offload.py, ``reduce_and_partition_stream``)."""

NORM_BYTES = 8
"""Gradient norms are added up in fp64, one parameter at a time (``get_norm_dtype`` in runtime/zero/utils.py)."""

MOST_RANKS = 4
"""How many of the ranks that do not allocate alike are replayed."""

STEP_COPIES = {"foreach": 1, "loop": 2, "fused": 0}
"""fp32 copies of the share that torch's AdamW makes over a flat parameter: the square root of the second moment, and,
one parameter at a time, its quotient too (torch/optim/adam.py)."""


SMALLEST_8_BIT = 4096
MOST_8_BIT = 2**31 - 1
"""bitsandbytes: smaller tensors have fp32 states (``min_8bit_size``); its kernels take a 32-bit count of elements
(backends/cuda/ops.py)."""


DEEPSPEED = ZeroSettings()


def zero_settings(run: Run) -> ZeroSettings:
    """DeepSpeed's sizes from the file that a launch names, or its defaults."""
    return run.facts.zero or DEEPSPEED


def zero(run: Run) -> None:
    """Replaces the lifetimes of recorded gradients and the recorded optimizer step by DeepSpeed's."""
    if not run.strategy.sharding.startswith("zero"):
        return
    if run.strategy.sharding != "zero-3":
        _load_before_the_cast(run)
    cast_to_16_bits(run)
    for stage in (run.optimizer_first, run.optimizer):
        run.empty(stage)
    if run.strategy.sharding == "zero-3":
        _stage_3(run, zero_settings(run))
    else:
        _stages_1_and_2(run, zero_settings(run))


def cast_to_16_bits(run: Run) -> None:
    """Casts every parameter (``_cast_module_mixed_precision``), including those that diffusers keeps in fp32. Tables
    that are not parameters stay as loaded."""
    gradients, weights = run.named("gradient"), run.parameters
    sizes = {
        buffer: HALF * elements
        for name, elements in run.elements.items()
        for buffer in (weights[name], gradients.get(name))
        if buffer is not None and run.sizes[buffer] != HALF * elements
    }
    if sizes:
        run.resize_all(sizes)
    if run.strategy.weights(run.job.method) == "fp32":
        tables = [run.named("weight")[name] for name in run.facts.model.traits.saved_tables]
        for table in tables:
            run.resize(table, run.sizes[table] * FULL // HALF)


def _load_before_the_cast(run: Run) -> None:
    """What is loaded in fp32 is cast on the GPU, one parameter after another. The holes this leaves decide whether a
    share of the flat weights fits among them."""
    wide = {
        run.parameters[name]: run.sizes[run.parameters[name]]
        for name, elements in run.elements.items()
        if run.sizes[run.parameters[name]] != HALF * elements
    }
    loaded = {weight: run.new(nbytes, "temporary", "weight in fp32") for weight, nbytes in wide.items()}
    run.load.stretches = [
        (moment, [loaded.get(event, event) for event in events]) for moment, events in run.load.stretches
    ]
    run.place(run.load, [event for weight, copy in loaded.items() for event in (weight, ~copy)], "cast to 16 bits")


def trained_elements(run: Run) -> dict[str, int]:
    """Name -> elements of the trained parameters, in the model's order."""
    gradients = run.named("gradient")
    return {name: elements for name, elements in run.elements.items() if name in gradients}


def optimizer_groups(run: Run) -> list[dict[str, int]]:
    """`trained_elements` by the groups that the optimizer has them in: each is flat, and split, by itself, and they
    step one after another."""
    second, trained = run.engine.second_group, trained_elements(run)
    if second is None:
        return [trained]
    groups: list[dict[str, int]] = [{}, {}]
    for name, elements in trained.items():
        groups[bool(second.search(name))][name] = elements
    return [group for group in groups if group]


def aligned_elements(elements: int, world: int) -> int:
    """Elements of the flat buffer of stages 1 and 2: shares are aligned to 4 bytes
    (``nccl_start_alignment_factor``)."""
    multiple = 2 * world
    return -(-elements // multiple) * multiple


def parameters_in_share(elements: Sequence[int], world: int, rank: int) -> Sequence[int]:
    """Elements of each parameter that the share of ``rank`` touches."""
    ends = list(itertools.accumulate(elements))
    share = aligned_elements(ends[-1], world) // world
    first = bisect.bisect_right(ends, rank * share)
    last = bisect.bisect_left(ends, min((rank + 1) * share, ends[-1]))
    return elements[first : last + 1]


def elements_in_share(elements: Sequence[int], world: int, rank: int) -> int:
    """Elements of all parameters that the share of ``rank`` touches."""
    return sum(parameters_in_share(elements, world, rank))


def sub_groups(partitions: Sequence[int], size: int) -> list[int]:
    """Elements of each group that stage 3 steps at a time. A group is closed once it has ``size`` elements."""
    groups, open_group = [], 0
    for elements in partitions:
        open_group += elements
        if open_group >= size:
            groups.append(open_group)
            open_group = 0
    return [*groups, open_group] if open_group else groups


# ---- stages 1 and 2


def _stages_1_and_2(run: Run, settings: ZeroSettings) -> None:
    groups, elements = optimizer_groups(run), list(trained_elements(run).values())
    world, offloaded = run.machine.world, run.strategy.offload_optimizer != "none"
    shares = Shares(groups, world)
    sizes = [aligned_elements(sum(group.values()), world) // world for group in groups]
    _flatten_weights(run, groups, sizes, offloaded)
    partition = -1
    if not offloaded:
        run.ranks = shares.ranks_apart(_order_of_gradients(run), settings.reduce_bucket)
        rank = run.ranks[0] if run.configuration.rank is None else run.configuration.rank
        run.configuration = replace(run.configuration, rank=rank)
        partition = run.new(HALF * shares.touched(rank), "gradient", "gradient partition")
    bucket = run.new(HALF * settings.reduce_bucket, "buckets", "reduce bucket")
    kept = [] if offloaded else [partition]
    flush = _BucketReduction(run, settings, shares.ranks, kept, NORM_BYTES * max(elements))
    if run.strategy.sharding == "zero-2":
        again = run.step.copy()
        _reduce_in_backward(run.step, run, bucket, flush)
        if run.strategy.gradient_accumulation > 1:
            run.accumulate = _next_micro_batch(run, again, bucket, flush, partition)
    else:
        _begin_bucket(run, run.step, bucket)
        run.place(run.accumulate or run.step, _reduce_all(run, bucket, flush), "reduction")
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, set(run.named("gradient").values()))
        if not offloaded:
            norm = run.new(NORM_BYTES * max(elements), "temporary", "norm in fp64")
            step = [norm, ~norm, *_steps(run, sizes, partition, stage is run.optimizer_first)]
            run.place(stage, step, "step", at=0)
    if settings.overlap:
        _second_bucket(run, bucket)


def _steps(run: Run, shares: Sequence[int], partition: int, first: bool) -> Iterator[int]:
    """The steps of all groups. Their gradients lie in one buffer, which goes with those of the last."""
    for position, share in enumerate(shares):
        freed = [~partition] if position == len(shares) - 1 else []
        yield from _step(run, share, _states(run, share) if first else [], *freed)


def _second_bucket(run: Run, bucket: int) -> None:
    """``overlap_comm``: one bucket is filled while the other is reduced. Both are allocated and freed together
    (``setup_buckets``)."""
    second = run.new(run.sizes[bucket], "buckets", "second reduce bucket")
    beside = {bucket: (bucket, second), ~bucket: (~bucket, ~second)}
    for stage in {id(stage): stage for _, stage in run.stages}.values():  # a step is there once for each micro-batch
        stage.stretches = [
            (moment, [each for event in events for each in beside.get(event, (event,))])
            for moment, events in stage.stretches
        ]


def _order_of_gradients(run: Run) -> list[str]:
    """The trained parameters in the order in which their gradients enter the bucket: the order of backward; or, in
    stage 1, which reduces after backward, the model's."""
    if run.strategy.sharding == "zero-1":
        return list(trained_elements(run))
    names = {buffer: name for name, buffer in run.named("gradient").items()}
    return [names[event] for event in run.step.ops if event in names]


def _flatten_weights(run: Run, groups: Sequence[Mapping[str, int]], shares: Sequence[int], offloaded: bool) -> None:
    """The trained weights of a group are copied into one flat buffer, on the GPU if it has room for both, else through
    host RAM. This rank's master is cloned from it. Once all are, zeros for the first gradients are allocated and
    freed. Before each further group the allocator's cache is emptied."""
    room = run.facts.gpu.allocatable_bytes - run.machine.reserve
    beside = sum(run.sizes[event] for event in run.load.ops if event >= 0)
    stages = [run.load, *(Stage("load", []) for _ in groups[1:])]
    for stage, group, share in zip(stages, groups, shares, strict=True):
        flat = run.new(HALF * share * run.machine.world, "weight", "flat weights")
        freed = [~run.parameters[name] for name in group]
        fits = beside + run.sizes[flat] <= room
        run.place(stage, [flat, *freed] if fits else [*freed, flat], "flat weights")
        clone = run.new(HALF * share, "temporary", "share of the flat weights")
        if offloaded:
            run.place(stage, [clone, ~clone], "offload")
            continue
        master = run.new(FULL * share, "optimizer", "fp32 master")
        beside += run.sizes[master]
        run.place(stage, [clone, master, ~clone], "fp32 master")
    run.phases.wrap = tuple(stages[1:])
    run.empty_cache.after = (*run.empty_cache.after, *stages[:-1])
    if offloaded:
        largest = max(elements for group in groups for elements in group.values())
        run.place(stages[-1], [run.new(HALF * largest, "buckets", "gradient staging")], "offload")
        return
    zeros = [run.new(FULL * share, "temporary", "zeros") for share in shares]
    run.place(stages[-1], [*zeros, *(~zero for zero in zeros)], "fp32 master")


class _Bucket:
    """The trained parameters whose gradients are in the bucket. It is full when the next one would not fit
    (``reduce_bucket_size``; ``reduce_independent_p_g_buckets_and_remove_grads``)."""

    def __init__(self, elements: Mapping[str, int], size: int) -> None:
        self._elements, self._size, self._filled = elements, size, 0
        self._names: list[str] = []

    def add(self, name: str) -> list[str]:
        """Adds a gradient. Returns the parameters that had to be reduced before it, in order; else none."""
        full = self.take() if self._names and self._filled + self._elements[name] > self._size else []
        self._names.append(name)
        self._filled += self._elements[name]
        return full

    def take(self) -> list[str]:
        """Empties the bucket and returns what was in it."""
        names, self._names, self._filled = self._names, [], 0
        return names


class Shares:
    """Which ranks' shares of the flat weights a trained parameter lies in (``param_to_partition_ids``)."""

    def __init__(self, groups: Sequence[Mapping[str, int]], world: int) -> None:
        """``groups``: the elements of each parameter, by the flat weights that they lie in."""
        self._groups, self._world = groups, world
        self._elements = {name: elements for group in groups for name, elements in group.items()}
        self._ranks: dict[str, range] = {}
        for group in groups:
            share = aligned_elements(sum(group.values()), world) // world
            ends = itertools.accumulate(group.values())
            self._ranks |= {
                name: range((end - count) // share, (end - 1) // share + 1)
                for (name, count), end in zip(group.items(), ends, strict=True)
            }

    def ranks(self, names: Iterable[str]) -> set[int]:
        """The ranks whose shares the parameters touch."""
        return set(itertools.chain.from_iterable(self._ranks[name] for name in names))

    def touched(self, rank: int) -> int:
        """Elements of all parameters that the shares of ``rank`` touch."""
        return sum(elements_in_share(list(group.values()), self._world, rank) for group in self._groups)

    def ranks_apart(self, order: Iterable[str], size: int) -> tuple[int, ...]:
        """Ranks that allocate differently, if gradients come in ``order`` and buckets hold ``size`` elements: the
        buffer for their gradients is allocated with different buckets. Of ranks with the same bucket, only the one that
        takes most; of many, `MOST_RANKS` spread from the first to the last."""
        bucket = _Bucket(self._elements, size)
        reduced = [full for name in order if (full := bucket.add(name))] + [bucket.take()]
        apart: list[int] = []
        seen: set[int] = set()
        for names in reduced:
            if begin := self.ranks(names) - seen:
                apart.append(max(begin, key=self.touched))
                seen |= begin
        last = len(apart) - 1
        places = sorted({round(last * at / (MOST_RANKS - 1)) for at in range(MOST_RANKS)})
        return tuple(apart[place] for place in places)


@dataclass
class _BucketReduction:
    """What reducing full buckets allocates, one after another: a copy of a bucket that lies in several ranks' shares
    (``allreduce_bucket`` flattens its slices; a single slice is flat already); and, after the first with a parameter of
    this rank, the buffer that keeps its gradients (``copy_grads_in_partition``)."""

    run: Run
    settings: ZeroSettings
    ranks: Callable[[Iterable[str]], set[int]]
    kept: list[int]
    norm_bytes: int
    stream: int = 0
    """CUDA stream that buckets are reduced on"""

    def events(self, names: Sequence[str]) -> list[int]:
        """The events of reducing the gradients of some parameters; none if there are none."""
        made: list[int] = []
        ranks = self.ranks(names)
        if len(ranks) > 1:
            copied = HALF * sum(self.run.elements[name] for name in names)
            copy = self.run.new(copied, "buckets", "reduced copy", self.stream)
            made += [copy, ~copy]
        if names and self.run.strategy.offload_optimizer != "none":  # each norm is taken before its gradient goes
            norm = self.run.new(self.norm_bytes, "temporary", "norm in fp64")
            made += [norm, ~norm]
        if self.run.configuration.rank in ranks:
            made += self.kept
            self.kept = []
        return made


def _as_gradients_come(stage: Stage, run: Run, then: Callable[[list[int]], list[int]]) -> None:
    """Inserts what the engine does with the gradients of each layer. Autograd hands a gradient over
    (``AccumulateGrad``) when the layer's own inputs are freed, before anything else is allocated: a bias at once, a
    weight when the node of its transpose is done."""
    layers = {buffer: name.rpartition(".")[0] for name, buffer in run.named("gradient").items()}
    beside = {buffer for buffer, name in enumerate(run.program.op) if name == SUM_WORKSPACE}
    made: list[int] = []
    for position, (moment, events) in enumerate(stage.stretches):
        if not made and layers.keys().isdisjoint(events):
            continue
        woven: list[int] = []
        for event in events:
            # What is beside a sum belongs to the bias's own operator.
            if made and event >= 0 and event not in beside and layers.get(event) != layers[made[0]]:
                woven += then(made[::-1])
                made = []
            woven.append(event)
            if event in layers:
                made.append(event)
        stage.stretches[position] = (moment, woven)
    if made:
        run.place(stage, then(made[::-1]), "gradients")


def _reduce_in_backward(stage: Stage, run: Run, bucket: int | None, flush: _BucketReduction) -> None:
    """Every gradient moves into the bucket as it is made; the first allocates the bucket. A full bucket is reduced, and
    the rest at the end. ``None`` for the bucket: stage 3 has it already."""
    names = {buffer: name for name, buffer in run.named("gradient").items()}
    filling = _Bucket(run.elements, flush.settings.reduce_bucket)
    begun = [] if bucket is None else [bucket]

    def take(gradients: list[int]) -> list[int]:
        events = begun.copy()
        begun.clear()
        for gradient in gradients:
            events += [*flush.events(filling.add(names[gradient])), ~gradient]
        return events

    _as_gradients_come(stage, run, take)
    run.place(stage, flush.events(filling.take()), "reduction")
    if bucket is not None:
        run.free(stage, [bucket])


def _begin_bucket(run: Run, stage: Stage, bucket: int) -> None:
    """The bucket is allocated with the first gradient (``setup_buckets``)."""
    begun = [bucket]

    def begin(gradients: list[int]) -> list[int]:
        return [begun.pop()] if begun else []

    _as_gradients_come(stage, run, begin)


def bucket_as_backward_begins(run: Run) -> None:
    """Stages 1 and 2 before DeepSpeed 0.17.2 (deepspeedai/DeepSpeed#6993, June 2025): the optimizer's ``backward``
    allocated the bucket before the backward pass of the loss."""
    if run.strategy.sharding not in ("zero-1", "zero-2"):
        return
    bucket = run.program.op.index("reduce bucket")
    for stage in filter(None, (run.step, run.accumulate)):
        if bucket in stage.ops:
            stage.stretches = [
                (moment, [event for event in events if event != bucket]) for moment, events in stage.stretches
            ]
            run.place(stage, [bucket], "reduce bucket", at=first_backward(stage))


def share_comes_back_in_fp32(run: Run) -> None:
    """Stages 1 and 2 with an offloaded optimizer, from deepspeedai/DeepSpeed#5301 (April 2024) to #7308, which is in
    0.17.0: ``step`` copied the fp32 master to the GPU and cast it into the flat weights there (0.15.2,
    runtime/zero/stage_1_and_2.py:1878). Before and since, it is cast in host RAM."""
    if run.strategy.sharding not in ("zero-1", "zero-2") or run.strategy.offload_optimizer == "none":
        return
    flat = run.program.op.index("flat weights")
    for stage in (run.optimizer_first, run.optimizer):
        copy = run.new(run.sizes[flat] // run.machine.world * FULL // HALF, "temporary", "share in fp32")
        run.place(stage, [copy, ~copy], "share in fp32")


def _reduce_all(run: Run, bucket: int, flush: _BucketReduction) -> list[int]:
    """Stage 1 reduces after the last backward pass of a step, still inside ``engine.backward``, in the order of the
    parameters (``reduce_gradients``)."""
    gradients = run.named("gradient")
    filling = _Bucket(run.elements, flush.settings.reduce_bucket)
    events: list[int] = []
    for name in trained_elements(run):
        events += [*flush.events(filling.add(name)), ~gradients[name]]
    return [*events, *flush.events(filling.take()), ~bucket]


def _next_micro_batch(run: Run, stage: Stage, bucket: int, flush: _BucketReduction, partition: int) -> Stage:
    """A further micro-batch: its reduced gradients are added to the kept ones, and freed."""
    kept = [] if partition < 0 else [run.new(run.sizes[partition], "gradient", "gradient partition")]
    _reduce_in_backward(stage, run, bucket, replace(flush, kept=kept))
    run.free(stage, kept)
    run.free(stage, run.leftovers, at=0)
    return stage


# ---- the step


def _states(run: Run, share: int) -> list[int]:
    """Two states for a flat share. bitsandbytes' have 8 bits, with a scale for every 256 numbers (optimizer.py,
    ``init_state``), also for norms and biases in the flat share, which it would keep in fp32 on their own."""
    nbytes = FULL * share
    if run.strategy.optimizer == "adamw-8bit" and share >= SMALLEST_8_BIT:
        if share > MOST_8_BIT:
            fault = f"adamw-8bit over a shard of {share:,} elements: bitsandbytes supports up to {MOST_8_BIT:,}"
            raise NotEstimatedError(fault, "use more GPUs, or --optimizer adamw")
        nbytes = share + FULL * -(-share // 256)
    return [run.new(nbytes, "optimizer", name) for name in ("exp_avg", "exp_avg_sq")]


def _step(run: Run, share: int, states: Sequence[int], *freed: int) -> list[int]:
    """The step over one flat share: its gradients are flattened, then cast to fp32; then come AdamW's own copies."""
    flat = run.new(HALF * share, "gradient", "flat gradients")
    full = run.new(FULL * share, "gradient", "fp32 gradients")
    copies = 0 if run.strategy.optimizer == "adamw-8bit" else STEP_COPIES[run.strategy.optimizer_step]
    own = [run.new(FULL * share, "temporary", "adamw") for _ in range(copies)]
    return [flat, full, ~flat, *freed, *states, *own, *(~copy for copy in own), ~full]


# ---- stage 3


def _stage_3(run: Run, settings: ZeroSettings) -> None:
    elements = trained_elements(run)
    world, offloaded = run.machine.world, run.strategy.offload_optimizer != "none"
    partitions = [-(-count // world) for count in elements.values()]
    groups = [
        size
        for group in optimizer_groups(run)
        for size in sub_groups([-(-count // world) for count in group.values()], settings.sub_group)
    ]
    split_weights(run, settings, elements)
    if not offloaded:
        master = [run.new(FULL * group, "optimizer", "fp32 master") for group in groups]
        converted = [run.new(FULL * group, "temporary", "fp32 weights") for group in groups]
        zeros = run.new(FULL * max(groups), "temporary", "zeros")
        made = itertools.chain.from_iterable((copy, kept, ~copy) for kept, copy in zip(master, converted, strict=True))
        run.place(run.load, [*made, zeros, ~zeros], "fp32 master")
        run.add(run.load, HALF * sum(partitions), "gradient", "gradient partition")
    run.add(run.load, HALF * settings.reduce_bucket, "buckets", "reduce bucket")
    run.accumulate = None  # every micro-batch is like the first: what it adds to is there from the beginning
    largest = -(-max(elements.values()) // world)
    everyone = set(range(world))
    flush = _BucketReduction(
        run, settings, lambda names: everyone if names else set(), [], NORM_BYTES * largest, REDUCING
    )
    _reduce_in_backward(run.step, run, None, flush)
    _gather(run, settings)
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, set(run.named("gradient").values()))
        if not offloaded:
            run.place(stage, list(_sub_group_steps(run, groups, largest, stage is run.optimizer_first)), "step", at=0)


def _sub_group_steps(run: Run, groups: Sequence[int], largest: int, first: bool) -> Iterator[int]:
    # isinf over all gradients takes their absolute values and a mask (``has_overflow``).
    overflow = run.new((HALF + 1) * sum(groups), "temporary", "overflow check")
    norm = run.new(NORM_BYTES * largest, "temporary", "norm in fp64")
    yield from (overflow, ~overflow, norm, ~norm)
    for group in groups:
        yield from _step(run, group, _states(run, group) if first else [])


def _gather(run: Run, settings: ZeroSettings) -> None:
    """Gathered weights. From the second step on, every module fetches ``prefetch`` elements further ahead, and what was
    fetched ahead is not released, so gathered weights soon reach the limit plus one parameter. What is kept for reuse
    between forward and backward is less than that, except a whole block that is recomputed. While a batch is copied out
    it is there twice (``_fetch_sub_module_impl``, ``__params_to_release``, ``AllGatherCoalescedHandle``)."""
    if run.machine.world == 1 and run.strategy.offload_params == "none":
        return
    large = {name: elements for name, elements in run.elements.items() if elements > settings.persistent}
    total, most = sum(large.values()), max(large.values(), default=0)
    live = max(settings.max_live, settings.max_reuse // 2)
    if run.strategy.gradient_checkpointing != "none":
        blocks: dict[object, int] = {}
        for name, elements in large.items():
            block = run.facts.step.block_of(name)
            blocks[block] = blocks.get(block, 0) + (elements if block else 0)
        live = max(live, *blocks.values())
    gathered = run.new(HALF * min(total, live + most), "buckets", "gathered weights", GATHERING)
    fetched = run.new(HALF * min(total, settings.prefetch + most), "buckets", "all-gather", GATHERING)
    run.handover.gathered_bytes = run.sizes[gathered] + run.sizes[fetched]
    run.place(run.step, [gathered, fetched], "gather", at=0)
    run.free(run.step, [gathered, fetched])
