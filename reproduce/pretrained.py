"""Pre-train a model on one text before it is fine-tuned on another. It stands in for a model from a hub.

Every row of one seed begins with the same model, to the bit. The model is trained once, with a random state of its own,
and kept in the cache folder under a name that holds everything it depends on. Processes that need it at the same time
wait for the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from narrowband.files import whole
from narrowband.report.record import versions
from reproduce.data import cache_folder

__all__ = ["PRETRAINING", "Pretraining", "pretrained"]


@dataclass(frozen=True)
class Pretraining:
    """Settings of pre-training: AdamW, with a learning rate that rises and then falls along a cosine to zero."""

    epochs: int = 4
    batch: int = 32
    lr: float = 2e-3
    rises: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0

    def words(self) -> str:
        """Describe the settings, for the pages of results."""
        one, two = self.betas
        return (
            f"{self.epochs} epochs of AdamW, β₁ {one:g}, β₂ {two:g}, whose learning rate rises to {self.lr:g} over "
            f"the first {self.rises:.0%} of steps, then falls along a cosine to zero; weight decay "
            f"{self.weight_decay:g}; batch {self.batch}; gradients clipped at norm {self.clip:g}"
        )

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step."""
        rising = max(1, round(self.rises * steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


PRETRAINING = Pretraining()


class Reading(Protocol):
    """The part of a task of one process that pre-training needs."""

    seed: int

    @property
    def steps(self) -> int:
        """Steps of an epoch."""

    def model(self) -> nn.Module:
        """Return a new model, initialized from torch's global generator."""

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, step by step."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""


def pretrained(task: Reading, digest: str, how: Pretraining = PRETRAINING) -> nn.Module:
    """Return the task's model for the task's seed, pre-trained on the task's text.

    Args:
        task: a task of one process, with the batch of ``how``.
        digest: digest of the data that the task reads.
        how: settings of pre-training.
    """
    identity = {"how": asdict(how), "seed": task.seed, "text": digest, "steps": task.steps, "versions": versions()}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    place = cache_folder() / "models" / f"{name}.pt"
    place.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]), _alone(place.with_suffix(".lock")):
        torch.manual_seed(task.seed)
        model = task.model()
        if place.exists():
            model.load_state_dict(torch.load(place, weights_only=True))
        else:
            _read(model, task, how)
            with whole(place) as kept:  # other processes may read the file at any time
                torch.save(model.state_dict(), kept)
    return model


def _read(model: nn.Module, task: Reading, how: Pretraining) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=how.lr, betas=how.betas, weight_decay=how.weight_decay, fused=True
    )
    step = 0
    for epoch in range(how.epochs):
        for x, y in task.batches(epoch):
            optimizer.param_groups[0]["lr"] = how.rate(step, how.epochs * task.steps)
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), how.clip)
            optimizer.step()
            step += 1


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Let only one process at a time into this context."""
    with place.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
