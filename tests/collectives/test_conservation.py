"""Feedback behind every collective: what was delivered, and what is still to come, make up the sum of all gradients.

An error is given in units of one rank's gradient, whose norm is 1: the norm of (sum of what was delivered − sum of the
true means) after some steps. What is left of it must be in residuals and owners' errors, and must not grow.
"""

from __future__ import annotations

import pytest
import torch

import narrowband as nb
from narrowband.collectives import COLLECTIVES, Operand, choose, collective
from narrowband.collectives.chunked import Chunked
from narrowband.feedback import ErrorFeedback, Layout
from tests.collectives.test_exchange import average, seed_of
from tests.ranks import run_ranks
from tests.thorough import thorough

NUMEL = 1500  # chunks of groups of 128 elements: of unequal length, one of them cut short
STEPS = 200

QUANTIZERS = [
    *(f"qsgd:bits={bits}" for bits in (2, 3, 4, 8)),
    "qsgd:bits=4,norm=l2",
    *(f"uniform:bits={bits}" for bits in (1, 2, 3, 4, 8)),
    "uniform:bits=2,rounding=stochastic",
    "uniform:bits=2,symmetric=true",
    "sign",
    "fp16",
    "bf16",
]
#: Lose more than they are given: refused where means are encoded again.
NO_CONTRACTIONS = ["qsgd:bits=2", "uniform:bits=1"]
#: Residuals of these grow behind any collective.
GROWING = ["uniform:bits=1"]
#: Of each kind some, and not any number of bits.
SOME = [spec for spec in QUANTIZERS if "bits=3" not in spec and "bits=8" not in spec]
#: What is nearest to losing more than it is given, on either side of that.
DANGEROUS = [*NO_CONTRACTIONS, "uniform:bits=2,symmetric=true"]


def carries(name, codec):
    return collective(name).obstacle(codec, ErrorFeedback()) is None


def gradient(rank, step):
    generator = torch.Generator().manual_seed(step * 100 + rank)
    x = torch.randn(NUMEL, generator=generator)
    return x / x.norm()


def accumulated(rank, size, ways, steps):
    """Way → (errors after a quarter of the steps, half of them, all; less what residuals and owners' errors hold)."""
    codecs = [nb.codec(spec) for spec, _ in ways]
    feedbacks = [ErrorFeedback() for _ in ways]
    missing = torch.zeros(len(ways), NUMEL, dtype=torch.float64)
    found = {way: ([], []) for way in ways}
    for step in range(1, steps + 1):
        gradients = [gradient(r, step) for r in range(size)]
        true = torch.stack(gradients).double().mean(0)
        together: dict[tuple[str, str], list[Operand]] = {}
        for i, ((_, name), codec, feedback) in enumerate(zip(ways, codecs, feedbacks, strict=True)):
            item = Operand("p", gradients[rank].clone(), (NUMEL,), codec, feedback, seed_of(step, i), i)
            together.setdefault((name, collective(name).kind_of(codec, item.dtype)), []).append(item)
        for (name, _), items in together.items():
            average(name, items, rank, size, rotating=False)
            for item in items:
                missing[item.index] += item.x.double() - true
        if step not in (steps // 4, steps // 2, steps):
            continue
        kept = torch.zeros_like(missing)
        for i, (codec, feedback) in enumerate(zip(codecs, feedbacks, strict=True)):
            kept[i] = feedback.residual("p").double() / size
            cut = Chunked(codec, size).cut(NUMEL)[(rank + i) % size]
            own = feedback.owner_error("p", cut)
            if own is not None:
                kept[i, cut] += own.double()
        torch.distributed.all_reduce(kept)
        for i, way in enumerate(ways):
            found[way][0].append(float(missing[i].norm()))
            found[way][1].append(float((missing[i] + kept[i]).norm()))
    return found


@pytest.mark.parametrize(
    ("size", "specs", "steps"),
    [
        (3, SOME, STEPS // 4),
        (8, DANGEROUS, STEPS // 4),
        *thorough((3, QUANTIZERS, STEPS), (4, QUANTIZERS, STEPS), (8, QUANTIZERS, STEPS)),
    ],
    ids=lambda value: {id(QUANTIZERS): "all", id(SOME): "some", id(DANGEROUS): "dangerous"}.get(id(value)),
)
def test_nothing_is_lost_and_nothing_grows_but_what_says_so(size, specs, steps):
    ways = [(spec, name) for spec in specs for name in COLLECTIVES if carries(name, nb.codec(spec))]
    assert {spec for spec, name in ways if name == "scatter_reduce"} == {*specs} - {*NO_CONTRACTIONS}
    for answer in run_ranks(accumulated, size, ways, steps, timeout_s=360):
        for (spec, name), (errors, lost) in answer.items():
            # An all-reduce adds halves up in halves: nobody can know what that rounds off.
            assert max(lost) < (0.05 if name == "all_reduce" else 1e-4), (spec, name, lost)
            if name == "all_reduce":
                continue
            first, middle, last = errors
            if spec in GROWING:
                # Gathered, since means of it are not encoded again: all is still there, late, and ever more of it.
                assert name == "all_gather"
                assert first < middle < last, (spec, errors)
                assert last > 1.25 * first, (spec, errors)
                continue
            assert last < 1.25 * first + 1e-5, (spec, name, errors)
            by_gather = answer[spec, "all_gather"][0][-1]
            # One more encoding, of a mean of N: with N times the owner's error in a residual it would be 50 times.
            assert last < 2.5 * by_gather + 1e-5, (spec, name, last, by_gather)


@pytest.mark.parametrize("spec", NO_CONTRACTIONS)
def test_what_is_no_contraction_is_gathered_and_said_to_grow(spec):
    codec = nb.codec(spec)
    assert codec.lost_share > 1
    note = ErrorFeedback().note([Layout("p", codec, (NUMEL,), torch.device("cpu"))], whole=True)
    assert "the residual may grow from step to step" in note
    assert choose(codec, 1 << 30, 8, ErrorFeedback()).name == "all_gather"
    assert choose(codec, 1 << 30, 8).name == "scatter_reduce"  # without feedback nothing adds up
    assert "or more bits" in collective("scatter_reduce").obstacle(codec, ErrorFeedback())


def after_steps_without(rank, size):
    """Two steps, and then two in which no rank has a gradient: what is kept and what was delivered, after each. And
    what is missing when the next step is gathered, where nobody owns anything.
    """
    codec, feedback = nb.codec("qsgd:bits=4"), ErrorFeedback()
    cut = Chunked(codec, size).cut(NUMEL)[rank]
    seen, missing = [], torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(1, 5):
        x = gradient(rank, step) if step < 3 else torch.zeros(NUMEL)
        item = Operand("p", x, (NUMEL,), codec, feedback, seed_of(step, 0), 0)
        average("scatter_reduce", [item], rank, size, rotating=False)
        seen.append((feedback.residual("p").clone(), feedback.owner_error("p", cut).clone(), item.x.clone()))
        missing += item.x.double()
    item = Operand("p", gradient(rank, 5), (NUMEL,), codec, feedback, seed_of(5, 0), 0)
    average("all_gather", [item], rank, size, rotating=False)
    kept = feedback.residual("p").double() / size
    torch.distributed.all_reduce(kept)
    missing += item.x.double() + kept
    for step in (1, 2, 5):
        missing -= torch.stack([gradient(r, step) for r in range(size)]).double().mean(0)
    return seen, (float(missing.norm()), feedback.owner_error("p", cut))


def test_an_owner_keeps_its_error_where_no_rank_used_the_tensor():
    for (_, (residual, error, _), *unused), gathered in run_ranks(after_steps_without, 3):
        assert gathered == (pytest.approx(0.0, abs=1e-4), None)
        assert residual.any()
        assert error.any()
        for kept, owned, delivered in unused:
            assert torch.equal(kept, residual)
            assert torch.equal(owned, error)
            assert not delivered.any()


def in_half_precision(rank, size, spec, dtype, scale, steps):
    """What was delivered, and what residuals and owners' errors hold, less the true means: the largest element."""
    codec, feedback = nb.codec(spec), ErrorFeedback()
    missing = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(1, steps + 1):
        gradients = [gradient(r, step) for r in range(size)]
        gradients = [(g * (0.8 * scale / g.abs().max())).to(dtype) for g in gradients]
        x = gradients[rank].clone()
        average("scatter_reduce", [Operand("p", x, (NUMEL,), codec, feedback, seed_of(step, 0), 0)], rank, size)
        missing += x.double() - torch.stack(gradients).double().mean(0)
    kept = feedback.residual("p").double() / size
    cut = Chunked(codec, size).cut(NUMEL)[rank]
    kept[cut] += feedback.owner_error("p", cut).double()
    torch.distributed.all_reduce(kept)
    return float((missing + kept).abs().max()) / scale


HALVES = [(torch.float16, 65504.0), (torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.bfloat16, 65504.0)]


@pytest.mark.parametrize(
    ("spec", "dtype", "scale"),
    [
        ("qsgd:bits=3", *HALVES[0]),
        ("uniform:bits=2,symmetric=true", *HALVES[1]),
        ("sign", *HALVES[0]),
        ("qsgd:bits=4,norm=l2", *HALVES[1]),
        ("fp16", *HALVES[0]),
        ("fp16", *HALVES[1]),
        *thorough(*((spec, *HALVES[1]) for spec in ("qsgd:bits=3", "sign"))),
        *thorough(*((spec, *HALVES[0]) for spec in ("uniform:bits=2,symmetric=true", "qsgd:bits=4,norm=l2"))),
        *thorough(
            *(
                (spec, *half)
                for spec in ("qsgd:bits=3", "uniform:bits=2,symmetric=true", "sign", "qsgd:bits=4,norm=l2", "fp16")
                for half in HALVES[2:]
            )
        ),
    ],
)
def test_nothing_is_lost_of_gradients_in_half_precision(spec, dtype, scale):
    """Not even what rounding a mean to 16 bits takes; and no mean becomes inf when an owner's error is added to it."""
    for lost in run_ranks(in_half_precision, 3, spec, dtype, scale, 12):
        assert lost < 1e-5, lost
