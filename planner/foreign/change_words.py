"""A change of a command in the trainer's own words, and what it costs."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

from planner.dialects.base.bindings import (
    EDIT,
    Binding,
    Fields,
    FunctionPair,
    InexpressibleError,
    Settings,
    Value,
    is_edit,
)
from planner.dialects.base.dialect import Move
from planner.foreign.case import Case

Costs = Mapping[tuple[str, ...], str]
"""What each option of a change costs, by how it is typed."""

SLOWER = "slower, and "
LAUNCHER = "accelerate launch"


def costs_of(moves: Sequence[Move], words: Sequence[tuple[str, ...]], faster: bool = False) -> Costs:
    """What each of several changes costs; what is free is not told of beside what is not. ``faster``: that the step is,
    so that none of them is called slower."""
    costs = {typed: move.cost for move, typed in zip(moves, words, strict=True) if move.cost}
    told = {typed: cost for typed, cost in costs.items() if cost != "free"} or costs
    return {typed: cost.removeprefix(SLOWER) if faster else cost for typed, cost in told.items()}


def cost_words(costs: Costs, several: bool) -> str:
    """The costs of a change in one line, each with its option where there are ``several``."""
    if not several or set(costs.values()) == {"free"}:
        return next(iter(costs.values()), "")
    return "; ".join(f"{' '.join(typed)} ({cost})" for typed, cost in costs.items())


def move_words(case: Case, other: Case, move: Move) -> Iterator[str]:
    """One entry: what the move's own bindings write anew, and what goes with it."""
    if move.words_for is not None:
        settings = move.words_for(case.invocation.settings)
    elif move.words_after is not None:
        settings = move.words_after(other.fields)
    else:
        settings = list(changed_words(case, other.fields, frozenset(move.changes)))
    if words := [*settings, *move.words]:
        yield _as_typed(words, case.dialect.assigns)


def _as_typed(words: Sequence[str], assigns: str) -> str:
    """The words of one change, ready to paste: flags behind each other, each key of a config on a line of its own. The
    script stands between the launcher's flags and its own."""
    text = words[0]
    for before, word in itertools.pairwise(words):
        keys = not word.startswith("-") and assigns in word, not before.startswith("-") and assigns in before
        text += ("\n" if any(keys) else " ... " if before.startswith(LAUNCHER) else " ") + word
    return text


def changed_words(case: Case, after: Fields, fields: frozenset[str]) -> Iterator[str]:
    """The flags that the bindings of these fields write differently after a change, as they are typed; the launcher's
    flags come last."""
    old: Settings = {}
    new: Settings = {}
    left_out: list[str] = []
    for binding in case.dialect.bindings:
        if not fields & set(binding.fields):
            continue
        in_place = _in_place(case, binding, after)
        if in_place is not None:
            new |= in_place
            continue
        before: Settings = {}
        with contextlib.suppress(InexpressibleError):  # what it is now has no word: it came about by itself
            before = binding.to_settings(case.fields)
        behind = binding.to_settings(after)
        if behind and behind.items() < before.items():  # as checkpoints that were in host RAM
            left_out += before.keys() - behind.keys()
        old |= before
        new |= behind
        if isinstance(binding, Value) and binding.setting in old and binding.setting not in new:
            new[binding.setting] = binding.write(after[binding.field])  # the trainer's default, where another is typed
    typed = {
        name: _typed(_where(name, case.invocation.settings), value, case.dialect.assigns)
        for name, value in new.items()
        if old.get(name) != value and case.invocation.settings.get(_where(name, case.invocation.settings)) != value
    }
    launcher = [words for name, words in typed.items() if name.startswith("launch:")]
    if launcher:
        yield " ".join([LAUNCHER, *launcher])
    yield from (words for name, words in typed.items() if not name.startswith("launch:"))
    for name in old if not new else left_out:  # else what is said now stands for what was said
        yield f"without {name.rpartition(':')[2]}"


def _in_place(case: Case, binding: Binding, after: Fields) -> Settings | None:
    """What a binding changes of what can be said in several places at once, each where it is; None of any other."""
    if not isinstance(binding, FunctionPair) or binding.changed is None:
        return None
    return binding.changed(case.invocation.settings, case.fields, after)


FILES = ("config", "dataset")


def _where(name: str, settings: Settings) -> str:
    """The setting, or what its user has for that key: the same key of another table, or a flag."""
    file, _, path = name.partition(":")
    if name in settings or file not in FILES:
        return name
    key = path.rpartition(".")[2]
    tables = (own for own in settings if own.startswith(f"{file}:") and own.rpartition(".")[2] == key)
    return next(itertools.chain(tables, (own for own in (f"--{key}", f"--train_{key}") if own in settings)), name)


def _typed(name: str, value: object, assigns: str) -> str:
    """A setting as its user types it."""
    if name == "env:expandable_segments":
        return "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if is_edit(name):
        return name.removeprefix(EDIT)
    where, colon, key = name.rpartition(":")
    if where in FILES:
        return f"{key}{assigns}{json.dumps(value, ensure_ascii=False)}"
    words = [] if value is True else value if isinstance(value, list | tuple) else [value]
    return " ".join([key if colon else name, *map(str, words)])
