"""Which operator is at work, and where the groups of its saved tensors are.

A hook on saved tensors is told the tensor and nothing else. A mode on torch functions notes the call that is at work:
its operator, by the name that a policy has for it, and its arguments.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import checkpoint

from narrowband import compiler
from narrowband.activations.layout import Grouping
from narrowband.activations.policy import ActivationPolicy
from narrowband.activations.storages import base_of, is_of_a_parameter
from narrowband.kernels.rows import largest_divisor

__all__ = [
    "CHECKPOINT",
    "COMPILED",
    "CUSTOM",
    "NAMED",
    "NO_CALL",
    "OTHER",
    "ROUGH",
    "Call",
    "Operator",
    "call_of",
    "differentiates_forward",
    "operator_of",
    "saved_by_checkpoint",
    "says_what_rounding_does",
]

#: Where groups are: in the last dimension; in the second; along heads; or where the tensor's producer has its channels.
Kind = Literal["last", "second", "heads", "either"]


class Operator(NamedTuple):
    """An operator.

    Attributes:
        name: for a policy.
        kind: where the groups of its saved tensors are.
    """

    name: str
    kind: Kind


def _table() -> dict[Any, Operator]:
    """Functions as a mode sees them. Those that this PyTorch lacks are left out."""
    tensor = torch.Tensor
    calls: dict[Operator, list[Any]] = {
        Operator("matmul", "last"): [F.linear, torch.addmm, torch.mm, tensor.mm, tensor.addmm, F.bilinear],
        Operator("matmul", "heads"): [
            torch.matmul, tensor.matmul, tensor.__matmul__, tensor.__rmatmul__, torch.bmm, tensor.bmm, torch.baddbmm,
            tensor.baddbmm, torch.einsum,
        ],
        Operator("attention", "heads"): [F.scaled_dot_product_attention],
        Operator("softmax", "heads"): [F.softmax, torch.softmax, tensor.softmax],
        Operator("layer_norm", "last"): [F.layer_norm, torch.layer_norm, getattr(F, "rms_norm", None)],
        Operator("layer_norm", "second"): [F.group_norm, torch.group_norm],
        Operator("gelu", "either"): [F.gelu, F.silu],
        Operator("relu", "either"): [
            F.relu, F.relu_, torch.relu, torch.relu_, tensor.relu, tensor.relu_, F.hardtanh, F.hardtanh_, F.relu6,
            F.leaky_relu, F.leaky_relu_,
        ],
        Operator("dropout", "either"): [F.dropout, torch.dropout],
        Operator("conv", "second"): [
            F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        ],
        Operator("max_pool", "either"): [
            F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
            F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices,
        ],
        Operator("batch_norm", "second"): [F.batch_norm, torch.batch_norm, F.instance_norm],
    }  # fmt: skip
    return {call: operator for operator, those in calls.items() for call in those if call is not None}


_TABLE = _table()
OTHER = Operator("other", "either")
#: One of the others, whose derivative does not bear rounding of what it saves.
ROUGH = Operator("other", "last")
#: One of the others, whose derivative is wrong by much where it is of rounded values, and by how much depends on the
#: model: so it has codes only where the policy names the others.
NAMED = Operator("other", "last")
#: Autograd functions, written in Python or behind operators of other libraries.
CUSTOM = Operator("custom", "either")
#: A graph of torch.compile, in which there are operators no more.
COMPILED = Operator("compiled", "last")
CHECKPOINT = Operator("checkpoint", "last")

#: PyTorch's own namespaces in torch.ops.
_OWN = ("aten", "prims")


#: The other operators whose derivatives are Lipschitz in what they save, as products and sigmoids are: an error of a
#: code makes an error of its size. All that are not named here save what bears no rounding, or may: ``amax`` compares
#: its input with its result, and finds none that is equal; ``div``, ``log`` and ``normalize`` divide by it, and a code
#: may be zero; ``clamp`` and ``abs`` ask on which side of a bound it was.
_SMOOTH = frozenset((
    "add", "sub", "rsub", "mul", "multiply", "square", "addcmul", "lerp", "neg", "positive", "subtract", "mean",
    "sum", "var", "var_mean", "exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "erfc", "sinh", "cosh", "softplus",
    "mish", "elu", "celu", "hardswish", "hardsigmoid", "glu", "tanhshrink", "logaddexp",
    "dot", "vdot", "inner", "outer", "ger", "mv", "addmv", "addr",
    "tensordot", "kron", "conv_tbc", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "interpolate", "upsample",
    "pad", "embedding", "getitem", "where", "masked_fill", "gather", "index_select", "cumsum", "lstm", "gru",
    "rnn_tanh", "lstm_cell", "gru_cell", "rnn_tanh_cell", "scaled_dot_product_attention", "native_dropout",
    "alpha_dropout",
))  # fmt: skip
#: Those of which 8 bits of the range are too few, though the derivative is smooth: a loss's gradient is the difference
#: of what is nearly equal once the model has learned, and the step of sin's codes is in radians.
_DELICATE = frozenset((
    "mse_loss", "smooth_l1_loss", "huber_loss", "log_softmax", "logsumexp", "softmin", "cross_entropy", "kl_div",
    "log_sigmoid", "binary_cross_entropy_with_logits", "sin", "cos",
))  # fmt: skip
#: Of these, the ones whose rows may be as wide as a vocabulary: then no other tensor is as large.
_OF_ROWS = frozenset(("log_softmax", "logsumexp", "softmin", "cross_entropy"))
#: How wide that is.
_WIDE = 1024
#: Of a tensor and a number: smooth where that is a whole number, at least 2, or 1.
_POWERS = frozenset(("pow", "float_power"))


@functools.lru_cache(maxsize=1 << 12)
def operator_of(function: Any) -> Operator:
    """The operator behind a function, as a mode sees it, whatever its arguments are."""
    found = _TABLE.get(function)
    if found is not None:
        return found
    name = getattr(function, "_qualified_op_name", None) or getattr(function, "namespace", None)  # in torch.ops
    if isinstance(name, str) and name.partition("::")[0] not in _OWN:
        return CUSTOM
    plain = _plain_name(function)
    return OTHER if plain in _SMOOTH else NAMED if plain in _DELICATE else ROUGH


@functools.lru_cache(maxsize=1 << 12)
def _plain_name(function: Any) -> str:
    """Of ``mul``, ``mul_``, ``mul.Tensor``, ``__mul__``, ``__rmul__`` and ``__imul__``: mul."""
    name = str(getattr(function, "__name__", "")).partition(".")[0]
    plain = name.strip("_")
    swapped = name.startswith("__") and plain[:1] in ("r", "i") and plain[1:] in (*_SMOOTH, *_POWERS)
    return plain[1:] if swapped else plain


_NONE: Mapping[str, Any] = types.MappingProxyType({})

#: Names of autograd nodes whose results have their channels in the second dimension, wherever that is of use.
_SECOND = (
    "Convolution", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "MaxPool", "_MaxPool", "AvgPool", "Mkldnn",
)  # fmt: skip
#: Nodes between a parameter and what an operator is given of it: views, and autocast's change of dtype.
_OF_A_PARAMETER = frozenset(
    f"{name}Backward0"
    for name in (
        "ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "AsStrided",
    )
)  # fmt: skip


class Call:
    """A call of an operator.

    Args:
        operator: None: no operator of PyTorch, or one of its backward.
        args: what it was given.
        kwargs: by name.

    Attributes:
        bits: of what fused attention saves, 0 where that is kept as it is; None: nobody has asked yet.
    """

    __slots__ = ("_operands", "args", "bits", "kwargs", "operator")

    def __init__(
        self, operator: Operator | None = None, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NONE
    ) -> None:
        self.operator, self.args, self.kwargs = operator, args, kwargs
        self._operands: list[Tensor] | None = None
        self.bits: Literal[8, 4, 2, 0] | None = None

    def operands(self) -> list[Tensor]:
        """The tensors that the operator is given."""
        if self._operands is None:
            given: list[Any] = [*self.args, *self.kwargs.values()] if self.kwargs else [*self.args]
            for x in given:
                if isinstance(x, (tuple, list, dict)):
                    given = torch.utils._pytree.tree_leaves(given)
                    break
            self._operands = [x for x in given if isinstance(x, Tensor)]
        return self._operands

    def forms(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of these."""
        return tuple([x.shape for x in self.operands()])

    def samples(self, x: Tensor, grouping: Grouping) -> int:
        """How many samples a saved tensor's first dimension is made of: products make one of samples and tokens, or
        heads.
        """
        if grouping.dim == 0:
            return grouping.major
        given = next(iter(self.operands()), x)
        samples = given.shape[0] if given.dim() else 0
        return samples if samples and x.shape[0] % samples == 0 else x.shape[0]

    def grouping(
        self, x: Tensor, operator: Operator, policy: ActivationPolicy, heads: int | None, default_groups: int
    ) -> Grouping:
        """Where a saved tensor's groups are: heads where there are any, or else groups of channels.

        Args:
            x: the tensor.
            operator: that saves it.
            policy: may say how many heads or groups there are.
            heads: of attention in the module at work.
            default_groups: of channels where nothing says how many.
        """
        if policy.granularity == "layer":
            return Grouping(x.dim() - 1, 1)
        kind = operator.kind
        if operator.name == "matmul" and any(operand.dim() < 3 for operand in self.operands()[-2:]):
            kind = "last"  # a product with one matrix is a linear layer
        if kind == "either":
            producer = x.grad_fn.name() if x.grad_fn is not None else ""
            kind = "second" if x.dim() > 2 and producer.startswith(_SECOND) else "last"
            if x.dim() == 4 and heads is not None and x.shape[1] == heads:
                kind = "heads"
        if kind == "heads":
            if x.dim() == 4:
                # (B, H, N, D), and (B, N, H, D) where heads are known to be there.
                dim = 2 if heads is not None and x.shape[1] != heads and x.shape[2] == heads else 1
                return Grouping(dim, x.shape[dim])
            if x.dim() == 3 and heads is not None and x.shape[0] % heads == 0:  # (B·H, N, D)
                return Grouping(0, heads, x.shape[0] // heads)
        dim = 1 if kind == "second" and x.dim() > 1 else x.dim() - 1
        # Batch normalization makes channels equally large, and with them their errors: each has its own range.
        each = x.shape[dim] if operator.name == "batch_norm" and policy.derive else None
        return Grouping(dim, largest_divisor(x.shape[dim], policy.groups or each or heads or default_groups))

    def is_statistic(self, x: Tensor, operator: Operator) -> bool:
        """Means and deviations of normalization, attention's log-sum-exp, and its mask: much depends on them, and they
        are few, or the same for all layers.
        """
        if operator.name not in ("attention", "layer_norm", "batch_norm"):
            return False
        given = next(iter(self.operands()), x)
        if operator.name == "attention":  # a number per row of the scores; there may be more, to fill up
            per_row = x.shape[:-1] == given.shape[:-2] and x.shape[-1] >= given.shape[-2]
            return per_row or (x.shape[-1] == 1 and x.dim() == given.dim()) or self._is_mask(x)
        return x.numel() < given.numel()

    def _is_mask(self, x: Tensor) -> bool:
        """Whether attention adds this tensor to its scores: the mask, or what PyTorch makes of one of bools."""
        mask = self.args[3] if len(self.args) > 3 else self.kwargs.get("attn_mask")
        if not isinstance(mask, Tensor) or not x.dim() or not mask.dim() or x.shape[-1] != mask.shape[-1]:
            return False
        return not x.requires_grad or x.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()

    def parameter_before_cast(self, x: Tensor) -> Tensor | None:
        """The parameter of which autocast made a saved tensor, or the one that it is a view of."""
        node = x.grad_fn
        if node is not None:
            if node.name() not in _OF_A_PARAMETER:
                return None
            while node is not None and node.name() in _OF_A_PARAMETER:
                node = node.next_functions[0][0]
            parameter = getattr(node, "variable", None)
            return parameter if isinstance(parameter, nn.Parameter) else None
        if x.requires_grad:
            return None
        # Of one that is frozen nothing says where it comes from.
        base = base_of(x)
        those = (given.detach() for given in self.operands() if is_of_a_parameter(given) and given.dtype != x.dtype)
        same = (given for given in those if base.shape == given.shape and torch.equal(base, given.to(x.dtype)))
        return next(same, None)


def call_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """A call, as a mode sees it."""
    operator = operator_of(function)
    if operator is ROUGH and _plain_name(function) in _POWERS and "__r" not in function.__name__:
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
        if isinstance(exponent, (int, float)) and (exponent == 1 or (exponent >= 2 and exponent == int(exponent))):
            operator = OTHER
    elif operator is NAMED and _width_of_rows(_plain_name(function), args, kwargs) >= _WIDE:
        operator = OTHER
    return Call(operator, args, kwargs)


def _width_of_rows(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Over how many elements a softmax or a loss normalizes; 0 for what does not, and where nothing tells."""
    x = args[0] if args else kwargs.get("input")
    if name not in _OF_ROWS or not isinstance(x, Tensor) or not x.dim():
        return 0
    if name == "cross_entropy":
        return x.shape[min(1, x.dim() - 1)]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return x.shape[dim] if isinstance(dim, int) and -x.dim() <= dim < x.dim() else 0


#: Between calls.
NO_CALL = Call()


def differentiates_forward() -> bool:
    """Whether forward-mode derivatives are being computed: tensors come with tangents then, which our operators and
    codes do not have.
    """
    return forward_ad._current_level >= 0


def saved_by_checkpoint() -> bool:
    """Whether torch.utils.checkpoint is what saves: what it calls may save, too."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame):
        frame = frame.f_back  # up to the hook's caller
    if frame is not None and frame.f_code is _APPLY:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == checkpoint.__file__


def says_what_rounding_does() -> None:
    """Have the checkpoint that is saving its inputs say, if its second run goes another way than the first, that these
    have been rounded, and what to do. One with ``use_reentrant=True`` does not compare its runs.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (_is_between(frame) or frame.f_code is _APPLY):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == checkpoint.__file__:
        kept = frame.f_locals.get("new_frame")
        own = getattr(type(kept), _COMPARES, None)
        if own is not None and _COMPARES not in vars(kept):
            setattr(kept, _COMPARES, functools.partial(_compare, weakref.ref(kept), own))
        if kept is not None:
            return
        frame = frame.f_back


#: What a checkpoint has to compare the tensors of its runs.
_COMPARES = "check_recomputed_tensors_match"


def _compare(kept: weakref.ref[Any], compare: Any, *run: Any) -> None:
    there = kept()
    try:
        compare(there, *run)
    except checkpoint.CheckpointError as error:
        shapes = re.findall(r"torch\.Size\(\[.*?\]\)", str(error))  # of each tensor, in the first run and the second
        if shapes and shapes[::2] == shapes[1::2]:
            raise  # rounding changes no dtype and no device
        raise checkpoint.CheckpointError(
            "torch.utils.checkpoint: the second run saved other tensors than the first. It began from inputs that "
            "compress_activations kept in few bits, so a module that routes, compares or takes an argmax may go "
            'another way. Keep these inputs exact: operators={"checkpoint": "off"} in the policy, and for modules '
            f'"checkpoint" in place of "checkpoint:bits=…". If that does not help, it was not the rounding:\n{error}'
        ) from error


def _is_between(frame: types.FrameType) -> bool:
    """Whether a frame is between the hook and its caller: this room's code, or what hides it from Dynamo."""
    return frame.f_code.co_filename.startswith(_ROOM) or frame.f_code.co_filename.endswith(_HIDING)


_ROOM = os.path.dirname(__file__) + os.sep
#: PyTorch's, where :func:`~narrowband.compiler.unseen` has to use it.
_HIDING = (compiler.__file__, "/torch/_dynamo/eval_frame.py")
#: Between the hook and who calls an autograd function, where that is Python: until PyTorch 2.13.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
