"""The contract of a codec, written down once.

A codec turns a floating-point tensor into a flat uint8 *payload* and back, losing something on the way. It is a frozen
dataclass: its configuration is its identity, it holds no state and knows no process group.

Both sides know codec, shape and dtype, so a payload carries data only. Its size is known before encoding
(:meth:`Codec.payload_nbytes`), a multiple of 4 bytes, so payloads laid end to end stay aligned and one collective moves
one contiguous buffer. The one exception is a codec with ``fixed_size = False``, whose ``payload_nbytes`` is the
capacity.

Same seed, same input: same payload, on every backend. Arithmetic is float32 whatever comes in. Inf and NaN stay
visible: what is decoded from them is not finite.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs.spec import format_term
from narrowband.errors import PayloadError
from narrowband.kernels.compiling import announced

__all__ = ["ALIGNMENT", "Codec", "SelectingCodec", "Shape", "aligned"]

#: A number of elements, or a shape.
Shape: TypeAlias = "int | Sequence[int]"

#: Payload sizes are multiples of this many bytes.
ALIGNMENT = 4

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def numel_of(shape: Shape) -> int:
    """How many elements a tensor of this shape has."""
    return shape if isinstance(shape, int) else math.prod(shape)


def dims(shape: Shape) -> tuple[int, ...]:
    """A shape as a tuple; a number of elements is a vector."""
    return (shape,) if isinstance(shape, int) else tuple(shape)


def flattened(x: Tensor) -> Tensor:
    """``x`` as the kernels take it: flat, contiguous float32; in its own memory where it is so already."""
    return x.detach().resolve_neg().reshape(-1).float().contiguous()  # copy_() to 16 bits loses a negative sign


def is_plain(x: Tensor) -> bool:
    """Whether the memory of ``x`` holds its values as kernels write them: in order, float32, and not their negatives,
    as the imaginary part of a conjugate may.
    """
    return x.dtype == torch.float32 and x.is_contiguous() and not x.is_neg()


def squared_norm(x: Tensor) -> float:
    """``‖x‖²``, summed in float64; piece by piece, because a norm in another dtype copies all that it is given."""
    flat, piece = x.reshape(-1), 1 << 20
    norms = (torch.linalg.vector_norm(flat[i : i + piece], dtype=torch.float64) for i in range(0, len(flat), piece))
    return sum((float(norm) ** 2 for norm in norms), start=0.0)


class Codec(ABC):
    """What a tensor becomes on its way, and how it comes back.

    Example:
        >>> codec = nb.codec("qsgd:bits=4")
        >>> payload = codec.encode(x, seed=7)  # uint8, codec.payload_nbytes(x.shape, x.dtype) long
        >>> total = codec.decode(payload, total, seed=7, weight=1 / 4, accumulate=True)
    """

    #: The name in a spec string.
    name: ClassVar[str]
    #: False: ``payload_nbytes`` is a capacity, and payloads may be shorter.
    fixed_size: ClassVar[bool] = True
    #: True: the decoder derives something from the seed, so all ranks must encode with the same one.
    shared_seed: ClassVar[bool] = False
    #: True: a sum of decoded tensors may be encoded again without losing the point (quantizers, not sparse codecs).
    requantizes: ClassVar[bool] = False
    #: True: what is decoded is the tensor itself, to the bit and in its dtype.
    exact: ClassVar[bool] = False

    # ---- what a user calls -------------------------------------------------------------------------------------------

    def payload_nbytes(self, shape: Shape, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the payload of a tensor of this shape (or number of elements) and dtype."""
        return _payload_nbytes(self, shape if isinstance(shape, int) else tuple(shape), dtype)

    def encode(self, x: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        """The payload of ``x``: flat uint8 on the same device.

        Args:
            x: float32, float16 or bfloat16, any shape and strides.
            seed: drives stochastic rounding and sampling; the same seed gives the same payload.
            out: where to write: uint8, flat, contiguous, exactly ``payload_nbytes`` long (fixed-size codecs only).

        Raises:
            TypeError: another dtype, or an ``out`` that is not flat, contiguous uint8.
            ValueError: an ``out`` of another size.
        """
        self._check_dtype(x)
        out, target = self._target(out, x.shape, x.dtype, x.device)
        if out.numel():
            self._encode(flattened(x), x.shape, x.dtype, target, seed)
            if target is not out:
                out.copy_(target)
        return out

    def decode(
        self, payload: Tensor, out: Tensor, *, seed: int = 0, weight: float = 1.0, accumulate: bool = False
    ) -> Tensor:
        """``out ← weight · decoded``, or ``out ← out + weight · decoded`` when accumulating; returns ``out``.

        So the mean over N ranks is N calls with ``weight=1/N, accumulate=True``, with no dense copy per rank.

        Raises:
            PayloadError: the payload is too short, too long, or names an element that ``out`` does not have.
                Nothing has been written then.
            TypeError: a dtype that no codec decodes to.
        """
        self._check_dtype(out)
        payload = self._checked(payload, out.shape, out.dtype)
        if not out.numel():
            return out
        direct = is_plain(out)
        flat = flattened(out)  # out's own memory where it can be
        self._decode(payload, flat, out.shape, out.dtype, seed, weight, accumulate)
        if not direct:
            out.detach().copy_(flat.view(out.shape))
        return out

    def decode_mean(self, payloads: Sequence[Tensor] | Tensor, out: Tensor, *, seeds: Sequence[int]) -> Tensor:
        """``out ← the mean of what the payloads decode to``; returns ``out``.

        The same bits as decoding one after the other with ``weight=1/N``, but ``out`` goes through the caches once, not
        N times; a half-precision mean is summed in float32 and rounded once.

        Args:
            payloads: one per rank: several tensors, or the rows of one.
            out: any shape; what it holds is overwritten.
            seeds: the seed that each payload was encoded with.

        Raises:
            ValueError: no payload, or not one seed for each.
            PayloadError, TypeError: as :meth:`decode`. Nothing has been written then.

        Example:
            >>> codec.decode_mean([codec.encode(a, seed=1), codec.encode(b, seed=2)], out, seeds=[1, 2])
        """
        count = payloads.shape[0] if isinstance(payloads, Tensor) else len(payloads)
        if not count or count != len(seeds):
            raise ValueError(f"a mean takes payloads and a seed for each; here are {count} and {len(seeds)}")
        self._check_dtype(out)
        if isinstance(payloads, Tensor):
            payloads = self._checked_rows(payloads, out)
        else:
            payloads = [self._checked(payload, out.shape, out.dtype) for payload in payloads]
        if out.numel():
            direct = is_plain(out)
            flat = out.detach().view(-1) if direct else torch.empty(out.numel(), dtype=torch.float32, device=out.device)
            self._decode_mean(payloads, flat, out.shape, out.dtype, seeds)
            if not direct:
                out.detach().copy_(flat.view(out.shape))
        return out

    @property
    def decodes_several(self) -> bool:
        """Whether :meth:`decode_means` takes as few launches on a GPU for several tensors as for one."""
        return False

    def decode_means(
        self,
        payloads: Tensor,
        places: Sequence[slice],
        outs: Sequence[Tensor],
        *,
        shapes: Sequence[Shape],
        seeds: Sequence[Sequence[int]],
    ) -> None:
        """:meth:`decode_mean` of several tensors, whose payloads are at these places in each rank's row.

        Args:
            payloads: (ranks, bytes), uint8.
            places: one for each tensor, of the length of its payload.
            outs: flat contiguous float32.
            shapes: of the tensors.
            seeds: of each tensor, those of the ranks.

        Raises:
            PayloadError: a payload is damaged. Nothing has been written then, where all are decoded at once.

        Example:
            >>> payloads = torch.stack([codec.encode(a, seed=1), codec.encode(b, seed=2)])
            >>> places, outs = [slice(0, payloads.shape[1])], [out.view(-1)]
            >>> codec.decode_means(payloads, places, outs, shapes=[out.shape], seeds=[[1, 2]])
        """
        begins = (payloads.data_ptr(), payloads.stride(0), *(place.start for place in places))
        if self.decodes_several and not any(begin % ALIGNMENT for begin in begins):
            self._decode_means(payloads, places, outs, shapes)
            return
        for place, out, shape, own in zip(places, outs, shapes, seeds, strict=True):
            self.decode_mean(payloads[:, place], out.view(dims(shape)), seeds=own)

    def _decode_means(
        self, payloads: Tensor, places: Sequence[slice], outs: Sequence[Tensor], shapes: Sequence[Shape]
    ) -> None:
        """The same at once, of aligned payloads, for codecs that need no seed to decode."""
        raise NotImplementedError

    def encode_compensated(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        shape: Shape,
        seed: int = 0,
        out: Tensor | None = None,
        decay: float = 1.0,
        subtract: bool = False,
    ) -> tuple[bool, Tensor]:
        """``(x, residual) ← (residual, decay · residual + x)``, and the payload of that sum.

        This is error feedback's half of encoding, here so that a codec can fuse it into its own pass. ``x`` and
        ``residual`` are flat contiguous float32; ``x`` is left holding the old residual, so that copying it back undoes
        the call to the bit.

        Args:
            x, residual: see above.
            shape: that of the tensor.
            seed, out: as for :meth:`encode`.
            decay: what is left of the residual.
            subtract: if all is finite, take from ``residual`` what the payload says, which leaves the codec's error.

        Returns:
            (whether the sum, and what its payload decodes to, is finite; the payload). When not finite the payload is
            of the right size and meaningless.
        """
        if self.fixed_size:
            out, _ = self._target(out, shape, x.dtype, x.device)  # refuse a wrong one before anything changes
        finite = kernels.compensate(x, residual, decay=decay)
        total = residual.view(dims(shape))
        payload = self.encode(total, seed=seed, out=out)
        finite = finite and self.is_finite(payload, shape)
        if finite and subtract:
            self.decode(payload, total, seed=seed, weight=-1.0, accumulate=True)
        return finite, payload

    def is_finite(self, payload: Tensor, shape: Shape) -> bool:
        """Whether the payload of a float32 tensor of this shape decodes to finite numbers.

        It is not where the tensor was not (but ``randomk`` does not see elements that it does not send), nor where
        finite values left the codec's range.

        Raises:
            PayloadError: a payload that is too short or too long.
        """
        payload = self._checked(payload, shape, torch.float32)
        return not numel_of(shape) or self._is_finite(payload, shape)

    def roundtrip(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """What arrives when ``x`` is sent: ``decode(encode(x))``, of x's shape and dtype."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return self.decode(self.encode(x, seed=seed), out, seed=seed)

    def squared_error(self, x: Tensor, *, seed: int = 0) -> float:
        """``‖x − roundtrip(x)‖²``, summed in float64."""
        error = x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        # Encoded from float32, too: a payload may depend on the dtype.
        self.decode(self.encode(error, seed=seed), error, seed=seed, weight=-1.0, accumulate=True)
        return squared_norm(error)

    # ---- what the collectives ask ------------------------------------------------------------------------------------

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which payloads may simply be added (so that an all-reduce works on them), or None."""
        return None

    @property
    def granularity(self) -> int:
        """Tensors may be cut at multiples of this many elements without changing what a piece decodes to."""
        return 1

    @property
    def means_add_up(self) -> bool:
        """Whether :meth:`decode_mean` gives the mean of what the payloads decode to, as it usually does; so that the
        sum of all means is the mean of all sums.
        """
        return True

    # ---- what policies ask -------------------------------------------------------------------------------------------

    @property
    def lost_share(self) -> float:
        """``‖x − C(x)‖² / ‖x‖²`` of normally distributed values, which gradients resemble: measured once.

        Below 1 the codec is a contraction there, which error feedback needs: a residual e that is sent with a gradient
        g becomes at most ``lost_share`` · (‖e‖² + ‖g‖²) in the mean, so it stays bounded. From 1 on it may grow from
        step to step (Karimireddy et al., arXiv 1901.09847, assumption A).

        Example:
            >>> nb.codec("qsgd:bits=4").lost_share < 0.05 < 1 < nb.codec("qsgd:bits=2").lost_share
            True
        """
        return _lost_share(self)

    def kept_largest(self, shape: Shape) -> int | None:
        """k, if decoding gives the k largest elements of a tensor unchanged and zeros elsewhere; otherwise None.

        A policy then finds the errors of many such codecs from one sorted list, without encoding.
        """
        return None

    @property
    def keeps_elements(self) -> bool:
        """Whether decoding gives some elements unchanged, and zeros elsewhere: :meth:`elements` then says which."""
        return False

    def elements(self, payload: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """The indices that a payload names (int32, ascending), and the values, float32, that arrive there.

        Raises:
            TypeError: the codec keeps something of every element.
        """
        raise TypeError(f"{self} names no elements")

    def kept_rank(self, shape: Shape) -> int | None:
        """r, if decoding gives an approximation of rank r to a matrix of this shape; otherwise None.

        0 stands for a tensor that is sent as it is. A policy then finds the errors of many such codecs from one list
        of singular values.
        """
        return None

    def variations(self) -> tuple[str, list[float]] | None:
        """The key that decides how much is sent, and the values around the present one that a policy may try.

        From half to twice the present value where the key counts bits or ranks; from a tenth to ten times a density.
        None: the codec has no such key. Values that the codec refuses are skipped.
        """
        return None

    # ---- what a codec implements, on flat contiguous float32 ---------------------------------------------------------

    @abstractmethod
    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """``payload_nbytes`` of a tensor that is not empty."""

    @abstractmethod
    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        """``dtype`` is that of the tensor the user gave; x is float32 already."""

    @abstractmethod
    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        """``payload`` has the right length; what it says inside is not to be trusted."""

    def _decode_mean(
        self, payloads: Sequence[Tensor] | Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seeds: Sequence[int]
    ) -> None:
        """``payloads`` may be a matrix, whose rows are then each in aligned memory."""
        weight = 1.0 / len(seeds)
        for i, (payload, seed) in enumerate(zip(payloads, seeds, strict=True)):
            self._decode(payload, out, shape, dtype, seed, weight, accumulate=i > 0)

    @abstractmethod
    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        """:meth:`is_finite` of a payload that is not empty, of the right length and in aligned memory."""

    def _checked(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The payload, in aligned memory, if it can be one of such a tensor."""
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise PayloadError(f"a payload is a flat uint8 tensor, not {payload.dtype} of shape {tuple(payload.shape)}")
        self._check_length(payload, shape, dtype)
        if payload.data_ptr() % ALIGNMENT or not payload.is_contiguous():
            return payload.clone(memory_format=torch.contiguous_format)
        return payload

    def _checked_rows(self, payloads: Tensor, out: Tensor) -> Tensor:
        """:meth:`_checked` for all rows of a matrix."""
        if payloads.dtype != torch.uint8 or payloads.dim() != 2:
            raise PayloadError(
                f"payloads are a list, or the rows of a uint8 matrix, not {payloads.dtype} of shape "
                f"{tuple(payloads.shape)}"
            )
        for row in (payloads[0],) if self.fixed_size else payloads:
            self._check_length(row, out.shape, out.dtype)
        along, across = payloads.stride()
        if payloads.data_ptr() % ALIGNMENT or along % ALIGNMENT or across != 1:
            width = payloads.shape[1]  # of rows that begin aligned
            payloads = torch.nn.functional.pad(payloads, (0, aligned(width) - width))[:, :width]
        return payloads

    def _check_length(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> None:
        expected = self.payload_nbytes(shape, dtype)
        if payload.numel() != expected:
            raise PayloadError(
                f"a payload of {self} for {numel_of(shape)} elements has {expected} bytes, this one {payload.numel()}"
            )

    def _target(
        self, out: Tensor | None, shape: Shape, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """(``out``, made if there is none; where to write first: ``out``, or aligned memory to copy from)."""
        nbytes = self.payload_nbytes(shape, dtype)
        if out is None:
            out = torch.empty(nbytes, dtype=torch.uint8, device=device)
        elif out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous():
            raise TypeError(f"out must be flat, contiguous uint8, not {out.dtype} of shape {tuple(out.shape)}")
        elif out.numel() != nbytes:
            raise ValueError(f"out has {out.numel()} bytes; {self} needs {nbytes} for shape {dims(shape)}")
        return out, out if out.data_ptr() % ALIGNMENT == 0 else torch.empty_like(out)

    def _check_dtype(self, x: Tensor) -> None:
        if x.dtype not in _DTYPES or x.layout != torch.strided:
            raise TypeError(
                f"{self} takes dense float32, float16 or bfloat16 tensors, not {x.dtype} ({x.layout}); "
                "convert it, or leave it uncompressed"
            )

    # ---- the spec string ---------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return format_term(self)


class SelectingCodec(Codec):
    """A codec that sends a selection of elements by magnitude, each with its index.

    A feedback may then choose the indices itself (``ef-mixed``, ``dgc``), and the other direction of a pipeline's
    boundary may use them again (``reuse=forward``).

    Attributes:
        density: the share of elements that is sent.
    """

    density: float

    @abstractmethod
    def rows(self, shape: Shape) -> int:
        """How many parts of a tensor of this shape are selected from, each by itself and as much."""

    @abstractmethod
    def kept(self, shape: Shape) -> int:
        """How many elements of a tensor of this shape are sent."""

    @abstractmethod
    def values_nbytes(self, k: int) -> int:
        """Bytes of k values, without their indices."""

    @abstractmethod
    def largest(self, x: Tensor, shape: Shape, k: int, *, seed: int = 0) -> Tensor:
        """The indices (int32, ascending, into the flat tensor) of the k elements of largest magnitude in each row.

        Args:
            x: flat contiguous float32, not empty.
            shape: that of the tensor, which says what its :meth:`rows` are.
            k: how many of each; a codec that samples may find less.
            seed: of the sample.
        """

    @abstractmethod
    def pack(self, indices: Tensor, values: Tensor, *, shape: Shape, out: Tensor | None = None) -> Tensor:
        """The payload of a tensor of this shape that is zero but for these elements.

        Args:
            indices: int32, ascending, into the flat tensor; at most :meth:`kept` of them, and exactly as many where the
                codec does not :attr:`take any number <takes_any>`.
            values: float32, one for each.
            out: as for :meth:`encode`.
        """

    @property
    def takes_any(self) -> bool:
        """Whether :meth:`largest` finds any number of elements, and :meth:`pack` takes any; otherwise only as many as
        :meth:`kept` says.
        """
        return True

    @property
    def sampled(self) -> bool:
        """Whether :meth:`largest` goes by a sample, and may find less than it is asked for."""
        return False

    def rounded(self, values: Tensor) -> Tensor:
        """What arrives of values that :meth:`pack` writes: ``values`` itself where they travel as they are.

        Args:
            values: float32, flat.
        """
        places = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
        return self.decode_at(self.encode_at(values, places), places, torch.empty_like(values))

    def elements(self, payload: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        at = self.places(payload, shape)
        dense = torch.empty(numel_of(shape), dtype=torch.float32, device=payload.device).view(dims(shape))
        self.decode(payload, dense)
        return at, dense.view(-1).index_select(0, at)

    @abstractmethod
    def places(self, payload: Tensor, shape: Shape) -> Tensor:
        """The indices that a payload names: int32, ascending, into the flat tensor.

        Raises:
            PayloadError: it is none of a tensor of this shape.
        """

    @abstractmethod
    def encode_at(self, x: Tensor, places: Tensor) -> Tensor:
        """A payload of values alone, :meth:`values_nbytes` long, for a receiver that has their indices.

        Args:
            x: float32, float16 or bfloat16, any shape.
            places: int32 (k,), ascending, into the flat tensor: the :meth:`places` of another payload.
        """

    @abstractmethod
    def decode_at(self, payload: Tensor, places: Tensor, out: Tensor) -> Tensor:
        """``out ←`` the values of :meth:`encode_at` at these indices, and zero elsewhere; returns ``out``.

        Raises:
            PayloadError: another number of values. Nothing has been written then.
        """


def around(given: int) -> list[float]:
    """Whole numbers from half of this one to twice as much."""
    return [*range(max(1, given // 2), 2 * given + 1)]


@functools.lru_cache(maxsize=1 << 14)
def _payload_nbytes(codec: Codec, shape: int | tuple[int, ...], dtype: torch.dtype) -> int:
    """Asked for several times per tensor and step, and always the same."""
    # Its own class, whose method it would be, if a cache did not keep every instance of a method alive.
    return codec._nbytes(shape, dtype) if numel_of(shape) else 0  # noqa: SLF001


#: What :attr:`Codec.lost_share` looks at: one matrix, or as many elements as share a scale.
_NORMAL_SHAPE = (64, 256)


@functools.lru_cache(maxsize=1 << 10)
def _lost_share(codec: Codec) -> float:
    """Measured on the CPU, of one draw."""
    rows, columns = _NORMAL_SHAPE
    rows = max(rows, -(-codec.granularity // columns))
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    with announced(str(codec)):  # set-up asks for this first of all
        payload = codec.encode(x, seed=1)
        lost = codec.decode(payload, x.clone(), seed=1, weight=-1.0, accumulate=True)
    return squared_norm(lost) / squared_norm(x)
