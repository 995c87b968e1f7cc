"""How long an exchange may take, by how long those before it took over the same connections."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
import torch.distributed as dist

from narrowband.updates.connections import Connections
from narrowband.updates.rendezvous import Entry, Rendezvous, View


@pytest.fixture
def alone(request):
    """The connections of one peer, and a function that opens them."""
    connections = Connections(Rendezvous("127.0.0.1:1", grace_s=getattr(request, "param", 2.0), exchange_s=300.0))
    view = View(turn=0, round=0, entries=(Entry("a", -1, 0.0),), rank=0, fresh=True, beginning=True)

    def opened():
        return connections.open(view, dist.HashStore())

    yield connections, opened
    connections.close()


def test_an_exchange_may_take_ten_times_as_long_as_the_longest_before_it(alone):
    connections, opened = alone
    assert connections.breaks_off_after_s == 300.0
    group = opened()
    for took, most in ((0.1, 5.0), (1.0, 10.0), (0.2, 10.0), (100.0, 300.0)):
        connections.expect(took, group)
        assert connections.breaks_off_after_s == most
    connections.close()
    opened()
    assert connections.breaks_off_after_s == 300.0  # the next peers may be slower


@pytest.mark.parametrize("alone", [30.0], indirect=True)
def test_no_exchange_is_broken_off_within_the_grace_window(alone):
    connections, opened = alone
    connections.expect(0.1, opened())
    assert connections.breaks_off_after_s == 30.0


def test_connections_leave_nothing_behind(alone):
    connections, opened = alone
    hook = sys.excepthook
    opened()
    assert (dist.get_world_size(), sys.excepthook) == (1, hook)
    connections.close()
    connections.close()
    assert not dist.is_initialized()


def test_peers_find_each_other_after_one_of_them_has_failed_to_connect(alone):
    """PyTorch counts groups, also those that were never connected, and names by that where peers look for others."""
    connections, opened = alone
    name = opened().group_name
    connections.close()
    view = View(turn=1, round=0, entries=(Entry("a", -1, 0.0), Entry("dead", -1, 0.0)), rank=0, fresh=True,
                beginning=True)  # fmt: skip
    hasty = Connections(Rendezvous("127.0.0.1:1", exchange_s=0.2))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            hasty.open(view, dist.HashStore())
        hasty.close()
    assert opened().group_name == name


def test_peers_wait_no_longer_to_connect_than_for_an_exchange(alone, monkeypatch):
    """Gloo waits five time-outs for the connection to a peer that died right after the others had its address."""
    _, opened = alone
    init, asked = dist.init_process_group, []

    def noted(*given, timeout, **options):
        asked.append(timeout.total_seconds())
        init(*given, timeout=timeout, **options)

    monkeypatch.setattr(dist, "init_process_group", noted)
    group = opened()
    assert asked == [300.0 / 5]
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 300.0


def test_an_exchange_that_nearly_takes_too_long_is_told_once(alone, caplog):
    connections, _ = alone
    with caplog.at_level(logging.WARNING):
        for took in (149.0, 151.0, 200.0):
            connections.warn_if_slow(took)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["an exchange took 151 s"]
