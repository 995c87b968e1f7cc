"""How a sparse payload stores the indices of its elements.

Indices are sorted. There are three formats:

* Elias–Fano takes k·(2 + ⌈log₂ n/k⌉) bits whatever the indices are, so the size of a payload is known before anything
  is selected.
* Plain 32-bit numbers, for comparison.
* Runs, the format of the DGC paper (arXiv 1712.01887, algorithm 1), for comparison: 16 bits per value that count the
  zeros before it. A run of more than 65,535 zeros needs values of zero in between (*stops*); n elements need at most n
  / 65,536 of them. The number of entries precedes the runs. At a density of 0.1 %, runs take 16 bits per index and
  Elias–Fano 12.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.errors import PayloadError

__all__ = ["check_numel", "entries", "index_nbytes", "listed", "read_indices", "without_stops", "write_indices"]

#: The most elements that signed 32-bit indices can address.
_MAX_NUMEL = 2**31 - 1
#: The most elements that an entry of 16 bits advances by: 65,535 zeros and the element itself.
_LONGEST_RUN = 1 << 16


def check_numel(numel: int) -> int:
    """Return ``numel`` if 32 bits can index so many elements.

    Raises:
        ValueError: they cannot.
    """
    if numel > _MAX_NUMEL:
        raise ValueError(f"sparse codecs index with 32 bits: {numel} elements are more than {_MAX_NUMEL}")
    return numel


def index_nbytes(k: int, n: int, indices: str) -> int:
    """Return the bytes that the indices of k of n elements take in the format ``indices``."""
    if indices == "elias-fano":
        return kernels.elias_fano_nbytes(k, n)
    return 4 * k if indices == "int32" else 4 + 2 * entries(k, n, indices)


def entries(k: int, n: int, indices: str) -> int:
    """Return how many values a payload of k elements has room for."""
    return k + n // _LONGEST_RUN if indices == "runs" else k


def listed(at: Tensor, values: Tensor, k: int, n: int, indices: str) -> tuple[Tensor, Tensor]:
    """Return what a payload of k elements stores of up to k: the indices, and a value for each of its :func:`entries`.

    Sampled selection may find fewer than k. The last index, n − 1, then fills up, with value zero. Runs need no index
    for values that fill up, but stops.
    """
    if indices == "runs":
        at, values = _with_stops(at, values)
        return at, torch.cat([values, values.new_zeros(entries(k, n, indices) - values.numel())])
    lacking = k - at.numel()
    if not lacking:
        return at, values
    return torch.cat([at, at.new_full((lacking,), n - 1)]), torch.cat([values, values.new_zeros(lacking)])


def write_indices(at: Tensor, n: int, indices: str, out: Tensor) -> None:
    """Write sorted int32 indices below n, as :func:`listed` returns them; zeros fill the rest of ``out``."""
    if indices == "runs":
        _write_runs(at, out)
        return
    used = index_nbytes(at.numel(), n, indices)
    if indices == "int32":
        out[:used].view(torch.int32).copy_(at)
    else:
        kernels.elias_fano_encode(at, n, out[:used])
    out[used:] = 0


def _with_stops(at: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Insert elements of value zero wherever the run before an element would not fit into 16 bits."""
    gaps = torch.diff(at.long(), prepend=at.new_full((1,), -1))  # the zeros in between, plus one
    stops = (gaps - 1) // _LONGEST_RUN
    if not bool(stops.any()):
        return at, values
    first = torch.cumsum(stops + 1, 0) - stops - 1  # each element's first entry
    owner = torch.repeat_interleave(torch.arange(at.numel(), dtype=torch.int64, device=at.device), stops + 1)
    step = torch.arange(owner.numel(), dtype=torch.int64, device=at.device) - first[owner] + 1
    is_stop = step <= stops[owner]
    before = at.long() - gaps  # index of the element before
    places = torch.where(is_stop, before[owner] + step * _LONGEST_RUN, at.long()[owner])
    return places.to(torch.int32), torch.where(is_stop, 0.0, values[owner])


def without_stops(at: Tensor, values: Tensor, k: int, *, fewer: bool) -> tuple[Tensor, Tensor]:
    """Undo what :func:`listed` does for runs.

    An element of value zero that ends a run of the longest length looks like a stop, so the number of stops decides.

    Args:
        at: the indices that :func:`read_indices` returned.
        values: one per index.
        k: how many elements there were.
        fewer: whether there may have been fewer than k; then every element that looks like a stop counts as one.
    """
    longest = torch.diff(at, prepend=at.new_full((1,), -1)) == _LONGEST_RUN
    stops = longest & ~(values.abs() > 0.0)  # NaN: a zero in a group that is not finite
    if not fewer:
        stops &= torch.cumsum(stops, 0) <= at.numel() - k
    return at[~stops], values[~stops]


def _write_runs(at: Tensor, out: Tensor) -> None:
    """Write the number of zeros before each of these indices, none above 65,535; zeros fill the rest of ``out``."""
    number = at.numel()
    runs = torch.diff(at.long(), prepend=at.new_full((1,), -1)) - 1
    out.zero_()
    out[:4].view(torch.int32)[0] = number
    out[4 : 4 + 2 * number].view(torch.uint16).copy_(runs.to(torch.uint16))


def _read_runs(payload: Tensor, n: int) -> Tensor:
    """Return the indices (int32) that :func:`_write_runs` wrote.

    Raises:
        PayloadError: there are more runs than the payload has room for, or they lead out of a tensor of n elements.
    """
    room, number = (payload.numel() - 4) // 2, int(payload[:4].view(torch.int32)[0])
    if not 0 <= number <= room:
        raise PayloadError(f"damaged payload: it claims to hold {number} runs, but has room for {room}")
    runs = payload[4 : 4 + 2 * number].view(torch.uint16)
    at = torch.cumsum(runs.long() + 1, 0) - 1
    if number and int(at[-1]) >= n:
        raise PayloadError(f"damaged payload: its runs end at element {int(at[-1])}, but the tensor has {n} elements")
    return at.to(torch.int32)


def read_indices(payload: Tensor, k: int, n: int, indices: str) -> Tensor:
    """Return the indices (int32) below n that :func:`write_indices` wrote: k, or the number of runs.

    Raises:
        PayloadError: the indices are not sorted, or not below n; or there are more runs than the payload has room for.
    """
    stored = payload[: index_nbytes(k, n, indices)]
    if indices == "elias-fano":
        return kernels.elias_fano_decode(stored, k, n)
    if indices == "runs":
        return _read_runs(stored, n)
    at = stored.view(torch.int32)
    kernels.check_indices(at, n)
    return at
