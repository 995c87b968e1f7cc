"""Hooks of users on parameters: what they see of a gradient, and that what they leave of it is averaged."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import narrowband as nb
from tests.gradients.shards import mesh_of, shard
from tests.gradients.training import loss_of, mlp, wrap
from tests.ranks import run_ranks

#: Way of averaging → among how many ranks, from this one on, a gradient is averaged before hooks see it.
SEEN = {"ddp": 1, "views": 1, "plain": 1, "averager": 1, "shards": 2, "sharded nodes": 2}
#: The number of ranks where it is not 2.
RANKS = {"sharded nodes": 4}


def gradients(model):
    """Of all parameters, whole."""
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x.clone()


def own_of(rank):
    model = mlp()
    loss_of(model, 0, rank).backward()
    return gradients(model)


def backward_with(way, rank, world_size, hook, *, early):
    """Gradients after a backward pass of a model whose parameters have a hook, set before the handle if ``early``."""
    net = mlp()
    model = wrap(net, gradient_as_bucket_view=way == "views") if way in ("ddp", "views") else net
    if way == "shards":
        model = shard(net, init_device_mesh("cpu", (world_size,)))
    mesh = mesh_of(2, 2) if way == "sharded nodes" else None
    if mesh is not None:
        model = shard(net, mesh["shards"])

    def set_hooks():
        for name, p in net.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: hook(name, p))

    if early:
        set_hooks()
    if way == "shards":
        nb.compress_shards(model, gradients="none", parameters="none")
    elif way == "averager":
        averager = nb.Averager(model, "none")
    else:
        nb.compress_gradients(model, "none", process_group=None if mesh is None else mesh["nodes"].get_group())
    if not early:
        set_hooks()
    loss_of(model, 0, rank).backward()
    if way == "averager":
        averager.average()
    return gradients(net)


def close(found, expected):
    return found.keys() == expected.keys() and all(torch.allclose(found[n], expected[n], atol=1e-6) for n in expected)


def mean_of(ranks):
    own = [own_of(rank) for rank in ranks]
    return {name: sum(each[name] for each in own) / len(own) for name in own[0]}


def seen(rank, world_size, way):
    """Whether hooks saw the mean of the ranks that average before them, and whether that of all is there afterwards."""
    found = {}
    after = backward_with(way, rank, world_size, lambda name, p: found.update({name: p.grad.clone()}), early=False)
    found = {name: whole(x) for name, x in found.items()}
    first = rank - rank % SEEN[way]
    return close(found, mean_of(range(first, first + SEEN[way]))), close(after, mean_of(range(world_size)))


@pytest.mark.parametrize("way", SEEN)
def test_hooks_see_the_own_gradient_unless_fsdp2_averaged_it(way):
    ranks = RANKS.get(way, 2)
    assert run_ranks(seen, ranks, way) == [(True, True)] * ranks


def changed(rank, world_size, way, early):
    """Names of gradients that are not the mean of what ranks' hooks left."""
    together = SEEN[way]

    def scale(_, p):
        p.grad.mul_(rank // together + 1)

    after = backward_with(way, rank, world_size, scale, early=early)
    left = [{name: (r // together + 1) * x for name, x in own_of(r).items()} for r in range(world_size)]
    expected = {name: sum(each[name] for each in left) / world_size for name in after}
    return [name for name in after if not torch.allclose(after[name], expected[name], atol=1e-6)]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("way", [way for way in SEEN if way != "shards"])
def test_what_hooks_leave_is_averaged_whenever_they_were_set(way, early):
    ranks = RANKS.get(way, 2)
    assert run_ranks(changed, ranks, way, early) == [[]] * ranks
