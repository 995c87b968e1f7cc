"""Models that have read one text before they are fine-tuned on another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reproduce import pretrained as module
from reproduce.data import cache_folder
from reproduce.pretrained import Pretraining, pretrained
from reproduce.row import files_of
from reproduce.tasks import Tuned, Wikitext, load
from tests.reproduce.synthetic import write_all

HOW = Pretraining(epochs=3, batch=4, lr=0.05)


class Counting:
    """The next of seven tokens is the one after it."""

    steps = 20

    def __init__(self, seed):
        self.seed = seed

    def model(self):
        return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))

    def batches(self, epoch):
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        for _ in range(self.steps):
            x = torch.randint(7, (4, 6), generator=generator)
            yield x, (x + 1) % 7

    def loss(self, output, y):
        return F.cross_entropy(output.flatten(0, 1), y.flatten())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def weights(model):
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def kept():
    return sorted(path.name for path in (cache_folder() / "models").glob("*.pt"))


def test_it_has_learned_and_leaves_the_random_numbers_of_its_caller():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    task = Counting(seed=0)
    model = pretrained(task, "a text", HOW)
    assert torch.equal(torch.rand(4), expected)
    x, y = next(task.batches(99))
    assert task.loss(model(x), y) < 0.1 < task.loss(task.model()(x), y)


def test_rows_of_one_seed_begin_with_the_same_model_which_is_trained_once(monkeypatch):
    first = pretrained(Counting(seed=0), "a text", HOW)
    with torch.no_grad():
        first[1].bias.add_(1.0)  # a row trains its own
    with monkeypatch.context() as patched:
        patched.setattr(module, "_read", lambda *_: pytest.fail("trained again"))
        again = pretrained(Counting(seed=0), "a text", HOW)
    assert not torch.equal(weights(first), weights(again))
    (cache_folder() / "models" / kept()[0]).unlink()
    assert torch.equal(weights(pretrained(Counting(seed=0), "a text", HOW)), weights(again))
    others = [(1, "a text", HOW), (0, "a text", Pretraining(epochs=2, batch=4, lr=0.05))]
    for seed, text, how in others:
        assert not torch.equal(weights(pretrained(Counting(seed), text, how)), weights(again))
    pretrained(Counting(seed=0), "another text", HOW)
    assert len(kept()) == 4


def test_nothing_half_written_is_kept(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            pretrained(Counting(seed=0), "a text", HOW)
    assert list((cache_folder() / "models").glob("*.pt*")) == []
    pretrained(Counting(seed=0), "a text", HOW)
    assert len(kept()) == 1


def test_the_learning_rate_rises_and_falls_to_zero():
    rates = [HOW.rate(step, 100) / HOW.lr for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[52] == pytest.approx(0.5, abs=0.02)
    assert rates[-1] < 1e-3
    assert "β₁ 0.9, β₂ 0.999, whose learning rate rises to 0.05 over the first 5% of steps" in HOW.words()


def test_the_model_that_is_tuned_has_read_the_other_text(tmp_path, monkeypatch):
    """Bytes of tiny shakespeare; what it is tuned on, and judged by, are those of WikiText-2, as for ``gpt``."""
    write_all(tmp_path)
    asked = []
    monkeypatch.setattr("reproduce.tasks.pretrained", lambda *given: asked.append(given) or nn.Identity())
    tuned, plain = (
        load(name, batch=2, seed=5, rank=0, world_size=1, directory=tmp_path, limit=3000) for name in ("tuned", "gpt")
    )
    assert isinstance(tuned, Tuned)
    assert (tuned.pretrained, plain.pretrained) == (True, False)
    assert torch.equal(tuned.text.train, plain.text.train)
    assert torch.equal(tuned.text.heldout, plain.text.heldout)
    tuned.model()
    ((reading, digest),) = asked
    assert isinstance(reading, Wikitext)
    assert bytes(reading.text.train[:8].tolist()) == b"First Ci"
    assert (reading.text.train.numel(), reading.seed, reading.world_size) == (3000, 5, 1)
    assert digest == tuned.before.digest != tuned.text.digest
    assert set(files_of("gpt")) < set(files_of("tuned"))
