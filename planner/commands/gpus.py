"""`vplan gpus`: the known cards, and their usable memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.catalog import card_lookup
from planner.catalog.card_profiles import GpuProfile
from planner.commands._shared.options import complete_card
from planner.commands._shared.verb import Verb, examples, json_option, markdown_option, show, table
from planner.terminal import echo
from planner.units import MIB, gib

if TYPE_CHECKING:
    from rich.console import Console


@click.command(cls=Verb, epilog=examples("vplan gpus", "vplan gpus rtx4090", "vplan gpus 24GB --json"))
@click.argument("name", metavar="[NAME]", required=False, shell_complete=complete_card)
@markdown_option("docs/gpus.md")
@json_option
def command(name: str | None, as_markdown: bool, as_json: bool) -> None:
    """List the known cards, or show one, or those of a class.

    A plan may use what a process can allocate ("gives"), which is less than the card's nominal size and less than
    nvidia-smi shows ("total"). Cards with a star define their class: --gpu 24GB is the one of them that gives least.
    For any other card, pass its memory, as in --gpu 23.5GiB.
    """
    if as_markdown:
        from planner.foreign.docs_pages import gpus_page

        echo(gpus_page(), nl=False)
        return
    cards = [card_lookup.gpu(each) for each in card_lookup.gpu_names()]
    cards.sort(key=lambda card: (card.class_gb, card.allocatable_gib, card.name))
    groups = card_lookup.gpu_classes()
    if name:
        group = card_lookup.gpu_class(name)
        cards = [card for card in cards if card.class_gb == group.gb] if group else [card_lookup.parse_gpus(name)[1]]
        groups = tuple(each for each in groups if each == group)
    answer = {
        "gpus": [card.to_json() for card in cards],
        "classes": [{"name": group.name, **group.to_json()} for group in groups],
    }
    single = name and len(cards) == 1
    show(answer, as_json, lambda console: _print_one(console, cards[0]) if single else _table(console, cards))


def _print_one(console: Console, card: GpuProfile) -> None:
    """Prints what is known about one card, one fact per line."""
    of_the_computer = card.has_working_set  # its gigabytes are of no class of cards, and in no nvidia-smi
    facts = {
        "name": card.name,
        "class": f"{card.class_gb}GB{' (one of those that define it)' * card.reference}" if not of_the_computer else "",
        "chip": card.architecture,
        "gives": f"{card.allocatable_gib:.2f} GiB to a process",
        "shows": f"{gib(card.nvml_total_mib * MIB):.2f} GiB in nvidia-smi" if not of_the_computer else "",
        "speed": f"{card.bf16_tflops:.0f} TFLOPS in bf16" if card.bf16_tflops and card.tells_seconds else "",
        "memory": f"{card.bandwidth_gbs:.0f} GB/s",
        "source": card.source,
    }
    console.print(card.title, style="bold")
    lines = table(("", ""), [(fact, value) for fact, value in facts.items() if value])
    lines.show_header = False
    console.print(lines)
    console.print(f"next: vplan suggest --gpu {card.name}", style="bold", markup=False)


def _table(console: Console, cards: list[GpuProfile]) -> None:
    columns = ("class", "name", "chip", ">gives GiB", ">total GiB", ">bf16 TFLOPS", ">GB/s")
    console.print(table(columns, [_row(card) for card in cards]))
    console.print("* defines its class: --gpu 24GB means the one of them that gives least", style="dim")
    console.print("Macs by chip and memory: --gpu m4max-64gb", style="dim")


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
