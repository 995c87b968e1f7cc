"""Agree, through a store, on which peers take part in a round and whether the round is committed.

Peers meet in *turns*. In each turn, peers arrive and write an entry to the store. A *view* is the list of peers that
take part in this turn's round. Any current peer proposes one as soon as all peers of the view before are there, or the
grace window is over. The store accepts only the first proposal. A peer that arrives later is left out, and arrives at
the next turn.

A turn is a transaction. After the exchange each peer votes. The turn's *outcome* is written once: "commit" by the peer
whose vote completes them, or "abort" by a peer that saw the exchange break off or waited too long for votes. A peer
applies a round when it has read "commit", so either all peers of a view apply it or none does. A peer that dies or
freezes after its vote finds the outcome in the store when it is back.

The *round number* counts commits. A peer is *current* if its parameters are those after the last commit. Other peers,
which are new or missed a commit, are *behind*: they get parameters from a current peer when they are next in a view.
Peers that are behind never propose, so a view always has a current peer.

The store is a separate process (``narrowband rendezvous``), since it must outlive any peer. All waiting uses each
peer's monotonic clock, so the machines' clocks need not agree, and may jump.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
import uuid
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import distributed

from narrowband.errors import DisagreementError
from narrowband.units import counted
from narrowband.updates.stores import UntilAborted, connect, host_and_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Entry", "Meeting", "Rendezvous", "RendezvousError", "View"]

log = logging.getLogger(__name__)

#: ``torch.distributed`` as Any, since its type stubs hide the stores.
dist: Any = distributed

#: Seconds between two polls of the store: at first, and at most.
_LOOK_S, _LOOK_AT_MOST_S = 0.003, 0.1

#: Replaces a peer's entry when the peer does not wait any longer.
_NOBODY = json.dumps(None)


class RendezvousError(RuntimeError):
    """Peers cannot meet: the store is gone, or no peer is left that could go on."""


@dataclass(frozen=True)
class Rendezvous:
    """Where peers meet, and how long they wait for each other.

    Args:
        address: address of the store that ``narrowband rendezvous`` serves, ``host:port``; an IPv6 address in brackets,
            as in ``[::1]:29400``.
        run: name of the run, so that one store can serve several.
        least: the least number of peers in a round; fewer peers wait for more.
        grace_s: seconds that a round waits for peers of the round before. A peer that comes later is left out of it.
        exchange_s: seconds after which the first exchange among the same peers is broken off if a peer does not answer,
            and held again without that peer. It must be well above the time that an exchange takes
            (``stats().last.exchange_s``). Later exchanges are broken off after ten times the longest before them, but
            not before ``grace_s`` or five seconds. The wait for all votes is as long.
        begin_with: number of peers that the first round waits for; by default the round begins when ``least`` peers are
            there and ``grace_s`` is over.
        patience_s: seconds after which a peer that waits for a round gives up. It must be longer than the others train
            between two rounds.
        name: the peer's name in logs, by which peers are ordered, too; by default random.

    Raises:
        ValueError: an address that is not host:port, or a number out of range.

    Example:
        >>> peers = nb.Rendezvous("10.0.0.1:29400", least=3, grace_s=60)
        >>> peers.least
        3
    """

    address: str
    run: str = "run"
    least: int = 2
    grace_s: float = 30.0
    exchange_s: float = 300.0
    begin_with: int | None = None
    patience_s: float = 14400.0
    name: str = ""

    def __post_init__(self) -> None:
        host, port = host_and_port(self.address)
        if not (host and port.isdigit() and 0 < int(port) < 1 << 16) or "/" in host:
            raise ValueError(f"address={self.address!r} is not host:port, such as 10.0.0.1:29400")
        if self.least < 1:
            raise ValueError(f"least={self.least} must be at least 1: the number of peers that a round needs")
        if self.begin_with is not None and self.begin_with < self.least:
            raise ValueError(f"begin_with={self.begin_with} is less than least={self.least}")
        for name in ("grace_s", "exchange_s", "patience_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0: seconds")
        if math.isinf(self.exchange_s):  # PyTorch accepts no infinite time-out
            raise ValueError(f"exchange_s={self.exchange_s} must be finite; use a large number of seconds")

    def connect(self) -> Any:
        """Connect a client to the store, which may come up a little later than this peer.

        Raises:
            RendezvousError: the store does not answer.
        """
        host, port = host_and_port(self.address)
        try:
            return connect(host, int(port), self.patience_s)
        except (RuntimeError, OSError) as error:
            raise RendezvousError(
                f"no store answers at {self.address}: {error}. Start it with 'narrowband rendezvous --port {port}' on "
                "a machine that all peers reach"
            ) from error


@dataclass(frozen=True)
class Entry:
    """A peer's entry at a turn.

    Attributes:
        peer: the peer's identity, different each time that the process starts.
        round: number of commits that its parameters have seen; -1 if it has not been in a round.
        weight: weight of its update in the mean.
        changed: whether something else than a step has changed its parameters since then.
        linked: whether its connections to the peers of its last round are open.
    """

    peer: str
    round: int
    weight: float
    changed: bool = False
    linked: bool = True


@dataclass(frozen=True)
class View:
    """The peers that take part in a turn's round; the same on all of them, except ``rank``.

    Attributes:
        turn: number of the turn.
        round: number of the round, counted from 0.
        entries: the peers, current ones first; the index of a peer is its rank.
        rank: this peer's rank.
        fresh: whether the peers need new connections: they are not those of the turn before, that turn was not
            committed, some peers are behind, or some have closed theirs.
        beginning: whether no round was committed before, so that all begin with the parameters of the first peer.
    """

    turn: int
    round: int
    entries: tuple[Entry, ...]
    rank: int
    fresh: bool
    beginning: bool

    @property
    def size(self) -> int:
        """Number of peers."""
        return len(self.entries)

    @property
    def behind(self) -> bool:
        """Whether this peer's parameters are not those after the last commit."""
        return self.entries[self.rank].round != self.round

    @property
    def some_are_behind(self) -> bool:
        """Whether any peer is behind."""
        return any(entry.round != self.round for entry in self.entries)

    @property
    def changed(self) -> list[bool]:
        """Whether parameters of the last round were changed by something else than steps, on each peer that has them.
        Empty at the beginning, when all take the first peer's parameters.
        """
        return [] if self.beginning else [entry.changed for entry in self.entries if entry.round == self.round]

    @property
    def newcomers(self) -> list[int]:
        """Ranks of the peers that have not been in a round."""
        return [rank for rank, entry in enumerate(self.entries) if entry.round < 0]


class Meeting:
    """One peer's part of the protocol.

    Args:
        rendezvous: the run, the peer's name, and how long to wait.
        store: client of the store that all peers share.
        facts: name → value of everything that must be the same on all peers.
        hang_up: function that closes this peer's connections, if there are any. It is called when this peer was put, or
            may be put, into a round in which it takes no part. The others may be in the exchange already, where they
            look at no store but notice closed connections.

    Raises:
        DisagreementError: the peer that came first in this run had other facts.
        RendezvousError: the store does not answer.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        store: Any,
        facts: Mapping[str, str],
        hang_up: Callable[[], None] = lambda: None,
    ) -> None:
        drawn = uuid.uuid4().hex[:12]  # different each time that a process starts
        self.peer = f"{rendezvous.name}-{drawn}" if rendezvous.name else drawn
        self._rules, self._hang_up = rendezvous, hang_up
        self._store = dist.PrefixStore(f"narrowband/{rendezvous.run}", store)
        self._agree(facts)

    def store_of(self, view: View) -> Any:
        """Return the store by which a view's peers connect to each other. Who waits there for a peer that does not come
        gets an error as soon as the turn's round is aborted.
        """
        return UntilAborted(dist.PrefixStore(f"{view.turn}/group", self._store), lambda: self._outcome(view.turn))

    # ---- arriving ----------------------------------------------------------------------------------------------------

    def arrive(self, round_number: int, weight: float, *, changed: bool = False, linked: bool = True) -> View:
        """Wait until there is a view with this peer in it, and return the view.

        Args:
            round_number: number of commits that this peer's parameters have seen; -1 if it has not been in a round.
            weight: weight of its update.
            changed: whether something else than a step has changed this peer's parameters since then.
            linked: whether this peer's connections to the peers of its last round are open.

        Raises:
            RendezvousError: the store does not answer, no round was held for too long, or no peer is left that has the
                parameters of the last one.
        """
        own = Entry(self.peer, round_number, weight, changed, linked)
        end = time.monotonic() + self._rules.patience_s
        with self._answering():
            while True:
                turn = self._turn() + 1
                self._stay_out(turn - 1)
                slot = self._store.add(f"{turn}/arrived", 1) - 1
                try:
                    self._store.set(f"{turn}/{slot}", json.dumps(asdict(own)))
                    self._meet(turn, own, end)
                    view = self._view(turn, own)
                    self._advance(turn)
                    if view is not None and view.entries[view.rank] == own:
                        return view
                except BaseException:  # Ctrl-C, too: a peer that does not wait any longer must not be put into a view
                    with contextlib.suppress(RuntimeError, OSError):
                        self._store.set(f"{turn}/{slot}", _NOBODY)
                        self._stay_out(turn)
                    self._hang_up()  # who has just seen this peer here may yet put it into a view
                    raise
                self._stay_out(turn)

    def _stay_out(self, turn: int) -> None:
        """Abort a turn's round, and hang up, if this peer was put into its view and takes no part, so that the others
        need not wait: Ctrl-C came at that moment, and the entry in the view tells what the peer had before.
        """
        view = self._decided(turn)
        if view is None or all(entry.peer != self.peer for entry in view.entries):
            return
        if self._store.compare_set(f"{turn}/outcome", "", "abort") == b"abort":
            self._hang_up()

    def _meet(self, turn: int, own: Entry, end: float) -> None:
        """Wait until the turn has a view, and propose one when that is due."""
        before = self._decided(turn - 1)
        expected = set() if before is None else {entry.peer for entry in before.entries}
        began, told = time.monotonic(), False
        for now in self._looks(f"{turn}/view"):
            here = self._records(turn)
            round_number = self._current_round(turn - 1, now - began)
            beginning = before is None or (before.beginning and self._outcome(turn - 1) == "abort")
            if round_number is not None and (beginning or own.round == round_number):
                enough = len(here) >= self._rules.least
                if beginning:  # no commit yet: take the largest number that a peer brings
                    round_number = max(0, *(entry.round for entry in here.values()))
                if before is None:
                    complete = self._rules.begin_with is not None and len(here) >= self._rules.begin_with
                else:
                    missing = expected - {entry.peer for entry in here.values()}
                    complete = all(self._store.check([f"left/{peer}"]) for peer in missing)
                if enough and (complete or now - began >= self._rules.grace_s):
                    entries = sorted(here.values(), key=lambda entry: (entry.round != round_number, entry.peer))
                    said = json.dumps(
                        {"round": round_number, "beginning": beginning, "entries": [asdict(entry) for entry in entries]}
                    )
                    self._store.compare_set(f"{turn}/view", "", said)
                    self._abort_without_all(turn)
            if now - began >= self._rules.grace_s and self._is_over(before, here.values()):
                self.leave()
                assert before is not None
                raise RendezvousError(
                    f"the run {self._rules.run!r} ended with round {before.round + 1}: all peers that have its "
                    f"parameters have left, and this peer has "
                    f"{f'those of round {own.round}' if own.round >= 0 else 'those of no round'}. To start a new run, "
                    "pass another run= or restart the store"
                )
            if not told and now - began >= self._rules.grace_s:
                told = (
                    before is not None and self._tell_who_is_missing(before, round_number, here.values())
                ) or self._tell_that_few_are_here(len(here))
            if now > end:
                self.leave()
                raise RendezvousError(
                    f"no round was held for {self._rules.patience_s:g} s: "
                    f"{counted(len(here), 'peer is', 'peers are')} here (least={self._rules.least}), and possibly none "
                    "of them has the parameters of the last round"
                )

    def _abort_without_all(self, turn: int) -> None:
        """Abort a turn's round if a peer of its view has left since this peer saw it there. A peer that leaves looks
        for a view after it has said so, and a peer that proposes one looks for those who leave after that; so at least
        one of them finds the other.
        """
        view, here = self._decided(turn), set(self._records(turn).values())
        if view is not None and not here.issuperset(view.entries):
            self._store.compare_set(f"{turn}/outcome", "", "abort")

    def _tell_who_is_missing(self, last: View, round_number: int | None, here: Iterable[Entry]) -> bool:
        """Log a warning if no peer that is here has the parameters of the last round, and return whether it was logged.
        The peers that had them may have a long way to the next round, or come back.
        """
        if last.beginning or round_number is None or any(entry.round >= round_number for entry in here):
            return False
        log.warning(
            "no peer that is here has the parameters of round %d. The peers of that round have not left: %s. They "
            "train on, or have died. This peer waits for one of them, %g s at most. If they have died, rounds go on "
            "when one of them returns from a checkpoint. To start a new run without them, stop all peers and pass "
            "another run=",
            round_number,
            ", ".join(sorted(entry.peer for entry in last.entries)),
            self._rules.patience_s,
        )
        return True

    def _tell_that_few_are_here(self, count: int) -> bool:
        """Log a warning if fewer peers are here than a round needs, and return whether it was logged."""
        if count >= self._rules.least:
            return False
        log.warning(
            "%s here, and a round needs %d (least=): this peer waits for others, %g s at most. They need the "
            "same address of the store, and run=%r",
            counted(count, "peer is", "peers are"),
            self._rules.least,
            self._rules.patience_s,
            self._rules.run,
        )
        return True

    def _is_over(self, last: View | None, here: Iterable[Entry]) -> bool:
        """Return whether the parameters of the last round are lost: all peers that were in it have left, and all that
        are here are behind.
        """
        if last is None or self._outcome(last.turn) != "commit":
            return False
        if any(entry.round > last.round for entry in here):
            return False
        return all(self._store.check([f"left/{entry.peer}"]) for entry in last.entries)

    def _current_round(self, turn: int, waited: float) -> int | None:
        """Return the number of rounds committed up to this turn; None while the turn has no outcome."""
        view = self._decided(turn)
        if view is None:
            return 0
        outcome = self._outcome(turn)
        if outcome is None and waited > self._rules.exchange_s + self._rules.grace_s:
            outcome = self._store.compare_set(f"{turn}/outcome", "", "abort").decode()  # no peer of that turn is left
        return None if outcome is None else view.round + (outcome == "commit")

    def _view(self, turn: int, own: Entry) -> View | None:
        """Return the view of a turn, or None if this peer is not in it."""
        view = self._decided(turn)
        assert view is not None
        ranks = [at for at, entry in enumerate(view.entries) if entry.peer == own.peer]
        if not ranks:
            return None
        before = self._decided(turn - 1)
        same = before is not None and [e.peer for e in before.entries] == [e.peer for e in view.entries]
        # A peer may have left the round before midway, after its vote, and have come back in time for this one.
        kept = same and not view.some_are_behind and all(entry.linked for entry in view.entries)
        fresh = not kept or self._outcome(turn - 1) != "commit"
        return replace(view, rank=ranks[0], fresh=fresh)

    def _decided(self, turn: int) -> View | None:
        """Return the view that was accepted for a turn, whether this peer is in it or not; None if there is none."""
        if turn < 1 or not self._store.check([f"{turn}/view"]):
            return None
        said = json.loads(self._store.get(f"{turn}/view"))
        entries = tuple(Entry(**entry) for entry in said["entries"])
        return View(turn, said["round"], entries, rank=0, fresh=True, beginning=said["beginning"])

    def _records(self, turn: int) -> dict[int, Entry]:
        """Return slot → entry of the peers that have arrived at a turn and not left since; the last entry of each."""
        key = f"{turn}/arrived"
        number = int(self._store.add(key, 0)) if self._store.check([key]) else 0
        there = (slot for slot in range(number) if self._store.check([f"{turn}/{slot}"]))
        said = {slot: json.loads(self._store.get(f"{turn}/{slot}")) for slot in there}
        arrived = {slot: Entry(**entry) for slot, entry in said.items() if entry is not None}
        # Two of a peer that was interrupted again before it had withdrawn the first.
        last = {entry.peer: slot for slot, entry in arrived.items()}
        arrived = {slot: arrived[slot] for slot in last.values()}
        return {slot: entry for slot, entry in arrived.items() if not self._store.check([f"left/{entry.peer}"])}

    def _turn(self) -> int:
        """Return the number of the last turn that has a view."""
        return int(self._store.get("turn")) if self._store.check(["turn"]) else 0

    def _advance(self, turn: int) -> None:
        """Note in the store that a turn has a view."""
        while (known := self._turn()) < turn:
            self._store.compare_set("turn", str(known) if known else "", str(turn))

    # ---- voting ------------------------------------------------------------------------------------------------------

    def vote(self, view: View, *, good: bool, within_s: float | None = None) -> bool:
        """Vote on whether this peer has all that it needs to apply the round, and wait for the outcome.

        Args:
            view: the view whose round is voted on.
            good: this peer's vote.
            within_s: seconds to wait for the others' votes, by default ``exchange_s``.

        Returns:
            Whether the round is committed. If this peer's vote is not good, the round is committed only if the peer had
            voted before, and the vote was good then.

        Raises:
            RendezvousError: the store does not answer.
        """
        key = f"{view.turn}/outcome"
        with self._answering():
            if not good:
                self._store.compare_set(key, "", "abort")
            elif self._store.add(f"{view.turn}/votes", 1) == view.size:
                self._store.compare_set(key, "", "commit")
            began = time.monotonic()
            for now in self._looks(key):
                if now - began > (self._rules.exchange_s if within_s is None else within_s):
                    self._store.compare_set(key, "", "abort")
            return self._outcome(view.turn) == "commit"

    def is_open(self, view: View) -> bool:
        """Return whether a turn has no outcome yet. After this peer was frozen for long, it may have one."""
        with self._answering():
            return self._outcome(view.turn) is None

    def leave(self) -> None:
        """Tell the others, through the store, not to wait for this peer any more. Errors of the store are ignored."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"left/{self.peer}", "1")

    def _outcome(self, turn: int) -> str | None:
        key = f"{turn}/outcome"
        return self._store.get(key).decode() if self._store.check([key]) else None

    # ---- what peers tell those that come later -----------------------------------------------------------------------

    def tell_specs(self, specs: Sequence[str]) -> None:
        """Note in the store which specs layers have, so that a peer that comes can compile their loops first."""
        with self._answering():
            self._store.set("specs", json.dumps(list(specs)))

    def told_specs(self) -> list[str]:
        """Return the specs that peers have noted; none if layers have only those of the facts."""
        with self._answering():
            found: list[str] = json.loads(self._store.get("specs")) if self._store.check(["specs"]) else []
        return found

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _agree(self, facts: Mapping[str, str]) -> None:
        """Raise DisagreementError if facts differ from those of the peer that came first."""
        with self._answering():
            first = json.loads(self._store.compare_set("facts", "", json.dumps(dict(facts), sort_keys=True)))
        differ = [name for name in {**first, **facts} if first.get(name) != facts.get(name)]
        if differ:
            said = "; ".join(
                f"{name}: {_short(first.get(name, 'nothing'))} in the run, {_short(facts.get(name, 'nothing'))} here"
                for name in differ[:4]
            )
            raise DisagreementError(
                f"this peer differs from the run {self._rules.run!r} at {self._rules.address} in {said}. Start it with "
                "the same model in the same memory format, optimizer and arguments, or give another run="
            )

    def _looks(self, key: str) -> Iterator[float]:
        """Poll until the store has this key, and yield the time before each pause."""
        pause = _LOOK_S
        while not self._store.check([key]):
            yield time.monotonic()
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK_AT_MOST_S)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn errors of the store into RendezvousError."""
        try:
            yield
        except RendezvousError:
            raise
        except (RuntimeError, OSError) as error:  # torch's errors of a store derive from RuntimeError
            raise RendezvousError(
                f"the store at {self._rules.address} does not answer any more: {error}. Parameters are those of the "
                "last round; start the store and all peers again, from their checkpoints"
            ) from error


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]} …"
