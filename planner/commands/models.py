"""`vplan models`: the models we know, with the shapes they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.commands._shared.verb import Verb, examples, json_option, markdown_option, show, table
from planner.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console


@click.command(cls=Verb, epilog=examples("vplan models", "vplan models --json"))
@markdown_option("docs/models.md")
@json_option
def command(as_markdown: bool, as_json: bool) -> None:
    """List the known models.

    "params" counts the part that is trained (the transformer or UNet), in billions. "frames" is the default clip
    length, and the rule for others: 4n+1 allows 1, 5, 9 and so on. Sizes are height x width. "data" is what `vplan
    train` takes: a folder of files, or only samples that are encoded already. Your own models (`vplan record FOLDER`)
    come last.
    """
    if as_markdown:
        from planner.foreign.docs_pages import models_page

        echo(models_page(), nl=False)
        return
    models = [lookup.model(name) for name in lookup.model_names()]
    answer = {"models": [{**model.to_json(), "data": model.train_data} for model in models]}
    show(answer, as_json, lambda console: _table(console, models))


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
        f"{shape.frame_step}n+1" if shape.frame_step > 1 else "1",
        model.train_data,
        ", ".join(f"{height}x{width}" for height, width in shape.resolutions),
    ]
