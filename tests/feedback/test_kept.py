"""Residuals in fewer bits: memory, sums that are kept on average, roll back and checkpoints to the bit."""

from __future__ import annotations

import copy

import pytest
import torch

import narrowband as nb
from narrowband.feedback import DGC, ErrorFeedback
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


@pytest.mark.parametrize(
    ("store", "nbytes"), [("fp32", 4 * NUMEL), ("cpu", 4 * NUMEL), ("bf16", 2 * NUMEL), ("int8", NUMEL + 47)]
)
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


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_in_the_memory_of_the_cpu_residuals_are_what_they_are_elsewhere(decay):
    codec = nb.codec("topk:density=0.05")
    plain, kept = ErrorFeedback(decay=decay), ErrorFeedback(decay=decay, store="cpu")
    for step in range(4):
        payloads = []
        for feedback in (plain, kept):
            x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
            payloads.append(feedback.encode("p", x, codec, shape=(NUMEL,), seed=step, commit=step % 2 == 0)[1])
            if step == 3:
                feedback.roll_back("p", x)
            elif step % 2:
                feedback.commit("p", x, codec, payloads[-1], shape=(NUMEL,), seed=step)
        assert torch.equal(*payloads)
        assert torch.equal(plain.residual("p"), kept.residual("p"))
    assert torch.equal(kept.state_dict()["p"], plain.state_dict()["p"])


@pytest.mark.parametrize("store", [*STORES, "cpu"])
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
@pytest.mark.parametrize("select", ["exact", "sampled"])
@pytest.mark.parametrize("numel", [NUMEL, 40_000])
def test_one_pass_keeps_and_sends_the_bits_that_two_do(store, select, numel):
    """Steps that are measured are encoded first and committed later."""
    codec = nb.codec(f"topk:density=0.05,select={select}")
    at_once, later = ErrorFeedback(store=store, decay=0.9), ErrorFeedback(store=store, decay=0.9)
    for step in range(5):
        g = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        _, payload = at_once.encode("p", g.clone(), codec, shape=(numel,), seed=step, commit=True)
        _, same = later.encode("p", g, codec, shape=(numel,), seed=step)
        norms = later.commit("p", g, codec, same, shape=(numel,), seed=step, measure=True)
        assert torch.equal(payload, same)
        assert torch.equal(at_once.residual("p"), later.residual("p"))
        assert 0 < norms.lost < norms.encoded


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("select", ["exact", "sampled"])
def test_what_waits_where_runs_are_long_is_kept_by_two_calls_as_by_one(store, select):
    """A zero that a payload names only to lead on to the next element is nothing that was sent."""
    codec, numel = nb.codec(f"topk:density=1e-5,select={select},indices=runs"), 400_000
    g = torch.randn(numel, generator=torch.Generator().manual_seed(0)) / 10
    g[[0, 1, 2, -1]] = torch.tensor([9.0, 8.0, 7.0, 10.0])
    at_once, later = ErrorFeedback(store=store), ErrorFeedback(store=store)
    at_once.encode("p", g.clone(), codec, shape=(numel,), seed=1, commit=True)
    x = g.clone()
    _, payload = later.encode("p", x, codec, shape=(numel,), seed=1)
    later.commit("p", x, codec, payload, shape=(numel,), seed=1, measure=True)
    assert torch.equal(at_once.residual("p"), later.residual("p"))
    stops = range(2 + 65_536, numel - 1, 65_536)
    assert codec.decode(payload, torch.empty(numel))[list(stops)].count_nonzero() == 0 < len(stops)
    assert (later.residual("p")[list(stops)] - g[list(stops)]).abs().max() < 0.1


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
    for step in range(18):
        optimizer.zero_grad()
        loss = loss_of(whole, 0, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 11:
            state, parameters = copy.deepcopy((handle.state_dict(), whole.state_dict()))
    again = wrap(mlp())
    resumed = compress(again, spec, min_numel=64)
    again.load_state_dict(parameters)
    resumed.load_state_dict(state)
    for _ in range(6):
        again.zero_grad()
        loss_of(again, 0, rank).backward()
        sgd(again, 0.2).step()
    return losses, torch.equal(flat(whole), flat(again)), handle.residual_nbytes


@pytest.mark.parametrize(
    "spec",
    [
        "topk:density=0.1+ef",
        "dgc:density=0.1,momentum=0.5",
        *thorough("qsgd:bits=2+ef", "topk:density=0.1+ef-mixed", "dgc:density=0.1,momentum=0.5,nesterov=true"),
    ],
)
def test_models_learn_as_with_residuals_in_float32_and_resume_to_the_bit(spec):
    separator = "," if spec.startswith("dgc") else ":"
    ends = {}
    for store in ("fp32", *STORES):
        answers = run_ranks(trained, 2, f"{spec}{separator}store={store}")
        assert all(same for _, same, _ in answers)
        ends[store] = answers[0][0][-1], answers[0][2]
    loss, nbytes = ends["fp32"]
    assert ends["bf16"][0] == pytest.approx(loss, rel=0.05)
    assert ends["int8"][0] == pytest.approx(loss, rel=0.1)
    # DGC keeps the velocities of small parameters as they are.
    assert ends["bf16"][1] == pytest.approx(nbytes / 2, rel=0.04 if spec.startswith("dgc") else 0)
    assert ends["int8"][1] < 0.29 * nbytes


# ---- DGC's two sums --------------------------------------------------------------------------------------------------


def sums_of(feedback, steps, seed=0, codec=None):
    for step in range(steps):
        x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
        finite, _ = feedback.encode(
            "p", x, codec or feedback.codec, shape=(NUMEL,), seed=1000 * seed + step, commit=True
        )
        assert finite
    return {name: x.clone() for name, x in feedback.state_dict().items()}


@pytest.mark.parametrize(("store", "nbytes"), [("fp32", 8 * NUMEL), ("bf16", 4 * NUMEL), ("int8", 2 * (NUMEL + 47))])
def test_memory_of_two_sums(store, nbytes):
    feedback = DGC(density=0.05, store=store)
    sums_of(feedback, 3)
    assert feedback.nbytes == nbytes
    assert feedback.holds("p")


@pytest.mark.parametrize(
    ("store", "options"),
    [
        ("bf16", {}),
        ("int8", {"nesterov": True}),
        ("int8", {"masking": False}),
        *thorough(("int8", {}), ("bf16", {"nesterov": True}), ("bf16", {"masking": False})),
    ],
)
def test_both_sums_are_kept_on_average(store, options):
    """Without selection of what depends on what was kept, a mean over seeds is what float32 keeps: all but nothing is
    sent, so sums are linear in what was rounded.
    """
    runs, steps = 60, 12
    exact = sums_of(DGC(density=1e-9, **options), steps)
    expected = {"now/p": exact["now/p"], "velocity/p": exact["now/p"] - exact["before/p"]}
    found = [sums_of(DGC(density=1e-9, store=store, **options), steps, seed) for seed in range(runs)]
    for name, value in expected.items():
        # The element that is sent is sent in all runs or none.
        off = torch.stack([own[name].double() - value.double() for own in found])
        off = off[:, off.abs().amax(0) < 0.5 * value.abs().max()]
        spread = off.std(0)
        z = off.mean(0)[spread > 0] / (spread[spread > 0] / runs**0.5)
        assert abs(float(z.mean())) < 4.5 / z.numel() ** 0.5
        assert float(z.square().mean()) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("codec", [None, "none"])
def test_a_step_of_two_sums_that_did_not_happen_leaves_the_same_bits(store, commit, codec):
    feedback = DGC(density=0.05, store=store)
    before = sums_of(feedback, 4)
    sent = feedback.codec if codec is None else nb.codec(codec)
    for x, good in ((torch.randn(NUMEL), True), (torch.full((NUMEL,), torch.inf), False)):
        finite, _ = feedback.encode("p", x, sent, shape=(NUMEL,), seed=77, commit=commit)
        assert finite is good
        feedback.roll_back("p", x)
        after = feedback.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("store", STORES)
def test_two_sums_are_loaded_to_the_bit_and_move_to_other_stores(store):
    feedback = DGC(density=0.05, store=store)
    state = sums_of(feedback, 4)
    assert set(state) == {"now/p", "velocity/p"}
    again, plain, back = DGC(density=0.05, store=store), DGC(density=0.05), DGC(density=0.05, store=store)
    again.load_state_dict(state)
    assert all(torch.equal(x, state[name]) for name, x in again.state_dict().items())
    plain.load_state_dict(state)
    assert torch.equal(plain.state_dict()["now/p"], state["now/p"])
    assert torch.equal(plain.state_dict()["before/p"], state["now/p"] - state["velocity/p"])
    back.load_state_dict(plain.state_dict())
    assert torch.equal(back.state_dict()["now/p"], state["now/p"])
    torch.testing.assert_close(back.state_dict()["velocity/p"], state["velocity/p"], rtol=1e-2, atol=1e-2)
    feedback.scale(0.5)
    assert torch.equal(feedback.state_dict()["velocity/p"], 0.5 * state["velocity/p"])
    with pytest.raises(ValueError, match="lacks one of the two sums of p"):
        DGC(density=0.05).load_state_dict({"velocity/p": state["velocity/p"]})
