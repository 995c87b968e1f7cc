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

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.errors import PayloadError

__all__ = ["ALIGNMENT", "Codec", "Shape", "aligned"]

#: A number of elements, or a shape.
Shape: TypeAlias = "int | Sequence[int]"

#: Payload sizes are multiples of this many bytes.
ALIGNMENT = 4

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def numel_of(shape: Shape) -> int:
    return shape if isinstance(shape, int) else math.prod(shape)


def dims(shape: Shape) -> tuple[int, ...]:
    """A shape as a tuple; a number of elements is a vector."""
    return (shape,) if isinstance(shape, int) else tuple(shape)


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

    # ---- what a user calls -------------------------------------------------------------------------------------------

    def payload_nbytes(self, shape: Shape, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the payload of a tensor of this shape (or number of elements) and dtype."""
        return self._nbytes(shape, dtype) if numel_of(shape) else 0

    def encode(self, x: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        """The payload of ``x``: flat uint8 on the same device.

        Args:
            x: float32, float16 or bfloat16, any shape and strides.
            seed: drives stochastic rounding and sampling; the same seed gives the same payload.
            out: where to write: uint8, contiguous, exactly ``payload_nbytes`` long (fixed-size codecs only).

        Raises:
            TypeError: another dtype, or an ``out`` that is not uint8.
            ValueError: an ``out`` of another size.
        """
        self._check_dtype(x)
        nbytes = self.payload_nbytes(x.shape, x.dtype)
        if out is None:
            out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        elif out.dtype != torch.uint8 or not out.is_contiguous():
            raise TypeError(f"out must be a contiguous uint8 tensor, not {out.dtype}")
        elif out.numel() != nbytes:
            raise ValueError(f"out has {out.numel()} bytes; {self} needs {nbytes} for shape {tuple(x.shape)}")
        if nbytes:
            target = out if out.data_ptr() % ALIGNMENT == 0 else torch.empty_like(out)
            self._encode(x.detach().reshape(-1).float(), x.shape, x.dtype, target, seed)
            if target is not out:
                out.copy_(target)
        return out

    def decode(
        self, payload: Tensor, out: Tensor, *, seed: int = 0, weight: float = 1.0, accumulate: bool = False
    ) -> Tensor:
        """``out ← weight · decoded``, or ``out ← out + weight · decoded`` when accumulating; returns ``out``.

        So the mean over N ranks is N calls with ``weight=1/N, accumulate=True``, with no dense copy per rank.

        Raises:
            PayloadError: the payload is too short, too long, or names an element that ``out`` does not have. Nothing
            has
                been written then.
            TypeError: a dtype that no codec decodes to.
        """
        self._check_dtype(out)
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise PayloadError(f"a payload is a flat uint8 tensor, not {payload.dtype} of shape {tuple(payload.shape)}")
        self._check_length(payload, out.shape, out.dtype)
        if not out.numel():
            return out
        if payload.data_ptr() % ALIGNMENT or not payload.is_contiguous():
            payload = payload.clone(memory_format=torch.contiguous_format)
        direct = out.dtype == torch.float32 and out.is_contiguous()
        flat = (out if direct else out.float()).detach().reshape(-1)
        self._decode(payload, flat, out.shape, out.dtype, seed, weight, accumulate)
        if not direct:
            out.detach().copy_(flat.view(out.shape))
        return out

    def encode_compensated(
        self, x: Tensor, residual: Tensor, *, shape: Shape, seed: int = 0, out: Tensor | None = None
    ) -> tuple[bool, Tensor]:
        """``(x, residual) ← (residual, residual + x)``, and the payload of that sum.

        This is error feedback's half of encoding, here so that a codec can fuse it into its own pass. ``x`` and
        ``residual`` are flat contiguous float32; ``x`` is left holding the old residual, so that copying it back undoes
        the call to the bit.

        Returns:
            (whether the sum is finite, the payload). When not finite the payload is of the right size and meaningless.
        """
        finite = kernels.compensate(x, residual)
        payload = self.encode(residual.view(shape), seed=seed, out=out)
        return finite, payload

    def roundtrip(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """What arrives when ``x`` is sent: ``decode(encode(x))``, of x's shape and dtype."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return self.decode(self.encode(x, seed=seed), out, seed=seed)

    def squared_error(self, x: Tensor, *, seed: int = 0) -> float:
        """``‖x − roundtrip(x)‖²``, summed in float64."""
        error = x.detach().float().clone(memory_format=torch.contiguous_format)
        self.decode(self.encode(x, seed=seed), error, seed=seed, weight=-1.0, accumulate=True)
        return float(torch.linalg.vector_norm(error, dtype=torch.float64) ** 2)

    # ---- what the collectives ask ------------------------------------------------------------------------------------

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which payloads may simply be added (so that an all-reduce works on them), or None."""
        return None

    @property
    def granularity(self) -> int:
        """Tensors may be cut at multiples of this many elements without changing what a piece decodes to."""
        return 1

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

    def _check_length(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> None:
        expected = self.payload_nbytes(shape, dtype)
        if payload.numel() != expected:
            raise PayloadError(
                f"a payload of {self} for {numel_of(shape)} elements has {expected} bytes, this one {payload.numel()}"
            )

    def _check_dtype(self, x: Tensor) -> None:
        if x.dtype not in _DTYPES or x.layout != torch.strided:
            raise TypeError(
                f"{self} takes dense float32, float16 or bfloat16 tensors, not {x.dtype} ({x.layout}); "
                "convert it, or leave it uncompressed"
            )

    # ---- the spec string ---------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return format_term(self)


def keys_of(term: object) -> list[Field[Any]]:
    """The fields of a dataclass (or of its instance) that a spec string may set."""
    return [f for f in fields(term) if f.init]  # type: ignore[arg-type]


def format_term(term: object) -> str:
    """The canonical ``name:key=value,…`` of a codec or feedback: its required keys, and what differs from the
    default.
    """
    pairs = [
        f"{f.name}={_format_value(value)}"
        for f in keys_of(term)
        if (value := getattr(term, f.name)) != f.default or f.metadata.get("always")
    ]
    name: str = term.name  # type: ignore[attr-defined]
    return f"{name}:{','.join(pairs)}" if pairs else name


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
