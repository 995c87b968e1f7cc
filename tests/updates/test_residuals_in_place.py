"""Residuals that wait in the replica's own parameters: a round re-derived in float64, and what must not be lost."""

from __future__ import annotations

import copy

import pytest
import torch

import narrowband as nb
from narrowband.averaging.flat import form_of
from narrowband.updates.fragments import Fragment
from tests.gradients.training import flat, loss_of, mlp, refusal, sgd, train
from tests.ranks import run_ranks

SPEC, LR = "topk:density=0.1+ef", 0.2


def begin(spec=SPEC, every=3, model=None, **options):
    model = model or mlp()
    optimizer = sgd(model, lr=LR)
    options = {"residuals": "in-place", "min_numel": 64, **options}
    return model, optimizer, nb.compress_updates(model, optimizer, spec, every=every, **options)


def named(model):
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def told(rank, world_size, options):
    """Parameters after each step, and the gradients that each was taken with."""
    model, optimizer, handle = begin(**options)
    seen = [named(model)]
    gradients = []
    for step in range(9):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        gradients.append({name: p.grad.double().clone() for name, p in model.named_parameters()})
        optimizer.step()
        seen.append(named(model))
    residuals = {name: handle.layers.state.residual(name) for name in seen[0]}
    return seen, gradients, residuals


@pytest.mark.parametrize(
    ("options", "decay", "length"),
    [
        ({}, 1.0, 1.0),
        ({"outer": 1.5}, 1.0, 1.5),
        ({"spec": "topk:density=0.1+ef:decay=0.5"}, 0.5, 1.0),
        ({"spec": "topk:density=0.1,mean=senders+ef"}, 1.0, 1.0),
    ],
)
def test_a_replica_trains_on_from_what_it_has_not_sent(options, decay, length):
    """Plain SGD, so that every step can be said: θ ← c + e at the first step of a round, then θ ← θ − lr·g."""
    ranks, every = 3, 3
    results = run_ranks(told, ranks, options)
    codec = nb.codec("topk:density=0.1")
    for name, first in results[0][0][0].items():
        if first.dim() < 2:
            continue  # these travel as they are, and nothing waits
        common = first
        waiting = [torch.zeros_like(first) for _ in range(ranks)]
        for at in range(3):
            updates = []
            for rank, (seen, gradients, _) in enumerate(results):
                own = common + decay * waiting[rank]
                for step in range(every * at, every * (at + 1)):
                    own = own - LR * gradients[step][name]
                    if step < every * (at + 1) - 1:
                        torch.testing.assert_close(seen[step + 1][name], own, rtol=1e-5, atol=1e-6)
                updates.append(own - common)
            sent = []
            for update in updates:
                kept = update.flatten().abs().topk(codec.kept(update.shape)).indices
                part = torch.zeros(update.numel(), dtype=torch.float64)
                part[kept] = update.flatten()[kept]
                sent.append(part.view_as(update))
            waiting = [update - part for update, part in zip(updates, sent, strict=True)]
            by = sum(part != 0 for part in sent).clamp(min=1) if "senders" in options.get("spec", "") else ranks
            common = common + length * sum(sent) / by
            for seen, *_ in results:  # right after a round all have this
                torch.testing.assert_close(seen[every * (at + 1)][name], common, rtol=1e-5, atol=2e-6)
                assert torch.equal(seen[every * (at + 1)][name], results[0][0][every * (at + 1)][name])
        for (*_, residuals), expected in zip(results, waiting, strict=True):
            torch.testing.assert_close(residuals[name].double().view_as(expected), expected, rtol=1e-4, atol=2e-6)


def pushed(rank, world_size, spec):
    """Gradients that do not depend on the parameters: where all are, and what waits here, with what owners lost."""
    model, optimizer, handle = begin(spec, collective="scatter_reduce")
    begun = named(model)
    gradients = torch.Generator().manual_seed(rank)
    total = {name: torch.zeros_like(p) for name, p in begun.items()}
    for _ in range(12):
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=gradients)
            total[name] += p.grad
        optimizer.step()
    state = handle.layers.state
    waiting = {}
    for name, p in begun.items():
        state.reclaim_owner_error(name)
        residual = state.residual(name)
        waiting[name] = torch.zeros_like(p) if residual is None else residual.double().view_as(p).clone()
    return begun, named(model), total, waiting


@pytest.mark.parametrize("spec", ["uniform:bits=2+ef", "sign+ef"])
def test_nothing_is_lost_where_owners_encode_the_mean_once_more(spec):
    """θ + mean residual = θ₀ − lr · Σ mean g, in float64: what waits in place is sent once, and never dropped."""
    results = run_ranks(pushed, 3, spec)
    layers = 0
    for name, begun in results[0][0].items():
        assert all(torch.equal(end[name], results[0][1][name]) for _, end, _, _ in results)
        waiting = sum(waiting[name] for *_, waiting in results) / 3
        expected = begun - LR * sum(total[name] for _, _, total, _ in results) / 3
        torch.testing.assert_close(results[0][1][name] + waiting, expected, rtol=1e-5, atol=1e-4)
        if begun.dim() > 1:
            layers += 1
            assert float(waiting.norm()) > 0.01 * float((expected - begun).norm()), "something does wait"
    assert layers


def with_momentum(rank, world_size):
    """DiLoCo's outer step behind 2 bits: parameters after every step, and again from where a run was stopped."""
    options = {"spec": "uniform:bits=2+ef", "collective": "scatter_reduce", "outer": "nesterov"}
    whole, optimizer, _ = begin(**options)
    train(whole, rank, range(9), optimizer)
    model, optimizer, handle = begin(**options)
    train(model, rank, range(5), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    again, optimizer, handle = begin(**options)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    train(again, rank, range(5, 9), optimizer)
    return flat(whole), flat(again), flat(model)


def test_rounds_in_two_bits_with_an_outer_momentum_end_equal_and_resume_to_the_bit():
    results = run_ranks(with_momentum, 3)
    for whole, again, _ in results:
        assert torch.equal(whole, results[0][0])
        assert torch.equal(whole, again)
    assert not torch.equal(results[0][2], results[1][2]), "between rounds each has parameters of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_rounding_leaves_stays_in_the_residual(dtype):
    torch.manual_seed(0)
    x = torch.randn(40, 6, dtype=dtype).t()  # not in the order of its memory
    residual = 1e-3 * torch.randn(x.numel() * (2 if dtype.is_complex else 1))
    before, whole = x.clone(), residual.clone()
    Fragment.put_in_place(x, residual, form_of(x))
    moved = x.to(torch.complex128 if dtype.is_complex else torch.float64) - before
    moved = torch.view_as_real(moved.t().contiguous()) if dtype.is_complex else moved.t().contiguous()
    torch.testing.assert_close(moved.flatten() + residual, whole.double(), rtol=0, atol=1e-9)
    assert float(residual.abs().max()) < (5e-3 if dtype == torch.bfloat16 else 2e-7)
    assert not torch.equal(x, before)


def delivered(rank, world_size, residuals):
    """A model that wants one thing for ever: how far it gets where little can be sent."""
    model = mlp()
    wanted = [torch.full_like(p, 0.5) for p in model.parameters()]
    optimizer = sgd(model, lr=0.1)
    nb.compress_updates(model, optimizer, "topk:density=0.05+ef", every=8, residuals=residuals, min_numel=64)
    for _ in range(80):
        optimizer.zero_grad()
        sum((p - w).square().sum() for p, w in zip(model.parameters(), wanted, strict=True)).backward()
        optimizer.step()
    return float(sum((p - w).square().sum() for p, w in zip(model.parameters(), wanted, strict=True)))


def test_nothing_is_sent_twice_over():
    """What waits apart is learned anew in each round, adds up, and goes far beyond what was wanted."""
    apart, in_place = (run_ranks(delivered, 2, residuals)[0] for residuals in ("apart", "in-place"))
    (start,) = run_ranks(at_the_start, 1)
    assert in_place < 0.6 * start
    assert apart > 2 * in_place


def at_the_start(rank, world_size):
    return float(sum((p.detach() - 0.5).square().sum() for p in mlp().parameters()))


def resumed(rank, world_size, stop):
    whole, optimizer, _ = begin()
    train(whole, rank, range(8), optimizer)
    model, optimizer, handle = begin()
    train(model, rank, range(stop), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    again, optimizer, handle = begin()
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    train(again, rank, range(stop, 8), optimizer)
    _, _, apart = begin(residuals="apart")
    return torch.equal(flat(whole), flat(again)), refusal(lambda: apart.load_state_dict(saved[2]))


@pytest.mark.parametrize("stop", [4, 6])
def test_a_run_that_was_stopped_goes_on_to_the_bit(stop):
    for same, (kind, text) in run_ranks(resumed, 2, stop):
        assert same
        assert kind == "ValueError"
        assert "saved with residuals='in-place', here they are 'apart'" in text


def averaged_twice(rank, world_size):
    """average() in a row, without a step in between, and what waits."""
    model, optimizer, handle = begin(every=50)
    train(model, rank, range(4), optimizer)
    handle.average()
    once, waiting = flat(model).clone(), copy.deepcopy(handle.layers.state.state_dict())
    for _ in range(3):
        handle.average()
    left = handle.layers.state.state_dict()
    return once, flat(model), all(torch.equal(waiting[name], left[name]) and waiting[name].any() for name in waiting)


def test_rounds_without_steps_change_nothing_and_lose_nothing():
    results = run_ranks(averaged_twice, 2)
    for once, after, same in results:
        assert torch.equal(once, results[0][0])
        assert torch.equal(once, after)
        assert same


def as_peers(rank, world_size, address, steps):
    peers = nb.Rendezvous(address, least=1, grace_s=300.0, exchange_s=20.0, name=str(rank), begin_with=world_size)
    model = mlp()
    optimizer = sgd(model, lr=LR)
    handle = nb.compress_updates(
        model, optimizer, SPEC, every=3, min_numel=64, residuals="in-place", peers=peers
    )  # fmt: skip
    train(model, rank, range(steps), optimizer)
    found = flat(model), handle.state_dict()["updates"]["scaled by"]
    handle.remove()
    return found


def as_replicas(rank, world_size, steps):
    model, optimizer, _ = begin()
    train(model, rank, range(steps), optimizer)
    return flat(model)


@pytest.mark.parametrize("steps", [7, 9])
def test_peers_that_count_alike_are_replicas_to_the_bit(store, steps):
    expected = run_ranks(as_replicas, 2, steps)
    for (found, scaled), same in zip(run_ranks(as_peers, 2, store, steps, group=False), expected, strict=True):
        assert torch.equal(found, same)
        assert scaled == 1.0


def unequal(rank, world_size, address):
    """Peers of one and three steps: what each has of its own after the next step, beside what all have."""
    peers = nb.Rendezvous(address, least=1, grace_s=300.0, exchange_s=20.0, name=str(rank), begin_with=world_size)
    model = mlp()
    optimizer = sgd(model, lr=LR)
    handle = nb.compress_updates(model, optimizer, SPEC, every=50, min_numel=64, residuals="in-place", peers=peers)
    begun = named(model)
    train(model, rank, range(1 + 2 * rank), optimizer)
    stepped = named(model)
    handle.average()
    common = named(model)
    optimizer.zero_grad()
    loss_of(model, 20, rank).backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    optimizer.step()
    found = begun, stepped, common, {name: p + LR * gradients[name] for name, p in named(model).items()}
    handle.remove()
    return found


def test_what_waits_in_place_is_what_the_replica_learned_however_it_counts(store):
    """A peer that counts half sends half of its update's largest elements; of the others it has all, in place."""
    results = run_ranks(unequal, 2, store, group=False)
    codec = nb.codec("topk:density=0.1")
    for begun, stepped, common, own in results:
        for name, first in begun.items():
            if first.dim() == 2 and first.numel() >= 64:
                update = stepped[name] - first
                kept = update.flatten().abs().topk(codec.kept(update.shape)).indices
                rest = update.flatten().clone()
                rest[kept] = 0.0
                torch.testing.assert_close(own[name] - common[name], rest.view_as(update), rtol=1e-4, atol=2e-6)
                assert float(rest.abs().max()) > 1e-4


def with_plan(spec):
    """One layer has this, in a model that has ``SPEC``."""
    layer = nb.adapt.LayerPlan("0.weight", (40, 24), spec, 1.0, None)
    return nb.Plan((layer,), "", 1, model=SPEC)


def refused(rank, world_size):
    model = mlp()
    optimizer = sgd(model)

    def asked(spec, **options):
        return refusal(lambda: nb.compress_updates(model, optimizer, spec, **options))

    return [
        asked("none", residuals="in-place"),
        asked("powersgd:rank=2", residuals="in-place"),
        asked("topk:density=0.1+ef-mixed", residuals="in-place"),
        asked(with_plan("topk:density=0.1+ef-mixed"), residuals="in-place"),
        asked(with_plan("powersgd:rank=2"), residuals="in-place"),
        asked(nb.adapt.Accordion(low=SPEC, high="topk:density=0.2+ef-mixed"), residuals="in-place"),
        asked(SPEC, residuals="elsewhere"),
        asked(SPEC, residuals="in-place", every=4, overlap=2),
        asked(SPEC, residuals="in-place", peers=nb.Rendezvous("127.0.0.1:1"), weigh="tokens"),
    ]


def test_what_cannot_be_is_said_at_set_up():
    (errors,) = run_ranks(refused, 1)
    words = ["needs error feedback"] * 2 + ["needs residuals apart from the updates to choose"] * 2
    words += ["'powersgd:rank=2' has none", "cannot be combined with ef-mixed in 'topk:density=0.2+ef-mixed'"]
    words += ["'elsewhere' is neither", "overlap=2", "weigh='tokens'"]
    for (kind, text), word in zip(errors, words, strict=True):
        assert kind == "ValueError"
        assert word in text


def set_later(rank, world_size):
    model, optimizer, handle = begin()
    errors = [refusal(lambda spec=spec: handle.set_layers({"0.weight": spec, "3.weight": "topk:density=0.3"}))
              for spec in ("topk:density=0.2+ef-mixed", "powersgd:rank=2")]  # fmt: skip
    unchanged = handle.layers.override_texts()
    handle.set_layers({"0.weight": "topk:density=0.2+ef", "3.weight": "topk:density=0.3"})
    train(model, rank, range(6), optimizer)
    _, _, apart = begin(residuals="apart")
    apart.set_layers({"0.weight": "topk:density=0.2+ef-mixed"})
    return errors, unchanged, handle.layers.override_texts(), flat(model), apart.layers.override_texts()


def test_layers_are_given_nothing_else_later():
    results = run_ranks(set_later, 2)
    for errors, unchanged, changed, parameters, apart in results:
        assert [kind for kind, _ in errors] == ["ValueError"] * 2
        assert "cannot be combined with ef-mixed in 'topk:density=0.2+ef-mixed'" in errors[0][1]
        assert "'powersgd:rank=2' has none" in errors[1][1]
        assert unchanged == {}
        assert changed == {"0.weight": "topk:density=0.2+ef", "3.weight": "topk:density=0.3+ef"}
        assert torch.equal(parameters, results[0][3])
        assert apart == {"0.weight": "topk:density=0.2+ef-mixed"}


def different(rank, world_size):
    return refusal(lambda: begin(residuals="in-place" if rank else "apart"))


def test_replicas_that_keep_residuals_elsewhere_are_told():
    for kind, text in run_ranks(different, 2):
        assert kind == "DisagreementError"
        assert "residuals" in text


def in_fragments(rank, world_size):
    model, optimizer, handle = begin(every=4, fragments=2)
    train(model, rank, range(8), optimizer)
    handle.average()
    return flat(model), flat(mlp())


def test_fragments_end_equal():
    (one, begun), (other, _) = run_ranks(in_fragments, 2)
    assert torch.equal(one, other)
    assert not torch.equal(one, begun)
