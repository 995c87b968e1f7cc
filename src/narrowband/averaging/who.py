"""Who averages a module's gradients: the one place where that is asked.

Three may do so, also together:

* a ``DistributedDataParallel`` around the module, with or without ``torch.compile`` around that (:func:`ddp_of`), or
  around parts of it (:func:`ddps_in`): among all of its ranks;
* FSDP2, unit by unit (:func:`units_of`): among the ranks of one replica;
* a handle of a module that neither does that for (:func:`averaging_of`): among the replicas.

Who runs several backward passes in a step has to ask. A stage of a pipeline is such a one: it knows which of its passes
is the last, and cannot know the handle that its user made. So such a handle is found here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "AveragesLater",
    "averaged_by",
    "averaging_of",
    "bare",
    "ddp_of",
    "ddps_in",
    "forget",
    "is_unit",
    "remember",
    "shares_with",
    "units_of",
]


class AveragesLater(Protocol):
    """A handle that can wait with a module's gradients until all passes of a step are done."""

    def no_sync(self) -> AbstractContextManager[None]:
        """In this context gradients add up, and nothing is averaged."""

    def average(self) -> None:
        """Gradients that have added up become their averages; on all ranks, outside of backward and of ``no_sync``."""


def bare(module: nn.Module) -> nn.Module:
    """A module without the wrapper that ``torch.compile`` made of it."""
    return cast("nn.Module", getattr(module, "_orig_mod", module))


def ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a module is; None where it is none. ``torch.compile`` is seen through.

    Example:
        >>> ddp_of(nn.Linear(2, 2)) is None
        True
    """
    inside = bare(module)
    return inside if isinstance(inside, DistributedDataParallel) else None


def ddps_in(module: nn.Module) -> dict[str, DistributedDataParallel]:
    """All that a module is or holds, whatever is around them, by name; its own name is empty."""
    return {name: each for name, each in module.named_modules() if isinstance(each, DistributedDataParallel)}


def averaged_by(ddp: DistributedDataParallel) -> list[tuple[str, Tensor]]:
    """Name and tensor of each parameter whose gradients, if it has any, go into DDP's buckets, in the model's order.
    These are all but those that it was told to ignore.
    """
    # As it looks for them: the name of a parameter of the outermost module begins with a dot there.
    found = {
        p
        for at, module in ddp.module.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if f"{at}.{name}" not in ddp.parameters_to_ignore
    }
    return [(name, p) for name, p in ddp.module.named_parameters() if p in found]


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called with this very module, which makes it one of another class."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def units_of(module: nn.Module) -> list[FSDPModule]:
    """The modules that ``fully_shard`` was called with, of a module and all in it."""
    return [cast("FSDPModule", each) for each in module.modules() if is_unit(each)]


#: A handle lives as long as its module, whether or not anybody has kept it.
_handles: weakref.WeakKeyDictionary[nn.Module, AveragesLater] = weakref.WeakKeyDictionary()


def averaging_of(module: nn.Module) -> AveragesLater | None:
    """The handle that averages a module's gradients; None where there is none. ``torch.compile`` is seen through.

    Example:
        >>> averaging_of(nn.Linear(2, 2)) is None
        True
    """
    return _handles.get(bare(module))


def shares_with(module: nn.Module) -> bool:
    """Whether a handle averages gradients of a module's parameters: its own, that of a part, or of what it is part of.

    Example:
        >>> shares_with(nn.Linear(2, 2))
        False
    """
    trained = {p for p in module.parameters() if p.requires_grad}
    return any(not trained.isdisjoint(each.parameters()) for each in list(_handles))


def remember(module: nn.Module, handle: AveragesLater) -> None:
    """From now on a module has this handle."""
    _handles[module] = handle


def forget(module: nn.Module, handle: AveragesLater) -> None:
    """It has it no longer, if it had it."""
    if _handles.get(module) is handle:
        del _handles[module]
