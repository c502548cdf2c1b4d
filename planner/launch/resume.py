"""The checkpoint to resume from, for `vplan train --resume`: the newest complete one, a given folder, or none.

No finished checkpoint is deleted: those that the run does not continue from are moved aside.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.launch import checkpoint_layout, checkpoints
from planner.spec.plan import Plan


class Resume:
    """Finds the checkpoint that a run resumes from. ``resume``: auto, no or a folder; ``steps``: the total steps of the
    run; ``tell`` is called with messages to the user."""

    def __init__(
        self, output: Path, resume: str, steps: int, plan: Plan, profile: ModelProfile, tell: Callable[[str], None]
    ) -> None:
        self.output, self.resume, self.steps, self.tell = output, resume, steps, tell
        self.plan, self.profile = plan, profile

    def checkpoint(self, *, may_move: bool = True) -> Path | None:
        """The checkpoint to resume from; None to start over. Raises a VplanError for one that cannot be used.
        ``may_move``: whether checkpoints are moved aside, and one given as a folder is made the run's newest; False for
        --print-command."""
        run = checkpoints.run_id(self.output)
        if self.resume == "no":
            self._set_aside(may_move)
            return None
        if self.resume != "auto":
            named = Path(self.resume).expanduser().absolute()
            checkpoints.check(named, run)
            self._check(named)
            return self._branch_off(named) if may_move else named
        newest, faults = checkpoints.newest(self.output, run)
        for fault in faults:
            self.tell(f"warning: skipped: {fault}")
        if newest:
            self.tell(f"resuming from {newest}")
            self._check(newest)
        elif faults:
            raise VplanError("no checkpoint is complete", "start over with --resume no, which keeps them aside")
        return newest

    def _set_aside(self, may_move: bool) -> None:
        folder = self.output / checkpoints.FOLDER
        if folder.exists() and not may_move:
            self.tell(f"earlier checkpoints are in {folder}: move them before you run the command")
        elif folder.exists():
            aside = checkpoints.aside(self.output)
            folder.rename(aside)
            self.tell(f"earlier checkpoints are in {aside}")

    def _branch_off(self, checkpoint: Path) -> Path:
        """Makes the checkpoint the run's newest, and returns its folder."""
        here, aside = checkpoints.branch_off(self.output, checkpoint)
        if aside:
            self.tell(f"checkpoints that are not before {here.name} are in {aside}")
        return here

    def _check(self, checkpoint: Path) -> None:
        """Raises a VplanError for a checkpoint that has more steps than the run, or does not match the plan. Tells the
        user which settings change."""
        manifest = checkpoints.read_manifest(checkpoint)
        if (done := int(manifest["step"])) > self.steps:
            fix = f"pass --steps {done} or more, or start over with --resume no"
            raise VplanError(f"{checkpoint} has {done} steps, but --steps is {self.steps}", fix)
        for change in checkpoint_layout.changes(manifest, self.plan, self.profile):
            self.tell(change)
