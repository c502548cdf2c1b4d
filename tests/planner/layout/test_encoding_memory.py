"""What encoders take, summed up, is what laying them out comes to."""

from __future__ import annotations

import pytest

from planner.allocator.implementation import held
from planner.catalog import lookup
from planner.catalog.components import recorded_length
from planner.layout.encoders_vae import encoding_memory, lay_out_encoding, vae_component
from planner.layout.inputs import component_tape
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
