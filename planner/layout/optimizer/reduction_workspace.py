"""The workspace of a mean over the rows of a matrix, which Adafactor and CAME take of every weight's update.

Where a thread would have to read many numbers, CUDA's reductions split each output over several blocks, which meet in a
buffer from the caching allocator (aten/src/ATen/native/cuda/Reduce.cuh: ``setReduceConfig``, ``global_memory_size``).
It has a place for every thread that writes, not for every output: 128 MiB for 8192 columns of 2048 rows, beside 64 MiB
of numbers.
"""

from __future__ import annotations

from planner.catalog.card_profiles import GpuProfile
from planner.layout.run import Run

FP32_BYTES = 4
BLOCK_THREADS = 512
"""``MAX_NUM_THREADS``"""
WARP = 32
VALUES_PER_THREAD = (16, 256)
"""At least and at most, where there is a choice."""

INDEXED_BYTES = 2**31
"""What one kernel reads at most, as it counts in 32 bits (ATen/TensorIterator.cpp, ``can_use_32bit_indexing``)."""

FACTORED = ("adafactor", "came")


def column_mean_bytes(rows: int, columns: int, gpu: GpuProfile, number_bytes: int = FP32_BYTES) -> int:
    """The workspace of the mean over ``rows`` of a contiguous matrix, bytes; 0 where no output is split. One of more
    than `INDEXED_BYTES` is read in halves of its rows, one after the other."""
    if gpu.backend == "mps":  # MPSGraph's reductions take nothing of torch's
        return 0
    while rows * columns * number_bytes > INDEXED_BYTES and rows > 1:
        rows = -(-rows // 2)
    least, most = VALUES_PER_THREAD
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    threads = BLOCK_THREADS // vector
    wide, high = (min(threads, _power_of_two_below(size)) for size in (columns // vector, rows))
    width = min(wide, WARP)
    height = min(high, threads // width)
    width = min(wide, threads // height)
    if rows < min(least * height, most):  # one warp does it
        return 0
    values = -(-rows // height)
    grid = -(-columns // vector // width)
    resident = gpu.multiprocessors * (gpu.threads_per_multiprocessor // (width * height))
    if values < most or grid > resident:
        return 0
    blocks = max(min(-(-resident // grid), -(-values // least)), -(-values // most))
    return FP32_BYTES * columns * blocks * width * vector if blocks > 1 else 0


def _power_of_two_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def reduction_workspaces(run: Run) -> None:
    """Adds the workspace of each mean over rows to the optimizer's stages: it comes behind the mean's own output, and
    is gone with the operator."""
    if run.strategy.optimizer not in FACTORED:
        return
    made: dict[int, int] = {}
    for stage in (run.optimizer_first, run.optimizer):
        stage.stretches = [(moment, _with_workspaces(run, events, made)) for moment, events in stage.stretches]


def _with_workspaces(run: Run, events: list[int], made: dict[int, int]) -> list[int]:
    """Events with workspaces; ``made``: buffers of these by their bytes.

    A mean over columns comes first, then the one over rows; of a convolution's weight the two are of its last
    dimensions, too short to be split.
    """
    program, gpu = run.program, run.facts.gpu
    merged: list[int] = []
    update_bytes = rows = 0
    for event in events:
        merged.append(event)
        if event < 0:
            continue
        operator, nbytes = program.op[event], run.sizes[event]
        if operator == "add":
            update_bytes = nbytes
        if operator != "mean":
            continue
        numbers = nbytes // FP32_BYTES
        if rows * numbers * FP32_BYTES == update_bytes and (workspace := column_mean_bytes(rows, numbers, gpu)):
            buffer = made.get(workspace) or made.setdefault(
                workspace, run.new(workspace, "temporary", "mean over rows")
            )
            merged += [buffer, ~buffer]
        rows = numbers
    return merged
