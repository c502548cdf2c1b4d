"""Tests of the rules by which tests choose cases."""

from __future__ import annotations

import itertools

from tests.covering import covering, in_turns


def test_every_case_of_the_product_has_one_value_of_the_last_list_and_neighbours_have_others() -> None:
    models, methods, dtypes = ["a", "b", "c"], ["lora", "full"], [16, 32]
    cases = in_turns(models, methods, dtypes)
    assert [case[:2] for case in cases] == list(itertools.product(models, methods))
    assert {case[1:] for case in cases} == set(itertools.product(methods, dtypes))
    assert {(model, dtype) for model, _, dtype in cases} == set(itertools.product(models, dtypes))


def test_cases_that_are_left_have_every_fact_and_none_could_be_left_out() -> None:
    words = ["ab", "bc", "abc", "cd", "d"]
    left = covering(words, lambda word: word)
    assert left == ["abc", "cd"]
    assert covering(["a", "a", "b"], lambda word: word) == ["a", "b"]
    assert covering([], lambda word: word) == []
