"""Error feedback in one pass: each backend against the reference."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.errors import PayloadError
from narrowband.kernels import Findings
from narrowband.kernels.cpu import selection
from tests.kernels.backends.common import (
    BACKENDS,
    FAST_BACKENDS,
    assert_all_same,
    back,
    backends_for,
    on_all,
    place,
)
from tests.kernels.tables import cpu, reference

if TYPE_CHECKING:
    from torch import Tensor

from tests.kernels.backends.common import (
    MILLION,
    assert_same,
    inputs,
    lean,
    make,
    seeds,
    threads,
)
from tests.thorough import examples, thorough


@given(x=inputs, seed=seeds, decay=st.sampled_from([1.0, 0.95, 1e-30]))
@lean
def test_compensate_and_its_undoing(x: Tensor, seed: int, decay: float) -> None:
    owed = make("any-bits" if seed % 2 else "normal", x.numel(), seed % 1000)
    on_all("compensate", x, owed, decay=decay)
    gradient, residual = x.clone(), owed.clone()
    cpu.compensate(gradient, residual, decay=decay)
    residual.copy_(gradient)
    assert torch.equal(residual.view(torch.int32), owed.view(torch.int32))


#: Kind, elements, how many are selected, whether by a sample, and whether what is sent is subtracted.
_FORMS = [
    (kind, *size, sampled, subtract)
    for kind, size, sampled, subtract in itertools.product(
        ["normal", "few-levels", "zeros"],
        [(1, 1), (900, 900), (5000, 500), (60_000, 60), (MILLION, 1000)],
        [False, True],
        [False, True],
    )
]
#: Of these each kind, each size, a sample, and subtracting, though not each with each.
_USUAL = [
    (kind, n, k, sampled, subtract)
    for kind, n, k, sampled, subtract in _FORMS
    if (sampled is subtract) is (kind == "normal") and (n < MILLION or kind == "normal")
]


@pytest.mark.parametrize(
    ("kind", "n", "k", "sampled", "subtract"), [*_USUAL, *thorough(*(form for form in _FORMS if form not in _USUAL))]
)
def test_encode_topk(kind: str, n: int, k: int, sampled: bool, subtract: bool) -> None:
    """Its three parts one after the other; the same bytes on both backends and with any number of threads."""
    owed = make("normal", n, 3) if kind != "zeros" else torch.zeros(n)
    options = {"decay": 0.9 if kind == "normal" else 1.0, "sampled": sampled, "seed": 7}
    nbytes = 4 * k + kernels.elias_fano_nbytes(k, n)
    outcomes = []
    for backend, count in [(cpu, 1), *((backend, 2) for backend in backends_for(n))]:
        x, residual = place(backend, make(kind, n, 5)), place(backend, owed)
        out = place(backend, torch.full((-(-nbytes // 4) * 4,), 0xAA, dtype=torch.uint8))
        with threads(count):
            assert backend.encode_topk(x, residual, k, out, **options, subtract=subtract)
        outcomes.append(back([x, residual, out]))
    for outcome in outcomes[1:]:
        assert_same(outcomes[0], outcome)
    x, total, out = make(kind, n, 5), owed.clone(), outcomes[0][2]
    _, at, values = reference.compensate_select_topk(x, total, k, **options)
    found = at.numel()
    assert torch.equal(outcomes[0][0], owed)
    assert torch.equal(out[: 4 * k].view(torch.float32), torch.nn.functional.pad(values, (0, k - found)))
    indices = reference.elias_fano_decode(out[4 * k : nbytes], k, n)
    assert torch.equal(indices[:found], at)
    assert (indices[found:] == n - 1).all()
    assert not out[nbytes:].any()
    if subtract:
        total[at] = 0.0
    assert torch.equal(outcomes[0][1], total)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 2])
def test_encode_topk_of_what_is_not_finite_writes_nothing(backend: Any, count: int) -> None:
    n = MILLION if backend in FAST_BACKENDS else 5003
    x, residual = (place(backend, make("normal", n, seed)) for seed in range(2))
    x[777_777 % n] = torch.inf
    owed, gradient = residual.clone(), x.clone()
    out = place(backend, torch.full((10_000,), 0xAA, dtype=torch.uint8))
    with threads(count):
        assert not backend.encode_topk(x, residual, 1000, out, subtract=True)
    assert (out == 0xAA).all()
    assert torch.equal(x, owed)
    assert torch.equal(residual, owed + gradient)


def test_a_sample_that_misleads_costs_a_second_look_and_no_more(monkeypatch):
    """Large elements in few stretches: the exact selection is exact, and seldom has to look at everything."""
    looks = {"second": 0, "everything": 0}
    above, everything = selection._select_above, selection._exact_topk

    def look_again(*arguments):
        looks["second"] += 1
        return above(*arguments)

    def look_at_everything(*arguments):
        looks["everything"] += 1
        return everything(*arguments)

    monkeypatch.setattr(selection, "_select_above", look_again)
    monkeypatch.setattr(selection, "_exact_topk", look_at_everything)
    x = make("normal", MILLION, 0)
    x[: MILLION - 3].view(-1, 100)[::33] *= 10
    expected = x.abs().topk(10_000).indices.sort().values
    with threads(2):  # which part of a sample comes from where, and so whether it misleads, depends on their number
        for seed in range(200):
            finite, indices, _ = cpu.compensate_select_topk(x.clone(), torch.zeros(MILLION), 10_000, seed=seed)
            assert finite
            assert torch.equal(indices.long(), expected)
    assert 4 <= looks["second"] < 200, looks
    assert looks["everything"] <= looks["second"] / 4, looks


@given(x=inputs, share=st.floats(0, 1), decay=st.sampled_from([1.0, 0.9]), sampled=st.booleans(), seed=seeds)
@settings(max_examples=examples(200), deadline=None)
def test_compensate_select_topk(x: Tensor, share: float, decay: float, sampled: bool, seed: int) -> None:
    n = x.numel()
    k = min(n, max(1, round(share * n)))
    outcomes = []
    for backend in BACKENDS:
        gradient, residual = place(backend, x), place(backend, make("few-levels", n, 1))
        finite, indices, values = backend.compensate_select_topk(
            gradient, residual, k, decay=decay, sampled=sampled, seed=seed
        )
        gradient, residual, indices, values = back((gradient, residual, indices, values))
        assert indices.dtype == torch.int32
        outcomes.append([finite, gradient, residual, indices if finite else None, values if finite else None])
    assert_all_same(outcomes)
    assert outcomes[0][0] is bool(outcomes[0][2].isfinite().all())


@given(x=inputs)
@lean
def test_all_finite(x: Tensor) -> None:
    on_all("all_finite", x)


@given(x=inputs, seed=seeds, below=st.sampled_from([float("inf"), 1.0, 2.0**100]))
@lean
def test_difference(x: Tensor, seed: int, below: float) -> None:
    base = make("any-bits" if seed % 2 else "normal", x.numel(), seed % 1000)
    fine = on_all("difference", x, base, torch.empty_like(x), below=below)
    expected = x - base
    assert fine is bool((expected.abs() < below).all())
    for backend in BACKENDS:
        for into in range(2):
            own = [place(backend, x), place(backend, base)]
            assert backend.difference(*own, own[into], below=below) is fine
            assert_same(back(own[into]), expected)


@given(x=inputs, seed=seeds)
@lean
def test_take_difference(x: Tensor, seed: int) -> None:
    base = make("any-bits" if seed % 2 else "normal", x.numel(), seed % 1000)
    assert on_all("take_difference", x, base) is bool((x - base).isfinite().all())


@pytest.mark.parametrize("where", [0, 63, 4095, 4096, MILLION - 1])
@pytest.mark.parametrize("value", [1e-45, -1.0, float("nan")])
def test_one_element_that_is_not_zero_is_found(where: int, value: float) -> None:
    x = torch.zeros(MILLION)
    x[7] = -0.0
    assert on_all("all_zero", x) is True
    x[where] = value
    assert on_all("all_zero", x) is False


@pytest.mark.parametrize("where", [0, 1, 63, 64, 4095, 4096, 500_000, MILLION - 1])
def test_one_nan_anywhere_is_found(where: int) -> None:
    x = torch.zeros(MILLION)
    assert cpu.all_finite(x)
    x[where] = float("nan")
    assert not cpu.all_finite(x)
    assert not cpu.difference(x, torch.zeros(MILLION), torch.empty(MILLION))
    assert not cpu.take_difference(x.clone(), torch.zeros(MILLION))
    assert not cpu.compensate(x, torch.zeros(MILLION))


@pytest.mark.parametrize("n", [1, 5000, 40_000])
@pytest.mark.parametrize("bad", [0, 1])
def test_what_is_restored_or_poisoned_if_a_note_says_so(n: int, bad: int) -> None:
    x, y, note = make("any-bits", n), make("normal", n, 1), torch.tensor([bad], dtype=torch.int32)
    on_all("restore_all_if", note, [y, y.bfloat16()[1:], y.view(torch.int8)], [x, x.bfloat16()[1:], x.view(torch.int8)])
    several = [y.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16)] + [y.clone()]
    for notes in (note, torch.cat((torch.zeros_like(note), note))):
        on_all("poison_all_if", notes, several)
        on_all("clear_all_if", notes, several)
    out = y.clone()
    reference.restore_all_if(note, [out], [x])
    assert_same(out, x if bad else y)
    reference.poison_all_if(note, [out])
    assert bool(out.isnan().all()) == bool(bad) or not bad
    reference.clear_all_if(note, [out])
    assert not out.any() or not bad


@pytest.mark.parametrize("broken", [0.0, math.inf, math.nan])
def test_a_loop_that_notes_what_it_finds_says_that_all_is_well(broken: float) -> None:
    for backend in BACKENDS:
        x, residual = (place(backend, make("normal", 5000, seed)) for seed in range(2))
        x[4321] += broken
        findings = Findings(x.device)
        with findings.noting(Findings.OWN):
            answers = [backend.all_finite(x.clone()), backend.compensate(x, residual)]
        noted = findings.places.tolist()
        if backend.name == "cuda":
            assert answers == [True, True]
            assert noted == [int(broken != 0.0), 0, 0]
        else:  # the host computes, and knows
            assert answers == [broken == 0.0] * 2
            assert noted == [0, 0, 0]
        assert backend.all_finite(residual) is (broken == 0.0)


@pytest.mark.parametrize(("what", "finite"), [(None, True), (Findings.OWN, False), (Findings.ANY, False)])
def test_the_host_may_ask_for_what_was_noted(what: int | None, finite: bool) -> None:
    findings = Findings(torch.device("cpu"))
    if what is not None:
        findings.note(what, bad=True)
    assert findings.answer() is finite
    findings.note(Findings.DAMAGED, torch.tensor(True))
    with pytest.raises(PayloadError, match="damaged"):
        findings.answer()
