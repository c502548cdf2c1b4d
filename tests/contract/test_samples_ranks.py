"""Samples of a model that is sharded over two ranks are the same as on one rank, and training is not affected."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("av")

import diffusers  # noqa: E402
import numpy  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.launch.launch import RunRequest, Validation  # noqa: E402
from tests.contract.ranks import run  # noqa: E402
from tests.trainers import runs, tiny  # noqa: E402
from trainers.sampling import samples  # noqa: E402

STEPS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with weights that ZeRO-3 really shards, its VAE, and two encoded prompts."""
    root = tmp_path_factory.mktemp("samples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        made = runs.Place(root, "wide")
        profile = lookup.model(made.model)
        torch.manual_seed(1)
        small = tiny.VAES[profile.vae.class_name]
        diffusers.AutoencoderKLWan(**{**profile.vae.config, **small}).save_pretrained(root / "model" / "vae")
        for name in ("a", "b", "empty"):
            save_file({"prompt": torch.randn(512, profile.config["text_dim"])}, root / f"{name}.safetensors")
        files = [str(root / f"{name}.safetensors") for name in ("a", "b", "empty")]
        wishes = [samples.PreparedSample(text, text, files[2])._asdict() for text in files[:2]]
        (root / "validation.json").write_text(json.dumps({"about": {}, "samples": wishes}))
        yield made


def request(place: runs.Place, output: Path, world: int, sharding: str = "none") -> dict[str, Any]:
    """Three steps with the same global batch, each followed by two samples."""
    strategy = {"validation_mode": "on", "vae_dtype": "fp32", "adapter_dtype": "fp32", "sharding": sharding}
    plan = place.plan(strategy, gpus=world, batch_size=2 // world)
    asked = Validation(prompts=str(place.root / "validation.json"), every=1, steps=2)
    return place.request(output, plan, steps=STEPS, validation=asked).to_json()


def keep(frames: numpy.ndarray, path: Path, _fps: float) -> None:
    """Keeps the samples as arrays, before a codec rounds them."""
    with path.open("wb") as file:
        numpy.save(file, frames)


@pytest.fixture(scope="module")
def alone(place: runs.Place) -> Path:
    """One rank with the whole model."""
    output = place.root / "alone"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "write", keep)
        assert runs.train(RunRequest.read(request(place, output, 1)))["outcome"] == "ok"
    return output


@pytest.mark.parametrize("sharding", ["zero-3", "fsdp"])
def test_two_ranks_that_split_a_model_sample_what_one_does(
    place: runs.Place, alone: Path, tmp_path: Path, sharding: str
) -> None:
    """All ranks denoise and the first decodes; a failure on one rank before or after that is reported, and training
    continues."""
    run(functools.partial(_train_and_fail_twice, request(place, tmp_path, 2, sharding)))
    assert runs.losses(tmp_path) == pytest.approx(runs.losses(alone), abs=1e-5)
    told = [(line["note"], line["samples"]) for line in runs.lines(tmp_path) if "samples" in line]
    assert told[0] == ("OSError: the disk broke", []) and told[1][0] == "AttributeError: a rank's own trouble"
    names = [f"step-{STEPS:08d}-{number}.mp4" for number in (0, 1)]
    assert told[2] == (None, names) and told[1][1] == ["step-00000002-0.mp4"]
    first, second = (numpy.load(tmp_path / "samples" / name) for name in names)
    assert numpy.abs(first - numpy.load(alone / "samples" / names[0])).max() < 1e-5
    assert numpy.abs(second - numpy.load(alone / "samples" / names[1])).max() < 1e-5
    assert numpy.abs(first - second).max() > 1e-3


def _train_and_fail_twice(request: dict[str, Any]) -> dict[str, Any]:
    """The very first sample cannot be written, and in the second round the first rank cannot read the second prompt.
    After each round the gathered weights are freed."""
    from trainers.sampling.samples import Samples

    asked, make = Samples._inputs, Samples.make

    def broken(frames: Any, path: Path, fps: float) -> None:
        if path.name.startswith("step-00000001"):
            raise OSError("the disk broke")
        keep(frames, path, fps)

    def lonely(self: Samples, wish: Any, number: int) -> Any:
        if number == 1 and self.rank == 0 and not (self.folder / f"step-{STEPS:08d}-0.mp4").exists():
            raise AttributeError("a rank's own trouble")
        return asked(self, wish, number)

    def watched(self: Samples, engine: Any, *rest: Any) -> None:
        make(self, engine, *rest)
        held = sum(weight.numel() for weight in engine.plain.parameters() if _is_whole(weight))
        assert held < sum(weight.numel() for weight in engine.plain.parameters()) / 4

    samples.write, Samples._inputs, Samples.make = broken, lonely, watched
    told = runs.train(RunRequest.read(request))
    assert told["outcome"] == "ok", told
    return told


def _is_whole(weight: Any) -> bool:
    """Whether a rank holds more than its share."""
    if hasattr(weight, "ds_numel"):
        return weight.data.numel() == weight.ds_numel and not weight.ds_persist
    return not hasattr(weight, "placements")
