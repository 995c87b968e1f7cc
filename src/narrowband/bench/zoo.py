"""Measure memory and time of many architectures, for ``narrowband bench memory --zoo``.

Every architecture is measured in a process of its own, with a batch whose plain step takes long enough. Plain steps and
steps in few bits take turns, as in :mod:`~narrowband.bench.memory`.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from narrowband.activations import ActivationPolicy
from narrowband.bench.architectures import ZOO
from narrowband.bench.budget import fit_shares
from narrowband.bench.devices import Device, check_device
from narrowband.bench.loopback import end_with_parent
from narrowband.bench.memory import compare
from narrowband.bench.subjects import subject
from narrowband.bench.trials import Job
from narrowband.bench.ways import Way
from narrowband.errors import is_out_of_memory

__all__ = ["Config", "count", "fitted", "foretold", "profile", "run", "sentence", "summary"]

#: Largest batch.
_MOST = 256


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        names: Models of the zoo; all of it when left out.
        bits: Of what is kept.
        rounds: Timed pairs of steps of every architecture.
        seconds: What a plain step takes at least: batches are as large as that takes.
        peaks: Also measure how many bytes of tensors are alive at once.
        seed: Seed of parameters and data.
        shares: Instead of all that, budgets, with room for such shares of what training as it is holds beside
            parameters, the optimizer's state and inputs.
        device: Where to train; CUDA where there is any, when left out.
    """

    names: tuple[str, ...] = ()
    bits: int = 8
    rounds: int = 7
    seconds: float = 0.3
    peaks: bool = True
    seed: int = 0
    shares: tuple[float, ...] = ()
    device: Device | None = None

    def __post_init__(self) -> None:
        check_device(self.device)
        for share in self.shares:
            if not 0 < share <= 1:
                raise ValueError(f"shares: {share} is not above 0 and at most 1")
        for name in self.names:
            if name not in ZOO:
                raise ValueError(f"the zoo has no {name!r}; there are: {', '.join(ZOO)}")


def count(config: Config) -> int:
    """Return the number of rows of a run."""
    return len(config.names or ZOO)


def run(config: Config, known: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Yield a row for every architecture, as soon as it is measured.

    Rows hold ``name`` and ``family``. An architecture that could not be measured also has ``skipped``, a sentence;
    others have ``batch`` and

    * ``plain_s``: a plain step; ``ratio_to_plain``: the step in few bits over it, and ``ratios``: the same by round;
    * ``kept_bytes``, and ``kept_share``: their share of the bytes that a plain step keeps;
    * ``peak_share``: the peak of bytes of tensors, without parameters and inputs, as a share of a plain step's;
    * ``gradient_cosine``: the cosine between a step's gradients and the exact ones.

    With ``config.shares``, they have ``batch`` and instead

    * ``plain_bytes`` and ``notes``;
    * ``budgets``: for every ``share`` whether it was ``reached``; the ``predicted`` and ``measured`` bytes, and the
      ``error`` of the former; ``predicted_ratio`` and ``ratio_to_plain`` of steps; ``gradient_error``; and ``units``:
      kind of offer → number of units that have it.

    Args:
        config: what to measure.
        known: rows that an earlier run finished, which are not measured again.
    """
    there = {row["name"]: row for row in known if "skipped" not in row}
    for name in config.names or tuple(ZOO):
        if name in there:
            yield there[name]
            continue
        about = {"name": name, "family": ZOO[name].family}
        if not ZOO[name].is_installed:
            yield about | {"skipped": f"{ZOO[name].package} is not installed: pip install {ZOO[name].package}"}
            continue
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as alone:
            try:
                measure = _budgets if config.shares else _measured
                yield about | alone.submit(measure, name, config, torch.get_num_threads()).result()
            except BrokenProcessPool:
                yield about | {"skipped": "its process was ended, for want of memory perhaps"}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and largest ratio of steps, the median and largest kept share, and the smallest cosine.

    Raises:
        ValueError: nothing was measured.
    """
    measured = [row for row in rows if "skipped" not in row]
    if not measured:
        raise ValueError("nothing was measured: " + "; ".join(f"{row['name']}: {row['skipped']}" for row in rows[:3]))
    ratios = sorted((row["ratio_to_plain"], row["name"]) for row in measured)
    return {
        "measured": len(measured),
        "median_ratio": statistics.median(ratio for ratio, _ in ratios),
        "worst_ratio": ratios[-1][0],
        "worst": ratios[-1][1],
        "median_kept_share": statistics.median(row["kept_share"] for row in measured),
        "largest_kept_share": max(row["kept_share"] for row in measured),
        "least_cosine": min(row["gradient_cosine"] for row in measured),
    }


def profile(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return where the time goes in each family, the largest share first.

    The share of an operator is the time in which its tensors are packed and restored, over the plain step; it is the
    mean over the family's architectures. The rest of the difference between both steps is due to hooks, and to memory
    that is cold or new.

    Returns:
        Rows of ``family``, ``architectures``, ``whole``, ``rest``, and ``operators``: name → share.
    """
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "skipped" not in row:
            families.setdefault(row["family"], []).append(row)
    found = []
    for family, own in families.items():
        shares: Counter[str] = Counter()
        for row in own:
            for name, kept in row["by_operator"].items():
                shares[name] += kept["seconds"] / row["plain_s"] / len(own)
        whole = statistics.fmean(row["ratio_to_plain"] - 1 for row in own)
        operators = dict(shares.most_common())
        rest = whole - sum(operators.values())
        found.append(
            {"family": family, "architectures": len(own), "whole": whole, "rest": rest, "operators": operators}
        )
    return found


def sentence(rows: Sequence[dict[str, Any]]) -> str:
    """Summarize the results in a sentence."""
    try:
        found = summary(rows)
    except ValueError as error:
        return f"{error}."
    return (
        f"Of {found['measured']} architectures the median step takes {found['median_ratio']:.2f} times as long as "
        f"plain, that of {found['worst']} {found['worst_ratio']:.2f} times; {found['median_kept_share']:.0%} of the "
        f"bytes are kept, at most {found['largest_kept_share']:.0%}; the least cosine of a gradient is "
        f"{found['least_cosine']:.4f}."
    )


def foretold(rows: Sequence[dict[str, Any]]) -> str:
    """Say in a sentence how well budgets were met and predicted."""
    found = [budget for row in rows for budget in row.get("budgets", ())]
    if not found:
        return sentence(rows)
    errors = sorted(abs(budget["error"]) for budget in found)
    met = sum(budget["reached"] for budget in found)
    steps = sorted(abs(budget["predicted_ratio"] / budget["ratio_to_plain"] - 1) for budget in found)
    angles = sorted(budget["gradient_error"] for budget in found if budget["gradient_error"] is not None)
    gradients = (
        f" Gradients are off by {statistics.median(angles):.1%} in the median, and by {angles[-1]:.0%} at most."
        if angles
        else ""
    )
    return (
        f"Of {len(found)} budgets {met} were met; of the others the least that was found is shown. The bytes that were "
        f"predicted are off by {statistics.median(errors):.1%} in the median, and by {errors[-1]:.1%} at most; the "
        f"times of steps by {statistics.median(steps):.0%} and {steps[-1]:.0%}.{gradients}"
    )


def _skipping(measure: Callable[[str, Config], dict[str, Any]], name: str, config: Config) -> dict[str, Any]:
    try:
        return measure(name, config)
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        why = "there is not enough memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        return {"skipped": f"it does not run with the version that is installed: {why}"}


def _budgets(name: str, config: Config, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return _skipping(fitted, name, config)


def fitted(name: str, config: Config) -> dict[str, Any]:
    """Train one architecture within budgets; return its row without name and family."""
    batch = _batch(name, config)
    job = Job(functools.partial(subject, name, batch), device=config.device, seed=config.seed, alone=False)
    fits = fit_shares(job, config.shares)
    return {
        "batch": batch,
        "plain_bytes": fits[0].plain,
        "notes": fits[0].notes,
        "budgets": [
            {
                "share": share,
                "reached": found.reached,
                "predicted": found.predicted,
                "measured": found.measured,
                "error": found.predicted / found.measured - 1,
                "predicted_ratio": found.predicted_ratio,
                "ratio_to_plain": found.ratio,
                "gradient_error": found.gradient_error,
                "units": Counter(found.choices.values()),
            }
            for share, found in zip(config.shares, fits, strict=True)
        ],
    }


def _measured(name: str, config: Config, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return _skipping(compared, name, config)


def compared(name: str, config: Config) -> dict[str, Any]:
    """Measure one architecture, plain and in few bits; return its row without name and family."""
    ways = [Way("plain"), Way("few bits", ActivationPolicy(bits=config.bits))]  # type: ignore[arg-type]
    batch = _batch(name, config)
    while True:
        plain, few = compare(
            ways,
            functools.partial(subject, name, batch),
            rounds=config.rounds,
            peaks=config.peaks and "alive",
            device=config.device,
            seed=config.seed,
        )
        if plain["step_s"] >= config.seconds or batch >= _MOST:
            break
        batch *= 2  # steps are now faster than when the batch was chosen
    return {
        "batch": batch,
        "plain_s": plain["step_s"],
        "ratio_to_plain": few["ratio_to_plain"],
        "ratios": few["ratios"],
        "kept_bytes": few["kept_bytes"],
        "kept_share": few["kept_bytes"] / plain["kept_bytes"],
        "peak_share": few["peak_bytes"] / plain["peak_bytes"] if few["peak_bytes"] and plain["peak_bytes"] else None,
        "gradient_cosine": few["gradient_cosine"],
        "compress_s": few["compress_s"],
        "by_operator": few["by_operator"],
    }


def _batch(name: str, config: Config) -> int:
    """Return the smallest power of two with which a plain step is long enough."""
    batch = 1
    while config.seconds > 0:
        build = functools.partial(subject, name, batch)
        (plain,) = compare([Way("plain")], build, rounds=3, peaks=False, device=config.device, seed=config.seed)
        short = config.seconds / plain["step_s"]
        if short <= 1 or batch >= _MOST:
            break
        batch *= 2 if short < 3 else 4 if short < 6 else 8
    return batch
