"""``narrowband bench kernels``, ``bench ddp``, ``bench plan``, ``bench pipeline``, ``bench peers``, ``bench adapt``,
``bench memory`` and ``bench gpu``.
"""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from narrowband.bench import adapt, ddp, ddp_rows, foretold, gpu, kernels, memory, peers, pipeline, tensors, zoo
from narrowband.bench.devices import check_device
from narrowband.cli.exits import DONE, FAILED, check_folder
from narrowband.cli.records import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

__all__ = [
    "BenchAdapt", "BenchDDP", "BenchGPU", "BenchKernels", "BenchMemory", "BenchPeers", "BenchPipeline", "BenchPlan",
]  # fmt: skip


@dataclass(frozen=True)
class BenchKernels:
    """Time each hot loop against a plain copy of the same tensor.

    A ratio of 1.6 means: 1.6 times as long as ``y.copy_(x)`` in the same run. Ratios hold on a busy machine,
    milliseconds do not.

    Examples:
      narrowband bench kernels
      narrowband bench kernels --loops topk-exact-select ef-topk-encode --repeats 20
      narrowband bench kernels --backend all --baselines --json kernels.json
      narrowband bench kernels --device cuda --numel 64000000 --json kernels-gpu.json
    """

    config: Annotated[kernels.Config, tyro.conf.arg(name="")] = field(default_factory=kernels.Config)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the rows to this file as they are measured, with machine, versions and command. After Ctrl-C the same
    command goes on from there."""

    def __call__(self, console: Console) -> int:
        from narrowband.report.tables import kernels_table

        total = kernels.count(self.config)
        with Record(self.json, asdict(self.config), console) as record, _bar(console, "measuring", total) as show:
            rows = list(record.follow(kernels.run(self.config, record.known), ("loop", "backend"), show))
            record.finish(rows)
        console.print(kernels_table(rows))
        record.say()
        return DONE


@dataclass(frozen=True)
class BenchDDP:
    """Measure training steps behind emulated links, against the same step without communication.

    All rows run in one session of the same processes, in turn, so their ratios can be trusted even when the machine is
    busy. Needs what ``narrowband lab`` needs (see ``narrowband doctor``); ``--rate none`` needs nothing, and runs the
    ranks on loopback.

    With --device cuda ranks train on this machine's GPUs, and the links between them are what they are. One rank sends
    nothing: its rows say what encoding and decoding take beside DDP without a hook.

    Examples:
      narrowband bench ddp --nodes 4 --rate 200mbit --codecs none fp16 topk:density=0.01+ef qsgd:bits=4
      narrowband bench ddp --rate 1gbit --baselines --json ddp-1gbit.json
      narrowband bench ddp --nodes 2 --per-node 2 --codecs none topk:density=0.01+ef
      narrowband bench ddp --sharded --codecs qsgd:bits=8/uniform:bits=8 qsgd:bits=4/uniform:bits=4
      narrowband bench ddp --nodes 2 --rate none --model gpt-tiny
      narrowband bench ddp --nodes 1 --device cuda --model gpt2-small --amp --codecs none qsgd:bits=4
    """

    config: Annotated[ddp_rows.Config, tyro.conf.arg(name="")] = field(default_factory=ddp_rows.Config)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the rows to this file after each round, with machine, versions and command. After Ctrl-C the rounds so
    far are there; the same command starts from the beginning, because rows are compared within one session."""

    def unused(self) -> dict[str, str]:
        """Return why some options say nothing beside the others."""
        own = self.config
        found: dict[str, str] = {}
        if own.amp and own.optimizer != "adamw":
            found["optimizer"] = "is AdamW with --amp: leave it out"
        if own.amp or own.optimizer == "adamw":
            found["momentum"] = "is that of SGD, and here ranks step by AdamW: leave it out"
        if own.sharded:
            found["collective"] = "says nothing to --sharded, whose collectives are those of FSDP2: leave it out"
        return found

    def __call__(self, console: Console) -> int:
        from narrowband.report.tables import RELATIVE_ERROR, ddp_table

        config = asdict(self.config) | {"rate": self.config.link}
        record = Record(self.json, config, console, reads=self.config.codecs, goes_on=False)
        with record, _bar(console, "starting ranks") as show:
            rows = ddp.run(self.config, lambda now: show(now["codec"], now["done"], now["of"]), record.keep)
            record.finish(rows)
        console.print(ddp_table(rows))
        console.print(RELATIVE_ERROR, style="dim", markup=False, highlight=False)
        for row in rows:
            for key, style in (("note", "dim"), ("error", "red")):
                if key in row:
                    console.print(f"{row['codec']}: {row[key]}", style=style, markup=False, highlight=False)
        record.say()
        own = self.config.codecs
        failed = any("error" in row for row in rows if row["codec"].startswith(own))
        return FAILED if failed else DONE  # a failing hook of PyTorch is a result


@dataclass(frozen=True)
class BenchPlan:
    """Compare the steps that ``narrowband plan`` predicts with measured ones, behind emulated links.

    All codecs on all links may take an hour. With --json each link is written when it is done, and the same
    command goes on from there.

    Needs what ``narrowband lab`` needs (see ``narrowband doctor``).

    Examples:
      narrowband bench plan --json plan.json
      narrowband bench plan --model gpt-demo --rates 200mbit --nodes 2 --codecs none qsgd:bits=4
      narrowband bench plan --rates 20mbit/100mbit --every 0 15 --codecs none uniform:bits=2+ef --optimizer adamw
      narrowband bench plan --nodes 2 --per-node 2 --codecs none qsgd:bits=4
      narrowband bench plan --nodes 2 --accumulate 4 --codecs none fp16 qsgd:bits=4
    """

    config: Annotated[foretold.Config, tyro.conf.arg(name="")] = field(default_factory=foretold.Config)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the rows to this file, with machine, versions and command."""

    def __call__(self, console: Console) -> int:
        from narrowband.report.tables import foretold_table, verdicts_table

        total = foretold.count(self.config)
        with Record(self.json, asdict(self.config), console) as record, _bar(console, "starting ranks", total) as show:
            rows = foretold.run(self.config, show, known=record.known, keep=record.keep)
            found = foretold.verdicts(rows)
            record.finish(rows, verdicts=found)
        for nodes, rate in dict.fromkeys((row["nodes"], row["rate"]) for row in rows):
            console.print(foretold_table([row for row in rows if (row["nodes"], row["rate"]) == (nodes, rate)]))
        for key, what in (("error", "Predictions are off"), ("at_that_speed_error", "At the speed of the measurement")):
            errors = sorted(abs(row[key]) for row in rows if row[key] is not None)
            if errors:
                console.print(
                    f"{what}: {statistics.median(errors):.1%} (median), {errors[-1]:.1%} (worst)", highlight=False
                )
        console.print(verdicts_table(found))
        right = sum(verdict["is_right"] for verdict in found)
        sides = [side["is_right"] for verdict in found for side in verdict["sides"] if side["is_right"] is not None]
        console.print(
            f"The predicted best is within {foretold.MARGIN:.0%} of the measured best in {right} of {len(found)} "
            f"cases. Of {len(sides)} steps that differ from DDP's by over {foretold.MARGIN:.0%}, {sum(sides)} were "
            "correctly predicted to be faster or slower.",
            highlight=False,
        )
        record.say()
        return FAILED if any(row["error"] is None for row in rows) else DONE


@dataclass(frozen=True)
class BenchPipeline:
    """Train a GPT that is cut into stages, behind emulated links: tokens per second, and the loss that they cost.

    Every rank runs one stage. Rows say what activations and their gradients are compressed with; all rows run in one
    session of the same processes, in turn.

    Examples:
      narrowband bench pipeline --rate 100mbit --json pipeline-100mbit.json
      narrowband bench pipeline --rate 1gbit --rows none fp16 uniform:bits=4/uniform:bits=8
      narrowband bench pipeline --nodes 2 --rate none --dim 16 --batch 4
    """

    config: Annotated[pipeline.Config, tyro.conf.arg(name="")] = field(default_factory=pipeline.Config)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the rows to this file after each epoch from the second on, with machine, versions and command. After
    Ctrl-C the rows of the epochs so far are there; the same command starts from the beginning, because rows are
    compared within one session."""

    def __call__(self, console: Console) -> int:
        from narrowband.report.tables import RELATIVE_ERROR, pipeline_table

        record = Record(self.json, asdict(self.config), console, goes_on=False)
        with record, _bar(console, "starting ranks") as show:
            rows = pipeline.run(self.config, lambda now: show(now["name"], now["done"], now["of"]), record.keep)
            record.finish(rows)
        console.print(pipeline_table(rows))
        console.print(RELATIVE_ERROR, style="dim", markup=False, highlight=False)
        record.say()
        return DONE


@dataclass(frozen=True)
class BenchAdapt:
    """Measure what a decision for every layer saves, and what it costs.

    A GPT is trained for some steps on the source of Python's standard library; from its gradients L-GreCo then plans
    at the error of each reference.

    Examples:
      narrowband bench adapt
      narrowband bench adapt --model gpt-demo --references powersgd:rank=8 --steps 500
      narrowband bench adapt --plans plans; narrowband bench ddp --codecs plans/powersgd-rank-4-among-4.json
    """

    config: Annotated[adapt.Config, tyro.conf.arg(name="")] = field(default_factory=adapt.Config)
    plans: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Also save the plans to this directory."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the rows to this file as they are measured, with machine, versions and command. After Ctrl-C the same
    command goes on from there."""

    def __call__(self, console: Console) -> int:
        from narrowband.report.tables import RELATIVE_ERROR, adapt_table

        check_folder(self.plans)
        config = asdict(self.config) | {"plans": None if self.plans is None else str(self.plans)}
        with Record(self.json, config, console) as record, _bar(console, "training", adapt.count(self.config)) as show:
            measured = adapt.run(self.config, show, self.plans, known=record.known)
            rows = list(record.follow(measured, ("name", "ranks")))
            record.finish(rows)
        console.print(adapt_table(rows))
        console.print(RELATIVE_ERROR, style="dim", markup=False, highlight=False)
        if self.plans is not None:
            console.print(f"plans written to {self.plans}", style="dim", markup=False, highlight=False)
        record.say()
        return DONE


@dataclass(frozen=True)
class BenchMemory:
    """Measure what backward keeps, peak memory and time of a step: plain, in few bits, and recomputed.

    All rows take turns in one process. With --baselines also bfloat16 autocast, full activation checkpointing, and what
    they give together.

    Examples:
      narrowband bench memory --baselines
      narrowband bench memory --model gpt --batch 8 --bits 8 4 2
      narrowband bench memory --model mine.py:build --batch 16 --baselines --json memory.json
      narrowband bench memory --model deit-small --batch 128 --device cuda --only "bf16, 8 bits" "bf16, checkpoint"
      narrowband bench memory --zoo --json zoo.json
      narrowband bench memory --tensors
    """

    config: Annotated[memory.Config, tyro.conf.arg(name="")] = field(default_factory=memory.Config)
    zoo: tuple[str, ...] | None = None
    """Instead of one model, all architectures of a zoo out of transformers and timm, or those that are named, as far as
    these packages are installed, with batches whose plain step takes 0.3 s: half an hour on two cores. Rows that the
    file of --json has already are not measured again."""
    shares: tuple[float, ...] = ()
    """With --zoo: instead of time and bytes, train each in budgets with room for these shares of what it holds as it
    is, beside parameters, the optimizer's state and inputs, and say how far predictions are from what it holds then;
    with batches whose plain step takes 0.05 s."""
    tensors: bool = False
    """Instead of a model, chains of small layers that save a tensor each: what one costs by its size, kept as it is and
    packed."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the rows to this file as they are measured, with machine, versions and command. After Ctrl-C the same
    command goes on from there with --zoo and --tensors. The rows of one model take turns, so it starts from the
    beginning."""

    def unused(self) -> dict[str, str]:
        """Return why some options say nothing beside the others."""
        of_one = ("model", "batch", "baselines", "compiled", "only")
        if self.tensors:
            why = "says nothing to --tensors, which measures no model: leave it out"
            found = dict.fromkeys((*of_one, "peaks", "device", "zoo", "shares"), why)
        elif self.zoo is None:
            return {"shares": "needs --zoo; for one model use narrowband memory --budget"}
        else:
            found = dict.fromkeys(of_one, "is for one model: leave it out, or leave out --zoo")
            found["model"] = "is for one model alone: name models behind --zoo, or leave out --zoo"
            if self.shares:
                return found | dict.fromkeys(("bits", "rounds", "peaks"), "says nothing to --shares: leave it out")
        if len(self.config.bits) != 1:
            found["bits"] = "takes one number here, such as --bits 4"
        return found

    def __call__(self, console: Console) -> int:
        from narrowband.report.tables import memory_table

        if self.tensors:
            return self._measure_tensors(console)
        if self.zoo is not None:
            return self._measure_zoo(console, self.zoo)
        record = Record(self.json, asdict(self.config), console, reads=[self.config.model], goes_on=False)
        seen: set[str] = set()
        rounds = 0
        with record, _bar(console, "building", memory.count(self.config)) as show:

            def tell(name: str) -> None:
                show(name)
                if not console.is_terminal and name not in seen:  # without a bar, and first steps may take long
                    console.print(f"first steps of {name}", style="dim", markup=False, highlight=False)
                seen.add(name)

            def after_round(known: list[dict[str, Any]]) -> None:
                nonlocal rounds
                rounds += 1
                record.keep(known)
                if not console.is_terminal:
                    steps = "; ".join(f"{row['name']} {statistics.median(row['ratios']):.2f}" for row in known)
                    said = f"round {rounds} of {self.config.rounds}, steps × {known[0]['name']}: {steps}"
                    console.print(said, style="dim", markup=False, highlight=False)

            rows = memory.run(self.config, tell, after_round)
            record.finish(rows)
        console.print(memory_table(rows, f"{self.config.model}, batch of {self.config.batch}"))
        record.say()
        return DONE

    def _measure_tensors(self, console: Console) -> int:
        from narrowband.report.tables import tensors_table

        own = self.config
        config = tensors.Config(bits=(*own.bits, 8)[0], rounds=own.rounds, seed=own.seed)  # type: ignore[arg-type]
        total = len(config.sizes)
        with Record(self.json, asdict(config), console) as record, _bar(console, "measuring", total) as show:
            rows = list(record.follow(tensors.run(config, record.known), ("numel",), show))
            record.finish(rows)
        console.print(tensors_table(rows, config.bits))
        record.say()
        return DONE

    def _measure_zoo(self, console: Console, names: tuple[str, ...]) -> int:
        from narrowband.report.tables import budgets_table, zoo_profile_table, zoo_table

        own, seconds = self.config, 0.05 if self.shares else 0.3
        config = zoo.Config(
            names, (*own.bits, 8)[0], own.rounds, seconds, own.peaks, own.seed, self.shares, own.device
        )  # fmt: skip
        total = zoo.count(config)
        with Record(self.json, asdict(config), console) as record, _bar(console, "measuring", total) as show:
            rows = list(record.follow(zoo.run(config, record.known), ("name",), show))
            record.finish(rows)
        console.print(budgets_table(rows) if self.shares else zoo_table(rows))
        if not self.shares:
            console.print(zoo_profile_table(zoo.profile(rows)))
        console.print(zoo.foretold(rows), highlight=False)
        record.say()
        return DONE


@dataclass(frozen=True)
class BenchPeers:
    """Hold rounds of peers of which one is killed and replaced and another frozen: how much training goes on?

    The same run is measured undisturbed first. Goodput is the optimizer steps that the run takes in per second.

    Examples:
      narrowband bench peers --json peers.json
      narrowband bench peers --peers 6 --spec qsgd:bits=2+ef
      narrowband bench peers --rounds 1000 --every 2 --step-s 0 --freeze-s 10
    """

    config: Annotated[peers.Config, tyro.conf.arg(name="")] = field(default_factory=peers.Config)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the rows to this file as they are measured, with machine, versions and command. After Ctrl-C the same
    command goes on from there."""

    def unused(self) -> dict[str, str]:
        """Return why some options say nothing beside the others."""
        own = self.config
        found: dict[str, str] = {}
        if not own.kill:
            found["rejoin"] = "says when the killed peer is replaced, and --kill 0 kills none: leave it out"
        if not own.freeze:
            found["freeze_s"] = "says how long a peer is stopped, and --freeze 0 stops none: leave it out"
        return found

    def __call__(self, console: Console) -> int:
        from narrowband.report.tables import peers_table

        with Record(self.json, asdict(self.config), console) as record, _bar(console, "peers meet") as show:
            measured = peers.run(self.config, lambda now: show(now["name"], now["round"], now["of"]), record.known)
            rows = list(record.follow(measured, ("name",)))
            record.finish(rows)
        console.print(peers_table(rows))
        torn, equal = rows[-1], all(row["equal"] for row in rows)
        console.print(
            f"Goodput while disturbed: {torn['share']:.0%} of the undisturbed run's, and {torn['share_present']:.0%} "
            f"of what those present could do. After every round peers were {'' if equal else 'NOT '}equal to the bit.",
            highlight=False,
        )
        record.say()
        return DONE if equal else FAILED


@dataclass(frozen=True)
class BenchGPU:
    """Measure this machine's GPU: every loop, saved activations, and training steps; one record of all.

    Each part runs in a process of its own. What fails or takes too long is noted, and the others still run. In a
    checkout ``make gpu`` runs it with the tests of the loops as one more part, the command behind --.

    Examples:
      narrowband bench gpu --json gpu.json
      narrowband bench gpu --parts kernels ddp --patience 2
      narrowband bench gpu --json gpu.json -- python -m pytest tests/kernels/backends tests/gpu
    """

    config: Annotated[gpu.Config, tyro.conf.arg(name="")] = field(default_factory=gpu.Config)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write what is known after each part to this file, with the GPU, machine, versions and command."""

    def __call__(self, console: Console, behind: list[str] | None) -> int:
        from narrowband.report.gpu import gpu as found
        from narrowband.report.tables import gpu_table

        these = gpu.parts(self.config, behind or ())
        card = found()
        record = Record(
            self.json, asdict(self.config), console,
            reads=behind or (), goes_on=False, of="parts", about={"gpu": card and asdict(card)},
        )  # fmt: skip
        check_device("cuda")
        parts: list[dict[str, Any]] = []
        with record:
            for part in gpu.run(these):
                parts.append(part)
                record.keep(parts)
            record.finish(parts)
        console.print(gpu_table(parts))
        record.say()
        return FAILED if any(part["error"] for part in parts) else DONE


@contextlib.contextmanager
def _bar(console: Console, first: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar, on terminals only. Logs and pipes get none of its output. Yield a function that takes what
    is measured now, and how much is done of how much; by default one more.

    Args:
        console: the terminal.
        first: what is done at first.
        total: how much there is to do; None: not known yet.
    """
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(first, total=total)

        def show(now: str, done: int | None = None, of: int | None = None) -> None:
            if done is None:
                progress.update(task, advance=1, description=now)
            else:
                progress.update(task, completed=done, total=of, description=now)

        yield show
