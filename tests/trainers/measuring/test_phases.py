"""A probe's phases in this process: published weights, every bucket, and a scratch folder that cannot be written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from diffusers import AutoencoderKLWan, WanTransformer3DModel  # noqa: E402
from transformers import UMT5EncoderModel  # noqa: E402

from planner.errors import VplanError  # noqa: E402
from planner.launch.supported import supported_plan  # noqa: E402
from planner.spec.job import Bucket  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.data import layer_offload  # noqa: E402
from trainers.measuring.measure import measure  # noqa: E402
from trainers.measuring.phases import ProbeRequest  # noqa: E402

pytestmark = pytest.mark.usefixtures("frozen_heap")


class Report:
    """A report that stays in memory."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"phases": {}, "missing": []}

    def tell(self, **facts: Any) -> None:
        self.facts.update(facts)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("probed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        yield runs.Place(root, "wan")


def wanted(place: runs.Place, scratch: Path, **said: Any) -> ProbeRequest:
    buckets = (Bucket(frames=1, height=32, width=32), Bucket(frames=5, height=32, width=48, batch_size=2))
    plan = place.plan({"gradient_accumulation": 2}, buckets=buckets)
    asked = {"config": {}, "device": "cpu", "steps": 2, "weights": str(place.root / "model")}
    return ProbeRequest.of(plan, scratch=scratch, **{**asked, **said})


def test_published_weights_and_every_bucket(place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, shapes, forward = [], [], WanTransformer3DModel.forward

    def noted(self: WanTransformer3DModel, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        models.append(self)
        shapes.append((len(hidden_states), hidden_states.shape[2]))
        return forward(self, hidden_states, *rest, **more)

    monkeypatch.setattr(WanTransformer3DModel, "forward", noted)
    report = Report()
    measure(wanted(place, tmp_path / "scratch"), report)
    assert (report.facts["outcome"], report.facts["missing"][1:]) == ("ok", [])
    # Two micro-batches each: the first step, one of each shape with the largest last, two steady steps, and one whose
    # passes are measured apart. Then one forward alone, whose attention kernels are named.
    assert shapes == [(2, 2)] * 2 + [(1, 1)] * 2 + [(2, 2)] * (2 + 4 + 2 + 1)
    assert len(report.facts["losses"]) == 6 and len(report.facts["step_seconds"]) == 2
    published = runs.tensors(place.root / "model")
    found = {name.replace(".base_layer", ""): value for name, value in models[0].state_dict().items()}
    assert published and all(torch.equal(found[name], tensor) for name, tensor in published.items())
    assert (tmp_path / "scratch" / "step-00000006" / "manifest.json").is_file()


def test_a_scratch_folder_that_cannot_be_written_ends_nothing(place: runs.Place, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = Report()
    measure(wanted(place, tmp_path / "file" / "scratch", weights=None), report)
    assert report.facts["outcome"] == "ok"
    assert report.facts["missing"][1].startswith("save: cannot write a checkpoint")


def test_weights_that_are_no_numbers_at_the_checkpoint_are_a_nan(
    place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All losses were numbers: the last optimizer step spoilt the weights."""
    update, done = torch.optim.AdamW.step, []

    def poisoned(self: torch.optim.AdamW, *arguments: Any) -> Any:
        done.append(update(self, *arguments))
        if len(done) == 6:
            self.param_groups[0]["params"][0].data.fill_(float("nan"))
        return done[-1]

    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    report = Report()
    measure(wanted(place, tmp_path / "scratch"), report)
    assert len(done) == len(report.facts["losses"]) == 6 and None not in report.facts["losses"]
    assert report.facts["outcome"] == "nan" and "not finite" in report.facts["message"]
    assert not list((tmp_path / "scratch").rglob("*.safetensors"))


@pytest.mark.parametrize(("calls", "phase"), [(1, "first_step"), (3, "optimizer")])
def test_memory_that_runs_out_in_the_optimizer_is_told_with_its_phase(
    calls: int, phase: str, place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step, or in a steady one, whose passes and optimizer are not measured apart."""
    update, done = torch.optim.AdamW.step, []

    def full(self: torch.optim.AdamW, *arguments: Any) -> Any:
        done.append(self)
        if len(done) == calls:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
        return update(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    report = Report()
    measure(wanted(place, tmp_path / "scratch"), report)
    assert (report.facts["outcome"], report.facts["phase"]) == ("oom", phase)
    assert report.facts["message"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert report.facts["requested_bytes"] == 2 * 2**30
    failed = "step" if phase == "optimizer" else phase
    assert report.facts["phases"][failed]["allocated_bytes"] is None


def test_memory_that_runs_out_in_forward_is_told_as_train(
    place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, done = torch.nn.functional.mse_loss, []

    def full(*arguments: Any, **more: Any) -> Any:
        done.append(1)
        if len(done) == 3:  # the second step: each has two micro-batches
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(*arguments, **more)

    monkeypatch.setattr(torch.nn.functional, "mse_loss", full)
    report = Report()
    measure(wanted(place, tmp_path / "scratch"), report)
    assert (report.facts["outcome"], report.facts["phase"]) == ("oom", "train")


def test_both_experts_are_probed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    pair = runs.Pair(tmp_path / "pair")
    plan = pair.plan({"inactive_expert": "cpu"}, experts="both")
    assert supported_plan(plan) == plan
    asked = {"config": {}, "device": "cpu", "steps": 3, "weights": str(pair.root / "model")}
    report = Report()
    measure(ProbeRequest.of(plan, scratch=tmp_path / "scratch", **asked), report)
    assert report.facts["outcome"] == "ok"
    kept = runs.tensors(tmp_path / "scratch")
    weights = {name.removeprefix("weights/") for name in kept if name.startswith("weights/")}
    states = {name for name in kept if name.startswith("optimizer/state/") and name.endswith("/exp_avg")}
    assert len(states) == len(weights) > 0  # both have been stepped
    assert {name.partition(".")[0] for name in weights} == {"transformer", "transformer_2"}


def test_weights_that_are_not_there_are_refused(place: runs.Place, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=r"config\.json"):
        measure(wanted(place, tmp_path, weights=str(tmp_path)), Report())


SMALL = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
VAE = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}


@pytest.mark.parametrize("room", [None, 0])
def test_encoding_is_a_part_of_its_own(
    place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    """Every encoder, each gone before the next, by layers where it has no room, and of the clips the largest."""
    monkeypatch.setattr(layer_offload, "room_bytes", lambda device: room)
    asked = wanted(place, tmp_path / "scratch", part="encode")
    profile = asked.profile
    vae = profile.vae.replace(config={**profile.vae.config, **VAE})
    text = profile.text_encoders[0].replace(max_tokens=8, config={**profile.text_encoders[0].config, **SMALL})
    strategy = asked.strategy.replace(text_encoder_dtype="fp32", vae_dtype="fp32")
    clips, prompts = [], []
    seen, read = AutoencoderKLWan.encode, UMT5EncoderModel.forward

    def encode(self: Any, clip: Any, *rest: Any, **more: Any) -> Any:
        clips.append(tuple(clip.shape))
        return seen(self, clip, *rest, **more)

    def forward(self: Any, input_ids: Any, **more: Any) -> Any:
        prompts.append(tuple(input_ids.shape))
        assert (room is not None) == any(each.is_meta for each in self.encoder.block.parameters())
        return read(self, input_ids=input_ids, **more)

    monkeypatch.setattr(AutoencoderKLWan, "encode", encode)
    monkeypatch.setattr(UMT5EncoderModel, "forward", forward)
    report = Report()
    measure(replace(asked, profile=profile.replace(vae=vae, text_encoders=(text,)), strategy=strategy), report)
    assert report.facts["outcome"] == "ok" and set(report.facts["phases"]) == {"encode"}
    assert prompts == [(1, 8)] and clips == [(1, 3, 5, 32, 48)]
    assert "losses" not in report.facts and not (tmp_path / "scratch").exists()
