"""Hours, energy and money of whole jobs, as `vplan estimate` and `vplan suggest` tell them."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

import vplan

WAN = ("wan2.1-t2v-1.3b", "--frames", "81", "--gradient-checkpointing", "full")
H100 = ("--gpu", "h100-80gb")


def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(vplan.command(*words), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def answer(*words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json", code=code).stdout)
    return found


def test_a_step_encodes_what_is_not_cached() -> None:
    told = {}
    for place in ("cached", "resident", "swapped"):
        told[place] = answer("estimate", *WAN, *H100, "--vae", place, "--text-encoder", place)
    clip, prompt = 163.75e12, 4.845e12  # FLOP of Wan's VAE over 81 frames of 480x832, and of UMT5 over 512 tokens
    encoding = told["resident"]["flops"] - told["cached"]["flops"]
    assert encoding == pytest.approx(clip + prompt, rel=1e-3)
    waits = told["resident"]["step_seconds"] - told["cached"]["step_seconds"]
    assert encoding / 989e12 < waits < 6 * encoding / 989e12  # an H100's peak, and a sixth: half of it moves memory
    coming = told["swapped"]["step_seconds"] - told["resident"]["step_seconds"]
    assert coming == pytest.approx(2 * 5.81e9 / 55e9, rel=0.02)  # 16-bit weights over the card's PCIe 5 link
