"""Both experts of a model in one run: each learns what it would learn alone from the same steps, and the idle one's
frozen weights are where the plan says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

torch = pytest.importorskip("torch")

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.launch.launch import Validation  # noqa: E402
from planner.launch.supported import supported_plan  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.memory import quantise  # noqa: E402
from trainers.sampling import samples  # noqa: E402
from trainers.step import experts  # noqa: E402
from trainers.train import TrainingRun  # noqa: E402

pytestmark = pytest.mark.usefixtures("frozen_heap")

STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("experts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        yield runs.Pair(root)


@pytest.fixture(scope="module")
def both(place: runs.Pair) -> Path:
    """A run of both on the GPU, or what stands for it here."""
    output = place.root / "both"
    assert runs.train(place.request(output, place.plan(experts="both"), steps=STEPS))["outcome"] == "ok"
    return output


def turns(output: Path) -> list[str]:
    return [line["experts"] for line in runs.lines(output)]


def frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all that frozen weights are kept in."""
    weights = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
    return {
        part: tensor.detach().clone() for name, each in weights for part, tensor in quantise.stored_tensors(name, each)
    }


def test_a_pipeline_with_two_transformers_is_lent_what_such_models_have(place: runs.Pair) -> None:
    profile = lookup.model(place.model)
    assert (profile.experts, profile.lent_by, profile.training.boundary) == (2, "wan2.2-t2v-a14b", 0.875)


def test_each_expert_learns_what_it_learns_alone_from_the_same_steps(
    place: runs.Pair, both: Path, tmp_path: Path
) -> None:
    order = turns(both)
    assert {"high", "low"} == set(order)
    for which, part in experts.PARTS.items():
        alone = TrainingRun(
            place.request(tmp_path / which, place.plan(experts=which), steps=STEPS), runs.ReportInMemory()
        )
        own_steps = [number for number, turn in enumerate(order) if turn == which]
        for number in own_steps:
            alone._step(number)
        alone._read_loss()
        assert runs.losses(tmp_path / which) == [runs.losses(both)[number] for number in own_steps]
        alone.loader.close()
        made = runs.tensors(both / "final" / part)
        learned = {
            f"transformer.{name.replace('.default.', '.')}": each for name, each in alone.trainee.trainable.items()
        }
        assert made.keys() == learned.keys()
        assert all(torch.equal(made[name], each) for name, each in learned.items())


SHAPE = {"frames": 1, "height": 32, "width": 48}
LEVELS = 4
"""Noise levels of a sample: with Wan 2.2's shift of 12 the last lies below the boundary."""


def test_an_expert_that_waits_in_host_ram_learns_the_same_and_is_taken_up_there(
    place: runs.Pair, both: Path, tmp_path: Path
) -> None:
    """And the sample at the end, for which they take turns, is the one that a pipeline makes of the finished files."""
    strategy = {"inactive_expert": "cpu", "gradient_checkpointing": "offload", "swap_blocks": 1}
    plan = place.plan({**strategy, "validation_mode": "offload", "vae_dtype": "fp32"}, experts="both", validation=SHAPE)
    assert runs.train(place.request(tmp_path, plan, steps=2))["outcome"] == "ok"
    at = str(tmp_path / "checkpoints" / "step-00000002")
    asked = Validation(prompts=wished(place), steps=LEVELS)
    assert runs.train(place.request(tmp_path, plan, steps=STEPS, resume=at, validation=asked))["outcome"] == "ok"
    assert runs.losses(tmp_path) == runs.losses(both)
    for part in experts.PARTS.values():
        one, other = (runs.tensors(folder / "final" / part) for folder in (tmp_path, both))
        assert all(torch.equal(one[name], other[name]) for name in other)
    (told,) = (line for line in runs.lines(tmp_path) if "samples" in line)
    assert told["note"] is None
    found = numpy.asarray(Image.open(tmp_path / "samples" / told["samples"][0]))
    numpy.testing.assert_array_equal(found, finished_sample(place, tmp_path / "final"))


def wished(place: runs.Pair) -> str:
    """A list of one sample, and the VAE for it."""
    AutoencoderKLWan(base_dim=3).save_pretrained(place.root / "model" / "vae")
    for name in ("prompt", "empty"):
        width = lookup.model(place.model).config["text_dim"]
        save_file({"prompt": torch.randn(512, width)}, place.root / f"{name}.safetensors")
    files = (str(place.root / f"{name}.safetensors") for name in ("prompt", "empty"))
    (place.root / "wished.json").write_text(json.dumps({"samples": [samples.PreparedSample("one", *files)._asdict()]}))
    return str(place.root / "wished.json")


def finished_sample(place: runs.Pair, final: Path) -> Any:
    """The picture (H, W, 3) of the pipeline of both, with their files."""
    parts = {
        part: WanTransformer3DModel.from_pretrained(place.root / "model" / part) for part in experts.PARTS.values()
    }
    vae = AutoencoderKLWan.from_pretrained(place.root / "model" / "vae")
    settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 12.0}
    scheduler = UniPCMultistepScheduler(**settings)
    whole = WanPipeline(None, None, vae, scheduler, **parts, boundary_ratio=0.875)
    for number, part in enumerate(experts.PARTS.values()):
        whole.load_lora_weights(str(final / part), adapter_name="mine", load_into_transformer_2=bool(number))
    prompts = {
        argument: load_file(place.root / f"{name}.safetensors")["prompt"][None]
        for argument, name in (("prompt_embeds", "prompt"), ("negative_prompt_embeds", "empty"))
    }
    shape = {"num_frames": 1, "height": 32, "width": 48, "num_inference_steps": LEVELS}
    made = whole(**prompts, **shape, generator=torch.Generator().manual_seed(0)).frames[0][0]
    levels = [float(step) for step in scheduler.timesteps]
    assert min(levels) < 875 < max(levels)
    return (made * 255).round().astype(numpy.uint8)


@pytest.mark.parametrize(("dtype", "swapped"), [("fp32", 1), ("nf4", 0)])
def test_host_ram_holds_one_expert_whichever_runs(
    place: runs.Pair, tmp_path: Path, dtype: str, swapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all its weights are what they were when it comes back. Swapped blocks of both wait beside that."""
    monkeypatch.setattr(experts, "PIECE", 4096)
    strategy = {"inactive_expert": "cpu", "weights_dtype": dtype, "swap_blocks": swapped}
    plan = place.plan({**strategy, "gradient_checkpointing": "full"}, experts="both")
    training = TrainingRun(place.request(tmp_path, plan, steps=1), runs.ReportInMemory())
    training.loader.close()
    pair = training.experts
    assert isinstance(pair, experts.Experts) and len(pair.waiting) > 1
    idle = {piece.untyped_storage().data_ptr() for piece in pair.waiting}
    blocks = [waiting for each in pair.swaps.values() for waiting in each.blocks]
    assert len(blocks) == 2 * swapped and len({id(each.ring) for each in pair.swaps.values()}) == swapped
    before = {part: frozen(pair.get_submodule(part)) for part in experts.PARTS.values()}

    def waits(part: str) -> set[bool]:
        found = pair.get_submodule(part).named_parameters()
        come = [each for name, each in found if not each.requires_grad and name not in pair._apart]
        return {each.untyped_storage().data_ptr() in idle for each in come}

    def adapters_wait() -> bool:
        return any(each.untyped_storage().data_ptr() in idle for each in training.trainee.trainable.values())

    held = sum(each.nbytes for name, each in before["transformer_2"].items() if name not in pair._apart)
    assert held <= sum(piece.nbytes for piece in pair.waiting) < held + 256 * 8 * len(before["transformer_2"])
    for which, idle_part in (("high", "transformer_2"), ("low", "transformer"), ("high", "transformer_2")):
        pair.turn(which)
        assert waits(idle_part) == {True} and waits(experts.PARTS[which]) == {False} and not adapters_wait()
    for part, weights in before.items():
        now = frozen(pair.get_submodule(part))
        assert all(torch.equal(now[name], each) for name, each in weights.items())


def test_turns_come_as_often_as_the_density_says(place: runs.Pair) -> None:
    """Each expert is held for as many steps as the law says, and a step's turn depends on nothing but its number."""
    profile = lookup.model("wan2.2-t2v-a14b")
    assert profile.training.expert_steps == 10
    drawn = [experts.chosen(profile, 0, number) for number in range(40_000)]
    assert drawn.count("high") / len(drawn) == pytest.approx(0.417, abs=0.02)
    held = [drawn[first : first + 10] for first in range(0, len(drawn), 10)]
    assert all(len(set(block)) == 1 for block in held)
    exchanges = sum(one != other for one, other in itertools.pairwise(drawn))
    assert exchanges / len(drawn) == pytest.approx(2 * 0.417 * 0.583 / 10, rel=0.05)


def test_an_expert_is_held_for_as_many_steps_as_asked(place: runs.Pair, both: Path, tmp_path: Path) -> None:
    """Also across a resume in the middle of its steps."""
    plan = place.plan(experts="both")
    request = place.request(tmp_path, plan, steps=6, checkpoint_every=5, expert_steps=3)
    assert runs.train(request.replace(steps=5))["outcome"] == "ok"
    resume = str(tmp_path / "checkpoints" / "step-00000005")
    assert runs.train(request.replace(resume=resume))["outcome"] == "ok"
    first, second = turns(both)[:2]  # drawn for every step there
    assert turns(tmp_path) == [first] * 3 + [second] * 3


def test_micro_batches_of_one_step_go_to_one(place: runs.Pair, tmp_path: Path) -> None:
    plan = place.plan({"gradient_accumulation": 3}, experts="both", method="full")
    assert runs.train(place.request(tmp_path, plan, steps=STEPS))["outcome"] == "ok"
    assert set(turns(tmp_path)) == {"high", "low"}
    for part in experts.PARTS.values():
        WanTransformer3DModel.from_pretrained(tmp_path / "final" / part)


def test_a_pipeline_takes_a_file_for_each(place: runs.Pair, both: Path) -> None:
    model = place.root / "model"
    parts = {part: WanTransformer3DModel.from_pretrained(model / part) for part in experts.PARTS.values()}
    whole = WanPipeline(None, None, AutoencoderKLWan(base_dim=3), UniPCMultistepScheduler(), **parts)
    whole.load_lora_weights(str(both / "final" / "transformer"), adapter_name="mine")
    whole.load_lora_weights(str(both / "final" / "transformer_2"), adapter_name="mine", load_into_transformer_2=True)
    for part in experts.PARTS.values():
        loaded = dict(getattr(whole, part).named_parameters())["blocks.0.attn1.to_q.lora_B.mine.weight"]
        assert torch.equal(loaded, runs.tensors(both / "final" / part)["transformer.blocks.0.attn1.to_q.lora_B.weight"])


@pytest.mark.parametrize(
    ("strategy", "job", "fault"),
    [
        ({"sharding": "fsdp"}, {}, "both experts under fsdp"),
        ({"swap_blocks": 1, "gradient_checkpointing": "full"}, {}, "an idle expert that stays on the GPU"),
        ({"inactive_expert": "cpu"}, {"method": "full"}, "full training of experts that wait"),
        ({"inactive_expert": "gpu"}, {"experts": "high"}, "inactive_expert gpu of one that is not trained"),
        ({"validation_mode": "on"}, {"experts": "high"}, "a sample where one of two experts is there"),
        ({"validation_mode": "on", "group_offload": "block"}, {}, "group_offload of both experts"),
    ],
)
def test_what_they_cannot_do_in_turn_is_refused_by_name(
    strategy: dict[str, Any], job: dict[str, Any], fault: str
) -> None:
    asked = Job(model="wan2.2-t2v-a14b", frames=17, height=480, width=832, **{"experts": "both", **job})
    with pytest.raises(VplanError, match=fault):
        supported_plan(Plan(job=asked, strategy=Strategy(**strategy), machine=Machine(gpu="80GB")), trained=True)
