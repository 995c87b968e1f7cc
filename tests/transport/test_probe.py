"""Which card multicast uses, and where it does not get through."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch.distributed as dist

from narrowband.errors import UnsupportedError
from narrowband.transport import probe
from narrowband.transport.multicast import Multicast
from narrowband.transport.sockets import find_interface
from tests.ranks import run_ranks
from tests.transport.exchanges import LIMIT_S, Deaf


def probe_deaf(rank, world):
    with patch.object(probe, "MulticastSocket", Deaf), pytest.raises(UnsupportedError) as caught:
        Multicast(dist.group.WORLD, probe_s=0.5)
    return str(caught.value)


def test_multicast_that_does_not_reach_everybody_is_refused_alike_on_all_ranks():
    messages = set(run_ranks(probe_deaf, 3, timeout_s=LIMIT_S))
    assert len(messages) == 1
    assert "rank 1: received nothing from rank 0 (127.0.0.1)" in messages.pop()


def probe_late(rank, world):
    listen, attempts = probe._listen, []

    def first_in_vain(*args):
        attempts.append(args)
        if len(attempts) == 1:  # rank 1 stands still for all of the time
            return [rank != 1 and k != 1 for k in range(world)]
        return listen(*args[:-1], LIMIT_S)

    with patch.object(probe, "_listen", first_in_vain):
        Multicast(dist.group.WORLD).close()
    return len(attempts)


def test_ranks_listen_again_if_one_of_them_stood_still():
    assert run_ranks(probe_late, 3, timeout_s=LIMIT_S) == [2] * 3


def probe_no_card(rank, world):
    with pytest.raises(UnsupportedError) as caught:
        Multicast(dist.group.WORLD, interface="nb-none0" if rank == 1 else None)
    return str(caught.value)


def test_a_card_that_does_not_exist_is_refused_alike_on_all_ranks():
    messages = set(run_ranks(probe_no_card, 2, timeout_s=LIMIT_S))
    assert len(messages) == 1
    message = messages.pop()
    assert "rank 1: there is no network card 'nb-none0'" in message
    assert "lo (127.0.0.1)" in message


def test_the_card_is_the_one_that_is_named_or_on_the_way(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    loopback = find_interface("lo")
    assert find_interface("127.0.0.1") == loopback
    assert (loopback.name, loopback.address) == ("lo", "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert find_interface() == loopback
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    assert find_interface() == loopback
