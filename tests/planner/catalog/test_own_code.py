"""A class of the user's own code: what names one, and who may run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.catalog import own_code
from planner.catalog.own_code import NamedClass
from planner.errors import VplanError
from trainers.families.common.model_classes import class_of

NAME = "my_denoiser:Denoiser"


@pytest.mark.parametrize("text", ["Denoiser", "os.system('x'):A", "a:b:c", "../a:B", "", "a." * 12 + "a:B"])
def test_a_name_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(VplanError, match="is no class"):
        NamedClass.of(text, None)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(VplanError, match="there is no folder"):
        NamedClass.of(NAME, "/nowhere/at/all")


def test_a_name_from_a_profile_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_denoiser.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(VplanError, match="code of your own"):
        class_of(NAME)
    monkeypatch.setenv(own_code.VARIABLE, "another:Class")
    with pytest.raises(VplanError, match="code of your own"):
        class_of(NAME)


@pytest.mark.parametrize(
    "name, fault", [("not_there_at_all:A", "cannot be imported"), ("json:loads", "is no torch module")]
)
def test_what_is_no_model_is_refused(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(own_code.VARIABLE, name)
    with pytest.raises(VplanError, match=fault):
        class_of(name)
