"""Compares a tape on disk with a new recording: what differs, by how much the peak changes, and where first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from planner.catalog.components import Component, recorded_lengths
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid, job_for, latent_frames
from planner.errors import quoted
from planner.tape.format import Section, Tape
from planner.tape.program import Part, Program

NOT_COMPARED = ("versions",)
"""Keys of a tape that are ignored: another torch may record the same allocations."""


def first_difference(stored: Any, recorded: Any, where: str = "") -> str:
    """The first difference of two JSON trees, as ``tape.sizes[0] is 7, recorded 8``; "" if they are equal.

    ``where``: the path of both in the trees that they are parts of.
    """
    if isinstance(stored, dict) and isinstance(recorded, dict):
        for key in sorted(stored.keys() | recorded.keys()):
            inside = f"{where}.{key}" if where else key
            if key not in stored or key not in recorded:
                return f"{inside} is {'recorded now only' if key in recorded else 'not recorded any more'}"
            if difference := first_difference(stored[key], recorded[key], inside):
                return difference
        return ""
    if isinstance(stored, list) and isinstance(recorded, list):
        for index, (left, right) in enumerate(zip(stored, recorded, strict=False)):
            if difference := first_difference(left, right, f"{where}[{index}]"):
                return difference
        if len(stored) != len(recorded):
            return f"{where} has {len(stored)} entries, recorded {len(recorded)}"
        return ""
    return "" if stored == recorded else f"{where} is {quoted(stored)}, recorded {quoted(recorded)}"


def default_shape(profile: ModelProfile, regime: Mapping[str, int]) -> dict[str, int]:
    """The atoms of a model's default shape, with two samples; ``regime``: the atoms that the tape fixes."""
    return {**grid(profile, job_for(profile, {"model": profile.name})), "B": 2, **regime}


def default_part(profile: ModelProfile, component: Component) -> Part:
    """One prompt, or one clip of the model's default shape, for the tape of a text encoder or VAE."""
    for encoder in profile.text_encoders:
        if encoder.folder == component.name:
            return Part(component.name, {"B": 1, "T": encoder.max_tokens})
    job = job_for(profile, {"model": profile.name})
    frames = latent_frames(profile, job.frames) if profile.vae.takes_clips else 1
    short = "-".join(["", *component.variant.split("-")[2:]])
    sides = {"H": job.height // profile.vae.spatial, "W": job.width // profile.vae.spatial}
    return Part(component.name, {"F": recorded_lengths(profile).get(short, frames), **sides})


class Events(NamedTuple):
    """The events of all pieces of a tape at one shape, in order."""

    changes: list[int]
    """bytes that each event allocates; negative for frees"""
    made_by: list[tuple[str, str]]
    """category and operator of what each event allocates or frees"""

    @property
    def peak(self) -> int:
        """The highest number of bytes that are allocated at once."""
        level = peak = 0
        for change in self.changes:
            level += change
            peak = max(peak, level)
        return peak


class _MadeElsewhere(dict[str, int]):
    """Named buffers that this tape frees but another allocates: they have size 0 here."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __missing__(self, name: str) -> int:
        self[name] = self._program.buffer(0, "elsewhere", "")
        return self[name]


def events_of(tape: Tape, shape: Mapping[str, int] | Part) -> Events:
    """The events of a tape at a shape; ``shape`` is a Part for the tape of a text encoder or VAE."""
    program, part = Program(), shape if isinstance(shape, Part) else None
    if part is None:
        program.named |= {kind: _MadeElsewhere(program) for kind in ("weight", "gradient", "optimizer", "batch")}
    events = [event for piece in tape.pieces for event in program.unfold(tape, piece, None, part).ops]
    sizes = program.bytes_of({} if isinstance(shape, Part) else shape)
    changes = [sizes[event] if event >= 0 else -sizes[~event] for event in events]
    buffers = [event if event >= 0 else ~event for event in events]
    return Events(changes, [(program.category[buffer], program.op[buffer]) for buffer in buffers])


def what_differs(stored: Tape, recorded: Tape, shape: Mapping[str, int] | Part) -> str:
    """What differs between two tapes at a shape, and both peaks, as ``order, peak 123 bytes in both``.

    ``sizes``: the allocations have other bytes or another number. ``order``: the same allocations in another order.
    ``operators``: only the names of operators or categories differ. ``work``: what the operators compute differs.
    """
    old, new = events_of(stored, shape), events_of(recorded, shape)
    if old.changes != new.changes:
        what = "order" if _allocated(old) == _allocated(new) else _sizes(_allocated(old), _allocated(new))
    elif old.made_by != new.made_by or {*stored.operators} != {*recorded.operators}:
        what = "operators"
    elif list(_work(stored)) != list(_work(recorded)):
        what = "work"
    else:
        what = "how it is written"
    if old.peak == new.peak:
        return f"{what}, peak {old.peak:,} bytes in both"
    return f"{what}, peak {old.peak:,} bytes, recorded {new.peak:,} ({new.peak - old.peak:+,})"


def _allocated(events: Events) -> Counter[int]:
    return Counter(change for change in events.changes if change > 0)


def _sizes(old: Counter[int], new: Counter[int]) -> str:
    return f"sizes of {(old - new).total()} allocations, recorded of {(new - old).total()}"


def _work(tape: Tape) -> Iterator[object]:
    sections: list[Section] = [section for piece in tape.pieces.values() for section in piece]
    return (template.work for section in sections for template in section.templates)
