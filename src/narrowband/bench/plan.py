"""Predict steps with every option on a link: measure the model, the codecs and this machine, and simulate the rest."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from narrowband.adapt import Plan
from narrowband.bench.ranks import RankError, check_seed
from narrowband.bench.subjects import Subject, numel_of, remark, tried
from narrowband.errors import DisagreementError
from narrowband.planning import (
    DEFAULT_CODECS,
    LOSS_TOLERANCE,
    Advice,
    Cluster,
    Host,
    Link,
    Measured,
    Network,
    Option,
    Profile,
    Row,
    advise,
    measure_host,
    measure_step,
    measured,
    optimizer_of,
    options,
    outer_of,
    plan_of,
    predict,
)
from narrowband.planning.choices import check_specs
from narrowband.planning.measure import OptimizerName
from narrowband.planning.meeting import Lockstep, Meeting, MeetingError, OtherRankError, join
from narrowband.planning.network import Pair, link_of, measure_pairs

__all__ = ["LINKS", "Config", "Found", "Report", "run", "usable_cores"]

#: Default links for a range of machines, in bits per second.
LINKS = (10e6, 30e6, 100e6, 300e6, 1e9, 3e9, 10e9, 30e9, 100e9)

#: Seconds in which all ranks have to join, once torchrun has started them.
_ARRIVAL_S = 300.0
#: Seconds that a rank may take to build the model, or to measure one thing; gloo's own patience.
_PATIENCE_S = 1800.0

#: If the measured steps differ by this share, the machine is busy with something else.
_BUSY = 0.25


@dataclass(frozen=True)
class Config:
    """What to predict.

    Attributes:
        batch: Samples of one rank; with accumulate, of one micro-batch.
        accumulate: Micro-batches per optimizer step. Gradients are sent with the last one: the others are in no_sync().
        link: Rate of each machine's link: 200mbit, or 20mbit/100mbit if it sends slower than it receives. When left
            out, it is 1gbit, and for a range of nodes 10mbit to 100gbit.
        delay: One-way delay between machines: 20ms, …
        measure: Measure the links, and the step on every rank, among ranks that torchrun has started: torchrun … -m
            narrowband.cli plan model.py:build --measure. Then link, delay, nodes and per_node are not given.
        nodes: Number of machines: 4; or a range, 1..10000, for a table of what to do for each number and link. Left
            out: 2.
        per_node: Ranks on each; they share its link and its cores. Left out: 1.
        optimizer: The optimizer that you train with: adamw; sgd, with momentum; muon, for matrices that are no
            embeddings; or lora, AdamW on a model whose adapters alone require gradients. Its step is measured, and its
            known losses are shown.
        codecs: Specs to choose from, for gradients.
        every: Optimizer steps from one round of updates to the next; one or several, beside those whose losses were
            measured. For machines of one rank.
        bucket_cap_mb: DDP's bucket size.
        tolerance: How far the mean loss may be above that of uncompressed training, as a share of it.
        steps: How many steps of the model are measured.
        seed: Seed of parameters and data.
    """

    batch: int = 8
    accumulate: int = 1
    link: str | None = None
    delay: str | None = None
    measure: bool = False
    nodes: str | None = None
    per_node: int | None = None
    optimizer: OptimizerName = "adamw"
    codecs: tuple[str, ...] = DEFAULT_CODECS
    every: tuple[int, ...] = ()
    bucket_cap_mb: float = 25.0
    tolerance: float = LOSS_TOLERANCE
    steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.bucket_cap_mb < math.inf:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb} must be a number above 0")
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance={self.tolerance} must be a share of the loss, such as 0.02")
        check_seed(self.seed)
        check_specs(self.codecs, self.every)
        given = [name for name in ("link", "delay", "nodes", "per_node") if getattr(self, name) is not None]
        if self.measure and given:
            raise ValueError(
                f"--measure finds {', '.join(given)} by itself: leave out either --measure or {', '.join(given)}"
            )
        self.told_link()
        _options(self, self.clusters[-1])
        if self.clusters[-1].ranks < 2:
            raise ValueError("one rank sends nothing, so there is nothing to compress; give nodes or per_node")

    def told_link(self) -> Link:
        """The link that users say."""
        return Link.of(self.link or "1gbit", self.delay)

    @property
    def clusters(self) -> list[Cluster]:
        """Who may train; several where ``nodes`` is a range."""
        per_node = 1 if self.per_node is None else self.per_node
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.\s*(\d{1,9})\s*)?", self.nodes or "2")
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(
                f"nodes={self.nodes!r} is not a number of machines; give a number such as 4, or a range such as "
                "1..10000"
            )
        steps = {round(each * 10**power) for power in range(10) for each in (1, 2, 5)}
        numbers = sorted({first, last, *(step for step in steps if first < step < last)})
        return [Cluster(number, per_node) for number in numbers]

    @property
    def is_range(self) -> bool:
        """Whether ``nodes`` is one."""
        return self.nodes is not None and ".." in self.nodes


@dataclass(frozen=True)
class Found:
    """The predictions for one cluster and link, and the advice."""

    profile: Profile
    network: Network
    predicted: list[Row]
    advice: Advice

    def rows(self) -> list[dict[str, Any]]:
        """Return JSON-able rows: ``name``, ``spec``, ``levels``, ``every``, ``collective``, ``step_s`` and its parts,
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
                "residual_bytes": row.predicted.residual_nbytes + self._momentum_nbytes(row),
                "loss": "–" if row.fact is None else str(row.fact),
                "loss_command": None if row.fact is None else row.fact.command,
            }
            for row in self.predicted
        ]

    def _momentum_nbytes(self, row: Row) -> int:
        """Return the bytes of momentum of DiLoCo's outer step, which has one number for every parameter."""
        by_nesterov = row.option.every and outer_of(row.option, row.fact) == "nesterov"
        return 4 * self.profile.numel if by_nesterov else 0

    def summary(self) -> dict[str, Any]:
        """Return the advice, JSON-able."""
        advice, cluster = self.advice, self.network.cluster
        return {
            "nodes": cluster.nodes,
            "per_node": cluster.per_node,
            "rate_bits_per_s": self.network.link.rate,
            "name": advice.row.name,
            **asdict(advice.row.option),
            "compress": advice.compress,
            "step_s": advice.row.step_s,
            "times_as_fast": advice.times,
            "sentence": advice.sentence,
        }

    def plan(self) -> Plan:
        """Return the advised option as a plan."""
        return plan_of(self.profile, self.advice.row.option, self.network.cluster)


@dataclass(frozen=True)
class Report:
    """All that a model was measured for.

    Attributes:
        profile: of the model and the codecs.
        host: of this machine.
        found: one entry; or, for a range of machines, one for each number of them and each link.
        parameters: how many the model has, frozen ones included.
        remark: which model its name stands for, where that is not plain.
        pairs: the links that were measured.
    """

    profile: Profile
    host: Host
    found: list[Found]
    parameters: int
    remark: str = ""
    pairs: list[Pair] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return reasons to doubt the figures."""
        notes = [self.remark] if self.remark else []
        if self.profile.spread > _BUSY:
            notes.append(
                f"Measured steps differed by {self.profile.spread:.0%}: this machine is busy with something else, and "
                "predictions are as uncertain as that. Measure again when it is idle."
            )
        return notes

    def record(self) -> dict[str, Any]:
        """Return everything, JSON-able."""
        pairs = {"pairs": [asdict(pair) for pair in self.pairs]} if self.pairs else {}
        profile = {"parameters": self.parameters, "profile": asdict(self.profile)}
        measured = {**profile, "host": asdict(self.host), **pairs}
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
    if config.measure:
        return _run_together(model, config, on_event)
    clusters = [cluster for cluster in config.clusters if cluster.ranks > 1]
    subject = _built(model, config)
    profile = _profile(subject, config, clusters, on_event)
    on_event("measuring messages")
    host = measure_host()
    links = [config.told_link()]
    if config.is_range and config.link is None:
        links = [replace(links[0], up=rate, down=rate) for rate in LINKS]
    networks = [Network(link, cluster, host, usable_cores()) for cluster, link in itertools.product(clusters, links)]
    found = [_found(config, profile, network) for network in networks]
    return Report(profile, host, found, numel_of(subject[0]), remark(model, subject[0]))


def _run_together(model: str, config: Config, on_event: Callable[[str], None]) -> Report:
    """Measure and predict among ranks that torchrun has started, all at the same time, on the real links."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "--measure must be started by torchrun: torchrun --nnodes 2 … -m narrowband.cli plan "
            "model.py:build --measure. Without torchrun, give the link, such as --link 200mbit"
        )
    try:
        meeting = join(_ARRIVAL_S)
        try:
            found = _measured_together(model, config, meeting, on_event)
        except (OtherRankError, DisagreementError):
            meeting.leave(1)  # when all have heard of it
            raise
        meeting.leave(0)
        return found
    except MeetingError as error:
        raise RankError(str(error)) from None


def _measured_together(model: str, config: Config, meeting: Meeting, on_event: Callable[[str], None]) -> Report:
    """What all ranks know in the end."""
    lockstep, ranks = Lockstep(meeting, _PATIENCE_S), meeting.size
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    lockstep.compare("options", {**asdict(config), "ranks on a machine": per_node})
    with lockstep.together():
        if ranks % per_node or ranks // per_node < 2:
            raise ValueError(
                f"{ranks} ranks with {per_node} on each machine: --measure needs two machines or more, with as many "
                "ranks on each; narrowband lab --nodes 2 emulates them"
            )
        cluster = Cluster(ranks // per_node, per_node)
        _options(config, cluster)  # raises for options that cannot be predicted, before anything is measured
        on_event("building")
        subject = _built(model, config)
    lockstep.compare("the model", _about(subject))

    def begin(what: str) -> None:
        """All ranks measure the same at the same time, since those of a machine share its cores."""
        lockstep.point()
        on_event(what)
        dist.barrier()

    store: Any = meeting.store_of("group")
    try:
        dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=ranks)
    except RuntimeError as error:
        raise RankError(
            f"rank {meeting.rank} could not create a gloo process group: {str(error).splitlines()[0]}. narrowband "
            "doctor "
            "--peers, started in the same way, names the link at fault and says what to do"
        ) from error
    try:
        with lockstep.together():
            profile = _profile(subject, config, [cluster], begin)
            begin("measuring links")
            pairs = measure_pairs(cluster.nodes, cluster.per_node)
            link, latency_s = link_of(pairs, cluster.nodes)
            # All ranks use the profile of the slowest rank, which the others wait for.
            profiles: list[Profile] = [profile] * ranks
            dist.all_gather_object(profiles, profile)
            slowest = max(profiles, key=lambda each: each.compute_s)
            host = measure_host()
            # The rest is the link's: ranks of one machine do not wait for it.
            link = replace(link, delay_s=max(0.0, latency_s - host.hop_s))
    finally:
        dist.destroy_process_group()
    network = Network(link, cluster, host, usable_cores())
    found = [_found(config, slowest, network)]
    return Report(slowest, host, found, numel_of(subject[0]), remark(model, subject[0]), pairs)


def _about(subject: Subject) -> dict[str, Any]:
    """Summarize what is averaged in few bytes, because links may be slow."""
    shapes = {name: tuple(x.shape) for name, x in subject[0].named_parameters() if x.requires_grad}
    return {
        "the number of parameters": len(shapes),
        "the number of elements": sum(map(math.prod, shapes.values())),
        "the hash of names and shapes": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
    }


def _built(model: str, config: Config) -> Subject:
    """Build the model, equal on every rank, and check that it takes its inputs."""
    torch.manual_seed(config.seed)
    return tried(model, config.batch)


def _profile(subject: Subject, config: Config, clusters: Sequence[Cluster], on_event: Callable[[str], None]) -> Profile:
    """Measure the model, and all codecs that it may need in these clusters."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, usable_cores() // clusters[0].per_node)))
    try:
        on_event("measuring the model")
        measurement = _measured_step(subject, config)
        chosen = {cluster: _options(config, cluster) for cluster in clusters}
        found = measured(measurement, chosen, lambda spec: on_event(f"measuring {spec}"))
        return found.accumulated(config.accumulate)
    finally:
        torch.set_num_threads(before)


def _options(config: Config, cluster: Cluster) -> list[Option]:
    return options(config.codecs, config.optimizer, cluster, config.every)


def _found(config: Config, profile: Profile, network: Network) -> Found:
    predicted = [predict(profile, option, network) for option in _options(config, network.cluster)]
    return Found(profile, network, *advise(predicted, config.optimizer, network, tolerance=config.tolerance))


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measured_step(subject: Subject, config: Config) -> Measured:
    net, inputs = subject
    return measure_step(
        net,
        inputs,
        lambda module: optimizer_of(config.optimizer, module),
        bucket_cap_mb=config.bucket_cap_mb,
        steps=config.steps,
    )
