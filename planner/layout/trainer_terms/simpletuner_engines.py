"""SimpleTuner under DeepSpeed and FSDP2, read at bc8e6ab with accelerate 1.15, DeepSpeed 0.19.8 and torch 2.13."""

from __future__ import annotations

import re

from planner.layout.run import Run, Transform
from planner.layout.sharding.fsdp import REDUCING
from planner.layout.sharding.zero import FULL, trained_elements
from planner.layout.trainer_terms.shared import from_pretrained
from planner.tape.program import Stage

UNDECAYED = re.compile("bias|norm|embed|bn", re.IGNORECASE)
"""What of a parameter's name puts it into the group without weight decay: the modulation of FLUX.1 and SD 3 too, whose
layers are called norms (helpers/training/optimizer_param.py ``create_optimizer_params_with_decay``)."""


def undecayed_apart(run: Run) -> None:
    """DeepSpeed is given two groups of parameters, with weight decay and without (helpers/training/trainer.py
    ``init_optimizer``: ``use_parameter_groups=True``)."""
    if run.strategy.sharding.startswith("zero"):
        run.engine.second_group = UNDECAYED


REDUCED, ADDED = "reduced gradients", "new reduced gradients"


def shares_of_gradients_stay(run: Run) -> None:
    """FSDP2's shares of gradients are filled with zeros between steps and stay, so that from the second step on each
    group's new ones are added to them and freed (helpers/training/trainer.py
    ``zero_grad(set_to_none=config.set_grads_to_none)``; torch _fsdp_collectives.py ``foreach_reduce``)."""
    if run.strategy.sharding != "fsdp" or run.strategy.offload_params != "none":
        return
    freed = {~event for event in run.step.ops if event < 0}
    kept = [event for event in run.step.ops if event >= 0 and run.program.op[event] == REDUCED and event not in freed]
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, kept)
    added = {buffer: run.new(run.sizes[buffer], "gradient", ADDED, REDUCING) for buffer in kept}
    run.first_step = run.step
    run.step = Stage(
        "step",
        [
            (moment, [each for event in events for each in _added(event, added)])
            for moment, events in run.first_step.stretches
        ],
    )


def _added(event: int, added: dict[int, int]) -> tuple[int, ...]:
    return (added[event], ~added[event]) if event in added else (event,)


FSDP_WHOLE = "fsdp-whole"
"""The version of memory terms of FSDP2 whose weights come to each GPU from its own process: without
``fsdp_cpu_ram_efficient_loading``."""


def whole_weights_listed(run: Run) -> None:
    """What is trained stays whole on every GPU, in fp32, beside its shares: FSDP2 moves the parameters there before it
    replaces them, and the trainer's own list of them keeps them (helpers/training/trainer.py ``params_to_optimize``;
    torch _fully_shard.py ``_move_states_to_device``). Loaded by one rank they wait in host RAM instead."""
    if run.strategy.sharding != "fsdp":
        return
    trained = {run.parameters[name] for name in trained_elements(run)}
    for position, (moment, events) in enumerate(run.load.stretches):
        stays, whole = set(), -1
        for event in events:
            if event >= 0 and run.program.op[event] == "whole weight":
                whole = event
            elif event in trained:
                stays.add(~whole)
        run.load.stretches[position] = (moment, [event for event in events if event not in stays])


def loaded_on_the_cpu(run: Run) -> None:
    """Under FSDP each process has the whole model in host RAM, and what is trained in fp32, until its shares are on the
    GPU (helpers/training/trainer.py ``move_models``; accelerate ``fsdp2_prepare_model``). If one rank loads for all,
    the list of what is trained stays there."""
    if run.strategy.sharding != "fsdp":
        return
    if run.job.method == "full":
        run.host.loaded_bytes = FULL
    else:
        from_pretrained(run, "bf16")
    if not run.trainer.endswith(FSDP_WHOLE):
        run.host.extra_bytes += FULL * sum(trained_elements(run).values())


UNDER_ENGINES: tuple[Transform, ...] = (shares_of_gradients_stay, loaded_on_the_cpu)
