"""Set-up of rounds, replicas that differ, and the end of a handle."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.updates.settings import Rounds
from tests.gradients.training import adamw, flat, heard, mlp, refusal, sgd, train
from tests.ranks import RankError, run_ranks
from tests.updates.training import begin, nesterov


def with_an_expanded_buffer():
    model = mlp()
    model.register_buffer("scales", torch.ones(1).expand(8))
    return model, adamw(model)


def keeps_an_expanded_buffer(rank, world_size):
    model, optimizer = with_an_expanded_buffer()
    model.register_buffer("row", torch.ones(8).expand(1, 8))  # of one row, which lies apart
    handle = nb.compress_updates(model, optimizer, "none", min_numel=64, buffers="keep")
    train(model, rank, [0], optimizer)
    handle.remove()
    del model.scales
    nb.compress_updates(model, optimizer, "none", min_numel=64)
    train(model, rank, [1], optimizer)
    return flat(model)


def test_a_buffer_to_which_nothing_can_be_written_may_be_kept():
    mine, its = run_ranks(keeps_an_expanded_buffer, 2)
    assert torch.equal(mine, its)


def refused(rank, world_size):
    model = mlp()
    optimizer = adamw(model)

    def asked(*given, **options):
        return refusal(lambda: nb.compress_updates(*given, **options))

    return [
        asked([model], optimizer, "none"),
        asked(model, "adamw", "none"),
        asked(model, optimizer, "none", every=0),
        asked(model, optimizer, "none", every="20min"),
        asked(model, optimizer, "none", every="15"),
        asked(model, optimizer, "none", every=2.5),
        asked(model, optimizer, "none", outer=-1.0),
        asked(model, optimizer, "none", outer="far"),
        asked(model, optimizer, "none", buffers="drop"),
        asked(model, optimizer, "none", split="columns"),
        asked(model, optimizer, "none", check_every=0),
        asked(model, optimizer, "none", weigh=""),
        asked(model, optimizer, "none", weigh="tokens"),
        asked(model, optimizer, "none", every=4, fragments=0),
        asked(model, optimizer, "none", every=4, fragments=2.5),
        asked(model, optimizer, "none", every=2, fragments=3),
        asked(model, optimizer, "none", every=20, fragments=9),
        asked(model, optimizer, "none", every=4, overlap=-1),
        asked(model, optimizer, "none", every=4, fragments=2, overlap=3),
        asked(model, optimizer, "none", every=4, alpha=1.5),
        asked(model, optimizer, nb.LGreCo("topk:density=0.1+ef", every=4), every=4, fragments=2),
        asked(model, optimizer, "dgc:density=0.01"),
        asked(model, optimizer, "topk:density=0.1+aq-sgd"),
        asked(model, adamw(mlp()), "none"),
        asked(mlp().requires_grad_(False), optimizer, "none"),
        asked(model, optimizer, "nonsense"),
        asked(*with_an_expanded_buffer(), "none"),
        asked(model, optimizer, "none", outer=lambda _: None),
        asked(model, optimizer, "none", outer=sgd(model)),
        asked(model, optimizer, "none", grad_scaler=True),
    ]


def test_what_cannot_be_is_said_at_set_up():
    (errors,) = run_ranks(refused, 1)
    assert [kind for kind, _ in errors] == [
        "TypeError", "TypeError", *["ValueError"] * 18, *["UnsupportedError"] * 3,
        "ValueError", "ValueError", "ValueError", "ValueError", *["TypeError"] * 3,
    ]  # fmt: skip
    words = [
        "takes a module",
        "optimizers",
        "every=0",
        "which works only with peers",
        "or a number of steps without quotes: every=15",
        "every=2.5 is neither",
        "outer=-1.0",
        "outer='far'",
        "'drop'",
        "split='columns'",
        "check_every=0",
        "weigh=''",
        "weigh='tokens' works only with peers",
        "fragments=0",
        "fragments=2.5",
        "fragments=3 must be at most every=2",
        "fragments=9 is more than the number of layers that are compressed separately, which is 1; use fragments=1",
        "overlap=-1",
        "overlap=3",
        "alpha=1.5",
        "use a plan",
        "momentum",
        "aq-sgd",
    ]
    words += ["pass all optimizers", "nothing to average", "nonsense", "buffer scales has elements that share memory"]
    words += ["it must return an optimizer", "outer=lambda parameters: SGD(parameters, …)", "grad_scaler=True is no"]
    for (_, text), word in zip(errors, words, strict=True):
        assert word in text


def short_rounds(rank, world_size):
    found = []
    for every, outer in ((3, "nesterov"), (10, "nesterov"), (3, "auto")):
        with heard() as said:
            begin("none", every=every, outer=outer)
        found.append([text for text in said if "outer" in text])
    return found


def test_a_warning_says_where_rounds_are_short_for_the_outer_momentum():
    ((warning,), *others), *_ = run_ranks(short_rounds, 2)
    assert warning.startswith("every=3 is short for outer='nesterov'")
    assert others == [[], []]


def different(rank, world_size, what):
    options = {"every": 2}
    model = mlp()
    if what == "every":
        options["every"] += rank
    elif what == "outer":
        options["outer"] = nesterov if rank else 1.0
    elif what == "model" and rank:
        model = nn.Sequential(nn.Linear(24, 8))
    elif what == "grad_scaler":
        options |= {"grad_scaler": torch.amp.GradScaler("cpu")} if rank else {}
    elif what == "optimizer" and rank:
        options["optimizer"] = sgd
    elif what == "betas" and rank:
        options["optimizer"] = lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    elif what == "weight_decay" and rank:
        options["optimizer"] = lambda model: torch.optim.AdamW(
            [{"params": p, "weight_decay": 0.1 * (p.dim() > 1)} for p in model.parameters()]
        )
    elif what == "check_every":
        options["check_every"] = rank + 1
    elif what == "spec":
        return refusal(lambda: begin("sign+ef" if rank else "none"))
    return refusal(lambda: begin("none", model, **options))


@pytest.mark.parametrize(
    "what", ["every", "outer", "model", "optimizer", "grad_scaler", "spec", "betas", "weight_decay", "check_every"]
)
def test_replicas_that_were_set_up_differently_are_told(what):
    for kind, text in run_ranks(different, 2, what):
        assert kind == "DisagreementError"
        assert {"model": "parameter"}.get(what, what) in text
        if what == "betas":
            assert "optimizer's betas ((0.9, 0.999) on rank 0; (0.9, 0.95) on rank 1)" in text
        if what == "weight_decay":
            assert "0.0 for 6 parameters" in text
            assert "0.1 for 4 parameters" in text


def stepping_otherwise(rank, world_size):
    """Groups put together otherwise, a schedule that cycles momentum, and other rates."""
    seen = []
    for cycled in (False, True):
        model = mlp()
        groups = [list(model.parameters())] if rank else [[p] for p in model.parameters()]
        optimizer = torch.optim.SGD([{"params": own} for own in groups], lr=0.05 + 0.01 * rank, momentum=0.9)
        if cycled:
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
            for _ in range(3 * rank):
                optimizer.step()
                schedule.step()
        handle = nb.compress_updates(model, optimizer, "none", every=2, min_numel=64)
        train(model, rank, range(2), optimizer)
        handle.remove()
        seen.append(flat(model))
    return seen


def test_replicas_may_step_at_rates_of_their_own():
    mine, its = run_ranks(stepping_otherwise, 2)
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def changed_behind_its_back(rank, world_size, every, check_every, change):
    """A parameter changes after three rounds; how many more were held before somebody saw it."""
    model, optimizer, handle = begin("none", every=every, check_every=check_every)
    train(model, rank, range(3 * every), optimizer)
    with torch.no_grad():
        if rank and change == "order":
            model[0].weight.copy_(model[0].weight.t().reshape(model[0].weight.shape))
        elif rank:
            model[0].weight.view(torch.int32)[0, 0] ^= 1
    error, step = None, 3 * every
    while error is None and handle.step < 40:
        error = refusal(lambda step=step: train(model, rank, [step], optimizer))
        step += 1
    return error, handle.step - 3


@pytest.mark.parametrize(
    ("every", "check_every", "unseen"), [(1, None, 7), (4, None, 0), (10, None, 0), (1, 1, 0), (1, 4, 1)]
)
def test_replicas_that_differ_by_a_bit_are_an_error(every, check_every, unseen):
    """Rounds of every step are looked at once in ten, those of ten steps and more each; of four, every third."""
    for error, rounds in run_ranks(changed_behind_its_back, 2, every, check_every, "bit"):
        assert error[0] == "DisagreementError"
        assert "parameters of the last round" in error[1]
        assert rounds == unseen


def test_replicas_with_the_same_elements_in_another_order_are_an_error():
    for error, rounds in run_ranks(changed_behind_its_back, 2, 1, 1, "order"):
        assert error[0] == "DisagreementError"
        assert rounds == 0


def left(rank, world_size):
    """A replica that dies in a round; what the other is left with."""
    model, optimizer, _ = begin("topk:density=0.1+ef", every=2)
    train(model, rank, range(2), optimizer)
    before = flat(model)
    train(model, rank, range(2, 3), optimizer)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    error = refusal(lambda: train(model, rank, range(3, 4), optimizer))
    kept = torch.equal(flat(model), before)
    return error[0], kept, refusal(lambda: train(model, rank, range(4, 6), optimizer))


def test_a_replica_that_goes_away_is_an_error_and_parameters_are_those_of_the_last_round():
    with pytest.raises(RankError) as caught:
        run_ranks(left, 2, fresh=True, grace_s=180.0)
    error, kept, later = caught.value.results[0]
    assert (error, kept) == ("RuntimeError", True)
    assert later[0] == "RuntimeError"
    assert "an earlier" in later[1]  # round, or step where the thread that exchanges says so first


def removed(rank, world_size):
    model, optimizer, handle = begin("qsgd:bits=4+ef", every=2, outer=1.5)
    train(model, rank, range(2), optimizer)
    twice = refusal(lambda: nb.compress_updates(model, optimizer, "none"))
    handle.remove()
    before = flat(model)
    train(model, rank, range(2, 6), optimizer)
    error = refusal(handle.average)
    assert handle.length == 1.5
    again = nb.compress_updates(model, optimizer, "none", min_numel=64)
    train(model, rank, range(6, 8), optimizer)
    return before, flat(model), handle.step, again.step, error, twice


def test_without_its_handle_an_optimizer_steps_alone_and_can_have_another():
    (before, mine, rounds, later, error, twice), (its_before, its, *_) = run_ranks(removed, 2)
    assert twice[0] == "ValueError"
    assert "already" in twice[1]
    assert torch.equal(before, its_before)
    assert torch.equal(mine, its)
    assert (rounds, later) == (1, 2)
    assert "removed" in error[1]


class Around(torch.optim.Optimizer):
    """Steps another optimizer with the same parameters, and halves what it did, as Lookahead does."""

    def __init__(self, inside):
        super().__init__(inside.param_groups, {})
        self.inside = inside

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        self.inside.step()
        for p, was in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            p.lerp_(was, 0.5)


def with_another_optimizer(rank, world_size):
    model, optimizer, handle = begin("none", every=2)
    train(model, rank, range(2), optimizer)
    another = mlp()
    other = sgd(another)
    train(another, rank, range(5), other)  # of another model
    handle_of_both = []
    for given in (0, 1):
        again = mlp()
        inside = sgd(again)
        pair = inside, Around(inside)
        own = nb.compress_updates(again, pair[given], "none", min_numel=64, every=2)
        train(again, rank, range(8), pair[1])
        handle_of_both.append((own.step, flat(again)))
    new = sgd(model)
    wrong = refusal(lambda: train(model, rank, range(2, 9), new))
    handle.remove()
    train(model, rank, range(9, 19), new)
    return wrong, handle.step, handle_of_both


def test_steps_of_an_optimizer_that_no_round_would_count_are_an_error():
    (wrong, rounds, around), (_, _, its) = run_ranks(with_another_optimizer, 2)
    assert wrong[0] == "RuntimeError"
    assert "another SGD than compress_updates was given is about to make step 3" in wrong[1]
    assert rounds == 1
    assert [steps for steps, _ in around] == [4, 4], "an optimizer that steps another one"
    assert torch.equal(around[1][1], its[1][1])


def with_a_step_less(rank, world_size):
    model, optimizer, handle = begin("none", every=2)
    train(model, rank, range(4 + rank), optimizer)
    wrong = refusal(handle.average)
    again, optimizer, handle = begin("none", every=2)
    train(again, rank, range(4), optimizer)
    handle.average()
    return wrong, handle.step


def test_a_replica_that_has_taken_fewer_steps_is_an_error_on_all():
    for wrong, rounds in run_ranks(with_a_step_less, 2):
        assert wrong[0] == "DisagreementError"
        assert "round on rank 1" in wrong[1]
        assert "average without a step since the last round on rank 0" in wrong[1]
        assert "have to take the same number of steps" in wrong[1]
        assert rounds == 2


def with_other_steps(rank, world_size, options, steps):
    """Two rounds of each fragment, and then as many steps as this rank has batches, before all average."""
    model, optimizer, handle = begin("topk:density=0.1+ef", every=4, **options)
    train(model, rank, range(8), optimizer)
    handle.average()
    before, rounds = flat(model), handle.step
    errors = [refusal(lambda: train(model, rank, range(8, 8 + steps[rank]), optimizer)), refusal(handle.average)]
    first = next(error for error in errors if error)
    return first, handle.step - rounds, torch.equal(flat(model), before)


@pytest.mark.parametrize(
    ("options", "steps", "said"),
    [
        ({}, (2, 1), "2 on rank 0; 1 on rank 1"),
        ({}, (4, 3), "4 on rank 0; 3 on rank 1"),
        ({"fragments": 2}, (2, 1), "2 on rank 0; 1 on rank 1"),  # a part of the model, and all of it
        ({"overlap": 2}, (4, 2), "4 on rank 0; 2 on rank 1"),
    ],
)
def test_replicas_that_average_after_other_steps_are_told(options, steps, said):
    for (kind, text), rounds, as_before in run_ranks(with_other_steps, 2, options, steps):
        assert kind == "DisagreementError"
        assert f"steps since the last round ({said})" in text
        assert "have to take the same number of steps" in text
        assert rounds == 0
        assert as_before or "overlap" in options or "fragments" in options


def ends_at_once(rank, world_size):
    """A replica that calls ``average`` as soon as it hears of a round that broke off."""
    tell = torch.futures.Future.set_exception

    def tell_and_pause(self, error):
        tell(self, error)
        time.sleep(0.3)  # as a thread may on a busy machine

    torch.futures.Future.set_exception = tell_and_pause
    try:
        first, *_ = with_other_steps(rank, world_size, {}, (4, 3))
    finally:
        torch.futures.Future.set_exception = tell
    return first


def test_a_call_right_after_a_round_that_broke_off_waits_for_nobody():
    for kind, _ in run_ranks(ends_at_once, 2, timeout_s=60.0):
        assert kind == "DisagreementError"


def in_numpys_numbers(rank, world_size, kind):
    numbers = {"every": kind(4), "fragments": kind(2), "overlap": kind(1), "check_every": kind(2), "seed": kind(3)}
    share, whole = (np.float32, np.float64) if kind is np.int64 else (float, float)
    model, optimizer, handle = begin("qsgd:bits=4+ef", **numbers, alpha=share(0.5), outer=whole(0.75))
    train(model, rank, range(5), optimizer)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    handle.load_state_dict(torch.load(file))
    return flat(model)


def test_steps_and_seeds_in_numpys_numbers_are_those_of_python_and_states_can_be_read():
    (own, _), (expected, _) = (run_ranks(in_numpys_numbers, 2, kind) for kind in (np.int64, int))
    assert torch.equal(own, expected)


def test_everything_about_rounds_is_compared_but_where_anchors_are_kept():
    rounds = Rounds(every=12, fragments=2)
    others = {
        "outer": "auto", "buffers": "keep", "grad_scaler": torch.amp.GradScaler("cpu"), "split": "layers",
        "weigh": "tokens", "residuals": "in-place",
    }  # fmt: skip
    for field in dataclasses.fields(Rounds):
        other = dataclasses.replace(rounds, **{field.name: others.get(field.name, 3)})
        assert (other.facts(None, []) == rounds.facts(None, [])) is (field.name == "offload"), field.name
    outer = nesterov([nn.Parameter(torch.zeros(1))])
    assert rounds.facts(outer, []) != rounds.facts(None, []) != rounds.facts(None, ["mask"])
    assert Rounds(every=12).facts(None, []) == Rounds(every=12, check_every=1).facts(None, [])  # which does the same
