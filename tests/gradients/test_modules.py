"""Gradients of plain modules, which nobody else averages."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import warnings
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from narrowband.averaging import flat as flat_module
from tests.gradients.shards import compress, mesh_of, shard, whole
from tests.gradients.training import (
    LOSSLESS,
    Fork,
    adamw,
    data,
    flat,
    heard,
    loss_of,
    mlp,
    refusal,
    sgd,
    train,
    wrap,
)
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough

SPECS = [
    LOSSLESS,
    "topk:density=0.05+ef",
    "qsgd:bits=4",
    *thorough("sign+ef", "powersgd:rank=2,min_ratio=1", "topk:density=0.1+ef21"),
]


def beside_ddp(rank, world_size, spec):
    """Parameters of a module by itself, and of the same in DDP, after each of some steps."""
    found = []
    for model in (mlp(), wrap(mlp())):
        handle = compress(model, spec)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0)
        optimizer = adamw(model)
        train(model, rank, range(6), optimizer)
        found.append((flat(model), handle.step, handle.stats().total.sent_bytes, handle.buckets))
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_a_plain_module_gets_the_averages_that_ddp_would_have(spec):
    for plain, ddp in run_ranks(beside_ddp, 2, spec):
        assert torch.equal(plain[0], ddp[0])
        assert plain[1:3] == ddp[1:3]
        assert sorted(chain(*plain[3])) == sorted(chain(*ddp[3]))


def begins(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8))
    compress(model, "none")
    return torch.cat([x.detach().flatten().float() for x in (*model.parameters(), *model.buffers())])


def test_all_ranks_begin_with_the_first():
    mine, its = run_ranks(begins, 2)
    assert torch.equal(mine, its)


class Branches(nn.Module):
    """A tied matrix, a frozen one, one that a rank alone uses, one that nobody uses, and two outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.tied = nn.Linear(24, 24), nn.Linear(24, 24)
        self.tied.weight = self.body.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.sometimes, self.never = nn.Linear(24, 24), nn.Linear(24, 24)
        self.table = nn.Embedding(10, 24, sparse=True)
        self.head = nn.Linear(24, 8)

    def forward(self, x, sometimes):
        y = self.frozen(self.tied(torch.relu(self.body(x)))) + self.table(torch.arange(len(x)) % 10)
        if sometimes:
            y = self.sometimes(y)
        return {"scores": self.head(y), "more": [y.mean(), 3]}


def branched(rank, world_size, spec):
    model = Branches()
    handle = compress(model, spec)
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(rank))
    outputs = model(x, rank == 0)
    (outputs["scores"].square().mean() + outputs["more"][0]).backward()
    averages = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.requires_grad}
    own = Branches()
    outputs = own(x, rank == 0)
    (outputs["scores"].square().mean() + outputs["more"][0]).backward()
    alone = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in own.named_parameters()
        if p.requires_grad
    }
    return averages, alone, handle.step


@pytest.mark.parametrize("spec", ["none", LOSSLESS])
def test_tied_frozen_sparse_and_unused_parameters(spec):
    answers = run_ranks(branched, 2, spec)
    for averages, _, rounds in answers:
        assert rounds == 1
        for name, average in averages.items():
            torch.testing.assert_close(average, sum(alone[name] for _, alone, _ in answers) / 2)
        assert not averages["never.weight"].any()
        assert averages["sometimes.weight"].any()


def accumulated(rank, world_size, kind):
    found = []
    for way in ("no_sync", "average", "at once"):
        model = mlp()
        handle = compress(model, "topk:density=0.2+ef")
        if way == "no_sync":
            with handle.no_sync():
                loss_of(model, 0, rank).backward()
                before = handle.step
            loss_of(model, 1, rank).backward()
        elif way == "average":
            with handle.no_sync():
                for step in range(2):
                    loss_of(model, step, rank).backward()
                handle.average()  # there may be more passes
                before = handle.step
            handle.average()
        else:
            before = 0
            (loss_of(model, 0, rank) + loss_of(model, 1, rank)).backward()
        found.append((torch.cat([p.grad.flatten() for p in model.parameters()]), before, handle.step))
    return found


def test_gradients_add_up_without_sync_and_are_averaged_once():
    for *ways, (at_once, *_) in run_ranks(accumulated, 2, "plain"):
        for summed, before, after in ways:
            assert (before, after) == (0, 1)
            torch.testing.assert_close(summed, at_once, rtol=1e-5, atol=1e-7)


class Tables(nn.Module):
    """Two tables with sparse gradients, of which a rank may use none, a layer, and a factor that is an output, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.bag = nn.Embedding(9, 24, sparse=True), nn.EmbeddingBag(5, 24, sparse=True)
        self.first, self.out, self.scale = nn.Linear(24, 24), nn.Linear(24, 3), nn.Parameter(torch.ones(()))

    def forward(self, row):
        x = self.first(torch.ones(1, 24))
        if row is not None:
            x = x + self.table(row) + self.bag(row[None])
        return self.out(x), self.scale


def tables(rank, world_size):
    model = Tables()
    handle = compress(model, "topk:density=0.5+ef")
    found = []
    torch.set_warn_always(True)  # also of what an earlier test of this process was warned of
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            outputs, scale = model(torch.tensor([2]) if rank == 0 else None)
            (outputs.sum() * scale).backward()
            found.append({name for name, p in model.named_parameters() if p.grad is not None})
            grads = [model.table.weight.grad, model.bag.weight.grad]
            found.append([None if x is None else (x.is_sparse, x.to_dense()) for x in grads])
            model.first.requires_grad_(False)
            model.bag.requires_grad_(False)
    torch.set_warn_always(False)
    found.append([str(each.message) for each in warned])
    hooks = len(model.scale._backward_hooks or ())
    handle.remove()
    compress(model, "none")
    model.first.weight.requires_grad_(True)
    return found, hooks, refusal(lambda: model(None)[0].sum().backward())


def test_tables_that_a_rank_does_not_use_and_parameters_that_are_frozen_or_thawed():
    (mine, _, _), (its, _, _) = answers = run_ranks(tables, 2)
    for (before, (table, bag), after, (later, none), warned), hooks, thawed in answers:
        assert warned == []
        assert len(before) == 7
        assert after == {"table.weight", "out.weight", "out.bias", "scale"}
        assert all(is_sparse for is_sparse, _ in (table, bag, later))
        assert none is None
        assert hooks == 0  # of an output that is a parameter they would pile up
        assert thawed[0] == "UnsupportedError"
        assert thawed[1].startswith("gradients of first.weight are not averaged: when compression was set up")
    for at in (0, 1):
        assert torch.equal(mine[1][at][1], its[1][at][1])
        assert mine[1][at][1].any(1).nonzero().tolist() == [[2]]


def average_at_the_wrong_time(rank, world_size):
    model = mlp()
    handle = compress(model, "none")
    said = []

    def during(_):
        with contextlib.suppress(RuntimeError):
            handle.average()
            said.append("no error")

    x = torch.randn(4, 24, requires_grad=True)
    x.register_hook(during)
    model(x).sum().backward()
    handle.remove()
    try:
        handle.average()
    except RuntimeError as error:
        said.append(str(error))
    return said, handle.step


def test_averages_at_the_wrong_time_are_errors():
    for said, steps in run_ranks(average_at_the_wrong_time, 2):
        assert ["removed" in text for text in said] == [True]
        assert steps == 1


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise ValueError("user's")


def odd_backwards(rank, world_size):
    """Passes that do not reach parameters, break off, or come twice."""
    model = mlp()
    handle = compress(model, "none")
    x = torch.randn(6, 24, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)  # nothing of the model's
    steps = [handle.step]
    model(x).sum().backward(inputs=[x])
    steps.append(handle.step)

    broken = [refusal(lambda: Breaks.apply(model(x)).sum().backward())]  # before any gradient is there
    train(model, rank, range(2))
    steps.append(handle.step)
    # And one after the last layer's gradients, all of which wait in the one group.
    broken.append(refusal(lambda: model[4:](Breaks.apply(model[:4](x))).sum().backward()))
    train(model, rank, range(2, 4))
    steps.append(handle.step)
    return steps, [error[1] for error in broken], flat(model)


def test_backward_passes_that_end_early_leave_nothing_behind():
    (steps, errors, mine), (*_, its) = run_ranks(odd_backwards, 2)
    assert steps == [0, 0, 2, 4]
    assert errors == ["user's", "user's"]
    assert torch.equal(mine, its)


def many_groups(rank, world_size):
    """Every tensor in a group of its own: what they come to, and a pass that breaks off between two of them."""
    before, flat_module.GROUP_NBYTES = flat_module.GROUP_NBYTES, 1
    try:
        model, plain = mlp(), wrap(mlp())
        handle = compress(model, LOSSLESS)
        compress(plain, LOSSLESS)
        for each in (model, plain):
            train(each, rank, range(3))
        found = [torch.equal(flat(model), flat(plain)), len(handle._groups)]
        shared = Checkpointed(True, shared=True)
        compress(shared, "none")
        found.append(refusal(lambda: train(shared, rank, range(1))))
        x = torch.randn(6, 24)
        found.append(refusal(lambda: model[4:](Breaks.apply(model[:4](x))).sum().backward()))
        found += [refusal(lambda: train(model, rank, range(1))) for _ in range(2)]
        return found
    finally:
        flat_module.GROUP_NBYTES = before


def test_a_pass_that_broke_off_between_two_groups_is_never_gone_on_from():
    for same, groups, twice, broken, *later in run_ranks(many_groups, 2, fresh=True):
        assert same
        assert groups == 10
        assert "got another gradient in the same backward pass" in twice[1]
        assert broken[1] == "user's"
        for kind, text in later:
            assert kind == "RuntimeError"
            assert "ended early while gradients were being exchanged" in text


def anew(rank, world_size, kind):
    """What a step says of parameters that were put in the place of others, and of a new layer; and one step more."""
    model, options = mlp(), {}
    if kind != "plain":
        mesh = mesh_of(world_size, 1)
        model = shard(model, mesh["shards"]) if kind == "layers" else fully_shard(model, mesh=mesh["shards"])
        options["process_group"] = mesh["nodes"].get_group()
    handle = compress(model, LOSSLESS, **options)
    train(model, rank, range(1))
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    said = [refusal(lambda: train(model, rank, range(1, 2)))]
    with handle.no_sync():
        loss_of(model, 1, rank).backward()
    said += [refusal(handle.average)] if kind == "plain" else []
    handle.remove()
    handle = compress(model, LOSSLESS, **options)
    train(model, rank, range(1, 3))
    if kind == "plain":
        model.append(nn.Linear(8, 8))
        said.append(refusal(lambda: train(model, rank, range(3, 4))))
        handle.remove()
        handle = compress(model, LOSSLESS)
        train(model, rank, range(3, 4))
    parameters = flat(model) if kind == "plain" else whole(model)
    return said, parameters, handle.step


@pytest.mark.parametrize(("kind", "steps"), [("plain", 1), ("layers", 2), ("whole", 2)])
def test_parameters_that_are_new_are_an_error_and_compression_can_be_set_up_again(kind, steps):
    (_, mine, _), (_, its, _) = answers = run_ranks(anew, 2, kind)
    assert torch.equal(mine, its)
    for said, _, after in answers:
        assert after == steps
        assert {kind for kind, _ in said} == {"UnsupportedError"}
        assert said[0][1].startswith("gradients of 0.weight and ")
        assert kind != "plain" or said[-1][1].startswith("gradients of 7.weight and 1 more are not averaged")


class Checkpointed(nn.Module):
    def __init__(self, reentrant, shared=False):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.blocks, self.head = nn.Linear(24, 32), nn.ModuleList(), nn.Linear(32, 8)
        one = nn.Linear(32, 32)
        self.blocks.extend([one, one] if shared else [one, nn.Linear(32, 32)])
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(lambda x, b=block: torch.tanh(b(x)), x, use_reentrant=self.reentrant)
        return self.head(x)


@dataclass
class Output:
    loss: torch.Tensor
    parts: dict[str, list[object]]


class WithOutput(Checkpointed):
    """The last layer is checkpointed, and the model's output is a dataclass, which knows itself."""

    def forward(self, x, y):
        x = checkpoint(self.head, checkpoint(self.first, x, use_reentrant=False), use_reentrant=self.reentrant)
        output = Output((x - y).square().mean(), {"parts": [x]})
        output.parts["whole"] = [output]
        return output


class Odd:
    def __init__(self, loss):
        self.loss = loss


class WithOddOutput(WithOutput):
    """What it returns is of a class that nobody looks into."""

    def forward(self, x, y):
        return Odd(super().forward(x, y).loss)


def checkpointed_odd_output(rank, world_size):
    found = []
    for reentrant in (True, False):
        model = WithOddOutput(reentrant)
        model.blocks = nn.ModuleList()
        handle = compress(model, LOSSLESS)
        said = refusal(model(*data(0, rank)).loss.backward)
        model.zero_grad()
        model.reentrant = False
        model(*data(0, rank)).loss.backward()
        found.append((said, handle.step, torch.cat([p.grad.flatten() for p in model.parameters()])))
    return found


def test_a_backward_whose_end_nobody_tells_is_an_error_before_anything_is_averaged():
    for (said, steps, found), (none, as_many, expected) in run_ranks(checkpointed_odd_output, 2):
        assert said[0] == "UnsupportedError"
        assert "return tensors in lists, tuples, dictionaries or dataclasses, or use use_reentrant=False" in said[1]
        assert none is None
        assert (steps, as_many) == (1, 2)
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def checkpointed_output(rank, world_size):
    found = []
    for reentrant in (True, False):
        model = WithOutput(reentrant)
        model.blocks = nn.ModuleList()
        handle = compress(model, "topk:density=0.05+ef")
        optimizer = sgd(model, 0.1)
        for step in range(3):
            model(*data(step, rank)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((flat(model).tolist(), handle.step, handle.stats().total.sent_bytes))
    return found


def test_a_backward_inside_of_backward_is_one_step_whatever_a_model_returns():
    for reentrant, plain in run_ranks(checkpointed_output, 2):
        assert plain[1] == 3
        assert reentrant == plain


def checkpointed(rank, world_size, reentrant):
    found = []
    for model in (Checkpointed(reentrant), wrap(Checkpointed(False))):
        compress(model, LOSSLESS)
        train(model, rank, range(3), sgd(model, 0.1))
        found.append(flat(model))
    shared = Checkpointed(reentrant, shared=True)
    compress(shared, "none", message_nbytes=0)
    return torch.equal(*found), refusal(lambda: train(shared, rank, range(1)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_backward_inside_of_backward(reentrant):
    for same, shared in run_ranks(checkpointed, 2, reentrant):
        assert same
        assert shared is None  # one group: nothing goes before all of it is there


def removed(rank, world_size):
    model = mlp()
    handle = compress(model, "qsgd:bits=4")
    twice = refusal(lambda: compress(model, "none"))
    train(model, rank, range(2))
    handle.remove()
    before = flat(model)
    train(model, rank, range(2, 4))
    alone = flat(model)
    again = compress(model, "none")
    begun = flat(model)
    train(model, rank, range(4, 6))
    del again, handle
    copied = copy.deepcopy(model)
    train(copied, rank, range(6, 7))
    return before, alone, begun, flat(model), twice


def test_without_its_handle_a_module_is_alone_and_can_have_another():
    (before, alone, begun, after, twice), (its_before, its_alone, its_begun, its_after, _) = run_ranks(removed, 2)
    assert torch.equal(before, its_before)
    assert not torch.equal(alone, its_alone)
    assert torch.equal(begun, its_begun)
    assert torch.equal(after, its_after)
    assert twice[0] == "UnsupportedError"
    assert "compressed already" in twice[1]


def around_a_handle(rank, world_size):
    """What is said where a DistributedDataParallel without compression calls a module that has a handle."""
    module = mlp()
    model = wrap(module)
    handle = compress(module, LOSSLESS)
    refused = refusal(lambda: model(torch.ones(1, 24)))
    with model.no_sync():  # it averages nothing here
        train(model, rank, range(2))
    train(module, rank, range(1))
    return refused, handle.step, flat(module)


def test_gradients_that_a_plain_ddp_averages_too_are_an_error():
    answers = run_ranks(around_a_handle, 2)
    for refused, steps, parameters in answers:
        assert refused[0] == "UnsupportedError"
        assert "DistributedDataParallel averages gradients of this model too" in refused[1]
        assert steps == 3
        assert torch.equal(parameters, answers[0][2])


def in_other_orders(rank, world_size):
    """Two models, called in another order on each rank, in one backward pass. No rank uses their second layers."""
    models = [Fork(), Fork()]
    handles = [compress(model, "none") for model in models]
    for step in range(2):
        x, _ = data(step, rank)
        called = list(models) if rank == 0 else models[::-1]
        sum(model(x, both=False).square().mean() for model in called).backward()
    gradients = [torch.cat([p.grad.flatten() for p in model.parameters()]) for model in models]
    return gradients, [handle.step for handle in handles]


def test_models_may_be_called_in_another_order_on_each_rank():
    """Every handle sends what is left at the end of backward before any of them waits."""
    answers = run_ranks(in_other_orders, 2)
    for gradients, steps in answers:
        assert steps == [2, 2]
        assert all(torch.equal(mine, its) for mine, its in zip(gradients, answers[0][0], strict=True))


def removed_between_passes(rank, world_size, kind):
    """Gradients of two models: one loses its handle between two passes that add up, and may get another one."""
    models = [mlp(), mlp()]
    handles = [compress(model, "none") for model in models]
    exact = mlp()

    def backward(step):
        (loss_of(models[0], step, rank) + loss_of(models[1], step, rank)).backward()

    with handles[0].no_sync(), handles[1].no_sync():
        backward(0)
        if kind == "inside":
            handles[0].remove()
    if kind != "inside":
        handles[0].remove()
    if kind == "anew":
        handles[0] = compress(models[0], "none")
    backward(1)
    of_ranks = range(world_size) if kind == "anew" else [rank]
    for own in of_ranks:
        (sum(loss_of(exact, step, own) for step in range(2)) / len(of_ranks)).backward()
    alone = [p.grad.clone() for p in exact.parameters()]
    exact.zero_grad()
    for own in range(world_size):
        (sum(loss_of(exact, step, own) for step in range(2)) / world_size).backward()
    averaged = [p.grad for p in exact.parameters()]
    for model, expected in zip(models, (alone, averaged), strict=True):
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    return handles[0].step, handles[1].step


@pytest.mark.parametrize(("kind", "steps"), [("inside", 0), ("outside", 0), ("anew", 1)])
def test_a_handle_may_be_removed_while_gradients_add_up(kind, steps):
    assert run_ranks(removed_between_passes, 2, kind) == [(steps, 1)] * 2


def copies(rank, world_size):
    """A copy, an average of weights and a saved file of a compressed module, beside a plain module: all trained."""
    model = mlp()
    handle = compress(model, LOSSLESS)
    train(model, rank, range(2))
    with heard() as silence:
        twin = copy.deepcopy(model)
        AveragedModel(model).update_parameters(model)
        train(wrap(copy.deepcopy(model)), rank, range(2, 4))  # DistributedDataParallel averages it
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        plain = mlp()
        plain.load_state_dict(model.state_dict())
        train(plain, rank, range(2, 4))
    assert not silence
    with heard() as said:
        for net in (twin, read):
            train(net, rank, range(2, 4))
    alone = torch.equal(flat(twin), flat(plain)) and torch.equal(flat(read), flat(plain))
    again = compress(read, LOSSLESS)  # a copy may have a handle of its own
    train(read, rank, range(4, 5))
    train(model, rank, range(2, 5))
    return said, alone, flat(twin), flat(read), flat(model), (again.step, handle.step)


def test_a_module_is_copied_and_saved_without_its_compression_and_a_trained_copy_says_so_once():
    mine, its = run_ranks(copies, 2)
    for said, alone, *_, steps in (mine, its):
        assert len(said) == 2
        assert all("has no compression: its gradients are not averaged, unless" in each for each in said)
        assert alone
        assert steps == (1, 5)
    assert [torch.equal(a, b) for a, b in zip(mine[2:5], its[2:5], strict=True)] == [False, True, True]


def gone(rank, world_size):
    model = mlp()
    handle = compress(model, "topk:density=0.1+ef")
    train(model, rank, range(2))
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    first = refusal(lambda: train(model, rank, range(2, 3)))
    later = [refusal(lambda: train(model, rank, range(3, 4))) for _ in range(2)]
    return first, later, refusal(handle.remove)


def test_a_rank_that_goes_away_is_an_error_from_backward():
    with pytest.raises(RankError) as caught:
        run_ranks(gone, 2, fresh=True, grace_s=180.0)
    first, later, end = caught.value.results[0]
    assert first[0] == "RuntimeError"
    assert [kind for kind, _ in later] == ["RuntimeError"] * 2
    assert "stopped at an earlier step" in later[-1][1]
    assert end is None
