"""Float32 in fewer bits: each backend against the reference, and right on average."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowband import kernels
from tests.kernels.backends.common import BACKENDS, assert_all_same, assert_same, back, backends_for, lean, make, place
from tests.kernels.tables import reference


def kept(backend, x: torch.Tensor, seed: int | None) -> tuple[torch.Tensor, ...]:
    x = place(backend, x)
    half = torch.empty_like(x, dtype=torch.bfloat16)
    backend.keep_in_16(x.clone(), half, seed=seed)
    groups = -(-x.numel() // kernels.STORE_GROUP)
    codes, exponents = torch.empty_like(x, dtype=torch.int8), x.new_empty(groups, dtype=torch.int8)
    backend.keep_in_8(x.clone(), codes, exponents, seed=seed)
    read = torch.empty_like(x)
    backend.read_from_8(codes, exponents, read)
    return back((half, codes, exponents, read))


@given(
    n=st.sampled_from([1, 63, 64, 65, 1000, 4500, 70_001]),
    seed=st.integers(0, 99),
    noise=st.sampled_from([None, 0, 7, 1 << 40]),
    scale=st.sampled_from([1.0, 1e-30, 1e30, 0.0, 127.0, 2.0**-133]),
)
@lean
def test_backends_agree_and_what_was_kept_is_kept_again(n: int, seed: int, noise: int | None, scale: float) -> None:
    x = make("normal", n, seed) * scale
    backends = backends_for(n)
    results = [kept(backend, x, noise) for backend in backends]
    for part in zip(*results, strict=True):
        assert_all_same(list(part), backends)
    half, _, exponents, read = results[0]
    step = torch.ldexp(torch.ones(exponents.shape), exponents.int()).repeat_interleave(kernels.STORE_GROUP)[:n]
    assert bool(((read - x).abs() <= step * (1.0 if noise is not None else 0.5) * (1 + 1e-4)).all())
    assert bool((half.float() - x).abs().max() <= x.abs().max() * 2.0**-7 + 2.0**-133)
    for again in (None, 5, 1 << 33):
        assert torch.equal(kept(kernels, read, again)[3], read)
        assert torch.equal(kept(kernels, half.float(), again)[0], half)


@pytest.mark.parametrize("sizes", [[1], [64, 4096, 128], [1, 63, 4500, 64, 2049]])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_several_are_stored_and_read_as_each_alone(sizes: list[int], halves: bool, saves: bool) -> None:
    """What was stored before is copied to any address."""
    xs, seeds = [make("normal", n, seed) for seed, n in enumerate(sizes)], [*range(40, 40 + len(sizes))]
    for backend in BACKENDS:
        before = [kept(backend, make("normal", n, 9), 3) for n in sizes]
        stored = [place(backend, [half, None] if halves else [codes, powers]) for half, codes, powers, _ in before]
        nbytes = [sum(own.nbytes for own in pair if own is not None) for pair in stored]
        begins = [sum(nbytes[:at]) + at + at % 2 for at in range(len(sizes))]  # even: those of bfloat16 need that
        memory = place(backend, torch.zeros(sum(nbytes) + 2 * len(sizes), dtype=torch.uint8))
        formers = [memory[begin : begin + size] for begin, size in zip(begins, nbytes, strict=True)]
        options = {"formers": formers} if saves else {}
        inside = place(backend, xs)
        backend.keep_all(inside, [tuple(pair) for pair in stored], seeds=seeds, **options)
        outs = place(backend, [torch.full_like(x, torch.nan) for x in xs])
        backend.read_all([tuple(pair) for pair in stored], outs)
        assert_same(back(inside), xs)
        for at, (x, seed, pair, own) in enumerate(zip(xs, seeds, stored, before, strict=True)):
            half, codes, powers, read = kept(reference, x, seed)
            assert_same(back(pair), [half, None] if halves else [codes, powers])
            assert_same(outs[at].cpu(), half.float() if halves else read)
            if saves:
                parts = own[:1] if halves else own[1:3]
                assert_same(formers[at].cpu(), torch.cat([part.view(torch.uint8) for part in parts]))


@pytest.mark.parametrize("value", [1.0001, -0.3333, 126.3])
def test_they_are_right_on_average(value: float) -> None:
    """A small number beside a large one, a thousand times."""
    x = torch.tensor([value, 127.0])
    sums = torch.zeros(2, dtype=torch.float64)
    for seed in range(4000):
        half, _, _, back = kept(kernels, x, seed)
        sums += torch.stack([half[0].double(), back[0].double()])
    spread_16, spread_8 = abs(value) * 2.0**-7, 1.0
    assert abs(float(sums[0]) / 4000 - value) < 4 * spread_16 / 4000**0.5
    assert abs(float(sums[1]) / 4000 - value) < 4 * spread_8 / 4000**0.5


def test_the_largest_fits_with_the_smallest_power() -> None:
    x = torch.tensor([127.0, 127.01, 63.5, 64.0, 254.0, 3.3e38, 1.2e-38]).repeat_interleave(64)
    _, codes, exponents, back = kept(kernels, x, None)
    assert exponents.tolist() == [0, 1, -1, 0, 1, 121, kernels.LEAST_POWER]
    assert int(codes.abs().max()) <= 127
    torch.testing.assert_close(back[:-64], x[:-64], rtol=0.5 / 63, atol=0)
