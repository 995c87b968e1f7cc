"""Loops that average updates, drawn from a seed, that are interrupted, and the same loops that are not: all bits must
be the same.

Replicas take steps of their own: with other learning rates, without gradients of layers that only they freeze, with
updates that are inf or NaN on one of them, and with a scaler that skips the steps of one. Plans change, rounds are
paused, held early, or under way. Between two steps a loop may be saved, go on in new objects that load what was saved,
have its handle removed and attached anew, go back to what it was after some steps that do not count, or make calls that
are refused.

``python -m tests.updates.interrupting 0 300`` runs the seeds from 0 to 299, and prints what does not hold; with a 3
behind them, on three replicas.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import sys

import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from tests.gradients.training import wrap
from tests.interrupted import leaves, main
from tests.updates.training import Net, nesterov

STEPS = 16

SPECS = (
    "topk:density=0.05+ef", "topk:density=0.1+ef:store=bf16", "topk:density=0.1+ef:decay=0.5", "uniform:bits=2+ef",
    "topk:density=0.1+ef-mixed", "sign+ef", "qsgd:bits=4", "uniform:bits=4+ef:store=int8", "topk:density=0.1+ef21",
    "uniform:bits=4+ef21", "powersgd:rank=2,min_ratio=1", "none", "none+ef", "fp16", "randomk:density=0.2+ef",
    "threshold:value=0.001+ef", "topk:density=0.1,values=int2,mean=senders+ef", "eden:bits=2+ef",
    "topk:density=0.2,select=sampled+ef",
)  # fmt: skip

#: What single layers may get in place of the model's spec, by the kind of the model's.
LAYER_SPECS = {
    "ef21": ("topk:density=0.3", "uniform:bits=4"),
    "": ("uniform:bits=4", "topk:density=0.2", "none", "sign", "qsgd:bits=8", "powersgd:rank=1", "topk:density=0.3+ef"),
}

#: What an interruption may be, and how often it comes.
WAYS = ("saves", "resumes", "resumes", "attaches", "goes back", "is refused")
_OFTEN = 0.4

_SMALL = ("fused", "uniform:bits=8", "topk:density=0.3")


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=3e-3)


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
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        self.norm, self.spec = draw.choice([nn.BatchNorm1d, nn.LayerNorm]), draw.choice(SPECS)
        self.method = "ef21" if "ef21" in self.spec else ""
        self.wrapped = draw.choice([None, None, None, {}, {"find_unused_parameters": True}])
        every = draw.choice([1, 2, 3, 4, 6])
        self.fragments = fragments = min(every, draw.choice([1, 1, 2, 3]))
        self.outer = draw.choice([1.0, 0.7, "auto", "auto", nesterov, _adam])
        self.options = {"every": every, "fragments": fragments, "outer": self.outer, "min_numel": 64, "seed": seed}
        if fragments > 1:
            self.options["split"] = draw.choice(["strided", "layers"])
        if "+ef" in self.spec and "mixed" not in self.spec and not self.method and draw.random() < 0.4:
            self.options["residuals"] = "in-place"
        elif draw.random() < 0.6:
            self.options["overlap"] = draw.randint(0, every // fragments)
            self.options["alpha"] = draw.choice([0.5, 0.5, 0.0, 0.25, 1.0])
        self.policy = draw.choice(["lgreco", "accordion", "topk", "kmeans", *[None] * 8])
        if fragments > 1 or self.method or "mixed" in self.spec:
            self.policy = None
        if self.policy == "accordion" and self.options.get("residuals") and "+ef" not in self.spec:
            self.policy = None
        if draw.random() < 0.3:
            self.options["small"] = draw.choice(_SMALL)
        if self.method and "small" in self.options:
            self.options["small"] = "fused"
        if self.spec.startswith("powersgd") and self.options.get("small") == "fused":
            self.options["small"] = "uniform:bits=8"
        if "uniform" in self.spec and not (self.policy or self.method) and "small" not in self.options:
            self.options["collective"] = draw.choice(["all_gather", "scatter_reduce"])
        self.options["warmup_rounds"] = draw.choice([0, 0, 1]) if not self.policy else 0
        self.options["check_every"] = draw.choice([None, 1, 3])
        self.options["buffers"] = draw.choice(["average", "average", "keep"])
        self.scaled = draw.random() < 0.5
        self.first_scale = draw.choice([4.0, 2.0**118])
        self.clips, self.scheduled = draw.random() < 0.3, draw.random() < 0.4
        self.parts = draw.choice([["a b c d norm"], ["a b", "c d norm"], ["a", "b d norm", "c"]])
        self.kinds = [draw.choice(["SGD", "AdamW", "RMSprop"]) for _ in self.parts]
        self.turns = draw.random() < 0.4
        self.data = torch.Generator().manual_seed(10 * seed + self.rank)
        self.interruptions = []
        self.make()

    def __str__(self):
        facts = {"seed": self.seed, "spec": self.spec, **self.options, "policy": self.policy, "wrapped": self.wrapped}
        facts |= {"outer": getattr(self.outer, "__name__", self.outer), "scaled": self.scaled and self.first_scale}
        facts |= {"norm": self.norm.__name__, "dtype": self.dtype, "clips": self.clips, "scheduled": self.scheduled}
        facts |= {"parts": self.parts, "kinds": self.kinds, "turns": self.turns, "interruptions": self.interruptions}
        return " ".join(f"{name}={value}" for name, value in facts.items())

    # ---- objects -----------------------------------------------------------------------------------------------------

    def make(self):
        self.model = Net(self.dtype, self.norm)
        self.trained = self.model if self.wrapped is None else wrap(self.model, **self.wrapped)
        taken, self.optimizers = set(), []
        for part, kind in zip(self.parts, self.kinds, strict=True):
            modules = [getattr(self.model, name) for name in part.split()]
            own = dict.fromkeys(p for module in modules for p in module.parameters() if p not in taken)
            taken.update(own)
            more = {"momentum": 0.9} if kind == "SGD" else {}
            self.optimizers.append(getattr(torch.optim, kind)(list(own), lr=5e-3, **more))
        self.broken = None
        self.optimizers[-1].register_step_post_hook(lambda *_: self.spoil())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.first_scale, growth_interval=2, enabled=self.scaled)
        self.attach()

    def attach(self):
        choices = ["uniform:bits=2", "uniform:bits=6", "topk:density=0.1", "none"]
        of_policy = {
            "lgreco": lambda: nb.LGreCo("uniform:bits=4+ef", choices=choices, every=2),
            "accordion": lambda: nb.Accordion("topk:density=0.3+ef", "topk:density=0.05+ef", every=2),
            "topk": lambda: nb.GlobalTopK(0.1, every=2),
            "kmeans": lambda: nb.KMeans("uniform:bits=4+ef", every=2, clusters=2),
        }
        spec = of_policy[self.policy]() if self.policy else self.spec
        given = {"grad_scaler": self.scaler} if self.scaled else {}
        self.handle = nb.compress_updates(self.trained, self.optimizers, spec, **self.options, **given)
        several = [*self.optimizers, *([self.handle.outer] if self.handle.outer else [])] if self.scheduled else []
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in several]

    def saved_parts(self):
        return [self.model, *self.optimizers, *self.schedules, self.scaler, self.handle]

    def interrupt(self):
        """Do what the seed has drawn for the time between two steps."""
        draw = random.Random(self.draw.random())
        way = draw.choice(WAYS) if draw.random() < _OFTEN else None
        self.interruptions.append(way)
        if draw.random() < 0.3:
            self.forward(torch.randn(5, 16, generator=self.data))  # batch norm counts it
        if self.interrupted is not True or way is None:
            return
        kept = io.BytesIO()
        torch.save([each.state_dict() for each in self.saved_parts()], kept)
        kept.seek(0)
        saved = torch.load(kept)
        if draw.random() < 0.3:
            saved[-1] = _of_all(saved[-1])
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        if way == "saves":
            self.look()
            return
        if way == "is refused":
            self.refuse(draw, saved)
            return
        if way == "goes back":
            self.waste(draw.randint(1, 5))
        elif way == "attaches" and all(_of_all(self.has_finite_buffers())):  # no others are averaged
            self.handle.remove()
            self.attach()
        else:
            self.handle.remove()
            self.make()
        for each, state in zip(self.saved_parts(), saved, strict=True):
            each.load_state_dict(state)
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            p.grad = gradient

    def has_finite_buffers(self):
        return all(bool(x.isfinite().all()) for x in self.model.buffers())

    def look(self):
        """What reads, and must change nothing."""
        handle = self.handle
        for read in (repr, type(handle).stats, type(handle).layer_stats, type(handle).log_dict):
            read(handle)

    def waste(self, steps):
        """Steps that do not count."""
        for at in range(steps):
            for each in self.optimizers:
                each.zero_grad()
            x = torch.randn(5, 16, generator=torch.Generator().manual_seed(99 * at + self.rank))
            self.scaler.scale(self.forward(x).square().mean()).backward()
            for each in self.optimizers:
                self.scaler.step(each)
            if self.scaled:
                self.scaler.update()

    def refuse(self, draw, saved):
        """Calls that all ranks refuse, after which all is as before."""
        own = saved[-1] if isinstance(saved[-1], dict) else saved[-1][self.rank]
        first = self.rank == 0
        name = sorted(self.handle.layer_stats())[0]
        calls = [
            lambda: self.handle.set_layers({"no.such.layer": "none"}),
            lambda: self.handle.set_layers({name: "none" if first else "sign"}),
            lambda: self.handle.load_state_dict({**own, "step": own["step"] + first}),
            lambda: self.handle.load_state_dict({} if first else own),
            lambda: self.handle.load_state_dict(
                {**own, "updates": {**own["updates"], "steps": own["updates"]["steps"] + 100}}
            ),
        ]
        for call in draw.sample(calls, 2):
            try:
                call()
            except (ValueError, RuntimeError):
                continue
            raise AssertionError("a call that has to be refused was not")

    # ---- a step ------------------------------------------------------------------------------------------------------

    def forward(self, x, **more):
        return self.trained(x, **more)

    def spoil(self):
        """Called after the last optimizer's step, and before the handle counts it."""
        if self.broken is not None:
            with torch.no_grad():
                getattr(self.model, self.broken).bias[:1].fill_(math.nan)
            self.broken = None

    def change(self):
        """What users do between two steps."""
        draw, handle = self.draw, self.handle
        if draw.random() < 0.15:
            draw.choice([handle.pause, handle.resume])()
        if draw.random() < 0.2 and not self.policy:
            names = sorted(name for name, p in self.model.named_parameters() if p.dim() > 1)
            some = draw.sample(names, draw.randint(1, 3))
            specs = {name: draw.choice(LAYER_SPECS[self.method]) for name in some}
            with contextlib.suppress(ValueError, nb.UnsupportedError):  # on all ranks
                handle.set_layers(specs)
        if draw.random() < 0.1:
            handle.average()

    def step(self):
        draw, model = self.draw, self.model
        self.change()
        stepping = draw.sample(self.optimizers, draw.choice([1, len(self.optimizers)])) if self.turns else []
        stepping = [each for each in self.optimizers if not stepping or each in stepping]
        frozen = [name for name in "ab" if draw.random() < 0.2]
        of_one = draw.choice(["a", "b", *[None] * 6]), draw.choice([0, 1])  # what one rank alone freezes
        passes, short = draw.choice([1, 1, 2]), draw.random() < 0.2
        spoils = draw.choice([0, 1, -1, -1, -1, -1]) == self.rank
        broken = draw.choice([(0, "a"), (1, "b"), *[(None, "")] * 8])
        self.broken = broken[1] if broken[0] == self.rank else None
        for name in "ab":
            own = of_one == (name, self.rank) and not self.scaled  # no scaler steps without a gradient
            getattr(model, name).requires_grad_(name not in frozen and not own)
        for _ in range(passes):
            loss = self.forward(torch.randn(5, 16, generator=self.data), short=short).square().mean()
            self.scaler.scale(loss * (math.inf if spoils else 1.0)).backward()
        model.requires_grad_(True)
        self.use(stepping)
        for each in draw.choice([self.optimizers, self.optimizers, stepping, []]):
            each.zero_grad(set_to_none=draw.random() < 0.5)
        for each in self.schedules:
            each.step()
        self.mend()

    def use(self, stepping):
        if self.scaled:
            stepping = [each for each in stepping if any(p.grad is not None for p in self.of(each))]
        for each in stepping:
            if self.clips:
                if self.scaled:
                    self.scaler.unscale_(each)
                nn.utils.clip_grad_norm_(self.of(each), 1.0)
            self.scaler.step(each)
        if self.scaled and stepping:
            self.scaler.update()
        self.broken = None

    @staticmethod
    def of(optimizer):
        return [p for group in optimizer.param_groups for p in group["params"]]

    def mend(self):
        """A replica forgets gradients and moments that are not finite."""
        for p in self.model.parameters():
            if p.grad is not None and not p.grad.isfinite().all():
                p.grad.zero_()
        for each in self.optimizers:
            tensors = (x for own in each.state.values() for x in own.values() if torch.is_tensor(x))
            if not all(x.isfinite().all() for x in tensors):
                each.state.clear()

    # ---- what is compared --------------------------------------------------------------------------------------------

    def bits(self):
        """Everything that later steps depend on, but for the handle's state."""
        found = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
        for at, each in enumerate(self.optimizers):
            for number, own in each.state_dict()["state"].items():
                found |= {f"{at} {number} {k}": x.clone() for k, x in own.items() if torch.is_tensor(x)}
        return found

    def state(self):
        """All that the handle saves."""
        return leaves(self.handle.state_dict())

    def in_common(self):
        """What all replicas must have in common at any time: parameters of the last round, and what is decided."""
        state = self.handle.state_dict()
        own = state["updates"]
        here = dict(self.model.named_parameters())
        found = {name: own["anchor"].get(name, p.detach()).clone() for name, p in here.items()}
        sent = own["under way"]
        kept = {"outer": own["outer"], "length": own["length"], "steps": own["steps"], "layers": state["layers"]}
        kept |= {"step": state["step"], "plan": state["controller"].get("plan"), "sent": sent and sent["means"]}
        return found | leaves(kept)

    def close(self):
        self.handle.remove()


def _of_all(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


if __name__ == "__main__":
    main("tests.updates.interrupting", *sys.argv[1:])
