"""One peer of a schedule, in a process of its own: it trains, does to itself what it is told, and reports.

It reports what it brings to each round before it votes, so that the update of a peer that is killed after its vote is
known. It waits for an answer after each round, and learns there what happens to it in the next.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import narrowband as nb
from narrowband.updates import rendezvous, stores
from narrowband.updates.elastic import ElasticUpdateCompression
from tests.updates.training import nesterov

__all__ = ["live", "serve_by_command"]

#: The files of which lines are counted.
_ROUNDS = tuple(
    f"updates/{name}.py" for name in ("elastic", "newcomers", "connections", "rendezvous", "rounds", "fragments")
)

#: Nobody gives up before this, and no schedule takes as long.
PATIENCE_S = 300.0


def serve_by_command(pipe):
    """Serve a store as ``narrowband rendezvous`` does, and report where."""
    from rich.console import Console

    from narrowband.cli.rendezvous import Rendezvous

    class Said:
        def write(self, text):
            if "peers meet at" in text:
                pipe.send(text.split("peers meet at ")[1].split(" ")[0])

        def flush(self):
            """Nothing is kept back."""

    Rendezvous(port=0, host="127.0.0.1")(Console(file=Said()))


def model_of(s, slot):
    torch.manual_seed(slot)
    inside = [nn.BatchNorm1d(20)] if s["buffers"] else []
    return nn.Sequential(nn.Linear(12, 20), *inside, nn.Tanh(), nn.Linear(20, 6), nn.Linear(6, 4))


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Peer:
    """One life of a slot's peer.

    Args:
        s: the schedule.
        slot: its slot.
        life: how many peers were in it before.
        pipe: to the conductor.
        rules: where and how peers meet.
        folder: of checkpoints; None: none are written.
        resumes: the round of the checkpoint from which it goes on; None: it begins.
        killed_at: the line of the set-up at which it is killed; 0: it is not.
    """

    def __init__(self, s, slot, life, pipe, rules, folder, resumes, killed_at):
        self.s, self.slot, self.pipe, self.folder = s, slot, pipe, folder
        self.event, self.timer, self.done, self.leaves, self.missed = None, None, False, False, False
        self.one_at_a_time = threading.RLock()
        self.quiet = True  # whether Ctrl-C comes later, since the pipe is in use
        signal.signal(signal.SIGINT, self.hear)
        self.dice = torch.Generator().manual_seed(1000 * s["seed"] + 10 * slot + life)
        torch.manual_seed(99)
        self.teacher = nn.Linear(12, 4)
        self.model = model_of(s, slot)
        kinds = {"adamw": lambda p: torch.optim.AdamW(p, lr=5e-3), "momentum": lambda p: torch.optim.SGD(p, 0.02, 0.9)}
        self.optimizer = kinds[s["optimizer"]](self.model.parameters())
        self.handle, self.base, self.own_weight, self.turn = None, None, 0.0, 0
        # Hooks of the handle come after these, and so see the same as they do.
        self.optimizer.register_step_pre_hook(self.before_step)
        self.optimizer.register_step_post_hook(self.after_step)
        self.watch()
        if killed_at:
            self.event = ("kill", "line", killed_at)
            self.trace()
        self.handle = nb.compress_updates(
            self.model, self.optimizer, s["spec"], every=every_of(s), outer=outer_of(s), weigh=s["weigh"],
            residuals=s["residuals"], min_numel=50, peers=rules, collective=s["collective"],
        )  # fmt: skip
        sys.settrace(None)
        self.event = None
        if resumes is not None:
            states = pickle.loads(Path(folder, f"{slot}-{resumes}").read_bytes())
            self.model.load_state_dict(states[0])
            self.optimizer.load_state_dict(states[1])
            self.handle.load_state_dict(states[2])
            self.handle._meeting._rules = replace(rules, least=s["least"])

    # ---- what it brings ----------------------------------------------------------------------------------------------

    def before_step(self, *_):
        if not self.handle._whole.anchored:
            self.base = flat(self.model)

    def after_step(self, *_):
        self.update = flat(self.model).double() - self.base.double()

    def residual(self, handle):
        """All residuals, as one tensor, with the errors of means that this peer encodes for all."""
        kept = {}
        for state in handle.layers.states.values():
            for name, x in type(state).moved(state.state_dict(), handle.size).items():
                kept[name.removeprefix("residual/")] = x.reshape(-1).float().clone()
        return torch.cat([kept.get(name, torch.zeros(p.numel())) for name, p in self.model.named_parameters()])

    def watch(self):
        """Report what is brought to each exchange, before the vote, and each outcome."""
        exchange, vote = ElasticUpdateCompression._exchange, rendezvous.Meeting.vote
        brought = {}

        def exchanged(handle, fragments, **options):
            residual = self.residual(handle)
            exchange(handle, fragments, **options)
            brought.update(before=residual, after=self.residual(handle))

        def voted(meeting, view, *, good, **options):
            own = view.entries[view.rank]
            if good:
                self.send(
                    "brings", view.turn, view.round, [(entry.peer, entry.weight) for entry in view.entries], own.peer,
                    brought | {"weight": self.own_weight, "update": self.update if own.weight else None},
                )  # fmt: skip
            brought.clear()
            committed = vote(meeting, view, good=good, **options)
            self.send("outcome", view.turn, committed)
            if committed:
                self.turn = view.turn
            return committed

        ElasticUpdateCompression._exchange, rendezvous.Meeting.vote = exchanged, voted

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def hear(self, *_):
        if self.quiet:
            self.missed = True
            return
        self.done = self.leaves
        raise KeyboardInterrupt

    def send(self, *message):
        before, self.quiet = self.quiet, True
        try:
            self.pipe.send_bytes(pickle.dumps(message))
        finally:
            self.quiet = before
        self.catch_up()

    def catch_up(self):
        if self.missed and not self.quiet:
            self.missed = False
            self.hear()

    def happen(self):
        """Do now what was to come."""
        with self.one_at_a_time:
            if self.event is None:
                return
            what, self.event = self.event[0], None
            self.leaves = what == "leave"
            names = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
            os.kill(os.getpid(), names.get(what, signal.SIGINT))

    def trace(self):
        passed = set()

        def traced(frame, event, _):
            code = frame.f_code
            if self.event is None or not code.co_filename.endswith(_ROUNDS):
                return None
            if event == "line" and (line := (code.co_filename, frame.f_lineno)) not in passed:
                passed.add(line)
                if len(passed) == self.event[2]:
                    self.happen()
            return traced

        sys.settrace(traced)

    def arm(self):
        if self.event is None:
            return
        if self.event[1] == "training":
            self.happen()
        elif self.event[1] == "line":
            self.trace()
        elif self.timer is None:
            self.timer = threading.Timer(self.event[2] / 1000, self.happen)
            self.timer.daemon = True
            self.timer.start()

    # ---- its life ----------------------------------------------------------------------------------------------------

    def train(self):
        told = True
        while told and not self.done:
            with self.one_at_a_time:
                self.event = None  # what has not happened by now does not happen
            self.report()
            told, self.event = pickle.loads(self.pipe.recv_bytes())
            self.timer = None
            held = False
            while told and not (held or self.done):
                try:
                    self.quiet = False
                    held = self.step()
                    self.quiet = True
                except KeyboardInterrupt:
                    self.quiet = True
                    self.send("interrupted")
                    self.own_weight = (
                        self.handle._weight.counted if self.s["weigh"] != "steps" else float(self.handle.steps)
                    )
                sys.settrace(None)
        self.send("last", self.handle.rounds, flat(self.model), self.done)
        self.handle.remove()

    def step(self):
        """Take a step, and return whether a round was held."""
        self.catch_up()
        x = torch.randn(8, 12, generator=self.dice)
        self.optimizer.zero_grad()
        (self.model(x) - self.teacher(x)).square().mean().backward()
        self.arm()
        rounds = self.handle.rounds
        number = 1.0
        if self.s["weigh"] != "steps":
            number = float(torch.randint(0, 4, (), generator=self.dice))
            self.handle.count(number)
        self.own_weight += number
        self.optimizer.step()
        held = self.handle.rounds > rounds
        if held:
            self.own_weight = 0.0
        return held

    def report(self):
        handle = self.handle
        if self.folder is not None:
            states = pickle.dumps((self.model.state_dict(), self.optimizer.state_dict(), handle.state_dict()))
            path = Path(self.folder, f"{self.slot}-{handle.rounds}")
            path.with_suffix(".new").write_bytes(states)
            path.with_suffix(".new").rename(path)
        with torch.no_grad():
            x = torch.randn(256, 12, generator=torch.Generator().manual_seed(5))
            self.model.eval()
            loss = float((self.model(x) - self.teacher(x)).square().mean())
            self.model.train()
        averaged = [b.double().reshape(-1) for b in self.model.buffers() if b.is_floating_point()]
        buffers = torch.cat(averaged) if averaged else torch.zeros(0)
        peers = [peer.rpartition("-")[0] for peer in handle.peers]
        self.send("round", handle.rounds, self.turn, peers, flat(self.model), buffers, handle.length, loss)


def every_of(s):
    return "0.05s" if s["every"] == "50ms" else s["every"]


def outer_of(s):
    return nesterov if s["outer"] == "nesterov" else s["outer"]


def live(pipe, stacks, s, slot, life, address, folder, resumes, rules, killed_at):
    """A peer's life. ``address`` is where peers meet; None: this peer serves the store, and reports where."""
    faulthandler.enable(stacks := open(stacks, "a"))  # noqa: SIM115  stays open for the fault handler
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    held = None
    try:
        if address is None:
            held = stores.serve(0, "127.0.0.1")
            address = f"127.0.0.1:{held.port}"
            pipe.send(address)
        peers = nb.Rendezvous(
            address,
            grace_s=s["grace_s"],
            exchange_s=s["exchange_s"],
            patience_s=PATIENCE_S,
            name=f"{slot}.{life}",
            **rules,
        )
        peer = Peer(s, slot, life, pipe, peers, folder, resumes, killed_at)
        try:
            peer.train()
        except rendezvous.RendezvousError:
            pipe.send_bytes(pickle.dumps(("cut off", peer.handle.rounds, flat(peer.model), traceback.format_exc())))
            return
        pipe.send_bytes(pickle.dumps(("left",)))
        if held is not None:
            pipe.recv_bytes()  # the store outlives all peers
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))


def _die_with_parent():
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)
