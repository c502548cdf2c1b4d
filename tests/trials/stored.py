"""Trials of what is stored: a user's own tapes and ledger, folders of clips, and the files of other trainers."""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy
from PIL import Image

import profiles
from planner.catalog import lookup
from planner.tape.packed_json import pack
from planner.tape.packs import read_recording

HOME = "home"
"""In a trial's folder: the user's own models, tapes and ledger (`VPLAN_HOME`)."""
MODEL, OWN = "wan2.1-t2v-1.3b", "own"
TAPES = ("step-lora-half-fp32-autocast-full-one", "step-lora-half-fp32-autocast-full-many",
         "optimizer-lora-fp32-adamw-foreach")  # fmt: skip
"""What an estimate of a checkpointed LoRA reads."""
ESTIMATE = ("estimate", "--model", OWN, "--gpu", "24GB", "--gradient-checkpointing", "full")
FOREIGN = Path(__file__).parents[1] / "golden" / "inputs"
VALUES = (
    None, True, -1, 0, 1, 2**31, 2**64, 10**400, 1e308, float("inf"), float("nan"), 0.5, "", "x", "y" * 5000, "\x1b[2J",
    "../../../etc/passwd", [], {}, [[]], [None], {"": None}, [0] * 10_000, ["a"] * 3, {"a": {"a": {"a": {}}}},
    "__import__('os').system('touch canary')",
)  # fmt: skip
"""What stands in a place that is meant for something else."""
Trial = tuple[list[str], dict[str, bytes]]


def changed_value(data: Any, draw: random.Random) -> Any:
    """JSON with one value, at any depth, gone, doubled, or replaced by one of another type or size."""
    if not isinstance(data, dict | list) or not data or draw.random() < 0.1:
        return draw.choice(VALUES)
    copy: Any = dict(data) if isinstance(data, dict) else list(data)
    at = draw.choice(list(copy)) if isinstance(copy, dict) else draw.randrange(len(copy))
    kind = draw.random()
    if kind < 0.1:
        del copy[at]
    elif kind < 0.15 and isinstance(copy, list):
        copy[at:at] = [copy[at]] * draw.choice((1, 1000))
    elif kind < 0.2 and isinstance(copy, dict):
        copy[str(draw.choice(VALUES))[:100]] = copy[at]
    else:
        copy[at] = changed_value(copy[at], draw)
    return copy


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes of which a few are others, or that are cut short, doubled or swapped."""
    for _ in range(draw.choice((1, 1, 3, 10))):
        at, kind = draw.randrange(len(data) + 1), draw.randrange(4)
        if kind == 0:
            data = data[:at] + bytes(draw.randrange(256) for _ in range(draw.choice((1, 2, 8)))) + data[at + 1 :]
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + data[at : at + 64] * draw.choice((2, 1000)) + data[at:]
        else:
            data = data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :]
    return data


@functools.cache
def _own_model() -> dict[str, bytes]:
    """A model of the user's own, as `vplan record` leaves it: a published one by another name."""
    said = lookup.model(MODEL).to_json() | {"name": OWN, "aliases": []}
    profile = {key: value for key, value in said.items() if value is not None}
    found = {f"{HOME}/models/{OWN}.json": json.dumps(profile).encode()}
    for name in TAPES:
        tape = read_recording(profiles.TAPES / MODEL / f"{name}.json.gz")
        found[f"{HOME}/tapes/{OWN}/{name}.json.gz"] = pack(tape | {"model": OWN})
    return found


def tapes(draw: random.Random) -> Trial:
    """An own model of which one tape, or the profile, is changed: a value of its JSON, its text, or the packed file."""
    contents = dict(_own_model())
    name = draw.choice(list(contents))
    text = gzip.decompress(contents[name]) if name.endswith(".gz") else contents[name]
    kind = draw.random()
    if kind < 0.7:
        data = json.loads(text)
        for _ in range(draw.choice((1, 1, 2, 4))):
            data = changed_value(data, draw)
        text = json.dumps(data).encode()
    elif kind < 0.85:
        text = changed_bytes(text, draw)
    packed = gzip.compress(text, 1, mtime=0) if name.endswith(".gz") else text
    contents[name] = changed_bytes(packed, draw) if kind >= 0.85 else packed
    if draw.random() < 0.02 and name.endswith(".gz"):  # small, and large when it is unpacked
        contents[name] = _zeros()
    words = draw.choice((ESTIMATE, (*ESTIMATE, "--frames", "33"), ("suggest", OWN, "24GB"), ("models", OWN)))
    return list(words), contents


@functools.cache
def _zeros() -> bytes:
    stream = zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS)
    return b"".join(stream.compress(bytes(1 << 20)) for _ in range(1 << 10)) + stream.flush()


def ledgers(row: dict[str, Any]) -> Callable[[random.Random], Trial]:
    """The user's own ledger, of which some rows have a value of another kind, or the file is damaged."""

    def draw_one(draw: random.Random) -> Trial:
        lines = []
        for _ in range(draw.choice((1, 3, 60))):
            data: Any = row
            for _ in range(draw.choice((0, 1, 1, 3))):
                data = changed_value(data, draw)
            lines.append(json.dumps(data).encode())
        content = b"\n".join(lines) + b"\n"
        if draw.random() < 0.3:
            content = changed_bytes(content, draw)
        shape = ("--frames", "5", "--height", "64", "--width", "64", "--gradient-checkpointing", "full")
        words = draw.choice((
            ("estimate", "--model", MODEL, "--gpu", "rtx4090", *shape), ("accuracy", f"{HOME}/ledger.jsonl", "--json"),
            ("estimate", "--model", MODEL, "--gpu", "rtx4090", *shape, "--json"),
        ))  # fmt: skip
        return list(words), {f"{HOME}/ledger.jsonl": content}

    return draw_one


@functools.cache
def _media() -> dict[str, bytes]:
    """A short clip in three containers, and an image in three formats."""
    found = {}
    noise = numpy.random.default_rng(0).integers(0, 255, (6, 64, 96, 3), dtype=numpy.uint8)
    for suffix, codec in (("mp4", "mpeg4"), ("mkv", "mpeg4"), ("avi", "mpeg4")):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="matroska" if suffix == "mkv" else suffix) as container:
            stream = container.add_stream(codec, rate=16, width=96, height=64, pix_fmt="yuv420p")
            for picture in noise:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        found[f"clips/v.{suffix}"] = buffer.getvalue()
    for suffix in ("png", "jpeg", "webp"):
        buffer = io.BytesIO()
        Image.fromarray(noise[0]).save(buffer, suffix)
        found[f"clips/i.{suffix}"] = buffer.getvalue()
    return found


SOURCES = """[[source]]
folder = "clips"
repeats = 2
frames = "even"
captions = "auto"
fps = 16
trigger = "sks"
resolutions = ["480x832"]
flip = true
"""


def datasets(plan: str, changed: Callable[[str, random.Random], bytes]) -> Callable[[random.Random], Trial]:
    """A folder of clips and images with captions in a table or beside each, and one of its files changed."""

    def draw_one(draw: random.Random) -> Trial:
        media = _media()
        names = [name.removeprefix("clips/") for name in media]
        table = draw.choice(("txt", "metadata.jsonl", "metadata.csv"))
        if table == "txt":
            texts = {f"clips/{name.split('.')[0]}.txt": "a cat" for name in names}
        elif table.endswith("jsonl"):
            texts = {f"clips/{table}": "".join(json.dumps({"file_name": n, "text": "a cat"}) + "\n" for n in names)}
        else:
            texts = {f"clips/{table}": "file_name,text\n" + "".join(f'{name},"a, cat"\n' for name in names)}
        contents = media | {name: text.encode() for name, text in texts.items()}
        contents |= {"dataset.toml": SOURCES.encode(), "plan.toml": plan.encode()}
        name = draw.choice([*contents][:-1])
        is_text = name in texts or name == "dataset.toml"
        contents[name] = changed(contents[name].decode(), draw) if is_text else changed_bytes(contents[name], draw)
        data = ("--data", draw.choice(("clips", "dataset.toml", "dataset.toml")))
        suggest = ("suggest", MODEL, "24GB", *data, "--epochs", "2", "--gradient-checkpointing", "full")
        return list(draw.choice((("preflight", "plan.toml", *data), suggest))), contents

    return draw_one


def foreign_files(draw: random.Random) -> Trial:
    """A file as another trainer's users have them, changed: scripts, configs, pipelines, messages of lost runs."""
    paths = [path for path in sorted(FOREIGN.iterdir()) if path.suffix in (".sh", ".py", ".log", ".toml", ".yaml")]
    path = draw.choice(paths)
    data = changed_bytes(path.read_bytes(), draw)
    if draw.random() < 0.1:
        cell = {"cell_type": "code", "source": [f"!{path.read_text(encoding='utf-8')}"], "outputs": []}
        notebook = changed_value({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, draw)
        return ["check", "x.ipynb", "--gpu", "24GB"], {"x.ipynb": json.dumps(notebook).encode()}
    given = ("--error",) if path.suffix == ".log" else ()
    return ["check", *given, path.name, "--gpu", "24GB"], {path.name: data}
