"""What choices cost: bytes that a rank sends, by the way on which each choice travels among so many ranks."""

from __future__ import annotations

import math

import pytest
import torch

import narrowband as nb
from narrowband.adapt import Accordion, Constant, HardThreshold, LGreCo, Traffic, error_table, search_space
from tests.adapt.test_policies import spread

SHAPE = (400, 500)
MODEL = "powersgd:rank=4"
MIXED = [
    *search_space(MODEL),
    *(f"topk:density={k / 1000}+ef" for k in (1, 2, 5, 10, 20, 50, 100)),
    "qsgd:bits=4+ef",
    "none+ef",
]


def gathered(nbytes, size):
    return (size - 1) * nbytes


def reduced(nbytes, size):
    return 2 * (size - 1) * nbytes // size


def row(k, n):
    """Bytes of k values and of their Elias–Fano indices below n."""
    low = max(0, math.ceil(math.log2(n / k)))
    return 4 * k + -(-(-(-2 * k // 8) + -(-k * low // 8)) // 4) * 4


def summed(nbytes, size):
    """Top 1 % of SHAPE, to owners and back; gathered among few."""
    if size < 7:
        return gathered(nbytes, size)
    k, share = math.prod(SHAPE) // 100, -(-math.prod(SHAPE) // (16 * size)) * 16
    to_owners = -(-k // size) + math.isqrt(k // size) + 1
    return (size - 1) * (row(to_owners, share) + row(-(-2 * k // size), share))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize(
    ("spec", "way"),
    [
        ("topk:density=0.01+ef", summed),
        ("topk:density=0.01,values=fp16+ef", gathered),  # sums travel in float32
        ("topk:density=0.01", gathered),  # nothing would wait for what does not arrive
        ("topk:density=0.01+ef21", gathered),
        ("dgc:density=0.01", summed),
        ("powersgd:rank=4", reduced),
        ("powersgd:rank=4,iterations=3", reduced),
        ("none+ef", reduced),
        ("fp16", reduced),
        ("randomk:density=0.1+ef", reduced),
        ("qsgd:bits=4", reduced),  # encoded again by each chunk's owner
        ("qsgd:bits=4+ef21", gathered),  # which would leave an error for ever
    ],
)
def test_sizes_are_what_a_rank_sends(spec, way, size):
    chosen = nb.compression(spec)
    factors = {"powersgd:rank=4": 4, "powersgd:rank=4,iterations=3": 12}.get(spec)  # rank times rounds
    payload = chosen.codec.payload_nbytes(SHAPE) if factors is None else 4 * factors * sum(SHAPE)
    sent = gathered(payload, size) if size == 2 else way(payload, size)
    assert Traffic(size, chosen).nbytes([(chosen, SHAPE)] * 3) == [sent] * 3
    table = error_table({"a": torch.ones(SHAPE), "b": torch.ones(SHAPE)}, [spec], traffic=Traffic(size, chosen))
    assert table.sizes.tolist() == [[sent], [sent]]


def test_layers_with_one_kind_of_codec_travel_together():
    chosen, size = nb.compression("qsgd:bits=4+ef"), 4
    small, large = (20, 500), (2000, 500)
    alone = [chosen.codec.payload_nbytes(shape) for shape in (small, large)]
    assert Traffic(size).nbytes([(chosen, small)]) == [gathered(alone[0], size)]
    assert Traffic(size).nbytes([(chosen, small), (chosen, large)]) == [reduced(nbytes, size) for nbytes in alone]
    asked = Traffic(size, collective="all_gather")
    assert asked.nbytes([(chosen, small), (chosen, large)]) == [gathered(nbytes, size) for nbytes in alone]


def test_a_spec_without_feedback_has_the_models():
    """Also where that decides how it travels."""
    quantized, low_rank = nb.compression("qsgd:bits=4"), nb.compression("lowrank:rank=4")
    payload = quantized.codec.payload_nbytes(SHAPE)
    assert Traffic(4).nbytes([(quantized, SHAPE)]) == [reduced(payload, 4)]
    assert Traffic(4, "topk:density=0.1+ef21").nbytes([(quantized, SHAPE)]) == [gathered(payload, 4)]
    assert Traffic(4, MODEL).nbytes([(low_rank, SHAPE)]) == [reduced(4 * 4 * sum(SHAPE), 4)]
    with pytest.raises(ValueError, match="world_size=0 must be at least 1"):
        Traffic(0)


def test_plans_say_what_a_rank_sends():
    gradients = {"w": torch.randn(SHAPE)}
    for size in (1, 2, 8):
        plan = Constant("topk:density=0.01+ef").decide(gradients, step=0, traffic=Traffic(size))
        payload = nb.codec("topk:density=0.01").payload_nbytes(SHAPE)
        assert (plan.world_size, plan.nbytes) == (size, gathered(payload, size))
        assert plan.dense_nbytes == reduced(4 * math.prod(SHAPE), size)
        ratio = 1.0 if size == 1 else plan.dense_nbytes / plan.nbytes
        assert plan.ratio == plan.layer_ratio(plan.layers[0]) == ratio
    payload = nb.codec("threshold:value=2.0").encode(gradients["w"]).numel()
    for size, sent in ((4, gathered(payload, 4)), (8, 3 * 7 * payload // 8)):  # among many ranks owners add it up
        assert HardThreshold(2.0).decide(gradients, step=0, traffic=Traffic(size)).nbytes == sent


@pytest.mark.parametrize("metric", ["l2", "l2_squared"])
def test_lgreco_counts_what_is_sent(metric):
    """Among many ranks a plan that counts payloads sends more than its reference, and one that counts traffic less."""
    gradients = spread()
    policy = LGreCo(MODEL, MIXED, metric=metric)
    by_payloads = policy.decide(gradients, step=0, traffic=Traffic(2, MODEL))
    specs = [(nb.compression(layer.spec), layer.shape) for layer in by_payloads.layers]
    shares = []
    for size in (2, 4, 16, 64):
        traffic = Traffic(size, MODEL)
        plan = policy.decide(gradients, step=0, traffic=traffic)
        assert plan.nbytes == sum(traffic.nbytes([(nb.compression(layer.spec), layer.shape) for layer in plan.layers]))
        assert plan.reference_nbytes == Constant(MODEL).decide(gradients, step=0, traffic=traffic).nbytes
        assert plan.nbytes <= sum(traffic.nbytes(specs))
        assert plan.nbytes < plan.reference_nbytes
        shares.append(sum(traffic.nbytes(specs)) / plan.reference_nbytes)
    assert shares[0] < 1 < shares[-1]
    sparse, still_sparse = (sum(layer.family == "topk" for layer in one.layers) for one in (by_payloads, plan))
    assert still_sparse < sparse


def test_what_few_layers_have_may_cost_more_and_no_plan_more_than_the_reference():
    """Of all layers, quantized ones are scattered; of a small one alone, they are gathered."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(12, 2, 128, 6, generator=generator)
    gradients = {f"{at}.weight": p @ q.T for at, (p, q) in enumerate(factors)}  # of low rank, but for one
    gradients["noise.weight"] = 30 * torch.randn(96, 96, generator=generator)
    choices = [*(f"powersgd:rank={r}" for r in range(1, 9)), "qsgd:bits=4+ef"]
    for size in (4, 8):
        traffic = Traffic(size, MODEL)
        plan = LGreCo(MODEL, choices).decide(gradients, step=0, traffic=traffic)
        specs = [(nb.compression(layer.spec), layer.shape) for layer in plan.layers]
        assert [layer.family for layer in plan.layers].count("qsgd") == 1
        payload = nb.codec("qsgd:bits=4").payload_nbytes(specs[-1][1])
        assert plan.layers[-1].nbytes == gathered(payload, size)
        assert traffic.nbytes([(specs[-1][0], shape) for _, shape in specs])[-1] == reduced(payload, size)
        assert plan.nbytes == sum(traffic.nbytes(specs)) < plan.reference_nbytes
    both = LGreCo(Accordion(low="qsgd:bits=4+ef", high="powersgd:rank=4"), ["topk:density=0.1+ef"])
    plan = both.decide(gradients, step=0, traffic=Traffic(32, "qsgd:bits=4+ef"))
    assert plan.nbytes <= Constant("qsgd:bits=4+ef").decide(gradients, step=0, traffic=Traffic(32)).nbytes
