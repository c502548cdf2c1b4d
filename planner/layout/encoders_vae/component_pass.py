"""One encode or decode by a text encoder or a VAE: which ones a run has, and each one's tape, shape and weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from planner.catalog.components import SPLIT_OVER, SPLIT_SHARE, chunks_of, frames_of, recorded_length
from planner.catalog.profiles import TextEncoder, Vae
from planner.catalog.shapes import latent_frames
from planner.garbage_collection import recording_cache
from planner.layout.run import Facts, Run
from planner.spec.job import Strategy
from planner.tape.format import Monomial, Tape
from planner.tape.program import Part, Program

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

    kept_in_16_bits: str = ""
    """end of the names of weights that stay in 16 bits where the rest is quantised"""

    second_table: int = 0
    """numbers of a table of words that is there once more, never quantised"""

    head_parameters: int = 0
    """of a head that is the table of words in 16 bits, and is a weight of its own once it is quantised"""

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
        second = self.second_table * (4 if self.dtype == "fp32" else 2)
        return int((self.parameters + self.head_parameters - kept) * self.bytes_per_parameter) + 2 * kept + second

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
    if run.device.encoders_in_one_format:
        return _in_one_format(encoder, component)
    if not component.is_quantised or run.trainer == "vplan":
        return component
    if encoder.name in run.device.encoders_in_16_bits:
        return component._replace(dtype="bf16")
    tables = _table_parameters(component.tape) if component.tape else 0
    head = tables if run.device.encoder_head_untied else 0
    return component._replace(bits=run.device.encoder_bits, table_parameters=tables, head_parameters=head)


def _in_one_format(encoder: TextEncoder, component: ComponentPass) -> ComponentPass:
    """A text encoder of `DeviceTerms.encoders_in_one_format`. Those with layers that transformers keeps in fp32 are T5
    and UMT5, whose table of words has two names (modeling_t5.py and modeling_umt5.py ``_tied_weights_keys``)."""
    tape, kept = component.tape, encoder.traits.kept_in_fp32
    if tape is None:
        return component
    tables = _table_parameters(tape)
    component = component._replace(kept_in_fp32="", second_table=tables if kept else 0)
    if not component.is_quantised:
        return component
    left = tables + (_parameters_of(tape, re.escape(kept) + "$") if kept else 0)
    return component._replace(table_parameters=left, kept_in_16_bits=kept)


def _table_parameters(tape: Tape) -> int:
    """The numbers of the tables of words among the weights of a text encoder, which is recorded in 16 bits."""
    return _parameters_of(tape, TABLE.pattern)


@recording_cache(maxsize=32)
def _parameters_of(tape: Tape, pattern: str) -> int:
    """The numbers of the weights of a text encoder whose names have a pattern."""
    program = Program()
    program.unfold(tape, "load", None, Part("encoder", {"B": 1, "T": 1, **tape.regime}))
    weights = program.named["weight of encoder"]
    return sum(program.plain_bytes(buffer) for name, buffer in weights.items() if re.search(pattern, name)) // 2


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
