"""``narrowband memory``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from narrowband.bench import memory, subjects
from narrowband.cli.exits import DONE, FAILED, check_output

if TYPE_CHECKING:
    from rich.console import Console

    from narrowband.activations import ActivationPolicy, Saved, SavedBytes

__all__ = ["Memory"]

_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Memory:
    """What backward keeps of a model's activations, by operator and module, plain and in 8 and 4 bits.

    With a budget, the policy that keeps within it and costs the least time (or exit code 1, if none does): operators
    are compressed one after the other, the cheapest first. The budget is for what is kept between forward and backward;
    parameters, gradients and the optimizer come on top.

    Examples:
      narrowband memory deit-tiny --batch 32
      narrowband memory model.py:build --batch 64 --budget 8GB --output policy.toml
      narrowband memory model.py:build --batch 64 --amp --depth 3
    """

    model: tyro.conf.Positional[str]
    """file.py:function, which is called with the batch size and returns a module and the tuple of its inputs; or
    deit-tiny, deit-small, gpt, resnet18."""
    batch: int = 8
    """Samples."""
    budget: str | None = None
    """Bytes that backward may keep, such as 8GB or 600MB."""
    amp: bool = False
    """Run forward under bfloat16 autocast."""
    depth: int = 2
    """Parts of a module's name that tables of modules tell apart."""
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
            raise ValueError("--output is for the policy that meets a budget: give --budget, too")
        check_output(self.output, self.json)

    def __call__(self, console: Console, behind: list[str] | None) -> int:
        from narrowband.activations import ActivationPolicy
        from narrowband.report.tables import saved_table

        self._check()
        with console.status("building"):
            model, inputs = subjects.tried(self.model, self.batch)
            model.train()

        def measure(policy: ActivationPolicy) -> Saved:
            return memory.survey(model, inputs, policy, amp=self.amp)

        surveys = {}
        with console.status("") as status:
            for bits in (8, 4):
                status.update(f"a step in {bits} bits")
                surveys[f"{bits} bits"] = measure(ActivationPolicy(bits=bits))
        console.print(saved_table("operator", {name: saved.by_operator for name, saved in surveys.items()}))
        for note in _notes(surveys):
            console.print(note, style="dim", markup=False, highlight=False)
        console.print(saved_table("module", {name: self._modules(saved) for name, saved in surveys.items()}))
        found = None
        if self.budget is not None:
            with console.status("looking for a policy"):
                found = memory.fit(measure, parse_bytes(self.budget))
            self._say(console, found)
        if self.json is not None:
            self._record(surveys, found)
            console.print(f"written to {self.json}", style="dim", markup=False, highlight=False)
        return DONE if found is None or found.reached else FAILED

    def _modules(self, saved: Saved) -> dict[str, SavedBytes]:
        """Modules put merged as far as their names agree in their first parts."""
        from narrowband.activations import SavedBytes

        merged: dict[str, SavedBytes] = {}
        for name, kept in saved.by_module.items():
            entry = merged.setdefault(".".join(name.split(".")[: self.depth]), SavedBytes())
            entry.add(kept.raw_bytes, kept.kept_bytes, kept.outliers)
        return merged

    def _say(self, console: Console, found: memory.Fit) -> None:
        from narrowband.units import format_bytes

        kept = format_bytes(found.saved.kept_bytes)
        if not found.reached:
            console.print(
                f"Not within {self.budget}: with every operator in 2 bits backward still keeps {kept}. A smaller batch "
                "or activation checkpointing, which this composes with, goes further.",
                style="red", markup=False, highlight=False,
            )  # fmt: skip
        elif found.policy.is_off:
            console.print(f"Nothing to do: the plain model keeps {kept}.", style="green", markup=False, highlight=False)
        else:
            console.print(
                f"Within {self.budget}: {kept}, with this policy", style="green", markup=False, highlight=False
            )
            console.print(found.policy.to_toml(), markup=False, highlight=False)
        if self.output is not None and found.reached:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(found.policy.to_toml())
            console.print(f"written to {self.output}", style="dim", markup=False, highlight=False)

    def _record(self, surveys: dict[str, Saved], found: memory.Fit | None) -> None:
        from narrowband.report.record import provenance, write_json

        assert self.json is not None
        record: dict[str, Any] = {"model": self.model, "batch": self.batch, "amp": self.amp, "budget": self.budget}
        for name, saved in surveys.items():
            record[name] = _as_record(saved)
        if found is not None:
            record["fit"] = {"policy": found.policy.to_dict(), "reached": found.reached, **_as_record(found.saved)}
        write_json(self.json, provenance(0) | record)


def _notes(surveys: dict[str, Saved]) -> list[str]:
    """What the table of operators needs to be understood."""
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
        notes.append(f"Tensors that are kept as they are, since inf, NaN or outliers are in them: {record}.")
    return notes


def _as_record(saved: Saved) -> dict[str, Any]:
    tables = {"by_operator": saved.by_operator, "by_module": saved.by_module}
    return {"raw_bytes": saved.raw_bytes, "kept_bytes": saved.kept_bytes} | {
        what: {name: {"raw_bytes": kept.raw_bytes, "kept_bytes": kept.kept_bytes} for name, kept in table.items()}
        for what, table in tables.items()
    }


def parse_bytes(text: str) -> int:
    """Bytes of ``8GB``, ``600 MB``, ``1.5GiB``.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_bytes("1.5GB")
        1500000000
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"budget={text!r} is no amount of memory; write 8GB, 600MB or 1.5GiB")
    return round(float(match[1]) * _UNITS[match[2]])
