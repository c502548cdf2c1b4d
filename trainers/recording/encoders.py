"""Records text, image and sound encoders: loading them, and their forward as pipelines call it.

On their tapes, layers have the role that blocks have on a model's tape. T5 and CLIP are called without a mask, as most
pipelines do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from planner.catalog.profiles import TextEncoder
from planner.errors import VplanError
from planner.tape.format import HEAD, TAIL, Tape
from trainers.data.layer_offload import LAYERS, layers_of
from trainers.recording.block_places import find_runs
from trainers.recording.components import DTYPES, component_header, record_component, without_unused_atoms
from trainers.recording.compress import compress
from trainers.recording.recorder import RawRecording

RECORDED_LAYERS = HEAD + TAIL + 2
BATCH = 521
LENGTHS = (523, 251, 73)
"""Prompt lengths to record at, in order of preference: the first that the encoder's table of positions holds is used.
"""

ALIGNED, BEYOND_WINDOW = 8 * 67, 8 * 131
"""Prompt lengths to record encoders at that use a mask, where prompts are always padded to a multiple of 8: rows of
such a mask are used as they are, others are copied (attention.cu, pad_bias). Gemma's length reaches beyond its sliding
window, from where on it has a second mask. T5 is called with 226 tokens by one model and 512 by others, so its tape has
the copy."""


def encoder_class(encoder: TextEncoder) -> Any:
    """The class of a text encoder, in transformers or diffusers. Raises a VplanError if the package lacks it."""
    kind = getattr(import_module(encoder.traits.package), encoder.class_name, None)
    if kind is None:
        raise VplanError(f"transformers has no {encoder.class_name}", "update it: pip install -U transformers")
    return kind


def of_diffusers(encoder: TextEncoder) -> bool:
    """Whether a text encoder is a class of diffusers, which is built and called differently from transformers'."""
    return encoder.traits.package.startswith("diffusers")


def text_encoder(encoder: TextEncoder, layers: int | None = None) -> nn.Module:
    """The encoder on the meta device. ``layers``: the most layers to build; None: all. Ignored for diffusers'
    classes."""
    model_class = encoder_class(encoder)
    config = copy.deepcopy(encoder.config)
    with init_empty_weights():
        if of_diffusers(encoder):
            model: nn.Module = model_class.from_config(config)
            return model
        language = config.get("text_config", config)
        depth_key = next(key for _, key in LAYERS if key in language)
        if layers:
            language[depth_key] = min(layers, language[depth_key])
        model = model_class(model_class.config_class(**config))
    model.tie_weights()  # type: ignore[operator]  # transformers' own method
    # transformers keeps them for fp16 only (modeling_utils: _keep_in_fp32_modules)
    model._keep_in_fp32_modules = None  # type: ignore[assignment]  # neither tensor nor module
    return model


def record_text_encoder(
    encoder: TextEncoder, dtype: str, batch: int, tokens: int, layers: int | None = None
) -> RawRecording:
    """Records loading and the forward of one batch of prompts of equal length. ``layers``: of a shallower encoder."""
    model = text_encoder(encoder, layers)
    run = forward(encoder, model, (batch, tokens), DTYPES[dtype], "cpu")
    return record_component(model, dtype, run, "encode", None, layers_of(model))[0]


def forward(
    encoder: TextEncoder, model: nn.Module, size: tuple[int, int], dtype: torch.dtype, device: torch.device | str
) -> Callable[[], Tensor | list[Tensor]]:
    """A function that calls the encoder as pipelines do and returns what they keep. ``size``: (prompts, tokens)."""
    config, states, (batch, tokens) = encoder.config, encoder.traits.states, size

    def see() -> Tensor:
        pixels = torch.zeros((batch, 3, config["image_size"], config["image_size"]), dtype=dtype, device=device)
        image_states: Tensor = model(pixel_values=pixels).last_hidden_state
        return image_states

    def hear() -> Tensor:  # always 30 seconds; the model's decoder is loaded but not called
        shape = batch, config["num_mel_bins"], 2 * config["max_source_positions"]
        features = torch.zeros(shape, dtype=dtype, device=device)
        sound_states: Tensor = model.get_submodule("encoder")(features).last_hidden_state
        return sound_states

    def condition() -> Tensor:
        states = torch.zeros((batch, tokens, config["source_dim"]), dtype=dtype, device=device)
        mask = torch.ones((batch, tokens), dtype=torch.long, device=device)
        prompt: Tensor = model(states, torch.zeros_like(mask), mask, mask)
        return prompt

    def connect() -> list[Tensor]:
        shape = batch, tokens, config["caption_channels"] * config["text_proj_in_factor"]
        states = torch.zeros(shape, dtype=dtype, device=device)
        video, audio, _ = model(states, torch.ones((batch, tokens), dtype=torch.long, device=device))
        return [video, audio]

    def read() -> Tensor:
        ids = torch.zeros((batch, tokens), dtype=torch.long, device=device)
        if states is None:
            last: Tensor = model(input_ids=ids).last_hidden_state
            return last
        mask = torch.ones_like(ids) if states.masked else None
        body = model.get_submodule("model") if states.headless else model
        outputs = body(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=states.cache)
        if not states.stacked:
            deepest: Tensor = outputs.hidden_states[-1]
            return deepest
        layers = outputs.hidden_states[-states.stacked :] if states.stacked > 0 else outputs.hidden_states
        layers = [normalised(layer) for layer in layers] if states.normalised else list(layers)
        joined = torch.stack(layers, dim=states.dim)
        # layers side by side for every token: needs a copy if they were stacked on an axis in front of the tokens
        return joined.permute(0, 2, 1, 3).flatten(2) if states.dim == 1 else joined

    if encoder.sees:
        return see
    if "num_mel_bins" in config:
        return hear
    if "source_dim" in config:
        return condition
    return connect if of_diffusers(encoder) else read


def normalised(states: Tensor) -> Tensor:
    """A layer's states, normalised to mean 0 and standard deviation 1 (diffusers
    pipelines/cosmos/pipeline_cosmos2_5_predict.py)."""
    return (states - states.mean(dim=-1, keepdim=True)) / (states.std(dim=-1, keepdim=True) + 1e-8)


def text_tape(encoder: TextEncoder, dtype: str) -> Tape:
    """Records one call of a text encoder with weights of `dtype`, as a tape."""
    states = encoder.traits.states
    full = text_encoder(encoder)
    # Recorded at full depth: how many states are joined depends on the depth, and layers that alternate (in Gemma 2
    # every second one has a sliding window) do not repeat one middle layer.
    whole = bool(states and states.stacked) or len(set(getattr(full.config, "layer_types", None) or ())) > 1
    tokens, regime = _length(encoder)
    recording = record_text_encoder(encoder, dtype, BATCH, tokens, None if whole else RECORDED_LAYERS)
    counts = [run.count for run in find_runs(full, layers_of(full), None)[0]]
    atoms = {"B": BATCH} if regime else {"B": BATCH, "T": tokens}
    header = component_header(encoder.folder, f"encode-{dtype}", regime, {}, ())
    return without_unused_atoms(compress(recording, header, atoms, counts))


def _length(encoder: TextEncoder) -> tuple[int, dict[str, int]]:
    """(tokens to record at, the atoms that the tape fixes).

    Connectors pad prompts with registers or zeros to their full length, so that length is fixed.
    """
    if of_diffusers(encoder):
        return encoder.max_tokens, {"T": encoder.max_tokens}
    states = encoder.traits.states
    if (states and states.masked) or encoder.traits.aligned_prompts:
        window = encoder.config.get("text_config", {}).get("sliding_window") or math.inf
        return BEYOND_WINDOW if window <= encoder.max_tokens else ALIGNED, {}
    longest = encoder.config.get("max_position_embeddings", math.inf)
    return next(number for number in LENGTHS if number <= longest), {}
