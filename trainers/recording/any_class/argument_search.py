"""Finds what a model's `forward` is called with: candidates by name and docstring, decided by dry runs.

What the user said stands. A required argument without a candidate that runs, and a width that no layer asked for, are
reported as missing: nothing is guessed from nothing. An optional argument is given where the model cannot do without,
where its pipeline gives it, or where weights would stay idle otherwise.
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
"""Tries of one more argument."""
MATTERS = re.compile(r".*rotary.*|.*mask.*|(img|image|txt|text|position)_ids|guidance")
"""Optional arguments that change what a step keeps without any weight of their own: not left out in silence."""
ABSENT = "none"
"""What a user writes for an argument that is not given."""


class MissingArgument(NamedTuple):
    """An argument that could not be found out, why, and how it might be written."""

    name: str
    why: str
    example: Any


@dataclass
class FoundArguments:
    """Arguments that run, what the model returned for them, and where each comes from."""

    forward: dict[str, Any]
    output: Any
    grid: Mapping[str, int]
    sources: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """optional arguments that are not given, though the model's class or its pipeline knows them"""

    idle: set[str] = field(default_factory=set)
    varies: list[str] = field(default_factory=list)
    """sizes that the model loops over, so that it does something else at each"""


class ArgumentSearch:
    """One search over the arguments of a model's `forward`."""

    def __init__(self, model: FakeModel, question: ClassFacts) -> None:
        self.model = model
        self.question = question
        signature = inspect.signature(type(model.model).forward)
        plain = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = [entry for entry in signature.parameters.values() if entry.kind not in plain]
        self.parameters = {entry.name: entry for entry in parameters if entry.name != "self"}
        self.doc = inspect.cleandoc(type(model.model).forward.__doc__ or "")
        self.grid = {**GRID, **({"F": 1} if question.one_frame else {}), BLOCKS: question.blocks}
        self.runs = 0
        self.last = ""
        """how the combination that came furthest failed, for messages"""

        self.missing: list[MissingArgument] = []
        self._furthest = (-1, -1)
        self._progress = (0, 0)
        self._absent = {name for name, tree in question.given.items() if tree == ABSENT}
        self._unused = itertools.cycle(PLACEHOLDERS)
        passed = question.pipeline.passed if question.pipeline else {}
        self._decided_off = {name for name, key in passed.items() if key and not question.config.get(key)}

    @property
    def main(self) -> str | None:
        """The argument that holds the noisy latents."""
        return next((name for name in MAIN if name in self.parameters), None)

    def find(self) -> FoundArguments | list[MissingArgument]:
        """Arguments that run, or what is missing."""
        names = [name for name, entry in self.parameters.items() if entry.default is inspect.Parameter.empty]
        given = [name for name in self.parameters if name in self.question.given and name not in self._absent]
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
        """A combination that runs, one argument changed at a time: what comes further before it fails is kept.

        Noise levels are changed together, as a model that takes one per frame takes all so; and all that lies like the
        latents.
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
        """One combination, and how far it came: modules called and tensors made before it failed."""
        table, owners = _numbered({name: options[name][index] for name, index in chosen.items()}, self._unused)
        self._progress = (0, 0)
        return self._solved(table, owners), self._progress

    def _options(self, name: str) -> list[Any]:
        if name in self.question.given:
            return [self.question.given[name]]
        entry = self.parameters[name]
        if name == self.main or (self.main and candidates.LIKE_LATENTS.fullmatch(name)):
            return self._layouts(self.parameters[self.main])
        if IGNORED.fullmatch(name):
            return []
        found = candidates.candidates(name, entry, self.doc, self.question)
        options = list(found)
        annotation = str(entry.annotation).lower()
        if "list" in annotation and "dict" not in annotation:
            rows = [option for option in options if isinstance(option, str) and option.startswith("B ")]
            listed = [{SAMPLES: option[2:]} for option in rows]
            options = [*listed, *options] if "|" not in annotation else [*options, *listed]
        return options

    def _layouts(self, entry: inspect.Parameter) -> list[Any]:
        """Layouts of the latents, those of the docstring first."""
        known: list[Any] = list(candidates.layouts(self.question.patch, self.question.one_frame))
        said = candidates.from_words(candidates.documented(self.doc, entry.name), entry.name, self.question.patch)
        if "list" in str(entry.annotation).lower():
            known = [{SAMPLES: layout[2:]} for layout in known if layout.startswith("B ")]
        ordered = sorted(known, key=lambda layout: layout != said)
        if said and said not in known and "F" in said and self.question.one_frame:
            ordered.insert(0, said)
        return ordered

    def _solved(self, table: dict[str, Any], owners: dict[int, str]) -> FoundArguments | None:
        """One combination with its widths found, one complaint after another, and with the optional arguments that it
        does not run without; None where it leads nowhere."""
        while self.runs < MOST_RUNS:
            self.runs += 1
            outcome = self.model.call(table, self.grid)
            self._progress = max(self._progress, (len(self.model.called), self.model.allocations))
            if not isinstance(outcome, Complaint):
                if owners:
                    why = "any width runs, so that none can be told"
                    self._note([MissingArgument(name, why, self._example(name)) for name in set(owners.values())])
                    return None
                sources = {name: "given" if name in self.question.given else "found" for name in table}
                return FoundArguments(table, outcome, self.grid, sources)
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
        """What `learned` reads from a complaint; groups of channels say no width, and the config has the latents'."""
        channels = self.question.config.get("in_channels")
        mine = next((number for number, name in owners.items() if name == self.main), None)
        if "num_groups" in error and mine is not None and isinstance(channels, int):
            yield mine, channels
        yield from likely_widths(error, set(owners))

    def _of_table(self, table: dict[str, Any], error: str) -> dict[str, Any] | None:
        """The arguments at the number of text tokens, or of frames, that a table of positions holds: where the config
        has it and a size is off by as many. Such a model takes no other."""
        numbers = {value for value in self.question.config.values() if type(value) is int}
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
        """Where two arguments of unknown width are joined along it (the latents once or twice): the split at which the
        model's output is as wide as its latents. Their width is taken to be a number of the config."""
        mine = [number for number, name in owners.items() if name == self.main]
        others = [number for number in owners if number not in mine]
        sums = {times * number + other: number for number in mine for other in others for times in (1, 2)}
        for wrong, right in mismatched(error):
            if wrong not in sums:
                continue
            numbers = {value for value in self.question.config.values() if type(value) is int and 1 < value < right}
            for width in sorted(numbers):
                less = {number: name for number, name in owners.items() if number != sums[wrong]}
                found = self._solved(_replaced(table, str(sums[wrong]), str(width)), less)
                if found and self._is_as_wide(found):
                    return found
        return None

    def _is_as_wide(self, found: FoundArguments) -> bool:
        """Whether the model's output has the shape of its latents."""
        latents = found.forward[self.main] if self.main else None
        shape = tuple(next(tensors_in(found.output)).shape)
        return isinstance(latents, str) and parse_argument(latents, "latents").shape(self.grid) == shape

    def _note(self, missing: list[MissingArgument], complaint: str = "") -> None:
        """Keeps what the combination that came furthest ended with."""
        if self._progress > self._furthest:
            self._furthest, self.missing, self.last = self._progress, missing, complaint

    def _completed(self, answer: FoundArguments) -> FoundArguments | list[MissingArgument]:
        """With the optional arguments that the pipeline gives, and those without which weights stay idle."""
        passed = self.question.pipeline.passed if self.question.pipeline else {}
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
        # Three times: twice as many tokens could be a multiple of 8, at which masks are no longer copied.
        more = {letter: self._allocations(answer, {letter: 3 * answer.grid[letter]}) for letter in sizes}
        # The call that is kept is the last one, so that `called` is of it.
        usual = self._allocations(answer, {})
        other = [letter for letter, count in more.items() if count not in (0, usual)]
        # Some keep tables of positions for the shapes they have seen: only what is more once more is a loop.
        again = {letter: self._allocations(answer, {letter: 3 * answer.grid[letter]}) for letter in other}
        if other:
            usual = self._allocations(answer, {})
        answer.varies = [letter for letter, count in again.items() if count not in (0, usual)]
        return answer

    def _allocations(self, answer: FoundArguments, other: Mapping[str, int]) -> int:
        """How many allocations a call makes at a shape; 0 where it does not run there. A model that makes more at
        another size loops over it."""
        outcome = self.model.call(answer.forward, {**answer.grid, **other})
        return 0 if isinstance(outcome, Complaint) else self.model.allocations

    def _with_one_more(self, answer: FoundArguments, name: str) -> FoundArguments | None:
        self.runs = MOST_RUNS - MORE_RUNS
        for option in self._options(name):
            more, unknown = _numbered({name: option}, self._unused)
            if tried := self._solved({**answer.forward, **more}, unknown):
                tried.sources = {**answer.sources, name: "found"}
                return tried
        return None

    def _example(self, name: str) -> Any:
        """How an argument might be written: its first candidate with a number for what is not known."""
        if name in self.question.given:
            return self.question.given[name]
        usual = "B T ones" if "mask" in name else "B T 4096"
        option = next(iter(self._options(name)), usual) if name in self.parameters else usual
        return _replaced(option, "?", "16" if name == self.main else "1024")


def _numbered(table: Mapping[str, Any], unused: Iterator[int]) -> tuple[dict[str, Any], dict[int, str]]:
    """The table with a placeholder for each `?`, and whose argument each is."""
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
