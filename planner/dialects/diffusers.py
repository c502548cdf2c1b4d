"""Training scripts around diffusers.

Its own examples, cogvideox-factory (later finetrainers) and CogVideo's finetune.
"""

from __future__ import annotations

from planner.run import Run, Term


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


def cache_emptied(run: Run) -> None:
    """The scripts empty the allocator's cache once loading is over (``reset_memory``, ``free_memory``)."""
    run.empty_cache_after_load = True


def encoders_together(run: Run) -> None:
    """The scripts hold text encoders and VAE on the GPU together while they encode (CogVideo finetune/trainer.py
    ``prepare_dataset``, diffusers examples/cogvideo)."""
    run.encoders_together = True


TERMS: tuple[Term, ...] = (cast_on_the_gpu, cache_emptied, encoders_together)
