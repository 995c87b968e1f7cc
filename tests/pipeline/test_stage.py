"""Stages on real processes, under PyTorch's schedules: the same losses as boundaries in one process, to the bit."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from tests.ranks import RankError, run_ranks

MICROBATCHES = 4
BATCH = 8
STEPS = 4
CPU = torch.device("cpu")


def parts(number):
    """A model in so many parts."""
    torch.manual_seed(0)
    later = (nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(number - 1))
    return [nn.Linear(10, 24), *later]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 24, generator=generator)


def ids(step):
    """An epoch of two steps, in another order every time."""
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(step // 2))
    return order + BATCH * (step % 2)


def loss_fn(output, target):
    return (output - target).square().mean()


def in_one_process(rank, world_size, number, forward, backward, local=(), warm_up=None, evaluate=True):
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
        pieces = [torch.tensor_split(t, MICROBATCHES) for t in (*batch(step), ids(step))]
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


def schedule_of(name, stages):
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(name)
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(given, MICROBATCHES, loss_fn=loss_fn)


def places(name, rank, world_size):
    """The stages of a rank."""
    if name in ("GPipe", "1F1B"):
        return [rank]
    if name == "ZBVZeroBubble":
        return [rank, 2 * world_size - 1 - rank]
    return [rank, world_size + rank]


def on_ranks(rank, world_size, name, forward, backward, warm_up=None):
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
            stage.samples = ids(step)
            stage.set_epoch(step)
        losses += run_step(schedule, stages, *batch(step))
        optimizer.step()
    for at in mine:
        cut[at].eval()
    if name != "ZBVZeroBubble":  # PyTorch 2.13 cannot evaluate under it
        losses += run_step(schedule, stages, *batch(99), train=False)
    found = {at: [p.detach() for p in cut[at].parameters()] for at in mine}
    return losses, found, {at: stage.stats() for at, stage in zip(mine, stages, strict=True)}


def run_step(schedule, stages, x, y, train=True):
    """One step of the schedule; on the last stage's rank, a loss for every micro-batch."""
    losses = []
    arguments = [x] if any(stage.is_first for stage in stages) else []
    last = {"target": y, "losses": losses} if any(stage.is_last for stage in stages) else {}
    if train:
        schedule.step(*arguments, **last)
    else:
        with torch.no_grad():
            schedule.eval(*arguments, **last)
    return [loss.item() for loss in losses]


def check_same(name, forward, backward, warm_up=None, world_size=4):
    ranks = run_ranks(on_ranks, world_size, name, forward, backward, warm_up)
    number = len(ranks) * len(ranks[0][1])
    folded = name == "ZBVZeroBubble"
    local = (number // 2 - 1,) if folded else ()  # the two stages of the last rank
    ((expected, parameters, boundaries),) = run_ranks(
        in_one_process, 1, number, forward, backward, local, warm_up, not folded
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
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_stages_train_as_boundaries_do(name, forward, backward):
    check_same(name, forward, backward)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("qsgd:bits=4+aq-sgd:store=fp16", "topk:density=0.3+ef21"),
        ("topk:density=0.3", "topk:density=0.3,reuse=forward"),
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
    return open_ends


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_a_step_ends_when_its_messages_have_arrived(name):
    """The first stage sends activations, the last one gradients, and the one between both."""
    assert run_ranks(posted, 3, name) == [
        [(0, MICROBATCHES), (0, MICROBATCHES)],
        [(0, 2 * MICROBATCHES), (0, MICROBATCHES)],
        [(0, MICROBATCHES), (0, 0)],
    ]


def by_the_schedule(rank, world_size, name, forward, backward):
    """As on a GPU, where schedules send and receive."""
    nb.CompressedStage._by_itself = False
    return on_ranks(rank, world_size, name, forward, backward)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_messages_that_schedules_send_and_receive_are_the_same(name):
    spec = "topk:density=0.3,scope=sample+ef", "topk:density=0.3+ef21"
    mine, theirs = (run_ranks(run, 2, name, *spec) for run in (on_ranks, by_the_schedule))
    assert [losses for losses, _, _ in mine] == [losses for losses, _, _ in theirs]
    assert any(losses for losses, _, _ in mine)
    for (_, here, stats), (_, there, others) in zip(mine, theirs, strict=True):
        assert all(torch.equal(a, b) for at in here for a, b in zip(here[at], there[at], strict=True))
        assert stats == others


@pytest.mark.parametrize("counted", ["steps", "epochs"])  # a step is an epoch here
def test_warm_up(counted):
    warm_up = {f"warmup_{counted}": 2}
    check_same("1F1B", "topk:density=0.1+ef21", "topk:density=0.1+ef", warm_up, world_size=2)


# ---- what crosses a boundary -----------------------------------------------------------------------------------------


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 24)

    def forward(self, x):
        h = self.linear(x)
        return (
            h,
            x.argmax(1),
            (x * 2).detach(),
            h.double().square().float().transpose(0, 1).contiguous().transpose(0, 1),
        )


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.unused = nn.Linear(24, 24)

    def forward(self, h, index, doubled, squares):
        return self.linear(h + 0.1 * squares) + index[:, None] + doubled.sum(1, keepdim=True)


def several_tensors(rank, world_size, in_one):
    torch.manual_seed(0)
    cut = [First(), Last()]
    specs = {"forward": "qsgd:bits=6+ef", "backward": "qsgd:bits=6+ef21"}
    losses = []
    if in_one:
        boundary = nb.Boundary(**specs, microbatches=MICROBATCHES)
        for step in range(STEPS):
            for x, y in zip(*(torch.tensor_split(t, MICROBATCHES) for t in batch(step)), strict=True):
                loss = loss_fn(cut[1](*boundary(*cut[0](x))), y)
                loss.backward()
                losses.append(loss.item())
        return losses, cut[0].linear.weight.grad
    stage = nb.CompressedStage(cut[rank], rank, world_size, CPU, **specs)
    schedule = schedule_of("1F1B", [stage])
    schedule.scale_grads = False
    for step in range(STEPS):
        losses += run_step(schedule, [stage], *batch(step))
    return losses, cut[0].linear.weight.grad


def test_several_tensors_cross_and_not_all_have_gradients_or_can_be_compressed():
    (first, last) = run_ranks(several_tensors, 2, False)
    ((losses, gradient),) = run_ranks(several_tensors, 1, True)
    assert last[0] == losses
    assert torch.equal(first[1], gradient)


def in_two_dimensions(rank, world_size, compress):
    """Two pipelines of two stages; the replicas of a stage average their gradients, compressed."""
    replica, at = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DDP(parts(2)[at], process_group=replicas[at])
    if compress:
        handle = nb.compress_gradients(model, "topk:density=0.2+ef", min_numel=1, process_group=replicas[at])
    stage = nb.CompressedStage(
        model, at, 2, CPU, forward="qsgd:bits=6", backward="qsgd:bits=6", group=pipelines[replica]
    )
    schedule = schedule_of("1F1B", [stage])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses += run_step(schedule, [stage], *batch(replica))
        optimizer.step()
    return losses, [p.detach() for p in model.parameters()], handle.stats().total.ratio if compress else 1.0


def test_data_parallelism_around_a_pipeline():
    plain, ranks = run_ranks(in_two_dimensions, 4, False), run_ranks(in_two_dimensions, 4, True)
    for at in range(2):  # replicas of a stage stay the same
        assert all(map(torch.equal, ranks[at][1], ranks[at + 2][1]))
    assert ranks[0][2] > 1.5
    for at in (1, 3):
        assert sum(ranks[at][0][-4:]) < 0.9 * sum(ranks[at][0][:4])
        assert sum(ranks[at][0][-4:]) < 1.1 * sum(plain[at][0][-4:])


# ---- resuming --------------------------------------------------------------------------------------------------------


def resumed(rank, world_size, forward, backward, stop):
    cut = parts(world_size)[rank]
    optimizer = torch.optim.SGD(cut.parameters(), lr=0.1, momentum=0.9)
    losses = []
    state = None
    for begin, end in ((0, 8),) if stop is None else ((0, stop), (stop, 8)):
        stage = nb.CompressedStage(cut, rank, world_size, CPU, forward=forward, backward=backward)
        if state is not None:
            stage.load_state_dict(state)
        schedule = schedule_of("1F1B", [stage])
        for step in range(begin, end):
            optimizer.zero_grad()
            stage.samples = ids(step)
            losses += run_step(schedule, [stage], *batch(step))
            optimizer.step()
        state = stage.state_dict()
    return losses


@pytest.mark.parametrize("forward", ["topk:density=0.2+ef21", "qsgd:bits=3+aq-sgd"])
def test_a_pipeline_resumes_to_the_bit(forward):
    whole = run_ranks(resumed, 2, forward, "qsgd:bits=4+ef", None)
    assert run_ranks(resumed, 2, forward, "qsgd:bits=4+ef", 5) == whole


def one_end_forgot(rank, world_size):
    cut = parts(world_size)[rank]
    losses = []
    state = None
    for begin, end in ((0, 4), (4, 8)):
        stage = nb.CompressedStage(cut, rank, world_size, CPU, forward="qsgd:bits=3+aq-sgd", backward="none")
        if state is not None:
            stage.load_state_dict(state)
            if rank == 1:
                stage._before.of(0)[0].keep_only(torch.arange(5))
        schedule = schedule_of("1F1B", [stage])
        for step in range(begin, end):
            stage.samples = ids(step)
            losses += run_step(schedule, [stage], *batch(step))
        state = stage.state_dict()
    return stage.stats()["forward"].sent_bytes


def test_a_sample_that_one_end_lost_travels_in_full_again():
    sent, _ = run_ranks(one_end_forgot, 2)
    full, few = 24 * 4, nb.codec("qsgd:bits=3").payload_nbytes(24)
    assert sent == 11 * full + (4 * BATCH - 11) * few


# ---- bad input -------------------------------------------------------------------------------------------------------


def wrong(rank, world_size, what):
    specs = {"forward": "qsgd:bits=4", "backward": "qsgd:bits=4"}
    if what == "specs" and rank == 1:
        specs["forward"] = "qsgd:bits=2"
    if what == "samples":
        specs["forward"] = "qsgd:bits=4+aq-sgd"
    if what == "number":
        specs["forward"] = ["qsgd:bits=4", "none"]
    stage = nb.CompressedStage(parts(world_size)[rank], rank, world_size, CPU, **specs)
    schedule = schedule_of("1F1B", [stage])
    run_step(schedule, [stage], *batch(0))
    if what == "state":
        stage.load_state_dict(stage.state_dict())
    if what == "shape":
        run_step(schedule, [stage], *(t[:5] for t in batch(0)))
    if what == "death":
        if rank == 1:
            os._exit(3)
        run_step(schedule, [stage], *batch(0))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("specs", "do not agree"),
        ("samples", "set stage.samples"),
        ("number", "2 specs, and there are 1 boundaries"),
        ("state", "before its first step"),
        ("shape", "static shapes"),
        ("death", "onnection"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_hangs(what, message):
    with pytest.raises(RankError) as error:
        run_ranks(wrong, 2, what, timeout_s=30.0)
    assert message in str(error.value)
    assert "timed out" not in str(error.value)
