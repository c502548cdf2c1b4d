"""DeepSpeed under diffusers' examples: which of them train and save with it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.dialect import Move
from planner.dialects.base.launchers import ON_HOST, several_gpus
from planner.dialects.diffusers.models import AT, SCRIPTS
from planner.spec.rules import DEEPSPEED

_MODELS = ("flux2", "flux2_klein", "krea2", "qwen_image", "z_image")
BATCHED = tuple(f"train_dreambooth_lora_{name}.py" for name in _MODELS)
"""Scripts whose data loader takes a sampler of batches: it has no batch size that accelerate could give DeepSpeed, and
``prepare`` raises a ValueError (rehearsed with accelerate 1.15). FLUX.1 Kontext's says one itself."""

CHECKPOINTING = (
    *(f"train_dreambooth_lora_{name}.py" for name in ("flux_kontext", "hidream", "sd3")),
    *("train_text_to_image_lora_sdxl.py", "train_text_to_image_sdxl.py"),
)
"""Scripts that write checkpoints under DeepSpeed. In the others one GPU alone asks for one, where all have to, or a
hook takes the last of no weights (``weights.pop()``)."""

NO_CHECKPOINTS = "; without checkpoints, which end it under DeepSpeed"
STEPS, LAST = "--checkpointing_steps", 1000000


def deepspeed(fields: Fields) -> Settings:
    """What a script needs beside ZeRO. None saves what stage 3 splits: ``save_pretrained`` and
    ``get_peft_model_state_dict`` are given the weights as one GPU has them, those of over 100,000 numbers empty."""
    script = SCRIPTS.get((fields["model"], fields["method"]), "")
    if script.endswith(BATCHED):
        why = f"accelerate refuses its data loader under DeepSpeed ({AT} {script.rpartition('/')[2]} `batch_sampler`)"
        raise InexpressibleError(UnsupportedValue("sharding", fields["sharding"], "ddp", why))
    if fields["sharding"] == "zero-3":
        why = f"its example saves what one GPU has of the weights, which is nothing under stage 3 ({AT})"
        raise InexpressibleError(UnsupportedValue("sharding", "zero-3", "zero-2", why))
    return {} if script.endswith(CHECKPOINTING) else {STEPS: LAST}


def deepspeed_notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What ends or spoils a run under ZeRO and is no question of memory."""
    script, own_file = str(settings["script"]), settings.get("deepspeed:train_micro_batch_size_per_gpu")
    if not fields["sharding"].startswith("zero"):
        return
    if script.endswith(BATCHED) and own_file in (None, "auto"):
        what = "accelerate refuses its data loader under DeepSpeed, unless DeepSpeed's file says"
        yield f"{what} train_micro_batch_size_per_gpu ({AT} `batch_sampler`)"
    if fields["sharding"] == "zero-3":
        what = "ZeRO-3: the weights that it saves at its end are one GPU's, which has none whole"
        yield f"{what}: zero_to_fp32.py makes them of a checkpoint, if it writes one ({AT})"
    first, last = int(settings.get(STEPS, 500)), int(settings.get("--max_train_steps", LAST))
    if not script.endswith(CHECKPOINTING) and first < last:
        yield f"its first checkpoint ends it under DeepSpeed, or waits for ever: {STEPS} {LAST} leaves it out ({AT})"


def _splits(writes: bool, fields: Fields) -> bool:
    return several_gpus(fields) and _writes_checkpoints(fields) == writes


def _offloads(writes: bool, fields: Fields) -> bool:
    return bool(fields["method"] == "full") and _writes_checkpoints(fields) == writes


def _writes_checkpoints(fields: Fields) -> bool:
    return SCRIPTS.get((fields["model"], fields["method"]), "").endswith(CHECKPOINTING)


def _moves() -> Iterator[Move]:
    """Stage 2, with the optimizer in host RAM for one GPU too; what a script loses by it is told."""
    shared, stepped = "gradients and states are sharded across the GPUs, with an fp32 master", "steps in host RAM"
    for writes, loss in ((True, ""), (False, NO_CHECKPOINTS)):
        yield Move({"sharding": "zero-2", **DEEPSPEED}, shared + loss, when=partial(_splits, writes))
        yield Move(
            {"sharding": "zero-2", **ON_HOST, **DEEPSPEED},
            f"the optimizer {stepped}{loss}",
            when=partial(_offloads, writes),
            last_resort=not writes,
        )


MOVES = tuple(_moves())
