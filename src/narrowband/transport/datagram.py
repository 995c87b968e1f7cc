"""The format of the multicast transport's datagrams: a header, a message authentication code, and a payload.

::

    byte  0        1      2          4         8            16                 32
          ┌────────┬──────┬──────────┬─────────┬────────────┬──────────────────┬───────────
          │ format │ kind │  sender  │  index  │  exchange  │ BLAKE2b, 16 byte │ payload …
          └────────┴──────┴──────────┴─────────┴────────────┴──────────────────┴───────────

The code is keyed BLAKE2b (RFC 7693) of the first 16 bytes and the payload. The key belongs to the session, and only its
ranks know it. So :meth:`Framing.parse` returns None for a datagram that was changed, cut, forged, or recorded in
another session. A datagram of this session that arrives again, or late, passes as genuine. Receivers therefore must
handle datagrams idempotently, which (sender, exchange, index) makes possible.

==========  =============================================  ============================================================
kind        index                                          payload
==========  =============================================  ============================================================
``HELLO``   round of the probe                             a byte per rank, 1 if its hello came; zeros up to full size
``DATA``    chunk of the sender's buffer                   the chunk; all but the last have the session's chunk size
``STATUS``  serial number; older ones are ignored          how far the sender has got with each rank's buffer (`Status`)
``POLL``    how many chunks have been sent                 none; asks for a status
``BYE``     0                                              ranks at fault, 2 bytes each; if these are others, the sender
                                                           still sends repairs, until it says goodbye without any
``LOST``    1 if it may not return any more, else 0        the rank that the others go on without, 2 bytes
``RETURN``  0                                              none; the sender is the lost rank, and asks to be let back
==========  =============================================  ============================================================

Integers are unsigned and big-endian.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "HEADER_BYTES",
    "KEY_BYTES",
    "MAX_CHUNKS",
    "MAX_RANKS",
    "Datagram",
    "Framing",
    "Kind",
    "Missing",
    "Status",
    "pack_ranks",
    "ranks_of",
]

_FORMAT = 1  # version of the layout above
_FIELDS = struct.Struct("!BBHIQ")
_CODE_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CODE_BYTES
KEY_BYTES = 32
MAX_RANKS = 256  # a status has 4 bytes per rank, and must fit into one Ethernet frame with room for missing runs

_PROGRESS = struct.Struct("!I")
_MISSING = struct.Struct("!HHI")
_RANK = struct.Struct("!H")
_COMPLETE = 0x8000_0000
MAX_CHUNKS = _COMPLETE - 1


class Kind(enum.IntEnum):
    """The kind of a datagram; see the table above."""

    HELLO = 1
    DATA = 2
    STATUS = 3
    POLL = 4
    BYE = 5
    LOST = 6
    RETURN = 7


_KINDS = {kind.value: kind for kind in Kind}


@dataclass(slots=True)
class Datagram:
    """A datagram of this session. ``payload`` is a view of the bytes that were parsed."""

    kind: Kind
    sender: int
    index: int
    exchange: int
    payload: memoryview


class Framing:
    """Makes and checks the datagrams of one session, for one rank.

    Args:
        key: secret of the session, 32 bytes.
        rank: this rank, the sender of its datagrams.
        world_size: number of ranks; datagrams of senders beyond it are rejected.

    >>> framing, other = Framing(bytes(32), 0, 2), Framing(bytes(32), 1, 2)
    >>> datagram = bytes(framing.header(Kind.DATA, 7, 0, b"chunk")) + b"chunk"
    >>> other.parse(memoryview(datagram)).index
    7
    >>> other.parse(memoryview(datagram[:-1])) is None
    True
    """

    def __init__(self, key: bytes, rank: int, world_size: int) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes; expected {KEY_BYTES}")
        if not 0 <= rank < world_size <= MAX_RANKS:
            raise ValueError(f"rank {rank} of {world_size}; expected at most {MAX_RANKS} ranks")
        self.rank = rank
        self.world_size = world_size
        self._keyed = hashlib.blake2b(key=key, digest_size=_CODE_BYTES)

    def header(self, kind: Kind, index: int, exchange: int, payload: bytes | memoryview = b"") -> bytes:
        """Return the 32 bytes that precede ``payload``."""
        fields = _FIELDS.pack(_FORMAT, kind, self.rank, index, exchange)
        return fields + self._code(fields, payload)

    def parse(self, datagram: memoryview) -> Datagram | None:
        """Parse a datagram of another rank of this session. Return None for anything else, this rank's own included."""
        if len(datagram) < HEADER_BYTES:
            return None
        form, number, sender, index, exchange = _FIELDS.unpack_from(datagram)
        kind = _KINDS.get(number)
        if form != _FORMAT or kind is None or sender >= self.world_size or sender == self.rank:
            return None
        payload = datagram[HEADER_BYTES:]
        code = self._code(datagram[: _FIELDS.size], payload)
        if not hmac.compare_digest(code, datagram[_FIELDS.size : HEADER_BYTES]):
            return None
        return Datagram(kind, sender, index, exchange, payload)

    def is_own(self, datagram: memoryview) -> bool:
        """Return whether a datagram claims to be from this rank. Multicast loopback returns a rank's own datagrams."""
        return len(datagram) >= HEADER_BYTES and _RANK.unpack_from(datagram, 2)[0] == self.rank

    def _code(self, fields: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        code = self._keyed.copy()  # saves hashing the key again
        code.update(fields)
        code.update(payload)
        return code.digest()


class Missing(NamedTuple):
    """A run of ``length`` chunks of ``rank``'s buffer, from chunk ``first`` on, that did not arrive."""

    rank: int
    length: int
    first: int


@dataclass(frozen=True)
class Status:
    """How much of each rank's buffer a rank has received in one exchange; the payload of ``STATUS``.

    Attributes:
        progress: for each rank, one more than the highest chunk index that arrived.
        complete: for each rank, whether all needed chunks have arrived.
        missing: chunks that did not arrive though later ones did; a request to send them again.
    """

    progress: tuple[int, ...]
    complete: tuple[bool, ...]
    missing: tuple[Missing, ...] = ()

    @staticmethod
    def capacity(world_size: int, nbytes: int) -> int:
        """Return how many runs of missing chunks fit into a payload of ``nbytes``."""
        return (nbytes - world_size * _PROGRESS.size) // _MISSING.size

    def pack(self) -> bytes:
        """Encode as 4 bytes per rank, progress with ``complete`` in the highest bit; then 8 bytes per run of missing
        chunks: rank, length, first.
        """
        words = [progress | _COMPLETE * done for progress, done in zip(self.progress, self.complete, strict=True)]
        return struct.pack(f"!{len(words)}I", *words) + b"".join(_MISSING.pack(*run) for run in self.missing)

    @staticmethod
    def unpack(payload: memoryview, world_size: int) -> Status | None:
        """Decode a payload; return None if it is malformed."""
        end = world_size * _PROGRESS.size
        if len(payload) < end or (len(payload) - end) % _MISSING.size:
            return None
        words = struct.unpack_from(f"!{world_size}I", payload)
        missing = tuple(Missing(*run) for run in _MISSING.iter_unpack(payload[end:]))
        if any(run.rank >= world_size for run in missing):
            return None
        return Status(tuple(word & MAX_CHUNKS for word in words), tuple(word >= _COMPLETE for word in words), missing)


def pack_ranks(ranks: tuple[int, ...]) -> bytes:
    """Encode ranks as the payload of ``BYE`` or ``LOST``."""
    return b"".join(_RANK.pack(rank) for rank in ranks)


def ranks_of(payload: memoryview, world_size: int) -> tuple[int, ...] | None:
    """Decode the ranks that a ``BYE`` or ``LOST`` names; return None if the payload is malformed."""
    if len(payload) % _RANK.size:
        return None
    ranks = tuple(rank for (rank,) in _RANK.iter_unpack(payload))
    return ranks if all(rank < world_size for rank in ranks) else None
