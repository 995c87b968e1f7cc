"""Ranks that are lost, close early or are interrupted, and misuse: the same error on all."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from narrowband.transport import RanksLostError
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


def interrupt(rank, world):
    sizes = [100_000] * world
    with transport(mtu=ETHERNET) as multicast:
        if rank == 0:
            incoming, main = places(rank, sizes), threading.get_ident()

            def press_ctrl_c():
                wait_for(lambda: multicast._loop._request)
                signal.pthread_kill(main, signal.SIGINT)

            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            presses = threading.Thread(target=press_ctrl_c)
            presses.start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    multicast.exchange(content(rank, sizes[0]), incoming, everything(rank, sizes))
            finally:
                presses.join()
                signal.signal(signal.SIGINT, before)
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
