"""``ef21`` and ``ef-mixed`` on real ranks, beside derivations of their papers in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.adapt import LGreCo
from tests.gradients.training import (
    TINY,
    compress,
    data,
    flat,
    loss_of,
    mlp,
    refusal,
    residuals,
    same,
    sgd,
    train,
    wrap,
)
from tests.ranks import run_ranks

SHAPES = {"one": (20, 30), "two": (16, 40), "bias": (30,), "gain": (7,)}
LAYERS = ("one", "two")
STEPS, BAD = 12, 5


class Given(nn.Module):
    """A model whose gradients are given: the loss is linear in every parameter."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def gradients(step, rank, dtype=torch.float32):
    """One layer of one rank has, in some steps, a gradient of exactly zero; those of all have in step 8."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    if (step % 3 == 1 and rank == 1) or step == 8:
        found["one"].zero_()
    return found


def delivered(rank, world_size, spec, options, dtype=torch.float32):
    """The averages of steps of which one is bad on one rank, and whether that one changed any state."""
    model = wrap(Given(dtype), TINY)
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


def cut(x, k):
    """x where it is one of the k largest, and zeros."""
    return torch.zeros_like(x).index_put_((at := x.abs().topk(k).indices,), x[at])


class DerivedEF21:
    """Algorithm 2, of all ranks at once: rows are ranks."""

    def __init__(self, ranks, numel):
        self.g = torch.zeros(ranks, numel, dtype=torch.float64)

    def step(self, x, k):
        for rank in range(len(x)):
            self.g[rank] += cut(x[rank] - self.g[rank], k)
        return self.g.mean(0)


class DerivedMixed:
    """EF-mixed, and a rank whose gradient is exactly zero keeps its residual."""

    def __init__(self, ranks, numel):
        self.e = torch.zeros(ranks, numel, dtype=torch.float64)

    def step(self, x, k):
        sent = torch.zeros_like(x)
        for rank in range(len(x)):
            if not x[rank].any():
                continue
            p = self.e[rank] + x[rank]
            at = cut(x[rank], -(-k // 2)) != 0
            at = at | (cut(self.e[rank], k // 2) != 0) if self.e[rank].any() else cut(x[rank], k) != 0
            sent[rank, at] = p[at]
            self.e[rank] = p - sent[rank]
        return sent.mean(0)


@pytest.mark.parametrize("small", ["uncompressed", "fused", "topk:density=0.3"])
@pytest.mark.parametrize(("feedback", "derived"), [("ef21", DerivedEF21), ("ef-mixed", DerivedMixed)])
def test_what_is_delivered_follows_the_paper(feedback, derived, small):
    """Also where small parameters travel as one vector, and as if the step with an inf on one rank had not been."""
    density, ranks = 0.1, 2
    answers = run_ranks(delivered, ranks, f"topk:density={density}+{feedback}", {"small": small})
    numel = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    vectors = {name: derived(ranks, numel[name]) for name in LAYERS}
    vectors["small"] = derived(ranks, numel["bias"] + numel["gain"])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


@pytest.mark.parametrize("small", ["uncompressed", "fused"])
@pytest.mark.parametrize(
    "spec", ["topk:density=0.05+ef21", "topk:density=0.05,select=sampled+ef-mixed", "qsgd:bits=8+ef21"]
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
                assert all(kind == "ValueError" and "means nothing to" in text for kind, text in refusals)
        assert empty is None


# ---- layers with something of their own ------------------------------------------------------------------------------

NAMES = ("0.weight", "3.weight", "5.weight", "6.weight")


def plans(rank, world_size):
    model = wrap(mlp(), TINY)
    handle = compress(model, "topk:density=0.1+ef21", min_numel=64)
    train(model, rank, range(2))
    before = residuals(handle)
    refused = [
        refusal(lambda spec=spec: handle.set_layers({"0.weight": "topk:density=0.5", "3.weight": spec}))
        for spec in ("topk:density=0.1+ef", "topk+ef-mixed", "powersgd:rank=1,min_ratio=1", "sign+ef")
    ]
    unchanged = same(before, residuals(handle)) and str(handle.layers.spec_for("0.weight")) == "topk:density=0.1+ef21"
    handle.set_layers({"0.weight": "topk:density=0.5", "3.weight": "uniform:bits=8", "5.weight": "none"})
    has = [str(handle.layers.spec_for(name)) for name in NAMES]
    begins = residuals(handle)
    train(model, rank, range(2, 5))
    state = copy.deepcopy(handle.state_dict())
    again = wrap(mlp(), TINY)
    compress(again, "topk:density=0.1+ef21", min_numel=64).load_state_dict(state)
    other = compress(wrap(mlp(), TINY), "topk:density=0.1+ef", min_numel=64)
    refused.append(refusal(lambda: other.set_layers({"3.weight": "topk:density=0.1+ef21"})))
    ways = {handle.layers.collective_for(handle.layers.spec_for(name)).name for name in NAMES}
    return refused, unchanged and same(before, begins), has, residuals(handle), ways


def test_all_layers_of_a_model_have_ef21_or_none_has():
    answers = run_ranks(plans, 2)
    for refused, kept, has, state, ways in answers:
        assert all(kind == "ValueError" and "ef21" in text for kind, text in refused)
        assert all("leave this feedback out" in text for _, text in refused)
        assert kept
        assert has == ["topk:density=0.5+ef21", "uniform:bits=8+ef21", "none+ef21", "topk:density=0.1+ef21"]
        assert ways == {"all_gather", "all_reduce"}
        for name in NAMES:
            told = torch.stack([answer[3][name].double() for answer in answers]).mean(0)
            torch.testing.assert_close(state[f"shared/{name}"].double(), told, rtol=0, atol=1e-6)


def mixing(rank, world_size):
    """The residual of a layer with ef-mixed goes along when it leaves topk, and comes back."""
    model = wrap(mlp(), TINY)
    handle = compress(model, "topk:density=0.1+ef-mixed", min_numel=64)
    sent, given, has = 0, 0, []
    for step, spec in enumerate(
        ["topk:density=0.05", "qsgd:bits=3", "none", "topk:density=0.2", "topk:density=0.02+ef"]
    ):
        handle.set_layers({"3.weight": spec})
        has.append(str(handle.layers.spec_for("3.weight")))
        for at in (2 * step, 2 * step + 1):
            plain = mlp()
            loss_of(plain, at, rank).backward()
            model.zero_grad()
            loss_of(model, at, rank).backward()
            given = given + plain[3].weight.grad.double()
            sent = sent + model.module[3].weight.grad.double()
    states = handle.layers.states.values()
    held = sum(state.residual("3.weight").double() for state in states if state.residual("3.weight") is not None)
    return sent, given, held, has


def test_a_layer_of_ef_mixed_has_it_wherever_it_has_topk():
    answers = run_ranks(mixing, 2)
    for sent, _, _, has in answers:
        assert has == [
            "topk:density=0.05+ef-mixed",
            "qsgd:bits=3+ef",
            "none+ef",
            "topk:density=0.2+ef-mixed",
            "topk:density=0.02+ef",
        ]
        given = sum(answer[1] for answer in answers) / 2
        held = sum(answer[2] for answer in answers).view_as(given) / 2
        torch.testing.assert_close(sent + held, given, rtol=0, atol=1e-5)
        assert float(held.norm()) > 0.01 * float(given.norm())


def chosen(rank, world_size, reference, choices):
    model = wrap(mlp(), TINY)
    handle = compress(model, LGreCo(reference, choices, every=3), min_numel=64)
    train(model, rank, range(8))
    return [str(handle.layers.spec_for(name)) for name in NAMES], handle.plan.step, flat(model)


@pytest.mark.parametrize(
    ("reference", "choices"),
    [
        ("topk:density=0.1+ef21", None),
        ("topk:density=0.1+ef-mixed", None),
        ("topk:density=0.1+ef21", ["topk:density=0.02", "topk:density=0.1", "uniform:bits=8", "none"]),
    ],
)
def test_a_policy_chooses_among_layers_of_the_models_feedback(reference, choices):
    answers = run_ranks(chosen, 2, reference, choices)
    for has, step, parameters in answers:
        assert step == 6
        assert len(set(has)) > 1
        assert all(spec.endswith(reference.partition("+")[2]) for spec in has)
        assert torch.equal(parameters, answers[0][2])
        assert bool(parameters.isfinite().all())


def what_cannot_be(rank, world_size):
    return [
        refusal(lambda spec=spec, options=options: compress(wrap(mlp()), spec, min_numel=64, **options))
        for spec, options in (
            ("qsgd:bits=4+ef21", {"collective": "scatter_reduce"}),
            ("fp16+ef21", {"collective": "all_reduce"}),
            ("topk+ef21", {"collective": "all_reduce"}),
            ("qsgd:bits=4+ef-mixed", {}),
            (LGreCo("topk:density=0.1+ef21", ["topk:density=0.05", "powersgd:rank=2"]), {}),
        )
    ]


def test_what_cannot_work_is_refused_at_set_up():
    said, other = run_ranks(what_cannot_be, 2)
    assert said == other
    assert [kind for kind, _ in said] == ["UnsupportedError"] * 4 + ["ValueError"]
    assert ["sums again" in said[0][1], "to 16 bits" in said[1][1], "cannot be added" in said[2][1]] == [True] * 3


# ---- ranks without a gradient ----------------------------------------------------------------------------------------


class Fork(nn.Module):
    """Two layers of which a batch may use one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x, both):
        y = self.always(x)
        return self.sometimes(y) if both else y


def missing(rank, world_size):
    model = wrap(Fork(), find_unused_parameters=True)
    handle = compress(model, "topk:density=0.2+ef21", min_numel=64)
    found = []
    for step, both in enumerate(((True, True), (True, False), (False, False), (False, False), (True, True))):
        for p in model.parameters():
            p.grad = None
        model(data(step, rank)[0], both[rank]).square().mean().backward()
        grad = model.module.sometimes.weight.grad
        found.append((None if grad is None else grad.clone(), residuals(handle)))
    return found


def test_a_rank_that_did_not_use_a_layer_gets_what_all_hold():
    """Its own zero is told to the others; where no rank used it DDP ignores what is delivered, and g goes to zero."""
    answers = run_ranks(missing, 2)
    for step in range(5):
        told = torch.stack([found[step][1]["sometimes.weight"].double() for found in answers]).mean(0)
        for grad, state in (found[step] for found in answers):
            h = state["shared/sometimes.weight"]
            torch.testing.assert_close(h.double(), told, rtol=0, atol=1e-6)
            assert (grad is None) == (step in (2, 3))
            assert grad is None or torch.equal(grad.view(-1), h)
    g = [[float(state["sometimes.weight"].norm()) for _, state in found] for found in answers]
    assert g[0][1] > g[0][2] >= g[0][3] == 0
    assert g[1][0] > g[1][1] >= g[1][3] == 0


def out_of_data(rank, world_size):
    model = wrap(Given(), TINY)
    compress(model, "topk:density=0.1+ef21", min_numel=64)
    averages = []
    with model.join():
        for step in range(2 + 4 * rank):
            model.zero_grad()
            model(gradients(step, rank)).backward()
            averages.append(model.module.two.grad.clone())
    return averages


def test_a_rank_that_has_run_out_of_data_counts_as_zero():
    averages = run_ranks(out_of_data, 2)[1]
    derived = DerivedEF21(2, 640)
    for step, average in enumerate(averages):
        x = torch.stack([gradients(step, rank)["two"].double().view(-1) for rank in range(2)])
        if step >= 2:
            x[0] = 0
        torch.testing.assert_close(average.double().view(-1), derived.step(x, 64), rtol=0, atol=1e-5)
