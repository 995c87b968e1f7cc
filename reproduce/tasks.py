"""Tasks: a model, its data in an order that depends on the seed alone, and a metric.

Every rank draws the same order of samples and takes its part of each global batch. So rows with the same seed see the
same batches, whatever their ranks send each other.

Shapes: B batch, L sequence, V vocabulary, N samples, C channels, H and W pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowband.bench.models import GPT, GPTConfig, ViT
from reproduce.data import Images, Text, cifar10, tiny_shakespeare, wikitext2
from reproduce.models import WIDTHS, CharLSTM, Llama, LlamaConfig, ResNet
from reproduce.pretrained import PRETRAINING, pretrained

__all__ = ["TASKS", "Task", "augmented", "in_words", "limited", "load", "own_part", "window_starts"]

#: Mean and standard deviation of CIFAR-10's channels, on the scale from 0 to 255.
_MEAN = (125.3, 123.0, 113.9)
_STD = (63.0, 62.1, 66.7)
_BORDER = 4

#: Samples per forward pass in evaluation.
_IMAGES_AT_ONCE = 125
_WINDOWS_AT_ONCE = 32

#: Held-out windows for the metric of a text, spread evenly: enough that its noise is far below differences of rows.
_HELDOUT_WINDOWS = 1024

#: A model with a larger loss than this, in nats, has diverged; a uniform guess of bytes has 5.5.
_MOST_NATS = 50.0

#: Length of the windows in which a character model is trained and evaluated, each from a state of zeros.
_CHARACTERS = 64
_HIDDEN = 256
_GPT = GPTConfig(vocab=256, dim=128, blocks=4, heads=4, sequence=128, batch=8)

#: A GPT for the smaller text, as large as that of nanoGPT's script for CPUs, which trains on the same text.
_SMALL_GPT = GPTConfig(vocab=256, dim=128, blocks=4, heads=4, sequence=64, batch=12)

#: A Llama of 1.1 million parameters for characters: its rows take minutes on one core.
_LLAMA = LlamaConfig(dim=128, blocks=5, heads=4, hidden=384, sequence=64)

#: DeiT-Ti's three heads over 65 tokens, four times narrower and with five of its twelve blocks.
VIT = {"dim": 48, "heads": 3, "blocks": 5, "image": 32, "patch": 4, "classes": 10}

#: Purposes of generators. The purpose is part of a generator's seed, so that their numbers are independent.
_ORDER, _AUGMENTATION = 0, 1


def _generator(seed: int, purpose: int, epoch: int, rank: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(((seed * 1_000 + epoch) * 1_000 + rank) * 10 + purpose)


def own_part(order: Tensor, batch: int, rank: int, world_size: int) -> Tensor:
    """Return the samples of this rank, (steps, batch / world size): rank r takes the r-th part of every global batch.

    Samples that do not fill a last batch are left out.
    """
    steps = order.numel() // batch
    return order[: steps * batch].view(steps, world_size, batch // world_size)[:, rank]


class Task(ABC):
    """One rank's view of a task.

    Args:
        batch: global batch size; each rank sees its part.
        seed: of the order of samples and of augmentation.
        rank: this rank.
        world_size: number of ranks; divides ``batch``.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool]

    def __init__(self, batch: int, seed: int, rank: int, world_size: int) -> None:
        if batch % world_size:
            raise ValueError(f"a global batch of {batch} cannot be shared evenly by {world_size} ranks")
        self.batch = batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of an epoch."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """After how many ``blocks`` a pipeline of four stages would make its cuts; empty if the model is not cut."""
        return ()

    @property
    def pretrained(self) -> bool:
        """Whether a new model is pre-trained."""
        return False

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model, initialized from torch's global generator."""

    @abstractmethod
    def samples(self, epoch: int) -> Tensor:
        """Return the samples of this rank's batches as their positions in the data, int64 (steps, B)."""

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's inputs and targets, step by step."""

    @abstractmethod
    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def tally(self, model: nn.Module, at_once: int | None = None) -> tuple[float, float]:
        """Evaluate this rank's share of the held-out data; return a sum and a count, to be added up over ranks.

        Args:
            at_once: samples per forward pass; None: the fastest number.
        """

    @abstractmethod
    def value(self, total: float, count: float) -> float:
        """Return the metric, from sums over all ranks."""


class Classification(Task):
    """Classification of images. The metric is the share of the test set that is classified right.

    Training images are padded with a border of 4 pixels, cropped at random, and mirrored half of the time.
    """

    metric = "test accuracy, %"
    higher_is_better = True

    def __init__(self, batch: int, seed: int, rank: int, world_size: int, images: Images) -> None:
        super().__init__(batch, seed, rank, world_size)
        self.images = images

    @property
    def steps(self) -> int:
        return self.images.train_y.numel() // self.batch

    def samples(self, epoch: int) -> Tensor:
        order = torch.randperm(self.images.train_y.numel(), generator=_generator(self.seed, _ORDER, epoch))
        return own_part(order, self.batch, self.rank, self.world_size)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = _generator(self.seed, _AUGMENTATION, epoch, self.rank)
        for at in self.samples(epoch):
            yield _normalized(augmented(self.images.train_x[at], generator)), self.images.train_y[at]

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)

    def tally(self, model: nn.Module, at_once: int | None = None) -> tuple[float, float]:
        right, count = 0, 0
        own = torch.arange(self.rank, self.images.test_y.numel(), self.world_size)
        for at in torch.split(own, at_once or _IMAGES_AT_ONCE):
            logits = model(_normalized(self.images.test_x[at].contiguous(memory_format=torch.channels_last)))
            right += int((logits.argmax(1) == self.images.test_y[at]).sum())
            count += at.numel()
        return right, count

    def value(self, total: float, count: float) -> float:
        return 100.0 * total / count


class Cifar(Classification):
    """CIFAR-10 with a ResNet."""

    name = "cifar"

    def __init__(self, batch: int, seed: int, rank: int, world_size: int, images: Images, depth: int = 8) -> None:
        super().__init__(batch, seed, rank, world_size, images)
        self.depth = depth

    def model(self) -> nn.Module:
        return ResNet(self.depth)

    @property
    def cuts(self) -> tuple[int, ...]:
        stage = (self.depth - 2) // 6
        return stage, 2 * stage, 3 * stage


class Patches(Classification):
    """CIFAR-10 with a small vision transformer, whose attention is written out step by step."""

    name = "vit"

    def model(self) -> nn.Module:
        return ViT(**VIT, fused=False)


class Language(Task):
    """A language model, trained on windows of a text. The metric is the perplexity per token of held-out windows.

    Every epoch cuts the text into windows from another random offset, and goes through them in another random order.
    """

    metric = "held-out perplexity"
    higher_is_better = False
    length: int

    def __init__(self, batch: int, seed: int, rank: int, world_size: int, text: Text) -> None:
        super().__init__(batch, seed, rank, world_size)
        self.text = text

    @property
    def steps(self) -> int:
        return (self.text.train.numel() - self.length) // self.length // self.batch

    def samples(self, epoch: int) -> Tensor:
        starts = window_starts(self.text.train.numel(), self.length, _generator(self.seed, _ORDER, epoch))
        return own_part(starts, self.batch, self.rank, self.world_size)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for own in self.samples(epoch):
            yield _windows(self.text.train, own, self.length)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    def tally(self, model: nn.Module, at_once: int | None = None) -> tuple[float, float]:
        last = self.text.heldout.numel() - self.length - 1
        starts = torch.linspace(0, last, min(_HELDOUT_WINDOWS, last + 1)).long()[self.rank :: self.world_size]
        nats, count = 0.0, 0
        for own in torch.split(starts, at_once or _WINDOWS_AT_ONCE):
            x_BL, y_BL = _windows(self.text.heldout, own, self.length)
            nats += self.loss(model(x_BL), y_BL).item() * y_BL.numel()
            count += y_BL.numel()
        return nats, count

    def value(self, total: float, count: float) -> float:
        nats = total / count
        return math.exp(nats) if nats < _MOST_NATS else math.nan


class Shakespeare(Language):
    """Characters of tiny shakespeare with an LSTM."""

    name = "lstm"
    length = _CHARACTERS

    def model(self) -> nn.Module:
        return CharLSTM(self.text.vocabulary, hidden=_HIDDEN)


class Characters(Language):
    """Characters of tiny shakespeare with a small Llama."""

    name = "llama"
    length = _LLAMA.sequence

    def model(self) -> nn.Module:
        return Llama(self.text.vocabulary, _LLAMA)


class Reading(Language):
    """Bytes of a text with a GPT.

    Args:
        width: width of its blocks; 0: the task's width.
    """

    shape: ClassVar[GPTConfig]

    def __init__(self, batch: int, seed: int, rank: int, world_size: int, text: Text, width: int = 0) -> None:
        super().__init__(batch, seed, rank, world_size, text)
        self.width = width

    def model(self) -> nn.Module:
        return GPT(_as_wide(self.shape, self.width))


class Plays(Reading):
    """Bytes of tiny shakespeare with a GPT."""

    name = "shakespeare"
    shape = _SMALL_GPT
    length = shape.sequence


class Wikitext(Reading):
    """Bytes of WikiText-2 with a GPT: trained on its validation split, evaluated on its test split."""

    name = "gpt"
    shape = _GPT
    length = shape.sequence

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(range(1, self.shape.blocks))


class Tuned(Wikitext):
    """:class:`Wikitext` with a GPT that is pre-trained on bytes of tiny shakespeare (:mod:`reproduce.pretrained`)."""

    name = "tuned"

    def __init__(self, batch: int, seed: int, rank: int, world_size: int, text: Text, before: Text) -> None:
        super().__init__(batch, seed, rank, world_size, text)
        self.before = before

    @property
    def pretrained(self) -> bool:
        return True

    def model(self) -> nn.Module:
        return pretrained(Wikitext(PRETRAINING.batch, self.seed, 0, 1, self.before), self.before.digest)


TASKS: tuple[type[Task], ...] = (Cifar, Shakespeare, Characters, Plays, Wikitext, Tuned, Patches)


def in_words(name: str, depth: int, width: int = 0) -> dict[str, str]:
    """Describe a task's model and how it reads data, for the pages of results; empty if there is no such task.

    Args:
        name: name of the task.
        depth: of the ResNet.
        width: of the GPT; 0: the task's width.

    Example:
        >>> in_words("gpt", 8)["windows"]
        'of 128 bytes (perplexity: of 1,024 held-out ones, spread evenly)'
    """
    crops = f"cropped at random from a border of {_BORDER} pixels, mirrored half of the time"
    if name == "cifar":
        return {"model": f"ResNet-{depth}, stages of {', '.join(map(str, WIDTHS))} channels", "augmentation": crops}
    if name == "vit":
        words = (
            f"vision transformer, {VIT['blocks']} blocks of width {VIT['dim']}, {VIT['heads']} heads, patches of "
            f"{VIT['patch']} pixels"
        )
        return {"model": words, "augmentation": crops}
    if name == "lstm":
        network = CharLSTM(1, hidden=_HIDDEN).lstm
        words = (
            f"LSTM, {network.num_layers} layer of {network.hidden_size} units over {network.input_size} of embedding"
        )
        return {"model": words, "windows": _windows_in_words(_CHARACTERS, "characters, each from a state of zeros")}
    if name == "llama":
        words = (
            f"Llama, {_LLAMA.blocks} blocks of width {_LLAMA.dim}, {_LLAMA.heads} heads, SwiGLU of width "
            f"{_LLAMA.hidden}, rotary positions"
        )
        return {"model": words, "windows": _windows_in_words(_LLAMA.sequence, "characters")}
    gpt = {"shakespeare": _SMALL_GPT, "gpt": _GPT, "tuned": _GPT}.get(name)
    if gpt is None:
        return {}
    gpt = _as_wide(gpt, width)
    return {
        "model": f"GPT, {gpt.blocks} blocks of width {gpt.dim}, {gpt.heads} head{'' if gpt.heads == 1 else 's'}",
        "windows": _windows_in_words(gpt.sequence, "bytes"),
    }


def _as_wide(gpt: GPTConfig, width: int) -> GPTConfig:
    """Return the configuration with blocks of this width, and heads as wide as before; 0 changes nothing."""
    return replace(gpt, dim=width, heads=max(1, width * gpt.heads // gpt.dim)) if width else gpt


def _windows_in_words(length: int, what: str) -> str:
    return f"of {length} {what} (perplexity: of {_HELDOUT_WINDOWS:,} held-out ones, spread evenly)"


def load(
    name: str,
    *,
    batch: int,
    seed: int,
    rank: int,
    world_size: int,
    directory: Path | None = None,
    limit: int | None = None,
    depth: int = 8,
    width: int = 0,
) -> Task:
    """Return the task of this name.

    Args:
        directory: the data folder, see :mod:`reproduce.data`.
        limit: use at most this many samples (images or characters) for training and for evaluation each; if there are
            two texts, of each of them.
        depth: of the ResNet.
        width: of the GPT; 0: the task's width.
    """
    if name in ("cifar", "vit"):
        all_of_it = cifar10(directory)
        images = Images(
            train_x=all_of_it.train_x[:limit],
            train_y=all_of_it.train_y[:limit],
            test_x=all_of_it.test_x[:limit],
            test_y=all_of_it.test_y[:limit],
            digest=all_of_it.digest,
        )
        if name == "vit":
            return Patches(batch, seed, rank, world_size, images)
        return Cifar(batch, seed, rank, world_size, images, depth)
    if name == "lstm":
        return Shakespeare(batch, seed, rank, world_size, limited(tiny_shakespeare(directory), limit))
    if name == "llama":
        return Characters(batch, seed, rank, world_size, limited(tiny_shakespeare(directory), limit))
    if name == "shakespeare":
        return Plays(batch, seed, rank, world_size, limited(tiny_shakespeare(directory, as_bytes=True), limit), width)
    if name not in ("gpt", "tuned"):
        raise ValueError(f"there is no task {name!r}; there are: {', '.join(task.name for task in TASKS)}")
    text = limited(wikitext2(directory), limit)
    if name == "gpt":
        return Wikitext(batch, seed, rank, world_size, text, width)
    before = limited(tiny_shakespeare(directory, as_bytes=True), limit)
    return Tuned(batch, seed, rank, world_size, text, before)


def limited(text: Text, limit: int | None) -> Text:
    """Return the first ``limit`` units of both parts of a text; all if None."""
    return replace(text, train=text.train[:limit], heldout=text.heldout[:limit])


# ---- samples ---------------------------------------------------------------------------------------------------------


def augmented(x_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Pad every image with a black border, crop it at random, and mirror it half of the time.

    One gather does this for the whole batch. The result has the channels-last layout.
    """
    n, _, height, width = x_NCHW.shape
    padded = F.pad(x_NCHW, (_BORDER,) * 4)
    top_N, left_N = torch.randint(0, 2 * _BORDER + 1, (2, n), generator=generator)
    mirrored_N = torch.rand(n, generator=generator) < 0.5
    rows_NH = top_N[:, None] + torch.arange(height)
    columns_NW = left_N[:, None] + torch.arange(width)
    columns_NW = torch.where(mirrored_N[:, None], columns_NW.flip(1), columns_NW)
    x_NHWC = padded[torch.arange(n)[:, None, None], :, rows_NH[:, :, None], columns_NW[:, None, :]]
    return x_NHWC.permute(0, 3, 1, 2)


def _normalized(x_NCHW: Tensor) -> Tensor:
    mean, std = (torch.tensor(channel)[None, :, None, None] for channel in (_MEAN, _STD))
    return (x_NCHW.float() - mean) / std


def window_starts(length: int, window: int, generator: torch.Generator) -> Tensor:
    """Return where an epoch's windows begin: adjacent from a random offset, in random order, always the same number."""
    count = (length - window) // window
    offset = int(torch.randint(window, (), generator=generator))
    return torch.randperm(count, generator=generator) * window + offset


def _windows(text: Tensor, starts: Tensor, window: int) -> tuple[Tensor, Tensor]:
    tokens = text[starts[:, None] + torch.arange(window + 1)].long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
