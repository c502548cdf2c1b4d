from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.catalog.lookup import check_blocks, check_job, check_shape, grid, job_for, model, parse_resolution
from planner.catalog.shapes import how_read, in_words, sample_grid
from planner.errors import VplanError
from planner.spec.job import Strategy


def refused(call: Callable[..., object], *arguments: object) -> VplanError:
    """The error of a call that must be refused: one readable line, and a fix."""
    with pytest.raises(VplanError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("name", "frames", "height", "width", "fault", "fix"),
    [
        ("wan2.1-t2v-1.3b", 80, 480, 832, "frames 80 is not 4n+1", "77 or 81"),
        ("wan2.1-t2v-1.3b", 2, 480, 832, "frames 2 is not 4n+1", "--frames 1 or 5"),
        ("ltx-video-2b", 50, 512, 768, "frames 50 is not 8n+1", "49 or 57"),
        ("mochi-1", 50, 480, 848, "frames 50 is not 6n+1", "49 or 55"),
        ("wan2.1-t2v-1.3b", 81, 490, 832, "height 490 is not a multiple of 16", "--height 480 or 496"),
        ("wan2.1-t2v-1.3b", 81, 480, 8, "width 8 is not a multiple of 16", "--width 16"),
        ("ltx-video-2b", 49, 500, 700, "height 500 and width 700", "--height 480 or 512 and --width 672 or 704"),
        ("sd1.5", 1, 500, 512, "height 500 is not a multiple of 64", "448 or 512"),
        ("wan2.2-ti2v-5b", 121, 720, 1280, "height 720 is not a multiple of 32", "--height 704 or 736"),
        ("wan2.2-animate-14b", 1, 480, 832, "frames 1 is too few", "--frames 5"),
        ("cogvideox-5b-i2v", 49, 512, 768, "does not support clips of 512x768", "--height 480 --width 720"),
        ("flux.1-dev", 81, 1024, 1024, "makes images", "--frames 1"),
        ("hidream-i1", 1, 1024, 1040, "at most the pixels of 1024x1024", "--height 1040 --width 1040"),
        ("latentsync-1.6-stage1", 17, 256, 256, "more than LatentSync 1.6, stage 1 takes", "--frames 16"),
        ("wan2.1-t2v-1.3b", 0, 480, 832, "--frames 0 is too small", "from 1 to"),
        ("wan2.1-t2v-1.3b", -3, 480, 832, "--frames -3 is too small", "from 1 to"),
        ("wan2.1-t2v-1.3b", 10**12, 480, 832, "--frames 1000000000000 is too large", "from 1 to"),
        ("wan2.1-t2v-1.3b", 81, 0, 832, "--height 0 is too small", "from 1 to"),
        ("wan2.1-t2v-1.3b", 81, 480, 10**12, "--width 1000000000000 is too large", "from 1 to"),
    ],
)
def test_shapes_a_model_cannot_take(name: str, frames: int, height: int, width: int, fault: str, fix: str) -> None:
    error = refused(check_shape, model(name), frames, height, width)
    assert fault in error.message
    assert fix in error.fix


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "ltx-video-2b", "sd1.5"])
def test_the_values_a_fix_names_work(name: str) -> None:
    profile = model(name)
    usual = profile.shape.resolutions[0]
    for frames in range(1, 60) if profile.kind == "video" else ():
        try:
            check_shape(profile, frames, *usual)
        except VplanError as error:
            for other in error.fix.removeprefix("use --frames ").split(" or "):
                check_shape(profile, int(other), *usual)
    for height in range(1, 300, 7):
        try:
            check_shape(profile, 1, height, usual[1])
        except VplanError as error:
            for other in error.fix.removeprefix("use --height ").split(" or "):
                check_shape(profile, 1, int(other), usual[1])


@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("wan2.1-t2v-1.3b", "480p", (480, 832)),
        ("wan2.1-t2v-1.3b", "720P", (720, 1280)),
        ("wan2.1-t2v-1.3b", "832 x 480", (832, 480)),
        ("wan2.1-t2v-1.3b", "832*480", (480, 832)),  # as Wan's generate.py has it, whose sizes are width*height
        ("wan2.1-t2v-1.3b", "480 * 832", (832, 480)),
        ("cogvideox-2b", "480p", (480, 720)),
        ("cogvideox-2b", "720p", (720, 1280)),
        ("ltx-video-2b", "720p", (704, 1280)),
        ("flux.1-dev", "1024", (1024, 1024)),
        ("flux.1-dev", "640p", (640, 640)),
    ],
)
def test_resolutions_as_people_type_them(name: str, text: str, size: tuple[int, int]) -> None:
    assert parse_resolution(model(name), text) == size
    check_shape(model(name), 1, *size)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("832*480", "832*480 read as width x height (480x832 pixels, height x width)"),
        ("480*832", "480*832 read as width x height (832x480 pixels, height x width)"),
        ("832×480", "832×480 is height x width: portrait, 832 high (else --resolution 480x832)"),
        ("480x832", ""),
        ("512*512", ""),
        ("480p", ""),
    ],
)
def test_a_size_that_may_mean_the_other_way_round_says_how_it_was_read(text: str, note: str) -> None:
    assert how_read(text, *parse_resolution(model("wan2.1-t2v-1.3b"), text)) == note


@pytest.mark.parametrize(
    "text", ["", "nanp", "0p", "-480p", "480x", "480x833", "1e3p", "4k", "9" * 5000, "1000000000000p"]
)
def test_bad_resolutions_are_refused(text: str) -> None:
    refused(parse_resolution, model("wan2.1-t2v-1.3b"), text)


def test_a_job_takes_the_models_usual_shape_where_nothing_was_said() -> None:
    job = job_for(model("wan2.1-t2v-14b"), {"frames": None, "lora_rank": 32})
    assert (job.model, job.frames, job.height, job.width, job.lora_rank) == ("wan2.1-t2v-14b", 81, 480, 832, 32)
    assert "frames 80 is not 4n+1" in refused(job_for, model("wan2.1-t2v-14b"), {"frames": 80}).message
    assert "no field 'rank'" in refused(job_for, model("wan2.1-t2v-14b"), {"rank": 80}).message


def test_every_bucket_and_the_validation_shape_are_checked() -> None:
    wan = model("wan2.1-t2v-1.3b")
    job = job_for(wan, {})
    for wrong in (
        {"buckets": [{"frames": 80, "height": 480, "width": 832}]},
        {"validation": {"frames": 80, "height": 480, "width": 832}},
    ):
        assert "frames 80" in refused(check_job, wan, job.replace(**wrong)).message
    assert "has no experts" in refused(check_job, wan, job.replace(experts="high")).message


def test_strategies_that_count_blocks_the_model_has_not() -> None:
    wan = model("wan2.1-t2v-1.3b")
    check_blocks(wan, Strategy(swap_blocks=29, checkpointed_blocks=30))
    assert "--swap-blocks 29" in refused(check_blocks, wan, Strategy(swap_blocks=30)).fix
    assert "--checkpointed-blocks 30" in refused(check_blocks, wan, Strategy(checkpointed_blocks=31)).fix


@pytest.mark.parametrize(
    ("name", "given", "tokens"),
    [
        # Token counts published in the reference's model table.
        ("wan2.1-t2v-1.3b", {"frames": 81, "height": 480, "width": 832}, 32_760),
        ("hunyuan-video", {"frames": 41, "height": 720, "width": 1280}, 39_600),
        ("ltx-video-2b", {"frames": 49, "height": 512, "width": 768}, 2_688),
        ("cogvideox-5b", {"frames": 49, "height": 480, "width": 720}, 17_550),
        ("wan2.2-ti2v-5b", {"frames": 121, "height": 704, "width": 1280}, 31 * 22 * 40),
        # Patches of two latent frames: 21 of 81 frames are padded to 22, 20 of 77 are not, nor 6 of 21.
        ("cogvideox1.5-5b", {"frames": 81, "height": 768, "width": 1360}, 11 * 48 * 85),
        ("cogvideox1.5-5b", {"frames": 77, "height": 768, "width": 1360}, 10 * 48 * 85),
        ("cogvideox1.5-5b-i2v", {"frames": 21, "height": 768, "width": 1360}, 3 * 48 * 85),
        ("cogvideox1.5-5b", {"frames": 1, "height": 768, "width": 1360}, 48 * 85),
        ("flux.1-dev", {"height": 1024, "width": 1024}, 4_096),
        ("qwen-image", {"height": 1024, "width": 1024}, 4_096),
        ("z-image", {"height": 720, "width": 1280}, 3_600),
        ("latentsync-1.6-stage1", {"height": 512, "width": 512}, 16 * 64),  # coarsest cells, 16 frames of 8 x 8
    ],
)
def test_the_grid_counts_the_models_tokens(name: str, given: dict[str, int], tokens: int) -> None:
    atoms = grid(model(name), job_for(model(name), given))
    assert atoms["F"] * atoms["H"] * atoms["W"] == tokens


def test_the_grid_of_a_bucket() -> None:
    wan = model("wan2.1-t2v-1.3b")
    buckets = [{"frames": 1, "height": 720, "width": 1280, "batch_size": 4}]
    job = job_for(wan, {"buckets": buckets, "text_tokens": 100, "lora_rank": 8})
    assert grid(wan, job, job.shapes[0]) == {"B": 4, "F": 1, "H": 45, "W": 80, "T": 100, "R": 8, "E": 0}
    assert wan.blocks == 30
    assert model("flux.1-dev").blocks == 19 + 38
    assert model("sd1.5").blocks == 8


@pytest.mark.parametrize(("frames", "tokens"), [(1, 1), (49, 51), (121, 126)])
def test_sound_has_25_tokens_a_second(frames: int, tokens: int) -> None:
    """At 24 frames a second, as diffusers' LTX2Pipeline counts them."""
    ltx = model("ltx-2")
    assert grid(ltx, job_for(ltx, {"frames": frames}))["E"] == tokens


@pytest.mark.parametrize(("frames", "latents"), [(5, 2), (22, 7), (124, 37), (345, 102)])
def test_a_vae_that_takes_a_clip_in_chunks_has_its_own_count_of_latents(frames: int, latents: int) -> None:
    """17n + 5 frames become 5n + 2 (diffusers autoencoder_kl_minimax_h3.py ``_encode``)."""
    h3 = model("minimax-h3")
    assert grid(h3, job_for(h3, {"frames": frames}))["F"] == latents
    assert h3.vae.decoded(latents) == frames
    assert h3.vae.coded(1) == h3.vae.decoded(1) == 1


@pytest.mark.parametrize(("frames", "nearest"), [(1, "5 or 22"), (121, "107 or 124"), (125, "124 or 141")])
def test_other_numbers_of_frames_are_refused_with_the_nearest(frames: int, nearest: str) -> None:
    with pytest.raises(VplanError, match=r"is not 17n\+5") as refusal:
        job_for(model("minimax-h3"), {"frames": frames})
    assert refusal.value.fix == f"use --frames {nearest}"


def test_a_model_without_references_takes_none() -> None:
    with pytest.raises(VplanError, match="does not take reference images"):
        job_for(model("flux.1-dev"), {"references": 1})


def test_a_model_that_changes_an_image_is_given_one() -> None:
    edit = model("qwen-image-edit")
    assert job_for(edit, {}).references == 1
    with pytest.raises(VplanError, match="references 0 provides none") as refusal:
        job_for(edit, {"references": 0})
    assert "--references 1" in refusal.value.fix
    assert job_for(model("flux.1-dev"), {"references": 0}).references == 0


@pytest.mark.parametrize(
    ("said", "flag"),
    [
        ({"validation": {"frames": 80, "height": 480, "width": 832}}, "--validation"),
        ({"buckets": [{"frames": 80, "height": 480, "width": 832}]}, "--buckets"),
    ],
)
def test_the_fix_of_a_shape_is_about_the_flag_that_gave_it(said: dict[str, Any], flag: str) -> None:
    with pytest.raises(VplanError, match=f"{flag}: frames 80 is not 4n[+]1") as refusal:
        job_for(model("wan2.1-t2v-1.3b"), said)
    assert refusal.value.fix == f"use frames 77 or 81 in {flag}"


def test_reference_images_count_at_the_samples_own_size() -> None:
    kontext, flux2 = model("flux.1-kontext-dev"), model("flux.2-dev")
    shape = {"height": 512, "width": 768}
    assert [grid(kontext, job_for(kontext, {**shape, **said}))["E"] for said in ({}, {"references": 2})] == [1536, 3072]
    assert [grid(flux2, job_for(flux2, {**shape, **said}))["E"] for said in ({}, {"references": 2})] == [0, 3072]


def test_a_model_that_is_trained_whole_says_so() -> None:
    assert job_for(model("latentsync-1.6-stage1"), {}).method == "full"
    assert job_for(model("latentsync-1.6-stage1"), {"method": "lora"}).method == "lora"
    assert job_for(model("sd1.5"), {}).method == "lora"


def test_an_image_of_a_video_model_has_no_frames_in_words() -> None:
    profile = model("wan2.1-t2v-1.3b")
    shape = {"height": 1328, "width": 1328}
    assert in_words(profile, job_for(profile, {"frames": 1, **shape})) == "1328x1328, batch 1"
    assert in_words(profile, job_for(profile, {"frames": 5, **shape})) == "5 frames of 1328x1328, batch 1"


def test_an_image_that_is_not_square_is_priced_as_the_square_it_is_filled_up_to() -> None:
    profile = model("hidream-i1")
    wide, square = (job_for(profile, {"height": 512, "width": width}) for width in (768, 512))
    assert [grid(profile, wide)[side] for side in "HW"] == [64, 64]
    assert [sample_grid(profile, wide)[side] for side in "HW"] == [32, 48]
    assert grid(profile, square) == sample_grid(profile, square)
    assert [grid(profile, square)[side] for side in "HW"] == [32, 32]
