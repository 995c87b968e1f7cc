"""PowerSGD by half rounds: the authors' package in float64, its traffic, and its state."""

from __future__ import annotations

import math

import pytest
import torch

import narrowband as nb
from narrowband.codecs.lowrank import start
from narrowband.collectives import all_reduce_nbytes
from tests.codecs.common import backend
from tests.gradients.matrices import all_reduced, compressed, gradients_of, net, sent_and_kept, state_of
from tests.gradients.training import FINGERPRINT, HUGE, TINY, flat, loss_of, same, train
from tests.ranks import run_ranks

#: The network's matrices that are factored; two more are too narrow.
FACTORED = {"0.weight": (40, 24), "2.weight": (40, 40), "4.weight": (40, 40), "6.weight": (40, 40)}


def spec_of(halves, rank=2, columns=2):
    """With a ``min_ratio`` that factors these matrices and not the narrow ones, at so many columns a whole round."""
    return f"powersgd:rank={rank},min_ratio={8 / columns / halves},halves={halves}"


class Deriving:
    """``aggregate`` of the authors' package in float64, for one matrix of all ranks (rows of ``error`` are ranks).

    It alternates between products with the matrix and with its transpose, takes from every rank's matrix that rank's
    own product, and adds up what the averaged products say.
    """

    def __init__(self, ranks, shape, q, method):
        self.error = torch.zeros(ranks, *shape, dtype=torch.float64)
        self.kept, self.turned, self.method = q.double(), False, method

    def step(self, gradients):
        matrices, average = self.error + gradients, torch.zeros(gradients.shape[1:], dtype=torch.float64)
        for _ in range(self.method.halves):
            common = torch.linalg.qr(self.kept).Q
            own = (matrices.mT if self.turned else matrices) @ common
            mean = own.mean(0)
            matrices = matrices - (common @ own.mT if self.turned else own @ common.T)
            average += common @ mean.T if self.turned else mean @ common.T
            self.kept, self.turned = mean, not self.turned
        self.lost = matrices
        if self.method.ef:
            self.error = matrices
        return average


def frozen_steps(rank, world_size, spec, cap, steps, kind="cpu"):
    """The averages of a model that stays as it is, the state behind them, and where seeds come from."""
    averages, errors = [], []
    with backend(kind):
        model, handle = compressed(spec, cap=cap)
        for step in range(steps):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            averages.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
            errors.append(handle.stats().last.relative_error)
    return averages, state_of(handle), errors[0], {p.name: p.index for p in handle.layers.parameters.by_name.values()}


@pytest.mark.parametrize(
    ("halves", "keys", "cap", "kind"),
    [(1, "", HUGE, "cpu"), (2, "", TINY, "cpu"), (1, ",ef=false", HUGE, "cpu"), (3, "", HUGE, "reference")],
)
def test_steps_of_three_ranks_follow_the_authors_package(halves, keys, cap, kind):
    r = 1 if halves > 2 else 2  # more than the matrices have would be noise
    spec, ranks, steps = spec_of(halves, r, r) + keys, 3, 7
    results = run_ranks(frozen_steps, ranks, spec, cap, steps, kind)
    method, derived = nb.compression(spec).feedback, {}
    for step in range(steps):
        given = {}
        for name, gradients in gradients_of(ranks, step).items():
            n, m, r = method.factors(method.codec, gradients.shape[1:])
            expected = gradients.mean(0)
            if r:
                if name not in derived:
                    seed = (step << 32) + (results[0][3][name] << 12)
                    derived[name] = Deriving(ranks, (n, m), start(m, r, seed, torch.device("cpu")).T, method)
                expected = derived[name].step(gradients)
                given[name] = gradients
            for averages, *_ in results:
                torch.testing.assert_close(averages[step][name].double(), expected, rtol=1e-3, atol=1e-5)
        for rank, (_, _, error, _) in enumerate(results if not step else ()):  # measured in the first step
            lost = sum(float(one.lost[rank].square().sum()) for one in derived.values())
            whole = sum(float(given[name][rank].square().sum()) for name in derived)
            assert error == pytest.approx(lost / whole, rel=1e-4)
    assert derived.keys() == FACTORED.keys()
    for rank, (_, state, *_) in enumerate(results):
        for name, one in derived.items():
            if method.ef:
                residual = state[f"residual/{name}"].view(one.error.shape[1:]).double()
                torch.testing.assert_close(residual, one.error[rank], rtol=1e-3, atol=1e-5)
            assert (f"left/{name}" in state) is one.turned
            assert (f"factor/{name}" in state) is not one.turned
    assert all(torch.equal(results[0][0][-1][name], other[0][-1][name]) for other in results for name in derived)


def sent_in_steps(rank, world_size, spec):
    model, handle = compressed(spec, cap=HUGE)
    train(model, rank, range(3))
    with all_reduced() as calls:
        for step in range(3, 7):
            calls.append("step")
            train(model, rank, range(step, step + 1))
    return calls, handle.stats().last


@pytest.mark.parametrize("halves", [1, 2])
def test_a_half_round_is_one_all_reduce_of_one_factor(halves):
    small = sum(p.numel() for p in net().parameters() if p.dim() < 2) + 1  # and a flag
    whole = 4 * 40 + 8 * 4  # matrices that factors do not shorten, beside the first half round
    left, right = (2 * sum(shape[side] for shape in FACTORED.values()) for side in (0, 1))
    calls, last = run_ranks(sent_in_steps, 3, spec_of(halves))[1]
    # Three steps came before: an odd number of half rounds has left the left factor, which sends the right one.
    steps = [[right + whole], [left + whole]] * 2 if halves == 1 else [[left + whole, right]] * 4
    assert calls == [call for step in steps for call in ("step", small, *step)]
    numels = [small, *steps[-1]]
    assert last.sent_bytes == sum(all_reduce_nbytes(4 * numel, 3) for numel in numels) + 2 * FINGERPRINT
    method = nb.compression(spec_of(halves)).feedback
    planned = sum(method.layer_nbytes(method.codec, shape) for shape in FACTORED.values())
    assert planned == 4 * (left + right) * halves / 2


def test_nothing_is_lost_and_a_rank_without_a_gradient_keeps_its_residual():
    (sent, mine, residual), (same_sent, yours, others) = run_ranks(sent_and_kept, 2, "powersgd:rank=2,halves=1")
    assert torch.equal(sent, same_sent)
    torch.testing.assert_close(sent + (residual[-1] + others[-1]) / 2, (mine + yours) / 2, rtol=0, atol=1e-6)
    assert torch.equal(residual[1], residual[2])
    torch.testing.assert_close(others[0], others[1], rtol=0, atol=1e-7)


def broken(rank, world_size, value):
    model, handle = compressed("powersgd:rank=2,halves=2")
    train(model, rank, range(2))
    before = state_of(handle)
    model.zero_grad()
    (loss_of(model, 4, rank) * (value if rank == 1 else 1.0)).backward()
    unchanged = same(before, state_of(handle))
    train(model, rank, range(5, 7))
    return unchanged, bool(flat(model).isfinite().all()), same(before, state_of(handle))


@pytest.mark.parametrize("value", [math.nan, 1e20])
def test_a_broken_gradient_changes_no_state(value):
    assert run_ranks(broken, 2, value) == [(True, True, False)] * 2


def stopped_and_resumed(rank, world_size):
    """With ranks that change after an odd number of steps, when left factors wait."""
    spec = spec_of(1)

    def change(handle):
        handle.set_layers({"2.weight": spec_of(1, rank=1), "4.weight": spec_of(1, rank=4)})

    whole, handle = compressed(spec)
    train(whole, rank, range(3))
    change(handle)
    train(whole, rank, range(3, 8))
    first, handle = compressed(spec)
    train(first, rank, range(3))
    change(handle)
    train(first, rank, range(3, 5))
    state = {**handle.state_dict(), "feedback": state_of(handle)}
    module = net()
    module.load_state_dict(first.module.state_dict())
    second, handle = compressed(spec, module=module)
    handle.load_state_dict(state)
    train(second, rank, range(5, 8))
    shapes = {key: tuple(value.shape) for key, value in state["feedback"].items() if key.startswith("left")}
    return torch.equal(flat(whole), flat(second)), shapes


def test_a_resumed_run_goes_on_with_the_side_and_the_ranks_that_it_had():
    for equal, shapes in run_ranks(stopped_and_resumed, 2):
        assert equal
        ranks = zip(FACTORED, (2, 1, 4, 2), strict=True)
        assert shapes == {f"left/{name}": (rank, 40) for name, rank in ranks}


def of_other_ranks(rank, world_size, states):
    model, handle = compressed(spec_of(1))
    if states is None:
        train(model, rank, range(3))
        return {**handle.state_dict(), "feedback": state_of(handle)}
    handle.load_state_dict(states)
    loaded = state_of(handle)
    train(model, rank, range(3, 5))
    return loaded, flat(model)


def test_another_number_of_ranks_goes_on_with_the_same_factors():
    states = run_ranks(of_other_ranks, 3, None)
    for loaded, parameters in run_ranks(of_other_ranks, 2, states):
        assert {key for key in loaded if key.startswith("left/")} == {f"left/{name}" for name in FACTORED}
        for key, value in loaded.items():
            torch.testing.assert_close(value, sum(state["feedback"][key] for state in states) / 3)
        assert bool(parameters.isfinite().all())


def test_half_rounds_are_refused_where_they_have_no_meaning():
    assert str(nb.compression("powersgd:rank=8,halves=1")) == "powersgd:rank=8,halves=1"
    for keys, word in (
        ("halves=-1", "halves=-1 must be at least 1"),
        ("halves=1,iterations=2", "leave out iterations"),
        ("halves=2,warm_start=false", "continues from the one before"),
    ):
        with pytest.raises(ValueError, match=word):
            nb.compression(f"powersgd:{keys}")
    whole, halves = (nb.compression(f"powersgd:rank=2{keys}").feedback for keys in ("", ",halves=1"))
    left = {"left/w": torch.ones(2, 40)}
    with pytest.raises(ValueError, match="another spec"):
        whole.check_state(left)
    with pytest.raises(ValueError, match="two factors of 'w'"):
        halves.check_state(left | {"factor/w": torch.ones(2, 24)})
    halves.check_state(left)
