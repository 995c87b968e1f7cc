"""Real ranks in real namespaces: what they see, and what the kernel counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowband.errors import UnsupportedError
from narrowband.lab import LabConfig, requirements, run
from narrowband.lab.supervisor import cores_of
from tests.forked import forking
from tests.lab.processes import LIMIT_S, lacking, python
from tests.thorough import thorough

# ------------------------------------------------------------------------------------------------ what ranks see


@pytest.mark.lab
def test_ranks_see_torchruns_variables_and_a_host_of_their_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    code = """
        import json, os, socket, sys
        cards = [name for _, name in socket.if_nameindex()]
        own = socket.gethostbyname(socket.gethostname())
        print(json.dumps({"env": dict(os.environ), "cards": cards, "own": own, "stdin": sys.stdin.read()}))
    """
    report = run(LabConfig(nodes=3), python(code), env={"MASTER_PORT": "4711"})
    assert report.exit_code == 0
    lines = capfd.readouterr().out.splitlines()
    seen = {int(line[6]): json.loads(line[9:]) for line in lines if line.startswith("[rank ")}
    assert sorted(seen) == [0, 1, 2]
    for rank, host in seen.items():
        expected = {"RANK": str(rank), "NODE_RANK": str(rank), "GROUP_RANK": str(rank), "WORLD_SIZE": "3"}
        expected |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "4711"}
        expected |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lab0", "NCCL_SOCKET_IFNAME": "lab0"}
        expected |= {"TP_SOCKET_IFNAME": "lab0", "PATH": os.environ["PATH"], "NARROWBAND_LAB": "rate=200mbit"}
        assert {name: host["env"].get(name) for name in expected} == expected
        assert "TORCHELASTIC_USE_AGENT_STORE" not in host["env"]
        assert sorted(host["cards"]) == ["lab0", "lo"]
        assert host["own"] == f"10.213.0.{rank + 1}"
        assert host["stdin"] == ""


@pytest.mark.lab
def test_each_rank_keeps_to_its_share_of_the_cores(capfd: pytest.CaptureFixture[str]) -> None:
    here = os.sched_getaffinity(0)
    for nodes in (1, 3):
        run(LabConfig(nodes=nodes, rate=None), python("import os; print(*os.sched_getaffinity(0))"))
        lines = capfd.readouterr().out.splitlines()
        seen = {frozenset(map(int, line.rpartition("]")[2].split())) for line in lines}
        assert seen == {frozenset(cores_of(rank, nodes, here)) for rank in range(nodes)}


@given(cores=st.sets(st.integers(0, 300), min_size=1, max_size=40), nodes=st.integers(1, 64))
def test_shares_of_cores_are_equal_and_use_all(cores: set[int], nodes: int) -> None:
    shares = [cores_of(rank, nodes, cores) for rank in range(nodes)]
    assert set().union(*shares) <= cores
    if nodes <= len(cores):
        assert sorted(core for share in shares for core in share) == sorted(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        users = [sum(core in share for share in shares) for core in cores]
        assert all(len(share) == 1 for share in shares)
        assert max(users) - min(users) <= 1


@pytest.mark.lab
def test_the_users_number_of_threads_is_kept(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run(LabConfig(nodes=1), ["sh", "-c", "echo $OMP_NUM_THREADS"])
    assert capfd.readouterr().out == "7\n"


@pytest.mark.lab
def test_output_is_passed_on_in_whole_lines_of_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    code = r"""
        import os, sys
        for i in range(200):
            os.write(1, b"a" * 50); os.write(1, b"b" * 50 + b"\n")
        os.write(1, b"10%\r20%\r\n\nlast")
        os.write(2, b"err\n")
    """
    run(LabConfig(nodes=2), python(code))
    captured = capfd.readouterr()
    assert sorted(captured.err.splitlines()) == ["[rank 0] err", "[rank 1] err"]
    for rank in (0, 1):
        mine = [line for line in captured.out.split("\n") if line.startswith(f"[rank {rank}] ")]
        texts = [line[9:] for line in mine]
        assert texts == ["a" * 50 + "b" * 50] * 200 + ["10%", "20%", "", "last"]
    assert captured.out.count("\n") == 2 * 204


@pytest.mark.lab
def test_output_of_a_single_rank_is_untouched(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run(LabConfig(nodes=1), ["printf", r"10%%\r20%%\n\nlast"])
    assert capfdbinary.readouterr().out == b"10%\r20%\n\nlast"


# ------------------------------------------------------------------------------------------------ links


@pytest.mark.lab
@pytest.mark.parametrize("card", ["", *thorough("lab0")])
def test_gloo_works_and_the_counters_match_its_traffic(card: str) -> None:
    code = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        rank, world, numel = dist.get_rank(), dist.get_world_size(), 1_000_000
        x = torch.full((numel,), float(rank + 1))
        parts = [torch.empty(numel) for _ in range(world)]
        dist.all_gather(parts, x)
        assert all((part == r + 1).all() for r, part in enumerate(parts))
        dist.all_reduce(x)
        assert (x == world * (world + 1) / 2).all()
        dist.destroy_process_group()
    """
    world, nbytes = 2, 4_000_000
    config = LabConfig(nodes=world, rate="200mbit", timeout_s=LIMIT_S)
    with forking() as forked:
        report = run(config, forked(code), env={"GLOO_SOCKET_IFNAME": card})
    assert report.exit_code == 0
    # a ring gathers in (N - 1) · size and reduces in 2 · (N - 1) / N · size, sent by every rank
    expected = (world - 1) * nbytes + 2 * (world - 1) / world * nbytes
    for rank in report.ranks:
        assert rank.exit_code == 0
        assert rank.sent_bytes == pytest.approx(expected, rel=0.05)
        assert rank.received_bytes == pytest.approx(expected, rel=0.05)
        assert 0 < rank.sent_packets < rank.sent_bytes / 1000
    assert sum(r.sent_bytes for r in report.ranks) == pytest.approx(
        sum(r.received_bytes for r in report.ranks), rel=0.01
    )


# Ranks 1 and 2 both talk to rank 0: "in" to it, "out" of it.
STAR = """
    import os, socket, sys, threading
    direction, numel, rank = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
    def send(peer):
        peer.sendall(bytes(numel)); peer.shutdown(socket.SHUT_WR); assert not peer.recv(1)
    def receive(peer):
        left = numel
        while left:
            chunk = peer.recv(1 << 16); assert chunk; left -= len(chunk)
        assert not peer.recv(1); peer.close()
    if rank == 0:
        server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        peers = [server.accept()[0] for _ in range(2)]
        work = [threading.Thread(target=send if direction == "out" else receive, args=(peer,)) for peer in peers]
        for thread in work: thread.start()
        for thread in work: thread.join()
    else:
        while True:
            try:
                peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))); break
            except ConnectionRefusedError:
                pass
        (receive if direction == "out" else send)(peer)
"""


@pytest.mark.lab
@pytest.mark.parametrize("direction", ["out", "in"])
def test_the_rate_limits_both_directions_of_a_link(direction: str) -> None:
    numel, rate = 4_000_000, 64_000_000
    report = run(LabConfig(nodes=3, rate="64mbit", timeout_s=LIMIT_S), python(STAR, direction, str(numel)))
    assert report.exit_code == 0
    hub = report.ranks[0]
    moved = hub.sent_bytes if direction == "out" else hub.received_bytes
    assert moved >= 2 * numel
    assert moved * 8 / report.seconds <= 1.1 * rate


@pytest.mark.lab
def test_a_link_may_send_slower_than_it_receives() -> None:
    """Rank 0 sends to rank 1 for as long as it receives from rank 2. Sending as much would take 16 seconds."""
    code = """
        import os, socket, threading
        rank, numel = int(os.environ["RANK"]), 8_000_000
        def connected():
            while True:
                try:
                    return socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
                except ConnectionRefusedError:
                    pass
        if rank:
            peer = connected()
            peer.sendall(bytes([rank]))
            if rank == 2:
                peer.sendall(bytes(numel))
            while peer.recv(1 << 16):
                pass
        else:
            server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            peers = [server.accept()[0] for _ in range(2)]
            peers = {peer.recv(1)[0]: peer for peer in peers}
            has_all = threading.Event()
            def send():
                while not has_all.is_set():
                    peers[1].sendall(bytes(1 << 12))
            thread = threading.Thread(target=send)
            thread.start()
            while numel:
                chunk = peers[2].recv(1 << 16)
                assert chunk
                numel -= len(chunk)
            has_all.set()
            thread.join()
            for peer in peers.values(): peer.close()
    """
    report = run(LabConfig(nodes=3, up="4mbit,400mbit,400mbit", down="400mbit", timeout_s=LIMIT_S), python(code))
    assert report.exit_code == 0
    hub = report.ranks[0]
    assert hub.received_bytes >= 8_000_000
    assert hub.sent_bytes < hub.received_bytes * 3 / 4


@pytest.mark.lab
def test_ranks_of_one_host_share_its_link_and_reach_each_other_without_it(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
        import json, os, socket, time
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
        print(json.dumps([socket.gethostname(), *(int(os.environ[name]) for name in names)]))
        def connected(address):
            while True:
                try:
                    return socket.create_connection((address, 5000))
                except ConnectionRefusedError:
                    time.sleep(0.01)
        def received(peer):
            return sum(map(len, iter(lambda: peer.recv(1 << 16), b"")))
        own = socket.gethostbyname(socket.gethostname())
        rank = int(os.environ["RANK"])
        if rank % 2 == 0:  # receives from its host's other rank, and one of these from the other over the link
            server = socket.create_server((own, 5000))
            came = sorted(received(server.accept()[0]) for _ in range(2 if rank == 0 else 1))
            assert came == ([1000, 8_000_000] if rank == 0 else [8_000_000])
            if rank == 2:
                connected(os.environ["MASTER_ADDR"]).sendall(bytes(1000))
        else:
            connected(own).sendall(bytes(8_000_000))
    """
    report = run(LabConfig(nodes=2, per_node=2, rate="200mbit", timeout_s=LIMIT_S), python(code))
    assert report.exit_code == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank ")]
    seen = {int(line[6]): json.loads(line[9:]) for line in lines}
    assert seen == {rank: [f"node{rank // 2}", rank, rank % 2, 2, rank // 2, 2, 4] for rank in range(4)}
    assert [rank.exit_code for rank in report.ranks] == [0] * 4
    for rank in report.ranks:
        # Of 8 MB that one rank of a host sends the other none crosses the link; what does are 1,000 bytes.
        assert rank.sent_bytes < 100_000
        assert (rank.sent_bytes > 0) == (rank.rank % 2 == 0)


@pytest.mark.lab
def test_an_unshaped_lab_works() -> None:
    report = run(LabConfig(nodes=3, rate=None, timeout_s=LIMIT_S), python(STAR, "out", "1000000"))
    assert report.exit_code == 0
    # Nothing holds the sender back: on a busy machine a receiver cannot follow, and TCP sends some of it again.
    assert 2_000_000 <= report.ranks[0].sent_bytes < 4_000_000
    assert report.ranks[0].received_bytes < report.ranks[0].sent_bytes / 2  # acknowledgements


@pytest.mark.lab
def test_without_netem_the_error_names_the_module() -> None:
    missing = lacking(netem=True)
    if not missing:
        pytest.skip("this kernel has netem")
    assert len(missing) == 1
    assert "modprobe sch_netem" in missing[0]
    for config in (LabConfig(delay="5ms"), LabConfig(loss="0.1%")):
        assert requirements(config) == missing
        with pytest.raises(UnsupportedError, match="modprobe sch_netem"):
            run(config, ["true"])
    assert requirements(LabConfig(delay="0ms", loss="0%")) == []


@pytest.mark.lab(netem=True)
def test_a_round_trip_takes_twice_the_delay_at_least() -> None:
    code = """
        import os, socket, time
        rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
        if rank == 0:
            server = socket.create_server((address, 5000)); peer, _ = server.accept()
            while peer.recv(1): peer.sendall(b"x")
        else:
            while True:
                try:
                    peer = socket.create_connection((address, 5000)); break
                except ConnectionRefusedError:
                    pass
            for _ in range(5):
                before = time.monotonic(); peer.sendall(b"x"); peer.recv(1)
                assert time.monotonic() - before >= 0.02
    """
    assert run(LabConfig(nodes=2, delay="10ms", timeout_s=LIMIT_S), python(code)).exit_code == 0


@pytest.mark.lab(netem=True)
def test_lost_packets_are_sent_but_not_received() -> None:
    code = """
        import os, socket, time
        if os.environ["RANK"] == "1":
            out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            for _ in range(400):
                out.sendto(bytes(1000), (os.environ["MASTER_ADDR"], 5000)); time.sleep(0.001)
        else:
            time.sleep(2)
    """
    receiver, sender = run(LabConfig(nodes=2, loss="50%", timeout_s=LIMIT_S), python(code)).ranks
    assert sender.sent_packets >= 400
    assert 100 < receiver.received_packets < 300


# ------------------------------------------------------------------------------------------------ bad input


def test_an_empty_or_unknown_command_is_refused() -> None:
    with pytest.raises(ValueError, match="command is empty"):
        run(LabConfig(), [])
    with pytest.raises(ValueError, match="'no-such-program' was not found"):
        run(LabConfig(), ["no-such-program"])
    with pytest.raises(ValueError, match=r"write python train\.py"):
        run(LabConfig(), ["train.py"])
    with pytest.raises(TypeError, match="expected a list of arguments"):
        run(LabConfig(), "python train.py")


@pytest.mark.lab
def test_a_program_that_cannot_be_started_fails_like_in_a_shell(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert run(LabConfig(nodes=1), [str(script)]).exit_code == 127
    assert "cannot run" in capfd.readouterr().err


@pytest.mark.lab
def test_a_report_is_json() -> None:
    report = run(LabConfig(nodes=2), ["true"]).to_dict()
    assert json.loads(json.dumps(report)) == report
    assert sorted(report) == ["exit_code", "ranks", "seconds"]
    assert sorted(report["ranks"][1]) == [
        "exit_code",
        "rank",
        "received_bytes",
        "received_packets",
        "sent_bytes",
        "sent_packets",
    ]
