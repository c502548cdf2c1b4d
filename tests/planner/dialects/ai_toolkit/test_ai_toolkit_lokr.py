"""ai-toolkit's LoKr: how many numbers it trains, and the LoRA that it is priced as."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoKrConfig, inject_adapter_in_model

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.lycoris import numbers_of, sides
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.layout.adapters import LinearLayer

CONFIG = """job: extension
config:
  name: a
  process:
    - type: sd_trainer
      network: {%s}
      datasets: [{folder_path: /data, resolution: [512], cache_latents_to_disk: true}]
      train: {batch_size: 1, optimizer: adamw8bit, dtype: bf16, cache_text_embeddings: true, disable_sampling: true}
      model: {name_or_path: %s, arch: %s}
"""


def translated(
    network: str, tmp_path: Path, model: str = "black-forest-labs/FLUX.1-dev", arch: str = "flux"
) -> Translation:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG % (network, model, arch))
    return translate(*dialects.read_script(from_file(path)))


@given(
    rows=st.integers(1, 400),
    columns=st.integers(1, 400),
    factor=st.sampled_from([-1, 1, 2, 4, 6, 8, 16, 48]),
    rank=st.sampled_from([0, 4]),
)
def test_a_layer_has_as_many_numbers_as_pefts(rows: int, columns: int, factor: int, rank: int) -> None:
    """peft's LoKr is LyCORIS', as ai-toolkit's is."""
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, device="meta"))
    config = LoKrConfig(r=rank or 1 << 20, decompose_factor=factor, target_modules=["0"], init_weights=False)
    inject_adapter_in_model(config, model)
    adapter = [parameter for name, parameter in model.named_parameters() if "lokr" in name]
    numbers = numbers_of(LinearLayer(rows, columns, None), factor, rank)
    assert numbers == sum(parameter.numel() for parameter in adapter)
    smaller, larger = sides(rows, factor)
    assert smaller * larger == rows


@pytest.mark.parametrize(
    ("network", "rank"),
    [
        ("type: lokr, lokr_factor: 4", 138),
        ("type: lokr, lokr_full_rank: true, lokr_factor: 8, linear: 32", 34),
        ("type: LoKr", 1),
        ("type: lokr, lokr_full_rank: false, lokr_factor: 8, linear: 16", 2),
    ],
)
def test_a_lokr_is_priced_as_the_lora_with_as_many_numbers(network: str, rank: int, tmp_path: Path) -> None:
    told = translated(network, tmp_path)
    assert told.job["lora_rank"] == rank
    assert any(f"priced as a LoRA of rank {rank}," in note for note in told.notes)


def test_of_chosen_layers_those_alone_count(tmp_path: Path) -> None:
    chosen = "type: lokr, lokr_factor: 8, network_kwargs: {only_if_contains: [single_transformer_blocks.0.proj_out]}"
    rows, columns = 3072, 3072 + 12288
    numbers = 8 * 8 + (rows // 8) * (columns // 8)
    assert translated(chosen, tmp_path).job["lora_rank"] == round(numbers / (rows + columns))


def test_a_lokr_of_a_unet_is_refused_for_its_convolutions(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="convolutions adapters too"):
        translated("type: lokr", tmp_path, "stabilityai/stable-diffusion-xl-base-1.0", "sdxl")


def test_a_factor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="lokr_factor 'auto' is not a whole number"):
        translated("type: lokr, lokr_factor: auto", tmp_path)
