"""Codecs that keep a few bits of every element: uniform, QSGD, sign.

All three cut the tensor into groups, give each group its own step, and store one small code per element. They differ in
how the step is computed and how a code is rounded. The loops and the payload format are in
:mod:`narrowband.kernels.quantized`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from narrowband import kernels
from narrowband.codecs.base import Codec, Shape, aligned, around, numel_of
from narrowband.codecs.spec import check_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.kernels import Scale

__all__ = ["QSGD", "Sign", "Uniform"]

#: The largest group: one thread handles a group, and its codes should stay in that core's L2 cache. Groups of
#: ``scope=tensor`` may be larger, and slower.
MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class _Grouping:
    """The arguments by which a codec of this family calls the kernels."""

    bits: int
    group: int
    scale: Scale
    stochastic: bool


class GroupedCodec(Codec):
    """Base of codecs that store a code of a few bits per element, and a header per group."""

    requantizes = True

    @abstractmethod
    def _grouping(self, numel: int) -> _Grouping:
        """Return the grouping of a tensor of ``numel`` ≥ 1 elements."""

    @property
    def granularity(self) -> int:
        return self._grouping(1).group

    def _header_nbytes(self, numel: int) -> int:
        g = self._grouping(max(numel, 1))
        return -(-numel // g.group) * (8 if g.scale == "minmax" else 4)

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        numel = numel_of(shape)
        g = self._grouping(max(numel, 1))
        return aligned(self._header_nbytes(numel) + kernels.packed_nbytes(numel, g.bits, g.group))

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        """Check the header: a span, a norm or a level may exceed float32 although no element does."""
        numel = numel_of(shape)
        g, header = self._grouping(numel), payload[: self._header_nbytes(numel)].view(torch.float32)
        return kernels.holds(kernels.levels_are_finite(header, bits=g.bits, scale=g.scale))

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        g = self._grouping(x.numel())
        kernels.quantize_groups(x, out, bits=g.bits, group=g.group, scale=g.scale, stochastic=g.stochastic, seed=seed)

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        g = self._grouping(out.numel())
        kernels.dequantize_groups(
            payload, out, bits=g.bits, group=g.group, scale=g.scale, weight=weight, accumulate=accumulate
        )

    @property
    def widens(self) -> bool:
        return True

    @property
    def encodes_several(self) -> bool:
        return self._grouping(1) == self._grouping(2)  # one launch takes tensors of any size

    def encode_all(
        self,
        xs: Sequence[Tensor],
        outs: Sequence[Tensor],
        *,
        seeds: Sequence[int],
        residuals: Sequence[Tensor] = (),
        decay: float = 1.0,
    ) -> bool:
        if not self.encodes_several:
            return super().encode_all(xs, outs, seeds=seeds)
        g = self._grouping(1)
        return kernels.quantize_all(
            xs, outs, bits=g.bits, group=g.group, scale=g.scale, stochastic=g.stochastic, seeds=seeds,
            residuals=residuals, decay=decay,
        )  # fmt: skip

    @property
    def decodes_several(self) -> bool:
        return self.encodes_several

    def _decode_means(
        self,
        payloads: Tensor,
        places: Sequence[slice],
        outs: Sequence[Tensor],
        shapes: Sequence[Shape],
        accumulate: bool,
    ) -> None:
        g = self._grouping(1)
        kernels.dequantize_means(
            payloads, places, outs, bits=g.bits, group=g.group, scale=g.scale, accumulate=accumulate
        )  # fmt: skip


def _check_group(name: str, key: str, group: int) -> None:
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{name}: {key}={group} is not in [1, {MAX_GROUP}]")


@dataclass(frozen=True)
class Uniform(GroupedCodec):
    """Evenly spaced levels between each group's smallest and largest value.

    Args:
        bits: 1–8 per element (symmetric: 2–8).
        group: elements that share a smallest and a largest value; each group costs 8 bytes (symmetric: 4).
        rounding: ``nearest``, or ``stochastic`` (unbiased).
        symmetric: levels around zero, up to the group's largest magnitude; zero is kept exactly.
        scope: ``group``, or ``tensor``: the whole tensor is one group, however large, as in Rudakov et al. (arXiv
            2401.07788). A single outlier then makes the levels coarse for all elements, and one thread does the work.

    Example:
        >>> nb.codec("uniform:bits=8").payload_nbytes((1000, 1000))  # 8 bits each, and 8 bytes per group of 128
        1062504
    """

    name: ClassVar[str] = "uniform"

    bits: int = field(default=8, metadata={"always": True})
    group: int = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"
    symmetric: bool = False
    scope: Literal["group", "tensor"] = "group"

    def __post_init__(self) -> None:
        check_keys(self)
        if self.scope == "tensor" and self.group != Uniform.group:
            raise ValueError(
                f"uniform: group={self.group} cannot be combined with scope=tensor, where the whole tensor is one "
                "group; leave one of them out"
            )
        lowest = 2 if self.symmetric else 1
        if not lowest <= self.bits <= 8:
            raise ValueError(f"uniform: bits={self.bits} is not in [{lowest}, 8] with symmetric={self.symmetric}")
        _check_group("uniform", "group", self.group)

    def variations(self) -> tuple[str, list[float]]:
        return "bits", around(self.bits)

    def _grouping(self, numel: int) -> _Grouping:
        group = numel if self.scope == "tensor" else self.group
        return _Grouping(self.bits, group, "absmax" if self.symmetric else "minmax", self.rounding == "stochastic")


@dataclass(frozen=True)
class QSGD(GroupedCodec):
    """Stochastic levels around zero, scaled by each bucket's norm: unbiased (Alistarh et al., arXiv 1610.02132).

    Section 3.1 of the paper: ``Q(v_i) = ‖v‖ · sgn(v_i) · ξ_i`` with ``s = 2**(bits − 1) − 1`` levels.

    Args:
        bits: 2–8 per element, sign included.
        bucket: elements that share a norm; each bucket costs 4 bytes.
        norm: ``max`` (smaller error) or ``l2`` (the paper's analysis).

    Example:
        >>> nb.codec("qsgd:bits=4").payload_nbytes((1000, 1000))  # 4 bits each, and 4 bytes per bucket of 128
        531252
    """

    name: ClassVar[str] = "qsgd"

    bits: int = field(default=4, metadata={"always": True})
    bucket: int = 128
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        check_keys(self)
        if not 2 <= self.bits <= 8:
            raise ValueError(
                f"qsgd: bits={self.bits} is not in [2, 8]; for one bit per element use eden:bits=1, for 16 use fp16 or "
                "bf16"
            )
        _check_group("qsgd", "bucket", self.bucket)

    def variations(self) -> tuple[str, list[float]]:
        return "bits", around(self.bits)

    def _grouping(self, numel: int) -> _Grouping:
        return _Grouping(self.bits, self.bucket, "absmax" if self.norm == "max" else "l2", stochastic=True)


@dataclass(frozen=True)
class Sign(GroupedCodec):
    """One bit per element, and each bucket's mean magnitude (Karimireddy et al., arXiv 1901.09847). Use with ``+ef``.

    Args:
        bucket: elements that share a mean magnitude; each bucket costs 4 bytes.

    Example:
        >>> nb.codec("sign").roundtrip(torch.tensor([3.0, -1.0]), seed=0)  # the mean magnitude is 2
        tensor([ 2., -2.])
    """

    name: ClassVar[str] = "sign"

    bucket: int = 512

    def __post_init__(self) -> None:
        check_keys(self)
        _check_group("sign", "bucket", self.bucket)

    def _grouping(self, numel: int) -> _Grouping:
        return _Grouping(1, self.bucket, "mean", stochastic=False)
