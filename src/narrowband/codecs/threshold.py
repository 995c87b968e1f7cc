"""The codec that sends all elements of at least a given magnitude.

A payload holds the number of elements (4 bytes), their values in float32, and their indices in Elias–Fano form
(:mod:`~narrowband.codecs.indices`). So its size depends on the data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs.base import Codec, Shape, aligned, flattened, numel_of
from narrowband.codecs.indices import check_numel, read_indices, write_indices
from narrowband.codecs.sparse import scatter
from narrowband.codecs.spec import check_keys
from narrowband.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Threshold"]

_FP32_TINY, _FP32_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Threshold(Codec):
    """Every element of at least a given magnitude, in float32 (Sahu et al., arXiv 2108.00951). Use with ``+ef``.

    How many there are depends on the data, so ``payload_nbytes`` is the capacity: the size of the longest payload.
    Messages are as long as their payloads, so on a GPU the host has to wait for these sizes: once for each tensor that
    it encodes, once for each message to learn the sizes of other ranks, and to decode, once for the numbers of elements
    that ranks have sent of a tensor and once for each payload's indices. Use ``topk`` where that takes too long.

    Args:
        value: the smallest magnitude that is kept.

    Example:
        >>> nb.codec("threshold:value=1.0").roundtrip(torch.tensor([3.0, -1.0, 0.5, -4.0]), seed=0)
        tensor([ 3., -1.,  0., -4.])
    """

    name: ClassVar[str] = "threshold"
    fixed_size: ClassVar[bool] = False

    value: float = field(metadata={"always": True})

    def __post_init__(self) -> None:
        check_keys(self)
        if not _FP32_TINY <= self.value <= _FP32_MAX:
            raise ValueError(f"threshold: value={self.value} is not a positive float32 ({_FP32_TINY:.3g} and up)")

    @staticmethod
    def _nbytes_kept(k: int, n: int) -> int:
        return 4 + 4 * k + aligned(kernels.elias_fano_nbytes(k, n))

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        n = check_numel(numel_of(shape))
        # Keeping all elements takes the most values; keeping all but one saves a value, but costs one more low bit per
        # index.
        return max(self._nbytes_kept(n, n), self._nbytes_kept(n - 1, n))

    def encode(self, x: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        """Return the payload of ``x``, as long as its data needs. ``out`` must hold the capacity; the payload is then a
        prefix of ``out``.
        """
        self._check_dtype(x)
        self._check_room(x.numel(), out)
        flat = flattened(x)
        at = kernels.select_threshold(flat, self.value)
        return self._pack(at, flat[at], flat, out)

    def _check_room(self, numel: int, out: Tensor | None) -> None:
        """Raise TypeError or ValueError unless ``out`` can hold the longest payload."""
        n = check_numel(numel)
        if out is not None and (out.dtype != torch.uint8 or out.dim() != 1):
            raise TypeError(f"out must be flat uint8, not {out.dtype} of shape {tuple(out.shape)}")
        if out is not None and out.numel() < self.payload_nbytes(n):
            raise ValueError(f"out has {out.numel()} bytes; {self} may need {self.payload_nbytes(n)} for {n} elements")

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
        self._check_room(x.numel(), out)
        finite = kernels.compensate(x, residual, decay=decay)
        at = kernels.select_threshold(residual, self.value)
        values = residual[at]
        payload = self._pack(at, values, residual, out)
        if finite and subtract:
            kernels.sparse_accumulate(residual, at, values, -1.0)
        return finite, payload

    def _pack(self, at: Tensor, values: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        """Return the payload of these elements of ``x``; it is a prefix of ``out`` if that is given."""
        k, n = at.numel(), x.numel()
        if not n:
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        payload = torch.empty(self._nbytes_kept(k, n), dtype=torch.uint8, device=x.device)
        payload[:4].view(torch.int32)[0] = k
        payload[4 : 4 + 4 * k].view(torch.float32).copy_(values)
        write_indices(at, n, "elias-fano", payload[4 + 4 * k :])
        if out is None:
            return payload
        return out[: payload.numel()].copy_(payload)

    @property
    def keeps_elements(self) -> bool:
        return True

    def elements(self, payload: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        return self._read([self._checked(payload, shape, torch.float32)], numel_of(shape))[0]

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        raise AssertionError("encode() is overridden as a whole")  # pragma: no cover

    def _counts(self, payloads: Sequence[Tensor], n: int) -> list[int]:
        """Return how many elements each payload holds, for which the host waits once.

        Raises:
            PayloadError: a payload has another size than that number says.
        """
        counts: list[int] = torch.stack([own[:4] for own in payloads]).view(torch.int32).view(-1).tolist()
        for count, own in zip(counts, payloads, strict=True):
            if not 0 <= count <= n or own.numel() != self._nbytes_kept(count, n):
                raise PayloadError(f"a payload of {self} with {count} of {n} elements cannot have {own.numel()} bytes")
        return counts

    def _check_length(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> None:
        """Refuse what no payload can be. Whether it has its own size is seen where its number of elements is read."""
        n, size = numel_of(shape), payload.numel()
        if size < self._nbytes_kept(0, n) if n else size:
            raise PayloadError(f"a payload of {self} with {n} elements cannot have {size} bytes")

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        (count,) = self._counts([payload], numel_of(shape))
        return kernels.all_finite(payload[4 : 4 + 4 * count].view(torch.float32))

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        scatter(out, *self._read([payload], out.numel())[0], weight, accumulate)

    def _decode_mean(
        self, payloads: Sequence[Tensor] | Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seeds: Sequence[int]
    ) -> None:
        kernels.sparse_sum(out, self._read(list(payloads), out.numel()), 1.0 / len(seeds))

    def _read(self, payloads: Sequence[Tensor], n: int) -> list[tuple[Tensor, Tensor]]:
        """Return the indices and the values that each payload holds."""
        return [
            (read_indices(own[4 + 4 * k :], k, n, "elias-fano"), own[4 : 4 + 4 * k].view(torch.float32))
            for k, own in zip(self._counts(payloads, n), payloads, strict=True)
        ]
