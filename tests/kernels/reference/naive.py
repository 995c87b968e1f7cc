"""The definitions of ``narrowband.kernels``, derived a second time with loops over Python ints and numpy scalars.

Everything named ``naive_*`` is written from the text of the docstrings in ``kernels``, bit by bit, and shares no code
with the reference that is tested against it. ``tests/kernels/backends`` then compares each backend with the reference.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from narrowband import kernels
from tests.kernels.tables import reference

SIZES = [0, 1, 7, 8, 127, 128, 129, 1000]
GROUPS = [1, 8, 100, 128]
KINDS = ["normal", "equal", "zeros", "signed-zeros", "denormal", "tiny", "huge", "one-large", "non-finite"]
#: (scale, bits) of every quantizer there is; the symmetric scales need a code on each side of zero.
QUANTIZERS = {
    "minmax": range(1, 9),
    "absmax": range(2, 9),
    "l2": range(2, 9),
    "mean": range(1, 2),
}
f32 = np.float32


def make(kind: str, n: int, seed: int) -> np.ndarray:
    """Values of one kind: float32 (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(f32)
    if kind == "equal":
        x[:] = f32(0.3)
    elif kind == "zeros":
        x[:] = 0
    elif kind == "signed-zeros":
        x = np.copysign(f32(0), x)
    elif kind == "denormal":
        x = (x * 1e-20).astype(f32) * f32(1e-20)
    elif kind == "tiny":
        x *= f32(2.0**-124)
    elif kind == "huge":
        x = np.clip(x, -3, 3) * f32(5e36)  # the norm of a group is still finite
    elif kind == "one-large" and n:
        x[rng.integers(n)] = 1e6
    elif kind == "non-finite" and n:
        x[rng.integers(n, size=1 + n // 300)] = rng.choice(np.array([np.nan, np.inf, -np.inf], f32))
    return x


def some_values(max_kind: int = len(KINDS)) -> st.SearchStrategy[np.ndarray]:
    return st.builds(make, st.sampled_from(KINDS[:max_kind]), st.sampled_from(SIZES), st.integers(0, 2**32 - 1))


def some_quantizer(*scales: str) -> st.SearchStrategy[tuple[str, int]]:
    return st.one_of([st.tuples(st.just(s), st.sampled_from(QUANTIZERS[s])) for s in scales or QUANTIZERS])


seeds = st.integers(0, 2**64 - 1)
lean = settings(max_examples=60, deadline=None)


def naive_mix(h: int) -> int:
    h ^= h >> 16
    h = (h * 0x7FEB352D) % 2**32
    h ^= h >> 15
    h = (h * 0x846CA68B) % 2**32
    h ^= h >> 16
    return h


def naive_hash(i: int, seed: int) -> int:
    fold = (naive_mix(seed % 2**32) + 0x9E3779B9 * naive_mix(seed // 2**32) + 0x85EBCA6B) % 2**32
    return naive_mix((i + fold) % 2**32)


def naive_uniform(i: int, seed: int, bits: int = 24) -> np.float32:
    return f32(naive_hash(i, seed) // 2 ** (32 - bits) / 2**bits)


def naive_header(values: np.ndarray, bits: int, scale: str) -> tuple[np.float32, np.float32]:
    """(lo, step) of one group; lo is 0 where the scale has none."""
    if not np.isfinite(values).all():
        return f32(np.nan), f32(np.nan)
    s = 2 ** (bits - 1) - 1
    exact = [float(v) for v in values]
    if scale == "minmax":
        return f32(min(exact)), f32(f32(max(exact)) - f32(min(exact))) / f32(2**bits - 1)
    if scale == "absmax":
        return f32(0), f32(max(abs(v) for v in exact)) / f32(s)
    if scale == "l2":
        return f32(0), f32(math.sqrt(math.fsum(v * v for v in exact)) / s)
    return f32(0), f32(2 * math.fsum(abs(v) for v in exact) / len(exact))


def naive_code(
    value: np.float32,
    i: int,
    lo: np.float32,
    step: np.float32,
    bits: int,
    scale: str,
    stochastic: bool,
    seed: int,
    random_bits: int = 24,
) -> int:
    if np.isnan(step):
        return 0
    if scale == "mean":
        return 1 if value >= 0 else 0
    s = 2 ** (bits - 1) - 1
    inv = f32(1) / step if step >= 2.0**-126 else f32(0)
    u = naive_uniform(i, seed, random_bits if scale == "minmax" else 25 - bits) if stochastic else f32(0.5)
    scaled = f32(value - lo) * inv + u if scale == "minmax" else f32(value * inv) + f32(f32(s) + u)
    return int(np.clip(np.floor(scaled), 0, 2**bits - 1 if scale == "minmax" else 2 * s))


def naive_value(code: int, lo: np.float32, step: np.float32, bits: int, scale: str) -> np.float32:
    if scale == "minmax":
        return lo + f32(code) * step
    return f32(code - (0.5 if scale == "mean" else 2 ** (bits - 1) - 1)) * step


def naive_places(m: int, bits: int) -> list[list[tuple[int, int]]]:
    """Where each bit of each code of a group of m goes: ``places[j][b] = (byte, bit)``."""
    places: list[list[tuple[int, int]]] = [[] for _ in range(m)]
    start = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            stride = math.ceil(m * width / 8)
            for j in range(m):
                places[j] += [(start + j % stride, (j // stride) * width + b) for b in range(width)]
            start += stride
    return places


def naive_group_nbytes(m: int, bits: int) -> int:
    return sum(math.ceil(m * width / 8) for width in (8, 4, 2, 1) if bits & width)


def naive_pack(codes: list[int], bits: int) -> bytes:
    packed = bytearray(naive_group_nbytes(len(codes), bits))
    for code, places in zip(codes, naive_places(len(codes), bits), strict=True):
        for b, (byte, bit) in enumerate(places):
            packed[byte] |= (code >> b & 1) << bit
    return bytes(packed)


def naive_unpack(packed: bytes, m: int, bits: int) -> list[int]:
    return [
        sum((packed[byte] >> bit & 1) << b for b, (byte, bit) in enumerate(places)) for places in naive_places(m, bits)
    ]


def naive_bfloat16(value: np.float32) -> float:
    """The nearest multiple of the spacing of bfloat16 at this value, of two as near the even one."""
    exact = float(value)
    if not math.isfinite(exact):
        return exact
    _, exponent = math.frexp(exact)
    spacing = 2.0 ** max(exponent - 8, -133)  # eight significant bits; below 2**-126 the spacing stays
    rounded = round(exact / spacing) * spacing
    return rounded if abs(rounded) < 2.0**128 else math.copysign(math.inf, exact)


def naive_cut(n: int, group: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + group, n)) for begin in range(0, n, group)]


def naive_magnitude(value: Any) -> int:
    return int(f32(value).view(np.uint32)) & 0x7FFFFFFF


def naive_topk(x: np.ndarray, k: int) -> list[int]:
    return sorted(sorted(range(x.size), key=lambda i: (-naive_magnitude(x[i]), i))[:k])


def naive_strata(n: int, size: int, seed: int) -> list[int]:
    edges = [i * n // size for i in range(size + 1)] if size else []
    return [edges[i] + (naive_hash(i, seed) * (edges[i + 1] - edges[i]) >> 32) for i in range(size)]


def naive_elias_fano(indices: list[int], n: int) -> bytes:
    k = len(indices)
    low = 0
    while k * 2**low < n:
        low += 1
    upper, lower = [0] * (2 * k), []
    for i, index in enumerate(indices):
        upper[(index >> low) + i] = 1
        lower += [index >> b & 1 for b in range(low)]
    whole = b""
    for bits in (upper, lower):
        part = bits + [0] * (-len(bits) % 8)
        whole += bytes(sum(part[8 * byte + b] << b for b in range(8)) for byte in range(len(part) // 8))
    return whole


def header_floats(n: int, group: int, scale: str) -> int:
    return -(-n // group) * (2 if scale == "minmax" else 1)


def encode(
    x: np.ndarray, bits: int, group: int, scale: Any, stochastic: bool, seed: int = 0, padding: int = 0
) -> bytes:
    nbytes = 4 * header_floats(x.size, group, scale) + kernels.packed_nbytes(x.size, bits, group)
    out = torch.full((nbytes + padding,), 0xAA, dtype=torch.uint8)
    reference.quantize_groups(
        torch.from_numpy(x), out, bits=bits, group=group, scale=scale, stochastic=stochastic, seed=seed
    )
    return out.numpy().tobytes()


def decode(payload: bytes, n: int, bits: int, group: int, scale: Any) -> np.ndarray:
    out = torch.full((n,), 7.0)
    reference.dequantize_groups(
        torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)],
        out,
        bits=bits,
        group=group,
        scale=scale,
    )
    return out.numpy()


def split(payload: bytes, n: int, group: int, scale: str) -> tuple[np.ndarray, np.ndarray, bytes]:
    """(lo or zeros, step, codes) of a payload."""
    groups = -(-n // group)
    floats = np.frombuffer(payload[: 4 * header_floats(n, group, scale)], f32)
    lows = floats[:groups] if scale == "minmax" else np.zeros(groups, f32)
    return lows, floats[floats.size - groups :], payload[4 * floats.size :]


def ints(indices: torch.Tensor) -> list[int]:
    assert indices.dtype == torch.int32
    return indices.tolist()


def pick(n: int, k: int, seed: int) -> list[int]:
    """k distinct sorted indices below n."""
    return sorted(np.random.default_rng(seed).choice(n, k, replace=False).tolist())


def elias_fano(indices: list[int], n: int) -> torch.Tensor:
    out = torch.full((kernels.elias_fano_nbytes(len(indices), n),), 0xAA, dtype=torch.uint8)
    reference.elias_fano_encode(torch.tensor(indices, dtype=torch.int32), n, out)
    return out
