"""What the rows of :mod:`reproduce.fidelity` come to: claims, tables and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from narrowband.units import format_bytes
from reproduce.claims import under
from reproduce.fidelity_errors import BETWEEN, KINDS, MIXED, Fidelity, of_blocks
from reproduce.groups import Claim, claimed
from reproduce.pairs import Finding, difference, every
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Legend, Opening, write_results
from reproduce.tasks import in_words

__all__ = ["claims", "layout_of", "page", "titles_of", "trained_as"]

#: Bits → noise that they may add, as a share of the variance between batches. 0.01 is as if a batch had a hundredth
#: fewer samples, which nobody would notice. 1.0 is as if it had half as many, which people choose on purpose.
_ADDED = {8: 0.01, 4: 1.0}

# ---- claims ----------------------------------------------------------------------------------------------------------


def claims(found: Sequence[Fidelity]) -> list[Claim]:
    """Judge the claims by these rows."""
    said = []
    for task in dict.fromkeys(row.task for row in found):
        own = list(_of_task(task, [row for row in found if row.task == task]))
        noise = [claim for claim in own if "noise between batches" in claim.text]
        others = [claim for claim in own if claim not in noise]
        for topic, claims_ in ((_NOISE, noise), (_SETTINGS_OF, others)):
            cut = [
                replace(claim, said=claim.text.removeprefix(f"{task}: ").partition(", with any other")[0])
                for claim in claims_
            ]
            said += under(topic, cut, case=_SHOWN[task])
    return said


#: Headings of the page's tables of claims.
_NOISE = "Beside the noise between batches"
_SETTINGS_OF = "One setting beside another, with all others the same"


def _of_task(task: str, rows: Sequence[Fidelity]) -> Iterator[Claim]:
    by_name = {row.name: row for row in rows}
    for name, what, most in (
        ("8 bits, head, stochastic", "8 bits per head, stochastic,", _ADDED[8]),
        (f"{MIXED}, 8 bits", "8 bits under bfloat16, the arithmetic's own error included,", _ADDED[8]),
        ("4 bits, head, stochastic", "4 bits per head, stochastic,", _ADDED[4]),
        ("4 bits, norms 8", "4 bits, with layer norms in 8, per head, stochastic,", _ADDED[4]),
    ):
        row, yardstick = by_name[name], by_name[BETWEEN]
        noise = _all(yardstick.error) ** 2 / 2
        bound = dict.fromkeys(range(len(row.per_batch["error"])), most)
        added = {at: square / noise for at, square in enumerate(row.per_batch["error"])}
        finding = difference(added, bound, names=(name, "the bound"), higher_is_better=False)
        yield claimed(
            f"{task}: {what} add at most {most:.0%} to the noise between batches",
            Finding(finding.no_worse().held),
            f"{_percent(cast('float', row.added))}{_plus_minus(finding.margin)}, an error of "
            f"{_percent(_all(row.error))}",
        )
    told: dict[tuple[Any, ...], Fidelity] = {
        (row.bits, row.granularity, row.rounding): row for row in rows if row.bits and not (row.norms or row.amp)
    }
    for text, axis, better, worse, of in _COMPARED:
        pairs = []
        for key, row in told.items():
            other = told.get((*key[:axis], worse, *key[axis + 1 :]))
            if key[axis] == better and other is not None:
                pairs.append(_paired(row, other, of, f"{key[0]} bits, {key[3 - axis]}"))
        yield claimed(f"{task}: {text}, with any other setting", every(pairs))


def _paired(row: Fidelity, other: Fidelity, of: str, where: str) -> Finding:
    """Judge, batch by batch, whether a figure of one row is no larger than that of another."""
    own, to = (dict(enumerate(each.per_batch[of])) for each in (row, other))
    held = difference(own, to, names=(row.name, other.name), higher_is_better=False).no_worse().held
    figures = " and ".join(_percent(_all(getattr(each, of))) for each in (row, other))
    return Finding(held, (f"{where}: {figures}{'' if held else ', not resolved' if held is None else ', not held'}",))


def _plus_minus(margin: float | None) -> str:
    return "" if margin is None else f" ± {_percent(margin)}"


#: Text of a claim; the index in (bits, what has a range, rounding) at which two policies differ; the better value and
#: the worse; and the figure that is compared.
_COMPARED: tuple[tuple[str, int, str, str, str], ...] = (
    ("a range per head errs no more than one per layer", 1, "head", "layer", "error"),
    ("a range per channel errs no more than one per head", 1, "channel", "head", "error"),
    ("a range per head errs no more than one per 256 neighbours", 1, "head", "256", "error"),
    ("stochastic rounding has less bias than nearest", 2, "stochastic", "nearest", "bias"),
    ("stochastic leaves less over batches than nearest", 2, "stochastic", "nearest", "over_batches"),
    ("nearest errs less in a single step than stochastic", 2, "nearest", "stochastic", "error"),
)


def _all(shares: dict[str, float | None]) -> float:
    """Return the share for the whole gradient, which is never None."""
    return cast("float", shares["all"])


# ---- tables ----------------------------------------------------------------------------------------------------------

#: Smaller shares are not distinguished.
_LEAST = 1e-4

_LEGEND: Legend = (
    ("all figures", "shares of the exact gradient's norm, root mean squares over batches; 0%: none that could be seen"),
    ("error", "of a single gradient; per kind of layer and per block, too"),
    ("noise", "the variance that it adds to that between batches"),
    ("bias", "of a batch's mean over roundings"),
    ("left", "what is left of it over batches and roundings"),
    ("kept", "of a batch's activations, for backward; share: of what is kept plain"),
    ("another batch", "the first row is the distance between the gradients of two batches, the yardstick"),
    ("norms 8", "per head, stochastic, with layer norms in 8 bits"),
    ("channel", "a range per channel, but per head of attention's operands"),
    ("256", "a range per 256 neighbours in memory, as in compiled graphs"),
    ("bf16", "under bfloat16 autocast, with nothing compressed, and per head, stochastic"),
)


def _percent(share: float | None, digits: int = 3) -> str:
    """Format a share in percent, short enough for tables; large shares as multiples."""
    if share is None:
        return "–"
    if 0 < share < _LEAST:
        return f"<{_LEAST:.2%}"
    return f"{100 * share:.{digits}g}%" if share < 0.995 else f"{share:.0%}" if share < 10 else f"{share:.0f}×"


def _kept_share(row: Fidelity) -> float | None:
    return None if row.kept_bytes is None or row.plain_bytes is None else row.kept_bytes / row.plain_bytes


_NAME: Column = ("row", lambda row: row.name)
_WHOLE: tuple[Column, ...] = (
    _NAME,
    ("kept", lambda row: "–" if row.kept_bytes is None else format_bytes(row.kept_bytes)),
    ("share", lambda row: _percent(_kept_share(row))),
    ("error", lambda row: _percent(row.error["all"])),
    ("noise", lambda row: _percent(row.added)),
    ("bias", lambda row: _percent(row.bias.get("all"))),
    ("left", lambda row: _percent(row.over_batches.get("all"))),
)


def _errors(places: Iterable[str]) -> tuple[Column, ...]:
    def column(place: str) -> Column:
        return place.removeprefix("block "), lambda row: _percent(row.error[place], 2)

    return _NAME, *map(column, places)


def layout_of(found: Sequence[Fidelity], trained: Mapping[str, str]) -> Layout:
    """Lay out three tables per model: the whole gradient, kinds of layers, blocks.

    Args:
        found: all rows.
        trained: title of a model's first table → how the model was trained, and how often it was measured.
    """
    columns: dict[str, tuple[Column, ...]] = {}
    for row in found:
        columns |= {
            row.task: _WHOLE,
            f"{row.task} kinds": _errors(KINDS),
            f"{row.task} blocks": _errors(of_blocks(row.error)),
        }
    return Layout(
        tables=lambda rows: ((key, [row for row in rows if row.task == key.split()[0]]) for key in columns),
        columns=columns.__getitem__,
        legend=_LEGEND,
        caption=lambda title, _: f"{title}: {trained[title]}" if title in trained else title,
        notes=lambda _: (),
    )


def titles_of(title: str, task: str) -> dict[str, str]:
    """Return the titles of a model's three tables, by key."""
    return {
        task: title,
        f"{task} kinds": f"{title}: error per kind of layer",
        f"{task} blocks": f"{title}: error per block",
    }


_PAPER = "After Pan et al. 2021, Mesa (arXiv 2111.11124), section 3.2; the figures are not the paper's"

#: Task → its name in the picture; and the picture's bars: label, row.
_SHOWN = {"gpt": "GPT", "vit": "Vision transformer"}
_BARS = (
    ("another batch", BETWEEN),
    ("8 bits", "8 bits, head, stochastic"),
    ("4 bits, norms 8", "4 bits, norms 8"),
    ("4 bits", "4 bits, head, stochastic"),
    ("2 bits", "2 bits, head, stochastic"),
)


def _row(found: Sequence[Fidelity], task: str, name: str) -> Fidelity:
    row = next((row for row in found if (row.task, row.name) == (task, name)), None)
    if row is None:
        raise LookupError(f"needs the row {name} of task {task}")
    return row


def _found(found: Sequence[Fidelity]) -> str:
    def said(name: str) -> str:
        return " and ".join(_percent(_all(_row(found, task, name).error)) for task in _SHOWN)

    between, eight, normed, four, two = (said(name) for _, name in _BARS)
    return (
        f"With 8 bits the gradients of GPT and vision transformer are off by {eight}, and with 4 bits, layer norms in "
        f"8, by {normed}. With 4 bits of everything it is {four}, and with 2 bits {two}. The gradient of another batch "
        f"differs by {between}."
    )


def _panels(found: Sequence[Fidelity]) -> list[Panel]:
    return [
        Panel(
            title,
            "error of gradients; less is better",
            [
                Bar(label, _all(row.error), _percent(_all(row.error)), name != BETWEEN)
                for label, name in _BARS[:-1]  # the last bar is so long that the others would look alike
                for row in [_row(found, task, name)]
            ],
        )
        for task, title in _SHOWN.items()
    ]


_OPENING = Opening(
    title="Gradients of activations in few bits",
    says="How far are gradients from the exact ones if activations are kept in few bits? That should be much less than "
    "the gradients of two batches differ anyway.",
    ran="A vision transformer learned CIFAR-10, and a GPT bytes of WikiText-2, for 200 steps. Then the same gradients "
    "were computed exactly, and with activations kept in 8, 4 and 2 bits.",
    found=_found,
    panels=_panels,
)


def trained_as(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the argument ``trained`` of :func:`_layout`. The depth of a ResNet is given as 0: no task here has one."""
    times = f"{record['batches']} batches, {record['roundings']} roundings"
    return {
        setting["title"]: "; ".join(
            (
                record["trained"][setting["task"]],
                "after the warm-up the rate stays, and no gradient is clipped",
                *(f"{what}: {said.partition(' (')[0]}" for what, said in in_words(setting["task"], 0).items()),
                times,
            )
        )
        for setting in record["settings"]
    }


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of results from a record, the content of ``summary.json``."""
    rows = [Fidelity(**row) for row in record["rows"]]
    settings = record["settings"]
    titles: dict[str, str] = {}
    for setting in settings:
        titles |= titles_of(setting["title"], setting["task"])
    layout = layout_of(rows, trained_as(record))
    write_results(
        path,
        rows,
        titles,
        claims(rows) if record["claims"] else [],
        layout,
        opening=_OPENING,
        paper=_PAPER,
        record=record,
        commits=[str(record["commit"])],
    )
