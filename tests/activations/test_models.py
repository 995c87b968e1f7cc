"""Models that nobody prepared: the same forward to the bit, gradients that are close, and bytes that add up."""

from __future__ import annotations

import contextlib

import pytest
import torch

import narrowband as nb
from tests.activations.models import MODELS, SMALL, counting, error, plain_step, same, step

HALF = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

every_model = pytest.mark.parametrize("name", MODELS)
#: PyTorch has no LSTM of float16 on CPU.
every_dtype = pytest.mark.parametrize(
    ("name", "dtype"), [(m, d) for m in MODELS for d in HALF if (m, d) != ("recurrent", "float16")]
)


@every_dtype
def test_forward_is_the_same_to_the_bit_and_gradients_are_close(name, dtype):
    plain = plain_step(name, autocast=HALF[dtype])
    found = step(name, {"bits": 8}, autocast=HALF[dtype])
    assert same(found.out, plain.out)
    assert same(found.loss, plain.loss)
    assert all(same(found.buffers[key], plain.buffers[key]) for key in plain.buffers)
    if name != "recurrent":  # whose kernel keeps bytes of its own
        assert found.saved.kept_bytes < found.saved.raw_bytes / (2.5 if dtype == "float32" else 1.3)
    assert 0 < error(found.grads, plain.grads) < 0.02


@every_model
def test_fewer_bits_keep_less_and_err_more(name):
    plain = plain_step(name)
    by_bits = {bits: step(name, {"bits": bits}) for bits in (8, 4, 2)}
    kept = [run.saved.kept_bytes for run in by_bits.values()]
    errors = [error(run.grads, plain.grads) for run in by_bits.values()]
    assert kept == sorted(kept, reverse=True)
    assert errors == sorted(errors)
    assert errors[1] < 0.4


@every_dtype
def test_off_is_plain_to_the_bit(name, dtype):
    plain = plain_step(name, autocast=HALF[dtype])
    off = step(name, {"bits": "off"}, autocast=HALF[dtype])
    assert same(off.out, plain.out)
    assert all(same(off.grads[key], plain.grads[key]) for key in plain.grads)
    assert off.saved.kept_bytes == off.saved.raw_bytes > 0


@every_dtype
def test_one_bit_masks_give_the_same_gradient_to_the_bit(name, dtype):
    plain = plain_step(name, autocast=HALF[dtype])
    masks = step(name, {"bits": "off", "operators": {"relu": 8, "dropout": 8}}, autocast=HALF[dtype])
    assert same(masks.out, plain.out)
    assert all(same(masks.grads[key], plain.grads[key]) for key in plain.grads)
    has_masks = {"relu", "dropout"} & set(masks.saved.by_operator)
    assert bool(has_masks) == (masks.saved.kept_bytes < masks.saved.raw_bytes)
    assert bool(has_masks) == (name not in ("attention", "attention, sequence first", "recurrent"))


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_channels_last(name):
    plain = plain_step(name, channels_last=True)
    found = step(name, {"bits": 8}, channels_last=True)
    masks = step(name, {"bits": "off", "operators": {"relu": 8, "dropout": 8}}, channels_last=True)
    assert same(found.out, plain.out)
    assert 0 < error(found.grads, plain.grads) < 0.02
    assert all(same(masks.grads[key], plain.grads[key]) for key in plain.grads)
    rows = step(name, {"bits": 8}).state["estimates"]
    for key, value in found.state["estimates"].items():  # the same groups, wherever in memory they are
        torch.testing.assert_close(value, rows[key], rtol=1e-3, atol=1e-3)


@every_model
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": "off"}, {"bits": 4, "statistics": "sample"}], ids=str)
def test_bytes_plain_is_what_the_plain_model_keeps(name, autocast, options):
    build, inputs = MODELS[name]
    cast = (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if autocast else contextlib.nullcontext
    torch.manual_seed(0)
    model, x = build(), inputs()
    with counting(model, x) as total, cast():
        model(x).float().logsumexp(-1).sum()
    with nb.compress_activations(model, min_numel=SMALL, **options) as saved, cast():
        model(x).float().logsumexp(-1).sum()
    assert saved.raw_bytes == total[0]
    for table in (saved.by_operator, saved.by_module):
        assert sum(entry.raw_bytes for entry in table.values()) == saved.raw_bytes
        assert sum(entry.kept_bytes for entry in table.values()) == saved.kept_bytes
    assert saved.ratio == saved.raw_bytes / saved.kept_bytes
    assert saved.by_module["(outside)"].raw_bytes == saved.by_module["(outside)"].kept_bytes > 0
    assert "custom" not in saved.by_operator
