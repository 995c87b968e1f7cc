"""Describe an option (a way to train), build the step that it makes, and predict its duration by simulation.

A step has the messages that :mod:`narrowband.averaging.step` sends. Ranks first compare eight bytes. Payloads of
several buckets are joined into one message until a rank has ``message_nbytes`` to send. Small parameters are sent
uncompressed at the end, or earlier if there are many. The numbers of bytes are those that the library's collectives
report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowband.averaging.settings import MESSAGE_NBYTES
from narrowband.collectives import Exchange, LayerCollectives, Sent, all_gather_nbytes, all_reduce_nbytes, collective
from narrowband.feedback import Compression, compression
from narrowband.planning.links import PAYLOAD_SHARE, Cluster, Host, Link
from narrowband.planning.profile import Bucket, Line, Piece, Profile
from narrowband.planning.shares import of_a_round, sent_whole, share_of
from narrowband.planning.simulation import Arrival, Inside, Machine, Message, Outcome, Step, Transfer, simulate

__all__ = ["DDP", "Network", "Option", "Predicted", "averaged_by_rank", "predict", "way_of"]

#: The name of DistributedDataParallel without a communication hook.
DDP = "DDP, float32"

#: Bytes that each rank sends in the comparison of ranks before a step.
_AGREEMENT_NBYTES = 8

#: Bytes of the flag behind the small parameters, one float32.
_FLAG_NBYTES = 4

#: How often a bucket is copied on two levels: on the way in, into rows and out of the sums; on the way out, its
#: averages into rows and back.
_COPIES_IN, _COPIES_OUT = 2, 2

#: How long a round takes besides its exchange, in copies of the model: updates are differences to a copy, their mean is
#: checked and added, and parameters are copied and summed up for the next round. For a GPT of 13 million parameters on
#: one core, this was 4 copies; DiLoCo's outer step takes 4 more, and residuals in place 3 more.
_COPIES_OF_A_ROUND = 6


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
        spec: codec and feedback; None: plain DDP.
        levels: whether gradients are summed inside each machine first.
        every: optimizer steps from one round of updates to the next; 0: send gradients, in every step.
    """

    spec: str | None
    levels: bool = False
    every: int = 0

    @property
    def compresses(self) -> bool:
        """Whether the option loses more than 16 bits do, or sends less often than every step."""
        return bool(self.every) or self.spec not in (None, "none", "fp16", "bf16")

    @property
    def name(self) -> str:
        """The option's name in tables and sentences."""
        name = DDP if self.spec is None else self.spec
        if self.every:
            name = f"updates every {self.every}, {name}" if self.every > 1 else f"updates, {name}"
        return f"{name}, two levels" if self.levels else name


@dataclass(frozen=True)
class Network:
    """The links between ranks, and the cores that they have.

    Attributes:
        link: of every machine.
        cluster: the machines and ranks that train.
        host: the cost of messages in a machine's software.
        cores: of a machine, for all its ranks.
        slots: collectives that a process group runs at the same time: 2 with gloo, 1 with NCCL.
    """

    link: Link
    cluster: Cluster
    host: Host
    cores: float
    slots: int = 2

    def machine(self, threads: int) -> Machine:
        """Return the resources of one rank."""
        return Machine(
            rate=self.link.rate * PAYLOAD_SHARE / 8,
            cores=self.cores / self.cluster.per_node,
            threads=threads,
            cpu_s_per_byte=self.host.cpu_s_per_byte,
            slots=self.slots,
        )


@dataclass(frozen=True)
class Predicted:
    """The predicted time, traffic and memory of an option.

    Attributes:
        option: the option.
        collective: the collective that layers are sent by.
        outcome: seconds of a step; with rounds, on average.
        sent_nbytes: bytes that a rank sends in a step, as its handle counts them. If ranks send different numbers, this
            is their mean, and on two levels the number of the rank that sends most.
        link_nbytes: bytes that a machine's link carries in each direction.
        residual_nbytes: memory on a rank for feedback, and for the copy that updates are differences to.
    """

    option: Option
    collective: str
    outcome: Outcome
    sent_nbytes: float
    link_nbytes: float
    residual_nbytes: int


def averaged_by_rank(profile: Profile, option: Option, cluster: Cluster) -> tuple[Profile, int]:
    """Return the profile of what one rank averages, and among how many ranks.

    This is the whole model among all ranks, or on two levels the rank's shards among one rank per machine.
    """
    if not (option.levels and cluster.per_node > 1):
        return profile, cluster.ranks
    chosen = compression("none" if option.spec is None else option.spec)
    return share_of(profile, chosen, cluster.nodes, cluster.per_node), cluster.nodes


def way_of(profile: Profile, spec: str, ranks: int) -> type[Exchange]:
    """Return the collective that training would choose for all layers with a spec."""
    chosen = compression(spec)
    return LayerCollectives([(chosen, shape) for _, shape in profile.layers], ranks).of(chosen)


def predict(profile: Profile, option: Option, network: Network) -> Predicted:
    """Simulate a step of an option.

    Raises:
        KeyError: the codec was not measured with the collective that it would use.
    """
    machine = network.machine(profile.threads)
    if option.every:
        return _Messages(of_a_round(profile), option, network).with_rounds(machine)
    messages = _Messages(profile, option, network)
    step = Step(
        profile.forward_s + profile.backward_s,
        messages.arrivals([profile.forward_s + bucket.ready_s for bucket in profile.buckets]),
        profile.optimizer_s,
        transaction=messages.stateful,
    )
    outcome = simulate(step, machine)
    return Predicted(option, messages.collective, outcome, messages.sent_nbytes, step.nbytes, messages.residual_nbytes)


class _Messages:
    """The messages of one option."""

    def __init__(self, profile: Profile, option: Option, network: Network) -> None:
        self._option, self._network = option, network
        self._levels = option.levels and network.cluster.per_node > 1
        self._profile, self._size = averaged_by_rank(profile, option, network.cluster)
        self._chosen = None if option.spec is None else compression(option.spec)
        self.stateful = self._chosen is not None and self._chosen.feedback is not None
        self._whole = self._chosen is None or sent_whole(self._chosen)
        self.sent_nbytes = 0.0
        self.residual_nbytes = 0
        self._kind = collective("all_reduce")
        self._pieces: Sequence[Piece] = [Piece() for _ in profile.buckets]
        self._index = {each.name: at for at, each in enumerate(self._profile.trained)}
        if self._chosen is not None and not self._whole:
            self._use(self._chosen)

    def _use(self, chosen: Compression) -> None:
        profile, size = self._profile, self._size
        self._kind = LayerCollectives([(chosen, shape) for _, shape in profile.layers], size).of(chosen)
        if size > 1 and profile.layers:
            codec = profile.codec(str(self._option.spec), self._kind.name)
            self._pieces, self.residual_nbytes = codec.pieces, codec.residual_nbytes

    @property
    def collective(self) -> str:
        """The name of the collective that layers are sent by."""
        return self._kind.name

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def with_rounds(self, machine: Machine) -> Predicted:
        """Predict a step with rounds. No part of a round overlaps with compute: it begins after the optimizer step.

        The few kilobytes by which ``outer="auto"`` measures a length in some rounds are left out.
        """
        profile, every = self._profile, self._option.every
        copies_s = _COPIES_OF_A_ROUND * sum(bucket.copy_s for bucket in profile.buckets)
        step = Step(0.0, self.arrivals([0.0 for _ in profile.buckets]), transaction=self.stateful)
        took = simulate(step, machine)
        outcome = Outcome(
            profile.compute_s + (took.step_s + copies_s) / every,
            profile.compute_s,
            (took.codec_s + copies_s) / every,
            took.wire_s / every,
            took.latency_s / every,
        )
        copies = 4 * profile.numel
        sent, link = self.sent_nbytes / every, step.nbytes / every
        return Predicted(self._option, self.collective, outcome, sent, link, self.residual_nbytes + copies)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def arrivals(self, times: Sequence[float]) -> tuple[Arrival, ...]:
        """Return the arrivals of the buckets, which are complete at these times, with the messages that they cause."""
        if self._size == 1 and not self._levels:
            return ()
        found: list[Arrival] = []
        held: list[tuple[Bucket, Piece]] = []
        buckets = self._profile.buckets
        early = not self._whole and self.stateful and self._kind.decided_by_encoding
        for at, (bucket, at_s) in enumerate(zip(buckets, times, strict=True)):
            last = at == len(buckets) - 1
            messages = [self._agreement()] if not at and self._chosen is not None else []
            piece = self._pieces[at]
            if self._whole and bucket.numel:
                messages.append(self._dense(4 * bucket.numel, bucket.divide_s))
            elif not self._whole:
                held += [(bucket, piece)] if bucket.layers else []
                vectors = list(bucket.vectors)
                if last and early:
                    vectors = [*vectors[:-1], (vectors[-1] if vectors else 0) + _FLAG_NBYTES]
                messages += [self._dense(nbytes) for nbytes in vectors if nbytes]
                if held and (last or self._first_nbytes(held) >= MESSAGE_NBYTES):
                    messages.append(self._message(held, decides=not early))
                    held = []
            encode_s = self._seconds(piece.encode)
            found.append(Arrival(at_s, encode_s, tuple(messages), self._inside(bucket, last=last)))
        return tuple(found)

    def _agreement(self) -> Message:
        nbytes = all_gather_nbytes(_AGREEMENT_NBYTES, self._size)
        return Message(0.0, (self._transfer("all_gather", nbytes),), (0.0,), exclusive=True)

    def _dense(self, nbytes: int, begin_s: float = 0.0) -> Message:
        """Return an uncompressed all-reduce."""
        sent = all_reduce_nbytes(nbytes, self._size)
        return Message(begin_s, (self._transfer("all_reduce", sent),), (0.0,))

    def _layers(self, held: Sequence[tuple[Bucket, Piece]]) -> list[Sent]:
        assert self._chosen is not None
        codec, index = self._chosen.codec, self._index
        return [Sent(codec, shape, index.get(name, 0)) for bucket, _ in held for name, shape in bucket.layers]

    def _first_nbytes(self, held: Sequence[tuple[Bucket, Piece]]) -> float:
        assert self._chosen is not None
        return self._kind.first_of(self._layers(held), self._size, self._chosen.feedback)

    def _message(self, held: Sequence[tuple[Bucket, Piece]], *, decides: bool) -> Message:
        assert self._chosen is not None
        piece = Piece.together([piece for _, piece in held])
        sent = self._kind.message_nbytes(self._layers(held), self._size, self._chosen.feedback)
        in_pairs = self._kind.name == "all_gather" and self._kind.uses_pairs(self._size)
        transfers = [
            self._transfer(name, nbytes, in_pairs=in_pairs or name == "all_to_all")
            for name, nbytes in zip(piece.calls, sent, strict=True)
        ]
        return Message(
            self._seconds(piece.begin),
            tuple(transfers),
            tuple(map(self._seconds, piece.work)),
            self._seconds(piece.deliver),
            decides=decides,
        )

    def _seconds(self, line: Line) -> float:
        return line.at(self._size)

    def _transfer(self, name: str, nbytes: float, *, in_pairs: bool = False) -> Transfer:
        """Return one collective, and count the bytes that a rank sends. ``in_pairs``: by messages from rank to rank."""
        self.sent_nbytes += nbytes
        cluster = self._network.cluster
        hops = (2 if name == "all_reduce" else 1) * (self._size - 1)
        latency_s = hops * self._network.host.hop_s + self._crossings(name, hops) * self._network.link.delay_s
        if self._levels:
            nbytes *= cluster.per_node  # each rank of a machine sends its part over the shared link
        elif name == "all_to_all" and cluster.per_node > 1:  # unlike in a ring, all ranks of a machine use its link
            nbytes *= cluster.per_node * (cluster.ranks - cluster.per_node) / (cluster.ranks - 1)
        elif cluster.nodes == 1:
            nbytes = 0.0
        return Transfer(nbytes, latency_s, "pairs" if in_pairs else "group")

    def _crossings(self, name: str, hops: int) -> int:
        """Return how many of these successive hops go to another machine."""
        cluster = self._network.cluster
        if cluster.nodes == 1:
            return 0
        if self._levels or cluster.per_node == 1:
            return hops
        if name == "all_to_all":  # to the ranks 1, 2, … places ahead, which are mostly on other machines
            return hops - cluster.per_node + 2
        return -(-hops // cluster.per_node)  # around a ring, the last rank of a machine sends to the next machine

    def _inside(self, bucket: Bucket, *, last: bool) -> Inside | None:
        if not self._levels:
            return None
        hops = 2 * (self._network.cluster.per_node - 1)
        waits_s = hops * self._network.host.hop_s  # a small all-reduce, after which all have written
        flag_s = waits_s if last else 0.0  # whether all that the ranks of the machine have summed is finite
        return Inside(_COPIES_IN * bucket.copy_s + waits_s + flag_s, _COPIES_OUT * bucket.copy_s + waits_s)
