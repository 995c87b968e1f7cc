"""Training of :mod:`reproduce.cssgd` in one process: how many steps it takes, and which weights are best.

What a step computes does not depend on the link. So this module counts the steps, for many numbers of nodes and seeds,
and :mod:`reproduce.cssgd_ranks` measures how long a step takes. Rows that both modules train show that they agree.

* Synchronous methods, coded or not, all take the same step as one process that computes the whole mini-batch.
* With ASGD, a worker waits for the answer to its gradient, so every worker sends one gradient while each of the others
  sends one. Here workers take turns: each computes the gradient of its share with the parameters that it got after its
  last turn, n − 1 updates ago.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reproduce.baselines import Flat
from reproduce.cssgd_problem import Problem, Row

__all__ = ["best", "steps_to_target"]


class _Method(ABC):
    """A way to train in one process.

    Attributes:
        weights: the current flat parameters.
    """

    weights: Tensor

    def __init__(self, row: Row, problem: Problem) -> None:
        torch.manual_seed(row.seed)
        self.row, self.problem = row, problem
        self.model = problem.make()
        self.flat = Flat(self.model)

    @abstractmethod
    def step(self, step: int) -> None:
        """Train on one mini-batch."""

    def compute(self, samples: Tensor) -> None:
        """Compute the gradient of the mean loss of these samples, and leave it in ``flat``."""
        self.flat.gradient.zero_()
        self.problem.backward(self.model, samples)


class _Synchronous(_Method):
    def __init__(self, row: Row, problem: Problem) -> None:
        super().__init__(row, problem)
        self.weights = self.flat.weights

    def step(self, step: int) -> None:
        self.compute(self.problem.samples(step))
        self.flat.descend(self.row.lr)


class _InTurn(_Method):
    """ASGD with workers that take turns; keeps the server's weights, and those that each worker got last."""

    def __init__(self, row: Row, problem: Problem) -> None:
        super().__init__(row, problem)
        self.weights = self.flat.weights.clone()
        self._got = self.weights.repeat(row.nodes, 1)

    def step(self, step: int) -> None:
        for got, share in zip(self._got, self.problem.samples(step).view(self.row.nodes, -1), strict=True):
            self.flat.weights.copy_(got)
            self.compute(share)
            self.weights.add_(self.flat.gradient, alpha=-self.row.lr)
            got.copy_(self.weights)


class _Tester:
    """A second model, to test weights without touching the one in training."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._model = problem, problem.make()
        self._flat = Flat(self._model)

    def accuracy(self, weights: Tensor) -> float:
        """Return the accuracy of weights, in percent of the test images."""
        self._flat.weights.copy_(weights)
        return 100.0 * self._problem.right(self._model, self._problem.tested) / self._problem.tested.numel()

    def loss(self, weights: Tensor, samples: Tensor) -> float:
        """Return the mean loss of these training images."""
        self._flat.weights.copy_(weights)
        return self._problem.loss(self._model, samples)


def steps_to_target(row: Row, problem: Problem, tell: Callable[..., None]) -> dict[str, Any]:
    """Train until the target.

    The result has ``curve``: [steps, accuracy in percent] of every test; and ``reached``: the first number of steps
    at the target, or None where ``row.steps`` are not enough.
    """
    method = (_InTurn if row.method == "asgd" else _Synchronous)(row, problem)
    tester = _Tester(problem)
    curve: list[list[float]] = []
    began = time.perf_counter()
    while not (curve and (curve[-1][1] >= row.target or curve[-1][0] >= row.steps)):
        done = int(curve[-1][0]) if curve else 0
        for step in range(done, done + row.every):
            method.step(step)
        curve.append([done + row.every, tester.accuracy(method.weights)])
        tell(event="test", accuracy=curve[-1][1], seconds=time.perf_counter() - began)
    steps, accuracy = curve[-1]
    return {"curve": curve, "reached": int(steps) if accuracy >= row.target else None}


def best(row: Row, problem: Problem, tell: Callable[..., None]) -> dict[str, Any]:
    """Train for ``row.steps`` steps and keep the weights with the least loss so far: line 8 of the paper's algorithm 1.

    The loss F is measured on ``problem.judged``, every ``row.every`` steps. The result has ``curve``: [steps, F,
    accuracy of the weights, accuracy of the kept weights]; ``step_s``: seconds of a step; ``whole_s``: seconds of
    computing F over all training images, as line 8 asks.
    """
    method, tester = _Synchronous(row, problem), _Tester(problem)
    least, kept_accuracy = float("inf"), 0.0
    curve, seconds = [], 0.0
    for done in range(row.every, row.steps + 1, row.every):
        began = time.perf_counter()
        for step in range(done - row.every, done):
            method.step(step)
        seconds += time.perf_counter() - began
        accuracy, loss = tester.accuracy(method.weights), tester.loss(method.weights, problem.judged)
        if loss < least:
            least, kept_accuracy = loss, accuracy
        curve.append([done, loss, accuracy, kept_accuracy])
        tell(event="test", accuracy=accuracy, seconds=seconds)
    began = time.perf_counter()
    tester.loss(method.weights, problem.trained)
    return {"curve": curve, "step_s": seconds / curve[-1][0], "whole_s": time.perf_counter() - began}
