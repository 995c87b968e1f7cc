"""Replicas, the copies of a model: checks of sharded replicas, and the start from equal parameters.

Several ranks may hold one replica together, each with a shard of every parameter (with FSDP2, as DTensors). Averages
are then taken shard by shard, among the ranks that hold the same shard of each replica.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from narrowband.averaging.agreement import Agreement
from narrowband.averaging.flat import GROUP_NBYTES, empty_like, groups_of, local, parts_of, real, rows_of
from narrowband.averaging.who import ddps_in, handles_of
from narrowband.collectives import Peers, can_send_from, wait_for
from narrowband.collectives.primitives import all_gather
from narrowband.errors import UnsupportedError
from narrowband.kernels import checksum

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from narrowband.averaging.agreement import Facts

__all__ = ["begin_with_the_first", "check_once", "check_parts", "check_replica", "differ", "groups_of_replica"]

#: Parameters are compared and sent in pieces of this many bytes.
_PIECE_NBYTES = 1 << 20


def check_replica(model: nn.Module | Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Check that the group has no other rank of this rank's replica.

    Args:
        model: the model, or its parameters.
        group: the ranks that average.

    Raises:
        UnsupportedError: it has one.
    """
    if group is None:
        return  # reported by another check
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    together: set[int] = set()
    for each in ddps_in(model).values() if isinstance(model, nn.Module) else ():
        together |= set(dist.get_process_group_ranks(each.process_group))
    if both := sorted(others & together):
        raise UnsupportedError(
            f"DistributedDataParallel averages the gradients of this model with ranks {both} already, uncompressed, in "
            "every step. Leave it out: pass the module itself, and train that. Or, if it is for the ranks of one "
            "machine, give it the process_group of these, and pass the process_group of one rank in each machine here"
        )
    together = set()
    for p in model.parameters() if isinstance(model, nn.Module) else model:
        if hasattr(p, "device_mesh"):
            together |= set(p.device_mesh.mesh.flatten().tolist())
    if both := sorted(others & together):
        raise UnsupportedError(
            f"process_group has ranks {both}, which train the same replica as this rank and average with it already. "
            'Pass the group of the ranks that hold the same part of each replica, as mesh["replicas"].get_group() is, '
            "and use a mesh with the ranks of one replica only for the model itself"
        )


def check_once(model: nn.Module, group: dist.ProcessGroup | None, *besides: str) -> None:
    """Check that nothing of another kind averages a model with ranks of the group already.

    Args:
        model: the model, or the DistributedDataParallel around it.
        group: the ranks that are to average.
        besides: what averages in another way: ``compress_gradients``, ``compress_updates``, ``CodedDataParallel``.

    Raises:
        UnsupportedError: one of them does.
    """
    others = set() if group is None else set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for call, ranks in handles_of(model):
        both = sorted(others & ranks)
        if call in besides and both:
            coded = call == "CodedDataParallel"
            has = "is in CodedDataParallel" if coded else f"has a handle of {call} already"
            instead = "Train the module without that wrapper" if coded else "Call remove() of that handle first"
            raise UnsupportedError(
                f"this model, or a part of it, {has}, which averages with ranks {both}. What ranks have averaged is "
                f"equal on all of them, so averaging it again would be for nothing. {instead}; or give the two process "
                "groups that have only this rank in common, such as the ranks of one machine for gradients, and one "
                "rank of each machine for updates"
            )


def check_outside_ddp(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Check that no DistributedDataParallel in a model averages with ranks of the group.

    Raises:
        UnsupportedError: one does.
    """
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for name, ddp in ddps_in(model).items():
        both = sorted(others & set(dist.get_process_group_ranks(ddp.process_group)))
        if both:
            raise UnsupportedError(
                f"{name or 'the model'} is a DistributedDataParallel, which averages gradients with ranks {both} in "
                "backward, without compression. Averaging them again would send more, not less. Use "
                "compress_gradients(model, spec), which compresses what DistributedDataParallel sends; or train the "
                "module inside it, and pass that to nb.Averager"
            )


def groups_of_replica(model: object) -> list[dist.ProcessGroup]:
    """Return the process groups in which ranks train one replica together, once each: those of DistributedDataParallel
    in the model, and those of each dimension of the meshes that its parameters are sharded over.

    Args:
        model: the model; for what is no module, there are none.
    """
    if not isinstance(model, nn.Module):
        return []
    found: list[Any] = [each.process_group for each in ddps_in(model).values()]
    for mesh in dict.fromkeys(p.device_mesh for p in cast("Any", model).parameters() if hasattr(p, "device_mesh")):
        found += [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return list(dict.fromkeys(found))


def check_parts(model: nn.Module, what: str, *, min_numel: int = 0) -> None:
    """Refuse decisions that each rank of a sharded replica takes by its own shards, if parameters that all ranks hold
    whole are affected: the ranks' copies of these would diverge.

    Args:
        model: this rank's model.
        what: the decision, as the beginning of the error's sentence.
        min_numel: the decision affects matrices of at least this many elements; 0: all parameters.

    Raises:
        UnsupportedError: such parameters are affected.
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
            f"{what} on each rank separately, from that rank's shards. But {', '.join(whole)} are not sharded, and the "
            "copies on the ranks of a replica would become different: shard these parameters too, or do without it"
        )


@torch.no_grad()
def begin_with_the_first(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """Copy all parameters and buffers, also those that are not trained, from the group's first rank to all others. A
    collective.

    Ranks compare fingerprints of pieces, and only pieces that differ are sent: none if all ranks were initialized
    alike, and only the rest if an earlier attempt broke off. A piece travels in a chain through the ranks that lack it,
    so the first rank sends it only once; ranks that have it neither send nor receive it. Tensors are sent row by row,
    because tensors that are not averaged may have another memory format on each rank.

    If it breaks off, pieces that have arrived are kept, so that only the rest is sent the next time. Until then, a rank
    that lacked some has a mix of both ranks' parameters, and must not train with them.

    Returns:
        How many bytes this rank received.

    Raises:
        DisagreementError: ranks have different parameters or buffers; on all ranks, and nothing has changed.
        RuntimeError: it broke off.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return 0
    everything: dict[int, tuple[str, Tensor]] = {}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        everything.setdefault(id(x), (name, local(x)))
    _check_same(list(everything.values()), group)
    groups = list(groups_of(x for _, x in everything.values()))
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


def differ(tensors: Iterable[Tensor], peers: Peers) -> list[bool]:
    """Return of each tensor whether any two ranks have other bits in it: their checksums differ. A collective; ranks
    have tensors of the same shapes, or each the same shard.
    """
    marks = torch.stack([checksum(real(local(x))) for x in tensors])
    mine = marks if can_send_from(peers.group, marks.device) else marks.cpu()
    of_all = torch.empty(peers.size, mine.numel(), dtype=torch.int64, device=mine.device)
    if (work := all_gather(of_all, mine, peers)) is not None:
        work.wait()
    found: list[bool] = (of_all != of_all[0]).any(0).tolist()
    return found


def _check_same(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Check that all ranks have the same tensors, in the same order. A collective.

    Raises:
        DisagreementError: they have not; on all ranks.
    """
    peers = Peers.of(cast("dist.ProcessGroup", group or dist.group.WORLD))
    device = next((x.device for _, x in named), torch.device("cpu"))
    cpu = torch.device("cpu")
    facts: Facts = {
        "call": "copy the first rank's parameters and buffers",
        # Other versions of this library might cut tensors into other pieces.
        "pieces": f"{GROUP_NBYTES} bytes in {_PIECE_NBYTES}",
        "parameter or buffer": {name: f"{at}: {tuple(x.shape)}, {x.dtype}" for at, (name, x) in enumerate(named)},
    }
    Agreement(peers, cpu if can_send_from(peers.group, cpu) else device).now(
        facts, "Build the same model on all ranks, with the same buffers and frozen parameters, in the same order"
    )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return a flat copy of tensors, end to end and row by row."""
    flat = empty_like(tensors)
    for x, part in zip(tensors, parts_of(flat, map(rows_of, tensors)), strict=True):
        part.copy_(real(x))
    return flat


def _pieces(flat: Tensor) -> list[Tensor]:
    """Split a flat tensor's bytes into pieces of ``_PIECE_NBYTES``."""
    return list(torch.split(flat.view(torch.uint8), _PIECE_NBYTES))


def _fingerprint(piece: Tensor) -> bytes:
    array: Any = piece.cpu().numpy()
    return hashlib.blake2b(array, digest_size=16).digest()


def _relay(
    pieces: Sequence[Tensor], lacking: Sequence[Sequence[int]], rank: int, group: dist.ProcessGroup | None
) -> int:
    """Send each piece from the first rank along the chain of ranks that lack it. Return the bytes received here."""
    received = 0
    sending: list[tuple[Any, Tensor]] = []
    for piece, needy in zip(pieces, lacking, strict=True):
        chain = [0, *needy]
        if len(chain) == 1 or rank not in chain:
            continue
        place = chain.index(rank)
        # Gloo sends from CPU memory.
        memory = piece.cpu() if dist.get_backend(group) == "gloo" else piece
        if place:
            coming = dist.irecv(memory, group=group, group_src=chain[place - 1])
            assert coming is not None
            wait_for(coming, group)
            piece.copy_(memory)
            received += piece.numel()
        if place + 1 < len(chain):
            sending.append((dist.isend(memory, group=group, group_dst=chain[place + 1]), memory))
    for work, _ in sending:
        if work is not None:
            wait_for(work, group)
    return received
