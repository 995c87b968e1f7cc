"""Larger models in the memory that Mesa saves (Pan et al. 2021, arXiv 2111.11124).

The paper spends the memory on larger models. Its table 9 says how much deeper, wider and larger in resolution than
DeiT-B a model may be before 32 GB are full, at a batch of 128 under mixed precision: 3.3, 2.2 and 1.5 times. Its table
10 trains DeiT-Ti with twice the batch in less memory. Here the model is the vision transformer of
:mod:`reproduce.mesa`. The ratio of the budget to what plain training takes is the paper's: 32 GB to DeiT-B's 17,691 MB
(the latter is on the authors' page, github.com/ziplab/Mesa).

Memory is measured and not computed from shapes. :func:`largest` tries sizes until one fits and the next does not. Each
trial trains three steps in a process of its own, and the whole memory of that process counts
(:func:`narrowband.bench.peaks.footprint`): model, gradients, AdamW's moments, inputs, activations, and temporary
memory.

The same command times steps (:mod:`reproduce.mesa_steps`); record and page have both.

Run ``python -m reproduce.mesa_memory`` (ten minutes on two cores, Linux), ``--quick``, ``--help``. glibc's malloc
hardly reuses memory that is freed between tensors that stay. The record was therefore made with jemalloc:
``LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=oversize_threshold:0,narenas:1,dirty_decay_ms:-1``.

Differences from the paper:

* The model is 600 times smaller than DeiT-B, and on the CPU. Nearly all of its memory is activations; DeiT-B's
  parameters, gradients and moments take a tenth. Mixed precision is bfloat16, without a loss scale.
* Memory is the resident set of a process, including what the allocator does not reuse; the paper's is the GPU's.
* Table 10 also has accuracies. Here no model is trained to the end with twice the batch.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from narrowband.activations import ActivationPolicy
from narrowband.bench.models import ViT
from narrowband.bench.peaks import footprint
from narrowband.bench.ranks import check_seed
from narrowband.bench.subjects import Subject
from narrowband.bench.ways import Way
from narrowband.errors import UnsupportedError
from narrowband.report.record import provenance, read_json, versions, write_json
from narrowband.units import NOTHING, format_bytes
from reproduce import mesa_steps
from reproduce.claims import under
from reproduce.command import RESULTS, command_line, progress, show
from reproduce.groups import Claim, claimed
from reproduce.html import write_pages
from reproduce.mesa_steps import Step
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Legend, Opening, write_results
from reproduce.tasks import VIT

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Axis", "Limit", "Options", "Step", "Trials", "build", "claims", "largest", "main", "page"]


@dataclass(frozen=True)
class Axis:
    """A dimension of the model or its input that may become larger.

    Attributes:
        name: its name on the page.
        unit: unit of its sizes.
        argument: the argument of :func:`build` that sets it.
        base: its usual value.
        grain: sizes are multiples of this.
        paper: how many times the base fits with 8 bits according to the paper's table 9; None: it is not in that table.
    """

    name: str
    unit: str
    argument: str
    base: int
    grain: int
    paper: float | None


_AXES = (
    Axis("depth", "blocks", "blocks", 5, 1, 3.3),
    Axis("width", "channels", "dim", 48, 12, 2.2),  # three heads, each a multiple of four channels wide
    Axis("resolution", "px", "image", 32, 4, 1.5),
    Axis("batch", "images", "batch", 128, 8, None),
)
_BATCH = _AXES[-1]

_MESA = ActivationPolicy(derive=False)
#: Ways to train. The two in mixed precision, as in the paper, come first; claims are about these.
_PLAIN, _EIGHT = Way("bf16", amp=True), Way("bf16, 8 bits", _MESA, amp=True)
_WAYS = (
    _PLAIN,
    _EIGHT,
    Way("bf16, 8 bits, derived", ActivationPolicy(), amp=True),
    Way("float32"),
    Way("float32, 8 bits", _MESA),
)

#: MB of the paper's GPU, and MB that plain training of DeiT-B takes. Their ratio gives the budget here.
_THEIR_BUDGET, _THEIR_PLAIN = 32 * 1024, 17_691
_TWICE = 2

#: Images in a timed step: as in training, and with ``--quick``.
_TIMED_BATCH, _QUICK_BATCH = 100, 8


def build(*, batch: int, dim: int = VIT["dim"], blocks: int = VIT["blocks"], image: int = VIT["image"]) -> Subject:
    """Return the vision transformer of :mod:`reproduce.tasks` in this size, and a batch of inputs."""
    model = ViT(**VIT | {"dim": dim, "blocks": blocks, "image": image}, fused=False)
    return model, (torch.randn(batch, 3, image, image),)


# ---- the search ------------------------------------------------------------------------------------------------------


def largest(measure: Callable[[int], int], budget: int, start: int, grain: int) -> tuple[int, dict[int, int]]:
    """Find the largest multiple of ``grain`` that is within the budget while the next multiple is not.

    Returns it, and size → bytes of all sizes that were tried. The next size to try is where a line through the two
    sizes that came nearest meets the budget; every third time it is the middle between the largest size that fits and
    the smallest that does not. So few trials are needed if bytes grow almost linearly with the size, and the search
    ends however they grow.

    Args:
        measure: size → bytes, which grow with the size.
        budget: bytes.
        start: the size to try first.
        grain: sizes are multiples of this.

    Raises:
        ValueError: not even ``grain`` is within the budget.

    Example:
        >>> largest(lambda size: 100 + 7 * size, budget=200, start=5, grain=2)
        (14, {4: 128, 6: 142, 12: 184, 14: 198, 16: 212})
    """
    tried: dict[int, int] = {}
    fits, exceeds, at = 0, 0, max(1, start // grain)
    for turn in itertools.count(1):
        tried[at] = measure(at * grain)
        if tried[at] <= budget:
            fits = at
        else:
            exceeds = at
        if exceeds == fits + 1:
            break
        most = exceeds - 1 if exceeds else 2 * fits
        guess = (fits + exceeds) // 2 if exceeds and turn % 3 == 0 else int(_met(tried, budget))
        at = min(max(guess, fits + 1), most)
    if not fits:
        raise ValueError(f"a size of {grain} takes {tried[1]} bytes, and the budget is {budget}: give more")
    return fits * grain, {size * grain: nbytes for size, nbytes in sorted(tried.items())}


def _met(tried: Mapping[int, int], budget: int) -> float:
    """Return where a line through the two nearest sizes meets the budget; with one size, a line through zero and it."""
    near = sorted(tried, key=lambda size: abs(tried[size] - budget))[:2]
    size, nbytes = near[0], tried[near[0]]
    slope = (nbytes - tried[near[1]]) / (size - near[1]) if len(near) > 1 else nbytes / size
    return size + (budget - nbytes) / slope if slope > 0 else 2 * size


# ---- what is found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """How large one axis may become within the budget.

    Attributes:
        axis: name of the axis.
        unit: unit of sizes.
        base: its usual value.
        paper: how many times the base fits according to the paper; None: it does not say.
        sizes: way → the largest size that fits.
        trials: way → pairs of size and bytes, of all sizes that were tried.
    """

    axis: str
    unit: str
    base: int
    paper: float | None
    sizes: dict[str, int]
    trials: dict[str, list[tuple[int, int]]]

    @property
    def table(self) -> str:
        """The table that this line belongs to."""
        return "limits"

    def times(self, way: str, over: str | None = None) -> float:
        """Return the largest size of a way over that of another way, or over the base."""
        return self.sizes[way] / (self.base if over is None else self.sizes[over])


@dataclass(frozen=True)
class Found:
    """All results.

    Attributes:
        budget: in bytes.
        base: way → bytes that training at the usual size takes.
        twice: bytes that training with 8 bits and twice the batch takes.
        limits: the largest sizes within the budget, one entry per axis.
        steps: times of steps, one entry per policy.
    """

    budget: int
    base: dict[str, int]
    twice: int
    limits: list[Limit] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def lines(self) -> list[Limit | Step]:
        """The lines of all tables."""
        return [*self.limits, *self.steps]


# ---- measuring -------------------------------------------------------------------------------------------------------


class Trials:
    """Measure the bytes that training takes. A trial that an earlier run finished is not repeated.

    Args:
        path: file that keeps the results, written after every trial; None: they are not kept.
        seed: of parameters and inputs.
        resume: whether to use the file's results, if they have the same seed and versions.
        tell: called after every trial with a short message about it.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        seed: int,
        resume: bool = True,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._seed, self._tell, self._lock = path, seed, tell, threading.Lock()
        self._identity = {"seed": seed, "versions": versions(), "preloaded": os.environ.get("LD_PRELOAD", "")}
        self._nbytes: dict[str, int] = {}
        if path is not None and resume and path.exists():
            earlier = read_json(path, ("identity", "nbytes"))
            if earlier["identity"] == self._identity:
                self._nbytes = earlier["nbytes"]

    def __call__(self, way: Way, argument: str, size: int) -> int:
        """Return the bytes of one trial, which runs in a process of its own if its result is not known.

        Raises:
            UnsupportedError: the system does not tell how much memory a process takes.
        """
        key = f"{way.name}, {argument} {size}"
        known = self._nbytes.get(key)
        if known is None:
            inputs = {"batch": _BATCH.base, argument: size}
            known = footprint(way, functools.partial(build, **inputs), seed=self._seed)
            if known is None:
                raise UnsupportedError("how much memory a process takes is asked of Linux: run this there")
            with self._lock:
                self._nbytes[key] = known
                if self._path is not None:
                    write_json(self._path, {"identity": self._identity, "nbytes": dict(sorted(self._nbytes.items()))})
        self._tell(f"{key}: {format_bytes(known)}")
        return known


def measure(
    axes: Sequence[Axis],
    ways: Sequence[Way],
    timed: Sequence[Way],
    *,
    trial: Trials,
    batch: int = _TIMED_BATCH,
    rounds: int,
    workers: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Found:
    """Search for sizes, and time steps.

    Args:
        axes: dimensions that may become larger.
        ways: ways to train; the first is plain, and the second has 8 bits.
        timed: ways whose steps are timed, the plain one first.
        trial: measures the memory of one size.
        batch: images in a timed step.
        rounds: timed steps of each way.
        workers: trials at a time.
        seed: of parameters and inputs.
        tell: called for every timed step with a short message about it.

    Raises:
        UnsupportedError: the system does not tell how much memory a process takes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # trials inherit this
    try:
        with ThreadPoolExecutor(workers) as pool:
            base = dict(
                zip(
                    [way.name for way in ways],
                    pool.map(lambda way: trial(way, _BATCH.argument, _BATCH.base), ways),
                    strict=True,
                )
            )
            budget = round(base[ways[0].name] * _THEIR_BUDGET / _THEIR_PLAIN)
            twice = pool.submit(trial, ways[1], _BATCH.argument, _TWICE * _BATCH.base)
            searches = {
                (axis.name, way.name): pool.submit(
                    largest, functools.partial(trial, way, axis.argument), budget, axis.base, axis.grain
                )
                for axis in axes
                for way in ways
            }
            limits = []
            for axis in axes:
                results = {way.name: searches[axis.name, way.name].result() for way in ways}
                limits.append(
                    Limit(
                        axis.name,
                        axis.unit,
                        axis.base,
                        axis.paper,
                        {name: size for name, (size, _) in results.items()},
                        {name: list(tried.items()) for name, (_, tried) in results.items()},
                    )
                )
        steps = mesa_steps.measure(timed, functools.partial(build, batch=batch), rounds=rounds, seed=seed, tell=tell)
        return Found(budget, base, twice.result(), limits, steps)
    finally:
        torch.set_num_threads(threads)


# ---- claims ----------------------------------------------------------------------------------------------------------


def claims(found: Found) -> list[Claim]:
    """Return the paper's claims, and whether they held."""
    return [*under("Memory", _of_memory(found)), *under("Time of a step", mesa_steps.claims(found.steps))]


def _of_memory(found: Found) -> Iterator[Claim]:
    for limit in found.limits:
        if limit.paper is None:
            continue
        times = limit.times(_EIGHT.name)
        figures = (
            f"{limit.base} × {times:.2f} = {limit.sizes[_EIGHT.name]} within {format_bytes(found.budget)}; plain "
            f"{limit.sizes[_PLAIN.name]}, so {limit.times(_EIGHT.name, _PLAIN.name):.2f} times as much as that"
        )
        text = f"table 9: with 8 bits {limit.axis} grows {limit.paper:g} times within the same budget"
        yield claimed(text, times >= limit.paper, figures)
    plain = found.base[_PLAIN.name]
    yield claimed(
        "table 10: 8 bits with twice the batch take less memory than plain training",
        found.twice < plain,
        f"{format_bytes(found.twice)} with {_TWICE * _BATCH.base} images, {format_bytes(plain)} plain with "
        f"{_BATCH.base}",
    )


# ---- tables and page -------------------------------------------------------------------------------------------------

_LEGEND: Legend = (
    (
        "largest that fits",
        (
            "each size was tried, by three training steps with AdamW in a process of its own, and what counts is all "
            "of its memory; the next larger one does not fit. Images are random numbers: memory and time do not depend "
            "on them"
        ),
    ),
    (
        "bf16, 8 bits, derived",
        (
            "plain under bfloat16 autocast; with 8 bits as in the paper; and with 8 bits and results of GELU and "
            "normalization computed again, narrowband's default. Then plain in float32, and with 8 bits"
        ),
    ),
    ("/bf16", "8 bits under bf16 over plain bf16; /base: the same over the size that the model has otherwise"),
    ("paper", "that of DeiT-B"),
    *mesa_steps.LEGEND,
)


def _size(heading: str, way: Way) -> Column:
    return heading, lambda limit: str(limit.sizes.get(way.name, NOTHING))


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "limits": (
        ("", lambda limit: f"{limit.axis}, {limit.unit}"),
        ("base", lambda limit: str(limit.base)),
        *map(_size, ("bf16", "8 bits", "derived", "fp32", "8 bits"), _WAYS),
        ("/bf16", lambda limit: f"{limit.times(_EIGHT.name, _PLAIN.name):.2f}×"),
        ("/base", lambda limit: f"{limit.times(_EIGHT.name):.2f}×"),
        ("paper", lambda limit: NOTHING if limit.paper is None else f"{limit.paper:g}×"),
    ),
    "steps": mesa_steps.COLUMNS,
}
_TITLES = {"limits": "The largest that fits (tables 9 and 10)", "steps": "Steps, by policy"}


def _layout(record: Mapping[str, Any]) -> Layout:
    told = {
        "limits": f"budget {format_bytes(record['found']['budget'])}: {_THEIR_BUDGET / _THEIR_PLAIN:.2f} times what "
        f"the model takes plain under bfloat16 autocast, as in the paper; AdamW, patches of {VIT['patch']} pixels, "
        f"{VIT['heads']} heads",
        "steps": f"{record['config']['batch']} images, {record['config']['rounds']} rounds, one thread",
    }
    titles = {title: key for key, title in _TITLES.items()}
    return Layout(
        tables=lambda lines: ((key, [line for line in lines if line.table == key]) for key in _TITLES),
        columns=_COLUMNS.__getitem__,
        legend=_LEGEND,
        caption=lambda title, _: f"{title}: {told[titles[title]]}",
        notes=lambda _: (),
    )


_PAPER = (
    "Pan et al. 2021, Mesa: a memory-saving training framework for transformers (arXiv 2111.11124), tables 9 and 10"
)


def _conclusion(found: Found) -> str:
    grown = "; ".join(
        f"{limit.axis} {limit.sizes[_PLAIN.name]} and {limit.sizes[_EIGHT.name]}" for limit in found.limits
    )
    step = next(step for step in found.steps if step.name == "mesa")
    return (
        f"Within {format_bytes(found.budget)}, plain training under bf16 and training with 8 bits go up to {grown}. A "
        f"step in 8 bits takes {step.ratio:.2f} times as long as a plain one in float32."
    )


def _panels(found: Found) -> list[Panel]:
    return [
        Panel(
            limit.axis.capitalize(),
            f"{limit.unit} within {format_bytes(found.budget)}",
            [Bar(way.name, limit.sizes[way.name], str(limit.sizes[way.name]), way is _EIGHT) for way in _WAYS[:2]],
        )
        for limit in found.limits
    ]


_OPENING = Opening(
    title="Larger models in the same memory (Mesa)",
    says="How much larger may a model be where 8 bits save memory? Within the same 32 GB, the paper says, 3.3 times as "
    "deep as DeiT-B or 2.2 times as wide, or with images of 1.5 times the resolution, at steps that take up to twice "
    "as long.",
    ran="The largest depth, width, resolution and batch of a small vision transformer within one budget were searched "
    "for, plain and with 8 bits. Steps of every policy were timed right after plain steps, in one process.",
    found=lambda _: "",
    panels=lambda _: (),
    covers=(
        ("table 9 (the largest depth, width and resolution)", "here, with a small vision transformer"),
        ("table 10 (twice the batch)", "its memory is here; its accuracies are not reproduced"),
        ("speeds of tables 1 to 4, 7 and 8", "here, as steps beside plain ones"),
        ("all others", "[here, or why not](mesa.md#the-papers-tables-and-figures)"),
    ),
)


def _read(record: Mapping[str, Any]) -> Found:
    told = record["found"]
    return Found(
        told["budget"],
        told["base"],
        told["twice"],
        [Limit(**limit) for limit in told["limits"]],
        [Step(**step) for step in told["steps"]],
    )


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record (the content of ``summary.json``)."""
    found = _read(record)
    opening = replace(_OPENING, found=lambda _: _conclusion(found), panels=lambda _: _panels(found))
    write_results(
        path,
        found.lines,
        _TITLES,
        claims(found) if record["claims"] else [],
        _layout(record),
        opening=opening,
        paper=_PAPER,
        record=record,
        commits=[str(record["commit"])],
    )


# ---- the command -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How large may a model be within one budget of memory, plain and with 8 bits? And how much longer are steps?

    Ten minutes on two cores. Linux only. After Ctrl-C, the same command goes on with the trials that are left.
    """

    rounds: int = 9
    """Timed steps of every policy, each right after a plain step."""
    workers: int = 2
    """Trials at a time, each in a process of its own, with one thread."""
    seed: int = 0
    """Seed of parameters and inputs."""
    output: Path | None = None
    """Directory of the result; reproduce/results/mesa_memory when left out."""
    resume: bool = True
    """Take trials that an earlier run finished; --no-resume makes them again."""
    quick: bool = False
    """The batch alone, and plain and 8 bits alone: to see that everything works. Judges nothing."""
    markdown: Path | None = None
    """Also write tables and claims to this file, for the documentation."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line("mesa_memory", Options, _run, argv, stopped="Finished trials are kept.")


def _run(options: Options, command: list[str], console: Console) -> None:
    for name in ("rounds", "workers"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    check_seed(options.seed)
    batch = _QUICK_BATCH if options.quick else _TIMED_BATCH
    record = provenance(options.seed, command)
    console.print(_PAPER, style="bold", markup=False, highlight=False)
    directory = options.output or RESULTS / "mesa_memory"
    with progress(console) as bars:
        bar = bars.add_task("searching", total=None, said="")

        def tell(said: str) -> None:
            bars.update(bar, advance=1, said=said)

        found = measure(
            _AXES[-1:] if options.quick else _AXES,
            _WAYS[:2] if options.quick else _WAYS,
            mesa_steps.timed(quick=options.quick),
            trial=Trials(directory / "trials.json", seed=options.seed, resume=options.resume, tell=tell),
            batch=batch,
            rounds=options.rounds,
            workers=options.workers,
            seed=options.seed,
            tell=tell,
        )
    said = [] if options.quick else claims(found)
    whole = record | {
        "config": {"rounds": options.rounds, "seed": options.seed, "batch": batch},
        "found": asdict(found),
        "claims": [claim.record() for claim in said],
    }
    show(console, found.lines, _TITLES, said, _layout(whole))
    written = directory / "summary.json"
    write_json(written, whole)
    write_pages(written, whole, options.markdown, page, console)


if __name__ == "__main__":
    sys.exit(main())
