"""A model that FSDP2 shards among all ranks, with compression inside."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowband as nb
from tests.compositions.models import inputs_of
from tests.compositions.training import Training, optimizers_of
from tests.gradients.shards import whole

__all__ = ["Shards"]


class Shards(Training):
    def build(self):
        c, options = self.c, {"reshard_after_forward": self.c["reshard_after_forward"]}
        if c["mixed"]:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if c["units"]:
            for part in self.model.children():
                if c["model"] in ("mlp", "transformer") and any(True for _ in part.parameters()):
                    fully_shard(part, **options)
        fully_shard(self.model, **options)
        self.handle = nb.compress_shards(self.model, c["spec"], c["parameters"], seed=c["seed"], **c.keywords())
        self.net = torch.compile(self.model, backend="aot_eager") if c["compiled"] else self.model
        self.optimizers = optimizers_of(self.model, c["optimizer"])

    def backward(self, at):
        for micro in range(self.c["accumulate"]):
            last = micro == self.c["accumulate"] - 1
            if self.c["marks_last"]:
                self.model.set_requires_gradient_sync(last)
            self.backward_of(at, micro, bad=last and self.bad_at(at))

    def step(self, at):
        super().step(at)
        if self.c["evaluates"]:
            with torch.no_grad():
                self.net(inputs_of(self.c["model"], torch.Generator().manual_seed(at)))

    def parameters(self):
        return whole(self.model)

    def feedback(self):
        """There is none: a bad step only must not change the references, of which users see nothing."""
        return {}
