"""The command line as people and programs meet it: help, exit codes, errors, and what is never imported."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

import vplan
from planner.commands import VERBS, cli
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.verb import Verb, json_option, show, verdict_exit_code

ROOT = Path(vplan.HOME)
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "optuna")


def run(*words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        vplan.command(*words), env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_lists_every_verb_and_no_other() -> None:
    page = run("--help").stdout
    commands = page.split("Commands:\n")[1].split("\n\n")[0]
    assert re.findall(r"^  (\S+)", commands, re.MULTILINE) == list(VERBS)


def test_every_file_of_a_verb_is_listed() -> None:
    files = (ROOT / "planner" / "commands").glob("*.py")
    with_command = {file.stem for file in files if re.search(r"^(def )?command\b", file.read_text(), re.MULTILINE)}
    assert with_command == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples(verb: str) -> None:
    page = CliRunner().invoke(cli, [verb, "--help"], prog_name="vplan").output
    assert f"Usage: vplan {verb}" in page
    assert f"Examples:\n    vplan {verb}" in page
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (["sugest"], "no such command 'sugest'", "did you mean suggest"),
        (["gpu"], "no such command 'gpu'", "did you mean gpus"),
        (["gpus", "--jsn"], "no such option --jsn", "did you mean --json"),
        (["gpus", "rtx4090"], "unexpected extra argument", "vplan gpus --help"),
        (["--gpu", "24GB"], "no such option --gpu", "vplan --help"),
    ],
)
def test_wrong_use_is_two_lines_and_exit_2(words: list[str], message: str, fix: str) -> None:
    done = run(*words, code=2)
    said, answer = done.stderr.splitlines()
    assert said.startswith("error: ") and message in said
    assert answer.startswith("fix: ") and fix in answer
    assert done.stdout == ""


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb `ask` that takes every flag there is, and shows what became of it."""

    @click.command(cls=Verb)
    @request_options()
    @click.option("--steps", type=int)
    @json_option
    def command(asked: TypedQuestion, steps: int | None, as_json: bool) -> int:
        show({"frames": asked.settle().job.frames}, as_json, lambda console: console.print("shown"))
        return verdict_exit_code("no")

    monkeypatch.setitem(sys.modules, "planner.commands.ask", SimpleNamespace(command=command))
    monkeypatch.setitem(VERBS, "ask", "For tests.")


@pytest.mark.usefixtures("ask")
@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--blocks-to-swap", "20"], "--swap-blocks"),
        (["--train_batch_size=4"], "--batch-size"),
        (["--lora_rank", "8"], "--lora-rank"),
        (["--use_8bit_adam"], "--optimizer adamw-8bit"),
        (["--framse", "8"], "--frames"),
    ],
)
def test_other_trainers_flags_get_did_you_mean(words: list[str], fix: str) -> None:
    result = CliRunner().invoke(cli, ["ask", "wan2.1-t2v-1.3b", *words])
    assert result.exit_code == 2
    assert f"did you mean {fix}" in result.stderr.splitlines()[1]


@pytest.mark.usefixtures("ask")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["wan2.1-t2v-1.3b", "--gpu", "24GB"], 3),
        (["wan2.1-t2v-1.3b", "--gpu", "24GB", "--frames", "80"], 1),
        (["wan2.1-t2v-1.3b", "--gpu", "24GB", "--steps", "many"], 1),
        (["wan2.1-t2v-1.3b", "--gpu", "24GB", "--steps"], 2),
        (["--gpu", "24GB"], 2),
    ],
)
def test_exit_codes(words: list[str], code: int) -> None:
    """The command's own; 1 for a bad value; 2 for a missing argument, with nothing on stdout even under --json."""
    plain, as_json = CliRunner().invoke(cli, ["ask", *words]), CliRunner().invoke(cli, ["ask", "--json", *words])
    assert (plain.exit_code, as_json.exit_code) == (code, code)
    if code == 3:
        assert json.loads(as_json.stdout) == {"frames": 81}
    else:
        assert plain.stderr.startswith("error: ")
        assert plain.stdout == ""
        assert (list(json.loads(as_json.stdout)["error"]) == ["message", "fix"]) if code == 1 else not as_json.stdout


def test_nothing_asked_shows_help() -> None:
    assert run(code=2).stderr.startswith("Usage: vplan")


def test_version() -> None:
    assert run("--version").stdout == f"vplan {vplan.__version__}\n"


@pytest.mark.parametrize("verb", ["models", "gpus"])
def test_a_list_is_one_json_object(verb: str) -> None:
    answer = json.loads(run(verb, "--json").stdout)
    names = [entry["name"] for entry in answer[verb]]
    assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize("verb", ["models", "gpus"])
def test_a_piped_table_is_plain_text_in_80_columns(verb: str) -> None:
    page = run(verb, COLUMNS="80", FORCE_COLOR="").stdout
    assert "\x1b" not in page
    assert max(map(len, page.splitlines())) <= 80
    names = [entry["name"] for entry in json.loads(run(verb, "--json").stdout)[verb]]
    assert [name for name in names if name not in page] == []


@pytest.mark.parametrize("verb", ["models", "gpus"])
def test_a_piped_table_has_a_line_a_row(verb: str) -> None:
    """Without COLUMNS nothing is wrapped at the 80 of a terminal that is not there."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    page = subprocess.run(vplan.command(verb), env=environment, capture_output=True, text=True, check=True).stdout
    answer = json.loads(run(verb, "--json").stdout)[verb]
    for entry in answer:
        (line,) = (line for line in page.splitlines() if f" {entry['name']} " in f" {line} ")
        assert verb == "gpus" or line.rstrip().endswith("x".join(map(str, entry["shape"]["resolutions"][-1])))


FULL = Path("/dev/full")
"""A disk without room, as Linux has it."""


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize(
    "words", [["models"], ["models", "--json"], ["gpus"], ["--help"], ["--version"], ["gpus", "--help"]]
)
def test_an_answer_to_a_full_disk_is_one_line_and_exit_1(words: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(vplan.command(*words), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the answer: No space left on device\n"


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize(
    ("words", "code"), [(["models", "--jsn"], 2), (["estimate", "wan-14b", "--gpu", "zz", "--json"], 1)]
)
def test_an_error_to_full_disks_is_its_exit_code(words: list[str], code: int) -> None:
    with FULL.open("w") as full:
        assert subprocess.run(vplan.command(*words), stdout=full, stderr=full, check=False).returncode == code


@pytest.mark.skipif(sys.platform == "win32", reason="shells there have no SIGPIPE")
@pytest.mark.parametrize("words", [["models"], ["models", "--json"], ["--help"]])
def test_a_closed_pipe_ends_silently(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(vplan.command(*words), stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_no_stdout_at_all_is_one_line() -> None:
    line = f"exec {shlex.join(vplan.command('models'))} >&-"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("words", [["--help"], ["gpus"], ["models", "--json"]])
def test_torch_is_never_imported(words: list[str]) -> None:
    source = f"import sys, vplan; code = vplan.main({words!r}); print('HEAVY', *set({HEAVY!r}) & set(sys.modules))"
    assert python(source).splitlines()[-1] == "HEAVY"


def test_help_imports_no_records() -> None:
    """`vplan --help` and a typo answer at once: pydantic and rich alone cost as much as all the rest."""
    source = "import sys, vplan; vplan.main(['--help']); print('HEAVY', *{'pydantic', 'rich'} & set(sys.modules))"
    assert python(source).splitlines()[-1] == "HEAVY"


def test_errors_are_json_when_json_was_asked() -> None:
    """A broken profile is the only wrong input these verbs can meet, so one is refused here by hand."""
    source = (
        "import sys, vplan, planner.catalog.lookup\n"
        "from planner.errors import VplanError\n"
        "def damaged(*_): raise VplanError('gpus.toml line 3 is damaged', 'reinstall vplan')\n"
        "planner.catalog.lookup.gpu_names = damaged\n"
        "assert vplan.main(['gpus', '--json']) == 1\n"
        "assert vplan.main(['gpus']) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"error": {"message": "gpus.toml line 3 is damaged", "fix": "reinstall vplan"}}
    assert done.stderr == "error: gpus.toml line 3 is damaged\nfix: reinstall vplan\n"


@pytest.mark.parametrize("model", ["qwen-image-edit", "ltx-2", "wan2.2-animate-14b"])
def test_what_cannot_be_encoded_is_refused_before_it_is_planned(model: str, tmp_path: Path) -> None:
    said = ["--gpu", "80GB", "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--weights", str(tmp_path)]
    refused = run("train", model, *said, code=1)
    assert "cannot encode" in refused.stderr and "entries.jsonl" in refused.stderr
    assert not (tmp_path / "out").exists()
    listed = {entry["name"]: entry["data"] for entry in json.loads(run("models", "--json").stdout)["models"]}
    assert listed[model] == "encoded" and listed["wan2.1-t2v-1.3b"] == "files"
