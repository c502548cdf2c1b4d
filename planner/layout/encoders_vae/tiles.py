"""A component that runs several times: over the tiles of a frame, the samples of a batch, or stretches of a clip.

Each run frees everything but its result. Where the result lies decides which holes the next run finds, so every run is
laid out, not only the largest.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.layout.encoders_vae.component_pass import ComponentPass
from planner.layout.run import STRATEGY_MOMENT
from planner.tape.program import Moment, Program, Stage, renamed_events


class FinishedRuns(NamedTuple):
    """Bytes of the results that a component's runs leave. The last run at full size is the one laid out in full."""

    passes: list[int]
    """results of earlier passes: samples, or stretches of a clip"""

    before: list[int]
    """results of the tiles of this pass that ran before it"""

    after: list[int]
    """results of the smaller tiles that follow"""

    joined: int
    """all tiles of a pass, joined"""

    @classmethod
    def of(cls, component: ComponentPass, nbytes: int) -> FinishedRuns:
        """``nbytes``: the result of a run at full size."""
        areas = [rows * columns for rows, columns in component.tiles]
        largest = max(areas)
        joined = nbytes * component.area // largest
        given = [nbytes * area // largest for area in areas]
        last = len(given) - 1 - areas[::-1].index(largest)
        return cls([joined] * (component.passes - 1), given[:last], given[last + 1 :], joined)


class _TileRun(NamedTuple):
    """One run over a tile."""

    stretches: list[tuple[Moment, list[int]]]
    result: int
    """the buffer of what it gives"""
    at: list[int]
    """the stretches that have it; a clip in many tiles has thousands of others, which all runs share"""

    @classmethod
    def of(cls, stage: Stage, result: int) -> _TileRun:
        events = [events for _, events in stage.stretches]
        at = [place for place, here in enumerate(events) if result in here or ~result in here]
        return cls(list(stage.stretches), result, at)

    def giving(self, result: int) -> list[tuple[Moment, list[int]]]:
        """The same run with another result."""
        stretches = self.stretches.copy()
        for place in self.at:
            moment, events = stretches[place]
            stretches[place] = moment, renamed_events(events, {self.result: result})
        return stretches


class _TileRuns:
    """What a component's runs over its tiles allocate and free: where a run's result lies decides what holes the next
    one finds."""

    def __init__(self, program: Program, component: ComponentPass, stage: Stage) -> None:
        """``stage``: of the largest tile, whose result is the program's `out`."""
        self._program = program
        self._component = component
        self._largest = max(component.tiles)
        self._is_plain = component.offload == "none" and not component.is_quantised
        self._runs = {self._largest: _TileRun.of(stage, self._out)}

    @property
    def _out(self) -> int:
        return self._program.named[f"batch of {self._component.part.name}"]["out"]

    def of(self, tile: tuple[int, int], result: int) -> list[tuple[Moment, list[int]]]:
        """The stretches of one run, whose result is the buffer `result`. Of a component whose weights come and go the
        smaller runs have only their result."""
        if tile not in self._runs and not self._is_plain:
            return [(STRATEGY_MOMENT, [result])]
        if tile not in self._runs:
            self._runs[tile] = self._unfolded(tile)
        return self._runs[tile].giving(result)

    def _unfolded(self, tile: tuple[int, int]) -> _TileRun:
        program, component = self._program, self._component
        assert component.tape is not None
        named = {kind: buffers.copy() for kind, buffers in program.named.items()}
        grid = {**component.part.grid, "H": tile[0], "W": tile[1]}
        stage = program.unfold(component.tape, component.piece, component.counts, component.part._replace(grid=grid))
        run = _TileRun.of(stage, self._out)
        program.named.update(named)  # the largest tile's again
        return run


def repeat_over_tiles(program: Program, component: ComponentPass, stage: Stage) -> None:
    """Runs it tile by tile while what earlier passes gave is kept; then the tiles are joined, by rows and as a whole
    (diffusers ``tiled_encode``, ``tiled_decode``), and the passes."""

    def buffers(sizes: list[int], name: str) -> list[int]:
        return [program.buffer(nbytes, "activation", name) for nbytes in sizes]

    out = program.named[f"batch of {component.part.name}"]["out"]
    finished = FinishedRuns.of(component, program.plain_bytes(out))
    passes, before = buffers(finished.passes, "finished samples"), buffers(finished.before, "finished tiles")
    runs = _TileRuns(program, component, stage)
    stage.stretches = [(STRATEGY_MOMENT, passes)]
    for tile, buffer in zip(component.tiles, before, strict=False):
        stage.stretches += runs.of(tile, buffer)
    stage.stretches += runs.of(component.tiles[len(before)], out)
    events, given = [], out
    if len(component.tiles) > 1:
        after = buffers(finished.after, "finished tiles")
        rows = program.buffer(finished.joined, "activation", "joined rows")
        given = program.buffer(finished.joined, "batch", "out")
        for tile, buffer in zip(component.tiles[len(before) + 1 :], after, strict=True):
            stage.stretches += runs.of(tile, buffer)
        events = [rows, given, *(~buffer for buffer in (*before, out, *after, rows))]
    if passes:
        joined = program.buffer(finished.joined * component.passes, "batch", "out")
        events += [joined, *(~buffer for buffer in (*passes, given))]
    stage.stretches.append((STRATEGY_MOMENT, events))
