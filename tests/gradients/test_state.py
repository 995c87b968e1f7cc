"""State: a stopped run goes on to the bit, and what cannot be loaded is refused."""

from __future__ import annotations

import copy
import io
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

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

RUNS = [
    ("topk:density=0.05+ef", "auto"),
    ("topk:density=0.05,select=sampled+ef", "auto"),
    ("qsgd:bits=4", "all_gather"),
    ("uniform:bits=4,rounding=stochastic+ef", "scatter_reduce"),
    ("randomk:density=0.1+ef", "all_gather"),
    ("lowrank:rank=2+ef", "auto"),
    ("dgc:density=0.05,clip=0.05", "auto"),  # clipped by a norm of all buckets, which are others after the first step
]


def start(spec, collective="auto", **options):
    model = wrap(mlp(), cap=0.004)
    return model, compress(model, spec, min_numel=64, collective=collective, seed=5, early=True, **options)


def first_half_and_whole(rank, world_size, runs):
    """For each run: parameters after six steps, and all that a program saves after three of them."""
    answers = []
    for spec, collective in runs:
        model, handle = start(spec, collective)
        optimizer = sgd(model, momentum=0.9)
        train(model, rank, range(3), optimizer)
        saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict(), handle.state_dict()))
        train(model, rank, range(3, 6), optimizer)
        answers.append((flat(model), saved))
    return answers


def second_half(rank, world_size, runs, saved):
    answers = []
    for (spec, collective), (parameters, optimizer_state, handle_state) in zip(runs, saved[rank], strict=True):
        model, handle = start(spec, collective)
        optimizer = sgd(model, momentum=0.9)
        model.module.load_state_dict(parameters)
        optimizer.load_state_dict(optimizer_state)
        handle.load_state_dict(handle_state)
        assert handle.step == 3
        train(model, rank, range(3, 6), optimizer)
        answers.append(flat(model))
    return answers


def test_a_run_that_was_stopped_and_resumed_has_the_same_bits():
    whole = run_ranks(first_half_and_whole, 2, RUNS)
    saved = [[save for _, save in of_rank] for of_rank in whole]
    resumed = run_ranks(second_half, 2, RUNS, saved, fresh=True)
    for rank in range(2):
        for index, (spec, collective) in enumerate(RUNS):
            assert torch.equal(resumed[rank][index], whole[rank][index][0]), f"{spec} {collective}"
    # The state matters: resuming without the residual, and without the step that seeds, gives another run.
    for of_rank in saved:
        for _, _, handle_state in of_rank:
            handle_state["feedback"].clear()
            handle_state["seed"] += 1
    forgetful = run_ranks(second_half, 2, RUNS, saved)
    for index in range(len(RUNS)):
        assert not torch.equal(forgetful[0][index], whole[0][index][0])


SCALERS = {
    "none": lambda: None,
    "off": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "on": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**16),
}


def resumed_with_another_scaler(rank, world_size, spec):
    """Parameters of a run without a scaler, and of those that begin with one and go on with another, by their names."""

    def begin(kind, state=None):
        scaler = SCALERS[kind]()
        model, handle = start(spec, grad_scaler=scaler)
        if state is not None:
            model.module.load_state_dict(state[0])
            handle.load_state_dict(state[1])
        return model, handle, scaler or SCALERS["off"]()

    def go_on(model, scaler, steps):
        optimizer = sgd(model)
        for step in steps:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, rank)).backward()
            scaler.step(optimizer)
            scaler.update()

    plain, _, scaler = begin("none")
    go_on(plain, scaler, range(5))
    ends = {}
    for first in SCALERS:
        for second in SCALERS:
            model, handle, scaler = begin(first)
            go_on(model, scaler, range(3))
            saved = copy.deepcopy((model.module.state_dict(), handle.state_dict()))
            if saved[1]["loss_scale"] == 1.0 and second == "on":
                saved[1]["loss_scale"] = None  # which is what states without a scaler once had
            model, _, scaler = begin(second, saved)
            go_on(model, scaler, range(3, 5))
            ends[first, second] = flat(model)
    return flat(plain), ends


@pytest.mark.parametrize("spec", ["topk:density=0.1+ef", "topk:density=0.1+ef21"])
def test_a_run_resumed_with_the_scaler_switched_on_or_off_keeps_its_residuals(spec):
    for plain, ends in run_ranks(resumed_with_another_scaler, 2, spec):
        for kinds, end in ends.items():
            assert torch.equal(end, plain), kinds  # scales are powers of two, which change no bit


def states_after_two_steps(rank, world_size, spec):
    model, handle = start(spec)
    train(model, rank, range(2))
    return copy.deepcopy(handle.state_dict())


def load_list(rank, world_size, spec, states):
    model, handle = start(spec)
    handle.load_state_dict(states)
    loaded = residuals(handle)
    train(model, rank, range(2, 4))
    return loaded, handle.step, flat(model)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 2), (2, 1), (2, 2)])
def test_the_residual_to_the_average_survives_a_change_of_the_number_of_ranks(before, after):
    spec = "topk:density=0.05+ef"
    states = run_ranks(states_after_two_steps, before, spec)
    answers = run_ranks(load_list, after, spec, list(reversed(states)))
    for name in states[0]["feedback"]:
        there = sum(state["feedback"][name].double() for state in states) / before
        here = sum(loaded[name].double() for loaded, _, _ in answers) / after
        assert there.any()
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-7)
    for _, step, parameters in answers:
        assert step == 4
        assert torch.equal(parameters, answers[0][2])


def wrong_states(rank, world_size):
    model, handle = start("topk:density=0.05+ef")
    train(model, rank, range(2))
    good = copy.deepcopy(handle.state_dict())
    errors = {}

    def load(name, state, into=handle):
        errors[name] = refusal(lambda: into.load_state_dict(state))

    load("another rank", {**good, "rank": 1 - rank})
    load("another world size", {**good, "world_size": 4})
    load("one of several", [good])
    load("one twice", [good, good])
    load("none at all", [])
    load("unknown layer", {**good, "feedback": {**good["feedback"], "9.weight": torch.zeros(4)}})
    load("another shape", {**good, "feedback": {**good["feedback"], "0.weight": torch.zeros(4)}})
    load("a dense layer", {**good, "feedback": {**good["feedback"], "0.bias": torch.zeros(40)}})
    _, bare = start("topk:density=0.05")
    load("no feedback", good, bare)
    load("no feedback, nothing residual", {**good, "feedback": {}}, bare)
    wrapped = wrap(torch.compile(mlp()))
    load("compiled", good, compress(wrapped, "topk:density=0.05+ef", min_numel=64))
    unchanged = same(residuals(handle), good["feedback"]) and handle.step == 2
    train(model, rank, range(2, 3))
    return errors, unchanged, flat(model)


def test_states_that_do_not_belong_here_are_refused_and_change_nothing():
    answers = run_ranks(wrong_states, 2)
    for errors, unchanged, parameters in answers:
        assert unchanged
        assert errors.pop("no feedback, nothing residual") is None
        assert {error and error[0] for error in errors.values()} == {"ValueError"}
        assert "load each rank's own state" in errors["another rank"][1]
        assert "saved with torch.compile and is loaded without, or the other way round" in errors["compiled"][1]
        assert "load each rank's own state" in errors["another world size"][1]
        assert "pass each rank's once" in errors["one of several"][1]
        assert "pass each rank's once" in errors["one twice"][1]
        assert "'9.weight'" in errors["unknown layer"][1]
        assert "another model" in errors["another shape"][1]
        assert "has no feedback" in errors["no feedback"][1]
        assert torch.equal(parameters, answers[0][2])


#: As JSON, of one layer.
PLAN = (
    '{"version": 2, "policy": "x", "world_size": 2, "layers": '
    '[{"name": "0.weight", "shape": [40, 24], "spec": "SPEC", "nbytes": 1, "error": null}]}'
)

#: What is done to a good state, and words of the sentence that refuses it.
BROKEN = {
    "a key is missing": (lambda state: state.pop("step"), "the state lacks 'step'"),
    "another version": (
        lambda state: state.update(version=1),
        "but this narrowband reads version 2",
    ),
    "the state of a model": (
        lambda state: (state.clear(), state.update(weight=torch.zeros(3))),
        "not the state of a model",
    ),
    "a checkpoint that has the state": (
        lambda state: (inside := dict(state), state.clear(), state.update(model={}, compression=inside)),
        "pass what handle.state_dict() returned: it is under 'compression' here",
    ),
    "a state of updates": (lambda state: state.update(updates={}), "the state is one of compress_updates"),
    "step is a word": (lambda state: state.update(step="x"), "the state has x for 'step', expected a number of steps"),
    "step is true": (lambda state: state.update(step=True), "for 'step'"),
    "step is negative": (lambda state: state.update(step=-1), "for 'step'"),
    "scale is NaN": (lambda state: state.update(loss_scale=float("nan")), "for 'loss_scale'"),
    "spec of nothing": (lambda state: state.update(spec="topkk"), "the state has an invalid spec"),
    "layers are a list": (lambda state: state.update(layers=["0.weight"]), "for 'layers'"),
    "unknown layer": (lambda state: state.update(layers={"9.weight": "topk:density=0.1"}), "9.weight"),
    "NaN": (lambda state: state["feedback"]["0.weight"].fill_(float("nan")), "inf or NaN for '0.weight'"),
    "inf": (lambda state: state["feedback"]["0.weight"][3:4].fill_(float("inf")), "inf or NaN for '0.weight'"),
    "int64": (
        lambda state: state["feedback"].update({"0.weight": torch.zeros(960, dtype=torch.int64)}),
        "int64 for '0.weight', expected float32",
    ),
    "float64": (
        lambda state: state["feedback"].update({"0.weight": state["feedback"]["0.weight"].double()}),
        "float64 for '0.weight', expected float32",
    ),
    "a list of numbers": (lambda state: state["feedback"].update({"0.weight": [0.0] * 960}), "list for '0.weight'"),
    "residuals of another": (
        lambda state: state.update(others={"powersgd": {"residual/0.weight": torch.zeros(960)}}),
        "residuals of the feedback powersgd, but no layer here has this feedback",
    ),
    "a sum of another size": (
        lambda state: state.update(controller={"sums": {"0.weight": torch.zeros(3)}}),
        "a sum of gradients of '0.weight' with 3 elements, but the layer has 960",
    ),
    "a plan of a feedback that cannot be": (
        lambda state: state.update(controller={"plan": PLAN.replace("SPEC", "qsgd:bits=4+ef-mixed")}),
        "ef-mixed chooses elements by magnitude",
    ),
    "a number for a plan": (lambda state: state.update(controller={"plan": 5}), "the state of the policy is invalid"),
    "a feedback that cannot be": (lambda state: state.update(layers={"0.weight": "sign+aq-sgd"}), "aq-sgd"),
    "an owner of nothing": (
        lambda state: state["feedback"].update({"owner/x/0.weight": torch.zeros(9)}),
        "elements for 'owner/x/0.weight'",
    ),
    "a name that is a number": (lambda state: state["feedback"].update({3: torch.zeros(9)}), "TypeError"),
    "a broken plan": (lambda state: state.update(controller={"plan": "{"}), "this is not a plan"),
}


def load_broken_states(rank, world_size):
    model, handle = start("topk:density=0.05+ef")
    train(model, rank, range(2))
    good = copy.deepcopy(handle.state_dict())
    train(model, rank, range(2, 3))
    before, errors = residuals(handle), {}
    for name, (breaking, _) in BROKEN.items():
        state = copy.deepcopy(good)
        breaking(state)
        errors[name] = refusal(lambda state=state: handle.load_state_dict(state))
    for name, what in (("no state", 7), ("nothing", None), ("a word", "state.pt"), ("numbers", [1, 2])):
        errors[name] = refusal(lambda what=what: handle.load_state_dict(what))
    unchanged = same(residuals(handle), before) and handle.step == 3
    train(model, rank, range(3, 4))  # and it goes on
    return errors, unchanged, flat(model)


def test_loading_is_a_transaction_what_is_broken_is_refused_before_anything_changes():
    answers = run_ranks(load_broken_states, 2)
    for errors, unchanged, parameters in answers:
        assert {error and error[0] for error in errors.values()} == {"ValueError"}, errors
        for name, (_, words) in BROKEN.items():
            assert words in errors[name][1], (name, errors[name][1])
        assert unchanged
        assert torch.equal(parameters, answers[0][2])


def one_rank_has_no_state(rank, world_size):
    model, handle = start("topk:density=0.05+ef")
    train(model, rank, range(1))
    good = copy.deepcopy(handle.state_dict())
    odd = good | {"feedback": {3: torch.zeros(9)}}
    return [refusal(lambda s=s: handle.load_state_dict(s if rank else good)) for s in (7, None, odd)], handle.step


def test_what_is_no_state_on_one_rank_is_an_error_on_all():
    for errors, step in run_ranks(one_rank_has_no_state, 2):
        assert [kind for kind, _ in errors] in (["ValueError"] * 3, ["DisagreementError"] * 3)
        assert all(word in text for (_, text), word in zip(errors, ("int", "NoneType", "TypeError"), strict=True))
        assert step == 1


def one_rank_of_two_has_a_torn_list(rank, world_size, torn, good):
    model, handle = start("topk:density=0.05+ef")
    error = refusal(lambda: handle.load_state_dict(torn if rank == 0 else good))
    train(model, rank, range(1))
    return error, handle.step


def moments(rank, world_size):
    model, handle = start("topk:density=0.05+ef")
    found = []
    for step in range(3):
        train(model, rank, range(step, step + 1))
        found.append(copy.deepcopy(handle.state_dict()))
    return found


def test_a_list_of_states_of_different_steps_is_refused_on_all_ranks_even_if_one_has_it():
    (first, _, _), (own, _, third) = run_ranks(moments, 2)
    (error, step), (told, other) = run_ranks(one_rank_of_two_has_a_torn_list, 2, [first, third], [first, own])
    assert error[0] == "ValueError"
    assert "step (1 on rank(s) 0; 3 on rank(s) 1)" in error[1]
    assert told[0] == "DisagreementError"
    assert "step (1 on rank(s) 0; 3 on rank(s) 1)" in told[1]
    assert (step, other) == (1, 1)


def from_the_list_of_all(rank, world_size, saved):
    answers = []
    for spec, collective in RUNS:
        model, handle = start(spec, collective)
        optimizer = sgd(model, momentum=0.9)
        parameters, optimizer_state, _ = saved[rank][len(answers)]
        model.module.load_state_dict(parameters)
        optimizer.load_state_dict(optimizer_state)
        handle.load_state_dict([of_rank[len(answers)][2] for of_rank in reversed(saved)])
        train(model, rank, range(3, 6), optimizer)
        answers.append(flat(model))
    return answers


def test_from_the_list_of_as_many_ranks_each_takes_its_own_and_goes_on_to_the_bit():
    whole = run_ranks(first_half_and_whole, 3, RUNS)
    saved = [[save for _, save in of_rank] for of_rank in whole]
    for rank, resumed in enumerate(run_ranks(from_the_list_of_all, 3, saved)):
        for index, run in enumerate(RUNS):
            assert torch.equal(resumed[index], whole[rank][index][0]), run


def paused_when_saved(rank, world_size):
    model, handle = start("topk:density=0.05+ef")
    train(model, rank, range(1))
    handle.pause()
    state = copy.deepcopy(handle.state_dict())
    _, other = start("topk:density=0.05+ef")
    other.load_state_dict(state)
    return other.paused


def test_a_pause_is_part_of_the_state():
    assert run_ranks(paused_when_saved, 2) == [True, True]


def inside_backward(rank, world_size, layer):
    model = wrap(mlp(), cap=TINY)
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    train(model, rank, range(2))
    state = copy.deepcopy(handle.state_dict())
    errors = []

    def ask(_):
        errors.append(refusal(handle.state_dict))
        errors.append(refusal(lambda: handle.load_state_dict(state)))

    p = model.module[layer].weight
    if layer == 0:  # the gradient that is last: when this is called, the last bucket is with the engine
        p.register_post_accumulate_grad_hook(ask)
    else:
        p.register_hook(ask)
    loss_of(model, 2, rank).backward()
    return errors, refusal(handle.state_dict), handle.step


@pytest.mark.parametrize("layer", [0, 3])
def test_there_is_no_state_inside_backward(layer):
    for errors, afterwards, step in run_ranks(inside_backward, 2, layer):
        assert [error and error[0] for error in errors] == ["RuntimeError"] * 2
        assert "state_dict was called inside backward" in errors[0][1]
        assert "load_state_dict was called inside backward" in errors[1][1]
        assert afterwards is None
        assert step == 3


def while_another_model_is_on_its_way_back(rank, world_size):
    """Backward has left the compressed model, whose buckets are still on the wire: rank 1 has not begun."""
    store = dist.distributed_c10d._get_default_store()
    below, above = nn.Linear(24, 24), wrap(mlp())
    handle = compress(above, "topk:density=0.05+ef", min_numel=64)
    errors = []

    def ask(_):
        if rank == 0:
            errors.append(refusal(handle.state_dict))
            store.set("asked", "yes")

    below.weight.register_hook(ask)
    x, y = data(0, rank)
    loss = (above(below(x)) - y).square().mean()
    if rank == 1:
        store.wait(["asked"], timedelta(seconds=30))
    loss.backward()
    return errors, refusal(handle.state_dict)


def test_there_is_no_state_while_buckets_are_on_the_wire():
    (errors, afterwards), _ = run_ranks(while_another_model_is_on_its_way_back, 2)
    assert [error and error[0] for error in errors] == ["RuntimeError"]
    assert afterwards is None


def sends_all_later(rank, world_size):
    """The largest element of all residuals: after three steps that send a part, and after one more that sends all."""
    found = []
    for resumed in (True, False):
        model, handle = start("topk:density=0.1+ef" if resumed else "none+ef")
        if not resumed:
            handle.set_layers(dict.fromkeys(handle.layer_stats(), "topk:density=0.1"))
        train(model, rank, range(3))
        before = max(float(x.abs().max()) for x in residuals(handle).values())
        if resumed:
            state = copy.deepcopy(handle.state_dict())
            handle.remove()
            handle = compress(model, "none+ef", min_numel=64)
            handle.load_state_dict(state)
        else:
            handle.set_layers(dict.fromkeys(handle.layer_stats(), "none"))
        train(model, rank, [3])
        found.append((before, max(float(x.abs().max()) for x in residuals(handle).values())))
    return found


def test_residuals_arrive_when_none_with_feedback_takes_over():
    """In a resumed run, and where layers had other specs for a while."""
    for found in run_ranks(sends_all_later, 2):
        assert all(before > 1e-3 and after == 0.0 for before, after in found), found


def becomes_the_default(rank, world_size, before, layer, now):
    """A layer has a feedback of its own; in the resumed run the whole model has that feedback."""
    model, handle = start(before)
    handle.set_layers({"0.weight": layer})
    train(model, rank, range(3))
    held, state = residuals(handle), copy.deepcopy(handle.state_dict())
    _, again = start(now)
    again.load_state_dict(state)
    return same(residuals(again), held), sorted(held), list(again.state_dict()["others"])


@pytest.mark.parametrize(
    ("before", "layer", "now"),
    [
        ("topk:density=0.05+ef-mixed", "topk:density=0.1+ef", "none+ef"),
        ("topk:density=0.05+ef", "topk:density=0.1+ef-mixed", "topk:density=0.2+ef-mixed"),
    ],
)
def test_residuals_of_a_layer_with_a_feedback_of_its_own_stay_when_the_model_gets_that_feedback(before, layer, now):
    for kept, names, others in run_ranks(becomes_the_default, 2, before, layer, now):
        assert kept
        assert "0.weight" in names
        assert len(names) > 1
        assert others == []


def through_a_file(rank, world_size):
    model, handle = start("topk:density=0.05+ef")
    train(model, rank, range(1))
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    saved = residuals(handle)
    _, other = start("topk:density=0.05+ef")
    other.load_state_dict(read)
    for residual in read["feedback"].values():
        residual.zero_()  # the file's tensors are the caller's
    return same(residuals(other), saved), other.step


def test_a_state_is_saved_by_torch_and_read_as_weights_only():
    assert run_ranks(through_a_file, 2) == [(True, 1)] * 2


def of_another_feedback(rank, world_size, specs):
    """Every tensor of these models is a compressed matrix, so that what any feedback keeps has sizes that fit."""
    handles = {}
    for spec in specs:
        torch.manual_seed(0)
        model = wrap(nn.Linear(32, 32, bias=False))
        handles[spec] = compress(model, spec, min_numel=64)
        for step in range(2):
            model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    states = {spec: copy.deepcopy(handle.state_dict()) for spec, handle in handles.items()}
    return {
        (old, new): (
            refusal(lambda old=old, new=new: handles[new].load_state_dict(states[old])),
            same(states[new]["feedback"], handles[new].state_dict()["feedback"]),
        )
        for old in specs
        for new in specs
        if old != new
    }


def test_what_another_feedback_kept_is_refused_also_where_its_sizes_fit():
    specs = ["dgc:density=0.05", "topk:density=0.05+ef", "topk:density=0.05+ef21", "powersgd:rank=2"]
    for answer in run_ranks(of_another_feedback, 2, specs):
        for (old, new), (error, kept) in answer.items():
            assert error is not None, (old, new)
            assert error[0] == "ValueError", (old, new, error)
            assert kept, (old, new)


def in_numpys_numbers(rank, world_size, kind):
    results = []
    for spec, options in (("qsgd:bits=4", {"nodes": kind(2)}), ("dgc:density=0.05,warmup_epochs=2", {})):
        model = wrap(mlp())
        handle = compress(model, spec, min_numel=64, seed=kind(3), **options)
        handle.set_epoch(kind(1))
        train(model, rank, range(2))
        file = io.BytesIO()
        torch.save(handle.state_dict(), file)
        file.seek(0)
        handle.load_state_dict(torch.load(file))
        results.append(flat(model))
    return results, refusal(lambda: handle.set_epoch(0.5))


def test_seeds_epochs_and_nodes_in_numpys_numbers_are_those_of_python_and_states_can_be_read():
    (own, error), (expected, _) = (run_ranks(in_numpys_numbers, 2, kind)[0] for kind in (np.int64, int))
    assert all(map(torch.equal, own, expected))
    assert error == ("TypeError", "epoch=0.5 is not a whole number")
