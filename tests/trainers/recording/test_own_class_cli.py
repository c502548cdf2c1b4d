"""`vplan record --class`: a model class of the user's own code, run without network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from planner.catalog import lookup, own_code, user_data
from planner.commands import cli
from planner.tape.variants.precision import Precision
from planner.tape.variants.variant import StepVariant
from tests.benchmarks.held_out import Case, directly, from_tape

CODE = """
import socket
from torch import nn

ALONE = [name for _, name in socket.if_nameindex()] == ["lo"]

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Denoiser(nn.Module):
    def __init__(self, channels=4, width=32, depth=8, needs_network=False):
        super().__init__()
        assert ALONE or needs_network
        self.enter, self.leave, self.level = nn.Linear(channels, width), nn.Linear(width, channels), nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, hidden_states, timestep):
        level = self.level(timestep.to(hidden_states.dtype)[:, None, None, None])
        x = self.enter(hidden_states.movedim(1, -1)) + level
        for block in self.blocks:
            x = block(x)
        return self.leave(x).movedim(-1, 1)
"""
NAME = "my_denoiser:Denoiser"
STEP = StepVariant("lora", Precision("half", "half", False), "none", True)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(user_data.VARIABLE, str(tmp_path / "home"))
    (tmp_path / "my_denoiser.py").write_text(CODE)
    (tmp_path / "config.json").write_text('{"width": 64}')
    (tmp_path / "inputs.toml").write_text("vae = { spatial = 8 }")
    return tmp_path


def vplan(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)], prog_name="vplan", standalone_mode=True)


@pytest.mark.skipif(sys.platform != "linux", reason="a process without network needs Linux")
def test_a_class_of_your_own_is_recorded_as_it_runs(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check that there is no network but the loopback is part of the class."""
    words = ("--name", "mine", "--inputs", files / "inputs.toml", "--variant", STEP.name)
    done = vplan("record", files / "config.json", "--class", NAME, "--path", files, *words)
    assert done.exit_code == 0, done.output
    assert "runs the code of my_denoiser in" in done.output and "without network" in done.output
    profile = lookup.model("mine")
    assert (profile.diffusers_class, profile.blocks, profile.vae.spatial) == (NAME, 8, 8)

    again = vplan("record", "mine", "--variant", "step-full-half-none-one")
    assert again.exit_code == 1 and "only `vplan record --class` runs" in again.output

    monkeypatch.setenv(own_code.VARIABLE, NAME)
    monkeypatch.setenv(own_code.FOLDER, str(files))
    profile = profile.replace(config={**profile.config, "needs_network": True})
    case = Case.of(profile, STEP)
    assert from_tape(case).peak == pytest.approx(directly(case)[0].peak, rel=1e-4)


@pytest.mark.parametrize(
    "words, fault",
    [
        (("config.json", "--path", "."), "--path is for --class"),
        (("--class", NAME), "--class is for one folder"),
        (("config.json", "--class", "Denoiser"), "is no class"),
    ],
)
def test_options_that_do_not_belong_together(
    files: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], fault: str
) -> None:
    monkeypatch.chdir(files)
    done = vplan("record", *words)
    assert done.exit_code != 0 and fault in done.output
