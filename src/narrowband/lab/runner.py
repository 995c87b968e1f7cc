"""Start a lab, wait for it, and report the kernel's counters.

``supervisor.py`` does the work in a process of its own, because this process may have threads (torch starts some), and
a process with threads can neither fork safely nor enter a user namespace.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import IO, Any

from narrowband.errors import UnsupportedError
from narrowband.lab import supervisor
from narrowband.lab.config import LabConfig

__all__ = ["LabReport", "RankReport", "rank_environment", "requirements", "run"]

_MASTER_PORT = 29500  # torchrun's default; rank 0's machine is its own, so the port is always free
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class RankReport:
    """The exit code of one rank, and the kernel's counters of its machine's link.

    Attributes:
        exit_code: Exit code of the rank's process; 128 + n if signal n ended it.
        sent_bytes: Bytes that the machine sent (so that its port on the switch received), in Ethernet frames with their
            headers. If ranks share a machine, the first has its counts and the others have zeros, so that sums are
            right. A TCP super-packet of up to 64 KiB counts as one packet with one set of headers, so for large
            messages this is within about 1 % of the payload.
        received_bytes: Bytes that reached the machine.
        sent_packets, received_packets: The same in packets.
    """

    rank: int
    exit_code: int
    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


@dataclass(frozen=True)
class LabReport:
    """Outcome of :func:`run`.

    Attributes:
        seconds: From the start of the ranks to the end of the last one.
        exit_code: 0, or that of the first rank that failed (which ended the others), or 124 after a time-out.
        ranks: One report per rank, in order.
    """

    seconds: float
    exit_code: int
    ranks: list[RankReport]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, under the names of the fields."""
        return asdict(self)


def run(
    config: LabConfig,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    on_end: Callable[[LabReport], object] | None = None,
) -> LabReport:
    """Run ``command`` once per rank, each behind its own link, until all ranks have ended.

    Ranks see torchrun's environment variables (:func:`rank_environment`), an empty standard input, the current
    directory, no network but the lab's, and an equal share of this machine's cores (at least one, which several share
    when there are more ranks than cores). Their output is passed on line by line after ``[rank N] ``, and untouched
    when there is one rank only.

    When a rank fails, the others get SIGTERM, and SIGKILL after ``config.grace_s``; so do all after
    ``config.timeout_s``. On SIGINT or SIGTERM (in the main thread) the ranks get that signal first; once they are gone
    it takes its usual course here, so Ctrl-C raises KeyboardInterrupt. A second one kills the ranks at once. Whatever
    ends this process, SIGKILL included, no process, namespace or link of the lab is left.

    Args:
        config: The lab.
        command: Program and arguments, started without a shell.
        env: Variables laid over this process's and the lab's own.
        stdout, stderr: Where the ranks' output goes, as in :func:`subprocess.run` but for PIPE; None is this process's.
        on_end: Called with the report when all ranks have ended, also after one signal: before that takes its course.

    Raises:
        ValueError: ``command`` is empty or its program does not exist.
        UnsupportedError: labs cannot run here; says what is missing, as :func:`requirements` does.

    Example:
        >>> report = run(LabConfig(nodes=2, rate="100mbit"), ["python", "train.py"])  # doctest: +SKIP
    """
    if isinstance(command, (str, bytes)):
        raise TypeError(f"command is {command!r}; expected a list of arguments, e.g. ['python', 'train.py']")
    command = [os.fspath(argument) for argument in command]
    if not command:
        raise ValueError("command is empty; expected a program and its arguments, e.g. ['python', 'train.py']")
    overrides = {str(name): str(value) for name, value in (env or {}).items()}
    base = _base_environment() | overrides
    if shutil.which(command[0], path=base.get("PATH")) is None:
        advice = f"write python {command[0]}" if command[0].endswith(".py") else "give its path or correct PATH"
        raise ValueError(f"command {command[0]!r} was not found or is not executable; {advice}")
    rank_env = [rank_environment(config, rank) | overrides for rank in range(config.ranks)]

    def ended(reply: dict[str, Any]) -> None:
        if on_end is not None and "problems" not in reply:
            on_end(_report_of(reply, config))

    reply = _supervise(config, command, base, rank_env, stdout, stderr, ended=ended)
    if "problems" in reply:
        raise UnsupportedError("\n".join(reply["problems"]))
    return _report_of(reply, config)


def _report_of(reply: dict[str, Any], config: LabConfig) -> LabReport:
    ranks = []
    for rank, code in enumerate(reply["exit_codes"]):
        counts = reply["counters"][rank // config.per_node]
        if rank % config.per_node:
            counts = dict.fromkeys(counts, 0)
        ranks.append(RankReport(rank=rank, exit_code=code, **counts))
    return LabReport(seconds=reply["seconds"], exit_code=reply["exit_code"], ranks=ranks)


def requirements(config: LabConfig) -> list[str]:
    """Return what this machine lacks for this lab, one sentence each, with the way to get it; empty if it can run.

    This is tried rather than guessed: one rank's namespaces and links are created, and removed before this returns.
    """
    problems: list[str] = _supervise(config, None, {}, [], None, None, nodes=1).get("problems", [])
    return problems


def rank_environment(config: LabConfig, rank: int) -> dict[str, str]:
    """Return the environment variables of torchrun, of the network card to use, and of the link in words, for a rank.

    >>> rank_environment(LabConfig(nodes=2), 1)["MASTER_ADDR"]
    '10.213.0.1'
    """
    node, local = divmod(rank, config.per_node)
    variables = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(config.per_node), "ROLE_NAME": "default"}
    variables |= dict.fromkeys(("RANK", "ROLE_RANK"), str(rank))
    variables |= dict.fromkeys(("NODE_RANK", "GROUP_RANK"), str(node))
    variables |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(config.ranks))
    variables |= {"GROUP_WORLD_SIZE": str(config.nodes)}
    variables |= {"MASTER_ADDR": supervisor.node_address(0), "MASTER_PORT": str(_MASTER_PORT)}
    # Without these variables, gloo, NCCL and TensorPipe guess the card, from the host name or the first that is up.
    variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), supervisor.INTERFACE)
    # A rank's records state the links that it had (report/record.py).
    links = {name: getattr(config, name) for name in ("rate", "up", "down", "delay", "loss")}
    variables["NARROWBAND_LAB"] = " ".join(f"{name}={value}" for name, value in links.items() if value) or "unshaped"
    return variables


def _base_environment() -> dict[str, str]:
    """Return this process's variables, adapted to ranks: one compute thread by default, and unbuffered output.
    The variables of an outer torchrun are dropped, because they would send ranks to a store that they cannot reach.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | inherited


def _supervise(
    config: LabConfig,
    command: list[str] | None,
    env: dict[str, str],
    rank_env: list[dict[str, str]],
    stdout: int | IO[Any] | None,
    stderr: int | IO[Any] | None,
    nodes: int | None = None,
    ended: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run a supervisor to its end and return its reply. ``ended`` gets it first, before a signal that was relayed takes
    its course.

    What it created is gone when this returns, or soon after this raises.
    """
    if sys.platform != "linux":
        return {"problems": [f"The lab needs Linux's network namespaces; this is {sys.platform}."]}
    if importlib.util.find_spec("pyroute2") is None:
        return {"problems": ["The package pyroute2 is missing: `pip install pyroute2`."]}
    spec = supervisor.Spec(
        runner_pid=os.getpid(),
        nodes=nodes or config.nodes,
        per_node=config.per_node,
        mtu=config.mtu,
        links=config.links()[:nodes],
        command=command,
        env=env,
        rank_env=rank_env,
        timeout_s=config.timeout_s,
        grace_s=config.grace_s,
    )
    ours, theirs = socket.socketpair()
    sys.stdout.flush()  # so that earlier output comes before that of the ranks
    with ours, _relayed_signals() as relay_to:
        with theirs, _blocked_signals():
            # A session of its own: the terminal's Ctrl-C reaches this process only, which then ends the ranks in order.
            process = subprocess.Popen(
                [sys.executable, supervisor.__file__],
                stdin=theirs.fileno(),
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            relay_to(process)
            with suppress(BrokenPipeError):
                ours.sendall(spec.to_json())
            with ours.makefile("rb") as replies:
                line = replies.readline()
        except BaseException:
            process.kill()
            raise
        finally:
            exit_code = process.wait()
        reply: dict[str, Any] = json.loads(line) if line else {}
        if reply and ended is not None:
            ended(reply)
    if not line:
        raise RuntimeError(f"the lab's supervisor process ended with exit code {exit_code} and without a report")
    return reply


@contextmanager
def _relayed_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Relay SIGINT and SIGTERM to the process that is given to the yielded function; a second signal kills it.

    On exit, the first signal takes its usual effect in this process. Python handles signals in the main thread only, so
    in other threads nothing is relayed.
    """
    received: list[int] = []
    target: list[subprocess.Popen[bytes]] = []

    def relay(number: int, _: FrameType | None) -> None:
        received.append(number)
        if target:
            target[0].send_signal(number if len(received) == 1 else signal.SIGKILL)

    def relay_to(process: subprocess.Popen[bytes]) -> None:
        target.append(process)
        if received:
            process.send_signal(received[0])

    numbers = _STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    ours = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, relay) for number in ours}
    try:
        yield relay_to
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the stop signals while the supervisor starts: it inherits the mask, and unblocks them when it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
