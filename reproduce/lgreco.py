"""L-GreCo (Alimohammadi, Markov, Frantar, Alistarh 2022, arXiv 2210.17357), compared with uniform compression.

At every epoch, the paper chooses the bits, density or rank of every layer anew, such that the error stays that of a
uniform setting that is known to be safe. This sends 1.1 times (quantization) to 5 times (low rank, a transformer) less
than the uniform setting, with metrics within 1 % of training without compression. There are two experiments:

* A GPT learns bytes of WikiText-2 with AdamW, without compression and with three families of codecs, uniform and by
  L-GreCo, three seeds each. The uniform setting, the reference, has to be safe, or there is no accuracy to keep. So
  every candidate for the reference is trained first, with a seed of its own. A family's reference is the candidate that
  sends least of those within 1 % of the run without compression; where none is, the candidate closest to that run. The
  page shows all candidates.
* Table 4 of the paper, which also compares k-means and Accordion: a ResNet-8 learns CIFAR-10 with PowerSGD, for 12
  epochs with a learning rate that falls in steps, since Accordion looks for change between epochs. Ranks are a quarter
  of the paper's, as layers are smaller: uniform 8 (there 32), L-GreCo 2 to 16, k-means four ranks from 2 to 16,
  Accordion 4 or 16, L-GreCo with Accordion 2 to 32.

As in the paper, compression begins when the learning rate has risen, and policies decide for the first time at that
moment. Ratios of bytes are reported with and without the uncompressed steps before.

Run ``python -m reproduce.lgreco`` (the GPT: nearly two hours on two cores that had other work, too), ``--long`` (with
candidates, an hour more, and table 4, two hours more), ``--quick`` (seconds), ``--help``. Pictures of plans (the
paper's figure 1) and of ratios over time (figure 9a) are drawn beside the results.

Differences from the paper: smaller networks (ResNet-8, a GPT of 0.9 million parameters over bytes of WikiText-2's
validation split), four ranks, few epochs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import narrowband as nb
from narrowband.report.record import read_json
from narrowband.units import format_seconds
from reproduce.claims import under
from reproduce.command import RESULTS, Experiment, Recipe, main
from reproduce.groups import DENSE, NOTHING, Claim, Group, as_good_as, claimed, compared, judged, named, needed
from reproduce.pairs import Finding, every
from reproduce.pictures import Bar, Panel
from reproduce.report import COLUMNS, LESS, PER_TASK, SCORE, Layout, Legend, Opening, score_panel
from reproduce.row import WARM_UP, Row

__all__ = ["EXPERIMENT", "LINKS"]

#: Name of the record of steps on links, in the directory of results.
LINKS = "links.json"

_GPT = Row("gpt", DENSE, "none", optimizer="adamw", epochs=3, lr=2e-3, batch=32, weight_decay=0.01, clip=1.0)
_CIFAR = Row("cifar", DENSE, "none", epochs=12, lr=0.1, batch=128, weight_decay=1e-4, schedule="steps")

#: Seeds of the rows that are compared, and the seed that references are chosen with.
_SEEDS = (0, 1, 2)
_CHOOSING = (100,)

#: Family → candidates for its reference, in order of bytes sent, the least first.
_CANDIDATES = {
    "qsgd": ("qsgd:bits=4", "qsgd:bits=6", "qsgd:bits=8"),
    "top-k": ("topk:density=0.05+ef", "topk:density=0.1+ef", "topk:density=0.2+ef"),
    "powersgd": ("powersgd:rank=8", "powersgd:rank=16", "powersgd:rank=32"),
}
#: Family → the reference that was chosen; a claim on the page says whether the rule chooses it.
_REFERENCES = {"qsgd": "qsgd:bits=4", "top-k": "topk:density=0.2+ef", "powersgd": "powersgd:rank=32"}

#: Table 4: the spec with a rank to fill in, the rows' family, and Accordion's two levels.
_RANK = "powersgd:rank={}"
_TABLE_4 = "powersgd"
_LOW, _HIGH = _RANK.format(16), _RANK.format(4)

#: Mean ratios in the paper's table 4, of Transformer-XL with PowerSGD (uniform: rank 32; ranks 8 to 64; Accordion: 16
#: or 64; together: 8 to 128); and the share of training time that decisions take, in the paper's table 1, for
#: Transformer-XL (here: ``gpt``) and ResNet-50 (here: ``cifar``).
_THEIR_RATIO = {
    "uniform": 14.1, "lgreco": 23.5, "kmeans": 21.6, "accordion": 23.9, "lgreco+accordion": 36.9
}  # fmt: skip
_THEIR_SHARE = {
    "gpt": {"powersgd": 0.0056, "qsgd": 0.0014, "top-k": 0.0038},
    "cifar": {"powersgd": 0.0015, "qsgd": 0.0004, "top-k": 0.0033},
}

#: A metric counts as kept if it is worse by at most this share of the uncompressed one; how many times fewer bytes the
#: paper sends.
_KEPT = 0.01
_FEWER_BYTES = {"qsgd": 1.1, "top-k": 1.5, "powersgd": 1.5}

#: Key of the table of candidates; the other keys are tasks. And the titles of all tables.
_CHOICE = "choice"
_TITLES = {
    "gpt": "WikiText-2 as bytes (validation split, judged on test), GPT",
    "cifar": "Table 4: CIFAR-10, ResNet-8, PowerSGD",
    _CHOICE: "How references were chosen: the GPT with every candidate",
}


def _candidate(spec: str) -> Row:
    return replace(_GPT, name=f"candidate {spec}", spec=spec, policy="uniform", delay=WARM_UP)


def _ranks(*ranks: int) -> str:
    return " ".join(map(_RANK.format, ranks))


#: Policy of table 4 → its settings.
_GIVEN: dict[str, dict[str, str]] = {
    "uniform": {},
    "lgreco": {"choices": _ranks(*range(2, 17))},
    "kmeans": {"choices": _ranks(2, 4, 8, 16)},
    "accordion": {"spec": _LOW, "high": _HIGH},
    "lgreco+accordion": {"spec": _LOW, "high": _HIGH, "choices": _ranks(*range(2, 33))},
}


def _table_4(policy: str) -> Row:
    given = {"spec": _RANK.format(8)} | _GIVEN[policy]
    return replace(_CIFAR, name=f"{_TABLE_4}, {policy}", policy=policy, delay=WARM_UP, **given)  # type: ignore[arg-type]


_RECIPES = (
    Recipe(_GPT, seeds=_CHOOSING, long=True),
    *(Recipe(_candidate(spec), seeds=_CHOOSING, long=True) for specs in _CANDIDATES.values() for spec in specs),
    Recipe(_GPT, turn=1),
    *(
        Recipe(replace(_candidate(reference), name=f"{family}, {policy}", policy=policy), turn=1)
        for family, reference in _REFERENCES.items()
        for policy in ("uniform", "lgreco")
    ),
    Recipe(_CIFAR, turn=2, long=True),
    *(Recipe(_table_4(policy), turn=2, long=True) for policy in _GIVEN),
)


# ---- claims ----------------------------------------------------------------------------------------------------------


def _claims(found: Sequence[Group]) -> list[Claim]:
    return [
        *(_chosen(found, family) for family in _CANDIDATES),
        *(
            claim
            for family in _REFERENCES
            for claim in under(
                f"{_CALLED[family]}, GPT on WikiText-2", _of_family(found, "gpt", family), cut=f"gpt, {family}: "
            )
        ),
        *under(
            f"{_CALLED[_TABLE_4]}, ResNet-8 on CIFAR-10",
            _of_family(found, "cifar", _TABLE_4),
            cut=f"cifar, {_TABLE_4}: ",
        ),
        *under("Other ways to choose (table 4), ResNet-8 on CIFAR-10", _of_table_4(found), cut="table 4: "),
    ]


#: Family → its name in headings.
_CALLED = {"qsgd": "Quantization", "top-k": "Top-k", "powersgd": "Low rank"}


def _by_rule(found: Sequence[Group], family: str) -> tuple[str, dict[str, float]]:
    """Return the reference that the rule chooses, and how far each candidate is above the run without compression."""
    dense = needed(found, "gpt", DENSE)
    candidates = {spec: needed(found, "gpt", _candidate(spec).name) for spec in _CANDIDATES[family]}
    behind = {spec: compared(group, dense, relative=True).mean for spec, group in candidates.items()}
    return next((spec for spec in behind if behind[spec] <= _KEPT), min(behind, key=behind.__getitem__)), behind


def _chosen(found: Sequence[Group], family: str) -> Claim:
    text = (
        f"gpt, {family}: of the candidates for the reference one is within {_KEPT:.0%} of dense, with seed "
        f"{_CHOOSING[0]}"
    )
    reference = _REFERENCES[family]
    try:
        chosen, behind = _by_rule(found, family)
    except LookupError as error:
        return Claim(text, None, str(error), setup=True)
    figures = "; ".join(f"{spec} {share:+.1%}" for spec, share in behind.items())
    kept = behind[chosen] <= _KEPT
    took = f"{chosen} sends least of those, and" if kept else f"{chosen} is the closest to dense, and so"
    if chosen != reference:
        took += f" would be the reference, but rows were trained around {reference}"
    else:
        took += " is the reference"
    said = f"perplexity against dense: {figures}; {took}"
    return replace(claimed(text, kept and chosen == reference, said), setup=True)


def _of_family(found: Sequence[Group], task: str, family: str) -> list[Claim]:
    within = f"is within {_KEPT:.0%} of dense"
    uniform, own = (f"{family}, {name}" for name in ("uniform", "lgreco"))
    fewer = f"{task}, {family}: L-GreCo sends at least {_FEWER_BYTES[family]:g} times less than uniform"
    return [
        as_good_as(
            found, task, uniform, f"{task}, {family}: the reference is safe: uniform {within}",
            within=_KEPT, relative=True,
        ),
        as_good_as(found, task, own, f"{task}, {family}: L-GreCo {within}", within=_KEPT, relative=True),
        judged(
            found, task, f"{task}, {family}: L-GreCo is no worse than uniform by more than {_KEPT:.0%}",
            (uniform, own), lambda _, fixed, chosen: compared(chosen, fixed, relative=True).no_worse(_KEPT),
        ),
        judged(
            found, task, fewer, (uniform, own),
            lambda _, fixed, chosen: _times(chosen, fixed) >= _FEWER_BYTES[family], _ratios,
        ),
    ]  # fmt: skip


def _of_table_4(found: Sequence[Group]) -> list[Claim]:
    def claim(text: str, policies: Iterable[str], says: Any) -> Claim:
        names = [f"{_TABLE_4}, {policy}" for policy in policies]
        return judged(found, "cifar", f"table 4: {text}", names, says, _ratios)

    return [
        claim(
            "L-GreCo sends less than k-means, and at most 5 % more than Accordion",
            ("lgreco", "kmeans", "accordion"),
            lambda _, own, kmeans, accordion: _times(own, kmeans) > 1 and _times(own, accordion) >= 1 / 1.05,
        ),
        claim(
            "L-GreCo with Accordion sends at least 1.5 times less than either alone",
            ("lgreco+accordion", "lgreco", "accordion"),
            lambda _, both, own, accordion: min(_times(both, own), _times(both, accordion)) >= 1.5,
        ),
        claim(
            f"all policies are within {_KEPT:.0%} of dense",
            _GIVEN,
            lambda dense, *all_: every(_kept(group, dense) for group in all_),
        ),
    ]


def _kept(group: Group, dense: Group) -> Finding:
    return compared(group, dense, relative=True).no_worse(_KEPT)


def _times(own: Group, other: Group) -> float:
    """Return how many times less a row sends than another, over the steps that are compressed."""
    if own.compressed_ratio is None or other.compressed_ratio is None:
        raise LookupError(f"needs bytes of {own.name} and {other.name}")
    return own.compressed_ratio / other.compressed_ratio


def _ratios(group: Group) -> str:
    if group.name == DENSE or group.compressed_ratio is None:
        return ""
    return (
        f"{group.name} {group.compressed_ratio:.1f} times less than dense, {group.mean_ratio:.1f} with the first steps"
    )


# ---- tables and pictures ---------------------------------------------------------------------------------------------


def _families(task: str) -> tuple[str, ...]:
    return tuple(_REFERENCES) if task == "gpt" else (_TABLE_4,)


def _draw(rows: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Draw, per task, every policy's ratios over time and L-GreCo's last plan layer by layer, of the first seed."""
    from matplotlib.figure import Figure

    drawn = []
    for task in dict.fromkeys(row["task"] for row in rows):
        planned = [row for row in rows if row["task"] == task and row["plans"] and row["seed"] == _SEEDS[0]]
        if not planned:
            continue
        directory.mkdir(parents=True, exist_ok=True)
        families = _families(task)
        figure = Figure(figsize=(5.0 * len(families), 4.0), layout="constrained")
        profile = Figure(figsize=(5.0 * len(families), 5.0), layout="constrained")
        over_time, over_layers = (f.subplots(1, len(families), squeeze=False)[0] for f in (figure, profile))
        for family, times, layers in zip(families, over_time, over_layers, strict=True):
            own = [row for row in planned if row["name"].startswith(f"{family}, ")]
            for row in own:
                label = row["name"].partition(", ")[2]
                times.plot(
                    [step for step, _, _ in row["plans"]], [r for _, r, _ in row["plans"]], marker=".", label=label
                )
            times.set(title=family, xlabel="step", ylabel="times fewer bytes, of what is compressed")
            if own:
                times.legend()
            last: dict[str, str] = next((row["plans"][-1][2] for row in own if row["name"].endswith(", lgreco")), {})
            numbers = [_number(spec) for spec in last.values()]
            layers.bar(range(len(last)), numbers, color="tab:blue")
            layers.axhline(_number(_REFERENCES[family] if task == "gpt" else _RANK.format(8)), color="tab:red")
            layers.set_xticks(range(len(last)), list(last), rotation=90, fontsize=6)
            layers.set(title=f"{family}: chosen (bars), uniform (line)")
        for what, picture in (("ratios", figure), ("profile", profile)):
            drawn.append(directory / f"{task}-{what}.png")
            picture.savefig(drawn[-1], dpi=120)
    return drawn


def _number(spec: str) -> float:
    """Return the bits, density or rank of a spec."""
    codec = nb.compression(spec).codec
    return float(next(getattr(codec, key) for key in ("bits", "density", "rank") if hasattr(codec, key)))


def _their_ratio(group: Group) -> str:
    family, _, policy = group.name.partition(", ")
    ratio = _THEIR_RATIO.get(policy) if family == _TABLE_4 else None
    return NOTHING if ratio is None else f"{ratio:.1f}"


def _their_share(group: Group) -> str:
    family, _, policy = group.name.partition(", ")
    return f"{_THEIR_SHARE[group.task][family]:.2%}" if policy == "lgreco" else NOTHING


def _share(group: Group) -> str:
    uniform = group.name.endswith(", uniform") or group.name.startswith("candidate ")
    return NOTHING if group.decide_share is None or uniform else f"{group.decide_share:.2%}"


def _on_link(group: Group) -> str:
    """Return the time of a step that :mod:`reproduce.lgreco_links` recorded for this row with this spec."""
    path = RESULTS / "lgreco" / LINKS
    told = read_json(path, ("rate", "rows")) if path.exists() else {}
    rows = told["rows"] if told.get("rate") == "100mbit" else []  # the legend names this rate
    own = group.task, group.name, group.spec
    found = next((row["step_s"] for row in rows if (row["task"], row["name"], row.get("spec")) == own), None)
    return NOTHING if found is None else format_seconds(found)


_LEGEND: Legend = (
    SCORE,
    LESS,
    ("sent", "by one rank in a step of the last epoch"),
    (
        "ratio",
        (
            "how many times less a rank sends than an uncompressed ring all-reduce, over the steps that are "
            "compressed; with first: over all steps, also the first that are not"
        ),
    ),
    ("deciding", "share of training time in which plans were made"),
    (
        "theirs",
        (
            "the paper's mean ratio, of Transformer-XL on WikiText-103 (table 4; there uniform has rank 32), and its "
            "share of time, of Transformer-XL and of ResNet-50 (table 1). Models, data and lengths differ: compare how "
            "rows relate to each other, not the numbers"
        ),
    ),
    ("step", "the median of the last epoch on rank 0, on loopback, however busy the machine was"),
    (
        "on a link",
        (
            "the median of 24 steps with the last plan behind links of 100 Mbit/s, in one pass (`python -m "
            "reproduce.lgreco_links`)"
        ),
    ),
)
_TAKEN = ("row", "score", "− dense", "sent")


def _tables(found: Sequence[Group]) -> Iterable[tuple[str, list[Group]]]:
    """Yield the tables: rows that are compared, and candidates, each with the dense row of the same seeds."""
    candidates = [group for group in found if group.name.startswith("candidate ")]
    for task in ("gpt", "cifar"):
        own = [group for group in found if group.task == task and group not in candidates]
        if len(own) > 1:
            yield task, _of_their_seeds(own)
    if candidates:
        yield _CHOICE, _of_their_seeds([named(found, "gpt", DENSE), *candidates])


def _of_their_seeds(own: Sequence[Group | None]) -> list[Group]:
    """Return the groups, with the dense group restricted to the seeds that the others have."""
    there = [group for group in own if group is not None]
    seeds = {seed for group in there for seed in group.seeds if group.name != DENSE}
    return [group.of_seeds(seeds) if group.name == DENSE else group for group in there]


def _caption(title: str, own: Sequence[Group]) -> str:
    said = PER_TASK.caption(title, own)
    if title != _TITLES[_CHOICE]:
        return said
    told = []
    for family in _CANDIDATES:
        try:
            chosen, behind = _by_rule(own, family)
        except LookupError:
            continue
        none = (
            "" if behind[chosen] <= _KEPT else f", {behind[chosen]:+.1%} from uncompressed: none is within {_KEPT:.0%}"
        )
        told.append(f"{family}: {chosen}{none}")
    rule = (
        f"a family's reference is the candidate that sends least of those at most {_KEPT:.0%} above uncompressed, and "
        "where there is none, the closest to it"
    )
    return f"{said}; {rule} ({'; '.join(told)})"


_LAYOUT = Layout(
    tables=_tables,
    columns=lambda key: (
        *(column for column in COLUMNS if column[0] in _TAKEN),
        ("ratio", lambda group: NOTHING if group.compressed_ratio is None else f"{group.compressed_ratio:.1f}"),
        ("with first", lambda group: NOTHING if group.mean_ratio is None else f"{group.mean_ratio:.1f}"),
        *(
            ()
            if key == _CHOICE
            else (
                ("theirs", _their_ratio),
                ("deciding", _share),
                ("theirs", _their_share),
                *(column for column in COLUMNS if column[0] == "step"),
                ("on a link", _on_link),
            )
        ),
    ),
    legend=_LEGEND,
    caption=_caption,
    pictures=lambda key: (
        (f"{key}-ratios.png", "Times fewer bytes over steps, a curve for every policy"),
        (f"{key}-profile.png", "What L-GreCo chose last for every layer, beside uniform's"),
    ),
)


def _pair(found: Sequence[Group], task: str, family: str) -> tuple[Group, Group]:
    """Return a family's uniform row and its row by L-GreCo."""
    return needed(found, task, f"{family}, uniform"), needed(found, task, f"{family}, lgreco")


def _found(found: Sequence[Group]) -> str:
    dense = needed(found, "gpt", DENSE)
    said = []
    for family in _REFERENCES:
        uniform, own = _pair(found, "gpt", family)
        said.append(
            f"{_times(own, uniform):.2f} times less with {family}, at a perplexity "
            f"{compared(own, dense, relative=True).figure()} from uncompressed (uniform "
            f"{compared(uniform, dense, relative=True).figure()})"
        )
    return f"Beside one uniform setting, L-GreCo sends on the GPT {'; '.join(said)}.{_unsafe(found)}"


def _unsafe(found: Sequence[Group]) -> str:
    """Name the families without a candidate within the bound, where candidates were trained."""
    try:
        told = [family for family, (chosen, behind) in _ruled(found).items() if behind[chosen] > _KEPT]
    except LookupError:
        return ""
    return f" No uniform setting of {' or '.join(told)} that was tried was within {_KEPT:.0%}." if told else ""


def _ruled(found: Sequence[Group]) -> dict[str, tuple[str, dict[str, float]]]:
    return {family: _by_rule(found, family) for family in _CANDIDATES}


def _panels(found: Sequence[Group]) -> list[Panel]:
    panels = []
    for task, what, score in (
        ("gpt", "WikiText-2, GPT", "Held-out perplexity"),
        ("cifar", "CIFAR-10, ResNet-8", "Test accuracy, %"),
    ):
        if task == "cifar" and named(found, task, f"{_TABLE_4}, uniform") is None:
            continue
        shown = [
            (f"{family}, {'L-GreCo' if own else 'uniform'}", pair[own], bool(own))
            for family, pair in ((family, _pair(found, task, family)) for family in _families(task))
            for own in (0, 1)
        ]
        ratios = [
            Bar(label, group.compressed_ratio, f"{group.compressed_ratio:.1f}×", strong)
            for label, group, strong in shown
        ]
        panels += [Panel(what, "times fewer bytes sent while compressed", ratios), score_panel(score, shown)]
    return panels


EXPERIMENT = Experiment(
    module="lgreco",
    paper="Alimohammadi et al. 2022, L-GreCo (arXiv 2210.17357)",
    titles=_TITLES,
    recipes=_RECIPES,
    claims=_claims,
    opening=Opening(
        title="Adaptive per layer (L-GreCo)",
        says="Does it help to choose bits, density or rank for every layer, at the error of a uniform setting that is "
        "known to be safe? The paper says that this sends 1.1 times (quantization) to 5 times (low rank) less than the "
        "uniform setting, with metrics within 1 % of uncompressed training.",
        ran="A small GPT learned bytes of WikiText-2 on four real ranks, with three families of codecs, each uniform "
        "and chosen by L-GreCo. A ResNet-8 learned CIFAR-10 with PowerSGD: uniform, and chosen in four ways.",
        found=_found,
        panels=_panels,
        covers=(
            ("table 1, what deciding costs", "the columns *deciding* and *theirs*"),
            (
                "tables 2 and 3, metrics and ratios of three families",
                "the first table, with a smaller GPT; no ImageNet",
            ),
            ("table 4, other adaptive methods", "the table of that name, with a ResNet-8 and a quarter of the ranks"),
            ("tables 5 to 8, hyper-parameters", "ours are above each table"),
            ("figures 1, 9a and 13, plans by layer and ratios over time", "the pictures below tables"),
            ("figure 2, where it sits in training", "[architecture](../architecture.md)"),
            (
                "figure 3, other references",
                "not reproduced: here the noise of three seeds is larger than what references differ by",
            ),
            (
                "figures 4 to 8, throughput on GPUs",
                "not reproduced: no machines with several GPUs; *on a link* are steps behind 100 Mbit/s",
            ),
            (
                "figure 9b, bytes per bucket",
                "bytes by bucket of three plans are on [a page of its own](lgreco_times.md)",
            ),
            (
                "figure 10, global top-k",
                "a drawing; accuracies with global top-k are on [a page of its own](sparsity.md)",
            ),
            (
                "the authors' code (github.com/LGrCo/L-GreCo, 13942f0d2c24)",
                "plans chosen here are never larger than those of its solver: `tests/published/test_lgreco.py`",
            ),
            ("figure 11a, errors against losses", "[a page of its own](sensitivity.md)"),
            ("figures 11b and 12, seconds per byte and priority of buckets", "[a page of its own](lgreco_times.md)"),
        ),
    ),
    draw=_draw,
    seeds=_SEEDS,
    layout=_LAYOUT,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
