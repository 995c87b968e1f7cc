"""Write the page of predicted and measured step times, from records of ``narrowband bench plan``.

The first record is that of gradients, with one rank on each machine. Those of rounds and of two levels have sections of
their own, as far as they exist. Nothing is measured here; ``benchmarks/README.md`` has the commands.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowband.bench.foretold import MARGIN
from narrowband.bench.models import MODELS
from narrowband.planning import DDP, Cluster, Link
from narrowband.units import format_seconds
from reproduce.claims import under
from reproduce.groups import NOTHING, Claim, claimed
from reproduce.pictures import Bar, Panel
from reproduce.report import Opening, beginning, source, write_page

__all__ = ["claims", "page", "record"]

_RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

#: The other records, by the headings of their sections.
_FURTHER = {
    "Rounds of updates, asymmetric links": "plan-rounds.json",
    "Several ranks in a machine": "plan-levels.json",
    "Several micro-batches in a step": "plan-accumulate.json",
}

#: Largest allowed error of predictions: of the median, and of each.
_MEDIAN, _WORST = 0.10, 0.25

Rows = Sequence[Mapping[str, Any]]


def record(results: Path = _RESULTS) -> dict[str, Any]:
    """Return the record of what was predicted and measured, with the other records that exist under ``further``.

    Args:
        results: folder of the records.
    """
    found: dict[str, Any] = json.loads((results / "plan.json").read_text())
    paths = {title: results / name for title, name in _FURTHER.items()}
    further = {title: json.loads(path.read_text()) for title, path in paths.items() if path.exists()}
    return found | {"further": further}


def _off(rows: Rows, key: str = "error") -> list[float]:
    """Return the errors of predictions as shares of the measured values, in ascending order."""
    return sorted(abs(row[key]) for row in rows if row[key] is not None)


def _cases(rows: Rows) -> dict[tuple[int, str], Rows]:
    """Group rows by number of ranks and rate."""
    cases = dict.fromkeys((row["nodes"], row["rate"]) for row in rows)
    return {case: [row for row in rows if (row["nodes"], row["rate"]) == case] for case in cases}


def _link(rate: str) -> str:
    return str(Link.of(rate))


def _who(found: Mapping[str, Any], nodes: int) -> str:
    return str(Cluster(nodes, found["config"].get("per_node", 1)))


def claims(found: Mapping[str, Any]) -> Iterator[Claim]:
    """Yield the claims about predictions, and whether they held: of each record, under its heading."""
    yield from _claims(found)
    for title, each in found["further"].items():
        yield from under(title, _claims(each))


def _claims(found: Mapping[str, Any]) -> Iterator[Claim]:
    off = _off(found["rows"])
    median, worst = statistics.median(off), max(found["rows"], key=lambda row: abs(row["error"] or 0.0))
    yield claimed(
        f"predicted steps are off by at most {_MEDIAN:.0%} in the median", median <= _MEDIAN,
        f"{median:.1%} over {len(off)} steps",
    )  # fmt: skip
    yield claimed(
        f"no predicted step is off by more than {_WORST:.0%}", off[-1] <= _WORST,
        f"{off[-1]:.1%} of {_name(worst['codec'])} on {_who(found, worst['nodes'])} at {_link(worst['rate'])}; "
        f"{sum(each > _WORST for each in off)} of {len(off)} are farther off than {_WORST:.0%}",
    )  # fmt: skip
    sides = [
        (f"{_name(side['codec'])} on {_who(found, verdict['nodes'])} at {_link(verdict['rate'])}", side["is_right"])
        for verdict in found["verdicts"]
        for side in verdict["sides"]
        if side["is_right"] is not None
    ]
    wrong = [where for where, is_right in sides if not is_right]
    yield claimed(
        f"what is over {MARGIN:.0%} faster or slower than DDP as it is, is predicted to be on that side of it",
        not wrong, "; ".join([f"{len(sides) - len(wrong)} of {len(sides)} steps", *(f"not {each}" for each in wrong)]),
    )  # fmt: skip
    right = [verdict["slower_by"] for verdict in found["verdicts"] if verdict["is_right"]]
    farthest = max(verdict["slower_by"] for verdict in found["verdicts"])
    yield claimed(
        f"the step that is predicted to be the shortest is at most {MARGIN:.0%} longer than the shortest",
        len(right) == len(found["verdicts"]),
        f"{len(right)} of {len(found['verdicts'])} cases; at most {farthest:.1%} longer",
    )  # fmt: skip


def _conclusion(found: Mapping[str, Any]) -> str:
    off, then = _off(found["rows"]), _off(found["rows"], "at_that_speed_error")
    short = sum((row["error"] or 0.0) < 0.0 for row in found["rows"])
    further = "".join(
        f" {title}: off by {statistics.median(own):.1%} in the median and {own[-1]:.1%} at most."
        for title, own in ((title, _off(each["rows"])) for title, each in found["further"].items())
    )
    return (
        f"Predicted steps are off by {statistics.median(off):.1%} in the median and {off[-1]:.1%} at most, {short} of "
        f"{len(off)} too short. Where the processor is taken to be as fast as it was when the step was measured, it is "
        f"{statistics.median(then):.1%} and {then[-1]:.1%}.{further}"
    )


def _panels(found: Mapping[str, Any]) -> list[Panel]:
    cases = {
        f"{_who(found, nodes)}, {_link(rate)}": _off(rows) for (nodes, rate), rows in _cases(found["rows"]).items()
    }
    return [
        Panel(title, "of the measured step; less is better", [Bar(name, off, f"{off:.1%}") for name, off in bars])
        for title, bars in (
            ("Predictions off by, median", [(name, statistics.median(off)) for name, off in cases.items()]),
            ("Predictions off by, at most", [(name, off[-1]) for name, off in cases.items()]),
        )
    ]


def _ran(found: Mapping[str, Any]) -> str:
    nodes = list(dict.fromkeys(row["nodes"] for row in found["rows"]))
    who = " and ".join([*map(str, nodes[:-1]), _who(found, nodes[-1])])
    *others, last = [_link(rate) for rate in dict.fromkeys(row["rate"] for row in found["rows"])]
    rates = f"{', '.join(others)} or {last}" if others else last
    numel = MODELS[found["config"]["model"]].numel()
    micro_batches = found["config"].get("accumulate", 1)
    each_step = f" A step has {micro_batches} micro-batches, and is averaged once." if micro_batches > 1 else ""
    return (
        f"`narrowband bench plan` trained a GPT of {numel / 1e6:.1f} million parameters on {who}, each behind a link "
        f"of its own of {rates} that the kernel shapes. All share one machine with two cores.{each_step}"
    )


_OPENING = Opening(
    title="Predicted and measured steps",
    says="Does `narrowband plan` know what pays on a link, without training there? It measures a model, codecs and a "
    "machine, and simulates a step of training with every codec.",
    ran=_ran,
    found=_conclusion,
    panels=_panels,
)


def _percent(error: float | None) -> str:
    return NOTHING if error is None else f"{error:+.1%}"


def _case(rows: Rows, verdict: Mapping[str, Any]) -> Iterator[str]:
    yield "| codec | predicted | measured | off by | at that speed |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for row in sorted(rows, key=lambda row: row["measured_step_s"] or 0.0):
        name = _name(row["codec"])
        measured = NOTHING if row["measured_step_s"] is None else format_seconds(row["measured_step_s"])
        errors = map(_percent, (row["error"], row["at_that_speed_error"]))
        yield f"| {' | '.join((name, format_seconds(row['predicted_step_s']), measured, *errors))} |"
    yield ""
    best, said = (_name(verdict[key]) for key in ("measured_best", "predicted_best"))
    if best == said:
        yield f"The shortest step was that of {best}, as predicted."
    else:
        yield f"The shortest step was that of {best}. That of {said} was predicted, {verdict['slower_by']:.1%} longer."
    yield ""


def _name(codec: str) -> str:
    if codec == DDP:
        return "DDP as it is"
    return re.sub(r"^(updates(?: every \d+)?, )?(.+?)(, two levels)?$", r"\1`\2`\3", codec)


def _section(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a record's rows: those whose prediction is far off, and then all."""
    far = [row for row in found["rows"] if abs(row["error"] or 0.0) > _WORST]
    if far:
        yield f"Farther off than {_WORST:.0%}:"
        yield ""
        for row in sorted(far, key=lambda row: -abs(row["error"])):
            where = f"{_who(found, row['nodes'])}, {_link(row['rate'])}"
            yield f"- {_name(row['codec'])}, {where}: {_percent(row['error'])}"
        yield ""
    verdicts = {(verdict["nodes"], verdict["rate"]): verdict for verdict in found["verdicts"]}
    for (nodes, rate), rows in _cases(found["rows"]).items():
        yield f"### {_who(found, nodes)}, {_link(rate)}"
        yield ""
        yield from _case(rows, verdicts[nodes, rate])


def page(found: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record.

    Args:
        found: see :func:`record`.
        path: where to write the page.
    """
    held = list(claims(found))
    lines = [
        *beginning(found, held, _OPENING, paper="Records of `narrowband bench plan`", page=path.stem),
        "## Steps",
        "",
        (
            "Predicted: by `narrowband plan`, from what the same ranks measured before they trained. Off by: how far "
            "that is from the measured step. At that speed: the same, where the processor is taken to be as fast as it "
            "was when the step was measured; a shared machine is faster in one minute than in the next. Rows stand in "
            "the order of measured steps. Ranks share two cores, so what a codec computes costs more time here than on "
            "machines of their own."
        ),
        "",
    ]
    lines += _section(found)
    for title, each in found["further"].items():
        lines += [f"## {title}", "", _ran(each), "", *_section(each)]
    lines += ["## Source", ""]
    for each in (found, *found["further"].values()):
        lines += [source(dict(each), [str(each["commit"])]), ""]
    write_page(path, lambda _: "\n".join(lines).rstrip() + "\n", found, _OPENING)
