"""Training loops in which two players take turns, as the networks of a GAN."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from tests.gradients.training import compress, residuals, wrap

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
