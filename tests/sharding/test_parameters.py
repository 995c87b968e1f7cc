"""Parameters inside FSDP2, on their way to all ranks: what layers compute with follows the optimizer, by references."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from narrowband.sharding import exchange
from tests.gradients.shards import shard, whole
from tests.gradients.training import loss_of, mlp, refusal
from tests.ranks import run_ranks
from tests.sharding.training import FINE, OPTIONS, adamw, compress, computed_with, mesh_of, train
from tests.tcp import tcp_sent_nbytes
from tests.thorough import thorough


def followed(rank, world_size, spec):
    """How far what ranks compute with is from the optimizer's parameters, in units of a step's change, per step."""
    model = shard(mlp(), mesh_of(world_size))
    handle = compress(model, gradients="none", parameters=spec)
    optimizer = adamw(model)
    distances, before = [], whole(model)
    for step in range(17):
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
        assert sum(distances[-8:]) < 2 * sum(distances[1:9])
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


def counted(rank, world_size, codecs):
    """Bytes that this rank has sent in two steps, by the handle's account and by the kernel's; and those of its account
    if nothing were compressed.
    """
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), mesh_of(world_size))
    handle = compress(model, **codecs)
    optimizer = adamw(model)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()

    step()  # in which ranks also compare what they have
    dist.barrier()
    before, sent = handle.stats().total, tcp_sent_nbytes()
    step()
    step()
    dist.barrier()
    after = handle.stats().total
    return after.sent_bytes - before.sent_bytes, tcp_sent_nbytes() - sent, after.raw_bytes - before.raw_bytes


@pytest.mark.parametrize("ranks", [2, *thorough(3)])
def test_the_kernel_counts_what_the_handle_says_that_it_sent(ranks):
    """Also of gradients that are not compressed: PyTorch's reduce-scatter by gloo is an all-reduce."""
    plain = run_ranks(counted, ranks, {"gradients": "none", "parameters": "none"})
    for codecs in ({"gradients": "none"}, FINE):
        for (stated, sent, raw), (unsaved, in_full, _) in zip(run_ranks(counted, ranks, codecs), plain, strict=True):
            assert stated < sent < 1.05 * stated  # gloo has some words of its own
            assert unsaved < in_full < 1.05 * unsaved
            assert raw == pytest.approx(unsaved, rel=0.001)


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
    losses = train(model, rank, range(5), adamw(model))
    plain = shard(mlp(), mesh_of(world_size))
    its = train(plain, rank, range(5), adamw(plain))
    seen, own = computed_with(model), whole(model)
    flat = torch.cat([x.double().reshape(-1) for x in seen.values()])
    return losses, its, handle.reference_nbytes, handle.stats().total.ratio, float((flat - own).norm() / own.norm())


def test_without_references_parameters_are_compressed_themselves():
    for losses, its, nbytes, ratio, error in run_ranks(without_references, 2):
        assert losses == pytest.approx(its, rel=0.02)
        assert nbytes == 0
        assert ratio > 2.5
        assert 1e-4 < error < 0.02


def resumed_in_another_dtype(rank, world_size):
    """Whether layers compute with the optimizer's parameters where references were saved by a run in bfloat16."""
    model = shard(mlp(), mesh_of(world_size), **OPTIONS["bf16"])
    handle = compress(model, **FINE)
    train(model, rank, range(2), adamw(model))
    again = shard(mlp(), mesh_of(world_size))
    again.load_state_dict(model.state_dict())
    compress(again, **FINE).load_state_dict(handle.state_dict())
    seen = torch.cat([x.double().reshape(-1) for x in computed_with(again).values()])
    return torch.equal(seen, whole(again))


def test_references_of_another_dtype_are_sent_anew():
    assert run_ranks(resumed_in_another_dtype, 2) == [True] * 2


def broken_off(rank, world_size):
    """What is said of a forward pass whose exchange of parameters fails on all ranks, and of the next."""
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    former = exchange._gather

    def breaks(*_):
        raise RuntimeError("cut")

    exchange._gather = breaks
    try:
        said = [refusal(lambda: loss_of(model, 0, rank))]
    finally:
        exchange._gather = former
    return [*said, refusal(lambda: loss_of(model, 0, rank))]


def test_after_an_exchange_of_parameters_that_failed_none_follows():
    for first, (kind, later) in run_ranks(broken_off, 2):
        assert first == ("RuntimeError", "cut")
        assert kind == "RuntimeError"
        assert "an earlier exchange of the parameters of" in later


def different_references(rank, world_size):
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8)), mesh_of(world_size))
    compress(model, **FINE)
    optimizer = adamw(model)
    train(model, rank, range(2), optimizer)
    if rank:
        state = model[0]._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # PyTorch 2.11 has one
        groups[0]._all_gather_comm.reference.view(-1)[0] += 1
    return refusal(lambda: train(model, rank, range(2, 60), optimizer))


def test_references_that_differ_are_an_error_on_all_ranks():
    for kind, message in run_ranks(different_references, 2):
        assert kind == "RuntimeError"
        assert "different references" in message


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


def converted(rank, world_size):
    """What is said of a model that is converted before its first forward pass, and of one that is converted later."""
    said = []
    for steps in (0, 1):
        model = shard(mlp(), mesh_of(world_size))
        handle = compress(model, **FINE)
        optimizer = adamw(model)
        train(model, rank, range(steps), optimizer)
        model.to(torch.bfloat16)
        said.append(refusal(lambda model=model: model(torch.ones(4, 24, dtype=torch.bfloat16)).sum().backward()))
        model.float()
        if steps:
            train(model, rank, range(steps, 3), optimizer)
            said.append(handle.stats().total.steps)
    return said


def test_a_model_that_is_converted_between_steps_is_refused_until_it_is_as_it_was():
    for before, after, steps in run_ranks(converted, 2):
        assert before is None
        assert after[0] == "UnsupportedError"
        assert "has dtype torch.bfloat16 now, and had torch.float32 in the first forward pass" in after[1]
        assert "Convert the model before fully_shard" in after[1]
        assert steps == 3
