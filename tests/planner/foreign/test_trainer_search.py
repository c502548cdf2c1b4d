"""`vplan suggest --for TRAINER` and `vplan export MODEL`, as they are typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import vplan
from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import job_for
from planner.errors import VplanError
from planner.foreign.export import export
from planner.foreign.trainer_search import fitting_for, suggest_for
from planner.search.question import Question
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Plan
from planner.units import GIB
from tests.command_line import typed


def run(*words: str, code: int = 0) -> Any:
    return json.loads(typed(*words, "--json", code=code).stdout)


@pytest.mark.parametrize(
    ("model", "trainer", "more"),
    [
        ("wan2.1-t2v-14b", "musubi-tuner", ["--frames", "33"]),  # swaps blocks
        ("wan2.2-t2v-a14b", "musubi-tuner", ["--frames", "33"]),  # two experts
        ("qwen-image", "diffusion-pipe", []),  # adapters on all linear layers
        ("flux.1-dev", "sd-scripts", []),
        ("sdxl", "sd-scripts", ["--method", "full"]),  # another of its scripts; weights in 16 bits under autocast
        ("sd1.5", "sd-scripts", []),
        ("hunyuan-image-2.1", "sd-scripts", []),
    ],
)
def test_what_is_suggested_is_what_the_trainers_files_do(
    tmp_path: Path, model: str, trainer: str, more: list[str]
) -> None:
    """The files are read back as anybody's would be: the same strategy, and the same peak."""
    out = tmp_path / "out"
    answer = run("suggest", model, "--gpu", "24GB", "--for", trainer, *more, "-o", str(out))
    assert answer["plan"]["verdict"] == "fits" and answer["trainer"] == trainer
    assert sorted(answer["files"]) == sorted(str(path) for path in out.iterdir())
    started = next(path for path in out.iterdir() if path.suffix == ".sh")
    checked = run("check", str(started), "--gpu", "24GB", "--no-fixes")
    assert checked["trainer"].partition("@")[0] == trainer and checked["job"]["model"] == model
    assert checked["estimate"]["peak"] == answer["plan"]["peak"]
    for field in ("gradient_checkpointing", "swap_blocks", "weights_dtype", "optimizer"):
        assert checked["strategy"][field] == answer["plan"]["strategy"][field], field


def test_full_training_in_16_bits_under_autocast_is_searched() -> None:
    """sd-scripts trains so, and our trainer does not. Its own code of FLUX.1 took 69.0 GiB of the device (48d368f)."""
    plan = run("suggest", "flux.1-dev", "--gpu", "80GB", "--method", "full", "--for", "sd-scripts")["plan"]
    assert plan["verdict"] == "fits" and plan["strategy"]["sharding"] == "none"
    assert (plan["strategy"]["weights_dtype"], plan["strategy"]["autocast"]) == ("bf16", "bf16")


def test_full_training_steps_inside_backward_where_nothing_else_fits(tmp_path: Path) -> None:
    """kohya-ss/sd-scripts#1259 was made for it. Where the optimizer fits behind backward, that is what is suggested."""
    asked = ["suggest", "sdxl", "--method", "full", "--for", "sd-scripts"]
    answer = run(*asked, "--gpu", "12GB", "-o", str(tmp_path / "out"))
    plan = answer["plan"]
    assert plan["verdict"] == "fits" and "optimizer_step" in plan["lossy"]
    assert (plan["strategy"]["optimizer"], plan["strategy"]["optimizer_step"]) == ("adafactor", "backward")
    script = next(path for path in (tmp_path / "out").iterdir() if path.suffix == ".sh")
    assert "--fused_backward_pass" in script.read_text()
    checked = run("check", str(script), "--gpu", "12GB", "--no-fixes")
    assert checked["estimate"]["peak"] == plan["peak"]
    assert run(*asked, "--gpu", "80GB")["plan"]["strategy"]["optimizer_step"] != "backward"


def test_blocks_of_full_training_swap_while_it_steps_inside_backward() -> None:
    """bmaltais/kohya_ss#2972: FLUX.1 whole on a card of 24 GB."""
    asked = ["suggest", "flux.1-dev", "--method", "full", "--gpu", "24GB", "--host-ram", "64GB", "--for", "sd-scripts"]
    plan = run(*asked)["plan"]
    assert plan["verdict"] == "fits" and plan["strategy"]["swap_blocks"] > 0
    assert plan["strategy"]["optimizer_step"] == "backward"


@pytest.mark.parametrize(
    ("model", "trainer"), [("sdxl", "diffusers"), ("sdxl", "sd-scripts"), ("z-image", "ai-toolkit")]
)
def test_a_card_without_bf16_is_searched_as_any_other(model: str, trainer: str, tmp_path: Path) -> None:
    """diffusers' own checkpointing was never tried, and the others told to say what they refused."""
    answer = run("suggest", model, "--gpu", "t4", "--for", trainer, "-o", str(tmp_path / "out"))
    plan = answer["plan"]
    assert plan["verdict"] == "fits"
    assert "bf16" not in {plan["strategy"]["autocast"], plan["strategy"]["weights_dtype"]}
    started = next(path for path in (tmp_path / "out").iterdir() if path.suffix == ".sh")
    checked = run("check", str(started), "--gpu", "t4", "--no-fixes")
    assert checked["estimate"]["peak"] == plan["peak"]
    typed_out = run("suggest", model, "--gpu", "t4", "--for", trainer, "--compute-dtype", "fp16")
    assert typed_out["plan"]["peak"] == plan["peak"]


def test_what_follows_from_a_trainers_engine_is_its_own() -> None:
    """LatentSync trains with DDP on one GPU too, whose buckets are then copies: all else is still searched."""
    plan = run("suggest", "latentsync-1.6-stage1", "--gpu", "24GB", "--method", "full", "--for", "latentsync")["plan"]
    strategy = plan["strategy"]
    assert (strategy["sharding"], strategy["grad_buckets"]) == ("ddp", "copy")
    assert plan["verdict"] == "fits" and strategy["gradient_checkpointing"] == "full"


def test_checkpoints_in_host_ram_are_priced_beside_weights_that_are_gathered() -> None:
    """DiffSynth fetches an input when its block's backward begins; ZeRO-3 frees weights where ours would be fetched."""
    plan = run("suggest", "wan2.1-t2v-1.3b", "--gpu", "24GB", "--method", "full", "--for", "diffsynth")["plan"]
    assert plan["verdict"] == "fits"


def test_export_of_a_model_plans_first(tmp_path: Path) -> None:
    words = ["wan2.1-t2v-1.3b", "--gpu", "24GB", "--frames", "33"]
    done = run("export", *words, "--to", "musubi", "-o", str(tmp_path / "out"))
    assert done["trainer"] == "musubi-tuner" and (tmp_path / "out" / "train.sh").is_file()
    suggested = run("suggest", *words, "--for", "musubi-tuner")
    assert done["estimate"]["peak"] == suggested["plan"]["peak"] and not done["changed"]
    assert vplan.suggest(words[0], gpu="24GB", frames=33, trainer="musubi").estimate.to_json() == suggested["plan"]
    again = run("suggest", *words, "--for", "musubi", "-o", str(tmp_path / "plan.toml"))
    assert vplan.read_plan(tmp_path / "plan.toml").trainer == "musubi-tuner" and again["files"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flux.1-dev", "--for", "musubi-tuner"], "musubi-tuner cannot do this: model 'flux.1-dev'"),
        (["wan2.1-t2v-14b", "--for", "musubi-tuner", "--ema", "gpu"], "musubi-tuner cannot do --ema gpu"),
        (
            ["hunyuan-video", "--for", "diffusion-pipe", "--gpu", "8GB"],
            "diffusion-pipe cannot do what this needs here: vae_tiling",
        ),
        (["flux.1-dev", "--for", "onetrainer"], "OneTrainer's files are read, not written"),
        (["wan2.1-t2v-14b", "--for", "musuby"], "there is no export to 'musuby'"),
        (["sdxl", "--for", "kohya_ss"], "there is no export to 'kohya_ss'"),
        (["sdxl", "--for", "simpletuner", "--gpu", "t4"], "SimpleTuner computes in bf16 here, which Tesla T4 does not"),
    ],
)
def test_what_a_trainer_cannot_do_is_one_sentence(words: list[str], message: str) -> None:
    error = run("suggest", "--gpu", "24GB", *words, code=1)["error"]
    assert message in error["message"] and error["fix"]


def test_what_is_suggested_for_a_trainer_its_export_takes_or_it_is_no() -> None:
    """It runs only because PyTorch empties its cache, and export refuses that."""
    import vplan

    found = vplan.suggest("cogvideox-2b", gpu="20GB", trainer="diffusers")
    assert found.estimate.verdict == "no"
    wishes = found._suggestion.relaxed
    assert {wish.field for wish in wishes} == {"frames", "resolution"}, "and no adapter format that it does not have"


def test_a_trainer_whose_adapters_copy_their_inputs_has_plans() -> None:
    """What it cannot do, adapters that share their inputs, does not stand for what it can."""
    plan = run("suggest", "wan2.1-t2v-1.3b", "--gpu", "24GB", "--for", "videox-fun", "--frames", "33")["plan"]
    assert (plan["verdict"], plan["strategy"]["adapter_inputs"]) == ("fits", "cast")


def test_a_number_of_swapped_blocks_is_one_that_the_trainer_can_do(tmp_path: Path) -> None:
    """musubi-tuner swaps the two kinds of FLUX.2's blocks together."""
    out = tmp_path / "out"
    found = run("suggest", "flux.2-klein-9b", "--gpu", "8GB", "--for", "musubi-tuner", "-o", str(out))
    assert found["plan"]["verdict"] == "fits" and "--blocks_to_swap 14" in (out / "train.sh").read_text()
    assert found["plan"]["strategy"]["swap_blocks"] == 24


def test_swapped_blocks_are_no_more_than_the_ram_holds_as_the_trainer_pins_them() -> None:
    """diffusion-pipe's swapped blocks are pinned, in powers of two. Swapping as many as our own trainer's copies leave
    room for, every plan with swapped blocks lacked RAM, and one without checkpointing was called the smallest."""
    found = vplan.suggest("wan2.1-t2v-14b", gpu="24GB", trainer="diffusion-pipe", host_ram="26GiB")
    typed = {"weights_dtype": "fp8", "gradient_checkpointing": "full", "host_ram": "26GiB"}
    narrower = vplan.suggest("wan2.1-t2v-14b", gpu="24GB", trainer="diffusion-pipe", **typed)
    plan = found.estimate
    assert plan.verdict == narrower.estimate.verdict == "no"
    assert plan.host_ram_bytes <= 26 << 30 and plan.peak.device_bytes <= narrower.estimate.peak.device_bytes
    wishes = found._suggestion.relaxed
    assert any(not wish.plan.lossy for wish in wishes), "what fits without a quantised base is told too"


def test_a_card_of_the_class_that_cannot_run_a_plan_does_not_hide_it() -> None:
    """Of the cards sold as 16 GB the T4 has no bf16, in which the adapters' layers are recorded."""
    asked = ("--gpu", "16GB", "--for", "diffusion-pipe", "--weights-dtype", "fp8", "--host-ram", "40GiB")
    plan = run("suggest", "flux.1-dev", *asked)["plan"]
    assert (plan["verdict"], plan["strategy"]["weights_dtype"]) == ("fits", "fp8")


def test_one_more_swapped_block_is_tried_where_the_holes_of_fewer_are_too_large() -> None:
    """What a replay loses to fragmentation with too few swapped blocks must not count against every number: 30 blocks
    are tight here, for 0.73 GiB of holes, and one or two more fit."""
    asked = {"gpu": "14GiB", "frames": 21, "trainer": "diffusion-pipe", "host_ram": "64GiB", "weights_dtype": "fp8"}
    plan = vplan.suggest("wan2.2-t2v-a14b", **asked).estimate
    strategy = plan.configuration.strategy
    assert plan.verdict == "fits" and strategy.swap_blocks in (31, 32)
    fewer = {"swap_blocks": 30, "gradient_checkpointing": strategy.gradient_checkpointing}
    assert vplan.suggest("wan2.2-t2v-a14b", **asked, **fewer).estimate.verdict == "tight"


def test_encoders_go_elsewhere_where_nothing_else_fits(tmp_path: Path) -> None:
    """VideoX-Fun keeps its encoders on the GPU unless it is told to, and caches nothing."""
    asked = ["suggest", "wan2.1-t2v-1.3b", "--for", "videox-fun", "--resolution", "512x512"]
    answer = run(*asked, "--gpu", "16GB", "-o", str(tmp_path / "out"))
    plan = answer["plan"]
    assert plan["verdict"] == "fits" and plan["strategy"]["text_encoder"] == plan["strategy"]["vae"] == "swapped"
    assert {"text_encoder", "vae"} <= {switch["field"] for switch in answer["switches"]}
    script = next(path for path in (tmp_path / "out").iterdir() if path.suffix == ".sh")
    assert "--low_vram" in script.read_text()
    assert run("check", str(script), "--gpu", "16GB", "--no-fixes")["estimate"]["peak"] == plan["peak"]
    assert run(*asked, "--gpu", "24GB")["plan"]["strategy"]["text_encoder"] == "resident"
    typed_so = run(*asked, "--gpu", "16GB", "--text-encoder", "resident", "--vae", "resident", code=3)
    assert typed_so["plan"]["strategy"]["text_encoder"] == "resident"


def test_the_smaller_of_two_plans_that_do_not_fit_is_shown() -> None:
    """EasyAnimate has everything on the GPU at its start: swapped encoders take less, and too much."""
    plan = run("suggest", "easyanimate-v5.1-7b", "--gpu", "24GB", "--for", "easyanimate", code=3)["plan"]
    assert plan["verdict"] == "no" and plan["strategy"]["text_encoder"] == "swapped"


def test_a_plan_that_fits_is_looked_for_behind_one_that_is_tight() -> None:
    """With 16-bit weights under autocast it is tight while the encoders stay, and it fits where they are swapped."""
    full = ["wan2.1-t2v-1.3b", "--for", "videox-fun", "--method", "full", "--frames", "17", "--host-ram", "26GiB"]
    plan = run("suggest", *full, "--gpu", "24GB")["plan"]
    assert (plan["verdict"], plan["strategy"]["text_encoder"]) == ("fits", "swapped")
    beside = run("suggest", *full, "--gpu", "24GB", "--text-encoder", "resident", "--vae", "resident")["plan"]
    assert beside["verdict"] == "tight"


@pytest.mark.parametrize(
    ("model", "gpu", "trainer"),
    [
        ("sdxl", "24GB", "diffusers"),
        ("hunyuan-video", "16GB", "musubi-tuner"),
        ("hidream-i1", "12GB", "ai-toolkit"),
        ("wan2.1-t2v-1.3b", "12GB", "videox-fun"),
    ],
)
def test_the_plan_alone_is_that_of_the_explained_answer(model: str, gpu: str, trainer: str) -> None:
    profile, (_, card) = lookup.model(model), card_lookup.parse_gpus(gpu)
    job = job_for(profile, {"method": "lora"})
    question = Question(job, Strategy(), Machine(gpu=gpu), profile, card)
    explained = suggest_for(question, trainer)[1].plan
    alone = fitting_for(question, trainer)
    if explained.verdict == "no":
        assert alone is None
    else:
        assert alone is not None and (alone.peak, alone.strategy) == (explained.peak, explained.strategy)


def test_formats_that_no_plan_says_are_told_of_where_nothing_fits() -> None:
    words = ("flux.2-dev", "--gpu", "24GB", "--host-ram", "70GiB", "--for", "ai-toolkit")
    plan = run("suggest", *words, code=3)["plan"]
    assert plan["verdict"] == "no"
    (told,) = [note for note in plan["assumptions"] if "qtype" in note]
    assert re.search(r"uint\d", told) and "`vplan check`" in told
    fits = run("suggest", "flux.1-dev", "--gpu", "24GB", "--host-ram", "70GiB", "--for", "ai-toolkit")["plan"]
    assert not any("qtype" in note for note in fits["assumptions"])


def test_a_name_of_several_models_is_answered_for_each_as_the_trainer_trains() -> None:
    words = ("--gpu", "24GB", "--for", "sd-scripts")
    rows = {row["model"]: row for row in run("suggest", "flux", *words)["models"]}
    alone = run("suggest", "flux.1-dev", *words)["plan"]
    assert rows["flux.1-dev"]["plan"]["strategy"] == alone["strategy"]
    assert rows["flux.2-dev"]["plan"] is None and rows["flux.2-dev"]["reason"].startswith("sd-scripts cannot do this")
    refused = run("suggest", "flux", *words, "-o", "out", code=2)["error"]
    assert "need a single plan" in refused["message"] and "flux.1-dev" in refused["fix"]


def test_what_a_trainer_does_otherwise_is_assumed_no_longer() -> None:
    found = run("suggest", "wan2.2-t2v-a14b", "--gpu", "80GB", "--for", "ai-toolkit", "--frames", "17")["plan"]
    assert found["job"]["experts"] == "both" and found["job"]["height"] == found["job"]["width"]
    assumed = "; ".join(found["assumptions"])
    assert "--experts both)" in assumed and "one of the two experts" not in assumed
    assert "480x832" not in assumed


def test_a_card_without_bf16_is_not_told_that_the_trainer_computes_in_it() -> None:
    """Its autocast is fp16, whatever the dtype that counts where there is none."""
    found = run("suggest", "sdxl", "--gpu", "t4", "--for", "diffusers")["plan"]
    assumed = "; ".join(found["assumptions"])
    assert found["strategy"]["autocast"] == "fp16" and "fp16, because Tesla T4 has no bf16" in assumed
    assert "compute-dtype" not in assumed


def test_a_trainer_of_one_gpu_says_so() -> None:
    done = typed("suggest", "flux.1-dev", "--gpu", "2x48GB", "--for", "ai-toolkit", code=1)
    assert "trains on one GPU here" in done.stderr and "--gpu 48GB" in done.stderr


def test_a_model_that_a_trainer_has_not_is_sent_to_those_that_have_it() -> None:
    done = typed("suggest", "wan2.1-t2v-14b", "--gpu", "24GB", "--for", "sd-scripts", code=1)
    others = done.stderr.partition("--for ")[2].partition(" for others")[0].split(", ")
    assert "musubi-tuner" in others and "sd-scripts" not in others


@pytest.mark.parametrize("model", ["wan2.1-t2v-14b", "sdxl", "hidream-i1", "z-image", "flux.1-dev", "krea-2"])
def test_what_simpletuner_trains_is_not_quantised_where_there_is_room(model: str) -> None:
    """Its adapters over a base that is not quantised are always in 16 bits, and its AdamW steps one parameter after
    another: neither is what our trainer searches, and neither is given up for the sake of memory."""
    plan = run("suggest", model, "--gpu", "192GB", "--for", "simpletuner")["plan"]
    assert plan["verdict"] == "fits"
    assert (plan["strategy"]["weights_dtype"], plan["strategy"]["adapter_dtype"]) == ("bf16", "bf16")


def test_ram_that_swapped_blocks_need_is_not_asked_for_without_them() -> None:
    """musubi-tuner reads Wan 14B into host RAM whole where a block is swapped, 26.6 GiB in 16 bits, and only there."""
    job = job_for(lookup.model("wan2.1-t2v-14b"), {"frames": 17, "height": 256, "width": 256})
    machine = Machine(gpu="48GB", host_ram=16 * GIB)
    question = Question(job, Strategy(), machine, lookup.model("wan2.1-t2v-14b"), card_lookup.gpu("48GB"))
    plan = suggest_for(question, "musubi-tuner")[1].plan
    assert plan.verdict == "fits" and not plan.strategy.swap_blocks and not plan.lossy


@pytest.mark.parametrize(
    ("model", "trainer", "gpu", "more", "said"),
    [
        ("z-image", "videox-fun", "4x80GB", ["--method", "full"], "--zero3_save_16bit_model true"),
        ("easyanimate-v5.1-12b", "easyanimate", "4x80GB", ["--method", "full"], "deepspeed.json"),
        ("z-image", "videox-fun", "80GB", ["--method", "full"], "--mixed_precision bf16"),
        ("wan2.2-ti2v-5b", "simpletuner", "48GB", ["--method", "full"], '"bnb-adamw8bit"'),
        ("wan2.1-t2v-14b", "simpletuner", "2x24GB", [], '"musubi_blocks_to_swap"'),
        ("sdxl", "sd-scripts", "2x24GB", ["--method", "full"], "--zero_stage 2"),
        ("sd3.5-medium", "diffusers", "2x24GB", ["--method", "full"], "--checkpointing_steps 1000000"),
    ],
)
def test_full_training_and_several_cards_are_read_back(
    tmp_path: Path, model: str, trainer: str, gpu: str, more: list[str], said: str
) -> None:
    """The third to the fifth found nothing; the others named ZeRO as its data loader or its save does not take it."""
    out, machine = tmp_path / "out", ["--gpu", gpu, "--host-ram", "512GiB"]
    answer = run("suggest", model, *machine, "--for", trainer, *more, "-o", str(out))
    assert answer["plan"]["verdict"] == "fits"
    assert any(said in path.read_text() for path in out.rglob("*") if path.is_file())
    checked = run("check", str(out / "train.sh"), *machine, "--no-fixes")
    assert checked["verdict"] == "fits"
    assert checked["strategy"]["sharding"] == answer["plan"]["strategy"]["sharding"]
    assert checked["estimate"]["peak"]["device_bytes"] == answer["plan"]["peak"]["device_bytes"]


def test_deepspeed_s_file_says_the_batch_that_accelerate_cannot_know(tmp_path: Path) -> None:
    """accelerate 1.15: "At least one of the dataloaders passed to `accelerate.prepare()` has `None` as batch size"."""
    words = ("--method", "full", "--sharding", "zero-3", "--gpu", "4x80GB", "--batch-size", "2", "--host-ram", "512GiB")
    run("suggest", "z-image", *words, "--for", "videox-fun", "-o", str(tmp_path / "out"))
    found = json.loads((tmp_path / "out/deepspeed.json").read_text())
    assert found["train_micro_batch_size_per_gpu"] == 2 and found["zero_optimization"]["stage"] == 3
    assert found["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.parametrize(
    ("model", "trainer", "sharding", "why"),
    [
        ("flux.1-dev", "diffusers", "zero-3", "saves what one GPU has of the weights"),
        ("qwen-image", "diffusers", "zero-2", "refuses its data loader under DeepSpeed"),
        ("flux.1-dev", "sd-scripts", "zero-3", "what one GPU has of the weights, most of them empty"),
        ("easyanimate-v5.1-7b", "easyanimate", "zero-3", "a LoRA's adapters alone"),
    ],
)
def test_zero_that_a_script_cannot_train_or_save_with_is_refused(
    model: str, trainer: str, sharding: str, why: str
) -> None:
    """Rehearsed with deepspeed 0.19.8: under stage 3 `state_dict` has weights of over 100,000 numbers empty."""
    machine = Machine(gpu="80GB", gpus=4)
    plan = Plan(job=job_for(lookup.model(model), {}), strategy=Strategy.read({"sharding": sharding}), machine=machine)
    with pytest.raises(VplanError, match=why):
        export(plan, trainer)
