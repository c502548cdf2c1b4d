"""trainers/step/step.py on the CPU: tiny models of all families are built as diffusers loads them, and learn a real
step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import profiles
from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.spec.job import Job, Strategy
from tests.covering import in_turns
from trainers import families
from trainers.families import family
from trainers.recording.tapes import shallow_config
from trainers.step import placement, step
from trainers.step.optimizers import make_optimizer

GRID = {"B": 2, "F": 3, "H": 4, "W": 4, "T": 6, "R": 4, "E": 5}
FLUX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "joint_attention_dim": 8,
    "pooled_projection_dim": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "axes_dims_rope": [4, 6, 6],
}
QWEN = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "joint_attention_dim": 8,
    "num_layers": 2,
    "axes_dims_rope": [4, 6, 6],
}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "freq_dim": 16,
    "text_dim": 8,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
WAN_WITH_IMAGE = {**WAN, "added_kv_proj_dim": 24, "image_dim": 8}
COGVIDEOX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_embed_dim": 8,
    "time_embed_dim": 8,
    "max_text_seq_length": 6,
    "num_layers": 3,
    "sample_height": 8,
    "sample_width": 8,
    "sample_frames": 9,
}
TINY: dict[str, dict[str, Any]] = {
    "wan2.1-t2v-1.3b": WAN,
    "wan2.1-i2v-14b-480p": WAN_WITH_IMAGE,
    "skyreels-v2-i2v-1.3b": WAN_WITH_IMAGE,
    "skyreels-v2-df-14b": WAN,
    "skyreels-v2-df-1.3b": WAN,
    "cogvideox-2b": COGVIDEOX,
    "cogvideox-5b": COGVIDEOX,
    "wan2.2-ti2v-5b": WAN,
    "wan2.1-vace-1.3b": {**WAN, "vace_layers": [0, 2]},
    "wan2.2-animate-14b": {
        **WAN_WITH_IMAGE,
        "num_layers": 4,
        "motion_encoder_size": 8,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8},
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
    },
    "cogvideox-5b-i2v": COGVIDEOX,
    "cogvideox1.5-5b-i2v": {**COGVIDEOX, "ofs_embed_dim": 8},
    "ltx-video-2b": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 8,
        "num_layers": 3,
    },
    "hunyuan-video": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "text_embed_dim": 8,
        "pooled_projection_dim": 8,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "rope_axes_dim": [4, 6, 6],
    },
    "framepack": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "text_embed_dim": 8,
        "pooled_projection_dim": 8,
        "image_proj_dim": 8,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "rope_axes_dim": [4, 6, 6],
    },
    "flux.1-dev": FLUX,
    "sd3.5-medium": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "caption_projection_dim": 32,
        "joint_attention_dim": 8,
        "pooled_projection_dim": 8,
        "num_layers": 3,
        "dual_attention_layers": [0],
        "pos_embed_max_size": 16,
        "sample_size": 8,
    },
    "mochi-1": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "pooled_projection_dim": 8,
        "text_embed_dim": 16,
        "time_embed_dim": 8,
        "num_layers": 3,
    },
    "easyanimate-v5.1-7b": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "text_embed_dim": 8,
        "time_embed_dim": 8,
        "num_layers": 3,
        "mmdit_layers": 2,
    },
    "hunyuan-video-1.5": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "text_embed_dim": 8,
        "text_embed_2_dim": 8,
        "image_embed_dim": 8,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "rope_axes_dim": [4, 6, 6],
    },
    "ltx-2": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "caption_channels": 8,
        "num_layers": 3,
    },
    "ltx-2.5": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 3,
    },
    "minimax-h3": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "hidden_size": 24,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "ffn_dim": 32,
        "text_dim": 8,
        "time_embed_hidden_dim": 24,
        "time_embed_dim": 16,
        "rope_freq_dim": 2,
    },
    "sd1.5": {
        "block_out_channels": [8, 16],
        "attention_head_dim": 2,
        "cross_attention_dim": 8,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    },
    "sd2.1": {
        "block_out_channels": [8, 16],
        "attention_head_dim": [1, 2],
        "cross_attention_dim": 8,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    },
    "latentsync-1.6-stage1": {
        "block_out_channels": [8, 16],
        "attention_head_dim": 2,
        "cross_attention_dim": 8,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    },
    "qwen-image": QWEN,
    "qwen-image-edit": QWEN,
    "flux.1-kontext-dev": FLUX,
    "flux.2-dev": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 8,
        "num_layers": 2,
        "num_single_layers": 2,
        "axes_dims_rope": [4, 4, 4, 4],
    },
    "flux.3": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 8,
        "num_layers": 2,
        "num_single_layers": 2,
        "axes_dims_rope": [4, 4, 4, 4],
    },
    "z-image": {
        "dim": 32,
        "n_heads": 2,
        "n_kv_heads": 2,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "cap_feat_dim": 8,
        "axes_dims": [4, 6, 6],
        "axes_lens": [128, 16, 16],
    },
    "hunyuan-image-2.1": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "rope_axes_dim": [8, 8],
        "text_embed_dim": 8,
        "text_embed_2_dim": 8,
    },
    "qwen-image-2.1": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "context_in_dim": 8,
        "num_layers": 2,
        "axes_dims_rope": [4, 6, 6],
    },
    "qwen-image-layered": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 8,
        "num_layers": 2,
        "axes_dims_rope": [4, 6, 6],
    },
    "longcat-image": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 8,
        "axes_dims_rope": [4, 6, 6],
    },
    "hidream-i1": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "axes_dims_rope": [4, 6, 6],
        "caption_channels": [8, 8],
        "text_emb_dim": 8,
        "llama_layers": [0, 1, 2, 2],
    },
    "ernie-image": {
        "num_attention_heads": 2,
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 32,
        "rope_axes_dim": [4, 6, 6],
        "text_in_dim": 8,
    },
    "ideogram-4": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "intermediate_size": 32,
        "adaln_dim": 8,
        "llm_features_dim": 16,
        "mrope_section": [4, 2, 2],
    },
    "chroma1-hd": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 8,
        "axes_dims_rope": [4, 6, 6],
        "approximator_hidden_dim": 16,
        "approximator_layers": 2,
    },
    "anima": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "text_embed_dim": 8,
        "adaln_lora_dim": 4,
    },
    "sana-1.6b": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 8,
    },
    "cosmos-predict2.5-2b": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "text_embed_dim": 8,
        "adaln_lora_dim": 4,
        "crossattn_proj_in_channels": 8,
        "encoder_hidden_states_channels": 8,
    },
    "sana-video-2b": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 24,
        "caption_channels": 8,
    },
    "kandinsky-5.0-i2v-lite": {
        "time_dim": 8,
        "model_dim": 16,
        "ff_dim": 16,
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
        "axes_dims": [4, 2, 2],
        "in_text_dim": 8,
        "in_text_dim2": 8,
    },
    "lumina-image-2.0": {
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "hidden_size": 24,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "cap_feat_dim": 8,
        "axes_dim_rope": [4, 4, 4],
        "multiple_of": 8,
    },
    "krea-2": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_head_dim": 16,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_text_layers": 2,
        "text_hidden_dim": 8,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": [4, 6, 6],
    },
}
MODELS = list(TINY)
METHODS = ["lora", "full"]
EACH = pytest.mark.parametrize("name", MODELS)
IN_BLOCKS = [name for name in MODELS if lookup.model(name).family != "unet"]
"""A UNet checkpoints the resnets and attentions inside its blocks, not the blocks."""
BLOCKS = pytest.mark.parametrize("name", IN_BLOCKS)


def tiny(name: str) -> ModelProfile:
    """Few channels and blocks; and few tokens where a family fixes how many there are."""
    profile = lookup.model(name)
    few = {key: GRID["T"] if key.endswith("_tokens") else value for key, value in profile.inputs.items()}
    shape = profile.shape.replace(text_tokens=GRID["T"])
    return profile.replace(config={**profile.config, **TINY[name]}, inputs=few, shape=shape)


def grid(profile: ModelProfile) -> dict[str, int]:
    """A shape the family takes: text as long as its tables, one frame for images. A UNet's is counted in eights of
    latents, which are enough for two levels."""
    few = {"H": 1, "W": 1} if profile.family == "unet" else {}
    return {**GRID, **few, **family(profile).fixed}


def job(profile: ModelProfile, method: str = "lora") -> Job:
    return Job(
        model=profile.name, method=method, lora_rank=4, lora_targets=profile.lora.targets, frames=1, height=64, width=64
    )


def built(profile: ModelProfile, method: str, seed: int = 0, **strategy: object) -> tuple[step.Trainee, Strategy]:
    """A trainee with real random weights; every parameter small, so that a loss stays finite."""
    chosen = Strategy.read({"weights_dtype": "fp32", **strategy})
    model = step.build_model(profile, job(profile, method), chosen)
    placement.materialise(model, "cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return step.Trainee(model, step.trainable_parameters(model)), chosen


def batch(profile: ModelProfile, strategy: Strategy, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return family(profile).batch(grid(profile), "cpu", step.compute_dtype(strategy))


def test_the_tiny_models_are_of_all_families() -> None:
    named = {families.file_of(lookup.model(name)) for name in MODELS}
    assert named | {"any_class"} == set(families.files())  # which has tests of its own


def test_a_table_that_fsdp2_has_put_on_the_gpu_is_not_copied_again() -> None:
    """Meta stands for the GPU, which ``fully_shard`` moves tables to. On the CPU a table is copied, so that a recorder
    sees it allocated."""
    model = torch.nn.Module()
    moved, waiting = torch.empty(8, device="meta"), torch.zeros(8)
    model.register_buffer("moved", moved)
    model.register_buffer("waiting", waiting)
    placement.materialise(model, "cpu")
    assert model.moved is moved
    assert model.waiting is not waiting and model.waiting.is_cpu


@pytest.mark.parametrize("name", profiles.model_names())
def test_the_profile_names_the_tables_that_a_checkpoint_holds(name: str) -> None:
    profile = lookup.model(name)
    small = {key: 8 for key in ("pos_embed_max_size", "sample_height", "sample_width") if key in profile.config}
    model = step.build_model(profile, job(profile, "full"), Strategy(), {**shallow_config(profile, 1), **small})
    parameters = {parameter for parameter, _ in model.named_parameters()}
    tables = {table for table, values in model.named_buffers() if values.is_floating_point()}
    assert set(profile.traits.saved_tables) == tables & model.state_dict().keys() - parameters


def test_inputs_have_the_format_that_weights_have_when_they_are_used() -> None:
    stored = {"weights_dtype": "fp32", "autocast": "none"}
    assert step.compute_dtype(Strategy(**stored)) is torch.float32
    assert step.compute_dtype(Strategy(**stored, sharding="fsdp")) is torch.bfloat16  # as FSDP2 gathers them
    assert step.compute_dtype(Strategy(**stored, sharding="fsdp", compute_dtype="fp32")) is torch.float32
    assert step.compute_dtype(Strategy(weights_dtype="fp32")) is torch.bfloat16
    assert step.compute_dtype(Strategy(weights_dtype="nf4", autocast="none")) is torch.bfloat16


@EACH
def test_the_meta_build_has_the_dtypes_and_tables_that_from_pretrained_gives(name: str, tmp_path: Path) -> None:
    """Tables are not on meta: nobody would fill them in. In bytes they are at most what diffusers has."""
    profile = tiny(name)
    model_class = getattr(diffusers, profile.diffusers_class)
    model_class.from_config(profile.config).save_pretrained(tmp_path)
    for dtype in ("bf16", "fp32"):
        loaded = model_class.from_pretrained(tmp_path, torch_dtype=step.DTYPES[dtype])
        ours = step.build_model(profile, job(profile, "full"), Strategy(weights_dtype=dtype))
        assert dtypes(ours.named_parameters()) == dtypes(loaded.named_parameters())
        assert shapes(ours.named_parameters()) == shapes(loaded.named_parameters())
        assert all(parameter.is_meta for parameter in ours.parameters())
    tables, theirs = dict(ours.named_buffers()), dict(loaded.named_buffers())
    assert tables.keys() == theirs.keys()
    for key, table in tables.items():
        assert table.element_size() <= theirs[key].element_size()
        assert torch.allclose(table.double(), theirs[key].double(), atol=1e-5)


def dtypes(tensors: Any) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors}


def shapes(tensors: Any) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors}


@pytest.mark.parametrize(("name", "dtype"), in_turns(MODELS, ["bf16", "fp32"]))
def test_lora_trains_its_adapter_and_nothing_else(name: str, dtype: str) -> None:
    profile = tiny(name)
    trainee, _ = built(profile, "lora", weights_dtype="bf16", adapter_dtype=dtype)
    assert trainee.trainable
    assert all("lora_" in key for key in trainee.trainable)
    assert {parameter.dtype for parameter in trainee.trainable.values()} == {step.DTYPES[dtype]}
    assert not any("lora_" in key for key, p in trainee.model.named_parameters() if not p.requires_grad)


@pytest.mark.parametrize(("name", "method", "autocast"), in_turns(MODELS, METHODS, ["none", "bf16"]))
def test_a_real_step_has_a_finite_loss_and_moves_every_trained_weight(name: str, method: str, autocast: str) -> None:
    """But for those that its family says no gradient reaches."""
    profile = tiny(name)
    trainee, strategy = built(profile, method, autocast=autocast)
    trainee.optimizer = make_optimizer(trainee.trainable, strategy)
    before = {key: parameter.detach().clone() for key, parameter in trainee.model.named_parameters()}
    losses = [step.accumulated_step(trainee, family(profile), [batch(profile, strategy)], strategy) for _ in range(2)]
    assert all(loss.isfinite() and loss > 0 and not loss.requires_grad for loss in losses)
    after = dict(trainee.model.named_parameters())
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    kind = family(profile)
    idle = {key for key in trainee.trainable if kind.without_gradient(key, profile.blocks)}
    assert moved == trainee.trainable.keys() - idle
    assert all(parameter.grad is None for parameter in after.values())


def gradients(profile: ModelProfile, method: str, **strategy: object) -> tuple[float, dict[str, torch.Tensor]]:
    trainee, chosen = built(profile, method, **strategy)
    data = batch(profile, chosen)
    torch.manual_seed(2)
    loss = step.forward(trainee, family(profile), data, chosen)
    loss.backward()
    return loss.item(), {key: parameter.grad for key, parameter in trainee.trainable.items()}


MODES = [[("full", None), ("partial", 1)], [("partial", 2), ("offload", None)]]


@pytest.mark.parametrize(("name", "method", "modes"), in_turns(MODELS, METHODS, MODES), ids=str)
def test_checkpointing_changes_no_gradient(name: str, method: str, modes: list[tuple[str, int | None]]) -> None:
    profile = tiny(name)
    loss, expected = gradients(profile, method, autocast="none")
    for mode, blocks in modes:
        found_loss, found = gradients(
            profile, method, autocast="none", gradient_checkpointing=mode, checkpointed_blocks=blocks
        )
        assert found_loss == loss
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            assert (gradient is None and found[key] is None) or torch.equal(gradient, found[key]), (mode, key)


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether the same parameters have gradients, of the same numbers bit by bit."""
    return found.keys() == expected.keys() and all(
        found[key] is None if gradient is None else torch.equal(gradient, found[key])
        for key, gradient in expected.items()
    )


@pytest.mark.parametrize(("name", "weights"), in_turns(MODELS, ["bf16", "fp32"]))
def test_adapters_that_share_their_inputs_learn_the_same_to_the_bit(name: str, weights: str) -> None:
    profile = tiny(name)
    how = {"weights_dtype": weights, "autocast": "bf16", "gradient_checkpointing": "full"}
    (loss, expected), (found_loss, found) = (
        gradients(profile, "lora", **how, adapter_inputs=inputs) for inputs in ("cast", "shared")
    )
    assert found_loss == loss and any(gradient is not None and gradient.any() for gradient in expected.values())
    assert same_bits(found, expected)


@EACH
def test_adapters_that_share_their_inputs_keep_no_copy_of_them(name: str) -> None:
    """Beside a frozen base each adapted layer's input is kept once, for the adapter; queries, keys and values of an
    attention read the same one."""
    kept = {
        inputs: saved_bytes(tiny(name), "lora", weights_dtype="bf16", autocast="bf16", adapter_inputs=inputs)
        for inputs in ("cast", "shared")
    }
    assert kept["shared"] < kept["cast"]


NESTED = [name for name in MODELS if not lookup.model(name).traits.stages]


@pytest.mark.parametrize(("name", "method"), in_turns(NESTED, METHODS))
def test_nested_checkpoints_learn_the_same_to_the_bit(name: str, method: str) -> None:
    profile = tiny(name)
    loss, expected = gradients(profile, method, autocast="bf16")
    for mode in ("full", "offload"):
        found_loss, found = gradients(
            profile, method, autocast="bf16", gradient_checkpointing=mode, nested_checkpointing=True
        )
        assert found_loss == loss
        assert same_bits(found, expected), mode


@pytest.mark.parametrize("name", NESTED)
def test_nested_checkpoints_run_attentions_and_feed_forwards_once_more(name: str) -> None:
    """Three times each: forward, in their block's recomputation, and in their own. Without gradients once."""
    profile = tiny(name)
    trainee, strategy = built(
        profile, "lora", weights_dtype="bf16", gradient_checkpointing="full", nested_checkpointing=True
    )
    runs: dict[nn.Module, int] = {}
    layers = {part: next(one for one in part.modules() if isinstance(one, nn.Linear)) for part in parts_of(trainee)}
    for part, layer in layers.items():
        layer.register_forward_hook(lambda *_, part=part: runs.update({part: runs.get(part, 0) + 1}))
    loss = step.forward(trainee, family(profile), batch(profile, strategy), strategy)
    once = dict(runs)
    loss.backward()
    # What gives nothing to the loss is not gone back through: the last block's text, say.
    assert once and all(runs[part] <= 3 * calls for part, calls in once.items())
    assert sum(runs[part] == 3 * calls for part, calls in once.items()) > len(once) / 2
    runs.clear()
    step.sample_forward(trainee, family(profile), batch(profile, strategy), strategy)
    assert runs == once


def parts_of(trainee: step.Trainee) -> list[nn.Module]:
    """Attentions and feed-forwards, wherever they are."""
    return [part for part in trainee.model.modules() if part.__dict__.get("forward") is not None]


def test_blocks_without_parts_are_not_nested() -> None:
    profile = tiny("sd1.5")
    with pytest.raises(VplanError, match="no attention or feed-forward of their own"):
        built(profile, "lora", gradient_checkpointing="full", nested_checkpointing=True)


@pytest.mark.parametrize(("name", "mode"), in_turns(IN_BLOCKS, ["full", "partial"]))
def test_checkpointing_runs_blocks_again_in_the_order_they_ran(name: str, mode: str) -> None:
    """Every block twice under full, the first only under partial."""
    profile, limit = tiny(name), 1 if mode == "partial" else None
    trainee, strategy = built(profile, "full", autocast="none", gradient_checkpointing=mode, checkpointed_blocks=limit)
    runs: list[str] = []
    lists = [stack.list for stack in profile.stacks]
    for listed in lists:
        for index, block in enumerate(trainee.model.get_submodule(listed).children()):
            block.register_forward_pre_hook(lambda *_, key=f"{listed}.{index}": runs.append(key))
    step.forward(trainee, family(profile), batch(profile, strategy), strategy).backward()
    again = {key for key in runs if runs.count(key) == 2}
    assert again == (set(runs) if limit is None else {runs[0]})


def saved_bytes(profile: ModelProfile, method: str = "full", **strategy: object) -> int:
    """What autograd keeps between forward and backward, weights and each storage once."""
    trainee, chosen = built(profile, method, **{"autocast": "none", **strategy})
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step.forward(trainee, family(profile), batch(profile, chosen), chosen)
    assert loss.requires_grad
    return sum(storages.values())


@EACH
def test_checkpointing_keeps_less(name: str) -> None:
    profile = tiny(name)
    none, partial, full = (
        saved_bytes(profile, gradient_checkpointing=mode, checkpointed_blocks=1 if mode == "partial" else None)
        for mode in ("none", "partial", "full")
    )
    assert full < partial < none


@pytest.mark.parametrize("how", ["foreach", "loop", "fused"])
def test_the_ways_of_an_optimizer_step_agree(how: str) -> None:
    profile = tiny("wan2.1-t2v-1.3b")
    results = []
    for chosen in ("foreach", how):
        trainee, strategy = built(profile, "lora", autocast="none", optimizer_step=chosen)
        trainee.optimizer = make_optimizer(trainee.trainable, strategy)
        data = batch(profile, strategy)
        torch.manual_seed(3)
        step.accumulated_step(trainee, family(profile), [data], strategy)
        results.append(torch.cat([parameter.detach().flatten() for parameter in trainee.trainable.values()]))
    assert torch.allclose(*results, atol=1e-6)


def test_what_cannot_be_built_is_refused_by_name() -> None:
    with pytest.raises(VplanError, match="weights_dtype int4"):
        built(tiny("wan2.1-t2v-1.3b"), "lora", weights_dtype="int4")


@pytest.mark.parametrize("name", [*MODELS, "ltx-video-13b", "easyanimate-v5.1-12b"])
def test_a_published_model_has_the_parameters_its_profile_says(name: str) -> None:
    profile = lookup.model(name)
    config = dict(profile.config)
    if "pos_embed_max_size" in config:  # the table of positions is no parameter, and takes 20 s to compute
        config["pos_embed_max_size"] = 8
    model = step.build_model(profile, job(profile, "full"), Strategy(weights_dtype="bf16"), config)
    assert sum(parameter.numel() for parameter in model.parameters()) == profile.parameters
