"""Low rank against a float64 power iteration and the singular values."""

from __future__ import annotations

import pytest
import torch

import narrowband as nb
from narrowband.codecs.lowrank import factors, start
from narrowband.feedback import ErrorFeedback

SHAPES = [(40, 30), (7, 300), (300, 7), (16, 3, 5, 5)]


def decaying(n, m, seed=0):
    """A matrix whose singular values fall like 1/i²."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(n, m, generator=generator, dtype=torch.float64), full_matrices=False)
    return (u * (torch.arange(len(v)) + 1.0) ** -2) @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterations", [1, 3])
def test_it_is_power_iteration(shape, iterations):
    """P ← orthogonalized M·Q, Q ← Mᵀ·P from the same start, in float64; what arrives is P·Qᵀ."""
    codec = nb.codec(f"lowrank:rank=2,iterations={iterations}")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    matrix = x.double().view(shape[0], -1)
    q = start(matrix.shape[1], 2, 7, x.device).double().T
    for _ in range(iterations):
        p = torch.linalg.qr(matrix @ q).Q
        q = matrix.T @ p
    torch.testing.assert_close(codec.roundtrip(x, seed=7).double().view(matrix.shape), p @ q.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_payload_is_two_factors_and_the_first_is_orthonormal(shape):
    n, m = shape[0], torch.Size(shape).numel() // shape[0]
    payload = nb.codec("lowrank:rank=3").encode(torch.randn(shape))
    assert payload.numel() == 4 * 3 * (n + m)
    p = payload[: 4 * 3 * n].view(torch.float32).view(3, n)
    torch.testing.assert_close(p @ p.T, torch.eye(3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (1000,), (4, 4), (0, 6), (6, 0), (1, 500), (500, 1), (3, 2, 2)])
def test_what_two_factors_would_not_shorten_is_kept_as_it_is(shape):
    codec = nb.codec("lowrank:rank=2")
    x = torch.randn(shape)
    assert factors(x.shape, 2)[2] == 0
    assert codec.payload_nbytes(x.shape) == 4 * x.numel()
    assert torch.equal(codec.roundtrip(x), x)


def test_a_rank_that_a_matrix_does_not_have_is_cut():
    assert factors((200, 3), 64) == (200, 3, 0)  # all of three columns: no fewer bytes
    assert factors((200, 150), 64) == (200, 150, 64)
    assert factors((64, 3, 3, 3), 1) == (64, 27, 1)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_matrix_of_that_rank_arrives_whole(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(60, rank, generator=generator) @ torch.randn(rank, 50, generator=generator)
    codec = nb.codec("lowrank:rank=5")
    assert codec.squared_error(x) < 1e-10 * float(x.norm()) ** 2


def test_more_iterations_come_to_the_best_approximation():
    x = decaying(80, 60)
    best = float((torch.linalg.svdvals(x)[3:] ** 2).sum())
    errors = [nb.codec(f"lowrank:rank=3,iterations={i}").squared_error(x.float()) for i in (1, 2, 4, 12)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1.2 * best
    assert best * (1 - 1e-3) <= errors[-1] <= best * 1.01


@pytest.mark.parametrize("kind", ["zeros", "one column", "equal columns", "tiny"])
def test_gradients_of_lower_rank_than_asked_for_are_no_trouble(kind):
    x = torch.zeros(50, 40)
    if kind == "one column":
        x[:, 3] = torch.randn(50)
    elif kind == "equal columns":
        x += torch.randn(50, 1)
    elif kind == "tiny":
        x += torch.randn(50, 40) * 1e-38
    after = nb.codec("lowrank:rank=4").roundtrip(x)
    assert after.isfinite().all()
    if kind != "tiny":
        torch.testing.assert_close(after, x, rtol=0, atol=1e-5)


def test_a_product_that_leaves_float32_is_reported():
    codec, feedback = nb.codec("lowrank:rank=2"), ErrorFeedback()
    x = torch.full((40 * 30,), 3e38)
    finite, _ = feedback.encode("w", x, codec, shape=(40, 30), seed=0, commit=True)
    assert not finite


def test_the_seed_sets_the_start():
    x = torch.randn(40, 30)
    codec = nb.codec("lowrank:rank=2")
    assert torch.equal(codec.encode(x, seed=2**64 - 1), codec.encode(x, seed=2**64 - 1))
    assert not torch.equal(codec.encode(x, seed=1), codec.encode(x, seed=2))


@pytest.mark.parametrize("power", [-100, -85, -20, 0, 20, 66])
def test_rounds_of_power_iteration_do_not_leave_float32s_range(power):
    """Scaled by a power of two, a matrix has the same approximation, to the bit, in 1e-30 as in 1e20."""
    codec = nb.codec("lowrank:rank=2,iterations=3")
    x = decaying(40, 30).float()
    arrived = codec.roundtrip(x, seed=7)
    assert torch.equal(codec.roundtrip(x * 2.0**power, seed=7), arrived * 2.0**power)
    p, q, v = torch.linalg.svd(x.double())
    best = (p[:, :2] * q[:2]) @ v[:2]
    assert (x - arrived).norm() < 1.1 * (x - best).norm()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_what_is_not_finite_or_overflows_stays_visible_in_every_round(value):
    codec = nb.codec("lowrank:rank=2,iterations=3")
    x = torch.full((40, 30), value)
    assert not codec.is_finite(codec.encode(x, seed=7), x.shape)


def test_zeros_stay_zeros_in_every_round():
    codec = nb.codec("lowrank:rank=2,iterations=3")
    assert not codec.roundtrip(torch.zeros(40, 30), seed=7).any()
