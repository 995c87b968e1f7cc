"""Draw tables with Rich, from the same rows that go into JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from narrowband.report.narrow import FittingTable
from narrowband.units import NOTHING, counted, format_bytes, format_loss, format_or_dash, format_rate, format_seconds

if TYPE_CHECKING:
    from narrowband.activations import SavedBytes
    from narrowband.lab import LabReport

__all__ = [
    "RANGE",
    "RELATIVE_ERROR",
    "adapt_table",
    "advice_legend",
    "advice_table",
    "budgets_table",
    "ddp_table",
    "demo_table",
    "estimate_table",
    "foretold_table",
    "gpu_table",
    "kernels_table",
    "lab_table",
    "memory_table",
    "pairs_table",
    "peers_table",
    "pipeline_table",
    "plan_table",
    "range_table",
    "saved_table",
    "seats_table",
    "takes_table",
    "tensors_table",
    "verdicts_table",
    "ways_table",
    "zoo_profile_table",
    "zoo_table",
]

#: Explains the column "error"; printed below tables that have one.
RELATIVE_ERROR = (
    "error: relative error ‖p − C(p)‖² / ‖p‖² of the compressed gradient p in the last step that measured it: the "
    "share of p that does not arrive in that step. 0 loses nothing, 1 everything; with error feedback (+ef) what is "
    "lost is "
    f"sent later. {NOTHING}: not measured, or nothing was compressed."
)


#: Explains the columns of predicted steps; printed below the table.
_ADVICE = (
    "sent: by a rank, per step. loss: of a small model with this optimizer, against no compression; "
    f"{NOTHING}: not measured."
)
_PARTS = (
    "step = compute + codec + wire + wait. codec: encoding and decoding that backward does not cover, and compute that "
    "waits for the core they take; wire: bytes on their way that backward does not cover; wait: latency of messages. "
    "memory: residuals, and copies of parameters. by: the collective. "
)


#: Explains the cells of :func:`range_table`; printed below it.
RANGE = (
    "What to send, and how many times as fast a step is as the best that does not compress. "
    f"{NOTHING}: do not compress. Without a number: what is faster and loses nothing to speak of, such as 16 bits."
)


def _table(title: str, *columns: str, names: int = 1) -> Table:
    """Make a table whose first ``names`` columns hold text, folded if there is no room; the others hold numbers."""
    table = FittingTable(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if position >= names else "left",
            no_wrap=position >= names,
            overflow="ellipsis" if position >= names else "fold",
        )
    return table


def kernels_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of ``bench kernels``."""
    table = _table(
        f"{rows[0]['numel']:,} float32 elements, against a plain copy", "loop", "backend", "ms", "× copy", "bandwidth"
    )
    for row in rows:
        share = format_or_dash(lambda share: f"{share:.0%}", row.get("bandwidth_share"))
        ms, ratio = f"{row['ms']:.2f}", f"{row['ratio_to_copy']:.2f}"
        table.add_row(escape(row["loop"]), row["backend"], ms, ratio, share)
    table.caption = "bandwidth: bytes that a loop has to read and write at least, per second, over the copy's"
    return table


def ddp_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of ``bench ddp``."""
    first = rows[0]
    place = "loopback" if first["rate"] == "none" else f"links of {first['rate']}"
    if "device" in first:
        place = f"{first['device']}, {first['backend']}"
    nodes, per_node = first["nodes"], first.get("per_node", 1)
    who = counted(nodes, "rank") if per_node == 1 else f"{counted(nodes, 'machine')} of {per_node} ranks"
    table = _table(f"{who}, {place}", "codec", "step", "× compute", "sent/step", "error", "on link")
    for row in rows:
        table.add_row(
            escape(row["codec"]),
            format_or_dash(format_seconds, row["step_s"]),
            format_or_dash(lambda ratio: f"{ratio:.2f}", row["ratio_to_compute"]),
            format_or_dash(format_bytes, row["sent_bytes_per_step"]),
            _error(row.get("relative_error")),
            format_or_dash(format_bytes, row["link_bytes_per_step"]),
        )
    return table


def pipeline_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of ``bench pipeline``."""
    first = rows[0]
    place = "loopback" if first["rate"] == "none" else f"links of {first['rate']}"
    table = _table(
        f"{first['nodes']} stages, {place}, activations of {format_bytes(first['activation_nbytes'])}, arithmetic of a "
        f"step {format_seconds(first['compute_s'])}",
        *("forward\nbackward", "tokens/s", "× none", "loss", "loss ±", "there\nback", "error", "allowed"),
    )
    for row in rows:
        table.add_row(
            escape(row["name"].replace("/", "\n")),
            f"{row['tokens_per_s']:,.0f}",
            format_or_dash("{:.2f}".format, row["times_none"]),
            format_or_dash("{:.3f}".format, row["loss"]),
            format_or_dash(_change, row["loss_ratio"]),
            "\n".join(format_or_dash(format_bytes, row[f"{way}_nbytes"]) for way in ("forward", "backward")),
            "\n".join(_error(row.get(f"{way}_relative_error")) for way in ("forward", "backward")),
            format_or_dash("{:.0%}".format, row["share_of_allowed"]),
        )
    return table


def peers_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of ``bench peers``."""
    table = _table(
        f"{counted(rows[0]['rounds'], 'round')} of peers, one of which is killed and replaced, and another frozen",
        *("run", "seconds", "steps", "steps/s", "longest\nround", "absent", "equal"),
    )
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['seconds']:.1f}",
            f"{row['steps']:,}",
            f"{row['goodput']:.1f}",
            format_seconds(row["slowest_s"]),
            format_seconds(row["absent_s"]),
            "yes" if row["equal"] else "NO",
        )
    return table


def adapt_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of ``bench adapt``. If a cell has two lines, they correspond to the two lines of the column's head."""
    table = _table(
        "Plans at the error of a reference for all layers; a decision as a share of an epoch",
        *("reference", "ranks", "uniform\nplan", "error", "× less", "tables\nsolve", "epoch"),
    )
    for row in rows:
        table.add_row(
            escape(row["name"]),
            format_or_dash(str, row.get("ranks")),
            "\n".join(format_or_dash(format_bytes, row.get(key)) for key in ("reference_nbytes", "nbytes")),
            "\n".join(_error(row.get(key)) for key in ("reference_relative_error", "relative_error")),
            format_or_dash("{:.2f}".format, row.get("times_fewer")),
            "\n".join(format_or_dash(format_seconds, row.get(key)) for key in ("table_s", "solve_s")),
            format_or_dash("{:.2%}".format, row.get("share_of_epoch")),
        )
    return table


def plan_table(rows: Sequence[dict[str, Any]], whole: dict[str, Any]) -> Table:
    """The spec of every layer of a plan, and its relative error.

    Args:
        rows: of the layers.
        whole: the same of all layers together.
    """
    table = _table(
        f"A plan by {whole['policy']}: a rank of {whole['ranks']} sends {format_bytes(whole['nbytes'])} per step "
        f"instead of {format_bytes(whole['dense_nbytes'])}",
        *("layer", "shape", "spec", "sent", "× less", "error"),
    )

    def numbers(row: dict[str, Any]) -> tuple[str, ...]:
        less = format_or_dash("{:.1f}".format, row["ratio"])
        return format_bytes(row["nbytes"]), less, _error(row["relative_error"])

    for row in rows:
        table.add_row(escape(row["layer"]), " × ".join(map(str, row["shape"])), escape(row["spec"]), *numbers(row))
    table.add_section()
    table.add_row("all", "", "", *numbers(whole))
    return table


#: A terminal of at least this width shows all columns of :func:`advice_table`.
_WIDE = 120


def advice_legend(width: int) -> str:
    """Explain the columns of :func:`advice_table` in a terminal of this width."""
    if width >= _WIDE:
        return _PARTS + _ADVICE
    return f"{_ADVICE} What a step is made of: in {_WIDE} columns, or with --json."


def advice_table(rows: Sequence[dict[str, Any]], title: str, width: int) -> Table:
    """The rows of ``narrowband plan``, the fastest first. Below 120 columns, the parts of a step are left out."""
    parts = {"compute": "compute_s", "codec": "codec_s", "wire": "wire_s", "wait": "latency_s"}
    wide = width >= _WIDE
    shown = ("option", "step", *parts, "sent", "memory", "loss", "by") if wide else ("option", "step", "sent", "loss")
    table = _table(title, *shown)
    for row in rows:
        cells = {
            "option": escape(row["name"]),
            "step": format_seconds(row["step_s"]),
            **{name: format_seconds(row[part]) for name, part in parts.items()},
            "sent": format_bytes(row["sent_bytes_per_step"]),
            "memory": format_bytes(row["residual_bytes"]) if row["residual_bytes"] else "",
            "loss": row["loss"],
            "by": row["collective"],
        }
        table.add_row(*(cells[name] for name in shown))
    return table


def foretold_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of ``bench plan`` for one link."""
    columns = ("codec", "predicted", "measured", "error", "compute", "error at\nthat speed")
    nodes, per_node = rows[0]["nodes"], rows[0]["per_node"]
    who = counted(nodes, "rank") if per_node == 1 else f"{counted(nodes, 'machine')} of {per_node} ranks"
    table = _table(f"{who}, links of {rows[0]['rate']}", *columns)
    for row in rows:
        table.add_row(
            escape(row["codec"]),
            format_seconds(row["predicted_step_s"]),
            format_or_dash(format_seconds, row["measured_step_s"]),
            format_or_dash("{:+.1%}".format, row["error"]),
            format_or_dash("{:+.1%}".format, _off(row["predicted_compute_s"], row["measured_compute_s"])),
            format_or_dash("{:+.1%}".format, row["at_that_speed_error"]),
        )
    table.caption = (
        "compute: how far the step with nothing sent was off; at that speed: with compute as it was measured"
    )
    return table


def verdicts_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The verdicts of ``bench plan``."""
    columns = ("predicted best", "measured best", "faster or slower\nthan DDP", "ranks", "link", "slower\nby")
    table = _table("What would be chosen, and what was best", *columns, names=3)
    for row in rows:
        table.add_row(
            escape(row["predicted_best"]),
            escape(row["measured_best"]),
            escape(_sides(row["sides"])),
            str(row["nodes"]) if row["per_node"] == 1 else f"{row['nodes']} × {row['per_node']}",
            row["rate"],
            f"{row['slower_by']:.1%}" + ("" if row["is_right"] else ", wrong"),
        )
    return table


def _sides(sides: Sequence[dict[str, Any]]) -> str:
    clear = [each for each in sides if each["is_right"] is not None]
    wrong = [each["codec"] for each in clear if not each["is_right"]]
    said = f"{len(clear) - len(wrong)} of {len(clear)} rightly"
    return f"{said}; wrongly {', '.join(wrong)}" if wrong else said


def pairs_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The links between machines that ``narrowband plan --measure`` found."""
    table = _table("Links, one direction at a time, as payload", "from", "to", "rate", "latency")
    for row in rows:
        rate, latency = format_rate(row["rate"]), format_seconds(row["latency_s"])
        table.add_row(str(row["source"]), str(row["target"]), rate, latency)
    return table


def seats_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The ranks that ``doctor --peers`` found."""
    table = _table("Ranks", "rank", "host", "gloo listens at", "MTU", "torch", "narrowband", "python")
    for row in rows:
        versions = (row["versions"].get(name, NOTHING) for name in ("torch", "narrowband", "python"))
        place = f"{row['card']} {row['address']}".strip() or NOTHING
        table.add_row(str(row["rank"]), *map(escape, (row["host"], place, str(row["mtu"] or NOTHING), *versions)))
    return table


def ways_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The links between ranks that ``doctor --peers`` measured: a line for a pair, or for one direction in a ring."""
    ways = {(row["source"], row["target"]): row for row in rows}
    table = _table("Links, one direction at a time, as payload", "ranks", "there", "back", "round trip")
    for (source, target), there in ways.items():
        back = ways.get((target, source))
        if back is not None and source > target:
            continue
        rates = (None if way is None else way["rate"] for way in (there, back))
        rates_shown = (format_or_dash(format_rate, rate) for rate in rates)
        table.add_row(f"{source} → {target}", *rates_shown, format_or_dash(format_seconds, there["trip_s"]))
    return table


def _off(said: float, was: float | None) -> float | None:
    return None if was is None else said / was - 1.0


def range_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The rows of ``narrowband plan`` for a range: a line for each number of machines, a column for each link."""
    rates = list(dict.fromkeys(row["rate_bits_per_s"] for row in rows))
    table = _table(title, "machines", *(format_rate(rate).replace(" ", "\n") for rate in rates))
    cells = {(row["nodes"], row["rate_bits_per_s"]): row for row in rows}
    for nodes in dict.fromkeys(row["nodes"] for row in rows):
        table.add_row(f"{nodes:,}", *(_do(cells[nodes, rate]) for rate in rates))
    return table


def _do(row: dict[str, Any]) -> str:
    if not row["compress"]:
        return NOTHING if row["spec"] is None else row["name"].replace(", ", ",\n")
    return escape(f"{row['name'].replace(':', ':' + chr(10))}\n{row['times_as_fast']:.1f} ×")


def memory_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The rows of ``bench memory``; with a GPU, also the time of the host."""
    first, hosts = escape(f"× {rows[0]['name']}"), any(row.get("host_s") is not None for row in rows)
    names = "row", "kept", "× less", "peak", "× less", "step", *["of the host"] * hosts, first, "gradient error"
    table = _table(title, *names)
    for row in rows:
        table.add_row(
            escape(row["name"]),
            format_bytes(row["kept_bytes"]),
            format_or_dash("{:.2f}".format, row["kept_ratio"]),
            format_or_dash(format_bytes, row["peak_bytes"]),
            format_or_dash("{:.2f}".format, row["peak_ratio"]),
            format_seconds(row["step_s"]),
            *[format_or_dash(format_seconds, row.get("host_s"))] * hosts,
            f"{row['ratio_to_plain'] or statistics.median(row['ratios']):.2f}",
            format_or_dash("{:.3f}".format, row["gradient_error"]),
        )
    return table


def gpu_table(parts: Sequence[dict[str, Any]]) -> Table:
    """The parts of ``bench gpu``: the time and the result of each."""
    table = _table("Parts", "part", "time", "rows", "what became of it")
    for part in parts:
        said = part["error"] or "done"
        if "failed" in part and part["rows"]:
            said = ", ".join(f"{number} {name}" for name, number in part["rows"][0].items())
        table.add_row(part["part"], format_seconds(part["seconds"]), str(len(part["rows"])), escape(said))
    return table


def zoo_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of ``bench memory --zoo``, sorted by the ratio of the step to the plain step, the highest first."""
    table = _table(
        "Few bits beside plain training",
        *("architecture", "family", "batch", "plain step", "× plain", "kept", "peak", "cosine"),
    )
    measured = [row for row in rows if "skipped" not in row]
    for row in sorted(measured, key=lambda row: -row["ratio_to_plain"]):
        table.add_row(
            escape(row["name"]),
            row["family"],
            f"{row['batch']}",
            format_seconds(row["plain_s"]),
            f"{row['ratio_to_plain']:.2f}",
            f"{row['kept_share']:.0%}",
            format_or_dash("{:.0%}".format, row["peak_share"]),
            format_or_dash("{:.4f}".format, row["gradient_cosine"]),
        )
    for row in rows:
        if "skipped" in row:
            table.add_row(escape(row["name"]), row["family"], escape(row["skipped"]), *[NOTHING] * 5)
    return table


def tensors_table(rows: Sequence[dict[str, Any]], bits: int) -> Table:
    """The rows of ``bench memory --tensors``."""
    title = "What one saved tensor costs, forward and backward together"
    table = _table(title, "elements", "layer", "+ kept as it is", f"+ packed in {bits} bits", "saves")
    for row in rows:
        times = (f"{row[name]:,.1f} µs" for name in ("plain_us", "kept_us", "packed_us"))
        table.add_row(f"{row['numel']:,}", *times, format_bytes(row["saved_nbytes"]))
    return table


def zoo_profile_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of :func:`~narrowband.bench.zoo.profile`."""
    title = "Where the time goes: shares of the plain step, in which tensors are packed and restored"
    table = _table(title, "family", "operator", "share")
    for row in rows:
        parts = {name: share for name, share in row["operators"].items() if share >= 0.005}
        for at, (name, share) in enumerate((parts | {"the rest": row["rest"], "all": row["whole"]}).items()):
            table.add_row("" if at else row["family"], escape(name), f"{share:+.1%}")
    return table


def budgets_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of ``bench memory --zoo --shares``, a line for every budget."""
    table = _table(
        "Training in budgets with room for shares of what it holds as it is, beside parameters, optimizer and inputs",
        *("architecture", "as it is", "budget", "predicted", "measured", "error", "step", "predicted", "gradients off"),
    )
    for row in rows:
        if "skipped" in row:
            table.add_row(escape(row["name"]), escape(row["skipped"]), *[NOTHING] * 7)
        for budget in row.get("budgets", ()):
            table.add_row(
                escape(row["name"]),
                format_bytes(row["plain_bytes"]),
                f"{budget['share']:.0%}" + ("" if budget["reached"] else ", not met"),
                format_bytes(budget["predicted"]),
                format_bytes(budget["measured"]),
                f"{budget['error']:+.1%}",
                f"{budget['ratio_to_plain']:.2f} ×",
                f"{budget['predicted_ratio']:.2f} ×",
                f"{budget['gradient_error']:.1%}",
            )
    return table


def takes_table(tensors: dict[str, int], activations: dict[str, int]) -> Table:
    """The memory that training takes, with a column for each way to keep activations."""
    table = _table("What training takes", "", *activations)
    for name, nbytes in tensors.items():
        if nbytes:
            table.add_row(name, *[format_bytes(nbytes)] * len(activations))
    table.add_row("activations", *map(format_bytes, activations.values()))
    table.add_section()
    table.add_row("all", *(format_bytes(sum(tensors.values()) + kept) for kept in activations.values()))
    return table


def saved_table(what: str, surveys: dict[str, dict[str, SavedBytes]]) -> Table:
    """The bytes that operators or modules keep, a column per policy; the first column is without compression."""
    first = next(iter(surveys.values()))
    table = _table(f"Kept for backward, by {what}", what, "plain", *surveys)
    for name, kept in sorted(first.items(), key=lambda item: -item[1].raw_bytes):
        table.add_row(
            escape(name) or "(model)",
            format_bytes(kept.raw_bytes),
            *(format_bytes(table_[name].kept_bytes) if name in table_ else NOTHING for table_ in surveys.values()),
        )
    total = [sum(kept.kept_bytes for kept in table_.values()) for table_ in surveys.values()]
    table.add_section()
    table.add_row("all", format_bytes(sum(kept.raw_bytes for kept in first.values())), *map(format_bytes, total))
    return table


def demo_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of the demo. The first row, the uncompressed one, is what losses are compared with."""
    table = _table(
        "Bytes per rank and step; held-out loss in nats per byte"
        + ("" if rows[0]["sent_bytes_per_step"] else "\nOne rank: it sends nothing, with and without compression"),
        *("codec", "sent", "× less", "error", "step", "loss", "loss ±"),
    )
    uncompressed = rows[0]["heldout_loss"]
    for row in rows:
        table.add_row(
            escape(row["codec"]),
            format_bytes(row["sent_bytes_per_step"]),
            format_or_dash(lambda times: f"{times:.1f}", row["times_less_traffic"]),
            _error(row.get("relative_error")),
            format_seconds(row["step_s"]),
            format_loss(row["heldout_loss"]),
            format_or_dash(_change, row["heldout_loss"] and uncompressed and row["heldout_loss"] / uncompressed),
        )
    return table


def estimate_table(entries: Sequence[dict[str, Any]], formula: str) -> Table:
    """Estimated steps, a column per link."""
    rates = list(dict.fromkeys(entry["rate_bits_per_s"] for entry in entries))
    codecs = list(dict.fromkeys(entry["codec"] for entry in entries))
    steps = {(entry["codec"], entry["rate_bits_per_s"]): entry["estimated_step_s"] for entry in entries}
    table = _table(f"Estimated step: {formula}", "codec", *(format_rate(rate) for rate in rates))
    for codec in codecs:
        table.add_row(escape(codec), *(format_seconds(steps[codec, rate]) for rate in rates))
    return table


def lab_table(report: LabReport) -> Table:
    """The kernel's counters of each rank's link."""
    ranks = len(report.ranks)
    table = _table(
        f"{counted(ranks, 'rank')}, {format_seconds(report.seconds)}",
        "rank", "exit code", "sent", "received", "packets sent", "packets received",
    )  # fmt: skip
    for rank in report.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.exit_code) if rank.exit_code == 0 else f"[red]{rank.exit_code}",
            format_bytes(rank.sent_bytes),
            format_bytes(rank.received_bytes),
            f"{rank.sent_packets:,}",
            f"{rank.received_packets:,}",
        )
    return table


def _change(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _error(value: float | None) -> str:
    """Format a relative error: 0.73, 0.026, 2e-08."""
    return format_or_dash("{:.2g}".format, value)
