"""planner/untrusted: files that are small and make much work are refused before the work is done."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.untrusted import MAX_DEPTH, parse, read_document

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
