"""Training loops drawn from a seed that are interrupted, and the same loops that are not: all bits must be the same.

Gradients accumulate and are clipped, a gradient scaler raises its scale until steps overflow, optimizers take turns,
layers are frozen, plans change, and ranks run out of data at different times. Between two steps a loop may be saved, go
on in new objects that load what was saved, or have its handle removed and attached anew.

``python -m tests.gradients.interrupting 0 300`` runs the seeds from 0 to 299, and prints what does not hold; with a 3
behind them, on three ranks.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys

import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from tests.gradients.training import compress, wrap
from tests.interrupted import leaves, main

STEPS = 16

SPECS = (
    "topk:density=0.05+ef", "topk:density=0.05+ef:store=bf16", "topk:density=0.1+ef:decay=0.9", "uniform:bits=2+ef",
    "topk:density=0.1+ef-mixed", "sign+ef", "qsgd:bits=4", "uniform:bits=4+ef:store=int8", "topk:density=0.1+ef21",
    "powersgd:rank=2", "none+ef", "randomk:density=0.2+ef", "threshold:value=0.01+ef",
    "dgc:density=0.1", "dgc:density=0.1,nesterov=true,store=int8", "dgc:density=0.05,warmup_steps=6",
    "dgc:density=0.1,clip=1.0,store=bf16",
)  # fmt: skip

#: What single layers may get in place of the model's spec, by the kind of the model's.
LAYER_SPECS = {
    "dgc": ("topk:density=0.3", "topk:density=0.02"),
    "ef21": ("topk:density=0.3", "uniform:bits=4"),
    "": ("uniform:bits=4", "topk:density=0.2", "none", "sign", "qsgd:bits=8", "powersgd:rank=1"),
}

POLICIES = ("lgreco", "accordion", "topk", "kmeans", "threshold")

#: What an interruption may be, and how often it comes.
WAYS = ("saves", "resumes", "resumes", "attaches")
_OFTEN = 0.35


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.norm = nn.LayerNorm(24)
        self.to(dtype)

    def forward(self, x, *, short=False):
        h = self.a(x).tanh()
        return self.c(h if short else self.norm(self.b(h)))


class Loop:
    """What one seed makes of a loop, the same on all ranks but for the data.

    Args:
        seed: draws everything.
        interrupted: whether the interruptions that the seed draws take place; ``"saves"``: it is only saved, after
            every step.
    """

    def __init__(self, seed, *, interrupted):
        self.seed, self.interrupted = seed, interrupted
        self.draw = draw = random.Random(seed)
        self.kind = draw.choice(["ddp", "ddp", "view", "unused", "module", "call"])
        if dist.get_world_size() > 2 and self.kind in ("ddp", "view"):
            self.kind = "unused"  # DDP has other buckets after a start, in which three ranks add up in another order
        self.spec = draw.choice(SPECS)
        self.dtype = draw.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16])
        self.method = next((name for name in ("dgc", "ef21") if name in self.spec), "")
        self.options = {"min_numel": draw.choice([64, 400]), "seed": seed}
        self.policy = not self.method and draw.random() < 0.25 and random.Random(f"policy {seed}").choice(POLICIES)
        if self.kind != "unused" and draw.random() < 0.4:
            self.options["small"] = draw.choice(["fused", "topk:density=0.3"])
        if self.options.get("small") == "fused" and self.spec.startswith("powersgd"):
            self.options["small"] = "uniform:bits=8"
        if self.method == "ef21" and "small" in self.options:
            self.options["small"] = "fused"
        if "uniform" in self.spec and not self.policy and "small" not in self.options:
            self.options["collective"] = draw.choice(["all_gather", "scatter_reduce"])
        if draw.random() < 0.2:
            self.options["warmup_steps"] = draw.choice([1, 3])
        if self.policy:
            self.options.pop("warmup_steps", None)
        self.scaled = draw.random() < 0.6
        self.growth = draw.choice([2.0, 2.0, 1.5])
        self.first_scale = draw.choice([4.0, 2.0**118])
        self.clips, self.momentum = draw.random() < 0.3, draw.random() < 0.4
        self.parts = draw.choice([["a b c norm"], ["a b", "c norm"], ["a", "b norm", "c"]])
        self.turns = draw.random() < 0.4
        self.freezes, self.leaves_out = draw.random() < 0.4, self.kind in ("unused", "module", "call")
        plain = self.kind in ("ddp", "view", "unused") and not (self.scaled or self.momentum)
        self.ends_early = plain and draw.random() < 0.6
        self.data = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        self.interruptions, self.steps = [], 0
        self.make(Net(self.dtype))

    def __str__(self):
        facts = {"seed": self.seed, "kind": self.kind, "spec": self.spec, **self.options, "policy": self.policy}
        facts |= {"scaled": self.scaled and self.growth, "turns": self.turns, "parts": len(self.parts)}
        facts |= {"dtype": self.dtype, "freezes": self.freezes, "join": self.ends_early, "clips": self.clips}
        facts["interruptions"] = self.interruptions
        return " ".join(f"{name}={value}" for name, value in facts.items())

    # ---- objects -----------------------------------------------------------------------------------------------------

    def make(self, model):
        self.model = model
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=self.first_scale, growth_factor=self.growth, growth_interval=2, enabled=self.scaled
        )
        make = nb.DGCSGD if self.method == "dgc" else torch.optim.SGD
        more = {"momentum": 0.9} if self.momentum and self.method != "dgc" else {}
        self.optimizers = [
            make([p for name in part.split() for p in getattr(model, name).parameters()], lr=0.005, **more)
            for part in self.parts
        ]
        self.trained = model
        if self.kind in ("ddp", "view", "unused"):
            self.trained = wrap(
                model, find_unused_parameters=self.kind == "unused", gradient_as_bucket_view=self.kind == "view"
            )
        self.attach()

    def attach(self):
        spec = self.spec
        if self.policy:
            choices = ["uniform:bits=2", "uniform:bits=6", "topk:density=0.1", "none"]
            policies = {
                "lgreco": lambda: nb.LGreCo("uniform:bits=4+ef", choices=choices, every=4, last=2),
                "accordion": lambda: nb.Accordion("topk:density=0.3+ef", "topk:density=0.05+ef", every=3),
                "topk": lambda: nb.GlobalTopK(0.1, every=2),
                "kmeans": lambda: nb.KMeans("uniform:bits=4+ef", every=3, clusters=2),
                "threshold": lambda: nb.HardThreshold(0.01, every=2),
            }
            spec = policies[self.policy]()
        averaging = nb.Averager if self.kind == "call" else compress
        self.handle = averaging(self.trained, spec, grad_scaler=self.scaler if self.scaled else None, **self.options)

    def interrupt(self):
        """Do what the seed has drawn for the time between two steps."""
        draw = random.Random(self.draw.random())
        way = draw.choice(WAYS) if draw.random() < _OFTEN else None
        self.interruptions.append(way)
        if way is None:
            return
        if way != "saves":  # a checkpoint has no gradients
            for p in self.model.parameters():
                p.grad = None
        if self.interrupted is not True:
            return
        parts = [self.handle, self.model, *self.optimizers, *([self.scaler] if self.scaled else [])]
        saved = copy.deepcopy([each.state_dict() for each in parts])
        if way == "attaches":
            self.handle.remove()
            self.attach()
            self.handle.load_state_dict(saved[0])
        elif way == "resumes":
            self.handle.remove()
            self.make(Net(self.dtype))
            parts = [self.handle, self.model, *self.optimizers, *([self.scaler] if self.scaled else [])]
            for each, state in zip(parts, saved, strict=True):
                each.load_state_dict(state)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def change(self):
        """What users do between two steps."""
        draw = self.draw
        if draw.random() < 0.15:
            draw.choice([self.handle.pause, self.handle.resume])()
        if draw.random() < 0.15:
            self.handle.set_epoch(draw.randrange(4))
        if draw.random() < 0.2 and not self.policy:
            names = sorted(self.handle.layer_stats())
            some = draw.sample(names, min(len(names), draw.randint(1, 3)))
            specs = {name: draw.choice(LAYER_SPECS[self.method]) for name in some}
            with contextlib.suppress(ValueError, nb.UnsupportedError):  # on all ranks
                self.handle.set_layers(specs)

    def step(self):
        self.steps += 1
        if self.ends_early and self.steps % 6 == 0:
            self.last_batches()
            return
        draw, model = self.draw, self.model
        self.change()
        stepping = (
            draw.sample(self.optimizers, draw.choice([0, 1, len(self.optimizers)]))
            if self.turns
            else [*self.optimizers]
        )
        frozen = [name for name in "ab" if self.freezes and self.leaves_out and draw.random() < 0.3]
        passes, short = draw.choice([1, 1, 2, 3]), self.leaves_out and draw.random() < 0.3
        spoilt = (draw.randrange(dist.get_world_size()), draw.randrange(passes)) if draw.random() < 0.2 else None
        if short and set("ac") <= set(frozen):
            short = False
        for name in "ab":
            getattr(model, name).requires_grad_(name not in frozen)
        for at in range(passes):
            with contextlib.nullcontext() if self.kind == "call" or at == passes - 1 else self.handle.no_sync():
                self.backward(short=short, bad=self.scaled and spoilt == (dist.get_rank(), at))
        if self.kind == "call":
            self.handle.average()
        model.requires_grad_(True)
        self.use(stepping)
        self.clear(stepping)

    def backward(self, *, short, bad):
        x = torch.randn(5, 16, generator=self.data).to(self.dtype)
        loss = self.trained(x, short=short).float().square().mean()
        self.scaler.scale(loss * (math.inf if bad else 1.0)).backward()

    def use(self, stepping):
        stepping = [each for each in stepping if any(p.grad is not None for p in self.of(each))]
        for each in stepping:
            if self.clips:
                if self.scaled:
                    self.scaler.unscale_(each)
                nn.utils.clip_grad_norm_(self.of(each), 1.0)
            self.scaler.step(each)
        if self.scaled and stepping:
            self.scaler.update()

    def clear(self, stepping):
        draw = self.draw
        to_none, which = draw.random() < 0.6, draw.choice([self.optimizers, self.optimizers, stepping, []])
        for each in which if self.turns else self.optimizers:
            each.zero_grad(set_to_none=to_none)

    @staticmethod
    def of(optimizer):
        return [p for group in optimizer.param_groups for p in group["params"]]

    def last_batches(self):
        """The end of an epoch, whose last batches only some ranks have. The others step no more, until all go on with
        the parameters of those.
        """
        with self.trained.join():
            for _ in range(1 + (self.seed + dist.get_rank()) % 3):
                for each in self.optimizers:
                    each.zero_grad()
                self.backward(short=False, bad=False)
                for each in self.optimizers:
                    each.step()
        for each in self.optimizers:
            each.zero_grad()

    # ---- what is compared --------------------------------------------------------------------------------------------

    def bits(self):
        """Everything that later steps depend on."""
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for at, each in enumerate(self.optimizers):
            for number, own in each.state_dict()["state"].items():
                found |= {f"{at} {number} {k}": x.clone() for k, x in own.items() if torch.is_tensor(x)}
        return found

    def state(self):
        """All that feedback holds."""
        state = self.handle.state_dict()
        return leaves({"": state["feedback"], **state["others"]})

    def in_common(self):
        """What all ranks have in common: all but momentum, which each has of its own while averages wait."""
        return {name: x for name, x in self.bits().items() if "buffer" not in name}

    def close(self):
        self.handle.remove()


if __name__ == "__main__":
    main("tests.gradients.interrupting", *sys.argv[1:])
