"""Ranks that are lost, close early or are interrupted, and misuse: the same error on all."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from narrowband.transport import RanksLostError
from narrowband.transport.datagram import Kind
from narrowband.transport.membership import Limits, Membership
from narrowband.transport.multicast import Multicast
from narrowband.transport.probe import Session
from narrowband.transport.sockets import MulticastSocket
from tests.ranks import run_ranks
from tests.transport.exchanges import (
    ETHERNET,
    LIMIT_S,
    SHORT_S,
    Patient,
    content,
    everything,
    places,
    transport,
    wait_for,
)


class Dying(MulticastSocket):
    """As if its process were killed after so many datagrams."""

    left = 1 << 60

    def send(self, header, payload=b""):
        Dying.left -= 1
        return True if Dying.left < 0 else super().send(header, payload)

    def receive(self):
        return super().receive() if Dying.left >= 0 else None


def lose_a_rank(rank, world, how):
    sizes = [300_000] * world
    outcome = []
    with transport(Dying, mtu=ETHERNET, timeout_s=SHORT_S) as multicast:
        multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        Patient.losable = frozenset({1})
        if rank == 1:
            if how == "late":
                wait_for(lambda: multicast._members.verdict)
            else:  # hears no one
                Patient.losable = frozenset({0, 2})
                Dying.left = 50 if how == "killed" else 0
        try:
            multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        except RuntimeError as error:
            outcome = [type(error), getattr(error, "ranks", None), str(error)]
            with pytest.raises(RuntimeError, match=r"loss of|delivered nothing|gave up"):
                multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
    Dying.left = 1 << 60
    return outcome


@pytest.mark.parametrize("how", ["killed", "silent", "late"])
def test_a_rank_that_brings_nothing_is_named_on_all_others(how):
    outcomes = run_ranks(lose_a_rank, 3, how, timeout_s=LIMIT_S)
    for kind, ranks, message in (outcomes[0], outcomes[2]):
        assert kind is RanksLostError
        assert ranks == (1,)
        assert "rank 1" in message
    told = " ".join(message for _, _, message in (outcomes[0], outcomes[2]))
    assert f"delivered nothing for {SHORT_S:g} s in exchange 2" in told
    if how == "late":
        assert "gave up waiting for this rank" in outcomes[1][2]


def test_a_rank_that_gives_signs_of_life_is_waited_for_and_one_that_is_late_is_told_from_one_that_is_dead():
    session = Session(bytes(32), "", 0, 8, 0, rank=0, world_size=3)
    link = SimpleNamespace(session=session)
    members = Membership(link, Limits(timeout_s=100.0, silence_timeout=4.0, max_failures=0, readmits=False))
    for second in range(1, 100):
        members.hears(1, float(second))  # computes, and answers
        members.check({1}, 1, 0.5, second + 0.9)
    with pytest.raises(RanksLostError, match=r"nothing for 100 s in exchange 1: rank 1 answers, so it is alive"):
        members.check({1}, 1, 0.5, 101.0)
    with pytest.raises(RanksLostError, match=r"nothing for 4 s in exchange 1: rank 1 was last heard 5\.0 s ago"):
        members.check({1}, 1, 60.0, 104.0)
    with pytest.raises(RanksLostError, match="rank 2 was never heard"):
        members.check({2}, 1, 60.0, 104.0)
    members.attentive_since = 102.0  # this process itself was stopped
    members.check({1, 2}, 1, 60.0, 104.0)


def close_early(rank, world):
    sizes = [100_000] * world
    with transport(mtu=ETHERNET) as multicast:
        multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        if rank == 2:
            return None
        with pytest.raises(RanksLostError) as caught:
            multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        return caught.value.ranks, str(caught.value)


def test_a_rank_that_has_closed_is_named_at_once():
    *others, closed = run_ranks(close_early, 3, timeout_s=LIMIT_S)
    assert closed is None
    for ranks, message in others:
        assert ranks == (2,)
        assert "rank 2" in message
    assert any("rank 2 closed the transport before exchange 2" in message for _, message in others)


def interrupted(multicast, exchange):
    """Press Ctrl-C as soon as the exchange is under way."""
    main = threading.get_ident()

    def press_ctrl_c():
        wait_for(lambda: multicast._loop._request)
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presses = threading.Thread(target=press_ctrl_c)
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            exchange()
    finally:
        presses.join()
        signal.signal(signal.SIGINT, before)


def interrupt(rank, world):
    sizes = [100_000] * world
    with transport(mtu=ETHERNET) as multicast:
        if rank == 0:
            incoming = places(rank, sizes)
            interrupted(
                multicast, lambda: multicast.exchange(content(rank, sizes[0]), incoming, everything(rank, sizes))
            )
            with pytest.raises(RuntimeError, match="closed"):
                multicast.exchange(content(rank, sizes[0]), incoming, everything(rank, sizes))
            dist.barrier()
            return bool(incoming[1].any())
        dist.barrier()  # its data would come now
        with pytest.raises(RanksLostError, match="rank 0 closed the transport before exchange 1"):
            multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        return None


def test_after_ctrl_c_nothing_is_written_and_the_others_know():
    assert run_ranks(interrupt, 2, timeout_s=LIMIT_S) == [False, None]


class WithoutChunks(MulticastSocket):
    """Rank 1 gets no chunk of rank 0 in exchange 2."""

    def receive(self):
        while (raw := super().receive()) is not None:
            is_lost = raw[1] == Kind.DATA and raw[2:4] == b"\0\0" and int.from_bytes(raw[8:16], "big") == 2
            if dist.get_rank() != 1 or not is_lost:
                return raw
        return None


def leave_while_another_lacks_chunks(rank, world, how):
    """Rank 0 finishes exchange 2 and leaves in exchange 3, as rank 1 still waits for its chunks of exchange 2."""
    sizes = [10_000] * world

    def exchange(mine=10_000):
        multicast.exchange(content(rank, mine), places(rank, sizes), everything(rank, sizes))

    with transport(WithoutChunks, mtu=ETHERNET) as multicast:
        exchange()
        if rank == 1:
            with pytest.raises(RanksLostError) as caught:
                exchange()
            return caught.value.ranks, str(caught.value)
        exchange()
        if rank == 2:
            with pytest.raises(RuntimeError):
                exchange(mine=10_000 + (how == "error"))
        elif how == "error":
            with pytest.raises(RuntimeError, match="rank 2 sends a buffer of another size"):
                exchange()
        else:
            interrupted(multicast, exchange)
        return None


@pytest.mark.parametrize("how", ["ctrl-c", "error"])
def test_a_rank_that_leaves_while_another_lacks_chunks_of_an_earlier_exchange_is_named_at_once(how):
    _, (ranks, said), _ = run_ranks(leave_while_another_lacks_chunks, 3, how, timeout_s=LIMIT_S)
    assert ranks == (0,)
    assert "rank 0 closed the transport before this rank had all of exchange 2" in said


class WithoutStatuses(MulticastSocket):
    """Rank 0 gets no status of rank 1."""

    def receive(self):
        while (raw := super().receive()) is not None:
            if dist.get_rank() != 0 or raw[1] != Kind.STATUS or raw[2:4] != b"\0\1":
                return raw
        return None


def leave_with_all_it_wants(rank, world):
    """Rank 1 wants the first chunk of rank 0 only, has it, and leaves; rank 0 never hears how far it is."""
    sizes = [400_000, 10, 10]
    wanted = everything(rank, sizes)
    if rank == 1:
        wanted[0] = [(0, 10)]
    with transport(WithoutStatuses, mtu=ETHERNET) as multicast:
        incoming = places(rank, sizes)
        multicast.exchange(content(rank, sizes[rank]), incoming, wanted)
        return incoming[0]


def test_a_rank_that_has_left_with_all_it_wants_holds_up_no_window():
    _, _, received = run_ranks(leave_with_all_it_wants, 3, timeout_s=LIMIT_S)
    assert torch.equal(received, content(0, 400_000))


def close_meanwhile(rank, world):
    """Rank 0 closes in another thread while it waits for what rank 1 never sends."""
    sizes = [10_000] * world
    with transport(mtu=ETHERNET) as multicast:
        if rank == 0:
            closes = threading.Thread(target=lambda: (wait_for(lambda: multicast._loop._request), multicast.close()))
            closes.start()
            with pytest.raises(RuntimeError, match="closed"):
                multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
            closes.join()
        dist.barrier()


def test_an_exchange_that_another_thread_closes_does_not_return_as_if_it_were_complete():
    run_ranks(close_meanwhile, 2, timeout_s=LIMIT_S)


def interrupt_at_once(rank, world):
    with transport() as multicast:
        loop, call = multicast._loop, multicast._loop._call

        def interrupted():
            loop._call = call
            raise KeyboardInterrupt

        loop._call = interrupted  # before the caller waits
        with pytest.raises(KeyboardInterrupt):
            multicast.exchange(content(rank, 9), [None], [[]])
        with pytest.raises(RuntimeError, match="closed"):
            multicast.exchange(content(rank, 9), [None], [[]])


def test_ctrl_c_at_the_very_beginning_of_an_exchange_ends_it():
    run_ranks(interrupt_at_once, 1, timeout_s=LIMIT_S)


def exchange_other_sizes(rank, world):
    sizes = [20_000] * world
    mine = 20_001 if rank == 1 else 20_000
    with transport(mtu=ETHERNET) as multicast:
        for _ in range(2):  # rank 1, which got what it wanted, may hear of it in the next one only
            try:
                multicast.exchange(content(rank, mine), places(rank, sizes), everything(rank, sizes))
            except RuntimeError as error:
                return str(error)
    return ""


def test_buffers_of_other_sizes_than_expected_are_an_error_on_all_ranks():
    messages = run_ranks(exchange_other_sizes, 2, timeout_s=LIMIT_S)
    assert "rank 1 sends a buffer of another size than the 20000 bytes" in messages[0]
    assert messages[1]


def misuse(rank, world):
    sizes = [100] * world
    with transport() as multicast:
        with pytest.raises(ValueError, match="uint8"):
            multicast.exchange(torch.zeros(100), places(rank, sizes), everything(rank, sizes))
        with pytest.raises(ValueError, match="ascending ranges"):
            multicast.exchange(
                content(rank, 100), places(rank, sizes), [[(50, 101)] if k != rank else [] for k in (0, 1)]
            )
        multicast.exchange(content(rank, 100), places(rank, sizes), everything(rank, sizes))  # nothing has happened


def test_arguments_that_cannot_be_meant_are_refused_before_anything_is_sent():
    run_ranks(misuse, 2, timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0"),
        ({"ttl": 0}, "ttl is 0"),
        ({"mtu": 100}, "mtu is 100"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Multicast(None, **options)
