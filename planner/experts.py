"""Two-expert models (Wan 2.2 A14B): what is there of the expert that a step does not run.

Each expert is a checkpoint of the same architecture, for its side of one timestep. DiffSynth-Studio trains one per run
and loads no other (examples/wanvideo/model_training/lora/Wan2.2-T2V-A14B.sh); musubi-tuner can hold both, on the GPU or
in turn (docs/wan.md, ``--dit_high_noise``, ``--offload_inactive_dit``).
"""

from __future__ import annotations

from planner.facts import ModelProfile
from planner.job import Job
from planner.run import Run


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


def experts(run: Run) -> None:
    """The other expert beside the one that runs: its weights, and when both are trained its adapter and states.

    Gradients are freed in every step, and a step runs one expert, so there is one expert's of them.
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
    if strategy.inactive_expert == "gpu":
        run.add(run.load, weights, "weight" if both else "residents", "other expert", at=0)
    if not both:
        return
    run.add(run.load, adapter, "weight", "other expert's adapter", at=0)
    if strategy.offload_optimizer == "none" and not deepspeed:
        states = sum(run.sizes[buffer] for buffer in run.named("optimizer").values())
        run.add(run.optimizer_first, states, "optimizer", "other expert's states")


def host_bytes(run: Run) -> int:
    """Host RAM of the expert that waits there."""
    if run.facts.model.experts == 1 or run.strategy.inactive_expert != "cpu":
        return 0
    return idle_weights(run)[0]


def assumption(model: ModelProfile, job: Job) -> str | None:
    """What a question that names no expert is taken to ask; None for other models and when it does."""
    if model.experts == 1 or job.experts is not None:
        return None
    return "one of the two experts, high or low noise (a run each; --experts both for one run of both)"
