"""Classes of SimpleTuner's models, by which a LyCORIS config names layers: what of a model is in each.

Its models were built without weights and walked (simpletuner/helpers/models/*/transformer*.py at bc8e6ab, diffusers
0.39 for U-Nets): their layers have diffusers' names, but for Anima's, which stand behind ``core.``.
"""

from __future__ import annotations

from collections.abc import Mapping

ALL = ""
"""Everything of a model."""

Parts = tuple[str, ...] | None
"""Parts of a model: the beginning of a name, with ``*`` for a number; or, without a dot, a name anywhere in it. None:
layers that are not priced, as of convolutions or of a mixture's experts."""

_BLOCKS: Mapping[str, Parts] = {"Attention": ("attn1", "attn2"), "FeedForward": ("ff",)}
_UNET: Mapping[str, Parts] = {
    **_BLOCKS,
    "BasicTransformerBlock": ("transformer_blocks",),
    "Transformer2DModel": ("attentions",),
}
_KANDINSKY: Mapping[str, Parts] = {
    "Kandinsky5Transformer3DModel": (ALL,),
    "Kandinsky5TransformerEncoderBlock": ("text_transformer_blocks.*",),
    "Kandinsky5TransformerDecoderBlock": ("visual_transformer_blocks.*",),
    "Kandinsky5Attention": ("self_attention", "cross_attention"),
    "Kandinsky5FeedForward": ("feed_forward",),
}
_SANA: Mapping[str, Parts] = {"Attention": ("attn1", "attn2")}
"""Its feed-forward is convolutions, of another class."""

MODULE_CLASSES: Mapping[str, Mapping[str, Parts]] = {
    "flux": {
        "FluxTransformer2DModel": (ALL,),
        "FluxTransformerBlock": ("transformer_blocks.*",),
        "FluxSingleTransformerBlock": ("single_transformer_blocks.*",),
        "Attention": ("attn",),
        "FeedForward": ("ff", "ff_context"),
    },
    "flux2": {
        "Flux2Transformer2DModel": (ALL,),
        "Flux2TransformerBlock": ("transformer_blocks.*",),
        "Flux2SingleTransformerBlock": ("single_transformer_blocks.*",),
        "Flux2Attention": ("transformer_blocks.*.attn",),
        "Flux2FeedForward": ("ff", "ff_context"),
        "Flux2ParallelSelfAttention": ("single_transformer_blocks.*.attn",),
    },
    "sdxl": _UNET,
    "sd1x": {**_UNET, "Transformer2DModel": None},
    "sd2x": _UNET,
    "sd3": {
        "SD3Transformer2DModel": None,
        "JointTransformerBlock": ("transformer_blocks.*",),
        "Attention": ("attn", "attn2"),
        "FeedForward": ("ff", "ff_context"),
    },
    "qwen_image": {
        "QwenImageTransformer2DModel": (ALL,),
        "QwenImageTransformerBlock": ("transformer_blocks.*",),
        "Attention": ("attn",),
        "FeedForward": ("img_mlp", "txt_mlp"),
    },
    "z_image": {
        "ZImageTransformer2DModel": (ALL,),
        "ZImageTransformerBlock": ("context_refiner.*", "layers.*", "noise_refiner.*"),
        "Attention": ("attention",),
        "FeedForward": ("feed_forward",),
    },
    "chroma": {
        "ChromaTransformer2DModel": (ALL,),
        "ChromaTransformerBlock": ("transformer_blocks.*",),
        "ChromaSingleTransformerBlock": ("single_transformer_blocks.*",),
        "FluxAttention": ("attn",),
        "FeedForward": ("ff", "ff_context"),
    },
    "lumina2": {
        "Lumina2Transformer2DModel": (ALL,),
        "Lumina2TransformerBlock": ("context_refiner.*", "layers.*", "noise_refiner.*"),
        "Attention": ("attn",),
        "LuminaFeedForward": ("feed_forward",),
    },
    "hidream": {
        "HiDreamImageTransformer2DModel": None,
        "HiDreamImageBlock": None,
        "HiDreamImageTransformerBlock": None,
        "HiDreamImageSingleTransformerBlock": None,
        "MOEFeedForward": None,
        "FeedForward": None,
        "Attention": ("attn1",),
    },
    "krea2": {
        "Krea2Transformer2DModel": (ALL,),
        "Krea2TransformerBlock": ("transformer_blocks.*",),
        "Krea2TextFusionBlock": ("text_fusion.layerwise_blocks.*", "text_fusion.refiner_blocks.*"),
        "Krea2Attention": ("attn",),
        "Krea2SwiGLU": ("ff",),
    },
    "ernie": {
        "ErnieImageTransformer2DModel": None,
        "ErnieImageSharedAdaLNBlock": ("layers.*",),
        "ErnieImageAttention": ("self_attention",),
        "ErnieImageFeedForward": ("mlp",),
    },
    "anima": {
        **_BLOCKS,
        "AnimaTransformerModel": None,
        "CosmosTransformer3DModel": None,
        "CosmosTransformerBlock": ("transformer_blocks.*",),
    },
    "sana": {**_SANA, "SanaTransformer2DModel": None, "SanaTransformerBlock": None, "GLUMBConv": None},
    "sanavideo": {
        **_SANA,
        "SanaVideoTransformer3DModel": None,
        "SanaVideoTransformerBlock": None,
        "GLUMBTempConv": None,
    },
    "kandinsky5_image": _KANDINSKY,
    "kandinsky5_video": _KANDINSKY,
    "ltxvideo": {
        "LTXVideoTransformer3DModel": (ALL,),
        "LTXVideoTransformerBlock": ("transformer_blocks.*",),
        "LTXAttention": ("attn1", "attn2"),
        "FeedForward": ("ff",),
    },
    "ltxvideo2": {
        "LTX2VideoTransformer3DModel": (ALL,),
        "LTX2VideoTransformerBlock": ("transformer_blocks.*",),
        "LTX2Attention": (
            *("attn1", "attn2", "audio_attn1", "audio_attn2"),
            *("audio_to_video_attn", "video_to_audio_attn"),
        ),
        "FeedForward": ("ff", "audio_ff"),
    },
    "hunyuanvideo": {
        "HunyuanVideo15Transformer3DModel": None,
        "HunyuanVideo15TransformerBlock": ("transformer_blocks.*",),
        "HunyuanVideo15IndividualTokenRefinerBlock": ("context_embedder.token_refiner.refiner_blocks.*",),
        "Attention": ("attn",),
        "FeedForward": ("ff", "ff_context"),
    },
    "wan": {
        "WanTransformer3DModel": None,
        "WanTransformerBlock": ("blocks.*",),
        "Attention": ("attn1", "attn2"),
        "FeedForward": ("ffn", "condition_embedder.image_embedder.ff"),
    },
}
"""``model_family`` -> class -> its parts."""

EVERY_CLASS = frozenset(name for classes in MODULE_CLASSES.values() for name in classes)
"""A class of another family's is in no layer of this one's: LyCORIS passes over it."""


def lies_in(layer: str, part: str) -> bool:
    """Whether a layer belongs to a part of its model, as in `Parts`."""
    names = layer.split(".")
    if part == ALL or "." not in part:
        return part == ALL or part in names
    wanted = part.split(".")
    return len(names) >= len(wanted) and all(
        name.isdecimal() if want == "*" else name == want for name, want in zip(names, wanted, strict=False)
    )
