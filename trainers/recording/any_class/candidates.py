"""Proposes descriptions for an argument of `forward`, from its name, its annotation and its docstring.

They are as in `planner.catalog.forward_inputs`, with `?` for a width that is not known yet; dry runs find it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainers.recording.any_class.pipeline_source import PipelineFacts

MAIN = ("hidden_states", "sample", "x", "decoder_input_tokens")
"""Names of the argument with the noisy latents, in order of preference."""

IGNORED = re.compile(
    r"return_dict|(?!added_cond).*_kwargs|.*controlnet.*|kv_cache.*|.*_residuals?|skip_layers|.*_control_hidden_states|sparse_params"
    r"|perturbation_mask|isolate_modalities|spatio_temporal_guidance_blocks|use_cross_timestep|enable_.*|chunk_.*"
)
"""Optional arguments that training does not need: switches, other models' outputs, caches for inference."""

DIMENSIONS = (
    (r"b|bs|bsz|batch|batch[_ ]size|n", "B"),
    (r"(post_patch_)?(num_|n_)?(latent_)?frames?|f|time|t|depth|n_frames", "F"),
    (r"(latent_)?height|h", "H"),
    (r"(latent_)?width|w", "W"),
    (r"text_(seq(uence)?_)?len(gth)?|l_text|max_sequence_length|text_tokens|num_text_tokens|prompt_.*len.*", "T"),
    (r"(image_|img_|latent_|num_|visual_)?(seq(uence)?_?)(len(gth)?|s)?|num_latent_pixels|num_tokens|s|l", "L"),
)
"""(pattern of a dimension in docstrings, its letter), in the order they are tried. L stands for text or image tokens,
depending on the argument's name."""


class Patch(NamedTuple):
    """Latent frames, rows and columns of one patch, a cell of the grid."""

    frames: int
    rows: int
    columns: int

    @property
    def sizes(self) -> tuple[str, str, str]:
        """The latent's frames, rows and columns as dimensions: `F 2H 2W`."""
        counted = (f"{number if number > 1 else ''}{letter}" for number, letter in zip(self, "FHW", strict=True))
        frames, rows, columns = counted
        return frames, rows, columns


class ClassFacts(NamedTuple):
    """What is known of a class before its first call."""

    config: Mapping[str, Any]
    patch: Patch
    one_frame: bool
    pipeline: PipelineFacts | None
    given: Mapping[str, Any]
    """arguments as the user described them"""
    blocks: int
    """the number of blocks of the model that is called"""


def layouts(patch: Patch, one_frame: bool) -> list[str]:
    """The possible layouts of a tensor of latents. ``one_frame``: for an image."""
    frames, rows, columns = patch.sizes
    if one_frame:
        side = columns[:-1]
        return [
            f"B ? {rows} {columns}",
            "B HW ?",
            f"B ? 1 {rows} {columns}",
            f"BF ? {rows} {columns}",
            f"B ? {side}HW",
            *([f"B {side}HW ?"] if side else []),
            "B ?",
            f"B ? {rows} {rows}",
        ]
    return [
        f"B ? {frames} {rows} {columns}",
        f"B {frames} ? {rows} {columns}",
        f"B {frames} {rows} {columns} ?",
        "B FHW ?",
        "B ? FHW",
        f"BF ? {rows} {columns}",
    ]


def documented(doc: str, name: str) -> list[str]:
    """The dimensions of an argument in a docstring, such as ["batch_size", "sequence_len", "embed_dims"]; empty if it
    has none."""
    start = re.search(rf"^\s*{re.escape(name)} ?\(", doc, re.MULTILINE)
    if start is None:
        return []
    rest = doc[start.end() - 1 : start.end() + 500]
    following = re.search(r"\n\s*[a-z_0-9]+ ?\(`", rest)
    text = rest[: following.start()] if following else rest
    shape = re.search(r"shape:? `{0,2}\(([^()`]*)\)", text)
    return [word.strip() for word in shape[1].split(",") if word.strip()] if shape else []


def from_words(words: Sequence[str], name: str, patch: Patch) -> str | None:
    """A shape from the dimensions in a docstring; None if more than one of them is unknown."""
    letters = []
    frames, rows, columns = patch.sizes
    latent = {"F": frames, "H": rows, "W": columns}
    is_text = bool(re.search(r"encoder|text|prompt|txt|cap_|context", name))
    for word in words:
        if word.isdecimal():
            letters.append(word)
            continue
        found = next((letter for pattern, letter in DIMENSIONS if re.fullmatch(pattern, word.lower())), "?")
        if found == "L":
            found = "T" if is_text else "FHW"
        letters.append(latent.get(found, found) if name in MAIN else found)
    return " ".join(letters) if letters and letters.count("?") <= 1 else None


LEVEL = re.compile(r"t|timesteps?|timestep_r|r_timestep|timestep_ratio|(audio_)?sigma|(target|audio)_timestep")
"""Names of arguments with noise levels."""

LIKE_LATENTS = re.compile(r".*latents.*|(control|pose)_hidden_states|effnet")
"""Names of arguments with the layout of the noisy latents."""

RULES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (LEVEL.pattern, ("B timestep", "timestep", "B F timestep", "1 timestep", "BF timestep")),
    (r"guidance", ("B",)),
    (r"num_frames|frames", ("number F",)),
    (r"audio_num_frames", ("number E",)),
    (r"audio_hidden_states", ("B E ?",)),
    (r"audio_encoder_hidden_states", ("B T ?",)),
    (r"height", ("number H",)),
    (r"width", ("number W",)),
    (r"fps", ("number 24", "B long")),
    (r"class_labels", ("B long",)),
    (r"original_size|target_size|crop_coords", ("B 2",)),
    (r"added_time_ids", ("B 3",)),
    (r"image_meta_size", ("B 6",)),
    (r"style", ("B long",)),
    (r"text_lens", ("B long",)),
    (
        r"img_shapes",
        (
            {"samples": [["number F", "number H", "number W"]]},
            {"samples": ["number F", "number H", "number W"]},
        ),
    ),
    (r".*pooled.*|text_embeds|global_hidden_states|proj_embedding", ("B ?", "B 1 ?")),
    (r"img_ids|image_ids", ("FHW ? fp32", "B FHW ? fp32")),
    (r"txt_ids|text_ids", ("T ? fp32", "B T ? fp32")),
    (r"position_ids", ("B FHW+T ? long", "FHW+T ? long", "B FHW+T long")),
    (r"segment_ids|indicator|token_type.*", ("B FHW+T long", "FHW+T long")),
    (
        r"image_rotary_emb|rotary_embedding|video_rotary_emb",
        (
            ["FHW ? fp32", "FHW ? fp32"],
            "FHW ? fp32",
            ["FHW+1 ? fp32", "FHW+1 ? fp32"],
            [
                [["F ? fp32", "F ? fp32"], ["H ? fp32", "H ? fp32"], ["W ? fp32", "W ? fp32"]],
                ["1 FHW long", "1 FHW long", "1 FHW long"],
            ],
        ),
    ),
    (r"mask|(encoder|text|prompt).*mask.*|.*text.*mask.*|encoder_mask", ("B T ones", "B T bool", "B T")),
    (r"visual_rope_pos", (["F long", "H long", "W long"],)),
    (r"text_rope_pos", ("T long",)),
    (r"padding_mask", ("1 1 H W", "B FHW ones")),
    (r"attention_mask", ("B FHW+T ones", "B T ones", "B FHW ones", "B FHW+T", "B FHW+T bool")),
    (r"encoder_hidden_states_image|image_embed(ding)?s|clip_img", ("B E ?", "B ?", "B 1 ?")),
    (
        r"text_bth|clip_text|encoder_hidden_states(_\d|_t5|_llama3)?|cap_feats",
        ("B T ?", {"samples": "T ?"}, "BF T ?", "B ?", "B FHW ?"),
    ),
    (r"prior_token_id", ("B FHW long",)),
    (r"prior_token_drop", ("B FHW false",)),
)
"""(pattern of an argument's name, its possible descriptions), as diffusers uses the names (diffusers/models, docstrings
of `forward`)."""

ADDED: tuple[dict[str, Any], ...] = (
    {"text_embeds": "B ?", "time_ids": "B 6"},
    {"resolution": "B 2", "aspect_ratio": "B 1"},
)
"""Possible contents of `added_cond_kwargs`: SDXL's (pipeline_stable_diffusion_xl.py) and PixArt's
(pipeline_pixart_alpha.py)."""

AXES = ("axes_dims_rope", "axes_dim", "axes_dims", "rope_axes_dim")
"""Config keys with an entry for each axis of positions."""


def candidates(name: str, parameter: inspect.Parameter, doc: str, facts: ClassFacts) -> Iterator[Any]:
    """The possible descriptions of an argument, the most likely first; none if neither its name nor the docstring is
    known."""
    for pattern, shapes in RULES:
        if re.fullmatch(pattern, name):
            said = len(documented(doc, name))
            for shape in sorted(shapes, key=lambda shape: said not in (0, _dimensions(shape))):
                yield _with_axes(shape, name, facts.config)
            return
    if name == "added_cond_kwargs":
        yield from ADDED
        return
    if parameter.annotation in (int, "int"):
        return
    if shape := from_words(documented(doc, name), name, facts.patch):
        yield shape + _kind(name, parameter, doc)


def _dimensions(shape: Any) -> int:
    """The number of dimensions in a description of a tensor, without its kind; 0 if it does not describe a tensor."""
    return sum(not word.islower() for word in shape.split()) if isinstance(shape, str) else 0


def _with_axes(shape: Any, name: str, config: Mapping[str, Any]) -> Any:
    """Replaces `?` in a description of positions by their number of axes, which dry runs cannot find."""
    if not name.endswith("_ids") or not isinstance(shape, str):
        return shape
    axes = next((config[key] for key in AXES if isinstance(config.get(key), list | tuple)), None)
    return shape.replace("?", str(len(axes) if axes else 3))


def _kind(name: str, parameter: inspect.Parameter, doc: str) -> str:
    said = re.search(rf"^\s*{re.escape(name)} ?\(([^)]*)", doc, re.MULTILINE)
    text = f"{parameter.annotation} {said[1] if said else ''}"
    if "mask" in name:
        return " ones"
    return " long" if re.search(r"Long|Int|int\b", text) or name.endswith(("_ids", "_id")) else ""
