"""Optimizers that take turns, as those of a GAN: what was applied and what waits is the sum of the gradients that an
optimizer has stepped with, and of no others.
"""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from tests.gradients.games import PLAYERS, SPEC, Game, Loop, TwoPlayers
from tests.gradients.shards import mesh_of, whole
from tests.gradients.training import compress, flat, heard, residuals, same, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough


def sums_of_turns(rank, world_size, loops):
    found = []
    for loop in loops:
        game = Game(loop)
        with heard() as said:
            game.play(range(5), rank)
        found.append((game.off(), said))
    return found


#: Clearing gradients in several ways; passes that reach both players, or one.
WAYS = (
    {},
    {"to_none": False},
    {"detached": True},
    {"clears": "both after"},
    {"passes": 2},
    {"most": 3},
    {"detached": True, "to_none": False, "clears": "both after", "most": 2},
)


#: One of those with one pass, and one of those with several.
SOME = ({"clears": "both after"}, {"detached": True, "clears": "both after", "most": 2})


def loops_of(kind, ways):
    seen = [way for way in ways if kind != "assigned" or way.get("to_none", True)]
    return [*(Loop(kind, **way) for way in seen), Loop(kind, spec="powersgd:rank=2")]


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("ddp", WAYS),
        ("after", WAYS),
        *((kind, SOME) for kind in ("view", "module", "assigned")),
        *thorough(*((kind, WAYS) for kind in ("view", "module", "assigned"))),
    ],
)
def test_gradients_that_are_thrown_away_enter_no_residual(kind, ways):
    loops = loops_of(kind, ways)
    for rank, found in enumerate(run_ranks(sums_of_turns, 2, loops)):
        for loop, (off, said) in zip(loops, found, strict=True):
            assert off.keys() == set(PLAYERS)
            assert max(off.values()) < 1e-6, (loop, off)
            assert len(said) == (rank == 0), (loop, said)
            for message in said:
                assert message.startswith("averages of 1 of 2 parameters (")
                assert "cleared before an optimizer stepped with them" in message
                assert "residuals get back what such averages took or left" in message


def test_gradients_that_are_used_all_the_same_and_players_that_are_frozen_are_nothing_to_warn_of():
    kinds = ("ddp", "view", "module", "after")
    loops = [Loop(kind, clears="after") for kind in kinds]  # the other player's gradients go into the next step
    loops += [Loop(kind, freezes=True, clears=clears) for kind in kinds for clears in ("before", "after")]
    for found in run_ranks(sums_of_turns, 2, loops):
        for loop, (off, said) in zip(loops, found, strict=True):
            assert max(off.values()) < 1e-6, (loop, off)
            assert said == [], loop


def played(rank, world_size, loops, turns=4):
    """Parameters and residuals after some turns."""
    found = []
    for loop in loops:
        game = Game(loop)
        game.play(range(turns), rank)
        held = residuals(game.handle)
        found.append((flat(game.model), held, game.handle.stats().total.skipped))
    return found


FEEDBACKS = (
    SPEC,
    "topk:density=0.05+ef-mixed",
    "topk:density=0.05+ef:store=bf16",
    "topk:density=0.05+ef:store=int8",
    "topk:density=0.05+ef:decay=0.9",
    "dgc:density=0.05",
    "dgc:density=0.05,store=int8",
    "none+ef",
)


@pytest.mark.parametrize("scaled", [True, *thorough(False)])
def test_a_run_that_throws_averages_away_has_the_bits_of_one_that_freezes(scaled):
    """With every feedback, and with steps that a gradient scaler skips, the first one among them."""
    loops = [Loop(spec=spec, scaled=scaled) for spec in FEEDBACKS]
    loops += [Loop(kind, passes=passes, scaled=scaled) for kind in ("after", "ddp", "module") for passes in (1, 2)]
    frozen = [replace(loop, freezes=True) for loop in loops]
    for found in run_ranks(played, 2, [*loops, *frozen]):
        for loop, own, wanted in zip(loops, found[: len(loops)], found[len(loops) :], strict=True):
            assert torch.equal(own[0], wanted[0]), loop
            assert own[1].keys() == wanted[1].keys(), loop
            for name in own[1]:
                assert torch.equal(own[1][name], wanted[1][name]), (loop, name)
            assert own[2] == wanted[2] == (3 if scaled else 0)


def drawn(count):
    """Loops in which the other player's gradients are cleared before they could be stepped with."""
    draw = random.Random(0)
    kinds, specs = ("ddp", "view", "module", "after"), ("none+ef", *FEEDBACKS)
    known = [  # in which ranks once skipped different steps
        Loop("ddp", to_none=False, passes=2, most=3, spec="none+ef", scaled=True, alone=True),
        Loop("after", clears="both after", passes=2, most=2, scaled=True),
    ]
    return known + [
        Loop(
            draw.choice(kinds),
            to_none=draw.random() < 0.6,
            clears=draw.choice(["before", "both after"]),
            passes=draw.choice([1, 1, 2, 3]),
            most=draw.choice([1, 1, 2, 3]),
            spec=draw.choice(specs),
            scaled=draw.random() < 0.7,
            alone=draw.random() < 0.5,
        )
        for _ in range(count - len(known))
    ]


@pytest.mark.parametrize("count", [8, *thorough(160)])
def test_loops_of_all_kinds_have_the_bits_of_those_that_freeze_and_skip_what_is_not_finite(count):
    loops = drawn(count)
    frozen = [replace(loop, freezes=True) for loop in loops]
    for found in run_ranks(played, 2, [*loops, *frozen], 6):
        for loop, own, wanted in zip(loops, found[:count], found[count:], strict=True):
            assert torch.equal(own[0], wanted[0]), loop
            assert same(own[1], wanted[1]), loop
            assert own[2] == wanted[2] == (4 if loop.most == 1 else 6) * loop.scaled, loop


def inf_on_top(rank, world_size, kind):
    """How many steps are bad, and which averages are finite, if one rank adds inf to an average that waits. Under DDP
    it does so in a pass in no_sync.
    """
    model = TwoPlayers()
    trained = wrap(model) if kind == "ddp" else model
    handle = (nb.Averager if kind == "after" else compress)(trained, SPEC, min_numel=64)
    optimizer, _other = (torch.optim.SGD([p], lr=0.1) for p in (model.first, model.second))
    for step in range(2):
        x = torch.ones(24, 24)
        given = {"first": x, "second": x * (math.inf if step and rank else 1.0)}
        if kind == "ddp":
            with handle.no_sync():
                trained(given).backward()
            trained({"first": x, "second": x}).backward()
        else:
            model(given).backward()
            handle.average()
        optimizer.step()
        optimizer.zero_grad()
        found = [bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None]
    return handle.stats().total.skipped, found


@pytest.mark.parametrize("kind", ["ddp", "after"])
def test_what_is_not_finite_in_a_new_gradient_is_no_remainder_of_a_step_before(kind):
    assert run_ranks(inf_on_top, 2, kind) == [(1, [False])] * 2


def resumed(rank, world_size, loop):
    """A run that was stopped between two turns and resumed, and one that was not."""
    whole = Game(loop)
    whole.play(range(4), rank)
    state = copy.deepcopy([whole.handle.state_dict(), whole.model.state_dict(), whole.scaler.state_dict()])
    whole.play(range(4, 8), rank)
    again = Game(loop)
    for each, own in zip((again.handle, again.model, again.scaler), state, strict=True):
        each.load_state_dict(own)
    again.play(range(4, 8), rank)
    return torch.equal(flat(whole.model), flat(again.model)), same(residuals(whole.handle), residuals(again.handle))


@pytest.mark.parametrize(
    ("kind", "scaled"),
    [
        ("ddp", True),
        ("module", False),
        ("after", True),
        *thorough(("ddp", False), ("module", True), ("after", False)),
    ],
)
def test_a_run_that_resumes_between_two_turns_has_the_same_bits(kind, scaled):
    assert run_ranks(resumed, 2, Loop(kind, scaled=scaled)) == [(True, True)] * 2


def thrown_first(rank, world_size, kind, turns):
    """Runs that throw an average away after some turns, and go on: one that is not stopped, one that resumes right
    before that average, and one right after. Whether they have the same bits.
    """
    loop, games = Loop(kind), []
    for resumes in (None, "before", "after"):
        game = Game(loop)
        game.play(range(turns), rank)
        for at in ("before", "after"):
            if resumes == at:
                state = copy.deepcopy([game.handle.state_dict(), game.model.state_dict()])
                game = Game(loop)
                game.handle.load_state_dict(state[0])
                game.model.load_state_dict(state[1])
            if at == "before":
                given = torch.randn(24, 24, generator=torch.Generator().manual_seed(rank))
                game.averages(dict.fromkeys(PLAYERS, given))
            game.model.zero_grad()
        game.play(range(turns, turns + 3), rank)
        games.append((flat(game.model), residuals(game.handle)))
    return [torch.equal(flat_, games[0][0]) and same(held, games[0][1]) for flat_, held in games[1:]]


@pytest.mark.parametrize(
    ("kind", "turns"),
    [("ddp", 0), ("ddp", 3), ("module", 3), ("after", 0), *thorough(("module", 0), ("after", 3))],
)
def test_a_run_that_resumes_at_an_average_that_is_thrown_away_has_the_same_bits(kind, turns):
    assert run_ranks(thrown_first, 2, kind, turns) == [[True, True]] * 2


def shards_played(rank, world_size, loops):
    """The parameters after some turns, which say all where each rank holds shards of residuals."""
    found = []
    for loop in loops:
        game = Game(loop)
        game.play(range(4), rank)
        found.append(flat(game.model))
    return found


def test_on_two_levels_a_run_that_throws_averages_away_has_the_bits_of_one_that_freezes():
    loops = [Loop("nodes", freezes=freezes, scaled=scaled) for scaled in (False, True) for freezes in (False, True)]
    for own, frozen, scaled, both in run_ranks(shards_played, 4, loops):
        assert torch.equal(own, frozen)
        assert torch.equal(scaled, both)


def early_step(rank, world_size):
    """Optimizers that step once before training, as learning rate schedules and checkpoints make them do."""
    game = Game(Loop())
    for optimizer in game.optimizers.values():
        optimizer.step()
    game.play(range(4), rank)
    return game.off()


def test_steps_before_the_first_average_say_nothing_about_turns():
    for off in run_ranks(early_step, 2):
        assert max(off.values()) < 1e-6


def begun_late(rank, world_size, kind):
    """Both players have stepped without compression, and nobody has cleared their gradients since. Compression begins
    with a turn of the first.
    """
    model, generator = TwoPlayers(), torch.Generator().manual_seed(rank)
    view = kind == "view"
    trained = model if kind == "module" else wrap(model, find_unused_parameters=True, gradient_as_bucket_view=view)
    optimizers = {name: torch.optim.SGD([getattr(model, name)], lr=1.0) for name in PLAYERS}
    for _ in range(3):
        trained({name: torch.randn(24, 24, generator=generator) for name in PLAYERS}).backward()
        for optimizer in optimizers.values():
            optimizer.step()
    handle = compress(trained, SPEC, min_numel=64)
    optimizers["first"].zero_grad()
    model.second.requires_grad_(kind != "module")
    trained({"first": torch.randn(24, 24, generator=generator)}).backward()
    return {entry.rpartition("/")[2]: float(held.norm()) for entry, held in residuals(handle).items()}


@pytest.mark.parametrize("kind", ["ddp", *thorough("view", "module")])
def test_gradients_from_before_compression_enter_no_residual(kind):
    for held in run_ranks(begun_late, 2, kind):
        assert held["first"] > 1
        assert held.get("second", 0.0) == 0


def begun_within_a_step(rank, world_size):
    """Compression begins between two backward passes of a step, of which the last one uses the first player alone."""
    model, generator = TwoPlayers(), torch.Generator().manual_seed(rank)
    trained = wrap(model, find_unused_parameters=True)
    x, y = (torch.randn(24, 24, generator=generator) for _ in range(2))
    with trained.no_sync():
        trained({"second": y}).backward()
    handle = compress(trained, "topk:density=1.0+ef", min_numel=64)
    trained({"first": x}).backward()
    dist.all_reduce(y)
    return float((model.second.grad - y / world_size).norm()), handle.step


def test_gradients_that_accumulate_when_compression_begins_are_averaged():
    for off, steps in run_ranks(begun_within_a_step, 2):
        assert off < 1e-6
        assert steps == 1


def by_hand(rank, world_size):
    game = Game(Loop(detached=True, own_step=True, clears="both after"))
    with heard() as said:
        game.play(range(5), rank)
    return game.off()["second"], said


def test_averages_of_parameters_that_no_optimizer_has_count_as_used():
    """Who steps is then not known, so the first player's average of the second's pass is not taken back, which a log
    line says.
    """
    for rank, (off, said) in enumerate(run_ranks(by_hand, 2)):
        assert off < 1e-6
        assert [message.split(",")[0] for message in said] == ["backward was averaged twice"] * (rank == 0)


def searches(rank, world_size, freezes):
    """Optimizers that run backward themselves, often in a step, in turns."""
    game = Game(Loop(freezes=freezes))
    parameters = {name: getattr(game.model, name) for name in PLAYERS}
    optimizers = {name: torch.optim.LBFGS([p], lr=0.1, max_iter=3) for name, p in parameters.items()}
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for name, other in (PLAYERS, PLAYERS[::-1]):
            x, thrown = (torch.randn(24, 24, generator=generator) for _ in range(2))
            parameters[other].requires_grad_(not freezes)

            def closure(name=name, given={name: x, other: thrown}):  # noqa: B006
                optimizers[name].zero_grad()
                loss = game.trained(given)
                loss.backward()
                return loss

            optimizers[name].step(closure)
            parameters[other].requires_grad_(True)
    return flat(game.model), residuals(game.handle), game.handle.step


def test_averages_of_an_optimizer_that_runs_backward_itself_are_used():
    for (own, held, steps), (wanted, as_well, _) in zip(
        run_ranks(searches, 2, False), run_ranks(searches, 2, True), strict=True
    ):
        assert steps > 6
        assert torch.equal(own, wanted)
        assert same(held, as_well)


class Gan(nn.Module):
    """A generator, and a discriminator of what it makes."""

    def __init__(self, judgements=16):
        super().__init__()
        torch.manual_seed(0)
        self.made, self.judged = nn.Linear(16, 24), nn.Linear(24, judgements)

    def forward(self, z, x=None):
        made = self.made(z)
        return self.judged(made if x is None else torch.cat([x, made])).square().mean()


def trained_gans(rank, world_size, kind):
    return [trained_gan(rank, world_size, kind, freezes) for freezes in (False, True)]


def trained_gan(rank, world_size, kind, freezes):
    model = trained = Gan(1 if kind == "nodes" else 16)  # of one row, one rank of a node has nothing
    options = {}
    if kind == "nodes":
        trained, options = wrap(model, find_unused_parameters=freezes), {"nodes": 2}
    elif kind == "sharded":
        mesh = mesh_of(2, world_size // 2)
        for each in (model.made, model.judged, model):
            fully_shard(each, mesh=mesh["shards"])
        options = {"process_group": mesh["nodes"].get_group()}
    elif "ddp" in kind:
        trained = wrap(model, find_unused_parameters=freezes)
    handle = compress(trained, "topk:density=0.1+ef", min_numel=64, **options)
    called = torch.compile(trained, backend="aot_eager") if "compiled" in kind else trained
    players = {"judged": model.judged, "made": model.made}
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in players.items()}
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        for name, other in (("judged", "made"), ("made", "judged")):
            z, x = torch.randn(6, 16, generator=generator), torch.randn(6, 24, generator=generator)
            optimizers[name].zero_grad()
            players[other].requires_grad_(not freezes)
            (called(z, x) if name == "judged" else called(z)).backward()
            optimizers[name].step()
            players[other].requires_grad_(True)
    return whole(model), residuals(handle)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("sharded", 4), ("nodes", 4), ("compiled ddp", 2), *thorough(("compiled module", 2), ("ddp", 2))],
)
def test_a_gan_that_throws_averages_away_has_the_bits_of_one_that_freezes(kind, ranks):
    for (own, held), (wanted, as_well) in run_ranks(trained_gans, ranks, kind, timeout_s=60.0):
        assert torch.equal(own, wanted)
        assert same(held, as_well)
