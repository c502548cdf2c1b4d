"""Whole jobs on data: time, energy and cost; shapes proposed for the data, and the cost of steps with several
shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy
import pytest
from click.testing import CliRunner
from PIL import Image

from planner.commands import cli
from planner.spec.plan import read_plan
from tests.command_line import typed

WAN = ("wan2.1-t2v-1.3b", "--frames", "81", "--gradient-checkpointing", "full")
H100 = ("--gpu", "h100-80gb")


def answer(*words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(typed(*words, "--json", code=code).stdout)
    return found


def test_a_step_encodes_what_is_not_cached() -> None:
    told = {}
    for place in ("cached", "resident", "swapped"):
        told[place] = answer("estimate", *WAN, *H100, "--vae", place, "--text-encoder", place)
    clip, prompt = 163.75e12, 4.845e12  # FLOP of Wan's VAE over 81 frames of 480x832, and of UMT5 over 512 tokens
    encoding = told["resident"]["flops"] - told["cached"]["flops"]
    assert encoding == pytest.approx(clip + prompt, rel=1e-3)
    waits = told["resident"]["step_seconds"] - told["cached"]["step_seconds"]
    assert encoding / 989e12 < waits < 6 * encoding / 989e12  # an H100's peak, and a sixth: half of it moves memory
    coming = told["swapped"]["step_seconds"] - told["resident"]["step_seconds"]
    assert coming == pytest.approx(2 * 5.81e9 / 55e9, rel=0.02)  # 16-bit weights over the card's PCIe 5 link


def test_a_job_is_the_sum_of_its_parts_and_costs_what_its_hours_cost() -> None:
    words = ("--steps", "2000", "--price", "2.5", "--validation-mode", "on", "--validate-every", "500")
    found = answer("estimate", *WAN, *H100, *words)
    whole = found["whole_job"]
    parts = whole["parts"]
    assert {name: part["count"] for name, part in parts.items()} == {
        "encoding": 0,
        "training": 2000,
        "samples": 4,
        "checkpoints": 40,
    }
    for high in ("", "_high"):
        assert parts["training"][f"seconds{high}"] == pytest.approx(2000 * found[f"step_seconds{high}"])
        hours = whole[f"hours{high}"]
        assert 3600 * hours == pytest.approx(sum(part[f"seconds{high}"] for part in parts.values()))
        assert whole[f"kwh{high}"] == pytest.approx(0.7 * hours)  # an H100 SXM's 700 W
        assert whole[f"money{high}"] == pytest.approx(2.5 * hours)
    assert whole["hours"] < whole["hours_high"]
    one_step = found["step_seconds"]  # forward, forward again, backward: a sample's forwards are a quarter of it
    assert parts["samples"]["seconds"] == pytest.approx(4 * 50 * 2 * one_step / 4, rel=0.25)
    copied = found["disk_bytes"] / 55e9  # over the card's link, 40 times
    assert parts["checkpoints"]["seconds"] == pytest.approx(40 * copied)
    page = " ".join(typed("estimate", *WAN, *H100, *words).stdout.split())
    assert f"2000 steps: {whole['hours']:.2f} to {whole['hours_high']:.2f} hours" in page
    assert "kWh at 700 W" in page and "at 2.5 per GPU-hour" in page


def test_two_cards_cost_twice_as_much_an_hour() -> None:
    whole = answer("estimate", *WAN, "--gpu", "2xh100-80gb", "--steps", "100", "--price", "2")["whole_job"]
    assert whole["money"] == pytest.approx(2 * 2 * whole["hours"])
    assert whole["kwh"] == pytest.approx(2 * 0.7 * whole["hours"])


def pictures(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """A folder of pictures of the given (width, height), with captions."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a picture")
    return folder


IMAGE = ("sd1.5", "--gpu", "24GB", "--batch-size", "4")


def test_epochs_are_counted_as_the_trainer_draws_them(tmp_path: Path) -> None:
    data = str(pictures(tmp_path / "data", [(512, 512)] * 6))
    whole = answer("estimate", *IMAGE, "--epochs", "10", "--data", data)["whole_job"]
    assert whole["steps"] == 15  # 60 pictures in fours
    assert whole["parts"]["encoding"]["count"] == 6
    again = answer("estimate", *IMAGE, "--steps", "30", "--data", data, "--repeats", "2")["whole_job"]
    assert again["epochs"] == pytest.approx(30 * 4 / 12)
    unknown = answer("estimate", *IMAGE, "--steps", "15")["whole_job"]
    assert unknown["epochs"] is None
    each = whole["parts"]["encoding"]["seconds"] / 6
    assert unknown["encoding_seconds_per_sample"] == pytest.approx(each) and each > 0
    assert whole["hours"] == pytest.approx(unknown["hours"] + 6 * each / 3600)


def test_shapes_weigh_as_much_as_the_data_has_of_them(tmp_path: Path) -> None:
    buckets = "1x512x512,1x256x256"
    small, large = (
        answer("estimate", "sd1.5", "--gpu", "24GB", "--buckets", shape)["step_seconds"]
        for shape in ("1x256x256", "1x512x512")
    )
    words = ("sd1.5", "--gpu", "24GB", "--buckets", buckets, "--steps", "1000")
    unknown = answer("estimate", *words)["whole_job"]["parts"]["training"]
    assert unknown["seconds"] == pytest.approx(1000 * small)
    assert unknown["seconds_high"] > 1000 * large
    data = str(pictures(tmp_path / "data", [(512, 512)] * 3 + [(256, 256)] * 1))
    known = answer("estimate", *words, "--data", data)["whole_job"]["parts"]["training"]
    assert known["seconds"] == pytest.approx(1000 * (3 * large + small) / 4)


def test_every_class_of_card_has_hours_and_the_best_are_named() -> None:
    words = ("suggest", "cogvideox-2b", "--frames", "9", "--steps", "2000", "--resolution", "240x352")
    found = answer(*words)
    whole = {row["gpu"]: row["whole_job"] for row in found["classes"] if row["plan"]}
    assert len(whole) > 10
    assert found["fastest"] == min(whole, key=lambda name: whole[name]["hours"])
    assert found["cheapest_by"] == "kwh"
    assert found["cheapest"] == min(whole, key=lambda name: whole[name]["kwh"])
    priced = answer(*words, "--price", "24GB=0.4", "--price", "192GB=6")
    money = {row["gpu"]: row["whole_job"]["money"] for row in priced["classes"] if row["plan"]}
    assert {name for name, price in money.items() if price is not None} == {"24GB", "192GB"}
    assert priced["cheapest_by"] == "money"
    assert priced["cheapest"] == min(("24GB", "192GB"), key=lambda name: money[name])
    page = typed(*words).stdout
    assert "hours" in page and "kWh" in page and f"fastest: {found['fastest']}, " in page
    assert f"cheapest in energy: {found['cheapest']}, " in page


def test_one_suggestion_tells_its_whole_job() -> None:
    found = answer("suggest", "cogvideox-2b", "--gpu", "24GB", "--steps", "1000", "--frames", "9")
    training = found["whole_job"]["parts"]["training"]
    assert training["seconds"] == pytest.approx(1000 * found["plan"]["step_seconds"])


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        (("--price", "2.5"), 2, "--price is about a whole job"),
        (("--data", "."), 2, "--data has no effect here"),
        (("--epochs", "2"), 2, "--epochs needs the data"),
        (("--steps", "10", "--epochs", "2", "--data", "."), 2, "both --steps and --epochs"),
        (("--steps", "10", "--price", "cheap"), 1, "'cheap' is not a price"),
        (("--steps", "10", "--price", "=3"), 1, "is not a price"),
        (("--steps", "10", "--price", "nan"), 1, "is not a price"),
        (("--steps", "10", "--price", "1", "--price", "2"), 2, "two prices for every card"),
        (("--steps", "10", "--price", "9GB=1"), 1, "is of no card in this answer"),
        (("--steps", "10", "--data", "/nowhere"), 1, "there is no folder"),
    ],
)
def test_bad_lengths_are_named_with_their_fix(words: tuple[str, ...], code: int, fault: str) -> None:
    done = typed("estimate", *WAN, *H100, *words, code=code)
    assert fault in done.stderr and "fix: " in done.stderr and done.stdout == ""


def test_a_job_that_only_samples_has_no_length() -> None:
    done = typed("estimate", "wan2.1-t2v-1.3b", *H100, "--method", "sample", "--steps", "10", code=1)
    assert "a job that only samples has no steps" in done.stderr


@pytest.mark.parametrize("asks", ["--validate-every 500", "--validation-steps 20", "--validation 81x480x832"])
def test_samples_that_are_asked_for_are_planned(asks: str) -> None:
    for verb in ("estimate", "suggest"):
        found = answer(verb, *WAN, *H100, *asks.split())
        plan = found if verb == "estimate" else found["plan"]
        assert plan["strategy"]["validation_mode"] == "on" and {"denoise", "decode"} <= plan["phases"].keys()
        kept = answer(verb, *WAN, *H100, *asks.split(), "--validation-mode", "off", code=0)
        assert "decode" not in (kept if verb == "estimate" else kept["plan"])["phases"]


def test_samples_are_made_as_the_card_has_room_for_them() -> None:
    """SDXL's VAE has no room next to the model on 5.9 GiB, and Mochi's needs about 25 GiB alone, without tiling."""
    small = answer("suggest", "sdxl", "--gpu", "6GiB", "--validate-every", "500")["plan"]
    assert small["verdict"] == "fits" and small["strategy"]["validation_mode"] == "offload"
    tiled = answer("suggest", "mochi-1", "--gpu", "16GB", "--validate-every", "500")["plan"]
    assert tiled["verdict"] == "fits" and tiled["strategy"]["vae_tiling"] and "vae_tiling" in tiled["lossy"]
    whole = answer("suggest", "mochi-1", "--gpu", "16GB")["plan"]
    assert not whole["strategy"]["vae_tiling"]


def test_another_trainers_steps_are_told_alone() -> None:
    found = answer("suggest", *WAN[:3], "--gpu", "24GB", "--for", "musubi-tuner", "--steps", "500", "--price", "0.4")
    whole = found["whole_job"]
    assert whole["parts"].keys() == {"training"} and whole["epochs"] is None
    assert whole["hours"] == pytest.approx(500 * found["plan"]["step_seconds"] / 3600)
    assert whole["money"] == pytest.approx(0.4 * whole["hours"])
    page = typed("suggest", *WAN[:3], "--gpu", "24GB", "--for", "musubi-tuner", "--steps", "500").stdout
    assert f"500 steps alone: {whole['hours']:.2f} to" in page


@pytest.mark.parametrize(
    ("given", "asks", "steps"),
    [
        (("--max_train_steps", "2000"), (), 2000),
        (("--max_train_steps", "2000"), ("--steps", "300"), 300),
        (("--max_train_steps", "2000", "--max_train_epochs", "10"), (), None),
        (("--max_train_epochs", "10"), ("--steps", "300"), 300),
        ((), (), None),
    ],
)
def test_a_command_says_its_steps(given: tuple[str, ...], asks: tuple[str, ...], steps: int | None) -> None:
    command = ("sdxl_train_network.py", "--network_module", "networks.lora", "--sdpa", "--mixed_precision", "bf16")
    where = ("--gradient_checkpointing", "--resolution", "1024,1024", "--train_data_dir", "images", "--cache_latents")
    words = ("check", "--gpu", "24GB", *asks, "--json", "--", "accelerate", "launch", *command, *where, *given)
    found = json.loads(typed(*words).stdout)
    if steps is None:
        assert "whole_job" not in found
    else:
        told = found["whole_job"]
        assert told["steps"] == steps
        assert told["hours"] == pytest.approx(steps * found["estimate"]["step_seconds"] / 3600)


# ---- `--buckets auto`

WAN_24 = ("wan2.1-t2v-1.3b", "--gpu", "24GB")


def write_video(path: Path, frames: int, height: int, width: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        picture = av.VideoFrame.from_ndarray(numpy.zeros((height, width, 3), numpy.uint8), format="rgb24")
        for _ in range(frames):
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    path.with_suffix(".txt").write_text("a clip")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five clips of 49 frames, three portrait ones of 33, and thirty pictures."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(5):
        write_video(folder / f"long{number}.mp4", 52, 240, 416)
    for number in range(3):
        write_video(folder / f"tall{number}.mp4", 33, 416, 240)
    for number in range(30):
        Image.new("RGB", (416, 240)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a picture")
    return str(folder)


def shape_of(entry: dict[str, Any]) -> tuple[int, int, int]:
    return entry["frames"], entry["height"], entry["width"]


def test_the_shapes_of_the_data_get_batches_that_fit_and_even_out_steps(data: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    found = answer("suggest", *WAN_24, "--buckets", "auto", "--data", data, "-o", str(path))
    told = {shape_of(entry): entry for entry in found["buckets"]}
    assert list(told) == [(49, 240, 416), (33, 416, 240), (1, 240, 416)]
    assert found["plan"]["verdict"] == "fits" and found["plan"]["high_bytes"] <= found["plan"]["budget_bytes"]
    slowest = told[49, 240, 416]["step_seconds"]
    assert found["plan"]["step_seconds"] == pytest.approx(slowest, rel=0.03)
    assert all(entry["step_seconds"] <= 1.02 * slowest for entry in told.values())
    assert told[49, 240, 416]["batch_size"] == 1 and told[1, 240, 416]["batch_size"] >= 5

    plan = read_plan(path)
    assert [(one.frames, one.height, one.width, one.batch_size) for one in plan.job.buckets] == [
        (*shape, entry["batch_size"]) for shape, entry in told.items()
    ]
    assert (plan.job.frames, plan.job.height, plan.job.width) == (49, 240, 416)  # not the model's own 81x480x832
    again = answer("estimate", str(path))
    assert again["peak"] == found["plan"]["peak"] and again["step_seconds"] == found["plan"]["step_seconds"]
    for shape, entry in told.items():
        batch = entry["batch_size"]
        more = "x".join(map(str, (*shape, batch + 1)))
        asked = ("estimate", str(path), "--buckets", more, "--json")
        one = json.loads(CliRunner().invoke(cli, asked, prog_name="vplan").stdout)
        samples = {(49, 240, 416): 5, (33, 416, 240): 3, (1, 240, 416): 30}[shape]
        assert batch == samples or one["step_seconds"] > 1.02 * slowest or one["verdict"] != "fits"


def test_an_epoch_takes_less_than_with_one_sample_a_step(data: str) -> None:
    words = ("--gpu", "80GB", "--gradient-checkpointing", "full", "--data", data, "--epochs", "10")
    plain = "49x240x416,33x416x240,1x240x416"
    even, before = (
        answer("estimate", "wan2.1-t2v-1.3b", *words, "--buckets", shapes)["whole_job"] for shapes in ("auto", plain)
    )
    assert before["steps"] == 380
    assert even["steps"] < before["steps"] and even["hours"] < before["hours"]


def test_a_resolution_and_a_length_are_limits(data: str) -> None:
    words = ("--buckets", "auto", "--data", data, "--resolution", "128x224", "--frames", "17")
    found = answer("estimate", *WAN_24, "--gradient-checkpointing", "full", *words)
    assert [shape_of(entry) for entry in found["buckets"]] == [(17, 128, 224), (17, 224, 128), (1, 128, 224)]


@pytest.mark.parametrize("verb", ["suggest", "estimate"])
@pytest.mark.parametrize("length", [(), ("--steps", "100")], ids=["shapes alone", "a whole job"])
def test_clips_that_cannot_be_used_are_refused_or_skipped(tmp_path: Path, verb: str, length: tuple[str, ...]) -> None:
    """With or without a length, as in training; the fix names an option of the command."""
    for number in range(3):
        write_video(tmp_path / f"{number}.mp4", 33, 240, 416)
    write_video(tmp_path / "silent.mp4", 81, 416, 240)
    (tmp_path / "silent.txt").unlink()
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "empty.txt").write_text("nothing")
    words = (verb, *WAN_24, "--gradient-checkpointing", "full", "--buckets", "auto", "--data", str(tmp_path), *length)
    refused = typed(*words, code=1).stderr
    assert "2 of 5 samples cannot be used" in refused and "silent.mp4: caption missing" in refused
    assert "empty.mp4: " in refused and "leave them out with --skip-bad" in refused
    done = typed(*words, "--skip-bad", "--json")
    assert [shape_of(entry) for entry in json.loads(done.stdout)["buckets"]] == [(33, 240, 416)]
    assert done.stderr.count("skipped: silent.mp4") == done.stderr.count("skipped: empty.mp4") == 1
    for path in tmp_path.glob("?.*"):
        path.unlink()
    assert "2 of 2 samples cannot be used" in typed(*words, "--skip-bad", code=1).stderr


def test_the_table_is_for_people_too(data: str) -> None:
    page = typed("estimate", *WAN_24, "--gradient-checkpointing", "full", "--buckets", "auto", "--data", data).stdout
    assert "shape of the data" in page and "--buckets 49x240x416x1," in page


def test_a_step_of_several_shapes_is_as_long_as_the_slowest() -> None:
    slow, small = "1x512x512", "1x256x256x8"
    alone = answer("estimate", "sd1.5", "--gpu", "24GB", "--buckets", slow)["step_seconds"]
    small_alone = answer("estimate", "sd1.5", "--gpu", "24GB", "--buckets", small)["step_seconds"]
    both = answer("estimate", "sd1.5", "--gpu", "24GB", "--buckets", f"{slow},{small}")["step_seconds"]
    assert both == pytest.approx(max(alone, small_alone))


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        (("estimate", *WAN_24, "--buckets", "auto"), 1, "--buckets auto needs the clips"),
        (("suggest", *WAN_24, "--buckets", "auto"), 1, "--buckets auto needs the clips"),
        (("suggest", "--gpu", "24GB", "--buckets", "auto", "--data", "."), 2, "--buckets auto needs a single model"),
        (("estimate", *WAN_24, "--buckets", "auto", "--data", "/nowhere"), 1, "there is no folder"),
    ],
)
def test_what_lacks_is_said(words: tuple[str, ...], code: int, fault: str) -> None:
    done = typed(*words, code=code)
    assert fault in done.stderr and "fix: " in done.stderr and done.stdout == ""


# ---- published step times


def test_other_trainers_blocks_are_timed_as_they_compute() -> None:
    found = {cell["id"]: cell for cell in answer("accuracy", "--seconds", "--only", "wan14b")["cells"]}
    assert 0 < found["st-wan14b-bf16-layer-l40s"]["error_pct"] < 20  # 20.1 with diffusers' modulation in fp32
    naive = [found[f"nemo-wan14b-automodel-{gpus}xh100"] for gpus in (8, 64)]
    assert all(cell["error_pct"] < -25 and "325.77 TFLOP/s" in cell["note"] for cell in naive)
    assert "tensor parallel" in found["nemo-wan14b-megatron-128xh100"]["left_out"]
