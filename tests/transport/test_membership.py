"""Ranks that are lost, close early or are interrupted, and misuse: the same error on all."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist

from narrowband.transport import RanksLostError
from narrowband.transport.multicast import Multicast
from narrowband.transport.sockets import MulticastSocket
from tests.ranks import run_ranks
from tests.transport.exchanges import ETHERNET, LIMIT_S, content, everything, places, transport

SHORT_S = 1.5  # after which a rank that is silent is lost


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
        if rank == 1:
            if how == "late":
                time.sleep(2 * SHORT_S)
            elif how == "killed":
                Dying.left = 50
            elif how == "silent":
                Dying.left = 0
        try:
            multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        except RuntimeError as error:
            outcome = [type(error), getattr(error, "ranks", None), str(error)]
            with pytest.raises(RuntimeError, match=r"lost|brought nothing|gave up"):
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
    assert f"brought nothing for {SHORT_S:g} s in exchange 2" in told
    if how == "late":
        assert "rank 1 answers, so it is late" in told
        assert "waited" in outcomes[1][2]
        assert "for this rank and gave up" in outcomes[1][2]


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
            incoming = places(rank, sizes)

            def on_alarm(*_):
                raise KeyboardInterrupt

            before = signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                with pytest.raises(KeyboardInterrupt):
                    multicast.exchange(content(rank, sizes[0]), incoming, everything(rank, sizes))
            finally:
                signal.signal(signal.SIGALRM, before)
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
