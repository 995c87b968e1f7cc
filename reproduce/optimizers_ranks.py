"""One rank of ``reproduce.optimizers``: a small GPT, trained by one optimizer, with gradients compressed by one spec.

The model reads bytes of tiny shakespeare. With LoRA it is first trained on bytes of WikiText-2, without compression,
and only its adapters learn from tiny shakespeare. That base is trained once for all rows of a process. Settings of the
optimizers are here, in code and in words (:data:`ABOUT`), and so are the specs.

Run by :func:`reproduce.optimizers.run`; this module run as ``python -m`` is one rank.

Shapes: B batch, L sequence, D inputs and E outputs of a linear layer, R rank of an adapter.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from narrowband.bench.models import GPT, GPTConfig
from narrowband.bench.ranks import RankProcess
from reproduce.data import Text, tiny_shakespeare, wikitext2
from reproduce.tasks import Language, limited

__all__ = [
    "ABOUT",
    "ADAMW_LR",
    "DENSE",
    "MIN_NUMEL",
    "NAMES",
    "OF_SGD",
    "SPECS",
    "LoRA",
    "Optimizer",
    "Row",
    "adapt",
    "train",
]

Optimizer = Literal["adamw", "sgd", "muon", "lora"]

#: Usual settings of each optimizer; the row has the learning rate.
_ADAMW_BETAS = (0.9, 0.95)
_LORA_BETAS = (0.9, 0.999)
_MOMENTUM = 0.9
_SGD_DECAY = 1e-4
_DECAY = 0.1
#: AdamW's learning rate where a row does not set it: for parameters that Muon leaves to AdamW, and for LoRA's base.
ADAMW_LR = 3e-3

#: An adapter's rank, and its alpha: its product is scaled by alpha / rank.
_LORA_RANK = 8
_LORA_ALPHA = 16

#: Names of optimizers in words; :data:`ABOUT` has their settings.
NAMES: dict[str, str] = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "lora": "LoRA"}
ABOUT: dict[str, str] = {
    "adamw": "AdamW with betas 0.9 and 0.95, weight decay 0.1 on matrices",
    "sgd": "SGD with momentum 0.9, weight decay 0.0001; with `dgc`, `nb.DGCSGD` with the same settings",
    "muon": (
        "`torch.optim.Muon` for the matrices of the blocks, with momentum 0.95 (Nesterov's) and weight decay 0.1; for "
        f"embeddings, head, norms and biases AdamW as above, at a learning rate of {ADAMW_LR:g}"
    ),
    "lora": (
        "Adapters of rank 8 and alpha 16 at every linear layer of the blocks, trained by AdamW with betas 0.9 and "
        "0.999, without weight decay"
    ),
}

#: The spec of rows without compression.
DENSE = "none"

#: Codecs for gradients; and codecs that apply momentum before compression, so for SGD alone.
SPECS: tuple[str, ...] = (
    DENSE,
    "fp16",
    "uniform:bits=8",
    "qsgd:bits=4",
    "qsgd:bits=2",
    "eden:bits=3",
    "eden:bits=2",
    "eden:bits=1",
    "powersgd:rank=4",
    "sign+ef",
    "topk:density=0.04,values=int8+ef",
    "topk:density=0.01+ef",
)
OF_SGD: tuple[str, ...] = (
    "dgc:density=0.01,clip=1,warmup_steps={warmup}",
    "dgc:density=0.01,clip=1,warmup_steps={warmup},accumulate=steps",
)

#: Norm above which averaged gradients are scaled down to it.
_CLIP = 1.0

#: Share of steps over which the learning rate rises; then it falls along a cosine to this share of its peak.
_RISING = 0.1
_LEAST = 0.1

#: Tensors with fewer elements travel uncompressed: adapters of a model this small have few.
MIN_NUMEL = 256

_TELL_EVERY = 10


@dataclass(frozen=True)
class Row:
    """Settings of one training run.

    Attributes:
        optimizer: ``adamw``; ``sgd``, with momentum; ``muon``, for matrices of blocks, with AdamW for the rest;
            ``lora``: adapters, trained by AdamW.
        spec: for ``nb.compress_gradients``. ``{warmup}`` in it becomes the number of steps over which the learning rate
            rises.
        lr: peak learning rate; with ``muon``, that of Muon.
        seed: of parameters, order of samples and codecs.
        dim: width of the model.
        blocks: number of blocks.
        heads: number of attention heads.
        sequence: bytes of a sample.
        batch: global batch size.
        steps: training steps.
        base_steps: training steps of the base that adapters adapt.
        limit: use at most this many bytes of each text; None: all.
    """

    optimizer: Optimizer
    spec: str
    lr: float
    seed: int = 0
    dim: int = 64
    blocks: int = 2
    heads: int = 4
    sequence: int = 64
    batch: int = 16
    steps: int = 300
    base_steps: int = 300
    limit: int | None = None

    @property
    def task(self) -> str:
        """The first part of the name of the row's file."""
        return self.optimizer

    @property
    def name(self) -> str:
        """The second part of the name of the row's file."""
        return self.spec


class Bytes(Language):
    """One rank's windows of a text, as bytes."""

    name = "bytes"

    def __init__(self, row: Row, text: Text, rank: int, world_size: int) -> None:
        super().__init__(row.batch, row.seed, rank, world_size, text)
        self.row = row
        self.length = row.sequence
        if self.steps < 1:
            raise ValueError(
                f"a text of {text.train.numel():,} bytes is less than one batch of {row.batch} windows of "
                f"{row.sequence}"
            )

    def model(self) -> GPT:
        row = self.row
        return GPT(GPTConfig(self.text.vocabulary, row.dim, row.blocks, row.heads, row.sequence, row.batch))

    def endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches, epoch after epoch, without end."""
        for epoch in itertools.count():
            yield from self.batches(epoch)


# ---- LoRA ------------------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (Hu et al. 2021, arXiv 2106.09685).

    It computes ``y = W·x + b + (alpha/rank)·up·down·x`` (section 4.1). ``up`` begins at zero.

    Args:
        linear: the layer.
        rank: columns of ``up`` and rows of ``down``.
        alpha: the product is scaled by ``alpha / rank``.
    """

    def __init__(self, linear: nn.Linear, rank: int = _LORA_RANK, alpha: float = _LORA_ALPHA) -> None:
        super().__init__()
        self.linear = linear
        self.scale = alpha / rank
        self.down_RD = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up_ER = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.down_RD, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + self.scale * F.linear(F.linear(x, self.down_RD), self.up_ER)


def adapt(model: GPT) -> None:
    """Freeze a model, and add an adapter to each linear layer of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name, linear in list(block.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(block, name, LoRA(linear))


# ---- training --------------------------------------------------------------------------------------------------------


def train(row: Row, base: dict[str, Tensor] | None, text: Text, tell: Callable[..., None]) -> dict[str, Any]:
    """Train one row on this process's group. Results are equal on all ranks but for times.

    The result has the row's fields, with the spec as it was used, and

    * ``loss``: held-out loss after the last step, in nats per byte; None if training diverged;
    * ``base_loss``: the same before the first step, of a row that adapts a base;
    * ``raw_bytes`` and ``sent_bytes``: of this rank over all of training, and ``ratio``, the former over the latter;
    * ``relative_error``: the last one in the statistics, and ``relative_errors``: pairs [step, error] over training;
    * ``parameters``: number of trained parameters; ``nodes``: number of ranks; ``wall_s``.

    Args:
        row: what to train.
        base: parameters to adapt; None for a row that starts from new parameters.
        text: text to train on, and its held-out part to evaluate on.
        tell: called with events, see :func:`reproduce.optimizers.run`.
    """
    begin = time.perf_counter()
    task = Bytes(row, text, dist.get_rank(), dist.get_world_size())
    torch.manual_seed(row.seed)
    module = task.model()
    if base is not None:
        module.load_state_dict(base)
        adapt(module)
    base_loss = None if base is None else _heldout(module, task)
    model = DDP(module, gradient_as_bucket_view=True)
    spec = row.spec.replace("{warmup}", str(_rising(row.steps)))
    optimizers = _optimizers(row, spec, module)
    extra: dict[str, Any] = {"optimizer": optimizers[0]} if spec.startswith("dgc") else {}
    handle = nb.compress_gradients(model, spec, seed=row.seed, min_numel=MIN_NUMEL, **extra)
    errors: list[tuple[int, float]] = []

    def note(step: int) -> None:
        error = handle.stats().last.relative_error
        if error is not None and math.isfinite(error):
            errors.append((step, error))

    # With dgc, each rank clips its own gradient, before it enters the velocity.
    _steps(model, optimizers, task, row.steps, None if spec.startswith("dgc") else _CLIP, tell, note)
    total = handle.stats().total
    return {
        **asdict(row),
        "spec": spec,
        "loss": _heldout(model, task),
        "base_loss": base_loss,
        "raw_bytes": total.raw_bytes,
        "sent_bytes": total.sent_bytes,
        "ratio": total.raw_bytes / total.sent_bytes,
        "relative_error": errors[-1][1] if errors else None,
        "relative_errors": errors,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "nodes": task.world_size,
        "wall_s": time.perf_counter() - begin,
    }


def trained_base(row: Row, text: Text, tell: Callable[..., None]) -> dict[str, Tensor]:
    """Train the row's model for ``base_steps`` of AdamW, without compression, from seed 0; return its parameters."""
    row = replace(row, optimizer="adamw", spec=DENSE, lr=ADAMW_LR, seed=0)
    task = Bytes(row, text, dist.get_rank(), dist.get_world_size())
    torch.manual_seed(row.seed)
    model = DDP(task.model(), gradient_as_bucket_view=True)
    _steps(model, _optimizers(row, row.spec, model.module), task, row.base_steps, _CLIP, tell)
    state: dict[str, Tensor] = model.module.state_dict()
    return state


def _steps(
    model: DDP,
    optimizers: list[torch.optim.Optimizer],
    task: Bytes,
    steps: int,
    clip: float | None,
    tell: Callable[..., None],
    note: Callable[[int], None] = lambda _: None,
) -> None:
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    for step, (x, y) in enumerate(itertools.islice(task.endless(), steps)):
        for optimizer, own in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = peak * _rate(step, steps)
        model.zero_grad()
        loss = task.loss(model(x), y)
        torch.autograd.backward(loss)
        note(step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % _TELL_EVERY == 0 or step + 1 == steps:
            tell(event="step", step=step + 1, of=steps, loss=loss.item())


def _optimizers(row: Row, spec: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that train the row; the first is the one that the row is about."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if row.optimizer == "lora":
        return [torch.optim.AdamW(trained.values(), lr=row.lr, betas=_LORA_BETAS, weight_decay=0.0, fused=True)]
    if row.optimizer == "sgd":
        kind: Any = nb.DGCSGD if spec.startswith("dgc") else torch.optim.SGD
        return [kind(trained.values(), lr=row.lr, momentum=_MOMENTUM, weight_decay=_SGD_DECAY)]
    if row.optimizer == "adamw":
        return [_adamw(trained.values(), row.lr)]
    if not hasattr(torch.optim, "Muon"):
        raise nb.UnsupportedError(
            f"torch.optim.Muon came with PyTorch 2.9, and this is {torch.__version__}: take a newer one, or leave muon "
            "out with --optimizers adamw sgd lora"
        )
    hidden = {name: p for name, p in trained.items() if name.startswith("blocks.") and p.dim() == 2}
    rest = [p for name, p in trained.items() if name not in hidden]
    return [torch.optim.Muon(hidden.values(), lr=row.lr, weight_decay=_DECAY), _adamw(rest, ADAMW_LR)]


def _adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return an AdamW that applies weight decay to matrices alone."""
    own = list(parameters)
    groups = [
        {"params": [p for p in own if p.dim() >= 2], "weight_decay": _DECAY},
        {"params": [p for p in own if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=_ADAMW_BETAS, fused=True)


def _rising(steps: int) -> int:
    """Return the number of steps over which the learning rate rises."""
    return max(1, round(_RISING * steps))


def _rate(step: int, steps: int) -> float:
    """Return the learning rate as a share of its peak."""
    rising = _rising(steps)
    if step < rising:
        return (step + 1) / rising
    return _LEAST + (1.0 - _LEAST) * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


@torch.no_grad()
def _heldout(model: nn.Module, task: Bytes) -> float | None:
    """Return the mean loss over held-out windows, of which each rank evaluates its share; None if it is not finite."""
    tally = torch.tensor(task.tally(model), dtype=torch.float64)
    dist.all_reduce(tally)
    nats, count = tally.tolist()
    return nats / count if math.isfinite(nats) else None


# ---- a rank ----------------------------------------------------------------------------------------------------------


def _work(worker: RankProcess) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    told = worker.config["data_dir"]
    directory = None if told is None else Path(told)
    bases: dict[Row, dict[str, Tensor]] = {}
    for number, fields in worker.config["rows"]:
        row = Row(**fields)
        tell = functools.partial(worker.tell, row=number)
        base = None
        if row.optimizer == "lora":
            shape = replace(row, spec=DENSE, lr=ADAMW_LR, seed=0)
            if shape not in bases:
                bases[shape] = trained_base(row, limited(wikitext2(directory), row.limit), tell)
            base = bases[shape]
        text = limited(tiny_shakespeare(directory, as_bytes=True), row.limit)
        result = train(row, base, text, tell)
        tell(event="row", result=result | {"commit": worker.config["commit"]})
    worker.finish(None)


if __name__ == "__main__":
    _work(RankProcess(sys.argv[1]))
