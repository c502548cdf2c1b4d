"""Checkpoints of a training state: copied to host RAM after a step, written from there while training continues.

The state's files are those of `state_files`: each rank writes what it has, and any number of ranks can resume.
`planner.launch.checkpoints` gives a finished folder its name and says which checkpoints are whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from planner.errors import VplanError
from planner.estimate.host_ram import has_room
from planner.hardware import doctor
from planner.launch import checkpoints
from planner.launch.launch import FULL_BYTES
from trainers.parallel import state_files
from trainers.parallel.ema import Average
from trainers.parallel.local_engine import LocalEngine
from trainers.parallel.start import TIMEOUT
from trainers.parallel.state_files import OUTLINE, STATE, SavedState, Share, share_of
from trainers.step.weights import Weights

WEIGHTS, AVERAGE = "weights/", "average/"
"""Prefixes of the keys of trained weights and of their average."""
PLAN = "plan.toml"

OLD_WEIGHTS, OLD_AVERAGE, OLD_STATE = "weights.safetensors", "average.safetensors", "optimizer-00000.pt"
"""Files of checkpoints of format 1."""

LoraWriter = Callable[[Path, Mapping[str, Tensor]], None]
"""Writes LoRA files into a folder, from adapter weights by their names in the model."""


class NotFiniteError(ArithmeticError):
    """Raised when the loss or trained weights are NaN or infinite."""


def barrier() -> None:
    """Waits until all ranks have reached this call; returns at once in a single process."""
    if dist.is_initialized():
        dist.barrier()


def is_first() -> bool:
    """Whether this rank writes what all ranks have in common: rank 0, or the only process."""
    return rank() == 0


def rank() -> int:
    """This rank's number; 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(names: Iterable[str], tensor_of: Callable[[str], Tensor], copy: bool = False) -> dict[str, Tensor]:
    """Name -> whole tensor in host RAM, gathered one after another so that the GPU never holds two; empty on all ranks
    but the first. All ranks call it together. ``tensor_of``: gives one tensor by name; ``copy``: copies even those that
    are in host RAM already."""
    tensors = {}
    _wait_for_copies()
    for name in names:
        tensor = tensor_of(name)
        if is_first():
            tensors[name] = tensor.to("cpu", copy=copy).contiguous()
        del tensor
    return tensors


def _wait_for_copies() -> None:
    """Waits until trained weights of swapped blocks are back in host RAM."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Content(NamedTuple):
    """What one rank writes of a checkpoint, as it is after its step."""

    step: int
    shares: list[Share]
    outline: Any
    manifest: dict[str, Any]
    plan: str
    adapters: dict[str, Tensor]
    """whole, for the LoRA files; empty on all ranks but the first, and in full training"""
    lora: LoraWriter | None


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time. All ranks make one and call its methods together.

    Training waits until this rank's part is copied to host RAM, and a thread writes it. If several ranks have parts,
    their threads agree through a process group of their own (as torch's ``async_save`` does, on the CPU), and the first
    gives the finished folder its name. If host RAM has no room for the copy (`planner.estimate.host_ram.has_room`),
    training waits until the files are written, and each is copied just before.
    """

    def __init__(self, folder: Path, engine: LocalEngine, keep: int) -> None:
        """``keep``: how many checkpoints keep their training state."""
        self.folder, self.engine, self.keep = folder, engine, keep
        self.shared = dist.is_initialized() and dist.get_world_size() > 1 and not engine.replicated
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT) if self.shared else None
        self._thread = ThreadPoolExecutor(1, "vplan-checkpoint")
        self._pending: Future[Path | None] | None = None

    def save(
        self,
        average: Average | None,
        manifest: dict[str, Any],
        plan: str,
        lora: LoraWriter | None = None,
    ) -> None:
        """Starts the checkpoint after ``manifest["step"]`` steps, once the previous one is written. ``lora`` writes the
        LoRA files into its folder, of the average if the plan keeps one, as at the end of the run.

        Raises the error of the previous checkpoint, or of this one if training waits for it: a VplanError if it cannot
        be written, as on a full disk, and a NotFiniteError for weights that are not finite. A failed checkpoint does
        not count, and earlier ones are still there.
        """
        self.wait()
        content = self._content(average, manifest, plan, lora)
        if content is None:
            return
        if self._has_room(content.shares):
            content.shares[:] = [share.copied() for share in content.shares]
            self._pending = self._thread.submit(self._write, content)
        else:
            self._pending = Future()
            self._pending.set_result(self._write(content))

    def finished(self) -> Path | None:
        """The checkpoint that was finished since the last call; None if it is still being written, or there is none.
        Raises the errors that `save` names."""
        return self.wait() if self._pending and self._pending.done() else None

    def wait(self) -> Path | None:
        """As `finished`, but waits for a checkpoint that is being written."""
        pending, self._pending = self._pending, None
        try:
            return pending.result() if pending else None
        finally:
            pending = None  # its error's traceback holds this frame, which would keep the run's files open

    def close(self) -> None:
        """Waits for a checkpoint that is being written, without raising its error."""
        self._thread.shutdown()

    def _content(
        self, average: Average | None, manifest: dict[str, Any], plan: str, lora: LoraWriter | None
    ) -> Content | None:
        """What this rank writes, not copied yet except what had to be gathered; None if it writes nothing."""
        engine, names = self.engine, list(self.engine.trainee.trainable)
        adapters = gather(names, (average or engine).full_tensor, copy=True) if lora else {}
        if not is_first() and not self.shared:
            return None
        _wait_for_copies()
        if lora and not average and not engine.splits_weights:
            shares = [Share(f"{WEIGHTS}{name}", whole, (0,) * whole.ndim, True) for name, whole in adapters.items()]
        else:
            shares = [share for name in names for share in engine.kept_weight(name, f"{WEIGHTS}{name}")]
        if average:
            shares += [share for name in names for share in share_of(f"{AVERAGE}{name}", average.kept(name), rank())]
        outline, of_optimizer = state_files.taken_apart(engine.state(), rank())
        manifest = {**manifest, "average_steps": average.steps if average else None}
        return Content(manifest["step"], [*shares, *of_optimizer], outline, manifest, plan, adapters, lora)

    def _has_room(self, shares: Iterable[Share]) -> bool:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.shared else 1
        copied = sum(share.values.nbytes for share in shares if not share.is_copy)
        return has_room(copied * ranks, doctor.host_ram()["available_bytes"])

    # ---- in the thread

    def _write(self, content: Content) -> Path | None:
        """Writes the checkpoint, gives its folder the final name and returns it."""
        final = self.folder / checkpoints.folder_name(content.step)
        partial = self.folder / f".partial-{final.name}"
        try:
            self._together(lambda: self._begin(partial, content))
            self._together(lambda: self._write_shares(partial, content))
            self._together(lambda: self._seal(partial, final, content))
        except (VplanError, NotFiniteError):
            if is_first():
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def _begin(self, partial: Path, content: Content) -> None:
        if not is_first():
            return
        with _writing(partial):
            shutil.rmtree(partial, ignore_errors=True)
            (partial / STATE).mkdir(parents=True)
            if content.lora is not None:
                content.lora(partial, content.adapters)
            (partial / PLAN).write_text(content.plan, encoding="utf-8")
            (partial / STATE / OUTLINE).write_text(json.dumps(content.outline), encoding="utf-8")

    def _write_shares(self, partial: Path, content: Content) -> None:
        for number, shares in enumerate(state_files.files_of(content.shares)):
            copies = [share.copied() for share in shares]
            for share in copies:
                if share.key.startswith(WEIGHTS) and not bool(torch.isfinite(share.values).all()):
                    raise NotFiniteError(f"after step {content.step} trained weights are not finite any more")
            with _writing(partial):
                state_files.write_shares(partial / STATE / f"rank-{rank():05d}-{number:05d}.safetensors", copies)

    def _seal(self, partial: Path, final: Path, content: Content) -> None:
        if not is_first():
            return
        with _writing(partial):
            checkpoints.seal(partial, final, content.manifest)
            checkpoints.keep_newest(self.folder, self.keep)

    def _together(self, work: Callable[[], None]) -> None:
        """Does this rank's part of some work. If one rank has an error, all ranks raise."""
        error: VplanError | NotFiniteError | None = None
        try:
            try:
                work()
            except (VplanError, NotFiniteError) as met:
                error = met
            errors = [error]
            if self.group is not None:
                errors = [None] * dist.get_world_size()
                dist.all_gather_object(errors, error, group=self.group)
            if first := error or next(filter(None, errors), None):
                raise first
        finally:
            error, errors, first = None, [], None  # as in `wait`


@contextlib.contextmanager
def _writing(partial: Path) -> Iterator[None]:
    """A context that turns a failed write, such as on a full disk, into a VplanError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        existing = next(folder for folder in partial.absolute().parents if folder.is_dir())
        if shutil.disk_usage(existing).free < FULL_BYTES:
            reason = "the disk is full"
        fix = "free some space there and run the same command again: it resumes from the last checkpoint"
        raise VplanError(f"cannot write a checkpoint to {partial.parent}: {reason}", fix, 4) from error


# ---- resuming from one


def trained_weights(checkpoint: Path) -> Weights:
    """A checkpoint's trained weights, by their names in the model."""
    if (checkpoint / OLD_WEIGHTS).is_file():
        return Weights(checkpoint, [OLD_WEIGHTS])
    folder = checkpoint / STATE
    return Weights(folder, sorted(path.name for path in folder.glob("*.safetensors"))).under(WEIGHTS)


def load_state(checkpoint: Path, engine: LocalEngine, average: Average | None, average_steps: int | None) -> None:
    """Restores the optimizer and the average from a checkpoint, whatever number of ranks wrote it. ``average_steps``:
    how many steps the average has followed. Raises a VplanError for a file that holds more than plain data."""
    if (checkpoint / OLD_WEIGHTS).is_file():
        _load_old_state(checkpoint, engine, average)
    else:
        saved = SavedState(checkpoint, rank())
        engine.read_state(saved)
        if average:
            saved.fill({f"{AVERAGE}{name}": average.kept(name) for name in average.trainable})
    if average:
        assert average_steps is not None
        average.steps = average_steps


def _load_old_state(checkpoint: Path, engine: LocalEngine, average: Average | None) -> None:
    assert engine.replicated
    path = checkpoint / OLD_STATE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        fault = f"{path} holds more than tensors and numbers, which vplan never writes"
        raise VplanError(fault, "choose another checkpoint") from None
    engine.load_state(state)
    if average:
        file = Weights(checkpoint, [OLD_AVERAGE])
        for name in average.trainable:
            file.fill(name, average.shadow[name])
