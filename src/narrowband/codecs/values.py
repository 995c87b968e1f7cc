"""How a sparse payload stores the values of its elements.

There are five formats:

* ``fp32``: as they are.
* ``fp16``: rounded, and clamped to ±65,504: error feedback sends the rest later. Inf and NaN stay as they are.
* ``int8``: in steps of 1/127 of the largest magnitude of every 256 values.
* ``int4`` and ``int2``: a sign, and one of 8 or 2 magnitudes that each group of 256 values has of its own. Zero is none
  of these.

The part of a payload that stores values is its *head*. On a GPU, a few launches write or read the heads of several
tensors in ``fp16`` or ``int8``. In ``fp32``, the kernels that select elements and add them write and read values, too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from narrowband import kernels
from narrowband.codecs.base import aligned
from narrowband.codecs.quantized import Uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "SEVERAL",
    "WITHOUT_ZERO",
    "arriving_values",
    "read_all_values",
    "read_values",
    "round_all_values",
    "values_are_finite",
    "values_nbytes",
    "write_all_values",
    "write_values",
]

#: Formats that launches for several tensors write and read.
SEVERAL = ("fp32", "fp16", "int8")
#: Formats that cannot represent zero, and how many bits a value takes in them.
WITHOUT_ZERO = {"int4": 4, "int2": 2}

_INT8 = Uniform(bits=8, group=256, symmetric=True)
#: How many values share their magnitudes in ``int4`` and ``int2``.
_LEVEL_GROUP = 256
_FP16_MAX = 65504.0


def values_nbytes(k: int, form: str) -> int:
    """Return the bytes that k values take in a format, a multiple of 4."""
    if form == "int8":
        return _INT8.payload_nbytes(k)
    if form in WITHOUT_ZERO:
        return aligned(kernels.levels_nbytes(k, WITHOUT_ZERO[form], _LEVEL_GROUP))
    return aligned(k * (2 if form == "fp16" else 4))


def write_values(values: Tensor, form: str, head: Tensor) -> None:
    """Write flat float32 values into a head that is as long as they need."""
    if form == "fp32":
        head.view(torch.float32).copy_(values)
    elif form == "int8":
        _INT8.encode(values, out=head)
    elif form in WITHOUT_ZERO:
        kernels.levels_encode(values, head, bits=WITHOUT_ZERO[form], group=_LEVEL_GROUP)
    else:
        _write_halves(values, [head], [values.numel()])


def read_values(head: Tensor, k: int, form: str) -> Tensor:
    """Return the k values of a head, in float32; they may share its memory."""
    if form == "int8":
        return _INT8.decode(head, torch.empty(k, dtype=torch.float32, device=head.device))
    if form in WITHOUT_ZERO:
        return kernels.levels_decode(head, k, bits=WITHOUT_ZERO[form], group=_LEVEL_GROUP)
    if form == "fp16":
        return head.view(torch.float16)[:k].float()
    return head.view(torch.float32)


def values_are_finite(head: Tensor, k: int, form: str) -> bool:
    """Return whether all k values of a head are finite."""
    return _INT8.is_finite(head, k) if form == "int8" else kernels.all_finite(read_values(head, k, form))


# ---- several tensors, in fp16 or int8 --------------------------------------------------------------------------------


def write_all_values(values: Sequence[Tensor], form: str, heads: Sequence[Tensor]) -> bool:
    """Write the values of several tensors, each into its own head.

    Returns:
        Whether finite values arrive finite; or True, while :class:`~narrowband.kernels.Findings` note that on the
        device.
    """
    if form == "int8":
        return _INT8.encode_all(values, heads, seeds=[0] * len(values))
    _write_halves(torch.cat(list(values)), heads, [own.numel() for own in values])
    return True


def round_all_values(values: Sequence[Tensor], form: str, heads: Sequence[Tensor]) -> tuple[bool, list[Tensor]]:
    """Do :func:`write_all_values`, and also return what rounding has taken from each value. Overwrites ``values``."""
    ks = [own.numel() for own in values]
    if form == "int8":
        left = _minus_zeros(ks, values[0].device)  # −0 + x is x, whatever x is
        return _INT8.encode_all(values, heads, seeds=[0] * len(values), residuals=left), left
    wide = torch.cat(list(values))
    wide -= _write_halves(wide, heads, ks)
    return True, list(torch.split(wide, ks))


def arriving_values(values: Sequence[Tensor], form: str, heads: Sequence[Tensor]) -> tuple[bool, list[Tensor]]:
    """Do :func:`write_all_values`, and also return the values as they arrive. Overwrites ``values``."""
    ks = [own.numel() for own in values]
    if form == "fp16":
        return True, list(torch.split(_write_halves(torch.cat(list(values)), heads, ks), ks))
    fits, _ = round_all_values(values, form, heads)
    cuts = itertools.accumulate((own.numel() for own in heads), initial=0)
    places = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
    arriving = [torch.empty_like(own) for own in values]
    _INT8.decode_means(torch.cat(list(heads))[None], places, arriving, shapes=ks, seeds=[[0]] * len(ks))
    return fits, arriving


def read_all_values(payloads: Tensor, form: str, begins: Sequence[int], ks: Sequence[int]) -> list[Tensor]:
    """Return the values of several tensors, whose heads begin at these bytes of each rank's row of ``payloads``.

    Each is float32 of shape (ranks, k).
    """
    ranks, apart = payloads.shape[0], payloads.stride(0)
    room = torch.empty(ranks, sum(map(aligned, ks)), dtype=torch.float32, device=payloads.device)
    values = [own[:, :k] for own, k in zip(torch.split(room, [*map(aligned, ks)], 1), ks, strict=True)]
    rows = [row for own in values for row in own.unbind()]
    cuts = [
        slice(rank * apart + begin, rank * apart + begin + values_nbytes(k, form))
        for begin, k in zip(begins, ks, strict=True)
        for rank in range(ranks)
    ]
    end = (ranks - 1) * apart + payloads.shape[1]
    flat = payloads.as_strided((1, end), (aligned(end), 1))  # a rank's part of a tensor is then a tensor
    if form == "int8":
        _INT8.decode_means(flat, cuts, rows, shapes=[row.numel() for row in rows], seeds=[[0]] * len(rows))
    else:
        halves = [flat[0, cut].view(torch.float16)[: row.numel()] for cut, row in zip(cuts, rows, strict=True)]
        torch._foreach_copy_(rows, halves)
    return values


def _write_halves(values: Tensor, heads: Sequence[Tensor], ks: Sequence[int]) -> Tensor:
    """Write values in ``fp16``, k after k into one head after the other; return them as they arrive."""
    half = torch.where(values.isfinite(), values.clamp(-_FP16_MAX, _FP16_MAX), values).half()
    places = [own.view(torch.float16)[:k] for own, k in zip(heads, ks, strict=True)]
    torch._foreach_copy_(places, list(torch.split(half, list(ks))))
    behind = [own[2 * k :] for own, k in zip(heads, ks, strict=True) if own.numel() > 2 * k]
    if behind:
        torch._foreach_zero_(behind)
    return half.float()


def _minus_zeros(numels: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return tensors of −0, flat float32; each begins at a multiple of 16 bytes."""
    wholes = [aligned(numel) for numel in numels]
    room = torch.full((sum(wholes),), -0.0, dtype=torch.float32, device=device)
    return [own[:numel] for own, numel in zip(torch.split(room, wholes), numels, strict=True)]
