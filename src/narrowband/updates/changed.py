"""Find out whether something else than optimizer steps has changed a peer's parameters since the last round.

Right after a round all peers have the same parameters. If one of them loads a checkpoint then, its next update would
contain the difference. So each peer keeps checksums of its parameters, and compares them before its first step. All may
have made the same change, such as clipping weights; the round then checks that they are equal. If only some peers have
made one, the round cannot be held, and the fewer get an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband import kernels
from narrowband.errors import DisagreementError

if TYPE_CHECKING:
    from narrowband.updates.averaged import Averaged
    from narrowband.updates.rendezvous import View

__all__ = ["Changes", "all_or_none"]


class Changes:
    """Changes of this peer's parameters between a round and the first step after it.

    Attributes:
        found: whether there were any since the last round.
    """

    def __init__(self) -> None:
        self.found = False
        self._sums: list[int] | None = None  # of the parameters after the last round; None: nothing to compare with

    def begin(self, averaged: Averaged) -> None:
        """Begin to watch: these are now the parameters after a round."""
        self._sums = _checksums(averaged)

    def look(self, averaged: Averaged) -> None:
        """Look for changes, if that has not been done since :meth:`begin`. Call it before a step changes parameters."""
        if self._sums is not None:
            self.found |= _checksums(averaged) != self._sums
            self._sums = None

    def end(self) -> None:
        """End the watch without looking: a round changes parameters now."""
        self._sums = None


def _checksums(averaged: Averaged) -> list[int]:
    """Return a checksum of each parameter."""
    sums = [kernels.checksum(x) for name, x in averaged.tensors().items() if name not in averaged.buffers]
    return torch.stack(sums).tolist() if sums else []


def all_or_none(view: View, rounds: int) -> bool:
    """Return whether parameters were changed on all peers that have those of the last round, or on none of them.

    Args:
        view: the peers.
        rounds: number of rounds so far, for the error.

    Raises:
        DisagreementError: they were changed on some peers, and this peer is among the fewer: those who have changed
            them, or those who have not. Of as many, those who have.
    """
    changed = view.changed
    if len(set(changed)) < 2:
        return True
    own, fewer = view.entries[view.rank].changed, 2 * sum(changed) <= len(changed)
    if view.behind or own is not fewer:
        return False
    if not own:
        raise DisagreementError(
            f"other peers have changed their parameters since round {rounds} by something else than optimizer steps, "
            "and this peer has not. If the training loop changes parameters after every step, such as by clipping "
            "weights, do the same after compress_updates returns"
        )
    raise DisagreementError(
        f"the parameters of this peer were changed since round {rounds} by something else than optimizer steps, such "
        "as model.load_state_dict(...), and those of other peers were not. A peer that comes to a run that goes on "
        "gets the others' parameters: load no checkpoint then, or load it before compress_updates"
    )
