"""The guide to DGC says how many more elements fit where values are shorter: its figures, computed again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import narrowband as nb

PAGE = (Path(__file__).parent.parent.parent / "docs/how-to/dgc.md").read_text()


@pytest.mark.parametrize("numel", [1_000_000, 13_300_000, 64_000_000])
def test_shorter_values_take_the_bytes_that_the_page_says(numel):
    said = re.search(
        r"a density of ([\d.]+) % in 16 bits, or\s([\d.]+) % in 8, takes what ([\d.]+) % takes in 32", PAGE
    )
    forms = zip(said.groups(), (",values=fp16", ",values=int8", ""), strict=True)
    in_16, in_8, in_32 = (
        nb.compression(f"dgc:density={float(percent) / 100}{form}").codec.payload_nbytes(numel)
        for percent, form in forms
    )
    assert in_16 == pytest.approx(in_32, rel=0.002)
    assert in_8 == pytest.approx(in_32, rel=0.002)
