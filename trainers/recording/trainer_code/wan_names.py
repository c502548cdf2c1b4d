"""The names of Wan's weights in its own repository, which trainers use that train its original model."""

from __future__ import annotations

import re

NAMES = (
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.attn2\.([kv])_img\b", r".attn2.add_\1_proj"),
    (r"\.norm_k_img\b", ".norm_added_k"),
    (r"\.(attn[12])\.([qkv])\b", r".\1.to_\2"),
    (r"\.(attn[12])\.o\b", r".\1.to_out.0"),
    (r"\.ffn\.0\b", ".ffn.net.0.proj"),
    (r"\.ffn\.2\b", ".ffn.net.2"),
    (r"^(blocks\.\d+)\.norm3\b", r"\1.norm2"),
    (r"^(blocks\.\d+)\.modulation$", r"\1.scale_shift_table"),
    (r"^text_embedding\.0\b", "condition_embedder.text_embedder.linear_1"),
    (r"^text_embedding\.2\b", "condition_embedder.text_embedder.linear_2"),
    (r"^time_embedding\.0\b", "condition_embedder.time_embedder.linear_1"),
    (r"^time_embedding\.2\b", "condition_embedder.time_embedder.linear_2"),
    (r"^time_projection\.1\b", "condition_embedder.time_proj"),
    (r"^img_emb\.proj\.0\b", "condition_embedder.image_embedder.norm1"),
    (r"^img_emb\.proj\.1\b", "condition_embedder.image_embedder.ff.net.0.proj"),
    (r"^img_emb\.proj\.3\b", "condition_embedder.image_embedder.ff.net.2"),
    (r"^img_emb\.proj\.4\b", "condition_embedder.image_embedder.norm2"),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^head\.head\b", "proj_out"),
)
"""(pattern of an original name, replacement), applied in this order to get diffusers' names (the reverse of
DiffSynth-Studio's diffsynth/utils/state_dict_converters/wan_video_dit.py)."""


def published_name(name: str) -> str:
    """The diffusers name of a weight."""
    for pattern, published in NAMES:
        name = re.sub(pattern, published, name)
    return name
