"""The hot loops that ``narrowband bench kernels`` times, each with the tensors that it needs.

:data:`LOOPS` holds the loops of :mod:`narrowband.kernels`. :data:`BASELINES` holds the same operations as a user would
write them in plain torch, and :data:`OTHERS` those of other packages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowband import kernels
from narrowband.feedback import SampleStore

__all__ = ["BASELINES", "LOOPS", "OTHERS", "Data", "Loop", "Maker"]

#: The group of the quantizers and the density of the sparse loops, as in the table of targets.
GROUP = 128
#: Number of values selected by top-k that share one set of levels.
_KEPT_GROUP = 256
DENSITY = 0.001
#: A higher density, at which the selected values take more of the time.
_DENSER = 0.01
#: Columns and rows of a matrix that is made orthonormal, whatever the size of the tensor.
_TALL = (32, 4096)
#: Elements of a sample of AQ-SGD: 4 MB. The tensor is a batch of them.
_SAMPLE = 1_000_000
#: Ranks that own a part of a sparse sum each.
_OWNERS = 8
#: Heads, and features of one, of the saved activations.
_HEADS = (3, 64)
#: Rows and columns of the planes that are pooled: few rows, so that a small tensor has some planes, too.
_PLANE = (8, 112)


@dataclass(frozen=True)
class Loop:
    """An operation to time, a function that restores its state, and the minimum of bytes that it reads and writes."""

    body: Callable[[int], object]
    restore: Callable[[], object] | None = None
    nbytes: int | None = None


class Data:
    """The tensors that loops share: ``x`` ~ N(0, 1), ``y`` an output, both float32."""

    def __init__(self, numel: int, seed: int, device: str = "cpu") -> None:
        self.numel = numel
        self.device = device
        self.k = max(1, round(numel * DENSITY))
        self._generator = torch.Generator().manual_seed(seed)
        self.x = self.normal(numel)
        self.y = torch.zeros(numel, device=device)

    def normal(self, *shape: int) -> Tensor:
        """Return more normal numbers, which are the same on every device."""
        return torch.randn(*shape, generator=self._generator, device="cpu").to(self.device)


Maker = Callable[[Data, Any], Loop]


def _quantizer(bits: int, scale: kernels.Scale, stochastic: bool) -> Maker:
    def make(data: Data, backend: Any) -> Loop:
        payload = _payload(data.numel, bits, scale)
        return Loop(
            lambda seed: backend.quantize_groups(
                data.x, payload, bits=bits, group=GROUP, scale=scale, stochastic=stochastic, seed=seed
            ),
            nbytes=data.x.nbytes + payload.nbytes,
        )

    return make


def _dequantizer(bits: int, scale: kernels.Scale) -> Maker:
    def make(data: Data, backend: Any) -> Loop:
        payload = _payload(data.numel, bits, scale)
        backend.quantize_groups(data.x, payload, bits=bits, group=GROUP, scale=scale, stochastic=True, seed=0)
        return Loop(
            lambda _: backend.dequantize_groups(
                payload, data.y, bits=bits, group=GROUP, scale=scale, weight=0.25, accumulate=True
            ),
            nbytes=2 * data.y.nbytes + payload.nbytes,
        )

    return make


def _payload(numel: int, bits: int, scale: kernels.Scale) -> Tensor:
    header = -(-numel // GROUP) * (8 if scale == "minmax" else 4)
    return torch.empty((header + kernels.packed_nbytes(numel, bits, GROUP) + 3) // 4 * 4, dtype=torch.uint8)


#: Elements that are rotated together.
_ROTATED = 512


def _rotated(bits: int, *, decode: bool) -> Maker:
    def make(data: Data, backend: Any) -> Loop:
        form = {"bits": bits, "group": _ROTATED}
        payload = torch.empty(4 + -(-data.numel // _ROTATED) * (4 + _ROTATED * bits // 8), dtype=torch.uint8)
        if not decode:
            return Loop(
                lambda seed: backend.quantize_rotated(data.x, payload, **form, seed=seed),
                nbytes=data.x.nbytes + payload.nbytes,
            )
        backend.quantize_rotated(data.x, payload, **form, seed=0)
        return Loop(
            lambda _: backend.dequantize_rotated(payload, data.y, **form, weight=0.25, accumulate=True),
            nbytes=2 * data.y.nbytes + payload.nbytes,
        )

    return make


def _select(sampled: bool) -> Maker:
    return lambda data, backend: Loop(
        lambda seed: backend.select_topk(data.x, data.k, sampled=sampled, seed=seed), nbytes=data.x.nbytes
    )


def _take_difference(data: Data, backend: Any) -> Loop:
    """Exchange parameters after an update and before it for those before it and the update.

    ``(y, base) ← (base, y − base)``. Between calls, only ``y`` is restored.
    """
    base = data.normal(data.numel)
    return Loop(lambda _: backend.take_difference(data.y, base), lambda: data.y.copy_(data.x), nbytes=4 * data.x.nbytes)


def _ef_topk_encode(density: float) -> Maker:
    """``topk+ef`` of one tensor: compensate, select, write values and Elias–Fano indices, reset.

    The residual of a run in progress is as large as the gradient or larger, so both start as N(0, 1).
    """

    def make(data: Data, backend: Any) -> Loop:
        n, k = data.numel, max(1, round(data.numel * density))
        residual_before = data.normal(n)
        x, residual = torch.empty(n), torch.empty(n)
        out = torch.empty(4 * k + kernels.elias_fano_nbytes(k, n), dtype=torch.uint8)

        def body(seed: int) -> None:
            backend.encode_topk(x, residual, k, out, seed=seed, subtract=True)

        def restore() -> None:
            x.copy_(data.x)
            residual.copy_(residual_before)

        return Loop(body, restore, nbytes=4 * x.nbytes + out.nbytes)

    return make


def _ef_topk_kept(density: float, bits: int) -> Maker:
    """``topk+ef`` of one tensor with a residual that is kept in ``bits`` bits."""

    def make(data: Data, backend: Any) -> Loop:
        n, k, x = data.numel, max(1, round(data.numel * density)), torch.empty(data.numel)
        before: list[Tensor] = [torch.empty(n, dtype=torch.bfloat16 if bits == 16 else torch.int8)]
        if bits == 16:
            backend.keep_in_16(data.normal(n), before[0], seed=0)
        else:
            before.append(torch.empty(-(-n // kernels.STORE_GROUP), dtype=torch.int8))
            backend.keep_in_8(data.normal(n), *before, seed=0)
        held = [part.clone() for part in before]
        codes, exponents = held[0], held[1] if bits == 8 else None
        out = torch.empty(4 * k + kernels.elias_fano_nbytes(k, n), dtype=torch.uint8)

        def body(seed: int) -> None:
            _, at, values = backend.compensate_kept(x, codes, exponents, k, seed=seed, rounding=seed)
            out[: 4 * k].view(torch.float32).copy_(values)
            backend.elias_fano_encode(at, n, out[4 * k :])

        def restore() -> None:
            x.copy_(data.x)
            for own, part in zip(held, before, strict=True):
                own.copy_(part)

        return Loop(body, restore, nbytes=2 * x.nbytes + 2 * sum(part.nbytes for part in before) + out.nbytes)

    return make


def _keep(bits: int, *, read: bool = False) -> Maker:
    """Store a residual in ``bits`` bits or, with ``read``, load it again."""

    def make(data: Data, backend: Any) -> Loop:
        if bits == 16:
            half = torch.empty(data.numel, dtype=torch.bfloat16)
            return Loop(lambda seed: backend.keep_in_16(data.x, half, seed=seed), nbytes=data.x.nbytes + half.nbytes)
        codes = torch.empty(data.numel, dtype=torch.int8)
        exponents = torch.empty(-(-data.numel // kernels.STORE_GROUP), dtype=torch.int8)
        backend.keep_in_8(data.x, codes, exponents, seed=0)
        nbytes = data.x.nbytes + codes.nbytes + exponents.nbytes
        if read:
            return Loop(lambda _: backend.read_from_8(codes, exponents, data.y), nbytes=nbytes)
        return Loop(lambda seed: backend.keep_in_8(data.x, codes, exponents, seed=seed), nbytes=nbytes)

    return make


def _split_shares(data: Data, backend: Any) -> Loop:
    """Split what a rank sends among eight owners."""
    at = backend.select_topk(data.x, data.k)
    values = data.x[at.long()]
    local = torch.empty(_OWNERS, data.k, dtype=torch.int32)
    sorted_values = torch.empty(_OWNERS, data.k)
    tensor = kernels.Shared(data.numel, 1, slice(0, data.k), 0)
    return Loop(lambda _: backend.split_shares_all([tensor], [at], [values], local, sorted_values))


def _compensate(data: Data, backend: Any) -> Loop:
    x, residual = data.x.clone(), torch.zeros(data.numel)
    return Loop(lambda _: backend.compensate(x, residual), residual.zero_, nbytes=4 * x.nbytes)


def _threshold(data: Data, backend: Any) -> Loop:
    value = float(data.x.abs().kthvalue(data.numel - data.k + 1).values)
    return Loop(lambda _: backend.select_threshold(data.x, value), nbytes=data.x.nbytes)


def _levels(bits: int, *, decode: bool) -> Maker:
    """Encode or decode levels, with all elements of the tensor as selected values.

    That is a thousand times as many as top-k with :data:`DENSITY` selects from a tensor of this size.
    """

    def make(data: Data, backend: Any) -> Loop:
        out = torch.empty(kernels.levels_nbytes(data.numel, bits, _KEPT_GROUP), dtype=torch.uint8)
        backend.levels_encode(data.x, out, bits=bits, group=_KEPT_GROUP)
        if decode:
            return Loop(lambda _: backend.levels_decode(out, data.numel, bits=bits, group=_KEPT_GROUP))
        return Loop(lambda _: backend.levels_encode(data.x, out, bits=bits, group=_KEPT_GROUP))

    return make


def _elias_fano_encode(data: Data, backend: Any) -> Loop:
    at = backend.select_topk(data.x, data.k)
    out = torch.empty(kernels.elias_fano_nbytes(data.k, data.numel), dtype=torch.uint8)
    return Loop(lambda _: backend.elias_fano_encode(at, data.numel, out))


def _elias_fano_decode(data: Data, backend: Any) -> Loop:
    at = backend.select_topk(data.x, data.k)
    out = torch.empty(kernels.elias_fano_nbytes(data.k, data.numel), dtype=torch.uint8)
    backend.elias_fano_encode(at, data.numel, out)
    return Loop(lambda _: backend.elias_fano_decode(out, data.k, data.numel))


def _sparse_accumulate(data: Data, backend: Any) -> Loop:
    at = backend.select_topk(data.x, data.k)
    values = data.x[at.long()]
    return Loop(lambda _: backend.sparse_accumulate(data.y, at, values, 0.25))


def _fixed_point(data: Data) -> Tensor:
    """Return fixed-point codes of the tensor, in the unit for a range of [−10, 10]."""
    codes = torch.empty(data.numel, dtype=torch.int32)
    kernels.fixed_quantize(data.x, codes, 2.0**-27, 2**31 - 1)
    return codes


def _fixed_quantize(data: Data, backend: Any) -> Loop:
    codes = torch.empty(data.numel, dtype=torch.int32)
    return Loop(lambda _: backend.fixed_quantize(data.x, codes, 2.0**-27, 2**31 - 1), nbytes=2 * data.x.nbytes)


def _fixed_encode(data: Data, backend: Any) -> Loop:
    """Add two slices into one packet. A slice is half of the tensor, so that every element is read once."""
    codes, half = _fixed_point(data), data.numel // 2
    packet = data.y.view(torch.int32)[:half]
    return Loop(lambda _: backend.fixed_sum(codes, [0, half], packet))


def _fixed_decode(data: Data, backend: Any) -> Loop:
    """Decode a packet of two slices, of which one is known, and add the other one to the total."""
    codes, half = _fixed_point(data), data.numel // 2
    return Loop(lambda _: backend.fixed_decode(codes[half:][:half], codes, [0], data.y.view(torch.int32)[:half]))


def _fixed_dequantize(data: Data, backend: Any) -> Loop:
    codes = _fixed_point(data)
    return Loop(lambda _: backend.fixed_dequantize(codes, data.y, 2.0**-27), nbytes=2 * data.y.nbytes)


def _low_rank_product(data: Data, backend: Any) -> Loop:
    """Multiply factors of rank 4 into the largest square matrix that fits into the tensor."""
    side = math.isqrt(data.numel)
    out = data.y[: side * side]
    p, q = (data.normal(4, side) for _ in range(2))
    return Loop(lambda _: backend.low_rank_product(out, p, q, weight=0.25, accumulate=True), nbytes=2 * out.nbytes)


def _dgc(sampled: bool) -> Maker:
    """A step of ``dgc:density=0.001`` on one tensor: velocity, accumulation, selection, masking.

    The threshold comes from a step before or, with ``sampled``, from a sample. Writing the payload is not included; the
    loops of top-k time it.
    """

    def make(data: Data, backend: Any) -> Loop:
        n, k = data.numel, data.k
        states = [data.normal(n) for _ in range(2)]
        x, now, before = (torch.empty(n) for _ in range(3))
        hint = 0.0

        def restore() -> None:
            for tensor, kept in zip((x, now, before), (data.x, *states), strict=True):
                tensor.copy_(kept)

        def body(seed: int) -> float:
            options = {"momentum": 0.9, "threshold": hint, "sampled": sampled, "seed": seed}
            _, at, _, ahead = backend.momentum_topk(x, now, before, k, **options)
            backend.forget(now, before, at, momentum=0.9)
            return float(ahead)

        restore()
        hint = body(0)
        return Loop(body, restore, nbytes=5 * x.nbytes)

    return make


def _dgc_encode(data: Data, backend: Any) -> Loop:
    """A step of ``dgc:density=0.001`` on one tensor with its payload, as it runs where the device decides steps."""
    n, k = data.numel, data.k
    states = [data.normal(n) for _ in range(2)]
    x, now, before = (torch.empty(n) for _ in range(3))
    out = torch.empty(4 * k + kernels.elias_fano_nbytes(k, n), dtype=torch.uint8)
    findings = kernels.Findings(x.device)

    def restore() -> None:
        for tensor, kept in zip((x, now, before), (data.x, *states), strict=True):
            tensor.copy_(kept)

    def body(_: int) -> None:
        with findings.noting(kernels.Findings.OWN):
            backend.encode_momentum_topk_all([x], [now], [before], [k], [out], momentum=0.9)

    return Loop(body, restore, nbytes=5 * x.nbytes + out.nbytes)


def _orthonormalize(data: Data, backend: Any) -> Loop:
    p = data.normal(1, *_TALL)
    return Loop(lambda _: backend.orthonormalize(p))


def _aq_sgd(sends: bool) -> Maker:
    """The work that AQ-SGD adds to its codec at one end, for a batch of samples that have a buffer.

    It looks the buffer up and updates it, with a plain sum where the codec would decode into the buffer.

    Args:
        sends: this end takes the difference and checks that it is finite; the other end copies the new buffer to its
            output.
    """

    def make(data: Data, backend: Any) -> Loop:
        n = min(_SAMPLE, data.numel)
        samples = [slice(begin, begin + n) for begin in range(0, data.numel - n + 1, n)]
        store, difference = SampleStore(n), torch.zeros(n)
        for sample, cut in enumerate(samples):
            store.put(sample, data.x[cut])

        def body(_: int) -> None:
            for sample, cut in enumerate(samples):
                buffer = store.row(sample, write=True)
                if sends:
                    backend.difference(data.x[cut], buffer, difference)
                buffer.add_(difference)
                if not sends:
                    data.y[cut].copy_(buffer)
                store.put(sample, buffer)

        return Loop(body)

    return make


class _Activation:
    """The tensor as saved activations of a transformer block: rows of one token's features, with a range per head."""

    def __init__(self, data: Data, backend: Any, bits: int = 8) -> None:
        self.rows = kernels.Rows(1, data.numel // math.prod(_HEADS), *_HEADS)
        self.x, self.y = data.x[: self.rows.numel], data.y[: self.rows.numel]
        self.low, high = backend.row_extremes(self.x, self.rows)
        self.step = (high - self.low) / (2**bits - 1)
        self.ranges = torch.stack((self.low, self.step))
        self.codes = torch.empty(self.rows.nbytes(bits), dtype=torch.uint8)


def _activation_extremes(data: Data, backend: Any) -> Loop:
    a = _Activation(data, backend)
    return Loop(lambda _: backend.row_extremes(a.x, a.rows), nbytes=a.x.nbytes)


def _activation_quantize(bits: int, *, watch: bool = False) -> Maker:
    def make(data: Data, backend: Any) -> Loop:
        a = _Activation(data, backend, bits)
        quantize = backend.quantize_rows_extremes if watch else backend.quantize_rows
        return Loop(
            lambda seed: quantize(a.x, a.codes, a.rows, a.low, a.step, bits=bits, stochastic=True, seed=seed),
            nbytes=a.x.nbytes + a.codes.nbytes,
        )

    return make


def _activation_learning(bits: int) -> Maker:
    """Quantize with estimated ranges, and update these with the batch, as a step does for most tensors."""

    def make(data: Data, backend: Any) -> Loop:
        a = _Activation(data, backend, bits)
        low, high = backend.row_extremes(a.x, a.rows)
        estimates, form = torch.stack((high - low, low)), {"bits": bits, "stochastic": True}
        if data.device == "cpu":
            return Loop(
                lambda seed: backend.quantize_rows_learning(a.x, a.codes, a.rows, estimates, 0.9, **form, seed=seed),
                nbytes=a.x.nbytes + a.codes.nbytes,
            )
        note, limits = torch.zeros(1), {"drift": 0.02, "jump": 4.0}
        return Loop(
            lambda seed: backend.quantize_rows_adapting(
                a.x, a.codes, a.rows, estimates, 0.9, note, **limits, **form, seed=seed
            ),
            nbytes=a.x.nbytes + a.codes.nbytes,
        )

    return make


def _activation_dequantize(bits: int) -> Maker:
    def make(data: Data, backend: Any) -> Loop:
        a = _Activation(data, backend, bits)
        backend.quantize_rows(a.x, a.codes, a.rows, a.low, a.step, bits=bits, stochastic=True)
        return Loop(
            lambda _: backend.dequantize_rows(a.codes, a.y, a.rows, a.ranges, bits=bits),
            nbytes=a.y.nbytes + a.codes.nbytes,
        )

    return make


def _activation_mask(data: Data, backend: Any) -> Loop:
    mask = torch.empty(-(-data.numel // 8), dtype=torch.uint8)
    return Loop(lambda _: backend.mask_between(data.x, mask), nbytes=data.x.nbytes + mask.nbytes)


def _activation_apply_mask(data: Data, backend: Any) -> Loop:
    mask = torch.empty(-(-data.numel // 8), dtype=torch.uint8)
    backend.mask_between(data.x, mask)
    return Loop(lambda _: backend.apply_mask(mask, data.x, data.y, 1.25), nbytes=2 * data.x.nbytes + mask.nbytes)


class _Pooled:
    """The tensor as planes, pooled as in a ResNet: one result for four elements."""

    def __init__(self, data: Data) -> None:
        rows, columns = _PLANE
        planes = data.numel // (rows * columns)
        x = data.x[: planes * rows * columns].view(planes, rows, columns)
        _, self.position = F.max_pool2d(x, 3, 2, 1, return_indices=True)
        self.windows = kernels.Windows(planes, rows // 2, columns // 2, 1, columns, 3, (2, 2), (1, 1))
        self.places = torch.empty(self.windows.numel, dtype=torch.uint8)


def _activation_places(data: Data, backend: Any) -> Loop:
    a = _Pooled(data)
    return Loop(lambda _: backend.pool_places(a.position, a.places, a.windows))


def _activation_positions(data: Data, backend: Any) -> Loop:
    a = _Pooled(data)
    backend.pool_places(a.position, a.places, a.windows)
    return Loop(lambda _: backend.pool_positions(a.places, a.position, a.windows))


LOOPS: dict[str, Maker] = {
    "uniform-4bit-stochastic-encode": _quantizer(4, "minmax", True),
    "uniform-4bit-decode-accumulate": _dequantizer(4, "minmax"),
    "uniform-8bit-nearest-encode": _quantizer(8, "minmax", False),
    "uniform-8bit-decode-accumulate": _dequantizer(8, "minmax"),
    "uniform-2bit-stochastic-encode": _quantizer(2, "minmax", True),
    "uniform-2bit-decode-accumulate": _dequantizer(2, "minmax"),
    "qsgd-4bit-encode": _quantizer(4, "absmax", True),
    "qsgd-4bit-l2-encode": _quantizer(4, "l2", True),
    "qsgd-4bit-decode-accumulate": _dequantizer(4, "absmax"),
    "sign-encode": _quantizer(1, "mean", False),
    "eden-4bit-encode": _rotated(4, decode=False),
    "eden-4bit-decode-accumulate": _rotated(4, decode=True),
    "eden-1bit-encode": _rotated(1, decode=False),
    "eden-1bit-decode-accumulate": _rotated(1, decode=True),
    "group-minmax": lambda data, backend: Loop(lambda _: backend.group_minmax(data.x, GROUP), nbytes=data.x.nbytes),
    "topk-sampled-select": _select(sampled=True),
    "topk-exact-select": _select(sampled=False),
    "threshold-select": _threshold,
    "compensate": _compensate,
    "ef-topk-encode": _ef_topk_encode(DENSITY),
    "ef-topk-16-encode": _ef_topk_kept(DENSITY, 16),
    "ef-topk-8-encode": _ef_topk_kept(DENSITY, 8),
    "ef-topk-1%-encode": _ef_topk_encode(_DENSER),
    "ef-topk-1%-16-encode": _ef_topk_kept(_DENSER, 16),
    "ef-topk-1%-8-encode": _ef_topk_kept(_DENSER, 8),
    "residual-keep-16": _keep(16),
    "residual-keep-8": _keep(8),
    "residual-read-8": _keep(8, read=True),
    "take-difference": _take_difference,
    "all-finite": lambda data, backend: Loop(lambda _: backend.all_finite(data.x), nbytes=data.x.nbytes),
    "levels-2bit-encode": _levels(2, decode=False),
    "levels-2bit-decode": _levels(2, decode=True),
    "levels-4bit-encode": _levels(4, decode=False),
    "elias-fano-encode": _elias_fano_encode,
    "elias-fano-decode": _elias_fano_decode,
    "sparse-accumulate": _sparse_accumulate,
    "split-shares-8": _split_shares,
    "lowrank-4-decode-accumulate": _low_rank_product,
    "dgc-momentum-select-mask": _dgc(sampled=False),
    "dgc-momentum-sampled-select-mask": _dgc(sampled=True),
    "dgc-encode": _dgc_encode,
    "orthonormalize-32x4096": _orthonormalize,
    "fixed-quantize": _fixed_quantize,
    "fixed-encode": _fixed_encode,
    "fixed-decode": _fixed_decode,
    "fixed-dequantize": _fixed_dequantize,
    "aq-sgd-send": _aq_sgd(sends=True),
    "aq-sgd-receive": _aq_sgd(sends=False),
    "activation-extremes": _activation_extremes,
    "activation-quantize-8": _activation_quantize(8),
    "activation-quantize-4": _activation_quantize(4),
    "activation-quantize-extremes-8": _activation_quantize(8, watch=True),
    "activation-quantize-extremes-4": _activation_quantize(4, watch=True),
    "activation-quantize-learning-8": _activation_learning(8),
    "activation-quantize-learning-4": _activation_learning(4),
    "activation-dequantize-8": _activation_dequantize(8),
    "activation-dequantize-4": _activation_dequantize(4),
    "activation-mask": _activation_mask,
    "activation-apply-mask": _activation_apply_mask,
    "activation-pool-places": _activation_places,
    "activation-pool-positions": _activation_positions,
}


# ---- baselines: the same jobs as a user would write them in plain torch ----------------------------------------------


def _baseline_quantize(data: Data, _: Any) -> Loop:
    grouped = data.x[: data.numel // GROUP * GROUP].view(-1, GROUP)

    def body(_: int) -> Tensor:
        low = grouped.amin(1, keepdim=True)
        step = (grouped.amax(1, keepdim=True) - low) / 15
        codes = ((grouped - low) / step + torch.rand_like(grouped)).floor_().clamp_(0, 15).to(torch.uint8)
        return codes[:, ::2] | (codes[:, 1::2] << 4)

    return Loop(body)


def _baseline_threshold(data: Data, _: Any) -> Loop:
    value = float(data.x.abs().kthvalue(data.numel - data.k + 1).values)
    return Loop(lambda _: (data.x.abs() >= value).nonzero())


def _baseline_qr(data: Data, _: Any) -> Loop:
    p = data.normal(*reversed(_TALL))
    return Loop(lambda _: torch.linalg.qr(p))


def _bitsandbytes_quantize(data: Data, _: Any) -> Loop:
    from bitsandbytes.functional import quantize_blockwise

    state: list[Tensor] = []

    def body(_: int) -> None:
        codes, scales = quantize_blockwise(data.x, blocksize=_BLOCKWISE)
        state[:] = codes, scales.absmax

    body(0)
    return Loop(body, nbytes=data.x.nbytes + sum(part.nbytes for part in state))


def _bitsandbytes_dequantize(data: Data, _: Any) -> Loop:
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    codes, scales = quantize_blockwise(data.x, blocksize=_BLOCKWISE)
    nbytes = codes.nbytes + scales.absmax.nbytes + data.y.nbytes
    return Loop(lambda _: dequantize_blockwise(codes, scales, blocksize=_BLOCKWISE), nbytes=nbytes)


#: Elements that share a scale in bitsandbytes: of the sizes that it has on every device, the nearest to :data:`GROUP`.
_BLOCKWISE = 256

#: Name → the package, and its loop for the same job: 8 bits, scaled by the largest magnitude of a block.
OTHERS: dict[str, tuple[str, Maker]] = {
    "bitsandbytes 8-bit encode": ("bitsandbytes", _bitsandbytes_quantize),
    "bitsandbytes 8-bit decode": ("bitsandbytes", _bitsandbytes_dequantize),
}

BASELINES: dict[str, Maker] = {
    "torch.topk": lambda data, _: Loop(lambda _: data.x.abs().topk(data.k, sorted=False)),
    "torch 4-bit stochastic quantize": _baseline_quantize,
    "torch threshold and nonzero": _baseline_threshold,
    "torch.linalg.qr, 4096x32": _baseline_qr,
    "torch.isfinite().all()": lambda data, _: Loop(lambda _: data.x.isfinite().all()),
}
