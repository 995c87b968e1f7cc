"""Mixed error feedback: half of the elements are chosen by the gradient, half by the residual (Rudakov, Beznosikov,
Kholodov & Gasnikov, arXiv 2401.07788, there EF-mixed).

With input x, residual e and k elements to send::

    A = places of the ⌈k/2⌉ largest of |x|,  B = places of the ⌊k/2⌋ largest of |e|
    p = x + e                        # encode
    send p at A ∪ B: at most k places
    e = p, and 0 where it was sent   # commit

Plain error feedback chooses by |x + e|. Residuals add up over steps, and where they outweigh x, what is new waits
behind what is old; here each has its half. The paper sends activations and their gradients between pipeline stages that
way: feedback of any kind did not improve training there, but made models that work without compression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.codecs import SelectingCodec
from narrowband.codecs.base import dims
from narrowband.errors import UnsupportedError
from narrowband.feedback.ef import ErrorFeedback

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.codecs import Codec, Shape

__all__ = ["MixedFeedback"]


@dataclass(unsafe_hash=True)
class MixedFeedback(ErrorFeedback):
    """As ``ef``, behind ``topk`` only: half of the elements are chosen by the input, half by the residual.

    See arXiv 2401.07788. It keeps the same residual as ``ef``, so a layer can change between the two. Where the
    residual is zero, the input alone chooses. A codec that keeps a single element (of a row) has no half for the
    residual: the element is the input's largest.

    Example:
        >>> handle = nb.compress_gradients(model, "topk:density=0.05+ef-mixed")
    """

    name: ClassVar[str] = "ef-mixed"

    def check(self, codec: Codec) -> None:
        if not isinstance(codec, SelectingCodec):
            raise UnsupportedError(
                f"{self.name} chooses elements by magnitude, as 'topk' does and '{codec}' does not; write "
                f"'{codec}+ef' or 'topk:density=0.01+{self.name}'"
            )

    def _encode(
        self,
        x: Tensor,
        residual: Tensor,
        codec: Codec,
        *,
        shape: Shape,
        seed: int,
        out: Tensor | None,
        subtract: bool,
    ) -> tuple[bool, Tensor]:
        if not codec.exact:  # which leaves nothing to choose
            self.check(codec)
        if not isinstance(codec, SelectingCodec) or not x.numel() or kernels.all_zero(residual):
            return super()._encode(x, residual, codec, shape=shape, seed=seed, out=out, subtract=subtract)
        k = codec.kept(shape) // codec.rows(shape)
        by_input = codec.largest(x, shape, -(-k // 2), seed=seed)
        by_residual = codec.largest(residual, shape, k // 2, seed=seed)
        at = torch.unique(torch.cat([by_input, by_residual]))  # sorted
        payload = codec.pack(at, residual[at] * self.decay + x[at], shape=shape, out=out)
        finite = kernels.compensate(x, residual, decay=self.decay)
        if finite and subtract:
            codec.decode(payload, residual.view(dims(shape)), seed=seed, weight=-1.0, accumulate=True)
        return finite, payload
