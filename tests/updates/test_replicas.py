"""Replicas of several ranks each: sharded by FSDP2, or in DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.gradients.shards import shard, whole
from tests.gradients.training import adamw, flat, mlp, refusal, sgd, train
from tests.ranks import run_ranks
from tests.thorough import thorough
from tests.updates.training import nesterov

STEPS, EVERY = 8, 2


def mesh_of(replicas, per_replica):
    return init_device_mesh("cpu", (replicas, per_replica), mesh_dim_names=("replicas", "ranks"))


def replica_of(kind, mesh, **options):
    """A model that the ranks of a replica train together."""
    model = mlp()
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=mesh["ranks"].get_group())
    return shard(model, mesh["ranks"], **options)


def trained(rank, world_size, kind, spec, options, fsdp):
    """Two replicas of half of the ranks each; every rank has data of its own."""
    mesh = mesh_of(2, world_size // 2)
    model = replica_of(kind, mesh, **fsdp)
    optimizer = adamw(model)
    group = mesh["replicas"].get_group()
    handle = nb.compress_updates(model, optimizer, spec, every=EVERY, min_numel=64, process_group=group, **options)
    seen = []
    for step in range(STEPS):
        train(model, rank, [step], optimizer)
        seen.append(whole(model))
    return seen, handle.step, handle.stats().total.sent_bytes, handle.residual_nbytes


SPECS = ["none", *thorough("topk:density=1.0+ef")]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("ranks", [4, *thorough(6)])
def test_a_sharded_replica_does_what_one_in_ddp_does(spec, ranks):
    """With what loses nothing, dividing it makes no difference. With three ranks shards are uneven, and some empty."""
    options = {"outer": nesterov}
    sharded, plain = (run_ranks(trained, ranks, kind, spec, options, {}) for kind in ("fsdp", "ddp"))
    for (mine, rounds, *_), (its, *_) in zip(sharded, plain, strict=True):
        assert rounds == STEPS // EVERY
        for step, (a, b) in enumerate(zip(mine, its, strict=True), start=1):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            together = [torch.equal(a, other[step - 1]) for other, *_ in sharded]
            assert all(together) == (step % EVERY == 0)


@pytest.mark.parametrize(
    ("spec", "options", "fsdp"),
    [
        ("qsgd:bits=2+ef", {"outer": "auto"}, {}),
        ("topk:density=0.05+ef", {"fragments": 2, "overlap": 1}, {}),
        *thorough(
            ("sign+ef", {}, {"reshard_after_forward": False}),
            ("powersgd:rank=2,min_ratio=1", {}, {}),
            ("qsgd:bits=2+ef", {}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        ),
    ],
)
def test_each_rank_sends_its_shard_alone(spec, options, fsdp):
    """Replicas are equal after their rounds, and a rank of two sends about half of what a whole replica sends."""
    sharded = run_ranks(trained, 4, "fsdp", spec, options, fsdp)
    plain = run_ranks(trained, 4, "ddp", spec, options, {})
    if "overlap" not in options:
        assert all(torch.equal(seen[-1], sharded[0][0][-1]) for seen, *_ in sharded)
    for (seen, _, sent, residual), (_, _, all_sent, whole_residual) in zip(sharded, plain, strict=True):
        assert seen[-1].isfinite().all()
        measured = 4400 * 2 * (STEPS // EVERY) if options.get("outer") == "auto" else 0
        assert sent - measured < 0.65 * (all_sent - measured) + 60 * STEPS
        assert residual == pytest.approx(whole_residual / 2, rel=0.15)  # factors have columns, too


def empty_shards(rank, world_size):
    """A model of a single row, of which one of a replica's two ranks has nothing."""
    mesh = mesh_of(2, 2)
    model = fully_shard(nn.Sequential(nn.Linear(24, 1)), mesh=mesh["ranks"])
    numel = sum(p.to_local().numel() for p in model.parameters())
    optimizer = adamw(model)
    group = mesh["replicas"].get_group()
    handle = nb.compress_updates(model, optimizer, "none", every=EVERY, outer="auto", process_group=group)
    begun = whole(model)
    train(model, rank, range(2 * EVERY), optimizer)
    return numel, handle.step, handle.length, begun, whole(model)


def test_a_rank_whose_shards_are_empty_has_nothing_to_measure():
    results = run_ranks(empty_shards, 4)
    assert [numel for numel, *_ in results] == [25, 0, 25, 0]
    assert [length for _, _, length, *_ in results] == [results[0][2], 1.0, results[0][2], 1.0]
    assert 1.0 <= results[0][2] <= math.sqrt(2)
    for _, rounds, _, begun, end in results:
        assert rounds == 2
        assert torch.equal(end, results[0][4])
        assert not torch.equal(end, begun)


def with_a_nan(rank, world_size):
    mesh = mesh_of(2, 2)
    model = replica_of("fsdp", mesh)
    optimizer = adamw(model)
    group = mesh["replicas"].get_group()
    handle = nb.compress_updates(model, optimizer, "none", every=2, min_numel=64, process_group=group)
    train(model, rank, range(3), optimizer)
    before = whole(model)
    if rank == 3:  # one shard of the second replica
        with torch.no_grad():
            next(model.parameters()).to_local()[0] = math.nan
    handle.average()
    return before, whole(model), handle.skipped_updates


def test_where_one_shard_is_not_finite_the_replica_brings_nothing_of_any():
    answers = run_ranks(with_a_nan, 4)
    assert [skipped for *_, skipped in answers] == [0, 0, 1, 1]
    assert all(torch.equal(after, answers[0][1]) for _, after, _ in answers)
    assert answers[0][1].isfinite().all()


def resumed(rank, world_size):
    mesh = mesh_of(2, 2)

    def begun():
        model = replica_of("fsdp", mesh)
        optimizer = adamw(model)
        group = mesh["replicas"].get_group()
        handle = nb.compress_updates(
            model, optimizer, "topk:density=0.1+ef", every=3, outer=nesterov, min_numel=64, process_group=group
        )
        return model, optimizer, handle

    model, optimizer, handle = begun()
    train(model, rank, range(4), optimizer)
    saved = copy.deepcopy(
        ([p.detach().to_local() for p in model.parameters()], optimizer.state_dict(), handle.state_dict())
    )
    train(model, rank, range(4, 8), optimizer)
    again, optimizer, handle = begun()
    with torch.no_grad():
        for p, x in zip(again.parameters(), saved[0], strict=True):
            p.to_local().copy_(x)
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    train(again, rank, range(4, 8), optimizer)
    return torch.equal(whole(model), whole(again)), bool(saved[2]["updates"]["anchor"])


def test_sharded_replicas_go_on_to_the_bit():
    assert run_ranks(resumed, 4) == [(True, True)] * 4


def wrong_groups(rank, world_size):
    mesh = mesh_of(2, 2)
    models = [replica_of(kind, mesh) for kind in ("fsdp", "ddp")]
    models.append(torch.compile(models[-1], backend="eager"))
    groups = [None, mesh["ranks"].get_group()]
    return [
        refusal(lambda m=model, g=group: nb.compress_updates(m, adamw(m), "none", process_group=g))
        for model in models
        for group in groups
    ]


def test_a_group_with_two_ranks_of_one_replica_is_refused():
    for rank, errors in enumerate(run_ranks(wrong_groups, 4)):
        assert {kind for kind, _ in errors} == {"UnsupportedError"}
        mates = f"ranks [{rank ^ 1}]"
        for at, (_, text) in enumerate(errors):
            by_ddp = f"averages the gradients of this model with {mates} already"
            assert (f"process_group has {mates}, which train the same replica" if at < 2 else by_ddp) in text


def other_rounds(rank, world_size):
    """What all ranks hear where rank 1 alone gives another ``every``, of which only its own group has a part."""
    mesh = mesh_of(2, 2)
    options = {"every": 3 if rank == 1 else 2, "process_group": mesh["replicas"].get_group()}
    models = [replica_of(kind, mesh) for kind in ("fsdp", "ddp")]
    return [refusal(lambda m=model: nb.compress_updates(m, adamw(m), "none", **options)) for model in models]


def test_a_mistake_of_one_rank_is_told_to_its_replica_too():
    for errors in run_ranks(other_rounds, 4):
        for kind, text in errors:
            assert kind == "DisagreementError"
            assert "(3 on rank 1; 2 on rank 3)" in text


def more_fragments_than_layers(rank, world_size):
    """What all ranks hear where one of a replica's two ranks has nothing of the second layer, and so one layer."""
    mesh = mesh_of(2, 2)
    model = fully_shard(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 1)), mesh=mesh["ranks"])
    options = {"every": 2, "fragments": 2, "min_numel": 8, "process_group": mesh["replicas"].get_group()}
    return refusal(lambda: nb.compress_updates(model, adamw(model), "none", **options))


def test_too_few_layers_on_one_rank_are_told_to_its_replica_too():
    answers = run_ranks(more_fragments_than_layers, 4)
    assert [kind for kind, _ in answers] == ["DisagreementError", "ValueError"] * 2
    for _, text in answers:
        assert "fragments=2 is more than the number of layers that are compressed separately, which is 1" in text


def gradients_and_updates(rank, world_size):
    """Handles of both kinds for the same parameters: with ranks in common, and inside and between machines."""
    mesh = mesh_of(2, 2)
    inside, between = mesh["ranks"].get_group(), mesh["replicas"].get_group()
    model = mlp()
    optimizer = adamw(model)
    of_gradients = nb.compress_gradients(model, "none", min_numel=64, process_group=inside)
    errors = [refusal(lambda: nb.compress_updates(model, optimizer, "none"))]
    of_updates = nb.compress_updates(model, optimizer, "none", min_numel=64, process_group=between, every=EVERY)
    train(model, rank, range(EVERY), optimizer)
    trained = flat(model)
    of_gradients.remove()
    around = DistributedDataParallel(model)
    errors += [refusal(lambda m=each: nb.compress_gradients(m, "none")) for each in (model, model[0], around)]
    of_updates.remove()
    nb.compress_gradients(around, "none", min_numel=64)
    errors.append(refusal(lambda: nb.compress_updates(model, optimizer, "none")))
    return errors, trained


def test_gradients_and_updates_are_not_averaged_among_the_same_ranks():
    answers = run_ranks(gradients_and_updates, 4)
    makers = ["compress_gradients", *["compress_updates"] * 3, "compress_gradients"]
    for rank, (errors, trained) in enumerate(answers):
        assert [kind for kind, _ in errors] == ["UnsupportedError"] * 5
        both = [[rank ^ 1], *[[rank ^ 2]] * 3, sorted({0, 1, 2, 3} - {rank})]
        for (_, text), call, ranks in zip(errors, makers, both, strict=True):
            assert f"has a handle of {call} already, which averages with ranks {ranks}" in text
        assert torch.equal(trained, answers[0][1])


def coded_and_others(rank, world_size):
    """What averages a model in CodedDataParallel once more: among the same ranks, and between machines."""
    mesh = mesh_of(2, 2)
    inside, between = mesh["ranks"].get_group(), mesh["replicas"].get_group()
    model = mlp()
    coded = nb.CodedDataParallel(model, redundancy=1, transport="broadcast", process_group=inside)
    optimizer = sgd(model)
    errors = [refusal(lambda m=each: nb.compress_updates(m, optimizer, "none")) for each in (coded, model)]
    errors.append(refusal(lambda: nb.compress_gradients(model[0], "none")))
    handle = nb.compress_updates(coded, optimizer, "none", min_numel=64, process_group=between, every=1)
    x, y = coded.split(torch.ones(4, 24), torch.arange(32.0).reshape(4, 8) * (rank // 2))
    (coded(x) - y).square().mean().backward()
    optimizer.step()
    trained = flat(model)
    del coded
    gc.collect()
    errors.append(refusal(lambda: nb.CodedDataParallel(model, redundancy=1, process_group=between)))
    handle.remove()
    return errors, trained


def test_what_coded_packets_average_is_not_averaged_among_the_same_ranks():
    """Neither as updates nor as gradients; and updates that are averaged are not averaged by coded packets."""
    answers = run_ranks(coded_and_others, 4)
    for rank, (errors, trained) in enumerate(answers):
        assert [kind for kind, _ in errors] == ["UnsupportedError"] * 4
        for _, text in errors[:3]:
            assert f"is in CodedDataParallel, which averages with ranks {[rank ^ 1]}" in text
            assert "Train the module without that wrapper" in text
        assert f"has a handle of compress_updates already, which averages with ranks {[rank ^ 2]}" in errors[3][1]
        assert torch.equal(trained, answers[0][1])
    assert not torch.equal(answers[0][1], flat(mlp()))


def with_a_plan(rank, world_size):
    shapes = {name: tuple(p.shape) for name, p in mlp().named_parameters() if p.dim() > 1 and p.numel() >= 64}
    spec = "topk:density=0.05+ef"
    plan = nb.Plan(tuple(nb.adapt.LayerPlan(name, shape, spec, 1.0, None) for name, shape in shapes.items()), "", 2)
    return [trained(rank, world_size, "fsdp", chosen, {}, {})[0][-1] for chosen in (plan, spec)]


def test_a_plan_is_for_whole_parameters():
    for planned, plain in run_ranks(with_a_plan, 4):
        assert torch.equal(planned, plain)


def partly_whole(rank, world_size):
    mesh = mesh_of(2, 2)
    model = parallelize_module(mlp(), mesh["ranks"], {"3": ColwiseParallel(), "5": RowwiseParallel()})
    options = {"process_group": mesh["replicas"].get_group(), "min_numel": 64}
    policy = nb.LGreCo("topk:density=0.1+ef", every=2)
    return (
        refusal(lambda: nb.compress_updates(model, adamw(model), policy, **options)),
        refusal(lambda: nb.compress_updates(model, adamw(model), "none", outer="auto", **options)),
        refusal(lambda: nb.compress_updates(model, adamw(model), "none", outer=1.5, **options)),
    )


def test_what_each_rank_decides_by_its_parts_is_refused_where_all_have_the_same_layer():
    """It would get other specs on each, or go another way."""
    for policy, outer, fixed in run_ranks(partly_whole, 4):
        assert policy[0] == outer[0] == "UnsupportedError"
        assert "0.weight, 6.weight are not sharded" in policy[1]
        assert "outer='auto' measures how far to go on each rank" in outer[1]
        assert "5.bias" in outer[1]
        assert fixed is None
