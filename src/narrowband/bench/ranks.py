"""Start the ranks of a benchmark, receive events while they work, and collect the result of each.

A benchmark is a module that every rank runs as ``python -m MODULE DIRECTORY``, with torchrun's environment variables.
Ranks share only the directory with the parent: the parent writes ``config.json``, rank 0 appends progress to
``events.jsonl`` (:meth:`RankProcess.tell`), and each rank writes its result to ``rank<N>.json``
(:meth:`RankProcess.finish`).

Ranks run on this machine's loopback (:class:`Loopback`, no rights needed) or behind emulated links
(:class:`narrowband.lab.LabConfig`). Either way they end when their parent does, however it ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from narrowband.bench.loopback import run_on_loopback
from narrowband.lab import LabConfig, run

__all__ = ["Loopback", "RankError", "RankProcess", "check_seed", "received", "run_ranks", "transmitted"]

_POLL_S = 0.1
_TAIL_LINES = 30
_SIGNALLED = 128  # exit codes above it: ended by a signal

#: The kind of event by which a rank says what it has so far.
_SO_FAR = "so far"

#: Seeds are multiplied and added to on the way to torch's generators, which take 64 bits.
_MAX_SEED = 2**31


class RankError(RuntimeError):
    """A rank of a benchmark ended with an error. The message holds the end of the ranks' output.

    Attributes:
        sentence: what happened, without the ranks' output; it names the file that holds the output.
    """

    def __init__(self, sentence: str, output: str = "") -> None:
        super().__init__(f"{sentence}\n{output}" if output else sentence)
        self.sentence = sentence


def check_seed(seed: int) -> None:
    """Raise ValueError unless every generator of a benchmark can be seeded with ``seed``."""
    if not 0 <= seed < _MAX_SEED:
        raise ValueError(f"seed={seed} is not in [0, 2**31); give a small number from 0 on")


@dataclass(frozen=True)
class Loopback:
    """``nodes`` ranks on this machine's loopback interface, unshaped."""

    nodes: int

    @property
    def ranks(self) -> int:
        """The number of ranks, one per node."""
        return self.nodes


def run_ranks(
    module: str,
    config: dict[str, Any],
    where: Loopback | LabConfig,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    so_far: Callable[[list[Any]], None] = lambda _: None,
) -> list[Any]:
    """Run ``python -m module`` once per rank and return what each passed to :meth:`RankProcess.finish`, in rank order.

    Args:
        module: dotted name of the benchmark.
        config: JSON-able; a rank finds it as ``RankProcess.config``.
        where: the network that the ranks are on.
        on_event: called (from another thread) with every event that rank 0 tells.
        so_far: called in the same way, when all ranks have called :meth:`RankProcess.so_far` once more, with what each
            has passed to it, in rank order. It needs ``on_event``.

    Raises:
        RankError: a rank ended with an error or without a result.
        UnsupportedError: emulated links are asked for and cannot be made here; says what is missing.
        KeyboardInterrupt: after Ctrl-C, when all ranks are gone.
    """
    with tempfile.TemporaryDirectory(prefix="narrowband-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(config))
        events = directory / "events.jsonl"
        events.touch()
        log = directory / "ranks.log"
        note = None if on_event is None else _gathering(where.ranks, on_event, so_far)
        with _following(events, note), log.open("wb") as output:
            if isinstance(where, LabConfig):
                command = [sys.executable, "-m", module, name]
                code = run(where, command, stdout=output, stderr=subprocess.STDOUT).exit_code
            else:
                code = run_on_loopback(module, [name], where.nodes, log)
        results = [directory / f"rank{rank}.json" for rank in range(where.ranks)]
        if code or not all(path.exists() for path in results):
            raise _rank_error(code, log)
        return [json.loads(path.read_text()) for path in results]


class RankProcess:
    """The side of a rank: its place, its configuration, and its communication with the parent."""

    def __init__(self, directory: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self._directory = Path(directory)
        self._turn = 0
        self.config: dict[str, Any] = json.loads((self._directory / "config.json").read_text())

    def tell(self, **event: Any) -> None:
        """Send the parent an event, if this is rank 0."""
        if self.rank == 0:
            self.say(**event)

    def say(self, **event: Any) -> None:
        """Send the parent an event, whichever rank this is."""
        line = json.dumps(event).encode() + b"\n"
        with (self._directory / "events.jsonl").open("ab", buffering=0) as file:
            file.write(line)  # in one call, so that lines of ranks do not mix

    def so_far(self, result: Any) -> None:
        """Send the parent what :meth:`finish` would get if this rank ended now. All ranks call it equally often."""
        self._turn += 1
        self.say(event=_SO_FAR, turn=self._turn, rank=self.rank, result=result)

    def claim(self, what: str) -> bool:
        """Return whether this rank is the first to claim a piece of work, which one rank alone shall do."""
        try:
            (self._directory / f"claimed-{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def finish(self, result: Any) -> NoReturn:
        """Write this rank's result for the parent, wait until all ranks have done so, and end this process.

        The interpreter does not shut down normally, because a thread of gloo that still holds a tensor would then crash
        the process, and the process group of a failed row might never end.
        """
        target = self._directory / f"rank{self.rank}.json"
        unfinished = target.with_suffix(".tmp")
        unfinished.write_text(json.dumps(result))
        unfinished.replace(target)
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():  # not without it, and it takes seconds to import
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def transmitted(card: str) -> int:
    """Bytes that the kernel has sent on this network card, in this process's network namespace."""
    return _counters(card)[8]


def received(card: str) -> int:
    """Bytes that the kernel has received on this network card, likewise."""
    return _counters(card)[0]


def _counters(card: str) -> list[int]:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == card:
            return [int(counter) for counter in counters.split()]
    raise RuntimeError(f"there is no network card {card!r}")


# ---- events and errors -----------------------------------------------------------------------------------------------


def _gathering(
    ranks: int, on_event: Callable[[dict[str, Any]], None], so_far: Callable[[list[Any]], None]
) -> Callable[[dict[str, Any]], None]:
    """Return a function that passes events on, and gathers from all ranks what they have so far."""
    results: dict[int, dict[int, Any]] = {}  # turn → rank → its result after that

    def note(event: dict[str, Any]) -> None:
        if event.get("event") != _SO_FAR:
            on_event(event)
            return
        own = results.setdefault(event["turn"], {})
        own[event["rank"]] = event["result"]
        if len(own) == ranks:
            del results[event["turn"]]
            so_far([own[rank] for rank in range(ranks)])

    return note


@contextmanager
def _following(path: Path, on_event: Callable[[dict[str, Any]], None] | None) -> Iterator[None]:
    """Call ``on_event`` with each line appended to ``path``, until the block ends and all were read."""
    if on_event is None:
        yield
        return
    done = threading.Event()
    failed: list[Exception] = []

    def follow() -> None:
        with path.open() as file:
            rest = ""
            while True:
                last = done.is_set()  # checked before reading, so that nothing written earlier is missed
                *lines, rest = (rest + file.read()).split("\n")
                try:
                    for line in lines:
                        on_event(json.loads(line))
                except Exception as error:
                    failed.append(error)
                    return
                if last:
                    return
                done.wait(_POLL_S)

    thread = threading.Thread(target=follow, name="narrowband-events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failed:
        raise failed[0]


#: A line that ends a traceback, perhaps behind the rank that the lab puts before it.
_RAISED = re.compile(r"^(?:\[rank \d+\] )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Warning)\b.*)$", re.MULTILINE)
_CHAINED = ("The above exception was", "During handling of the above")


def _rank_error(code: int, log: Path) -> RankError:
    """Make the error of a failure: the first error of the log, and a copy of the log that outlives this process."""
    output = log.read_text(errors="replace").strip()
    if code > _SIGNALLED:
        name = signal.Signals(code - _SIGNALLED).name if code - _SIGNALLED in set(signal.Signals) else "a signal"
        what = f"a rank was ended by {name}"
        if name == "SIGKILL":
            what += ", which is what the system does when memory runs out"
    else:
        what = f"a rank ended with exit code {code}"
    if not output:
        return RankError(f"{what} and said nothing")
    raised = [match for match in _RAISED.finditer(output) if not output[match.end() :].lstrip().startswith(_CHAINED)]
    if raised:
        what += f": {raised[0][1]}"
    with tempfile.NamedTemporaryFile("w", prefix="narrowband-ranks-", suffix=".log", delete=False) as kept:
        kept.write(output)
    tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
    return RankError(f"{what} (all that the ranks said is in {kept.name})", tail)
