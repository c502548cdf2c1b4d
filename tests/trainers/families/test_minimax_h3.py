"""MiniMax H3: the one sequence of prompt, sound and clip, against diffusers' own blocks that lay it out."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from diffusers.modular_pipelines.minimax_h3 import before_denoise  # noqa: E402
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import audio_latent_num_frames  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.catalog.shapes import grid, job_for  # noqa: E402
from planner.tape.variants.inventory import optimizer_variants  # noqa: E402
from trainers import families  # noqa: E402
from trainers.families.common import random_draws  # noqa: E402
from trainers.families.common.base import Family  # noqa: E402
from trainers.recording import tapes  # noqa: E402

GRID = {"B": 2, "F": 7, "H": 3, "W": 5, "T": 9, "E": 52}
"""Of 22 frames of 96x160; their sound lasts 37 latents in truth, here 26."""


def kind() -> Family:
    return families.family(lookup.model("minimax-h3"))


def called(seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(batch, what the class is called with, targets)."""
    torch.manual_seed(seed)
    batch = kind().batch(GRID, "cpu", torch.float32)
    with random_draws.from_seeds(torch.arange(2), torch.device("cpu")):
        inputs, targets = kind().inputs_and_target(batch)
    return batch, inputs, targets


def test_the_sequence_is_laid_out_as_diffusers_does_it() -> None:
    """Places, tags, times and indices, to the last digits of fp64."""
    batch, inputs, _ = called()
    text = torch.ones(GRID["T"], dtype=torch.long)
    layout = before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        text, GRID["F"], 2 * GRID["H"], 2 * GRID["W"], GRID["E"] // 2, (1, 2, 2), 2, 2, 0
    )
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    for name, theirs in zip(names, layout, strict=False):
        assert inputs[name].dtype == theirs.dtype
        torch.testing.assert_close(inputs[name], theirs, rtol=0, atol=1e-12)
    rows = before_denoise.patchify_video_latents(batch["latents"], (1, 2, 2))
    assert torch.equal(kind().rows(batch["latents"]).flatten(0, 1), rows)


def test_all_samples_of_a_batch_have_one_time_and_the_sound_a_later_one() -> None:
    """The class has one list of times for a batch; at each, the sound has less noise left: its shift is 3, not 12."""
    batch, inputs, (clip, sound) = called()
    video, audio = (1.0 - inputs["timestep"]).tolist()
    assert audio == pytest.approx(3 / (3 + 12 * (1 / video - 1)))
    assert inputs["timestep_indices"].tolist() == [0] * 9 + [1] * 52 + [0] * 105
    rows = kind().rows(batch["latents"])
    torch.testing.assert_close(inputs["hidden_states"], rows - video * clip)
    torch.testing.assert_close(inputs["audio_hidden_states"], batch["audio"] - audio * sound)


def test_prompts_of_one_batch_become_as_long_as_the_longest() -> None:
    batch, _, _ = called()
    samples = [{name: tensor[number] for name, tensor in batch.items()} for number in range(2)]
    samples[0]["prompt"] = samples[0]["prompt"][:4]
    prompts = kind().collate(samples)["prompt"]
    assert prompts.shape == batch["prompt"].shape
    assert torch.equal(prompts[0, 4:], batch["prompt"][0, 3:4].expand(5, -1))
    assert torch.equal(prompts[1], batch["prompt"][1])


@pytest.mark.parametrize("frames", [5, 22, 124, 345])
def test_a_clip_has_the_sound_that_diffusers_counts(frames: int) -> None:
    model = lookup.model("minimax-h3")
    assert grid(model, job_for(model, {"frames": frames}))["E"] == 2 * audio_latent_num_frames(frames)


def test_states_of_a_fused_step_belong_to_their_blocks() -> None:
    """What it keeps in fp32 stands outside of blocks, and is the first that a fused step is called with."""
    profile = lookup.model("minimax-h3")
    name = "optimizer-full-half-adamw-fused"
    variant = next(each for each in optimizer_variants(profile) if each.name == name)
    sweeps = {section.run for section in tapes.record(profile, variant).pieces["optimizer_first"] if section.step}
    assert sweeps == {0, 1}
