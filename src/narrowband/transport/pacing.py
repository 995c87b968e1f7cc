"""Congestion control: a window that follows loss, and a rate limit that a user sets.

All ranks send at once, and each rank's link receives from all of them. The capacity of that link, of a switch and of
receive buffers is unknown, so each sender has a window: the number of chunks that may be in flight. The window begins
small and grows by half in every round, as long as this raises the throughput (as BBR's start-up: Cardwell et al., ACM
Queue 2016) and fills no queue. From then on it grows by one chunk in every round, shrinks by one for every chunk that
is lost, and by a factor when many are (additive increase, multiplicative decrease: Chiu and Jain 1989; as a window for
multicast: pgmcc, Rizzo, SIGCOMM 2000). The slowest receiver's statuses move the window, so no receiver is overrun.
"""

from __future__ import annotations

__all__ = ["TokenBucket", "Window"]

_START_GROWTH = 0.5
#: A round whose throughput is less than this factor above the best one before did not profit from the larger window.
_PROFIT = 1.25
_ROUNDS_WITHOUT_PROFIT = 2
#: If a trip takes this many seconds longer than the shortest, a queue is filling up (as HyStart: Ha and Rhee 2011).
_QUEUE_S = 0.05
_DECREASE = 0.7
_MOST_DECREASE = 0.3
#: Share of chunks that may be lost without counting as congestion.
_TOLERATED_LOSS = 0.02
#: Number of chunks over which a receiver's share of lost chunks is measured.
_JUDGED = 256
_FIRST = 10  # as TCP's first window (RFC 6928)


class Window:
    """The number of chunks that may be in flight.

    Args:
        least, most: bounds of the window's size.
        world_size: number of ranks, which are the receivers.

    Attributes:
        size: the window's size in chunks.
        trip_s: seconds from sending a chunk to the news of its arrival, smoothed.
    """

    def __init__(self, least: int, most: int, world_size: int) -> None:
        self._most = max(2, most)
        self._least = min(least, self._most)
        self.size = float(min(max(_FIRST, self._least), self._most))
        self.trip_s = 0.05
        self._known = False
        self._shortest_s = float("inf")
        self._starting = True
        self._best = 0.0  # chunks per second
        self._without_profit = 0
        self._round = 0
        self._round_at = 0.0
        self._shrunk_at = 0.0
        self._passed = [0.0] * world_size
        self._lost = [0.0] * world_size

    def timed(self, trip_s: float) -> None:
        """Note that the news of a chunk's arrival came after ``trip_s`` seconds."""
        self.trip_s = self.trip_s + (trip_s - self.trip_s) / 8 if self._known else trip_s
        self._known = True
        self._shortest_s = min(self._shortest_s, trip_s)
        if self.trip_s > self._shortest_s + _QUEUE_S:
            self._starting = False

    def passed(self, peer: int, chunks: int) -> None:
        """Note that a receiver has advanced by ``chunks``."""
        self._passed[peer] += chunks
        if self._passed[peer] > _JUDGED:
            self._passed[peer] /= 2
            self._lost[peer] /= 2

    def begin(self, now: float) -> None:
        """Begin a round, such as when sending begins with nothing in flight."""
        self._round, self._round_at = 0, now

    def arrived(self, chunks: int, now: float) -> None:
        """Note that the slowest receiver, and so all, have advanced by ``chunks``; grow the window."""
        self._round += chunks
        if self._starting and self._round >= self.size:
            self._judge(self._round / max(now - self._round_at, 1e-6))
            self.begin(now)
        growth = _START_GROWTH * chunks if self._starting else chunks / self.size
        self.size = min(self._most, self.size + growth)

    def _judge(self, chunks_per_s: float) -> None:
        """End a round of the start-up phase. The phase ends after two rounds without profit."""
        self._without_profit += 1
        if chunks_per_s > _PROFIT * self._best:
            self._best, self._without_profit = chunks_per_s, 0
        self._starting = self._without_profit < _ROUNDS_WITHOUT_PROFIT

    def lost(self, peer: int, chunks: int, now: float) -> None:
        """Note that a receiver misses ``chunks``; shrink the window."""
        self._starting = False
        self._lost[peer] += chunks
        share = self._lost[peer] / max(self._passed[peer], _JUDGED)
        if share <= _TOLERATED_LOSS:
            self.size = max(self._least, self.size - chunks)
            return
        self._lost[peer] = self._passed[peer] = 0.0
        if now - self._shrunk_at > 2 * self.trip_s:  # an earlier loss belongs to the congestion already reacted to
            self._shrunk_at = now
            self.size = max(self._least, self.size * min(_DECREASE, max(_MOST_DECREASE, 1 - share)))


class TokenBucket:
    """A token bucket that limits sending to a rate in bytes per second; without a rate there is no limit.

    A burst may exceed the rate by ten milliseconds' worth of bytes or by ``burst`` bytes, whichever is more; the
    average does not exceed it.
    """

    def __init__(self, rate: float | None, burst: int) -> None:
        self._rate = rate
        self._depth = max(burst, (rate or 0.0) * 0.01)
        self._tokens = self._depth
        self._filled_at = 0.0

    def delay(self, now: float) -> float:
        """Return the seconds until something may be sent; 0 if it may be sent now."""
        if self._rate is None:
            return 0.0
        self._tokens = min(self._depth, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return max(0.0, -self._tokens / self._rate)

    def take(self, nbytes: int) -> None:
        """Note that ``nbytes`` were sent."""
        if self._rate is not None:
            self._tokens -= nbytes
