"""One run of `vplan train`: checks, data, ranks, and the fallback to the next plan.

Read `TrainingSupervisor.run`, then `_train`.
"""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planner.catalog import lookup
from planner.commands import USAGE
from planner.commands._shared.data_options import typed_settings
from planner.commands._shared.rendering.render import print_plan
from planner.commands._shared.request import flag_of_samples
from planner.commands._shared.training import run_end
from planner.commands._shared.training.pick_plan import PLAN, weights_of
from planner.commands._shared.training.run_progress import Follower, prepare
from planner.commands._shared.training.run_report import ReportWriter
from planner.commands._shared.training.slurm_script import write_script
from planner.commands._shared.verb import (
    DONE,
    show,
    talk,
)
from planner.dataset.sources import option_of, sources
from planner.errors import VplanError
from planner.launch import (
    checkpoint_layout,
    checkpoints,
    launch,
    single_file,
    training_settings,
    validation,
    weight_files,
)
from planner.launch.fallback import difference, next_plan
from planner.launch.multinode import Peers
from planner.launch.resume import Resume
from planner.launch.stop import first_interrupt_stops
from planner.preflight import preflight
from planner.preflight.checks import FAILED
from planner.spec.plan import RAN_OUT, Plan, read_plan, write_plan
from planner.terminal import echo
from planner.worker_process import read_json, result_file

if TYPE_CHECKING:
    from rich.console import Console

    from planner.spec.plan import Estimate

ENTRIES, CACHE = "entries.jsonl", "cache"
VALIDATION = "validation.json"
ENCODING_FIX = "pass --vae-tiling or --text-encoder-dtype fp8, and run the command again: what is encoded is kept"


class TrainingSupervisor:
    """One call of `vplan train` with its plan: prepares the data, starts the ranks and follows them to the end."""

    def __init__(self, plan: Plan, data: Path, output: Path, options: dict[str, Any]) -> None:
        self.data, self.output, self.options = data, output, options
        self.profile = lookup.model(plan.job.model)
        self.plan = training_settings.with_complete_settings(plan, self.profile)
        self.device: Literal["cuda", "cpu"] = options["device"]
        self.notes: list[str] = []
        self.estimate: Estimate | None = None
        """of the running plan"""
        self.nodes = launch.Nodes(options["node_rank"], options["main_address"], options["main_port"])
        machine = plan.machine
        if self.nodes.rank >= machine.nodes:
            raise VplanError(f"--node-rank {self.nodes.rank} of {machine.nodes} nodes", "ranks start at 0")
        if machine.nodes > 1 and not self.nodes.address and not options["slurm"]:
            raise VplanError(
                f"{machine.nodes} nodes but no --main-address", "pass the address of the first node", USAGE
            )
        self.weights = weights_of(self.profile, options["weights"])
        self.transformer = single_file.check(options["transformer"]) if options["transformer"] else None
        if self.transformer and plan.job.experts == "both":
            raise VplanError("one --transformer for two experts", "pass --weights DIR, which has both")
        self.prompts = validation.prompts(plan, options, flag_of_samples(options))
        checkpoint_layout.check_resumable(output, options["resume"], self.plan, self.profile)
        typed = typed_settings(options)
        if self._is_cache and typed:
            fault = f"{data} holds encoded samples, to which {option_of(min(typed))} does not apply"
            raise VplanError(fault, "leave it out")
        self.sources = () if self._is_cache else sources(data, typed)

    def run(self, as_json: bool, *, begins: bool) -> int:
        """Checks, prepares, trains, and reports how it ended. ``begins``: nothing was printed about the plan yet."""
        if self.options["slurm"]:
            self._keep_training()
            return write_script(Path(self.options["slurm"]).expanduser(), self.plan, self.output, as_json)
        entries = self._entries()
        launch.check_installed(self.plan, self.options["log_with"])
        self.plan, note = validation.fitted(self.plan)
        if note:
            self._note(f"warning: {note}")
        checked = preflight.PreflightOptions(
            device=self.device,
            output=self.output,
            keep_checkpoints=self.options["keep_checkpoints"],
            checkpoints=self.options["steps"] // self.options["checkpoint_every"],
        )
        report = preflight.preflight(self.plan, checked)
        if begins:
            print_plan(talk(), self.plan, report.estimate)
        for line in training_settings.summary_lines(self.plan.training, self.profile, self.plan.strategy):
            talk().print(line)
        report.raise_fault()
        self._check_weights()
        self.estimate = report.estimate
        for one in report.checks:
            if one.level == "warning":
                self._note(f"warning: {one.what}{one.fix and f' ({one.fix})'}")
        if self.plan.machine.nodes == 1 or self.options["print_command"]:
            return self._train(entries, report.estimate, None, as_json)
        if self.nodes.rank:
            self._note("waiting for the first node")
        with Peers(self.output, self.nodes.rank, self.plan.machine.nodes) as peers:
            return self._train(entries, report.estimate, peers, as_json)

    def _note(self, *texts: str) -> None:
        self.notes += texts
        for text in texts:
            echo(text, err=True)

    @property
    def _is_cache(self) -> bool:
        """Whether the data folder is a cache that was made elsewhere."""
        return (self.data / ENTRIES).is_file()

    def _entries(self) -> Path:
        """The list of cached samples: in the data folder if that is a cache, else in the run's cache."""
        return (self.data if self._is_cache else self.output / CACHE) / ENTRIES

    @property
    def _sample_list(self) -> str | None:
        """The file that lists the samples to make; None if there are none."""
        return None if self.plan.strategy.validation_mode == "off" else str(self.output / CACHE / VALIDATION)

    def _check_weights(self) -> None:
        """Raises a VplanError for incomplete weights, before anything is encoded."""
        encoders = not self._is_cache or self.plan.strategy.validation_mode != "off"
        root = Path(self.weights).expanduser()
        weight_files.check(self.plan, self.profile, root, denoiser=self.transformer is None, encoders=encoders)

    def _preparation(self, entries: Path) -> launch.Preparation:
        return launch.Preparation(
            plan=self.plan,
            data=str(self.data),
            sources=self.sources,
            weights=self.weights,
            entries=str(entries),
            device=self.device,
            skip_bad=self.options["skip_bad"],
            prompts=self.prompts,
            validation=self._sample_list,
        )

    def _resume(self) -> Path | None:
        """The checkpoint to resume from."""
        resume, steps = self.options["resume"], self.options["steps"]
        goes_on = Resume(self.output, resume, steps, self.plan, self.profile, self._note)
        return goes_on.checkpoint(may_move=not self.options["print_command"])

    def _keep_training(self) -> None:
        """Writes the settings into the run's plan, so that the next start uses the ones this run began with."""
        kept = self.output / PLAN
        write_plan(read_plan(kept).replace(training=self.plan.training), kept)

    def _request(self, entries: Path, resume: Path | None) -> launch.RunRequest:
        options, output = self.options, self.output
        return launch.RunRequest(
            plan=self.plan,
            entries=str(entries),
            weights=self.weights,
            output=str(output),
            run=checkpoints.run_id(output),
            device=self.device,
            steps=options["steps"],
            seed=options["seed"],
            checkpoint_every=options["checkpoint_every"],
            keep_checkpoints=options["keep_checkpoints"],
            transformer=self._converted(),
            resume=str(resume) if resume else None,
            log_with=options["log_with"],
            validation=validation.request(self._sample_list, options),
            expert_steps=options["expert_steps"],
            forecast=launch.RunForecast.of(self.estimate) if self.estimate else None,
        )

    def _train(self, entries: Path, estimate: Estimate | None, peers: Peers | None, as_json: bool) -> int:
        """Trains to the end. When memory runs out, continues from the last checkpoint with the next plan of the
        ladder."""
        output, first = self.output, self.nodes.rank == 0
        resume = self._begin(entries) if first else None  # on behalf of all computers
        begun: int | None = None
        follower: Follower | None = None
        page = ReportWriter(output)
        for attempt in itertools.count():
            request = self._request(entries, resume) if first else self._published_request(peers, attempt, entries)
            resume = Path(request.resume) if request.resume else None
            begun = begun if attempt else run_end.steps_of(resume)
            if self.options["print_command"]:
                return self._print_command(request, as_json)
            if peers and first:
                peers.publish(attempt, request)
            high = estimate.high_bytes if estimate and self.device == "cuda" else None
            every, done = request.checkpoint_every, run_end.steps_of(resume) or 0
            with Follower(output / launch.METRICS, request.steps, every, high, done, follower) as follower:
                ended = self._run_ranks(attempt, request, peers, follower, page)
            self.notes += follower.warnings
            told = read_json(launch.run_folder(output, self.nodes) / result_file(0))
            if "tracker_fault" in told:
                self._note(f"warning: {told['tracker_fault']}")
            if ended.name not in RAN_OUT or (first and not self._step_down(ended)):
                break
            resume, _ = checkpoints.newest(output, request.run)
            estimate = None
        if ended.name == "stopped":
            return run_end.show_stopped(ended, output, request.steps, self.notes, as_json)
        run_end.raise_unless_ok(ended, output)
        assert follower is not None
        return run_end.show_finished(request, begun, follower, estimate, self.notes, as_json)

    def _begin(self, entries: Path) -> Path | None:
        """What the first computer does for all of them before the ranks start; returns the checkpoint to resume
        from."""
        resume = self._resume()
        if resume is None:
            training_settings.check_lora_init(self.plan.training)
        self._keep_training()
        self._prepare(entries)
        return resume

    def _run_ranks(
        self,
        attempt: int,
        request: launch.RunRequest,
        peers: Peers | None,
        follower: Follower,
        page: ReportWriter,
    ) -> launch.Outcome:
        """Runs this computer's ranks to their end. The first computer writes the page, also at the end."""
        first = self.nodes.rank == 0

        def tick() -> None:
            follower.tick()
            if first:
                page.tick()

        try:
            with first_interrupt_stops(self.output):
                if peers:
                    return peers.run(attempt, request, self.nodes, tick)
                return launch.run(request, self.nodes, tick)
        finally:
            if first:
                page.write()

    def _prepare(self, entries: Path) -> None:
        """Encodes what is not cached yet, and lists it."""
        wanted = self._preparation(entries)
        # The data folder is scanned at every start: clips, captions or the plan may have changed.
        if entries.parent == self.data and validation.is_listed(wanted):
            return
        prepared, notes = prepare(wanted, self.output)
        self._note(*notes)
        if prepared.name in RAN_OUT:
            fault = f"{run_end.which_memory(prepared)} while samples were encoded: {prepared.message}"
            raise VplanError(fault, ENCODING_FIX, prepared.exit_code)
        run_end.raise_unless_ok(prepared, self.output)

    def _converted(self) -> str | None:
        """The folder of the transformer that was passed as a single file."""
        if self.transformer is None:
            return None
        folder = single_file.folder_of(self.transformer, self.plan.job.model, self.output)
        if not folder.is_dir():
            self._note(f"converting {self.transformer.name} to {folder}, once")
            single_file.convert(self.transformer, self.plan.job.model, folder)
        return str(folder)

    def _published_request(self, peers: Peers | None, attempt: int, entries: Path) -> launch.RunRequest:
        """The first computer's request, with this computer's own paths to what they share."""
        if peers is None:  # --print-command
            return self._request(entries, None)
        request = peers.request(attempt)
        if request is None:
            why = peers.end_message() or "it ended before its ranks started"
            raise VplanError(f"the first node ended: {why}", "see its output", FAILED)
        self.plan = request.plan
        resume = str(self.output / checkpoints.FOLDER / Path(request.resume).name) if request.resume else None
        transformer = single_file.folder_here(request.transformer, self.output)
        own = {"output": str(self.output), "weights": self.weights, "transformer": transformer}
        return request.replace(**own, entries=str(entries), resume=resume, device=self.device)

    def _print_command(self, request: launch.RunRequest, as_json: bool) -> int:
        folder = launch.write_request(launch.run_folder(self.output, self.nodes), request)
        words, unset = launch.command(self.plan, folder, self.nodes), launch.foreign()
        settings = launch.settings(self.device)
        answer = {"command": words, "environment": settings, "unset": unset}
        lines = [f"unset {shlex.join(unset)}"] if unset else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
        lines.append(shlex.join(words))

        def render(console: Console) -> None:
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

        show(answer, as_json, render)
        return DONE

    def _step_down(self, ended: launch.Outcome) -> bool:
        """Switches to the next plan and keeps the failed one next to it; False if there is none."""
        found = next_plan(self.plan, self.estimate if ended.name == "oom" else None)
        if found is None:
            return False
        kept = self.output / PLAN
        kept.replace(next(path for n in range(10**6) if not (path := self.output / f"plan.before-{n}.toml").exists()))
        write_plan(found, kept)
        change = difference(self.plan, found)
        self._note(f"warning: {run_end.which_memory(ended)}; resuming from the last checkpoint with {change}")
        self.plan = found
        self.estimate, _ = preflight.estimated(found, must=False)
        return True
