"""The names that spec strings may use: narrowband's own, and those that other packages provide.

A class is registered by a call (``nb.register_codec``) or by an entry point of an installed package. Entry points are
read when a spec string has a name that is not registered yet, and when all names are listed. A package that fails to
load does not affect the others: a warning names it, and so does the error for a spec string that needs it.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_origin, get_type_hints

from narrowband.codecs.spec import KEY_TYPES, keys_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Registry"]

log = logging.getLogger("narrowband")

T = TypeVar("T")

#: The names that can be parsed in a spec string.
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


class Registry(Generic[T]):
    """Classes by their name in a spec string.

    Args:
        what: the word for them in messages ("codec").
        group: the group of entry points to read.
        base: the class that all registered classes derive from.
        kinds: narrowband's own classes, in the order of the documentation.
    """

    def __init__(self, what: str, group: str, base: type[T], kinds: Iterable[type[T]]) -> None:
        self._what, self._group, self._base = what, group, base
        self._kinds: dict[str, type[T]] = {}
        #: Name of an entry point → the error message why it could not be loaded.
        self._broken: dict[str, str] = {}
        self._loaded = False
        self._lock = threading.RLock()
        for kind in kinds:
            self.register(kind)

    def register(self, kind: type[T]) -> type[T]:
        """Let spec strings use ``kind.name``; returns ``kind``, so it can be a decorator.

        Raises:
            TypeError: ``kind`` is not a dataclass of its own, does not derive from the base class, has no hash, or has
                a field of a type that a spec string cannot hold.
            ValueError: ``kind`` has no name, a name that a spec string cannot hold, or the name of another class.
        """
        candidate: Any = kind  # may come from another package, with types unchecked
        if not (isinstance(candidate, type) and issubclass(candidate, self._base) and is_dataclass(candidate)):
            raise TypeError(
                f"expected a dataclass that derives from {self._base.__name__} as a {self._what}, got {kind!r}; write "
                f"@dataclass(frozen=True) above the class, and {self._base.__name__} behind its name"
            )
        name: Any = getattr(kind, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{kind.__qualname__}.name is {name!r}; a name in a spec string must begin with a lower-case letter, "
                "and may then have lower-case letters, digits, '_', '-' and '.'"
            )
        _check_fields(kind)
        with self._lock:
            there = self._kinds.setdefault(name, kind)
        if there is not kind:
            raise ValueError(
                f"the name {name!r} is taken by the {self._what} {there.__module__}.{there.__qualname__}; choose "
                f"another name for {kind.__module__}.{kind.__qualname__}"
            )
        return kind

    def all(self) -> dict[str, type[T]]:
        """Return every class by its name: narrowband's own first, then others in the order of registration."""
        self._load()
        return dict(self._kinds)

    def find(self, name: str) -> type[T] | None:
        """Return the class of this name, or None.

        Raises:
            ValueError: an installed package provides a class of this name, but it could not be loaded.
        """
        if name not in self._kinds:
            self._load()
            if name in self._broken:
                raise ValueError(self._broken[name])
        return self._kinds.get(name)

    def _load(self) -> None:
        """Register the classes that installed packages provide, once."""
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
            for point in entry_points(group=self._group):
                try:
                    kind = point.load()
                    if getattr(kind, "name", point.name) != point.name:
                        raise ValueError(
                            f"the entry point is named {point.name!r}, but its class has the name {kind.name!r}"
                        )
                    self.register(kind)
                except Exception as error:
                    package = point.dist.name if point.dist is not None else point.value
                    self._broken[point.name] = (
                        f"the {self._what} {point.name!r} of the package {package!r} could not be loaded "
                        f"({type(error).__name__}: {error}); repair or uninstall that package"
                    )
                    log.warning("%s", self._broken[point.name])


def _check_fields(kind: type) -> None:
    """Check that every instance has a hash, and that a spec string can set every field.

    Raises:
        TypeError: not so.
    """
    where = kind.__qualname__
    if kind.__hash__ is None:
        raise TypeError(f"{where} has no hash, which caches need; write @dataclass(frozen=True) above it")
    hints = get_type_hints(kind)
    of_class = {name for name, hint in hints.items() if ClassVar in (hint, get_origin(hint))}
    if lost := get_annotations(kind).keys() - of_class - {field.name for field in fields(kind)}:
        raise TypeError(
            f"{where}.{min(lost)} is no field, since {where} is not a dataclass of its own; write "
            f"@dataclass(frozen=True) above it"
        )
    for key in keys_of(kind):
        if hints[key.name] not in KEY_TYPES and get_origin(hints[key.name]) is not Literal:
            raise TypeError(
                f"{where}.{key.name} is annotated as {key.type}, and a spec string holds int, float, bool, str or a "
                "Literal of strings; use one of these, or field(init=False) for what is no key"
            )
