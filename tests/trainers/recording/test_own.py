"""A model of the user's own: recorded once, then known everywhere by its name and by its folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import profiles
from planner.catalog import diffusers_folder, lookup, user_data
from planner.commands import cli
from planner.commands._shared import own_model
from planner.errors import VplanError
from planner.tape.packs import digest
from planner.tape.variants.variant import OLDER
from tests.planner.drivers import Computer
from trainers.recording.own import Derived, complete, derive

pytestmark = pytest.mark.usefixtures("preloaded_python")

LORA = "step-lora-half-fp32-autocast-full-one"
ADAMW = "optimizer-lora-fp32-adamw-foreach"


def published(name: str, **changes: Any) -> dict[str, Any]:
    """A bundled model's config as a folder holds it: every key of the class, and diffusers' own."""
    profile = lookup.model(name)
    config = complete(profile.diffusers_class, profile.config, name)
    private = {"_class_name": profile.diffusers_class, "_diffusers_version": "0.35.1", "_name_or_path": "/nowhere"}
    return {**private, **config, **changes}


SMALL = {"num_attention_heads": 4, "ffn_dim": 512, "num_layers": 7}


def wrote(place: Path, part: str, config: dict[str, Any]) -> Path:
    (place / part).mkdir(parents=True, exist_ok=True)
    (place / part / "config.json").write_text(json.dumps(config))
    return place


def vplan(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)], prog_name="vplan", standalone_mode=True)


def answer(*words: object, code: int = 0) -> dict[str, Any]:
    done = vplan(*words, "--json")
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(user_data.VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


def derived(place: Path, config: dict[str, Any], part: str = "transformer") -> Derived:
    wrote(place, part, config)
    return derive(diffusers_folder.read_source(str(place), lookup.diffusers_classes()), "mine")


def tape(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return {key: value for key, value in found.items() if key not in ("model", "versions")}


def test_a_folder_becomes_a_model(tmp_path: Path, own_home: Path) -> None:
    place = wrote(tmp_path / "My Wan!", "transformer", published("wan2.1-t2v-1.3b", **SMALL))
    done = answer("record", place, "--variant", LORA)
    (said,) = done["own"]
    assert (said["name"], said["class"], said["lent_by"]) == ("my-wan", "WanTransformer3DModel", "wan2.1-t2v-1.3b")
    assert said["notes"] == ["of wan2.1-t2v-1.3b: VAE, text encoders, clip rules, LoRA layers, training objective"]
    assert [entry["variant"] for entry in done["tapes"]] == [LORA]
    assert done["unclassified"] == []
    assert answer("record", "my-wan", "--variant", ADAMW)["tapes"][0]["variant"] == ADAMW  # by its name, as any model
    assert {path.name for path in own_home.rglob("*.gz")} == {f"{LORA}.json.gz", f"{ADAMW}.json.gz"}

    words = ("--gpu", "24GB", "--gradient-checkpointing", "full", "--resolution", "480p")
    by_name = answer("estimate", "my-wan", *words)
    assert answer("estimate", place, *words) == by_name
    assert lookup.model(str(place / "transformer" / "config.json")) == lookup.model("my-wan")
    assert by_name["job"]["model"] == "my-wan"
    assert by_name["peak"]["allocated_bytes"] > 2 * said["parameters"]

    (listed,) = (model for model in answer("models")["models"] if model["origin"])
    assert listed["name"] == "my-wan"
    assert "my-wan (yours)" in vplan("models").stdout
    assert len(answer("record", "my-wan", "--check", "--variant", "optimizer")["tapes"]) == 1
    # What was not recorded is named with the command that records it.
    missing = vplan("estimate", "my-wan", "--gpu", "24GB")
    assert missing.exit_code == 1
    assert "vplan record my-wan --variant step-lora-half-fp32-autocast-none-one" in missing.stderr


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mochi-1", {"num_layers": 2}),
        ("sd3-medium", {"num_layers": 5}),
        ("sd3.5-medium", {"num_layers": 5, "dual_attention_layers": [0, 1]}),
        ("easyanimate-v5.1-7b", {"num_layers": 5, "mmdit_layers": 2}),
        ("flux.1-dev", {"num_layers": 1, "num_single_layers": 3}),
    ],
)
def test_a_model_of_few_blocks_is_recorded_as_it_is(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Where the last block is of another kind, more blocks were recorded than there are, and no tape could be read."""
    place = wrote(tmp_path / "few", "transformer", published(name, **changes))
    answer("record", place, "--variant", LORA, "--variant", ADAMW)
    words = ("--gpu", "80GB", "--gradient-checkpointing", "full", "--text-encoder", "cached", "--vae", "cached")
    assert answer("estimate", "few", *words)["peak"]["allocated_bytes"]


def test_what_is_there_is_not_recorded_again_and_what_changed_is(tmp_path: Path, own_home: Path) -> None:
    place = wrote(tmp_path / "mine", "transformer", published("wan2.1-t2v-1.3b", **SMALL))
    assert len(answer("record", place, "--variant", ADAMW)["tapes"]) == 1
    path = own_home / "tapes" / "mine" / f"{ADAMW}.json.gz"
    first = path.read_bytes()
    assert answer("record", place, "--variant", ADAMW)["tapes"] == []
    # Killed while it wrote: the part is passed over, a damaged or old tape is recorded again.
    path.with_suffix(".1.part").write_bytes(first[:100])
    no_tape = gzip.compress(json.dumps({**json.loads(gzip.decompress(first)), "tape": {}}).encode())
    for damaged in (first[:100], b"", gzip.compress(b'{"format": 0}'), no_tape):
        path.write_bytes(damaged)
        assert len(answer("record", place, "--variant", ADAMW)["tapes"]) == 1
        assert path.read_bytes() == first

    wrote(place, "transformer", published("wan2.1-t2v-1.3b", **{**SMALL, "num_layers": 9}))
    with pytest.raises(VplanError, match=r"has changed since it was recorded as mine; vplan record"):
        lookup.model(str(place))
    assert answer("record", place, "--variant", LORA)["own"][0]["parameters"] > 0
    assert lookup.model(str(place)).blocks == 9
    assert [found.name for found in own_home.rglob("*.gz")] == [f"{LORA}.json.gz"]  # the other was of 7 blocks


def test_a_copy_of_a_bundled_model_records_the_bundled_tape(tmp_path: Path, own_home: Path) -> None:
    """The whole way, defaults written out and all, ends in the same bytes as the shipped recording."""
    for name, variant in (("wan2.1-t2v-1.3b", LORA), ("flux.1-dev", ADAMW)):
        place = wrote(tmp_path / name.replace(".", "-"), "transformer", published(name))
        (entry,) = answer("record", place, "--variant", variant, "--name", f"copy-of-{name}")["own"]
        assert (entry["parameters"], entry["lent_by"]) == (lookup.model(name).parameters, name)
        ours = own_home / "tapes" / f"copy-of-{name}" / f"{variant}.json.gz"
        assert digest(ours) == digest(profiles.TAPES / name / f"{variant}.json.gz")


def test_an_operator_nobody_compared_with_cuda_is_named(tmp_path: Path) -> None:
    place = wrote(tmp_path / "mine", "unet", published("sd1.5", act_fn="mish"))
    done = vplan("record", place, "--variant", LORA)
    assert done.exit_code == 0, done.output
    assert "so less certain: aten.mish, aten.mish_backward\n" in done.stdout


def test_another_folder_of_the_same_name_needs_a_name(tmp_path: Path) -> None:
    one = wrote(tmp_path / "a" / "mine", "transformer", published("wan2.1-t2v-1.3b", **SMALL))
    other = wrote(tmp_path / "b" / "mine", "transformer", published("wan2.1-t2v-1.3b", **SMALL))
    first = derive(diffusers_folder.read_source(str(one), lookup.diffusers_classes()), "mine").profile
    user_data.write_profile("mine", first.to_json())
    done = vplan("record", other)
    assert done.exit_code == 1
    assert "you have a model 'mine' from another folder" in done.stderr
    assert own_model.read(str(other), "mine")[1] == "mine"  # said so: it replaces the first


@pytest.mark.parametrize("name", profiles.model_names())
def test_every_bundled_model_finds_itself_as_its_nearest(tmp_path: Path, name: str) -> None:
    """Counted anew from a published config, each gets back its own parameters, shape rules and VAE."""
    profile = lookup.model(name)
    part = "unet" if profile.diffusers_class.startswith("UNet") else "transformer"
    found, notes = derived(tmp_path / "mine", published(name), part)
    lender = lookup.model(found.lent_by)
    assert found.parameters == profile.parameters
    assert (found.diffusers_class, found.vae, found.shape) == (profile.diffusers_class, lender.vae, lender.shape)
    assert complete(lender.diffusers_class, lender.config, "") == found.config
    assert len(notes) == 1
    user_data.write_profile("mine", found.to_json())
    assert lookup.model("mine") == found
    assert found.traits == lender.traits.replace(same_shape=())
    count = 10 if found.shape.batches == (1,) else 16  # steps and samples of one sample alone
    assert len(list(own_model.first_variants(found))) == len(set(own_model.first_variants(found))) == count


def test_a_table_of_positions_that_is_too_short_is_named(tmp_path: Path, own_home: Path) -> None:
    """Its clips could never be as long as the lengths that tapes are recorded at."""
    place = wrote(tmp_path / "mine", "transformer", published("wan2.1-t2v-1.3b", **SMALL, rope_max_seq_len=32))
    done = vplan("record", place, "--variant", "step-lora-half-fp32-autocast-full-one")
    assert done.exit_code == 1
    said, fix = done.stderr.splitlines()[-2:]
    assert said == "error: the table of positions of mine ends at 32, and recording needs 73"
    assert fix.endswith("with a longer one: that of wan2.1-t2v-1.3b will do")
    assert user_data.model_names() == ()


def test_under_an_older_torch_its_steps_are_recorded_first_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Computer(monkeypatch, tmp_path / "computer").has_packages(torch="2.11.0")
    names = list(own_model.first_variants(lookup.model("wan2.1-t2v-1.3b")))
    assert len(names) == len(set(names)) == 28
    assert sum(name.endswith(OLDER) for name in names) == 12
    assert not any(name.endswith(OLDER) for name in own_model.first_variants(lookup.model("cogvideox-2b")))


PARTS = {
    **{model.vae.class_name: model for model in map(lookup.model, profiles.model_names())},
    **{part.name: model for model in map(lookup.model, profiles.model_names()) for part in model.text_encoders},
}
"""Every VAE and text encoder that a bundled model has, to one such model."""


@pytest.mark.parametrize("name", sorted({model.name for model in PARTS.values()}))
def test_a_pipelines_parts_are_counted_as_the_bundled_ones(tmp_path: Path, name: str) -> None:
    profile, place = lookup.model(name), tmp_path / "mine"
    wrote(place, "vae", {"_class_name": profile.vae.class_name, **profile.vae.config})
    for part, encoder in zip(diffusers_folder.ENCODERS, profile.text_encoders, strict=False):
        wrote(place, part, {"architectures": [encoder.class_name], "model_type": "any", **encoder.config})
    part = "unet" if profile.diffusers_class.startswith("UNet") else "transformer"
    found, notes = derived(place, published(name), part)
    assert notes[1] == "of the folder: VAE, text encoders"
    assert found.vae.parameters == profile.vae.parameters
    assert found.shape == lookup.model(found.lent_by).shape
    assert [one.parameters for one in found.text_encoders] == [one.parameters for one in profile.text_encoders]


def test_what_a_model_takes_in_decides_who_lends(tmp_path: Path) -> None:
    i2v = published("wan2.1-i2v-14b-480p", **{**SMALL, "added_kv_proj_dim": 512})
    assert derived(tmp_path / "a", i2v).profile.lent_by == "wan2.1-i2v-14b-480p"
    t2v = published("wan2.1-t2v-14b", num_layers=30)
    assert derived(tmp_path / "b", t2v).profile.lent_by == "wan2.1-t2v-14b"


def test_a_config_of_two_ways_of_training_is_trained_the_plain_way(tmp_path: Path) -> None:
    """SkyReels V2's for diffusion forcing is that for text alone, which comes behind it in the alphabet."""
    twin = published("skyreels-v2-df-14b", num_layers=30)
    assert derived(tmp_path / "mine", twin).profile.lent_by == "skyreels-v2-t2v-14b"


def test_a_pipeline_tells_its_vae_and_text_encoders(tmp_path: Path) -> None:
    lender = lookup.model("wan2.1-t2v-1.3b")
    place = tmp_path / "mine"
    vae = {"_class_name": "AutoencoderKLWan", **lender.vae.config, "base_dim": 48}
    wrote(place, "vae", vae)
    encoder = {**lender.text_encoders[0].config, "num_layers": 4, "architectures": ["UMT5EncoderModel"]}
    wrote(place, "text_encoder", encoder)
    found, notes = derived(place, published(lender.name, **SMALL))
    assert found.vae.parameters < lender.vae.parameters / 3
    assert (found.vae.temporal, found.vae.spatial, found.vae.latent_channels) == (4, 8, 16)
    (small,) = found.text_encoders
    assert small.parameters < lender.text_encoders[0].parameters / 3
    assert (small.name, small.max_tokens) == ("umt5-xxl", 512)
    assert notes == (
        f"of {lender.name}: clip rules, LoRA layers, training objective",
        "of the folder: VAE, text encoders",
    )
    assert found.experts == 1
    wrote(place, "transformer_2", published(lender.name, **SMALL))
    assert derive(diffusers_folder.read_source(str(place), lookup.diffusers_classes()), "mine").profile.experts == 2


def test_an_unknown_text_encoder_is_stood_in_for_and_said(tmp_path: Path) -> None:
    wrote(tmp_path / "mine", "text_encoder", {"architectures": ["EvilModel"], "auto_map": {"AutoModel": "evil.Model"}})
    found, notes = derived(tmp_path / "mine", published("wan2.1-t2v-1.3b", **SMALL))
    assert found.text_encoders == lookup.model("wan2.1-t2v-1.3b").text_encoders
    assert notes[-1].startswith("text_encoder is a 'EvilModel', which is not known")


def test_a_text_encoder_cannot_name_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers fetches an attention kernel that a config names, from the Hub, and runs it."""
    from transformers import PreTrainedModel

    asked = []
    monkeypatch.setattr(
        PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        lambda self, name, *rest, **named: asked.append(name) or "eager",
    )
    lender = lookup.model("wan2.1-t2v-1.3b").text_encoders[0]
    evil = "kernels-community/evil"
    encoder = {
        **lender.config,
        "architectures": ["UMT5EncoderModel"],
        "attn_implementation": evil,
        "_attn_implementation": evil,
        "_attn_implementation_internal": evil,
        "auto_map": {"AutoModel": "evil.Model"},
        "trust_remote_code": True,
    }
    wrote(tmp_path / "mine", "text_encoder", encoder)
    found, _ = derived(tmp_path / "mine", published("wan2.1-t2v-1.3b", **SMALL))
    assert found.text_encoders[0].parameters == lender.parameters
    assert asked and set(asked) == {"eager"}
    assert "evil" not in json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("part", "config", "message"),
    [
        ("vae", {"_class_name": "EvilVae"}, "vae/config.json: class 'EvilVae' is not known"),
        ("vae", {"_class_name": "AutoencoderKLWan", "base_dim": "wide"}, "base_dim 'wide' is not a whole number"),
        ("vae", {"_class_name": "AutoencoderKLWan", "z_dim": 10**9}, "z_dim 1000000000 is larger"),
        ("vae", {"_class_name": "AutoencoderKLWan", "temperal_downsample": [True] * 3}, "does not match any known VAE"),
        ("vae", {"_class_name": "AutoencoderKLWan", "evil": 1}, "has no 'evil'"),
        ("text_encoder", {"architectures": ["UMT5EncoderModel"], "d_model": "wide"}, "d_model 'wide' is not a whole"),
        ("text_encoder", {"architectures": ["UMT5EncoderModel"], "d_model": -64}, "text_encoder/config.json"),
        ("text_encoder", {"architectures": ["UMT5EncoderModel"], "num_layers": 10**5}, "num_layers 100000 is deeper"),
    ],
)
def test_a_pipelines_other_configs_are_checked_too(
    tmp_path: Path, part: str, config: dict[str, Any], message: str
) -> None:
    wrote(tmp_path / "mine", part, config)
    with pytest.raises(VplanError) as caught:
        derived(tmp_path / "mine", published("wan2.1-t2v-1.3b", **SMALL))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wan2.1-t2v-1.3b", {"num_layer": 30}, "has no 'num_layer'; did you mean num_layers"),
        (
            "wan2.1-t2v-1.3b",
            {"pretrained_path": "../../x"},
            "has no 'pretrained_path'; a newer diffusers may support it",
        ),
        ("wan2.1-t2v-1.3b", {"num_layers": "thirty"}, "num_layers 'thirty' is not a whole number"),
        ("wan2.1-t2v-1.3b", {"num_layers": None}, "num_layers None is not a number of blocks"),
        ("wan2.1-t2v-1.3b", {"num_layers": 0}, "num_layers 0 is not a number of blocks"),
        ("wan2.1-t2v-1.3b", {"num_attention_heads": 10**6, "attention_head_dim": 10**6}, "cannot be built from"),
        ("wan2.1-t2v-1.3b", {"num_attention_heads": 4096, "num_layers": 500}, "parameters"),
        ("wan2.1-t2v-1.3b", {"rope_max_seq_len": 10**6, "attention_head_dim": 10**5}, "config.json"),
        ("wan2.1-t2v-1.3b", {"freq_dim": "../../etc"}, "is not a whole number"),
        ("wan2.1-t2v-1.3b", {"out_channels": 48}, "latents (48 channels) are not those"),
        ("sd3.5-medium", {"pos_embed_max_size": 10**5}, "makes tables of"),
        ("cogvideox-2b", {"sample_width": 10**6, "sample_frames": 10**5}, "config.json"),
        ("wan2.1-t2v-1.3b", {"patch_size": [1, 2]}, "patch_size [1, 2] is no cell"),
        ("wan2.1-t2v-1.3b", {"patch_size": [1, 0, 2]}, "patch_size [1, 0, 2] is no cell"),
        ("flux.1-dev", {"patch_size": 2}, "patch_size 2 is not that of flux.1-dev"),
        ("sd1.5", {"down_block_types": ["EvilBlock2D"] * 4}, "cannot be built from"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    part = "unet" if name == "sd1.5" else "transformer"
    with pytest.raises(VplanError) as caught:
        derived(tmp_path / "mine", published(name, **changes), part)
    said = str(caught.value)
    assert message in said and "\n" not in said and len(said) < 400


def test_a_step_that_cannot_run_leaves_nothing_behind(tmp_path: Path, own_home: Path) -> None:
    """It can be built, but its position table is for heads of another size."""
    config = published("flux.1-dev", num_layers=6, num_single_layers=6, axes_dims_rope=[2, 2, 2])
    place = wrote(tmp_path / "mine", "transformer", config)
    done = vplan("record", place, "--variant", "step-lora-half-fp32-autocast-full-one")
    assert done.exit_code == 1
    said, fix = done.stderr.splitlines()[-2:]
    assert said.startswith("error: a training step of mine cannot be run as FluxTransformer2DModel")
    assert fix.startswith("fix: ")
    assert user_data.model_names() == ()
