"""Rounds on real replicas: what is applied, and that replicas are equal after each."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from narrowband.updates.fragments import Fragment
from tests.gradients.training import adamw, data, flat, heard, loss_of, mlp, refusal, sgd, train, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough
from tests.updates.training import begin, nesterov

SPECS = ["none", "qsgd:bits=2+ef", "sign+ef", "topk:density=0.05+ef", "powersgd:rank=2,min_ratio=1", "uniform:bits=4"]


# ---- what a round does -----------------------------------------------------------------------------------------------


def beside_ddp(rank, world_size, lr):
    plain = wrap(mlp())
    train(plain, rank, range(10), sgd(plain, lr=lr))
    model, optimizer, handle = begin("none", optimizer=lambda m: sgd(m, lr=lr))
    train(model, rank, range(10), optimizer)
    return float((flat(model) - flat(plain)).abs().max()), float((flat(plain) - flat(mlp())).abs().max()), handle.step


@pytest.mark.parametrize("ranks", [2, *thorough(3)])
def test_after_every_step_of_sgd_it_is_data_parallel_training(ranks):
    """The mean of steps is the step along the mean."""
    for apart, moved, rounds in run_ranks(beside_ddp, ranks, 0.05):
        assert rounds == 10
        assert moved > 0.01
        assert apart < 1e-6


class Deriving:
    """The round in float64, for all replicas at once: top-k with error feedback, and an outer step."""

    def __init__(self, shape, ranks, kept, outer):
        self.residual = torch.zeros(ranks, *shape, dtype=torch.float64)
        self.velocity = torch.zeros(shape, dtype=torch.float64)
        self.kept, self.outer = kept, outer

    def step(self, theta, updates):
        total = updates + self.residual
        sent = torch.zeros_like(total)
        for each, out in zip(total.flatten(1), sent.flatten(1), strict=True):
            at = each.abs().topk(self.kept).indices
            out[at] = each[at]
        self.residual = total - sent
        mean = sent.mean(0)
        if self.outer == "nesterov":  # DiLoCo's: momentum of −mean, and one look ahead
            self.velocity = 0.9 * self.velocity - mean
            return theta - 0.7 * (0.9 * self.velocity - mean)
        return theta + self.outer * mean


def local_rounds(rank, world_size, spec, every, rounds, outer):
    """Parameters before and after each round, and of this replica right before it."""
    model, optimizer, handle = begin(spec, every=every, outer=outer)
    seen = []
    for at in range(rounds):
        before = copy.deepcopy(dict(model.named_parameters()))
        for step in range(every):
            optimizer.zero_grad()
            loss_of(model, every * at + step, rank).backward()
            if step == every - 1:
                lone, alone = copy.deepcopy(model), adamw(mlp())
                alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                lone_optimizer = adamw(lone)
                lone_optimizer.load_state_dict(alone.state_dict())
                for p, q in zip(lone.parameters(), model.parameters(), strict=True):
                    p.grad = q.grad.clone()
                lone_optimizer.step()
            optimizer.step()
        seen.append((before, dict(lone.named_parameters()), copy.deepcopy(dict(model.named_parameters()))))
    return seen, handle.step, handle.steps


@pytest.mark.parametrize("outer", [1.0, 1.5, "nesterov"])
def test_rounds_follow_the_paper(outer):
    """Each from what the library had before it, so that nothing adds up but the residual and the outer momentum."""
    spec, ranks, every, rounds = "topk:density=0.1+ef", 3, 2, 5
    results = run_ranks(local_rounds, ranks, spec, every, rounds, outer)
    codec, derived = nb.codec("topk:density=0.1"), {}
    for at in range(rounds):
        for name, theta in results[0][0][at][0].items():
            updates = torch.stack([(seen[at][1][name] - seen[at][0][name]).double() for seen, *_ in results])
            compressed = theta.dim() == 2 and theta.numel() >= 64
            kept = codec.kept(theta.shape) if compressed else theta.numel()
            own = derived.setdefault(name, Deriving(theta.shape, ranks, kept, outer))
            expected = own.step(theta.double(), updates.detach())
            for seen, *_ in results:
                torch.testing.assert_close(seen[at][2][name].double(), expected, rtol=1e-6, atol=2e-7)
    assert [(rounds, 0)] * ranks == [(step, steps) for _, step, steps in results]


def equal_and_apart(rank, world_size, specs, every):
    found = []
    for spec in specs:
        model, optimizer, handle = begin(spec, every=every, outer=nesterov)
        history = []
        for step in range(3 * every + 1):
            train(model, rank, [step], optimizer)
            history.append(flat(model))
        handle.average()
        history.append(flat(model))
        found.append((history, handle.step))
    return found


def test_replicas_are_equal_to_the_bit_after_each_round_and_differ_before():
    every = 3
    first, *others = run_ranks(equal_and_apart, 3, SPECS, every)
    for other in others:
        for (mine, rounds), (its, _), spec in zip(first, other, SPECS, strict=True):
            assert rounds == 4
            equal = [torch.equal(a, b) for a, b in zip(mine, its, strict=True)]
            assert equal == [False, False, True] * 3 + [False, True], spec
            assert (mine[-1] - mine[2]).abs().max() > 1e-3


def tokens_learnt(rank, world_size, specs):
    """The loss on all replicas' data before and after training on one batch each."""
    found = []
    for spec in specs:
        model, optimizer, handle = begin(spec, every=2)

        def loss(model=model):
            return sum(loss_of(model, 0, r).item() for r in range(world_size))

        before = loss()
        for _ in range(20):
            train(model, rank, [0], optimizer)
        found.append((before, loss(), handle.stats().total))
    return found


def test_every_codec_learns_and_counts_its_bytes():
    for answer in run_ranks(tokens_learnt, 2, SPECS):
        for spec, (before, after, total) in zip(SPECS, answer, strict=True):
            assert after < 0.8 * before, spec
            assert total.steps == 10, spec
            if spec != "none":
                assert total.ratio > 1.2, spec  # a third of this model travels as it is


# ---- models and optimizers -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A frozen layer, a matrix that is used twice, batch norm, a table of whole numbers, and a strided parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24)
        self.second = nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Parameter(torch.randn(8, 24).T)
        self.register_buffer("table", torch.arange(5))

    def forward(self, x):
        return self.frozen(self.second(torch.relu(self.norm(self.first(x))))) @ self.head


def odd_model(rank, world_size, buffers):
    torch.manual_seed(rank)
    model = Tied()
    with torch.no_grad():
        for x in (*model.parameters(), model.table):
            x.add_(rank)  # replicas begin with those of the first
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = nb.compress_updates(model, optimizer, "topk:density=0.3+ef", every=2, buffers=buffers, min_numel=64)
    began = torch.equal(flat(model), flat(Tied()))
    for step in range(4):
        optimizer.zero_grad()
        x, y = data(step, rank)
        (model(x) - y).square().mean().backward()
        optimizer.step()
    moved = float((model.first.weight - Tied().first.weight).abs().max())
    tied = model.first.weight is model.second.weight
    assert model.head.stride() == (1, 24)
    return flat(model), model.norm.running_mean.clone(), model.table.tolist(), began, moved, tied, handle.step


@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_tied_frozen_and_strided_parameters_and_buffers(buffers):
    (mine, mean, *same), (its, other_mean, *also) = run_ranks(odd_model, 2, buffers)
    assert torch.equal(mine, its)
    assert torch.equal(mean, other_mean) == (buffers == "average")
    assert mean.any()
    assert same == also
    table, began, moved, tied, rounds = same
    assert (table, began, tied, rounds) == (list(range(5)), True, True, 2)
    assert moved > 1e-3


def several_optimizers(rank, world_size):
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
    alone = refusal(lambda: nb.compress_updates(model, optimizers[0], "none"))
    handle = nb.compress_updates(model, optimizers, "qsgd:bits=4+ef", every=2, min_numel=64)
    for step in range(4):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    return flat(model), handle.step, alone


def test_several_optimizers_step_one_model():
    (mine, rounds, alone), (its, *_) = run_ranks(several_optimizers, 2)
    assert torch.equal(mine, its)
    assert rounds == 2
    assert alone[0] == "ValueError"
    assert "pass all optimizers" in alone[1]


#: All of torch.optim that take dense gradients.
KINDS = {
    "ASGD": {}, "Adadelta": {"lr": 1.0}, "Adafactor": {}, "Adagrad": {}, "Adam": {}, "AdamW": {"amsgrad": True},
    "Adamax": {}, "LBFGS": {"max_iter": 3}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9}, "Rprop": {},
    "SGD": {"nesterov": True, "momentum": 0.9},
}  # fmt: skip


def of_a_kind(rank, world_size, kinds):
    """How far a replica goes by itself from the same parameters, and where a round leaves it."""
    found = {}
    for kind, options in kinds.items():
        models = [mlp(), mlp()]
        lone, model = (getattr(torch.optim, kind)(each.parameters(), **({"lr": 0.01} | options)) for each in models)
        handle = nb.compress_updates(models[1], model, "none", min_numel=64)
        for each, optimizer in zip(models, (lone, model), strict=True):

            def closure(each=each, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(each, 0, rank)
                loss.backward()
                return loss

            optimizer.step(closure)
        found[kind] = flat(models[0]) - flat(mlp()), flat(models[1]) - flat(mlp()), handle.step
    return found


def test_any_optimizer_steps_by_itself_and_replicas_take_the_mean():
    answers = run_ranks(of_a_kind, 2, KINDS)
    for kind in KINDS:
        alone = torch.stack([answer[kind][0] for answer in answers])
        assert not torch.equal(alone[0], alone[1])
        for answer in answers:
            _, moved, rounds = answer[kind]
            assert rounds == 1
            assert moved.abs().max() > 1e-4, kind
            torch.testing.assert_close(moved, alone.mean(0), rtol=1e-4, atol=1e-6, msg=kind)


def of_dtype(rank, world_size, dtype):
    model = mlp(dtype)
    optimizer = sgd(model, lr=0.1)
    nb.compress_updates(model, optimizer, "qsgd:bits=8+ef", every=2, min_numel=64)
    train(model, rank, range(6), optimizer, dtype)
    return flat(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    mine, its = run_ranks(of_dtype, 2, dtype)
    assert torch.equal(mine, its)
    assert (mine - flat(mlp(dtype))).abs().max() > 1e-2


def replicas_of_two(rank, world_size):
    """Two replicas of two ranks each: DDP averages gradients inside, narrowband updates between."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = DistributedDataParallel(mlp(), process_group=inside)
    optimizer = adamw(model)
    nb.compress_updates(model, optimizer, "topk:density=0.2+ef", every=3, process_group=between, min_numel=64)
    history = []
    for step in range(6):
        train(model, rank, [step], optimizer)
        history.append(flat(model))
    return history


def test_ddp_inside_a_replica_and_updates_between_replicas():
    a, b, c, d = run_ranks(replicas_of_two, 4)
    for step in range(6):
        assert torch.equal(a[step], b[step])
        assert torch.equal(c[step], d[step])
        assert torch.equal(a[step], c[step]) == (step % 3 == 2)


def removed_after(rank, world_size, steps, averages):
    model, optimizer, handle = begin("none", every=3)
    train(model, rank, range(steps), optimizer)
    with heard() as messages:
        if averages:
            handle.average()
        handle.remove()
        handle.remove()
    return messages


@pytest.mark.parametrize(
    ("steps", "averages", "said"),
    [
        (3, False, None),
        (4, True, None),
        (4, False, "1 optimizer step since the last round stays"),
        (5, False, "2 optimizer steps since the last round stay"),
    ],
)
def test_a_handle_that_is_removed_says_which_steps_are_in_no_round(steps, averages, said):
    first, second = run_ranks(removed_after, 2, steps, averages)
    assert second == []
    assert len(first) == (said is not None)
    assert said is None or said in first[0]


def short_of_memory(rank, world_size, options):
    """A step whose round finds no memory, and the next, which holds the round: steps since the last round after both,
    and whether replicas are equal in the end.
    """
    model, optimizer, handle = begin("none", every=2, **options)
    train(model, rank, range(1), optimizer)
    former = Fragment._here

    def lacks(*_):
        raise MemoryError("no room")

    Fragment._here = lacks
    try:
        error = refusal(lambda: train(model, rank, range(1, 2), optimizer))
    finally:
        Fragment._here = former
    found = [error, handle.steps]
    train(model, rank, range(2, 3), optimizer)
    found.append(handle.steps)
    handle.average()
    return found, flat(model)


@pytest.mark.parametrize("options", [{}, {"overlap": 1}], ids=["waiting", "overlap"])
def test_a_round_that_lacks_memory_is_held_after_the_next_step(options):
    (one, first), (other, second) = run_ranks(short_of_memory, 2, options)
    assert one == other == [("MemoryError", "no room"), 2, 0]
    assert torch.equal(first, second)
