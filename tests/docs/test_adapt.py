"""The guide to adaptive compression says what its records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/how-to/adapt.md").read_text()


def saved(name):
    """Row of a record and number of ranks → how many times fewer bytes a rank sends."""
    rows = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]
    return {(row["name"], row["ranks"]): row["times_fewer"] for row in rows if "ranks" in row}


def test_the_table_of_bytes_is_that_of_the_record():
    record = saved("adapt")
    lines = re.findall(r"^\| `([^`]+)` ((?:\| [\d.]+ × ){5})\|$", PAGE, re.MULTILINE)
    assert len(lines) == 4
    for reference, told in lines:
        same, *mixed = [cell.strip() for cell in told.strip("| ").split("|")]
        assert same == f"{record[reference, 4]:.1f} ×"
        assert mixed == [f"{record[f'mixed, at {reference}', ranks]:.1f} ×" for ranks in (4, 8, 16, 32)]


def test_what_low_rank_saves_at_other_ranks_is_that_of_the_record():
    record = saved("adapt-lowrank")
    eight, most = (record[f"powersgd:rank={rank}", 4] for rank in (8, 32))
    assert f"it is {eight:.1f} times at rank 8, and {most:.1f} at rank 32" in PAGE
