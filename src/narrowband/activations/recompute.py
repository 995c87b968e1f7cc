"""Results that backward recomputes cheaply from an input that is kept anyway.

GELU saves its input, and the linear layer behind it saves GELU's result; likewise normalization and the layer behind
it. Of such a pair the input is enough: backward decodes its codes, and computes the result from it. A product saves
both factors, and the layer behind a gate saves the product. After each call of such an operator, the pass notes how the
result can be recomputed (:class:`Recipe`). When a result is to be saved, its recipe becomes a :class:`Derivation`,
which replaces codes.

The error of a product a · b of rounded factors is |b| times the error of a plus |a| times that of b. Codes of the
product itself would err by a share of its range. That is wider than the product of the factors' usual sizes, since few
elements are large in both, so the codes would not be better.

A recipe has a weak reference to the packed input: the operator's node holds the input, and a recipe does not prolong
its life. A recipe copies the operator's parameters and statistics, since they may change before backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowband.activations.layout import Arrangement
from narrowband.activations.packed import Exact, Payload, Source

__all__ = [
    "DERIVED",
    "Cast",
    "Derivation",
    "Function",
    "Origin",
    "Original",
    "Recipe",
    "Recipes",
    "Sizes",
    "bound",
    "computed",
    "copy_of",
    "derive_elementwise",
    "formed",
    "is_normalized",
    "made_by",
    "nbytes_of",
    "original",
]

#: Dtypes from one of which to another a result may be a cast.
_CAST = (torch.float32, torch.bfloat16, torch.float16)

#: The sizes of a result in memory; None: flat.
Sizes = Sequence[int] | None


class Function(Protocol):
    """Computes a result from the source of an input."""

    def __call__(self, source: Source, sizes: Sizes, dtype: torch.dtype | None, /) -> Tensor:
        """Return the result, in the form that :meth:`Source.decode` specifies."""


class Original:
    """A source that holds the tensor itself, which is kept unchanged or lives anyway.

    Args:
        exact: the tensor, without gaps in memory.
        dtype: the dtype to restore; the tensor's own if not given.
    """

    #: More than codes can have.
    bits = 32

    def __init__(self, exact: Exact, dtype: torch.dtype | None = None) -> None:
        self._exact, self._dtype = exact, dtype

    def decode(self, sizes: Sizes = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy in memory order."""
        x = self._exact.restore()
        arrangement = Arrangement.of(x)
        fits = sizes is not None and arrangement.is_usual and arrangement.sizes == tuple(sizes)
        copied = (x if fits else arrangement.flat(x)).to(self._dtype or x.dtype, copy=True)
        return formed(copied, None if fits else sizes, dtype)


class Derivation:
    """A source that recomputes a result.

    Args:
        function: computes the result from the input.
        source: the source of the input.
        nbytes: bytes that the function holds.
        bits: the result is as precise as codes of it with so many bits would be.
    """

    __slots__ = ("__weakref__", "_function", "_nbytes", "_source", "bits")

    def __init__(self, function: Function, source: Source, nbytes: int, bits: int) -> None:
        self._function, self._source, self._nbytes, self.bits = function, source, nbytes, bits

    def count(self) -> int:
        """Return the bytes held by this derivation and by the derivations among its sources; each counts only once."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes + (self._source.count() if isinstance(self._source, (Derivation, _Both)) else 0)

    def decode(self, sizes: Sizes = None, dtype: torch.dtype | None = None) -> Tensor:
        """Compute the result, in memory order."""
        return self._function(self._source, sizes, dtype)

    def cast_codes(self) -> Payload | None:
        """Return the codes of which this is a cast; None where it is something else."""
        there = isinstance(self._function, Cast) and isinstance(self._source, Payload)
        return cast("Payload", self._source) if there else None


#: Returns the source of a tensor's values as long as something keeps it, and None afterwards.
Origin = Callable[[], "Source | None"]


class _Both:
    """The sources of both factors of a product.

    Attributes:
        bits: the bits of the coarser one.
    """

    def __init__(self, first: Source, second: Source) -> None:
        self.first, self.second = first, second
        self.bits = min(first.bits, second.bits)

    def count(self) -> int:
        """Return the bytes held by derivations among them; see :meth:`Derivation.count`."""
        return sum(source.count() for source in (self.first, self.second) if isinstance(source, Derivation))

    def decode(self, sizes: Sizes = None, dtype: torch.dtype | None = None) -> Tensor:
        """Compute the product, in memory order."""
        product = self.first.decode(sizes)
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
            return formed(product.mul_(self.second.decode(sizes)), None, dtype)


class Recipe:
    """How to recompute a result, as long as the packed input lives.

    Args:
        function: computes the result from the input.
        origin: the origin of the input.
        nbytes: bytes that the function holds.
        by_row: whether the function scales all rows to the same size, as normalization does. It then scales up errors
            in small rows, so the input's codes count for half of their bits.
    """

    __slots__ = ("_by_row", "_function", "_made", "_nbytes", "_origin")

    def __init__(self, function: Function, origin: Origin, nbytes: int = 0, *, by_row: bool = False) -> None:
        self._function, self._origin, self._nbytes, self._by_row = function, origin, nbytes, by_row
        self._made: Callable[[], Derivation | None] = lambda: None

    def derivation(self) -> Derivation | None:
        """Return the derivation, the same for all that save the result; None where the packed input is gone."""
        made = self._made()
        if made is None:
            source = self._origin()
            if source is None:
                return None
            bits = source.bits // 2 if self._by_row and source.bits != Original.bits else source.bits
            made = Derivation(self._function, source, self._nbytes, bits)
            self._made = weakref.ref(made)
        return made


class Recipes(Protocol):
    """The interface by which an operator finds its packed input, and notes how to recompute its result."""

    def origin(self, x: Any, *, may_change: bool = False) -> Origin | None:
        """Return where to find the codes of an input; None where there are none.

        ``may_change``: PyTorch's operator does not save the input, so that it may be overwritten before backward.
        """

    def origin_later(self, x: Tensor) -> Origin:
        """Return where to find the codes of a tensor that has none yet, in case that another operator saves it."""

    def derive(self, y: Tensor, recipe: Recipe) -> None:
        """Note how to recompute an operator's result."""

    def normalizes(self, x: Tensor, y: Tensor, rstd: Tensor) -> None:
        """Keep y = x · rstd instead of x."""

    def counts_as_norm(self, *tensors: Tensor) -> None:
        """Count tensors of an RMS norm that a model writes out as layer normalization's."""


class Cast:
    """The function that casts to a dtype, as autocast does.

    Args:
        dtype: the dtype to cast to.
    """

    __slots__ = ("_own",)

    def __init__(self, dtype: torch.dtype) -> None:
        self._own = dtype

    def __call__(self, source: Source, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
        """Return the cast values, in the form that :meth:`Source.decode` specifies."""
        x = source.decode(sizes, self._own)
        return x if dtype is None else x.to(dtype)


def computed(function: Callable[[Tensor], Tensor]) -> Function:
    """Wrap a function that maps the flat input, in memory order, to the flat result. It may write to its input."""

    def compute(source: Source, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
        x = source.decode()
        # Compute as in forward wherever backward is called: within a pass, under autocast, with create_graph.
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
            return formed(function(x), sizes, dtype)

    return compute


def _elementwise(function: Callable[[Tensor], Tensor]) -> Function:
    """Wrap an elementwise function, which takes tensors of any shape. It may write to its input."""

    def compute(source: Source, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
        x = source.decode(sizes)
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
            return formed(function(x), None, dtype)

    return compute


def formed(x: Tensor, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
    """Return x in these sizes and this dtype."""
    if dtype is not None and dtype is not x.dtype:
        x = x.to(dtype)
    return x if sizes is None else x.view(sizes)


def original(exact: weakref.ref[Exact]) -> Origin:
    """Return the origin of a tensor that is kept unchanged."""

    def there() -> Original | None:
        kept = exact()
        return None if kept is None else Original(kept)

    return there


# ---- operators -------------------------------------------------------------------------------------------------------


def bound(args: Any, kwargs: Any, **parameters: Any) -> list[Any]:
    """Return a call's arguments in the order of the parameters, with defaults. A method's ``self`` is ``input``."""
    if len(args) == len(parameters) and not kwargs:
        return list(args)
    values = dict(zip(parameters, args, strict=False)) | kwargs
    if "self" in values:
        values["input"] = values.pop("self")
    return [values.get(name, default) for name, default in parameters.items()]


def derive_elementwise(
    recipes: Recipes, x: Tensor, y: Tensor, origin: Origin | None, function: Callable[[Tensor], Tensor]
) -> None:
    """Note that ``function`` computes each element of the result from the same element of the input.

    The function may write to its input.
    """
    if origin is not None and Arrangement.of(x).matches(Arrangement.of(y)):
        recipes.derive(y, Recipe(_elementwise(function), origin))


def _gelu(recipes: Recipes, y: Tensor, args: Any, kwargs: Any) -> None:
    x, approximate = bound(args, kwargs, input=None, approximate="none")
    gelu = torch.ops.aten.gelu_
    derive_elementwise(recipes, x, y, recipes.origin(x), lambda flat: gelu(flat, approximate=approximate))


def _silu(recipes: Recipes, y: Tensor, args: Any, kwargs: Any) -> None:
    x, inplace = bound(args, kwargs, input=None, inplace=False)
    if not inplace:
        derive_elementwise(recipes, x, y, recipes.origin(x), torch.ops.aten.silu_)


def _derive_whole(
    recipes: Recipes,
    x: Tensor,
    y: Tensor,
    origin: Origin,
    function: Callable[[Tensor], Tensor],
    *copies: Tensor | None,
    by_row: bool = False,
) -> None:
    """Note that ``function`` computes the result from the input, both in their own shapes."""
    given, made = Arrangement.of(x), Arrangement.of(y)
    if x.dtype == y.dtype:  # not if autocast has cast the input first
        whole = computed(lambda flat: made.flat(function(given.unflat(flat))))
        recipes.derive(y, Recipe(whole, origin, nbytes_of(*copies), by_row=by_row))


def made_by(x: Tensor, name: str) -> bool:
    """Whether an autograd node of this name made a tensor."""
    return x.grad_fn is not None and x.grad_fn.name() == name


def is_normalized(y: Tensor) -> bool:
    """Whether a tensor is an RMS norm that a model writes out, y = x · rsqrt(mean of x² + ε), before the weight; or a
    cast of such a tensor. The graph tells.
    """
    node, _ = _before_casts(y.grad_fn, 0)
    if node is None or node.name() != "MulBackward0":
        return False
    first, second = node.next_functions
    return _is_rstd_of(first, second) or _is_rstd_of(second, first)


def _is_rstd_of(rstd: tuple[Any, int], x: tuple[Any, int]) -> bool:
    """Whether a tensor is rsqrt(mean of x² + ε); each tensor is given as its node, and its number there."""
    if not _inverts_root(rstd[0]):
        return False
    node = rstd[0].next_functions[0][0]
    for name in ("AddBackward", "MeanBackward1"):  # ε may be added as a tensor, or as a number
        if node is not None and node.name().startswith(name):
            node = node.next_functions[0][0]
    if node is None or node.name() not in ("PowBackward0", "MulBackward0"):
        return False
    squared, *same = node.next_functions
    is_square = same == [squared] or getattr(node, "_saved_exponent", None) == 2
    return is_square and _before_casts(*squared) == _before_casts(*x)


def _inverts_root(node: Any) -> bool:
    """Whether a node is that of rsqrt(x), or of x to the power of −½, as newer models of Gemma write it."""
    if node is None:
        return False
    name = node.name()
    return name == "RsqrtBackward0" or (name == "PowBackward0" and getattr(node, "_saved_exponent", None) == -0.5)


def _before_casts(node: Any, place: int) -> tuple[Any, int]:
    """Return the tensor that casts begin from; each tensor is given as its node, and its number there."""
    while node is not None and node.name() == "ToCopyBackward0":
        node, place = node.next_functions[0]
    return node, place


def _layer_norm(recipes: Recipes, y: Tensor, args: Any, kwargs: Any) -> None:
    """Note how to compute the result from the input, where the input itself is kept and not its normalized form."""
    x, shape, weight, bias, eps = bound(
        args, kwargs, input=None, normalized_shape=None, weight=None, bias=None, eps=1e-5
    )
    origin = recipes.origin(x)
    if origin is not None:
        weight, bias = copy_of(weight), copy_of(bias)
        _derive_whole(
            recipes, x, y, origin, lambda x: F.layer_norm(x, shape, weight, bias, eps), weight, bias, by_row=True
        )


def _rms_norm(recipes: Recipes, y: Tensor, args: Any, kwargs: Any) -> None:
    x, shape, weight, eps = bound(args, kwargs, input=None, normalized_shape=None, weight=None, eps=None)
    origin = recipes.origin(x)
    if origin is not None:
        weight = copy_of(weight)
        _derive_whole(recipes, x, y, origin, lambda x: F.rms_norm(x, shape, weight, eps), weight, by_row=True)


def _product(recipes: Recipes, y: Tensor, args: Any, kwargs: Any) -> None:
    """Note the product of two tensors of one form, or of a tensor and one factor per feature, such as a norm's weight.

    A product with one factor per row may scale up small rows, and their errors with them, as RMS normalization does
    where a model computes it by itself. There the input is computed from the result.
    """
    a, b = bound(args, kwargs, input=None, other=None)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or y.dtype not in (a.dtype, b.dtype) or "out" in kwargs:
        return
    if a.shape != y.shape:
        a, b = b, a
    if a.shape != y.shape:  # an outer product
        return
    if b.shape == (*y.shape[:-1], 1) and y.dtype is b.dtype and a.dtype in _CAST and _inverts_root(b.grad_fn):
        recipes.normalizes(a, y, b)  # a may be in 16 bits, as in T5
    elif not y.dtype == a.dtype == b.dtype:
        return
    elif b.shape == y.shape:
        # PyTorch saves a factor if the other one has a gradient.
        first, second = (
            recipes.origin(a, may_change=not b.requires_grad),
            recipes.origin(b, may_change=not a.requires_grad),
        )
        if first is None or second is None:
            return
        arrangement = Arrangement.of(y)
        if Arrangement.of(a).matches(arrangement) and Arrangement.of(b).matches(arrangement):
            recipes.derive(y, Recipe(_decoded, _both(first, second)))
    elif b.dim() and b.numel() == b.shape[-1] == y.shape[-1] and b.nbytes < y.numel():
        if is_normalized(a):
            recipes.counts_as_norm(a)
        origin = recipes.origin(a, may_change=not b.requires_grad)
        if origin is not None:
            factor = b.detach().clone()
            _derive_whole(recipes, a, y, origin, lambda x: x.mul_(factor), factor)


def _cast(recipes: Recipes, y: Tensor, args: Any, _: Any) -> None:
    x = args[0]
    if y.dtype is x.dtype or y.dtype not in _CAST or x.dtype not in _CAST or y.device != x.device:
        return
    origin = recipes.origin(x, may_change=True)
    if not Arrangement.of(x).matches(Arrangement.of(y)):
        return
    if origin is not None:
        recipes.derive(y, Recipe(Cast(y.dtype), origin))
    elif y.dtype is torch.float32:  # has all of the values of x, of which both may be saved
        recipes.derive(x, Recipe(Cast(x.dtype), recipes.origin_later(y)))


def _both(first: Origin, second: Origin) -> Origin:
    def there() -> _Both | None:
        a, b = first(), second()
        return None if a is None or b is None else _Both(a, b)

    return there


def _decoded(source: Source, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
    return source.decode(sizes, dtype)


def _batch_norm(recipes: Recipes, y: Tensor, args: Any, kwargs: Any) -> None:
    """Note the result as one scale and one shift per channel, from forward's statistics.

    Recomputing it so does not update running statistics.
    """
    x, mean, variance, weight, bias, training, _, eps = bound(
        args, kwargs, input=None, running_mean=None, running_var=None, weight=None, bias=None, training=False,
        momentum=0.1, eps=1e-5,
    )  # fmt: skip
    origin = recipes.origin(x)
    if origin is None:
        return
    with torch.no_grad():
        if training:
            # The node's own names: a batch's mean, and one over its deviation.
            mean, scale = (getattr(y.grad_fn, f"_saved_result{place}", None) for place in (1, 2))
            if mean is None or scale is None or scale.numel() != x.shape[1]:
                return  # a kernel that saves something else
        else:
            scale = (variance.float() + eps).rsqrt()
        shared = scale if training else None
        scale = scale.float() if weight is None else scale.float() * weight.float()
        shift = mean.float() * -scale if bias is None else bias.float() - mean.float() * scale
    if not x.is_cuda and not bool(torch.isfinite(scale + shift).all()):
        return  # the formula may not hold then; on a GPU this is not checked, and the result is not finite either
    channels = (-1, *[1] * (x.dim() - 2))

    def function(x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return x.mul_(scale.view(channels)).add_(shift.view(channels))
        zero, one = torch.zeros_like(scale), torch.ones_like(scale)
        return torch.batch_norm(x, scale, shift, zero, one, False, 0.0, 0.0, False)  # rounds once

    # Without a weight, the scale is what the node keeps, and no copy.
    _derive_whole(recipes, x, y, origin, function, None if scale is shared else scale, shift)


def nbytes_of(*copies: Tensor | None) -> int:
    """Return the bytes of tensors, some of which may be missing."""
    return sum(x.nbytes for x in copies if x is not None)


def copy_of(x: Tensor | None) -> Tensor | None:
    """Return a copy without a graph; None for None."""
    return None if x is None else x.detach().clone()


#: Operators whose results are recomputed → the function that notes how. ReLU's is in :mod:`.operators`.
DERIVED: dict[Any, Callable[[Recipes, Tensor, Any, Any], None]] = {
    F.gelu: _gelu,
    F.silu: _silu,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.batch_norm: _batch_norm,
    torch.mul: _product,
    torch.Tensor.mul: _product,
    torch.Tensor.to: _cast,
    torch.Tensor.type_as: _cast,
    torch.Tensor.float: _cast,
    torch.Tensor.bfloat16: _cast,
    torch.Tensor.half: _cast,
}
