"""The folder of the user's own models."""

from __future__ import annotations

import sys
from pathlib import Path

import platformdirs
import pytest

from planner.catalog import user_data


@pytest.mark.parametrize("configured", [None, "", "  ", "/somewhere/else", "~/own"])
def test_the_folder_is_the_one_that_platformdirs_names(configured: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(user_data.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    if configured is not None:
        monkeypatch.setenv("XDG_CONFIG_HOME", configured)
    assert user_data.folder() == Path(platformdirs.user_config_dir("vplan", appauthor=False, roaming=True))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere platformdirs is asked")
def test_the_folder_is_known_without_importing_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(user_data.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert user_data.folder().name == "vplan"
