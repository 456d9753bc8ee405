"""Numbers, sizes and durations read well and never lie."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from web.format import (
    format_bytes,
    format_compact,
    format_duration,
    format_percent,
    format_value,
    joined,
    plural,
    shortened,
    visible,
)

UNITS = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5, "EiB": 6}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (655_360, "640 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (44_560_000_000, "41.5 GiB"),
        (64 << 30, "64.0 GiB"),
        (2**64, "16.0 EiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes(value: int, text: str) -> None:
    assert format_bytes(value) == text


@given(st.integers(0, 2**63))
def test_a_size_is_right_to_its_last_digit(value: int) -> None:
    number, unit = format_bytes(value).split()
    digits = len(number.partition(".")[2])
    shown = float(number) * 1024 ** UNITS[unit]
    assert abs(shown - value) <= 0.51 * 10**-digits * 1024 ** UNITS[unit]
    assert len(number) <= 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00 k"),
        (4_120, "4.12 k"),
        (301_989_888, "302 M"),
        (1_236_990_336, "1.24 G"),
    ],
)
def test_compact_numbers(value: float, text: str) -> None:
    assert format_compact(value) == text


@given(st.integers(0, 10**9), st.integers(1, 10**9))
def test_a_share_is_shown_as_nothing_or_everything_only_if_it_is(part: int, whole: int) -> None:
    part = min(part, whole)
    text = format_percent(part, whole)
    assert (text == "0 %") == (part == 0)
    assert (text == "100 %") == (part == whole)


def test_a_share_of_nothing_is_no_number() -> None:
    assert not re.search(r"\d", format_percent(0, 0))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0004, "< 1 ms"),
        (0.02, "20 ms"),
        (0.44, "0.4 s"),
        (9.9, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (412_331, "4 d 18 h"),
        (-3.2, "-3.2 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("seconds", [None, float("inf"), float("nan")])
def test_no_duration_is_no_number(seconds: float | None) -> None:
    assert not re.search(r"\d", format_duration(seconds))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "(absent)"),
        ("", '""'),
        ("float32", "float32"),
        (True, "true"),
        ([1, 2], "[1, 2]"),
        (b"x", "\"b'x'\""),
    ],
)
def test_field_values(value: object, text: str) -> None:
    assert format_value(value) == text


@given(st.text())
def test_nothing_unseen_is_left(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]", shown)


@given(st.text(), st.integers(10, 200))
def test_shortened_text_keeps_both_ends(text: str, limit: int) -> None:
    short = shortened(text, limit)
    assert len(short) <= limit
    assert short == text or (short[:2] == text[:2] and short[-2:] == text[-2:])


def test_words() -> None:
    assert [plural(1, "engine"), plural(2, "engine"), plural(0, "query", "queries")] == [
        "1 engine",
        "2 engines",
        "0 queries",
    ]
    assert [joined([]), joined(["a"]), joined(["a", "b"]), joined(["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
