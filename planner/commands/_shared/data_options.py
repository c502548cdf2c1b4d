"""The options that say which data is trained on: shared by the verbs that read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from planner.dataset.sources import DataSource
from planner.schema import choices

Command = TypeVar("Command", bound=Callable[..., Any])

SETTINGS = ("trigger", "caption", "repeats", "frame_sampling", "fps", "flip")
"""Options that are a source's fields. `frames` is the plan's length elsewhere, so its option has another name."""


def data_options(*, required: bool, what: str | None = None) -> Callable[[Command], Command]:
    """Adds --data and the settings of a folder to a command. ``what``: its help text, where it is another."""
    folder = "Folder of clips or images with their captions, or a dataset.toml."
    usual = folder if required else f"Also check this data against the plan's shapes: {folder[0].lower()}{folder[1:]}"
    options = [
        click.option(
            "--data",
            required=required,
            metavar="DIR|FILE",
            help=what or usual,
        ),
        click.option("--trigger", metavar="TEXT", help="Put in front of every caption."),
        click.option("--caption", metavar="TEXT", help="One caption for all files."),
        click.option(
            "--repeats", type=click.IntRange(1, 10**5), metavar="N", help="Times each sample comes in one epoch."
        ),
        click.option(
            "--frame-sampling",
            type=click.Choice(choices(DataSource, "frames")),
            help="Which frames of a video are used: its first ones, spread evenly, from random places (as many as "
            "--repeats says), or all in consecutive clips.  [default: first]",
        ),
        click.option(
            "--fps",
            type=click.FloatRange(0, 1000),
            metavar="X",
            help="Frames per second to sample at; 0: every frame.  [default: the model's rate]",
        ),
        click.option("--flip", is_flag=True, help="Also train each sample mirrored."),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def typed_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a folder that were typed, by field of `DataSource`."""
    typed = {name: options[name] for name in SETTINGS if options[name] not in (None, False)}
    return {"frames" if name == "frame_sampling" else name: value for name, value in typed.items()}
