"""Fragments in turn, on their way while replicas train on: the paper's algorithm, bytes, ends and resumed runs."""

from __future__ import annotations

import copy
import math
import os
import signal
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import narrowband as nb
from narrowband.updates.fragments import Fragment, OuterStep, split
from tests.gradients.training import adamw, flat, heard, loss_of, mlp, refusal, train
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough
from tests.updates.test_rounds import Deriving
from tests.updates.training import begin, whole_and_resumed

# ---- how a model is divided ------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), min_size=1, max_size=20),
    st.integers(0, 500),
    st.sampled_from(["strided", "layers"]),
    st.data(),
)
def test_every_layer_is_in_one_fragment_and_blocks_stay_whole(drawn, together, how, drawing):
    layers = {f"blocks.{block}.w{at}.weight": numel for at, (block, numel) in enumerate(drawn)}
    count = drawing.draw(st.integers(1, len(layers)))
    found = split(layers, together, count, how)
    assert len(found) == count
    assert all(found)
    assert sorted(name for names in found for name in names) == sorted(layers)
    blocks = {name.split(".")[1] for name in layers}
    if len(blocks) >= count:
        sizes = {block: sum(n for name, n in layers.items() if name.split(".")[1] == block) for block in blocks}
        for names in found:
            assert all(set(names) >= {x for x in layers if x.split(".")[1] == name.split(".")[1]} for name in names)
        loads = [sum(layers[name] for name in names) for names in found]
        loads[0] += together
        if how == "strided":
            assert max(loads) <= sum(loads) / count + max(together, *sizes.values())
            return
        # Of all ways to cut the model between blocks, none has a smaller largest fragment.
        order = list(dict.fromkeys(name.split(".")[1] for name in layers))
        assert [b for names in found for b in dict.fromkeys(name.split(".")[1] for name in names)] == order
        loads_of = [
            [
                sum(sizes[b] for b in order[begin:end]) + together * (begin == 0)
                for begin, end in pairwise((0, *cuts, None))
            ]
            for cuts in combinations(range(1, len(order)), count - 1)
        ]
        assert max(loads) == min(map(max, loads_of))


def test_blocks_of_one_size_are_dealt_out_in_turn_and_parts_of_a_model_that_has_no_numbers_too():
    layers = {f"net.{at}.{name}": 10 for at in range(6) for name in ("a", "b")}
    first, second = split(layers, 0, 2)
    assert first == [f"net.{at}.{name}" for at in (0, 2, 4) for name in ("a", "b")]
    assert second == [f"net.{at}.{name}" for at in (1, 3, 5) for name in ("a", "b")]
    assert split({"embedding": 10, "head": 9, "mixer": 2}, 0, 2) == [["embedding"], ["head", "mixer"]]
    first, second = split(layers, 0, 2, "layers")
    assert (first, second) == (list(layers)[:6], list(layers)[6:])
    assert split({"embedding": 10, "head": 9, "mixer": 2}, 0, 2, "layers") == [["embedding"], ["head", "mixer"]]
    with pytest.raises(ValueError, match="which is 2; use fragments=2, or fewer"):
        split({"a": 1, "b": 1}, 0, 3)


# ---- the paper's algorithm 2 -----------------------------------------------------------------------------------------


def streamed(rank, world_size, steps, options):
    """Parameters before each step, what the replica's own step makes of them, and what they are afterwards."""
    model, optimizer, handle = begin("topk:density=0.1+ef", **options)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        lone = copy.deepcopy(model)
        alone = adamw(lone)
        alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p, q in zip(lone.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        alone.step()
        optimizer.step()
        seen.append((dict(lone.named_parameters()), copy.deepcopy(dict(model.named_parameters()))))
    return seen, [each.names for each in handle._fragments], handle.state_dict()["step"]


@pytest.mark.parametrize(
    ("fragments", "overlap", "alpha", "outer"),
    [(2, 2, 0.5, "nesterov"), (2, 0, 0.5, "nesterov"), *thorough((3, 1, 0.0, 1.5)), (1, 6, 0.25, 1.0)],
)
def test_fragments_follow_the_paper(fragments, overlap, alpha, outer):
    """Each step from what the library had before it, so that nothing adds up but residuals, momentum and anchors."""
    ranks, every, steps = 3, 6, 20
    options = {"every": every, "fragments": fragments, "overlap": overlap, "alpha": alpha}
    options |= {"split": "layers"} if overlap else {}
    options["outer"] = outer
    results = run_ranks(streamed, ranks, steps, options)
    names = results[0][1]
    begins = [(at + 1) * every // fragments for at in range(fragments)]
    model, codec = dict(mlp().named_parameters()), nb.codec("topk:density=0.1")
    anchors = {name: x.double() for name, x in model.items()}
    derived, sent, rounds = {}, {}, 0
    for step in range(steps):
        own = {name: torch.stack([seen[step][0][name] for seen, *_ in results]).double() for name in anchors}
        for at, begin_at in enumerate(begins):
            late = (step + 1 - begin_at - overlap) % every == 0 and step + 1 - overlap >= begin_at
            departs = (step + 1 - begin_at) % every == 0 and step + 1 >= begin_at
            # What arrives comes before what leaves: with the longest overlap these are the same fragment.
            for what in ["land", "depart"] if overlap else ["depart", "land"]:
                if what == "depart" and departs:
                    rounds += 1
                    sent |= {name: own[name] - anchors[name] for name in names[at]}
                if what == "land" and late:
                    for name in names[at]:
                        theta = anchors[name]
                        compressed = theta.dim() == 2 and theta.numel() >= 64
                        kept = codec.kept(theta.shape) if compressed else theta.numel()
                        state = derived.setdefault(name, Deriving(theta.shape, ranks, kept, outer))
                        anchors[name] = state.step(theta, sent[name].detach())
                        mixed = alpha if overlap else 0.0
                        own[name] = mixed * own[name] + (1 - mixed) * anchors[name]
        for rank, (seen, *_) in enumerate(results):
            for name, x in own.items():
                torch.testing.assert_close(seen[step][1][name].double(), x[rank].detach(), rtol=1e-5, atol=1e-6)
    assert [result[2] for result in results] == [rounds] * ranks
    assert rounds >= 3


# ---- what is equal, and what is sent ---------------------------------------------------------------------------------


def in_turn(rank, world_size, spec, overlap):
    """After each round, which fragments are equal on all replicas is for the test to see; and what each has sent."""
    model, optimizer, handle = begin(spec, every=4, fragments=2, overlap=overlap, outer="auto")
    whole, whole_optimizer, other = begin(spec, every=4, outer="auto")
    train(whole, rank, range(4), whole_optimizer)
    seen, sent = [], []
    for step in range(8):
        train(model, rank, [step], optimizer)
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        sent.append(handle.stats().total.sent_bytes)
    handle.average()
    seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return seen, sent, other.stats().last.sent_bytes, [x.names for x in handle._fragments], handle.length, handle.step


@pytest.mark.parametrize("spec", ["none", "topk:density=0.05+ef", *thorough("qsgd:bits=2+ef")])
def test_a_fragment_is_equal_after_its_round_and_sends_its_part(spec):
    (mine, sent, whole, names, length, rounds), (its, *_, its_length, _) = run_ranks(in_turn, 2, spec, 0)
    rounded = {2: 0, 4: 1, 6: 0, 8: 1}
    for step, (a, b) in enumerate(zip(mine, its, strict=True), start=1):
        equal = [all(torch.equal(a[name], b[name]) for name in part) for part in names]
        assert equal == ([True, True] if step == 9 else [rounded.get(step) == at for at in range(2)])
    assert rounds == 5
    assert 1.0 < length == its_length < 1.5
    own = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    assert [nbytes > 0 for nbytes in own] == [False, True] * 4
    # Together as much as the whole model, but for what each round says of itself, and neither as much as that.
    assert own[1] + own[3] == pytest.approx(whole, rel=0.05, abs=4400)
    assert all(nbytes < 0.8 * whole + 4400 for nbytes in own)


def test_on_its_way_a_fragment_is_sent_and_nothing_is_equal_until_all_wait():
    (mine, sent, *_, rounds), (its, *_) = run_ranks(in_turn, 2, "topk:density=0.05+ef", 2)
    equal = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(mine, its, strict=True)]
    assert equal == [False] * 8 + [True]
    assert rounds == 5
    assert sent[-1] > sent[3] > 0


class Seen(nn.Module):
    """Batch norm: its statistics travel with the first fragment."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def with_buffers(rank, world_size, overlap):
    model, optimizer, handle = begin("none", Seen(), every=2, fragments=2, overlap=overlap)
    train(model, rank, range(4), optimizer)
    handle.average()
    return [x.detach().clone() for x in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("overlap", [0, 1])
def test_buffers_are_averaged_with_the_first_fragment(overlap):
    mine, its = run_ranks(with_buffers, 2, overlap)
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def not_finite(rank, world_size, overlap):
    model, optimizer, handle = begin("topk:density=0.1+ef", every=4, fragments=2, overlap=overlap)
    train(model, rank, range(5), optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.view(-1)[0] += math.inf if rank else 0.0
    with heard() as said:
        train(model, rank, range(5, 6), optimizer)  # the first fragment's round, or its beginning
        optimizer.state.clear()
        train(model, rank, range(6, 13), optimizer)
    skipped = handle.skipped_updates
    handle.average()
    return flat(model), skipped, handle.skipped_updates, said


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_replica_that_is_not_finite_goes_back_in_all_of_its_fragments(overlap):
    """Those that are not in the round would make the others NaN again."""
    (mine, *none), (its, skipped, later, said) = run_ranks(not_finite, 2, overlap)
    assert torch.equal(mine, its)
    assert mine.isfinite().all()
    assert none == [0, 0, []]
    assert (skipped, later) == (1, 1)
    assert len(said) == 1


def gone(rank, world_size):
    """A replica that dies while the other trains on."""
    model, optimizer, handle = begin("topk:density=0.1+ef", every=4, overlap=3)
    train(model, rank, range(8), optimizer)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    before = flat(model)
    errors = [refusal(lambda step=step: train(model, rank, [step], optimizer)) for step in range(8, 16)]
    return [error and error[0] for error in errors], bool((flat(model) != before).any()), refusal(handle.remove)


def test_a_replica_that_goes_away_is_an_error_when_its_fragment_should_be_there():
    with pytest.raises(RankError) as caught:
        run_ranks(gone, 2, fresh=True, grace_s=180.0)
    errors, went_on, removed = caught.value.results[0]
    assert "RuntimeError" in errors
    assert went_on
    assert removed is None


def with_facts(rank, world_size, name, mine, other):
    options = {"every": 6, "fragments": 2, name: other if rank else mine}
    return refusal(lambda: begin("none", **options))


@pytest.mark.parametrize(
    ("name", "mine", "other"),
    [("fragments", 2, 3), ("split", "strided", "layers"), ("overlap", 0, 1), ("alpha", 0.5, 0.25)],
)
def test_replicas_with_other_fragments_are_told(name, mine, other):
    for kind, text in run_ranks(with_facts, 2, name, mine, other):
        assert kind == "DisagreementError"
        assert (f"fragments (2, {mine} on rank 0; 2, {other} on rank 1)" if name == "split" else name) in text


def changed(rank, world_size, overlap):
    """A replica whose parameters are not what it has been told."""
    model, optimizer, handle = begin("none", every=50, fragments=2, overlap=overlap)
    train(model, rank, range(60), optimizer)
    fragment = handle._fragments[1]
    fragment.groups[0].anchor[0] += rank
    if not overlap:
        with torch.no_grad():
            dict(model.named_parameters())[fragment.groups[0].names[0]].view(-1)[0] += rank
    return [refusal(lambda step=step: train(model, rank, [step], optimizer)) for step in range(60, 130)]


@pytest.mark.parametrize("overlap", [0, 5])
def test_replicas_that_differ_in_a_fragment_are_an_error(overlap):
    for errors in run_ranks(changed, 2, overlap):
        first = next(error for error in errors if error)
        assert first[0] == "DisagreementError"
        assert "parameters of the last round" in first[1]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def resumed(rank, world_size, stop, overlap, outer):
    options = {"every": 6, "fragments": 2, "overlap": overlap, "outer": outer}
    whole, again, saved, handle = whole_and_resumed(rank, options, stop, until=16)
    rounds = handle.state_dict()["step"]  # those under way have been sent then
    return torch.equal(whole, again), saved["updates"]["under way"] is not None, rounds


@pytest.mark.parametrize(
    ("stop", "overlap", "outer"),
    [
        (8, 0, "nesterov"),
        (9, 0, "nesterov"),
        (10, 2, "auto"),
        *thorough((6, 0, "auto"), (11, 2, "nesterov")),
        (12, 3, 1.0),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(stop, overlap, outer):
    assert run_ranks(resumed, 2, stop, overlap, outer) == [(True, bool(overlap) and stop % 3 < overlap, 5)] * 2


def saved_by(rank, world_size, overlap, average):
    model, optimizer, handle = begin("topk:density=0.1+ef", every=4, fragments=2, overlap=overlap)
    train(model, rank, range(7), optimizer)
    if average:
        handle.average()
    return model.state_dict(), handle.state_dict()


def loaded_by(rank, world_size, states, overlap):
    model, optimizer, handle = begin("topk:density=0.1+ef", every=4, fragments=2, overlap=overlap)
    model.load_state_dict(states[0][0])
    error = refusal(lambda: handle.load_state_dict([state for _, state in states]))
    train(model, rank, range(4), optimizer)
    handle.average()
    return error, flat(model)


@pytest.mark.parametrize("overlap", [0, 2])
def test_another_number_of_replicas_goes_on_from_where_all_were_equal(overlap):
    states = run_ranks(saved_by, 3, overlap, True)
    assert not states[0][1]["updates"]["anchor"]
    (error, mine), (_, its) = run_ranks(loaded_by, 2, states, overlap)
    assert error is None
    assert torch.equal(mine, its)
    for error, _ in run_ranks(loaded_by, 2, run_ranks(saved_by, 3, overlap, False), overlap):
        assert error[0] == "ValueError"
        assert "right after average()" in error[1]


def wrong_states(rank, world_size):
    model, optimizer, handle = begin("topk:density=0.1+ef", every=4, fragments=2, overlap=2)
    train(model, rank, range(7), optimizer)
    good = handle.state_dict()
    own = good["updates"]
    sent = own["under way"]
    others = [
        {"fragments": 1},
        {"split": "layers"},
        {"anchor": dict(list(own["anchor"].items())[1:])},
        {"anchor": {name: x for name, x in own["anchor"].items() if name in handle._fragments[0].names}},
        {"under way": sent | {"at": 7}},
        {"under way": sent | {"steps": 2}},
        {"under way": sent | {"means": dict.fromkeys(sent["means"], torch.zeros(3))}},
        {"under way": sent | {"at": "x"}},
        {"under way": sent | {"steps": None}},
        {"under way": sent | {"sample": torch.zeros(3)}},
        {"under way": {key: value for key, value in sent.items() if key != "means"}},
        {"under way": sent | {"means": {}}},
        {"under way": sent | {"means": {name: x * torch.nan for name, x in sent["means"].items()}}},
    ]
    errors = [refusal(lambda o=o: handle.load_state_dict(good | {"updates": own | o})) for o in others]
    _, _, waiting = begin("topk:density=0.1+ef", every=4, fragments=2)
    return errors, refusal(lambda: waiting.load_state_dict(good)), refusal(lambda: handle.load_state_dict(good))


def test_states_that_do_not_fit_change_nothing():
    words = [
        "fragments=1",
        "split=layers, and here it is strided",
        "do not fit the model",
        "lacks the parameters",
        "is damaged: its fragment under way",
        "is damaged: its fragment under way",
        "means do not",
        "is damaged: its fragment under way",
        "is damaged: its fragment under way",
        "the sample of its fragment",
        "not one of compress_updates",
        "lacks the means",
        "means hold inf or NaN",
    ]
    for errors, waiting, good in run_ranks(wrong_states, 2):
        for (kind, text), word in zip(errors, words, strict=True):
            assert kind == "ValueError"
            assert word in text
        assert "overlap=0" in waiting[1]
        assert good is None


# ---- anchors elsewhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [True, False])
def test_copied_anchors_come_to_the_same(waiting):
    """Where the model is on a GPU, anchors may lie in the memory of the CPU; here both are the same."""
    results = []
    for offload in (False, True):
        torch.manual_seed(0)
        own = {"w": torch.randn(6, 4), "z": torch.randn(5, dtype=torch.complex64), "b": torch.randn(3)}
        fragment = Fragment(own, ["b"], length=1.5, offload=offload)
        fragment.keep(own, parameters=True)
        fragment.keep(own, parameters=False)
        before = {name: x.clone() for name, x in own.items()}
        for x in own.values():
            x.add_(torch.randn_like(x))
        after = {name: x.clone() for name, x in own.items()}
        assert fragment.take(own) if waiting else fragment.take_a_copy(own)
        assert (fragment.updates[0].data_ptr() == fragment.groups[0].anchor.data_ptr()) == (waiting and not offload)
        for update in fragment.updates:
            update.mul_(0.5)  # among others
        if waiting:
            fragment.go_along(own, OuterStep(None, {}))
            fragment.end()
        else:
            fragment.mix(own, OuterStep(None, {}), along=True, alpha=0.25)
            fragment.take(own)  # anchors are where they went
        for name, x in own.items():
            moved = before[name] + (0.5 if name == "b" else 0.75) * (after[name] - before[name])
            torch.testing.assert_close(x, moved)
        results.append(own)
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name])


def test_where_a_tensor_keeps_nothing_of_its_own_it_keeps_no_nan():
    own = {"w": torch.ones(4)}
    fragment = Fragment(own, [], length=1.0, offload=False)
    fragment.keep(own, parameters=True)
    assert fragment.take_a_copy(own)
    own["w"][1] = torch.nan  # while the round is under way
    fragment.mix(own, OuterStep(None, {}), along=True, alpha=0.0)
    assert torch.equal(own["w"], torch.ones(4))


def test_an_outer_optimizer_keeps_no_copy_of_anchors_that_lie_elsewhere():
    own = {"w": torch.randn(6, 4), "z": torch.randn(5, dtype=torch.complex64)}
    parameters = {name: nn.Parameter(x.detach()) for name, x in own.items()}
    outer = OuterStep(torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9), parameters)
    fragment = Fragment(own, [], length=1.0, offload=True)
    fragment.keep(own, parameters=True)
    for take in (fragment.take_a_copy, fragment.take):
        assert take(own)
        if take == fragment.take:
            fragment.go_along(own, outer)
        else:
            fragment.mix(own, outer, along=True, alpha=0.5)
        assert all(parameters[name].data_ptr() == x.data_ptr() for name, x in own.items())
        assert all(p.grad is None for p in parameters.values())
