"""Layers with feedback of their own, and ranks without a gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from narrowband.adapt import LGreCo
from tests.gradients.states import DerivedEF21, Given, gradients
from tests.gradients.training import (
    TINY,
    Fork,
    compress,
    data,
    flat,
    loss_of,
    mlp,
    refusal,
    residuals,
    same,
    train,
    wrap,
)
from tests.ranks import run_ranks

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
        assert all("leave the feedback out of the layer's spec" in text for _, text in refused)
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
