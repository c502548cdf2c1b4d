"""A few of the kept answers; `python -m tests.golden.check` asks all of them."""

from __future__ import annotations

import pytest

from tests.golden.check import differences, read, without_prose
from tests.golden.questions import ask, questions

SAMPLE = (
    "estimate/flux.1-dev",
    "estimate/weights-fp8",
    "estimate/zero-2-offloaded",
    "estimate/as-latentsync",
    "estimate/contradiction",
    "estimate/text-sample",
    "suggest/wan2.1-t2v-1.3b",
    "suggest/full-2",
    "check/latentsync",
    "check/sdxl",
    "check/oom-ranks",
    "export/musubi-tuner-a14b",
    "gpus/all",
)
ALL = {question.name: question for question in questions()}


@pytest.mark.parametrize("name", SAMPLE)
def test_the_answer_is_as_it_was(name: str) -> None:
    found = list(differences(name, read(ALL[name].verb)[name], ask(ALL[name])))
    assert not found, "\n".join(found)


def test_every_question_has_a_kept_answer() -> None:
    assert len(ALL) == len(questions())  # no name twice
    assert {name for verb in {question.verb for question in ALL.values()} for name in read(verb)} == set(ALL)


def test_a_new_wording_is_told_from_a_change() -> None:
    said = {"exit": 0, "json": {"why": "it is 2 GiB short", "peak": 3, "change": ["--swap-blocks 4"]}}
    reworded = {**said, "json": {**said["json"], "why": "2 GiB are missing"}}
    other_number = {**said, "json": {**said["json"], "peak": 4}}
    other_flag = {**said, "json": {**said["json"], "change": ["--swap-blocks 5"]}}
    assert list(differences("one", said, reworded)) and not list(differences("one", said, reworded, prose=True))
    assert all(list(differences("one", said, other, prose=True)) for other in (other_number, other_flag))
    page = {"exit": 0, "text": ["needs 21.9 GiB of 23.5", "--vae-tiling"]}
    assert without_prose(page)["text"] == ["21.9", "23.5", "--vae-tiling"]
