"""The checksum: each backend against its formula, and what it sees."""

from __future__ import annotations

import pytest
import torch

from narrowband import kernels
from narrowband.kernels.reference.common import fold, mix
from tests.kernels.backends.common import BACKENDS, FAST_BACKENDS, MILLION, make, place, threads


def by_the_formula(data: bytes) -> int:
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    total = sum(word * (mix((i + fold(0)) & 0xFFFFFFFF) | 1) for i, word in enumerate(words)) % 2**64
    return total - 2**64 if total >> 63 else total


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 63, 4096, 8191, 8192, 20_002])
def test_backends_compute_the_formula(nbytes: int) -> None:
    x = make("any-bits", nbytes // 4 + 1, nbytes).view(torch.uint8)[:nbytes]
    expected = by_the_formula(x.numpy().tobytes())
    assert [int(backend.checksum(place(backend, x))) for backend in BACKENDS] == [expected] * len(BACKENDS)


def test_a_million_on_any_number_of_threads() -> None:
    x = make("any-bits", MILLION).view(torch.uint8)[:-1]
    found = set()
    for count in (1, 2, 3):
        with threads(count):
            found |= {int(backend.checksum(place(backend, x))) for backend in FAST_BACKENDS}
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_of_any_tensor_wherever_it_begins(dtype: torch.dtype) -> None:
    x = make("normal", 5 * 7, 1).view(5, 7).to(dtype)
    apart = torch.cat((x.new_zeros(1), x.reshape(-1)))[1:].view(5, 7)
    across = x.t().contiguous().t()
    assert kernels.checksum(x) == kernels.checksum(apart) == kernels.checksum(across)
    assert kernels.checksum(x) == by_the_formula(bytes(x.reshape(-1).view(torch.uint8).tolist()))
    assert kernels.checksum(x).shape == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "signs", "eye"])
def test_it_sees_what_moves(dtype: torch.dtype, kind: str) -> None:
    """Also where numbers differ in their sign alone, and where all rows and columns have the same sum."""
    x = make("normal", 64 * 64).view(64, 64)
    x = {"normal": x, "signs": x.sign(), "eye": torch.eye(64)}[kind].to(dtype)
    all_ = [x, x.flip(0), x.flip(1), -x, *(x.roll(count, dim) for dim in (0, 1) for count in (1, 2, 4, 32))]
    different = {each.contiguous().view(torch.uint8).numpy().tobytes() for each in all_}
    assert len({int(kernels.checksum(each)) for each in all_}) == len(different) >= 9


def test_it_sees_each_bit() -> None:
    x = make("any-bits", 33).view(torch.uint8)[:-1]
    found = {int(kernels.checksum(x))}
    for at in range(x.numel()):
        for bit in range(8):
            other = x.clone()
            other[at] ^= 1 << bit
            found.add(int(kernels.checksum(other)))
    assert len(found) == 1 + 8 * x.numel()
