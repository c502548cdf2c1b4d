"""musubi-tuner as it trains: Wan 2.2's time embedding, images of video models, what its adapters are on."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.catalog.shapes import grid
from planner.dialects.base.dialect import Move
from planner.dialects.base.script import from_file
from planner.foreign.case import Case, read_case
from planner.foreign.change_words import cost_words, costs_of
from planner.foreign.check import check_case
from planner.foreign.pricing import Pricing
from planner.foreign.smallest_change import moves_of
from planner.layout import trainer_terms
from planner.layout.checkpoints.block_inputs import offloaded_bytes
from planner.layout.phases import encodings
from planner.layout.pipeline import lay_out, transforms
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.layout.trainer_terms.kohya_lora import inputs_as_they_are
from planner.layout.trainer_terms.musubi_tuner import ONE_TIME
from planner.search.run_cache import RunCache
from planner.search.screening import allocated_peak
from planner.units import GIB

COMMAND = """accelerate launch --mixed_precision bf16 src/musubi_tuner/{} --sdpa --gradient_checkpointing \\
  --network_module networks.lora --network_dim {} --dit x_low.safetensors {}
"""


def case_of(
    folder: Path,
    script: str,
    rank: int,
    words: str,
    shape: tuple[int, int, int] | None = None,
    gpu: str = "h200",
    **machine: int,
) -> Case:
    (folder / "a.sh").write_text(COMMAND.format(script, rank, words))
    dialect, given = dialects.read_script(from_file(folder / "a.sh"))
    told = dict(zip(("frames", "height", "width"), shape, strict=True)) if shape else {}
    return read_case(dialect, given, told, {"gpu": gpu, **machine})


def run_of(case: Case) -> Run:
    facts = load_facts(case.configuration, case.model, case.gpu)
    return lay_out(case.configuration, facts, grid(case.model, case.job), case.trainer)


REHEARSED = {
    ((81, 480, 832), ""): (59.87, 67.79),
    ((81, 480, 832), "--force_v2_1_time_embedding"): (51.11, 58.83),
    ((81, 720, 1280), ""): (101.98, 117.16),
    ((81, 720, 1280), "--force_v2_1_time_embedding"): (81.80, 92.50),
}
"""Of its script at 30c658c on a virtual H200, I2V-A14B in bf16, rank 16, checkpointed: GiB allocated and reserved. The
second is of its model code alone."""


@pytest.mark.parametrize(("shape", "flag"), REHEARSED)
def test_wan_2_2_holds_what_its_own_code_holds(shape: tuple[int, int, int], flag: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, "wan_train_network.py", 16, f"--task i2v-A14B {flag}", shape)
    peaks = Pricing(case).outcome(case).estimate.phases["train"]
    allocated, reserved = REHEARSED[shape, flag]
    assert peaks.allocated_bytes / GIB / allocated == pytest.approx(1, abs=0.002)
    assert peaks.reserved_bytes / GIB / reserved == pytest.approx(1, abs=0.002)


def test_over_fp8_wan_1_3b_holds_what_its_script_holds(tmp_path: Path) -> None:
    """The command [4] of docs/rehearsal.md."""
    words = "--task t2v-1.3B --fp8_base --optimizer_type adamw8bit"
    case = case_of(tmp_path, "wan_train_network.py", 32, words, (81, 480, 832), "24GB")
    peaks = Pricing(case).outcome(case).estimate.phases["train"]
    assert peaks.allocated_bytes / GIB == pytest.approx(9.08, abs=0.01)
    assert peaks.reserved_bytes / GIB == pytest.approx(10.19, abs=0.01)


def test_a_time_embedding_of_each_token_is_14_vectors_in_fp32(tmp_path: Path) -> None:
    """Six that all blocks share, six with a block's own modulation, and 1 + scale twice."""
    task = "--task t2v-A14B"
    each, one = (case_of(tmp_path, "wan_train_network.py", 16, f"{task} {flag}", (81, 480, 832))
                 for flag in ("", "--force_v2_1_time_embedding"))  # fmt: skip
    assert (each.trainer, one.trainer) == ("musubi-tuner", "musubi-tuner@2.1-time-embedding")
    peaks = [Pricing(case).outcome(case).estimate.peak.allocated_bytes for case in (each, one)]
    assert peaks[0] - peaks[1] == pytest.approx(14 * 32_760 * 5120 * 4, rel=5e-4)  # and a few numbers more
    older = case_of(tmp_path, "wan_train_network.py", 16, "--task t2v-14B", (81, 480, 832))
    assert Pricing(older).outcome(older).estimate.peak.allocated_bytes < peaks[1] * 1.01


@pytest.mark.parametrize("checkpointing", ["none", "full", "offload"])
@pytest.mark.parametrize(
    ("script", "words"),
    [("wan_train_network.py", "--task t2v-A14B"), ("qwen_image_train_network.py", ""), ("hv_train_network.py", "")],
)
def test_what_its_terms_add_and_take_away_is_freed(script: str, words: str, checkpointing: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, script, 16, words).changed({"gradient_checkpointing": checkpointing})
    run = run_of(case)
    live = {event for event in run.load.ops if event >= 0} - {~event for event in run.load.ops if event < 0}
    for event in run.step.ops:
        if event >= 0:
            assert event not in live
            live.add(event)
        else:
            live.remove(~event)
    assert live == {*live} & {*run.load.ops, *run.leftovers, *run.named("gradient").values()}


def test_an_adapter_takes_its_layers_input_as_it_is(tmp_path: Path) -> None:
    """Of Wan's block, in tokens of bf16: three copies of what q, k and v share are one, attention and its output are
    kept as they come, and nothing is in fp32 for an adapter. Of a model that is not recorded from its own code."""
    case = case_of(tmp_path, "wan_train_network.py", 16, "--task i2v-14B", (9, 480, 832))
    facts, where = load_facts(case.configuration, case.model, case.gpu), grid(case.model, case.job)
    terms = trainer_terms.terms(case.trainer)
    assert inputs_as_they_are in terms
    peaks = []
    for left_out in (None, inputs_as_they_are):
        run = RunCache().untransformed(case.configuration, facts.trained_by(case.trainer), where).untransformed_copy()
        run.trainer = case.trainer
        for transform in transforms(case.trainer):
            if transform is not left_out:
                transform(run)
        peaks.append(allocated_peak(run)[0])
    peak, casting = peaks
    tokens = 3 * 30 * 52
    assert (casting - peak) / (tokens * 5120 * 2) > 8


def test_qwens_adapters_are_on_modulation_too(tmp_path: Path) -> None:
    """networks/lora_qwen_image.py:37: no name of a layer matches ``.*(_mod_).*``. Weights, gradients and two states of
    128 x (3072 + 6 x 3072), twice in each of 60 blocks, in fp32."""
    case = case_of(tmp_path, "qwen_image_train_network.py", 128, "")
    run = run_of(case)
    names = {
        run.program.op[event]: run.sizes[event] for event in [*run.load.ops, *run.optimizer_first.ops] if event >= 0
    }
    added = 4 * 128 * (3072 + 6 * 3072) * 2 * 60
    assert names["adapters on modulation"] == added
    assert names["states of adapters on modulation"] == pytest.approx(2 * added, rel=0.001)
    assert trainer_terms.terms("musubi-tuner") and added / GIB == pytest.approx(1.23, abs=0.01)


IMAGES = """[general]
resolution = [1024, 1024]
batch_size = 1
[[datasets]]
{} = "/data/x"
cache_directory = "/data/c"
"""
MIXED = """[[datasets]]
image_directory = "/data/x"
resolution = [1024, 1024]
batch_size = 4
[[datasets]]
video_directory = "/data/v"
resolution = [832, 480]
target_frames = [1, 25, 81]
"""


def shaped(folder: Path, dataset: str) -> dict[str, object]:
    (folder / "d.toml").write_text(dataset)
    case = case_of(folder, "wan_train_network.py", 16, "--task t2v-14B --dataset_config d.toml")
    return case.job.to_json()


@pytest.mark.parametrize("key", ["image_directory", "image_jsonl_file"])
def test_a_dataset_of_images_is_one_frame_for_a_video_model(key: str, tmp_path: Path) -> None:
    job = shaped(tmp_path, IMAGES.format(key))
    assert (job["frames"], job["height"], job["width"], job["buckets"]) == (1, 1024, 1024, [])


def test_clips_without_target_frames_are_one_frame(tmp_path: Path) -> None:
    """dataset/config_utils.py:68."""
    assert shaped(tmp_path, IMAGES.format("video_directory"))["frames"] == 1


def test_all_datasets_count_each_with_its_own_batch(tmp_path: Path) -> None:
    job = shaped(tmp_path, MIXED)
    buckets = {(each["frames"], each["height"], each["batch_size"]) for each in job["buckets"]}  # type: ignore[attr-defined,index]
    assert buckets == {(1, 1024, 4), (1, 480, 1), (25, 480, 1), (81, 480, 1)}
    assert (job["frames"], job["height"], job["batch_size"]) == (81, 480, 1)


def test_one_time_embedding_for_all_tokens_is_among_the_changes(tmp_path: Path) -> None:
    """No option was found to be enough for what the flag and block swap together bring onto a 24 GB card."""
    words = "--task t2v-A14B --fp8_base --fp8_scaled --optimizer_type adamw8bit"
    case = case_of(tmp_path, "wan_train_network.py", 32, words, (81, 544, 960), "rtx4090")
    (fix, *_) = check_case(case).fixes
    assert "--force_v2_1_time_embedding" in fix.change and not fix.lossy
    assert fix.case.version == ONE_TIME and fix.outcome.estimate.verdict == "fits"
    older = case_of(tmp_path, "wan_train_network.py", 32, "--task t2v-14B", (81, 544, 960), "rtx4090")
    assert all(move.changes != {"version": ONE_TIME} for move in moves_of(older)), "Wan 2.1 has one anyway"
    flagged = case_of(tmp_path, "wan_train_network.py", 32, f"{words} --force_v2_1_time_embedding", (81, 544, 960))
    assert all(move.changes != {"version": ONE_TIME} for move in moves_of(flagged))


def test_each_cost_stands_with_its_option_and_none_is_called_slower_that_is_not(tmp_path: Path) -> None:
    words = "--task t2v-A14B --fp8_base --fp8_scaled --optimizer_type adamw8bit"
    case = case_of(tmp_path, "wan_train_network.py", 32, words, (81, 544, 960), "rtx4090")
    found = check_case(case)
    (fix, *_) = found.fixes
    assert fix.outcome.estimate.step_seconds < found.outcome.estimate.step_seconds and "slower" not in fix.cost
    assert "--blocks_to_swap 32 (host RAM for the blocks)" in fix.cost
    assert "--gradient_checkpointing_cpu_offload (host RAM for the checkpoints)" in fix.cost
    free, paid = Move({"expandable_segments": True}, "free"), Move({"swap_blocks": 8}, "slower, and host RAM")
    assert cost_words(costs_of([free, paid], [("A",), ("B",)]), several=True) == "B (slower, and host RAM)"
    for moves, words, faster, told in (([free], [("A",)], False, "free"), ([paid], [("B",)], True, "host RAM")):
        assert cost_words(costs_of(moves, words, faster), several=False) == told


TILES = {
    "": ((128, 128, 96, 96), 3.1),
    "--vae_sample_size 256": ((256, 256, 192, 192), 5.2),
    "--vae_sample_size 0": ((), 24.3),
}
"""What sets a tile of HunyuanVideo 1.5's VAE -> its rows, columns and strides, and GiB allocated while 25 frames of
544x960 are cached: 2.3 of weights, and four times as much beside them for tiles of four times the area."""


@pytest.mark.parametrize("flag", TILES)
def test_latents_of_hunyuan_video_1_5_are_cached_in_its_tiles(flag: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, "hv_1_5_train_network.py", 4, f"--task t2v {flag}", (25, 544, 960))
    tile, gib = TILES[flag]
    assert case.strategy.vae_tiling == bool(tile)
    assert not tile or run_of(case).device.vae_tile == tile
    (vae,) = (each for each in encodings(run_of(case)) if each.components[0].name == case.model.vae.folder)
    assert vae.only.peak_bytes / GIB == pytest.approx(gib, abs=0.1)


def test_what_is_cached_ends_in_its_own_phase(tmp_path: Path) -> None:
    """Encoders before the VAE have room there, as the VAE has not; nothing is encoded beside gradients."""
    case = case_of(tmp_path, "hv_1_5_train_network.py", 4, "--task t2v --vae_sample_size 0", (25, 544, 960), "12GB")
    found = Pricing(case).outcome(case)
    assert (found.estimate.verdict, found.phase, found.moment) == ("no", "encode", "encoding prompts and clips")


def test_a_change_that_leaves_a_flag_out_says_so(tmp_path: Path) -> None:
    """Where host RAM is what is short, checkpoints stay on the GPU; the change had no words, as it writes no flag."""
    words = "--task t2v-14B --gradient_checkpointing_cpu_offload"
    case = case_of(tmp_path, "wan_train_network.py", 16, words, (81, 480, 832), "80GB", host_ram=14 * GIB)
    (fix, *_) = check_case(case).fixes
    assert fix.change == ("without --gradient_checkpointing_cpu_offload",)
    assert fix.cost == "checkpoints stay on the GPU" and fix.outcome.estimate.verdict == "fits"


def test_checkpoints_in_host_ram_keep_what_all_blocks_are_given_on_the_gpu(tmp_path: Path) -> None:
    """A block's outputs go to the CPU (utils/model_utils.py ``create_cpu_offloading_wrapper``), the time embedding of
    each token, which is 3.75 GiB of every block's arguments, does not."""
    words = "--task t2v-A14B --fp8_base --fp8_scaled --gradient_checkpointing_cpu_offload"
    case = case_of(tmp_path, "wan_train_network.py", 16, words, (81, 480, 832), "48GB")
    inputs = 39 * 2 * 21 * 30 * 52 * 5120  # the first is made outside the blocks
    assert offloaded_bytes(run_of(case)) == inputs
