"""Gradients of replicas that FSDP2 shards, averaged between nodes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import narrowband as nb
from narrowband.averaging.flat import local
from tests.gradients.shards import compress, mesh_of, shard, whole
from tests.gradients.training import (
    adamw,
    data,
    heard,
    loss_of,
    mlp,
    refusal,
    sgd,
    train,
    train_in_two_passes,
)
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough

FSDP = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def beside_hsdp(rank, world_size, options, accumulate):
    """Parameters after six steps of AdamW: averaged between nodes by narrowband, and by FSDP2 itself."""
    mesh = mesh_of(2, world_size // 2)
    found, steps = [], 0
    for kind in ("ours", "native"):
        model = shard(mlp(), mesh["shards"] if kind == "ours" else mesh, **FSDP[options])
        if kind == "ours":
            handle = compress(model, "none", process_group=mesh["nodes"].get_group())
        optimizer = adamw(model)
        for step in range(6):
            optimizer.zero_grad()
            if accumulate and kind == "ours":
                with handle.no_sync():
                    loss_of(model, 100 + step, rank).backward()
            elif accumulate:
                model.set_requires_gradient_sync(False)
                loss_of(model, 100 + step, rank).backward()
                model.set_requires_gradient_sync(True)
            loss_of(model, step, rank).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found.append(whole(model))
        steps = handle.step
    return found, (found[0] - whole(shard(mlp(), mesh["shards"]))).abs().max().item(), steps


@pytest.mark.parametrize(
    ("ranks", "options", "accumulate"),
    [
        (4, "plain", False),
        (4, "bf16", True),
        *thorough((4, "kept", True), (4, "offload", False), (6, "plain", False), (4, "plain", True)),
    ],
)
def test_without_compression_it_is_what_fsdp2_does_between_nodes(ranks, options, accumulate):
    """To the bit among two nodes: the sum of two shards has one order. With three ranks per node shards are uneven."""
    answers = run_ranks(beside_hsdp, ranks, options, accumulate)
    for (ours, native), moved, steps in answers:
        assert torch.equal(ours, native)
        assert moved > 0.01
        assert steps == 6


def all_inside_of_no_sync(rank, world_size):
    """FSDP2 has reduced nothing; then a pass outside, and its average."""
    mesh = mesh_of(world_size, 1)
    model = shard(mlp(), mesh["shards"])
    handle = compress(model, "none", process_group=mesh["nodes"].get_group())
    said = []
    for step in range(2):  # the second has gradients of the first
        with handle.no_sync():
            loss_of(model, step, rank).backward()
        said.append(refusal(handle.average))
        loss_of(model, step, rank).backward()
    said.append(refusal(handle.average))
    return said, handle.step


def test_where_fsdp2_has_reduced_nothing_there_is_nothing_to_average():
    for (*inside, outside), steps in run_ranks(all_inside_of_no_sync, 2):
        assert outside is None
        assert steps == 3
        for kind, text in inside:
            assert kind == "UnsupportedError"
            assert "run the last backward pass of a step outside of no_sync" in text


def two_passes(rank, world_size):
    """Parameters after steps of two backward passes of one graph each, of which FSDP2 is told which is the last."""
    mesh = mesh_of(2, world_size // 2)
    found = []
    for kind in ("ours", "native"):
        model = shard(mlp(), mesh["shards"] if kind == "ours" else mesh)
        if kind == "ours":
            compress(model, "none", process_group=mesh["nodes"].get_group())
        train_in_two_passes(model, rank, range(6), adamw(model))
        found.append(whole(model))
    return found


def test_a_step_may_have_several_backward_passes_of_which_fsdp2_knows_the_last():
    """What the first pass averaged is averaged again with the second's gradients: equal but for roundings."""
    for ours, native in run_ranks(two_passes, 4):
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)


def sharded(rank, world_size, spec, options):
    mesh = mesh_of(2, world_size // 2)
    model = shard(mlp(), mesh["shards"])
    handle = compress(model, spec, process_group=mesh["nodes"].get_group(), **options)
    losses = train(model, rank, [0] * 12, adamw(model))
    plain = mlp()
    flat_handle = compress(plain, spec, **options)
    train(plain, rank, range(12), adamw(plain))
    sent, residual = zip(
        *((each.stats().total.sent_bytes, each.residual_nbytes) for each in (handle, flat_handle)), strict=True
    )
    return whole(model), losses, sent, residual


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("topk:density=0.05+ef", {}),
        ("powersgd:rank=2,min_ratio=1", {}),
        *thorough(("qsgd:bits=4", {}), ("sign+ef", {"small": "fused"}), ("dgc:density=0.05", {})),
    ],
)
def test_shards_learn_are_equal_on_all_nodes_and_send_their_part(spec, options):
    answers = run_ranks(sharded, 4, spec, options)
    for parameters, losses, (sent, all_sent), (residual, whole_residual) in answers:
        assert torch.equal(parameters, answers[0][0])
        assert losses[-1] < 0.9 * losses[0]
        # Of four ranks without shards each sends to three others, or three halves; with them, of half as much, to one.
        assert sent < 0.55 * all_sent
        assert residual <= 0.6 * whole_residual


def with_an_uneven_layer(rank, world_size):
    """Nine rows: five on some ranks, which are enough to be compressed, and four on others, which are not."""
    torch.manual_seed(0)
    mesh = mesh_of(2, 2)
    model = fully_shard(nn.Linear(8, 9, bias=False), mesh=mesh["shards"])
    handle = compress(model, "uniform:bits=8", min_numel=40, process_group=mesh["nodes"].get_group())
    handle.set_layers({"weight": "uniform:bits=2"})
    model(torch.randn(4, 8)).square().sum().backward()
    said = refusal(lambda: handle.set_layers({"heavy": "uniform:bits=2"}))
    return len(model.weight.to_local()), {name: own.spec for name, own in handle.layer_stats().items()}, said


def test_layers_are_set_where_a_shard_is_large_enough():
    for rows, specs, said in run_ranks(with_an_uneven_layer, 4):
        assert specs == ({"weight": "uniform:bits=2"} if rows == 5 else {})
        assert said[0] == "ValueError"


def partly_sharded(rank, world_size):
    mesh = mesh_of(2, 2)
    model = mlp()
    fully_shard(model[0], mesh=mesh["shards"])
    with heard() as said:
        compress(model, "uniform:bits=8", process_group=mesh["nodes"].get_group())
    return [each for each in said if "fully_shard" in each]


def test_what_fsdp2_does_not_shard_is_named_by_one_rank_of_each_group():
    answers = run_ranks(partly_sharded, 4)
    assert [len(said) for said in answers] == [1, 1, 0, 0]
    assert "are in no module that fully_shard was called with" in answers[0][0]
    assert "0.weight" not in answers[0][0]


def with_a_policy(rank, world_size):
    mesh = mesh_of(2, 2)
    model = shard(mlp(), mesh["shards"])
    policy = nb.LGreCo("topk:density=0.1+ef", ["topk:density=0.05", "topk:density=0.2"], every=3)
    handle = compress(model, policy, process_group=mesh["nodes"].get_group())
    train(model, rank, range(8), adamw(model))
    return sorted(handle.plan.specs()), whole(model), [name for name, p in model.named_parameters() if p.dim() == 2]


def test_policies_plan_for_shards_by_parameter_name():
    answers = run_ranks(with_a_policy, 4)
    for names, parameters, matrices in answers:
        assert set(names) <= set(matrices)
        assert len(names) >= 3
        assert torch.equal(parameters, answers[0][1])


def with_a_plan(rank, world_size, spec):
    """Parameters with a plan for whole parameters, with the part of it that is about this rank, and with its spec."""
    mesh = mesh_of(2, world_size // 2)
    shapes = {name: tuple(p.shape) for name, p in mlp().named_parameters() if p.dim() > 1 and p.numel() >= 64}
    plan = nb.Plan(tuple(nb.adapt.LayerPlan(name, shape, spec, 1.0, None) for name, shape in shapes.items()), "", 2)
    found, own = [], None
    for chosen in (plan, "own", spec):
        model = shard(mlp(), mesh["shards"])
        handle = compress(model, own if chosen == "own" else chosen, process_group=mesh["nodes"].get_group())
        train(model, rank, range(4), sgd(model))
        found.append(whole(model))
        own = handle.plan or own
    return found, {layer.name: layer.shape for layer in own.layers}


@pytest.mark.parametrize("ranks", [4, *thorough(6)])
def test_a_plan_is_for_whole_parameters_or_for_shards(ranks):
    """Of three shards of the last matrix two have few elements."""
    for (planned, owned, plain), shapes in run_ranks(with_a_plan, ranks, "topk:density=0.05+ef"):
        assert torch.equal(planned, plain)
        assert torch.equal(owned, plain)
        assert shapes["3.weight"] in ((16, 40), (11, 40), (10, 40))


def in_tensor_parallel(rank, world_size, spec):
    """Replicas of two ranks that split two matrices by rows and columns, and have a third one as a whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 8))
    begun = copy.deepcopy(model.state_dict())
    parallelize_module(model, mesh["parts"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    compress(model, spec, process_group=mesh["replicas"].get_group())
    train(model, rank // 2, range(8), sgd(model))
    plain = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 8))
    plain.load_state_dict(begun)
    optimizer = sgd(plain)
    for step in range(8):
        optimizer.zero_grad()
        (sum(loss_of(plain, step, replica) for replica in (0, 1)) / 2).backward()
        optimizer.step()
    own = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return own, [p.detach() for p in plain.parameters()]


def test_replicas_that_split_single_matrices_are_averaged_part_by_part():
    for spec, rtol in (("none", 1e-5), ("qsgd:bits=8", 0.05)):
        answers = run_ranks(in_tensor_parallel, 4, spec)
        for own, plain in answers:
            assert all(map(torch.equal, own, answers[0][0]))
            for ours, theirs in zip(own, plain, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 100)


def test_a_policy_is_refused_where_ranks_of_a_replica_have_the_same_layer():
    """Each would choose by its own parts; the layer parted."""
    with pytest.raises(RankError, match=r"a policy chooses specs on each rank separately.* 0.weight are not sharded"):
        run_ranks(in_tensor_parallel, 4, nb.LGreCo("topk:density=0.1+ef", every=2))


def saved(rank, world_size, steps):
    mesh = mesh_of(world_size // 2, 2)
    model = shard(mlp(), mesh["shards"])
    handle = compress(model, "topk:density=0.1+ef", process_group=mesh["nodes"].get_group())
    optimizer = sgd(model)
    train(model, rank, range(steps), optimizer)
    state = copy.deepcopy(handle.state_dict())
    kept = [local(p).clone() for p in model.parameters()]
    train(model, rank, range(steps, steps + 3), optimizer)
    return state, kept, whole(model)


def resumed(rank, world_size, steps, states, parameters):
    mesh = mesh_of(world_size // 2, 2)
    model = shard(mlp(), mesh["shards"])
    handle = compress(model, "topk:density=0.1+ef", process_group=mesh["nodes"].get_group())
    with torch.no_grad():
        for p, x in zip(model.parameters(), parameters[rank % len(parameters)], strict=True):
            local(p).copy_(x)
    handle.load_state_dict([state for at, state in enumerate(states) if at % 2 == rank % 2])
    loaded = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    train(model, rank, range(steps, steps + 3), sgd(model))
    return whole(model), loaded


@pytest.fixture(scope="module")
def before():
    return run_ranks(saved, 4, 4)


@pytest.mark.parametrize("ranks", [4, 6])
def test_a_sharded_run_goes_on_to_the_bit_and_on_another_number_of_nodes(before, ranks):
    states = [state for state, *_ in before]
    answers = run_ranks(resumed, ranks, 4, states, [kept for _, kept, _ in before])
    for at, (parameters, loaded) in enumerate(answers):
        assert torch.equal(parameters, answers[0][0])
        if ranks == 4:
            assert torch.equal(parameters, before[at][2])
        for name in states[at % 2]["feedback"]:  # the mean of what all nodes owe is the same
            was = sum(states[other]["feedback"][name].double() for other in (at % 2, at % 2 + 2)) / 2
            now = sum(answers[other][1][name].double() for other in range(at % 2, ranks, 2)) / (ranks // 2)
            torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-7)
            assert loaded[name].any()


def broken_in_one_shard(rank, world_size, spec):
    """Four steps; in the third a gradient of one rank is inf in the first row of a matrix. Averages, and states."""
    mesh = mesh_of(2, world_size // 2)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    model[0].requires_grad_(False)
    shard(model, mesh["shards"])
    handle = compress(model, spec, process_group=mesh["nodes"].get_group())
    optimizer, kept, finite = sgd(model), [], []
    for step in range(4):
        x, _ = data(step, rank)
        y = model(x)
        loss = y.square().mean() + (math.inf * y[0, 0] if step == 2 and rank == 0 else 0)
        optimizer.zero_grad()
        loss.backward()
        finite.append(all(bool(local(p.grad).isfinite().all()) for p in model.parameters() if p.requires_grad))
        kept.append(copy.deepcopy(handle.state_dict()["feedback"]))
        if finite[-1]:
            optimizer.step()
    handle.remove()
    return finite, kept


class To(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def with_an_end_that_one_rank_holds(rank, world_size):
    """A model whose last gradients, of another dtype than the rest, are of one row: of each node one rank has it."""
    mesh = mesh_of(2, world_size // 2)
    first = nn.Linear(24, 1, bias=False, dtype=torch.float64)
    model = nn.Sequential(To(torch.float64), first, To(torch.float32), nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 8))
    shard(model, mesh["shards"])
    handle = compress(model, "topk:density=0.1+ef", process_group=mesh["nodes"].get_group())
    train(model, rank, range(2), sgd(model))
    return handle.step, whole(model)


def test_ranks_tell_each_other_what_is_finite_when_nothing_of_their_replica_is_still_to_come():
    """A rank that waited for the others with the last gradients that it holds would keep FSDP2 from the last of all."""
    answers = run_ranks(with_an_end_that_one_rank_holds, 4, timeout_s=60.0)
    for steps, parameters in answers:
        assert steps == 2
        assert torch.equal(parameters, answers[0][1])


@pytest.mark.parametrize(("ranks", "spec"), [(4, "topk:density=0.1+ef"), *thorough((6, "topk:density=0.1+ef"))])
def test_where_one_shard_is_not_finite_the_feedback_of_all_stays(ranks, spec):
    """A scaler skips the step on all of them."""
    for finite, (_, before, after, later) in run_ranks(broken_in_one_shard, ranks, spec):
        assert finite == [True, True, False, True]
        assert before.keys() == after.keys() == later.keys() != set()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not all(torch.equal(before[name], later[name]) for name in before)


class Joined(nn.Module):
    """A matrix that every batch uses, and two that it uses together or not at all. The gradients of these two are parts
    of one tensor: what backward computes for the concatenated matrix, or what FSDP2 has reduced of their unit.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.always = nn.Linear(24, 24, bias=False)
        self.first, self.second = (nn.Parameter(torch.randn(12, 24) / 5) for _ in range(2))

    def forward(self, x, both):
        y = self.always(x)
        return y + x @ torch.cat([self.first, self.second]).t() if both else y


class Joining:
    """A loop over that model, averaged by the handle of a ``plain`` or ``sharded`` module, or by an ``averager``."""

    def __init__(self, rank, world_size, kind):
        self.model, options = Joined(), {"min_numel": 64}
        if kind != "plain":
            mesh = mesh_of(world_size, 1)
            for each in (self.model.always, self.model):
                fully_shard(each, mesh=mesh["shards"])
            options["process_group"] = mesh["nodes"].get_group()
        averaging = nb.Averager if kind == "averager" else nb.compress_gradients
        self.handle = averaging(self.model, "topk:density=0.1+ef", **options)
        parts = ([self.model.always.weight], [self.model.first, self.model.second])
        self.optimizers = [torch.optim.SGD(part, lr=0.05) for part in parts]
        self.averages, self.rank = kind == "averager", rank

    def step(self, at, *, both, stepping=2):
        """Average, and step so many of the optimizers. Nothing is cleared."""
        x, y = data(at, self.rank, outputs=24)
        (self.model(x, both) - y).square().mean().backward()
        if self.averages:
            self.handle.average()
        for optimizer in self.optimizers[:stepping]:
            optimizer.step()

    def held(self):
        return {name: x.clone() for name, x in self.handle.state_dict()["feedback"].items() if "always" not in name}


def with_old_gradients(rank, world_size, kind):
    """A matrix is frozen, and has the gradient of a step before. Of those that lie beside it one rank has a new one."""
    loop = Joining(rank, world_size, kind)
    loop.step(0, both=True)
    old = local(loop.model.first.grad).clone()
    loop.model.first.requires_grad_(False)
    loop.step(1, both=rank == 0)
    return whole(loop.model), torch.equal(local(loop.model.first.grad), old)


@pytest.mark.parametrize("kind", ["sharded", "averager", "plain"])
def test_an_old_gradient_of_what_is_frozen_stays_on_all_nodes(kind):
    """Ranks that took it for a new one, and others that did not, would step with different ones."""
    answers = run_ranks(with_old_gradients, 2, kind)
    for parameters, kept in answers:
        assert torch.equal(parameters, answers[0][0])
        assert kept


def with_averages_of_old_gradients(rank, world_size, kind):
    """Averages of two matrices are thrown away twice. The second time, one rank has only their old gradients. Whether
    it has what feedback held before.
    """
    loop = Joining(rank, world_size, kind)
    for at in range(3):
        loop.step(at, both=True, stepping=1 if at == 1 else 2)
        if at == 1:
            loop.optimizers[1].zero_grad()
    before = loop.held()
    loop.step(3, both=rank == 0, stepping=1)
    between = loop.held()
    loop.optimizers[1].zero_grad()
    for p in (loop.model.first, loop.model.second):
        p.requires_grad_(False)
    loop.step(4, both=False)
    after = loop.held()
    return [all(torch.equal(before[name], x[name]) for name in before) for x in (between, after)], bool(before)


@pytest.mark.parametrize("kind", ["sharded", "averager", "plain"])
def test_averages_of_old_gradients_may_be_thrown_away_too(kind):
    assert run_ranks(with_averages_of_old_gradients, 2, kind) == [([True, True], True)] * 2


def refused(rank, world_size):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = mesh_of(2, 2)
    groups = {name: mesh[name].get_group() for name in ("nodes", "shards")}
    found = {
        "native": refusal(lambda: compress(shard(mlp(), mesh), "none", process_group=groups["nodes"])),
        "inside": refusal(lambda: compress(shard(mlp(), mesh["shards"]), "none", process_group=groups["shards"])),
        "everywhere": refusal(lambda: compress(shard(mlp(), mesh["shards"]), "none")),
        "mesh": refusal(lambda: compress(shard(mlp(), mesh["shards"]), "none", process_group=mesh["nodes"])),
        "replicate": refusal(lambda: compress(replicate(mlp(), mesh=mesh["nodes"]), "none")),
        "uneven": refusal(
            lambda: compress(
                shard(mlp() if rank < 2 else nn.Sequential(nn.Linear(24, 41)), mesh["shards"]),
                "none",
                process_group=groups["nodes"],
            )
        ),
    }
    late = mlp()
    handle = compress(late, "none", process_group=groups["nodes"])  # the wrong order
    shard(late, mesh["shards"])
    found["sharded later"] = refusal(lambda: loss_of(late, 0, rank).backward())
    handle.remove()
    dist.barrier()
    return found


def test_meshes_that_do_not_fit_are_named_on_all_ranks():
    for rank, errors in enumerate(run_ranks(refused, 4)):
        for name in ("native", "inside", "everywhere"):
            assert errors[name][0] == "UnsupportedError", name
            assert "train the same replica" in errors[name][1]
        assert str(rank ^ 2) in errors["native"][1]
        assert str(rank ^ 1) in errors["inside"][1]
        assert errors["mesh"][0] == "TypeError"
        assert ".get_group()" in errors["mesh"][1]
        assert "Leave replicate() out" in errors["replicate"][1]
        assert errors["uneven"][0] == "DisagreementError"
        assert "not averaged" in errors["sharded later"][1]
        assert "fully_shard" in errors["sharded later"][1]
