"""The finished weights: LoRA files, or the whole model's folder as diffusers reads it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import diffusers
import torch
from safetensors import SafetensorError
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.launch import checkpoints
from planner.spec.job import Job
from trainers.parallel.checkpoint import barrier, gather, is_first
from trainers.parallel.ema import Average
from trainers.parallel.local_engine import LocalEngine
from trainers.step.experts import PARTS
from trainers.step.weights import saved_buffers


def part(profile: ModelProfile, job: Job | None = None) -> str:
    """The pipelines' name for the model: the prefix of its LoRA weights, and its folder.

    The low-noise expert's folder is the second one. Its LoRA file is like the other's, and a pipeline is told where it
    belongs (``load_lora_weights(..., load_into_transformer_2=True)``). If both were trained, each has a folder named
    like its part.
    """
    if profile.experts == 2 and job and job.experts == "low":
        return f"{profile.traits.part}_2"
    return profile.traits.part


def finish(
    folder: Path,
    profile: ModelProfile,
    job: Job,
    engine: LocalEngine,
    average: Average | None,
    lora: Callable[[Path, Mapping[str, Tensor]], None] | None,
) -> None:
    """Writes the trained weights, or their moving average if the plan keeps one. All ranks call it together. ``lora``
    writes the LoRA files into a folder; None in full training."""
    trained = engine.trainee.trainable
    tensors = gather(trained, average.full_tensor if average else engine.full_tensor)
    if job.method == "full":
        tensors |= gather((name for name in engine.parameters if name not in trained), engine.full_tensor)
    if is_first():
        partial = folder.with_name(f".partial-{folder.name}")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if lora is not None:
                lora(partial, tensors)
            else:
                for prefix, place, model in _parts(partial, profile, job, engine):
                    of_model = {
                        key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)
                    }
                    whole_model(of_model, profile, model).save_pretrained(place)  # type: ignore[operator]  # diffusers'
            for path in partial.rglob("*"):
                checkpoints.sync(path)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(partial, folder)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            fix = "free some space there and run the same command again"
            raise VplanError(f"cannot write {folder}: {reason}", fix, 4) from None
    barrier()


def _parts(
    folder: Path, profile: ModelProfile, job: Job, engine: LocalEngine
) -> list[tuple[str, Path, torch.nn.Module]]:
    """(prefix of its weights' names, folder to write it to, the model itself) of each model that was trained."""
    if job.experts == "both":
        return [(f"{name}.", folder / name, engine.plain.get_submodule(name)) for name in PARTS.values()]
    return [("", folder / part(profile, job), engine.plain)]


def whole_model(tensors: dict[str, Tensor], profile: ModelProfile, trained: torch.nn.Module) -> torch.nn.Module:
    """A plain model on the CPU with these tensors and the buffers of the ``trained`` one, however that is split."""
    from accelerate import init_empty_weights

    model_class = getattr(diffusers, profile.diffusers_class)
    with init_empty_weights():
        model: torch.nn.Module = model_class.from_config(profile.config)
    model.load_state_dict({**tensors, **saved_buffers(trained)}, strict=False, assign=True)
    lacking = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert not lacking, lacking[:3]
    return model
