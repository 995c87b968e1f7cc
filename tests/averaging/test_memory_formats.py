"""Models in PyTorch's memory format channels_last: averages belong to elements, wherever these lie in memory."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from narrowband.averaging.flat import form_of, parts_of
from tests.gradients.training import refusal, sgd
from tests.ranks import run_ranks

SHAPE = (8, 5, 3, 3)
LAST = torch.channels_last


class Filters(nn.Module):
    """Weights of convolutions that are drawn to a target: their gradients have the same bits in every format."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(SHAPE))
        self.second = nn.Parameter(torch.randn(4, 8, 2, 2))

    def forward(self, targets):
        return sum((p - target).square().sum() for p, target in zip(self.parameters(), targets, strict=True))


def averaged(model, spec):
    averager = nb.Averager(model, spec, min_numel=64)
    return averager, averager.average


def compressed(model, spec):
    return nb.compress_gradients(model, spec, min_numel=64), lambda: None


#: Ways to average: the handle, and what is called after backward.
GRADIENTS = {"averager": averaged, "module": compressed}


def started(place, spec, model):
    """An optimizer, a handle, and what is called after backward."""
    optimizer = sgd(model, momentum=0.9)
    if place == "updates":
        return optimizer, nb.compress_updates(model, optimizer, spec, every=3, min_numel=64), lambda: None
    return optimizer, *GRADIENTS[place](model, spec)


def go_on(model, optimizer, after, rank, steps):
    for step in steps:
        drawn = torch.Generator().manual_seed(10 * step + rank)
        targets = [torch.randn(p.shape, generator=drawn) for p in model.parameters()]
        optimizer.zero_grad()
        model(targets).backward()
        after()
        optimizer.step()


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("shape", [(3, 2), (4, 3, 2), (2, 5, 1, 3), (3, 4, 1, 1), (2, 3, 2, 3), (1, 3, 2, 2, 2)])
def test_a_format_tells_orders_of_elements_apart_and_nothing_else(shape):
    forms = []
    for order in itertools.permutations(range(len(shape))):
        back = [order.index(dim) for dim in range(len(shape))]
        forms.append(form_of(torch.empty([shape[dim] for dim in order]).permute(back)))
    flat = torch.arange(forms[0].numel)
    for one, other in itertools.product(forms, forms):
        (a,), (b,) = parts_of(flat, [one]), parts_of(flat, [other])
        assert torch.equal(a, b) == (one.memory_format == other.memory_format)


def in_two_formats(rank, world_size):
    found = {}
    for place in (*GRADIENTS, "updates"):
        model = Filters()
        if rank == 1:
            model.to(memory_format=LAST)
        found[place] = refusal(lambda m=model, p=place: started(p, "none", m))
    return found


def test_ranks_with_models_in_two_formats_are_told_what_to_do():
    for errors in run_ranks(in_two_formats, 2):
        for kind, text in errors.values():
            assert kind == "DisagreementError"
            assert "memory format of 'first' (contiguous on rank 0; channels_last on rank 1)" in text
            assert "converted to the same memory format before" in text


def converted_later(rank, world_size, place, spec, when):
    """Parameters of a run, and of one in which rank 1 converts its model on the way."""
    found = []
    for converts in (False, True):
        model = Filters()
        optimizer, _, after = started(place, spec, model)
        go_on(model, optimizer, after, rank, range(when))
        if converts and rank == 1:
            model.to(memory_format=LAST)
        go_on(model, optimizer, after, rank, range(when, 9))
        found.append(weights(model))
    return found


@pytest.mark.parametrize("when", [0, 4])
@pytest.mark.parametrize("place", [*GRADIENTS, "updates"])
def test_a_model_that_is_converted_after_set_up_is_averaged_as_before(place, when):
    for before, after in run_ranks(converted_later, 2, place, "topk:density=0.1+ef", when):
        assert torch.equal(before, after)


def resumed(rank, world_size, place):
    """A run in channels_last, and one that is stopped between two rounds and goes on elsewhere."""
    whole = Filters().to(memory_format=LAST)
    optimizer, _, after = started(place, "topk:density=0.1+ef", whole)
    go_on(whole, optimizer, after, rank, range(9))
    model = Filters().to(memory_format=LAST)
    optimizer, handle, after = started(place, "topk:density=0.1+ef", model)
    go_on(model, optimizer, after, rank, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    again = Filters().to(memory_format=LAST)
    optimizer, handle, after = started(place, "topk:density=0.1+ef", again)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    go_on(again, optimizer, after, rank, range(5, 9))
    return weights(whole), weights(again), saved[2]


@pytest.mark.parametrize("place", [*GRADIENTS, "updates"])
def test_in_channels_last_a_run_that_was_stopped_goes_on_to_the_bit(place):
    for whole, again, _ in run_ranks(resumed, 2, place):
        assert torch.equal(whole, again)


def loaded(rank, world_size, states, spec):
    """Into a model in the other format; and a state of before formats were saved."""
    found = []
    for state in (states[rank], states, {key: x for key, x in states[rank].items() if key != "memory formats"}):
        model = Filters()
        _, handle, _ = started("updates", spec, model)
        found.append(refusal(lambda h=handle, s=state: h.load_state_dict(s)))
        handle.remove()
    return found


def test_residuals_are_never_loaded_in_another_order():
    states = [state for *_, state in run_ranks(resumed, 2, "updates")]
    for *errors, of_before in run_ranks(loaded, 2, states, "topk:density=0.1+ef"):
        for kind, text in errors:
            assert kind == "ValueError"
            assert "saved with first in the memory format channels_last" in text
            assert "convert the model" in text
        assert of_before is None


def anchors_of_another_format(rank, world_size):
    """Without residuals nothing is saved whose order matters: a run goes on in another format, between rounds too."""
    found = []
    for memory_format in (torch.contiguous_format, LAST):
        model = Filters()
        optimizer, handle, after = started("updates", "none", model)
        go_on(model, optimizer, after, rank, range(5))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
        handle.remove()
        again = Filters().to(memory_format=memory_format)
        optimizer, handle, after = started("updates", "none", again)
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        handle.load_state_dict(saved[2])
        go_on(again, optimizer, after, rank, range(5, 9))
        found.append(weights(again))
    return found


def test_what_a_replica_had_in_the_last_round_may_be_loaded_in_another_format():
    for same, other in run_ranks(anchors_of_another_format, 2):
        assert torch.equal(same, other)


def of_machines(rank, world_size):
    model = DistributedDataParallel(Filters().to(memory_format=LAST))
    handle = nb.compress_gradients(model, "topk:density=0.1+ef", min_numel=16, nodes=2)
    go_on(model, sgd(model), lambda: None, rank, range(2))
    return handle.state_dict()["memory formats"]


def test_parts_of_parameters_are_saved_with_their_format():
    assert run_ranks(of_machines, 4) == [{"first": "channels_last", "second": "channels_last"}] * 4
