from __future__ import annotations

import math

import pytest
import torch

from narrowband.bench.models import GPTConfig
from reproduce.data import Images, Text
from reproduce.tasks import (
    Cifar,
    Patches,
    Plays,
    Shakespeare,
    Wikitext,
    augmented,
    in_words,
    load,
    own_part,
    window_starts,
)

WORLD_SIZE = 4


def images(train=64, test=24):
    """Images that can be told apart by any of their pixels."""
    x = torch.arange(train, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 32, 32).clone()
    return Images(x, torch.arange(train), x[:test], torch.arange(test) % 10, digest="")


def text(train=700, heldout=300):
    return Text(torch.arange(train).remainder(50).byte(), torch.arange(heldout).remainder(50).byte(), 50, digest="")


def ranks(kind, what, batch=16, seed=0):
    return [kind(batch, seed, rank, WORLD_SIZE, what) for rank in range(WORLD_SIZE)]


# ---- order and parts -------------------------------------------------------------------------------------------------


def test_a_rank_takes_its_part_of_every_global_batch():
    order = torch.arange(20)
    parts = [own_part(order, 8, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    assert [part.tolist() for part in parts] == [
        [[r * 2, r * 2 + 1], [r * 2 + 8, r * 2 + 9]] for r in range(WORLD_SIZE)
    ]


@pytest.mark.parametrize(("kind", "what"), [(Cifar, images()), (Shakespeare, text(train=64 * 33))])
def test_ranks_share_an_epoch_and_no_sample_is_seen_twice(kind, what):
    targets = []
    for task in ranks(kind, what):
        batches = list(task.batches(0))
        assert len(batches) == task.steps > 1
        assert all(y.shape[0] == 16 // WORLD_SIZE for _, y in batches)
        targets += [y for _, y in batches]
    if kind is Cifar:
        assert sorted(torch.cat(targets).tolist()) == list(range(64))
    else:
        assert torch.cat(targets).shape == (32, 64)


@pytest.mark.parametrize(("kind", "what"), [(Cifar, images()), (Shakespeare, text(train=64 * 33))])
def test_the_order_depends_on_the_seed_and_the_epoch_alone(kind, what):
    def first(seed, epoch):
        return next(iter(kind(16, seed, 1, WORLD_SIZE, what).batches(epoch)))

    for again, one in zip(first(3, 1), first(3, 1), strict=True):
        assert torch.equal(again, one)
    for other in (first(4, 1), first(3, 2)):
        assert not torch.equal(first(3, 1)[0], other[0])


def test_samples_are_those_of_the_batches():
    for task in ranks(Cifar, images()):
        samples = task.samples(3)
        assert samples.dtype == torch.int64
        assert [task.images.train_y[ids].tolist() for ids in samples] == [y.tolist() for _, y in task.batches(3)]
    for task in ranks(Shakespeare, text(train=64 * 33)):
        assert [task.text.train[ids].tolist() for ids in task.samples(3)] == [
            x[:, 0].tolist() for x, _ in task.batches(3)
        ]


def test_windows_lie_side_by_side_and_are_always_as_many():
    all_starts = [window_starts(1000, 64, torch.Generator().manual_seed(seed)) for seed in range(50)]
    assert {starts.numel() for starts in all_starts} == {14}
    for starts in all_starts:
        ordered = starts.sort().values
        assert torch.equal(ordered.diff(), torch.full((13,), 64))
        assert 0 <= ordered[0] < 64
        assert ordered[-1] + 64 < 1000  # the last target is there
    assert len({starts.min().item() for starts in all_starts}) > 10


def test_targets_are_the_next_characters():
    for x_BL, y_BL in Shakespeare(4, 0, 0, 1, text()).batches(0):
        assert torch.equal(y_BL, (x_BL + 1) % 50)


def test_the_same_images_whatever_the_model():
    for resnet, vit in zip(ranks(Cifar, images()), ranks(Patches, images()), strict=True):
        for one, other in zip(resnet.batches(1), vit.batches(1), strict=True):
            assert all(map(torch.equal, one, other))
    x, _ = next(iter(vit.batches(0)))
    logits = vit.model()(x)
    assert logits.shape == (4, 10)
    assert logits.isfinite().all()


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="batch of 6 cannot be shared evenly by 4 ranks"):
        Cifar(6, 0, 0, WORLD_SIZE, images())


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match="no task 'mnist'; there are: cifar, lstm, llama, shakespeare, gpt, tuned, vit"
    ):
        load("mnist", batch=4, seed=0, rank=0, world_size=1)


# ---- augmentation ----------------------------------------------------------------------------------------------------


def test_every_image_is_a_crop_of_itself_with_a_black_border():
    x = torch.randint(1, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    seen = set()
    for at, image in enumerate(augmented(x, torch.Generator().manual_seed(1))):
        crops = {
            (top, left, mirrored): crop.flip(2) if mirrored else crop
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            for crop in [padded[at, :, top : top + 32, left : left + 32]]
        }
        found = [place for place, crop in crops.items() if torch.equal(crop, image)]
        assert len(found) == 1
        seen.add(found[0])
    assert len({place[0] for place in seen}) > 5
    assert len({place[1] for place in seen}) > 5
    assert {place[2] for place in seen} == {True, False}


def test_batches_have_the_layout_that_is_fast():
    x, _ = next(iter(Cifar(16, 0, 0, WORLD_SIZE, images()).batches(0)))
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.dtype == torch.float32


# ---- metrics ---------------------------------------------------------------------------------------------------------


class Right(torch.nn.Module):
    """Says of every image that it is of class 3."""

    def forward(self, x):
        return torch.nn.functional.one_hot(torch.full((x.shape[0],), 3), 10).float()


class Uniform(torch.nn.Module):
    def forward(self, x_BL):
        return torch.zeros(*x_BL.shape, 50)


def test_accuracy_is_over_the_whole_test_set():
    tasks = ranks(Cifar, images(test=25))
    tallies = [task.tally(Right()) for task in tasks]
    assert sum(count for _, count in tallies) == 25
    right = sum(y == 3 for y in tasks[0].images.test_y.tolist())
    assert tasks[0].value(*map(sum, zip(*tallies, strict=True))) == pytest.approx(100 * right / 25)


def test_a_metric_is_the_same_however_many_samples_go_through_at_once():
    class Watched(Right):
        def forward(self, x):
            seen.append(x.shape[0])
            return super().forward(x)

    seen = []
    task = ranks(Cifar, images(test=44))[0]
    assert task.tally(Watched(), 5) == task.tally(Right())
    assert seen == [5, 5, 1]


def test_perplexity_of_knowing_nothing_is_the_vocabulary():
    tasks = ranks(Shakespeare, text())
    tallies = [task.tally(Uniform()) for task in tasks]
    assert tasks[0].value(*map(sum, zip(*tallies, strict=True))) == pytest.approx(50, rel=1e-5)
    assert sum(count for _, count in tallies) == 64 * (300 - 64)  # every window there is


def test_a_loss_that_is_not_finite_is_no_perplexity():
    for nats in (math.inf, math.nan, 1e6):
        assert math.isnan(Shakespeare(4, 0, 0, 1, text()).value(nats, 1.0))


@pytest.mark.parametrize(("kind", "length"), [(Plays, 64), (Wikitext, 128)])
@pytest.mark.parametrize(("width", "dim", "heads"), [(0, 128, 4), (64, 64, 2), (16, 16, 1)])
def test_a_gpt_is_as_wide_as_its_row_says_and_its_heads_stay_as_wide(kind, length, width, dim, heads):
    shape = GPTConfig(vocab=256, dim=dim, blocks=4, heads=heads, sequence=length, batch=1)
    own = kind(8, 0, 0, WORLD_SIZE, text(), width)
    assert sum(p.numel() for p in own.model().parameters()) == shape.numel()
    said = in_words(kind.name, 8, width)
    assert said["model"] == f"GPT, 4 blocks of width {dim}, {heads} head{'s' if heads > 1 else ''}"
    assert said["windows"].startswith(f"of {length} bytes")
