"""Coded data parallelism: blocks of a mini-batch that several ranks compute."""

from __future__ import annotations

import copy

import torch
from torch import nn

import narrowband as nb
from tests.compositions.models import inputs_of
from tests.compositions.training import Training, loss_of, optimizers_of

__all__ = ["Coded"]


class Coded(Training):
    def policy(self):
        """Ranks that compute a block must get the same bits."""
        return nb.ActivationPolicy(granularity=256, rounding="nearest", min_numel=256)

    def build_model(self):
        model = super().build_model()
        return nn.Sequential(model, nn.Dropout(0.2)) if self.c["dropout"] else model

    def build(self):
        c = self.c
        self.net = nb.CodedDataParallel(self.model, transport="broadcast", seed=c["seed"], **c.keywords())
        self.optimizers = optimizers_of(self.model, c["optimizer"])
        if c["bits"] == 32 and not c["dropout"] and not c["activations"]:
            self.plain = copy.deepcopy(self.model)
            self.own = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.model.named_parameters()}
            self.delivered = copy.deepcopy(self.own)

    def no_sync(self):
        return self.net.no_sync()

    def backward(self, at):
        self.batches = []
        super().backward(at)

    def bad_at(self, at):
        """All ranks see a sample that is bad, and those compute it whose blocks have it."""
        return self.c["bad"] == at

    def backward_of(self, at, micro, *, bad=False):
        generator = torch.Generator().manual_seed(1_000_003 * self.c["seed"] + 1000 * at + 10 * micro)
        whole = inputs_of(self.c["model"], generator, samples=3 * self.net.assignment.blocks + at % 2)
        if bad:
            whole[self.c["bad_rank"]] = torch.inf
        self.batches.append(whole)
        (x,) = self.net.split(whole)
        with self.activations():
            loss = loss_of(self.net(x)) / self.c["accumulate"]
        self.bad |= bad
        loss.backward()

    def note(self):
        if self.own is None:
            return
        with torch.no_grad():
            for plain, p in zip(self.plain.parameters(), self.model.parameters(), strict=True):
                plain.copy_(p)
        self.plain.zero_grad()
        for x in self.batches:
            (loss_of(self.plain(x)) / len(self.batches)).backward()
        for (name, plain), p in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            self.own[name] += plain.grad.double()
            self.delivered[name] += p.grad.double()

    def flush(self):
        """Nothing is still to come."""

    def feedback(self):
        return {}

    def state(self):
        return super().state() | {"model": self.net.state_dict()}

    def load(self, saved):
        self.net.load_state_dict(saved["model"])
        super().load({**saved, "model": self.model.state_dict()})
