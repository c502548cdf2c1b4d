from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import profiles
from planner.catalog import card_lookup, lookup
from planner.catalog.card_lookup import card_taken_for, gpu, parse_gpus
from planner.catalog.lookup import check_shape, grid, job_for, model, several
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.spec.job import Job, Strategy
from planner.units import GIB, MIB

PUBLISHED = Path(__file__).parents[3] / "profiles" / "measurements" / "published.jsonl"


def refused(call: Callable[..., object], *arguments: object) -> VplanError:
    """The error of a call that must be refused: one readable line, and a fix."""
    with pytest.raises(VplanError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.fix
    return caught.value


# ---- models


def test_every_bundled_model_is_sound() -> None:
    names = lookup.model_names()
    assert set(names) >= {
        "wan2.1-t2v-1.3b",
        "wan2.1-t2v-14b",
        "wan2.1-i2v-14b-480p",
        "wan2.1-i2v-14b-720p",
        "wan2.1-vace-1.3b",
        "wan2.1-vace-14b",
        "wan2.2-t2v-a14b",
        "wan2.2-i2v-a14b",
        "wan2.2-ti2v-5b",
        "wan2.2-animate-14b",
        "cogvideox-2b",
        "cogvideox-5b",
        "cogvideox-5b-i2v",
        "cogvideox1.5-5b",
        "cogvideox1.5-5b-i2v",
        "ltx-video-2b",
        "hunyuan-video",
        "flux.1-dev",
        "sd3-medium",
        "sd3.5-medium",
        "sd1.5",
        "sd2.1",
        "mochi-1",
        "ltx-video-13b",
        "ltx-2",
        "ltx-2.3",
        "ltx-2.5",
        "minimax-h3",
        "easyanimate-v5.1-7b",
        "easyanimate-v5.1-12b",
        "hunyuan-video-1.5",
        "qwen-image",
        "qwen-image-edit",
        "latentsync-1.6-stage1",
        "sd3.5-large",
        "flux.1-kontext-dev",
        "flux.2-dev",
        "z-image",
        "krea-2",
        "flux.2-klein-4b",
        "hunyuan-image-2.1",
        "ernie-image",
        "ideogram-4",
        "hidream-i1",
        "chroma1-hd",
        "flex.1-alpha",
        "flux.1-schnell",
        "longcat-image",
        "qwen-image-layered",
        "qwen-image-2.1",
        "flux.3",
        "lumina-image-2.0",
        "anima",
        "sana-1.6b",
        "sana1.5-1.6b",
        "sana1.5-4.8b",
        "kandinsky-5.0-t2v-lite",
        "kandinsky-5.0-i2v-lite",
        "kandinsky-5.0-t2v-pro",
        "kandinsky-5.0-t2i-lite",
        "framepack",
        "skyreels-v2-t2v-14b",
        "skyreels-v2-i2v-14b",
        "skyreels-v2-i2v-1.3b",
        "skyreels-v2-df-14b",
        "skyreels-v2-df-1.3b",
        "sana-video-2b",
        "cosmos-predict2.5-2b",
        "cosmos-predict2-2b-v2w",
    }
    for name in names:
        profile = model(name)
        assert profile.name == name
        job = job_for(profile, {})
        assert all(count >= 1 for atom, count in grid(profile, job).items() if atom != "E")
        for height, width in profile.shape.resolutions:
            check_shape(profile, profile.shape.default_frames, height, width)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("wan2.1-t2v-1.3b", "wan2.1-t2v-1.3b"),
        ("Wan2.1-T2V-1.3B", "wan2.1-t2v-1.3b"),
        (" wan2.1 t2v 1.3b ", "wan2.1-t2v-1.3b"),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan2.1-t2v-1.3b"),
        ("Wan-AI/Wan2.1-T2V-1.3B", "wan2.1-t2v-1.3b"),
        ("wan i2v 480p", "wan2.1-i2v-14b-480p"),
        ("wan2.2 i2v", "wan2.2-i2v-a14b"),
        ("wan22-i2v", "wan2.2-i2v-a14b"),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "wan2.2-t2v-a14b"),
        ("wan2.2-5b", "wan2.2-ti2v-5b"),
        ("wan animate", "wan2.2-animate-14b"),
        ("vace-1.3b", "wan2.1-vace-1.3b"),
        ("THUDM/CogVideoX-5b-I2V", "cogvideox-5b-i2v"),
        ("zai-org/CogVideoX1.5-5B", "cogvideox1.5-5b"),
        ("cogvideox-1.5-i2v", "cogvideox1.5-5b-i2v"),
        ("cogvideox2b", "cogvideox-2b"),
        ("cogvideox-2", "cogvideox-2b"),
        ("THUDM/CogVideoX-5b", "cogvideox-5b"),
        ("black-forest-labs/FLUX.1-dev", "flux.1-dev"),
        ("hunyuan-video", "hunyuan-video"),
        ("HunyuanVideo-1.5", "hunyuan-video-1.5"),
        ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", "hunyuan-video-1.5"),
        ("genmo/mochi-1-preview", "mochi-1"),
        ("mochi", "mochi-1"),
        ("ltx-video", "ltx-video-2b"),
        ("Lightricks/LTX-Video-0.9.7-dev", "ltx-video-13b"),
        ("ltx 13b", "ltx-video-13b"),
        ("Lightricks/LTX-2", "ltx-2"),
        ("ltx2", "ltx-2"),
        ("Lightricks/LTX-2.3", "ltx-2.3"),
        ("ltx-2.3-22b-dev", "ltx-2.3"),
        ("ltx2.5", "ltx-2.5"),
        ("MiniMaxAI/MiniMax-H3", "minimax-h3"),
        ("alibaba-pai/EasyAnimateV5.1-12b-zh-InP", "easyanimate-v5.1-12b"),
        ("easyanimate 7b", "easyanimate-v5.1-7b"),
        ("flux1", "flux.1-dev"),
        ("flux2", "flux.2-dev"),
        ("black-forest-labs/FLUX.2-dev", "flux.2-dev"),
        ("klein-4b", "flux.2-klein-4b"),
        ("krea", "krea-2"),
        ("hunyuan image", "hunyuan-image-2.1"),
        ("baidu/ERNIE-Image", "ernie-image"),
        ("circlestone-labs/Anima", "anima"),
        ("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", "sana-1.6b"),
        ("Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers", "sana1.5-4.8b"),
        ("kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", "kandinsky-5.0-t2v-lite"),
        ("kandinskylab/Kandinsky-5.0-I2V-Lite-5s-Diffusers", "kandinsky-5.0-i2v-lite"),
        ("Kandinsky 5.0 Image", "kandinsky-5.0-t2i-lite"),
        ("lllyasviel/FramePackI2V_HY", "framepack"),
        ("Skywork/SkyReels-V2-T2V-14B-720P-Diffusers", "skyreels-v2-t2v-14b"),
        ("SkyReels V2 I2V 1.3B", "skyreels-v2-i2v-1.3b"),
        ("Skywork/SkyReels-V2-DF-1.3B-540P", "skyreels-v2-df-1.3b"),
        ("Efficient-Large-Model/SANA-Video_2B_480p_diffusers", "sana-video-2b"),
        ("Sana Video", "sana-video-2b"),
        ("nvidia/Cosmos-Predict2.5-2B", "cosmos-predict2.5-2b"),
        ("nvidia/Cosmos-Predict2-2B-Video2World", "cosmos-predict2-2b-v2w"),
        ("ideogram", "ideogram-4"),
        ("HiDream-ai/HiDream-I1-Full", "hidream-i1"),
        ("HiDream-ai/HiDream-I1-Dev", "hidream-i1"),
        ("lodestones/Chroma1-HD", "chroma1-hd"),
        ("ostris/Flex.1-alpha", "flex.1-alpha"),
        ("black-forest-labs/FLUX.1-schnell", "flux.1-schnell"),
        ("flux schnell", "flux.1-schnell"),
        ("meituan-longcat/LongCat-Image-Dev", "longcat-image"),
        ("LongCat Image", "longcat-image"),
        ("Qwen/Qwen-Image-Layered", "qwen-image-layered"),
        ("Qwen/Qwen-Image-2.1", "qwen-image-2.1"),
        ("Qwen Image 2.1", "qwen-image-2.1"),
        ("FLUX 3", "flux.3"),
        ("lumina", "lumina-image-2.0"),
        ("kontext", "flux.1-kontext-dev"),
        ("black-forest-labs/FLUX.1-Kontext-dev", "flux.1-kontext-dev"),
        ("qwen", "qwen-image"),
        ("Qwen/Qwen-Image-Edit-2509", "qwen-image-edit"),
        ("stabilityai/stable-diffusion-3.5-large", "sd3.5-large"),
        ("stabilityai/stable-diffusion-3-medium-diffusers", "sd3-medium"),
        ("stabilityai/stable-diffusion-3-medium", "sd3-medium"),
        ("Tongyi-MAI/Z-Image", "z-image"),
        ("latentsync", "latentsync-1.6-stage1"),
        ("sd15", "sd1.5"),
        ("stabilityai/stable-diffusion-2-1", "sd2.1"),
        ("sd2.0", "sd2.1"),
    ],
)
def test_model_names_as_people_type_them(typed: str, name: str) -> None:
    assert model(typed).name == name


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("mochi-1", 10_028),
        ("ltx-video-13b", 13_043),
        ("ltx-2", 18_876),
        ("ltx-2.3", 18_989),
        ("minimax-h3", 33_122.99),
        ("easyanimate-v5.1-7b", 6_815),
        ("easyanimate-v5.1-12b", 11_799),
        ("hunyuan-video-1.5", 8_327),
        ("ernie-image", 8_033),
        ("anima", 1_956),
        ("flux.1-schnell", 11_891),
        ("longcat-image", 6_270.67),
        ("qwen-image-layered", 20_430.41),
        ("qwen-image-2.1", 7_115.12),
        ("flux.3", 5_538.46),
        ("sana-1.6b", 1_604),
        ("sana1.5-1.6b", 1_605),
        ("sana1.5-4.8b", 4_722),
        ("sana-video-2b", 2_056.86),
        ("cosmos-predict2.5-2b", 2_059.17),
        ("cosmos-predict2-2b-v2w", 1_956.41),
        ("kandinsky-5.0-t2v-lite", 2_007.70),
        ("kandinsky-5.0-t2v-pro", 19_311),
        ("kandinsky-5.0-t2i-lite", 6_022),
        ("framepack", 12_874),
        ("skyreels-v2-t2v-14b", 14_288.49),
        ("skyreels-v2-i2v-14b", 16_394.88),
        ("skyreels-v2-i2v-1.3b", 1_564.43),
        ("skyreels-v2-df-1.3b", 1_435.53),
        ("sd2.1", 865.91),
    ],
)
def test_parameters_are_the_published_ones(name: str, millions: float) -> None:
    assert model(name).parameters == pytest.approx(millions * 10**6, rel=0.001)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("krea/Krea-2-Turbo", "krea-2"),
        ("baidu/ERNIE-Image-Turbo", "ernie-image"),
    ],
)
def test_a_distilled_model_is_not_taken_for_the_one_it_was_made_of(typed: str, name: str) -> None:
    error = refused(model, typed)
    assert "is a distilled" in error.message and f"use {name}, whose memory is the same" in error.fix


def test_an_ambiguous_model_lists_its_variants() -> None:
    error = refused(model, "wan2.1")
    assert "is ambiguous" in error.message
    assert "wan2.1-i2v-14b-480p, wan2.1-i2v-14b-720p, wan2.1-t2v-1.3b, wan2.1-t2v-14b" in error.fix
    assert "hunyuan-video, hunyuan-video-1.5" in refused(model, "hunyuan").fix
    assert "wan2.1-i2v-14b-480p, wan2.1-i2v-14b-720p" in refused(model, "wan2.1-i2v-14b").fix
    assert "wan2.2-i2v-a14b, wan2.2-t2v-a14b, wan2.2-ti2v-5b" in refused(model, "wan2.2").fix
    assert "wan2.1-vace-1.3b, wan2.1-vace-14b" in refused(model, "vace").fix
    assert "sd3.5-large, sd3.5-medium" in refused(model, "sd3.5").fix
    assert "flux.1-dev, flux.1-kontext-dev, flux.1-schnell, flux.2-dev" in refused(model, "flux").fix


@pytest.mark.parametrize(("typed", "as_if"), [("wan21", "wan2.1"), ("wan-2.2", "wan2.2"), ("sd35", "sd3.5"),
                                              ("wan 2.1 14b", "wan2.1-14b")])  # fmt: skip
def test_a_version_means_the_same_without_its_dot_and_apart(typed: str, as_if: str) -> None:
    assert refused(model, typed).fix == refused(model, as_if).fix


def test_parameter_counts_are_those_of_the_published_architectures() -> None:
    """Billions, counted independently of the profiles."""
    known = {
        "wan2.1-i2v-14b-720p": 16.395,
        "wan2.1-vace-1.3b": 2.154,
        "wan2.1-vace-14b": 17.338,
        "wan2.2-t2v-a14b": 14.288,
        "wan2.2-i2v-a14b": 14.289,
        "wan2.2-ti2v-5b": 5.000,
        "cogvideox1.5-5b": 5.571,
    }
    for name, billions in known.items():
        assert model(name).parameters / 1e9 == pytest.approx(billions, rel=1e-3), name
    assert model("wan2.2-t2v-a14b").experts == model("wan2.2-i2v-a14b").experts == 2


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("hunyan-video", "did you mean hunyuan-video"),
        ("wan2.1-t2v-13b", "wan2.1-t2v-1.3b"),
        ("somebody/Wan2.1-T2V-14b-finetune", "did you mean wan2.1-t2v-14b"),
        ("", "`vplan models` lists"),
        ("../gpus", "`vplan models` lists"),
        ("/etc/passwd", "`vplan models` lists"),
        ("nan", "`vplan models` lists"),
        ("a\0b", "`vplan models` lists"),
        ("x" * 100_000, "`vplan models` lists"),
    ],
)
def test_an_unknown_model_names_the_nearest(typed: str, fix: str) -> None:
    assert fix in refused(model, typed).fix


@pytest.mark.parametrize(
    ("typed", "among"),
    [
        ("wan 14b", {"wan2.1-t2v-14b", "wan2.1-i2v-14b-480p", "wan2.1-vace-14b", "wan2.2-t2v-a14b"}),
        ("wan2.1-14b", {"wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "wan2.1-vace-14b"}),
        ("wan-1.3b", {"wan2.1-t2v-1.3b", "wan2.1-vace-1.3b"}),
        ("flux", {"flux.1-dev", "flux.2-dev"}),
        ("wan2.2", {"wan2.2-t2v-a14b", "wan2.2-ti2v-5b"}),
    ],
)
def test_a_name_that_several_models_have_means_none_of_them_by_guess(typed: str, among: set[str]) -> None:
    assert among <= set(several(typed))
    assert "is ambiguous" in refused(model, typed).message


def test_a_model_by_its_name_opens_its_own_file_only(elsewhere: Path) -> None:
    (elsewhere / "models" / "flux.1-dev.toml").write_text("damaged")
    assert model("wan2.1-t2v-1.3b").blocks == 30
    assert "flux.1-dev.toml is damaged" in refused(model, "vace-1.3b").message


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('family = "wan"', 'family = "../wan"', "family"),
        ('family = "wan"', "", "family is missing"),
        ('kind = "video"', 'kind = "video"\ncolour = "red"', "has no field 'colour'"),
        ('name = "wan2.1-t2v-1.3b"', 'name = "wan"', "it says name = 'wan'"),
        ('depth_key = "num_layers"', 'depth_key = "layers"', "config has no layers"),
        ("size_multiple = 16", "size_multiple = 20", "not a multiple of 20"),
        ("default_frames = 81", "default_frames = 80", "is not 4n+1"),
        ('class = "AutoencoderKLWan"', 'clas = "AutoencoderKLWan"', "vae has no field 'clas'; did you mean class?"),
        ("[shape]", "[shape", "is damaged: "),
    ],
)
def test_a_damaged_model_is_named_and_refused(elsewhere: Path, old: str, new: str, fault: str) -> None:
    path = elsewhere / "models" / "wan2.1-t2v-1.3b.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    error = refused(model, "wan2.1-t2v-1.3b")
    assert "wan2.1-t2v-1.3b" in error.message
    assert fault in str(error)


def test_two_models_may_not_share_a_name(elsewhere: Path) -> None:
    path = elsewhere / "models" / "sd1.5.toml"
    path.write_text(path.read_text().replace("aliases = [", 'aliases = ["flux-dev", '))
    assert "both have the alias" in refused(model, "no-file-of-this-name").message


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the profiles that a test may damage."""
    shutil.copytree(profiles.MODELS, tmp_path / "models")
    shutil.copy(profiles.GPUS, tmp_path)
    monkeypatch.setattr(profiles, "MODELS", tmp_path / "models")
    monkeypatch.setattr(profiles, "GPUS", tmp_path / "gpus.toml")
    caches = (lookup._model, lookup._model_aliases, card_lookup._gpu_file, card_lookup._gpu_aliases)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


# ---- cards


def test_there_are_enough_cards_and_they_make_sense() -> None:
    cards = [gpu(name) for name in card_lookup.gpu_names()]
    assert len(cards) >= 30
    assert len({card.name for card in cards}) == len(cards)
    for card in cards:
        assert card.allocatable_bytes <= card.nvml_total_mib * MIB, card.name
        # A GB of the label is 10**9 or 2**30 bytes, and ECC takes a sixteenth.
        assert 0.85 * card.class_gb * 10**9 <= card.allocatable_bytes <= card.class_gb * GIB, card.name
        assert card.context_bytes < GIB
        assert card.bf16_tflops in (0.0, card.fp16_tflops), card.name
        assert card.capability >= (6, 0)
    classes = card_lookup.gpu_classes()
    assert (classes[0].gb, classes[-1].gb) == (8, 192)
    for group in classes:
        assert all(gpu(name).reference for name in group.reference)
        least = gpu(group.name).allocatable_bytes
        assert all(gpu(name).allocatable_bytes < least for name in group.smaller), group


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("rtx4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX 4090 24GB", "rtx4090"),
        ("4090-24gb", "rtx4090"),
        ("h100", "h100-80gb"),
        ("H100-80GB", "h100-80gb"),
        ("A100 80GB", "a100-80gb"),
        ("a6000", "rtx-a6000"),
        ("24GB", "24GB"),
        ("24gb", "24GB"),
        ("24 GB", "24GB"),
        ("23.5GiB", "23.5GiB"),
        ("23.5 gib", "23.5GiB"),
        ("24564MiB", "24564MiB"),
        ("4090 48GB", "rtx4090-48gb"),
        ("rtx 4090 laptop", "rtx4090-laptop"),
        ("5070 Ti Laptop GPU 12GB", "rtx5070ti-laptop"),
        ("3080 ti max-q", "rtx3080ti-laptop"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "rtx5090-laptop"),
        ("3080 12GB", "rtx3080-12gb"),
        ("gb200", "gb200"),
        ("H20", "h20"),
        ("Tesla P100-PCIE-16GB", "p100"),
    ],
)
def test_card_names_as_people_type_them(typed: str, name: str) -> None:
    card = gpu(typed)
    assert card.name == name
    assert gpu(card.name) == card


def test_a_class_is_the_smallest_of_its_reference_cards() -> None:
    assert gpu("24GB").allocatable_bytes == round(23.5 * GIB)
    assert gpu("48GB").allocatable_bytes == round(47.4 * GIB)
    assert gpu("80GB").allocatable_bytes == round(79.1 * GIB)
    assert {"l4", "a10g"} <= {card.name for card in card_lookup.smaller_cards(gpu("24GB"))}
    assert card_lookup.smaller_cards(gpu("rtx4090")) == ()


def test_a_laptops_card_has_its_own_rates_and_power() -> None:
    for name in ("rtx3070", "rtx4060", "rtx4080", "rtx4090", "rtx5070", "rtx5080", "rtx5090"):
        desktop, laptop = gpu(name), gpu(f"{name}-laptop")
        assert laptop.power_watts <= desktop.power_watts and laptop.bf16_tflops < desktop.bf16_tflops, name
        assert laptop.allocatable_bytes <= desktop.allocatable_bytes and not laptop.reference, name


def test_threads_of_a_multiprocessor() -> None:
    threads = {name: gpu(name).threads_per_multiprocessor for name in ("gtx1080ti", "t4", "rtx3090", "h20", "b300")}
    assert threads == {"gtx1080ti": 2048, "t4": 1024, "rtx3090": 1536, "h20": 2048, "b300": 2048}
    assert gpu("rtx5090").threads_per_multiprocessor == gpu("gb10").threads_per_multiprocessor == 1536


def test_an_exact_budget_is_exactly_that_with_a_real_cards_facts() -> None:
    card = gpu("20.25GiB")
    assert card.allocatable_bytes == 20.25 * GIB
    assert card.context_mib > 0
    assert "20.2 GiB" in card.title
    assert gpu(f"{24 * 10**9}B").allocatable_bytes == 24 * 10**9
    assert not gpu("112GiB").unified  # a GB10 lies nearest
    assert gpu("128GB").unified


def test_several_cards() -> None:
    assert [(count, card.name) for count, card in map(parse_gpus, ("2x4090", "8 x h100", "2×24GB", "4090"))] == [
        (2, "rtx4090"),
        (8, "h100-80gb"),
        (2, "24GB"),
        (1, "rtx4090"),
    ]
    assert "--gpu count 0 is too small" in refused(parse_gpus, "0x4090").message
    assert "--gpu count 0 is too small" in refused(parse_gpus, "4090x0").message
    assert "too large" in refused(parse_gpus, "1000000000000x4090").message


@pytest.mark.parametrize(
    ("typed", "count", "name"),
    [
        ("3090x2", 2, "rtx3090"),
        ("H100x8", 8, "h100-80gb"),
        ("NVIDIA H100 80GB HBM3 x8", 8, "h100-80gb"),
        ("24GB x 2", 2, "24GB"),
        ("2x24", 2, "24GB"),
        ("3090,3090", 2, "rtx3090"),
        ("rtx3090 + 3090 + 3090", 3, "rtx3090"),
        ("4090 24g", 1, "rtx4090"),
        ("rtx 4090 (24gb) x 2", 2, "rtx4090"),
        ("4090 48g", 1, "rtx4090-48gb"),
        ("2 x h20 96G", 2, "h20"),
        ("h100 94 GiB", 1, "h100-nvl"),
    ],
)
def test_a_count_stands_before_or_behind_and_a_size_beside_the_name(typed: str, count: int, name: str) -> None:
    found, card = parse_gpus(typed)
    assert (found, card.name) == (count, name)
    assert card_taken_for(typed, card) == ""


def test_cards_of_several_kinds_are_planned_for_the_least() -> None:
    error = refused(parse_gpus, "4090,a100-80gb,rtx3080")
    assert "several kinds" in error.message and "--gpu 3xrtx3080" in error.fix


@pytest.mark.parametrize(
    ("typed", "fault", "fix"),
    [
        ("24XB", "'24XB' is neither a card nor a size", "24GB"),
        ("64", "is not a card class", "use 48GB, or 64GiB"),
        ("23.5", "is not a card class", "use 24GB, or 23.5GiB"),
        ("7900xtx", "a card of AMD", "--gpu 24GB"),
        ("strix-halo", "a card of AMD", "its size"),
        ("Ryzen AI Max+ 395", "a card of AMD", "its size"),
        ("Radeon RX 9999", "a card of AMD", "as --gpu 24GB"),
        ("m3 max", "does not say how much memory", "m3max-64gb"),
        ("Intel Arc B580", "a card of Intel", "--gpu 12GB"),
        ("rtx 4050 laptop", "less than any card", "--gpu 5.5GiB"),
        ("rtx4091", "neither a card nor a size", "did you mean rtx4090"),
        ("4900", "neither a card nor a size", "did you mean rtx4090? Else"),
        ("a100", "matches several cards", "a100-40gb, a100-80gb"),
        ("4060ti", "matches several cards", "rtx4060ti-8gb, rtx4060ti-16gb"),
        ("4090 96GB", "has 24 GB, and none with 96 is known", "use --gpu rtx4090, or for 96 GB alone --gpu 95.5GiB"),
        ("2080 ti (22gb)", "has 11 GB, and none with 22 is known", "--gpu 21.5GiB"),
        ("5060ti", "matches several cards", "rtx5060ti-8gb, rtx5060ti-16gb"),
        ("25GB", "is not a card class", "use 24GB, or 23.283GiB"),
        ("0GB", "is smaller than any card", "24GB"),
        ("0GiB", "is smaller than any card", "23.5GiB"),
        ("100MiB", "is smaller than any card", "23.5GiB"),
        ("10TiB", "is larger than any card", "23.5GiB"),
        ("1000000000000GiB", "is more than any machine has", "23.5GiB"),
        ("nanGB", "is not a finite number", "23.5GiB"),
        ("nan", "", "23.5GiB"),
        ("infGiB", "is not a finite number", "23.5GiB"),
        ("-24GB", "is negative", "23.5GiB"),
        ("", "neither a card nor a size", "from `vplan gpus`"),
        ("x" * 100_000, "is not known", "`vplan gpus` lists"),
    ],
)
def test_bad_cards_are_refused(typed: str, fault: str, fix: str) -> None:
    error = refused(gpu, typed)
    assert fault in error.message
    assert fix in error.fix


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('name = "rtx4090"', 'nmae = "rtx4090"', "has no field 'nmae'; did you mean name?"),
        ('"rtx3090", "rtx4090"', '"rtx3090", "rtx4099"', "names 'rtx4099'"),
        ('aliases = ["4090"', 'aliases = ["3090"', "two cards have the alias '3090'"),
        ("[[class]]", "[[class", "gpus.toml is damaged"),
    ],
)
def test_damaged_cards_are_named_and_refused(elsewhere: Path, old: str, new: str, fault: str) -> None:
    path = elsewhere / "gpus.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    error = refused(gpu, "rtx4090")
    assert "gpus.toml" in error.message
    assert fault in str(error) or "is missing" in str(error)


def test_a_missing_file_is_named(elsewhere: Path) -> None:
    (elsewhere / "gpus.toml").unlink()
    assert "gpus.toml is missing" in refused(gpu, "rtx4090").message


def test_host_ram_when_nobody_says() -> None:
    assert card_lookup.default_host_ram(gpu("24GB"), 1) == 26 * GIB
    assert card_lookup.default_host_ram(gpu("24GB"), 2) == 58 * GIB
    assert card_lookup.default_host_ram(gpu("a100-40gb"), 2) == 250 * GIB
    assert card_lookup.default_host_ram(gpu("h100"), 8, "wsl") == 512 * GIB


def test_published_rows_speak_our_vocabulary() -> None:
    for line in PUBLISHED.read_text().splitlines():
        row = json.loads(line)
        gpu(row["machine"]["gpu"])
        Job.read(row["job"], where=row["id"])
        Strategy.read(row["strategy"], where=row["id"])


def test_profiles_speak_json() -> None:
    found = json.loads(json.dumps(model("flux.1-dev").to_json()))
    assert found["vae"]["class"] == "AutoencoderKL"
    assert [stack["list"] for stack in found["stacks"]] == ["transformer_blocks", "single_transformer_blocks"]
    assert ModelProfile.read(found).to_json() == model("flux.1-dev").to_json()
    assert json.loads(json.dumps(gpu("24GB").to_json()))["name"] == "24GB"
