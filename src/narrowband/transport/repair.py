"""Send chunks in an exchange, send missing ones again, and report which chunks have arrived.

- Every buffer is cut into chunks, one datagram each, sent once in order. If a receiver sees a gap that does not close,
  it names the missing runs in a *status*; the sender sends them again, once for all receivers that miss them.
- Statuses also report how much of every rank's buffer has arrived. A sender stays within a window beyond its slowest
  receiver, so neither receive buffers nor a switch's queue are overrun; the window follows loss
  (:mod:`narrowband.transport.pacing`). A rank that has not begun the exchange yet keeps early chunks, up to a limit.
- A sender that hears nothing *polls*, saying how much it has sent, so that receivers notice what is missing at the end.
  Without losses there are few statuses and polls: one status for about a hundred times its size.

At most two buffers of earlier exchanges are kept for others: a third exchange sends nothing before the first of them is
complete everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowband.transport.datagram import HEADER_BYTES, Datagram, Kind, Missing, Status
from narrowband.transport.delivery import Receiving, Sending
from narrowband.transport.pacing import Window
from narrowband.transport.sockets import IP_UDP_BYTES, LINK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narrowband.transport.contract import Wanted
    from narrowband.transport.link import Link
    from narrowband.transport.membership import Membership

__all__ = ["Repair"]

#: Most bytes of a status, as a share of the bytes that it reports on.
_STATUS_SHARE = 0.01
#: Least seconds between two answers to polls, or to chunks that arrived again.
_ANSWER_S = 0.002
_PATIENCE_S = (0.01, 0.5)  # before a poll: at least, at most
_SENT_PER_TURN = 256 * 1024


class Repair:
    """The exchanges under way: the current one, earlier ones that others have not finished, and the next one.

    Args:
        link: link to the other ranks.
        members: is told which ranks deliver something, and knows which ranks are there.
        early_bytes: how many bytes are kept of an exchange that this rank has not begun.

    Attributes:
        begun: number of the last exchange that this rank began.
        finished: number of the last exchange that this rank finished.
    """

    def __init__(self, link: Link, members: Membership, early_bytes: int) -> None:
        self.begun = 0
        self.finished = 0
        self._link, self._members = link, members
        self._session, self._early_bytes = link.session, early_bytes
        self._rank, self._size = link.session.rank, link.session.world_size
        on_link = HEADER_BYTES + IP_UDP_BYTES + LINK_BYTES
        per_sender = -(-int((on_link + 4 * self._size) / _STATUS_SHARE) // self._session.chunk_bytes)
        self._report_after = per_sender * (self._size - 1)  # chunks, from all senders together
        # Roughly what the kernel counts for a datagram: unused ends of memory fragments, and its own records.
        room = self._session.receive_buffer * 3 // 4 // (self._session.chunk_bytes * 5 // 4 + 1024)
        self._window = Window(2 * per_sender + 2, room // self._size, self._size)
        self._missing_capacity = Status.capacity(self._size, self._session.chunk_bytes)
        self._sending: dict[int, Sending] = {}
        self._receiving: dict[int, Receiving] = {}
        self._status_due: dict[int, float] = {}  # exchange → when
        self._status_sent: dict[int, float] = {}
        self._serial = 0
        self._serials: dict[int, list[int]] = {}  # exchange → the newest status of each rank
        self._poll_due: dict[int, float] = {}
        self._patience: dict[int, float] = {}

    # ---- exchanges ---------------------------------------------------------------------------------------------------

    def begin(self, outgoing: memoryview, incoming: list[memoryview], wanted: Wanted, now: float) -> None:
        """Begin the next exchange."""
        number = self.begun + 1
        receiving = self._receiving.get(number)
        awaited = receiving is not None
        if receiving is None:
            receiving = self._receiving[number] = self._new_receiving(number)
        self.begun = number
        self._sending[number] = sending = Sending(
            number, outgoing, self._session.chunk_bytes, self._rank, self._size, self._members.lost
        )
        self._serials[number] = [0] * self._size
        self._window.begin(now)
        receiving.begin(incoming, wanted, now)
        self._wait_before_poll(sending, now)
        if awaited:
            self._answer_by(number, now)

    def finish(self) -> bool:
        """Finish the current exchange if it is complete on this rank. Return whether it is."""
        number = self.begun
        sending = self._sending[number]
        if not self._receiving[number].complete or sending.next < sending.count:
            return False
        self.finished = number
        del self._receiving[number]
        if sending.complete:
            self._forget(number)
        else:
            sending.keep()
        for old in [old for old in self._status_sent if old < number - 2]:
            del self._status_sent[old]
        return True

    def abandon(self) -> None:
        """Drop the current exchange, which has failed. Other ranks may still complete earlier ones."""
        self._forget(self.begun)
        self._receiving.pop(self.begun, None)

    def forget_complete(self, now: float) -> None:
        """Drop buffers that are complete everywhere. A rank that has closed has all of the exchanges that it finished,
        even if its last statuses were lost.
        """
        for number, sending in list(self._sending.items()):
            for peer in sending.waiting:
                if self._members.has_closed(peer, number):
                    sending.heard(peer, 0, True, now)
            if sending.complete and number <= self.finished:
                self._forget(number)

    def enter_view(self) -> None:
        """Number exchanges anew, among the ranks that take part now."""
        self._receiving.clear()
        self.begun = self.finished = self._members.view

    def begin_anew(self) -> None:
        """Do as :meth:`enter_view`, and drop all earlier exchanges, even if others still miss chunks of them."""
        for number in list(self._sending):
            self._forget(number)
        self._status_due.clear()
        self._status_sent.clear()
        self.enter_view()

    @property
    def awaited(self) -> set[int]:
        """The ranks that the current exchange waits for."""
        sending = self._sending[self.begun]
        ranks = set(self._receiving[self.begun].waiting)
        if sending.next < sending.count:
            held_up = self._sending.get(self.begun - 2)
            ranks.update(held_up.waiting if held_up else sending.behind)
        return ranks

    @property
    def needing(self) -> set[int]:
        """The ranks that still need chunks of this rank."""
        return {peer for sending in self._sending.values() for peer in sending.waiting}

    def due(self) -> list[float]:
        """Return the times at which something must be sent or checked."""
        checks = [each.check_at for each in self._receiving.values() if each.check_at is not None]
        return [*self._status_due.values(), *self._poll_due.values(), *checks]

    def _forget(self, number: int) -> None:
        for each in (self._sending, self._serials, self._poll_due, self._patience):
            each.pop(number, None)

    def _receiving_of(self, number: int) -> Receiving | None:
        """Return the state of the others' buffers in the current exchange, or the next, which others may have begun."""
        if number == self.begun + 1 and number not in self._receiving:
            self._receiving[number] = self._new_receiving(number)
        return self._receiving.get(number)

    def _new_receiving(self, number: int) -> Receiving:
        return Receiving(number, self._session.chunk_bytes, self._rank, self._size, self._early_bytes)

    # ---- what comes in -----------------------------------------------------------------------------------------------

    def hear_chunk(self, datagram: Datagram, now: float) -> None:
        """Take in a chunk of a rank's buffer."""
        receiving = self._receiving_of(datagram.exchange)
        if receiving is None or not receiving.take(datagram.sender, datagram.index, datagram.payload, now):
            self._link.statistics.repeated_datagrams += 1
            if datagram.exchange <= self.begun:  # the sender does not know that the chunk has arrived
                self._answer_by(datagram.exchange, now, _ANSWER_S)
            return
        self._members.brings(datagram.sender, now)
        due = receiving.unreported >= self._report_after or receiving.complete
        if due and self._status_due.get(datagram.exchange, now + 1.0) > now:
            self._answer_by(datagram.exchange, now)

    def hear_status(self, datagram: Datagram, now: float) -> None:
        """Take in a status: how much has arrived at a rank, and what it misses."""
        peer, sending = datagram.sender, self._sending.get(datagram.exchange)
        if sending is None:
            return
        serials = self._serials[datagram.exchange]
        if datagram.index <= serials[peer]:
            return
        status = Status.unpack(datagram.payload, self._size)
        if status is None:
            raise RuntimeError(f"cannot read the status of rank {peer}: it runs another version of narrowband")
        serials[peer] = datagram.index
        floor, waiting = sending.floor, peer in sending.waiting
        advanced, trip_s = sending.heard(peer, status.progress[self._rank], status.complete[self._rank], now)
        if trip_s is not None:
            self._window.timed(trip_s)
        if advanced or waiting > (peer in sending.waiting):
            self._window.passed(peer, advanced)
            self._window.arrived(sending.floor - floor, now)
            self._members.brings(peer, now)
            self._wait_before_poll(sending, now, anew=True)
        for run in status.missing:
            if run.rank == self._rank and (count := sending.ask(run, now, 1.5 * self._window.trip_s)):
                self._window.lost(peer, count, now)

    def hear_poll(self, datagram: Datagram, now: float) -> None:
        """Take in a poll, which says how much a rank has sent, and asks for a status."""
        number = datagram.exchange
        receiving = self._receiving_of(number)
        if receiving is not None:
            receiving.polled(datagram.sender, datagram.index, now)
            if number == self.begun and receiving.has_all_sent(datagram.sender):
                self._members.is_held_up(datagram.sender, now)
        self._answer_by(number, now, _ANSWER_S)  # also to ranks that go on without a lost rank before this one does

    # ---- what goes out -----------------------------------------------------------------------------------------------

    def look_for_gaps(self, now: float) -> None:
        """Ask for chunks that stay missing."""
        for receiving in self._receiving.values():
            due = receiving.check_at is not None and receiving.check_at <= now
            if due and (missing := receiving.missing(now, self._missing_capacity)):
                self._send_status(receiving.number, now, missing)

    def _answer_by(self, number: int, now: float, apart_s: float = 0.0) -> None:
        """Make a status of an exchange due now, or ``apart_s`` after the last one."""
        at = max(now, self._status_sent.get(number, 0.0) + apart_s)
        self._status_due[number] = min(at, self._status_due.get(number, at))

    def answer(self, now: float) -> None:
        """Send the statuses that are due."""
        for number in [number for number, due in self._status_due.items() if due <= now]:
            if not self._send_status(number, now):
                return
            del self._status_due[number]

    def _send_status(self, number: int, now: float, missing: Sequence[Missing] = ()) -> bool:
        receiving = self._receiving.get(number)
        if receiving is None:  # finished, or a peer's that is ahead
            done = number <= self.finished
            status = Status((0,) * self._size, (done,) * self._size)
        else:
            status = Status(tuple(receiving.progress), tuple(receiving.completes()), tuple(missing))
        self._serial += 1
        if not self._link.send_control(Kind.STATUS, self._serial, number, status.pack()):
            return False
        self._status_sent[number] = now
        if receiving is not None:
            receiving.unreported = 0
        return True

    def transmit(self, now: float) -> None:
        """Send repairs, those of the oldest exchange first; then as much of the current buffer as the window allows."""
        budget = max(1, _SENT_PER_TURN // self._session.chunk_bytes)
        if self._link.blocked or self._link.bucket.delay(now):
            return
        for number in sorted(self._sending):
            sending = self._sending[number]
            while sending.repairs:
                index = next(iter(sending.repairs))
                if not budget:
                    self._link.more = True
                    return
                if not self._send_chunk(sending, index, now):
                    return
                budget -= 1
                del sending.repairs[index]
        current = self._sending.get(self.begun)
        if current is None or self.begun - 2 in self._sending:
            return
        end = min(current.count, current.floor + int(self._window.size))
        while current.next < end:
            if not budget:
                self._link.more = True
                return
            if not self._send_chunk(current, current.next, now):
                return
            budget -= 1

    def _send_chunk(self, sending: Sending, index: int, now: float) -> bool:
        if self._link.bucket.delay(now):
            return False
        chunk, repairs = sending.chunk(index), index != sending.next
        if not self._link.send_chunk(index, sending.number, chunk, repairs=repairs):
            return False
        sending.sent(index, now)
        self._wait_before_poll(sending, now)
        return True

    def _wait_before_poll(self, sending: Sending, now: float, *, anew: bool = False) -> None:
        """Postpone the next poll, because something was sent or heard."""
        least, most = _PATIENCE_S
        if anew or sending.number not in self._patience:
            self._patience[sending.number] = min(max(least, 2 * self._window.trip_s), most)
        self._poll_due[sending.number] = now + self._patience[sending.number]

    def poll(self, now: float) -> None:
        """Send polls for exchanges of which nothing was heard for a while."""
        for number in [number for number, due in self._poll_due.items() if due <= now]:
            sending = self._sending[number]
            if self._link.blocked or not self._link.send_control(Kind.POLL, sending.next, number):
                return
            self._patience[number] = min(2 * self._patience[number], _PATIENCE_S[1])
            self._poll_due[number] = now + self._patience[number]
