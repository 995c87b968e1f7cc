"""How much a rank may send: a window that follows loss, and a rate that a user sets.

All ranks send at once, and each one's link receives from all of them. Nobody knows how much that link, a switch or a
receive buffer takes; so each sender has a window of chunks that may be on their way. It begins small and grows by half
in every round, as long as that brings more through (as BBR's start-up: Cardwell et al., ACM Queue 2016) and fills no
queue. From then on it grows by one chunk in every round, shrinks by one for every chunk that is lost, and by a factor
when many are (additive increase, multiplicative decrease: Chiu and Jain 1989; as a window for multicast: pgmcc, Rizzo,
SIGCOMM 2000). The slowest receiver's statuses move it, so nobody is overrun.
"""

from __future__ import annotations

__all__ = ["TokenBucket", "Window"]

_START_GROWTH = 0.5
#: A round that brings less than this factor more through than the best one before did not profit from its window.
_PROFIT = 1.25
_ROUNDS_WITHOUT_PROFIT = 2
#: Trips that take so much longer than the shortest wait in a queue that is filling (as HyStart: Ha and Rhee 2011).
_QUEUE_S = 0.05
_DECREASE = 0.7
_MOST_DECREASE = 0.3
#: Share of chunks that may be lost for other reasons than too much being sent.
_TOLERATED_LOSS = 0.02
#: Chunks over which a receiver's loss is judged.
_JUDGED = 256
_FIRST = 10  # as TCP's first window (RFC 6928)


class Window:
    """Chunks that may be on their way.

    Args:
        least, most: bounds of its size.
        world_size: ranks, each a receiver.

    Attributes:
        size: in chunks.
        trip_s: from sending a chunk to hearing of its arrival, in seconds, smoothed.
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
        """A chunk's arrival was heard of after ``trip_s``."""
        self.trip_s = self.trip_s + (trip_s - self.trip_s) / 8 if self._known else trip_s
        self._known = True
        self._shortest_s = min(self._shortest_s, trip_s)
        if self.trip_s > self._shortest_s + _QUEUE_S:
            self._starting = False

    def passed(self, peer: int, chunks: int) -> None:
        """A receiver has got so many chunks further."""
        self._passed[peer] += chunks
        if self._passed[peer] > _JUDGED:
            self._passed[peer] /= 2
            self._lost[peer] /= 2

    def begin(self, now: float) -> None:
        """Sending begins, with nothing on its way: a round does, too."""
        self._round, self._round_at = 0, now

    def arrived(self, chunks: int, now: float) -> None:
        """All receivers have got so many chunks further."""
        self._round += chunks
        if self._starting and self._round >= self.size:
            self._judge(self._round / max(now - self._round_at, 1e-6))
            self.begin(now)
        growth = _START_GROWTH * chunks if self._starting else chunks / self.size
        self.size = min(self._most, self.size + growth)

    def _judge(self, chunks_per_s: float) -> None:
        """A round of the beginning is over."""
        self._without_profit += 1
        if chunks_per_s > _PROFIT * self._best:
            self._best, self._without_profit = chunks_per_s, 0
        self._starting = self._without_profit < _ROUNDS_WITHOUT_PROFIT

    def lost(self, peer: int, chunks: int, now: float) -> None:
        """A receiver misses so many chunks."""
        self._starting = False
        self._lost[peer] += chunks
        share = self._lost[peer] / max(self._passed[peer], _JUDGED)
        if share <= _TOLERATED_LOSS:
            self.size = max(self._least, self.size - chunks)
            return
        self._lost[peer] = self._passed[peer] = 0.0
        if now - self._shrunk_at > 2 * self.trip_s:  # what was lost before is the same news
            self._shrunk_at = now
            self.size = max(self._least, self.size * min(_DECREASE, max(_MOST_DECREASE, 1 - share)))


class TokenBucket:
    """A rate, in bytes per second, and how much of it is unused; without a rate, no limit.

    What one turn sends may exceed the rate, by what ten milliseconds bring or ``burst`` bytes; the average does not.
    """

    def __init__(self, rate: float | None, burst: int) -> None:
        self._rate = rate
        self._depth = max(burst, (rate or 0.0) * 0.01)
        self._tokens = self._depth
        self._filled_at = 0.0

    def delay(self, now: float) -> float:
        """Seconds until something may be sent; 0 if it may now."""
        if self._rate is None:
            return 0.0
        self._tokens = min(self._depth, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return max(0.0, -self._tokens / self._rate)

    def take(self, nbytes: int) -> None:
        """Note that so much was sent."""
        if self._rate is not None:
            self._tokens -= nbytes
