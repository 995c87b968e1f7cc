"""One packed tensor: its codes, or how it is computed again, and the way back.

A batch that is wider than its estimate by more than a quarter (:data:`~narrowband.activations.ranges.WIDE`) is not
clipped: it has its own range, and where it is more than four times as wide
(:data:`~narrowband.activations.ranges.JUMP`) it has 8 bits, too. And a tensor with outliers is kept as it is; see
:mod:`narrowband.kernels.outliers`. These rules are not the paper's.

On a GPU the host would have to wait for each tensor to follow them. There the device settles a batch's ranges, and the
host hears of it a batch later: a tensor that was more than twice (:data:`WIDER`) as wide as its estimate, or had
outliers, is looked at in the next batch as on a CPU. Until then it has its own range, but the bits that it was to have.
What is not finite decodes to NaN.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.activations.layout import Arrangement
from narrowband.activations.outliers import EXTREME, Outliers
from narrowband.activations.ranges import JUMP, WIDE, Estimates, centred, drift, ranges, shaped
from narrowband.kernels import Affine, Rows, Standard

if TYPE_CHECKING:
    from narrowband.activations.arena import Arena
    from narrowband.activations.policy import ActivationPolicy

__all__ = ["WIDER", "Clock", "Exact", "Packed", "Payload", "Place", "Source", "ahead", "promised", "quantized"]

#: How many times as wide as its estimate a batch on a GPU may be, and the next one is not looked at.
WIDER = 2

#: Types of devices that work by themselves while the host goes on.
AHEAD = {"cuda"}

#: Dtypes that loops write.
_DIRECT = (torch.float32, torch.bfloat16)

#: What saved a tensor: an operator, by its name for a policy, and the module of that name ("": the model).
Place = tuple[str, str]


class Payload:
    """The codes of a tensor, in the order of its memory. Every operator that saved it holds this one.

    Args:
        rows: how it is cut.
        bits: of a code.
        dtype: of the tensor.
        codes: memory for them, of ``rows.nbytes(bits)``.

    Attributes:
        ranges: of these rows, as :func:`~narrowband.kernels.dequantize_rows` takes them.
        numel: elements of the tensor; rows have more where the last one was filled up.
        exact: the tensor itself, where it came to be kept after the codes were made: then they are not used.
    """

    __slots__ = ("__weakref__", "bits", "codes", "dtype", "exact", "numel", "ranges", "rows")

    ranges: Tensor

    def __init__(self, rows: Rows, bits: Literal[8, 4, 2], dtype: torch.dtype, codes: Tensor) -> None:
        self.rows, self.bits, self.dtype, self.codes = rows, bits, dtype, codes
        self.numel = rows.numel
        self.exact: Source | None = None

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
        """Make codes, with given ranges.

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
            step = centred(alpha / (2 * middle), middle)
            low = step * -middle
        else:
            low, step = beta, alpha / ((1 << self.bits) - 1)
        self.ranges = torch.stack((low, step))
        encode = kernels.quantize_rows_extremes if watch else kernels.quantize_rows
        return encode(x, self.codes, self.rows, low, step, bits=self.bits, stochastic=stochastic, seed=seed)

    def encode_learning(
        self, x: Tensor, estimate: Tensor, decay: float, *, symmetric: bool, stochastic: bool, seed: int,
        apart: int | None, drift: float,
    ) -> tuple[bool, float]:  # fmt: skip
        """Make codes, with the ranges of an estimate, which learns of the tensor; see
        :func:`~narrowband.kernels.quantize_rows_learning`.

        Args:
            x: the tensor's elements in that order, float32 or bfloat16; see :meth:`Arrangement.lines`.
            estimate: (2, groups): α, β. Replaced in place, if at all.
            decay: μ.
            symmetric: whether a code in the middle stands for zero.
            stochastic: how codes are rounded.
            seed: of that.
            apart: how far lines of rows are apart in memory, where ``x`` is the tensor as it is.
            drift: by how much an end may move, for the estimate to learn.

        Returns:
            What :func:`~narrowband.kernels.learn_ranges` says of the extremes, which are behind the ranges.
        """
        if symmetric:
            alpha, beta = shaped(estimate, symmetric=True)
            ends = self.encode(x, alpha, beta, symmetric=True, stochastic=stochastic, seed=seed, watch=True)
            assert ends is not None
            self.ranges = torch.cat((self.ranges, torch.stack(ends)))
            learned, finite, moved = kernels.learn_ranges(estimate, *ends, decay)
            if finite and moved <= drift:
                estimate.copy_(learned)
            return finite, moved
        self.ranges, finite, moved = kernels.quantize_rows_learning(
            x, self.codes, self.rows, estimate, decay, bits=self.bits, stochastic=stochastic, seed=seed, apart=apart,
            drift=drift,
        )  # fmt: skip
        return finite, moved

    def encode_adapting(
        self, x: Tensor, estimate: Tensor, decay: float, note: Tensor, *, stochastic: bool, seed: int,
        apart: int | None, standard: Standard | None,
    ) -> Tensor:  # fmt: skip
        """Make codes with ranges that the device settles; see :func:`~narrowband.kernels.quantize_rows_adapting`.

        Returns:
            The new estimate.
        """
        self.ranges, learned = kernels.quantize_rows_adapting(
            x, self.codes, self.rows, estimate, decay, note, drift=drift(decay), jump=WIDE, bits=self.bits,
            stochastic=stochastic, seed=seed, apart=apart, standard=standard,
        )  # fmt: skip
        return learned

    @property
    def nbytes(self) -> int:
        """Of codes, and of ranges where each sample has its own."""
        own = 2 * 4 * self.rows.parts * self.rows.groups if self.rows.parts > 1 else 0
        return self.codes.numel() + own

    def decode(
        self, sizes: Sequence[int] | None = None, dtype: torch.dtype | None = None, affine: Affine | None = None
    ) -> Tensor:
        """As every source does; and affine, if so wanted."""
        if self.exact is not None and affine is None:
            return self.exact.decode(sizes, dtype)
        own, wanted, count = self.dtype, dtype or self.dtype, self.rows.numel
        made = own if own in _DIRECT else torch.float32
        if own is torch.float32 and wanted is torch.bfloat16:  # in the same pass
            own = made = wanted
        whole = count == self.numel
        out = torch.empty(sizes if whole and sizes is not None else count, dtype=made, device=self.codes.device)
        kernels.dequantize_rows(self.codes, out, self.rows, self.ranges, bits=self.bits, affine=affine)
        if made is not own:
            out = out.to(own)
        if own is not wanted:
            out = out.to(wanted)
        if whole:
            return out
        out = out[: self.numel]
        return out if sizes is None else out.view(sizes)


def quantized(
    x: Tensor,
    rows: Rows,
    bits: Literal[8, 4, 2],
    dtype: torch.dtype,
    arena: Arena,
    policy: ActivationPolicy,
    estimates: Estimates,
    name: str,
    *,
    own: bool = False,
    apart: int | None = None,
) -> Payload | Outliers:
    """Codes of a tensor, of whose range the estimates learn. A tensor that is not finite, has no range in float32,
    or has outliers (:mod:`narrowband.kernels.outliers`) has none: nothing is learned of it, and it is
    to be kept exactly.

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
        own: whether ranges are taken from this very tensor, of so few neighbours that outliers are not looked for.
        apart: how far lines of rows are apart in memory, where ``x`` is the tensor as it is.
    """
    learns = policy.learns and not own
    estimate = estimates.get(name, rows.groups, x.device) if learns else None
    stochastic = policy.rounding == "stochastic"
    if estimate is not None and _settles(estimates, policy, name, x.device):
        payload = Payload(rows, bits, dtype, arena.take(rows.nbytes(bits), x.device))
        _adapt(payload, x, estimate, stochastic, estimates, name, apart)
        return payload
    estimates.notes.read(name)  # now it is looked at
    if apart is not None and (estimate is None or policy.symmetric):
        x, apart = _lines(x, rows, apart), None
    if estimate is None:
        low, high = kernels.row_extremes(x, rows)
        if not bool(torch.isfinite(2 * torch.maximum(high, -low)).all()):
            return Outliers(extreme=True)
        if not own:
            width = high - low
            dwarfed, extreme = kernels.dwarfed_rows(x, rows, torch.stack((width, width / EXTREME))).tolist()
            if dwarfed:
                return Outliers(extreme)
        payload = Payload(rows, bits, dtype, arena.take(rows.nbytes(bits), x.device))
        alpha, beta = ranges(low, high, policy, estimates, name if learns else None)
        payload.encode(x, alpha, beta, symmetric=policy.symmetric, stochastic=stochastic, seed=estimates.draw())
        return payload
    payload, seed = Payload(rows, bits, dtype, arena.take(rows.nbytes(bits), x.device)), estimates.draw()
    far, looks = drift(estimates.decay), by_chance(seed)
    finite, moved = payload.encode_learning(
        x, estimate, estimates.decay, symmetric=policy.symmetric, stochastic=stochastic, seed=seed, apart=apart,
        drift=-1.0 if looks else far,
    )  # fmt: skip
    if not finite:
        return Outliers(extreme=True)
    if moved <= far and not looks:
        return payload
    if apart is not None:
        x = _lines(x, rows, apart)
    low, high = payload.ranges[2:]
    width, jumps = high - low, False
    widths = torch.stack((width, estimate[0], width / EXTREME))
    by_batch, by_estimate, extreme = kernels.dwarfed_rows(x, rows, widths).tolist()
    if by_batch:
        return Outliers(extreme)
    if by_estimate:  # by now, or since an outlier that was none when it came
        estimates.forget(name)
        moved = math.inf
    else:
        jumps = bool((width > JUMP * estimate[0]).any())
    learned, _, _ = kernels.learn_ranges(estimate, low, high, estimates.decay)
    if not estimates.replace(name, estimate, learned):  # it was forgotten, or another thread took a batch in meanwhile
        learned = estimates.observe(name, low, high)
    if jumps and bits != 8:
        payload = Payload(rows, 8, dtype, arena.take(rows.nbytes(8), x.device))
    if moved > far:
        alpha, beta = shaped(_unclipped(low, high, learned, estimate), symmetric=policy.symmetric)
        payload.encode(x, alpha, beta, symmetric=policy.symmetric, stochastic=stochastic, seed=seed)
    return payload


def _lines(x: Tensor, rows: Rows, apart: int) -> Tensor:
    """The tensor as kernels read it, (parts · outer, groups · inner)."""
    return x.detach().as_strided((rows.parts * rows.outer, rows.groups * rows.inner), (apart, 1))


def _unclipped(low: Tensor, high: Tensor, learned: Tensor, estimate: Tensor) -> Tensor:
    """What a batch's ranges are to be, (2, groups): those that were learned with it, or its own where it is too wide,
    or lies too far aside, for what had been learned before.
    """
    both = torch.maximum(high, estimate.sum(0)) - torch.minimum(low, estimate[1])
    return torch.where(both > WIDE * estimate[0], torch.stack((high - low, low)), learned)


def promised(
    x: Tensor,
    rows: Rows,
    bits: Literal[8, 4, 2],
    arena: Arena,
    policy: ActivationPolicy,
    estimates: Estimates,
    name: str,
    apart: int,
) -> tuple[Payload, Callable[[Standard], None]] | None:
    """The same of a tensor's rows in their normalized form, whose statistics are not there yet: a payload, and what
    makes its codes when they are. None where the host has to look at the tensor.
    """
    estimate = estimates.get(name, rows.groups, x.device) if policy.learns else None
    if estimate is None or not _settles(estimates, policy, name, x.device):
        return None
    payload = Payload(rows, bits, x.dtype, arena.take(rows.nbytes(bits), x.device))
    stochastic = policy.rounding == "stochastic"

    def keep(standard: Standard) -> None:
        _adapt(payload, x, estimate, stochastic, estimates, name, apart, standard)

    return payload, keep


def _settles(estimates: Estimates, policy: ActivationPolicy, name: str, device: torch.device) -> bool:
    """Whether the device settles the range of a batch, and the host hears of it later."""
    return ahead(device) and not policy.symmetric and estimates.notes.read(name, at_most=WIDER) <= WIDER


def _adapt(
    payload: Payload,
    x: Tensor,
    estimate: Tensor,
    stochastic: bool,
    estimates: Estimates,
    name: str,
    apart: int | None,
    standard: Standard | None = None,
) -> None:
    """Make codes by a range that the device settles."""
    seed, rows = estimates.draw(), payload.rows
    note = estimates.notes.place(name, x.device)
    learned = payload.encode_adapting(
        x, estimate, estimates.decay, note, stochastic=stochastic, seed=seed, apart=apart, standard=standard
    )
    if by_chance(seed):
        if standard is not None:
            x = payload.decode()
        elif apart is not None:
            x = _lines(x, rows, apart)
        dwarfed = kernels.dwarfed_rows(x, rows, learned[:1])
        note.copy_(torch.where(dwarfed, torch.inf, note))
    estimates.replace(name, estimate, learned)


def ahead(device: torch.device) -> bool:
    """Whether the device works by itself while the host goes on."""
    return device.type in AHEAD


def by_chance(seed: int) -> bool:
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

    def decode(self, sizes: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """In the order of memory, and the caller's own.

        Args:
            sizes: of the result; flat if not given.
            dtype: of the result; the tensor's own if not given. To ask for another one may save a pass.
        """


class _Watched:
    """Something saved, which must not have changed when it is used: as PyTorch itself sees to where there are no hooks.

    Attributes:
        _watch: counts versions along with it.
        _version: when it was saved.
        _place: operator and module that saved it, for the error.
    """

    __slots__ = ("_place", "_version", "_watch")

    _place: Place
    _version: int
    _watch: Tensor

    def _refuse(self) -> None:
        operator, module = self._place
        form = f"{self._watch.dtype}".removeprefix("torch.") + f" {list(self._shape)}"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{form}, which {operator} in {module or 'the model'} saved for backward, is at version "
            f"{self._watch._version}; expected version {self._version} instead"
        )

    @property
    def _shape(self) -> Sequence[int]:
        """Of what is saved."""
        return self._watch.shape


class Exact(_Watched):
    """A tensor that is kept as it is."""

    __slots__ = ("__weakref__",)

    def __init__(self, x: Tensor, place: Place) -> None:
        # Of an output of the very node that keeps it, the original would never be freed.
        self._watch, self._version, self._place = x.detach(), x._version, place

    def holds(self, x: Tensor) -> bool:
        """Whether all of its memory's values are those of another tensor there, of the same order."""
        own = self._watch
        return (
            (own.storage_offset(), own.dtype, own.numel()) == (x.storage_offset(), x.dtype, x.numel())
            and self._version == x._version
            and Arrangement.of(own).without_gaps
        )

    def restore(self) -> Tensor:
        """It."""
        if self._watch._version != self._version:
            self._refuse()
        return self._watch


@functools.lru_cache(maxsize=1 << 8)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without elements, which all may have the memory of."""
    return torch.empty(0, dtype=dtype, device=device)


class Packed(_Watched):
    """A tensor of which codes are kept, or how it is computed from those of another one.

    Args:
        x: it.
        arrangement: how it lies in memory.
        source: its codes, or that.
        place: operator and module that saved it.
        clocks: are told the seconds that restoring took.
        gaps: whether what is restored has the gaps in memory that the tensor has. Without them, a checkpoint's second
            run may go another way: what PyTorch makes of a tensor may depend on its strides.
    """

    __slots__ = ("_arrangement", "_clocks", "_source", "_strides")

    def __init__(
        self,
        x: Tensor,
        arrangement: Arrangement,
        source: Source,
        place: Place,
        clocks: Sequence[Clock],
        *,
        gaps: bool = False,
    ) -> None:
        self._watch = watch = x.detach()  # counts versions along with x
        watch.data = _nothing(x.dtype, x.device)  # and lets go of its memory
        self._version, self._place = x._version, place
        self._arrangement, self._source, self._clocks = arrangement, source, clocks
        self._strides = x.stride() if gaps and not arrangement.without_gaps else None

    @property
    def _shape(self) -> Sequence[int]:
        return self._arrangement.shape

    def restore(self) -> Tensor:
        """About what was saved: same shape, same order in memory; and same gaps, if so wanted."""
        begin = time.perf_counter()
        if self._watch._version != self._version:
            self._refuse()
        arrangement = self._arrangement
        restored = self._source.decode(arrangement.sizes)
        if not arrangement.is_usual:
            restored = arrangement.ordered(restored)
        if self._strides is not None:
            form = restored.shape, self._strides
            restored = torch.empty_strided(*form, dtype=restored.dtype, device=restored.device).copy_(restored)
        taken = time.perf_counter() - begin
        for clock in self._clocks:
            clock.seconds += taken
        return restored
