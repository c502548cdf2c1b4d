"""Records other trainers' own models and training steps from a checkout of their code; one file per trainer.

A trainer whose model is not diffusers' makes other tensors in another order, which fragments the allocator differently.
Its step is recorded from that code (`VPLAN_CHECKOUT=FOLDER vplan record MODEL --variant NAME`). Only the tape is
shipped, with the repository and commit that it was recorded from.
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
    """A class or function of a trainer's package, which is imported only when this is called."""
    return getattr(importlib.import_module(module), name)


class TrainerCode(Protocol):
    """The interface of the modules in this folder."""

    REPOSITORY: str
    """the trainer's repository, "owner/name" on GitHub"""

    COMMIT: str
    """the commit that its tapes are recorded from"""

    PACKAGES: str
    """the folder in the repository that has the packages; empty for its root"""

    def import_packages(self) -> None:
        """Imports the trainer's packages. Raises an ImportError if one of them or their dependencies is missing."""

    def build_model(
        self,
        profile: ModelProfile,
        job: Job,
        strategy: Strategy,
        config: dict[str, Any] | None = None,
        version: str = "",
    ) -> nn.Module:
        """The trainer's model with its adapter and dtypes, parameters on ``meta``, as `trainers.step.step` builds
        diffusers'. ``version``: a name from `planner.layout.trainer_terms`."""

    def batch(self, profile: ModelProfile, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors on the card when a step begins: latents, encoder outputs, and whatever else the trainer keeps
        there."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], strategy: Strategy) -> Tensor:
        """The loss of a batch, computed by the trainer's functions under its autocast."""

    def published_name(self, name: str) -> str:
        """The diffusers name of a weight, from the trainer's name."""


def check_out(trainer: str) -> TrainerCode:
    """The module of a trainer, with its packages imported from the checkout that the environment variable `CHECKOUT`
    names; it may name several folders. Raises a VplanError if it names none, if none is at the commit that tapes are
    recorded from, or if a package is missing."""
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
    """The commit that a folder is at; empty if it is not a repository."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
