"""Finds the arguments of a model's `forward`: candidates by name and docstring, tried in dry runs.

The user's descriptions are used as they are. A required argument without a candidate that runs, and a width that no
layer determines, are reported as missing, not guessed. An optional argument is passed if the model does not run without
it, if its pipeline passes it, or if weights would get no gradient otherwise.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from planner.catalog.forward_inputs import BLOCKS, SAMPLES, parse_argument
from trainers.recording.any_class import candidates
from trainers.recording.any_class.candidates import IGNORED, MAIN, ClassFacts
from trainers.recording.any_class.dry_run import (
    GRID,
    MOST_RUNS,
    PLACEHOLDERS,
    Complaint,
    FakeModel,
    likely_widths,
    mismatched,
)

MORE_RUNS = 30
"""Dry runs for one more optional argument."""
MATTERS = re.compile(r".*rotary.*|.*mask.*|(img|image|txt|text|position)_ids|guidance")
"""Optional arguments that affect a step's memory without having weights; they are not left out silently."""
ABSENT = "none"
"""The user's description of an argument that is not passed."""


class MissingArgument(NamedTuple):
    """An argument that could not be determined, why, and an example of its description."""

    name: str
    why: str
    example: Any


@dataclass
class FoundArguments:
    """Arguments that run, and the model's output for them."""

    forward: dict[str, Any]
    output: Any
    grid: Mapping[str, int]
    left_out: list[str] = field(default_factory=list)
    """optional arguments that are not passed"""

    idle: set[str] = field(default_factory=set)
    """parameters that get no gradient"""
    varies: list[str] = field(default_factory=list)
    """atoms that the model loops over, so that its operators depend on them"""


class ArgumentSearch:
    """One search over the arguments of a model's `forward`."""

    def __init__(self, model: FakeModel, facts: ClassFacts) -> None:
        self.model = model
        self.facts = facts
        signature = inspect.signature(type(model.model).forward)
        plain = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = [entry for entry in signature.parameters.values() if entry.kind not in plain]
        self.parameters = {entry.name: entry for entry in parameters if entry.name != "self"}
        self.doc = inspect.cleandoc(type(model.model).forward.__doc__ or "")
        self.grid = {**GRID, **({"F": 1} if facts.one_frame else {}), BLOCKS: facts.blocks}
        self.runs = 0
        self.last = ""
        """the error of the combination that got furthest, for messages"""

        self.missing: list[MissingArgument] = []
        self._furthest = (-1, -1)
        self._progress = (0, 0)
        self._absent = {name for name, tree in facts.given.items() if tree == ABSENT}
        self._unused = itertools.cycle(PLACEHOLDERS)
        passed = facts.pipeline.passed if facts.pipeline else {}
        self._decided_off = {name for name, key in passed.items() if key and not facts.config.get(key)}

    @property
    def main(self) -> str | None:
        """The argument that holds the noisy latents."""
        return next((name for name in MAIN if name in self.parameters), None)

    def find(self) -> FoundArguments | list[MissingArgument]:
        """Arguments that run, or what is missing."""
        names = [name for name, entry in self.parameters.items() if entry.default is inspect.Parameter.empty]
        given = [name for name in self.parameters if name in self.facts.given and name not in self._absent]
        names += [name for name in given if name not in names]
        if self.main is not None and self.main not in names:
            names.insert(0, self.main)
        ordered = sorted(names, key=lambda name: name == self.main)  # its layouts change fastest
        options = {name: self._options(name) for name in ordered}
        if none := [name for name in names if not options[name]]:
            return [MissingArgument(name, "its shape is said nowhere", self._example(name)) for name in none]
        if found := self._climbed(ordered, options):
            return self._completed(found)
        return self.missing or [
            MissingArgument(self.main or names[0], f"no candidate runs ({self.last})", self._example(names[0]))
        ]

    def _climbed(self, names: Sequence[str], options: Mapping[str, list[Any]]) -> FoundArguments | None:
        """A combination that runs, found by hill climbing: one argument is changed at a time, and the change that gets
        furthest before it fails is kept.

        All noise levels are changed together, because a model takes either all or none of them per frame; so are all
        arguments with the layout of the latents.
        """
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            alike = candidates.LEVEL.fullmatch(name) or candidates.LIKE_LATENTS.fullmatch(name) or name == self.main
            groups.setdefault(tuple(map(str, options[name])) if alike else (name,), []).append(name)
        chosen = dict.fromkeys(names, 0)
        found, best = self._tried(options, chosen)
        better = True
        while found is None and better and self.runs < MOST_RUNS:
            better = False
            for group in reversed(groups.values()):  # the latents first
                kept = chosen
                for index in range(len(options[group[0]])):
                    other = {**chosen, **dict.fromkeys(group, index)}
                    if other == kept or found is not None:
                        continue
                    found, progress = self._tried(options, other)
                    if progress > best:
                        kept, best, better = other, progress, True
                chosen = kept
        return found

    def _tried(
        self, options: Mapping[str, list[Any]], chosen: Mapping[str, int]
    ) -> tuple[FoundArguments | None, tuple[int, int]]:
        """Tries one combination. Also returns how far it got: (modules called, tensors made) before it failed."""
        table, owners = _numbered({name: options[name][index] for name, index in chosen.items()}, self._unused)
        self._progress = (0, 0)
        return self._solved(table, owners), self._progress

    def _options(self, name: str) -> list[Any]:
        if name in self.facts.given:
            return [self.facts.given[name]]
        entry = self.parameters[name]
        if name == self.main or (self.main and candidates.LIKE_LATENTS.fullmatch(name)):
            return self._layouts(self.parameters[self.main])
        if IGNORED.fullmatch(name):
            return []
        found = candidates.candidates(name, entry, self.doc, self.facts)
        options = list(found)
        annotation = str(entry.annotation).lower()
        if "list" in annotation and "dict" not in annotation:
            rows = [option for option in options if isinstance(option, str) and option.startswith("B ")]
            listed = [{SAMPLES: option[2:]} for option in rows]
            options = [*listed, *options] if "|" not in annotation else [*options, *listed]
        return options

    def _layouts(self, entry: inspect.Parameter) -> list[Any]:
        """The possible layouts of the latents, that of the docstring first."""
        known: list[Any] = list(candidates.layouts(self.facts.patch, self.facts.one_frame))
        said = candidates.from_words(candidates.documented(self.doc, entry.name), entry.name, self.facts.patch)
        if "list" in str(entry.annotation).lower():
            known = [{SAMPLES: layout[2:]} for layout in known if layout.startswith("B ")]
        ordered = sorted(known, key=lambda layout: layout != said)
        if said and said not in known and "F" in said and self.facts.one_frame:
            ordered.insert(0, said)
        return ordered

    def _solved(self, table: dict[str, Any], owners: dict[int, str]) -> FoundArguments | None:
        """Completes one combination: finds its widths, one error message after another, and adds the optional arguments
        that it does not run without. None if it does not run."""
        while self.runs < MOST_RUNS:
            self.runs += 1
            outcome = self.model.call(table, self.grid)
            self._progress = max(self._progress, (len(self.model.called), self.model.allocations))
            if not isinstance(outcome, Complaint):
                if owners:
                    why = "any width runs, so that none can be told"
                    self._note([MissingArgument(name, why, self._example(name)) for name in set(owners.values())])
                    return None
                return FoundArguments(table, outcome, self.grid)
            if step := next(iter(self._widths(outcome.error, owners)), None):
                placeholder, width = step
                table = _replaced(table, str(placeholder), str(width))
                owners = {number: name for number, name in owners.items() if number != placeholder}
                continue
            if (fixed := self._of_table(table, outcome.error)) is not None:
                table = fixed
                continue
            if found := self._joined(table, owners, outcome.error):
                return found
            absent = [name for name in outcome.missing if name in self.parameters and name not in table]
            refused = self._decided_off | self._absent
            wanted = [name for name in absent if not IGNORED.fullmatch(name) and name not in refused]
            if not wanted:
                self._note([], f"{outcome.kind}: {outcome.error[:110]}")
                return None
            why = "the model does not run without it"
            self._note([MissingArgument(name, why, self._example(name)) for name in wanted[:1]])
            for option in self._options(wanted[0]):
                more, unknown = _numbered({wanted[0]: option}, self._unused)
                if found := self._solved({**table, **more}, {**owners, **unknown}):
                    return found
            return None
        return None

    def _widths(self, error: str, owners: Mapping[int, str]) -> Iterator[tuple[int, int]]:
        """As `likely_widths`; an error about channel groups does not tell a width, so the latents' is the config's."""
        channels = self.facts.config.get("in_channels")
        mine = next((number for number, name in owners.items() if name == self.main), None)
        if "num_groups" in error and mine is not None and isinstance(channels, int):
            yield mine, channels
        yield from likely_widths(error, set(owners))

    def _of_table(self, table: dict[str, Any], error: str) -> dict[str, Any] | None:
        """The arguments with the number of text tokens or frames fixed to a number in the config, if the mismatch in
        the error message suggests that a table of positions has that length. None if it does not."""
        numbers = {value for value in self.facts.config.values() if type(value) is int}
        for letter in "TF":
            size = self.grid[letter]
            off = {left - right + size for left, right in mismatched(error)} if letter == "T" else set()
            off |= {right for left, right in mismatched(error) if left == size}
            for number in sorted(off & numbers - {size, 1}):
                fixed: dict[str, Any] = _replaced(table, letter, str(number))
                if fixed != table:
                    return fixed
        return None

    def _joined(self, table: dict[str, Any], owners: Mapping[int, str], error: str) -> FoundArguments | None:
        """Solves a combination in which two arguments of unknown width are concatenated (the latents once or twice):
        chooses the split at which the model's output has the shape of its latents. The latents' width must be a number
        in the config."""
        mine = [number for number, name in owners.items() if name == self.main]
        others = [number for number in owners if number not in mine]
        sums = {times * number + other: number for number in mine for other in others for times in (1, 2)}
        for wrong, right in mismatched(error):
            if wrong not in sums:
                continue
            numbers = {value for value in self.facts.config.values() if type(value) is int and 1 < value < right}
            for width in sorted(numbers):
                less = {number: name for number, name in owners.items() if number != sums[wrong]}
                found = self._solved(_replaced(table, str(sums[wrong]), str(width)), less)
                if found and self._is_as_wide(found):
                    return found
        return None

    def _is_as_wide(self, arguments: FoundArguments) -> bool:
        """Whether the model's output has the shape of its latents."""
        latents = arguments.forward[self.main] if self.main else None
        shape = tuple(next(tensors_in(arguments.output)).shape)
        return isinstance(latents, str) and parse_argument(latents, "latents").shape(self.grid) == shape

    def _note(self, missing: list[MissingArgument], complaint: str = "") -> None:
        """Keeps the failure of the combination that got furthest."""
        if self._progress > self._furthest:
            self._furthest, self.missing, self.last = self._progress, missing, complaint

    def _completed(self, answer: FoundArguments) -> FoundArguments | list[MissingArgument]:
        """Adds the optional arguments that the pipeline passes, and those without which weights get no gradient."""
        passed = self.facts.pipeline.passed if self.facts.pipeline else {}
        optional = [name for name in self.parameters if name not in answer.forward and not IGNORED.fullmatch(name)]
        optional = [name for name in optional if name not in self._decided_off | self._absent]
        for name in optional:
            if name not in passed:
                continue
            if tried := self._with_one_more(answer, name):
                answer = tried
            elif MATTERS.fullmatch(name):
                why = f"its pipeline passes it, and no candidate runs (or say {ABSENT!r})"
                return [MissingArgument(name, why, self._example(name))]
        idle = self.model.idle_parameters(answer.forward, answer.grid)
        if isinstance(idle, Complaint):
            return [MissingArgument("the loss", f"backward does not run ({idle.kind}: {idle.error[:110]})", "")]
        for name in optional:
            if not idle or name in answer.forward:
                continue
            tried = self._with_one_more(answer, name)
            if isinstance(tried, FoundArguments):
                less = self.model.idle_parameters(tried.forward, tried.grid)
                if not isinstance(less, Complaint) and less < idle:
                    answer, idle = tried, less
        answer.idle = idle
        answer.left_out = [name for name in optional if name not in answer.forward]
        sizes = [letter for letter in "BFHT" if answer.grid[letter] > 1]
        # Three times as many: twice as many tokens could be a multiple of 8, at which masks are not copied.
        more = {letter: self._allocations(answer, {letter: 3 * answer.grid[letter]}) for letter in sizes}
        # This call comes last, so that `self.model.called` is about the usual shape.
        usual = self._allocations(answer, {})
        other = [letter for letter, count in more.items() if count not in (0, usual)]
        # Some models cache tables of positions by shape: only if a repeated call makes more allocations is it a loop.
        again = {letter: self._allocations(answer, {letter: 3 * answer.grid[letter]}) for letter in other}
        if other:
            usual = self._allocations(answer, {})
        answer.varies = [letter for letter, count in again.items() if count not in (0, usual)]
        return answer

    def _allocations(self, answer: FoundArguments, other: Mapping[str, int]) -> int:
        """The number of allocations of a call with some atoms changed; 0 if it fails. A model that makes more
        allocations when an atom is larger loops over it."""
        outcome = self.model.call(answer.forward, {**answer.grid, **other})
        return 0 if isinstance(outcome, Complaint) else self.model.allocations

    def _with_one_more(self, answer: FoundArguments, name: str) -> FoundArguments | None:
        self.runs = MOST_RUNS - MORE_RUNS
        for option in self._options(name):
            more, unknown = _numbered({name: option}, self._unused)
            if tried := self._solved({**answer.forward, **more}, unknown):
                return tried
        return None

    def _example(self, name: str) -> Any:
        """An example of an argument's description: its first candidate, with a number in place of an unknown width."""
        if name in self.facts.given:
            return self.facts.given[name]
        usual = "B T ones" if "mask" in name else "B T 4096"
        option = next(iter(self._options(name)), usual) if name in self.parameters else usual
        return _replaced(option, "?", "16" if name == self.main else "1024")


def _numbered(table: Mapping[str, Any], unused: Iterator[int]) -> tuple[dict[str, Any], dict[int, str]]:
    """The table with a placeholder for each `?`, and the argument that each placeholder belongs to."""
    owners: dict[int, str] = {}

    def numbered(tree: Any, name: str) -> Any:
        if isinstance(tree, dict):
            return {key: numbered(inner, name) for key, inner in tree.items()}
        if isinstance(tree, list):
            return [numbered(inner, name) for inner in tree]
        words = []
        for word in tree.split():
            number = next(unused) if word == "?" else 0
            words.append(str(number) if number else word)
            if number:
                owners[number] = name
        return " ".join(words)

    return {name: numbered(tree, name) for name, tree in table.items()}, owners


def _replaced(tree: Any, old: str, new: str) -> Any:
    if isinstance(tree, dict):
        return {key: _replaced(inner, old, new) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [_replaced(inner, old, new) for inner in tree]
    return " ".join(new if word == old else word for word in tree.split())


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's first output."""
    first = output[0] if isinstance(output, tuple) else output
    yield from first if isinstance(first, list | tuple) else [first]
