"""What the datagrams of the multicast transport look like: a header, a code that authenticates, and a payload.

::

    byte  0        1      2          4         8            16                 32
          ┌────────┬──────┬──────────┬─────────┬────────────┬──────────────────┬───────────
          │ format │ kind │  sender  │  index  │  exchange  │ BLAKE2b, 16 byte │ payload …
          └────────┴──────┴──────────┴─────────┴────────────┴──────────────────┴───────────

The code is keyed BLAKE2b (RFC 7693) of the first 16 bytes and the payload; the key is the session's, known to its ranks
only. So a datagram that was changed, cut, made up, or recorded in another session is not one of this session, and
:meth:`Framing.parse` returns None. One of this session that comes again, or late, is genuine: what (sender, exchange,
index) is for is that whoever reads it may do so twice.

==========  =============================================  ============================================================
kind        index                                          payload
==========  =============================================  ============================================================
``HELLO``   round of the probe                             a byte per rank, 1 if its hello came; zeros up to full size
``DATA``    chunk of the sender's buffer                   the chunk; all but the last have the session's chunk size
``STATUS``  serial number; an older one is no news         how far the sender has got with each rank's buffer (`Status`)
``POLL``    how many chunks have been sent                 none; asks for a status
``BYE``     0                                              ranks at fault, 2 bytes each; none for an ordinary goodbye
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

_FORMAT = 1  # of this file; another number, another layout
_FIELDS = struct.Struct("!BBHIQ")
_CODE_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CODE_BYTES
KEY_BYTES = 32
MAX_RANKS = 256  # a status has 4 bytes for each and has to fit into one Ethernet frame with room for what is missing

_PROGRESS = struct.Struct("!I")
_MISSING = struct.Struct("!HHI")
_RANK = struct.Struct("!H")
_COMPLETE = 0x8000_0000
MAX_CHUNKS = _COMPLETE - 1


class Kind(enum.IntEnum):
    """What a datagram is for."""

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
        rank: who sends what :meth:`header` is for.
        world_size: how many ranks there are; a sender beyond is nobody.

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
        """The 32 bytes that go before ``payload``."""
        fields = _FIELDS.pack(_FORMAT, kind, self.rank, index, exchange)
        return fields + self._code(fields, payload)

    def parse(self, datagram: memoryview) -> Datagram | None:
        """What another rank of this session sent; None for anything else, this rank's own datagrams included."""
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
        """Whether it claims to be from this rank: the loop on one host brings everyone's own datagrams back."""
        return len(datagram) >= HEADER_BYTES and _RANK.unpack_from(datagram, 2)[0] == self.rank

    def _code(self, fields: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        code = self._keyed.copy()  # the key is hashed once
        code.update(fields)
        code.update(payload)
        return code.digest()


class Missing(NamedTuple):
    """``length`` chunks of ``rank``'s buffer from ``first`` on that did not arrive."""

    rank: int
    length: int
    first: int


@dataclass(frozen=True)
class Status:
    """How far a rank has got with everybody's buffer in one exchange; the payload of ``STATUS``.

    Attributes:
        progress: for each rank, how many chunks have gone past: one more than the highest index that arrived.
        complete: for each rank, whether all has arrived that is needed.
        missing: chunks that did not arrive though later ones did: please send them again.
    """

    progress: tuple[int, ...]
    complete: tuple[bool, ...]
    missing: tuple[Missing, ...] = ()

    @staticmethod
    def capacity(world_size: int, nbytes: int) -> int:
        """How many runs of missing chunks fit into a payload of ``nbytes``."""
        return (nbytes - world_size * _PROGRESS.size) // _MISSING.size

    def pack(self) -> bytes:
        """4 bytes per rank, the highest bit for complete; then 8 per run of missing chunks: rank, length, first."""
        words = [progress | _COMPLETE * done for progress, done in zip(self.progress, self.complete, strict=True)]
        return struct.pack(f"!{len(words)}I", *words) + b"".join(_MISSING.pack(*run) for run in self.missing)

    @staticmethod
    def unpack(payload: memoryview, world_size: int) -> Status | None:
        """The status in a payload; None if it is none."""
        end = world_size * _PROGRESS.size
        if len(payload) < end or (len(payload) - end) % _MISSING.size:
            return None
        words = struct.unpack_from(f"!{world_size}I", payload)
        missing = tuple(Missing(*run) for run in _MISSING.iter_unpack(payload[end:]))
        if any(run.rank >= world_size for run in missing):
            return None
        return Status(tuple(word & MAX_CHUNKS for word in words), tuple(word >= _COMPLETE for word in words), missing)


def pack_ranks(ranks: tuple[int, ...]) -> bytes:
    """Payload of ``BYE`` and ``LOST``: who is at fault."""
    return b"".join(_RANK.pack(rank) for rank in ranks)


def ranks_of(payload: memoryview, world_size: int) -> tuple[int, ...] | None:
    """The ranks that a ``BYE`` or ``LOST`` names; None if it is neither."""
    if len(payload) % _RANK.size:
        return None
    ranks = tuple(rank for (rank,) in _RANK.iter_unpack(payload))
    return ranks if all(rank < world_size for rank in ranks) else None
