"""The contract of transports, on real gloo processes: what was wanted arrives, what cannot be meant is refused."""

from __future__ import annotations

import signal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.transport import TRANSPORTS, Broadcast, connect
from tests.coded.training import batch, gradient, loss_of, mlp
from tests.gradients.training import refusal
from tests.ranks import run_ranks

#: Bytes that rank k sends, and what the others want of them.
SIZES = [1000, 1, 70_000, 4096]
WANTED = {
    "everything": lambda k, _: [(0, SIZES[k])],
    "ranges": lambda k, rank: [(rank, rank + 3), (500, 501), (600, 999)] if SIZES[k] > 999 else [],
    "neighbours": lambda k, rank: [(0, SIZES[k])] if (k + 1) % 4 == rank else [],
    "nothing": lambda *_: [],
}


def content(k, call):
    return torch.randint(256, (SIZES[k],), dtype=torch.uint8, generator=torch.Generator().manual_seed(10 * call + k))


def exchanged(rank, world_size, names):
    transport = Broadcast(dist.group.WORLD)
    wrong = []
    for call, name in enumerate(names):
        wanted = [[] if k == rank else WANTED[name](k, rank) for k in range(world_size)]
        incoming = [None if k == rank else torch.full((SIZES[k],), 7, dtype=torch.uint8) for k in range(world_size)]
        outgoing = content(rank, call)
        transport.exchange(outgoing, incoming, wanted)
        outgoing.zero_()  # it may be changed now
        for k, ranges in enumerate(wanted):
            for start, stop in ranges:
                if not torch.equal(incoming[k][start:stop], content(k, call)[start:stop]):
                    wrong.append((name, k, start, stop))
    transport.close()
    transport.close()
    return wrong


def test_what_is_wanted_arrives_whatever_that_is():
    names = ["everything", "ranges", "neighbours", "everything", "nothing", "ranges", "neighbours"]
    assert run_ranks(exchanged, 4, names) == [[]] * 4


def refusals(rank, world_size):
    transport = Broadcast(dist.group.WORLD)
    out = torch.zeros(8, dtype=torch.uint8)
    other = 1 - rank

    def attempt(outgoing=out, buffer=out, ranges=((0, 8),), own=None, mine=(), short=False):
        incoming, wanted = [own, own], [list(mine), list(mine)]
        incoming[other], wanted[other] = buffer, list(ranges)
        if short:
            wanted.pop()
        return refusal(lambda: transport.exchange(outgoing, incoming, wanted))

    return [
        attempt(outgoing=out.int()),
        attempt(outgoing=out.view(2, 4)),
        attempt(buffer=torch.zeros(16, dtype=torch.uint8)[::2]),
        attempt(buffer=None),
        attempt(ranges=((0, 9),)),
        attempt(ranges=((4, 4),)),
        attempt(ranges=((4, 6), (5, 8))),
        attempt(own=out),
        attempt(mine=((0, 1),)),
        attempt(short=True),
        refusal(lambda: connect("pigeon", dist.group.WORLD)),
    ]


def test_what_cannot_be_meant_is_refused_before_anything_is_sent():
    for found in run_ranks(refusals, 2):
        assert [kind for kind, _ in found] == ["ValueError"] * len(found)
        texts = [text for _, text in found]
        assert all("flat, contiguous and uint8" in text for text in texts[:3])
        assert "own entry may be None" in texts[3]
        assert all("are not ascending ranges of the 8 bytes" in text for text in texts[4:7])
        assert all("cannot receive from itself" in text for text in texts[7:9])
        assert "takes 2 incoming buffers and 2 lists of ranges, not 2 and 1" in texts[9]
        assert f"transport='pigeon'; expected one of {', '.join(TRANSPORTS)}" in texts[10]


def alone(rank, world_size):
    transport = Broadcast(dist.new_group())  # one that nothing else uses: whose exchange breaks off destroys it
    wanted = [[] if k == rank else [(0, 4)] for k in range(world_size)]
    incoming = [None if k == rank else torch.zeros(4, dtype=torch.uint8) for k in range(world_size)]
    transport.exchange(torch.zeros(4, dtype=torch.uint8), incoming, wanted)
    if rank == 1:
        dist.destroy_process_group()  # is gone before the next one
        return None
    return refusal(lambda: transport.exchange(torch.zeros(4, dtype=torch.uint8), incoming, wanted))


def test_a_rank_that_is_gone_is_an_error_for_the_others():
    first, gone, last = run_ranks(alone, 3)
    assert gone is None
    assert first[0] in ("RuntimeError", "DistBackendError")
    assert last[0] in ("RuntimeError", "DistBackendError")


def ended(rank, world_size, transport):
    model = nb.CodedDataParallel(mlp(), 2, transport)
    x, y = model.split(*batch(0, 12))
    loss_of(model(x), y).backward()
    dist.destroy_process_group()
    without_group = refusal(lambda: loss_of(model(x), y).backward())
    model.transport.close()
    model.transport.close()
    return without_group, refusal(lambda: loss_of(model(x), y).backward())


@pytest.mark.parametrize("transport", ["broadcast", "multicast"])
def test_a_process_group_that_is_destroyed_and_a_transport_that_is_closed_are_named(transport):
    for rank, (without_group, closed) in enumerate(run_ranks(ended, 3, transport)):
        assert closed[0] == "RuntimeError"
        if transport == "multicast":  # uses the group at set-up only
            assert without_group is None
            assert closed[1] == "the multicast transport is closed"
        else:
            assert without_group[0] == "RuntimeError"
            assert without_group[1].startswith(f"the process group was destroyed on rank {rank}")
            assert "an earlier exchange broke off" in closed[1]


def closed(rank, world_size):
    model = nb.CodedDataParallel(mlp(), 2, "broadcast")
    x, y = model.split(*batch(0, 12))
    model.transport.close()
    return refusal(lambda: loss_of(model(x), y).backward())


def closed_in_an_exchange(rank, world_size):
    """Whether the default process group is there after a signal's handler closed a transport and ended the exchange."""
    transport = Broadcast(dist.new_group())

    def interrupted(*_):
        transport.close()
        raise KeyboardInterrupt

    with patch.object(transport, "_exchange", interrupted), pytest.raises(KeyboardInterrupt):
        transport.exchange(torch.zeros(8, dtype=torch.uint8), [None], [[]])
    return dist.is_initialized()


def test_a_transport_that_is_closed_in_an_exchange_ends_no_other_group():
    assert run_ranks(closed_in_an_exchange, 1) == [True]


def test_nothing_is_sent_through_a_closed_transport():
    assert run_ranks(closed, 3) == [("RuntimeError", "the broadcast transport is closed")] * 3


def among_some(rank, world_size):
    """Two of five ranks do nothing; the others are 0, 1 and 2 among themselves."""
    members = [1, 2, 4]
    group = dist.new_group(members)
    if rank not in members:
        return None
    model = nb.CodedDataParallel(mlp(), 2, process_group=group)
    x, y = model.split(*batch(0, 12))
    loss_of(model(x), y).backward()
    return gradient(model)


def test_some_of_the_ranks_may_train_a_model_of_their_own():
    results = run_ranks(among_some, 5)
    assert [result is None for result in results] == [True, False, False, True, False]
    assert torch.equal(results[1], results[2])
    assert torch.equal(results[1], results[4])


class Counted(Broadcast):
    """A transport of the user's own."""

    name = "counted"
    sent = 0
    closed = 0

    def exchange(self, outgoing, incoming, wanted):
        self.sent += outgoing.numel()
        super().exchange(outgoing, incoming, wanted)

    def close(self):
        self.closed += 1
        super().close()


def with_ones_own(rank, world_size):
    transport = Counted(dist.group.WORLD)
    model = nb.CodedDataParallel(mlp(), 2, transport)
    x, y = model.split(*batch(0, 12))
    loss_of(model(x), y).backward()
    counted = transport.sent == model.stats().total.sent_bytes > 0
    del model
    return counted, transport.closed


def test_a_transport_of_ones_own_sees_every_byte_and_is_closed_with_the_model():
    assert run_ranks(with_ones_own, 3) == [(True, 1)] * 3


def interrupted(rank, world_size, where):
    """Ctrl-C on rank 1 in the middle of an exchange, or between two exchanges of one step. Its process lives on, until
    the others have said what they got.
    """
    model = nb.CodedDataParallel(mlp(), 2, "broadcast")

    def step(at):
        x, y = model.split(*batch(at, 24))
        # A gradient that is suddenly so large that the step is exchanged twice.
        (loss_of(model(x), y) * (1e6 if at == 1 and where == "between exchanges" else 1.0)).backward()

    def anew():
        nonlocal model
        model = nb.CodedDataParallel(mlp(), 2, "broadcast")
        step(3)
        return gradient(model)

    step(0)
    others = dist.new_group([rank for rank in range(world_size) if rank != 1])
    if rank != 1:
        told = refusal(lambda: step(1))
        dist.barrier(others)  # all have heard of it while rank 1 waits
        dist.barrier()
        return told, refusal(lambda: step(2)), anew()
    received, passes, calls = dist.batch_isend_irecv, model._average._exchange._pass, []

    def stopping(operations):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return received(operations)

    def stopping_after(*given):
        found = passes(*given)
        signal.raise_signal(signal.SIGINT)
        return found

    in_exchange = patch.object(dist, "batch_isend_irecv", stopping)
    between = patch.object(model._average._exchange, "_pass", stopping_after)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with between if where == "between exchanges" else in_exchange, pytest.raises(KeyboardInterrupt) as caught:
            step(1)
    finally:
        signal.signal(signal.SIGINT, before)
    dist.barrier()
    return str(caught.value), refusal(lambda: step(2)), anew()


@pytest.mark.parametrize("where", ["in an exchange", "between exchanges"])
def test_ctrl_c_in_a_step_ends_it_on_all_ranks_although_the_process_lives_on(where):
    results = run_ranks(interrupted, 4, where)
    for rank, (told, then, averages) in enumerate(results):
        assert torch.equal(averages, results[0][2])
        if rank != 1:
            assert told[0] == "RuntimeError"
            assert f"the exchange broke off on rank {rank}: another rank has ended, was stopped" in told[1]
        assert then == (
            "RuntimeError",
            "an earlier exchange broke off, so there can be no other; wrap the model again on all ranks",
        )
