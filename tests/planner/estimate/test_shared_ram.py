"""Swapped blocks of a frozen base that the ranks of a node hold together: where they count once, and where for each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid, job_for
from planner.estimate.host_ram import HostRam, host_ram
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.search.screening import Screen
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.units import GIB
from tests.planner.estimate.test_pinned_ram import answer

WAN = lookup.model("wan2.1-t2v-1.3b")
PAIR = lookup.model("wan2.2-t2v-a14b")
SHORT = {"frames": 17, "height": 480, "width": 832}


def asked(model: ModelProfile, gpus: int, strategy: dict[str, Any], system: str = "linux", **job: Any) -> Configuration:
    machine = Machine.read({"gpu": "h200-141gb", "gpus": gpus, "host_ram": 4096 * GIB, "os": system})
    known = Strategy.read({"gradient_checkpointing": "full", **strategy})
    return Configuration.of(job_for(model, {**SHORT, **job}), known, machine)


def needs(configuration: Configuration, model: ModelProfile, trainer: str = "vplan") -> HostRam:
    run = lay_out(configuration, load_facts(configuration), grid(model, configuration.job), trainer)
    return host_ram(run, configuration.machine)


def block_bytes(count: int) -> int:
    """Frozen weights of Wan 1.3B's last blocks in bf16, by its architecture: eight square matrices of 1536, two of the
    feed-forward, and what belongs to them; a norm and a table of six vectors in fp32, which diffusers keeps so."""
    width, inner = 1536, 8960
    matrices = 8 * width * width + 2 * width * inner
    vectors = 8 * width + inner + width + 4 * width  # biases, and the norms of queries and keys
    return count * (2 * (matrices + vectors) + 4 * (2 * width + 6 * width))


@pytest.mark.parametrize("gpus", [2, 4])
def test_our_ranks_hold_one_copy_on_linux(gpus: int) -> None:
    one, several = (needs(asked(WAN, count, {"swap_blocks": 10}), WAN) for count in (1, gpus))
    assert one.parts["weights"] == pytest.approx(block_bytes(10), rel=0.001)
    assert several.parts["weights"] == several.pinned_bytes == one.parts["weights"] == one.pinned_bytes
    each = ("process", "data")
    assert [several.parts[part] for part in each] == [gpus * one.parts[part] for part in each]
    assert several.parts["saving"] == one.parts["saving"]  # rank 0 has that, and there is no other part
    assert several.parts.keys() == {*each, "weights", "saving"}
    assert several.phases["load"] < gpus * one.phases["load"] - (gpus - 1) * 0.99 * block_bytes(10)


@pytest.mark.parametrize(("trainer", "system"), [("vplan", "windows"), ("vplan", "wsl"), ("musubi-tuner", "linux")])
def test_elsewhere_every_process_has_its_own(trainer: str, system: str) -> None:
    strategy = {"swap_blocks": 10, "adapter_dtype": "fp32", "autocast": "bf16"}
    one, four = (needs(asked(WAN, count, strategy, system), WAN, trainer) for count in (1, 4))
    assert four.parts["weights"] == 4 * one.parts["weights"] and four.pinned_bytes == 4 * one.pinned_bytes


def test_an_idle_expert_waits_in_every_process_but_for_its_swapped_blocks() -> None:
    idle = {"inactive_expert": "cpu"}
    one, four = (needs(asked(PAIR, gpus, idle, experts="both"), PAIR).parts["weights"] for gpus in (1, 4))
    assert four == 4 * one
    swapping = {**idle, "swap_blocks": 20}
    one_swapping, four_swapping = (
        needs(asked(PAIR, gpus, swapping, experts="both"), PAIR).parts["weights"] for gpus in (1, 4)
    )
    blocks = one_swapping - one  # of the running expert; the idle one's waited before too
    assert four_swapping == 4 * (one - blocks) + 2 * blocks


@given(
    st.integers(0, 29),
    st.integers(1, 8),
    st.sampled_from(["bf16", "fp8", "int8"]),
    st.sampled_from(["full", "offload"]),
)
@settings(max_examples=60, deadline=None)
def test_no_floor_is_above_it_and_more_never_needs_less(blocks: int, gpus: int, dtype: str, mode: str) -> None:
    strategy = {"swap_blocks": blocks, "weights_dtype": dtype, "gradient_checkpointing": mode}
    screen = Screen(load_facts)
    shared, apart = (asked(WAN, gpus, strategy, system) for system in ("linux", "windows"))
    ram = screen.host_ram_bytes(shared)
    for configuration in (shared, apart):
        assert screen.floor_ram_bytes(configuration) <= screen.host_ram_bytes(configuration)
    assert ram == screen.quick_estimate(shared).host_ram_bytes == needs(shared, WAN).nbytes
    assert ram <= screen.host_ram_bytes(apart)
    assert ram < screen.host_ram_bytes(asked(WAN, gpus + 1, strategy))
    if blocks < 29:
        assert ram <= screen.host_ram_bytes(asked(WAN, gpus, {**strategy, "swap_blocks": blocks + 1}))


def test_a_search_finds_what_fits_because_ranks_share() -> None:
    """Two RTX 4090 and 58 GiB of RAM: without sharing every plan for 81 frames was lossy, or on one GPU alone."""
    found = answer("suggest wan2.1-t2v-14b --gpu 2x4090 --frames 81")["plan"]
    assert found["verdict"] == "fits" and not found["lossy"]
    assert found["strategy"]["sharding"] == "ddp" and found["strategy"]["swap_blocks"] > 20
    assert found["host"]["pinned_bytes"] < found["host_ram_bytes"] <= 58 * GIB
