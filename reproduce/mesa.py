"""Mesa (Pan, Chen, He, Liu, Cai, Zhuang 2021, arXiv 2111.11124): training a vision transformer in less memory.

The paper computes forward exactly and saves activations for backward in 8 bits. Each attention head or group of
channels has a quantization range, which is a running estimate; rounding is stochastic. DeiT-Ti then learns as well or
better in half of the memory, under mixed precision. The paper's other findings:

* table 2: running estimates are better and smaller than statistics per sample;
* table 3: rounding to the nearest is good enough on a small data set;
* tables 4 to 6 and section 3.2: symmetric ranges, one range per layer, a range per channel, groups of a fixed size, and
  other decays of the estimates are worse;
* tables 7 and 8: operators and modules may be compressed one by one.

:mod:`reproduce.mesa_memory` has how much larger a model may be in the same memory (tables 9 and 10), and
:mod:`reproduce.mesa_steps` how long steps take.

One process trains each row with one thread; ``--nodes`` rows run side by side. Rows of one seed begin with the same
parameters and see the same images, and are compared only with each other (:mod:`reproduce.pairs`).

Run ``python -m reproduce.mesa`` (two hours and a half on two cores that had other work, too), ``--long`` for tables 7
and 8 and for fewer bits (hours more), ``--quick`` (seconds), ``--help``. Plots of the ranges over training (the paper's
figures 7 and 8) are drawn beside the results.

Differences from the paper:

* The model is a vision transformer of 0.15 million parameters (48 channels, 5 blocks, patches of 4 pixels, and three
  heads as in DeiT-Ti), trained on 30,000 CIFAR-10 images for 5 epochs. The paper trains DeiT-Ti on CIFAR-100 and
  ImageNet. Learning rate and batch fit the small model; AdamW, its weight decay and the cosine schedule are the
  paper's. There is no mixup or similar augmentation.
* Rows are in float32, where 8 bits are a fourth of what is otherwise kept, and not about half. One table uses bfloat16
  autocast, which is the paper's mixed precision but for the 16-bit format. Memory is the bytes that autograd keeps
  between forward and backward of a step; the paper's memory is the peak of the GPU's allocator.
* In float32, softmax and the matrix product after it save the same tensor. Where only one of the two is compressed, a
  copy of that tensor is kept in addition. Under autocast each operator saves a tensor of its own.
* A batch is quantized with the ranges of the batches before it, unless the batch moves these by more than 2 %. A batch
  that is more than a quarter wider gets its own range, and a tensor with outliers is kept exactly. The paper first
  takes every batch into the estimates, and then clips.
* Tables 2 to 8 appear here without the paper's accuracies, which were not available. Claims rest on the paper's text
  and, for table 1, on its authors' page (github.com/ziplab/Mesa). Combinations of operators are those of the text.
* Rows in 4 and 2 bits and rows called derived are not the paper's. Derived rows recompute the results of GELU and
  normalization in backward; all other rows keep them.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowband.units import format_bytes
from reproduce.claims import under
from reproduce.command import Experiment, Recipe, main
from reproduce.groups import DENSE, NOTHING, Claim, Group, as_good_as, compared, judged, named, needed
from reproduce.pairs import Finding, every
from reproduce.pictures import Bar, Panel
from reproduce.report import LESS, SCORE, Column, Layout, Legend, Opening, score_panel
from reproduce.row import Row

__all__ = ["EXPERIMENT", "TIMED"]

_PLAIN = Row(
    "vit", DENSE, "none", optimizer="adamw", epochs=5, lr=2e-3, batch=100, weight_decay=0.05, limit=30_000,
    activations='{"bits": "off"}',
)  # fmt: skip

#: Bounds on differences of accuracy, in points. _KEPT: 8 bits are as good as no compression. _ON_PAR: other rows are on
#: par. _NOISE: one way is no worse than the other. _LOST: a clear loss. _HALF: what the paper calls half, as a share of
#: bytes.
_KEPT = 0.5
_ON_PAR = 1.5
_NOISE = 0.5
_LOST = 2.0
_HALF = 0.5

#: Number of groups that gives every channel of the model a group of its own, and number of neighbouring elements that
#: share a range in compiled graphs.
_EACH = 4 * 48
_NEIGHBOURS = 256

#: The smallest value of GELU. In the paper, the offset of the second feed-forward layer's input stays there.
_GELU_MIN = -0.17


@dataclass(frozen=True)
class _Said:
    """A row, with the paper's figures for it.

    Attributes:
        row: the row that is trained here.
        accuracy: the paper's accuracy of DeiT-Ti on ImageNet, in %.
        memory: the paper's training memory, as a share of the baseline's.
        first: whether the row is trained before all others.
        long: whether the row is trained only with ``--long``.
    """

    row: Row
    accuracy: float | None = None
    memory: float | None = None
    first: bool = False
    long: bool = False


def _said(name: str, memory: float | None = None, *, long: bool = False, **policy: Any) -> _Said:
    return _Said(replace(_PLAIN, name=name, activations=json.dumps(policy)), memory=memory, long=long)


def _operators(*names: str) -> _Said:
    """Return a row that compresses only these operators."""
    return _said(" + ".join(names).replace("_", " "), long=True, bits="off", operators=dict.fromkeys(names, 8))


def _modules(name: str, *patterns: str, memory: float | None = None) -> _Said:
    """Return a row that compresses only modules that match these patterns."""
    return _said(name, memory, long=True, bits="off", modules=dict.fromkeys(patterns, 8))


#: The two parts of a block, as the authors divide it. Normalization belongs to neither.
_ATTENTION = ("blocks.*.qkv", "blocks.*.scores", "blocks.*:softmax", "blocks.*.mix", "blocks.*.proj")
_FEED_FORWARD = ("blocks.*.up", "blocks.*:gelu", "blocks.*.down")

#: The paper's figures are those of table 1, which uses mixed precision.
_DENSE = _Said(_PLAIN, first=True)
_MESA = _Said(replace(_PLAIN, name="mesa", activations='{"bits": 8}', trace=True), first=True)
_MIXED = (
    _Said(replace(_PLAIN, name="bf16", amp=True), accuracy=71.9),
    _Said(
        replace(_PLAIN, name="bf16, mesa", activations='{"bits": 8}', amp=True), accuracy=72.1, memory=1858 / 4171
    ),
)  # fmt: skip

_OPERATORS = (
    _operators("matmul"),
    _operators("gelu"),
    _operators("layer_norm"),
    _operators("softmax"),
    _operators("softmax", "gelu"),
    _operators("gelu", "layer_norm"),
)
_MODULES = (
    _modules("attention", *_ATTENTION, memory=0.73),
    _modules("feed-forward", *_FEED_FORWARD, memory=0.79),
    _modules("both modules", *_ATTENTION, *_FEED_FORWARD),
)
_DECAYS = (0.0, 0.5, 0.99, 0.999)

#: Table → its rows. The baseline and Mesa are in all tables in addition.
_TABLES: dict[str, tuple[_Said, ...]] = {
    "table 1": _MIXED,
    "bits": (
        _said("8 bits, derived", bits=8, derive=True),
        _said("4 bits", bits=4, long=True),  # layer norms keep 8 bits
        _said("4 bits, norms too", bits=4, operators={"layer_norm": 4}, long=True),
        _said("2 bits", bits=2, long=True),
        _said("4 bits, derived", bits=4, derive=True, long=True),
    ),
    "table 2": (_said("per sample", bits=8, statistics="sample"),),
    "table 3": (_said("nearest", bits=8, rounding="nearest"),),
    "table 4": (_said("symmetric", bits=8, symmetric=True),),
    "table 5": (
        _said("per layer", bits=8, granularity="layer"),
        _said("per channel", bits=8, groups=_EACH),
        _said("neighbours", bits=8, granularity=_NEIGHBOURS),
    ),
    "table 6": tuple(_said(f"decay {decay:g}", bits=8, decay=decay) for decay in _DECAYS),
    "table 7": _OPERATORS,
    "table 8": _MODULES,
}
_SAID = {said.row.name: said for said in (_DENSE, _MESA, *(said for rows in _TABLES.values() for said in rows))}

#: Rows whose steps are timed, the plain one first. Rows of table 6 are left out: the decay does not change the time.
TIMED = tuple(said.row for said in _SAID.values() if said not in _TABLES["table 6"])

_LEGEND: Legend = (
    SCORE,
    LESS,
    ("error", "how far the gradient of a batch is from the exact one after training, as a share of its norm"),
    ("kept", "of a step's activations, for backward; share: of what is kept plain in the same arithmetic"),
    ("paper", "accuracy of DeiT-Ti on ImageNet, and memory in percent of its baseline's"),
    ("step", "steps of all policies are timed on [a page of their own](mesa_memory.md)"),
)


# ---- claims ----------------------------------------------------------------------------------------------------------


def _claims(found: Sequence[Group]) -> list[Claim]:
    claim: Callable[..., Claim] = functools.partial(_judged, found)
    operators = tuple(said.row.name for said in _OPERATORS)
    all_of_them = [
        as_good_as(
            found, "vit", "mesa", f"8 bits: accuracy is within {_KEPT:g} points of dense", within=_KEPT, relative=False
        ),
        claim(
            f"8 bits: backward keeps at most {_HALF:.0%} of the bytes",
            ("mesa",),
            lambda _, mesa: _share(mesa) <= _HALF,
        ),
        claim(
            f"table 1, mixed precision: 8 bits are within {_KEPT:g} points of plain bf16",
            ("bf16", "bf16, mesa"),
            lambda _, plain, mesa: compared(mesa, plain).no_worse(_KEPT),
        ),
        claim(
            f"table 1, mixed precision: 8 bits keep at most {_HALF:.0%} of what plain bf16 keeps",
            ("bf16", "bf16, mesa"),
            lambda _, plain, mesa: _kept(mesa) <= _HALF * _kept(plain),
        ),
        claim(
            f"beyond the paper: results computed again: within {_ON_PAR:g} points of dense, in fewer bytes than Mesa's",
            ("mesa", "8 bits, derived"),
            lambda dense, mesa, derived: _on_par(derived, dense) & (_share(derived) < _share(mesa)),
        ),
        claim(
            f"table 2: running estimates are no worse than statistics per sample by more than {_NOISE:g} points, in "
            "fewer bytes",
            ("mesa", "per sample"),
            lambda _, mesa, sample: compared(mesa, sample).no_worse(_NOISE) & (_share(mesa) < _share(sample)),
        ),
        claim(
            f"table 3: rounding to the nearest is competitive on a small set: within {_ON_PAR:g} points of dense",
            ("nearest",),
            lambda dense, nearest: _on_par(nearest, dense),
        ),
        claim(
            "table 4: symmetric ranges are worse than asymmetric ones, and no better than dense",
            ("mesa", "symmetric"),
            _mesa_is_better,
        ),
        claim(
            "table 5: one range per layer is worse than one per head and group, and no better than dense; bytes are "
            "the same",
            ("mesa", "per layer"),
            lambda dense, mesa, layer: (
                _mesa_is_better(dense, mesa, layer) & math.isclose(_share(mesa), _share(layer), rel_tol=0.01)
            ),
        ),
        claim(
            f"section 5.2.4: a range per channel, but for attention's operands, loses at least {_LOST:g} points (in "
            "the paper it does not converge)",
            ("mesa", "per channel"),
            lambda _, mesa, channel: compared(channel, mesa).worse(_LOST),
        ),
        claim(
            f"section 1: groups of a fixed size, {_NEIGHBOURS} neighbours, lose at least {_LOST:g} points (in the "
            "paper they do not converge)",
            ("mesa", "neighbours"),
            lambda _, mesa, fixed: compared(fixed, mesa).worse(_LOST),
        ),
        claim(
            f"beyond the paper: groups of {_NEIGHBOURS} neighbours, which compiled graphs have, are within {_ON_PAR:g} "
            "points of dense",
            ("neighbours",),
            lambda dense, fixed: _on_par(fixed, dense),
        ),
        claim(
            f"table 6: no other decay is better than 0.9 by more than {_NOISE:g} points",
            ("mesa", *(f"decay {decay:g}" for decay in _DECAYS)),
            lambda _, mesa, *others: every(~compared(other, mesa).better(_NOISE) for other in others),
        ),
        claim(
            f"table 6: a large decay hurts: with 0.999 more than {_LOST:g} points are lost",
            ("mesa", "decay 0.999"),
            lambda _, mesa, large: compared(large, mesa).worse(_LOST),
        ),
        claim(
            f"table 7: operators one by one and in pairs: within {_ON_PAR:g} points of dense; all together keep the "
            "least",
            ("mesa", *operators),
            lambda dense, mesa, *some: (
                every(_on_par(each, dense) for each in some) & all(_share(mesa) < _share(each) for each in some)
            ),
        ),
        claim(
            f"table 8: attention and feed-forward: within {_ON_PAR:g} points of dense; attention saves more, and both "
            "the most",
            tuple(said.row.name for said in _MODULES),
            lambda dense, attention, forward, both: (
                every(_on_par(each, dense) for each in (attention, forward, both))
                & (_share(both) < _share(attention) < _share(forward))
            ),
        ),
    ]
    return [claim for said in all_of_them for claim in under(_topic(said), [said], cut=_BEYOND)]


_BEYOND = "beyond the paper: "


def _topic(claim: Claim) -> str:
    """Heading of the page's table in which it stands."""
    if claim.text.startswith(_BEYOND):
        return "Beyond the paper"
    whole = claim.text.startswith(("8 bits", "table 1"))
    return "8 bits, beside training with nothing compressed" if whole else "Parts of the method"


def _judged(found: Sequence[Group], text: str, names: Sequence[str], verdict: Callable[..., Finding | bool]) -> Claim:
    return judged(found, "vit", text, names, verdict, _figures)


def _off(error: float) -> str:
    """Format an error in per cent or, from ten times the gradient on, as a multiple of the gradient."""
    return f"{error:.1%}" if error < 10.0 else f"{error:.1g} times"


def _figures(group: Group) -> str:
    error = "" if not group.gradient_error else f", gradient off by {_off(group.gradient_error)}"
    return f"{group.name}: {_share(group):.1%} of bytes{error}"


def _mesa_is_better(dense: Group, mesa: Group, other: Group) -> Finding:
    return compared(other, mesa).worse() & ~compared(other, dense).better(_NOISE)


def _on_par(group: Group, dense: Group) -> Finding:
    return compared(group, dense).no_worse(_ON_PAR)


def _share(group: Group) -> float:
    """Return the bytes that are kept, as a share of those kept plain in the same arithmetic."""
    return _kept(group) / (group.plain_bytes or 1)


def _kept(group: Group) -> int:
    return group.kept_bytes or 0


# ---- tables and pictures ---------------------------------------------------------------------------------------------


def _tables(found: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    """Yield the tables that have a row of their own; the first one also if it has only the baseline and Mesa."""
    for key, rows in _TABLES.items():
        names = [DENSE, "mesa", *(said.row.name for said in rows)]
        own = sorted((group for group in found if group.name in names), key=lambda group: names.index(group.name))
        if any(group.name in names[2:] for group in own) or (own and key == "table 1"):
            yield key, own


def _paper(group: Group) -> str:
    said = _SAID[group.name]
    accuracy = NOTHING if said.accuracy is None else f"{said.accuracy:.1f}"
    return f"{accuracy}/{NOTHING if said.memory is None else f'{100 * said.memory:.0f}'}"


_COLUMNS: tuple[Column, ...] = (
    ("row", lambda group: group.name),
    ("score", Group.score),
    ("− dense", Group.versus_dense),
    ("error", lambda group: NOTHING if group.gradient_error is None else _off(group.gradient_error)),
    ("kept", lambda group: format_bytes(group.kept_bytes or 0)),
    ("share", lambda group: f"{_share(group):.0%}"),
    ("paper", _paper),
)

#: Picture → its panels: title → the tensor of a block whose estimates it shows. There are 65 tokens, and heads have 16
#: channels.
_PICTURES: dict[str, Mapping[str, str]] = {
    "figure-7": {
        "input": ".qkv:matmul:0",
        "queries": ".scores:matmul:1",
        "keys": ".scores:matmul:0",
        "attention": ":softmax:0",
        "values": ".mix:matmul:0",
        "projection's input": ".proj:matmul:0",
    },
    "figure-8": {
        "first layer's input": ".up:matmul:0",
        "GELU's input": ".mlp:gelu:0",
        "second layer's input": ".down:matmul:0",
    },
}


def _draw(rows: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Draw α and β over training, for attention (figure 7) and feed-forward (figure 8), with a curve per group."""
    from matplotlib.figure import Figure

    ranges = next((row["ranges"] for row in rows if row.get("ranges", {}).get("steps")), None)
    if ranges is None:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for picture, tensors in _PICTURES.items():
        places = [(block, part) for block in ranges["blocks"] for part in ("alpha", "beta")]
        figure = Figure(figsize=(3.0 * len(tensors), 2.2 * len(places)), layout="constrained")
        grid = figure.subplots(len(places), len(tensors), squeeze=False, sharex=True)
        for (block, part), line in zip(places, grid, strict=True):
            for axes, (title, name) in zip(line, tensors.items(), strict=True):
                for group, values in enumerate(zip(*_of(ranges[part], block, name), strict=True)):
                    axes.plot(ranges["steps"], values, label=f"group {group + 1}")
                if part == "beta" and name.startswith(".down"):
                    axes.axhline(_GELU_MIN, color="black", linestyle=":", label="smallest GELU")
                axes.set_title(f"{title}, block {int(block.rpartition('.')[2]) + 1}", fontsize=9)
                axes.grid(alpha=0.3)
            line[0].set_ylabel({"alpha": "range α", "beta": "offset β"}[part])
        for axes in grid[-1]:
            axes.set_xlabel("step")
        grid[1][-1].legend(fontsize=7)
        drawn.append(directory / f"{picture}.png")
        figure.savefig(drawn[-1], dpi=120)
    return drawn


def _of(ranges: Mapping[str, Any], block: str, name: str) -> Any:
    """Return estimates by name. Recorded rows hold those of feed-forward itself under the name of its block."""
    return ranges.get(block + name) or ranges[block + name.replace(".mlp", "")]


_IMAGES = "CIFAR-10, vision transformer"
_TITLES = {
    "table 1": f"Mixed precision (table 1): {_IMAGES}",
    "bits": f"Fewer bits, and results computed again (not in the paper): {_IMAGES}",
    "table 2": f"Statistics per sample (table 2): {_IMAGES}",
    "table 3": f"Rounding (table 3): {_IMAGES}",
    "table 4": f"Symmetric ranges (table 4): {_IMAGES}",
    "table 5": f"Granularity (table 5): {_IMAGES}",
    "table 6": f"Decay of estimates (table 6; 0.9 in mesa): {_IMAGES}",
    "table 7": f"Operators (table 7): {_IMAGES}",
    "table 8": f"Modules (table 8): {_IMAGES}",
}


def _found(found: Sequence[Group]) -> str:
    dense, mesa = (needed(found, "vit", name) for name in (DENSE, "mesa"))
    few = [(bits, named(found, "vit", f"{bits} bits")) for bits in (4, 2)]
    fewer = "".join(
        f" {bits} bits keep {_share(group):.0%} and come to {group.score()} %." for bits, group in few if group
    )
    return (
        f"In 8 bits backward keeps {_share(mesa):.0%} of the bytes that it keeps in float32. Accuracy is "
        f"{mesa.score()} %, and {dense.score()} % without: seed by seed {mesa.versus_dense()} points.{fewer}"
    )


def _panels(found: Sequence[Group]) -> list[Panel]:
    needed(found, "vit", "mesa")
    there = (
        (label, named(found, "vit", name), name != DENSE)
        for label, name in (
            ("plain", DENSE),
            ("8 bits (Mesa)", "mesa"),
            ("8 bits, derived", "8 bits, derived"),
            ("4 bits", "4 bits"),
            ("2 bits", "2 bits"),
        )
    )
    shown = [(label, group, strong) for label, group, strong in there if group is not None]
    kept = [Bar(label, group.kept_bytes, format_bytes(_kept(group)), strong) for label, group, strong in shown]
    return [Panel("Kept for backward", "of a step's activations", kept), score_panel("Test accuracy, %", shown)]


#: Table → pictures below it.
_BELOW = {
    "table 6": (
        (
            "figure-7.png",
            "Ranges and offsets of attention's tensors over steps, a curve per group (the paper's figure 7)",
        ),
        ("figure-8.png", "Ranges and offsets of the feed-forward layers' tensors over steps (the paper's figure 8)"),
    )
}


def _few_bits(found: Sequence[Group]) -> str:
    """Return the bits of the rows that are present, in words: ``8``, or ``8, 4 and 2``."""
    there = [bits for bits, name in (("8", "mesa"), ("4", "4 bits"), ("2", "2 bits")) if named(found, "vit", name)]
    return " and ".join(part for part in (", ".join(there[:-1]), *there[-1:]) if part)


def _ran(found: Sequence[Group]) -> str:
    return (
        f"A small vision transformer learned CIFAR-10, plain and with activations kept in {_few_bits(found)} bits, "
        "in float32 and under bf16 autocast. In other rows one part of the method is changed at a time."
    )


#: Minutes that a row takes on one of two cores.
_ROW_MINUTES = 7


def _covers(found: Sequence[Group]) -> list[tuple[str, str]]:
    """Return the paper's tables and figures, each with where it is, according to the rows that are present."""

    def here(rows: Sequence[_Said]) -> str:
        there = [said for said in rows if named(found, "vit", said.row.name)]
        if not there:
            return f"not reproduced: {len(rows)} rows of --long, of {_ROW_MINUTES} minutes each"
        return "here" if len(there) == len(rows) else "here in part"

    operators, modules = here(_OPERATORS), here(_MODULES)
    single = "are in table 7" if operators == "here" else "would be table 7's"
    return [
        (
            "table 1 (ImageNet)",
            "here, with a small vision transformer on CIFAR-10; [steps](mesa_memory.md)",
        ),
        ("table 2 (statistics per sample)", here(_TABLES["table 2"])),
        ("table 3 (rounding)", "here; that rounding to the nearest does not converge on ImageNet is not tested"),
        ("table 4 (symmetric ranges)", here(_TABLES["table 4"])),
        ("table 5 (granularity)", "here, with two more: a range per channel, and groups of a fixed size"),
        ("table 6 (decay)", here(_TABLES["table 6"])),
        ("table 7 (operators)", operators),
        ("table 8 (modules)", modules),
        (
            "tables 9 and 10 (the largest model, and batch)",
            "on [a page of their own](mesa_memory.md); not reproduced: accuracies with a larger batch",
        ),
        ("table 11 (segmentation of ADE20K)", "not reproduced: neither its data nor a pre-trained Swin are here"),
        (
            "table 12 and figure 6 (ActNN)",
            "not reproduced: its published code is CUDA, and no method of this library",
        ),
        (
            "table 13 (Swin-B and Swin-L on CIFAR-100)",
            f"not reproduced: too large for two cores; single operators, which it is about, {single}",
        ),
        (
            "table 14 and figure 1 (checkpointing, mixed precision, accumulation)",
            "DeiT-Ti's memory and time, with each and with 8 bits, are [here](benchmarks.md), without accumulation",
        ),
        (
            "the authors' code (github.com/ziplab/Mesa, 8b7a0db0461d)",
            (
                "its kernel's codes are the same within a range; beyond it the kernel lacks the paper's clip: "
                "`tests/published/test_mesa.py`"
            ),
        ),
        ("figures 2 and 3", "drawings of the method"),
        ("figure 4 (activations before softmax, by head)", "not drawn; ranges by head are in figure 7"),
        (
            "figure 5 (curves of DeiT-B)",
            "not reproduced: ImageNet is out of reach; losses are in the rows' records",
        ),
        ("figures 7 and 8 (ranges over training)", "here, below table 6"),
    ]


EXPERIMENT = Experiment(
    module="mesa",
    paper="Pan et al. 2021, Mesa: a memory-saving training framework for transformers (arXiv 2111.11124)",
    titles=_TITLES,
    recipes=tuple(
        Recipe(said.row, turn=int(not said.first) + int(said.long), long=said.long) for said in _SAID.values()
    ),
    claims=_claims,
    opening=Opening(
        title="Activation memory in 8 bits (Mesa)",
        says="Does a vision transformer learn as well if what it keeps for backward is kept in 8 bits, while the "
        "forward pass stays exact? The paper says that it does as well or better, in half of the memory.",
        ran=_ran,
        found=_found,
        panels=_panels,
        covers=_covers,
    ),
    draw=_draw,
    seeds=(0, 1, 2),
    nodes=2,
    layout=Layout(tables=_tables, columns=lambda _: _COLUMNS, legend=_LEGEND, pictures=lambda key: _BELOW.get(key, ())),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
