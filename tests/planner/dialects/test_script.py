"""planner/shell, script and documents: a pasted command as words, and files that are no scripts; nothing of it runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.commands import cli
from planner.dialects.base.script import from_file, from_words
from planner.dialects.base.shell import commands
from planner.errors import VplanError
from planner.untrusted import read_document

SHELL = r"""#!/bin/bash
declare -x DATA="/data/my set" N=3
ARGS=(--a "b c" # of words
  --n $N)
FLAGS="--x 1"
CUDA_VISIBLE_DEVICES=0,1 accelerate launch --mixed_precision="bf16" \
  train.py --data=$DATA "${ARGS[@]}" $FLAGS --q '$N' --d ${NONE:-81} --u $UNSET --e "" 2>&1 | tee log.txt
if [ -z "$N" ]; then echo no; fi && python -m pkg.mod --t "--not a flag" > out.txt &
cat > c.toml <<'END'
python from_the_text.py
END
now=$(date +"%s")
"""


def test_words_are_those_that_a_shell_would_give() -> None:
    lines, variables = commands(SHELL)
    first, last = lines[0], next(line for line in lines if line.words[0] == "python")
    assert first.words[:4] == ("accelerate", "launch", "--mixed_precision=bf16", "train.py")
    assert first.words[4:] == (
        *("--data=/data/my", "set", "--a", "b c", "--n", "3", "--x", "1"),
        *("--q", "$N", "--d", "81", "--u", "$UNSET", "--e", ""),
    )
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert last.words == ("python", "-m", "pkg.mod", "--t", "--not a flag")
    assert not any("from_the_text.py" in line.words for line in lines)
    assert "UNSET" in variables.unset and variables.values["now"] == ['$(date +"%s")']


def test_a_placeholder_is_named_and_no_redirection() -> None:
    with pytest.raises(VplanError) as refusal:
        commands("python train.py --dit <CACHE_DIR>/wan.safetensors --data <path to config.toml> --cache <CACHE_DIR>")
    assert refusal.value.message == "the command has placeholders: <CACHE_DIR>, <path to config.toml>"
    assert "put your own values" in refusal.value.fix
    (line,), _ = commands('python train.py --prompt "a <sks> dog" <in.txt >out.txt # <here>')
    assert line.words == ("python", "train.py", "--prompt", "a <sks> dog")


def test_a_loop_is_read_once_and_eval_as_a_shell_reads_it() -> None:
    """`a b` in quotes is one word behind `eval`, and an `eval` of an `eval` stays as it is written."""
    lines, variables = commands(
        'for rate in 1e-4 "1e-3"; do\n  cmd="python t.py --lr $rate --q \\"a b\\" --d \\$HOME"\n  eval $cmd\ndone\n'
        'for one in 5; do eval "eval python u.py; X=$one python v.py"; done\n'
    )
    assert [line.words for line in lines] == [
        ("python", "t.py", "--lr", "1e-4", "--q", "a b", "--d", "$HOME"),
        ("eval", "python", "u.py"),
        ("python", "v.py"),
    ]
    assert lines[2].environment == {"X": "5"}
    assert variables.loops == {"rate": 2}


def test_a_branch_that_numbers_rule_out_is_not_read() -> None:
    lines, variables = commands(
        'A=(--x)\nif [[ "${SWAP:-0}" -gt 0 ]]; then A+=(--swap "$SWAP"); if true; then A+=(--y); fi; echo no; fi\n'
        "N=2; if [ $N -ge 2 ]; then echo two; else echo one; fi\nif [ $N -lt 2 ]; then echo less; else echo more; fi\n"
        'if [ "$1" -gt 0 ]; then echo given; fi\npython t.py "${A[@]}"\n'
    )
    said = [line.words for line in lines if line.words[0] in ("echo", "python")]
    assert [words[1:] for words in said] == [("two",), ("one",), ("more",), ("given",), ("t.py", "--x")]
    assert variables.unset == set()


def test_eval_of_a_quote_that_is_never_closed_is_one_error() -> None:
    with pytest.raises(VplanError, match="never closed"):
        commands("eval 'python t.py \"--a'")


LAUNCHES = {
    "accelerate launch --num_processes 8 --num_machines 2 train.py --a": ("accelerate", "train.py", 4, 2),
    "torchrun --nnodes=1:4 --nproc-per-node 2 -m scripts.train_unet": ("torchrun", "scripts/train_unet.py", 2, 4),
    "python -m torch.distributed.run --nproc_per_node=3 a.py": ("torchrun", "a.py", 3, None),
    "NCCL_P2P_DISABLE=1 deepspeed --num_gpus=2 train.py --deepspeed": ("deepspeed", "train.py", 2, None),
    "nohup uv run python3.11 -u x/train.py": ("python", "x/train.py", 1, None),
    "deepspeed --include localhost:0,1,2 train.py --deepspeed": ("deepspeed", "train.py", 3, None),
    "accelerate launch --multi_gpu --gpu_ids=0,1 t.py": ("accelerate", "t.py", 2, None),
    "accelerate launch --gpu_ids all t.py": ("accelerate", "t.py", None, None),
    "accelerate launch --use_deepspeed --multi_gpu t.py": ("accelerate", "t.py", None, None),
}


@pytest.mark.parametrize("text", LAUNCHES)
def test_launchers_write_what_runs_on_how_many(text: str) -> None:
    (program,) = from_words(text.split()).programs
    assert (program.launcher, program.script, program.gpus, program.nodes) == LAUNCHES[text]


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.text(alphabet="ab$'\"\\(){}[]=#;&|<> \n-", max_size=60),
        st.lists(st.sampled_from(["eval ", "for a in ", "$a", "a=", "'", '"', ";", "b ", "(", ")", "\\"])).map("".join),
    )
)
def test_any_text_is_words_or_one_clear_error(text: str) -> None:
    try:
        lines, _ = commands(text)
    except VplanError as error:
        assert any(why in error.message for why in ("never closed", "64 KiB", "placeholder"))
    else:
        assert all(line.words for line in lines)


BAD = {
    "quote.sh": b'accelerate launch "train.py',
    "latin.sh": b"\xff\xfe\x00",
    "large.sh": b"a" * (2 << 20),
    "nothing.sh": b"A=1\n",
    "grows.sh": b"A=aaaaaaaa\n" + b"A=$A$A\n" * 40 + b"python x.py $A\n",
    "array.sh": b"A=(a b)\n" + b"A=(${A[@]} ${A[@]})\n" * 40,
    "open_texts.sh": b"cat <<END\n" * 50_000,
    "itself.yaml": b"a: &a [*a]\n",
    "bomb.yaml": b"a0: &a0 {x: 1}\n"
    + b"".join(b"a%d: &a%d {p: *a%d, q: *a%d}\n" % (n, n, n - 1, n - 1) for n in range(1, 25)),
    "runs.yaml": b'x: !!python/object/apply:os.system ["touch was_run"]\n',
    "deep.json": b"[" * 50_000,
    "deep.yaml": b"a: " + b"[" * 500,
    "list.json": b"[1, 2]",
    "broken.toml": b"a = \n",
    "broken.py": b"def f(:\n",
    "deep.py": b"x = " + b"(" * 3_000 + b")" * 3_000,
    "other.py": b"print(1)\n",
    "foreign.sh": b"python -m onetrainer.train --x 1\n",
}


@pytest.mark.parametrize("name", [*BAD, "missing.sh", "folder.sh"])
def test_what_cannot_be_read_is_one_clear_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.sh").mkdir()
    if name in BAD:
        (tmp_path / name).write_bytes(BAD[name])
    done = CliRunner().invoke(cli, ["check", "--gpu", "24GB", "--json", name])
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert error["message"] and error["fix"] and "\n" not in error["message"]
    assert not (tmp_path / "was_run").exists()


def test_an_unread_trainer_is_refused_by_name_with_those_we_read() -> None:
    finetrainers = ("train.py", "--model_name", "wan", "--pretrained_model_name_or_path", "Wan-AI/Wan2.1-T2V-1.3B")
    for words, name in (
        (("python", "a.py", "--b"), "a.py"),
        (("torchrun", "--nproc_per_node=2", *finetrainers), "finetrainers"),
        (("python", "-m", "torch.distributed.run", "--nproc_per_node", "2", *finetrainers), "finetrainers"),
        (("python", "train.py", "--width", "3"), "train.py does not belong"),
    ):
        done = CliRunner().invoke(cli, ["check", "--gpu", "24GB", "--json", "--", *words])
        error = json.loads(done.stdout)["error"]
        assert name in error["message"] and "diffusion-pipe" not in error["message"]
        listed = error["fix"].removeprefix("supported: ").split(", ")
        assert {"DiffSynth-Studio", "sd-scripts", "diffusion-pipe"} < set(listed)
        assert len(listed) == len(set(listed)) and "(" not in error["fix"]  # each trainer once
    done = CliRunner().invoke(cli, ["check", "--gpu", "24GB", "--json", "--", "simpletuner", "train"])
    error = json.loads(done.stdout)["error"]
    assert "SimpleTuner" in error["message"] and error["fix"].startswith("pass its config.json")
    assert CliRunner().invoke(cli, ["check", "--gpu", "24GB"]).exit_code == 2
    assert CliRunner().invoke(cli, ["check", "--", "python", "a.py"]).exit_code == 2


def test_another_script_of_a_trainer_names_all_that_are_read() -> None:
    done = CliRunner().invoke(
        cli, ["check", "--gpu", "24GB", "--json", "--", "python", "scripts/train_reward_lora.py", "--x"]
    )
    error = json.loads(done.stdout)["error"]
    assert error["message"] == "scripts/train_reward_lora.py of EasyAnimate is not supported"
    scripts, _, otherwise = error["fix"].partition("; ")
    named = set(scripts.removeprefix("supported scripts of it: ").split(", "))
    assert "vplan rehearse" in otherwise
    assert named == {"scripts/train.py", "scripts/train_lora.py"}


@pytest.mark.parametrize(
    ("script", "title", "nearest"),
    [
        ("hidream_o1_train_network.py", "HiDream-O1-Image", "hidream-i1"),
        ("src/musubi_tuner/hidream_o1_train_network.py", "HiDream-O1-Image", "hidream-i1"),
    ],
)
def test_a_script_for_a_model_without_a_profile_names_it_and_the_nearest(script: str, title: str, nearest: str) -> None:
    words = ["check", "--gpu", "24GB", "--json", "--", "accelerate", "launch", script, "--mixed_precision", "bf16"]
    error = json.loads(CliRunner().invoke(cli, words).stdout)["error"]
    name = script.rpartition("/")[2]
    assert error["message"].startswith(f"{name} is musubi-tuner's, for {title}, which has no profile: ")
    assert error["fix"].startswith(f"the nearest that has one is {nearest}: ")


@pytest.mark.parametrize(
    ("script", "title", "model"),
    [
        ("src/musubi_tuner/fpack_train_network.py", "FramePack", "framepack"),
        ("kandinsky5_train_network.py", "Kandinsky 5.0 Video", "kandinsky-5.0-t2v-lite"),
    ],
)
def test_a_script_whose_own_code_of_a_model_is_not_priced_says_why(script: str, title: str, model: str) -> None:
    words = ["check", "--gpu", "24GB", "--json", "--", "accelerate", "launch", script, "--mixed_precision", "bf16"]
    error = json.loads(CliRunner().invoke(cli, words).stdout)["error"]
    name = script.rpartition("/")[2]
    assert error["message"].startswith(f"{name} is musubi-tuner's, whose own code of {title} is not priced: it ")
    assert f"vplan suggest {model} " in error["fix"] and "vplan rehearse" in error["fix"]


OF_ANOTHER_KIND = {
    "musubi.toml": (
        '[general]\nresolution = [960, 544]\n[[datasets]]\nvideo_directory = "x"\ntarget_frames = [1, 25]\n',
        "musubi.toml describes a data set of musubi-tuner, not a training",
        "config or command that names this file",
    ),
    "kohya.toml": (
        "[general]\nshuffle_caption = true\n[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'x'\n",
        "kohya.toml describes a data set of sd-scripts, not a training",
        "config or command that names this file",
    ),
    "pipe.toml": (
        'resolutions = [512]\nframe_buckets = [1, 33]\n[[directory]]\npath = "x"\nnum_repeats = 1\n',
        "pipe.toml describes a data set of diffusion-pipe, not a training",
        "config or command that names this file",
    ),
    "tune.toml": (
        'pretrained_model_name_or_path = "x"\nlearning_rate = 1e-5\noptimizer_type = "AdamW8bit"\n',
        "tune.toml has options of sd-scripts and does not say of which script",
        "SCRIPT.py --config_file tune.toml",
    ),
    "empty.toml": ("", "empty.toml is empty", "pass a trainer's config"),
    "empty.sh": ("\n", "'empty.sh' is empty", "pass the script or command"),
    "folder/train.sh": ("", "'folder' is a folder", "pass one of its files: folder/train.sh"),
}


@pytest.mark.parametrize("name", OF_ANOTHER_KIND)
def test_a_file_of_another_kind_is_told_by_its_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, fault, fix = OF_ANOTHER_KIND[name]
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    for words in ([name.partition("/")[0]], ["--from-file", name.partition("/")[0]]):
        done = CliRunner().invoke(cli, ["check", "--gpu", "24GB", "--json", *words])
        error = json.loads(done.stdout)["error"]
        assert done.exit_code == 1 and error["message"] == fault and fix in error["fix"]


def test_what_starts_no_script_is_told_so() -> None:
    done = CliRunner().invoke(cli, ["check", "--gpu", "24GB", "--json", "--", "echo", "hi"])
    error = json.loads(done.stdout)["error"]
    assert error["message"] == "echo starts no Python script" and "accelerate launch" in error["fix"]


def test_a_log_that_ran_out_of_memory_is_explained_as_error_does(tmp_path: Path) -> None:
    log = tmp_path / "oom.txt"
    log.write_text(
        "Traceback (most recent call last):\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. "
        "GPU 0 has a total capacity of 23.65 GiB of which 200.00 MiB is free. Including non-PyTorch memory, this "
        "process has 23.40 GiB memory in use. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 1.50 GiB "
        "is reserved by PyTorch but unallocated.\n"
    )
    named = CliRunner().invoke(cli, ["check", "--json", "--error", str(log)])
    for words in ([str(log)], ["--gpu", "24GB", str(log)], ["--from-file", str(log)]):
        given = CliRunner().invoke(cli, ["check", "--json", *words])
        assert given.exit_code == 0 and given.stdout == named.stdout and "cause" in json.loads(given.stdout)
    log.write_text("nothing happened\n")
    assert "starts no Python script" in CliRunner().invoke(cli, ["check", "--gpu", "24GB", str(log)]).stderr


def test_a_config_s_bytes_and_the_folder_beside_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: {sizes: [1, 2], sets: [{n: 3}]}\n")
    assert read_document(tmp_path / "c.yaml") == {"data": {"sizes": [1, 2], "sets": [{"n": 3}]}}
    (tmp_path / "run.sh").write_text("python a.py --c c.yaml\n")
    script = from_file(tmp_path / "run.sh")
    assert script.document("c.yaml") and script.document("$C/c.yaml") is None and script.document("no.yaml") is None


def checked(*words: str) -> Result:
    return CliRunner().invoke(cli, ["check", *words, "--gpu", "rtx4090", "--no-fixes", "--json"])


def test_a_file_that_the_command_names_may_be_passed_from_elsewhere(tmp_path: Path) -> None:
    script, data = tmp_path / "run" / "train.sh", tmp_path / "mine" / "finetune.toml"
    script.parent.mkdir()
    data.parent.mkdir()
    script.write_text(
        "accelerate launch sdxl_train.py --pretrained_model_name_or_path=sdxl --dataset_config=/home/she/finetune.toml "
        "--mixed_precision=bf16 --gradient_checkpointing\n"
    )
    data.write_text("[[datasets]]\nbatch_size = 3\nresolution = 768\n")
    alone = json.loads(checked(str(script)).stdout)
    (missing,) = [note for note in alone["estimate"]["assumptions"] if "finetune.toml' is not here" in note]
    assert "`vplan check train.sh PATH/finetune.toml`" in missing and alone["job"]["batch_size"] == 1
    both = json.loads(checked(str(script), str(data)).stdout)
    assert (both["job"]["batch_size"], both["job"]["height"]) == (3, 768)
    assert not any("not here" in note for note in both["estimate"]["assumptions"])
    data.rename(data.with_name("other.toml"))
    refused = checked(str(script), str(data.with_name("other.toml")))
    assert refused.exit_code == 1 and "train.sh names no 'other.toml'" in refused.output
    assert "not found: '/home/she/finetune.toml'" in refused.output


def test_of_two_files_of_a_name_that_with_the_same_folders_is_meant(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.toml").write_text(f"name = '{folder}'")
    (tmp_path / "x.sh").write_text("python train.py --dataset_config C:\\sets\\b\\data.toml\n")
    files = tuple(tmp_path / folder / "data.toml" for folder in ("a", "b"))
    script = dataclasses.replace(from_file(tmp_path / "x.sh"), supplied=files)
    assert script.document("C:\\sets\\b\\data.toml") == {"name": "b"}
    assert script.unnamed() == [files[0]]
