"""What a trainer's options reach together: combinations that mend several phases, the least, and what fits at less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import dialects
from planner.catalog import lookup
from planner.dialects.base.bindings import Fixed
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import Case, read_case
from planner.foreign.change_words import move_words
from planner.foreign.check import Checked, check_case
from planner.foreign.export import export, export_targets
from planner.foreign.other_ways import with_other_ways
from planner.foreign.pricing import CheckedEstimate, Pricing
from planner.foreign.smallest_change import WORTH, Fix, moves_of
from planner.spec.job import ValidationShape
from tests.tools.exported_grid import plan_of, written

WAN_22 = """
config:
  process:
  - type: sd_trainer
    network: {type: lora, linear: 32}
    datasets: [{folder_path: x, resolution: [512], num_frames: 33}]
    train: {dtype: bf16, gradient_checkpointing: true, optimizer: adamw8bit, cache_text_embeddings: true}
    model: {name_or_path: ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16, arch: wan22_14b, quantize: true, qtype: uint4,
            quantize_te: true, low_vram: true}
    sample: {width: 1024, height: 1024, num_frames: 33, guidance_scale: 3.5, prompts: [a]}
"""
"""As ai-toolkit's train_lora_wan22_14b_24gb.yaml, for clips: training and decoding the sample need more than 16 GB."""

DIFFUSION_PIPE = """
dataset = "dataset.toml"
pipeline_stages = 1
micro_batch_size_per_gpu = 1
[model]
type = "wan"
ckpt_path = "Wan2.1-T2V-14B"
dtype = "bfloat16"
[adapter]
type = "lora"
rank = 32
[optimizer]
type = "adamw_optimi"
"""


def checked(file: Path, **machine: Any) -> Checked:
    dialect, given = dialects.read_script(from_file(file))
    return with_other_ways(
        check_case(read_case(dialect, given, {}, {"gpu": "16GB", "host_ram": 64 * 10**9, **machine}))
    )


def changed(config: str, fix: Fix) -> str:
    """An ai-toolkit config with the lines of a change; what the environment says stands in none."""
    document = yaml.safe_load(config)
    for line in "\n".join(fix.change).splitlines():
        key, _, value = line.partition(": ")
        process = key.removeprefix("config.process[0].")
        if process == key:
            assert key.startswith("export PYTORCH_CUDA_ALLOC_CONF")
            continue
        table, _, name = process.rpartition(".")
        here = document["config"]["process"][0]
        here = here["datasets"][0] if table == "datasets[0]" else here[table]
        here[name] = yaml.safe_load(value)
    return str(yaml.safe_dump(document))


def test_changes_that_mend_a_phase_each_are_found_together(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(WAN_22)
    found = checked(tmp_path / "c.yaml")
    phases = found.outcome.estimate.phases
    over = {name for name in ("train", "decode") if phases[name].device_bytes > found.outcome.estimate.budget_bytes}
    assert over == {"train", "decode"}
    fix = found.fixes[0]
    lines = "\n".join(fix.change).splitlines()
    assert {line.partition(":")[0].rpartition(".")[2] for line in lines} == {
        *("disable_sampling", "layer_offloading", "layer_offloading_transformer_percent")
    }
    (tmp_path / "mended.yaml").write_text(changed(WAN_22, fix))
    mended = checked(tmp_path / "mended.yaml").outcome.estimate
    assert mended.verdict == "fits" and mended.peak == fix.outcome.estimate.peak


def test_the_least_is_less_than_an_option_reaches_and_what_is_smaller_fits_as_it_says(tmp_path: Path) -> None:
    text = WAN_22.replace("num_frames: 33", "num_frames: 81")
    (tmp_path / "c.yaml").write_text(text)
    found = checked(tmp_path / "c.yaml")
    (tmp_path / "offloaded.yaml").write_text(text.replace("low_vram: true", "low_vram: true, layer_offloading: true"))
    offloaded = checked(tmp_path / "offloaded.yaml").outcome.estimate
    assert not found.fixes and found.least is not None
    assert found.least.outcome.estimate.peak.device_bytes <= offloaded.peak.device_bytes
    assert [fix.cost for fix in found.smaller] == ["shorter clips", "smaller pictures"]
    for fix in found.smaller:
        (tmp_path / "smaller.yaml").write_text(changed(text, fix))
        smaller = checked(tmp_path / "smaller.yaml").outcome.estimate
        assert smaller.verdict == "fits" and smaller.peak == fix.outcome.estimate.peak
        assert smaller.job.frames == 81 or smaller.job.frames > 33


def test_a_sample_keeps_its_own_shape_where_clips_become_shorter(tmp_path: Path) -> None:
    """It is as large as the clips here, which a job says by no shape at all."""
    text = WAN_22.replace("1024", "512").replace("num_frames: 33", "num_frames: 121")
    (tmp_path / "c.yaml").write_text(text)
    found = checked(tmp_path / "c.yaml", gpu="24GB")
    assert found.case.job.validation is None and found.case.strategy.validation_mode == "on"
    for fix in found.smaller:
        sample = fix.case.job.validation
        assert (sample is None) == (fix.case.strategy.validation_mode == "off")
        assert sample is None or (sample.frames, sample.height) == (121, 512)
    assert found.smaller


def test_of_several_shapes_the_clips_are_cut_or_the_largest_left_out(tmp_path: Path) -> None:
    text = WAN_22.replace("resolution: [512]", "resolution: [256, 512, 768]").replace("1024", "256")
    (tmp_path / "c.yaml").write_text(text)
    found = checked(tmp_path / "c.yaml", gpu="12GB")
    assert not found.fixes and len(found.case.job.buckets) == 3
    clips, pictures = (
        [fix for fix in found.smaller if fix.cost == cost] for cost in ("shorter clips", "smaller pictures")
    )
    assert {shape.frames for shape in clips[-1].case.job.shapes} < set(range(1, 33, 4))
    kept = {(shape.height, shape.frames) for shape in pictures[-1].case.job.shapes}
    assert kept < {(256, 33), (512, 33)} | {(256, 33)} or kept == {(256, 33), (512, 33)}
    assert all(fix.outcome.estimate.verdict == "fits" for fix in found.smaller)


def test_blocks_leave_as_far_as_the_host_has_ram(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(DIFFUSION_PIPE)
    (tmp_path / "dataset.toml").write_text('resolutions = [720]\nframe_buckets = [81]\n[[directory]]\npath = "a"\n')
    least = checked(tmp_path / "config.toml").least
    assert least is not None
    swapped, ram = least.case.strategy.swap_blocks, least.outcome.estimate.host_ram_bytes
    assert 0 < swapped < 38 and ram <= 64 * 10**9, "the most that it swaps is 38, which this host cannot hold"
    assert least.outcome.estimate.peak.device_bytes < 30 << 30
    more = checked(tmp_path / "config.toml", host_ram=1 << 40).least
    assert more is not None and more.case.strategy.swap_blocks == 38


# ---- laws, over all trainers

ASKED = ("lora, not checkpointed, rank 64", "full, AdamW", "sampling")
PLENTY: dict[str, Any] = {"gpu": "900GiB", "host_ram": 8 << 40}


def cases(target: str, folder: Path) -> Iterator[Case]:
    """What a trainer's own files ask for, of the models that it trains, the smallest first."""
    models = sorted(lookup.model_names(), key=lambda name: lookup.model(name).parameters)
    for model, strategy in ((model, strategy) for strategy in ASKED for model in models):
        try:
            start = written(export(plan_of(model, strategy), target, take_nearest=True), folder)
            dialect, given = dialects.read_script(from_file(start))
            case = read_case(dialect, given, {}, PLENTY)
        except VplanError:
            continue
        if moves_of(case):
            yield case


def all_at_once(case: Case, pricing: Pricing) -> CheckedEstimate:
    """With every move that can be made beside those before it, as far as it goes."""
    changes: dict[str, Any] = {}
    for move in moves_of(case):
        for step in reversed(move.steps(case.fields)):
            together = {**step, **changes}
            if together == {**changes, **step} and pricing.quick_estimate(case.changed(together)) is not None:
                changes = together
                break
    return pricing.outcome(case.changed(changes))


def with_budget(case: Case, budget_bytes: int) -> Case:
    return replace(case, machine=case.machine.replace(reserve=case.gpu.allocatable_bytes - budget_bytes))


READ = [name for name in export_targets() if name not in ("accelerate", "slurm")]


@pytest.mark.parametrize("target", READ)
def test_no_option_is_not_said_where_all_options_at_once_fit(target: str, tmp_path: Path) -> None:
    for case in cases(target, tmp_path):
        pricing = Pricing(case)
        together, alone = all_at_once(case, pricing).estimate, pricing.outcome(case).estimate
        if together.high_bytes + WORTH < alone.high_bytes:
            break
    else:
        pytest.fail(f"no option of {target} saves anything")
    found = with_other_ways(check_case(with_budget(case, together.high_bytes)))
    assert found.outcome.estimate.verdict != "fits" and found.fixes
    assert found.fixes[0].outcome.estimate.verdict == "fits"
    short = with_other_ways(check_case(with_budget(case, together.high_bytes // 2)))
    if not short.fixes:
        assert short.least is not None
        assert short.least.outcome.estimate.peak.device_bytes <= together.peak.device_bytes + WORTH


SAMPLING = [name for name in READ if any("validation_mode" in move.changes for move in dialects.dialect(name).moves)]


@pytest.mark.parametrize("target", SAMPLING)
def test_to_make_no_sample_can_be_said_whatever_its_shape(target: str, tmp_path: Path) -> None:
    case = next(cases(target, tmp_path))
    settable = {name for binding in case.dialect.bindings for name in binding.fields if not isinstance(binding, Fixed)}
    settable -= {"validation"} if target == "diffusers" else set()  # its scripts sample at the pipeline's own size
    shape = {"validation": ValidationShape(frames=1, height=256, width=256)} if "validation" in settable else {}
    bare = replace(case, invocation=replace(case.invocation, settings={}))
    sampled = bare.changed({"validation_mode": "on", **shape})
    (move,) = (move for move in moves_of(sampled) if move.changes.get("validation_mode") == "off")
    assert list(move_words(sampled, sampled.changed(move.changes), move))


def test_changes_that_together_are_tight_are_told_where_nothing_fits(tmp_path: Path) -> None:
    """It said that no option makes it fit, of what `suggest --for` called tight."""
    model = "--pretrained_model_name_or_path stabilityai/stable-diffusion-3.5-large --resolution 1024"
    words = f"train_dreambooth_sd3.py {model} --train_batch_size 1 --mixed_precision bf16"
    start = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\naccelerate launch --num_processes 1"
    (tmp_path / "train.sh").write_text(f"{start} {words}\n")
    found = checked(tmp_path / "train.sh", gpu="80GB")
    (fix,) = found.fixes
    assert (found.outcome.estimate.verdict, fix.outcome.estimate.verdict) == ("no", "tight")
    (tmp_path / "train.sh").write_text(f"{start} {words} {' '.join(fix.change)}\n")
    assert checked(tmp_path / "train.sh", gpu="80GB").outcome.estimate.verdict == "tight"
