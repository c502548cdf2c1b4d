"""DiffSynth-Studio.

Its text encoders, VAE and model stand on the GPU together in plain ``sft``, which is ``text_encoder`` and ``vae``
``resident`` here, and nothing of it is tiled or validated. What is left is in its own Wan model.
"""

from __future__ import annotations

import itertools

from planner.layout.encoders_vae.component_pass import encoders
from planner.layout.run import Run, Transform
from planner.layout.sharding.zero import UNSPLIT
from planner.layout.trainer_terms.shared import checkpoints_saved_on_cpu, last_encoder_in_model, positions_in_fp64
from planner.tape.program import Stage

COMPLEX128 = 16


def table_with_each_checkpoint(run: Run) -> None:
    """The table of positions is an argument of every checkpoint, so each offloaded one holds a copy of it
    (diffsynth/core/gradient/gradient_checkpoint.py: ``save_on_cpu`` around the checkpoint of ``x, context, t_mod,
    freqs``)."""
    turned = run.facts.model.trained_with("diffsynth", "positions-in-fp64")
    if run.strategy.gradient_checkpointing != "offload" or not turned:
        return
    size = run.facts.model.config["attention_head_dim"]
    run.host.extra_bytes += (
        run.facts.model.blocks * COMPLEX128 * size // 2 * run.grid["F"] * run.grid["H"] * run.grid["W"]
    )


CACHED = ("clone", "cat")
"""How a causal convolution keeps the last frames of its input."""


def caches_kept_by_vae(run: Run) -> None:
    """The frames that the VAE's causal convolutions keep for the next chunk stay until the next clip is encoded:
    ``encode`` clears them where it begins (diffsynth/models/wan_video_vae.py ``VideoVAE_.encode``), and diffusers where
    it ends. There they are the first to be freed behind the last convolution."""
    stage = run.phases.encode
    if stage is None or run.strategy.vae != "resident":
        return
    if not run.facts.model.trained_with("diffsynth", "vae-caches-kept"):
        return
    ops = stage.ops
    last = max((at for at, event in enumerate(ops) if event >= 0 and run.program.op[event] == "convolution"), default=0)
    behind = itertools.takewhile(lambda event: event < 0 and run.program.op[~event] in CACHED, ops[last + 1 :])
    kept = {~event for event in behind}
    frees = {~buffer for buffer in kept}
    stage.stretches = [
        (moment, [event for event in events if event not in frees]) for moment, events in stage.stretches
    ]
    for optimizer in (run.optimizer_first, run.optimizer):
        run.free(optimizer, sorted(kept))


TERMS: tuple[Transform, ...] = (
    *(positions_in_fp64("diffsynth"), table_with_each_checkpoint, checkpoints_saved_on_cpu),
    *(caches_kept_by_vae, last_encoder_in_model("diffsynth")),
)


def weights_in_turn(run: Run) -> None:
    """``--enable_model_cpu_offload``: what is frozen, text encoders and VAE too, has a pinned copy in host RAM, and
    each layer comes for its own forward and goes. When a checkpointed block is computed again its layers stay until
    their backward, so the GPU holds one block (diffsynth/core/offload_training/manager.py ``UnitWiseHookManager``,
    ``AlwaysOnGPUParamOffloader`` for what is trained)."""
    trained = run.named("gradient")
    frozen = {name: buffer for name, buffer in run.named("weight").items() if name not in trained}
    names = {component.name for component in encoders(run, "resident", 1)}
    beside = [buffer for name in names for buffer in run.named(f"weight of {name}").values()]
    beside += [buffer for buffer, op in enumerate(run.program.op) if op in names]  # without a recording, whole
    blocks = [run.total_bytes(buffers) for buffers in run.swappable_weights.values()]
    outside = [run.sizes[buffer] for name, buffer in frozen.items() if run.facts.step.block_of(name) is None]
    for stage in (run.load, run.step):
        run.drop(stage, [*frozen.values(), *beside])
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        _in_turn(run, stage, max([*blocks, *outside], default=0))
    if run.phases.encode is not None and beside:
        _in_turn(run, run.phases.encode, max(run.sizes[buffer] for buffer in beside))
    copied = sum(run.sizes[buffer] for buffer in (*frozen.values(), *beside))
    run.host.extra_bytes += copied
    run.host.pinned_bytes += copied


def _in_turn(run: Run, stage: Stage, nbytes: int) -> None:
    here = run.new(nbytes, "buckets", "layers in turn")
    run.place(stage, [here], "layers in turn", at=0)
    run.free(stage, [here])


MODEL_OFFLOAD = "model-offload"
"""The version of memory terms with --enable_model_cpu_offload."""


def split_as_read(run: Run) -> None:
    """Models are made under ``deepspeed.zero.Init`` where accelerate was told so (``zero3_init_flag``), and their
    weights come into them layer by layer: none is whole on the GPU before it is split, if the files are read on the CPU
    (diffsynth/core/loader/model.py ``get_init_context``, ``load_model``)."""
    for buffer, op in enumerate(run.program.op):
        if op == UNSPLIT:
            run.resize(buffer, 0)


ZERO_INIT = "zero-init"
"""The version of memory terms with that flag and --initialize_model_on_cpu."""

BY_VERSION: dict[str, tuple[Transform, ...]] = {MODEL_OFFLOAD: (weights_in_turn,), ZERO_INIT: (split_as_read,)}
"""With flags that no field of a plan says."""
