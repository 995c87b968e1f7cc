"""What is taken for a datagram of the session, and that nothing else is."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowband.transport.datagram import HEADER_BYTES, MAX_CHUNKS, Framing, Kind, Missing, Status, pack_ranks, ranks_of

KEY = bytes(range(32))
WORLD = 5

kinds = st.sampled_from(list(Kind))
indices = st.integers(0, 2**32 - 1)
exchanges = st.integers(0, 2**64 - 1)
payloads = st.binary(max_size=200)


def datagram(kind: Kind, index: int, exchange: int, payload: bytes, *, key: bytes = KEY, sender: int = 1) -> bytes:
    return Framing(key, sender, WORLD).header(kind, index, exchange, payload) + payload


def parse(raw: bytes, rank: int = 0):
    return Framing(KEY, rank, WORLD).parse(memoryview(raw))


@given(kinds, indices, exchanges, payloads)
def test_what_one_rank_makes_another_reads(kind, index, exchange, payload):
    read = parse(datagram(kind, index, exchange, payload, sender=4))
    assert read is not None
    assert (read.kind, read.sender, read.index, read.exchange, bytes(read.payload)) == (
        kind,
        4,
        index,
        exchange,
        payload,
    )


def test_the_layout_is_the_one_that_is_documented():
    fields = struct.pack("!BBHIQ", 1, 2, 1, 77, 2**40)
    code = hashlib.blake2b(fields + b"chunk", key=KEY, digest_size=16).digest()
    assert datagram(Kind.DATA, 77, 2**40, b"chunk") == fields + code + b"chunk"
    assert len(fields + code) == HEADER_BYTES == 32


@given(kinds, indices, exchanges, payloads, st.data())
def test_a_changed_bit_anywhere_makes_it_no_datagram(kind, index, exchange, payload, data):
    raw = bytearray(datagram(kind, index, exchange, payload))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert parse(bytes(raw)) is None


@given(kinds, indices, exchanges, payloads, st.binary(min_size=1, max_size=8), st.data())
def test_one_that_is_cut_or_longer_is_no_datagram(kind, index, exchange, payload, more, data):
    raw = datagram(kind, index, exchange, payload)
    assert parse(raw[: data.draw(st.integers(0, len(raw) - 1))]) is None
    assert parse(raw + more) is None


@given(st.binary(max_size=300))
def test_bytes_from_anywhere_are_no_datagram(raw):
    assert parse(raw) is None


@given(kinds, indices, exchanges, payloads)
def test_another_session_is_not_this_one(kind, index, exchange, payload):
    assert parse(datagram(kind, index, exchange, payload, key=bytes(32))) is None


def test_a_rank_does_not_read_its_own_and_nobody_has_a_rank_beyond_the_world():
    raw = datagram(Kind.POLL, 0, 1, b"", sender=3)
    assert parse(raw, rank=3) is None
    assert Framing(KEY, 3, WORLD).is_own(memoryview(raw))
    assert not Framing(KEY, 2, WORLD).is_own(memoryview(raw))
    larger = Framing(KEY, 7, 8)
    assert parse(larger.header(Kind.POLL, 0, 1)) is None


def test_another_format_and_an_unknown_kind_are_no_datagrams_though_their_code_is_right():
    for form, kind in ((2, 2), (1, 0), (1, 8), (1, 255)):
        fields = struct.pack("!BBHIQ", form, kind, 1, 0, 0)
        assert parse(fields + hashlib.blake2b(fields, key=KEY, digest_size=16).digest()) is None


def test_keys_and_ranks_are_checked():
    with pytest.raises(ValueError, match="31 bytes"):
        Framing(bytes(31), 0, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Framing(KEY, 2, 2)
    with pytest.raises(ValueError, match="at most 256"):
        Framing(KEY, 0, 257)


statuses = st.builds(
    Status,
    st.tuples(*[st.integers(0, MAX_CHUNKS)] * WORLD),
    st.tuples(*[st.booleans()] * WORLD),
    st.lists(
        st.builds(Missing, st.integers(0, WORLD - 1), st.integers(0, 65535), indices),
        max_size=6,
    ).map(tuple),
)


@given(statuses)
def test_a_status_survives_its_payload(status):
    payload = status.pack()
    assert len(payload) == 4 * WORLD + 8 * len(status.missing)
    assert Status.capacity(WORLD, len(payload)) == len(status.missing)
    assert Status.unpack(memoryview(payload), WORLD) == status


@given(st.binary(max_size=80))
def test_any_payload_is_a_status_or_none(payload):
    status = Status.unpack(memoryview(payload), WORLD)
    lengths = [4 * WORLD + 8 * runs for runs in range(10)]
    if status is None:
        assert len(payload) not in lengths or max(run[0] for run in runs_of(payload)) >= WORLD
    else:
        assert status.pack() == payload


def runs_of(payload: bytes) -> list[tuple[int, int, int]]:
    return list(struct.iter_unpack("!HHI", payload[4 * WORLD :]))


@given(st.lists(st.integers(0, WORLD - 1), max_size=WORLD).map(tuple))
def test_a_goodbye_names_ranks(ranks):
    assert ranks_of(memoryview(pack_ranks(ranks)), WORLD) == ranks


def test_a_goodbye_that_names_nobody_there_is_none():
    assert ranks_of(memoryview(pack_ranks((WORLD,))), WORLD) is None
    assert ranks_of(memoryview(b"\0"), WORLD) is None
