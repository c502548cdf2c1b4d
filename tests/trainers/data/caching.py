"""A tiny model's setting, and caching as training does it, for the tests around it."""

from __future__ import annotations

from pathlib import Path

import torch

from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import job_for
from planner.dataset import scan
from planner.dataset.sources import DataSource
from planner.spec.job import Job, Strategy
from tests.trainers import tiny
from trainers.data import cache

FP32 = Strategy(vae_dtype="fp32", text_encoder_dtype="fp32")


def setting(model: Path, folder: Path, profile: ModelProfile | None = None, **more: object) -> cache.EncodingTask:
    profile = profile or tiny.profile("wan2.1-t2v-1.3b")
    plan = more.pop("job", None) or job(profile)
    return cache.EncodingTask(profile, plan, more.pop("strategy", FP32), str(model), folder, **more)


def job(profile: ModelProfile, **more: object) -> Job:
    return job_for(profile, {"frames": 9, "height": 48, "width": 64, **more})


def dataset(clips: Path, one: cache.EncodingTask) -> scan.Dataset:
    return scan.read([DataSource(folder=str(clips), fps=16.0)], one.profile, one.job)


def run(clips: Path, one: cache.EncodingTask, **more: object) -> list[cache.Entry]:
    return cache.cached(dataset(clips, one), one, **more)


def files(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*/*")}


def shapes_of(batch: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}
