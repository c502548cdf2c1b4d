"""Training scripts around diffusers.

Its own examples, cogvideox-factory (later finetrainers) and CogVideo's finetune.
"""

from __future__ import annotations

import itertools

from planner.layout.encoders_vae.component_layout import alive_after, load_component, run_component
from planner.layout.encoders_vae.component_pass import encoders
from planner.layout.phases import RGB, take_sizes
from planner.layout.run import STRATEGY_MOMENT, Run, Transform
from planner.layout.sharding.zero import bucket_as_backward_begins
from planner.layout.stored_positions import table_in_half
from planner.layout.trainer_terms.diffusers.sample_terms import (
    FACTORY,
    IN_LOOP,
    is_vae,
    last_sample,
    tested_beside_the_trained,
    validation_prompts,
)
from planner.layout.trainer_terms.frozen_experts import experts_without_gradients
from planner.layout.trainer_terms.shared import cache_kept_while_sampling, clip_pixels, from_pretrained
from planner.layout.trainer_terms.trained_text_encoders import text_encoders_whole
from planner.tape.program import Moment, Stage

FP32 = 4


def cast_on_the_gpu(run: Run) -> None:
    """Full fine-tuning in fp32: the scripts load half-precision weights onto the GPU and cast them there, one by one.

    The holes the half copies leave stay behind (cogvideox-factory d81209b, training/cogvideox_text_to_video_sft.py:
    ``transformer.to(device, dtype=weight_dtype)``, then ``cast_training_params(dtype=float32)``).
    """
    if not _halves_first(run):
        return
    trained = run.named("gradient")
    weights = {buffer: name in trained for name, buffer in run.named("weight").items()}
    halves: dict[int, int] = {}
    first: list[int] = []
    for position, (moment, events) in enumerate(run.load.stretches):
        casts = []
        for event in events:
            if weights.get(event):
                halves[event] = run.program.buffer(run.sizes[event] // 2, "weight", "half precision")
                run.sizes.append(run.sizes[event] // 2)
                first.append(halves[event])
                casts += [event, ~halves[event]]
            elif event in weights:  # a table is no parameter: it stays as it came
                first.append(event)
            else:
                casts.append(event)
        run.load.stretches[position] = (moment, casts)
        assert moment.piece in ("load", "")
    run.load.stretches.insert(0, (run.load.stretches[0][0], first))


def _halves_first(run: Run) -> bool:
    """Whether loading begins with a stretch of half-precision weights, to be cast."""
    strategy = run.strategy
    return run.job.method == "full" and strategy.weights_dtype == "fp32" and strategy.autocast != "none"


def tables_cast(run: Run) -> None:
    """``transformer.to(device, dtype=weight_dtype)`` casts tables as well as parameters (cogvideox-factory d81209b,
    training/cogvideox_text_to_video_{lora,sft}.py; diffusers examples/cogvideo/train_cogvideox_lora.py)."""
    if run.strategy.weights_dtype in ("bf16", "fp16") or _halves_first(run):
        table_in_half(run)


def loaded_on_the_cpu(run: Run) -> None:
    """The scripts call ``from_pretrained``, then ``to(device)``: in fp32 where they pass no ``torch_dtype`` (58eb52c
    examples/dreambooth/train_dreambooth_lora_flux.py, train_dreambooth_lora_sd3.py, text_to_image/), in the precision
    of the run (train_dreambooth_lora_qwen_image.py ``weight_dtype``), or in that of the files (examples/cogvideo
    ``load_dtype``)."""
    model = run.facts.model
    if model.trained_with("diffusers", "loaded-as-published"):
        from_pretrained(run, model.traits.published_dtype)
    elif model.trained_with("diffusers", "loaded-as-trained"):
        from_pretrained(run, run.strategy.weights(run.job.method))
    else:
        from_pretrained(run, "fp32")


def cache_emptied(run: Run) -> None:
    """The scripts empty the allocator's cache once loading is over (``reset_memory``, ``free_memory``)."""
    run.empty_cache.after_load = True


def encoders_together(run: Run) -> None:
    """The scripts hold text encoders and VAE on the GPU together while they encode (CogVideo finetune/trainer.py
    ``prepare_dataset``, diffusers examples/cogvideo)."""
    run.device.encoders_together = True


def clip_as_loaded(run: Run) -> None:
    """Where the VAE encodes every batch, its pixels lie on the GPU in fp32 beside the copy that is encoded.

    They stay until the loop's variable takes the next batch, which is there already by then (accelerate data_loader.py
    ``DataLoaderShard.__iter__``; then in every example script ``batch["pixel_values"].to(dtype=...)``).
    """
    if run.phases.encode is None or run.strategy.vae == "cached":
        return
    nbytes = 4 * RGB * clip_pixels(run)
    clip = run.add(run.phases.encode, nbytes, "batch", "pixels as loaded", at=0)
    coming = run.add(run.optimizer_first, nbytes, "batch", "pixels of the next batch")
    run.leftovers = [*run.leftovers, clip]  # not in place: a search's runs share the list
    run.free(run.optimizer_first, [clip, coming])
    run.free(run.optimizer, [clip])


def encoders_at_start(run: Run) -> None:
    """Text encoder, model and VAE are put on the GPU one after the other even where latents and prompts come from
    disk; only then the model is cast, adapted or handed to an engine, and encoder and VAE go once all is ready
    (cogvideox-factory 3a519f5, training/cogvideox_text_to_video_sft.py: ``text_encoder.to``, ``transformer.to``,
    ``vae.to``; ``if args.load_tensors: del vae, text_encoder``, then ``empty_cache``)."""
    first, gone = len(run.program.buffers), []
    before: list[tuple[Moment, list[int]]] = []
    behind: list[tuple[Moment, list[int]]] = []
    for component in encoders(run, "cached", 1):
        # They are loaded in fp32 and cast whole, so that no layer stays in fp32 here.
        loading, _ = load_component(run.program, component._replace(kept_in_fp32=""))
        (behind if is_vae(run, component) else before).extend(loading.stretches)
        gone += alive_after(loading)
    take_sizes(run, first)
    recorded = [at for at, (moment, _) in enumerate(run.load.stretches) if moment.piece == "load"]
    model = 1 if _halves_first(run) else recorded[-1] + 1
    run.load.stretches[model:model] = behind
    run.load.stretches[:0] = before
    run.phases.unload = Stage(
        "encoders leave", [(STRATEGY_MOMENT._replace(passes="encoders leaving"), [~buffer for buffer in gone])]
    )
    run.empty_cache.after = (*run.empty_cache.after, run.phases.unload)


BROADCAST_BYTES, IN_FLIGHT = 250 << 20, 2
"""Weights that DDP broadcasts together as it is made, and how many such broadcasts run at once (torch
nn/parallel/distributed.py ``broadcast_bucket_size``, distributed/c10d/comm.cpp ``broadcast_coalesced``)."""


def wrapped_beside_encoders(run: Run) -> None:
    """``accelerator.prepare`` makes DDP while encoders are still there, and DDP broadcasts the weights in copies
    (cogvideox-factory 223add1: ``del vae, text_encoder`` stands behind it)."""
    if run.strategy.sharding == "ddp":
        nbytes = min(BROADCAST_BYTES, run.total_bytes(run.named("weight").values()))
        copies = [run.new(nbytes, "temporary", "broadcast weights") for _ in range(IN_FLIGHT)]
        run.place(run.load, [*copies, *(~copy for copy in copies)], "broadcast weights")


def encoders_beside_the_model(run: Run) -> None:
    """LoRA scripts of today encode prompts and, with ``--cache_latents``, clips while the model is on the GPU already
    (diffusers 58eb52c0, examples/dreambooth/train_dreambooth_lora_sd3.py:1237 to 1241, ``transformer.to`` and
    ``text_encoder_three.to``; ..._lora_qwen_image.py:1266 and 1503 ``offload_models(text_encoding_pipeline)``). In full
    training the model comes last, with ``accelerator.prepare``; those for videos cache nothing."""
    caches = "cached" in (run.strategy.text_encoder, run.strategy.vae)
    if not caches or run.job.method != "lora" or run.facts.model.kind != "image":
        return
    encoders_at_start(run)
    first = len(run.program.buffers)
    stretches: list[tuple[Moment, list[int]]] = []
    for component in encoders(run, "cached", 1):
        done = run_component(run.program, component, {})
        stretches += [*done.stretches, (STRATEGY_MOMENT, [~buffer for buffer in alive_after(done)])]
    take_sizes(run, first)
    run.phases.encode_once = Stage("encode", stretches)


REMOTE = "remote-te"
"""In the version of a script whose prompts are encoded elsewhere (``--remote_text_encoder``)."""


def encoders_elsewhere(run: Run) -> None:
    """No text encoder is loaded where another machine encodes prompts (58eb52c
    examples/dreambooth/train_dreambooth_lora_flux2.py:1233, 1275, ``compute_remote_text_embeddings``)."""
    if REMOTE in run.trainer.partition("@")[2]:
        run.device.encoders_on_cpu = True


TERMS: tuple[Transform, ...] = (
    encoders_elsewhere,
    *(tables_cast, cast_on_the_gpu, loaded_on_the_cpu, cache_emptied, encoders_together, clip_as_loaded),
    *(experts_without_gradients, validation_prompts, cache_kept_while_sampling, encoders_beside_the_model, last_sample),
)


def cache_kept(run: Run) -> None:
    """Leaves the allocator's cache as it is between a step and validation: the script does not empty it (the same
    script, ``log_validation``)."""
    run.empty_cache.before_validation = False


def one_step(run: Run) -> None:
    """The run ends, or validates, behind the step that made the states (`planner.evidence.published.SHORT_RUNS`)."""
    run.phases.one_step = True


def latents_in_fp32(run: Run) -> None:
    """Latents are sampled from moments in 16 bits and then cast to fp32 (``videos.to(...).float()``), so noise, noisy
    latents and loss are fp32 as well; the recorded step has them in 16 bits (cogvideox-factory d81209b,
    training/cogvideox_text_to_video_lora.py ``collate_fn_with_pre_encoding``, and 4af4364, ..._sft.py).

    The script's variables hold noise, noisy latents, the model's output and the prediction until the next step, through
    a validation too. In full fine-tuning ``latent_dist`` is one of them, with moments, log-variance, deviation and
    variance in 16 bits.
    """
    if run.strategy.sharding != "none":  # DeepSpeed's engine casts what goes into the model
        return
    model, grid = run.facts.model, run.grid
    patch = model.shape.patch
    positions = grid["B"] * grid["F"] * patch[0] * grid["H"] * patch[1] * grid["W"] * patch[2]
    half = 2 * positions * model.vae.latent_channels
    outside = [events for moment, events in run.step.stretches if not moment.module_list]
    for latents in {event for events in outside for event in events if event >= 0 and run.sizes[event] == half}:
        run.resize(latents, 2 * half)
    held = {"noise": 2 * half, "noisy latents": 2 * half}
    if run.job.method == "lora" and not run.trainer.endswith("-one-step"):
        held["next batch"] = 2 * half  # it is there by then (accelerate 1.0 data_loader.py, DataLoaderShard.__iter__)
    if run.job.method == "full":
        held |= {"moments": 2 * half, "log-variance": half, "deviation": half, "variance": half}
    kept = [run.add(run.step, nbytes, "batch", name, at=0) for name, nbytes in held.items()]
    backward = next(at for at, (moment, _) in enumerate(run.step.stretches) if moment.passes == "backward")
    predicted = {"output": half, "prediction": 2 * half}
    kept += [run.add(run.step, nbytes, "activation", name, at=backward) for name, nbytes in predicted.items()]
    run.leftovers = [*run.leftovers, *kept]
    # Nothing takes their place before the validation.
    last = run.optimizer_first if run.trainer.endswith("-one-step") else run.optimizer
    ends = run.phases.validation[-1][1] if run.phases.validation else last
    for stage in (run.optimizer_first, run.optimizer):
        run.free(ends if stage is last else stage, kept)


def final_norm_of_both(run: Run) -> None:
    """Until February 2025 CogVideoX with rotary positions joined text and clip for its final norm, and took the clip's
    part of what came out, which is not contiguous (diffusers 66eef9a models/transformers/cogvideox_transformer_3d.py
    ``norm_final``; changed in ab42820). The second norm copies that part first, in forward and in backward (ATen
    layer_norm_kernel.cu), and backward fills a tensor of both for each of the two slices.

    Under autocast alone: without it the norm has no copy in fp32, and no rehearsal was compared.
    """
    if not run.facts.model.config.get("use_rotary_positional_embeddings") or run.strategy.autocast == "none":
        return
    step, grid, op = run.step, run.grid, run.program.op
    turn = next(
        at for at, (moment, _) in enumerate(step.stretches) if moment.passes == "backward" and moment.block >= 0
    )
    outside = [event for moment, events in step.stretches[:turn] if moment.block < 0 for event in events]
    clip = max(run.sizes[event] for event in outside if event >= 0 and op[event] == "native_layer_norm")
    made = [event for event in outside if event >= 0 and run.sizes[event] == clip]
    norm, second = (event for event in made if op[event] == "native_layer_norm")
    of_second, of_norm = (event for event in made if op[event] == "native_layer_norm_backward")
    single = made[made.index(norm) - 1]
    behind = outside[outside.index(norm) :]
    hidden = next(event for event in behind if event < 0 and 2 * run.sizes[~event] == clip)
    gradient = next(event for event in reversed(behind) if event >= 0 and 2 * run.sizes[event] == clip)
    tokens = grid["F"] * grid["H"] * grid["W"]
    both = clip // tokens * (tokens + grid["T"])
    for buffer, nbytes in ((single, both), (norm, both), (of_norm, both), (gradient, both // 2)):
        run.resize(buffer, nbytes)
    joined = run.new(both // 2, "activation", "text and clip")
    copy, again = (run.new(clip, "temporary", "contiguous clip") for _ in range(2))
    inner, outer = (run.new(both, "gradient", "gradient of a slice") for _ in range(2))
    changes = {
        hidden: [],
        ~of_second: [],
        single: [joined, hidden, single],
        norm: [norm, ~joined],
        second: [copy, second, ~copy],
        of_second: [again, of_second, ~again],
        of_norm: [inner, ~of_second, outer, ~inner, of_norm, ~outer],
    }
    step.stretches = [
        (
            moment,
            events
            if changes.keys().isdisjoint(events)
            else [each for event in events for each in changes.get(event, [event])],
        )
        for moment, events in step.stretches
    ]


SCALES_IN_FP32 = "nf4-scales-in-fp32"
"""The version of memory terms of a base in NF4 whose blocks' scales are not quantised once more."""


def scales_in_fp32(run: Run) -> None:
    """transformers' BitsAndBytesConfig leaves ``bnb_4bit_use_double_quant`` off: the scale of each block of weights is
    fp32, where recorded are 8 bits, with scales of their own that are not there then."""
    for name, buffer in run.named("weight").items():
        if name.endswith((".nested.absmax", ".nested.code", ".absmax.code")):
            run.resize(buffer, 0)
        elif name.endswith(".absmax"):
            run.resize(buffer, FP32 * run.sizes[buffer])


_2024_10 = (encoders_at_start, cache_kept, bucket_as_backward_begins, latents_in_fp32, final_norm_of_both)

WHOLE_TEXT_ENCODER, PRIOR = "whole-te", "prior"

_EXAMPLES: dict[str, tuple[Transform, ...]] = {
    WHOLE_TEXT_ENCODER: (text_encoders_whole,),
    SCALES_IN_FP32: (scales_in_fp32,),
    IN_LOOP: (),
    REMOTE: (),
    PRIOR: (),
}
"""What options of the examples do that no field says; their versions name each that is given, in this order."""

PARTS = tuple(_EXAMPLES)
_COMBINED = [parts for count in range(1, len(_EXAMPLES) + 1) for parts in itertools.combinations(_EXAMPLES, count)]

BY_VERSION: dict[str, tuple[Transform, ...]] = {
    "2024-10": _2024_10,
    "2024-10-one-step": (*_2024_10, one_step),
    FACTORY: (encoders_at_start, wrapped_beside_encoders, cache_kept, tested_beside_the_trained),
    **{"-".join(parts): tuple(transform for part in parts for transform in _EXAMPLES[part]) for parts in _COMBINED},
}
"""2024-10: cogvideox-factory while it published its tables of memory (d81209b to 3a519f5), and its runs of one step.
Their ZeRO is priced without `share_comes_back_in_fp32`: with it a full CogVideoX-5B would hold 20.9 GiB, and 19.998 are
printed as reserved (cvxt-5b-full-b1-zero2). cogvideox-factory: the same scripts at 223add1, which
cast sampled latents back to 16 bits (``videos.to(..., dtype=weight_dtype)``)."""
