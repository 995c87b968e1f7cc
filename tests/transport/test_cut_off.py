"""A rank that is cut off is told, waits to be let back in, and does not wait for ever."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist

from narrowband.transport.contract import RanksLostError
from narrowband.transport.datagram import Kind
from narrowband.transport.multicast import Multicast
from narrowband.transport.sockets import MulticastSocket
from tests.gradients.training import refusal
from tests.ranks import run_ranks
from tests.transport.exchanges import (
    ETHERNET,
    LIMIT_S,
    SHORT_S,
    Cut,
    Patient,
    content,
    everything,
    places,
    transport,
    wait_for,
)

# ------------------------------------------------------------------------------------------------ exchanges


def cut_off(rank, world):
    sizes = [30_000] * world
    options = {"silence_timeout": SHORT_S, "max_failures": 1, "mtu": ETHERNET}

    def exchange(turn, gone=()):
        incoming = places(rank, sizes)
        wanted = [[] if k in gone else ranges for k, ranges in enumerate(everything(rank, sizes))]
        multicast.exchange(content(rank, sizes[0], turn), incoming, wanted)
        there = [k for k in range(world) if k != rank and k not in gone]
        return all(torch.equal(incoming[k], content(k, sizes[k], turn)) for k in there)

    with transport(Cut, **options) as multicast:
        assert exchange(0)
        Cut.is_cut = rank == 1
        dist.barrier()
        Patient.losable = frozenset({1})
        if rank == 1:
            dist.barrier()  # computing: nobody knows better than the others that they are waiting
            Cut.is_cut = False
        with pytest.raises(RanksLostError) as caught:
            exchange(1)
        if rank != 1:
            assert multicast.lost == (1,)
            assert all(exchange(turn, gone=(1,)) for turn in range(10, 13))
            with pytest.raises(RanksLostError, match="rank 1 was lost before"):
                exchange(13)
            dist.barrier()
        dist.barrier()  # those that go on are there to say so
    return caught.value.ranks, str(caught.value)


def test_a_rank_that_was_cut_off_is_told_that_the_others_go_on_without_it():
    told = run_ranks(cut_off, 4, timeout_s=LIMIT_S)
    assert [ranks for ranks, _ in told] == [(1,)] * 4
    assert "have gone on without this rank" in told[1][1]


# ------------------------------------------------------------------------------------------------ real losses


def cut_off_for_good(rank, world):
    options = {"timeout_s": 2 * SHORT_S, "silence_timeout": SHORT_S, "max_failures": 1, "readmits": True}
    incoming = places(rank, [8] * world)
    wanted = everything(rank, [8] * world)
    told = []
    with transport(Cut, mtu=ETHERNET, **options) as multicast:
        multicast.exchange(content(rank, 8, 0), incoming, wanted)
        dist.barrier()
        if rank == 1:
            Cut.is_cut, Patient.losable = True, frozenset({0, 2})
            for attempt in (lambda: multicast.exchange(content(rank, 8, 1), incoming, wanted), multicast.rejoin):
                with pytest.raises(RanksLostError) as caught:
                    attempt()
                told.append((caught.value.ranks, str(caught.value)))
        dist.barrier()
    Cut.is_cut = False
    return told


def test_a_rank_that_nobody_answers_does_not_wait_for_ever():
    told = run_ranks(cut_off_for_good, 3, timeout_s=LIMIT_S)
    (ranks, said), (at_end, why) = told[1]
    assert ranks == at_end == (1,)
    assert "this rank is cut off" in said
    assert "no other rank answered within 3 s" in why


class CutWithin(Cut):
    """A card that, while it is cut, still gets what some ranks bring, as if that had come just before."""

    brought_by: frozenset[int] = frozenset()

    def receive(self):
        while (raw := MulticastSocket.receive(self)) is not None:
            if not Cut.is_cut or (raw[1] == Kind.DATA and int.from_bytes(raw[2:4], "big") in CutWithin.brought_by):
                return raw
        return None


@contextlib.contextmanager
def losing_rank_1(rank, world, brought_by=()):
    """A transport whose rank 1 is cut off, an exchange for it, and a group of the other ranks."""
    CutWithin.brought_by = frozenset(brought_by)
    others = dist.new_group([k for k in range(world) if k != 1])

    def exchange(turn):
        incoming = places(rank, [8] * world)
        multicast.exchange(content(rank, 8, turn), incoming, everything(rank, [8] * world))
        return all(torch.equal(incoming[k], content(k, 8, turn)) for k in range(world) if k != rank)

    with transport(CutWithin, mtu=ETHERNET, silence_timeout=SHORT_S, max_failures=1, readmits=True) as multicast:
        assert exchange(0)
        Cut.is_cut = rank == 1
        dist.barrier()
        Patient.losable = frozenset(range(world) if rank == 1 else {1})
        yield multicast, exchange, others


def cut_off_within_an_exchange(rank, world, brought_by):
    with losing_rank_1(rank, world, brought_by) as (multicast, exchange, others):
        with pytest.raises(RanksLostError) as caught:
            exchange(1)
        dist.barrier()
        Cut.is_cut, Patient.losable = False, frozenset()
        if rank == 1:
            multicast.rejoin()
        else:
            wait_for(lambda: multicast.returning)
            dist.barrier(others)
            multicast.readmit()
        assert exchange(2)
        dist.barrier()
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("brought_by", [(0,), (0, 2)])
def test_a_rank_that_was_cut_off_after_some_had_brought_all_knows_that_it_was_cut_off(brought_by):
    told = run_ranks(cut_off_within_an_exchange, 4, brought_by, timeout_s=LIMIT_S)
    assert [ranks for ranks, _ in told] == [(1,)] * 4
    assert "this rank is cut off: ranks 0, 2, 3 delivered nothing" in told[1][1]


def cut_off_again_while_being_let_in(rank, world):
    with losing_rank_1(rank, world) as (multicast, exchange, others):
        with pytest.raises(RanksLostError):
            exchange(1)
        dist.barrier()
        Cut.is_cut = False
        asking = threading.Thread(target=multicast.rejoin)
        if rank == 1:
            asking.start()
            dist.barrier()
            Cut.is_cut = True  # the others know that it asks, and it never hears that they let it in
        else:
            wait_for(lambda: multicast.returning)
            dist.barrier()
        dist.barrier()
        if rank != 1:
            multicast.readmit()
            with pytest.raises(RanksLostError):
                exchange(2)
            assert multicast.lost == (1,)
            wait_for(lambda: not multicast.returning)  # the earlier request
        dist.barrier()
        Cut.is_cut, Patient.losable = False, frozenset()
        if rank == 1:
            asking.join()
        else:
            wait_for(lambda: multicast.returning)
            dist.barrier(others)
            multicast.readmit()
        assert exchange(3)
        dist.barrier()


def test_a_rank_that_was_cut_off_again_while_being_let_in_returns_later():
    run_ranks(cut_off_again_while_being_let_in, 3, timeout_s=LIMIT_S)


# ------------------------------------------------------------------------------------------------ arguments


def two_of_them(rank, world):
    return [
        refusal(lambda: Multicast(dist.group.WORLD, max_failures=1)),
        refusal(lambda: Multicast(dist.group.WORLD, max_failures=2)),
        refusal(lambda: Multicast(dist.group.WORLD, silence_timeout=0.0)),
    ]


def test_of_two_ranks_none_can_be_lost():
    for (few, of_two), (wrong, _), (silence, said) in run_ranks(two_of_them, 2, timeout_s=LIMIT_S):
        assert (few, wrong, silence) == ("UnsupportedError", "ValueError", "ValueError")
        assert "max_failures=1 needs 3 ranks or more, not 2" in of_two
        assert "silence_timeout is 0.0" in said
