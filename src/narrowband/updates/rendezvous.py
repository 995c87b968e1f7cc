"""Which peers take part in a round, and whether it counts: agreed on in a store, however peers come, go or are late.

Peers meet in *turns*. In each, peers arrive and write down who they are. A *view*, the list of those who take part in
this turn's round, is proposed by any of them as soon as all peers of the view before are there, or the grace window is
over; the store takes the first proposal and no other. Who arrives later is left out, and arrives at the next turn.

A turn is a transaction. After the exchange each peer votes. The turn's *outcome* is written once: "commit" by the last
of all votes, or "abort" by whoever saw the exchange break off or waited too long for the votes. A peer applies a round
when it has read "commit", so either all peers of a view apply it or none does; one that dies or freezes between its
vote and that finds the outcome in the store when it is back.

The *round number* counts commits. A peer is *current* if its parameters are those after the last commit. Others, who
are new or missed a commit, are *behind*: they get parameters from a current peer when they are next in a view. Peers
that are behind never propose, so a view always has a current one.

The store is a process of its own (``narrowband rendezvous``), since it has to survive any peer. All waiting is by each
peer's monotonic clock, so clocks need not agree and may jump.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

from narrowband.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["DEFAULT_PORT", "Entry", "Meeting", "Rendezvous", "RendezvousError", "View"]

log = logging.getLogger(__name__)

#: Its stubs hide the stores.
dist: Any = distributed

DEFAULT_PORT = 29400

#: Seconds between two looks at the store: at first, and at most.
_LOOK_S, _LOOK_AT_MOST_S = 0.003, 0.1

#: In place of a peer's entry, when it waits no longer.
_NOBODY = json.dumps(None)

#: What the store answers when it cannot be reached takes no longer than this.
_STORE_S = 30.0


class RendezvousError(RuntimeError):
    """Peers cannot meet: the store is gone, or nobody who could go on is left."""


@dataclass(frozen=True)
class Rendezvous:
    """Where peers meet, and how long they wait for each other.

    Args:
        address: of the store, ``host:port``, which ``narrowband rendezvous`` serves; an address of IPv6 in brackets, as
            in ``[::1]:29400``.
        run: a name for the run, so that one store serves several.
        least: the least number of peers in a round: fewer wait for more.
        grace_s: seconds that a round waits for peers of the round before. A peer that comes later is left out of it.
        exchange_s: seconds after which the first exchange among the same peers breaks off, if one does not answer, and
            is held again without that one. It has to be well above the time that an exchange takes
            (``stats().last.exchange_s``). Later exchanges break off after ten times the longest before them, but not
            before ``grace_s`` or five seconds. The wait for all votes is as long.
        begin_with: number of peers that the first round waits for; by default it begins ``grace_s`` after ``least`` are
            there.
        patience_s: seconds after which a peer that waits for a round gives up; longer than the others train in between.
        name: the peer's name in logs, by which peers are ordered, too; by default drawn at random.

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
        host, port = _host_and_port(self.address)
        if not (host and port.isdigit()):
            raise ValueError(f"address={self.address!r} is not host:port, such as 10.0.0.1:{DEFAULT_PORT}")
        if self.least < 1:
            raise ValueError(f"least={self.least} must be at least 1: peers without which no round is held")
        if self.begin_with is not None and self.begin_with < self.least:
            raise ValueError(f"begin_with={self.begin_with} is less than least={self.least}")
        for name in ("grace_s", "exchange_s", "patience_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0: seconds")
        if math.isinf(self.exchange_s):  # PyTorch takes no such time-out
            raise ValueError(f"exchange_s={self.exchange_s}: an exchange has to break off some time; give many seconds")

    def connect(self) -> Any:
        """A client of the store, which may come up a little later than this peer.

        Raises:
            RendezvousError: it does not answer.
        """
        host, port = _host_and_port(self.address)
        end = time.monotonic() + min(_STORE_S, self.patience_s)
        try:
            while True:  # torch's own client says much while it waits
                try:
                    socket.create_connection((host, int(port)), timeout=_STORE_S).close()
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.1)
            return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_seconds(_STORE_S))
        except (RuntimeError, OSError) as error:
            raise RendezvousError(
                f"no store answers at {self.address}: {error}. Start it with 'narrowband rendezvous --port {port}' on "
                "a machine that all peers reach"
            ) from error


@dataclass(frozen=True)
class Entry:
    """A peer at a turn.

    Attributes:
        peer: who it is; another one each time the process starts.
        round: the commits that its parameters have seen; -1 of a peer that has none.
        weight: of its update in the mean.
    """

    peer: str
    round: int
    weight: float


@dataclass(frozen=True)
class View:
    """Who takes part in a turn's round; the same for all of them.

    Attributes:
        turn: its number.
        round: the number of the round, counted from 0.
        entries: the peers, current ones first. Their order is their rank.
        rank: of this peer.
        fresh: whether these are not the peers of the turn before, or that broke off: they need new connections.
        beginning: whether nothing was committed before: all begin with the parameters of the first.
    """

    turn: int
    round: int
    entries: tuple[Entry, ...]
    rank: int
    fresh: bool
    beginning: bool

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.entries)

    @property
    def behind(self) -> bool:
        """Whether this peer's parameters are not those after the last commit."""
        return self.entries[self.rank].round != self.round

    @property
    def some_are_behind(self) -> bool:
        """Whether any peer's are not."""
        return any(entry.round != self.round for entry in self.entries)

    @property
    def newcomers(self) -> list[int]:
        """Ranks of those that have not been in a round."""
        return [rank for rank, entry in enumerate(self.entries) if entry.round < 0]


class Meeting:
    """One peer's part of the protocol.

    Args:
        rendezvous: how long to wait.
        store: shared by all peers.
        facts: what has to be the same on all peers, name → value.

    Raises:
        DisagreementError: the run has other facts.
        RendezvousError: the store does not answer.
    """

    def __init__(self, rendezvous: Rendezvous, store: Any, facts: Mapping[str, str]) -> None:
        drawn = uuid.uuid4().hex[:12]  # another one each time a process starts
        self.peer = f"{rendezvous.name}-{drawn}" if rendezvous.name else drawn
        self._rules = rendezvous
        self._store = dist.PrefixStore(f"narrowband/{rendezvous.run}", store)
        self._agree(facts)

    def store_of(self, view: View) -> Any:
        """For the connections of a view's peers."""
        return dist.PrefixStore(f"{view.turn}/group", self._store)

    # ---- arriving ----------------------------------------------------------------------------------------------------

    def arrive(self, round_number: int, weight: float) -> View:
        """Wait until a view has this peer, and return it.

        Args:
            round_number: the commits that this peer's parameters have seen; -1 if it has none yet.
            weight: of its update.

        Raises:
            RendezvousError: the store does not answer, no round was held for too long, or nobody is left who has the
                parameters of the last one.
        """
        own = Entry(self.peer, round_number, weight)
        end = time.monotonic() + self._rules.patience_s
        with self._answering():
            while True:
                turn = self._turn() + 1
                slot = self._store.add(f"{turn}/arrived", 1) - 1
                self._store.set(f"{turn}/{slot}", json.dumps(asdict(own)))
                try:
                    self._meet(turn, own, end)
                except BaseException:  # Ctrl-C, too: who waits no longer has no part in the turn, or else in the next
                    with contextlib.suppress(RuntimeError, OSError):
                        self._store.set(f"{turn}/{slot}", _NOBODY)
                    raise
                view = self._view(turn, own)
                self._advance(turn)
                if view is not None:
                    return view

    def _meet(self, turn: int, own: Entry, end: float) -> None:
        """Wait until the turn has a view, and propose one where that is due."""
        before = self._decided(turn - 1)
        expected = set() if before is None else {entry.peer for entry in before.entries}
        began, told = time.monotonic(), False
        for now in self._looks(f"{turn}/view"):
            here = self._records(turn)
            round_number = self._current_round(turn - 1, now - began)
            beginning = before is None or (before.beginning and self._outcome(turn - 1) == "abort")
            if round_number is not None and (beginning or own.round == round_number):
                enough = len(here) >= self._rules.least
                if beginning:  # alike, or from checkpoints
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
            if now - began >= self._rules.grace_s and self._is_over(before, here.values()):
                self.leave()
                assert before is not None
                raise RendezvousError(
                    f"the run {self._rules.run!r} ended with round {before.round + 1}: all peers that were in it have "
                    f"left, and took its parameters with them; this peer has "
                    f"{f'those of round {own.round}' if own.round >= 0 else 'none of them'}. To begin anew, give "
                    "another run= or start the store again"
                )
            if not told and before is not None and now - began >= self._rules.grace_s:
                told = self._tell_who_is_missing(before, round_number, here.values())
            if now > end:
                self.leave()
                raise RendezvousError(
                    f"no round was held for {self._rules.patience_s:g} s: {len(here)} peers are here "
                    f"(least={self._rules.least}), and none of them may have the parameters of the last round"
                )

    def _tell_who_is_missing(self, last: View, round_number: int | None, here: Iterable[Entry]) -> bool:
        """Say it where nobody who is here has the parameters of the last round: who had them may come back."""
        if last.beginning or round_number is None or any(entry.round >= round_number for entry in here):
            return False
        log.warning(
            "no peer that is here has the parameters of round %d. Those that were in it have not left: %s. They may "
            "have died, and rounds go on when one of them comes back from a checkpoint; this peer waits for %g s. To "
            "begin anew without them, stop all peers and give another run=",
            round_number,
            ", ".join(sorted(entry.peer for entry in last.entries)),
            self._rules.patience_s,
        )
        return True

    def _is_over(self, last: View | None, here: Iterable[Entry]) -> bool:
        """Whether nobody has the parameters of the last round: those who were in it left, and who is here is behind."""
        if last is None or self._outcome(last.turn) != "commit":
            return False
        if any(entry.round > last.round for entry in here):
            return False
        return all(self._store.check([f"left/{entry.peer}"]) for entry in last.entries)

    def _current_round(self, turn: int, waited: float) -> int | None:
        """How many rounds were committed up to this turn; None while that is open."""
        view = self._decided(turn)
        if view is None:
            return 0
        outcome = self._outcome(turn)
        if outcome is None and waited > self._rules.exchange_s + self._rules.grace_s:
            outcome = self._store.compare_set(f"{turn}/outcome", "", "abort").decode()  # nobody of it is left
        return None if outcome is None else view.round + (outcome == "commit")

    def _view(self, turn: int, own: Entry) -> View | None:
        """The view of a turn, if it has this peer."""
        view = self._decided(turn)
        assert view is not None
        ranks = [at for at, entry in enumerate(view.entries) if entry.peer == own.peer]
        if not ranks:
            return None
        before = self._decided(turn - 1)
        same = before is not None and [e.peer for e in before.entries] == [e.peer for e in view.entries]
        # A peer may have left the round before in its middle, after its vote, and come back in time for this one.
        fresh = not same or self._outcome(turn - 1) != "commit" or view.some_are_behind
        return replace(view, rank=ranks[0], fresh=fresh)

    def _decided(self, turn: int) -> View | None:
        """What was decided for a turn, whoever is in it."""
        if turn < 1 or not self._store.check([f"{turn}/view"]):
            return None
        said = json.loads(self._store.get(f"{turn}/view"))
        entries = tuple(Entry(**entry) for entry in said["entries"])
        return View(turn, said["round"], entries, rank=0, fresh=True, beginning=said["beginning"])

    def _records(self, turn: int) -> dict[int, Entry]:
        """Who has arrived at a turn and has not left since, by slot."""
        key = f"{turn}/arrived"
        number = int(self._store.add(key, 0)) if self._store.check([key]) else 0
        there = (slot for slot in range(number) if self._store.check([f"{turn}/{slot}"]))
        said = {slot: json.loads(self._store.get(f"{turn}/{slot}")) for slot in there}
        arrived = {slot: Entry(**entry) for slot, entry in said.items() if entry is not None}
        return {slot: entry for slot, entry in arrived.items() if not self._store.check([f"left/{entry.peer}"])}

    def _turn(self) -> int:
        """The last turn that has a view."""
        return int(self._store.get("turn")) if self._store.check(["turn"]) else 0

    def _advance(self, turn: int) -> None:
        """Note that a turn has a view."""
        while (known := self._turn()) < turn:
            self._store.compare_set("turn", str(known) if known else "", str(turn))

    # ---- voting ------------------------------------------------------------------------------------------------------

    def vote(self, view: View, *, good: bool, within_s: float | None = None) -> bool:
        """Say whether this peer has all that it needs to apply the round, and wait for the outcome.

        Args:
            view: whose round.
            good: whether it has.
            within_s: seconds that it waits for the others' votes, by default ``exchange_s``.

        Returns:
            Whether the round is to be applied. Never where this peer's vote was not good.

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
        """Whether the outcome of a turn is not known yet: after a long freeze, it is."""
        with self._answering():
            return self._outcome(view.turn) is None

    def leave(self) -> None:
        """Tell the others not to wait for this peer any more; said once, and not if the store does not answer."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"left/{self.peer}", "1")

    def _outcome(self, turn: int) -> str | None:
        key = f"{turn}/outcome"
        return self._store.get(key).decode() if self._store.check([key]) else None

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _agree(self, facts: Mapping[str, str]) -> None:
        """Compare facts with those of the peer that came first."""
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
        """The time, again and again until the store has this key."""
        pause = _LOOK_S
        while not self._store.check([key]):
            yield time.monotonic()
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK_AT_MOST_S)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Around what asks the store."""
        try:
            yield
        except RendezvousError:
            raise
        except (RuntimeError, OSError) as error:  # what torch raises of a store derives from RuntimeError
            raise RendezvousError(
                f"the store at {self._rules.address} does not answer any more: {error}. Parameters are those of the "
                "last round; start the store and all peers again, from their checkpoints"
            ) from error


def serve(port: int, host: str = "0.0.0.0") -> Any:
    """Serve a store; it ends with what returns.

    Args:
        port: 0 for any that is free.
        host: address of the interface to listen at, and at no other. ``0.0.0.0`` are all, by IPv4; ``::`` by IPv6, too.
    """
    host = _without_brackets(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    # By itself the store would listen at all interfaces.
    with socket.create_server((host, port), family=family, dualstack_ipv6=both) as listening:
        return dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=_seconds(_STORE_S),
            master_listen_fd=listening.detach(),
        )


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return _without_brackets(host), port


def _without_brackets(host: str) -> str:
    """As sockets take an address of IPv6."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]} …"
