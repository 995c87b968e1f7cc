"""Ways to train a model in less memory: in few bits, with blocks recomputed, under autocast, compiled.

``Training`` is one model that is trained in one way, and ``survey`` returns what each operator and module of a model
keeps for backward. ``memory.py`` compares ways, and ``peaks.py`` measures what they hold at most.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from narrowband.activations import ActivationCompression, ActivationPolicy, Saved, compress_activations
from narrowband.bench.devices import moved
from narrowband.bench.subjects import Subject
from narrowband.errors import is_out_of_memory, users_errors

__all__ = [
    "OPTIMIZERS", "PLAIN", "Training", "Way", "gradients_of", "optimizer_of", "result_of", "scalar_of", "survey",
]  # fmt: skip

#: The policy that compresses nothing.
PLAIN = ActivationPolicy(bits="off")


def _adamw_in_8_bits(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Make the 8-bit AdamW of bitsandbytes, which also runs on the CPU."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise ValueError("optimizer='adamw-8bit' needs bitsandbytes: pip install bitsandbytes") from error
    made: torch.optim.Optimizer = AdamW8bit(parameters)
    return made


#: Name → optimizer. In order, they keep per parameter two numbers, one number, one per row and column of a matrix, and
#: two numbers of one byte.
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "adamw-8bit": _adamw_in_8_bits,
}


def optimizer_of(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Make one of :data:`OPTIMIZERS`.

    Raises:
        ValueError: there is no optimizer of that name, or its package is missing.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name!r} is none of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters)


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: name of its row.
        policy: policy for activations that are kept for backward. A policy that is off only counts bytes.
        amp: whether forward runs under bfloat16 autocast.
        checkpoint: whether only the input of every block is kept (full activation checkpointing).
        compiled: whether ``torch.compile`` compiles the model.
    """

    name: str
    policy: ActivationPolicy = PLAIN
    amp: bool = False
    checkpoint: bool = False
    compiled: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the way does nothing to save memory, apart from autocast."""
        return self.policy.is_off and not self.checkpoint and not self.compiled


class Training:
    """A model that is trained in one way. All ways have the same parameters and inputs.

    Args:
        way: how to train.
        build: makes the model and its inputs.
        device: cpu or cuda.
        seed: of parameters and data.
    """

    def __init__(self, way: Way, build: Callable[[], Subject], device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.way = way
        self.device = device
        model, inputs = build()
        self.model, self.inputs = model.to(device), tuple(moved(x, device) for x in inputs)
        if way.checkpoint:
            _checkpoint_blocks(self.model)
        if way.compiled:
            self.model.compile()
        self._context: ActivationCompression | None = None  # none yet: one that is never entered warns

    def step(self, *, counted: bool = False) -> Saved | None:
        """Do forward and backward; return what was saved, if that is counted or compressed."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with contextlib.ExitStack() as stack:
            saved = stack.enter_context(self._counting()) if counted or not self.way.policy.is_off else None
            stack.enter_context(torch.autocast(self.device, torch.bfloat16, enabled=self.way.amp))
            output = self.model(*self.inputs)
        torch.autograd.backward(scalar_of(output))
        return saved

    def _counting(self) -> ActivationCompression:
        self._context = self._context or compress_activations(self.model, policy=self.way.policy)
        return self._context


def result_of(output: Any) -> Tensor:
    """Return the first tensor that needs gradients, from whatever a model returns.

    Raises:
        ValueError: there is none.
    """
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise ValueError(
            f"the model returned {type(output).__name__} in which no tensor requires gradients, so backward keeps "
            "nothing; return a tensor that depends on parameters with requires_grad"
        )
    return found[0]


def scalar_of(output: Any) -> Tensor:
    """Return a scalar to call backward on, from whatever a model returns.

    This is the cross-entropy of the first tensor, with its last dimension as classes.

    Raises:
        ValueError: nothing in it needs gradients.
    """
    x = result_of(output).float()
    if not x.dim() or x.shape[-1] < 2:
        return x.square().mean()
    # A sum of squares would not do: a final norm makes all rows equally long, so the gradient would vanish there.
    rows = x.reshape(-1, x.shape[-1])
    return F.cross_entropy(rows, torch.arange(len(rows), device=x.device) % rows.shape[1])


def gradients_of(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters, flat, in float64 on the CPU."""
    return torch.cat([p.grad.detach().reshape(-1).double().cpu() for p in model.parameters() if p.grad is not None])


def _checkpoint_blocks(model: nn.Module) -> None:
    """Apply full activation checkpointing: keep only the input of every block."""
    lists = [m for m in model.modules() if isinstance(m, (nn.Sequential, nn.ModuleList)) and len(m) > 1]
    if not lists:
        raise ValueError("checkpointing needs a model with blocks, as a Sequential or ModuleList of several modules")
    for block in max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters())):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def survey(model: nn.Module, inputs: tuple[Any, ...], policy: ActivationPolicy, *, amp: bool = False) -> Saved:
    """Return what one step of a model saves under a policy, with the seconds that packing and unpacking take.

    Args:
        model: the model, in the mode in which it is trained.
        inputs: inputs of its forward.
        policy: says in how many bits what is kept.
        amp: whether forward runs under bfloat16 autocast.

    Raises:
        ValueError: the model raises an error in such a step, with or without compression. The message names the error.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    context = compress_activations(model, policy=policy)
    try:
        for _ in range(2):  # the first step compiles loops
            with context as saved, torch.autocast(device, torch.bfloat16, enabled=amp):
                output = model(*inputs)
            torch.autograd.backward(scalar_of(output))
            model.zero_grad()
    except Exception as error:
        if not is_out_of_memory(error):  # check whether the model raises it without compression, too
            with torch.autocast(device, torch.bfloat16, enabled=amp), users_errors("the model's forward raised"):
                output = model(*inputs)
            loss = scalar_of(output)
            with users_errors("the model's backward raised"):
                torch.autograd.backward(loss)
        raise
    return saved
