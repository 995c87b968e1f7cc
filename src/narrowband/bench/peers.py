"""Measure how much training goes on while a script kills, freezes and restarts peers, with rounds of real processes.

Peers are processes on this machine. The compute of a step is a wait of fixed length, as if each peer had a machine of
its own, so that the measurement shows the cost of the disturbances, and not how processes share cores. Everything else
is real: a model, its optimizer, exchanges, the store.

The same run is measured twice, undisturbed and disturbed, and compared by *goodput*: the optimizer steps of all peers
that the rounds took in, per second. A dead peer takes no steps, which no protocol can prevent. So the goodput of peers
*present* leaves out each peer's share of the time in which it was dead or frozen.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowband.bench.loopback import rank_context
from narrowband.bench.ranks import check_seed
from narrowband.feedback import compression
from narrowband.updates import ElasticUpdateCompression, Rendezvous, compress_updates
from narrowband.updates.rendezvous import RendezvousError
from narrowband.updates.stores import serve

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

__all__ = ["Config", "run"]

#: Sizes of the model: one matrix from width to hidden, and one back.
_WIDTH, _HIDDEN = 256, 1024

#: A peer that reports nothing for this many seconds has hung.
_SILENCE_S = 300.0


@dataclass(frozen=True)
class Config:
    """What to do.

    Attributes:
        peers: Processes at the beginning.
        rounds: How many rounds the run has.
        every: Steps of a round.
        step_s: Seconds of computing in a step.
        spec: What updates are compressed with.
        kill: Round in which one peer is killed; 0: none is.
        rejoin: Round in which a new process takes its place.
        freeze: Round in which another peer is stopped; 0: none is.
        freeze_s: Seconds for which it is.
        grace_s: Seconds that a round waits for peers of the round before.
        exchange_s: Seconds after which an exchange breaks off.
        seed: Seed of data and parameters.
    """

    peers: int = 4
    rounds: int = 200
    every: int = 20
    step_s: float = 0.1
    spec: str = "topk:density=0.01+ef"
    kill: int = 40
    rejoin: int = 60
    freeze: int = 80
    freeze_s: float = 60.0
    grace_s: float = 1.0
    exchange_s: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("peers", 2), ("rounds", 2), ("every", 1), ("kill", 0), ("freeze", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.freeze and self.peers < 3:
            raise ValueError(
                f"peers={self.peers} must be at least 3: one is killed, another is frozen, and one has to be left"
            )
        for name in ("step_s", "freeze_s", "grace_s", "exchange_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of seconds, 0 or more")
        if self.kill and not 1 < self.kill < self.rejoin < self.rounds:
            raise ValueError(
                f"kill={self.kill}, rejoin={self.rejoin} and rounds={self.rounds} must ascend, from kill=2 on; kill=0 "
                "kills no peer"
            )
        if self.freeze and not 1 < self.freeze < self.rounds:
            raise ValueError(f"freeze={self.freeze} must be 2 to {self.rounds - 1}, or 0 to freeze no peer")
        check_seed(self.seed)
        compression(self.spec)


def run(
    config: Config,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    known: Iterable[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Do the undisturbed run, and then the disturbed one; yield a row of each when it is done.

    A row has ``name``, ``rounds`` and

    * ``seconds``: from the end of the first round to that of the last; ``steps``: steps of all peers that the rounds
      after the first took in; ``goodput``: steps per second;
    * ``absent_s``: seconds for which peers were dead or frozen, added up over peers;
    * ``slowest_s``: the longest time from one round to the next; a round ends when the first peer has applied it;
    * ``equal``: whether all peers had the same bits after every round;
    * ``back``: number of rounds in which the killed and the frozen peer took part after their return; 0 if the others
      had done all rounds by then;
    * ``share``, of the second row: its goodput over the first one's; ``share_present``: the same for peers present.

    Args:
        config: what to do.
        on_event: called with ``{"name": …, "round": …, "of": …}`` as rounds go by.
        known: rows that an earlier run finished. Their runs are not done again.

    Raises:
        RuntimeError: a peer failed, or all hung.
    """
    there = {row["name"]: row for row in known}

    def row(name: str, *, disturbed: bool) -> dict[str, Any]:
        if name in there:
            return there[name]
        return {"name": name, **_Run(config, disturbed, lambda event: on_event({"name": name, **event})).result()}

    plain = row("undisturbed", disturbed=False)
    yield plain
    torn = row("disturbed", disturbed=True)
    torn["share"] = torn["goodput"] / plain["goodput"]
    present = 1.0 - torn["absent_s"] / (config.peers * torn["seconds"])
    torn["share_present"] = torn["share"] / present
    yield torn


class _Run:
    """One run: starts peers, disturbs them, and receives their events."""

    def __init__(self, config: Config, disturbed: bool, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._config, self._disturbed, self._on_event = config, disturbed, on_event
        self._context = rank_context()
        self._store = serve(0, "127.0.0.1")
        self._peers: dict[str, tuple[BaseProcess, Connection]] = {}
        self._digests: dict[int, set[str]] = {}
        self._taken: dict[int, int] = {}  # round → steps of the peers that took part
        self._first: dict[int, float] = {}  # round → time at which the first peer had applied it
        self._took_part: dict[str, list[int]] = {}
        self._refused: dict[str, str] = {}  # peer → what the rendezvous told it
        self._absent_s = 0.0

    def result(self) -> dict[str, Any]:
        config = self._config
        try:
            for number in range(config.peers):
                self._start(str(number))
            self._listen()
        finally:
            for process, pipe in self._peers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signal.SIGCONT)
                process.kill()
                process.join()
                pipe.close()
        times = [self._first[number] for number in sorted(self._first)]
        seconds = times[-1] - times[0]
        steps = sum(steps for number, steps in self._taken.items() if number > 1)
        return {
            "rounds": max(self._first),
            "steps": steps,
            "seconds": seconds,
            "goodput": steps / seconds,
            "absent_s": self._absent_s,
            "slowest_s": max(b - a for a, b in itertools.pairwise(times)),
            "equal": all(len(digests) == 1 for digests in self._digests.values()),
            "back": {name: len(rounds) for name, rounds in self._took_part.items() if name in ("again", "1")},
        }

    def _start(self, name: str) -> None:
        ours, theirs = self._context.Pipe()
        told = asdict(self._config) | {"address": f"127.0.0.1:{self._store.port}", "name": name}
        process = self._context.Process(target=_peer, args=(told, theirs), daemon=True)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        self._peers[name] = process, ours

    def _listen(self) -> None:
        """Receive events until all peers are done."""
        config, waiting = self._config, dict(self._peers)
        killed_at = frozen_at = None
        due = {"kill": config.kill, "rejoin": config.rejoin, "freeze": config.freeze} if self._disturbed else {}
        while waiting:
            ready = connection.wait([pipe for _, pipe in waiting.values()], timeout=0.2)
            now = time.monotonic()
            if self._first and now - max(self._first.values()) > _SILENCE_S:
                raise RuntimeError(
                    f"no round was completed for {_SILENCE_S:g} s after round {max(self._first)}: the run hangs"
                )
            for name, (_, pipe) in list(waiting.items()):
                if pipe not in ready:
                    continue
                try:
                    event = pipe.recv()
                except EOFError:
                    del waiting[name]
                    if killed_at is None or name != "0":
                        raise RuntimeError(f"peer {name} ended early") from None
                    continue
                if event is None:
                    del waiting[name]
                elif "error" in event:
                    del waiting[name]
                    self._refused[name] = event["error"]
                else:
                    self._note(name, event)
            latest = max(self._first, default=0)
            if due.get("kill") and latest >= due["kill"]:
                del due["kill"]
                killed_at = now
                self._peers["0"][0].kill()
            if "kill" not in due and due.get("rejoin") and latest >= due["rejoin"]:
                del due["rejoin"]
                self._absent_s += now - (killed_at or now)
                self._start("again")
                self._took_part["again"] = []
                waiting["again"] = self._peers["again"]
            if due.get("freeze") and latest >= due["freeze"]:
                del due["freeze"]
                frozen_at = now
                os.kill(self._peers["1"][0].pid or 0, signal.SIGSTOP)
            if frozen_at is not None and now - frozen_at > config.freeze_s:
                os.kill(self._peers["1"][0].pid or 0, signal.SIGCONT)
                self._absent_s += now - frozen_at
                frozen_at = None
                self._took_part["1"] = []
        # A peer that comes, or comes back, when the others have done all rounds finds that the run is over.
        if self._refused and max(self._first, default=0) < config.rounds:
            name, said = next(iter(self._refused.items()))
            raise RuntimeError(f"peer {name} ended early: {said}")

    def _note(self, name: str, event: dict[str, Any]) -> None:
        """Record that a peer has applied a round."""
        number = event["round"]
        if number not in self._first:
            self._first[number] = time.monotonic()
            self._on_event({"round": number, "of": self._config.rounds})
        self._digests.setdefault(number, set()).add(event["digest"])
        self._taken[number] = self._taken.get(number, 0) + event["steps"]
        self._took_part.setdefault(name, []).append(number)


def _peer(told: dict[str, Any], pipe: Connection) -> None:
    """Run one peer, from its start to the last round."""
    with contextlib.suppress(BrokenPipeError):
        try:
            _train(told, pipe.send)
        except RendezvousError as error:
            pipe.send({"error": str(error)})


def _train(told: dict[str, Any], send: Callable[[dict[str, Any] | None], None]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(told["seed"])
    model = nn.Sequential(nn.Linear(_WIDTH, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(told["name"].encode()).digest()[:4], "big"))
    peers = Rendezvous(
        told["address"],
        least=1,
        grace_s=told["grace_s"],
        exchange_s=told["exchange_s"],
        begin_with=told["peers"],
        name=told["name"],
    )
    handle = compress_updates(model, optimizer, told["spec"], every=told["every"], outer="auto", peers=peers)
    assert isinstance(handle, ElasticUpdateCompression)
    send({"round": handle.rounds, "digest": _digest(model), "steps": 0})
    steps = 0
    while handle.rounds < told["rounds"]:
        x = torch.randn(8, _WIDTH, generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(x), x.roll(1, 1)))
        time.sleep(told["step_s"])
        before = handle.rounds
        optimizer.step()
        steps += 1
        if handle.rounds != before:
            send({"round": handle.rounds, "digest": _digest(model), "steps": steps})
            steps = 0
    send(None)
    handle.remove()


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    return digest.hexdigest()[:16]
