from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import VplanError, nearest, quoted
from planner.units import (
    GIB,
    MAX_BYTES,
    MIB,
    format_gib,
    format_seconds,
    gib,
    parse_bytes,
    parse_count,
    plural,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("23.5GiB", 25_232_932_864),
        ("24GB", 24 * 10**9),
        ("80000MiB", 80_000 * MIB),
        ("512MB", 512 * 10**6),
        (" 64 gib ", 64 * GIB),
        ("1TiB", 2**40),
        ("0.3GiB", 322_122_547),
        ("0GiB", 0),
        ("7b", 7),
    ],
)
def test_sizes_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("24XB", "'24XB' has an unknown unit"),
        ("24", "has no unit"),
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("1.2.3GiB", "is not a size"),
        ("nanGiB", "is not a finite number"),
        ("infGB", "is not a finite number"),
        ("-inf GB", "is not a finite number"),
        ("-1GiB", "is negative"),
        ("2000000TiB", "more than any machine has"),
        ("1e300TiB", "more than any machine has"),
        ("1e999GiB", "is not a finite number"),
        ("9" * 5000 + "GiB", "is not a size"),
        ("٣GiB", "is not a size"),
    ],
)
def test_bad_sizes_are_refused_in_one_line_with_the_fix(text: str, fault: str) -> None:
    with pytest.raises(VplanError) as caught:
        parse_bytes(text, "--host-ram")
    assert fault in str(caught.value)
    assert "--host-ram" in str(caught.value)
    assert "23.5GiB" in caught.value.fix
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@given(st.integers(0, MAX_BYTES))
def test_bytes_round_trip_exactly(size_bytes: int) -> None:
    assert parse_bytes(f"{size_bytes}B") == size_bytes


@given(st.integers(0, 2**45))
def test_shown_gib_read_back_is_the_same_to_the_digits_shown(size_bytes: int) -> None:
    assert abs(parse_bytes(format_gib(size_bytes)) - size_bytes) <= 0.0501 * GIB


@given(st.text(max_size=60))
def test_any_text_is_a_size_or_a_vplan_error(text: str) -> None:
    try:
        assert 0 <= parse_bytes(text) <= MAX_BYTES
    except VplanError as error:
        assert "\n" not in str(error)


def test_gib_is_binary() -> None:
    assert gib(GIB * 3 // 2) == 1.5
    assert format_gib(25_232_932_864) == "23.5 GiB"
    assert format_gib(300 * MIB) == "0.29 GiB"
    assert format_gib(GIB - 1) == "1.0 GiB"


def test_counts() -> None:
    assert parse_count("81", "--frames") == 81
    assert parse_count("0", "--swap-blocks", at_least=0) == 0
    for text in ("0", "-4", "nan", "8.5", "1000000000000", "", "81f", "1e3", "9" * 5000):
        with pytest.raises(VplanError, match="--frames"):
            parse_count(text, "--frames", at_most=10_000)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4249, "0.42 s"), (12.34, "12.3 s"), (99.96, "1 min 40 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_an_error_says_fault_and_fix_in_one_line() -> None:
    error = VplanError("frames 80 is not 4n+1", "write 77 or 81")
    assert str(error) == "frames 80 is not 4n+1; write 77 or 81"
    assert (error.message, error.fix, error.exit_code) == ("frames 80 is not 4n+1", "write 77 or 81", 1)
    assert str(VplanError("no GPU")) == "no GPU"
    assert isinstance(error, ValueError)


def test_the_nearest_names() -> None:
    assert nearest("RTX4091", ["rtx4090", "h100"]) == ["rtx4090"]
    assert nearest("zzz", ["rtx4090"]) == []
    assert nearest("x" * 1_000_000, ["rtx4090"]) == []
    assert quoted("a\nb" * 100).count("\n") == 0
    assert len(quoted("x" * 10_000)) == 60


def test_a_count_has_its_noun_in_the_right_number() -> None:
    assert [plural(count, "block") for count in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]


@pytest.mark.parametrize(("text", "fix"), [("32GBs", "did you mean 32GB?"), ("1.5parsec", "write a number with a unit"),
                                           ("24 GIBI", "did you mean 24GiB?")])  # fmt: skip
def test_a_unit_that_is_mistyped_has_the_nearest(text: str, fix: str) -> None:
    with pytest.raises(VplanError, match="has an unknown unit") as caught:
        parse_bytes(text)
    assert caught.value.fix.startswith(fix)
