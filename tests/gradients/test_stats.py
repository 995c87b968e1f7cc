"""Bytes to the byte, errors as they are, and no more memory than promised."""

from __future__ import annotations

import copy
import gc
import math
import resource

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.averaging import step as one_step
from tests.gradients.training import FINGERPRINT, HUGE, TINY, buckets, compress, loss_of, mlp, residuals, train, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

WEIGHTS = [(40, 24), (32, 40), (16, 32), (8, 16)]
#: Where these are among the model's parameters.
INDICES = [0, 4, 6, 8]
#: Biases and the norm of the model, in float32.
REST = 4 * (40 + 40 + 40 + 32 + 16 + 8)
#: Four bytes that follow each bucket's payloads.
TRAILER = 4


def ring(nbytes, size):
    return 2 * (size - 1) * nbytes // size


def chunk_nbytes(codec, shape, size, index):
    """Payload bytes of each rank's chunk of a tensor that scatter_reduce cuts: whole groups, about as many for each."""
    numel, grain = math.prod(shape), codec.granularity
    ends = [min(-(-numel // grain) * j // size * grain, numel) for j in range(size + 1)]
    return [codec.payload_nbytes(ends[j + 1] - ends[j]) for j in [(rank + index) % size for rank in range(size)]]


def two_steps(rank, world_size, specs, cap):
    answers = []
    for spec, collective in specs:
        model = wrap(mlp(), cap=cap)
        handle = compress(model, spec, min_numel=64, collective=collective)
        train(model, rank, range(3))
        stats = handle.stats()
        assert stats.total.wire_s == pytest.approx(handle._engine.wire_seconds)  # each second is of one step
        answers.append((stats, buckets(model), stats.total.to_dict()))
    return answers


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_are_those_of_the_payloads(world_size):
    specs = [
        ("topk:density=0.05+ef", "auto"),
        ("topk:density=0.05,values=int8,scope=sample", "all_gather"),
        ("uniform:bits=3,group=32", "all_gather"),
        ("uniform:bits=3,group=32+ef", "scatter_reduce"),
        ("qsgd:bits=4", "scatter_reduce"),
        ("randomk:density=0.1+ef", "auto"),
        ("fp16", "auto"),
        ("none", "auto"),
    ]
    raw = sum(4 * math.prod(shape) for shape in WEIGHTS) + REST
    answers = run_ranks(two_steps, world_size, specs, HUGE)
    for rank in range(world_size):
        for (spec, _), (stats, count, as_dict) in zip(specs, answers[rank], strict=True):
            assert count == 1
            codec = nb.compression(spec).codec
            payload = sum(codec.payload_nbytes(shape) for shape in WEIGHTS)
            if spec == "none":
                sent = ring(raw, world_size)
            elif codec.sum_dtype(torch.float32) is not None:
                sent = ring(payload, world_size) + ring(REST, world_size)
            elif _ == "scatter_reduce":
                columns = [
                    TRAILER + sum(column)
                    for column in zip(
                        *(
                            chunk_nbytes(codec, shape, world_size, at)
                            for shape, at in zip(WEIGHTS, INDICES, strict=True)
                        ),
                        strict=True,
                    )
                ]
                sent = sum(columns) - columns[rank] + (world_size - 1) * max(columns) + ring(REST, world_size)
            else:
                # One element more in the dense all-reduce says whether the step counts.
                flag = 4 if spec.endswith("+ef") else 0
                sent = (world_size - 1) * (payload + TRAILER) + ring(REST + flag, world_size)
            sent += FINGERPRINT * (world_size - 1)
            assert stats.last.raw_bytes == ring(raw, world_size), spec
            assert stats.last.sent_bytes == sent, spec
            assert stats.total.raw_bytes == 3 * ring(raw, world_size)
            assert stats.total.sent_bytes == 3 * sent
            assert (stats.total.steps, stats.last.steps) == (3, 1)
            assert stats.total.ratio == (1.0 if world_size == 1 else pytest.approx(ring(raw, world_size) / sent))
            assert as_dict["ratio"] == stats.total.ratio
            for seconds in ("encode_s", "wire_s", "decode_s", "waiting_s", "exchange_s"):
                counted = spec != "none" or seconds not in ("encode_s", "decode_s")
                counted &= world_size > 1 or seconds != "wire_s"
                assert getattr(stats.last, seconds) > 0 if counted else getattr(stats.last, seconds) >= 0
                assert getattr(stats.total, seconds) > getattr(stats.last, seconds) or not counted


def test_a_bucket_costs_its_trailer_and_nothing_else():
    specs = [("topk:density=0.05+ef", "all_gather")]
    one, many = (run_ranks(two_steps, 2, specs, cap)[0][0] for cap in (HUGE, TINY))
    assert many[1] > one[1] == 1
    exchanges = len(WEIGHTS)  # buckets of one parameter each: those without a matrix exchange nothing
    assert many[0].last.sent_bytes - one[0].last.sent_bytes == (exchanges - 1) * TRAILER
    assert many[0].last.raw_bytes == one[0].last.raw_bytes


def small_messages(rank, world_size, early, cap):
    """For each all-reduce of a step: its elements, and how many buckets the step had got by then."""
    model = wrap(mlp(), cap=cap)
    compress(model, "topk:density=1.0+ef", min_numel=64, early=early)
    train(model, rank, range(2))  # DDP makes its buckets anew after the first
    started, got = [], []
    all_reduce, exchange = one_step.Step._all_reduce, one_step.Step._exchange

    def listening(step, x, *args, **options):
        started.append((x.numel(), len(got)))
        return all_reduce(step, x, *args, **options)

    def counting(step, *args, **options):
        got.append(step)
        return exchange(step, *args, **options)

    one_step.Step._all_reduce, one_step.Step._exchange = listening, counting
    model.zero_grad()
    loss_of(model, 2, rank).backward()
    one_step.Step._all_reduce, one_step.Step._exchange = all_reduce, exchange
    averages = [p.grad.clone() for p in model.parameters()]
    plain = wrap(copy.deepcopy(model.module))
    loss_of(plain, 2, rank).backward()
    close = all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(averages, plain.parameters(), strict=True))
    return started, len(got), close


def test_what_is_small_at_the_end_of_a_model_goes_before_backward_ends():
    # The first layer and the norm's weights are a third of the model: its biases and these wait for the flag.
    late, early = 40 + 40, 40 + 32 + 16 + 8
    for cap in (TINY, HUGE):
        for started, buckets_of_step, close in run_ranks(small_messages, 3, True, cap):
            assert close
            assert sorted(numel for numel, _ in started) == sorted([early, late + 1])
            seen = dict(started)
            assert seen[late + 1] == buckets_of_step
            assert (seen[early] < buckets_of_step) == (cap == TINY)
        for started, _, close in run_ranks(small_messages, 3, False, cap):
            assert close
            assert [numel for numel, _ in started] == [early + late + 1]


def measured_error(rank, world_size, spec):
    model = wrap(mlp())
    handle = compress(model, spec, min_numel=64)
    local = mlp()
    loss_of(local, 0, rank).backward()
    loss_of(model, 0, rank).backward()
    matrices = {name: p.grad for name, p in local.named_parameters() if p.dim() == 2}
    lost = sum(residuals(handle)[name].double().square().sum() for name in matrices)
    return handle.stats().last.relative_error, float(lost / sum(g.double().square().sum() for g in matrices.values()))


def test_the_relative_error_is_the_share_of_the_gradient_the_residual():
    for measured, expected in run_ranks(measured_error, 2, "topk:density=0.05+ef"):
        assert 0.05 < expected < 0.95
        assert measured == pytest.approx(expected, rel=1e-4)


def by_layer_and_in_all(rank, world_size, spec, options, layers):
    """Of each step, the last of which is paused: bytes of layers, and of the step. And elements that are small."""
    model = wrap(mlp(), cap=options.pop("cap", HUGE))
    handle = compress(model, spec, min_numel=64, **options)
    handle.set_layers(layers)
    assert {own.sent_bytes for own in handle.layer_stats().values()} == {0}
    seen = []
    for step in range(4):
        if step == 3:
            handle.pause()
        train(model, rank, [step])
        seen.append((handle.layer_stats(), handle.stats().last.sent_bytes))
    return seen, sum(handle.layers.parameters.vectors.values())


TOPK, EVERY_KIND = (
    "topk:density=0.05+ef",
    {
        "3.weight": "qsgd:bits=8+ef",
        "5.weight": "powersgd:rank=2,min_ratio=1",
        "6.weight": "fp16+ef",
    },
)


@pytest.mark.parametrize("world_size", [3, *thorough(2)])
@pytest.mark.parametrize(
    ("spec", "options", "layers"),
    [
        ("dgc:density=0.05,warmup_steps=2", {}, {}),
        ("threshold:value=0.01+ef", {}, {}),
        ("threshold:value=0.01", {}, {}),
        ("threshold:value=0.01+ef", {"collective": "sparse_reduce"}, {}),
        (TOPK, {"collective": "sparse_reduce", "coalesced": True, "cap": TINY}, {}),
        ("qsgd:bits=4+ef", {"collective": "scatter_reduce"}, {}),
        ("powersgd:rank=2,min_ratio=1", {"cap": TINY}, {}),
        ("powersgd:rank=2,halves=3,min_ratio=1", {}, {}),
        ("fp16", {"warmup_steps": 1}, {}),
        ("none", {}, {}),
        (TOPK, {"cap": TINY}, EVERY_KIND),
        (TOPK, {"cap": TINY, "coalesced": True}, EVERY_KIND),
    ],
)
def test_bytes_of_layers_and_of_what_is_small_are_those_of_a_step(world_size, spec, options, layers):
    answers = run_ranks(by_layer_and_in_all, world_size, spec, options, layers)
    for seen, small in answers:
        rest = 4 * small
        assert rest == REST
        for step, (own, sent) in enumerate(seen):
            by_layer = sum(each.sent_bytes for each in own.values())
            beside = sent - by_layer - FINGERPRINT * (world_size - 1)
            # One element more in the dense all-reduce says whether the step counts. What is not compressed travels
            # bucket by bucket, and loses some parts of bytes each time.
            assert ring(rest, world_size) - len(own) <= beside <= ring(rest + 4, world_size) + len(own), step
            if world_size == 2:
                assert beside in (rest, rest + 4)
            if step == 3 or spec == "none":
                assert [each.sent_bytes for each in own.values()] == pytest.approx(
                    [each.raw_bytes for each in own.values()], abs=1
                )
    if spec.startswith("dgc"):  # less and less
        sums = [sum(each.sent_bytes for each in own.values()) for own, _ in answers[0][0]]
        assert sums[3] > sums[0] > sums[1] > sums[2]


def with_small_ones_and_on_two_levels(rank, world_size):
    found = []
    for options in ({"small": "fused"}, {"nodes": 2}):
        model = wrap(mlp())
        handle = compress(model, TOPK, min_numel=64, **options)
        train(model, rank, range(2))
        own, parameters = handle.layer_stats(), handle.layers.parameters
        by_layer = sum(each.sent_bytes for each in own.values())
        payloads = {name: handle.compression.codec.payload_nbytes(parameters.by_name[name].shape) for name in own}
        off = max(abs(each.sent_bytes - payloads[name] * (handle.size - 1)) for name, each in own.items())
        found.append((handle.stats().last.sent_bytes - by_layer, sum(parameters.vectors.values()), off))
    return found


def test_bytes_of_layers_where_small_ones_are_compressed_and_on_two_levels():
    for (fused, small, off), (between, part, off_between) in run_ranks(with_small_ones_and_on_two_levels, 4):
        payload = nb.compression(TOPK).codec.payload_nbytes((small,))
        assert fused == 3 * (payload + TRAILER + FINGERPRINT)
        assert between == ring(4 * (part + 1), 2) + FINGERPRINT
        assert off <= 3 * TRAILER  # among few layers
        assert off_between <= TRAILER


def by_layer(rank, world_size, spec, collective):
    model = wrap(mlp())
    handle = compress(model, spec, min_numel=64, collective=collective)
    before = handle.layer_stats()
    local = mlp()
    loss_of(local, 0, rank).backward()
    loss_of(model, 0, rank).backward()
    squares = {name: float(p.grad.double().square().sum()) for name, p in local.named_parameters() if p.dim() == 2}
    kept = residuals(handle) if "+ef" in spec and "ef21" not in spec else {}
    norms = {name: float(x.double().norm()) for name, x in kept.items() if name in squares}
    after, last = handle.layer_stats(), handle.stats().last
    handle.load_state_dict(handle.state_dict())  # from which statistics begin anew
    assert {layer.relative_error for layer in handle.layer_stats().values()} == {None}
    return before, after, last, squares, norms


@pytest.mark.parametrize(
    ("spec", "collective"),
    [
        ("topk:density=0.05+ef", "all_gather"),
        ("topk:density=0.05+ef", "sparse_reduce"),
        ("qsgd:bits=4+ef", "scatter_reduce"),
        ("qsgd:bits=4", "all_gather"),
        ("fp16", "auto"),
        ("powersgd:rank=2", "auto"),
        ("powersgd:rank=2,halves=1", "auto"),
        ("dgc:density=0.05", "auto"),
        ("topk:density=0.05+ef21", "auto"),
    ],
)
def test_each_layer_has_its_bytes_error_and_residual(spec, collective):
    for before, after, last, squares, norms in run_ranks(by_layer, 2, spec, collective):
        assert after.keys() == before.keys() == squares.keys()
        assert {layer.relative_error for layer in before.values()} == {None}
        assert [(layer.numel, layer.raw_bytes) for layer in after.values()] == [
            (math.prod(shape), ring(4 * math.prod(shape), 2)) for shape in WEIGHTS
        ]
        assert {layer.spec for layer in after.values()} == {str(nb.compression(spec))}
        lost = sum(layer.relative_error * squares[name] for name, layer in after.items())  # of this rank's gradients
        if not spec.startswith("powersgd"):  # whose factors are of the average
            assert lost / sum(squares.values()) == pytest.approx(last.relative_error, rel=1e-3, abs=1e-7)
        assert all(0 <= layer.relative_error < 1 for layer in after.values())
        sent = sum(layer.sent_bytes for layer in after.values())
        assert sent <= last.sent_bytes <= sent + ring(REST, 2) + 16 * TRAILER
        for name, norm in norms.items():  # without what owners of chunks keep
            assert after[name].residual_norm == pytest.approx(norm, rel=1e-5)
            if collective == "all_gather":
                assert after[name].relative_error == pytest.approx(norm**2 / squares[name], rel=1e-3)
        if not norms and spec in ("qsgd:bits=4", "fp16", "topk:density=0.05+ef21"):
            assert {layer.residual_norm for layer in after.values()} == {None}


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDTH = 4096  # one matrix of 4096 × 4096: 64 MiB


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peaks(rank, world_size, ways):
    """The largest resident size after plain DDP, after the first way, after the second."""
    for spec, collective in ways:  # loads what compression needs, before anything is measured
        small = wrap(nn.Linear(64, 64, bias=False))
        compress(small, spec, collective=collective)
        small(torch.ones(1, 64)).sum().backward()

    def two_backwards(way):
        layer = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False)  # drawing so many numbers takes long
        nn.init.constant_(layer.weight, 0.01)
        with torch.no_grad():
            layer.weight.mul_(torch.linspace(-1.0, 1.0, WIDTH)[:, None])
        model = wrap(layer)
        if way is not None:
            compress(model, way[0], collective=way[1])
        for step in range(2):
            model.zero_grad()
            x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().sum().backward()

    answers = []
    for way in (None, *ways):
        two_backwards(way)
        gc.collect()
        answers.append(peak_bytes())
    return answers


def test_memory_is_feedback_a_bucket_and_payloads_and_no_copy_per_rank():
    size, bucket = 4, 4 * WIDTH * WIDTH
    sparse, quantized = "topk:density=0.01+ef", "qsgd:bits=4+ef"
    gathered = size * nb.compression(sparse).codec.payload_nbytes((WIDTH, WIDTH))
    chunked = 4 * nb.compression(quantized).codec.payload_nbytes((WIDTH, WIDTH)) + bucket // size  # and its own error
    answers = run_ranks(peaks, size, [(sparse, "all_gather"), (quantized, "scatter_reduce")], fresh=True)
    margin = bucket * 7 // 8  # the allocator's, and compiled loops that come late
    for plain, after_sparse, after_quantized in answers:
        assert plain > 2 * bucket  # the measure sees the model
        # Feedback, one bucket, payloads, and a margin below one more copy; one per rank would be four buckets more.
        assert after_sparse - plain <= bucket + bucket + gathered + margin
        assert after_quantized - plain <= bucket + bucket + chunked + margin
