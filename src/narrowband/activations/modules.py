"""A model's modules under a policy: their names, their attention heads, and which of them backward recomputes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from narrowband.activations.dynamo import compiled_modules, is_compiled_itself, modules_of, obstacle
from narrowband.activations.packed import Place
from narrowband.activations.policy import ActivationPolicy, Bits
from narrowband.errors import UnsupportedError

__all__ = ["Modules"]

#: Attributes in which attention modules keep their number of heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "head_count")
#: The number of groups of channels in a model without attention.
_GROUPS = 8


class Modules:
    """The modules of a model, under a policy.

    Args:
        model: the model.
        policy: has patterns of module names, and may set the number of heads.

    Attributes:
        recomputed: the outermost modules that backward recomputes.
        default_groups: the number of groups of channels where nothing else sets it: the most common number of heads.
        casts: where a frozen parameter in the dtype of autocast is saved; see :meth:`Call.parameter_before_cast`.

    Raises:
        ValueError: a pattern of the policy matches no module.
        UnsupportedError: the model is compiled in a way that this policy cannot be combined with.
    """

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self._model, self._policy = model, policy
        #: By id of the module, for a fast look-up. The reference tells whether the id now belongs to another module.
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        for name, module in model.named_modules():
            plain = name.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")
            self._names[id(module)] = weakref.ref(module), plain
        policy.check(self.names)
        self.recomputed = weakref.WeakSet(self._recomputed(model))
        self.check()
        self._heads: dict[str, int | None] = {}
        self._bits: dict[Place, Bits] = {}
        self._norms: dict[str, Place | None] = {}
        self.casts: set[Any] = set()
        #: Tensors in attributes of modules, without being registered, such as tables of positions.
        self._constants = [
            weakref.ref(tensor)
            for module in modules_of(model)
            for value in vars(module).values()
            for tensor in _tensors_in(value)
            if not tensor.requires_grad
        ]
        own = [heads for heads in map(_own_heads, model.modules()) if heads is not None]
        self.default_groups = max(set(own), key=own.count) if own else _GROUPS

    @property
    def names(self) -> list[str]:
        """Names as in ``model.named_modules()``, without the ``_orig_mod`` of ``torch.compile``."""
        return [name for _, name in self._names.values()]

    def name_of(self, module: nn.Module) -> str | None:
        """Return the name of a module; None where it does not belong to the model."""
        found = self._names.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def _recomputed(self, module: nn.Module) -> Iterator[nn.Module]:
        if self._policy.checkpoints(self.name_of(module) or ""):
            yield module
            return
        for child in module.children():
            yield from self._recomputed(child)

    def walk(self) -> list[nn.Module]:
        """Return all modules as they are now. Every pass asks once, since a model may change at any time."""
        return list(modules_of(self._model))

    def check(self, modules: list[nn.Module] | None = None) -> list[nn.Module]:
        """Return the outermost compiled modules. Called for every pass, since a model may be compiled at any time.

        Args:
            modules: the result of :meth:`walk`, where the caller has it.

        Raises:
            UnsupportedError: the compiled modules cannot be handled.
        """
        if modules is not None and not any(map(is_compiled_itself, modules)):
            return []
        compiled = compiled_modules(self._model)
        reason = obstacle() if compiled else None
        if reason is not None:
            raise UnsupportedError(reason)
        for whole in compiled:
            for module in whole.modules():
                if module is not whole and module in self.recomputed:
                    raise UnsupportedError(
                        f"modules: {self.name_of(module)!r} cannot be recomputed: it lies inside "
                        f"{self.name_of(whole) or 'the model'!r}, which is compiled, and a compiled graph has no "
                        "modules. Name the compiled module, or compile the modules one by one"
                    )
        return compiled

    def bits(self, place: Place) -> Bits:
        """Return the bits for the tensors that an operator saves in a module."""
        found = self._bits.get(place)
        if found is None:
            found = self._bits[place] = self._policy.bits_for(*place)
        return found

    def norm(self, module: str) -> Place | None:
        """Return the place that RMS norms count for which a module writes out; None where they count as "other"."""
        if module not in self._norms:
            self._norms[module] = ("layer_norm", module) if self._policy.counts_as_norm(module) else None
        return self._norms[module]

    def tensors(self, modules: list[nn.Module]) -> Iterator[Any]:
        """Yield the parameters and buffers of modules, the model's constants, and None for those that do not exist."""
        for module in modules:
            if module._parameters:
                yield from module._parameters.values()
            if module._buffers:
                yield from module._buffers.values()
        for constant in self._constants:
            yield constant()

    def heads(self, name: str) -> int | None:
        """Return the number of attention heads of the named module, or of the nearest module around it that has any."""
        if self._policy.heads is not None:
            return self._policy.heads
        if name not in self._heads:
            found, around = None, name
            while found is None:
                with contextlib.suppress(AttributeError):
                    found = _own_heads(self._model.get_submodule(around))
                if not around:
                    break
                around = around.rpartition(".")[0]
            self._heads[name] = found
        return self._heads[name]


def _tensors_in(value: Any) -> Iterable[Tensor]:
    """Return an attribute that is a tensor, or the tensors in one that is a list, tuple or dictionary."""
    if isinstance(value, Tensor):
        return (value,)
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [each for each in held if type(each) is Tensor]  # isinstance is slow here, and lists may be long


def _own_heads(module: nn.Module) -> int | None:
    for name in _HEADS:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
