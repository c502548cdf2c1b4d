"""A model class that diffusers does not have: of transformers, or of the user's own code, as `module:Class`.

Whoever names one on the command line lets vplan run that code, in processes without network. A name that stands in a
file never does: those processes alone have the variable below.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from planner.errors import VplanError, quoted

VARIABLE = "VPLAN_OWN_CODE"
"""Environment variable of the processes that may run such code: the class that was named."""

FOLDER = "VPLAN_OWN_CODE_FOLDER"
"""Environment variable with the folder in which its module is looked up last."""

_NAME = re.compile(r"[A-Za-z_]\w{0,99}(\.[A-Za-z_]\w{0,99}){0,9}:[A-Za-z_]\w{0,99}", re.ASCII)


class NamedClass(NamedTuple):
    """A class that the user named, and the folder that holds its module."""

    class_name: str
    """`module:Class`"""
    folder: str
    """absolute, looked up behind what is installed; "" for none"""

    @classmethod
    def of(cls, text: str, folder: str | None) -> NamedClass:
        """What `--class` and `--path` say. Raises a VplanError for a name that is none, or a folder that is none."""
        if not _NAME.fullmatch(text):
            fix = "write module:Class, as my_models.video:MyTransformer"
            raise VplanError(f"--class {quoted(text)} is no class", fix)
        if folder is not None and not Path(folder).is_dir():
            fix = "pass the folder that holds your module: --path DIR"
            raise VplanError(f"there is no folder {quoted(folder)}", fix)
        return cls(text, "" if folder is None else str(Path(folder).resolve()))

    @property
    def environment(self) -> dict[str, str]:
        """What the processes that may run it have in their environment."""
        return {VARIABLE: self.class_name, FOLDER: self.folder}

    @property
    def words(self) -> str:
        """What is about to happen, in one line."""
        module = self.class_name.partition(":")[0]
        return f"runs the code of {module}{f' in {self.folder}' if self.folder else ''}, in a process without network"


def is_own(class_name: str) -> bool:
    """Whether the name of a class is one of those."""
    return ":" in class_name


def may_run(class_name: str) -> bool:
    """Whether this process was started to run the code of that class."""
    return os.environ.get(VARIABLE) == class_name
