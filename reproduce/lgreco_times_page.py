"""Make claims, tables and the page of results from the rows of :mod:`reproduce.lgreco_times`."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowband.adapt import Times, fit_times
from narrowband.bench.models import MODELS
from narrowband.units import format_bytes, format_or_dash, format_seconds
from reproduce.claims import under
from reproduce.groups import NOTHING, Claim, claimed
from reproduce.lgreco_times_ranks import BETAS, BYTES, DENSE, PLANS, PRIORITY, SECONDS, UNIFORM, WEIGHT_DECAY
from reproduce.pairs import Difference, Finding, difference
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Legend, Opening, write_results

__all__ = ["LAYOUT", "PAPER", "TITLES", "Family", "Line", "Timed", "claims", "families", "lines", "page"]

PAPER = "Alimohammadi et al. 2022, L-GreCo (arXiv 2210.17357), sections 4 and 5.5, figure 11b; appendix A, figure 12"

#: Numbers for the paper's "near 1" and "near each other": the least R²; by how much R² may fall with a single price;
#: and the share of bytes in which two plans may differ.
_NEAR_ONE, _NEAR_EACH, _NEAR_PLAN = 0.9, 0.05, 0.1

#: A time that is longer by at most this share counts as no slower.
_SLOWER = 0.02


@dataclass(frozen=True)
class Timed:
    """Measurements of a plan, or of no compression; :func:`reproduce.lgreco_times_ranks.run` explains the fields."""

    specs: dict[str, str]
    error_of_reference: float
    bucket_nbytes: list[float]
    sent_bytes: float
    step_s: list[float]
    exchange_s: list[float]


@dataclass(frozen=True)
class Family:
    """What was measured for one reference.

    Attributes:
        reference: the reference, a spec.
        buckets: the layers of each bucket, in the order of sending.
        times: result of the regression.
        plans: name → measurements of a plan; includes the steps without compression.
    """

    reference: str
    buckets: list[list[str]]
    times: Times
    plans: dict[str, Timed]

    def prices(self) -> list[float]:
        """Return the seconds per byte of each bucket."""
        return [self.times.seconds_per_byte[names[0]] for names in self.buckets]

    def one_price(self) -> Times:
        """Repeat the regression with one price for all bytes."""
        return fit_times([["all"]], [[math.fsum(row)] for row in self.times.nbytes], self.times.seconds)

    def beside(self, one: str, other: str, what: str = "step_s") -> Difference:
        """Return how much longer one plan's steps or exchanges take than another's, as a share, round by round."""
        own, to = (dict(enumerate(getattr(self.plans[name], what))) for name in (one, other))
        return difference(own, to, names=(one, other), higher_is_better=False, relative=True)


def families(rows: Sequence[Mapping[str, Any]]) -> list[Family]:
    """Read the rows of a record."""
    found = []
    for row in rows:
        told = row["times"]
        samples = {"nbytes": tuple(map(tuple, told["nbytes"]))} | {
            key: tuple(told[key]) for key in ("seconds", "foretold_s")
        }
        plans = {name: Timed(**plan) for name, plan in row["plans"].items()}
        found.append(Family(row["reference"], row["buckets"], Times(**told | samples), plans))
    return found


# ---- claims ----------------------------------------------------------------------------------------------------------


def claims(found: Sequence[Family]) -> list[Claim]:
    """Judge the paper's claims."""
    return [
        claim
        for family in found
        for claim in under("", _claims(family), cut=f"{family.reference}: ", case=f"`{family.reference}`")
    ]


def _claims(family: Family) -> Iterator[Claim]:
    yield _foretold(family)
    yield _alike(family)
    yield _same_plan(family)
    yield _compared(
        family, "section 4: exchanges with the plan for seconds are no slower than with that for bytes", SECONDS, BYTES,
        "exchange_s", lambda apart: apart.no_worse(_SLOWER),
    )  # fmt: skip
    yield _compared(
        family, "section 5.5: steps with the plan for seconds are no slower than with that for bytes", SECONDS, BYTES,
        "step_s", lambda apart: apart.no_worse(_SLOWER),
    )  # fmt: skip
    yield _compared(
        family, "appendix A: steps with the priority of buckets are slower than with the plan for bytes", PRIORITY,
        BYTES, "step_s", Difference.worse,
    )  # fmt: skip
    yield _earlier(family)
    yield _compared(
        family, "at the same error, steps with the plan for bytes are faster than with the reference for all layers",
        BYTES, UNIFORM, "step_s", Difference.better,
    )  # fmt: skip


def _foretold(family: Family) -> Claim:
    """Judge whether R² is at least the bound: the mean squared error is at most 1 − bound of the variance."""
    times = family.times
    mean = statistics.fmean(times.seconds)
    off = [(second - mean) ** 2 for second in times.seconds]
    variance = statistics.fmean(off)
    bound = {sample: (1 - _NEAR_ONE) * own / variance for sample, own in enumerate(off)}
    apart = difference(_missed(times), bound, names=("missed", "bound"), higher_is_better=False)
    margin = "" if apart.margin is None else f" ± {apart.margin:.3f}"
    text = f"{family.reference}: section 5.5: bytes foretell how long an exchange takes: R² is at least {_NEAR_ONE:g}"
    figures = (
        f"{_r2(times)}{margin} on samples that were held out, {times.r2:.3f} on those that were fit; "
        f"{len(times.seconds)} samples, {len(family.buckets)} buckets"
    )
    return claimed(text, Finding(apart.no_worse().held), figures)


def _alike(family: Family) -> Claim:
    one, prices = family.one_price(), family.prices()
    apart = difference(
        _missed(one), _missed(family.times), names=("one price", "a price for each"), higher_is_better=False
    )
    text = (
        f"{family.reference}: figure 11b: a byte costs about the same in all buckets: one price foretells exchanges as "
        f"well as a price for each, with an R² that is lower by no more than {_NEAR_EACH:g}"
    )
    margin = "" if apart.margin is None else f" ± {apart.margin:.3f}"
    figures = (
        f"held out, {_r2(one)} with one price, {_r2(family.times)} with a price for each: lower by "
        f"{apart.mean:.3f}{margin}; a MB costs {format_seconds(1e6 * min(prices))} to "
        f"{format_seconds(1e6 * max(prices))}"
    )
    held = apart.no_worse(_NEAR_EACH).held
    if (family.times.r2_held_out or 0.0) < _NEAR_ONE:
        return claimed(
            text, Finding(None), f"{figures}; prices that foretell this little do not show what a byte costs"
        )
    return claimed(text, Finding(held), figures)


def _same_plan(family: Family) -> Claim:
    own, other = family.plans[SECONDS], family.plans[BYTES]
    apart = math.fsum(abs(a - b) for a, b in zip(own.bucket_nbytes, other.bucket_nbytes, strict=True))
    share = apart / math.fsum(other.bucket_nbytes)
    same = sum(own.specs[name] == spec for name, spec in other.specs.items())
    return claimed(
        f"{family.reference}: section 5.5: the plan for seconds is near that for bytes: what they send by bucket "
        f"differs in no more than {_NEAR_PLAN:.0%} of the bytes",
        share <= _NEAR_PLAN,
        f"{share:.1%}; {same} of {len(other.specs)} layers have the same; {format_bytes(own.sent_bytes)} and "
        f"{format_bytes(other.sent_bytes)} in all",
    )


def _earlier(family: Family) -> Claim:
    place, other = (_place(family.plans[name]) for name in (PRIORITY, BYTES))
    return claimed(
        f"{family.reference}: figure 12: the priority moves bytes from later buckets to earlier ones",
        place < other,
        f"the mean byte is in bucket {place:.2f} of {len(family.buckets)}, with the plan for bytes in {other:.2f}",
    )


def _place(plan: Timed) -> float:
    weighted = math.fsum(at * nbytes for at, nbytes in enumerate(plan.bucket_nbytes, 1))
    return weighted / math.fsum(plan.bucket_nbytes)


def _compared(
    family: Family, text: str, one: str, other: str, what: str, says: Callable[[Difference], Finding]
) -> Claim:
    """Judge a claim about two plans, compared round by round."""
    apart = family.beside(one, other, what)
    medians = " and ".join(
        f"{format_seconds(statistics.median(getattr(family.plans[name], what)))} ({name})" for name in (one, other)
    )
    figures = f"{medians}; {apart.figure()} over {len(apart.seeds)} rounds"
    return claimed(f"{family.reference}: {text}", Finding(says(apart).held), figures)


def _missed(times: Times) -> dict[int, float]:
    """Return the squared error of the prediction of each held-out sample, as a share of the variance."""
    variance = statistics.pvariance(times.seconds)
    both = zip(times.seconds, times.foretold_s, strict=True)
    return {sample: (own - foretold) ** 2 / variance for sample, (own, foretold) in enumerate(both)}


def _r2(times: Times) -> str:
    return format_or_dash("{:.3f}".format, times.r2_held_out)


# ---- tables ----------------------------------------------------------------------------------------------------------

TITLES = {
    "fits": "The regression",
    "plans": "Steps, by plan",
    "buckets": "Buckets: what a byte costs, and bytes by plan (figures 11b and 12)",
}


@dataclass(frozen=True)
class Line:
    """A line of a table: a reference, and a plan's name or a bucket's number."""

    table: str
    family: Family
    at: str = ""

    @property
    def plan(self) -> Timed:
        return self.family.plans[self.at]

    @property
    def name(self) -> str:
        return f"{self.family.reference}, {self.at}" if self.at else self.family.reference


def lines(found: Sequence[Family]) -> list[Line]:
    """Return the lines of all tables."""
    fits = [Line("fits", family) for family in found]
    plans = [Line("plans", family, name) for family in found for name in (*PLANS, DENSE)]
    buckets = [Line("buckets", family, str(at)) for family in found for at in range(1, len(family.buckets) + 1)]
    return [*fits, *plans, *buckets]


def _sent(name: str) -> Column:
    return name, lambda line: format_bytes(line.family.plans[name].bucket_nbytes[int(line.at) - 1])


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "fits": (
        ("reference", lambda line: line.name),
        ("samples", lambda line: str(len(line.family.times.seconds))),
        ("R²", lambda line: f"{line.family.times.r2:.3f}"),
        ("held out", lambda line: _r2(line.family.times)),
        ("one price", lambda line: _r2(line.family.one_price())),
        ("fixed", lambda line: format_seconds(line.family.times.fixed_s)),
    ),
    "plans": (
        ("plan", lambda line: line.name),
        ("step", lambda line: format_seconds(statistics.median(line.plan.step_s))),
        ("− bytes", lambda line: NOTHING if line.at in (BYTES, DENSE) else line.family.beside(line.at, BYTES).figure()),
        ("exchange", lambda line: format_seconds(statistics.median(line.plan.exchange_s))),
        ("sent", lambda line: format_bytes(line.plan.sent_bytes)),
        ("error", lambda line: f"{line.plan.error_of_reference:.3f}"),
    ),
    "buckets": (
        ("bucket", lambda line: line.name),
        ("MB costs", lambda line: format_seconds(1e6 * line.family.prices()[int(line.at) - 1])),
        *map(_sent, PLANS),
    ),
}

_LEGEND: Legend = (
    (
        "R²",
        (
            "the share of the variance of exchanges' durations that bytes of buckets explain; held out: of samples "
            "that were not fit, each foretold by all others; one price: the same where all bytes cost the same"
        ),
    ),
    ("fixed", "seconds that do not depend on bytes"),
    (
        "plan",
        (
            "all are at the error of the reference, from the same gradients: by bytes; by seconds, as measured; by "
            "priority, where a byte of the n-th bucket counts n times; uniform: the reference for all layers; "
            "uncompressed: nothing is compressed"
        ),
    ),
    (
        "step, exchange",
        (
            "an exchange is from the first bucket to the last average; of a round the median over its steps on the "
            "slowest rank, and of these the median"
        ),
    ),
    (
        "− bytes",
        (
            "how much longer a step is than with the plan for bytes, the mean over rounds ± half of its 95 % interval "
            "(Student's t, paired)"
        ),
    ),
    ("sent", "by one rank in a step; error: the sum over layers as a share of the reference's"),
    (
        "MB costs",
        (
            "what a megabyte of the bucket adds to an exchange; buckets are in the order in which they are sent, with "
            "the bytes that one rank sends for their layers"
        ),
    ),
)


def _notes(own: Sequence[Line]) -> list[str]:
    if own[0].table == "buckets":
        return [f"{line.name}: {', '.join(line.family.buckets[int(line.at) - 1])}" for line in own]
    counted = [(line, Counter(line.plan.specs.values())) for line in own if line.table == "plans"]
    return [
        f"{line.name}: {', '.join(f'{count} × `{spec}`' for spec, count in sorted(counts.items()))}"
        for line, counts in counted
        if counts
    ]


LAYOUT = Layout(
    tables=lambda found: ((key, [line for line in found if line.table == key]) for key in TITLES),
    columns=_COLUMNS.__getitem__,
    legend=_LEGEND,
    caption=lambda title, _: title,
    notes=_notes,
)


# ---- the page --------------------------------------------------------------------------------------------------------


def _found(found: Sequence[Line]) -> str:
    return " ".join(_told(line.family) for line in found if line.table == "fits")


def _told(family: Family) -> str:
    steps = ", ".join(
        f"{format_seconds(statistics.median(family.plans[name].step_s))} {said}"
        for name, said in ((BYTES, "with the plan for bytes"), (SECONDS, "with that for seconds"))
    )
    return (
        f"Around `{family.reference}` bytes explain {_r2(family.times)} of the variance of exchanges that were not "
        f"fit, and a step takes {steps}."
    )


def _panels(found: Sequence[Line]) -> list[Panel]:
    panels = []
    for family in (line.family for line in found if line.table == "fits"):
        steps = {name: statistics.median(family.plans[name].step_s) for name in PLANS}
        panels += [
            Panel(
                "Step",
                family.reference,
                [Bar(name, seconds, format_seconds(seconds), name == SECONDS) for name, seconds in steps.items()],
            ),
            Panel(
                "What a MB costs",
                f"{family.reference}, by bucket",
                [
                    Bar(f"bucket {at}", price, format_seconds(1e6 * price))
                    for at, price in enumerate(family.prices(), 1)
                ],
            ),
        ]
    return panels


def _opening(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Opening:
    links = "on loopback" if config["rate"] == "none" else f"behind links of {config['rate']}"
    shape = MODELS[config["model"]]
    return Opening(
        title="Seconds instead of bytes (L-GreCo)",
        says="Should L-GreCo choose by bytes or by seconds? The paper says that the bytes of DDP's buckets foretell "
        "the time of an exchange nearly perfectly, and that a byte costs about the same in all of them. So the plan "
        "for seconds is nearly the plan for bytes.",
        ran=f"A GPT of {rows[0]['parameters']:,} parameters read bytes of Python's standard library on "
        f"{config['nodes']} ranks {links}. A regression had {config['samples']} samples of {config['steps']} steps, "
        f"and plans took turns in {config['rounds']} rounds.",
        found=_found,
        panels=_panels,
        departs=(
            (
                f"The model, its training and its buckets are smaller than the paper's: {shape.blocks} blocks of width "
                f"{shape.dim} and {shape.heads} heads. Ranks read {shape.batch} windows of {shape.sequence} bytes in "
                f"a step, with AdamW (rate {config['lr']:g} in every step, β₁ {BETAS[0]:g}, β₂ {BETAS[1]:g}, weight "
                f"decay {WEIGHT_DECAY:g}, no clipping) and buckets of {config['bucket_cap_mb']:g} MB, "
                f"{config['train_steps']} steps under the reference before anything was measured."
            ),
        ),
        covers=(
            ("section 4 (the time objective), 5.5 and figure 11b (what bytes of buckets cost)", "here"),
            ("appendix A and figure 12 (priority of buckets)", "here"),
            ("all others", "[here, or why not](lgreco.md#the-papers-tables-and-figures)"),
        ),
    )


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of results from a record, the content of ``summary.json``."""
    found = families(record["rows"])
    opening = _opening(record["config"], record["rows"])
    write_results(
        path,
        lines(found),
        TITLES,
        [] if record["quick"] else claims(found),
        LAYOUT,
        opening=opening,
        paper=PAPER,
        record=record,
        commits=sorted({str(row["commit"]) for row in record["rows"]}),
    )
