"""Which compiled loops a process asks for, in a process that was forked before it had any."""

from __future__ import annotations

from narrowband.kernels.cpu.cache import LoopCache

__all__ = ["asked_for_from_now"]


def asked_for_from_now() -> list[str]:
    """A list that grows by the name of each loop that is loaded or compiled. Call it on ranks that are ``fresh``."""
    asked: list[str] = []
    load = LoopCache.load_overload

    def noted(self, *types):  # type: ignore[no-untyped-def]
        asked.append(self.name)
        return load(self, *types)

    LoopCache.load_overload = noted  # type: ignore[method-assign]
    return asked
