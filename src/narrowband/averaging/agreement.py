"""Check that all ranks are about to do the same, before anything that depends on it is sent.

``pause``, ``set_layers``, ``set_epoch`` and a loaded state change what a rank sends. If only some ranks change it,
messages of different sizes meet: gloo then ends the process, and other backends hang or decode nonsense. So every step
begins with an all-gather of eight bytes per rank, a fingerprint of what the rank is about to do. No other message of
the step is issued before all fingerprints have arrived. The first bucket is encoded meanwhile, so a step takes hardly
longer. If the fingerprints differ, the ranks exchange the facts themselves, and all of them raise an error that names
which rank is about to do what.

:meth:`~narrowband.gradients.GradientCompression.load_state_dict` and ``remove`` begin with the same message. So if one
rank makes such a call while another begins a step, the error names both.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from narrowband.collectives import Peers, Transfer, all_gather_nbytes, can_send_from, engine
from narrowband.collectives.primitives import all_gather
from narrowband.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from narrowband.collectives import Job

__all__ = ["Agreement", "Facts", "agree_in_all", "agreement_in", "checked_on_all", "waiting_for_all"]

log = logging.getLogger(__name__)

#: What a rank is about to do: name → value. A nested mapping is compared entry by entry.
Facts = Mapping[str, "str | Mapping[str, str]"]

#: The error names at most this many differences, and counts the rest.
_NAMED = 4
_LONGEST = 400
#: If one of these facts differs, the error names no others.
_ENOUGH = ("call", "problem")


class Agreement:
    """Compares facts over the ranks of a group.

    Args:
        peers: the ranks.
        device: a device from which the group can send tensors.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers = peers
        self._device = device
        self._sent: list[weakref.ref[Tensor]] = []  # tensors of the last comparison

    @property
    def nbytes(self) -> int:
        """Bytes that a rank sends for one comparison."""
        return all_gather_nbytes(8, self._peers.size)

    def job(self, facts: Facts, advice: str) -> Job:
        """Compare facts, as the first job of a step; see :class:`~narrowband.collectives.Engine`.

        Raises:
            DisagreementError: the facts differ; on all ranks.
        """
        if self._peers.size == 1:
            return
        mine = torch.tensor([_fingerprint(facts)], dtype=torch.int64, device=self._device)
        of_all = torch.empty(self._peers.size, dtype=torch.int64, device=self._device)
        if mine.is_cpu:
            self._sent = [weakref.ref(mine), weakref.ref(of_all)]
        # All later jobs in either queue wait until this job has ended.
        yield Transfer(lambda: all_gather(of_all, mine, self._peers), later=("group", "pairs"))
        if len(set(of_all.tolist())) > 1:
            raise DisagreementError(f"{self._differences(facts)}. {advice}")

    def now(self, facts: Facts, advice: str, failure: Exception | None = None) -> None:
        """Compare facts and wait for the result. Call only while the engine runs no job.

        A rank that failed before must call, too: other ranks wait for it, and are told of its error.

        It also waits (up to 5 s) until gloo's threads have released the tensors. A thread that releases a tensor while
        the interpreter shuts down crashes the process, and ``remove`` is the last call of many programs.

        Args:
            facts: what this rank is about to do, or would be without a failure; they begin with ``call``.
            advice: what users should do if ranks disagree.
            failure: an error of this rank, which is compared in place of the facts.

        Raises:
            DisagreementError: the facts differ, or other ranks have failures; on all ranks that have none.
            Exception: ``failure``, on this rank.
        """
        try:
            if failure is not None:
                facts = {"call": facts["call"], "problem": f"{type(failure).__name__}: {failure}"}
            try:
                with waiting_for_all(str(facts["call"])):
                    for transfer in self.job(facts, advice):
                        work = transfer.issue()
                        if work is not None:
                            work.wait()
                        del transfer, work
            except DisagreementError:
                if failure is None:
                    raise
            deadline = time.monotonic() + 5.0
            while any(sent() is not None for sent in self._sent) and time.monotonic() < deadline:
                time.sleep(0.001)
            if failure is not None:
                raise failure
        finally:
            # The error refers to this frame. If the frame referred to the error, the model in the frames of callers
            # would live until the next garbage collection, and with it the old hooks of DistributedDataParallel.
            del failure

    def everywhere(self, *, holds: bool) -> bool:
        """Return whether something holds on all ranks. A collective, to be called after :meth:`now` and as that is."""
        if self._peers.size == 1:
            return holds
        mine = torch.tensor([int(holds)], dtype=torch.int64, device=self._device)
        of_all = torch.empty(self._peers.size, dtype=torch.int64, device=self._device)
        if (work := all_gather(of_all, mine, self._peers)) is not None:
            work.wait()
        return all(of_all.tolist())

    def _differences(self, facts: Facts) -> str:
        """Return the differences as text, with global ranks. A collective."""
        of_all: list[Any] = [None] * self._peers.size
        dist.all_gather_object(of_all, dict(facts), group=self._peers.group)
        ranks = dist.get_process_group_ranks(self._peers.group)
        return f"ranks disagree on {', '.join(_differences(dict(zip(ranks, of_all, strict=True))))}"


@contextlib.contextmanager
def waiting_for_all(call: str) -> Iterator[None]:
    """Log, if this takes long, which call other ranks have not made: no error comes before the group's time-out. And
    say so in that error.

    Args:
        call: the function that users called.

    Raises:
        RuntimeError: the time-out is over, or another rank has ended.
    """

    def say() -> None:
        log.warning(
            "%s has waited for other ranks for %g s, since all ranks have to call it. If one is busy, it goes on when "
            "that one calls it, too. If one has failed, has ended, or never calls %s, it waits until the time-out of "
            "the process group is over",
            call, engine.LONG_S, call,
        )  # fmt: skip

    timer = threading.Timer(engine.LONG_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    except DisagreementError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{call}: other ranks have not answered, but all ranks have to call it. One has failed, has ended, or "
            f"never calls {call} ({error})"
        ) from error
    finally:
        timer.cancel()
        timer.join()  # no thread is left where this is the last call of a program


def agree_in_all(agreements: Iterable[Agreement], facts: Facts, advice: str, failure: Exception | None = None) -> None:
    """Compare facts in several groups, one after the other. All ranks of each group call it, in an order of the groups
    in which none waits for another.

    A rank that has an error in one group does not leave before it has told its other groups, which would wait.

    Args:
        agreements: one per group of this rank.
        facts: what this rank is about to do; they begin with ``call``.
        advice: what users should do if ranks disagree.
        failure: an error of this rank, which is compared in place of the facts.

    Raises:
        DisagreementError: the facts differ in a group of this rank, or in a group of a rank of it.
        Exception: ``failure``, on this rank.
    """
    try:
        for agreement in agreements:
            try:
                agreement.now(facts, advice, failure)
            except Exception as error:
                if failure is not None:
                    continue  # that is what users have to hear of, even if the network breaks meanwhile
                if not isinstance(error, DisagreementError):
                    raise
                failure = error
        if failure is not None:
            raise failure
    finally:
        del failure


def agreement_in(group: dist.ProcessGroup) -> Agreement:
    """Return an object that compares facts over the ranks of a group, from CPU memory if the group can send from it."""
    cpu = torch.device("cpu")
    return Agreement(Peers.of(group), cpu if can_send_from(group, cpu) else torch.device("cuda"))


_T = TypeVar("_T")


def checked_on_all(
    call: str, groups: Sequence[dist.ProcessGroup | None], check: Callable[[], _T], facts: Facts | None = None
) -> _T:
    """Let each rank check its own arguments of a set-up, and raise the error of any rank on all ranks. A collective.

    Args:
        call: the set-up function, which all ranks call.
        groups: the process groups in which ranks will wait for this rank, see :func:`agree_in_all`. None, and ranks
            that no default group was initialized for, are left out.
        check: checks this rank's arguments without waiting for other ranks.
        facts: arguments that must be the same on all ranks before they wait for each other.

    Returns:
        What ``check`` returns.

    Raises:
        DisagreementError: ``check`` failed on other ranks only, or facts differ.
        Exception: the error of ``check`` on this rank.
    """
    failure, checked = None, None
    try:
        checked = check()
    except Exception as error:  # of any kind: other ranks wait in the comparison below
        failure = error
    # A rank that is in no group gets such an object instead, and an error later.
    waiting = [group for group in groups if isinstance(group, dist.ProcessGroup)] if dist.is_initialized() else []
    agreements = map(agreement_in, waiting)
    advice = f"Call {call} on all ranks with the same arguments for the same model"
    try:
        agree_in_all(agreements, {"call": call, **(facts or {})}, advice, failure)
    finally:
        del failure
    return cast("_T", checked)


def _fingerprint(facts: Facts) -> int:
    """Return 64 bits of a hash that is the same in every process."""
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


def _differences(of_all: Mapping[int, Facts]) -> list[str]:
    """Return a text for each fact that differs, with its values and their ranks.

    Args:
        of_all: rank → facts.
    """
    flat = {rank: _flat(facts) for rank, facts in of_all.items()}
    found: list[str] = []
    for name in dict.fromkeys([*_ENOUGH, *(name for facts in flat.values() for name in facts)]):
        absent = "none" if name == "problem" else "nothing"
        ranks: dict[str, list[int]] = {}
        for rank, facts in flat.items():
            ranks.setdefault(facts.get(name, absent), []).append(rank)
        if len(ranks) > 1:
            if name == "problem":  # a text of whole sentences
                said = [f"{_ranks(who)}: {_short(value)}" for value, who in ranks.items()]
            else:
                said = [f"{_short(value)} on {_ranks(who)}" for value, who in ranks.items()]
            found.append(f"{name} ({'; '.join(said)})")
            if name in _ENOUGH:
                break
    return found[:_NAMED] + ([f"and {len(found) - _NAMED} more differences"] if len(found) > _NAMED else [])


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]} …"


def _ranks(who: Sequence[int]) -> str:
    return f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
