"""The demo: train one model on real text with AdamW, once per codec, from one seed.

Every row starts from the same parameters, sees the same batches in the same order and takes the same number of steps.
Rows differ in what ranks send: gradients, or the updates that their optimizers make of them, and in the codec. Rows run
one after the other in one set of rank processes. Each is written to ``rows/`` as soon as it is done, under a name that
depends on everything that affects it, so that ``resume`` can reuse it.

``run`` starts the ranks; this module run as ``python -m`` is one rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband
from narrowband.bench.ddp_rows import skip_communication
from narrowband.bench.models import GPT, MODELS
from narrowband.bench.ranks import Loopback, RankProcess, check_seed, run_ranks
from narrowband.bench.text import Text, batch_of, standard_library
from narrowband.feedback import compression
from narrowband.lab.config import MAX_NODES
from narrowband.report.estimate import FORMULA, Row, estimates, verdict
from narrowband.report.record import read_json, sources, versions, write_json
from narrowband.units import counted

__all__ = ["BASELINES", "Config", "run"]

#: The specs that compression has to beat. Losses are compared with those of the first.
BASELINES = ("none", "fp16")

#: Share of steps over which the learning rate rises; then it falls along a cosine to a tenth.
_WARM_UP = 0.3
_LAST_RATE = 0.1

_BETAS = (0.9, 0.95)
_DECAY = 0.1
_CLIP = 1.0

#: Prefix of the name of rows in which ranks send updates, see :func:`narrowband.compress_updates`.
_UPDATES = "updates "

#: Windows of held-out text per rank: few while training, to draw a curve, more at the end.
_CURVE_WINDOWS = 16
_FINAL_WINDOWS = 256
_CURVE_POINTS = 10

#: Steps that DDP, the allocator and compiled loops need to settle, left out of the step time.
_UNTIMED_STEPS = 3
_COMPUTE_STEPS = 12

#: Keys that a finished row must have to be reused.
_ROW = ("codec", "sent_bytes_per_step", "step_s", "heldout_loss", "curve", "encode_s", "decode_s", "compute_s")


@dataclass(frozen=True)
class Config:
    """What the demo trains.

    Attributes:
        codecs: Specs of what gradients are compressed with, or updates: "updates sign+ef". The baselines none and fp16
            are always there.
        nodes: Number of ranks on this machine.
        steps: Optimizer steps per row. With more of them, losses fall further and closer together.
        model: Which GPT: gpt-demo or gpt-tiny (3.3 and 0.13 million parameters). It reads bytes.
        learning_rate: Of AdamW, at its peak.
        seed: Seed of parameters, data and codecs.
    """

    codecs: tuple[str, ...] = ("qsgd:bits=4", "eden:bits=1", "topk:density=0.01+ef")
    nodes: int = 4
    steps: int = 100
    model: str = "gpt-demo"
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("nodes", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.nodes > MAX_NODES:
            raise ValueError(f"nodes={self.nodes} must be at most {MAX_NODES}: every node is a process on this machine")
        if self.model not in MODELS or MODELS[self.model].vocab != 256:
            fit = ", ".join(name for name, shape in MODELS.items() if shape.vocab == 256)
            raise ValueError(f"model {self.model!r} does not read bytes; models that do: {fit}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be a number above 0")
        check_seed(self.seed)
        for spec in self.codecs:
            if spec == _UPDATES.strip():
                raise ValueError('updates and the spec behind it are one word: write them in quotes, "updates sign+ef"')
            compression(spec.removeprefix(_UPDATES))

    def specs(self) -> tuple[str, ...]:
        """All rows: the baselines, then the codecs that are not among them."""
        return tuple(dict.fromkeys((*BASELINES, *self.codecs)))


def run(
    config: Config,
    directory: Path,
    *,
    resume: bool = False,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train every row and return the summary: ``rows``, ``verdict``, ``estimates`` and what they were made from.

    Rows hold ``codec``, ``sent_bytes_per_step``, ``times_less_traffic``, ``relative_error``, ``step_s``,
    ``heldout_loss``, and beside these the held-out curve and the codec's times per step. Losses of a run that diverged
    are None.

    Args:
        directory: finished rows are kept in its ``rows/``.
        resume: take rows that an earlier run with the same configuration finished.
        on_event: called with ``{"event": "setup", "what": …}`` before the first row, and with
            ``{"event": "step", "codec": …, "step": …, "of": …, "loss": …}`` and
            ``{"event": "row", "codec": …, "row": …}`` as the ranks work.

    Raises:
        ValueError: a finished row cannot be read.
        FileNotFoundError: this Python's standard library is not there as source.
        RankError: a rank ended early.
    """
    text = standard_library()
    kept = {spec: directory / "rows" / f"{_key(config, spec, text)}.json" for spec in config.specs()}
    rows: dict[str, dict[str, Any]] = {}
    for spec, path in kept.items():
        if resume and path.exists():
            rows[spec] = read_json(path, _ROW)
            if on_event is not None:
                on_event({"event": "row", "codec": spec, "row": rows[spec]})

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "row":
            rows[event["codec"]] = event["row"]
            write_json(kept[event["codec"]], event["row"])
        if on_event is not None:
            on_event(event)

    missing = [spec for spec in config.specs() if spec not in rows]
    if missing:
        note({"event": "setup", "what": f"starting {counted(config.nodes, 'rank')}"})
        run_ranks("narrowband.bench.demo", asdict(config) | {"rows": missing}, Loopback(config.nodes), note)
    return _summary(config, text, [rows[spec] for spec in config.specs()])


def _key(config: Config, spec: str, text: Text) -> str:
    """Return a file name that depends on everything that affects the row."""
    identity = asdict(config) | {"codecs": spec, "text": text.digest, "model": asdict(MODELS[config.model])}
    identity |= {"sources": sources(), **versions()}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    name = "".join(c if c.isalnum() else "-" for c in spec)
    return f"{name}-{digest[:12]}"


def _summary(config: Config, text: Text, rows: list[dict[str, Any]]) -> dict[str, Any]:
    uncompressed = rows[0]["sent_bytes_per_step"]
    for row in rows:
        row["times_less_traffic"] = uncompressed / row["sent_bytes_per_step"] if row["sent_bytes_per_step"] else None
    compute = statistics.median(row["compute_s"] for row in rows)
    judged = [
        Row(
            codec=row["codec"],
            baseline=row["codec"] in BASELINES,
            sent_bytes=row["sent_bytes_per_step"],
            codec_s=row["encode_s"] + row["decode_s"],
            heldout_loss=math.inf if row["heldout_loss"] is None else row["heldout_loss"],
        )
        for row in rows
    ]
    return {
        "rows": rows,
        "verdict": verdict(judged, compute),
        "estimate": FORMULA,
        "estimates": estimates(judged, compute) if uncompressed else [],
        "compute_s": compute,
        "config": asdict(config) | {"parameters": MODELS[config.model].numel(), "shape": asdict(MODELS[config.model])},
        "text": text.identity(),
    }


# ---- one rank --------------------------------------------------------------------------------------------------------


class _Trainer:
    """Trains a model on this rank, step by step."""

    def __init__(self, config: Config, text: Text, rank: int, *, averages: bool = True) -> None:
        torch.manual_seed(config.seed)
        self.shape = MODELS[config.model]
        self.module = GPT(self.shape)
        self.ddp = DDP(self.module, gradient_as_bucket_view=True) if averages else None
        self.model: nn.Module = self.ddp or self.module
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=config.learning_rate, betas=_BETAS, weight_decay=_DECAY, fused=True
        )
        warm_up = max(1, round(_WARM_UP * config.steps))

        def rate(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            progress = (step - warm_up) / max(1, config.steps - warm_up)
            return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self._text = text
        self._batches = torch.Generator().manual_seed(config.seed * 1_000_003 + rank)
        self._heldout_seed = config.seed * 1_000_003 + 500_000 + rank

    def step(self) -> float:
        """Take one optimizer step, and return this rank's loss before it."""
        x_BL, y_BL = batch_of(self._text.train, self.shape.batch, self.shape.sequence, self._batches)
        self.optimizer.zero_grad()
        loss = self._loss(self.model(x_BL), y_BL)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    @torch.no_grad()
    def heldout_loss(self, windows: int) -> float:
        """Return the mean loss in nats per byte over the same ``windows`` windows of held-out text per rank."""
        generator = torch.Generator().manual_seed(self._heldout_seed)
        losses = []
        for start in range(0, windows, _CURVE_WINDOWS):
            batch = min(_CURVE_WINDOWS, windows - start)
            x_BL, y_BL = batch_of(self._text.heldout, batch, self.shape.sequence, generator)
            losses.append(self._loss(self.module(x_BL), y_BL))
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    @staticmethod
    def _loss(logits_BLV: Tensor, y_BL: Tensor) -> Tensor:
        return F.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten())


def _compute_seconds(config: Config, text: Text, rank: int) -> float:
    """Measure the seconds of a step that sends nothing, on the slowest rank."""
    trainer = _Trainer(config, text, rank)
    assert trainer.ddp is not None
    skip_communication(trainer.ddp)
    taken = []
    for _ in range(_UNTIMED_STEPS + _COMPUTE_STEPS):
        dist.barrier()
        start = time.perf_counter()
        trainer.step()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(taken[_UNTIMED_STEPS:])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.median().item()


def _train_row(config: Config, spec: str, text: Text, process: RankProcess) -> dict[str, Any]:
    updates = spec.startswith(_UPDATES)
    trainer = _Trainer(config, text, process.rank, averages=not updates)
    handle: narrowband.GradientCompression | narrowband.UpdateCompression
    if updates:
        own = spec.removeprefix(_UPDATES)
        handle = narrowband.compress_updates(
            trainer.module, trainer.optimizer, own, outer="auto", small="fused", seed=config.seed
        )
    else:
        assert trainer.ddp is not None
        handle = narrowband.compress_gradients(trainer.ddp, spec, seed=config.seed)
    every = max(1, config.steps // _CURVE_POINTS)
    taken: list[float] = []
    curve: list[tuple[int, float | None]] = []
    for step in range(1, config.steps + 1):
        start = time.perf_counter()
        loss = trainer.step()
        taken.append(time.perf_counter() - start)
        if step % every == 0 and step < config.steps:
            curve.append((step, _finite(trainer.heldout_loss(_CURVE_WINDOWS))))
        process.tell(event="step", codec=spec, step=step, of=config.steps, loss=_finite(loss))
    final = _finite(trainer.heldout_loss(_FINAL_WINDOWS))
    total = handle.stats().total
    return {
        "codec": spec,
        "sent_bytes_per_step": total.sent_bytes / config.steps,
        "raw_bytes_per_step": total.raw_bytes / config.steps,
        "step_s": statistics.median(taken[_UNTIMED_STEPS:] or taken),
        "heldout_loss": final,
        "curve": [*curve, (config.steps, final)],
        "encode_s": total.encode_s / config.steps,
        "wire_s": total.wire_s / config.steps,
        "decode_s": total.decode_s / config.steps,
        "waiting_s": total.waiting_s / config.steps,
        "relative_error": total.relative_error,
    }


def _finite(value: float) -> float | None:
    """Replace a value that is not finite by None, because JSON has no NaN."""
    return value if math.isfinite(value) else None


def _main(process: RankProcess) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    specs = process.config.pop("rows")
    config = Config(**{**process.config, "codecs": tuple(process.config["codecs"])})
    dist.init_process_group("gloo")
    text = standard_library()
    process.tell(event="setup", what="measuring a step that sends nothing")
    compute = _compute_seconds(config, text, process.rank)
    for spec in specs:
        row = _train_row(config, spec, text, process) | {"compute_s": compute}
        process.tell(event="row", codec=spec, row=row)
    process.finish(None)


if __name__ == "__main__":
    _main(RankProcess(sys.argv[1]))
