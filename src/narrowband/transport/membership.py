"""Who takes part in exchanges: ranks that are silent, lost, outside, or let back in.

A rank that is waited for and brings nothing for ``timeout_s``, or gives no sign of life for ``silence_timeout``, is
lost. Who notices first tells the others. Where one may be lost, exchanges go on without it. They are numbered anew,
from 2³² times the number of a *view* on, so that datagrams of earlier exchanges, or of exchanges without another rank,
are not taken for theirs. Of n ranks, view g·(n+1) has all of them, after g returns, and the k-th after it is the same
without rank k − 1. Whoever still speaks of earlier exchanges is told who is lost: a rank that did not hear it, and the
lost one, if it was only late. Nothing goes on before all but one are there, so two parts of a network never both go on.

Where lost ranks are readmitted, the lost one stands aside when it is told (or when it hears nobody at all), and asks to
be let back in. Once the others have agreed on that, their next exchange is the first of a view with all ranks, and the
first datagram of it lets the waiting rank in.

Nothing here waits, or knows of sockets but to send by them: :mod:`narrowband.transport.event_loop` does.
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

#: A peer that did not answer polls for so long is gone.
SILENCE_S = 2.0
#: What has to be heard by all is sent so often: any of them may be lost.
GOODBYES = 3
#: Exchanges among the same ranks are fewer.
VIEW = 1 << 32
#: So far apart a rank tells who is lost, however many want to hear it.
_TELL_S = 0.05
#: A lost rank asks so often to be let back.
_ASK_S = 0.05


@dataclass(frozen=True)
class Limits:
    """As for :class:`~narrowband.transport.multicast.Multicast`."""

    timeout_s: float
    silence_timeout: float
    max_failures: int
    readmits: bool


def names_of(ranks: tuple[int, ...]) -> str:
    """``rank 1``, or ``ranks 1, 2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class Membership:
    """Who takes part, as far as this rank knows.

    Args:
        link: to the others.
        limits: when a rank is lost, and what then.

    Attributes:
        limits: as given.
        lost: the rank that exchanges go on without.
        dropped: whether the lost rank may not return any more.
        asked_at: when the lost rank last asked to return; monotonic seconds.
        verdict: what others have found out, for the exchange at work or the next: after which exchange, and the error.
        outside: the error with which the others have gone on without this rank, which may return.
        attentive_since: since when this rank has listened without a break.
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
        self._heard_at = [0.0] * self._size
        self._brought_at = [0.0] * self._size
        self._held_up_at = [0.0] * self._size
        self._told_at = 0.0
        self._ask_at = 0.0
        self._answered_at = 0.0  # when the others last said that they go on without this rank

    # ---- signs of life -----------------------------------------------------------------------------------------------

    def hears(self, peer: int, now: float) -> None:
        """Something came from a rank."""
        self._heard_at[peer] = now

    def brings(self, peer: int, now: float) -> None:
        """A rank brought something that was waited for."""
        self._brought_at[peer] = now

    def is_held_up(self, peer: int, now: float) -> None:
        """A rank says that it would send, if others were further."""
        self._held_up_at[peer] = now

    def has_closed(self, peer: int, number: int) -> bool:
        """Whether a rank left after an exchange that it had finished."""
        return self._closed.get(peer, 0) >= number

    def is_silent(self, peer: int, now: float, since: float) -> bool:
        """Whether nothing came from a rank for a while, or it has closed."""
        return peer in self._closed or now - max(since, self._heard_at[peer]) > SILENCE_S

    def check(self, awaited: Iterable[int], number: int, began_at: float, now: float) -> None:
        """Raise RanksLostError where a rank that is waited for in an exchange is lost."""
        peers, limits = sorted(awaited), self.limits
        gone = tuple(peer for peer in peers if self._closed.get(peer, number) < number)
        if gone:
            raise RanksLostError(f"{names_of(gone)} closed the transport before exchange {number % VIEW}", gone)
        waited = {peer: now - max(began_at, self._brought_at[peer]) for peer in peers}
        listened = max(began_at, self.attentive_since)
        silent = tuple(peer for peer in peers if now - max(listened, self._heard_at[peer]) > limits.silence_timeout)
        lost = silent or tuple(
            peer
            for peer in peers
            if waited[peer] > limits.timeout_s
            # A rank whose window another one keeps shut is not at fault; in the end somebody has to be.
            and (now - self._held_up_at[peer] > SILENCE_S or waited[peer] > 2 * limits.timeout_s)
        )
        if lost:
            limit_s = limits.silence_timeout if silent else limits.timeout_s
            words = "; ".join(self._last_word(peer, now) for peer in lost)
            raise RanksLostError(
                f"{names_of(lost)} brought nothing for {limit_s:g} s in exchange {number % VIEW}: {words}"
                + "; or this rank is the one that is cut off" * (len(lost) > 1),
                lost,
            )

    def _last_word(self, peer: int, now: float) -> str:
        heard_at = self._heard_at[peer]
        if not heard_at:
            return f"rank {peer} was never heard"
        if now - heard_at > SILENCE_S:
            return f"rank {peer} was last heard {now - heard_at:.1f} s ago, so it is dead or cut off"
        return f"rank {peer} answers, so it is late or at something else"

    # ---- a rank is lost ----------------------------------------------------------------------------------------------

    @property
    def view(self) -> int:
        """The number before that of the first exchange among these ranks."""
        return (self._returns * (self._size + 1) + sum(1 + rank for rank in self.lost)) * VIEW

    def _returns_before(self, number: int) -> int:
        """How often a rank had been let back in, at the time of an exchange."""
        return number // (VIEW * (self._size + 1))

    def may_go_on_without(self, error: RanksLostError) -> bool:
        """Whether exchanges go on without the ranks of this error."""
        return not self.lost and len(error.ranks) <= self.limits.max_failures and self._rank not in error.ranks

    def go_on_without(self, ranks: tuple[int, ...]) -> None:
        """Exchanges are among the others from now on."""
        self.lost, self.verdict = ranks, None
        self.dropped = not self.limits.readmits

    def tell_who_is_lost(self, finished: int) -> None:
        """Say it to all."""
        self._link.send_control(Kind.LOST, int(self.dropped), finished, pack_ranks(self.lost))

    def is_of_the_past(self, datagram: Datagram, begun: int) -> bool:
        """Whether a datagram's sender is lost, or does not know yet that another one is."""
        if not self.lost:
            return False
        speaks = datagram.kind in (Kind.DATA, Kind.STATUS, Kind.POLL)
        return datagram.sender in self.lost or (speaks and datagram.exchange // VIEW < begun // VIEW)

    def answer_the_past(self, finished: int, now: float) -> None:
        """Say who is lost, but not for every datagram."""
        if now - self._told_at > _TELL_S:
            self._told_at = now
            self.tell_who_is_lost(finished)

    def hear_who_is_lost(self, datagram: Datagram) -> None:
        """Others go on without a rank: so has this one to, whichever exchange it is in."""
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
            error = RanksLostError(f"{names_of(ranks)} lost, says rank {datagram.sender}", ranks)
        self.verdict = -1, error

    def hear_goodbye(self, datagram: Datagram) -> None:
        """A rank leaves after an exchange it has finished. If one is at fault, this rank fails when it gets there."""
        self._closed[datagram.sender] = datagram.exchange
        ranks = ranks_of(datagram.payload, self._size)
        if not ranks or self.verdict is not None:
            return
        if self._rank in ranks:
            error = RuntimeError(
                f"rank {datagram.sender} waited {self.limits.timeout_s:g} s or less for this rank and gave up"
            )
        else:
            error = RanksLostError(f"{names_of(ranks)} lost, says rank {datagram.sender}", ranks)
        self.verdict = datagram.exchange, error

    # ---- a lost rank returns -----------------------------------------------------------------------------------------

    def hear_it_asks(self, datagram: Datagram, now: float) -> None:
        """A rank is outside, and wants back in. Who did not know that it is outside has lost it now."""
        if self._returns_before(datagram.exchange) < self._returns:
            return
        if datagram.sender in self.lost:
            self.asked_at = now
        elif self.verdict is None:
            ranks = (datagram.sender,)
            self.verdict = -1, RanksLostError(f"{names_of(ranks)} lost: it says that it was cut off", ranks)

    def readmit(self) -> None:
        """All ranks take part from now on."""
        self.lost, self._returns = (), self._returns + 1

    # ---- this rank is lost -------------------------------------------------------------------------------------------

    def may_return_after(self, error: RanksLostError) -> bool:
        """Whether it is this rank that is lost, and not for good: others say so, or it hears none of them."""
        if not self.limits.readmits or self._for_good:
            return False
        others = set(range(self._size)) - {self._rank, *self.lost}
        return self._rank in error.ranks or others <= set(error.ranks)

    def stand_aside(self, error: RanksLostError) -> RanksLostError:
        """The others go on without this rank until they let it back in; the error that says so."""
        cut_off = self._rank not in error.ranks
        self.outside = RanksLostError(f"this rank is cut off: {error}", (self._rank,)) if cut_off else error
        self.lost, self.verdict = (), None
        return self.outside

    def begin_to_ask(self, now: float) -> float:
        """Ask to be let back in from now on; when to ask first."""
        self._answered_at = now
        return self._ask_at

    def ask_to_return(self, finished: int, now: float) -> float:
        """Ask, if it is time; when to ask next.

        Raises:
            RanksLostError: the others answer no more, or are gone.
        """
        if now >= self._ask_at:
            if now - self._answered_at > self.limits.timeout_s:
                self._end_outside(f"no other rank answered within {self.limits.timeout_s:g} s")
            if self._closed:
                self._end_outside(f"{names_of(tuple(sorted(self._closed)))} closed the transport")
            self._ask_at = now + _ASK_S
            self._link.send_control(Kind.RETURN, 0, finished)
        return self._ask_at

    def _end_outside(self, why: str) -> NoReturn:
        self._for_good = True
        raise RanksLostError(f"the others go on without this rank: {why}", (self._rank,))

    def hear_from_outside(self, datagram: Datagram, now: float, *, asks: bool) -> bool:
        """The others let this rank back in with an exchange among all, and answer it until then. Whether it is in now.

        Args:
            datagram: from one of the others.
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
