"""What encoders take, summed up, is what laying them out comes to."""

from __future__ import annotations

import itertools

import pytest

from planner.allocator.implementation import held
from planner.catalog import lookup
from planner.catalog.components import recorded_length
from planner.layout.encoders_vae.component_pass import vae_component
from planner.layout.encoders_vae.encoding_memory import encoding_memory, lay_out_encoding
from planner.layout.recordings import component_tape
from planner.spec.job import Strategy


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("frames", [3, 7])
@pytest.mark.parametrize("model", ["wan2.1-t2v-1.3b", "cogvideox-2b"])
def test_the_sum_is_what_the_layout_comes_to(model: str, frames: int, tiled: bool) -> None:
    vae = lookup.model(model).vae
    tape = component_tape(vae.folder, f"encode-half{recorded_length(vae, frames)}")
    strategy = Strategy(vae_dtype="bf16", vae_tiling=tiled)
    clip = {"F": frames, "H": 60, "W": 104, "B": 1}
    component = vae_component(vae, tape, "encode", strategy, clip)
    layout = lay_out_encoding((component,), 8 * 2**20, 2)
    assert encoding_memory((component,), 8 * 2**20, 2).peak_bytes == held(layout.stage.ops, layout.sizes)[1]


def test_tiles_at_an_edge_are_smaller_and_join_to_the_whole_clip() -> None:
    vae = lookup.model("cogvideox-2b").vae
    tape = component_tape(vae.folder, "decode-half")
    clip = {"F": 13, "H": 60, "W": 90, "B": 2}
    plan = Strategy(vae_dtype="bf16", vae_tiling=True, vae_slicing=True)
    component = vae_component(vae, tape, "decode", plan, clip)
    sides = [(30, 30, 10), (45, 45, 18)]  # diffusers 0.42 autoencoder_kl_cogvideox.py `tiled_decode` at 480x720
    assert component.tiles == tuple(itertools.product(*sides)) and component.passes == 2
    layout = lay_out_encoding((component,), 8 * 2**20, 2)
    made = [layout.sizes[event] for event in layout.stage.ops if event >= 0]
    assert 2 * 49 * 3 * 480 * 720 * 2 in made  # both samples, in 16 bits
    edge = 49 * 3 * 80 * 144 * 2
    assert made.count(edge) == 1  # of the pass that is laid out, its last tile
    assert encoding_memory((component,), 8 * 2**20, 2).peak_bytes == held(layout.stage.ops, layout.sizes)[1]
