"""PowerSGD's average of matrices: two all-reduces of low-rank factors (Vogels et al., arXiv 1905.13727, algorithm 1).

For every matrix M (n × m) of a rank, and a factor Q that is equal on all ranks::

    Q: orthogonalize
    P = M·Q           all-reduce, orthogonalize
    Q = Mᵀ·P          all-reduce, divide by the number of ranks
    average ≈ P·Qᵀ    the rest of M is the residual

One all-reduce carries the P of all matrices of an exchange, and one carries the Q. Matrices that are not worth
factoring travel uncompressed with P. Matrices of equal shape take part in one batched product, where their memory is
contiguous. Factors are stored transposed (Qᵀ, Pᵀ), which makes the products faster.

Inf and NaN survive both sums, and the sums are the same on every rank. So all ranks know of them without a flag.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from narrowband import kernels
from narrowband.codecs.base import numel_of, squared_norm
from narrowband.codecs.lowrank import start
from narrowband.collectives.engine import Transfer
from narrowband.collectives.exchange import Exchange, Sent
from narrowband.collectives.traffic import all_reduce_nbytes
from narrowband.feedback import PowerSGD
from narrowband.feedback.base import Norms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.collectives.engine import Job
    from narrowband.collectives.operand import Operand
    from narrowband.collectives.peers import Peers
    from narrowband.feedback import State

__all__ = ["Block", "FactorReduce", "Matrix", "views"]

#: Gradients with an element of this magnitude or more count as not finite. Below it, no product of a step overflows
#: float32. So a step in which all ranks' gradients stay below is known to be good before its factors have arrived.
TOO_LARGE = 2.0**40


@dataclass(eq=False)
class Matrix:
    """One tensor to average, n × m, by factors of rank r; r = 0: it is averaged uncompressed."""

    operand: Operand
    n: int
    m: int
    r: int
    #: The residual's memory. From encoding on it holds gradient + residual; the next step subtracts the product of the
    #: factors that were sent. None without error feedback.
    residual: Tensor | None
    #: The tensor that is averaged: ``residual``, or else the gradient.
    values: Tensor
    #: The residual before this step, to roll back to: in the gradient's memory if that is float32.
    before: Tensor | None = None
    #: Whether this rank's gradient is not exactly zero. Where it is zero, the rank sends zeros, keeps its residual, and
    #: receives the average.
    takes_part: bool = True


@dataclass(eq=False)
class Block:
    """Matrices of one shape and rank that take part in one batched product.

    ``turned``: the product is of the transposed matrices, with n and m exchanged.
    """

    matrices: list[Matrix]
    values: Tensor  # (count, n, m)
    p: Tensor  # (count, r, n)
    q: Tensor  # (count, r, m)
    turned: bool = False

    def left_right(self) -> tuple[Tensor, Tensor]:
        """Return the factors of rows and of columns, of the matrices as they lie in memory (not transposed)."""
        return (self.q, self.p) if self.turned else (self.p, self.q)


class FactorReduce(Exchange):
    """Average matrices by all-reduces of low-rank factors; see the module."""

    name: ClassVar[str] = "factor_reduce"
    decided_by_encoding: ClassVar[bool] = True

    @staticmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        return all_reduce_nbytes(nbytes, size)

    @classmethod
    def message_nbytes(cls, layers: Sequence[Sent], size: int, state: State | None) -> tuple[float, ...]:
        assert isinstance(state, PowerSGD)
        left = right = whole = 0
        for each in layers:
            n, m, r = state.factors(each.codec, each.shape)
            left, right, whole = left + r * n, right + r * m, whole + (0 if r else numel_of(each.shape))
        turns = [[left, right] * state.iterations if left else [0]]
        if left and state.halves:
            turns = [[(left, right)[(at + begin) % 2] for at in range(state.halves)] for begin in range(2)]
            turns = turns if state.halves % 2 else turns[:1]  # an even number begins on the same side in every step
        sent = [[4 * numel for numel in turn] for turn in turns]
        for each_turn in sent:
            each_turn[0] += 4 * whole
        return tuple(sum(all_reduce_nbytes(x, size) for x in call) / len(sent) for call in zip(*sent, strict=True))

    @staticmethod
    def obstacle(codec: Codec, feedback: State | None) -> str | None:
        if feedback is not None and feedback.collective == FactorReduce.name:
            return None
        return f"collective 'factor_reduce' averages the factors of powersgd, and {codec} is used without powersgd"

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        super().__init__(operands, peers, measure=measure, state=state)
        if not isinstance(state, PowerSGD):
            raise TypeError(f"factor_reduce needs the state of powersgd, got {state!r}")
        self._state = state
        self._whole: list[Matrix] = []
        self._parts: list[Tensor] = []  # what the matrices in ``_whole`` send
        self._blocks: list[Block] = []

    @property
    def first_nbytes(self) -> int:
        numel = sum(block.p.numel() for block in self._blocks) + sum(part.numel() for part in self._parts)
        return all_reduce_nbytes(4 * numel, self.peers.size)

    # ---- before the first collective ---------------------------------------------------------------------------------

    def _encode_all(self, operands: Sequence[Operand]) -> None:
        matrices = [self._matrix(operand) for operand in operands]
        factored = sorted(
            (matrix for matrix in matrices if matrix.r),
            key=lambda x: (*self._form(x), self._state.order(x.operand.key), x.operand.key),
        )
        for (_, _, r, turned), alike in itertools.groupby(factored, key=self._form):
            for some, values in self._side_by_side(list(alike)):
                values = values.mT if turned else values  # noqa: PLW2901
                count, sides = len(some), values.shape[1:]
                p, q = (torch.empty(count, r, n, dtype=torch.float32, device=values.device) for n in sides)
                block = Block(some, values, p, q, turned)
                self._begin_with(some, q)
                self._compensate(block)
                self._blocks.append(block)
        for matrix in matrices:
            if not matrix.r:
                self._whole.append(matrix)
                flat = matrix.values.reshape(-1)
                self._parts.append(flat / self.peers.size if matrix.takes_part else torch.zeros_like(flat))

    def _form(self, matrix: Matrix) -> tuple[int, int, int, bool]:
        """Return (n, m, r, turned) of the block that a matrix belongs to."""
        return matrix.n, matrix.m, matrix.r, False

    def _begin_with(self, matrices: list[Matrix], q: Tensor) -> bool:
        """Write into ``q`` the factors that the step starts with, equal on all ranks, with orthonormal rows.

        Orthonormal rows keep the rows of P apart. A row that is zero, or linearly dependent on others, would stay so
        forever: it is replaced by a newly drawn row, which is not orthonormal to the rest.

        Returns:
            Whether a row was drawn.
        """
        length = q.shape[-1]
        for matrix, rows in zip(matrices, q, strict=True):
            seed = matrix.operand.seed(0)
            rows.copy_(self._state.factor(matrix.operand.key, matrix.r, length, seed, q.device))
        q.copy_(kernels.orthonormalize(q))
        missing = ~(q != 0).any(-1)
        drawn = bool(missing.any())
        if drawn:
            for matrix, rows, which in zip(matrices, q, missing, strict=True):
                rows[which] = start(length, matrix.r, ~matrix.operand.seed(0), q.device)[which]
        return drawn

    def _matrix(self, operand: Operand) -> Matrix:
        state, x = self._state, operand.x
        n, m, r = state.factors(operand.codec, operand.shape)
        takes_part = bool(x.any()) if x.dtype != torch.float32 else not kernels.all_zero(x)
        if not state.ef or (not r and not state.has_residual(operand.key)):
            values = x if x.dtype == torch.float32 else x.float()
            self._locally_finite &= kernels.all_finite(values.view(-1), below=TOO_LARGE)
            return Matrix(operand, n, m, r, None, values.view(n, m) if r else values, takes_part=takes_part)
        if not r or not takes_part:
            state.residual(operand.key)  # for its side effect: subtracts the factors that the last step sent
        residual = state.matrix(operand.key, *((n, m) if r else (1, x.numel())), x.device)
        matrix = Matrix(operand, n, m, r, residual, residual, takes_part=takes_part)
        if takes_part:
            matrix.before = x if x.dtype == torch.float32 else x.float()  # will hold the residual before this step
            if not r:
                self._locally_finite &= kernels.compensate(matrix.before, residual.view(-1), below=TOO_LARGE)
        return matrix

    def _compensate(self, block: Block) -> None:
        """Add the residuals to the gradients, and compute P of the sums.

        A fused kernel does both in one pass over each matrix. It goes along rows, so for transposed matrices, and where
        the kernel cannot be used, P is computed for the whole block by one batched product.
        """
        one_pass = kernels.fuses(block.values)
        projects = one_pass and not block.turned
        left, right = (factor if projects else factor[:, :0] for factor in block.left_right())
        for matrix, p, q in zip(block.matrices, left, right, strict=True):
            if matrix.before is None:
                continue
            assert matrix.residual is not None
            residual, sent = matrix.residual.view(-1), self._state.sent_factors(matrix.operand.key)
            if one_pass:
                self._locally_finite &= kernels.compensate_project(
                    matrix.before, residual, q, p, sent=sent, below=TOO_LARGE
                )
            else:
                old = residual.clone()
                if sent is not None:
                    kernels.low_rank_product(residual, *sent, weight=-1.0, accumulate=True)
                self._locally_finite &= kernels.compensate(matrix.before, residual, below=TOO_LARGE)
                matrix.before.copy_(old)
        if projects and all(matrix.before is not None for matrix in block.matrices):
            return
        if projects and block.matrices[0].residual is not None:
            self._leave_out(block, block.p)
        else:
            self._project(block)

    def _side_by_side(self, alike: list[Matrix]) -> list[tuple[list[Matrix], Tensor]]:
        """Split matrices into groups whose memory is contiguous, each with one tensor that covers it."""
        cut: list[tuple[list[Matrix], Tensor]] = []
        for matrix in alike:
            if cut and matrix.residual is not None:
                some = [*cut[-1][0], matrix]
                values = self._state.block([x.operand.key for x in some])
                if values is not None:
                    cut[-1] = some, values
                    continue
            cut.append(([matrix], matrix.values[None]))
        return cut

    def _project(self, block: Block) -> None:
        """Compute P of this rank's matrices."""
        torch.bmm(block.q, block.values.mT, out=block.p)
        self._leave_out(block, block.p)

    @staticmethod
    def _leave_out(block: Block, factor: Tensor) -> None:
        for matrix, rows in zip(block.matrices, factor, strict=True):
            if not matrix.takes_part:
                rows.zero_()

    # ---- on the wire -------------------------------------------------------------------------------------------------

    def job(self) -> Job:
        begin = time.perf_counter()
        first = torch.cat([block.p.view(-1) for block in self._blocks] + self._parts)
        places = views(first, [block.p for block in self._blocks] + self._parts)
        for block, place in zip(self._blocks, places, strict=False):
            block.p = place
        self._parts = places[len(self._blocks) :]
        self.encode_seconds += time.perf_counter() - begin
        yield self._sum(first, [block.p for block in self._blocks], self._parts)
        self.finite = kernels.all_finite(first)
        if not self.finite or not self._blocks:
            return  # on all ranks alike
        second = torch.empty(sum(block.q.numel() for block in self._blocks), dtype=torch.float32, device=first.device)
        for block, place in zip(self._blocks, views(second, [block.q for block in self._blocks]), strict=True):
            block.q = place
        for rounds_left in reversed(range(self._state.iterations)):
            begin = time.perf_counter()
            for block in self._blocks:
                block.p = kernels.orthonormalize(block.p)
                torch.bmm(block.p, block.values, out=block.q)
                self._leave_out(block, block.q)
            if self.measure and not rounds_left:
                self._measure()
            self.encode_seconds += time.perf_counter() - begin
            yield self._sum(second, [block.q for block in self._blocks])
            begin = time.perf_counter()
            second.div_(self.peers.size)
            if rounds_left:
                numel = sum(block.p.numel() for block in self._blocks)
                first = torch.empty(numel, dtype=torch.float32, device=first.device)
                for block, place in zip(self._blocks, views(first, [block.p for block in self._blocks]), strict=True):
                    block.p = place
                    self._project(block)
                self.encode_seconds += time.perf_counter() - begin
                yield self._sum(first, [block.p for block in self._blocks])
            else:
                self.finite = kernels.all_finite(second)
                self.encode_seconds += time.perf_counter() - begin

    def _sum(self, x: Tensor, factors: Sequence[Tensor], parts: Sequence[Tensor] = ()) -> Transfer:
        """Return the transfer that sums ``x`` over all ranks, in place, and count its bytes.

        Args:
            x: ``factors`` and ``parts``, end to end.
            factors: the factors of each block, (count, r, n).
            parts: the tensors that are not factored.
        """
        if self.peers.size == 1:
            return Transfer(lambda: None, later=["group"])
        blocks = zip(self._blocks, factors, strict=True)
        own = [
            (matrix.operand, rows.numel())
            for block, of in blocks
            for matrix, rows in zip(block.matrices, of, strict=True)
        ]
        own += [(matrix.operand, part.numel()) for matrix, part in zip(self._whole, parts, strict=False)]
        self._count(all_reduce_nbytes(4 * x.numel(), self.peers.size), own)
        return Transfer(lambda: dist.all_reduce(x, group=self.peers.group, async_op=True), later=["group"])

    def _measure(self) -> None:
        """Measure the error: as P has orthonormal rows, the norm of a matrix's approximation is that of its Q."""
        for block in self._blocks:
            for matrix, values, q in zip(block.matrices, block.values, block.q, strict=True):
                if matrix.takes_part:
                    norm = squared_norm(values)
                    self.norms[matrix.operand.key] = Norms(norm, max(0.0, norm - squared_norm(q)))

    # ---- the end of a step -------------------------------------------------------------------------------------------

    def _finish_feedback(self, good: bool) -> None:
        good = good and self.finite
        if not good:
            self.norms.clear()
        for matrix in itertools.chain(self._whole, *(block.matrices for block in self._blocks)):
            if matrix.before is not None and not good:
                assert matrix.residual is not None
                matrix.residual.view(-1).copy_(matrix.before)
        if good:
            self._keep()

    def _keep(self) -> None:
        """Keep the factors that the next step starts with, and those that it will subtract from its residuals."""
        for block in self._blocks:
            for matrix, p, q in zip(block.matrices, block.p, block.q, strict=True):
                self._state.keep(matrix.operand.key, q)
                if matrix.residual is not None:
                    self._state.record_sent(matrix.operand.key, p, q)

    def _averages(self) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Yield the factors of each block's averages: of rows and of columns."""
        for block in self._blocks:
            yield block, block.p, block.q

    def _write(self, good: bool) -> None:
        for block, left, right in self._averages():
            for matrix, p, q in zip(block.matrices, left, right, strict=True):
                average = matrix.operand.average
                out = average
                if average.dtype != torch.float32:
                    out = torch.empty(average.numel(), dtype=torch.float32, device=average.device)
                kernels.low_rank_product(out, p, q)
                if out is not average:
                    average.copy_(out)
        for matrix, part in zip(self._whole, self._parts, strict=True):
            matrix.operand.average.copy_(part)
            if good and matrix.residual is not None and matrix.takes_part:
                matrix.residual.zero_()


def views(flat: Tensor, alike: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive pieces of a flat tensor as views, in the shapes of these tensors."""
    ends = itertools.accumulate(one.numel() for one in alike)
    return [flat[end - one.numel() : end].view_as(one) for one, end in zip(alike, ends, strict=True)]
