"""What the owner of a chunk loses as it encodes a mean: kept, moved into the residual, saved and put together."""

from __future__ import annotations

import pytest
import torch

import narrowband as nb
from narrowband.feedback import ErrorFeedback, Layout

N, RANKS = 12, 3
CUTS = [slice(0, 4), slice(4, 8), slice(8, 12)]


def owner_of(rank, residual=1.0, error=0.5):
    feedback = ErrorFeedback()
    feedback.add_residual("w", torch.full((N,), residual))
    feedback.set_owner_error("w", CUTS[rank], torch.full((4,), error), numel=N, ranks=RANKS)
    return feedback


def in_place(cut, value):
    return torch.zeros(N).index_fill_(0, torch.arange(N)[cut], value)


def test_another_cut_or_collective_moves_it_into_the_residual_where_it_counts_as_often_as_there_are_ranks():
    moved = torch.ones(N) + in_place(CUTS[1], RANKS * 0.5)
    feedback = owner_of(1)
    assert torch.equal(feedback.owner_error("w", CUTS[1]), torch.full((4,), 0.5))
    assert feedback.owner_error("w", CUTS[0]) is None
    feedback.set_owner_error("w", slice(0, 6), torch.full((6,), 0.25), numel=N, ranks=RANKS)
    assert torch.equal(feedback.residual("w"), moved)
    assert torch.equal(feedback.owner_error("w", slice(0, 6)), torch.full((6,), 0.25))

    feedback = owner_of(1)
    feedback.reclaim_owner_error("w")
    assert torch.equal(feedback.residual("w"), moved)
    feedback.reclaim_owner_error("w")
    assert torch.equal(feedback.residual("w"), moved)
    assert torch.equal(owner_of(1).take_residual("w"), moved)


@pytest.mark.parametrize("store", ["bf16", "int8"])
def test_what_moves_into_a_rounded_residual_is_the_same_after_a_resume(store):
    feedback, resumed = ErrorFeedback(store=store), ErrorFeedback(store=store)
    codec, x = nb.codec("qsgd:bits=2"), torch.randn(300, generator=torch.Generator().manual_seed(0))
    feedback.encode("w", x, codec, shape=(300,), seed=5, commit=True)
    feedback.set_owner_error("w", slice(100, 200), torch.linspace(-1, 1, 100), numel=300, ranks=RANKS)
    resumed.load_state_dict({name: value.clone() for name, value in feedback.state_dict().items()})
    before = feedback.residual("w").clone()
    for each in (feedback, resumed):
        each.reclaim_owner_error("w")
    assert torch.equal(feedback.residual("w"), resumed.residual("w"))
    assert not torch.equal(feedback.residual("w"), before)
    if store == "bf16":  # no groups, so that others keep their bits
        assert torch.equal(feedback.residual("w")[200:], before[200:])


def test_a_newer_error_takes_the_place_of_the_one_before():
    feedback = owner_of(2)
    feedback.set_owner_error("w", CUTS[2], torch.full((4,), 0.125), numel=N, ranks=RANKS)
    assert torch.equal(feedback.residual("w"), torch.ones(N))
    assert torch.equal(feedback.owner_error("w", CUTS[2]), torch.full((4,), 0.125))


def test_a_decay_leaves_as_much_of_it_as_of_a_residual():
    feedback = ErrorFeedback(decay=0.75)
    feedback.set_owner_error("w", CUTS[0], torch.ones(4), numel=N, ranks=RANKS)
    assert torch.equal(feedback.owner_error("w", CUTS[0]), torch.ones(4))
    assert feedback.owner_decay == 0.75
    layers = [Layout("w", nb.codec("qsgd:bits=2"), (64, 64), torch.device("cpu"))]
    assert "may grow" in (ErrorFeedback().note(layers, whole=True) or "")
    assert ErrorFeedback(decay=0.75).note(layers, whole=True) is None, "what grows by less than it decays stays bounded"


def test_a_rank_whose_gradients_were_zero_gets_a_residual_with_it():
    feedback = ErrorFeedback()
    feedback.set_owner_error("w", CUTS[0], torch.ones(4), numel=N, ranks=RANKS)
    assert torch.equal(feedback.residual("w"), torch.zeros(N))


def test_it_follows_the_unit_of_gradients_and_counts_as_memory():
    feedback = owner_of(0)
    feedback.scale(4.0)
    assert torch.equal(feedback.owner_error("w", CUTS[0]), torch.full((4,), 2.0))
    assert feedback.nbytes == 4 * (N + 4)


def test_a_saved_state_goes_on():
    saved = owner_of(1).state_dict()
    feedback = ErrorFeedback()
    feedback.check_state(saved)
    feedback.load_state_dict(saved)
    assert torch.equal(feedback.owner_error("w", CUTS[1]), torch.full((4,), 0.5))
    assert torch.equal(feedback.residual("w"), torch.ones(N))
    fits = [feedback.fits(name, value, {"w": N}, {}) for name, value in saved.items()]
    assert fits == [True, True]
    assert not feedback.fits("owner/10/3/w", torch.zeros(4), {"w": N}, {})


def test_a_state_with_an_error_and_no_residual_is_refused():
    saved = owner_of(1).state_dict()
    del saved["w"]
    with pytest.raises(ValueError, match="no residual of 'w'"):
        ErrorFeedback().check_state(saved)


def test_another_number_of_ranks_goes_on_with_all_that_the_mean_lacks():
    merged = ErrorFeedback.merged([owner_of(r, residual=float(r), error=10.0 + r).state_dict() for r in range(RANKS)])
    expected = torch.ones(N) + sum(in_place(CUTS[r], 10.0 + r) for r in range(RANKS))
    assert merged.keys() == {"w"}
    torch.testing.assert_close(merged["w"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("spec", "grows"), [("qsgd:bits=2", True), ("uniform:bits=1", True), ("qsgd:bits=3", False)])
def test_a_codec_that_loses_more_than_it_is_given_is_said_at_set_up(spec, grows):
    note = ErrorFeedback().note([Layout("w", nb.codec(spec), (N,), torch.device("cpu"))], whole=True)
    assert (note is not None) == grows
    if grows:
        assert "may grow" in note
        assert spec in note
