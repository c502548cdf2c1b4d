"""What `--hollow` is understood as, and what is refused with a way on."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.rehearsal.hollow.hollow_request import parse_request
from planner.rehearsal.hollow.tensor_files import write_safetensors


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_repository_goes_into_a_cache() -> None:
    request = parse_request("black-forest-labs/FLUX.1-dev")
    assert (request.place, request.name, request.is_file) == (None, "black-forest-labs/FLUX.1-dev", False)


def test_a_file_is_known_by_its_name(here: Path) -> None:
    request = parse_request("models/flux1-dev.safetensors")
    assert (request.place, request.name, request.is_file) == (here / "models/flux1-dev.safetensors", "flux1-dev", True)
    assert parse_request("x/Wan2.1_VAE.pth").name == "wan2.1-vae"


def test_a_path_and_a_name(here: Path) -> None:
    assert parse_request("a=b/dit.pth=wan2.1-t2v-1.3b").place == here / "a=b/dit.pth"
    assert not parse_request("models/Wan=Wan-AI/Wan2.1-T2V-1.3B").is_file


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("flux1-dve=x", "nothing is known of 'x'", "known are"),
        ("weights.safetensors=flux1-dve", "nothing is known of 'flux1-dve'", "flux1-dev"),
        ("stabilityai/unknown", "nothing is known of 'stabilityai/unknown'", "a folder with the model's config.json"),
        ("flux1-dev", "does not say where", "--hollow PATH=flux1-dev"),
        ("models=flux1-dev", "a checkpoint is one file", ".safetensors"),
        ("flux.safetensors=black-forest-labs/FLUX.1-dev", "a repository is a folder", "flux1-dev"),
        ("=flux1-dev", "no path before", "PATH=NAME"),
    ],
)
def test_refusals(text: str, message: str, fix: str) -> None:
    with pytest.raises(VplanError) as error:
        parse_request(text)
    assert message in error.value.message
    assert fix in error.value.fix


def test_nothing_is_put_over_a_file(here: Path) -> None:
    (here / "ae.safetensors").write_bytes(b"weights")
    with pytest.raises(VplanError) as error:
        parse_request("ae.safetensors")
    assert "it is there" in error.value.message
    assert "nothing is written over a file" in error.value.fix


def test_what_a_killed_run_left_is_named(here: Path) -> None:
    write_safetensors(here / "ae.safetensors", [])
    with pytest.raises(VplanError) as error:
        parse_request("ae.safetensors")
    assert "has no weights: delete it" in error.value.fix
