"""Measure how much longer a training step behind a link takes than the same step without communication.

All rows run in the same rank processes: one model, optimizer and process group per row, with the same initial
parameters and the same data. Rows take turns in rounds of steps. A round is one untimed step, which brings the row's
memory back (the system may have reclaimed it while other rows ran), and a block of consecutive steps between two
barriers, timed as a whole. Its time is that of the slowest rank, and a row's step time is the median over its rounds.

The speed of a shared machine varies from minute to minute. So each round of a row comes right after a round of the row
without communication, and ``ratio_to_compute`` is the median over rounds of the ratio of the two times. This differs
slightly from the ratio of the two step times, and varies less.

Each row has two byte counts per step: the bytes that a rank sent according to the library (``sent_bytes_per_step``),
and those that the kernel counted on its machine's network card (``link_bytes_per_step``), including protocol headers.

With ``device="cuda"``, ranks train on this machine's GPUs, rank i on GPU i modulo their number. They communicate over
NCCL if every rank has a GPU of its own, which NCCL requires, and else over gloo, through the CPU's memory. A block of
steps ends when the GPU has finished it.

A round of a row that has rounds of updates has as many steps as whole rounds of updates take.

:mod:`~narrowband.bench.ddp_rows` says which rows there are. ``run`` starts the ranks and puts the rows together; this
module run as ``python -m`` is one rank.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from narrowband.bench.ddp_rows import NO_COMMUNICATION, Config, Kind, build, kinds
from narrowband.bench.devices import Device, wait_for
from narrowband.bench.models import MODELS
from narrowband.bench.ranks import RankProcess, run_ranks, transmitted
from narrowband.planning import Option

__all__ = ["backend_of", "run"]

#: Untimed first steps: DDP rebuilds its buckets after the first, compiled loops are loaded, and PowerSGD's hook sends
#: uncompressed gradients for two.
_WARM_UP_STEPS = 4


def run(
    config: Config,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    keep: Callable[[list[dict[str, Any]]], None] = lambda _: None,
    *,
    options: Sequence[Option] = (),
) -> list[dict[str, Any]]:
    """Measure all rows in one session of ranks.

    Rows hold ``codec``, ``rate``, ``nodes``, ``step_s``, ``ratio_to_compute``, ``sent_bytes_per_step`` (None for
    baselines) and ``link_bytes_per_step`` (None on loopback, where all ranks share one card), ``cpu_s`` (processor time
    of a step, summed over a rank's threads: where ranks share processors, as here, it is what makes a step longer),
    ``relative_error`` (as in :class:`narrowband.StepStats`, mean over ranks; None where nothing is compressed), beside
    these what the codec's handle says of its time, and with ``device="cuda"`` the ``device``'s name and the ``backend``
    (nccl or gloo). A row that failed holds ``error`` and None for what it could not measure.

    Args:
        config: what to measure.
        on_event: called with ``{"event": "round", "done": …, "of": …, "codec": …}`` while the ranks work.
        keep: called with all rows after each round but the last, as if it had been the last.
        options: the rows after the first, in place of those of ``config``.

    Raises:
        UnsupportedError: the machine cannot emulate links; says what is missing.
        RankError: a rank ended early.
    """
    told, place = asdict(config) | {"options": [asdict(option) for option in options]}, config.place()
    ranks = run_ranks("narrowband.bench.ddp", told, place, on_event, lambda ranks: keep(_rows(config, ranks)))
    return _rows(config, ranks)


def _rows(config: Config, ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Make the rows of what all ranks measured."""
    rows = [_merged(config, [rank[i] for rank in ranks]) for i in range(len(ranks[0]))]
    rows[0]["ratio_to_compute"] = 1.0
    return rows


def _merged(config: Config, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the measurements of all ranks into a row: the slowest rank's time per round, the mean of the bytes."""
    row: dict[str, Any] = {
        "codec": parts[0]["codec"],
        "rate": config.link,
        "nodes": config.nodes,
        "per_node": config.per_node,
        "step_s": None,
        "ratio_to_compute": None,
        "sent_bytes_per_step": None,
        "link_bytes_per_step": None,
        "relative_error": None,
    }
    row |= {name: parts[0][name] for name in ("device", "backend", "note") if name in parts[0]}
    errors = [part["error"] for part in parts if part["error"]]
    if errors:
        return row | {"error": errors[0]}
    rounds = [max(times) for times in zip(*(part["round_step_s"] for part in parts), strict=True)]
    row["step_s"] = statistics.median(rounds)
    row["round_step_s"] = rounds
    beside = [max(times) for times in zip(*(part["round_compute_s"] for part in parts), strict=True)]
    if beside:
        row["round_compute_s"] = beside
        row["ratio_to_compute"] = statistics.median(a / b for a, b in zip(rounds, beside, strict=True))
    for name in ("cpu_s", "sent_bytes_per_step", "link_bytes_per_step", *_TIMES):
        if all(name in part for part in parts):
            row[name] = statistics.fmean(part[name] for part in parts)
    lost = [part["relative_error"] for part in parts if part.get("relative_error") is not None]
    row["relative_error"] = statistics.fmean(lost) if lost else None
    return row


# ---- one rank --------------------------------------------------------------------------------------------------------

_TIMES = ("encode_s", "wire_s", "decode_s", "waiting_s")


def backend_of(device: Device, ranks: int, gpus: int, *, has_nccl: bool) -> str:
    """Choose the backend for a number of ranks on a machine with a number of GPUs: NCCL refuses two ranks on a GPU."""
    return "nccl" if device == "cuda" and ranks <= gpus and has_nccl else "gloo"


class _Row:
    """One row on one rank: its model and its measurements so far."""

    def __init__(self, kind: Kind, config: Config, device: torch.device) -> None:
        self.kind = kind
        self.error: str | None = None
        self.round_step_s: list[float] = []
        self.round_compute_s: list[float] = []  # of the row without communication, each time right before
        self.cpu_s: list[float] = []  # of all threads
        self.link_bytes = 0
        self._steps = 0  # timed ones
        self._config = config
        self._device = device
        self._handle: Any = None
        self._counts = dict.fromkeys(("sent_bytes", *_TIMES), 0.0)

    def build(self, tokens_SBL: Tensor) -> None:
        """Make the model and take the warm-up steps."""
        self._model: nn.Module
        self._optimizer: torch.optim.Optimizer
        self._model, self._optimizer, self._handle = build(self.kind, self._config, self._device)
        self._train(self._whole(tokens_SBL))

    def wake(self, tokens_SBL: Tensor) -> None:
        """Take the first step of a round, which is not timed."""
        self._train(tokens_SBL[:1])

    def _whole(self, tokens_SBL: Tensor) -> Tensor:
        """Return these batches, repeated until they are enough for whole rounds of updates."""
        every = max(1, self.kind.every)
        steps = -(-len(tokens_SBL) // every) * every
        return tokens_SBL.repeat(-(-steps // len(tokens_SBL)), 1, 1)[:steps]

    def measure(self, tokens_SBL: Tensor) -> None:
        """Time one round: as many steps as ``tokens_SBL`` has batches, and as whole rounds of updates take."""
        tokens_SBL = self._whole(tokens_SBL)
        self._steps += len(tokens_SBL)
        before = self._handle.stats().total if self._handle is not None else None
        wait_for(self._device)
        cpu, start = time.process_time(), time.perf_counter()
        self._train(tokens_SBL)
        wait_for(self._device)
        self.round_step_s.append((time.perf_counter() - start) / len(tokens_SBL))
        self.cpu_s.append((time.process_time() - cpu) / len(tokens_SBL))
        if before is not None:
            after = self._handle.stats().total
            for name in self._counts:
                self._counts[name] += getattr(after, name, 0.0) - getattr(before, name, 0.0)

    def _train(self, tokens_SBL: Tensor) -> None:
        for tokens_BL in tokens_SBL:
            self._optimizer.zero_grad()
            for left in reversed(range(self._config.accumulate)):
                with self._model.no_sync() if left and isinstance(self._model, DDP) else nullcontext():
                    self._backward(tokens_BL)
            self._optimizer.step()

    def _backward(self, tokens_BL: Tensor) -> None:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.amp):
            logits_BLV = self._model(tokens_BL[:, :-1])
            loss = F.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten())
        torch.autograd.backward(loss / self._config.accumulate)

    def result(self, card: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "codec": self.kind.codec,
            "error": self.error,
            "round_step_s": self.round_step_s,
            "round_compute_s": self.round_compute_s,
        }
        if self.kind.note:
            found["note"] = self.kind.note
        if self._device.type == "cuda":
            found |= {"device": torch.cuda.get_device_name(self._device), "backend": dist.get_backend()}
        if self.error:
            return found
        steps = self._steps
        found["cpu_s"] = statistics.median(self.cpu_s)
        if card:
            found["link_bytes_per_step"] = self.link_bytes / steps
        if self.kind.codec == NO_COMMUNICATION:
            found["sent_bytes_per_step"] = 0.0
        if self._handle is not None:
            found["sent_bytes_per_step"] = self._counts["sent_bytes"] / steps
            total = self._handle.stats().total
            found |= {name: self._counts[name] / steps for name in _TIMES if hasattr(total, name)}
            found["relative_error"] = getattr(total, "relative_error", None)
        return found


def _joined(row: _Row, job: Callable[[Tensor], None], tokens_SBL: Tensor) -> None:
    """Do ``job`` on all ranks and wait for all. If it fails on any rank, the row ends on all."""
    try:
        job(tokens_SBL)
    except Exception as error:  # whatever a baseline's hook raises is that row's result
        lines = str(error).strip().splitlines()
        row.error = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    failed = torch.tensor([row.error is not None], dtype=torch.int32, device=tokens_SBL.device)
    dist.all_reduce(failed)
    if failed.item() and row.error is None:
        row.error = "failed on another rank"


def _join(config: Config, rank_process: RankProcess) -> torch.device:
    """Join the other ranks, and return the device that this rank trains on."""
    gpus = torch.cuda.device_count() if config.device == "cuda" else 0
    device = torch.device("cuda", rank_process.rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    has_nccl = dist.is_nccl_available()
    dist.init_process_group(backend_of(config.device, rank_process.world_size, gpus, has_nccl=has_nccl))
    return device


def _main(rank_process: RankProcess) -> None:
    fields = rank_process.config
    options = [Option(**each) for each in fields.pop("options")]
    config = Config(**{**fields, "codecs": tuple(fields["codecs"])})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = _join(config, rank_process)
    card = os.environ["GLOO_SOCKET_IFNAME"] if config.link != "none" else None
    shape = MODELS[config.model]
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + rank_process.rank)

    def tokens(steps: int) -> Tensor:
        drawn = torch.randint(shape.vocab, (steps, shape.batch, shape.sequence + 1), generator=generator)
        return drawn.to(device)

    rows = [_Row(kind, config, device) for kind in kinds(config, options)]
    compute, others = rows[0], rows[1:]
    total = len(rows) + len(others) * config.rounds
    done = 0

    def tell(row: _Row) -> None:
        nonlocal done
        done += 1
        rank_process.tell(event="round", done=done, of=total, codec=row.kind.codec)

    warm_up = tokens(_WARM_UP_STEPS)
    for row in rows:
        _joined(row, row.build, warm_up)
        tell(row)

    def measure(row: _Row, batches: Tensor) -> None:
        _joined(row, row.wake, batches)
        if row.error is not None:
            return
        dist.barrier()
        sent = transmitted(card) if card else 0
        _joined(row, row.measure, batches)
        # By now all ranks have received everything, so all that this rank sent has left its network card.
        row.link_bytes += transmitted(card) - sent if card else 0

    for turn in range(config.rounds):
        batches = tokens(config.steps)
        first = turn % len(others)  # vary the order, so that no row always follows the same other
        for row in others[first:] + others[:first]:
            if row.error is None and compute.error is None:
                measure(compute, batches)
                measure(row, batches)
                row.round_compute_s.append(compute.round_step_s[-1])
            tell(row)
        if turn + 1 < config.rounds:
            rank_process.so_far([row.result(card) for row in rows])
    rank_process.finish([row.result(card) for row in rows])


if __name__ == "__main__":
    _main(RankProcess(sys.argv[1]))
