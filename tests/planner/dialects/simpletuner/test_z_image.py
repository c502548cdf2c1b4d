"""Distilled flavours in SimpleTuner, beside which a LoRA is loaded unasked: Z-Image's default, FLUX.1's schnell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file

CONFIG = {"model_family": "z-image", "model_type": "lora", "data_backend_config": "x.json", "mixed_precision": "bf16"}
ASSISTED = "the flavour's assistant LoRA runs beside the trained one: not estimated, and takes more than this"


def read(folder: Path, **changes: object) -> Translation:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return translate(*dialects.read_script(from_file(path)))


@pytest.mark.parametrize(
    ("changes", "model", "assisted"),
    [
        ({}, "z-image-turbo", True),
        ({"model_flavour": "turbo"}, "z-image-turbo", True),
        ({"model_flavour": "turbo", "disable_assistant_lora": True}, "z-image-turbo", False),
        ({"model_flavour": "turbo", "model_type": "full"}, "z-image-turbo", False),
        ({"model_flavour": "base"}, "z-image", False),
        ({"model_flavour": "ostris-de-turbo"}, "z-image", False),
        ({"pretrained_model_name_or_path": "Tongyi-MAI/Z-Image"}, "z-image", True),
        ({"model_family": "flux", "model_flavour": "schnell"}, "flux.1-schnell", True),
        ({"model_family": "flux", "model_flavour": "dev"}, "flux.1-dev", False),
    ],
)
def test_a_flavour_is_a_model(changes: dict[str, object], model: str, assisted: bool, tmp_path: Path) -> None:
    found = read(tmp_path, **changes)
    assert found.job["model"] == model
    assert (ASSISTED in found.notes) == assisted
