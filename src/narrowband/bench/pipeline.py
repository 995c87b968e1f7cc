"""Train a pipeline behind slow links, and compare tokens per second and loss of ways to compress its boundaries.

A GPT of small width and large batches, so that its activations are large relative to its arithmetic, is cut into one
stage per rank and trained on real text by PyTorch's 1F1B schedule. All rows run in the same rank processes, with equal
initial parameters, and take turns epoch by epoch. The last epochs are compared.

Each row has two lower bounds of the step. ``compute_s`` is the step of a row that sends next to nothing. ``link_s`` is
the time that the row's bytes need on the busiest rank's link, as the kernel counted them there. ``share_of_allowed`` is
the longer of the two over the measured step.

``run`` starts the ranks and puts the rows together; this module run as ``python -m`` is one rank.

Shapes: B micro-batch, L sequence, D model dim, V vocabulary.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from narrowband.bench.models import GPT, GPTConfig
from narrowband.bench.ranks import Loopback, RankProcess, check_seed, run_ranks, transmitted
from narrowband.bench.text import standard_library
from narrowband.lab import LabConfig
from narrowband.lab.config import parse_rate
from narrowband.pipeline import Channel

__all__ = ["BASELINE", "COMPUTE", "Config", "parts_of", "run"]

#: The row that sends next to nothing, so that its step takes only the time of the arithmetic. It learns nothing.
COMPUTE = "next to nothing"
_COMPUTE_SPEC = "randomk:density=0.0001"
BASELINE = "torch: PipelineStage"

_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        nodes: Number of stages, one to a rank.
        rate: Rate of every link in both directions: 100mbit, 1gbit, …; none runs the ranks on loopback, unshaped.
        rows: What to compress with: FORWARD/BACKWARD, or one spec for both.
        schedule: Of PyTorch's pipeline engine: 1F1B, or GPipe, which keeps the activations of all micro-batches.
        baselines: Also measure PyTorch's own PipelineStage.
        epochs: Passes over the text; the first fills the buffers of aq-sgd, and the last two are compared.
        batches: Training steps in an epoch.
        microbatches: Micro-batches of a step.
        batch: Windows of a micro-batch.
        sequence: Bytes of a window.
        dim: Width of the model. A micro-batch's activation is 4 · batch · sequence · dim bytes.
        delay: One-way delay between two ranks: 5ms, …
        seed: Seed of parameters and order.
    """

    nodes: int = 4
    rate: str = "100mbit"
    rows: tuple[str, ...] = (
        "none",
        "fp16",
        "uniform:bits=8",
        "uniform:bits=8/qsgd:bits=4",
        "uniform:bits=4/qsgd:bits=4",
        "topk:density=0.1,scope=sample/topk:density=0.1,reuse=forward",
        "uniform:bits=4+aq-sgd:store=fp16/qsgd:bits=4",
    )
    schedule: Literal["1F1B", "GPipe"] = "1F1B"
    baselines: bool = False
    epochs: int = 3
    batches: int = 4
    microbatches: int = 8
    batch: int = 128
    sequence: int = 128
    dim: int = 64
    delay: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("nodes", 2), ("epochs", 3), ("batches", 1), ("microbatches", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        check_seed(self.seed)
        if self.schedule not in ("1F1B", "GPipe"):
            raise ValueError(f"schedule={self.schedule!r} is neither 1F1B nor GPipe")
        if not self.rows and not self.baselines:
            raise ValueError("nothing to measure: give rows, or ask for baselines")
        for row in self.rows:
            forward, backward = specs_of(row)
            Channel(backward, forward=Channel(forward))
        if self.rate == "none" and self.delay:
            raise ValueError("delay needs an emulated link: give a rate too, e.g. rate=1gbit")
        self.shape()
        self.place()

    def shape(self) -> GPTConfig:
        """The model's configuration, with one block per stage."""
        return GPTConfig(256, self.dim, self.nodes, max(1, self.dim // 16), self.sequence, self.batch)

    def place(self) -> Loopback | LabConfig:
        """Where the ranks run."""
        if self.rate == "none":
            return Loopback(self.nodes)
        return LabConfig(nodes=self.nodes, rate=self.rate, delay=self.delay)


def specs_of(row: str) -> tuple[str, str]:
    """Return the specs of a row for activations and for gradients."""
    forward, slash, backward = row.partition("/")
    return forward, backward if slash else forward


def run(
    config: Config,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    keep: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Measure all rows in one session of ranks.

    Rows hold

    * ``name``, ``step_s``, ``tokens_per_s``, and ``times_none``: tokens per second over those of the row ``none``;
    * ``epochs``: how many the row was trained for;
    * ``loss``: in nats per byte, mean over the last two epochs; ``loss_ratio``: the loss over that of ``none``;
    * ``forward_nbytes`` and ``backward_nbytes``: per boundary and micro-batch, in the last epoch;
    * ``forward_relative_error`` and ``backward_relative_error``: as in :class:`narrowband.pipeline.ChannelStats`;
    * ``link_bytes_per_step``: of the busiest rank; None on loopback;
    * ``link_s``, ``compute_s`` and ``share_of_allowed``: see the module; on loopback all but ``compute_s`` are None.

    Args:
        config: what to measure.
        on_event: called with ``{"event": "step", "done": …, "of": …, "name": …}`` while the ranks work.
        keep: called with all rows after each epoch from the second to the last but one, as if it had been the last.
            After the second epoch, that one alone is compared, and after others the last two.

    Raises:
        UnsupportedError: the machine cannot emulate links; says what is missing.
        RankError: a rank ended early.
    """
    told, place = asdict(config), config.place()
    ranks = run_ranks("narrowband.bench.pipeline", told, place, on_event, lambda ranks: keep(_rows(config, ranks)))
    return _rows(config, ranks)


def _rows(config: Config, ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Make the rows of what all ranks measured."""
    parts = [[rank[i] for rank in ranks] for i in range(len(ranks[0]))]
    compute_s = _step(parts[0])
    rows = [_merged(config, part, compute_s) for part in parts[1:]]
    plain = next((row for row in rows if row["name"] == "none"), None)
    for row in rows:
        row["times_none"] = None if plain is None else row["tokens_per_s"] / plain["tokens_per_s"]
        row["loss_ratio"] = (
            None if plain is None or None in (row["loss"], plain["loss"]) else row["loss"] / plain["loss"]
        )
    return rows


def _step(parts: list[dict[str, Any]]) -> float:
    """Return the seconds of a step: the median over steps of the slowest rank's time."""
    slowest: list[float] = [max(times) for times in zip(*(part["step_s"] for part in parts), strict=True)]
    return statistics.median(slowest)


def _merged(config: Config, parts: list[dict[str, Any]], compute_s: float) -> dict[str, Any]:
    step_s = _step(parts)
    tokens = config.microbatches * config.batch * config.sequence
    row = {
        "name": parts[0]["name"],
        "rate": config.rate,
        "nodes": config.nodes,
        "epochs": parts[0]["epochs"],
        "activation_nbytes": 4 * config.batch * config.sequence * config.dim,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "loss": parts[-1]["loss"],
        "forward_nbytes": parts[0]["forward_nbytes"],
        "backward_nbytes": parts[-1]["backward_nbytes"],
        "forward_relative_error": parts[0]["forward_relative_error"],
        "backward_relative_error": parts[-1]["backward_relative_error"],
        "link_bytes_per_step": None,
        "link_s": None,
        "compute_s": compute_s,
        "share_of_allowed": None,
    }
    if config.rate != "none":
        row["link_bytes_per_step"] = max(part["link_bytes"] for part in parts)
        row["link_s"] = 8 * row["link_bytes_per_step"] / parse_rate(config.rate)
        row["share_of_allowed"] = max(compute_s, row["link_s"]) / step_s
    return row


# ---- one rank --------------------------------------------------------------------------------------------------------


class _First(nn.Module):
    def __init__(self, model: GPT, blocks: nn.Sequential) -> None:
        super().__init__()
        self.tokens, self.positions, self.blocks = model.tokens, model.positions, blocks

    def forward(self, tokens_BL: Tensor) -> Tensor:
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        x_BLD: Tensor = self.blocks(self.tokens(tokens_BL) + self.positions(positions_L))
        return x_BLD


class _Last(nn.Module):
    def __init__(self, model: GPT, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = blocks, model.norm, model.head

    def forward(self, x_BLD: Tensor) -> Tensor:
        logits_BLV: Tensor = self.head(self.norm(self.blocks(x_BLD)))
        return logits_BLV


def parts_of(model: GPT, stages: int) -> list[nn.Module]:
    """Cut a GPT into consecutive parts with equal numbers of blocks.

    Raises:
        ValueError: the number of blocks is not divisible by the number of stages.
    """
    number, rest = divmod(len(model.blocks), stages)
    if rest or stages < 2:
        raise ValueError(f"{len(model.blocks)} blocks cannot be divided evenly among {stages} stages")
    all_blocks = list(model.blocks)
    blocks = [nn.Sequential(*all_blocks[at * number : (at + 1) * number]) for at in range(stages)]
    return [_First(model, blocks[0]), *blocks[1:-1], _Last(model, blocks[-1])]


def _loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


class _Row:
    """One row on one rank."""

    def __init__(self, name: str, config: Config, rank: int) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        from narrowband.pipeline import CompressedStage

        self.name = name
        self.stage: Any
        torch.manual_seed(config.seed)
        self._part = parts_of(GPT(config.shape()), config.nodes)[rank]
        self._optimizer = torch.optim.AdamW(self._part.parameters(), lr=_LEARNING_RATE, fused=True)
        group = dist.new_group()  # its own, so that messages of two rows never mix
        place = torch.device("cpu")
        if name == BASELINE:
            self.stage = PipelineStage(self._part, rank, config.nodes, place, group=group)
        else:
            forward, backward = (_COMPUTE_SPEC,) * 2 if name == COMPUTE else specs_of(name)
            self.stage = CompressedStage(
                self._part, rank, config.nodes, place,
                forward=forward, backward=backward, seed=config.seed, group=group,
            )  # fmt: skip
        schedule: Any = get_schedule_class(config.schedule)
        self._schedule = schedule(self.stage, config.microbatches, loss_fn=_loss)
        self.step_s: list[float] = []
        self.losses: list[float] = []
        self.link_bytes: list[int] = []
        self.nbytes: dict[str, float] = {}

    def train(self, ids: Tensor, x: Tensor, y: Tensor, card: str | None) -> None:
        """Do one step, which all ranks begin together."""
        dist.barrier()
        sent = transmitted(card) if card else 0
        start = time.perf_counter()
        losses: list[Tensor] = []
        self.stage.samples = ids
        self._optimizer.zero_grad()
        if self.stage.is_first:
            self._schedule.step(x, return_outputs=False)
        elif self.stage.is_last:
            self._schedule.step(target=y, losses=losses, return_outputs=False)
        else:
            self._schedule.step(return_outputs=False)
        self._optimizer.step()
        dist.barrier()  # bytes still on the wire belong to this step
        self.step_s.append(time.perf_counter() - start)
        self.link_bytes.append(transmitted(card) - sent if card else 0)
        if losses:
            self.losses.append(torch.stack([loss.detach() for loss in losses]).mean().item())

    def result(self, epochs: int, compared: int, before: dict[str, tuple[int, int]]) -> dict[str, Any]:
        loss = statistics.fmean(self.losses[-compared:]) if self.losses else None
        found = {
            "name": self.name,
            "epochs": epochs,
            "step_s": self.step_s[-compared:],
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "link_bytes": statistics.median(self.link_bytes[-compared:]),
        }
        for direction in ("forward", "backward"):
            messages, nbytes = (
                now - then for now, then in zip(self.counts()[direction], before[direction], strict=True)
            )
            found[f"{direction}_nbytes"] = nbytes / messages if messages else None
            found[f"{direction}_relative_error"] = (
                None if self.name == BASELINE else self.stage.stats()[direction].relative_error
            )
        return found

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the messages and bytes that were sent according to the library."""
        if self.name == BASELINE:
            return {"forward": (0, 0), "backward": (0, 0)}
        return {direction: (stats.messages, stats.sent_bytes) for direction, stats in self.stage.stats().items()}


def _batches(config: Config, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the steps of an epoch: ids of windows, the windows, and the windows shifted by one byte."""
    text = standard_library().train
    windows = config.batches * config.microbatches * config.batch
    starts = torch.linspace(0, text.numel() - config.sequence - 2, windows).long()
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(config.seed * 1_000 + epoch))
    for ids in order.view(config.batches, -1):
        tokens = text[starts[ids][:, None] + torch.arange(config.sequence + 1)].long()
        yield ids, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _main(process: RankProcess) -> None:
    config = Config(**{**process.config, "rows": tuple(process.config["rows"])})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    card = os.environ["GLOO_SOCKET_IFNAME"] if config.rate != "none" else None
    names = [COMPUTE, *config.rows, *((BASELINE,) if config.baselines else ())]
    rows = [_Row(name, config, process.rank) for name in names]
    total, done = config.epochs * len(rows) * config.batches, 0
    before: list[list[dict[str, tuple[int, int]]]] = []  # by epoch and row
    so_far: list[dict[str, Any]] = []
    for epoch in range(config.epochs):
        batches = list(_batches(config, epoch))
        before.append([row.counts() for row in rows])
        for row in rows:
            for ids, x, y in batches:
                row.train(ids, x, y, card)
                done += 1
                process.tell(event="step", done=done, of=total, name=row.name)
        if epoch == 0:
            continue
        compared = min(epoch, 2)  # epochs, without the first
        begin = before[epoch + 1 - compared]
        so_far = [
            row.result(epoch + 1, compared * config.batches, counts) for row, counts in zip(rows, begin, strict=True)
        ]
        if epoch + 1 < config.epochs:
            process.so_far(so_far)
    process.finish(so_far)


if __name__ == "__main__":
    _main(RankProcess(sys.argv[1]))
