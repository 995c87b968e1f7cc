"""Gradients that travel end to end in one flat tensor, where no DistributedDataParallel has them in its buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.averaging.flat import empty_like, local, parts_of, real

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from narrowband.averaging.parameters import Parameter
    from narrowband.averaging.waiting import Waiting

__all__ = ["GradientGroup", "has_sparse_gradient", "says_something"]


class GradientGroup:
    """Parameters whose gradients are averaged in one flat tensor.

    Args:
        parameters: of one dtype.
        by_tensor: what is known of each.
        sparse: the parameters whose gradients are always sparse; each of them must come alone.

    Attributes:
        parameters: in the order in which their gradients lie in the flat tensor.
        names: of these.
        numel: how many elements the flat tensor has.
        left_out: those whose old gradients were not sent in the last step, and which get no average.
    """

    def __init__(
        self, parameters: Sequence[Tensor], by_tensor: Mapping[Tensor, Parameter], sparse: Collection[Tensor] = ()
    ) -> None:
        self.parameters = parameters
        self.names = [by_tensor[p].name for p in parameters]
        self._forms = [by_tensor[p].form for p in parameters]
        self.numel = sum(form.numel for form in self._forms)
        self._alone = parameters[0] if len(parameters) == 1 else None
        self._sparse = self._alone is not None and self._alone in sparse
        self.left_out: set[Tensor] = set()

    def collect(self, waiting: Waiting | None) -> tuple[Tensor, set[str]]:
        """Return a copy of the gradients, end to end, or the gradient itself if it is a sparse one; and the names of
        the parameters of which this rank has none to send.

        Those count as zeros. Parameters without a gradient get such a ``.grad`` unless they are frozen. Old gradients
        keep their values: those of frozen parameters with which an optimizer has stepped already, and those that were
        not finite before.

        Args:
            waiting: knows which gradients are old; None if that is not followed.
        """
        absent = {name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None}
        self.left_out = set()
        if self._alone is not None and (self._sparse or has_sparse_gradient(self._alone)):
            return _gradient(self._alone, sparse=True), absent
        flat = empty_like([local(p) for p in self.parameters])
        parts = list(parts_of(flat, self._forms))
        torch._foreach_copy_(parts, [real(local(_gradient(p))) for p in self.parameters])  # on a GPU by few launches
        for name, p, part in zip(self.names, self.parameters, parts, strict=True):
            if waiting is not None and (waiting.is_spoilt(p) or (not p.requires_grad and waiting.is_used_up(p))):
                part.zero_()
                absent.add(name)
                self.left_out.add(p)
        return flat, absent

    def deliver(self, averages: Tensor) -> None:
        """Write averages from the layout of :meth:`collect` into the gradients, besides those that were left out. A
        frozen parameter without a gradient still gets none.
        """
        if averages.is_sparse:
            if self._alone is not None and not _lacks_for_good(self._alone):
                self._alone.grad = averages
            return
        pairs = [
            (real(local(_gradient(p))), part)
            for p, part in zip(self.parameters, parts_of(averages, self._forms), strict=True)
            if not _lacks_for_good(p) and p not in self.left_out
        ]
        if pairs:
            torch._foreach_copy_([gradient for gradient, _ in pairs], [average for _, average in pairs])


def has_sparse_gradient(p: Tensor) -> bool:
    """Whether a parameter has a gradient that is sparse."""
    return p.grad is not None and p.grad.is_sparse


def says_something(p: Tensor) -> bool:
    """Whether a parameter has a gradient that is not all zeros."""
    if p.grad is None:
        return False
    x = local(p.grad)
    return bool((x._values() if x.is_sparse else x).any())


def _lacks_for_good(p: Tensor) -> bool:
    """Whether a parameter was frozen after set-up and has no gradient. With one, optimizers would step it."""
    return p.grad is None and not p.requires_grad


def _gradient(p: Tensor, *, sparse: bool = False) -> Tensor:
    """Return a parameter's gradient in this layout; zeros if it has none. Set ``.grad`` unless it is frozen."""
    gradient = p.grad
    if gradient is None:
        gradient = _no_rows(p) if sparse else torch.zeros_like(p)
    elif gradient.is_sparse != sparse:
        gradient = gradient.to_sparse(1) if sparse else gradient.to_dense()
    elif gradient.is_conj() or gradient.is_neg() or _shares_memory(gradient):
        gradient = gradient.resolve_conj().resolve_neg().clone()  # a copy that can be written to
    if gradient is not p.grad and not _lacks_for_good(p):
        p.grad = gradient
    return gradient


def _shares_memory(x: Tensor) -> bool:
    """Whether elements share memory, as after ``expand``."""
    return not x.is_sparse and any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _no_rows(p: Tensor) -> Tensor:
    """Return an embedding's sparse gradient without rows, which stands for zeros."""
    # torch.sparse_coo_tensor would warn that indices are not checked, with PyTorch 2.11 even if it is told not to.
    none = torch.zeros(p.shape, dtype=p.dtype, device=p.device, layout=torch.sparse_coo)
    return none.sparse_resize_(p.shape, 1, p.dim() - 1)
