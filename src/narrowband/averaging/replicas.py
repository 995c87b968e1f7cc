"""Models that ranks hold copies of: the part of a copy that a rank has, and how all copies become equal.

The ranks of a *replica* may hold a copy together, each a part of every parameter (FSDP2's shards are DTensors). What is
averaged is then averaged part by part, among the ranks that hold the same part of each replica.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from narrowband.averaging.flat import empty_like, groups_of, local, parts_of, real, rows_of
from narrowband.averaging.who import ddps_in
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["begin_with_the_first", "check_parts", "check_replica"]

#: Bytes that travel or not as one.
_PIECE_NBYTES = 1 << 20


def check_replica(model: nn.Module | Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """A process group has no two ranks of one replica.

    Args:
        model: it, or its parameters.
        group: the ranks that average.

    Raises:
        UnsupportedError: it has.
    """
    if group is None:
        return  # another check speaks of it
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    together: set[int] = set()
    for each in ddps_in(model).values() if isinstance(model, nn.Module) else ():
        together |= set(dist.get_process_group_ranks(each.process_group))
    for p in model.parameters() if isinstance(model, nn.Module) else model:
        if hasattr(p, "device_mesh"):
            together |= set(p.device_mesh.mesh.flatten().tolist())
    if both := sorted(others & together):
        raise UnsupportedError(
            f"ranks {both} of process_group train the same replica as this rank, and average with it already; pass the "
            'group of the ranks that hold the same part of each replica, such as mesh["replicas"].get_group(), and let '
            "the model's own mesh have the ranks of one replica alone"
        )


def check_parts(model: nn.Module, what: str, *, min_numel: int = 0) -> None:
    """What ranks of a replica decide each by the parts that it has is not about a parameter that all of them have.

    Args:
        model: this rank's.
        what: is decided, as a sentence.
        min_numel: it is decided for matrices of so many elements; 0: for all parameters.

    Raises:
        UnsupportedError: it is, so these parameters would part.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    placements = {name: getattr(p, "placements", ()) for name, p in trained.items()}
    whole = [
        name
        for name, p in trained.items()
        if not any(each.is_shard() for each in placements[name])
        and (not min_numel or (p.dim() > 1 and p.numel() >= min_numel))
    ]
    if whole and any(placements.values()):
        raise UnsupportedError(
            f"{what} on each rank of a replica by the parts that it has, and all of them have {', '.join(whole)} as a "
            "whole, which would part: shard these parameters, too, or leave that out"
        )


@torch.no_grad()
def begin_with_the_first(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """All ranks of a group get the parameters and buffers of its first, those that are not trained, too. A collective.

    Ranks compare fingerprints of pieces, and only pieces that differ travel: none where all have drawn the same
    numbers, and only the rest where an earlier attempt broke off. A piece goes from rank to rank among those that lack
    it, so the first sends it once, however many these are; others send and receive nothing. Tensors travel row by row:
    what ranks do not average may lie in memory in another order on each.

    Where it breaks off, pieces that arrived are kept, so that only the rest travels the next time; until then a rank
    that lacked some has parameters of both, and must not go on with them.

    Returns:
        Bytes that this rank received.

    Raises:
        RuntimeError: it broke off.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return 0
    everything: dict[int, Tensor] = {}
    for x in (*model.parameters(), *model.buffers()):
        everything.setdefault(id(x), local(x))
    groups = list(groups_of(everything.values()))
    own = [[_fingerprint(piece) for piece in _pieces(_flat(together))] for together in groups]
    of_all: list[Any] = [None] * size
    dist.all_gather_object(of_all, own, group=group)
    received = 0
    for at, together in enumerate(groups):
        first = of_all[0][at]
        lacking = [[r for r in range(1, size) if of_all[r][at][i] != mark] for i, mark in enumerate(first)]
        if not any(rank in chain or (rank == 0 and chain) for chain in lacking):
            continue
        flat = _flat(together)
        try:
            received += _relay(_pieces(flat), lacking, rank, group)
        finally:
            if any(rank in chain for chain in lacking):
                for x, part in zip(together, parts_of(flat, map(rows_of, together)), strict=True):
                    real(x).copy_(part)
    return received


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of tensors, end to end, row by row."""
    flat = empty_like(tensors)
    for x, part in zip(tensors, parts_of(flat, map(rows_of, tensors)), strict=True):
        part.copy_(real(x))
    return flat


def _pieces(flat: Tensor) -> list[Tensor]:
    """Bytes, so many at a time."""
    return list(torch.split(flat.view(torch.uint8), _PIECE_NBYTES))


def _fingerprint(piece: Tensor) -> bytes:
    array: Any = piece.cpu().numpy()
    return hashlib.blake2b(array, digest_size=16).digest()


def _relay(
    pieces: Sequence[Tensor], lacking: Sequence[Sequence[int]], rank: int, group: dist.ProcessGroup | None
) -> int:
    """Each piece from the first rank to those that lack it, one after the other. Bytes that this rank received."""
    received = 0
    sending: list[tuple[Any, Tensor]] = []
    for piece, needy in zip(pieces, lacking, strict=True):
        chain = [0, *needy]
        if len(chain) == 1 or rank not in chain:
            continue
        place = chain.index(rank)
        # Gloo sends from the memory of the CPU.
        memory = piece.cpu() if dist.get_backend(group) == "gloo" else piece
        if place:
            dist.recv(memory, group=group, group_src=chain[place - 1])
            piece.copy_(memory)
            received += piece.numel()
        if place + 1 < len(chain):
            sending.append((dist.isend(memory, group=group, group_dst=chain[place + 1]), memory))
    for work, _ in sending:
        if work is not None:
            work.wait()
    return received
