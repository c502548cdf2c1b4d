"""What a new model takes: of a known class one TOML file, of a new class one more Python file; then it is recorded.

Profiles and tapes lie in a folder of the test's own beside the bundled ones, and a new family's file outside the
package. Two tapes are recorded: what an estimate of a checkpointed LoRA reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
from accelerate import init_empty_weights
from click.testing import CliRunner

import profiles
from planner.catalog import lookup
from planner.commands import cli
from planner.errors import VplanError
from planner.tape.codec import tape_json
from planner.tape.packed_json import write_packed
from planner.tape.variants.inventory import optimizer_variants, step_variants
from trainers import families
from trainers.recording import tapes

STEP, OPTIMIZER = "step-lora-half-fp32-autocast-full-one", "optimizer-lora-fp32-adamw-foreach"
SIZES = {"num_attention_heads": 6, "ffn_dim": 1024, "num_layers": 9}

SKYREELS = '''
"""SkyReels-V2: Wan's training on a class of its own (arXiv 2504.13074)."""

from trainers.families.wan import Wan


class SkyReels(Wan):
    """Text-to-video without diffusion forcing: one noise level for all frames."""


FAMILY = SkyReels
'''


@pytest.fixture
def own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with all bundled profiles and tapes, in which a test may put more."""
    for name, place in (("models", profiles.MODELS), ("tapes", profiles.TAPES)):
        (tmp_path / name).mkdir()
        for path in place.iterdir():
            (tmp_path / name / path.name).symlink_to(path)
    monkeypatch.setattr(profiles, "MODELS", tmp_path / "models")
    monkeypatch.setattr(profiles, "TAPES", tmp_path / "tapes")
    lookup._model_aliases.cache_clear()
    yield tmp_path
    lookup._model_aliases.cache_clear()


def added(folder: Path, name: str, **changes: object) -> None:
    """One TOML file: Wan 1.3B's with another name, sizes and what else a test changes."""
    text = profiles.model_path("wan2.1-t2v-1.3b").read_text(encoding="utf-8")
    config = {**lookup.model("wan2.1-t2v-1.3b").config, **SIZES}
    class_name = str(changes.get("diffusers_class", "WanTransformer3DModel"))
    with init_empty_weights():
        model = getattr(diffusers, class_name).from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    fields = {"name": name, "title": name.title(), "aliases": [], "parameters": parameters, **SIZES, **changes}
    for key, value in fields.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", lambda _, k=key, v=value: f"{k} = {json.dumps(v)}", text, count=1)
        assert count == 1, key
    (folder / "models" / f"{name}.toml").write_text(text, encoding="utf-8")


def recorded(folder: Path, name: str) -> None:
    """The two tapes of a model."""
    profile = lookup.model(name)
    variants = (*step_variants(profile), *optimizer_variants(profile))
    for variant in (one for one in variants if one.name in (STEP, OPTIMIZER)):
        path = folder / "tapes" / name / f"{variant.name}.json.gz"
        write_packed(tape_json(tapes.record(profile, variant)), path)


def estimated(name: str) -> dict[str, Any]:
    words = ("--gpu", "24GB", "--gradient-checkpointing", "full", "--resolution", "480p", "--json")
    done = CliRunner().invoke(cli, ["estimate", name, *words])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_of_a_known_class_is_one_file(own_profiles: Path) -> None:
    added(own_profiles, "wan-tiny")
    recorded(own_profiles, "wan-tiny")
    found, bundled = estimated("wan-tiny"), estimated("wan2.1-t2v-1.3b")
    assert found["job"]["model"] == "wan-tiny"
    assert found["phases"].keys() == bundled["phases"].keys()
    assert 2 * lookup.model("wan-tiny").parameters < found["peak"]["allocated_bytes"]
    assert found["phases"]["train"]["allocated_bytes"] < bundled["phases"]["train"]["allocated_bytes"]
    assert lookup.model("wan-tiny").traits == lookup.model("wan2.1-t2v-1.3b").traits


def test_a_model_of_a_new_class_is_one_python_file_more(own_profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added(own_profiles, "skyreels-tiny", family="skyreels", diffusers_class="SkyReelsV2Transformer3DModel")
    unknown = "family 'skyreels' of skyreels-tiny is unknown; known: anima, any_class, .*cogvideox, .*, wan"
    with pytest.raises(VplanError, match=unknown):
        families.family(lookup.model("skyreels-tiny"))
    (own_profiles / "families").mkdir()
    (own_profiles / "families" / "skyreels.py").write_text(SKYREELS, encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(own_profiles / "families")])
    recorded(own_profiles, "skyreels-tiny")
    assert estimated("skyreels-tiny")["peak"]["allocated_bytes"] > 2 * lookup.model("skyreels-tiny").parameters


def test_every_family_has_its_file() -> None:
    named = {families.file_of(lookup.model(name)) for name in profiles.model_names()}
    assert named | {"any_class"} == set(families.files()), "and one for any other class"


def test_models_of_a_class_have_the_same_traits() -> None:
    """What is true of a class is written in the file of each of its models: they must agree. Of encoders, whose
    pipelines may fill prompts up or not, those that have one tape."""
    models = [lookup.model(name) for name in profiles.model_names()]
    vaes = [(model.vae.class_name, model.vae.traits) for model in models]
    encoders = [(part.folder, part.traits) for model in models for part in model.text_encoders]
    own = (
        "same_shape",
        "denoising_steps",  # its pipeline's: Anima's is another than Cosmos-Predict2.5's
        "frames_per_second",
        "wide_is_all_linear",
        "trained_by",
        "trained_in_fp32",
        "trainers",
        "saved_tables",
        "distilled",
        "few_steps",
        "not_encoded",
        "published_dtype",  # its repository's
        "guidance_in_one_batch",  # a distilled model has no guidance
    )
    for pairs in (vaes, encoders):
        for class_name in {name for name, _ in pairs}:
            assert len({str(traits) for name, traits in pairs if name == class_name}) == 1, class_name
    code = [(model.diffusers_class, model.traits.model_dump(exclude=set(own))) for model in models]
    for class_name in {name for name, _ in code}:
        assert len({str(traits) for name, traits in code if name == class_name}) == 1, class_name
