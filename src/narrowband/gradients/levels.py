"""Averaging on two levels: exact sums inside a node, compressed exchange of one shard per rank between nodes.

Links inside a machine are usually fast even where links between machines are slow. With L ranks in a node, a DDP bucket
is averaged like this:

* The bucket is cut into L shards, by rows of each parameter. The ranks of the node reduce-scatter it, so that each rank
  has the node's mean of one shard.
* Each rank gives its shard to the core of averaging, which compresses it, with feedback, and exchanges it with the
  ranks that have the same shard on other nodes.
* When the step has been averaged, the ranks of the node all-gather the shards, and DDP gets the whole bucket.

So the bytes between nodes and the residuals of a rank are 1/L of what they are when every rank is a node of its own.

What the DGC paper calls a rank is then a node: ``dgc`` clips the node's mean by its norm over all shards, for which the
ranks of the node add up their squared norms.

If one shard were not finite, the feedback of the other shards would still be committed. So the ranks of a node compare
flags before the last bucket, and if one rank has seen inf or NaN, all ranks send NaN. A rank without a part of the last
bucket holds its own last part back until then.

Everything here runs on a thread of its own, in the order in which buckets come, which is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from narrowband import kernels
from narrowband.averaging.core import is_in_backward
from narrowband.averaging.parameters import norms_of
from narrowband.averaging.plans import layers_of, plan_of_shards
from narrowband.averaging.step import ADVICE, fill_with_nan
from narrowband.averaging.who import averaged_by
from narrowband.collectives import SerialExecutor, borrow, group_of
from narrowband.errors import UnsupportedError
from narrowband.gradients.ddp import DDPCompression, at_the_end_of_backward
from narrowband.gradients.node import Node
from narrowband.kernels import Findings
from narrowband.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from narrowband.averaging.settings import Settings
    from narrowband.collectives import Loan
    from narrowband.gradients.hook import Hook

__all__ = ["Levels", "TwoLevelCompression", "levels_of", "own_shards", "shards_of"]

# ---- who is on which node --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Levels:
    """The two process groups of a rank.

    Attributes:
        inside: the ranks of this rank's node.
        between: the ranks with the same index within each node.
    """

    inside: dist.ProcessGroup
    between: dist.ProcessGroup


def levels_of(
    nodes: int | Literal["auto"] | DeviceMesh, group: dist.ProcessGroup, device: torch.device
) -> Levels | None:
    """Return the two groups for the user's ``nodes=``. A collective.

    None if every rank is a node of its own; without a mesh, also if all ranks are on one node.

    Args:
        nodes: the number of nodes, each with successive ranks; or ``auto``, which tells nodes apart by host name and
            torchrun's ``GROUP_RANK``; or a mesh of nodes × ranks.
        group: all ranks.
        device: of the gradients.

    Raises:
        ValueError: a number that does not divide the number of ranks, or a mesh of other ranks than the group's.
        UnsupportedError: nodes with different numbers of ranks, or ranks of one node on two hosts.
    """
    ranks = dist.get_process_group_ranks(group)
    if isinstance(nodes, SupportsIndex):  # NumPy's numbers, too
        nodes = whole_number("nodes", nodes)
    if isinstance(nodes, DeviceMesh):
        if nodes.ndim != 2 or sorted(nodes.mesh.flatten().tolist()) != sorted(ranks):
            raise ValueError(
                f"nodes={nodes}: expected a mesh of nodes × ranks that has exactly the ranks that average, {ranks}"
            )
        return None if nodes.size(1) == 1 else Levels(nodes.get_group(1), nodes.get_group(0))
    if nodes != "auto" and not isinstance(nodes, int):
        raise ValueError(f"nodes={nodes!r}: expected a number of machines, 'auto', or a mesh of nodes × ranks")
    here = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".strip()
    hosts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(hosts, here, group=group)
    if nodes == "auto":
        names = list(dict.fromkeys(hosts))
        node_of = [names.index(host) for host in hosts]
    else:
        if not 0 < nodes <= len(ranks) or len(ranks) % nodes:
            raise ValueError(f"nodes={nodes} does not divide {len(ranks)} ranks; give the number of machines")
        node_of = [at * nodes // len(ranks) for at in range(len(ranks))]
        for node in range(nodes):
            spread = sorted({host for host, own in zip(hosts, node_of, strict=True) if own == node})
            if len(spread) > 1:
                raise UnsupportedError(
                    f"nodes={nodes} makes one node of ranks on {len(spread)} hosts ({', '.join(spread)}); give the "
                    "number of hosts, with successive ranks on each, or nodes='auto'"
                )
    sizes = Counter(node_of)
    if len(set(sizes.values())) > 1:
        raise UnsupportedError(
            f"nodes have different numbers of ranks ({', '.join(str(sizes[node]) for node in sorted(sizes))}), so "
            "their shards differ; start the same number of ranks on each node"
        )
    if len(sizes) in (1, len(ranks)):
        return None
    own = node_of[dist.get_rank(group)]
    members = [[rank for rank, node in zip(ranks, node_of, strict=True) if node == at] for at in sorted(sizes)]
    place = members[own].index(dist.get_rank())
    inside, between = members[own], [node[place] for node in members]
    return Levels(group_of(inside, group, device), group_of(between, group, device))


# ---- shards ----------------------------------------------------------------------------------------------------------


def shards_of(shape: Sequence[int], ranks: int, turn: int) -> list[tuple[slice, tuple[int, ...]]]:
    """Return, for each rank, where its shard lies in the flat parameter, and the shard's shape.

    A shard has whole rows, as evenly as they can be shared.

    Args:
        shape: of the parameter.
        ranks: how many ranks a node has.
        turn: rotates which ranks get one row more; callers pass the parameter's index.
    """
    rows, *rest = shape or (1,)
    width = math.prod(rest)
    ends = [j * rows // ranks for j in range(ranks + 1)]
    found = []
    for rank in range(ranks):
        at = (rank + turn) % ranks
        found.append((slice(ends[at] * width, ends[at + 1] * width), (ends[at + 1] - ends[at], *rest)))
    return found


def own_shards(trained: Sequence[Tensor], ranks: int, rank: int) -> dict[Tensor, Tensor]:
    """Map each parameter of which a rank has a shard to an empty tensor of that shard's shape.

    The core of averaging takes these tensors for the rank's parameters.

    Args:
        trained: the parameters that require gradients, in the model's order.
        ranks: how many ranks a node has.
        rank: the rank's index within its node.
    """
    found = {}
    for index, p in enumerate(trained):
        span, shape = shards_of(p.shape, ranks, index)[rank]
        if span.stop > span.start:
            rows = p.detach().reshape(p.shape or (1,))[: shape[0]]
            found[p] = torch.empty_like(rows).requires_grad_()  # in the parameter's memory format
    return found


@dataclass(eq=False)
class _Bucket:
    """A DDP bucket that is being averaged.

    Attributes:
        buffer: DDP's flat buffer.
        future: what DDP waits for; it gets the averages.
        pieces: for each rank of the node, where its shards lie in the buffer.
        own: this rank's shards of the bucket, end to end; later their averages.
        numel: how many elements of ``own`` this rank's shards have; the rest is padding.
        averaged: the core's future for ``own``; None if this rank has no part of the bucket.
    """

    buffer: Tensor
    future: torch.futures.Future[Tensor]
    pieces: list[list[slice]]
    own: Tensor | None = None
    numel: int = 0
    averaged: torch.futures.Future[Tensor] | None = None


class TwoLevelCompression(DDPCompression):
    """The handle of a model in DistributedDataParallel whose nodes have several ranks each.

    The core sees one rank per node: ``size`` is the number of nodes, and statistics count what this rank sends to other
    nodes.
    """

    def __init__(self, model: DistributedDataParallel, hook: Hook, settings: Settings, levels: Levels) -> None:
        size, rank = dist.get_world_size(levels.inside), dist.get_rank(levels.inside)
        named_whole = averaged_by(model)
        trained = [(name, p) for name, p in named_whole if p.requires_grad]
        self._places = {p: shards_of(p.shape, size, index) for index, (_, p) in enumerate(trained)}
        shards = own_shards([p for _, p in trained], size, rank)
        self._shard_names = {p: name for name, p in trained if p in shards}
        named = [(name, shards[p]) for p, name in self._shard_names.items()]
        small = [shards[p] for p in norms_of(model.module) if p in shards]
        shares = [
            sum(span.stop - span.start for span, _ in by_rank) for by_rank in zip(*self._places.values(), strict=True)
        ]
        if not all(shares):  # computed for every rank of the node, so all of them raise
            raise UnsupportedError(
                f"a node has {size} ranks, but this model has too few rows of parameters for each rank to have a "
                "share; leave nodes= out"
            )
        self._size, self._rank = size, rank
        if settings.plan is not None:
            norms = norms_of(model.module)
            plan = plan_of_shards(settings.plan, named_whole, named, [*norms, *small], settings)
            settings = replace(settings, plan=plan)
        device = trained[0][1].device
        self._inside: Loan = borrow(levels.inside, device)
        self._node = Node(self._inside.group, device)
        self._executor = SerialExecutor("narrowband-node")
        self._end = weakref.finalize(self, _end, self._executor, self._inside)
        self._on_way: list[_Bucket] = []
        self._findings: Findings | None = None  # what is not finite in this step
        self._own_numel = self._left = shares[rank]  # this rank's elements, and those still to come in this step
        self._kept_back: tuple[_Bucket, Sequence[str]] | None = None
        self._stopped: BaseException | None = None
        self._told = self._raises_later = False
        super().__init__(model, hook, settings, levels.between, tensors=named, norms=small, inside=levels.inside)
        whole = layers_of(named_whole, norms_of(model.module), settings)
        self._small = {
            name
            for name, p in trained
            if name in whole
            and name not in self.layers.parameters.shapes
            and max(span.stop - span.start for span, _ in self._places[p]) >= settings.min_numel
        }

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if not self._coming:
            self._begin()
            self._inside.follow()
            self._raises_later = at_the_end_of_backward(self._raise)
        names = [self._shard_names[p] for p in parameters if p in self._shard_names]
        last = self._take(bucket, names)
        pieces: list[list[slice]] = [[] for _ in range(self._size)]
        at = 0
        for p in parameters:
            for piece, (span, _) in zip(pieces, self._places[p], strict=True):
                if span.stop > span.start:
                    piece.append(slice(at + span.start, at + span.stop))
            at += p.numel()
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        own = _Bucket(buffer, future, pieces)
        event = torch.cuda.current_stream(buffer.device).record_event() if devices else None
        self._executor.post(lambda: self._run(own, names, event, last=last))
        return future

    def _zeros_count(self, *, in_backward: bool) -> bool:
        """See :meth:`Averaging._zeros_count`. A step begins on the executor's thread, and not in the backward pass that
        it belongs to.
        """
        del in_backward
        return super()._zeros_count(in_backward=self._raises_later)

    # ---- on the thread -----------------------------------------------------------------------------------------------

    def _run(self, bucket: _Bucket, names: Sequence[str], event: torch.cuda.Event | None, *, last: bool) -> None:
        self._on_way.append(bucket)
        reduced = False
        try:
            if self._stopped is None:
                if event is not None:
                    torch.cuda.current_stream(bucket.buffer.device).wait_event(event)
                self._reduce(bucket, names, last=last)
                reduced = True
                if last:
                    self._gather()
        except BaseException as error:  # goes to the thread that runs backward
            self._stopped = error
            if not reduced:
                self._tell_other_nodes()
        if last or self._stopped is not None:
            buckets, self._on_way, self._findings = self._on_way, [], None
            self._left, self._kept_back = self._own_numel, None
            for each in buckets:
                self._resolve(each)

    def _tell_other_nodes(self) -> None:
        """Make the ranks on other nodes that wait for this step's agreement raise now, not after a time-out."""
        if not self.in_step and self._engine.error is None and not self._removed:
            with contextlib.suppress(RuntimeError, ValueError):
                self._agreement.now({"call": "stop, because an exchange inside its node failed"}, ADVICE)

    def _resolve(self, bucket: _Bucket) -> None:
        if self._stopped is None:
            bucket.future.set_result(bucket.buffer)
        elif self._raises_later:
            fill_with_nan(bucket.buffer)
            bucket.future.set_result(bucket.buffer)
        else:
            error = self._stopped
            bucket.future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]

    def _reduce(self, bucket: _Bucket, names: Sequence[str], *, last: bool) -> None:
        """Reduce-scatter a bucket within the node, and feed the node's mean of this rank's shards to the core."""
        longest = max(sum(span.stop - span.start for span in piece) for piece in bucket.pieces)
        buffer = bucket.buffer
        send = self._node.rows(longest, buffer)
        for row, piece in zip(send, bucket.pieces, strict=True):
            if piece:
                torch.cat([buffer[span] for span in piece], out=row[: sum(x.stop - x.start for x in piece)])
        send.div_(self._size)  # before the sum, as DDP does: the sum may overflow in 16 bits
        bucket.own = self._node.sum_of_own(send)
        bucket.numel = sum(span.stop - span.start for span in bucket.pieces[self._rank])
        if self._findings is None:
            self._findings = Findings(buffer.device)
        with self._findings.noting(Findings.OWN):
            finite = kernels.all_finite(bucket.own[: bucket.numel].float())
        self._findings.note(Findings.OWN, bad=not finite)  # of a loop that knew at once
        self._left -= bucket.numel
        if not last and not self._left:
            if bucket.numel:
                self._kept_back = bucket, names
            return
        sent = bucket
        if last:
            if self._kept_back is not None:
                sent, names = self._kept_back
            flag = self._findings.place(Findings.OWN)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._inside.group)
            assert sent.own is not None
            kernels.poison_all_if(flag, [sent.own[: sent.numel]])  # on all ranks of the node
        assert sent.own is not None
        sent.averaged = self.feed(sent.own[: sent.numel], names, last=last)

    def _gather(self) -> None:
        """All-gather the averaged shards of the node into DDP's buckets."""
        for bucket in self._on_way:
            assert bucket.own is not None
            if bucket.averaged is not None:  # otherwise this rank has no part of the bucket
                bucket.averaged.wait()
            places: list[Tensor] = []
            averages: list[Tensor] = []
            for row, piece in zip(self._node.gathered(bucket.own), bucket.pieces, strict=True):
                lengths = [span.stop - span.start for span in piece]
                places += [bucket.buffer[span] for span in piece]
                averages += torch.split(row[: sum(lengths)], lengths)
            torch._foreach_copy_(places, averages)  # on a GPU by few launches

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _raise(self) -> None:
        """Raise the error that stopped the exchange, if any. Runs in the thread that runs backward."""
        if self._stopped is not None:
            error, earlier = self._stopped, self._told
            self._told = True
            if earlier:
                raise RuntimeError(f"gradient exchange stopped at an earlier step: {error}") from error
            raise error

    def _broke_off(self) -> bool:
        return super()._broke_off() or (bool(self._coming) and not is_in_backward())

    def remove(self) -> None:
        if self._removed:
            return
        if self._stopped is None and not self._broke_off():
            super().remove()
        else:  # some ranks on either level may be gone, so leave without a collective
            self._inside.broken = True
            self._disconnect()
            self._removed = True
            self._detach()
        self._end()


def _end(executor: SerialExecutor, loan: Loan) -> None:
    executor.close()
    loan.give_back()
