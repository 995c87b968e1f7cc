"""Format claims for pages: a table per topic, each claim with its figures and its verdict.

What all claims of a table share, such as units and seeds, is said once above the table. Records call the rows without
compression *dense*; pages call them *uncompressed*.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from reproduce.groups import NOTHING, Claim

__all__ = ["plain", "table_lines", "tables", "under"]

_VERDICTS = (
    "A claim *held* or did *not hold* where the figures say so beyond the noise, or where something was counted. It is "
    "*not resolved* where the noise is too large to say. Differences are of pairs of one seed where nothing else is "
    "said, ± half of their 95 % interval."
)
_SEEDS = re.compile(r" \((seeds? \d+(?:, \d+)*)\)")
#: Figures with two rows and their difference. Pages put the difference first, because it is what readers look for.
_SCORE = r"-?\d+\.\d\d|diverged|did not arrive"
_COMPARED = re.compile(
    rf"(.+) ({_SCORE}), (.+) ({_SCORE}): ([+-]\d[\d.]*(?: %)?(?: ± [\d.]+(?: %)?)?|diverged|did not arrive)"
    r"(, of unknown noise)?(?: \((.+)\))?"
)
_PAPER = "the paper: "


def plain(text: str) -> str:
    """Replace the records' word "dense" by "uncompressed".

    Example:
        >>> plain("dense, shorter")
        'uncompressed, shorter'
    """
    return re.sub(r"\bdense\b", "uncompressed", text)


def under(topic: str, claims: Iterable[Claim], *, cut: str = "", case: str = "") -> list[Claim]:
    """Put claims under a heading of a page, in one table.

    Args:
        topic: the table's heading.
        claims: in the table's order.
        cut: prefix to remove from the texts of claims, since topic and case say the same.
        case: what the claims were tested with, where the topic has claims tested with something else.
    """
    return [replace(claim, topic=topic, case=case, said=claim.said or claim.text.removeprefix(cut)) for claim in claims]


def tables(claims: Sequence[Claim]) -> list[str]:
    """Return a page's lines: a table for each topic, then tables of the claims about how rows were made comparable."""
    lines = [_VERDICTS, ""]
    own = [claim for claim in claims if not claim.setup]
    for topic in dict.fromkeys(claim.topic for claim in own):
        lines += [f"### {topic}", ""] if topic else []
        lines += _table([claim for claim in own if claim.topic == topic])
    setup = [claim for claim in claims if claim.setup]
    for topic in dict.fromkeys(claim.topic for claim in setup):
        lines += [f"### {topic or 'How rows were made comparable'}", ""]
        lines += _table([claim for claim in setup if claim.topic == topic], "not counted above")
    return lines


def table_lines(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> list[str]:
    """Return the lines of a Markdown table; with ``numbers``, all columns but the first are aligned to the right."""
    lines = [
        f"| {' | '.join(heads)} |",
        f"| --- |{(' ---: |' if numbers else ' --- |') * (len(heads) - 1)}",
    ]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


@dataclass(frozen=True)
class _Figures:
    """The figures of a claim: what was found here, clause by clause, and what the paper reports."""

    parts: tuple[str, ...]
    paper: str


def _figures(claim: Claim) -> _Figures:
    if claim.verdict() == "not tested":
        return _Figures((claim.found or claim.figures,), "")
    own, _, paper = (claim.found or claim.figures).partition(_PAPER)
    return _Figures(tuple(own.rstrip("; ").split("; ")), paper)


def _table(claims: Sequence[Claim], first: str = "") -> list[str]:
    figures = {id(claim): _figures(claim) for claim in claims}
    tested = [figures[id(claim)].parts for claim in claims if claim.verdict() != "not tested"]
    shared = _shared(tested) if len(tested) > 1 else []
    seeds = Counter(said for parts in tested for part in parts for said in _SEEDS.findall(part))
    usual = max(seeds, key=seeds.__getitem__) if len(tested) > 1 and seeds else ""
    compared = [match for parts in tested for part in parts if (match := _COMPARED.fullmatch(part))]
    others = {*seeds, *(match[7] for match in compared)} - {usual}
    often = f"{usual} where nothing else is said" if usual and others else usual
    above = "; ".join(part for part in (first, *map(plain, shared), often) if part)

    def found(claim: Claim) -> str:
        own = figures[id(claim)]
        parts = [part.replace(f" ({usual})", "") if usual else part for part in own.parts if not _says(part, shared)]
        return _cell("<br>".join(map(_turned, parts)))

    lines = [f"{above[0].upper()}{above[1:]}.", ""] if above else []
    cases = list(dict.fromkeys(claim.case for claim in claims if claim.case))
    if len(cases) > 1:
        rows: dict[str, dict[str, Claim]] = {}
        for claim in claims:
            rows.setdefault(claim.said or claim.text, {})[claim.case] = claim
        heads = ["claimed", *(head for case in cases for head in (f"found: {case}", "verdict"))]
        cells = [
            [_claimed(said), *(cell for case in cases for cell in _judged(own.get(case), found))]
            for said, own in rows.items()
        ]
        return lines + table_lines(heads, cells, numbers=False)
    papers = any(own.paper for own in figures.values())
    heads = ["claimed", "found", *(["in the paper"] if papers else []), "verdict"]
    cells = []
    for claim in claims:
        paper = [_cell(figures[id(claim)].paper.replace("; ", "<br>")) or NOTHING] if papers else []
        cells.append([_claimed(claim.said or claim.text), found(claim) or NOTHING, *paper, _verdict(claim)])
    return lines + table_lines(heads, cells, numbers=False)


def _shared(clauses: Sequence[Sequence[str]]) -> list[str]:
    """Return the clauses that all claims have, exactly or continued after a comma."""
    every = dict.fromkeys(itertools.chain.from_iterable(clauses))
    found = [each for each in every if all(any(_says(part, [each]) for part in parts) for parts in clauses)]
    return [each for each in found if not _says(each, [other for other in found if other != each])]


def _says(part: str, others: Iterable[str]) -> bool:
    return any(part == other or part.startswith(f"{other}, ") for other in others)


def _judged(claim: Claim | None, found: Callable[[Claim], str]) -> tuple[str, str]:
    return (NOTHING, NOTHING) if claim is None else (found(claim) or NOTHING, _verdict(claim))


def _verdict(claim: Claim) -> str:
    verdict = claim.verdict()
    return f"**{verdict}**" if verdict in ("held", "not held") else verdict


def _claimed(text: str) -> str:
    return _cell(re.sub(r"\bdense\b(?! perplexity)", "uncompressed training", text))


def _turned(part: str) -> str:
    """Put the difference of a comparison in front of the two scores."""
    match = _COMPARED.fullmatch(part)
    if not match:
        return part
    one, score, other, its, apart, noise, of = match.groups(default="")
    return f"{apart}{noise} ({one}: {score}, {other}: {its}{of and f'; {of}'})"


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", plain(text))
