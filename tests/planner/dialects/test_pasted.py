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


CMD = """@echo off
rem it's my card's script
:: don't edit
set "MODELS=D:\\\\AI"
set /a RANK=32
set DIT=%MODELS%\\wan2.1_t2v_14B.safetensors
cd /d %~dp0musubi-tuner
echo That's step 1
python src/musubi_tuner/wan_cache_latents.py --dataset_config a.toml ^
  --vae v.safetensors
if %ERRORLEVEL% NEQ 0 (
    echo Can't cache
    exit /b 1
)
accelerate launch src\\musubi_tuner\\wan_train_network.py ^
  --task t2v-14B --dit "%DIT%" ^
  --dataset_config "%~dp0set.toml" --network_dim !RANK! --blocks_to_swap %BLOCKS%
pause
"""


def test_cmd_s_variables_and_comments_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.bat").write_text(CMD.replace("\n", "\r\n"), newline="")
    script = from_file(tmp_path / "a.bat")
    words = script.programs[-1].arguments
    assert words[words.index("--dit") + 1] == "D:/AI/wan2.1_t2v_14B.safetensors"
    assert words[words.index("--network_dim") + 1] == "32"
    assert words[words.index("--dataset_config") + 1] == "set.toml"
    assert script.programs[-1].script == "musubi-tuner/src/musubi_tuner/wan_train_network.py"
    assert script.windows and "$BLOCKS not assigned in a.bat: taken as written" in script.notes


MARKED = [
    ("a.ps1", "accelerate launch {} --fp8_base `   # needed\n  --network_alpha 8 `\n  --seed 1\n"),
    ("b.sh", "accelerate launch {} --fp8_base \\  # it's needed\n  --network_alpha 8 \\ \n  --seed 1\n"),
    ("c.sh", 'accelerate launch {} --fp8_base --output_name "a # b" \\  # needed\n --network_alpha 8 # 8\n --seed 1\n'),
]


@pytest.mark.parametrize(("name", "text"), MARKED, ids=[name for name, _ in MARKED])
def test_a_comment_behind_a_flag_ends_no_command(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text.format(WAN))
    script = from_file(tmp_path / name)
    (program,) = script.programs
    assert program.arguments[-4:] == ("--network_alpha", "8", "--seed", "1")
    assert not {"`", "\\", " ", "#"} & set(program.arguments) and len(script.notes) == 1
    assert name == "a.ps1" or "a shell needs a \\ at the end" in script.notes[0]


def test_what_a_comment_between_flags_cuts_off_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        f"accelerate launch {WAN} \\\n  --fp8_base \\\n  # --seed 1 \\\n  --network_alpha 8\n"
    )
    script = from_file(tmp_path / "a.sh")
    assert script.programs[-1].arguments[-1] == "--fp8_base"
    assert script.notes == ("left out, as a shell ends the command at the comment above it: '--network_alpha 8'",)


def test_a_notebook_s_variables_stand_in_its_commands(tmp_path: Path) -> None:
    flags = f"{WAN.replace('t2v-14B', '$TASK').replace('32', '{RANK}')} --output_name {{NAME}}"
    cell = ["RANK = 16 #@param\n", "NAME = f'{x}'\n", "os.environ['TASK'] = \"t2v-14B\"\n", "a == 1\n"]
    cell.append(f"!accelerate launch {flags}")
    cells = [{"cell_type": "code", "source": cell}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    (program,) = from_file(tmp_path / "a.ipynb").programs
    assert program.arguments[:2] == ("--task", "t2v-14B")
    assert program.arguments[-4:] == ("--network_dim", "16", "--output_name", "{NAME}")


def test_a_command_is_found_in_a_post(tmp_path: Path) -> None:
    post = f"Hi, it's me. Here's what I run:\n\n  $ {LAUNCH} \\\n    --fp8_base\n\nIt doesn't fit, and I'm lost.\n"
    (tmp_path / "post.txt").write_text(post)
    script = from_file(tmp_path / "post.txt")
    (program,) = script.programs
    assert program.arguments[-1] == "--fp8_base"
    assert script.notes == ("a command among other text: the text is left out",)
    for text in (f"#!/bin/bash\necho it's\n{LAUNCH}\n", "it's prose\n"):
        (tmp_path / "a.sh").write_text(text)
        with pytest.raises(VplanError, match="never closed"):
            from_file(tmp_path / "a.sh")


OF_WINDOWS = [
    ("a.bat", BAT, True), ("a.ps1", PS1, True), ("a.sh", f"{LAUNCH}\n", False),
    ("b.sh", f"{LAUNCH} --vae s3://x\n", False),
    ("c.txt", f"{LAUNCH} --vae C:/models/vae.safetensors\n", True),
    ("a.json", '{"model_type": "FLUX_DEV_1", "concepts": [{"path": "D:\\\\data"}]}', True),
    ("b.json", '{"model_type": "FLUX_DEV_1", "url": "https://x.y/z"}', False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "windows"), OF_WINDOWS, ids=[name for name, _, _ in OF_WINDOWS])
def test_a_script_of_windows_is_priced_on_windows(name: str, text: str, windows: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert from_file(tmp_path / name).windows == windows
    if name.endswith(("json", "ps1")):
        return
    for typed in ([], ["--os", "linux"]):
        words = ["check", str(tmp_path / name), "--gpu", "1x80GB", "--no-fixes", "--json", *typed]
        answer = json.loads(CliRunner().invoke(cli, words).stdout)
        notes = " ".join(answer["estimate"]["assumptions"])
        for said in ("taken for Windows", "no expandable segments on Windows"):
            assert (said in notes) == (windows and not typed)


def test_a_batch_file_takes_the_files_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "set.toml").write_text('[general]\nresolution = [480, 320]\n[[datasets]]\nvideo_directory = "v"\n')
    (tmp_path / "a.bat").write_text(BAT.rstrip() + " --dataset_config D:\\sets\\set.toml\n")
    words = ["check", str(tmp_path / "a.bat"), str(tmp_path / "set.toml"), "--gpu", "80GB", "--no-fixes", "--json"]
    answer = json.loads(CliRunner().invoke(cli, words).stdout)
    assert (answer["job"]["height"], answer["job"]["width"]) == (320, 480)


JOB = f"""#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:{{}}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((29500 + SLURM_JOB_ID % 1000))
srun accelerate launch --num_processes 4 --main_process_ip $MASTER_ADDR --main_process_port $PORT {WAN}
"""


def test_what_only_a_shell_could_say_is_one_word(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(JOB.format("a100:4"))
    (program,) = from_file(tmp_path / "job.sbatch").programs
    assert (program.script, program.gpus) == ("src/musubi_tuner/wan_train_network.py", 4)
    assert program.launch["--main_process_port"] == "$((29500 + SLURM_JOB_ID % 1000))"


@pytest.mark.parametrize(
    ("asked", "fix"),
    [("a100:4", "asks Slurm for 4xa100: use one of a100-40gb"), ("h100:2", "pass --gpu 2xh100, which"), ("4", "80GB")],
)
def test_the_card_that_a_job_asks_for_is_offered(asked: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(JOB.format(asked))
    answer = CliRunner().invoke(cli, ["check", str(tmp_path / "job.sbatch")])
    assert answer.exit_code == 2 and fix in answer.output


def test_the_command_in_a_gui_s_log_is_read(tmp_path: Path) -> None:
    text = f"14:37:32-5 INFO     Start training ...\n14:37:33-1 INFO  Executing command: {{}} {WAN} with shell=False\n"
    for launcher in ("C:\\kohya\\venv\\Scripts\\accelerate.EXE launch", "/v/bin/accelerate launch"):
        (tmp_path / "log.txt").write_text(text.format(launcher))
        (program,) = from_file(tmp_path / "log.txt").programs
        assert (program.launcher, program.script) == ("accelerate", "src/musubi_tuner/wan_train_network.py")
        assert program.arguments[-2:] == ("--network_dim", "32")


def test_of_two_trainings_the_last_is_read_and_that_is_said(tmp_path: Path) -> None:
    cached = "python src/musubi_tuner/wan_cache_latents.py --dataset_config a.toml"
    for commands, said in (([cached, LAUNCH], False), ([LAUNCH, f"{LAUNCH} --fp8_base"], True)):
        (tmp_path / "a.sh").write_text("\n".join(commands))
        _, given = dialects.read_script(from_file(tmp_path / "a.sh"))
        assert any("2 commands of this trainer in a.sh: the last one" in note for note in given.notes) == said
    assert given.settings["--fp8_base"] is True
