"""One tensor that is kept for backward: how it lies in memory, its groups, its codes, and the way back.

A tensor is seen in the order of its memory, whatever the order of its dimensions, so nothing is copied to be quantized
and a transposed view of what is kept already is known as such. One dimension is cut into groups, which makes it
(parts, outer, groups, inner); a range, lo and step, belongs to each group of each part::

    x̃ = clip(round((x − β) · (2^b − 1) / α), 0, 2^b − 1)        (3)        x̂ = x̃ · α / (2^b − 1) + β        (5)
    α ← μ·α + (1 − μ)·(max − min),    β ← μ·β + (1 − μ)·min       (6, 7)

with the numbers of Pan et al. 2021, Mesa (arXiv 2111.11124), section 3.2. With running estimates there is one part, and
all samples share its ranges; with statistics per sample each sample is a part.

The paper takes a batch into the estimates and quantizes it then, which reads it twice. Here codes are made with the
estimates of the batches before, and the same pass finds the batch's extremes. Where taking these in moves an end of a
range by more than a small share of its width (``DRIFT``), the tensor is quantized anew, as the paper has it. So every
range is the paper's within that share; and what exceeds it most does so by 1/μ times what it exceeds the paper's, since
x − (μ·end + (1 − μ)·x) = μ·(x − end).

Two rules are not the paper's. A batch that is more than four times (``JUMP``) as wide as its estimate is not clipped to
a fraction: it has 8 bits, and its own range. And a tensor is kept as it is where *outliers* make a range so wide that
codes would tell nothing of all the rest: see :class:`Bulk`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.kernels import Rows

if TYPE_CHECKING:
    from narrowband.activations.policy import ActivationPolicy

__all__ = [
    "Arena",
    "Arrangement",
    "Bulk",
    "Clock",
    "Estimates",
    "Exact",
    "Grouping",
    "Outliers",
    "Packed",
    "Payload",
    "Source",
    "quantized",
    "ranges",
]


@dataclass(frozen=True)
class Grouping:
    """Where the groups of a tensor are.

    Attributes:
        dim: the dimension that is cut.
        groups: how many there are.
        major: the dimension is (major, groups, rest): 1 where neighbours in it belong together, as channels do; B where
            it is samples × heads.
    """

    dim: int
    groups: int
    major: int = 1


@dataclass(frozen=True)
class Arrangement:
    """The order in which a tensor's dimensions lie in memory, slowest first.

    Attributes:
        order: of dimensions.
        sizes: of dimensions, in that order.
        dense: whether the tensor's memory has no gaps and no overlap.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    dense: bool

    @classmethod
    def of(cls, x: Tensor) -> Arrangement:
        """That of a strided tensor."""
        strides = x.stride()
        if x.is_contiguous():
            return cls(tuple(range(x.dim())), tuple(x.shape), dense=True)
        order = tuple(sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim)))
        sizes = tuple(x.shape[dim] for dim in order)
        return cls(order, sizes, dense=x.permute(order).is_contiguous())

    def flat(self, x: Tensor) -> Tensor:
        """The elements in that order, contiguous; a view where there are no gaps."""
        return x.permute(self.order).reshape(-1).contiguous()  # of one row with gaps, reshape makes a view with gaps

    def lines(self, x: Tensor, rows: Rows) -> Tensor:
        """The elements in that order as kernels read them: flat, or with gaps between lines, (parts · outer,
        groups · inner). A view, unless there are gaps elsewhere.
        """
        if not self.dense:
            with contextlib.suppress(RuntimeError):  # strides that are not those of a matrix
                lines = x.permute(self.order).view(rows.parts * rows.outer, rows.groups * rows.inner)
                if lines.stride(1) == 1:
                    return lines
        return self.flat(x)

    def unflat(self, flat: Tensor) -> Tensor:
        """The inverse of :meth:`flat`."""
        back = [0] * len(self.order)
        for place, dim in enumerate(self.order):
            back[dim] = place
        return flat.view(self.sizes).permute(back)

    def rows(self, grouping: Grouping, *, samples: int = 1) -> Rows:
        """How the flat tensor is cut.

        Args:
            grouping: its groups.
            samples: how many the first dimension is made of, each to be a part. They can be only where that dimension
                lies outermost.
        """
        place = self.order.index(grouping.dim)
        before = math.prod(self.sizes[:place]) * grouping.major
        groups = grouping.groups
        inner = math.prod(self.sizes) // max(1, before * groups)
        parts = samples if self.order[0] == 0 and before % samples == 0 else 1
        return Rows(parts, before // parts, groups, inner)


# ---- ranges ----------------------------------------------------------------------------------------------------------

#: The share of a range's width by which an end may differ from what equations 6 and 7 say.
DRIFT = 0.02
#: How many times as wide as its estimate a batch may be, and be clipped to what it makes of that.
JUMP = 4
#: About half of all steps miss the middle by a bit.
_TRIES = 64


class Estimates:
    """What a model has learned of its activations: running estimates of ranges, α and β by name, float32 (groups,)
    each; and how many random draws were made. Any thread may use them.

    Codes of a batch are made with what :meth:`known` says of the batches before, if that is close enough to what
    :meth:`observe` says then; see :func:`quantized`.

    Args:
        decay: μ.
        seed: of random draws, 32 bits.
    """

    def __init__(self, decay: float = 0.9, seed: int = 0) -> None:
        self.decay = decay
        self.seed = seed
        self.draws = 0
        self._held: dict[str, Tensor] = {}  # (2, groups): α, β
        self._lock = threading.Lock()

    def draw(self) -> int:
        """The next seed."""
        with self._lock:
            self.draws += 1
            return self.seed << 32 | self.draws

    def known(self, name: str, groups: int, device: torch.device) -> Tensor | None:
        """What is estimated now, (2, groups): α, β. None where nothing is, and where every batch has its own range."""
        with self._lock:
            held = self._held.get(name)
        return None if not self.decay or held is None or held.shape[1] != groups else held.to(device)

    def observe(self, name: str, low: Tensor, high: Tensor) -> Tensor:
        """Take a batch's extremes in, and return what is estimated then. The first batch is taken as it is."""
        with self._lock:
            held = self._held.get(name)
            if held is None or held.shape[1] != low.numel():  # or it is grouped in another way now
                learned = torch.stack((high - low, low))
            else:
                learned, _, _ = kernels.learn_ranges(held.to(low.device), low, high, self.decay)
            self._held[name] = learned
        return learned

    def forget(self, name: str) -> None:
        """Nothing is known of a tensor any more."""
        with self._lock:
            self._held.pop(name, None)

    def replace(self, name: str, known: Tensor, learned: Tensor) -> bool:
        """Let an estimate take another's place; False where that one is no longer there."""
        with self._lock:
            there = self._held.get(name) is known
            if there:
                self._held[name] = learned
        return there

    def state_dict(self) -> dict[str, Tensor]:
        """Name → (2, groups) float32: α, then β."""
        with self._lock:
            return dict(self._held)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what :meth:`state_dict` gave.

        Raises:
            ValueError: something else was given.
        """
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name}: a range is a tensor, (2, groups), and this is a {type(value).__name__}")
            if value.dim() != 2 or value.shape[0] != 2 or not value.is_floating_point():
                raise ValueError(
                    f"{name}: a range is (2, groups) of floats, and this is {tuple(value.shape)} of {value.dtype}"
                )
            if not bool(torch.isfinite(value).all()) or bool((value[0] < 0).any()):
                raise ValueError(f"{name}: widths and lower ends of ranges are finite, and widths at least 0")
        with self._lock:
            self._held = {name: value.detach().to(torch.float32, copy=True) for name, value in state.items()}


def ranges(
    low: Tensor, high: Tensor, policy: ActivationPolicy, estimates: Estimates, name: str
) -> tuple[Tensor, Tensor]:
    """α and β for a tensor with these extremes."""
    running = policy.statistics == "running"
    return _shaped(estimates.observe(name, low, high) if running else torch.stack((high - low, low)), policy)


def _shaped(estimate: Tensor, policy: ActivationPolicy) -> tuple[Tensor, Tensor]:
    """α and β as the policy wants them. The same estimates serve any policy."""
    alpha, beta = estimate.unbind()
    if not policy.symmetric:
        return alpha, beta
    beta = -torch.maximum(alpha + beta, -beta)
    return -2 * beta, beta


def _centred(step: Tensor, middle: int) -> Tensor:
    """Steps, next to none larger, with which the kernels give zero exactly the code in the middle: they multiply by
    1 / step, which is rounded.
    """
    step = torch.where(step < torch.finfo(torch.float32).tiny, 0.0, step)
    for _ in range(_TRIES):
        missed = (middle * step) * (1 / step) != middle
        missed &= step > 0
        if not bool(missed.any()):
            break
        step = torch.where(missed, step * (1 + 2.0**-20), step)
    return step


# ---- what is kept ----------------------------------------------------------------------------------------------------


class Arena:
    """Memory for the codes of a pass: large pieces that hold nothing else, filled one after the other.

    Codes live until backward, activations for a moment. Side by side in one heap, codes that are freed leave gaps
    there, which stay with the process. A piece goes back to the system with the last of the codes in it, and backward
    needs them in the opposite order. On devices, PyTorch's own allocator sees to that.

    Example:
        >>> arena, cpu = Arena(), torch.device("cpu")
        >>> a, b = arena.take(100, cpu), arena.take(100, cpu)
        >>> a.numel(), b.data_ptr() - a.data_ptr()
        (100, 128)
    """

    #: Bytes of a piece: more than the 32 MiB up to which glibc may take it from its heap. What is never written to
    #: takes no memory.
    PIECE_NBYTES = 33 << 20
    _ALIGNED = 64

    def __init__(self) -> None:
        self._piece, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory for so many bytes: uint8, flat."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if nbytes > self._piece.numel() - self._used:
            self._piece, self._used = torch.empty(max(nbytes, self.PIECE_NBYTES), dtype=torch.uint8), 0
        taken = torch.empty(0, dtype=torch.uint8)  # no view of the piece, of whose changes autograd would keep count
        taken.set_(self._piece.untyped_storage(), self._used, (nbytes,), (1,))
        self._used += -(-nbytes // self._ALIGNED) * self._ALIGNED
        return taken


class Payload:
    """The codes of a tensor, in the order of its memory. Every operator that saved it holds this one.

    Args:
        rows: how it is cut.
        bits: of a code.
        dtype: of the tensor.
        codes: memory for them, of ``rows.nbytes(bits)``.
    """

    __slots__ = ("__weakref__", "bits", "codes", "dtype", "low", "rows", "step")

    low: Tensor
    step: Tensor

    def __init__(self, rows: Rows, bits: Literal[8, 4, 2], dtype: torch.dtype, codes: Tensor) -> None:
        self.rows, self.bits, self.dtype, self.codes = rows, bits, dtype, codes

    def encode(
        self,
        x: Tensor,
        alpha: Tensor,
        beta: Tensor,
        *,
        symmetric: bool,
        stochastic: bool,
        seed: int,
        watch: bool = False,
    ) -> tuple[Tensor, Tensor] | None:
        """Make codes.

        Args:
            x: the tensor's elements in that order, float32 or bfloat16; see :meth:`Arrangement.lines`.
            alpha: α of every group of every part.
            beta: β.
            symmetric: whether a code in the middle stands for zero.
            stochastic: how codes are rounded.
            seed: of that.
            watch: whether to return the extremes of every group of every part, too.
        """
        if symmetric:
            middle = (1 << self.bits - 1) - 1
            self.step = _centred(alpha / (2 * middle), middle)
            self.low = self.step * -middle
        else:
            self.step = alpha / ((1 << self.bits) - 1)
            self.low = beta
        encode = kernels.quantize_rows_extremes if watch else kernels.quantize_rows
        return encode(x, self.codes, self.rows, self.low, self.step, bits=self.bits, stochastic=stochastic, seed=seed)

    @property
    def nbytes(self) -> int:
        """Of codes, and of ranges where each sample has its own."""
        own = self.low.nbytes + self.step.nbytes if self.rows.parts > 1 else 0
        return self.codes.numel() + own

    def decode(self) -> Tensor:
        """Flat, in the order of memory."""
        direct = self.dtype in (torch.float32, torch.bfloat16)
        out = torch.empty(self.rows.numel, dtype=self.dtype if direct else torch.float32, device=self.codes.device)
        kernels.dequantize_rows(self.codes, out, self.rows, self.low, self.step, bits=self.bits)
        return out if direct else out.to(self.dtype)


class Bulk:
    """How large the rows and the columns of a tensor are, by which outliers are found.

    A range is *dwarfing* where no more than one row in 16 (:data:`FEW`) has an element as large as a 128th
    (:data:`REACH`) of its width: all elements of all other rows lie within two steps of 8 bits on either side of zero,
    and codes, of however many bits, say next to nothing of them. Rows are what :class:`~narrowband.kernels.Rows` cuts,
    in pieces of at most 512 neighbours. The same for columns, the elements that have one place in rows, and a 512th:
    tokens and channels of a linear layer's input, of which it is usual that some channels are 100 times as large as the
    others. Rows and columns of zeros do not count.

    All these numbers are ratios. They leave alone what is heavy-tailed as a whole, and softmax, of which every row has
    something large.

    Args:
        x: the tensor's elements in the order of memory; see :meth:`Arrangement.lines`.
        rows: how they are cut.

    Example:
        >>> x, rows = torch.randn(64, 32), Rows(parts=1, outer=64, groups=1, inner=32)
        >>> Bulk(x, rows).is_dwarfed_by(x.amax() - x.amin())
        False
        >>> x[5, 7] = 1e6
        >>> Bulk(x, rows).is_dwarfed_by(x.amax() - x.amin())
        True
    """

    #: Of rows, and of columns.
    REACH = 128, 512
    FEW = 16
    #: A range that is dwarfing by so many times more is extreme.
    EXTREME = 8
    #: Neighbours in a piece of a row, at most, and in rows of less that are put together.
    _LONG, _SHORT = 512, 16
    #: In longer rows a column is no channel any more: pixels, products of queries and keys.
    _CHANNELS = 1024

    def __init__(self, x: Tensor, rows: Rows) -> None:
        parts, outer, groups, inner = rows.parts, rows.outer, rows.groups, rows.inner
        together = _divisor(outer, self._SHORT // max(inner, 1))
        count = parts * outer // together
        pieces = inner // _divisor(inner, self._LONG)
        if pieces == inner:  # a prime number, or nearly
            pieces = 1
        form = Rows(count, together, groups * pieces, inner // pieces)
        rows_PNGM = _largest(x, form).view(parts, -1, groups, pieces)
        #: (P, G, N): of every range the largest magnitudes of its rows, and of its columns.
        self._largest = [rows_PNGM.transpose(1, 2).flatten(2)]
        if outer >= self.FEW and 1 < inner <= self._CHANNELS:
            self._largest.append(_largest(x, Rows(parts, outer, groups * inner, 1)).view(parts, groups, inner))

    def is_dwarfed_by(self, width: Tensor) -> bool:
        """Whether one of these widths dwarfs its range's rows, or columns.

        Args:
            width: of the range of every group of every part, float32.
        """
        found = torch.zeros((), dtype=torch.bool, device=width.device)
        for largest_PGN, reach in zip(self._largest, self.REACH, strict=False):
            reaching = (largest_PGN >= (width / reach).view(*largest_PGN.shape[:2], 1)).sum(-1)
            there = (largest_PGN > 0).sum(-1)
            found = found | ((reaching <= (there + self.FEW - 1) // self.FEW) & (reaching < there)).any()
        return bool(found)

    def outliers(self, width: Tensor) -> Outliers | None:
        """What is wrong with ranges of these widths, if anything."""
        return Outliers(extreme=self.is_dwarfed_by(width / self.EXTREME)) if self.is_dwarfed_by(width) else None


@dataclass(frozen=True)
class Outliers:
    """Why a tensor is kept as it is.

    Attributes:
        extreme: whether what comes of it is to be kept as it is, too. What a saturated tanh passes on of its gradient
            is zero; by its codes it is not quite, and beside an input of 1e20 that is no small error.
    """

    extreme: bool


def _largest(x: Tensor, rows: Rows) -> Tensor:
    """The largest magnitude of each range."""
    low, high = kernels.row_extremes(x, rows)
    return torch.maximum(high, -low)


def _divisor(size: int, wanted: int) -> int:
    """The largest divisor that is no larger than wanted, at least 1."""
    return next((divisor for divisor in range(min(size, wanted), 1, -1) if size % divisor == 0), 1)


def quantized(
    x: Tensor,
    rows: Rows,
    bits: Literal[8, 4, 2],
    dtype: torch.dtype,
    arena: Arena,
    policy: ActivationPolicy,
    estimates: Estimates,
    name: str,
) -> Payload | Outliers:
    """Codes of a tensor, of whose range the estimates learn. None of one that is not finite, has no range in float32,
    or has outliers (see :class:`Bulk`): nothing is learned of it, and it is to be kept exactly.

    Outliers are looked for where a range is new, or moves; and, since it may widen slowly, in one batch of 64.

    Args:
        x: the tensor's elements in the order of memory, float32 or bfloat16; see :meth:`Arrangement.lines`.
        rows: how they are cut.
        bits: of a code.
        dtype: of the tensor.
        arena: where codes go.
        policy: says which statistics, and how codes are rounded.
        estimates: of the model.
        name: of the tensor's estimate.
    """
    known = estimates.known(name, rows.groups, x.device) if policy.statistics == "running" else None
    form: dict[str, Any] = {"symmetric": policy.symmetric, "stochastic": policy.rounding == "stochastic"}
    if known is None:
        low, high = kernels.row_extremes(x, rows)
        if not bool(torch.isfinite(2 * torch.maximum(high, -low)).all()):
            return Outliers(extreme=True)
        found = Bulk(x, rows).outliers(high - low)
        if found is not None:
            return found
        payload = Payload(rows, bits, dtype, arena.take(rows.nbytes(bits), x.device))
        payload.encode(x, *ranges(low, high, policy, estimates, name), seed=estimates.draw(), **form)
        return payload
    payload, seed = Payload(rows, bits, dtype, arena.take(rows.nbytes(bits), x.device)), estimates.draw()
    seen = payload.encode(x, *_shaped(known, policy), seed=seed, watch=True, **form)
    assert seen is not None
    learned, finite, moved = kernels.learn_ranges(known, *seen, estimates.decay)
    if not finite:
        return Outliers(extreme=True)
    own, jumps = torch.stack((seen[1] - seen[0], seen[0])), False
    if moved > DRIFT or _by_chance(seed):
        bulk = Bulk(x, rows)
        found = bulk.outliers(own[0])
        if found is not None:
            return found
        if bulk.is_dwarfed_by(known[0]):  # by now, or since an outlier that was none when it came
            estimates.forget(name)
            moved = math.inf
        else:
            jumps = bool((own[0] > JUMP * known[0]).any())
    if not estimates.replace(name, known, learned):  # another thread took a batch in meanwhile, or it is on a device
        learned = estimates.observe(name, *seen)
    if jumps and bits != 8:
        payload = Payload(rows, 8, dtype, arena.take(rows.nbytes(8), x.device))
    if moved > DRIFT:
        payload.encode(x, *_shaped(own if jumps else learned, policy), seed=seed, **form)
    return payload


def _by_chance(seed: int) -> bool:
    """Whether this draw is one of those, one in 64, whose tensors are looked at for outliers anyway: a hash, so that a
    resumed run looks at the same.
    """
    return seed * 0x9E3779B1 & 0xFFFFFFFF < 1 << 26


class Clock(Protocol):
    """What counts seconds."""

    seconds: float


class Source(Protocol):
    """Values of a tensor that can be had again: codes, or how to compute them."""

    @property
    def bits(self) -> int:
        """How many of an element were kept."""

    def decode(self) -> Tensor:
        """Flat, in the order of memory, and the caller's own."""


class _Watched:
    """Something saved, which must not have changed when it is used: as PyTorch itself sees to where there are no hooks.

    Args:
        x: what is saved.
        where: operator and module, for the error.
    """

    __slots__ = ("_dtype", "_shape", "_version", "_watch", "_where")

    def __init__(self, x: Tensor, watch: Tensor, where: str) -> None:
        self._watch, self._version, self._where = watch, x._version, where
        self._dtype, self._shape = x.dtype, x.shape

    def check(self) -> None:
        if self._watch._version != self._version:
            form = f"{self._dtype}".removeprefix("torch.") + f" {list(self._shape)}"
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{form}, which {self._where} saved for backward, is at version {self._watch._version}; "
                f"expected version {self._version} instead"
            )


class Exact(_Watched):
    """A tensor that is kept as it is."""

    __slots__ = ("__weakref__", "_x")

    def __init__(self, x: Tensor, where: str) -> None:
        self._x = x.detach()  # of an output of the very node that keeps it, the original would never be freed
        super().__init__(x, self._x, where)

    def holds(self, x: Tensor) -> bool:
        """Whether all of its memory's values are those of another tensor there, of the same order."""
        own = self._x
        return (
            (own.storage_offset(), own.dtype, own.numel()) == (x.storage_offset(), x.dtype, x.numel())
            and self._version == x._version
            and Arrangement.of(own).dense
        )

    def restore(self) -> Tensor:
        """It."""
        self.check()
        return self._x


class Packed(_Watched):
    """A tensor of which codes are kept, or how it is computed from those of another one.

    Args:
        x: it.
        arrangement: how it lies in memory.
        source: its codes, or that.
        where: operator and module.
        clock: is told the seconds that restoring took.
    """

    __slots__ = ("_arrangement", "_clock", "_source")

    def __init__(self, x: Tensor, arrangement: Arrangement, source: Source, where: str, clock: Clock) -> None:
        watch = x.detach()  # counts versions along with x
        watch.data = x.new_empty(0)  # and lets go of its memory
        super().__init__(x, watch, where)
        self._arrangement, self._source, self._clock = arrangement, source, clock

    def restore(self) -> Tensor:
        """About what was saved: same shape, same order in memory."""
        begin = time.perf_counter()
        self.check()
        restored = self._arrangement.unflat(self._source.decode())
        self._clock.seconds += time.perf_counter() - begin
        return restored
