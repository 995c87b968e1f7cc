"""Optimizers that take turns, as those of a GAN: what was applied and what waits is the sum of the gradients that an
optimizer has stepped with, and of no others.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from narrowband.averaging import waiting
from tests.gradients.shards import mesh_of, whole
from tests.gradients.training import compress, flat, heard, loss_of, mlp, residuals, same, sgd, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

PLAYERS = ("first", "second")
SPEC = "topk:density=0.05+ef"


class TwoPlayers(nn.Module):
    """The sum of each given tensor times its matrix, so that the tensor is the matrix's gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(24, 24)) for _ in range(2))

    def forward(self, given):
        return sum((getattr(self, name) * x).sum() for name, x in given.items())


@dataclass(frozen=True)
class Loop:
    """How two players take turns.

    Attributes:
        kind: what averages: ``ddp``, ``view`` (DDP with gradient_as_bucket_view), ``module``, or an Averager, ``after``
            each turn's backward passes, or where gradients are ``assigned`` instead.
        detached: whether the first player's pass reaches the second player, as that of a critic does unless what the
            generator made is detached.
        to_none: how gradients are cleared.
        clears: when a player's own gradients are cleared: ``before`` its pass, or ``after`` its step.
        passes: backward passes of a turn; all but the last in no_sync.
        most: turns of the first player per turn of the second.
        spec: codec and feedback.
        freezes: whether the other player is frozen in a player's pass.
        scaled: whether a gradient scaler steps, which skips some steps, and changes the scale often.
        alone: whether it skips a step because of the second rank's gradient only.
        own_step: whether the second player's optimizer is not PyTorch's.
    """

    kind: str = "ddp"
    detached: bool = False
    to_none: bool = True
    clears: str = "before"
    passes: int = 1
    most: int = 1
    spec: str = SPEC
    freezes: bool = False
    scaled: bool = False
    alone: bool = False
    own_step: bool = False


class ByHand:
    """An optimizer that nobody hears of."""

    def __init__(self, p):
        self.p = p

    def step(self):
        self.p.data.sub_(self.p.grad)

    def zero_grad(self, *, set_to_none):
        self.p.grad = None if set_to_none else torch.zeros_like(self.p)


class Game:
    """A model of two players, its handle, and everything else that a loop needs."""

    def __init__(self, loop):
        self.loop = loop
        self.model = TwoPlayers()
        unused = loop.detached or loop.freezes
        self.by_call = loop.kind in ("after", "assigned")
        if loop.kind == "module" or self.by_call:
            self.trained = self.model
        else:
            self.trained = wrap(self.model, find_unused_parameters=unused, gradient_as_bucket_view=loop.kind == "view")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=loop.scaled)
        momentum = 0.9 if loop.spec.startswith("dgc") else 0.0
        make = torch.optim.SGD if not momentum else lambda p, lr: nb.DGCSGD(p, lr=lr)
        listed = PLAYERS[:1] if loop.own_step else PLAYERS
        self.optimizers = {name: make([getattr(self.model, name)], lr=1.0) for name in listed}
        if loop.own_step:
            self.optimizers["second"] = ByHand(self.model.second)
        options = {"nodes": 2} if loop.kind == "nodes" else {}
        averaging = nb.Averager if self.by_call else compress
        self.handle = averaging(
            self.trained, loop.spec, min_numel=64, grad_scaler=self.scaler if loop.scaled else None, **options
        )
        self.sums = {name: torch.zeros(24, 24) for name in PLAYERS}  # of all gradients that were stepped with
        self.junk = {name: torch.zeros(24, 24) for name in PLAYERS}  # of those that nobody cleared

    def play(self, turns, seed):
        for turn in turns:
            generator = torch.Generator().manual_seed(1000 * turn + seed)
            for at, name in enumerate((*["first"] * self.loop.most, "second")):
                self._play(name, generator, bad=self.loop.scaled and turn % 3 == at)

    def _play(self, name, generator, *, bad):
        loop, model = self.loop, self.model
        other = PLAYERS[name == PLAYERS[0]]
        if loop.clears == "before":
            self._clear(name)
        getattr(model, other).requires_grad_(not loop.freezes)
        new = torch.zeros(24, 24)
        for at in range(loop.passes):
            x, thrown = (torch.randn(24, 24, generator=generator) for _ in range(2))
            new += x
            given = {name: x} if loop.detached and name == "first" else {name: x, other: thrown}
            if not loop.freezes and other in given and loop.clears == "after":
                self.junk[other] += thrown  # nobody clears it, and the next step takes it along
            with contextlib.nullcontext() if self.by_call or at == loop.passes - 1 else self.handle.no_sync():
                self._backward(given, bad=bad and (not loop.alone or dist.get_rank() == 1))
        if self.by_call:
            self.handle.average()
        if loop.own_step and name == "second":
            self.optimizers[name].step()
        else:
            self.scaler.step(self.optimizers[name])
            self.scaler.update()
        if not bad:
            self.sums[name] += new + self.junk[name]
            self.junk[name].zero_()
        getattr(model, other).requires_grad_(True)
        for each in {"before": (), "after": (name,), "both after": PLAYERS}[loop.clears]:
            self._clear(each)

    def _backward(self, given, *, bad):
        if self.loop.kind != "assigned":
            self._loss(self.trained, given, bad=bad).backward()
            return
        own = {name: getattr(self.model, name) for name in given}
        trained = {name: p.detach() for name, p in own.items() if p.requires_grad}
        call = functools.partial(torch.func.functional_call, self.model)
        for name, gradient in torch.func.grad(lambda ps: self._loss(lambda x: call(ps, (x,)), given, bad=bad))(
            trained
        ).items():
            p = own[name]
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad += gradient

    def averages(self, given):
        self.trained(given).backward()
        if self.by_call:
            self.handle.average()

    def _loss(self, model, given, *, bad):
        return self.scaler.scale(model(given) * (math.inf if bad else 1.0))

    def _clear(self, name):
        self.optimizers[name].zero_grad(set_to_none=self.loop.to_none)

    def missing(self):
        """By player, the sum of all averages less what was applied and what waits; and the norm of that sum."""
        found, world_size = {}, dist.get_world_size()
        for entry, waits in residuals(self.handle).items():
            name = entry.rpartition("/")[2]
            if "factor" not in entry:
                mean, whole = self.sums[name] - waits.view(24, 24), self.sums[name].clone()
                for x in (mean, whole):
                    dist.all_reduce(x.div_(world_size))
                found[name] = mean + getattr(self.model, name).detach(), float(whole.norm())
        return found

    def off(self):
        """By player, how much is missing, as a share of the sum of all averages."""
        return {name: float(lacking.norm()) / norm for name, (lacking, norm) in self.missing().items()}


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


def loops_of(kind):
    seen = [way for way in WAYS if kind != "assigned" or way.get("to_none", True)]
    return [*(Loop(kind, **way) for way in seen), Loop(kind, spec="powersgd:rank=2")]


@pytest.mark.parametrize("kind", ["ddp", "view", "module", "after", "assigned"])
def test_gradients_that_are_thrown_away_enter_no_residual(kind):
    loops = loops_of(kind)
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


@pytest.mark.parametrize("scaled", [False, True])
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


@pytest.mark.parametrize("count", [12, *thorough(160)])
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


@pytest.mark.parametrize("kind", ["ddp", "module", "after"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_run_that_resumes_between_two_turns_has_the_same_bits(kind, scaled):
    assert run_ranks(resumed, 2, Loop(kind, scaled=scaled)) == [(True, True)] * 2


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


def calls_in_a_step(rank, world_size, kinds):
    """Python calls in narrowband's own check of an optimizer's step, per parameter."""
    found, size = [], 200
    for kind in kinds:
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

        def count(frame, event, _, calls=calls):
            calls[event] += Path(frame.f_code.co_filename).name in ("steps.py", "waiting.py")

        sys.setprofile(count)
        optimizer.step()
        sys.setprofile(None)
        found.append(calls["call"] / size)
    return found


def test_where_one_optimizer_steps_with_everything_following_averages_calls_nothing_per_parameter():
    """The two calls are those of the check of steps, which asks of each parameter whether it is the handle's."""
    for found in run_ranks(calls_in_a_step, 2, ["ddp", "unused", "module"], fresh=True):  # no other handle is asked
        for calls in found:
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
    found.append(again.handle.state_dict()["since thrown"] == game.handle.state_dict()["since thrown"] == (1, 6))
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
