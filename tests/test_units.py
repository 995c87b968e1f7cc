from __future__ import annotations

import pytest

from narrowband.units import format_bytes, format_count, format_rate, format_seconds


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
