"""Sums of what owners receive: what is delivered, what waits and where, and how bytes grow with ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband import kernels
from narrowband.bench.models import GPT, MODELS
from narrowband.collectives import LayerCollectives, Operand, choose, collective
from narrowband.collectives.exchange import TRAILER
from narrowband.collectives.peers import Peers
from narrowband.feedback import ErrorFeedback
from narrowband.planning.echo import EchoGroup
from tests.collectives.test_exchange import average, seed_of
from tests.gradients.training import compress, flat, mlp, refusal, sgd, train, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

#: One is smaller than a row of blocks, one has no element, and one has a row that is cut short.
SHAPES = [(96, 50), (5,), (0, 4), (40, 33), (7, 11)]
DENSITY = 0.05


def gradients(rank, step, kind="normal", dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if kind == "crowded":  # all that is large has one owner or two: its messages have no room for it
        found[0].view(-1)[: 16 * 3] *= 1000.0
    return [x.to(dtype) for x in found]


def items_of(tensors, codec, feedback, step):
    return [
        Operand(f"p{i}", x.clone().reshape(-1), tuple(x.shape), codec, feedback, seed_of(step, i), i)
        for i, x in enumerate(tensors)
    ]


# ---- the sum is kept -------------------------------------------------------------------------------------------------


def summed(rank, size, spec, kind, steps):
    """Delivered, kept and true sums of all tensors, in units of one rank's gradient."""
    chosen = nb.compression(spec)
    feedback = chosen.new_feedback()
    true, delivered = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    averages = []
    for step in range(steps):
        for r in range(size):
            torch._foreach_add_(true, [x.double() / size for x in gradients(r, step, kind)])
        items = items_of(gradients(rank, step, kind), chosen.codec, feedback, step)
        work = average("sparse_reduce", items, rank, size, measure=step == steps - 1)
        torch._foreach_add_(
            delivered, [item.x.view(total.shape).double() for total, item in zip(true, items, strict=True)]
        )
        averages.append(torch.cat([item.x for item in items]))
    kept = [
        torch.zeros(shape) if feedback.residual(f"p{i}") is None else feedback.residual(f"p{i}").clone().view(shape)
        for i, shape in enumerate(SHAPES)
    ]
    return true, delivered, kept, averages, list(work.norms.values())


@pytest.mark.parametrize(
    ("size", "kind"), [(1, "normal"), (3, "normal"), (4, "crowded"), *thorough((2, "crowded"), (8, "normal"))]
)
@pytest.mark.parametrize(
    "spec", ["topk:density=0.05+ef", "threshold:value=2.5+ef", *thorough("topk:density=0.05,select=sampled+ef")]
)
def test_what_was_delivered_and_what_waits_are_all_there_was(size, kind, spec):
    answers = run_ranks(summed, size, spec, kind, 8)
    for i, total in enumerate(answers[0][0]):
        kept = sum(answer[2][i].double() for answer in answers) / size
        torch.testing.assert_close(answers[0][1][i] + kept, total, rtol=1e-5, atol=1e-5 * (1000 if i == 0 else 1))
    for _, _, _, averages, norms in answers:
        assert all(torch.equal(a, b) for a, b in zip(averages, answers[0][3], strict=True))
        assert 0.0 < sum(own.lost for own in norms) < sum(own.encoded for own in norms)


def test_dgc_lets_what_did_not_arrive_wait_with_its_momentum():
    """Without momentum its sums are residuals."""
    answers = run_ranks(summed, 3, "dgc:density=0.05,momentum=0", "normal", 12)
    for i, total in enumerate(answers[0][0]):
        kept = sum(answer[2][i].double() for answer in answers) / 3
        torch.testing.assert_close(answers[0][1][i] + kept, total, rtol=1e-5, atol=1e-5)


# ---- what is delivered -----------------------------------------------------------------------------------------------


def to_owners(size, elements):
    """By owner, of the elements of one rank (index → value), those that find room."""
    at = torch.tensor(sorted(elements), dtype=torch.int32)
    local, values = torch.empty(size, len(at), dtype=torch.int32), torch.empty(size, len(at))
    tensor = kernels.Shared(96 * 50, 0, slice(0, len(at)), 0)
    kernels.split_shares_all([tensor], [at], [torch.ones(len(at))], local, values)
    whole = kernels.from_share(local, turn=0)
    room = -(-len(at) // size) + math.isqrt(len(at) // size) + 1
    rows = (own[there.bool()].tolist() for own, there in zip(whole, values, strict=True))
    return [{i: elements[i] for i in sorted(row, key=lambda i: -abs(elements[i]))[:room]} for row in rows]


def delivered_by(size, sent, number):
    """Float64: what all ranks get of one tensor, of which they send these elements by owner."""
    by_owner = [{} for _ in range(size)]
    for elements in sent:
        for sums, own in zip(by_owner, elements, strict=True):
            for index, value in own.items():
                sums[index] = sums.get(index, 0.0) + value / size
    arrived = {}
    for sums in by_owner:
        largest = sorted(sums, key=lambda i: -abs(sums[i]))[: -(-2 * number // size)]
        arrived |= {i: sums[i] for i in largest}
    return arrived


def one_tensor(rank, size, steps):
    codec, feedback = nb.codec(f"topk:density={DENSITY}"), ErrorFeedback()
    seen = []
    for step in range(steps):
        x = torch.randn(96, 50, generator=torch.Generator().manual_seed(1000 * step + rank))
        before = feedback.residual("p")
        total = x.view(-1) + (0 if before is None else before)
        item = Operand("p", x.clone().view(-1), (96, 50), codec, feedback, seed_of(step, 0), 0)
        average("sparse_reduce", [item], rank, size)
        seen.append((total.clone(), item.x.clone(), feedback.residual("p").clone()))
    return seen


@pytest.mark.parametrize("size", [2, 5])
def test_the_largest_sums_of_each_owner_arrive_and_the_rest_stays_with_its_senders(size):
    answers = run_ranks(one_tensor, size, 3)
    k = nb.codec(f"topk:density={DENSITY}").kept((96, 50))
    for step in range(3):
        totals = [answer[step][0].double() for answer in answers]
        sent = [to_owners(size, {int(i): float(x[i]) for i in x.abs().topk(k).indices}) for x in totals]
        expected = torch.zeros(96 * 50, dtype=torch.float64)
        arrived = delivered_by(size, sent, k)
        for index, mean in arrived.items():
            expected[index] = mean
        for rank, answer in enumerate(answers):
            torch.testing.assert_close(answer[step][1].double(), expected, rtol=1e-6, atol=1e-7)
            residual = totals[rank].clone()
            residual[[index for own in sent[rank] for index in own if index in arrived]] = 0.0
            torch.testing.assert_close(answer[step][2].double(), residual, rtol=1e-6, atol=1e-7)


def half_precision(rank, size):
    codec, feedback = nb.codec("topk:density=0.1"), ErrorFeedback()
    items = items_of(gradients(rank, 0, dtype=torch.bfloat16), codec, feedback, 0)
    average("sparse_reduce", items, rank, size)
    return torch.cat([item.x for item in items]), {key: x.clone() for key, x in feedback.state_dict().items()}


def test_half_precision():
    answers = run_ranks(half_precision, 2)
    for averages, residuals in answers:
        assert averages.dtype == torch.bfloat16
        assert torch.equal(averages, answers[0][0])
        assert averages.any()
        assert residuals["p0"].dtype == torch.float32


def in_parts(rank, size, parts):
    codec, feedback = nb.codec("topk:density=0.1"), ErrorFeedback()
    seen = []
    for step in range(3):  # the second does not count
        items = items_of(gradients(rank, step), codec, feedback, step)
        average("sparse_reduce", items, rank, size, parts=parts, good=step != 1)
        seen.append(torch.cat([item.x for item in items]))
    return seen, {key: x.clone() for key, x in feedback.state_dict().items()}


def test_what_is_encoded_in_parts_travels_as_what_is_encoded_at_once():
    for (whole, residuals), (cut, others) in zip(*(run_ranks(in_parts, 3, parts) for parts in (1, 4)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
        assert all(torch.equal(residuals[key], others[key]) for key in residuals)


def alone(rank, size, which):
    codec, feedback = nb.codec("topk:density=0.1"), ErrorFeedback()
    items = [item for at, item in enumerate(items_of(gradients(rank, 0), codec, feedback, 0)) if at in which]
    average("sparse_reduce", items, rank, size)
    return {item.key: item.x for item in items}


def test_an_average_does_not_depend_on_what_travels_beside_it():
    together, one = (run_ranks(alone, 3, which)[0] for which in (range(len(SHAPES)), [3]))
    assert torch.equal(together["p3"], one["p3"])


# ---- what is not finite ----------------------------------------------------------------------------------------------


def not_finite(rank, size, value):
    codec, feedback = nb.codec("topk:density=0.1"), ErrorFeedback()
    average("sparse_reduce", items_of(gradients(rank, 0), codec, feedback, 0), rank, size)
    before = {key: x.clone() for key, x in feedback.state_dict().items()}
    bad = gradients(rank, 1)
    bad[0][3, 4] = value if rank in (0, 1) else 0.0
    items = items_of(bad, codec, feedback, 1)
    work = average("sparse_reduce", items, rank, size)
    same = all(torch.equal(before[key], x) for key, x in feedback.state_dict().items())
    return work.finite, same, all(bool(item.x.isnan().all()) for item in items)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e38])
def test_what_is_not_finite_on_a_rank_or_in_a_sum_does_not_count(value):
    """Two times 2e38 / 3 is finite, but not their sum with its like of three, which no float32 holds."""
    answers = run_ranks(not_finite, 3, value)
    expected = value == 2e38
    for finite, same, nan in answers:
        assert finite == expected
        assert expected or (same and nan)


def added_up(value, ranks):
    """Whether the first owner's sums of what all ranks send it are said to be finite, where all send this value."""
    items = items_of([torch.full((40, 40), value)], nb.codec("topk:density=0.1"), ErrorFeedback(), 0)
    work = collective("sparse_reduce")(items, Peers(None, 0, ranks), measure=False)
    work.encode()
    work._lay_out([160])
    rows = torch.zeros(ranks, work._row + TRAILER, dtype=torch.uint8)
    work._write_rows(rows)
    second = torch.zeros(1 << 14, dtype=torch.uint8)
    work._add_up(rows[:1].repeat(ranks, 1), second)
    return not second[-1]


def test_a_sum_of_finite_values_that_no_float_holds_does_not_count():
    """A tenth is rounded up, and ten times that of the largest float is too large."""
    largest = torch.finfo(torch.float32).max
    assert added_up(largest / 2, 10)
    assert not added_up(largest, 10)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_sent(rank, size):
    shapes, codec = [(256, 512), (512, 128), (128,)], nb.codec("topk:density=0.01")
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for shape in shapes]
    items = items_of(tensors, codec, ErrorFeedback(), 0)
    work = average("sparse_reduce", items, rank, size)
    said = sum(
        collective("sparse_reduce").layer_traffic_nbytes(codec, shape, codec.payload_nbytes(shape), size)
        for shape in shapes
    )
    gathered = collective("all_gather").traffic_nbytes(sum(codec.payload_nbytes(shape) for shape in shapes), size)
    return work.sent_nbytes, said, gathered


def test_bytes_hardly_grow_among_a_few_ranks_and_are_what_was_said():
    sent = {}
    for size in (4, 8, 16):
        ((own, said, gathered), *others) = run_ranks(bytes_sent, size)
        assert all(other[0] == own for other in others)
        assert said == pytest.approx(own, rel=0.03)
        sent[size] = own, gathered
    assert sent[16][0] < 1.1 * sent[8][0]
    assert sent[16][0] < 0.25 * sent[16][1]


#: Of a GPT of 3.3 million parameters.
MATRICES = [tuple(x.shape) for x in GPT(MODELS["gpt-demo"]).parameters() if x.dim() > 1]
TOPK = nb.compression("topk:density=0.01+ef")


def said_of(size):
    """Bytes that a rank sends for all matrices, as the library says."""
    layers = LayerCollectives([(TOPK, shape) for shape in MATRICES], size)
    assert layers.of(TOPK).name == "sparse_reduce"
    return sum(layers.sent_nbytes(TOPK, shape) for shape in MATRICES)


def ok_topk(size):
    """The bound of Ok-Topk: 6k·(N−1)/N numbers of 4 bytes (arXiv 2201.07598)."""
    return 4 * 6 * sum(TOPK.codec.kept(shape) for shape in MATRICES) * (size - 1) / size


def test_among_some_hundred_ranks_it_stays_below_the_bound_of_ok_topk_and_behind_that_rows_are_rounded_up():
    """The figures of the documentation."""
    assert all(said_of(size) < ok_topk(size) for size in (7, 8, 16, 32, 64, 100, 256, 500))
    assert [round(said_of(size) / 1e3) for size in (32, 100, 1000, 10_000)] == [507, 556, 803, 3800]
    assert [round(ok_topk(size) / 1e3) for size in (32, 100, 1000, 10_000)] == [764, 780, 787, 788]
    payloads = sum(TOPK.codec.payload_nbytes(shape) for shape in MATRICES)
    assert [round(said_of(size) / payloads, 1) for size in (32, 100, 1000, 10_000)] == [3.0, 3.3, 4.8, 22.6]


@pytest.mark.parametrize(("size", "above"), [(100, 1.02), (1000, 1.08)])
def test_what_is_said_of_many_ranks_is_what_one_of_them_sends(size, above):
    """Said layer by layer; layers that share a message share what is rounded up, too."""
    state = TOPK.new_feedback()
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in MATRICES]
    exchange = collective("sparse_reduce")(
        items_of(tensors, TOPK.codec, state, 0), Peers(EchoGroup(size), 0, size), measure=False, state=state
    )
    exchange.encode()
    for transfer in exchange.job():
        transfer.issue()
    assert exchange.sent_nbytes <= said_of(size) <= above * exchange.sent_nbytes


def test_auto_takes_it_where_it_sends_less_than_half():
    codec, feedback = nb.codec("topk:density=0.01"), ErrorFeedback()
    chosen = {size: choose(codec, 10_000_000, size, feedback).name for size in (2, 4, 6, 7, 8, 32)}
    assert chosen == {
        2: "all_gather", 4: "all_gather", 6: "all_gather", 7: "sparse_reduce", 8: "sparse_reduce", 32: "sparse_reduce",
    }  # fmt: skip
    assert choose(nb.codec("threshold:value=1"), 10_000_000, 8, feedback).name == "sparse_reduce"
    assert choose(codec, 1000, 8, feedback).name == "all_gather"  # two phases take longer than so few bytes
    for spec in ("topk:density=0.01,values=int8", "topk:density=0.01,tile=8x8", "qsgd:bits=4"):
        assert choose(nb.codec(spec), 10_000_000, 32, feedback).name != "sparse_reduce"
    assert choose(codec, 10_000_000, 32).name == "all_gather"  # nothing would wait for what does not arrive


# ---- in training -----------------------------------------------------------------------------------------------------


def trained(rank, size, spec, steps):
    model = wrap(mlp())
    handle = compress(model, spec, min_numel=64, collective="sparse_reduce", coalesced=True)
    losses = train(model, rank, [0] * steps, sgd(model, 0.2))
    return flat(model), losses, handle.stats().total


@pytest.mark.parametrize(
    "spec",
    [
        "topk:density=0.1+ef",
        "dgc:density=0.1,momentum=0.5",
        "threshold:value=0.02+ef",
        *thorough("topk:density=0.1+ef-mixed"),
    ],
)
def test_models_learn_and_are_equal(spec):
    answers = run_ranks(trained, 3, spec, 15)
    for parameters, losses, total in answers:
        assert torch.equal(parameters, answers[0][0])
        assert losses[-1] < 0.9 * losses[0]
        assert total.relative_error is not None


def resumed(rank, size):
    whole = wrap(mlp())
    options = {"min_numel": 64, "collective": "sparse_reduce"}
    compress(whole, "topk:density=0.1+ef", **options)
    train(whole, rank, range(6))
    model = wrap(mlp())
    handle = compress(model, "topk:density=0.1+ef", **options)
    train(model, rank, range(4))
    state = copy.deepcopy(handle.state_dict())
    parameters = {name: p.clone() for name, p in model.state_dict().items()}
    again = wrap(mlp())
    handle = compress(again, "topk:density=0.1+ef", **options)
    again.load_state_dict(parameters)
    handle.load_state_dict(state)
    train(again, rank, range(4, 6))
    return torch.equal(flat(whole), flat(again))


def test_a_run_that_was_stopped_goes_on_to_the_bit():
    assert run_ranks(resumed, 3) == [True] * 3


def wrong(rank, size):
    model = wrap(nn.Sequential(nn.Linear(64, 64)))
    specs = ["topk:density=0.1", "topk:density=0.1,values=int8+ef", "qsgd:bits=4+ef", "topk:density=0.1+ef21"]
    return [refusal(lambda s=spec: compress(model, s, collective="sparse_reduce")) for spec in specs]


def test_what_it_cannot_carry_is_said():
    for (kind, text), word in zip(
        run_ranks(wrong, 1)[0],
        ["keeps the rest", "int8 does not", "qsgd:bits=4 does not", "keeps the rest"],
        strict=True,
    ):
        assert kind == "UnsupportedError"
        assert word in text
