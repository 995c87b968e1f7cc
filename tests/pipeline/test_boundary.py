"""A boundary in one process: what it does to activations and gradients, and what it leaves alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from tests.thorough import thorough


def model(boundary):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.GELU(), boundary, nn.Linear(30, 5))


def step(net, seed, samples=None):
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
    boundary = net[2]
    if samples is not None:
        boundary.samples = samples
    net.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in net.parameters()]


def test_without_compression_nothing_changes():
    plain, own = model(nn.Identity()), model(nb.Boundary())
    for seed in range(3):
        (loss, gradients), (own_loss, own_gradients) = step(plain, seed), step(own, seed)
        assert torch.equal(loss, own_loss)
        assert all(map(torch.equal, gradients, own_gradients))


def test_activation_and_gradient_are_what_the_codec_makes_of_them():
    boundary = nb.Boundary("topk:density=0.2,scope=sample", "uniform:bits=4")
    x = torch.randn(6, 40, requires_grad=True)
    y = boundary(x)
    assert torch.equal(y, nb.codec("topk:density=0.2,scope=sample").roundtrip(x))
    assert ((y != 0).sum(1) == 8).all()
    gradient = torch.randn(6, 40)
    y.backward(gradient)
    assert torch.equal(x.grad, nb.codec("uniform:bits=4").roundtrip(gradient))
    stats = boundary.stats()
    assert stats["forward"].sent_bytes == nb.codec("topk:density=0.2,scope=sample").payload_nbytes((6, 40))
    assert stats["backward"].sent_bytes == nb.codec("uniform:bits=4").payload_nbytes((6, 40))
    assert stats["backward"].raw_bytes == 960


def test_several_tensors_go_side_by_side_and_what_no_codec_takes_goes_as_it_is():
    boundary = nb.Boundary("qsgd:bits=2+ef", "none")
    x, mask, double = torch.randn(4, 8, requires_grad=True), torch.arange(4), torch.randn(3, dtype=torch.float64)
    alone = nb.Boundary("qsgd:bits=2+ef", "none")
    for _ in range(3):
        y, kept, same, z = boundary(x, mask, double, x * 3)
        assert kept is mask
        assert same is double
        assert torch.equal(y, alone(x))  # a second tensor has buffers and random numbers of its own
        assert not torch.equal(z, y * 3)
    (y.sum() + z.sum()).backward()
    assert torch.equal(x.grad, torch.full((4, 8), 4.0))


def test_boundaries_draw_different_numbers():
    x = torch.randn(50, 50)
    first, again, other, seeded = (
        nb.Boundary("qsgd:bits=2", index=i, seed=s) for i, s in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    y = first(x)
    assert torch.equal(again(x), y)
    assert not torch.equal(other(x), y)
    assert not torch.equal(seeded(x), y)
    assert not torch.equal(first(x), y)  # nor are those of the next message the same
    in_two = nb.Boundary("qsgd:bits=2", microbatches=2)
    assert torch.equal(in_two(x), y)
    assert not torch.equal(in_two(x), y)  # of the same step


def test_evaluation_with_and_without():
    boundary = nb.Boundary("topk:density=0.1+ef", "none")
    x = torch.randn(10, 20)
    for _ in range(3):
        boundary(x)
    before = {k: v.clone() for k, v in boundary.get_extra_state()["channels"][0][0]["state"].items()}
    boundary.eval()
    assert (boundary(x) != 0).sum() == 20
    boundary.compress_in_eval = False
    assert boundary(x) is x
    boundary.compress_in_eval = True
    assert (boundary(x) != 0).sum() == 20
    after = boundary.get_extra_state()["channels"][0][0]["state"]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def by_file(first, second, folder):
    torch.save(first.state_dict(), folder / "state.pt")
    second.load_state_dict(torch.load(folder / "state.pt", weights_only=True))


def by_dcp(first, second, folder):
    """It loads into a state that a new model has, in which there are no buffers yet."""
    dcp.save(get_model_state_dict(first), checkpoint_id=folder, no_dist=True)
    state = get_model_state_dict(second)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(second, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("moved", [by_file, by_dcp])
@pytest.mark.parametrize("spec", ["topk:density=0.2+ef", "topk:density=0.2+ef21", "qsgd:bits=3+aq-sgd", "qsgd:bits=3"])
def test_a_model_resumes_to_the_bit_from_its_state_dict(spec, moved, tmp_path):
    ids = [torch.arange(8) + 8 * (k % 2) for k in range(8)]
    whole, first = (model(nb.Boundary(spec, "qsgd:bits=4", microbatches=2)) for _ in range(2))
    expected = [step(whole, k, ids[k]) for k in range(8)]
    for k in range(5):
        step(first, k, ids[k])
    second = model(nb.Boundary(spec, "qsgd:bits=4", microbatches=2))
    moved(first, second, tmp_path)
    for k in range(5, 8):
        loss, gradients = step(second, k, ids[k])
        assert torch.equal(loss, expected[k][0])
        assert all(map(torch.equal, gradients, expected[k][1]))


@pytest.mark.parametrize("spec", ["topk:density=0.2+ef", "topk:density=0.2+ef21", "topk:density=0.2+aq-sgd"])
def test_an_early_state_makes_buffers_of_tensors_that_came_later_empty_again(spec):
    boundary = nb.Boundary(spec, "none")
    early = boundary.state_dict()
    x, y = torch.randn(4, 50), torch.randn(4, 60)
    run = []
    for _ in range(2):
        for _ in range(3):
            boundary.samples = torch.arange(4)
            run.append(boundary(x, y))
        boundary.load_state_dict(early)
    for first, again in zip(run[:3], run[3:], strict=True):
        assert all(map(torch.equal, first, again))
    assert boundary.stats()["forward"].messages == 12


def test_warm_up_is_counted_in_steps():
    boundary = nb.Boundary("topk:density=0.1", "none", warmup_steps=2, microbatches=3)
    x = torch.randn(10, 10)
    assert [torch.equal(boundary(x), x) for _ in range(9)] == [True] * 6 + [False] * 3


def test_warm_up_is_counted_in_epochs():
    boundary = nb.Boundary("topk:density=0.1", "none", warmup_epochs=2)
    x = torch.randn(10, 10)
    with pytest.raises(ValueError, match=r"warmup_epochs=2 is set, .*: call set_epoch\(epoch\)"):
        boundary(x)
    exact = []
    for epoch in range(4):
        boundary.set_epoch(epoch)
        exact += [torch.equal(y, x) for y in (boundary(x), *boundary(x, x))]  # a second tensor comes later
    assert exact == [True] * 6 + [False] * 6
    with pytest.raises(ValueError, match="give one of them"):
        nb.Boundary(warmup_epochs=1, warmup_steps=1)
    with pytest.raises(ValueError, match="epoch=-1"):
        boundary.set_epoch(-1)


def test_seeds_and_epochs_in_numpys_numbers_are_those_of_python():
    found = []
    for kind in (np.int64, int):
        boundary = nb.Boundary("qsgd:bits=4", "qsgd:bits=4", seed=kind(3), warmup_epochs=1)
        boundary.set_epoch(kind(1))
        found.append(step(model(boundary), 0)[0])
    assert torch.equal(*found)


def test_samples_are_used_once():
    boundary = nb.Boundary("qsgd:bits=4+aq-sgd", "none")
    x = torch.randn(4, 10)
    boundary.samples = torch.arange(4)
    assert torch.equal(boundary(x), x)  # a first visit
    boundary.samples = torch.arange(4)
    changed = torch.randn(4, 10)
    assert not torch.equal(boundary(changed), changed)
    with pytest.raises(ValueError, match=r"set \.samples"):
        boundary(x)
    boundary.samples = torch.tensor([1, 2, 2, 3])
    with pytest.raises(ValueError, match="sample 2 is in this batch twice"):
        boundary(x)
    boundary.samples = torch.arange(3)
    with pytest.raises(ValueError, match="has 4 samples, but samples=… has shape"):
        boundary(x)


def test_a_gradient_that_is_not_asked_for_is_not_made():
    boundary = nb.Boundary("topk:density=0.5", "topk:density=0.5,reuse=forward")
    with torch.no_grad():
        for _ in range(3):
            boundary(torch.randn(4, 4))
    x = torch.randn(4, 4, requires_grad=True)
    y = boundary(x)
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0).float())


def test_calls_before_one_backward_are_microbatches():
    """As in a siamese net, where one boundary serves both branches."""
    specs = "topk:density=0.5", "topk:density=0.5,reuse=forward"
    boundary = nb.Boundary(*specs)
    with pytest.raises(nb.UnsupportedError, match=r"a later step has begun.* set microbatches to the number of calls"):
        sum(boundary(torch.randn(4, 4, requires_grad=True)) for _ in range(2)).sum().backward()
    boundary = nb.Boundary(*specs, microbatches=2)
    for _ in range(2):
        inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
        outputs = [boundary(x) for x in inputs]
        sum(outputs).sum().backward()
        for x, y in zip(inputs, outputs, strict=True):
            assert torch.equal(x.grad, (y != 0).float())


@pytest.mark.parametrize("store", ["fp32", "bf16", "int8"])
def test_a_gradient_of_one_element_that_is_expanded(store):
    boundary = nb.Boundary("none", f"topk:density=0.1+ef:store={store}")
    x = torch.randn(1, 1, requires_grad=True)
    boundary(x).sum().backward()
    assert x.grad == 1


def test_evaluation_goes_backward_at_the_places_of_each_pass_and_changes_nothing_in_training():
    boundary = nb.Boundary("topk:density=0.5", "topk:density=0.5,reuse=forward")
    first = torch.randn(4, 4, requires_grad=True)
    trained = boundary(first)
    boundary.eval()
    inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    outputs = [boundary(x) for x in inputs]
    for x, y in zip(inputs, outputs, strict=True):
        y.sum().backward()
        assert torch.equal(x.grad, (y != 0).float())
    trained.sum().backward()
    assert torch.equal(first.grad, (trained != 0).float())


class Unrolled(nn.Module):
    """The layers of a sequence without its loop, of which Dynamo makes no graphs once one is interrupted."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        one, two, three, four = self.layers
        return four(three(two(one(x))))


@pytest.mark.parametrize(
    ("compiled", "forward", "backward"),
    [
        ("model", "uniform:bits=8", "qsgd:bits=4"),
        ("step", "sign", "sign+ef"),
        ("model", "topk:density=0.2", "topk:density=0.2,reuse=forward"),
        *thorough(
            ("step", "uniform:bits=8", "qsgd:bits=4"),
            ("model", "sign", "sign+ef"),
            ("step", "topk:density=0.2", "topk:density=0.2,reuse=forward"),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_a_compiled_model_has_the_same_bits(forward, backward, compiled):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    ours, theirs = (model(nb.Boundary(forward, backward)) for _ in range(2))
    called = Unrolled(theirs)
    if compiled == "model":
        called = torch.compile(called, backend=counter)

    def train(x):
        loss = called(x).square().mean()
        loss.backward()
        return loss.detach()

    run = torch.compile(train, backend=counter) if compiled == "step" else train
    graphs = []
    for seed in range(4):
        loss, gradients = step(ours, seed)
        theirs.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(run(x), loss)
        assert all(torch.equal(p.grad, g) for p, g in zip(theirs.parameters(), gradients, strict=True))
        graphs.append(counter.frame_count)
    assert graphs[1:] == graphs[1:2] * 3, "nothing is compiled anew from step to step"
    assert graphs[0] >= 2, "layers in front of the boundary, and those behind it"
    assert ours[2].stats() == theirs[2].stats()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_runs_a_boundary_again_is_an_error(reentrant):
    """It sent a second message, and gradients were those of that one."""
    x = torch.randn(8, 20, requires_grad=True)
    uncompressed, net = model(nb.Boundary()), model(nb.Boundary("topk:density=0.2+ef", "none"))
    checkpoint(uncompressed, x, use_reentrant=reentrant).sum().backward()
    y = checkpoint(net, x, use_reentrant=reentrant)
    with pytest.raises(nb.UnsupportedError, match="Let the checkpointed parts end before the boundary"):
        y.sum().backward()


def test_double_backward_is_refused():
    boundary = nb.Boundary("qsgd:bits=4", "qsgd:bits=4")
    x = torch.randn(4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad((boundary(x) * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_bad_input():
    with pytest.raises(ValueError, match="microbatches=0"):
        nb.Boundary(microbatches=0)
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        nb.Boundary(warmup_steps=-1)
    with pytest.raises(ValueError, match="unknown codec"):
        nb.Boundary("qsdg:bits=4")
    with pytest.raises(nb.UnsupportedError):
        nb.Boundary("none", "powersgd:rank=1")
    net = model(nb.Boundary("topk:density=0.2+ef"))
    with pytest.raises(ValueError, match="of a channel with spec"):
        model(nb.Boundary("topk:density=0.2+ef21")).load_state_dict(net.state_dict())
    assert "topk:density=0.2+ef" in repr(net)
    for given, name in (((torch.zeros(2), torch.zeros(2)), "tuple"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"argument 1 of a boundary must be a tensor, got {name}"):
            nb.Boundary("qsgd:bits=4")(torch.zeros(2), given)


@pytest.mark.parametrize(
    ("samples", "name"),
    [([0, 1], "list"), (np.arange(2), "ndarray"), (torch.arange(2, dtype=torch.int32), "torch.int32")],
)
def test_samples_are_an_int64_tensor(samples, name):
    boundary = nb.Boundary("qsgd:bits=4+aq-sgd")
    boundary.samples = samples
    with pytest.raises(TypeError, match=f"must be an int64 tensor with one id per sample, not {name}"):
        boundary(torch.zeros(2, 8))


def break_channel(whole, **changes):
    """Another state of a boundary, with other values in the channel of gradients."""
    channels = copy.deepcopy(whole["channels"])
    channels[-1][1].update(changes)
    return whole | {"channels": channels}


def first_of(kept):
    """Name and value of the first buffer."""
    return next(iter(kept.items()))


#: What is done to a good state whose last channel has buffers.
BROKEN = {
    "no state": len,
    "no passes": lambda state: state | {"passes": None},
    "lacks passes": lambda state: {"channels": state["channels"]},
    "a word for passes": lambda state: state | {"passes": "x"},
    "passes below 0": lambda state: state | {"passes": -1},
    "no channels": lambda state: state | {"channels": 3},
    "one channel": lambda state: state | {"channels": ([state["channels"][0][0]],)},
    "a number for a channel": lambda state: state | {"channels": ([1, 2],)},
    "another spec": lambda state: break_channel(state, spec="none"),
    "a word for the last message": lambda state: break_channel(state, last="ab"),
    "three numbers for it": lambda state: break_channel(state, last=(1, 2, 3)),
    "a list of buffers": lambda state: break_channel(state, state=[1]),
    "a number for a buffer": lambda state: break_channel(state, state={first_of(kept_of(state))[0]: 7}),
}
OF_TENSORS = {
    "NaN": lambda x: torch.full_like(x, torch.nan),
    "float64": torch.Tensor.double,
    "another size": lambda x: x[1:],
}


def kept_of(state):
    return state["channels"][-1][1]["state"]


@pytest.mark.parametrize("spec", ["topk:density=0.2+ef", "topk:density=0.2+ef21", "qsgd:bits=3+aq-sgd"])
def test_a_state_that_is_broken_is_refused_before_anything_changes(spec):
    net = model(nb.Boundary("topk:density=0.2+ef", spec))
    for k in range(3):
        step(net, k, torch.arange(8))
    boundary = net[2]
    good = boundary.get_extra_state()
    early = copy.deepcopy(good)
    step(net, 3, torch.arange(8))
    broken = {name: breaking(copy.deepcopy(early)) for name, breaking in BROKEN.items()}
    name, value = first_of(kept_of(early))
    if "aq-sgd" in spec:
        broken["of another boundary"] = break_channel(early, state={"backward-7-0-both": value})
        broken["half a buffer"] = break_channel(early, state={name: value | {"ids": value["ids"][1:]}})
    else:
        broken |= {what: break_channel(early, state={name: change(value)}) for what, change in OF_TENSORS.items()}
        broken["no shape"] = break_channel(early, state={"weight": value})
    before = copy.deepcopy(boundary.get_extra_state())
    for what, state in broken.items():
        with pytest.raises(ValueError, match=r"."):
            boundary.set_extra_state(state)
        assert str(boundary.get_extra_state()) == str(before), what
    boundary.set_extra_state(early)
    assert str(boundary.get_extra_state()) == str(early)


def test_sizes_in_numpys_numbers_are_those_of_python(tmp_path):
    nets = [model(nb.Boundary("qsgd:bits=4+ef", index=kind(3), microbatches=kind(2))) for kind in (int, np.int64)]
    for k in range(4):
        (loss, own), (other, its) = (step(net, k) for net in nets)
        assert torch.equal(loss, other)
        assert all(map(torch.equal, own, its))
    by_file(nets[1], nets[0], tmp_path)
    with pytest.raises(TypeError, match=r"microbatches=1.5 is not a whole number"):
        nb.Boundary(microbatches=1.5)


def test_compression_in_evaluation_is_an_argument():
    x = torch.randn(10, 20)
    boundary = nb.Boundary("topk:density=0.1", "none", compress_in_eval=False).eval()
    assert boundary(x) is x


def test_a_boundary_that_compresses_nothing_says_so(caplog):
    nb.Boundary()
    assert [record.message for record in caplog.records] == [
        "this boundary compresses nothing: forward='none', backward='none'; pass a spec such as uniform:bits=8"
    ]
    caplog.clear()
    nb.Boundary("none", "uniform:bits=8")
    nb.Boundary("none+ef")
    assert caplog.records == []


def test_a_spec_that_hardly_follows_its_samples_says_so_once(caplog):
    for index in range(2):
        nb.Boundary("qsgd:bits=2,bucket=64+aq-sgd", "qsgd:bits=8", index=index)
        nb.Boundary("qsgd:bits=4+aq-sgd", "qsgd:bits=2", index=index)
    (record,) = caplog.records
    assert record.message.startswith("qsgd:bits=2,bucket=64+aq-sgd hardly follows a sample that has changed: ")
