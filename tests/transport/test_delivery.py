"""Chunks over a channel that loses, repeats and reorders, without sockets and clocks; and the window."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowband.transport.datagram import Missing
from narrowband.transport.delivery import MismatchError, Receiving, Sending, chunks_of
from narrowband.transport.pacing import TokenBucket, Window

CHUNK = 8


def buffer_of(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def receiving_from(sent: bytes, wanted: list[tuple[int, int]]) -> tuple[Receiving, bytearray]:
    """Rank 1 of 2, which has begun."""
    arrived = bytearray(len(sent))
    receiving = Receiving(1, CHUNK, 1, 2, 10**6)
    receiving.begin([memoryview(arrived), memoryview(b"")], [wanted, []], 0.0)
    return receiving, arrived


def covered(nbytes: int, wanted: list[tuple[int, int]]) -> set[int]:
    return {i for start, stop in wanted for i in range(start, stop)} & set(range(nbytes))


@st.composite
def exchanges(draw):
    nbytes = draw(st.integers(0, 300))
    edges = sorted(draw(st.sets(st.integers(0, nbytes), max_size=6)))
    wanted = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b]
    return nbytes, wanted


@given(exchanges(), st.integers(0, 2**32), st.floats(0, 0.5), st.booleans())
def test_every_wanted_byte_arrives_whatever_the_channel_does(exchange, seed, loss, late):
    nbytes, wanted = exchange
    rng = random.Random(seed)
    content = buffer_of(nbytes, seed)
    sending = Sending(1, memoryview(content), CHUNK, 0, 2)
    arrived = bytearray(nbytes)
    receiving = Receiving(1, CHUNK, 1, 2, 64)
    begin_at = rng.randrange(40) if late else 0
    channel: list[tuple[int, bytes]] = []
    now = 1.0
    for step in range(3000):
        now += 0.01
        if step == begin_at:
            receiving.begin([memoryview(arrived), memoryview(b"")], [wanted, []], now)
        index = next(iter(sending.repairs), sending.next)
        if index < sending.count:
            sending.repairs.pop(index, None)
            channel += [(index, bytes(sending.chunk(index)))] * rng.choice([1, 1, 2])
            sending.sent(index, now)
        else:
            receiving.polled(0, sending.next, now)
        rng.shuffle(channel)
        while channel and rng.random() < 0.7:
            index, chunk = channel.pop()
            if rng.random() >= loss:
                receiving.take(0, index, memoryview(chunk), now)
        if receiving.check_at is not None and receiving.check_at <= now:
            for run in receiving.missing(now, 2):
                sending.ask(run, now, 0.0)
        sending.heard(1, receiving.progress[0], receiving.completes()[0], now)
        if receiving.complete and sending.complete and step >= begin_at:
            break
    assert receiving.complete
    assert sending.complete
    for i in covered(nbytes, wanted):
        assert arrived[i] == content[i]
    assert all(a in (0, c) for a, c in zip(arrived, content, strict=True))


def test_what_is_not_wanted_is_not_asked_for():
    content = buffer_of(10 * CHUNK)
    receiving, _ = receiving_from(content, [(0, CHUNK), (5 * CHUNK, 6 * CHUNK + 1)])
    receiving.polled(0, 10, 1.0)
    assert receiving.missing(1.0, 10) == [Missing(0, 1, 0), Missing(0, 2, 5)]


def test_a_chunk_that_is_merely_late_is_not_asked_for():
    content = buffer_of(3 * CHUNK)
    receiving, arrived = receiving_from(content, [(0, 3 * CHUNK)])
    receiving.take(0, 0, memoryview(content)[:CHUNK], 1.0)
    assert receiving.check_at is None
    receiving.take(0, 2, memoryview(content)[2 * CHUNK :], 1.0)
    assert receiving.check_at == 1.0 + Receiving.REORDER_S
    receiving.take(0, 1, memoryview(content)[CHUNK : 2 * CHUNK], 1.001)
    assert receiving.missing(1.01, 10) == []
    assert receiving.check_at is None
    assert receiving.complete
    assert arrived == content


def test_what_was_asked_for_is_not_asked_for_again_at_once():
    receiving, _ = receiving_from(buffer_of(5 * CHUNK), [(0, 5 * CHUNK)])
    receiving.polled(0, 5, 1.0)
    assert receiving.missing(1.0, 1) == [Missing(0, 5, 0)]
    assert receiving.missing(1.001, 1) == []
    assert receiving.missing(3.0, 1) == [Missing(0, 5, 0)]


def test_a_sender_repeats_only_what_it_sent_and_not_what_is_on_its_way():
    sending = Sending(1, memoryview(buffer_of(10 * CHUNK)), CHUNK, 0, 3)
    for index in range(4):
        sending.sent(index, 1.0 + index)
    assert sending.ask(Missing(0, 65535, 0), 3.5, 1.0) == 2
    assert list(sending.repairs) == [0, 1]
    assert sending.ask(Missing(0, 1, 1), 3.5, 1.0) == 0
    assert sending.ask(Missing(0, 10, 6), 100.0, 1.0) == 0


def test_the_floor_is_what_the_slowest_receiver_has_got():
    sending = Sending(1, memoryview(buffer_of(10 * CHUNK)), CHUNK, 0, 3)
    for index in range(10):
        sending.sent(index, 1.0)
    assert sending.heard(1, 8, False, 2.0) == (8, 1.0)
    assert sending.floor == 0
    assert sending.behind == [2]
    sending.heard(2, 3, False, 2.0)
    assert sending.floor == 3
    assert sending.heard(2, 2, False, 3.0) == (0, None)  # older news
    sending.heard(2, 0, True, 3.0)
    assert sending.floor == 8
    assert sending.waiting == [1]


def test_early_chunks_are_kept_up_to_the_limit_and_repeated_ones_are_not():
    content = buffer_of(4 * CHUNK)
    receiving = Receiving(1, CHUNK, 1, 2, 2 * CHUNK)
    chunks = [memoryview(content)[i * CHUNK : (i + 1) * CHUNK] for i in range(4)]
    assert [receiving.take(0, i, chunks[i], 0.0) for i in (0, 0, 1, 2)] == [True, False, True, False]
    assert receiving.progress[0] == 2
    arrived = bytearray(len(content))
    receiving.begin([memoryview(arrived), memoryview(b"")], [[(0, len(content))], []], 0.0)
    assert arrived == content[: 2 * CHUNK] + bytes(2 * CHUNK)
    assert receiving.waiting == [0]


@pytest.mark.parametrize(("index", "nbytes"), [(0, CHUNK - 1), (2, CHUNK), (2, 5), (3, CHUNK), (2**31, 1)])
@pytest.mark.parametrize("early", [False, True])
def test_a_buffer_of_another_size_is_an_error_that_names_its_rank(index, nbytes, early):
    receiving = Receiving(1, CHUNK, 1, 2, 100)
    chunk = memoryview(bytes(nbytes))
    if early:
        receiving.take(0, index, chunk, 0.0)
    place = memoryview(bytearray(2 * CHUNK + 3))

    def begin_and_take():
        receiving.begin([place, memoryview(b"")], [[(0, 19)], []], 0.0)
        receiving.take(0, index, chunk, 0.0)

    with pytest.raises(MismatchError, match="rank 0 sends a buffer of another size than the 19 bytes"):
        begin_and_take()
    assert bytes(place) == bytes(19)


def test_buffers_that_cannot_be_numbered_are_refused():
    assert chunks_of(0, 8) == 0
    assert chunks_of(17, 8) == 3
    with pytest.raises(ValueError, match="too large"):
        chunks_of(2**31 * 8, 8)


# ------------------------------------------------------------------------------------------------ pacing


def through(window: Window, chunks_per_s: float, rounds: int, now: float = 1.0) -> float:
    """Rounds through a link that takes so much, with a millisecond's way."""
    window.begin(now)
    for _ in range(rounds):
        size = int(window.size)
        now += max(0.001, size / chunks_per_s)
        window.passed(0, size)
        window.arrived(size, now)
    return now


def test_the_window_grows_while_that_brings_more_through_and_then_slowly():
    window = Window(4, 100_000, 2)
    through(window, 50_000, 30)  # 50 chunks fill the way
    assert 50 < window.size < 200
    before = window.size
    through(window, 50_000, 10)
    assert before + 9 < window.size < before + 11


def test_the_window_stops_growing_fast_when_chunks_begin_to_queue():
    window = Window(4, 100_000, 2)
    now = 1.0
    window.begin(now)
    sizes = []
    for step in range(10):  # each round brings as many more as it should: only the trips tell
        size = int(window.size)
        now += 0.001
        window.timed(0.001 if step < 5 else 0.5)
        window.arrived(size, now)
        sizes.append(window.size)
    assert sizes[4] > 7 * 10
    assert sizes[9] == pytest.approx(sizes[4] + 5, abs=1)


def test_many_lost_chunks_shrink_the_window_once_per_trip_and_few_by_as_many():
    window = Window(4, 1000, 2)
    now = through(window, 10_000, 40)
    window.timed(0.01)
    size = window.size
    window.lost(0, 3, now)
    assert window.size == size - 3
    window.lost(0, 20, now)
    assert window.size == pytest.approx((size - 3) * 0.7)
    window.lost(0, 20, now + 0.001)
    assert window.size == pytest.approx((size - 3) * 0.7)
    window.lost(0, 10_000, now + 1.0)
    assert window.size == pytest.approx((size - 3) * 0.7 * 0.3)
    for later in range(1, 100):
        window.lost(0, 100, now + later)
    assert window.size == 4


def test_the_window_keeps_its_bounds():
    window = Window(4, 30, 2)
    through(window, 1e9, 1000)
    assert window.size == 30
    assert Window(18, 1, 2).size == 2  # a receive buffer for next to nothing


@given(st.floats(1e3, 1e9), st.lists(st.integers(1, 1500), min_size=1, max_size=200))
def test_a_token_bucket_keeps_its_rate(rate, sizes):
    bucket, now, sent = TokenBucket(rate, 3000), 5.0, 0
    for size in sizes:
        now += bucket.delay(now)
        assert bucket.delay(now) <= 1e-9 * now
        bucket.take(size)
        sent += size
    assert sent <= max(3000.0, rate * 0.01) + 1500 + rate * (now - 5.0) * 1.001


def test_without_a_rate_there_is_no_limit():
    bucket = TokenBucket(None, 100)
    bucket.take(10**12)
    assert bucket.delay(1.0) == 0.0
