"""Which attention kernel torch's ``scaled_dot_product_attention`` runs on a card, and what it takes beside its output.

All of flash, cuDNN and memory-efficient attention save q, k, v, the output and one fp32 logsumexp per row, so a tape
holds for any of them; what they take inside backward differs a little. The math path is another graph altogether: of a
model that goes it on some cards only there are two tapes (`planner.catalog.traits.Traits.attends_by_card`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence

from planner.catalog.card_limits import CUDNN_FIRST, FLASH_FROM
from planner.catalog.card_profiles import GpuProfile
from planner.errors import NotEstimatedError
from planner.layout.run import Run
from planner.spec.job import Machine, Strategy
from planner.tape.format import Monomial
from planner.tape.program import Program

FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


def kernel(
    strategy: Strategy, machine: Machine, gpu: GpuProfile, operators: Collection[str], *, masked: bool = False
) -> str:
    """The kernel of the recorded attention on a card: cudnn, flash or efficient. ``operators``: those of the recording;
    ``masked``: whether a trainer gives it a mask all the same.

    torch 2.13 puts cuDNN first on sm90 and sm100, with masks too; Windows wheels are built without flash; older cards
    than Ampere have the memory-efficient kernel only (ATen/native/transformers/cuda/sdp_utils.cpp). All of them want 16
    bits, in which every recording computes. Masked attention is never flash: asking for it would end in an error
    (diffusers attention_dispatch.py ``_native_flash_attention``), so it is a NotEstimatedError.
    """
    if strategy.attention in ("flash", "flash-3") and EFFICIENT in operators:
        fault = (
            f"attention {strategy.attention} supports neither masks nor fp32, and this model at this precision uses one"
        )
        raise NotEstimatedError(fault, "use --attention sdpa, which lets torch choose for each")
    if strategy.attention != "sdpa":
        return str(strategy.attention)
    plain = plain_kernel(machine, gpu)
    return "efficient" if plain == "flash" and (masked or FLASH not in operators) else plain


def plain_kernel(machine: Machine, gpu: GpuProfile) -> str:
    """The kernel that torch chooses where there is no mask. On AMD both flash and memory-efficient are AOTriton's, and
    save what CUDA's do (ATen/native/transformers/hip). MPS has none that trains (`trainers.recording.mps_ops`)."""
    if gpu.backend == "mps":
        return "math"
    if gpu.vendor == "amd":
        return "flash"
    if gpu.capability[0] in CUDNN_FIRST:
        return "cudnn"
    return "efficient" if gpu.capability < FLASH_FROM or machine.os == "windows" else "flash"


def takes_grouped_masks(strategy: Strategy, machine: Machine, gpu: GpuProfile) -> bool:
    """Whether cuDNN runs attention with a mask and with fewer heads of keys than of queries, where elsewhere torch goes
    the math path. Raises a NotEstimatedError for the kernels that take none, which end in an error when they are asked
    for by name (check_batch_size_and_num_heads_dense in ATen/native/transformers/sdp_utils_cpp.h)."""
    if strategy.attention in ("flash", "flash-3", "efficient"):
        fault = f"attention {strategy.attention} does not support a mask with fewer heads of keys than of queries"
        raise NotEstimatedError(fault, "use --attention sdpa, which lets torch choose for each")
    return strategy.attention == "cudnn" or plain_kernel(machine, gpu) == "cudnn"


def workspaces(name: str) -> tuple[str, ...]:
    """The tapes' workspace entries that hold for a kernel that runs where flash was recorded.

    FlashAttention-2, FlashAttention-3 (hopper/flash_api.cpp at 000090d: ``dq_accum``), cuDNN and memory-efficient
    attention all accumulate dq in fp32 for half-precision inputs. Of how many rows differs: `take_rows_as_they_are`.
    """
    return ("flash",) if name in ("flash", "flash-3", "cudnn", "efficient") else ()


def take_masks_as_they_are(run: Run) -> None:
    """Drops the copies of masks with padded rows, which memory-efficient attention alone wants: where one was, the mask
    itself is saved (ATen/native/transformers/attention.cpp, preprocess_mask)."""
    made = [event for _, stretch in run.step.stretches for event in stretch if event >= 0]
    pairs = padded_masks([run.program.op[buffer] for buffer in made])
    padded = {made[copy]: made[mask] for mask, copy in pairs}
    if not padded:
        return
    dropped, later = set[int](), dict[int, int]()
    for copy, mask in padded.items():
        size = run.program.sizes[run.program.buffers[mask]]
        if not isinstance(size, int) and size[1].multiple < 0:  # no size where no copy is made: the copy says it
            dropped |= {mask, ~mask}
        else:
            dropped |= {copy, ~mask}
            later[~copy] = ~mask
    run.step.stretches = [
        (moment, [later.get(event, event) for event in stretch if event not in dropped])
        for moment, stretch in run.step.stretches
    ]


def take_rows_as_they_are(run: Run) -> None:
    """Makes what attention's backward takes beside its outputs as long as the queries, as cuDNN does where the batch
    is not above `planner.catalog.card_limits.CUDNN_SAMPLES`: flash, which then runs, rounds rows up to 128
    (NVIDIA/cudnn-frontend include/cudnn_frontend/node/scaled_dot_product_flash_attention.h: dQ_accum_size, and
    softmax_sum likewise, of the backward; seen of UNetSpatioTemporalConditionModel on a virtual H200, whose frames are
    25 rows)."""
    _change_rounded(run.program, lambda size: size if size.above else size._replace(multiple=1))


def round_all_rows(run: Run) -> None:
    """Rounds rows up whatever the batch, as any kernel but cuDNN does (see `take_rows_as_they_are`)."""
    _change_rounded(run.program, lambda size: size._replace(above=0))


def _change_rounded(program: Program, change: Callable[[Monomial], Monomial]) -> None:
    """Changes the sizes with rows rounded up of what flash takes inside backward."""
    changed = dict[int, int]()
    for buffer, name in program.kernel.items():
        number = program.buffers[buffer]
        size = program.sizes[number]
        if name != "flash" or isinstance(size, int) or size[1].multiple <= 1:
            continue
        if number not in changed:
            other = change(size[1])
            changed[number] = number if other == size[1] else len(program.sizes)
            if other != size[1]:
                program.sizes.append((size[0], other))
        program.buffers[buffer] = changed[number]


def keep_masks_of_numbers(run: Run) -> None:
    """Drops the padded copies of a model's masks of numbers, which one block attends with or several, and keeps the
    mask itself as long as the last of them: cuDNN saves that (see `take_masks_as_they_are`)."""
    program = run.program
    candidates = set(copies_of_masks_of_numbers(list(program.op)))
    if not candidates:
        return
    alive: dict[int, None] = {}
    masks: dict[int, int] = {}  # of each copy whose mask there is; others stay
    freed_with: dict[int, int] = {}
    for event in (event for _, stretch in run.step.stretches for event in stretch):
        if event in candidates:
            copied = next((mask for mask in reversed(alive) if _is_copied(program, mask, event)), None)
            masks |= {} if copied is None else {event: copied}
        elif event >= 0:
            alive[event] = None
        elif ~event in masks:
            freed_with[masks[~event]] = ~event
        else:
            alive.pop(~event, None)
            freed_with.pop(~event, None)  # a mask that outlives its copies anyway goes when it did
    for copy, mask in masks.items():
        size = program.sizes[program.buffers[mask]]
        if not isinstance(size, int) and size[1].multiple:  # no size where no copy is made: the copy says it
            program.buffers[mask] = program.buffers[copy]
    moved = {~mask for mask in freed_with}
    last = {~copy: ~mask for mask, copy in freed_with.items()}
    run.step.stretches = [
        (moment, [last.get(event, event) for event in stretch if _stays(event, masks, moved, last)])
        for moment, stretch in run.step.stretches
    ]


def _stays(event: int, copies: Collection[int], moved: Collection[int], last: Collection[int]) -> bool:
    """Whether an event is one that is kept, or in whose place a mask is freed."""
    return event in last or not (event in copies or ~event in copies or event in moved)


def _is_copied(program: Program, mask: int, copy: int) -> bool:
    """Whether a buffer has the size that a copy of padded rows was made of."""
    one, other = (program.sizes[program.buffers[buffer]] for buffer in (mask, copy))
    if isinstance(one, int) or isinstance(other, int) or one[0] is not other[0] or one[1].multiple > 0:
        return False
    return _without_rounding(one[1]) == _without_rounding(other[1])


def _without_rounding(size: Monomial) -> Monomial:
    """A size whose dimension is as long as it is, where it is rounded up."""
    if not size.multiple:
        return size
    return Monomial(size.coefficient * size.inner, tuple(map(operator.add, size.exponents, size.inner_exponents)))


def padded_masks(operators: Sequence[str]) -> list[tuple[int, int]]:
    """Of allocations in order, by the operators that make them: (mask, its copy with padded rows) by their places."""
    return [(at - 1, at) for at in _paddings(operators) if at and operators[at - 1] == "where"]


def copies_of_masks_of_numbers(operators: Sequence[str]) -> list[int]:
    """Of allocations in order, by the operators that make them, the places of copies with padded rows of masks that
    attention does not make itself."""
    paddings = (at for at in _paddings(operators) if not at or operators[at - 1] != "where")
    return [at for at in paddings if at + 1 < len(operators) and operators[at + 1] == EFFICIENT]


def _paddings(operators: Sequence[str]) -> list[int]:
    return [at for at, name in enumerate(operators) if name == "constant_pad_nd"]
