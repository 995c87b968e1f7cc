"""What a plan says that a rank sends, against what ranks send: by their own account, and by the kernel's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.adapt import Traffic
from tests.gradients.training import FINGERPRINT, compress, heard, wrap
from tests.ranks import run_ranks
from tests.tcp import tcp_sent_nbytes

SIDE, LAYERS = 256, 4
WEIGHTS = [f"{at}.weight" for at in range(LAYERS)]
#: Biases in float32.
REST = 4 * LAYERS * SIDE
#: What a message has of its own: four bytes for every other rank.
FLAG = 4
#: What gloo adds to a collective, per other rank: 48 bytes six times for a round of a ring, and an all-reduce has two.
GLOO = 2 * 6 * 48
#: Collectives of a step, at most: what ranks are about to do, biases, top-k, what is not compressed; two of quantized
#: values, two of factors; and the barrier behind it.
MESSAGES = 9

REFERENCE = "topk:density=0.01+ef"
CHOICES = [
    *(f"powersgd:rank={r}" for r in (2, 4, 8, 16)),
    *(f"topk:density={d}+ef" for d in (0.003, 0.01, 0.03)),
    "qsgd:bits=4+ef",
]
#: What layers have, by name of the case.
FIXED = {
    "gathered": dict.fromkeys(WEIGHTS, "topk:density=0.01+ef"),
    "scattered": dict.fromkeys(WEIGHTS, "qsgd:bits=4,bucket=64+ef"),
    "so few that they are gathered": {**dict.fromkeys(WEIGHTS, "none+ef"), WEIGHTS[0]: "qsgd:bits=4+ef"},
    "mixed": dict(zip(WEIGHTS, ["qsgd:bits=8+ef", "topk:density=0.03+ef", "powersgd:rank=8", "none+ef"], strict=True)),
}


def model():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))


def step(net, at, rank):
    """Some inputs are much larger than others, so that gradients differ in what suits them."""
    x = torch.randn(64, SIDE, generator=torch.Generator().manual_seed(100 * at + rank)) ** 3
    x[:, SIDE // 4 :] *= 0.01
    net(x).pow(4).mean().backward()


def counted(rank, world_size, cases):
    """Of a step of each case: the plan; what is said of it; what the handle says was sent; what the kernel says."""
    found = []
    for specs in cases:
        net = wrap(model())
        handle = compress(net, nb.LGreCo(REFERENCE, CHOICES, every=3), coalesced=True)
        if specs:
            handle.set_layers(specs)
        for at in range(2 if specs else 4):
            step(net, at, rank)
        dist.barrier()
        before = tcp_sent_nbytes()
        step(net, 4, rank)
        dist.barrier()
        sent = tcp_sent_nbytes() - before
        said = sum(handle.layers.traffic.nbytes([(handle.layers.spec_for(name), (SIDE, SIDE)) for name in WEIGHTS]))
        found.append((handle.plan, said, handle.stats().last.sent_bytes, sent))
    return found


@pytest.mark.parametrize(("world_size", "names"), [(4, list(FIXED)), (16, ["mixed"])])
def test_a_plan_sends_what_it_says(world_size, names):
    results = run_ranks(counted, world_size, [{}, *(FIXED[name] for name in names)])
    beside = 2 * (world_size - 1) * (REST + FLAG) // world_size + FINGERPRINT * (world_size - 1)
    messages = FLAG * 3 * (world_size - 1)
    for rank, cases in enumerate(results):
        for _, said, stated, sent in cases:
            # Chunks of what is scattered are whole buckets, so one rank's may be longer; and indices of sparse sums
            # are those of all tensors together.
            rounding = 0.002 if world_size == 4 else 0.02
            assert stated == pytest.approx(said + beside + messages, rel=rounding, abs=messages + 4)
            assert stated <= sent <= stated + GLOO * MESSAGES * (world_size - 1)
        assert [said for _, said, *_ in cases] == [said for _, said, *_ in results[0]], rank
    plan, said, *_ = results[0][0]
    assert plan.world_size == world_size
    assert plan.nbytes == said < plan.reference_nbytes
    families = {layer.family for layer in plan.layers}
    assert "topk" in families  # gathered among few; among many its sums are
    for name, (_, said, *_) in zip(names, results[0][1:], strict=True):
        layers = [(nb.compression(spec), (SIDE, SIDE)) for spec in FIXED[name].values()]
        assert said == sum(Traffic(world_size, REFERENCE).nbytes(layers))


def followed(rank, world_size, plan):
    with heard() as messages:
        compress(wrap(model()), plan)
    return messages


def test_a_plan_for_another_number_of_ranks_is_followed_with_a_warning():
    gradients = {name: torch.randn(SIDE, SIDE) for name in WEIGHTS}
    for made_for, warned in ((2, False), (16, True)):
        plan = nb.Constant(REFERENCE).decide(gradients, step=0, traffic=Traffic(made_for))
        messages, others = run_ranks(followed, 2, plan)
        assert any("made for 16 ranks, but this run has 2," in message for message in messages) == warned
        assert not others


class LooksUp(nn.Module):
    """Its table's gradients are sparse."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(500, SIDE, sparse=True), nn.Linear(SIDE, 8)

    def forward(self, at):
        return self.out(self.table(at))


def looked_up(rank, world_size):
    """Of a step with a sparse gradient: what would be sent without compression, what is, and what the kernel says."""
    net = wrap(LooksUp())
    handle = compress(net, "topk:density=0.05+ef")
    for at in range(3):
        dist.barrier()
        before = tcp_sent_nbytes()
        generator = torch.Generator().manual_seed(100 * at + rank)
        net(torch.randint(500, (100 + 20 * rank,), generator=generator)).pow(2).mean().backward()
        dist.barrier()
        sent = tcp_sent_nbytes() - before
    last = handle.stats().last
    return last.raw_bytes, last.sent_bytes, sent


def test_a_sparse_gradient_counts_as_the_indices_and_values_that_are_gathered():
    results = run_ranks(looked_up, 3)
    said, stated, sent = (sum(column) for column in zip(*results, strict=True))
    assert stated <= sent <= stated + GLOO * MESSAGES * 2 * 3  # in a ring some ranks pass more on than others
    rows = 3 * 100  # at least, of all ranks together, less what came twice
    assert stated > 2 * 0.8 * rows * (4 * SIDE + 8)
    assert said > stated  # of the layer


def planned_and_sent(rank, world_size, steps):
    """A model whose gradient is the same in every step."""
    torch.manual_seed(0)
    model = wrap(nn.Linear(40, 30, bias=False))
    handle = compress(model, nb.HardThreshold(1.0, every=4))
    x = torch.tensor([[1.5, 0.0, 0.0, 1.25] * 10])
    for _ in range(steps):
        model.zero_grad()
        model(x).sum().backward()
    return handle.plan.layers[0].nbytes, handle.layer_stats()["weight"].sent_bytes


def test_a_thresholds_plan_has_the_bytes_that_a_step_sends():
    for planned, sent in run_ranks(planned_and_sent, 2, 9):
        assert sent == planned + 8 + 4  # beside the payload: its length and a flag
