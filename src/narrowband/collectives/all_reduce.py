"""All-reduce of payloads that can be added: those of ``none``, ``fp16``, ``bf16`` and ``randomk``.

For payloads of P bytes, a rank among N sends 2·(N−1)/N · P bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from narrowband import kernels
from narrowband.collectives.engine import Transfer
from narrowband.collectives.exchange import Exchange, Sent
from narrowband.collectives.primitives import concatenated, spans_of
from narrowband.collectives.traffic import all_reduce_nbytes
from narrowband.kernels import Findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.collectives.engine import Job
    from narrowband.collectives.operand import Operand
    from narrowband.collectives.peers import Peers
    from narrowband.feedback import State

__all__ = ["AllReduce"]


class AllReduce(Exchange):
    """Average by all-reduce of payloads; see the module."""

    name: ClassVar[str] = "all_reduce"
    measures_late: ClassVar[bool] = True

    @staticmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        return all_reduce_nbytes(nbytes, size)

    @classmethod
    def message_nbytes(cls, layers: Sequence[Sent], size: int, state: State | None) -> tuple[float, ...]:  # noqa: ARG003
        return (all_reduce_nbytes(sum(each.codec.payload_nbytes(each.shape) for each in layers), size),)

    @staticmethod
    def obstacle(codec: Codec, feedback: State | None) -> str | None:
        dtype = codec.sum_dtype(torch.float32)
        if dtype is None:
            return f"payloads of {codec} cannot be added, so collective='all_reduce' cannot carry them; use 'auto'"
        if feedback is not None and feedback.incremental and dtype != torch.float32:
            return (
                f"collective='all_reduce' rounds sums of {codec} to 16 bits, and {feedback.name} would add up these "
                "errors from step to step; use 'all_gather' or 'auto'"
            )
        return None

    @staticmethod
    def goes_ahead(codec: Codec) -> bool:
        return not codec.shared_seed  # every element is sent, so inf and NaN arrive as such

    @staticmethod
    def kind_of(codec: Codec, dtype: torch.dtype) -> str:
        """Return the dtype in which payloads are added."""
        return str(codec.sum_dtype(dtype))

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        super().__init__(operands, peers, measure=measure, state=state)
        self._parts: list[Tensor] = []  # one per :meth:`encode`: the payloads made there

    def _encode_all(self, operands: Sequence[Operand]) -> None:
        sizes = [operand.codec.payload_nbytes(operand.shape, operand.dtype) for operand in operands]
        part = torch.empty(sum(sizes), dtype=torch.uint8, device=operands[0].x.device)
        for operand, span in zip(operands, spans_of(sizes), strict=True):
            finite, payload = self._encode(operand, part[span])
            self._locally_finite &= finite
            if not finite and self.findings is None:
                payload.fill_(0xFF)  # NaN in every dtype: the codec may have left out the element that is not finite
        self._parts.append(part)

    def flag(self, finite: bool) -> None:
        """Report by NaN in this exchange's own payloads whether other tensors of this rank are finite: sums have no
        trailer.
        """
        super().flag(finite)
        if self.findings is not None:
            kernels.poison_all_if(self.findings.place(Findings.OWN), [part.view(self._dtype) for part in self._parts])
        elif not finite:
            for part in self._parts:
                part.fill_(0xFF)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype in which payloads are added."""
        dtype = self.operands[0].codec.sum_dtype(self.operands[0].dtype)
        assert dtype is not None
        return dtype

    @property
    def first_nbytes(self) -> int:
        return all_reduce_nbytes(sum(part.numel() for part in self._parts), self.peers.size)

    def job(self) -> Job:
        self._sum = concatenated(self._parts)
        # Feedback may have taken part on some ranks only (``compensated``), so only its existence may decide here.
        stateful = any(operand.feedback is not None for operand in self.operands)
        if (self.measure or stateful) and len(self._parts) == 1:
            self._payloads = [payload.clone() for payload in self._payloads]  # the all-reduce works in place
        values = self._sum.view(self._dtype)
        if self.findings is not None and any(operand.incremental for operand in self.operands):
            kernels.poison_all_if(self.findings.place(Findings.OWN), [values])  # a change may be finite, but too large
        values.div_(self.peers.size)  # before the sum, which could overflow 16 bits
        if self.peers.size > 1:
            sizes = [payload.numel() for payload in self._payloads]
            self._count(all_reduce_nbytes(sum(sizes), self.peers.size), zip(self.operands, sizes, strict=True))
            yield Transfer(lambda: dist.all_reduce(values, group=self.peers.group, async_op=True))
        if stateful:  # inf and NaN survive the sum, and the sum is the same on every rank
            with self._noting(Findings.ANY):
                finite = kernels.all_finite(values.float())
            if self.findings is None:
                self.finite = finite
            else:
                self.findings.note(Findings.ANY, bad=not finite)

    def _write(self, good: bool) -> None:
        spans = spans_of([payload.numel() for payload in self._payloads])
        for operand, span in zip(self.operands, spans, strict=True):
            with self._mean_of(operand, good) as mean:
                operand.codec.decode(self._sum[span], mean, seed=operand.seed_of(self.peers.rank))
