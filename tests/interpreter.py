"""Makes Triton's interpreter faster, in which its loops run where there is no GPU; what it computes stays the same.

It takes most of its time for what has no effect: with each call of a function it looks at all names of its language
once more, to replace the operations that it has replaced as the launch began; and behind each operation on whole
numbers it computes whether that overflowed, which it only says in a debugging mode.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib.util import find_spec
from typing import Any

__all__ = ["hasten"]


@functools.cache
def hasten() -> None:
    """Do so in this process, from now on; nothing where Triton is not installed."""
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):  # others restore nothing: Triton 3.4 has none
        interpreter._patch_lang = _once(interpreter._patch_lang, interpreter._LangPatchScope)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


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
