"""All-gather of payloads: every rank receives all N, and decodes one after the other into the same memory.

A rank sends (N−1) · P bytes among N ranks, for payloads of P bytes. It carries every codec. Where the sizes of payloads
depend on the data, ranks first tell each other these sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband.codecs.base import dims
from narrowband.collectives.engine import Transfer
from narrowband.collectives.exchange import TRAILER, Exchange
from narrowband.collectives.primitives import all_gather, concatenated, spans_of
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
    """See the module."""

    name: ClassVar[str] = "all_gather"
    decided_by_encoding: ClassVar[bool] = True

    @staticmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        return all_gather_nbytes(nbytes, size)

    @staticmethod
    def obstacle(codec: Codec, feedback: State | None) -> None:  # noqa: ARG004
        return None

    @staticmethod
    def goes_ahead(codec: Codec) -> bool:
        return codec.fixed_size

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        super().__init__(operands, peers, measure=measure, state=state)
        self._fixed = True  # whether sizes do not depend on the data
        self._parts: list[Tensor] = []  # payloads of all operands encoded at once; each part with room for a trailer
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
        for operand, place in zip(operands, places, strict=True):
            finite, _ = self._encode(operand, place)
            self._locally_finite &= finite
            if self.findings is not None and not finite:  # of a loop that knows at once, and has left no payload
                zeros = torch.zeros(dims(operand.shape), dtype=operand.dtype, device=operand.x.device)
                operand.codec.encode(zeros, out=place)

    @property
    def first_nbytes(self) -> int:
        return all_gather_nbytes(self._first_nbytes, self.peers.size)

    def job(self) -> Job:
        size, device = self.peers.size, self.operands[0].x.device
        if self._fixed:
            *others, last = self._parts
            payload = concatenated([*(other[:-TRAILER] for other in others), last])
            capacity = payload.numel() - TRAILER
            self._spans = [spans_of([own.numel() for own in self._payloads])] * size
        else:
            # The longest payload sets the size of all.
            mine = torch.tensor([p.numel() for p in self._payloads], dtype=torch.int64, device=device)
            sizes = torch.empty(size, len(self.operands), dtype=torch.int64, device=device)
            yield Transfer(lambda: all_gather(sizes, mine, self.peers), later=["group"])
            self._spans = [spans_of(row) for row in sizes.tolist()]
            capacity = max(spans[-1].stop for spans in self._spans)
            self.sent_nbytes += all_gather_nbytes(8 * len(self.operands), size)
            payload = torch.zeros(capacity + TRAILER, dtype=torch.uint8, device=device)
            torch.cat(self._payloads, out=payload[: self._spans[self.peers.rank][-1].stop])
        payload[capacity:] = 0 if self._locally_finite or self.findings is not None else 1
        if self.findings is not None:
            payload[capacity : capacity + 1].copy_(self.findings.place(Findings.OWN))
        received = torch.empty(size, capacity + TRAILER, dtype=torch.uint8, device=device)
        self.sent_nbytes += all_gather_nbytes(payload.numel(), size)
        yield Transfer(lambda: all_gather(received, payload, self.peers))
        if self.findings is None:
            self.finite = not bool(received[:, capacity].any())
        else:
            self.findings.note(Findings.ANY, received[:, capacity].any())
        self._received = received

    def _write(self, good: bool) -> None:
        size = self.peers.size
        for i, operand in enumerate(self.operands):
            if self._fixed:
                payloads: Sequence[Tensor] | Tensor = self._received[:, self._spans[0][i]]
            else:
                payloads = [self._received[rank, self._spans[rank][i]] for rank in range(size)]
            seeds = [operand.seed_of(rank) for rank in range(size)]
            with self._mean_of(operand, good) as mean:
                operand.codec.decode_mean(payloads, mean, seeds=seeds)
        del self._received
