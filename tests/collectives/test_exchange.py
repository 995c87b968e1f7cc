"""What an exchange promises: the mean of what the ranks encoded, the same bits everywhere, and bytes as announced."""

from __future__ import annotations

import itertools
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.collectives import Engine, Operand, Peers, SerialExecutor, collective
from narrowband.collectives.exchange import TRAILER
from narrowband.feedback import ErrorFeedback
from tests.ranks import run_ranks
from tests.thorough import thorough

ALL_REDUCE = ["none", "fp16", "bf16", "randomk:density=0.1"]
ALL_GATHER = [
    "none",
    "fp16",
    "bf16",
    "uniform:bits=3,group=32",
    "uniform:bits=8,rounding=stochastic",
    "uniform:bits=4,symmetric=true",
    "qsgd:bits=4",
    "qsgd:bits=2,bucket=64,norm=l2",
    "sign:bucket=64",
    "topk:density=0.05",
    "topk:density=0.05,select=sampled",
    "topk:density=0.1,scope=sample,values=fp16",
    "topk:density=0.1,values=int8,indices=int32",
    "topk:density=0.1,values=int2,tile=8x8",
    "threshold:value=1.5",
    "randomk:density=0.1",
    "lowrank:rank=2",
]
SCATTER_REDUCE = [
    "none",
    "fp16",
    "bf16",
    "uniform:bits=8,group=32",
    "uniform:bits=4,rounding=stochastic",
    "qsgd:bits=8,bucket=64",
    "qsgd:bits=4,norm=l2",
    "sign:bucket=64",
]
#: Every way to send, with every codec that it carries.
WAYS = (
    [("all_reduce", spec) for spec in ALL_REDUCE]
    + [("all_gather", spec) for spec in ALL_GATHER]
    + [("scatter_reduce", spec) for spec in SCATTER_REDUCE]
)
#: The second and third leave most ranks' chunks empty, the fourth all of them.
SHAPES = [(33, 47), (5,), (3, 5), (0, 4), (2, 8, 16)]


def seed_of(step, index):
    return lambda rank: (7 << 40) + (step << 32) + (index << 12) + rank


def gradients(rank, step=0, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def operands_of(tensors, codec, feedback=None, step=0):
    return [
        Operand(f"p{i}", x.clone().reshape(-1), tuple(x.shape), codec, feedback, seed_of(step, i), i)
        for i, x in enumerate(tensors)
    ]


def average(kind, items, rank, world_size, *, good=None, measure=False, rotating=True, parts=1):
    """Run one exchange to its end; ``good=None`` takes the exchange's own word. Items may come in ``parts``."""
    finished = threading.Event()
    errors = []

    def failed(error):
        errors.append(error)
        finished.set()

    pairs = SerialExecutor("pairs") if rotating else None
    at = [round(part * len(items) / parts) for part in range(parts + 1)]
    work = collective(kind)(items[: at[1]], Peers(None, rank, world_size, pairs), measure=measure)
    engine = Engine(torch.device("cpu"), failed)

    def begin():
        work.encode()
        for first, last in itertools.pairwise(at[1:]):
            work.extend(items[first:last])
            work.encode()
        engine.start(work.job(), finished.set)

    engine.post(begin)
    assert finished.wait(180)
    engine.close()
    if pairs is not None:
        pairs.close()
    if errors:
        raise errors[0]
    work.deliver(work.finite if good is None else good)
    return work


def average_both_ways(rank, world_size, kind, spec):
    averages, messages = [], []
    for rotating in (True, False):
        items = operands_of(gradients(rank), nb.codec(spec))
        with mock.patch.object(dist, "isend", wraps=dist.isend) as sent:
            average(kind, items, rank, world_size, rotating=rotating)
        averages.append([item.x for item in items])
        messages.append(sent.call_count)
    return averages, messages


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("scatter_reduce", "uniform:bits=4,group=32"),
        ("all_gather", "uniform:bits=4,group=32"),
        ("all_gather", "threshold:value=1.5"),
    ],
)
def test_messages_from_rank_to_rank_bring_what_the_backends_collective_brings(kind, spec, world_size):
    answers = run_ranks(average_both_ways, world_size, kind, spec)
    expected = world_size - 1 if kind == "scatter_reduce" or world_size == 2 else 0  # two ranks gather so, too
    for (in_pairs, at_once), messages in answers:
        assert all(torch.equal(a, b) for a, b in zip(in_pairs, at_once, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(in_pairs, answers[0][0][0], strict=True))
        assert messages == [expected, 0]


def average_by_all_ways(rank, world_size, ways, dtype, shapes):
    answers = []
    for kind, spec in ways:
        items = operands_of(gradients(rank, dtype=dtype, shapes=shapes), nb.codec(spec))
        work = average(kind, items, rank, world_size, measure=True)
        answers.append(([item.x for item in items], work.sent_nbytes, work.finite, list(work.norms.values())))
    return answers


def average_in_parts(rank, world_size, ways, parts):
    answers = []
    for kind, spec in ways:
        chosen = nb.compression(spec + ("+ef" if spec not in ("none", "bf16") and "symmetric" not in spec else ""))
        feedback = chosen.new_feedback() if chosen.feedback is not None else None
        averages = []
        for step in range(3):  # the second is bad
            items = operands_of(gradients(rank, step), chosen.codec, feedback, step)
            work = average(kind, items, rank, world_size, good=step != 1, measure=step == 2, parts=parts)
            averages.append([item.x for item in items])
        residual = {} if feedback is None else {key: value.clone() for key, value in feedback.state_dict().items()}
        answers.append((averages, residual, work.sent_nbytes, work.norms))
    return answers


def test_what_is_encoded_in_parts_travels_as_what_is_encoded_at_once():
    whole, *cut = (run_ranks(average_in_parts, 3, WAYS, parts) for parts in (1, 3))  # of one tensor, and of two
    for answers in cut:
        for rank in range(3):
            for (kind, spec), one, other in zip(WAYS, whole[rank], answers[rank], strict=True):
                for expected, found in zip(one[0], other[0], strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), f"{kind} {spec}"
                assert one[1].keys() == other[1].keys()
                assert all(torch.equal(one[1][key], other[1][key]) for key in one[1]), f"{kind} {spec}: owes other"
                assert one[2:] == other[2:], f"{kind} {spec}: other bytes or norms"


def decoded(codec, x, seed):
    """What arrives, in float64, of one rank's tensor: half-precision tensors are summed before they are rounded."""
    wide = torch.empty(x.shape, dtype=x.dtype if str(codec) == "none" else torch.float32)
    return codec.decode(codec.encode(x, seed=seed), wide, seed=seed).double()


def mean_of_decoded(codec, tensors_by_rank, index):
    """Float64 re-derivation of a single-phase average."""
    total = torch.zeros(tensors_by_rank[0][index].shape, dtype=torch.float64)
    for rank, tensors in enumerate(tensors_by_rank):
        seed = seed_of(0, index)(0 if codec.shared_seed else rank)
        total += decoded(codec, tensors[index], seed)
    return total / len(tensors_by_rank)


def chunks(numel, grain, size, index):
    """Where the chunk of each rank lies in scatter_reduce: grains as evenly as they come, shifted by the index."""
    ends = [min(-(-numel // grain) * j // size * grain, numel) for j in range(size + 1)]
    return [(ends[j], ends[j + 1]) for j in [(rank + index) % size for rank in range(size)]]


def quantization_step(codec, x):
    """At least the largest error that encoding ``x`` can make at any element."""
    return {"none": 2**-22, "fp16": 2**-10, "bf16": 2**-7, "uniform": 0.5, "qsgd": 1.0, "sign": 2.0}[
        codec.name
    ] * float(x.abs().max())


def expected_nbytes(kind, codec, tensors_by_rank, rank, size):
    """Bytes that a rank sends, written from the table at the top of choice.py."""
    tensors = tensors_by_rank[rank]
    if kind == "all_reduce":
        return 2 * (size - 1) * sum(codec.payload_nbytes(x.shape, x.dtype) for x in tensors) // size
    if kind == "all_gather" and codec.fixed_size:
        return (size - 1) * (sum(codec.payload_nbytes(x.shape, x.dtype) for x in tensors) + TRAILER)
    if kind == "all_gather":
        longest = max(sum(codec.encode(x).numel() for x in of_rank) for of_rank in tensors_by_rank)
        return (size - 1) * (8 * len(tensors) + longest + TRAILER)
    columns = [
        TRAILER + sum(codec.payload_nbytes(end - begin) for begin, end in column)
        for column in zip(
            *(chunks(x.numel(), codec.granularity, size, index) for index, x in enumerate(tensors)), strict=True
        )
    ]
    return sum(columns) - columns[rank] + (size - 1) * max(columns)


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        *((1, torch.float32), (2, torch.float16), (4, torch.float32), (4, torch.bfloat16)),
        *thorough((1, torch.float16), (1, torch.bfloat16), (2, torch.float32), (2, torch.bfloat16), (4, torch.float16)),
    ],
    ids=str,
)
def test_every_way_averages_what_the_codec_keeps(world_size, dtype):
    by_rank = [gradients(rank, dtype=dtype) for rank in range(world_size)]
    answers = run_ranks(average_by_all_ways, world_size, WAYS, dtype, SHAPES)
    for way, (kind, spec) in enumerate(WAYS):
        codec = nb.codec(spec)
        for rank in range(world_size):
            averages, sent, finite, norms = answers[rank][way]
            name = f"{kind} {spec} rank {rank}"
            assert finite, name
            assert sent == (expected_nbytes(kind, codec, by_rank, rank, world_size) if world_size > 1 else 0), name
            assert len(norms) == len(SHAPES), name
            for index, average_ in enumerate(averages):
                shape = by_rank[0][index].shape
                assert average_.dtype == dtype
                assert torch.equal(average_, answers[0][way][0][index]), f"{name}: other bits than rank 0"
                if not average_.numel():
                    continue
                if kind == "scatter_reduce":
                    # Two encodings, each off by a step at most, of tensors whose extremes are known.
                    largest = torch.stack([x[index].float().abs().max() for x in by_rank]).max()
                    bound = 2.1 * quantization_step(codec, largest) + 1e-6
                    wanted = torch.stack([x[index].double() for x in by_rank]).mean(0)
                else:
                    wanted = mean_of_decoded(codec, by_rank, index)
                    # Summation in float32, or in 16 bits where payloads are added on the wire.
                    on_wire = {"fp16": 2**-10, "bf16": 2**-7}.get(spec if kind == "all_reduce" else "", 1e-6)
                    bound = on_wire * float(wanted.abs().max()) * 2
                bound += float(wanted.abs().max()) * {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(dtype, 0.0) * 2
                error = (average_.view(shape).double() - wanted).abs().max()
                assert error <= bound, f"{name}, item {index}: off by {error}, allowed {bound}"


SMALL_MODEL = [(64, 64)] * 15 + [(128, 64)] * 5


def sent_by_scatter_reduce(rank, world_size, specs):
    sent = []
    for spec in specs:
        items = operands_of(gradients(rank, shapes=SMALL_MODEL), nb.codec(spec))
        sent.append(average("scatter_reduce", items, rank, world_size).sent_nbytes)
    return sent


def test_scatter_reduce_sends_what_its_table_says_also_where_tensors_are_not_cut_evenly():
    size, specs = 12, ["qsgd:bits=4", "uniform:bits=8", "sign"]
    for sent in run_ranks(sent_by_scatter_reduce, size, specs):
        for spec, nbytes in zip(specs, sent, strict=True):
            payload = sum(nb.codec(spec).payload_nbytes(shape) for shape in SMALL_MODEL)
            assert nbytes == pytest.approx(2 * (size - 1) / size * payload, rel=0.03 if spec == "sign" else 0.01), spec


def unbiased(rank, world_size):
    """The mean of what is delivered of many elements of 0.3, in buckets whose largest element is 1."""
    x = torch.full((64 * 1000,), 0.3)
    x[::64] = 1.0
    items = operands_of([x], nb.codec("qsgd:bits=2,bucket=64"))
    average("scatter_reduce", items, rank, world_size)
    return float(items[0].average[x < 1].mean())


def test_a_mean_is_rounded_by_other_random_numbers_than_its_parts_which_would_shift_it():
    for mean in run_ranks(unbiased, 2):
        assert mean == pytest.approx(0.3, abs=0.01)


def test_norms_are_those_of_the_own_gradient_and_its_loss():
    ways = [("all_reduce", "randomk:density=0.1"), ("all_gather", "topk:density=0.05"), ("all_gather", "qsgd:bits=4")]
    answers = run_ranks(average_by_all_ways, 2, ways, torch.float32, SHAPES)
    for way, (_, spec) in enumerate(ways):
        codec = nb.codec(spec)
        for rank in range(2):
            for index, x in enumerate(gradients(rank)):
                seed = seed_of(0, index)(0 if codec.shared_seed else rank)
                norms = answers[rank][way][3][index]
                assert norms.encoded == pytest.approx(float(x.double().square().sum()))
                assert norms.lost == pytest.approx(codec.squared_error(x, seed=seed), rel=1e-5, abs=1e-9)


def steps_with_feedback(rank, world_size, ways, dtype):
    """Averages and residuals of steps of which the third is bad, and where some ranks sometimes have nothing to say."""
    answers = []
    for kind, spec in ways:
        chosen = nb.compression(spec + "+ef")
        feedback = chosen.new_feedback()
        averages, undone = [], []
        for step in range(5):
            tensors = [x * (rank + 1) for x in gradients(rank, step, dtype)]
            if step == 0 and rank == 0:
                tensors = [torch.zeros_like(x) for x in tensors]
            if step == 3 and rank == world_size - 1:
                tensors[0].zero_()
            before = {key: value.clone() for key, value in feedback.state_dict().items()}
            items = operands_of(tensors, chosen.codec, feedback, step)
            work = average(kind, items, rank, world_size, good=step != 2, measure=step == 1)
            assert work.finite
            if step == 2:
                after = feedback.state_dict()
                undone = [torch.equal(before[key], after[key]) for key in before]
            else:
                averages.append([item.x for item in items])
        answers.append((averages, {key: value.clone() for key, value in feedback.state_dict().items()}, undone))
    return answers


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_with_feedback_nothing_is_lost_it_is_late(world_size):
    ways = (
        [(kind, spec) for kind, spec in WAYS if spec not in ("none", "bf16") and "symmetric" not in spec]
        if world_size == 4
        else [
            ("all_gather", "topk:density=0.05"),
            ("scatter_reduce", "qsgd:bits=4,norm=l2"),
            ("all_reduce", "randomk:density=0.1"),
        ]
    )
    answers = run_ranks(steps_with_feedback, world_size, ways, torch.float32)
    check_conservation(answers, ways, world_size, torch.float32, tolerance=4e-4)


def test_half_precision_gradients_owe_in_float32():
    ways = [
        ("all_gather", "topk:density=0.05"),
        ("all_gather", "threshold:value=1.5"),
        ("scatter_reduce", "uniform:bits=4"),
        ("all_reduce", "randomk:density=0.1"),
    ]
    for dtype, eps in ((torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
        answers = run_ranks(steps_with_feedback, 2, ways, dtype)
        # Averages are rounded to the gradient's dtype at delivery, which feedback does not see.
        check_conservation(answers, ways, 2, dtype, tolerance=100 * eps)


def check_conservation(answers, ways, world_size, dtype, tolerance):
    """Σ averages + Σ residuals / N + owners' errors = Σ mean gradients."""
    for way, (kind, spec) in enumerate(ways):
        left = ErrorFeedback.merged([answers[rank][way][1] for rank in range(world_size)])
        for index in range(len(SHAPES)):
            given = torch.zeros(SHAPES[index], dtype=torch.float64)
            for step in (0, 1, 3, 4):
                for rank in range(world_size):
                    x = (gradients(rank, step, dtype)[index] * (rank + 1)).double()
                    silent = (step == 0 and rank == 0) or (step == 3 and rank == world_size - 1 and index == 0)
                    given += 0 * x if silent else x / world_size
            arrived = torch.zeros_like(given)
            for average_ in answers[0][way][0]:
                arrived += average_[index].view(given.shape).double()
            for rank in range(world_size):
                assert all(answers[rank][way][2]), f"{kind} {spec}: a bad step changed what rank {rank} owes"
            arrived += left[f"p{index}"].view(given.shape).double()
            torch.testing.assert_close(
                arrived,
                given,
                rtol=0,
                atol=tolerance * (20 if (kind, spec) == ("all_reduce", "fp16") else 1),
                msg=lambda text, k=kind, s=spec: f"{k} {s}+ef: {text}",
            )


class Remembering(ErrorFeedback):
    """Error feedback that writes down what it hears of arrivals, and delivers something of its own."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def deliver(self, key, x):
        self.heard.append((key, x.clone()))
        x.fill_(7.0)


def arrivals(rank, world_size, ways):
    answers = []
    for kind, spec in ways:
        feedback, means = Remembering(), []
        for step, good in enumerate((True, False, True)):
            tensors = gradients(rank, step)
            if step == 2 and rank == 0:
                tensors[0].zero_()
            items = operands_of(tensors, nb.codec(spec), feedback, step)
            average(kind, items, rank, world_size, good=good)
            means.append([item.x for item in items])
        answers.append((feedback.heard, means))
    return answers


def test_feedback_makes_what_is_delivered_once_in_each_good_step_on_every_rank():
    ways = [
        ("all_reduce", "randomk:density=0.1"),
        ("all_gather", "topk:density=0.05"),
        ("scatter_reduce", "qsgd:bits=4"),
    ]
    answers = run_ranks(arrivals, 3, ways)
    for way in range(len(ways)):
        for heard, means in (of_rank[way] for of_rank in answers):
            assert [key for key, _ in heard] == [f"p{i}" for i in range(len(SHAPES))] * 2
            assert all(torch.equal(a[1], b[1]) for a, b in zip(heard, answers[0][way][0], strict=True))
            assert all(bool(x.any()) for key, x in heard if x.numel() > 100), "the mean itself"
            assert all(bool((x == 7.0).all()) for step in (0, 2) for x in means[step])
            assert not any(bool((x == 7.0).any()) for x in means[1])


def one_rank_is_not_finite(rank, world_size, ways, value, place, silent):
    answers = []
    for kind, spec in ways:
        chosen = nb.compression(spec)
        feedback = chosen.new_feedback()
        if feedback is not None:
            average(kind, operands_of(gradients(rank), chosen.codec, feedback), rank, world_size)
        tensors = gradients(rank, 1)
        if rank == world_size - 1:
            tensors[0].view(-1)[place] = value
        elif rank == silent:
            tensors = [torch.zeros_like(x) for x in tensors]
        residual = feedback.state_dict() if feedback is not None else {}
        before = {key: x.clone() for key, x in residual.items()}
        items = operands_of(tensors, chosen.codec, feedback, 1)
        work = average(kind, items, rank, world_size)
        unchanged = all(torch.equal(before[key], x) for key, x in residual.items())
        answers.append((work.finite, bool(items[0].x.isfinite().all()), unchanged))
    return answers


@pytest.mark.parametrize(
    ("value", "place"), [(torch.inf, 777), (torch.nan, 0), *thorough((torch.inf, 0), (torch.nan, 777))]
)
def test_not_finite_on_one_rank_is_not_finite_on_all(value, place):
    # Also where the codec, left to itself, would not have sent that element.
    ways = [*WAYS, *((kind, f"{spec}+ef") for kind, spec in WAYS)]
    answers = run_ranks(one_rank_is_not_finite, 2, ways, value, place, None)
    for way, (kind, spec) in enumerate(ways):
        for rank in range(2):
            told, finite, unchanged = answers[rank][way]
            name = f"{kind} {spec}, rank {rank}"
            assert not finite, name
            assert unchanged, name
            assert not told or not spec.endswith("+ef"), f"{name}: feedback would have been committed"


def owner_owes_too_much(rank, world_size):
    """Two steps. The second's mean and what its owner owes from the first add up to more than a float holds."""
    chosen, large = nb.compression("uniform:bits=2+ef"), -3.3e38
    feedback = chosen.new_feedback()
    first, second = (torch.zeros(64, 64) for _ in range(2))
    first[:, :: 2 * (rank + 1)] = large  # half of it, as the mean is there, lies between two levels
    second[:, 2::4] = large
    found = []
    for step, x in enumerate((first, second)):
        before = {key: value.clone() for key, value in feedback.state_dict().items()}
        work = average("scatter_reduce", operands_of([x], chosen.codec, feedback, step), rank, world_size)
        now = feedback.state_dict()
        found.append((work.finite, before.keys() == now.keys() and all(torch.equal(before[k], now[k]) for k in now)))
    return found


def test_a_mean_that_is_not_finite_with_what_its_owner_owes_is_heard_of_by_all():
    assert run_ranks(owner_owes_too_much, 2) == [[(True, False), (False, True)]] * 2


def test_a_rank_with_nothing_to_say_hears_that_another_is_not_finite():
    ways = [
        ("all_reduce", "randomk:density=0.1+ef"),
        ("all_gather", "topk:density=0.05+ef"),
        ("scatter_reduce", "sign+ef"),
    ]
    answers = run_ranks(one_rank_is_not_finite, 3, ways, float("inf"), 5, 0)
    assert [[told for told, _, _ in answers[rank]] for rank in range(3)] == [[False] * 3] * 3
    assert all(unchanged for rank in range(3) for _, _, unchanged in answers[rank])
