"""Other trainers' own models and training steps, as they are recorded: one file a trainer, over a checkout of its code.

A trainer whose model is its own, and not diffusers', makes other tensors in another order, so that the allocator is
left with other holes. Its step is recorded from that code (`VPLAN_CHECKOUT=FOLDER vplan record MODEL --variant
NAME`), and the tape alone is shipped, with the repository and the commit that it was recorded from.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError, quoted
from planner.launch.recorders import CHECKOUT
from planner.spec.job import Job, Strategy
from trainers.families.common.base import Grid


def named(module: str, name: str) -> Any:
    """A class or function of a trainer's packages, which are imported when it is asked for."""
    return getattr(importlib.import_module(module), name)


class TrainerCode(Protocol):
    """What a file here offers, over the trainer's packages."""

    REPOSITORY: str
    """where the code is published, "owner/name" on GitHub"""

    COMMIT: str
    """that its tapes are recorded from"""

    PACKAGES: str
    """the folder in the repository that they lie in; empty for itself"""

    def import_packages(self) -> None:
        """Imports the trainer's packages; an ImportError where one, or one that it needs, is missing."""

    def build_model(
        self,
        profile: ModelProfile,
        job: Job,
        strategy: Strategy,
        config: dict[str, Any] | None = None,
        version: str = "",
    ) -> nn.Module:
        """The trainer's model with its adapter and dtypes, parameters on ``meta``, as `trainers.step.step` makes
        diffusers'; ``version``: as `planner.layout.trainer_terms` names one."""

    def batch(self, profile: ModelProfile, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
        """What a step finds on the card: latents, what the encoders made, and what else the trainer keeps there."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], strategy: Strategy) -> Tensor:
        """The loss of a batch by the trainer's own functions, under its own autocast."""

    def published_name(self, name: str) -> str:
        """The name that diffusers gives to a weight, by the trainer's own."""


def check_out(trainer: str) -> TrainerCode:
    """A trainer's file here, over the packages in the folder that `CHECKOUT` names, or in one of several. A VplanError
    where it names none, where none is at the commit that the tapes are recorded from, or where a package is missing."""
    code: Any = importlib.import_module(f"{__name__}.{trainer.replace('-', '_')}")
    fix = f"git clone https://github.com/{code.REPOSITORY}, check out {code.COMMIT}, and set {CHECKOUT} to its folder"
    folders = [Path(folder) for folder in os.environ.get(CHECKOUT, "").split(os.pathsep) if folder]
    if not folders:
        raise VplanError(f"this is recorded from {trainer}'s own code", fix)
    heads = [_head(folder) for folder in folders]
    folder = next((each for each, head in zip(folders, heads, strict=True) if head.startswith(code.COMMIT)), None)
    if folder is None:
        at = heads[0][:8] or "no repository"
        raise VplanError(f"{quoted(str(folders[0]))} is at {at}, and {trainer} is recorded at {code.COMMIT}", fix)
    packages = str((folder / code.PACKAGES).resolve())
    if packages not in sys.path:
        sys.path.append(packages)
    try:
        code.import_packages()
    except ImportError as error:
        raise VplanError(f"the code of {trainer} does not start: {error}", "install what it needs") from None
    return code  # type: ignore[no-any-return]  # a module, by the protocol


def _head(folder: Path) -> str:
    """The commit that a folder is at; empty where it is no repository."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
