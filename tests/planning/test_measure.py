"""What is measured in one process, and the bytes that are predicted of it against those that real ranks send."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from narrowband.collectives import Operand, Peers, collective
from narrowband.planning import (
    DEFAULT_CODECS,
    Cluster,
    Host,
    Link,
    Network,
    Option,
    facts,
    measure_host,
    measure_step,
    measured,
    optimizer_of,
    plan_of,
    predict,
)
from narrowband.planning.echo import EchoGroup
from narrowband.planning.measure import OptimizerName
from tests.ranks import run_ranks
from tests.thorough import thorough

#: What messages have of their own: flags and trailers, a few bytes each.
SLACK = 64


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 96), nn.Linear(96, 64))


def measure(model, cap=0.05):
    return measure_step(model, (torch.randn(8, 64),), lambda net: optimizer_of("sgd", net), bucket_cap_mb=cap, steps=3)


def network(nodes, per_node=1):
    return Network(Link.of("1gbit"), Cluster(nodes, per_node), Host(1e-4, 1e-9), cores=per_node)


@pytest.fixture(scope="module")
def measurement():
    return measure(mlp())


def test_every_layer_is_in_one_bucket_and_small_ones_travel_once(measurement):
    profile = measurement.profile
    assert len(profile.buckets) > 1
    assert sorted(profile.layers) == [("0.weight", (256, 64)), ("3.weight", (96, 256)), ("4.weight", (64, 96))]
    assert measurement.gradients.keys() == dict(profile.layers).keys()
    assert all(bool(x.any()) for x in measurement.gradients.values())
    small = 256 + 256 + 256 + 96 + 64
    assert sum(sum(bucket.vectors) for bucket in profile.buckets) == 4 * small
    assert profile.numel == sum(p.numel() for p in mlp().parameters())


def test_buckets_are_complete_one_after_the_other_within_backward(measurement):
    profile = measurement.profile
    ready = [bucket.ready_s for bucket in profile.buckets]
    assert ready == sorted(ready)
    assert 0 < ready[0] <= ready[-1] <= profile.backward_s
    assert min(profile.forward_s, profile.optimizer_s) > 0


def test_every_optimizer_whose_losses_are_known_can_be_measured():
    names = get_args(OptimizerName)
    assert {fact.optimizer for fact in facts()} == set(names)
    for name in names:
        model = mlp()
        if name == "lora":
            with pytest.raises(ValueError, match="every parameter of this model requires gradients: freeze"):
                optimizer_of(name, model)
            model[0].requires_grad_(False)
        made = optimizer_of(name, model)
        trained = [p for p in model.parameters() if p.requires_grad]
        stepped = [p for each in made for group in each.param_groups for p in group["params"]]
        assert sorted(map(id, stepped)) == sorted(map(id, trained))  # each once
        found = measure_step(model, (torch.randn(8, 64),), lambda _, made=made: made, bucket_cap_mb=1, steps=1)
        assert found.profile.optimizer_s > 0
        assert all(state for each in made for state in each.state.values())  # all of them have stepped


def test_no_process_group_is_left_behind(measurement):
    assert not dist.is_initialized()


def test_an_echo_is_the_average_among_equals():
    """What an exchange decodes among ranks that all send the same is what one of them sent."""
    x = torch.randn(4096)
    for spec, name in [("fp16", "all_reduce"), ("topk:density=0.05", "all_gather"), ("sign", "scatter_reduce")]:
        codec = nb.codec(spec)
        group = EchoGroup(3)
        operand = Operand("", x.clone(), (64, 64), codec, None, lambda _: 0)
        exchange = collective(name)([operand], Peers(group, 0, 3), measure=False)
        exchange.encode()
        for transfer in exchange.job():
            transfer.issue()
        exchange.deliver(good=True)
        assert group.calls == {
            "all_reduce": ["all_reduce"], "all_gather": ["all_gather"], "scatter_reduce": ["all_to_all", "all_gather"],
        }[name]  # fmt: skip
        if name != "scatter_reduce":  # there a rank has its own chunk's mean, and copies of it for the others'
            sent = codec.decode(codec.encode(x.view(64, 64)), torch.empty(64, 64))
            torch.testing.assert_close(operand.x.view(64, 64), sent, rtol=1e-3, atol=1e-4)


def sent_by_ranks(rank, world_size, plans):
    """Bytes of a step with each plan, as text: the mean of two, since half rounds of PowerSGD take turns."""
    found = {}
    for spec, text in plans.items():
        model = DistributedDataParallel(mlp(), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        handle = nb.compress_gradients(model, nb.Plan.from_json(text))
        sent = []
        for _ in range(4):  # DDP lays out its buckets anew after the first
            model(torch.randn(8, 64)).float().square().mean().backward()
            sent.append(handle.stats().last.sent_bytes)
        assert {str(handle.layers.spec_for(name)) for name in handle.plan.specs()} == {spec}
        found[spec] = sum(sent[2:]) / 2
    return found


#: One for each collective among three.
FEW = ("fp16", "uniform:bits=8", "topk:density=0.01+ef", "powersgd:rank=4", "powersgd:rank=2,halves=1")
ALL = (
    *FEW, *DEFAULT_CODECS, "bf16", "fp16+ef", "uniform:bits=3", "qsgd:bits=4,bucket=64+ef", "sign", "qsgd:bits=4+ef21",
    "topk:density=0.05", "topk:density=0.2+ef", "topk:density=0.04,values=int8+ef-mixed", "randomk:density=0.01+ef",
    "lowrank:rank=4+ef", "powersgd:rank=4,iterations=2", "powersgd:rank=2,halves=2", "powersgd:rank=2,halves=3",
    "powersgd:rank=4,ef=false", "dgc:density=0.01",
)  # fmt: skip


@pytest.mark.parametrize(("ranks", "specs"), [(3, FEW), *thorough((2, ALL), (4, ALL), (8, ALL))])
def test_ranks_follow_plans_and_send_the_predicted_bytes(measurement, ranks, specs):
    options = [Option(spec) for spec in dict.fromkeys(specs)]
    profile = measured(measurement, {Cluster(ranks): options}, lambda _: None)
    told = {option.spec: predict(profile, option, network(ranks)).sent_nbytes for option in options}
    plans = {option.spec: plan_of(profile, option, Cluster(ranks)).to_json() for option in options}
    found = run_ranks(sent_by_ranks, ranks, plans)
    assert {spec: sum(each[spec] for each in found) / ranks for spec in plans} == pytest.approx(told, abs=1e-6)


def with_buffers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 96), nn.Linear(96, 9000), nn.Linear(9000, 8)
    )


def sent_in_rounds(rank, world_size, specs):
    """Bytes of an optimizer step, of the last two rounds of three: half rounds of PowerSGD take turns."""
    found = {}
    for spec in specs:
        model = with_buffers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        handle = nb.compress_updates(model, optimizer, spec, every=3)
        torch.manual_seed(rank)
        for step in range(9):
            if step == 3:
                before = handle.stats().total.sent_bytes
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        found[spec] = (handle.stats().total.sent_bytes - before) / 6
    return found


IN_ROUNDS = ("none", "uniform:bits=2+ef", "topk:density=0.01+ef", "qsgd:bits=4")
ALL_IN_ROUNDS = (
    *IN_ROUNDS, *FEW, "bf16", "fp16+ef", "uniform:bits=1+ef", "sign+ef", "topk:density=0.05,values=int8+ef",
    "randomk:density=0.01+ef", "lowrank:rank=4+ef", "uniform:bits=4+ef21", "topk:density=0.01+ef21",
)  # fmt: skip


@pytest.mark.parametrize(
    ("size", "specs"), [(4, IN_ROUNDS), *thorough((2, ALL_IN_ROUNDS), (3, ALL_IN_ROUNDS), (4, ALL_IN_ROUNDS))]
)
def test_rounds_send_the_predicted_bytes_of_parameters_and_buffers(size, specs):
    specs = tuple(dict.fromkeys(specs))
    measurement = measure(with_buffers())
    assert [each.name for each in measurement.profile.buffers] == ["1.running_mean", "1.running_var"]
    options = [Option(spec, every=3) for spec in specs]
    profile = measured(measurement, {Cluster(size): options}, lambda _: None)
    told = {option.spec: predict(profile, option, network(size)) for option in options}
    ranks = run_ranks(sent_in_rounds, size, specs)
    for spec in specs:
        assert sum(found[spec] for found in ranks) / size == pytest.approx(told[spec].sent_nbytes, abs=1e-6)
    model = with_buffers()
    averaged = sum(x.numel() for x in (*model.parameters(), *model.buffers()) if x.is_floating_point())
    assert told["none"].residual_nbytes == 4 * averaged  # the copies that updates are measured from


def uneven():
    """Shards that are small or have more rows on one rank than on the other, a norm, and a matrix with few rows."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 33), nn.Linear(33, 96), nn.LayerNorm(96), nn.Linear(96, 24), nn.Linear(24, 256), nn.Linear(256, 3)
    )


def sent_on_two_levels(rank, world_size, plans):
    """Bytes of a step and of residuals."""
    found = {}
    for spec, text in plans.items():
        model = DistributedDataParallel(uneven(), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        handle = nb.compress_gradients(model, nb.Plan.from_json(text), nodes=2)
        for _ in range(3):
            model(torch.randn(8, 64)).square().mean().backward()
        found[spec] = handle.stats().last.sent_bytes, handle.residual_nbytes
    return found


@pytest.mark.parametrize("per_node", [2, *thorough(4)])
def test_on_two_levels_the_busiest_rank_sends_the_predicted_bytes(per_node):
    specs = ["fp16", "qsgd:bits=4", "topk:density=0.05+ef", "powersgd:rank=2,min_ratio=1"]
    options, where = [Option(spec, levels=True) for spec in specs], Cluster(2, per_node)
    profile = measured(measure(uneven()), {where: options}, lambda _: None)
    plans = {option.spec: plan_of(profile, option, where).to_json() for option in options}
    ranks = run_ranks(sent_on_two_levels, 2 * per_node, plans)
    for option in options:
        told = predict(profile, option, network(2, per_node))
        sent, residual = max(found[option.spec] for found in ranks)
        assert sent == pytest.approx(told.sent_nbytes, abs=SLACK)
        assert residual == told.residual_nbytes


def test_what_codecs_take_is_measured_bucket_by_bucket(measurement):
    options = [Option("topk:density=0.05+ef"), Option("powersgd:rank=2,min_ratio=1")]
    told = []
    profile = measured(measurement, {Cluster(4): options}, told.append)
    assert told == [option.spec for option in options]
    topk, powersgd = profile.codecs
    assert (topk.collective, powersgd.collective) == ("all_gather", "factor_reduce")
    for codec in profile.codecs:
        for piece, bucket in zip(codec.pieces, profile.buckets, strict=True):
            assert bool(piece.calls) == bool(bucket.layers)
            assert len(piece.work) == len(piece.calls)
            assert piece.encode.at(4) > 0 or not piece.calls
    assert topk.residual_nbytes == 4 * sum(math.prod(shape) for _, shape in profile.layers)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.used(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 64, sparse=True)

    def forward(self, x):
        return self.table(torch.zeros(len(x), dtype=torch.int64))


class Diverged(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)

    def forward(self, x):
        return super().forward(x) * float("nan")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Identity(), "no parameter requires a gradient"),
        (mlp().double(), "float64"),
        (Unused(), "no gradient for other.weight, other.bias"),
        (Sparse(), "the gradient of table.weight is sparse"),
        (Diverged(), "the gradient of weight, bias contains inf or NaN"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused_in_words(model, says):
    with pytest.raises(ValueError, match=says):
        measure(model)
    assert not dist.is_initialized()


def test_a_model_that_returns_its_loss_goes_backward_from_that():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(x).sum()

    found = measure(WithLoss()).gradients["layer.weight"].view(64, 64)
    assert torch.equal(found[0], found[1])  # of a sum, every row has the gradient Σ x; of its square mean, none


def test_messages_take_time_on_this_machine():
    host = measure_host()
    assert host.hop_s > 0
    assert host.cpu_s_per_byte > 0
