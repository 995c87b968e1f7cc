"""Mixed families on real ranks, plans that change while training runs, and policies that make them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.adapt import Accordion, KMeans, LayerPlan, LGreCo, Plan, Policy
from narrowband.averaging import step as steps
from tests.gradients.training import TINY, compress, flat, heard, loss_of, mlp, refusal, same, sgd, train, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

LAYERS = ("0.weight", "3.weight", "5.weight", "6.weight")
MIXED = {
    "0.weight": "topk:density=0.05+ef",
    "3.weight": "powersgd:rank=2,min_ratio=1",
    "5.weight": "qsgd:bits=4+ef",
    "6.weight": "none+ef",
}


def plan_of(specs):
    shapes = {name: tuple(p.shape) for name, p in mlp().named_parameters()}
    layers = (
        LayerPlan(name, shapes[name], spec, nb.compression(spec).layer_nbytes(shapes[name]), None)
        for name, spec in specs.items()
    )
    return Plan(tuple(layers), "by hand", 2)


def averages(rank, world_size, spec, steps, cap=TINY):
    """Averages of steps that leave the parameters where they are."""
    model = wrap(mlp(), cap)
    handle = compress(model, spec, min_numel=64)
    found = []
    for step in range(steps):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        found.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
    return found, handle.stats().total.sent_bytes / steps


@pytest.mark.parametrize(("ranks", "cap"), [(3, TINY), (2, 100.0), *thorough((2, TINY), (3, 100.0))])
def test_every_layer_gets_what_it_would_in_a_model_of_its_own_family(ranks, cap):
    mixed = run_ranks(averages, ranks, plan_of(MIXED), 3, cap)
    for name, spec in MIXED.items():
        alone = run_ranks(averages, ranks, spec, 3, cap)
        for (found, _), (own, _) in zip(mixed, alone, strict=True):
            for step in range(3):
                torch.testing.assert_close(found[step][name], own[step][name], rtol=1e-5, atol=1e-7)
                if ranks == 2:
                    assert torch.equal(found[step]["0.bias"], own[step]["0.bias"])


def back_and_forth(rank, world_size):
    """A layer that left a family takes all of it along: the state of the others loads without it."""
    ends = []
    for stop in (None, 5):
        model = wrap(mlp(), TINY)
        handle = compress(model, "topk:density=0.1+ef", min_numel=64)
        handle.set_layers({"0.weight": "powersgd:rank=1,min_ratio=1"})
        train(model, rank, range(3), sgd(model))
        handle.set_layers({"0.weight": "topk:density=0.1+ef"})
        assert handle.state_dict()["layers"] == {}
        train(model, rank, range(3, 5), sgd(model))
        if stop:
            state, at = handle.state_dict(), {k: v.clone() for k, v in model.module.state_dict().items()}
            model = wrap(mlp(), TINY)
            model.module.load_state_dict(at)
            handle = compress(model, "topk:density=0.1+ef", min_numel=64)
            handle.load_state_dict(state)
        train(model, rank, range(5, 8), sgd(model))
        ends.append(flat(model))
    return ends


def test_a_family_that_nobody_has_any_more_leaves_nothing_behind():
    for whole, resumed_ in run_ranks(back_and_forth, 2):
        assert torch.equal(whole, resumed_)


def changing(rank, world_size, order):
    """Families that change every other step; what was sent and the residual, against what there was to send."""
    model = wrap(mlp(), TINY)
    handle = compress(model, plan_of(dict.fromkeys(LAYERS, order[0])), min_numel=64)
    sent = {name: torch.zeros(model.module.get_parameter(name).numel(), dtype=torch.float64) for name in LAYERS}
    given = {name: torch.zeros_like(total) for name, total in sent.items()}
    for step in range(2 * len(order)):
        if step % 2 == 0:
            handle.set_layers(dict.fromkeys(LAYERS, order[step // 2]))
        plain = mlp()
        loss_of(plain, step, rank).backward()
        model.zero_grad()
        loss_of(model, step, rank).backward()
        for name in LAYERS:
            given[name] += plain.get_parameter(name).grad.flatten()
            sent[name] += model.module.get_parameter(name).grad.flatten()
    residual = {
        name: sum(
            state.residual(name).double() for state in handle.layers.states.values() if state.residual(name) is not None
        )
        for name in LAYERS
    }
    handle.remove()
    assert handle.residual_nbytes == 0  # of no family
    return sent, given, residual


@pytest.mark.parametrize(
    "order",
    [
        ("topk:density=0.1+ef", "powersgd:rank=1,min_ratio=1", "topk:density=0.02+ef"),
        ("powersgd:rank=1,min_ratio=1", "none+ef", "powersgd:rank=3,min_ratio=1", "sign+ef"),
        ("qsgd:bits=3+ef", "topk:density=0.1+ef", "qsgd:bits=2+ef"),
    ],
)
def test_the_residual_moves_along_with_a_layer(order):
    results = run_ranks(changing, 2, order)
    for name in LAYERS:
        given = sum(given[name] for _, given, _ in results) / 2
        residual = sum(residual[name] for _, _, residual in results) / 2
        sent = results[0][0][name]
        assert torch.equal(sent, results[1][0][name])
        torch.testing.assert_close(sent + residual, given, rtol=1e-4, atol=1e-5)
        assert float((given - sent).norm()) > 0.01 * float(given.norm()) or order[-1].startswith("none")


def from_owners_to_all(rank, world_size, ahead):
    """A layer leaves scatter-reduce for all-gather, while another stays. What was sent, what there was to send, and
    what waits; and each step's collectives, and norms of owners' errors.
    """
    host, steps.AHEAD = steps.AHEAD, {"cpu"} if ahead else set()
    try:
        shapes = {"leaves": (700, 700), "stays": (900, 700)}
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        averager = nb.Averager(parameters, "uniform:bits=4+ef", min_numel=64)
        given, sent = (dict.fromkeys(shapes, 0.0) for _ in range(2))
        ways, norms = [], []
        for step in range(4):
            if step == 2:
                averager.set_layers({"leaves": "topk:density=0.01+ef"})
            generator = torch.Generator().manual_seed(10 * step + rank)
            for name, p in parameters.items():
                p.grad = torch.randn(p.shape, generator=generator)
                given[name] += p.grad.flatten().double()
            averager.average()
            for name, p in parameters.items():
                sent[name] += p.grad.flatten().double()
            layers, held = averager.layers, averager.state_dict()["feedback"]
            ways.append([layers.collective_for(layers.spec_for(name)).name for name in shapes])
            of_owner = {key.split("/")[3]: (int(key.split("/")[1]), x) for key, x in held.items() if "/" in key}
            norms.append([float(of_owner[name][1].norm()) if name in of_owner else 0.0 for name in shapes])
        waits = {name: held[name].double() for name in shapes}
        for name, (start, error) in of_owner.items():
            waits[name][start : start + error.numel()] += world_size * error
        return sent, given, waits, ways, norms
    finally:
        steps.AHEAD = host


@pytest.mark.parametrize("ahead", [False, True])
def test_a_layer_that_leaves_its_owners_takes_their_errors_along(ahead):
    results = run_ranks(from_owners_to_all, 3, ahead)
    for sent, _, _, ways, norms in results:
        assert ways == [["scatter_reduce", "scatter_reduce"]] * 2 + [["all_gather", "scatter_reduce"]] * 2
        assert [[norm > 0 for norm in of_step] for of_step in norms] == [[True, True]] * 2 + [[False, True]] * 2
        for name, total in sent.items():
            assert torch.equal(total, results[0][0][name])
            given, waits = (sum(each[at][name] for each in results) / 3 for at in (1, 2))
            torch.testing.assert_close(total + waits, given, rtol=1e-4, atol=1e-4)


class Scripted(Policy):
    """Says what it was told to, and remembers what it was shown."""

    name = "scripted"

    def __init__(self, plans, every=4, warmup_steps=0, fails=()):
        self.plans, self.every, self.warmup_steps, self.fails = list(plans), every, warmup_steps, fails
        self.seen = []

    @property
    def start(self):
        return nb.compression("topk:density=0.1+ef")

    def specs(self):
        return ["topk:density=0.1+ef", *MIXED.values()]

    def decide(self, gradients, *, step, traffic):
        self.seen.append((step, {name: x.clone() for name, x in gradients.items()}))
        time.sleep(0.02)
        if step in self.fails:
            raise ZeroDivisionError("on purpose")
        return plan_of(self.plans[len(self.seen) % len(self.plans)])


def scripted(rank, world_size, policy, steps, broken=None):
    model = wrap(mlp(), TINY)
    with heard() as messages:
        handle = compress(model, policy, min_numel=64)
        specs, summed = [], {name: torch.zeros(model.module.get_parameter(name).shape) for name in LAYERS}
        for step in range(steps):
            if step < policy.every and step != broken:
                plain = mlp()
                plain.load_state_dict(model.module.state_dict())
                loss_of(plain, step, rank).backward()
                for name in LAYERS:
                    summed[name] += plain.get_parameter(name).grad
            model.zero_grad()
            loss = loss_of(model, step, rank)
            (loss * float("nan") if step == broken else loss).backward()
            if step == policy.every - 1:  # what has been delivered by now, of this rank's gradients
                for name in LAYERS:
                    summed[name] -= handle.layers.state.residual(name).view_as(summed[name])
            specs.append((handle.layers.spec_for("3.weight"), handle.plan and handle.plan.step))
    assert handle.stats().total.decide_s >= 0.02 * len(policy.seen)
    return [str(spec) for spec, _ in specs], policy.seen, summed, messages


def test_a_policy_sees_what_was_delivered_and_all_ranks_follow_it():
    uniform = dict.fromkeys(LAYERS, "topk:density=0.1+ef")
    results = run_ranks(scripted, 2, Scripted([MIXED, uniform]), 12)
    assert results[0][0] == results[1][0]
    specs, seen, summed, _ = results[0]
    first, second = str(nb.compression(uniform["3.weight"])), str(nb.compression(MIXED["3.weight"]))
    assert specs == [first] * 8 + [second] * 4
    assert [step for step, _ in seen] == [4, 8]
    assert results[1][1] == []
    for name in LAYERS:
        torch.testing.assert_close(seen[0][1][name], (summed[name] + results[1][2][name]) / 2, rtol=1e-5, atol=1e-6)


def planned(rank, world_size, *, shared):
    """The specs of two models after three decisions, the gradients of one a hundred times those of the other; and those
    of the first model after the first decision of its next handle.
    """
    policies = [Accordion("topk:density=0.3+ef", "topk:density=0.05+ef", every=2) for _ in range(3)]
    policies = policies[:1] * 3 if shared else policies
    models = [wrap(mlp()) for _ in range(2)]
    handles = [compress(model, policy, min_numel=64) for model, policy in zip(models, policies[:2], strict=True)]

    def train_all(steps):
        for step in range(steps):
            for at, model in enumerate(models):
                (loss_of(model, step % 2, rank) * 100.0**at).backward()
                model.zero_grad()

    train_all(7)
    found = [handle.plan.specs() for handle in handles]
    handles[0].remove()
    again = compress(models[0], policies[2], min_numel=64)
    train_all(3)
    return *found, again.plan.specs()


def several_plans(rank, world_size):
    return [planned(rank, world_size, shared=shared) for shared in (True, False)]


def test_a_policy_that_several_handles_have_plans_for_each_by_its_own_gradients():
    for shared, apart in run_ranks(several_plans, 2):
        assert shared == apart
        assert [set(plan.values()) for plan in apart] == [{"topk:density=0.05+ef"}] * 2 + [{"topk:density=0.3+ef"}]


def delivered(rank, world_size, policy):
    """What each step delivered, in the unit of the loss, and what the policy was shown."""
    model = wrap(mlp(), TINY)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    handle = compress(model, policy, min_numel=64, grad_scaler=scaler)
    steps = []
    for step in range(11):
        model.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        steps.append({name: model.module.get_parameter(name).grad / scaler.get_scale() for name in LAYERS})
        scaler.update(64.0 * 2.0 ** (step % 2))
    assert handle.plan is not None
    return steps, policy.seen


def test_a_policy_may_look_at_the_last_steps_alone():
    policy = Scripted([dict.fromkeys(LAYERS, "topk:density=0.1+ef")], every=4, warmup_steps=2)
    policy.last = 2
    steps, seen = run_ranks(delivered, 2, policy)[0]
    assert [step for step, _ in seen] == [2, 6, 10]
    for step, shown in seen:
        for name in LAYERS:
            torch.testing.assert_close(shown[name], steps[step - 2][name] + steps[step - 1][name])


def never_finite(rank, world_size, policy):
    model = wrap(mlp(), TINY)
    with heard() as messages:
        handle = compress(model, policy, min_numel=64)
        for step in range(5):
            loss = loss_of(model, step, rank)
            (loss * float("nan") if step == 3 else loss).backward()
    return messages, handle.plan, policy.seen


def test_where_nothing_that_a_policy_looks_at_was_finite_every_layer_keeps_what_it_has():
    policy = Scripted([dict.fromkeys(LAYERS, "topk:density=0.1+ef")], every=4)
    policy.last = 1
    for rank, (messages, plan, seen) in enumerate(run_ranks(never_finite, 2, policy)):
        assert plan is None
        assert seen == []
        assert not any("failed" in message for message in messages)
        words = "step 4: all averages since the policy's last plan had inf or NaN, so it has nothing to plan by; "
        assert [message.startswith(words) for message in messages] == [True] * (rank == 0)


def test_a_decision_that_fails_changes_nothing_and_hangs_nobody():
    uniform = dict.fromkeys(LAYERS, "topk:density=0.1+ef")
    results = run_ranks(scripted, 2, Scripted([uniform, MIXED], fails=(4,)), 12)
    for specs, _, _, messages in results:
        assert len(set(specs[:8])) == 1
        assert any("the policy failed on rank 0" in message for message in messages)
    assert any("the policy failed to make a plan" in message for message in results[0][3])
    assert results[0][0] == results[1][0]


def one_vector(rank, world_size, policy):
    model = wrap(mlp(), TINY)
    with heard() as messages:
        handle = compress(model, policy, min_numel=1 << 30, small="fused")
        for step in range(6):
            loss_of(model, step, rank).backward()
            if step < policy.warmup_steps:
                assert handle.stats().last.ratio < 1.01
    return messages, handle.plan, policy.seen, handle.stats().last.ratio


def test_a_policy_is_asked_nothing_where_all_travels_as_one_vector():
    for messages, plan, seen, ratio in run_ranks(one_vector, 2, Scripted([], every=2, warmup_steps=3)):
        assert (messages, plan, seen) == ([], None, [])
        assert ratio > 4


def test_a_broken_step_does_not_spoil_what_is_seen():
    uniform = dict.fromkeys(LAYERS, "topk:density=0.1+ef")
    results = run_ranks(scripted, 2, Scripted([uniform]), 5, 2)
    _, seen, summed, _ = results[0]
    for name in LAYERS:
        torch.testing.assert_close(seen[0][1][name], (summed[name] + results[1][2][name]) / 2, rtol=1e-5, atol=1e-6)


def policies():
    return {
        "densities of dgc": LGreCo("dgc:density=0.03,momentum=0.5,warmup_steps=6", every=4),
        "lgreco": LGreCo("topk:density=0.05+ef", every=4, warmup_steps=2),
        "lgreco mixed": LGreCo(
            "powersgd:rank=2,min_ratio=1",
            [
                *(f"powersgd:rank={r},min_ratio=1" for r in (1, 2, 4)),
                "topk:density=0.05+ef",
                "qsgd:bits=4+ef",
                "none+ef",
            ],
            every=4,
        ),
        "accordion": Accordion(low="powersgd:rank=4,min_ratio=1", high="powersgd:rank=1,min_ratio=1", every=4),
        "clusters": KMeans("topk:density=0.05+ef", clusters=2, every=4),
        "both": LGreCo(Accordion(low="qsgd:bits=8", high="qsgd:bits=3", eta=0.1), every=4),
    }


def resumed(rank, world_size, name):
    ends = []
    for stop in (None, 3, 6):  # before the first decision, and between two of them
        model = wrap(mlp(), TINY)
        handle = compress(model, policies()[name], min_numel=64)
        optimizer = sgd(model)
        train(model, rank, range(stop or 9), optimizer)
        if stop:
            state, at = handle.state_dict(), {k: v.clone() for k, v in model.module.state_dict().items()}
            model = wrap(mlp(), TINY)
            model.module.load_state_dict(at)
            handle = compress(model, policies()[name], min_numel=64)
            handle.load_state_dict(state)
            train(model, rank, range(stop, 9), sgd(model))
        ends.append((flat(model), handle.plan.specs()))
    return ends


@pytest.mark.parametrize(
    "name",
    [*(name for name in policies() if name not in ("lgreco", "both")), *thorough("lgreco", "both")],
)
def test_a_policy_goes_on_to_the_bit_where_it_was_stopped(name):
    results = run_ranks(resumed, 2, name)
    for ends in results:
        for end, specs in ends[1:]:
            assert specs == ends[0][1]
            assert torch.equal(end, ends[0][0])
        assert same(dict(enumerate(e for e, _ in ends)), dict(enumerate(e for e, _ in results[0])))


def refused_state(rank, world_size):
    """What is said of a state that rank 1 cannot load, and what rank 0's policy knows before and after that."""
    handle = compress(model := wrap(mlp(), TINY), policies()["accordion"], min_numel=64)
    train(model, rank, range(5))
    before, state = handle.state_dict(), handle.state_dict()
    state["controller"]["policy"] = {"0.weight": "large"} if rank == 1 else {"0.weight": 7.0}
    refused = refusal(lambda: handle.load_state_dict(state))
    return refused, *(each["controller"]["policy"] for each in (before, handle.state_dict()))


def test_a_state_that_one_rank_cannot_load_leaves_policies_as_they_were():
    for rank, (refused, before, after) in enumerate(run_ranks(refused_state, 2)):
        assert refused[0] == ("ValueError" if rank == 1 else "DisagreementError")
        assert "accordion: the state holds 'large' as the norm of '0.weight'" in refused[1]
        assert after == before
        assert bool(before) == (rank == 0)


def what_cannot_be(rank, world_size):
    model = wrap(mlp(), TINY)
    other = plan_of(MIXED)
    larger = Plan(
        tuple(LayerPlan(f"{layer.name}x", layer.shape, layer.spec, 1.0, None) for layer in other.layers), "", 2
    )
    return [
        refusal(lambda spec=spec: compress(wrap(mlp(), TINY), spec, min_numel=64))
        for spec in (
            larger,
            plan_of({**MIXED, "6.weight": "dgc:density=0.1"}),
            LGreCo("qsgd:bits=4", ["qsgd:bits=2", "topk:density=0.1+ef"]),
            LGreCo("qsgd:bits=4", objective="time", seconds_per_byte={"0.weight": 1.0, "3.weight": 1.0}),
        )
    ] + [refusal(lambda: compress(model, plan_of(MIXED), min_numel=100_000))]


def test_plans_and_policies_that_do_not_fit_are_refused_at_set_up():
    said, other = run_ranks(what_cannot_be, 2)  # on all ranks, so that none waits for the others
    assert said == other
    assert [kind for kind, _ in said] == ["ValueError"] * 5
    assert "another model" in said[0][1]
    assert "for a whole model" in said[1][1]
    assert "without feedback" in said[2][1]
    assert "no time for 2 of 4 layers: 5.weight, 6.weight;" in said[3][1]


def with_times_on_one_rank(rank, world_size, knows):
    """Only one rank's policy has times of all layers."""
    seconds = dict.fromkeys(LAYERS, 1.0) if rank == knows else {}
    policy = LGreCo("qsgd:bits=4", objective="time", seconds_per_byte=seconds, every=2)
    model, made = wrap(mlp(), TINY), []
    refused = refusal(lambda: made.append(compress(model, policy, min_numel=64)))
    if made:
        train(model, rank, range(4), sgd(model))
    return refused, made[0].plan.specs() if made else None


@pytest.mark.parametrize("knows", [0, 1])
def test_only_the_policy_of_rank_0_is_asked_and_all_ranks_hear_its_answer(knows):
    answers = run_ranks(with_times_on_one_rank, 2, knows)
    for refused, specs in answers:
        assert specs == answers[0][1]
        if knows == 0:
            assert refused is None
            assert specs.keys() == set(LAYERS)
        else:
            assert refused[0] == "ValueError"
            assert "no time for 4 of 4 layers" in refused[1]


def dgc_again(rank, world_size):
    """A plan of densities for dgc is used again with dgc, and a layer can go back to what the model has."""
    spec = "dgc:density=0.03,momentum=0.5"
    model = wrap(mlp(), TINY)
    handle = compress(model, LGreCo(spec, every=4), min_numel=64)
    train(model, rank, range(6), sgd(model))
    plan = Plan.from_json(handle.plan.to_json())
    followed = compress(wrap(mlp(), TINY), plan, min_numel=64)
    planned = {name: str(followed.layers.spec_for(name).codec) for name in LAYERS}
    followed.set_layers(dict.fromkeys(LAYERS, followed.compression))
    back = {str(followed.layers.spec_for(name)) for name in LAYERS}
    return plan.specs(), str(followed.compression), planned, back


def test_a_plan_of_dgc_keeps_its_momentum():
    for specs, chosen, planned, back in run_ranks(dgc_again, 2):
        assert chosen == "dgc:density=0.03,momentum=0.5"
        assert planned == specs
        assert len(set(specs.values())) > 1
        assert back == {chosen}


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(24, 40, dtype=torch.bfloat16), nn.Linear(40, 8)

    def forward(self, x):
        return self.two(self.one(x.bfloat16()).float())


def half_as_it_is(rank, world_size, spec):
    """A half-precision layer that is not compressed, in a model that is; every step is measured."""
    model = wrap(Half())
    handle = compress(model, spec, min_numel=8)
    handle.set_layers({"one.weight": "none"})
    found = []
    for step in range(4):
        model.zero_grad()
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step * 10 + rank))
        handle._total.relative_error = None
        model(x).square().mean().backward()
        found.append(model.module.one.weight.grad.clone())
    plain = wrap(Half())
    plain.module.load_state_dict(model.module.state_dict())
    expected = []
    for step in range(4):
        plain.zero_grad()
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step * 10 + rank))
        plain(x).square().mean().backward()
        expected.append(plain.module.one.weight.grad.clone())
    return found, expected, handle.stats().total.relative_error


@pytest.mark.parametrize("spec", ["topk:density=0.1+ef", "topk:density=0.1"])
def test_a_half_precision_layer_may_stay_as_it_is(spec):
    for found, expected, error in run_ranks(half_as_it_is, 2, spec):
        assert 0 < error < 1
        for own, plain in zip(found, expected, strict=True):
            assert own.dtype == torch.bfloat16
            torch.testing.assert_close(own, plain, rtol=0.02, atol=1e-3)


def half(rank, world_size):
    model = wrap(Half(), TINY)
    handle = compress(model, LGreCo("topk:density=0.1+ef", every=3), min_numel=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return flat(model), handle.plan.step


def test_half_precision_layers_are_seen_too():
    results = run_ranks(half, 2)
    assert torch.equal(results[0][0], results[1][0])
    assert bool(results[0][0].isfinite().all())
    assert results[0][1] == 6
