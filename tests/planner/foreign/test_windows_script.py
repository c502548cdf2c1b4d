"""Exports for Windows: batch files that say what the shell scripts say."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner import dialects
from planner.commands import cli
from planner.dialects.base.launchers import ALLOCATOR, NEW_ALLOC_CONF
from planner.dialects.base.script import from_file
from planner.foreign.windows_script import batch_file

MODELS = {
    "accelerate": "sdxl",
    "ai-toolkit": "sdxl",
    "diffusers": "sdxl",
    "diffusion-pipe": "flux.1-dev",
    "diffsynth": "wan2.1-t2v-1.3b",
    "easyanimate": "easyanimate-v5.1-7b",
    "latentsync": "latentsync-1.6-stage1",
    "musubi-tuner": "wan2.1-t2v-1.3b",
    "sd-scripts": "sdxl",
    "simpletuner": "flux.1-dev",
    "videox-fun": "wan2.1-t2v-1.3b",
}


def written(folder: Path, trainer: str, system: str) -> dict[str, Any]:
    words = [
        "suggest",
        MODELS[trainer],
        "--gpu",
        "40GiB",
        "--for",
        trainer,
        "-o",
        str(folder),
        "--os",
        system,
        "--json",
    ]
    done = CliRunner().invoke(cli, [*words, "--reserve", "0"])
    assert done.exit_code == 0, done.output
    return {Path(path).name: Path(path) for path in json.loads(done.stdout)["files"]}


@pytest.mark.parametrize("trainer", MODELS)
def test_windows_gets_a_batch_file_that_reads_as_the_shell_script_does(trainer: str, tmp_path: Path) -> None:
    batch, shell = written(tmp_path / "w", trainer, "windows"), written(tmp_path / "l", trainer, "linux")
    scripts = [name for name in shell if name.endswith(".sh")]
    assert scripts and not any(name.endswith(".sh") for name in batch)
    for name in scripts:
        path = batch[name.replace(".sh", ".bat")]
        text = path.read_bytes().decode()
        assert text.startswith("@echo off\r\n") and "\n" not in text.replace("\r\n", "")
        assert "\\\r\n" not in text and "export " not in text and "#" not in text
        if trainer in ("accelerate", "diffsynth"):  # the first starts no script of its own, the second two
            continue
        _, given = dialects.read_script(from_file(path))
        _, expected = dialects.read_script(from_file(shell[name]))
        assert given.settings == {k: v for k, v in expected.settings.items() if k != "env:expandable_segments"}


def test_words_and_lines_are_cmds() -> None:
    script = "\n".join(
        [
            "#!/bin/bash",
            "# What follows: 100 % of it",
            "set -e",
            "export A=b%c NAME='d e'  # why",
            "python cache.py \\",
            "  --path 'C:\\models\\my file.safetensors' \\",
            "  --args 'exclude_patterns=[r'\"'\"'.*ffn.*'\"'\"']' '{\"a\": 1}'",
            'accelerate launch "$@"',
        ]
    )
    assert batch_file(script).splitlines() == [
        "@echo off",
        "rem What follows: 100 % of it",
        'set "A=b%%c"',
        'set "NAME=d e"',
        "python cache.py ^",
        '  --path "C:\\models\\my file.safetensors" ^',
        '  --args "exclude_patterns=[r\'.*ffn.*\']" "{\\"a\\": 1}" || exit /b 1',
        "accelerate launch %* || exit /b 1",
    ]


def test_a_program_on_windows_gets_the_same_words() -> None:
    """By the rules of Microsoft's C library, which the standard library writes and shlex almost reads."""
    words = ["a b", "x=1", "c'd", "1,2", "(e)"]
    line = batch_file(f"run {shlex.join(words)}").splitlines()[1].removesuffix(" || exit /b 1")
    assert shlex.split(line) == ["run", *words]
    assert subprocess.list2cmdline(words).count('"') < line.count('"')


OLD = "PYTORCH_CUDA_ALLOC_CONF"
BAT = """@echo off
set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
accelerate launch sdxl_train_network.py ^
  --network_module networks.lora --gradient_checkpointing --cache_latents --sdpa ^
  --resolution 1024,1024 --mixed_precision bf16 --train_data_dir D:\\data
"""


@pytest.mark.parametrize(
    ("name", "torch", "expandable"),
    [(NEW_ALLOC_CONF, "2.9", False), (NEW_ALLOC_CONF, "2.10", True), (OLD, "2.9", True)],
)
def test_the_new_name_is_read_from_torch_2_10(name: str, torch: str, expandable: bool, tmp_path: Path) -> None:
    script = BAT.removeprefix("@echo off\n").replace("D:\\data", "data").replace("^", "\\")
    script = script.replace("set PYTORCH_CUDA_ALLOC_CONF", f"export {name}")
    (tmp_path / "train.sh").write_text(script)
    words = ["check", str(tmp_path / "train.sh"), "--gpu", "12GB", "--torch", torch, "--json"]
    found = json.loads(CliRunner().invoke(cli, words).stdout)
    assert found["strategy"]["expandable_segments"] is expandable
    assert [each["flag"] for each in found["ineffective"]] == ([] if expandable else [name])


@pytest.mark.parametrize(("system", "expandable"), [("windows", False), ("wsl", True)])
def test_expandable_segments_do_nothing_on_windows(system: str, expandable: bool, tmp_path: Path) -> None:
    """torch warns and goes on (c10/cuda/CUDAAllocatorConfig.h): it is no reason to refuse a command."""
    (tmp_path / "train.bat").write_text(BAT)
    words = ["check", str(tmp_path / "train.bat"), "--gpu", "12GB", "--os", system, "--json"]
    found = json.loads(CliRunner().invoke(cli, words).stdout)
    assert found["strategy"]["expandable_segments"] is expandable
    assert [each["flag"] for each in found["ineffective"]] == ([] if expandable else [ALLOCATOR])
