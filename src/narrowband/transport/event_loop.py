"""The thread of a multicast transport: it waits for datagrams and timers, and lets the protocol's parts act on them.

The thread starts with the transport and continues after an exchange has returned, because others may still miss chunks
that this rank has sent. :mod:`.repair` moves buffers; :mod:`.membership` tracks which ranks are there. An error from
either ends the current exchange; it ends later exchanges, too, only if the others cannot go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from narrowband.transport.contract import RanksLostError
from narrowband.transport.datagram import Datagram, Kind, pack_ranks
from narrowband.transport.membership import GOODBYES, SILENCE_S

if TYPE_CHECKING:
    from narrowband.transport.contract import Wanted
    from narrowband.transport.link import Link
    from narrowband.transport.membership import Membership
    from narrowband.transport.repair import Repair

__all__ = ["EventLoop"]

log = logging.getLogger(__name__)

_CHECK_S = 0.25
_CLOSED = "the multicast transport is closed"


@dataclass
class _Request:
    """An exchange that the caller waits for; or, with ``rejoins`` and no buffers, a request to be let back in."""

    outgoing: memoryview
    incoming: list[memoryview]
    wanted: Wanted
    readmits: bool = False  # whether it is the first exchange with all ranks after a loss
    rejoins: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    failure: RanksLostError | None = None  # fails this exchange, but not later ones


class EventLoop:
    """Runs the protocol. The caller's thread calls :meth:`exchange`, :meth:`rejoin` and :meth:`close`; everything else
    runs in the loop's own thread.

    Args:
        link: link to the other ranks.
        members: tracks which ranks are there.
        repair: the exchanges under way.

    Attributes:
        readmits_next: whether the next exchange is the first one with the lost rank again.
        error: why no exchange is possible any more; None while exchanges are possible.
    """

    def __init__(self, link: Link, members: Membership, repair: Repair) -> None:
        self.readmits_next = False
        self.error: RuntimeError | None = None
        self._link, self._members, self._repair = link, members, repair
        self._rank = link.session.rank
        self._request: _Request | None = None  # the current exchange
        self._began_at = 0.0
        self._rejoining: _Request | None = None  # the request to be let back in, if the caller waits for one
        self._ask_at = 0.0
        self._posted: _Request | None = None
        self._closing = False
        self._abandoned = False
        self._closing_at: float | None = None
        self._wake_lock = threading.Lock()
        self._wake: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="narrowband-multicast", daemon=True)
        self._thread.start()

    # ---- the caller's side -------------------------------------------------------------------------------------------

    def exchange(self, outgoing: memoryview, incoming: list[memoryview], wanted: Wanted) -> None:
        """Run an exchange, and wait until it is complete."""
        request = _Request(outgoing, incoming, wanted, self.readmits_next)
        self.readmits_next = False
        self._post(request)

    def rejoin(self) -> None:
        """Wait until the others let this rank back in."""
        self._post(_Request(memoryview(b""), [], (), rejoins=True))

    def _post(self, request: _Request) -> None:
        if self.error is not None:
            raise self.error
        if self._closing:
            raise RuntimeError(_CLOSED)
        try:
            self._posted = request
            self._call()
            while not request.done.wait(1.0) and self._thread.is_alive():
                pass
        except BaseException:  # such as KeyboardInterrupt: the thread must not write into the buffers any more
            self._abandoned = True
            self.close()
            raise
        if request.failure is not None:
            raise request.failure
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Wait until all ranks that are there have received what this rank sent, then end the thread."""
        self._closing = True
        if self._thread.is_alive():
            self._call()
            self._thread.join(self._members.limits.timeout_s + SILENCE_S)

    def _call(self) -> None:
        with self._wake_lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wake = self._wake
        assert wake is not None
        try:
            while True:
                try:
                    self._loop(wake)
                    return
                except RanksLostError as error:
                    if self._members.may_return_after(error):
                        self._stand_aside(error)
                    elif self._members.may_go_on_without(error):
                        self._go_on_without(error)
                    else:
                        self._give_up(error, error.ranks)
        except Exception as error:
            log.debug("the multicast transport failed", exc_info=True)
            failure = error if isinstance(error, RuntimeError) else RuntimeError(f"multicast failed: {error}")
            self._give_up(failure, (self._rank,))
        finally:
            self._link.close()
            with self._wake_lock:  # once closed, the descriptor's number may be reused for another file
                os.close(wake)
                self._wake = None
            for request in (self._request, self._posted, self._rejoining):
                if request is not None:
                    self.error = self.error or RuntimeError(_CLOSED)  # its caller did not close it
                    request.done.set()

    def _loop(self, wake: int) -> None:
        link, repair = self._link, self._repair
        poller = select.poll()
        poller.register(link.fileno(), select.POLLIN)
        poller.register(wake, select.POLLIN)
        waits_for_room = False
        before = time.monotonic()
        while True:
            if link.blocked != waits_for_room:
                waits_for_room = link.blocked
                if waits_for_room:
                    poller.register(link.send_fileno(), select.POLLOUT)
                else:
                    poller.unregister(link.send_fileno())
            delay = self._delay(time.monotonic())
            ready = poller.poll(None if delay is None else delay * 1000)
            now = time.monotonic()
            if now - before > min(SILENCE_S, self._members.limits.silence_timeout / 2):
                self._members.attentive_since = now  # this process was stopped: it cannot say that others were silent
            before = now
            if any(descriptor == wake for descriptor, _ in ready):
                os.eventfd_read(wake)
            link.blocked = link.more = False
            if self._posted is not None:
                self._begin(now)
            self._receive(now)
            repair.look_for_gaps(now)
            repair.answer(now)
            repair.transmit(now)
            repair.poll(now)
            if self._rejoining is not None:
                self._ask_at = self._members.ask_to_return(now)
            self._conclude(now)
            if self._closing and self._may_leave(now):
                self._say_goodbye()
                return

    def _delay(self, now: float) -> float | None:
        """Return the seconds until something is due; None if only a datagram or a request can cause work."""
        if self._link.more:
            return 0.0
        times = self._repair.due()
        if self._request is not None or self._closing:
            times.append(now + _CHECK_S)
        if self._rejoining is not None:
            times.append(self._ask_at)
        if self._request is not None and (delay := self._link.bucket.delay(now)):
            times.append(now + delay)
        if self._link.blocked:
            times.append(now + 0.001)  # a card that is out of memory does not signal when it has some again
        return max(0.0, min(times) - now) if times else None

    def _receive(self, now: float) -> None:
        members, repair = self._members, self._repair
        for datagram in self._link.receive():
            members.hears(datagram.sender, now)
            if members.outside is not None:
                if not members.hear_from_outside(datagram, now, asks=self._rejoining is not None):
                    continue
                repair.enter_view()
                self._end_rejoining()
            if datagram.kind is Kind.RETURN:
                members.hear_it_asks(datagram, now)
            if members.is_of_the_past(datagram, repair.begun):
                members.answer_the_past(repair.finished, now)
            else:
                self._hear(datagram, now)

    def _hear(self, datagram: Datagram, now: float) -> None:
        if datagram.kind is Kind.DATA:
            self._repair.hear_chunk(datagram, now)
        elif datagram.kind is Kind.STATUS:
            self._repair.hear_status(datagram, now)
        elif datagram.kind is Kind.POLL:
            self._repair.hear_poll(datagram, now)
        elif datagram.kind is Kind.BYE:
            self._members.hear_goodbye(datagram)
        elif datagram.kind is Kind.LOST:
            self._members.hear_who_is_lost(datagram)

    # ---- exchanges ---------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        request, self._posted = self._posted, None
        assert request is not None
        if self.error is not None:  # it was posted just when the error came
            request.done.set()
            return
        outside = self._members.outside
        if request.rejoins and outside is not None:
            self._rejoining, self._ask_at = request, self._members.begin_to_ask(now)
            return
        if request.rejoins or outside is not None:
            request.failure = outside
            request.done.set()
            return
        if request.readmits:
            self._members.readmit()
            self._repair.enter_view()
        self._request, self._began_at = request, now
        self._repair.begin(request.outgoing, request.incoming, request.wanted, now)

    def _conclude(self, now: float) -> None:
        """Drop buffers that are complete everywhere. End the exchange if it is complete here. Raise if a rank is lost,
        or others say so.
        """
        self._repair.forget_complete(now)
        request, verdict = self._request, self._members.verdict
        if request is None:
            return
        if verdict is not None and verdict[0] < self._repair.begun:
            raise verdict[1]
        if self._repair.finish():
            self._link.statistics.exchanges += 1
            self._request = None
            request.done.set()
            return
        self._members.check(self._repair.awaited, self._repair.begun, self._began_at, now)

    def _may_leave(self, now: float) -> bool:
        """Return whether no rank that is there needs this rank any more."""
        if self._abandoned or self._request is not None:
            return True
        if self._closing_at is None:
            self._closing_at = now
        if now - self._closing_at > self._members.limits.timeout_s:
            return True
        return all(self._members.is_silent(peer, now, self._closing_at) for peer in self._repair.needing)

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _give_up(self, error: RuntimeError, ranks: tuple[int, ...]) -> None:
        """Fail the current exchange and all later ones. Other ranks may still complete earlier exchanges."""
        self.error = self.error or error
        self._closing = True
        with contextlib.suppress(OSError):
            self._say_goodbye(ranks)
        request, self._request = self._request, None
        if request is not None:
            self._repair.abandon()
            request.done.set()
        self._end_rejoining()

    def _say_goodbye(self, at_fault: tuple[int, ...] = ()) -> None:
        for _ in range(GOODBYES):
            self._link.send_control(Kind.BYE, 0, self._repair.finished, pack_ranks(at_fault))

    def _go_on_without(self, error: RanksLostError) -> None:
        """Fail the current exchange. Later ones are among the remaining ranks, and numbered anew."""
        self._members.go_on_without(error.ranks)
        self._repair.begin_anew()
        for _ in range(GOODBYES):
            self._members.tell_who_is_lost(self._repair.finished)
        self._fail(error)

    def _stand_aside(self, error: RanksLostError) -> None:
        """Fail the current exchange, and all others until this rank is let back in."""
        outside = self._members.stand_aside(error)
        self._repair.begin_anew()
        self._fail(outside)

    def _fail(self, error: RanksLostError) -> None:
        """Fail the current exchange, but not later ones."""
        request, self._request = self._request, None
        if request is not None:
            request.failure = error
            request.done.set()

    def _end_rejoining(self) -> None:
        request, self._rejoining = self._rejoining, None
        if request is not None:
            request.done.set()
