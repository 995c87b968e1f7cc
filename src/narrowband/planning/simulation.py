"""Simulate one training step by its events: backward completes a bucket, which is encoded, sent, and decoded.

A formula that adds up compute, codec and wire overestimates on every link, because most of the wire time overlaps with
backward. A formula that overlaps as much as possible underestimates, because encoding and computing share a processor,
and the last bucket overlaps with nothing. So the step is simulated. All ranks do the same at the same time, so one rank
represents all, and 10,000 ranks take no longer to simulate than two.

The parts of the simulation:

* *compute*: forward, backward and optimizer, with the moments at which DDP's buckets are complete;
* *the engine*: one thread with an inbox, like :class:`~narrowband.collectives.Engine`. It encodes, starts collectives
  in the same order on all ranks, and decodes what has arrived. It goes on while a payload is on the wire;
* *the wire*: a process group runs a limited number of collectives at the same time, and the others wait. Latencies
  overlap. Bytes are sent in the order in which collectives began, because a rank sends everything for another rank
  through one connection: a short message waits behind a long one;
* *the node's thread*, on two levels: it sums a bucket inside the node before the engine gets it;
* *cores*: threads that compute, encode, and copy bytes into sockets share them. Each thread gets an equal share of the
  cores, but no more than it can use.

Between two events every rate is constant, so nothing is sampled, and equal input gives equal output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Arrival", "Inside", "Machine", "Message", "Outcome", "Step", "Transfer", "simulate"]

#: Work with fewer seconds left counts as done, so that rounding errors make no events.
_OVER_S = 1e-12

#: A transfer with fewer bytes left counts as done.
_OVER_NBYTES = 1e-6


@dataclass(frozen=True)
class Machine:
    """The resources of one rank.

    Attributes:
        rate: bytes of payload per second that its link carries; infinite: the link takes no time.
        cores: for compute, codecs and the network together. May be a fraction, if ranks share a core.
        threads: number of threads that arithmetic uses, in compute and in codecs alike.
        cpu_s_per_byte: seconds of one core to send a byte (and receive one, at the same time).
        slots: collectives that a process group runs at the same time.
    """

    rate: float = math.inf
    cores: float = math.inf
    threads: int = 1
    cpu_s_per_byte: float = 0.0
    slots: int = 2

    def __post_init__(self) -> None:
        for name in ("rate", "cores", "threads", "slots"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.cpu_s_per_byte < 0:
            raise ValueError(f"cpu_s_per_byte={self.cpu_s_per_byte} must not be negative")


@dataclass(frozen=True)
class Transfer:
    """One collective.

    Attributes:
        nbytes: bytes that cross this rank's link.
        latency_s: seconds that it takes besides those of its bytes.
        queue: ``group`` for collectives, or ``pairs`` for exchanges from rank to rank.
    """

    nbytes: float
    latency_s: float = 0.0
    queue: Literal["group", "pairs"] = "group"


@dataclass(frozen=True)
class Message:
    """Payloads that are sent together, in one collective or in several successive ones.

    Attributes:
        begin_s: the engine's work before the first transfer.
        transfers: in order.
        work_s: the engine's work after each transfer.
        deliver_s: the engine's work at the end, decoding.
        decides: whether ranks need this message to decide between commit and roll back.
        exclusive: whether all other messages wait until this one has arrived.
    """

    begin_s: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    work_s: tuple[float, ...] = ()
    deliver_s: float = 0.0
    decides: bool = True
    exclusive: bool = False

    def __post_init__(self) -> None:
        if len(self.transfers) != len(self.work_s):
            raise ValueError(
                f"work_s has {len(self.work_s)} entries for {len(self.transfers)} transfers; expected one for each"
            )


@dataclass(frozen=True)
class Inside:
    """The work of a node's ranks on a bucket, before it is sent to other nodes and at the end.

    Attributes:
        reduce_s: seconds until each rank has the node's mean of its shard.
        gather_s: seconds until each rank has the averages of the others.
    """

    reduce_s: float
    gather_s: float


@dataclass(frozen=True)
class Arrival:
    """The event that a bucket is complete.

    Attributes:
        at_s: progress of compute at the event: seconds from the start of the step, as they are without communication.
        encode_s: the engine's work to encode the bucket.
        messages: the messages that are sent now, with this bucket and others that were held back until now.
        inside: on two levels, the work inside the node that comes first.
    """

    at_s: float
    encode_s: float = 0.0
    messages: tuple[Message, ...] = ()
    inside: Inside | None = None


@dataclass(frozen=True)
class Step:
    """The work of a step.

    Attributes:
        until_s: seconds of forward and backward, without communication.
        arrivals: in the order of backward.
        after_s: seconds of the optimizer, which runs when all averages are complete.
        transaction: whether averages are decoded only after ranks have decided to commit the step, as with feedback.
    """

    until_s: float
    arrivals: tuple[Arrival, ...] = ()
    after_s: float = 0.0
    transaction: bool = False

    @property
    def nbytes(self) -> float:
        """Bytes that cross this rank's link."""
        return sum(t.nbytes for arrival in self.arrivals for message in arrival.messages for t in message.transfers)


@dataclass(frozen=True)
class Outcome:
    """The duration of a step in seconds. The parts add up to ``step_s``.

    Attributes:
        step_s: from start to end.
        compute_s: forward, backward and optimizer, as without communication.
        codec_s: what encoding and decoding add: compute that waits for a core, and codec work that overlaps with
            nothing.
        wire_s: time spent waiting for bytes only, and by which sending bytes slows compute down.
        latency_s: time spent waiting for latencies only.
    """

    step_s: float
    compute_s: float
    codec_s: float
    wire_s: float
    latency_s: float


def simulate(step: Step, machine: Machine) -> Outcome:
    """Simulate a step.

    Example:
        >>> from narrowband.planning import Arrival, Machine, Message, Step, Transfer, simulate
        >>> message = Message(transfers=(Transfer(nbytes=3e6),), work_s=(0.0,))
        >>> step = Step(until_s=1.0, arrivals=(Arrival(at_s=0.5, messages=(message,)),))
        >>> simulate(step, Machine(rate=2e6)).step_s  # 1.5 s of wire, from 0.5 s on
        2.0
    """
    return _Play(step, machine).run()


@dataclass(eq=False)
class _Running:
    """A message with a transfer that is due or under way."""

    message: Message
    at: int = 0
    issued: bool = False

    @property
    def transfer(self) -> Transfer:
        return self.message.transfers[self.at]


@dataclass(eq=False)
class _OnWire:
    """A transfer under way."""

    running: _Running
    latency_s: float
    nbytes: float


@dataclass(eq=False)
class _Task:
    """A task of a thread: an amount of work, and then an effect."""

    work_s: Callable[[], float]
    effect: Callable[[], None]


@dataclass(eq=False)
class _Thread:
    """A thread that does tasks one after the other."""

    tasks: deque[_Task] = field(default_factory=deque)
    current: _Task | None = None
    left_s: float = 0.0

    def post(self, work_s: float | Callable[[], float], effect: Callable[[], None]) -> None:
        self.tasks.append(_Task(work_s if callable(work_s) else lambda: work_s, effect))

    def take(self) -> bool:
        """Start the next task if the thread is idle and has one; return whether it did."""
        if self.current is not None or not self.tasks:
            return False
        self.current = self.tasks.popleft()
        self.left_s = self.current.work_s()
        return True


@dataclass(frozen=True)
class _Rates:
    """Rates until the next event: compute, engine and node relative to running alone, the wire in bytes per second."""

    compute: float
    engine: float
    node: float
    wire: float


class _Play:
    def __init__(self, step: Step, machine: Machine) -> None:
        self._step, self._machine = step, machine
        self._now = self._computed = 0.0
        self._next_arrival = 0
        self._engine, self._node = _Thread(), _Thread()
        self._order: list[_Running] = []
        self._wire: list[_OnWire] = []
        self._waiting: dict[str, deque[_Running]] = {"group": deque(), "pairs": deque()}
        self._open = self._undecided = 0
        self._closed = not step.arrivals
        self._decided = not step.transaction
        self._arrived_s = 0.0  # work to decode the messages that arrived before the decision
        self._ended: float | None = 0.0 if not step.arrivals else None
        self._codec_s = self._wire_s = self._latency_s = 0.0

    def run(self) -> Outcome:
        while not (self._is_computed and self._ended is not None):
            self._start_what_can()
            if not (self._is_computed and self._ended is not None):
                self._advance()
        gather_s = sum(arrival.inside.gather_s for arrival in self._step.arrivals if arrival.inside is not None)
        if gather_s:  # begins when the averages between nodes are complete, which may be before backward ends
            assert self._ended is not None
            late = max(0.0, self._ended + gather_s - self._now)
            self._now += late
            self._wire_s += late
        compute_s = self._step.until_s + self._step.after_s
        return Outcome(self._now + self._step.after_s, compute_s, self._codec_s, self._wire_s, self._latency_s)

    # ---- events ------------------------------------------------------------------------------------------------------

    @property
    def _is_computed(self) -> bool:
        return self._computed >= self._step.until_s - _OVER_S

    def _start_what_can(self) -> None:
        """Process everything that takes no time, until nothing changes."""
        moved = True
        while moved:
            moved = self._arrive()
            for thread in (self._engine, self._node):
                moved |= thread.take()
                if thread.current is not None and thread.left_s <= _OVER_S:
                    task, thread.current = thread.current, None
                    task.effect()
                    moved = True
            for transfer in [x for x in self._wire if x.latency_s <= _OVER_S and x.nbytes <= _OVER_NBYTES]:
                self._wire.remove(transfer)
                self._received(transfer.running)
                moved = True

    def _arrive(self) -> bool:
        arrivals, moved = self._step.arrivals, False
        while self._next_arrival < len(arrivals):
            arrival = arrivals[self._next_arrival]
            if self._computed < min(arrival.at_s, self._step.until_s) - _OVER_S:
                break
            self._next_arrival += 1
            moved, last = True, self._next_arrival == len(arrivals)
            if arrival.inside is None:
                self._feed(arrival, last)
            else:
                self._node.post(arrival.inside.reduce_s, lambda a=arrival, z=last: self._feed(a, z))  # type: ignore[misc]
        return moved

    def _feed(self, arrival: Arrival, last: bool) -> None:
        """Give a bucket to the engine, as one task: no other task runs between its pieces."""
        pieces = [(arrival.encode_s, lambda: None)]
        pieces += [(m.begin_s, lambda m=m: self._begin(m)) for m in arrival.messages]  # type: ignore[misc]
        if last:
            pieces.append((0.0, self._close))

        def go_on(at: int) -> None:
            pieces[at][1]()
            if at + 1 < len(pieces):
                self._engine.tasks.appendleft(_Task(lambda: pieces[at + 1][0], lambda: go_on(at + 1)))

        self._engine.post(pieces[0][0], lambda: go_on(0))

    def _close(self) -> None:
        self._closed = True
        self._decide()

    def _begin(self, message: Message) -> None:
        self._open += 1
        self._undecided += message.decides
        if message.transfers:
            self._order.append(_Running(message))
            self._issue()
        else:
            self._engine.post(lambda: self._delivery(message), lambda: self._done(message))

    def _issue(self) -> None:
        """Issue transfers in order: in each queue, those of a message after the last one of the message before."""
        taken: set[str] = set()
        for running in self._order:
            transfer = running.transfer
            if not running.issued and transfer.queue not in taken:
                running.issued = True
                self._waiting[transfer.queue].append(running)
            if not running.issued:
                taken.add(transfer.queue)
            taken.update(later.queue for later in running.message.transfers[running.at + 1 :])
            if running.message.exclusive:
                taken.update(self._waiting)
        self._fill_slots()

    def _fill_slots(self) -> None:
        for queue, waiting in self._waiting.items():
            slots = self._machine.slots if queue == "group" else 1
            under_way = sum(x.running.transfer.queue == queue for x in self._wire)
            while waiting and under_way < slots:
                running = waiting.popleft()
                transfer = running.transfer
                nbytes = 0.0 if math.isinf(self._machine.rate) else transfer.nbytes
                self._wire.append(_OnWire(running, transfer.latency_s, nbytes))
                under_way += 1

    def _received(self, running: _Running) -> None:
        message, at = running.message, running.at
        last = at + 1 == len(message.transfers)
        self._fill_slots()
        self._engine.post(
            lambda: message.work_s[at] + (self._delivery(message) if last else 0.0), lambda: self._go_on(running)
        )

    def _go_on(self, running: _Running) -> None:
        running.at += 1
        running.issued = False
        if running.at == len(running.message.transfers):
            self._order.remove(running)
            self._done(running.message)
        self._issue()

    def _delivery(self, message: Message) -> float:
        """Return the seconds of decoding when a message arrives: none before the decision, which decoding waits for."""
        return message.deliver_s if self._decided else 0.0

    def _done(self, message: Message) -> None:
        self._open -= 1
        self._undecided -= message.decides
        if not self._decided:
            self._arrived_s += message.deliver_s
        self._decide()

    def _decide(self) -> None:
        if not self._closed or self._undecided:
            return
        if not self._decided:
            self._decided = True
            work_s, self._arrived_s = self._arrived_s, 0.0
            # Part of the engine's current task: no other task runs in between.
            self._engine.tasks.appendleft(_Task(lambda: work_s, self._end))
        else:
            self._end()

    def _end(self) -> None:
        if not self._open and self._ended is None:
            self._ended = self._now

    # ---- time --------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Advance time to the next event."""
        rates, sending = self._rates(), self._sending()
        ends = [x.latency_s for x in self._wire if x.latency_s > _OVER_S]
        if sending is not None:
            ends.append(sending.nbytes / rates.wire)
        if not self._is_computed:
            arrivals = self._step.arrivals[self._next_arrival : self._next_arrival + 1]
            until = min([self._step.until_s, *(arrival.at_s for arrival in arrivals)])
            ends.append(max(0.0, until - self._computed) / rates.compute)
        for thread, rate in ((self._engine, rates.engine), (self._node, rates.node)):
            if thread.current is not None:
                ends.append(thread.left_s / rate)
        took = min(ends)
        self._blame(took, rates, sending=sending is not None)
        self._now += took
        if not self._is_computed:
            self._computed += took * rates.compute
        for thread, rate in ((self._engine, rates.engine), (self._node, rates.node)):
            if thread.current is not None:
                thread.left_s -= took * rate
        if sending is not None:
            sending.nbytes -= took * rates.wire
        for x in self._wire:
            x.latency_s -= min(took, x.latency_s)

    def _sending(self) -> _OnWire | None:
        """Return the transfer whose bytes are on the wire: the first that has bytes left, and whose latency is over."""
        return next((x for x in self._wire if x.latency_s <= _OVER_S and x.nbytes > _OVER_NBYTES), None)

    def _rates(self) -> _Rates:
        machine = self._machine
        sending = self._sending() is not None
        wire = machine.rate
        needs = min(1.0, wire * machine.cpu_s_per_byte) if sending else 0.0
        computing, encoding = not self._is_computed, self._engine.current is not None
        inside = self._node.current is not None
        threads = [(machine.threads, 1.0)] * (computing + encoding) + [(1, 1.0)] * inside + [(1, needs)] * sending
        level = _level(threads, machine.cores)
        alone = min(1.0, machine.cores / machine.threads)
        arithmetic = min(1.0, level) / alone
        if needs:
            wire = min(wire, min(needs, level) / machine.cpu_s_per_byte)
        return _Rates(arithmetic, arithmetic, min(1.0, level) / min(1.0, machine.cores), wire)

    def _blame(self, took: float, rates: _Rates, *, sending: bool) -> None:
        """Attribute the time of an interval to what makes the step longer in it."""
        busy = self._engine.current is not None
        if not self._is_computed:
            slower = took * (1.0 - rates.compute)
            if busy or self._node.current is not None:
                self._codec_s += slower
            else:
                self._wire_s += slower
        elif busy:
            self._codec_s += took
        elif sending or self._node.current is not None:
            self._wire_s += took
        else:
            self._latency_s += took


def _level(threads: Sequence[tuple[int, float]], cores: float) -> float:
    """Return the share of a core that each thread gets that could use more, by max-min fairness.

    Threads that need less than this share get what they need; the others all get this share.

    Args:
        threads: groups of threads: how many, and the share of a core that each of them can use.
        cores: number of cores for all threads.
    """
    if sum(count * need for count, need in threads) <= cores:
        return 1.0
    left, many = cores, sum(count for count, _ in threads)
    for count, need in sorted(threads, key=lambda thread: thread[1]):
        level = left / many
        if need > level:
            return level
        left -= count * need
        many -= count
        if not many:
            break
    return 1.0
