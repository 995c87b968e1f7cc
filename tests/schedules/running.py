"""The conductor: it starts the peers of a schedule, tells them what happens to them, and gathers what they report.

No clock decides. Peers may be late whenever the machine is busy, and are left out of rounds then; what is checked holds
all the same. The last round is the first one, after all that was to happen, in which everybody takes part.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from tests.schedules.invariants import Ledger
from tests.schedules.peer import live, serve_by_command

__all__ = ["problems_of"]

_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])

#: Seconds of a look at the pipes, and how many looks in a row may find nothing. Looks, not seconds: on a machine that
#: stands still the peers lose the same time. Peers themselves wait for 40 seconds, if a peer dies as they connect.
LOOK_S, LOOKS = 0.05, 2400
#: Looks without a sign of anybody after which peers that are frozen go on.
THAW = (8, 40, 160)


@dataclass(eq=False)
class Life:
    """A peer, from its start to its end."""

    slot: int
    number: int
    process: Any
    pipe: Any
    stacks: Path
    rounds: int = 0
    asks: bool = False  # whether it waits for an answer
    peers: list[str] = field(default_factory=list)
    frozen_at: int | None = None  # the last round of the run when it froze
    freezes: bool = False
    dies: bool = False
    interrupted: bool = False  # since its last report, so that the next may be of a later round than the others'
    ended: str = ""

    @property
    def name(self):
        return f"{self.slot}.{self.number}"


class Conductor:
    """One run of a schedule."""

    def __init__(self, s):
        self.s, self.ledger = s, Ledger(s)
        self.folder = Path(tempfile.mkdtemp(prefix="narrowband-schedules-"))
        self.events = list(s["events"])
        self.lives, self.all = {}, []
        self.last = 0  # the latest round that a peer has reported
        self.silent = 0
        self.store = self.store_pipe = None
        self.address = ""
        self.stopping = self.lost = self.store_is_dead = False

    # ---- processes ---------------------------------------------------------------------------------------------------

    def serve(self):
        if self.s["serves"] == "command":
            self.store_pipe, theirs = _context.Pipe()
            self.store = _context.Process(target=serve_by_command, args=(theirs,), daemon=True)
            self.store.start()
            theirs.close()
            self.address = self.store_pipe.recv()
        else:
            self.address = None  # slot 0 serves it

    def start(self, slot, *, resumes=None, killed_at=0, **rules):
        number = sum(each.slot == slot for each in self.all)
        ours, theirs = _context.Pipe()
        stacks = self.folder / f"stacks-{slot}-{number}"
        keeps = any(what == "store" for what, *_ in self.s["events"])
        arguments = (
            theirs, str(stacks), self.s, slot, number, self.address, str(self.folder) if keeps else None, resumes,
            {"least": self.s["least"], **rules}, killed_at,
        )  # fmt: skip
        process = _context.Process(target=live, args=arguments, daemon=True)
        process.start()
        theirs.close()
        if self.address is None:
            self.address = ours.recv()
        life = Life(slot, number, process, ours, stacks, dies=bool(killed_at))
        self.lives[slot] = life
        self.all.append(life)

    def end(self):
        for each in self.all:
            each.process.kill()
            each.process.join()
        if self.store is not None:
            self.store.kill()
            self.store.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self):
        try:
            self.serve()
            coming = {
                slot for what, slot, at, *_ in self.events if what == "come" and not self.is_there_before(slot, at)
            }
            first = [slot for slot in range(self.s["peers"]) if slot not in coming]
            for slot in first:
                self.start(slot, begin_with=max(len(first), self.s["least"]))
            while self.lives and not self.ledger.problems and not self.lost:
                self.look()
                self.go_on()
            if not self.ledger.problems and not self.lost:
                self.ledger.check()
        finally:
            self.end()
        return self.ledger.problems

    def is_there_before(self, slot, at):
        """Whether a slot had a peer that ended before the round in which one comes."""
        ends = ("kill", "leave")
        return any(what in ends and own == slot and earlier <= at for what, own, earlier, *_ in self.s["events"])

    def look(self):
        pipes = {each.pipe: each for each in self.lives.values()}
        ready = connection.wait(list(pipes), LOOK_S)
        self.silent = 0 if ready else self.silent + 1
        for pipe in ready:
            life = pipes[pipe]
            try:
                message = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                self.gone(life)
            else:
                getattr(self, "hear_" + message[0].replace(" ", "_"))(life, *message[1:])
        for life in self.lives.values():
            if life.freezes and life.frozen_at is None and _is_stopped(life.process.pid):
                life.frozen_at = self.last

    def go_on(self):
        """Let happen what is due."""
        waits = set()  # slots with an earlier event that is still to come
        for event in [each for each in self.events if each[2] <= self.last]:
            what, slot, _, where, number = event
            life = self.lives.get(slot)
            if what == "store":
                self.kill_the_store()
                return
            if slot in waits:
                continue
            if what == "come" and life is None:
                self.start(slot, killed_at=number if where == "set-up" else 0)
                self.events.remove(event)
            elif (what == "come" and not life.dies) or (what != "come" and life is None):
                self.events.remove(event)  # for another one than who is there
            else:
                waits.add(slot)
        thaw = THAW[self.s["seed"] % len(THAW)]
        for life in self.lives.values():
            if life.frozen_at is not None and (self.last >= life.frozen_at + 2 or self.silent >= thaw or self.stopping):
                life.frozen_at, life.freezes = None, False
                os.kill(life.process.pid, signal.SIGCONT)
                self.silent = 0
        if self.silent >= 200 and self.is_lost():
            self.lost = True
        elif self.silent >= LOOKS:
            self.ledger.problems.append(
                "peers wait for ever:\n" + "\n".join(self.stand(each) for each in self.lives.values())
            )
        self.answer()

    def is_over(self):
        """Whether all has happened that was to happen."""
        waits = any(each.freezes or each.dies for each in self.lives.values())
        return self.last >= self.s["rounds"] and not self.events and not waits

    def answer(self):
        asking = [each for each in self.lives.values() if each.asks]
        if self.is_over():
            together = [each for each in asking if sorted(each.peers) == sorted(x.name for x in self.lives.values())]
            if len(together) == len(self.lives) and len({each.rounds for each in together}) == 1:
                self.stopping = True
                for each in together:
                    self.tell(each, False, None)
                return
            lives = self.lives.values()
            asking = [each for each in asking if each not in together or not all(_awaits(each, x) for x in lives)]
        for each in asking:
            self.tell(each, True, self.event_for(each))

    def tell(self, life, goes_on, event):
        life.asks = False
        try:
            life.pipe.send_bytes(pickle.dumps((goes_on, event)))
        except OSError:
            self.gone(life)

    def event_for(self, life):
        if life.freezes or life.dies:
            return None
        for at, (what, slot, rounds, where, number) in enumerate(self.events):
            if slot == life.slot and rounds <= self.last:
                if what in ("come", "store"):
                    break
                del self.events[at]
                life.freezes, life.dies = what == "freeze", what in ("kill", "leave")
                return what, where, number
        return None

    def kill_the_store(self):
        """The store dies. All peers say so, and begin again from the last round of which all have checkpoints."""
        self.store_is_dead = True
        if self.s["serves"] == "command":
            self.store.kill()
            self.store.join()
        else:
            self.lives[0].process.kill()
        for life in self.lives.values():
            if life.process.is_alive() and _is_stopped(life.process.pid):
                os.kill(life.process.pid, signal.SIGCONT)
        before = [slot for slot, life in self.lives.items() if life.rounds]
        self.events = [event for event in self.events if event[0] != "store"]
        while self.lives and not self.ledger.problems:
            self.look()
            for each in self.lives.values():
                if each.asks:
                    self.tell(each, True, None)
            if self.silent >= LOOKS:
                self.ledger.problems.append(
                    "peers do not notice that the store died:\n" + "\n".join(map(self.stand, self.lives.values()))
                )
        saved = [{int(path.name.split("-")[1]) for path in self.folder.glob(f"{slot}-*[0-9]")} for slot in before]
        common = set.intersection(*saved)
        if not common:  # no checkpoint is of the same round on all
            self.lost = True
            return
        self.last = max(common)
        self.ledger.begin_again(self.last)
        self.store_is_dead = False
        self.serve()
        for slot in before:
            self.start(slot, resumes=self.last, begin_with=len(before), least=len(before))

    def is_lost(self):
        """Whether nobody has the parameters of the last round any more, so that the others wait for one to return."""
        there = self.ledger.last_peers()
        return bool(there) and not any(x.name in there and not x.interrupted for x in self.lives.values())

    def stand(self, life):
        """Where a peer stands."""
        for _ in range(100):
            if life.stacks.exists() and life.stacks.read_text():
                break
            if life.process.is_alive():
                os.kill(life.process.pid, signal.SIGUSR1)
            connection.wait([life.process.sentinel], LOOK_S)
        text = life.stacks.read_text() if life.stacks.exists() else ""
        return f"--- {life.name}, after round {life.rounds}{' (asks)' * life.asks} ---\n{text or '(no answer)'}"

    # ---- what peers say ----------------------------------------------------------------------------------------------

    def hear_brings(self, life, turn, number, peers, who, what):
        self.ledger.brings(turn, number, peers, who, what)

    def hear_outcome(self, life, turn, committed):
        self.ledger.outcome(turn, committed)

    def hear_round(self, life, rounds, turn, peers, parameters, buffers, length, loss):
        life.rounds, life.peers, life.asks = rounds, peers, True
        life.freezes = life.dies = False  # what has not happened by now does not happen
        life.frozen_at, life.interrupted = None, False
        self.last = max(self.last, rounds)
        self.ledger.after(life.name, rounds, turn, parameters, buffers, length, loss)

    def hear_interrupted(self, life):
        life.interrupted = True

    def hear_last(self, life, rounds, parameters, done):
        if self.stopping and not done:
            self.ledger.after(life.name, rounds, self.ledger.turns[rounds][1], parameters, *self.rest_of(rounds))

    def rest_of(self, rounds):
        return self.ledger.rounds[rounds][1][1], self.ledger.lengths[rounds], self.ledger.losses[rounds]

    def hear_left(self, life):
        life.ended = "left"
        if self.s["serves"] == "peer" and life.slot == 0:
            life.pipe.send_bytes(b"")

    def hear_cut_off(self, life, rounds, parameters, text):
        self.ledger.cut_off(life.name, rounds, parameters)
        life.ended = "cut off"
        if not self.store_is_dead and not self.is_lost():
            self.ledger.problems.append(f"{life.name} has no store any more, and it lives:\n{text}")

    def hear_error(self, life, text):
        if self.store_is_dead and "RendezvousError" in text:  # in its set-up
            life.ended = "cut off"
            return
        life.ended = "error"
        self.ledger.problems.append(f"{life.name} ended with an error:\n{text}")

    def gone(self, life):
        self.lives = {slot: each for slot, each in self.lives.items() if each is not life}
        life.process.join()
        serves = self.s["serves"] == "peer" and life.slot == 0
        if not (life.ended or life.dies or self.stopping or (serves and self.store_is_dead)):
            text = life.stacks.read_text(errors="replace") if life.stacks.exists() else ""
            self.ledger.problems.append(f"{life.name} died with exit code {life.process.exitcode}\n{text}")


def _awaits(life, other):
    """Whether another peer stands where this one does, or will report its round: it has not gone on from there, and was
    not interrupted in it.
    """
    return (other.asks and other.rounds == life.rounds) or (other.rounds < life.rounds and not other.interrupted)


def _is_stopped(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def problems_of(s):
    """What is wrong with a run of this schedule, or "" if nothing is."""
    return "\n".join(dict.fromkeys(Conductor(s).run()))
