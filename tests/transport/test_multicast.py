"""Multicast on real processes: what arrives, how many bytes that takes, and how it ends."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.lab import LabConfig
from narrowband.lab import run as run_lab
from narrowband.transport.datagram import HEADER_BYTES
from narrowband.transport.multicast import Multicast
from tests.forked import forking
from tests.ranks import run_ranks
from tests.transport.exchanges import ETHERNET, LIMIT_S, content, everything, places, transport

# ------------------------------------------------------------------------------------------------ what arrives


def exchange_sizes(rank, world, mtu):
    chunk = mtu - 28 - HEADER_BYTES
    with transport(mtu=mtu) as multicast:
        right = []
        for turn, scale in enumerate((0, 1, chunk - 1, chunk, 3 * chunk, 50_000)):
            sizes = [scale + k if k else 0 for k in range(world)]  # rank 0 sends nothing
            incoming = places(rank, sizes)
            multicast.exchange(content(rank, sizes[rank], turn), incoming, everything(rank, sizes))
            right += [b is None or torch.equal(b, content(k, sizes[k], turn)) for k, b in enumerate(incoming)]
        return right


@pytest.mark.parametrize(("world", "mtu"), [(1, ETHERNET), (2, 65536), (3, ETHERNET), (4, 65536)])
def test_buffers_of_all_sizes_arrive_as_they_were_sent(world, mtu):
    for right in run_ranks(exchange_sizes, world, mtu, timeout_s=LIMIT_S):
        assert right == [True] * 6 * world


def exchange_ranges(rank, world):
    nbytes = 40_000
    wanted = [[], [], []]
    for k in range(world):
        if (rank + 1) % world == k:
            wanted[k] = [(0, 1), (5_000, 9_000), (39_999, 40_000)]
    incoming = places(rank, [nbytes] * world)
    with transport(mtu=ETHERNET) as multicast:
        outgoing = content(rank, nbytes)
        multicast.exchange(outgoing, incoming, wanted)
        outgoing.zero_()  # it may be changed now
        multicast.exchange(content(rank, nbytes, 1), places(rank, [nbytes] * world), wanted)
    k = (rank + 1) % world
    return all(torch.equal(incoming[k][a:b], content(k, nbytes)[a:b]) for a, b in wanted[k])


def test_wanted_ranges_arrive():
    assert run_ranks(exchange_ranges, 3, timeout_s=LIMIT_S) == [True] * 3


def exchange_late(rank, world):
    nbytes = 200_000
    sizes = [nbytes] * world
    with transport(mtu=ETHERNET, early_bytes=20_000) as multicast:
        right = []
        for turn in range(3):
            if rank == turn:
                time.sleep(0.5)  # the others' data come early, and there is room for a part
            incoming = places(rank, sizes)
            multicast.exchange(content(rank, nbytes, turn), incoming, everything(rank, sizes))
            right += [b is None or torch.equal(b, content(k, nbytes, turn)) for k, b in enumerate(incoming)]
        return right


def test_a_rank_that_is_late_gets_everything():
    assert run_ranks(exchange_late, 3, timeout_s=LIMIT_S) == [[True] * 9] * 3


# ------------------------------------------------------------------------------------------------ bytes


def count(rank, world, mtu, nbytes):
    sizes = [nbytes] * world
    with transport(mtu=mtu, rate=1e9) as multicast:
        for _ in range(4):
            multicast.exchange(content(rank, nbytes), places(rank, sizes), everything(rank, sizes))
        return multicast.statistics


@pytest.mark.parametrize("mtu", [ETHERNET, 65536])
def test_a_buffer_is_sent_once_and_control_costs_two_percent_at_most(mtu):
    nbytes = 1_500_000
    chunks = -(-nbytes // ((min(mtu - 28, 65507) - HEADER_BYTES) // 8 * 8))
    for counts in run_ranks(count, 3, mtu, nbytes, timeout_s=LIMIT_S):
        assert counts.exchanges == 4
        assert counts.data_bytes == 4 * nbytes
        assert counts.data_datagrams == 4 * chunks
        assert counts.repair_datagrams == 0
        assert counts.control_bytes + counts.control_datagrams * (HEADER_BYTES + 42) <= 0.02 * counts.data_bytes
        assert counts.sent_bytes == counts.data_bytes + counts.control_bytes + 32 * counts.sent_datagrams
        assert counts.link_bytes == counts.sent_bytes + 42 * counts.sent_datagrams


IN_LAB = """
    import json, os, sys
    import torch, torch.distributed as dist
    from narrowband.transport.multicast import Multicast

    dist.init_process_group("gloo")
    rank, world, nbytes = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
    transport = Multicast(dist.group.WORLD)
    outgoing = torch.full((nbytes,), rank + 1, dtype=torch.uint8)
    incoming = [None if k == rank else torch.zeros(nbytes, dtype=torch.uint8) for k in range(world)]
    transport.exchange(outgoing, incoming, [[] if k == rank else [(0, nbytes)] for k in range(world)])
    assert all(buffer is None or (buffer == k + 1).all() for k, buffer in enumerate(incoming))
    transport.close()
    print(json.dumps([rank, transport.statistics.link_bytes]))
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.lab
def test_over_a_switch_a_buffer_passes_its_senders_link_once(capfd):
    world, nbytes = 3, 3_000_000
    config = LabConfig(nodes=world, rate="200mbit", timeout_s=LIMIT_S)
    with forking() as forked:
        report = run_lab(config, forked(IN_LAB, str(nbytes)))
    assert report.exit_code == 0, capfd.readouterr().err
    for line in capfd.readouterr().out.splitlines():
        rank, counted = json.loads(line.partition("] ")[2])
        sent = report.ranks[rank].sent_bytes
        assert counted <= sent <= counted + 60_000  # gloo's connections, the store, and the group's membership
        assert nbytes <= sent <= 1.1 * nbytes
        assert report.ranks[rank].received_bytes >= (world - 1) * nbytes


# ------------------------------------------------------------------------------------------------ ends


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "narrowband-multicast"]


def leave_in_all_ways(rank, world):
    sizes = [50_000] * world
    found = []
    for way in ("close", "forget"):
        multicast = Multicast(dist.group.WORLD, timeout_s=LIMIT_S)
        multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        found.append(len(our_threads()))
        if way == "close":
            multicast.close()
            multicast.close()
            with pytest.raises(RuntimeError, match="closed"):
                multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        del multicast
        gc.collect()
        found.append(len(our_threads()))
    return found


def test_the_thread_ends_with_the_transport():
    assert run_ranks(leave_in_all_ways, 2, timeout_s=LIMIT_S) == [[1, 0, 1, 0]] * 2


def test_the_thread_does_not_hold_up_the_interpreters_exit(tmp_path):
    code = f"""
        import torch, torch.distributed as dist
        from narrowband.transport.multicast import Multicast
        dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
        transport = Multicast(dist.group.WORLD, interface="lo")
        transport.exchange(torch.zeros(9, dtype=torch.uint8), [None], [[]])
        print("done")
    """
    source = str(Path(nb.__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
