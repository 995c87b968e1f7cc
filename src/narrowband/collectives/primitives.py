"""Building blocks of exchanges: slices of flat tensors, and collectives of ``torch.distributed``.

The functions have the same names with all versions of PyTorch, and also work among one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband.collectives.groups import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.collectives.engine import Pending
    from narrowband.collectives.executor import SerialExecutor
    from narrowband.collectives.peers import Peers

__all__ = [
    "all_gather",
    "all_gather_in_pairs",
    "all_gather_single",
    "all_to_all",
    "concatenated",
    "reduce_scatter_single",
    "spans_of",
]

#: The tag of point-to-point messages. Users may send messages in the same group, by default with tag 0.
_TAG = 0x6E62

#: Named all_gather_into_tensor before PyTorch 2.13.
all_gather_single: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
all_to_all_single: Callable[..., dist.Work | None] = dist.all_to_all_single


def concatenated(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate flat tensors; a single tensor is returned as it is, not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def spans_of(sizes: Sequence[int]) -> list[slice]:
    """Return consecutive slices of these sizes."""
    spans, at = [], 0
    for size in sizes:
        spans.append(slice(at, at + size))
        at += size
    return spans


def all_gather(out: Tensor, x: Tensor, peers: Peers) -> dist.Work | None:
    """``out[r]`` ← rank r's ``x``. Returns None if it is already done (one rank)."""
    if peers.size == 1:
        out.view(-1).copy_(x)
        return None
    return all_gather_single(out.view(-1), x, group=peers.group, async_op=True)


def all_gather_in_pairs(out: Tensor, x: Tensor, peers: Peers) -> Pending:
    """As :func:`all_gather`, by point-to-point messages; requires :attr:`Peers.pairs`."""
    assert peers.pairs is not None
    return _Rotation(list(out), [x] * peers.size, peers, peers.pairs)


def all_to_all(out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int], peers: Peers) -> Pending | None:
    """Send piece r of ``x`` to rank r, and receive piece r of ``out`` from it. Returns None if it is already done."""
    if peers.size == 1:
        out.view(-1).copy_(x)
        return None
    if peers.pairs is not None:
        into = [out.view(-1)[span] for span in spans_of(out_sizes)]
        return _Rotation(into, [x[span] for span in spans_of(sizes)], peers, peers.pairs)
    return all_to_all_single(out.view(-1), x, out_sizes, sizes, group=peers.group, async_op=True)


class _Rotation:
    """All-to-all in N − 1 steps; in each step, every rank sends to one rank and receives from one.

    It replaces gloo's own all-to-all, which sends to all ranks at once: N − 1 senders then meet at each receiver and
    use two thirds of a link, where the rotation uses nine tenths. Gloo's point-to-point messages have no future, so a
    thread waits for them. All rotations of a handle share one thread: one ends before the next begins, on every rank.
    """

    def __init__(self, into: Sequence[Tensor], parts: Sequence[Tensor], peers: Peers, executor: SerialExecutor) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()
        into[peers.rank].copy_(parts[peers.rank])
        executor.post(lambda: self._run(into, parts, peers))

    def _run(self, into: Sequence[Tensor], parts: Sequence[Tensor], peers: Peers) -> None:
        try:
            for step in range(1, peers.size):
                target, source = (peers.rank + step) % peers.size, (peers.rank - step) % peers.size
                receiving = dist.irecv(into[source], group=peers.group, tag=_TAG, group_src=source)
                sending = dist.isend(parts[target], group=peers.group, tag=_TAG, group_dst=target)
                for work in (receiving, sending):
                    if work is not None:
                        wait_for(work, peers.group)
        except Exception as error:
            self._future.set_exception(error)  # type: ignore[arg-type]
        else:
            self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        return self._future

    def wait(self) -> None:
        self._future.wait()
