"""cuBLAS's workspaces: memory that matrix products may use, which torch takes from its caching allocator.

4096 KiB x 2 + 16 KiB x 8 for each handle, on Hopper and later 32 MiB (aten/src/ATen/cuda/CublasHandlePool.cpp). Until
torch 2.14 a thread takes one when it first asks for its handle, and keeps it: one thread runs forward, one autograd.
Since 2.15 each product takes one and gives it back (pytorch #194311; ``TORCH_CUBLAS_WORKSPACE_CACHE=1`` restores what
was).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from planner.catalog.card_profiles import GpuProfile
from planner.layout.run import Run
from planner.layout.sharding.stage_editor import first_backward
from planner.tape.program import Program, Stage
from planner.units import KIB, MIB

PER_PRODUCT = (2, 15)
"""The torch since which a workspace is there for one product alone."""

HANDLES = 2
PRODUCTS = frozenset({"addmm", "bmm", "mm"})
QUANTISED_PRODUCT = "bitsandbytes.gemm_4bit"
"""cuBLAS's where it makes a copy of the weight first: of one row a sample a kernel of its own does without."""


FUSED_PRODUCT = "addmm"
"""A linear layer with its bias, which cuBLASLt adds."""
FUSED_BYTES = MIB
"""cuBLASLt's workspace, on every card (`mm`, `bmm` and `addmm` of torch 2.15 run on a virtual H100)."""


HIPBLASLT_BYTES = 76 * MIB
HIPBLAS_128_FROM = (9, 4)
"""gfx942 and gfx950; older ones have 32 MiB."""


class ProductBuffers(NamedTuple):
    """The workspaces of single products, as buffers of a program."""

    plain: int
    fused: int

    @classmethod
    def of(cls, buffer: Callable[[int, str, str], int], nbytes: int) -> ProductBuffers:
        """Made by ``buffer``, which is told bytes, category and operator; ``nbytes``: cuBLAS's own workspace."""
        return cls(buffer(nbytes, "workspace", "cublas"), buffer(FUSED_BYTES, "workspace", "cublaslt"))


def workspace_bytes(gpu: GpuProfile) -> int:
    """The workspace of one cuBLAS handle on this card, bytes. On AMD hipBLASLt has one of its own beside hipBLAS's, and
    both come from the caching allocator (``parseChosenWorkspaceSize`` and ``parseCUDABlasLtWorkspaceSize``)."""
    if gpu.vendor == "amd":
        return (128 if gpu.capability >= HIPBLAS_128_FROM else 32) * MIB + HIPBLASLT_BYTES
    return 32 * MIB if gpu.capability[0] >= 9 else (4096 * 2 + 16 * 8) * KIB


def kept_workspaces(gpu: GpuProfile, torch: str | None) -> int:
    """How many workspaces stay from their first use to the end; ``torch``: a version as 2.11, None for the newest that
    is recorded. Metal's are not torch's."""
    if gpu.backend == "mps":
        return 0
    return 0 if torch and tuple(int(part) for part in torch.split(".")[:2]) >= PER_PRODUCT else HANDLES


def kept_bytes(gpu: GpuProfile, torch: str | None) -> int:
    """The workspaces that stay, bytes."""
    return kept_workspaces(gpu, torch) * workspace_bytes(gpu)


def cublas_workspace(run: Run) -> None:
    """Adds the workspaces that stay to a run's handover, and to its load where nothing is trained."""
    kept = range(kept_workspaces(run.facts.gpu, run.machine.torch))
    workspaces = [run.new(workspace_bytes(run.facts.gpu), "workspace", "cublas") for _ in kept]
    run.handover.workspaces = tuple(workspaces)
    if run.samples_only:
        run.place(run.load, workspaces, "cublas")


def workspaces_at_use(run: Run) -> None:
    """Puts workspaces behind the output of the products that take them: it is allocated before the kernel asks for a
    handle (aten/src/ATen/native/cuda/Blas.cpp).

    Of those that stay, in training, the one of forward's thread comes with the model's first product, and autograd's
    with backward's first. There, among activations, it decides which of the holes around it a large tensor still fits
    into. Last of all terms: the first step is then one of its own.
    """
    if run.facts.gpu.backend == "mps":
        return
    if not run.handover.workspaces:
        buffers = ProductBuffers.of(run.new, workspace_bytes(run.facts.gpu))
        for stage in {id(stage): stage for _, stage in run.stages}.values():
            add_to_products(run.program, stage, buffers)
    elif not run.samples_only:
        forward, backward = run.handover.workspaces
        run.first_step = (run.first_step or run.step).copy()
        _add_to_first(run, run.first_step, first_backward(run.first_step), backward)
        _add_to_first(run, run.first_step, 0, forward)


def add_to_products(program: Program, stage: Stage, buffers: ProductBuffers) -> None:
    """Allocates a workspace behind the output of each matrix product of a stage, and frees it."""
    for position, (moment, events) in enumerate(stage.stretches):
        outputs = frozenset(_outputs(program, events))
        if outputs:
            merged: list[int] = []
            for at, event in enumerate(events):
                merged.append(event)
                if at in outputs:
                    buffer = buffers.fused if program.op[event] == FUSED_PRODUCT else buffers.plain
                    merged += [buffer, ~buffer]
            stage.stretches[position] = (moment, merged)


def _add_to_first(run: Run, stage: Stage, start: int, buffer: int) -> None:
    """Allocates a buffer behind the output of the first matrix product of a stage from its ``start``-th stretch on;
    before all where no product makes a tensor of its own."""
    for position, (moment, events) in enumerate(stage.stretches[start:], start=start):
        at = next(_outputs(run.program, events), None)
        if at is not None:
            stage.stretches[position] = (moment, [*events[: at + 1], buffer, *events[at + 1 :]])
            return
    run.place(stage, [buffer], "cublas", at=start)


def _outputs(program: Program, events: list[int]) -> Iterator[int]:
    """The positions among ``events`` of the matrix products' outputs."""
    operators, categories = program.op, program.category
    copied = False
    for at, event in enumerate(events):
        if event < 0:
            continue
        quantised = operators[event] == QUANTISED_PRODUCT
        if quantised and categories[event] == "workspace":
            copied = True
        elif operators[event] in PRODUCTS or (quantised and copied):
            copied = False
            yield at
