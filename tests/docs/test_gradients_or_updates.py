"""The page that says which to send has the figures of the record."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_losses_are_those_of_the_record():
    page = (ROOT / "docs/explanation/gradients-or-updates.md").read_text()
    record = json.loads((ROOT / "reproduce/results/local/summary.json").read_text())
    groups = {group["name"]: group for group in record["groups"] if group["task"] == "shakespeare"}
    names = ["dense", "gradients, top 1%", "updates, top 1%", "every 15, DiLoCo", "every 15, top 1/64, 2 bits"]
    found = re.findall(r"^\| (?:gradients|updates)[^|]* \| ([\d,]+) × \| ([\d.]+) \| ([^|]+) \|$", page, re.M)
    assert len(found) == len(names)
    dense = math.log(groups["dense"]["mean"])
    for name, (payload, loss, above) in zip(names, found, strict=True):
        own = math.log(groups[name]["mean"])
        assert int(payload.replace(",", "")) == round(groups[name]["payload_ratio"])
        assert float(loss) == pytest.approx(own, abs=5e-4)
        assert above.strip() == ("–" if name == "dense" else f"{100 * (own / dense - 1):+.1f} %")
