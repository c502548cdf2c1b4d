"""The training worker: one rank of `vplan train`. It sets up what the plan says, checks the result, and trains.

`planner.launch.launch` starts it as ``vplan worker train FOLDER``, through torch's launcher if there are several ranks.
It reads a `RunRequest` from ``FOLDER/request.json`` and writes progress and outcome to ``FOLDER/result-RANK.json``;
metrics, checkpoints, samples and the finished weights go to the run's output folder.

Read `TrainingRun.__init__` and `_set_up`, then `train`, `_run_steps` and `_step`. The step is `trainers.step.step`, the
same one that is recorded and probed. All randomness is derived from the run's seed and the step number, so weights and
optimizer state are enough to resume exactly.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.catalog import lookup
from planner.errors import VplanError
from planner.launch import checkpoint_layout, checkpoints, training_settings
from planner.launch.launch import FINAL, MEMORY, METRICS, NAN, RunRequest
from planner.launch.stop import STOP_REQUEST
from planner.launch.weight_files import model_folder
from planner.spec.plan import plan_to_toml
from planner.spec.training import NAMED_INITS
from planner.worker_process import REQUEST, read_json, result_file
from trainers.worker import ResultFile, end_with_parent, set_allocator, tell_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainers.data.loader import Loader
    from trainers.measuring.run_metrics import LateLoss
    from trainers.parallel.checkpoint import CheckpointWriter
    from trainers.parallel.lora_files import LoraFiles
    from trainers.sampling.samples import Samples
    from trainers.step.experts import Experts
    from trainers.step.step import Batch
    from trainers.step.weights import Begin, Weights

DRIVE = "offload"
"""Subfolder of the run's folder for what is offloaded to a drive. It may be a link to another drive."""
UNTRACKED = ("step", "phase", "unix_seconds")
"""Entries of a step's line that trackers do not get: they have their own step and time."""


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
    from trainers.parallel.checkpoint import NotFiniteError

    try:
        run = TrainingRun(request, report)
        finished = run.train()
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
        return tell_out_of_memory(report, error)
    if finished:
        report.tell(outcome="ok")
    else:
        report.tell(outcome="stopped", message=f"stopped after step {run.done} of {request.steps}")
    return 0


class TrainingRun:
    """One rank of a training run. The constructor sets everything up; `train` runs to the finished weights."""

    def __init__(self, request: RunRequest, report: ResultFile) -> None:
        from trainers.families import family
        from trainers.measuring.run_metrics import MemoryLog, Metrics, Watch
        from trainers.measuring.trackers import Trackers
        from trainers.parallel.start import find_device, start

        self.report = report
        self.output = Path(request.output)
        profile = lookup.model(request.plan.job.model)
        self.request = request.replace(plan=training_settings.with_complete_settings(request.plan, profile))
        self.training = self.request.plan.training
        self.profile = training_settings.with_law(profile, self.training)
        self.strategy = request.plan.strategy
        targets = request.plan.job.lora_targets or self.profile.lora.targets
        self.job = request.plan.job.replace(lora_targets=targets)
        self.family = family(self.profile).for_job(self.job)
        self.experts: Experts | None = None
        report.tell(phase="start")
        self.device = find_device(request.device)
        self.watch = Watch(self.device)
        self.drive = self.output / DRIVE
        self.accelerator = start(self.job, self.strategy, request.plan.machine, self.device, self.drive, self.request)
        self.trackers = Trackers(self.accelerator, report.tell)
        self.rank = self.accelerator.process_index
        report.tell(phase="load")
        self.loader = self._loader()
        self.memory = MemoryLog(self.output / MEMORY if self.rank == 0 else None, self.watch)
        with self.memory.phase("load") as facts:
            manifest = self._set_up()
            facts |= {"step": self.done, "device": request.device, "missing": self.watch.memory.missing}
            facts["forecast"] = request.forecast.to_json() if request.forecast else None
        self.lora_files = self._lora_files()
        self.checkpoints = self._checkpoints()
        self.metrics = Metrics(self.output / METRICS, self.done, self.memory) if self.rank == 0 else None
        self.unread: tuple[dict[str, Any], LateLoss] | None = None
        """the last step's line of metrics, and its loss, which has not been read yet"""
        self.stopping = False
        """whether the run was asked to stop; all ranks learn it after the same step"""
        self.rate = rates(self.request)
        self.samples = self._samples()
        self.kernels_watched = False
        report.tell(phase="train", resumed=manifest["step"] if manifest else 0)

    def train(self) -> bool:
        """Runs the remaining steps with checkpoints, and exports the finished weights. Returns False if it was asked to
        stop before the end; it then stops after a checkpoint."""
        from trainers.parallel import export

        try:
            self._sample(taken_up=True)
            finished = self._run_steps()
            self._note_saved(self.checkpoints.wait())
            if finished:
                self.report.tell(phase="save")
                final = self.output / FINAL
                with self.memory.phase("save", self.done):
                    export.finish(final, self.profile, self.job, self.engine, self.average, self._lora_writer())
                self._clear_drive()
        finally:
            self.checkpoints.close()  # a checkpoint that is being written when an error occurs is still good
            self.loader.close()
            self.watch.close()
        self.trackers.end()
        return finished

    def _run_steps(self) -> bool:
        """Runs the remaining steps, with checkpoints and samples. Returns False if it was asked to stop before the
        last."""
        request = self.request
        for number in range(self.done, request.steps):
            self._step(number)
            self._note_saved(self.checkpoints.finished())
            last = self.done == request.steps
            # The checkpoint comes before the samples: making one may run out of memory, or be killed.
            if self.done % request.checkpoint_every == 0 or last or self.stopping:
                self._save()
            if self.stopping and not last:
                return False
            self._sample()
        return True

    def _note_saved(self, checkpoint: Path | None) -> None:
        """Reports a finished checkpoint."""
        if checkpoint is not None:
            self.report.tell(saved=checkpoints.step_of(checkpoint))

    def _clear_drive(self) -> None:
        """Reports the size of what was offloaded to a drive, and deletes it; the checkpoint contains it."""
        from trainers.parallel.checkpoint import barrier

        barrier()
        if self.rank == 0 and self.drive.exists():
            nbytes = sum(path.stat().st_size for path in self.drive.rglob("*") if path.is_file())
            self.report.tell(drive_bytes=nbytes)
            shutil.rmtree(self.drive, ignore_errors=True)

    def _loader(self) -> Loader:
        """The loader of this rank's batches from the cached samples."""
        from trainers.data import loader
        from trainers.data.entries import read_entries
        from trainers.data.sampler import BatchSampler
        from trainers.step import step

        plan, request = self.request.plan, self.request
        entries = read_entries(Path(request.entries))
        accumulation = self.strategy.gradient_accumulation
        parts = self.strategy.context_parallel  # ranks that share a sample count as one
        sampler = BatchSampler(entries, self.job, plan.machine.world // parts, accumulation, request.seed)
        cache = Path(request.entries).parent
        own = cache if cache.is_relative_to(request.output) else None
        stacker = loader.Stacker(self.profile, self.job, self.family, step.compute_dtype(self.strategy), own)
        dropout = self.training.caption_dropout or 0.0
        return loader.Loader(sampler, stacker, self.rank // parts, self.device, request.steps, dropout)

    def _samples(self) -> Samples | None:
        """The object that makes validation samples during the run; None if the plan has none."""
        from trainers.sampling.samples import Samples

        if self.request.validation is None or self.strategy.validation_mode == "off":
            return None
        return Samples(self.request, self.profile, self.device, self.rank)

    def _sample(self, *, taken_up: bool = False) -> None:
        """Makes the validation samples that are due.

        ``taken_up``: before the first step of this process; then only if they are missing, as after a kill.
        """
        samples = self.samples
        if samples is None or not (samples.missing(self.done) if taken_up else samples.due(self.done)):
            return

        def tell(line: dict[str, Any]) -> None:
            if self.metrics:
                self.metrics.write(line)
            if line.get("samples"):
                files = [samples.folder / name for name in line["samples"]]
                self.trackers.samples(self.done, files, line["prompts"])

        self._read_loss()
        self.report.tell(phase="validate")
        with self.average.in_model() if self.average else contextlib.nullcontext():  # as in `final`
            samples.make(self.engine, self.done, tell, functools.partial(self.memory.phase, step=self.done))
        self.report.tell(phase="train")

    def _set_up(self) -> dict[str, Any] | None:
        """Sets up model, engine, optimizer and average, from the published weights or from a checkpoint. Returns the
        checkpoint's manifest, or None."""
        from trainers.parallel import checkpoint, parallel
        from trainers.parallel.ema import Average

        request, job, strategy = self.request, self.job, self.strategy
        resume = Path(request.resume) if request.resume else None
        manifest = checkpoints.read_manifest(resume) if resume else None
        self.done = self._take_up(manifest) if manifest else 0
        trained = checkpoint.trained_weights(resume) if resume else None
        model = self._model(trained)
        self.trainee, self.engine = parallel.set_up(
            model, self.profile, job, strategy, self.training, self.device, drive=self.drive
        )
        world = request.plan.machine.world
        if (copies := world if self._is_replicated() else strategy.fsdp_replicas) > 1:
            parallel.check_alike(self.trainee.trainable, self.device, copies)
        decay = self.training.ema_decay
        self.average = Average(self.trainee.trainable, strategy.ema, decay) if decay is not None else None
        if resume and manifest:  # after the engine is set up, whose shards the states are loaded into
            checkpoint.load_state(resume, self.engine, self.average, manifest.get("average_steps"))
        return manifest

    def _model(self, trained: Weights | None) -> nn.Module:
        """The plan's model with its weights, or both experts; ``trained``: a checkpoint's weights."""
        from trainers.memory import swap
        from trainers.parallel import parallel
        from trainers.step import experts, placement, step, weights

        profile, job, strategy, alpha = self.profile, self.job, self.strategy, self.training.lora_alpha
        root = Path(self.request.transformer or self.request.weights)
        if job.experts == "both":
            fill = experts.from_folder(root, profile, job, self.device, self._begin, trained)
            self.experts = experts.pair(profile, job, strategy, self.device, fill, alpha)
            return self.experts
        source = weights.published(model_folder(root, profile, job), profile)
        model = step.build_model(profile, job, strategy, lora_alpha=alpha)
        parallel.split(model, profile, job, strategy, self.device, self.drive)
        moving = swap.blocks_to_host(model, profile, strategy, self.device)
        waiting = placement.offloaded_shares(model, strategy)
        weights.load(model, source, self.device, self._begin("", model), trained, moving, waiting)
        if moving:
            swap.BlockSwap(moving, self.device)
        return model

    def _begin(self, part: str, model: nn.Module) -> Begin:
        """How new adapters are initialised; ``part``: which of two experts the model is."""
        from trainers.parallel.lora_start import from_file
        from trainers.step import weights

        init, seed = self.training.lora_init or "gaussian", self.request.seed
        if init in NAMED_INITS or self.request.resume:  # a checkpoint has all adapters
            return weights.fresh(seed, init)
        return from_file(Path(init), part, self.profile, self.job, self.training, model, weights.fresh(seed))

    def _take_up(self, manifest: dict[str, Any]) -> int:
        """Checks that a checkpoint belongs to this plan, puts the sampler at its position and returns its number of
        steps. Raises a VplanError if it does not belong."""
        if manifest["format"] == 1 and not self._is_replicated():
            fault = "the checkpoint is of an older vplan, whose states of several ranks this one does not read"
            raise VplanError(fault, "finish the run with the vplan that began it, or start over with --resume no")
        checkpoint_layout.check(manifest["layout"], self._layout())
        return int(self.loader.sampler.resume(manifest["position"]))

    def _layout(self) -> dict[str, Any]:
        """The settings that decide the layout of a checkpoint's tensors."""
        return checkpoint_layout.layout(self.request.plan, self.profile)

    def _lora_files(self) -> LoraFiles | None:
        """The writer of the run's LoRA files; None in full training."""
        from trainers.parallel.lora_files import LoraFiles

        if self.job.method != "lora":
            return None
        return LoraFiles(self.profile, self.job, self.training, len(self.loader.sampler.entries), self.engine.plain)

    def _is_replicated(self) -> bool:
        return self.strategy.sharding in ("none", "ddp")

    def _step(self, number: int) -> None:
        """Runs one optimizer step and writes its line of metrics. ``number``: how many steps were done before it."""
        import torch

        from trainers.measuring.run_metrics import LateLoss
        from trainers.parallel import parallel
        from trainers.step import step

        late = LateLoss(self.device)
        rate = self.rate(number)
        for group in self.engine.param_groups():
            group["lr"] = rate
        drawn = self.loader.sampler.step(number)
        expert = self._take_turn(number)
        first = not self.kernels_watched
        with self.memory.failing_step(number + 1), self._watched_kernels() as kernels:
            loss = step.accumulated_step(self.trainee, self.family, self._batches(number), self.strategy)
            if self.average:
                self.average.update()
            # The mean is the same number on every rank, so all of them stop at the same step.
            asked = loss.new_full((), float(self.rank == 0 and (self.output / STOP_REQUEST).exists()))
            late.keep(parallel.mean_over_ranks(torch.stack([loss, asked])) / drawn.weight)
        line: dict[str, Any] = {"step": number + 1, "learning_rate": rate, "epoch": drawn.epoch}
        line |= {"phase": "first_step" if first else "train", "shapes": drawn.shapes}
        line |= {"attention_kernel": kernels.names} if kernels else {}
        line |= {"experts": expert} if expert else {}
        if (scaler := self.engine.scaler) is not None:
            line |= {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.skipped}
        line |= self.watch.peaks()
        self._read_loss()  # of the previous step, while the device runs this one
        self.done, self.unread = number + 1, (line, late)

    def _batches(self, number: int) -> Iterator[Batch]:
        """The micro-batches of a step. The report always holds the shape that is running, in case memory runs out."""
        for micro, batch in enumerate(self.loader.batches(number)):
            self.report.facts["shape"] = self.loader.shape(number, micro).to_json()
            yield batch

    def _read_loss(self) -> None:
        """Reads the loss of the previous step and writes its line. Raises a NotFiniteError if the loss is not finite.

        It is called before weights are kept or shown, so they never belong to a step with an unknown loss.
        """
        from trainers.measuring.run_metrics import unix_seconds
        from trainers.parallel.checkpoint import NotFiniteError

        if self.unread is None:
            return
        (line, late), self.unread = self.unread, None
        (loss, asked), seconds = late.read()
        self.stopping |= asked > 0
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss of step {line['step']} is not a number")
        line |= {"loss": loss, "seconds": round(seconds, 6), "unix_seconds": unix_seconds()}
        if self.metrics:
            self.metrics.write(line)
        self.trackers.log({name: value for name, value in line.items() if name not in UNTRACKED}, line["step"])

    def _take_turn(self, number: int) -> str | None:
        """Switches to the expert that a step trains and returns its name; None unless both experts are trained."""
        from trainers.step import experts

        if self.experts is None:
            return None
        which = experts.chosen(self.profile, self.request.seed, number, self.request.expert_steps)
        self.experts.turn(which)
        self.family.for_job(self.job.replace(experts=which))
        return which

    def _watched_kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Watches the attention kernels in the first step of this process. Not with compiled blocks, which would not
        run as compiled while watched."""
        from trainers.step.attention_kernels import Kernels

        seen_before, self.kernels_watched = self.kernels_watched, True
        return contextlib.nullcontext() if seen_before or self.strategy.compile != "none" else Kernels()

    def _checkpoints(self) -> CheckpointWriter:
        from trainers.parallel.checkpoint import CheckpointWriter

        return CheckpointWriter(self.output / checkpoints.FOLDER, self.engine, self.request.keep_checkpoints)

    def _save(self) -> None:
        """Starts a checkpoint, which is written while training continues."""
        self._read_loss()
        request = self.request
        manifest = {
            "run": request.run,
            "step": self.done,
            "position": self.loader.sampler.position(self.done),
            "layout": self._layout(),
            "settings": request.settings(),
            "training": self.training.to_json(),
        }
        with self.memory.phase("save", self.done):
            self._note_saved(self.checkpoints.wait())
            self.checkpoints.save(self.average, manifest, plan_to_toml(request.plan), self._lora_writer())

    def _lora_writer(self) -> Callable[[Path, Mapping[str, Tensor]], None] | None:
        """A function that writes the LoRA files, after the steps done so far, to a folder; None in full training."""
        files, steps = self.lora_files, self.done
        return None if files is None else lambda folder, trained: files.write(folder, trained, steps)


def rates(request: RunRequest) -> Callable[[int], float]:
    """A function from the number of steps done to the learning rate, on diffusers' schedules
    (`diffusers.optimization`)."""
    import torch
    from diffusers.optimization import get_scheduler

    training = request.plan.training
    highest = training.learning_rate
    assert highest is not None and training.lr_scheduler is not None
    unused = torch.optim.SGD([torch.zeros(1)], lr=highest)
    steps, warmup = request.steps, training.warmup_steps
    scheduler = get_scheduler(training.lr_scheduler, unused, num_warmup_steps=warmup, num_training_steps=steps)
    (factor,) = scheduler.lr_lambdas
    return lambda done: highest * factor(done)
