"""`vplan gpus`: the cards we know, and what each can give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.catalog import lookup
from planner.catalog.profiles import GpuProfile
from planner.commands._shared.verb import Verb, examples, json_option, markdown_option, show, table
from planner.terminal import echo
from planner.units import MIB, gib

if TYPE_CHECKING:
    from rich.console import Console


@click.command(cls=Verb, epilog=examples("vplan gpus", "vplan gpus --json"))
@markdown_option("docs/gpus.md")
@json_option
def command(as_markdown: bool, as_json: bool) -> None:
    """List the known cards.

    A plan may use what a process can allocate ("gives"), which is less than the card's nominal size and less than
    nvidia-smi shows ("total"). Cards with a star define their class: --gpu 24GB is the one of them that gives least.
    For any other card, pass its memory, as in --gpu 23.5GiB.
    """
    if as_markdown:
        from planner.foreign.docs_pages import gpus_page

        echo(gpus_page(), nl=False)
        return
    cards = [lookup.gpu(name) for name in lookup.gpu_names()]
    cards.sort(key=lambda card: (card.class_gb, card.allocatable_gib, card.name))
    classes = [{"name": group.name, **group.to_json()} for group in lookup.gpu_classes()]
    answer = {"gpus": [card.to_json() for card in cards], "classes": classes}
    show(answer, as_json, lambda console: _table(console, cards))


def _table(console: Console, cards: list[GpuProfile]) -> None:
    columns = ("class", "name", "chip", ">gives GiB", ">total GiB", ">bf16 TFLOPS", ">GB/s")
    console.print(table(columns, [_row(card) for card in cards]))
    console.print("* defines its class: --gpu 24GB means the one of them that gives least", style="dim")


def _row(card: GpuProfile) -> list[Any]:
    return [
        f"{card.class_gb}GB{'*' if card.reference else ''}",
        card.name,
        card.architecture,
        f"{card.allocatable_gib:.2f}",
        f"{gib(card.nvml_total_mib * MIB):.2f}",
        f"{card.bf16_tflops:.0f}" if card.bf16_tflops else "-",
        f"{card.bandwidth_gbs:.0f}",
    ]
