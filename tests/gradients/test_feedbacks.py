"""Feedback under DDP follows its paper, step by step, and goes on where it was stopped."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import narrowband as nb
from tests.gradients.states import SHAPES, DerivedEF21, Given, gradients
from tests.gradients.training import (
    TINY,
    compress,
    flat,
    mlp,
    refusal,
    residuals,
    same,
    sgd,
    train,
    wrap,
)
from tests.ranks import run_ranks
from tests.thorough import thorough

LAYERS = ("one", "two")
SMALL = ("bias", "gain")


STEPS, BAD = 12, 5


def delivered(rank, world_size, spec, options, dtype=torch.float32):
    """The averages of steps of which one is bad on one rank, and whether that one changed any state."""
    model = wrap(Given(dtype), TINY, find_unused_parameters=options.get("small") == "uncompressed")
    handle = compress(model, spec, min_numel=64, **options)
    averages, kept = [], None
    for step in range(STEPS):
        given = gradients(step, rank, dtype)
        if step == BAD and rank == 1:
            given["two"][3, 3] = torch.inf
        before = residuals(handle)
        model.zero_grad()
        model(given).backward()
        averages.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
        if step == BAD:
            kept = same(before, residuals(handle))
    return averages, kept, residuals(handle)


class DerivedMixed:
    """EF-mixed. Where a gradient of zeros may stand for none, the rank keeps its residual."""

    def __init__(self, ranks, numel):
        self.e = torch.zeros(ranks, numel, dtype=torch.float64)
        self.zeros_count = True

    def step(self, x, k):
        sent = torch.zeros_like(x)
        for rank in range(len(x)):
            if not self.zeros_count and not x[rank].any():
                continue
            p = self.e[rank] + x[rank]
            at = largest(x[rank], -(-k // 2) if self.e[rank].any() else k)
            at = at | largest(self.e[rank], k // 2 if self.e[rank].any() else 0)
            sent[rank, at] = p[at]
            self.e[rank] = p - sent[rank]
        return sent.mean(0)


def largest(x, k):
    """Where the k largest are; of equal ones, the first."""
    return torch.zeros(len(x), dtype=torch.bool).index_fill_(
        0, x.abs().sort(descending=True, stable=True).indices[:k], 1
    )


@pytest.mark.parametrize("small", ["uncompressed", "fused", "topk:density=0.3"])
@pytest.mark.parametrize(("feedback", "derived"), [("ef21", DerivedEF21), ("ef-mixed", DerivedMixed)])
def test_what_is_delivered_follows_the_paper(feedback, derived, small):
    """Also where small parameters travel as one vector, and as if the step with an inf on one rank had not been."""
    density, ranks = 0.1, 2
    answers = run_ranks(delivered, ranks, f"topk:density={density}+{feedback}", {"small": small})
    numel = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    vectors = {name: derived(ranks, numel[name]) for name in LAYERS}
    vectors["small"] = derived(ranks, numel["bias"] + numel["gain"])
    for vector in vectors.values():
        vector.zeros_count = small != "uncompressed"
    for step in range(STEPS):
        if step == BAD:
            broken = LAYERS if feedback == "ef21" else ("two",)  # what is no gradient is delivered nowhere
            assert not any(average[step][name].isfinite().all() for average, _, _ in answers for name in broken)
            continue
        found = [gradients(step, rank) for rank in range(ranks)]
        for name, vector in vectors.items():
            names = ("bias", "gain") if name == "small" else (name,)
            x = torch.stack([torch.cat([g[n].double().view(-1) for n in names]) for g in found])
            if name == "small" and small == "uncompressed":
                expected = x.mean(0)
            else:
                share = 0.3 if name == "small" and small != "fused" else density
                expected = vector.step(x, nb.codec(f"topk:density={share}").kept(x.shape[1]))
            for averages, _, _ in answers:
                arrived = torch.cat([averages[step][n].double().view(-1) for n in names])
                torch.testing.assert_close(arrived, expected, rtol=0, atol=1e-5, msg=f"{name}, step {step}")
    for averages, kept, state in answers:
        assert kept, "the bad step changed a state"
        for step in range(STEPS):
            assert step == BAD or all(torch.equal(x, answers[0][0][step][n]) for n, x in averages[step].items())
        if feedback == "ef21":
            assert set(state) >= {"one", "two", "shared/one", "shared/two"}


@pytest.mark.parametrize(
    ("spec", "small"),
    [("topk:density=0.1+ef", "fp16"), ("topk:density=0.1+ef", "qsgd:bits=4"), ("powersgd:rank=2", "uniform:bits=8")],
)
def test_small_parameters_have_a_codec_of_their_own(spec, small):
    """It loses less of them than the layers' codec would; and what it loses waits, too."""
    answers = run_ranks(delivered, 2, spec, {"small": small})
    steps = [step for step in range(STEPS) if step != BAD]
    means = {
        step: torch.cat([sum(gradients(step, rank)[name].double().view(-1) for rank in range(2)) / 2 for name in SMALL])
        for step in steps
    }
    arrived = {step: torch.cat([answers[0][0][step][name].double().view(-1) for name in SMALL]) for step in steps}
    for step in steps:
        off = float((arrived[step] - means[step]).norm() / means[step].norm())
        assert 0 < off < {"fp16": 1e-3, "qsgd:bits=4": 0.5, "uniform:bits=8": 0.02}[small]
    numel = sum(torch.Size(SHAPES[name]).numel() for name in SMALL)
    waiting = torch.stack([next(x for x in state.values() if x.numel() == numel) for _, _, state in answers])
    given, sent = (sum(each.values()) for each in (means, arrived))
    of_sums = 5e-3 if small == "fp16" else 1e-5  # payloads are added up in 16 bits
    torch.testing.assert_close(sent + waiting.double().mean(0), given, rtol=0, atol=of_sums)
    assert all(kept for _, kept, _ in answers), "the bad step changed a state"


def mean_told(answers, name):
    return torch.stack([state[name].double() for _, _, state in answers]).mean(0)


EVERY_WAY = [
    "topk:density=0.1+ef21",
    "topk:density=0.1,select=sampled,scope=sample,values=fp16+ef21",
    "threshold:value=0.5+ef21",
    "randomk:density=0.1+ef21",
    "uniform:bits=8,rounding=stochastic+ef21",
    "qsgd:bits=8+ef21",
    "sign+ef21",
    "lowrank:rank=2+ef21",
    "bf16+ef21",
]


@pytest.mark.parametrize("dtype", [torch.float32, *thorough(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("spec", EVERY_WAY)
def test_what_is_delivered_is_the_mean_of_what_each_rank_told(spec, dtype):
    """With every codec, whichever way it travels; in float32, also where gradients are not."""
    answers = run_ranks(delivered, 3, spec, {"warmup_steps": 2}, dtype)
    for averages, kept, state in answers:
        assert kept
        for name in LAYERS:
            h = state[f"shared/{name}"]
            assert h.dtype == torch.float32
            torch.testing.assert_close(h.double(), mean_told(answers, name), rtol=0, atol=3e-6)
            assert torch.equal(h, answers[0][2][f"shared/{name}"])
            assert torch.equal(averages[-1][name].view(-1), h.to(dtype))


def beginning(rank, world_size, dtype):
    """Steps that are not compressed: at first, and while it is paused."""
    model = wrap(Given(dtype), TINY)
    handle = compress(model, "topk:density=0.1+ef21", min_numel=64, warmup_steps=2, small="fused")
    found = []
    for step in range(6):
        if step == 4:
            handle.pause()
        model.zero_grad()
        model(gradients(step, rank, dtype)).backward()
        found.append(({name: p.grad.clone() for name, p in model.module.named_parameters()}, residuals(handle)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_uncompressed_steps_deliver_the_mean_and_tell_all(dtype):
    answers = run_ranks(beginning, 2, dtype)
    for step in range(6):
        xs = [gradients(step, rank, dtype) for rank in range(2)]
        for name in SHAPES:
            mean = torch.stack([x[name].double() for x in xs]).mean(0)
            for rank, found in enumerate(answers):
                average, state = found[step]
                right = torch.allclose(
                    average[name].double(), mean, rtol=2**-8 if dtype != torch.float32 else 0, atol=1e-6
                )
                assert right == (step not in (2, 3)), (name, step)
                if name in LAYERS and step not in (2, 3):
                    told = xs[rank][name].view(-1)
                    torch.testing.assert_close(state[name].to(torch.float64), told.double(), rtol=0, atol=1e-6)


def halves(rank, world_size, spec, small, stop):
    """Parameters at the end of a run that is stopped, saved and loaded on the way; and without that."""
    ends = []
    for at in (None, stop):
        model = wrap(mlp(), TINY)
        handle = compress(model, spec, min_numel=64, small=small)
        optimizer = sgd(model, momentum=0.5)
        train(model, rank, range(at or 8), optimizer)
        if at:
            state, parameters = copy.deepcopy(handle.state_dict()), copy.deepcopy(model.module.state_dict())
            momenta = copy.deepcopy(optimizer.state_dict())
            model = wrap(mlp(), TINY)
            model.module.load_state_dict(parameters)
            handle = compress(model, spec, min_numel=64, small=small)
            handle.load_state_dict(state)
            optimizer = sgd(model, momentum=0.5)
            optimizer.load_state_dict(momenta)
            train(model, rank, range(at, 8), optimizer)
        ends.append((flat(model), residuals(handle)))
    return ends


@pytest.mark.parametrize(
    ("spec", "small"),
    [
        *itertools.product(
            ["topk:density=0.05+ef21", "topk:density=0.05,select=sampled+ef-mixed", "qsgd:bits=8+ef21"],
            ["uncompressed", "fused"],
        ),
        ("powersgd:rank=2", "uniform:bits=4"),
    ],
)
def test_a_run_goes_on_to_the_bit_where_it_was_stopped(spec, small):
    answers = run_ranks(halves, 2, spec, small, 3)
    for (whole, kept), (resumed, kept_too) in answers:
        assert torch.equal(whole, resumed)
        assert same(kept, kept_too)
        assert torch.equal(whole, answers[0][0][0])


def some_steps(rank, world_size, spec):
    model = wrap(mlp(), TINY)
    handle = compress(model, spec, min_numel=64, small="fused")
    train(model, rank, range(3))
    return copy.deepcopy(handle.state_dict())


def on_other_ranks(rank, world_size, spec, states):
    model = wrap(mlp(), TINY)
    handle = compress(model, spec, min_numel=64, small="fused")
    handle.load_state_dict(states)
    begins = residuals(handle)
    train(model, rank, range(3, 6))
    return begins, residuals(handle), flat(model)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (1, 2), (2, 1)])
def test_ranks_of_another_number_begin_with_what_all_had_in_common(before, after):
    spec = "topk:density=0.1+ef21"
    states = run_ranks(some_steps, before, spec)
    shared = {name: h for name, h in states[0]["feedback"].items() if name.startswith("shared/")}
    assert len(shared) == 5
    answers = run_ranks(on_other_ranks, after, spec, list(reversed(states)))
    for begins, _, parameters in answers:
        assert same(begins, shared | {name.removeprefix("shared/"): h for name, h in shared.items()})
        assert torch.equal(parameters, answers[0][2])
    for name in shared:
        told = torch.stack([state[name.removeprefix("shared/")].double() for _, state, _ in answers]).mean(0)
        for _, state, _ in answers:
            torch.testing.assert_close(state[name].double(), told, rtol=0, atol=1e-6)


def what_is_not_its_own(rank, world_size):
    """Refusals to load, for every pair of what was saved and what loads; as an own state and as all ranks' states."""
    specs = ["topk:density=0.1+ef", "topk:density=0.1+ef-mixed", "topk:density=0.1+ef21"]
    saved, handles = {}, {}
    for spec in specs:
        model = wrap(mlp(), TINY)
        handles[spec] = compress(model, spec, min_numel=64)
        train(model, rank, range(2))
        saved[spec] = copy.deepcopy(handles[spec].state_dict())
    said = {}
    for there, state in saved.items():
        for here, handle in handles.items():
            before = residuals(handle)
            other = {**state, "rank": 1 - rank}
            said[there, here] = [
                refusal(lambda h=handle, s=state: h.load_state_dict(s)),
                refusal(lambda h=handle, s=state, o=other: h.load_state_dict([s, o])),
            ]
            assert said[there, here] == [None, None] or same(before, residuals(handle))
    empty = {**saved[specs[0]], "feedback": {}}
    return said, refusal(lambda: handles[specs[2]].load_state_dict(empty))


def test_the_residuals_of_others_are_refused_and_the_other_way_round():
    for said, empty in run_ranks(what_is_not_its_own, 2):
        for (there, here), refusals in said.items():
            if there.endswith("ef21") == here.endswith("ef21"):
                assert refusals == [None, None], (there, here)
            else:
                assert all(kind == "ValueError" and "cannot be converted to that of" in text for kind, text in refusals)
        assert empty is None
