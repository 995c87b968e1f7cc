"""Momentum that is applied before the wire: SGD that leaves it out, and a check that it is applied once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from narrowband.feedback import State

__all__ = ["DGCSGD", "check_momentum", "check_steps"]


class DGCSGD(torch.optim.Optimizer):
    """SGD for gradients that already have momentum (``dgc``, arXiv 1712.01887). Only weight decay gets momentum here.

    With weight decay w and momentum m, SGD's velocity is m·u + (g + w·p). It is the sum of two velocities: that of the
    gradients, which ``dgc`` keeps before the wire, and that of w·p, which no rank needs to send. So the same
    ``momentum`` and ``weight_decay`` as for :class:`torch.optim.SGD` give the same update rule.

    Args:
        params: as for any optimizer.
        lr: the learning rate.
        momentum: the spec's momentum; used for weight decay only.
        weight_decay: as SGD's.
        nesterov: the spec's ``nesterov``.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> optimizer = nb.DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        >>> nb.compress_gradients(model, "dgc:density=0.001,momentum=0.9", optimizer=optimizer)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"lr={lr} and weight_decay={weight_decay} must not be negative, and momentum={momentum} must be in "
                "[0, 1)"
            )
        if nesterov and not momentum:
            raise ValueError("nesterov=True needs a momentum above 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. Returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = tuple(p.grad for p in parameters)
            if not parameters:
                continue
            decay, momentum = group["weight_decay"], group["momentum"]
            if decay:
                decays = torch._foreach_mul(parameters, decay)
                if momentum:
                    for p in parameters:
                        if "decay_velocity" not in self.state[p]:
                            self.state[p]["decay_velocity"] = torch.zeros_like(p)
                    velocities = [self.state[p]["decay_velocity"] for p in parameters]
                    torch._foreach_mul_(velocities, momentum)
                    torch._foreach_add_(velocities, decays)
                    if group["nesterov"]:
                        torch._foreach_add_(decays, velocities, alpha=momentum)
                    else:
                        decays = tuple(velocities)
                gradients = torch._foreach_add(gradients, decays)
            torch._foreach_add_(parameters, gradients, alpha=-group["lr"])
        return loss


def check_steps(optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor]) -> None:
    """Raise an error unless this is the optimizer that steps these parameters, or copies of them in more bits.

    Raises:
        TypeError: no optimizer.
        ValueError: it has none of the parameters.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer= takes the optimizer that steps the model, not {type(optimizer).__name__}")
    trained = [p for p in parameters if p.requires_grad]
    if trained and not _groups_with(optimizer, trained):
        raise ValueError(
            f"optimizer= takes the optimizer that steps the model, but this {type(optimizer).__name__} has none of its "
            "parameters: it was created for another model, or before these parameters were. (fully_shard, "
            "load_state_dict(assign=True) and copies of a model make new ones.) Create the optimizer after that, from "
            "model.parameters()"
        )


def _groups_with(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> list[dict[str, Any]]:
    """Return the optimizer's groups that have any of these parameters.

    Where parameters are in 16 bits, an optimizer may step copies of them in 32 instead. These are told by their number
    of elements, and are taken to be in all groups.
    """
    ours = {id(p): p for p in parameters}
    groups: list[dict[str, Any]] = optimizer.param_groups
    found = [group for group in groups if any(id(p) in ours for p in group["params"])]
    theirs = [p for group in groups for p in group["params"]]
    narrow = all(p.dtype.itemsize == 2 for p in ours.values()) and all(p.dtype.itemsize > 2 for p in theirs)
    if not found and narrow and sum(p.numel() for p in theirs) == sum(p.numel() for p in ours.values()):
        return groups
    return found


def check_momentum(optimizer: torch.optim.Optimizer, method: State | None, parameters: Iterable[torch.Tensor]) -> None:
    """Raise ValueError unless these parameters get the method's momentum exactly once.

    Without a method, or with one without momentum, the optimizer is to apply momentum, which DGCSGD does not.
    """
    applied = 0.0 if method is None else method.momentum
    if not applied and not isinstance(optimizer, DGCSGD):
        return
    for group in _groups_with(optimizer, parameters):
        if isinstance(optimizer, DGCSGD):
            theirs = (group["momentum"], group["nesterov"])
            if not applied and theirs[0]:
                raise ValueError(
                    f"nobody applies momentum to gradients: DGCSGD leaves its momentum={theirs[0]} to a spec such as "
                    "'dgc:density=0.001', and this spec has none; use torch.optim.SGD, or momentum=0"
                )
            if method is not None and theirs != (applied, method.nesterov):
                raise ValueError(
                    f"DGCSGD has momentum={theirs[0]} and nesterov={theirs[1]}, but the spec has "
                    f"momentum={applied} and nesterov={method.nesterov}; give both the same values"
                )
            continue
        momentum = group.get("momentum", group.get("betas", (0.0,))[0])
        if momentum:
            key = "momentum" if "momentum" in group else "betas[0]"
            raise ValueError(
                f"momentum is applied twice: {type(optimizer).__name__} has {key}={momentum}, and dgc applies "
                f"momentum={applied} to gradients before they are sent. Use nb.DGCSGD, which has momentum for "
                f"weight decay only; or set the optimizer's {key} to 0; or write momentum=0 in the spec"
            )
