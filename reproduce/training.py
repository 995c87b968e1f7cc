"""Train rows (one model, one spec, one seed each) on real ranks, and record their scores and what they sent.

Rows run one after the other in the same rank processes. Each row is written to ``rows/`` as soon as it is done, under a
name that depends on all its settings, so that a run that was stopped resumes with the next row.

Some rows send nothing between ranks: those with boundaries, where a pipeline would cut the model, and those about the
activations that backward keeps. One process trains such a row alone; several run side by side.

``run`` starts the ranks; this module run as ``python -m`` is one rank.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from narrowband.bench.ranks import Loopback, RankProcess, run_ranks
from narrowband.collectives import all_reduce_nbytes, choose, collective
from narrowband.lab import LabConfig
from narrowband.report.record import commit
from narrowband.stats import StepRecord
from reproduce.activations import Activations, read_policy
from reproduce.data import about, locate
from reproduce.kept import Kept
from reproduce.row import (
    CURVE_POINTS,
    DROPS,
    MUON_ADAMW_LR,
    WARM_UP,
    Row,
    Schedule,
    files_of,
    key,
    outer_of,
    policy_of,
    resolved,
)
from reproduce.tasks import Task, load

__all__ = ["recorded", "run", "train"]

#: The handle of the compression; None: nothing is sent.
_Handle: TypeAlias = "nb.GradientCompression | nb.UpdateCompression | nb.ShardCompression | None"

#: Steps between two progress events to the parent process.
_TELL_EVERY = 10

#: Rows with at most this many steps record the time of each.
_FEW_STEPS = 200


def run(
    rows: Sequence[Row],
    directory: Path,
    *,
    nodes: int = 4,
    rate: str | None = None,
    data_dir: Path | None = None,
    resume: bool = True,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Train every row and return the results in the given order.

    A result is what :func:`train` returns, and ``data``, which describes the data that the row read.

    Args:
        rows: trained in this order, but rows that one process trains alone come last.
        directory: finished rows are kept in its ``rows/``.
        nodes: number of ranks on this machine; this many rows that one process trains alone are trained at a time.
        rate: of emulated links between the ranks: 100mbit, …; None: loopback. Use another directory for each rate.
        data_dir: the data folder, see :mod:`reproduce.data`.
        resume: reuse rows that an earlier run finished.
        on_event: called with ``{"event": "step", "row": number, "step": …, "of": …, "loss": …}``,
            ``{"event": "epoch", "row": …, "epoch": …, "metric": …}`` and ``{"event": "row", "row": …, "result": …}`` as
            the ranks work.

    Raises:
        FileNotFoundError: data is missing.
        UnsupportedError: the machine cannot emulate links; says what is missing.
        RankError: a rank ended early.
    """
    for name in {row.task for row in rows}:  # decodes data once, before all ranks need it, and raises errors early
        task = load(name, batch=nodes, seed=0, rank=0, world_size=nodes, directory=data_dir)
        if not task.cuts and any(row.forward for row in rows if row.task == name):
            raise ValueError(f"there are no stages of the model of task {name}: leave out forward and backward")
    files = _places(rows, directory, nodes, data_dir)
    kept = Kept(files, ("task", "name", "score", "metric"), resume=resume, on_event=on_event)
    config = {"data_dir": None if data_dir is None else str(data_dir), "commit": commit()}
    for apart in (False, True):
        missing = [[number, asdict(rows[number])] for number in kept.missing if rows[number].alone == apart]
        if missing:
            place = Loopback(nodes) if rate is None else LabConfig(nodes=nodes, rate=rate)
            run_ranks("reproduce.training", config | {"rows": missing, "apart": apart}, place, kept.note)
    told = {name: about(files_of(name), data_dir) for name in {row.task for row in rows}}
    return [kept.found[number] | {"data": told[row.task]} for number, row in enumerate(rows)]


def recorded(rows: Sequence[Row], directory: Path, *, nodes: int = 4, data_dir: Path | None = None) -> list[Row]:
    """Return those of the rows that an earlier :func:`run` finished."""
    places = _places(rows, directory, nodes, data_dir)
    return [row for row, path in zip(rows, places, strict=True) if path.exists()]


def _places(rows: Sequence[Row], directory: Path, nodes: int, data_dir: Path | None) -> list[Path]:
    """Return the path at which each finished row is kept."""
    digests = {task: _digest(task, data_dir) for task in {row.task for row in rows}}
    return [directory / "rows" / f"{key(row, ranks_of(row, nodes), digests[row.task])}.json" for row in rows]


def ranks_of(row: Row, nodes: int) -> int:
    """Return how many of the ranks train the row."""
    return 1 if row.alone else nodes


def _digest(task: str, data_dir: Path | None) -> str:
    digest = hashlib.sha256()
    for name in files_of(task):
        digest.update(locate(name, data_dir).read_bytes())
    return digest.hexdigest()


# ---- one rank --------------------------------------------------------------------------------------------------------


def train(row: Row, task: Task, tell: Callable[..., None]) -> dict[str, Any]:
    """Train one row on this process's group. Results are equal on all ranks but for times.

    The result has the row's fields, and

    * ``metric``: its name;
    * ``score``: after the last epoch, and ``scores``: after each; None where training diverged. Where updates are
      averaged, each rank evaluates its share with its own model, and at the end with the common model;
    * ``score_before``: before the first epoch, of a pre-trained model;
    * ``curve``: pairs [step, mean loss of the steps up to it], over all ranks;
    * ``sent_bytes_per_step`` and ``raw_bytes_per_step``: bytes of a rank in the last epoch; raw bytes are those of a
      ring all-reduce of gradients in every step. ``ratio``: raw over sent bytes, as the network sees them;
    * ``payload_ratio``: a rank's dense gradient, 4 bytes per element, over its payload, norms and biases included, as
      papers count. ``ratio`` equals it for what travels by all-reduce, dense or compressed, and is 2/N of it for what
      is gathered by N ranks, as each payload is sent N − 1 times;
    * ``matrix_ratio``: the same for compressed matrices alone, without norms, biases and other small tensors, however
      these travel;
    * ``mean_ratio``: ``ratio`` over all steps, and ``compressed_ratio``: over the steps after the row's ``delay``;
    * ``plans``: a policy's decisions, as [step, gradient's size over that of payloads, layer → spec];
    * ``decide_s``: total seconds of a policy's decisions on rank 0;
    * ``step_s``: the median step of the last epoch on rank 0; ``samples_per_s``: of all ranks, from this median;
      ``step_seconds``: of each step of the last epoch, for a row with few steps;
    * ``wall_s``: seconds of all of training, with evaluation.

    With boundaries, ``spec`` names their codecs, bytes are those that cross them in both directions, and there are also

    * ``boundaries``: for each, the compression ratios forward and backward in the last epoch;
    * ``uncompressed_score``: after the last epoch, evaluated without compression at boundaries. The other scores are
      with compression, which begins after warm-up.

    With a policy for activations, ``spec`` is that policy, and there are also

    * ``plain_bytes`` and ``kept_bytes``: bytes of a step's activations that are kept for backward without and with the
      policy, and ``by_operator``: operator → these two;
    * ``gradient_error``: after training, the norm of the difference that the policy makes to the gradient of a batch,
      as a share of the exact gradient's norm; None if it is not finite;
    * ``ranges``, of a row with ``trace``: the ``steps`` at which ranges were noted, ``blocks`` (the first, the middle
      and the last), and ``alpha`` and ``beta``: name in the model → per step one number per group.

    Args:
        row: what to train.
        task: this rank's view of the task.
        tell: called with events, see :func:`run`.
    """
    begin = time.perf_counter()
    spec = resolved(row, task.steps)
    if task.steps < 1:
        raise ValueError(f"{row.task}: there is less than one global batch of {row.batch} to train on")
    torch.manual_seed(row.seed)
    # Statistics of batch norm are averaged before evaluation instead of being sent in every step.
    module = task.model()
    score_before = {"score_before": _score(module, task, None)} if task.pretrained else {}
    boundaries = _cut(module, row, task)
    activations = None
    if row.activations:
        policy = read_policy(row.activations)
        activations = Activations(policy, module, row.epochs * task.steps, trace=row.trace, amp=row.amp)
    total = row.epochs * task.steps
    begins = round(row.delay * total)
    model, optimizers, handle = _compressed(module, row, policy_of(row, task.steps, total) or spec)
    plans: list[tuple[int, float, dict[str, str]]] = []
    rate = functools.partial(_rate, total=total, schedule=row.schedule)
    losses: list[Tensor] = []
    scores: list[float | None] = []
    curve: list[tuple[int, float | None]] = []
    taken: list[float] = []
    before = uncompressed = _sent(handle)
    crossed: list[Tensor] = []
    at_once = row.batch if boundaries else None  # feedback keeps buffers per shape
    for epoch in range(row.epochs):
        before, crossed_before, rounds_before = _sent(handle), _crossed(boundaries), _rounds(handle)
        for boundary in boundaries:
            boundary.compress_in_eval = epoch >= row.warmup_epochs
        taken.clear()
        losses.clear()
        start = time.perf_counter()
        for samples, (x, y) in zip(task.samples(epoch), task.batches(epoch), strict=True):
            for boundary in boundaries:
                boundary.samples = samples
            step = epoch * task.steps + len(taken)
            if step == begins:
                uncompressed = _sent(handle)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group["initial_lr"] * rate(step)
            keeping = nullcontext() if activations is None else activations.step()
            losses.append(_step(model, optimizers, task, x, y, row, keeping))
            if activations is not None:
                activations.note(step + 1)
            plan = None if handle is None or isinstance(handle, nb.ShardCompression) else handle.plan
            if plan is not None and (not plans or plans[-1][0] != plan.step):
                plans.append((plan.step, plan.ratio, plan.specs()))
            now = time.perf_counter()
            taken.append(now - start)
            start = now
            if (step + 1) % _TELL_EVERY == 0 or len(taken) == task.steps:
                tell(event="step", step=step + 1, of=total, loss=losses[-1].item())
        curve += _curve(losses, epoch * task.steps)
        crossed.append(_crossed(boundaries) - crossed_before)
        # Make replicas equal at the end of training, unless the last step ended a round of the whole model.
        if isinstance(handle, nb.UpdateCompression) and epoch + 1 == row.epochs:  # noqa: SIM102
            if handle.steps or row.fragments > 1 or row.overlap:
                handle.average()
        scores.append(_score(_whole(module, task) if row.shards > 1 else module, task, at_once))
        tell(event="epoch", epoch=epoch + 1, metric=scores[-1])
    after = _sent(handle)
    sent, raw = ((getattr(after, f) - getattr(before, f)) / task.steps for f in ("sent_bytes", "raw_bytes"))
    every = 1
    if row.updates:  # a round stands for the gradients of all its steps
        every = row.updates
        raw *= task.steps * row.fragments / (_rounds(handle) - rounds_before)
    raw_compressed, sent_compressed = (
        getattr(after, f) - getattr(uncompressed, f) for f in ("raw_bytes", "sent_bytes")
    )
    return {
        **asdict(row),
        "spec": spec,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "score": scores[-1],
        "scores": scores,
        **score_before,
        "curve": curve,
        "steps": total,
        "nodes": task.world_size,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "sent_bytes_per_step": sent,
        "raw_bytes_per_step": raw,
        "ratio": raw / sent if sent else None,
        "mean_ratio": every * after.ratio if after.sent_bytes else None,
        "compressed_ratio": every * raw_compressed / sent_compressed if sent_compressed else None,
        "plans": plans,
        **_payload_ratios(model, row, spec, sent * row.shards, task.world_size // row.shards, every),
        **_at_boundaries(boundaries, crossed, module, row, task),
        **({} if activations is None else activations.report(task)),
        "step_s": statistics.median(taken),
        **({"step_seconds": list(taken)} if total <= _FEW_STEPS else {}),
        "samples_per_s": row.batch / statistics.median(taken),
        "decide_s": getattr(after, "decide_s", 0.0),
        "wall_s": time.perf_counter() - begin,
    }


def _cut(model: nn.Module, row: Row, task: Task) -> list[nb.Boundary]:
    """Put boundaries into the model, if the row has any."""
    if not row.forward:
        return []
    blocks = cast("nn.Sequential", model.get_submodule("blocks"))
    boundaries = []
    for index, at in enumerate(task.cuts):
        boundary = nb.Boundary(
            row.forward, row.backward, index=index, seed=row.seed, warmup_steps=row.warmup_epochs * task.steps
        )
        blocks.insert(at + index, boundary)
        boundaries.append(boundary)
    return boundaries


def _crossed(boundaries: Sequence[nb.Boundary]) -> Tensor:
    """Return the bytes so far, int64 (boundaries, forward and backward, raw and sent)."""
    return torch.tensor(
        [[[way.raw_bytes, way.sent_bytes] for way in boundary.stats().values()] for boundary in boundaries]
    )


def _at_boundaries(
    boundaries: Sequence[nb.Boundary], crossed: Sequence[Tensor], model: nn.Module, row: Row, task: Task
) -> dict[str, Any]:
    """Return the additional results of a row with boundaries; empty for other rows."""
    if not boundaries:
        return {}
    last, ever = crossed[-1], torch.stack(list(crossed)).sum(0)
    raw, sent = last.sum((0, 1)).tolist()
    raw_ever, sent_ever = ever.sum((0, 1)).tolist()
    for boundary in boundaries:
        boundary.compress_in_eval = False
    return {
        "spec": f"{row.forward} forward, {row.backward} backward",
        "sent_bytes_per_step": sent / task.steps,
        "raw_bytes_per_step": raw / task.steps,
        "ratio": raw / sent,
        "mean_ratio": raw_ever / sent_ever,
        "boundaries": (last[..., 0] / last[..., 1]).tolist(),
        "uncompressed_score": _score(model, task, row.batch),
    }


def _compressed(
    module: nn.Module, row: Row, chosen: str | nb.Policy
) -> tuple[nn.Module, list[torch.optim.Optimizer], _Handle]:
    """Return the model to call, its optimizers, and the handle of its compression."""
    shards = dist.get_world_size() if row.gathered else row.shards
    replicas = None if shards == 1 else _shard(module, shards)
    optimizers = _optimizers(row, module)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    common: dict[str, Any] = {"seed": row.seed, "min_numel": row.min_numel}
    if row.isolated:
        return module, optimizers, None
    if row.gathered:
        handle = nb.compress_shards(module, row.spec, row.gathered, references=row.references, **common)
        return module, optimizers, handle
    common["small"] = row.small
    if row.updates:
        common |= {"every": row.updates, "outer": outer_of(row.outer), "process_group": replicas}
        common |= {"fragments": row.fragments, "overlap": row.overlap, "residuals": row.residuals}
        common["collective"] = row.collective
        return module, optimizers, nb.compress_updates(module, optimizers, chosen, **common)
    model = DDP(module, broadcast_buffers=False, gradient_as_bucket_view=True)
    if row.spec.startswith("dgc"):
        common["optimizer"] = optimizers[0]
    averaging = nb.compress_gradients(model, chosen, collective=row.collective, **common)
    if row.plan:
        averaging.set_layers(json.loads(row.plan))
    return model, optimizers, averaging


def _sent(handle: _Handle) -> StepRecord:
    """Return what this rank has sent so far."""
    if handle is None:
        return StepRecord()
    total: StepRecord = handle.stats().total
    return total


def _rounds(handle: _Handle) -> int:
    """Return the number of averagings so far."""
    return 0 if handle is None or isinstance(handle, nb.ShardCompression) else handle.step


def _shard(module: nn.Module, shards: int) -> dist.ProcessGroup:
    """Shard each replica of a model among ``shards`` ranks (FSDP2); return the group of ranks with the same shard."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicas", "shards"))
    for block in cast("nn.Sequential", module.get_submodule("blocks")):
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(module, mesh=mesh["shards"])
    return mesh["replicas"].get_group()


def _whole(module: nn.Module, task: Task) -> nn.Module:
    """Return a sharded model as a whole one, for evaluation: with different numbers of batches per rank, shards would
    wait for each other.
    """
    whole = task.model()
    state = {name: cast("DTensor", p).full_tensor() for name, p in module.named_parameters()}
    whole.load_state_dict(state | dict(module.named_buffers()), strict=False)
    return whole


def _optimizers(row: Row, model: nn.Module) -> list[torch.optim.Optimizer]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if row.optimizer == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise nb.UnsupportedError(f"torch.optim.Muon came with PyTorch 2.9, and this is {torch.__version__}")
        hidden = {name: p for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2}
        muon = torch.optim.Muon(hidden.values(), lr=row.lr, momentum=row.momentum, weight_decay=row.weight_decay)
        return [muon, _adamw(row, [p for name, p in named.items() if name not in hidden], MUON_ADAMW_LR, 0.9)]
    parameters = list(named.values())
    if row.optimizer == "adamw":
        return [_adamw(row, parameters, row.lr, row.momentum)]
    kind: Any = torch.optim.SGD
    if row.optimizer == "dgc":
        kind = getattr(nb, "DGCSGD", None)
        if kind is None:
            raise nb.UnsupportedError(f"row {row.name!r} needs narrowband.DGCSGD, which this version does not have")
    return [kind(parameters, lr=row.lr, momentum=row.momentum, nesterov=row.nesterov, weight_decay=row.weight_decay)]


def _adamw(row: Row, parameters: list[nn.Parameter], lr: float, beta1: float) -> torch.optim.Optimizer:
    betas = (beta1, row.beta2)
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=row.weight_decay, fused=True)


def _rate(step: int, total: int, schedule: Schedule) -> float:
    """Return the learning rate as a share of its peak."""
    if schedule == "half-cosine":
        return 0.5 * (1.0 + math.cos(0.5 * math.pi * step / total))
    rising = max(1, round(WARM_UP * total))
    if step < rising:
        return (step + 1) / rising
    if schedule == "steps":
        return 0.1 ** sum(step >= round(drop * total) for drop in DROPS)
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def _step(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    task: Task,
    x: Tensor,
    y: Tensor,
    row: Row,
    keeping: AbstractContextManager[Any],
) -> Tensor:
    """Do one optimizer step, with forward in the context ``keeping``; return this rank's loss before the step."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=row.amp), keeping:
        loss = task.loss(model(x), y)
    torch.autograd.backward(loss)
    if row.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), row.clip)
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def _curve(losses: list[Tensor], steps_before: int) -> Iterator[tuple[int, float | None]]:
    """Yield a few points of an epoch's losses, each a mean over steps and ranks."""
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    at = 0
    for part in mean.tensor_split(min(CURVE_POINTS, len(losses))):
        at += part.numel()
        yield steps_before + at, _finite(part.mean().item())


@torch.no_grad()
def _score(model: nn.Module, task: Task, at_once: int | None) -> float | None:
    """Return the metric over all held-out data. Each rank evaluates its share, ``at_once`` samples at a time."""
    for buffer in model.buffers():
        if buffer.is_floating_point():  # batch norm's running statistics, which differ between ranks
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())
    model.eval()
    tally = torch.tensor(task.tally(model, at_once), dtype=torch.float64)
    model.train()
    dist.all_reduce(tally)
    return _finite(task.value(*tally.tolist()))


def _payload_ratios(
    model: nn.Module, row: Row, spec: str, sent: float, size: int, every: int = 1
) -> dict[str, float | None]:
    """Return dense bytes over payload bytes, of the whole gradient and of its compressed matrices alone.

    Both are None with a policy, whose plans have the ratio of the latter. If payloads are sent only in one of ``every``
    steps, they are compared with the gradients of all these steps.
    """
    sent *= every
    if size < 2 or row.policy or row.isolated:
        return {"payload_ratio": None, "matrix_ratio": None}
    parameters = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in parameters)
    small = sum(p.numel() for p in parameters if p.dim() < 2 or p.numel() < row.min_numel)
    if row.small == "uncompressed":
        own, sent_small = 4 * small, float(all_reduce_nbytes(4 * small, size))
    else:
        chosen = spec if row.small == "fused" else row.small
        own = nb.compression(chosen).codec.payload_nbytes((small,)) if small else 0
        sent_small = own * _times_sent(chosen, 4 * numel if row.small == "fused" else own, size, row.collective)
    payload = (sent - sent_small) / _times_sent(spec, 4 * numel, size, row.collective)
    return {
        "payload_ratio": every * 4 * numel / (payload + own),
        "matrix_ratio": every * 4 * (numel - small) / payload if payload > 0 else None,
    }


def _times_sent(spec: str, nbytes: int, size: int, asked: str = "auto") -> float:
    """Return how many times a rank sends its payload, which depends on the collective."""
    chosen = nb.compression(spec)
    if chosen.feedback is not None and chosen.feedback.collective is not None:  # PowerSGD's factors
        return 2 * (size - 1) / size
    kind = choose(chosen.codec, nbytes, size, chosen.feedback) if asked == "auto" else collective(asked)
    return kind.traffic_nbytes(1_000_000, size) / 1_000_000


def _finite(value: float) -> float | None:
    """Return None for a number that is not finite, because JSON has no NaN."""
    return value if math.isfinite(value) else None


def _keep_freed_memory() -> None:
    """Have the C library keep freed memory. Returning activations to the kernel in every step, and getting their memory
    again page by page, takes a fifth of a small model's step.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        map_threshold, trim_threshold, top_pad = -3, -1, -2  # <malloc.h>
        library.mallopt(map_threshold, 1 << 30)
        library.mallopt(trim_threshold, (1 << 31) - 1)
        library.mallopt(top_pad, 1 << 26)


def _work(worker: RankProcess) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _keep_freed_memory()
    apart = worker.config["apart"]
    if apart:  # each is a group of its own
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    tell = worker.say if apart else worker.tell
    directory = worker.config["data_dir"]
    for number, told in worker.config["rows"]:
        if apart and not worker.claim(f"row-{number}"):
            continue
        row = Row(**told)
        task = load(
            row.task,
            batch=row.batch,
            seed=row.seed,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            directory=None if directory is None else Path(directory),
            limit=row.limit,
            depth=row.depth,
            width=row.width,
        )
        result = train(row, task, functools.partial(tell, row=number))
        tell(event="row", row=number, result=result | {"commit": worker.config["commit"]})
    worker.finish(None)


if __name__ == "__main__":
    _work(RankProcess(sys.argv[1]))
