"""Commands behind others: a batch system, containers, environments and `bash -c`; and how many cards they count."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from planner.dialects.base.launchers import launch_settings
from planner.dialects.base.script import NoCommandError, PythonCommand, from_file, from_words
from planner.errors import VplanError

LAUNCH = "accelerate launch --num_processes 8 train.py --a 1"
BEHIND = [
    "srun",
    "srun -N1 --ntasks=1 --gres gpu:8 -l --container-image=a.sqsh --export=ALL,A=1 --",
    "time srun --kill-on-bad-exit=1",
    "apptainer exec --nv -B /data:/data img.sif",
    "singularity exec --nv --bind /a,/b -H /home/me /img/a.sif",
    "docker run --gpus all -it --rm --ipc=host -v /a:/a nvcr.io/nvidia/pytorch:25.01-py3",
    "sudo -E docker exec -w /work box",
    "docker compose run --rm trainer",
    "docker run --entrypoint nice img -n 5",
    "podman run --device nvidia.com/gpu=all img",
    "conda run -n env --no-capture-output",
    "uv run --python 3.11 --with torch --frozen",
    "nohup nice -n 10 timeout -k 5 1h stdbuf -oL",
    "CUDA_VISIBLE_DEVICES=0 env -u A B=1 numactl --cpunodebind=0 -m 0 taskset -c 0-7",
]


def programs(folder: Path, text: str) -> tuple[PythonCommand, ...]:
    (folder / "a.sh").write_text(text)
    return from_file(folder / "a.sh").programs


@pytest.mark.parametrize("wrapper", BEHIND)
def test_what_a_wrapper_starts_is_read(wrapper: str, tmp_path: Path) -> None:
    for text in (f"{wrapper} {LAUNCH}", f"{wrapper} bash -lc '{LAUNCH}'", f"{wrapper} sh -eo pipefail -c '{LAUNCH}'"):
        for program in (*programs(tmp_path, text), *from_words(shlex.split(text)).programs):
            assert (program.launcher, program.gpus, program.script) == ("accelerate", 8, "train.py")
            assert program.arguments == ("--a", "1")
        assert len(programs(tmp_path, text)) == 1


def test_variables_of_a_container_are_the_command_s(tmp_path: Path) -> None:
    options = "-e CUDA_VISIBLE_DEVICES=0,1 --env=PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    text = f'RANK=4\ndocker run {options} img bash -c "cd trainer && {LAUNCH} --rank $RANK"\n'
    (program,) = programs(tmp_path, text)
    assert (program.visible, program.script) == (2, "trainer/train.py")
    assert program.environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert program.arguments[-2:] == ("--rank", "4")


def test_an_option_that_is_not_known_is_told_and_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="what 'docker run' starts is not clear: whether its '--unheard'"):
        programs(tmp_path, f"docker run --unheard of img {LAUNCH}")
    # Beside a command that is clear it is somebody else's.
    (program,) = programs(tmp_path, f"docker run --unheard of postgres\n{LAUNCH}\n")
    assert program.script == "train.py"
    with pytest.raises(NoCommandError, match="starts no Python script"):
        programs(tmp_path, "docker build --build-arg A=1 .\ndocker run img\nbash -c\n")


COUNTS = [
    "$(nvidia-smi -L | wc -l)",
    "$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)",
    "$(nvidia-smi -L | grep -c GPU | wc -l)",
    "$(python -c 'import torch; print(torch.cuda.device_count())')",
]


@pytest.mark.parametrize("count", COUNTS)
def test_a_count_of_cards_is_the_machine_s(count: str, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f'N={count}\naccelerate launch --num_processes "$N" train.py\n')
    script = from_file(tmp_path / "a.sh")
    (program,) = script.programs
    settings, notes = launch_settings(program, script, {})
    assert program.gpus is None and "gpus" not in settings and "launch:--num_processes" not in settings
    assert notes == ["--num_processes counts the machine's cards: as many as --gpu or --gpus says"]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("torchrun --nproc_per_node $N", "--nproc_per_node is $N, which is not known here: as many as --gpu or --gpus"),
        ("torchrun --nproc-per-node=gpu", "--nproc_per_node counts the machine's cards: as many as --gpu or --gpus"),
        (
            "accelerate launch --num_machines $((2 * N))",
            "--num_machines is $((2 * N)), which is not known here: as many",
        ),
    ],
)
def test_a_count_that_only_its_shell_knows_is_told_by_flags(words: str, note: str, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"CUDA_VISIBLE_DEVICES=0,1,2 {words} train.py\n")
    script = from_file(tmp_path / "a.sh")
    settings, (told,) = launch_settings(script.programs[0], script, {})
    assert told.startswith(note) and settings == {"visible": 3}


def test_what_is_no_number_is_no_count(tmp_path: Path) -> None:
    (program,) = programs(tmp_path, "torchrun --nproc_per_node many train.py")
    with pytest.raises(VplanError, match="is not a count"):
        assert program.gpus


def test_what_a_script_is_given_is_nothing(tmp_path: Path) -> None:
    text = f'ARGS=(\n  --b "$B"\n  --c\n)\n{LAUNCH} "${{ARGS[@]}}" "$@" $*\n'
    (tmp_path / "a.sh").write_text(text)
    script = from_file(tmp_path / "a.sh")
    assert script.programs[0].arguments == ("--a", "1", "--b", "$B", "--c")
    assert script.notes == ("$B not assigned in a.sh: taken as written",)
