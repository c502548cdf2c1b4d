"""The training worker: one rank of `vplan train`. It sets up what the plan says, checks that it came about, and loops.

`planner.launch.launch` starts it as ``vplan worker train FOLDER``, under torch's launcher where there are several
ranks. It reads a `RunRequest` from ``FOLDER/request.json``, writes progress and outcome into
``FOLDER/result-RANK.json``, and metrics, checkpoints, samples and the finished weights into the run's output folder.

The step is `trainers.step.step`, the same that is recorded and probed. Everything random is made of the run's seed and
the number of the step, so nothing but the weights and the optimizer's state has to be kept to go on exactly.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.catalog import lookup
from planner.errors import VplanError
from planner.launch import checkpoints
from planner.launch.launch import METRICS, NAN, OUT_OF_MEMORY, RunRequest
from planner.spec.fp16 import scales_loss
from planner.spec.plan import plan_to_toml
from planner.worker_process import REQUEST, read_json, result_file
from trainers.worker import ResultFile, end_with_parent, set_allocator

FINAL = "final"
DRIVE = "offload"
"""What is offloaded to a drive, in the run's own folder; it may be a link to another drive."""


def main(arguments: list[str]) -> int:
    """Runs one rank of the request in the folder named by the only argument."""
    folder = Path(arguments[0])
    end_with_parent()
    request = RunRequest.read(read_json(folder / REQUEST), REQUEST)
    rank = int(os.environ.get("RANK", "0"))
    report = ResultFile(folder / result_file(rank))
    report.tell(rank=rank, pid=os.getpid())
    set_allocator(request.plan.strategy.expandable_segments)
    return run(request, report)


def run(request: RunRequest, report: ResultFile) -> int:
    """Trains and reports how it ended; returns the exit code. Unexpected errors are raised."""
    from trainers.data.store import NO_ROOM
    from trainers.memory.out_of_memory import out_of_memory
    from trainers.parallel.checkpoint import NotFiniteError

    try:
        TrainingRun(request, report).train()
    except VplanError as error:
        report.tell(outcome="refused", message=error.message, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except NotFiniteError as error:
        report.tell(outcome="nan", message=str(error))
        return NAN
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        fix = "free some space there and run the same command again: it resumes from the last checkpoint"
        report.tell(outcome="refused", message=f"the disk of {request.output} is full", fix=fix, exit_code=4)
        return 4
    except (RuntimeError, MemoryError) as error:
        outcome = out_of_memory(error)
        if outcome is None:
            raise
        report.tell(outcome=outcome, message=" ".join(str(error).split())[:1000])
        return OUT_OF_MEMORY
    report.tell(outcome="ok")
    return 0


class TrainingRun:
    """One rank of a training run. Made, it is set up and ready; `train` runs it to the finished weights."""

    def __init__(self, request: RunRequest, report: ResultFile) -> None:
        from trainers.families import family
        from trainers.measuring.run_metrics import Metrics, Watch
        from trainers.parallel.start import find_device, start

        self.request, self.report = request, report
        self.output = Path(request.output)
        self.profile = lookup.model(request.plan.job.model)
        self.strategy = request.plan.strategy
        targets = request.plan.job.lora_targets or self.profile.lora.targets
        self.job = request.plan.job.replace(lora_targets=targets)
        self.kind = family(self.profile).for_job(self.job)
        self.experts: Any = None
        report.tell(phase="start")
        self.device = find_device(request.device)
        self.watch = Watch(self.device)
        self.drive = self.output / DRIVE
        self.accelerator = start(self.job, self.strategy, request.plan.machine, self.device, self.drive, request)
        self.rank = self.accelerator.process_index
        report.tell(phase="load")
        self.loader = self._loader()
        manifest = self._set_up()
        self.lora_files = self._lora_files()
        self.metrics = Metrics(self.output / METRICS, self.done) if self.rank == 0 else None
        self.rate = rates(request)
        self.samples = self._samples()
        self.kernels_watched = False
        report.tell(phase="train", resumed=manifest["step"] if manifest else 0)

    def train(self) -> None:
        """Runs the remaining steps, writes checkpoints on the way, and exports the finished weights."""
        from trainers.parallel import export

        request = self.request
        try:
            self._sample(taken_up=True)
            for number in range(self.done, request.steps):
                self._step(number)
                # The checkpoint comes before the samples: making one may run out of memory, or be killed.
                if self.done % request.checkpoint_every == 0 or self.done == request.steps:
                    self._save()
                self._sample()
            self.report.tell(phase="save")
            export.finish(self.output / FINAL, self.profile, self.job, self.engine, self.average, self._lora_writer())
            self._clear_drive()
        finally:
            self.loader.close()
            self.watch.close()
        self.accelerator.end_training()

    def _clear_drive(self) -> None:
        """What was offloaded to a drive is in the checkpoint by now."""
        from trainers.parallel.checkpoint import barrier

        barrier()
        if self.rank == 0 and self.drive.exists():
            nbytes = sum(path.stat().st_size for path in self.drive.rglob("*") if path.is_file())
            self.report.tell(drive_bytes=nbytes)
            shutil.rmtree(self.drive, ignore_errors=True)

    def _loader(self) -> Any:
        """The batches of this rank, over the samples that were cached."""
        from trainers.data import loader
        from trainers.step import step

        plan, request = self.request.plan, self.request
        entries = loader.read_entries(Path(request.entries))
        accumulation = self.strategy.gradient_accumulation
        parts = self.strategy.context_parallel  # ranks that share a sample are given the same
        sampler = loader.BatchSampler(entries, self.job, plan.machine.world // parts, accumulation, request.seed)
        stacker = loader.Stacker(self.profile, self.job, self.kind, step.compute_dtype(self.strategy))
        return loader.Loader(sampler, stacker, self.rank // parts, self.device, request.steps)

    def _samples(self) -> Any:
        """What makes samples meanwhile, where the plan has some."""
        from trainers.sampling.samples import Samples

        if self.request.validation is None or self.strategy.validation_mode == "off":
            return None
        return Samples(self.request, self.profile, self.device, self.rank)

    def _sample(self, *, taken_up: bool = False) -> None:
        """Makes the samples that are due; where a run is taken up, those that a kill left out."""
        if self.samples is None or not (self.samples.missing(self.done) if taken_up else self.samples.due(self.done)):
            return

        def tell(line: dict[str, Any]) -> None:
            if self.metrics:
                self.metrics.write({**line, **self.watch.peaks()} if "samples" in line else line)

        self.report.tell(phase="validate")
        with self.average.in_model() if self.average else contextlib.nullcontext():  # which is what `final` will be
            self.samples.make(self.engine, self.done, tell)
        self.report.tell(phase="train")

    def _set_up(self) -> dict[str, Any] | None:
        """Model, engine, optimizer and average: as published, or as a checkpoint left them; returns its manifest."""
        from trainers.parallel import checkpoint, parallel
        from trainers.parallel.ema import Average

        request, job, strategy = self.request, self.job, self.strategy
        resume = Path(request.resume) if request.resume else None
        manifest = json.loads((resume / checkpoints.MANIFEST).read_text(encoding="utf-8")) if resume else None
        self.done = self._take_up(manifest) if manifest else 0
        trained = checkpoint.trained_weights(resume) if resume else None
        model = self._model(trained)
        self.trainee, self.engine = parallel.set_up(
            model, self.profile, job, strategy, request.learning_rate, self.device, drive=self.drive
        )
        if request.plan.machine.world > 1 and self._is_replicated():
            parallel.check_alike(self.trainee.trainable, self.device)
        self.average = Average(self.trainee.trainable, strategy.ema) if strategy.ema != "none" else None
        if resume and manifest:  # after the engine: its states are shares of what it has made
            checkpoint.load_state(resume, self.engine)
            if self.average:
                checkpoint.load_average(resume, self.average, manifest["average_steps"])
        return manifest

    def _model(self, trained: Any) -> Any:
        """The model of the plan with its weights, or both experts; ``trained``: a checkpoint's weights."""
        from trainers.memory import swap
        from trainers.parallel import parallel
        from trainers.step import experts, step, weights

        profile, job, strategy, seed = self.profile, self.job, self.strategy, self.request.seed
        root = Path(self.request.weights)
        if job.experts == "both":
            fill = experts.from_folder(root, profile, job, self.device, seed, trained)
            self.experts = experts.pair(profile, job, strategy, self.device, fill)
            return self.experts
        source = weights.published(weights.model_folder(root, profile, job), profile)
        model = step.build_model(profile, job, strategy)
        parallel.split(model, profile, job, strategy, self.device)
        swapped = swap.swapped_blocks(model, profile, strategy)
        waiting = step.offloaded_shares(model, strategy)
        weights.load(model, source, self.device, seed, trained, swapped, waiting)
        return model

    def _take_up(self, manifest: dict[str, Any]) -> int:
        """The steps a checkpoint has done; a VplanError where its state does not belong to this plan."""
        for name, now in self._layout().items():
            then = manifest["layout"].get(name, now)  # older checkpoints do not say which experts
            if then != now:
                fault = f"the checkpoint was written with {name} {then}, but the plan has {now}"
                raise VplanError(fault, f"set {name} back to {then}, or start over with --resume no")
        return int(self.loader.sampler.resume(manifest["position"]))

    def _layout(self) -> dict[str, Any]:
        """What decides the form of a checkpoint's tensors."""
        job, strategy = self.job, self.strategy
        return {
            "model": job.model,
            "experts": job.experts,
            "method": job.method,
            "lora_rank": job.lora_rank if job.method == "lora" else None,
            "lora_targets": list(job.lora_targets or ()) if job.method == "lora" else None,
            "trainable": list(job.trainable),
            "optimizer": strategy.optimizer,
            "step inside backward": strategy.optimizer_step == "backward",
            "master_weights": strategy.master_weights,
            "loss scaling": scales_loss(job, strategy),
            "ema": strategy.ema != "none",
            "sharding": strategy.sharding if strategy.sharding not in ("none", "ddp") else "none or ddp",
            "ranks": self.request.plan.machine.world if not self._is_replicated() else None,
        }

    def _lora_files(self) -> Any:
        """What writes the run's LoRA files; None in full training."""
        from trainers.parallel.lora_files import LoraFiles

        if self.job.method != "lora":
            return None
        return LoraFiles(self.profile, self.job, len(self.loader.sampler.entries), self.engine.plain)

    def _is_replicated(self) -> bool:
        return self.strategy.sharding in ("none", "ddp")

    def _step(self, number: int) -> None:
        """One optimizer step, the number of steps before it given; its line goes into the metrics."""
        from trainers.parallel import parallel
        from trainers.parallel.checkpoint import NotFiniteError
        from trainers.step import step

        began = time.perf_counter()
        rate = self.rate(number)
        for group in self.engine.param_groups():
            group["lr"] = rate
        sampler = self.loader.sampler
        shape = sampler.step(number).bucket
        self.report.facts["shape"] = shape.to_json()
        with self._watched_kernels() as kernels:
            turns: list[str] = []
            loss = step.accumulated_step(self.trainee, self.kind, self._batches(number, turns), self.strategy)
        if self.average:
            self.average.update()
        # The mean is the same number on every rank, so all of them stop at the same step.
        mean = float(parallel.mean_over_ranks(loss))
        if not math.isfinite(mean):
            raise NotFiniteError(f"the loss of step {number + 1} is not a number")
        self.done = number + 1
        line = {"step": self.done, "loss": mean, "learning_rate": rate, "epoch": number // sampler.steps_per_epoch}
        line |= {"frames": shape.frames, "height": shape.height, "width": shape.width}
        line |= {"attention_kernel": kernels.names} if kernels else {}
        line |= {"experts": "+".join(turns)} if turns else {}
        if (scaler := self.engine.scaler) is not None:
            line |= {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.skipped}
        line |= {"seconds": round(time.perf_counter() - began, 6), **self.watch.peaks()}
        if self.metrics:
            self.metrics.write(line)
        if self.request.log_with:
            self.accelerator.log({name: value for name, value in line.items() if value is not None}, step=self.done)

    def _batches(self, number: int, turns: list[str]) -> Iterator[Any]:
        """The micro-batches of a step; of two experts, each one's turn, by name, comes just before its own."""
        from trainers.step import experts

        for micro, batch in enumerate(self.loader.batches(number)):
            if self.experts is not None:
                turns.append(experts.chosen(self.profile, self.request.seed, number, micro))
                self.experts.turn(turns[-1])
                self.kind.for_job(self.job.replace(experts=turns[-1]))
            yield batch

    def _watched_kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Looks on in the first step that this process does. A compiled block would not run as such meanwhile."""
        from trainers.step.attention_kernels import Kernels

        seen_before, self.kernels_watched = self.kernels_watched, True
        return contextlib.nullcontext() if seen_before or self.strategy.compile != "none" else Kernels()

    def _save(self) -> None:
        from trainers.parallel import checkpoint

        request = self.request
        manifest = {
            "run": request.run,
            "step": self.done,
            "position": self.loader.sampler.position(self.done),
            "layout": self._layout(),
            "settings": request.settings(),
        }
        folder = self.output / checkpoints.FOLDER
        plan = plan_to_toml(request.plan)
        keep = request.keep_checkpoints
        checkpoint.save(folder, self.engine, self.average, manifest, plan, keep, self._lora_writer())
        self.report.tell(saved=self.done)

    def _lora_writer(self) -> Callable[[Path, Mapping[str, Any]], None] | None:
        """What writes the LoRA files of the steps that are done into a folder; None in full training."""
        files, steps = self.lora_files, self.done
        return None if files is None else lambda folder, trained: files.write(folder, trained, steps)


def rates(request: RunRequest) -> Any:
    """A function from the number of steps done to the learning rate, on diffusers' schedules
    (`diffusers.optimization`). Prodigy, which finds the rate itself, gets factors of 1."""
    import torch
    from diffusers.optimization import get_scheduler

    highest = 1.0 if request.plan.strategy.optimizer == "prodigy" else request.learning_rate
    unused = torch.optim.SGD([torch.zeros(1)], lr=highest)
    steps, warmup = request.steps, request.warmup_steps
    scheduler = get_scheduler(request.schedule, unused, num_warmup_steps=warmup, num_training_steps=steps)
    (factor,) = scheduler.lr_lambdas
    return lambda done: highest * factor(done)
