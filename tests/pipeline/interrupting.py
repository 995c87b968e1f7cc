"""Pipelines drawn from a seed that are interrupted, and the same pipelines that are not: all bits must be the same.

Some batches have more micro-batches, a batch may hold inf, evaluations come in between, and stages keep residuals,
references, or buffers of samples. Between two steps a pipeline may be saved, go on in new objects that load what was
saved, or have new stages around the modules that there are.

``python -m tests.pipeline.interrupting 0 300`` runs the seeds from 0 to 299, and prints what does not hold; with a 3
behind them, on three ranks.
"""

from __future__ import annotations

import io
import math
import random
import sys

import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from tests.interrupted import leaves, main
from tests.pipeline.stages import CPU, run_step
from tests.torches import OLDEST

STEPS = 12

FORWARD = (
    "none", "bf16", "uniform:bits=4", "qsgd:bits=4", "topk:density=0.2", "topk:density=0.2,scope=sample", "sign",
    "randomk:density=0.3", "topk:density=0.2+ef", "topk:density=0.2+ef-mixed", "topk:density=0.2+ef21",
    "uniform:bits=2+ef", "qsgd:bits=4+ef21", "qsgd:bits=4+aq-sgd", "uniform:bits=4+aq-sgd:store=fp16",
    "topk:density=0.3+aq-sgd", "eden:bits=2+ef21",
)  # fmt: skip

WAYS = ("saves", "resumes", "resumes", "attaches", "reads")
_OFTEN = 0.4

WIDTH, SAMPLES = 24, 2  # of a micro-batch


class Part(nn.Module):
    """A stage that sends one tensor on, or two."""

    def __init__(self, inputs, *, several, last, norm, dropout):
        super().__init__()
        self.a, self.b = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.several, self.last = several, last
        self.norm, self.dropout = norm(WIDTH), nn.Dropout(dropout)

    def forward(self, x, *more):
        h = self.b(self.a(x).tanh())
        for each in more:
            h = h + torch.nn.functional.pad(each, (0, WIDTH - each.shape[-1]))
        h = self.dropout(self.norm(h))
        return (h, h[:, : WIDTH // 2].sigmoid()) if self.several and not self.last else h


def loss_fn(output, target):
    return (output.float() - target).square().mean()


class Loop:
    """What one seed makes of a pipeline.

    Args:
        seed: draws everything.
        interrupted: whether the interruptions that the seed draws take place; ``"saves"``: it is only saved, after
            every step.
    """

    def __init__(self, seed, *, interrupted):
        self.seed, self.interrupted = seed, interrupted
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.draw = draw = random.Random(seed)
        self.name = draw.choice(["GPipe", "1F1B", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
        self.mine = [self.rank] if self.name in ("GPipe", "1F1B") else [self.rank, self.size + self.rank]
        if self.name == "ZBVZeroBubble":
            self.mine[1] = 2 * self.size - 1 - self.rank
        self.number = self.size * len(self.mine)
        self.several = draw.random() < 0.3
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        self.options = {"seed": seed, "forward": draw.choice(FORWARD)}
        self.options["backward"] = draw.choice([spec for spec in FORWARD if "aq-sgd" not in spec])
        if self.options["forward"].startswith("topk:density=0.2") and "+" not in self.options["forward"]:
            self.options["backward"] = draw.choice(
                [self.options["backward"], self.options["forward"] + ",reuse=forward"]
            )
        self.options |= draw.choice([{}, {}, {"warmup_steps": 2}, {"warmup_epochs": 1}])
        self.options["compress_in_eval"] = draw.random() < 0.7
        self.kind, self.several_sizes = draw.choice(["SGD", "AdamW"]), draw.random() < 0.5
        self.norm, self.p = draw.choice([nn.LayerNorm, nn.LayerNorm, nn.BatchNorm1d]), draw.choice([0.0, 0.0, 0.2])
        self.interruptions, self.epoch = [], 0
        self.make()

    def __str__(self):
        facts = {"seed": self.seed, "schedule": self.name, **self.options, "several": self.several, "dtype": self.dtype}
        facts |= {
            "norm": self.norm.__name__,
            "dropout": self.p,
            "kind": self.kind,
            "several sizes": self.several_sizes,
            "interruptions": self.interruptions,
        }
        return " ".join(f"{name}={value}" for name, value in facts.items())

    # ---- objects -----------------------------------------------------------------------------------------------------

    def make(self):
        torch.manual_seed(0)
        cut = [
            Part(
                WIDTH if at else 10,
                several=self.several,
                last=at == self.number - 1,
                norm=self.norm,
                dropout=self.p,
            )
            for at in range(self.number)
        ]
        self.model = nn.ModuleList(cut[at].to(self.dtype) for at in self.mine)
        more = {"momentum": 0.9} if self.kind == "SGD" else {}
        self.optimizer = getattr(torch.optim, self.kind)(self.model.parameters(), lr=5e-3, **more)
        self.attach()

    def attach(self):
        self.stages = [
            nb.CompressedStage(module, at, self.number, CPU, **self.options)
            for at, module in zip(self.mine, self.model, strict=True)
        ]
        self.schedules = {n: self.schedule(n) for n in (4, 6)}
        for stage in self.stages:
            stage.set_epoch(self.epoch)

    def schedule(self, microbatches):
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

        kind = get_schedule_class(self.name)
        given = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
        return kind(given, microbatches, loss_fn=loss_fn)

    def saved_parts(self):
        return [self.model, self.optimizer, *self.stages]

    def interrupt(self):
        """Do what the seed has drawn for the time between two steps."""
        draw = random.Random(self.draw.random())
        way = draw.choice(WAYS) if draw.random() < _OFTEN else None
        self.interruptions.append(way)
        if self.interrupted is not True or way is None:
            return
        kept = io.BytesIO()
        torch.save([each.state_dict() for each in self.saved_parts()], kept)
        kept.seek(0)
        saved, drawn = torch.load(kept), torch.get_rng_state()
        if way == "saves":
            return
        if way == "reads":
            for stage in self.stages:
                stage.stats()
            return
        if way == "resumes":
            self.make()
        else:
            self.attach()
        for each, state in zip(self.saved_parts(), saved, strict=True):
            each.load_state_dict(state)
        torch.set_rng_state(drawn)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self):
        draw = self.draw
        if draw.random() < 0.3:
            self.epoch += 1
            for stage in self.stages:
                stage.set_epoch(self.epoch)
        number = draw.choice([4, 4, 6]) if self.several_sizes else 4
        bad, seed = draw.random() < 0.15 and self.norm is nn.LayerNorm, draw.randrange(10**6)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(number * SAMPLES, 10, generator=generator).to(self.dtype)
        y = torch.randn(number * SAMPLES, WIDTH, generator=generator)
        samples = torch.randperm(18, generator=generator)[: len(x)]
        self.losses = []
        # With PyTorch 2.11 a schedule whose first step is an evaluation cannot train, whatever the stages.
        if draw.random() < 0.25 and self.name != "ZBVZeroBubble" and not OLDEST:
            self.model.eval()
            self.losses += self.run(number, x, y, train=False)
            self.model.train()
        if bad:
            x[draw.randrange(len(x)), 3] = math.inf
        self.optimizer.zero_grad()
        for stage in self.stages:
            stage.samples = samples.clone()
        self.losses += self.run(number, x, y)
        if not bad:
            self.optimizer.step()

    def run(self, number, x, y, **how):
        return run_step(self.schedules[number], self.stages, x, y, **how)

    # ---- what is compared --------------------------------------------------------------------------------------------

    def bits(self):
        found = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
        found |= {f"gradient of {name}": p.grad.clone() for name, p in self.model.named_parameters()}
        return found | leaves(self.optimizer.state_dict()["state"]) | {"losses": torch.tensor(self.losses)}

    def state(self):
        return leaves([each.state_dict() for each in self.stages])

    def in_common(self):
        return {}

    def close(self):
        pass


if __name__ == "__main__":
    main("tests.pipeline.interrupting", *sys.argv[1:])
