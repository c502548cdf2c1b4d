"""`vplan record FOLDER` meets what people and crawlers put into folders: one line, exit 1, and nothing built or kept.

None of these needs torch: what cannot be a model is refused before anything is imported to build it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from planner.catalog import diffusers_folder, lookup, user_data
from planner.commands import cli

WAN: dict[str, Any] = {"_class_name": "WanTransformer3DModel", **lookup.model("wan2.1-t2v-1.3b").config}
UNET: dict[str, Any] = {"_class_name": "UNet2DConditionModel", **lookup.model("sd1.5").config}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(user_data.VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["record", *map(str, words)], prog_name="vplan", standalone_mode=True)


def refused(*words: object, code: int = 1) -> str:
    done = run(*words)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    said, fix = done.stderr.splitlines()
    assert said.startswith("error: ") and fix.startswith("fix: ")
    assert len(said) < 400
    assert user_data.model_names() == ()
    return f"{said} {fix}"


def wrote(place: Path, content: object) -> Path:
    """A model's folder whose transformer/config.json is `content`: JSON, text or bytes."""
    path = place / "transformer" / "config.json"
    path.parent.mkdir(parents=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return place


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(WAN)[:200], "is not JSON, or is incomplete (line 1)"),
        ("", "is not JSON"),
        ("nonsense", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("9" * 5000, "is not JSON"),
        ("[1, 2]", "does not hold a JSON object"),
        (b"\x80\x02PK\x03\x04" + bytes(range(256)), "is not text"),
        ('{"a": 1}' + " " * diffusers_folder.MAX_FILE_BYTES, "larger than any config"),
        ({}, "has no _class_name"),
        ({"_class_name": ["WanTransformer3DModel"]}, "has no _class_name"),
        ({"_class_name": "LlamaForCausalLM"}, "has no such transformer or UNet"),
        ({"_class_name": "os.system"}, "class 'os.system' cannot be recorded"),
        ({"_class_name": "AutoModel"}, "class 'AutoModel' cannot be recorded"),
        ({**WAN, "auto_map": {"AutoModel": "evil.Model"}}, "refers to custom code (auto_map)"),
        ({**WAN, "num_layers": 10**9}, "num_layers 1000000000 is larger than any model's"),
        ({**WAN, "num_layers": 600}, "num_layers 600 is deeper than any model"),
        ({**WAN, "ffn_dim": 10**12}, "ffn_dim 1000000000000 is larger"),
        ({**WAN, "num_attention_heads": -12}, "num_attention_heads -12 is negative"),
        (json.dumps(WAN).replace("1e-06", "NaN"), "NaN is not a number"),
        (json.dumps(WAN).replace("1e-06", "-Infinity"), "-Infinity is not a number"),
        (json.dumps(WAN).replace("1e-06", "1e999"), "eps inf is out of range"),
        ({**WAN, "patch_size": [1, 2, 10**8]}, "patch_size 100000000 is larger"),
        ({**WAN, "rope_max_seq_len": [[[[[[[[1]]]]]]]]}, "holds more than any config"),
        ({**WAN, "patch_size": [1] * 20_000}, "holds more than any config"),
        ({**UNET, "down_block_types": ["DownBlock2D"] * 17}, "down_block_types has more levels than any model"),
        ({**UNET, "layers_per_block": 10_000}, "layers_per_block 10000 is deeper"),
        ({**UNET, "layers_per_block": 16, "transformer_layers_per_block": 16}, "multiply to more than 256"),
        ({**UNET, "transformer_layers_per_block": [1, 2, 1000]}, "transformer_layers_per_block 1000 is deeper"),
    ],
)
def test_what_is_no_config_is_refused_in_one_line(tmp_path: Path, content: object, message: str) -> None:
    assert message in refused(wrote(tmp_path / "mine", content))


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte of zeros that takes no disk: reading it all would not end."""
    place = wrote(tmp_path / "mine", "")
    os.truncate(place / "transformer" / "config.json", 2**40)
    assert "larger than any config" in refused(place)


@pytest.mark.parametrize(
    "missing", ["nothing", "nothing/config.json", "../nothing", "~/nothing-there", "./a\0b", "x/" * 3000]
)
def test_a_path_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no model config.json" in refused(missing) or "is not known" in refused(missing)


def test_an_empty_folder_and_one_with_pickles_only(tmp_path: Path) -> None:
    assert "no model config.json" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02evil")
    assert "no model config.json" in refused(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "secret.json"
    outside.write_text(json.dumps(WAN))
    (tmp_path / "mine" / "transformer").mkdir(parents=True)
    (tmp_path / "mine" / "transformer" / "config.json").symlink_to(outside)
    assert "transformer/config.json points outside its folder" in refused(tmp_path / "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "transformer").symlink_to(tmp_path / "mine" / "transformer")
    assert "points outside its folder" in refused(tmp_path / "other")


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("target", ["config.json", "/dev/zero", "/nothing"])
def test_links_that_lead_nowhere_or_forever(tmp_path: Path, target: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").symlink_to(target)
    refused(tmp_path / "mine")


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_the_links_of_a_hugging_face_cache_are_its_own(tmp_path: Path) -> None:
    repository = tmp_path / "models--Somebody--My-Wan"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "3f2a").write_text(json.dumps(WAN))
    snapshot = repository / "snapshots" / "0123abcd"
    (snapshot / "transformer").mkdir(parents=True)
    (snapshot / "transformer" / "config.json").symlink_to("../../../blobs/3f2a")
    source = diffusers_folder.read_source(str(snapshot), [WAN["_class_name"]])
    assert (source.folder, source.is_pipeline, source.config) == ("My-Wan", True, WAN)


@pytest.mark.parametrize(
    "name",
    ["..", "../evil", "a/b", "a\\b", "/abs", ".hidden", "a..b", "con", "nul.x", "", "a b", "é", "x" * 200, "a.toml"],
)
def test_a_name_that_is_no_safe_file_name(tmp_path: Path, name: str) -> None:
    assert "is not a safe file name" in refused(wrote(tmp_path / "mine", WAN), "--name", name)


@pytest.mark.parametrize("name", ["wan2.1-t2v-14b", "WAN2.1-T2V-14B", "vace-14b", "flux-dev"])
def test_a_name_that_comes_with_vplan(tmp_path: Path, name: str) -> None:
    assert "name of a bundled model" in refused(wrote(tmp_path / "mine", WAN), "--name", name)
    assert "name of a bundled model" in refused(wrote(tmp_path / name, WAN))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flux.1-dev", "--name", "mine"], "--name is for one folder"),
        (["./mine", "./other", "--name", "mine"], "--name is for one folder"),
        (["./nowhere", "--name", "mine"], "no model config.json at './nowhere'"),
        (["--name", "mine"], "--name is for one folder"),
        (["./mine", "--check"], "--check is for recorded models"),
        (["./mine", "-o", "tapes"], "-o is not supported for your own models"),
    ],
)
def test_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    wrote(tmp_path / "mine", WAN)
    wrote(tmp_path / "other", WAN)
    assert message in refused(*words, code=1 if "nowhere" in words[0] else 2)


def test_refusals_are_json_when_json_was_asked(tmp_path: Path) -> None:
    done = run(wrote(tmp_path / "mine", {}), "--json")
    assert done.exit_code == 1
    assert list(json.loads(done.stdout)["error"]) == ["message", "fix"]


def test_private_keys_are_never_followed(tmp_path: Path) -> None:
    said = {**WAN, "_name_or_path": "/etc/passwd", "_diffusers_version": "9.9", "quantization_config": {"x": 10**30}}
    place = wrote(tmp_path / "mine", said)
    source = diffusers_folder.read_source(str(place), [WAN["_class_name"]])
    assert diffusers_folder.architecture(source.config).keys() == WAN.keys() - {"_class_name"}


def test_every_bundled_config_passes_its_own_limits() -> None:
    for name in lookup.model_names():
        profile = lookup.model(name)
        diffusers_folder.check_values(profile.config, name)
        diffusers_folder.check_kinds(profile.config, [profile.config], name)
        diffusers_folder.check_values(profile.vae.config, name)
        for encoder in profile.text_encoders:
            diffusers_folder.check_values(encoder.config, name, may_be_negative=True)


@pytest.mark.parametrize(
    ("value", "known", "message"),
    [
        ("forty", 40, "is not a whole number"),
        ([1, "2"], [1, 2], "is not a whole number"),
        (True, 40, "is not a whole number"),
        (40.5, 40, "is not a whole number"),
        (40.0, 40, ""),
        (1, 1e-6, ""),
        (None, 40, ""),
        ([8, 16], 8, ""),
        (8, "silu", "is not a text"),
        (1, True, "is not true or false"),
        ("rms_norm", False, ""),
        # Qwen2.5-VL's own config.json says more of its vision tower than the profiles do.
        ({"depth": 32, "hidden_act": "silu", "initializer_range": 0.02}, {"depth": 32}, ""),
        ({"depth": "two", "hidden_act": "silu"}, {"depth": 32}, r"key.depth 'two' is not a whole number"),
    ],
)
def test_text_where_a_number_belongs(value: object, known: object, message: str) -> None:
    try:
        diffusers_folder.check_kinds({"key": value}, [{"key": known}, {}, {"key": None}], "config.json")
        said = ""
    except ValueError as error:
        said = str(error)
    assert message in said and bool(message) == bool(said)


def test_an_own_profile_that_is_damaged_is_named(own_home: Path) -> None:
    (own_home / "models").mkdir(parents=True)
    for text in ("{", "[]", "{}", '{"name": "mine"}'):
        (own_home / "models" / "mine.json").write_text(text)
        with pytest.raises(ValueError, match=r"your own profile mine.json is damaged"):
            lookup.model("mine")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", r"holds a LoRA, not a model; name the model it was trained on"),
        ("pytorch_lora_weights.safetensors", r"holds a LoRA, not a model"),
        ("notes.txt", r"holds no model; pass a folder with a config.json"),
    ],
)
def test_a_folder_without_a_model_says_what_it_holds(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=said):
        lookup.model(str(tmp_path))


def test_a_folder_that_was_not_recorded_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = wrote(tmp_path / "mine", WAN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is not recorded yet; vplan record mine"):
        lookup.model("mine")
    with pytest.raises(ValueError, match=r"is not recorded yet; vplan record /"):
        lookup.model(str(place))


def test_where_own_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(user_data.VARIABLE, "relative")
    monkeypatch.chdir(tmp_path)
    assert user_data.folder() == tmp_path / "relative"
    monkeypatch.delenv(user_data.VARIABLE)
    assert user_data.folder().name == "vplan"


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(user_data.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot write .*set VPLAN_HOME"):
        user_data.write_profile("mine", {"name": "mine"})
