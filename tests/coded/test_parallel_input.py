"""What coded data parallelism refuses, and ranks that differ."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from tests.coded.training import INPUTS, OUTPUTS, batch, loss_of, mlp
from tests.gradients.training import refusal
from tests.ranks import RankError, run_ranks


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y):
        return loss_of(self.net(x), y)


def refused(rank, world_size):
    def wrap(*layers, **options):
        return refusal(lambda: nb.CodedDataParallel(nn.Sequential(nn.Linear(2, 2), *layers), **options))

    model = nb.CodedDataParallel(mlp(), 2)
    uneven = nb.CodedDataParallel(mlp(), 2, shares=(2, 2, 1))
    x, y = batch(0, 12)
    frozen = nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.Linear(4, OUTPUTS))
    frozen[1].eval()
    thawed = nb.CodedDataParallel(frozen, 2)
    own_x, own_y = thawed.split(x, y)
    loss_of(thawed(own_x), own_y).backward()  # as long as it is frozen
    thawed.train()
    taken, inner = mlp(), nb.CodedDataParallel(mlp(), 2)
    handle = nb.compress_gradients(taken, "none")
    compressed = refusal(lambda: nb.CodedDataParallel(taken, 2))
    inside = refusal(lambda: nb.compress_gradients(inner.module, "none"))
    handle.remove()
    complex_layer = nn.Linear(2, 2, dtype=torch.complex64)
    return {
        "compressed": compressed,
        "compressed inside": inside,
        "r = 0": wrap(redundancy=0),
        "r = n": wrap(redundancy=3),
        "group": wrap(redundancy=2, group=2),
        "shares": wrap(redundancy=2, shares=(3, 1, 1)),
        "rows with shares": refusal(lambda: uneven(x[:8])),
        "bits": wrap(bits=12),
        "span": wrap(span=-1.0),
        "transport": wrap(transport="pigeon"),
        "batch norm": wrap(nn.BatchNorm1d(2)),
        "sync batch norm": wrap(nn.SyncBatchNorm(2)),
        "woken batch norm": refusal(lambda: thawed(own_x)),
        "sparse": wrap(nn.Embedding(3, 2, sparse=True)),
        "complex": wrap(complex_layer),
        "nothing": refusal(lambda: nb.CodedDataParallel(nn.ReLU())),
        "small batch": refusal(lambda: model.split(x[:2])),
        "small sampler": refusal(lambda: model.sampler(range(9), 2)),
        "odd rows": refusal(lambda: model(x[:5])),
        "unequal": refusal(lambda: model.split(x, y[:4])),
        "scalar": refusal(lambda: nb.CodedDataParallel(Scalar())(x[:4], y[:4])),
        "input": refusal(lambda: model(x[:4].clone().requires_grad_())),
    }


def test_bad_input_is_refused_before_training_with_what_to_do():
    for found in run_ranks(refused, 3):
        kinds = {key: kind for key, (kind, _) in found.items()}
        texts = {key: text for key, (_, text) in found.items()}
        unsupported = {key for key, kind in kinds.items() if kind == "UnsupportedError"}
        assert unsupported == {
            "compressed", "compressed inside",
            "batch norm", "sync batch norm", "woken batch norm", "sparse", "complex", "nothing", "scalar", "input",
        }  # fmt: skip
        assert {kinds[key] for key in kinds.keys() - unsupported} == {"ValueError"}
        assert "remove() on all ranks first" in texts["compressed"]
        assert "Train the module without that wrapper" in texts["compressed inside"]
        assert "redundancy=0 must be at least 1 and less than the number of ranks, 3" in texts["r = 0"]
        assert "redundancy=3 must be at least 1 and less than the number of ranks, 3" in texts["r = n"]
        assert "group=2 must divide the number of ranks, 3, and be at least redundancy=2; use 3" in texts["group"]
        assert "node 0 would do 0.6 of the work of all nodes" in texts["shares"]
        assert "the batch has 8 rows, which are not this rank's part of a mini-batch" in texts["rows with shares"]
        assert "bits=12; expected one of 32, 16, 8" in texts["bits"]
        assert "span=-1.0; expected 'auto' or a positive number" in texts["span"]
        assert "transport='pigeon'; expected one of auto, broadcast, multicast" in texts["transport"]
        for key in ("batch norm", "sync batch norm", "woken batch norm"):
            assert "1 is a " in texts[key]
            assert "SyncBatchNorm does not help" in texts[key]
            assert "Use GroupNorm or LayerNorm, or freeze it with .eval()" in texts[key]
        assert "use sparse=False" in texts["sparse"]
        assert "these parameters are complex: 1.weight, 1.bias" in texts["complex"]
        assert "no parameter that requires a gradient" in texts["nothing"]
        assert "a mini-batch of 2 samples is smaller than the 3 blocks" in texts["small batch"]
        assert "a mini-batch of 2 samples is smaller than the 3 blocks" in texts["small sampler"]
        assert "the batch has 5 rows, which cannot be cut into 2 blocks of equal size" in texts["odd rows"]
        assert "equally many rows, not [4, 12]" in texts["unequal"]
        assert "compute the loss outside of the model" in texts["scalar"]
        assert "an input requires a gradient" in texts["input"]


def broken_states(rank, world_size):
    model = nb.CodedDataParallel(mlp(), 2)
    good = model.get_extra_state()
    wrong = [7, {}, *({**good, name: value} for name in good for value in (None, -200, 1.5))]
    found = [refusal(lambda state=state: model.set_extra_state(state)) for state in wrong]
    assert model.get_extra_state() == good
    model.set_extra_state(good)
    return found


def test_a_state_that_is_broken_is_refused_and_changes_nothing():
    (found, *_) = run_ranks(broken_states, 3)
    kept = [error for error in found if error is not None]
    assert {kind for kind, _ in kept} == {"ValueError"}
    assert len(kept) == len(found)
    assert "it is int" in found[0][1]
    assert "it lacks assignment, exponent, lengths, limit, step" in found[1][1]


def differing(rank, world_size):
    other, torn = mlp(), mlp()
    with torch.no_grad():
        other[0].bias[3] += rank * 1e-7
    if rank == 1:
        torn[4] = nn.Linear(17, OUTPUTS, bias=False)
    return [
        refusal(lambda: nb.CodedDataParallel(other)),
        refusal(lambda: nb.CodedDataParallel(torn)),
        refusal(lambda: nb.CodedDataParallel(mlp(), 1 + rank % 2)),
        refusal(lambda: nb.CodedDataParallel(mlp(), span=10.0 + rank)),
        refusal(lambda: nb.CodedDataParallel(mlp(), shares=(1, 1, 1 + rank / 4))),
    ]


def test_ranks_that_differ_are_told_in_what_before_training():
    for found in run_ranks(differing, 3):
        values, shapes, redundancy, span, shares = (text for _, text in found)
        assert {kind for kind, _ in found} == {"ValueError"}
        assert "ranks 0 and 1 differ in 0.bias: '(17,) torch.float32 True, values" in values
        assert "the same model, to the bit" in values
        assert "ranks 0 and 1 differ in 4.weight, 4.bias" in shapes
        assert "ranks 0 and 1 differ in redundancy: 1 and 2" in redundancy
        assert "ranks 0 and 1 differ in span: 10.0 and 11.0" in span
        assert "ranks 0 and 1 differ in shares: (1, 1, 1.0) and (1, 1, 1.25)" in shares


def out_of_step(rank, world_size, what):
    model = nb.CodedDataParallel(mlp(), 2)
    x, y = batch(0, 12)
    if what == "samples" and rank == 1:
        x, y = x[:11], y[:11]
    if what == "data":
        x = x + (rank == 1) * 1e-3
    x, y = model.split(x, y)
    if what == "no mean over rows":
        weight = torch.arange(1.0, 1.0 + OUTPUTS)
        return refusal(lambda: loss_of(model(x), y, weight=weight).backward())
    return refusal(lambda: loss_of(model(x), y).backward())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("samples", "ranks are not in the same step"),
        ("data", "differ between the ranks that computed it"),
        ("no mean over rows", "class weights, ignore_index"),
    ],
)
def test_ranks_with_other_data_are_found_by_all(what, message):
    for kind, text in run_ranks(out_of_step, 3, what):
        assert kind == "RuntimeError"
        assert message in text
        assert what != "data" or "compute the loss of each sample inside of the model" in text


def frozen_or_thawed(rank, world_size):
    net = mlp()
    net[0].requires_grad_(False)
    model = nb.CodedDataParallel(net, 2)
    x, y = model.split(*batch(0, 12))
    net[0].requires_grad_(True)
    thawed = refusal(lambda: model(x))
    net[0].requires_grad_(False)
    loss_of(model(x), y).backward()
    net[4].bias.requires_grad_(False)
    frozen = refusal(lambda: model(x))
    with torch.no_grad():
        model(x)
    again = nb.CodedDataParallel(model.module, 2)
    again.zero_grad()
    loss_of(again(again.split(*batch(0, 12))[0]), y).backward()
    return thawed, frozen, [name for name, p in net.named_parameters() if p.grad is not None]


def test_parameters_frozen_or_thawed_later_are_named_and_wrapping_anew_helps():
    for thawed, frozen, averaged in run_ranks(frozen_or_thawed, 3):
        assert [kind for kind, _ in (thawed, frozen)] == ["UnsupportedError"] * 2
        assert "requires_grad of 0.weight, 0.bias has changed since the model was wrapped" in thawed[1]
        assert "requires_grad of 4.bias has changed" in frozen[1]
        assert "wrap the model again on all ranks" in frozen[1]
        assert averaged == ["3.weight", "3.bias", "4.weight"]


def without_a_group(rank, world_size):
    dist.destroy_process_group()
    return refusal(lambda: nb.CodedDataParallel(mlp()))


def test_a_process_group_is_needed():
    assert run_ranks(without_a_group, 1, fresh=True)[0][0] == "UnsupportedError"


def again(rank, world_size):
    model = nb.CodedDataParallel(mlp(), 2)
    x, y = model.split(*batch(0, 12))
    loss = loss_of(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_says_so():
    with pytest.raises(RankError, match="backward was called a second time"):
        run_ranks(again, 2 + 1)
