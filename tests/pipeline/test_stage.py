"""Stages under PyTorch's schedules train as boundaries in one process do, and send while they compute."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.pipeline.transfers import Transfers
from tests.pipeline.stages import BATCH, CPU, MICROBATCHES, STEPS, batch, ids, loss_fn, parts, run_step, schedule_of
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough
from tests.torches import since_2_12

#: Schedules that give the last rank the two stages in the middle, and the first rank the first and the last.
FOLDED = ("ZBVZeroBubble", "DualPipeV")


def in_one_process(rank, world_size, number, forward, backward, local=(), warm_up=None, evaluate=True, samples_of=ids):
    """Losses and parameters of the model with boundaries, of which those in ``local`` do not compress."""
    cut = parts(number)
    boundaries = [
        nb.Boundary(
            *(("none", "none") if at in local else (forward, backward)),
            index=at,
            microbatches=MICROBATCHES,
            **(warm_up or {}),
        )
        for at in range(number - 1)
    ]
    layers = [cut[0]]
    for boundary, part in zip(boundaries, cut[1:], strict=True):
        layers += [boundary, part]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for boundary in boundaries:
            boundary.set_epoch(step)
        pieces = [torch.tensor_split(t, MICROBATCHES) for t in (*batch(step), samples_of(step))]
        for x, y, samples in zip(*pieces, strict=True):
            for boundary in boundaries:
                boundary.samples = samples
            loss = loss_fn(model(x), y)
            loss.backward()
            losses.append(loss.item())
        for p in model.parameters():
            p.grad.div_(MICROBATCHES)
        optimizer.step()
    if evaluate:
        model.eval()
        with torch.no_grad():
            pieces = [torch.tensor_split(t, MICROBATCHES) for t in batch(99)]
            losses += [loss_fn(model(x), y).item() for x, y in zip(*pieces, strict=True)]
    return losses, [p.detach() for p in model.parameters()], [b.stats() for b in boundaries]


def places(name, rank, world_size):
    """The stages of a rank."""
    if name in ("GPipe", "1F1B"):
        return [rank]
    if name in FOLDED:
        return [rank, 2 * world_size - 1 - rank]
    return [rank, world_size + rank]


def on_ranks(rank, world_size, name, forward, backward, warm_up=None, samples_of=ids):
    mine = places(name, rank, world_size)
    number = world_size * len(mine)
    cut = parts(number)
    stages = [
        nb.CompressedStage(cut[at], at, number, CPU, forward=forward, backward=backward, **(warm_up or {}))
        for at in mine
    ]
    schedule = schedule_of(name, stages)
    optimizer = torch.optim.SGD([p for at in mine for p in cut[at].parameters()], lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for stage in stages:
            stage.samples = samples_of(step)
            stage.set_epoch(step)
        losses += run_step(schedule, stages, *batch(step))
        optimizer.step()
    for at in mine:
        cut[at].eval()
    if name not in FOLDED:  # PyTorch 2.13 cannot evaluate under them
        losses += run_step(schedule, stages, *batch(99), train=False)
    found = {at: [p.detach() for p in cut[at].parameters()] for at in mine}
    return losses, found, {at: stage.stats() for at, stage in zip(mine, stages, strict=True)}


def check_same(name, forward, backward, warm_up=None, world_size=4, samples_of=ids):
    ranks = run_ranks(on_ranks, world_size, name, forward, backward, warm_up, samples_of)
    number = len(ranks) * len(ranks[0][1])
    folded = name in FOLDED
    local = (number // 2 - 1,) if folded else ()  # the two stages of the last rank
    ((expected, parameters, boundaries),) = run_ranks(
        in_one_process, 1, number, forward, backward, local, warm_up, not folded, samples_of
    )
    losses = next(losses for losses, _, _ in ranks if losses)
    assert losses == expected
    found = {at: own for _, stages, _ in ranks for at, own in stages.items()}
    together = [p for at in sorted(found) for p in found[at]]
    assert all(map(torch.equal, together, parameters))
    stats = {at: own for _, _, stages in ranks for at, own in stages.items()}
    for at, boundary in enumerate(boundaries):
        if at not in local:
            assert stats[at]["forward"] == boundary["forward"]
            assert stats[at + 1]["backward"] == boundary["backward"]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("none", "none"),
        ("topk:density=0.2,scope=sample", "topk:density=0.2,scope=sample,reuse=forward"),
        ("qsgd:bits=4", "qsgd:bits=8"),
        ("topk:density=0.2+ef", "topk:density=0.2+ef"),
        ("topk:density=0.2+ef-mixed", "topk:density=0.2+ef-mixed"),
        ("topk:density=0.2+ef21", "topk:density=0.2+ef21"),
        ("qsgd:bits=4+aq-sgd", "qsgd:bits=4"),
    ],
)
@pytest.mark.parametrize("name", ["1F1B", *thorough("GPipe")])
def test_stages_train_as_boundaries_do(name, forward, backward):
    check_same(name, forward, backward)


WITH_FEEDBACK = ("qsgd:bits=4+aq-sgd:store=fp16", "topk:density=0.3+ef21")
REUSED = ("topk:density=0.3", "topk:density=0.3,reuse=forward")
TO_ITSELF = since_2_12("a rank sends to itself, which gloo cannot")


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("Interleaved1F1B", *WITH_FEEDBACK),
        ("InterleavedZeroBubble", *REUSED),
        pytest.param("ZBVZeroBubble", *WITH_FEEDBACK, marks=TO_ITSELF),
        pytest.param("DualPipeV", *REUSED, marks=TO_ITSELF),
        *thorough(("Interleaved1F1B", *REUSED), ("InterleavedZeroBubble", *WITH_FEEDBACK)),
        pytest.param("ZBVZeroBubble", *REUSED, marks=[TO_ITSELF, pytest.mark.thorough]),
        pytest.param("DualPipeV", *WITH_FEEDBACK, marks=[TO_ITSELF, pytest.mark.thorough]),
    ],
)
def test_several_stages_on_a_rank(name, forward, backward):
    check_same(name, forward, backward, world_size=2)


def test_a_schedule_that_goes_back_in_another_order():
    """LoopedBFS takes gradients of the last micro-batch first: with buffers, an error."""
    spec = "topk:density=0.3,scope=sample"
    ((losses, _, _),) = (rank for rank in run_ranks(on_ranks, 2, "LoopedBFS", spec, f"{spec},reuse=forward") if rank[0])
    ((expected, _, _),) = run_ranks(in_one_process, 1, 4, spec, f"{spec},reuse=forward")
    assert losses == pytest.approx(expected, rel=1e-5)
    with pytest.raises(RankError, match="in one order"):
        run_ranks(on_ranks, 2, "LoopedBFS", spec, "qsgd:bits=4+ef21")


def computing_while_messages_travel(rank, world_size, name):
    """On the second of two ranks: how many messages had arrived, beside its own, when each micro-batch was computed."""
    cut = parts(2)
    stage = nb.CompressedStage(cut[rank], rank, 2, CPU, forward="qsgd:bits=4", backward="qsgd:bits=4")
    schedule = schedule_of(name, [stage])
    run_step(schedule, [stage], *batch(0))  # the first step finds shapes out
    asked, found = [], []

    def irecv(tensor, *args, **kwargs):
        asked.append(tensor.fill_(255))
        return receive(tensor, *args, **kwargs)

    def waiting(module, args):
        """Goes on when the messages of two more micro-batches are there."""
        own = len(found)
        expected = min(own + 3, MICROBATCHES)
        until = time.monotonic() + 30
        while time.monotonic() < until and not (
            len(asked) >= expected and all(bool((tensor != 255).any()) for tensor in asked[:expected])
        ):
            time.sleep(0.001)
        found.append(sum(bool((tensor != 255).any()) for tensor in asked) - own - 1)

    receive = dist.irecv
    if rank == 1:
        cut[1].register_forward_pre_hook(waiting)
        dist.irecv = dist.distributed_c10d.irecv = irecv
    run_step(schedule, [stage], *batch(1))
    dist.irecv = dist.distributed_c10d.irecv = receive
    return found


def test_messages_travel_while_a_stage_computes():
    assert run_ranks(computing_while_messages_travel, 2, "GPipe")[1] == [2, 2, 1, 0]


def posted(rank, world_size, name):
    """How many sends of a step of training, and of one of evaluation, nobody has waited for, and of how many."""
    waited, made, send = [], [], dist.isend

    class Watched:
        def __init__(self, work):
            self.work = work

        def wait(self):
            self.work.wait()
            waited.append(self)

    def isend(*args, **kwargs):
        work = send(*args, **kwargs)
        if not kwargs.get("tag"):  # PyTorch's own, of shapes
            return work
        made.append(Watched(work))
        return made[-1]

    dist.isend = dist.distributed_c10d.isend = isend
    cut = parts(world_size)
    stage = nb.CompressedStage(cut[rank], rank, world_size, CPU, forward="qsgd:bits=4", backward="qsgd:bits=4")
    schedule = schedule_of(name, [stage])
    open_ends = []
    for train in (True, False):
        made.clear(), waited.clear()
        run_step(schedule, [stage], *batch(0), train)
        open_ends.append((len(set(made) - set(waited)), len(made)))
    dist.isend = dist.distributed_c10d.isend = send
    return open_ends


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_a_step_ends_when_its_messages_have_arrived(name):
    """The first stage sends activations, the last one gradients, and the one between both."""
    assert run_ranks(posted, 3, name) == [
        [(0, MICROBATCHES), (0, MICROBATCHES)],
        [(0, 2 * MICROBATCHES), (0, MICROBATCHES)],
        [(0, MICROBATCHES), (0, 0)],
    ]


def by_the_schedule(rank, world_size, name, forward, backward, *options):
    """As on a GPU, where schedules send and receive."""
    before = Transfers.by_itself, Transfers.takes_shorter
    Transfers.by_itself = Transfers.takes_shorter = False
    try:
        return on_ranks(rank, world_size, name, forward, backward, *options)
    finally:  # this process is a rank of other tests, too
        Transfers.by_itself, Transfers.takes_shorter = before


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_messages_that_schedules_send_and_receive_are_the_same(name):
    spec = "topk:density=0.3,scope=sample+ef", "topk:density=0.3+ef21"
    mine, theirs = (run_ranks(run, 2, name, *spec) for run in (on_ranks, by_the_schedule))
    assert [losses for losses, _, _ in mine] == [losses for losses, _, _ in theirs]
    assert any(losses for losses, _, _ in mine)
    for (_, here, stats), (_, there, others) in zip(mine, theirs, strict=True):
        assert all(torch.equal(a, b) for at in here for a, b in zip(here[at], there[at], strict=True))
        assert stats == others


def drawn_with_replacement(step):
    """Every sample is new, and in two micro-batches of its step: the second time its change is sent."""
    return torch.tensor([0, 1, 1, 2, 3, 0, 2, 3]) + BATCH * step


def drawn_again(step):
    """The same in every step."""
    return drawn_with_replacement(0)


@pytest.mark.parametrize("name", ["Interleaved1F1B", *thorough("InterleavedZeroBubble", "1F1B", "GPipe")])
def test_a_batch_may_hold_a_sample_twice(name):
    """Interleaved schedules receive the second of its messages before they have used the first."""
    spec = "qsgd:bits=4+aq-sgd"
    check_same(name, spec, spec, world_size=2, samples_of=drawn_with_replacement)


def test_where_schedules_receive_a_sample_may_be_twice_in_a_batch_once_both_ends_hold_it():
    name, specs = "Interleaved1F1B", ["qsgd:bits=4+aq-sgd"] * 2
    with pytest.raises(RankError, match="no sample may be in a batch twice before it has been visited"):
        run_ranks(by_the_schedule, 2, name, *specs, None, drawn_with_replacement)
    warm_up = {"warmup_steps": 1}
    mine, theirs = (run_ranks(run, 2, name, *specs, warm_up, drawn_again) for run in (on_ranks, by_the_schedule))
    assert [losses for losses, _, _ in mine] == [losses for losses, _, _ in theirs]
    assert any(losses for losses, _, _ in mine)


@pytest.mark.parametrize("counted", ["steps", "epochs"])  # a step is an epoch here
def test_warm_up(counted):
    warm_up = {f"warmup_{counted}": 2}
    check_same("1F1B", "topk:density=0.1+ef21", "topk:density=0.1+ef", warm_up, world_size=2)
