"""Chroma's mask goes to all blocks, with checkpoints and without; one sample has none; recordings of few blocks have
the whole model's table of modulations."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from planner.spec.job import Job, Strategy  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from trainers import families  # noqa: E402
from trainers.step import step  # noqa: E402

PROFILE = tiny.profile("chroma1-hd")
PLAIN = {"weights_dtype": "fp32", "autocast": "none", "compute_dtype": "fp32"}


def model(**strategy: str) -> torch.nn.Module:
    job = Job.read({"model": PROFILE.name, "method": "full", "frames": 1, "height": 64, "width": 64})
    made = step.build_model(PROFILE, job, Strategy.read({**PLAIN, "optimizer": "adamw", **strategy}))
    made.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, table in made.named_buffers():
        torch.nn.init.normal_(table)
        assert "mod_proj" in name
    return made


def output(made: torch.nn.Module, lengths: list[int], padding: float = 0.0) -> torch.Tensor:
    """The model's output for prompts of these lengths, whose padding is filled with a number."""
    kind = families.family(PROFILE)
    torch.manual_seed(1)
    prompts = [torch.randn(length, 8) for length in lengths]
    latents, places = torch.randn(len(lengths), 16, 64), torch.zeros(16, 3)
    samples = [
        {"latents": image, "prompt": prompt, "image_ids": places}
        for image, prompt in zip(latents, prompts, strict=True)
    ]
    batch = kind.collate(samples)
    for row, length in enumerate(lengths):
        batch["prompt"][row, length:] = padding
    inputs, _ = kind.inputs_and_target(batch)
    inputs |= {"hidden_states": latents, "timestep": torch.full((len(lengths),), 0.5)}
    out: torch.Tensor = made(**inputs, return_dict=False)[0]
    return out


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_is_masked_changes_nothing(checkpointing: str) -> None:
    made = model(gradient_checkpointing=checkpointing)
    first, other = (output(made, [3, 7], padding) for padding in (0.0, 5.0))
    assert torch.isfinite(first).all()
    torch.testing.assert_close(first, other)
    alone = output(made, [3])  # drawn from the same seed: the first sample has the same prompt
    assert alone.shape == (1, 16, 64) and torch.isfinite(alone).all()


def test_checkpoints_change_no_gradient() -> None:
    gradients = []
    for checkpointing in ("none", "full"):
        made = model(gradient_checkpointing=checkpointing)
        output(made, [3, 7], 5.0).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in made.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_model_of_fewer_blocks_has_the_modulations_of_the_whole() -> None:
    job = Job.read({"model": PROFILE.name, "method": "full", "frames": 1, "height": 64, "width": 64})
    few = {**PROFILE.config, "num_layers": 1, "num_single_layers": 1}
    made = step.build_model(PROFILE, job, Strategy.read({**PLAIN, "optimizer": "adamw"}), few)
    assert made.get_submodule("time_text_embed").mod_proj.shape[0] == 12 * 2 + 3 * 2 + 2
