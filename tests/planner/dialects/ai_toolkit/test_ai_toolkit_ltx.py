"""LTX-2 in ai-toolkit: its connectors run in every step, in 16 bits whatever is quantised."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.catalog.shapes import grids
from planner.dialects.base.script import from_file
from planner.foreign.case import read_case
from planner.layout.encoders_vae.component_pass import encoders
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.units import GIB

CONFIG = """job: extension
config:
  name: a
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16}
      datasets: [{folder_path: /data, resolution: [512], num_frames: 9, cache_latents: true}]
      train: {batch_size: 1, optimizer: adamw8bit, dtype: bf16, disable_sampling: true, cache_text_embeddings: %s}
      model: {name_or_path: Lightricks/%s, arch: %s, low_vram: true, quantize: true, quantize_te: true}
"""


def laid_out(folder: Path, model: str, cached: bool) -> Run:
    (folder / "a.yaml").write_text(CONFIG % (str(cached).lower(), model, model.lower().replace("-2", "2")))
    case = read_case(*dialects.read_script(from_file(folder / "a.yaml")), {}, {"gpu": "h200-141gb"})
    (shape,) = grids(case.model, case.job)
    return lay_out(case.configuration, load_facts(case.configuration), shape, case.trainer)


@pytest.mark.parametrize(("model", "gib"), [("LTX-2", 2.67), ("LTX-2.3", 5.91), ("LTX-2.5", 5.91)])
def test_the_connectors_stay_in_16_bits_beside_the_model_once(model: str, gib: float, tmp_path: Path) -> None:
    """Read in extensions_built_in/diffusion_models/ltx2/ltx2.py at 27a03a9."""
    cached, resident = laid_out(tmp_path, model, True), laid_out(tmp_path, model, False)
    beside = [
        [run.sizes[at] for at, name in enumerate(run.program.op) if name.endswith("connectors")]
        for run in (cached, resident)
    ]
    assert [round(nbytes / GIB, 2) for nbytes in beside[0]] == [gib]
    assert beside[1] == [], "with all encoders on the GPU they are there anyway"
    *others, connectors = encoders(resident, "resident", 1)
    assert round(connectors.weight_bytes / GIB, 2) == gib
    assert {part.dtype for part in others} == {"fp8"}
