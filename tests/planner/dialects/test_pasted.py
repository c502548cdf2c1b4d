"""Commands as people paste them: notebooks, cmd.exe, PowerShell, a command in quotes, `cd` before a bare script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner import dialects
from planner.commands import cli
from planner.dialects.base.pasted import as_posix
from planner.dialects.base.script import from_file, from_words
from planner.errors import VplanError
from planner.foreign.case import read_case

FLAGS = "--task t2v-14B --dit wan2.1_t2v_14B.safetensors --sdpa --network_module networks.lora_wan --network_dim 32"
WAN = f"src/musubi_tuner/wan_train_network.py {FLAGS}"
LAUNCH = f"accelerate launch --mixed_precision bf16 {WAN}"
BAT = f"""@echo off
call venv\\Scripts\\activate
set CUDA_VISIBLE_DEVICES=0,1
accelerate launch --mixed_precision bf16 E:\\Musubi\\musubi-tuner\\src\\musubi_tuner\\wan_train_network.py ^
 --fp8_base^
 {FLAGS}
"""
PS1 = f"""$env:CUDA_VISIBLE_DEVICES = "0,1"
& .\\venv\\Scripts\\python.exe -m accelerate.commands.launch --mixed_precision bf16 `
  src\\musubi_tuner\\wan_train_network.py --fp8_base `
  {FLAGS}
"""
ASSIGNED = """$env:CUDA_VISIBLE_DEVICES = "0,1"
$weights = "wan2.1_t2v_14B.safetensors"
$rank=32
$opts = @("--task", 't2v-14B',
  "--sdpa", "--fp8_base", "--network_module", "networks.lora_wan")
accelerate launch --mixed_precision bf16 .\\src\\musubi_tuner\\wan_train_network.py `
  @opts --dit $weights --network_dim $rank
"""
CELL = f"%%bash\nexport CUDA_VISIBLE_DEVICES=0,1\ncd /content/musubi-tuner\n{LAUNCH} --fp8_base\n"
LINES = f"%env CUDA_VISIBLE_DEVICES=0,1\n%cd /content/musubi-tuner\n!{LAUNCH} \\\n  --fp8_base\n"


@pytest.mark.parametrize(
    ("name", "text"), [("a.bat", BAT), ("a.ps1", PS1), ("b.ps1", ASSIGNED), ("cell.sh", CELL), ("lines.txt", LINES)]
)
def test_a_command_of_another_shell_is_the_same_command(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    script = from_file(tmp_path / name)
    dialect, given = dialects.read_script(script)
    assert dialect.name == "musubi-tuner" and given.unknown == ()
    assert (given.settings["--fp8_base"], given.settings["--network_dim"]) == (True, 32)
    assert given.settings["--dit"] == "wan2.1_t2v_14B.safetensors"
    assert script.programs[-1].script.endswith("src/musubi_tuner/wan_train_network.py")
    assert script.programs[-1].visible == 2


def test_a_notebook_is_read_by_its_shell_lines(tmp_path: Path) -> None:
    python = ["x = 'it\"s'\n", "print(x)\n", *(f"{line}\n" for line in LINES.splitlines()), "y = (1"]
    cells = [{"cell_type": "markdown", "source": ["!rm it's"]}, {"cell_type": "code", "source": python}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    dialect, given = dialects.read_script(from_file(tmp_path / "a.ipynb"))
    assert (dialect.name, given.settings["--fp8_base"]) == ("musubi-tuner", True)
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(VplanError, match="is not a notebook"):
        from_file(tmp_path / "a.ipynb")


def test_what_a_posix_shell_escapes_is_left_alone() -> None:
    text = 'accelerate launch \\\n  train.py --prompt a\\ b --name "a\\"b" --pattern \\$x \'\\d\'\n'
    assert as_posix(text) == text


def test_a_command_in_one_pair_of_quotes_is_split() -> None:
    whole, apart = from_words([LAUNCH]), from_words(LAUNCH.split())
    assert whole.programs == apart.programs
    answer = CliRunner().invoke(cli, ["check", "--gpu", "80GB", "--json", "--", f"{LAUNCH} --gradient_checkpointing"])
    assert answer.exit_code in (0, 3) and json.loads(answer.stdout)["trainer"] == "musubi-tuner"


def test_a_path_with_backslashes_is_a_path() -> None:
    (program,) = from_words(["accelerate.exe", "launch", "E:\\Musubi\\src\\musubi_tuner\\hv_train_network.py"]).programs
    assert program.script == "E:/Musubi/src/musubi_tuner/hv_train_network.py"


@pytest.mark.parametrize("folder", ["DiffSynth-Studio/examples/wanvideo", "/root/DiffSynth-Studio", "$HOME/x"])
def test_a_bare_script_behind_cd_is_its_trainers(folder: str, tmp_path: Path) -> None:
    flags = "--task train --train_architecture lora --dit_path models/Wan-AI/Wan2.1-T2V-1.3B/x.safetensors"
    (tmp_path / "a.sh").write_text(f"cd {folder}\npython train_wan_t2v.py {flags}\n")
    dialect, _ = dialects.read_script(from_file(tmp_path / "a.sh"))
    assert dialect.name == "diffsynth@2025-03"


@pytest.mark.parametrize(
    "command",
    [f"{LAUNCH} --network_dropout 0.1",
     "accelerate launch --mixed_precision bf16 flux_train_network.py --network_module networks.lora_flux"
     " --pretrained_model_name_or_path flux1-dev.safetensors --network_dim 8 --network_dropout 0.1"],
)  # fmt: skip
def test_dropout_of_adapters_is_told_and_left_out(command: str, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"{command} --fp8_base --gradient_checkpointing\n")
    case = read_case(*dialects.read_script(from_file(tmp_path / "a.sh")), {}, {"gpu": "80GB"})
    assert case.translation.job["lora_dropout"] == 0.1 and case.job.lora_dropout == 0
    assert any("LoRA dropout 0.1" in note for note in case.notes)
