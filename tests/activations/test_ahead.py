"""Where the host does not wait for what a tensor holds: as on a GPU, whose part is played by the CPU here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband import kernels
from narrowband.activations import packed
from narrowband.activations.ranges import Notes
from tests.activations.models import Gated


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "AHEAD", {"cpu"})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


def gradients(layers: nn.Module, x: torch.Tensor, saving: nb.ActivationCompression | None) -> torch.Tensor:
    layers.zero_grad()
    if saving is None:
        layers(x).square().mean().backward()
    else:
        with saving:
            loss = layers(x).square().mean()
        loss.backward()
    return torch.cat([p.grad.flatten() for p in layers.parameters()])


def off(layers: nn.Module, x: torch.Tensor, saving: nb.ActivationCompression) -> float:
    exact = gradients(layers, x, None)
    return ((gradients(layers, x, saving) - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("symmetric", [False, True])
def test_gradients_are_those_of_a_host_that_waits(symmetric, monkeypatch):
    """While no range jumps, codes are the same, but for groups: each is judged by itself."""
    errors = []
    for ahead in ({"cpu"}, set()):
        monkeypatch.setattr(packed, "AHEAD", ahead)
        layers, generator = model(), torch.Generator().manual_seed(1)
        saving = nb.compress_activations(layers, bits=8, symmetric=symmetric)
        errors.append([off(layers, torch.randn(64, 64, generator=generator), saving) for _ in range(6)])
    assert max(errors[0]) < 0.02
    assert sum(errors[0]) == pytest.approx(sum(errors[1]), rel=0.2)


@pytest.mark.parametrize("symmetric", [False, True])
def test_nothing_is_asked_of_the_device_but_once(symmetric, monkeypatch):
    """Every step after the first one makes codes with one call, and reads no value of a tensor."""
    layers, x = model(), torch.randn(64, 64)
    saving = nb.compress_activations(layers, bits=8, symmetric=symmetric)
    monkeypatch.setattr(packed, "by_chance", lambda _: False)
    gradients(layers, x, saving)
    for name in ("learn_ranges", "row_extremes", "quantize_rows_learning"):
        monkeypatch.setattr(kernels, name, lambda *_, **__: pytest.fail("the host waits"))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("the host waits"))
    monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("the host waits"))
    for _ in range(3):
        gradients(layers, x, saving)


def _of_notes(x: torch.Tensor) -> list[float]:
    """What has arrived of notes; all else would be asked of the device."""
    assert x.dtype is torch.float32
    found: list[float] = x.numpy().tolist()
    return found


OWN = [{"decay": 0}, {"statistics": "sample"}, {"granularity": 64}, {"statistics": "sample", "symmetric": True}]


@pytest.mark.parametrize("options", OWN, ids=str)
def test_where_batches_have_their_own_ranges_nothing_is_asked_but_once_and_codes_are_the_same(options, monkeypatch):
    outcomes = []
    for ahead in (set(), {"cpu"}):
        with monkeypatch.context() as patch:
            patch.setattr(packed, "AHEAD", ahead)
            layers, generator = model(), torch.Generator().manual_seed(1)
            saving = nb.compress_activations(layers, bits=4, **options)
            found = []
            for step in range(4):
                x = torch.randn(64, 64, generator=generator) * (1 + step)  # of other ranges each time
                found.append(gradients(layers, x, saving))
                if not ahead:
                    continue
                for where, what in (torch.Tensor, "__bool__"), (torch.Tensor, "item"), (kernels, "learn_ranges"):
                    patch.setattr(where, what, lambda *_: pytest.fail("the host waits"))
                patch.setattr(torch.Tensor, "tolist", _of_notes)
            outcomes.append(found)
    for found, expected in zip(*outcomes, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [{"decay": 0}, {"statistics": "sample"}, {"granularity": 64}], ids=str)
def test_where_batches_have_their_own_ranges_what_is_not_finite_is_looked_at_in_the_next_step(options):
    copied = nn.Identity()
    copied.forward = lambda x: x * 1.0
    layers = nn.Sequential(copied, model())
    saving = nb.compress_activations(layers, bits=8, **options)

    def outliers(x: torch.Tensor) -> int:
        with saving as saved:
            loss = layers(x).square().mean()
        loss.backward()
        return saved.outliers

    x = torch.randn(64, 64)
    bad = x.clone()
    bad[3, 5] = math.inf
    found = [bool(outliers(each)) for each in (x, x, bad, bad, bad, x, x)]
    # Codes of the first one were made before anybody could know.
    assert found[:4] == [False, False, False, True]
    assert found[5:] == [False, False]
    if "decay" not in options:  # until one is good
        assert found[4]
    assert gradients(layers, x, saving).isfinite().all()


@pytest.mark.parametrize("written", [False, True])
def test_of_norms_and_gates_nothing_is_asked_but_once(written, monkeypatch):
    monkeypatch.setattr(packed, "by_chance", lambda _: False)
    torch.manual_seed(0)
    layers, x = nn.Sequential(*(Gated(written=written) for _ in range(3))), torch.randn(128, 64)
    saving = nb.compress_activations(layers, bits=8)
    exact = gradients(layers, x, None)
    gradients(layers, x, saving)
    for name in ("learn_ranges", "row_extremes", "quantize_rows_learning"):
        monkeypatch.setattr(kernels, name, lambda *_, **__: pytest.fail("the host waits"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("the host waits"))
        patch.setattr(torch.Tensor, "item", lambda _: pytest.fail("the host waits"))
        found = gradients(layers, x, saving)
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()
    # Of a block: a normalized form, gate and up, what rsqrt says of each row, and a copy of the weight. The loss keeps
    # what it is made of, and where PyTorch normalizes the model's input, its result is kept, too.
    own = 3 * 128 * (64 + 256) + 4 * 128 * 64 + (0 if written else 128 * 64)
    assert own < saving.stats().last.sent_bytes <= own + 3 * (128 * 4 + 64 * 4)


def test_of_frozen_layers_nothing_is_asked_but_once(monkeypatch):
    """Autocast's copies of their weights leave no trace, as adapters beside them have it; only values tell."""
    layers, x = model(), torch.randn(64, 64)
    layers[2].weight.requires_grad_(False)
    saving = nb.compress_activations(layers, bits=8)
    monkeypatch.setattr(packed, "by_chance", lambda _: False)
    kept = []
    for _ in range(3):
        with saving as saved, torch.autocast("cpu", torch.bfloat16):
            loss = layers(x).square().mean()
        loss.backward()
        kept.append(saved.kept_bytes)
        monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("the host waits"))
    assert kept[0] == kept[1] == kept[2]
    layers[2].weight.requires_grad_(True)  # what was known of frozen weights says nothing of others
    monkeypatch.undo()
    assert off(layers, x, saving) < 0.02


def test_a_batch_that_is_much_wider_is_looked_at_in_the_next_step():
    copied = nn.Identity()  # what the first linear layer saves is then no input of the model, which would live anyway
    copied.forward = lambda x: x * 1.0
    wide = nn.Sequential(copied, model())
    saving = nb.compress_activations(wide, bits=8)

    def step(x: torch.Tensor) -> int:
        with saving as saved:
            loss = wide(x).square().mean()
        loss.backward()
        return saved.outliers

    x = torch.randn(64, 64)
    spiky = x.clone()
    spiky[3, 5] = 1e5  # of one row
    assert step(x) == 0
    assert step(spiky) == 0  # codes were made before anybody could know
    assert step(spiky) >= 1  # and now it is kept as it is


def test_layer_normalization_is_computed_once_and_its_input_comes_back(monkeypatch):
    """From the second step on, by the statistics of the operator itself."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(64)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    nn.init.normal_(norm.bias)
    layers = nn.Sequential(nn.Linear(64, 64), norm, nn.GELU(), nn.Linear(64, 64), norm, nn.Linear(64, 16))
    saving = nb.compress_activations(layers, bits=8)
    assert off(layers, torch.randn(96, 64), saving) < 0.02
    monkeypatch.setattr(torch, "native_layer_norm", lambda *_: pytest.fail("a second time"))
    for cast in (False, True, False):
        x = 1.1 * torch.randn(96, 64) + 0.5
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            assert off(layers, x, saving) < 0.02
    assert sum(name.endswith(":normalized") for name in saving.state_dict()["estimates"]) == 2


def test_a_normalized_batch_that_is_much_wider_is_looked_at_in_the_next_step():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    saving = nb.compress_activations(layers, bits=8)
    x = torch.randn(96, 64)
    gradients(layers, x, saving)
    with torch.no_grad():  # of small widths: the next batch is ten times as wide
        saving.estimates._ranges["1:layer_norm:0:normalized"].mul_(0.1)
    for looked in (False, True):
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            own = torch.native_layer_norm
            patch.setattr(torch, "native_layer_norm", lambda *given: (seen.append(1), own(*given))[1])  # noqa: B023
            assert off(layers, x, saving) < 0.02
        assert bool(seen) == looked


def test_what_is_not_finite_gives_gradients_that_are_not():
    layers, x = model(), torch.randn(64, 64)
    saving = nb.compress_activations(layers, bits=8)
    gradients(layers, x, saving)
    estimates = {name: value.clone() for name, value in saving.estimates.state_dict().items()}
    bad = x.clone()
    bad[0, 0] = math.nan
    assert gradients(layers, bad, saving).isnan().any()
    for name, value in saving.estimates.state_dict().items():  # nothing was learned of it
        assert value.isfinite().all()
        assert torch.equal(value, estimates[name])
    assert gradients(layers, x, saving).isfinite().all()


def test_notes_of_more_names_than_there_was_room_for():
    notes, cpu = Notes(), torch.device("cpu")
    for at in range(1500):
        notes.place(f"{at}", cpu).fill_(float(at))
    notes.send()
    notes.receive()
    # Those in memory that was left when it grew are of the past.
    assert [notes.read(f"{at}") for at in (0, 1, 1100, 1499)] == [0.0, 1.0, 1100.0, 1499.0]
    assert notes.read("1499") == 0.0
