"""Check whether modules compute the same when backward runs them again.

The results of both runs of a module are compared within one step. So a model may be random from step to step, and a
random module is no objection to another one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

__all__ = ["Reruns"]


class Reruns:
    """Compare the first and second runs of modules in one step.

    Args:
        model: that is trained.
        names: of the modules that backward runs again.
        most: the largest relative difference between the results of both runs that counts as the same.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> policy = nb.ActivationPolicy(bits="off", modules={"0": "checkpoint"})
        >>> reruns = Reruns(model, ["0"], most=1e-3)
        >>> with reruns.watched():
        ...     with nb.compress_activations(model, policy=policy):
        ...         loss = model(torch.randn(4, 8)).sum()
        ...     reruns.forward_is_done()
        ...     loss.backward()
        >>> reruns.objection is None
        True
    """

    def __init__(self, model: nn.Module, names: Iterable[str], *, most: float) -> None:
        self._modules = {name: model.get_submodule(name) for name in names}
        self._most = most
        self._results: dict[str, list[list[Tensor]]] = {name: [] for name in self._modules}
        self._buffers: dict[str, Tensor] | None = None
        self._differs = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wrap forward and backward. Second runs are completed, even if backward needs less."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(set_checkpoint_early_stop(False))
            for name, module in self._modules.items():
                stack.enter_context(self._calls(name, module))
            yield

    def forward_is_done(self) -> None:
        """Mark the end of forward: later calls are second runs."""
        self._buffers = {name: buffer.clone() for name, buffer in self._all_buffers()}

    @property
    def objection(self) -> str | None:
        """Return why these modules cannot be run again, as the end of a sentence; None if they can."""
        if self._differs:
            return "its second run computes something else than the first"
        before = self._buffers or {}
        if any(not torch.equal(before[name], buffer) for name, buffer in self._all_buffers() if name in before):
            return "its second run changes its buffers once more"
        return None

    def _all_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self._modules.items():
            yield from module.named_buffers(name)

    @contextmanager
    def _calls(self, name: str, module: nn.Module) -> Iterator[None]:
        own, call = vars(module).get("forward"), module.forward

        @functools.wraps(call)
        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            self._take(name, outputs)
            return outputs

        module.forward = forward
        try:
            yield
        finally:
            if own is None:
                del module.forward
            else:
                module.forward = own

    def _take(self, name: str, outputs: Any) -> None:
        results = [x.detach() for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
        if self._buffers is None:
            self._results[name].append([x.clone() for x in results])
        # Of several calls in forward nothing says which one this is, and the one that it is comes nearest.
        elif not min((_off(results, first) for first in self._results[name]), default=math.inf) <= self._most:
            self._differs = True


def _off(again: list[Tensor], first: list[Tensor]) -> float:
    """The norm of the difference over that of the first, of the tensor where it is largest."""
    if [x.shape for x in again] != [x.shape for x in first]:
        return math.inf
    worst = 0.0
    for x, y in zip(again, first, strict=True):
        if not bool(torch.isclose(x, y, rtol=0.0, atol=0.0, equal_nan=True).all()):
            off = float((x - y).double().norm() / y.double().norm())
            worst = max(worst, math.inf if math.isnan(off) else off)
    return worst
