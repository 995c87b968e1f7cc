"""All-gather of payloads: every rank receives all N payloads, and decodes one after the other into the same memory.

For payloads of P bytes, a rank among N sends (N−1) · P bytes. All-gather carries every codec. Where the sizes of
payloads depend on the data, ranks first exchange these sizes.

With gloo and two ranks, payloads travel as point-to-point messages. Gloo's own all-gather leaves a part of a slow link
unused when two ranks do not begin at the same moment; among more ranks, its ring fills the link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband.collectives.engine import QueueName, Transfer
from narrowband.collectives.exchange import TRAILER, Exchange, Sent, alike, give_means, runs_behind, take_means
from narrowband.collectives.primitives import all_gather, all_gather_in_pairs, concatenated, spans_of
from narrowband.collectives.traffic import all_gather_nbytes
from narrowband.kernels import Findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.collectives.engine import Job
    from narrowband.collectives.operand import Operand
    from narrowband.collectives.peers import Peers
    from narrowband.feedback import State

__all__ = ["AllGather"]


class AllGather(Exchange):
    """Average by all-gather of payloads; see the module."""

    name: ClassVar[str] = "all_gather"
    decided_by_encoding: ClassVar[bool] = True
    asks_late: ClassVar[bool] = True
    measures_late: ClassVar[bool] = True

    @staticmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        return all_gather_nbytes(nbytes, size)

    @classmethod
    def message_nbytes(cls, layers: Sequence[Sent], size: int, state: State | None) -> tuple[float, ...]:  # noqa: ARG003
        return (all_gather_nbytes(sum(each.codec.payload_nbytes(each.shape) for each in layers) + TRAILER, size),)

    @staticmethod
    def obstacle(codec: Codec, feedback: State | None) -> None:  # noqa: ARG004
        return None

    @staticmethod
    def uses_pairs(size: int) -> bool:
        return size == 2

    @staticmethod
    def goes_ahead(codec: Codec) -> bool:
        return codec.fixed_size

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        super().__init__(operands, peers, measure=measure, state=state)
        self._fixed = True  # whether no payload size depends on the data
        self._parts: list[Tensor] = []  # one per :meth:`encode`: the payloads made there, with room for a trailer
        self._first_nbytes = TRAILER

    def _encode_all(self, operands: Sequence[Operand]) -> None:
        sizes = [operand.codec.payload_nbytes(operand.shape, operand.dtype) for operand in operands]
        self._first_nbytes += sum(sizes)
        self._fixed &= all(operand.codec.fixed_size for operand in operands)
        places: Sequence[Tensor | None] = [None] * len(operands)
        if self._fixed:
            part = torch.empty(sum(sizes) + TRAILER, dtype=torch.uint8, device=operands[0].x.device)
            self._parts.append(part)
            places = [part[span] for span in spans_of(sizes)]
        if self.findings is not None:
            self._encode_ahead(operands, [part[span] for span in spans_of(sizes)])
            return
        for operand, place in zip(operands, places, strict=True):
            self._locally_finite &= self._encode(operand, place)[0]

    @property
    def first_nbytes(self) -> int:
        return all_gather_nbytes(self._first_nbytes, self.peers.size)

    def job(self) -> Job:
        size, device = self.peers.size, self.operands[0].x.device
        in_pairs = self.peers.pairs is not None and self.uses_pairs(size)
        queue: QueueName = "pairs" if in_pairs else "group"
        if self._fixed:
            *others, last = self._parts
            payload = concatenated([*(other[:-TRAILER] for other in others), last])
            capacity = payload.numel() - TRAILER
            self._spans = [spans_of([own.numel() for own in self._payloads])] * size
        else:
            # An all-gather needs equal sizes: the longest payload sets the size of all.
            mine = torch.tensor([p.numel() for p in self._payloads], dtype=torch.int64, device=device)
            sizes = torch.empty(size, len(self.operands), dtype=torch.int64, device=device)
            yield Transfer(lambda: all_gather(sizes, mine, self.peers), later=[queue])
            self._spans = [spans_of(row) for row in sizes.tolist()]
            capacity = max(spans[-1].stop for spans in self._spans)
            self._count(all_gather_nbytes(mine.nbytes, size), [(operand, 8) for operand in self.operands])
            payload = torch.zeros(capacity + TRAILER, dtype=torch.uint8, device=device)
            torch.cat(self._payloads, out=payload[: self._spans[self.peers.rank][-1].stop])
        payload[capacity:] = self._trailer(device)
        received = torch.empty(size, capacity + TRAILER, dtype=torch.uint8, device=device)
        own = [each.numel() for each in self._payloads]
        self._count(all_gather_nbytes(payload.numel(), size), zip(self.operands, own, strict=True))
        gather = all_gather_in_pairs if in_pairs else all_gather
        yield Transfer(lambda: gather(received, payload, self.peers), queue)
        if self.findings is None:
            self.finite = not bool(received[:, capacity].any())
        else:
            self.findings.note(Findings.ANY, received[:, capacity].any())
        self._received = received

    def _write(self, good: bool) -> None:
        size = self.peers.size
        left = [*range(len(self.operands))]
        if self.findings is not None or runs_behind(self._received):
            for own in alike(self.operands):
                codec, some = self.operands[own[0]].codec, [self.operands[at] for at in own]
                outs = take_means(some) if codec.decodes_several and self._fixed else None
                if outs is not None:
                    spans = [self._spans[0][at] for at in own]
                    shapes = [each.shape for each in some]
                    seeds = [[each.seed_of(rank) for rank in range(size)] for each in some]
                    codec.decode_means(self._received, spans, outs, shapes=shapes, seeds=seeds)
                    left = [at for at in left if at not in set(own)]
                    give_means(some, outs, good, self.findings)
        for i in left:
            operand = self.operands[i]
            if self._fixed:
                payloads: Sequence[Tensor] | Tensor = self._received[:, self._spans[0][i]]
            else:
                payloads = [self._received[rank, self._spans[rank][i]] for rank in range(size)]
            seeds = [operand.seed_of(rank) for rank in range(size)]
            with self._mean_of(operand, good) as mean:
                operand.codec.decode_mean(payloads, mean, seeds=seeds)
        del self._received
