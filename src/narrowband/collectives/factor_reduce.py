"""PowerSGD's way to average matrices: two all-reduces of factors (Vogels et al., arXiv 1905.13727, algorithm 1).

For every matrix M (n × m) of a rank, and a factor Q that all ranks have in common::

    Q: orthogonalize
    P = M·Q           all-reduce, orthogonalize
    Q = Mᵀ·P          all-reduce, divide by the number of ranks
    average ≈ P·Qᵀ    the rest of M is the residual

The P of all matrices of an exchange travel as one all-reduce, and so do the Q. Matrices that are not worth factoring
ride along with P. Matrices of equal shape take part in one batched product, as far as their memory lies side by side.
Factors lie row by row (Qᵀ, Pᵀ): the products are several times faster so.

Inf and NaN survive both sums, which are the same on every rank, so all know of them with no flag.
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

#: A gradient with an element as large as this is broken. Below it no product of a step leaves float32, so that a step
#: in which all ranks' gradients stay below is known to be good before its factors have arrived.
TOO_LARGE = 2.0**40


@dataclass(eq=False)
class Matrix:
    """One tensor to average, n × m; r = 0: as it is."""

    operand: Operand
    n: int
    m: int
    r: int
    #: The gradient with the residual; after the step, with the residual then.
    residual: Tensor | None
    #: What is averaged: ``residual``, or else the gradient.
    values: Tensor
    #: The residual before, where the gradient's own memory cannot hold it.
    before: Tensor | None = None
    #: Whether this rank has a gradient here; where it is exactly zero it sends zeros, and receives the average.
    takes_part: bool = True


@dataclass(eq=False)
class Block:
    """Matrices of one shape and rank that take part in one product.

    ``turned``: the transposed matrices do, and n and m are the other way round.
    """

    matrices: list[Matrix]
    values: Tensor  # (count, n, m)
    p: Tensor  # (count, r, n)
    q: Tensor  # (count, r, m)
    turned: bool = False

    def left_right(self) -> tuple[Tensor, Tensor]:
        """The factors of the rows and of the columns of the matrices as they lie in memory."""
        return (self.q, self.p) if self.turned else (self.p, self.q)


class FactorReduce(Exchange):
    """PowerSGD; see the module."""

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
        return f"factors of low rank are kept by powersgd, and {codec} has none behind it"

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        super().__init__(operands, peers, measure=measure, state=state)
        if not isinstance(state, PowerSGD):
            raise TypeError(f"factors of low rank are kept by powersgd, not by {state!r}")
        self._state = state
        self._whole: list[Matrix] = []
        self._parts: list[Tensor] = []  # what these send
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
        """(n, m, r, turned) of the block that a matrix takes part in."""
        return matrix.n, matrix.m, matrix.r, False

    def _begin_with(self, matrices: list[Matrix], q: Tensor) -> bool:
        """The factors that all ranks have in common, with orthonormal rows, which keeps those of P apart.

        A row of zeros, and one that depends on the others, would stay so for ever: a new one is drawn in its place,
        which is not orthonormal to the rest. Returns whether one was.
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
            state.residual(operand.key)  # subtracts what the last step has sent
        residual = state.matrix(operand.key, *((n, m) if r else (1, x.numel())), x.device)
        matrix = Matrix(operand, n, m, r, residual, residual, takes_part=takes_part)
        if takes_part:
            matrix.before = x if x.dtype == torch.float32 else x.float()  # will hold the residual before
            if not r:
                self._locally_finite &= kernels.compensate(matrix.before, residual.view(-1), below=TOO_LARGE)
        return matrix

    def _compensate(self, block: Block) -> None:
        """Add the residual to the gradients, and P of the sums: in one pass, matrix by matrix, or in one product.

        The pass goes along rows, and P of a transposed matrix is a product by itself.
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
        """Those whose memory lies side by side, as one tensor."""
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
        """P, of what this rank has."""
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
        """The sum over all ranks, in place.

        Args:
            x: what is added up: all that follows, end to end.
            factors: of each block, (count, r, n).
            parts: of what is not factored.
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
        """P has orthonormal rows, so what the factors hold of a matrix is as long as its product with P."""
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
        """What the next step starts with, and what its residuals are to lose first."""
        for block in self._blocks:
            for matrix, p, q in zip(block.matrices, block.p, block.q, strict=True):
                self._state.keep(matrix.operand.key, q)
                if matrix.residual is not None:
                    self._state.record_sent(matrix.operand.key, p, q)

    def _averages(self) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """The factors of the averages, of rows and of columns."""
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
    """Consecutive pieces of a flat tensor, in the shapes of these."""
    ends = itertools.accumulate(one.numel() for one in alike)
    return [flat[end - one.numel() : end].view_as(one) for one, end in zip(alike, ends, strict=True)]
