"""Save and load every rank's compression state in a trainer's checkpoint.

Each rank has residuals of its own, but trainers let only rank 0 write. If a checkpoint is a folder, every rank puts a
file of its own into it (:func:`write`). If it is one file, the other ranks send their states to rank 0
(:func:`gather`). In both cases, ranks tell each other what they have found before any of them loads it (:func:`load`);
otherwise a rank that found nothing would leave the others waiting.

A handle that was removed has no state. Its trainer goes on with its own checkpoints, in which nothing is saved for the
handle and from which nothing is loaded.
"""

from __future__ import annotations

import io
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from narrowband.files import whole
from narrowband.units import counted

if TYPE_CHECKING:
    from narrowband.integrations.replica import Saves

__all__ = ["Torn", "gather", "load", "read", "write"]

log = logging.getLogger(__name__)

State = Mapping[str, Any]


# ---- a checkpoint that is a folder -----------------------------------------------------------------------------------


def write(handle: Saves, folder: str | os.PathLike[str], name: str = "narrowband") -> Path | None:
    """Write this rank's state into a folder, such as ``narrowband-rank0-of-2.pt``. Call on all ranks, between steps.

    The file is written atomically. Files that a former run with another number of ranks left in the folder are deleted.
    If the handle was removed, this rank's file is deleted, too.

    Returns:
        The file's path; None if the handle was removed.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(folder)
    path = folder / f"{name}-rank{rank}-of-{size}.pt"
    has_state = _has_state(handle)
    if has_state:
        with whole(path) as file:
            torch.save(handle.state_dict(), file)
    else:
        path.unlink(missing_ok=True)
    for other in folder.glob(f"{name}-rank*-of-*.pt"):
        if not other.stem.endswith(f"-of-{size}"):
            other.unlink(missing_ok=True)
    return path if has_state else None


@dataclass(frozen=True)
class Torn:
    """Stands for a state that could not be read, so that :func:`load` can report it to all ranks.

    Attributes:
        why: the file's name, and what is wrong with it.
    """

    why: str


def read(folder: str | os.PathLike[str], name: str = "narrowband") -> State | list[State] | Torn:
    """Read this rank's state from a folder; or a list with the states of all ranks, if their number was another one; or
    an empty list.
    """
    folder = Path(folder)
    own = folder / f"{name}-rank{dist.get_rank()}-of-{dist.get_world_size()}.pt"
    file = own
    try:
        if own.is_file():
            return _read(own)
        files = sorted(folder.glob(f"{name}-rank*-of-*.pt"))
        if any(file.stem.endswith(f"-of-{dist.get_world_size()}") for file in files):
            return []
        found = []
        for file in files:
            found.append(_read(file))
        return found
    except Exception as error:  # PyTorch raises many kinds for a truncated file
        return Torn(f"{file.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


# ---- a checkpoint that is one file -----------------------------------------------------------------------------------


def gather(handle: Saves) -> list[State]:
    """Collect the states of all ranks on rank 0, in the order of ranks; an empty list on the others. Call on all ranks.

    They are sent one after the other, so that no device has to hold more than one of them beside its own. If the handle
    was removed, the list is empty on rank 0, too.
    """
    if not _has_state(handle):
        return []
    stream = io.BytesIO()
    torch.save(handle.state_dict(), stream)
    written: list[Any] = [stream.getvalue()]
    if dist.get_rank():
        dist.send_object_list(written, dst=0)
        return []
    states = [_read(io.BytesIO(written[0]))]  # a copy, since it may be saved later
    for source in range(1, dist.get_world_size()):
        dist.recv_object_list(written, src=source)
        states.append(_read(io.BytesIO(written[0])))
    return states


# ---- both ------------------------------------------------------------------------------------------------------------


def load(handle: Saves, found: State | Sequence[State] | Torn, where: str, *, strict: bool) -> None:
    """Resume from what this rank has found in a checkpoint. Call on all ranks.

    Args:
        handle: the handle to load into. If it was removed, nothing is loaded.
        found: in the form that :func:`read` returns: this rank's state; or the states of all former ranks, if their
            number was another one; or an empty list; or :class:`Torn`.
        where: the checkpoint, for messages.
        strict: whether every rank needs a state of its own. Otherwise residuals of another number of ranks are shared
            out, and without any state residuals begin empty.

    Raises:
        ValueError: a state that cannot be read or that only some ranks have; with ``strict``, also no state, or states
            of another number of ranks. Raised on all ranks.
    """
    if not _has_state(handle):
        return
    of_all: list[Any] = [None] * handle.size
    mine = found.why if isinstance(found, Torn) else -1 if isinstance(found, Mapping) else len(found)
    dist.all_gather_object(of_all, mine, group=handle.process_group)
    if torn := next((why for why in of_all if isinstance(why, str)), ""):
        raise ValueError(f"{where} has a state of compression that cannot be read ({torn}); load an earlier checkpoint")
    assert not isinstance(found, Torn)
    if set(of_all) == {-1}:
        handle.load_state_dict(found)
        return
    if len(set(of_all)) > 1:
        lacking = ", ".join(str(rank) for rank, count in enumerate(of_all) if count != -1)
        raise ValueError(f"{where} is incomplete: it has states of compression, but none for rank {lacking}")
    if not found:
        what, then = "no state of compression", "begins with empty residuals"
    else:
        what = f"the compression states of {counted(len(found), 'rank')}, and here are {dist.get_world_size()}"
        then = "shares their residuals out among the ranks there are"
    if strict:
        raise ValueError(
            f"{where} has {what}; strict=False {then}, so results differ from those of an uninterrupted run"
        )
    log.warning("%s has %s: this run %s", where, what, then)
    if found:
        handle.load_state_dict(found)


_told: weakref.WeakSet[Saves] = weakref.WeakSet()


def _has_state(handle: Saves) -> bool:
    """Whether a handle has a state to save and to load. If it was removed, log that once."""
    if handle.removed and handle not in _told:
        _told.add(handle)
        log.warning("compression was removed, so checkpoints are saved and loaded without its state")
    return not handle.removed


def _read(written: Path | io.BytesIO) -> State:
    state = torch.load(written, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise ValueError(f"expected a state, got {type(state).__name__}")
    return cast("State", state)
