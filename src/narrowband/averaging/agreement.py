"""Finds out whether all ranks are about to do the same, before anything that depends on it is sent.

``pause``, ``set_layers``, ``set_epoch`` and a loaded state change what a rank sends. If only some ranks change it,
messages of different sizes meet: gloo then ends the process, and other backends hang or decode nonsense. So every step
begins with eight bytes per rank, a fingerprint of what the rank is about to do. No other message of the step is issued
before all fingerprints are here; the first bucket is encoded in the meantime, so a step takes hardly longer. Where the
fingerprints differ, the ranks exchange the same facts in words, and all of them raise an error that names who is about
to do what.

:meth:`~narrowband.gradients.GradientCompression.load_state_dict` and ``remove`` begin with the same message, so a call
on one rank meets the step of another, and is reported by name, too.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from narrowband.collectives import Transfer, all_gather_nbytes
from narrowband.collectives.primitives import all_gather
from narrowband.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.collectives import Job, Peers

__all__ = ["Agreement", "Facts"]

#: What a rank is about to do: name → value. A nested mapping is compared entry by entry.
Facts = Mapping[str, "str | Mapping[str, str]"]

#: So many differences are named; the rest is counted.
_NAMED = 4
_LONGEST = 200
#: Where ranks call different things, or one has a problem, nothing else is worth naming.
_ENOUGH = ("call", "problem")


class Agreement:
    """Compares facts over the ranks of a group.

    Args:
        peers: these ranks.
        device: where tensors live that the group can send.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers = peers
        self._device = device
        self._sent: list[weakref.ref[Tensor]] = []  # in the last comparison

    @property
    def nbytes(self) -> int:
        """Bytes that a rank sends for one comparison."""
        return all_gather_nbytes(8, self._peers.size)

    def job(self, facts: Facts, advice: str) -> Job:
        """Compare, as the first job of a step; see :class:`~narrowband.collectives.Engine`.

        Raises:
            DisagreementError: the facts differ; on all ranks.
        """
        if self._peers.size == 1:
            return
        mine = torch.tensor([_fingerprint(facts)], dtype=torch.int64, device=self._device)
        of_all = torch.empty(self._peers.size, dtype=torch.int64, device=self._device)
        if mine.is_cpu:
            self._sent = [weakref.ref(mine), weakref.ref(of_all)]
        # Whatever comes after it in either queue waits until this job has ended.
        yield Transfer(lambda: all_gather(of_all, mine, self._peers), later=("group", "pairs"))
        if len(set(of_all.tolist())) > 1:
            raise DisagreementError(f"{self._differences(facts)}. {advice}")

    def now(self, facts: Facts, advice: str) -> None:
        """Compare, and return when that is done, and when gloo's threads have let go of what was sent. Only where no
        job is on its way.

        A thread that still has to let go of a tensor when the interpreter ends takes the process down with it, and
        ``remove`` is the last that many programs do.

        Raises:
            DisagreementError: the facts differ; on all ranks.
        """
        for transfer in self.job(facts, advice):
            work = transfer.issue()
            if work is not None:
                work.wait()
            del transfer, work
        deadline = time.monotonic() + 5.0
        while any(sent() is not None for sent in self._sent) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _differences(self, facts: Facts) -> str:
        """In words; a collective."""
        of_all: list[Any] = [None] * self._peers.size
        dist.all_gather_object(of_all, dict(facts), group=self._peers.group)
        return f"ranks disagree on {', '.join(_differences(of_all))}"


def _fingerprint(facts: Facts) -> int:
    """64 bits, the same in every process."""
    digest = hashlib.sha256(repr(sorted(_flat(facts).items())).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _flat(facts: Facts) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= {f"{name} of {key!r}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _differences(of_all: Sequence[Facts]) -> list[str]:
    """What differs, and who has what."""
    flat = [_flat(facts) for facts in of_all]
    found: list[str] = []
    for name in dict.fromkeys(name for facts in flat for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(flat):
            ranks.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            found.append(f"{name} ({'; '.join(f'{_short(value)} on {_ranks(who)}' for value, who in ranks.items())})")
            if name in _ENOUGH:
                break
    return found[:_NAMED] + ([f"and {len(found) - _NAMED} more differences"] if len(found) > _NAMED else [])


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]} …"


def _ranks(who: Sequence[int]) -> str:
    return f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
