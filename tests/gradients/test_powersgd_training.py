"""PowerSGD in training: broken gradients, resuming, ranks that change, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowband as nb
from tests.gradients.matrices import SPEC, compressed, net, state_of
from tests.gradients.training import (
    FINGERPRINT,
    flat,
    heard,
    loss_of,
    refusal,
    sgd,
    train,
)
from tests.ranks import run_ranks


def resumed(rank, world_size):
    whole, handle = compressed()
    train(whole, rank, range(5))
    handle.set_layers({"2.weight": "powersgd:rank=1"})
    train(whole, rank, range(5, 10))
    first, handle = compressed()
    train(first, rank, range(5))
    handle.set_layers({"2.weight": "powersgd:rank=1"})
    train(first, rank, range(5, 6))
    state = {**handle.state_dict(), "feedback": state_of(handle)}
    module = net()
    module.load_state_dict(first.module.state_dict())
    second, handle = compressed(module=module)
    handle.load_state_dict(state)
    train(second, rank, range(6, 10))
    bad = {
        "ef": {**state, "feedback": {"0.weight": torch.zeros(960)}},
        "size": {**state, "feedback": {"residual/0.weight": torch.zeros(7)}},
        "factor": {**state, "feedback": {"factor/0.weight": torch.zeros(2, 23)}},
    }
    said = {name: refusal(lambda wrong=wrong: handle.load_state_dict(wrong)) for name, wrong in bad.items()}
    return torch.equal(flat(whole), flat(second)), said


def test_a_resumed_run_is_the_same_to_the_bit():
    for equal, said in run_ranks(resumed, 2):
        assert equal
        assert all(error is not None and error[0] == "ValueError" for error in said.values()), said


def another_rank(rank, world_size):
    model, handle = compressed("powersgd:rank=3", module=nn.Linear(60, 50, bias=False))
    factor = handle.layers.state._factors
    seen = []

    def step(at):
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(at + 100 * rank))
        model.zero_grad()
        model(x).square().sum().backward()
        rank_of = int(torch.linalg.matrix_rank(model.module.weight.grad, rtol=1e-4))
        seen.append((tuple(factor["weight"].shape), rank_of, handle.stats().last.sent_bytes))

    step(0)
    before, residual = factor["weight"].clone(), state_of(handle)["residual/weight"]
    handle.set_layers({"weight": "powersgd:rank=5"})
    grown = handle.layers.state.factor("weight", 5, 60, 9, torch.device("cpu"))
    kept = torch.equal(grown[:3], before), torch.equal(residual, state_of(handle)["residual/weight"])
    step(1)
    handle.set_layers({"weight": "powersgd:rank=1"})
    step(2)
    handle.set_layers({"weight": "powersgd:rank=40"})  # no longer worth factoring: all residuals goes
    step(3)
    return seen, kept, float(state_of(handle)["residual/weight"].abs().max())


def test_the_rank_of_a_layer_can_change_while_training():
    for seen, kept, residual in run_ranks(another_rank, 2):
        assert [shape for shape, _, _ in seen] == [(3, 60), (5, 60), (1, 60), (1, 60)]
        assert [rank for _, rank, _ in seen][:3] == [3, 5, 1]
        assert [sent - 4 - FINGERPRINT for _, _, sent in seen] == [4 * 110 * 3, 4 * 110 * 5, 4 * 110, 4 * 3000]
        assert kept == (True, True)
        assert residual == 0


def bad_layers(rank, world_size):
    _, handle = compressed()
    return [
        refusal(lambda name=name, spec=spec: handle.set_layers({name: spec}))
        for name, spec in (
            ("nowhere", SPEC),
            ("0.bias", SPEC),
            ("0.weight", "powersgd:rank=2,min_ratio=5"),
            ("0.weight", "dgc"),
        )
    ] + [refusal(lambda: compressed(collective="all_gather")), refusal(lambda: compressed("powersgd:rank=0"))]


def test_what_a_layer_cannot_have_is_refused():
    (said,) = run_ranks(bad_layers, 1)
    assert [error[0] for error in said] == ["ValueError"] * 4 + ["UnsupportedError", "ValueError"]
    assert "2.weight" in said[0][1]
    assert "rank=0 must be at least 1" in said[-1][1]


def too_large_a_rank(rank, world_size):
    with heard() as messages:
        model, _ = compressed("powersgd:rank=30,min_ratio=0")
        train(model, rank, range(2))
    return messages, bool(flat(model).isfinite().all())


def test_a_rank_that_matrices_do_not_have_is_cut_and_said_once():
    (messages, finite), (of_rank_1, also_finite) = run_ranks(too_large_a_rank, 2)
    said = [message for message in messages if "rank 30" in message]
    assert len(said) == 1
    assert "0.weight (40 × 24: rank 24)" in said[0]
    assert "2.weight" not in said[0]
    assert of_rank_1 == []
    assert finite
    assert also_finite


def too_narrow(rank, world_size):
    said = []
    for module in (nn.Linear(300, 8, bias=False), nn.Linear(300, 80, bias=False)):
        with heard() as messages:
            model, handle = compressed("powersgd:rank=4", module=module)
        model(torch.randn(4, 300)).sum().backward()
        said.append((messages, handle.stats().last.ratio))
    return said


def test_matrices_that_are_too_narrow_to_be_factored_are_said_to_travel_uncompressed():
    (narrow, ratio), (wide, much) = run_ranks(too_narrow, 2)[0]
    assert len(narrow) == 1
    assert "factors none of this model's matrices" in narrow[0]
    assert ratio == pytest.approx(1.0, abs=0.01)
    assert wide == []
    assert much > 10


def scaled(rank, world_size):
    ends = []
    for scales in ((1.0,) * 6, (8.0, 8.0, 2.0, 2.0, 16.0, 16.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        model, _ = compressed(grad_scaler=scaler)
        optimizer = sgd(model)
        for step, then in enumerate((*scales[1:], 1.0)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, rank)).backward()
            scaler.step(optimizer)
            scaler.update(then)
        ends.append(flat(model))
    return ends


def test_a_new_loss_scale_rescales_the_residual():
    for once, twice in run_ranks(scaled, 2):
        torch.testing.assert_close(once, twice, rtol=0, atol=1e-6)


def fewer_ranks(rank, world_size, states):
    model, handle = compressed()
    if states is None:
        train(model, rank, range(5))
        return {**handle.state_dict(), "feedback": state_of(handle)}
    handle.load_state_dict(states)
    return state_of(handle)


def test_another_number_of_ranks_shares_the_residual():
    states = run_ranks(fewer_ranks, 3, None)
    for residual in run_ranks(fewer_ranks, 2, states):
        assert any(key.startswith("factor/") for key in residual)
        for key, value in residual.items():
            torch.testing.assert_close(value, sum(state["feedback"][key] for state in states) / 3)


def test_a_spec_is_its_canonical_form():
    for text in (
        "powersgd:rank=4",
        "powersgd:rank=2,iterations=2,warm_start=false,min_ratio=1.5,ef=false",
    ):
        whole = nb.compression(text)
        assert str(whole) == text
        assert nb.compression(str(whole)) == whole
    assert nb.compression("powersgd:rank=4+ef") == nb.compression("powersgd") == nb.compression(nb.PowerSGD())
    for text, word in (
        ("powersgd:rank=4,ef=false+ef", "a feedback of its own"),
        ("powersgd:iterations=0", "iterations=0"),
        ("powersgd:min_ratio=-1", "min_ratio=-1.0"),
        ("powersgd:min_ratio=nan", "min_ratio=nan"),
        ("powersdg", "did you mean 'powersgd'"),
    ):
        with pytest.raises(ValueError, match=word):
            nb.compression(text)
