"""The rows that :mod:`reproduce.cssgd` measures, and the problem that they train: a model and its images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce.data import Images, cifar10, mnist
from reproduce.models import convolutional, perceptron
from reproduce.tasks import own_part

__all__ = [
    "ALL_REDUCE",
    "ALONE",
    "ASGD",
    "BASELINES",
    "CHOSEN",
    "CLASSES",
    "FIGURES",
    "FILES",
    "METHODS",
    "MULTICAST",
    "NAMED",
    "REDUNDANCIES",
    "SAVED",
    "SECTIONS",
    "TITLES",
    "UNICAST",
    "Problem",
    "Row",
    "coded",
    "images_of",
]

TITLES = {"dnn": "MNIST, DNN", "cnn": "CIFAR-10, CNN"}
#: The numbers of the paper's figures of time against the number of nodes; and how much less time the best r takes there
#: on average, in percent, than SSGD by multicast and than ASGD.
FIGURES = {"dnn": 14, "cnn": 15}
SAVED = {"dnn": (53.97, 26.89), "cnn": (39.11, 26.37)}

#: Task → the files that it reads.
FILES = {
    "dnn": ("mnist/train.parquet", "mnist/test.parquet"),
    "cnn": ("cifar10/train.parquet", "cifar10/test.parquet"),
}

#: Sections of rows, in the order of measuring; the bytes of all numbers of nodes come first.
SECTIONS = ("bytes", "nodes", "steps", "shares", "best", "choice", "train", "batch")

#: How gradients are combined into a step. ``alone``: every rank computes the whole mini-batch, and none sends.
METHODS = ("unicast", "multicast", "asgd", "coded", "chosen", "all-reduce", "alone")

UNICAST, MULTICAST, ASGD, CHOSEN = "SSGD unicast", "SSGD multicast", "ASGD", "CSSGD, chosen"
ALL_REDUCE, ALONE = "all-reduce", "alone"
#: Name of a row in tables → its method.
NAMED = {
    UNICAST: "unicast", MULTICAST: "multicast", ASGD: "asgd", CHOSEN: "chosen", ALL_REDUCE: "all-reduce",
    ALONE: "alone",
}  # fmt: skip
#: The methods that the paper compares with.
BASELINES = (UNICAST, MULTICAST, ASGD)
#: The redundancies r that the paper trains with.
REDUNDANCIES = (2, 3)

#: Number of classes in both data sets.
CLASSES = 10

#: Accuracies, and the loss by which weights are kept, are measured on this many images, the first of their set.
_TESTED = 2000
_AT_ONCE = 500


def coded(redundancy: int) -> str:
    """Return the name of CSSGD with this redundancy in tables."""
    return f"CSSGD, r = {redundancy}"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kind: behind links (:mod:`reproduce.cssgd_ranks`)

            * ``bytes``: count the bytes of exchanging a vector;
            * ``batch``: time a few steps;
            * ``choice``: what :func:`narrowband.choose_redundancy` measures and chooses;
            * ``train``: train until the target;

            and in one process (:mod:`reproduce.cssgd_serial`)

            * ``steps``: count the steps until the target;
            * ``best``: keep the weights with the least loss.
        task: ``dnn`` or ``cnn``; ``bytes`` has none.
        name: the row's name in tables.
        nodes: number of nodes that compute; ``asgd`` has a server in addition.
        rate: rate of each link, in each direction; empty for what runs in one process.
        seed: of parameters and of the order of samples.
        batch: samples of a mini-batch, over all nodes.
        method: one of ``METHODS``.
        redundancy: r; used by the method ``coded`` and by the kinds ``batch`` and ``bytes``.
        group: number of nodes that share blocks, used by the same; 0: all nodes.
        lr: learning rate of plain SGD.
        target: test accuracy, in percent, that ends training.
        every: steps between two tests.
        steps: steps that are timed or counted; the most steps of training. ``asgd`` does as many on each node.
        limit_s: seconds after which training is given up.
        limit: use at most this many samples; None: all.
        classes: use only images of this many classes, the first ones.
        shares: shares of nodes, see :class:`narrowband.coded.Assignment`; empty: equal shares.
        sample_s: seconds that each node's emulated processor takes for a sample; empty: no emulation.
        section: one of ``SECTIONS``, where it differs from ``kind``.
    """

    kind: Literal["bytes", "batch", "choice", "train", "steps", "best"]
    task: str
    name: str
    nodes: int
    rate: str
    seed: int = 0
    batch: int = 256
    method: str = "coded"
    redundancy: int = 1
    group: int = 0
    lr: float = 0.0
    target: float = 0.0
    every: int = 1
    steps: int = 3
    limit_s: float = 60.0
    limit: int | None = None
    classes: int = CLASSES
    shares: tuple[float, ...] = ()
    sample_s: tuple[float, ...] = ()
    section: str = ""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is none of {', '.join(METHODS)}")
        if self.batch % self.nodes:
            raise ValueError(f"a mini-batch of {self.batch} samples cannot be shared evenly by {self.nodes} nodes")
        for name in ("shares", "sample_s"):  # these are lists when read from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def serial(self) -> bool:
        """Whether the row runs in one process, without links."""
        return self.kind in ("steps", "best")

    @property
    def ranks(self) -> int:
        """How many processes the row takes."""
        return 1 if self.serial else self.nodes + (self.method == "asgd")


def images_of(task: str, directory: Path | None = None) -> Images:
    """Return the images of a task."""
    return {"dnn": mnist, "cnn": cifar10}[task](directory)


class Problem:
    """A model and its images, the same on all ranks. Samples are identified by index; images are not augmented.

    Args:
        row: gives task, batch, seed, classes and limit.
        directory: the data folder; None: see :mod:`reproduce.data`.

    Attributes:
        tested: indices of the test images that accuracies are measured on.
        judged: indices of the training images that the loss by which weights are kept is measured on.
        trained: indices of all training images.
    """

    def __init__(self, row: Row, directory: Path | None = None) -> None:
        self.make: Callable[[], nn.Module] = {"dnn": perceptron, "cnn": convolutional}[row.task]
        images = images_of(row.task, directory)
        parts = (images.train_x, images.train_y, images.test_x, images.test_y)
        train_x, train_y, test_x, test_y = (part[: row.limit] for part in parts)
        self._images = images = Images(train_x, train_y, test_x, test_y, images.digest)
        self._batch, self._seed = row.batch, row.seed
        self._epoch, self._order = -1, torch.empty(0, 0)
        pixels = images.train_x[:1000].float()
        self._mean, self._std = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)
        allowed = ((labels < row.classes).nonzero().flatten() for labels in (images.train_y, images.test_y))
        self.trained, tested = allowed
        self.tested, self.judged = tested[:_TESTED], self.trained[:_TESTED]
        self._steps = self.trained.numel() // row.batch

    def samples(self, step: int) -> Tensor:
        """Return the indices of the samples in the mini-batch of a step."""
        epoch, at = divmod(step, self._steps)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000 + epoch)
            order = self.trained[torch.randperm(self.trained.numel(), generator=generator)]
            self._epoch, self._order = epoch, own_part(order, self._batch, 0, 1)
        return self._order[at]

    def backward(self, model: nn.Module, samples: Tensor) -> None:
        """Add the gradient of the mean loss of these samples to the parameters' gradients."""
        logits = model(self._inputs(self._images.train_x[samples]))
        torch.autograd.backward(F.cross_entropy(logits, self._images.train_y[samples]))

    def loss(self, model: nn.Module, samples: Tensor) -> float:
        """Return the mean loss of these training images."""
        total = 0.0
        with torch.no_grad():
            for part in torch.split(samples, _AT_ONCE):
                logits = model(self._inputs(self._images.train_x[part]))
                total += F.cross_entropy(logits, self._images.train_y[part], reduction="sum").item()
        return total / samples.numel()

    def right(self, model: nn.Module, tested: Tensor) -> int:
        """Return how many of these test images are classified correctly."""
        with torch.no_grad():
            parts = [model(self._inputs(self._images.test_x[part])).argmax(1) for part in torch.split(tested, _AT_ONCE)]
        return int((torch.cat(parts) == self._images.test_y[tested]).sum()) if parts else 0

    def _inputs(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self._mean) / self._std
