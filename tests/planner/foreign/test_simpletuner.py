"""planner/dialects/simpletuner: what is written, what is refused with the nearest, and what starts it, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import nearest_fields, settings_for, translate
from planner.dialects.base.script import from_file, from_words
from planner.dialects.simpletuner.models import CONFIG, model_of
from planner.dialects.simpletuner.settings import DIALECT
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import check_case
from planner.foreign.export import export, export_targets, fields_of, write_files
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve

LORA = {"adapter_dtype": "bf16", "optimizer_step": "loop", "gradient_checkpointing": "full"}
"""What it does with LoRA unless the base is quantised."""


def plan(model: str, job: dict[str, Any] | None = None, strategy: dict[str, Any] | None = None, **world: int) -> Plan:
    wanted = job_for(lookup.model(model), {"method": "lora", **(job or {})})
    machine = Machine(gpu="900GiB", host_ram=8 << 40, **world)
    tiled = {"vae_tiling": model.startswith(("wan", "hidream"))}
    own = Strategy.read(LORA | tiled | (strategy or {}))
    return Plan(job=wanted, strategy=resolve(wanted, own, machine), machine=machine)


def written(folder: Path, asked: Plan) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The config and the sets of an export, which stays in the folder."""
    write_files(export(asked, "simpletuner"), folder, False)
    config, data = (json.loads((folder / f"config/{name}.json").read_text()) for name in ("config", "multidatabackend"))
    return config, data


def refused(asked: Plan) -> dict[str, tuple[object, object]]:
    """Field -> (value, the nearest) of what cannot be said."""
    with pytest.raises(InexpressibleError) as error:
        settings_for(DIALECT, fields_of(asked))
    return {each.field: (each.value, each.instead) for each in error.value.values}


def test_what_schnell_does_not_start_without_is_written(tmp_path: Path) -> None:
    """helpers/models/flux/model.py ``check_user_config``."""
    config, _ = written(tmp_path, plan("flux.1-schnell"))
    assert (config["model_flavour"], config["flux_fast_schedule"]) == ("schnell", True)
    assert translate(*dialects.read_script(from_file(tmp_path / "config/config.json"))).refused == ()
    dev, _ = written(tmp_path / "dev", plan("flux.1-dev"))
    assert dev["model_flavour"] == "dev" and "flux_fast_schedule" not in dev


def test_dora_is_peft_s_where_it_is_on_the_layers_that_are_recorded(tmp_path: Path) -> None:
    config, _ = written(tmp_path, plan("z-image", {"adapter": "dora"}))
    assert config["use_dora"] is True and "use_dora" not in written(tmp_path / "lora", plan("z-image"))[0]
    (tmp_path / "config/config.json").write_text(json.dumps(config))
    read = translate(*dialects.read_script(from_file(tmp_path / "config/config.json")))
    assert read.job["adapter"] == "dora"
    for changes, match in (
        ({"base_model_precision": "int8-quanto"}, "turns use_dora off"),
        ({"model_family": "flux", "model_flavour": "dev"}, "recorded on more layers"),
        ({"ramtorch": True}, "adapters of its own"),
    ):
        (tmp_path / "config/config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(VplanError, match=match):
            translate(*dialects.read_script(from_file(tmp_path / "config/config.json")))


def test_a_config_as_its_quickstart_has_it(tmp_path: Path) -> None:
    assert "simpletuner" in export_targets()
    config, data = written(tmp_path, plan("flux.1-dev", {"lora_rank": 32}, {"expandable_segments": True}))
    assert config == {
        "model_family": "flux",
        "model_flavour": "dev",
        "model_type": "lora",
        "lora_rank": 32,
        "lora_dropout": 0.0,
        "lora_type": "standard",
        "lora_alpha": 32,
        "data_backend_config": "config/multidatabackend.json",
        "output_dir": "output",
        "seed": 42,
        "train_batch_size": 1,
        "optimizer": "adamw_bf16",
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "learning_rate": 1e-4,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 100,
        "max_train_steps": 2000,
        "num_train_epochs": 0,
        "checkpoint_step_interval": 250,
        "checkpoints_total_limit": 4,
        "validation_disable": True,
        "report_to": "none",
        "push_to_hub": False,
    }
    samples, texts = data
    assert (samples["resolution"], samples["resolution_type"], samples["crop"]) == (1024, "pixel_area", False)
    assert (samples["instance_data_dir"], samples["caption_strategy"]) == ("data/my_set", "textfile")
    assert (texts["dataset_type"], texts["default"]) == ("text_embeds", True)
    script = (tmp_path / "train.sh").read_text().splitlines()
    assert script[-2:] == ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "simpletuner train"]
    assert "#   lora_rank: job.lora_rank" in script and "#   resolution: job.height, job.width" in script


def test_full_fine_tuning_and_an_optimizer_that_finds_its_rate(tmp_path: Path) -> None:
    full = {"weights_dtype": "bf16", "optimizer": "prodigy", "optimizer_step": "foreach"}
    config, _ = written(tmp_path, plan("sd3.5-medium", {"method": "full", "text_tokens": 231}, full))
    assert (config["model_type"], config["learning_rate"], config["lr_scheduler"]) == ("full", 1.0, "constant")
    assert not {"lora_rank", "lora_type", "lr_warmup_steps"} & config.keys()
    assert config["tokenizer_max_length"] == 154


@pytest.mark.parametrize(
    ("model", "size", "nearest", "settings"),
    [
        ("wan2.1-t2v-14b", (832, 480), (832, 480), (640, [1.7333], None)),
        ("wan2.1-t2v-14b", (480, 832), (480, 832), (640, [0.5769], None)),
        ("wan2.1-t2v-14b", (1280, 720), (1280, 704), (960, [1.8182], None)),
        ("wan2.2-ti2v-5b", (1280, 704), (1280, 704), (960, [1.8182], None)),
        ("hunyuan-video-1.5", (848, 480), (848, 480), (640, [1.7667], 16)),
        ("ltx-2", (960, 544), (960, 512), (704, [1.875], None)),
        ("flux.2-dev", (1040, 1040), (1040, 1040), (1040, None, None)),
        ("flux.1-dev", (1040, 1040), (1024, 1024), (1024, None, None)),
        ("z-image", (1040, 1040), (1040, 1040), (1040, None, 16)),
        ("qwen-image", (1664, 928), (1664, 928), (1248, [1.7931], None)),
    ],
)
def test_sizes_are_buckets(
    model: str, size: tuple[int, int], nearest: tuple[int, int], settings: tuple[Any, ...], tmp_path: Path
) -> None:
    """Upright samples are cropped to the same size, and both sides are multiples of what the family takes."""
    asked = plan(model, {"width": size[0], "height": size[1]})
    near = nearest_fields(DIALECT, fields_of(asked))
    assert (near["width"], near["height"]) == nearest
    if size != nearest:
        wrong = {name for name, value, other in zip(("width", "height"), size, nearest, strict=True) if value != other}
        assert refused(asked).keys() >= wrong
        asked = plan(model, {"width": nearest[0], "height": nearest[1], "frames": near["frames"]})
    config, (samples, *_) = written(tmp_path, asked)
    found = samples["resolution"], samples.get("crop_aspect_buckets"), config.get("aspect_bucket_alignment")
    assert found == settings
    assert samples["crop"] is bool(settings[1])
    read = translate(*dialects.read_script(from_file(tmp_path / "train.sh"))).job
    assert (read["width"], read["height"], read["frames"]) == (*nearest, asked.job.frames)


def test_clips_are_cut_to_what_the_trainer_cuts_them_to() -> None:
    assert refused(plan("wan2.1-t2v-14b", {"frames": 77}))["frames"] == (77, 73)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ({"weights_dtype": "int8"}, ("int8-torchao", "cpu", "adamw_bf16")),
        ({"weights_dtype": "fp8", "adapter_dtype": "fp32", "optimizer_step": "foreach"},
         ("fp8wo-torchao", "cpu", "torch-adamw")),
        ({"weights_dtype": "nf4"}, ("nf4-bnb", None, "adamw_bf16")),
        ({"optimizer": "adamw-8bit", "optimizer_step": "foreach"}, (None, None, "bnb-adamw8bit")),
        ({"optimizer": "adamw-8bit-paged", "optimizer_step": "foreach"}, (None, None, "bnb-adamw8bit-paged")),
        ({"optimizer": "lion", "optimizer_step": "foreach"}, (None, None, "optimi-lion")),
    ],
)  # fmt: skip
def test_number_formats_and_optimizers(strategy: dict[str, Any], settings: tuple[Any, ...]) -> None:
    said = settings_for(DIALECT, fields_of(plan("flux.1-dev", {}, strategy)))
    assert (
        tuple(said.get(f"config:{name}") for name in ("base_model_precision", "quantize_via", "optimizer")) == settings
    )


def test_what_it_stores_quantised_is_not_quantised_again() -> None:
    def said(weights: str) -> dict[str, Any]:
        settings = settings_for(DIALECT, fields_of(plan("ideogram-4", {}, {"weights_dtype": weights})))
        names = ("model_flavour", "base_model_precision", "ideogram_fp8_base_upcast")
        return {name: settings[f"config:{name}"] for name in names if f"config:{name}" in settings}

    assert said("fp8") == {"model_flavour": "fp8"}
    assert said("nf4") == {"model_flavour": "nf4"}
    assert said("bf16") == {"model_flavour": "fp8", "ideogram_fp8_base_upcast": True}
    assert said("int8") == {"model_flavour": "fp8", "base_model_precision": "int8-torchao"}


@pytest.mark.parametrize(
    ("version", "settings"),
    [
        ("", {"base_model_precision": "int8-torchao", "quantize_via": "cpu"}),
        ("torchao-quantised-whole", {"base_model_precision": "int8-torchao"}),
        ("quanto", {"base_model_precision": "int8-quanto", "quantize_via": "cpu"}),
        ("quanto-quantised-whole", {"base_model_precision": "int8-quanto"}),
    ],
)
def test_who_quantises_follows_the_plans_terms(version: str, settings: dict[str, Any], tmp_path: Path) -> None:
    asked = plan("wan2.1-t2v-14b", {}, {"weights_dtype": "int8"}).replace(trainer=f"simpletuner@{version}".rstrip("@"))
    config, _ = written(tmp_path, asked)
    assert {name: config[name] for name in ("base_model_precision", "quantize_via") if name in config} == settings
    assert translate(*dialects.read_script(from_file(tmp_path / "train.sh"))).version == version


def test_linear_layers_in_host_ram_are_written_as_they_were_read(tmp_path: Path) -> None:
    asked = plan("wan2.1-t2v-14b", {}, {"swap_blocks": 17}).replace(trainer="simpletuner@ramtorch")
    config, _ = written(tmp_path, asked)
    assert (config["ramtorch"], config["ramtorch_transformer_percent"]) == (True, 42.5)
    read = translate(*dialects.read_script(from_file(tmp_path / "train.sh")))
    assert (read.strategy["swap_blocks"], read.version) == (17, "ramtorch")


@pytest.mark.parametrize(
    ("model", "job", "strategy", "expected"),
    [
        ("flux.1-dev", {}, {"adapter_dtype": "fp32"}, {"adapter_dtype": ("fp32", "bf16")}),
        ("flux.1-dev", {}, {"optimizer_step": "foreach"}, {"optimizer_step": ("foreach", "loop")}),
        ("flux.1-dev", {}, {"optimizer": "came"}, {"optimizer": ("came", "adamw")}),
        ("flux.1-dev", {}, {"autocast": "none"}, {"autocast": ("none", "bf16")}),
        ("flux.1-dev", {"method": "full"}, {}, {"weights_dtype": ("fp32", "bf16")}),
        ("flux.1-dev", {}, {"gradient_checkpointing": "partial", "checkpointed_blocks": 20},
         {"gradient_checkpointing": ("partial", "full")}),
        ("flux.1-dev", {}, {"text_encoder": "swapped"}, {"text_encoder": ("swapped", "cached")}),
        ("flux.1-dev", {}, {"validation_mode": "on"}, {"validation_mode": ("on", "off")}),
        ("flux.1-dev", {"text_tokens": 256}, {}, {"text_tokens": (256, None)}),
        ("sdxl", {}, {"swap_blocks": 2}, {"swap_blocks": (2, 0)}),
        ("z-image", {}, {"swap_blocks": 33}, {"swap_blocks": (33, 29)}),
        ("sd3.5-medium", {"text_tokens": 231}, {}, {"lora_targets": (None, lookup.model("sd3.5-medium").lora.wide)}),
        ("wan2.2-i2v-a14b", {"experts": "both"}, {"inactive_expert": "absent"}, {"experts": ("both", "high")}),
        ("flux.1-dev", {"method": "sample"}, {"gradient_checkpointing": "none"}, {"method": ("sample", "lora")}),
    ],
)  # fmt: skip
def test_what_it_cannot_do_has_a_nearest(
    model: str, job: dict[str, Any], strategy: dict[str, Any], expected: dict[str, tuple[object, object]]
) -> None:
    found = refused(plan(model, job, strategy))
    assert {name: found[name] for name in expected} == expected


def test_a_model_that_it_does_not_have_is_refused() -> None:
    with pytest.raises(VplanError, match=r"does not support this plan: model 'hunyuan-video'"):
        export(plan("hunyuan-video"), "simpletuner")


@pytest.mark.parametrize(("swapped", "buckets"), [(0, "copy"), (8, "view")])
def test_several_gpus_are_read_from_the_environment(swapped: int, buckets: str, tmp_path: Path) -> None:
    several = {"sharding": "ddp", "grad_buckets": buckets, "swap_blocks": swapped}
    written(tmp_path, plan("flux.1-dev", {}, several, gpus=4, nodes=2))
    script = (tmp_path / "train.sh").read_text()
    assert "export TRAINING_NUM_PROCESSES=8\nexport TRAINING_NUM_MACHINES=2\nsimpletuner train\n" in script
    read = translate(*dialects.read_script(from_file(tmp_path / "train.sh")))
    assert (read.machine, read.strategy["sharding"], read.strategy["grad_buckets"]) == (
        {"gpus": 4, "nodes": 2},
        "ddp",
        buckets,
    )
    wrong = {"sharding": "zero-2", "weights_dtype": "bf16", "autocast": "bf16", "master_weights": "none"}
    assert refused(plan("flux.1-dev", {}, wrong, gpus=2))["master_weights"] == ("none", "fp32")
    assert refused(plan("flux.1-dev", {}, wrong))["sharding"] == ("zero-2", "none")


def test_reference_images_are_sets_of_their_own(tmp_path: Path) -> None:
    config, (samples, reference, _) = written(tmp_path, plan("flux.1-kontext-dev"))
    assert samples["conditioning_data"] == [reference["id"]] == ["my-references"]
    assert (reference["dataset_type"], reference["conditioning_type"]) == ("conditioning", "reference_strict")
    assert reference["cache_dir_vae"] != samples["cache_dir_vae"] and "conditioning_multidataset_sampling" not in config
    several = settings_for(DIALECT, fields_of(plan("flux.2-dev", {"references": 2})))
    assert several["config:conditioning_multidataset_sampling"] == "combined"
    assert len(several["dataset:conditioning_data"]) == 2


def test_an_image_to_video_set_says_so_and_one_expert_is_trained(tmp_path: Path) -> None:
    config, (samples, _) = written(tmp_path, plan("wan2.2-i2v-a14b", {"experts": "low"}))
    assert config["model_flavour"] == "i2v-14b-2.2-low"
    assert samples["video"] == {"num_frames": 81, "is_i2v": True}
    assert translate(*dialects.read_script(from_file(tmp_path / "train.sh"))).job["experts"] == "low"
    _, (samples, _) = written(tmp_path / "ti2v", plan("wan2.2-ti2v-5b"))
    assert samples["video"] == {"num_frames": 121}


def test_what_encodes_while_it_trains_and_averages(tmp_path: Path) -> None:
    stays = {"text_encoder": "resident", "vae": "resident", "ema": "cpu", "gradient_accumulation": 4}
    config, _ = written(tmp_path, plan("flux.1-dev", {}, stays))
    names = ("text_cache_ondemand", "vae_cache_ondemand", "use_ema", "ema_device", "ema_cpu_only")
    assert [config[name] for name in names] == [True, True, True, "cpu", True]
    assert config["gradient_accumulation_steps"] == 4


def test_what_is_typed_behind_the_command_goes_over_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, plan("flux.1-dev"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config/mine").mkdir()
    own = json.loads((tmp_path / "config/config.json").read_text()) | {"lora_rank": 4}
    (tmp_path / "config/mine/config.json").write_text(json.dumps(own))

    def rank(*words: str) -> int:
        return int(translate(*dialects.read_script(from_words(words))).job["lora_rank"])

    assert rank("simpletuner", "train") == 16
    assert rank("simpletuner", "train", "lora_rank=8") == rank("simpletuner", "train", "--lora_rank=8") == 8
    assert rank("simpletuner", "train", "env=mine") == 4
    assert rank("accelerate", "launch", "simpletuner/train.py") == 16
    with pytest.raises(VplanError, match=r"'config/theirs/config.json' is not here"):
        rank("simpletuner", "train", "--env=theirs")


@pytest.mark.parametrize(
    ("more", "model"),
    [
        ({}, "flux.2-klein-9b"),  # its DEFAULT_MODEL_FLAVOUR
        ({"model_flavour": "dev"}, "flux.2-dev"),
        ({"pretrained_model_name_or_path": "black-forest-labs/FLUX.2-dev"}, "flux.2-dev"),
    ],
)
def test_a_family_without_a_flavour_is_its_weights_or_its_default(more: dict[str, str], model: str) -> None:
    settings = {f"{CONFIG}{name}": value for name, value in {"model_family": "flux2", **more}.items()}
    assert model_of(settings)["model"] == model


@pytest.mark.parametrize(
    ("model", "tiled", "nearest"),
    [("hunyuan-video-1.5", True, None), ("hunyuan-video-1.5", False, None), ("wan2.1-t2v-14b", True, None),
     ("wan2.1-t2v-14b", False, True), ("hidream-i1", False, True), ("ideogram-4", True, False)],
)  # fmt: skip
def test_the_vae_works_in_tiles_where_it_is_told_and_of_some_families_always(
    model: str, tiled: bool, nearest: bool | None, tmp_path: Path
) -> None:
    asked = plan(model, strategy={"vae_tiling": tiled})
    if nearest is not None:
        assert refused(asked)["vae_tiling"] == (tiled, nearest)
        return
    config, _ = written(tmp_path, asked)
    assert config.get("vae_enable_tiling") == (True if tiled and model == "hunyuan-video-1.5" else None)
    dialect, given = dialects.read_script(from_file(tmp_path / "config/config.json"))
    assert translate(dialect, given).strategy["vae_tiling"] == tiled


@pytest.mark.parametrize(
    ("batch", "mode", "verdict"),
    [(1, "reduce-overhead", "fits"), (4, "reduce-overhead", "tight"), (4, "default", "fits")],
)
def test_cuda_graphs_keep_up_to_what_a_step_without_checkpoints_takes(
    tmp_path: Path, batch: int, mode: str, verdict: str
) -> None:
    """documentation/quickstart/KREA2.md: on an H100 batch 1 takes 63.71 GiB and batch 4 runs out, where 33.28 and 48.35
    are taken without."""
    sets = [{"id": "a", "type": "local", "dataset_type": "image", "resolution": 1024, "resolution_type": "pixel"}]
    (tmp_path / "data.json").write_text(json.dumps(sets))
    config = {
        "model_family": "krea2",
        "model_flavour": "raw",
        "model_type": "lora",
        "lora_rank": 64,
        "mixed_precision": "bf16",
        "attention_mechanism": "cudnn",
        "gradient_checkpointing": True,
        "fuse_qkv_projections": True,
        "optimizer": "optimi-lion",
        "train_batch_size": batch,
        "resolution": 1024,
        "data_backend_config": str(tmp_path / "data.json"),
        "dynamo_backend": "inductor",
        "dynamo_mode": mode,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = []
    for checkpointing in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(config | {"gradient_checkpointing": checkpointing}))
        dialect, given = dialects.read_script(from_file(tmp_path / "config.json"))
        found.append(check_case(read_case(dialect, given, {}, {"gpu": "h100-80gb"}), search=False).outcome.estimate)
    graphs, whole = found
    assert graphs.verdict == verdict and graphs.limit is None
    assert (graphs.high_bytes == whole.high_bytes) == (mode != "default")
    assert graphs.peak.device_bytes < whole.peak.device_bytes
