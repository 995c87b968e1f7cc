"""Run forward and backward block by block; backward hands each block's gradients to the average.

For autograd, all outputs come from one function. The user's graph ends at that function, and the graphs of the blocks
begin there: its backward computes the gradients of one block after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.utils._pytree import TreeSpec

    from narrowband.coded.average import BlockAverage

__all__ = ["Run"]


@dataclass
class _BlockOutputs:
    """The module's outputs for one block, and the number of samples in it."""

    outputs: list[Any]
    samples: int


class Run:
    """One forward pass, block by block, and its backward.

    Args:
        parameters: parameters whose gradients are averaged.
        average: receives the gradients of each block.
        samples: number of samples of the mini-batch.
        rows: number of rows of this rank's batch; those after its blocks' samples repeat the last sample.
        finish: called when backward is complete.
        drop: called when backward or ``finish`` raises.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        average: BlockAverage,
        samples: int,
        rows: int,
        finish: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        self._parameters, self._average = parameters, average
        self._finish, self._drop = finish, drop
        self._samples, self._rows = samples, rows
        self._blocks: list[_BlockOutputs] = []
        self._spec: TreeSpec | None = None

    def add(self, output: Any, samples: int) -> None:
        """Add the outputs of the next block, which have one row for each of its ``samples``."""
        outputs, self._spec = tree_flatten(output)
        for leaf in outputs:
            if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or leaf.shape[0] != samples):
                raise UnsupportedError(
                    f"a block of {samples} samples has an output of shape {tuple(leaf.shape)}: outputs need a row for "
                    "each sample, so that a block's part of the loss is known; compute the loss outside of the model"
                )
        self._blocks.append(_BlockOutputs(outputs, samples))

    def outputs(self, anchor: Tensor) -> Any:
        """Return the outputs of all blocks, concatenated along rows."""
        columns = list(zip(*(block.outputs for block in self._blocks), strict=True))
        tensors = [at for at, column in enumerate(columns) if isinstance(column[0], torch.Tensor)]
        joined: list[Any] = [column[0] for column in columns]
        for at, tensor in zip(tensors, _Boundary.apply(anchor, self, tensors), strict=True):  # type: ignore[no-untyped-call]
            joined[at] = tensor
        assert self._spec is not None
        return tree_unflatten(joined, self._spec)

    def join(self, at: int) -> tuple[Tensor, bool]:
        """Concatenate one output of all blocks; return it, and whether it has a gradient. Rows that stand for no sample
        repeat the last.
        """
        parts = [block.outputs[at].detach() for block in self._blocks]
        repeated = self._rows - sum(block.samples for block in self._blocks)
        parts.append(parts[-1][-1:].expand(repeated, *parts[-1].shape[1:]))
        return torch.cat(parts), any(block.outputs[at].requires_grad for block in self._blocks)

    def backward(self, tensors: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Compute each block's gradients from those of the outputs, and pass them to the average."""
        try:
            self._backward(tensors, gradients)
            self._finish()
        except BaseException:
            self._drop()
            raise

    def _backward(self, tensors: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        if not self._blocks:
            raise RuntimeError(
                "backward was called a second time on the same outputs, whose graphs the first one freed, even with "
                "retain_graph=True; call the model again"
            )
        blocks, self._blocks = self._blocks, []
        weight = self._rows / self._samples
        if self._average.is_given:  # this rank was lost; others have computed the contributions of these blocks
            blocks = []
        first = 0
        for row, block in enumerate(blocks):
            ends, starts = [], []
            for at, gradient in zip(tensors, gradients, strict=True):
                if gradient is not None and block.outputs[at].requires_grad:
                    ends.append(block.outputs[at])
                    # A copy: where a tensor begins in memory may change how it is rounded.
                    starts.append(gradient[first : first + block.samples].clone())
            found: Sequence[Tensor | None] = [None] * len(self._parameters)
            if ends:
                found = torch.autograd.grad(ends, self._parameters, starts, allow_unused=True)
            block.outputs.clear()
            self._average.add(row, found, weight)
            first += block.samples


class _Boundary(torch.autograd.Function):
    """The boundary between the user's autograd graph and those of the blocks."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, run: Run, tensors: list[int]) -> tuple[Tensor, ...]:
        ctx.run, ctx.tensors = run, tensors
        joined = [run.join(at) for at in tensors]
        ctx.mark_non_differentiable(*(tensor for tensor, has_gradient in joined if not has_gradient))
        ctx.set_materialize_grads(False)
        return tuple(tensor for tensor, _ in joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.run.backward(ctx.tensors, gradients)
        return None, None, None
