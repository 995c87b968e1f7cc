"""Grouped quantization: each backend against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.kernels import cpu
from tests.kernels.backends.common import BACKENDS, on_all

if TYPE_CHECKING:
    from torch import Tensor

from tests.kernels.backends.common import (
    SIZES,
    assert_all_same,
    assert_same,
    assert_same_payload,
    dequantize,
    groups,
    header_nbytes,
    inputs,
    lean,
    make,
    quantize,
    quantizers,
    seeds,
)
from tests.thorough import examples


@given(x=inputs, group=groups)
@lean
def test_group_minmax(x: Tensor, group: int) -> None:
    on_all("group_minmax", x, group)


@given(x=inputs, group=groups, quantizer=quantizers, stochastic=st.booleans(), seed=seeds)
@settings(max_examples=examples(300), deadline=None)
def test_quantize_groups(x: Tensor, group: int, quantizer: tuple[str, int], stochastic: bool, seed: int) -> None:
    scale, bits = quantizer
    assert_same_payload(x, bits, group, scale, stochastic=stochastic, seed=seed)


@given(n=st.sampled_from(SIZES), group=groups, quantizer=quantizers, seed=seeds,
       weight=st.sampled_from([1.0, 0.25, -1 / 3]), accumulate=st.booleans(), wild=st.booleans())  # fmt: skip
@settings(max_examples=examples(300), deadline=None)
def test_dequantize_groups_of_any_bytes(
    n: int, group: int, quantizer: tuple[str, int], seed: int, weight: float, accumulate: bool, wild: bool
) -> None:
    scale, bits = quantizer
    header = header_nbytes(n, group, scale)
    raw = np.random.default_rng(seed).bytes(header + kernels.packed_nbytes(n, bits, group) + 3)
    if not wild:
        raw = make("few-levels", header // 4, seed).numpy().tobytes() + raw[header:]
    payload = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    into = make("normal", n, seed)
    options: dict[str, Any] = {"weight": weight, "accumulate": accumulate}
    assert_all_same([dequantize(b, payload, into, bits, group, scale, **options) for b in BACKENDS])


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize(("scale", "bits"), [("minmax", 4), ("absmax", 7), ("mean", 1)])
def test_a_payload_may_start_at_any_address(scale: str, bits: int, offset: int) -> None:
    x = make("normal", 1000)
    aligned = quantize(cpu, x, bits, 128, scale, stochastic=True)
    payload = quantize(cpu, x, bits, 128, scale, stochastic=True, offset=offset)
    assert torch.equal(payload, aligned)
    assert_same(
        dequantize(cpu, payload, x, bits, 128, scale, accumulate=True),
        dequantize(cpu, aligned, x, bits, 128, scale, accumulate=True),
    )
