"""Residuals in fewer bits: memory, sums that are kept on average, roll back and checkpoints to the bit."""

from __future__ import annotations

import copy

import pytest
import torch

import narrowband as nb
from narrowband.feedback import ErrorFeedback
from tests.gradients.training import compress, flat, loss_of, mlp, sgd, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

NUMEL = 3000
STORES = ["bf16", "int8"]


def steps_of(feedback, codec, steps, seed=0):
    """What is lost of the sum of gradients after some steps: delivered plus residual minus true."""
    lost = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(steps):
        x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
        lost -= x.double()
        finite, payload = feedback.encode("p", x.clone(), codec, shape=(NUMEL,), seed=1000 * seed + step, commit=True)
        assert finite
        lost += codec.decode(payload, torch.empty(NUMEL)).double()
    return lost + feedback.residual("p").double()


@pytest.mark.parametrize(("store", "nbytes"), [("fp32", 4 * NUMEL), ("bf16", 2 * NUMEL), ("int8", NUMEL + 47)])
def test_memory(store, nbytes):
    feedback = ErrorFeedback(store=store)
    steps_of(feedback, nb.codec("topk:density=0.05"), 3)
    assert feedback.nbytes == nbytes
    assert feedback.holds("p")
    assert not feedback.holds("q")


@pytest.mark.parametrize("store", STORES)
def test_sums_are_kept_on_average(store):
    """What rounding loses of one element has mean zero over seeds; to nearest it would not."""
    codec, runs, steps = nb.codec("topk:density=0.05"), 60, 30
    lost = torch.stack([steps_of(ErrorFeedback(store=store), codec, steps, seed) for seed in range(runs)])
    spread, mean = lost.std(0), lost.mean(0)
    assert 0 < float(spread.mean()) < (0.1 if store == "bf16" else 0.3)
    # In units of its own standard error: normally distributed if there is no bias.
    there = spread > 0
    z = mean[there] / (spread[there] / runs**0.5)
    assert abs(float(z.mean())) < 4 / z.numel() ** 0.5
    assert float(z.square().mean()) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("commit", [True, False])
def test_a_step_that_did_not_happen_leaves_the_same_bits(store, commit):
    codec, feedback = nb.codec("topk:density=0.05"), ErrorFeedback(store=store)
    steps_of(feedback, codec, 4)
    before = feedback.residual("p")
    x = torch.randn(NUMEL)
    feedback.encode("p", x, codec, shape=(NUMEL,), seed=77, commit=commit)
    feedback.roll_back("p", x)
    assert torch.equal(feedback.residual("p"), before)
    x = torch.full((NUMEL,), torch.inf)
    finite, _ = feedback.encode("p", x, codec, shape=(NUMEL,), seed=78, commit=commit)
    assert not finite
    feedback.roll_back("p", x)
    assert torch.equal(feedback.residual("p"), before)


@pytest.mark.parametrize("store", STORES)
def test_a_state_is_loaded_to_the_bit_and_moves_to_other_stores(store):
    codec, feedback = nb.codec("topk:density=0.05"), ErrorFeedback(store=store)
    steps_of(feedback, codec, 4)
    again = ErrorFeedback(store=store)
    again.load_state_dict(feedback.state_dict())
    assert torch.equal(again.residual("p"), feedback.residual("p"))
    plain = ErrorFeedback()
    plain.load_state_dict(feedback.state_dict())
    assert torch.equal(plain.residual("p"), feedback.residual("p"))
    moved = feedback.take_residual("p")
    assert not feedback.holds("p")
    feedback.add_residual("p", moved)
    assert torch.equal(feedback.residual("p"), again.residual("p"))
    feedback.scale(0.5)
    assert torch.equal(feedback.residual("p"), 0.5 * again.residual("p"))


def trained(rank, size, spec):
    whole = wrap(mlp())
    handle = compress(whole, spec, min_numel=64)
    optimizer = sgd(whole, 0.2)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = loss_of(whole, 0, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 19:
            state, parameters = copy.deepcopy((handle.state_dict(), whole.state_dict()))
    again = wrap(mlp())
    resumed = compress(again, spec, min_numel=64)
    again.load_state_dict(parameters)
    resumed.load_state_dict(state)
    for _ in range(10):
        again.zero_grad()
        loss_of(again, 0, rank).backward()
        sgd(again, 0.2).step()
    return losses, torch.equal(flat(whole), flat(again)), handle.residual_nbytes


@pytest.mark.parametrize("spec", ["topk:density=0.1+ef", *thorough("qsgd:bits=2+ef", "topk:density=0.1+ef-mixed")])
def test_models_learn_as_with_residuals_in_float32_and_resume_to_the_bit(spec):
    separator = "," if "ef:" in spec else ":"
    ends = {}
    for store in ("fp32", *STORES):
        answers = run_ranks(trained, 2, f"{spec}{separator}store={store}")
        assert all(same for _, same, _ in answers)
        ends[store] = answers[0][0][-1], answers[0][2]
    loss, nbytes = ends["fp32"]
    assert ends["bf16"][0] == pytest.approx(loss, rel=0.05)
    assert ends["int8"][0] == pytest.approx(loss, rel=0.1)
    assert ends["bf16"][1] == nbytes / 2
    assert ends["int8"][1] < 0.27 * nbytes
