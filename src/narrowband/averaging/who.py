"""Find out what averages a module's gradients.

There are three possibilities, also in combination:

* a ``DistributedDataParallel`` around the module, perhaps inside ``torch.compile`` (:func:`ddp_of`), or around parts of
  it (:func:`ddps_in`), averages among all of its ranks;
* FSDP2 averages unit by unit (:func:`units_of`), among the ranks of one replica;
* a handle averages a module that is not in DistributedDataParallel (:func:`averaging_of`), among the replicas.

Code that runs several backward passes in a step has to know. A pipeline stage, for example, knows which of its passes
is the last, but not the handle that its user made. So handles are registered here (:func:`remember`). So are handles of
updates (:func:`remember_updates`) and models in CodedDataParallel (:func:`remember_coded`), because the same ranks need
not average twice (:func:`handles_of`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol, cast

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowband.averaging.listening import living

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "AveragesLater",
    "averaged_by",
    "averaging_of",
    "bare",
    "ddp_around",
    "ddp_of",
    "ddps_in",
    "forget",
    "handles_of",
    "is_unit",
    "remember",
    "remember_coded",
    "remember_updates",
    "reshard",
    "shares_with",
    "units_of",
]


class AveragesLater(Protocol):
    """A handle that can average a module's gradients after all passes of a step, not in each pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate and nothing is averaged."""

    def average(self) -> None:
        """Average the accumulated gradients. Call on all ranks, outside of backward and of ``no_sync``."""


def bare(module: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of ``torch.compile``, or the module itself if it has none."""
    return cast("nn.Module", getattr(module, "_orig_mod", module))


def ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """Return the module as DistributedDataParallel, also if it is inside ``torch.compile``; None if it is none.

    Example:
        >>> ddp_of(nn.Linear(2, 2)) is None
        True
    """
    inside = bare(module)
    return inside if isinstance(inside, DistributedDataParallel) else None


def ddps_in(module: nn.Module) -> dict[str, DistributedDataParallel]:
    """Return all DistributedDataParallel modules in a module, at any depth, by name. The module's own name is empty."""
    return {name: each for name, each in module.named_modules() if isinstance(each, DistributedDataParallel)}


def ddp_around() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward pass is running now, if it will average in backward; or None."""
    around: DistributedDataParallel | None = DistributedDataParallel._active_ddp_module
    return around if around is not None and around.require_backward_grad_sync else None


def averaged_by(ddp: DistributedDataParallel) -> list[tuple[str, Tensor]]:
    """Return name and tensor of each parameter whose gradients, if any, go into DDP's buckets, in the model's order:
    all but those that DDP was told to ignore.
    """
    # Names as DDP builds them: the name of a parameter of the outermost module begins with a dot.
    found = {
        p
        for at, module in ddp.module.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if f"{at}.{name}" not in ddp.parameters_to_ignore
    }
    return [(name, p) for name, p in ddp.module.named_parameters() if p in found]


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called with this module itself, which changes the module's class."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def units_of(module: nn.Module) -> list[FSDPModule]:
    """Return the modules that ``fully_shard`` was called with, among a module and all its submodules."""
    return [cast("FSDPModule", each) for each in module.modules() if is_unit(each)]


def reshard(module: nn.Module) -> None:
    """Make FSDP2 hold only shards of a module's parameters, as it does before a forward pass.

    After an evaluation, some units still hold whole parameters, which are other tensors than those that are trained.
    """
    for unit in units_of(module):
        unit.reshard()


#: Every module, or DistributedDataParallel, that has a handle of gradients. Keeps a handle alive as long as its module,
#: even if the user does not keep it.
_handles: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()

#: Every handle of gradients or updates, and every CodedDataParallel → the function or class that made it, its module,
#: and the ranks that average.
_ranks: weakref.WeakKeyDictionary[object, tuple[str, weakref.ref[nn.Module], frozenset[int]]] = (
    weakref.WeakKeyDictionary()
)


def averaging_of(module: nn.Module) -> AveragesLater | None:
    """Return the handle that averages a plain module's gradients, also if the module is inside ``torch.compile``; or
    None.

    Example:
        >>> averaging_of(nn.Linear(2, 2)) is None
        True
    """
    inside = bare(module)
    return None if ddp_of(inside) is not None else cast("AveragesLater | None", _handles.get(inside))


def shares_with(module: nn.Module) -> bool:
    """Whether a handle averages gradients of any of a module's parameters: a handle of the module itself, of a part of
    it, or of a module that contains it, such as a DistributedDataParallel.

    Example:
        >>> shares_with(nn.Linear(2, 2))
        False
    """
    return any(_overlap(module, each) for each in living(_handles))


def handles_of(module: nn.Module) -> Iterator[tuple[str, frozenset[int]]]:
    """Yield, for each handle or CodedDataParallel that averages gradients or updates of any of a module's parameters,
    the function or class that made it, and the ranks that average.

    Example:
        >>> list(handles_of(nn.Linear(2, 2)))
        []
    """
    for handle in living(_ranks):
        found = _ranks.get(handle)  # None if it was forgotten meanwhile
        if found is not None and (other := found[1]()) is not None and _overlap(module, other):
            yield found[0], found[2]


def _overlap(module: nn.Module, other: nn.Module) -> bool:
    """Whether any of a module's trained parameters is averaged with another module, which has a handle."""
    trained = {p for p in _averaged(module) if p.requires_grad}
    return not trained.isdisjoint(_averaged(other))


def _averaged(module: nn.Module) -> Iterable[Tensor]:
    """Return the parameters of which a handle of this module, or DistributedDataParallel, averages the gradients."""
    ddp = ddp_of(module)
    return module.parameters() if ddp is None else [p for _, p in averaged_by(ddp)]


def remember(module: nn.Module, handle: object, group: dist.ProcessGroup) -> None:
    """Register a module's handle of gradients, which averages over the ranks of a group."""
    _handles[module] = handle
    _ranks[handle] = "compress_gradients", weakref.ref(module), frozenset(dist.get_process_group_ranks(group))


def remember_updates(module: nn.Module, handle: object, group: dist.ProcessGroup) -> None:
    """Register a module's handle of updates, which averages over the ranks of a group."""
    _ranks[handle] = "compress_updates", weakref.ref(module), frozenset(dist.get_process_group_ranks(group))


def remember_coded(module: nn.Module, wrapper: object, group: dist.ProcessGroup) -> None:
    """Register a module inside CodedDataParallel, which averages its gradients over the ranks of a group."""
    _ranks[wrapper] = "CodedDataParallel", weakref.ref(module), frozenset(dist.get_process_group_ranks(group))


def forget(module: nn.Module, handle: object) -> None:
    """Unregister a handle of a module, be it one of gradients or of updates."""
    _ranks.pop(handle, None)
    if _handles.get(module) is handle:
        del _handles[module]
