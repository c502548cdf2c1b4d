"""Two-expert models (Wan 2.2 A14B): what is there of the expert that a step does not run.

Each expert is a checkpoint of the same architecture, for its side of one timestep. DiffSynth-Studio trains one per run
and loads no other (examples/wanvideo/model_training/lora/Wan2.2-T2V-A14B.sh); musubi-tuner can hold both, on the GPU or
in turn (docs/wan.md, ``--dit_high_noise``, ``--offload_inactive_dit``), and with block swap the same blocks of both
wait in host RAM (wan_train_network.py ``load_transformer`` at 30c658c: ``model_high_noise.enable_block_swap``). A
sample goes through one, then the other: diffusers' pipeline holds both, or brings each when its noise levels come
(pipeline_wan.py, ``model_cpu_offload_seq``).
"""

from __future__ import annotations

import itertools

from planner.catalog.noise_density import share_below
from planner.catalog.profiles import ModelProfile, Training
from planner.layout.run import Run
from planner.spec.job import Job
from planner.tape.program import Stage


def idle_weights(run: Run) -> tuple[int, int]:
    """Bytes of the other expert's weights: those that can wait in host RAM, and its adapter, which stays on the GPU.

    It is stored as the one that runs. Without training (one expert is trained, the other only there) it has no adapter.
    """
    trained = run.named("gradient")
    sizes = {name: run.sizes[buffer] for name, buffer in run.named("weight").items()}
    if run.job.method == "full":
        return sum(sizes.values()), 0
    adapter = sum(nbytes for name, nbytes in sizes.items() if name in trained)
    return sum(sizes.values()) - adapter, adapter if run.job.experts == "both" else 0


def idle_swapped(run: Run) -> int:
    """Bytes of the other expert's swapped blocks, which wait in host RAM like those of the one that runs."""
    if not run.strategy.swap_blocks or run.job.method == "full":
        return 0
    return sum(map(run.total_bytes, run.swapped_blocks.values()))


def experts(run: Run) -> None:
    """Adds the expert that does not run: its weights, and when both are trained its adapter and optimizer states.

    Gradients are freed in every step, and without accumulation a step runs one expert, so there is one expert's.
    """
    strategy, both = run.strategy, run.job.experts == "both"
    if run.facts.model.experts == 1 or strategy.inactive_expert == "absent":
        return
    weights, adapter = idle_weights(run)
    deepspeed = strategy.sharding.startswith("zero")
    if both and strategy.sharding == "zero-3":  # in the engine like the other, so this rank keeps its share
        world = run.machine.world
        weights, adapter = -(-weights // world), -(-adapter // world)
        if strategy.offload_params != "none":
            weights = adapter = 0
    if not waits_in_host_ram(run):
        there = weights - idle_swapped(run)
        run.add(run.load, there, "weight" if both else "residents", "other expert", at=0)
    if not both or run.samples_only:
        return
    run.add(run.load, adapter, "weight", "other expert's adapter", at=0)
    if strategy.offload_optimizer == "none" and not deepspeed:
        states = run.total_bytes(run.named("optimizer").values())
        run.add(run.optimizer_first, states, "optimizer", "other expert's states")


def waits_in_host_ram(run: Run) -> bool:
    """Whether the other expert is in host RAM: it was sent there, or group offload brings it in turn."""
    return run.strategy.inactive_expert == "cpu" or (run.samples_only and run.strategy.group_offload != "none")


def waiting_gradients(run: Run) -> None:
    """Micro-batches of both experts: the gradients of one wait while the other's are made, until one step over both.
    Our trainer gives all micro-batches of a step to one.

    With two of them the second may be the other expert's; from the third on, both experts' are there already. A foreach
    step takes its copies of all parameters at once, of both experts.
    """
    if run.job.experts != "both" or run.accumulate is None or run.trainer == "vplan":
        return
    gradients = run.named("gradient").values()
    made = {buffer: run.new(run.sizes[buffer], "gradient", "other expert's gradient") for buffer in gradients}
    if run.strategy.gradient_accumulation == 2:
        again = [(moment, [made.get(event, event) for event in events]) for moment, events in run.step.stretches]
        run.accumulate = Stage("step", again)
        run.free(run.accumulate, run.leftovers, at=0)
    else:
        run.place(run.accumulate, list(made.values()), "other expert's gradients", at=0)
    lent = _step_temporary_bytes(run) if run.strategy.optimizer_step == "foreach" else 0
    for stage in (run.optimizer_first, run.optimizer):
        copies = run.add(stage, lent, "temporary", "other expert's step", at=0)
        run.free(stage, [copies, *made.values()])


def _step_temporary_bytes(run: Run) -> int:
    """The most that an optimizer step takes and gives back."""
    own = {event for event in run.optimizer.ops if event >= 0}
    events = (event for event in run.optimizer.ops if event >= 0 or ~event in own)
    taken = itertools.accumulate(run.sizes[event] if event >= 0 else -run.sizes[~event] for event in events)
    return max(taken, default=0)


def host_bytes(run: Run) -> int:
    """Host RAM in bytes of the expert that waits there, or of those of its blocks that do."""
    if run.facts.model.experts == 1 or run.strategy.inactive_expert == "absent":
        return 0
    return idle_weights(run)[0] if waits_in_host_ram(run) else idle_swapped(run)


def high_share(training: Training) -> float:
    """How much of the density that noise levels are drawn from lies on the high-noise expert's side of the boundary:
    how many micro-batches are its turn."""
    assert training.boundary is not None and training.training_shift != "resolution"
    return 1 - share_below(training, training.boundary, training.training_shift)


def exchanged_bytes(run: Run) -> int:
    """What passes the link in a step, on average, because the expert that waited in host RAM is to run: what is frozen
    of both but swapped blocks, each time two draws after each other are not the same one's. Our trainer draws once in
    `expert_steps`, others for each micro-batch (musubi-tuner 30c658c, wan_train_network.py)."""
    model = run.facts.model
    if run.job.experts != "both" or run.samples_only or not waits_in_host_ram(run) or model.training.boundary is None:
        return 0
    high = high_share(model.training)
    swapped = sum(map(run.total_bytes, run.swapped_blocks.values()))
    moved = 2 * (idle_weights(run)[0] - swapped)
    draws = 1 / model.training.expert_steps if run.trainer == "vplan" else run.strategy.gradient_accumulation
    return round(2 * high * (1 - high) * draws * moved)


def expert_assumption(model: ModelProfile, job: Job) -> str | None:
    """The assumption to state when a job names no expert of a two-expert model; None for other models, or when it names
    one."""
    if model.experts == 1 or job.experts is not None:
        return None
    if job.method == "sample":
        return "one of the two experts at a time; the other is loaded for its noise levels and not counted"
    return "one of the two experts, high or low noise (one run each; --experts both for one run with both)"
