"""The two collectives of FSDP2, compressed.

**Gradients.** A reduce-scatter: every rank sends each other rank the part of a module's gradients that belongs to that
rank's shard, and adds up the parts that it receives. Here parts travel as payloads, and are added up in float32; a
rank's own part is added uncompressed. There is no feedback: a residual would be as large as the whole model on every
rank, and undo the savings of sharding. So the codec must be unbiased, or fine.

**Parameters.** An all-gather: every rank sends its shard to all others, before forward and again before backward. All
ranks keep a *reference*: the parameters as they were last sent. A rank sends the difference between its shard and its
part of the reference. All ranks, the sender included, add the decoded differences to the reference, and compute with
the reference. Parameters change little in a step, so a few bits describe the difference well. The codec's loss is part
of the next difference, so errors do not add up. (SDP4Bit, arXiv 2410.15526, section 3.1, sends differences, too; there
the loss is made up for by what receivers compute.) If the parameters have not changed, nothing is sent: backward sends
nothing, nor do further micro-batches, nor evaluation.

The optimizer steps its exact shards w_t. For a codec C with ``‖x − C(x)‖ ≤ δ‖x‖``, and steps ``‖w_t − w_{t−1}‖ ≤ u``,
the reference r_t satisfies ``‖w_t − r_t‖ ≤ δ(u + ‖w_{t−1} − r_{t−1}‖) ≤ uδ/(1 − δ)``: the error is bounded by a share
of one step's change, however many steps there were. This requires δ < 1.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from narrowband import kernels
from narrowband.averaging.core import is_in_backward
from narrowband.codecs.base import squared_norms
from narrowband.collectives import Peers, all_gather_nbytes, collective, is_gloo, reduce_scatter_nbytes
from narrowband.collectives.primitives import all_gather, all_gather_in_pairs, all_to_all, reduce_scatter_single
from narrowband.errors import UnsupportedError
from narrowband.sharding.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.sharding.layout import Layout

__all__ = ["DIFFERENCES", "NOTHING", "WHOLE", "Common", "GradientExchange", "ParameterExchange"]

log = logging.getLogger(__name__)

#: What is sent of a module's parameters. If ranks need different ones, the largest is sent by all.
NOTHING, DIFFERENCES, WHOLE = 0, 1, 2

#: If the difference from the reference has more than this share of the parameters' norm, they are sent whole.
_FAR = 0.5

_MASK = (1 << 64) - 1


class Common:
    """What all exchanges of a model share: one thread for all their messages, and what was said already."""

    def __init__(self) -> None:
        self._peers: dict[int, Peers] = {}
        self._said: set[str] = set()

    def among(self, group: dist.ProcessGroup) -> Peers:
        """Return the ranks of a group."""
        if id(group) not in self._peers:
            self._peers[id(group)] = Peers.of(group)
        return self._peers[id(group)]

    def close(self) -> None:
        """End the thread."""
        for peers in self._peers.values():
            peers.close()
        self._peers.clear()

    def say_of_other_sizes(self, what: str, layout: Layout, group: dist.ProcessGroup, why: str) -> None:
        """Warn once, on the group's first rank, that something has another size than the layout, so it is sent as it
        is.
        """
        if group.size() == layout.world_size and what not in self._said:
            self._said.add(what)
            if group.rank() == 0:
                log.warning(
                    "%s of %s are sent uncompressed at times: %s (said of the first such module only)",
                    what,
                    layout.module or "the model",
                    why,
                )


class _Exchange:
    """One of the two collectives of one module, with the interface that FSDP2 expects of custom collectives.

    Args:
        layout: the layout of the flat tensors that are sent.
        codec: the codec of matrices; None: nothing is compressed.
        seed: seed of stochastic rounding, different for each module.
        count: called with the bytes that this rank would have sent uncompressed, and the bytes that it sent.
        common: what all exchanges of a model share.
    """

    def __init__(
        self,
        layout: Layout,
        codec: Codec | None,
        seed: int,
        count: Callable[[int, int], None],
        common: Common,
    ) -> None:
        self.layout = layout
        self.calls = 0
        self._codec = codec
        self._seed = seed
        self._count = count
        self._messages: dict[tuple[Any, ...], Message] = {}
        self._common = common

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a flat tensor. FSDP2 calls this."""
        return torch.empty(*size, dtype=dtype, device=device)

    def close(self) -> None:
        """Stop compressing: from now on everything is sent as it is."""
        self._codec = None
        self._common.close()

    def _message(self, layout: Layout, codec: Codec, dtype: torch.dtype) -> Message:
        key = (dtype, *((shard.numel, shard.compressed) for shard in layout.shards))
        if key not in self._messages:
            self._messages[key] = Message(layout, codec, dtype)
        return self._messages[key]

    def _next_seed(self, rank: int) -> int:
        self.calls += 1
        return (self._seed + self.calls * 0xA0761D6478BD642F + rank * 0xE7037ED1A0B428DB) & _MASK


class GradientExchange(_Exchange):
    """Reduce-scatter, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """``output_tensor`` ← the sum or mean over ranks of this rank's part of their ``input_tensor``."""
        size, numel = group.size(), output_tensor.numel()
        by_gloo = is_gloo(group, input_tensor.device)
        raw = reduce_scatter_nbytes(input_tensor.nbytes, size, by_gloo=by_gloo)
        layout = self.layout.trained()
        if self._codec is None or layout.numel != numel or layout.world_size != size:
            # The gradients lie elsewhere than the layout says.
            if self._codec is not None:
                why = (
                    "some of its parameters get no gradient in some steps; call fully_shard also with the modules that "
                    "are not always used, so that their gradients travel by themselves"
                )
                self._common.say_of_other_sizes("gradients", layout, group, why)
            self._count(raw, raw)
            return reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        message = self._message(layout, self._codec, input_tensor.dtype)
        peers = self._common.among(group)
        peers.open_pairs(input_tensor.device)
        parts = input_tensor.view(size, numel)
        others = [rank for rank in range(size) if rank != peers.rank]
        sizes = [message.nbytes if rank != peers.rank else 0 for rank in range(size)]
        sent = torch.empty(len(others), message.nbytes, dtype=torch.uint8, device=input_tensor.device)
        got = torch.empty_like(sent)
        seed = self._next_seed(peers.rank)
        for at, rank in enumerate(others):
            message.write(parts[rank], sent[at], seed=seed + (rank << 32))
        pending = all_to_all(got.view(-1), sent.view(-1), sizes, sizes, peers)
        weight = _weight(op, size)
        total = parts[peers.rank].float() * weight
        if pending is not None:
            pending.wait()
        for row in got:
            message.add_to(total, row, weight)
        output_tensor.copy_(total)
        self._count(raw, message.nbytes * len(others))
        return None


class ParameterExchange(_Exchange):
    """All-gather, for ``FSDPModule.set_custom_all_gather``.

    Args:
        agree: sets :attr:`due` of this exchange to the same value on all ranks, unless a forward pass of the model has
            done so already.
        referenced: whether to keep a reference. Without one, the parameters themselves are compressed, each time.

    Attributes:
        reference: ranks × elements: the parameters as they were last sent; None before they were.
        due: what is sent next: ``NOTHING``, ``DIFFERENCES`` or ``WHOLE``.
        mark: checksum of this rank's shards when they were last sent.
    """

    def __init__(
        self,
        layout: Layout,
        codec: Codec | None,
        seed: int,
        count: Callable[[int, int], None],
        common: Common,
        agree: Callable[[ParameterExchange], None],
        *,
        referenced: bool,
    ) -> None:
        super().__init__(layout, codec, seed, count, common)
        self.reference: Tensor | None = None
        self.due = WHOLE
        self.mark: int | None = None
        self.referenced = referenced and codec is not None
        self._seen: int | None = None
        self._sent: int | None = None  # checksum of the flat tensor that FSDP2 passed when it was last sent
        self._agree = agree
        self._broken = False

    @torch.no_grad()
    def look(self, rank: int) -> int:
        """Return what this rank needs to send, by how its shards have changed since they were last sent."""
        self._seen = 0
        for one in torch.stack([kernels.checksum(own) for _, own in self.layout.own()]).tolist():
            self._seen = (self._seen * 31 + one) & _MASK
        if self.reference is None:
            return WHOLE
        if self._seen == self.mark:
            return NOTHING
        reference = self.reference[rank]
        pairs = [
            (reference[shard.at : shard.at + own.numel()], own) for shard, own in self.layout.own() if shard.compressed
        ]
        far = sum(squared_norms(there.float() - _as(own, there) for there, own in pairs))
        norm = sum(squared_norms(_as(own, there) for there, own in pairs))
        return DIFFERENCES if far <= _FAR**2 * norm else WHOLE  # WHOLE where one of them is NaN, too

    def forget(self) -> None:
        """Drop the reference, so that everything is sent next."""
        self.reference = self.mark = self._sent = None
        self.due = WHOLE

    def sum_of_reference(self) -> int:
        """Return a checksum of the reference for ranks to compare, in half the range of int64, so that its negative
        can be represented, too.
        """
        return 0 if self.reference is None else int(kernels.checksum(self.reference)) >> 1

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """``output_tensor`` ← the ``input_tensor`` of all ranks, one after the other."""
        size, numel = group.size(), input_tensor.numel()
        raw = all_gather_nbytes(numel * input_tensor.element_size(), size)
        if self._codec is None or self.layout.numel != numel or self.layout.world_size != size:
            # Sizes differ in a gather among some of the ranks, of what was gathered before (reshard_after_forward=2).
            if self._codec is not None:
                why = (
                    "FSDP2 gathers them in several dtypes; call fully_shard also with the modules of another dtype, so "
                    "that these travel by themselves"
                )
                self._common.say_of_other_sizes("parameters", self.layout, group, why)
            self._count(raw, raw)
            work = all_gather(output_tensor, input_tensor, self._common.among(group))
            if work is not None and not async_op:
                work.wait()
            return work
        if self._broken:
            raise RuntimeError(
                f"an earlier exchange of the parameters of {self.layout.module or 'the model'} failed, so ranks may "
                "have different parameters; restart all ranks from a checkpoint"
            )
        peers = self._common.among(group)
        out = output_tensor.view(size, numel)
        self._broken = True
        if self.referenced:
            self._refer(out, input_tensor, peers, raw)
        else:
            message = self._message(self.layout, self._codec, input_tensor.dtype)
            own = torch.empty(message.nbytes, dtype=torch.uint8, device=input_tensor.device)
            message.write(input_tensor, own, seed=self._seed)  # the same in forward and backward
            for part, row in zip(out, self._gathered(own, peers), strict=True):
                message.read(part, row)
            self._count(raw, all_gather_nbytes(message.nbytes, size))
        self._broken = False
        return None

    def _refer(self, out: Tensor, own: Tensor, peers: Peers, raw: int) -> None:
        """Exchange what is due, update the reference, and copy it to ``out``."""
        assert self._codec is not None
        if not is_in_backward():
            self._agree(self)
        if self.due == WHOLE or self.reference is None or self.reference.dtype != own.dtype:
            if self.reference is None:
                self.layout.check(own)
            _gather(out, own, peers)
            with torch.inference_mode(mode=False):  # an inference tensor could not be changed in training
                self.reference = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self.reference.copy_(out)
            self._count(raw, raw)
        elif self.due == DIFFERENCES:
            message = self._message(self.layout, self._codec, own.dtype)
            sent = torch.empty(message.nbytes, dtype=torch.uint8, device=own.device)
            message.write(own, sent, minus=self.reference[peers.rank], seed=self._next_seed(peers.rank))
            for part, row in zip(self.reference, self._gathered(sent, peers), strict=True):
                message.update(part, row)
            self._count(raw, all_gather_nbytes(message.nbytes, peers.size))
        else:
            if self._sent not in (None, int(kernels.checksum(own))):
                raise RuntimeError(
                    f"parameters of {self.layout.module or 'the model'} are no longer those that compress_shards was "
                    "given, or were changed between forward and backward; call compress_shards after everything that "
                    "replaces parameters, such as to_empty() and load_state_dict(assign=True), and step the optimizer "
                    "after backward"
                )
            self._count(raw, 0)
        if self.due != NOTHING:
            self.mark, self._sent = self._seen, int(kernels.checksum(own))
        self.due = NOTHING
        out.copy_(self.reference)

    def _gathered(self, own: Tensor, peers: Peers) -> Tensor:
        """Return the messages of all ranks, one row each."""
        rows = torch.empty(peers.size, own.numel(), dtype=torch.uint8, device=own.device)
        _gather(rows, own, peers)
        return rows

    def close(self) -> None:
        """See :meth:`_Exchange.close`."""
        super().close()
        self.reference = None


def _gather(out: Tensor, x: Tensor, peers: Peers) -> None:
    """All-gather, and wait for it."""
    in_pairs = collective("all_gather").uses_pairs(peers.size)
    if in_pairs:
        peers.open_pairs(x.device)
    gather = all_gather_in_pairs if in_pairs and peers.pairs is not None else all_gather
    work = gather(out, x.contiguous(), peers)
    if work is not None:
        work.wait()


def _weight(op: Any, size: int) -> float:
    """Return the factor for parts before they are added up: 1 for a sum, 1 / ``size`` for a mean.

    Raises:
        UnsupportedError: the operation is neither.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    raise UnsupportedError(
        "compress_shards cannot reduce gradients with a factor (set_gradient_divide_factor); call "
        "set_force_sum_reduction_for_comms(True) on the model's FSDP modules too, so that FSDP2 applies the factor "
        "itself"
    )


def _as(own: Tensor, reference: Tensor) -> Tensor:
    """Return a shard's numbers as a reference holds them, in float32."""
    return own.to(reference.device, reference.dtype).float()
