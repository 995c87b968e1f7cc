"""Measure, in one process, how long a step of a model takes and how long codecs take with its gradients.

The model trains some steps in DistributedDataParallel with a single rank, and a communication hook records when each
bucket is complete. Then every codec encodes and decodes the gradients of the last step, bucket by bucket, through the
same exchanges as in training. :class:`~narrowband.planning.echo.EchoGroup` stands in for the other ranks. Each time is
the median of several repetitions.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore  # what dist.HashStore is, for type checkers
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from narrowband.averaging.parameters import norms_of
from narrowband.averaging.warmup import use_all, use_shares
from narrowband.collectives import Exchange, Operand, Peers, collective
from narrowband.errors import users_errors
from narrowband.feedback import Compression, Feedback, Layout, compression
from narrowband.gradients.levels import shards_of
from narrowband.planning.echo import EchoGroup
from narrowband.planning.profile import Bucket, Codec, Line, Piece, Profile, Trained
from narrowband.planning.shares import contents, parameters_of
from narrowband.updates.averaged import floating_buffers

__all__ = ["Measured", "OptimizerName", "measure_codec", "measure_step", "optimizer_of", "scalar_of"]

#: The numbers of ranks that codecs are measured with. Two points define a line.
RANKS = (2, 8)

_WARM_UP_STEPS = 4  # DDP rebuilds its buckets after the first step
_REPEATS = 5

OptimizerName = Literal["adamw", "sgd", "muon", "lora"]

#: So small that parameters hardly change while steps are measured.
_LEARNING_RATE = 1e-6


def optimizer_of(name: OptimizerName, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers for a model, as in the records of losses.

    Args:
        name: adamw; sgd, with momentum 0.9; muon, for matrices that are no embeddings, and AdamW for the rest; or lora,
            AdamW on adapters.
        model: for lora, only its adapters may require gradients.

    Raises:
        ValueError: ``name`` is lora, and nothing in the model is frozen.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8))
        >>> [type(each).__name__ for each in optimizer_of("muon", model)]
        ['Muon', 'AdamW']
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return [torch.optim.SGD(trained, lr=_LEARNING_RATE, momentum=0.9)]
    if name == "lora" and all(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "optimizer lora trains adapters only, but every parameter of this model requires gradients: freeze all but "
            "the adapters with requires_grad_(False), or use adamw"
        )
    if name != "muon":
        return [torch.optim.AdamW(trained, lr=_LEARNING_RATE)]
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    hidden = [p for p in trained if p.dim() == 2 and id(p) not in embeddings]
    rest = [p for p in trained if p.dim() != 2 or id(p) in embeddings]
    found: list[torch.optim.Optimizer] = [torch.optim.Muon(hidden, lr=_LEARNING_RATE)] if hidden else []
    return [*found, torch.optim.AdamW(rest, lr=_LEARNING_RATE)] if rest else found


def scalar_of(output: Any) -> Tensor:
    """Return a scalar to call backward on, from whatever a model returns.

    This is the first tensor that requires gradients, if it is a scalar such as a loss, else the mean of its squares.

    Raises:
        ValueError: nothing in the output requires gradients.
    """
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise ValueError(
            f"the model returned {type(output).__name__} with no tensor that requires a gradient, so backward cannot "
            "run; return a tensor that depends on trained parameters"
        )
    return found[0] if not found[0].dim() else found[0].float().square().mean()


@dataclass(eq=False)
class Measured:
    """The measured step of a model, and the gradients to measure codecs with.

    Attributes:
        profile: the times of the step, without codecs.
        gradients: of the last step, by layer.
    """

    profile: Profile
    gradients: dict[str, Tensor]

    def part(self, profile: Profile) -> Measured:
        """Return the same for the shards of one rank.

        Args:
            profile: of these shards.
        """
        place, ranks = profile.share
        spans = {
            each.name: shards_of(each.shape, ranks, turn)[place][0] for turn, each in enumerate(self.profile.trained)
        }
        return Measured(profile, {name: self.gradients[name][spans[name]] for name, _ in profile.layers})


def measure_step(
    model: nn.Module,
    inputs: Sequence[Any],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]],
    *,
    loss: Callable[[Any], Tensor] = scalar_of,
    bucket_cap_mb: float = 25.0,
    steps: int = 10,
) -> Measured:
    """Train some steps without sending anything, and record when each bucket is complete.

    Args:
        model: on the CPU. It is trained, so do not use it afterwards.
        inputs: the arguments of its forward.
        optimizer: makes the model's optimizer, or several that step one after the other.
        loss: computes the loss from what the model returns.
        bucket_cap_mb: of DistributedDataParallel.
        steps: number of timed steps.

    Raises:
        ValueError: the model has nothing to train, or trains parameters that are not float32 on the CPU, or returns
            nothing that requires gradients; or backward leaves a parameter without a gradient, or gives an inf or NaN.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("nothing to average: no parameter requires a gradient")
    odd = sorted({str(p.dtype) for _, p in trained if p.dtype != torch.float32} | _elsewhere(trained))
    if odd:
        raise ValueError(f"expected trained parameters in float32 on the CPU, got {', '.join(odd)}")
    model.train()
    _try(model, inputs, loss, trained)
    watch = _Watch()
    with _alone() as group:
        wrapped = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
        )
        wrapped.register_comm_hook(None, lambda _, bucket: watch.on_bucket(bucket))
        made = optimizer(model)
        made = [made] if isinstance(made, torch.optim.Optimizer) else made
        found = [_timed(wrapped, inputs, made, watch, loss) for _ in range(_WARM_UP_STEPS + steps)][_WARM_UP_STEPS:]
    names = {id(p): name for name, p in trained}
    norms = {id(p) for p in norms_of(model)}
    described = tuple(Trained(name, tuple(p.shape), id(p) in norms) for name, p in trained)
    buffers = [(name, buffer) for name, buffer in floating_buffers(model)[0] if buffer.dtype == torch.float32]
    median = {key: statistics.median(each[key] for each in found) for key in ("forward", "backward", "optimizer")}
    ready = [statistics.median(times) for times in zip(*(each["ready"] for each in found), strict=True)]
    totals = sorted(each["forward"] + each["backward"] + each["optimizer"] for each in found)
    buckets = _buckets([[names[id(p)] for p in bucket] for bucket in watch.buckets], ready, described)
    profile = Profile(
        median["forward"],
        max(median["backward"], ready[-1]),
        median["optimizer"],
        buckets,
        trained=described,
        buffers=tuple(Trained(name, tuple(buffer.shape), norm=True) for name, buffer in buffers),
        threads=torch.get_num_threads(),
        spread=totals[3 * len(totals) // 4] / totals[len(totals) // 4] - 1.0,
    )
    by_name = dict(trained)
    gradients = {name: by_name[name].grad for name, _ in profile.layers}
    return Measured(profile, {name: x.detach().flatten().clone() for name, x in gradients.items() if x is not None})


def _elsewhere(trained: Sequence[tuple[str, Tensor]]) -> set[str]:
    return {str(p.device) for _, p in trained if p.device.type != "cpu"}


def _try(
    model: nn.Module, inputs: Sequence[Any], loss: Callable[[Any], Tensor], trained: Sequence[tuple[str, Tensor]]
) -> None:
    """Check that a step works, and that backward reaches every trained parameter, before DDP waits for its gradient.

    Raises:
        ValueError: it does not.
    """
    with users_errors("the model's forward raised"):
        output = model(*inputs)
    total = loss(output)
    with users_errors("the model's backward raised"):
        torch.autograd.backward(total)
    missing = [name for name, p in trained if p.grad is None]
    if missing:
        raise ValueError(
            f"backward computes no gradient for {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}: freeze "
            "unused parameters with requires_grad_(False), or return an output that depends on them"
        )
    sparse = [name for name, p in trained if p.grad is not None and p.grad.is_sparse]
    if sparse:
        raise ValueError(
            f"the gradient of {', '.join(sparse)} is sparse, and only dense gradients can be measured: create the "
            "embedding with sparse=False"
        )
    odd = [name for name, p in trained if p.grad is not None and not torch.isfinite(p.grad).all()]
    if odd:
        raise ValueError(
            f"the gradient of {', '.join(odd[:3])}{' …' if len(odd) > 3 else ''} contains inf or NaN, so codecs cannot "
            "be measured: check that parameters, inputs and the loss are finite"
        )
    model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _alone() -> Iterator[dist.ProcessGroup]:
    """Yield a process group that has this rank alone."""
    if dist.is_initialized():
        groups = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
        yield groups[dist.get_rank()]
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


@dataclass(eq=False)
class _Watch:
    """DDP's buckets in the last step, and the times at which they were complete."""

    buckets: list[list[Tensor]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        self.times.append(time.perf_counter())
        self.buckets.append(bucket.parameters())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def _timed(
    model: nn.Module,
    inputs: Sequence[Any],
    optimizers: Sequence[torch.optim.Optimizer],
    watch: _Watch,
    loss_of: Callable[[Any], Tensor],
) -> dict[str, Any]:
    watch.buckets, watch.times = [], []
    begin = time.perf_counter()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(model(*inputs))
    forward = time.perf_counter()
    torch.autograd.backward(loss)
    backward = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
    end = time.perf_counter()
    return {
        "forward": forward - begin,
        "backward": backward - forward,
        "optimizer": end - backward,
        "ready": [x - forward for x in watch.times],
    }


def _buckets(names: Sequence[Sequence[str]], ready: Sequence[float], trained: Sequence[Trained]) -> tuple[Bucket, ...]:
    found = []
    for own, ready_s, content in zip(names, ready, contents(names, parameters_of(trained)), strict=True):
        x = torch.ones(content.numel, dtype=torch.float32, device="cpu")
        y = torch.empty_like(x)
        found.append(
            Bucket(
                ready_s,
                content.layers,
                content.numel,
                _median(lambda x=x: x.div_(2.0)),  # type: ignore[misc]
                _median(lambda x=x, y=y: y.copy_(x)),  # type: ignore[misc]
                content.vectors,
                tuple(own),
            )
        )
    return tuple(found)


def _median(work: Callable[[], object]) -> float:
    return statistics.median(_seconds(work) for _ in range(_REPEATS))


# ---- codecs ----------------------------------------------------------------------------------------------------------


def measure_codec(measured: Measured, spec: str, name: str) -> Codec:
    """Measure how long it takes to encode and decode the gradients, bucket by bucket.

    Args:
        measured: the model's step and gradients.
        spec: of the codec and its feedback.
        name: of the collective.

    Raises:
        ValueError: there is no such spec.
    """
    chosen = compression(spec)
    device = torch.device("cpu")
    use_all([chosen], device)
    if name == "sparse_reduce":
        use_shares(device)
    runs = {ranks: _Run(measured, chosen, name, ranks) for ranks in RANKS}
    for run in runs.values():
        for _ in range(1 + _REPEATS):
            run.repeat()
    pieces = []
    for at, bucket in enumerate(measured.profile.buckets):
        timings = {ranks: run.timings[at] for ranks, run in runs.items()}
        pieces.append(_piece(timings) if bucket.layers else Piece())
    return Codec(spec, name, tuple(pieces), runs[RANKS[0]].residual_nbytes, measured.profile.share)


@dataclass(eq=False)
class _Timing:
    """The times of all repetitions with one bucket."""

    found: list[list[float]] = field(default_factory=list)  # encode, begin, work after each collective, deliver
    calls: list[str] = field(default_factory=list)

    @property
    def phases(self) -> list[float]:
        return [statistics.median(each) for each in zip(*self.found, strict=True)]


class _Run:
    """One rank, of a given number, that exchanges all buckets."""

    def __init__(self, measured: Measured, chosen: Compression, name: str, ranks: int) -> None:
        self._measured, self._chosen, self._kind, self._ranks = measured, chosen, collective(name), ranks
        self._state = chosen.new_feedback()
        self._step = -1
        layers = measured.profile.layers
        if self._state is not None:
            self._state.reserve([Layout(key, chosen.codec, shape, torch.device("cpu")) for key, shape in layers])
            if self._state.needs_learning_rates:
                self._state.set_learning_rates({key: 1.0 for key, _ in layers})
        self._index = {key: at for at, (key, _) in enumerate(layers)}
        self.timings = [_Timing() for _ in measured.profile.buckets]

    @property
    def residual_nbytes(self) -> int:
        return 0 if self._state is None else self._state.nbytes

    def repeat(self) -> None:
        """Exchange all buckets once. The first call is not timed, because it allocates memory and starts residuals."""
        self._step += 1
        for timing, bucket in zip(self.timings, self._measured.profile.buckets, strict=True):
            if bucket.layers:
                self._exchange(timing, bucket)

    def _exchange(self, timing: _Timing, bucket: Bucket) -> None:
        group = EchoGroup(self._ranks)
        feedback = self._state if isinstance(self._state, Feedback) else None
        codec, gradients = self._chosen.codec, self._measured.gradients
        operands = [
            Operand(key, gradients[key].clone(), shape, codec, feedback, self._seed, self._index[key])
            for key, shape in bucket.layers
        ]
        exchange = self._kind(operands, Peers(group, 0, self._ranks), measure=False, state=self._state)
        phases = [_seconds(exchange.encode)]
        phases += _phases(exchange)
        phases.append(_seconds(lambda: exchange.deliver(good=True)))
        if self._step:
            timing.found.append(phases)
        timing.calls = list(group.calls)

    def _seed(self, rank: int) -> int:
        return (self._step << 32) + rank


def _phases(exchange: Exchange) -> list[float]:
    """Return the seconds of work before, between and after the collectives of an exchange."""
    job, found = exchange.job(), []
    while True:
        begin = time.perf_counter()
        transfer = next(job, None)
        found.append(time.perf_counter() - begin)
        if transfer is None:
            return found
        transfer.issue()


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _piece(timings: dict[int, _Timing]) -> Piece:
    grows = any(name != "all_reduce" for timing in timings.values() for name in timing.calls)

    def line(at: int) -> Line:
        points = [(ranks, timing.phases[at]) for ranks, timing in timings.items()]
        return Line.through(points) if grows else Line(min(seconds for _, seconds in points))

    many = timings[max(timings)]
    count = len(many.phases)
    return Piece(
        encode=line(0),
        begin=line(1),
        calls=tuple(many.calls),
        work=tuple(line(at) for at in range(2, count - 1)),
        deliver=line(count - 1),
    )
