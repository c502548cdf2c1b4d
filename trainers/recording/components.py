"""Records a VAE's encode and decode, without gradients, and what text encoders (`encoders`) share with that.

Video VAEs work through a clip in chunks of frames. On their tapes, chunks have the role of blocks, so one recording is
valid for any length. Tiling is not recorded: `planner.catalog.components` plays the tape at a tile's size.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.catalog.components import frames_of, recorded_length
from planner.catalog.profiles import Vae
from planner.garbage_collection import without_garbage_collection
from planner.tape.format import Growing, Monomial, Section, Sums, Tape, Template
from trainers.recording import cuda_ops
from trainers.recording.block_places import LikeBlocks, find_runs
from trainers.recording.compress import Header, compress
from trainers.recording.hooks import watch_blocks
from trainers.recording.recorder import RawRecording, Recorder
from trainers.recording.recordings import load
from trainers.step import step

RECORDED_CHUNKS = range(9, 14)
"""Chunks to record: both ends and enough middle ones to see what grows from chunk to chunk. The first number is used
at which all lengths can be told apart."""

RECORDED_FRAMES = range(11, 100)
"""Latent frames to record for a VAE that takes a whole clip; likewise the first suitable number."""

CHUNK_HEAD = 3
"""Chunks kept individually at the start: the second is the first with a cache, and the third is the first to free
one."""

DTYPES = {"half": torch.bfloat16, "fp32": torch.float32}

LEVELS = (1, 2, 4, 8)
"""Resolutions inside a VAE, as multiples of its latents; a VAE that halves an image more often has more."""


def vae_sums(vae: Vae, chunked: bool) -> Sums:
    """Lengths inside a VAE that are not products of atoms: padded rows and columns, and frames of a clip.

    A convolution over padded rows has 8H+2 of them, a downsampling over padded rows 8H+1; causal convolutions in time
    put two frames in front.
    """
    sums: dict[str, tuple[int, tuple[str, ...]]] = {}
    halvings = len(vae.config.get("dim_mult", ())) - 1
    sides = (*LEVELS, *(2**halving for halving in range(len(LEVELS), halvings + 1)))
    for side, level, extra in itertools.product("HW", sides, (1, 2)):
        if level == 1 or extra == 1:  # 2H+2 is twice H+1, and so on
            sums[f"{level}{side}+{extra}"] = (extra, (side,) * level)
    levels = [vae.temporal // 2**halvings for halvings in range(vae.temporal.bit_length())]
    frames: list[tuple[int, int]] = []  # (level, constant)
    for level, extra in itertools.product(levels[:1] if chunked else levels, (0,) if chunked else (0, 2)):
        if vae.temporal > 1 and (level > 1 or extra):
            frames.append((level, 1 - level + extra))  # level * (F - 1) + 1 frames
    first: dict[str, list[tuple[int, int]]] = {
        "alike": [],
        "apart": [(1, -1)],
        "repeated": [(1, 1)],
        "whole": [(level, 2) for level in levels],  # 6F+2 is twice 3F+1
    }
    frames += first[vae.traits.first_frame]
    for level, constant in frames:
        if constant:  # without one it is a product, such as 3F
            sums[f"{level}F{constant:+d}"] = (constant, ("F",) * level)
    return sums


class PrivateShape(NamedTuple):
    """A shape to record a VAE at: every length has a prime factor above 7 that no other length has."""

    atoms: dict[str, int]
    """frames, rows and columns, in latent units"""
    sums: Sums
    chunks: int
    """that a clip of so many frames is taken in; 0 where it is taken whole"""


def private_grid(vae: Vae) -> PrivateShape:
    """The smallest shape to record a VAE at."""
    lengths = [(frames, 0) for frames in RECORDED_FRAMES] if vae.takes_frames else [(1, 0)]
    if vae.traits.frame_tiles:
        lengths = [(vae.traits.frame_tiles[0], 0)]
    if vae.traits.chunks:
        lengths = [(frames_of(vae, chunks), chunks) for chunks in RECORDED_CHUNKS]
    sides = sorted(itertools.combinations(filter(_shows, range(17, 400)), 2), key=math.prod)
    for (height, width), (frames, chunks) in itertools.product(sides, lengths):
        sums = vae_sums(vae, bool(chunks))
        if len(lengths) == 1:  # the number of frames is fixed, so it need not be recognisable
            sums = {name: entry for name, entry in sums.items() if "F" not in entry[1]}
        atoms = {"F": frames, "H": height, "W": width}
        values = {**atoms, **sum_values(sums, atoms)}
        if _all_private([length for name, length in values.items() if name != "F" or len(lengths) > 1]):
            return PrivateShape(atoms, sums, chunks)
    raise AssertionError(f"no shape at which every length of {vae.class_name} shows")


def sum_values(sums: Sums, atoms: Mapping[str, int]) -> dict[str, int]:
    """The values of a tape's sums (a constant plus products of atoms) at the given atoms, by name."""
    return {
        name: constant + sum(math.prod(atoms[atom] for atom in product) for product in products)
        for name, (constant, products) in sums.items()
    }


@functools.cache
def _shows(side: int) -> bool:
    """Whether a side can be told apart from its own padded and doubled lengths."""
    return _all_private([side, side + 1, side + 2, 2 * side + 1, 4 * side + 1, 8 * side + 1], above=20)


def _all_private(lengths: list[int], above: int = 7) -> bool:
    """Whether each length has a prime factor larger than ``above`` that divides no other length. Sides need more than
    20, because sizes also contain the frames of a chunk, up to 20."""
    factors = [_largest_factor(length) for length in lengths]
    return all(
        factor > above and not any(another % factor == 0 for index, another in enumerate(lengths) if index != position)
        for position, factor in enumerate(factors)
    )


def _largest_factor(number: int) -> int:
    factor, largest = 2, 1
    while number > 1:
        if number % factor:
            factor += 1
        else:
            largest, number = factor, number // factor
    return largest


def record_vae(vae: Vae, part: str, dtype: str, grid: Mapping[str, int], chunks: int) -> RawRecording:
    """Records loading and ``encode`` or ``decode`` of one sample; ``chunks`` is 0 for a VAE that takes a whole clip."""
    import diffusers

    model_class = getattr(diffusers, vae.class_name)
    with init_empty_weights():
        model = model_class.from_config(vae.config)
    pixels = (vae.temporal * (grid["F"] - 1) + 1, vae.spatial * grid["H"], vae.spatial * grid["W"])
    latents = (grid["F"], grid["H"], grid["W"])
    channels, shape = (vae.colours, pixels) if part == "encode" else (vae.latent_channels, latents)
    size = (1, channels, *(shape if vae.takes_clips else shape[1:]))

    def run() -> Tensor:
        batch = torch.randn(size, dtype=DTYPES[dtype])
        if part == "encode":
            encoded = model.encode(batch, return_dict=False)[0]
            drawn: Tensor = encoded if isinstance(encoded, Tensor) else encoded.sample()  # DC-AE has no posterior
            return drawn
        # a VAE that also denoises is given the noise level (ltx/pipeline_ltx.py: decode_timestep)
        noise = [torch.zeros(1, dtype=DTYPES[dtype])] if vae.config.get("timestep_conditioning") else []
        decoded: Tensor = model.decode(batch, *noise, return_dict=False)[0]
        return decoded

    worker = model.get_submodule("encoder" if part == "encode" else "decoder")
    with _in_one_go(model):
        recording, exits = record_component(model, dtype, run, part, worker if chunks else None)
    if chunks:
        assert len(exits) == chunks, f"{vae.class_name} works in {len(exits)} chunks, not {chunks}"
        recording.runs = [LikeBlocks("chunks", 0, chunks)]
        recording.places[exits[-1] :] = [None] * (len(recording.places) - exits[-1])
        for event in recording.events[exits[-1] :]:
            if event >= 0:
                recording.allocations[event].place = None
    return recording


@contextlib.contextmanager
def _in_one_go(model: nn.Module) -> Iterator[None]:
    """A context in which VAEs do in one call what they otherwise do in a loop whose length depends on the clip.

    The peak stays the same. Mochi normalises 8 frames at a time and joins them, and attends to 32,768 positions of an
    image at a time, which takes less memory but not at the peak; HunyuanVideo 1.5 fills its attention mask row by row,
    in place. CogVideoX and Mochi also split convolutions over 2 GiB, which does take more memory:
    `planner.layout.encoders_vae.component_pass` adds it.
    """
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSafeConv3d
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
    from diffusers.models.autoencoders.autoencoder_kl_mochi import MochiChunkedGroupNorm3D, MochiDownBlock3D

    def mask(frames: int, cells: int, dtype: torch.dtype, device: torch.device, batch_size: int) -> Tensor:
        return torch.full((frames * cells,) * 2, -math.inf, dtype=dtype, device=device).expand(batch_size, -1, -1)

    def attends(block: nn.Module, hidden_states: Tensor, conv_cache: Any = None) -> Any:
        return in_chunks(block, hidden_states, conv_cache, sys.maxsize)

    for module in model.modules():
        if isinstance(module, MochiChunkedGroupNorm3D):
            module.chunk_size = sys.maxsize
    in_chunks = MochiDownBlock3D.forward
    MochiDownBlock3D.forward = attends
    row_by_row = HunyuanVideo15AttnBlock.prepare_causal_attention_mask
    HunyuanVideo15AttnBlock.prepare_causal_attention_mask = staticmethod(mask)
    split = CogVideoXSafeConv3d.forward
    CogVideoXSafeConv3d.forward = nn.Conv3d.forward
    try:
        yield
    finally:
        MochiDownBlock3D.forward = in_chunks
        CogVideoXSafeConv3d.forward = split
        HunyuanVideo15AttnBlock.prepare_causal_attention_mask = staticmethod(row_by_row)


def record_component(
    model: nn.Module,
    dtype: str,
    run: Callable[[], Tensor | list[Tensor]],
    part: str,
    worker: nn.Module | None,
    module_lists: Sequence[str] = (),
) -> tuple[RawRecording, list[int]]:
    """Records loading a model and ``run``, as the piece ``part``. Returns the recording, and the event indices at which
    ``worker``, a module that is called once for each chunk, returned."""
    step.cast_weights(model, DTYPES[dtype])
    model.requires_grad_(False).eval()
    recorder = Recorder()
    recorder.recording.runs, places = find_runs(model, list(module_lists), None)
    exits: list[int] = []
    if worker is not None:
        calls = itertools.count()
        worker.register_forward_pre_hook(lambda *_: setattr(recorder, "place", (0, next(calls))))
        worker.register_forward_hook(lambda *_: exits.append(len(recorder.recording.events)))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    gc.collect(1)
    with without_garbage_collection(), cuda_ops.cuda_semantics(), fake, recorder, torch.no_grad():
        recorder.piece("load")
        load(model, recorder, places)
        if places:
            watch_blocks(model, recorder, places)
            model.register_forward_hook(lambda *_: setattr(recorder, "place", None))
        recorder.piece(part)
        recorder.begin("forward")
        out = run()
        recorder.place = None
        for number, tensor in enumerate(out if isinstance(out, list) else [out]):
            recorder.label(tensor, "batch", f"out {number}" if number else "out")
        recorder.piece("end")
        return recorder.recording, exits


def vae_tape(vae: Vae, part: str, dtype: str) -> Tape:
    """Records a VAE's ``encode`` or ``decode`` (``part``) with weights of `dtype`, as a tape."""
    atoms, sums, chunks = private_grid(vae)
    recording = record_vae(vae, part, dtype, atoms, chunks)
    regime = {"F": atoms["F"]} if not vae.takes_frames or vae.traits.frame_tiles else {}
    named_atoms = {name: value for name, value in atoms.items() if name not in regime} | sum_values(sums, atoms)
    header = component_header(vae.folder, f"{part}-{dtype}", regime, sums, _tile(vae))
    return without_unused_atoms(compress(recording, header, named_atoms, [chunks] if chunks else [], CHUNK_HEAD))


def short_tape(vae: Vae, part: str, dtype: str, frames: int) -> Tape:
    """Records ``encode`` or ``decode`` of one frame, or of a clip that is too short for the chunked tape, in one piece:
    for a VAE that works in chunks or tiles."""
    atoms, sums, _ = private_grid(vae)
    atoms["F"] = frames
    sums = {name: entry for name, entry in sums.items() if "F" not in entry[1]}
    recording = record_vae(vae, part, dtype, atoms, 0)
    named_atoms = {"H": atoms["H"], "W": atoms["W"]} | sum_values(sums, atoms)
    variant = f"{part}-{dtype}{recorded_length(vae, frames)}"
    header = component_header(vae.folder, variant, {"F": frames}, sums, _tile(vae))
    return without_unused_atoms(compress(recording, header, named_atoms, []))


def _tile(vae: Vae) -> tuple[int, ...]:
    """(rows, columns) of a tile, then of the stride between tiles, in pixels; the diffusers class's defaults."""
    import diffusers

    with init_empty_weights():
        model = getattr(diffusers, vae.class_name).from_config(vae.config)
    model.enable_tiling()
    if hasattr(model, "tile_sample_min_size"):
        size = model.tile_sample_min_size
        stride = int(size * (1 - model.tile_overlap_factor))
        return size, size, stride, stride
    height, width = model.tile_sample_min_height, model.tile_sample_min_width
    if hasattr(model, "tile_sample_stride_height"):
        return height, width, model.tile_sample_stride_height, model.tile_sample_stride_width
    if hasattr(model, "tile_overlap_factor"):
        overlaps = (model.tile_overlap_factor, model.tile_overlap_factor)
    else:
        overlaps = (model.tile_overlap_factor_height, model.tile_overlap_factor_width)
    return height, width, *(int(side * (1 - overlap)) for side, overlap in zip((height, width), overlaps, strict=True))


def component_header(name: str, variant: str, regime: Mapping[str, int], sums: Sums, tile: tuple[int, ...]) -> Header:
    """The header of the tape of a text encoder or VAE, with the versions of the installed libraries."""
    versions = {library: version(library).split("+")[0] for library in ("torch", "diffusers", "transformers")}
    return Header(name, variant, versions, regime, sums, tile=tile)


def without_unused_atoms(tape: Tape) -> Tape:
    """The tape without atoms and sums that occur in no size and no work."""
    templates = [template for piece in tape.pieces.values() for section in piece for template in section.templates]
    rows = [row for size in tape.sizes for row in _exponents(size)]
    rows += [work.exponents for template in templates for work in template.work]
    indices = [index for index in range(len(tape.atoms)) if any(row[index] for row in rows)]
    atoms = tuple(tape.atoms[index] for index in indices)

    def remaining(exponents: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(exponents[index] for index in indices) if exponents else ()

    def monomial(size: Monomial) -> Monomial:
        return size._replace(exponents=remaining(size.exponents), inner_exponents=remaining(size.inner_exponents))

    def template(known: Template) -> Template:
        return known._replace(work=[work._replace(exponents=remaining(work.exponents)) for work in known.work])

    def section(known: Section) -> Section:
        return known._replace(templates=list(map(template, known.templates)))

    return replace(
        tape,
        atoms=atoms,
        sums={name: entry for name, entry in tape.sums.items() if name in atoms},
        sizes=tuple(
            Growing(*map(monomial, size)) if isinstance(size, Growing) else monomial(size) for size in tape.sizes
        ),
        pieces={name: list(map(section, sections)) for name, sections in tape.pieces.items()},
    )


def _exponents(size: Monomial | Growing) -> list[tuple[int, ...]]:
    """The exponents in a size of the tape's table."""
    if isinstance(size, Growing):
        return [size.base.exponents, size.slope.exponents]
    return [size.exponents, size.inner_exponents] if size.multiple else [size.exponents]
