"""The reference gives the same results with any chunk and on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowband import kernels
from narrowband.kernels.reference import common
from tests.kernels.reference.naive import (
    header_floats,
    make,
)
from tests.kernels.tables import reference


def everything(x: torch.Tensor) -> list[torch.Tensor | bool]:
    """What each function of the backend makes of x, on x's device."""
    n, k = x.numel(), 40
    results: list[torch.Tensor | bool] = [*reference.group_minmax(x, 100), reference.all_finite(x)]
    results.append(reference.checksum(x.view(torch.uint8)[:-1]))
    scale: Any
    for scale, bits in (("minmax", 7), ("absmax", 4), ("mean", 1)):
        size = 4 * header_floats(n, 100, scale) + kernels.packed_nbytes(n, bits, 100) + 2
        payload = torch.empty(size, dtype=torch.uint8, device=x.device)
        reference.quantize_groups(x, payload, bits=bits, group=100, scale=scale, stochastic=True, seed=9)
        out = x.clone()
        reference.dequantize_groups(payload, out, bits=bits, group=100, scale=scale, weight=0.5, accumulate=True)
        results += [payload, out]
    for rows, bits, dtype in (
        (kernels.Rows(5, 6, 3, 50), 4, torch.float32),
        (kernels.Rows(2, 9, 7, 33), 2, torch.bfloat16),
    ):
        y = x[: rows.numel].to(dtype)
        low, high = reference.row_extremes(y, rows)
        step = (high - low) * (1 / (2**bits - 1))
        codes = torch.empty(rows.nbytes(bits), dtype=torch.uint8, device=x.device)
        reference.quantize_rows(y, codes, rows, low, step, bits=bits, stochastic=True, seed=9)
        gaps = torch.nn.functional.pad(y.view(-1, rows.groups * rows.inner), (1, 8))[:, 1:-8]
        again = torch.empty_like(codes)
        seen = reference.quantize_rows_extremes(gaps, again, rows, low, step, bits=bits, stochastic=True, seed=9)
        results += [*seen, again]
        out, applied = torch.empty_like(y), torch.empty_like(y)
        reference.dequantize_rows(codes, out, rows, torch.stack((low, step)), bits=bits)
        mask = torch.empty(-(-y.numel() // 8), dtype=torch.uint8, device=x.device)
        reference.mask_between(y, mask)
        reference.apply_mask(mask, y, applied, 0.7)
        results += [low, high, codes, out.float(), mask, applied.float()]
    rotated, back = torch.empty(4 + 79 * (4 + 24), dtype=torch.uint8, device=x.device), torch.empty_like(x)
    if n == 5050:
        reference.quantize_rotated(x, rotated, bits=3, group=64, seed=5)
        reference.dequantize_rotated(rotated, back, bits=3, group=64)
        results += [rotated, back]
    planes = x[:1800].view(2, 3, 15, 20)
    _, position = torch.nn.functional.max_pool2d(planes, 3, 2, 1, return_indices=True)
    windows = kernels.Windows(6, 8, 10, 1, 20, 3, (2, 2), (1, 1))
    places, again = torch.empty_like(position, dtype=torch.uint8), torch.empty_like(position)
    reference.pool_places(position, places, windows)
    reference.pool_positions(places, again, windows)
    results += [places, again]
    codes, total = (
        torch.empty(n, dtype=torch.int16, device=x.device),
        torch.zeros(n // 2, dtype=torch.int32).to(x.device),
    )
    largest, checksum = reference.fixed_quantize(x, codes, 2.0**-12, 32767)
    packet, out = torch.empty_like(codes[: n // 2]), torch.empty_like(x[: n // 2])
    reference.fixed_sum(codes, [0, n // 2], packet)
    reference.fixed_decode(packet, codes, [0], total)
    reference.fixed_dequantize(total, out, 0.3)
    results += [torch.tensor([largest, checksum], dtype=torch.float64), codes, packet, total, out]
    residual, gradient = x.flip(0), x.clone()
    results += [*reference.compensate_select_topk(gradient, residual, k, sampled=True, seed=4), gradient, residual]
    indices = reference.select_topk(x, k)
    coded = torch.empty(kernels.elias_fano_nbytes(k, n), dtype=torch.uint8, device=x.device)
    reference.elias_fano_encode(indices, n, coded)
    decoded = reference.elias_fano_decode(coded, k, n)
    reference.check_indices(decoded, n)
    sparse = torch.zeros_like(x)
    reference.sparse_accumulate(sparse, decoded, x[decoded.long()], 0.3)
    results += [indices, coded, decoded, sparse, reference.select_threshold(x, 1.0)]
    return [*results, reference.randomk_indices(n, k, 5, x.device)]


def assert_same(got: list[torch.Tensor | bool], expected: list[torch.Tensor | bool]) -> None:
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, bool):
            assert a is b
        else:
            assert isinstance(a, torch.Tensor)
            assert a.dtype == b.dtype
            assert a.cpu().numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_results_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    x = torch.from_numpy(make("normal", 5050, 2))
    expected = everything(x)
    monkeypatch.setattr(common, "CHUNK", chunk)
    assert_same(everything(x), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_bytes_of_the_cpu() -> None:
    x = torch.from_numpy(make("normal", 200_001, 2))
    assert_same(everything(x.cuda()), everything(x))
