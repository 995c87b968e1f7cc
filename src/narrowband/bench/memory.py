"""Measure the memory of a model's saved activations, and the time of a step: plain, in few bits, and recomputed.

``compare`` measures ways to train in less memory, and ``run`` those of a configuration. All rows run in one process and
take turns, so that other load on the machine affects them alike. ``ratio_to_plain`` is the median over rounds of a
row's step over the plain step right before it. A step is forward and backward. A timed step follows a step of the same
kind, as in training; on CUDA it ends when the device has finished it. Before anything is timed, every row takes three
steps, in the first of which Triton compiles its loops. There are two measures of memory:

* ``kept_bytes``: what autograd keeps between forward and backward, every tensor's memory counted once, without
  parameters, buffers and inputs;
* ``peak_bytes``: the peak of memory above what is held before the first step, including gradients and temporary memory.
  On CPU it is the resident set of a process in which nothing else ever ran, because malloc's reuse of freed memory
  depends on all that came before; on CUDA it is the allocator's peak.

``footprint`` is the memory of training as a whole, including the model and its optimizer, which has to fit into a
machine. ``survey`` returns what each operator and module of one model keeps.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import functools
import gc
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from narrowband.activations import ActivationPolicy, Saved, compress_activations
from narrowband.activations.arena import Arena
from narrowband.bench.devices import Device, check_device, default_device, moved, wait_for
from narrowband.bench.loopback import end_with_parent
from narrowband.bench.ranks import check_seed
from narrowband.bench.subjects import SUBJECTS, Subject, subject, tried
from narrowband.errors import is_out_of_memory, users_errors

__all__ = [
    "OPTIMIZERS", "PLAIN", "Config", "Way", "compare", "count", "footprint", "gradients_of", "most_alive",
    "optimizer_of", "result_of", "run", "scalar_of", "survey",
]  # fmt: skip

#: The policy that compresses nothing.
PLAIN = ActivationPolicy(bits="off")


def _adamw_in_8_bits(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Make the 8-bit AdamW of bitsandbytes, which also runs on the CPU."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise ValueError("optimizer='adamw-8bit' needs bitsandbytes: pip install bitsandbytes") from error
    made: torch.optim.Optimizer = AdamW8bit(parameters)
    return made


#: Name → optimizer. In order, they keep per parameter two numbers, one number, one per row and column of a matrix, and
#: two numbers of one byte.
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "adamw-8bit": _adamw_in_8_bits,
}


def optimizer_of(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Make one of :data:`OPTIMIZERS`.

    Raises:
        ValueError: there is no optimizer of that name, or its package is missing.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name!r} is none of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters)


# ---- a comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        model: deit-tiny, deit-small, gpt, resnet18, or yours: file.py:function, called with the batch size, returns a
            module and the tuple of its inputs.
        batch: Samples.
        bits: Of what is kept; a row each.
        baselines: Also bfloat16 autocast, full activation checkpointing, and combinations; of few bits also with MLPs
            recomputed, where modules are called mlp.
        compiled: Also torch.compile, which needs a C++ compiler and minutes; with baselines under bfloat16, too.
        only: Only these of all rows that baselines and compiled can give, by name: "8 bits" "bf16, 8 bits". The row
            that they are compared with is always there: plain or, where all of them are bf16, bf16.
        rounds: Timed steps of every row.
        peaks: Also measure peaks of memory; on CPU each row then trains in a process of its own, too. --no-peaks leaves
            these out, which is faster.
        device: Where to train; CUDA where there is any, when left out.
        seed: Seed of parameters and data.
    """

    model: str = "deit-tiny"
    batch: int = 32
    bits: tuple[int, ...] = (8, 4)
    baselines: bool = False
    compiled: bool = False
    only: tuple[str, ...] = ()
    rounds: int = 5
    peaks: bool = True
    device: Device | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_seed(self.seed)
        check_device(self.device)
        for bits in self.bits:
            if bits not in (8, 4, 2):
                raise ValueError(f"bits={bits}: there are 8, 4 and 2")
        if not (self.bits or self.baselines or self.compiled or self.only):
            raise ValueError("nothing to measure: give bits, such as 8 4, or ask for baselines")
        if self.model not in SUBJECTS and ":" not in self.model:
            subject(self.model, self.batch)


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: name of its row.
        policy: policy for activations that are kept for backward. A policy that is off only counts bytes.
        amp: whether forward runs under bfloat16 autocast.
        checkpoint: whether only the input of every block is kept (full activation checkpointing).
        compiled: whether ``torch.compile`` compiles the model.
    """

    name: str
    policy: ActivationPolicy = PLAIN
    amp: bool = False
    checkpoint: bool = False
    compiled: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the way does nothing to save memory, apart from autocast."""
        return self.policy.is_off and not self.checkpoint and not self.compiled


#: Pattern of the names that transformers give to the feed-forward part of a block.
_MLPS = "*.mlp"


def _ways(config: Config) -> list[Way]:
    """Return the ways to measure. The others are compared with the first.

    Raises:
        ValueError: the configuration asks for a row that does not exist.
    """
    if not config.only:
        return _all_ways(config)
    ways = {way.name: way for way in _all_ways(replace(config, only=(), baselines=True, compiled=True))}
    unknown = [name for name in config.only if name not in ways]
    if unknown:
        raise ValueError(f"no row is called {', '.join(map(repr, unknown))}; there are: {', '.join(map(repr, ways))}")
    of_bf16 = [ways[name].amp for name in config.only]
    needed = {*config.only, *(["bf16"] if any(of_bf16) else []), *([] if all(of_bf16) else ["plain"])}
    return [way for name, way in ways.items() if name in needed]


def _all_ways(config: Config) -> list[Way]:
    few = {bits: ActivationPolicy(bits=bits) for bits in config.bits}  # type: ignore[arg-type]
    ways = [Way("plain"), *(Way(f"{bits} bits", policy) for bits, policy in few.items())]
    if config.baselines:
        mlps = few if _has_mlps(config) else {}
        again = {bits: replace(policy, modules={_MLPS: "checkpoint"}) for bits, policy in mlps.items()}
        ways += [Way(f"{bits} bits, MLPs recomputed", policy) for bits, policy in again.items()]
        ways += [Way("checkpoint", checkpoint=True)]
        ways += [Way(f"checkpoint, {bits} bits", few[bits], checkpoint=True) for bits in config.bits[:1]]
        ways += [Way("bf16", amp=True), *(Way(f"bf16, {bits} bits", policy, amp=True) for bits, policy in few.items())]
        ways += [Way(f"bf16, {bits} bits, MLPs recomputed", policy, amp=True) for bits, policy in again.items()]
        ways += [Way("bf16, checkpoint", amp=True, checkpoint=True)]
        ways += [
            Way(f"bf16, checkpoint, {bits} bits", few[bits], amp=True, checkpoint=True) for bits in config.bits[:1]
        ]
    if config.compiled:
        kinds = {"compiled": False} | ({"bf16, compiled": True} if config.baselines else {})
        for name, amp in kinds.items():
            ways += [Way(name, amp=amp, compiled=True)]
            ways += [Way(f"{name}, {bits} bits", policy, amp=amp, compiled=True) for bits, policy in few.items()]
    return ways


def _has_mlps(config: Config) -> bool:
    # Names need only a batch of one; a user's own model may need the batch of the configuration.
    model, _ = subject(config.model, 1 if config.model in SUBJECTS else config.batch)
    return any(fnmatch.fnmatchcase(name, _MLPS) for name, _ in model.named_modules())


def count(config: Config) -> int:
    """Return the number of events of a run."""
    return len(_ways(config)) * (1 + config.rounds + config.peaks)


class _Row:
    """One way to train, with a model of its own that has the same parameters and inputs as those of other ways."""

    def __init__(self, way: Way, build: Callable[[], Subject], device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.way = way
        self.device = device
        model, inputs = build()
        self.model, self.inputs = model.to(device), tuple(moved(x, device) for x in inputs)
        if way.checkpoint:
            _checkpoint_blocks(self.model)
        if way.compiled:
            self.model.compile()
        self.context = compress_activations(self.model, policy=way.policy)
        self.steps: list[float] = []
        self.hosts: list[float] = []  # the part of each step until Python was done
        self.ratios: list[float] = []  # over the first row's step right before
        self.saved: Saved
        self.error: float | None = None
        self.cosine: float | None = None
        self.peak: int | None = None

    def step(self, *, counted: bool = False) -> Saved | None:
        """Do forward and backward; return what was saved, if that is counted or compressed."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with contextlib.ExitStack() as stack:
            saved = stack.enter_context(self.context) if counted or not self.way.policy.is_off else None
            stack.enter_context(torch.autocast(self.device, torch.bfloat16, enabled=self.way.amp))
            output = self.model(*self.inputs)
        torch.autograd.backward(scalar_of(output))
        return saved

    def settled(self) -> tuple[float, float]:
        """Time a step that follows one of its kind, as in training.

        Returns its seconds, and the part of them until the host has launched all work.
        """
        self.step()
        wait_for(self.device)
        begin = time.perf_counter()
        self.step()
        told = time.perf_counter()
        wait_for(self.device)
        return time.perf_counter() - begin, told - begin


def run(
    config: Config,
    on_event: Callable[[str], None] | None = None,
    on_round: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure all rows of a configuration; see :func:`compare`.

    Args:
        config: what to measure.
        on_event: called with the name of the row that is measured.
        on_round: called after each round with the rows so far.
    """
    ways, device = _ways(config), config.device or default_device()
    if config.model not in SUBJECTS:
        tried(config.model, config.batch, device)
    return compare(
        ways,
        functools.partial(subject, config.model, config.batch),
        rounds=config.rounds,
        peaks=config.peaks,
        device=device,
        seed=config.seed,
        on_event=on_event,
        on_round=on_round,
    )


def compare(
    ways: Sequence[Way],
    build: Callable[[], Subject],
    *,
    rounds: int = 5,
    peaks: bool | Literal["alive"] = True,
    device: Device | None = None,
    seed: int = 0,
    on_event: Callable[[str], None] | None = None,
    on_round: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure ways to train one model, which take turns in this process.

    Rows hold

    * ``name``;
    * ``step_s``: the median step; ``host_s``: the part of it until the host has launched all work of a GPU; None on the
      CPU;
    * ``ratios``: for each round, the step over the first row's step; ``ratio_to_plain``: their median, or None if the
      first row is in bf16;
    * ``ratio_to_same_precision``: the step over that of the row that compresses nothing in the same precision, as the
      median over rounds of the quotient of both rows' ``ratios``; None if there is no such row;
    * ``kept_bytes``, and ``kept_ratio``: the first row's kept bytes over this row's; ``saved_of_own``: the share of
      bytes that the row saves of those that it would keep uncompressed;
    * ``peak_bytes`` and ``peak_ratio``: the same of peaks; ``peak_to_same_precision``: the peak over that of the row
      that compresses nothing in the same precision. None if the system does not report peaks, or without ``peaks``;
    * ``compress_s``: seconds of a step that packing and unpacking take;
    * ``gradient_error``: the norm of the difference from exact gradients over the norm of these, and
      ``gradient_cosine``: the cosine of the angle between both. Exact gradients are the plain row's, for rows in bf16
      those of the row bf16;
    * ``by_operator``: operator → its bytes and seconds.

    Args:
        ways: ways to train. The others are compared with the first.
        build: makes the model and its inputs. It must be a function of a module, or a partial of one, because peaks are
            measured in other processes.
        rounds: timed steps of every row, each right after a step of the first way.
        peaks: whether to measure peaks, too; ``alive``: measure peaks of bytes of tensors above those of the model and
            its inputs, which do not depend on malloc (see :func:`most_alive`).
        device: cpu or cuda; CUDA where there is any, if not given.
        seed: of parameters and data.
        on_event: called with the name of the row that is measured.
        on_round: called after each round with the rows so far. Peaks are missing, because they are measured last.
    """
    tell = on_event or (lambda _: None)
    rows = [_Row(way, build, device or default_device(), seed) for way in ways]
    exact: dict[bool, list[Tensor]] = {}
    for row in rows:
        tell(row.way.name)
        row.step()
        row.step()  # estimates ranges, compiles loops, fills caches
        torch.manual_seed(seed)  # dropout leaves out the same elements in all rows
        saved = row.step(counted=True)
        assert saved is not None
        row.saved = saved
        gradients = [p.grad for p in row.model.parameters() if p.grad is not None]
        if row.way.policy.is_off and row.way.amp not in exact:
            exact[row.way.amp] = [x.clone() for x in gradients]  # the next step writes into the same memory
        if row.way.amp in exact:
            row.error, row.cosine = _beside(gradients, exact[row.way.amp])
    first = rows[0]
    for turn in range(rounds):
        for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
            tell(row.way.name)
            before = first.settled()[0] if row is not first else 0.0
            taken, host = row.settled()
            row.steps.append(taken)
            row.hosts.append(host)
            row.ratios.append(taken / before if before else 1.0)
        if on_round is not None:
            on_round([_told(row, rows) for row in rows])
    if peaks:
        for row in rows:
            tell(row.way.name)
            row.peak = _alive(row, build, seed) if peaks == "alive" else _peak(row, build, seed)
    return [_told(row, rows) for row in rows]


def _told(row: _Row, rows: Sequence[_Row]) -> dict[str, Any]:
    first, saved = rows[0], row.saved
    same = next((each for each in rows if each.way.is_plain and each.way.amp == row.way.amp), None)
    ratio = statistics.median(row.ratios)
    return {
        "name": row.way.name,
        "step_s": statistics.median(row.steps),
        "host_s": None if row.device == "cpu" else statistics.median(row.hosts),
        "ratio_to_plain": None if first.way.amp else ratio,
        "ratio_to_same_precision": None
        if same is None
        else statistics.median(own / its for own, its in zip(row.ratios, same.ratios, strict=True)),
        "ratios": list(row.ratios),
        "kept_bytes": saved.kept_bytes,
        "kept_ratio": first.saved.raw_bytes / saved.kept_bytes if saved.kept_bytes else None,
        "saved_of_own": 1 - saved.kept_bytes / saved.raw_bytes if saved.raw_bytes else 0.0,
        "peak_bytes": row.peak,
        "peak_ratio": first.peak / row.peak if row.peak and first.peak else None,
        "peak_to_same_precision": row.peak / same.peak if same is not None and row.peak and same.peak else None,
        "compress_s": sum(kept.seconds for kept in saved.by_operator.values()),
        "gradient_error": row.error,
        "gradient_cosine": row.cosine,
        "by_operator": {name: asdict(kept) for name, kept in saved.by_operator.items()},
    }


def result_of(output: Any) -> Tensor:
    """Return the first tensor that needs gradients, from whatever a model returns.

    Raises:
        ValueError: there is none.
    """
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise ValueError(
            f"the model returned {type(output).__name__} in which no tensor requires gradients, so backward keeps "
            "nothing; return a tensor that depends on parameters with requires_grad"
        )
    return found[0]


def scalar_of(output: Any) -> Tensor:
    """Return a scalar to call backward on, from whatever a model returns.

    This is the cross-entropy of the first tensor, with its last dimension as classes.

    Raises:
        ValueError: nothing in it needs gradients.
    """
    x = result_of(output).float()
    if not x.dim() or x.shape[-1] < 2:
        return x.square().mean()
    # A sum of squares would not do: a final norm makes all rows equally long, so the gradient would vanish there.
    rows = x.reshape(-1, x.shape[-1])
    return F.cross_entropy(rows, torch.arange(len(rows), device=x.device) % rows.shape[1])


def _beside(own: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """Compare gradients with a reference.

    Returns the norm of the difference over that of the reference, and the cosine of the angle between both; None if
    they mean nothing, because a gradient is zero or not finite. Sums are in float64, on the gradients' device, one
    parameter at a time: a GPU has no room for copies of all gradients, and a link to the CPU would be slower than
    training.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=reference[0].device if reference else None)
    for own_x, reference_x in zip(own, reference, strict=True):
        x, y = own_x.double(), reference_x.double()
        sums += torch.stack(((x - y).square().sum(), x.square().sum(), y.square().sum(), (x * y).sum()))
    difference, one, other, product = sums.tolist()
    error = math.sqrt(difference / other) if other else math.nan
    cosine = product / math.sqrt(one * other) if one and other else math.nan
    return error if math.isfinite(error) else None, cosine if math.isfinite(cosine) else None


def gradients_of(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters, flat, in float64 on the CPU."""
    return torch.cat([p.grad.detach().reshape(-1).double().cpu() for p in model.parameters() if p.grad is not None])


def _checkpoint_blocks(model: nn.Module) -> None:
    """Apply full activation checkpointing: keep only the input of every block."""
    lists = [m for m in model.modules() if isinstance(m, (nn.Sequential, nn.ModuleList)) and len(m) > 1]
    if not lists:
        raise ValueError("checkpointing needs a model with blocks, as a Sequential or ModuleList of several modules")
    for block in max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters())):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _peak(row: _Row, build: Callable[[], Subject], seed: int) -> int | None:
    """Measure the peak in bytes; None if the system does not report it."""
    if row.device != "cpu":
        row.model.zero_grad()
        gc.collect()
        wait_for(row.device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row.step()
        row.step()
        return torch.cuda.max_memory_allocated() - before
    return _alone(_peak_alone, row.way, build, seed)


def _alive(row: _Row, build: Callable[[], Subject], seed: int) -> int | None:
    """Measure the peak of bytes of tensors. On CPU a separate process does it, because the profiler takes gigabytes for
    thousands of small tensors.
    """
    if row.device == "cpu":
        return _alone(_alive_alone, row.way, build, seed)
    row.model.zero_grad()
    return max(most_alive(lambda _: row.step(), row.device))


def _alive_alone(way: Way, build: Callable[[], Subject], seed: int, threads: int) -> int:
    """Measure the peak of bytes of tensors in the third step."""
    torch.set_num_threads(threads)
    row = _Row(way, build, "cpu", seed)
    row.step()
    row.step()
    row.model.zero_grad()
    return max(most_alive(lambda _: row.step()))


def most_alive(run: Callable[[Callable[[], None]], object], device: str = "cpu") -> list[int]:
    """Return the peak of bytes of tensors that are alive at once while something runs, above those before it.

    These are the bytes that PyTorch's allocator has handed out, including temporary memory of operators. They do not
    depend on malloc's behaviour.

    Args:
        run: called once, with a function that it may call where one part ends and the next one begins.
        device: cpu or cuda.

    Returns:
        The peak of each part.

    Example:
        >>> def two_parts(mark):
        ...     x = torch.zeros(1000)
        ...     mark()
        ...     return x.clone()
        >>> most_alive(two_parts)
        [4000, 8000]
    """
    if device != "cpu":
        peaks = []
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

        def mark() -> None:
            peaks.append(torch.cuda.max_memory_allocated() - before)
            torch.cuda.reset_peak_memory_stats()

        run(mark)
        mark()
        return peaks
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it logs each start and stop to the terminal
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    marks: list[int] = []
    Arena.pools = False
    try:
        with profile as found:
            run(lambda: marks.append(time.time_ns()))
    finally:
        Arena.pools = True
    alive, most = 0, [0] * (len(marks) + 1)
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        part = bisect.bisect(marks, event.start_ns())
        alive += event.nbytes()
        most[part] = max(most[part], alive)
    return most


def footprint(way: Way, build: Callable[[], Subject], *, seed: int = 0, optimizer: str = "adamw") -> int | None:
    """Measure the memory of training as a whole on the CPU, in bytes.

    It includes parameters, gradients, the optimizer's state, inputs, what is kept for backward, and temporary memory.
    It is the peak of the resident set of a separate process over three steps, above its size with all libraries
    loaded. It depends on the process's allocator, which environment variables choose.

    Args:
        way: how to train.
        build: makes the model and its inputs: a function of a module, or a partial of one.
        seed: of parameters and data.
        optimizer: one of :data:`OPTIMIZERS`.

    Returns:
        The bytes; None if the system does not report them.

    Raises:
        BrokenProcessPool: the process was killed, perhaps because memory ran out.

    Example:
        >>> footprint(Way("plain"), functools.partial(subject, "gpt", 4)) > 4 * 4 * 10_000_000
        True
    """
    return _alone(functools.partial(_footprint_alone, optimizer), way, build, seed)


def _alone(measure: Callable[..., int | None], way: Way, build: Callable[[], Subject], seed: int) -> int | None:
    """Run a measurement in a process that has done nothing else."""
    if not sys.platform.startswith("linux"):
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as alone:
        return alone.submit(measure, way, build, seed, torch.get_num_threads()).result()


def _peak_alone(way: Way, build: Callable[[], Subject], seed: int, threads: int) -> int | None:
    """Measure the peak of memory in the third step, above the model and its inputs."""
    torch.set_num_threads(threads)
    _load(way)
    row = _Row(way, build, "cpu", seed)
    try:
        before = _status("VmRSS")
        row.step()
        row.step()
        _begin_anew()
        row.step()
        return _status("VmHWM") - before
    except OSError:
        return None


def _footprint_alone(optimizer: str, way: Way, build: Callable[[], Subject], seed: int, threads: int) -> int | None:
    """Measure the peak of memory over three steps, including the model."""
    torch.set_num_threads(threads)
    _load(way)
    try:
        before = _status("VmRSS")
        _begin_anew()
        _train(_Row(way, build, "cpu", seed), optimizer)
        return _status("VmHWM") - before
    except OSError:
        return None


def _train(row: _Row, optimizer: str) -> None:
    """Train for three steps."""
    made = optimizer_of(optimizer, row.model.parameters())
    for _ in range(3):
        row.step()
        made.step()


def _load(way: Way) -> None:
    """Load all libraries and loops that a step needs."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    own = way.policy
    named = {own.bits, *own.operators.values(), *own.modules.values()}
    for bits in named & {8, 4, 2} or {8}:
        policy = replace(own, bits=bits, operators={}, modules={})  # type: ignore[arg-type]
        with compress_activations(model, policy=policy), torch.autocast("cpu", torch.bfloat16, enabled=way.amp):
            output = model(torch.randn(policy.min_numel // 64 + 1, 64))
        torch.autograd.backward(scalar_of(output))
    torch.optim.AdamW(model.parameters(), fused=True).step()


def _begin_anew() -> None:
    """Reset the peak of the resident set, as Linux counts it."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


# ---- one model -------------------------------------------------------------------------------------------------------


def survey(model: nn.Module, inputs: tuple[Any, ...], policy: ActivationPolicy, *, amp: bool = False) -> Saved:
    """Return what one step of a model saves under a policy, with the seconds that packing and unpacking take.

    Args:
        model: the model, in the mode in which it is trained.
        inputs: inputs of its forward.
        policy: says in how many bits what is kept.
        amp: whether forward runs under bfloat16 autocast.

    Raises:
        ValueError: the model raises an error in such a step, with or without compression. The message names the error.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    context = compress_activations(model, policy=policy)
    try:
        for _ in range(2):  # the first step compiles loops
            with context as saved, torch.autocast(device, torch.bfloat16, enabled=amp):
                output = model(*inputs)
            torch.autograd.backward(scalar_of(output))
            model.zero_grad()
    except Exception as error:
        if not is_out_of_memory(error):  # check whether the model raises it without compression, too
            with torch.autocast(device, torch.bfloat16, enabled=amp), users_errors("the model's forward raised"):
                output = model(*inputs)
            loss = scalar_of(output)
            with users_errors("the model's backward raised"):
                torch.autograd.backward(loss)
        raise
    return saved
