"""What encoding before training takes: components loaded, run and freed, on an allocator of their own."""

from __future__ import annotations

from typing import NamedTuple

from planner.allocator import implementation
from planner.garbage_collection import recording_cache
from planner.layout.cublas import ProductBuffers, add_to_products
from planner.layout.encoders_vae.component_layout import alive_after, load_component, run_component, waiting_bytes
from planner.layout.encoders_vae.component_pass import ComponentPass
from planner.layout.encoders_vae.tiles import FinishedRuns
from planner.layout.run import STRATEGY_MOMENT
from planner.tape.levels import Level, PartLevels, whole_blocks
from planner.tape.program import Program, Stage, frees


class EncodingLayout(NamedTuple):
    """Some components loaded, run and freed again, on an allocator of their own."""

    program: Program
    stage: Stage
    sizes: list[int]
    """by buffer, bytes"""


@recording_cache(maxsize=32)
def lay_out_encoding(components: tuple[ComponentPass, ...], workspace_bytes: int, workspaces: int) -> EncodingLayout:
    """Loads some components, encodes with them and frees them again, beside cuBLAS's workspaces of ``workspace_bytes``
    each. ``workspaces``: how many of them stay; 0 where each product has its own."""
    program = Program()
    beside = [program.buffer(workspace_bytes, "workspace", "cublas") for _ in range(workspaces)]
    stage = Stage("encode", [(STRATEGY_MOMENT, beside)])
    loaded = [load_component(program, component) for component in components]
    for loading, _ in loaded:
        stage.stretches += loading.stretches
    for component, (_, blocks) in zip(components, loaded, strict=True):
        done = run_component(program, component, blocks)
        if not workspaces:
            add_to_products(program, done, ProductBuffers.of(program.buffer, workspace_bytes))
        stage.stretches += [*done.stretches, (STRATEGY_MOMENT, frees(alive_after(done)))]
    stage.stretches.append((STRATEGY_MOMENT, frees(alive_after(stage))))
    return EncodingLayout(program, stage, program.bytes_of({}))


class EncodingMemory(NamedTuple):
    """What loading some components, encoding with them and freeing them takes, bytes."""

    peak_bytes: int
    """allocated"""
    waiting_bytes: int
    """weights in host RAM, from which they come in turn"""
    split_bytes: int
    """the most that a convolution takes more in parts than whole"""


@recording_cache(maxsize=4096)
def encoding_memory(components: tuple[ComponentPass, ...], workspace_bytes: int, workspaces: int) -> EncodingMemory:
    """The memory of `lay_out_encoding`. Only what cannot be summed from the recordings is laid out and replayed."""
    split = max(component.split_bytes for component in components)
    if len(components) == 1 and workspaces and (levels := component_levels(components[0])) is not None:
        return EncodingMemory(workspaces * whole_blocks(workspace_bytes) + levels.peak, 0, split)
    layout = lay_out_encoding(components, workspace_bytes, workspaces)
    peak = implementation.held(layout.stage.ops, layout.sizes)[1]
    waiting = sum(waiting_bytes(layout.program, component) for component in components)
    return EncodingMemory(peak, waiting, split)


class ComponentLevels(NamedTuple):
    """What a component allocates while it is loaded, runs once and is freed."""

    loading: Level
    running_peak: int
    """bytes, beside its weights"""

    @property
    def peak(self) -> int:
        """Bytes, weights included."""
        return max(self.loading.peak, self.loading.rise + self.running_peak)


@recording_cache(maxsize=4096)
def component_levels(component: ComponentPass) -> ComponentLevels | None:
    """The levels of a component's encode or decode, without laying it out; None where it is loaded or run in another
    form than it was recorded in."""
    recorded = component.dtype in ("bf16", "fp32") or (component.dtype == "fp16" and not component.kept_in_fp32)
    if (
        component.tape is None
        or component.offload != "none"
        or component.cast
        or component.second_table
        or not recorded
    ):
        return None
    levels = PartLevels(component.tape, component.part)
    loaded = PartLevels(component.tape, component.part._replace(batch=1)).piece("load")
    encoded = levels.piece(component.piece, component.counts)
    if levels.frees_by_name:
        return None
    if not component.is_repeated:
        return ComponentLevels(loaded, encoded.peak)
    # As `repeat_over_tiles` has it: each tile beside what was finished before, then all are joined.
    out = levels.outputs["out"]
    finished = FinishedRuns.of(component, out)
    rise = sum(map(whole_blocks, finished.passes))
    runs = {tile: _levels_at(component, tile) for tile in set(component.tiles)}
    peaks = []
    for tile, given in zip(component.tiles, [*finished.before, out, *finished.after], strict=True):
        peaks.append(rise + runs[tile].peak)
        rise += whole_blocks(given)
    if len(component.tiles) > 1:
        peaks.append(rise + 2 * whole_blocks(finished.joined))
        rise = sum(map(whole_blocks, finished.passes)) + whole_blocks(finished.joined)
    if finished.passes:
        peaks.append(rise + whole_blocks(finished.joined * component.passes))
    return ComponentLevels(loaded, max(peaks))


def _levels_at(component: ComponentPass, tile: tuple[int, int]) -> Level:
    assert component.tape is not None
    part = component.part
    if len(component.tiles) > 1:
        part = part._replace(grid={**part.grid, "H": tile[0], "W": tile[1]})
    return PartLevels(component.tape, part).piece(component.piece, component.counts)
