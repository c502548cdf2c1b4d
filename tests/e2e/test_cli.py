"""The command line as people and programs use it: help, exit codes, errors, and imports that must not happen."""

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
from planner.spec.job import Strategy

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
        (["gpus", "rtx4090", "l4"], "unexpected extra argument", "vplan gpus --help"),
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
    """A verb `ask` that accepts every flag, and shows the resulting question."""

    @click.command(cls=Verb)
    @request_options()
    @click.option("--steps", type=int)
    @json_option
    def command(asked: TypedQuestion, steps: int | None, as_json: bool) -> int:
        show({"frames": asked.to_question().job.frames}, as_json, lambda console: console.print("shown"))
        return verdict_exit_code("no")

    monkeypatch.setitem(sys.modules, "planner.commands.ask", SimpleNamespace(command=command))
    monkeypatch.setitem(VERBS, "ask", "For tests.")


@pytest.mark.parametrize("verb", ["suggest", "estimate", "train", "tune"])
def test_help_is_short_and_help_all_is_whole(verb: str) -> None:
    """Short help has job, machine and wishes; --help-all adds a flag for each field of the strategy."""
    short, whole = (
        CliRunner().invoke(cli, [verb, flag], prog_name="vplan").output for flag in ("--help", "--help-all")
    )
    flags = {f"--{name.replace('_', '-')}" for name in Strategy.model_fields}
    listed = set(re.findall(r"--[a-z0-9-]+", whole))
    assert flags <= listed and {"--frames", "--gpu", "--host-ram"} <= set(re.findall(r"--[a-z0-9-]+", short))
    assert len(flags & set(re.findall(r"--[a-z0-9-]+", short.split("Examples:")[0]))) <= 4  # those the section names
    assert "see --help-all" in short.replace("\n ", "") and "see --help-all" not in whole
    assert len(short.splitlines()) < 0.72 * len(whole.splitlines())
    assert max(map(len, whole.splitlines())) <= 80


def completed(*words: str, shell: str = "bash") -> list[str]:
    """The completions that a shell gets for a command line; fish passes the word itself, others its index."""
    at = words[-1] if shell == "fish" else str(len(words))
    done = run(COMP_WORDS=" ".join(["vplan", *words]), COMP_CWORD=at, _VPLAN_COMPLETE=f"{shell}_complete")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["est"], ["estimate"]),
        (["suggest", "flux.2-k"], ["flux.2-klein-4b", "flux.2-klein-9b"]),
        (["suggest", "--model", "cogvideox1"], ["cogvideox1.5-5b", "cogvideox1.5-5b-i2v"]),
        (["suggest", "--gpu", "rtx40"], ["rtx4090"]),
        (["check", "--gpu", "2x24"], ["2x24GB"]),
        (["train", "--gradient-checkpointing", "p"], ["partial"]),
        (["train", "--timestep-sampling", "l"], ["logit_normal"]),
        (["estimate", "--swap"], ["--swap-blocks"]),
        (["models", "mochi"], ["mochi-1"]),
        (["gpus", "rtx-a5"], ["rtx-a5000"]),
        (["export", "plan.toml", "--to", "mus"], ["musubi-tuner"]),
    ],
)
def test_shells_complete_models_cards_and_choices(words: list[str], known: list[str]) -> None:
    assert set(known) <= {line.partition(",")[2] for line in completed(*words)}


def test_shells_complete_files(tmp_path: Path) -> None:
    assert completed("check", "--from-file", "tr") == ["file,tr"] == completed("check", "tr")
    for name in ("plan.toml", "plan.txt"):
        (tmp_path / name).write_text("")
    assert completed("train", f"{tmp_path}/pl") == [f"plain,{tmp_path}/plan.toml"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str, tmp_path: Path) -> None:
    script = run(_VPLAN_COMPLETE=f"{shell}_source").stdout
    assert f"_VPLAN_COMPLETE={shell}_complete" in script
    if shell != "bash":
        assert "flux.1-dev" in "\n".join(completed("models", "flux.1", shell=shell))
        return
    program = tmp_path / "vplan"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(vplan.command())} "$@"\n')
    program.chmod(0o755)
    lines = f"COMP_WORDS=(vplan models mochi); COMP_CWORD=2; _vplan_completion {program}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{lines}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mochi-1"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["models", "wan2.1-t2v-14b"], ["Wan2.1 T2V 14B", "14.29 B", "480x832", "umt5-xxl", "4n+1", "Apache-2.0"]),
        (["gpus", "4090"], ["GeForce RTX 4090", "23.50 GiB", "23.99 GiB", "ada"]),
        (["gpus", "24GB"], ["rtx4090", "rtx3090", "a10g"]),
    ],
)
def test_a_name_shows_one(words: list[str], facts: list[str]) -> None:
    page = run(*words, COLUMNS="80").stdout
    assert all(fact in page for fact in facts) and max(map(len, page.splitlines())) <= 80
    entries = json.loads(run(*words, "--json").stdout)[words[0]]
    assert len(entries) == 1 or words == ["gpus", "24GB"]
    if words == ["gpus", "24GB"]:
        assert {entry["class_gb"] for entry in entries} == {24}


def test_estimate_without_options_points_to_suggest() -> None:
    words = ["estimate", "wan2.1-t2v-1.3b", "--gpu", "24GB", "--frames", "9"]
    (line,) = (line for line in run(*words).stdout.splitlines() if "vplan suggest" in line)
    pointed = shlex.split(line.partition(": ")[2])
    assert pointed[:3] == ["vplan", "suggest", "wan2.1-t2v-1.3b"] and "--frames" in pointed
    assert "vplan suggest" not in run(*words, "--gradient-checkpointing", "full").stdout


def test_what_is_written_is_said_and_nothing_of_others_is_overwritten(tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.toml", tmp_path / "page.html"
    words = ["estimate", "sd1.5", "--gpu", "24GB", "-o", str(plan)]
    for _ in range(2):  # a plan of ours is replaced
        assert f"wrote {plan}" in run(*words).stderr
    (tmp_path / "kept.toml").write_bytes(plan.read_bytes())
    for path, again in ((plan, words), (page, ["estimate", str(tmp_path / "kept.toml"), "--report", str(page)])):
        path.write_text("[tool]\nname = 'mine'\n")
        refused = run(*again, code=1).stderr
        assert f"{path.name}' exists and is no" in refused and "--force" in refused
        assert "mine" in path.read_text()
        assert f"wrote {path}" in run(*again, "--force").stderr
        assert "mine" not in path.read_text()
    page.write_text(page.read_text().replace("</html>", "</html><!-- older -->"))
    assert f"wrote {page}" in run("report", str(plan), "-o", str(page)).stderr  # a page of ours is, too
    assert "older" not in page.read_text()


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
    """The command's own; 1 for a bad value; 2 for a missing argument. Under --json both are objects."""
    plain, as_json = CliRunner().invoke(cli, ["ask", *words]), CliRunner().invoke(cli, ["ask", "--json", *words])
    assert (plain.exit_code, as_json.exit_code) == (code, code)
    if code == 3:
        assert json.loads(as_json.stdout) == {"schema": 1, "frames": 81}
    else:
        assert plain.stderr.startswith("error: ")
        assert plain.stdout == ""
        error = json.loads(as_json.stdout)
        assert (list(error), list(error["error"])) == (["schema", "error"], ["message", "fix"])
        assert error["schema"] == 1 and not as_json.stderr


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
    """Without COLUMNS, nothing is wrapped at 80 columns as if there were a terminal."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    page = subprocess.run(vplan.command(verb), env=environment, capture_output=True, text=True, check=True).stdout
    answer = json.loads(run(verb, "--json").stdout)[verb]
    for entry in answer:
        (line,) = (line for line in page.splitlines() if f" {entry['name']} " in f" {line} ")
        assert verb == "gpus" or line.rstrip().endswith("x".join(map(str, entry["shape"]["resolutions"][-1])))


FULL = Path("/dev/full")
"""A full disk, as a device of Linux."""


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
    ("words", "code"), [(["models", "--jsn"], 2), (["estimate", "flux-dev", "--gpu", "zz", "--json"], 1)]
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
    """`vplan --help` and typos answer immediately: importing pydantic and rich alone takes as long as everything
    else."""
    source = "import sys, vplan; vplan.main(['--help']); print('HEAVY', *{'pydantic', 'rich'} & set(sys.modules))"
    assert python(source).splitlines()[-1] == "HEAVY"


def test_errors_are_json_when_json_was_asked() -> None:
    """A damaged profile is the only wrong input these verbs can have, so the test simulates one."""
    source = (
        "import sys, vplan, planner.catalog.card_lookup\n"
        "from planner.errors import VplanError\n"
        "def damaged(*_): raise VplanError('gpus.toml line 3 is damaged', 'reinstall vplan')\n"
        "planner.catalog.card_lookup.gpu_names = damaged\n"
        "assert vplan.main(['gpus', '--json']) == 1\n"
        "assert vplan.main(['gpus']) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    error = {"message": "gpus.toml line 3 is damaged", "fix": "reinstall vplan"}
    assert json.loads(done.stdout) == {"schema": 1, "error": error}
    assert done.stderr == "error: gpus.toml line 3 is damaged\nfix: reinstall vplan\n"


@pytest.mark.parametrize("model", ["qwen-image-edit", "ltx-2", "wan2.2-animate-14b"])
def test_what_cannot_be_encoded_is_refused_before_it_is_planned(model: str, tmp_path: Path) -> None:
    said = ["--gpu", "80GB", "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--weights", str(tmp_path)]
    refused = run("train", model, *said, code=1)
    assert "cannot encode" in refused.stderr and "entries.jsonl" in refused.stderr
    assert not (tmp_path / "out").exists()
    listed = {entry["name"]: entry["data"] for entry in json.loads(run("models", "--json").stdout)["models"]}
    assert listed[model] == "encoded" and listed["wan2.1-t2v-1.3b"] == "files"
