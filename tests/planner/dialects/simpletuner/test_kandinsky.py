"""Kandinsky 5.0 in SimpleTuner's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts, parameters
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy

VIDEO = {
    "model_family": "kandinsky5_video",
    "model_type": "lora",
    "data_backend_config": "x.json",
    "mixed_precision": "bf16",
}


def read(folder: Path, **more: Any) -> Translation:
    (folder / "config.json").write_text(json.dumps({**VIDEO, **more}))
    dialect, given = dialects.read_script(from_file(folder / "config.json"))
    assert not given.unknown
    return translate(dialect, given)


@pytest.mark.parametrize(
    ("more", "model"),
    [
        ({}, "kandinsky-5.0-t2v-lite"),
        ({"model_family": "kandinsky5-video"}, "kandinsky-5.0-t2v-lite"),
        ({"model_flavour": "t2v-pro-sft-5s-hd"}, "kandinsky-5.0-t2v-pro"),
        ({"model_flavour": "i2v-lite-5s"}, "kandinsky-5.0-i2v-lite"),
        ({"model_family": "kandinsky5_image"}, "kandinsky-5.0-t2i-lite"),
    ],
)
def test_its_flavours(more: dict[str, str], model: str, tmp_path: Path) -> None:
    found = read(tmp_path, **more)
    assert (found.job["model"], found.job["lora_targets"]) == (model, None)


@pytest.mark.parametrize(
    ("family", "flavour"),
    [
        ("kandinsky5_video", "t2v-lite-sft-10s"),
        ("kandinsky5_video", "t2v-pro-sft-10s-hd"),
        ("kandinsky5_video", "i2v-pro-sft-5s"),
        ("kandinsky5_image", "i2i-lite-sft"),
    ],
)
def test_sparse_and_edited_ones_are_refused(family: str, flavour: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=flavour):
        read(tmp_path, model_family=family, model_flavour=flavour)


def test_full_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="16 bits"):
        read(tmp_path, model_type="full")


def test_it_checkpoints_one_block_of_an_interval_counted_over_both_stacks(tmp_path: Path) -> None:
    """Of 2 + 32 blocks those numbered 0, 5, ... 30; each stack by itself would give one more."""
    more = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 5}
    assert read(tmp_path, **more).strategy["checkpointed_blocks"] == 7


def test_blocks_of_the_clip_are_swapped_and_none_of_the_image_model(tmp_path: Path) -> None:
    more = {"musubi_blocks_to_swap": 40, "gradient_checkpointing": True}
    assert read(tmp_path, **more).strategy["swap_blocks"] == 32
    assert read(tmp_path, model_family="kandinsky5_image", **more).strategy["swap_blocks"] == 0


def laid_out(trainer: str, weights: str) -> Run:
    profile = lookup.model("kandinsky-5.0-t2v-lite")
    job = job_for(profile, {"frames": 25})
    strategy = Strategy(gradient_checkpointing="full", weights_dtype=weights)  # type: ignore[arg-type]
    configuration = Configuration.of(job, strategy, Machine(gpu="h100"))
    return lay_out(configuration, load_facts(configuration), grid(profile, job), trainer)


@pytest.mark.parametrize(("weights", "most"), [("bf16", 2.0), ("int8", 1.01), ("nf4", 0.6)])
def test_its_modulation_is_stored_as_the_rest_of_the_base(weights: str, most: float) -> None:
    """transformer_kandinsky5.py has no ``_keep_in_fp32_modules``: 264 million numbers of 2.0 billion."""
    kept = parameters("kandinsky-5.0-t2v-lite").fp32
    ours, theirs = laid_out("vplan", weights), laid_out("simpletuner", weights)

    def bytes_kept(run: Run) -> int:
        return sum(run.sizes[buffer] for name, buffer in run.named("weight").items() if name in kept)

    assert bytes_kept(ours) > 1_000_000_000
    assert bytes_kept(theirs) / (bytes_kept(ours) / 4) == pytest.approx(most, rel=0.15)
    assert bytes_kept(theirs) <= most * bytes_kept(ours) / 4 * 1.01
