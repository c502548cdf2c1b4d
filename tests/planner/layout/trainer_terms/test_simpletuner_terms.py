"""planner/layout/trainer_terms/simpletuner.py: what its own blocks move and launch beyond diffusers', by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog.lookup import model
from planner.catalog.shapes import grid, job_for
from planner.estimate.work import KERNELS, StepWork, Work, attention_of, step_work
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy


def configured(name: str, job: dict[str, Any], gpu: str = "l40s", **strategy: Any) -> Configuration:
    fields = {"gradient_checkpointing": "none", "adapter_dtype": "bf16", "autocast": "bf16", **strategy}
    return Configuration.of(job_for(model(name), {"model": name, **job}), Strategy.read(fields), Machine(gpu=gpu))


def run_of(trainer: str, *args: Any, **more: Any) -> Run:
    found = configured(*args, **more)
    return lay_out(found, load_facts(found), grid(model(found.job.model), found.job), trainer)


def beyond_ours(part: str, *args: Any, **more: Any) -> tuple[int, int]:
    """(bytes, operators) that a step of SimpleTuner's has more than ours, of both passes or of the forward."""
    theirs, ours = (step_work(run_of(trainer, *args, **more)) for trainer in ("simpletuner", "vplan"))
    return tuple(_pointwise(theirs, part)[at] - _pointwise(ours, part)[at] for at in (0, 1))  # type: ignore[return-value]


def _pointwise(work: StepWork, part: str) -> tuple[int, int]:
    kinds = getattr(work, part)
    return kinds["pointwise", 0].nbytes, sum(amount.flops for (kind, _), amount in kinds.items() if kind == KERNELS)


IMAGE = {"height": 1024, "width": 1024, "text_tokens": 32}
TOKENS = 64 * 64 + 32


def test_qwen_image_takes_numbers_apart_to_rotate_them() -> None:
    """Of queries and of keys diffusers casts (6 bytes), multiplies complex numbers (8) and casts back (6). Theirs casts
    twice (6 each), negates one half (4), stacks (8), multiplies twice (8 each), adds (12) and casts back (6)."""
    numbers, blocks = TOKENS * 24 * 128, 60
    more = 2 * (2 * 6 + 4 + 8 + 2 * 8 + 12 + 6 - (6 + 8 + 6)) * numbers * blocks
    assert beyond_ours("forward", "qwen-image", IMAGE) == (more, 20 * blocks)
    once = beyond_ours("passes", "qwen-image", IMAGE)
    again = beyond_ours("passes", "qwen-image", IMAGE, gradient_checkpointing="full")
    half = beyond_ours("passes", "qwen-image", IMAGE, gradient_checkpointing="partial", checkpointed_blocks=30)
    assert again[0] - once[0] == 2 * (half[0] - once[0]) == more
    assert again[1] - once[1] == 2 * (half[1] - once[1]) == 20 * blocks


@pytest.mark.parametrize(("trainer", "masked"), [("simpletuner", True), ("vplan", False)])
def test_the_padding_of_qwen_image_s_prompt_is_masked_in_one_sample(trainer: str, masked: bool) -> None:
    attention = attention_of(run_of(trainer, "qwen-image", IMAGE, gpu="l40s"))
    assert attention.masked is masked
    assert attention.kernel == ("efficient" if masked else "flash")
    assert not attention.over_pairs


def test_one_sample_of_chroma_has_a_mask_over_all_pairs() -> None:
    job = {"height": 512, "width": 512}
    pairs = (32 * 32 + model("chroma1-hd").shape.text_tokens) ** 2
    assert attention_of(run_of("simpletuner", "chroma1-hd", job)).kernel == "efficient"
    assert beyond_ours("forward", "chroma1-hd", job) == (19 * pairs * 57, 5 * 57)
    assert not attention_of(run_of("vplan", "chroma1-hd", job)).masked
    theirs, ours = (step_work(run_of(trainer, "chroma1-hd", job)) for trainer in ("simpletuner", "vplan"))
    read = 2 * 24 * pairs * 57  # by each head, in 16 bits
    assert theirs.forward["attention", 1] - ours.forward["attention", 1] == Work(0, read)
    assert theirs.passes["attention", 1] - ours.passes["attention", 1] == Work(0, 2 * read)
    assert theirs.attention.over_pairs and not ours.attention.over_pairs


@pytest.mark.parametrize(("name", "width", "blocks"), [("wan2.1-t2v-1.3b", 1536, 30), ("wan2.1-t2v-14b", 5120, 40)])
def test_wan_s_blocks_move_less_forward_and_more_backward(name: str, width: int, blocks: int) -> None:
    clip = {"frames": 17, "height": 480, "width": 832}
    numbers = 5 * 30 * 52 * width * blocks
    assert beyond_ours("forward", name, clip) == (-66 * numbers, -7 * blocks)
    assert beyond_ours("passes", name, clip) == ((111 - 66) * numbers, (20 - 7) * blocks)


def test_ltx_2_3_is_told_the_time_of_each_token_and_takes_padding_out_around_two_attentions() -> None:
    """Bytes and operators as counted from both sources under one recorder."""
    clip = {"frames": 9, "height": 448, "width": 576}
    numbers, blocks = 2 * 14 * 18 * 4096, 48
    text = 1024 * (4096 + 2048)
    assert beyond_ours("forward", "ltx-2.3", clip) == (34 * numbers * blocks, -18 * blocks)
    assert beyond_ours("passes", "ltx-2.3", clip) == ((34 - 93) * numbers * blocks, -(18 + 24) * blocks)
    versions = ("simpletuner", "simpletuner@unpadded")
    plain, unpadded = (step_work(run_of(version, "ltx-2.3", clip, gpu="h100-80gb")) for version in versions)
    for part, nbytes, launches in (("forward", 8, 16), ("passes", 8 + 20, 16 + 8)):
        before, after = (_pointwise(work, part) for work in (plain, unpadded))
        assert after[0] - before[0] == nbytes * text * blocks
        assert after[1] - before[1] == launches * blocks
    assert (plain.attention.kernel, unpadded.attention.kernel) == ("cudnn", "flash")
