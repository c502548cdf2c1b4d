"""trainers/recording/components.py, encoders.py: tapes of VAEs and text encoders are what is recorded at a shape and
depth they were not made from, event by event; and the shipped ones are what the code records now."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSafeConv3d
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import profiles
from planner.catalog import lookup
from planner.catalog.components import COMPONENTS, SPLIT_OVER, SPLIT_SHARE, Component, components
from planner.catalog.profiles import TextEncoder
from planner.tape.codec import read_tape, tape_json
from planner.tape.format import Tape
from planner.tape.packs import is_stored, read_recording
from planner.tape.program import Part, Program
from tests.benchmarks.held_out_around import Held, compared, directly, from_tape
from trainers.recording import components as vaes
from trainers.recording import tapes
from trainers.recording.comparison import NOT_COMPARED, first_difference
from trainers.recording.cuda_ops import cuda_semantics
from trainers.recording.encoders import record_text_encoder, text_tape
from trainers.recording.recorder import Recorder

PROFILES = [lookup.model(name) for name in lookup.model_names()]
ENCODERS = {e.folder: e for profile in PROFILES for e in profile.text_encoders}
VAES = {profile.vae.folder: profile.name for profile in PROFILES}


def shipped(name: str, variant: str) -> Tape:
    return read_tape(profiles.TAPES / COMPONENTS / name / f"{variant}.json.gz")


UNRECORDED = {("AutoencoderKLMochi", "encode-half"), ("AutoencoderKLMochi", "encode-fp32")}
"""Its encoder's attention goes through the cells of a clip in so many rounds as there are, which no tape holds."""


def test_everything_around_every_model_is_recorded() -> None:
    wanted = {part for model in lookup.model_names() for part in components(lookup.model(model))}
    paths = {
        profiles.TAPES / COMPONENTS / name / f"{variant}.json.gz"
        for name, variant in wanted
        if (name.partition("-")[0], variant) not in UNRECORDED
    }
    assert not {path for path in paths if not is_stored(path)}


def test_the_tape_of_a_text_encoder_loads_all_its_weights() -> None:
    """But for tables of positions, which are no parameters: FLUX.2's once had the layers of its vision tower only."""
    for name, encoder in ENCODERS.items():
        program = Program()
        program.unfold(shipped(name, "encode-half"), "load", None, Part(name, {"B": 1, "T": encoder.max_tokens}))
        sizes = program.bytes_of({})
        loaded = sum(sizes[buffer] for buffers in program.named.values() for buffer in buffers.values())
        assert loaded == pytest.approx(2 * encoder.parameters, rel=1e-5), name


def called(class_name: str) -> TextEncoder:
    return next(encoder for encoder in ENCODERS.values() if encoder.class_name == class_name)


@pytest.mark.parametrize(
    "class_name",
    [
        "Qwen2_5_VLTextModel",  # states of all layers, and keys and values
        "UMT5EncoderModel",  # a bias in every layer
        "WhisperModel",  # sound; a decoder that never runs
        "LTX2TextConnectors",  # diffusers' own, for prompts of one length
    ],
)
def test_a_text_encoders_tape_is_what_is_recorded_at_another_batch_length_and_depth(class_name: str) -> None:
    encoder = called(class_name)
    tape = text_tape(encoder, "half")
    trace = record_text_encoder(encoder, "half", 2, encoder.max_tokens)
    part = Part(tape.model, {"B": 2, "T": encoder.max_tokens})
    assert from_tape(tape, "encode", part, None) == directly(trace)


SAMPLED = (
    ("AutoencoderKLMagvit", "decode-half"),
    ("AutoencoderKLHunyuanVideo15", "decode-half"),
    ("AutoencoderKLFlux2", "decode-half"),
    ("AutoencoderKLQwenImage21", "decode-half"),
    ("AutoencoderKLQwenImage21", "encode-half"),
    ("AutoencoderKLCogVideoX", "decode-half-1-chunks"),
    ("AutoencoderKLWan", "encode-half-3-chunks"),
    ("AutoencoderKLHunyuanVideo", "decode-half-3-frames"),
)


@pytest.mark.parametrize(("class_name", "variant"), SAMPLED)
def test_a_vaes_tape_is_what_is_recorded_at_another_shape(class_name: str, variant: str) -> None:
    name, model = next((name, model) for name, model in VAES.items() if name.startswith(f"{class_name}-"))
    ours, theirs = compared(lookup.model(model), Component(name, variant))
    assert ours == theirs


@contextlib.contextmanager
def step_by_step(_: nn.Module) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("model", "part", "latents"),
    [("mochi-1", "decode", (5, 6, 4)), ("mochi-1", "encode", (2, 60, 106)), ("hunyuan-video-1.5", "decode", (2, 6, 4))],
)
def test_what_is_recorded_in_one_go_takes_what_it_takes_step_by_step(
    model: str, part: str, latents: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the few bytes of each norm of 8 frames."""

    def peak() -> int:
        found: Held = directly(vaes.record_vae(vae, part, "half", dict(zip("FHW", latents, strict=True)), 0))
        return found.peak

    vae = lookup.model(model).vae
    at_once = peak()
    monkeypatch.setattr(vaes, "_in_one_go", step_by_step)
    assert at_once == pytest.approx(peak(), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "text", "variant"),
    [
        ("wan2.1-t2v-1.3b", "UMT5EncoderModel", "encode-half"),
        ("qwen-image", "AutoencoderKLQwenImage", "decode-half-image"),
        ("sdxl", "AutoencoderKL", "decode-fp32"),
    ],
)
def test_a_shipped_tape_is_what_the_code_records_now(model: str, text: str, variant: str) -> None:
    profile = lookup.model(model)
    component = next(part for part in components(profile) if text in part.name and part.variant == variant)
    path = profiles.TAPES / COMPONENTS / component.name / f"{variant}.json.gz"
    there = read_recording(path)
    now = tape_json(tapes.component_tape(profile, component))
    for key in NOT_COMPARED:
        del there[key], now[key]
    assert first_difference(there, now) == ""


@pytest.mark.parametrize(
    ("channels", "out", "frames", "rows", "columns"),
    [
        (128, 128, 10, 480, 720),
        (128, 128, 10, 768, 1360),
        (256, 128, 12, 1024, 1024),
        (64, 64, 165, 480, 848),
        (128, 256, 1026, 480, 848),
    ],
)
def test_a_convolution_that_is_split_takes_no_more_than_is_said(
    channels: int, out: int, frames: int, rows: int, columns: int
) -> None:
    """diffusers' own code, recorded whole and in parts."""

    def recorded(kind: type[nn.Conv3d]) -> tuple[int, int]:
        recorder = Recorder()
        with cuda_semantics(), FakeTensorMode(), torch.no_grad():
            convolution = kind(channels, out, 3, padding=(0, 1, 1), dtype=torch.bfloat16)
            with recorder:
                given = torch.empty(1, channels, frames, rows, columns, dtype=torch.bfloat16)
                made = convolution(given)
        sizes = [alloc.nbytes for alloc in recorder.recording.allocations]
        changes = (sizes[event] if event >= 0 else -sizes[~event] for event in recorder.recording.events)
        return max(itertools.accumulate(changes)), max(given.nbytes, made.nbytes)

    (whole, largest), (parts, _) = recorded(nn.Conv3d), recorded(CogVideoXSafeConv3d)
    splits = channels * frames * rows * columns > SPLIT_OVER
    assert largest < parts - whole <= SPLIT_SHARE * largest if splits else parts == whole
