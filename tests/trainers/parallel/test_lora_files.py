"""LoRA files: ComfyUI's has an adapter for each of its layers and changes weights as diffusers' file does, which loads.

`comfyui_weights.toml` lists the layers of ComfyUI's models, made by ComfyUI's own code.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
from accelerate import init_empty_weights  # noqa: E402
from diffusers.loaders import single_file_utils  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from planner import __version__  # noqa: E402
from planner.catalog import lookup  # noqa: E402
from planner.catalog.profiles import ModelProfile  # noqa: E402
from planner.catalog.shapes import grid  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.spec.job import Job, Strategy  # noqa: E402
from planner.spec.training import TrainingSettings  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from trainers import families  # noqa: E402
from trainers.families.common.sampling import FamilyPipeline  # noqa: E402
from trainers.parallel.lora_files import LoraFiles, comfyui_places, comfyui_tensors, has_comfyui_model  # noqa: E402
from trainers.parallel.lora_start import from_file  # noqa: E402
from trainers.step import placement, step, weights  # noqa: E402

COMFYUI = tomllib.loads(Path(__file__).with_name("comfyui_weights.toml").read_text())
RANK = 2
AT_RANK = TrainingSettings(timestep_shift=3.0)
NOT_ADAPTED = {"cond_type_embedding"}
"""Tables, which no adapter is for."""


def comfyui_layers(name: str) -> dict[str, tuple[int, ...]]:
    """ComfyUI's layers that a LoRA file can name, with the shapes of their weights."""
    layers: dict[str, tuple[int, ...]] = {}
    for layer, shape in COMFYUI[name]["weights"].items():
        if "*" in layer:
            layers |= {layer.replace("*", str(number)): tuple(shape[1:]) for number in range(shape[0])}
        else:
            layers[layer] = tuple(shape)
    return {layer: shape for layer, shape in layers.items() if layer not in NOT_ADAPTED}


def small(name: str) -> ModelProfile:
    """The model with as few blocks as the list of ComfyUI's layers was made for."""
    profile = lookup.model(name)
    return profile.replace(config={**profile.config, **COMFYUI[name]["config"]})


def model_of(profile: ModelProfile) -> nn.Module:
    with init_empty_weights():
        model: nn.Module = getattr(diffusers, profile.diffusers_class).from_config(profile.config)
    return model


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """All layers of a model that adapters are for."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def adapters(layers: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Random adapters by the names that they have in the model that trains."""
    torch.manual_seed(0)
    trained = {}
    for name, module in layers.items():
        rows, *columns = module.weight.shape
        trained[f"{name}.lora_A.default.weight"] = torch.randn(RANK, *columns)
        trained[f"{name}.lora_B.default.weight"] = torch.randn(rows, RANK, *[1] * (len(columns) - 1))
    return trained


def kohya_name(layer: str) -> str:
    return f"lora_unet_{layer.replace('.', '_')}"


@pytest.mark.parametrize("name", list(COMFYUI))
def test_comfyui_has_every_layer_and_every_row(name: str) -> None:
    """None missing, none unexpected, with the shapes of its weights, whatever is adapted."""
    profile, expected = small(name), comfyui_layers(name)
    model = model_of(profile)
    modules, places = layers_of(model), comfyui_places(profile, model)
    assert places.keys() == modules.keys()
    file = comfyui_tensors(adapters(modules), places)
    assert file.keys() == {
        f"{kohya_name(layer)}.{end}" for layer in expected for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    for layer, (rows, *columns) in expected.items():
        down, up = (file[f"{kohya_name(layer)}.lora_{way}.weight"] for way in ("down", "up"))
        assert up.shape[0] == rows and list(down.shape[1:]) == columns
        assert up.shape[1] == down.shape[0] == int(file[f"{kohya_name(layer)}.alpha"])


# ---- the same change of the weights, by diffusers' own conversion of ComfyUI's names


class Checkpoint(dict[str, Tensor]):
    """ComfyUI's weights, as far as adapters change them, with anything in the place of the others."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__(weights)
        self.rows = {name.replace(".weight", ".bias"): weight.shape[0] for name, weight in weights.items()}

    def pop(self, key: str, *default: Any) -> Any:  # type: ignore[override]
        return super().pop(key, torch.zeros(self.rows.get(key, 6), 1))


def hunyuan(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """From ComfyUI's names by way of the published ones (its model_lora_keys_unet and supported_models say which)."""
    published = {
        "_attn.qkv": "_attn_qkv", "_attn.proj": "_attn_proj",
        "_mod.lin": "_mod.linear", "modulation.lin.": "modulation.linear.",
        "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2", "in_layer": "mlp.0", "out_layer": "mlp.2", "linear_in.": "lin.",
        "vector_in.mlp.0": "vector_in.in_layer", "vector_in.mlp.2": "vector_in.out_layer",
        "c_embedder.mlp.0": "c_embedder.linear_1", "c_embedder.mlp.2": "c_embedder.linear_2",
    }  # fmt: skip
    renamed = {}
    for name, tensor in checkpoint.items():
        for comfyui, original in published.items():
            name = name.replace(comfyui, original)
        renamed[name] = tensor
    return single_file_utils.convert_hunyuan_video_transformer_to_diffusers(renamed)


def change(down: Tensor, up: Tensor) -> Tensor:
    """What an adapter changes at its layer's output for one input: the change of a whole weight takes gigabytes."""
    columns = down[0].numel()
    probe = torch.randn(columns, generator=torch.Generator().manual_seed(columns))
    return up.flatten(1) @ (down.flatten(1) @ probe)


CONVERSIONS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "wan": single_file_utils.convert_wan_transformer_to_diffusers,
    "wan-vace": single_file_utils.convert_wan_transformer_to_diffusers,
    "ltx": single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
    "hunyuan-video": hunyuan,
    "mochi": single_file_utils.convert_mochi_transformer_checkpoint_to_diffusers,
    "flux": single_file_utils.convert_flux_transformer_checkpoint_to_diffusers,
    "chroma": single_file_utils.convert_chroma_transformer_checkpoint_to_diffusers,
    "lumina2": single_file_utils.convert_lumina2_to_diffusers,
    "flux2": single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
    "sd3": single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
    "z-image": single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
    "krea2": single_file_utils.convert_krea2_transformer_checkpoint_to_diffusers,
    "hidream": single_file_utils.convert_hidream_transformer_to_diffusers,
}
"""diffusers' reading of single files, by family."""


@pytest.mark.parametrize("name", [name for name in COMFYUI if lookup.model(name).family in CONVERSIONS])
def test_both_files_change_the_weights_alike(name: str) -> None:
    """Conversions move rows alone, so they can be given up-weights in the place of weights."""
    profile, expected = small(name), comfyui_layers(name)
    model = model_of(profile)
    trained = adapters(layers_of(model))
    file = comfyui_tensors(trained, comfyui_places(profile, model))
    ups = Checkpoint({f"{layer}.weight": file[f"{kohya_name(layer)}.lora_up.weight"] for layer in expected})
    downs = Checkpoint({  # each row of a down-weight with as many rows as its up-weight, so that both are moved alike
        f"{layer}.weight": torch.arange(len(expected))[number].expand(rows, 1).clone()
        for number, (layer, (rows, *_)) in enumerate(expected.items())
    })  # fmt: skip
    convert = CONVERSIONS[profile.family]
    rows_of, layer_of = convert(ups), convert(downs)
    names = list(expected)
    for part in (key for key in trained if ".lora_A." in key):
        weight = part.split(".lora_A.")[0] + ".weight"
        layer = names[int(layer_of[weight][0, 0])]
        found = change(file[f"{kohya_name(layer)}.lora_down.weight"], rows_of[weight])
        wanted = change(trained[part], trained[part.replace("lora_A", "lora_B")])
        torch.testing.assert_close(
            found, wanted, rtol=1e-4, atol=1e-3, msg=lambda text, weight=weight: f"{weight}: {text}"
        )


@pytest.mark.parametrize("name", ["flux.1-dev", "hunyuan-video", "z-image", "sd3.5-medium"])
def test_rows_of_layers_that_are_not_adapted_stay(name: str) -> None:
    """The usual targets leave out some of what is one layer in ComfyUI."""
    profile = small(name)
    model = model_of(profile)
    modules = {key: module for key, module in layers_of(model).items() if key.endswith(("to_q", "to_v"))}
    places = comfyui_places(profile, model)
    trained = adapters(modules)
    file = comfyui_tensors(trained, places)
    assert len(file) == 3 * len({places[key].layer for key in modules}) < 3 * len(modules)
    for key in modules:
        place = places[key]
        down, up = (file[f"{kohya_name(place.layer)}.lora_{way}.weight"] for way in ("down", "up"))
        assert up.shape == (place.rows, 2 * RANK)
        rows = slice(place.first_row, place.first_row + modules[key].weight.shape[0])
        wanted = change(trained[f"{key}.lora_A.default.weight"], trained[f"{key}.lora_B.default.weight"])
        torch.testing.assert_close(change(down, up)[rows], wanted, rtol=1e-4, atol=1e-3)
    adapted = torch.zeros(place.rows, dtype=torch.bool)
    for key in modules:
        if places[key].layer == place.layer:
            adapted[places[key].first_row : places[key].first_row + modules[key].weight.shape[0]] = True
    assert not up[~adapted].any() and up[adapted].any(dim=1).all()


# ---- files


def lora_job(profile: ModelProfile, **more: Any) -> Job:
    shape = {"frames": 9 if profile.kind == "video" else 1, "height": 64, "width": 64, "lora_rank": RANK}
    return Job(model=profile.name, lora_targets=profile.lora.targets, **shape, **more)


def trainee(profile: ModelProfile, job: Job) -> nn.Module:
    """The model that trains, with random adapters on its usual layers."""
    torch.manual_seed(0)
    model = step.build_model(profile, job, Strategy())
    placement.materialise(model, torch.device("cpu"), lambda _, weight: nn.init.normal_(weight))
    return model


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters() if ".lora_" in name}


def written(profile: ModelProfile, folder: Path) -> dict[str, Tensor]:
    """Writes the files of a model after 3 steps on 7 samples; its adapters."""
    model = trainee(profile, lora_job(profile))
    LoraFiles(profile, lora_job(profile), AT_RANK, 7, model).write(folder, trained_weights(model), 3)
    return trained_weights(model)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_diffusers_loads_every_adapter(name: str, tmp_path: Path) -> None:
    profile = tiny.profile(name)
    trained = written(profile, tmp_path)
    assert (tmp_path / "comfyui_lora.safetensors").is_file() == has_comfyui_model(profile)
    model = getattr(diffusers, profile.diffusers_class).from_config(profile.config)
    sampler = families.family(profile).sampler()
    kind = getattr(diffusers, sampler.pipeline) if sampler else None
    if hasattr(kind, "load_lora_weights"):
        load(sampler, profile.traits.part, model, tmp_path)
    elif hasattr(model, "load_lora_adapter"):
        model.load_lora_adapter(tmp_path / "pytorch_lora_weights.safetensors", prefix=profile.traits.part)
    else:
        assert profile.family == "easyanimate", "diffusers loads adapters of all others"
        return
    loaded = {key.replace(".default_0.", ".default."): p for key, p in model.named_parameters() if ".lora_" in key}
    added = loaded.keys() - trained.keys()  # WanLoraLoaderMixin gives I2V what a T2V file lacks, as zeros
    assert loaded.keys() >= trained.keys() and not any(loaded[key].any() for key in added)
    assert all("add_k_proj" in key or "add_v_proj" in key for key in added)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in trained.items())


def load(sampler: FamilyPipeline, part: str, model: nn.Module, folder: Path) -> None:
    """Loads a folder's LoRA into a family's pipeline that has nothing but its model."""
    import inspect

    kind = getattr(diffusers, sampler.pipeline)
    required = [
        key for key, value in inspect.signature(kind.__init__).parameters.items() if value.default is value.empty
    ]
    nothing = dict.fromkeys(set(required) - {"self", "kwargs"})
    kind(**{**nothing, **sampler.init, part: model}).load_lora_weights(folder)


def test_a_class_of_comfyui_without_a_layer_for_its_prompts_gets_no_file() -> None:
    """comfy/ldm/cosmos/predict2.py: Anima's class has none of Cosmos-Predict2.5's ``crossattn_proj``."""
    assert has_comfyui_model(lookup.model("anima"))
    assert not has_comfyui_model(lookup.model("cosmos-predict2.5-2b"))


def test_files_say_what_they_are_of(tmp_path: Path) -> None:
    profile = tiny.profile("wan2.1-t2v-1.3b")
    written(profile, tmp_path)
    for file in sorted(tmp_path.iterdir()):
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata()
        assert header["ss_network_dim"] == header["ss_network_alpha"] == str(RANK)
        assert (header["ss_base_model_version"], header["ss_num_train_items"]) == (profile.name, "7")
        assert (header["ss_steps"], header["vplan_version"]) == ("3", __version__)
        assert json.loads(header["vplan_training_law"]) == {"objective": "flow", "timestep_shift": 3.0}


def test_two_experts_get_files_of_their_own(tmp_path: Path) -> None:
    profile = tiny.profile("wan2.2-i2v-a14b")
    parts = ("transformer", "transformer_2")
    pair = nn.ModuleDict({part: trainee(profile, lora_job(profile)) for part in parts})
    one = trained_weights(pair["transformer"])
    LoraFiles(profile, lora_job(profile, experts="both"), AT_RANK, 7, pair).write(tmp_path, trained_weights(pair), 3)
    for part in parts:
        assert len(load_file(tmp_path / part / "comfyui_lora.safetensors")) == len(one) // 2 * 3
        assert load_file(tmp_path / part / "pytorch_lora_weights.safetensors").keys() == {
            f"transformer.{re.sub(r'.default', '', key)}" for key in one
        }


def test_a_layer_without_a_name_in_comfyui_is_refused_before_training() -> None:
    profile = tiny.profile("flux.1-dev")
    model = trainee(profile, lora_job(profile))
    attention = model.transformer_blocks[0].attn
    attention.to_new = copy.deepcopy(attention.to_q)
    with pytest.raises(VplanError, match=r"transformer_blocks\.0\.attn\.to_new cannot be written for ComfyUI"):
        LoraFiles(profile, lora_job(profile), AT_RANK, 7, model)


# ---- alpha, and files to begin with


def at_alpha(alpha: float) -> TrainingSettings:
    return TrainingSettings(lora_alpha=alpha)


def with_alpha(profile: ModelProfile, alpha: float | None, job: Job | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = step.build_model(profile, job or lora_job(profile), Strategy(weights_dtype="fp32"), lora_alpha=alpha)
    placement.materialise(model, torch.device("cpu"), lambda _, weight: nn.init.normal_(weight, std=0.1))
    return model.eval()


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "sdxl", "flux.1-dev"])
def test_alpha_scales_the_model_that_trains_and_what_either_file_makes_of_it(name: str, tmp_path: Path) -> None:
    profile = tiny.profile(name)
    model, alpha = with_alpha(profile, 5.0), 5.0
    LoraFiles(profile, lora_job(profile), at_alpha(alpha), 7, model).write(tmp_path, trained_weights(model), 3)
    with safe_open(tmp_path / "comfyui_lora.safetensors", framework="pt") as opened:
        assert opened.metadata()["ss_network_alpha"] == "5"
    layers = {key: module for key, module in model.named_modules() if hasattr(module, "lora_A")}
    places, file = comfyui_places(profile, model), load_file(tmp_path / "comfyui_lora.safetensors")
    plain = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    for key, module in layers.items():
        wanted = module.get_delta_weight("default")
        down, up = (plain[f"{profile.traits.part}.{key}.lora_{half}.weight"] for half in "AB")
        torch.testing.assert_close((up.flatten(1) @ down.flatten(1)).view_as(wanted), wanted, atol=1e-5, rtol=1e-4)
        kohya = kohya_name(places[key].layer)
        down, up = (file[f"{kohya}.lora_{way}.weight"] for way in ("down", "up"))
        changed = up.flatten(1) @ down.flatten(1) * float(file[f"{kohya}.alpha"]) / down.shape[0]
        if changed.shape[0] == wanted.shape[0] and not places[key].is_swapped:
            torch.testing.assert_close(changed.view_as(wanted), wanted, atol=1e-5, rtol=1e-4)


def test_a_pipeline_with_the_file_predicts_what_the_trained_model_does(tmp_path: Path) -> None:
    profile = tiny.profile("wan2.1-t2v-1.3b")
    model = with_alpha(profile, 1.0)
    LoraFiles(profile, lora_job(profile), at_alpha(1.0), 7, model).write(tmp_path, trained_weights(model), 3)
    plain = diffusers.WanTransformer3DModel.from_config(profile.config).eval()
    published = {
        key.replace(".base_layer", ""): value for key, value in model.state_dict().items() if "lora_" not in key
    }
    plain.load_state_dict(published)
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": None}
    pipe = diffusers.WanPipeline(transformer=plain, **parts)
    kind = families.family(profile)
    batch = kind.batch({**grid(profile, lora_job(profile)), "B": 1}, "cpu", torch.float32)
    inputs, _ = kind.inputs_and_target(batch)
    with torch.no_grad():
        trained, before = model(**inputs, return_dict=False)[0], plain(**inputs, return_dict=False)[0]
        pipe.load_lora_weights(tmp_path)
        loaded = pipe.transformer(**inputs, return_dict=False)[0]
    assert not torch.allclose(before, trained, atol=1e-3)
    torch.testing.assert_close(loaded, trained, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("wan2.1-t2v-1.3b", ()),
        ("sd1.5", ()),
        ("flux.1-dev", ()),
        ("flux.1-dev", ("norm_out.linear",)),  # the halves of its rows change places in ComfyUI's model
        ("mochi-1", ("ff.net.0.proj",)),
    ],
)
@pytest.mark.parametrize("file", ["pytorch_lora_weights.safetensors", "comfyui_lora.safetensors"])
def test_training_begins_as_a_file_of_either_form_ends(
    name: str, more: tuple[str, ...], file: str, tmp_path: Path
) -> None:
    profile = tiny.profile(name)
    asked = lora_job(profile).replace(lora_targets=(*profile.lora.targets, *more))
    before = with_alpha(profile, 5.0, asked)
    LoraFiles(profile, asked, at_alpha(5.0), 7, before).write(tmp_path, trained_weights(before), 3)
    job = asked.replace(lora_rank=RANK + 1)  # the rows that the file lacks begin as new ones
    after = step.build_model(profile, job, Strategy(weights_dtype="fp32"), lora_alpha=2.0)
    new = weights.fresh(0)
    begin = from_file(tmp_path / file, "", profile, job, at_alpha(2.0), after, new)

    def fill(key: str, weight: Tensor) -> None:
        begin(key, weight) if "lora_" in key else nn.init.zeros_(weight)

    placement.materialise(after, torch.device("cpu"), fill)
    layers = {key: module for key, module in after.named_modules() if hasattr(module, "lora_A")}
    assert layers
    for key, module in layers.items():
        wanted = before.get_submodule(key).get_delta_weight("default")
        torch.testing.assert_close(module.get_delta_weight("default"), wanted, atol=1e-5, rtol=1e-4)


def test_a_file_of_other_layers_or_of_a_higher_rank_is_refused(tmp_path: Path) -> None:
    profile = tiny.profile("wan2.1-t2v-1.3b")
    written(profile, tmp_path)
    file, new = tmp_path / "pytorch_lora_weights.safetensors", weights.fresh(0)
    for said, match in (
        ({"lora_targets": ("to_q",)}, "which is not one of the plan's"),
        ({"lora_targets": (*profile.lora.targets, "proj_out")}, r"lacks 1 of the plan's .* such as proj_out"),
    ):
        job = lora_job(profile).replace(**said)
        with pytest.raises(VplanError, match=match):
            from_file(file, "", profile, job, AT_RANK, step.build_model(profile, job, Strategy()), new)
    job = lora_job(profile).replace(lora_rank=1)
    model = step.build_model(profile, job, Strategy())
    begin = from_file(file, "", profile, job, AT_RANK, model, new)
    with pytest.raises(VplanError, match=f"has rank {RANK}, and the plan 1"):
        placement.materialise(
            model, torch.device("cpu"), lambda key, weight: begin(key, weight) if "lora_" in key else None
        )
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    for name in ("broken.safetensors", "nothing.safetensors"):
        with pytest.raises(VplanError, match=r"cannot be read|no \.safetensors file"):
            from_file(tmp_path / name, "", profile, job, AT_RANK, model, new)


def test_kaiming_begins_as_pefts_own_layers_do() -> None:
    weight, own = torch.empty(64, 320), nn.Linear(320, 64, bias=False).requires_grad_(False)
    weights.fresh(0, "kaiming")("x.lora_A.default.weight", weight)
    bound = float(own.weight.abs().max())
    assert float(weight.abs().max()) == pytest.approx(bound, rel=0.01)
    assert float(weight.std()) == pytest.approx(float(own.weight.std()), rel=0.02)


def test_the_files_can_be_read_like_any_other(tmp_path: Path) -> None:
    """safetensors' own ``save_file`` leaves files that their owner alone can read."""
    beside = tmp_path / "other"
    beside.write_text("")
    written(tiny.profile("sdxl"), tmp_path)
    assert {path.stat().st_mode for path in tmp_path.glob("*.safetensors")} == {beside.stat().st_mode}
