"""Hooks of users on parameters: what they see of a gradient, and that what they leave of it is averaged."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import narrowband as nb
from tests.gradients.shards import shard
from tests.gradients.training import loss_of, mlp, wrap
from tests.ranks import run_ranks

#: Way of averaging → whether hooks see averages.
SEEN = {"ddp": False, "views": False, "plain": False, "averager": False, "shards": True}


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
        nb.compress_gradients(model, "none")
    if not early:
        set_hooks()
    loss_of(model, 0, rank).backward()
    if way == "averager":
        averager.average()
    return gradients(net)


def close(found, expected):
    return found.keys() == expected.keys() and all(torch.allclose(found[n], expected[n], atol=1e-6) for n in expected)


def seen(rank, world_size, way):
    """Whether hooks saw this rank's own gradients, or averages; and whether averages are there afterwards."""
    found = {}
    after = backward_with(way, rank, world_size, lambda name, p: found.update({name: p.grad.clone()}), early=False)
    found = {name: whole(x) for name, x in found.items()}
    mean = {name: sum(own_of(r)[name] for r in range(world_size)) / world_size for name in after}
    return close(found, own_of(rank)), close(found, mean), close(after, mean)


@pytest.mark.parametrize("way", SEEN)
def test_hooks_see_the_own_gradient_unless_fsdp2_averaged_it(way):
    assert run_ranks(seen, 2, way) == [(not SEEN[way], SEEN[way], True)] * 2


def changed(rank, world_size, way, early):
    """Names of gradients that are not the mean of what ranks' hooks left."""

    def scale(_, p):
        p.grad.mul_(rank + 1)

    after = backward_with(way, rank, world_size, scale, early=early)
    expected = {name: sum((r + 1) * own_of(r)[name] for r in range(world_size)) / world_size for name in after}
    return [name for name in after if not torch.allclose(after[name], expected[name], atol=1e-6)]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("way", [way for way in SEEN if not SEEN[way]])
def test_what_hooks_leave_is_averaged_whenever_they_were_set(way, early):
    assert run_ranks(changed, 2, way, early) == [[], []]
