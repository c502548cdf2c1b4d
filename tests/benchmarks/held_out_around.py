"""How far tapes of VAEs and text encoders are from direct recordings at a shape no tape was made from.

    python -m tests.benchmarks.held_out_around [MODEL ...] [--only TEXT]

Prints one line per shipped tape: allocated peaks from the tape and recorded directly at full depth, and whether every
allocation and every level is the same. Ends with exit code 1 when one is not. Needs vplan[train]; a minute per VAE.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import NamedTuple

import profiles
from planner.catalog import lookup
from planner.catalog.components import COMPONENTS, Component, components, frames_of, recorded_lengths
from planner.catalog.profiles import ModelProfile, Vae
from planner.tape.codec import read_tape
from planner.tape.format import Tape
from planner.tape.packs import is_stored
from planner.tape.program import Part, Program
from trainers.recording.components import record_vae
from trainers.recording.encoders import record_text_encoder
from trainers.recording.recorder import RawRecording

GIB = 2**30
PROMPTS = 3
SIDES = (27, 41)
"""Rows and columns in latents: of no recording. Odd, so that rows of masks are padded, as they are at 480x848."""


class Held(NamedTuple):
    """The allocations of an encode or decode: loaded bytes, each size in order, and the level behind each event."""

    loaded: int
    sizes: list[int]
    levels: list[int]

    @property
    def peak(self) -> int:
        return self.loaded + max(self.levels)


def held(loads: list[int], events: list[int], sizes: list[int]) -> Held:
    """Of the events of loading and of the work, with the sizes of all buffers."""
    loaded = sum(sizes[event] if event >= 0 else -sizes[~event] for event in loads)
    steps = itertools.accumulate(sizes[event] if event >= 0 else -sizes[~event] for event in events)
    made = [level for event, level in zip(events, steps, strict=True) if event >= 0]
    return Held(loaded, [sizes[event] for event in events if event >= 0], made)


def from_tape(tape: Tape, piece: str, part: Part, counts: tuple[int, ...] | None) -> Held:
    """What a tape says."""
    program = Program()
    stages = [program.unfold(tape, name, counts, part) for name in ("load", piece)]
    return held(stages[0].ops, stages[1].ops, program.bytes_of({}))


def directly(trace: RawRecording) -> Held:
    """What a recording at the shape itself says."""
    bounds = [start for _, start in trace.pieces]
    loads, work = (trace.events[start:stop] for start, stop in itertools.pairwise(bounds))
    return held(loads, work, [alloc.nbytes for alloc in trace.allocations])


def compared(profile: ModelProfile, component: Component) -> tuple[Held, Held]:
    """(from the shipped tape, directly) of one component."""
    tape = read_tape(profiles.TAPES / COMPONENTS / component.name / f"{component.variant}.json.gz")
    piece, dtype, *short = component.variant.split("-", 2)
    for encoder in profile.text_encoders:
        if encoder.folder == component.name:
            part = Part(component.name, {"B": PROMPTS, "T": encoder.max_tokens})
            trace = record_text_encoder(encoder, dtype, PROMPTS, encoder.max_tokens)
            return from_tape(tape, piece, part, None), directly(trace)
    frames, chunks = (recorded_lengths(profile)[f"-{short[0]}"], 0) if short else clip(profile.vae)
    grid = {"F": frames, "H": SIDES[0], "W": SIDES[1]}
    trace = record_vae(profile.vae, piece, dtype, grid, chunks)
    return from_tape(tape, piece, Part(component.name, grid), (chunks,) if chunks else None), directly(trace)


def clip(vae: Vae) -> tuple[int, int]:
    """(latent frames, chunks) of a clip no tape was made from."""
    if not vae.takes_frames:
        return 1, 0
    if vae.traits.chunks:
        chunks = vae.traits.fewest_chunks + 1
        return frames_of(vae, chunks), chunks
    return (vae.traits.frame_tiles[0] if vae.traits.frame_tiles else 10), 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.held_out_around")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--only", default="", help="a text in the component's name or variant")
    asked = parser.parse_args()
    wrong = 0
    done: set[Component] = set()
    for name in asked.models or lookup.model_names():
        profile = lookup.model(name)
        for component in components(profile):
            known = is_stored(profiles.TAPES / COMPONENTS / component.name / f"{component.variant}.json.gz")
            if not known or component in done or asked.only not in f"{component.name}/{component.variant}":
                continue
            done.add(component)
            start = time.perf_counter()
            ours, theirs = compared(profile, component)
            wrong += ours != theirs
            verdict = "exact" if ours == theirs else f"DIFFERS: {difference(ours, theirs)}"
            peaks = f"{ours.peak / GIB:9.3f} {theirs.peak / GIB:9.3f}"
            label = f"{component.name}/{component.variant}"
            print(f"{label:62} {peaks} {time.perf_counter() - start:5.0f} s  {verdict}", flush=True)
    return int(wrong > 0)


def difference(ours: Held, theirs: Held) -> str:
    """Where two begin to differ."""
    if ours.loaded != theirs.loaded:
        return f"loaded {ours.loaded} against {theirs.loaded} bytes"
    for what in ("sizes", "levels"):
        pairs = itertools.zip_longest(getattr(ours, what), getattr(theirs, what))
        for index, (one, other) in enumerate(pairs):
            if one != other:
                return f"{what} {index}: {one} against {other}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
