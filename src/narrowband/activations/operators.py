"""Operators that save less than PyTorch's own, and the function mode that replaces PyTorch's by them.

The backward of ReLU needs to know whether an element was above zero, that of dropout whether it was kept: one bit per
element. The operators here save this bit, where PyTorch's save the result, or the mask in the dtype of the input. The
backward of max pooling needs to know where in its window a maximum was: one byte, where PyTorch saves the input and a
position of eight bytes. In forward the results are the same, bit for bit.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from narrowband import kernels
from narrowband.activations.arena import Arena
from narrowband.activations.calls import NO_CALL, Call, call_of, operator_of
from narrowband.activations.layout import Arrangement
from narrowband.activations.normalization import Normalization
from narrowband.activations.policy import ActivationPolicy
from narrowband.activations.recompute import DERIVED, Recipes, bound, derive_elementwise
from narrowband.compiler import unseen

__all__ = ["Keeper", "Watch"]


class Keeper(Recipes, Protocol):
    """The interface of a pass that operators need.

    Attributes:
        policy: which tensors are kept in how many bits.
        arena: memory for what operators save.
        call: the call of the running operator.
        normalization: the running call of layer normalization.
    """

    policy: ActivationPolicy
    arena: Arena
    call: Call
    normalization: Normalization | None

    def replaces(self, x: Any) -> bool:
        """Whether an operator of this module shall replace PyTorch's for this input."""

    def keeps(self, kept: Tensor, *, plain: Tensor | int, and_bytes: int = 0) -> None:
        """Count what an operator of this module saves, and what PyTorch's would: a tensor, or bytes, or both."""


#: Functions written in Python whose operators the mode must see one by one. Those of backward are among them, since a
#: checkpoint runs operators again in backward.
_COMPOSITE = frozenset(
    {F.multi_head_attention_forward, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)


#: The type of the functions that read an attribute of a tensor.
_GETTER = type(vars(torch._C.TensorBase)["shape"].__get__)


def _transparent(function: types.FunctionType) -> Callable[..., Any]:
    """Copy a function so that the copy does not dispatch to the mode itself, but the operators that it calls do.

    A new copy is made for each call, since functions that it calls may have been replaced in its module.
    """
    seen = dict(function.__globals__)
    for name in function.__code__.co_names:
        if name.startswith("has_torch_function"):
            seen[name] = lambda *_: False
    copy = types.FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Watch(TorchFunctionMode):
    """Tells a pass which operator is running, and replaces operators that can save less.

    Args:
        keeper: records what the pass saves.
    """

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self._keeper = keeper

    @unseen
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is _GETTER:  # reading an attribute, such as a shape, saves nothing
            return func(*args, **kwargs)
        keeper = self._keeper
        is_composite, lean, derived = _handling(func)
        if is_composite:
            with self:
                return _transparent(func)(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            return func(*args, **kwargs)  # nothing is saved, and tensors have no version counters
        keeper.call = call_of(func, args, kwargs)
        try:
            if forward_ad._current_level >= 0:  # tensors have tangents then, which operators of this package lack
                return func(*args, **kwargs)
            if lean is not None:
                replaced = lean(keeper, func, args, kwargs)
                if replaced is not None:
                    return replaced
            result = func(*args, **kwargs)
            if derived is not None:
                derived(keeper, result, args, kwargs)
            return result
        finally:
            keeper.call = NO_CALL


# ---- operators that keep a bit or a byte per element -----------------------------------------------------------------


def _bits_of(x: Tensor, arena: Arena, low: float = 0.0, high: float = math.nan) -> Tensor:
    """Return one bit per element of a flat tensor: 0 where the element is ≤ ``low`` or ≥ ``high``, else 1."""
    mask = arena.take(-(-x.numel() // 8), x.device)
    direct = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    kernels.mask_between(direct, mask, low, high)
    return mask


def _masked(x: Tensor, mask: Tensor, arrangement: Arrangement) -> Tensor:
    """Return x where the mask is set, and zero elsewhere. The mask's bits are in the order of ``arrangement``."""
    if _needs_operators(x):
        return torch.where(_noise_of(mask, arrangement, torch.float32, x.device) != 0, x, 0)
    flat = arrangement.flat(x)
    direct = flat if flat.dtype in (torch.float32, torch.bfloat16) else flat.float()
    out = torch.empty_like(direct)
    kernels.apply_mask(mask, direct, out)
    return arrangement.unflat(out.to(x.dtype))


def _noise_of(mask: Tensor, arrangement: Arrangement, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that is one where the mask is set, and zero elsewhere."""
    ones = torch.ones(math.prod(arrangement.sizes), dtype=torch.float32, device=device)
    kernels.apply_mask(mask, ones, ones)
    return arrangement.unflat(ones.to(dtype))


def _needs_operators(gradient: Tensor) -> bool:
    """Whether a gradient must be computed with PyTorch's operators instead of this package's kernels.

    That is the case if it will be differentiated itself, or stands for a batch of gradients (``is_grads_batched``,
    ``torch.vmap``); the kernels support neither.
    """
    functorch = torch._C._functorch
    return gradient.requires_grad or functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient)


class _Bend(NamedTuple):
    """A piecewise linear function that is the identity between two bounds, and has another slope outside of them.

    Attributes:
        function: the function.
        inplace: the function in place.
        low: the lower bound, below which the slope is ``slope``.
        high: the upper bound, above which the function is constant; NaN: there is none.
        slope: the slope below ``low``.
    """

    function: Callable[[Tensor], Tensor]
    inplace: Callable[[Tensor], Tensor]
    low: float = 0.0
    high: float = math.nan
    slope: float = 0.0

    def bits_of(self, x: Tensor, y: Tensor, arena: Arena) -> Tensor:
        """Return one bit per element: whether backward passes the gradient on unchanged.

        For clamps the input decides, as in PyTorch: where the dtype cannot represent a bound, a result does not tell
        whether it was clamped.
        """
        arrangement = Arrangement.of(y)
        if self.slope:
            y = torch.where(y > 0, y, 0)  # leaky ReLU's backward treats NaN as below the bound
        elif not math.isnan(self.high):
            y = x if Arrangement.of(x) == arrangement else torch.empty_like(y).copy_(x)
        return _bits_of(arrangement.flat(y), arena, self.low, self.high)


class _Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keeper: Keeper, bend: _Bend, inplace: bool) -> Tensor:
        ctx.slope = bend.slope
        if inplace:
            ctx.mark_dirty(x)
            y = bend.inplace(x)  # x and y are now the same tensor
        else:
            y = bend.function(x)
        ctx.arrangement = Arrangement.of(y)
        mask = bend.bits_of(x, y, keeper.arena)
        keeper.keeps(mask, plain=y if inplace or bend.function is torch.relu else x)
        ctx.save_for_backward(mask)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (mask,) = ctx.saved_tensors
        if ctx.slope:
            above = _noise_of(mask, ctx.arrangement, torch.float32, gradient.device) != 0
            return torch.where(above, gradient, gradient * ctx.slope), None, None, None
        return _masked(gradient, mask, ctx.arrangement), None, None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keeper: Keeper, p: float, inplace: bool) -> Tensor:
        ctx.arrangement = Arrangement.of(x)
        if x.device.type == "cpu":  # as torch.dropout does there, so that the same seed drops the same elements
            noise = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
            y = x.mul_(noise) if inplace else x * noise
            plain = noise.nbytes
        else:
            y, noise = torch.native_dropout(x, p, True)
            plain = noise.nbytes
            noise = noise.to(x.dtype)
            if inplace:
                y = x.copy_(y)
        if inplace:
            ctx.mark_dirty(x)
        mask = _bits_of(ctx.arrangement.flat(noise), keeper.arena)
        ctx.p = p
        keeper.keeps(mask, plain=plain)
        ctx.save_for_backward(mask)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (mask,) = ctx.saved_tensors
        noise = _noise_of(mask, ctx.arrangement, gradient.dtype, gradient.device)
        # As PyTorch does on each device, so that rounding, −0 and NaN are the same.
        if gradient.device.type != "cpu":
            back = torch.ops.aten.native_dropout_backward(gradient, noise.bool(), 1 / (1 - ctx.p))
        elif _needs_operators(gradient):
            back = noise.div_(1 - ctx.p) * gradient
        else:
            back = noise.div_(1 - ctx.p).mul_(gradient)
        return back, None, None, None


class _Pooling(NamedTuple):
    """Options of 2-d max pooling without dilation.

    Attributes:
        kernel: the size of a window, (rows, columns).
        stride: the distance between windows, (rows, columns).
        padding: rows and columns of padding on each side.
        ceil_mode: whether windows may begin inside of the plane and end outside.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool

    def windows(self, results: Arrangement, width: int) -> kernels.Windows:
        """Return where the windows begin, for results arranged like this, in planes of so many columns."""
        row = results.order.index(len(results.order) - 2)  # columns follow it, then channels in channels-last order
        outer, inner = math.prod(results.sizes[:row]), math.prod(results.sizes[row + 2 :])
        rows, columns = results.sizes[row : row + 2]
        return kernels.Windows(outer, rows, columns, inner, width, self.kernel[1], self.stride, self.padding)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keeper: Keeper, pooling: _Pooling) -> Tensor:
        kernel, stride, padding, ceil_mode = ctx.pooling = pooling
        y, position = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, 1, ceil_mode)
        ctx.shape, ctx.strides, ctx.arrangement = x.shape, x.stride(), Arrangement.of(position)
        ctx.windows = pooling.windows(ctx.arrangement, x.shape[-1])
        places = keeper.arena.take(y.numel(), y.device)
        kernels.pool_places(ctx.arrangement.flat(position), places, ctx.windows)
        keeper.keeps(places, plain=x, and_bytes=position.nbytes)
        ctx.save_for_backward(places)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        kernel, stride, padding, ceil_mode = ctx.pooling
        (places,) = ctx.saved_tensors
        position = torch.empty(places.shape, dtype=torch.int64, device=places.device)
        kernels.pool_positions(places, position, ctx.windows)
        # Backward looks at the input's shape and memory order only, not at its values.
        like = torch.empty_strided(ctx.shape, ctx.strides, dtype=gradient.dtype, device=gradient.device)
        back = torch.ops.aten.max_pool2d_with_indices_backward
        position = ctx.arrangement.unflat(position)
        return back(gradient, like, kernel, stride, padding, 1, ceil_mode, position), None, None


def _relu(keeper: Keeper, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    inplace = func.__name__.endswith("_")
    if func in (F.hardtanh, F.hardtanh_, F.relu6):
        if func is F.relu6:
            (x, inplace), low, high = bound(args, kwargs, input=None, inplace=False), 0.0, 6.0
        else:
            x, low, high, inplace = bound(args, kwargs, input=None, min_val=-1.0, max_val=1.0, inplace=inplace)
        if not low < high:
            return None
        clamp = partial(torch.ops.aten.hardtanh, min_val=low, max_val=high)
        bend = _Bend(clamp, partial(torch.ops.aten.hardtanh_, min_val=low, max_val=high), low, high)
    elif func in (F.leaky_relu, F.leaky_relu_):
        x, slope, inplace = bound(args, kwargs, input=None, negative_slope=0.01, inplace=inplace)
        if slope <= 0:
            return None  # the result does not tell on which side of zero the input was
        leaky = partial(torch.ops.aten.leaky_relu, negative_slope=slope)
        bend = _Bend(leaky, partial(torch.ops.aten.leaky_relu_, negative_slope=slope), slope=slope)
    else:
        x, inplace = bound(args, kwargs, input=None, inplace=inplace)
        bend = _Bend(torch.relu, torch.relu_)
    if x is None or not keeper.replaces(x):
        return None
    origin = keeper.origin(x, may_change=True)  # before an in-place call changes it
    y = _apply(_Bent, x, keeper, bend, inplace)
    derive_elementwise(keeper, x, y, origin, bend.inplace)
    return y


def _dropout(keeper: Keeper, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    if func is F.dropout:
        x, p, training, inplace = bound(args, kwargs, input=None, p=0.5, training=True, inplace=False)
    else:
        x, p, training = bound(args, kwargs, input=None, p=None, train=None)
        inplace = False
    if x is None or not training or not 0 < p < 1 or not keeper.replaces(x):
        return None
    return _apply(_Dropout, x, keeper, p, inplace)


def _max_pool(keeper: Keeper, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    if func not in (F.max_pool2d, torch.max_pool2d):
        return None
    x, kernel, stride, padding, dilation, ceil_mode, return_indices = bound(
        args, kwargs, input=None, kernel_size=None, stride=None, padding=0, dilation=1, ceil_mode=False,
        return_indices=False,
    )  # fmt: skip
    if x is None or kernel is None or return_indices or not keeper.replaces(x):
        return None
    kernel = _pair(kernel)
    if math.prod(kernel) > 1 << 8 or _pair(dilation) != (1, 1):
        return None  # a place does not fit in a byte; or a window may lie in the padding only, and have no place
    pooling = _Pooling(kernel, _pair(stride) if stride else kernel, _pair(padding), ceil_mode)
    return _apply(_MaxPool, x, keeper, pooling)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    first, *others = (value,) if isinstance(value, int) else value
    return first, others[0] if others else first


def _layer_norm(keeper: Keeper, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Call PyTorch's layer or RMS norm so that the normalized form of its input is kept instead of the input."""
    if func in (F.layer_norm, torch.layer_norm):
        x, *options = bound(args, kwargs, input=None, normalized_shape=(), weight=None, bias=None, eps=1e-5)
    elif func in (F.rms_norm, torch.rms_norm):
        x, shape, weight, eps = bound(args, kwargs, input=None, normalized_shape=(), weight=None, eps=None)
        options = [shape, weight, None, eps]
    else:
        return None
    if not keeper.replaces(x) or not keeper.policy.derive:
        return None
    keeper.normalization = Normalization(x, *options, centred="rms" not in func.__name__)
    try:
        y: Tensor = func(*args, **kwargs)
        normalization = keeper.normalization
    finally:
        keeper.normalization = None
    if not normalization.derive(keeper, x, y):
        DERIVED[func](keeper, y, args, kwargs)
    return y


_LEAN: dict[str, Callable[[Keeper, Any, Any, Any], Tensor | None]] = {
    "relu": _relu,
    "dropout": _dropout,
    "max_pool": _max_pool,
    "layer_norm": _layer_norm,
}


@functools.lru_cache(maxsize=1 << 12)
def _handling(function: Any) -> tuple[bool, Callable[..., Tensor | None] | None, Callable[..., None] | None]:
    """Return whether the operators of a function are to be seen one by one, what may replace the function, and what
    notes how to recompute its result.
    """
    return function in _COMPOSITE, _LEAN.get(operator_of(function).name), DERIVED.get(function)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return made
