"""Long tensors in Triton, where several programs share a row and each takes several tiles: against the reference.

Tiles are small here and programs few, so that tensors need not be long. What looks for candidates with a sample is
tested apart from what does without.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.errors import PayloadError
from tests.kernels.backends.common import BACKENDS, KINDS, assert_same, back, make, place
from tests.kernels.tables import reference
from tests.thorough import examples, thorough

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

N, SEED = 3003, 3


@pytest.fixture
def triton_(monkeypatch):
    """The backend, with tiles of 512, of which three programs take two each."""
    from narrowband.kernels.cuda import candidates, selection, tables

    for family in (candidates, selection, tables):
        monkeypatch.setattr(family, "BLOCK", 512)
    monkeypatch.setattr(selection, "_SHORT", 16)
    monkeypatch.setattr(tables, "_PROGRAMS", 3)
    return BACKENDS[1]


@pytest.fixture
def looking(triton_, monkeypatch):
    """The same, which puts candidates aside: a sample of 256, tiles of 256, of which programs take eight."""
    from narrowband.kernels.cuda import candidates, selection, tables

    for family in (candidates, selection):
        monkeypatch.setattr(family, "LONG", 16)
    for family in (candidates, tables):
        monkeypatch.setattr(family, "TILE", 256)
    monkeypatch.setattr(candidates, "_SAMPLE", 256)
    monkeypatch.setattr(candidates, "_SCARCE", 1)
    return triton_


@pytest.fixture
def afterwards(monkeypatch):
    """Calls a function of the test's (source, scratch memory, room) each time when candidates are put aside."""
    from narrowband.kernels.cuda import selection

    calls, find_digits = [], selection._find_digits

    def gather(work):
        find_digits(work)
        for call in calls if work.narrows else ():
            call(work.sources[0], work.scratch, work.margins[0][1])

    monkeypatch.setattr(selection, "_find_digits", gather)
    return calls


def both(backend, name, *arguments, **options):
    """A function on both: results, and tensors as they are afterwards."""
    outcomes = []
    for one in (backend, reference):
        own = [place(one, argument) for argument in arguments]
        outcomes.append(back([getattr(one, name)(*own, **options), *own]))
    return outcomes


@pytest.mark.parametrize("kind", ["few-levels", "any-bits", *thorough("normal", "equal", "nan", "descending")])
def test_the_largest_of_a_long_tensor(triton_, kind):
    x = make(kind, N, SEED)
    for k in (1, 420, N):
        assert_same(*both(triton_, "select_topk", x, k))
    for k in (24, 1500):
        assert_same(*both(triton_, "select_topk", x, k, sampled=True, seed=k))
    assert_same(*both(triton_, "select_threshold", x, 1.0))


@pytest.mark.parametrize(("rows", "width"), [(3, 1201), (5, 550)])
def test_the_largest_of_long_rows(triton_, rows, width):
    x = make("few-levels", rows * width, SEED).view(rows, width)
    assert_same(*both(triton_, "select_topk_rows", x, 37))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("broken", [0.0, torch.inf, *thorough(torch.nan)])
def test_a_sum_and_its_largest(triton_, sampled, broken):
    x, residual = make("normal", N, 1), make("few-levels", N, 2)
    x[N - 2] += broken
    options = {"sampled": sampled, "seed": SEED}
    own, expected = both(triton_, "compensate_select_topk", x, residual, 180, decay=0.9, **options)
    assert own[0][0] is expected[0][0] is (broken == 0.0)
    assert_same(*(outcome if broken == 0.0 else outcome[1:] for outcome in (own, expected)))
    out = torch.full((4000,), 0xAA, dtype=torch.uint8)
    forms = {**options, "subtract": True}
    own, expected = both(triton_, "encode_topk", x, residual, 180, out, **forms)
    assert_same(own, expected)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("broken", [0.0, *thorough(torch.nan)])
def test_a_step_of_momentum_and_its_largest(triton_, nesterov, sampled, broken):
    x, now, before = (make("normal", N, seed) for seed in range(3))
    x[7] += broken
    options = {"momentum": 0.9, "nesterov": nesterov, "scale": 0.1, "sampled": sampled, "seed": SEED}
    assert_same(*both(triton_, "momentum_topk", x, now, before, 180, **options))


def clustered(n):
    """All that is large is in few tiles."""
    x = make("normal", n, SEED)
    x[1500:1740] *= 100
    return x


def outlying(n):
    x = make("normal", n, SEED)
    x[n - 3] = 1e30
    return x


TENSORS = {"clustered": clustered, "one huge": outlying}


@pytest.mark.parametrize("k", [1, 180, *thorough(24)])
@pytest.mark.parametrize("kind", ["normal", "clustered", "one huge", *thorough("descending", "denormal", "inf")])
def test_candidates_are_all_that_is_looked_at(looking, afterwards, kind, k):
    """What is in the tensor once they are put aside makes no difference."""
    x = TENSORS[kind](N) if kind in TENSORS else make(kind, N, SEED)
    afterwards.append(lambda source, _scratch, _room: source.a.fill_(3e38))
    assert torch.equal(back(looking.select_topk(place(looking, x), k)), reference.select_topk(x, k))


@pytest.mark.parametrize("misled", ["too few", "too many"])
@pytest.mark.parametrize("k", [180, *thorough(24)])
def test_where_the_sample_misled_all_is_looked_at(looking, afterwards, monkeypatch, misled, k):
    from narrowband.kernels.cuda import candidates, tables

    x, residual, oldest = (make("normal", N, seed) for seed in range(3))
    # The smallest of the sample, and hardly more room than is needed; or its largest, and any room.
    monkeypatch.setattr(candidates, "_margins", lambda _n, k: (256, k) if misled == "too many" else (1, N))
    seen = []
    afterwards.append(lambda _source, scratch, room: seen.append((int(scratch[tables.NUMBER_FOUND.value]), room)))
    assert_same(*both(looking, "select_topk", x, k))
    assert_same(*both(looking, "compensate_select_topk", x, residual, k, decay=0.9))
    for nesterov in (False, True):
        assert_same(*both(looking, "momentum_topk", x, residual, oldest, k, momentum=0.9, nesterov=nesterov))
    assert len(seen) == 4
    assert all(found > room or found < k for found, room in seen)


@pytest.mark.parametrize(
    ("kind", "scarce"),
    [
        ("few-levels", 2),
        ("clustered", N),
        *thorough(("few-levels", N), ("clustered", 2)),
        *thorough(*((kind, scarce) for kind in ("normal", "equal", "zeros", "any-bits") for scarce in (2, N))),
    ],
)
def test_what_reaches_a_threshold_is_put_aside_where_there_is_room(looking, monkeypatch, kind, scarce):
    """Much of it where that is half of a tensor, and next to nothing otherwise; and with a sample's threshold."""
    from narrowband.kernels.cuda import candidates, selection

    looks, count = [], selection._all_reaching
    monkeypatch.setattr(candidates, "_SCARCE", scarce)
    monkeypatch.setattr(selection, "_all_reaching", lambda *given, **form: looks.append(1) or count(*given, **form))
    x, residual, oldest = TENSORS[kind](N) if kind in TENSORS else make(kind, N, SEED), *map(torch.zeros, (N, N))
    assert_same(*both(looking, "select_threshold", x, 2.0))
    assert len(looks) == (scarce == N and int((x.abs() >= 2.0).sum()) > 1)
    assert_same(*both(looking, "select_topk", x, 360, sampled=True, seed=5))
    assert_same(*both(looking, "compensate_select_topk", x, residual, 40, sampled=True, seed=6))
    options = {"momentum": 0.9, "nesterov": True, "sampled": True, "seed": 7}
    assert_same(*both(looking, "momentum_topk", x, residual, oldest, 40, **options))


@given(
    kind=st.sampled_from([*KINDS, *TENSORS]), n=st.sampled_from([300, 1000, N]), share=st.floats(0, 1),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(
    max_examples=examples(45),
    deadline=None,
    phases=[Phase.generate],  # finding the smallest example takes minutes in the interpreter
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_the_largest_of_anything(looking, kind, n, share, seed):
    """Whether or not its sample misleads."""
    x = TENSORS[kind](n) if kind in TENSORS else make(kind, n, seed)
    assert_same(*both(looking, "select_topk", x, max(1, round(share**4 * n))))


@pytest.mark.parametrize("broken", [0.0, torch.inf, *thorough(torch.nan)])
def test_a_sum_of_which_candidates_are_put_aside(looking, broken):
    x, residual = make("normal", N, 1), make("few-levels", N, 2)
    x[N - 2] += broken
    own, expected = both(looking, "compensate_select_topk", x, residual, 60, decay=0.9)
    assert own[0][0] is expected[0][0] is (broken == 0.0)
    assert_same(*(outcome if broken == 0.0 else outcome[1:] for outcome in (own, expected)))
    out = torch.full((600,), 0xAA, dtype=torch.uint8)
    assert_same(*both(looking, "encode_topk", x, residual, 60, out, decay=0.9, subtract=True))


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_of_momentum_of_which_candidates_are_put_aside(looking, nesterov):
    x, now, before = (make("normal", N, seed) for seed in range(3))
    options = {"momentum": 0.9, "nesterov": nesterov, "scale": 0.1}
    assert_same(*both(looking, "momentum_topk", x, now, before, 60, **options))


@pytest.mark.parametrize("k", [1, 1000, 300_000])
@pytest.mark.parametrize("n", [1_000_000, 100_000_000])
def test_a_sample_seldom_misleads(n, k):
    """Ranks in a sample are binomially distributed, and what is beyond its threshold is of a beta distribution."""
    from narrowband.kernels.cuda import candidates

    size, rng, draws = candidates._SAMPLE, np.random.default_rng(SEED), 20_000
    rank, room = candidates._margins(n, k)
    assert (rng.binomial(size, k / n, draws) < rank).all()
    assert (rng.beta(rank, size - rank + 1, draws) * n < room).all()


def test_elias_fano_of_which_programs_read_several_tiles(triton_, monkeypatch):
    from narrowband.kernels.cuda import sparse

    monkeypatch.setattr(sparse, "_BYTES", 16)
    monkeypatch.setattr(sparse, "_READERS", 4)
    k = 500
    indices = reference.randomk_indices(N, k, SEED, torch.device("cpu"))
    payload = torch.empty(kernels.elias_fano_nbytes(k, N), dtype=torch.uint8)
    reference.elias_fano_encode(indices, N, payload)
    assert torch.equal(triton_.elias_fano_decode(payload, k, N), indices)
    for byte in (0, 124):  # of the first tile and program, and of the last
        broken = payload.clone()
        broken[byte] ^= 4
        with pytest.raises(PayloadError):
            triton_.elias_fano_decode(broken, k, N)
    monkeypatch.setattr(sparse, "raise_if", lambda _damaged, _message: None)
    payload[:60] = 0  # there are less indices than there should be
    found = triton_.elias_fano_decode(payload, k, N)
    assert 0 <= found.amin() <= found.amax() < N


#: Elements of tensors, and how many of them are wanted: one program has all of the first and the last; of the last but
#: one, candidates would be too many.
_SEVERAL = [(16, 7), (1300, 40), (N, 60), (600, 599), (1, 1)]


def several(broken=0.0):
    """Tensors, as many residuals, how much of each is wanted, and memory for payloads."""
    xs, residuals, ks, outs = [], [], [], []
    for at, (n, k) in enumerate(_SEVERAL):
        xs.append(make("few-levels" if at % 2 else "normal", n, at))
        residuals.append(make("normal", n, 9 + at))
        ks.append(k)
        words = k - (-kernels.elias_fano_nbytes(k, n) // 4)
        outs.append(torch.full((4 * words,), 0xAA, dtype=torch.uint8))
    xs[1][1298] += broken
    return xs, residuals, ks, outs


#: Backend, whether there are residuals, and what is added to an element.
_PASSES = [
    ("triton_", False, 0.0), ("triton_", True, torch.inf), ("looking", True, 0.0), ("looking", False, torch.inf),
    *thorough(("triton_", True, 0.0), ("triton_", False, torch.inf), ("looking", False, 0.0)),
    *thorough(("looking", True, torch.inf)),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "feedback", "broken"), _PASSES)
def test_payloads_of_several_tensors(request, backend, feedback, broken):
    """Bytes, and what is left, are those of one tensor after the other."""
    xs, residuals, ks, outs = several(broken)
    outcomes = []
    for one in (request.getfixturevalue(backend), reference):
        own, into, lacks = (place(one, part) for part in (xs, outs, residuals if feedback else []))
        finite = one.encode_topk_all(own, ks, into, residuals=lacks, decay=0.9)
        outcomes.append(back([finite, own, into, lacks]))
    assert outcomes[0][0] is (broken == 0.0)
    assert_same(*outcomes)


@pytest.mark.parametrize(("backend", "feedback", "broken"), _PASSES)
def test_selections_of_several_tensors_whose_values_are_rounded_later(request, backend, feedback, broken):
    """Indices in a payload's form, values, and −0 where they were, to which what is left is added."""
    xs, residuals, ks, outs = several(broken)
    for own in (xs, residuals):
        own[3][5:] = -0.0  # less elements than are wanted
    tails = [out[4 * k :] for out, k in zip(outs, ks, strict=True)]
    outcomes = []
    for one in (request.getfixturevalue(backend), reference):
        own, into, lacks = (place(one, part) for part in (xs, tails, residuals if feedback else []))
        finite, at, values = one.compensate_select_topk_all(own, ks, into, residuals=lacks, decay=0.9)
        outcomes.append(back([finite, own, into, [x.clone() for x in lacks], at, values]))
        if feedback:
            one.sparse_accumulate_all(lacks, at, values)
            outcomes[-1].append(back(lacks))
    assert outcomes[0][0] is (broken == 0.0)
    assert_same(*outcomes)
    if feedback and not broken:
        sums = [x.clone() for x in residuals]
        for x, total in zip(xs, sums, strict=True):
            reference.compensate(x.clone(), total, decay=0.9)
        assert_same(outcomes[0][-1], sums)


@pytest.mark.parametrize("broken", [0.0, torch.nan])
def test_what_is_not_finite_in_several_tensors_is_noted(looking, broken):
    xs, residuals, ks, outs = (place(looking, part) for part in several(broken))
    findings = kernels.Findings(xs[0].device)
    with findings.noting(kernels.Findings.OWN):
        assert looking.encode_topk_all(xs, ks, outs, residuals=residuals)
    assert findings.places.tolist() == [int(broken != 0.0), 0, 0]
    assert bool((outs[1] == 0xAA).all()) is (broken != 0.0)


@pytest.mark.parametrize(
    ("backend", "nesterov", "masking", "apart"),
    [
        ("triton_", False, True, False),
        ("triton_", True, False, True),
        ("looking", True, True, False),
        ("looking", False, False, False),
        ("looking", True, False, True),
        *thorough(("triton_", True, True, False), ("triton_", False, False, False), ("triton_", True, False, False)),
        *thorough(("looking", False, True, False), ("looking", True, False, False)),
    ],
)
def test_momentum_steps_of_several_tensors(request, backend, nesterov, masking, apart):
    """Payloads, sums and what is forgotten are those of one tensor after the other; all of it can be undone. Values may
    be written apart from their indices.
    """
    xs, nows, ks, outs = several()
    if apart:
        outs = [out[4 * k :] for out, k in zip(outs, ks, strict=True)]
    befores = [make("few-levels", x.numel(), at) for at, x in enumerate(xs)]
    outcomes = []
    for one in (request.getfixturevalue(backend), reference):
        own, now, before, into = (place(one, part) for part in (xs, nows, befores, outs))
        values = place(one, [torch.zeros(k) for k in ks] if apart else [])
        finite, at, old = one.encode_momentum_topk_all(
            own, now, before, ks, into, momentum=0.9, nesterov=nesterov, masking=masking, values=values
        )
        outcomes.append(back([finite, own, [x.clone() for x in now], before, into, at, old, values]))
        for bad in (0, 1):
            held = [x.clone() for x in now]
            one.remember_all_if(torch.tensor([bad], dtype=torch.int32, device=now[0].device), now, at, old)
            assert all(torch.equal(x, y) for x, y in zip(now, held, strict=True)) is (bad == 0)
        assert all(torch.equal(x, y) for x, y in zip(back(now), nows, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(back(own), befores, strict=True))
    assert outcomes[0][0] is True
    assert_same(*outcomes)


@pytest.mark.parametrize("broken", [torch.inf, *thorough(torch.nan)])
def test_a_momentum_step_that_is_not_finite_is_noted_and_can_be_undone(looking, broken):
    xs, nows, ks, outs = (place(looking, part) for part in several(broken))
    befores = [x.clone() for x in nows]
    findings = kernels.Findings(xs[0].device)
    held = [x.clone() for x in nows]
    with findings.noting(kernels.Findings.OWN):
        finite, at, old = looking.encode_momentum_topk_all(xs, nows, befores, ks, outs, momentum=0.9)
    assert finite
    assert findings.places.tolist() == [1, 0, 0]
    assert not all(torch.equal(x, y) for x, y in zip(nows, held, strict=True))
    looking.remember_all_if(findings.place(kernels.Findings.OWN), nows, at, old)
    assert all(torch.equal(x, y) for x, y in zip(nows, held, strict=True))
    xs = place(looking, several(broken)[0])
    assert not looking.encode_momentum_topk_all(xs, nows, befores, ks, outs, momentum=0.9)[0]


@pytest.mark.parametrize(
    ("backend", "parts", "apart", "broken"),
    [
        ("looking", False, False, 0.0),
        ("looking", True, True, 0.0),
        *thorough(("triton_", True, False, torch.nan), ("triton_", False, True, torch.inf)),
    ],
)
def test_halves_that_x_and_the_residual_choose_of_several_tensors(request, backend, parts, apart, broken, monkeypatch):
    """Bytes, and what is left, are those of one tensor after the other, of which programs merge small pieces. Both may
    choose the same, a residual may be all zeros, and all of a tensor may be wanted.
    """
    from narrowband.kernels.cuda import mixed

    one = request.getfixturevalue(backend)
    for name, number in {"_SHARE": 2048, "_PIECE": 64, "_PART": 64, "BLOCK": 1024}.items():
        monkeypatch.setattr(mixed, name, number)
    xs, residuals, ks, outs = several(broken)
    xs += [make("normal", n, at) for at, n in enumerate((N, 40, 1000, 2, 700))]
    residuals += [xs[-5] * 0.5, torch.zeros(40), torch.zeros(1000), torch.tensor([-0.0, 0.0]), make("normal", 700, 3)]
    residuals[-1][:-5] = 0.0  # fewer elements than it chooses
    ks += [200, 9, 120, 1, 700]
    outs += [torch.full((4 * (k - (-kernels.elias_fano_nbytes(k, x.numel()) // 4)),), 0xAA, dtype=torch.uint8)
             for x, k in zip(xs[-5:], ks[-5:], strict=True)]  # fmt: skip
    if apart:
        outs = [out[4 * k :] for out, k in zip(outs, ks, strict=True)]
    outcomes = []
    for kind in (one, reference):
        own, lacks, into = (place(kind, part) for part in (xs, residuals, outs))
        values = place(kind, [torch.full((k,), 7.0) for k in ks if apart])
        finite, at = kind.encode_mixed_all(own, lacks, ks, into, decay=0.9, parts=parts, values=values)
        outcomes.append(back([finite, at, own, lacks, into, values]))
    assert outcomes[0][0] is (broken == 0.0)
    assert_same(*outcomes)
    counts = [int((indices[1:] != indices[:-1]).sum()) + 1 for indices in outcomes[0][1]]
    assert counts[0] < ks[0] or counts[5] < ks[5], "some are chosen by both"
    assert counts[6:9] == ks[6:9], "x chooses all where the residual is zero"


def test_halves_of_a_tensor_that_is_not_finite_are_noted(looking):
    xs, residuals, ks, outs = (place(looking, part) for part in several(torch.inf))
    findings = kernels.Findings(xs[0].device)
    with findings.noting(kernels.Findings.OWN):
        assert looking.encode_mixed_all(xs, residuals, ks, outs)[0]
    assert findings.places.tolist() == [1, 0, 0]
