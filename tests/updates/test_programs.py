"""Training loops that nobody would write in one piece: gradients accumulate, layers are frozen, optimizers take turns,
steps are skipped, parameters become NaN on one rank, rounds are paused, and everything is saved and goes on in new
objects. A replica is a rank, or two ranks that share it by FSDP2. Whatever happens, replicas end each round equal and
finite, what they sent and what waits is what they learned, and a run that was resumed has the bits of one that was not.
"""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from narrowband.averaging.flat import local
from narrowband.averaging.who import reshard
from tests.ranks import run_ranks
from tests.thorough import thorough
from tests.updates.training import Net, nesterov

#: Of these nothing is lost: the sum of what arrives and what waits is that of all updates.
KEEPING = (
    "topk:density=0.05+ef", "topk:density=0.1+ef-mixed", "uniform:bits=2+ef", "sign+ef", "none", "none+ef",
    "powersgd:rank=2,min_ratio=1",
)  # fmt: skip
SPECS = (*KEEPING, "qsgd:bits=4", "fp16", "topk:density=0.1+ef:decay=0.5", "uniform:bits=4+ef:store=int8")

STEPS = 12


class Program:
    """What one seed makes of a loop, the same on all ranks but for the data.

    Args:
        seed: draws everything.
        resumes: whether the run goes on from checkpoints where the seed has one, or from what it has.
        shards: ranks that share a replica.
    """

    def __init__(self, seed, *, resumes, shards=1):
        self.seed, self.resumes = seed, resumes
        self.draw = draw = random.Random(seed)
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        self.norm, self.spec = draw.choice([nn.BatchNorm1d, nn.LayerNorm]), draw.choice(SPECS)
        every = draw.choice([1, 2, 3, 4])
        fragments = draw.choice([1, 1, 2]) if every > 1 else 1
        outer = draw.choice([1.0, 1.0, "auto", nesterov])
        self.options = {"every": every, "fragments": fragments, "outer": outer, "min_numel": 64, "check_every": 1}
        if "ef" in self.spec and "mixed" not in self.spec and draw.random() < 0.5:
            self.options["residuals"] = "in-place"
        else:
            self.options["overlap"] = draw.choice([0, 0, every // fragments])
        if "uniform" in self.spec:
            self.options["collective"] = draw.choice(["all_gather", "scatter_reduce"])
        self.options["warmup_rounds"] = draw.choice([0, 0, 1])
        self.kept = self.spec in KEEPING and outer == 1.0 and not self.options.get("overlap")
        self.scaled = draw.random() < 0.5
        self.parts = draw.choice([["abcd norm"], ["ab", "cd norm"], ["a", "bd norm", "c"]])
        self.kinds = [draw.choice(["SGD", "AdamW", "RMSprop"]) for _ in self.parts]
        self.turns = draw.random() < 0.4
        self.mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("all", "one"))
        self.group, self.inside = self.mesh.get_group("all"), self.mesh.get_group("one")
        self.replica = dist.get_rank(self.group)
        self.units = draw.choice([None, "", "a", "bd", "c"]) if shards > 1 else None
        self.evaluates = shards > 1 and draw.random() < 0.5
        self.data = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        self.complaints: list[str] = []
        self.make()

    def make(self):
        self.model = Net(self.dtype, self.norm)
        self.shard()
        taken = set()
        self.optimizers = []
        for part, kind in zip(self.parts, self.kinds, strict=True):
            modules = [getattr(self.model, name) for name in (*part.split()[0], *part.split()[1:])]
            own = dict.fromkeys(p for module in modules for p in module.parameters() if p not in taken)
            taken.update(own)
            more = {"momentum": 0.9} if kind == "SGD" else {}
            self.optimizers.append(getattr(torch.optim, kind)(list(own), lr=5e-3, **more))
        self.broken = None
        self.optimizers[-1].register_step_post_hook(lambda *_: self.before_round())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=self.scaled)
        given = {"grad_scaler": self.scaler} if self.scaled else {}
        given["process_group"] = self.group
        self.handle = nb.compress_updates(self.model, self.optimizers, self.spec, **self.options, **given)

    def shard(self):
        if dist.get_world_size(self.inside) > 1:
            if self.units:
                fully_shard([getattr(self.model, name) for name in self.units], mesh=self.mesh["one"])
            fully_shard(self.model, mesh=self.mesh["one"])

    def evaluate(self):
        """FSDP2 may hold whole parameters afterwards."""
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(2, 16))
        self.model.train()

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def averaged(self):
        reshard(self.model)
        buffers = [(name, x) for name, x in self.model.named_buffers() if x.is_floating_point()]
        return {name: local(x).double() for name, x in (*self.model.named_parameters(), *buffers)}

    def waiting(self, name):
        """What waits on this rank: the residual, and the errors of means that it owns."""
        found = [state.residual(name) for state in self.handle.layers.states.values()]
        residual = sum((x.double() for x in found if x is not None), torch.zeros(()))
        owned = torch.zeros_like(residual)
        for state in self.handle.layers.states.values():
            for key, error in state.state_dict().items():
                if key.startswith("owner/") and key.endswith(f"/{name}"):
                    start, ranks = map(int, key.split("/")[1:3])
                    owned[start : start + error.numel()] += ranks * error.double()
        return residual, owned

    def before_round(self, *, skipped=False):
        """Called after the last optimizer's step, and before the handle counts it. If a scaler has skipped that step,
        residuals may be put in place only then.
        """
        if self.broken is not None:
            with torch.no_grad():
                local(getattr(self.model, self.broken).bias)[:1].fill_(math.nan)
            self.broken = None
        if self.kept:
            saved = self.handle.state_dict()["updates"]
            own = self.averaged()
            common = {name: (saved["anchor"] | saved["buffers"]).get(name, x).double() for name, x in own.items()}
            waits = {name: self.waiting(name) for name in own}
            later = own.keys() - saved["anchor"].keys() if skipped and "residuals" in self.options else set()
            self.seen = own, common, waits, later, self.handle.step, self.handle.skipped_updates

    def after_round(self):
        """What all have now, with what waits, is what they had, with what waited. A replica that brought what is not
        finite had what all had, and has lost what waited in place.
        """
        if not self.kept or self.handle.step == self.seen[-2]:
            return
        own, common, waited, put_in_place, _, skipped = self.seen
        brings = self.handle.skipped_updates == skipped
        brought = own if brings else common
        for name, x in self.averaged().items():
            flat = (x - brought[name]).nan_to_num().reshape(-1)
            (residual, owned), (residual_before, owned_before) = self.waiting(name), waited[name]
            flat = flat + owned - owned_before
            if brings or name not in put_in_place:
                flat = flat + residual - residual_before
            dist.all_reduce(flat, group=self.group)
            self.complain_if_lost(name, flat, [common[name], brought[name]])

    def complain_if_lost(self, name, flat, tensors):
        if flat.numel():
            size = max(1e-3, *(float(x.nan_to_num().abs().max()) for x in tensors))
            if float(flat.abs().max()) > size * (0.1 if self.dtype == torch.bfloat16 else 1e-4):
                self.complaints.append(f"{name} lost {float(flat.abs().max()):.3g} of {size:.3g}")

    def average(self):
        before = self.handle.step
        if self.kept:
            self.before_round()
        self.handle.average()
        self.after_round()
        held = (
            self.handle.step > before
        )  # if not, no optimizer has stepped since the last round, but passes may have run
        trained = {name for name, _ in self.model.named_parameters()}
        own = torch.cat([x.view(-1) for name, x in self.averaged().items() if held or name in trained])
        others = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(others, own, group=self.group)
        if not (own.isfinite().all() and all(torch.equal(own, other) for other in others)):
            self.complaints.append("replicas are not equal and finite")
        skipped = [None] * dist.get_world_size(self.inside)
        dist.all_gather_object(skipped, self.handle.skipped_updates, group=self.inside)
        if len(set(skipped)) > 1:
            self.complaints.append(f"a replica brought a part of its update: its ranks skipped {skipped}")

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self):
        draw, model, replica = self.draw, self.model, self.replica
        if draw.random() < 0.2:
            draw.choice([self.handle.pause, self.handle.resume])()
        stepping = draw.sample(self.optimizers, draw.choice([1, len(self.optimizers)])) if self.turns else []
        stepping = [each for each in self.optimizers if not stepping or each in stepping]
        frozen = [name for name in "ab" if draw.random() < 0.2]
        passes, short = draw.choice([1, 1, 2]), draw.random() < 0.2
        spoils = draw.choice([0, 1, -1, -1, -1, -1]) == replica
        broken = draw.choice([(0, "a"), (1, "b"), *[(None, "")] * 8])
        breaks = broken[0] == replica and dist.get_rank(self.inside) == replica % dist.get_world_size(self.inside)
        self.broken = broken[1] if breaks else None
        if self.evaluates and draw.random() < 0.5:
            self.evaluate()
        reshard(model)
        for name in "ab":
            getattr(model, name).requires_grad_(name not in frozen)
        for _ in range(passes):
            loss = model(torch.randn(5, 16, generator=self.data), short=short).square().mean()
            self.scaler.scale(loss * (math.inf if spoils else 1.0)).backward()
        model.requires_grad_(True)
        if self.evaluates and draw.random() < 0.5:
            self.evaluate()
        self._use([each for each in stepping if not self.scaled or self._has_gradients(each)])
        for each in draw.choice([self.optimizers, self.optimizers, stepping, []]):
            each.zero_grad(set_to_none=draw.random() < 0.5)
        self._mend()

    def _use(self, stepping):
        last, self.seen = self.optimizers[-1], None
        for each in stepping:
            for group in each.param_groups:
                group["lr"] *= self.draw.choice([0.9, 1.0, 1.1]) * (1 + 0.01 * self.replica)
            self.scaler.step(each) if self.scaled else each.step()
        if self.scaled and stepping:
            if last in stepping and self.seen is None:
                self.broken = None
                self.before_round(skipped=True)  # the scaler's update counts the step
            self.scaler.update()
        if self.seen is not None:
            self.after_round()

    @staticmethod
    def _has_gradients(optimizer):
        return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    def _mend(self):
        """A replica forgets gradients and moments that are not finite."""
        for p in self.model.parameters():
            if p.grad is not None and not local(p.grad).isfinite().all():
                local(p.grad).zero_()
        for each in self.optimizers:
            tensors = (local(x) for own in each.state.values() for x in own.values() if torch.is_tensor(x))
            if not all(x.isfinite().all() for x in tensors):
                each.state.clear()

    def maybe_resume(self):
        draw = random.Random(self.draw.random())
        if draw.random() > 0.3:
            return
        if draw.random() < 0.5:
            self.model(torch.randn(5, 16, generator=self.data))  # batch norm counts it
            reshard(self.model)
        if self.resumes:
            parts = [self.model, *self.optimizers, self.handle, self.scaler]
            saved = copy.deepcopy([each.state_dict() for each in parts])
            gradients = [p.grad for p in self.model.parameters()]
            self.handle.remove()
            self.make()
            for each, state in zip([self.model, *self.optimizers, self.handle, self.scaler], saved, strict=True):
                each.load_state_dict(state)
            for p, gradient in zip(self.model.parameters(), gradients, strict=True):
                p.grad = gradient


def run(seed, shards, *, resumes):
    """The parameters after every step, and what was found wrong."""
    program, trace = Program(seed, resumes=resumes, shards=shards), []
    for _ in range(STEPS):
        program.maybe_resume()
        program.step()
        if program.draw.random() < 0.15:
            program.average()
        trace.append(torch.cat([x.reshape(-1) for x in program.averaged().values()]))
    program.average()
    program.handle.remove()
    return trace, program.complaints


def programs(rank, world_size, seeds, shards=1):
    """By seed: what was wrong, if anything was."""
    found = {}
    for seed in seeds:
        whole, complaints = run(seed, shards, resumes=False)
        again, more = run(seed, shards, resumes=True)
        same = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(whole, again, strict=True)]
        found[seed] = [*complaints, *more, *([] if all(same) else [f"resumed otherwise at step {same.index(False)}"])]
    return {seed: wrong for seed, wrong in found.items() if wrong}


#: Seeds of programs that notice a state that lacks something, a NaN that travels, or a replica that keeps one.
KNOWN = [1, 2, 3, 11, 32, 46]

#: The same of replicas that two ranks share; some bring a part of an update if its ranks do not agree.
SHARDED = [1, 5, 8]


@pytest.mark.parametrize("seeds", [KNOWN, *thorough([0, 5, 8], *(range(at, at + 50) for at in range(100, 400, 50)))])
def test_replicas_stay_equal_and_nothing_is_lost(seeds):
    assert run_ranks(programs, 2, seeds) == [{}, {}]


@pytest.mark.parametrize("seeds", [SHARDED, *thorough(*(range(at, at + 20) for at in range(100, 200, 20)))])
def test_replicas_that_two_ranks_share_stay_equal_and_nothing_is_lost(seeds):
    assert run_ranks(programs, 4, seeds, 2) == [{}] * 4
