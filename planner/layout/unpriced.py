"""Raises what gets no estimate: combinations without a recording or memory term, and what a model does not take.

A search leaves these out; who types one is told.
"""

from __future__ import annotations

from planner.catalog.card_profiles import GpuProfile
from planner.catalog.shapes import grids
from planner.errors import NotEstimatedError, NotRecordedError
from planner.layout import attention_kernel, trainer_terms
from planner.layout.run import Facts, Run
from planner.layout.sharding import context_parallel
from planner.layout.trainer_terms.sd_scripts.whole_scores import whole_scores
from planner.spec.combinations.combination import first_refusal
from planner.spec.combinations.estimate_gaps import ESTIMATE_GAPS
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT


def refuse_unpriced(configuration: Configuration) -> None:
    """Raises a NotEstimatedError for what would be left out of the answer without a word."""
    if refusal := first_refusal(ESTIMATE_GAPS, configuration):
        raise NotEstimatedError(*refusal)


def refuse_trainers_of_cuda(gpu: GpuProfile, trainer: str) -> None:
    """Raises a NotEstimatedError for another trainer's run on MPS: what its code does otherwise there is not known."""
    if gpu.backend == "mps" and trainer != "vplan":
        fault = f"what {trainer.partition('@')[0]} does on {gpu.title} is not known"
        raise NotEstimatedError(fault, f"vplan suggest MODEL --gpu {gpu.name} prices a plain training loop there")


UNCAST = frozenset({"musubi-tuner", "sd-scripts"})
"""Trainers whose adapters read their layer's input as it is (``lx = self.lora_down(x)``: musubi-tuner networks/lora.py,
sd-scripts networks/lora_flux.py); peft's, ai-toolkit's and VideoX-Fun's cast it to their own format."""


def refuse_uncast_inputs(configuration: Configuration, trainer: str) -> None:
    """Raises a NotRecordedError for adapters in fp32 on inputs in 16 bits without autocast, which no product takes."""
    job, strategy = configuration.job, configuration.strategy
    differ = job.method == "lora" and strategy.adapter_dtype == "fp32" and strategy.weights_dtype != "fp32"
    if differ and not configuration.autocasts and strategy.sharding not in SPLIT and trainer in UNCAST:
        fault = f"{trainer}'s adapters in fp32 cannot read inputs in 16 bits without mixed precision"
        raise NotRecordedError(fault, "use --autocast bf16")


HOPPER = 9
"""Major compute capability of the cards that FlashAttention-3 is written for."""

FLASH_3 = frozenset({"simpletuner"})
"""Trainers whose settings name FlashAttention-3 (SimpleTuner bc8e6ab helpers/training/attention_backend.py
``_DIFFUSERS_BACKEND_TARGETS``)."""


def refuse_attention_of_others(run: Run) -> None:
    """Raises a NotEstimatedError for attention with whole scores, but of a trainer whose terms price them, and for
    FlashAttention-3, but of a trainer that has it, on the cards that it is written for."""
    attention, trainer = run.strategy.attention, run.trainer
    whole = attention == "math" and whole_scores not in trainer_terms.terms(trainer)
    third = attention == "flash-3" and (
        trainer.partition("@")[0] not in FLASH_3 or run.facts.gpu.capability[0] != HOPPER
    )
    if whole or third:
        raise NotEstimatedError(f"attention {attention} is not estimated yet", "use --attention sdpa")


def refuse_untaken(configuration: Configuration, facts: Facts) -> None:
    """Raises a NotEstimatedError for values that the model does not take, before laying the run out would find them."""
    strategy = configuration.strategy
    attention_kernel.kernel(strategy, configuration.machine, facts.gpu, facts.step.ops)
    for grid in grids(facts.model, configuration.job) if strategy.context_parallel > 1 else ():
        context_parallel.split_plan(facts.model, grid, strategy.context_parallel)
