"""Schedules: peers, their rounds, and what happens to them, drawn from a seed.

A schedule is written in one line, and read from it::

    >>> str(draw(7))  # doctest: +SKIP
    "seed=7 peers=3 spec=qsgd:bits=4+ef grace_s=1.0 exchange_s=4.0 events=(('kill',2,3,'line',41),)"

An event is (what, slot, round, where, number). A *slot* is a place for a peer: it dies or leaves, and another one may
come into it. The event happens to the slot's peer in its first round after ``round`` rounds of the run.

- ``kill``: SIGKILL. ``leave``: Ctrl-C, and the program removes the handle. ``interrupt``: Ctrl-C, and the program goes
  on. ``freeze``: SIGSTOP, until the others have held two more rounds, or can hold none.
- ``come``: a peer comes into an empty slot.
- ``store``: the process that serves the store is killed. All peers end, and begin again from their checkpoints.

And it happens there: in ``training``, between two rounds; at the ``number``-th of the ``line``\\ s of a round; or
``number`` ms ``after`` the step that begins a round, whatever the peer does then. ``set-up`` is as ``line``, in the
round that lets the peer in.
"""

from __future__ import annotations

import ast
import random
from typing import Any

__all__ = ["DEFAULTS", "Schedule", "draw"]

DEFAULTS: dict[str, Any] = {
    "spec": "none", "optimizer": "adamw", "outer": 1.0, "weigh": "steps", "every": 2, "residuals": "apart", "least": 1,
    "buffers": False, "serves": "command", "rounds": 8, "grace_s": 1.0, "exchange_s": 4.0, "events": (),
    "collective": "auto",
}  # fmt: skip

#: Option → values other than its default, one of which it may have.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "spec": ("topk:density=0.1+ef", "topk:density=0.1+ef", "qsgd:bits=4+ef", "qsgd:bits=4+ef",
             "powersgd:rank=2,min_ratio=1", "uniform:bits=4,group=64+ef:store=bf16", "sign+ef"),
    "optimizer": ("momentum",), "outer": ("nesterov", "auto", 0.7), "weigh": ("samples",), "every": (1, 3, "50ms"),
    "residuals": ("in-place",), "least": (2,), "buffers": (True,), "serves": ("peer",), "grace_s": (0.3, 3.0),
    "exchange_s": (2.0, 8.0), "collective": ("scatter_reduce",),
}  # fmt: skip

_OFTEN = {"spec": 0.75, "outer": 0.4}

WHERE = ("training", "line", "line", "line", "after", "after")


class Schedule(dict[str, Any]):
    """Option → value. An option that is not there has its default."""

    def __missing__(self, option: str) -> Any:
        return DEFAULTS[option]

    def __str__(self) -> str:
        return " ".join(f"{name}={str(value).replace(' ', '')}" for name, value in self.items())

    @classmethod
    def parse(cls, line: str) -> Schedule:
        """The schedule of a line."""
        return cls({name: _value(text) for name, text in (word.split("=", 1) for word in line.split())})


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word, or a spec
        return text


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    dice = random.Random(seed)
    s = Schedule(seed=seed, peers=dice.randint(3, 5))
    for option, values in OPTIONS.items():
        if dice.random() < _OFTEN.get(option, 0.25):
            s[option] = dice.choice(values)
    if s["residuals"] == "in-place" and ("+ef" not in s["spec"] or s["weigh"] != "steps"):
        del s["residuals"]
    if s["collective"] == "scatter_reduce" and not s["spec"].startswith(("qsgd", "uniform")):
        del s["collective"]
    s["events"] = _events(dice, s)
    return s


def _events(dice: random.Random, s: Schedule) -> tuple[tuple[str, int, int, str, int], ...]:
    """Draw what happens. Slot 0 stays, so that somebody has the parameters, and with ``least=2`` slot 1 does, too."""
    there = set(range(s["peers"] if dice.random() < 0.6 else s["peers"] - 1))
    late = set(range(s["peers"])) - there
    events: list[tuple[str, int, int, str, int]]
    events = [("come", slot, dice.randint(1, 4), *_set_up(dice)) for slot in late]
    stays = {0, 1} if s["least"] == 2 else {0}
    for at in sorted(dice.randint(1, s["rounds"] - 1) for _ in range(dice.randint(2, 5))):
        slot = dice.randrange(s["peers"])
        what = dice.choice(("kill", "kill", "leave", "interrupt", "interrupt", "freeze", "freeze"))
        if slot in stays and what in ("kill", "leave"):
            what = "freeze"
        where = dice.choice(WHERE)
        number = {"training": 0, "line": dice.randint(1, 190), "after": dice.choice((0, 2, 5, 10, 20, 40))}[where]
        events.append((what, slot, at, where, number))
        if what in ("kill", "leave") and dice.random() < 0.7:
            events.append(("come", slot, at + dice.randint(1, 2), *_set_up(dice)))
    if dice.random() < 0.15:
        events.append(("store", 0, dice.randint(3, s["rounds"] - 1), "training", 0))
    return tuple(sorted(events, key=lambda event: event[2]))


def _set_up(dice: random.Random) -> tuple[str, int]:
    """Where the peer that comes is killed, if it is: in half of the cases not at all."""
    return ("set-up", dice.randint(1, 260)) if dice.random() < 0.3 else ("training", 0)
