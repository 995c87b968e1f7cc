"""A codec applied to each of N chunks of a tensor, so that every rank can average one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from narrowband.codecs import Codec, Shape
from narrowband.codecs.base import numel_of
from narrowband.collectives.primitives import spans_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Chunked"]


@dataclass(frozen=True)
class Chunked(Codec):
    """The chunks' payloads end to end.

    Args:
        codec: what each chunk is encoded with.
        chunks: one per rank.
        turn: by how many ranks the chunks' owners are shifted.
    """

    codec: Codec
    chunks: int
    turn: int = 0

    name = "chunked"

    def cut(self, numel: int) -> list[slice]:
        """Where the chunk of each rank lies; some may be empty.

        Chunks begin at multiples of the codec's granularity and differ by one grain at most. Which ranks have the
        longer ones turns from tensor to tensor: the second phase is as long as the longest sum of a rank's chunks.
        """
        grain = self.codec.granularity
        grains = -(-numel // grain)
        at = [min(j * grains // self.chunks * grain, numel) for j in range(self.chunks + 1)]
        return [slice(at[j], at[j + 1]) for j in ((r + self.turn) % self.chunks for r in range(self.chunks))]

    def sizes(self, numel: int) -> list[int]:
        """Payload bytes of each chunk. Chunks are encoded as float32 whatever the gradient: their mean is float32."""
        return [self.codec.payload_nbytes(cut.stop - cut.start) for cut in self.cut(numel)]

    def all_sizes(self, numel: int) -> Tensor:
        """The same as one tensor, fast also among 10,000 ranks."""
        grain = self.codec.granularity
        at = torch.arange(self.chunks + 1, dtype=torch.int64, device="cpu") * -(-numel // grain) // self.chunks * grain
        lengths: list[int] = at.clamp_(max=numel).diff().tolist()
        sizes = {length: self.codec.payload_nbytes(length) for length in set(lengths)}
        of_all = torch.tensor([sizes[length] for length in lengths], dtype=torch.int64, device="cpu")
        return of_all.roll(-self.turn)

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return sum(self.sizes(numel_of(shape)))

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        numel = numel_of(shape)
        pieces = zip(self.cut(numel), spans_of(self.sizes(numel)), strict=True)
        return all(self.codec.is_finite(payload[span], cut.stop - cut.start) for cut, span in pieces)

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        for j, (cut, span) in enumerate(zip(self.cut(x.numel()), spans_of(self.sizes(x.numel())), strict=True)):
            self.codec.encode(x[cut], seed=seed + j, out=out[span])

    def _decode(
        self,
        payload: Tensor,
        out: Tensor,
        shape: Shape,
        dtype: torch.dtype,
        seed: int,
        weight: float,
        accumulate: bool,
    ) -> None:
        for j, (cut, span) in enumerate(zip(self.cut(out.numel()), spans_of(self.sizes(out.numel())), strict=True)):
            self.codec.decode(payload[span], out[cut], seed=seed + j, weight=weight, accumulate=accumulate)
