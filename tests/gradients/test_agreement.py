"""Ranks that are told different things all hear of it, by name, before anything is exchanged."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import narrowband as nb
from narrowband.adapt import LayerPlan, Plan
from narrowband.averaging import agreement
from narrowband.averaging.agreement import Agreement, _differences
from narrowband.collectives import Peers
from tests.gradients.training import TINY, compress, flat, loss_of, mlp, refusal, residuals, same, sgd, train, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

CALLS = {
    "pause": (lambda handle: handle.pause(), "compression ({spec} on ranks 0, 2; paused on rank 1)"),
    "set_epoch": (lambda handle: handle.set_epoch(3), "epoch (None on ranks 0, 2; 3 on rank 1)"),
    "set_layers": (
        lambda handle: handle.set_layers({"0.weight": "topk:density=0.5"}),
        "call (backward on ranks 0, 2; set_layers on rank 1)",
    ),
    "remove": (lambda handle: handle.remove(), "call (backward on ranks 0, 2; remove on rank 1)"),
    "load_state_dict": (
        lambda handle: handle.load_state_dict(handle.state_dict()),
        "call (backward on ranks 0, 2; load_state_dict on rank 1)",
    ),
}


def on_one_rank(rank, world_size, call, spec):
    model = wrap(mlp(), cap=TINY)
    handle = compress(model, spec, min_numel=64)
    train(model, rank, range(2))
    before, parameters = residuals(handle), flat(model)
    error = refusal(lambda: CALLS[call][0](handle)) if rank == 1 else None
    if error is None:
        error = refusal(lambda: train(model, rank, range(2, 3)))
    return error, same(residuals(handle), before), torch.equal(flat(model), parameters)


@pytest.mark.parametrize(
    ("call", "spec"),
    [
        *((call, "topk:density=0.05+ef") for call in CALLS),
        ("pause", "randomk:density=0.1+ef"),
        ("set_epoch", "dgc:density=0.05"),
        *thorough(*((call, "randomk:density=0.1+ef") for call in CALLS if call != "pause")),
        *thorough(*((call, "dgc:density=0.05") for call in CALLS if call != "set_epoch")),
    ],
)
def test_what_is_called_on_one_rank_only_raises_on_all_by_name(call, spec):
    for error, residuals_as_before, parameters_as_before in run_ranks(on_one_rank, 3, call, spec):
        assert error is not None
        assert error[0] == "DisagreementError"
        words = CALLS[call][1].format(spec="randomk:density=0.1" if "randomk" in spec else "topk:density=0.05")
        assert words in error[1], error[1]
        assert "on all ranks" in error[1]
        assert residuals_as_before
        assert parameters_as_before


def compared_facts(rank, world_size):
    """By call, the names of the facts that a step compares and that the call before it has changed."""
    compared, job, changed = [], Agreement.job, {}

    def noted(self, facts, advice):
        compared.append(facts)
        return job(self, facts, advice)

    with mock.patch.object(Agreement, "job", noted):
        for call in ("pause", "set_epoch", "set_layers"):
            model = wrap(mlp())
            handle = compress(model, "topk:density=0.05+ef", min_numel=64)
            train(model, rank, range(1))
            before = compared[-1]
            CALLS[call][0](handle)
            train(model, rank, range(1, 2))
            changed[call] = {name for name, fact in compared[-1].items() if before[name] != fact}
    return changed


def test_a_step_compares_what_calls_between_steps_change():
    """One rank alone, which cannot hang if a fact is not compared."""
    assert run_ranks(compared_facts, 1) == [
        {"pause": {"step", "compression"}, "set_epoch": {"step", "epoch"}, "set_layers": {"step", "spec of layer"}}
    ]


def mistaken_on_one_rank(rank, world_size):
    """What rank 1 gives that the others do not, and what every rank hears; and that training goes on after that."""
    layers = {"0.weight": "topk:density=0.5"}
    plan = Plan((LayerPlan("other", (64, 64), "qsgd:bits=2", 1.0, None),), "by hand", 3)
    heard = {}
    model = wrap(mlp())
    one = rank == 1
    heard["spec"] = refusal(lambda: compress(model, "zip" if one else "sign+ef", min_numel=64))
    heard["number"] = refusal(lambda: compress(model, "sign+ef", min_numel=-1 if one else 64))
    heard["module"] = refusal(lambda: compress(7 if one else model, "sign+ef", min_numel=64))
    heard["plan on two levels"] = refusal(lambda: compress(model, plan if one else "sign+ef", min_numel=64, nodes=3))
    heard["nodes"] = refusal(lambda: compress(model, "sign+ef", min_numel=64, nodes=3 if one else "auto"))
    heard["averager"] = refusal(lambda: nb.Averager(mlp(), "zip" if one else "sign+ef"))
    net = mlp()
    heard["updates"] = refusal(lambda: nb.compress_updates(net, sgd(net), "sign+ef", every=0 if one else 2))
    for kind, wrong in (("mesh", init_device_mesh("cpu", (world_size,))), ("number", 3)):
        group = wrong if one else None
        heard[f"a {kind} as group"] = refusal(lambda g=group: compress(net, "sign+ef", min_numel=64, process_group=g))
        heard[f"a {kind} as averager's"] = refusal(lambda g=group: nb.Averager(net, "sign+ef", process_group=g))
        heard[f"a {kind} for updates"] = refusal(
            lambda g=group: nb.compress_updates(net, sgd(net), "sign+ef", process_group=g)
        )
        heard[f"a {kind} for updates of a model in DDP"] = refusal(
            lambda g=group: nb.compress_updates(model, sgd(model), "sign+ef", process_group=g)
        )
        heard[f"a {kind} for coded work"] = refusal(lambda g=group: nb.CodedDataParallel(net, process_group=g))
        heard[f"a {kind} for a choice"] = refusal(
            lambda g=group: nb.choose_redundancy(net, lambda: None, batch_size=8, process_group=g)
        )
    heard["coded work"] = refusal(lambda: nb.CodedDataParallel(net, redundancy=0 if one else 2))
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    heard["name of a layer"] = refusal(lambda: handle.set_layers({"1.bias": "sign"} if one else layers))
    heard["no mapping"] = refusal(lambda: handle.set_layers(["0.weight"] if one else layers))
    heard["spec of a layer"] = refusal(lambda: handle.set_layers({"0.weight": "topk:density=0.4"} if one else layers))
    unchanged = handle.layers.override_texts() == {}
    handle.set_layers(layers)
    train(model, rank, range(2))
    return heard, unchanged, flat(model)


def test_a_mistake_on_one_rank_is_raised_on_all_and_nobody_waits_for_it():
    answers = run_ranks(mistaken_on_one_rank, 3)
    for rank, (heard, unchanged, parameters) in enumerate(answers):
        for what, (kind, words) in {
            "spec": ("ValueError", "unknown codec 'zip'"),
            "number": ("ValueError", "min_numel=-1"),
            "module": ("TypeError", "not int"),
            "plan on two levels": ("ValueError", "other"),
            "nodes": ("DisagreementError", "nodes (auto on ranks 0, 2; 3 on rank 1)"),
            "averager": ("ValueError", "unknown codec 'zip'"),
            "updates": ("ValueError", "every=0 must be at least 1"),
            **{what: ("TypeError", "process_group is a DeviceMesh") for what in heard if what.startswith("a mesh")},
            **{what: ("TypeError", "process_group is 3, of type int") for what in heard if what.startswith("a number")},
            "coded work": ("ValueError", "redundancy=0"),
            "name of a layer": ("ValueError", "1.bias: this handle compresses no parameters of these names"),
            "no mapping": ("TypeError", "set_layers takes a dictionary"),
            "spec of a layer": ("DisagreementError", "density=0.5+ef on ranks 0, 2; topk:density=0.4+ef on rank 1"),
        }.items():
            assert heard[what] is not None, what
            assert heard[what][0] == (kind if rank == 1 else "DisagreementError"), (what, heard[what])
            assert words in heard[what][1], (what, heard[what])
        assert unchanged
        assert torch.equal(parameters, answers[0][2])


def refused_and_left(rank, world_size):
    """Whether a model that was refused is freed when nothing refers to it, without a garbage collection."""
    plan = Plan((LayerPlan("other", (64, 64), "qsgd:bits=2", 1.0, None),), "by hand", 2)
    gc.collect()
    gc.disable()
    try:
        model = wrap(mlp())
        refusals = [refusal(partial(compress, model, spec)) for spec in ("zip" if rank else "sign+ef", plan)]
        seen = weakref.ref(model)
        del model
        return [kind for kind, _ in refusals], seen() is None
    finally:
        gc.enable()


def test_errors_of_a_set_up_keep_no_model_alive():
    """The hooks of an old DistributedDataParallel would disturb a new one."""
    first, second = run_ranks(refused_and_left, 2)
    assert first == (["DisagreementError", "ValueError"], True)
    assert second == (["ValueError", "ValueError"], True)


def resume_on_one_rank(rank, world_size):
    """Without feedback, and where all are paused but one."""
    model = wrap(mlp())
    handle = compress(model, "qsgd:bits=4", min_numel=64)
    handle.pause()
    train(model, rank, range(1))
    if rank == 0:
        handle.resume()
    return refusal(lambda: train(model, rank, range(1, 2)))


def test_resume_on_one_rank_is_named_too():
    for error in run_ranks(resume_on_one_rank, 2):
        assert "compression (qsgd:bits=4 on rank 0; paused on rank 1)" in error[1]


def scaled_differently(rank, world_size):
    model = wrap(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank))
    compress(model, "topk:density=0.05+ef", min_numel=64, grad_scaler=scaler)
    return refusal(lambda: scaler.scale(loss_of(model, 0, rank)).backward())


def test_gradients_of_different_loss_scales_are_never_averaged():
    for error in run_ranks(scaled_differently, 2):
        assert "loss scale (16.0 on rank 0; 32.0 on rank 1)" in error[1]


# ---- states of different moments -------------------------------------------------------------------------------------


POLICY = "L-GreCo"
SPECS = ["randomk:density=0.1+ef", "dgc:density=0.05,warmup_steps=6", "topk:density=0.05+ef", POLICY]


def start(spec, **options):
    chosen = nb.LGreCo("topk:density=0.05+ef", every=2, warmup_steps=1) if spec == POLICY else spec
    model = wrap(mlp())
    return model, compress(model, chosen, min_numel=64, **options)


def load_what_belongs_to_other_moments(rank, world_size, spec):
    model, handle = start(spec)
    states = []
    for step in range(4):
        train(model, rank, range(step, step + 1))
        states.append(copy.deepcopy(handle.state_dict()))
    _, fresh = start(spec)
    before = copy.deepcopy(fresh.state_dict())
    mixed = refusal(lambda: fresh.load_state_dict(states[1 if rank else 3]))
    unchanged = repr(fresh.state_dict()) == repr(before)
    fresh.load_state_dict(states[3])
    return mixed, unchanged, fresh.step


@pytest.mark.parametrize("spec", SPECS)
def test_states_of_different_steps_on_different_ranks_are_refused_on_all(spec):
    for error, unchanged, step in run_ranks(load_what_belongs_to_other_moments, 3, spec):
        assert error[0] == "DisagreementError"
        assert "step (4 on rank 0; 2 on ranks 1, 2)" in error[1]
        assert "No state was loaded on any rank" in error[1]
        assert unchanged
        assert step == 4


def one_rank_has_a_broken_state(rank, world_size):
    model, handle = start("topk:density=0.05+ef")
    train(model, rank, range(2))
    state = copy.deepcopy(handle.state_dict())
    if rank == 1:
        del state["seed"]
    train(model, rank, range(2, 3))
    before = residuals(handle)
    error = refusal(lambda: handle.load_state_dict(state))
    unchanged = same(residuals(handle), before) and handle.step == 3
    train(model, rank, range(3, 4))
    return error, unchanged, flat(model)


def test_a_state_that_one_rank_cannot_load_is_loaded_by_none():
    answers = run_ranks(one_rank_has_a_broken_state, 3)
    for rank, (error, unchanged, parameters) in enumerate(answers):
        assert "the state lacks 'seed'" in error[1]
        assert error[0] == ("ValueError" if rank == 1 else "DisagreementError")
        assert unchanged
        assert torch.equal(parameters, answers[0][2])


def test_differences_name_what_few_have_and_count_the_rest():
    facts = {"call": "backward", "layers": {f"layer {at}": "a" for at in range(9)}, "seed": "0"}
    other = {"call": "backward", "layers": {f"layer {at}": "b" for at in range(9)}, "seed": "0"}
    found = _differences({0: facts, 1: other, 2: facts})
    assert found[0] == "layers of 'layer 0' (a on ranks 0, 2; b on rank 1)"
    assert len(found) == 5
    assert found[-1] == "and 5 more differences"
    assert _differences({0: facts, 1: facts}) == []


def still_held(rank, world_size):
    """How often a thread of gloo's held what was sent in a comparison after that had ended."""
    sent, all_gather, times = [], agreement.all_gather, 0

    def noted(out, x, peers):
        sent[:] = weakref.ref(out), weakref.ref(x)
        return all_gather(out, x, peers)

    comparing = Agreement(Peers.of(dist.group.WORLD), torch.device("cpu"))
    agreement.all_gather = noted
    try:
        for at in range(150):
            comparing.now({"call": str(at)}, "")
            times += any(x() is not None for x in sent)
    finally:
        agreement.all_gather = all_gather
    return times


def test_nothing_of_a_comparison_is_left_to_threads_when_the_program_may_end():
    """A thread that lets go of a tensor while the interpreter ends would abort the process: after ``remove()``."""
    assert run_ranks(still_held, 2) == [0, 0]
