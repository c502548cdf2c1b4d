"""A checkpoint's tensors: trained weights and their average as safetensors, each rank's optimizer state as plain data.

Optimizer states go through ``torch.save`` and come back with ``weights_only``: tensors, numbers, lists and nothing that
runs. `planner.launch.checkpoints` makes the folder count and says which one is whole.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from planner.errors import VplanError
from planner.launch import checkpoints
from planner.launch.launch import FULL_BYTES
from trainers.parallel.ema import Average
from trainers.parallel.parallel import LocalEngine
from trainers.step.weights import Weights

WEIGHTS, AVERAGE = "weights.safetensors", "average.safetensors"
PLAN = "plan.toml"


class NotFiniteError(ArithmeticError):
    """Raised when trained weights hold NaN or infinity."""


def state_file(rank: int) -> str:
    """The name of the file with a rank's optimizer state in a checkpoint."""
    return f"optimizer-{rank:05d}.pt"


def barrier() -> None:
    """Waits until all ranks have reached this call; returns at once in a single process."""
    if dist.is_initialized():
        dist.barrier()


def is_first() -> bool:
    """Whether this rank writes what all ranks have in common: rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather(names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Name -> whole tensor in host RAM, gathered one after another so that the GPU never holds two; empty on all ranks
    but the first. All ranks call it together. ``tensor_of``: gives one tensor by name."""
    tensors = {}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # trained weights of swapped blocks are on their way back to host RAM
    for name in names:
        tensor = tensor_of(name)
        if is_first():
            tensors[name] = tensor.cpu().contiguous()
        del tensor
    return tensors


def save(
    folder: Path,
    engine: LocalEngine,
    average: Average | None,
    manifest: dict[str, Any],
    plan: str,
    keep: int,
    lora: Callable[[Path, Mapping[str, Tensor]], None] | None = None,
) -> Path:
    """Writes the checkpoint of all ranks after ``manifest["step"]`` steps; all of them call together. ``lora`` writes
    the files of adapters into its folder, of the average where the plan keeps one, as the run's end does.

    Weights that are not finite are never written: NotFiniteError, on every rank. A full disk is a VplanError, and
    whatever was there before is still there.
    """
    final = folder / checkpoints.folder_name(manifest["step"])
    partial = folder / f".partial-{final.name}"
    names = list(engine.trainee.trainable)
    weights = gather(names, engine.full_tensor)
    averages = gather(names, average.full_tensor) if average else {}
    _check_finite(weights, engine, manifest["step"])
    rank = dist.get_rank() if dist.is_initialized() else 0
    if is_first():
        with _writing(partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file(weights, partial / WEIGHTS)
            if average:
                save_file(averages, partial / AVERAGE)
            if lora is not None:
                lora(partial, averages or weights)
            (partial / PLAN).write_text(plan, encoding="utf-8")
    barrier()  # the folder is there before any rank writes its state into it
    if is_first() or not engine.replicated:
        state = engine.state()
        with _writing(partial):
            torch.save(state, partial / state_file(rank))
    barrier()  # all states are written before the folder counts as whole
    if is_first():
        with _writing(partial):
            checkpoints.seal(partial, final, {**manifest, "average_steps": average.steps if average else None})
            checkpoints.keep_newest(folder, keep)
    barrier()
    return final


@contextlib.contextmanager
def _writing(partial: Path) -> Iterator[None]:
    """A full disk, in the words of whoever met it, is a VplanError; what was half written goes."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save says RuntimeError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        existing = next(folder for folder in partial.absolute().parents if folder.is_dir())
        if shutil.disk_usage(existing).free < FULL_BYTES:  # what torch.save says of it is an "iostream error"
            reason = "the disk is full"
        shutil.rmtree(partial, ignore_errors=True)
        fix = "free some space there and run the same command again: it resumes from the last checkpoint"
        raise VplanError(f"cannot write a checkpoint to {partial.parent}: {reason}", fix, 4) from error


def _check_finite(weights: dict[str, Tensor], engine: LocalEngine, step: int) -> None:
    """The first rank has looked at all weights; the others hear of it."""
    device = next(iter(engine.trainee.trainable.values())).device
    strange = any(not bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    any_strange = torch.tensor([float(strange)], device=device)
    if dist.is_initialized():
        dist.all_reduce(any_strange, dist.ReduceOp.MAX)
    if any_strange.item():
        raise NotFiniteError(f"after step {step} trained weights are not finite any more")


def trained_weights(checkpoint: Path) -> Weights:
    """A checkpoint's trained weights, by the names that they have in the model."""
    return Weights(checkpoint, [WEIGHTS])


def load_state(checkpoint: Path, engine: LocalEngine) -> None:
    """Loads this rank's optimizer state from a checkpoint. Raises a VplanError when the file holds more than plain
    data."""
    rank = dist.get_rank() if dist.is_initialized() and not engine.replicated else 0
    path = checkpoint / state_file(rank)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        fault = f"{path} holds more than tensors and numbers, which vplan never writes"
        raise VplanError(fault, "choose another checkpoint") from None
    engine.load_state(state)


def load_average(checkpoint: Path, average: Average, steps: int) -> None:
    """Loads the moving average of a checkpoint, which has followed `steps` steps, into `average`."""
    file = Weights(checkpoint, [AVERAGE])
    for name, parameter in average.trainable.items():
        unsplit = torch.empty(parameter.shape, dtype=torch.float32)
        file.fill(name, unsplit)
        average.load(name, unsplit)
    average.steps = steps
