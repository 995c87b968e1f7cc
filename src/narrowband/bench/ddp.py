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

With ``sharded``, FSDP2 shards one model among all ranks, and each row names the specs for gradients and parameters.
Another row has plain FSDP2.

With ``device="cuda"``, ranks train on this machine's GPUs, rank i on GPU i modulo their number. They communicate over
NCCL if every rank has a GPU of its own, which NCCL requires, and else over gloo, through the CPU's memory. A block of
steps ends when the GPU has finished it.

A single rank still encodes and decodes every bucket, without sending it. The first row is then DDP without a hook, so
``ratio_to_compute`` shows how much the library adds to a step of DDP.

With several ranks per machine each spec has three rows: every rank sends to every other (``flat``); ranks sum inside
their machine first (``levels``); and the model is sharded inside each machine (``fsdp2``). Further rows have FSDP2 with
nothing sent between machines, and PyTorch's own DDP and HSDP.

Callers may name the rows instead, as options of ``narrowband plan``. These can be rounds of updates, too. A round of
measurements then has as many steps as whole rounds of updates take.

``run`` starts the ranks and puts the rows together; this module run as ``python -m`` is one rank.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from narrowband.adapt import Plan
from narrowband.bench.devices import Device, check_device, wait_for
from narrowband.bench.models import GPT, MODELS
from narrowband.bench.ranks import Loopback, RankProcess, check_seed, run_ranks, transmitted
from narrowband.collectives import Collective
from narrowband.feedback import Compression, compression
from narrowband.lab import LabConfig
from narrowband.planning import Option, known, outer_of
from narrowband.planning.links import up_and_down

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["NO_COMMUNICATION", "PLAIN", "Config", "backend_of", "run", "skip_communication"]

#: The row that all others are compared with: a hook that sends nothing and returns the bucket at once.
NO_COMMUNICATION = "no-communication"

#: The row of DDP without a hook.
PLAIN = "torch: DDP fp32"

#: Untimed first steps: DDP rebuilds its buckets after the first, compiled loops are loaded, and PowerSGD's hook sends
#: uncompressed gradients for two.
_WARM_UP_STEPS = 4

_TIMEOUT = timedelta(seconds=120)
_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        nodes: Number of machines.
        per_node: Ranks on each. They share its link, and reach each other without it.
        rate: Rate of every link in both directions: 200mbit, 1gbit, …; or 20mbit/100mbit, where machines send slower
            than they receive; none runs the ranks on loopback, unshaped. auto is 200mbit on the CPU, and none with
            device=cuda.
        model: Which GPT: gpt-13m, gpt-demo, gpt-tiny or gpt2-small (13.3, 3.3, 0.13 and 163 million parameters).
        codecs: Spec strings, or files (….json) that hold plans; the row without communication is always there. With
            sharded: pairs, of gradients and of parameters, with a slash between: qsgd:bits=8/uniform:bits=8.
        sharded: Shard one model among all ranks by FSDP2, instead of giving each a whole one.
        baselines: Also measure PyTorch's own: DDP without a hook, and its fp16, bf16 and PowerSGD hooks.
        plain: Also measure DDP without a hook; baselines have it, too.
        rounds: Timed rounds per row.
        steps: Training steps per round.
        accumulate: Micro-batches per step. Gradients are sent with the last one: the others are in no_sync().
        delay: One-way delay between two ranks: 5ms, …
        loss: Share of packets lost: 0.1%, …
        bucket_cap_mb: DDP's bucket size, for every row but PowerSGD's. Smaller buckets begin to travel earlier, and
            each costs a collective. 8 when left out, and with device=cuda PyTorch's own default, 25.
        collective: How compressed gradients travel; auto: by what sends least.
        optimizer: Of every row: sgd or adamw.
        momentum: Of SGD, in every row; in rows of dgc, which has its own before the wire, the optimizer has none.
        device: Where ranks train. cuda: rank i on GPU i modulo their number, over NCCL where every rank has one.
        amp: Run forward under bfloat16 autocast, and step by AdamW, as models of this kind are trained on GPUs; in rows
            of dgc it has no first moment.
        seed: Seed of parameters and data.
    """

    nodes: int = 4
    per_node: int = 1
    rate: str = "auto"
    model: str = "gpt-13m"
    codecs: tuple[str, ...] = (
        "none", "fp16", "topk:density=0.01+ef", "dgc:density=0.001", "powersgd:rank=4", "qsgd:bits=4",
    )  # fmt: skip
    sharded: bool = False
    baselines: bool = False
    plain: bool = False
    rounds: int = 5
    steps: int = 4
    accumulate: int = 1
    delay: str | None = None
    loss: str | None = None
    bucket_cap_mb: int | None = None
    collective: Collective | Literal["auto"] = "auto"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    device: Device = "cpu"
    amp: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node", "rounds", "steps", "accumulate", "bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum={self.momentum} is not in [0, 1)")
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}; there are: {', '.join(MODELS)}")
        if not (self.codecs or self.baselines or self.plain):
            raise ValueError("nothing to measure: give codecs, or ask for baselines")
        check_seed(self.seed)
        if self.device == "cuda" and (self.link != "none" or self.delay or self.loss):
            raise ValueError("device=cuda: links cannot be emulated between GPUs; leave out rate, delay and loss")
        if self.device == "cuda" and (self.sharded or self.per_node > 1):
            raise ValueError("device=cuda: sharded and per_node can be measured on the CPU only; leave them out")
        check_device(self.device)
        if self.accumulate > 1 and (self.sharded or self.per_node > 1):
            raise ValueError("accumulate needs ranks that each have a whole model: leave out sharded and per_node")
        if self.sharded and (self.per_node > 1 or self.baselines or self.plain):
            raise ValueError(
                "sharded takes one rank per node and always measures plain FSDP2: leave out per_node, baselines and "
                "plain"
            )
        for spec in self.codecs:
            if self.sharded and spec.count("/") != 1:
                raise ValueError(
                    f"{spec!r} is not a pair GRADIENTS/PARAMETERS of specs, such as qsgd:bits=8/uniform:bits=8 or "
                    "none/none"
                )
            for part in spec.split("/") if self.sharded else (spec,):
                _check(part, self.model)
        if self.link == "none" and (self.delay or self.loss):
            raise ValueError("delay and loss need an emulated link: give a rate too, e.g. rate=1gbit")
        self.place()

    @property
    def link(self) -> str:
        """The rate, without ``auto``."""
        return self.rate if self.rate != "auto" else "none" if self.device == "cuda" else "200mbit"

    @property
    def bucket_mb(self) -> int:
        """DDP's bucket size, also where it was left out."""
        return self.bucket_cap_mb if self.bucket_cap_mb is not None else 25 if self.device == "cuda" else 8

    def place(self) -> Loopback | LabConfig:
        """Where the ranks run."""
        if self.link == "none":
            return Loopback(self.nodes * self.per_node)
        up, down = up_and_down(self.link)
        return LabConfig(
            nodes=self.nodes,
            per_node=self.per_node,
            rate=up,
            down=None if down == up else down,
            delay=self.delay,
            loss=self.loss,
        )


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


def skip_communication(model: DDP) -> None:
    """Make backward send nothing: buckets are done as soon as they are full."""

    def done(bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # A lambda, because DDP compares the annotation of ``bucket`` with the class, and ours are strings.
    model.register_comm_hook(None, lambda _, bucket: done(bucket))


_Attach = Callable[[Any, torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class _Kind:
    """The definition of a row: its name, what is attached to the DDP model, and whether that includes momentum."""

    codec: str
    attach: _Attach | None  # returns a handle with stats(), or None; None: nothing is done
    shards: tuple[str, ...] = ()  # dimensions of the mesh that FSDP2 gets; none: the model is in DDP
    bucket_cap_mb: int | None = None
    note: str | None = None
    has_momentum: bool = False
    every: int = 0  # steps from one round of updates to the next, of a model that nothing wraps; 0: gradients


def _kinds(config: Config, options: Sequence[Option]) -> list[_Kind]:
    if config.nodes * config.per_node == 1:
        nothing = _Kind(NO_COMMUNICATION, None, note="DDP without a hook: one rank has nobody to send to")
    else:
        nothing = _Kind(NO_COMMUNICATION, lambda model, _: skip_communication(model))
    if options:
        return [nothing, *(_of_option(option, config) for option in options)]
    if config.sharded:
        alone = _Kind("torch: FSDP2", None, shards=("nodes",))
        own = [_Kind(spec, _attach_shards(spec, config.seed), shards=("nodes",)) for spec in config.codecs]
        return [nothing, alone, *own]
    if config.per_node > 1:
        return [nothing, *_on_two_levels(config), *(_baselines() if config.baselines else ())]
    return [
        nothing,
        *(
            _Kind(spec, _attach_codec(spec, config), has_momentum=_has_momentum(_chosen(spec)))
            for spec in config.codecs
        ),
        *(_baselines() if config.baselines else [_Kind(PLAIN, None)] if config.plain else ()),
    ]


def _of_option(option: Option, config: Config) -> _Kind:
    if option.spec is None:
        return _Kind(option.name, None)
    if option.every:
        return _Kind(option.name, _attach_updates(option, config), every=option.every)
    attach = _attach_codec(option.spec, config, nodes=config.nodes if option.levels else None)
    return _Kind(option.name, attach, has_momentum=_has_momentum(compression(option.spec)))


def _on_two_levels(config: Config) -> list[_Kind]:
    kinds = [
        _Kind("torch: DDP fp32, flat", None),
        _Kind("fsdp2, nothing between", None, shards=("shards",)),
        _Kind("torch: HSDP", None, shards=("nodes", "shards")),
    ]
    for spec in config.codecs:
        has_momentum = _has_momentum(_chosen(spec))
        for name, shards in (("flat", ()), ("levels", ()), ("fsdp2", ("shards",))):
            nodes = config.nodes if name == "levels" else None
            mesh = _mesh(config) if shards else None
            attach = _attach_codec(spec, config, nodes=nodes, mesh=mesh)
            kinds.append(_Kind(f"{spec}, {name}", attach, shards, has_momentum=has_momentum))
    return kinds


@functools.lru_cache(maxsize=1)
def _mesh(config: Config) -> DeviceMesh:
    """Return the mesh of machines × ranks on each."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (config.nodes, config.per_node), mesh_dim_names=("nodes", "shards"))


def _chosen(spec: str) -> Compression | Plan:
    return Plan.load(spec) if spec.endswith(".json") else compression(spec)


def _check(spec: str, model: str) -> None:
    """Check that ``spec`` is a spec or a plan for the model, before ranks start."""
    chosen = _chosen(spec)
    if isinstance(chosen, Plan):
        with torch.random.fork_rng(devices=[]):  # parameters are drawn, and thrown away
            shapes = {name: tuple(p.shape) for name, p in GPT(MODELS[model]).named_parameters()}
        try:
            # Which of the small layers are compressed is the handle's business; here, those that the plan names.
            chosen.check({layer.name: shapes[layer.name] for layer in chosen.layers if layer.name in shapes})
        except ValueError as error:
            raise ValueError(f"{spec}, for model {model}: {error}") from error


def _has_momentum(chosen: Compression | Plan) -> bool:
    return isinstance(chosen, Compression) and chosen.feedback is not None and chosen.feedback.momentum > 0


def _attach_codec(spec: str, config: Config, *, nodes: int | None = None, mesh: DeviceMesh | None = None) -> _Attach:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        import narrowband

        group = None if mesh is None else mesh["nodes"].get_group()
        return narrowband.compress_gradients(
            model,
            _chosen(spec),
            seed=config.seed,
            collective=config.collective,
            optimizer=optimizer,
            nodes=nodes,
            process_group=group,
        )

    return attach


def _attach_updates(option: Option, config: Config) -> _Attach:
    """Average updates by the call that ``narrowband plan`` prints for the option."""

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        import narrowband

        spec = str(compression(str(option.spec)))
        fact = known(config.optimizer, spec, option.every)
        outer: Any = outer_of(option, fact)
        return narrowband.compress_updates(
            model,
            optimizer,
            spec,
            every=option.every,
            outer=outer if outer in ("auto", "nesterov") else float(outer),
            residuals="apart" if fact is None else fact.residuals,  # type: ignore[arg-type]
            seed=config.seed,
            collective=config.collective,
            process_group=dist.new_group(timeout=_TIMEOUT),
        )

    return attach


def _attach_shards(pair: str, seed: int) -> _Attach:
    def attach(model: nn.Module, _: torch.optim.Optimizer) -> Any:
        import narrowband

        gradients, parameters = pair.split("/")
        return narrowband.compress_shards(model, gradients, parameters, seed=seed)

    return attach


def _baselines() -> list[_Kind]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def power_sgd(model: DDP, _: Any) -> None:
        state = powerSGD_hook.PowerSGDState(model.process_group, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return [
        _Kind(PLAIN, None),
        _Kind(
            "torch: fp16 hook",
            lambda model, _: model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook),
        ),
        _Kind(
            "torch: bf16 hook",
            lambda model, _: model.register_comm_hook(model.process_group, default_hooks.bf16_compress_hook),
        ),
        _Kind(
            "torch: PowerSGD hook, rank 4",
            power_sgd,
            bucket_cap_mb=1 << 14,
            note="one bucket for the whole model, so nothing overlaps; over gloo, two buckets make the hook fail",
        ),
    ]


class _Row:
    """One row on one rank: its model and its measurements so far."""

    def __init__(self, kind: _Kind, config: Config, device: torch.device) -> None:
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
        torch.manual_seed(self._config.seed)
        with self._device:
            model = GPT(MODELS[self._config.model])
        self._model: nn.Module
        if self.kind.shards:
            from torch.distributed.fsdp import fully_shard  # slow to import, and few runs have such rows

            mesh = _mesh(self._config)
            own = mesh if len(self.kind.shards) == mesh.ndim else mesh[self.kind.shards]
            for block in model.blocks:
                fully_shard(block, mesh=own)
            fully_shard(model, mesh=own)
            self._model = model
        elif self.kind.every:
            self._model = model
        else:
            self._model = DDP(
                model,
                process_group=dist.new_group(timeout=_TIMEOUT),  # its own, so that a failing row affects no other
                bucket_cap_mb=self.kind.bucket_cap_mb or self._config.bucket_mb,
                gradient_as_bucket_view=True,
            )
        self._optimizer = self._optimizer_of(list(self._model.parameters()))
        self._handle = self.kind.attach(self._model, self._optimizer) if self.kind.attach is not None else None
        self._train(self._whole(tokens_SBL))

    def _optimizer_of(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self._config.amp or self._config.optimizer == "adamw":
            betas = (0.0 if self.kind.has_momentum else 0.9, 0.999)
            return torch.optim.AdamW(parameters, betas=betas, fused=self._config.amp)
        momentum = 0.0 if self.kind.has_momentum else self._config.momentum
        return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=momentum)

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

    rows = [_Row(kind, config, device) for kind in _kinds(config, options)]
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
