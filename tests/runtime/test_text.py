"""Sizes, counts and times as text, and parsed from text."""

import pytest

from orbax_safetensors_layout.runtime import (
    count_text,
    number_text,
    parse_seconds,
    parse_size,
    seconds_text,
    size_text,
)


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 B"), (15_200_000, "15.2 MB"), (688_586_727_753, "689 GB")]
)
def test_a_size_is_in_decimal_units(size, text):
    assert size_text(size) == text


def test_counts_and_numbers_of_things():
    assert [count_text(count) for count in (999, 8_030_261_248)] == ["999", "8.03G"]
    assert [number_text(count, "file") for count in (1, 1200)] == ["1 file", "1,200 files"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1e-5, "10 us"),
        (0.0123, "12 ms"),
        (12.34, "12.3 s"),
        (754, "12 min 34 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_a_time_is_in_the_unit_that_fits_it(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5_000_000_000), ("2 GiB", 2 << 30), ("100", 100), ("100MB/s", 10**8)]
)
def test_a_size_is_parsed(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1e-5", 1e-5), ("10us", 1e-5)])
def test_a_time_is_parsed(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("parse", "text"), [(parse_size, "5 cups"), (parse_seconds, "soon")])
def test_what_is_neither_is_refused_with_an_example(parse, text):
    with pytest.raises(ValueError, match=f"'{text}' is not a .*write for instance"):
        parse(text)
