"""How copies of a model become equal: what travels, and between whom."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowband.averaging import replicas
from narrowband.errors import DisagreementError
from tests.ranks import run_ranks

PIECE = 4096


class Odd(nn.Module):
    """Parameters and buffers of all kinds, tied, empty, and not in the order of their indices."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(60, 50).t())
        self.small = nn.Parameter(torch.randn(33, dtype=torch.bfloat16), requires_grad=False)
        self.pairs = nn.Parameter(torch.randn(7, 3, dtype=torch.complex64))
        self.tied = self.matrix
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.rand(1000) > 0.5)
        self.register_buffer("nothing", torch.empty(0))


def bits_of(model):
    tensors = [*model.parameters(), *model.buffers()]
    return [torch.view_as_real(x.detach()) if x.is_complex() else x.detach() for x in tensors]


def begun(rank, world_size, seeds):
    replicas._PIECE_NBYTES = PIECE
    torch.manual_seed(seeds[rank])
    model = Odd()
    received = replicas.begin_with_the_first(model, None)
    return [x.clone() for x in bits_of(model)], received


@pytest.mark.parametrize(
    ("seeds", "gets"),
    [([5, 5, 5], [False, False, False]), ([5, 5, 9], [False, False, True]), ([5, 8, 5, 9], [False, True, False, True])],
)
def test_all_get_what_the_first_has_and_nobody_what_it_has_already(seeds, gets):
    answers = run_ranks(begun, len(seeds), seeds, fresh=True)
    torch.manual_seed(seeds[0])
    expected = bits_of(Odd())
    for (found, received), lacks in zip(answers, gets, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert (received > 0) is lacks
    whole = sum(x.numel() * x.element_size() for x in expected)
    assert all(0.9 * whole < received <= whole for (_, received), lacks in zip(answers, gets, strict=True) if lacks)


def interrupted(rank, world_size):
    """One rank has all but the last third of what the first has, as after a transfer that broke off."""
    replicas._PIECE_NBYTES = PIECE
    torch.manual_seed(1)
    model = nn.Linear(100, 300, bias=False)
    if rank == 2:
        with torch.no_grad():
            model.weight[200:] = 0
    received = replicas.begin_with_the_first(model, None)
    return model.weight.detach().clone(), received


def test_a_transfer_that_broke_off_goes_on_where_it_was():
    answers = run_ranks(interrupted, 3, fresh=True)
    assert all(torch.equal(weight, answers[0][0]) for weight, _ in answers)
    received = [nbytes for _, nbytes in answers]
    assert received[:2] == [0, 0]
    assert 40_000 <= received[2] <= 40_000 + 2 * PIECE


def in_another_format(rank, world_size, seeds):
    """Nothing is trained here, so ranks need not have it in one format."""
    torch.manual_seed(seeds[rank])
    model = nn.Conv2d(6, 5, 3, bias=False).requires_grad_(False)
    if rank:
        model.to(memory_format=torch.channels_last)
    received = replicas.begin_with_the_first(model, None)
    return model.weight.clone(memory_format=torch.contiguous_format), received


@pytest.mark.parametrize("seeds", [[1, 1], [1, 2]])
def test_elements_find_their_places_in_another_memory_format(seeds):
    (first, _), (second, received) = run_ranks(in_another_format, 2, seeds)
    assert torch.equal(first, second)
    assert (received > 0) is (seeds[0] != seeds[1])


def different(rank, world_size, kind):
    """A rank has another tensor that is not trained, or tensors in another order."""
    odd, names = rank == 1, ["a", "b"]
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in (names[::-1] if odd and kind == "order" else names)})
    model.requires_grad_(requires_grad=kind == "order")
    if kind == "buffer" and not odd:
        model.register_buffer("mask", torch.ones(4))
    if kind == "shape":
        model.register_buffer("mask", torch.full((4 + odd,), float(rank)))
    if kind == "dtype":
        model.register_buffer("mask", torch.full((4,), rank, dtype=torch.int64 if odd else torch.float32))
    before, usual = [x.clone() for x in bits_of(model)], replicas._PIECE_NBYTES
    if kind == "pieces" and odd:
        replicas._PIECE_NBYTES = 16
    try:
        replicas.begin_with_the_first(model, None)
    except DisagreementError as error:
        return str(error), all(torch.equal(a, b) for a, b in zip(before, bits_of(model), strict=True))
    finally:
        replicas._PIECE_NBYTES = usual
    return None, False


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("buffer", "'mask' (4: (4,), torch.float32 on ranks 0, 2; nothing on rank 1)"),
        ("shape", "'mask' (4: (4,), torch.float32 on ranks 0, 2; 4: (5,), torch.float32 on rank 1)"),
        ("dtype", "'mask' (4: (4,), torch.float32 on ranks 0, 2; 4: (4,), torch.int64 on rank 1)"),
        ("pieces", "pieces (26214400 bytes in 1048576 on ranks 0, 2; 26214400 bytes in 16 on rank 1)"),
        ("order", "'a.weight' (0: (3, 3), torch.float32 on ranks 0, 2; 2: (3, 3), torch.float32 on rank 1)"),
    ],
)
def test_other_tensors_on_a_rank_are_an_error_that_names_them_before_anything_is_copied(kind, words):
    for text, unchanged in run_ranks(different, 3, kind):
        assert words in text
        assert unchanged
