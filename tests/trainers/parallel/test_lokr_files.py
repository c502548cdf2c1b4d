"""Files of a LoKr: the same matrices for diffusers and ComfyUI, and what of diffusers reads them; and which models have
a file for ComfyUI, as the docs say."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from tests.trainers.parallel.test_lora_files import AT_RANK, load, lora_job, trainee  # noqa: E402
from trainers import families  # noqa: E402
from trainers.parallel.lora_files import LoraFiles, comfyui_places, has_comfyui_model  # noqa: E402


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "sdxl", "flux.1-dev"])
def test_a_lokr_is_the_same_in_comfyui_where_each_of_its_layers_is_one_there(name: str, tmp_path: Path) -> None:
    profile = tiny.profile(name)
    job = lora_job(profile, adapter="lokr", lokr_factor=4)
    model = trainee(profile, job)
    trained = {key: weight.detach() for key, weight in model.named_parameters() if ".lokr_" in key}
    LoraFiles(profile, job, AT_RANK, 7, model).write(tmp_path, trained, 3)
    own = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert {key.removesuffix(".default") for key in trained} == {key.partition(".")[2] for key in own}
    comfyui = tmp_path / "comfyui_lora.safetensors"
    assert comfyui.is_file() == (name != "flux.1-dev")  # whose q, k and v are one layer
    if comfyui.is_file():
        places, there = comfyui_places(profile, model), load_file(comfyui)
        for key, tensor in trained.items():
            layer, _, part = key.partition(".lokr_")
            named = f"lora_unet_{places[layer].layer.replace('.', '_')}.lokr_{part.removesuffix('.default')}"
            assert torch.equal(there.pop(named), tensor)
        assert not there


IN_PIPELINES = ("flux.2-klein-4b", "z-image")
"""Models whose pipelines read a LoKr in diffusers 0.42 (docs/training.md)."""


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "sdxl", "flux.1-dev", *IN_PIPELINES])
def test_diffusers_reads_a_lokr_as_the_docs_say(name: str, tmp_path: Path) -> None:
    profile = tiny.profile(name)
    job = lora_job(profile, adapter="lokr", lokr_factor=4)
    trained = trainee(profile, job)
    weights_of = {key: weight.detach() for key, weight in trained.named_parameters() if ".lokr_" in key}
    LoraFiles(profile, job, AT_RANK, 7, trained).write(tmp_path, weights_of, 3)
    model, part = getattr(diffusers, profile.diffusers_class).from_config(profile.config), profile.traits.part
    sampler = families.family(profile).sampler()
    if name in IN_PIPELINES:
        load(sampler, part, model, tmp_path)
    else:
        with pytest.raises(ValueError, match="Invalid LoRA checkpoint"):
            load(sampler, part, model, tmp_path)
        model.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors", prefix=part)
    layers = {key: module for key, module in model.named_modules() if hasattr(module, "lokr_w1")}
    assert len(layers) * 2 == len(weights_of)
    for key, module in layers.items():
        left, right = (weights_of[f"{key}.lokr_w{side}.default"] for side in (1, 2))
        (adapter,) = module.lokr_w1
        torch.testing.assert_close(module.get_delta_weight(adapter), torch.kron(left, right), rtol=1e-5, atol=1e-5)


WITHOUT_COMFYUI = (
    *("LatentSync", "EasyAnimate", "SANA", "Cosmos-Predict2.5", "FLUX.3", "FramePack", "Kandinsky 5.0"),
    *("LongCat-Image", "LTX-2", "MiniMax-H3", "Qwen-Image-2.1", "SANA-Video", "SkyReels-V2", "Wan2.2 Animate"),
)


def test_the_docs_name_all_models_without_a_file_for_comfyui() -> None:
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    paragraph = text.partition("There is no file for ComfyUI of ")[2].partition("\n\n")[0]
    assert [name for name in WITHOUT_COMFYUI if name not in paragraph] == []
    opening = tuple(name.replace("-", " ") for name in WITHOUT_COMFYUI)
    for name in lookup.model_names():
        profile = lookup.model(name)
        assert profile.title.replace("-", " ").startswith(opening) != has_comfyui_model(profile), name
