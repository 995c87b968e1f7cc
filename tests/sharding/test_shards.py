"""Compression inside FSDP2: gradients on their way to their shard, and parameters on their way to all ranks."""

from __future__ import annotations

import copy
import math
import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from narrowband.sharding import setup
from tests.gradients.shards import shard, whole
from tests.gradients.training import adamw, heard, loss_of, mlp, refusal, train_in_two_passes
from tests.loops import asked_for_from_now
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough

FINE = {"gradients": "qsgd:bits=8", "parameters": "uniform:bits=8"}


def mesh_of(world_size):
    return init_device_mesh("cpu", (world_size,))


def compress(model, **options):
    return nb.compress_shards(model, **{"min_numel": 64, **options})


def train(model, rank, steps, optimizer):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def computed_with(model):
    """The parameters that a forward pass sees, by the name of the module's layers."""
    seen = {}

    def look(name):
        def hook(module, _):
            for own, p in module.named_parameters(recurse=False):
                seen[f"{name}.{own}"] = p.detach().clone()

        return hook

    hooks = [m.register_forward_pre_hook(look(name)) for name, m in model.named_modules() if name]
    with torch.no_grad():
        loss_of(model, 0, 0)
    for hook in hooks:
        hook.remove()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # FSDP2 leaves the outermost as it is
    return seen


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


# ---- the same as FSDP2 where nothing is lost -------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "columns": {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else Shard(0)},
}


def beside_fsdp(rank, world_size, options, specs):
    found = []
    for ours in (True, False):
        model = shard(mlp(), mesh_of(world_size), **OPTIONS[options])
        handle = compress(model, **specs) if ours else None
        losses = train(model, rank, range(8), adamw(model))
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


@pytest.mark.parametrize(("ranks", "options"), [(3, "plain"), (4, "bf16"), *thorough((2, "offload"), (4, "columns"))])
def test_eight_bits_train_like_fsdp2(ranks, options):
    """With three ranks shards are uneven, and padded."""
    for ((ours, mine), (native, its)), stats in run_ranks(beside_fsdp, ranks, options, FINE):
        assert (ours - native).norm() / native.norm() < 0.02
        assert not torch.equal(ours, native)
        assert mine == pytest.approx(its, rel=5e-3)
        assert stats.ratio > 2.5
        assert stats.steps == 8


# ---- gradients -------------------------------------------------------------------------------------------------------


def reduced(rank, world_size, spec):
    """Gradients as FSDP2 reduces them, and as they arrive compressed, several times."""
    found = []
    for seed in (None, *range(40)):
        model = shard(mlp(), mesh_of(world_size))
        if seed is not None:
            compress(model, gradients=spec, parameters="none", seed=seed)
        loss_of(model, 0, rank).backward()
        found.append({name: p.grad.full_tensor().double() for name, p in model.named_parameters()})
    return found


def test_gradients_are_unbiased_and_as_fine_as_the_codec():
    """QSGD's level is ‖group‖∞ / (2**(bits − 1) − 1), and a mean of N ranks is off by at most (N − 1)/N of one."""
    exact, *drawn = run_ranks(reduced, 4, "qsgd:bits=4")[0]
    for name, g in exact.items():
        errors = torch.stack([each[name] - g for each in drawn])
        if g.numel() < 64 or g.dim() < 2:
            assert errors.abs().max() < 1e-6 * g.abs().max()
            continue
        assert errors.abs().max() > 1e-3 * g.abs().max()
        # A rank's own gradients are up to about twice as large as their mean here.
        assert errors.abs().max() <= 4 * g.abs().max() / 7
        assert errors.mean(0).square().mean() < 3 * errors.square().mean() / len(drawn)


def one_by_one(rank, world_size):
    """What arrives at this rank's shard of one matrix, beside what the codec says of each rank's part, in float64."""
    torch.manual_seed(3)
    layer = nn.Linear(32, 16 * world_size, bias=False)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(rank))
    layer(x).square().sum().backward()
    gathered = [torch.empty_like(layer.weight.grad) for _ in range(world_size)]
    dist.all_gather(gathered, layer.weight.grad)
    own = [g.chunk(world_size)[rank].reshape(-1) for g in gathered]
    codec = nb.codec("uniform:bits=4")
    expected = sum(g.double() if at == rank else codec.roundtrip(g).double() for at, g in enumerate(own)) / world_size
    layer.zero_grad()
    model = fully_shard(layer, mesh=mesh_of(world_size))
    compress(model, gradients="uniform:bits=4", parameters="none")
    model(x).square().sum().backward()
    return (model.weight.grad.to_local().reshape(-1).double() - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_rank_adds_up_what_others_say_and_its_own(ranks):
    assert max(run_ranks(one_by_one, ranks)) < 1e-6


def not_finite(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    loss = loss_of(model, 0, rank)
    (loss * (float("nan") if rank == 1 else 1.0)).backward()
    return [bool(p.grad.to_local().isfinite().all()) for p in model.parameters()]


def test_what_is_not_finite_on_one_rank_is_seen_in_every_shard():
    assert not any(any(each) for each in run_ranks(not_finite, 3))


def with_a_factor(rank, world_size, forced):
    model = shard(mlp(), mesh_of(world_size))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if forced:
                module.set_force_sum_reduction_for_comms(True)
    compress(model, gradients="uniform:bits=8", parameters="none")
    refused = refusal(lambda: loss_of(model, 0, rank).backward())
    return refused, [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]


def test_gradients_may_be_divided_by_another_number():
    (refused, _), *_ = run_ranks(with_a_factor, 2, False)
    assert refused[0] == "UnsupportedError"
    assert "set_force_sum_reduction_for_comms" in refused[1]
    (refused, summed), *_ = run_ranks(with_a_factor, 2, True)
    assert refused is None
    (exact, *_), *_ = run_ranks(reduced, 2, "none")
    for total, mean in zip(summed, exact.values(), strict=True):
        assert (total.double() - 2 * mean).norm() < 0.02 * mean.norm()


class Sometimes(nn.Module):
    """One of its layers is used in some steps only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.extra, self.last = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.use = True

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(self.extra(h) if self.use else h)


def partly_used(rank, world_size):
    found = []
    for ours in (True, False):
        model = fully_shard(Sometimes(), mesh=mesh_of(world_size))
        if ours:
            compress(model, gradients="qsgd:bits=8", parameters="none")
        optimizer = adamw(model)
        for step in range(6):
            model.use = step % 2 == 0
            train(model, rank, [step], optimizer)
        found.append(whole(model))
    return (found[0] - found[1]).norm() / found[1].norm()


def test_parameters_without_a_gradient_in_some_steps():
    assert max(run_ranks(partly_used, 2)) < 0.02


# ---- parameters ------------------------------------------------------------------------------------------------------


def followed(rank, world_size, spec):
    """How far what ranks compute with is from the optimizer's parameters, in units of a step's change, per step."""
    model = shard(mlp(), mesh_of(world_size))
    handle = compress(model, gradients="none", parameters=spec)
    optimizer = adamw(model)
    distances, before = [], whole(model)
    for step in range(60):
        train(model, rank, [step], optimizer)
        now = whole(model)
        seen = torch.cat([x.double().reshape(-1) for x in computed_with(model).values()])
        distances.append(float((seen - now).norm() / (now - before).norm()))
        before = now
    seen = [torch.empty_like(seen) for _ in range(world_size)]
    dist.all_gather(seen, torch.cat([x.double().reshape(-1) for x in computed_with(model).values()]))
    return distances, all(torch.equal(seen[0], each) for each in seen), handle.stats().total.ratio


@pytest.mark.parametrize(("spec", "share"), [("uniform:bits=8", 0.02), ("uniform:bits=4", 0.25), ("qsgd:bits=4", 0.5)])
def test_what_ranks_compute_with_follows_the_optimizer(spec, share):
    """Errors do not add up, however many steps there were, and all ranks compute with the same parameters."""
    for distances, equal, ratio in run_ranks(followed, 2, spec):
        assert equal
        assert max(distances[1:]) < share
        assert sum(distances[-10:]) < 2 * sum(distances[1:11])
        assert ratio > 1


def kept_quiet(rank, world_size):
    """Bytes of parameters, of each call."""
    model = shard(mlp(), mesh_of(world_size))
    model[0].weight.requires_grad_(False)
    handle = compress(model, gradients="none", parameters="uniform:bits=8")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def sent(call):
        call()
        last = handle.stats().last
        return last.sent_bytes - last.sent_gradient_bytes, last.raw_bytes - last.raw_gradient_bytes

    def evaluate():
        with torch.no_grad():
            loss_of(model, 7, rank)

    def train_once():
        loss_of(model, 0, rank).backward()
        optimizer.step()

    return {
        "first": sent(train_once),
        "changed": sent(lambda: loss_of(model, 0, rank).backward()),
        "micro-batch": sent(lambda: loss_of(model, 1, rank).backward()),
        "evaluation": sent(evaluate),
    }


def test_nothing_is_sent_where_nothing_has_changed():
    for sent in run_ranks(kept_quiet, 2):
        assert sent["first"][0] < sent["first"][1] < 2.1 * sent["first"][0]  # once, and not twice
        assert 3 * sent["changed"][0] < sent["first"][0]  # differences, and none of the frozen layer
        assert sent["micro-batch"][0] < 50
        assert sent["evaluation"][0] < 50
        assert sent["evaluation"][1] > 1000


def whole_again(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    handle = compress(model, gradients="none", parameters="uniform:bits=4")
    optimizer = adamw(model)
    train(model, rank, range(3), optimizer)
    differences = handle.stats().last.ratio
    exact = []
    for scale in (-3.0, float("nan"), 2.0):
        with torch.no_grad():
            for p in model.parameters():
                p.data.to_local().fill_(scale) if math.isnan(scale) else p.data.to_local().normal_(std=abs(scale))
        seen = torch.cat([x.double().reshape(-1) for x in computed_with(model).values()])
        exact.append(torch.equal(seen.nan_to_num(7.0), whole(model).nan_to_num(7.0)))
    return exact, handle.stats().last.ratio < 1.1 < differences


def test_parameters_that_somebody_replaced_are_sent_as_they_are():
    """Also through ``.data``, which autograd's version counters do not see, and after NaN."""
    assert run_ranks(whole_again, 2) == [([True, True, True], True)] * 2


def moved_within(rank, world_size):
    """What a layer computes with after its rows, and then its columns, changed places; and what it should."""
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    computed_with(model)
    found = []
    for count, dim in ((1, 0), (2, 1)):
        own = model[0].weight.to_local()
        own.data.copy_(own.roll(count, dim))
        found.append((computed_with(model)["0.weight"], model[0].weight.full_tensor().detach()))
    return found


def test_weights_that_change_places_are_a_change():
    for found in run_ranks(moved_within, 2):
        for computed, expected in found:
            assert torch.equal(computed, expected)


def without_references(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    handle = compress(model, **FINE, references=False)
    losses = train(model, rank, range(8), adamw(model))
    plain = shard(mlp(), mesh_of(world_size))
    its = train(plain, rank, range(8), adamw(plain))
    seen, own = computed_with(model), whole(model)
    flat = torch.cat([x.double().reshape(-1) for x in seen.values()])
    return losses, its, handle.reference_nbytes, handle.stats().total.ratio, float((flat - own).norm() / own.norm())


def test_without_references_parameters_are_compressed_themselves():
    for losses, its, nbytes, ratio, error in run_ranks(without_references, 2):
        assert losses == pytest.approx(its, rel=0.02)
        assert nbytes == 0
        assert ratio > 2.5
        assert 1e-4 < error < 0.02


def different_references(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    optimizer = adamw(model)
    train(model, rank, range(2), optimizer)
    if rank:
        state = model[0]._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # PyTorch 2.11 has one
        exchange = groups[0]._all_gather_comm
        exchange.reference.view(-1)[0] += 1
    return refusal(lambda: train(model, rank, range(2, 60), optimizer))


def test_references_that_differ_are_an_error_on_all_ranks():
    for kind, message in run_ranks(different_references, 2):
        assert kind == "RuntimeError"
        assert "different references" in message


def odd():
    """Shards of a number of bytes that words of 8 and of 4 do not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 33), nn.ReLU(), nn.Linear(33, 8), nn.Linear(8, 8))


def compared_and_resumed(rank, world_size, options):
    """Losses beyond the second comparison of references, and those after a state was loaded."""

    def made():
        model = shard(odd(), mesh_of(world_size), **OPTIONS[options])
        return model, compress(model, **FINE), adamw(model)

    model, handle, optimizer = made()
    train(model, rank, range(49), optimizer)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    losses = train(model, rank, range(49, 53), optimizer)
    again, resumed, other = made()
    for each, state in zip((again, other, resumed), kept, strict=True):
        each.load_state_dict(state)
    nbytes = {each["reference"].nbytes for each in kept[2]["sent"].values()}
    return losses, train(again, rank, range(49, 53), other), nbytes


@pytest.mark.parametrize("options", ["plain", "bf16"])
def test_shards_of_any_size_are_compared_and_resumed(options):
    for losses, resumed, nbytes in run_ranks(compared_and_resumed, 2, options):
        assert any(each % 8 for each in nbytes)
        assert resumed == losses


# ---- models ----------------------------------------------------------------------------------------------------------


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
        losses = train(model, rank, range(8), adamw(model))
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


def replaced(rank, world_size):
    """Parameters that the handle does not know of: changes would never be seen."""
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    train(model, rank, range(2), adamw(model))
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    optimizer = adamw(model)
    return refusal(lambda: train(model, rank, range(2, 4), optimizer))


def test_parameters_that_take_the_place_of_others_are_an_error():
    for kind, message in run_ranks(replaced, 2):
        assert kind == "RuntimeError"
        assert "no longer those that compress_shards was given" in message


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
    losses = train(model, rank, range(8), adamw(model))
    native = shard(mlp(), mesh)
    its = train(native, rank, range(8), adamw(native))
    hybrid = shard(mlp(), mesh)
    compress(hybrid, **FINE)
    again = train(hybrid, rank, range(8), adamw(hybrid))
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


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saves(rank, world_size, folder):
    model = shard(mlp(), mesh_of(world_size))
    handle, optimizer = compress(model, gradients="qsgd:bits=4", parameters="qsgd:bits=4"), adamw(model)
    train(model, rank, range(4), optimizer)
    own, other = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": other, "shards": handle.stateful}, checkpoint_id=folder)
    losses = train(model, rank, range(4, 8), optimizer)
    return whole(model), losses


def loads(rank, world_size, folder, with_handle):
    model = shard(mlp(), mesh_of(world_size))
    handle, optimizer = compress(model, gradients="qsgd:bits=4", parameters="qsgd:bits=4"), adamw(model)
    train(model, rank, range(20, 22), optimizer)
    own, other = get_state_dict(model, optimizer)
    state = {"model": own, "optimizer": other} | ({"shards": handle.stateful} if with_handle else {})
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=other)
    losses = train(model, rank, range(4, 8), optimizer)
    return whole(model), losses


def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    before = run_ranks(saves, 3, str(tmp_path / "saved"))
    for (was, its), (now, losses) in zip(before, run_ranks(loads, 3, str(tmp_path / "saved"), True), strict=True):
        assert torch.equal(was, now)
        assert losses == its


def test_without_its_state_or_on_other_ranks_a_run_goes_on_close_by(tmp_path):
    before = run_ranks(saves, 3, str(tmp_path / "saved"))
    for now, losses in run_ranks(loads, 2, str(tmp_path / "saved"), False):
        assert (before[0][0] - now).norm() / now.norm() < 0.05
        assert all(loss < 2 for loss in losses)


def bad_states(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    handle = compress(model, **FINE)
    train(model, rank, range(2), adamw(model))
    good = copy.deepcopy(handle.state_dict())
    before = whole(model), handle.reference_nbytes
    wrong = {
        "nothing": {},
        "rank": good | {"rank": 1 - rank},
        "codec": good | {"gradients": "qsgd:bits=4"},
        "one": good if rank else {},
        "size": good | {"sent": {"0": {**good["sent"]["0"], "reference": torch.zeros(3)}}},
        "no tensor": good | {"sent": {"0": {**good["sent"]["0"], "reference": 7}}},
        "whole numbers": good | {"sent": {"0": as_dtype(good["sent"]["0"], torch.int32)}},
        "no reference": good | {"sent": {"0": {"calls": 1, "mark": 3}}},
        "another dtype on one": good | {"sent": {"0": as_dtype(good["sent"]["0"], (torch.float32, torch.half)[rank])}},
        "another module": good | {"sent": {"9": good["sent"]["0"]}},
        "no calls": {key: value for key, value in good.items() if key != "calls"},
        "a word for calls": good | {"calls": dict.fromkeys(good["calls"], "x")},
        "a list": good | {"sent": [1]},
    }
    refused = {name: refusal(lambda state=state: handle.load_state_dict(state)) for name, state in wrong.items()}
    handle.load_state_dict(good)
    return refused, torch.equal(before[0], whole(model)), before[1] == handle.reference_nbytes


def as_dtype(kept, dtype):
    return kept | {"reference": kept["reference"].to(dtype)}


def test_states_that_do_not_fit_change_nothing_on_any_rank():
    for refused, *same in run_ranks(bad_states, 2):
        assert all(each is not None and each[0] in ("ValueError", "DisagreementError") for each in refused.values())
        assert all(same)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refusals(rank, world_size):
    sharded = shard(mlp(), mesh_of(world_size))
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("nodes", "shards"))
    return {
        "feedback": refusal(lambda: compress(sharded, gradients="qsgd:bits=4+ef")),
        "sparse": refusal(lambda: compress(sharded, gradients="topk:density=0.01")),
        "rank": refusal(lambda: compress(sharded, parameters="powersgd:rank=2")),
        "coarse": refusal(lambda: compress(sharded, parameters="qsgd:bits=2")),
        "no shards": refusal(lambda: compress(mlp())),
        "no module": refusal(lambda: compress(7)),
        "one rank": refusal(lambda: compress(shard(mlp(), alone["shards"]))),
        "ranks disagree": refusal(lambda: compress(sharded, gradients=f"qsgd:bits={4 + rank}")),
        "unknown": refusal(lambda: compress(sharded, gradients="zip")),
    }


def test_what_cannot_be_done_is_said_before_anything_is_touched():
    for refused in run_ranks(refusals, 2):
        kinds = {name: each and each[0] for name, each in refused.items()}
        assert kinds == {
            "feedback": "UnsupportedError",
            "sparse": "UnsupportedError",
            "rank": "UnsupportedError",
            "coarse": "UnsupportedError",
            "no shards": "TypeError",
            "no module": "TypeError",
            "one rank": "UnsupportedError",
            "ranks disagree": "DisagreementError",
            "unknown": "ValueError",
        }
        assert "qsgd:bits=4 on rank 0" in refused["ranks disagree"][1]


def left_as_they_are(rank, world_size):
    """What is said of models whose parameters are large enough, and are of no kind that codecs take."""
    mesh, said = mesh_of(world_size), []
    for layer in (nn.LayerNorm((40, 40)), nn.Linear(64, 64).double(), nn.Linear(64, 64)):
        with heard() as messages:
            compress(shard(nn.Sequential(layer), mesh))
        said.append(messages)
    return said


def test_why_nothing_is_compressed_is_said_by_one_rank():
    (of_norms, of_float64, of_float32), others = run_ranks(left_as_they_are, 2)
    assert not any(others)
    for (said,) in (of_norms, of_float64):
        assert "no parameter in float32, float16 or bfloat16 has two dimensions" in said
    assert of_float32 == []


def without_anything(rank, world_size):
    """What is said of models of which FSDP2 sends nothing, or nothing yet, and where nothing is asked for."""
    mesh = mesh_of(world_size)
    with torch.device("meta"):
        empty = mlp()
    with heard() as messages:
        compress(shard(mlp(), mesh), gradients="none", parameters="none", min_numel=10**6)
    nothing = fully_shard(nn.Sequential(nn.ReLU()), mesh=mesh)
    return refusal(lambda: compress(nothing)), refusal(lambda: compress(shard(empty, mesh))), messages


def test_models_without_parameters_or_without_their_values():
    for nothing, empty, messages in run_ranks(without_anything, 2):
        assert nothing[0] == empty[0] == "UnsupportedError"
        assert "no parameter of this model is sharded among several ranks" in nothing[1]
        assert "call to_empty()" in empty[1]
        assert messages == []


def refused_and_trained(rank, world_size, kind):
    """A refusal on all ranks, and losses of the model afterwards, beside those of FSDP2 alone."""
    model, plain = shard(mlp(), mesh_of(world_size)), shard(mlp(), mesh_of(world_size))
    former = setup.use_all

    def use_all(*arguments):
        if rank == 1:
            raise MemoryError("no room")
        former(*arguments)

    options = {"codec": {"gradients": f"qsgd:bits={4 + rank}"}, "min_numel": {"min_numel": 64 if rank else 10**6}}
    if kind == "warm-up":
        setup.use_all = use_all
    try:
        refused = refusal(lambda: compress(model, **FINE | options.get(kind, {})))
    finally:
        setup.use_all = former
    losses = train(model, rank, range(3), adamw(model)), train(plain, rank, range(3), adamw(plain))
    handle = compress(model, **FINE)
    train(model, rank, range(2), adamw(model))
    return refused, losses, handle.stats().total.steps


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("codec", "gradients (qsgd:bits=4 on rank 0; qsgd:bits=5 on rank 1)"),
        ("min_numel", "compressed parameters of '0' (none on rank 0; 0.weight on rank 1)"),
        ("warm-up", "MemoryError: no room on rank 1"),
    ],
)
def test_a_model_that_was_refused_on_one_rank_is_refused_on_all_and_trains_as_before(kind, words):
    for refused, (losses, native), steps in run_ranks(refused_and_trained, 2, kind):
        assert refused[0] == "DisagreementError"
        assert words in refused[1]
        assert losses == native
        assert steps == 2


def refused_in_one_of_two_groups(rank, world_size):
    """A warm-up fails on one rank of a model whose first layer is shared by ranks 0 and 2, and by 1 and 3."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "pairs"))["shards"]
    model = mlp()
    fully_shard(model[0], mesh=pairs)
    shard(model[1:], mesh_of(world_size))
    former = setup.use_all

    def use_all(*arguments):
        if rank == 1:
            raise MemoryError("no room")
        former(*arguments)

    setup.use_all = use_all
    try:
        refused = refusal(lambda: compress(model, **FINE))
    finally:
        setup.use_all = former
    handle = compress(model, **FINE)
    state = handle.state_dict()
    if rank == 2:
        state["version"] = 0
    unloaded = refusal(lambda: handle.load_state_dict(state))
    handle.remove()
    return refused, unloaded


def test_ranks_in_other_groups_are_told_of_a_refusal():
    """A rank has to tell all its groups before it raises, or those that are not in the first would wait for it."""
    answers = run_ranks(refused_in_one_of_two_groups, 4)
    for refused, unloaded in answers:
        assert refused[0] == "DisagreementError"
        assert "MemoryError: no room" in refused[1]
        assert unloaded[0] in ("ValueError", "DisagreementError")
    assert answers[2][1][1].startswith("expected a state of a handle of compress_shards")


def parts_of_a_model(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    part = compress(model[0], **FINE)
    whole = refusal(lambda: compress(model, **FINE))
    compress(model[3], **FINE)
    part.remove()
    of_another = refusal(lambda: compress(model, **FINE))
    return whole, of_another


def test_a_part_of_a_model_is_compressed_by_one_handle():
    for refused in run_ranks(parts_of_a_model, 2):
        for kind, text in refused:
            assert kind == "UnsupportedError"
            assert "or a part of it, has a handle of compress_shards already" in text


def leaves(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    optimizer = adamw(model)
    train(model, rank, range(2), optimizer)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return [refusal(lambda: train(model, rank, range(2, 4), optimizer)) for _ in range(2)]


def test_a_rank_that_leaves_is_an_error():
    with pytest.raises(RankError) as caught:
        run_ranks(leaves, 2, fresh=True, timeout_s=20.0, grace_s=30.0)
    assert [kind for kind, _ in caught.value.results[0]] == ["RuntimeError"] * 2


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
