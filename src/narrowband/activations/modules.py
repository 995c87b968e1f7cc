"""A model's modules as a policy sees them: their names, their attention heads, and which backward computes again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from torch import nn

from narrowband.activations.dynamo import compiled_modules, obstacle
from narrowband.activations.policy import ActivationPolicy
from narrowband.errors import UnsupportedError

__all__ = ["Modules"]

#: Attributes by which modules of attention say how many heads they have.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "head_count")
#: Groups of channels in a model without attention.
_GROUPS = 8


class Modules:
    """Modules of a model, under a policy.

    Args:
        model: it.
        policy: names modules by patterns, and may say how many heads there are.

    Attributes:
        names: module → name, as in ``model.named_modules()``, without what ``torch.compile`` adds to it.
        recomputed: modules that backward computes again, the outermost ones.
        default_groups: of channels, where nothing says how many: as many as most modules have heads.

    Raises:
        ValueError: a pattern of the policy matches no module.
        UnsupportedError: the model is compiled in a way that does not go with this policy.
    """

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self._model, self._policy = model, policy
        names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self.names = weakref.WeakKeyDictionary(
            {module: name.removesuffix("_orig_mod").removesuffix(".") for module, name in names.items()}
        )
        policy.check(self.names.values())
        self.recomputed = weakref.WeakSet(self._recomputed(model))
        self.check()
        self._heads: dict[str, int | None] = {}
        own = [heads for heads in map(_own_heads, model.modules()) if heads is not None]
        self.default_groups = max(set(own), key=own.count) if own else _GROUPS

    def _recomputed(self, module: nn.Module) -> Iterator[nn.Module]:
        if self._policy.checkpoints(self.names[module]):
            yield module
            return
        for child in module.children():
            yield from self._recomputed(child)

    def check(self) -> None:
        """Raise UnsupportedError for what cannot be done to this model, which may have been compiled meanwhile."""
        compiled = dict(compiled_modules(self._model))
        reason = obstacle() if compiled else None
        if reason is not None:
            raise UnsupportedError(reason)
        for whole in compiled.values():
            for module in whole.modules():
                if module is not whole and module in self.recomputed:
                    raise UnsupportedError(
                        f"modules: {self.names[module]!r} is to be computed again and lies inside of "
                        f"{self.names[whole] or 'the model'!r}, which is compiled: a graph has no modules. Name the "
                        "compiled module, or compile the modules one by one"
                    )

    def heads(self, name: str) -> int | None:
        """Attention heads of the module of that name, or of the nearest around it that has any."""
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


def _own_heads(module: nn.Module) -> int | None:
    for name in _HEADS:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
