"""Gradients, and updates, averaged with compression."""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.compositions.models import model_of
from tests.compositions.training import Training, optimizers_of
from tests.gradients.shards import whole

__all__ = ["Gradients", "Updates"]


def spec_of(c):
    """The spec, or the policy that begins with it."""
    policies = {
        "lgreco": lambda: nb.LGreCo(c["spec"], every=3),
        "kmeans": lambda: nb.KMeans(c["spec"], every=3, clusters=2),
        "topk": lambda: nb.GlobalTopK(0.1, every=2),
        "threshold": lambda: nb.HardThreshold(0.01, every=2),
        "accordion": lambda: nb.Accordion(c["spec"], "none", every=2),
    }
    return policies[c["policy"]]() if c["policy"] else c["spec"]


def conserves(c):
    """Whether what was delivered and what is still to come make up the sum of the means, but for rounding in float32.

    Not so: feedback without residuals, or with rounded ones; the mean of senders; and sums in halves, of which nobody
    knows what they round off.
    """
    spec = c["spec"]
    if c["dtype"] != "float32" or "16" in f"{spec} {c['small']}" or "store" in spec or "senders" in spec:
        return False
    if c["policy"] in ("topk", "threshold"):
        return True
    if spec.startswith("powersgd"):
        return c["small"] is None
    return "+ef" in spec and "+ef21" not in spec


def shard_of(x):
    """What this rank has of a tensor, in float64 and not in the graph."""
    return (x.to_local() if hasattr(x, "to_local") else x).detach().double()


class Averages(Training):
    """What gradients and updates share: they are seen per parameter, and what is still to come can be sent at once."""

    def watch(self):
        if conserves(self.c) and self.c["model"] != "sparse":
            self.own = {n: torch.zeros_like(shard_of(p)) for n, p in self.model.named_parameters()}
            self.delivered = {n: torch.zeros_like(shard_of(p)) for n, p in self.model.named_parameters()}

    def compiled(self):
        self.net = torch.compile(self.net, backend="aot_eager") if self.c["compiled"] else self.net

    def of_all_layers(self, handle):
        """Have every layer sent whole."""
        names = list(handle.layer_stats())
        if names:
            handle.set_layers(dict.fromkeys(names, "none"))

    def parameters(self):
        return whole(self.model)


class Gradients(Averages):
    def build(self):
        c = self.c
        self.twin = None
        if c["wrapper"] == "sharded":
            mesh = init_device_mesh("cpu", (2, self.size // 2), mesh_dim_names=("nodes", "shards"))
            self.group = mesh["nodes"].get_group()
            self.shard(self.model, mesh["shards"])
        if c["wrapper"] in ("ddp", "nodes"):
            names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")
            self.net = DistributedDataParallel(self.model, **{name: c[name] for name in names if name in c})
        self.wrapped = self.net
        self.handle = self.compress(spec_of(c), **c.keywords())
        self.compiled()
        self.optimizers = optimizers_of(self.model, c["optimizer"])
        self.watch()
        if self.own is not None and c["wrapper"] == "sharded":
            self.twin = self.shard(self.build_model(), mesh["shards"])
        for name, p in self.model.named_parameters() if self.own is not None and self.twin is None else ():
            p.register_hook(lambda gradient, name=name: self.see(name, gradient))
        self.step_own = {}

    def shard(self, model, mesh):
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def compress(self, spec, **options):
        wrapper = self.c["wrapper"]
        options |= {"seed": self.c["seed"]}
        if wrapper == "averager":
            return nb.Averager(self.model, spec, **options)
        if wrapper == "nodes":
            options["nodes"] = 2
        if wrapper == "sharded":
            options["process_group"] = self.group
        return nb.compress_gradients(self.wrapped, spec, **options)

    def see(self, name, gradient):
        self.step_own[name] = self.step_own.get(name, 0) + gradient.double()

    def no_sync(self):
        if self.c["wrapper"] in ("ddp", "nodes"):
            return self.wrapped.no_sync()
        if self.c["wrapper"] == "averager":
            return contextlib.nullcontext()
        return self.handle.no_sync()

    def backward(self, at):
        self.step_own = {}
        super().backward(at)
        if self.c["wrapper"] == "averager":
            self.handle.average()

    def backward_of(self, at, micro, *, bad=False):
        super().backward_of(at, micro, bad=bad)
        if self.twin is not None:  # also where the gradients are bad: the ranks of a node share its passes
            self.see_by_twin(at, micro)

    @torch.no_grad()
    def see_by_twin(self, at, micro):
        """FSDP2 shows the gradients of a node to no hook. Those of an equal model, which nobody averages, are equal."""
        if not micro:
            self.twin.zero_grad()
            for own, p in zip(self.twin.parameters(), self.model.parameters(), strict=True):
                own.to_local().copy_(p.to_local())
        net, self.net = self.net, self.twin
        with torch.enable_grad():
            super().backward_of(at, micro)
        self.net = net
        self.step_own = {n: shard_of(p.grad) for n, p in self.twin.named_parameters() if p.grad is not None}

    def note(self):
        if self.own is None:
            return
        for name, gradient in self.step_own.items():
            self.own[name] += gradient
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.delivered[name] += shard_of(p.grad)

    def flush(self):
        """A step more, with a spec that sends all, from the state of the one that did not."""
        own = self.c.keywords()
        self.model.requires_grad_(True)
        if not self.c["spec"].startswith("powersgd"):
            state = self.handle.state_dict()
            self.handle.remove()
            small = {"small": "fused"} if self.c["small"] else {}
            kept = {name: value for name, value in own.items() if name in ("min_numel",)}
            self.handle = self.compress("none+ef", **kept, **small)
            self.handle.load_state_dict(state)
        self.handle.resume()
        self.of_all_layers(self.handle)
        self.model.zero_grad()
        self.step_own = {}
        self.backward_of(5, 0)  # a rank whose gradient is zero would keep its residual
        if self.c["wrapper"] == "averager":
            self.handle.average()
        self.note()

    def resumes_exactly(self):
        """DDP's buckets have another layout in the steps after a start, and so sums another order."""
        ddp = self.c["wrapper"] in ("ddp", "nodes")
        return not ddp or self.size == 2 or bool(self.c["find_unused_parameters"])


class Updates(Averages):
    #: A replica whose update is not finite counts as one that has changed nothing; others deliver theirs.
    rolls_back = False

    def build_model(self):
        replica = self.rank if self.c["wrapper"] == "module" else self.rank // 2  # set-up makes them equal
        return model_of(self.c["model"], self.dtype, seed=replica, channels_last=self.c["channels_last"])

    def build(self):
        c = self.c
        self.in_round = False
        if c["wrapper"] != "module":
            mesh = init_device_mesh("cpu", (self.size // 2, 2), mesh_dim_names=("replicas", "ranks"))
            self.group = mesh["replicas"].get_group()
            if c["wrapper"] == "ddp":
                self.net = DistributedDataParallel(self.model, process_group=mesh["ranks"].get_group(),
                                                   find_unused_parameters=c["model"] == "branches")  # fmt: skip
            else:
                fully_shard(self.model, mesh=mesh["ranks"])
        self.optimizers = optimizers_of(self.model, c["optimizer"])
        plain = {"outer": 1.0, "residuals": "apart", "bad": None, "fragments": 1, "overlap": 0}
        if all(c[option] == value for option, value in plain.items()) and not c["frozen"]:
            self.watch()
        if self.own is not None:
            self.optimizers[-1].register_step_post_hook(lambda *_: self.note_update())
        self.common = None
        self.handle = self.compress(spec_of(c), **c.keywords())
        self.compiled()

    def compress(self, spec, **options):
        given = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        model = self.net if self.c["wrapper"] == "ddp" else self.model
        return nb.compress_updates(model, given, spec, seed=self.c["seed"], process_group=self.group, **options)

    def may_step(self):
        """Nobody looks: a replica tells the others nothing of its gradients."""
        return True

    def note_update(self):
        """Before the handle's own hook: this replica's parameters before the round."""
        self.before = {name: shard_of(p) for name, p in self.model.named_parameters()}

    def take_step(self):
        if self.own is not None and self.common is None:
            self.common = {name: shard_of(p) for name, p in self.model.named_parameters()}
        rounds = self.handle.step
        super().take_step()
        self.in_round = self.handle.step > rounds
        if self.own is not None and self.in_round:
            self.note_round()

    def note_round(self):
        for name, p in self.model.named_parameters():
            self.own[name] += self.before[name] - self.common[name]
            self.delivered[name] += shard_of(p) - self.common[name]
        self.common = None

    def rounding(self):
        """The last bit of the parameters, to which every step adds."""
        largest = torch.cat([shard_of(p).abs().reshape(-1) for p in self.model.parameters()])
        return self.c["steps"] * torch.finfo(torch.float32).eps * largest

    def equal_now(self, at):
        c = self.c
        return self.in_round and c["fragments"] == 1 and not c["overlap"]

    def finish(self):
        """A last round, after which all replicas are equal."""
        self.handle.average()

    def flush(self):
        """A round more, with a spec that sends all, from the state of the one that did not."""
        options = {
            name: value for name, value in self.c.keywords().items() if name in ("min_numel", "buffers", "every")
        }
        if self.handle.steps:  # not counted yet: the handle's last round
            self.before = {name: shard_of(p) for name, p in self.model.named_parameters()}
            self.handle.average()
            self.note_round()
        if not self.c["spec"].startswith("powersgd"):
            state = self.handle.state_dict()
            self.handle.remove()
            self.handle = self.compress("none+ef", **options, **({"small": "fused"} if self.c["small"] else {}))
            self.handle.load_state_dict(state)
        self.handle.resume()
        self.of_all_layers(self.handle)
        self.common = None
        for at in range(self.c["every"]):  # a replica that has changed nothing would keep its residual
            self.step(100 + at)
