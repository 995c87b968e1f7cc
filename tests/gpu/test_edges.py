"""What loops are given at the edges on a GPU: very long tensors, other streams, memory that begins anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowband as nb
from narrowband import kernels

#: Where 32 bits of a signed index end.
END = 1 << 31


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.mark.gpu
def test_a_tensor_of_more_elements_than_31_bits_count_is_quantized_like_its_parts() -> None:
    numel, group, tail = END + 4096, 128, 1 << 20
    if free_bytes() < 8 * numel:
        pytest.skip(f"needs {8 * numel >> 30} GiB of GPU memory")
    x = torch.randn(1 << 20, device="cuda").repeat(-(-numel // (1 << 20)))[:numel]
    codes = kernels.packed_nbytes(numel, 8, group)
    payload = torch.zeros(4 * numel // group + codes, dtype=torch.uint8, device="cuda")
    form: Any = {"bits": 8, "group": group, "scale": "absmax"}
    kernels.quantize_groups(x, payload, **form, stochastic=False)
    last = x[-tail:].contiguous()
    own = torch.zeros(4 * tail // group + kernels.packed_nbytes(tail, 8, group), dtype=torch.uint8, device="cuda")
    kernels.quantize_groups(last, own, **form, stochastic=False)
    assert torch.equal(payload[-tail:], own[-tail:])
    out = torch.empty_like(x)
    kernels.dequantize_groups(payload, out, **form)
    expected = torch.empty_like(last)
    kernels.dequantize_groups(own, expected, **form)
    assert torch.equal(out[-tail:], expected)


@pytest.mark.gpu
def test_sparse_codecs_refuse_such_a_tensor() -> None:
    with pytest.raises(ValueError, match="index with 32 bits"):
        nb.codec("topk:density=0.001").payload_nbytes(END)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["qsgd:bits=4", "uniform:bits=3", "topk:density=0.01"])
def test_work_goes_into_the_stream_that_is_current(spec: str) -> None:
    """Behind something that the side stream is busy with; nobody waits for the default stream."""
    codec, n = nb.codec(spec), 1 << 20
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    payload = torch.empty(codec.payload_nbytes(n), dtype=torch.uint8, device="cuda")
    there, busy, side = torch.zeros(n, device="cuda"), torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            busy = busy @ busy
        there.copy_(x)
        codec.encode(there, seed=3, out=payload)
    side.synchronize()
    assert torch.equal(payload.cpu(), codec.encode(x, seed=3))


@pytest.mark.gpu
@pytest.mark.parametrize("first", [1, 3, 7])
@pytest.mark.parametrize("spec", ["qsgd:bits=4", "uniform:bits=3", "topk:density=0.01"])
def test_memory_may_begin_anywhere(spec: str, first: int) -> None:
    codec, n = nb.codec(spec), 100_003
    x = torch.randn(n + first, generator=torch.Generator().manual_seed(0))
    own, there = x[first:], x.cuda()[first:]
    assert torch.equal(codec.encode(there, seed=3).cpu(), codec.encode(own, seed=3))
