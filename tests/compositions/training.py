"""What all places share: one rank's model, optimizers and handle, a step of the loop, and what is saved."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import narrowband as nb
from tests.compositions.models import inputs_of, model_of

__all__ = ["Training", "loss_of", "optimizers_of"]


def loss_of(outputs):
    return outputs.float().square().mean()


def optimizers_of(model, kind):
    """A list of optimizers. They divide by no gradient of zero: ranks whose gradients differ in the last bit shall not
    go different ways.
    """
    parameters = list(model.parameters())
    # DTensor makes each operator slow.
    adamw = {"lr": 1e-3, "eps": 1e-3, "fused": any(isinstance(p, DTensor) for p in parameters)}
    if kind == "two" and len(parameters) > 1:
        return [torch.optim.SGD(parameters[:1], lr=0.01), torch.optim.AdamW(parameters[1:], **adamw)]
    if kind == "groups":
        groups = [{"params": parameters[::2], "lr": 3e-4}, {"params": parameters[1::2], "weight_decay": 0.3}]
        return [torch.optim.AdamW([group for group in groups if group["params"]], **adamw)]
    if kind == "adamw":
        return [torch.optim.AdamW(parameters, **adamw)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(parameters, lr=1e-3)]
    return [torch.optim.SGD(parameters, lr=0.01, momentum=0.9 if kind == "momentum" else 0.0)]


class Training:
    """One rank's part of a composition. Places say what they build, and what a step is.

    Attributes:
        bad: whether this rank's own gradients were inf or NaN in the latest step.
        stepped: whether the optimizers have stepped in it.
        group: the ranks that average; None: all.
        own, delivered: for each parameter, or this rank's shard of it, in float64, the sum of what this rank has given
            to averages so far, and of what all got; None if this composition does not conserve them, or nobody can see
            them.
    """

    #: Whether a bad step must leave the handle's state as it was.
    rolls_back = True

    def __init__(self, c, rank, size):
        self.c, self.rank, self.size = c, rank, size
        self.dtype = getattr(torch, c["dtype"])
        self.bad = self.stepped = False
        self.handle: Any = None
        self.net = self.model = self.build_model()
        self.kept = nb.compress_activations(self.model, policy=self.policy()) if c["activations"] else None
        self.own, self.delivered = None, None
        self.group: Any = None
        self.build()
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in self.optimizers] if c["schedule"] else []

    # ---- what places say ---------------------------------------------------------------------------------------------

    optimizers: list[torch.optim.Optimizer]

    def build_model(self):
        return model_of(self.c["model"], self.dtype, channels_last=self.c["channels_last"])

    def policy(self):
        """How saved activations are compressed, where they are."""
        return nb.ActivationPolicy(min_numel=1)

    def build(self):
        """Wrap the model, compress, and make the optimizers."""
        raise NotImplementedError

    def backward(self, at):
        """All that comes before the optimizers' step."""
        for micro in range(self.c["accumulate"]):
            last = micro == self.c["accumulate"] - 1
            with contextlib.nullcontext() if last else self.no_sync():
                self.backward_of(at, micro, bad=last and self.bad_at(at))

    def no_sync(self):
        return contextlib.nullcontext()

    def may_step(self):
        """Whether all ranks have finite gradients, and so take this step."""
        finite = all(bool(torch.isfinite(dense(p.grad)).all()) for p in self.model.parameters() if p.grad is not None)
        return self.on_all(finite)

    def equal_now(self, at):
        """Whether all ranks must have the same parameters after this step."""
        return True

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def step(self, at):
        self.bad = False
        self.change(at)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(at)
        self.stepped = self.may_step()
        if self.stepped:
            self.note()
            if self.c["clip"]:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.take_step()
        for schedule in self.schedules:
            schedule.step()

    def note(self):
        """Add up what was given and delivered in this step, before gradients are clipped."""

    def take_step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def backward_of(self, at, micro, *, bad=False):
        generator = torch.Generator().manual_seed(1_000_003 * self.c["seed"] + 1000 * at + 10 * micro + self.rank)
        x = inputs_of(self.c["model"], generator, self.dtype, samples=4 + at % 2)
        with self.activations():
            loss = loss_of(self.net(x)) / self.c["accumulate"]
        if bad:
            self.bad = True
            loss = loss * torch.inf if self.c["bad_in"] == "loss" else loss
        hook = None
        if bad and self.c["bad_in"] == "element":
            hook = self.broken_parameter().register_hook(_with_nan)
        loss.backward()
        if hook is not None:
            hook.remove()

    def bad_at(self, at):
        return self.c["bad"] == at and self.c["bad_rank"] % self.size == self.rank

    def broken_parameter(self):
        """A parameter that every step uses, and that is not sparse."""
        used = [(name, p) for name, p in self.model.named_parameters() if p.numel() and p.requires_grad]
        used = [p for name, p in used if not any(word in name for word in ("branch", "norm", "table"))]
        return used[self.c["seed"] % len(used)]

    def activations(self):
        return contextlib.nullcontext() if self.kept is None else self.kept

    def change(self, at):
        """What users do between two steps, on all ranks."""
        if self.c["frozen"]:
            first, until = self.c["frozen"]
            next(iter(self.model.parameters())).requires_grad_(not first <= at < until)
        if self.c["pause"] and at in (1, 3):
            self.handle.pause() if at == 1 else self.handle.resume()
        if self.c["layers"] and at in (0, 2):
            dice = random.Random(self.c["seed"] + at)
            names = sorted(self.handle.layer_stats())
            some = dice.sample(names, dice.randint(1, len(names))) if names else []
            with contextlib.suppress(ValueError, nb.UnsupportedError):  # refused on all ranks, and no layer has changed
                self.handle.set_layers({name: dice.choice(LAYER_SPECS) for name in some})

    # ---- what is compared --------------------------------------------------------------------------------------------

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "handle": None if self.handle is None else self.handle.state_dict(),
            "activations": None if self.kept is None else self.kept.state_dict(),
        }

    def load(self, saved):
        self.model.load_state_dict(saved["model"])
        for several, states in ((self.optimizers, saved["optimizers"]), (self.schedules, saved["schedules"])):
            for each, state in zip(several, states, strict=True):
                each.load_state_dict(state)
        for each, state in ((self.handle, saved["handle"]), (self.kept, saved["activations"])):
            if each is not None:
                each.load_state_dict(state)

    def rounding(self):
        """What rounding may lose of each element that is conserved, beside a small part of the sum of all means."""
        return 0.0

    def resumes_exactly(self):
        return True

    def parameters(self):
        """All parameters that this rank can see, whole, in float64."""
        return torch.cat([x.detach().double().reshape(-1) for x in self.model.parameters()])

    def feedback(self):
        """What feedback holds, by name."""
        state = self.handle.state_dict()
        held = {"": state["feedback"], **state["others"]}
        return {f"{kind} {name}": x for kind, values in held.items() for name, x in values.items()}

    def flush(self):
        """Have everything delivered that is still to come."""
        raise NotImplementedError

    def sent(self):
        """The bytes that the handle says this rank has sent so far."""
        return 0 if self.handle is None else self.handle.stats().total.sent_bytes

    def close(self):
        if self.handle is not None:
            self.handle.remove()

    def on_all(self, value):
        """Whether this is true on all ranks."""
        found = torch.tensor(int(value))
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)


#: What single layers may get in place of the model's spec.
LAYER_SPECS = ("uniform:bits=4", "topk:density=0.2", "none", "sign", "randomk:density=0.3", "qsgd:bits=8")


def dense(gradient):
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _with_nan(gradient):
    gradient = gradient.clone()
    gradient[(-1,) * gradient.dim()] = torch.nan
    return gradient
