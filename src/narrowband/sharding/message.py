"""The messages that are made of the flat tensors that FSDP2 sends: payloads of matrices, and everything else as it is.

On a GPU, starting a loop takes longer than it runs on one matrix. So all matrices of a message are encoded at once
there, and decoded at once into memory of their own, where the codec can. Both ways give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.codecs import Codec, aligned
from narrowband.collectives.exchange import runs_behind
from narrowband.kernels import Findings

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.sharding.layout import Layout

__all__ = ["Message"]


class Message:
    """The message that carries a rank's part of a flat tensor.

    Args:
        layout: layout of the part.
        codec: codec of the shards that are compressed.
        dtype: dtype of the flat tensor.
    """

    def __init__(self, layout: Layout, codec: Codec, dtype: torch.dtype) -> None:
        self._codec, self._dtype = codec, dtype
        self._payloads: list[tuple[int, slice, slice]] = []  # number of the shard, elements, bytes
        self._others: list[tuple[slice, slice]] = []  # elements, bytes
        at = 0
        for number, (span, compressed) in enumerate(layout.spans()):
            count = span.stop - span.start
            nbytes = codec.payload_nbytes(count, torch.float32) if compressed else count * dtype.itemsize
            place = slice(at, at + nbytes)
            if compressed:
                self._payloads.append((number, span, place))
            else:
                self._others.append((span, place))
            at = aligned(at + nbytes)
        self.nbytes = at

    def write(self, part: Tensor, out: Tensor, *, minus: Tensor | None = None, seed: int = 0) -> None:
        """Encode ``part`` into ``out``.

        Args:
            part: flat tensor of the layout.
            out: flat uint8, :attr:`nbytes` long.
            minus: subtracted from the elements that are compressed, before they are encoded.
            seed: seed of stochastic rounding.
        """
        if self._payloads and self._codec.encodes_several and runs_behind(part):
            xs = [part[span].float() for _, span, _ in self._payloads]
            if minus is not None:
                xs = list(torch._foreach_sub(xs, [minus[span].float() for _, span, _ in self._payloads]))
            outs, seeds = [out[place] for *_, place in self._payloads], [seed + at for at, *_ in self._payloads]
            with Findings(part.device).noting(Findings.OWN):  # nobody asks: what is not finite decodes to NaN
                self._codec.encode_all(xs, outs, seeds=seeds)
        else:
            for at, span, place in self._payloads:
                x = part[span] if minus is None else part[span].float() - minus[span].float()
                self._codec.encode(x.float(), seed=seed + at, out=out[place])
        if self._others:
            places = [out[place] for _, place in self._others]
            torch._foreach_copy_(places, [part[span].view(torch.uint8) for span, _ in self._others])

    def add_to(self, total: Tensor, message: Tensor, weight: float) -> None:
        """``total ← total + weight · decoded message``; ``total`` is flat float32."""
        decoded = self._decoded(message)
        if decoded:
            torch._foreach_mul_(decoded, weight)
            torch._foreach_add_([total[span] for _, span, _ in self._payloads], decoded)
        else:
            for _, span, place in self._payloads:
                self._codec.decode(message[place], total[span], weight=weight, accumulate=True)
        for span, place in self._others:
            total[span].add_(message[place].view(self._dtype), alpha=weight)

    def update(self, reference: Tensor, message: Tensor) -> None:
        """Update a receiver's reference of a rank's part, flat: add decoded differences, overwrite everything else."""
        decoded = self._decoded(message)
        if decoded:
            parts = [reference[span] for _, span, _ in self._payloads]
            torch._foreach_add_(decoded, [part.float() for part in parts])
            torch._foreach_copy_(parts, decoded)
        else:
            for _, span, place in self._payloads:
                self._codec.decode(message[place], reference[span], accumulate=True)
        self._copy_others(reference, message)

    def read(self, part: Tensor, message: Tensor) -> None:
        """Decode a message into ``part``, which is flat and of the flat tensor's dtype."""
        decoded = self._decoded(message)
        if decoded:
            torch._foreach_copy_([part[span] for _, span, _ in self._payloads], decoded)
        else:
            for _, span, place in self._payloads:
                self._codec.decode(message[place], part[span])
        self._copy_others(part, message)

    def _decoded(self, message: Tensor) -> list[Tensor]:
        """Return what all payloads decode to, each flat float32; nothing where they are better decoded one by one."""
        if not (self._payloads and self._codec.decodes_several and runs_behind(message)):
            return []
        lengths = [span.stop - span.start for _, span, _ in self._payloads]
        outs = torch.split(torch.empty(sum(lengths), dtype=torch.float32, device=message.device), lengths)
        places, seeds = [place for *_, place in self._payloads], [[0]] * len(lengths)
        self._codec.decode_means(message[None], places, outs, shapes=lengths, seeds=seeds)
        return list(outs)

    def _copy_others(self, part: Tensor, message: Tensor) -> None:
        if self._others:
            what = [message[place].view(self._dtype) for _, place in self._others]
            torch._foreach_copy_([part[span] for span, _ in self._others], what)
