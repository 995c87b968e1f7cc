"""Record a run while it trains: one rank writes one JSON object per line.

Every line is complete, except that the last one may be cut off if the process died; :func:`read_run` then ignores it.
So the file of a run can be read while the run is still going, and after it was killed. A run that resumes from a
checkpoint appends to its file: if a step was taken twice, the later record counts.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

import torch.distributed as dist
from torch import Tensor

from narrowband.averaging import LayerStats
from narrowband.report.record import provenance
from narrowband.units import whole_number

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Recorder", "Run", "is_run", "read_run"]

log = logging.getLogger(__name__)

#: Version of the file's format.
_VERSION = 1

#: Totals that are recorded per step, if the handle's statistics have them: seconds and bytes.
_SUMS = ("raw_bytes", "sent_bytes", "encode_s", "wire_s", "decode_s", "waiting_s", "exchange_s", "decide_s")


#: An ``every`` of at least this many steps means that rounds are scheduled by time.
_BY_TIME = 1 << 40


class _Handle(Protocol):
    """The object whose statistics are recorded: an Averager, or the handle of a model."""

    def stats(self) -> Any:
        """Return the statistics: totals, and the last step."""
        ...


class Recorder:
    """Record what compression does in each step, for ``narrowband report`` and for loggers.

    Create one on all ranks, and call :meth:`step` on all ranks after every optimizer step. One rank writes.

    Args:
        handle: of ``nb.compress_gradients``, ``nb.compress_updates``, ``nb.compress_shards``, or an ``nb.Averager``.
        path: of the file, such as ``run.jsonl``. If the file has an earlier part of the same run, records are appended
            to it; if the handle does not know the number of steps, they are numbered from the file's last one. An empty
            file, or one of a process that died before its first record, has no earlier part. None: use only the writer.
        every: steps from one record to the next. A record has means over these steps.
        layers_every: steps from one record of all layers to the next. Such a record reads all residuals once.
        writer: a TensorBoard writer (``add_scalar``) or a run of Weights & Biases (``log``), which gets the same
            numbers.
        rank: the rank that writes; None: every rank writes, each to a path of its own.

    Raises:
        ValueError: ``every`` or ``layers_every`` is below 1, or the file holds something else.
        OSError: the file cannot be written.
        TypeError: the handle has no ``stats()``, or the writer is neither of the two.

    Example:
        >>> with nb.Recorder(handle, "run.jsonl") as recorder:  # doctest: +SKIP
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         loss = loss_of(model(x), y)
        ...         loss.backward()
        ...         optimizer.step()
        ...         recorder.step(loss=loss)
    """

    def __init__(
        self,
        handle: _Handle,
        path: str | Path | None = None,
        *,
        every: int = 1,
        layers_every: int = 50,
        writer: Any = None,
        rank: int | None = 0,
    ) -> None:
        if not callable(getattr(handle, "stats", None)):
            raise TypeError(
                f"handle is {type(handle).__name__}; pass what nb.compress_gradients, nb.compress_updates or "
                "nb.compress_shards returned, or an nb.Averager"
            )
        every, layers_every = whole_number("every", every), whole_number("layers_every", layers_every)
        for name, value in (("every", every), ("layers_every", layers_every)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1: steps from one record to the next")
        if writer is not None and not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
            raise TypeError(
                f"writer={writer!r} must have a method add_scalar, as TensorBoard's SummaryWriter, or log, as a run of "
                "Weights & Biases"
            )
        self._handle, self._writer = handle, writer
        self._every, self._layers_every = every, layers_every
        self._writes = rank is None or not dist.is_initialized() or dist.get_rank() == rank
        self._path = None if path is None or not self._writes else Path(path)
        self._last, self._most = 0, math.inf  # steps in the earlier part of the file, and the most it may have had
        if self._path is not None and self._path.exists():
            earlier = _earlier(self._path)  # raises if it is another kind of file, which must not be overwritten
            if earlier is not None and earlier.steps:
                self._last = earlier.last
                self._most = earlier.last + (0 if earlier.ended else every - 1)
        if self._path is not None:  # now, and not after a step of training, it turns out that it cannot be written
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("ab").close()
        self._taken_before = _taken(handle) or 0
        self._file: Any = None
        self._waiting = bytearray()  # lines that are not written yet, because the disk was full
        self._number: int | None = None
        self._before = self._sums()
        self._since = self._count = 0
        self._began: float | None = None

    def step(
        self,
        *,
        loss: SupportsFloat | Tensor | None = None,
        step: int | None = None,
        **scalars: SupportsFloat | Tensor,
    ) -> None:
        """Record an optimizer step that was taken. Call it on all ranks.

        Args:
            loss: of the step. A tensor is read, which waits for a GPU, only if a record is due.
            step: its number. By default steps are counted, starting from the handle's own number or, if it has none or
                schedules rounds by time, from the last step in the file.
            scalars: other numbers to record.

        Raises:
            ValueError: a tensor with more than one number.
        """
        for name, value in {"loss": loss, **scalars}.items():  # on all ranks, also on those that do not write
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"{name} is a tensor of shape {tuple(value.shape)}; record one number, such as {name}.mean()"
                )
        if self._number is None:
            self._number = self._earlier_steps()
        self._number = self._number + 1 if step is None else whole_number("step", step)
        self._since += 1
        self._count += 1
        if not self._writes or self._since < self._every:
            return
        now, sums = time.perf_counter(), self._sums()
        if sums.get("raw_bytes", 0.0) < self._before.get("raw_bytes", 0.0):
            self._before = {}  # a state was loaded, and sums restarted
        # The first record has no time, because the start of its steps is unknown.
        values: dict[str, float] = {} if self._began is None else {"seconds": (now - self._began) / self._since}
        values |= {name: (total - self._before.get(name, 0.0)) / self._since for name, total in sums.items()}
        values["skipped"] = sums.get("skipped", 0.0) - self._before.get("skipped", 0.0)
        error = getattr(self._handle.stats().total, "relative_error", None)
        values |= {} if error is None else {"relative_error": error}
        values |= {} if loss is None else {"loss": _float(loss)}
        values |= {name: _float(value) for name, value in scalars.items()}
        self._write({"kind": "step", "step": self._number, "steps": self._since, "values": values})
        self._tell(values)
        earlier = self._count - self._since
        if not earlier or earlier // self._layers_every != self._count // self._layers_every:
            self._layers()
        self._before, self._since, self._began = sums, 0, time.perf_counter()

    def close(self) -> None:
        """Write the end of the run, and close the file. The handle is not affected.

        Raises:
            OSError: the disk is still full; the lines that waited for room are lost.
        """
        if self._file is not None:
            self._write({"kind": "end", "step": self._number or 0})
            file, self._file, self._path = self._file, None, None
            with file:
                self._put(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._file is not None:  # the next step would open the file again
            self._file.close()
            self._file = None
            self._waiting.clear()

    def _earlier_steps(self) -> int:
        """Return the number of steps before the latest one, in this process and earlier ones."""
        taken = _taken(self._handle)
        if taken is None:
            return self._last
        if not hasattr(self._handle, "every"):
            return max(0, taken - 1)
        # A round of this step may be under way and not counted yet. Rounds that were called for explicitly, and those
        # of fragments, count as if there had been more steps. The file bounds the number: there were no more steps.
        return int(min(max(self._taken_before, taken - 1), self._most))

    def _sums(self) -> dict[str, float]:
        total = self._handle.stats().total
        return {name: float(getattr(total, name)) for name in (*_SUMS, "skipped") if hasattr(total, name)}

    def _layers(self) -> None:
        layer_stats = getattr(self._handle, "layer_stats", None)
        if layer_stats is None or self._path is None:
            return
        layers = {
            name: [own.spec, own.numel, own.raw_bytes, own.sent_bytes, own.relative_error, own.residual_norm]
            for name, own in layer_stats().items()
        }
        self._write({"kind": "layers", "step": self._number, "layers": layers})

    def _tell(self, values: Mapping[str, float]) -> None:
        named = {f"narrowband/{name}": value for name, value in values.items()}
        if hasattr(self._writer, "add_scalar"):
            for name, value in named.items():
                self._writer.add_scalar(name, value, self._number)
        elif self._writer is not None:
            self._writer.log(named, step=self._number)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        if self._file is None:
            torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
            self._file = self._path.open("ab", buffering=0)
            if torn and self._path.stat().st_size:
                self._waiting += b"\n"  # ends the line that an earlier process was writing when it died
            self._waiting += _line(self._start())
            self._put(self._file)
        waited = bool(self._waiting)
        self._waiting += _line(_finite(record))
        try:
            self._put(self._file)
        except OSError as error:  # a full disk must not end training
            if not waited:
                log.warning(
                    "%s cannot be written (%s). Training continues, and unwritten records stay in memory until they "
                    "can be written",
                    self._path,
                    error.strerror or error,
                )

    def _put(self, file: Any) -> None:
        """Write the waiting lines as far as the disk has room. Python's buffered files would lose lines then.

        Raises:
            OSError: there is too little room.
        """
        while self._waiting:
            del self._waiting[: file.write(self._waiting)]

    def _start(self) -> dict[str, Any]:
        own = self._handle
        return {
            "kind": "start",
            "narrowband_run": _VERSION,
            "handle": type(own).__name__,
            "spec": str(getattr(own, "compression", "")),
            "ranks": int(getattr(own, "size", 1)),
            **provenance(command=sys.argv),
        }


def _taken(handle: _Handle) -> int | None:
    """Return a handle's number of optimizer steps; None if it has none, or schedules rounds by time.

    For a handle that counts rounds, the number may be too high.
    """
    step, every = getattr(handle, "step", None), getattr(handle, "every", 1)
    return None if step is None or every >= _BY_TIME else int(step) * int(every) + int(getattr(handle, "steps", 0))


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record) + "\n").encode()


def _float(x: SupportsFloat | Tensor) -> float:
    return float(x.detach() if isinstance(x, Tensor) else x)


def _finite(x: Any) -> Any:
    """Replace inf and NaN, which JSON does not have, by strings."""
    if isinstance(x, Mapping):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, Sequence) and not isinstance(x, str):
        return [_finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The contents of a :class:`Recorder`'s file.

    Attributes:
        start: the settings of the latest process: spec, ranks, machine, versions, commit.
        steps: step → values by name, which are means over the steps since the previous record.
        layers: step → layer → its statistics.
        ended: whether the recorder was closed.
        torn: whether the last line is cut off.
        last: the number of the last step, which may be after the last record.
    """

    start: dict[str, Any]
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    layers: dict[int, dict[str, LayerStats]] = field(default_factory=dict)
    ended: bool = False
    torn: bool = False
    last: int = 0

    def mean(self, name: str) -> float | None:
        """Return the mean of a value over all records but the first, which has one-time costs; None if none has it."""
        found = [values[name] for values in self.steps.values() if name in values]
        own = [x for x in (found[1:] or found) if math.isfinite(x)]
        return math.fsum(own) / len(own) if own else None


def read_run(path: str | Path) -> Run:
    """Read a file that a :class:`Recorder` wrote, or is still writing.

    Raises:
        ValueError: the file has no records, or holds something else.
        OSError: the file cannot be read.
    """
    run = _earlier(Path(path))
    if run is None or not run.steps:
        raise ValueError(f"{path} has no records yet: call recorder.step() after every optimizer step")
    return run


def is_run(path: Path) -> bool:
    """Return whether a file begins like those of a :class:`Recorder`, whatever its name.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS.encode()


def _earlier(path: Path) -> Run | None:
    """Read what a file has so far; None if a recorder died before it had written the start of the run.

    Raises:
        ValueError, OSError: as :func:`read_run`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} was not written by nb.Recorder: {error}; {_MAKE}") from error
    run: Run | None = None
    for number, line in enumerate(lines, 1):
        begins_anew = number < len(lines) and lines[number].startswith(_BEGINS)
        try:
            record = json.loads(line)
            if run is None and not (isinstance(record, dict) and record.get("kind") == "start"):
                raise _NoRunError
            run = _with_record(run, record)
        except _NewerError as error:
            raise ValueError(
                f"{path} was written by a newer version of narrowband ({error}): install that version"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            last = number == len(lines) or begins_anew
            if run is None:
                if isinstance(error, json.JSONDecodeError) and last and line[: len(_BEGINS)] == _BEGINS[: len(line)]:
                    continue
                raise ValueError(
                    f"{path} was not written by nb.Recorder: its first line does not start a run; {_MAKE}"
                ) from error
            if last:
                run.torn = True  # the process died while writing this line
                continue
            raise ValueError(
                f"{path} is damaged: line {number} is not a record ({_what(error)}); delete that line to read the rest"
            ) from error
    return run


#: The beginning of the first line that every process writes.
_BEGINS = '{"kind": "start"'

#: Advice in messages about a file that is no run.
_MAKE = (
    'nb.Recorder(handle, "run.jsonl") in a training loop writes such a file; narrowband report also takes the .json '
    "file of a benchmark"
)


class _NoRunError(ValueError):
    """The file does not begin like a run."""


class _NewerError(Exception):
    """The file has a newer version of the format than this code reads."""


def _with_record(run: Run | None, record: dict[str, Any]) -> Run:
    """Return a run with one more line of its file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, OverflowError: the record is no line of a run.
    """
    kind = record["kind"]
    if kind == "start":
        if (version := record["narrowband_run"]) > _VERSION:
            raise _NewerError(f"its format is {version}; this version reads {_VERSION}")
        for name in ("machine", "versions"):
            if not isinstance(record.get(name, {}), dict):
                raise ValueError(f"{name} is not an object")
        return Run(record) if run is None else Run(record, run.steps, run.layers, last=run.last)
    if run is None:
        raise _NoRunError
    if kind == "step":
        run.ended = False
        _take_back(run.steps, record["step"])
        run.last = _whole(record["step"])
        run.steps[run.last] = {name: float(value) for name, value in record["values"].items()}
    elif kind == "layers":
        _take_back(run.layers, record["step"])
        run.layers[_whole(record["step"])] = {name: _layer(*own) for name, own in record["layers"].items()}
    elif kind == "end":
        run.ended, run.last = True, max(run.last, _whole(record.get("step", run.last)))
    return run


def _whole(x: Any) -> int:
    if not isinstance(x, (int, float)) or x != int(x):
        raise ValueError(f"{x!r} is not a whole number")
    return int(x)


def _layer(spec: str, numel: int, raw: int, sent: int, error: float | None, norm: float | None) -> LayerStats:
    known = (None if x is None else float(x) for x in (error, norm))
    return LayerStats(str(spec), _whole(numel), _whole(raw), _whole(sent), *known)


def _what(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _take_back(records: dict[int, Any], step: int) -> None:
    """Remove the records of this step and later ones, from before the run resumed from a checkpoint.

    Steps always ascend, so the records to remove are the last ones.
    """
    while records and next(reversed(records)) >= step:
        records.popitem()
