"""Compare loops that are interrupted with the same loops that are not.

What a loop is, a module says, such as ``tests.gradients.interrupting``. It has ``STEPS``, a number of steps, and a
class ``Loop``. ``Loop(seed, interrupted=...)`` makes the same loop each time, and interrupts it (True), does not
(False), or only reads its state after every step (``"saves"``). It has these methods:

- ``step()``, and between two steps ``interrupt()``;
- ``bits()`` after each step, and ``state()`` at the end: name → tensor, of what must be equal in all three;
- ``in_common()``: name → tensor, of what must be equal on all ranks after each step;
- ``close()``; and ``str(loop)`` says what was drawn.
"""

from __future__ import annotations

import importlib
import logging
import warnings

import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks

__all__ = ["broken", "differences", "leaves", "main", "problems"]


def problems(rank, world_size, where, seeds):
    """Seed → what does not hold on this rank, if anything does not, of the loops of a module."""
    module = importlib.import_module(where)
    found, logger = {}, logging.getLogger("narrowband")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        for seed in seeds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if wrong := _problem(module, seed, world_size):
                    found[seed] = wrong
    finally:
        logger.setLevel(level)  # of a process that later tests use, too
    return found


def _problem(module, seed, world_size):
    found = []  # not raised or returned at once, since other ranks go on
    whole, _ = _run(module, seed, world_size, interrupted=False)
    for how in ("saves", True):
        again, said = _run(module, seed, world_size, interrupted=how)
        for at, (a, b) in enumerate(zip(whole, again, strict=True)):
            if isinstance(b, str):
                found.append(f"{said}: {how}: {b}")
            elif names := differences(a, b):
                found.append(f"{said}: {how}: step {at} of {module.STEPS} differs in {names[:6]}")
    return found[0] if found else ""


def _run(module, seed, world_size, *, interrupted):
    """The bits after each step, and the state at the end, or what differs between ranks; and the loop in words."""
    loop, trace = module.Loop(seed, interrupted=interrupted), []
    for at in range(module.STEPS):
        if at:
            loop.interrupt()
        loop.step()
        trace.append(loop.bits())
        if interrupted == "saves":
            loop.state()
            of_all = [None] * world_size
            dist.all_gather_object(of_all, loop.in_common())
            if names := [name for other in of_all[1:] for name in differences(of_all[0], other)]:
                trace[-1] = f"replicas part at step {at} of {module.STEPS} in {names[:6]}"
    trace.append(loop.state())
    loop.close()
    return trace, str(loop)


def differences(a, b):
    """The names of what differs in two dictionaries of tensors, in which NaN equals NaN."""
    return [
        name
        for name in sorted(a.keys() | b.keys())
        if name not in a or name not in b or not torch.equal(a[name].nan_to_num(7.0), b[name].nan_to_num(7.0))
    ]


def leaves(value, name=""):
    """Name → tensor, of all numbers, texts and tensors in nested dictionaries and lists."""
    if torch.is_tensor(value):
        return {name: value.detach().clone()}
    if isinstance(value, dict):
        return {k: x for key, own in value.items() for k, x in leaves(own, f"{name}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: x for at, own in enumerate(value) for k, x in leaves(own, f"{name}/{at}").items()}
    return {name: torch.tensor([*repr(value).encode()], dtype=torch.uint8)}


def broken(where, seeds, size=2):
    """Seed → what does not hold on any of so many ranks, of the loops of a module."""
    seeds, found = list(seeds), {}
    try:
        for each in run_ranks(problems, size, where, seeds, timeout_s=60.0 + 15.0 * len(seeds), grace_s=2.0):
            found |= each
    except RankError as error:
        if len(seeds) == 1:
            return {seeds[0]: str(error)}
        for seed in seeds:  # one by one, to find out which it was
            found |= broken(where, [seed], size)
    return found


def main(where, begin, end, size="2"):
    """Run the seeds of a command line, and print what does not hold."""
    begin, end, count = int(begin), int(end), 0
    for first in range(begin, end, 10):
        for seed, text in broken(where, range(first, min(first + 10, end)), int(size)).items():
            count += 1
            print(seed, text, sep="\n    ", flush=True)
    print(f"{count} of {end - begin} are broken")
