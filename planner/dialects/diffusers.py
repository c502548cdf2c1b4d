"""Training scripts around diffusers.

Its own examples, cogvideox-factory (later finetrainers) and CogVideo's finetune.
"""

from __future__ import annotations

from planner.phases import alive, encoders, load, take_sizes
from planner.run import SERVICE, Run, Term
from planner.tape import Moment, Stage

RGB = 3


def cast_on_the_gpu(run: Run) -> None:
    """Full fine-tuning in fp32: the scripts load half-precision weights onto the GPU and cast them there, one by one.

    The holes the half copies leave stay behind (cogvideox-factory d81209b, training/cogvideox_text_to_video_sft.py:
    ``transformer.to(device, dtype=weight_dtype)``, then ``cast_training_params(dtype=float32)``).
    """
    strategy = run.strategy
    if run.job.method != "full" or strategy.weights_dtype != "fp32" or strategy.autocast == "none":
        return
    weights = set(run.named("weight").values())
    halves = {}
    for moment, events in run.load.stretches:
        casts = []
        for event in events:
            if event in weights:
                halves[event] = run.program.buffer(run.sizes[event] // 2, "weight", "half precision")
                run.sizes.append(run.sizes[event] // 2)
                casts += [event, ~halves[event]]
            else:
                casts.append(event)
        events[:] = casts
        assert moment.piece in ("load", "")
    run.load.stretches.insert(0, (run.load.stretches[0][0], list(halves.values())))


def loaded_on_the_cpu(run: Run) -> None:
    """The scripts call ``from_pretrained``, which makes the model in host RAM, then ``to(device)``."""
    run.loads_on_cpu = True


def cache_emptied(run: Run) -> None:
    """The scripts empty the allocator's cache once loading is over (``reset_memory``, ``free_memory``)."""
    run.empty_cache_after_load = True


def encoders_together(run: Run) -> None:
    """The scripts hold text encoders and VAE on the GPU together while they encode (CogVideo finetune/trainer.py
    ``prepare_dataset``, diffusers examples/cogvideo)."""
    run.encoders_together = True


def clip_as_loaded(run: Run) -> None:
    """Where the VAE encodes every batch, its pixels lie on the GPU in fp32 beside the copy that is encoded.

    They stay until the loop's variable takes the next batch, which is there already by then (accelerate data_loader.py
    ``DataLoaderShard.__iter__``; then in every example script ``batch["pixel_values"].to(dtype=...)``).
    """
    if run.encode is None or run.strategy.vae == "cached":
        return
    model, grid = run.facts.model, run.grid
    patch, vae = model.shape.patch, model.vae
    frames = (grid["F"] * patch[0] - 1) * vae.temporal + 1
    pixels = grid["H"] * patch[1] * grid["W"] * patch[2] * vae.spatial**2
    nbytes = 4 * RGB * grid["B"] * frames * pixels
    clip = run.add(run.encode, nbytes, "batch", "pixels as loaded", at=0)
    coming = run.add(run.optimizer_first, nbytes, "batch", "pixels of the next batch")
    run.left.append(clip)
    run.free(run.optimizer_first, [clip, coming])
    run.free(run.optimizer, [clip])


TERMS: tuple[Term, ...] = (cast_on_the_gpu, loaded_on_the_cpu, cache_emptied, encoders_together, clip_as_loaded)


def encoders_at_start(run: Run) -> None:
    """Text encoder and VAE are put on the GPU with the model even where latents and prompts come from disk, and go
    once all is ready (cogvideox-factory 3a519f5, training/cogvideox_text_to_video_sft.py: ``text_encoder.to``,
    ``vae.to``; ``if args.load_tensors: del vae, text_encoder``, then ``empty_cache``)."""
    first, gone = len(run.program.buffers), []
    loads: list[tuple[Moment, list[int]]] = []
    for component in encoders(run, "cached", 1):
        loading, _ = load(run.program, component)
        loads += loading.stretches
        gone += alive(loading)
    take_sizes(run, first)
    run.load.stretches[:0] = loads
    run.leaving = Stage("encoders leave", [(SERVICE._replace(passes="encoders leaving"), [~buffer for buffer in gone])])
    run.emptied_after.append(run.leaving)


OLDER: dict[str, tuple[Term, ...]] = {"2024-10": (encoders_at_start,)}
"""2024-10: cogvideox-factory while it published its tables of memory (d81209b to 3a519f5)."""
