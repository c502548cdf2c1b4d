"""The worker before training: encodes a folder of clips and captions, and lists what training reads.

`planner.launch.launch.prepare` starts it as ``vplan worker prepare FOLDER``. It reads a `Preparation` from
``FOLDER/request.json``, writes progress and outcome into ``FOLDER/result-00000.json``, and the cache and its list where
the request says. A process of its own, so that the encoders and all they left on the GPU are gone before the model is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planner.catalog import lookup
from planner.errors import VplanError
from planner.launch.launch import Preparation
from planner.worker_process import REQUEST, read_json, result_file
from trainers.worker import ResultFile, end_with_parent, set_allocator


def main(arguments: list[str]) -> int:
    """Prepares what the request in the folder named by the only argument asks for."""
    folder = Path(arguments[0])
    end_with_parent()
    request = Preparation.read(read_json(folder / REQUEST), REQUEST)
    report = ResultFile(folder / result_file(0))
    report.tell(rank=0, phase="encode")
    set_allocator(request.plan.strategy.expandable_segments)
    try:
        prepare(request, report.tell)
    except VplanError as error:
        report.tell(outcome="refused", message=error.message, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    report.tell(outcome="ok")
    return 0


def prepare(request: Preparation, tell: Callable[..., None]) -> None:
    """Encodes what is not in the cache yet, and writes the list of samples next to it, anew each time: only what the
    data and the plan are now is trained on. `tell` is called with the progress, notes about the data (``notes``) and
    what was left out."""
    import torch

    from planner.dataset.buckets import FrameSampling
    from planner.dataset.scan import read
    from trainers.data.cache import Setting, cached
    from trainers.data.loader import changes, read_entries, write_entries
    from trainers.sampling import samples

    plan = request.plan
    profile = lookup.model(plan.job.model)
    entries = Path(request.entries)
    setting = Setting(
        profile=profile,
        job=plan.job,
        strategy=plan.strategy,
        source=request.weights,
        folder=entries.parent,
        device=torch.device(request.device),
        tell=tell,
    )
    is_cache = entries.is_file() and entries.parent == Path(request.data)  # made by others: there are no clips
    dataset = (
        None if is_cache else read(Path(request.data), profile, plan.job, FrameSampling(skip_bad=request.skip_bad))
    )
    if dataset is not None:
        notes = list(dataset.notes)
        tell(notes=notes, skipped=[str(fault) for fault in dataset.skipped])
        before = read_entries(entries) if entries.is_file() else None
        now = cached(dataset, setting, skip_bad=request.skip_bad)
        if before is not None:
            tell(notes=[*changes(before, now), *notes])
        write_entries(entries, now)
    if request.validation:
        at = Path(request.validation).parent
        samples.prepare(request, replace(setting, folder=at), dataset)
