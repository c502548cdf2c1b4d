"""What trials are made of: command lines from click's own grammar, and files that are nearly right."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path

import click

from planner.commands import cli
from tests.trials import stored

CANARY = "canary"
"""A file that no input may create: whatever would run as code creates it."""
CODE = (
    f"$(touch {CANARY})", f"`touch {CANARY}`", f"; touch {CANARY} #",
    f"!!python/object/apply:os.system ['touch {CANARY}']",
    f"__import__('os').system('touch {CANARY}')", "{{ ''.__class__ }}", f"cos\nsystem\n(S'touch {CANARY}'\ntR.",
)  # fmt: skip
WORDS = (
    "", " ", "-", "--", "-1", "0", "1", "81", "1e400", "nan", "inf", "-inf", "9" * 5000, "0x" + "f" * 2000, "x" * 5000,
    "a" * 300 + "/" * 300, "\x1b]0;owned\x07", "\u202e\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    "[/red]", "../../etc/passwd", "/dev/zero", "/dev/null", ".", "/", "~", "%s%n", "null", "true", "{}", "[]", "24GB",
    "4x4090", "0xh100", "999999xh100", "480x832", "480x832x81x1", "wan2.1-t2v-1.3b", "flux.1-dev", "lora", "full",
    "bf16", "zero-3", "plan.toml", "rows.jsonl", "config.yaml", "train.sh", "h\u0131\u00df\u01c5", "1,2,3",
    "1 2", *CODE,
)  # fmt: skip
VERBS = ("check", "estimate", "suggest", "export", "preflight", "accuracy", "models", "gpus", "report", "watch")
"""Verbs that start nothing and need no GPU. `watch` refuses what is no run."""

PLAN = """schema = 1
[job]
model = "wan2.1-t2v-1.3b"
method = "lora"
frames = 17
height = 480
width = 832
lora_rank = 16
[strategy]
gradient_checkpointing = "full"
optimizer = "adamw"
swap_blocks = 2
[machine]
gpu = "24GB"
gpus = 2
host_ram = "64GiB"
"""
SCRIPT = """#!/bin/bash
export MODEL="black-forest-labs/FLUX.1-dev"
ARGS=(--resolution 512 --train_batch_size 1)
accelerate launch --num_processes 2 train_dreambooth_lora_flux.py --mixed_precision bf16 \\
  --pretrained_model_name_or_path $MODEL "${ARGS[@]}" --rank=16 --gradient_checkpointing
"""
CONFIG = """job: extension
config:
  process:
    - type: sd_trainer
      network: {type: lora, linear: 32}
      datasets: [{folder_path: x, resolution: [1024], num_frames: 1, batch_size: 4, cache_latents: true}]
      train: &t {dtype: bf16, optimizer: adamw8bit, cache_text_embeddings: true, gradient_accumulation: 1}
      model: {name_or_path: "black-forest-labs/FLUX.1-dev", arch: flux, quantize: true}
      sample: {<<: *t, width: 1024, height: 1024, num_frames: 1}
"""
GRID = """schema = 1
[[jobs]]
model = "wan2.1-t2v-1.3b"
frames = 17
height = 480
width = 832
plans = [{}, {gradient_checkpointing = "full"}, {optimizer = "adamw-8bit", swap_blocks = 3}]
"""
ROW = {
    "schema": 1, "id": "a", "job": {"model": "wan2.1-t2v-1.3b", "frames": 5, "height": 64, "width": 64},
    "strategy": {"gradient_checkpointing": "full"}, "machine": {"gpu": "rtx4090"},
    "measured": {"outcome": "ok", "allocated_bytes": 10**9, "reserved_bytes": 2 * 10**9}, "implementation": "vplan",
    "env": {"gpu": "NVIDIA GeForce RTX 4090", "driver": "580.1", "torch": "2.13.0", "diffusers": "0.42.1",
            "attention_kernel": "flash", "command": "vplan probe", "time": "2026-11-21T12:00:00+00:00"},
}  # fmt: skip
GPU = ("--gpu", "24GB")
Trial = tuple[list[str], dict[str, bytes]]
"""Words of a command line, and the files of its folder."""


def changed(text: str, draw: random.Random) -> bytes:
    """A text with a few of its tokens, lines or bytes changed."""
    data = text.encode("utf-8", "surrogatepass")
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, kind = draw.randrange(len(data) + 1), draw.randrange(6)
        until = min(len(data), at + draw.choice((1, 3, 20)))
        word = draw.choice(WORDS).encode("utf-8", "surrogatepass")
        if kind == 0:
            data = data[:at] + word + data[at:]
        elif kind == 1:
            data = data[:at] + word + data[until:]
        elif kind == 2:
            data = data[:at] + data[until:]
        elif kind == 3:
            data = data[:at] + data[at:until] * draw.choice((2, 50, 3000)) + data[until:]
        elif kind == 4:
            data = data[:at] + bytes(draw.randrange(256) for _ in range(draw.choice((1, 4)))) + data[until:]
        else:
            data = b"\n".join(draw.sample(lines := data.split(b"\n"), len(lines)))
    return data


def command_line(draw: random.Random) -> Trial:
    """A verb with some of its own options and arguments, and values of which some are meant for others."""
    verb = draw.choice(VERBS)
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    words = [verb]
    for parameter in draw.sample(command.params, draw.randint(0, min(6, len(command.params)))):
        value = str(draw.choice(getattr(parameter.type, "choices", None) or WORDS))
        if isinstance(parameter, click.Argument):
            words.append(value)
        elif parameter.opts[0] not in ("-o", "--output", "--report"):  # files are `files`' trials
            words += [draw.choice([*parameter.opts, *parameter.secondary_opts])]
            words += [] if getattr(parameter, "is_flag", False) and draw.random() < 0.9 else [value]
    if verb == "accuracy":  # its own rows take a minute, whatever was typed
        words.append("rows.jsonl")
    if draw.random() < 0.3:
        words.insert(draw.randint(1, len(words)), draw.choice(WORDS))
    return [word.replace("\0", "") for word in words], files(draw)


def files(draw: random.Random) -> dict[str, bytes]:
    """A folder with one of each, as they should be."""
    texts = {"plan.toml": PLAN, "train.sh": SCRIPT, "config.yaml": CONFIG, "grid.toml": GRID}
    return {name: text.encode() for name, text in texts.items()} | {"rows.jsonl": json.dumps(ROW).encode()}


def _file(name: str, text: str, *commands: tuple[str, ...]) -> Callable[[random.Random], Trial]:
    def draw_one(draw: random.Random) -> Trial:
        return list(draw.choice(commands)), files(draw) | {name: changed(text, draw)}

    return draw_one


def garbage(draw: random.Random) -> Trial:
    """A file of random bytes, or of printable ones, by any name that is read."""
    letters = draw.choice((bytes(range(256)), string.printable.encode(), b"[]{}\"':,=\n-&*<! \\$(`a1."))
    data = bytes(draw.choice(letters) for _ in range(draw.choice((0, 1, 30, 3000))))
    name = draw.choice(("x.sh", "x.toml", "x.yaml", "x.json", "x.py", "x.txt"))
    return ["check", name, *GPU], {name: data}


KINDS: dict[str, Callable[[random.Random], Trial]] = {
    "command lines": command_line,
    "shell scripts": _file("train.sh", SCRIPT, ("check", "train.sh", *GPU), ("check", "train.sh", *GPU, "--json")),
    "configs": _file("config.yaml", CONFIG, ("check", "config.yaml", *GPU),
                     ("check", "config.yaml", "--gpu", "4xh100")),
    "plans": _file("plan.toml", PLAN, ("preflight", "plan.toml"), ("preflight", "plan.toml", "--json"),
                   ("export", "plan.toml", "--to", "diffusers", "-o", "out"),
                   ("export", "plan.toml", "--to", "slurm", "-o", "out")),
    "tables of rows": _file("rows.jsonl", "\n".join([json.dumps(ROW)] * 3) + "\n",
                            ("accuracy", "rows.jsonl", "--json")),
    "grids": _file("grid.toml", GRID, ("calibrate", "--grid", "grid.toml", "-o", "out.jsonl", "--dry-run",
                                       "--runner", "simulate", "--gpu", "h100")),
    "garbage": garbage,
    "foreign files": stored.foreign_files,
    "tapes": stored.tapes,
    "own ledgers": stored.ledgers(ROW),
    "datasets": stored.datasets(PLAN, changed),
}  # fmt: skip


def write(folder: Path, contents: dict[str, bytes]) -> None:
    """Puts the files into an empty folder."""
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
