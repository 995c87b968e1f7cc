"""Optimizers that take turns, of models with a handle each: passes of one model that also reach the other."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.games import PLAYERS, SPEC, ByHand
from tests.gradients.training import compress, heard, residuals, same, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough


class Apart:
    """Two players, each a model of its own with its own handle and optimizer. The passes of the second also reach the
    first, as those of a generator do its critic.

    Args:
        kind: ``ddp``, ``view`` or ``module``.
        clears: when a player's own gradients are cleared: ``before`` its forward, ``late`` between its forward and
            backward pass, or ``after`` all steps.
    """

    def __init__(self, kind, clears="before", spec=SPEC):
        self.kind, self.clears = kind, clears
        self.models = {name: Single() for name in PLAYERS}
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": True} if kind == "view" else {}
        self.trained = {
            name: model if kind == "module" else wrap(model, **options) for name, model in self.models.items()
        }
        self.handles = {name: compress(model, spec, min_numel=64) for name, model in self.trained.items()}
        self.optimizers = {name: torch.optim.SGD(model.parameters(), lr=1.0) for name, model in self.models.items()}
        self.sums = {name: torch.zeros(24, 24) for name in PLAYERS}

    def play(self, turns, seed):
        for turn in turns:
            generator = torch.Generator().manual_seed(1000 * turn + seed)
            for name in PLAYERS:
                x, thrown = (torch.randn(24, 24, generator=generator) for _ in range(2))
                self.sums[name] += x
                optimizer = self.optimizers[name]
                if self.clears == "before":
                    optimizer.zero_grad()
                loss = self.trained[name](x)
                if name == "second":
                    loss = loss + self.trained["first"](thrown)
                if self.clears == "late":
                    optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()
            if self.clears == "after":
                for each in self.optimizers.values():
                    each.zero_grad()

    def missing(self):
        """As :meth:`Game.missing`, of the first player."""
        (waits,) = residuals(self.handles["first"]).values()
        mean = self.sums["first"] - waits.view(24, 24)
        dist.all_reduce(mean.div_(dist.get_world_size()))
        return mean + self.models["first"].matrix.detach()


class Single(nn.Module):
    """One matrix of :class:`TwoPlayers`."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(24, 24))

    def forward(self, x):
        return (self.matrix * x).sum()


def apart(rank, world_size, kind):
    found = []
    for clears in ("before", "late", "after"):
        game = Apart(kind, clears)
        with heard() as said:
            game.play(range(2), rank)
            early = game.missing()
            game.play(range(2, 6), rank)
        found.append((float((game.missing() - early).norm()), game.handles["second"].layers.unused.nbytes, said))
    return found


@pytest.mark.parametrize("kind", ["ddp", "view", "module"])
def test_players_with_a_handle_each_lose_one_average_at_most(kind):
    for rank, found in enumerate(run_ranks(apart, 2, kind)):
        for missing, nbytes, said in found:
            assert missing < 1e-5
            assert nbytes == 0
            assert [message.split(" were ")[0] for message in said] == (
                ["averages of 1 of 1 parameters (matrix)"] if rank == 0 else []
            )


def apart_resumed(rank, world_size, kind):
    """Players with a handle each that are stopped after some turns and resumed, and others that are not."""
    whole = Apart(kind)
    whole.play(range(3), rank)
    held = copy.deepcopy([(whole.handles[name].state_dict(), whole.models[name].state_dict()) for name in PLAYERS])
    whole.play(range(3, 6), rank)
    again = Apart(kind)
    for name, (handle, model) in zip(PLAYERS, held, strict=True):
        again.models[name].load_state_dict(model)
        again.handles[name].load_state_dict(handle)
    again.play(range(3, 6), rank)
    pairs = [(whole.handles[name], again.handles[name]) for name in PLAYERS]
    return [same(residuals(own), residuals(new)) for own, new in pairs] + [
        torch.equal(whole.models[name].matrix, again.models[name].matrix) for name in PLAYERS
    ]


@pytest.mark.parametrize("kind", ["ddp", *thorough("module")])
def test_players_with_a_handle_each_that_resume_have_the_same_bits(kind):
    assert run_ranks(apart_resumed, 2, kind) == [[True] * 4] * 2


def beside_another(rank, world_size):
    """A player whose parameters no optimizer of PyTorch's has, beside another that has one."""
    game = Apart("module")
    game.optimizers["first"] = ByHand(game.models["first"].matrix)
    optimizer = game.optimizers["first"]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(24, 24, generator=generator)
        game.sums["first"] += x
        optimizer.zero_grad(set_to_none=True)
        game.optimizers["second"].zero_grad()
        (game.trained["first"](x) + game.trained["second"](x)).backward()
        game.optimizers["second"].step()
        optimizer.step()
    hooks = len(game.models["first"].matrix._backward_hooks or ())
    return float(game.missing().norm()), game.handles["first"].layers.unused.nbytes, hooks


def test_averages_that_are_applied_by_hand_beside_an_optimizer_of_another_model_are_used():
    for missing, nbytes, hooks in run_ranks(beside_another, 2):
        assert missing < 1e-5
        assert nbytes == hooks == 0
