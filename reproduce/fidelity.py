"""Measure how far gradients computed from activations in few bits are from the exact gradients.

Two models are trained for a short while without compression, and then stay fixed: the vision transformer of
:mod:`reproduce.mesa`, on CIFAR-10, and the GPT of :mod:`reproduce.lgreco`, on WikiText-2. Ranges are estimated over
some batches. For each of the following batches, the gradient is computed exactly, and again with these activations:

* in 8, 4 and 2 bits, with a range per head or group of channels and with one per layer, rounded at random and to the
  nearest;
* with two more kinds of ranges, rounded at random: one per channel (but for attention's operands, which have heads),
  and one per 256 neighbours, as graphs of ``torch.compile`` have;
* with layer norms in 8 bits and the rest in 4 or 2, because the first tables showed that 4 and 2 bits lose most in
  front of layer norms. A policy that does not name layer norms gives them 8 bits, too;
* under bfloat16 autocast, without compression and with 8 bits. These errors are measured against the exact gradient in
  float32, so the first one is the error of the arithmetic alone.

As in the paper, results that could be recomputed are kept, too (``derive=False``).

For each row there are three figures (:mod:`reproduce.fidelity_errors`): the error of a single step, its bias, and what
remains over batches.

Source: the method is that of Pan et al. 2021, Mesa (arXiv 2111.11124), section 3.2. The paper does not have these
figures.

Run ``python -m reproduce.fidelity`` (minutes on two cores), ``--quick`` (seconds), ``--help``.

Shapes: B batches, R roundings, N elements of a gradient, P parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

import narrowband as nb
from narrowband.activations import Saved
from narrowband.report.record import provenance, write_json
from narrowband.units import format_loss
from reproduce.activations import gradient
from reproduce.command import QUICK_LIMIT, RESULTS, command_line, progress, show
from reproduce.data import about
from reproduce.fidelity_errors import (
    BETWEEN,
    FIGURES,
    MIXED,
    Fidelity,
    between_batches,
    deviation,
    places_of,
    shares,
    spread,
)
from reproduce.fidelity_page import claims, layout_of, page, titles_of, trained_as
from reproduce.html import write_pages
from reproduce.row import files_of
from reproduce.tasks import Task, load

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "Setting", "main", "measure", "passes"]


@dataclass(frozen=True)
class Setting:
    """A model, and how it is trained before its gradients are compared.

    Attributes:
        task: gives the model and the data.
        title: title of the tables.
        batch: samples in a gradient.
        lr: AdamW's learning rate after the warm-up.
        weight_decay: AdamW's weight decay.
        steps: steps of training.
        settling: batches after training over which ranges are estimated; 0.9^30 is 4%.
        limit: use at most this many samples; None: all.
    """

    task: str
    title: str
    batch: int
    lr: float
    weight_decay: float
    steps: int = 200
    settling: int = 30
    limit: int | None = None


_SETTINGS = (
    Setting("vit", "CIFAR-10, vision transformer", batch=100, lr=2e-3, weight_decay=0.05),
    Setting("gpt", "WikiText-2 as bytes, GPT", batch=8, lr=1e-3, weight_decay=0.01),
)

#: Size of a ``--quick`` run: enough to see that everything works.
_QUICK_BATCH, _QUICK_STEPS, _QUICK_SETTLING, _QUICK_TIMES = 4, 4, 2, 2

#: AdamW's betas, and the share of training's steps over which the learning rate rises.
_BETAS = (0.9, 0.999)
_WARM_UP = 0.05

_BITS: tuple[Literal[8, 4, 2], ...] = (8, 4, 2)
_ROUNDINGS: tuple[Literal["stochastic", "nearest"], ...] = ("stochastic", "nearest")
#: Bits of everything else in rows where layer norms have 8; ranges per head, stochastic rounding.
_WITH_NORMS: tuple[Literal[4, 2], ...] = (4, 2)
_NORM = "layer_norm"

#: What has a range of its own → fields of the policy.
_PER: dict[str, dict[str, Any]] = {
    "head": {},
    "layer": {"granularity": "layer"},
    "channel": {"groups": 4096},  # more than there are channels
    "256": {"granularity": 256},
}
_ALL_BITS = ("head", "layer")
#: Bits that the other kinds of ranges are measured with. With a range per channel, a code takes a whole byte.
_SOME_BITS: dict[str, tuple[Literal[8, 4], ...]] = {"channel": (8,), "256": (8, 4)}


@dataclass(frozen=True)
class Options:
    """Measure how far gradients computed from activations in few bits are from the exact ones, for two small models.

    A gradient that is wrong by 10% may be as good as the exact one: gradients of two batches differ by far more. So
    every table begins with another batch as a yardstick, and says how much the error adds to the noise between batches.
    A bias does not average out over steps as noise does; it has columns of its own.

    Minutes on two cores. Stopped by Ctrl-C, it writes nothing.
    """

    models: tuple[str, ...] = ()
    """Only these: vit, gpt; both when left out."""
    batches: int = 8
    """Gradients that are compared; at least 2."""
    roundings: int = 4
    """How often the activations of each batch are rounded at random; at least 2."""
    seed: int = 0
    """Seed of parameters and of the order of samples."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of the result; reproduce/results/fidelity when left out."""
    quick: bool = False
    """A few steps, two batches, two roundings: to see in seconds that everything works. Judges nothing."""
    markdown: Path | None = None
    """Also write the tables and claims to this file, for the documentation."""


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(
    setting: Setting,
    *,
    batches: int,
    roundings: int,
    seed: int = 0,
    data_dir: Path | None = None,
    tell: Callable[..., None] = lambda **_: None,
) -> tuple[str, list[Fidelity]]:
    """Train a model for a short while, and compare its gradients.

    Args:
        setting: the model, and how it is trained.
        batches: number of gradients that are compared.
        roundings: how often each is rounded, where rounding is random.
        seed: seed of everything.
        data_dir: the data folder, see :mod:`reproduce.data`.
        tell: called after each of :func:`passes` passes, with ``said``: what is being done.

    Returns:
        A description of the training, for titles; and the rows: first the yardstick, then the policies.

    Raises:
        ValueError: there is less than a batch of data, or gradients are zero or not finite.
        FileNotFoundError: data is missing.
    """
    torch.manual_seed(seed)
    task = load(
        setting.task, batch=setting.batch, seed=seed, rank=0, world_size=1, directory=data_dir, limit=setting.limit
    )
    if task.steps < 1:
        raise ValueError(f"{setting.task}: there is less than one batch of {setting.batch}")
    model = task.model()
    stream = itertools.chain.from_iterable(map(task.batches, itertools.count()))
    loss = _train(model, task, setting, itertools.islice(stream, setting.steps), tell)
    settling = list(itertools.islice(stream, setting.settling))
    settled = {kind: _settled(model, *kind, settling, tell) for kind in _kinds()}
    held = list(itertools.islice(stream, batches))

    def gradients(keeping: Callable[[], AbstractContextManager[Any]], *, amp: bool = False) -> Tensor:
        found = []
        for x, y in held:
            found.append(gradient(model, task, x, y, keeping(), amp=amp))
            tell(said="gradients")
        return torch.stack(found)

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    places, sizes = places_of([name for name, _ in named]), [p.numel() for _, p in named]
    exact_BN = gradients(nullcontext)
    norms, between = between_batches(exact_BN, sizes)
    if not 0 < float(norms.sum()) < math.inf:
        raise ValueError(f"{setting.task}: gradients are zero or not finite, and have nothing to be compared with")
    nothing = (None,) * 7
    rows = [Fidelity(setting.task, BETWEEN, *nothing, shares(between, norms, places), {}, {})]
    for variant in _variants():
        keeping = _Rounded(model, variant.policy, settled.get((variant.per, variant.amp), _FRESH))
        rough_BRN = torch.stack([gradients(keeping, amp=variant.amp) for _ in range(variant.times(roundings))], 1)
        squares = deviation(exact_BN, rough_BRN, sizes)
        whole = float(norms.sum())
        by_batch = (each / whole for each in spread(exact_BN, rough_BRN))
        rows.append(
            Fidelity(
                setting.task,
                variant.name,
                variant.bits,
                variant.norms,
                variant.per if variant.bits else None,
                variant.policy.rounding if variant.bits else None,
                keeping.saved.raw_bytes,
                keeping.saved.kept_bytes,
                float(squares[0].sum() / (between.sum() / 2)),
                shares(squares[0], norms, places),
                shares(squares[1], norms, places),
                shares(squares[2], norms, places),
                amp=variant.amp,
                per_batch={what: each.tolist() for what, each in zip(FIGURES, by_batch, strict=True)},
            )
        )
    trained = (
        f"{sum(sizes):,} parameters, after {setting.steps} steps of {setting.batch} (loss {format_loss(loss, 2)}) with "
        f"AdamW (β {_BETAS[0]:g} and {_BETAS[1]:g}, learning rate {setting.lr:g} after a warm-up of {_WARM_UP:.0%}, "
        f"weight decay {setting.weight_decay:g})"
    )
    return trained, rows


def passes(setting: Setting, batches: int, roundings: int) -> int:
    """Return the number of passes that :func:`measure` makes, one per batch of training, settling or comparing."""
    compared = 1 + sum(variant.times(roundings) for variant in _variants())
    return setting.steps + len(_kinds()) * setting.settling + compared * batches


@dataclass(frozen=True)
class _Variant:
    """A way to keep activations.

    Attributes:
        name: name of the row.
        policy: the policy for activations.
        per: what has a range of its own.
        amp: whether forward runs under bfloat16 autocast.
        norms: bits of layer norms, where they differ from the policy's.
    """

    name: str
    policy: nb.ActivationPolicy
    per: str = "head"
    amp: bool = False
    norms: int | None = None

    @property
    def bits(self) -> int | None:
        """Bits of the policy; None where it is off."""
        return None if self.policy.is_off else cast("int", self.policy.bits)

    def times(self, roundings: int) -> int:
        """Return how often the gradient of a batch is computed."""
        return roundings if self.bits and self.policy.rounding == "stochastic" else 1


def _variants() -> list[_Variant]:
    def whole(bits: Literal[8, 4, 2], per: str, rounding: Literal["stochastic", "nearest"] = "stochastic") -> _Variant:
        policy = _policy(bits=bits, operators={_NORM: bits}, rounding=rounding, **_PER[per])
        name = f"{bits} bits, {per}, {rounding}" if per in _ALL_BITS else f"{bits} bits, {per}"
        return _Variant(name, policy, per)

    return [
        *itertools.starmap(whole, itertools.product(_BITS, _ALL_BITS, _ROUNDINGS)),
        *(whole(bits, per) for per, some in _SOME_BITS.items() for bits in some),
        *(_Variant(f"{bits} bits, norms 8", _policy(bits=bits, operators={_NORM: 8}), norms=8) for bits in _WITH_NORMS),
        _Variant(MIXED, _policy(bits="off"), amp=True),
        _Variant(f"{MIXED}, 8 bits", _policy(bits=8), amp=True),
    ]


def _kinds() -> list[tuple[str, bool]]:
    """Return the pairs (what has a range of its own, autocast) that need ranges estimated separately."""
    return list(dict.fromkeys((v.per, v.amp) for v in _variants() if v.bits and v.policy.learns))


#: As in the paper, results that could be recomputed are kept, too.
_policy = functools.partial(nb.ActivationPolicy, derive=False)

#: The state of a context that has seen nothing.
_FRESH: dict[str, Any] = {"estimates": {}, "seed": 0, "draws": 0}


def _train(
    model: nn.Module,
    task: Task,
    setting: Setting,
    batches: Iterable[tuple[Tensor, Tensor]],
    tell: Callable[..., None],
) -> float:
    """Train without compression, and return the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.lr, betas=_BETAS, weight_decay=setting.weight_decay, fused=True
    )
    rising = max(1, round(_WARM_UP * setting.steps))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / rising, total_iters=rising)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        warm_up.step()
        losses.append(float(loss.detach()))
        tell(said=f"training, loss {format_loss(losses[-1], 2)}")
    optimizer.zero_grad()
    last = losses[-max(1, setting.steps // 10) :]
    return sum(last) / len(last)


def _settled(
    model: nn.Module, per: str, amp: bool, batches: Sequence[tuple[Tensor, Tensor]], tell: Callable[..., None]
) -> dict[str, Any]:
    """Return the state of a context after these batches. Its estimates depend neither on bits nor on rounding."""
    context = nb.compress_activations(model, policy=_policy(**_PER[per]))
    context.load_state_dict(_FRESH)
    for x, _ in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp), context:
            model(x)
        tell(said="estimating ranges")
    return context.state_dict()


class _Rounded:
    """Make contexts that all begin with the same estimates, each with its own random roundings.

    Args:
        model: the model whose activations are compressed.
        policy: the policy for activations.
        settled: state of a context, with the estimates.

    Attributes:
        saved: what the latest context kept.
    """

    def __init__(self, model: nn.Module, policy: nb.ActivationPolicy, settled: dict[str, Any]) -> None:
        self.saved = Saved()
        self._context = nb.compress_activations(model, policy=policy)
        self._settled = settled
        self._seeds = itertools.count()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the next context."""
        self._context.load_state_dict(self._settled | {"seed": next(self._seeds), "draws": 0})
        with self._context as self.saved:
            yield


# ---- the command -----------------------------------------------------------------------------------------------------

_HEADING = "How far activations in few bits take gradients from the exact ones"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line("fidelity", Options, _run, argv, stopped="Nothing was written.")


def _chosen(options: Options) -> list[Setting]:
    """Return the settings to measure.

    Raises:
        ValueError: an option is invalid.
    """
    there = [setting.task for setting in _SETTINGS]
    for name in options.models:
        if name not in there:
            raise ValueError(f"fidelity has no {name!r}; there are: {', '.join(there)}")
    for what in ("batches", "roundings"):
        if getattr(options, what) < 2:
            raise ValueError(f"--{what} {getattr(options, what)}: means need at least 2")
    settings = [setting for setting in _SETTINGS if setting.task in (options.models or there)]
    if not options.quick:
        return settings
    return [
        replace(
            setting, batch=_QUICK_BATCH, steps=_QUICK_STEPS, settling=_QUICK_SETTLING, limit=QUICK_LIMIT[setting.task]
        )
        for setting in settings
    ]


def _run(options: Options, command: list[str], console: Console) -> None:
    settings = _chosen(options)
    output = options.output or RESULTS / "fidelity"
    batches, roundings = (_QUICK_TIMES,) * 2 if options.quick else (options.batches, options.roundings)
    record = provenance(options.seed, command)
    console.print(_HEADING, style="bold")
    found: list[Fidelity] = []
    titles: dict[str, str] = {}
    told: dict[str, str] = {}
    with progress(console) as bars:
        for setting in settings:
            bar = bars.add_task(setting.title, total=passes(setting, batches, roundings), said="")
            trained, rows = measure(
                setting,
                batches=batches,
                roundings=roundings,
                seed=options.seed,
                data_dir=options.data_dir,
                tell=functools.partial(bars.update, bar, advance=1),
            )
            found += rows
            titles |= titles_of(setting.title, setting.task)
            told[setting.task] = trained
    judged = [] if options.quick else claims(found)
    files = [file for setting in settings for file in files_of(setting.task)]
    whole = record | {
        "data": about(files, options.data_dir),
        "settings": [asdict(setting) for setting in settings],
        "trained": told,
        "batches": batches,
        "roundings": roundings,
        "claims": [claim.record() for claim in judged],
        "rows": [asdict(row) for row in found],
    }
    show(console, found, titles, judged, layout_of(found, trained_as(whole)))
    written = output / "summary.json"
    write_json(written, whole)
    write_pages(written, whole, options.markdown, page, console)


if __name__ == "__main__":
    sys.exit(main())
