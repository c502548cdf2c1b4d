"""A model of a class that no bundled model has: recorded from its config, its signature and dry runs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from planner.catalog import lookup, user_data
from planner.catalog.diffusers_folder import Source
from planner.catalog.forward_call import FAMILY, ForwardCall
from planner.catalog.own_inputs import OwnInputs
from planner.catalog.profiles import ModelProfile
from planner.commands import cli
from planner.commands._shared import own_model
from planner.layout import recordings
from planner.tape.codec import tape_json
from planner.tape.packed_json import write_packed
from planner.tape.program import Program
from planner.tape.variants.precision import Precision
from planner.tape.variants.variant import OptimizerVariant, StepVariant
from tests.benchmarks.held_out import Case, directly, from_tape
from trainers.families import family
from trainers.recording import tapes
from trainers.recording.any_class.block_lists import block_lists, stand_for_all
from trainers.recording.any_class.candidates import Patch, documented, from_words
from trainers.recording.any_class.derive import derive
from trainers.recording.any_class.dry_run import likely_widths
from trainers.recording.any_class.length_sums import Mismatch, mismatches, new_sum
from trainers.recording.any_class.pipeline_source import pipelines_of
from trainers.recording.recorder import RawAllocation, RawRecording
from trainers.recording.tapes import leave_out_aligned_copies

pytestmark = pytest.mark.usefixtures("preloaded_python")

COGVIEW = {
    "_class_name": "CogView4Transformer2DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "text_embed_dim": 64,
    "time_embed_dim": 32,
    "condition_dim": 16,
    "num_layers": 7,
}
STEP = "step-lora-half-half-none-one"
UNUSUAL: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": {  # a mask over fewer heads of keys than of queries
        "head_dim": 32,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
    },
    "BriaFiboTransformer2DModel": {  # a text for each block
        "in_channels": 16,
        "joint_attention_dim": 64,
        "num_attention_heads": 2,
        "num_layers": 3,
        "num_single_layers": 3,
        "text_encoder_dim": 48,
    },
    "HunyuanDiT2DModel": {  # biases that are joined before they are used
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "cross_attention_dim_t5": 64,
        "hidden_size": 32,
        "in_channels": 4,
        "num_attention_heads": 2,
        "num_layers": 8,
        "patch_size": 2,
        "pooled_projection_dim": 32,
    },
    "LTX2VideoTransformer3DModel": {  # gradients of what all blocks are given add up from the third block on
        "attention_head_dim": 32,
        "audio_attention_head_dim": 32,
        "audio_cross_attention_dim": 64,
        "audio_num_attention_heads": 2,
        "caption_channels": 64,
        "cross_attention_dim": 64,
        "num_attention_heads": 2,
        "num_layers": 7,
    },
    "UNet1DModel": {"extra_in_channels": 64},  # lengths of which few shapes show all
    "UNet2DModel": {"block_out_channels": [32, 64, 64, 64]},  # pixels, without a VAE
    "ZImageTransformer2DModel": {  # image and text are filled up to multiples of 32
        "cap_feat_dim": 64,
        "dim": 256,
        "n_heads": 2,
        "n_kv_heads": 2,
        "n_layers": 7,
    },
}
"""Classes that once were refused, small."""
ROWS_OF_TWO = ((367, 373, 1021, 2063), (349, 347, 1019, 2053))
LENGTHS = tuple(height * width + text for height, width, text, _ in ROWS_OF_TWO)


def vplan(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)], prog_name="vplan", standalone_mode=True)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_data.VARIABLE, str(tmp_path / "home"))


def wrote(place: Path, config: dict[str, Any]) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_a_class_without_a_family_is_recorded_as_it_runs_at_full_depth(tmp_path: Path) -> None:
    done = vplan("record", wrote(tmp_path / "mine", COGVIEW), "--variant", STEP, "--json")
    assert done.exit_code == 0, done.output
    profile = lookup.model("mine")
    call = ForwardCall.read(profile.inputs)
    assert (profile.family, profile.kind, profile.vae.spatial) == (FAMILY, "image", 8)
    assert call.forward["hidden_states"] == "B 16 2H 2W" and call.forward["encoder_hidden_states"] == "B T 64"
    assert any("hidden_states is [B 16 2H 2W], found by dry runs" in note for note in call.assumed)
    variant = StepVariant("lora", Precision("half", "half", False), "none", True)
    case = Case.of(profile, variant)
    assert from_tape(case).peak == directly(case)[0].peak


@functools.cache
def derived(class_name: str) -> ModelProfile:
    """One of `UNUSUAL`, found out by its class alone: some have bundled models too."""
    source = Source("/nowhere/config.json", "mine", class_name, UNUSUAL[class_name])
    return derive(source, "mine", OwnInputs()).profile


def by_class(class_name: str, variant: StepVariant) -> Case:
    """A recorded step of one of `UNUSUAL`."""
    profile = derived(class_name)
    user_data.write_profile("mine", profile.to_json())
    tapes.full_run_lengths.cache_clear()
    tape = tape_json(tapes.step_tape(profile, variant))
    write_packed(tape, user_data.tapes() / "mine" / f"{variant.name}.json.gz")
    return Case.of(profile, variant)


@pytest.mark.parametrize(
    ("class_name", "method"),
    [
        ("BriaFiboTransformer2DModel", "lora"),
        ("LTX2VideoTransformer3DModel", "full"),
        ("UNet1DModel", "lora"),
        ("UNet2DModel", "full"),
    ],
)
def test_a_class_that_is_called_unusually_is_recorded_as_it_runs(class_name: str, method: str) -> None:
    precision = Precision("half", "half" if method == "lora" else "", False)
    case = by_class(class_name, StepVariant(method, precision, "none", True))
    assert from_tape(case).peak == directly(case)[0].peak


def test_attention_that_differs_by_card_is_recorded_as_each_runs_it() -> None:
    """The math path keeps the scores of every head, where cuDNN keeps a number a row."""
    variant = StepVariant("lora", Precision("half", "half", True), "none", True)
    peaks = {}
    for cudnn in (True, False):
        case = by_class("AceStepTransformer1DModel", variant._replace(cudnn=cudnn))
        operators = recordings.tape("mine", case.variant.name).operators
        assert ("aten._scaled_dot_product_cudnn_attention" in operators) is cudnn
        peaks[cudnn] = from_tape(case).peak
        assert peaks[cudnn] == directly(case)[0].peak
    assert lookup.model("mine").traits.attends_by_card
    assert peaks[True] < peaks[False]
    names = set(own_model.first_variants(lookup.model("mine")))
    steps = {name for name in names if name.startswith(("step-", "sample-"))}
    assert {name for name in steps if "-cudnn" not in name} == {name.replace("-cudnn", "") for name in steps}


def test_biases_that_share_a_gradient_are_freed_by_their_names() -> None:
    """Of the pooler's attention, which joins three: autograd keeps parts of one tensor (`Recorder.label`)."""
    precision = Precision("half", "", False)
    case = by_class("HunyuanDiT2DModel", StepVariant("full", precision, "none", True))
    assert from_tape(case).peak == directly(case)[0].peak
    profile = lookup.model("mine")
    step, optimizer = recordings.tape("mine", case.variant.name), OptimizerVariant("full", "half", "adamw", "foreach")
    program = Program()
    for piece in ("load", "step"):
        program.unfold(step, piece)
    biases = [f"time_extra_emb.pooler.{layer}_proj.bias" for layer in "qkv"]
    sizes = program.bytes_of(case.shape)
    assert sorted(sizes[program.named["gradient"][name]] for name in biases) == [0, 0, 3 * 2 * 64]
    program.unfold(tapes.optimizer_tape(profile, optimizer), "optimizer_first")


def test_noise_levels_from_0_to_1_are_no_whole_numbers_where_steps_are_drawn() -> None:
    """Stable Cascade's prior, trained on noise: its layers multiply an embedding in the dtype of its level."""
    config = {
        "block_out_channels": [64, 64],
        "clip_image_in_channels": 32,
        "clip_text_in_channels": 48,
        "clip_text_pooled_in_channels": 48,
        "conditioning_dim": 64,
        "down_num_layers_per_block": [1, 1],
        "num_attention_heads": [2, 2],
        "up_num_layers_per_block": [1, 1],
    }
    source = Source("/nowhere/config.json", "mine", "StableCascadeUNet", config)
    profile = derive(source, "mine", OwnInputs()).profile
    assert profile.training.objective == "epsilon"
    kind = family(profile)
    batch = kind.batch({"B": 50, "F": 1, "H": 2, "W": 2, "T": 3}, "cpu", torch.bfloat16)
    levels = kind.inputs_and_target(batch)[0]["timestep_ratio"]
    assert levels.dtype == torch.bfloat16 and levels.shape == (50,)
    assert 0 <= levels.min() < levels.max() <= 1


def test_lengths_that_are_filled_up_are_counted_in_units() -> None:
    case = by_class("ZImageTransformer2DModel", StepVariant("lora", Precision("half", "half", False), "none", True))
    profile = lookup.model("mine")
    call = ForwardCall.read(profile.inputs)
    rounded = {name: (entry.product, entry.unit) for name, entry in call.rounded.items()}
    assert rounded == {"C": ("T", 32), "P": ("HW", 32)}
    assert profile.shape.batches == (1, 2) and call.sums["S"].products == ("C", "P")
    assert from_tape(case).peak == pytest.approx(directly(case)[0].peak, rel=0.005)


def test_what_no_dry_run_tells_is_asked_for_with_an_example(tmp_path: Path) -> None:
    place = wrote(tmp_path / "mine", {"_class_name": "AnyFlowFARTransformer3DModel", "num_layers": 2})
    done = vplan("record", place, "--json")
    assert done.exit_code == 1, done.output
    error = json.loads(done.stdout)["error"]
    assert "AnyFlowFARTransformer3DModel is called with something" in error["message"]
    assert "--inputs" in error["fix"] and "inputs." in error["fix"]


def test_inputs_are_of_a_folder(tmp_path: Path) -> None:
    assert vplan("record", "mochi-1", "--inputs", tmp_path / "x.toml").exit_code == 2


@pytest.mark.parametrize(
    ("complaint", "width"),
    [
        ("a and b must have same reduction dim, but got [1144, 10007] X [64, 3072].", 64),
        ("mat1 and mat2 shapes cannot be multiplied (4x10007 and 768x320)", 768),
        ("expected input[2, 10007, 22, 26] to have 16 channels, but got 10007 channels instead", 16),
        ("a and b must have same reduction dim, but got [2, 11543] X [2816, 1280].", 1280),
        ("a and b must have same reduction dim, but got [1144, 40028] X [256, 3072].", 64),
    ],
)
def test_a_layer_says_which_width_it_wants(complaint: str, width: int) -> None:
    assert next(likely_widths(complaint, {10007})) == (10007, width)


def test_a_complaint_about_something_else_teaches_nothing() -> None:
    assert not list(likely_widths("a and b must have same reduction dim, but got [440308, 26] X [64, 3072].", {10007}))
    assert not list(likely_widths("not enough values to unpack (expected 5, got 4)", {10007}))


def test_shapes_that_do_not_broadcast_say_a_width() -> None:
    complaint = (
        "Attempting to broadcast a dimension of length 10007 at -1! Mismatching argument at index 1 had "
        "torch.Size([1, 1, 572, 10007]); but expected shape should be broadcastable to [2, 24, 572, 64]"
    )
    assert next(likely_widths(complaint, {10007})) == (10007, 64)
    assert not list(likely_widths("shapes [2, 10007] and 606 do not match", {10007}))  # 606 is a length of the dry run


def test_stages_that_are_lists_hold_the_blocks() -> None:
    model = nn.Module()
    model.down_blocks = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(count)) for count in (1, 3))
    found = [(entry.name, entry.depth_key, entry.blocks) for entry in block_lists(nn.Module, {}, model)]
    assert found == [("down_blocks.0", "", 1), ("down_blocks.1", "", 3)]


@pytest.mark.parametrize(
    ("few", "whole", "told"),
    [
        ((6,), (40,), True),
        ((6, 6), (19, 38), True),
        ((3, 3), (20, 20), False),  # HunyuanDiT's second half has skips: neither half has a middle
        ((3, 3), (3, 3), True),
        ((2, 1, 3), (2, 1, 2, 1, 34), False),  # other runs, as BriaFibo 2's blocks are named by number
    ],
)
def test_few_blocks_stand_for_all_where_their_runs_are_the_same(
    few: tuple[int, ...], whole: tuple[int, ...], told: bool
) -> None:
    def model(runs: tuple[int, ...]) -> nn.Module:
        blocks = [nn.Linear(2, 3 + run % 2, bias=False) for run, count in enumerate(runs) for _ in range(count)]
        return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})

    assert stand_for_all(model(few), model(whole), ["blocks"]) is told


def test_the_plainest_pipeline_is_asked() -> None:
    assert pipelines_of("UNet2DConditionModel")[0].name == "StableDiffusionPipeline"
    assert "num_frames" in pipelines_of("Kandinsky5Transformer3DModel")[0].defaults


def test_a_view_that_fits_nothing_says_a_width() -> None:
    complaint = "shape '[2, 5, 10007, 44, 52]' is invalid for input of size 91520"
    assert next(likely_widths(complaint, {10007})) == (10007, 4)


def test_a_batch_of_two_leaves_a_sum_its_factor_two() -> None:
    grid, other = ({"B": 2, "F": 1, "H": h, "W": w, "T": t, "E": e} for h, w, t, e in ROWS_OF_TWO)
    sums = {"S": (0, ("HW", "T"))}
    first, second = (RawRecording([RawAllocation(48 * 2**17 * size, "aten.cat", None, "forward")]) for size in LENGTHS)
    assert not mismatches(first, second, grid, other, sums, {})


def test_a_batch_of_two_says_nothing_in_a_size() -> None:
    grid = {"B": 2, "F": 1, "H": 367, "W": 373, "T": 1021, "E": 1}
    other = {"B": 2, "F": 1, "H": 349, "W": 347, "T": 1019, "E": 1}
    sizes = [73728 * (shape["H"] * shape["W"] + shape["T"]) for shape in (grid, other)]
    assert new_sum([Mismatch("cat", *sizes)], grid, other, {}) == {"S": (0, ("HW", "T"))}


def test_a_length_that_is_a_sum_is_told_from_two_shapes() -> None:
    grid = {"B": 1009, "F": 359, "H": 367, "W": 373, "T": 1021, "E": 1}
    other = {"B": 997, "F": 353, "H": 349, "W": 347, "T": 1019, "E": 1}

    def size(shape: dict[str, int], constant: int) -> int:
        return 6144 * shape["B"] * (shape["F"] * shape["H"] * shape["W"] + shape["T"] + constant)

    joined = Mismatch("cat", size(grid, 0), size(other, 0))
    assert new_sum([joined], grid, other, {}) == {"S": (0, ("FHW", "T"))}
    registers = Mismatch("cat", size(grid, 4), size(other, 4))
    assert new_sum([registers], grid, other, {}) == {"S": (4, ("FHW", "T"))}
    squared = Mismatch("cat", 7 * size(grid, 0) ** 2 + 1, 9 * size(other, 0))
    assert new_sum([squared], grid, other, {}) == {}


def test_a_sum_that_is_a_multiple_of_a_size_at_one_shape_is_found() -> None:
    grid = {"B": 1009, "F": 1, "H": 367, "W": 373, "T": 1033, "E": 1}
    other = {"B": 997, "F": 1, "H": 349, "W": 347, "T": 1019, "E": 1}
    sizes = [2048 * shape["B"] * (shape["T"] + 68) for shape in (grid, other)]
    assert sizes[0] % grid["H"] == 0
    assert new_sum([Mismatch("cat", *sizes)], grid, other, {}) == {"S": (68, ("T",))}


def test_a_docstring_says_a_layout() -> None:
    doc = "hidden_states (`torch.Tensor` of shape `(batch_size, num_frames, channels, height, width)`):\n  x"
    words = documented(doc, "hidden_states")
    assert from_words(words, "hidden_states", Patch(1, 2, 2)) == "B F ? 2H 2W"
    assert documented(doc, "timestep") == []


def test_a_pipeline_is_read_and_not_imported() -> None:
    facts = pipelines_of("CogVideoXTransformer3DModel")[0]
    assert (facts.name, facts.part, facts.constants["vae_scale_factor_spatial"]) == (
        "CogVideoXPipeline",
        "transformer",
        8,
    )
    assert facts.passed["image_rotary_emb"] == "use_rotary_positional_embeddings"
    assert facts.defaults["max_sequence_length"] == 226 and not facts.predicts_velocity


@pytest.mark.parametrize("copies, multiples", [(1, [-8, 8]), (2, [None, -8, -8])])
def test_a_mask_of_aligned_rows_is_not_copied(copies: int, multiples: list[int | None]) -> None:
    """One that is copied once takes the copy's place; one that all blocks copy is there anyway."""
    mask = RawAllocation(2 * 13 * 13, "aten.mul", None, "forward")
    padded = [
        RawAllocation(2 * 13 * 16, "aten.constant_pad_nd", None, "forward", rounded=(13, 8, 16), copied=0)
        for _ in range(copies)
    ]
    leave_out_aligned_copies(RawRecording([mask, *padded]))
    assert [entry.rounded and entry.rounded[1] for entry in (mask, *padded)] == multiples
