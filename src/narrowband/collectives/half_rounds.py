"""PowerSGD by half rounds: each all-reduce averages one factor, and its approximation is used at once.

A round of power iteration computes P from Q, and Q from P. In PowerSGD's paper, a step completes the round before it
uses the factors. The authors' package (github.com/epfml/powersgd) uses the result of each half. For every matrix M
(n × m) of a rank, ``halves`` times per step::

    Q: orthogonalize                   or, the next time, the other way round:    P: orthogonalize
    P = M·Q                                                                       Q = Mᵀ·P
    M = M − P·Qᵀ                       with this rank's own P, or Q
    P = its mean over ranks            one all-reduce
    average = average + P·Qᵀ
    go on with P                                                                  go on with Q

What is left of M is the residual. A step continues from the factor of the step before, so that with odd ``halves`` the
sides alternate over steps, too.

One half round per step sends half the bytes of a round, by one all-reduce instead of two. Two half rounds send as much
as a round, and lose less, because the first one contributes to the average instead of only finding a factor.

This implementation does not change M within a step. Instead it subtracts from each later product what the earlier
factors hold of M, which takes r × r more numbers, and no pass over the matrix. A residual loses the product of the
rank's own factors, not of the averaged ones, so it does not grow with the differences between ranks.

Where the device decides whether a step is good, it restores residuals and sent factors after a bad one. Which side a
step starts on is for the host to know, so it learns before each step whether the step before was good
(:meth:`narrowband.feedback.PowerSGD.keep_unless`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.codecs.base import squared_norm
from narrowband.collectives.factor_reduce import FactorReduce
from narrowband.feedback.base import Norms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.collectives.engine import Job
    from narrowband.collectives.factor_reduce import Block, Matrix
    from narrowband.feedback import State

__all__ = ["HalfRounds"]


class _Found:
    """The factors that the half rounds of a step have found for a block's matrices, in order.

    Factors are of the matrices as they lie in memory, not transposed: (count, r, n) and (count, r, m) per half round.
    """

    def __init__(self) -> None:
        self.products: list[Tensor] = []
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []

    def add(self, block: Block) -> None:
        left, right = block.left_right()
        self._left.append(left)
        self._right.append(right)
        self.products.append(block.p)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the factors of all h half rounds: (count, h·r, n) and (count, h·r, m)."""
        if len(self._left) == 1:
            return self._left[0], self._right[0]
        return torch.cat(self._left, dim=1), torch.cat(self._right, dim=1)


class HalfRounds(FactorReduce):
    """Average matrices by half rounds of power iteration; see the module."""

    name: ClassVar[str] = "half_rounds"
    all_orthonormal: ClassVar[bool] = True  # the average is a projection onto these rows

    @staticmethod
    def obstacle(codec: Codec, feedback: State | None) -> str | None:
        if feedback is not None and feedback.collective == HalfRounds.name:
            return None
        return f"collective 'half_rounds' needs powersgd with halves=…, and {codec} is used without it"

    def _form(self, matrix: Matrix) -> tuple[int, int, int, bool]:
        turned = self._state.starts_left(matrix.operand.key)
        return matrix.n, matrix.m, matrix.r, turned

    def job(self) -> Job:
        self._merge()
        self._own = [_Found() for _ in self._blocks]
        self._mean = [_Found() for _ in self._blocks]
        for half in range(self._state.halves):
            begin = time.perf_counter()
            if half:
                commons = kernels.orthonormalize_all([block.p for block in self._blocks])
                for block, own, common in zip(self._blocks, self._own, commons, strict=True):
                    self._turn(block, own, common)
            for block, own in zip(self._blocks, self._own, strict=True):
                own.add(block)
            together, parts = self._together([] if half else self._parts)
            if not half:
                self._parts = parts
            self.encode_seconds += time.perf_counter() - begin
            yield self._sum(together, [block.p for block in self._blocks], parts)
            begin = time.perf_counter()
            self.finite = self._all_finite(together)
            if not self.finite or not self._blocks:
                return  # on all ranks alike
            together[: sum(block.p.numel() for block in self._blocks)].div_(self.peers.size)
            for block, mean in zip(self._blocks, self._mean, strict=True):
                mean.add(block)
            self.encode_seconds += time.perf_counter() - begin
        if self.measure:
            self._measure()

    def _turn(self, block: Block, own: _Found, common: Tensor) -> None:
        """Begin the next half round, on the other side: the averaged factor, made orthonormal (``common``), is now the
        one that all ranks share.
        """
        block.turned, block.values = not block.turned, block.values.mT
        product = torch.bmm(common, block.values.mT)
        left, right = own.factors()
        other, same = (right, left) if block.turned else (left, right)
        product.baddbmm_(torch.bmm(common, same.mT), other, alpha=-1)
        block.q, block.p = common, product
        self._leave_out(block, block.p)

    def _measure(self) -> None:
        """Measure the error: a half round reduces a matrix's squared norm by the squared norm of its product."""
        for block, own in zip(self._blocks, self._own, strict=True):
            for i, (matrix, values) in enumerate(zip(block.matrices, block.values, strict=True)):
                if matrix.takes_part:
                    norm, taken = squared_norm(values), sum(squared_norm(p[i]) for p in own.products)
                    self.norms[matrix.operand.key] = Norms(norm, max(0.0, norm - taken))

    def _keep(self) -> None:
        self._keep_all([block.p for block in self._blocks])
        for matrix, left, right in self._sent_factors():
            self._state.record_sent(matrix.operand.key, left, right)

    def _keep_unless(self, bad: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See the base class. Which side the next step starts on is for the host to know, so it learns before that step
        whether this one was bad.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for matrix, *found in self._sent_factors():
            pairs += zip(found, self._state.before(matrix.operand.key, *found), strict=True)
            self._state.record_sent(matrix.operand.key, *found)
        kept = [block.p.clone() for block in self._blocks]  # parts of a message, which has other parts
        self._state.keep_unless(
            bad,
            {
                matrix.operand.key: (rows, self._keeps_left(block))
                for block, own in zip(self._blocks, kept, strict=True)
                for matrix, rows in zip(block.matrices, own, strict=True)
            },
        )
        return pairs

    def _sent_factors(self) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """Yield the matrices that have residuals, with the factors that this rank has sent of them."""
        for block, own in zip(self._blocks, self._own, strict=True):
            for matrix, left, right in zip(block.matrices, *own.factors(), strict=True):
                if matrix.residual is not None:
                    yield matrix, left, right

    @staticmethod
    def _keeps_left(block: Block) -> bool:
        return not block.turned

    def _averages(self) -> Iterator[tuple[Block, Tensor, Tensor]]:
        for block, mean in zip(self._blocks, self._mean, strict=True):
            yield block, *mean.factors()
