"""Makes Triton's interpreter faster, in which its loops run where there is no GPU; what it computes stays the same.

It takes most of its time for what has no effect: with each call of a function it looks at all names of its language
once more, to replace the operations that it has replaced as the launch began; behind each operation on whole numbers it
computes whether that overflowed, which it only says in a debugging mode; and each value gets a type and a shape of its
own, made and checked anew, although there are only a few.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from importlib.util import find_spec
from typing import Any

__all__ = ["hasten"]


@functools.cache
def hasten() -> None:
    """Do so in this process, from now on; nothing where Triton is not installed."""
    if find_spec("triton") is None:
        return
    from triton import language
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):  # others restore nothing: Triton 3.4 has none
        interpreter._patch_lang = _once(interpreter._patch_lang, interpreter._LangPatchScope)
        interpreter._patch_builtin = _known(interpreter._patch_attr, language.core.is_builtin)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    language.block_type.__init__ = _same_types(language.block_type.__init__, language.constexpr)
    language.tensor.__init__ = _same_shapes(language.tensor.__init__)
    TritonSemantic.broadcast_impl_value = _unless_alike(TritonSemantic.broadcast_impl_value)


def _once(patch_lang: Any, empty: Any) -> Any:
    """Replace operations once in each launch and for each file of loops, rather than with each call of a function."""
    replaced: set[int] = set()  # ids of what files have as their globals

    def patch(function: Any) -> Any:
        scope = empty()
        if id(function.__globals__) not in replaced:
            scope = patch_lang(function)
            replaced.add(id(function.__globals__))
            restore = scope.restore

            def forget() -> None:
                replaced.clear()
                restore()

            scope.restore = forget
        return scope

    return patch


def _known(patch_attr: Any, is_builtin: Any) -> Any:
    """Find a module's or a class's operations once, rather than in each launch."""
    operations: dict[Any, list[tuple[str, Any]]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in operations:  # the first launch sees none that is replaced already
            operations[package] = [pair for pair in inspect.getmembers(package) if is_builtin(pair[1])]
        for name, operation in operations[package]:
            if getattr(package, name) is operation:  # unless another file's loops have replaced it in this launch
                patch_attr(package, name, operation, builder, scope)

    return patch


def _by_name(np_dtype_of: Any) -> Any:
    """Look a type of NumPy up, rather than making the table of all of them with each look."""
    known: dict[str, Any] = {}

    def find(tt_dtype: Any) -> Any:
        if tt_dtype.name not in known:
            known[tt_dtype.name] = np_dtype_of(tt_dtype)
        return known[tt_dtype.name]

    return find


def _same_types(init: Any, constexpr: Any) -> Any:
    """Check the shape of a type of blocks once, rather than for each value of that type."""
    known: dict[Any, dict[str, Any]] = {}

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(size.value if isinstance(size, constexpr) else size for size in shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    return make


def _same_shapes(init: Any) -> Any:
    """Give values of one type the same shape, rather than one each."""
    known: dict[str, tuple[Any, Any]] = {}

    def make(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  Triton calls it so
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[type.name]

    return make


def _unless_alike(broadcast: Any) -> Any:
    """Look for a shape that suits two values only where they have not the same."""

    def same(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:
            return left, right
        return broadcast(self, left, right)

    return same
