"""Track which ranks take part in exchanges: ranks may be silent, lost, outside, or let back in.

An exchange waits for ranks. A rank that it waits for is lost if it delivers nothing for ``timeout_s``, or gives no sign
of life for ``silence_timeout``. The rank that notices first tells the others. If one rank may be lost, exchanges go on
without it. They are numbered anew, from 2³² times the number of a *view* on, so that datagrams of earlier exchanges, or
of exchanges without another rank, are not mistaken for theirs. With n ranks, view g·(n+1) has all of them, after g
returns; the k-th view after it has all but rank k − 1. A rank that still sends datagrams of earlier exchanges is told
who is lost: it may have missed the news, or be the lost rank itself, if that was only late. Exchanges go on only while
all ranks but one are there, so two parts of a network never both go on.

If lost ranks are readmitted, the lost rank stands aside when it is told (or when it hears no rank at all), and asks to
be let back in. Once the others have agreed on that, their next exchange is the first of a view with all ranks, and its
first datagram lets the waiting rank in.

Nothing here waits, or uses sockets except to send: :mod:`narrowband.transport.event_loop` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from narrowband.transport.contract import RanksLostError
from narrowband.transport.datagram import Datagram, Kind, pack_ranks, ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narrowband.transport.link import Link

__all__ = ["GOODBYES", "SILENCE_S", "VIEW", "Limits", "Membership", "names_of"]

#: Seconds without an answer to polls after which a peer counts as gone.
SILENCE_S = 2.0
#: How often a datagram is sent that all ranks must hear, since each copy may be lost.
GOODBYES = 3
#: Distance between the exchange numbers of two views; there are fewer exchanges among the same ranks.
VIEW = 1 << 32
#: Least seconds between two announcements of who is lost, however many ranks need to hear it.
_TELL_S = 0.05
#: Seconds between two requests of a lost rank to be let back in.
_ASK_S = 0.05


@dataclass(frozen=True)
class Limits:
    """Arguments of :class:`~narrowband.transport.multicast.Multicast` about lost ranks."""

    timeout_s: float
    silence_timeout: float
    max_failures: int
    readmits: bool


def names_of(ranks: tuple[int, ...]) -> str:
    """Return ``rank 1``, or ``ranks 1, 2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class Membership:
    """This rank's knowledge of which ranks take part.

    Args:
        link: link to the other ranks.
        limits: when a rank is lost, and whether exchanges go on without it.

    Attributes:
        limits: the limits that were passed.
        lost: the rank that exchanges go on without.
        dropped: whether the lost rank may not return any more.
        asked_at: when the lost rank last asked to return; monotonic seconds.
        verdict: news from another rank that fails the current or next exchange: (number of an exchange, error). The
            error is raised in exchanges after that number.
        outside: the error that says that the others have gone on without this rank, which may return; else None.
        attentive_since: since when this rank has listened without interruption; monotonic seconds.
    """

    def __init__(self, link: Link, limits: Limits) -> None:
        self.limits = limits
        self.lost: tuple[int, ...] = ()
        self.dropped = False
        self.asked_at = float("-inf")
        self.verdict: tuple[int, RuntimeError] | None = None
        self.outside: RanksLostError | None = None
        self.attentive_since = 0.0
        self._link = link
        self._rank, self._size = link.session.rank, link.session.world_size
        self._returns = 0  # how often a rank was let back in
        self._for_good = False  # this rank is outside, and may not return
        self._closed: dict[int, int] = {}  # ranks that have closed: the last exchange they finished
        self._left: set[int] = set()  # those of them that send nothing any more, not even repairs
        self._heard_at = [0.0] * self._size
        self._brought_at = [0.0] * self._size
        self._held_up_at = [0.0] * self._size
        self._told_at = 0.0
        self._ask_at = 0.0
        self._answered_at = 0.0  # when the others last said that they go on without this rank

    # ---- signs of life -----------------------------------------------------------------------------------------------

    def hears(self, peer: int, now: float) -> None:
        """Note that a datagram arrived from a rank."""
        self._heard_at[peer] = now

    def brings(self, peer: int, now: float) -> None:
        """Note that a rank delivered something that an exchange waits for."""
        self._brought_at[peer] = now

    def is_held_up(self, peer: int, now: float) -> None:
        """Note that a rank cannot send because other ranks are behind."""
        self._held_up_at[peer] = now

    def has_closed(self, peer: int, number: int) -> bool:
        """Return whether a rank has closed its transport after finishing exchange ``number``."""
        return self._closed.get(peer, 0) >= number

    def is_silent(self, peer: int, now: float, since: float) -> bool:
        """Return whether nothing has arrived from a rank for ``SILENCE_S``, or it has closed."""
        return peer in self._closed or now - max(since, self._heard_at[peer]) > SILENCE_S

    def check(self, awaited: Iterable[int], number: int, began_at: float, now: float) -> None:
        """Raise RanksLostError if a rank that an exchange waits for is lost."""
        peers, limits = sorted(awaited), self.limits
        gone = tuple(peer for peer in peers if self._closed.get(peer, number) < number)
        if gone:
            raise RanksLostError(f"{names_of(gone)} closed the transport before exchange {number % VIEW}", gone)
        if left := tuple(peer for peer in peers if peer in self._left):
            raise RanksLostError(
                f"{names_of(left)} closed the transport before this rank had all of exchange {number % VIEW}", left
            )
        waited = {peer: now - max(began_at, self._brought_at[peer]) for peer in peers}
        listened = max(began_at, self.attentive_since)
        silent = tuple(peer for peer in peers if self._gave_no_sign(peer, now - listened, now))
        if silent:
            there = set(range(self._size)) - {self._rank, *self.lost, *self._closed}
            others = sorted(there.union(silent))
            if all(self._gave_no_sign(peer, now - listened, now) for peer in others):
                silent = tuple(others)  # also those that had brought all that is awaited before this rank was cut off
            elif all(now - self._heard_at[peer] > min(SILENCE_S, limits.silence_timeout / 2) for peer in others):
                return  # perhaps it is this rank that is cut off: a living rank is heard soon, since it answers polls
        lost = silent or tuple(
            peer
            for peer in peers
            if waited[peer] > limits.timeout_s
            # A rank that cannot send because another is behind is not at fault, up to twice the time-out.
            and (now - self._held_up_at[peer] > SILENCE_S or waited[peer] > 2 * limits.timeout_s)
        )
        if lost:
            limit_s = limits.silence_timeout if silent else limits.timeout_s
            words = "; ".join(self._last_word(peer, now) for peer in lost)
            raise RanksLostError(
                f"{names_of(lost)} delivered nothing for {limit_s:g} s in exchange {number % VIEW}: {words}"
                + "; or this rank itself is cut off" * (len(lost) > 1),
                lost,
            )

    def _gave_no_sign(self, peer: int, listened_s: float, now: float) -> bool:
        """Return whether this rank has listened for too long without hearing a rank."""
        return min(listened_s, now - self._heard_at[peer]) > self.limits.silence_timeout

    def _last_word(self, peer: int, now: float) -> str:
        heard_at = self._heard_at[peer]
        if not heard_at:
            return f"rank {peer} was never heard"
        if now - heard_at > SILENCE_S:
            return f"rank {peer} was last heard {now - heard_at:.1f} s ago, so it is dead or cut off"
        return f"rank {peer} answers, so it is alive and has not come to this exchange"

    # ---- a rank is lost ----------------------------------------------------------------------------------------------

    @property
    def view(self) -> int:
        """The number that precedes the first exchange among the current ranks."""
        return (self._returns * (self._size + 1) + sum(1 + rank for rank in self.lost)) * VIEW

    def _returns_before(self, number: int) -> int:
        """Return how often a rank had been let back in, by the number of an exchange."""
        return number // (VIEW * (self._size + 1))

    def may_go_on_without(self, error: RanksLostError) -> bool:
        """Return whether exchanges can go on without the ranks of this error."""
        return not self.lost and len(error.ranks) <= self.limits.max_failures and self._rank not in error.ranks

    def go_on_without(self, ranks: tuple[int, ...]) -> None:
        """Exclude ranks from exchanges from now on."""
        self.lost, self.verdict = ranks, None
        self.dropped = not self.limits.readmits

    def tell_who_is_lost(self, finished: int) -> None:
        """Announce the lost rank to all."""
        self._link.send_control(Kind.LOST, int(self.dropped), finished, pack_ranks(self.lost))

    def is_of_the_past(self, datagram: Datagram, begun: int) -> bool:
        """Return whether a datagram's sender is lost, or does not know yet that another rank is."""
        if not self.lost:
            return False
        speaks = datagram.kind in (Kind.DATA, Kind.STATUS, Kind.POLL)
        return datagram.sender in self.lost or (speaks and datagram.exchange // VIEW < begun // VIEW)

    def answer_the_past(self, finished: int, now: float) -> None:
        """Answer a datagram of the past with an announcement of who is lost; at most one every ``_TELL_S``."""
        if now - self._told_at > _TELL_S:
            self._told_at = now
            self.tell_who_is_lost(finished)

    def hear_who_is_lost(self, datagram: Datagram) -> None:
        """Take in that others go on without a rank: this rank must do so, too, whichever exchange it is in."""
        ranks = ranks_of(datagram.payload, self._size)
        returns = self._returns_before(datagram.exchange)
        if not ranks or returns < self._returns or self.verdict is not None:
            return
        if self._rank in ranks or returns > self._returns:
            self._for_good = bool(datagram.index) or returns > self._returns
            error = RanksLostError(f"rank {datagram.sender} and others have gone on without this rank", (self._rank,))
        elif ranks == self.lost:
            return
        else:
            error = RanksLostError(f"rank {datagram.sender} reports the loss of {names_of(ranks)}", ranks)
        self.verdict = -1, error

    def hear_goodbye(self, datagram: Datagram) -> None:
        """Take in that a rank has closed after an exchange that it had finished. If it names ranks at fault, this
        rank's exchanges fail after that one; if these are others, it still sends repairs of exchanges up to that one.
        """
        self._closed[datagram.sender] = datagram.exchange
        ranks = ranks_of(datagram.payload, self._size)
        if not ranks or datagram.sender in ranks:
            self._left.add(datagram.sender)
        if not ranks or self.verdict is not None:
            return
        if self._rank in ranks:
            error = RuntimeError(
                f"rank {datagram.sender} gave up waiting for this rank, after {self.limits.timeout_s:g} s or less"
            )
        else:
            error = RanksLostError(f"rank {datagram.sender} reports the loss of {names_of(ranks)}", ranks)
        self.verdict = datagram.exchange, error

    # ---- a lost rank returns -----------------------------------------------------------------------------------------

    def hear_it_asks(self, datagram: Datagram, now: float) -> None:
        """Take in that a rank is outside and asks to return. If this rank did not know that, the other is lost now."""
        if self._returns_before(datagram.exchange) < self._returns:
            return
        if datagram.sender in self.lost:
            self.asked_at = now
        elif self.verdict is None:
            ranks = (datagram.sender,)
            self.verdict = -1, RanksLostError(f"{names_of(ranks)} is lost, and reports that it was cut off", ranks)

    def readmit(self) -> None:
        """Let all ranks take part from now on."""
        self.lost, self._returns = (), self._returns + 1

    # ---- this rank is lost -------------------------------------------------------------------------------------------

    def may_return_after(self, error: RanksLostError) -> bool:
        """Return whether this rank is the lost one and may return: others say so, or it hears none of them."""
        if not self.limits.readmits or self._for_good:
            return False
        others = set(range(self._size)) - {self._rank, *self.lost}
        return self._rank in error.ranks or others <= set(error.ranks)

    def stand_aside(self, error: RanksLostError) -> RanksLostError:
        """Note that the others go on without this rank until they let it back in. Return the error that says so."""
        cut_off = self._rank not in error.ranks
        self.outside = RanksLostError(f"this rank is cut off: {error}", (self._rank,)) if cut_off else error
        self.lost, self.verdict = (), None
        return self.outside

    def begin_to_ask(self, now: float) -> float:
        """Begin to ask to be let back in. Return when to ask first."""
        self._answered_at = now
        return self._ask_at

    def ask_to_return(self, now: float) -> float:
        """Ask to be let back in if it is time. Return when to ask next.

        Raises:
            RanksLostError: the others do not answer any more, or are gone.
        """
        if now >= self._ask_at:
            if now - self._answered_at > self.limits.timeout_s:
                self._end_outside(f"no other rank answered within {self.limits.timeout_s:g} s")
            if self._closed:
                self._end_outside(f"{names_of(tuple(sorted(self._closed)))} closed the transport")
            self._ask_at = now + _ASK_S
            self._link.send_control(Kind.RETURN, 0, self.view)  # with as many returns as the others have counted
        return self._ask_at

    def _end_outside(self, why: str) -> NoReturn:
        self._for_good = True
        raise RanksLostError(f"the others go on without this rank: {why}", (self._rank,))

    def hear_from_outside(self, datagram: Datagram, now: float, *, asks: bool) -> bool:
        """Take in a datagram while this rank is outside. The others answer its requests, and let it back in with the
        first exchange among all ranks. Return whether this datagram has let it in.

        Args:
            datagram: datagram of one of the others.
            now: monotonic seconds.
            asks: whether this rank waits to be let back in.
        """
        if datagram.kind is Kind.BYE:
            self._closed[datagram.sender] = datagram.exchange
        elif datagram.kind is Kind.LOST and self._rank in (ranks_of(datagram.payload, self._size) or ()):
            self._answered_at = now
            self._returns = max(self._returns, self._returns_before(datagram.exchange))
            if datagram.index and not self._for_good:
                self._end_outside(f"it was away for too long, says rank {datagram.sender}")
        elif asks and self._is_of_next_view_of_all(datagram):
            self._returns, self.outside = self._returns + 1, None
            return True
        return False

    def _is_of_next_view_of_all(self, datagram: Datagram) -> bool:
        speaks = datagram.kind in (Kind.DATA, Kind.STATUS, Kind.POLL)
        return speaks and datagram.exchange // VIEW == (self._returns + 1) * (self._size + 1)
