"""Steps that are decided where tensors are, with nothing told to the host: as on a GPU, whose part the CPU plays."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import narrowband as nb
from narrowband.averaging import step as steps
from narrowband.collectives.all_gather import AllGather
from narrowband.errors import PayloadError
from narrowband.kernels import Findings
from tests.gradients.training import TINY, compress, flat, loss_of, mlp, residuals, same, sgd, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

#: Each codec, each feedback, and each way to keep a residual once.
SPECS = [
    "none", "qsgd:bits=4", "topk:density=0.1", "topk:density=0.1,values=int8", "uniform:bits=4+ef", "sign+ef",
    "topk:density=0.1,values=int8+ef", "fp16+ef", "powersgd:rank=2+ef", "powersgd:rank=1,iterations=2,ef=false",
    "powersgd:rank=2,halves=1", "dgc:density=0.1", "dgc:density=0.1,values=int8,clip=0.1",
    "dgc:density=0.1,nesterov=true,store=bf16", "uniform:bits=8+ef21", "topk:density=0.1+ef-mixed",
    "topk:density=0.1,values=int8+ef-mixed:sends=parts", "topk:density=0.1+ef:store=int8",
    "topk:density=0.2+ef:store=bf16,decay=0.9",
]  # fmt: skip

#: Combinations of what those have.
MORE = [
    "fp16", "topk:density=0.1+ef", "powersgd:rank=1,halves=2", "dgc:density=0.1,nesterov=true,masking=false",
    "dgc:density=0.1,values=fp16,nesterov=true", "dgc:density=0.1,store=int8", "topk:density=0.1+ef21",
    "topk:density=0.1,values=fp16+ef-mixed:store=int8,decay=0.9", "topk:density=0.1,values=int8+ef:store=bf16",
    "uniform:bits=4+ef:store=int8", "qsgd:bits=8+ef:store=bf16",
]  # fmt: skip
BAD = 2

#: Of two ranks each.
NODES = {"nodes": 2}

#: Averages are encoded, too.
SCATTERED = {"collective": "scatter_reduce"}

#: Owners add up what they get, and deliver the largest sums.
SUMMED = {"collective": "sparse_reduce"}

IN_16 = {"dtype": torch.bfloat16}

LAYERS = "0.weight", "3.weight"


def leaves_no_trace(fn):
    """Ranks are used again: afterwards the host decides as before."""

    @functools.wraps(fn)
    def called(*arguments):
        before = steps.AHEAD
        try:
            return fn(*arguments)
        finally:
            steps.AHEAD = before

    return called


@leaves_no_trace
def trained(rank, world_size, spec, ahead, bad, options):
    """Parameters, residuals and counters after some steps, in one of which a gradient of one rank is inf."""
    steps.AHEAD = {"cpu"} if ahead else set()
    dtype = options.pop("dtype", torch.float32)
    model = wrap(
        mlp(dtype), cap=TINY
    )  # the payload that is not finite comes last, and those before it are written early
    handle = compress(model, spec, min_numel=64, **options)
    optimizer = sgd(model, 0.1)
    averages, waited = [], []
    for number in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, number, rank, dtype)
        if number == BAD and rank == 1 and bad:
            loss = loss + math.inf * model.module[0].weight[0, 0]
        before = residuals(handle)
        loss.backward()
        waited.append(handle._unread != [])
        averages.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
        if number == BAD and bad:
            assert all(torch.equal(residuals(handle)[name], value) for name, value in before.items())
            assert not averages.pop().isfinite().all()
        else:
            optimizer.step()
    return flat(model), residuals(handle), torch.stack(averages), handle.stats().total, waited


@leaves_no_trace
def averaged(rank, world_size, spec, ahead):
    """Averages of a loop of one's own, and residuals; the gradient of one rank is inf in one step."""
    steps.AHEAD = {"cpu"} if ahead else set()
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in (("a", (40, 50)), ("b", (70, 9)))}
    averager, found = nb.Averager(parameters, spec, min_numel=64), []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + rank)
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=generator)
        if number == BAD and rank == 1:
            parameters["b"].grad[3, 4] = -math.inf
        averager.average()
        found.append(torch.cat([p.grad.flatten() for p in parameters.values()]).clone())
    finite = [bool(x.isfinite().all()) for x in found]
    del found[BAD]
    return torch.stack(found), residuals(averager), averager.stats().total.skipped, finite


@pytest.mark.parametrize(
    "spec",
    ["qsgd:bits=4", "uniform:bits=2+ef", "topk:density=0.1+ef", "powersgd:rank=2+ef", "powersgd:rank=2,halves=1"],
)
def test_a_loop_of_ones_own_is_decided_there_too(spec):
    own, theirs = (run_ranks(averaged, 2, spec, ahead) for ahead in (True, False))
    for (averages, kept, skipped, finite), (expected, its, count, _) in zip(own, theirs, strict=True):
        assert torch.equal(averages, expected)
        assert all(torch.equal(kept[name], its[name]) for name in its)
        assert skipped == count == int("qsgd" not in spec) or "qsgd" in spec
        assert finite == [number != BAD for number in range(4)]


@leaves_no_trace
def frozen(rank, world_size, spec, ahead):
    """Whether a parameter that is frozen after two steps keeps its residual in the third, and gets no average."""
    steps.AHEAD = {"cpu"} if ahead else set()
    parameters = {name: torch.nn.Parameter(torch.zeros(40, 50)) for name in "ab"}
    averager, held = nb.Averager(parameters, spec, min_numel=64), []
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + rank)
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=generator)
        if number == 2:
            parameters["a"].requires_grad_(False).grad = None
        averager.average()
        held.append(
            {name.rpartition("/")[2]: x.clone() for name, x in residuals(averager).items() if "factor" not in name}
        )
    return [torch.equal(held[1][name], held[2][name]) for name in "ab"], parameters["a"].grad


@pytest.mark.parametrize("spec", ["uniform:bits=2+ef", "topk:density=0.1+ef"])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_waits_of_a_parameter_that_is_frozen_is_not_sent(spec, ahead):
    assert run_ranks(frozen, 2, spec, ahead) == [([True, False], None)] * 2


@leaves_no_trace
def lacking(rank, world_size, spec, ahead, averager):
    """Averages and residuals of steps in which rank 0 sometimes has no gradient of a layer; and whether its residual
    waited. In the last step, the gradient of the next layer is exactly zero, too, and its residual does not wait.
    """
    steps.AHEAD = {"cpu"} if ahead else set()
    model = mlp()
    handle = nb.Averager(model, spec, min_numel=64) if averager else compress(model, spec, min_numel=64)
    averages, waited = [], []
    for number in range(5):
        alone = number in (2, 4) and rank == 0
        model.zero_grad(set_to_none=True)
        before = residuals(handle)
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * number + rank))
        if number == 4:
            x = torch.ones_like(x)  # a norm makes zeros of it
        (model[1:](x) if alone else model(x[:, :24])).square().mean().backward()
        assert (model[0].weight.grad is None) is (averager and alone)
        if averager:
            handle.average()
        averages.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
        now = residuals(handle)
        names = [[name for name in now if name.endswith(layer)] for layer in LAYERS]
        waited.append([number > 0 and all(torch.equal(now[name], before[name]) for name in own) for own in names])
    return torch.stack(averages), residuals(handle), waited


@pytest.mark.parametrize("averager", [False, True])
@pytest.mark.parametrize("spec", ["topk:density=0.1+ef", "dgc:density=0.1", "powersgd:rank=1"])
def test_what_a_rank_has_of_a_parameter_waits_while_it_has_no_gradient(spec, averager):
    own, theirs = (run_ranks(lacking, 2, spec, ahead, averager) for ahead in (True, False))
    for rank, ((averages, kept, waited), (expected, its, _)) in enumerate(zip(own, theirs, strict=True)):
        assert torch.equal(averages, expected)
        assert same(kept, its)
        if "powersgd" not in spec:  # what this rank's factors lack of the others' waits with it
            assert waited == [[rank == 0 and number in (2, 4), False] for number in range(5)]


@pytest.mark.parametrize(
    ("spec", "options", "bad"),
    [
        *((spec, {}, True) for spec in SPECS),
        ("topk:density=0.1+ef", {"small": "fp16"}, True),
        ("topk:density=0.1+ef", {}, False),
        ("dgc:density=0.1,nesterov=true", {"warmup_steps": 9}, True),
        *((spec, IN_16, True) for spec in ("qsgd:bits=4", "uniform:bits=4+ef:store=int8", "powersgd:rank=2")),
        ("topk:density=0.1+ef", {"dtype": torch.float16}, True),
        ("uniform:bits=5+ef", {"dtype": torch.float16, **SCATTERED}, True),
        ("topk:density=0.1+ef", NODES, True),
        ("uniform:bits=4+ef:decay=0.9", SCATTERED, True),
        ("topk:density=0.1+ef:store=bf16,decay=0.9", {**SUMMED, **IN_16}, True),
        *thorough(*((spec, {}, True) for spec in MORE)),
        *thorough(*((spec, IN_16, True) for spec in ("none", "powersgd:rank=2,halves=1"))),
        *thorough(("fp16+ef", {"dtype": torch.float16}, True), ("uniform:bits=4+ef", NODES, True)),
        *thorough(*((spec, SCATTERED, True) for spec in ("qsgd:bits=4", "sign+ef", "fp16+ef"))),
        *thorough(*((spec, SUMMED, True) for spec in ("topk:density=0.1+ef", "topk:density=0.1+ef:store=int8"))),
        *thorough(("topk:density=0.1+ef", {"dtype": torch.float16, **SUMMED}, True)),
        *thorough(("topk:density=0.1+ef", SUMMED, False), ("topk:density=0.1+ef:store=bf16", SUMMED, True)),
        *thorough(("dgc:density=0.1", {"warmup_steps": 9}, True)),
        *thorough(*((spec, {}, False) for spec in SPECS + MORE if spec != "topk:density=0.1+ef")),
        *thorough(("topk:density=0.1+ef", {"small": "fp16"}, False)),
    ],
)
def test_what_the_device_decides_is_what_the_host_would(spec, options, bad):
    ranks = 4 if options is NODES else 3 if "collective" in options else 2
    own, theirs = (run_ranks(trained, ranks, spec, ahead, bad, options) for ahead in (True, False))
    for (parameters, kept, averages, total, waited), (expected, its, others, count, never) in zip(
        own, theirs, strict=True
    ):
        assert torch.equal(parameters, expected)
        measured = [stats.relative_error for stats in (total, count)]
        assert measured == [None, None] or measured[0] == pytest.approx(measured[1], rel=1e-6)
        assert torch.equal(averages, others)
        assert kept.keys() == its.keys()
        assert all(torch.equal(kept[name], its[name]) for name in kept)
        if "ef" in spec or "dgc" in spec or "powersgd" in spec:  # without feedback nobody asks
            assert total.skipped == count.skipped == int(bad)
        # Factors' errors are measured on the host: those of the first step, if it makes any.
        assert waited == ["powersgd" not in spec or "warmup_steps" in options] + [True] * 4
        assert not any(never)


@leaves_no_trace
def small_in_16_bits(rank, world_size):
    """Whether a step goes ahead; and the averages of a bias in another dtype, which is compressed along with others."""
    steps.AHEAD = {"cpu"}
    parameters = {"a": torch.nn.Parameter(torch.zeros(40, 50)), "b": torch.nn.Parameter(torch.zeros(90).bfloat16())}
    averager = nb.Averager(parameters, "qsgd:bits=8", min_numel=64, small="fused")
    for p in parameters.values():
        p.grad = torch.full_like(p, 1.0 + rank)
    averager.average()
    return averager.layers.goes_ahead, parameters["b"].grad.float()


def test_a_vector_of_small_parameters_may_be_in_16_bits():
    """Loops for several tensors at once read float32: they get a copy."""
    for ahead, average in run_ranks(small_in_16_bits, 2):
        assert ahead
        torch.testing.assert_close(average, torch.full((90,), 1.5), rtol=0.02, atol=0)


@leaves_no_trace
def damaged(rank, world_size):
    """What the gradients are after a damaged payload, and what the step after it says."""
    steps.AHEAD = {"cpu"}
    model = wrap(mlp())
    compress(model, "qsgd:bits=4", min_numel=64)
    before = AllGather._write
    now = [0]

    def write(self, good):
        before(self, good)
        if self.findings is not None:
            self.findings.note(Findings.DAMAGED, bad=now[0] == BAD)

    AllGather._write = write
    try:
        for number in range(BAD + 1):
            now[0] = number
            model.zero_grad()
            loss_of(model, number, rank).backward()
        broken = all(bool(p.grad.isnan().all()) for p in model.parameters())
        with pytest.raises((RuntimeError, PayloadError), match="damaged") as caught:
            loss_of(model, BAD + 1, rank).backward()
        return broken, str(caught.value)
    finally:
        AllGather._write = before


def test_averages_of_a_damaged_payload_are_nan_and_the_next_step_raises():
    for broken, said in run_ranks(damaged, 2):
        assert broken
        assert "an earlier step was damaged" in said


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("uniform:bits=4+ef:store=cpu", {}),
        ("dgc:density=0.1", SUMMED),
        ("topk:density=0.1+ef-mixed", SUMMED),
        ("topk:density=0.1,select=sampled+ef", SUMMED),
    ],
)
def test_where_feedback_has_to_know_the_host_waits(spec, options):
    own, theirs = (run_ranks(trained, 2, spec, ahead, True, options) for ahead in (True, False))
    for (parameters, *_, total, waited), (expected, *_, count, _never) in zip(own, theirs, strict=True):
        assert torch.equal(parameters, expected)
        assert total.skipped == count.skipped == 1
        assert not any(waited)
