"""A model under coded data parallelism: gradients, training, states, and what a step is."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import narrowband as nb
from narrowband.coded.assignment import Assignment
from narrowband.coded.header import header_nbytes
from tests.coded.training import INPUTS, OUTPUTS, batch, computed_in_one_place, flat, gradient, loss_of, mlp
from tests.ranks import RankError, run_ranks


def all_equal(tensors):
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def one_step(rank, world_size, redundancy, group, shares, samples):
    torch.set_num_threads(1)
    model = nb.CodedDataParallel(mlp(), redundancy, group=group, shares=shares)
    exponent = model._average.unit.exponent
    x, y = model.split(*batch(0, samples))
    loss_of(model(x), y).backward()
    return gradient(model), exponent


@pytest.mark.parametrize(
    ("n", "r", "g", "shares"),
    [
        (2, 1, None, None), (3, 2, None, None), (4, 2, None, None), (4, 3, None, None), (4, 2, 2, None),
        (6, 2, 3, None), (4, 2, None, (2, 2.5, 1, 1)), (4, 1, 1, (4, 3, 2, 1)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("uneven", [0, 1])
def test_gradients_are_the_same_on_all_ranks_and_as_computed_in_one_place(n, r, g, shares, uneven):
    a = Assignment(n, r, g or 0, shares or ())
    samples = 3 * a.blocks + uneven
    gradients, exponents = zip(*run_ranks(one_step, n, r, g, shares, samples), strict=True)
    assert len(set(exponents)) == 1
    assert all_equal(gradients)
    net = mlp()
    x, y = batch(0, samples)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(gradients[0], computed_in_one_place(net, a, x, y, exponents[0]))
    finally:
        torch.set_num_threads(before)
    loss_of(net(x), y).backward()
    torch.testing.assert_close(gradients[0], gradient(net), rtol=1e-5, atol=1e-7)


def rows_of_any_width(rank, world_size):
    found = []
    for samples, inputs, hidden in ((13, 6, 8), (100, 13, 8), (64, 7, 10), (64, 30, 10)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        model = nb.CodedDataParallel(net, 2)
        for _ in range(3):
            x, y = model.split(torch.randn(samples, inputs), torch.randint(3, (samples,)))
            loss_of(model(x), y).backward()
        found.append(gradient(model))
    return torch.cat(found)


def test_blocks_whose_rows_begin_anywhere_in_memory_are_the_same_on_all_ranks():
    assert all_equal(run_ranks(rows_of_any_width, 3))


class WithLoss(nn.Module):
    """Its output is the loss of each sample, which rounds exponentials and logarithms."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y):
        return nn.functional.binary_cross_entropy_with_logits(self.net(x), y, reduction="none").mean(1)


def loss_inside(rank, world_size):
    model = nb.CodedDataParallel(WithLoss(), 2)
    net = WithLoss()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, net)]
    for step in range(20):
        x, y = batch(step, 64)[0], (torch.rand(64, OUTPUTS) > 0.5).float()
        for module, rows, optimizer in zip((model, net), (model.split(x, y), (x, y)), optimizers, strict=True):
            optimizer.zero_grad()
            module(*rows).mean().backward()
            optimizer.step()
    return flat(model), flat(net)


def test_a_loss_of_any_kind_is_the_same_on_all_ranks_inside_of_the_model():
    results = run_ranks(loss_inside, 3)
    assert all_equal([result[0] for result in results])
    torch.testing.assert_close(*results[0], rtol=1e-5, atol=1e-6)


# ---- training --------------------------------------------------------------------------------------------------------


def train(model, loader, optimizer, epochs, heard=None):
    for epoch in epochs:
        loader.batch_sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            if heard is not None:
                heard.append(gradient(model))


def epochs_of(rank, world_size, options):
    model = nb.CodedDataParallel(mlp(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(*batch(7, 70))
    loader = DataLoader(data, batch_sampler=model.sampler(data, 25, seed=5))  # 25, 25 and 20 samples in 6 blocks
    train(model, loader, optimizer, range(2))
    stats = model.stats()
    return flat(model), stats.total.steps, stats.total.exchanges, stats.total.sent_bytes


def alone():
    """The same training in one process, with plain gradients."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = batch(7, 70)
    for epoch in range(2):
        order = torch.randperm(70, generator=torch.Generator().manual_seed(5 + epoch))
        for begin in (0, 25, 50):
            rows = order[begin : begin + 25]
            optimizer.zero_grad()
            loss_of(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return flat(net)


@pytest.mark.parametrize("shares", [None, (1, 3, 3, 2)])
def test_training_on_uneven_batches_is_that_of_one_process_whatever_the_shares_and_bytes_are_the_same(shares):
    results = run_ranks(epochs_of, 4, {"redundancy": 2, "shares": shares})
    assert all_equal([result[0] for result in results])
    torch.testing.assert_close(results[0][0], alone(), rtol=1e-5, atol=1e-6)
    numel = flat(mlp()).numel()
    slices = -(-numel // 2) * 4
    for _, steps, exchanges, sent in results:
        assert (steps, exchanges) == (6, 6)
        assert sent == 6 * (3 * slices + header_nbytes(3))


@pytest.mark.parametrize(("bits", "rtol"), [(16, 1e-2), (8, 0.3)])
def test_fewer_bits_send_less_and_are_the_same_on_all_ranks(bits, rtol):
    results = run_ranks(epochs_of, 4, {"redundancy": 2, "bits": bits})
    assert all_equal([result[0] for result in results])
    parameters, steps, exchanges, sent = results[0]
    change, expected = parameters - flat(mlp()), alone() - flat(mlp())
    assert (change - expected).norm() <= rtol * expected.norm()
    assert steps == 6
    assert exchanges < 6 + 4  # the first is sent twice, to find the span
    item = bits // 8
    slices = -(-flat(mlp()).numel() // (2 * 4 // item)) * (4 // item) * item
    once = 3 * slices + header_nbytes(3)
    assert sent == exchanges * once


def resumed(rank, world_size, options):
    data = TensorDataset(*batch(7, 60))

    def begin():
        model = nb.CodedDataParallel(mlp(dropout=0.3), seed=3, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, DataLoader(data, batch_sampler=model.sampler(data, 25))

    model, optimizer, loader = begin()
    train(model, loader, optimizer, [0])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, loader, optimizer, [1])
    straight = flat(model)
    model, optimizer, loader = begin()
    file.seek(0)
    state = torch.load(file)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.manual_seed(rank)  # the user's own random numbers have no part in it
    train(model, loader, optimizer, [1])
    return straight, flat(model)


@pytest.mark.parametrize("options", [{"redundancy": 2}, {"redundancy": 2, "group": 2, "bits": 16}])
def test_a_resumed_run_ends_with_the_same_bits_dropout_included(options):
    results = run_ranks(resumed, 4, options)
    assert all_equal([tensor for result in results for tensor in result])


def resumed_on_batches_of_any_size(rank, world_size, shares):
    def go_on(model, steps):
        for step in steps:
            x, y = model.split(*batch(step, 12 + step % 4))  # 12, 13, 14 or 15 samples in 3 blocks
            model.zero_grad()
            loss_of(model(x), y).backward()
        return gradient(model)

    model = nb.CodedDataParallel(mlp(), 2, shares=shares)
    go_on(model, range(3))
    state = model.state_dict()
    straight = go_on(model, [2])
    loaded = nb.CodedDataParallel(mlp(), 2, shares=shares)
    loaded.load_state_dict(state)
    other = nb.CodedDataParallel(mlp(), 1)
    other.load_state_dict(state)
    return straight, go_on(loaded, [2]), other._average.step, other._lengths


@pytest.mark.parametrize("shares", [None, (2, 2, 1), np.array([2, 2, 1])], ids=["none", "a tuple", "an array"])
def test_state_has_what_tells_batches_apart_and_fits_other_blocks_too(shares):
    results = run_ranks(resumed_on_batches_of_any_size, 3, shares)
    assert all_equal([tensor for result in results for tensor in result[:2]])
    assert [result[2:] for result in results] == [(3, {})] * 3


def resumed_with_smaller_batches(rank, world_size, early):
    """An epoch in batches of 15, and one in batches of 14, of which a rank has as many rows. The state of the model is
    loaded before the second, and the sampler is made before that or after it.
    """
    data = TensorDataset(*batch(0, 60))

    def begin():
        model = nb.CodedDataParallel(mlp(), 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loader_of(model, size):
        return DataLoader(data, batch_sampler=model.sampler(data, size, drop_last=True))

    model, optimizer = begin()
    train(model, loader_of(model, 15), optimizer, [0])
    state = copy.deepcopy(model.state_dict())
    train(model, loader_of(model, 14), optimizer, [1])
    straight = flat(model)
    model, optimizer = begin()
    loader = loader_of(model, 14) if early else None
    model.load_state_dict(state)
    train(model, loader or loader_of(model, 14), optimizer, [1])
    return straight, flat(model)


@pytest.mark.parametrize("early", [True, False], ids=["made before the state is loaded", "made after it"])
def test_a_sampler_that_is_made_before_the_state_is_loaded_gives_the_batches_of_a_run_that_was_not_stopped(early):
    results = run_ranks(resumed_with_smaller_batches, 3, early)
    assert all_equal([tensor for result in results for tensor in result])


def randomness(rank, world_size):
    model = nb.CodedDataParallel(mlp(dropout=0.5), 2)
    torch.manual_seed(100 + rank)
    before = torch.rand(1, generator=None).item()
    torch.manual_seed(100 + rank)
    x, y = model.split(*batch(0, 6))
    first = model(x)
    own = torch.rand(1).item()
    second = model(model.split(*batch(0, 6))[0])
    loss_of(first, y).backward()
    averages = [gradient(model)]
    if rank != 1:  # whose batch was bad, so all leave it out
        with model.no_sync():
            loss_of(model(x), y).backward()
    model.zero_grad()
    loss_of(model(x), y).backward()
    averages.append(gradient(model))
    if rank == 1:
        with model.no_sync():
            loss_of(model(x), y).backward()
        weight = model.module[4].weight
        hook = weight.register_hook(lambda gradient: gradient @ gradient)  # of shapes that do not fit
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            loss_of(model(x), y).backward()
        hook.remove()
    loss_of(model(x), y).backward()
    return own == before, torch.equal(first, second), [*averages, gradient(model)]


def test_dropout_is_that_of_the_block_and_leaves_the_users_random_numbers_alone():
    results = run_ranks(randomness, 3)
    assert all(mine for mine, _, _ in results)
    assert not any(same for _, same, _ in results)
    for step in range(3):
        assert all_equal([averages[step] for _, _, averages in results])


# ---- what a step is --------------------------------------------------------------------------------------------------


def accumulated(rank, world_size):
    found = []
    for sizes in ((12, 12, 12), (13, 8, 10)):
        model = nb.CodedDataParallel(mlp(), 2)
        own = [model.split(*batch(step, samples)) for step, samples in enumerate(sizes)]
        for step, (x, y) in enumerate(own):
            with model.no_sync() if step < len(sizes) - 1 else contextlib.nullcontext():
                (loss_of(model(x), y) / len(sizes)).backward()
            if step < len(sizes) - 1:
                assert all(p.grad is None for p in model.parameters())
        found.append(gradient(model))
        assert model.stats().last.exchanges == model.stats().total.steps == 1
        x, y = model.split(*batch(9, 12))
        loss_of(model(x), y).backward()  # without zero_grad
        found.append(gradient(model) - found[-1])
    return found


def test_no_sync_adds_up_and_so_does_grad():
    results = run_ranks(accumulated, 4)
    assert all_equal([torch.cat(result) for result in results])
    for first, sizes in ((0, (12, 12, 12)), (2, (13, 8, 10))):
        net = mlp()
        for step, samples in enumerate(sizes):
            x, y = batch(step, samples)
            (loss_of(net(x), y) / len(sizes)).backward()
        torch.testing.assert_close(results[0][first], gradient(net), rtol=1e-5, atol=1e-7)
        net.zero_grad()
        x, y = batch(9, 12)
        loss_of(net(x), y).backward()
        torch.testing.assert_close(results[0][first + 1], gradient(net), rtol=1e-4, atol=1e-6)


def dropped(rank, world_size):
    broken = [False]

    def check(module, args, output):
        if torch.is_grad_enabled():
            output.register_hook(fail)

    def fail(gradient):
        if broken[0]:
            raise ValueError("a bad batch")

    net = mlp()
    net[4].register_forward_hook(check)
    model = nb.CodedDataParallel(net, 2)

    def backward(step, samples=12, syncs=True):
        x, y = model.split(*batch(step, samples))
        with contextlib.nullcontext() if syncs else model.no_sync():
            loss_of(model(x), y).backward()

    found = []
    backward(0, syncs=False)
    model.zero_grad()
    backward(1)
    found.append(gradient(model))

    backward(0, syncs=False)
    broken[0] = True
    with pytest.raises(ValueError, match="a bad batch"):
        backward(0)
    broken[0] = False
    model.zero_grad()
    backward(1)
    found.append(gradient(model))

    with pytest.raises(RuntimeError, match="ranks are not in the same step"):
        backward(0, samples=9 if rank else 12)
    model.zero_grad()
    backward(1)
    found.append(gradient(model))
    return found


def test_what_zero_grad_or_an_exception_ends_has_no_part_in_the_next_step():
    results = run_ranks(dropped, 3)
    net = mlp()
    x, y = batch(1, 12)
    loss_of(net(x), y).backward()
    for found in results:
        assert all_equal([*found, results[0][0]])
        torch.testing.assert_close(found[0], gradient(net), rtol=1e-5, atol=1e-7)


def broken(rank, world_size):
    model = nb.CodedDataParallel(mlp(), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, told = flat(model), []
    for step in range(3):
        x, y = batch(step, 12)
        if step == 1:
            x[-1, 0] = math.inf  # of the last block, which one rank of three does not have
        x, y = model.split(x, y)
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y)).backward()
        told.append((bool(gradient(model).isnan().all()), model.stats().last.exchanges))
        scaler.step(optimizer)
        scaler.update()
        told.append((scaler.get_scale(), torch.equal(before, flat(model))))
        before = flat(model)
    return told, flat(model)


def test_a_scaler_skips_a_broken_step_on_all_ranks_and_its_scale_widens_the_span():
    results = run_ranks(broken, 3)
    assert all_equal([parameters for _, parameters in results])
    for told, _ in results:
        assert told == [
            (False, 2), (2.0**40, False),  # scaled gradients are out of reach of [−10, 10], once
            (True, 1), (2.0**39, True),
            (False, 1), (2.0**39, False),
        ]  # fmt: skip


class Branches(nn.Module):
    """Named inputs and outputs, one that nobody uses, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.main, self.other, self.unused = nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, 3), nn.Linear(2, 2)

    def forward(self, x, *, scale, factor):
        logits = self.main(x) * scale[:, None] * factor
        return {"logits": logits, "other": self.other(x).mean(1), "best": logits.argmax(1), "kind": "branches"}


def hooked(rank, world_size):
    """Gradients that hooks have seen, those of all parameters that were there after each backward, and after a hook
    that steps and drops the gradient at once, as optimizers in backward do.
    """
    net = mlp()
    model = nb.CodedDataParallel(net, 2)
    seen, averages = [], []
    removable = [
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.flatten())) for p in net.parameters()
    ]
    with model.no_sync():
        loss_of(model(model.split(batch(0, 12)[0])[0]), model.split(batch(0, 12)[1])[0]).backward()
    unseen = len(seen)
    x, y = model.split(*batch(1, 12))
    loss_of(model(x), y).backward()
    averages.append(gradient(model))
    for each in removable:
        each.remove()

    def step(p):
        p.data.sub_(p.grad)
        p.grad = None

    model.zero_grad()
    expected, calls = flat(net), len(seen)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    loss_of(model(x), y).backward()
    moved = expected - flat(net)
    return unseen, calls, torch.cat(seen), averages[0], moved, all(p.grad is None for p in net.parameters())


def test_hooks_that_wait_for_gradients_see_the_average_once():
    results = run_ranks(hooked, 3)
    for unseen, calls, seen, average, moved, dropped in results:
        assert unseen == 0
        assert calls == len(list(mlp().parameters()))
        assert torch.equal(seen, average)
        assert torch.equal(moved, results[0][4])
        assert moved.any()
        assert dropped


def counted(rank, world_size):
    """How many process groups there are, with models that come and go, one and two at a time, and choices."""
    held = []

    def count():
        gc.collect()
        held.append(len(dist.distributed_c10d._world.pg_map))

    for transport in ("broadcast", "auto", "multicast", "broadcast"):
        with contextlib.suppress(nb.UnsupportedError):  # where multicast does not reach everybody
            model = nb.CodedDataParallel(mlp(), 2, transport)
            x, y = model.split(*batch(0, 12))
            loss_of(model(x), y).backward()
            del model
        count()
        nb.choose_redundancy(mlp(), lambda: None, batch_size=12, steps=1)
        count()
    both = [nb.CodedDataParallel(mlp(), 2, "broadcast") for _ in range(2)]
    count()
    both.clear()
    count()
    nb.CodedDataParallel(mlp(), 2)
    count()
    return held


def test_process_groups_are_used_again():
    """That of a model ends with it, and that of a choice with the choice."""
    assert run_ranks(counted, 3) == [[2] * 8 + [3] * 3] * 3


def interrupted(rank, world_size):
    """A group in which an exchange broke off is not lent again; nobody waits for the one who was interrupted."""
    model = nb.CodedDataParallel(mlp(), 2, "broadcast")
    x, y = model.split(*batch(0, 12))
    error = ""
    if rank == 0:
        model.transport._exchange = interrupt
    try:
        loss_of(model(x), y).backward()
    except (RuntimeError, KeyboardInterrupt) as raised:
        error = type(raised).__name__
        traceback.clear_frames(raised.__traceback__)
    del model
    gc.collect()
    again = nb.CodedDataParallel(mlp(), 2, "broadcast")
    loss_of(again(x), y).backward()
    return error, gradient(again)


def interrupt(*given):
    raise KeyboardInterrupt


def test_after_an_interrupted_exchange_a_new_model_has_a_group_of_its_own():
    results = run_ranks(interrupted, 3, timeout_s=120.0)
    assert [error for error, _ in results] == ["KeyboardInterrupt", "RuntimeError", "RuntimeError"]
    assert all_equal([found for _, found in results])


def branched(rank, world_size):
    torch.manual_seed(2)
    model = nb.CodedDataParallel(Branches(), 2)
    (x, y), scale = batch(0, 10), torch.linspace(0.5, 2, 10)
    own_x, own_y, own_scale = model.split(x, y, scale)
    out = model(own_x, scale=own_scale, factor=1.5)
    assert out["kind"] == "branches"
    assert torch.equal(out["best"], out["logits"].argmax(1))
    assert not out["best"].requires_grad
    loss_of(out["logits"], own_y).backward()
    with torch.no_grad():
        all_of_it = model(x, scale=scale, factor=1.5)["logits"]
    net = Branches()
    net.load_state_dict(model.module.state_dict())
    loss_of(net(x, scale=scale, factor=1.5)["logits"], y).backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, torch.zeros_like(q) if q.grad is None else q.grad, rtol=1e-5, atol=1e-7)
    return gradient(model), all_of_it


def test_outputs_by_name_inputs_by_keyword_and_parameters_nobody_used():
    results = run_ranks(branched, 4)
    assert all_equal([result[0] for result in results])
    assert all_equal([result[1] for result in results])
    assert results[0][1].shape == (10, OUTPUTS)


def in_bfloat16(rank, world_size):
    model = nb.CodedDataParallel(mlp(dtype=torch.bfloat16), 2)
    x, y = model.split(*batch(0, 12))
    loss_of(model(x.bfloat16()).float(), y).backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    return gradient(model)


def test_parameters_of_bfloat16_get_gradients_of_bfloat16():
    results = run_ranks(in_bfloat16, 3)
    assert all_equal(results)
    net = mlp()
    x, y = batch(0, 12)
    loss_of(net(x), y).backward()
    assert (results[0].float() - gradient(net)).norm() < 0.05 * gradient(net).norm()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(dropout=0.2)

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def checkpointed_under_autocast(rank, world_size):
    model = nb.CodedDataParallel(Checkpointed(), 2)
    x, y = model.split(*batch(0, 13))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model(x).float(), y)
    loss.backward()
    plain = nb.CodedDataParallel(mlp(dropout=0.2), 2)
    x, y = plain.split(*batch(0, 13))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(plain(x).float(), y)
    loss.backward()
    return gradient(model), gradient(plain)


def test_autocast_and_checkpoints_inside_change_nothing():
    results = run_ranks(checkpointed_under_autocast, 3)
    assert all_equal([gradient for result in results for gradient in result])
    assert results[0][0].norm() > 0


def compressed_inside(rank, world_size, policy, spec):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(INPUTS, 64), nn.GELU(), nb.Boundary(spec, spec), nn.Linear(64, OUTPUTS))
    model = nb.CodedDataParallel(net, 2)
    saving = nb.compress_activations(model, policy=nb.ActivationPolicy(**policy, min_numel=256))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        x, y = model.split(*batch(step, 60))
        optimizer.zero_grad()
        with saving:
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
    return flat(net), saving.stats().total.ratio


def test_what_is_compressed_inside_has_the_same_bits_if_nothing_is_drawn_and_nothing_kept():
    found, ratios = zip(
        *run_ranks(compressed_inside, 3, {"granularity": 256, "rounding": "nearest"}, "uniform:bits=8"), strict=True
    )
    assert all_equal(found)
    assert min(ratios) > 2
    with pytest.raises(RankError, match="compress_activations with granularity=256 and rounding='nearest'"):
        run_ranks(compressed_inside, 3, {}, "none")
    with pytest.raises(RankError, match="a Boundary with a codec that draws no random numbers"):
        run_ranks(compressed_inside, 3, {"bits": "off"}, "qsgd:bits=4")


def in_numpys_numbers(rank, world_size, kind):
    model = nb.CodedDataParallel(mlp(dropout=0.5), kind(2), group=kind(3), bits=kind(16), seed=kind(3))
    x, y = model.split(*batch(0, 6))
    loss_of(model(x), y).backward()
    return gradient(model)


def test_numpys_numbers_are_those_of_python():
    own, expected = (run_ranks(in_numpys_numbers, 3, kind)[0] for kind in (np.int64, int))
    assert torch.equal(own, expected)
