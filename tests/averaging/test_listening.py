"""What is told of every optimizer's steps, and what has a handle, may change while another thread looks at it."""

from __future__ import annotations

import contextlib
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.averaging import averager, who
from narrowband.averaging.listening import Listener, ignore, listen
from tests.gradients.training import heard, mlp
from tests.ranks import run_ranks

#: Where Python code of weak collections is: another thread may run between any two lines of it.
_FILES = {weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename}


@contextlib.contextmanager
def between_lines(what):
    """Call ``what`` before each line of weak collections that this thread runs, as another thread may do."""

    def traced(frame, event, _):
        if frame.f_code.co_filename in _FILES and event == "line":
            what()
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(before)


class Ear(Listener):
    def __init__(self):
        self.steps = 0

    def after_step(self, optimizer):
        self.steps += 1


def test_others_may_begin_to_listen_while_an_optimizer_steps():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    optimizer, first, later = torch.optim.SGD([weight], lr=0.1), Ear(), []

    def one_more():
        later.append(Ear())
        listen(later[-1])

    listen(first)
    with between_lines(one_more):
        optimizer.step()
    assert first.steps == 1
    assert later
    for each in (first, *later):
        ignore(each)
    optimizer.step()
    assert first.steps == 1


def found_meanwhile(rank, world_size):
    """What is found of a model that has a handle, while other models get theirs."""
    model, group = mlp(), dist.group.WORLD
    handle = nb.compress_gradients(model, "none")
    others = []

    def one_more():
        others.append((nn.Linear(1, 1), Listener()))
        who.remember(*others[-1], group)

    with between_lines(one_more):
        found = who.shares_with(model[0]), list(who.handles_of(model[0])), who.shares_with(nn.Linear(1, 1))
    handle.remove()
    return found, len(others) > 0


def test_models_may_get_handles_while_those_of_another_are_looked_for():
    expected = True, [("compress_gradients", frozenset({0}))], False
    assert run_ranks(found_meanwhile, 1, fresh=True) == [(expected, True)]


def said_meanwhile(rank, world_size):
    """What is logged of gradients that nobody averages, while other averagers are made."""
    model = mlp()
    own, others = nb.Averager(model, "none"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def one_more():
        others.append(Other())
        averager._averagers[others[-1]] = None

    with heard() as said:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 24)).sum().backward()
            with between_lines(one_more):
                optimizer.step()
    return [message.partition(" that were")[0] for message in said], own.step, len(others) > 0


class Other:
    """An averager of another model, as far as anybody asks."""

    removed = True


def test_averagers_may_be_made_while_one_says_that_it_was_forgotten():
    said = "SGD has made 3 steps in a row with gradients"
    assert run_ranks(said_meanwhile, 2, fresh=True) == [([said], 0, True), ([], 0, True)]
