"""Compression inside FSDP2: models train as with FSDP2 alone, whatever their layers and options."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from tests.gradients.shards import shard, whole
from tests.gradients.training import loss_of, mlp, refusal, train_in_two_passes
from tests.loops import asked_for_from_now
from tests.ranks import run_ranks
from tests.sharding.training import FINE, OPTIONS, adamw, compress, mesh_of, train
from tests.thorough import thorough


def with_messages_of_users(rank, world_size):
    """A user's own message, which is waited for while the library's travel in the same group; and leaves as outputs."""

    class Returns(nn.Sequential):
        def forward(self, x):
            return super().forward(x), self[0].kept

    model = Returns(nn.Linear(24, 16), nn.Linear(16, 8))
    kept = model[0].kept = torch.ones(1, requires_grad=True)  # no parameter, so that FSDP2 leaves it as it is
    handle = compress(shard(model, mesh_of(world_size)), **FINE)
    message = torch.zeros(3)
    work = dist.irecv(message, src=0) if rank else None
    for _ in range(2):
        model(torch.ones(1, 24))[0].sum().backward()
    if work is None:
        dist.send(torch.arange(3.0), dst=1)
    else:
        work.wait()
    return message.tolist(), handle.stats().total.steps, len(kept._backward_hooks or ())


def test_messages_of_users_and_leaves_as_outputs_are_left_alone():
    hooks = 2  # of FSDP2 itself, one per pass
    assert run_ranks(with_messages_of_users, 2) == [([0.0] * 3, 2, hooks), ([0.0, 1.0, 2.0], 2, hooks)]


def beside_fsdp(rank, world_size, options, specs):
    found = []
    for ours in (True, False):
        model = shard(mlp(), mesh_of(world_size), **OPTIONS[options])
        handle = compress(model, **specs) if ours else None
        losses = train(model, rank, range(5), adamw(model))
        found.append((whole(model), losses))
        if handle is not None:
            stats = handle.stats().total
    return found, stats


@pytest.mark.parametrize("options", ["plain", *thorough("kept", "bf16", "offload", "columns")])
def test_without_codecs_it_is_fsdp2_to_the_bit(options):
    for ((ours, mine), (native, its)), stats in run_ranks(
        beside_fsdp, 4, options, {"gradients": "none", "parameters": "none"}
    ):
        assert torch.equal(ours, native)
        assert mine == its
        assert stats.ratio == pytest.approx(1.0, abs=0.01)


def two_passes(rank, world_size):
    found = []
    for ours in (True, False):
        model = shard(mlp(), mesh_of(world_size))
        if ours:
            compress(model, gradients="none", parameters="none")
        train_in_two_passes(model, rank, range(4), adamw(model))
        found.append(whole(model))
    return found


def test_a_step_may_have_several_backward_passes_of_which_fsdp2_knows_the_last():
    for ours, native in run_ranks(two_passes, 2):
        assert torch.equal(ours, native)


#: Ways to train with FSDP2: a model, a step's number and this rank → a step's gradients.
WAYS = {
    "accumulated": lambda model, step, rank: (
        model.set_requires_gradient_sync(False),
        loss_of(model, 10 + step, rank).backward(),
        model.set_requires_gradient_sync(True),
        loss_of(model, step, rank).backward(),
    ),
    "not resharded after backward": lambda model, step, rank: (
        model.set_reshard_after_backward(False),
        loss_of(model, 10 + step, rank).backward(),
        model.set_reshard_after_backward(True),
        loss_of(model, step, rank).backward(),
    ),
    "two forward passes": lambda model, step, rank: (
        loss_of(model, step, rank) + loss_of(model, 10 + step, rank)
    ).backward(),
    "gathered before": lambda model, step, rank: (model.unshard(), loss_of(model, step, rank).backward()),
}


def in_all_ways(rank, world_size):
    """Names of ways in which parameters are others than those of FSDP2 alone."""
    differ = []
    for name, way in WAYS.items():
        found = []
        for ours in (True, False):
            model = shard(mlp(), mesh_of(world_size))
            if ours:
                compress(model, gradients="none", parameters="none")
            optimizer = adamw(model)
            for step in range(3):
                optimizer.zero_grad(set_to_none=False)
                way(model, step, rank)
                optimizer.step()
            found.append(whole(model))
        if not torch.equal(*found):
            differ.append(name)
    return differ


def test_gradients_are_those_of_fsdp2_in_whatever_passes_they_come():
    assert run_ranks(in_all_ways, 2) == [[], []]


@pytest.mark.parametrize(("ranks", "options"), [(3, "plain"), (4, "bf16"), *thorough((2, "offload"), (4, "columns"))])
def test_eight_bits_train_like_fsdp2(ranks, options):
    """With three ranks shards are uneven, and padded."""
    for ((ours, mine), (native, its)), stats in run_ranks(beside_fsdp, ranks, options, FINE):
        assert (ours - native).norm() / native.norm() < 0.02
        assert not torch.equal(ours, native)
        assert mine == pytest.approx(its, rel=5e-3)
        assert stats.ratio > 2.5
        assert stats.steps == 5


class Tied(nn.Module):
    """An embedding that is the head, too; a layer that is frozen, a nested one, and one checkpointed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Linear(24, 24, bias=False)
        self.frozen = nn.Linear(24, 24)
        self.inner = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 24))
        self.head = nn.Linear(24, 24, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(24, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        h = self.frozen(self.embed(x))
        return self.out(self.head(checkpoint(self.inner, h, use_reentrant=False)))


def of_all_kinds(rank, world_size):
    found = []
    for ours in (True, False):
        model = Tied()
        mesh = mesh_of(world_size)
        fully_shard(model.inner[3], mesh=mesh)
        fully_shard(model.inner, mesh=mesh)
        fully_shard([model.frozen, model.out], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if ours:
            compress(model, **FINE)
        losses = train(model, rank, range(5), adamw(model))
        found.append((whole(model), losses))
    return found


def test_tied_frozen_nested_grouped_and_checkpointed_layers():
    for (ours, mine), (native, its) in run_ranks(of_all_kinds, 2):
        assert (ours - native).norm() / native.norm() < 0.02
        assert mine == pytest.approx(its, rel=5e-3)


def whole_model_checkpointed(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    handle = compress(model, **FINE)
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        loss = checkpoint(lambda at: loss_of(model, at, rank), step, use_reentrant=False)
        loss.backward()
        optimizer.step()
    return handle.stats().total.steps, whole(model).isfinite().all().item()


def test_a_model_that_is_computed_again_in_backward():
    assert run_ranks(whole_model_checkpointed, 2) == [(4, True)] * 2


def by_parts(rank, world_size):
    """Layers are called by themselves, outside of the model's forward."""
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    optimizer = adamw(model)
    train(model, rank, range(2), optimizer)
    x = torch.ones(1, 24)
    with torch.no_grad():
        inside = model[0](x)
        after = nn.functional.linear(x, model[0].weight.full_tensor(), model[0].bias.full_tensor())
        model[0].weight.data.to_local().add_(0.01)
        moved = model[0](x)
    return float((inside - after).abs().max()), float((moved - inside).abs().max())


def test_a_layer_called_by_itself_gets_its_present_parameters():
    for error, moved in run_ranks(by_parts, 2):
        assert error < 1e-3
        assert moved > 0.05


def evaluated_between(rank, world_size):
    found = []
    for ours in (True, False):
        model = shard(mlp(), mesh_of(world_size))
        if ours:
            compress(model, **FINE)
        losses = train(model, rank, range(3), adamw(model))
        with torch.inference_mode():
            losses.append(loss_of(model, 0, rank).item())
        found.append(losses + train(model, rank, range(3), adamw(model)))
    return found


def test_inference_mode_between_steps():
    """In new processes: what FSDP2 keeps of inference mode disturbs checkpoints later."""
    for losses, its in run_ranks(evaluated_between, 2, fresh=True):
        assert losses == pytest.approx(its, rel=5e-3)


def smaller_groups(rank, world_size):
    model = shard(mlp(), mesh_of(world_size), reshard_after_forward=2)
    handle = compress(model, **FINE)
    losses = train(model, rank, range(6), adamw(model))
    plain = shard(mlp(), mesh_of(world_size), reshard_after_forward=2)
    return losses, train(plain, rank, range(6), adamw(plain)), handle.stats().total.ratio


def test_parameters_resharded_to_fewer_ranks_after_forward():
    for losses, its, ratio in run_ranks(smaller_groups, 4):
        assert losses == pytest.approx(its, rel=5e-3)
        assert ratio > 1.5


def with_nodes(rank, world_size):
    """Shards inside pairs, compressed, and gradients averaged between pairs, compressed, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "shards"))
    model = shard(mlp(), mesh["shards"])
    inside = compress(model, **FINE)
    between = nb.compress_gradients(model, "qsgd:bits=8", min_numel=64, process_group=mesh["nodes"].get_group())
    losses = train(model, rank, range(5), adamw(model))
    native = shard(mlp(), mesh)
    its = train(native, rank, range(5), adamw(native))
    hybrid = shard(mlp(), mesh)
    compress(hybrid, **FINE)
    again = train(hybrid, rank, range(5), adamw(hybrid))
    return losses, its, again, inside.stats().total.ratio, between.stats().total.ratio


def test_between_nodes_as_well():
    for losses, its, hybrid, inside, between in run_ranks(with_nodes, 4):
        assert losses == pytest.approx(its, rel=5e-3)
        assert hybrid == pytest.approx(its, rel=5e-3)
        assert min(inside, between) > 2


def removed(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    handle = compress(model, **FINE)
    twice = refusal(lambda: compress(model, **FINE))
    optimizer = adamw(model)
    train(model, rank, range(2), optimizer)
    handle.remove()
    handle.remove()
    copied = shard(mlp(), mesh_of(world_size))
    with torch.no_grad():
        for mine, other in zip(copied.parameters(), model.parameters(), strict=True):
            mine.to_local().copy_(other.to_local())
    other = adamw(copied)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, rank, range(2, 4), optimizer)
    train(copied, rank, range(2, 4), other)
    compress(model, **FINE)
    return twice, torch.equal(whole(model), whole(copied)), repr(handle), handle.reference_nbytes


def test_remove_leaves_fsdp2_as_it_was():
    for twice, equal, text, nbytes in run_ranks(removed, 2):
        assert twice[0] == "UnsupportedError"
        assert equal
        assert "removed" in text
        assert nbytes == 0


def loops(rank, world_size):
    """Those that were asked for at set-up, and later."""
    model = shard(mlp(), mesh_of(world_size))
    asked = asked_for_from_now()
    compress(model, gradients="qsgd:bits=4", parameters="uniform:bits=4")
    before = len(asked)
    train(model, rank, range(3), adamw(model))
    return asked[:before], asked[before:]


def test_no_step_waits_for_a_compiler():
    for before, later in run_ranks(loops, 2, fresh=True, timeout_s=600):
        assert before
        assert later == []
