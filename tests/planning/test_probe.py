"""Whether ranks reach each other: real ranks on loopback, ports that do not open, and what is said of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

import narrowband
from narrowband.cli import main
from narrowband.planning.meeting import Meeting, MeetingError, join
from narrowband.planning.probe import ANSWERED, NO_WAY, REFUSED, SILENT, STRANGER, Knock, Peers, Seat, Way, probe
from narrowband.planning.troubles import notes_of, troubles_of
from tests.forked import forking
from tests.ranks import run_ranks


@contextlib.contextmanager
def launched(rank, world_size, port, **more):
    """What torchrun puts into the environment."""
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


# ---- real ranks ------------------------------------------------------------------------------------------------------


def found(rank, world_size, port):
    with launched(rank, world_size, port):
        meeting = join(30.0)
        peers = probe(meeting, 10.0)
        meeting.leave(0)
    return peers


def test_every_way_is_measured_and_all_ranks_know():
    answers = run_ranks(found, 3, free_port(), group=False)
    peers = answers[0]
    assert all(answer == peers for answer in answers)
    pairs = list(itertools.permutations(range(3), 2))
    assert [(way.source, way.target) for way in peers.ways] == pairs
    assert all(way.rate > 0 and way.trip_s > 0 and not way.error for way in peers.ways)
    assert peers.knocks == [Knock(source, target, ANSWERED) for source, target in pairs]
    assert [(seat.rank, seat.address, seat.card) for seat in peers.seats] == [
        (at, "127.0.0.1", "lo") for at in range(3)
    ]
    assert troubles_of(peers) == []
    assert notes_of(peers) == [f"{socket.gethostname()} has ranks 0, 1 and 2, which share its processors"]


def in_trouble(rank, world_size, port):
    """Rank 1 names an interface that it has not; rank 2 has another version."""
    own = narrowband.__version__
    with launched(rank, world_size, port, **({"GLOO_SOCKET_IFNAME": "no-card"} if rank == 1 else {})):
        narrowband.__version__ = "9.9.9" if rank == 2 else own
        try:
            meeting = join(30.0)
            peers = probe(meeting, 10.0)
            meeting.leave(1)
        finally:
            narrowband.__version__ = own
    return troubles_of(peers), [(way.source, way.target) for way in peers.ways]


def test_troubles_name_the_rank_and_the_others_are_measured():
    for troubles, ways in run_ranks(in_trouble, 3, free_port(), group=False):
        own, host = narrowband.__version__, socket.gethostname()
        assert troubles[0].startswith(f"Versions of narrowband differ: {own} on ranks 0 and 1, 9.9.9 on rank 2")
        assert troubles[1].startswith(f"rank 1 on {host} found no address for gloo by GLOO_SOCKET_IFNAME=no-card")
        assert "on that machine, export GLOO_SOCKET_IFNAME=" in troubles[1]
        assert len(troubles) == 2
        assert ways == [(0, 2), (2, 0)]


class SlowToCheck:
    """A store that answers late, when rank 0 may have closed it."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        if name == "check":
            time.sleep(0.3)
        return getattr(self._store, name)


def gone_with_the_store(rank, world_size, port):
    with launched(rank, world_size, port):
        meeting = join(30.0)
        if rank:
            meeting._store = SlowToCheck(meeting._store)
        meeting.leave(0)
        del meeting  # of rank 0, the store's server


def test_ranks_leave_though_the_store_goes_at_once():
    assert run_ranks(gone_with_the_store, 3, free_port(), group=False, fresh=True) == [None] * 3


def asked(rank, world_size, port, folder):
    with launched(rank, world_size, port, NO_COLOR="1", COLUMNS="120"):
        return main(["doctor", "--peers", "--json", f"{folder}/{rank}.json"])


def test_the_command_ends_well_and_one_rank_writes(tmp_path):
    assert run_ranks(asked, 2, free_port(), str(tmp_path), group=False) == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    written = json.loads((tmp_path / "0.json").read_text())
    assert written["troubles"] == []
    assert [seat["rank"] for seat in written["seats"]] == [0, 1]
    assert len(written["ways"]) == len(written["knocks"]) == 2


# ---- ranks that do not meet ------------------------------------------------------------------------------------------


def test_without_torchrun_the_command_says_how(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--peers"]) == 2
    assert "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not set in the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        join(1.0)


def test_a_port_where_nobody_listens_and_one_that_does_not_answer_are_told_apart(capsys):
    port = free_port()
    with launched(1, 2, port), pytest.raises(MeetingError) as refused:
        join(0.3)
    assert f"rank 1 on {socket.gethostname()} was refused by 127.0.0.1 on TCP port {port}" in str(refused.value)
    with contextlib.ExitStack() as opened:  # a queue that is full takes no more connections, and says nothing
        server = opened.enter_context(socket.socket())
        server.bind(("127.0.0.1", port))
        server.listen(0)
        for _ in range(4):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        with launched(1, 2, port):
            assert main(["doctor", "--peers", "--wait", "0.5"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"rank 1 on {socket.gethostname()} got no answer from 127.0.0.1 on TCP port {port} within 0.5 s" in said
    assert f"sudo ufw allow from 127.0.0.1 to any port {port} proto tcp" in said


def test_a_name_that_is_not_known_is_said():
    with (
        launched(1, 2, 29500, MASTER_ADDR="no where.invalid"),
        pytest.raises(MeetingError, match="cannot look up") as no,
    ):
        join(1.0)
    assert "MASTER_ADDR=no where.invalid" in str(no.value)
    assert "as in --rdzv-endpoint 10.0.0.1:29500" in str(no.value)


def test_ranks_that_do_not_come_are_named():
    port = free_port()
    with launched(0, 3, port), pytest.raises(MeetingError) as absent:
        probe(join(0.5), 1.0)
    assert f"of 3 ranks, 1, 2 did not arrive at 127.0.0.1, port {port} within 0.5 s" in str(absent.value)


def test_what_ranks_tell_each_other_fits_into_small_packets():
    store = HashStore()
    meeting = Meeting(store, 0, 1, "here", 1.0)
    value = {"text": "ä" * 1000, "numbers": list(range(500))}
    meeting.put("long", value)
    assert meeting.get("long", 1.0) == value
    parts = int(store.get("long"))
    assert parts > 5
    assert max(len(store.get(f"long/{number}")) for number in range(parts)) <= 900


# ---- what is said ----------------------------------------------------------------------------------------------------


def seat(rank, **changes):
    host = f"m{rank}"
    address = f"10.0.0.{rank + 1}"
    own = Seat(
        rank, host, host, {"python": "3.11.7", "torch": "2.13.0"}, "", address, "eth0", 1500, [], [], 4000 + rank
    )
    return replace(own, cards=["lo (127.0.0.1)", f"eth0 ({address})"], **changes)


def between(*outcomes, ways=(), **changes):
    """Two ranks; what became of a knock by the first, and by the second."""
    knocks = [Knock(0, 1, outcomes[0]), Knock(1, 0, outcomes[1])] if outcomes else []
    return Peers([seat(0), seat(1, **changes)], knocks, list(ways), 10.0)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (SILENT, "so open all TCP ports of m1 to m0; on m1: sudo ufw allow in on eth0 from 10.0.0.1"),
        (REFUSED, "a firewall rejects the connection, or another machine has that address"),
        (NO_WAY, "check that both are in one network. Interfaces of m0: lo (127.0.0.1), eth0 (10.0.0.1)"),
        (STRANGER, "another machine has the same address"),
    ],
)
def test_a_port_that_does_not_open_is_named_with_both_machines(outcome, words):
    (said,) = troubles_of(between(outcome, ANSWERED))
    assert said.startswith("rank 0 on m0 ")
    assert "rank 1 on m1 (10.0.0.2), TCP port 4001" in said
    assert words in said


def test_a_loopback_address_is_the_trouble_and_not_the_port_behind_it():
    (said,) = troubles_of(between(REFUSED, ANSWERED, address="127.0.1.1", card="lo"))
    assert said == (
        "rank 1 on m1 tells the others 127.0.1.1, its loopback address, which no other machine can reach. rank 1 on "
        "m1 has eth0 (10.0.0.2); on that machine, export GLOO_SOCKET_IFNAME=eth0"
    )


def test_small_messages_alone_are_a_matter_of_the_mtu():
    ways = [Way(0, 1, trip_s=0.01, error="timed out"), Way(1, 0, 0.01, 1e8)]
    (said,) = troubles_of(between(ANSWERED, ANSWERED, ways=ways, mtu=1420))
    assert said.startswith("Small messages pass from rank 0 on m0 to rank 1 on m1, but one of 65.5 kB did not arrive")
    assert "(MTU 1500 and 1420)" in said
    (said,) = troubles_of(between(ANSWERED, ANSWERED, ways=[Way(0, 1, error="closed"), Way(1, 0, 0.01, 1e8)]))
    assert said.startswith("Ports are open from rank 0 on m0 to rank 1 on m1, but no message of gloo arrived")
    assert said.endswith("gloo's error: closed")


@pytest.mark.parametrize(("version", "differ"), [("3.11.9", 0), ("3.12.1", 1)])
def test_of_python_only_the_minor_version_has_to_be_the_same(version, differ):
    said = troubles_of(between(versions={"python": version, "torch": "2.13.0+cpu"}))
    assert len(said) == differ


def test_a_link_that_is_slower_one_way_is_named():
    notes = notes_of(between(ANSWERED, ANSWERED, ways=[Way(0, 1, 0.01, 2e7), Way(1, 0, 0.01, 1e8)], mtu=1420))
    assert "From rank 0 on m0 to rank 1 on m1 20 Mbit/s, and back 100 Mbit/s: every rank" in notes[1]
    assert notes[0].startswith("MTUs differ: 1420 on rank 1, 1500 on rank 0")
    assert notes[2].startswith("Slowest link: from rank 0 on m0 to rank 1 on m1, 20 Mbit/s")
    even = [Way(0, 1, 0.01, 6e7), Way(1, 0, 0.01, 1e8)]
    assert not [each for each in notes_of(between(ANSWERED, ANSWERED, ways=even)) if "and back" in each]


def test_machines_of_one_name_and_ranks_of_one_machine_are_noted():
    seats = [seat(0), seat(1, host="m0", boot="m0"), seat(2, host="m0")]
    notes = notes_of(Peers(seats, [], [], 10.0))
    assert "m0 has ranks 0 and 1, which share its processors, and its link" in notes
    assert "2 machines are called m0, so messages cannot tell them apart: give each its own name" in notes


# ---- links that are slow, cut, or lose what is large -----------------------------------------------------------------

BEHIND_LINKS = """
    import os, subprocess, sys
    from narrowband.cli import main
    def ip(words): subprocess.run(["ip", *words.split()], check=True)
    rank = int(os.environ["RANK"])
    if rank == 1:  # what it sends to rank 2 goes to a card that nobody has
        ip("neigh replace 10.213.0.3 lladdr 02:00:00:00:00:99 dev lab0 nud permanent")
    if rank == 0:  # no super-packets, which a virtual card lets through whatever its MTU
        ip("link set lab0 gso_max_segs 1")
    if rank == 2:  # it asks for larger packets than its card takes
        ip("link set lab0 mtu 1000")
        ip("route del 10.213.0.0/16")
        ip("route add 10.213.0.0/16 dev lab0 src 10.213.0.3 advmss 1460")
    sys.exit(main(["doctor", "--peers", "--limit", "3", "--json", sys.argv[1] + f"/{rank}.json"]))
"""


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="ranks of a lab may change their links only as root")
@pytest.mark.skipif(not any(Path(each, "ip").exists() for each in ("/sbin", "/usr/sbin", "/bin")), reason="no ip")
def test_links_that_are_slow_cut_or_lose_large_packets_are_told_apart(tmp_path):
    from narrowband.lab import LabConfig, run

    config = LabConfig(nodes=3, up="8mbit,80mbit,80mbit", down="80mbit", timeout_s=120.0)
    with forking() as forked:
        assert run(config, forked(BEHIND_LINKS, str(tmp_path))).exit_code == 1
    said = json.loads((tmp_path / "0.json").read_text())
    there, back, large = said["troubles"]
    assert there.startswith("rank 1 on rank1 got no answer from rank 2 on rank2 (10.213.0.3), TCP port")
    assert "on rank2: sudo ufw allow in on lab0 from 10.213.0.2" in there
    assert back.startswith("rank 2 on rank2 got no answer from rank 1 on rank1 (10.213.0.2), TCP port")
    assert large.startswith("Small messages pass from rank 0 on rank0 to rank 2 on rank2, but one of 65.5 kB did not")
    assert any(note.startswith("From rank 0 on rank0 to rank 1 on rank1 ") for note in said["notes"])
    rates = {(way["source"], way["target"]): way["rate"] for way in said["ways"]}
    assert rates.keys() == {(0, 1), (1, 0), (0, 2), (2, 0)}
    assert rates[0, 2] is None
    assert rates[0, 1] < 8e6 < rates[1, 0]
