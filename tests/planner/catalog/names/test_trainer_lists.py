from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import profiles
from planner.catalog import diffusers_folder, lookup
from planner.catalog.names import other_models
from planner.catalog.names.model_names import model_key
from planner.catalog.names.other_models import OtherModel
from planner.catalog.names.trainer_lists import ListedModel, NameVerdict, TrainerList, name_verdict, trainer_lists
from planner.errors import VplanError

CLASSES_PAGE = Path(__file__).parents[4] / "docs" / "your-own-model.md"
LISTED = [(each, listed) for each in trainer_lists() for listed in each.models]


def refusal(name: str) -> VplanError:
    with pytest.raises(VplanError) as caught:
        lookup.model(name)
    return caught.value


# ---- the lists


def test_the_eight_trainers_are_listed() -> None:
    names = {each.trainer for each in trainer_lists()}
    assert names == {
        "ai-toolkit",
        "diffsynth",
        "diffusers",
        "diffusion-pipe",
        "musubi-tuner",
        "onetrainer",
        "simpletuner",
        "videox-fun",
    }
    assert names <= set(profiles.trainer_names())
    assert all(re.fullmatch("[0-9a-f]{8}", each.commit) for each in trainer_lists())


@pytest.mark.parametrize(("each", "listed"), LISTED, ids=[f"{each.trainer}: {row.name}" for each, row in LISTED])
def test_a_listed_name_means_what_the_list_says(each: TrainerList, listed: ListedModel) -> None:
    kind, models = name_verdict(listed.name)
    assert models == listed.ours
    assert set(models) <= set(profiles.model_names())
    if kind is NameVerdict.NUMBERS:
        assert lookup.model(listed.name).name == listed.ours[0]
    elif kind is NameVerdict.SEVERAL:
        assert str(refusal(listed.name)).endswith("write one of " + ", ".join(listed.ours))
    else:
        assert kind is NameVerdict.REFUSED, "a name that is not known"
        error = refusal(listed.name)
        other = other_models.find(listed.name)
        missing = other.missing if other else "a distilled"
        assert missing in error.message
        assert listed.name in error.message
        assert error.fix
        assert len(str(error)) < 400


def test_no_trainer_lists_a_name_twice() -> None:
    for each in trainer_lists():
        assert [name for name, count in Counter(row.name for row in each.models).items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Wan2.2-TI2V-5B", "wan2.2-ti2v-5b"),
        ("Wan 2.2 TI2V 5B", "wan2.2-ti2v-5b"),
        ("black-forest-labs/FLUX.1-Krea-dev", "flux.1-dev"),
        ("PAI/Wan2.1-Fun-V1.1-14B-InP", "wan2.1-i2v-14b-480p"),
        ("CompVis/stable-diffusion-v1-4", "sd1.5"),
        ("Hunyuan Video", "hunyuan-video"),
    ],
)
def test_trainers_spellings_of_our_models(name: str, expected: str) -> None:
    assert lookup.model(name).name == expected


# ---- models that are known by name alone


def test_a_model_is_not_taken_for_one_whose_name_begins_alike() -> None:
    """Anima is the start of Wan 2.2 Animate, and another model."""
    assert lookup.model("animat").name == "wan2.2-animate-14b"
    assert lookup.model("anima").name == "anima"
    assert lookup.several("anima") == ()


@pytest.mark.parametrize("name", ["qwen-image-edit-2511", "Qwen/Qwen-Image-Edit-2511", "Qwen Image Edit 2511"])
def test_another_config_of_the_same_class_is_a_model_of_its_own(name: str) -> None:
    found, before = lookup.model(name), lookup.model("qwen-image-edit")
    assert found.config == {**before.config, "zero_cond_t": True}


def test_a_class_that_is_not_bundled_is_to_be_recorded() -> None:
    error = refusal("Efficient-Large-Model/Sana_600M_1024px_diffusers")
    assert "SanaTransformer2DModel" in error.fix
    assert "vplan record FOLDER" in error.fix


def test_an_adapter_is_refused_with_the_model_beside_it() -> None:
    assert "vplan suggest ltx-2`" in refusal("Lightricks/LTX-2-19b-IC-LoRA-Detailer").fix


def test_a_name_of_several_models_gives_them_all() -> None:
    assert lookup.several("Stable Diffusion 3.5") == ("sd3.5-large", "sd3.5-medium")
    assert "ambiguous" in refusal("Stable Diffusion 3.5").message


def test_no_name_means_two_models() -> None:
    others = other_models.other_names()
    entries = {(model_key(name), model.title) for model in others.model for name in model.names}
    entries |= {(model_key(name), group.models[0]) for group in others.group for name in group.names}
    assert [key for key, count in Counter(key for key, _ in entries).items() if count > 1] == []
    taken = {key: lookup.bundled_name(key) or lookup.distilled_from(key) for key, _ in entries}
    assert {key: model for key, model in taken.items() if model} == {}


def test_what_a_refusal_points_to_exists() -> None:
    for model in other_models.other_names().model:
        assert not model.goes_with or model.goes_with in profiles.model_names(), model.title
        assert not (model.goes_with and model.recorded_by), model.title
    for group in other_models.other_names().group:
        assert set(group.models) <= set(profiles.model_names())


@pytest.mark.parametrize(
    "other", [model for model in other_models.other_names().model if model.recorded_by], ids=lambda model: model.title
)
def test_a_class_that_is_to_be_recorded_can_be(other: OtherModel) -> None:
    assert other.recorded_by in diffusers_folder.installed_classes()
    tried = re.search(rf"^\| `{other.recorded_by}` \| arguments (found|known)", CLASSES_PAGE.read_text("utf-8"), re.M)
    assert tried, "docs/your-own-model.md does not say that it was recorded"
