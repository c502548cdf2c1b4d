"""The worker that runs before training: encodes a folder of clips and captions, and lists what training reads.

`planner.launch.launch.prepare` starts it as ``vplan worker prepare FOLDER``. It reads a `Preparation` from
``FOLDER/request.json``, writes progress and outcome to ``FOLDER/result-RANK.json``, and the cache and its list to where
the request says. It is a separate process, so that the encoders and everything they left on the GPU are gone before the
model is loaded. Under torch's launcher there is one process per GPU, and they share the work.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.catalog import lookup
from planner.errors import VplanError
from planner.launch.launch import MEMORY, Preparation
from planner.worker_process import REQUEST, read_json, result_file
from trainers.worker import ResultFile, end_with_parent, set_allocator, tell_out_of_memory

if TYPE_CHECKING:
    from planner.dataset.scan import Dataset
    from trainers.data.cache import EncodingTask


def main(arguments: list[str]) -> int:
    """Runs one rank of the request in the folder named by the only argument."""
    folder = Path(arguments[0])
    end_with_parent()
    request = Preparation.read(read_json(folder / REQUEST), REQUEST)
    rank = int(os.environ.get("RANK", "0"))
    report = ResultFile(folder / result_file(rank))
    report.tell(rank=rank, pid=os.getpid(), phase="encode")
    set_allocator(request.plan.strategy.expandable_segments)
    try:
        with _memory_log(request, folder.parent) if rank == 0 else contextlib.nullcontext():
            prepare(request, report.tell)
    except VplanError as error:
        report.tell(outcome="refused", message=error.message, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except (RuntimeError, MemoryError) as error:
        return tell_out_of_memory(report, error)
    report.tell(outcome="ok")
    return 0


@contextlib.contextmanager
def _memory_log(request: Preparation, output: Path) -> Iterator[None]:
    """Writes how much memory encoding took into the run's memory log."""
    import torch

    from trainers.measuring.run_metrics import MemoryLog, Watch

    there = request.device == "cpu" or torch.cuda.is_available()
    watch = Watch(torch.device(request.device if there else "cpu"))
    try:
        with MemoryLog(output / MEMORY, watch).phase("encode", 0):
            yield
    finally:
        watch.close()


def prepare(request: Preparation, tell: Callable[..., None]) -> None:
    """Encodes what is not in the cache yet, and rewrites the list of samples next to it, so that training uses only
    what the data and the plan contain now. Ranks share the encoding; the first one scans the data and writes the lists.

    `tell` is called with the progress, notes about the data (``notes``) and what was left out.
    """
    from trainers.data.cache import cached
    from trainers.data.entries import changes, read_entries, write_entries
    from trainers.sampling import samples

    entries = Path(request.entries)
    setting = _setting(request, tell)
    is_cache = entries.is_file() and entries.parent == Path(request.data)  # a ready-made cache: there are no clips
    dataset = None if is_cache else _dataset(request, setting)
    if dataset is not None:
        notes = list(dataset.notes)
        tell(notes=notes, skipped=[str(fault) for fault in dataset.skipped])
        before = read_entries(entries) if entries.is_file() else None
        now = cached(dataset, setting, skip_bad=request.skip_bad)
        if before is not None:
            tell(notes=[*changes(before, now), *notes])
        if setting.rank == 0:
            write_entries(entries, now)
    if request.validation and setting.rank == 0:
        alone = replace(_setting(request, tell, alone=True), folder=Path(request.validation).parent)
        samples.prepare(request, alone, dataset)


def _setting(request: Preparation, tell: Callable[..., None], *, alone: bool = False) -> EncodingTask:
    """The encoding task of this rank, shared with all ranks of the launcher unless ``alone``."""
    import torch.distributed as dist

    from trainers.data.cache import EncodingTask
    from trainers.parallel.start import TIMEOUT, find_device
    from trainers.step import backends

    backends.set_flags()
    plan = request.plan
    setting = EncodingTask(
        profile=lookup.model(plan.job.model),
        job=plan.job,
        strategy=plan.strategy,
        source=request.weights,
        folder=Path(request.entries).parent,
        device=find_device(request.device),
        tell=tell,
    )
    if alone or "WORLD_SIZE" not in os.environ:
        return setting
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    return replace(setting, rank=dist.get_rank(), ranks=dist.get_world_size(), wait=dist.barrier)


def _dataset(request: Preparation, setting: EncodingTask) -> Dataset:
    """The samples of the data that the plan uses; the first rank reads them for all ranks."""
    import torch.distributed as dist

    from planner.dataset.scan import read

    def found() -> Dataset:
        return read(request.sources, setting.profile, request.plan.job, skip_bad=request.skip_bad, tell=setting.tell)

    if setting.ranks == 1:
        return found()
    everyone: list[Dataset | None] = [found() if setting.rank == 0 else None]
    dist.broadcast_object_list(everyone)
    assert everyone[0] is not None
    return everyone[0]
