"""Questions of newcomers through the real command line, and what the first screen says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.catalog import lookup
from planner.commands import cli
from planner.spec.plan import read_plan
from reports.data import CLIP_CARDS, Builder

HERE = {"COLUMNS": "100"}


def said(line: str, code: int = 0, columns: int = 100) -> str:
    """The output of a command line, stdout and stderr."""
    done = CliRunner().invoke(cli, line.split(), env={**HERE, "COLUMNS": str(columns)})
    assert done.exit_code == code, done.output
    return done.output


def prose(line: str, code: int = 0) -> str:
    """The same without line breaks."""
    return " ".join(said(line, code).split())


def answer(line: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(line if " --json " in line else f"{line} --json", code))
    return found


def test_every_test_of_the_table_is_there() -> None:
    """`front_door.md` names the test for each of its rows; each of them must exist."""
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", Path(__file__).with_name("front_door.md").read_text())
    root = Path(__file__).parents[2]
    assert len(named) > 30
    assert not [name for path, name in named if f"def {name}(" not in (root / path).read_text()]


# ---- host RAM


@pytest.mark.parametrize(
    "question",
    ["suggest wan2.2-t2v-a14b --gpu rtx5070ti --host-ram 32", "suggest wan2.1-vace-14b --gpu 4090 --host-ram 32GiB"],
)
def test_host_ram_that_would_do_stands_first_and_does(question: str) -> None:
    first = answer(question, 3)["relax"][0]
    assert first["field"] == "host_ram"
    richer = answer(f"{re.sub(' --host-ram .*', '', question)} --host-ram {first['to']}")
    assert richer["plan"]["verdict"] == "fits"
    page = prose(question, 3)
    assert "not enough host RAM for a smaller one" in page
    assert f"change one of: --host-ram {first['to']} instead of" in page


@pytest.mark.parametrize(
    ("words", "ram", "reserve", "notes"),
    [
        ("--gpu 24GB", 26, 0, ["no desktop on the card (else --reserve 1GiB)", "26 of 32 GiB of host RAM usable"]),
        ("--gpu 24GB --os windows", 26, 1, ["a desktop on the card (--reserve)", "26 of 32 GiB of host RAM usable"]),
        ("--gpu 24GB --os wsl --reserve 0", 16, 0, ["16 of 32 GiB of host RAM usable (--host-ram)"]),
        ("--gpu 80GB", 122, 0, ["122 of 128 GiB of host RAM usable (--host-ram)"]),
        ("--gpu 24GB --host-ram 32GiB --reserve 1", 32, 1, []),
    ],
)
def test_the_ram_that_can_be_used_is_stated_and_a_desktop_counted(
    words: str, ram: int, reserve: int, notes: list[str]
) -> None:
    found = answer(f"estimate sdxl {words}")
    machine, said = found["machine"], [note for note in found["assumptions"] if "RAM" in note or "desktop" in note]
    assert (machine["host_ram"] / 2**30, machine["reserve"] / 2**30) == (ram, reserve)
    assert len(said) == len(notes) and all(one.startswith(other) for one, other in zip(said, notes, strict=True))


def test_host_ram_is_not_offered_where_it_changes_nothing() -> None:
    question = "suggest wan2.2-animate-14b --gpu 4090"
    assert [wish["field"] for wish in answer(question, 3)["relax"]] == ["frames", "resolution"]
    assert "not enough GPU memory" in prose(question, 3)
    assert answer(f"{question} --host-ram 512GiB", 3)["plan"]["limit"] == "gpu"


def test_the_table_of_cards_says_what_more_host_ram_would_do() -> None:
    rows = {row["gpu"]: row for row in answer("suggest wan2.2-t2v-a14b --host-ram 32GiB")["classes"]}
    found = re.fullmatch(r"no with 32 GiB of host RAM; fits with (\d+)", rows["16GB"]["reason"])
    assert found and rows["12GB"]["reason"].startswith("needs at least")
    answer(f"suggest wan2.2-t2v-a14b --gpu 16GB --host-ram {found[1]}GiB")


# ---- where no single change is enough


def test_the_least_that_a_job_can_reach_is_said_and_the_card_that_takes_it_as_it_is() -> None:
    question = "suggest flux.1-dev --gpu 8GB --for diffusers"
    found = answer(question, 3)
    assert not found["relax"] and found["larger_card"] == {"gpu": "40GB", "verdict": "fits"}
    least = found["least"]
    assert (least["job"]["height"], least["verdict"]) == (512, "no")
    assert least["peak"]["device_bytes"] < found["plan"]["peak"]["device_bytes"]
    page = prose(question, 3)
    assert re.search(r"no single change makes it fit --resolution 512x512 still needs [\d.]+ GiB", page)
    assert "unchanged it fits --gpu 40GB" in page
    assert answer("suggest flux.1-dev --gpu 40GB --for diffusers")["plan"]["verdict"] == "fits"


# ---- the page


CARDS = {
    "wan2.2-t2v-a14b": ("8GB", "16GB", "24GB", "32GB", "80GB", "141GB"),
    "sd1.5": ("8GB", "16GB", "24GB", "80GB"),
}
"""Ten of the 32 questions that `tests/benchmarks/longest.py` asks: by clips and by pictures."""


@pytest.mark.parametrize("model", CARDS)
def test_the_page_and_the_command_line_say_the_same_longest_clip(model: str, tmp_path: Path) -> None:
    """Video models by their frames, image models by their batch size, lossless and lossy."""
    path = tmp_path / "plan.toml"
    CliRunner().invoke(cli, ["estimate", model, "--gpu", "24GB", "-o", str(path)], env=HERE)
    builder = Builder("plan.toml", read_plan(path))
    reaches = [each.longest for same_ram in (True, False) for each in builder.card_reaches(same_ram)]
    shown = {each.card: each for each in reaches}
    assert set(shown) == set(CLIP_CARDS)
    field, most = ("batch_size", "batch") if lookup.model(model).kind == "image" else ("frames", "frames")
    for card in CARDS[model]:
        found = answer(f"suggest {model} --gpu {card} --prefer {most}")
        length = found["plan"]["job"][field]
        more = next((wish["to"] for wish in found["relax"] if wish["lossy"]), 0)
        said = (0, length) if found["plan"]["lossy"] else (length, more)
        assert (shown[card].lossless, shown[card].lossy) == said, card


# ---- names


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        ("flux2", "flux.2-dev"),
        ("qwen-image-2512", "qwen-image"),
        ("hunyuan-video-1", "hunyuan-video-1.5"),
        ("sdx", "sdxl"),
    ],
)
def test_a_name_that_is_not_exact_is_shown_with_what_it_was_taken_for(typed: str, model: str) -> None:
    found = answer(f"estimate {typed} --gpu 192GB --gradient-checkpointing full")
    assert (found["job"]["model"], found["assumptions"][0]) == (model, f"'{typed}' taken for {model}")


@pytest.mark.parametrize("typed", ["sdxl", "stabilityai/stable-diffusion-xl-base-1.0", "flux1-dev", "FLUX.1 dev"])
def test_an_exact_name_is_shown_as_itself(typed: str) -> None:
    done = CliRunner().invoke(cli, ["estimate", typed, "--gpu", "192GB", "--json"], env=HERE)
    taken = [note for note in json.loads(done.stdout)["assumptions"] if "taken for" in note]
    assert bool(taken) == (typed.startswith("stabilityai/")), "an id that says another name than ours"


@pytest.mark.parametrize(
    ("typed", "models"),
    [
        ("klein", ["flux.2-klein-4b", "flux.2-klein-9b"]),
        ("wan2.2-14b --frames 9", ["wan2.2-animate-14b", "wan2.2-i2v-a14b", "wan2.2-t2v-a14b"]),
    ],
)
def test_a_name_for_several_models_gives_a_table_of_them(typed: str, models: list[str]) -> None:
    page = said(f"suggest {typed} --gpu 96GB --gradient-checkpointing full", columns=80)
    answered, understood = page.splitlines()[:2]
    assert answered.startswith(f"{len(models)} of {len(models)} models fit")
    assert understood.startswith(f"'{typed.split()[0]}' may mean {len(models)} models, lora, on a 96 GB card")
    assert all(f"\n{model} " in page for model in models), "names are to be typed, and not cut short"
    lines = page.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in page
    for model in models:  # its way, or why it does not fit, in a line of its own
        at = next(at for at, line in enumerate(lines) if line.startswith(f"{model} "))
        assert lines[at + 1].startswith("  ") and ("checkpointing" in lines[at + 1] or "no with" in lines[at + 1])


def test_a_name_for_several_models_is_refused_where_one_plan_is_asked_for() -> None:
    assert "fix: write one of flux.2-klein-4b, flux.2-klein-9b" in said("suggest klein --gpu 3090 -o plan.toml", 2)
    assert "model 'klein' is ambiguous" in said("estimate klein --gpu 3090", 1)
    rows = answer("suggest klein --gpu 3090 --frames 9", 1)
    assert "makes images" in rows["error"]["message"]


def test_nothing_absurd_is_suggested_for_an_unknown_name() -> None:
    assert "fix: `vplan models` lists what is known" in said("suggest nosuch --gpu 3090", 1)
    assert "did you mean hunyuan-video" in said("suggest hunyan-video --gpu 3090", 1)
    assert "is a distilled Krea 2" in said("suggest Krea-2-Turbo --gpu 3090", 1)
    turbo = " ".join(said("suggest Z-Image-Turbo --gpu 3090", 0).split())
    assert "Z-Image-Turbo was distilled to few steps" in turbo


# ---- both kinds of plans


def test_the_longest_clip_is_said_lossless_and_lossy() -> None:
    """Both commands report the same two lengths, and these are correct when requested."""
    fixed = "--host-ram 32GiB --gradient-checkpointing offload --optimizer-step fused"
    question = f"suggest wan2.1-t2v-14b --gpu 4090 {fixed}"
    found = answer(f"{question} --frames max")
    lossless, (wish,) = found["plan"]["job"]["frames"], found["relax"]
    assert (wish["field"], wish["from"], wish["lossy"]) == ("frames", lossless, ["weights_dtype"])
    longer = lossless + 4
    assert 0 < lossless < longer < wish["to"]
    asked = answer(f"{question} --frames {longer}")
    assert asked["plan"]["lossy"] == ["weights_dtype"]
    assert [(wish["from"], wish["to"], wish["lossy"]) for wish in asked["relax"]] == [(longer, lossless, [])]
    assert not answer(f"{question} --frames {lossless}")["plan"]["lossy"]


def test_both_kinds_are_in_the_text() -> None:
    question = "suggest wan2.1-t2v-1.3b --gpu 8GB --gradient-checkpointing offload"
    page = prose(f"{question} --frames max")
    lossy = re.search(r"lossy up to (\d+) frames \(--allow lossy\): [^(]+ \(fits, [\d.]+ GiB\)", page)
    assert lossy is not None
    page = prose(f"{question} --frames {lossy[1]}")
    assert re.search(r"lossless up to (\d+) frames \(--frames \1\): [^(]+ \(fits, [\d.]+ GiB\)", page)


# ---- cards


@pytest.mark.parametrize(
    ("typed", "card", "note"),
    [
        ("24", "24GB", ""),
        ("24G", "24GB", ""),
        ("2x24", "24GB", ""),
        ("4070ti-s", "rtx4070ti-super", "'4070ti-s' taken for rtx4070ti-super"),
        ("rtx4090laptop", "rtx4090-laptop", ""),
        ("rtx4090", "rtx4090", ""),
    ],
)
def test_cards_as_people_name_them(typed: str, card: str, note: str) -> None:
    found = answer(f"estimate sdxl --gpu {typed}")
    assert found["machine"]["gpu"] == card
    assert [said for said in found["assumptions"] if "taken for" in said] == ([note] if note else [])


@pytest.mark.parametrize(
    ("card", "maker", "size"),
    [("7900xtx", "AMD", "--gpu 24GB"), ("arc-a770", "Intel", "its size")],
)
def test_a_card_of_another_maker_has_a_size_to_compare_with(card: str, maker: str, size: str) -> None:
    page = prose(f"suggest sdxl --gpu {card}", 1)
    assert f"is a card of {maker}" in page and size in page and "speed and kernels are not the same" in page


def test_host_ram_may_be_typed_without_its_unit() -> None:
    sizes = [answer(f"estimate sdxl --gpu 24GB --host-ram {text}")["machine"]["host_ram"] for text in ("64", "64GiB")]
    assert sizes[0] == sizes[1]


def test_zero_stage_0_is_no_sharding() -> None:
    assert answer("estimate sdxl --gpu 24GB --zero-stage 0")["strategy"]["sharding"] == "none"
    assert answer("estimate sdxl --gpu 2x24GB --zero-stage 0")["strategy"]["sharding"] == "ddp"


# ---- sizes and clips


@pytest.mark.parametrize(
    ("model", "typed", "size", "note"),
    [
        ("wan2.1-t2v-1.3b", "480x832", (480, 832), ""),
        ("wan2.1-t2v-1.3b", "832x480", (832, 480), "832x480 is height x width: portrait, 832 high"),
        ("cogvideox-2b", "720x480", (480, 720), "720x480 read as width x height (480x720 pixels"),
        ("mochi-1", "848x480", (480, 848), "848x480 read as width x height"),
        ("sdxl", "1024x1024", (1024, 1024), ""),
    ],
)
def test_a_size_is_read_as_the_model_knows_it_and_a_portrait_is_said(
    model: str, typed: str, size: tuple[int, int], note: str
) -> None:
    found = answer(f"estimate {model} --gpu 192GB --gradient-checkpointing full --resolution {typed}")
    assert (found["job"]["height"], found["job"]["width"]) == size
    notes = [said for said in found["assumptions"] if typed in said]
    assert len(notes) == bool(note) and all(said.startswith(note) for said in notes)


def test_images_are_one_frame_and_nothing_is_said_of_clips() -> None:
    question = "suggest wan2.1-t2v-14b --gpu 12GB --images --gradient-checkpointing full"
    assert answer(question)["plan"]["job"]["frames"] == 1
    assert not re.search("frames|clip", prose(question))
    assert "--images are of 1 frame, not 9" in said("suggest wan2.1-t2v-14b --gpu 12GB --images --frames 9", 2)


def test_an_image_model_is_asked_about_images() -> None:
    assert "makes images, so there is no longest clip" in said("suggest sdxl --gpu 24GB --frames max", 1)
    page = said("suggest klein --gpu 96GB --gradient-checkpointing full")
    assert re.search(r"model +image +verdict", page) and " 1024x1024 " in page


# ---- seconds


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("wan2.1-t2v-1.3b --gpu 8GB --frames 81", "come over PCIe 4.0 x8 (12.5 GB/s) while others compute, and hide"),
        ("flux.1-dev --gpu 8GB --resolution 256x256", "come over PCIe 4.0 x8 (12.5 GB/s), and the step waits for them"),
    ],
)
def test_swap_names_the_link_it_hides_behind(question: str, words: str) -> None:
    page = prose(f"suggest {question} --host-ram 64 --gradient-checkpointing full")
    assert words in page


# ---- JSON


@pytest.mark.parametrize(
    ("line", "code", "message", "fix"),
    [
        ("suggest --json --nonsense", 2, "no such option --nonsense", "--help"),
        ("estimate sdxl --gpu 24GB --frames many --json", 1, "many", ""),
        ("estimate nosuch --gpu 24GB --json", 1, "nosuch", "vplan models"),
        ("suggest sdxl --gpu 7900xtx --json", 1, "AMD", "--gpu 24GB"),
    ],
)
def test_errors_of_use_are_json_with_a_schema(line: str, code: int, message: str, fix: str) -> None:
    """Usage errors are JSON too, with nothing else on stdout."""
    done = CliRunner().invoke(cli, line.split(), prog_name="vplan", env=HERE)
    found = json.loads(done.stdout)
    assert done.exit_code == code and found["schema"] == 1 and set(found["error"]) == {"message", "fix"}
    assert message in found["error"]["message"] and fix in found["error"]["fix"]


@pytest.mark.parametrize("line", ["models", "gpus", "models sdxl", "gpus 4090", "estimate sdxl --gpu 24GB", "doctor"])
def test_every_answer_has_its_schema(line: str) -> None:
    assert answer(line)["schema"] == 1


# ---- torch


def test_what_a_torch_changes_is_in_the_estimate_and_a_newer_one_is_said() -> None:
    """torch 2.15 allocates cuBLAS workspaces for one product at a time, 32 MiB on an H100; 2.13 and 2.14 keep two."""
    found = {torch: answer(f"estimate sdxl --gpu h100-80gb --torch {torch}") for torch in ("2.13", "2.14", "2.15")}
    peaks = {torch: each["phases"]["train"]["allocated_bytes"] for torch, each in found.items()}
    assert peaks["2.13"] == peaks["2.14"] and 2**20 < peaks["2.14"] - peaks["2.15"] <= 2**26
    assert not [note for each in found.values() for note in each["assumptions"] if "torch" in note]
    newer = answer("estimate sdxl --gpu h100-80gb --torch 2.16")["assumptions"]
    assert any("torch 2.16" in note for note in newer)


# ---- another trainer's command that no option helps


MUSUBI = (
    "--frames {} --height 720 --width 1280 -- accelerate launch src/musubi_tuner/wan_train_network.py "
    "--task t2v-14B --dit wan.safetensors --dataset_config d.toml --sdpa --mixed_precision bf16 --fp8_base "
    "--network_module networks.lora_wan --network_dim 32 --gradient_checkpointing --blocks_to_swap 30"
)


def test_check_ends_with_a_shorter_clip_that_fits_and_the_least_it_can_reach() -> None:
    found = answer(f"check --json --gpu 16GB {MUSUBI.format(81)}", 3)
    assert not found["fixes"]
    least, (shorter, *_) = found["least"], found["smaller"]
    assert least["estimate"]["verdict"] == "no" and any("--blocks_to_swap 39" in part for part in least["change"])
    assert least["estimate"]["peak"]["device_bytes"] < found["estimate"]["peak"]["device_bytes"]
    frames = shorter["estimate"]["job"]["frames"]
    assert shorter["cost"] == "shorter clips" and 1 <= frames < 81
    assert f"target_frames = [{frames}]" in shorter["change"][0]
    page = prose(f"check --gpu 16GB {MUSUBI.format(81)}", 3)
    assert re.search(r"the least it reaches is [\d.]+ GiB, with --\w+", page)
    assert f"shorter clips fit: {shorter['change'][0]}" in page


def test_the_shorter_clip_is_the_longest_that_fits_as_it_is() -> None:
    question = f"check --json --no-fixes --gpu 16GB {MUSUBI}"
    frames = answer(f"check --json --gpu 16GB {MUSUBI.format(81)}", 3)["smaller"][0]["estimate"]["job"]["frames"]
    assert answer(question.format(frames))["verdict"] == "fits"
    assert CliRunner().invoke(cli, question.format(frames + 4).split(), env=HERE).exit_code in (0, 3)
    assert '"verdict": "fits"' not in CliRunner().invoke(cli, question.format(frames + 4).split(), env=HERE).stdout
