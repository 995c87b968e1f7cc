"""Train a row with compressed activations: count the bytes kept for backward, measure the gradient error, trace ranges.

Source: Pan et al. 2021, Mesa (arXiv 2111.11124).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

import narrowband as nb
from narrowband.activations import Saved
from reproduce.tasks import Task

__all__ = ["Activations", "gradient", "read_policy"]

#: How many times during training the ranges are recorded.
_POINTS = 50


def read_policy(told: str) -> nb.ActivationPolicy:
    """Read an activation policy from JSON. As in the paper, results that could be recomputed are kept, unless the JSON
    sets ``derive``.

    Raises:
        ValueError: the text is not JSON, or not a policy; the message says why.
    """
    try:
        fields = json.loads(told)
    except ValueError as error:
        raise ValueError(f"activations={told!r} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f'activations={told!r} is no policy: expected fields of one, such as {{"bits": 4}}')
    return nb.ActivationPolicy.from_dict({"derive": False, **fields})


class Activations:
    """Compress the activations that a model saves for backward during training, and report what was kept.

    Args:
        policy: how many bits each kind of saved tensor gets.
        model: the model whose activations are compressed.
        steps: number of training steps.
        trace: whether to record the ranges during training.
        amp: whether gradients are compared under bfloat16 autocast.
    """

    def __init__(
        self, policy: nb.ActivationPolicy, model: nn.Module, steps: int, *, trace: bool = False, amp: bool = False
    ) -> None:
        self._policy, self._model, self._trace, self._amp = policy, model, trace, amp
        self._context = nb.compress_activations(model, policy=policy)
        self._saved: Saved | None = None
        self._points = {round(steps * point / _POINTS) for point in range(1, _POINTS + 1)}
        self._noted: list[tuple[int, dict[str, Tensor]]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compress during the forward pass of one step. A policy that is off only counts bytes, and only once."""
        if self._policy.is_off and self._saved is not None:
            yield
            return
        with self._context as self._saved:
            yield

    def note(self, step: int) -> None:
        """Record the ranges after ``step`` steps, if this is one of the points to record."""
        if self._trace and step in self._points:
            self._noted.append((step, self._context.state_dict()["estimates"]))

    def report(self, task: Task) -> dict[str, Any]:
        """Return what :func:`reproduce.training.train` adds to the result of a row with compressed activations."""
        saved = self._saved or Saved()
        told = {"bits": self._policy.bits} | replace(self._policy, derive=True).to_dict()
        if self._policy.derive:  # as in the specs of rows, where leaving ``derive`` out means False
            told["derive"] = True
        found = {
            "spec": json.dumps(told),
            "plain_bytes": saved.raw_bytes,
            "kept_bytes": saved.kept_bytes,
            "by_operator": {name: [kept.raw_bytes, kept.kept_bytes] for name, kept in saved.by_operator.items()},
            "gradient_error": self._gradient_error(task),
        }
        return found | {"ranges": self._ranges()} if self._trace else found

    def _ranges(self) -> dict[str, Any]:
        """Return the ranges recorded in the first, the middle and the last block."""
        count = len(cast("nn.Sequential", self._model.get_submodule("blocks")))
        blocks = [f"blocks.{at}" for at in sorted({0, count // 2, count - 1})]
        known = self._noted[-1][1] if self._noted else {}
        names = [name for name in known if any(name.startswith((f"{block}.", f"{block}:")) for block in blocks)]
        alpha, beta = (
            {name: [_rounded(held[name][part]) for _, held in self._noted] for name in names} for part in (0, 1)
        )
        return {"steps": [step for step, _ in self._noted], "blocks": blocks, "alpha": alpha, "beta": beta}

    def _gradient_error(self, task: Task) -> float | None:
        x, y = next(task.batches(0))
        exact, rough = (
            gradient(self._model, task, x, y, keeping, amp=self._amp) for keeping in (nullcontext(), self._context)
        )
        error = ((rough - exact).norm() / exact.norm()).item()
        return error if math.isfinite(error) else None


def gradient(
    model: nn.Module, task: Task, x: Tensor, y: Tensor, keeping: AbstractContextManager[Any], *, amp: bool = False
) -> Tensor:
    """Compute the gradient of a batch, of all trained parameters in one vector; ``p.grad`` is not touched.

    Args:
        model: the model to differentiate.
        task: provides the loss.
        x: inputs.
        y: targets.
        keeping: the context manager around forward, such as one that compresses activations.
        amp: whether forward and the loss run under bfloat16 autocast.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=amp), keeping:
        loss = task.loss(model(x), y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])


def _rounded(values: Tensor) -> list[float]:
    """Round to 4 significant digits: a plot shows no more."""
    return [float(f"{value:.4g}") for value in values.tolist()]
