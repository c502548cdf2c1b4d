"""A job that only samples: what comes behind the denoising, and what of the model is where."""

from __future__ import annotations

from planner.layout.encoders_vae.component_pass import decoder
from planner.layout.group_offload import offload_model_groups
from planner.layout.phases import batch_samples, decode_with, take_sizes, weights_on_gpu
from planner.layout.run import STRATEGY_MOMENT, Run
from planner.tape.program import Stage, frees


def sampling(run: Run) -> None:
    """What comes behind the denoising where a job only samples: the VAE decodes the batch.

    A VAE that was not there (``cached``) comes to the model's side; one that is ``swapped`` takes its place, and what
    the model leaves goes back to the driver (accelerate ``CpuOffload``, diffusers ``enable_model_cpu_offload``).
    """
    if not run.samples_only:
        return
    if run.strategy.group_offload != "none":
        run.drop(run.load, run.named("weight").values())
        offload_model_groups(run, run.step)
    first = len(run.program.buffers)
    decode = decode_with(run, decoder(run, run.grid, batch_samples(run)))
    run.phases.validation = (("decode", decode),)
    if run.strategy.vae == "swapped" and (moved := weights_on_gpu(run)):
        leaving = Stage("denoise", [(STRATEGY_MOMENT, frees(moved))])
        run.phases.validation = (("denoise", leaving), *run.phases.validation)
        run.phases.reload = Stage("load", [(STRATEGY_MOMENT, moved)])
        run.empty_cache.after = (*run.empty_cache.after, leaving)
    take_sizes(run, first)
