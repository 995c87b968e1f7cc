"""Exchanges by real UDP multicast on the loopback interface, over sockets that lose, forge and fall silent."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.errors import UnsupportedError
from narrowband.lab import LabConfig, requirements
from narrowband.lab import run as run_lab
from narrowband.transport import RanksLostError, connect, probe
from narrowband.transport.datagram import HEADER_BYTES, KEY_BYTES, Kind, Wire
from narrowband.transport.multicast import Multicast
from narrowband.transport.sockets import MulticastSocket, find_interface
from tests.coded.training import batch, gradient, loss_of, mlp
from tests.ranks import run_ranks

ETHERNET = 1500
LIMIT_S = 240.0  # only what hangs takes this long
SHORT_S = 1.5  # after which a rank that is silent is lost


def content(rank: int, nbytes: int, turn: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def places(rank: int, sizes: list[int]) -> list[torch.Tensor | None]:
    return [None if k == rank else torch.zeros(nbytes, dtype=torch.uint8) for k, nbytes in enumerate(sizes)]


def everything(rank: int, sizes: list[int]) -> list[list[tuple[int, int]]]:
    return [[] if k == rank or not nbytes else [(0, nbytes)] for k, nbytes in enumerate(sizes)]


@contextlib.contextmanager
def transport(socket_class: type[MulticastSocket] = MulticastSocket, **options) -> Iterator[Multicast]:
    with patch.object(probe, "MulticastSocket", socket_class):
        made = Multicast(dist.group.WORLD, **{"timeout_s": LIMIT_S, **options})
    try:
        yield made
    finally:
        made.close()


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


# ------------------------------------------------------------------------------------------------ faults


class Faulty(MulticastSocket):
    """What comes in is lost, repeated, reordered, cut, changed, made up and recorded, at random."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rng = random.Random(dist.get_rank())
        self._ready: deque[bytes] = deque()
        self._held: list[bytes] = []
        self._recorded: deque[bytes] = deque(maxlen=500)
        self._foreign = Wire(bytes(KEY_BYTES), (dist.get_rank() + 1) % dist.get_world_size(), dist.get_world_size())
        self.done: Counter[str] = Counter()
        Faulty.latest = self

    def receive(self):
        if not self._ready:
            self._fill()
        return memoryview(self._ready.popleft()) if self._ready else None

    def _fill(self):
        rng = self._rng
        while not self._ready:
            raw = super().receive()
            if raw is None:
                self._ready += self._held
                self._held = []
                return
            genuine = bytes(raw)
            if genuine[2:4] == dist.get_rank().to_bytes(2, "big"):
                continue
            self._recorded.append(genuine)
            fault = rng.choices(["none", "lost", "held", *self.MORE], [0.93, 0.01, 0.03, *[0.005] * len(self.MORE)])[0]
            self.done[fault] += 1
            if fault == "held":
                self._held.append(genuine)
            elif fault != "lost":
                self._ready += self._instead(fault, genuine)
            if self._held and rng.random() < 0.2:
                self._ready.append(self._held.pop(rng.randrange(len(self._held))))

    MORE = ("repeated", "replayed", "cut", "changed", "forged", "noise")

    def _instead(self, fault: str, genuine: bytes) -> list[bytes]:
        rng = self._rng
        others = {
            "none": [],
            "repeated": [genuine],
            "replayed": [rng.choice(self._recorded)],
            "cut": [genuine[: rng.randrange(len(genuine))]],
            "changed": [self._changed(genuine)],
            "forged": [self._forged(genuine)],
            "noise": [rng.randbytes(rng.randrange(2000))],
        }
        return others[fault] + ([] if fault == "changed" else [genuine])

    def _changed(self, genuine: bytes) -> bytes:
        changed = bytearray(genuine)
        changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _forged(self, genuine: bytes) -> bytes:
        """The next chunk with other content, by who does not know the key."""
        index, exchange = int.from_bytes(genuine[4:8], "big"), int.from_bytes(genuine[8:16], "big")
        payload = bytes(len(genuine) - HEADER_BYTES)
        return self._foreign.header(Kind.DATA, index + 1, exchange, payload) + payload


def train(rank, world, steps, socket_class):
    """Every step's buffers are made of all that came in the step before: a wrong byte would spread to all of them."""
    numel = 7_001
    with transport(socket_class, mtu=ETHERNET) as multicast:
        x = torch.arange(numel, dtype=torch.int32) * (rank + 1)
        for _ in range(steps):
            outgoing = x.view(torch.uint8)
            incoming = places(rank, [4 * numel] * world)
            multicast.exchange(outgoing, incoming, everything(rank, [4 * numel] * world))
            x = mixed(rank, [x if b is None else b.view(torch.int32) for b in incoming])
        statistics = multicast.statistics
    done = socket_class.latest.done if socket_class is Faulty else Counter()
    return x, statistics, done


def mixed(rank: int, buffers: list[torch.Tensor]) -> torch.Tensor:
    total = buffers[rank].roll(1)
    for k, buffer in enumerate(buffers):
        total = total * 31 + buffer * (k + 1)
    return total


def trained_locally(world: int, steps: int) -> list[torch.Tensor]:
    xs = [torch.arange(7_001, dtype=torch.int32) * (rank + 1) for rank in range(world)]
    for _ in range(steps):
        xs = [mixed(rank, xs) for rank in range(world)]
    return xs


def test_no_fault_of_the_network_changes_a_bit_in_500_exchanges():
    world, steps = 3, 500
    expected = trained_locally(world, steps)
    for rank, (x, statistics, done) in enumerate(run_ranks(train, world, steps, Faulty, timeout_s=LIMIT_S)):
        assert torch.equal(x, expected[rank])
        assert statistics.exchanges == steps
        bad = sum(done[fault] for fault in ("cut", "changed", "forged", "noise"))
        assert statistics.rejected_datagrams >= 0.95 * bad  # one that now claims to be the rank's own is not counted
        assert statistics.repeated_datagrams >= 0.5 * done["repeated"]  # not all of them are chunks
        assert statistics.repair_datagrams > 0
        assert min(done.values()) > 0
        assert done["lost"] > 0.005 * done["none"]


def test_without_faults_nothing_is_rejected_and_the_bits_are_the_same():
    for x, statistics, _ in run_ranks(train, 3, 20, MulticastSocket, timeout_s=LIMIT_S):
        assert any(torch.equal(x, expected) for expected in trained_locally(3, 20))
        assert statistics.rejected_datagrams == 0


# ------------------------------------------------------------------------------------------------ ranks that are lost


class Dying(MulticastSocket):
    """As if its process were killed after so many datagrams."""

    left = 1 << 60

    def send(self, header, payload=b""):
        Dying.left -= 1
        return True if Dying.left < 0 else super().send(header, payload)

    def receive(self):
        return super().receive() if Dying.left >= 0 else None


def lose_a_rank(rank, world, how):
    sizes = [300_000] * world
    outcome = []
    with transport(Dying, mtu=ETHERNET, timeout_s=SHORT_S) as multicast:
        multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        if rank == 1:
            if how == "late":
                time.sleep(2 * SHORT_S)
            elif how == "killed":
                Dying.left = 50
            elif how == "silent":
                Dying.left = 0
        try:
            multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        except RuntimeError as error:
            outcome = [type(error), getattr(error, "ranks", None), str(error)]
            with pytest.raises(RuntimeError, match=r"lost|brought nothing|gave up"):
                multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
    Dying.left = 1 << 60
    return outcome


@pytest.mark.parametrize("how", ["killed", "silent", "late"])
def test_a_rank_that_brings_nothing_is_named_on_all_others(how):
    outcomes = run_ranks(lose_a_rank, 3, how, timeout_s=LIMIT_S)
    for kind, ranks, message in (outcomes[0], outcomes[2]):
        assert kind is RanksLostError
        assert ranks == (1,)
        assert "rank 1" in message
    told = " ".join(message for _, _, message in (outcomes[0], outcomes[2]))
    assert f"brought nothing for {SHORT_S:g} s in exchange 2" in told
    if how == "late":
        assert "rank 1 answers, so it is late" in told
        assert "waited" in outcomes[1][2]
        assert "for this rank and gave up" in outcomes[1][2]


def close_early(rank, world):
    sizes = [100_000] * world
    with transport(mtu=ETHERNET) as multicast:
        multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        if rank == 2:
            return None
        with pytest.raises(RanksLostError) as caught:
            multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        return caught.value.ranks, str(caught.value)


def test_a_rank_that_has_closed_is_named_at_once():
    *others, closed = run_ranks(close_early, 3, timeout_s=LIMIT_S)
    assert closed is None
    for ranks, message in others:
        assert ranks == (2,)
        assert "rank 2" in message
    assert any("rank 2 closed the transport before exchange 2" in message for _, message in others)


def interrupt(rank, world):
    sizes = [100_000] * world
    with transport(mtu=ETHERNET) as multicast:
        if rank == 0:
            incoming = places(rank, sizes)

            def on_alarm(*_):
                raise KeyboardInterrupt

            before = signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                with pytest.raises(KeyboardInterrupt):
                    multicast.exchange(content(rank, sizes[0]), incoming, everything(rank, sizes))
            finally:
                signal.signal(signal.SIGALRM, before)
            with pytest.raises(RuntimeError, match="closed"):
                multicast.exchange(content(rank, sizes[0]), incoming, everything(rank, sizes))
            dist.barrier()
            return bool(incoming[1].any())
        dist.barrier()  # its data would come now
        with pytest.raises(RanksLostError, match="rank 0 closed the transport before exchange 1"):
            multicast.exchange(content(rank, sizes[0]), places(rank, sizes), everything(rank, sizes))
        return None


def test_after_ctrl_c_nothing_is_written_and_the_others_know():
    assert run_ranks(interrupt, 2, timeout_s=LIMIT_S) == [False, None]


def exchange_other_sizes(rank, world):
    sizes = [20_000] * world
    mine = 20_001 if rank == 1 else 20_000
    with transport(mtu=ETHERNET) as multicast:
        for _ in range(2):  # rank 1, which got what it wanted, may hear of it in the next one only
            try:
                multicast.exchange(content(rank, mine), places(rank, sizes), everything(rank, sizes))
            except RuntimeError as error:
                return str(error)
    return ""


def test_buffers_of_other_sizes_than_expected_are_an_error_on_all_ranks():
    messages = run_ranks(exchange_other_sizes, 2, timeout_s=LIMIT_S)
    assert "rank 1 sends a buffer of another size than the 20000 bytes" in messages[0]
    assert messages[1]


def misuse(rank, world):
    sizes = [100] * world
    with transport() as multicast:
        with pytest.raises(ValueError, match="uint8"):
            multicast.exchange(torch.zeros(100), places(rank, sizes), everything(rank, sizes))
        with pytest.raises(ValueError, match="ascending ranges"):
            multicast.exchange(
                content(rank, 100), places(rank, sizes), [[(50, 101)] if k != rank else [] for k in (0, 1)]
            )
        multicast.exchange(content(rank, 100), places(rank, sizes), everything(rank, sizes))  # nothing has happened


def test_arguments_that_cannot_be_meant_are_refused_before_anything_is_sent():
    run_ranks(misuse, 2, timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0"),
        ({"ttl": 0}, "ttl is 0"),
        ({"mtu": 100}, "mtu is 100"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Multicast(None, **options)


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


LAB_MISSING = requirements(LabConfig(nodes=1))

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


@pytest.mark.skipif(bool(LAB_MISSING), reason=" ".join(LAB_MISSING))
def test_over_a_switch_a_buffer_passes_its_senders_link_once(capfd):
    world, nbytes = 3, 3_000_000
    report = run_lab(
        LabConfig(nodes=world, rate="200mbit", timeout_s=LIMIT_S),
        [sys.executable, "-c", textwrap.dedent(IN_LAB), str(nbytes)],
        env={"PYTHONPATH": str(Path(nb.__file__).parents[1])},
    )
    assert report.exit_code == 0, capfd.readouterr().err
    for line in capfd.readouterr().out.splitlines():
        rank, counted = json.loads(line.partition("] ")[2])
        sent = report.ranks[rank].sent_bytes
        assert counted <= sent <= counted + 60_000  # gloo's connections, the store, and the group's membership
        assert nbytes <= sent <= 1.1 * nbytes
        assert report.ranks[rank].received_bytes >= (world - 1) * nbytes


# ------------------------------------------------------------------------------------------------ where it ends


class Deaf(MulticastSocket):
    """Rank 1 does not hear rank 0."""

    def receive(self):
        while (raw := super().receive()) is not None:
            if dist.get_rank() != 1 or raw[2:4] != b"\0\0":
                return raw
        return None


def probe_deaf(rank, world):
    with patch.object(probe, "MulticastSocket", Deaf), pytest.raises(UnsupportedError) as caught:
        Multicast(dist.group.WORLD, probe_s=0.5)
    return str(caught.value)


def test_multicast_that_does_not_reach_everybody_is_refused_alike_on_all_ranks():
    messages = set(run_ranks(probe_deaf, 3, timeout_s=LIMIT_S))
    assert len(messages) == 1
    assert "rank 1: nothing came from rank 0 (127.0.0.1)" in messages.pop()


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


# ------------------------------------------------------------------------------------------------ choosing it


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


@contextlib.contextmanager
def capture() -> Iterator[list[str]]:
    """Warnings of the library's log."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("narrowband")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def test_auto_takes_multicast_where_it_reaches_all_ranks():
    assert run_ranks(choose, 3, MulticastSocket, timeout_s=LIMIT_S) == [(["multicast"] * 2, [])] * 3


def test_auto_takes_broadcast_with_a_warning_where_it_does_not():
    for rank, ((auto, multicast), messages) in enumerate(run_ranks(choose, 3, Deaf, timeout_s=LIMIT_S)):
        assert auto == "broadcast"
        assert "rank 1: nothing came from rank 0" in multicast
        assert len(messages) == (rank == 0)
        assert all("by broadcast: multicast does not reach all ranks" in message for message in messages)


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
