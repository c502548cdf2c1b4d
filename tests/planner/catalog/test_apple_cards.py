"""A Mac is a chip with its memory."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog import apple_cards, card_lookup, lookup
from planner.catalog.card_limits import refuse_on_card
from planner.catalog.shapes import job_for
from planner.errors import NotEstimatedError, VplanError
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.units import GB, GIB


@pytest.mark.parametrize(
    "typed", ["m4max-64gb", "M4 Max 64GB", "Apple M4 Max 64 GB", "m4max64", "m4-max-64", "1xm4max-64gb", "M4MAX 64GiB"]
)
def test_a_chip_is_known_as_people_type_it(typed: str) -> None:
    count, card = card_lookup.parse_gpus(typed)
    assert (count, card.name, card.vendor, card.unified) == (1, "m4max-64gb", "apple", True)
    assert card_lookup.card_taken_for(typed, card) == ""
    assert card_lookup.gpu(card.name) == card


@pytest.mark.parametrize(
    ("typed", "fault", "fix"),
    [
        ("m4max", "does not say how much memory", "m4max-36gb or m4max-48gb or m4max-64gb or m4max-128gb"),
        ("m3", "does not say how much memory", "m3-8gb"),
        ("m4 max 63gb", "no M4 Max is sold with 63 GB", "m4max-64gb"),
        ("m9", "does not say which of Apple's chips", "m4max-64gb"),
        ("macbook", "does not say which of Apple's chips", "m4max-64gb"),
        ("mps", "does not say which of Apple's chips", "m4max-64gb"),
        ("m40", "neither a card nor a size", "vplan gpus"),  # another's
    ],
)
def test_what_names_no_mac_is_told_what_is_missing(typed: str, fault: str, fix: str) -> None:
    with pytest.raises(VplanError) as caught:
        card_lookup.gpu(typed)
    assert fault in caught.value.message and fix in caught.value.fix


def test_every_mac_has_a_name_of_its_own_and_gives_part_of_its_memory() -> None:
    file = apple_cards.apple_file()
    names = [apple_cards.card(chip, memory).name for chip in file.chip for memory in chip.memory_gb]
    assert len(names) == len(set(names)) > 50
    for name in names:
        card = card_lookup.gpu(name)
        assert 0.65 <= card.allocatable_bytes / (card.class_gb * GIB) <= 0.75
        assert card_lookup.installed_host_ram(card, 1) == card.class_gb * GIB
        assert not card.tells_seconds
    assert {each.memory_gb for each in file.working_set} == {memory for chip in file.chip for memory in chip.memory_gb}


def test_an_exact_budget_is_a_discrete_card_s() -> None:
    assert card_lookup.gpu("48GiB").vendor == "nvidia"
    assert all(card_lookup.gpu(group.name).vendor != "apple" for group in card_lookup.gpu_classes())
    assert card_lookup.gpu("24GB").class_gb * GB == 24 * GB


PLAIN = {"optimizer_step": "loop", "expandable_segments": False}


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"model": "sdxl"}, "U-Net's convolutions"),
        ({"weights_dtype": "nf4"}, "no nf4 products"),
        ({"weights_dtype": "fp8"}, "no fp8 products"),
        ({"optimizer": "adamw-8bit"}, "adamw-8bit on MPS"),
        ({"optimizer_step": "foreach"}, "no foreach step"),
        ({"compile": "blocks"}, "torch.compile on MPS"),
        ({"attention": "flash"}, "no flash attention"),
        ({"gradient_checkpointing": "fp8"}, "no fp8"),
        ({"gradient_checkpointing": "offload"}, "--gradient-checkpointing moves"),
        ({"swap_blocks": 3, "gradient_checkpointing": "full"}, "--swap-blocks moves"),
        ({"ema": "cpu"}, "--ema moves"),
        ({"text_encoder": "resident"}, "takes to encode"),
        ({"vae": "resident"}, "takes to encode"),
        ({"validation_mode": "on"}, "validation on MPS"),
        ({"torch": "2.15"}, "torch 2.15 for Apple's GPUs is not modelled"),
        ({"gpus": 2}, "several Macs"),
        ({"os": "windows"}, "runs macOS"),
        ({"lora_dropout": 0.1}, "dropout on MPS"),
        ({"method": "sample"}, "sampling on Apple's GPUs"),
    ],
)
def test_what_is_not_known_of_mps_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(NotEstimatedError) as caught:
        refuse(options)
    assert fault in caught.value.message and caught.value.fix


@pytest.mark.parametrize(
    "options", [{}, {"optimizer_step": "fused"}, {"torch": "2.13"}, {"gradient_checkpointing": "full"}, {"ema": "gpu"}]
)
def test_what_is_known_of_an_apple_card_is_not_refused(options: dict[str, Any]) -> None:
    refuse(options)


def refuse(options: dict[str, Any]) -> None:
    job_fields = {name: options[name] for name in ("method", "lora_dropout") if name in options}
    machine = {name: options[name] for name in ("torch", "gpus", "os") if name in options}
    model = options.get("model", "flux.1-dev")
    others = {name: value for name, value in options.items() if name not in (*job_fields, *machine, "model")}
    job = job_for(lookup.model(model), job_fields)
    asked = Configuration.of(job, Strategy.read({**PLAIN, **others}), Machine.read({"gpu": "m4max-64gb", **machine}))
    refuse_on_card(asked, card_lookup.gpu("m4max-64gb"), lookup.model(model))
