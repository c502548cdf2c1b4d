"""planner/untrusted: files that are small and make much work are refused before the work is done."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.untrusted import MAX_DEPTH, MAX_LINE_BYTES, parse, read_bytes, read_document, read_lines, read_text

CPU_SECONDS, MEMORY_BYTES = 10, 2 << 30


def merges(levels: int, width: int) -> str:
    """Tables that each merge the one before several times."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level}\n  <<: [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


BOMBS = {
    "merges.yaml": merges(17, 4),
    "aliases.yaml": "a: &a [x, x]\n" + "\n".join(f"{name}: &{name} [*{last}, *{last}]" for last, name in
                                               zip("abcdefghijklmnopqrstuvw", "bcdefghijklmnopqrstuvwx", strict=True)),
    "long_text.yaml": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 30_000)}]\n",
    "itself.yaml": "a: &a\n  b: *a\n",
    "sixties.yaml": "a: " + ":".join(["1"] * 100_000),
    "dotted.toml": ".".join(["a"] * 60_000) + " = 1\n",
    "dotted_within.toml": "x = { " + " . ".join(['"a"'] * 60_000) + " = 1 }\n",
    "dotted_table.toml": "[" + ".".join(["a"] * 60_000) + "]\n",
    "digits.toml": f"a = {'9' * 5000}\n",
    "hexadecimal.toml": f"a = 0x{'f' * 5000}\n",
    "hexadecimal.yaml": f"0x{'f' * 5000}: 1\n",
    "digits.json": f'{{"a": {"9" * 5000}}}',
    "nested.json": '{"a":' * 5000 + "1" + "}" * 5000,
}  # fmt: skip


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_unfolds_to_a_large_one_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(BOMBS[name])
    read = (
        "import sys, pathlib; from planner.untrusted import read_document; from planner.errors import VplanError\n"
        "try:\n    read_document(pathlib.Path(sys.argv[1]))\nexcept VplanError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", read, path], preexec_fn=_limit, capture_output=True, text=True)
    assert done.returncode == 0 and name in done.stdout, done.stderr[-500:]
    assert len(done.stdout) < 500


def test_merge_keys_and_aliases_of_ordinary_configs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("base: &base {rank: 16, size: &size [480, 832]}\nlora:\n  <<: *base\n  rank: 32\nother: *size\n")
    assert read_document(path) == {
        "base": {"rank": 16, "size": [480, 832]},
        "lora": {"rank": 32, "size": [480, 832]},
        "other": [480, 832],
    }


def test_dotted_keys_of_as_many_parts_as_there_are_levels_are_read() -> None:
    within = parse(".".join(["a"] * MAX_DEPTH) + " = 1", "toml", "deep.toml")
    for _ in range(MAX_DEPTH):
        within = within["a"]
    assert within == 1
    text = "a = '" + ".".join(["b"] * 100) + "'"
    assert parse(text, "toml", "text.toml") == {"a": ".".join(["b"] * 100)}
    with pytest.raises(VplanError, match="nested too deeply"):
        parse(".".join(["a"] * (MAX_DEPTH + 1)) + " = 1", "toml", "deep.toml")


def test_a_file_is_read_to_its_bound_whatever_it_claims_to_hold(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"1234")
    assert read_bytes(path, 4) == b"1234"
    with pytest.raises(ValueError, match="more than"):
        read_bytes(path, 3)
    with pytest.raises(ValueError, match="more than"):
        read_bytes(Path("/dev/zero"))
    with pytest.raises(ValueError, match="device"):
        next(read_lines(Path("/dev/zero")))
    with pytest.raises(VplanError, match="it has more than"):  # its size is said to be 0
        read_text(Path("/proc/kallsyms"), 10)


def test_a_line_without_end_is_cut_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"first\n" + b"x" * (3 * MAX_LINE_BYTES + 5) + b"\nlast")
    first, long, last = read_lines(path)
    assert (first, last) == (b"first\n", b"last")
    assert long == b"x" * MAX_LINE_BYTES


ENDLESS = {
    "preflight": ("preflight", "/dev/zero"),
    "train": ("train", "/dev/zero", "--data", ".", "--output", "out"),
    "probe": ("probe", "/dev/zero"),
    "export": ("export", "/dev/zero", "--to", "musubi-tuner", "-o", "out"),
    "report": ("report", "/dev/zero", "-o", "out.html"),
    "accuracy": ("accuracy", "/dev/zero"),
    "grid": ("calibrate", "--grid", "/dev/zero", "-o", "rows.jsonl", "--dry-run"),
    "rows": ("probe", "plan.toml", "-o", "/dev/zero"),
    "check": ("check", "--from-file", "/dev/zero", "--gpu", "24GB"),
    "digits in a plan": ("preflight", "digits.toml"),
    "hexadecimal digits in a plan": ("preflight", "hexadecimal.toml"),
    "dotted key in a plan": ("preflight", "dotted.toml"),
    "dotted key in a grid": ("calibrate", "--grid", "dotted.toml", "-o", "rows.jsonl"),
    "command in quotes": ("check", "accelerate launch train.py " + "--a b " * 100, "--gpu", "24GB"),
    "name without spaces": ("check", "x" * 3000, "--gpu", "24GB"),
    "name of a report's plan": ("report", "x" * 3000),
    "name of a run": ("watch", "x" * 3000),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_every_command_refuses_what_has_no_end_in_one_line(case: str, tmp_path: Path) -> None:
    for name in ("digits.toml", "hexadecimal.toml", "dotted.toml"):
        (tmp_path / name).write_text("schema = 1\n" + BOMBS[name])
    command = [sys.executable, "-m", "vplan", *ENDLESS[case]]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, preexec_fn=_limit, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (1, 2), done.stderr[-500:]
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 2, done.stderr[-500:]
    assert len(done.stderr) < 1000


@pytest.mark.parametrize(
    ("text", "kind", "fault", "fix"),
    [
        ("a: 1\nb: [1, 2\nc\n", "yaml", "(at its end, line 3)", "what begins in line 2 is left open, or the file"),
        ("a: 1\nb: [1, 2\nc: 3\n", "yaml", "(line 3, column 2)", "correct line 3, or what begins in line 2"),
        ("a: 1\n b: 2\n", "yaml", "(line 2, column 3)", "correct line 2"),
        ('a: 1\nb: "x\n\n\n', "yaml", "(at its end, line 2)", "what begins in line 2 is left open"),
        ('{"a": 1\n', "json", "(at its end, line 1)", "something is left open, or the file is cut off: complete it"),
        ('{"a": 1\n\n\n', "json", "(at its end, line 1)", "something is left open"),
        ('{"a": 1,}\n', "json", "(line 1, column 9)", "correct line 1"),
        ('{\n"a" 1}', "json", "(line 2, column 5)", "correct line 2"),
        ("a = 1\nb = [1, 2\n", "toml", "unclosed array (at its end, line 2)", "something is left open"),
        ("a = 1\nb = = 2\nc = 3\n", "toml", "invalid value (line 2, column 5)", "correct line 2"),
        ("", "json", "(at its end, line 1)", "something is left open"),
    ],
)
def test_the_place_of_a_fault_is_a_line_of_the_file(text: str, kind: str, fault: str, fix: str) -> None:
    with pytest.raises(VplanError) as raised:
        parse(text, kind, "a")
    assert raised.value.message.endswith(fault) and raised.value.fix.startswith(fix.split(", or the file")[0])
    assert fix in raised.value.fix and "at end of document" not in raised.value.message
