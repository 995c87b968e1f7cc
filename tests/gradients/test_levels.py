"""Two levels: nodes of several ranks, which sum exactly inside and send a part each."""

from __future__ import annotations

import copy
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from narrowband.averaging import warmup
from narrowband.averaging.who import averaged_by
from narrowband.gradients import node as node_module
from narrowband.gradients.levels import shards_of
from tests.gradients.shards import shard
from tests.gradients.training import (
    HUGE,
    LOSSLESS,
    TINY,
    compress,
    flat,
    heard,
    loss_of,
    mlp,
    refusal,
    sgd,
    train,
    wrap,
)
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough

SPECS = [
    "none",
    LOSSLESS,
    "topk:density=0.05+ef",
    *thorough("qsgd:bits=4", "sign+ef", "powersgd:rank=2,min_ratio=1", "dgc:density=0.1,momentum=0.5"),
]


def odd():
    """Rows that no node can share evenly, one number, and a matrix with fewer rows than a node has ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 41), nn.PReLU(), nn.Linear(41, 3), nn.Linear(3, 8))


# ---- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,), (41, 24), (5, 2, 3, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_are_rows_and_make_up_the_parameter(shape, ranks):
    numel = math.prod(shape)
    for turn in range(ranks + 1):
        found = shards_of(shape, ranks, turn)
        covered = torch.zeros(numel, dtype=torch.int64)
        for span, own in found:
            covered[span] += 1
            assert span.stop - span.start == math.prod(own)
            assert tuple(own[1:]) == tuple(shape[1:])
        assert bool((covered == 1).all())
        sizes = [own[0] for _, own in found]
        assert max(sizes) - min(sizes) <= 1


# ---- what they compute -----------------------------------------------------------------------------------------------


class UpsideDown(nn.Module):
    """The layer that is registered first is used last. It has one row, which is the second rank's of a node, and a
    dtype of its own, so that DDP has two buckets in the first step. The last of these has no part of the first rank.
    Later buckets have another order, and the last has parts of both.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head, self.body = nn.Linear(40, 1, bias=False, dtype=torch.float64), nn.Linear(24, 40)

    def forward(self, x):
        return self.head(self.body(x).tanh().double())


def beside_flat(rank, world_size, spec, nodes, cap, make):
    found = []
    for given in (nodes, None):
        model = wrap(make(), cap=cap)
        handle = compress(model, spec, nodes=given, min_numel=32)
        train(model, rank, range(6), sgd(model, 0.2))
        found.append((flat(model), handle.stats().total.sent_bytes, handle.residual_nbytes, handle.size))
    return found


@pytest.mark.parametrize(
    ("ranks", "nodes", "cap", "make"),
    [
        (4, 2, HUGE, mlp),
        (4, 2, TINY, odd),
        (4, 2, TINY, UpsideDown),
        *thorough((6, 2, TINY, odd), (6, 3, HUGE, odd), (8, 2, TINY, odd)),
    ],
)
def test_uncompressed_it_is_the_average(ranks, nodes, cap, make):
    answers = run_ranks(beside_flat, ranks, "none", nodes, cap, make)
    for (levels, sent, _, size), (plain, all_sent, _, _) in answers:
        torch.testing.assert_close(levels, plain, rtol=1e-5, atol=1e-6)
        assert torch.equal(levels, answers[0][0][0])
        assert size == nodes
        # 2·(N−1)/N of a part in L, beside 2·(N·L−1)/(N·L) of the whole.
        assert sent < all_sent / (ranks // nodes)


@pytest.mark.parametrize("spec", SPECS)
def test_between_nodes_travels_a_part_for_each_rank(spec):
    answers = run_ranks(beside_flat, 4, spec, 2, HUGE, mlp)
    for (levels, sent, residual, _), (_, all_sent, whole_residual, _) in answers:
        assert torch.equal(levels, answers[0][0][0])
        assert levels.isfinite().all()
        assert sent < 0.55 * all_sent
        assert residual <= 0.62 * whole_residual


def with_a_plan(rank, world_size, spec):
    """Parameters with a plan for whole parameters, and with its spec; and what a plan of another model meets."""
    shapes = {name: tuple(p.shape) for name, p in mlp().named_parameters() if p.dim() > 1 and p.numel() >= 32}
    plan = nb.Plan(tuple(nb.adapt.LayerPlan(name, shape, spec, 1.0, None) for name, shape in shapes.items()), "", 2)
    found = []
    for chosen in (plan, spec):
        model = wrap(mlp(), cap=TINY)
        compress(model, chosen, nodes=2, min_numel=32)
        train(model, rank, range(4), sgd(model, 0.2))
        found.append(flat(model))
    other = nb.Plan((nb.adapt.LayerPlan("another", (64, 64), spec, 1.0, None),), "", 2)
    return found, refusal(lambda: compress(wrap(mlp()), other, nodes=2, min_numel=32))


def test_a_plan_is_for_whole_parameters():
    for (planned, plain), refused in run_ranks(with_a_plan, 4, "topk:density=0.05+ef"):
        assert torch.equal(planned, plain)
        assert "the plan of another model" in refused[1]


def by_memory_and_by_messages(rank, world_size):
    """By size of buckets, parameters with and without shared memory; and what is left in the folder."""
    before = set(node_module._FOLDER.iterdir())
    found = {cap: [] for cap in (HUGE, TINY)}
    for shares in (True, False):
        if not shares:
            node_module._made = lambda _: None
        for cap, ways in found.items():
            model = wrap(odd(), cap=cap)
            handle = compress(model, "topk:density=0.1+ef", nodes=2, min_numel=32)
            train(model, rank, range(4), sgd(model, 0.2))
            ways.append((flat(model), handle._node._memory is not None))
    left = set(Path("/dev/shm").iterdir()) - before
    return found, [path.name for path in left if path.name.startswith("narrowband-")]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm to share memory in")
def test_a_node_computes_the_same_over_shared_memory_and_over_messages():
    for found, left in run_ranks(by_memory_and_by_messages, 6, fresh=True):
        for (shared, shares), (sent, sends) in found.values():
            assert shares
            assert not sends
            assert torch.equal(shared, sent)
        assert left == []


def without_room(rank, world_size):
    node_module._SHARE = 0.0
    model = wrap(mlp())
    handle = compress(model, "none", nodes=2, min_numel=32)
    train(model, rank, range(3))
    return flat(model), handle._node._memory is None


def elsewhere(rank, world_size):
    """The last rank of each node has another /dev/shm, as on another host or in another container."""
    if rank % 2:
        real = node_module.Path
        node_module.Path = lambda name: real(f"/nowhere{name}")
    model = wrap(mlp())
    handle = compress(model, "none", nodes=2, min_numel=32)
    train(model, rank, range(3))
    return flat(model), handle._node._memory is None


@pytest.mark.parametrize("job", [without_room, elsewhere])
def test_where_one_rank_cannot_share_memory_none_does(job):
    answers = run_ranks(job, 4, fresh=True)
    assert all(sends for _, sends in answers)
    assert all(torch.equal(parameters, answers[0][0]) for parameters, _ in answers)


def learns(rank, world_size, spec):
    model = wrap(mlp(), cap=TINY)
    handle = compress(model, spec, nodes=2, min_numel=32)
    return train(model, rank, [0] * 40, sgd(model, 0.2)), handle.buckets, handle.step


@pytest.mark.parametrize("spec", ["topk:density=0.1+ef", *thorough("powersgd:rank=2,min_ratio=1")])
def test_models_learn(spec):
    for losses, buckets, steps in run_ranks(learns, 4, spec):
        assert losses[-1] < 0.7 * losses[0]
        assert sum(map(len, buckets)) == 4
        assert steps == 40


def planned(rank, world_size):
    model = wrap(mlp())
    policy = nb.LGreCo("topk:density=0.1+ef", ["topk:density=0.05", "topk:density=0.2"], every=3)
    handle = compress(model, policy, nodes=2, min_numel=32)
    with model.no_sync():
        loss_of(model, 50, rank).backward()
    train(model, rank, range(8))
    return sorted(handle.plan.specs()), flat(model), handle.step


def test_policies_plan_for_shards():
    answers = run_ranks(planned, 4)
    for names, parameters, steps in answers:
        assert len(names) == 4
        assert torch.equal(parameters, answers[0][1])
        assert steps == 8


# ---- what is not finite, and what goes wrong -------------------------------------------------------------------------


def narrow():
    """The parameter whose gradient comes last has one row, which is the second rank's of a node."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 1, bias=False), nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 8))


def partly_ignored():
    """The same; and DDP leaves out a matrix."""
    model = narrow()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["3.weight"])
    return model


def not_finite(rank, world_size, cap, make, where):
    model = wrap(make(), cap=cap)
    handle = compress(model, "topk:density=0.1+ef", nodes=2, min_numel=32)
    train(model, rank, range(2))
    before = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    model.zero_grad()
    loss = loss_of(model, 2, rank)
    if rank == 1:  # one row of a layer: a shard of one rank of the node
        layer, row = where
        hook = model.module[layer].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([row]), math.inf))
    loss.backward()
    if rank == 1:
        hook.remove()
    bad = [bool(p.grad.isnan().all()) for _, p in averaged_by(model)]
    after = handle.state_dict()["feedback"]
    same = all(torch.equal(x, after[name]) for name, x in before.items())
    skipped = handle.stats().total.skipped
    train(model, rank, [2])
    return bad, same, skipped, handle.stats().total.skipped - skipped


@pytest.mark.parametrize(
    ("cap", "make", "where"),
    [
        (HUGE, mlp, (0, 39)),
        *((TINY, make, where) for make, where in [(mlp, (0, 39)), (narrow, (1, 0)), (narrow, (1, 39))]),
        *((TINY, partly_ignored, (1, row)) for row in (0, 39)),
    ],
)
def test_where_one_shard_is_not_finite_no_rank_of_any_node_commits(cap, make, where):
    for bad, same, skipped, later in run_ranks(not_finite, 4, cap, make, where):
        assert all(bad) or cap == TINY
        assert any(bad)
        assert same
        assert (skipped, later) == (1, 0)


def gone(rank, world_size):
    model = wrap(mlp())
    handle = compress(model, "topk:density=0.1+ef", nodes=2, min_numel=32)
    train(model, rank, range(2))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = [refusal(lambda: train(model, rank, [2])) for _ in range(3)]
    return errors, refusal(handle.remove)


def test_a_rank_that_goes_away_is_an_error_on_all_of_both_levels():
    with pytest.raises(RankError) as caught:
        run_ranks(gone, 4, fresh=True, grace_s=180.0)
    assert set(caught.value.results) == {0, 1, 2}
    for errors, end in caught.value.results.values():
        assert errors[0][0] in ("RuntimeError", "DisagreementError")
        assert "an exchange inside its node failed" in errors[0][1] or errors[0][0] == "RuntimeError"
        assert [error[0] for error in errors[1:]] == ["RuntimeError"] * 2
        assert "stopped at an earlier step" in errors[-1][1]
        assert end is None


def saved(rank, world_size):
    model = wrap(mlp())
    handle = compress(model, "topk:density=0.1+ef", nodes=world_size // 2, min_numel=32)
    train(model, rank, range(4))
    state, parameters = copy.deepcopy((handle.state_dict(), model.state_dict()))
    train(model, rank, range(4, 7))
    return state, parameters, flat(model)


def resumed(rank, world_size, states, parameters):
    model = wrap(mlp())
    handle = compress(model, "topk:density=0.1+ef", nodes=world_size // 2, min_numel=32)
    model.load_state_dict(parameters)
    handle.load_state_dict([state for at, state in enumerate(states) if at % 2 == rank % 2])
    train(model, rank, range(4, 7))
    return flat(model)


@pytest.mark.parametrize("ranks", [4, 6])
def test_a_run_goes_on_to_the_bit_and_on_another_number_of_nodes(ranks):
    before = run_ranks(saved, 4)
    after = run_ranks(resumed, ranks, [state for state, *_ in before], before[0][1])
    assert all(torch.equal(parameters, after[0]) for parameters in after)
    assert ranks != 4 or torch.equal(after[0], before[0][2])


# ---- who is on which node --------------------------------------------------------------------------------------------


def sizes(rank, world_size):
    def nodes_of(nodes):
        model = wrap(mlp())
        return compress(model, "none", nodes=nodes, min_numel=32).size

    found = {"one host": nodes_of("auto"), "a number": nodes_of(2), "each": nodes_of(4)}
    found["a mesh"] = nodes_of(init_device_mesh("cpu", (2, 2)))
    os.environ["GROUP_RANK"] = str(rank % 2)  # as torchrun says
    found["torchrun"] = nodes_of("auto")
    os.environ["GROUP_RANK"] = str(int(rank == 3))
    found["uneven"] = refusal(lambda: nodes_of("auto"))
    os.environ["GROUP_RANK"] = str(rank % 2)
    found["two hosts"] = refusal(lambda: nodes_of(2))
    del os.environ["GROUP_RANK"]
    found["three"] = refusal(lambda: nodes_of(3))
    found["a word"] = refusal(lambda: nodes_of("all"))
    found["no whole number"] = refusal(lambda: nodes_of(2.5))
    found["a mesh of others"] = refusal(lambda: nodes_of(init_device_mesh("cpu", (4,))))
    found["plain"] = refusal(lambda: nb.compress_gradients(mlp(), "none", nodes=2))
    sparse = wrap(nn.Sequential(nn.Embedding(10, 4, sparse=True)))
    found["sparse"] = refusal(lambda: compress(sparse, "none", nodes=2))
    found["complex"] = refusal(lambda: compress(wrap(nn.Linear(8, 8, dtype=torch.complex64)), "none", nodes=2))
    found["no rows"] = refusal(lambda: compress(wrap(nn.Linear(1, 1, bias=False)), "none", nodes=2))
    dist.barrier()
    return found


def test_who_is_on_which_node():
    for found in run_ranks(sizes, 4):
        assert {name: size for name, size in found.items() if isinstance(size, int)} == {
            "one host": 4, "a number": 2, "each": 4, "a mesh": 2, "torchrun": 2,
        }  # fmt: skip
        words = {
            "uneven": "different numbers of ranks (3, 1)",
            "two hosts": "one node of ranks on 2 hosts",
            "three": "nodes=3 does not divide 4 ranks",
            "a word": "nodes='all': expected a number of machines",
            "no whole number": "nodes=2.5: expected a number of machines",
            "a mesh of others": "expected a mesh of nodes × ranks",
            "plain": "nodes= is for models in DistributedDataParallel",
            "sparse": "sparse gradients cannot be averaged shard by shard",
            "complex": "complex parameters cannot be averaged shard by shard",
            "no rows": "too few rows of parameters",
        }
        for name, word in words.items():
            assert word in found[name][1], (name, found[name])


def mistaken_beside_mates(rank, world_size, sharded):
    """What all ranks hear where rank 1 alone calls something else; its mates compare with other ranks than it does."""
    one, layers = rank == 1, {"0.weight": "topk:density=0.5"}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    model = shard(mlp(), mesh["ranks"]) if sharded else wrap(mlp())
    options = {"process_group": mesh["nodes"].get_group()} if sharded else {"nodes": mesh}

    def made(spec):
        return nb.compress_gradients(model, spec, min_numel=32, **options)

    def fails(*_):
        raise MemoryError("no room")

    errors = {"set-up": refusal(lambda: made("sign+ef" if one else "fp16"))}
    former, warmup.use_all = warmup.use_all, fails if one else warmup.use_all
    try:
        errors["loops"] = refusal(lambda: made("sign+ef"))
    finally:
        warmup.use_all = former
    handle = made("sign+ef")
    errors["a name"] = refusal(lambda: handle.set_layers({"1.bias": "sign"} if one else layers))
    errors["a spec"] = refusal(lambda: handle.set_layers({"0.weight": "topk:density=0.4"} if one else layers))
    errors["a state"] = refusal(lambda: handle.load_state_dict({} if one else handle.state_dict()))
    own = handle.state_dict()
    errors["a folder"] = refusal(lambda: handle.load_saved("nowhere") if one else handle.load_state_dict(own))
    errors["a call"] = refusal(lambda: handle.set_layers(layers) if one else handle.remove())
    train(model, rank, range(2), sgd(model))
    handle.remove()
    return errors, handle.step


@pytest.mark.parametrize("sharded", [False, True], ids=["nodes", "FSDP2"])
def test_a_mistake_of_one_rank_is_told_to_its_mates_too(sharded):
    words = {
        "set-up": "spec (sign+ef on rank 1; fp16 on rank 3)",
        "loops": "no room",
        "a name": "1.bias: this handle compresses no parameters",
        "a spec": "topk:density=0.4+ef on rank 1",
        "a state": "the state lacks",
        "a folder": "nowhere has no checkpoint that torch.distributed.checkpoint.save has finished",
        "a call": "on rank 1",
    }
    of_rank_1 = dict.fromkeys(("a name", "a state"), "ValueError")
    of_rank_1 |= {"loops": "MemoryError", "a folder": "FileNotFoundError"}
    for rank, (errors, steps) in enumerate(run_ranks(mistaken_beside_mates, 4, sharded)):
        assert steps == 2
        for what, (kind, text) in errors.items():
            alone = of_rank_1 if rank == 1 else {}
            assert kind == alone.get(what, "DisagreementError")
            assert words[what] in text, (rank, what, text)


def with_a_small_part(rank, world_size):
    """A rank of a node has two rows of three, which are compressed, and the other has one."""
    model = wrap(nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 40), nn.Linear(40, 3)))
    handle = nb.compress_gradients(model, "sign+ef", nodes=2, min_numel=64)
    handle.set_layers({"2.weight": "topk:density=0.5"})
    with pytest.raises(ValueError, match=r"2\.bias"):
        handle.set_layers({"2.bias": "topk:density=0.5"})
    model(torch.randn(4, 40)).square().sum().backward()
    return handle.layers.override_texts(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_layers_of_which_some_ranks_have_little_may_have_a_spec_of_their_own():
    answers = run_ranks(with_a_small_part, 4)
    assert sorted(texts.get("2.weight", "") for texts, _ in answers) == ["", "", *["topk:density=0.5+ef"] * 2]
    assert all(torch.equal(gradient, answers[0][1]) for _, gradient in answers)


def in_the_way(rank, world_size):
    """The inner module, trained by mistake: nothing is averaged."""
    model = wrap(mlp())
    compress(model, "none", nodes=2, min_numel=32)
    with heard():
        return refusal(lambda: train(model.module, rank, range(5)))


def test_a_script_that_trains_the_module_inside_hears_of_it():
    for error in run_ranks(in_the_way, 4):
        assert error[0] == "RuntimeError"
        assert "gradients are not averaged" in error[1]
