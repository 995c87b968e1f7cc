from __future__ import annotations

import math

import numpy as np
import pytest

from narrowband.units import (
    NOTHING,
    counted,
    format_bytes,
    format_count,
    format_loss,
    format_or_dash,
    format_rate,
    format_seconds,
    whole_number,
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(999), "999 B"),
        (format_bytes(999.9), "1 kB"),  # never "1e+03 B"
        (format_bytes(53_068_800), "53.1 MB"),
        (format_bytes(5e15), "5e+03 TB"),  # beyond the last unit
        (format_count(3_307_008), "3.31 M"),
        (format_count(12), "12"),
        (counted(0, "step"), "0 steps"),
        (counted(1, "step"), "1 step"),
        (counted(2, "step"), "2 steps"),
        (counted(1, "step is", "steps are"), "1 step is"),
        (counted(2, "step is", "steps are"), "2 steps are"),
        (format_rate(200e6), "200 Mbit/s"),
        (format_rate(10e9), "10 Gbit/s"),
        (format_seconds(0.0), "0 s"),
        (format_seconds(3.2e-5), "32 µs"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(75), "75 s"),
        (format_seconds(200), "3 min 20 s"),
    ],
)
def test_numbers_as_people_read_them(said, expected):
    assert said == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [format_bytes, format_count, format_rate, format_seconds])
def test_what_is_no_number_is_a_dash(form, value):
    assert form(value) == NOTHING


def test_what_was_not_measured_is_a_dash():
    assert [format_or_dash("{:.1f}".format, value) for value in (2.0, None, math.nan, math.inf)] == [
        "2.0",
        *[NOTHING] * 3,
    ]


def test_a_loss_that_is_no_number_has_diverged():
    assert [format_loss(loss) for loss in (2.4294, None, math.nan, math.inf)] == ["2.429", *["diverged"] * 3]
    assert format_loss(2.4294, digits=1) == "2.4"


def test_whole_numbers_are_pythons_own():
    assert type(whole_number("seed", np.int64(3))) is int
    with pytest.raises(TypeError, match=r"seed=1.5 is not a whole number"):
        whole_number("seed", 1.5)
