"""Losses between stages that the README and the guide tell are those of the record."""

from __future__ import annotations

import json
import math
from pathlib import Path

from reproduce import groups

ROOT = Path(__file__).parent.parent.parent


def test_losses_between_stages_are_those_of_the_record():
    record = json.loads((ROOT / "reproduce/results/model_parallel/summary.json").read_text())
    found = groups.groups(record["rows"])
    dense = groups.needed(found, "gpt", "dense")
    readme = " ".join((ROOT / "README.md").read_text().split())
    guide = (ROOT / "docs/how-to/pipeline.md").read_text()
    for name, in_readme, in_guide, digits in (
        ("8 bits", "{} with 8 bits both ways", "| 8 bits both ways | {} |", 2),
        ("8 bits, gradients 4", "by {} with 8 forward and 4 back", "| 8 bits forward, `qsgd:bits=4` back | {} |", 2),
        ("4 bits", "by {} with 4 both ways (seven epochs, three seeds", "| 4 bits both ways | {} |", 1),
    ):
        own = groups.needed(found, "gpt", name)
        loss = groups.compared(own, dense, relative=True, of=math.log)
        assert list(loss.seeds) == [0, 1, 2]
        said = f"{100 * loss.mean:.{digits}f} ± {100 * loss.margin:.{digits}f} %"
        assert in_readme.format(said) in readme
        perplexity = groups.compared(own, dense)
        assert in_guide.format(f"{perplexity.mean:.2f} ± {perplexity.margin:.2f}") in guide
    rotated = groups.needed(found, "gpt", "8 bits, gradients 2 rotated")
    loss, perplexity = groups.compared(rotated, dense, relative=True, of=math.log), groups.compared(rotated, dense)
    assert list(loss.seeds) == [0, 1, 2]
    assert f"by {100 * loss.mean:.1f} ± {100 * loss.margin:.1f} %" in guide
    row = f"| 8 bits forward, `eden:bits=2` back | {perplexity.mean:.2f} ± {perplexity.margin:.2f} |"
    assert row in guide
