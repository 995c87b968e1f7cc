"""States of rounds: a run goes on to the bit, and what does not fit changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.gradients.training import flat, heard, loss_of, refusal, sgd, train
from tests.ranks import run_ranks
from tests.thorough import thorough
from tests.updates.test_fragments import Seen
from tests.updates.training import begin, nesterov, whole_and_resumed


def resumed(rank, world_size, stop, outer):
    options = {"every": 3, "outer": nesterov if outer == "nesterov" else outer}
    whole, again, saved, handle = whole_and_resumed(rank, options, stop, until=8)
    return torch.equal(whole, again), bool(saved["updates"]["anchor"]), handle.step


@pytest.mark.parametrize("outer", [*thorough(1.0), "nesterov", "auto"])
@pytest.mark.parametrize("stop", [4, 6])
def test_a_run_that_was_stopped_goes_on_to_the_bit(stop, outer):
    assert run_ranks(resumed, 2, stop, outer) == [(True, stop % 3 != 0, 2)] * 2


def resumed_by_dcp(rank, world_size, folder, spec, with_handle):
    """SGD keeps no state, so DCP steps it to make one, before it saves, and before and after it loads the model."""
    model, optimizer, handle = begin(spec, optimizer=sgd, every=3)
    train(model, rank, range(6), optimizer)
    optimizer.zero_grad()
    own, steps = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": steps, "handle": handle.stateful}, checkpoint_id=folder)
    train(model, rank, range(6, 12), optimizer)
    again, optimizer, handle = begin(spec, optimizer=sgd, every=3)
    own, steps = get_state_dict(again, optimizer)
    saved = {"model": own, "optimizer": steps, **({"handle": handle.stateful} if with_handle else {})}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=own, optim_state_dict=steps)
    left = handle.steps
    train(again, rank, range(6, 12), optimizer)
    return torch.equal(flat(model), flat(again)), left


@pytest.mark.parametrize(("spec", "with_handle"), [("topk:density=0.1+ef", True), ("none", False)])
def test_the_steps_by_which_dcp_makes_states_are_no_steps_of_a_round(spec, with_handle, tmp_path):
    """They made a round of the parameters before loading and after."""
    assert run_ranks(resumed_by_dcp, 2, tmp_path, spec, with_handle) == [(True, 0)] * 2


def saved_by_dcp_between_rounds(rank, world_size, folder, options):
    """What is logged when DCP saves after five steps, and right after a round."""
    model, optimizer, handle = begin("topk:density=0.1+ef", every=3, **options)
    train(model, rank, range(5), optimizer)
    found = []
    for when in ("between rounds", "after one"):
        with heard() as said:
            own, steps = get_state_dict(model, optimizer)
            dcp.save({"model": own, "optimizer": steps, "handle": handle.stateful}, checkpoint_id=f"{folder}/{when}")
        found.append([text for text in said if "stateful" in text])
        handle.average()
    return found


@pytest.mark.parametrize("options", [{"residuals": "in-place"}, {"fragments": 2}])
def test_what_dcp_saves_between_rounds_is_said_to_lose_the_steps_of_other_replicas(options, tmp_path):
    (((said,), after), *others) = run_ranks(saved_by_dcp_between_rounds, 2, str(tmp_path), options)
    assert "a run that resumes from it loses the steps of the others: call average() on all ranks first" in said
    assert after == []
    assert others == [[[], []]]


def after_a_forward_pass(rank, world_size, options):
    """Batch norm's statistics in the end, of a run that goes on, and of one that was saved after a round and a forward
    pass, before the next step.
    """

    def run(*, resumes):
        model, optimizer, handle = begin("none", Seen(), every=4, **options)
        train(model, rank, range(6), optimizer)
        handle.average()
        loss_of(model, 6, rank)
        if resumes:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
            handle.remove()
            model, optimizer, handle = begin("none", Seen(), every=4, **options)
            for each, state in zip((model, optimizer, handle), saved, strict=True):
                each.load_state_dict(state)
        train(model, rank, range(7, 9), optimizer)
        handle.average()
        return [x.clone() for x in model.state_dict().values()]

    return run(resumes=False), run(resumes=True)


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "overlap": 1}])
def test_buffers_that_changed_between_a_round_and_a_checkpoint_end_equal(options):
    results = run_ranks(after_a_forward_pass, 2, options)
    for whole, again in results:
        assert all(map(torch.equal, whole, again))
        assert all(map(torch.equal, again, results[0][1]))


def saved_by(rank, world_size, steps):
    model, optimizer, handle = begin("topk:density=0.1+ef", every=2)
    train(model, rank, range(steps), optimizer)
    return model.state_dict(), handle.state_dict()


def loaded_by(rank, world_size, states):
    model, _, handle = begin("topk:density=0.1+ef", every=2)
    model.load_state_dict(states[0][0])
    error = refusal(lambda: handle.load_state_dict([state for _, state in states]))
    kept = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    return error, kept, handle.step


@pytest.mark.parametrize("ranks", [2, 4])
def test_another_number_of_replicas_keeps_the_sum_of_the_residuals(ranks):
    states = run_ranks(saved_by, 3, 4)
    answers = run_ranks(loaded_by, ranks, states)
    assert [(error, step) for error, _, step in answers] == [(None, 2)] * ranks
    for name in states[0][1]["feedback"]:
        before = sum(state["feedback"][name].double() for _, state in states) / 3
        after = sum(kept[name].double() for _, kept, _ in answers) / ranks
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


def test_between_rounds_another_number_of_replicas_is_refused():
    states = run_ranks(saved_by, 3, 3)
    for error, _, step in run_ranks(loaded_by, 2, states):
        assert error[0] == "ValueError"
        assert "right after average()" in error[1]
        assert step == 0


def damages(anchor):
    """What may be wrong with a state's part of updates."""
    name, x = next(iter(anchor.items()))
    nothing, endless = x.clone(), x.clone()
    nothing.view(-1)[-1], endless.view(-1)[0] = torch.nan, torch.inf
    return [
        {"anchor": 7},
        {"under way": {"at": 0}},
        {"anchor": anchor | {name: 7}},
        {"anchor": anchor | {name: x.double()}},
        {"anchor": anchor | {"9.weight": x}},
        {"anchor": anchor | {name: nothing}},
        {"anchor": anchor | {name: endless}},
        {"steps": True},
        {"steps": "x"},
        {"skipped": None},
        {"under way": {"at": 0, "steps": 0, "sample": None, "means": {}}},
    ]


def wrong_states(rank, world_size):
    model, optimizer, handle = begin("topk:density=0.1+ef", every=2)
    train(model, rank, range(3), optimizer)
    good = handle.state_dict()
    changed = [
        {key: value for key, value in good.items() if key != "updates"},
        good | {"updates": good["updates"] | {"every": 3}},
        good | {"updates": good["updates"] | {"anchor": {}}},
        good | {"updates": good["updates"] | {"steps": 7}},
        good | {"updates": good["updates"] | {"outer": {}}},
        good | {"updates": good["updates"] | {"length": [{"own": 1.0}]}},
        good | {"updates": good["updates"] | {"anchor": dict.fromkeys(good["updates"]["anchor"], torch.zeros(3))}},
        *(good | {"updates": good["updates"] | changes} for changes in damages(good["updates"]["anchor"])),
    ]
    errors = [refusal(lambda state=state: handle.load_state_dict(state)) for state in changed]
    # On one replica alone it is an error on all, and nothing has changed.
    errors.append(refusal(lambda: handle.load_state_dict(changed[0] if rank else good)))
    train(model, rank, range(3, 4), optimizer)
    return errors, flat(model), handle.step


def test_states_that_do_not_fit_change_nothing():
    (errors, mine, rounds), (others, its, _) = run_ranks(wrong_states, 2)
    words = [
        "not one of compress_updates",
        "every=3",
        "lacks the parameters",
        "7 for 'steps'",
        "is an optimizer",
        "it is 'auto'",
    ]
    words += ["do not fit the model"]
    words += [
        *["not one of compress_updates"] * 2,
        *["do not fit the model"] * 3,
        *["hold inf or NaN"] * 2,
        "True for 'steps'",
    ]
    words += ["'x' for 'steps'", "None for 'skipped'", "saved during the exchange of a fragment, and here overlap=0"]
    for found in (errors, others):
        for (kind, text), word in zip(found[:-1], words, strict=True):
            assert kind == "ValueError"
            assert word in text
        assert found[-1][0] in ("ValueError", "DisagreementError")
        assert "not one of compress_updates" in found[-1][1]
    assert rounds == 2
    assert torch.equal(mine, its)


def at_two_moments(rank, world_size, options, moments):
    """States after so many steps each; and what is said where each rank loads that of a moment of its own."""
    model, optimizer, handle = begin("qsgd:bits=4+ef", **options)
    saved, done = [], 0
    for moment in moments:
        train(model, rank, range(done, moment), optimizer)
        saved.append(copy.deepcopy(handle.state_dict()))
        done = moment
    before = handle.steps
    error = refusal(lambda: handle.load_state_dict(saved[rank]))
    assert handle.steps == before
    handle.load_state_dict(saved[1])
    handle.average()
    return error, saved


def from_a_list(rank, world_size, options, states):
    _, _, handle = begin("qsgd:bits=4+ef", **options)
    return refusal(lambda: handle.load_state_dict(states))


@pytest.mark.parametrize(
    ("options", "moments", "said"),
    [
        ({"every": 6}, (7, 9), "steps since the last round (1 on {0} 0; 3 on {0} 1)"),
        ({"every": 6}, (6, 9), "steps since the last round (0 on {0} 0; 3 on {0} 1)"),
        ({"every": 8, "fragments": 2, "overlap": 3}, (5, 6), "way (0, for 1 step on {0} 0; 0, for 2 steps on {0} 1)"),
    ],
)
def test_states_of_different_steps_since_one_round_are_refused_on_all(options, moments, said):
    answers = run_ranks(at_two_moments, 2, options, moments)
    assert len({saved["step"] for _, states in answers for saved in states}) == 1
    for kind, text in (error for error, _ in answers):
        assert kind == "DisagreementError"
        assert said.format("rank") in text
    torn = [states[rank] for rank, (_, states) in enumerate(answers)]
    for kind, text in run_ranks(from_a_list, 2, options, torn):
        assert kind == "ValueError"
        assert "the states differ in" in text
        if "fragments" not in options:
            assert said.format("rank(s)") in text


class ManyMomenta(torch.optim.SGD):
    """An optimizer of another package, which keeps something else under a name of torch.optim's."""

    def step(self, closure=None):
        loss = super().step(closure)
        for kept in self.state.values():
            kept["momentum_buffer"], kept["sum"] = None, {0.9: torch.zeros(3)}
        return loss


def own_state_of_another_optimizer(rank, world_size):
    model, optimizer, handle = begin("none", outer=lambda params: ManyMomenta(params, lr=0.7, momentum=0.9), every=2)
    train(model, rank, range(4), optimizer)
    state = copy.deepcopy(handle.state_dict())
    handle.load_state_dict(state)
    return [list(kept) for kept in state["updates"]["outer"]["state"].values()]


def test_an_outer_optimizer_of_another_package_may_keep_anything():
    for kept in run_ranks(own_state_of_another_optimizer, 2):
        assert kept
        assert all("sum" in names for names in kept)


def other_outer_states(rank, world_size):
    """Refusals of states of another outer optimizer, on all ranks and then on one; and what all train on to."""
    model, optimizer, handle = begin("none", outer=nesterov, every=2)
    train(model, rank, range(4), optimizer)
    good = copy.deepcopy(handle.state_dict())

    def changed(**parts):
        return good | {"updates": good["updates"] | {"outer": good["updates"]["outer"] | parts}}

    own = good["updates"]["outer"]
    kept, (group,) = own["state"], own["param_groups"]
    first, second = kept[0]["momentum_buffer"], kept[1]["momentum_buffer"]
    states = [
        good | {"updates": good["updates"] | {"outer": {}}},
        changed(param_groups=[{"params": [0]}]),
        changed(param_groups=[group | {"params": [[number] for number in group["params"]]}]),
        changed(param_groups=[group | {"params": [str(number) for number in group["params"]]}]),
        changed(state={}, param_groups=7),
        changed(state=7),
        changed(state=kept | {0: {"momentum_buffer": first.t()}}),
        changed(state=kept | {0: kept[1], 1: kept[0]}),
        changed(state=kept | {0: {"momentum_buffer": first.tolist()}}),
        changed(state=kept | {1: {"momentum_buffer": second * torch.inf}}),
    ]
    errors = [refusal(lambda state=state: handle.load_state_dict(state)) for state in states]
    of_one = [refusal(lambda state=state: handle.load_state_dict(state if rank else good)) for state in states]
    train(model, rank, range(4, 6), optimizer)
    after = flat(model)
    handle.remove()
    again, optimizer, handle = begin("none", outer=nesterov, every=2)
    train(again, rank, range(6), optimizer)
    return errors, of_one, torch.equal(after, flat(again))


def test_a_state_of_another_outer_optimizer_is_refused_on_all_before_anything_is_loaded():
    words = ["with other parameter groups"] * 5 + ["must hold a dictionary for each parameter"]
    words += ["its momentum_buffer of parameter 0 has shape (24, 40), and the parameter here has shape (40, 24)"]
    words += ["its momentum_buffer of parameter 0 has shape (40,), and the parameter here has shape (40, 24)"]
    words += ["its momentum_buffer of parameter 0 has type list", "holds inf or NaN in its momentum_buffer"]
    for errors, of_one, as_without in run_ranks(other_outer_states, 2):
        for found in (errors, of_one):
            for (kind, text), word in zip(found, words, strict=True):
                assert kind in ("ValueError", "DisagreementError")
                assert word in text
        assert as_without
