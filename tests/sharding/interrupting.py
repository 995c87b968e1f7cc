"""Models that FSDP2 shards, drawn from a seed, in loops that are interrupted, and the same loops that are not: all bits
must be the same.

Gradients accumulate, layers are frozen or left out, users change parameters, and evaluations come in between. Between
two steps a loop may be saved, go on in new objects that load what was saved, have its handle removed and attached anew,
go back to what it was after some steps that do not count, or make calls that are refused.

``python -m tests.sharding.interrupting 0 300`` runs the seeds from 0 to 299, and prints what does not hold; with a 4
behind them, on four ranks.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowband as nb
from narrowband.averaging.flat import local
from narrowband.averaging.who import reshard
from tests.interrupted import leaves, main
from tests.updates.training import Net

STEPS = 12

GRADIENTS = ("none", "fp16", "bf16", "uniform:bits=4", "uniform:bits=8", "qsgd:bits=6", "qsgd:bits=8", "eden:bits=4")
PARAMETERS = ("none", "fp16", "bf16", "uniform:bits=4", "uniform:bits=8", "qsgd:bits=8")

WAYS = ("saves", "resumes", "resumes", "attaches", "goes back", "is refused", "reads")
_OFTEN = 0.4


class Loop:
    """What one seed makes of a loop, the same on all ranks but for the data.

    Args:
        seed: draws everything.
        interrupted: whether the interruptions that the seed draws take place; ``"saves"``: it is only saved, after
            every step.
    """

    def __init__(self, seed, *, interrupted):
        self.seed, self.interrupted, self.rank = seed, interrupted, dist.get_rank()
        self.draw = draw = random.Random(seed)
        self.units = draw.choice(["", "b", "a b d c", "bd", "a b c d norm"])
        self.sharding = {"reshard_after_forward": draw.choice([True, True, False])}
        if draw.random() < 0.3:
            self.sharding["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        self.options = {"gradients": draw.choice(GRADIENTS), "parameters": draw.choice(PARAMETERS)}
        self.options |= {"references": draw.random() < 0.8, "min_numel": draw.choice([1, 64, 300]), "seed": seed}
        size = dist.get_world_size()
        replicas = draw.choice([1, 2]) if size == 4 else 1
        self.mesh = (
            init_device_mesh("cpu", (size,))
            if replicas == 1
            else init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "shards"))
        )
        self.kind = draw.choice(["SGD", "AdamW"])
        self.clips, self.freezes, self.accumulates = draw.random() < 0.3, draw.random() < 0.4, draw.random() < 0.5
        self.freezes &= "mp_policy" not in self.sharding  # FSDP2 fails if a unit is frozen in the first pass
        self.evaluates = draw.random() < 0.6
        self.data = torch.Generator().manual_seed(10 * seed + self.rank)
        self.interruptions = []
        self.make()

    def __str__(self):
        facts = {"seed": self.seed, "units": self.units, **self.sharding, **self.options, "mesh": self.mesh.shape}
        facts |= {"kind": self.kind, "clips": self.clips, "freezes": self.freezes, "accumulates": self.accumulates}
        facts |= {"evaluates": self.evaluates, "interruptions": self.interruptions}
        return " ".join(f"{name}={value}" for name, value in facts.items())

    # ---- objects -----------------------------------------------------------------------------------------------------

    def make(self):
        self.model = Net(torch.float32, nn.LayerNorm, tied=False)
        if self.units == "bd":
            fully_shard([self.model.b, self.model.d], mesh=self.mesh, **self.sharding)
        else:
            for name in self.units.split():
                fully_shard(getattr(self.model, name), mesh=self.mesh, **self.sharding)
        fully_shard(self.model, mesh=self.mesh, **self.sharding)
        more = {"momentum": 0.9, "foreach": False} if self.kind == "SGD" else {"fused": True}
        self.optimizer = getattr(torch.optim, self.kind)(self.model.parameters(), lr=5e-3, **more)
        self.attach()

    def attach(self):
        self.handle = nb.compress_shards(self.model, **self.options)

    def saved_parts(self):
        return [self.model, self.optimizer, self.handle]

    def interrupt(self):
        """Do what the seed has drawn for the time between two steps."""
        draw = random.Random(self.draw.random())
        way = draw.choice(WAYS) if draw.random() < _OFTEN else None
        self.interruptions.append(way)
        if way not in (None, "saves", "is refused", "reads"):
            self.optimizer.zero_grad()
        if self.interrupted is not True or way is None:
            return
        if way == "reads":
            repr(self.handle), self.handle.stats()
            return
        kept = io.BytesIO()
        torch.save([each.state_dict() for each in self.saved_parts()], kept)
        kept.seek(0)
        saved = torch.load(kept, weights_only=False)
        if way == "saves":
            return
        if way == "is refused":
            self.refuse(saved[-1])
            return
        if way == "goes back":
            self.waste(draw.randint(1, 3))
        elif way == "attaches":
            self.handle.remove()
            self.attach()
        else:
            self.handle.remove()
            self.make()
        for each, state in zip(self.saved_parts(), saved, strict=True):
            each.load_state_dict(state)

    def waste(self, steps):
        """Steps that do not count."""
        for at in range(steps):
            self.optimizer.zero_grad()
            self.model.set_requires_gradient_sync(True)
            x = torch.randn(5, 16, generator=torch.Generator().manual_seed(99 * at + self.rank))
            self.model(x).square().mean().backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def refuse(self, own):
        """Calls that all ranks refuse, after which all is as before."""
        for state in (own if self.rank else {}, {**own, "rank": 7}, {**own, "calls": {}}):
            with contextlib.suppress(ValueError):
                self.handle.load_state_dict(state)
                raise AssertionError("a call that has to be refused was not")

    # ---- a step ------------------------------------------------------------------------------------------------------

    def evaluate(self):
        if self.evaluates and self.draw.random() < 0.4:
            with torch.no_grad():
                self.losses.append(float(self.model(torch.ones(3, 16)).sum()))

    def change(self):
        """What users do between two steps."""
        draw = self.draw
        if draw.random() < 0.15:
            factor = draw.choice([1.001, 3.0])
            reshard(self.model)
            with torch.no_grad():
                for p in getattr(self.model, draw.choice("abcd")).parameters():
                    local(p).mul_(factor)

    def step(self):
        draw, model, self.losses = self.draw, self.model, []
        self.change()
        self.evaluate()
        frozen = [name for name in "abd" if self.freezes and draw.random() < 0.3]
        passes, short = draw.choice([1, 2, 3]) if self.accumulates else 1, draw.random() < 0.2
        short &= passes == 1  # FSDP2 cannot accumulate what a unit that was never used has not
        marks = draw.random() < 0.7
        reshard(model)
        for name in "abd":
            getattr(model, name).requires_grad_(name not in frozen)
        for at in range(passes):
            model.set_requires_gradient_sync(not marks or at == passes - 1)
            x = torch.randn(5, 16, generator=self.data)
            loss = model(x, short=short).square().mean()
            self.losses.append(float(loss))
            loss.backward()
        model.requires_grad_(True)
        if self.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=draw.random() < 0.7)
        self.evaluate()

    # ---- what is compared --------------------------------------------------------------------------------------------

    def bits(self):
        found = {name: local(x).detach().clone() for name, x in self.model.state_dict().items()}
        for number, own in self.optimizer.state_dict()["state"].items():
            found |= {f"{number} {k}": local(x).clone() for k, x in own.items() if torch.is_tensor(x)}
        return found | {"losses": torch.tensor(self.losses)}

    def state(self):
        return leaves(self.handle.state_dict())

    def in_common(self):
        return {}

    def close(self):
        self.handle.remove()


if __name__ == "__main__":
    main("tests.sharding.interrupting", *sys.argv[1:])
