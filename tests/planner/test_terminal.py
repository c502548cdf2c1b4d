"""planner/terminal: names, keys and paths of other people's files are shown, and never steer the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner.evidence.published import shipped_own
from planner.terminal import console, plain

ROOT = Path(__file__).parents[2]
TITLE, RED, MARKUP = "\x1b]0;owned\x07", "\x1b[31;7mowned", "[red]owned[/no]"
HOSTILE = f"{TITLE}{RED}{MARKUP}\x9b2J\u202e"
SCRIPT = (
    "accelerate launch train_dreambooth_lora_flux.py --mixed_precision bf16 --resolution 512 "
    "--pretrained_model_name_or_path black-forest-labs/FLUX.1-dev"
)
CONFIG = {
    "job": "extension",
    HOSTILE: 1,
    "config": {
        "name": HOSTILE,
        "process": [
            {
                "type": "sd_trainer",
                HOSTILE: {HOSTILE: HOSTILE},
                "network": {"type": "lora", "linear": 32},
                "datasets": [{"folder_path": HOSTILE, "resolution": [1024], "batch_size": 1, HOSTILE: 1}],
                "train": {"dtype": "bf16", "optimizer": "adamw8bit", HOSTILE: HOSTILE},
                "model": {"name_or_path": "black-forest-labs/FLUX.1-dev", "arch": "flux", HOSTILE: 1},
            }
        ],
    },
}


def test_what_steers_is_written_out_and_what_is_read_stays() -> None:
    assert plain("lora, 4\xa0GiB\n\tdone: é 漢 🙂") == "lora, 4\xa0GiB\n\tdone: é 漢 🙂"
    assert plain(HOSTILE) == r"\x1b]0;owned\x07\x1b[31;7mowned[red]owned[/no]\x9b2J\u202e"
    assert plain("a\rb\x00\udcff") == r"a\rb\x00\udcff"


def on_a_terminal(folder: Path, *arguments: str) -> bytes:
    """What a command writes to a terminal that is its stdout and its stderr."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "VPLAN_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "vplan", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # nobody has it open any more
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait(60) in (0, 1, 2, 3, 5)
    assert b"Traceback" not in written, written[-2000:]
    return written


def without_colours(written: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


def plan_text(**job: object) -> str:
    fields = {"model": "wan2.1-t2v-1.3b", "method": "lora", "frames": 5, "height": 64, "width": 64, **job}
    beside = 'strategy = {}\nmachine = {gpu = "24GB"}\n'
    return f"schema = 1\n{beside}[job]\n" + "".join(f"{key} = {json.dumps(said)}\n" for key, said in fields.items())


COMMANDS = {
    "a key of a config": ("check", "config.yaml", "--gpu", "24GB"),
    "a flag of a command": ("check", "--gpu", "80GB", "--", *SCRIPT.split(), f"--x{HOSTILE}", "1"),
    "a model of a command": ("check", "--gpu", "80GB", "--", *SCRIPT.split()[:-1], HOSTILE),
    "a script's name": ("check", "--gpu", "80GB", "--", "python", f"{HOSTILE.replace('/', '')}.py"),
    "a file's name": ("check", f"{HOSTILE.replace('/', '')}.sh", "--gpu", "80GB"),
    "a path": ("preflight", HOSTILE),
    "a model": ("suggest", HOSTILE, "--gpu", "24GB"),
    "a card": ("suggest", "wan2.1-t2v-1.3b", "--gpu", HOSTILE),
    "an option": ("suggest", f"--{HOSTILE}"),
    "a plan's model": ("preflight", "plan.toml"),
    "a plan's field": ("preflight", "field.toml"),
    "a plan that is exported": ("export", "plan.toml", "--to", "musubi-tuner", "-o", "out"),
    "a row of measurements": ("accuracy", "rows.jsonl"),
    "a run": ("watch", HOSTILE.replace("/", "")),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_nothing_of_a_foreign_file_steers_the_terminal(case: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))  # JSON is YAML
    (tmp_path / "plan.toml").write_text(plan_text(model=HOSTILE))
    (tmp_path / "field.toml").write_text(plan_text() + f"{json.dumps(HOSTILE)} = 1\n")
    row = {
        "id": HOSTILE,
        "job": {"model": HOSTILE, "frames": 1, "height": 64, "width": 64},
        "strategy": {},
        "machine": {"gpu": "24GB"},
    }
    row |= {"measured": {"outcome": "ok"}, HOSTILE: 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    written = on_a_terminal(tmp_path, *COMMANDS[case])
    assert b"owned" in written, written  # shown, not left out
    for sequence in (TITLE, "\x1b[31;7m", "\x07", "\x9b", "\u202e"):
        assert sequence.encode() not in written, written


def test_accuracy_shows_how_far_it_is(tmp_path: Path) -> None:
    own = next(path for path in shipped_own() if "one-gpu" in str(path))
    rows = [line for line in Path(own).read_text().splitlines() if '"sd1.5"' in line]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    written = without_colours(on_a_terminal(tmp_path, "accuracy", "rows.jsonl").decode())
    assert rows and "estimating" in written
    assert re.search(r"learning from the others [^\n\r]* 100%", written), "and with what others measured"


def test_an_answer_outside_a_terminal_is_shown_as_text_too() -> None:
    """As `str` of an answer of `import vplan`, which a script prints, and its page in a notebook."""
    file = io.StringIO()
    shown = console(file=file, record=True, force_terminal=True, width=100)
    shown.print(HOSTILE)
    for text in (file.getvalue(), shown.export_html()):
        assert "owned" in text and not any(part in text for part in (TITLE, "\x07", "\x9b", "\u202e"))


def test_no_line_ends_in_a_blank() -> None:
    from rich.table import Table

    stream = io.StringIO()
    shown = console(file=stream, width=20)
    shown.print("assumed: a card; 81 frames; LoRA rank 16", style="dim")
    rows = Table(box=None)
    for name in ("plan", "GiB"):
        rows.add_column(name, width=9)
    rows.add_row("two words of it", "1")
    shown.print(rows)
    lines = stream.getvalue().splitlines()
    assert len(lines) > 4 and not [line for line in lines if line.endswith(" ")]
    assert " ".join(lines[:2]).startswith("assumed: a card; 81 frames;")
