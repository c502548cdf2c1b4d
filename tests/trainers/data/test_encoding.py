"""What each family's encoders make of clips and captions is what its batches and its pipeline say."""

from __future__ import annotations

import inspect
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import ErnieImagePipeline, Flux2KleinPipeline, FluxPipeline
from safetensors.torch import load_file

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid, job_for
from planner.dataset import scan
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from tests.trainers import tiny
from tests.trainers.data.caching import FP32, run, setting, shapes_of
from trainers import families
from trainers.data import cache, packed_encoders, parts
from trainers.families.common.encoding import Encoder, pipeline
from trainers.step import placement, step

pytestmark = pytest.mark.usefixtures("frozen_heap")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan text-to-video pipeline."""
    return tiny.folder(tmp_path_factory.mktemp("wan"), tiny.profile("wan2.1-t2v-1.3b"))


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    return tiny.write_clips(tmp_path / "clips")


MODE = ("wan", "wan-vace", "skyreels-v2", "sana-video", "cosmos-predict", "z-image", "flux2", "flux3", "ideogram-4")
"""Families whose latents are the mode of the posterior, not drawn from it."""


def unpacked(latents: torch.Tensor) -> torch.Tensor:
    """Packed latents of a 64x64 image as the VAE takes them."""
    return FluxPipeline._unpack_latents(latents.reshape(1, 16, -1), 64, 64, 8)


def by_channel(latents: torch.Tensor, config: object, scale: float = 1.0) -> torch.Tensor:
    mean, deviation = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return latents[None] * deviation / scale + mean


UNDONE = {
    "wan2.1-t2v-1.3b": lambda latents, vae: by_channel(latents, vae.config),
    "skyreels-v2-df-14b": lambda latents, vae: by_channel(latents, vae.config),
    "cogvideox-2b": lambda latents, vae: latents.transpose(0, 1)[None] / vae.config.scaling_factor,
    "ltx-video-2b": lambda latents, vae: (
        latents[None] * vae.latents_std.view(1, -1, 1, 1, 1) + vae.latents_mean.view(1, -1, 1, 1, 1)
    ),
    "hunyuan-video": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "mochi-1": lambda latents, vae: by_channel(latents, vae.config, vae.config.scaling_factor),
    "easyanimate-v5.1-7b": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "flux.1-dev": lambda latents, vae: unpacked(latents) / vae.config.scaling_factor + vae.config.shift_factor,
    "longcat-image": lambda latents, vae: unpacked(latents) / vae.config.scaling_factor + vae.config.shift_factor,
    "chroma1-hd": lambda latents, vae: unpacked(latents) / vae.config.scaling_factor + vae.config.shift_factor,
    "lumina-image-2.0": lambda latents, vae: latents[None, :, 0] / vae.config.scaling_factor + vae.config.shift_factor,
    "sd3.5-medium": lambda latents, vae: latents[None] / vae.config.scaling_factor + vae.config.shift_factor,
    "hidream-i1": lambda latents, vae: latents[None] / vae.config.scaling_factor + vae.config.shift_factor,
    "sdxl": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "z-image": lambda latents, vae: latents[None, :, 0] / vae.config.scaling_factor + vae.config.shift_factor,
    "flux.2-klein-4b": lambda latents, vae: Flux2KleinPipeline._unpatchify_latents(
        latents.T.reshape(1, -1, 4, 4) * torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
        + vae.bn.running_mean.view(1, -1, 1, 1)
    ),
    "flux.3": lambda latents, vae: Flux2KleinPipeline._unpatchify_latents(
        latents.T.reshape(1, -1, 4, 4) * torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
        + vae.bn.running_mean.view(1, -1, 1, 1)
    ),
    "hunyuan-video-1.5": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "hunyuan-image-2.1": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "ernie-image": lambda latents, vae: ErnieImagePipeline._unpatchify_latents(
        latents[None] * torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + 1e-5) + vae.bn.running_mean.view(1, -1, 1, 1)
    ),
    "ideogram-4": lambda latents, vae: (
        (latents * torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps) + vae.bn.running_mean)
        .view(1, 4, 4, 2, 2, -1)
        .permute(0, 5, 1, 3, 2, 4)
        .reshape(1, -1, 8, 8)
    ),
    "qwen-image": lambda latents, vae: by_channel(unpacked(latents)[0][:, None], vae.config),
    "qwen-image-2.1": lambda latents, vae: by_channel(latents.permute(2, 0, 1)[:, None], vae.config),
    "anima": lambda latents, vae: by_channel(latents, vae.config),
    "sana-1.6b": lambda latents, vae: latents[None, :, 0] / vae.config.scaling_factor,
    "cosmos-predict2-2b-v2w": lambda latents, vae: by_channel(latents, vae.config),
    "cosmos-predict2.5-2b": lambda latents, vae: by_channel(latents, vae.config),
    "sana-video-2b": lambda latents, vae: by_channel(latents, vae.config),
    "kandinsky-5.0-t2v-lite": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "kandinsky-5.0-i2v-lite": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "kandinsky-5.0-t2i-lite": lambda latents, vae: latents[None, :, 0] / vae.config.scaling_factor,
    "krea-2": lambda latents, vae: by_channel(unpacked(latents)[0][:, None], vae.config),
}
"""How each family's pipeline turns latents back into what its VAE decodes (diffusers 0.42, pipelines/)."""


@pytest.mark.parametrize(("name", "precision"), [(tiny.MODELS[0], "bf16"), *((name, "none") for name in tiny.MODELS)])
def test_entries_make_the_batches_that_were_recorded(tmp_path: Path, name: str, precision: str) -> None:
    """In keys, shapes and dtypes, and the model trains on them; latents are those that its pipeline would decode."""
    profile = tiny.profile(name)
    frames = min(profile.shape.max_frames, profile.shape.frame_step + 1)
    layers = list(profile.lora.targets[:2])
    plan = job_for(profile, {"frames": frames, "height": 64, "width": 64, "batch_size": 2, "lora_targets": layers})
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    strategy = FP32.replace(autocast=precision, weights_dtype="bf16" if precision == "bf16" else "fp32")
    folder = tiny.folder(tmp_path / "model", profile)
    one = setting(folder, tmp_path / "cache", profile, job=plan, strategy=strategy)
    steered = plan.references or profile.inputs.get("control_channels")
    write = tiny.write_pairs if steered else tiny.write_clips
    entries = run(write(tmp_path / "clips", 2), one)
    family = families.family(profile)
    samples = [load_file(entry.path) | load_file(entry.text) for entry in entries[:2]]
    if profile.shape.window:
        samples = [family.with_window(*samples), family.with_window(*reversed(samples))]
    batch = family.collate(samples)
    if family.ragged:
        plan = plan.replace(text_tokens=batch["prompt"].shape[1])
    assert shapes_of(batch) == shapes_of(family.batch(grid(profile, plan), "cpu", dtype))
    assert not torch.equal(batch["latents"][0], batch["latents"][1])
    model = step.build_model(profile, plan, strategy)
    placement.materialise(model, "cpu", lambda _, weight: weight.normal_(0, 0.02))
    step.forward(step.Trainee(model, step.trainable_parameters(model)), family, batch, strategy).backward()
    assert all(
        torch.isfinite(each.grad).all() for each in step.trainable_parameters(model).values() if each.grad is not None
    )
    if family.captioned:
        work = cache.CacheBuild(one)
        assert load_file(work.store.path(work.text_key(""))).keys() == load_file(entries[0].text).keys()
    if name in UNDONE and precision == "none":
        vae, expected = posterior_of(folder, profile, tmp_path / "clips" / "0.mp4", frames, entries[0])
        torch.testing.assert_close(UNDONE[name](batch["latents"][0], vae), expected)


def posterior_of(
    model: Path, profile: ModelProfile, clip: Path, frames: int, entry: cache.Entry
) -> tuple[torch.nn.Module, torch.Tensor]:
    """The VAE, and what it makes of a clip, drawn as the entry was where it has a posterior."""
    import diffusers

    vae = getattr(diffusers, profile.vae.class_name).from_pretrained(model / "vae")
    pixels = torch.from_numpy(scan.clips.frames(clip, range(frames), 64, 64)).permute(3, 0, 1, 2)[None] / 127.5 - 1
    encoded = vae.encode(tiny.opaque(pixels, profile) if profile.vae.takes_clips else pixels[:, :, 0])
    if "latent" in encoded:
        return vae, encoded.latent
    posterior = encoded.latent_dist
    generator = torch.Generator().manual_seed(int(entry.path.stem[:15], 16))
    return vae, posterior.mode() if profile.family in MODE else posterior.sample(generator)


PROMPTS = {
    "wan2.1-t2v-1.3b": ("WanPipeline", {"max_sequence_length": 512}, ("prompt",)),
    "cogvideox-2b": ("CogVideoXPipeline", {}, ("prompt",)),
    "ltx-video-2b": ("LTXPipeline", {}, ("prompt", "prompt_mask")),
    "mochi-1": ("MochiPipeline", {}, ("prompt", "prompt_mask")),
    "hunyuan-video": ("HunyuanVideoPipeline", {}, ("prompt", "pooled", "prompt_mask")),
    "easyanimate-v5.1-7b": ("EasyAnimatePipeline", {}, ("prompt",)),
    "flux.1-dev": ("FluxPipeline", {"prompt_2": None}, ("prompt", "pooled", "text_ids")),
    "sd3.5-medium": ("StableDiffusion3Pipeline", {"prompt_2": None, "prompt_3": None}, ("prompt", "", "pooled")),
    "sdxl": ("StableDiffusionXLPipeline", {}, ("prompt", "", "pooled")),
    "sd1.5": ("StableDiffusionPipeline", {"num_images_per_prompt": 1}, ("prompt",)),
    "sd2.1": ("StableDiffusionPipeline", {"num_images_per_prompt": 1}, ("prompt",)),
    "qwen-image": ("QwenImagePipeline", {"max_sequence_length": 512}, ("prompt",)),
    "flux.2-klein-4b": ("Flux2KleinPipeline", {}, ("prompt", "text_ids")),
    "flux.2-dev": ("Flux2Pipeline", {}, ("prompt", "text_ids")),
    "krea-2": ("Krea2Pipeline", {}, ("prompt", "prompt_mask")),
    "hunyuan-image-2.1": ("HunyuanImagePipeline", {}, ("prompt", "prompt_mask", "glyphs", "glyph_mask")),
    "lumina-image-2.0": ("Lumina2Pipeline", {}, ("prompt", "prompt_mask")),
    "sana-1.6b": ("SanaPipeline", {}, ("prompt", "prompt_mask")),
    "sana-video-2b": ("SanaVideoPipeline", {}, ("prompt", "prompt_mask")),
    "kandinsky-5.0-t2v-lite": ("Kandinsky5T2VPipeline", {}, ("prompt", "pooled", "")),
    "kandinsky-5.0-t2i-lite": ("Kandinsky5T2IPipeline", {}, ("prompt", "pooled", "")),
}
"""How a family's pipeline is asked for embeddings, with all its encoders at once, and what it answers, in order."""


@pytest.mark.parametrize("name", PROMPTS)
def test_captions_are_encoded_as_the_whole_pipeline_does(tmp_path: Path, name: str) -> None:
    profile = tiny.profile(name)
    folder = tiny.folder(tmp_path / "model", profile)
    plan = job_for(profile, {"height": 64, "width": 64})
    strategy = FP32.replace(autocast="none", weights_dtype="fp32")
    work = cache.CacheBuild(setting(folder, tmp_path / "cache", profile, job=plan, strategy=strategy))
    key = work.text_key("a red cat")
    work.encode("captions", work.text_turns, {key: "a red cat"})
    kind, arguments, names = PROMPTS[name]
    encoders = {turn.part: parts.load(folder, turn.part, turn.class_name, torch.float32) for turn in work.text_turns}
    helpers = {turn.helper: parts.load_helper(folder, turn.helper) for turn in work.text_turns}
    whole = pipeline(kind, **encoders, **helpers)
    if "do_classifier_free_guidance" in inspect.signature(whole.encode_prompt).parameters:
        arguments = {**arguments, "do_classifier_free_guidance": False}
    told = whole.encode_prompt("a red cat", device=torch.device("cpu"), **arguments)
    made = work.store.load(key)
    for place, tensor in zip(names, told, strict=False):
        if place:
            expected = tensor if place in work.family.shared else tensor[0]
            torch.testing.assert_close(made[place], expected.to(made[place].dtype), msg=place)
    assert made.keys() == set(names) - {""}


TOGETHER = [
    name for name in PROMPTS if any(turn.at_once > 1 for turn in families.family(tiny.profile(name)).text_turns())
]


@pytest.mark.parametrize("name", TOGETHER)
def test_captions_encoded_together_get_the_bytes_they_get_alone(tmp_path: Path, name: str) -> None:
    profile = tiny.profile(name)
    folder = tiny.folder(tmp_path / "model", profile)
    plan = job_for(profile, {"height": 64, "width": 64})
    captions = ["", "a cat", "a red cat runs over a wide green hill", 'dogs, "two"', "x " * 300, "a cat sits"]
    work = cache.CacheBuild(setting(folder, tmp_path / "cache", profile, job=plan))
    for turn in work.text_turns:
        model = parts.load(folder, turn.part, turn.class_name, torch.bfloat16)
        encoder = Encoder(model, parts.load_helper(folder, turn.helper), work.tokens)
        count = min(turn.at_once, len(captions))
        together = turn.encode(encoder, captions[:count])
        for place, caption in enumerate(captions[:count]):
            for part, tensor in turn.encode(encoder, [caption]).items():
                assert torch.equal(tensor[0], together[part][place]), (turn.part, part, caption)


@pytest.mark.parametrize("caption", ["a red cat", ""])
def test_anima_s_prompt_is_what_its_modular_pipeline_makes_of_it(tmp_path: Path, caption: str) -> None:
    from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
    from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep

    profile = tiny.profile("anima")
    folder = tiny.folder(tmp_path / "model", profile)
    plan = job_for(profile, {"height": 64, "width": 64})
    strategy = FP32.replace(autocast="none", weights_dtype="fp32")
    work = cache.CacheBuild(setting(folder, tmp_path / "cache", profile, job=plan, strategy=strategy))
    key = work.text_key(caption)
    work.encode("captions", work.text_turns, {key: caption})
    loaded = {turn.part: parts.load(folder, turn.part, turn.class_name, torch.float32) for turn in work.text_turns}
    helpers = {turn.helper: parts.load_helper(folder, turn.helper) for turn in work.text_turns}
    whole, cpu = SimpleNamespace(**loaded, **helpers), torch.device("cpu")
    told = AnimaTextEncoderStep.encode_prompt(whole, caption, None, False, 512, cpu, torch.float32)
    asked = {name: told[name] for name in ("qwen_prompt_embeds", "qwen_attention_mask")}
    asked |= {name: told[name] for name in ("t5_input_ids", "t5_attention_mask")}
    expected = AnimaTextConditioningStep._condition_prompt_embeds(
        whole, **asked, device=cpu, conditioning_dtype=torch.float32, output_dtype=torch.float32
    )
    made = work.store.load(key)
    assert made.keys() == {"prompt"}
    torch.testing.assert_close(made["prompt"], expected[0].to(made["prompt"].dtype))


def prompt_in_fp32(profile: ModelProfile, folder: Path, caption: str) -> torch.Tensor:
    """What caching leaves of a caption, of a tiny model."""
    model = tiny.folder(folder / "model", profile)
    plan = job_for(profile, {"frames": 9, "height": 64, "width": 64})
    strategy = FP32.replace(autocast="none", weights_dtype="fp32")
    work = cache.CacheBuild(setting(model, folder / "cache", profile, job=plan, strategy=strategy))
    key = work.text_key(caption)
    work.encode("captions", work.text_turns, {key: caption})
    return work.store.load(key)["prompt"].float()


def test_cosmos_predict2_s_prompt_ends_in_zeros(tmp_path: Path) -> None:
    profile = tiny.profile("cosmos-predict2-2b-v2w")
    prompt = prompt_in_fp32(profile, tmp_path, "a red cat")
    assert prompt.shape == (profile.shape.text_tokens, profile.config["text_embed_dim"])
    said = prompt.abs().sum(dim=1) > 0
    assert said.tolist() == [True] * 3 + [False] * (len(said) - 3)


def test_cosmos_predict_s_prompt_is_every_layer_of_its_encoder_normalised(tmp_path: Path) -> None:
    profile = tiny.profile("cosmos-predict2.5-2b")
    prompt = prompt_in_fp32(profile, tmp_path, "a red cat")
    assert prompt.shape == (profile.shape.text_tokens, profile.config["crossattn_proj_in_channels"])
    layers = prompt.unflatten(1, (3, -1))
    torch.testing.assert_close(layers.mean(dim=-1), torch.zeros(layers.shape[:2]), atol=1e-2, rtol=0)
    torch.testing.assert_close(layers.std(dim=-1), torch.ones(layers.shape[:2]), atol=1e-2, rtol=0)
    assert not torch.allclose(layers[:, 0], layers[:, 1], atol=1e-2)


def test_the_condition_of_image_to_video_is_the_pipelines(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline

    profile = tiny.profile("wan2.2-i2v-a14b")
    folder = tiny.folder(tmp_path / "model", profile)
    strategy = FP32.replace(autocast="none", weights_dtype="fp32")
    one = setting(folder, tmp_path / "cache", profile, strategy=strategy)
    clips = tiny.write_clips(tmp_path / "clips", 1)
    made = load_file(run(clips, one)[0].path)["condition"]
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    pipeline = WanImageToVideoPipeline(None, None, vae, None)
    frame = torch.from_numpy(scan.clips.frames(clips / "0.mp4", (0,), 48, 64)).permute(0, 3, 1, 2) / 127.5 - 1
    _, condition = pipeline.prepare_latents(frame, 1, 16, 48, 64, 9, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(made, condition[0])


REFUSED_FAMILIES = (
    "framepack",
    "wan2.2-animate-14b",
    "qwen-image-edit",
    "qwen-image-edit-2511",
    "qwen-image-layered",
    "ltx-2",
    "ltx-2.3",
    "ltx-2.5",
    "minimax-h3",
)


@pytest.mark.parametrize("name", REFUSED_FAMILIES)
def test_what_cannot_be_encoded_is_refused_by_name(model: Path, tmp_path: Path, name: str) -> None:
    profile = lookup.model(name)
    with pytest.raises(VplanError, match=f"{name}.* cannot be encoded yet"):
        cache.CacheBuild(setting(model, tmp_path / "cache", profile, job=job_for(profile, {})))


@pytest.mark.parametrize("name", lookup.model_names())
def test_every_bundled_model_is_encoded_or_refused(name: str) -> None:
    family = families.family(lookup.model(name))
    encoded = family.clip_turns() and (family.text_turns() or not family.captioned)
    assert bool(encoded) != (name in REFUSED_FAMILIES)


@pytest.mark.parametrize("name", ["flux.1-kontext-dev", "flux.2-klein-4b"])
def test_the_image_a_sample_was_made_from_is_encoded_as_the_pipeline_does(name: str, tmp_path: Path) -> None:
    import diffusers

    profile = tiny.profile(name)
    folder = tiny.folder(tmp_path / "model", profile)
    plan = job_for(profile, {"height": 64, "width": 64, "references": 1})
    strategy = FP32.replace(autocast="none", weights_dtype="fp32")
    clips = tiny.write_pairs(tmp_path / "clips")
    entries = run(clips, setting(folder, tmp_path / "cache", profile, job=plan, strategy=strategy))
    assert entries[0].path != entries[1].path
    made = load_file(entries[0].path)
    vae = getattr(diffusers, profile.vae.class_name).from_pretrained(folder / "vae")
    image = torch.from_numpy(scan.clips.frames(clips / "before-0.png", (0,), 64, 64)).permute(0, 3, 1, 2) / 127.5 - 1
    if name.startswith("flux.1"):
        whole = pipeline("FluxKontextPipeline", vae=vae)
        told = whole.prepare_latents(image, 1, 16, 64, 64, torch.float32, torch.device("cpu"), torch.Generator())
        expected = {"reference": told[1][0], "image_ids": told[2], "reference_ids": told[3]}
    else:
        whole = pipeline("Flux2KleinPipeline", vae=vae)
        latents, places = whole.prepare_image_latents([image], 1, torch.Generator(), torch.device("cpu"), torch.float32)
        expected = {"reference": latents[0], "reference_ids": places[0]}
    for key, tensor in expected.items():
        torch.testing.assert_close(made[key], tensor.to(made[key].dtype), msg=key)


def test_the_video_that_steers_a_sample_is_encoded_as_the_pipeline_does(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan

    profile = tiny.profile("wan2.1-vace-1.3b")
    folder = tiny.folder(tmp_path / "model", profile)
    one = setting(folder, tmp_path / "cache", profile, strategy=FP32.replace(autocast="none", weights_dtype="fp32"))
    clips = tiny.write_pairs(tmp_path / "clips")
    first, second = (load_file(entry.path)["control"] for entry in run(clips, one))
    assert not torch.equal(first, second)
    whole = pipeline("WanVACEPipeline", vae=AutoencoderKLWan.from_pretrained(folder / "vae"))
    frames = torch.from_numpy(scan.clips.frames(clips / "steers-0.mp4", range(9), 48, 64)).permute(3, 0, 1, 2)[None]
    video = frames / 127.5 - 1
    told = whole.prepare_video_latents(video, torch.ones_like(video), [[]], None, torch.device("cpu"))[0]
    torch.testing.assert_close(first[:32], told)
    assert (first[32:] == 1).all()
    table = clips / "metadata.jsonl"
    tiny.write_video(clips / "steers-1.mp4", 4)
    table.write_text(table.read_text().replace('"control_file_name": "steers-0.mp4"', '"other": "x"'))
    with pytest.raises(
        VplanError, match=r"0\.mp4: no control_file_name.*1\.mp4: its control steers-1\.mp4: has 4 frames"
    ):
        scan.read([DataSource(folder=str(clips))], profile, one.job)


def test_references_that_cannot_be_read_are_refused_by_name(model: Path, clips: Path, tmp_path: Path) -> None:
    klein, kontext = tiny.profile("flux.2-klein-4b"), tiny.profile("flux.1-kontext-dev")
    with pytest.raises(VplanError, match="2 reference images per sample"):
        cache.CacheBuild(setting(model, tmp_path / "cache", klein, job=job_for(klein, {"references": 2})))
    with pytest.raises(VplanError, match="no reference_file_name in its row"):
        scan.read([DataSource(folder=str(clips))], kontext, job_for(kontext, {"height": 64, "width": 64}))
    pairs = tiny.write_pairs(tmp_path / "pairs", 3)
    (pairs / "before-0.png").write_bytes(b"no image")
    (pairs / "before-1.png").unlink()
    table = pairs / "metadata.jsonl"
    table.write_text(table.read_text().replace("before-2.png", "../before-2.png"))
    reasons = [fault.reason for fault in scan.scan(DataSource(folder=str(pairs))).faults]
    assert reasons[0] == "its reference before-0.png: not an image, or broken"
    assert "its reference before-1.png: cannot be read" in reasons[1]
    assert reasons[2] == "its reference ../before-2.png: the name points outside the folder (..)"


# ---- packed encoders


@pytest.mark.parametrize(("how", "bits", "error"), [("fp8", 8.5, 0.1), ("int8", 8.5, 0.03), ("nf4", 4.5, 0.3)])
def test_packed_encoders_are_small_and_say_nearly_the_same(how: str, bits: float, error: float) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
    encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(feed_forward_proj="gated-gelu", **sizes))
    encoder = encoder.bfloat16().requires_grad_(False).eval()
    ids = torch.randint(0, 256, (1, 12))
    expected = encoder(ids).last_hidden_state.float()
    packed = packed_encoders.shrink(encoder, how, torch.device("cpu"))
    made = packed(ids).last_hidden_state.float()
    assert made.shape == expected.shape
    assert 0 < (made - expected).norm() / expected.norm() < error
    held = [
        buffer
        for module in packed.modules()
        if isinstance(module, packed_encoders.Packed)
        for buffer in module.buffers()
    ]
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 256 * 64
    assert sum(buffer.nbytes for buffer in held) * 8 / weights <= bits
    assert not [p for name, p in packed.named_parameters() if p.numel() >= packed_encoders.SMALLEST]


def test_encoders_are_gone_before_the_next_one(
    model: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    made: list[weakref.ref[torch.nn.Module]] = []
    load = parts.load

    def watched(*arguments: object) -> torch.nn.Module:
        alive.append(sum(one() is not None for one in made))
        found = load(*arguments)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(parts, "load", watched)
    run(clips, setting(model, tmp_path / "cache"))
    assert alive == [0, 0]
    assert not any(one() for one in made)


def test_captions_by_a_packed_encoder(model: Path, clips: Path, tmp_path: Path) -> None:
    made = run(clips, setting(model, tmp_path / "cache", strategy=FP32.replace(text_encoder_dtype="int8")))
    assert made[0].text != run(clips, setting(model, tmp_path / "cache"))[0].text
    with pytest.raises(VplanError, match="text_encoder_dtype int4 cannot be built"):
        run(clips, setting(model, tmp_path / "cache", strategy=FP32.replace(text_encoder_dtype="int4")))
