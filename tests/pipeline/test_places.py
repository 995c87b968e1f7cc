"""A stage together with the other places: its gradients averaged between replicas, its saved activations packed."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from tests.pipeline.stages import BATCH, CPU, MICROBATCHES, STEPS, batch, loss_fn, parts, run_step, schedule_of
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough

#: Tensors of these tests are small.
SMALL = {"min_numel": 16}
OFF = nb.ActivationPolicy(bits="off")
RECOMPUTED = nb.ActivationPolicy(bits="off", modules={"*": "checkpoint"})


def whole(model):
    """All parameters as one vector, those of FSDP2 put together."""
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()])


def shapes_of(at):
    """Of a micro-batch, in and out of one of two stages: where they are given, PyTorch has nothing to find out."""
    first, later = torch.empty(BATCH // MICROBATCHES, 10), torch.empty(BATCH // MICROBATCHES, 24, requires_grad=True)
    return {"input_args": later if at else first, "output_args": later}


def trained(part, stage, numbers, schedule="1F1B", policy=None):
    """A stage's losses and parameters after steps with these batches, and what the last one saved."""
    schedule = schedule_of(schedule, [stage])
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.01, fused=True)
    kept = None if policy is None else nb.compress_activations(part, policy=policy)
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        with kept or contextlib.nullcontext() as saved:
            losses += run_step(schedule, [stage], *batch(number))
        optimizer.step()
    return losses, whole(part), saved


# ---- two stages of two replicas --------------------------------------------------------------------------------------


def beside_plain(rank, world_size, kind, specs, policy):
    """A run of narrowband's, one of PyTorch's alone, and how often the former averaged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    (replica, at), replicas = divmod(rank, 2), mesh["replicas"]
    found, steps = [], 0
    for ours in (True, False):
        part = parts(2)[at]
        if kind == "shards":
            part = fully_shard(part, mesh=replicas)
            handle = nb.compress_shards(part, gradients="none", parameters="none") if ours else None
        elif kind == "module" and ours:
            handle = nb.compress_gradients(part, specs[0], **SMALL, process_group=replicas.get_group())
        else:
            part = DDP(part, process_group=replicas.get_group())
            handle = nb.compress_gradients(part, specs[0], **SMALL) if ours else None
        group = {"group": mesh["stages"].get_group()}
        if ours:
            stage = nb.CompressedStage(part, at, 2, CPU, forward=specs[1], backward=specs[2], **group)
        else:
            # Without shapes DDP would average twice in the first step.
            stage = PipelineStage(part, at, 2, CPU, **group, **shapes_of(at))
        found.append(trained(part, stage, range(replica, 2 * STEPS, 2), policy=policy if ours else None))
        steps = getattr(handle, "step", 0) if ours else steps
    return found, steps


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("ddp", OFF), ("module", RECOMPUTED), ("shards", RECOMPUTED), *thorough(("ddp", RECOMPUTED), ("module", OFF))],
)
def test_where_nothing_is_lost_training_has_the_bits_of_pytorch_alone(kind, policy):
    """Among two, sums have one order."""
    for (ours, plain), steps in run_ranks(beside_plain, 4, kind, ("none", "none", "none"), policy):
        assert ours[0] == plain[0]
        assert torch.equal(ours[1], plain[1])
        assert steps == (0 if kind == "shards" else STEPS)


def compressed(rank, world_size, kind, schedule):
    """Losses, parameters, averages, and what a step sent between replicas and kept for backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    (replica, at), replicas = divmod(rank, 2), mesh["replicas"]
    part = parts(2)[at]
    if kind == "ddp":
        part = DDP(part, process_group=replicas.get_group())
    handle = nb.compress_gradients(part, "qsgd:bits=8", **SMALL, process_group=replicas.get_group())
    stage = nb.CompressedStage(
        part, at, 2, CPU, forward="uniform:bits=8", backward="uniform:bits=8", group=mesh["stages"].get_group()
    )
    policy = nb.ActivationPolicy(min_numel=32)
    losses, parameters, saved = trained(part, stage, 12 * [replica], schedule, policy)
    last = handle.stats().last
    return losses, parameters, handle.step, (last.raw_bytes, last.sent_bytes), (saved.raw_bytes, saved.kept_bytes)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_all_three_compressed_train_alike_and_average_once_in_a_step(schedule):
    """A zero bubble schedule sets gradients itself, and no hook hears of it."""
    found = {kind: run_ranks(compressed, 4, kind, schedule) for kind in ("module", "ddp")[: 1 + (schedule == "1F1B")]}
    for ranks in found.values():
        for at in (0, 1):
            assert torch.equal(ranks[at][1], ranks[at + 2][1])  # replicas of a stage stay the same
        for losses, _, steps, (raw, sent), (plain, kept) in ranks:
            assert steps == 12
            assert sent < 0.6 * raw
            assert kept < plain or not plain  # the first stage saves its input alone
            assert not losses or sum(losses[-MICROBATCHES:]) < 0.9 * sum(losses[:MICROBATCHES])
    if "ddp" in found:
        for ours, theirs in zip(found["module"], found["ddp"], strict=True):
            assert ours[2:] == theirs[2:]  # to the byte


def test_ddp_under_a_zero_bubble_schedule_is_refused():
    """PyTorch averages nothing in the first step, and fails in the second."""
    with pytest.raises(RankError, match="DistributedDataParallel does not notice"):
        run_ranks(compressed, 4, "ddp", "InterleavedZeroBubble")


def with_evaluation(rank, world_size, schedule, evaluates):
    """Two replicas of a pipeline of one stage, averaged with feedback."""
    part = parts(2)[1]
    handle = nb.compress_gradients(part, "topk:density=0.1+ef", **SMALL)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    stages = [nb.CompressedStage(part, 0, 1, CPU, group=[dist.new_group([each]) for each in range(world_size)][rank])]
    own = schedule_of(schedule, stages)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(BATCH, 24, generator=generator), torch.randn(BATCH, 24, generator=generator)
        optimizer.zero_grad()
        run_step(own, stages, x, y)
        optimizer.step()
        if evaluates:
            run_step(own, stages, x, y, train=False)
    assert stages[0].state_dict()["step"] == STEPS - 1  # random numbers are drawn by it
    return whole(part), handle.step


@pytest.mark.parametrize("schedule", ["1F1B", *thorough("GPipe", "InterleavedZeroBubble")])
def test_evaluation_averages_nothing(schedule):
    """Or the gradients of the last step would come into the residuals once more."""
    (without, *_), (evaluated, *_) = (run_ranks(with_evaluation, 2, schedule, way) for way in (False, True))
    assert torch.equal(without[0], evaluated[0])
    assert without[1] == evaluated[1] == STEPS


# ---- a stage of which a replica is sharded ---------------------------------------------------------------------------


def sharded_replicas(rank, world_size, schedule):
    """Two replicas of two shards, averaged by narrowband; in a pipeline of one stage, or in a loop."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    part = fully_shard(parts(2)[1], mesh=mesh["shards"])
    handle = nb.compress_gradients(part, "none", **SMALL, process_group=mesh["replicas"].get_group())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    group = [dist.new_group([each]) for each in range(world_size)][rank]
    if schedule:
        schedule = schedule_of(schedule, [nb.CompressedStage(part, 0, 1, CPU, group=group)])
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(BATCH, 24, generator=generator), torch.randn(BATCH, 24, generator=generator)
        optimizer.zero_grad()
        if schedule:
            schedule.step(x, target=y)
        else:
            loss_fn(part(x), y).backward()
        optimizer.step()
    return whole(part), handle.step


def test_sharded_replicas_of_a_stage_are_averaged_once_in_a_step():
    loops = run_ranks(sharded_replicas, 4, "")
    # Schedules of several stages ask a stage in other ways for the gradients of a step: with PyTorch 2.15, in two.
    for schedule in ("1F1B", "Interleaved1F1B"):
        for (ours, steps), (loop, _) in zip(run_ranks(sharded_replicas, 4, schedule), loops, strict=True):
            torch.testing.assert_close(ours, loop, rtol=1e-5, atol=1e-6)
            assert steps == STEPS


def sharded_in_stages(rank, world_size, schedule, between):
    """Two stages on each of two ranks, each shared by two; FSDP2 shards its layers again after forward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "stages"))
    at, alone = mesh["stages"].get_local_rank(), [dist.new_group([each]) for each in range(world_size)][rank]
    cut = [parts(4)[at], parts(4)[at + 2]]
    for part in cut:
        for module in (*part.children(), part):
            if list(module.parameters()):
                fully_shard(module, mesh=mesh["shards"])
        if between:
            nb.compress_gradients(part, "none", **SMALL, process_group=alone)
        else:
            nb.compress_shards(part, "none", "none", **SMALL)
    stages = [
        nb.CompressedStage(part, at + 2 * turn, 4, CPU, group=mesh["stages"].get_group())
        for turn, part in enumerate(cut)
    ]
    schedule = schedule_of(schedule, stages)
    optimizer = torch.optim.AdamW([p for part in cut for p in part.parameters()], lr=0.01)
    for number in range(STEPS):
        optimizer.zero_grad()
        run_step(schedule, stages, *batch(2 * number + mesh["shards"].get_local_rank()))
        optimizer.step()
    return torch.cat([whole(part) for part in cut])


@pytest.mark.parametrize("between", [False, *thorough(True)])
def test_shards_get_their_gradients_under_a_zero_bubble_schedule(between):
    """Its passes look for parameters in the graph, where FSDP2's are the whole ones."""
    found = [
        run_ranks(sharded_in_stages, 4, schedule, between) for schedule in ("InterleavedZeroBubble", "Interleaved1F1B")
    ]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


def unseen_by_pytorch(rank, world_size, what):
    """A stage whose module PyTorch's own does not know for what it is."""
    shards = init_device_mesh("cpu", (world_size,))
    groups = [dist.new_group([each]) for each in range(world_size)]
    part = nn.Sequential(parts(2)[1])
    if what == "compiled":
        part = torch.compile(DDP(part), backend="aot_eager")
    else:
        fully_shard(part[0], mesh=shards)
        if what != "shards":
            part = fully_shard(part, mesh=shards)
        if what == "compiled shards":
            part = torch.compile(part, backend="aot_eager")
        nb.compress_gradients(part, "none", process_group=groups[rank])
    kind = PipelineStage if what == "shards in PyTorch's stage" else nb.CompressedStage
    stage = kind(part, 0, 1, CPU, group=groups[rank])
    schedule_of("1F1B", [stage]).step(torch.randn(BATCH, 24), target=torch.randn(BATCH, 24))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("compiled", r"DistributedDataParallel\(torch.compile\(part\)\)"),
        ("shards", r"call fully_shard\(part\), too"),
        ("compiled shards", r"compile its layers instead"),
        ("shards in PyTorch's stage", r"use CompressedStage there"),
    ],
)
def test_what_pytorchs_stage_does_not_see_is_an_error(what, words):
    """Wrapped so, replicas parted; and where layers alone are sharded, the error spoke of no_sync."""
    with pytest.raises(RankError, match=words):
        run_ranks(unseen_by_pytorch, 2, what)


# ---- saved activations -----------------------------------------------------------------------------------------------


def ranges_of(rank, world_size, shapes_given):
    """What was learned of the activations, and saved, in the first step."""
    part = nn.Sequential(parts(2)[rank], nn.GELU(), nn.Linear(24, 24))
    shapes = shapes_of(rank) if shapes_given else {}
    handle = nb.compress_activations(part, policy=nb.ActivationPolicy(min_numel=32))
    stage = nb.CompressedStage(part, rank, 2, CPU, **shapes)
    schedule = schedule_of("1F1B", [stage])
    with handle as saved:
        losses = run_step(schedule, [stage], *batch(0))
    return losses, handle.state_dict(), (saved.raw_bytes, saved.kept_bytes), [p.grad for p in part.parameters()]


def test_ranges_are_learned_of_activations_only():
    """To find out shapes, PyTorch calls each stage once with memory that nobody has written to."""
    for (losses, found, *rest), (others, expected, *more) in zip(
        *(run_ranks(ranges_of, 2, given) for given in (False, True)), strict=True
    ):
        assert losses == others
        assert found["draws"] == expected["draws"]
        assert found["estimates"].keys() == expected["estimates"].keys() != set()
        assert all(torch.equal(found["estimates"][name], value) for name, value in expected["estimates"].items())
        assert rest[0] == more[0]
        assert all(map(torch.equal, rest[1], more[1]))


def several_on_a_rank(rank, world_size, bits):
    """Losses, gradients, and what two stages saved."""
    cut, mine = parts(4), (rank, rank + 2)
    stages = [nb.CompressedStage(cut[at], at, 4, CPU) for at in mine]
    model = nn.ModuleList(cut[at] for at in mine)
    schedule = schedule_of("Interleaved1F1B", stages)
    policy = nb.ActivationPolicy(bits=bits, min_numel=32, decay=0)  # two samples say little of the next two
    with nb.compress_activations(model, policy=policy) as saved:
        losses = run_step(schedule, stages, *batch(0))
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return losses, gradients, (saved.raw_bytes, saved.kept_bytes), {name.partition(".")[0] for name in saved.by_module}


def test_one_context_serves_all_stages_of_a_rank():
    for (losses, found, (raw, kept), modules), (others, exact, (plain, _), _) in zip(
        *(run_ranks(several_on_a_rank, 2, bits) for bits in (8, "off")), strict=True
    ):
        assert losses == others
        assert 0 < (found - exact).norm() < 0.005 * exact.norm()
        assert kept < 0.5 * raw
        assert raw == plain
        assert {"0", "1"} <= modules


# ---- resuming --------------------------------------------------------------------------------------------------------


def resumed(rank, world_size, stop):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    (replica, at), losses, states = divmod(rank, 2), [], None
    for begin, end in ((0, 6),) if stop is None else ((0, stop), (stop, 6)):
        part = parts(2)[at]
        model = DDP(part, process_group=mesh["replicas"].get_group())
        gradients = nb.compress_gradients(model, "topk:density=0.2+ef", **SMALL)
        specs = {"forward": "topk:density=0.3+ef21", "backward": "qsgd:bits=4+ef"}
        stage = nb.CompressedStage(model, at, 2, CPU, **specs, group=mesh["stages"].get_group())
        saving = nb.compress_activations(model, policy=nb.ActivationPolicy(bits=4, min_numel=32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        all_of_it = part, gradients, stage, saving, optimizer
        for each, state in zip(all_of_it, states or (), strict=False):
            each.load_state_dict(state)
        schedule = schedule_of("1F1B", [stage])
        for step in range(begin, end):
            optimizer.zero_grad()
            with saving:
                losses += run_step(schedule, [stage], *batch(2 * step + replica))
            optimizer.step()
        states = [each.state_dict() for each in all_of_it]
    return losses, whole(part)


def test_all_three_resume_to_the_bit():
    for (losses, parameters), (others, expected) in zip(
        run_ranks(resumed, 4, 3), run_ranks(resumed, 4, None), strict=True
    ):
        assert losses == others
        assert torch.equal(parameters, expected)
