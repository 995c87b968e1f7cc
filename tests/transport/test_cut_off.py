"""A rank that is cut off is told, waits to be let back in, and does not wait for ever."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from narrowband.transport import probe
from narrowband.transport.contract import RanksLostError
from narrowband.transport.multicast import Multicast
from tests.gradients.training import refusal
from tests.ranks import run_ranks
from tests.transport.exchanges import LIMIT_S, PATIENCE_S, Cut, content, everything, places

# ------------------------------------------------------------------------------------------------ exchanges


def cut_off(rank, world):
    sizes = [30_000] * world

    def exchange(turn, gone=()):
        incoming = places(rank, sizes)
        wanted = [[] if k in gone else ranges for k, ranges in enumerate(everything(rank, sizes))]
        multicast.exchange(content(rank, sizes[0], turn), incoming, wanted)
        there = [k for k in range(world) if k != rank and k not in gone]
        return all(torch.equal(incoming[k], content(k, sizes[k], turn)) for k in there)

    with patch.object(probe, "MulticastSocket", Cut):
        multicast = Multicast(
            dist.group.WORLD, timeout_s=LIMIT_S, silence_timeout=PATIENCE_S / 2, max_failures=1, mtu=1500
        )
    assert exchange(0)
    dist.barrier()
    if rank == 1:
        Cut.until = time.monotonic() + PATIENCE_S
        time.sleep(PATIENCE_S)  # computing: nobody knows better than the others that they are waiting
    told = None
    for turn in (1, 2):  # who has all that it wants of an exchange hears of a loss in the next
        try:
            assert exchange(turn)
        except RanksLostError as error:
            told = error
            break
    if rank != 1:
        assert multicast.lost == (1,)
        assert all(exchange(turn, gone=(1,)) for turn in range(10, 13))
        with pytest.raises(RanksLostError, match="rank 1 lost before"):
            exchange(13)
    dist.barrier()  # those that go on are there to say so
    multicast.close()
    return told.ranks, str(told)


def test_a_rank_that_was_cut_off_is_told_that_the_others_go_on_without_it():
    told = run_ranks(cut_off, 4, timeout_s=LIMIT_S)
    assert [ranks for ranks, _ in told] == [(1,)] * 4
    assert "have gone on without this rank" in told[1][1]


# ------------------------------------------------------------------------------------------------ real losses


def cut_off_for_good(rank, world):
    with patch.object(probe, "MulticastSocket", Cut):
        multicast = Multicast(
            dist.group.WORLD,
            timeout_s=2 * PATIENCE_S,
            silence_timeout=PATIENCE_S,
            max_failures=1,
            readmits=True,
            mtu=1500,
        )
    incoming = places(rank, [8] * world)
    wanted = everything(rank, [8] * world)
    multicast.exchange(content(rank, 8, 0), incoming, wanted)
    dist.barrier()
    if rank == 1:
        Cut.until = time.monotonic() + LIMIT_S
    told = []
    for attempt in (lambda: multicast.exchange(content(rank, 8, 1), incoming, wanted), multicast.rejoin):
        if rank == 1:
            with pytest.raises(RanksLostError) as caught:
                attempt()
            told.append((caught.value.ranks, str(caught.value)))
    dist.barrier()
    multicast.close()
    return told


def test_a_rank_that_nobody_answers_does_not_wait_for_ever():
    told = run_ranks(cut_off_for_good, 3, timeout_s=LIMIT_S)
    (ranks, said), (at_end, why) = told[1]
    assert ranks == at_end == (1,)
    assert "this rank is cut off" in said
    assert "no other rank answered within 8 s" in why


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
        assert "of 2 ranks none can be lost" in of_two
        assert "silence_timeout is 0.0" in said
