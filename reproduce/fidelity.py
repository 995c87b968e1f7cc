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

With g the exact gradient of a batch and ĝ the one to compare, these figures are shares of √E‖g‖², over batches:

* the *error*, √E‖ĝ − g‖², of a single step;
* the *bias*, √E‖E[ĝ − g]‖², with the inner mean over roundings: what would remain of a batch's error if rounding were
  repeated forever and averaged. Rounding to the nearest gives the same result every time: all of its error is bias;
* what remains *over batches*, ‖E[ĝ − g]‖, with the mean over batches and roundings: what training does not average out.

The last two are squared norms of means, estimated from only m samples. The squared norm of the sample mean would
include the mean's noise. The mean inner product of two different samples does not, so it is used here. It is still
uncertain where few elements carry most of an error, and it hardly tells a small bias from none.

The yardstick is another batch: √E‖g − g′‖² for two batches. Half of its square is the noise variance σ² that every
gradient has. An error adds to the variance as a smaller batch would: the variance is inverse to the batch size.

Two rows are compared batch by batch, since every row has the same batches. The comparison is of squares, whose roots
the figures are. The margin is half of the 95 % interval of the mean difference (Student's t over batches,
:mod:`reproduce.pairs`). Error and bias are means over batches, and so have a value per batch. What remains over batches
has none; its jackknife pseudo-values are used instead (Tukey 1958, "Bias and confidence in not-quite large samples",
Annals of Mathematical Statistics 29, 614): m·θ − (m − 1)·θ₋ᵢ, with θ of all m batches and θ₋ᵢ of all but the i-th. A
claim about a difference within the margin is not resolved.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

import narrowband as nb
from narrowband.activations import Saved
from narrowband.report.record import provenance, write_json
from narrowband.units import format_bytes, format_loss
from reproduce.activations import gradient
from reproduce.claims import under
from reproduce.command import QUICK_LIMIT, command_line, progress, show
from reproduce.data import about
from reproduce.groups import Claim, claimed
from reproduce.html import write_beside
from reproduce.pairs import Finding, difference, every
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Legend, Opening, write_results
from reproduce.row import files_of
from reproduce.tasks import Task, in_words, load

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Fidelity", "Options", "Setting", "claims", "deviation", "main", "measure", "passes", "spread"]


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
_MIXED = "bf16"

_BETWEEN = "another batch"

#: Bits → noise that they may add, as a share of the variance between batches. 0.01 is as if a batch had a hundredth
#: fewer samples, which nobody would notice. 1.0 is as if it had half as many, which people choose on purpose.
_ADDED = {8: 0.01, 4: 1.0}


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


@dataclass(frozen=True)
class Fidelity:
    """Errors of gradients with one policy; or, as the yardstick, the difference to another batch's gradient.

    Errors are shares of the gradient's norm, for each place: "all"; kinds of layers ("embed", "qkv", …); "block 1" and
    so on; "behind", which is all after the blocks; and every parameter. An error is None where the exact gradient is
    zero.

    Attributes:
        task: gives the model.
        name: name of the row.
        bits: bits of the policy. This and the policy's other fields are None for the yardstick.
        norms: bits of layer norms, where they differ from ``bits``.
        granularity: what has a range of its own.
        rounding: rounding of the policy.
        plain_bytes: bytes that backward keeps of a batch without the policy.
        kept_bytes: bytes that it keeps with the policy.
        added: variance of the error, as a share of the variance between batches.
        error: error of a single gradient.
        bias: error of a batch's mean over roundings.
        over_batches: error of the mean over batches and roundings.
        amp: whether forward runs under bfloat16 autocast.
        per_batch: for each of these three figures, of the whole gradient, a value per batch; the mean of the values is
            the square of the figure. Empty for the yardstick.
    """

    task: str
    name: str
    bits: int | None
    norms: int | None
    granularity: str | None
    rounding: str | None
    plain_bytes: int | None
    kept_bytes: int | None
    added: float | None
    error: dict[str, float | None]
    bias: dict[str, float | None]
    over_batches: dict[str, float | None]
    amp: bool = False
    per_batch: dict[str, list[float]] = field(default_factory=dict)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def deviation(exact_BN: Tensor, rough_BRN: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squared norms of the errors of rough gradients, of each parameter, float64 (P,) each: of a single
    gradient, of a batch's mean over roundings, and of the mean over roundings and batches.

    The last two are unbiased estimates, and may be slightly negative. With one rounding there is no mean to take, and
    the second equals the first.

    Args:
        exact_BN: the exact gradient of each batch.
        rough_BRN: rough gradients of the same batches, one per rounding.
        sizes: number of elements of each parameter.

    Example:
        >>> exact = torch.zeros(2, 1)
        >>> rough = torch.tensor([[[3.0], [1.0]], [[3.0], [1.0]]])
        >>> [float(each) for each in deviation(exact, rough, [1])]
        [5.0, 3.0, 4.0]
    """
    missed_BRN = rough_BRN - exact_BN[:, None]
    single = torch.stack([_squares(missed_RN, sizes).mean(0) for missed_RN in missed_BRN]).mean(0)
    bias = torch.stack([_square_of_mean(missed_RN, sizes) for missed_RN in missed_BRN]).mean(0)
    return single, bias, _square_of_mean(missed_BRN.mean(1), sizes)


def spread(exact_BN: Tensor, rough_BRN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`deviation` measures, of the whole gradient and batch by batch, float64 (B,) each.

    The third figure has no value per batch; the jackknife's pseudo-values take its place.

    Args:
        exact_BN: the exact gradient of each batch.
        rough_BRN: rough gradients of the same batches, one per rounding.

    Example:
        >>> exact = torch.zeros(3, 1)
        >>> rough = torch.tensor([[[3.0], [1.0]], [[3.0], [1.0]], [[2.0], [2.0]]])
        >>> [each.tolist() for each in spread(exact, rough)]
        [[5.0, 5.0, 4.0], [3.0, 3.0, 4.0], [4.0, 4.0, 4.0]]
    """
    missed_BRN = rough_BRN - exact_BN[:, None]
    sizes = [missed_BRN.shape[-1]]
    single = torch.stack([_squares(missed_RN, sizes).mean() for missed_RN in missed_BRN])
    bias = torch.stack([_square_of_mean(missed_RN, sizes).sum() for missed_RN in missed_BRN])
    means_BN = missed_BRN.mean(1)
    whole, count = _square_of_mean(means_BN, sizes).sum(), len(means_BN)
    without = [_square_of_mean(torch.cat((means_BN[:at], means_BN[at + 1 :])), sizes).sum() for at in range(count)]
    return single, bias, count * whole - (count - 1) * torch.stack(without)


def _between(exact_BN: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return E‖g‖² and, for two different batches, E‖g − g′‖², of each parameter."""
    norms = _squares(exact_BN, sizes).mean(0)
    return norms, 2 * (norms - _square_of_mean(exact_BN, sizes))


def _square_of_mean(x_MN: Tensor, sizes: Sequence[int]) -> Tensor:
    """Estimate ‖E x‖² of each parameter from m samples, as the mean inner product of two different samples."""
    count = len(x_MN)
    own = _squares(x_MN, sizes).sum(0)
    if count == 1:
        return own
    return (_squares(x_MN.double().sum(0, keepdim=True), sizes)[0] - own) / (count * (count - 1))


def _squares(x_MN: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the squared norm of each parameter in each sample, float64 (M, P)."""
    return torch.stack([part.double().square().sum(1) for part in torch.split(x_MN, list(sizes), 1)], 1)


def _shares(squares_P: Tensor, of_P: Tensor, places: dict[str, list[int]]) -> dict[str, float | None]:
    """Return √(squares / of) for each place, summed over the place's parameters."""
    found: dict[str, float | None] = {}
    for place, own in places.items():
        square, of = (max(0.0, float(each[own].sum())) for each in (squares_P, of_P))
        found[place] = math.sqrt(square / of) if of else None
    return found


# ---- places ----------------------------------------------------------------------------------------------------------

#: Kinds of layers, by their names in the models. "embed" is all before the blocks; "norm" includes "norm1" and "norm2".
_KINDS = ("embed", "norm", "qkv", "proj", "up", "down", "head")
_EMBEDDINGS = ("tokens", "token", "positions", "patches")


def _places(names: Sequence[str]) -> dict[str, list[int]]:
    """Return place → indices of its parameters."""
    found: dict[str, list[int]] = {"all": list(range(len(names)))}
    for at, name in enumerate(names):
        module = name.removesuffix(".weight").removesuffix(".bias")
        own = module.rpartition(".")[2].rstrip("12")
        kind = "embed" if own in _EMBEDDINGS else own
        block = f"block {int(module.split('.')[1]) + 1}" if module.startswith("blocks.") else "behind"
        for place in dict.fromkeys((kind, "embed" if kind == "embed" else block, name)):
            found.setdefault(place, []).append(at)
    return found


def _blocks(found: Iterable[str]) -> list[str]:
    return ["embed", *(place for place in found if place.startswith("block ")), "behind"]


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
    places, sizes = _places([name for name, _ in named]), [p.numel() for _, p in named]
    exact_BN = gradients(nullcontext)
    norms, between = _between(exact_BN, sizes)
    if not 0 < float(norms.sum()) < math.inf:
        raise ValueError(f"{setting.task}: gradients are zero or not finite, and have nothing to be compared with")
    nothing = (None,) * 7
    rows = [Fidelity(setting.task, _BETWEEN, *nothing, _shares(between, norms, places), {}, {})]
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
                _shares(squares[0], norms, places),
                _shares(squares[1], norms, places),
                _shares(squares[2], norms, places),
                amp=variant.amp,
                per_batch={what: each.tolist() for what, each in zip(_FIGURES, by_batch, strict=True)},
            )
        )
    trained = (
        f"{sum(sizes):,} parameters, after {setting.steps} steps of {setting.batch} (loss {format_loss(loss, 2)}) with "
        f"AdamW (β {_BETAS[0]:g} and {_BETAS[1]:g}, learning rate {setting.lr:g} after a warm-up of {_WARM_UP:.0%}, "
        f"weight decay {setting.weight_decay:g})"
    )
    return trained, rows


#: Fields of :class:`Fidelity` that are figures.
_FIGURES = ("error", "bias", "over_batches")


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
        _Variant(_MIXED, _policy(bits="off"), amp=True),
        _Variant(f"{_MIXED}, 8 bits", _policy(bits=8), amp=True),
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
        (f"{_MIXED}, 8 bits", "8 bits under bfloat16, the arithmetic's own error included,", _ADDED[8]),
        ("4 bits, head, stochastic", "4 bits per head, stochastic,", _ADDED[4]),
        ("4 bits, norms 8", "4 bits, with layer norms in 8, per head, stochastic,", _ADDED[4]),
    ):
        row, yardstick = by_name[name], by_name[_BETWEEN]
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


def _layout(found: Sequence[Fidelity], trained: Mapping[str, str]) -> Layout:
    """Lay out three tables per model: the whole gradient, kinds of layers, blocks.

    Args:
        found: all rows.
        trained: title of a model's first table → how the model was trained, and how often it was measured.
    """
    columns: dict[str, tuple[Column, ...]] = {}
    for row in found:
        columns |= {
            row.task: _WHOLE,
            f"{row.task} kinds": _errors(_KINDS),
            f"{row.task} blocks": _errors(_blocks(row.error)),
        }
    return Layout(
        tables=lambda rows: ((key, [row for row in rows if row.task == key.split()[0]]) for key in columns),
        columns=columns.__getitem__,
        legend=_LEGEND,
        caption=lambda title, _: f"{title}: {trained[title]}" if title in trained else title,
        notes=lambda _: (),
    )


def _titles(title: str, task: str) -> dict[str, str]:
    return {
        task: title,
        f"{task} kinds": f"{title}: error per kind of layer",
        f"{task} blocks": f"{title}: error per block",
    }


_PAPER = "After Pan et al. 2021, Mesa (arXiv 2111.11124), section 3.2; the figures are not the paper's"

#: Task → its name in the picture; and the picture's bars: label, row.
_SHOWN = {"gpt": "GPT", "vit": "Vision transformer"}
_BARS = (
    ("another batch", _BETWEEN),
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
                Bar(label, _all(row.error), _percent(_all(row.error)), name != _BETWEEN)
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


def _trained(record: Mapping[str, Any]) -> dict[str, str]:
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
        titles |= _titles(setting["title"], setting["task"])
    layout = _layout(rows, _trained(record))
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
    output = options.output or Path(__file__).parent / "results" / "fidelity"
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
            titles |= _titles(setting.title, setting.task)
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
    show(console, found, titles, judged, _layout(found, _trained(whole)))
    written = output / "summary.json"
    write_json(written, whole)
    if options.markdown is not None:
        page(whole, options.markdown)
    console.print(f"written: {written}", style="dim", markup=False, highlight=False)
    write_beside(written, whole, console)


if __name__ == "__main__":
    sys.exit(main())
