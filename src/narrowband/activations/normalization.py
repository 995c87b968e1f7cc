"""Normalization: its input and its result are both computed from the normalized form, which is kept.

:class:`Normalization` does so for PyTorch's layer and RMS norm, and :func:`before_normalization` for an RMS norm that a
model writes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowband.activations.layout import Arrangement
from narrowband.activations.packed import Payload, Source, ahead
from narrowband.activations.recompute import (
    Derivation,
    Function,
    Origin,
    Recipe,
    Recipes,
    Sizes,
    computed,
    copy_of,
    formed,
    is_normalized,
    made_by,
    nbytes_of,
)
from narrowband.kernels import Affine, Standard

__all__ = ["Normalization", "before_normalization", "scaled"]


class Normalization:
    """A call of layer normalization, x → (x − mean) · rstd · weight + bias, or of RMS normalization, without mean and
    bias.

    All rows share a range, so in a row of small numbers the error of codes is large relative to the row, and
    normalization scales it up with the row. So the input is kept in its normalized form n = (x − mean) · rstd. Both the
    input and the result are computed from n, with the statistics that the operator's node keeps anyway. Where PyTorch
    composes RMS normalization of simpler operators, these save n, too, and the input in float32.

    Args:
        x: the input.
        shape: the sizes of the dimensions that are normalized.
        weight: the weight, or None.
        bias: the bias, or None.
        eps: the number added to the variance, or to the mean square; None: PyTorch's default.
        centred: whether the mean is subtracted.
    """

    def __init__(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float | None, *,
        centred: bool = True,
    ) -> None:  # fmt: skip
        self._input = x.data_ptr(), x.shape, x.dtype  # not x itself: recipes refer to self and would keep it alive
        self._shape, self._weight, self._bias, self._eps = tuple(shape), weight, bias, eps
        self._centred = centred
        #: Mean, where there is one, and rstd.
        self._statistics: tuple[Tensor | None, Tensor] | None = None
        #: The origin of n, if n was kept in this call.
        self.origin: Origin | None = None
        #: Makes the codes of n from the input once the operator has computed its statistics; None if not needed.
        self.owed: Callable[[Standard], None] | None = None

    def takes(self, x: Tensor) -> bool:
        """Whether a saved tensor is the input, and not a parameter or statistic."""
        where, shape, dtype = self._input
        if x.shape != shape:
            return False
        return (x.data_ptr(), x.dtype) == (where, dtype) or (
            not self._centred and x.dtype is not dtype and made_by(x, "ToCopyBackward0")
        )

    def made(self, x: Tensor) -> bool:
        """Whether a saved tensor is n, of which codes have been made."""
        composed = not self._centred and self.origin is not None
        return composed and x.shape == self._input[1] and x.dtype is torch.float32 and is_normalized(x)

    def normalized(self, x: Tensor) -> Tensor | None:
        """Return n, contiguous; None where the input cannot be computed from n.

        On a GPU this is not checked, since it would wait for the device: such an input is then restored as NaN.
        """
        mean: Tensor | None
        if self._centred:
            assert self._eps is not None
            n, mean, rstd = torch.native_layer_norm(x, self._shape, None, None, self._eps)
            whole = torch.isfinite(mean) & torch.isfinite(1 / rstd)
        else:
            (n, rstd), mean = torch._fused_rms_norm(x.contiguous(), self._shape, None, self._eps), None
            whole = torch.isfinite(1 / rstd)
        self._statistics = mean, rstd
        if ahead(x):
            return n
        return n if bool(whole.all()) else None

    def input(self, x: Tensor) -> Function:
        """Return the function that computes the input from n."""
        given, shape, length = Arrangement.of(x), x.shape, math.prod(self._shape)

        def function(source: Source, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
            assert self._statistics is not None
            mean, rstd = self._statistics
            if given.is_usual:
                return _affine(source, sizes, dtype, Affine(rstd.reciprocal(), mean, length, by_row=True))
            x = _affine(source, shape, None, Affine(rstd.reciprocal(), mean, length, by_row=True))
            return formed(given.flat(x), sizes, dtype)

        return function

    def derive(self, recipes: Recipes, x: Tensor, y: Tensor) -> bool:
        """Note how to compute the result from n, with copies of the parameters. Return False where it cannot be."""
        if self.origin is None:
            return False
        self._statistics = self._shared(y.grad_fn) or self._statistics
        if self.owed is not None:
            if self._statistics is None:
                with torch.no_grad():
                    self.normalized(x)
            assert self._statistics is not None
            mean, rstd = self._statistics
            deviation = _float32(rstd)
            mean = torch.zeros_like(deviation) if mean is None else _float32(mean)
            self.owed(Standard(mean, deviation, math.prod(self._shape)))
            self.owed = None
        own = y.dtype
        if not y.is_contiguous() or own != self._input[-1]:
            return False
        weight, bias = copy_of(self._weight), copy_of(self._bias)
        self._weight = self._bias = None
        affine = Affine(weight, bias, math.prod(self._shape))
        recipes.derive(
            y,
            Recipe(
                lambda source, sizes, dtype: _affine(source, sizes, dtype or own, affine),
                self.origin,
                nbytes_of(weight, bias),
            ),
        )
        return True

    def _shared(self, node: Any) -> tuple[Tensor | None, Tensor] | None:
        """Return the statistics that the operator's node keeps, instead of copies of them."""
        name = "" if node is None else node.name()
        if name == "NativeLayerNormBackward0":
            return node._saved_result1, node._saved_result2
        if name == "FusedRmsNormBackward0":
            return None, node._saved_result1
        if self._centred or self._statistics is None:
            return None
        for _ in range(3):  # a cast, the product with the weight, that with rstd
            if name == "MulBackward0" and node._saved_other.shape == self._statistics[1].shape:
                return None, node._saved_other.detach()  # a tensor with a graph would keep itself alive
            node = node.next_functions[0][0] if name in ("MulBackward0", "ToCopyBackward0") else None
            name = "" if node is None else node.name()
        return None


def before_normalization(n: Payload, rstd: Tensor, own: torch.dtype) -> Derivation:
    """Return the source of x, in its own dtype, for n = x · rstd with one factor per row.

    The operator that saves ``rstd`` keeps it.
    """
    rstd, length = rstd.detach(), n.numel // rstd.numel()

    def function(source: Source, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
        return _affine(source, sizes, dtype or own, Affine(rstd.reciprocal(), None, length, by_row=True))

    return Derivation(function, n, 0, n.bits)


def scaled(x: Tensor, rstd: Tensor) -> Function:
    """Return the function that computes x · rstd, with one factor per row, from a source of x.

    ``x`` lies in memory in the order of its dimensions. The operator that saves ``rstd`` keeps it.
    """
    shape, rstd = x.shape, rstd.detach()
    return computed(lambda flat: (flat.view(shape) * rstd).view(-1))


def _affine(n: Source, sizes: Sizes, dtype: torch.dtype | None, affine: Affine) -> Tensor:
    """Decode n and compute n · factor + term in one pass, in float32, which represents 16-bit numbers exactly."""
    assert isinstance(n, Payload)
    factor, term, length, by_row = affine
    return n.decode(sizes, dtype, Affine(_float32(factor), _float32(term), length, by_row))


def _float32(x: Tensor | None) -> Any:
    """Return x as kernels take it, contiguous in float32; None for None."""
    return x if x is None or (x.dtype is torch.float32 and x.is_contiguous()) else x.float().contiguous()
