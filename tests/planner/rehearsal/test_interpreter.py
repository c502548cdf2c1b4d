"""Which Python a command runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.rehearsal.interpreter import find_interpreter, interpreter_of


def script(folder: Path, *lines: str) -> str:
    path = folder / "tool"
    path.write_text("\n".join([*lines, "print()", ""]))
    path.chmod(0o755)
    return str(path)


def test_the_command_names_it() -> None:
    assert find_interpreter([sys.executable, "train.py"]) == sys.executable
    assert find_interpreter(["env", "A=1", "B=2", sys.executable, "train.py"]) == sys.executable


@pytest.mark.parametrize(
    "lines",
    [
        (f"#!{sys.executable}",),
        (f"#!/usr/bin/env {sys.executable}",),
        (f"#!/usr/bin/env -S {sys.executable} -u",),
        ("#!/bin/sh", f'\'\'\'exec\' "{sys.executable}" "$0" "$@"', "' '''"),
    ],
)
def test_a_script_names_it(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert find_interpreter([script(tmp_path, *lines), "--nproc_per_node", "2"]) == sys.executable


def test_a_shell_script_takes_that_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_interpreter([script(tmp_path, "#!/bin/bash")]) == str(tmp_path / "python")


def test_a_shell_says_what_it_starts(tmp_path: Path) -> None:
    tool = script(tmp_path, f"#!{sys.executable}")
    assert find_interpreter(["bash", "-c", f"cd /tmp && exec {sys.executable} train.py"]) == sys.executable
    assert find_interpreter(["bash", "-c", f"{tool} --nproc_per_node 2 train.py"]) == sys.executable
    lines = tmp_path / "train.sh"
    lines.write_text(f"#!/bin/bash\nset -e\nCUDA_VISIBLE_DEVICES=0 \\\n  {sys.executable} train.py --lr 1e-4\n")
    lines.chmod(0o755)
    assert find_interpreter(["bash", "-e", str(lines)]) == sys.executable
    assert find_interpreter([str(lines)]) == sys.executable


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="no command 'no-such-tool'"):
        find_interpreter(["no-such-tool"])
    with pytest.raises(VplanError, match="no command given"):
        find_interpreter(["env", "A=1"])
    with pytest.raises(VplanError, match="does not run as Python"):
        interpreter_of([script(tmp_path, "#!/usr/bin/env /no/such/python3")])


def test_it_is_asked_for_its_packages() -> None:
    interpreter = interpreter_of([sys.executable])
    assert interpreter.path == sys.executable
    assert (interpreter.torch is None) == ("torch" not in interpreter.places)
