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

Where the device decides whether a step is good, no loop's answer is waited for. A step is carried out in either case;
residuals and factors of the step before are then restored on the device if it was bad.
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
from narrowband.kernels import Findings

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
    #: Whether this rank has a gradient. If not, it sends zeros, keeps its residual, and receives the average.
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
    asks_late: ClassVar[bool] = True
    #: Whether also rows that replace others have to be orthonormal to the rest, see :meth:`_begin_with`.
    all_orthonormal: ClassVar[bool] = False

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
    def goes_ahead(codec: Codec) -> bool:  # noqa: ARG004
        return True

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
        zeros = [operand.absent for operand in operands]
        if not self.zeros_count:
            zeros = kernels.all_zero_each([operand.x for operand in operands])
        matrices = [self._matrix(operand, takes_part=not zero) for operand, zero in zip(operands, zeros, strict=True)]
        factored = sorted(
            (matrix for matrix in matrices if matrix.r),
            key=lambda x: (*self._form(x), self._state.order(x.operand.key), x.operand.key),
        )
        blocks = []
        for (_, _, r, turned), alike in itertools.groupby(factored, key=self._form):
            for some, values in self._side_by_side(list(alike)):
                values = values.mT if turned else values  # noqa: PLW2901
                count, sides = len(some), values.shape[1:]
                p, q = (torch.empty(count, r, n, dtype=torch.float32, device=values.device) for n in sides)
                blocks.append(Block(some, values, p, q, turned))
        if blocks:
            self._begin_with(blocks)
            self._compensate(blocks)
            self._blocks += blocks
        for matrix in matrices:
            if not matrix.r:
                self._whole.append(matrix)
                flat = matrix.values.reshape(-1)
                self._parts.append(flat / self.peers.size if matrix.takes_part else torch.zeros_like(flat))

    def _form(self, matrix: Matrix) -> tuple[int, int, int, bool]:
        """Return (n, m, r, turned) of the block that a matrix belongs to."""
        return matrix.n, matrix.m, matrix.r, False

    def _begin_with(self, blocks: Sequence[Block]) -> None:
        """Give blocks the factors that the step starts with, equal on all ranks, with orthonormal rows.

        Orthonormal rows keep the rows of P apart. A row that is zero, or linearly dependent on others, would stay so
        forever: it is replaced by a newly drawn row, which is not orthonormal to the rest unless
        :attr:`all_orthonormal`. Where the host does not wait to learn of such rows, those that replace them have been
        drawn before.
        """
        state, again = self._state, self.all_orthonormal
        into: list[Tensor] = []
        begins: list[Tensor] = []
        spares: list[Tensor] = []
        for block in blocks:
            for matrix, rows in zip(block.matrices, block.q, strict=True):
                operand, (r, length) = matrix.operand, rows.shape
                into.append(rows)
                begins.append(state.factor(operand.key, r, length, operand.seed(0), rows.device))
                if self.findings is not None:
                    spares.append(state.spare(operand.key, r, length, operand.index, rows.device))
        torch._foreach_copy_(into, begins)
        qs = kernels.orthonormalize_all([block.q for block in blocks], spares, again=again)
        for block, q in zip(blocks, qs, strict=True):
            block.q = q
        if self.findings is not None:
            return
        # The host waits once: rows that it draws depend on the step, and spare rows, drawn before, would be others.
        lacking = [~(block.q != 0).any(-1) for block in blocks]
        if bool(torch.cat([rows.view(-1) for rows in lacking]).any()):
            for block, missing in zip(blocks, lacking, strict=True):
                for matrix, rows, which in zip(block.matrices, block.q, missing, strict=True):
                    r, length = rows.shape
                    new = start(length, r, ~matrix.operand.seed(0), rows.device)
                    rows.copy_(torch.where(which[:, None], new, rows))  # rows[which] would wait for each matrix
            if again:
                for block, q in zip(blocks, kernels.orthonormalize_all([block.q for block in blocks]), strict=True):
                    block.q = q

    def _matrix(self, operand: Operand, *, takes_part: bool) -> Matrix:
        state, x = self._state, operand.x
        n, m, r = state.factors(operand.codec, operand.shape)
        if not state.ef or (not r and not state.has_residual(operand.key)):
            values = x if x.dtype == torch.float32 else x.float()
            self._locally_finite &= kernels.all_finite(values.view(-1), below=TOO_LARGE)
            return Matrix(operand, n, m, r, None, values.view(n, m) if r else values, takes_part=takes_part)
        sent = state.sent_factors(operand.key)
        rows = r * max(1, state.halves)  # of the factors that this step sends
        if not r or not takes_part or (self.findings is not None and sent is not None and sent[0].shape[0] != rows):
            state.residual(operand.key)  # for its side effect: subtracts the factors that the last step sent
        residual = state.matrix(operand.key, *((n, m) if r else (1, x.numel())), x.device)
        matrix = Matrix(operand, n, m, r, residual, residual, takes_part=takes_part)
        if takes_part:
            matrix.before = x if x.dtype == torch.float32 else x.float()  # will hold the residual before this step
            if not r:
                self._locally_finite &= kernels.compensate(matrix.before, residual.view(-1), below=TOO_LARGE)
        return matrix

    def _compensate(self, blocks: Sequence[Block]) -> None:
        """Add the residuals to the gradients, and compute P of the sums.

        A fused kernel does both in one pass over each matrix. It goes along rows, so for transposed matrices, and where
        the kernel cannot be used, P is computed for the whole block by one batched product.
        """
        one_pass = kernels.fuses(blocks[0].values)
        some: list[Matrix] = []
        ps: list[Tensor] = []
        qs: list[Tensor] = []
        for block in blocks:
            projects = one_pass and not block.turned
            left, right = (factor if projects else factor[:, :0] for factor in block.left_right())
            for matrix, p, q in zip(block.matrices, left, right, strict=True):
                if matrix.before is not None:
                    some.append(matrix)
                    ps.append(p)
                    qs.append(q)
        sents = [self._state.sent_factors(matrix.operand.key) for matrix in some]
        if one_pass:
            xs, residuals = [_before(matrix) for matrix in some], [_residual(matrix) for matrix in some]
            self._locally_finite &= kernels.compensate_project_all(
                xs, residuals, qs, ps, sents=sents, below=TOO_LARGE
            )  # fmt: skip
        else:
            for matrix, sent in zip(some, sents, strict=True):
                old = _residual(matrix).clone()
                if sent is not None:
                    kernels.low_rank_product(_residual(matrix), *sent, weight=-1.0, accumulate=True)
                self._locally_finite &= kernels.compensate(_before(matrix), _residual(matrix), below=TOO_LARGE)
                _before(matrix).copy_(old)
        for block in blocks:
            projects = one_pass and not block.turned
            if projects and all(matrix.before is not None for matrix in block.matrices):
                continue
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
        self._merge()
        first, self._parts = self._together(self._parts)
        self.encode_seconds += time.perf_counter() - begin
        yield self._sum(first, [block.p for block in self._blocks], self._parts)
        self.finite = self._all_finite(first)
        if not self.finite or not self._blocks:
            return  # on all ranks alike
        second = torch.empty(sum(block.q.numel() for block in self._blocks), dtype=torch.float32, device=first.device)
        for block, place in zip(self._blocks, views(second, [block.q for block in self._blocks]), strict=True):
            block.q = place
        for rounds_left in reversed(range(self._state.iterations)):
            begin = time.perf_counter()
            ps = kernels.orthonormalize_all([block.p for block in self._blocks])
            for block, p in zip(self._blocks, ps, strict=True):
                block.p = p
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
                self.finite = self._all_finite(second)
                self.encode_seconds += time.perf_counter() - begin

    def _merge(self) -> None:
        """Merge blocks that were encoded in turn, as groups of gradients became ready, and lie side by side in memory,
        so that one product serves them all. Their P have to be put together after that.
        """
        groups: list[list[Block]] = []
        for block in sorted(
            self._blocks, key=lambda x: (*self._form(x.matrices[0]), self._state.order(x.matrices[0].operand.key))
        ):
            before = [matrix for one in groups[-1] for matrix in one.matrices] if groups else []
            if (
                before
                and block.matrices[0].residual is not None
                and self._form(before[0]) == self._form(block.matrices[0])
                and self._state.block([matrix.operand.key for matrix in (*before, *block.matrices)]) is not None
            ):
                groups[-1].append(block)
            else:
                groups.append([block])
        self._blocks = []
        for some in groups:
            if len(some) > 1:
                matrices = [matrix for block in some for matrix in block.matrices]
                values = self._state.block([matrix.operand.key for matrix in matrices])
                assert values is not None
                turned = some[0].turned
                p, q = (torch.cat([getattr(block, name) for block in some]) for name in ("p", "q"))
                self._blocks.append(Block(matrices, values.mT if turned else values, p, q, turned))
            else:
                self._blocks += some

    def _together(self, parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return what a collective sends, the P of all blocks and these parts, end to end in one tensor; and the parts
        in it. Blocks get their P in it.
        """
        pieces = [*(block.p for block in self._blocks), *parts]
        together = torch.cat([piece.view(-1) for piece in pieces])
        places = views(together, pieces)
        for block, place in zip(self._blocks, places, strict=False):
            block.p = place
        return together, places[len(self._blocks) :]

    def _all_finite(self, x: Tensor) -> bool:
        """Return whether sums are finite; where the host is not to wait, note it on the device, and return True."""
        with self._noting(Findings.ANY):
            finite = kernels.all_finite(x)
        if self.findings is None:
            return finite
        self.findings.note(Findings.ANY, bad=not finite)  # of loops that knew at once
        return True

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
        factored = [matrix for block in self._blocks for matrix in block.matrices]
        changed = [matrix for matrix in (*self._whole, *factored) if matrix.before is not None]
        if not good:
            for matrix in changed:
                _residual(matrix).copy_(_before(matrix))
            return
        for matrix in self._whole:
            if matrix.residual is not None and matrix.takes_part:
                matrix.residual.zero_()
        if self.findings is None:
            self._keep()
            return
        bad = self.findings.place(Findings.ANY)
        pairs = [(_residual(matrix), _before(matrix)) for matrix in changed] + self._keep_unless(bad)
        kernels.restore_all_if(bad, [own for own, _ in pairs], [former for _, former in pairs])

    def _keep_unless(self, bad: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Do as :meth:`_keep`, and return pairs: what the device has to overwrite if ``bad``, one int32, is not zero;
        and what with.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for block in self._blocks:
            for matrix, *found in zip(block.matrices, block.p, block.q, strict=True):
                pairs += zip(found, self._state.before(matrix.operand.key, *found), strict=True)
        self._keep()
        return pairs

    def _keep(self) -> None:
        """Keep the factors that the next step starts with, and those that it will subtract from its residuals."""
        self._keep_all([block.q for block in self._blocks])
        for block in self._blocks:
            for matrix, p, q in zip(block.matrices, block.p, block.q, strict=True):
                if matrix.residual is not None:
                    self._state.record_sent(matrix.operand.key, p, q)

    def _keep_all(self, factors: Sequence[Tensor]) -> None:
        """Keep the factors that the next step starts with, one tensor for each block.

        The factor of a matrix of zeros is not kept if the host knows of it. Otherwise the device replaces its rows.
        """
        ahead = self.findings is not None
        kept = [own if ahead else own.clone() for own in factors]  # the device would restore them by themselves
        there = iter([True] * sum(len(own) for own in kept))
        if kept and not ahead:
            there = iter(torch.cat([own.any(-1).any(-1) for own in kept]).tolist())
        for block, own in zip(self._blocks, kept, strict=True):
            for matrix, rows in zip(block.matrices, own, strict=True):
                if next(there):
                    self._state.keep(matrix.operand.key, rows, left=self._keeps_left(block))

    @staticmethod
    def _keeps_left(block: Block) -> bool:  # noqa: ARG004
        """Whether the kept factor is of rows."""
        return False

    def _averages(self) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Yield the factors of each block's averages: of rows and of columns."""
        for block in self._blocks:
            yield block, block.p, block.q

    def _write(self, good: bool) -> None:
        outs: list[Tensor] = []
        ps: list[Tensor] = []
        qs: list[Tensor] = []
        narrow: list[tuple[Tensor, Tensor]] = []
        for block, left, right in self._averages():
            for matrix, p, q in zip(block.matrices, left, right, strict=True):
                average = out = matrix.operand.average
                if average.dtype != torch.float32:
                    out = torch.empty(average.numel(), dtype=torch.float32, device=average.device)
                    narrow.append((average, out))
                outs.append(out)
                ps.append(p)
                qs.append(q)
        kernels.low_rank_products(outs, ps, qs)
        for average, out in narrow:
            average.copy_(out)
        for matrix, part in zip(self._whole, self._parts, strict=True):
            matrix.operand.average.copy_(part)


def _residual(matrix: Matrix) -> Tensor:
    """Return the flat residual of a matrix that has one."""
    assert matrix.residual is not None
    return matrix.residual.view(-1)


def _before(matrix: Matrix) -> Tensor:
    """Return the gradient of a matrix that has a residual, or the former residual in its place."""
    assert matrix.before is not None
    return matrix.before


def views(flat: Tensor, alike: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive pieces of a flat tensor as views, in the shapes of these tensors."""
    ends = itertools.accumulate(one.numel() for one in alike)
    return [flat[end - one.numel() : end].view_as(one) for one, end in zip(alike, ends, strict=True)]
