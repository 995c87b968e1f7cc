"""Error feedback in one pass on a residual in fewer bits: each backend against the reference, and undone to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.kernels.cpu import kept
from tests.kernels.backends.common import BACKENDS, assert_all_same, assert_same, back, make, place, threads
from tests.kernels.tables import cpu, reference

if TYPE_CHECKING:
    from torch import Tensor

STORES = ["int8", "bf16"]


def residual_in(store: str, x: Tensor) -> list[Tensor | None]:
    """A residual as it is kept: codes and powers of two."""
    if store == "bf16":
        codes = torch.empty_like(x, dtype=torch.bfloat16)
        reference.keep_in_16(x, codes, seed=3)
        return [codes, None]
    codes = torch.empty_like(x, dtype=torch.int8)
    exponents = torch.empty(-(-x.numel() // kernels.STORE_GROUP), dtype=torch.int8)
    reference.keep_in_8(x, codes, exponents, seed=3)
    return [codes, exponents]


def read(codes: Tensor, exponents: Tensor | None) -> Tensor:
    if exponents is None:
        return codes.float()
    out = torch.empty(codes.numel())
    reference.read_from_8(codes, exponents, out)
    return out


def on(backend: Any, x: Tensor, held: list[Tensor | None], k: int, **options: Any) -> list[Any]:
    """What one backend finds, keeps, and leaves in the gradient's memory."""
    own = [None if value is None else place(backend, value) for value in (x, *held)]
    found = backend.compensate_kept(*own, k, **options)
    return [
        *back(found),
        *(None if value is None else value.cpu() for value in own[1:]),
        own[0].view(torch.uint8).cpu(),
    ]


def assert_undone(memory: Tensor, x: Tensor, held: list[Tensor | None]) -> None:
    taken = [None if value is None else torch.full_like(value, 1) for value in held]
    kernels.take_former(memory.view(torch.float32), *taken)
    assert_same(taken, held)


def assert_kept(x: Tensor, held: list[Tensor | None], outcome: list[Any], decay: float) -> None:
    """The largest are found, and the rest is kept within a step of its group, or of what is found."""
    _, at, values, codes, exponents, _ = outcome
    total = decay * read(*held) + x
    assert torch.equal(values, total[at])
    total[at] = 0.0
    now = read(codes, exponents)
    assert not now[at].any()
    if exponents is None:
        step = total.abs() * 2.0**-7 + 2.0**-133
    else:
        step = torch.ldexp(torch.ones(exponents.shape), exponents.int()).repeat_interleave(64)[: x.numel()]
        least = values.abs().amin()
        assert bool((step <= torch.clamp(least / 63, min=2.0**kernels.LEAST_POWER)).all())
    assert bool(((now - total).abs() <= step * (1 + 1e-4)).all())


@pytest.mark.parametrize("store", STORES)
@given(
    n=st.sampled_from([1, 3, 63, 64, 65, 100, 1000, 4096, 4160, 9000]),
    share=st.floats(0, 1),
    kind=st.sampled_from(["normal", "few-levels", "zeros", "denormal", "heavy", "around-tiny"]),
    decay=st.sampled_from([1.0, 0.9]),
    sampled=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=25, deadline=None)
def test_backends_agree(store: str, n: int, share: float, kind: str, decay: float, sampled: bool, seed: int) -> None:
    heavy = kind == "heavy"
    x, r = (make("normal" if heavy else kind, n, (seed + i) % 1000) for i in range(2))
    if heavy:
        x, r = x.sign() * (8 * x).exp2(), r.sign() * (8 * r).exp2()
    held, k = residual_in(store, r), min(n, max(1, round(share * n)))
    options = {"decay": decay, "sampled": sampled, "seed": seed, "rounding": seed ^ 5}
    outcomes = [on(backend, x, held, k, **options) for backend in (cpu, reference)]
    for outcome in outcomes:
        assert_undone(outcome[-1], x, held)
        assert outcome[0] is True
    assert_same(outcomes[0][:-1], outcomes[1][:-1])
    assert_kept(x, held, outcomes[0], decay)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("bad", [0, 1])
def test_several_are_undone_if_a_note_says_so(store: str, bad: int) -> None:
    sizes = [1, 65, 4096, 4160, 33_000]
    xs = [make("any-bits", n, seed) for seed, n in enumerate(sizes)]
    held = [residual_in(store, make("normal", n)) for n in sizes]
    for backend in BACKENDS:
        memories = [place(backend, x.clone()) for x in xs]
        own = [[None if value is None else place(backend, value) for value in pair] for pair in held]
        note = place(backend, torch.tensor([bad], dtype=torch.int32))
        backend.take_former_all_if(note, memories, [pair[0] for pair in own], [pair[1] for pair in own])
        for x, pair, before in zip(xs, own, held, strict=True):
            expected = [None if value is None else value.clone() for value in before]
            if bad:
                kernels.take_former(x, *expected)
            assert_same([None if value is None else value.cpu() for value in pair], expected)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("n", "k", "sampled"), [(65, 3, False), (4160, 60, True)])
def test_every_backend(store: str, n: int, k: int, sampled: bool) -> None:
    x, held = make("normal", n), residual_in(store, make("normal", n, 1))
    options = {"decay": 0.9, "sampled": sampled, "seed": 4, "rounding": 1 << 40}
    outcomes = [on(backend, x, held, k, **options) for backend in BACKENDS]
    assert_all_same([outcome[:-1] for outcome in outcomes])
    for outcome in outcomes:
        assert_undone(outcome[-1], x, held)


@pytest.mark.parametrize("kind", ["normal", "few-levels", "sparse"])
def test_several_tensors_are_encoded_and_kept_as_each_in_one_pass(kind: str) -> None:
    """With one launch that reads residuals, those that encode, and one that keeps what is left."""
    sizes, decay, several = [1, 65, 4160, 20_003, 4096], 0.9, {}
    xs, rs = ([make("normal" if kind == "sparse" else kind, n, n + at) for n in sizes] for at in (0, 1))
    for x, r in zip(xs, rs, strict=True):
        if kind == "sparse":  # fewer elements than are selected
            x[3:], r[3:] = 0, 0
    ks = [max(1, n // 50) for n in sizes]
    held = [residual_in("int8", r) for r in rs]
    for backend in BACKENDS:
        own, stored = place(backend, xs), place(backend, held)
        pairs = [(codes, exponents) for codes, exponents in stored]
        sums, least = place(backend, xs), place(backend, torch.zeros(len(sizes)))
        nbytes = [4 * -(-(4 * k + kernels.elias_fano_nbytes(k, n)) // 4) for k, n in zip(ks, sizes, strict=True)]
        outs = place(backend, [torch.full((each,), 0xAA, dtype=torch.uint8) for each in nbytes])
        backend.read_all(pairs, sums)
        assert backend.encode_topk_all(own, ks, outs, residuals=sums, decay=decay, least=least)
        backend.keep_all(sums, pairs, seeds=[7 + at for at in range(len(sizes))], least=least)
        several[backend.name] = back([stored, outs, least])
    assert_all_same([*several.values()])
    for at, (x, pair, k) in enumerate(zip(xs, held, ks, strict=True)):
        _, _, values, codes, exponents, _ = on(reference, x, pair, k, decay=decay, rounding=7 + at)
        stored, outs, least = several["reference"]
        assert_same(stored[at], [codes, exponents])
        assert_same(outs[at][: 4 * k].clone().view(torch.float32), values)
        assert float(least[at]) == float(values.abs().amin())


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("kind", "misleads"), [("normal", ""), ("normal", "power"), ("few-levels", ""), ("sparse", "")]
)
def test_large_tensors_on_any_number_of_threads(
    store: str, kind: str, misleads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample decides at which magnitude the pass begins, and may mislead: the result is that of the reference."""
    again, thresholds = [], kept._thresholds
    for name in ("undo", "with_all_sums"):
        call = getattr(kept._Step, name)
        monkeypatch.setattr(kept._Step, name, lambda *own, name=name, call=call: (again.append(name), call(*own))[1])
    if misleads:  # four times what the smallest that is sent is going to be
        monkeypatch.setattr(kept, "_thresholds", lambda *own: (thresholds(*own)[0], thresholds(*own)[1] + (2 << 23)))
    n, k = 300_003, 3000
    x, r = make("normal" if kind == "sparse" else kind, n), 0.1 * make("normal", n, 9)
    if kind == "sparse":
        x[100:], r[100:] = 0, 0
    held = residual_in(store, r)
    expected = on(reference, x, held, k, seed=1, rounding=2)
    for count in (1, 2):
        with threads(count):
            outcome = on(cpu, x, held, k, seed=1, rounding=2)
        assert_same(outcome[:-1], expected[:-1])
        assert_undone(outcome[-1], x, held)
    assert ("undo" in again) == ((misleads == "power" and store == "int8") or kind == "sparse")
    assert ("with_all_sums" in again) == (kind == "sparse")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("where", [0, 40_000, 99_990])
@pytest.mark.parametrize("k", [1000, 100_003])
def test_what_is_not_finite_changes_nothing(store: str, where: int, k: int) -> None:
    x, held = make("normal", 100_003), residual_in(store, make("normal", 100_003, 1))
    x[where] = torch.nan if where else -torch.inf
    for backend in (cpu, reference):
        finite, at, values, *rest = on(backend, x, held, k)
        assert (finite, at.numel(), values.numel()) == (False, 0, 0)
        assert_same(rest, [*held, x.view(torch.uint8)])


def test_what_is_kept_is_right_on_average() -> None:
    """A small rest beside one that is sent, over many seeds."""
    x = torch.zeros(128)
    x[[5, 70]] = torch.tensor([1000.0, 3.0])
    x[[6, 71]] = torch.tensor([0.0123, -0.0456])
    sums, runs = torch.zeros(128, dtype=torch.float64), 1500
    for seed in range(runs):
        outcome = on(kernels, x, residual_in("int8", torch.zeros(128)), 2, rounding=seed)
        sums += read(*outcome[3:5])
    spread = 2.0**-5 / 2 / runs**0.5  # what is kept by 1/32, so that 3 fits
    assert abs(float(sums[6]) / runs - 0.0123) < 4 * spread
    assert abs(float(sums[71]) / runs + 0.0456) < 4 * spread
    assert float(sums.sum() - sums[6] - sums[71]) == 0.0
