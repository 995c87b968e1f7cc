"""What the page about trainers says of versions and tests is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "how-to" / "trainers.md").read_text()

#: Rows of its tables, by cells.
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("package", ["accelerate", "lightning", "transformers"])
def test_ci_runs_the_versions_that_the_page_says(package):
    (row,) = [row for row in ROWS if len(row) == 5 and f"integrations.{package}" in row[1]]
    (pinned,) = re.findall(rf"^{package}==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert row[3] == pinned


def test_nobody_says_that_ci_runs_ray():
    assert "ray" not in re.findall(r"^(\w+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "Ray is in no extra and not in CI" in PAGE


def test_every_test_that_the_page_names_is_there():
    proofs = [row for row in ROWS if len(row) == 4 and "test_" in row[1]]
    assert [row[0] for row in proofs] == ["Accelerate", "Lightning", "Fabric", "Transformers", "Ray Train"]
    for row in proofs:
        (file,) = re.findall(r"`(test_\w+\.py)`", row[1])
        written = (ROOT / "tests" / "integrations" / file).read_text()
        names = re.findall(r"`(test_\w+)`", row[2] + row[3])
        assert names
        assert all(f"def {name}(" in written for name in names)
