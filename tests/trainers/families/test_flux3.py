"""FLUX.3's prompts and places of tokens are those of its modular pipeline, and what is there for reference images alone
gets no gradient."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from diffusers.modular_pipelines.flux3 import before_denoise  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from planner.catalog.shapes import grid, job_for  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from tests.trainers.data.caching import FP32, run, setting  # noqa: E402
from trainers import families  # noqa: E402
from trainers.data import parts  # noqa: E402
from trainers.step import placement, step  # noqa: E402

PROFILE = tiny.profile("flux.3")
STRATEGY = FP32.replace(autocast="none", weights_dtype="fp32")


def test_samples_have_the_prompt_and_the_places_of_the_pipeline(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", PROFILE)
    plan = job_for(PROFILE, {"height": 64, "width": 96, "text_tokens": 80})
    one = setting(folder, tmp_path / "cache", PROFILE, job=plan, strategy=STRATEGY)
    entry = run(tiny.write_clips(tmp_path / "clips", 1, height=64, width=96), one)[0]
    made = load_file(entry.path) | load_file(entry.text)
    assert torch.equal(made["image_ids"], before_denoise._prepare_image_ids(4, 6, 0.5))
    prompt = made["prompt"][None]
    assert torch.equal(made["text_ids"], before_denoise.Flux3TextRoPEInputsStep._prepare_text_ids(prompt))
    words = parts.load_helper(folder, "tokenizer")
    encoder = parts.load(folder, "text_encoder", "Qwen3VLForConditionalGeneration", torch.float32)
    said = words.apply_chat_template(
        [{"role": "user", "content": (tmp_path / "clips" / "0.txt").read_text()}], tokenize=False
    )
    told = words(said, padding="max_length", max_length=80, return_tensors="pt")
    filled = told.attention_mask == 0
    told["position_ids"] = torch.arange(80)[None].masked_fill(filled, 1)
    states = encoder(**told, output_hidden_states=True).hidden_states
    assert filled.any()
    torch.testing.assert_close(prompt, torch.cat([states[layer] for layer in range(4, 36, 4)], dim=-1))


def test_what_is_there_for_reference_images_gets_no_gradient() -> None:
    kind = families.family(PROFILE)
    job = job_for(PROFILE, {"method": "full", "height": 64, "width": 64, "text_tokens": 6})
    model = step.build_model(PROFILE, job, STRATEGY)
    placement.materialise(model, "cpu", lambda _, weight: weight.normal_(0, 0.02))
    trainee = step.Trainee(model, step.trainable_parameters(model))
    step.forward(trainee, kind, kind.batch(grid(PROFILE, job), "cpu", torch.float32), STRATEGY).backward()
    without = {name for name, parameter in trainee.trainable.items() if parameter.grad is None}
    assert without == {name for name in trainee.trainable if kind.without_gradient(name, PROFILE.blocks)}
    assert {name.partition(".image_cond.")[0] for name in without} == {
        "early_stream_modulations",
        "mode_blocks",
        "single_stream_modulations",
        "x_embedders",
    }
