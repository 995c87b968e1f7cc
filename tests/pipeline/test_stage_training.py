"""What crosses a boundary; data parallelism around a pipeline; resuming; what is refused."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from tests.pipeline.stages import BATCH, CPU, MICROBATCHES, STEPS, batch, ids, loss_fn, parts, run_step, schedule_of
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough
from tests.torches import OLDEST, since_2_12

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


@since_2_12("its stages ask integers for gradients")
def test_several_tensors_cross_and_not_all_have_gradients_or_can_be_compressed():
    (first, last) = run_ranks(several_tensors, 2, False)
    ((losses, gradient),) = run_ranks(several_tensors, 1, True)
    assert last[0] == losses
    assert torch.equal(first[1], gradient)


class Turned(nn.Linear):
    """Returns transposed views, of an activation and of a mask."""

    def forward(self, x, mask=None):
        if mask is not None:
            return super().forward(x.transpose(0, 1)) * mask.transpose(0, 1)
        h = super().forward(x)
        return h.transpose(0, 1), (h > 0).transpose(0, 1)


class Expanded(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, :1].expand(-1, 24)


def turned(rank, world_size):
    torch.manual_seed(0)
    part = [Turned(10, 24), Turned(24, 24)][rank]
    stage = nb.CompressedStage(part, rank, world_size, CPU, compress_in_eval=False)
    schedule = schedule_of("1F1B", [stage])
    run_step(schedule, [stage], *batch(0))
    return run_step(schedule, [stage], *batch(1), train=False), part.weight.grad


def in_one_piece(rank, world_size):
    torch.manual_seed(0)
    first, last = Turned(10, 24), Turned(24, 24)
    pieces = [[t.tensor_split(MICROBATCHES) for t in batch(step)] for step in range(2)]
    for x, y in zip(*pieces[0], strict=True):
        (loss_fn(last(*first(x)), y) / MICROBATCHES).backward()
    evaluated = [loss_fn(last(*first(x)), y).item() for x, y in zip(*pieces[1], strict=True)]
    return evaluated, [first.weight.grad, last.weight.grad]


@since_2_12("its stages refuse outputs that are not contiguous, and ask masks for gradients")
def test_views_that_are_not_contiguous_cross_a_boundary():
    ((evaluated, gradients),) = run_ranks(in_one_piece, 1)
    (_, first), (found, last) = run_ranks(turned, 2)
    assert found == pytest.approx(evaluated)
    torch.testing.assert_close([first, last], gradients)


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


class WithStatistics(nn.Module):
    """Batch norm, dropout, and a buffer that is replaced in every pass."""

    def __init__(self, inputs):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(inputs, 24), nn.BatchNorm1d(24), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x):
        h = self.norm(self.linear(x))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.dropout(h)


def with_statistics(rank, world_size, stop):
    """Passes that batch norm has counted after two steps; and all that a stage has after so many more, of a run that
    goes on and of one that resumed.
    """

    def run(steps, saved=None):
        torch.manual_seed(0)
        model = WithStatistics(24 if rank else 10)
        stage = nb.CompressedStage(model, rank, world_size, CPU, forward="qsgd:bits=4+ef", backward="qsgd:bits=4+ef")
        schedule = schedule_of("1F1B", [stage])
        if saved is not None:
            model.load_state_dict(saved[0])
            stage.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
        for step in steps:
            run_step(schedule, [stage], *batch(step))
        return copy.deepcopy((model.state_dict(), stage.state_dict(), torch.get_rng_state()))

    saved = run(range(stop))
    whole, again = run(range(STEPS))[0], run(range(stop, STEPS), saved)[0]
    passes = int(saved[0]["norm.num_batches_tracked"])
    return passes, [name for name, x in whole.items() if not torch.equal(x, again[name])]


def test_the_pass_that_infers_shapes_changes_neither_statistics_nor_random_numbers():
    """It runs on uninitialized memory, and statistics took that in: in a run that resumes, once more."""
    assert run_ranks(with_statistics, 2, 2) == [(2 * MICROBATCHES, [])] * 2


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
    assert sent == 11 * full + (4 * BATCH - 11) * few + 4 * MICROBATCHES * 8  # each message has a digest of ids


def shuffled_differently(rank, world_size, direction, what):
    """Two steps of samples that the ranks agree on, and one in which they do not."""
    options = {direction: "qsgd:bits=4+aq-sgd", "warmup_steps": 3 if what == "warm-up" else 0}
    stage = nb.CompressedStage(parts(world_size)[rank], rank, world_size, CPU, **options)
    schedule = schedule_of("1F1B", [stage])
    for step in range(3):
        stage.samples = ids(step)
        if step == 2 and rank == 1:
            stage.samples = stage.samples.flip(0) if what != "new" else stage.samples + 100
        if step == 2 and rank == 0 and what == "new on the sender":
            stage.samples = stage.samples + 100
        run_step(schedule, [stage], *batch(step))


@pytest.mark.parametrize(
    ("direction", "what"),
    [
        *(("forward", "new on the sender"), ("forward", "warm-up"), ("backward", "order"), ("backward", "new")),
        *thorough(("backward", "new on the sender"), ("backward", "warm-up"), ("forward", "order"), ("forward", "new")),
    ],
)
def test_ranks_that_shuffle_differently_later_are_told(direction, what):
    """Of new samples, messages are longer than the receiver expects, or shorter."""
    with pytest.raises(RankError) as error:
        run_ranks(shuffled_differently, 2, direction, what)
    assert "PayloadError: step 2, micro-batch 0: a message of" in str(error.value)
    assert "ranks that shuffle need the same seed in every epoch" in str(error.value)
    assert "SIGABRT" not in str(error.value)


class Far(nn.Module):
    """Scales features, of which the first and the last are far from each other, and larger than all others."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.full((70_000,), 1e-3))
        self.scales.data[[0, -1]] = 1.0

    def forward(self, x):
        return x * self.scales


def reused_behind_long_runs(rank, world_size, indices):
    stage = nb.CompressedStage(
        Far(), rank, world_size, CPU,
        forward=f"topk:density=2.9e-5,indices={indices}", backward="topk:density=2.9e-5,reuse=forward",
    )  # fmt: skip
    x = torch.ones(2, 70_000)
    losses = run_step(schedule_of("GPipe", [stage], 2), [stage], x, torch.zeros_like(x))
    return losses, stage.submod.scales.grad


def test_indices_of_long_runs_serve_for_gradients_as_others_do():
    """Runs of more than 65,535 have zeros in between, whose gradients nobody expects."""
    runs, others = (run_ranks(reused_behind_long_runs, 2, indices) for indices in ("runs", "elias-fano"))
    for (losses, gradient), (expected, other) in zip(runs, others, strict=True):
        assert losses == expected
        assert torch.equal(gradient, other)
    assert runs[0][1].nonzero().flatten().tolist() == [0, 69_999]


# ---- several schedules -----------------------------------------------------------------------------------------------


#: Micro-batches of each step. PyTorch's own stage refuses more than the schedule has that began last.
NUMBERS = (4, 2, 4, 2)
SPECS = "topk:density=0.3+aq-sgd", "topk:density=0.3+ef21"


def by_several_schedules(rank, world_size, name):
    """Losses, parameters and evaluation where two schedules share the stages of a rank."""
    mine = [rank] if name in ("GPipe", "1F1B") else [rank, world_size + rank]
    cut = parts(world_size * len(mine))
    stages = [nb.CompressedStage(cut[at], at, len(cut), CPU, forward=SPECS[0], backward=SPECS[1]) for at in mine]
    schedules = {number: schedule_of(name, stages, number) for number in NUMBERS}
    own = nn.ModuleList(cut[at] for at in mine)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    losses = []
    for step, number in enumerate(NUMBERS):
        optimizer.zero_grad()
        for stage in stages:
            stage.samples = torch.arange(2 * number)
        losses += run_step(schedules[number], stages, *batch(step, 2 * number))
        optimizer.step()
    own.eval()
    for number in NUMBERS:
        losses += run_step(schedules[number], stages, *batch(9, 2 * number), train=False)
    return losses, {at: [p.detach() for p in cut[at].parameters()] for at in mine}


def by_boundaries(rank, world_size, number_of_parts):
    cut = parts(number_of_parts)
    boundaries = [nb.Boundary(*SPECS, index=at) for at in range(number_of_parts - 1)]
    model = nn.Sequential(cut[0], *(layer for pair in zip(boundaries, cut[1:], strict=True) for layer in pair))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def run(number, step):
        for microbatch, (x, y) in enumerate(zip(*(t.split(2) for t in batch(step, 2 * number)), strict=True)):
            for boundary in boundaries:
                boundary.samples = torch.arange(2 * microbatch, 2 * microbatch + 2)
            losses.append(loss_fn(model(x), y))
            if model.training:
                losses[-1].backward()

    for step, number in enumerate(NUMBERS):
        optimizer.zero_grad()
        run(number, step)
        for p in model.parameters():
            p.grad.div_(number)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for number in NUMBERS:
            run(number, 9)
    return [loss.item() for loss in losses], [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_schedules_with_different_numbers_of_microbatches_share_a_stage(name):
    ranks = run_ranks(by_several_schedules, 2, name)
    found = {at: own for _, stages in ranks for at, own in stages.items()}
    ((losses, parameters),) = run_ranks(by_boundaries, 1, len(found))
    assert next(losses for losses, _ in ranks if losses) == losses
    assert all(map(torch.equal, [p for at in sorted(found) for p in found[at]], parameters))


# ---- bad input -------------------------------------------------------------------------------------------------------


def of_another_stage(rank, world_size, folder):
    """What is said where the states of two inner stages change places, and of what is no state."""

    def build():
        return nb.CompressedStage(parts(world_size)[rank], rank, world_size, CPU, forward="sign+ef", backward="sign+ef")

    stage = build()
    run_step(schedule_of("1F1B", [stage]), [stage], *batch(0))
    torch.save(stage.state_dict(), folder / str(rank))
    dist.barrier()
    said = []
    for state in (torch.load(folder / str((0, 2, 1, 3)[rank])), torch.load(folder / str(rank)), {"step": 3}):
        try:
            build().load_state_dict(state)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_state_is_that_of_one_stage(tmp_path):
    first, *inner, last = run_ranks(of_another_stage, 4, tmp_path)
    lacks = "this is not the state of a CompressedStage: it lacks before, behind"
    assert (first, last) == ([lacks], [lacks])
    assert inner == [[f"the state is of stage {3 - at}, but this is stage {at}", lacks] for at in (1, 2)]


def with_one_broken_side(rank, world_size):
    """What is said of a state one of whose sides is broken; and whether the other side's buffers have changed."""

    def build():
        return nb.CompressedStage(parts(world_size)[rank], rank, world_size, CPU, forward="sign+ef", backward="sign+ef")

    stage = build()
    run_step(schedule_of("1F1B", [stage]), [stage], *batch(0))
    good, other, said = stage.state_dict(), build(), []
    before = str(other.state_dict())
    broken = copy.deepcopy(good["behind"] or good["before"])
    broken[0][0]["state"] = {"8x24": 7}
    wrong = {"behind" if good["behind"] else "before": broken}
    for state in (7, good | {"step": "x"}, good | wrong):
        try:
            other.load_state_dict(state)
        except ValueError as error:
            said.append(str(error))
    same = str(other.state_dict()) == before
    other.load_state_dict(good)
    return said, same, str(other.state_dict()) == str(good)


def test_a_state_with_one_broken_side_changes_neither():
    for said, *all_is_well in run_ranks(with_one_broken_side, 3):
        words = ["lacks before, behind, step", "got 'x'", "holds int for '8x24', expected a dense tensor"]
        assert all(word in text for word, text in zip(words, said, strict=True)), said
        assert all(all_is_well)


def wrong(rank, world_size, what):
    specs = {"forward": "qsgd:bits=4", "backward": "qsgd:bits=4"}
    if what == "specs" and rank == 1:
        specs["forward"] = "qsgd:bits=2"
    if what in ("samples", "too many", "order"):
        specs["forward"] = "qsgd:bits=4+aq-sgd"
    if what == "number":
        specs["forward"] = ["qsgd:bits=4", "none"]
    part = Expanded(10, 24) if what == "expanded" and rank == 0 else parts(world_size)[rank]
    stage = nb.CompressedStage(part, rank, world_size, CPU, **specs)
    schedule = schedule_of("1F1B", [stage])
    if what == "too many":
        stage.samples = torch.arange(BATCH + 1)
    if what == "order":
        stage.samples = torch.randperm(BATCH, generator=torch.Generator().manual_seed(rank))
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
        ("too many", "9 ids, but the batch has 4 micro-batches of 2 samples"),
        ("order", "the same samples in the same order"),
        ("expanded", "stride mismatch" if OLDEST else "x.contiguous()"),
        ("number", "2 specs, but there are 1 boundaries"),
        ("state", "before its first step"),
        ("shape", "shape mismatch" if OLDEST else "static shapes"),
        ("death", "onnection"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_hangs(what, message):
    with pytest.raises(RankError) as error:
        run_ranks(wrong, 2, what)
    assert message in str(error.value)
    assert "timed out" not in str(error.value)


def test_without_a_process_group_a_stage_says_what_to_call():
    with pytest.raises(nb.UnsupportedError, match=r"call torch.distributed.init_process_group\(...\) first"):
        nb.CompressedStage(nn.Linear(2, 2), 0, 2, CPU, forward="uniform:bits=8")
