"""DiffSynth-Studio.

Its text encoders, VAE and model stand on the GPU together in plain ``sft``, which is ``text_encoder`` and ``vae``
``resident`` here, and nothing of it is tiled or validated. What is left is in its own Wan model.
"""

from __future__ import annotations

import itertools

from planner.layout.encoders_vae.component_pass import encoders
from planner.layout.run import Run, Transform
from planner.layout.sharding.zero_weights import UNSPLIT
from planner.layout.trainer_terms.shared import checkpoints_saved_on_cpu, last_encoder_in_model, positions_in_fp64
from planner.tape.program import Stage
from planner.units import power_of_two

MODEL_OFFLOAD = "model-offload"
"""The version of memory terms with --enable_model_cpu_offload."""

BEFORE_JUNE_2025 = "2025-03"
"""The version of examples/wanvideo/train_wan_t2v.py at a25bd74d: ``ModelManager(device="cpu")``."""

COMPLEX128 = 16
HALF, FP32 = 2, 4


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


def table_of_words_twice(run: Run) -> None:
    """FLUX.1's T5 is loaded with the tensor of its table of words read twice, once for each of its two names
    (diffsynth/utils/state_dict_converters/flux_text_encoder_t5.py; ``DiskMap.__getitem__`` reads anew)."""
    run.device.encoders_in_one_format = run.facts.model.trained_with("diffsynth", "table-of-words-twice")


FIRST: tuple[Transform, ...] = (table_of_words_twice,)


def scores_of_vae_whole(run: Run) -> None:
    """FLUX.1's VAE has its one attention behind convolutions of 1x1, whose outputs are turned without a copy
    (diffsynth/models/flux_vae.py ``ConvAttention``). Their numbers do not lie side by side, which every kernel wants,
    so torch makes the scores of all pairs (ATen sdp_utils.cpp ``check_last_dim_stride_equals_1_dense``)."""
    stage, model = run.phases.encode, run.facts.model
    if stage is None or not model.trained_with("diffsynth", "vae-attention-whole"):
        return
    _, rows, columns = model.shape.patch
    positions = run.grid["H"] * rows * run.grid["W"] * columns
    pairs, width = run.grid["B"] * positions**2, int(model.vae.config["block_out_channels"][-1])
    numbers = run.grid["B"] * positions * width
    for at, (moment, events) in enumerate(stage.stretches):
        if moment.block >= 0:
            continue  # a text encoder's layer
        for place in [at for at, event in enumerate(events) if _is_attention(run, event, HALF * numbers)][::-1]:
            made = _whole_attention(run, pairs, numbers)
            events = [*events[: place + 1], *made, *events[place + 1 :]]
        stage.stretches[at] = (moment, events)


def _is_attention(run: Run, event: int, nbytes: int) -> bool:
    """Whether an event makes an attention's output of so many bytes."""
    return event >= 0 and run.sizes[event] == nbytes and run.program.op[event].startswith("_scaled_dot_product")


def _whole_attention(run: Run, pairs: int, numbers: int) -> list[int]:
    """What torch's math kernel makes of inputs in bf16: queries, keys and values in fp32, two of them scaled, scores,
    their softmax, which of them are minus infinity, and the softmax in 16 bits (ATen attention.cpp
    ``_scaled_dot_product_attention_math``, ``_safe_softmax``; in this order on a virtual GPU, torch 2.13)."""
    copies = [run.new(FP32 * numbers, "temporary", "attention in fp32") for _ in range(6)]
    scores, softmax = (run.new(FP32 * pairs, "temporary", "scores of all pairs") for _ in range(2))
    infinite, half = (run.new(width * pairs, "temporary", "scores of all pairs") for width in (1, 2))
    made = [*copies[:5], scores, ~copies[4], softmax, infinite, ~infinite, ~scores, half, copies[5]]
    return [*made, ~copies[5], ~softmax, *(~copy for copy in copies[:4]), ~half]


def read_through_pinned_memory(run: Run) -> None:
    """Files are read to the GPU tensor by tensor (diffsynth/core/vram/disk_map.py: ``safe_open(device=...)``), and each
    in a pinned tensor on its way (safetensors 0.8, bindings/python/src/lib.rs at e9091e1: ``get_tensor_pinned_cuda``).
    torch keeps that memory, in powers of two, one of each."""
    loads_on_the_cpu = MODEL_OFFLOAD in run.trainer or run.trainer.endswith(BEFORE_JUNE_2025)
    if loads_on_the_cpu or run.strategy.sharding == "zero-3":
        return
    names = [component.name for component in encoders(run, "resident", 1)]
    sizes = [run.sizes[buffer] for name in names for buffer in run.named(f"weight of {name}").values()]
    half = run.facts.model.traits.published_dtype != "fp32" or run.strategy.weights(run.job.method) == "fp32"
    trained = run.named("gradient") if run.job.method == "lora" else {}
    weights = (run.sizes[buffer] for name, buffer in run.named("weight").items() if name not in trained)
    sizes += [nbytes if half else 2 * nbytes for nbytes in weights]
    pinned = sum({power_of_two(nbytes) for nbytes in sizes})
    run.host.extra_bytes += pinned
    run.host.pinned_bytes += pinned


TERMS: tuple[Transform, ...] = (
    *(positions_in_fp64("diffsynth"), table_with_each_checkpoint, checkpoints_saved_on_cpu),
    *(caches_kept_by_vae, scores_of_vae_whole, last_encoder_in_model("diffsynth"), read_through_pinned_memory),
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
