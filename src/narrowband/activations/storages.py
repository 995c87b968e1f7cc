"""The storages that a forward pass's tensors lie in, and what is known about each.

Many tensors that a pass saves share memory: views, a tensor that several operators save, results written in place. So
bytes are counted, and values packed, once per storage and not once per tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from narrowband.activations.layout import Arrangement
from narrowband.activations.packed import Exact, Payload, Place
from narrowband.activations.recompute import Recipe

__all__ = [
    "Storage",
    "Storages",
    "base_of",
    "has_codes_of",
    "is_cast_of",
    "is_expanded",
    "is_of_a_parameter",
    "is_plain",
    "is_strided",
    "tensors_in",
    "values_of",
]


# Weak references to storages, as torch.multiprocessing's StorageWeakRef has them.
_UNTYPED: Any = torch.UntypedStorage
_weak_ref, _is_expired, _free_weak_ref = _UNTYPED._weak_ref, _UNTYPED._expired, _UNTYPED._free_weak_ref
#: Whether a tensor is a functorch wrapper around another one.
_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


class Storage:
    """What is known about one storage. During a pass it may be freed, and its address used again.

    Args:
        reference: a weak reference to the storage, which belongs to :class:`Storages`.

    Attributes:
        lives: whether the storage lives anyway, as those of parameters and the model's inputs do.
        counted: whether its bytes have been counted.
        place: operator and module that they were counted for, where a saved tensor was.
        exact: the tensor by which the whole storage is kept unchanged, if there is one.
        payloads: key of :func:`values_of` → codes. None for most storages, which have none.
        recipes: likewise, how to recompute tensors.
        spent: bytes of the codes that were made of values in it.
    """

    # Attributes of the class: a pass makes thousands of storages, and sets few attributes of each.
    lives = counted = False
    place: Place | None = None
    exact: weakref.ref[Exact] | None = None
    payloads: dict[tuple[Any, ...], weakref.ref[Payload]] | None = None
    recipes: dict[tuple[Any, ...], Recipe] | None = None
    spent = 0

    def __init__(self, reference: int) -> None:
        self.reference = reference

    @property
    def is_exact(self) -> bool:
        """Whether the whole storage is kept unchanged."""
        return self.exact is not None and self.exact() is not None

    def payload(self, values: tuple[Any, ...]) -> Payload | None:
        """Return the codes of these values; None where there are none, or nothing keeps them any more."""
        found = None if self.payloads is None else self.payloads.get(values)
        return None if found is None else found()

    def has_payload(self, values: tuple[Any, ...], payload: Payload) -> None:
        """Note the codes of these values."""
        self.payloads = self.payloads or {}
        self.payloads[values] = weakref.ref(payload)

    def recipe(self, values: tuple[Any, ...]) -> Recipe | None:
        """Return how to recompute these values; None where that is not known."""
        return None if self.recipes is None else self.recipes.get(values)

    def has_recipe(self, values: tuple[Any, ...], recipe: Recipe) -> None:
        """Note how to recompute these values."""
        self.recipes = self.recipes or {}
        self.recipes[values] = recipe

    def count(self, nbytes: int) -> int:
        """Mark the storage as counted. Return ``nbytes`` the first time, and 0 from then on."""
        counted, self.counted = self.counted, True
        return 0 if counted else nbytes

    def recount(self, nbytes: int, before: Place, after: Place) -> tuple[int, int]:
        """Count the storage for ``after`` if it was counted for ``before``; return its raw bytes, and those kept."""
        exact, raw, kept = None if self.exact is None else self.exact(), 0, 0
        if self.place == before:
            raw, self.place = nbytes, after
        if exact is not None and exact.place == before:
            kept, exact.place = nbytes, after
        return raw, kept


class Storages:
    """The storages of a pass.

    Example:
        >>> storages, x = Storages(), torch.zeros(4, 4)
        >>> storages.of(x) is storages.of(x.T)
        True
    """

    def __init__(self) -> None:
        self._by_address: dict[int, Storage] = {}
        #: Of storages that live anyway and that nobody has asked for yet, most of which nobody will: weak references.
        self._living: dict[int, int] = {}

    def of(self, x: Tensor) -> Storage:
        """Return the storage that a tensor lies in."""
        return self.at(x.untyped_storage())

    def at(self, memory: torch.UntypedStorage) -> Storage:
        """Return what is known about a tensor's ``untyped_storage()``."""
        address = memory._cdata
        found = self._by_address.get(address)
        if found is not None and not _is_expired(found.reference):
            return found
        if found is not None:
            _free_weak_ref(found.reference)
        living = self._living.pop(address, None)
        if living is not None and _is_expired(living):
            _free_weak_ref(living)
            living = None
        new = self._by_address[address] = Storage(_weak_ref(memory) if living is None else living)
        if living is not None:
            new.lives = new.counted = True
        return new

    def __del__(self, _free: Callable[[int], None] = _free_weak_ref) -> None:
        # bound as a default argument, since a process that exits clears modules first
        for storage in self._by_address.values():
            _free(storage.reference)
        for reference in self._living.values():
            _free(reference)

    def live(self, tensors: Iterable[Any]) -> None:
        """Note that tensors live anyway and need not be counted. Skip other objects, and tensors without memory."""
        known, living = self._by_address, self._living
        for x in tensors:
            usual = type(x) is nn.Parameter or type(x) is Tensor
            if (usual or (isinstance(x, Tensor) and not is_lazy(x))) and is_strided(x):
                there = x.untyped_storage()
                address = there._cdata
                if address in known:
                    storage = self.of(x)
                    storage.lives = storage.counted = True
                elif address not in living:
                    living[address] = _weak_ref(there)
                elif _is_expired(living[address]):
                    _free_weak_ref(living[address])
                    living[address] = _weak_ref(there)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results: in containers that PyTorch knows, and in attributes of other objects.

    Batches and outputs are often objects, such as dataclasses, or dictionaries of a class of their own.

    Example:
        >>> class Batch: ...
        >>> batch = Batch()
        >>> batch.x = torch.zeros(2)
        >>> [len(x) for x in tensors_in(([batch, torch.ones(3)], 0.1))]
        [3, 2]
    """
    found, seen, left = [], set(), [(leaf, _DEEPEST) for leaf in tree_leaves(tree)]
    for leaf, depth in left:  # grows
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and not isinstance(leaf, _NO_DATA) and id(leaf) not in seen:
            seen.add(id(leaf))
            own = [*getattr(leaf, "__dict__", {}).values()]
            own += [getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ())]
            left += [(each, depth - 1) for each in tree_leaves(own)]
    return found


#: How many objects deep to look for tensors.
_DEEPEST = 3
#: What holds no batch and no output: numbers, strings, code, and models.
_NO_DATA = (type(None), bool, int, float, str, bytes, type, FunctionType, ModuleType, nn.Module)


# ---- what a tensor is ------------------------------------------------------------------------------------------------


def values_of(x: Tensor, arrangement: Arrangement) -> tuple[Any, ...]:
    """Return a key for the values that a tensor has in its storage, the same for every shape of them."""
    return x.storage_offset(), x._version, x.dtype, x.numel() if arrangement.without_gaps else (x.shape, x.stride())


def base_of(x: Tensor) -> Tensor:
    """Return the tensor that x is a view of, or x itself."""
    base = x._base
    return x if base is None else base


def is_strided(x: Tensor) -> bool:
    """Whether the tensor has memory with strides: it is not sparse, nested or a functorch wrapper."""
    return x.layout is torch.strided and not x.is_nested and not _is_wrapped(x)


def is_plain(x: Tensor) -> bool:
    """Whether codes can be made of a tensor: it is strided, has dimensions, and a dtype that kernels take."""
    return is_strided(x) and has_codes_of(x.dtype, x.dim()) and not (x.is_meta or x.is_neg() or x.is_inference())


def has_codes_of(dtype: torch.dtype, dim: int) -> bool:
    """Whether codes can be made of strided tensors of this dtype and number of dimensions."""
    return dtype in _FLOATING and dim > 0


_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def is_expanded(x: Tensor) -> bool:
    """Whether elements share memory, as far as strides tell."""
    reach = 0  # the span in memory of the dimensions with smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def is_of_a_parameter(x: Tensor) -> bool:
    """Whether the tensor is a parameter, or a view of one."""
    base = base_of(x)
    return type(base) is not Tensor and isinstance(base, nn.Parameter)  # isinstance is slow here: it asks a metaclass


def is_cast_of(x: Tensor, arrangement: Arrangement, parameter: Tensor) -> bool:
    """Whether a tensor's memory has the parameter's values in the same order, in another dtype."""
    base = base_of(x)
    node = base.grad_fn  # None where the parameter is frozen; parameter_before_cast has compared values then
    direct = node is None or getattr(node.next_functions[0][0], "variable", None) is parameter
    return (
        direct
        and x._version == 0
        and arrangement.without_gaps
        and (x.numel(), x.storage_offset()) == (base.numel(), base.storage_offset())
        and (base.shape, base.stride()) == (parameter.shape, parameter.stride())
        and Arrangement.of(parameter).without_gaps
    )
