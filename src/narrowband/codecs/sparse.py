"""Codecs that send a given share of a tensor's elements: top-k and random-k.

A payload of top-k holds the kept values, then their indices: see :mod:`~narrowband.codecs.values` and
:mod:`~narrowband.codecs.indices`.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs.base import Codec, Shape, aligned, dims, is_plain, numel_of
from narrowband.codecs.indices import (
    check_numel,
    entries,
    index_nbytes,
    listed,
    read_indices,
    without_stops,
    write_indices,
)
from narrowband.codecs.selecting import SelectingCodec
from narrowband.codecs.spec import check_keys
from narrowband.codecs.tiles import regions, select_in_tiles, tile_of
from narrowband.codecs.values import (
    SEVERAL,
    WITHOUT_ZERO,
    arriving_values,
    read_all_values,
    read_values,
    round_all_values,
    values_are_finite,
    values_nbytes,
    write_all_values,
    write_values,
)
from narrowband.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RandomK", "TopK", "scatter"]


def kept(density: float, numel: int) -> int:
    """Return how many of ``numel`` elements a density keeps: ``density * numel`` rounded, and at least one."""
    return min(numel, max(1, int(density * numel + 0.5)))


def density_of(k: int, numel: int) -> float:
    """Return the density with the fewest digits that keeps ``k`` of ``numel`` elements, which spec strings then show.

    Example:
        >>> density_of(12, 1024), 12 / 1024
        (0.012, 0.01171875)
    """
    share = k / numel
    shorter = (float(f"{share:.{digits}g}") for digits in range(1, 17))
    return next((density for density in shorter if kept(density, numel) == k), share)


def _check_density(name: str, density: float) -> None:
    if not 0.0 < density <= 1.0:
        raise ValueError(f"{name}: density={density} is not in (0, 1]; 0.01 keeps one element in a hundred")


def scatter(out: Tensor, at: Tensor, values: Tensor, weight: float, accumulate: bool) -> None:
    """Decode a few elements into ``out``, see :meth:`~narrowband.codecs.Codec.decode`."""
    if not accumulate:
        out.zero_()
    kernels.sparse_accumulate(out, at, values, weight)


def _mean_of_senders(out: Tensor, received: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write into ``out`` each element's sum over the ranks, divided by the number of nonzero values sent for it."""
    kernels.sparse_sum(out, received, 1.0)
    senders = torch.zeros_like(out)
    for at, values in received:
        kernels.sparse_accumulate(senders, at, (values != 0.0).float(), 1.0)
    out.div_(senders.clamp_(min=1.0))


@dataclass(frozen=True)
class TopK(SelectingCodec):
    """The elements of largest magnitude (Aji & Heafield, arXiv 1704.05021). Use with ``+ef``.

    Args:
        density: the share of elements that is kept.
        select: ``exact``, or ``sampled``: by a threshold from a sample (DGC, arXiv 1712.01887, section 3), which
            may keep slightly fewer than k elements, but never needs a second pass over the tensor.
        scope: ``tensor``, or ``sample``: the k largest of each slice along the first dimension, so that every sample
            sends something.
        values: ``fp32``, ``fp16`` (clamped to ±65,504), ``int8`` (in steps of 1/127 of the largest of 256), or ``int4``
            and ``int2``: a sign, and one of 8 or 2 magnitudes that each group of 256 values has of its own.
        indices: ``elias-fano``, plain ``int32``, or ``runs``: the number of zeros before each value, in 16 bits.
        tile: such as ``64x64``: select the largest of each tile of so many rows and columns, so that every part of a
            matrix sends something (SparseLoCo, arXiv 2508.15706). A vector is cut into pieces as long as a tile is
            large.
        mean: divide each element's sum by the number of all ``ranks``, or of its ``senders``: the ranks that kept it.
            If hardly any two of N ranks keep the same elements, the mean over all ranks is only 1/N of what each sent;
            if all ranks keep the same elements, the plain sum is N times too large. The mean over senders is neither.

    Example:
        >>> nb.codec("topk:density=0.5").roundtrip(torch.tensor([3.0, -1.0, 0.5, -4.0]), seed=0)
        tensor([ 3.,  0.,  0., -4.])
    """

    name: ClassVar[str] = "topk"

    density: float = field(default=0.01, metadata={"always": True})
    select: Literal["exact", "sampled"] = "exact"
    scope: Literal["tensor", "sample"] = "tensor"
    values: Literal["fp32", "fp16", "int8", "int4", "int2"] = "fp32"
    indices: Literal["elias-fano", "int32", "runs"] = "elias-fano"
    tile: str = "none"
    mean: Literal["ranks", "senders"] = "ranks"

    def __post_init__(self) -> None:
        check_keys(self)
        _check_density("topk", self.density)
        if self.tile != "none":
            tile_of(self.tile)
            if self.scope != "tensor" or self.sampled:
                raise ValueError(
                    f"topk: tile={self.tile} selects exactly, in each tile, and cannot be combined with scope or "
                    "select; leave them out"
                )
        if self.values in WITHOUT_ZERO and (self.sampled or self.indices == "runs"):
            raise ValueError(
                f"topk: values={self.values} cannot represent zero, which select=sampled and indices=runs may have to "
                "send; leave these two out, or use values=int8"
            )

    @property
    def takes_any(self) -> bool:
        return self.tile == "none" and self.values not in WITHOUT_ZERO

    def rows(self, shape: Shape) -> int:
        if self.scope == "tensor" or isinstance(shape, int) or len(shape) < 2:
            return 1
        return shape[0]

    def kept(self, shape: Shape) -> int:
        if self.tile != "none":
            parts = regions(dims(shape), tile_of(self.tile))[1]
            return sum(part.tiles * kept(self.density, part.numel) for part in parts)
        rows = self.rows(shape)
        return rows * kept(self.density, numel_of(shape) // rows) if rows else 0

    def kept_largest(self, shape: Shape) -> int | None:
        whole = self.scope == "tensor" and self.tile == "none"
        return self.kept(shape) if whole and self.values == "fp32" else None

    @property
    def keeps_elements(self) -> bool:
        return self.kept_largest((4, 4)) is not None and self.mean == "ranks"

    @property
    def means_add_up(self) -> bool:
        return self.mean == "ranks"

    def variations(self) -> tuple[str, list[float]]:
        # Rounded, because specs show it: 0.01 · 7 / 10 is 0.007000000000000001 in floats.
        shares = [float(f"{self.density * tenths / 10:.12g}") for tenths in range(1, 101)]
        shares[9] = self.density
        return "density", shares

    def values_nbytes(self, k: int) -> int:
        return values_nbytes(k, self.values)

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        k, n = self.kept(shape), check_numel(numel_of(shape))
        return values_nbytes(entries(k, n, self.indices), self.values) + aligned(index_nbytes(k, n, self.indices))

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        at = self.largest(x, shape, self.kept(shape) // self.rows(shape), seed=seed)
        self._write(at, x.index_select(0, at), shape, out)

    def largest(self, x: Tensor, shape: Shape, k: int, *, seed: int = 0) -> Tensor:
        if self.tile != "none":
            share = self.density * k / max(1, self.kept(shape))
            return select_in_tiles(x, dims(shape), tile_of(self.tile), lambda numel: kept(share, numel))
        rows, sampled = self.rows(shape), self.sampled
        width = x.numel() // rows
        if rows > 1 and not sampled:
            return kernels.select_topk_rows(x.view(rows, width), k)
        parts = [
            kernels.select_topk(x[r * width : (r + 1) * width], k, sampled=sampled, seed=seed + r).add_(r * width)
            for r in range(rows)
        ]
        return torch.cat(parts) if rows > 1 else parts[0]

    @property
    def sampled(self) -> bool:
        return self.select == "sampled"

    def rounded(self, values: Tensor) -> Tensor:
        return values if self.values == "fp32" else super().rounded(values)

    def pack(self, indices: Tensor, values: Tensor, *, shape: Shape, out: Tensor | None = None) -> Tensor:
        out, target = self._target(out, shape, values.dtype, values.device)
        if target.numel():
            self._write(indices, values, shape, target)
            if target is not out:
                out.copy_(target)
        return out

    def places(self, payload: Tensor, shape: Shape) -> Tensor:
        return self.elements(payload, shape)[0]

    def elements(self, payload: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        k, n = self.kept(shape), numel_of(shape)
        at, values = self._read(self._checked(payload, shape, torch.float32), shape, n)
        if self.indices != "runs":
            return at, values
        at, values = without_stops(at, values, k, fewer=self.sampled)
        if at.numel() > k:
            raise PayloadError(f"damaged payload: it names {at.numel()} elements, but {self} keeps {k}")
        return listed(at, values, k, n, "elias-fano")

    def elements_all(self, payloads: Sequence[Tensor], shapes: Sequence[Shape]) -> list[tuple[Tensor, Tensor]]:
        if self.values != "fp32" or self.indices != "elias-fano":
            return super().elements_all(payloads, shapes)
        for payload, shape in zip(payloads, shapes, strict=True):
            self._check_length(payload, shape, torch.float32)
        ks, ends = [self.kept(shape) for shape in shapes], [*itertools.accumulate(own.numel() for own in payloads)]
        together, begins = torch.cat(list(payloads)), [0, *ends[:-1]]
        tails = [begin + 4 * k for begin, k in zip(begins, ks, strict=True)]
        indices = kernels.elias_fano_decode_all(together[None], tails, ks, [numel_of(shape) for shape in shapes])
        heads = zip(begins, tails, strict=True)
        values = [together[begin:tail].view(torch.float32) for begin, tail in heads]
        return [(at[0], own) for at, own in zip(indices, values, strict=True)]

    def added(self, payload: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
        if self.indices == "runs":  # of damaged runs, those too many are seen by elements() alone
            return None
        return self._read(self._checked(payload, shape, torch.float32), shape, numel_of(shape))

    def encode_at(self, x: Tensor, places: Tensor) -> Tensor:
        values = x.detach().reshape(-1).index_select(0, places).float()
        if places.numel() > 1:  # sampled selection repeats the last place, whose value is sent once
            values[1:].masked_fill_(places[1:] == places[:-1], 0.0)
        out = torch.empty(values_nbytes(places.numel(), self.values), dtype=torch.uint8, device=x.device)
        write_values(values, self.values, out)
        return out

    def decode_at(self, payload: Tensor, places: Tensor, out: Tensor) -> Tensor:
        expected = values_nbytes(places.numel(), self.values)
        if payload.dtype != torch.uint8 or tuple(payload.shape) != (expected,):
            raise PayloadError(
                f"expected a uint8 payload of shape ({expected},) for {places.numel()} values of {self}, got "
                f"{payload.dtype} of shape {tuple(payload.shape)}"
            )
        direct = is_plain(out)
        flat = out.detach().view(-1) if direct else torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        scatter(flat, places, read_values(payload, places.numel(), self.values), 1.0, accumulate=False)
        if not direct:
            out.detach().copy_(flat.view(out.shape))
        return out

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
        if self.tile != "none" or self.rows(shape) != 1 or not x.numel():
            return super().encode_compensated(
                x, residual, shape=shape, seed=seed, out=out, decay=decay, subtract=subtract
            )
        out, target = self._target(out, shape, x.dtype, x.device)
        k, sampled = self.kept(shape), self.sampled
        if self.values == "fp32" and self.indices == "elias-fano":
            finite = kernels.encode_topk(
                x, residual, k, target, decay=decay, sampled=sampled, seed=seed, subtract=subtract
            )
            if target is not out:
                out.copy_(target)
            return finite, out
        finite, at, values = kernels.compensate_select_topk(x, residual, k, decay=decay, sampled=sampled, seed=seed)
        if finite:
            self._write(at, values, shape, target)
            if target is not out:
                out.copy_(target)
            finite = self.values != "int8" or self._is_finite(target, shape)
            if finite and subtract:
                kernels.sparse_accumulate(residual, *self._read(target, shape, x.numel()), -1.0)
        return finite, out

    @property
    def encodes_several(self) -> bool:
        whole = self.scope == "tensor" and self.tile == "none" and not self.sampled
        return whole and self.values in SEVERAL and self.indices == "elias-fano"

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
        ks = [self.kept(x.numel()) for x in xs]
        if self.values == "fp32":
            return kernels.encode_topk_all(xs, ks, outs, residuals=residuals, decay=decay)
        heads, tails = self.cut_all(outs, ks)
        finite, at, values = kernels.compensate_select_topk_all(xs, ks, tails, residuals=residuals, decay=decay)
        if not residuals:
            return write_all_values(values, self.values, heads) and finite
        fits, left = round_all_values(values, self.values, heads)
        kernels.sparse_accumulate_all(residuals, at, left)
        return finite and fits

    def cut_all(self, payloads: Sequence[Tensor], ks: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of several payloads that hold k values each, and the parts that hold their indices."""
        cuts = [values_nbytes(k, self.values) for k in ks]
        pairs = [*zip(payloads, cuts, strict=True)]
        return [own[:cut] for own, cut in pairs], [own[cut:] for own, cut in pairs]

    def round_all(self, values: Sequence[Tensor], heads: Sequence[Tensor]) -> tuple[bool, list[Tensor]]:
        """Write values of several payloads, rounded, into their parts for values; for ``fp16`` and ``int8``.

        Args:
            values: flat float32; they may be overwritten.
            heads: see :meth:`cut_all`.

        Returns:
            (whether the values that arrive are finite, or True while :class:`~narrowband.kernels.Findings` note that on
            the device; what rounding has taken from each value).
        """
        return round_all_values(values, self.values, heads)

    def write_all(self, values: Sequence[Tensor], heads: Sequence[Tensor]) -> tuple[bool, list[Tensor]]:
        """Do as :meth:`round_all`, but return the values as they arrive instead of what rounding has taken."""
        return arriving_values(values, self.values, heads)

    def _write(self, at: Tensor, values: Tensor, shape: Shape, out: Tensor) -> None:
        """Write the payload of these elements into ``out``."""
        (k, _, cut), n = _layout(self, dims(shape)), numel_of(shape)
        at, values = listed(at, values, k, n, self.indices)
        write_indices(at, n, self.indices, out[cut:])
        write_values(values, self.values, out[:cut])

    def _read(self, payload: Tensor, shape: Shape, n: int) -> tuple[Tensor, Tensor]:
        """Return the indices and the values that a payload holds."""
        k, number, cut = _layout(self, dims(shape))
        at = read_indices(payload[cut:], k, n, self.indices)
        values = read_values(payload[:cut], number, self.values)
        return at, values[: at.numel()] if self.indices == "runs" else values

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        _, number, cut = _layout(self, dims(shape))
        return values_are_finite(payload[:cut], number, self.values)

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        scatter(out, *self._read(payload, shape, out.numel()), weight, accumulate)

    def _decode_mean(
        self, payloads: Sequence[Tensor] | Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seeds: Sequence[int]
    ) -> None:
        weight = 1.0 / len(seeds)
        if self.mean == "senders":
            _mean_of_senders(out, [self._read(p, shape, out.numel()) for p in payloads])
        elif isinstance(payloads, Tensor) and self.values == "fp32" and self.indices == "elias-fano":
            kernels.sparse_sum_rows(out, payloads, self.kept(shape), weight)
        else:
            kernels.sparse_sum(out, [self._read(p, shape, out.numel()) for p in payloads], weight)

    @property
    def decodes_several(self) -> bool:
        return self.values in SEVERAL and self.indices == "elias-fano" and self.mean == "ranks"

    def _decode_means(
        self,
        payloads: Tensor,
        places: Sequence[slice],
        outs: Sequence[Tensor],
        shapes: Sequence[Shape],
        accumulate: bool,
    ) -> None:
        begins, ks, values = [place.start for place in places], [self.kept(shape) for shape in shapes], list[Tensor]()
        if self.values != "fp32":
            values = read_all_values(payloads, self.values, begins, ks)
            begins = [begin + values_nbytes(k, self.values) for begin, k in zip(begins, ks, strict=True)]
        weight = 1.0 / payloads.shape[0]
        kernels.sparse_sum_all(outs, payloads, begins, ks, weight, values=values, accumulate=accumulate)


@functools.lru_cache(maxsize=1 << 14)
def _layout(codec: TopK, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return how many elements a payload keeps, how many values it has room for, and how many bytes these take."""
    k = codec.kept(shape)
    number = entries(k, numel_of(shape), codec.indices)
    return k, number, values_nbytes(number, codec.values)


@dataclass(frozen=True)
class RandomK(Codec):
    """Elements at random places that both sides derive from the seed, so that only values travel. Use with ``+ef``.

    The tensor is cut into k equal stretches, and one element of each is sent (after Stich et al., arXiv 1809.07599).
    All ranks pick the same places, so an all-reduce can add their payloads. Values are not scaled up to make up for the
    elements that are left out.

    Args:
        density: the share of elements that is kept.

    Example:
        >>> int((nb.codec("randomk:density=0.25").roundtrip(torch.ones(8), seed=0) != 0).sum())
        2
    """

    name: ClassVar[str] = "randomk"
    shared_seed: ClassVar[bool] = True

    density: float = field(default=0.01, metadata={"always": True})

    def __post_init__(self) -> None:
        check_keys(self)
        _check_density("randomk", self.density)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return 4 * kept(self.density, check_numel(numel_of(shape)))

    def _places(self, n: int, seed: int, device: torch.device) -> Tensor:
        return kernels.randomk_indices(n, kept(self.density, n), seed, device)

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        torch.index_select(x, 0, self._places(x.numel(), seed, x.device), out=out.view(torch.float32))

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        return kernels.all_finite(payload.view(torch.float32))

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        at = self._places(out.numel(), seed, out.device)
        scatter(out, at, payload.view(torch.float32), weight, accumulate)
