"""LongCat-Image's prompts and places of tokens are those that its pipeline makes."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import LongCatImagePipeline
from safetensors.torch import load_file

from planner.catalog.shapes import job_for
from tests.trainers import tiny
from tests.trainers.data.caching import FP32, run, setting
from trainers.data import parts
from trainers.families.common.encoding import pipeline


def test_samples_have_the_prompt_and_the_places_of_the_pipeline(tmp_path: Path) -> None:
    profile = tiny.profile("longcat-image")
    folder = tiny.folder(tmp_path / "model", profile)
    plan = job_for(profile, {"height": 64, "width": 64})
    one = setting(
        folder, tmp_path / "cache", profile, job=plan, strategy=FP32.replace(autocast="none", weights_dtype="fp32")
    )
    entry = run(tiny.write_clips(tmp_path / "clips", 1, height=64, width=64), one)[0]
    made = load_file(entry.path) | load_file(entry.text)
    loaded = {"text_encoder": parts.load(folder, "text_encoder", "Qwen2_5_VLForConditionalGeneration", torch.float32)}
    whole = pipeline("LongCatImagePipeline", **loaded, tokenizer=parts.load_helper(folder, "tokenizer"))
    caption = (tmp_path / "clips" / "0.txt").read_text()
    prompt, text_places = whole.encode_prompt(caption)
    torch.testing.assert_close(made["prompt"], prompt[0].to(made["prompt"].dtype))
    assert prompt.shape[1] == profile.shape.text_tokens
    assert torch.equal(made["text_ids"], text_places)
    _, places = LongCatImagePipeline.prepare_latents(whole, 1, 16, 64, 64, torch.float32, torch.device("cpu"), None)
    assert torch.equal(made["image_ids"], places)
    assert made["image_ids"].dtype == torch.float32  # bf16 has no 513, the second row
