"""sd-scripts' LoRA of SDXL and SD 1.5, read at 48d368f: kohya's own U-Net and the text encoders that are trained too.

Held to rehearsals of its scripts (`profiles/rehearsals/published/sd_scripts.jsonl`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.errors import NotRecordedError
from planner.garbage_collection import recording_cache
from planner.layout.adapters import adapted_layers, of_recordings
from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER
from planner.layout.phases import components_in_fp32
from planner.layout.recorded_run import recorded_step
from planner.layout.recordings import load_facts
from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.lycoris.factors_in_turn import nothing_between
from planner.layout.trainer_terms.lycoris.more_layers import kept_for_more_layers
from planner.layout.trainer_terms.lycoris.whole_changes import CHANGES_IN_16_BITS, CHANGES_OF_FP32, whole_changes
from planner.layout.trainer_terms.sd_scripts.whole_scores import whole_scores
from planner.layout.trainer_terms.trained_text_encoders import (
    adapters_on_text_encoders,
    changes_on_text_encoders,
    keep_beside,
    text_encoders_whole,
)
from planner.spec.configuration import Configuration
from planner.spec.job import Strategy
from planner.tape.program import Block
from planner.tape.variants.precision import Precision

HALF = 2


def checkpoints_reentrant(run: Run) -> None:
    """SDXL's blocks are checkpointed reentrantly (library/sdxl_original_unet.py ``USE_REENTRANT``): while a block's
    backward runs, its output, made again, and the gradient of that stay (torch/utils/checkpoint.py
    ``CheckpointFunction.backward``: ``outputs_with_grad``, ``args``). The largest are those of the first channels."""
    model, grid = run.facts.model, run.grid
    if run.strategy.gradient_checkpointing != "full" or not model.trained_with("sd-scripts", "reentrant-checkpoints"):
        return
    _, rows, columns = model.shape.patch
    positions = grid["B"] * grid["H"] * rows * grid["W"] * columns
    nbytes = HALF * positions * int(model.config["block_out_channels"][0])
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        kept = [run.new(nbytes, "activation", name) for name in ("checkpoint's output", "its gradient")]
        run.place(stage, kept, "reentrant checkpoint", at=0)
        run.free(stage, kept)


UNIT = re.compile(r"(.*\.(?:transformer_blocks|resnets)\.\d+)\.")
"""What is checkpointed at once, by the names of its weights."""


def base_in_fp8(run: Run) -> None:
    """``--fp8_base`` casts the whole U-Net, norms and biases as well (train_network.py ``unet.to(dtype=...)``), where
    16 bits are recorded. Autocast casts a weight for each product and caches only those that are trained
    (ATen/autocast_mode.cpp ``cached_cast``), so each product keeps the copy that its backward reads: those of one
    checkpointed block, or of all but those that read the text, which needs no gradient unless it is trained."""
    trained = run.named("gradient")
    frozen = {name: buffer for name, buffer in run.named("weight").items() if name not in trained}
    checkpointed = run.strategy.gradient_checkpointing == "full"
    untold = () if checkpointed or "@te" in run.trainer else (".attn2.to_k.", ".attn2.to_v.")
    units: dict[str, int] = {}
    for name, buffer in frozen.items():
        if any(part in name for part in untold):
            continue
        unit = match[1] if (match := UNIT.match(name)) else name
        units[unit] = units.get(unit, 0) + run.sizes[buffer]
    copies = max(units.values()) if checkpointed else sum(units.values())
    for buffer in frozen.values():
        run.resize(buffer, run.sizes[buffer] // HALF)
    keep_beside(run, copies, "weights in 16 bits")


def latents_with_gradient(run: Run) -> None:
    """The noisy latents need a gradient (train_network.py ``noisy_latents.requires_grad_(train_unet)``), so blocks
    before the first adapter keep what a backward through them reads, as they do in full training. A recording of a
    LoRA has nothing of them; with checkpoints they keep their input alone."""
    if run.job.method != "lora" or run.strategy.gradient_checkpointing != "none":
        return
    kept_before_adapters(run, "none")


def kept_before_adapters(run: Run, checkpointing: str) -> None:
    """Adds what the blocks before the first recorded adapter keep for a backward through them, as in full training."""
    adapted = {run.facts.step.block_of(f"{layer}.weight") for layer in adapted_layers(run)}
    strategy = Strategy.read({"weights_dtype": "bf16", "autocast": "bf16", "gradient_checkpointing": checkpointing})
    whole_job = run.job.replace(method="full", lora_targets=None, lora_dropout=0.0)
    whole = Configuration.of(whole_job, strategy, of_recordings(run))
    try:
        kept = _kept_by_block(whole, tuple(run.grid.items()))
    except NotRecordedError:  # of a model of the user's own, of which not everything is recorded
        return
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        blocks = [(moment.module_list, moment.block) for moment, _ in stage.stretches]
        first = next((at for at, block in enumerate(blocks) if block in adapted), 0)
        sizes = [nbytes for block in dict.fromkeys(blocks[:first]) for nbytes in kept.get(block, ())]
        buffers = list(run.add_new(sizes, "activation", "kept for a gradient before adapters"))
        run.place(stage, buffers, "kept for a gradient before adapters", at=first)
        run.free(stage, buffers)


@recording_cache(maxsize=16)
def _kept_by_block(configuration: Configuration, shape: tuple[tuple[str, int], ...]) -> Mapping[Block, list[int]]:
    """Bytes of each tensor that a block's forward leaves for its backward."""
    run = recorded_step(configuration, load_facts(configuration))
    sizes, made = run.program.bytes_of(dict(shape)), dict[int, Block]()
    for moment, events in run.step.stretches:
        if moment.passes == "backward":
            break
        for event in events:
            if event >= 0:
                made[event] = (moment.module_list, moment.block)
            else:
                made.pop(~event, None)
    kept: dict[Block, list[int]] = {}
    for buffer, block in made.items():
        if block[1] >= 0:
            kept.setdefault(block, []).append(sizes[buffer])
    return kept


def loaded_in_fp32(run: Run) -> None:
    """A checkpoint is read into models in fp32 on the CPU, whatever its file has: the U-Net, the text encoders and the
    VAE, one process after another (library/model_util.py ``load_models_from_stable_diffusion_checkpoint``;
    library/sdxl_model_util.py ``_load_state_dict_on_device``, "dtype will use fp32 as default"). SDXL's U-Net is in 16
    bits there with ``--full_fp16`` or ``--full_bf16`` (library/sdxl_train_util.py ``match_mixed_precision``), its VAE
    too, which is counted in fp32. Of a folder in diffusers' layout what its files have in fp32 stays mapped, which is
    not told apart here."""
    sixteen = _of_sdxl(run) and Precision.of(run.job, run.strategy).trained == "half"
    run.host.loaded_bytes = BYTES_PER_PARAMETER["bf16" if sixteen else "fp32"]
    run.host.encoders_loaded = "fp32"


def _of_sdxl(run: Run) -> bool:
    return len(run.facts.model.text_encoders) > 1


def loaded_on_the_gpu(run: Run) -> None:
    """``--lowram`` does the same on the GPU, before any is cast (``load_target_model``: ``accelerator.device if
    args.lowram``)."""
    whole = run.host.loaded_bytes * run.facts.model.parameters + components_in_fp32(run)
    run.host.loaded_bytes, run.host.encoders_loaded = 0, "mapped"
    held = run.new(int(whole), "temporary", "models as they are read")
    run.place(run.load, [held, ~held], "reading", at=0)


UNET: tuple[Transform, ...] = (whole_scores, checkpoints_reentrant, latents_with_gradient, loaded_in_fp32)


def lycoris(version: str, text_encoders: bool) -> tuple[Transform, ...]:
    """The terms of LyCORIS' adapters; ``text_encoders``: on these too."""
    wide, half = (
        whole_changes(changes[version], lets_go=True, prompts_trained=text_encoders)
        for changes in (CHANGES_OF_FP32, CHANGES_IN_16_BITS)
    )

    def in_their_format(run: Run) -> None:
        """Adapters are in fp32, or with ``--full_bf16`` and ``--full_fp16`` in 16 bits (train_network.py)."""
        (wide if run.strategy.adapter_dtype == "fp32" else half)(run)

    unet = (*UNET, nothing_between, kept_for_more_layers(between_factors=False), in_their_format)
    kept = CHANGES_OF_FP32[version].kept_bytes + CHANGES_OF_FP32[version].always_kept_bytes
    return (*unet, adapters_on_text_encoders, changes_on_text_encoders(kept)) if text_encoders else unet


LOW_RAM = "lowram"
"""The end of a version with ``--lowram``."""

ON_CPU: dict[str, tuple[Transform, ...]] = {
    "unet": UNET,
    "unet@te": (*UNET, adapters_on_text_encoders),
    "unet@fp8": (base_in_fp8, *UNET),
    "unet@te-fp8": (base_in_fp8, *UNET, adapters_on_text_encoders),
    "unet@whole-te": (*UNET, text_encoders_whole),
    **{f"unet@{version}": lycoris(version, text_encoders=False) for version in CHANGES_OF_FP32},
    **{f"unet@te-{version}": lycoris(version, text_encoders=True) for version in CHANGES_OF_FP32},
}
VERSIONS = ON_CPU | {
    f"{name}{'-' if '@' in name else '@'}{LOW_RAM}": (*terms, loaded_on_the_gpu) for name, terms in ON_CPU.items()
}
"""What sd-scripts' terms are added to: for LoRA alone, with the text encoders, over a base in fp8; full training with
the text encoders; and LyCORIS' adapters. Each with ``--lowram`` too."""
