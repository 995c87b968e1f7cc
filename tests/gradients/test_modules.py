"""Gradients that nobody else averages: of plain modules, and of replicas that FSDP2 shards."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import signal
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from narrowband.averaging import flat as flat_module
from narrowband.averaging.flat import local
from tests.gradients.training import (
    LOSSLESS,
    data,
    flat,
    heard,
    loss_of,
    mlp,
    refusal,
    sgd,
    train,
    train_in_two_passes,
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


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)


def compress(model, spec, **options):
    return nb.compress_gradients(model, spec, **{"min_numel": 64, **options})


# ---- plain modules ---------------------------------------------------------------------------------------------------


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
    for _ in range(2):
        model.zero_grad()
        outputs, scale = model(torch.tensor([2]) if rank == 0 else None)
        (outputs.sum() * scale).backward()
        found.append({name for name, p in model.named_parameters() if p.grad is not None})
        found.append([model.table.weight.grad, model.bag.weight.grad])
        model.first.requires_grad_(False)
        model.bag.requires_grad_(False)
    hooks = len(model.scale._backward_hooks or ())
    handle.remove()
    compress(model, "none")
    model.first.weight.requires_grad_(True)
    return found, hooks, refusal(lambda: model(None)[0].sum().backward())


def test_tables_that_a_rank_does_not_use_and_parameters_that_are_frozen_or_thawed():
    (mine, _, _), (its, _, _) = answers = run_ranks(tables, 2)
    for (before, (table, bag), after, (later, none)), hooks, thawed in answers:
        assert len(before) == 7
        assert after == {"table.weight", "out.weight", "out.bias", "scale"}
        assert all(x.is_sparse for x in (table, bag, later))
        assert none is None
        assert hooks == 0  # of an output that is a parameter they would pile up
        assert thawed[0] == "UnsupportedError"
        assert thawed[1].startswith("nothing averages first.weight, which did not require a gradient")
    for at in (0, 1):
        assert torch.equal(mine[1][at].to_dense(), its[1][at].to_dense())
        assert mine[1][at].to_dense().any(1).nonzero().tolist() == [[2]]


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
        assert "got a gradient after its gradient was sent" in twice[1]
        assert broken[1] == "user's"
        for kind, text in later:
            assert kind == "RuntimeError"
            assert "broke off while gradients were on their way" in text


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
        assert said[0][1].startswith("nothing averages 0.weight and ")
        assert kind != "plain" or said[-1][1].startswith("nothing averages 7.weight and 1 more")


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


def copies(rank, world_size):
    """A copy, an average of weights and a saved file of a compressed module, beside a plain module: all trained."""
    model = mlp()
    handle = compress(model, LOSSLESS)
    train(model, rank, range(2))
    with heard() as said:
        twin = copy.deepcopy(model)
        AveragedModel(model).update_parameters(model)
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    for net in (plain, twin, read):
        train(net, rank, range(2, 4))
    alone = torch.equal(flat(twin), flat(plain)) and torch.equal(flat(read), flat(plain))
    again = compress(read, LOSSLESS)  # a copy may have a handle of its own
    train(read, rank, range(4, 5))
    train(model, rank, range(2, 5))
    return said, alone, flat(twin), flat(read), flat(model), (again.step, handle.step)


def test_a_module_is_copied_and_saved_without_its_compression_and_says_so_once():
    mine, its = run_ranks(copies, 2)
    for said, alone, *_, steps in (mine, its):
        assert len(said) == 1
        assert "has no compression: nobody averages its gradients, unless" in said[0]
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
        run_ranks(gone, 2, fresh=True, timeout_s=20.0, grace_s=30.0)
    first, later, end = caught.value.results[0]
    assert first[0] == "RuntimeError"
    assert [kind for kind, _ in later] == ["RuntimeError"] * 2
    assert "stopped at an earlier step" in later[-1][1]
    assert end is None


# ---- replicas that FSDP2 shards --------------------------------------------------------------------------------------


def mesh_of(nodes, shards):
    return init_device_mesh("cpu", (nodes, shards), mesh_dim_names=("nodes", "shards"))


def shard(model, mesh, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(model):
    return torch.cat([p.full_tensor().detach().double().reshape(-1) for p in model.parameters()])


FSDP = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def beside_hsdp(rank, world_size, options, accumulate):
    """Parameters after twelve steps of AdamW: averaged between nodes by narrowband, and by FSDP2 itself."""
    mesh = mesh_of(2, world_size // 2)
    found, steps = [], 0
    for kind in ("ours", "native"):
        model = shard(mlp(), mesh["shards"] if kind == "ours" else mesh, **FSDP[options])
        if kind == "ours":
            handle = compress(model, "none", process_group=mesh["nodes"].get_group())
        optimizer = adamw(model)
        for step in range(12):
            optimizer.zero_grad()
            if accumulate and kind == "ours":
                with handle.no_sync():
                    loss_of(model, 100 + step, rank).backward()
            elif accumulate:
                model.set_requires_gradient_sync(False)
                loss_of(model, 100 + step, rank).backward()
                model.set_requires_gradient_sync(True)
            loss_of(model, step, rank).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found.append(whole(model))
        steps = handle.step
    return found, (found[0] - whole(shard(mlp(), mesh["shards"]))).abs().max().item(), steps


@pytest.mark.parametrize(
    ("ranks", "options", "accumulate"),
    [
        (4, "plain", False),
        (4, "bf16", True),
        *thorough((4, "kept", True), (4, "offload", False), (6, "plain", False), (4, "plain", True)),
    ],
)
def test_without_compression_it_is_what_fsdp2_does_between_nodes(ranks, options, accumulate):
    """To the bit among two nodes: the sum of two shards has one order. With three ranks per node shards are uneven."""
    answers = run_ranks(beside_hsdp, ranks, options, accumulate)
    for (ours, native), moved, steps in answers:
        assert torch.equal(ours, native)
        assert moved > 0.01
        assert steps == 12


def all_inside_of_no_sync(rank, world_size):
    """FSDP2 has reduced nothing; then a pass outside, and its average."""
    mesh = mesh_of(world_size, 1)
    model = shard(mlp(), mesh["shards"])
    handle = compress(model, "none", process_group=mesh["nodes"].get_group())
    said = []
    for step in range(2):  # the second has gradients of the first
        with handle.no_sync():
            loss_of(model, step, rank).backward()
        said.append(refusal(handle.average))
        loss_of(model, step, rank).backward()
    said.append(refusal(handle.average))
    return said, handle.step


def test_where_fsdp2_has_reduced_nothing_there_is_nothing_to_average():
    for (*inside, outside), steps in run_ranks(all_inside_of_no_sync, 2):
        assert outside is None
        assert steps == 3
        for kind, text in inside:
            assert kind == "UnsupportedError"
            assert "run the last backward pass of a step outside of no_sync" in text


def two_passes(rank, world_size):
    """Parameters after steps of two backward passes of one graph each, of which FSDP2 is told which is the last."""
    mesh = mesh_of(2, world_size // 2)
    found = []
    for kind in ("ours", "native"):
        model = shard(mlp(), mesh["shards"] if kind == "ours" else mesh)
        if kind == "ours":
            compress(model, "none", process_group=mesh["nodes"].get_group())
        train_in_two_passes(model, rank, range(6), adamw(model))
        found.append(whole(model))
    return found


def test_a_step_may_have_several_backward_passes_of_which_fsdp2_knows_the_last():
    """What the first pass averaged is averaged again with the second's gradients: equal but for roundings."""
    for ours, native in run_ranks(two_passes, 4):
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)


def sharded(rank, world_size, spec, options):
    mesh = mesh_of(2, world_size // 2)
    model = shard(mlp(), mesh["shards"])
    handle = compress(model, spec, process_group=mesh["nodes"].get_group(), **options)
    optimizer = adamw(model)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, 0, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    plain = mlp()
    flat_handle = compress(plain, spec, **options)
    train(plain, rank, range(20), adamw(plain))
    sent, residual = zip(
        *((each.stats().total.sent_bytes, each.residual_nbytes) for each in (handle, flat_handle)), strict=True
    )
    return whole(model), losses, sent, residual


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("topk:density=0.05+ef", {}),
        ("powersgd:rank=2,min_ratio=1", {}),
        *thorough(("qsgd:bits=4", {}), ("sign+ef", {"small": "fused"}), ("dgc:density=0.05", {})),
    ],
)
def test_shards_learn_are_equal_on_all_nodes_and_send_their_part(spec, options):
    answers = run_ranks(sharded, 4, spec, options)
    for parameters, losses, (sent, all_sent), (residual, whole_residual) in answers:
        assert torch.equal(parameters, answers[0][0])
        assert losses[-1] < 0.9 * losses[0]
        # Of four ranks without shards each sends to three others, or three halves; with them, of half as much, to one.
        assert sent < 0.55 * all_sent
        assert residual <= 0.6 * whole_residual


def with_an_uneven_layer(rank, world_size):
    """Nine rows: five on some ranks, which are enough to be compressed, and four on others, which are not."""
    torch.manual_seed(0)
    mesh = mesh_of(2, 2)
    model = fully_shard(nn.Linear(8, 9, bias=False), mesh=mesh["shards"])
    handle = compress(model, "uniform:bits=8", min_numel=40, process_group=mesh["nodes"].get_group())
    handle.set_layers({"weight": "uniform:bits=2"})
    model(torch.randn(4, 8)).square().sum().backward()
    said = refusal(lambda: handle.set_layers({"heavy": "uniform:bits=2"}))
    return len(model.weight.to_local()), {name: own.spec for name, own in handle.layer_stats().items()}, said


def test_layers_are_set_where_a_shard_is_large_enough():
    for rows, specs, said in run_ranks(with_an_uneven_layer, 4):
        assert specs == ({"weight": "uniform:bits=2"} if rows == 5 else {})
        assert said[0] == "ValueError"


def partly_sharded(rank, world_size):
    mesh = mesh_of(2, 2)
    model = mlp()
    fully_shard(model[0], mesh=mesh["shards"])
    with heard() as said:
        compress(model, "uniform:bits=8", process_group=mesh["nodes"].get_group())
    return [each for each in said if "fully_shard" in each]


def test_what_fsdp2_does_not_shard_is_named_by_one_rank_of_each_group():
    answers = run_ranks(partly_sharded, 4)
    assert [len(said) for said in answers] == [1, 1, 0, 0]
    assert "lie in no module that fully_shard was called with" in answers[0][0]
    assert "0.weight" not in answers[0][0]


def with_a_policy(rank, world_size):
    mesh = mesh_of(2, 2)
    model = shard(mlp(), mesh["shards"])
    policy = nb.LGreCo("topk:density=0.1+ef", ["topk:density=0.05", "topk:density=0.2"], every=3)
    handle = compress(model, policy, process_group=mesh["nodes"].get_group())
    train(model, rank, range(8), adamw(model))
    return sorted(handle.plan.specs()), whole(model), [name for name, p in model.named_parameters() if p.dim() == 2]


def test_policies_plan_for_shards_by_parameter_name():
    answers = run_ranks(with_a_policy, 4)
    for names, parameters, matrices in answers:
        assert set(names) <= set(matrices)
        assert len(names) >= 3
        assert torch.equal(parameters, answers[0][1])


def with_a_plan(rank, world_size, spec):
    """Parameters with a plan for whole parameters, with the part of it that is about this rank, and with its spec."""
    mesh = mesh_of(2, world_size // 2)
    shapes = {name: tuple(p.shape) for name, p in mlp().named_parameters() if p.dim() > 1 and p.numel() >= 64}
    plan = nb.Plan(tuple(nb.adapt.LayerPlan(name, shape, spec, 1.0, None) for name, shape in shapes.items()), "", 2)
    found, own = [], None
    for chosen in (plan, "own", spec):
        model = shard(mlp(), mesh["shards"])
        handle = compress(model, own if chosen == "own" else chosen, process_group=mesh["nodes"].get_group())
        train(model, rank, range(4), sgd(model))
        found.append(whole(model))
        own = handle.plan or own
    return found, {layer.name: layer.shape for layer in own.layers}


@pytest.mark.parametrize("ranks", [4, *thorough(6)])
def test_a_plan_is_for_whole_parameters_or_for_shards(ranks):
    """Of three shards of the last matrix two have few elements."""
    for (planned, owned, plain), shapes in run_ranks(with_a_plan, ranks, "topk:density=0.05+ef"):
        assert torch.equal(planned, plain)
        assert torch.equal(owned, plain)
        assert shapes["3.weight"] in ((16, 40), (11, 40), (10, 40))


def in_tensor_parallel(rank, world_size, spec):
    """Replicas of two ranks that split two matrices by rows and columns, and have a third one as a whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 8))
    begun = copy.deepcopy(model.state_dict())
    parallelize_module(model, mesh["parts"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    compress(model, spec, process_group=mesh["replicas"].get_group())
    train(model, rank // 2, range(8), sgd(model))
    plain = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 8))
    plain.load_state_dict(begun)
    optimizer = sgd(plain)
    for step in range(8):
        optimizer.zero_grad()
        (sum(loss_of(plain, step, replica) for replica in (0, 1)) / 2).backward()
        optimizer.step()
    own = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return own, [p.detach() for p in plain.parameters()]


def test_replicas_that_split_single_matrices_are_averaged_part_by_part():
    for spec, rtol in (("none", 1e-5), ("qsgd:bits=8", 0.05)):
        answers = run_ranks(in_tensor_parallel, 4, spec)
        for own, plain in answers:
            assert all(map(torch.equal, own, answers[0][0]))
            for ours, theirs in zip(own, plain, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 100)


def test_a_policy_is_refused_where_ranks_of_a_replica_have_the_same_layer():
    """Each would choose by its own parts; the layer parted."""
    with pytest.raises(RankError, match=r"a policy chooses specs on each rank .* have 0.weight as a whole"):
        run_ranks(in_tensor_parallel, 4, nb.LGreCo("topk:density=0.1+ef", every=2))


def saved(rank, world_size, steps):
    mesh = mesh_of(world_size // 2, 2)
    model = shard(mlp(), mesh["shards"])
    handle = compress(model, "topk:density=0.1+ef", process_group=mesh["nodes"].get_group())
    optimizer = sgd(model)
    train(model, rank, range(steps), optimizer)
    state = copy.deepcopy(handle.state_dict())
    kept = [local(p).clone() for p in model.parameters()]
    train(model, rank, range(steps, steps + 3), optimizer)
    return state, kept, whole(model)


def resumed(rank, world_size, steps, states, parameters):
    mesh = mesh_of(world_size // 2, 2)
    model = shard(mlp(), mesh["shards"])
    handle = compress(model, "topk:density=0.1+ef", process_group=mesh["nodes"].get_group())
    with torch.no_grad():
        for p, x in zip(model.parameters(), parameters[rank % len(parameters)], strict=True):
            local(p).copy_(x)
    handle.load_state_dict([state for at, state in enumerate(states) if at % 2 == rank % 2])
    loaded = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    train(model, rank, range(steps, steps + 3), sgd(model))
    return whole(model), loaded


@pytest.mark.parametrize("ranks", [4, 6])
def test_a_sharded_run_goes_on_to_the_bit_and_on_another_number_of_nodes(ranks):
    before = run_ranks(saved, 4, 4)
    states = [state for state, *_ in before]
    answers = run_ranks(resumed, ranks, 4, states, [kept for _, kept, _ in before])
    for at, (parameters, loaded) in enumerate(answers):
        assert torch.equal(parameters, answers[0][0])
        if ranks == 4:
            assert torch.equal(parameters, before[at][2])
        for name in states[at % 2]["feedback"]:  # the mean of what all nodes owe is the same
            was = sum(states[other]["feedback"][name].double() for other in (at % 2, at % 2 + 2)) / 2
            now = sum(answers[other][1][name].double() for other in range(at % 2, ranks, 2)) / (ranks // 2)
            torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-7)
            assert loaded[name].any()


def broken_in_one_shard(rank, world_size, spec):
    """Four steps; in the third a gradient of one rank is inf in the first row of a matrix. Averages, and states."""
    mesh = mesh_of(2, world_size // 2)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    model[0].requires_grad_(False)
    shard(model, mesh["shards"])
    handle = compress(model, spec, process_group=mesh["nodes"].get_group())
    optimizer, kept, finite = sgd(model), [], []
    for step in range(4):
        x, _ = data(step, rank)
        y = model(x)
        loss = y.square().mean() + (math.inf * y[0, 0] if step == 2 and rank == 0 else 0)
        optimizer.zero_grad()
        loss.backward()
        finite.append(all(bool(local(p.grad).isfinite().all()) for p in model.parameters() if p.requires_grad))
        kept.append(copy.deepcopy(handle.state_dict()["feedback"]))
        if finite[-1]:
            optimizer.step()
    handle.remove()
    return finite, kept


@pytest.mark.parametrize(("ranks", "spec"), [(4, "topk:density=0.1+ef"), *thorough((6, "topk:density=0.1+ef"))])
def test_where_one_shard_is_not_finite_the_feedback_of_all_stays(ranks, spec):
    """A scaler skips the step on all of them."""
    for finite, (_, before, after, later) in run_ranks(broken_in_one_shard, ranks, spec):
        assert finite == [True, True, False, True]
        assert before.keys() == after.keys() == later.keys() != set()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not all(torch.equal(before[name], later[name]) for name in before)


def refused(rank, world_size):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = mesh_of(2, 2)
    groups = {name: mesh[name].get_group() for name in ("nodes", "shards")}
    found = {
        "native": refusal(lambda: compress(shard(mlp(), mesh), "none", process_group=groups["nodes"])),
        "inside": refusal(lambda: compress(shard(mlp(), mesh["shards"]), "none", process_group=groups["shards"])),
        "everywhere": refusal(lambda: compress(shard(mlp(), mesh["shards"]), "none")),
        "replicate": refusal(lambda: compress(replicate(mlp(), mesh=mesh["nodes"]), "none")),
        "uneven": refusal(
            lambda: compress(
                shard(mlp() if rank < 2 else nn.Sequential(nn.Linear(24, 41)), mesh["shards"]),
                "none",
                process_group=groups["nodes"],
            )
        ),
    }
    dist.barrier()
    return found


def test_meshes_that_do_not_fit_are_named_on_all_ranks():
    for rank, errors in enumerate(run_ranks(refused, 4)):
        for name in ("native", "inside", "everywhere"):
            assert errors[name][0] == "UnsupportedError", name
            assert "train the same replica" in errors[name][1]
        assert str(rank ^ 2) in errors["native"][1]
        assert str(rank ^ 1) in errors["inside"][1]
        assert "Leave replicate() out" in errors["replicate"][1]
        assert errors["uneven"][0] == "DisagreementError"
