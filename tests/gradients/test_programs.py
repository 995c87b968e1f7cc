"""Training loops that nobody would write in one piece: gradients accumulate, layers are frozen or left out, optimizers
take turns, gradients are cleared late or never, and one rank has an inf in any pass. Where nodes share a replica each,
their batches use other layers too. Whatever happens, replicas stay equal, skip the same steps, and never step with what
is not finite.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from narrowband.averaging.flat import local
from tests.gradients.shards import mesh_of
from tests.gradients.training import compress, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

SPECS = (
    "topk:density=0.05+ef", "topk:density=0.1+ef-mixed", "uniform:bits=2+ef", "sign+ef", "qsgd:bits=4", "none+ef",
    "powersgd:rank=2", "dgc:density=0.1",
)  # fmt: skip

STEPS = 14


class Net(nn.Module):
    def __init__(self, outputs=8):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, outputs)
        self.norm = nn.LayerNorm(24)

    def forward(self, x, *, short):
        h = self.a(x).tanh()
        return self.c(h if short else self.norm(self.b(h)))


class Program:
    """What one seed makes of a loop: the model, who averages, and what happens in each step, the same on all ranks.

    Args:
        seed: of everything.
        kind: who averages; None: one of those whose ranks have a whole model each. Others are ``nodes``, DDP on two
            levels, and ``sharded`` or ``called``, where FSDP2 shards the model inside two nodes.
    """

    def __init__(self, seed, kind=None):
        self.draw = draw = random.Random(seed)
        drawn, spec, scaled = (
            draw.choice(["ddp", "view", "module", "call"]),
            draw.choice(SPECS),
            draw.random() < 0.6,
        )
        self.kind, options = kind or drawn, {}
        self.shards, self.node = 1, None
        self.model = self.trained = Net(1 if kind else 8)  # of one row, only one rank of a node has something
        if self.kind in ("ddp", "view", "nodes"):
            view = self.kind == "view"
            self.trained = wrap(self.model, find_unused_parameters=True, gradient_as_bucket_view=view)
            options = {"nodes": 2} if self.kind == "nodes" else {}
        elif kind:
            self.shards = dist.get_world_size() // 2
            self.node = dist.get_rank() // self.shards
            options = {"process_group": self._shard(draw)}
        self.calls = self.kind in ("call", "called")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scaled)
        averaging = nb.Averager if self.calls else compress
        scaler = self.scaler if scaled else None
        self.handle = averaging(self.trained, spec, min_numel=64, grad_scaler=scaler, **options)
        make = nb.DGCSGD if spec.startswith("dgc") else torch.optim.SGD
        parts = draw.choice([["a b c norm"], ["a b", "c norm"], ["a", "b norm", "c"]])
        self.optimizers = [
            make([p for name in part.split() for p in getattr(self.model, name).parameters()], lr=0.05)
            for part in parts
        ]
        self.data = torch.Generator().manual_seed(10 * seed + dist.get_rank())

    def _shard(self, draw):
        """Shard the model inside the nodes, in some units; return the ranks that have the same shards as this one."""
        mesh = mesh_of(2, self.shards)
        units = [each for each in self.model.children() if draw.random() < 0.5]
        for each in (*units, self.model):
            fully_shard(each, mesh=mesh["shards"], reshard_after_forward=draw.random() < 0.5)
        with torch.no_grad():  # FSDP2 needs a first forward pass through everything
            self.model(torch.zeros(1, 16), short=False)
        for each in (*units, self.model):
            each.reshard()
        return mesh["nodes"].get_group()

    def step(self):
        """Take one step; return whether all gradients that optimizers stepped with were finite."""
        draw, model = self.draw, self.model
        stepping = draw.sample(self.optimizers, draw.choice([1, len(self.optimizers)]))
        frozen = [name for name in "abc" if draw.random() < 0.2] if draw.random() < 0.5 else []
        passes, short = draw.choice([1, 1, 2, 3]), draw.random() < 0.3
        bad = (draw.randrange(dist.get_world_size()), draw.randrange(passes)) if draw.random() < 0.25 else None
        for name in "abc":
            getattr(model, name).requires_grad_(name not in frozen)
        if set("ac" if short else "abc") <= set(frozen) or (self.node is not None and {"a", "c"} <= set(frozen)):
            model.c.requires_grad_(True)
        if self.node is not None:
            short = [short, draw.random() < 0.3][self.node]
        for at in range(passes):
            with contextlib.nullcontext() if self.calls or at == passes - 1 else self.handle.no_sync():
                loss = self.trained(torch.randn(5, 16, generator=self.data), short=short).square().sum()
                self.scaler.scale(loss * (math.inf if bad == (dist.get_rank(), at) else 1.0)).backward()
        if self.calls:
            self.handle.average()
        model.requires_grad_(True)
        return self._use(stepping)

    def _use(self, stepping):
        draw, scaled = self.draw, self.scaler.is_enabled()
        owned = {each: [p for group in each.param_groups for p in group["params"]] for each in self.optimizers}
        stepping = [each for each in stepping if any(p.grad is not None for p in owned[each])]
        gradients = [local(p.grad) for each in stepping for p in owned[each] if p.grad is not None]
        finite = torch.tensor(all(bool(x.isfinite().all()) for x in gradients), dtype=torch.int64)
        if self.shards > 1:  # without feedback, one shard may be finite and another not
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        finite = bool(finite)
        for optimizer in stepping:
            if scaled:
                self.scaler.step(optimizer)
            elif finite:
                optimizer.step()
        if stepping and scaled:
            self.scaler.update()
        to_none, which = draw.random() < 0.6, draw.choice([self.optimizers, stepping, []])
        for optimizer in which:
            optimizer.zero_grad(set_to_none=to_none)
        return finite


def programs(rank, world_size, seeds, kind=None):
    """By seed: the step in which ranks of the same shard differ in parameters or in what is skipped, or any ranks in
    what is finite or in the loss scale, or in which parameters are not finite; None if there is none.
    """
    found = {}
    for seed in seeds:
        program, found[seed] = Program(seed, kind), None
        for step in range(STEPS):
            finite = program.step()
            skipped = program.handle.stats().total.skipped
            scale = program.scaler.get_scale() if program.scaler.is_enabled() else 1.0
            own = torch.cat([local(p).flatten() for p in program.model.parameters()])
            alike = hashlib.sha256(own.numpy().tobytes()).digest(), skipped
            of_all = [None] * world_size
            dist.all_gather_object(of_all, (alike, finite, scale, bool(own.isfinite().all())))
            same = all(each[0] == of_all[at % program.shards][0] for at, each in enumerate(of_all))
            if not (same and len({each[1:3] for each in of_all}) == 1 and all(each[3] for each in of_all)):
                found[seed] = step
                break
        program.handle.remove()
    return found


#: Seeds of programs in which ranks once parted.
KNOWN = [101, 154, 179, 203, 239, 258, 330, 338, 395, 399]


@pytest.mark.parametrize("seeds", [KNOWN, *thorough(range(5), *(range(at, at + 50) for at in range(100, 400, 50)))])
def test_replicas_stay_equal(seeds):
    for found in run_ranks(programs, 2, seeds):
        assert {seed: step for seed, step in found.items() if step is not None} == {}


#: Kind → seeds of such programs in which ranks parted or hung.
PARTED = {"sharded": [6], "called": [6], "nodes": [11]}


@pytest.mark.parametrize(
    ("kind", "ranks", "seeds"),
    [
        *((kind, 4 if kind == "nodes" else 2, seeds) for kind, seeds in PARTED.items()),
        *thorough(*((kind, 4, list(range(at, at + 20))) for kind in PARTED for at in (0, 20))),
    ],
)
def test_replicas_that_several_ranks_share_stay_equal(kind, ranks, seeds):
    for found in run_ranks(programs, ranks, seeds, kind):
        assert {seed: step for seed, step in found.items() if step is not None} == {}
