"""The measured length of an outer step, on real replicas whose updates have a known share of noise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.collectives import all_reduce_nbytes
from narrowband.updates.length import EVERY, FIRST, SAMPLE, MeasuredLength
from tests.ranks import run_ranks

SIDE = 128


class Part(nn.Module):
    """A matrix, and a buffer that is averaged beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))
        self.register_buffer("seen", torch.zeros(50))


def updates_of(rank, noise, step):
    """What all replicas change alike, and what each does by itself: normal, of standard deviations 1 and ``noise``."""
    common = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(step))
    own = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1000 * (rank + 1) + step))
    return common * (noise != math.inf) + own * (1.0 if noise == math.inf else noise)


def measured(rank, world_size, noise, rounds, broken):
    model = Part()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = nb.compress_updates(model, optimizer, "none", outer="auto")
    seen = []
    for step in range(rounds):
        model.weight.grad = -updates_of(rank, noise, step)
        if step in broken and rank == 1:
            model.weight.grad[3, 3] = math.nan
        model.seen += rank * 100.0  # what is averaged in buffers is no update of parameters
        before = model.weight.detach().clone()
        optimizer.step()
        seen.append((handle.length, model.weight.detach() - before, model.seen.clone()))
    return seen, handle.stats().total


@pytest.mark.parametrize("noise", [0.0, 1.0, 3.0, math.inf])
def test_it_is_how_much_longer_an_update_is_than_their_mean(noise):
    ranks, rounds = 3, 4
    results = run_ranks(measured, ranks, noise, rounds, ())
    variance = {0.0: 1.0, math.inf: 3.0}.get(noise, (1 + noise**2) / (1 + noise**2 / ranks))
    for seen, total in results:
        assert [length for length, *_ in seen] == [length for length, *_ in results[0][0]]
        for at, (length, moved, buffer) in enumerate(seen):
            assert length == pytest.approx(min(math.sqrt(variance), math.sqrt(ranks)), rel=0.08)
            mean = torch.stack([updates_of(rank, noise, at) for rank in range(ranks)]).double().mean(0)
            torch.testing.assert_close(moved.double(), length * mean, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(buffer, torch.full((50,), 100.0 * (at + 1)))
        assert total.sent_bytes > rounds * all_reduce_nbytes(4 * SAMPLE, ranks)


def test_a_round_that_lacks_a_part_is_not_measured():
    (seen, _), *others = run_ranks(measured, 3, 1.0, 4, (1, 2))
    first, second, third, last = (length for length, *_ in seen)
    assert first == second == third != last
    assert all(own == seen[at][0] for other, _ in others for at, (own, *_) in enumerate(other))


def test_it_is_measured_at_first_and_then_now_and_then():
    length = MeasuredLength([[(0, 1000)]], 0, torch.device("cpu"))
    rounds = [length.begin([torch.ones(1000)], share=1.0, size=3) for _ in range(50)]
    due = [step for step, sample in enumerate(rounds) if sample is not None]
    assert due == [*range(FIRST), *range(FIRST, 50, EVERY)]


def noisy(rank, rounds, optimizer, handle):
    """Lengths of rounds in which updates have nothing in common, and how far each goes: 1 is as far as a replica."""
    model = optimizer.param_groups[0]["params"][0]
    seen = []
    for step in range(rounds):
        model.grad = -updates_of(rank, math.inf, step)
        before = model.detach().clone()
        optimizer.step()
        seen.append((handle.length, float((model.detach() - before).norm()) / SIDE))
    return seen


def begun(states=None, **options):
    model = Part()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = nb.compress_updates(model, optimizer, "none", outer="auto", **options)
    if states is not None:
        model.load_state_dict(states[0][0])
        handle.load_state_dict([state for _, state in states])
    return model, optimizer, handle


def saved(rank, world_size):
    model, optimizer, handle = begun()
    seen = noisy(rank, FIRST + 1, optimizer, handle)
    return seen[-1][0], copy.deepcopy((model.state_dict(), handle.state_dict()))


def gone_on(rank, world_size, states):
    _, optimizer, handle = begun(states)
    return noisy(rank, 3, optimizer, handle)


@pytest.mark.parametrize("of_before", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_another_number_of_replicas_measures_anew(ranks, of_before):
    """Nothing but noise, so that each round goes as far as a replica does, however many there were before."""
    length, states = zip(*run_ranks(saved, 3), strict=True)
    assert length[0] == pytest.approx(math.sqrt(3), rel=0.08)
    for _, state in states if of_before else ():
        del state["updates"]["length"][0]["size"]
    for seen in run_ranks(gone_on, ranks, list(states)):
        for length, moved in seen:
            assert length <= math.sqrt(ranks)
            assert length == pytest.approx(math.sqrt(ranks), rel=0.08)
            assert moved == pytest.approx(1.0, rel=0.08)


def left_alone(rank, world_size, address):
    peers = nb.Rendezvous(address, least=1, begin_with=world_size, grace_s=300.0, exchange_s=20.0, name=str(rank))
    _, optimizer, handle = begun(peers=peers)
    together = noisy(rank, FIRST + 1, optimizer, handle)
    alone = noisy(rank, 2, optimizer, handle) if rank == 0 else []
    left = len(handle.peers)
    handle.remove()
    return together[-1], alone, left


def test_a_peer_whose_others_have_left_goes_as_far_as_it_goes(store):
    (together, alone, left), *_ = run_ranks(left_alone, 3, store, group=False)
    assert left == 1
    assert together == pytest.approx((math.sqrt(3), 1.0), rel=0.08)
    assert alone == [(1.0, pytest.approx(1.0, rel=0.08))] * 2


def test_the_sample_is_of_parameters_alone_and_as_large_as_it_says():
    length = MeasuredLength([[(10, 90), (200, 810)], [], [(0, 100)]], 0, torch.device("cpu"))
    flats = [torch.full((1010,), torch.nan), torch.full((7,), torch.nan), torch.ones(100)]
    flats[0][10:100] = flats[0][200:1010] = 2.0
    sample = length.sample(flats, share=1.0)
    assert 4 * sample.numel() == length.nbytes
    assert SAMPLE <= sample.numel() - 2 <= SAMPLE + 3
    values, counts = sample[:-2].unique(return_counts=True)
    assert values.tolist() == [1.0, 2.0]
    assert counts[1] / counts.sum() == pytest.approx(0.9, abs=0.01)
    assert sample[-2] == sample[:-2].square().sum()


def test_replicas_that_count_differently_are_no_noise():
    """Three replicas go the same way, one four times as far as the others: nothing cancels in their mean."""
    length = MeasuredLength([[(0, 1000)]], 0, torch.device("cpu"))
    way, steps = torch.randn(1000, generator=torch.Generator().manual_seed(0)), (1.0, 1.0, 4.0)
    shares = [3 * count / sum(steps) for count in steps]
    parts = [length.sample([share * way], share=share) for share in shares]  # as long, once per step
    assert float(sum(part[-2] for part in parts) / 3) == pytest.approx(
        float((parts[0][:-2] / shares[0]).square().sum())
    )
    assert [float(part[-1]) for part in parts] == [1.0] * 3
    assert float(length.sample([way], share=0.0)[-1]) == 0.0
