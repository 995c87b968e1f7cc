"""The claims of CSSGD's paper, judged by the rows of :mod:`reproduce.cssgd`.

Claims about times compare pairs of rows with the same seed, or stretches of two runs (:mod:`reproduce.cssgd_found`).
Bytes are counted exactly, so claims about bytes need no seeds.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from narrowband.lab import LabConfig
from narrowband.units import format_bytes, format_seconds
from reproduce.cssgd_found import (
    Count,
    Result,
    averaged,
    counts_of,
    less_time,
    methods_of,
    points_of,
    predicted_s,
    rows_in,
    scheme,
    sent_until,
    uneven_pairs,
)
from reproduce.cssgd_problem import (
    ALL_REDUCE,
    ALONE,
    ASGD,
    BASELINES,
    CHOSEN,
    FIGURES,
    MULTICAST,
    REDUNDANCIES,
    SAVED,
    TITLES,
    coded,
)
from reproduce.groups import Claim, claimed
from reproduce.pairs import Finding, difference, every

__all__ = ["claims"]

#: The best r on 8 nodes in the paper (figures 12 and 13).
_BEST = {"dnn": 3, "cnn": 2}
#: Pairs of nodes and redundancy that the claim about bytes covers, and the share by which bytes may miss equation 19.
_COUNTED = tuple((nodes, r) for nodes in range(2, 11) for r in range(1, 5) if r < nodes)
_WITHIN = 0.05
#: A batch's time is as predicted if it differs by at most this share of the prediction.
_AS_PREDICTED = 0.25
#: What claims about times compare.
_SECONDS = "seconds to the target; what is said of one run is of the first seed, as it was trained behind links"
#: The share by which uneven shares may change the bytes sent.
_AS_MANY = 0.01


def claims(results: Sequence[Result]) -> list[Claim]:
    """Judge the paper's claims, and what its scheme should do on such links, by these rows."""
    tasks = [task for task in TITLES if any(result["task"] == task for result in results)]
    judges = {
        _sooner: _TO_TARGET, _as_much_sooner: _TO_TARGET, _less_sent: _TO_TARGET, _sooner_on_average: _NODES,
        _sooner_everywhere: _NODES, _more_redundancy: _NODES, _best: _NODES, _predicted: _NODES,
        _plain_when_fast: _NODES, _best_weights: _TO_TARGET,
    }  # fmt: skip
    found = [
        replace(judge(results, task), topic=topic, case=TITLES[task])
        for task, (judge, topic) in itertools.product(tasks, judges.items())
    ]
    return [
        *map(_shortly, found),
        *(replace(claim, topic=_OTHERS) for claim in (_uneven(results), _counted_bytes(results))),
    ]


#: Headings of the page's tables.
_TO_TARGET, _NODES, _OTHERS = "Time and bytes to the target", "The redundancy, and the number of nodes", "Other claims"

#: Patterns of what a difference compares, and replacements in few words; the page's legend has the rest.
_OF = (
    (re.compile(r" \(one run each, \d+ \w+ between tests\)"), " (one run)"),
    (re.compile(r" \((seeds? [\d, ]+); [^)]*\)"), r" (\1)"),
    (re.compile(r" \(\d+ rounds? of timing\)"), " (rounds of one run)"),
)


def _shortly(claim: Claim) -> Claim:
    """Shorten a claim for its table: the heading already names the task."""
    said = claim.said or re.sub(rf"^{claim.case}(?:, figure \d+)?: ", "", claim.text)
    figures = (claim.found or claim.figures).replace(f"; {_SECONDS}", "")
    for pattern, words in _OF:
        figures = pattern.sub(words, figures)
    return replace(claim, said=said, found=figures.replace(CHOSEN, "CSSGD"))


def _needs(found: Mapping[str, Any], names: Sequence[str], text: str) -> Claim | None:
    if all(name in found for name in names):
        return None
    return Claim(text, None, f"needs the rows {'; '.join(names)}")


def _sooner(results: Sequence[Result], task: str) -> Claim:
    text = (
        f"{TITLES[task]}: on a link so slow that communication dominates, CSSGD at the r that the tool chooses is "
        "sooner at the target than SSGD by unicast, SSGD by multicast and ASGD"
    )
    methods = methods_of(results, task)
    lacks = _needs(methods, (CHOSEN, *BASELINES), text)
    if lacks:
        return lacks
    chosen = methods[CHOSEN]
    beside = [f"{name} {methods[name].time()}" for name in (ALL_REDUCE, ALONE) if name in methods]
    finding = every(less_time(chosen, methods[name], name).better() for name in BASELINES)
    more = f"{scheme(chosen.run)}; {_SECONDS}"
    claim = claimed(text, finding, more + (f"; beside them, ± of steps: {'; '.join(beside)}" if beside else ""))
    return replace(claim, found="; ".join(finding.figures))


def _as_much_sooner(results: Sequence[Result], task: str) -> Claim:
    of_ssgd, of_asgd = SAVED[task]
    text = (
        f"{TITLES[task]}: CSSGD at that r takes at least {of_ssgd} % less time than SSGD by multicast, and "
        f"{of_asgd} % less than ASGD"
    )
    methods = methods_of(results, task)
    lacks = _needs(methods, (CHOSEN, MULTICAST, ASGD), text)
    if lacks:
        return lacks
    own = methods[CHOSEN]
    least = {MULTICAST: of_ssgd, ASGD: of_asgd}
    found = every(less_time(own, methods[name], name).better(by / 100.0) for name, by in least.items())
    return _as_the_paper(claimed(text, found, _SECONDS), task)


def _as_the_paper(claim: Claim, task: str) -> Claim:
    """Word a claim the same for all tasks, though the number that it asks for differs from task to task."""
    where = "on average, over all numbers of nodes, " if "average" in claim.text else ""
    said = f"{where}CSSGD takes as much less time than SSGD by multicast, and than ASGD, as in the paper"
    asked = " and ".join(f"{saved} %" for saved in SAVED[task])
    return replace(claim, said=said, found=f"{claim.figures}; {asked} less in the paper")


def _less_sent(results: Sequence[Result], task: str) -> Claim:
    text = f"{TITLES[task]}: CSSGD, with r = 2 as with r = 3, sends less until then than SSGD by multicast"
    methods = methods_of(results, task)
    names = (MULTICAST, *map(coded, REDUNDANCIES))
    lacks = _needs(methods, names, text)
    if lacks:
        return lacks
    runs = {name: methods[name].run for name in names}
    nbytes = {name: run["reached"][2] if run["reached"] else math.inf for name, run in runs.items()}
    figures = "; ".join(f"{name} {sent_until(run)}" for name, run in runs.items())
    return Claim(text, all(nbytes[name] < nbytes[MULTICAST] for name in names[1:]), figures)


def _sooner_on_average(results: Sequence[Result], task: str) -> Claim:
    of_ssgd, of_asgd = SAVED[task]
    counts = counts_of(results, task)
    text = (
        f"{TITLES[task]}, figure {FIGURES[task]}: over all numbers of nodes CSSGD takes on average at least {of_ssgd} "
        f"% less time than SSGD by multicast, and {of_asgd} % less than ASGD"
    )
    try:
        found = [averaged(counts, name).better(by / 100.0) for name, by in ((MULTICAST, of_ssgd), (ASGD, of_asgd))]
    except LookupError as error:
        return Claim(text, None, str(error))
    return _as_the_paper(claimed(text, every(found), f"shares of the other's time, {_span(counts)}"), task)


def _span(counts: Sequence[Count]) -> str:
    return f"the mean over {', '.join(str(count.nodes) for count in counts)} nodes"


def _sooner_everywhere(results: Sequence[Result], task: str) -> Claim:
    text = f"{TITLES[task]}, figure {FIGURES[task]}: with 3 nodes and more, CSSGD is the soonest of the three"
    counts = [count for count in counts_of(results, task) if count.nodes >= 3]
    try:
        apart = {count.nodes: [count.less(name) for name in (MULTICAST, ASGD)] for count in counts}
    except LookupError as error:
        return Claim(text, None, str(error))
    if not apart:
        return Claim(text, None, "needs steps timed on several numbers of nodes, and counted")
    finding = every(one.better() for both in apart.values() for one in both)
    figures = (f"n = {nodes}: {' and '.join(one.figure() for one in both)}" for nodes, both in apart.items())
    claim = claimed(text, Finding(finding.held), f"{'; '.join(figures)}; against {MULTICAST} and {ASGD}")
    return replace(claim, found=claim.figures.replace(MULTICAST, f"{MULTICAST} (rounds of one run)"))


def _more_redundancy(results: Sequence[Result], task: str) -> Claim:
    text = f"{TITLES[task]}: with more nodes the best redundancy grows"
    chosen = {count.nodes: count.timed[CHOSEN]["choice"] for count in counts_of(results, task) if CHOSEN in count.timed}
    if len(chosen) < 2:
        return Claim(text, None, "needs what the tool chooses on several numbers of nodes")
    r = [choice["redundancy"] for choice in chosen.values()]
    figures = "; ".join(f"n = {n}: r = {c['redundancy']}, g = {c['group']}" for n, c in chosen.items())
    return Claim(text, r == sorted(r) and r[0] < r[-1], figures, found=f"r = {', '.join(map(str, r))}")


def _plain_when_fast(results: Sequence[Result], task: str) -> Claim:
    text = f"{TITLES[task]}: on a fast link the tool itself says r = 1"
    asked = rows_in(results, "choice", task)
    nodes = min((result["nodes"] for result in asked), default=0)
    fast = max(
        (r for r in asked if r["nodes"] == nodes),
        key=lambda r: LabConfig(rate=r["rate"]).links()[0].up.rate,
        default=None,
    )
    if fast is None or len({r["rate"] for r in asked}) < 2:
        return Claim(text, None, "needs rows of a slow and of a fast link")
    way = min(fast["choices"], key=lambda way: predicted_s(fast["choices"][way]))
    figures = "; ".join(
        f"{name}: r = {said['redundancy']}, {format_seconds(predicted_s(said))}"
        for name, said in fast["choices"].items()
    )
    chosen = fast["choices"][way]["redundancy"]
    said = f"with transport='auto' the tool chooses the faster, {way}, and so r = {chosen}"
    return Claim(text, chosen == 1, f"{fast['rate']}, {figures}; {said}")


def _best(results: Sequence[Result], task: str) -> Claim:
    text = f"{TITLES[task]}: of batches coded among all 8 nodes, and r = 1, that with r = {_BEST[task]} is shortest"
    points = [p for p in points_of(results, task) if p["n"] == 8 and (p["r"] == 1 or p["g"] == p["n"])]
    if not any(p["r"] == _BEST[task] for p in points) or len(points) < 2:
        return Claim(text, None, "needs rows of 8 nodes")
    best = min(points, key=lambda p: p["measured"])
    figures = "; ".join(f"r = {p['r']}: {format_seconds(p['measured'])}" for p in points)
    theirs = next(p for p in points if p["r"] == _BEST[task])
    took = f"{format_seconds(best['measured'])} with r = {best['r']}"
    said = "of batches coded among all 8 nodes, and r = 1, that is shortest which is in the paper"
    beside = f", {format_seconds(theirs['measured'])} with the paper's r = {_BEST[task]}"
    return Claim(
        text, best["r"] == _BEST[task], figures, said=said, found=f"{took}{beside if theirs is not best else ''}"
    )


def _predicted(results: Sequence[Result], task: str) -> Claim:
    text = (
        f"{TITLES[task]}: T(r) = r · T_compute + T_communicate · L(r) is within {_AS_PREDICTED:.0%} of what batches "
        "take"
    )
    points = [p for p in points_of(results, task) if "predicted" in p]
    if not points:
        return Claim(text, None, "needs rows of batches, and what the tool measured beside them")
    worst = max(points, key=lambda p: abs(p["measured"] / p["predicted"] - 1))
    off = worst["measured"] / worst["predicted"] - 1
    figures = f"at worst {off:+.0%}, with r = {worst['r']}, g = {worst['g']}"
    return Claim(text, abs(off) <= _AS_PREDICTED, figures)


def _best_weights(results: Sequence[Result], task: str) -> Claim:
    text = f"{TITLES[task]}: the weights with the least loss (line 8 of algorithm 1) are better than the last"
    rows = rows_in(results, "best", task)
    if not rows:
        return Claim(text, None, "needs rows of the best weights")
    kept, last = ({row["seed"]: row["curve"][-1][at] for row in rows} for at in (3, 2))
    apart = difference(kept, last, names=("kept", "last"), higher_is_better=True, dense=list(last.values()))
    return claimed(text, apart.better(), "test accuracy in percent")


def _uneven(results: Sequence[Result]) -> Claim:
    text = (
        "with a node of half the speed, shares to match change no bytes (by more than "
        f"{_AS_MANY:.0%}) and make every step shorter"
    )
    pairs = uneven_pairs(results)
    if not pairs:
        return Claim(text, None, "needs rows of equal and of uneven shares")
    held = all(
        abs(uneven["sent_bytes"] / equal["sent_bytes"] - 1) <= _AS_MANY
        and max(uneven["round_step_s"]) < min(equal["round_step_s"])
        for equal, uneven in pairs
    )
    figures = (
        f"r = {equal['redundancy']}: {format_seconds(equal['step_s'])} and {format_bytes(equal['sent_bytes'])} with "
        f"equal shares, {format_seconds(uneven['step_s'])} and {format_bytes(uneven['sent_bytes'])} with shares to "
        "match"
        for equal, uneven in pairs
    )
    return Claim(text, held, "; ".join(figures))


def _counted_bytes(results: Sequence[Result]) -> Claim:
    text = (
        f"bytes on the links are within {_WITHIN:.0%} of equation 19 plus stated headers, for 2 to 10 nodes and "
        "r = 1 to 4"
    )
    rows = {
        (row["nodes"], row["redundancy"]): row["link_bytes"] / row["stated_bytes"] - 1
        for row in rows_in(results, "bytes")
    }
    if not set(_COUNTED) <= set(rows):
        return Claim(text, None, "needs rows of all of these")
    (n, r), off = max(rows.items(), key=lambda item: abs(item[1]))
    return Claim(text, abs(off) <= _WITHIN, f"at worst {off:+.1%}, with n = {n}, r = {r}")
