"""Beginning, pausing and joining; several models and groups; what set-up has done already."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.gradients.training import (
    FINGERPRINT,
    LOSSLESS,
    TINY,
    Branches,
    compress,
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
from tests.loops import asked_for_from_now
from tests.ranks import run_ranks

# ---- beginning, pausing, joining -------------------------------------------------------------------------------------


def begin_late(rank, world_size):
    plain, model = wrap(mlp()), wrap(mlp())
    handle = compress(model, "topk:density=0.05+ef", min_numel=64, warmup_steps=2)
    history = []
    for step in range(4):
        train(plain, rank, [step])
        train(model, rank, [step])
        history.append((torch.equal(flat(plain), flat(model)), len(residuals(handle)), handle.stats().last))
    return history


def test_start_step_averages_uncompressed_until_then():
    for history in run_ranks(begin_late, 2):
        assert [equal for equal, _, _ in history] == [True, True, False, False]
        assert [count for _, count, _ in history] == [0, 0, 4, 4]
        plain = [step.sent_bytes == step.raw_bytes + FINGERPRINT for _, _, step in history]
        assert plain == [True, True, False, False]
        assert [step.relative_error is None for _, _, step in history] == [True, True, False, True]


def pause_and_resume(rank, world_size):
    model = wrap(mlp())
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    train(model, rank, range(2))
    before = residuals(handle)
    plain = wrap(mlp())
    plain.module.load_state_dict(model.module.state_dict())
    handle.pause()
    train(model, rank, range(2, 4))
    train(plain, rank, range(2, 4))
    answers = [torch.equal(flat(model), flat(plain)), same(before, residuals(handle))]
    paused = handle.stats().last
    handle.resume()
    train(model, rank, range(4, 5))
    answers.append(not same(before, residuals(handle)))
    return answers, paused, handle.stats().last, flat(model)


def test_paused_is_plain_ddp_and_keeps_the_residual():
    answers = run_ranks(pause_and_resume, 2)
    for facts, paused, resumed, parameters in answers:
        assert facts == [True, True, True]
        assert paused.sent_bytes == paused.raw_bytes + FINGERPRINT
        assert resumed.sent_bytes < resumed.raw_bytes / 2
        assert torch.equal(parameters, answers[0][3])


def join_with_effective_world_size(rank, world_size):
    model = wrap(mlp())
    compress(model, LOSSLESS, min_numel=64)

    def steps():
        with model.join(divide_by_initial_world_size=False):
            train(model, rank, range(2))

    return refusal(steps)


def test_join_that_divides_by_the_ranks_still_there_is_refused():
    for refused in run_ranks(join_with_effective_world_size, 2):
        assert refused is not None
        assert refused[0] == "UnsupportedError"
        assert "divide_by_initial_world_size=True" in refused[1]


# ---- several models, several groups ----------------------------------------------------------------------------------


def two_models(rank, world_size):
    specs = ("topk:density=0.1+ef", "qsgd:bits=4")

    def make():
        models = [wrap(mlp(), cap=TINY), wrap(Branches())]
        handles = [compress(m, s, min_numel=64) for m, s in zip(models, specs, strict=True)]
        return models, handles

    alone, _alone_handles = make()
    for model in alone:
        train(model, rank, range(4))
    turns, _turn_handles = make()
    for step in range(4):
        for model in turns:
            train(model, rank, [step])
    together, _together_handles = make()
    optimizers = [sgd(model) for model in together]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(model, step, rank) for model in together).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [[flat(model) for model in models] for models in (alone, turns, together)]


def test_two_models_train_in_turns_and_in_one_backward_as_they_do_alone():
    for alone, turns, together in run_ranks(two_models, 2):
        for which in range(2):
            assert torch.equal(turns[which], alone[which])
            assert torch.equal(together[which], alone[which])


def two_groups(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    results = []
    for spec in (None, LOSSLESS, "topk:density=0.1+ef"):
        model = wrap(mlp(), process_group=mine)
        if spec is not None:
            compress(model, spec, min_numel=64)
        train(model, rank, range(3))
        results.append(flat(model))
    return results


def test_groups_average_among_themselves():
    answers = run_ranks(two_groups, 4)
    for rank in range(4):
        plain, lossless, sparse = answers[rank]
        assert torch.equal(lossless, plain)
        partner = answers[rank ^ 1]
        assert torch.equal(sparse, partner[2])
    assert not torch.equal(answers[0][2], answers[2][2])


def a_group_by_name(rank, world_size):
    """The model's own group is replaced, after DDP has made the replicas equal."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrap(mlp())
    compress(model, LOSSLESS, min_numel=64, process_group=groups[rank // 2])
    train(model, rank, range(2))
    reference = wrap(mlp(), process_group=groups[rank // 2])
    train(reference, rank, range(2))
    return torch.equal(flat(model), flat(reference))


def test_process_group_says_who_averages():
    assert run_ranks(a_group_by_name, 4) == [True] * 4


# ---- what set-up has done already ------------------------------------------------------------------------------------


def asked_for_loops(rank, world_size, spec, threads):
    """The loops that were asked for before the first step, and in three steps, in a process that has none yet."""
    torch.set_num_threads(threads)
    asked = asked_for_from_now()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(700, 600), nn.Linear(600, 50)))
    nb.compress_gradients(model, spec)
    before = len(asked)
    for _ in range(3):
        model(torch.randn(8, 700)).square().mean().backward()
    return asked[:before], asked[before:]


@pytest.mark.parametrize(
    ("spec", "threads"),
    [
        ("topk:density=0.01+ef", 1),
        ("topk:density=0.01+ef-mixed", 2),
        ("qsgd:bits=4+ef21", 2),
        ("dgc:density=0.001,nesterov=true,masking=false", 2),
        ("powersgd:rank=4", 1),
    ],
)
def test_no_step_waits_for_a_compiler(spec, threads):
    """Set-up loads or compiles every loop that a step needs, so that ranks do not do it all at once in the first."""
    ((before, later),) = run_ranks(asked_for_loops, 1, spec, threads, fresh=True, timeout_s=600)
    assert before
    assert later == []


class Scaled(nn.Module):
    """A factor of the outermost module, and a layer and a bias that DDP is to leave out, beside others."""

    def __init__(self):
        super().__init__()
        self.factor, self.body = nn.Parameter(torch.ones(8)), mlp()

    def forward(self, x):
        return self.factor * self.body(x)


IGNORED = ("factor", "body.3.weight", "body.6.bias")


def with_ignored(rank, world_size):
    found = []
    for spec in (None, LOSSLESS):
        model = Scaled()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, IGNORED)
        wrapped = wrap(model)
        handle = None if spec is None else compress(wrapped, spec, min_numel=64, early=True)
        train(wrapped, rank, range(3))
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    sent = [handle.stats().last.sent_bytes, [each.sent_bytes for each in handle.layer_stats().values()]]
    local = sgd(wrapped)
    for name, p in model.named_parameters():
        p.grad = torch.ones_like(p) if name in IGNORED[1:] else None
    return (
        found,
        sent,
        list(handle.layer_stats()),
        handle.layers.parameters.numel,
        [refusal(local.step) for _ in range(4)],
    )


def test_what_ddp_is_told_to_leave_out_is_left_out():
    """Of the outermost module it leaves nothing out, whatever it is told: so it looks for names."""
    (mine, *_), (its, *_) = answers = run_ranks(with_ignored, 2)
    for (plain, ours), (sent, by_layer), layers, numel, errors in answers:
        assert all(torch.equal(ours[name], x) for name, x in plain.items())
        assert layers == ["body.0.weight", "body.5.weight", "body.6.weight"]
        small = 8 + 3 * 40 + 32 + 16
        assert numel == small + 24 * 40 + 16 * 32 + 8 * 16
        assert sent == sum(by_layer) + 4 * (small + 1) + FINGERPRINT
        assert set(errors) == {None}  # steps of these alone are none of the handle's
    for name, x in mine[1].items():
        assert torch.equal(x, its[1][name]) == (name not in IGNORED[1:]), name
