"""The operator that is running, and where the groups of its saved tensors are.

A hook on saved tensors gets the tensor and nothing else. So a mode on torch functions notes the running call: its
operator, by its name in a policy, and its arguments.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
import weakref
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
    "OF_A_PARAMETER",
    "OTHER",
    "ROUGH",
    "Call",
    "Operator",
    "call_of",
    "operator_of",
    "saved_by_checkpoint",
    "says_what_rounding_does",
]

#: Where groups are: in the last dimension; in the second; along heads; or in the channel dimension of the operator that
#: produced the tensor.
Kind = Literal["last", "second", "heads", "either"]


class Operator(NamedTuple):
    """An operator.

    Attributes:
        name: its name in a policy.
        kind: where the groups of its saved tensors are.
    """

    name: str
    kind: Kind


def _table() -> dict[Any, Operator]:
    """Return the functions as a mode sees them → their operators. Functions that this PyTorch lacks are left out."""
    tensor = torch.Tensor
    calls: dict[Operator, list[Any]] = {
        Operator("matmul", "last"): [F.linear, torch.addmm, torch.mm, tensor.mm, tensor.addmm, F.bilinear],
        Operator("matmul", "heads"): [
            torch.matmul, tensor.matmul, tensor.__matmul__, tensor.__rmatmul__, torch.bmm, tensor.bmm, torch.baddbmm,
            tensor.baddbmm, torch.einsum,
        ],
        Operator("attention", "heads"): [F.scaled_dot_product_attention],
        Operator("softmax", "heads"): [F.softmax, torch.softmax, tensor.softmax],
        Operator("layer_norm", "last"): [F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm],
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
#: An operator of "other" whose derivative must not be computed from rounded values: never packed.
ROUGH = Operator("other", "last")
#: An operator of "other" whose derivative may have a large error if computed from rounded values, depending on the
#: model: packed only where the policy names "other".
NAMED = Operator("other", "last")
#: Autograd functions, written in Python or behind operators of other libraries.
CUSTOM = Operator("custom", "either")
#: A graph of torch.compile, whose operators are not visible.
COMPILED = Operator("compiled", "last")
CHECKPOINT = Operator("checkpoint", "last")

#: PyTorch's own namespaces in torch.ops.
_OWN = ("aten", "prims")


#: Operators of "other" whose derivatives are Lipschitz in what they save, as those of products and sigmoids are: an
#: error of a code makes an error of its size. Operators that are in neither this list nor the next may save tensors
#: that must not be rounded: ``amax`` compares its input with its result, and would find no equal element; ``div``,
#: ``log`` and ``normalize`` divide by a saved value, and a code may be zero; ``clamp`` and ``abs`` ask on which side of
#: a bound a value was.
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
#: Operators that need more than 8 bits though their derivatives are smooth: the gradient of a loss is a difference of
#: numbers that are nearly equal once the model has learned, and an error in sin's input is an error in radians.
_DELICATE = frozenset((
    "mse_loss", "smooth_l1_loss", "huber_loss", "log_softmax", "logsumexp", "softmin", "cross_entropy", "kl_div",
    "log_sigmoid", "binary_cross_entropy_with_logits", "sin", "cos",
))  # fmt: skip
#: Those of _DELICATE whose rows may be as wide as a vocabulary. No other tensor is as large then, so they are packed.
_OF_ROWS = frozenset(("log_softmax", "logsumexp", "softmin", "cross_entropy"))
#: Those of them that save log-probabilities.
_LOGARITHMS = frozenset(("log_softmax", "cross_entropy"))
#: From how many elements on a row counts as that wide.
_WIDE = 1024
#: Powers, which are smooth where the exponent is 1 or a whole number of at least 2.
_POWERS = frozenset(("pow", "float_power"))


@functools.lru_cache(maxsize=1 << 12)
def operator_of(function: Any) -> Operator:
    """Return the operator behind a function as a mode sees it, without regard to its arguments."""
    found = _TABLE.get(function)
    if found is not None:
        return found
    name = getattr(function, "_qualified_op_name", None) or getattr(function, "namespace", None)  # of torch.ops only
    if isinstance(name, str) and name.partition("::")[0] not in _OWN:
        return CUSTOM
    plain = _plain_name(function)
    return OTHER if plain in _SMOOTH else NAMED if plain in _DELICATE else ROUGH


@functools.lru_cache(maxsize=1 << 12)
def _plain_name(function: Any) -> str:
    """Return the plain name, such as mul for ``mul_``, ``mul.Tensor``, ``__mul__``, ``__rmul__`` and ``__imul__``."""
    name = str(getattr(function, "__name__", "")).partition(".")[0]
    plain = name.strip("_")
    swapped = name.startswith("__") and plain[:1] in ("r", "i") and plain[1:] in (*_SMOOTH, *_POWERS)
    return plain[1:] if swapped else plain


_NONE: Mapping[str, Any] = types.MappingProxyType({})
_SHAPE = attrgetter("shape")

#: Prefixes of autograd nodes' names. Their results, of more than 2 dimensions, have channels in the second dimension.
_SECOND = (
    "Convolution", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "MaxPool", "_MaxPool", "AvgPool", "Mkldnn",
)  # fmt: skip
#: Autograd nodes that may lie between a parameter and an operator's operand: views, and autocast's casts.
OF_A_PARAMETER = frozenset(
    f"{name}Backward0"
    for name in (
        "ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "AsStrided",
    )
)  # fmt: skip


class Call:
    """A call of an operator.

    Args:
        operator: the operator; None: not an operator of PyTorch, or one in backward.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Attributes:
        bits: the bits for the tensors that fused attention saves; 0: kept unchanged; None: not determined yet.
        normalizes: whether the operator makes log-probabilities over a vocabulary, or a loss of them.
        forms: the shapes of the operands; empty where they have not been looked up.
    """

    _operands: list[Tensor] | None = None
    bits: Literal[8, 4, 2, 0] | None = None
    normalizes = False
    forms: tuple[tuple[int, ...], ...] = ()

    def __init__(
        self, operator: Operator | None = None, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NONE
    ) -> None:
        self.operator, self.args, self.kwargs = operator, args, kwargs

    def operands(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        if self._operands is None:
            given: list[Any] = [*self.args, *self.kwargs.values()] if self.kwargs else [*self.args]
            for x in given:
                # Lists of numbers, such as the shape that layer normalization takes, are frequent and hold no tensor.
                if isinstance(x, (tuple, list, dict)) and (isinstance(x, dict) or not all(type(n) is int for n in x)):
                    given = torch.utils._pytree.tree_leaves(given)
                    break
            self._operands = [x for x in given if isinstance(x, Tensor)]
        return self._operands

    def find_forms(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the operands."""
        if not self.forms:
            self.forms = tuple(map(_SHAPE, self.operands()))
        return self.forms

    def samples(self, x: Tensor, grouping: Grouping) -> int:
        """Return the number of samples in a saved tensor's first dimension.

        Matrix products merge samples with tokens or heads into one dimension.
        """
        if grouping.dim == 0:
            return grouping.major
        given = next(iter(self.operands()), x)
        samples = given.shape[0] if given.dim() else 0
        return samples if samples and x.shape[0] % samples == 0 else x.shape[0]

    def grouping(
        self, x: Tensor, operator: Operator, policy: ActivationPolicy, heads: int | None, default_groups: int
    ) -> Grouping:
        """Return where a saved tensor's groups are: heads where there are any, or else groups of channels.

        Args:
            x: the tensor.
            operator: the operator that saves it.
            policy: may set the number of groups, or ``granularity="layer"``.
            heads: the number of attention heads in the running module; None: unknown.
            default_groups: the number of groups of channels where nothing else sets it.
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
        # Batch normalization scales channels to the same size, and their errors with them: each has its own range.
        each = x.shape[dim] if operator.name == "batch_norm" and policy.derive else None
        return Grouping(dim, largest_divisor(x.shape[dim], policy.groups or each or heads or default_groups))

    def is_statistic(self, x: Tensor, operator: Operator) -> bool:
        """Whether a tensor is a mean or deviation of normalization, or attention's log-sum-exp, as far as shapes tell.

        Such tensors are kept unchanged: results are sensitive to them, and they are small, or the same for all layers.
        """
        if operator.name not in ("attention", "layer_norm", "batch_norm"):
            return False
        given = next(iter(self.operands()), x)
        if operator.name == "attention":  # log-sum-exp: a number per row of the scores, perhaps with padding
            per_row = x.shape[:-1] == given.shape[:-2] and x.shape[-1] >= given.shape[-2]
            return per_row or (x.shape[-1] == 1 and x.dim() == given.dim())
        return x.numel() < given.numel()

    def is_mask(self, x: Tensor) -> bool:
        """Whether attention adds this tensor to its scores: the mask, or what PyTorch makes of a boolean mask."""
        mask = self.args[3] if len(self.args) > 3 else self.kwargs.get("attn_mask")
        if not isinstance(mask, Tensor) or not x.dim() or not mask.dim() or x.shape[-1] != mask.shape[-1]:
            return False
        return not x.requires_grad or x.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()

    def is_log_probabilities(self, x: Tensor) -> bool:
        """Whether a saved tensor holds log-probabilities over a vocabulary that this operator has made."""
        if not self.normalizes:
            return False
        given, *others = self.operands()
        where = x.untyped_storage().data_ptr()
        return x.shape == given.shape and all(y.untyped_storage().data_ptr() != where for y in (given, *others))

    def parameter_before_cast(self, x: Tensor, place: tuple[Any, ...], known: set[Any]) -> Tensor | None:
        """Return the parameter that autocast cast to a saved tensor or to its base; None where there is none.

        Args:
            x: the tensor.
            place: what tells the tensors apart that a model saves.
            known: where frozen parameters were found before; found ones are added.
        """
        node = x.grad_fn
        if node is not None:
            if node.name() not in OF_A_PARAMETER:
                return None
            node = node.next_functions[0][0]
            while node is not None and node.name() in OF_A_PARAMETER:
                node = node.next_functions[0][0]
            parameter = getattr(node, "variable", None)
            return parameter if isinstance(parameter, nn.Parameter) else None
        if x.requires_grad:
            return None
        # A frozen parameter leaves no trace in the graph: compare values. Once is enough, since a GPU waits for it.
        base = base_of(x)
        those = [
            given
            for given in self.operands()
            if is_of_a_parameter(given) and given.dtype != x.dtype and given.shape == base.shape
        ]
        key = *place, base.shape, x.dtype
        if len(those) == 1 and not those[0].requires_grad and key in known:
            return those[0].detach()
        same = next((given for given in those if torch.equal(base, given.detach().to(x.dtype))), None)
        if same is None:
            return None
        known.add(key)
        return same.detach()


def call_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return the call that a mode sees; its arguments may change what :func:`operator_of` says."""
    operator = operator_of(function)
    if operator is ROUGH and _plain_name(function) in _POWERS and "__r" not in function.__name__:
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
        if isinstance(exponent, (int, float)) and (exponent == 1 or (exponent >= 2 and exponent == int(exponent))):
            operator = OTHER
    elif operator is NAMED and _width_of_rows(name := _plain_name(function), args, kwargs) >= _WIDE:
        call = Call(OTHER, args, kwargs)
        call.normalizes = name in _LOGARITHMS
        return call
    return Call(operator, args, kwargs)


def _width_of_rows(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return over how many elements a softmax or loss normalizes; 0 for other functions, and where it is not known."""
    x = args[0] if args else kwargs.get("input")
    if name not in _OF_ROWS or not isinstance(x, Tensor) or not x.dim():
        return 0
    if name == "cross_entropy":
        return x.shape[min(1, x.dim() - 1)]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return x.shape[dim] if isinstance(dim, int) and -x.dim() <= dim < x.dim() else 0


#: The call that stands for none.
NO_CALL = Call()


def saved_by_checkpoint() -> bool:
    """Whether torch.utils.checkpoint itself is saving a tensor, and not a function that it calls."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame):
        frame = frame.f_back  # to the hook's caller
    if frame is not None and frame.f_code is _APPLY:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == checkpoint.__file__


def says_what_rounding_does() -> None:
    """Improve the error of the checkpoint that is saving its inputs, for the case that its two runs differ.

    The error then says that the inputs were rounded, and what to do. A checkpoint with ``use_reentrant=True`` does not
    compare its runs.
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


#: The method of a checkpoint that compares the tensors of its two runs.
_COMPARES = "check_recomputed_tensors_match"


def _compare(kept: weakref.ref[Any], compare: Any, *run: Any) -> None:
    there = kept()
    try:
        compare(there, *run)
    except checkpoint.CheckpointError as error:
        shapes = re.findall(r"torch\.Size\(\[.*?\]\)", str(error))  # for each tensor: in the first run, in the second
        if shapes and shapes[::2] == shapes[1::2]:
            raise  # dtypes or devices differ, which rounding cannot cause
        raise checkpoint.CheckpointError(
            "torch.utils.checkpoint: the run in backward saved other tensors than the run in forward. Its inputs were "
            "kept in few bits by compress_activations, so a module that routes, compares or takes an argmax may have "
            'decided differently. Keep these inputs exact: operators={"checkpoint": "off"} in the policy, and for '
            'modules "checkpoint" instead of "checkpoint:bits=…". If that does not help, rounding is not the cause:\n'
            f"{error}"
        ) from error


def _is_between(frame: types.FrameType) -> bool:
    """Whether a frame is between the hook and its caller: code of this folder, or what hides it from Dynamo."""
    return frame.f_code.co_filename.startswith(_ROOM) or frame.f_code.co_filename.endswith(_HIDING)


_ROOM = os.path.dirname(__file__) + os.sep
#: Files of the functions that hide code from Dynamo: PyTorch's own is used by :func:`~narrowband.compiler.unseen`.
_HIDING = (compiler.__file__, "/torch/_dynamo/eval_frame.py")
#: ``Function.apply``, which lies between the hook and the caller of an autograd function, where it is written in
#: Python: until PyTorch 2.13.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
