"""``narrowband memory``."""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from narrowband.bench import devices, subjects, ways
from narrowband.cli.exits import DONE, FAILED, check_output
from narrowband.cli.records import written_first

if TYPE_CHECKING:
    from rich.console import Console

    from narrowband.activations import Saved, SavedBytes
    from narrowband.bench.budget import Fit

__all__ = ["Memory"]

#: Print a note if the process takes more than this many times the bytes of its tensors.
_FAR = 1.25

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Memory:
    """Say what training a model takes of memory, and find the fastest way to train within a budget.

    It counts parameters, gradients, the optimizer's state, and what backward keeps of activations: by operator and
    module, plain and in 8 and 4 bits.

    With --budget it looks for the fastest way to train within that memory. For every block of the model it chooses
    whether activations are kept as they are, in 8 or 4 bits, or recomputed. It measures some dozens of steps. Exit code
    1 says that nothing fits.

    Examples:
      narrowband memory deit-tiny --batch 32
      narrowband memory model.py:build --batch 64 --budget 8GB --output policy.toml
      narrowband memory model.py:build --batch 64 --amp --depth 3 --codec topk:density=0.01+ef
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """file.py:function, which is called with the batch size and returns a module and the tuple of its inputs; or
    deit-tiny, deit-small, gpt, resnet18; or a small model of narrowband bench memory --zoo, such as bert."""
    batch: int = 8
    """Samples."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """Bytes of tensors that may be alive at once, such as 8GB or 600MB: parameters, gradients, the optimizer's state,
    residuals, activations, and what operators need for a moment."""
    optimizer: Literal["adamw", "sgd", "adafactor", "adamw-8bit"] = "adamw"
    """Whose state is counted; sgd has momentum, and adamw-8bit is bitsandbytes'."""
    codec: Annotated[str | None, tyro.conf.arg(metavar="SPEC")] = None
    """With which gradients are compressed, such as topk:density=0.01+ef, for the residuals that its feedback keeps."""
    amp: bool = False
    """Run forward under bfloat16 autocast."""
    device: Annotated[Literal["cpu", "cuda"] | None, tyro.conf.arg(metavar="{cpu,cuda}")] = None
    """Where to train; CUDA where there is any, when left out."""
    depth: int = 2
    """How many parts of a module's name the table of modules shows: 2 of model.layers.0.mlp are model.layers."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the policy that was found to this TOML file, for ActivationPolicy.load."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write what was found to this file, with machine, versions and command."""

    def _check(self) -> None:
        for name in ("batch", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.budget is not None:
            parse_bytes(self.budget)
        elif self.output is not None:
            raise ValueError("--output writes the policy that meets a budget: give --budget, too")
        check_output(self.output, self.json, reads=(self.model,))

    def __call__(self, console: Console) -> int:
        from narrowband.activations import ActivationPolicy
        from narrowband.bench import budget
        from narrowband.bench.held import tensors_of
        from narrowband.bench.trials import Job
        from narrowband.report.tables import saved_table, takes_table

        self._check()
        devices.check_device(self.device)
        with console.status("building"):
            model, inputs = subjects.tried(self.model, self.batch, self.device or devices.default_device())
            model.train()
        if remark := subjects.remark(self.model, model):
            console.print(remark, style="yellow", markup=False, highlight=False)
        tensors = tensors_of(model, inputs, self.optimizer, self.codec)
        surveys = {}
        with console.status("") as status:
            for bits in (8, 4):
                status.update(f"a step in {bits} bits")
                policy = ActivationPolicy(bits=bits)
                surveys[f"{bits} bits"] = ways.survey(model, inputs, policy, amp=self.amp)
        activations = {"plain": surveys["8 bits"].raw_bytes} | {bits: each.kept_bytes for bits, each in surveys.items()}
        with written_first(lambda: self._write(tensors, surveys, None)):
            console.print(takes_table(tensors, activations))
            console.print(saved_table("operator", {name: saved.by_operator for name, saved in surveys.items()}))
            for note in _notes(surveys):
                console.print(note, style="dim", markup=False, highlight=False)
            console.print(saved_table("module", {name: self._modules(saved) for name, saved in surveys.items()}))
        found = None
        if self.budget is not None:
            del model, inputs  # the search builds its own
            build = functools.partial(subjects.subject, self.model, self.batch)
            job = Job(build, self.amp, self.optimizer, self.codec, self.device)
            with console.status("") as status:
                found = budget.fit(job, parse_bytes(self.budget), lambda what: status.update(f"measuring {what}"))
            with written_first(lambda: self._write(tensors, surveys, found)):
                self._say(console, found)
            if self.output is not None and found.reached:
                console.print(f"written to {self.output}", style="dim", markup=False, highlight=False)
        if self.json is not None:
            console.print(f"written to {self.json}", style="dim", markup=False, highlight=False)
        return DONE if found is None or found.reached else FAILED

    def _modules(self, saved: Saved) -> dict[str, SavedBytes]:
        """Merge modules whose names agree in their first ``depth`` parts."""
        from narrowband.activations import SavedBytes

        merged: dict[str, SavedBytes] = {}
        for name, kept in saved.by_module.items():
            entry = merged.setdefault(".".join(name.split(".")[: self.depth]), SavedBytes())
            entry.add(kept.raw_bytes, kept.kept_bytes, kept.outliers)
        return merged

    def _say(self, console: Console, found: Fit) -> None:
        from narrowband.units import format_bytes

        for note in found.notes:
            console.print(note, style="dim", markup=False, highlight=False)
        if found.policy.is_off and found.reached:
            console.print(
                f"Nothing to do: as it is, training takes {format_bytes(found.measured)}.",
                style="green", markup=False, highlight=False,
            )  # fmt: skip
        elif found.reached:
            console.print(
                f"Within {self.budget}: {_measured(found)}; as it is, training takes {format_bytes(found.plain)}. A "
                f"step takes {found.ratio:.2f} times as long ({found.predicted_ratio:.2f} were predicted), and "
                f"gradients are off by {found.gradient_error:.1%}. The policy:",
                style="green", markup=False, highlight=False,
            )  # fmt: skip
            console.print(found.policy.to_toml(), markup=False, highlight=False)
        else:
            parts = {name: nbytes for name, nbytes in found.tensors.items() if nbytes} | {"activations": found.kept}
            most = sorted(parts, key=parts.__getitem__, reverse=True)[:4]
            console.print(
                f"Not within {self.budget}: the least that training takes is {_measured(found)}. "
                f"{', '.join(f'{name} {format_bytes(parts[name])}' for name in most)}; the rest is what operators "
                "need for a moment. A smaller batch has fewer activations, an "
                "optimizer in 8 bits (adamw-8bit) or adafactor a smaller state, and FSDP2 shares all but "
                "activations among ranks.",
                style="red", markup=False, highlight=False,
            )  # fmt: skip
        if found.process is not None and found.process > _FAR * found.measured:
            console.print(
                f"A process that trains so takes {format_bytes(found.process)}: this malloc leaves gaps between "
                "tensors. jemalloc leaves fewer; the documentation of activations says how to use it.",
                style="yellow", markup=False, highlight=False,
            )  # fmt: skip

    def _write(self, tensors: dict[str, int], surveys: dict[str, Saved], found: Fit | None) -> None:
        from narrowband.files import write_text
        from narrowband.report.record import provenance, write_json

        if self.output is not None and found is not None and found.reached:
            write_text(self.output, found.policy.to_toml())
        if self.json is None:
            return
        options = ("model", "batch", "amp", "budget", "optimizer", "codec")
        record: dict[str, Any] = {name: getattr(self, name) for name in options} | {"tensors": tensors}
        for name, saved in surveys.items():
            record[name] = _as_record(saved)
        if found is not None:
            record["fit"] = asdict(found) | {"policy": found.policy.to_dict()}
        write_json(self.json, provenance(0) | record)


def _measured(found: Fit) -> str:
    from narrowband.units import format_bytes

    return f"{format_bytes(found.measured)} ({format_bytes(found.predicted)} were predicted)"


def _notes(surveys: dict[str, Saved]) -> list[str]:
    """Return notes that explain the table of operators."""
    first = (
        "An operator is counted with the tensors that it is the first to keep. What another one keeps already, and "
        "what backward recomputes from that, costs nothing more."
    )
    notes = [first]
    if any("layer_norm" in saved.by_operator for saved in surveys.values()):
        notes.append(
            'Layer norms have 8 bits in the column of 4, too, unless the policy names them (operators={"layer_norm": '
            "4}). So where 8 bits of another operator serve a layer norm as well, 4 bits do not: it keeps codes of its "
            "own then, and more than in the column of 8."
        )
    outliers = {name: saved.outliers for name, saved in surveys.items() if saved.outliers}
    if outliers:
        record = ", ".join(f"{count} with {name}" for name, count in outliers.items())
        why = "inf, NaN or outliers are in them, or were in one before them"
        notes.append(f"Tensors that are kept as they are, since {why}: {record}.")
    return notes


def _as_record(saved: Saved) -> dict[str, Any]:
    tables = {"by_operator": saved.by_operator, "by_module": saved.by_module}
    return {"raw_bytes": saved.raw_bytes, "kept_bytes": saved.kept_bytes} | {
        what: {name: {"raw_bytes": kept.raw_bytes, "kept_bytes": kept.kept_bytes} for name, kept in table.items()}
        for what, table in tables.items()
    }


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as ``8GB``, ``600 MB`` or ``1.5GiB``.

    Raises:
        ValueError: the text is no amount of memory.

    Example:
        >>> parse_bytes("1.5GB")
        1500000000
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ValueError(
            f"budget={text!r} is not an amount of memory; give a number and a unit, such as 8GB, 600MB or 1.5GiB"
        )
    return round(float(match[1]) * _UNITS[match[2]])
