"""Datagrams that are lost, repeated, reordered, cut, changed or made up change no bit."""

from __future__ import annotations

import random
from collections import Counter, deque

import torch
import torch.distributed as dist

from narrowband.transport.datagram import HEADER_BYTES, KEY_BYTES, Framing, Kind
from narrowband.transport.sockets import MulticastSocket
from tests.ranks import run_ranks
from tests.transport.exchanges import ETHERNET, LIMIT_S, everything, places, transport


class Faulty(MulticastSocket):
    """What comes in is lost, repeated, reordered, cut, changed, made up and recorded, at random."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rng = random.Random(dist.get_rank())
        self._ready: deque[bytes] = deque()
        self._held: list[bytes] = []
        self._recorded: deque[bytes] = deque(maxlen=500)
        self._foreign = Framing(bytes(KEY_BYTES), (dist.get_rank() + 1) % dist.get_world_size(), dist.get_world_size())
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


def test_no_fault_of_the_network_changes_a_bit_in_150_exchanges():
    world, steps = 3, 150
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
