"""The state of one exchange on one rank: which chunks of its own buffer the others have, and which of theirs it has.

A buffer is cut into chunks; all but the last have the session's chunk size. The sender sends each chunk once, in order,
and sends those again that a receiver reports missing. Nothing here sends, waits or reads the clock:
:mod:`narrowband.transport.multicast` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from narrowband.transport.datagram import MAX_CHUNKS, Missing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MismatchError", "Receiving", "Sending", "chunks_of"]

_MAX_RUN = 65535  # a run's length has 16 bits


class MismatchError(RuntimeError):
    """A rank sends a buffer of another size than this rank expects."""


def chunks_of(nbytes: int, chunk_bytes: int) -> int:
    """Return the number of chunks that a buffer is cut into.

    Raises:
        ValueError: more chunks than can be numbered.
    """
    count = -(-nbytes // chunk_bytes)
    if count > MAX_CHUNKS:
        raise ValueError(f"a buffer of {nbytes} bytes is too large: {MAX_CHUNKS} chunks of {chunk_bytes} is the limit")
    return count


class Sending:
    """This rank's buffer in one exchange.

    Attributes:
        number: number of the exchange.
        count: number of chunks of the buffer.
        next: index of the first chunk that has not been sent yet.
        floor: the progress of the slowest receiver. Chunks from ``floor`` to ``next`` may be in flight.
        repairs: chunks to be sent again, in the order in which they were asked for.
    """

    def __init__(
        self,
        number: int,
        buffer: memoryview,
        chunk_bytes: int,
        rank: int,
        world_size: int,
        lost: tuple[int, ...] = (),
    ) -> None:
        self.number = number
        self.count = chunks_of(len(buffer), chunk_bytes)
        self.next = 0
        self.repairs: dict[int, None] = {}
        self._buffer = buffer
        self._chunk_bytes = chunk_bytes
        self._receivers = [peer for peer in range(world_size) if peer != rank and peer not in lost]
        self._progress = [0] * world_size
        self._complete = [peer not in self._receivers for peer in range(world_size)]
        self._first_sent = np.zeros(self.count)
        self._last_sent = np.zeros(self.count)
        self.floor = 0 if self._receivers else self.count

    @property
    def complete(self) -> bool:
        """Whether every receiver has all chunks that it needs."""
        return all(self._complete)

    @property
    def waiting(self) -> list[int]:
        """Receivers that still need chunks."""
        return [peer for peer in self._receivers if not self._complete[peer]]

    @property
    def behind(self) -> list[int]:
        """Waiting receivers whose progress is the floor: those that hold the window back."""
        return [peer for peer in self.waiting if self._progress[peer] == self.floor]

    def chunk(self, index: int) -> memoryview:
        """Return the bytes of a chunk."""
        start = index * self._chunk_bytes
        return self._buffer[start : start + self._chunk_bytes]

    def sent(self, index: int, now: float) -> None:
        """Note that a chunk was sent."""
        self._last_sent[index] = now
        if index == self.next:
            self._first_sent[index] = now
            self.next += 1

    def heard(self, peer: int, progress: int, complete: bool, now: float) -> tuple[int, float | None]:
        """Note the progress that a receiver reports. Return by how many chunks it has advanced, and how many seconds
        ago the last of them was first sent (None if it has not advanced).
        """
        progress = self.count if complete else min(progress, self.next)
        advanced = progress - self._progress[peer]
        self._complete[peer] |= complete
        if advanced <= 0:
            return 0, None
        self._progress[peer] = progress
        self.floor = min(self._progress[receiver] for receiver in self._receivers)
        last = min(progress, self.next) - 1
        return advanced, now - float(self._first_sent[last]) if last >= 0 else None

    def ask(self, run: Missing, now: float, holdoff_s: float) -> int:
        """Queue a run of chunks that a receiver misses, except those sent within the last ``holdoff_s`` seconds, which
        may still be in flight.

        Returns:
            The number of chunks that were queued.
        """
        first, end = min(run.first, self.next), min(run.first + run.length, self.next)
        due = np.flatnonzero(self._last_sent[first:end] <= now - holdoff_s) + first
        before = len(self.repairs)
        self.repairs.update(dict.fromkeys(due.tolist()))
        return len(self.repairs) - before

    def keep(self) -> None:
        """Copy the buffer, whose chunks may still be asked for, so that the caller may change the original."""
        self._buffer = np.array(np.frombuffer(self._buffer, dtype=np.uint8)).data


class Receiving:
    """The other ranks' buffers in one exchange. Chunks that arrive before this rank has begun the exchange are kept, up
    to a limit.

    Attributes:
        number: number of the exchange.
        begun: whether this rank has begun the exchange, and so has buffers for the chunks.
        progress: for each rank, one more than the highest chunk index that arrived.
        unreported: number of chunks that arrived since the last status.
        check_at: when to check which gaps have not closed by themselves; None if there are no gaps.
        repair_s: seconds from asking for a chunk to its arrival, smoothed.
    """

    #: A chunk that arrives up to this many seconds after its successors counts as reordered, not as missing.
    REORDER_S = 0.005

    def __init__(self, number: int, chunk_bytes: int, rank: int, world_size: int, early_limit: int) -> None:
        self.number = number
        self.begun = False
        self.progress = [0] * world_size
        self.unreported = 0
        self.check_at: float | None = None
        self.repair_s = 0.05
        self._chunk_bytes = chunk_bytes
        self._ranks = [peer for peer in range(world_size) if peer != rank]
        self._room = early_limit
        self._early: list[dict[int, bytes]] = [{} for _ in range(world_size)]
        self._sent = [0] * world_size  # chunks that each rank has sent, by its polls
        self._buffers = [memoryview(b"")] * world_size
        self._got = [bytearray()] * world_size  # 1 for each chunk that has arrived or is not wanted
        self._left = [0] * world_size
        self._gaps = [0] * world_size
        self._ripe = [0] * world_size  # progress at the last check: missing chunks below it were missing then, too
        self._asked: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def begin(self, buffers: Sequence[memoryview], wanted: Sequence[Sequence[tuple[int, int]]], now: float) -> None:
        """Begin the exchange: write chunks into ``buffers`` from now on, and those that arrived early at once.

        Raises:
            MismatchError: a chunk that arrived early does not fit.
        """
        size = self._chunk_bytes
        for peer in self._ranks:
            self._buffers[peer] = buffers[peer]
            got = bytearray(b"\x01") * chunks_of(len(buffers[peer]), size)
            for start, stop in wanted[peer]:
                chunks = range(start // size, chunks_of(stop, size))
                got[chunks.start : chunks.stop] = bytes(len(chunks))
            self._got[peer] = got
            self._left[peer] = got.count(0)
            self.progress[peer] = 0
        self.begun = True
        early, self._early = self._early, []
        for peer in self._ranks:
            for index in sorted(early[peer]):
                self.take(peer, index, memoryview(early[peer][index]), now)
            self.polled(peer, self._sent[peer], now)

    @property
    def complete(self) -> bool:
        """Whether all wanted chunks have arrived."""
        return self.begun and not any(self._left)

    @property
    def waiting(self) -> list[int]:
        """Ranks from which wanted chunks are still to come."""
        return [peer for peer in self._ranks if self._left[peer]]

    def completes(self) -> list[bool]:
        """Return for each rank whether all wanted chunks of its buffer have arrived."""
        return [self.begun and not left for left in self._left]

    def take(self, sender: int, index: int, payload: memoryview, now: float) -> bool:
        """Take a chunk that arrived. Return False if it is of no use: it has arrived before, or there is no room for
        early chunks.

        Raises:
            MismatchError: the sender's buffer has another size than this rank expects.
        """
        if not self.begun:
            return self._take_early(sender, index, payload)
        got, buffer, start = self._got[sender], self._buffers[sender], index * self._chunk_bytes
        if len(payload) != min(self._chunk_bytes, len(buffer) - start):
            raise MismatchError(
                f"rank {sender} sends a buffer of another size than the {len(buffer)} bytes that this rank expects: "
                f"its chunk {index} has {len(payload)} bytes. All ranks must make the same exchanges"
            )
        passed = self.progress[sender]
        if index >= passed:
            self._go_past(sender, index, now)
            self.progress[sender] = index + 1
        elif got[index]:
            return False
        else:
            self._gaps[sender] -= 1
        self.unreported += 1
        if got[index]:  # not wanted
            return True
        if index < passed and sender in self._asked and (asked := float(self._asked[sender][index])) > 0:
            self.repair_s += (now - asked - self.repair_s) / 8
        buffer[start : start + len(payload)] = payload
        got[index] = 1
        self._left[sender] -= 1
        return True

    def _take_early(self, sender: int, index: int, payload: memoryview) -> bool:
        early = self._early[sender]
        if index in early or len(payload) > self._room:
            return False
        early[index] = bytes(payload)
        self._room -= len(payload)
        self.progress[sender] = max(self.progress[sender], index + 1)
        self.unreported += 1
        return True

    def polled(self, sender: int, sent: int, now: float) -> None:
        """Note how many chunks the sender says it has sent. Those among them that have not arrived count as missing."""
        self._sent[sender] = max(self._sent[sender], sent)
        if self.begun and (sent := min(sent, len(self._got[sender]))) > self.progress[sender]:
            self._go_past(sender, sent, now)

    def has_all_sent(self, sender: int) -> bool:
        """Return whether all chunks have arrived that the sender says it has sent."""
        return self.progress[sender] >= self._sent[sender] and not self._gaps[sender]

    def _go_past(self, sender: int, end: int, now: float) -> None:
        """Move the progress to ``end``. Wanted chunks that were passed over are gaps."""
        gaps = self._got[sender].count(0, self.progress[sender], end)
        self.progress[sender] = end
        if gaps:
            self._gaps[sender] += gaps
            if self.check_at is None:
                self.check_at = now + self.REORDER_S
                self._ripen()

    def _ripen(self) -> None:
        self._ripe = list(self.progress)

    def missing(self, now: float, capacity: int) -> list[Missing]:
        """Return the missing chunks to ask for now, at most ``capacity`` runs, and note that they were asked for."""
        runs: list[Missing] = []
        retry_s = min(max(2 * self.repair_s, 0.02), 1.0)
        for peer in self._ranks:
            if not self._gaps[peer]:
                continue
            got = np.frombuffer(self._got[peer], dtype=np.uint8)
            asked = self._asked.setdefault(peer, np.zeros(len(got)))
            gone = np.flatnonzero(got[: self._ripe[peer]] == 0)
            due = gone[asked[gone] <= now - retry_s]
            if not len(due):
                continue
            for part in np.split(due, np.flatnonzero(np.diff(due) != 1) + 1):
                for first in range(int(part[0]), int(part[-1]) + 1, _MAX_RUN):
                    if len(runs) == capacity:
                        break
                    length = min(_MAX_RUN, int(part[-1]) + 1 - first)
                    runs.append(Missing(peer, length, first))
                    asked[first : first + length] = now
        self._ripen()
        self.check_at = now + self.REORDER_S if any(self._gaps) else None
        return runs
