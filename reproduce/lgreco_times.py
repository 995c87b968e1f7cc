"""Is L-GreCo's plan for seconds faster than its plan for bytes? (Alimohammadi et al., arXiv 2210.17357, sections 4 and
5.5, figure 11b; appendix A, figure 12).

Buckets of gradients are sent while backward still computes, so a byte of an early bucket may cost no time. The paper
measures what a byte of each bucket costs, by a linear regression over exchanges with randomly drawn compression, and
lets L-GreCo minimize seconds. It finds that bytes predict seconds nearly perfectly, that a byte costs about the same in
all buckets, and that the plan for seconds is the plan for bytes. The paper's appendix gives buckets a price that grows
with their position, and finds that this is worse.

Here four real ranks behind emulated links train a GPT of 3.3 million parameters with AdamW. A reference is a spec for
all layers. For each reference:

* the model trains for some steps under the reference, and gradients are added up;
* ``nb.measure_times`` does the paper's regression. Many coefficients overfit few samples, so R² is also computed
  leave-one-out: each sample is predicted by the fit of all others;
* ``nb.LGreCo`` makes three plans from the same gradients and at the same error: for bytes, for the measured seconds,
  and for the paper's priority of buckets;
* the three plans and the reference take turns for some steps, round after round. Plans are compared round by round, so
  that a busy machine slows all of them alike.

Run ``python -m reproduce.lgreco_times`` (ten minutes on two idle cores; needs what ``narrowband lab`` needs: Linux and
root), ``--rate none --quick`` (seconds, anywhere), ``--help``.

Differences from the paper:

* The paper has Transformer-XL, and 5,000 samples of 50 steps on 8 GPUs; here it is a GPT on two cores, and 48 samples
  of 6 steps.
* Every bucket is sent by itself, as in the paper. By default narrowband sends small buckets together, so that they
  share one price (``--message-nbytes 131072``).
* Layers get ranks of a quarter to four times the reference's; in the paper from half to twice, or a quarter to twice.
* The paper's "near 1" has no number; here it means at least 0.9.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.bench.ranks import check_seed
from narrowband.feedback import compression
from narrowband.report.record import provenance, read_json, write_json
from reproduce.command import RESULTS, command_line, progress, show
from reproduce.html import write_pages
from reproduce.lgreco_times_page import LAYOUT, PAPER, TITLES, claims, families, lines, page
from reproduce.lgreco_times_ranks import LEAST_SAMPLES, Setting, choices, run
from reproduce.report import ran_on

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "main"]

_MODULE = "lgreco_times"


@dataclass(frozen=True)
class Options:
    """Measure the seconds that a byte of each bucket costs, and time L-GreCo's plans for bytes, for these seconds, and
    for the paper's priority of buckets.

    Needs an otherwise idle machine. References that are finished are kept: after Ctrl-C, the same command goes on with
    the rest. To try it without emulated links, and without root: --rate none --quick.
    """

    references: tuple[str, ...] = ("powersgd:rank=4", "topk:density=0.01+ef")
    """Specs for all layers; each sets a budget of errors, and layers choose from bits, ranks or densities around it."""
    rate: str = "100mbit"
    """Rate of every link, in both directions; none: ranks on loopback, unshaped, which says nothing about links."""
    nodes: int = 4
    """Ranks on this machine."""
    samples: int = 48
    """Samples of the regression; for each, the compression of buckets is drawn at random."""
    steps: int = 6
    """Timed steps of each sample, and of each plan in each round; the median counts."""
    rounds: int = 12
    """Rounds in which the plans take turns; plans are compared round by round."""
    message_nbytes: int = 0
    """Buckets are sent together until a rank has this many bytes to send; 0: each by itself, as in the paper."""
    seed: int = 0
    """Seed of parameters, data and random choices."""
    output: Path | None = None
    """Directory of the result; reproduce/results/lgreco_times when left out."""
    resume: bool = True
    """Take references that an earlier run with the same options finished; --no-resume measures them again."""
    quick: bool = False
    """A tiny model, few samples, two rounds: to see in seconds that everything works. Judges nothing."""
    markdown: Path | None = None
    """Also write tables and claims to this file, for the documentation."""

    def setting(self) -> Setting:
        """Return what this run measures for each reference."""
        own = Setting(
            self.nodes, self.rate, message_nbytes=self.message_nbytes, samples=self.samples, steps=self.steps,
            rounds=self.rounds, seed=self.seed,
        )  # fmt: skip
        if not self.quick:
            return own
        return replace(
            own, model="gpt-tiny", bucket_cap_mb=0.1, train_steps=4, samples=LEAST_SAMPLES, steps=1, rounds=2
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        _MODULE, Options, _run, argv, stopped="Finished references are kept: the same command goes on with the rest."
    )


def _check(options: Options) -> None:
    for name, least in (("nodes", 2), ("samples", LEAST_SAMPLES), ("steps", 1), ("rounds", 2), ("message_nbytes", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"{name}={getattr(options, name)} must be at least {least}")
    if not options.references:
        raise ValueError("nothing to measure: give at least one reference, such as powersgd:rank=4")
    check_seed(options.seed)
    options.setting().place()
    for reference in options.references:
        choices(reference)
        feedback = compression(reference).feedback
        if feedback is not None and feedback.momentum:
            raise ValueError(f"{reference} has a momentum of its own, and AdamW has one: take another reference")


def _run(options: Options, command: list[str], console: Console) -> None:
    _check(options)
    setting = options.setting()
    record = provenance(options.seed, command)
    written = (options.output or RESULTS / _MODULE) / "summary.json"
    whole: dict[str, Any] = record | {"config": asdict(setting), "quick": options.quick, "rows": []}
    if options.resume and written.exists():
        earlier = read_json(written, ("config", "rows"))
        whole["rows"] = earlier["rows"] if earlier["config"] == whole["config"] else []
    whole["cpus"] = ran_on(whole["rows"], written)
    there = {row["reference"] for row in whole["rows"]}
    missing = [reference for reference in dict.fromkeys(options.references) if reference not in there]
    console.print(PAPER, style="bold", markup=False, highlight=False)
    with progress(console) as bars:
        bar = bars.add_task("steps", total=setting.count() * len(missing), said="starting ranks")

        def note(event: dict[str, Any]) -> None:
            if event["event"] == "row":
                whole["rows"].append(event["row"] | {"commit": record["commit"], "cpu": record["machine"]["cpu"]})
                whole["cpus"] = sorted({*whole["cpus"], record["machine"]["cpu"]})
                write_json(written, whole)
            else:
                bars.update(bar, advance=1, said=f"{event['reference']}, {event['what']}")

        if missing:
            run(missing, setting, note)
    found = families(whole["rows"])
    said = [] if options.quick else claims(found)
    whole["claims"] = [claim.record() for claim in said]
    show(console, lines(found), TITLES, said, LAYOUT)
    write_json(written, whole)
    write_pages(written, whole, options.markdown, page, console)


if __name__ == "__main__":
    sys.exit(main())
