"""How a sparse payload says which elements it holds.

Indices are sorted. They are stored Elias–Fano, which needs k·(2 + ⌈log₂ n/k⌉) bits whatever they are, so the size of a
payload is known before anything is selected; or, for comparison, as plain 32-bit numbers, or in the format of DGC's
paper (arXiv 1712.01887, algorithm 1): with each value, 16 bits that say how many zeros lie before it. A run of more
than 65,535 takes values of zero in between; n elements need at most n / 65,536; how many entries there are stands
before the runs. At a density of 0.1 % that is 16 bits per index where Elias–Fano has 12.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.errors import PayloadError

__all__ = [
    "entries",
    "index_nbytes",
    "read_indices",
    "read_runs",
    "with_stops",
    "without_stops",
    "write_indices",
    "write_runs",
]

#: Elements that an entry of 16 bits can lead on: 65,535 zeros and itself.
_LONGEST_RUN = 1 << 16


def index_nbytes(k: int, n: int, indices: str) -> int:
    """Bytes of the indices of k elements of n."""
    if indices == "elias-fano":
        return kernels.elias_fano_nbytes(k, n)
    return 4 * k if indices == "int32" else 4 + 2 * entries(k, n, indices)


def entries(k: int, n: int, indices: str) -> int:
    """How many values a payload of k elements has room for."""
    return k + n // _LONGEST_RUN if indices == "runs" else k


def write_indices(at: Tensor, n: int, indices: str, out: Tensor) -> None:
    """Write sorted int32 indices below n, in any format but runs; zeros fill the rest of ``out``."""
    used = index_nbytes(at.numel(), n, indices)
    if indices == "int32":
        out[:used].view(torch.int32).copy_(at)
    else:
        kernels.elias_fano_encode(at, n, out[:used])
    out[used:] = 0


def with_stops(at: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same elements, and zeros in between wherever a run would not fit into 16 bits."""
    gaps = torch.diff(at.long(), prepend=at.new_full((1,), -1))  # one more than the zeros in between
    stops = (gaps - 1) // _LONGEST_RUN
    if not bool(stops.any()):
        return at, values
    first = torch.cumsum(stops + 1, 0) - stops - 1  # where an element's own entries begin
    owner = torch.repeat_interleave(torch.arange(at.numel(), dtype=torch.int64, device=at.device), stops + 1)
    step = torch.arange(owner.numel(), dtype=torch.int64, device=at.device) - first[owner] + 1
    is_stop = step <= stops[owner]
    before = at.long() - gaps  # the element before
    places = torch.where(is_stop, before[owner] + step * _LONGEST_RUN, at.long()[owner])
    return places.to(torch.int32), torch.where(is_stop, 0.0, values[owner])


def without_stops(at: Tensor, values: Tensor, k: int, *, fewer: bool) -> tuple[Tensor, Tensor]:
    """What :func:`with_stops` was given.

    An element of value zero that ends a longest run looks like a stop, so their number decides.

    Args:
        at: what :func:`read_runs` has read.
        values: one for each.
        k: how many elements there were.
        fewer: whether there may have been less; then one that is zero counts as a stop where it looks like one.
    """
    longest = torch.diff(at, prepend=at.new_full((1,), -1)) == _LONGEST_RUN
    stops = longest & ~(values.abs() > 0.0)  # a zero of a group that is not finite comes back as NaN
    if not fewer:
        stops &= torch.cumsum(stops, 0) <= at.numel() - k
    return at[~stops], values[~stops]


def write_runs(at: Tensor, out: Tensor) -> None:
    """Write the zeros before each of these indices, none of which are too many; zeros fill the rest of ``out``."""
    number = at.numel()
    runs = torch.diff(at.long(), prepend=at.new_full((1,), -1)) - 1
    out.zero_()
    out[:4].view(torch.int32)[0] = number
    out[4 : 4 + 2 * number].view(torch.uint16).copy_(runs.to(torch.uint16))


def read_runs(payload: Tensor, n: int) -> Tensor:
    """The indices (int32) that :func:`write_runs` wrote.

    Raises:
        PayloadError: more runs than there is room for, or runs that lead out of a tensor of n elements.
    """
    room, number = (payload.numel() - 4) // 2, int(payload[:4].view(torch.int32)[0])
    if not 0 <= number <= room:
        raise PayloadError(f"the payload says that it holds {number} runs, and has room for {room}: it is damaged")
    runs = payload[4 : 4 + 2 * number].view(torch.uint16)
    at = torch.cumsum(runs.long() + 1, 0) - 1
    if number and int(at[-1]) >= n:
        raise PayloadError(f"the runs of this payload end at {int(at[-1])}, the tensor has {n} elements: it is damaged")
    return at.to(torch.int32)


def read_indices(payload: Tensor, k: int, n: int, indices: str) -> Tensor:
    """The k indices (int32) below n that :func:`write_indices` wrote.

    Raises:
        PayloadError: they are not sorted, or not below n.
    """
    used = index_nbytes(k, n, indices)
    if indices == "int32":
        at = payload[:used].view(torch.int32)
        kernels.check_indices(at, n)
        return at
    return kernels.elias_fano_decode(payload[:used], k, n)
