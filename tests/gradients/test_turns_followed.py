"""When averages are followed, and what that costs: nothing where every average is used, and turns that begin or end."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.averaging import waiting
from tests.gradients.games import PLAYERS, SPEC, Game, Loop
from tests.gradients.training import compress, heard, loss_of, mlp, sgd, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough


def one_step_of_two_optimizers(rank, world_size, kind):
    """Steps in which each optimizer has a part of the model, as Muon and AdamW do; then steps of one optimizer; then
    some of an optimizer that has not everything that is trained.
    """
    found = []
    for share in (2, 1, 0):
        model = mlp()
        trained = wrap(model) if kind == "ddp" else model
        handle = (nb.Averager if kind == "after" else compress)(trained, SPEC, min_numel=64)
        parameters = list(model.parameters())
        cut = len(parameters) // (share or 2)
        optimizers = [
            torch.optim.SGD(some, lr=0.1) for some in (parameters[:cut], parameters[cut:] * bool(share)) if some
        ]
        for step in range(3):
            loss_of(trained, step, rank).backward()
            if kind == "after":
                handle.average()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            hooks = sum(len(p._backward_hooks or ()) for p in parameters)
            found.append((handle.layers.unused.nbytes, hooks, handle.state_dict()["in turns"]))
    return found


@pytest.mark.parametrize("kind", ["ddp", "module", "after"])
def test_where_every_average_is_used_nothing_is_kept_or_hooked(kind):
    for found in run_ranks(one_step_of_two_optimizers, 2, kind):
        assert found == [(0, 0, False)] * 9


def calls_in_a_step(rank, world_size, kind):
    """Python calls in narrowband's own check of an optimizer's step, per parameter."""
    size = 200
    model = nn.Sequential(nn.Linear(24, 24), *(nn.LayerNorm(24) for _ in range(size // 2 - 1)))
    trained = model if kind == "module" else wrap(model, find_unused_parameters=kind == "unused")
    compress(trained, SPEC, min_numel=64)
    optimizer = sgd(model)
    x, calls = torch.ones(2, 24), Counter()
    for _ in range(2):
        optimizer.zero_grad()
        trained(x).square().sum().backward()
        optimizer.step()
    trained(x).square().sum().backward()

    def count(frame, event, _):
        calls[event] += Path(frame.f_code.co_filename).name in ("listening.py", "steps.py", "waiting.py")

    sys.setprofile(count)
    optimizer.step()
    sys.setprofile(None)
    return calls["call"] / size


@pytest.mark.parametrize("kind", ["ddp", "unused", "module"])
def test_where_one_optimizer_steps_with_everything_following_averages_calls_nothing_per_parameter(kind):
    """The two calls are those of the check of steps, which asks of each parameter whether it is the handle's."""
    for calls in run_ranks(calls_in_a_step, 2, kind, fresh=True):  # no other handle is asked
        assert 1.9 < calls < 2.5


def later_in_turns(rank, world_size, kind):
    """A run in which the second player begins later; after that, the sums of what is added."""
    game = Game(Loop(kind, detached=True))
    both = torch.optim.SGD(game.model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        given = {name: torch.randn(24, 24, generator=generator) for name in PLAYERS}
        game.averages(given)
        both.step()
        both.zero_grad()
        for name in PLAYERS:
            game.sums[name] += given[name]
    before = game.off(), game.handle.layers.unused.nbytes
    with heard() as said:
        game.play(range(1), rank)
        first = game.missing()
        game.play(range(1, 4), rank)
    return before, first, game.missing(), said


@pytest.mark.parametrize("kind", ["ddp", "view", "module", "after"])
def test_optimizers_that_begin_to_take_turns_later_lose_one_average_at_most(kind):
    for rank, ((before, nbytes), first, last, said) in enumerate(run_ranks(later_in_turns, 2, kind)):
        assert max(before.values()) < 1e-6
        assert nbytes == 0
        for name in PLAYERS:
            assert float((first[name][0] - last[name][0]).norm()) < 1e-5, name
        assert len(said) == (rank == 0)


def turns_that_end(rank, world_size, kind):
    """Turns; then four steps with everything, and one more; then turns, and six steps with everything."""
    game = Game(Loop(kind))
    both = torch.optim.SGD(game.model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(rank)

    def steps_with_both(count):
        for _ in range(count):
            both.zero_grad()
            given = {name: torch.randn(24, 24, generator=generator) for name in PLAYERS}
            game.averages(given)
            both.step()
            for name in PLAYERS:
                game.sums[name] += given[name]

    def keeps():
        hooks = sum(len(getattr(game.model, name)._backward_hooks or ()) for name in PLAYERS)
        return game.handle.state_dict()["in turns"], hooks > 0

    game.play(range(2), rank)
    found = [keeps()]
    for count in (4, 1):
        steps_with_both(count)
        found.append(keeps())
    found.append(max(game.off().values()) < 1e-6)
    game.play(range(2, 3), rank)
    first = game.missing()
    again = Game(game.loop)
    again.handle.load_state_dict(copy.deepcopy(game.handle.state_dict()))
    found.append(again.handle.state_dict()["since thrown"] == game.handle.state_dict()["since thrown"] == (0, 6))
    steps_with_both(6)
    game.play(range(3, 5), rank)
    last = game.missing()
    found.append(max(float((first[name][0] - last[name][0]).norm()) for name in PLAYERS) < 1e-5)
    return [*found, keeps()]


def with_fewer(rank, world_size, kind):
    """The same where four averages in a row are enough."""
    before, waiting._FEWEST = waiting._FEWEST, 4
    try:
        return turns_that_end(rank, world_size, kind)
    finally:
        waiting._FEWEST = before


@pytest.mark.parametrize("kind", ["ddp", "after", *thorough("module")])
def test_nothing_is_kept_any_more_after_many_averages_that_were_all_used(kind):
    """Those that are thrown away later cost one average; then twice as many have to be used before the next is lost."""
    for found in run_ranks(with_fewer, 2, kind):
        assert found == [(True, True), (True, True), (False, False), True, True, True, (True, True)]
