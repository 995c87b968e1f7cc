"""Mixed error feedback: a gradient chooses one half of what is sent, and its residual the other half."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["encode_mixed_all"]


def encode_mixed_all(
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    decay: float = 1.0,
    parts: bool = False,
    values: Sequence[Tensor] = (),
) -> tuple[bool, list[Tensor]]:
    """Choose the ⌈k/2⌉ largest elements of x and the ⌊k/2⌋ largest of its residual, of several tensors with about as
    many GPU kernel launches as for one. Where the residual is all zeros, x chooses k elements.

    Do what :func:`compensate` does, ``(x, residual) ← (residual, decay · residual + x)``, and write payloads of the
    chosen elements, whether or not all is finite. What is written is subtracted from the residual. The format is that
    of :func:`encode_topk`: if fewer than k elements are chosen, zeros at the last index fill up.

    Args:
        xs: flat float32, not empty.
        residuals: one per tensor.
        ks: how many elements of each are chosen at most, at least one.
        outs: where each payload is written.
        decay: the factor on the residual.
        parts: what is sent of a chosen element: x if x chose it, plus the decayed residual if the residual chose it.
            Otherwise the sum.
        values: if given, k float32 for each tensor: the values are written there, payloads hold indices alone, and
            nothing is subtracted, since the values are to be rounded.

    Returns:
        (whether all sums are finite, or True while :class:`Findings` note that on the device; the k indices that each
        payload holds: int32).
    """
    options = {"decay": decay, "parts": parts, "values": values}
    return cast("tuple[bool, list[Tensor]]", backend_of(xs[0]).encode_mixed_all(xs, residuals, ks, outs, **options))
