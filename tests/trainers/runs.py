"""Tiny models as folders, cached samples for them, and requests to train them: what the tests of training share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file

from planner.catalog import lookup, user_data
from planner.commands._shared import own_model
from planner.launch import checkpoints
from planner.launch.launch import RunRequest
from planner.launch.supported import supported_plan
from planner.spec.job import Bucket, Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.training import TrainingSettings
from trainers.data.entries import CachedSample, write_entries
from trainers.families import family
from trainers.recording.own import derive
from trainers.step import step

WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "freq_dim": 16,
    "text_dim": 8,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
COG = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_embed_dim": 8,
    "time_embed_dim": 8,
    "max_text_seq_length": 6,
    "num_layers": 2,
    "sample_height": 8,
    "sample_width": 8,
    "sample_frames": 9,
}
WIDE = {**WAN, "attention_head_dim": 48, "ffn_dim": 6144, "rope_max_seq_len": 1024}
"""Enough for DeepSpeed to split weights in stage 3, and to put shares on a drive: those of a MiB and more."""

TINY = {"wan": ("wan2.1-t2v-1.3b", WAN), "cogvideox": ("cogvideox-2b", COG), "wide": ("wan2.1-t2v-1.3b", WIDE)}
SHAPES = {
    "wide": (Bucket(frames=5, height=32, width=48),),
    "wan": (Bucket(frames=5, height=32, width=48), Bucket(frames=1, height=48, width=32)),
    "cogvideox": (Bucket(frames=9, height=64, width=64),),
}
TEXT = {"wan": None, "wide": None, "cogvideox": 6}
"""Prompt lengths where the tiny table of positions is shorter than the published one."""
PLAIN = {"weights_dtype": "fp32", "autocast": "none", "compute_dtype": "fp32"}
"""No rounding that hides a difference."""


def make_model(folder: Path, kind: str) -> str:
    """A tiny random transformer saved as diffusers does it, known by name; `VPLAN_HOME` must be a test's own."""
    assert "nobody" not in os.environ["VPLAN_HOME"]
    published, tiny = TINY[kind]
    profile = lookup.model(published)
    torch.manual_seed(7)
    model = getattr(diffusers, profile.diffusers_class).from_config({**profile.config, **tiny})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder / "transformer")
    return keep(folder, f"tiny-{kind}")


def keep(folder: Path, name: str) -> str:
    """Makes the model in a folder known by name, as `vplan record FOLDER --name NAME` does; its name."""
    profile = derive(*own_model.read(str(folder), name)).profile
    user_data.write_profile(name, profile.to_json())
    return name


def make_entries(folder: Path, name: str, kind: str, each: int = 3) -> Path:
    """Random samples as caching leaves them."""
    profile = lookup.model(name)
    made = family(profile)
    torch.manual_seed(3)
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for bucket in SHAPES[kind]:
        for number in range(each):
            job = Job(model=name, **bucket.model_dump(exclude={"batch_size"}), text_tokens=TEXT[kind])
            batch = made.batch(lookup.grid(profile, job), "cpu", torch.float32)
            stem = folder / f"{bucket.frames}x{bucket.height}x{bucket.width}-{number}"
            one = {key: tensor[0].contiguous() for key, tensor in batch.items()}
            prompt = {"prompt": one.pop("prompt")}
            save_file(one, f"{stem}.latents.safetensors")
            save_file(prompt, f"{stem}.text.safetensors")
            entries.append(CachedSample(Path(f"{stem}.latents.safetensors"), Path(f"{stem}.text.safetensors"), bucket))
    write_entries(folder / "entries.jsonl", entries)
    return folder / "entries.jsonl"


class Place:
    """A tiny model with its samples in one folder; made once for many runs."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.kind = root, kind
        self.model = make_model(root / "model", kind)
        self.entries = make_entries(root / "data", self.model, kind)

    def plan(self, strategy: dict[str, Any] | None = None, gpus: int = 1, **job: Any) -> Plan:
        bucket, *others = SHAPES[self.kind]
        shape = {"frames": bucket.frames, "height": bucket.height, "width": bucket.width, "lora_rank": 4}
        shape |= {"buckets": [each.to_json() for each in SHAPES[self.kind]]} if others else {}
        shape |= {"text_tokens": TEXT[self.kind]}
        return supported_plan(
            Plan(
                job=Job.read({"model": self.model, **shape, **job}),
                strategy=Strategy.read({**PLAIN, **(strategy or {})}),
                machine=Machine(gpu="24GB", gpus=gpus),
            ),
            trained=True,
        )

    def request(self, output: Path, plan: Plan | None = None, **said: Any) -> RunRequest:
        output.mkdir(parents=True, exist_ok=True)
        asked = {
            "plan": plan or self.plan(),
            "entries": str(self.entries),
            "weights": str(self.root / "model"),
            "output": str(output),
            "run": checkpoints.run_id(output),
            "device": "cpu",
            "steps": 4,
            "checkpoint_every": 2,
            "keep_checkpoints": 2,
        }
        training = {name: value for name, value in said.items() if name in TrainingSettings.model_fields}
        others = {name: value for name, value in said.items() if name not in training}
        return with_training(RunRequest(**{**asked, **others}), **training)


def with_training(request: RunRequest, **training: Any) -> RunRequest:
    """The request with settings over its plan's, and a rate at which a few steps show."""
    usual = {} if request.plan.strategy.optimizer == "prodigy" else {"learning_rate": 1e-2}
    kept = {name: getattr(request.plan.training, name) for name in request.plan.training.model_fields_set}
    settings = TrainingSettings.read({**usual, **kept, **training})
    return request.replace(plan=request.plan.replace(training=settings))


class Pair(Place):
    """A tiny Wan 2.2 pipeline of two transformers, with samples."""

    def __init__(self, root: Path) -> None:
        self.root, self.kind = root, "wan"
        config = {**lookup.model("wan2.2-t2v-a14b").config, **WAN}
        for number, part in enumerate(("transformer", "transformer_2")):
            torch.manual_seed(number)
            model = diffusers.WanTransformer3DModel.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0.0, 0.1)
            model.save_pretrained(root / "model" / part)
        self.model = keep(root / "model", "tiny-pair")
        # Short runs in which both have their turns.
        profile = lookup.model(self.model)
        every_step = profile.training.replace(expert_steps=1)
        user_data.write_profile(self.model, profile.replace(training=every_step).to_json())
        self.entries = make_entries(root / "data", self.model, "wan")


class ReportInMemory:
    """A report that stays in memory."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def tell(self, **facts: Any) -> None:
        self.facts.update(facts)


def train(request: RunRequest) -> dict[str, Any]:
    """Trains in this process; what it told."""
    from trainers import train as worker

    report = ReportInMemory()
    worker.run(request, report)
    return report.facts


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in lines(output) if "loss" in line]


def lines(output: Path) -> list[dict[str, Any]]:
    """All that was written while it trained: steps, and samples."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All finished weights, by diffusers' names."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        if path.name != checkpoints.COMFYUI_LORA:
            found |= load_file(path)
    return found


__all__ = ["SHAPES", "Place", "losses", "step", "tensors", "train"]


def kept(checkpoint: Path, kind: str = "weights") -> dict[str, torch.Tensor]:
    """The trained weights that a checkpoint of one process holds, or their ``average``, by their names in the model."""
    from safetensors.torch import load_file

    files = sorted((checkpoint / "state").glob("*.safetensors"))
    assert files
    found = {key: tensor for path in files for key, tensor in load_file(path).items()}
    return {key.removeprefix(f"{kind}/"): tensor for key, tensor in found.items() if key.startswith(f"{kind}/")}
