"""UDP/IP multicast that arrives: a datagram leaves its sender once, for all ranks, and again where one did not get it.

There is no maintained NORM (RFC 5740) for Python, so this is a protocol of its own, of the same kind:

- Every buffer is cut into chunks, one datagram each, sent once in order. A receiver that sees a gap, and that it stays,
  names the missing runs in a *status*; the sender sends those again, once for all who miss them.
- Statuses also say how far a rank has got with everybody's buffer. A sender keeps within a window of what its slowest
  receiver has got past, so neither receive buffers nor a switch's queue are overrun; the window follows loss
  (:mod:`narrowband.transport.pacing`). A rank that has yet to begin the exchange keeps what comes early, up to a limit.
- A sender that hears nothing *polls*, saying how much it has sent, so that receivers see what is missing at the end.
  Exchanges that went well have few of these: one status for about a hundred times its size.
- Every datagram carries a keyed code (:mod:`narrowband.transport.datagram`). What is not of this session is dropped;
  what comes twice or late changes nothing, because a chunk's place follows from its sender, exchange and number.
- A rank that is waited for and brings nothing for ``timeout_s``, or gives no sign of life for ``silence_s``, is named
  in an error, on all ranks: who notices first tells the others.
- With ``tolerate``, exchanges go on after that error, without the rank that was lost. They are numbered anew, from 2³²
  times the number of a *view* on, so that what is said of earlier exchanges, or of those without another rank, is not
  taken for theirs. Whoever still speaks of earlier ones is told who is lost: a rank that did not hear it, and the lost
  one, if it was only late. Nothing goes on before all but one are there, so two parts of a network never both go on.
- With ``readmits``, the lost one stands aside when it is told (or when it hears nobody at all), and asks to be let back
  in. Once the others have agreed on that, their next exchange is the first of a view with all ranks, and the first
  datagram of it lets the waiting rank in. Of n ranks, view g·(n+1) has all of them, after g returns, and the k-th after
  it is the same without rank k − 1.

One thread does all of it. It begins with the first exchange and goes on when an exchange has returned, because others
may still miss what this rank has sent. What it keeps for them is at most two buffers of earlier exchanges: a third
exchange sends nothing before the first of them is complete everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from narrowband.errors import UnsupportedError
from narrowband.transport.contract import RanksLostError, Transport, check_exchange
from narrowband.transport.datagram import (
    HEADER_BYTES,
    Datagram,
    Kind,
    Missing,
    Status,
    Wire,
    pack_ranks,
    ranks_of,
)
from narrowband.transport.delivery import Receiving, Sending
from narrowband.transport.pacing import TokenBucket, Window
from narrowband.transport.probe import Session, open_session
from narrowband.transport.sockets import IP_UDP_BYTES, MulticastSocket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.transport.contract import Wanted

__all__ = ["Multicast", "MulticastStatistics"]

log = logging.getLogger(__name__)

#: A status may cost so much of what it reports.
_STATUS_SHARE = 0.01
_LINK_BYTES = 14  # of an Ethernet frame, without preamble and checksum: as Linux's counters count
#: So far apart are answers to polls, and to what came again.
_ANSWER_S = 0.002
_PATIENCE_S = (0.01, 0.5)  # before a poll: at least, at most
#: A peer that did not answer polls for so long is gone.
_SILENCE_S = 2.0
_RECEIVED_PER_TURN = 64
_SENT_PER_TURN = 256 * 1024
_GOODBYES = 3  # any of them may be lost
_CHECK_S = 0.25
#: So far apart a rank tells who is lost, however many want to hear it.
_TELL_S = 0.05
#: Exchanges among the same ranks are fewer.
_VIEW = 1 << 32
#: A lost rank asks so often to be let back, and is heard doing so for so long.
_ASK_S, _ASKED_S = 0.05, 1.0


@dataclass
class MulticastStatistics:
    """What this rank has sent and received since the transport was made. A datagram sent to all counts once.

    Attributes:
        exchanges: that returned.
        data_datagrams, data_bytes: buffers' chunks sent for the first time, and their bytes.
        repair_datagrams, repair_bytes: the same for those sent again.
        control_datagrams, control_bytes: statuses, polls and goodbyes, and their payloads' bytes.
        received_datagrams: genuine ones.
        rejected_datagrams: those that were not: forged, changed, cut, or of another session.
        repeated_datagrams: chunks that brought nothing.
    """

    exchanges: int = 0
    data_datagrams: int = 0
    data_bytes: int = 0
    repair_datagrams: int = 0
    repair_bytes: int = 0
    control_datagrams: int = 0
    control_bytes: int = 0
    received_datagrams: int = 0
    rejected_datagrams: int = 0
    repeated_datagrams: int = 0

    @property
    def sent_datagrams(self) -> int:
        """All that was sent."""
        return self.data_datagrams + self.repair_datagrams + self.control_datagrams

    @property
    def sent_bytes(self) -> int:
        """All that was sent, in payloads and this transport's headers."""
        payloads = self.data_bytes + self.repair_bytes + self.control_bytes
        return payloads + self.sent_datagrams * HEADER_BYTES

    @property
    def link_bytes(self) -> int:
        """All that was sent as the counters of an Ethernet link count it: with the headers of UDP, IP and Ethernet."""
        return self.sent_bytes + self.sent_datagrams * (IP_UDP_BYTES + _LINK_BYTES)


class Multicast(Transport):
    """Buffers by UDP/IP multicast among the ranks of a process group. Making one is collective.

    Args:
        group: the ranks. It carries the session's key, and what the probe found.
        interface: name or IPv4 address of this rank's network card; None is the one that gloo or NCCL was told, or the
            one on the way to ``MASTER_ADDR``.
        mtu: largest IP packet to send, in bytes; None is what the cards of all ranks take. What a switch between them
            takes they do not know.
        ttl: 1 stays on the link; more lets routers that route multicast pass it on.
        rate: a limit for what this rank sends, in bytes per second; None leaves it to the window.
        timeout_s: a rank that is waited for and brings nothing for so long is lost.
        silence_s: one that gives no sign of life for so long is lost, too. A rank that computes does give some. None:
            only ``timeout_s`` counts.
        tolerate: how many ranks may be lost and exchanges go on without them, 0 or 1.
        readmits: whether one that was lost, and lives, may take part again.
        early_bytes: how much of an exchange that has not begun on this rank is kept.
        probe_s: how long ranks listen for each other when the transport is made.

    Raises:
        UnsupportedError: multicast does not reach all ranks, or ``tolerate`` with fewer than three, of whom none could
            know which one is cut off. The same on all of them.

    Example:
        >>> transport = Multicast(dist.group.WORLD)  # doctest: +SKIP
        >>> transport.exchange(mine, theirs, wanted)  # doctest: +SKIP
        >>> transport.statistics.link_bytes  # doctest: +SKIP
    """

    name = "multicast"
    multicast = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        interface: str | None = None,
        mtu: int | None = None,
        ttl: int = 1,
        rate: float | None = None,
        timeout_s: float = 300.0,
        silence_s: float | None = None,
        tolerate: int = 0,
        readmits: bool = False,
        early_bytes: int = 64 * 1024 * 1024,
        probe_s: float = 2.0,
    ) -> None:
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError(f"rate is {rate}; expected bytes per second above 0, or None")
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}; expected seconds above 0")
        if silence_s is not None and not 0 < silence_s < float("inf"):
            raise ValueError(f"silence_s is {silence_s}; expected seconds above 0, or None")
        if tolerate not in (0, 1):
            raise ValueError(f"tolerate is {tolerate}; expected 0 or 1")
        if mtu is not None and not 576 <= mtu <= 65536:
            raise ValueError(f"mtu is {mtu}; expected 576 to 65536 bytes, or None")
        if not 1 <= ttl <= 255:
            raise ValueError(f"ttl is {ttl}; expected 1 to 255")
        if tolerate and dist.get_world_size(group) < 3:
            raise UnsupportedError(f"of {dist.get_world_size(group)} ranks none can be lost and be known to be: use 3")
        session, opened = open_session(group, interface=interface, mtu=mtu, ttl=ttl, wait_s=probe_s)
        self._rank, self._size = session.rank, session.world_size
        self.tolerate, self.readmits = tolerate, bool(tolerate and readmits)
        silence_s = float("inf") if silence_s is None else silence_s
        limits = _Limits(rate, timeout_s, silence_s, tolerate, self.readmits, early_bytes)
        self._machine = machine = _Machine(session, opened, limits)
        # At the interpreter's exit, too: a thread that it catches inside native code takes the process down.
        self._end = weakref.finalize(self, machine.close)

    @property
    def statistics(self) -> MulticastStatistics:
        """Counts up to now."""
        return replace(self._machine.statistics)

    @property
    def lost(self) -> tuple[int, ...]:
        """The rank that exchanges go on without."""
        return () if self._machine.readmitting else self._machine.lost

    @property
    def returning(self) -> bool:
        """As :attr:`Transport.returning`."""
        return bool(self.lost) and time.monotonic() - self._machine.asked_at < _ASKED_S

    def readmit(self) -> None:
        """As :meth:`Transport.readmit`."""
        self._machine.readmitting = True

    def drop(self) -> None:
        """As :meth:`Transport.drop`."""
        self._machine.dropped = True

    def rejoin(self) -> None:
        """As :meth:`Transport.rejoin`; it waits for ``timeout_s`` after the last sign of the others."""
        self._machine.rejoin()

    def exchange(self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted) -> None:
        """As :meth:`Transport.exchange`.

        Raises:
            ValueError: buffers or ranges that cannot be meant.
            RanksLostError: a rank did not answer, or has closed. The transport is of no use after that, unless
                ``lost`` has it: then all others get this error once, too, each in the exchange that it is in or in its
                next, and the exchange after that is one without the lost rank. One that names this rank itself leaves
                :meth:`rejoin`, with ``readmits``.
            RuntimeError: buffers' sizes differ between ranks, or the network fails. The transport is of no use then.
        """
        check_exchange(outgoing, incoming, wanted, self._rank, self._size)
        if gone := tuple(rank for rank in self.lost if wanted[rank]):
            raise RanksLostError(f"{_names(gone)} lost before, and nothing can be wanted of it", gone)
        self._machine.exchange(_bytes_of(outgoing), [_bytes_of(buffer) for buffer in incoming], wanted)

    def close(self) -> None:
        """Wait until all ranks have what this one sent them (those that are there), and end. Later calls do nothing."""
        self._end()


def _bytes_of(buffer: Tensor | None) -> memoryview:
    return memoryview(b"") if buffer is None else buffer.numpy().data


@dataclass
class _Request:
    """An exchange that the caller waits for; or, without buffers, that the others let this rank back in."""

    outgoing: memoryview
    incoming: list[memoryview]
    wanted: Wanted
    readmits: bool = False  # it is the first with all ranks
    rejoins: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    failure: RanksLostError | None = None  # of this exchange, and not of those to come


@dataclass(frozen=True)
class _Limits:
    """As for :class:`Multicast`."""

    rate: float | None
    timeout_s: float
    silence_s: float
    tolerate: int
    readmits: bool
    early_bytes: int


class _Machine:
    """The protocol. All but :meth:`exchange` and :meth:`close` belongs to its thread."""

    def __init__(self, session: Session, opened: MulticastSocket, limits: _Limits) -> None:
        self.statistics = MulticastStatistics()
        self._session = session
        self._rank, self._size = session.rank, session.world_size
        self._socket = opened
        self._wire = Wire(session.key, session.rank, session.world_size)
        self._limits = limits
        self.lost: tuple[int, ...] = ()
        self.dropped = False  # the lost rank may not return any more
        self.readmitting = False  # with the next exchange
        self.asked_at = -_ASKED_S  # when the lost rank last asked to return

        on_link = HEADER_BYTES + IP_UDP_BYTES + _LINK_BYTES
        per_sender = -(-int((on_link + 4 * self._size) / _STATUS_SHARE) // session.chunk_bytes)
        self._report_after = per_sender * (self._size - 1)  # chunks, from all senders together
        # What the kernel counts for a datagram, roughly: some fragments' unused ends, and its own records.
        room = session.receive_buffer * 3 // 4 // (session.chunk_bytes * 5 // 4 + 1024)
        self._window = Window(2 * per_sender + 2, room // self._size, self._size)
        self._bucket = TokenBucket(limits.rate, 2 * session.chunk_bytes)
        self._missing_capacity = Status.capacity(self._size, session.chunk_bytes)

        self._begun = 0  # number of the last exchange that this rank began
        self._finished = 0  # and of the last that it has finished
        self._request: _Request | None = None  # the exchange at work
        self._began_at = 0.0
        self._sending: dict[int, Sending] = {}
        self._receiving: dict[int, Receiving] = {}
        self._answers: dict[int, float] = {}  # exchange: when a status is due
        self._answered: dict[int, float] = {}
        self._serial = 0
        self._serials: dict[int, list[int]] = {}  # exchange: the newest status of each rank
        self._poll_at: dict[int, float] = {}
        self._patience: dict[int, float] = {}
        self._heard_at = [0.0] * self._size
        self._news_at = [0.0] * self._size  # when it last brought something
        self._held_up_at = [0.0] * self._size  # when it last said that it would send, if others were further
        self._left: dict[int, int] = {}  # ranks that have closed: the last exchange they finished
        self._told: tuple[int, RuntimeError] | None = None  # after which exchange others gave up, and why
        self._telling_at = 0.0  # when it last said who is lost
        self._returns = 0  # how often a rank was let back in
        self._aside: RanksLostError | None = None  # the others go on without this rank, which may return
        self._for_good = False  # it may not
        self._rejoining: _Request | None = None  # the caller waits to be let back in
        self._ask_at = 0.0
        self._answered_at = 0.0  # when the others last said that they go on without this rank
        self._attentive_since = 0.0
        self._blocked = False
        self._more = False

        self._posted: _Request | None = None
        self._closing = False
        self._abandoned = False
        self._closing_at: float | None = None
        self.error: RuntimeError | None = None
        self._wake_lock = threading.Lock()
        self._wake: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="narrowband-multicast", daemon=True)
        self._thread.start()

    # ---- the caller's side -------------------------------------------------------------------------------------------

    def exchange(self, outgoing: memoryview, incoming: list[memoryview], wanted: Wanted) -> None:
        request = _Request(outgoing, incoming, wanted, self.readmitting)
        self.readmitting = False
        self._post(request)

    def rejoin(self) -> None:
        self._post(_Request(memoryview(b""), [], (), rejoins=True))

    def _post(self, request: _Request) -> None:
        if self.error is not None:
            raise self.error
        if self._closing:
            raise RuntimeError("the multicast transport is closed")
        self._posted = request
        self._call()
        try:
            while not request.done.wait(1.0) and self._thread.is_alive():
                pass
        except BaseException:  # KeyboardInterrupt: nothing may be written into the buffers any more
            self._abandoned = True
            self.close()
            raise
        if request.failure is not None:
            raise request.failure
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._closing = True
        if self._thread.is_alive():
            self._call()
            self._thread.join(self._limits.timeout_s + _SILENCE_S)

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
                    if self._may_return_after(error):
                        self._stand_aside(error)
                    elif self.lost or len(error.ranks) > self._limits.tolerate or self._rank in error.ranks:
                        self._give_up(error, error.ranks)
                    else:
                        self._go_on_without(error)
        except Exception as error:
            log.debug("the multicast transport failed", exc_info=True)
            failure = error if isinstance(error, RuntimeError) else RuntimeError(f"multicast failed: {error}")
            self._give_up(failure, (self._rank,))
        finally:
            self._socket.close()
            with self._wake_lock:  # its number may be another file's from now on
                os.close(wake)
                self._wake = None
            for request in (self._request, self._posted, self._rejoining):
                if request is not None:
                    request.done.set()

    def _loop(self, wake: int) -> None:
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLIN)
        poller.register(wake, select.POLLIN)
        waits_for_room = False
        before = time.monotonic()
        while True:
            if self._blocked != waits_for_room:
                waits_for_room = self._blocked
                if waits_for_room:
                    poller.register(self._socket.send_fileno(), select.POLLOUT)
                else:
                    poller.unregister(self._socket.send_fileno())
            delay = self._delay(time.monotonic())
            ready = poller.poll(None if delay is None else delay * 1000)
            now = time.monotonic()
            if now - before > min(_SILENCE_S, self._limits.silence_s / 2):
                self._attentive_since = now  # who was stopped cannot say that others were silent
            before = now
            if any(descriptor == wake for descriptor, _ in ready):
                os.eventfd_read(wake)
            self._blocked = self._more = False
            if self._posted is not None:
                self._begin(now)
            self._receive(now)
            self._look_for_gaps(now)
            self._answer(now)
            self._transmit(now)
            self._poll(now)
            self._ask_to_return(now)
            self._conclude(now)
            if self._closing and self._may_leave(now):
                for _ in range(_GOODBYES):
                    self._control(Kind.BYE, 0, self._finished)
                return

    def _delay(self, now: float) -> float | None:
        """Seconds until something is due; None if nothing is, until something comes."""
        if self._more:
            return 0.0
        times = list(self._answers.values()) + list(self._poll_at.values())
        times += [each.check_at for each in self._receiving.values() if each.check_at is not None]
        if self._request is not None or self._closing:
            times.append(now + _CHECK_S)
        if self._rejoining is not None:
            times.append(self._ask_at)
        if self._request is not None and (delay := self._bucket.delay(now)):
            times.append(now + delay)
        if self._blocked:
            times.append(now + 0.001)  # a card that is out of memory does not say when it has some
        return max(0.0, min(times) - now) if times else None

    def _give_up(self, error: RuntimeError, ranks: tuple[int, ...]) -> None:
        """The exchange at work fails, and all later ones. Earlier ones may still be completed by others."""
        self.error = self.error or error
        self._closing = True
        with contextlib.suppress(OSError):
            for _ in range(_GOODBYES):
                self._control(Kind.BYE, 0, self._finished, pack_ranks(ranks))
        request, self._request = self._request, None
        if request is not None:
            self._forget(self._begun)
            self._receiving.pop(self._begun, None)
            request.done.set()
        self._end_rejoining()

    # ---- when a rank is lost, and returns ----------------------------------------------------------------------------

    def _go_on_without(self, error: RanksLostError) -> None:
        """The exchange at work fails; those to come are among the others, and numbered anew."""
        self._begin_anew(error.ranks)
        self.dropped = not self._limits.readmits
        for _ in range(_GOODBYES):
            self._tell_who_is_lost()
        self._fail(error)

    def _begin_anew(self, lost: tuple[int, ...]) -> None:
        self.lost, self._told = lost, None
        for number in list(self._sending):
            self._forget(number)
        self._answers.clear()
        self._answered.clear()
        self._enter_view()

    def _enter_view(self) -> None:
        self._receiving.clear()
        self._begun = self._finished = (self._returns * (self._size + 1) + sum(1 + rank for rank in self.lost)) * _VIEW

    def _returns_before(self, number: int) -> int:
        """How often a rank had been let back in, at the time of an exchange."""
        return number // (_VIEW * (self._size + 1))

    def _fail(self, error: RanksLostError) -> None:
        """The exchange at work does, and not those to come."""
        request, self._request = self._request, None
        if request is not None:
            request.failure = error
            request.done.set()

    def _tell_who_is_lost(self) -> None:
        self._control(Kind.LOST, int(self.dropped), self._finished, pack_ranks(self.lost))

    def _hear_who_is_lost(self, datagram: Datagram) -> None:
        """Others go on without a rank: so has this one to, whichever exchange it is in."""
        ranks = ranks_of(datagram.payload, self._size)
        returns = self._returns_before(datagram.exchange)
        if not ranks or returns < self._returns or self._told is not None:
            return
        if self._rank in ranks or returns > self._returns:
            self._for_good = bool(datagram.index) or returns > self._returns
            error = RanksLostError(f"rank {datagram.sender} and others have gone on without this rank", (self._rank,))
        elif ranks == self.lost:
            return
        else:
            error = RanksLostError(f"{_names(ranks)} lost, says rank {datagram.sender}", ranks)
        self._told = -1, error

    def _may_return_after(self, error: RanksLostError) -> bool:
        """Whether it is this rank that is lost, and not for good: others say so, or it hears none of them."""
        if not self._limits.readmits or self._for_good:
            return False
        others = set(range(self._size)) - {self._rank, *self.lost}
        return self._rank in error.ranks or others <= set(error.ranks)

    def _stand_aside(self, error: RanksLostError) -> None:
        """The exchange at work fails, and so do others until this rank is let back in."""
        cut_off = self._rank not in error.ranks
        self._aside = RanksLostError(f"this rank is cut off: {error}", (self._rank,)) if cut_off else error
        self._begin_anew(())
        self._fail(self._aside)

    def _ask_to_return(self, now: float) -> None:
        if self._rejoining is None or now < self._ask_at:
            return
        if now - self._answered_at > self._limits.timeout_s:
            self._end_outside(f"no other rank answered within {self._limits.timeout_s:g} s")
        if self._left:
            self._end_outside(f"{_names(tuple(sorted(self._left)))} closed the transport")
        self._ask_at = now + _ASK_S
        self._control(Kind.RETURN, 0, self._finished)

    def _end_outside(self, why: str) -> NoReturn:
        self._for_good = True
        raise RanksLostError(f"the others go on without this rank: {why}", (self._rank,))

    def _hear_from_outside(self, datagram: Datagram, now: float) -> None:
        """The others let this rank back in with an exchange among all, and answer it until then."""
        if datagram.kind is Kind.BYE:
            self._left[datagram.sender] = datagram.exchange
        elif datagram.kind is Kind.LOST and self._rank in (ranks_of(datagram.payload, self._size) or ()):
            self._answered_at = now
            self._returns = max(self._returns, self._returns_before(datagram.exchange))
            if datagram.index and not self._for_good:
                self._end_outside(f"it was away for too long, says rank {datagram.sender}")
        elif self._rejoining is not None and self._is_of_next_view_of_all(datagram):
            self._returns, self._aside = self._returns + 1, None
            self._enter_view()
            self._end_rejoining()

    def _end_rejoining(self) -> None:
        request, self._rejoining = self._rejoining, None
        if request is not None:
            request.done.set()

    def _is_of_next_view_of_all(self, datagram: Datagram) -> bool:
        speaks = datagram.kind in (Kind.DATA, Kind.STATUS, Kind.POLL)
        return speaks and datagram.exchange // _VIEW == (self._returns + 1) * (self._size + 1)

    def _hear_it_asks(self, datagram: Datagram, now: float) -> None:
        """A rank is outside, and wants back in. Who did not know that it is outside has lost it now."""
        if self._returns_before(datagram.exchange) < self._returns:
            return
        if datagram.sender in self.lost:
            self.asked_at = now
        elif self._told is None:
            ranks = (datagram.sender,)
            self._told = -1, RanksLostError(f"{_names(ranks)} lost: it says that it was cut off", ranks)

    # ---- what comes in -----------------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        counts = self.statistics
        for _ in range(_RECEIVED_PER_TURN):
            raw = self._socket.receive()
            if raw is None:
                return
            datagram = self._wire.parse(raw)
            if datagram is None:
                counts.rejected_datagrams += not self._wire.is_own(raw)
                continue
            counts.received_datagrams += 1
            self._heard_at[datagram.sender] = now
            if self._aside is not None:
                self._hear_from_outside(datagram, now)
                if self._aside is not None:
                    continue
            if datagram.kind is Kind.RETURN:
                self._hear_it_asks(datagram, now)
            if self._is_of_the_past(datagram):
                if now - self._telling_at > _TELL_S:
                    self._telling_at = now
                    self._tell_who_is_lost()
            elif datagram.kind is Kind.DATA:
                self._take(datagram, now)
            elif datagram.kind is Kind.STATUS:
                self._note(datagram, now)
            elif datagram.kind is Kind.POLL:
                self._polled(datagram, now)
            elif datagram.kind is Kind.BYE:
                self._see_off(datagram)
            elif datagram.kind is Kind.LOST:
                self._hear_who_is_lost(datagram)
        self._more = True

    def _is_of_the_past(self, datagram: Datagram) -> bool:
        """Whether its sender is lost, or does not know yet that another one is."""
        if not self.lost:
            return False
        speaks = datagram.kind in (Kind.DATA, Kind.STATUS, Kind.POLL)
        return datagram.sender in self.lost or (speaks and datagram.exchange // _VIEW < self._begun // _VIEW)

    def _take(self, datagram: Datagram, now: float) -> None:
        receiving = self._receiving_of(datagram.exchange)
        if receiving is None or not receiving.take(datagram.sender, datagram.index, datagram.payload, now):
            self.statistics.repeated_datagrams += 1
            if datagram.exchange <= self._begun:  # its sender does not know that it came
                self._answer_by(datagram.exchange, now, _ANSWER_S)
            return
        self._news_at[datagram.sender] = now
        due = receiving.unreported >= self._report_after or receiving.complete
        if due and self._answers.get(datagram.exchange, now + 1.0) > now:
            self._answer_by(datagram.exchange, now)

    def _receiving_of(self, number: int) -> Receiving | None:
        """What is known of an exchange's buffers: of the one at work, and of the next, which others may have begun."""
        if number == self._begun + 1 and number not in self._receiving:
            self._receiving[number] = self._new_receiving(number)
        return self._receiving.get(number)

    def _new_receiving(self, number: int) -> Receiving:
        return Receiving(number, self._session.chunk_bytes, self._rank, self._size, self._limits.early_bytes)

    def _note(self, datagram: Datagram, now: float) -> None:
        peer, sending = datagram.sender, self._sending.get(datagram.exchange)
        if sending is None:
            return
        serials = self._serials[datagram.exchange]
        if datagram.index <= serials[peer]:
            return
        status = Status.unpack(datagram.payload, self._size)
        if status is None:
            raise RuntimeError(f"rank {peer} sends statuses that cannot be read: it runs another version")
        serials[peer] = datagram.index
        floor, waiting = sending.floor, peer in sending.waiting
        advanced, trip_s = sending.heard(peer, status.progress[self._rank], status.complete[self._rank], now)
        if trip_s is not None:
            self._window.timed(trip_s)
        if advanced or waiting > (peer in sending.waiting):
            self._window.passed(peer, advanced)
            self._window.arrived(sending.floor - floor, now)
            self._news_at[peer] = now
            self._wait_before_poll(sending, now, anew=True)
        for run in status.missing:
            if run.rank == self._rank and (count := sending.ask(run, now, 1.5 * self._window.trip_s)):
                self._window.lost(peer, count, now)

    def _polled(self, datagram: Datagram, now: float) -> None:
        number = datagram.exchange
        receiving = self._receiving_of(number)
        if receiving is not None:
            receiving.polled(datagram.sender, datagram.index, now)
            if number == self._begun and receiving.has_all_sent(datagram.sender):
                self._held_up_at[datagram.sender] = now
        self._answer_by(number, now, _ANSWER_S)  # also to those that go on without a rank before this one does

    def _see_off(self, datagram: Datagram) -> None:
        """A rank leaves after an exchange it has finished. If one is at fault, this rank fails when it gets there."""
        self._left[datagram.sender] = datagram.exchange
        ranks = ranks_of(datagram.payload, self._size)
        if not ranks or self._told is not None:
            return
        if self._rank in ranks:
            error = RuntimeError(
                f"rank {datagram.sender} waited {self._limits.timeout_s:g} s or less for this rank and gave up"
            )
        else:
            error = RanksLostError(f"{_names(ranks)} lost, says rank {datagram.sender}", ranks)
        self._told = datagram.exchange, error

    # ---- what goes out -----------------------------------------------------------------------------------------------

    def _control(self, kind: Kind, index: int, exchange: int, payload: bytes = b"") -> bool:
        if not self._socket.send(self._wire.header(kind, index, exchange, payload), payload):
            self._blocked = True
            return False
        self.statistics.control_datagrams += 1
        self.statistics.control_bytes += len(payload)
        return True

    def _answer_by(self, number: int, now: float, apart_s: float = 0.0) -> None:
        """A status of an exchange is due, and not within ``apart_s`` of the last."""
        at = max(now, self._answered.get(number, 0.0) + apart_s)
        self._answers[number] = min(at, self._answers.get(number, at))

    def _look_for_gaps(self, now: float) -> None:
        for receiving in self._receiving.values():
            due = receiving.check_at is not None and receiving.check_at <= now
            if due and (missing := receiving.missing(now, self._missing_capacity)):
                self._send_status(receiving.number, now, missing)

    def _answer(self, now: float) -> None:
        for number in [number for number, due in self._answers.items() if due <= now]:
            if not self._send_status(number, now):
                return
            del self._answers[number]

    def _send_status(self, number: int, now: float, missing: Sequence[Missing] = ()) -> bool:
        receiving = self._receiving.get(number)
        if receiving is None:  # finished, or a peer's that is ahead
            done = number <= self._finished
            status = Status((0,) * self._size, (done,) * self._size)
        else:
            status = Status(tuple(receiving.progress), tuple(receiving.completes()), tuple(missing))
        self._serial += 1
        if not self._control(Kind.STATUS, self._serial, number, status.pack()):
            return False
        self._answered[number] = now
        if receiving is not None:
            receiving.unreported = 0
        return True

    def _transmit(self, now: float) -> None:
        """Repairs first, of the oldest exchange first; then what the window allows of the buffer."""
        budget = max(1, _SENT_PER_TURN // self._session.chunk_bytes)
        if self._blocked or self._bucket.delay(now):
            return
        for number in sorted(self._sending):
            sending = self._sending[number]
            while sending.repairs:
                index = next(iter(sending.repairs))
                if not budget:
                    self._more = True
                    return
                if not self._send_chunk(sending, index, now):
                    return
                budget -= 1
                del sending.repairs[index]
        current = self._sending.get(self._begun)
        if current is None or self._begun - 2 in self._sending:
            return
        end = min(current.count, current.floor + int(self._window.size))
        while current.next < end:
            if not budget:
                self._more = True
                return
            if not self._send_chunk(current, current.next, now):
                return
            budget -= 1

    def _send_chunk(self, sending: Sending, index: int, now: float) -> bool:
        if self._bucket.delay(now):
            return False
        chunk = sending.chunk(index)
        if not self._socket.send(self._wire.header(Kind.DATA, index, sending.number, chunk), chunk):
            self._blocked = True
            return False
        self._bucket.take(len(chunk) + HEADER_BYTES + IP_UDP_BYTES)
        if index == sending.next:
            self.statistics.data_datagrams += 1
            self.statistics.data_bytes += len(chunk)
        else:
            self.statistics.repair_datagrams += 1
            self.statistics.repair_bytes += len(chunk)
        sending.sent(index, now)
        self._wait_before_poll(sending, now)
        return True

    def _wait_before_poll(self, sending: Sending, now: float, *, anew: bool = False) -> None:
        """Something happened: no poll for a while."""
        least, most = _PATIENCE_S
        if anew or sending.number not in self._patience:
            self._patience[sending.number] = min(max(least, 2 * self._window.trip_s), most)
        self._poll_at[sending.number] = now + self._patience[sending.number]

    def _poll(self, now: float) -> None:
        for number in [number for number, due in self._poll_at.items() if due <= now]:
            sending = self._sending[number]
            if self._blocked or not self._control(Kind.POLL, sending.next, number):
                return
            self._patience[number] = min(2 * self._patience[number], _PATIENCE_S[1])
            self._poll_at[number] = now + self._patience[number]

    # ---- exchanges ---------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        request, self._posted = self._posted, None
        assert request is not None
        if self.error is not None:  # it was posted just when the error came
            request.done.set()
            return
        if request.rejoins and self._aside is not None:
            self._rejoining, self._answered_at = request, now
            return
        if request.rejoins or self._aside is not None:
            request.failure = self._aside
            request.done.set()
            return
        if request.readmits:
            self.lost, self._returns = (), self._returns + 1
            self._enter_view()
        self._request, self._began_at = request, now
        number = self._begun + 1
        receiving = self._receiving.get(number)
        awaited = receiving is not None
        if receiving is None:
            receiving = self._receiving[number] = self._new_receiving(number)
        self._begun = number
        self._sending[number] = sending = Sending(
            number, request.outgoing, self._session.chunk_bytes, self._rank, self._size, self.lost
        )
        self._serials[number] = [0] * self._size
        self._window.begin(now)
        receiving.begin(request.incoming, request.wanted, now)
        self._wait_before_poll(sending, now)
        if awaited:
            self._answer_by(number, now)

    def _conclude(self, now: float) -> None:
        """Forget what is complete everywhere; return an exchange that is complete here; name who is lost."""
        for number in [number for number, sending in self._sending.items() if self._is_complete(sending)]:
            if number <= self._finished:
                self._forget(number)
        request = self._request
        if request is None:
            return
        number = self._begun
        if self._told is not None and self._told[0] < number:
            raise self._told[1]
        sending, receiving = self._sending[number], self._receiving[number]
        if receiving.complete and sending.next == sending.count:
            self._finished = number
            del self._receiving[number]
            if self._is_complete(sending):
                self._forget(number)
            else:
                sending.keep()
            for old in [old for old in self._answered if old < number - 2]:
                del self._answered[old]
            self.statistics.exchanges += 1
            self._request = None
            request.done.set()
            return
        self._check_lost(sending, receiving, now)

    def _is_complete(self, sending: Sending) -> bool:
        return sending.complete or all(self._left.get(peer, 0) >= sending.number for peer in sending.waiting)

    def _forget(self, number: int) -> None:
        for each in (self._sending, self._serials, self._poll_at, self._patience):
            each.pop(number, None)

    def _check_lost(self, sending: Sending, receiving: Receiving, now: float) -> None:
        awaited = set(receiving.waiting)
        if sending.next < sending.count:
            held_up = self._sending.get(self._begun - 2)
            awaited.update(held_up.waiting if held_up else sending.behind)
        gone = tuple(sorted(peer for peer in awaited if self._left.get(peer, self._begun) < self._begun))
        if gone:
            raise RanksLostError(f"{_names(gone)} closed the transport before exchange {self._begun % _VIEW}", gone)
        waited = {peer: now - max(self._began_at, self._news_at[peer]) for peer in awaited}
        limits = self._limits
        listened = max(self._began_at, self._attentive_since)
        silent = tuple(peer for peer in sorted(awaited) if now - max(listened, self._heard_at[peer]) > limits.silence_s)
        lost = silent or tuple(
            peer
            for peer in sorted(awaited)
            if waited[peer] > limits.timeout_s
            # A rank whose window another one keeps shut is not at fault; in the end somebody has to be.
            and (now - self._held_up_at[peer] > _SILENCE_S or waited[peer] > 2 * limits.timeout_s)
        )
        if lost:
            limit_s = limits.silence_s if silent else limits.timeout_s
            words = "; ".join(self._last_word(peer, now) for peer in lost)
            raise RanksLostError(
                f"{_names(lost)} brought nothing for {limit_s:g} s in exchange {self._begun % _VIEW}: {words}"
                + "; or this rank is the one that is cut off" * (len(lost) > 1),
                lost,
            )

    def _last_word(self, peer: int, now: float) -> str:
        heard_at = self._heard_at[peer]
        if not heard_at:
            return f"rank {peer} was never heard"
        if now - heard_at > _SILENCE_S:
            return f"rank {peer} was last heard {now - heard_at:.1f} s ago, so it is dead or cut off"
        return f"rank {peer} answers, so it is late or at something else"

    def _may_leave(self, now: float) -> bool:
        """Whether nobody that is there needs this rank any more."""
        if self._abandoned or self._request is not None:
            return True
        if self._closing_at is None:
            self._closing_at = now
        if now - self._closing_at > self._limits.timeout_s:
            return True
        waiting = {peer for sending in self._sending.values() for peer in sending.waiting} - set(self._left)
        return all(now - max(self._closing_at, self._heard_at[peer]) > _SILENCE_S for peer in waiting)


def _names(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
