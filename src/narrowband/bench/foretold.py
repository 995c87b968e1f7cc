"""Compare the steps that ``narrowband plan`` predicts with measured ones.

Behind each link, the ranks first measure what ``narrowband plan`` measures: a step of the model, codecs with its
gradients, and the time of a small message. All ranks measure at the same time, because they share this machine's cores.
Then every option is simulated. After that the same ranks train, as in :mod:`narrowband.bench.ddp`, and the measured
step times are compared with the predicted ones. No measurement of these steps enters the predictions.

The speed of a shared machine varies from minute to minute. So each row has a second prediction, for a processor as fast
as when the row was measured; its speed is that of the step with nothing sent, right before each round. The error of the
first prediction is the one that a user sees; that of the second is the error of the simulation.

Rows are gradients, with one rank on each machine or with several, flat and on two levels; or rounds of updates.

An error in seconds does no harm as long as the advice is right. So :func:`verdicts` compares, for each link, the
predicted best choice with the measured one, and the options that are faster than plain DDP.

``run`` starts the ranks and puts rows together; this module run as ``python -m`` is one rank.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from narrowband.bench import ddp, ddp_rows
from narrowband.bench.models import GPT, MODELS
from narrowband.bench.ranks import RankProcess, check_seed, run_ranks
from narrowband.collectives import all_reduce_nbytes
from narrowband.collectives.primitives import all_gather_single
from narrowband.planning import (
    DDP,
    Bucket,
    Cluster,
    Codec,
    Host,
    Line,
    Link,
    Network,
    Option,
    Piece,
    Profile,
    Share,
    Trained,
    measure_step,
    measured,
    optimizer_of,
    predict,
)
from narrowband.planning.choices import check_specs, takes_updates
from narrowband.planning.host import PAUSE_S

__all__ = ["MARGIN", "Config", "count", "run", "verdicts"]

#: Options whose steps differ by at most this share are equally good choices.
MARGIN = 0.1

_SMALL, _LARGE = 2, 1 << 20  # elements of float32
_TIMES_SMALL, _TIMES_LARGE = 51, 2


@dataclass(frozen=True)
class Config:
    """What to predict and to measure.

    Attributes:
        model: Which GPT: gpt-13m, gpt-demo or gpt-tiny (13.3, 3.3 and 0.13 million parameters).
        rates: Rates of every link in both directions; 20mbit/100mbit where machines send slower than they receive.
        nodes: Among how many machines.
        per_node: Ranks on each, which share its link and its cores. With several, each codec has two rows: among all
            ranks, and on two levels.
        codecs: Spec strings; left out: one of every codec but threshold, which sends as much as the gradients have it,
            so that nobody can predict it. DDP without a hook is always there.
        every: Optimizer steps from one round of updates to the next, for all codecs that can compress updates; 0:
            gradients. With 0 15 there are rows of both.
        optimizer: That trains: sgd, with momentum, or adamw.
        accumulate: Micro-batches per step. Gradients are sent with the last one: the others are in no_sync().
        rounds: Timed rounds per row.
        steps: Training steps per round.
        bucket_cap_mb: DDP's bucket size.
        seed: Seed of parameters and data.
    """

    model: str = "gpt-13m"
    rates: tuple[str, ...] = ("100mbit", "200mbit", "1gbit", "10gbit")
    nodes: tuple[int, ...] = (2, 4)
    per_node: int = 1
    codecs: tuple[str, ...] = (
        "none", "fp16", "bf16", "uniform:bits=8", "qsgd:bits=4", "sign+ef", "topk:density=0.01+ef",
        "randomk:density=0.01+ef", "dgc:density=0.001", "powersgd:rank=4", "lowrank:rank=4+ef",
    )  # fmt: skip
    every: tuple[int, ...] = (0,)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    accumulate: int = 1
    rounds: int = 3
    steps: int = 4
    bucket_cap_mb: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.rates and self.nodes and self.codecs and self.every):
            raise ValueError("nothing to measure: rates, nodes, codecs and every each need at least one value")
        check_seed(self.seed)
        check_specs(self.codecs, [every for every in self.every if every])
        if any(self.every) and self.per_node > 1:
            raise ValueError(
                "rounds of updates are predicted only for machines with one rank each: remove every or per_node"
            )
        for rate, nodes in itertools.product(self.rates, self.nodes):
            if nodes < 2:
                raise ValueError(f"nodes={nodes}: a single machine sends nothing over its link; expected 2 or more")
            Link.of(rate)
            self.session(rate, nodes)

    def session(self, rate: str, nodes: int) -> ddp_rows.Config:
        """Return the configuration of the measurement behind one kind of link."""
        return ddp_rows.Config(
            nodes=nodes,
            per_node=self.per_node,
            rate=rate,
            model=self.model,
            codecs=(),
            plain=True,
            optimizer=self.optimizer,
            accumulate=self.accumulate,
            rounds=self.rounds,
            steps=self.steps,
            bucket_cap_mb=self.bucket_cap_mb,
            seed=self.seed,
        )

    @property
    def options(self) -> list[Option]:
        """What is predicted and measured behind every link."""
        found = [Option(None)]
        for every, spec in itertools.product(self.every, self.codecs):
            if not every or takes_updates(spec):
                found.append(Option(spec, every=every))
            if self.per_node > 1:
                found.append(Option(spec, levels=True))
        return found


def count(config: Config) -> int:
    """Return the number of events that :func:`run` reports."""
    return 2 * len(config.rates) * len(config.nodes)


def run(
    config: Config,
    on_event: Callable[[str], None] = lambda _: None,
    *,
    known: Sequence[dict[str, Any]] = (),
    keep: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Predict and measure the steps of all options behind all links.

    Rows hold

    * ``codec``: the name of the option: a spec, or :data:`~narrowband.planning.DDP`, or of rounds and two levels a
      longer name; ``rate``; ``nodes``; ``per_node``;
    * ``predicted_step_s``, ``measured_step_s``, and ``error``: the prediction's error as a share of the measurement;
      None if the row failed;
    * ``predicted_compute_s`` and ``measured_compute_s``: of the step with nothing sent;
    * ``at_that_speed_step_s`` and ``at_that_speed_error``: step and error of the second prediction;
    * ``predicted_sent_bytes`` and ``measured_sent_bytes`` of a rank; the latter is None for DDP, which does not count
      bytes;
    * ``predicted_link_bytes`` and ``measured_link_bytes``: what a machine's link carries in each direction; the kernel
      counts headers, too.

    Args:
        on_event: called with what is done next, see :func:`count`.
        known: rows that an earlier run finished. Their links are not measured again.
        keep: called with all rows so far, after each link.

    Raises:
        UnsupportedError: this machine cannot emulate links.
        RankError: a rank ended early.
    """
    rows: list[dict[str, Any]] = []
    left = list(known)  # known rows of links that are not yet done
    for nodes, rate in itertools.product(config.nodes, config.rates):
        where = f"{Cluster(nodes, config.per_node)}, {rate}"
        there = [row for row in left if (row["nodes"], row["rate"]) == (nodes, rate)]
        left = [row for row in left if row not in there]
        if there and all(row["measured_step_s"] is not None for row in there):
            rows += there
            on_event(f"{where}: known")
            on_event(f"{where}: known")
            continue
        on_event(f"{where}: predicting")
        profile, network = _measured(config, rate, nodes)
        on_event(f"{where}: training")
        measured_rows = ddp.run(config.session(rate, nodes), options=config.options)[1:]
        both = zip(measured_rows, config.options, strict=True)
        rows += [_beside(row, option, profile, network) for row, option in both]
        keep([*rows, *left])
    return rows


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge whether predictions lead to the right choice: one entry for each link and number of machines.

    Entries hold

    * ``rate``, ``nodes`` and ``per_node``;
    * ``predicted_best`` and ``measured_best``: the ``codec`` of the row with the shortest step;
    * ``slower_by``: how much longer the measured step of the predicted best is, as a share of the shortest one;
    * ``is_right``: whether ``slower_by`` is within :data:`MARGIN`;
    * ``sides``: for each ``codec`` ``predicted_times`` and ``measured_times``, DDP's step over the codec's, and
      ``is_right``: whether both are on the same side of 1. It is None if the measured step is within :data:`MARGIN` of
      DDP's, so that neither side is wrong.

    Args:
        rows: rows from :func:`run`. Rows that failed are left out.

    Example:
        >>> def row(codec, said, was):
        ...     return {
        ...         "codec": codec,
        ...         "rate": "1gbit",
        ...         "nodes": 2,
        ...         "per_node": 1,
        ...         "predicted_step_s": said,
        ...         "measured_step_s": was,
        ...     }
        >>> (found,) = verdicts([row(DDP, 1.0, 1.0), row("fp16", 0.7, 0.8), row("qsgd:bits=4", 0.5, 1.3)])
        >>> found["predicted_best"], found["measured_best"], round(found["slower_by"], 3), found["is_right"]
        ('qsgd:bits=4', 'fp16', 0.625, False)
        >>> [(each["codec"], each["is_right"]) for each in found["sides"]]
        [('fp16', True), ('qsgd:bits=4', False)]
    """
    found = []
    for place in dict.fromkeys(map(_place, rows)):
        own = {
            row["codec"]: (row["predicted_step_s"], row["measured_step_s"])
            for row in rows
            if _place(row) == place and row["measured_step_s"] is not None
        }
        if not own:
            continue
        predicted_best = _fastest({codec: said for codec, (said, _) in own.items()})
        measured_best = _fastest({codec: was for codec, (_, was) in own.items()})
        slower_by = own[predicted_best][1] / own[measured_best][1] - 1.0
        rate, nodes, per_node = place
        found.append(
            {
                "rate": rate,
                "nodes": nodes,
                "per_node": per_node,
                "predicted_best": predicted_best,
                "measured_best": measured_best,
                "slower_by": slower_by,
                "is_right": slower_by <= MARGIN,
                "sides": _sides(own),
            }
        )
    return found


def _place(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["rate"], row["nodes"], row["per_node"]


def _fastest(steps: Mapping[str, float]) -> str:
    return min(steps, key=steps.__getitem__)


def _sides(steps: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Judge for each codec whether predicted and measured steps are on the same side of DDP's."""
    if DDP not in steps:
        return []
    found = []
    for codec, (said, was) in steps.items():
        if codec == DDP:
            continue
        said_times, times = steps[DDP][0] / said, steps[DDP][1] / was
        clear = abs(was / steps[DDP][1] - 1.0) > MARGIN
        found.append(
            {
                "codec": codec,
                "predicted_times": said_times,
                "measured_times": times,
                "is_right": (said_times > 1.0) == (times > 1.0) if clear else None,
            }
        )
    return found


def _beside(row: dict[str, Any], option: Option, profile: Profile, network: Network) -> dict[str, Any]:
    """Add the predictions for an option to its row of ``bench ddp``."""
    took = row["step_s"]
    said = predict(profile, option, network)
    step_s = said.outcome.step_s
    found = {
        "codec": option.name,
        "rate": row["rate"],
        "nodes": row["nodes"],
        "per_node": row["per_node"],
        "predicted_step_s": step_s,
        "measured_step_s": took,
        "error": None,
        "predicted_compute_s": said.outcome.compute_s,
        "measured_compute_s": None,
        "at_that_speed_step_s": None,
        "at_that_speed_error": None,
        "predicted_sent_bytes": said.sent_nbytes,
        "measured_sent_bytes": row["sent_bytes_per_step"],
        "predicted_link_bytes": said.link_nbytes,
        "measured_link_bytes": row["link_bytes_per_step"],
    }
    if took is None:
        return found
    compute_s = statistics.median(row["round_compute_s"])
    at_that_speed = predict(profile.on_slower(compute_s / profile.compute_s), option, network).outcome.step_s
    return found | {
        "error": step_s / took - 1.0,
        "measured_compute_s": compute_s,
        "at_that_speed_step_s": at_that_speed,
        "at_that_speed_error": at_that_speed / took - 1.0,
    }


def _measured(config: Config, rate: str, nodes: int) -> tuple[Profile, Network]:
    """Let ranks behind such links measure the profile and the network."""
    found = run_ranks("narrowband.bench.foretold", asdict(config), config.session(rate, nodes).place())
    profile = _profile(found[0]["profile"]).accumulated(config.accumulate)
    host = Host(*(statistics.fmean(rank[key] for rank in found) for key in ("hop_s", "cpu_s_per_byte")))
    # Ranks share this machine's cores, and each was measured while all others worked.
    cores = (os.cpu_count() or 1) / nodes
    return profile, Network(Link.of(rate), Cluster(nodes, config.per_node), host, cores)


def _profile(fields: dict[str, Any]) -> Profile:
    """Parse the profile that a rank has sent as JSON."""
    buckets = tuple(
        Bucket(
            **{
                **each,
                "layers": tuple((n, tuple(s)) for n, s in each["layers"]),
                "vectors": tuple(each["vectors"]),
                "names": tuple(each["names"]),
            }
        )
        for each in fields["buckets"]
    )
    trained, stays = (
        tuple(Trained(name, tuple(shape), norm) for name, shape, norm in fields[which])
        for which in ("trained", "buffers")
    )
    codecs = tuple(map(_codec, fields["codecs"]))
    found = {
        "buckets": buckets,
        "trained": trained,
        "buffers": stays,
        "codecs": codecs,
        "share": Share(*fields["share"]),
    }
    return Profile(**{**fields, **found})


def _codec(fields: dict[str, Any]) -> Codec:
    return Codec(**{**fields, "pieces": tuple(map(_piece, fields["pieces"])), "share": Share(*fields["share"])})


def _piece(fields: dict[str, Any]) -> Piece:
    lines = {name: Line(**fields[name]) for name in ("encode", "begin", "deliver")}
    work = tuple(Line(**line) for line in fields["work"])
    return Piece(**lines, calls=tuple(fields["calls"]), work=work)


# ---- one rank --------------------------------------------------------------------------------------------------------


def _main(rank_process: RankProcess) -> None:
    fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in rank_process.config.items()}
    config = Config(**fields)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    shape = MODELS[config.model]
    torch.manual_seed(config.seed)
    model = GPT(shape)
    generator = torch.Generator().manual_seed(rank_process.rank)
    tokens_BL = torch.randint(shape.vocab, (shape.batch, shape.sequence + 1), generator=generator)

    def loss_of(logits_BLV: Tensor) -> Tensor:
        return F.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten())

    def together(_: str) -> None:
        dist.barrier()

    dist.barrier()
    measurement = measure_step(
        model,
        (tokens_BL[:, :-1],),
        lambda net: optimizer_of(config.optimizer, net),
        loss=loss_of,
        bucket_cap_mb=config.bucket_cap_mb,
    )
    cluster = Cluster(ranks // config.per_node, config.per_node)
    profile = measured(measurement, {cluster: config.options}, together)
    dist.barrier()
    hop_s, cpu_s_per_byte = _messages(ranks)
    rank_process.finish({"profile": asdict(profile), "hop_s": hop_s, "cpu_s_per_byte": cpu_s_per_byte})


def _messages(ranks: int) -> tuple[float, float]:
    """Measure the seconds of a hop of a small message, and the seconds of a core per byte of a large one."""
    x, out = torch.zeros(_SMALL), torch.zeros(_SMALL * ranks)
    taken: list[float] = []
    for _ in range(_TIMES_SMALL):
        dist.barrier()
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        all_gather_single(out, x)
        taken.append(time.perf_counter() - begin)
    large = torch.zeros(_LARGE)
    dist.all_reduce(large)
    begin = time.process_time()
    for _ in range(_TIMES_LARGE):
        dist.all_reduce(large)
    spent = time.process_time() - begin
    return statistics.fmean(taken) / (ranks - 1), spent / (_TIMES_LARGE * all_reduce_nbytes(large.nbytes, ranks))


if __name__ == "__main__":
    _main(RankProcess(sys.argv[1]))
