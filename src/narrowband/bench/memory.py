"""What backward keeps of a model's activations, in bytes and in time: plain, in few bits, and recomputed.

``run`` compares ways to train in less memory. All rows live in one process and take turns, so that a machine that
others use treats them alike; ``ratio_to_plain`` is the median over rounds of a row's step over the plain step right
before it. A step is forward and backward, and what is timed follows a step of the same kind, as in training. Two
measures of memory stand beside each other:

* ``kept_bytes``: what autograd keeps between forward and backward, every tensor's memory counted once, without
  parameters, buffers and inputs;
* ``peak_bytes``: how far training takes memory above what is held before its first step, gradients and all that is
  needed for a moment included: on CPU the resident set, of a process in which nothing else ever ran, since what malloc
  makes of freed memory depends on all that came before; on CUDA the allocator's peak.

``survey`` says what each operator and module of one model keeps, and ``fit`` finds the policy that keeps it within a
budget and costs least.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import gc
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from narrowband.activations import ActivationPolicy, Saved, compress_activations
from narrowband.bench.ranks import check_seed
from narrowband.bench.subjects import SUBJECTS, subject, tried

__all__ = ["Config", "Fit", "count", "fit", "run", "survey"]


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
        compiled: Also torch.compile, which needs a C++ compiler and minutes.
        rounds: Timed steps of every row.
        peaks: Also measure peaks of memory; on CPU each row then trains in a process of its own, too. --no-peaks leaves
            these out, which is faster.
        seed: Of parameters and data.
    """

    model: str = "deit-tiny"
    batch: int = 32
    bits: tuple[int, ...] = (8, 4)
    baselines: bool = False
    compiled: bool = False
    rounds: int = 5
    peaks: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_seed(self.seed)
        for bits in self.bits:
            if bits not in (8, 4, 2):
                raise ValueError(f"bits={bits}: there are 8, 4 and 2")
        if not (self.bits or self.baselines or self.compiled):
            raise ValueError("nothing to measure: give bits, such as 8 4, or ask for baselines")
        if self.model not in SUBJECTS and ":" not in self.model:
            subject(self.model, self.batch)


#: What transformers call the half of a block that is not attention.
_MLPS = "*.mlp"


@dataclass(frozen=True)
class _Kind:
    """One way to train."""

    name: str
    bits: int | None = None
    amp: bool = False
    checkpoint: bool = False
    recompute_mlps: bool = False
    compiled: bool = False


def _kinds(config: Config) -> list[_Kind]:
    kinds = [_Kind("plain"), *(_Kind(f"{bits} bits", bits) for bits in config.bits)]
    if config.baselines:
        mlps = config.bits if _has_mlps(config) else ()
        kinds += [_Kind(f"{bits} bits, MLPs recomputed", bits, recompute_mlps=True) for bits in mlps]
        kinds += [_Kind("checkpoint", checkpoint=True)]
        kinds += [_Kind(f"checkpoint, {bits} bits", bits, checkpoint=True) for bits in config.bits[:1]]
        kinds += [_Kind("bf16", amp=True), *(_Kind(f"bf16, {bits} bits", bits, amp=True) for bits in config.bits)]
        kinds += [_Kind(f"bf16, {bits} bits, MLPs recomputed", bits, amp=True, recompute_mlps=True) for bits in mlps]
        kinds += [_Kind("bf16, checkpoint", amp=True, checkpoint=True)]
    if config.compiled:
        kinds += [_Kind("compiled", compiled=True)]
        kinds += [_Kind(f"compiled, {bits} bits", bits, compiled=True) for bits in config.bits]
    return kinds


def _has_mlps(config: Config) -> bool:
    model, _ = subject(config.model, config.batch)
    return any(fnmatch.fnmatchcase(name, _MLPS) for name, _ in model.named_modules())


def count(config: Config) -> int:
    """How many events a run has."""
    return len(_kinds(config)) * (1 + config.rounds + config.peaks)


class _Row:
    """One way to train: its own model, with the same parameters and inputs as the others'."""

    def __init__(self, kind: _Kind, config: Config, device: str) -> None:
        torch.manual_seed(config.seed)
        self.kind = kind
        self.device = device
        model, inputs = subject(config.model, config.batch)
        self.model, self.inputs = model.to(device), tuple(_moved(x, device) for x in inputs)
        if kind.checkpoint:
            _checkpoint_blocks(self.model)
        if kind.compiled:
            self.model.compile()
        policy = ActivationPolicy(
            bits="off" if kind.bits is None else kind.bits,  # type: ignore[arg-type]
            modules={_MLPS: "checkpoint"} if kind.recompute_mlps else {},
        )
        self.context = compress_activations(self.model, policy=policy)
        self.steps: list[float] = []
        self.plain_steps: list[float] = []  # right before

    def step(self, *, counted: bool = False) -> Saved | None:
        """Forward and backward; what was saved, if it is counted or compressed."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with contextlib.ExitStack() as stack:
            saved = stack.enter_context(self.context) if counted or self.kind.bits is not None else None
            stack.enter_context(torch.autocast(self.device, torch.bfloat16, enabled=self.kind.amp))
            output = self.model(*self.inputs)
        torch.autograd.backward(_scalar(output))
        return saved

    def settled(self) -> float:
        """Seconds of a step after one of its kind, as in training."""
        self.step()
        return self.timed()

    def timed(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self.step()
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def run(config: Config, on_event: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Measure all rows.

    Rows hold ``name``, ``step_s``, ``ratio_to_plain``, ``kept_bytes`` and ``kept_ratio`` (plain over kept),
    ``peak_bytes`` and ``peak_ratio`` (None where the system does not tell, or nobody asked), ``compress_s`` (seconds of
    a step that packing and unpacking take) and ``gradient_error``: the norm of the difference from the plain row's
    gradients over the norm of these; rows of other arithmetic (bf16) are compared with bf16.

    Args:
        on_event: called with the name of the row at work.
    """
    tell = on_event or (lambda _: None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.model not in SUBJECTS:
        tried(config.model, config.batch)
    rows = [_Row(kind, config, device) for kind in _kinds(config)]
    counts: list[Saved] = []
    errors: list[float | None] = []
    exact: dict[bool, Tensor] = {}
    for row in rows:
        tell(row.kind.name)
        row.step()
        row.step()  # ranges are known, loops compiled, caches filled
        saved = row.step(counted=True)
        assert saved is not None
        counts.append(saved)
        gradients = _gradients(row.model)
        if row.kind.bits is None:
            exact.setdefault(row.kind.amp, gradients)
        reference = exact.get(row.kind.amp)
        errors.append(None if reference is None else _share(gradients - reference, reference))
    plain = rows[0]
    for turn in range(config.rounds):
        for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
            tell(row.kind.name)
            before = plain.settled() if row is not plain else 0.0
            taken = row.settled()
            row.steps.append(taken)
            row.plain_steps.append(before or taken)
    peaks: list[int | None] = []
    for row in rows:
        if config.peaks:
            tell(row.kind.name)
        peaks.append(_peak(row, config) if config.peaks else None)
    return [_told(*those, counts[0], peaks[0]) for those in zip(rows, counts, errors, peaks, strict=True)]


def _told(
    row: _Row, saved: Saved, error: float | None, peak: int | None, plain: Saved, plain_peak: int | None
) -> dict[str, Any]:
    return {
        "name": row.kind.name,
        "step_s": statistics.median(row.steps),
        "ratio_to_plain": statistics.median(a / b for a, b in zip(row.steps, row.plain_steps, strict=True)),
        "kept_bytes": saved.kept_bytes,
        "kept_ratio": plain.raw_bytes / saved.kept_bytes if saved.kept_bytes else None,
        "saved_of_own": 1 - saved.kept_bytes / saved.raw_bytes if saved.raw_bytes else 0.0,
        "peak_bytes": peak,
        "peak_ratio": None if not peak or not plain_peak else plain_peak / peak,
        "compress_s": sum(kept.seconds for kept in saved.by_operator.values()),
        "gradient_error": error,
        "by_operator": {name: asdict(kept) for name, kept in saved.by_operator.items()},
    }


def _moved(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def _scalar(output: Any) -> Tensor:
    """Something to go backward from, of whatever a model returns."""
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise ValueError(
            f"the model returned {type(output).__name__} with nothing in it that needs gradients, so backward keeps "
            "nothing; return a tensor that depends on parameters with requires_grad"
        )
    return found[0].float().square().mean()


def _share(difference: Tensor, reference: Tensor) -> float | None:
    """One norm over the other; None where that says nothing, because a gradient is zero or not finite."""
    share = float(difference.norm() / reference.norm())
    return share if math.isfinite(share) else None


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().reshape(-1).double().cpu() for p in model.parameters() if p.grad is not None])


def _checkpoint_blocks(model: nn.Module) -> None:
    """Full activation checkpointing: of every block only the input is kept."""
    lists = [m for m in model.modules() if isinstance(m, (nn.Sequential, nn.ModuleList)) and len(m) > 1]
    if not lists:
        raise ValueError("checkpointing needs blocks: a Sequential or ModuleList of several modules")
    for block in max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters())):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _peak(row: _Row, config: Config) -> int | None:
    """Bytes; None where nobody tells."""
    if row.device != "cpu":
        row.model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row.step()
        row.step()
        return torch.cuda.max_memory_allocated() - before
    if not sys.platform.startswith("linux"):
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(_peak_alone, row.kind, config, torch.get_num_threads()).result()


def _peak_alone(kind: _Kind, config: Config, threads: int) -> int | None:
    """Of the third step, in a process that has done nothing else."""
    torch.set_num_threads(threads)
    _load(kind)
    row = _Row(kind, config, "cpu")
    try:
        before = _status("VmRSS")
        row.step()
        row.step()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        row.step()
        return _status("VmHWM") - before
    except OSError:
        return None


def _load(kind: _Kind) -> None:
    """Have all libraries loaded that a step needs."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    context = compress_activations(model, kind.bits or 8, min_numel=1)
    with context, torch.autocast("cpu", torch.bfloat16, enabled=kind.amp):
        output = model(torch.randn(8, 8))
    torch.autograd.backward(_scalar(output))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


# ---- one model -------------------------------------------------------------------------------------------------------


def survey(model: nn.Module, inputs: tuple[Any, ...], policy: ActivationPolicy, *, amp: bool = False) -> Saved:
    """What one step of a model saves under a policy, with the seconds that packing and unpacking take.

    Args:
        model: in the mode it is trained in.
        inputs: of its forward.
        policy: what is kept in how many bits.
        amp: whether it runs under bfloat16 autocast.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    context = compress_activations(model, policy=policy)
    for last in (False, True):  # once for loops to be compiled
        with context as saved, torch.autocast(device, torch.bfloat16, enabled=amp):
            output = model(*inputs)
        torch.autograd.backward(_scalar(output))
        model.zero_grad()
        if last:
            return saved
    raise AssertionError


@dataclass(frozen=True)
class Fit:
    """A policy that keeps within a budget.

    Attributes:
        policy: it.
        saved: what a step keeps with it.
        reached: whether that is within the budget; if not, it is the least that can be reached.
    """

    policy: ActivationPolicy
    saved: Saved
    reached: bool


def fit(measure: Callable[[ActivationPolicy], Saved], budget: int) -> Fit:
    """The policy that keeps at most ``budget`` bytes and takes the least time on the way: operators are compressed one
    after the other, those first whose bytes are saved in the shortest time; to 8 bits, and if that does not do, to 4
    and then to 2, layer norms last.

    Args:
        measure: what is saved under a policy, with seconds; see :func:`survey`.
        budget: bytes that backward may keep.
    """
    policy = ActivationPolicy(bits="off")
    saved = measure(policy)
    if saved.raw_bytes <= budget:
        return Fit(policy, saved, reached=True)
    everything = measure(ActivationPolicy(bits=8))
    cost: dict[str, float] = {}
    for name, kept in everything.by_operator.items():
        # Several operators may share memory, so what one frees shows where it alone is left out.
        without = measure(ActivationPolicy(bits=8, operators={name: "off"})) if name != "custom" else everything
        freed = without.kept_bytes - everything.kept_bytes
        if freed > 0:
            cost[name] = kept.seconds / freed
    order = sorted(cost, key=lambda name: cost[name])
    operators: dict[str, Any] = {}
    for bits in (8, 4, 2):
        if bits < 8:
            order.sort(key=lambda name: name == "layer_norm")  # whose bits count most; the rest stays as it was
        for name in order:
            if bits < 8 and name in ("relu", "dropout"):
                continue  # one bit already
            operators[name] = bits
            policy = ActivationPolicy(bits="off", operators=dict(operators))
            saved = measure(policy)
            if saved.kept_bytes <= budget:
                return Fit(policy, saved, reached=True)
    return Fit(policy, saved, reached=False)
