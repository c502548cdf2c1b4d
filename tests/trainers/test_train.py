"""Training in one process on tiny models: what it writes is what diffusers reads, and what it cannot do it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.launch.supported import supported_plan  # noqa: E402
from planner.launch.weight_files import model_folder  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.data.entries import read_entries, write_entries  # noqa: E402
from trainers.parallel import start  # noqa: E402
from trainers.step import weights  # noqa: E402
from trainers.train import rates  # noqa: E402


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        yield {kind: runs.Place(root / kind, kind) for kind in runs.TINY}


@pytest.fixture(scope="module")
def wan(places: dict[str, runs.Place]) -> runs.Place:
    return places["wan"]


def pipeline(kind: str, place: runs.Place) -> Any:
    """A pipeline of the tiny transformer, as far as loading a LoRA needs it."""
    published, _ = runs.TINY[kind]
    transformer = getattr(diffusers, lookup.model(published).diffusers_class).from_pretrained(
        place.root / "model" / "transformer"
    )
    parts = {"tokenizer": None, "text_encoder": None, "transformer": transformer, "vae": None, "scheduler": None}
    if kind == "wan":
        return diffusers.WanPipeline(**parts)
    return diffusers.CogVideoXPipeline(**parts)


@pytest.mark.parametrize("kind", list(runs.TINY))
def test_a_lora_file_gives_a_pipeline_the_trained_model(
    kind: str, places: dict[str, runs.Place], tmp_path: Path
) -> None:
    """The pipeline's transformer with the file computes what the trained model computes, and not what it was before;
    with that of the checkpoint as well."""
    place = places[kind]
    told = runs.train(place.request(tmp_path, steps=3, checkpoint_every=3, learning_rate=0.1))
    assert told["outcome"] == "ok"
    pipe = pipeline(kind, place)
    plan = place.plan()
    made = runs.family(pipe_profile := lookup.model(place.model))
    torch.manual_seed(0)
    batch = made.batch(lookup.grid(pipe_profile, plan.job), "cpu", torch.float32)
    inputs, _ = made.inputs_and_target(batch)
    trained = _trained_model(place, tmp_path)
    with torch.no_grad():
        before = pipe.transformer(**inputs, return_dict=False)[0]
        wanted = trained(**inputs, return_dict=False)[0]
    for folder in ("final", "checkpoints/step-00000003"):
        with torch.no_grad():
            pipe.load_lora_weights(tmp_path / folder)
            loaded = pipe.transformer(**inputs, return_dict=False)[0]
        assert torch.allclose(loaded, wanted, atol=1e-5)
        assert not torch.allclose(loaded, before, atol=1e-3)
        pipe.unload_lora_weights()


def _trained_model(place: runs.Place, output: Path) -> Any:
    from trainers.parallel import checkpoint
    from trainers.step import step

    profile = lookup.model(place.model)
    plan = place.plan()
    job = plan.job.replace(lora_targets=profile.lora.targets)
    model = step.build_model(profile, job, plan.strategy)
    source = weights.published(place.root / "model" / "transformer", profile)
    kept = checkpoint.trained_weights(output / "checkpoints" / "step-00000003")
    weights.load(model, source, torch.device("cpu"), weights.fresh(0), kept)
    return model


@pytest.mark.parametrize("trainable", [[], ["attn1"]])
def test_full_training_writes_a_folder_that_from_pretrained_reads(
    wan: runs.Place, tmp_path: Path, trainable: list[str]
) -> None:
    plan = wan.plan(method="full", trainable=trainable)
    assert runs.train(wan.request(tmp_path, plan, steps=2, learning_rate=1e-3))["outcome"] == "ok"
    published = load_file(next((wan.root / "model" / "transformer").glob("*.safetensors")))
    saved = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "final" / "transformer").state_dict()
    assert saved.keys() == published.keys()
    moved = {name for name, tensor in saved.items() if not torch.equal(tensor, published[name])}
    assert moved == {name for name in saved if not trainable or "attn1" in name}


def test_it_learns_what_it_sees_again_and_again(wan: runs.Place, tmp_path: Path) -> None:
    """Noise is drawn anew each step, so losses jump; their mean must fall all the same."""
    request = wan.request(tmp_path, wan.plan(method="full"), steps=60, checkpoint_every=60, learning_rate=5e-3)
    assert runs.train(request)["outcome"] == "ok"
    found = runs.losses(tmp_path)
    assert sum(found[-15:]) < 0.9 * sum(found[:15])


def test_accumulation_gives_the_losses_of_the_whole_batch(wan: runs.Place, tmp_path: Path) -> None:
    """Of one shape: micro-batches of several take turns."""
    plans = [wan.plan(batch_size=2), wan.plan({"gradient_accumulation": 2})]
    entries = [entry for entry in read_entries(wan.entries) if entry.bucket.frames == 5]
    write_entries(tmp_path / "entries.jsonl", entries)
    found = []
    for number, plan in enumerate(plans):
        request = wan.request(tmp_path / str(number), plan, steps=5, entries=str(tmp_path / "entries.jsonl"))
        assert runs.train(request)["outcome"] == "ok"
        found.append(runs.losses(tmp_path / str(number)))
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert len(set(found[0])) == 5


def test_swapped_blocks_and_offloaded_checkpoints_train_the_same(wan: runs.Place, tmp_path: Path) -> None:
    ways = {
        "plain": {"gradient_checkpointing": "full"},
        "swapped": {"gradient_checkpointing": "full", "swap_blocks": 1},
        "away": {"gradient_checkpointing": "offload", "swap_blocks": 1},
    }
    for name, strategy in ways.items():
        assert runs.train(wan.request(tmp_path / name, wan.plan(strategy), steps=3))["outcome"] == "ok"
    plain = runs.tensors(tmp_path / "plain" / "final")
    for name in ways:
        assert runs.losses(tmp_path / name) == runs.losses(tmp_path / "plain")
        found = runs.tensors(tmp_path / name / "final")
        assert all(torch.equal(found[key], weight) for key, weight in plain.items())


def test_an_average_follows_the_weights_and_is_what_is_written(wan: runs.Place, tmp_path: Path) -> None:
    """Its decay is (1 + n) / (10 + n): after the first step 2/11."""
    plain, averaged = tmp_path / "plain", tmp_path / "averaged"
    for output, ema in ((plain, "none"), (averaged, "cpu")):
        assert runs.train(wan.request(output, wan.plan({"ema": ema}), steps=1))["outcome"] == "ok"
    assert runs.losses(plain) == runs.losses(averaged)
    trained, found = runs.tensors(plain / "final"), runs.tensors(averaged / "final")
    b = "transformer.blocks.0.attn1.to_q.lora_B.weight"  # began at zero
    assert torch.allclose(found[b], trained[b] * (1 - 2 / 11), atol=1e-7)


def test_a_loss_that_is_no_number_stops_at_its_step(wan: runs.Place, tmp_path: Path) -> None:
    told = runs.train(wan.request(tmp_path, steps=6, checkpoint_every=1, keep_checkpoints=9, learning_rate=1e30))
    assert told["outcome"] == "nan"
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert 0 < len(kept) < 6
    assert told.get("saved", 0) <= len(kept)  # the last may have been finished as the run ended
    for name in kept:
        weights = runs.kept(tmp_path / "checkpoints" / name)
        assert weights and all(tensor.isfinite().all() for tensor in weights.values())


def test_the_learning_rate_follows_its_schedule(wan: runs.Place, tmp_path: Path) -> None:
    request = wan.request(tmp_path, steps=10, lr_scheduler="linear", warmup_steps=5, learning_rate=1.0)
    rate = rates(request)
    assert [rate(done) for done in (0, 1, 5, 10)] == pytest.approx([0.0, 0.2, 1.0, 0.0])
    assert runs.train(request)["outcome"] == "ok"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == [rate(done) for done in range(10)]


def test_metrics_of_a_run_that_is_taken_up_are_those_of_its_steps(wan: runs.Place, tmp_path: Path) -> None:
    runs.train(wan.request(tmp_path, steps=3, checkpoint_every=2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    runs.train(wan.request(tmp_path, steps=5, resume=str(tmp_path / "checkpoints" / "step-00000002")))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0].keys() >= {"loss", "seconds", "learning_rate", "device_bytes"}


# ---- weights


def damaged(place: runs.Place, folder: Path, change: Any) -> VplanError:
    """The refusal of a copy of the model's folder after a change."""
    import shutil

    shutil.copytree(place.root / "model", folder)
    (path,) = (folder / "transformer").glob("*.safetensors")
    change(path)
    profile = lookup.model(place.model)
    from trainers.step import step

    with pytest.raises(VplanError) as raised:
        source = weights.published(
            model_folder(folder, profile, Job(model=place.model, frames=5, height=32, width=32)), profile
        )
        weights.load(
            step.build_model(profile, place.plan(method="full").job, Strategy(weights_dtype="fp32")),
            source,
            torch.device("cpu"),
            0,
        )
    return raised.value


def _edit(path: Path, change: Any) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _index(path: Path, shard: str) -> None:
    text = json.dumps({"weight_map": {KEY: shard}})
    path.with_name("diffusion_pytorch_model.safetensors.index.json").write_text(text)


KEY = "blocks.0.attn1.to_q.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: _edit(p, lambda t: t.pop(KEY)), f"lacks {KEY}"),
        (lambda p: _edit(p, lambda t: t.update({"blocks.9.x": t[KEY].clone()})), "also has blocks.9.x"),
        (lambda p: _edit(p, lambda t: t.update({KEY: t[KEY][:3].clone()})), f"{KEY} .* has the shape"),
        (lambda p: p.write_bytes(p.read_bytes()[:-5]), "is damaged"),
        (lambda p: p.rename(p.with_suffix(".bin")), "only as pickles"),
        (lambda p: p.unlink(), "has no diffusion_pytorch_model.safetensors"),
        (lambda p: _index(p, "a-00001.safetensors"), "lacks the shard a-00001"),
        (lambda p: _index(p, "../../x"), "names '../../x'"),
        (lambda p: _config(p, {"_class_name": "FluxTransformer2DModel"}), "holds a 'FluxTransformer2DModel'"),
        (lambda p: _config(p, {"num_layers": 3}), "num_layers = 3"),
    ],
)  # fmt: skip
def test_weights_that_are_not_the_models_are_refused_by_name(
    wan: runs.Place, tmp_path: Path, change: Any, named: str
) -> None:
    import re

    error = damaged(wan, tmp_path / "model", change)
    assert re.search(named, error.message), error.message
    assert error.fix


def _config(path: Path, changes: dict[str, Any]) -> None:
    config = path.with_name("config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "nf4", "fp8"])
def test_weights_are_those_of_the_files(wan: runs.Place, tmp_path: Path, dtype: str) -> None:
    """In shards as in one file, whatever they are stored in."""
    from trainers.step import step

    profile = lookup.model(wan.model)
    model = diffusers.WanTransformer3DModel.from_pretrained(wan.root / "model" / "transformer")
    model.save_pretrained(tmp_path / "transformer", max_shard_size="20KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 1
    plan = wan.plan({"weights_dtype": dtype})
    built = step.build_model(profile, plan.job.replace(lora_targets=profile.lora.targets), plan.strategy)
    source = weights.published(model_folder(tmp_path, profile, plan.job), profile)
    weights.load(built, source, torch.device("cpu"), weights.fresh(0))
    wanted = model.state_dict()
    checked = 0
    for name, parameter in built.named_parameters():
        published = name.replace(".base_layer.", ".")
        if published in wanted and parameter.shape == wanted[published].shape and parameter.dtype != torch.uint8:
            assert torch.equal(parameter, wanted[published].to(parameter.dtype))
            checked += 1
    assert checked > 10


# ---- refusals


@pytest.mark.parametrize(
    ("model", "strategy", "named"),
    [
        ("wan2.1-t2v-1.3b", {"compile": "full"}, "compile full"),
        ("wan2.1-t2v-1.3b", {"compile": "blocks", "sharding": "zero-2"}, "compile under zero-2"),
        ("wan2.1-t2v-1.3b", {"compile": "blocks", "weights_dtype": "fp8"}, "compile of weights in fp8"),
        ("wan2.1-t2v-1.3b", {"autocast": "fp16", "adapter_dtype": "bf16"}, "fp16 of trained weights that are not fp32"),
        ("wan2.1-t2v-1.3b", {"sharding": "zero-2", "compute_dtype": "fp16"}, "fp16 under zero-2"),
        ("wan2.1-t2v-1.3b", {"sharding": "zero-2", "weights_dtype": "nf4"}, "nf4 under zero-2"),
        ("hunyuan-video", {"context_parallel": 2, "autocast": "none"}, "tokens diffusers cannot split"),
        ("wan2.2-t2v-a14b", {}, "one of two experts that is not named"),
    ],
)
def test_what_training_does_not_apply_is_refused_by_name(model: str, strategy: dict[str, Any], named: str) -> None:
    plan = Plan(
        job=Job(model=model, frames=5, height=480, width=832),
        strategy=Strategy.read(strategy),
        machine=Machine(gpu="80GB", gpus=Strategy.read(strategy).context_parallel),
    )
    with pytest.raises(VplanError, match=named):
        supported_plan(plan, trained=True)


def test_a_drive_that_deepspeed_cannot_reach_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where libaio is missing; DeepSpeed itself would fail to compile, in a hundred lines."""
    builder = pytest.importorskip("deepspeed.ops.op_builder").AsyncIOBuilder
    monkeypatch.setattr(builder, "is_compatible", lambda self, verbose=False: False)
    job = Job(model="wan2.1-t2v-1.3b", frames=5, height=480, width=832)
    strategy = Strategy(sharding="zero-3", offload_optimizer="nvme")
    with pytest.raises(VplanError, match="libaio"):
        start._plugin(job, strategy, Path("offload"))
