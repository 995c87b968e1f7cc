"""Predict steps with every option on a link: measure the model, the codecs and this machine, and simulate the rest."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from narrowband.adapt import Plan
from narrowband.bench.ranks import check_seed
from narrowband.bench.subjects import tried
from narrowband.planning import (
    DEFAULT_CODECS,
    LOSS_TOLERANCE,
    Advice,
    Cluster,
    Host,
    Link,
    Measured,
    Network,
    Profile,
    Row,
    advise,
    measure_host,
    measure_step,
    measured,
    optimizer_of,
    options,
    plan_of,
    predict,
)
from narrowband.planning.choices import check_specs
from narrowband.planning.measure import OptimizerName

__all__ = ["LINKS", "Config", "Found", "Report", "run", "usable_cores"]

#: For a range of machines, the links that they may be behind, in bits per second.
LINKS = (10e6, 30e6, 100e6, 300e6, 1e9, 3e9, 10e9, 30e9, 100e9)

#: A machine whose steps differ so much is busy with something else.
_BUSY = 0.25


@dataclass(frozen=True)
class Config:
    """What to predict.

    Attributes:
        batch: Samples of one rank.
        link: Rate of each machine's link: 200mbit, 1gbit, or 20mbit/100mbit where it sends slower than it receives.
        delay: One-way delay between machines: 20ms, …
        nodes: Machines: 4; or from some to many, 1..10000, for a table of what to do among how many, on which links.
        per_node: Ranks on each; they share its link and its cores.
        optimizer: Whose step is measured, and with which losses were.
        codecs: Specs to choose from, for gradients.
        every: Optimizer steps from one round of updates to the next; one or several. Those that were measured with the
            optimizer are there, too.
        bucket_cap_mb: DDP's bucket size.
        tolerance: What may be lost, as a share of the loss.
        steps: That are measured.
        seed: Of parameters and data.
    """

    batch: int = 8
    link: str = "1gbit"
    delay: str | None = None
    nodes: str = "2"
    per_node: int = 1
    optimizer: OptimizerName = "adamw"
    codecs: tuple[str, ...] = DEFAULT_CODECS
    every: tuple[int, ...] = ()
    bucket_cap_mb: float = 25.0
    tolerance: float = LOSS_TOLERANCE
    steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb} must be above 0")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance={self.tolerance} must be a share of the loss, such as 0.02")
        check_seed(self.seed)
        check_specs(self.codecs, self.every)
        Link.of(self.link, self.delay)
        if self.clusters[-1].ranks < 2:
            raise ValueError("one rank sends nothing, so there is nothing to compress; give nodes or per_node")

    @property
    def clusters(self) -> list[Cluster]:
        """Who may train; several where ``nodes`` is a range."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.\s*(\d{1,9})\s*)?", self.nodes)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(f"nodes={self.nodes!r} is no number of machines; write 4, or 1..10000")
        steps = {round(each * 10**power) for power in range(10) for each in (1, 2, 5)}
        numbers = sorted({first, last, *(step for step in steps if first < step < last)})
        return [Cluster(number, self.per_node) for number in numbers]

    @property
    def is_range(self) -> bool:
        """Whether ``nodes`` is one."""
        return ".." in self.nodes


@dataclass(frozen=True)
class Found:
    """What was measured, what is predicted of it, and what to do."""

    profile: Profile
    network: Network
    predicted: list[Row]
    advice: Advice

    def rows(self) -> list[dict[str, Any]]:
        """JSON-able: ``name``, ``spec``, ``levels``, ``every``, ``collective``, ``step_s`` and its parts,
        ``sent_bytes_per_step``, ``link_bytes_per_step``, ``residual_bytes``, ``loss`` and ``loss_command``.
        """
        return [
            {
                "name": row.name,
                **asdict(row.option),
                "collective": row.predicted.collective,
                **asdict(row.predicted.outcome),
                "sent_bytes_per_step": row.predicted.sent_nbytes,
                "link_bytes_per_step": row.predicted.link_nbytes,
                "residual_bytes": row.predicted.residual_nbytes,
                "loss": "–" if row.fact is None else str(row.fact),
                "loss_command": None if row.fact is None else row.fact.command,
            }
            for row in self.predicted
        ]

    def summary(self) -> dict[str, Any]:
        """What to do, JSON-able."""
        advice, cluster = self.advice, self.network.cluster
        return {
            "nodes": cluster.nodes,
            "per_node": cluster.per_node,
            "rate_bits_per_s": self.network.link.rate,
            "name": advice.row.name,
            "compress": advice.compress,
            "step_s": advice.row.step_s,
            "times_as_fast": advice.times,
            "sentence": advice.sentence,
        }

    def plan(self) -> Plan:
        """What is advised, as a plan."""
        return plan_of(self.profile, self.advice.row.option, self.network.cluster)


@dataclass(frozen=True)
class Report:
    """All that a model was measured for.

    Attributes:
        profile: of the model and the codecs.
        host: of this machine.
        found: one entry; or, for a range of machines, one for each number of them and each link.
    """

    profile: Profile
    host: Host
    found: list[Found]

    @property
    def notes(self) -> list[str]:
        """What makes the figures doubtful."""
        if self.profile.spread <= _BUSY:
            return []
        note = (
            f"Measured steps differed by {self.profile.spread:.0%}: this machine is busy with something else, and "
            "predictions are as uncertain as that. Measure again when it is idle."
        )
        return [note]

    def record(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        measured = {"profile": asdict(self.profile), "host": asdict(self.host)}
        advice = [each.summary() for each in self.found]
        if len(self.found) == 1:
            return {**measured, "rows": self.found[0].rows(), "advice": advice[0]}
        return {**measured, "rows": advice}


def run(model: str, config: Config, on_event: Callable[[str], None] = lambda _: None) -> Report:
    """Measure, and predict.

    Args:
        model: deit-tiny, deit-small, gpt, resnet18, or yours: file.py:function, called with the batch size, returns a
            module and the tuple of its inputs.
        on_event: called with what is done next.

    Raises:
        ValueError: a model that cannot be measured; says why.
    """
    torch.manual_seed(config.seed)
    clusters = [cluster for cluster in config.clusters if cluster.ranks > 1]
    cores = usable_cores()
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, cores // config.per_node)))
    try:
        measurement = _measured_step(model, config)
        chosen = {cluster: options(config.codecs, config.optimizer, cluster, config.every) for cluster in clusters}
        profile = measured(measurement, chosen, lambda spec: on_event(f"measuring {spec}"))
    finally:
        torch.set_num_threads(before)
    on_event("measuring messages")
    host = measure_host()
    links = [Link.of(config.link, config.delay)]
    if config.is_range:
        links = [replace(links[0], up=rate, down=rate) for rate in LINKS]
    found = []
    for cluster, link in itertools.product(clusters, links):
        network = Network(link, cluster, host, cores)
        predicted = [predict(profile, option, network) for option in chosen[cluster]]
        found.append(Found(profile, network, *advise(predicted, config.optimizer, network, tolerance=config.tolerance)))
    return Report(profile, host, found)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measured_step(model: str, config: Config) -> Measured:
    net, inputs = tried(model, config.batch)
    return measure_step(
        net,
        inputs,
        lambda module: optimizer_of(config.optimizer, module),
        bucket_cap_mb=config.bucket_cap_mb,
        steps=config.steps,
    )
