"""Ten families trained on one sample each: the error they reach, in diffusers' pipeline and by ComfyUI's key map.

    python -m tests.benchmarks.overfit FOLDER [MODEL ...] [--comfyui CHECKOUT] [--train-only] [--steps N]

A small transformer with random weights, LoRA on all its linear layers, is trained for 250 steps on one sample by the
training worker. Then the model's diffusers pipeline denoises from noise, and its result is compared with that sample
(mean squared error; the sample has variance 1): with the model as it was, with the LoRA file that `load_lora_weights`
read, and with the file for ComfyUI, whose changes of the weights ComfyUI's own code reads (`model_lora_keys_unet`,
`load_lora`, `calculate_weight` of a checkout, on its own model of that size) and diffusers' conversion of single files
brings to diffusers' names. Nothing of ComfyUI is run without --comfyui.

To compare with an earlier commit, copy this file into its tree, run it there with --train-only and another FOLDER, and
then here with that FOLDER: what is trained already is not trained again. Needs vplan[train]; ten minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK, RATE = 64, 3e-3
SOME = 20
"""Steps whose losses are averaged at either end."""
DENOISING_STEPS = 10

TEXT_TOKENS = 16
"""Of families whose captions may be so short."""

HEADS = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64}
"""More channels than a token has, so that noise can pass."""
ROPE = {"axes_dims_rope": [16, 24, 24]}
CONFIGS: dict[str, dict[str, Any]] = {
    "wan2.1-t2v-1.3b": {**HEADS, "ffn_dim": 256, "freq_dim": 64, "text_dim": 32},
    "cogvideox-2b": {**HEADS, "text_embed_dim": 32, "time_embed_dim": 64, "sample_height": 8, "sample_width": 8}
    | {"sample_frames": 5, "max_text_seq_length": TEXT_TOKENS},
    "hunyuan-video": {**HEADS, "num_refiner_layers": 1, "num_single_layers": 2, "rope_axes_dim": [16, 24, 24]}
    | {"text_embed_dim": 32, "pooled_projection_dim": 32},
    "ltx-video-2b": {**HEADS, "num_attention_heads": 4, "cross_attention_dim": 256, "caption_channels": 32},
    "mochi-1": {**HEADS, "text_embed_dim": 32, "pooled_projection_dim": 128, "time_embed_dim": 64},
    "flux.1-dev": {**HEADS, **ROPE, "num_single_layers": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32},
    "sd3.5-medium": {**HEADS, "caption_projection_dim": 128, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    | {"dual_attention_layers": [0]},
    "qwen-image": {**HEADS, **ROPE, "joint_attention_dim": 32},
    "sd1.5": {"block_out_channels": [32, 64, 64, 64], "attention_head_dim": 4, "cross_attention_dim": 32},
    "sdxl": {"block_out_channels": [32, 64, 64], "attention_head_dim": [2, 4, 4], "cross_attention_dim": 32}
    | {"transformer_layers_per_block": [1, 1, 2], "addition_time_embed_dim": 8}
    | {"projection_class_embeddings_input_dim": 1280 + 6 * 8},
}
"""What of the published configs becomes small."""

COMFYUI: dict[str, tuple[str, dict[str, Any]]] = {
    "wan2.1-t2v-1.3b": (
        "WAN21_T2V",
        {"image_model": "wan2.1", "model_type": "t2v", "dim": 128, "num_heads": 2, "ffn_dim": 256, "num_layers": 2}
        | {"freq_dim": 64, "text_dim": 32, "in_dim": 16, "out_dim": 16, "patch_size": (1, 2, 2)},
    ),
    "hunyuan-video": (
        "HunyuanVideo",
        {"image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "byt5": False}
        | {"vec_in_dim": 32, "context_in_dim": 32, "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2}
        | {"depth_single_blocks": 2, "axes_dim": [16, 24, 24], "theta": 256, "qkv_bias": True, "guidance_embed": True}
        | {"meanflow": False},
    ),
    "ltx-video-2b": (
        "LTXV",
        {"image_model": "ltxv", "num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 4}
        | {"cross_attention_dim": 256, "caption_channels": 32},
    ),
    "flux.1-dev": (
        "Flux",
        {"image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 32}
        | {"context_in_dim": 32, "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2}
        | {"depth_single_blocks": 2, "axes_dim": [16, 24, 24], "theta": 10000, "qkv_bias": True}
        | {"guidance_embed": True},
    ),
    "sd3.5-medium": (
        "SD3",
        {"in_channels": 16, "out_channels": 16, "patch_size": 2, "depth": 2, "input_size": None, "qk_norm": "rms"}
        | {"adm_in_channels": 32, "num_patches": 64, "pos_embed_max_size": 8, "x_block_self_attn_layers": [0]}
        | {"pos_embed_scaling_factor": None}
        | {
            "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 128}}
        },
    ),
    "qwen-image": (
        "QwenImage",
        {"image_model": "qwen_image", "in_channels": 64, "num_layers": 2, "num_attention_heads": 2}
        | {"attention_head_dim": 64, "joint_attention_dim": 32, "axes_dims_rope": (16, 24, 24)},
    ),
    "sd1.5": (
        "SD15",
        {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [2, 2, 2, 2]}
        | {"channel_mult": [1, 2, 2, 2], "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "num_heads": 4}
        | {"transformer_depth_output": [1] * 9 + [0] * 3, "transformer_depth_middle": 1, "context_dim": 32}
        | {"use_spatial_transformer": True, "legacy": False, "num_head_channels": -1, "adm_in_channels": None}
        | {"use_linear_in_transformer": False, "use_temporal_attention": False},
    ),
    "sdxl": (
        "SDXL",
        {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [2, 2, 2]}
        | {"channel_mult": [1, 2, 2], "transformer_depth": [0, 0, 1, 1, 2, 2], "num_head_channels": 16}
        | {"transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2], "transformer_depth_middle": 2, "context_dim": 32}
        | {"use_spatial_transformer": True, "legacy": False, "num_classes": "sequential", "adm_in_channels": 1328}
        | {"use_linear_in_transformer": True, "use_temporal_attention": False, "num_heads": -1},
    ),
}
"""The class of ComfyUI's `supported_models`, and the config that makes it the same size. CogVideoX has none, and
ComfyUI's Mochi (genmo/joint_model) takes no other width than the published one."""


class Overfitted:
    """One model, its sample, and what its training left, in a folder of their own."""

    def __init__(self, root: Path, name: str, steps: int) -> None:
        self.published, self.folder, self.output = name, root / name, root / name / "run"
        self.model, self.steps = f"overfit-{name}", steps

    def make(self) -> None:
        """Writes the transformer and its sample, and makes it known."""
        import diffusers
        import torch
        from safetensors.torch import save_file

        from planner.catalog import lookup
        from tests.trainers import runs

        published = lookup.model(self.published)
        torch.manual_seed(7)
        config = {**published.config, **CONFIGS[self.published]}
        transformer = getattr(diffusers, published.diffusers_class).from_config(config)
        transformer.save_pretrained(self.folder / "model" / published.traits.part)
        runs.keep(self.folder / "model", self.model)
        torch.manual_seed(3)
        batch = self.kind().batch(lookup.grid(self.profile(), self.job()), "cpu", torch.float32)
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        tensors = self.kind().cached_tensors(batch)
        tensors["latents"] = smooth(tensors["latents"])
        text = {name: tensors.pop(name).contiguous() for name in list(tensors) if name != "latents"}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, data / "one.latents.safetensors")
        save_file(text, data / "one.text.safetensors")
        shape = self.job().shapes[0]
        sample = runs.CachedSample(data / "one.latents.safetensors", data / "one.text.safetensors", shape)
        runs.write_entries(data / "entries.jsonl", [sample])

    def profile(self) -> Any:
        from planner.catalog import lookup

        return lookup.model(self.model)

    def kind(self) -> Any:
        from trainers.families import family

        return family(self.profile()).for_job(self.job())

    def job(self) -> Any:
        from planner.spec.job import Job

        profile = self.profile()
        frames = min(profile.shape.max_frames, profile.shape.frame_step + 1)
        shape = {"frames": frames, "height": 64, "width": 64}
        if self.published not in ("wan2.1-t2v-1.3b", "sd1.5", "sdxl"):
            shape["text_tokens"] = TEXT_TOKENS
        sample = {"validation": {"frames": frames, "height": 64, "width": 64, "cfg": False}}
        return Job.read({"model": self.model, **shape, **sample, "lora_rank": RANK, "lora_targets": self.layers()})

    def layers(self) -> list[str]:
        """All layers that both diffusers and ComfyUI adapt."""
        import diffusers
        from accelerate import init_empty_weights
        from torch import nn

        profile = self.profile()
        with init_empty_weights():
            model = getattr(diffusers, profile.diffusers_class).from_config(profile.config)
        return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]

    def train(self) -> None:
        """Trains; nothing where that is done."""
        from planner.launch.supported import supported_plan
        from planner.spec.job import Machine, Strategy
        from planner.spec.plan import Plan
        from tests.trainers import runs

        if (self.output / "final").is_dir():
            return
        plan = Plan(job=self.job(), strategy=Strategy.read(runs.PLAIN), machine=Machine(gpu="24GB", gpus=1))
        place = runs.Place.__new__(runs.Place)
        place.root, place.entries = self.folder, self.folder / "data" / "entries.jsonl"
        asked = {"steps": self.steps, "checkpoint_every": self.steps, "learning_rate": RATE}
        told = runs.train(place.request(self.output, supported_plan(plan, trained=True), **asked))
        assert told["outcome"] == "ok", told

    # ---- what came of it

    def losses(self) -> list[float]:
        from tests.trainers import runs

        return runs.losses(self.output)

    def plain(self) -> Any:
        """The transformer as it was before training."""
        import diffusers

        profile = self.profile()
        kind = getattr(diffusers, profile.diffusers_class)
        return kind.from_pretrained(self.folder / "model" / profile.traits.part).eval()

    def with_diffusers_file(self) -> Any:
        """The transformer with the LoRA that the pipeline's own `load_lora_weights` read, merged into its weights."""
        from tests.trainers.parallel.test_lora_files import load
        from trainers import families

        profile, model = self.profile(), self.plain()
        load(families.family(profile).sampler(), profile.traits.part, model, self.output / "final")
        model.fuse_lora()
        model.unload_lora()
        return model

    def with_comfyui_file(self, read: Callable[[str, Path], dict[str, Any]]) -> Any:
        """The transformer with the changes that ComfyUI makes of the other file, under diffusers' names."""
        import torch
        from safetensors.torch import load_file

        model, final = self.plain(), self.output / "final"
        weights = dict(model.named_parameters())
        # ComfyUI's table of UNets has other models' names for some layers too
        changes = {key: one for key, one in read(self.published, final / "comfyui_lora.safetensors").items()
                   if key in weights}  # fmt: skip
        # The text's half of a last block may reach no output: its adapters stay 0.
        trained = load_file(final / "pytorch_lora_weights.safetensors").items()
        assert len(changes) == sum(bool(up.any()) for name, up in trained if name.endswith(".lora_B.weight"))
        for name, change in changes.items():
            with torch.no_grad():
                assert weights[name].shape == change.shape, name
                weights[name] += change
        return model

    def error(self, model: Any) -> float:
        """Mean squared error of what the pipeline denoises, with the sample's caption and without guidance."""
        import torch
        from safetensors.torch import load_file

        from planner.spec.job import Strategy
        from tests.trainers import runs
        from trainers.sampling import pipelines, validate

        profile, job, kind = self.profile(), self.job(), self.kind()
        text = load_file(self.folder / "data" / "one.text.safetensors")
        wanted = load_file(self.folder / "data" / "one.latents.safetensors")["latents"]
        sampler, shape = pipelines.sampler_of(kind, profile), pipelines.shape_of(job)
        parts = {"vae": validate.random_vae(profile, Strategy.read({**runs.PLAIN, "vae_dtype": "fp32"}))}
        parts["scheduler"] = pipelines.scheduler(profile, sampler, shape, None)
        inputs = pipelines.SampleInputs(prompt=text, steps=DENOISING_STEPS, guidance=None)
        parts |= pipelines.guider(sampler, job, inputs)
        pipe = pipelines.pipeline(sampler, {profile.traits.part: model}, torch.device("cpu"), parts, None)
        call = {**pipelines.arguments(kind, sampler, job, inputs, shape), "output_type": "latent"}
        with torch.no_grad():
            output = pipe(**pipelines.accepted(pipe, call))
        found = (output.frames if hasattr(output, "frames") else output.images).float()
        return float((as_cached(found, wanted, profile) - wanted.float()).pow(2).mean())


def smooth(latents: Any) -> Any:
    """A sample that a small model can learn: mostly one vector in all places, with variance 1."""
    one_place = latents[:1] if latents.ndim == 2 else latents[(slice(None), *[slice(0, 1)] * (latents.ndim - 1))]
    mixed = one_place + 0.3 * latents
    return mixed / mixed.pow(2).mean().sqrt()


def as_cached(found: Any, wanted: Any, profile: Any) -> Any:
    """A pipeline's latents in the form in which a sample is cached."""
    found = found[0]
    if found.shape == wanted.shape:
        return found
    if profile.family == "ltx":  # packed: tokens, channels
        return found.transpose(0, 1).reshape(wanted.shape)
    if profile.family == "cogvideox":
        return found.transpose(0, 1)
    if profile.family == "qwen-image":  # tokens in one row
        return found.reshape(wanted.shape)
    raise AssertionError((found.shape, wanted.shape))


# ---- ComfyUI


def comfyui_reader(checkout: Path) -> Callable[[str, Path], dict[str, Any]]:
    """What a LoRA file changes in a model, by diffusers' names, as ComfyUI's own code reads and applies it."""
    import torch
    from safetensors.torch import load_file

    from planner.catalog import lookup
    from tests.trainers.parallel.test_lora_files import CONVERSIONS

    sys.path.insert(0, str(checkout))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True  # before anything looks for a GPU
    import comfy.lora
    import comfy.lora_convert
    import comfy.supported_models
    import comfy.utils

    def read(name: str, file: Path) -> dict[str, Any]:
        kind, config = COMFYUI[name]
        made = getattr(comfy.supported_models, kind)({**config, "dtype": torch.float32})
        made.custom_operations = comfy.ops.disable_weight_init
        model = made.get_model({}, "", device=torch.device("cpu"))
        keys = comfy.lora.model_lora_keys_unet(model, {})
        lora = comfy.lora_convert.convert_lora(load_file(file))
        patches = comfy.lora.load_lora(lora, keys)
        layers = {key.rsplit(".", 2 if ".lora_" in key else 1)[0] for key in lora}
        print(f"{name}: ComfyUI loads {len(patches)} of {len(layers)} adapters", file=sys.stderr)
        assert len(patches) == len(layers)
        shapes = {key: weight.shape for key, weight in model.state_dict().items()}
        changes = {
            key: comfy.lora.calculate_weight([(1.0, patch, 1.0, None, None)], torch.zeros(shapes[key]), key)
            for key, patch in patches.items()
        }
        changes = {key.removeprefix("diffusion_model."): change for key, change in changes.items()}
        if name in OWN_MAPS:
            return by_own_map(getattr(comfy.utils, OWN_MAPS[name])(made.unet_config), changes)
        whole = {key.removeprefix("diffusion_model."): torch.zeros(shape) for key, shape in shapes.items()}
        whole |= changes
        family = lookup.model(name).family
        single = single_blocks(whole) if family == "hunyuan-video" else {}
        converted = {**(CONVERSIONS[family](whole) if family in CONVERSIONS else whole), **single}
        return {key: change for key, change in converted.items() if change.any()}

    return read


OWN_MAPS = {"flux.1-dev": "flux_to_diffusers", "sd3.5-medium": "mmdit_to_diffusers"}
OWN_MAPS |= dict.fromkeys(("sd1.5", "sdxl"), "unet_to_diffusers")
"""ComfyUI's own tables of diffusers' names, by function of `comfy.utils`."""


def by_own_map(names: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes by diffusers' names; a name may be some rows of a weight, whose halves may change places."""
    found = {}
    for name, place in names.items():
        key, rows, *swap = (place, None) if isinstance(place, str) else place
        if key in changes and name.endswith(".weight"):
            change = changes[key] if rows is None else changes[key].narrow(*rows)
            found[name] = swap[0](change) if swap else change
    return found


def single_blocks(whole: dict[str, Any]) -> dict[str, Any]:
    """Takes HunyuanVideo's first layers of single blocks out of a checkpoint: diffusers knows their published width
    alone."""
    found = {}
    for key in [key for key in whole if key.startswith("single_blocks.") and ".linear1." in key]:
        layer = whole.pop(key)
        width = whole[
            key.replace("linear1.weight", "modulation.lin.bias").replace("linear1.bias", "modulation.lin.bias")
        ]
        width = width.shape[0] // 3
        _, number, _, kind = key.split(".")
        parts = layer.split([width] * 3 + [layer.shape[0] - 3 * width])
        for part, rows in zip(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), parts, strict=True):
            found[f"single_transformer_blocks.{number}.{part}.{kind}"] = rows
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--comfyui", type=Path)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--train-only", action="store_true")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    os.environ["VPLAN_HOME"] = str(folder / "home")
    import torch

    torch.set_num_threads(1)
    read = comfyui_reader(asked.comfyui) if asked.comfyui else None
    print(f"{'model':<16} {'first':>7} {'last':>7}  {'error: before':>13} {'diffusers':>10} {'ComfyUI':>10}")
    for name in asked.models or CONFIGS:
        one = Overfitted(folder, name, asked.steps)
        if not one.output.is_dir():
            one.make()
        one.train()
        losses = one.losses()
        row = f"{name:<16} {statistics.mean(losses[:SOME]):7.4f} {statistics.mean(losses[-SOME:]):7.4f}"
        if not asked.train_only:
            row += f"  {one.error(one.plain()):13.4f} {one.error(one.with_diffusers_file()):10.6f}"
            row += f" {one.error(one.with_comfyui_file(read)):10.6f}" if read and name in COMFYUI else f" {'-':>10}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
