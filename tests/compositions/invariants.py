"""What holds for every composition, whatever it is made of.

1. After each step that makes ranks equal, they are: to the bit.
2. A step in which one rank's gradients are inf or NaN is one on all ranks, and changes no state of feedback.
3. Behind error feedback, what was delivered and what is still to come make up the sum of the means.
4. A run that stopped and went on with new objects ends as one that did not stop: to the bit.
5. The kernel has sent at least as many bytes as the handle says.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import logging
import traceback
import warnings

import torch
import torch.distributed as dist

from tests.compositions.averages import Gradients, Updates
from tests.compositions.coded import Coded
from tests.compositions.drawing import Composition
from tests.compositions.shards import Shards
from tests.compositions.stages import Stages
from tests.tcp import tcp_sent_nbytes

__all__ = ["BrokenError", "check_all"]

_TRAININGS = {"gradients": Gradients, "updates": Updates, "shards": Shards, "stages": Stages, "coded": Coded}

#: In units of the largest element of the sum of all means.
_ROUNDING = 2e-4


class BrokenError(AssertionError):
    """An invariant does not hold."""


def check_all(rank, size, lines):
    """Run some compositions, one after the other; for each, what is wrong on this rank, or "" if nothing is."""
    log = logging.getLogger("narrowband")
    before = log.level
    log.setLevel(logging.ERROR)  # much of this deserves a warning
    try:
        return [_outcome(Composition.parse(line), rank, size) for line in lines]
    finally:
        log.setLevel(before)


def _outcome(c, rank, size):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check(c, rank, size)
    except BrokenError as error:
        return f"BrokenError: {error}"
    except Exception:
        return traceback.format_exc()
    return ""


def _check(c, rank, size):
    gc.collect()  # connections of former groups, which would close in between
    training = _new(c, rank, size)
    saved, ends = None, []
    try:
        for at in range(c["steps"]):
            if at == c["save"]:
                saved = io.BytesIO()
                torch.save(training.state(), saved)
            _step(training, at)
            ends.append(_digest(training))
        if training.own is not None:
            _check_conservation(training)
        repr(training.handle)
    finally:
        training.close()
    if saved is None:
        return
    training = _new(c, rank, size)
    try:
        saved.seek(0)
        training.load(torch.load(saved, weights_only=False))
        for at in range(c["save"], c["steps"]):
            _step(training, at)
            if training.resumes_exactly():
                _agree(training, _digest(training) == ends[at], f"resumed at {c['save']}, it differs after step {at}")
    finally:
        training.close()


def _new(c, rank, size):
    training = _TRAININGS[c["place"]](c, rank, size)
    training.sent_before = tcp_sent_nbytes()
    return training


def _step(training, at):
    before = copy.deepcopy(training.feedback()) if training.rolls_back and training.c["bad"] == at else None
    training.step(at)
    problems = []
    if not torch.isfinite(training.parameters()).all() and training.equal_now(at):
        problems.append("parameters are inf or NaN")
    if before is not None:
        problems += _changes(training, before)
    stated, sent = training.sent(), tcp_sent_nbytes() - training.sent_before
    if stated > sent:
        problems.append(f"the handle says {stated} bytes, the kernel {sent}")
    mine = _digest(training), training.equal_now(at), training.bad, training.stepped, problems
    ranks = [None] * training.size
    dist.all_gather_object(ranks, mine)
    for rank, (digest, equal, _, stepped, found) in enumerate(ranks):
        if found:
            raise BrokenError(f"step {at}, rank {rank}: {'; '.join(found)}")
        if equal and digest != ranks[0][0]:
            raise BrokenError(f"rank {rank} differs after step {at}{_by_how_much(training)}")
        if stepped == any(bad for _, _, bad, *_ in ranks) and training.rolls_back:
            raise BrokenError(f"step {at} was {'' if stepped else 'not '}taken on rank {rank}")


def _digest(training):
    """Of all parameters that this rank sees; one NaN is as good as another."""
    parameters = training.parameters()
    return hashlib.sha256(parameters.masked_fill_(parameters.isnan(), torch.nan).numpy().tobytes()).hexdigest()


def _changes(training, before):
    """What a bad step has changed. New states are zero."""
    if training.c["policy"]:  # may decide in this very step
        return []
    after = training.feedback()
    changed = [name for name, x in after.items() if not torch.equal(x, before.get(name, torch.zeros_like(x)))]
    return [f"a bad step changed {', '.join(changed[:5])}"] if changed else []


def _agree(training, holds, message):
    if not training.on_all(holds):
        raise BrokenError(message)


def _by_how_much(training):
    mine = training.parameters()
    ranks = [torch.empty_like(mine) for _ in range(training.size)]
    dist.all_gather(ranks, mine)
    return f" by {max(float((other - ranks[0]).abs().max()) for other in ranks)}"


def _check_conservation(training):
    training.flush()
    own = torch.cat([x.reshape(-1) for x in training.own.values()])
    dist.all_reduce(own, group=training.group)
    own /= dist.get_world_size(training.group)
    delivered = torch.cat([x.reshape(-1) for x in training.delivered.values()])
    missing = (own - delivered).abs()
    limit = _ROUNDING * float(own.abs().max())
    names = [name for name, x in training.own.items() for _ in range(x.numel())]
    lost = sorted({names[at] for at in (missing > limit + training.rounding()).nonzero().flatten().tolist()})
    _agree(training, not lost, f"of {float(own.abs().max()):.3g}, {float(missing.max()):.3g} was lost in {lost}")
