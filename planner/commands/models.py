"""`vplan models`: the known models, with the shapes they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.commands._shared.options import complete_model
from planner.commands._shared.verb import Verb, examples, json_option, markdown_option, show, table
from planner.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console


@click.command(cls=Verb, epilog=examples("vplan models", "vplan models wan2.1-t2v-14b", "vplan models --json"))
@click.argument("name", metavar="[NAME]", required=False, shell_complete=complete_model)
@markdown_option("docs/models.md")
@json_option
def command(name: str | None, as_markdown: bool, as_json: bool) -> None:
    """List the known models, or show one: its sizes, parts, names and sources.

    "params" counts the part that is trained (the transformer or UNet), in billions. "frames" is the default clip
    length, and the rule for others: 4n+1 allows 1, 5, 9 and so on. Sizes are height x width. "data" is what `vplan
    train` takes: a folder of files, or only samples that are encoded already. Your own models (`vplan record FOLDER`)
    come last.
    """
    if as_markdown:
        from planner.foreign.docs_pages import models_page

        echo(models_page(), nl=False)
        return
    models = [lookup.model(each) for each in ([name] if name else lookup.model_names())]
    answer = {"models": [{**model.to_json(), "data": model.train_data} for model in models]}
    show(answer, as_json, lambda console: _print_one(console, models[0]) if name else _table(console, models))


def _print_one(console: Console, model: ModelProfile) -> None:
    """Prints the facts about one model that matter for a question, one per line."""
    shape, vae = model.shape, model.vae
    step = shape.frame_rule if shape.frame_step > 1 else "1"
    longest = f", trained up to {shape.max_frames}" if model.kind == "video" else ""
    encoders = ", ".join(f"{part.name} ({part.parameters / 1e9:.2f} B)" for part in model.text_encoders)
    experts = f", {model.experts} experts" if model.experts > 1 else ""
    facts = {
        "name": f"{model.name} (yours)" if model.is_own else model.name,
        "also": ", ".join(model.aliases),
        "kind": f"{model.kind}, {model.diffusers_class}, {model.parameters / 1e9:.2f} B parameters{experts}",
        "blocks": str(model.blocks),
        "frames": f"{step}, {shape.default_frames} by default{longest}" if model.kind == "video" else "1",
        "sizes": ", ".join(f"{height}x{width}" for height, width in shape.resolutions)
        + f" (height x width), and other multiples of {shape.size_multiple}",
        "LoRA on": ", ".join(model.lora.targets),
        "VAE": f"{vae.class_name} ({vae.parameters / 1e9:.2f} B), {vae.dtype}",
        "text": encoders,
        "data": model.train_data,
        "license": model.license,
        "sources": "\n".join(model.sources),
    }
    console.print(model.title, style="bold")
    lines = table(("", ""), [(name, value) for name, value in facts.items() if value])
    lines.show_header = False
    console.print(lines)
    console.print(f"next: vplan suggest {model.name}", style="bold", markup=False)


def _table(console: Console, models: list[ModelProfile]) -> None:
    columns = ("name", "kind", ">params", ">frames", "rule", "data", "sizes")
    lines = table(columns, [_row(model) for model in models])
    lines.columns[0].no_wrap = True  # where there is little room, the sizes are wrapped
    console.print(lines)


def _row(model: ModelProfile) -> list[Any]:
    shape = model.shape
    return [
        f"{model.name} (yours)" if model.is_own else model.name,
        model.kind,
        f"{model.parameters / 1e9:.2f} B",
        shape.default_frames,
        shape.frame_rule if shape.frame_step > 1 else "1",
        model.train_data,
        ", ".join(f"{height}x{width}" for height, width in shape.resolutions),
    ]
