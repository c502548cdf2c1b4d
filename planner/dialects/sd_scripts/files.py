"""The files that a plan is exported to for sd-scripts: the dataset's TOML and one shell script, read at 48d368f."""

from __future__ import annotations

from typing import NamedTuple

from planner.dialects.base.bindings import Settings
from planner.dialects.base.commands import command_line, command_settings, script_head
from planner.spec.plan import Plan


class ModelFlags(NamedTuple):
    """What a model's scripts want beside the plan, by their documentation."""

    output: str
    """the name of what is saved"""
    always: dict[str, object]
    """flags and their values: files of the model, how noise is drawn, the attention's kernel"""
    adapters: dict[str, object]
    """those of a LoRA: the module of its layers"""


def files(plan: Plan, settings: Settings, flags: ModelFlags) -> dict[str, str]:
    """name -> text of the dataset's TOML and of one shell script, which is to be started. What ``settings`` has of the
    flags is written as it is there."""
    import tomli_w

    job = plan.job
    data = {
        "general": {"resolution": [job.width, job.height], "caption_extension": ".txt"},
        "datasets": [{"batch_size": job.batch_size, "subsets": [{"image_dir": "data/my_set", "num_repeats": 1}]}],
    }
    launcher = ["accelerate", "launch", "--num_cpu_threads_per_process 1", f"--num_processes {plan.machine.world}"]
    if plan.machine.nodes > 1:
        launcher.append(f"--num_machines {plan.machine.nodes}")
    rate = "1e-5" if job.method == "full" else "1e-4"
    extra: dict[str, object] = {
        "--dataset_config": "dataset.toml",
        "--output_dir": "out",
        "--output_name": flags.output,
        "--save_model_as": "safetensors",
        "--learning_rate": "1.0" if plan.strategy.optimizer == "prodigy" else rate,
        **flags.always,
        **(flags.adapters if job.method == "lora" else {}),
    }
    unsaid = {name: value for name, value in extra.items() if name not in settings}
    return {
        "dataset.toml": tomli_w.dumps(data),
        "train.sh": script_head(plan) + command_line(command_settings(settings), unsaid, launcher),
    }
