"""Save handles in checkpoints of ``torch.distributed.checkpoint`` (DCP).

DCP takes values that several ranks have under one name for equal, and writes them once. But a handle's state differs by
rank. So it gets a name of its own on each rank. It is a single bytes value, which DCP does not look into.
"""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

__all__ = ["Saved", "states_in"]


class Handle(Protocol):
    """What this module needs of a handle."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that average."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""


class Saved:
    """A handle as DCP saves and loads it (``torch.distributed.checkpoint.stateful.Stateful``).

    Args:
        handle: the handle.
        look: called before a state is returned.
    """

    def __init__(self, handle: Handle, look: Callable[[], None] = lambda: None) -> None:
        self._handle, self._look = handle, look

    def state_dict(self) -> dict[str, bytes]:
        """Return this rank's state, under a name of its own."""
        self._look()
        written = io.BytesIO()
        torch.save(self._handle.state_dict(), written)
        return {_name(self._handle): written.getvalue()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Resume from this rank's state. Call on all ranks.

        Raises:
            ValueError: on all ranks: some rank's state is missing, or does not fit.
        """
        name = _name(self._handle)
        self._handle.load_state_dict(_read(state[name]) if name in state else state)  # which tells all ranks


def states_in(folder: str | PathLike[str], key: str, handle: Handle) -> list[dict[str, Any]]:
    """Read the states of all ranks that averaged what this rank averages, in the order of ranks.

    Args:
        folder: the checkpoint that ``dcp.save`` wrote.
        key: the handle's name there.
        handle: the handle that will load them.

    Raises:
        FileNotFoundError: the folder has no checkpoint.
        ValueError: there are none.
    """
    reader = dcp.FileSystemReader(folder)  # type: ignore[attr-defined]
    shard = _name(handle).partition("-")[0]
    found, others = {}, set()
    try:
        saved = reader.read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} has no checkpoint that torch.distributed.checkpoint.save has finished: {error}"
        ) from None
    for name in saved:
        place = re.fullmatch(rf"{re.escape(key)}\.(shard\d+)-rank(\d+)", name)
        if place is not None and place[1] == shard:
            found[int(place[2])] = name
        elif place is not None:
            others.add(place[1])
    if not found and others:
        raise ValueError(
            f"{folder} has states of {key!r} for {', '.join(sorted(others))}, but none for {shard}, which this rank "
            "needs: load with as many ranks per replica, or per machine, as when the checkpoint was saved"
        )
    if not found:
        raise ValueError(f"{folder} has no state of {key!r}: save handle.stateful under that name")
    states: dict[str, Any] = dict.fromkeys(found.values(), b"")
    with warnings.catch_warnings():  # DCP warns that it runs without a process group
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(states, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]
    return [_read(states[found[rank]]) for rank in sorted(found)]


def _name(handle: Handle) -> str:
    """Return the name of this rank's state: ``shardS-rankR``, with the same S for all ranks that average together."""
    group = handle.process_group
    ranks = dist.get_process_group_ranks(cast("dist.ProcessGroup", group))
    return f"shard{min(ranks)}-rank{dist.get_rank(group)}"


def _read(written: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", torch.load(io.BytesIO(written), weights_only=True))
