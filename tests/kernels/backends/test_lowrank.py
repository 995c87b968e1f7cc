"""Low rank: each backend against the reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from narrowband.kernels.cpu.lowrank import COLUMNS
from tests.kernels.backends.common import (
    BACKENDS,
    assert_same,
    back,
    backends_for,
    make,
    place,
    seeds,
    threads,
)
from tests.kernels.tables import cpu, reference
from tests.thorough import examples

if TYPE_CHECKING:
    from torch import Tensor


def every_way(numel: int) -> list[tuple[Any, int]]:
    """Backends, and on how many threads."""
    return [(cpu, 1), *((backend, 2) for backend in backends_for(numel))]


@given(n=st.sampled_from([1, 7, 300]), m=st.sampled_from([1, 33, COLUMNS, 2 * COLUMNS + 5]), seed=seeds,
       r=st.integers(1, 10), weight=st.sampled_from([1.0, -1 / 3]), accumulate=st.booleans())  # fmt: skip
@settings(max_examples=examples(80), deadline=None)
def test_low_rank_product(n: int, m: int, r: int, seed: int, weight: float, accumulate: bool) -> None:
    p, q = make("normal", n * r, seed % 1000).view(r, n), make("normal", m * r, 1).view(r, m)
    before = make("normal" if accumulate else "nan", n * m, 2)
    exact = weight * (p.double().T @ q.double()).view(-1) + (before.double() if accumulate else 0.0)
    results = []
    for backend, count in every_way(n * m):
        out = place(backend, torch.nn.functional.pad(before, (1, 0)))[1:]  # where no vector begins
        with threads(count):
            backend.low_rank_product(out, place(backend, p), place(backend, q), weight=weight, accumulate=accumulate)
        results.append(back(out))
    for result in results[1:]:
        assert_same(results[0], result)
    torch.testing.assert_close(results[0].double(), exact, rtol=0, atol=1e-4)


@given(n=st.sampled_from([1, 7, 300]), m=st.sampled_from([1, 33, 64, 65, 1000]), seed=seeds, r=st.integers(0, 20),
       sent=st.integers(0, 6), broken=st.sampled_from([0.0, 5e5, 2e6, torch.inf, torch.nan]))  # fmt: skip
@settings(max_examples=examples(80), deadline=None)
def test_compensate_project(n: int, m: int, r: int, sent: int, broken: float, seed: int) -> None:
    x, owed = make("normal", n * m, seed % 1000), make("normal", n * m, 1)
    x[seed % (n * m)] += broken
    p0, q0 = make("normal", n * sent, 2).view(sent, n), make("normal", m * sent, 3).view(sent, m)
    q = make("normal", r * m, 4).view(r, m)
    expected = owed.clone()
    if sent:
        reference.low_rank_product(expected, p0, q0, weight=-1.0, accumulate=True)
    expected += x
    product = (q.double() @ expected.view(n, m).double().T).float()
    for backend, count in every_way(n * m):
        gradient, residual = place(backend, torch.nn.functional.pad(x, (1, 0)))[1:], place(backend, owed)
        p, factors = place(backend, torch.empty(r, n)), (place(backend, p0), place(backend, q0))
        with threads(count):
            below = backend.compensate_project(
                gradient, residual, place(backend, q), p, sent=factors if sent else None, below=1e6
            )
        gradient, residual, p = back((gradient, residual, p))
        assert below == (abs(broken) < 1e6)
        assert_same(gradient, owed)
        assert_same(residual, expected)
        if below:
            torch.testing.assert_close(p, product, rtol=1e-4, atol=1e-3 + 1e-6 * abs(broken))


@given(n=st.sampled_from([1, 7, 64, 65, 300, 1000]), r=st.integers(1, 9), count=st.integers(1, 2), seed=seeds)
@example(n=64, r=5, count=1, seed=609)  # differences of long rows that hardly differ
@example(n=7, r=5, count=1, seed=609)
@example(n=70, r=35, count=1, seed=1)  # more rows than Triton's loop has at once
@settings(max_examples=examples(80), deadline=None)
def test_orthonormalize(n: int, r: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = make("normal", count * r * n, seed % 1000).view(count, r, n) * 10.0 ** rng.integers(-18, 18)
    for matrix in p:  # rows of zeros, rows that are sums of others, rows that hardly differ, rows of any length
        for kind, (a, b, c) in zip(rng.integers(5, size=r), rng.integers(r, size=(r, 3)), strict=True):
            matrix[a] = {0: 0 * matrix[a], 1: matrix[b], 2: matrix[b] - 3 * matrix[c], 3: matrix[a] * 1e-3}.get(
                int(kind), matrix[b] * (1 + 1e-4 * matrix[a].sign())
            )
    before = p.clone()
    for backend in BACKENDS:
        rows = back(backend.orthonormalize(own := place(backend, p))).double()
        assert torch.equal(back(own), before)
        assert rows.shape == p.shape
        for q, matrix in zip(rows, p.double(), strict=True):
            alive = (q != 0).any(1)
            torch.testing.assert_close(q @ q.T, torch.diag(alive.double()), rtol=0, atol=2e-6)
            assert not alive[(matrix == 0).all(1)].any()
            rest = matrix - (matrix @ q.T) @ q
            assert (rest.norm(dim=1) <= 1e-5 * matrix.norm(dim=1)).all()


def test_orthonormalize_goes_in_the_order_of_rows_and_leaves_nan() -> None:
    p = make("normal", 6 * 500).view(1, 6, 500)
    q, r = torch.linalg.qr(p[0].double().T)
    expected = (q * r.diagonal().sign()).T.float()
    for backend in BACKENDS:
        torch.testing.assert_close(back(backend.orthonormalize(place(backend, p)))[0], expected, rtol=0, atol=1e-6)
        broken = place(backend, p)
        broken[0, 2, 7] = torch.nan
        assert backend.orthonormalize(broken)[0, 2:].isnan().any(1).all()


def test_several_matrices_at_once_are_what_each_is_by_itself() -> None:
    sizes = [(2, 7, 64), (2, 33, 65), (4, 12, 20), (17, 20, 33)]  # rank, rows, columns
    for backend in BACKENDS[:-1]:  # the reference has those of the tensor's backend

        def tensors(*shape: int, at: int = 0, backend: Any = backend) -> Tensor:
            return place(backend, make("normal", math.prod(shape), at).view(shape))

        xs, residuals = ([tensors(n * m, at=at) for _, n, m in sizes] for at in (1, 2))
        qs, ps = [tensors(r, m, at=3) for r, _, m in sizes], [tensors(r, n) for r, n, _ in sizes]
        sents = [(tensors(2, n, at=4), tensors(2, m, at=5)) if (n + r) % 3 else None for r, n, m in sizes]
        alone = [[x.clone() for x in of] for of in zip(xs, residuals, ps, strict=True)]
        for (x, residual, p), q, sent in zip(alone, qs, sents, strict=True):
            assert backend.compensate_project(x, residual, q, p, sent=sent)
        assert backend.compensate_project_all(xs, residuals, qs, ps, sents=sents)
        for one, of in zip(alone, zip(xs, residuals, ps, strict=True), strict=True):
            assert all(torch.equal(back(x), back(y)) for x, y in zip(one, of, strict=True))
        assert not backend.compensate_project_all(xs, residuals, qs, ps, sents=sents, below=1e-6)

        outs, expected = ([tensors(n * m) for _, n, m in sizes] for _ in range(2))
        for out, p, q in zip(expected, ps, qs, strict=True):
            backend.low_rank_product(out, p, q)
        backend.low_rank_products(outs, ps, qs)
        assert all(torch.equal(back(x), back(y)) for x, y in zip(outs, expected, strict=True))

        blocks = [tensors(2, r, n, at=6) for r, n, _ in sizes]
        for block in blocks:
            block[0, -1] = 0.0
        for spares in ([], [torch.full_like(matrix, 3.0) for block in blocks for matrix in block]):
            for block, rows in zip(blocks, backend.orthonormalize_all(blocks, spares), strict=True):
                one = back(backend.orthonormalize(block))
                if spares:
                    one[~(one != 0).any(-1)] = 3.0
                assert torch.equal(back(rows), one)


def test_rows_that_replace_others_are_made_orthonormal_if_asked() -> None:
    """Those that Cholesky finds to depend on others, those that are found row by row, and more than it has at once. All
    other matrices keep their bits.
    """
    shapes = [(2, 7), (2, 65), (4, 12), (4, 300), (35, 70)]
    for backend in BACKENDS:
        blocks = [place(backend, make("normal", 3 * r * n, at).view(3, r, n)) for at, (r, n) in enumerate(shapes)]
        for block in blocks:
            block[0, -1] = 0.0
            block[1, -1] = block[1, 0] * (1 + 1e-7 * block[1, 0].sign())  # too near for Cholesky to tell
            block[1, -2] = 0.0
        spares = [place(backend, make("normal", r * n, 7).view(r, n)) for r, n in shapes for _ in range(3)]
        plain = backend.orthonormalize_all(blocks, spares)
        found = backend.orthonormalize_all(blocks, spares, again=True)
        for block, rows, before in zip(blocks, back(found), back(plain), strict=True):
            products = rows.double() @ rows.double().mT
            torch.testing.assert_close(
                products, torch.eye(block.shape[1]).double().expand_as(products), rtol=0, atol=2e-6
            )
            assert torch.equal(rows[2], before[2])
            assert not any(torch.equal(rows[at], before[at]) for at in (0, 1))
