"""`vplan mcp` as agents use it: the SDK's own client, over stdin and stdout of a real process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import vplan
from planner.commands import cli

mcp = pytest.importorskip("mcp")

SKILL = Path(vplan.HOME) / "docs" / "skill" / "SKILL.md"

FLUX = (
    "accelerate launch train_dreambooth_lora_flux.py --pretrained_model_name_or_path x/FLUX.1-dev"
    " --mixed_precision bf16 --gradient_checkpointing"
)

CHEAP = {"gradient_checkpointing": "full", "resolution": "512x512"}


def asked(folder: Path, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """The names of the tools, then a server's answer to each call: its object, or the text of an error."""

    async def run() -> list[Any]:
        command, *words = vplan.command("mcp", "--folder", str(folder))
        server = mcp.StdioServerParameters(command=command, args=words, env={**os.environ, "VPLAN_HOME": str(folder)})
        answers: list[Any] = []
        async with mcp.Client(server) as client:
            answers.append([tool.name for tool in (await client.list_tools()).tools])
            for name, values in calls:
                done = await client.call_tool(name, values)
                text = done.content[0].text
                answers.append(text if done.is_error else json.loads(text))
        return answers

    return asyncio.run(run())


def test_an_agent_plans_prices_checks_exports_and_reports(tmp_path: Path) -> None:
    names, plan, refused, priced, unknown, checked, explained, exported, small, report = asked(
        tmp_path,
        (
            "suggest",
            {"model": "flux.1-dev", "gpu": "24GB", "trainer": "sd-scripts", "options": CHEAP, "save": "p.toml"},
        ),
        ("suggest", {"model": "flux.1-dev", "gpu": "24GB", "options": CHEAP, "save": "p.toml"}),
        ("estimate", {"model": "sdxl", "gpu": "24GB", "options": CHEAP}),
        ("check", {"command": ["python", "train.py", "--model", "x"], "gpu": "24GB"}),
        ("check", {"command": shlex.split(FLUX), "gpu": "48GB", "options": {"text_tokens": 77}}),
        ("check", {"error": "RuntimeError: CUDA error: out of memory"}),
        ("export", {"plan": "p.toml", "trainer": "sd-scripts", "into": "out"}),
        ("suggest", {"model": "sd1.5", "gpu": "24GB", "save": "small.toml"}),
        ("report", {"plans": ["small.toml"], "page": "p.html"}),
    )
    assert names == ["suggest", "estimate", "check", "export", "report"]
    assert plan["schema"] == 1 and plan["plan"]["verdict"] == "fits" and plan["trainer"] == "sd-scripts"
    assert "is there already" in refused, "and nothing is overwritten"
    line = "estimate sdxl --gpu 24GB --gradient-checkpointing full --resolution 512x512 --json"
    assert priced == json.loads(CliRunner().invoke(cli, shlex.split(line)).stdout)
    assert isinstance(unknown, str) and unknown, "an unknown script is refused in words"
    words = ["check", "--json", "--gpu", "48GB", "--text-tokens", "77", "--", *shlex.split(FLUX)]
    assert checked == json.loads(CliRunner().invoke(cli, words).stdout)
    assert explained["cause"] == "driver"
    assert exported["files"] and (tmp_path / "out").is_dir()
    assert small["plan"]["verdict"] == "fits"
    assert report["page"] == "p.html" and "<html" in (tmp_path / "p.html").read_text()


def test_a_call_stays_in_its_folder_and_in_its_options(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.toml").write_text("key = 'SECRET'\n")
    (folder / "link.toml").symlink_to(tmp_path / "secret.toml")
    sdxl = {"model": "sdxl", "gpu": "24GB"}
    _, *answers = asked(
        folder,
        ("suggest", {**sdxl, "save": "../out.toml"}),
        ("suggest", {**sdxl, "save": str(tmp_path / "out.toml")}),
        ("suggest", {**sdxl, "save": "link.toml", "overwrite": True}),
        ("suggest", {**sdxl, "options": {"output": "x.toml"}}),
        ("suggest", {**sdxl, "options": {"report": "x.html"}}),
        ("suggest", {"model": "../../etc", "gpu": "24GB"}),
        ("suggest", {"model": "--help", "gpu": "24GB"}),
        ("suggest", {"model": "sdxl", "gpu": "24GB --output=x.toml"}),
        ("check", {"file": "../secret.toml", "gpu": "24GB"}),
        ("check", {"command": ["python", "train.py", "--config", "../secret.toml"], "gpu": "24GB"}),
        ("check", {"error": str(tmp_path / "secret.toml")}),
        ("export", {"plan": "link.toml", "trainer": "slurm", "into": "out"}),
        ("report", {"plans": ["../secret.toml"], "page": "x.html"}),
        ("estimate", {**sdxl, "options": {"lora_targets": "x" * 40_000}}),
    )
    assert all(isinstance(answer, str) for answer in answers), answers
    assert not any("SECRET" in answer for answer in answers)
    assert sorted(path.name for path in folder.iterdir()) == ["link.toml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "secret.toml"]
    assert (tmp_path / "secret.toml").read_text() == "key = 'SECRET'\n"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    done = CliRunner().invoke(cli, ["mcp"])
    assert done.exit_code == 1 and "vplan[mcp]" in done.output


def test_what_the_skill_says_is_so() -> None:
    """The skill's commands run, and their answers have the keys that it names."""
    text = SKILL.read_text()
    assert re.match(r"---\nname: vplan\ndescription: [^\n]+\n---\n", text)
    blocks = re.findall(r"```sh\n(.*?)```\n(?:\nKeys: (.*?)\n\n)?", text, re.DOTALL)
    assert len(blocks) >= 4
    for lines, keys in blocks:
        for line in lines.strip().splitlines():
            words = shlex.split(line)[1:]
            if "plan.toml" in words or "-o" in words or words[0] == "mcp":
                continue
            done = CliRunner().invoke(cli, words)
            assert done.exit_code in (0, 3), done.output
            found = json.loads(done.stdout)
            for key in re.findall(r"`([\w.]+)`", keys):
                value = found
                for part in key.split("."):
                    assert part in value, f"{line}: {key}"
                    value = value[part]
