"""Tiny diffusers folders with random weights, and short real videos, for tests of data, caching and training."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile

WORDS = ("<pad>", "</s>", "<unk>", "a", "cat", "dog", "runs", "sits", "red", "blue")


def write_video(
    path: Path, frames: int = 9, height: int = 48, width: int = 64, fps: int = 16, blue: int = 0, *, tone: int = 0
) -> Path:
    """A clip whose frames differ, encoded for real; with a tone of so many hertz for its sound."""
    with av.open(str(path), "w") as container:
        heard = container.add_stream("aac", rate=16_000, layout="mono") if tone else None
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture = numpy.zeros((height, width, 3), numpy.uint8)
            picture[..., 0] = 255 * number // max(1, frames - 1)  # red tells the frame
            picture[: height // 2, :, 1] = 200
            picture[..., 2] = blue
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
        if heard is not None:
            waves = numpy.sin(numpy.arange(16_000 * frames // fps) * 2 * numpy.pi * tone / 16_000).astype(numpy.float32)
            said = av.AudioFrame.from_ndarray(waves[None], format="fltp", layout="mono")
            said.sample_rate = 16_000
            container.mux([*heard.encode(said), *heard.encode()])
    return path


def write_image(path: Path, height: int = 48, width: int = 64) -> Path:
    Image.fromarray(numpy.tile(numpy.arange(width, dtype=numpy.uint8)[None, :, None], (height, 1, 3))).save(path)
    return path


def write_clips(folder: Path, count: int = 3, **shape: int) -> Path:
    """So many videos with captions beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        usual = {"frames": 9 + number, "blue": 40 * number % 250, "tone": 200 * (1 + number)}
        write_video(folder / f"{number}.mp4", **{**usual, **shape})
        (folder / f"{number}.txt").write_text(f"a {WORDS[3 + number % 7]} cat")
    return folder


def write_pairs(folder: Path, count: int = 2, frames: int = 9) -> Path:
    """So many clips, each with the image it was made from and the video that steers it, in a table."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        write_video(folder / f"{number}.mp4", frames, blue=90 * number)
        write_video(folder / f"steers-{number}.mp4", frames, blue=30 * number)
        write_image(folder / f"before-{number}.png", 40 + number, 64)
        row = {"file_name": f"{number}.mp4", "text": "a red cat", "reference_file_name": f"before-{number}.png"}
        rows.append({**row, "control_file_name": f"steers-{number}.mp4"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


TEMPLATE = ("<|im_start|>", "<|im_end|>", "\n")
"""Of Krea 2's template, whose end is cut into as many tokens as Qwen's tokenizer makes of it."""


SYSTEM_MESSAGE = r"{{ '<|im_start|>system\n' + messages[0]['content'][0]['text'] + '<|im_end|>\n' }}"
"""Which Qwen-Image-2.1 cuts off, as many words as the template makes of it."""


def tokenizer(length: int = 512, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
        additional_special_tokens=list(special),
        # HunyuanVideo 1.5 cuts off as many tokens as its own system message has
        chat_template="{% if messages[0]['role'] == 'system' %}" + "a " * 108 + "{% endif %}"
        "{% set said = messages[-1]['content'] %}"
        "{{ said if said is string else said[0]['text'] }} a </s>",
    )


def text_encoder(kind: str, width: int) -> torch.nn.Module:
    """A text encoder of two layers (of three, for those whose last but two is taken)."""
    import diffusers
    import transformers

    words = {"vocab_size": len(WORDS) + len(TEMPLATE), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    llm = {"hidden_size": width, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    llm |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, **words}
    if kind in ("UMT5EncoderModel", "T5EncoderModel"):
        config_class = transformers.UMT5Config if kind.startswith("U") else transformers.T5Config
        sizes = {"d_model": width, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        config = config_class(vocab_size=len(WORDS), feed_forward_proj="gated-gelu", **sizes)
    elif kind.startswith("CLIPText"):
        sizes = {"hidden_size": width, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.CLIPTextConfig(projection_dim=width, max_position_embeddings=128, **sizes, **words)
    elif kind in ("LlamaModel", "LlamaForCausalLM"):
        config = transformers.LlamaConfig(**llm)
    elif kind == "Gemma2Model":
        config = transformers.Gemma2Config(**llm, head_dim=4)
    elif kind in ("Qwen3Model", "Qwen3ForCausalLM"):
        layers = 28 if kind == "Qwen3ForCausalLM" else 3  # FLUX.2 takes the 9th, 18th and 27th
        config = transformers.Qwen3Config(**{**llm, "num_hidden_layers": layers, "head_dim": 4})
    elif kind.startswith("Qwen3VL"):  # Krea 2 takes up to the 35th
        rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True}
        text = {**llm, "num_hidden_layers": 36, "head_dim": 4, "rope_scaling": rope, "rope_parameters": rope}
        eyes = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": width}
        config = transformers.Qwen3VLConfig(
            text_config=text, vision_config={**eyes, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
        )
    elif kind == "AnimaTextConditioner":
        sizes = {"source_dim": width, "target_dim": width, "model_dim": width, "num_attention_heads": 2}
        return diffusers.AnimaTextConditioner(**sizes, num_layers=1, target_vocab_size=len(WORDS))
    elif kind.startswith("Mistral3"):  # FLUX.2 takes the 10th, 20th and 30th
        text = {**llm, "model_type": "mistral", "num_hidden_layers": 31, "head_dim": 4}
        eyes = {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        config = transformers.Mistral3Config(text_config=text, vision_config={**eyes, "num_attention_heads": 2})
    else:  # Qwen2-VL and 2.5-VL, whose eyes stay shut
        rope = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 0]}
        llm |= {"rope_scaling": rope, "rope_parameters": rope}
        eyes = {"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 2, "patch_size": 14, "intermediate_size": 8}
        given = llm if kind.endswith("TextModel") else {"text_config": llm, "vision_config": eyes}
        name = kind.removesuffix("ForConditionalGeneration").removesuffix("Model") + "Config"
        config = getattr(transformers, name)(**given)
    return getattr(transformers, kind)(config)


SMALL = {"num_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, dict[str, object]] = {
    "wan": {**SMALL, "attention_head_dim": 12, "ffn_dim": 16, "freq_dim": 8, "text_dim": 8},
    "skyreels-v2": {**SMALL, "attention_head_dim": 12, "ffn_dim": 16, "freq_dim": 8, "text_dim": 8},
    "wan-vace": {**SMALL, "attention_head_dim": 12, "ffn_dim": 16, "freq_dim": 8, "text_dim": 8, "vace_layers": [0]},
    "cogvideox": {**SMALL, "attention_head_dim": 16, "text_embed_dim": 8, "time_embed_dim": 8, "sample_height": 8}
    | {"sample_width": 8},
    "ltx": {**SMALL, "attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8},
    "hunyuan-video": {**SMALL, "attention_head_dim": 8, "num_refiner_layers": 1, "num_single_layers": 2}
    | {"rope_axes_dim": [4, 2, 2], "text_embed_dim": 8, "pooled_projection_dim": 8},
    "flux": {**SMALL, "attention_head_dim": 8, "num_single_layers": 2, "joint_attention_dim": 8}
    | {"axes_dims_rope": [4, 2, 2], "pooled_projection_dim": 8},
    "longcat-image": {**SMALL, "attention_head_dim": 8, "num_single_layers": 2, "joint_attention_dim": 8}
    | {"axes_dims_rope": [4, 2, 2], "pooled_projection_dim": 8},
    "sd3": {**SMALL, "attention_head_dim": 8, "caption_projection_dim": 16, "joint_attention_dim": 24}
    | {"pooled_projection_dim": 16, "dual_attention_layers": []},
    "unet": {"block_out_channels": [8, 8, 8, 8], "attention_head_dim": 2, "cross_attention_dim": 8}
    | {"norm_num_groups": 2, "layers_per_block": 1},
    "qwen-image": {**SMALL, "attention_head_dim": 8, "axes_dims_rope": [4, 2, 2], "joint_attention_dim": 8},
    "qwen-image-2.1": {**SMALL, "attention_head_dim": 8, "axes_dims_rope": [4, 2, 2], "context_in_dim": 8},
    "z-image": {"n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "dim": 16, "cap_feat_dim": 8, "n_refiner_layers": 1}
    | {"axes_dims": [4, 2, 2]},
    "flux2": {**SMALL, "attention_head_dim": 8, "axes_dims_rope": [2, 2, 2, 2], "joint_attention_dim": 24}
    | {"num_single_layers": 2},
    "flux3": {**SMALL, "attention_head_dim": 8, "axes_dims_rope": [2, 2, 2, 2], "joint_attention_dim": 8 * 8}
    | {"num_single_layers": 2},
    "hunyuan-video-1.5": {**SMALL, "attention_head_dim": 8, "rope_axes_dim": [4, 2, 2], "text_embed_dim": 8}
    | {"text_embed_2_dim": 8, "image_embed_dim": 8, "num_refiner_layers": 1},
    "krea2": {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2, "attention_head_dim": 8}
    | {"axes_dims_rope": [4, 2, 2], "intermediate_size": 16, "text_hidden_dim": 8, "text_intermediate_size": 8}
    | {"text_num_attention_heads": 2, "text_num_key_value_heads": 2, "timestep_embed_dim": 8}
    | {"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
    "hunyuan-image": {**SMALL, "attention_head_dim": 8, "num_single_layers": 2, "num_refiner_layers": 1}
    | {"rope_axes_dim": [4, 4], "text_embed_dim": 8, "text_embed_2_dim": 8},
    "ernie-image": {"num_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "ffn_hidden_size": 16}
    | {"rope_axes_dim": [4, 2, 2], "text_in_dim": 8},
    "ideogram-4": {**SMALL, "attention_head_dim": 8, "intermediate_size": 16, "adaln_dim": 8}
    | {"llm_features_dim": 13 * 8, "mrope_section": [2, 1, 1]},
    "chroma": {**SMALL, "attention_head_dim": 8, "num_single_layers": 2, "joint_attention_dim": 8}
    | {"axes_dims_rope": [4, 2, 2], "approximator_hidden_dim": 8, "approximator_layers": 1},
    "lumina2": {"num_layers": 2, "num_attention_heads": 2, "num_kv_heads": 1, "hidden_size": 24, "cap_feat_dim": 8}
    | {"axes_dim_rope": [4, 4, 4], "num_refiner_layers": 1, "multiple_of": 8},
    "hidream": {**SMALL, "attention_head_dim": 8, "num_single_layers": 2, "axes_dims_rope": [4, 2, 2]}
    | {"caption_channels": [8, 8], "text_emb_dim": 16, "llama_layers": [0, 1, 2, 2], "max_resolution": [16, 16]},
    "anima": {**SMALL, "attention_head_dim": 12, "text_embed_dim": 8, "adaln_lora_dim": 4},
    "sana": {**SMALL, "attention_head_dim": 8, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8}
    | {"cross_attention_dim": 16, "caption_channels": 8},
    "cosmos-predict": {**SMALL, "attention_head_dim": 12, "text_embed_dim": 8, "adaln_lora_dim": 4}
    | {"crossattn_proj_in_channels": 3 * 8, "encoder_hidden_states_channels": 8},
    "sana-video": {**SMALL, "attention_head_dim": 12, "num_cross_attention_heads": 2, "cross_attention_head_dim": 12}
    | {"cross_attention_dim": 24, "caption_channels": 8},
    "kandinsky-5": {"time_dim": 8, "model_dim": 16, "ff_dim": 16, "num_text_blocks": 2, "num_visual_blocks": 2}
    | {"axes_dims": [4, 2, 2], "in_text_dim": 8, "in_text_dim2": 8},
    "mochi": {**SMALL, "attention_head_dim": 8, "text_embed_dim": 8, "pooled_projection_dim": 8},
    "easyanimate": {**SMALL, "attention_head_dim": 16, "text_embed_dim": 8, "time_embed_dim": 8, "mmdit_layers": 1},
}
"""What of a published config becomes small, by family."""

ENCODERS = {
    "wan": {"text_encoder": "UMT5EncoderModel"},
    "skyreels-v2": {"text_encoder": "UMT5EncoderModel"},
    "wan-vace": {"text_encoder": "UMT5EncoderModel"},
    "cogvideox": {"text_encoder": "T5EncoderModel"},
    "ltx": {"text_encoder": "T5EncoderModel"},
    "hunyuan-video": {"text_encoder": "LlamaModel", "text_encoder_2": "CLIPTextModel"},
    "flux": {"text_encoder": "CLIPTextModel", "text_encoder_2": "T5EncoderModel"},
    "sd3": {
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
    },
    "longcat-image": {"text_encoder": "Qwen2_5_VLForConditionalGeneration"},
    "unet": {"text_encoder": "CLIPTextModel"},
    "qwen-image": {"text_encoder": "Qwen2_5_VLForConditionalGeneration"},
    "qwen-image-2.1": {"text_encoder": "Qwen3VLForConditionalGeneration"},
    "z-image": {"text_encoder": "Qwen3Model"},
    "flux2": {"text_encoder": "Qwen3ForCausalLM"},
    "flux3": {"text_encoder": "Qwen3VLForConditionalGeneration"},
    "hunyuan-video-1.5": {"text_encoder": "Qwen2_5_VLTextModel", "text_encoder_2": "T5EncoderModel"},
    "krea2": {"text_encoder": "Qwen3VLModel"},
    "hunyuan-image": {"text_encoder": "Qwen2_5_VLForConditionalGeneration", "text_encoder_2": "T5EncoderModel"},
    "ernie-image": {"text_encoder": "Mistral3Model"},
    "ideogram-4": {"text_encoder": "Qwen3VLModel"},
    "chroma": {"text_encoder": "T5EncoderModel"},
    "lumina2": {"text_encoder": "Gemma2Model"},
    "hidream": {
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
        "text_encoder_4": "LlamaForCausalLM",
    },
    "anima": {"text_encoder": "Qwen3Model", "text_conditioner": "AnimaTextConditioner"},
    "sana": {"text_encoder": "Gemma2Model"},
    "cosmos-predict": {"text_encoder": "Qwen2_5_VLForConditionalGeneration"},
    "sana-video": {"text_encoder": "Gemma2Model"},
    "kandinsky-5": {"text_encoder": "Qwen2_5_VLForConditionalGeneration", "text_encoder_2": "CLIPTextModel"},
    "mochi": {"text_encoder": "T5EncoderModel"},
    "easyanimate": {"text_encoder": "Qwen2VLForConditionalGeneration"},
}

VAES: dict[str, dict[str, object]] = {
    "AutoencoderKLWan": {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    "AutoencoderKLQwenImage": {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    "AutoencoderKLQwenImage21": {"base_dim": 3, "dim_mult": [1, 1, 1, 1, 1], "num_res_blocks": 1},
    "AutoencoderKLCogVideoX": {"block_out_channels": [8, 8, 8, 8], "layers_per_block": 1, "norm_num_groups": 2},
    "AutoencoderKLHunyuanVideo": {"block_out_channels": [8, 8, 8, 8], "layers_per_block": 1, "norm_num_groups": 2},
    "AutoencoderKLMagvit": {"block_out_channels": [8, 8, 8, 8], "layers_per_block": 1, "norm_num_groups": 2},
    "AutoencoderKL": {"block_out_channels": [8, 8, 8, 8], "layers_per_block": 1, "norm_num_groups": 2},
    "AutoencoderKLFlux2": {"block_out_channels": [8, 8, 8, 8], "layers_per_block": 1, "norm_num_groups": 2},
    "AutoencoderKLHunyuanVideo15": {"block_out_channels": [64, 64, 64, 64, 64], "layers_per_block": 1},
    "AutoencoderKLHunyuanImage": {"block_out_channels": [32, 32, 32, 32, 64, 128], "layers_per_block": 1},
    "AutoencoderKLLTXVideo": {"block_out_channels": [8, 8, 8, 8], "layers_per_block": [1, 1, 1, 1, 1]}
    | {"decoder_block_out_channels": [8, 8, 8, 8], "decoder_layers_per_block": [1, 1, 1, 1, 1]},
    "AutoencoderDC": {"encoder_block_out_channels": [32] * 6, "decoder_block_out_channels": [32] * 6}
    | {"encoder_layers_per_block": [1] * 6, "decoder_layers_per_block": [1] * 6},
    "AutoencoderKLMochi": {"encoder_block_out_channels": [32, 32, 32, 32], "layers_per_block": [1, 1, 1, 1, 1]}
    | {"decoder_block_out_channels": [32, 32, 32, 32]},
}

MODELS = (
    "wan2.1-t2v-1.3b",
    "wan2.1-i2v-14b-480p",
    "wan2.2-i2v-a14b",
    "wan2.2-ti2v-5b",
    "wan2.1-vace-1.3b",
    "skyreels-v2-i2v-1.3b",
    "skyreels-v2-df-14b",
    "cogvideox-2b",
    "cogvideox-5b-i2v",
    "cogvideox1.5-5b-i2v",
    "ltx-video-2b",
    "hunyuan-video",
    "mochi-1",
    "easyanimate-v5.1-7b",
    "flux.1-dev",
    "flux.1-kontext-dev",
    "longcat-image",
    "sd3-medium",
    "sd3.5-medium",
    "sd1.5",
    "sd2.1",
    "sdxl",
    "qwen-image",
    "qwen-image-2.1",
    "z-image",
    "flux.2-klein-4b",
    "flux.2-dev",
    "flux.3",
    "krea-2",
    "chroma1-hd",
    "lumina-image-2.0",
    "hunyuan-video-1.5",
    "hunyuan-image-2.1",
    "ernie-image",
    "ideogram-4",
    "hidream-i1",
    "anima",
    "sana-1.6b",
    "sana-video-2b",
    "cosmos-predict2-2b-v2w",
    "cosmos-predict2.5-2b",
    "kandinsky-5.0-t2v-lite",
    "kandinsky-5.0-i2v-lite",
    "kandinsky-5.0-t2i-lite",
    "latentsync-1.6-stage1",
)
"""Bundled models whose samples can be encoded, at least one of each kind of condition."""


def profile(name: str) -> ModelProfile:
    """A bundled model with a small config, for clips of 64x64."""
    found = lookup.model(name)
    config, inputs = {**found.config, **CONFIGS[found.family]}, dict(found.inputs)
    if config.get("image_dim"):
        config |= {"image_dim": 16, "added_kv_proj_dim": 24}
        inputs["image_tokens"] = 5
    if config.get("ofs_embed_dim"):  # CogVideoX 1.5 I2V
        config["ofs_embed_dim"] = 8
    if config.get("addition_embed_type"):  # SDXL
        config |= {"block_out_channels": [8, 8, 8], "transformer_layers_per_block": 1, "cross_attention_dim": 16}
        config |= {"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 8 + 6 * 4}
        inputs["pooled_dim"] = 8
    shape = found.shape.replace(resolutions=((64, 64),))
    return found.replace(config=config, inputs=inputs, shape=shape)


def opaque(pixels: torch.Tensor, made: ModelProfile) -> torch.Tensor:
    """Pixels (B, 3, ...) as a model's VAE takes them: with a channel of ones where it has transparency."""
    return torch.cat([pixels, torch.ones_like(pixels[:, : made.vae.colours - 3])], dim=1)


def _hears(path: Path, width: int) -> None:
    """What LatentSync's folder has beside UNet and VAE. Whisper keeps its length and its number of layers."""
    import transformers

    sizes = {"d_model": width, "encoder_attention_heads": 1, "decoder_attention_heads": 1, "decoder_layers": 1}
    sizes |= {"encoder_layers": 4, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 16, "pad_token_id": 0}
    tokens = {"bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **tokens)).save_pretrained(
        path / "audio_encoder"
    )
    transformers.WhisperFeatureExtractor().save_pretrained(path / "feature_extractor")
    (path / "mask").mkdir()
    mask = numpy.full((64, 64), 255, numpy.uint8)
    mask[32:, 8:56] = 0
    Image.fromarray(mask).save(path / "mask" / "mask.png")


def folder(path: Path, made: ModelProfile) -> Path:
    """A pipeline's folder with random weights, all parts but the transformer, as save_pretrained writes it."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    small = dict(VAES[made.vae.class_name])
    if made.vae.config.get("decoder_base_dim"):
        small["decoder_base_dim"] = 3
    getattr(diffusers, made.vae.class_name)(**{**made.vae.config, **small}).save_pretrained(path / "vae")
    encoders = {} if made.inputs.get("sound") else ENCODERS[made.family]
    if made.inputs.get("sound"):
        _hears(path, made.config["cross_attention_dim"])
    if made.config.get("addition_embed_type"):
        encoders = {**encoders, "text_encoder_2": "CLIPTextModelWithProjection"}
    if made.name == "flux.2-dev":
        encoders = {"text_encoder": "Mistral3ForConditionalGeneration"}
    if made.name == "cosmos-predict2-2b-v2w":
        encoders = {"text_encoder": "T5EncoderModel"}
    for part, kind in encoders.items():
        width = made.config.get("joint_attention_dim", 8) if kind == "T5EncoderModel" else 8
        text_encoder(kind, width).save_pretrained(path / part)
        special = TEMPLATE if made.family in ("krea2", "qwen-image-2.1") else ()
        helper = "t5_tokenizer" if part == "text_conditioner" else part.replace("text_encoder", "tokenizer")
        words = tokenizer(77 if kind.startswith("CLIP") else 512, special)
        if made.family == "qwen-image-2.1":
            helper, words.chat_template = "processor", SYSTEM_MESSAGE
        words.save_pretrained(path / helper)
    if made.config.get("image_dim"):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision = transformers.CLIPVisionConfig(image_size=28, patch_size=14, **sizes)
        transformers.CLIPVisionModel(vision).save_pretrained(path / "image_encoder")
        crop = {"height": 28, "width": 28}
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=crop)
        processor.save_pretrained(path / "image_processor")
    return path
