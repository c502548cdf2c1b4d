"""A text encoder or a VAE, beside the model: laid out at one shape from its recording, like the step itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from planner.allocator import implementation
from planner.catalog.components import SPLIT_OVER, SPLIT_SHARE, chunks_of, frames_of, recorded_length
from planner.catalog.profiles import TextEncoder, Vae
from planner.catalog.shapes import latent_frames
from planner.garbage_collection import recording_cache
from planner.layout.cublas import ProductBuffers, add_to_products
from planner.layout.group_offload import GroupTransfers, host_copy_bytes
from planner.layout.run import STRATEGY_MOMENT, Facts, Run
from planner.spec.job import Strategy
from planner.tape.format import Monomial, Tape
from planner.tape.levels import Level, PartLevels, whole_blocks
from planner.tape.program import Moment, Part, Program, Stage, renamed_events

BYTES_PER_PARAMETER = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "nf4": 0.5 + 4 / 64,
    "int4": 0.5 + 4 / 64,
}
"""Bytes per parameter. 4-bit formats keep an fp32 scale for 64 numbers (bitsandbytes, blocksize 64)."""


TABLE = re.compile(r"(^|\.)(shared|embed|embed_tokens|token_embedding)\.weight$")
"""Tables of words, by transformers' names."""


class ComponentPass(NamedTuple):
    """One encode or decode by a text encoder or the VAE at one shape: tape, weights and offload, ready to be laid
    out."""

    name: str
    tape: Tape | None
    """None: not recorded, only its weights count"""

    piece: str
    part: Part
    counts: tuple[int, ...] | None
    parameters: int
    dtype: str
    tiles: tuple[tuple[int, int], ...] = ((1, 1),)
    """rows and columns of the tiles that run one after the other, keeping what came out; smaller ones at an edge"""

    area: int = 1
    """rows times columns of all of them together without what overlaps"""

    passes: int = 1
    """how many times all that happens: for each sample of a batch, or each stretch of a clip"""

    splits: bool = False
    """whether convolutions over a limit work in parts"""

    offload: str = "none"
    """none; layers: of a stack, each comes to the GPU for its turn; block or leaf: as group offload does it"""

    stream: bool = False
    """whether group offload fetches ahead"""

    kept_in_fp32: str = ""
    """end of the names of weights that stay in fp32 where the rest is fp16"""

    cast: bool = False
    """whether its weights come in another format of as many bits, and are cast on the GPU one after the other"""

    bits: float = 0.0
    """of a number of a quantised weight, where its format alone does not say"""

    table_parameters: int = 0
    """of its parameters, those of a table of words that stays in 16 bits where the rest is quantised"""

    @property
    def is_repeated(self) -> bool:
        """Whether it runs more than once."""
        return len(self.tiles) > 1 or self.passes > 1

    @property
    def is_quantised(self) -> bool:
        """Whether its weights have fewer than 16 bits."""
        return self.dtype not in ("bf16", "fp16", "fp32")

    @property
    def bytes_per_parameter(self) -> float:
        """Of its weights, but for a table that stays in 16 bits."""
        return self.bits / 8 or BYTES_PER_PARAMETER[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """The weights, as they are stored."""
        kept = self.table_parameters if self.is_quantised else 0
        return int((self.parameters - kept) * self.bytes_per_parameter) + 2 * kept

    @property
    def weights(self) -> str:
        """The category under which a program names its weights."""
        return f"weight of {self.part.name}"

    @property
    def split_bytes(self) -> int:
        """The most that a convolution of the largest thing it holds takes more in parts than whole; 0 if none is
        split."""
        if self.tape is None or not self.splits:
            return 0
        values = self.tape.values(self.part.grid)
        largest = self.part.batch * max(size.value(values) for size in self.tape.sizes if isinstance(size, Monomial))
        return SPLIT_SHARE * largest if largest > SPLIT_OVER * (4 if self.dtype == "fp32" else 2) else 0

    @property
    def piece_of_layers(self) -> bool:
        """Whether the component is a stack of layers, whose weights can be loaded to the GPU one layer at a time."""
        return self.tape is not None and self.counts is None and bool(self.tape.runs)


def encoders(run: Run, residence: str, batch: int) -> list[ComponentPass]:
    """The text encoders and the VAE that are ``cached``, ``resident`` or ``swapped``, for one batch of the run."""
    strategy, model = run.strategy, run.facts.model
    components = []
    if strategy.text_encoder == residence and not run.device.encoders_on_cpu:
        in_turn = strategy.group_offload if run.samples_only else "none"
        for encoder in model.text_encoders:
            tape = run.facts.around.get(f"{encoder.folder}/encode")
            component = text_component(encoder, tape, strategy, batch)
            cast = encoder.name == run.device.encoder_cast
            component = component._replace(offload=in_turn, stream=strategy.group_offload_stream, cast=cast)
            if residence == "cached" and run.device.encoders_by_layer and _has_words(component):
                component = component._replace(offload="layers")
            components.append(_as_trained(run, encoder, component))
    if strategy.vae == residence and not run.samples_only:
        clip = _clip(run, run.grid, batch)
        tape = _vae_tape(run.facts, "encode", clip["F"])
        components.append(vae_component(model.vae, tape, "encode", strategy, clip, run.device.vae_tile))
    return components


def _has_words(component: ComponentPass) -> bool:
    """Whether a component is a stack of layers behind a table of words, as a text encoder is that a trainer loads; what
    turns its states into the model's prompts has none."""
    return component.tape is not None and component.piece_of_layers and _table_parameters(component.tape) > 0


def _as_trained(run: Run, encoder: TextEncoder, component: ComponentPass) -> ComponentPass:
    """A text encoder as the run's trainer quantises it. Ours packs tables of words too (`trainers.data
    .packed_encoders`). Others leave them: what they quantise with is of linear layers (bitsandbytes, optimum-quanto and
    torchao ``quantize_``), and kohya-ss's trainers cast ``Embedding`` back (sd-scripts flux_train_network.py
    ``prepare_fp8``, musubi-tuner wan/modules/t5.py)."""
    if not component.is_quantised or run.trainer == "vplan":
        return component
    if encoder.name in run.device.encoders_in_16_bits:
        return component._replace(dtype="bf16")
    tables = _table_parameters(component.tape) if component.tape else 0
    return component._replace(bits=run.device.encoder_bits, table_parameters=tables)


@recording_cache(maxsize=32)
def _table_parameters(tape: Tape) -> int:
    """The numbers of the tables of words among the weights of a text encoder, which is recorded in 16 bits."""
    program = Program()
    program.unfold(tape, "load", None, Part("encoder", {"B": 1, "T": 1, **tape.regime}))
    weights = program.named["weight of encoder"]
    return sum(program.plain_bytes(buffer) for name, buffer in weights.items() if TABLE.search(name)) // 2


def component_bytes(run: Run, residence: str) -> int:
    """The weights of the text encoders and the VAE that are ``cached``, ``resident`` or ``swapped``."""
    return sum(component.weight_bytes for component in encoders(run, residence, 1))


def components_host_bytes(run: Run) -> int:
    """Host RAM, bytes, of the encoders and, in training, the VAE that come to the GPU for each batch and wait in
    between."""
    places = ["swapped"]
    if run.samples_only and run.strategy.group_offload != "none":  # a resident one waits too, all but its turn
        places.append("resident")
    return sum(component_bytes(run, place) for place in places)


def _vae_tape(facts: Facts, piece: str, frames: int) -> Tape | None:
    vae = facts.model.vae
    return facts.around.get(f"{vae.folder}/{piece}{recorded_length(vae, frames)}")


def _clip(run: Run, grid: Mapping[str, int], batch: int) -> dict[str, int]:
    """A shape in latents, as VAEs count it: B, F, H, W. ``grid``: of one of the job's shapes."""
    model, job = run.facts.model, run.job
    frames, rows, columns = model.shape.patch
    padded = grid["F"] * frames
    asked = {shape.frames for shape in job.shapes} | ({job.validation.frames} if job.validation else set())
    coded = (model.vae.coded(count) for count in asked if latent_frames(model, count) == padded)
    return {"B": batch, "F": max(coded, default=padded), "H": grid["H"] * rows, "W": grid["W"] * columns}


def decoder(run: Run, shape: Mapping[str, int], batch: int) -> ComponentPass:
    """The VAE's pass that decodes `batch` samples. ``shape``: the grid, in the tape's atoms."""
    model = run.facts.model
    clip = _clip(run, shape, batch)
    tape = _vae_tape(run.facts, "decode", clip["F"])
    return vae_component(model.vae, tape, "decode", run.strategy, clip, run.device.vae_tile)


def text_component(encoder: TextEncoder, tape: Tape | None, strategy: Strategy, batch: int) -> ComponentPass:
    """The pass of a text encoder over a batch of `batch` prompts of its full length, stored as the strategy says."""
    name = encoder.folder
    part = Part(name, {"B": batch, "T": encoder.max_tokens})
    run = ComponentPass(name, tape, "encode", part, None, encoder.parameters, strategy.text_encoder_dtype)
    return run._replace(kept_in_fp32=encoder.traits.kept_in_fp32)


def vae_component(
    vae: Vae,
    tape: Tape | None,
    piece: str,
    strategy: Strategy,
    clip: Mapping[str, int],
    own_tile: tuple[int, ...] = (),
) -> ComponentPass:
    """The VAE for ``clip``: latent frames F, rows H, columns W, batch B. ``own_tile``: a trainer's
    (`planner.layout.run_records.DeviceTerms.vae_tile`)."""
    name = vae.folder
    frames, rows, columns, batch = clip["F"], clip["H"], clip["W"], clip["B"]
    if not vae.takes_clips:
        frames, batch = 1, batch * frames
    passes, area = 1, rows * columns
    if strategy.vae_slicing:
        passes, batch = batch, 1
    tile = own_tile or (tape.tile if tape else ())
    tiles: tuple[tuple[int, int], ...] = ((rows, columns),)
    if strategy.vae_tiling and tile and (rows * vae.spatial > tile[0] or columns * vae.spatial > tile[1]):
        sides = [
            [min(size // vae.spatial, side - start) for start in range(0, side, stride // vae.spatial)]
            for side, size, stride in ((rows, tile[0], tile[2]), (columns, tile[1], tile[3]))
        ]
        tiles = tuple((height, width) for height in sides[0] for width in sides[1])
        rows, columns = sides[0][0], sides[1][0]
    if vae.traits.frame_tiles and not recorded_length(vae, frames):
        length, stride = vae.traits.frame_tiles
        frames, passes = length, passes * -(-frames // stride)
    chunks = chunks_of(vae, frames)
    grid = {"F": frames_of(vae, chunks) if chunks else frames, "H": rows, "W": columns}
    counts = (chunks,) if chunks and not recorded_length(vae, frames) else None
    part = Part(name, grid, batch)
    splits = vae.traits.splits_convolutions
    parameters, dtype = vae.parameters, strategy.vae_dtype
    return ComponentPass(name, tape, piece, part, counts, parameters, dtype, tiles, area, passes, splits)


# ---- laying out


def load_component(program: Program, component: ComponentPass) -> tuple[Stage, dict[tuple[str, int], list[int]]]:
    """(stage, blocks): the stage that loads a component's weights, and, by (module list, block), the buffers of weights
    that group offload brings to the GPU only when the block runs."""
    stage = Stage("load", [])
    blocks: dict[tuple[str, int], list[int]] = {}
    if component.tape is None:
        buffer = program.buffer(component.weight_bytes, "residents", component.name)
        stage.stretches.append((STRATEGY_MOMENT, [buffer]))
        return stage, blocks
    first = len(program.buffers)
    stage = program.unfold(component.tape, "load", None, component.part._replace(batch=1))
    if component.is_quantised:  # recorded in 16 bits
        tables = set(_tables(program, component))
        for buffer in range(first, len(program.buffers)):
            if buffer not in tables:
                program.resize(buffer, int(program.plain_bytes(buffer) * component.bytes_per_parameter / 2))
    if component.dtype == "fp16" and component.kept_in_fp32:
        for name, buffer in _weights(program, component).items():
            if name.endswith(component.kept_in_fp32):
                program.resize(buffer, 2 * program.plain_bytes(buffer))
    if component.cast:
        copy = program.buffer(max(map(program.plain_bytes, _weights(program, component).values())), "temporary", "cast")
        stage.stretches.append((STRATEGY_MOMENT, [copy, ~copy]))
    if component.offload == "layers":
        blocks = _taken_out(program, component.tape, stage, component.part.name)
    elif component.offload != "none":
        stage.stretches = []
    return stage, blocks


def _taken_out(program: Program, tape: Tape, stage: Stage, name: str) -> dict[tuple[str, int], list[int]]:
    """Takes the weights of blocks out of a loading stage; returns them by block."""
    blocks: dict[tuple[str, int], list[int]] = {}
    for full_name, buffer in program.named.get(f"weight of {name}", {}).items():
        block = tape.block_of(full_name)
        if block is not None:
            blocks.setdefault(block, []).append(buffer)
    gone = {buffer for buffers in blocks.values() for buffer in buffers}
    stage.stretches = [(moment, [event for event in events if event not in gone]) for moment, events in stage.stretches]
    return blocks


def run_component(program: Program, component: ComponentPass, blocks: dict[tuple[str, int], list[int]]) -> Stage:
    """The stage of one encode or decode. Its outputs (latents, embeddings) stay allocated after it. ``blocks``: from
    `load_component`."""
    if component.tape is None:
        return Stage(component.piece, [])
    stage = program.unfold(component.tape, component.piece, component.counts, component.part)
    if blocks:
        _bring(program, stage, blocks)
    elif component.offload != "none":
        transfers = GroupTransfers(component.offload, component.stream, program.plain_bytes, _weight(program))
        transfers.insert(stage, _weights(program, component))
    if component.is_quantised:
        packed = set(_weights(program, component).values()) - set(_tables(program, component))
        largest = max(map(program.plain_bytes, packed))
        unpacked = program.buffer(int(largest * 2 / component.bytes_per_parameter), "temporary", "dequantised weight")
        stage.stretches.insert(0, (STRATEGY_MOMENT, [unpacked]))
        stage.stretches.append((STRATEGY_MOMENT, [~unpacked]))
    if component.is_repeated:
        _repeat(program, component, stage)
    return stage


def _weights(program: Program, component: ComponentPass) -> dict[str, int]:
    return program.named.get(component.weights, {})


def _tables(program: Program, component: ComponentPass) -> list[int]:
    """The tables of words that stay in 16 bits."""
    weights = _weights(program, component) if component.table_parameters else {}
    return [buffer for name, buffer in weights.items() if TABLE.search(name)]


def _weight(program: Program) -> Callable[[int], int]:
    return lambda nbytes: program.buffer(nbytes, "residents", "group offload")


def _bring(program: Program, stage: Stage, blocks: dict[tuple[str, int], list[int]]) -> None:
    """A layer's weights are there while it runs."""
    for position, (moment, events) in enumerate(stage.stretches):
        block = (moment.module_list, moment.block)
        if block not in blocks or all(event < 0 for event in events):  # what it made goes without it
            continue
        nbytes = sum(program.plain_bytes(buffer) for buffer in blocks[block])
        brought = program.buffer(nbytes, "residents", "layer")
        stage.stretches[position] = (moment, [brought, *events, ~brought])


class _Finished(NamedTuple):
    """What the runs of a component give, bytes of each allocation. The last run at full size is the one laid out."""

    passes: list[int]
    """of earlier passes: samples, or stretches of a clip"""

    before: list[int]
    """of the tiles of this pass that are done by then"""

    after: list[int]
    """of the smaller tiles that follow"""

    joined: int
    """of the tiles of a pass together"""

    @classmethod
    def of(cls, component: ComponentPass, nbytes: int) -> _Finished:
        """``nbytes``: of what a run at full size gives."""
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


def _repeat(program: Program, component: ComponentPass, stage: Stage) -> None:
    """Runs it tile by tile while what earlier passes gave is kept; then the tiles are joined, by rows and as a whole
    (diffusers ``tiled_encode``, ``tiled_decode``), and the passes."""

    def buffers(sizes: list[int], name: str) -> list[int]:
        return [program.buffer(nbytes, "activation", name) for nbytes in sizes]

    out = program.named[f"batch of {component.part.name}"]["out"]
    finished = _Finished.of(component, program.plain_bytes(out))
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


def alive_after(*stages: Stage) -> list[int]:
    """The buffers that are allocated after these stages, run one after another on an empty allocator."""
    stretches = itertools.chain.from_iterable(stage.stretches for stage in stages)
    return implementation.alive(list(itertools.chain.from_iterable(events for _, events in stretches)), [])


def waiting_bytes(program: Program, component: ComponentPass) -> int:
    """Host RAM, bytes, of the weights of a component that come to the GPU in turn; 0 of one that is there whole."""
    if component.offload == "none" or component.tape is None:
        return 0
    if component.offload == "layers":
        return component.weight_bytes
    sizes = {name: program.plain_bytes(buffer) for name, buffer in _weights(program, component).items()}
    lists = {run.module_list for run in component.tape.runs}
    return sum(host_copy_bytes(component.offload, component.stream, sizes, lists))


class EncodingLayout(NamedTuple):
    """Some components loaded, run and freed again, on an allocator of their own."""

    program: Program
    stage: Stage
    sizes: list[int]
    """by buffer, bytes"""


@recording_cache(maxsize=32)
def lay_out_encoding(components: tuple[ComponentPass, ...], workspace_bytes: int, workspaces: int) -> EncodingLayout:
    """Loads some components, encodes with them and frees them again, beside cuBLAS's workspaces: the number of them
    that stays, or one for each product."""
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
        stage.stretches += [*done.stretches, (STRATEGY_MOMENT, [~buffer for buffer in alive_after(done)])]
    stage.stretches.append((STRATEGY_MOMENT, [~buffer for buffer in alive_after(stage)]))
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
    """What `lay_out_encoding` comes to, laid out only where that cannot be summed up."""
    split = max(component.split_bytes for component in components)
    if len(components) == 1 and workspaces and (peak := _summed_peak(components[0])) is not None:
        return EncodingMemory(workspaces * whole_blocks(workspace_bytes) + peak, 0, split)
    layout = lay_out_encoding(components, workspace_bytes, workspaces)
    peak = implementation.held(layout.stage.ops, layout.sizes)[1]
    waiting = sum(waiting_bytes(layout.program, component) for component in components)
    return EncodingMemory(peak, waiting, split)


@recording_cache(maxsize=4096)
def _summed_peak(component: ComponentPass) -> int | None:
    """The allocated peak of a component that is loaded, encodes and is freed, without laying it out; None where it is
    loaded or run in another form than it was recorded in."""
    recorded = component.dtype in ("bf16", "fp32") or (component.dtype == "fp16" and not component.kept_in_fp32)
    if component.tape is None or component.offload != "none" or component.cast or not recorded:
        return None
    levels = PartLevels(component.tape, component.part)
    loaded = PartLevels(component.tape, component.part._replace(batch=1)).piece("load")
    encoded = levels.piece(component.piece, component.counts)
    if levels.frees_by_name:
        return None
    if not component.is_repeated:
        return max(loaded.peak, loaded.rise + encoded.peak)
    # As `_repeat` has it: each tile beside what was finished before, then all are joined.
    out = levels.outputs["out"]
    finished = _Finished.of(component, out)
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
    return max(loaded.peak, loaded.rise + max(peaks))


def _levels_at(component: ComponentPass, tile: tuple[int, int]) -> Level:
    assert component.tape is not None
    part = component.part
    if len(component.tiles) > 1:
        part = part._replace(grid={**part.grid, "H": tile[0], "W": tile[1]})
    return PartLevels(component.tape, part).piece(component.piece, component.counts)
