"""Which transport a process group gets."""

from __future__ import annotations

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.errors import UnsupportedError
from narrowband.transport import connect, probe
from narrowband.transport.sockets import MulticastSocket
from tests.coded.training import batch, gradient, loss_of, mlp
from tests.gradients.training import refusal
from tests.ranks import run_ranks
from tests.transport.exchanges import LIMIT_S, Deaf, capture, wait_for


def choose(rank, world, socket_class):
    names = []
    with patch.object(probe, "MulticastSocket", socket_class), capture() as messages:
        for name in ("auto", "multicast"):
            try:
                chosen = connect(name, dist.group.WORLD, timedelta(seconds=LIMIT_S))
            except UnsupportedError as error:
                names.append(str(error))
            else:
                names.append(chosen.name)
                chosen.close()
    return names, messages


def test_auto_takes_multicast_where_it_reaches_all_ranks():
    assert run_ranks(choose, 3, MulticastSocket, timeout_s=LIMIT_S) == [(["multicast"] * 2, [])] * 3


def test_auto_takes_broadcast_with_a_warning_where_it_does_not():
    for rank, ((auto, multicast), messages) in enumerate(run_ranks(choose, 3, Deaf, timeout_s=LIMIT_S)):
        assert auto == "broadcast"
        assert "rank 1: received nothing from rank 0" in multicast
        assert len(messages) == (rank == 0)
        assert all("by broadcast, once for each rank that needs them: " in message for message in messages)


def test_auto_does_not_try_between_two_ranks():
    assert run_ranks(choose, 2, MulticastSocket, timeout_s=LIMIT_S) == [(["broadcast", "multicast"], [])] * 2


def average_by(rank, world, name):
    model = nb.CodedDataParallel(mlp(), 2, name)
    gradients = []
    for step in range(3):
        x, y = model.split(*batch(step, 24))
        loss_of(model(x), y).backward()
        gradients.append(gradient(model).clone())
    return model.transport.name, gradients


def test_gradients_by_multicast_are_those_by_broadcast_to_the_bit():
    by_multicast = run_ranks(average_by, 4, "multicast", timeout_s=LIMIT_S)
    by_broadcast = run_ranks(average_by, 4, "broadcast", timeout_s=LIMIT_S)
    assert [name for name, _ in by_multicast] == ["multicast"] * 4
    for (_, gradients), (_, expected) in zip(by_multicast, by_broadcast, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def given_up(rank, world, name):
    """What ranks say of rank 0, which takes no second step, when the time-out has become short after set-up."""
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    before = group._get_backend(torch.device("cpu")).options._timeout
    model = nb.CodedDataParallel(mlp(), 2, name)

    def step():
        x, y = model.split(*batch(0, 24))
        loss_of(model(x), y).backward()

    step()
    group.set_timeout(timedelta(seconds=1))
    key, said = f"{name} given up", None
    try:
        if rank:
            said = refusal(step)
            store.add(key, 1)
        else:
            wait_for(lambda: store.add(key, 0) == world - 1)
    finally:
        group.set_timeout(before)
    return said


@pytest.mark.parametrize("name", ["multicast", "broadcast"])
def test_a_time_out_that_is_changed_later_holds_for_the_transport_too(name):
    """With that of the set-up, of minutes, ranks would wait for rank 0 in vain, which waits for them."""
    _, *told = run_ranks(given_up, 3, name, timeout_s=LIMIT_S)
    for error, _ in told:
        assert error == ("RanksLostError" if name == "multicast" else "RuntimeError")
