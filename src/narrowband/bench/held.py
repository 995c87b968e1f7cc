"""Compute the bytes that training holds throughout, whatever is kept of activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowband.bench.ways import optimizer_of
from narrowband.feedback import Feedback, Layout, compression

__all__ = ["residual_nbytes", "tensors_of"]

#: Number of elements from which compress_gradients compresses a parameter's gradient.
_COMPRESSED = 1024

#: Prefix of the names of an 8-bit optimizer's tables of code values, which all parameters share.
_SHARED = "qmap"


def tensors_of(model: nn.Module, inputs: Iterable[Any], optimizer: str, codec: str | None = None) -> dict[str, int]:
    """Return the bytes that training holds throughout: parameters, buffers, gradients, optimizer, residuals, inputs.

    Args:
        model: the model.
        inputs: inputs of its forward; tensors inside containers count, too.
        optimizer: adamw, sgd, adafactor or adamw-8bit.
        codec: spec of the gradient compression; None: gradients are not compressed.

    Raises:
        ValueError: there is no such optimizer or codec.

    Example:
        >>> tensors_of(nn.Linear(100, 100), (torch.zeros(8, 100),), "adamw", "topk:density=0.01+ef")
        {'parameters': 40400, 'buffers': 0, 'gradients': 40400, 'optimizer': 80808, 'residuals': 40000, 'inputs': 3200}
    """
    own = list(model.parameters())
    return {
        "parameters": sum(x.nbytes for x in own),
        "buffers": sum(x.nbytes for x in model.buffers()),
        "gradients": sum(x.nbytes for x in own if x.requires_grad),
        "optimizer": _state_nbytes(own, optimizer),
        "residuals": residual_nbytes(model, codec),
        "inputs": sum(x.nbytes for x in tree_leaves(list(inputs)) if isinstance(x, Tensor)),
    }


def _state_nbytes(parameters: Sequence[Tensor], optimizer: str) -> int:
    """Return the bytes that an optimizer keeps for the parameters, without the parameters themselves."""
    total = 0
    for shape, dtype in ((p.shape, p.dtype) for p in parameters if p.requires_grad):
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        p.grad = torch.zeros_like(p)
        made = optimizer_of(optimizer, [p])
        made.step()
        kept = ((name, x) for state in made.state.values() for name, x in state.items() if isinstance(x, Tensor))
        total += sum(x.nbytes for name, x in kept if not name.startswith(_SHARED))
    return total


def residual_nbytes(model: nn.Module, codec: str | None) -> int:
    """Return the bytes of residuals that :func:`~narrowband.gradients.compress_gradients` keeps with a spec.

    It compresses tensors of two or more dimensions with 1,024 elements or more.

    Raises:
        ValueError: there is no such spec.
    """
    chosen = None if codec is None else compression(codec)
    state = None if chosen is None else chosen.new_feedback()
    if chosen is None or state is None:
        return 0
    there = {name: p for name, p in model.named_parameters() if p.dim() > 1 and p.numel() >= _COMPRESSED}
    cpu = torch.device("cpu")
    state.reserve([Layout(name, chosen.codec, p.shape, cpu) for name, p in there.items()])
    if state.needs_learning_rates:
        state.set_learning_rates(dict.fromkeys(there, 1.0))
    if isinstance(state, Feedback):
        for name, p in there.items():
            x = torch.linspace(-1.0, 1.0, p.numel())
            _, payload = state.encode(name, x, chosen.codec, shape=p.shape, seed=0)
            state.commit(name, x, chosen.codec, payload, shape=p.shape, seed=0)
    return int(state.nbytes)
