"""Mixed error feedback: the input chooses half of the elements to send, the residual the other half.

The method is EF-mixed of Rudakov, Beznosikov, Kholodov & Gasnikov, arXiv 2401.07788.

With input x, residual e and k elements to send::

    A = places of the ⌈k/2⌉ largest of |x|,  B = places of the ⌊k/2⌋ largest of |e|
    sends=sum:    s = x + e at A ∪ B, and 0 elsewhere         # encode
    sends=parts:  s = x at A, plus e at B
    e = x + e − s                                             # commit

Both settings send at most k elements. Plain error feedback chooses by |x + e|. Residuals add up over steps, and where
they outweigh x, new values wait behind old ones. With EF-mixed, each gets its half.

The paper says: "compress the K/2 % largest of the input and K/2 % of the error buffer; then input vector and buffer are
added up and sent, which gives no more than K % of non-zero values". Taken literally, this is C(x) + C(e) with a C that
keeps k/2: ``sends=parts``. ``sends=sum`` sends the same places and as many bytes, and leaves no residual there, while
``parts`` keeps e at the places that x alone chose, and x at those that e alone chose. The authors' public code has no
EF-mixed that would settle the question. Both settings differ from C(x) + C(e) in two details. If k is odd, the
input gets the larger half. If the residual is all zeros, as in a first step, the input chooses all k elements.

The paper sends activations and their gradients between pipeline stages this way. There, no kind of feedback improved
training, but EF and EF21 produced models that also work without compression.

On a GPU, a few launches do so for all tensors of a bucket (:func:`narrowband.kernels.encode_mixed_all`), and the host
waits for nothing, where gradients are float32 and :attr:`TopK.encodes_several` holds. Gradients in 16 bits, and those
of ``topk`` with ``select=sampled``, ``scope=sample`` or other indices than ``elias-fano``, are encoded one by one. The
host then waits for each tensor: once to learn whether its residual is all zeros, once for the number of elements that
both choose, and with a sample some more times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs import SelectingCodec, TopK
from narrowband.codecs.base import dims
from narrowband.errors import UnsupportedError
from narrowband.feedback.ef import ErrorFeedback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narrowband.codecs import Codec, Shape

__all__ = ["MixedFeedback"]


@dataclass(unsafe_hash=True)
class MixedFeedback(ErrorFeedback):
    """As ``ef``, behind ``topk`` only: half of the elements are chosen by the input, half by the residual.

    See arXiv 2401.07788. It keeps the same residual as ``ef``, so a layer can change between the two. Where the
    residual is zero, the input alone chooses. Where a codec keeps a single element (of a row), that element is the
    input's largest.

    Args:
        decay: the factor on the residual in each step that it waits, as for ``ef``.
        store: how the residual is stored between steps, as for ``ef``.
        sends: the value sent for a chosen element. ``sum``: input plus residual. ``parts``: the input if the input
            chose the element, plus the residual if the residual chose it, which is the paper's C(x) + C(e).

    Example:
        >>> handle = nb.compress_gradients(model, "topk:density=0.05+ef-mixed")
    """

    name: ClassVar[str] = "ef-mixed"
    chooses_by_residual: ClassVar[bool] = True

    sends: Literal["sum", "parts"] = "sum"

    def check(self, codec: Codec) -> None:
        if not isinstance(codec, SelectingCodec):
            raise UnsupportedError(
                f"{self.name} chooses elements by magnitude, as 'topk' does and '{codec}' does not; write "
                f"'{codec}+ef' or 'topk:density=0.01+{self.name}'"
            )
        if not codec.takes_any:
            raise UnsupportedError(
                f"{self.name} may choose the same elements twice, and '{codec}' cannot send fewer elements than it "
                f"keeps; leave out tile, use values=int8 or more bits, or write '{codec}+ef'"
            )

    def _keeps_in_one_pass(self, codec: Codec, shape: Shape) -> bool:
        del codec, shape  # elements are not chosen by the sums
        return False

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
        if self.sends == "sum":
            values = residual[at] * self.decay + x[at]
        else:
            values = torch.zeros(at.numel(), dtype=torch.float32, device=x.device)
            for chosen, of in ((by_input, x[by_input]), (by_residual, residual[by_residual] * self.decay)):
                values.index_add_(0, torch.searchsorted(at, chosen), of)
        payload = codec.pack(at, values, shape=shape, out=out)
        finite = kernels.compensate(x, residual, decay=self.decay) and codec.is_finite(payload, shape)
        if finite and subtract:
            codec.decode(payload, residual.view(dims(shape)), seed=seed, weight=-1.0, accumulate=True)
        return finite, payload

    def encodes_all(self, codec: Codec) -> bool:
        return isinstance(codec, TopK) and codec.encodes_several and self.goes_ahead

    def _encode_each(
        self,
        xs: Sequence[Tensor],
        residuals: Sequence[Tensor],
        codec: Codec,
        *,
        seeds: Sequence[int],
        outs: Sequence[Tensor],
    ) -> bool:
        del seeds  # nothing is sampled
        assert isinstance(codec, TopK)
        ks, heads, values = [codec.kept(x.numel()) for x in xs], list[Tensor](), list[Tensor]()
        if codec.values != "fp32":
            heads, outs = codec.cut_all(outs, ks)
            values = [torch.empty(k, dtype=torch.float32, device=xs[0].device) for k in ks]
        parts = self.sends == "parts"
        finite, indices = kernels.encode_mixed_all(
            xs, residuals, ks, outs, decay=self.decay, parts=parts, values=values
        )
        if values:
            fits, arriving = codec.write_all(values, heads)
            finite &= fits
            kernels.sparse_accumulate_all(residuals, indices, arriving, -1.0)
        return finite
