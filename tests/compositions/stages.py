"""Stages of a pipeline, whose replicas may average compressed gradients; beside it, the same with boundaries."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.compositions.training import Training, optimizers_of
from tests.pipeline.stages import CPU, batch, ids, loss_fn, parts, run_step, schedule_of

__all__ = ["Stages"]


class Stages(Training):
    def build_model(self):
        """This rank's parts of the model."""
        size, inside = self.size, self.c["inside"]
        self.replica, at = divmod(self.rank, 2) if inside else (0, self.rank)
        self.depth = 2 if inside else size
        name = self.c["schedule_name"]
        self.mine = [at] if name in ("GPipe", "1F1B") else [at, self.depth + at]
        if name == "ZBVZeroBubble":
            self.mine = [at, 2 * self.depth - 1 - at]
        self.number = self.depth * len(self.mine)
        self.cut = parts(self.number)
        return nn.ModuleList(self.cut[at] for at in self.mine)

    def build(self):
        c, at = self.c, self.mine[0]
        specs = {"forward": c["forward"], "backward": c["backward"]}
        self.handles, group = [], None
        modules = list(self.model)
        if c["inside"]:
            pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][at]
            group = pipelines[self.replica]
            if "ddp" in c["inside"]:
                modules = [DistributedDataParallel(module, process_group=replicas) for module in modules]
            spec = c["spec"] if "compressed" in c["inside"] else "none"
            if c["inside"] != "ddp":
                self.handles = [
                    nb.compress_gradients(module, spec, min_numel=1, process_group=replicas) for module in modules
                ]
        options = {"seed": c["seed"], "group": group, **specs, **c.keywords()}
        self.stages = [
            nb.CompressedStage(module, at, self.number, CPU, **options)
            for at, module in zip(self.mine, modules, strict=True)
        ]
        self.schedule = schedule_of(c["schedule_name"], self.stages, c["microbatches"])
        self.optimizers = optimizers_of(self.model, c["optimizer"])
        self.whole = None
        if not c["inside"] and not c["activations"]:
            self.whole = Whole(c, self.number, self.depth)

    def backward(self, at):
        for stage in self.stages:
            stage.samples = ids(at)
        with self.activations():
            self.losses = run_step(self.schedule, self.stages, *batch(10 * at + self.replica))

    def step(self, at):
        super().step(at)
        if self.c["evaluates"] and self.c["schedule_name"] != "ZBVZeroBubble":  # PyTorch cannot evaluate under it
            self.model.eval()
            run_step(self.schedule, self.stages, *batch(99), train=False)
            self.model.train()
        if self.whole is not None:
            losses = self.whole.step(at)
            assert self.losses in ([], losses), f"losses of step {at} are not those with boundaries"
            for here, part in zip(self.mine, self.model, strict=True):
                for mine, expected in zip(part.parameters(), self.whole.cut[here].parameters(), strict=True):
                    assert torch.equal(mine, expected), f"stage {here} is not as with boundaries after step {at}"

    def equal_now(self, at):
        return False

    def parameters(self):
        """Of this rank; replicas are compared by the sum of their differences."""
        own = torch.cat([p.detach().double().reshape(-1) for p in self.model.parameters()])
        if self.c["inside"]:
            ranks = [None] * self.size
            dist.all_gather_object(ranks, own)
            assert torch.equal(own, ranks[(self.rank + 2) % 4]), "replicas of a stage differ"
        return own

    def feedback(self):
        return {}

    def state(self):
        stages = [stage.state_dict() for stage in self.stages]
        return super().state() | {"stages": stages, "handles": [handle.state_dict() for handle in self.handles],
                                  "whole": self.whole and self.whole.state()}  # fmt: skip

    def load(self, saved):
        super().load(saved)
        for several, states in ((self.stages, saved["stages"]), (self.handles, saved["handles"])):
            for each, state in zip(several, states, strict=True):
                each.load_state_dict(state)
        if self.whole is not None:
            self.whole.load(saved["whole"])

    def close(self):
        for handle in self.handles:
            handle.remove()


class Whole:
    """The whole model in one process, with boundaries where stages end; those between stages of one rank are none."""

    def __init__(self, c, number, depth):
        self.c, self.cut = c, parts(number)
        local = depth - 1 if c["schedule_name"] == "ZBVZeroBubble" else -1
        options = {"seed": c["seed"], "microbatches": c["microbatches"], **c.keywords()}
        self.boundaries = [
            nb.Boundary(*(("none", "none") if at == local else (c["forward"], c["backward"])), index=at, **options)
            for at in range(number - 1)
        ]
        behind = zip(self.boundaries, self.cut[1:], strict=True)
        self.model = nn.Sequential(self.cut[0], *(module for pair in behind for module in pair))
        self.optimizers = optimizers_of(self.model, c["optimizer"])
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in self.optimizers] if c["schedule"] else []

    def step(self, at):
        number, losses = self.c["microbatches"], []
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for x, y, samples in zip(*(torch.tensor_split(t, number) for t in (*batch(10 * at), ids(at))), strict=True):
            for boundary in self.boundaries:
                boundary.samples = samples
            loss = loss_fn(self.model(x), y)
            loss.backward()
            losses.append(loss.item())
        for p in self.model.parameters():
            p.grad.div_(number)
        for each in (*self.optimizers, *self.schedules):
            each.step()
        return losses

    def state(self):
        return [each.state_dict() for each in (self.model, *self.optimizers, *self.schedules)]

    def load(self, saved):
        for each, state in zip((self.model, *self.optimizers, *self.schedules), saved, strict=True):
            each.load_state_dict(state)
