"""Averages in loops of one's own: the same bits as under DDP, and the same rules."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from narrowband.averaging.waiting import Waiting
from tests.digests import GRADIENTS, WITH_OPTIONS, Odd, data
from tests.gradients.training import flat, heard, loss_of, mlp, refusal
from tests.ranks import run_ranks
from tests.thorough import thorough

STEPS = 3
#: Here the layout of DDP's buckets decides in which order numbers are added: the norm that is clipped is one of all
#: buckets, and without feedback PowerSGD multiplies those matrices in one product that lie in one bucket.
BY_BUCKET = ("dgc:density=0.05,momentum=0.5,nesterov=true,clip=1.0", "powersgd:rank=1,ef=false")

#: An all-reduce adds up in an order that depends on buckets where there are more than two ranks.
ADDED_UP = ("none", "fp16", "bf16", "randomk", "powersgd")

CASES = [(spec, {}) for spec in GRADIENTS if spec not in BY_BUCKET]
CASES += [case for case in WITH_OPTIONS if "small" not in case[1]]
#: Each codec, each feedback and each option once.
SOME = ("none", "bf16", "uniform:bits=4,rounding=stochastic+ef", "qsgd:bits=2,norm=l2", "sign+ef",
        "topk:density=0.05,select=sampled+ef", "topk:density=0.04,values=int8+ef", "topk:density=0.05,indices=runs+ef",
        "topk:density=0.05+ef-mixed", "uniform:bits=4+ef21", "threshold:value=0.001+ef", "randomk:density=0.05+ef",
        "lowrank:rank=2+ef", "dgc:density=0.01,warmup_steps=6", "powersgd:rank=2", "powersgd:rank=2,halves=1",
        "topk:density=0.05+ef:decay=0.95")  # fmt: skip
SOME_CASES = [case for case in CASES if case[0] in SOME or case[1]]
CASES_OF_THREE = [case for case in CASES if not case[0].startswith(ADDED_UP) and "warmup_steps" not in case[1]]


def steps_of(spec, options):
    """Some more, beyond a warm-up."""
    return 7 if "warmup_steps" in f"{spec}, {options}" else STEPS


def under_ddp_and_alone(rank, world_size, cases):
    """Whether gradients, states and bytes agree, and how often an average was not the rank's own gradient."""
    found = []
    for spec, options in cases:
        plain = Odd()
        model = DDP(Odd(), find_unused_parameters=True)
        handle = nb.compress_gradients(model, spec, min_numel=200, seed=7, **options)
        averager = nb.Averager(plain, spec, min_numel=200, seed=7, **options)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.02) for net in (model, plain)]
        equal, averaged = True, 0
        for step in range(steps_of(spec, options)):
            x, y = data(step, rank)
            for net, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                (net(x) - y).square().mean().backward()
            own = plain.head.weight.grad.clone()
            averager.average()
            averaged += not torch.equal(own, plain.head.weight.grad)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                if p.grad is not None:
                    equal &= torch.equal(p.grad, q.grad)
            for optimizer in optimizers:
                optimizer.step()
        one, other = handle.state_dict()["feedback"], averager.state_dict()["feedback"]
        equal_state = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        nbytes = handle.stats().total.sent_bytes == averager.stats().total.sent_bytes
        found.append((equal, equal_state, nbytes, averaged))
        handle.remove()
        averager.remove()
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, SOME_CASES), *thorough((2, [case for case in CASES if case not in SOME_CASES]), (3, CASES_OF_THREE))],
    ids=["2", "2 more", "3"],
)
def test_bits_states_and_bytes_are_those_under_ddp(world_size, cases):
    ranks = run_ranks(under_ddp_and_alone, world_size, cases, timeout_s=240.0)
    found = {str(case): set(of_case) for case, *of_case in zip(cases, *ranks, strict=True)}
    assert found == {str(case): {(True, True, True, steps_of(*case))} for case in cases}


def resumed(rank, world_size):
    """Parameters of a run of six steps, and of one that is saved after three and goes on in a new averager."""

    def train(model, averager, steps):
        for step in steps:
            model.zero_grad()
            loss_of(model, step, rank).backward()
            averager.average()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.05)

    whole, parts = mlp(), mlp()
    train(whole, nb.Averager(whole, "topk:density=0.1+ef", min_numel=100), range(6))
    first = nb.Averager(parts.named_parameters(), "topk:density=0.1+ef", min_numel=100)
    train(parts, first, range(3))
    state = first.state_dict()
    second = nb.Averager(dict(parts.named_parameters()), "topk:density=0.1+ef", min_numel=100)
    second.load_state_dict(state)
    train(parts, second, range(3, 6))
    return torch.equal(flat(whole), flat(parts)), second.step


def test_a_run_that_is_resumed_goes_on_to_the_bit():
    # Without a module there are no norms to tell, and here a norm's vectors are small by their dimension anyway.
    assert run_ranks(resumed, 2) == [(True, 6)] * 2


def broken_gradient(rank, world_size):
    model = mlp()
    averager = nb.Averager(model, "topk:density=0.1+ef", min_numel=100)
    loss_of(model, 0, rank).backward()
    averager.average()
    before = {key: value.clone() for key, value in averager.state_dict()["feedback"].items()}
    model.zero_grad()
    loss_of(model, 1, rank).backward()
    if rank:
        model[0].weight.grad[3, 3] = torch.inf
    averager.average()
    after = averager.state_dict()["feedback"]
    seen = not bool(model[0].weight.grad.isfinite().all())
    return seen, all(torch.equal(before[key], after[key]) for key in before), averager.stats().total.skipped


def test_a_step_that_is_not_finite_is_seen_by_all_and_changes_no_residual():
    assert run_ranks(broken_gradient, 2) == [(True, True, 1)] * 2


def other_gradients(rank, world_size):
    """Averages of a sparse and a complex gradient, and of one that only rank 0 has."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(9, 4, sparse=True),
            "wave": nn.Linear(4, 4, dtype=torch.complex64),
            "out": nn.Linear(4, 3),
        }
    )
    averager = nb.Averager(model, "qsgd:bits=8", min_numel=1)
    loss = (
        model["table"](torch.tensor([rank, 5])).sum() + model["wave"](torch.ones(4, dtype=torch.complex64)).abs().sum()
    )
    if rank == 0:
        loss = loss + model["out"](torch.ones(4)).sum()
    loss.backward()
    averager.average()
    table = model["table"].weight.grad.to_dense()
    return table[:, 0].tolist(), model["wave"].weight.grad, model["out"].bias.grad.tolist()


def conjugates(rank, world_size, how):
    """A complex parameter whose gradient autograd leaves as a conjugate that it has not carried out; and the mean."""
    w = nn.Parameter(torch.ones(3, 4, dtype=torch.complex64))
    parts = [torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    module = nn.ParameterDict({"w": w})
    if how == "averager":
        handle = nb.Averager(module, "qsgd:bits=4", min_numel=4)
    else:
        handle = nb.compress_gradients(module, "qsgd:bits=4", min_numel=4)
    (w.conj() * parts[rank]).sum().real.backward()
    if how == "averager":
        assert w.grad.is_conj()
        handle.average()
    return w.grad.resolve_conj(), sum(parts).resolve_conj() / 2


def copied(rank, world_size):
    model = nn.Linear(8, 8)
    handles = nb.Averager(model, "qsgd:bits=4", min_numel=8), nb.compress_gradients(nn.Linear(8, 8), "none")
    return [refusal(lambda h=h, way=way: way(h)) for h in handles for way in (copy.deepcopy, pickle.dumps)]


def test_copies_and_pickles_of_handles_are_refused_in_words():
    for errors in run_ranks(copied, 1):
        assert len(errors) == 4
        for kind, text in errors:
            assert kind == "TypeError"
            assert "belongs to one process and its process group" in text
            assert "handle.state_dict()" in text


def expanded(rank, world_size):
    w, v = nn.Parameter(torch.ones(30, 40)), nn.Parameter(torch.ones(7))
    averager = nb.Averager({"w": w, "v": v}, "uniform:bits=8", min_numel=64)
    for _ in range(2):
        w.grad, v.grad = torch.full((30, 1), rank + 1.0).expand(30, 40), torch.tensor(rank + 1.0).expand(7)
        averager.average()
    return w.grad, v.grad


def test_gradients_whose_elements_lie_in_the_same_memory_are_averaged():
    for w, v in run_ranks(expanded, 2):
        torch.testing.assert_close(w, torch.full((30, 40), 1.5))
        torch.testing.assert_close(v, torch.full((7,), 1.5))


@pytest.mark.parametrize("how", ["averager", "compress_gradients"])
def test_gradients_that_are_conjugates_are_averaged(how):
    for got, expected in run_ranks(conjugates, 2, how):
        torch.testing.assert_close(got, expected)


def test_sparse_complex_and_lacking_gradients_are_averaged():
    (table, wave, bias), other = run_ranks(other_gradients, 2)
    assert table == other[0] == [0.5, 0.5, 0, 0, 0, 1.0, 0, 0, 0]
    assert torch.equal(wave, other[1])
    assert wave.is_complex()
    assert bias == other[2] == [0.5] * 3


def shared_values(rank, world_size):
    """A sparse gradient whose values are memory of somebody else's, as an embedding's are of its output's gradient."""
    table = nn.Embedding(9, 4, sparse=True)
    averager = nb.Averager(table, "none")
    others = torch.full((3, 4), rank + 1.0)
    at = torch.tensor([[0, 2, 4 + rank]])
    table.weight.grad = torch.sparse_coo_tensor(at, others, (9, 4))
    assert table.weight.grad._values().data_ptr() == others.data_ptr()
    averager.average()
    return others, table.weight.grad.to_dense()


def test_averaging_a_sparse_gradient_leaves_the_memory_of_others_alone():
    for rank, (others, average) in enumerate(run_ranks(shared_values, 2)):
        assert torch.equal(others, torch.full((3, 4), rank + 1.0))
        assert average[:, 0].tolist() == [1.5, 0.0, 1.5, 0.0, 0.5, 1.0, 0.0, 0.0, 0.0]


def lacked(rank, world_size, by_module):
    """Only rank 0 has gradients of the tables, which are sparse."""
    model = nn.ModuleDict(
        {"table": nn.Embedding(9, 4, sparse=True), "bag": nn.EmbeddingBag(5, 2, sparse=True), "out": nn.Linear(4, 3)}
    )
    averager = nb.Averager(model if by_module else model.named_parameters(), "topk:density=0.5+ef", min_numel=1)
    loss = model["out"](torch.ones(4)).sum()
    if rank == 0:
        loss = loss + model["table"](torch.tensor([2, 5])).sum() + model["bag"](torch.tensor([[1, 1]])).sum()
    loss.backward()
    if not by_module:
        return refusal(averager.average)
    averager.average()
    averages = [model[name].weight.grad for name in ("table", "bag")]
    return [x.is_sparse for x in averages], [x.to_dense()[:, 0].tolist() for x in averages]


def test_a_sparse_gradient_that_a_rank_lacks_counts_as_zeros():
    averages = [[0, 0, 0.5, 0, 0, 0.5, 0, 0, 0], [0, 0.5, 0, 0, 0]]
    assert run_ranks(lacked, 2, True) == [([True, True], averages)] * 2


def test_without_its_module_a_sparse_gradient_that_a_rank_lacks_is_an_error():
    for kind, text in run_ranks(lacked, 2, False):
        assert kind == "DisagreementError"
        assert "gradient of 'table.weight' (sparse" in text
        assert "nothing on rank 1" in text


def frozen_later(rank, world_size):
    """Freeze a layer of a model and a table; thaw what was frozen when it was set up."""
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "table": nn.Embedding(9, 8, sparse=True), "last": nn.Linear(8, 8)})
    averager = nb.Averager(model, "topk:density=0.5+ef", min_numel=1)
    found = []
    for _ in range(2):
        model.zero_grad()
        model["last"](model["first"](torch.ones(8) + model["table"](torch.tensor(rank)))).sum().backward()
        averager.average()
        found.append({name for name, p in model.named_parameters() if p.grad is not None})
        model["first"].requires_grad_(False)
        model["table"].requires_grad_(False)
    averager.remove()
    averager = nb.Averager(model, "qsgd:bits=4", min_numel=1)
    model["first"].bias.requires_grad_(True)
    return found, refusal(averager.average)


def test_parameters_frozen_later_get_no_gradient_and_those_thawed_are_an_error():
    for (before, after), thawed in run_ranks(frozen_later, 2):
        assert len(before) == 5
        assert after == {"last.weight", "last.bias"}
        assert thawed[0] == "UnsupportedError"
        assert thawed[1].startswith("gradients of first.bias are not averaged: when compression was set up")
        assert "remove()" in thawed[1]


def anew(rank, world_size, given):
    """Parameters that are replaced, and a layer that is added: what the averager says, and what it has averaged."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def make():
        return nb.Averager(model if given == "module" else model.named_parameters(), "none", min_numel=1)

    averager = make()
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    said = [refusal(averager.average)]
    averager.remove()
    averager = make()
    model.append(nn.Linear(8, 8))
    del model[0]
    said.append(refusal(averager.average))
    return said, averager.step


def test_parameters_that_are_new_in_a_module_are_an_error():
    for (replaced, added), steps in run_ranks(anew, 2, "module"):
        assert steps == 0
        assert replaced[0] == added[0] == "UnsupportedError"
        assert replaced[1].startswith("gradients of 0.weight and 3 more are not averaged")
        assert added[1].startswith("gradients of 1.weight and 1 more are not averaged")
    assert run_ranks(anew, 2, "parameters") == [([None, None], 1)] * 2  # nobody can know of others


def too_early(rank, world_size):
    """What is said of averages before the first backward; and of one after it, where this rank lacks some gradients."""
    said = []
    for early in (True, False):
        model = mlp()
        averager = nb.Averager(model, "none", min_numel=64)
        with heard() as messages:
            for step in range(2):
                model.zero_grad()
                loss = loss_of(model, step, rank)
                for when in (True, False):
                    if when is early:
                        averager.average()
                    if when:
                        loss.backward()
                        model[0].weight.grad = None
        said.append(messages)
    return said


def test_an_average_before_the_first_backward_is_said_once():
    (early, after), of_second = run_ranks(too_early, 2)
    (message,) = early
    assert message.startswith("average() found no gradient, so it has averaged nothing but zeros.")
    assert after == []
    assert of_second == [[], []]


def heard_of_parameters(rank, world_size):
    """What is said at the first two averages, by how the ranks' parameters came about."""

    def drawn(model):
        for p in model.parameters():
            nn.init.normal_(p)

    def loaded_later(model):
        model.load_state_dict(mlp().state_dict())

    def one_element_differs(model):
        model[3].bias.data[-1] += 1e-6 * rank

    def frozen_differs(model):
        model[0].weight.data += rank

    said = {}
    for change in (drawn, loaded_later, one_element_differs, frozen_differs):
        model = mlp()
        torch.manual_seed(rank)
        if change is loaded_later:
            drawn(model)
        model[0].weight.requires_grad_(change is not frozen_differs)
        averager = nb.Averager(model, "qsgd:bits=4", min_numel=64)
        change(model)
        with heard() as messages:
            for step in range(2):
                loss_of(model, step, rank).backward()
                averager.average()
        said[change.__name__] = messages
    return said


def test_ranks_that_begin_with_other_parameters_are_told_at_the_first_average():
    said, *others = run_ranks(heard_of_parameters, 3)
    assert not any(messages for of_rank in others for messages in of_rank.values())
    (drawn,), (one,) = said.pop("drawn"), said.pop("one_element_differs")
    assert said == {"loaded_later": [], "frozen_differs": []}
    assert drawn.startswith("ranks have different parameters: 0.weight, 0.bias, 1.weight and 7 others. They get")
    assert one.startswith("ranks have different parameters: 3.bias. They get the same averages, so they stay different")


def loops(rank):
    """Name → a training loop of five steps, given model, averager and step."""
    others = []

    def plain(model, averager, optimizer, step):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        averager.average()
        optimizer.step()

    def accumulated(model, averager, optimizer, step):
        for part in range(4):
            loss_of(model, 10 * step + part, rank).backward()
        plain(model, averager, optimizer, step)

    def by_another(model, averager, optimizer, step):
        if step == 0:
            others.append(nb.Averager(model[3].named_parameters(), "qsgd:bits=4", min_numel=64))
        plain(model, others[0], optimizer, step)

    def often_with_one_average(model, averager, optimizer, step):
        plain(model, averager, optimizer, step)
        for _ in range(4):
            optimizer.step()

    def in_a_closure(model, averager, optimizer, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            averager.average()
            return loss

        optimizer.step(closure)

    def of_zeros(model, averager, optimizer, step):
        plain(model, averager, optimizer, step)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()

    def two_alone(model, averager, optimizer, step):
        for part in range(3):
            loss_of(model, 10 * step + part, rank).backward()
            if part == 0:
                averager.average()
            optimizer.step()
            optimizer.zero_grad()

    def of_another(model, averager, optimizer, step):
        other = nn.Linear(4, 4)
        alone = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(4):
            other(torch.ones(4)).sum().backward()
            alone.step()

    def paused(model, averager, optimizer, step):
        averager.pause()
        loss_of(model, step, rank).backward()
        optimizer.step()

    def removed(model, averager, optimizer, step):
        averager.remove()
        loss_of(model, step, rank).backward()
        optimizer.step()

    def forgotten(model, averager, optimizer, step):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()

    def forgotten_in_a_closure(model, averager, optimizer, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            return loss

        optimizer.step(closure)

    def forgotten_until_after_the_step(model, averager, optimizer, step):
        forgotten(model, averager, optimizer, step)
        averager.average()

    def forgotten_later(model, averager, optimizer, step):
        (plain if step < 2 else forgotten)(model, averager, optimizer, step)

    return {name: loop for name, loop in locals().items() if callable(loop)}


def heard_of_forgotten_averages(rank, world_size):
    said = {}
    for name, loop in loops(rank).items():
        model = mlp()
        averager = nb.Averager(model, "topk:density=0.1+ef", min_numel=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with heard() as messages:
            for step in range(5):
                loop(model, averager, optimizer, step)
        said[name] = [message for message in messages if "not averaged" in message]
    return said


def test_a_forgotten_average_is_said_once_and_nothing_is_said_of_loops_that_average():
    said, of_second = run_ranks(heard_of_forgotten_averages, 2)
    assert not any(of_second.values())
    assert len(said) == 14
    for name, messages in said.items():
        assert len(messages) == name.startswith("forgotten"), (name, messages)
    (message,) = said["forgotten"]
    assert message.startswith("SGD has made 3 steps in a row with gradients that were not averaged, so replicas become")
    assert "call average() between backward() and step(), on all ranks" in message
    (message,) = said["forgotten_until_after_the_step"]
    assert message.startswith("average() was called with gradients that an optimizer has stepped with already.")


def layers_that_exclude_each_other(rank, world_size):
    said = []
    for at_once in (True, False):
        averager = nb.Averager(mlp(), "topk:density=0.1+ef", min_numel=100)
        specs = {"0.weight": "powersgd:rank=2,iterations=2", "3.weight": "powersgd:rank=3"}
        parts = [specs] if at_once else [{name: spec} for name, spec in specs.items()]
        said += [refusal(lambda a=averager, s=part: a.set_layers(s)) for part in parts]
        said.append(averager.state_dict()["layers"])
    averager.set_layers({"3.weight": "powersgd:rank=3,iterations=2"})  # ranks may differ
    return said


def test_settings_that_exclude_each_other_are_refused_at_once_as_one_by_one():
    for at_once, nothing, first, second, one in run_ranks(layers_that_exclude_each_other, 2):
        assert at_once == second
        assert at_once[0] == "ValueError"
        assert "these settings differ too much to share it" in at_once[1]
        assert (nothing, first, list(one)) == ({}, None, ["0.weight"])


def shards_apart(rank, world_size):
    """Averages over the ranks that hold different shards of one replica, and over those that hold the same."""
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("nodes", "shards"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["shards"])
    mixed = [refusal(lambda what=what: nb.Averager(what, "none")) for what in (model, dict(model.named_parameters()))]
    model(torch.ones(1, 8)).sum().backward()
    before = model.weight.grad.full_tensor()
    nb.Averager(model, "none", process_group=mesh["nodes"].get_group()).average()
    return mixed, torch.equal(before, model.weight.grad.full_tensor())


def mistaken_beside_shards(rank, world_size):
    """What is heard of a mistake on one rank, where ranks share a replica and each averages alone."""
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("nodes", "shards"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["shards"])
    group = mesh["nodes"].get_group()
    return refusal(lambda: nb.Averager(model, "zip" if rank == 1 else "none", process_group=group))


def test_a_mistake_of_one_rank_is_told_to_those_that_hold_other_shards():
    told, own = run_ranks(mistaken_beside_shards, 2)
    assert own[0] == "ValueError"
    assert told[0] == "DisagreementError"
    assert "unknown codec 'zip'" in told[1]


def test_different_shards_are_never_averaged():
    for mixed, same in run_ranks(shards_apart, 2):
        assert same
        for kind, text in mixed:
            assert kind == "UnsupportedError"
            assert "train the same replica" in text


def refusals(rank, world_size):
    model = mlp()
    frozen = mlp().requires_grad_(False)
    first, second = nn.Linear(4, 3), nn.Linear(5, 2, bias=False)
    compressed = mlp()
    handle = nb.compress_gradients(compressed, "qsgd:bits=4")
    found = [
        refusal(lambda each=each: nb.Averager(each, "none"))
        for each in (DDP(mlp()), nn.Sequential(DDP(mlp())), compressed)
    ]
    handle.remove()
    nb.Averager(compressed, "none").remove()
    return [
        *found,
        refusal(lambda: nb.Averager(3, "qsgd:bits=4")),
        refusal(lambda: nb.Averager([torch.ones(3)], "qsgd:bits=4")),
        refusal(lambda: nb.Averager(frozen, "qsgd:bits=4")),
        refusal(lambda: nb.Averager(model, "qsgd:bits=4" if rank else "qsgd:bits=2")),
        refusal(lambda: nb.Averager(model, "qsgd:bits=4+aq-sgd")),
        refusal(lambda: nb.Averager([*first.named_parameters(), *second.named_parameters()], "none")),
        refusal(lambda: nb.Averager(nn.Linear(4, 3, dtype=torch.bfloat16 if rank else torch.float32), "none")),
    ]


def test_what_cannot_be_averaged_is_refused_with_what_to_do():
    for found in run_ranks(refusals, 2):
        kinds = [kind for kind, _ in found]
        assert kinds[:3] == ["UnsupportedError"] * 3
        assert "the model is a DistributedDataParallel, which averages gradients with ranks [" in found[0][1]
        assert "0 is a DistributedDataParallel" in found[1][1]
        assert "has a handle of compress_gradients already" in found[2][1]
        del found[:3], kinds[:3]
        assert kinds == [
            "TypeError", "TypeError", "ValueError", "DisagreementError", "UnsupportedError", "ValueError",
            "DisagreementError",
        ]  # fmt: skip
        assert "pass the model" in found[0][1]
        assert "no parameter requires a gradient" in found[2][1]
        assert "'qsgd:bits=2'" in found[3][1] or "qsgd:bits=2" in found[3][1]
        assert "the same name: weight; " in found[5][1]
        assert "torch.bfloat16, small on rank 1" in found[6][1]


def players(rank, world_size, separate):
    """What is said where two players take turns, and each pass reaches both; and then where one optimizer has both."""
    first, second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    named = [("first", first.weight), ("second", second.weight)]
    optimizers = [torch.optim.SGD([p], lr=0.1) for _, p in named]
    both = torch.optim.SGD([p for _, p in named], lr=0.1)
    with heard() as said:
        averagers = [nb.Averager([pair] if separate else named, "topk:density=0.1+ef") for pair in named]
        for turn in range(4):
            at = turn % 2
            optimizers[at].zero_grad()
            second(first(torch.ones(2, 32))).square().sum().backward()
            averagers[at if separate else 0].average()
            optimizers[at].step()
        alone = nb.Averager(named, "topk:density=0.1+ef")
        for _ in range(3):
            both.zero_grad()
            second(first(torch.ones(2, 32))).square().sum().backward()
            alone.average()
            both.step()
    return said


@pytest.mark.parametrize("separate", [False, True])
def test_players_that_share_an_averager_are_warned(separate):
    said, other = run_ranks(players, 2, separate)
    assert other == []
    assert [message.split(" were ")[0] for message in said] == (
        [] if separate else ["averages of 1 of 2 parameters (second)"]
    )


def steps_heard(rank, world_size):
    """How many steps an averager is told of: two with it, and two after it was removed."""
    model = mlp()
    optimizer, averager = torch.optim.SGD(model.parameters(), lr=0.1), nb.Averager(model, "topk:density=0.1+ef")
    with mock.patch.object(Waiting, "after_step") as after_step:
        for step in range(4):
            if step == 2:
                averager.remove()
            optimizer.step()
        return after_step.call_count


def test_a_removed_averager_is_told_of_no_step():
    assert run_ranks(steps_heard, 2, fresh=True) == [2, 2]


def frozen_on_one(rank, world_size, averager):
    """What a step says in which one rank has frozen a layer, and so would not take the average that the other takes."""
    model = mlp()
    handle = nb.Averager(model, "qsgd:bits=4") if averager else nb.compress_gradients(model, "qsgd:bits=4")
    assert handle is not None

    def step():
        loss_of(model, 0, rank).backward()
        if averager:
            handle.average()

    step()
    model[0].weight.requires_grad_(rank != 0)
    return refusal(step)


@pytest.mark.parametrize("averager", [True, False])
def test_what_only_some_ranks_have_frozen_is_an_error(averager):
    for kind, text in run_ranks(frozen_on_one, 2, averager):
        assert kind == "DisagreementError"
        assert "training of '0.weight' (frozen on rank 0; nothing on rank 1)" in text
