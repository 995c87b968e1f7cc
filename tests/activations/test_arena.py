"""Memory for codes: pieces that nothing else lies in, and that are used again."""

from __future__ import annotations

import gc
import threading
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import narrowband as nb
from narrowband.activations.arena import Arena, Pieces
from tests.garbage import collected_after

CPU = torch.device("cpu")
HUGE = 2 << 20  # bytes of a page, to which pieces are rounded up


# ---- an arena --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=60))
def test_parts_of_an_arena_do_not_overlap(sizes):
    arena = Arena()
    arena.PIECE_NBYTES = 1 << 12
    with patch.object(Pieces, "take", autospec=True, side_effect=Pieces.take) as taken:
        parts = [arena.take(nbytes, CPU) for nbytes in [*sizes, 10_000]]
    for value, part in enumerate(parts):
        part.fill_(value)
    for value, (nbytes, part) in enumerate(zip([*sizes, 10_000], parts, strict=True)):
        assert part.shape == (nbytes,)
        assert bool((part == value).all())
        assert not nbytes or part.data_ptr() % 64 == 0
    assert taken.call_count <= 2 + sum(sizes) // 1000


def test_a_piece_is_free_with_the_last_of_its_parts():
    pieces = Pieces()
    arena = Arena(pieces)
    first = [arena.take(Arena.PIECE_NBYTES // 2, CPU) for _ in range(2)]
    assert first[1].data_ptr() - first[0].data_ptr() == Arena.PIECE_NBYTES // 2
    arena.take(1, CPU)  # of the next piece
    del first[1]
    assert (pieces.nbytes, pieces.idle_nbytes) == (2 * Arena.PIECE_NBYTES, 0)
    first.clear()
    assert (pieces.nbytes, pieces.idle_nbytes) == (2 * Arena.PIECE_NBYTES, Arena.PIECE_NBYTES)


# ---- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_pieces_are_used_again_and_hold_what_is_written(order):
    pieces, places = Pieces(), []
    for step in range(5):
        taken = [pieces.take(HUGE) for _ in range(3)]
        for value in range(3):
            taken[value].fill_(10 * step + value)
        assert [int(piece[-1]) for piece in taken] == [10 * step + value for value in range(3)]
        places.append({piece.data_ptr() for piece in taken})
        for _ in range(3):
            taken.pop(0 if order == 1 else -1)
    assert all(place == places[0] for place in places)
    assert pieces.nbytes == pieces.idle_nbytes == 3 * HUGE


def test_all_pieces_take_no_more_than_were_in_use_at_once():
    pieces = Pieces()
    small = [pieces.take(HUGE) for _ in range(4)]
    small.clear()
    large = pieces.take(3 * HUGE)  # none of the small ones is large enough: most of them have to go
    assert pieces.nbytes == 4 * HUGE
    del large
    assert pieces.take(1).numel() == 3 * HUGE  # whose pages were used last
    assert pieces.nbytes == 4 * HUGE


def test_what_was_not_in_use_lately_goes_back_to_the_system():
    pieces = Pieces()
    many = [pieces.take(HUGE) for _ in range(6)]
    many.clear()
    for _ in range(2 * Pieces._RECENT):
        pieces.begin()
        pieces.take(1)
    assert pieces.nbytes == HUGE


def test_pieces_outlive_their_owner_while_parts_are_held():
    pieces = Pieces()
    part = pieces.take(HUGE).fill_(7)
    del pieces
    gc.collect()
    assert bool((part == 7).all())


def test_threads_never_share_a_piece():
    pieces, wrong = Pieces(), []

    def work(value: int) -> None:
        for _ in range(200):
            piece = pieces.take(HUGE)
            piece[::4096] = value
            if not bool((piece[::4096] == value).all()):
                wrong.append(value)
            del piece

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pieces.nbytes == pieces.idle_nbytes <= 4 * HUGE


@pytest.mark.parametrize(("idle", "look"), [(24, Pieces.idle_nbytes.fget), (1, Pieces._busy)])
def test_a_piece_may_return_at_any_allocation(idle, look):
    for allocations in range(1, 40):
        pieces = Pieces()
        held = [pieces.take(1) for _ in range(26)]
        del held[:idle]
        with collected_after(allocations, held.pop):
            assert look(pieces) <= 26 * HUGE


# ---- a model's -------------------------------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 8))


def test_codes_of_a_model_lie_by_themselves_until_backward():
    codes, places = [], []

    def taking(arena, nbytes, device, take=Arena.take):
        taken = take(arena, nbytes, device)
        codes.append(StorageWeakRef(taken.untyped_storage()))
        places.append(taken.data_ptr())
        return taken

    model = mlp()
    with patch.object(Arena, "take", taking), nb.compress_activations(model, min_numel=1):
        loss = model(torch.randn(32, 64)).sum()
    assert len(codes) == 4  # of a linear layer, GELU, ReLU and dropout
    assert max(places) - min(places) <= 4 * 32 * 64  # in one piece
    assert not any(code.expired() for code in codes)
    loss.backward()
    assert all(code.expired() for code in codes)


def test_later_steps_ask_the_system_for_no_memory():
    model, asked = mlp(), []

    def new(nbytes, made=nb.activations.arena._new_memory):
        asked.append(nbytes)
        return made(nbytes)

    with patch.object(nb.activations.arena, "_new_memory", new):
        for step in range(4):
            with nb.compress_activations(model, min_numel=1):  # a context of its own in every step
                losses = [model(torch.randn(32, 64)).sum() for _ in range(2)]
            with nb.compress_activations(model, min_numel=1):  # while the codes of the other pass are there
                losses += [model(torch.randn(32, 64)).sum()]
            sum(losses).backward()
            assert asked == [Arena.PIECE_NBYTES] * 2, step
