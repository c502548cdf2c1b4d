"""Flags of other trainers: the shipped data, and argparse's rules over it."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import profiles
from planner.dialects.base import flags
from planner.errors import VplanError

WAN = "examples/wanvideo/model_training/train.py"


@pytest.mark.parametrize("trainer", profiles.trainer_names())
def test_every_file_says_where_it_was_read_and_names_real_flags(trainer: str) -> None:
    for script in flags.scripts(trainer):
        assert script.source.startswith("https://") and script.commit and script.read_at
        assert script.flags, script.path
        for name, flag in script.flags.items():
            assert name.startswith("-") == (script.format == "argparse"), name
            if flag.choices and flag.default:
                assert flag.default in flag.choices, name
            assert not flag.gone or flag.gone[:4].isdigit(), name


def test_a_group_names_scripts_of_its_file() -> None:
    for trainer in profiles.trainer_names():
        data = tomllib.loads(profiles.trainer_path(trainer).read_text())
        known = {script["path"] for script in data["script"]} | {"*"}
        assert all(set(group["scripts"]) <= known for group in data["group"]), trainer


@pytest.mark.parametrize(
    ("trainer", "path", "name", "default"),
    [
        ("diffsynth", WAN, "--num_frames", 81),
        ("diffsynth", WAN, "--lora_rank", 32),
        ("diffsynth", WAN, "--max_pixels", 1024 * 1024),
        ("easyanimate", "scripts/train.py", "--vae_mini_batch", 32),
        ("easyanimate", "scripts/train.py", "--train_batch_size", 16),
        ("videox-fun", "scripts/wan2.1/train.py", "--validation_steps", 2000),
        ("latentsync", "configs/unet/stage1.yaml", "data.num_frames", 16),
        ("latentsync", "configs/unet/stage1_512.yaml", "data.resolution", 512),
        ("sd-scripts", "flux_train.py", "--t5xxl_max_token_length", None),
        ("sd-scripts", "flux_train.py", "--train_batch_size", 1),
        ("musubi-tuner", "wan_train_network.py", "--blocks_to_swap", None),
        ("musubi-tuner", "wan_train_network.py", "--block_swap_ring_size", 2),
        ("diffusers", "train_cogvideox_lora.py", "--max_num_frames", 49),
        ("diffusion-pipe", "config.toml", "pipeline_stages", 1),
        ("ai-toolkit", "config.yaml", "config.process[].train.gradient_checkpointing", True),
        ("accelerate", "launch.py", "--num_processes", None),
    ],
)
def test_known_defaults(trainer: str, path: str, name: str, default: object) -> None:
    assert flags.script(trainer, path).default(name) == default


def test_argparse_rules_hold() -> None:
    script = flags.script("diffsynth", f"/opt/x/{WAN}")
    parsed = script.parse(
        [
            "--num_frames=49",
            "--use_gradient_checkpointing",
            "--lora_r",
            "8",
            "--lora_target_modules",
            "q,k",
            "--no_such",
            "3",
            "--other=4",
        ]
    )
    assert parsed.values == {
        "--num_frames": 49,
        "--use_gradient_checkpointing": True,
        "--lora_rank": 8,
        "--lora_target_modules": "q,k",
    }
    assert parsed.unknown == ("--no_such", "--other")
    listed = flags.script("sd-scripts", "flux_train.py").parse(["--optimizer_args", "a=1", "b=2", "--sdpa"])
    assert listed.values == {"--optimizer_args": ["a=1", "b=2"], "--sdpa": True}


def test_what_argparse_would_refuse_names_the_commit_and_what_may_be_meant() -> None:
    script = flags.script("sd-scripts", "flux_train_network.py")
    parsed = script.parse(["--sdpaa", "--fp8_base", "--zzzz", "1", "$MORE", "--$NAME", "left"])
    at = f"not an option of flux_train_network.py at {script.commit}"
    assert parsed.refused == {"--sdpaa": f"{at}: did you mean --sdpa?", "--zzzz": at}
    assert set(parsed.refused) < set(parsed.unknown)  # what a shell would fill in may be anything
    assert script._replace(lenient=True).parse(["--sdpaa"]).refused == {}
    assert script.parse_config({"sdpaa": True}).refused == {}  # of a --config_file it takes every key


@pytest.mark.parametrize("words", ["--width forty", "--width", "--log_with no", "--network 3"])
def test_what_the_script_refuses_is_refused(words: str) -> None:
    with pytest.raises(VplanError, match=r"wan_train_network\.py rejects"):
        flags.script("musubi-tuner", "wan_train_network.py").parse(words.replace("width", "seed").split())


def test_what_is_gone_is_named_with_its_date() -> None:
    parsed = flags.script("diffsynth", WAN).parse(["--training_strategy", "deepspeed_stage_3", "--num_frames", "81"])
    assert parsed.values == {"--num_frames": 81} and not parsed.unknown
    assert parsed.removed["--training_strategy"].startswith("2025-06-13 (830b1b72)")
    old = flags.script("diffsynth", "examples/wanvideo/train_wan_t2v.py")
    assert old.removed and "2025-06-13" in old.removed and "--training_strategy" in old.flags


def test_launchers_are_split_from_what_they_start() -> None:
    launch = flags.script("accelerate", "launch.py").launch
    parsed, words = launch(
        ["--use-deepspeed", "--mixed_precision=bf16", "--num_processes", "4", "train.py", "--mixed_precision", "x"]
    )
    assert parsed.values == {"--use_deepspeed": True, "--mixed_precision": "bf16", "--num_processes": 4}
    assert words == ["train.py", "--mixed_precision", "x"]
    parsed, words = flags.script("torchrun", "run.py").launch(
        ["--nproc_per_node=2", "-m", "scripts.train_unet", "--a", "b"]
    )
    assert parsed.values == {"--nproc-per-node": "2", "--module": True} and words == ["scripts.train_unet", "--a", "b"]


def test_config_keys_are_found_in_tables_lists_and_open_tables() -> None:
    script = flags.script("diffusion-pipe", "config.toml")
    parsed = script.parse_config(
        {"pipeline_stages": 1, "model": {"type": "wan", "no_such": 1}, "optimizer": {"lr": 1e-4}}
    )
    assert parsed.values["model.type"] == "wan" and parsed.unknown == ("model.no_such",)
    data = flags.script("sd-scripts", "dataset.toml").parse_config(
        {"general": {"enable_bucket": True}, "datasets": [{"batch_size": 2, "subsets": [{"image_dir": "a"}]}]}
    )
    assert data.values["datasets[0].batch_size"] == 2 and not data.unknown
    trained = flags.script("sd-scripts", "flux_train.py").parse_config({"a": {"gradient_checkpointing": True}, "x": 1})
    assert trained.values == {"--gradient_checkpointing": True} and trained.unknown == ("--x",)
    with pytest.raises(VplanError, match="is no int"):
        flags.script("sd-scripts", "dataset.toml").parse_config({"datasets": [{"batch_size": "two"}]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer = ", "damaged"),
        ('trainer = "x"\nsource = "y"\nscript = []\n', "group is missing"),
        (
            'trainer = "x"\nsource = "y"\nscript = []\n[[group]]\nscripts = []\nflag = [{ nam = "a" }]\n',
            "has no field 'nam'",
        ),
    ],
)
def test_a_damaged_file_is_named(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "TRAINERS", tmp_path)
    (tmp_path / "broken.toml").write_text(text)
    with pytest.raises(VplanError, match=says) as raised:
        flags.scripts("broken")
    assert "broken.toml" in str(raised.value)


def test_a_trainer_nobody_read_is_refused_with_the_list() -> None:
    with pytest.raises(VplanError, match=r"not supported; supported: .*diffsynth"):
        flags.scripts("../models/sdxl")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_given_comes_back(data: st.DataObject) -> None:
    """Any choice of flags written as words is read back as given."""
    script = data.draw(st.sampled_from([one for one in flags.scripts("musubi-tuner") if one.format == "argparse"]))
    live = [flag for flag in script.flags.values() if not flag.gone and flag.action in ("store", "store_true")]
    chosen = data.draw(st.lists(st.sampled_from(live), max_size=6, unique_by=lambda flag: flag.name))
    words, wanted = [], {}
    for flag in chosen:
        value: object = {"int": 3, "float": 0.5, "bool": True}.get(flag.type, "x")
        value = flag.choices[0] if flag.choices else value
        wanted[flag.name] = [value] if flag.nargs in ("*", "+") else value
        words += [flag.name] if flag.action == "store_true" else [flag.name, str(value)]
    if any(flag.type == "bool" and flag.action == "store" for flag in chosen):
        return
    assert script.parse(words) == (wanted, (), {}, {})


def test_the_reader_follows_a_parser_through_functions_and_files(tmp_path: Path) -> None:
    from tests.tools import read_flags

    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "more.py").write_text(
        "def add_more(parser):\n    parser.add_argument('--rank', '-r', type=int, default=4 * 8)\n"
        "    parser.add_argument('--kind', choices=['a', 'b'], nargs='+')\n"
    )
    (tmp_path / "train.py").write_text(
        "import argparse\nfrom lib.more import add_more\n"
        "def setup_parser():\n    parser = argparse.ArgumentParser()\n    add_more(parser)\n"
        "    parser.add_argument('--fast', action='store_true')\n    parser.add_argument('file')\n    return parser\n"
    )
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        read_flags.git(str(tmp_path), *words)
    found = read_flags.Reader(str(tmp_path), "HEAD").flags("train.py", "setup_parser")
    assert found == [
        {"name": "--rank", "aliases": ["-r"], "type": "int", "default": 32},
        {"name": "--kind", "type": "str", "nargs": "+", "choices": ["a", "b"]},
        {"name": "--fast", "type": "bool", "action": "store_true"},
    ]


def test_two_dashes_are_no_likeness_of_flags() -> None:
    """`--lazy_loading` was taken for `--async_upload`, of which they are a third of what both have."""
    script = flags.script("musubi-tuner", "wan_train_network.py")
    refused = script.parse(["--lazy_loading", "--block_to_swap", "3"]).refused
    assert "did you mean" not in refused["--lazy_loading"]
    assert refused["--block_to_swap"].endswith("did you mean --blocks_to_swap?")


def test_a_number_that_is_never_assigned_is_said_to_be_so() -> None:
    script = flags.script("musubi-tuner", "wan_train_network.py")
    with pytest.raises(VplanError) as error:
        script.parse(["--blocks_to_swap", "$SWAP"])
    assert error.value.fix == "$SWAP is not assigned: write its value"
