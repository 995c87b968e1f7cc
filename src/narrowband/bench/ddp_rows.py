"""The rows of ``narrowband bench ddp``: what is to be measured, and how a row's model, optimizer and handle are made.

Each codec has a row; PyTorch's own hooks, and DDP without a hook, can have rows, too.

With ``sharded``, FSDP2 shards one model among all ranks, and each row names the specs for gradients and parameters.
Another row has plain FSDP2.

With a single rank the first row is DDP without a hook, so the other rows show how much the library adds to a step of
DDP: a single rank still encodes and decodes every bucket, without sending it.

With several ranks per machine each spec has three rows: every rank sends to every other (``flat``); ranks sum inside
their machine first (``levels``); and the model is sharded inside each machine (``fsdp2``). Further rows have FSDP2 with
nothing sent between machines, and PyTorch's own DDP and HSDP.

Callers may name the rows instead, as options of ``narrowband plan``. These can be rounds of updates, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from narrowband.adapt import Plan
from narrowband.bench.devices import Device, check_device
from narrowband.bench.models import GPT, MODELS
from narrowband.bench.ranks import Loopback, check_seed
from narrowband.collectives import Collective
from narrowband.feedback import Compression, compression
from narrowband.lab import LabConfig
from narrowband.planning import Option, known, outer_of
from narrowband.planning.links import up_and_down

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["NO_COMMUNICATION", "PLAIN", "Config", "Kind", "build", "kinds", "skip_communication"]

#: The row that all others are compared with: a hook that sends nothing and returns the bucket at once.
NO_COMMUNICATION = "no-communication"

#: The row of DDP without a hook.
PLAIN = "torch: DDP fp32"

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
        "none", "fp16", "topk:density=0.01+ef", "dgc:density=0.001", "powersgd:rank=4", "qsgd:bits=4", "eden:bits=1",
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


# ---- kinds of rows ---------------------------------------------------------------------------------------------------


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
class Kind:
    """The definition of a row: its name, what is attached to the DDP model, and whether that includes momentum."""

    codec: str
    attach: _Attach | None  # returns a handle with stats(), or None; None: nothing is done
    shards: tuple[str, ...] = ()  # dimensions of the mesh that FSDP2 gets; none: the model is in DDP
    bucket_cap_mb: int | None = None
    note: str | None = None
    has_momentum: bool = False
    every: int = 0  # steps from one round of updates to the next, of a model that nothing wraps; 0: gradients


def kinds(config: Config, options: Sequence[Option]) -> list[Kind]:
    """Return the definitions of all rows: the row without communication, and those of ``options`` or of ``config``."""
    if config.nodes * config.per_node == 1:
        nothing = Kind(NO_COMMUNICATION, None, note="DDP without a hook: one rank has nobody to send to")
    else:
        nothing = Kind(NO_COMMUNICATION, lambda model, _: skip_communication(model))
    if options:
        return [nothing, *(_of_option(option, config) for option in options)]
    if config.sharded:
        alone = Kind("torch: FSDP2", None, shards=("nodes",))
        own = [Kind(spec, _attach_shards(spec, config.seed), shards=("nodes",)) for spec in config.codecs]
        return [nothing, alone, *own]
    if config.per_node > 1:
        return [nothing, *_on_two_levels(config), *(_baselines() if config.baselines else ())]
    return [
        nothing,
        *(Kind(spec, _attach_codec(spec, config), has_momentum=_has_momentum(_chosen(spec))) for spec in config.codecs),
        *(_baselines() if config.baselines else [Kind(PLAIN, None)] if config.plain else ()),
    ]


def _of_option(option: Option, config: Config) -> Kind:
    if option.spec is None:
        return Kind(option.name, None)
    if option.every:
        return Kind(option.name, _attach_updates(option, config), every=option.every)
    attach = _attach_codec(option.spec, config, nodes=config.nodes if option.levels else None)
    return Kind(option.name, attach, has_momentum=_has_momentum(compression(option.spec)))


def _on_two_levels(config: Config) -> list[Kind]:
    found = [
        Kind("torch: DDP fp32, flat", None),
        Kind("fsdp2, nothing between", None, shards=("shards",)),
        Kind("torch: HSDP", None, shards=("nodes", "shards")),
    ]
    for spec in config.codecs:
        has_momentum = _has_momentum(_chosen(spec))
        for name, shards in (("flat", ()), ("levels", ()), ("fsdp2", ("shards",))):
            nodes = config.nodes if name == "levels" else None
            mesh = _mesh(config) if shards else None
            attach = _attach_codec(spec, config, nodes=nodes, mesh=mesh)
            found.append(Kind(f"{spec}, {name}", attach, shards, has_momentum=has_momentum))
    return found


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


def _baselines() -> list[Kind]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def power_sgd(model: DDP, _: Any) -> None:
        state = powerSGD_hook.PowerSGDState(model.process_group, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return [
        Kind(PLAIN, None),
        Kind(
            "torch: fp16 hook",
            lambda model, _: model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook),
        ),
        Kind(
            "torch: bf16 hook",
            lambda model, _: model.register_comm_hook(model.process_group, default_hooks.bf16_compress_hook),
        ),
        Kind(
            "torch: PowerSGD hook, rank 4",
            power_sgd,
            bucket_cap_mb=1 << 14,
            note="one bucket for the whole model, so nothing overlaps; over gloo, two buckets make the hook fail",
        ),
    ]


def build(kind: Kind, config: Config, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Make a row's model, with the same initial parameters in all rows, its optimizer, and what ``attach`` returns."""
    torch.manual_seed(config.seed)
    with device:
        gpt = GPT(MODELS[config.model])
    model: nn.Module = gpt
    if kind.shards:
        from torch.distributed.fsdp import fully_shard  # slow to import, and few runs have such rows

        mesh = _mesh(config)
        own = mesh if len(kind.shards) == mesh.ndim else mesh[kind.shards]
        for block in gpt.blocks:
            fully_shard(block, mesh=own)
        fully_shard(gpt, mesh=own)
    elif not kind.every:
        model = DDP(
            gpt,
            process_group=dist.new_group(timeout=_TIMEOUT),  # its own, so that a failing row affects no other
            bucket_cap_mb=kind.bucket_cap_mb or config.bucket_mb,
            gradient_as_bucket_view=True,
        )
    optimizer = _optimizer(kind, config, list(model.parameters()))
    return model, optimizer, kind.attach(model, optimizer) if kind.attach is not None else None


def _optimizer(kind: Kind, config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if config.amp or config.optimizer == "adamw":
        betas = (0.0 if kind.has_momentum else 0.9, 0.999)
        return torch.optim.AdamW(parameters, betas=betas, fused=config.amp)
    momentum = 0.0 if kind.has_momentum else config.momentum
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=momentum)
