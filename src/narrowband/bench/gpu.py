"""Run all measurements of a GPU into one record, for ``narrowband bench gpu`` and ``make gpu``.

Every part is a command in a process of its own, because a CUDA error makes its process unusable. If a part fails or
takes too long, its last output is recorded, and the others still run. Results are handed on after each part, so that
they survive if the machine goes away.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET

__all__ = ["PARTS", "Config", "Part", "parts", "run"]

#: Seconds that a command gets to write its results after it was asked to end.
_GRACE_S = 10.0

#: Number of lines of a failed part's output to keep.
_LINES = 3

#: The part that tests the loops. The caller gives its command, because tests exist in a checkout only.
_BATTERY = "battery"

#: Name → the limit in seconds (8 minutes in all), and the words of a ``narrowband bench`` command.
PARTS: dict[str, tuple[float, tuple[str, ...]]] = {
    _BATTERY: (200.0, ()),
    "kernels": (
        120.0, ("kernels", "--device", "cuda", "--backend", "all", "--numel", "64000000", "--repeats", "5"),
    ),
    "memory": (
        70.0,
        (
            "memory", "--device", "cuda", "--model", "deit-small", "--batch", "128", "--only", "bf16, 8 bits",
            "bf16, 4 bits", "bf16, 8 bits, MLPs recomputed", "bf16, checkpoint",
        ),
    ),
    "ddp": (
        90.0,
        (
            "ddp", "--device", "cuda", "--nodes", "1", "--model", "gpt2-small", "--amp", "--rounds", "4", "--codecs",
            "none", "fp16", "qsgd:bits=4", "topk:density=0.01+ef", "powersgd:rank=4",
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        parts: Only these of battery, kernels, memory and ddp. The battery is the command behind --, of pytest.
        patience: Times the limits after which a part is ended: 200 s for the battery, 120 s for kernels, 70 s for
            memory and 90 s for ddp, which are meant for a data-centre card.
    """

    parts: tuple[str, ...] = ()
    patience: float = 1.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.parts if name not in PARTS]
        if unknown:
            raise ValueError(f"no part is called {', '.join(unknown)}; there are: {', '.join(PARTS)}")
        if not 0 < self.patience < float("inf"):
            raise ValueError(f"patience={self.patience} must be a number above 0")


@dataclass(frozen=True)
class Part:
    """A command that measures something and writes its results to a file.

    Attributes:
        name: of the part.
        words: the command. The path of the file to write is appended.
        limit_s: seconds after which it is ended.
        writes: the format: ``json``, by ``--json FILE``, with rows; or ``junit``, by pytest's ``--junitxml FILE``.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    writes: Literal["json", "junit"] = "json"


def parts(config: Config, battery: Sequence[str] = ()) -> list[Part]:
    """Return the parts of a configuration.

    Args:
        config: what to measure.
        battery: the command that runs the tests; nothing, if there is none.

    Raises:
        ValueError: the battery is asked for, and there is no command for it.
    """
    if battery and config.parts and _BATTERY not in config.parts:
        raise ValueError(
            "the command behind '--' is the part battery, which --parts leaves out: name it there, or leave out the "
            "command"
        )
    if _BATTERY in config.parts and not battery:
        raise ValueError("the part battery needs a pytest command after '--', as in make gpu")
    found = []
    for name, (limit_s, words) in PARTS.items():
        if config.parts and name not in config.parts:
            continue
        patient_s = limit_s * config.patience
        if name != _BATTERY:
            found.append(Part(name, (sys.executable, "-m", "narrowband.cli", "bench", *words), patient_s))
        elif battery:
            found.append(Part(name, tuple(battery), patient_s, "junit"))
    return found


def run(these: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """Run parts one after the other, and yield the results of each. Their output is printed.

    The results hold ``part``, ``command``, ``seconds``, ``error`` (a sentence, or None), and what the
    command has written, its ``config`` and ``rows`` above all. Of tests the only row has how many ``tests`` there were,
    and how many of them had ``failures``, ``errors``, or were ``skipped``, and ``failed`` has the names of the first
    two kinds.

    """
    for part in these:
        with tempfile.TemporaryDirectory(prefix="narrowband-") as folder:
            found = _measured(part, Path(folder))
        yield found


def _measured(part: Part, folder: Path) -> dict[str, Any]:
    target, said = folder / "found", folder / "said"
    option = "--json" if part.writes == "json" else "--junitxml"
    begun = time.perf_counter()
    with said.open("wb") as errors:
        error = _run([*part.words, option, str(target)], part.limit_s, errors)
    told = said.read_text(errors="replace")
    print(told, end="", file=sys.stderr, flush=True)  # noqa: T201 - what the command said there
    if error is not None:
        lines = [line.strip() for line in told.splitlines() if line.strip()]
        error = ": ".join((error, *(["; ".join(lines[-_LINES:])] if lines else [])))
    found = {
        "part": part.name,
        "command": shlex.join((*part.words, option, "FILE")),
        "seconds": round(time.perf_counter() - begun, 1),
        "error": error,
    }
    if not target.exists():
        return found | {"rows": [], "error": error or "the command wrote nothing down"}
    return found | (_of_json(target) if part.writes == "json" else _of_tests(target))


def _run(words: Sequence[str], limit_s: float, errors: Any) -> str | None:
    """Run a command, and return what went wrong, or None."""
    try:
        process = subprocess.Popen(words, stderr=errors)
    except OSError as error:
        return f"{words[0]}: {error.strerror}"
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"ended after {limit_s:g} s, its limit"
    finally:
        _end(process)
    return f"exit code {code}" if code else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that is still running. Ask it first, so that it can write its results."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    process.kill()
    process.wait()


def _of_json(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text())
    return {name: record[name] for name in ("config", "rows") if name in record}


def _of_tests(path: Path) -> dict[str, Any]:
    suites = list(ET.parse(path).getroot().iter("testsuite"))
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"rows": [counts], "failed": failed}
