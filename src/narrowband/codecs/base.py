"""The interface that every codec implements.

A codec encodes a floating-point tensor as a flat uint8 *payload* and decodes it again, usually with a loss. It is a
frozen dataclass: two codecs with the same configuration are equal. It holds no state and knows no process group.

Sender and receiver both know codec, shape and dtype, so a payload holds data only. Its size is known before encoding
(:meth:`Codec.payload_nbytes`) and is a multiple of 4 bytes. So payloads laid end to end stay aligned, and one
collective sends one contiguous buffer. The exception is a codec with ``fixed_size = False``: its ``payload_nbytes`` is
the capacity.

The same seed and input give the same payload on every backend, unless it depends on a sum, which each backend adds up
in its own order: the steps of ``sign`` and ``norm=l2``, and factors of low rank. Arithmetic is float32 whatever the
input dtype. Inf and NaN stay visible: they decode to values that are not finite.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs.spec import format_term
from narrowband.errors import PayloadError
from narrowband.kernels.compiling import announced

__all__ = ["ALIGNMENT", "Codec", "Shape", "aligned"]

#: A number of elements, or a shape.
Shape: TypeAlias = "int | Sequence[int]"

#: Payload sizes are multiples of this many bytes.
ALIGNMENT = 4

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of 4, as the sizes of all payloads are."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def numel_of(shape: Shape) -> int:
    """Return the number of elements of a tensor of this shape."""
    return shape if isinstance(shape, int) else math.prod(shape)


def dims(shape: Shape) -> tuple[int, ...]:
    """Return a shape as a tuple; a number of elements becomes the shape of a vector."""
    return (shape,) if isinstance(shape, int) else tuple(shape)


def flattened(x: Tensor) -> Tensor:
    """Return ``x`` as the kernels take it: flat, contiguous float32. Shares the memory of ``x`` where ``x`` is so
    already.
    """
    return x.detach().resolve_neg().reshape(-1).float().contiguous()  # copy_() to 16 bits loses a negative sign


def is_plain(x: Tensor) -> bool:
    """Whether kernels can write into the memory of ``x`` directly: it is contiguous float32, and its negative bit is
    not set (PyTorch sets it for the imaginary part of a conjugate).
    """
    return x.dtype == torch.float32 and x.is_contiguous() and not x.is_neg()


def squared_norm(x: Tensor) -> float:
    """Return ``‖x‖²``, summed in float64, piece by piece: a norm in another dtype would copy its whole input."""
    return squared_norms([x])[0]


def squared_norms(xs: Iterable[Tensor]) -> list[float]:
    """Return :func:`squared_norm` of each tensor; all are on one device, for which the host waits once."""
    norms: list[float] = []
    asked: list[Tensor] = []
    ends = [0]
    for x in xs:
        for part in torch.split(x.reshape(-1), 1 << 20):
            norm = torch.linalg.vector_norm(part, dtype=torch.float64)
            if norm.is_cpu:  # small tensors that live between large temporary ones would fragment memory
                norms.append(float(norm))
            else:
                asked.append(norm)
        ends.append(len(norms) + len(asked))
    norms += torch.stack(asked).tolist() if asked else []
    squares = [norm**2 for norm in norms]
    return [sum(squares[begin:end], start=0.0) for begin, end in itertools.pairwise(ends)]


def squared_norm_late(x: Tensor) -> float | Tensor:
    """Return :func:`squared_norm`; on a device that notes :class:`~narrowband.kernels.Findings`, return one float64
    there, so that the host does not wait.
    """
    if kernels.answers(x.device):
        return squared_norm(x)
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in torch.split(x.reshape(-1), 1 << 20)]
    return torch.stack(norms).square_().sum()


class Codec(ABC):
    """How a tensor is encoded before it is sent, and decoded after.

    Example:
        >>> codec = nb.codec("qsgd:bits=4")
        >>> payload = codec.encode(x, seed=7)  # uint8, codec.payload_nbytes(x.shape, x.dtype) long
        >>> total = codec.decode(payload, total, seed=7, weight=1 / 4, accumulate=True)
    """

    name: ClassVar[str]
    """The name in a spec string."""
    fixed_size: ClassVar[bool] = True
    """False: ``payload_nbytes`` is a capacity, and payloads may be shorter."""
    shared_seed: ClassVar[bool] = False
    """True: the decoder derives something from the seed, so all ranks must encode with the same seed."""
    requantizes: ClassVar[bool] = False
    """True: a sum of decoded tensors may be encoded again without defeating the compression (quantizers, not sparse
    codecs).
    """
    exact: ClassVar[bool] = False
    """True: decoding gives the tensor itself, to the bit and in its dtype."""

    # ---- what a user calls -------------------------------------------------------------------------------------------

    def payload_nbytes(self, shape: Shape, dtype: torch.dtype = torch.float32) -> int:
        """Return the payload size, in bytes, of a tensor of this shape (or number of elements) and dtype."""
        return _payload_nbytes(self, shape if isinstance(shape, int) else tuple(shape), dtype)

    def encode(self, x: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        """Return the payload of ``x``: flat uint8 on the same device.

        Args:
            x: float32, float16 or bfloat16, any shape and strides.
            seed: drives stochastic rounding and sampling; the same seed gives the same payload.
            out: where to write: uint8, flat, contiguous, exactly ``payload_nbytes`` long (fixed-size codecs only).

        Raises:
            TypeError: ``x`` has another dtype, or ``out`` is not flat, contiguous uint8.
            ValueError: ``out`` has another size.
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

        The mean over N ranks therefore takes N calls with ``weight=1/N, accumulate=True``, and no dense copy per rank.

        Raises:
            PayloadError: the payload is too short or too long, or names an element that ``out`` does not have.
                Nothing has been written then.
            TypeError: ``out`` has a dtype that no codec decodes to.
        """
        self._check_dtype(out)
        payload = self._checked(payload, out.shape, out.dtype)
        if not out.numel():
            return out
        direct = is_plain(out)
        flat = flattened(out)  # shares out's memory if possible
        self._decode(payload, flat, out.shape, out.dtype, seed, weight, accumulate)
        if not direct:
            out.detach().copy_(flat.view(out.shape))
        return out

    def decode_mean(self, payloads: Sequence[Tensor] | Tensor, out: Tensor, *, seeds: Sequence[int]) -> Tensor:
        """``out ← the mean of the decoded payloads``; returns ``out``.

        For float32 ``out``, the result has the same bits as decoding the payloads in turn with ``weight=1/N``, but
        ``out`` passes through the caches once, not N times. A half-precision mean is summed in float32, rounded once.

        Args:
            payloads: one per rank: a sequence of tensors, or the rows of one tensor.
            out: any shape; its content is overwritten.
            seeds: the seed that each payload was encoded with.

        Raises:
            ValueError: there is no payload, or not one seed per payload.
            PayloadError, TypeError: as for :meth:`decode`. Nothing has been written then.

        Example:
            >>> codec.decode_mean([codec.encode(a, seed=1), codec.encode(b, seed=2)], out, seeds=[1, 2])
        """
        count = payloads.shape[0] if isinstance(payloads, Tensor) else len(payloads)
        if not count or count != len(seeds):
            raise ValueError(
                f"a mean needs at least one payload, and one seed per payload; got {count} payloads and {len(seeds)} "
                "seeds"
            )
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
    def widens(self) -> bool:
        """Whether a payload of a tensor in 16 bits is that of its numbers in float32."""
        return False

    @property
    def encodes_several(self) -> bool:
        """Whether :meth:`encode_all` encodes several tensors with no more GPU kernel launches than one takes."""
        return False

    def encode_all(
        self,
        xs: Sequence[Tensor],
        outs: Sequence[Tensor],
        *,
        seeds: Sequence[int],
        residuals: Sequence[Tensor] = (),
        decay: float = 1.0,
    ) -> bool:
        """Encode several tensors at once, where :attr:`encodes_several`; others raise TypeError.

        Without residuals this is :meth:`encode`, with residuals :meth:`encode_compensated` with ``subtract``.

        Args:
            xs: flat contiguous float32, not empty.
            outs: where the payloads are written.
            seeds: one per tensor.
            residuals, decay: as for :meth:`encode_compensated`.

        Returns:
            Whether all is finite; or True, while :class:`~narrowband.kernels.Findings` note that on the device. If not,
            payloads are meaningless.

        Example:
            >>> outs = [torch.empty(codec.payload_nbytes(t.shape), dtype=torch.uint8) for t in (a, b)]
            >>> codec.encode_all([a.view(-1), b.view(-1)], outs, seeds=[1, 2])
            True
        """
        raise TypeError(f"{self} cannot encode several tensors at once")

    @property
    def decodes_several(self) -> bool:
        """Whether :meth:`decode_means` needs no more GPU kernel launches for several tensors than for one."""
        return False

    def decode_means(
        self,
        payloads: Tensor,
        places: Sequence[slice],
        outs: Sequence[Tensor],
        *,
        shapes: Sequence[Shape],
        seeds: Sequence[Sequence[int]],
        accumulate: bool = False,
    ) -> None:
        """:meth:`decode_mean` for several tensors, whose payloads lie at ``places`` in each rank's row.

        Args:
            payloads: (ranks, bytes), uint8.
            places: for each tensor, the bytes of a row that hold its payload.
            outs: where each mean is written: flat contiguous float32.
            shapes: the shape of each tensor.
            seeds: for each tensor, one seed per rank.
            accumulate: whether means are added to what ``outs`` hold.

        Raises:
            PayloadError: a payload is damaged. If all tensors are decoded at once, nothing has been written then.

        Example:
            >>> payloads = torch.stack([codec.encode(a, seed=1), codec.encode(b, seed=2)])
            >>> places, outs = [slice(0, payloads.shape[1])], [out.view(-1)]
            >>> codec.decode_means(payloads, places, outs, shapes=[out.shape], seeds=[[1, 2]])
        """
        begins = (payloads.data_ptr(), payloads.stride(0), *(place.start for place in places))
        if self.decodes_several and not any(begin % ALIGNMENT for begin in begins):
            self._decode_means(payloads, places, outs, shapes, accumulate)
            return
        for place, out, shape, own in zip(places, outs, shapes, seeds, strict=True):
            if not accumulate:
                self.decode_mean(payloads[:, place], out.view(dims(shape)), seeds=own)
                continue
            for row, seed in zip(payloads, own, strict=True):
                weight = 1.0 / len(own)
                self.decode(row[place], out.view(dims(shape)), seed=seed, weight=weight, accumulate=True)

    def _decode_means(
        self,
        payloads: Tensor,
        places: Sequence[slice],
        outs: Sequence[Tensor],
        shapes: Sequence[Shape],
        accumulate: bool,
    ) -> None:
        """Implement :meth:`decode_means` in one pass, for aligned payloads and codecs that need no seed to decode."""
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
        """``(x, residual) ← (residual, decay · residual + x)``, then encode that sum.

        This is the encoding step of error feedback. It is a method of the codec so that a codec can fuse it into its
        own pass over the data. Afterwards ``x`` holds the old residual: copying it back undoes the call to the bit.

        Args:
            x: the tensor to send, usually a gradient: flat contiguous float32.
            residual: flat contiguous float32.
            shape: the shape of the tensor.
            seed, out: as for :meth:`encode`.
            decay: the factor by which the residual is multiplied first.
            subtract: if all is finite, subtract the decoded payload from ``residual``, which leaves the codec's error.

        Returns:
            (whether the sum and the decoded payload are finite; the payload). If they are not finite, the payload has
            the right size and its content is meaningless.
        """
        if self.fixed_size:
            out, _ = self._target(out, shape, x.dtype, x.device)  # raises before anything changes
        finite = kernels.compensate(x, residual, decay=decay)
        total = residual.view(dims(shape))
        payload = self.encode(total, seed=seed, out=out)
        finite = finite and self.is_finite(payload, shape)
        if finite and subtract:
            self.decode(payload, total, seed=seed, weight=-1.0, accumulate=True)
        return finite, payload

    def is_finite(self, payload: Tensor, shape: Shape) -> bool:
        """Whether the payload of a float32 tensor of this shape decodes to finite numbers.

        False if the tensor had inf or NaN (but ``randomk`` does not see elements that it does not send), or if finite
        values left the codec's range.

        Raises:
            PayloadError: the payload is too short or too long.
        """
        payload = self._checked(payload, shape, torch.float32)
        return not numel_of(shape) or self._is_finite(payload, shape)

    def roundtrip(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """Return what a receiver of ``x`` gets: ``decode(encode(x))``, of the shape and dtype of ``x``."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return self.decode(self.encode(x, seed=seed), out, seed=seed)

    def squared_error(self, x: Tensor, *, seed: int = 0) -> float:
        """Return ``‖x − roundtrip(x)‖²``, summed in float64."""
        error = x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        # The float32 copy is encoded, not x: a payload may depend on the dtype.
        self.decode(self.encode(error, seed=seed), error, seed=seed, weight=-1.0, accumulate=True)
        return squared_norm(error)

    # ---- what the collectives ask ------------------------------------------------------------------------------------

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype in which payloads can be added element by element, as an all-reduce does, or None."""
        return None

    @property
    def granularity(self) -> int:
        """A tensor may be cut at multiples of this many elements without changing what its pieces decode to."""
        return 1

    @property
    def means_add_up(self) -> bool:
        """Whether :meth:`decode_mean` returns the mean of the decoded payloads, as for most codecs. Then the sum of all
        means is the mean of all sums.
        """
        return True

    # ---- what policies ask -------------------------------------------------------------------------------------------

    @property
    def lost_share(self) -> float:
        """``‖x − C(x)‖² / ‖x‖²`` for normally distributed values, which gradients resemble; measured once.

        Below 1 the codec C is a contraction on such values, as error feedback requires: when a residual e is sent with
        a gradient g, the squared norm of the new residual is at most ``lost_share`` · (‖e‖² + ‖g‖²) in the mean, so
        the residual stays bounded. From 1 on, the residual may grow from step to step (Karimireddy et
        al., arXiv 1901.09847, assumption A).

        Example:
            >>> nb.codec("qsgd:bits=4").lost_share < 0.05 < 1 < nb.codec("qsgd:bits=2").lost_share
            True
        """
        return _lost_share(self)

    def kept_largest(self, shape: Shape) -> int | None:
        """Return k if decoding gives the k largest elements of a tensor unchanged and zeros elsewhere; otherwise None.

        From k a policy computes the errors of many such codecs from one sorted list, without encoding.
        """
        return None

    @property
    def keeps_elements(self) -> bool:
        """Whether decoding gives some elements unchanged and zeros elsewhere; :meth:`elements` then returns those."""
        return False

    def elements(self, payload: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """Return the indices that a payload names (int32, ascending) and the decoded values there (float32).

        Raises:
            TypeError: this codec sends something of every element.
        """
        raise TypeError(f"{self} sends something of every element, so its payloads have no indices")

    def elements_all(self, payloads: Sequence[Tensor], shapes: Sequence[Shape]) -> list[tuple[Tensor, Tensor]]:
        """Return :meth:`elements` of several payloads; on a GPU, perhaps with few kernel launches."""
        return [self.elements(payload, shape) for payload, shape in zip(payloads, shapes, strict=True)]

    def kept_rank(self, shape: Shape) -> int | None:
        """Return r if decoding gives an approximation of rank r to a matrix of this shape; otherwise None.

        0 means that the tensor is sent as it is. From r a policy computes the errors of many such codecs from one list
        of singular values.
        """
        return None

    def variations(self) -> tuple[str, list[float]] | None:
        """Return the key that decides how much is sent, and the values around its present one that a policy may try.

        They go from half to twice the present value if the key counts bits or ranks, and from a tenth to ten times for
        a density. The caller skips values that the codec refuses. None: the codec has no such key.
        """
        return None

    # ---- what a codec implements, on flat contiguous float32 ---------------------------------------------------------

    @abstractmethod
    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Return ``payload_nbytes`` for a tensor that is not empty."""

    @abstractmethod
    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        """Write the payload of ``x`` into ``out``. ``x`` is float32; ``dtype`` is that of the caller's tensor."""

    @abstractmethod
    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        """Decode into ``out``. ``payload`` has the right length; its content is not to be trusted."""

    def _decode_mean(
        self, payloads: Sequence[Tensor] | Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seeds: Sequence[int]
    ) -> None:
        """Decode the mean into ``out``. ``payloads`` may be a matrix; each of its rows is then in aligned memory."""
        weight = 1.0 / len(seeds)
        for i, (payload, seed) in enumerate(zip(payloads, seeds, strict=True)):
            self._decode(payload, out, shape, dtype, seed, weight, accumulate=i > 0)

    @abstractmethod
    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        """Implement :meth:`is_finite` for a payload that is not empty, of the right length and in aligned memory."""

    def _checked(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return the payload in aligned memory; raise PayloadError if it cannot belong to such a tensor."""
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise PayloadError(f"a payload is a flat uint8 tensor, not {payload.dtype} of shape {tuple(payload.shape)}")
        self._check_length(payload, shape, dtype)
        if payload.data_ptr() % ALIGNMENT or not payload.is_contiguous():
            return payload.clone(memory_format=torch.contiguous_format)
        return payload

    def _checked_rows(self, payloads: Tensor, out: Tensor) -> Tensor:
        """Apply :meth:`_checked` to all rows of a matrix."""
        if payloads.dtype != torch.uint8 or payloads.dim() != 2:
            raise PayloadError(
                f"payloads are a list, or the rows of a uint8 matrix, not {payloads.dtype} of shape "
                f"{tuple(payloads.shape)}"
            )
        for row in (payloads[0],) if self.fixed_size else payloads:
            self._check_length(row, out.shape, out.dtype)
        along, across = payloads.stride()
        if payloads.data_ptr() % ALIGNMENT or along % ALIGNMENT or across != 1:
            width = payloads.shape[1]  # pad the rows, so that each begins aligned
            payloads = torch.nn.functional.pad(payloads, (0, aligned(width) - width))[:, :width]
        return payloads

    def _check_length(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> None:
        expected = self.payload_nbytes(shape, dtype)
        if payload.numel() != expected:
            raise PayloadError(
                f"expected a payload of {expected} bytes for {numel_of(shape)} elements of {self}, got "
                f"{payload.numel()} bytes"
            )

    def _target(
        self, out: Tensor | None, shape: Shape, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return (``out``, allocated if None; the aligned tensor to encode into: ``out``, or one to copy from)."""
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
                "convert the tensor, or leave it uncompressed"
            )

    # ---- the spec string ---------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return format_term(self)


def around(given: int) -> list[float]:
    """Return the whole numbers from half of ``given`` to twice ``given``, at least 1."""
    return [*range(max(1, given // 2), 2 * given + 1)]


@functools.lru_cache(maxsize=1 << 14)
def _payload_nbytes(codec: Codec, shape: int | tuple[int, ...], dtype: torch.dtype) -> int:
    """Cache ``payload_nbytes``, which is asked for several times per tensor and step."""
    # A function and not a method of Codec, because the cache of a method would keep every instance alive.
    return codec._nbytes(shape, dtype) if numel_of(shape) else 0  # noqa: SLF001


#: The shape on which :attr:`Codec.lost_share` is measured; more rows if more elements share a scale.
_NORMAL_SHAPE = (64, 256)


@functools.lru_cache(maxsize=1 << 10)
def _lost_share(codec: Codec) -> float:
    """Measure :attr:`Codec.lost_share` on the CPU, on one sample."""
    rows, columns = _NORMAL_SHAPE
    rows = max(rows, -(-codec.granularity // columns))
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    with announced(str(codec)):  # the first call of set-up that compiles loops
        payload = codec.encode(x, seed=1)
        lost = codec.decode(payload, x.clone(), seed=1, weight=-1.0, accumulate=True)
    return squared_norm(lost) / squared_norm(x)
