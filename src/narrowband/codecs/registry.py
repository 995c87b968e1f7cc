"""The names that spec strings may use: those of narrowband, and those that other packages bring.

A class is registered by a call (``nb.register_codec``), or by an entry point of an installed package. Entry points are
read when a spec string holds a name that is not registered yet, and when all names are listed. A package that fails to
load does not disturb the others: a warning names it, and so does the error of a spec string that needs it.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Registry"]

log = logging.getLogger("narrowband")

T = TypeVar("T")

#: What a name may be, so that a spec string can be read.
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


class Registry(Generic[T]):
    """Classes by their name in a spec string.

    Args:
        what: the word for them in messages ("codec").
        group: the entry points' group.
        base: the class that they derive from.
        kinds: those that narrowband has itself, in the order of the documentation.
    """

    def __init__(self, what: str, group: str, base: type[T], kinds: Iterable[type[T]]) -> None:
        self._what, self._group, self._base = what, group, base
        self._kinds: dict[str, type[T]] = {}
        #: Entry point → why it could not be loaded.
        self._broken: dict[str, str] = {}
        self._loaded = False
        self._lock = threading.RLock()
        for kind in kinds:
            self.register(kind)

    def register(self, kind: type[T]) -> type[T]:
        """Let spec strings use ``kind.name``; returns ``kind``, so it can be a decorator.

        Raises:
            TypeError: no dataclass, or not derived from the base class.
            ValueError: no name, one that a spec string cannot hold, or one that another class has.
        """
        candidate: Any = kind  # of another package, which nobody may have checked
        if not (isinstance(candidate, type) and issubclass(candidate, self._base) and is_dataclass(candidate)):
            raise TypeError(f"a {self._what} is a dataclass that derives from {self._base.__name__}, not {kind!r}")
        name: Any = getattr(kind, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{kind.__qualname__}.name is {name!r}: a name in a spec string begins with a lower-case letter, and "
                "goes on with those, digits, '_', '-' and '.'"
            )
        with self._lock:
            there = self._kinds.setdefault(name, kind)
        if there is not kind:
            raise ValueError(
                f"the {self._what} {name!r} is there already: {there.__module__}.{there.__qualname__}; choose another "
                f"name for {kind.__module__}.{kind.__qualname__}"
            )
        return kind

    def all(self) -> dict[str, type[T]]:
        """Every class by its name: narrowband's own first, then others in the order in which they were registered."""
        self._load()
        return dict(self._kinds)

    def find(self, name: str) -> type[T] | None:
        """The class of this name, or None.

        Raises:
            ValueError: an installed package brings one, and it could not be loaded.
        """
        if name not in self._kinds:
            self._load()
            if name in self._broken:
                raise ValueError(self._broken[name])
        return self._kinds.get(name)

    def _load(self) -> None:
        """Register what installed packages bring."""
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
            for point in entry_points(group=self._group):
                try:
                    kind = point.load()
                    if getattr(kind, "name", point.name) != point.name:
                        raise ValueError(f"its class calls itself {kind.name!r}")
                    self.register(kind)
                except Exception as error:
                    package = point.dist.name if point.dist is not None else point.value
                    self._broken[point.name] = (
                        f"the {self._what} {point.name!r} of the package {package!r} could not be loaded "
                        f"({type(error).__name__}: {error}); repair or uninstall that package"
                    )
                    log.warning("%s", self._broken[point.name])
