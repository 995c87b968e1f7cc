"""What a rank knows of one exchange: how far its own buffer has got, and how far it has got with the others'.

A buffer is cut into chunks; all but the last have the session's size. Its sender sends each once, in order, and again
those that a receiver says are missing. Nothing here sends, waits or knows the time:
:mod:`narrowband.transport.multicast` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from narrowband.transport.datagram import MAX_CHUNKS, Missing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MismatchError", "Receiving", "Sending", "chunks_of"]

_MAX_RUN = 65535  # what a run's 16 bits hold


class MismatchError(RuntimeError):
    """A rank sends a buffer of another size than this rank expects."""


def chunks_of(nbytes: int, chunk_bytes: int) -> int:
    """How many chunks a buffer is cut into.

    Raises:
        ValueError: more than can be numbered.
    """
    count = -(-nbytes // chunk_bytes)
    if count > MAX_CHUNKS:
        raise ValueError(f"a buffer of {nbytes} bytes is too large: {MAX_CHUNKS} chunks of {chunk_bytes} is the limit")
    return count


class Sending:
    """This rank's buffer in one exchange.

    Attributes:
        number: of the exchange.
        count: chunks of the buffer.
        next: the first that was not sent yet.
        floor: every receiver has got this far: what is sent and not below it may be on its way.
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
        """Whether every receiver has what it needs."""
        return all(self._complete)

    @property
    def waiting(self) -> list[int]:
        """Receivers that still need something."""
        return [peer for peer in self._receivers if not self._complete[peer]]

    @property
    def behind(self) -> list[int]:
        """Receivers that have got no further than the floor."""
        return [peer for peer in self.waiting if self._progress[peer] == self.floor]

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk."""
        start = index * self._chunk_bytes
        return self._buffer[start : start + self._chunk_bytes]

    def sent(self, index: int, now: float) -> None:
        """Note that a chunk was sent."""
        self._last_sent[index] = now
        if index == self.next:
            self._first_sent[index] = now
            self.next += 1

    def heard(self, peer: int, progress: int, complete: bool, now: float) -> tuple[int, float | None]:
        """A receiver says how far it has got. How many chunks further that is, and how long ago the last was sent."""
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
        """Queue what a receiver misses, but for what was sent within the last ``holdoff_s`` and may be on its way.

        Returns:
            how many chunks that adds.
        """
        first, end = min(run.first, self.next), min(run.first + run.length, self.next)
        due = np.flatnonzero(self._last_sent[first:end] <= now - holdoff_s) + first
        before = len(self.repairs)
        self.repairs.update(dict.fromkeys(due.tolist()))
        return len(self.repairs) - before

    def keep(self) -> None:
        """Copy what may still be asked for, so that the caller may change the buffer."""
        self._buffer = np.array(np.frombuffer(self._buffer, dtype=np.uint8)).data


class Receiving:
    """The others' buffers in one exchange. What comes before the exchange has begun here is kept, within a limit.

    Attributes:
        number: of the exchange.
        begun: whether this rank knows where things go.
        progress: for each rank, one more than the highest chunk that came.
        unreported: how many chunks came since the last status.
        check_at: when to see which gaps have not closed by themselves; None if there are none.
        repair_s: how long it takes until what was asked for comes, smoothed.
    """

    #: So much later than its successors a chunk may come and is not missing.
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
        self._sent = [0] * world_size  # what a poll said
        self._buffers = [memoryview(b"")] * world_size
        self._got = [bytearray()] * world_size  # 1 for each chunk that came or is not wanted
        self._left = [0] * world_size
        self._gaps = [0] * world_size
        self._ripe = [0] * world_size  # chunks below that are missing were so at the last check, too
        self._asked: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def begin(self, buffers: Sequence[memoryview], wanted: Sequence[Sequence[tuple[int, int]]], now: float) -> None:
        """From now on chunks go to their places; those that came before do so at once.

        Raises:
            MismatchError: one that came before does not fit.
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
        """Whether all has come that this rank wants."""
        return self.begun and not any(self._left)

    @property
    def waiting(self) -> list[int]:
        """Ranks of whose buffers something is still to come."""
        return [peer for peer in self._ranks if self._left[peer]]

    def completes(self) -> list[bool]:
        """For each rank, whether its buffer came as far as it is wanted."""
        return [self.begun and not left for left in self._left]

    def take(self, sender: int, index: int, payload: memoryview, now: float) -> bool:
        """A chunk came. False if it brings nothing: it came before, or there is no room for what comes early.

        Raises:
            MismatchError: the sender's buffer is not of the size that this rank knows.
        """
        if not self.begun:
            return self._take_early(sender, index, payload)
        got, buffer, start = self._got[sender], self._buffers[sender], index * self._chunk_bytes
        if len(payload) != min(self._chunk_bytes, len(buffer) - start):
            raise MismatchError(
                f"rank {sender} sends a buffer of another size than the {len(buffer)} bytes that this rank expects: "
                f"its chunk {index} has {len(payload)} bytes. All ranks have to make the same exchanges"
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
        """The sender says how many chunks it has sent: all of them have gone past, and what did not come is missing."""
        self._sent[sender] = max(self._sent[sender], sent)
        if self.begun and (sent := min(sent, len(self._got[sender]))) > self.progress[sender]:
            self._go_past(sender, sent, now)

    def has_all_sent(self, sender: int) -> bool:
        """Whether all has come that the sender says it sent."""
        return self.progress[sender] >= self._sent[sender] and not self._gaps[sender]

    def _go_past(self, sender: int, end: int, now: float) -> None:
        """Chunks from the progress to ``end`` did not come in order."""
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
        """What has to be asked for now, at most ``capacity`` runs; notes that it was."""
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
