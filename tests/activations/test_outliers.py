"""A few numbers that dwarf all others: tensors with them are kept exactly, counted, and teach the estimates nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowband as nb
from narrowband.activations import ActivationPolicy
from narrowband.activations.arena import Arena
from narrowband.activations.graph_codes import decode, encode, unpacked
from narrowband.activations.outliers import Outliers, is_masked
from narrowband.activations.packed import Payload, quantized
from narrowband.activations.ranges import JUMP, Estimates
from narrowband.kernels import Rows, dwarfed_rows
from tests.activations.helpers import Calls, Heads
from tests.activations.models import MODELS, SMALL
from tests.thorough import thorough

BATCH, WIDTH = 256, 64


class Spoil(nn.Module):
    """Adds something to some elements of what passes, by place."""

    def __init__(self):
        super().__init__()
        self.places = {}

    def forward(self, x):
        if not self.places:
            return x
        more = torch.zeros_like(x)
        for place, value in self.places.items():
            more.view(-1)[place] = value
        return x + more


#: What comes behind the tensor with the outliers.
BEHIND = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)],
    "gelu": lambda: [nn.GELU(), nn.Linear(WIDTH, 8)],
    "silu": lambda: [nn.SiLU(), nn.Linear(WIDTH, 8)],
    "relu": lambda: [nn.ReLU(), nn.Linear(WIDTH, 8)],
    "softmax": lambda: [nn.Softmax(-1), nn.Linear(WIDTH, 8)],
    "layer norm": lambda: [nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)],
    "rms norm": lambda: [nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 8)],
    "batch norm": lambda: [nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)],
    "conv": lambda: [
        nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 8),
    ],
}  # fmt: skip

OUTLIERS = {
    "one in a row": {5: 1e20},
    "one element": {5: 1e30},
    "below zero": {5: -1e20},
    "several": {5: 1e20, 70: -1e20, 71: 3e19, 5 * WIDTH + 9: 2e18},
    "ten rows": {row * WIDTH + row: 1e12 for row in range(10)},
    "moderate": {5: 2e4},
}


def train(behind, bits, outliers, *, before=0, counted=True, amp=None, **options):
    """Gradients of a step with outliers in one tensor, after so many steps without; the report, and the handle.

    Args:
        counted: whether the rows with outliers count in the loss.
    """
    torch.manual_seed(0)
    spoil = Spoil()
    model = nn.Sequential(nn.Linear(32, WIDTH), spoil, *BEHIND[behind]())
    handle = nb.compress_activations(model, **{"bits": bits, "min_numel": SMALL, **options})
    generator, rows = torch.Generator().manual_seed(1), torch.zeros(BATCH, 1, dtype=torch.bool)
    if not counted:
        rows[:10] = True
    for step in range(before + 1):
        spoil.places = outliers if step == before else {}
        x = torch.randn(BATCH, 32, generator=generator)
        model.zero_grad()
        with handle as saved, torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
            y = model(x)
        y = torch.where(rows, 0.0, y.float())
        (y.square().mean() + y.mean()).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()]), saved, handle


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


ALLOWED = {8: 0.04, 4: 0.1, 2: 0.5}


@functools.cache
def exact(behind, outliers, counted, before, amp=None):
    return train(behind, "off", OUTLIERS[outliers], before=before, counted=counted, amp=amp)[0]


@pytest.mark.parametrize(
    ("bits", "before"), [(8, 6), (4, 0), *thorough((2, 6), (8, 0), (4, 6), (2, 0))], ids=str
)  # in the first batch, and after six steady steps
@pytest.mark.parametrize("behind", BEHIND)
def test_gradients_with_outliers_are_close_to_the_exact_ones(behind, bits, before):
    kept_exactly = 0
    for turn, outliers in enumerate(["one in a row", "one element", "below zero", "several", "ten rows", "moderate"]):
        counted = turn % 2 == {8: 0, 4: 1, 2: 0}[bits]
        expected = exact(behind, outliers, counted, before)
        found, saved, _ = train(behind, bits, OUTLIERS[outliers], before=before, counted=counted)
        if not expected.isfinite().all():  # of 1e30 squared there is none
            assert not found.isfinite().all()
            continue
        assert error(found, expected) < ALLOWED[bits]
        assert torch.cosine_similarity(found, expected, 0) > 1 - ALLOWED[bits] ** 2
        kept_exactly += saved.outliers > 0
    assert kept_exactly >= (0 if behind == "softmax" else 3), "softmax of an outlier is one, and none"


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("behind", BEHIND)
def test_gradients_with_outliers_are_close_under_autocast(behind, amp):
    outliers = {5: 1e20, 70: -1e20} if amp == torch.bfloat16 else {5: 6e4, 70: -5e4}
    for before in (0, 4):
        how = {"before": before, "counted": False, "amp": amp}
        expected, _, _ = train(behind, "off", outliers, **how)
        found, saved, _ = train(behind, 8, outliers, **how)
        assert expected.isfinite().all() or not found.isfinite().all()
        assert not expected.isfinite().all() or error(found, expected) < 0.02
        assert behind in ("softmax", "layer norm", "rms norm") or saved.outliers


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("behind", BEHIND)
def test_what_is_not_finite_gives_gradients_that_are_not_finite_and_poisons_nothing(behind, bad):
    expected, _, _ = train(behind, "off", {5: bad}, before=3)
    found, saved, handle = train(behind, 8, {5: bad}, before=3)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert not (behind == "linear" and found.isfinite().all())
    assert behind in ("relu", "softmax") or saved.outliers
    assert all(value.isfinite().all() for value in handle.state_dict()["estimates"].values())
    spoil = handle.model[1]
    spoil.places = {}
    for norm in (m for m in handle.model if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))):
        norm.reset_running_stats()
    x = torch.randn(BATCH, 32)
    handle.model.zero_grad()
    with handle as saved:
        y = handle.model(x)
    y.square().mean().backward()
    found = torch.cat([p.grad.double().flatten() for p in handle.model.parameters()])
    handle.model.zero_grad()
    handle.model(x).square().mean().backward()
    expected = torch.cat([p.grad.double().flatten() for p in handle.model.parameters()])
    assert error(found, expected) < 0.02
    assert saved.outliers == 0
    assert saved.ratio > 1


@pytest.mark.parametrize("behind", ["linear", "gelu", "conv", "rms norm"])
def test_outliers_teach_the_estimates_nothing_and_are_counted_where_they_were(behind):
    _, calm, before = train(behind, 8, {}, before=5)
    learned = before.state_dict()["estimates"]
    _, saved, handle = train(behind, 8, {5: 1e20}, before=5)
    after = handle.state_dict()["estimates"]
    assert learned.keys() == after.keys()
    # The tensor with the outlier, and all after it in this pass, are as the batch before left them.
    assert all(after[name][0].max() < 2 * value[0].max() for name, value in learned.items())
    assert calm.outliers == 0
    assert sum(kept.outliers for kept in saved.by_operator.values()) == saved.outliers
    assert sum(kept.outliers for kept in saved.by_module.values()) == saved.outliers
    assert saved.outliers >= 1  # it, and what came after it
    assert saved.kept_bytes > calm.kept_bytes


@pytest.mark.parametrize(
    ("bits", "size"), [(8, 20.0), (4, 100.0), (2, 20.0), *thorough((8, 100.0), (4, 20.0), (2, 100.0))]
)
@pytest.mark.parametrize("behind", ["gelu", "relu", "linear", "batch norm"])
def test_a_batch_that_is_suddenly_wider_is_neither_clipped_nor_drowned(behind, bits, size):
    """In 8 bits, whatever the policy says, with its own range."""
    for counted in (True, False):
        how = {"before": 5, "counted": counted}
        expected, _, _ = train(behind, "off", {5: size}, **how)
        found, saved, _ = train(behind, bits, {5: size}, **how)
        assert error(found, expected) < {8: 0.1, 4: 0.15, 2: 0.5}[bits]
        assert saved.outliers == 0


@pytest.mark.parametrize("behind", ["linear", "gelu"])
def test_what_is_kept_exactly_since_an_extreme_tensor_came_before_is_counted_and_is_said(behind, caplog):
    """All of it is, here."""
    with caplog.at_level(logging.WARNING):
        _, saved, _ = train(behind, 8, {5: 1e20})
    assert saved.outliers == 2
    assert saved.ratio == 1
    assert "nothing was compressed: 2 tensors hold inf, NaN or outliers" in caplog.text


@pytest.mark.parametrize("passed_on", [False, True])
def test_a_call_with_inputs_of_its_own_says_nothing_of_the_next(passed_on):
    """As those of several batches in one context, where the second is not computed from the first."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Tanh()), torch.randn(256, 32)
    with nb.compress_activations(model, min_numel=SMALL) as saved:
        y = model(torch.where(torch.arange(256).view(-1, 1) == 3, 1e25 * x, x))
        before = saved.outliers
        model(y if passed_on else x)
    assert before > 0
    assert (saved.outliers > before) == passed_on


# ---- masks -----------------------------------------------------------------------------------------------------------


class Masked(Heads):
    """Attention under a mask, and what comes behind it."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.out = mask, nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(3, 10, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q)))


def lower(x, value):
    """A mask that leaves out half of the keys."""
    return torch.zeros(3, 4, 10, 10, dtype=x.dtype).masked_fill(torch.arange(10) >= 5, value)


MASKS = {
    "bool": lambda _: torch.ones(3, 4, 10, 10, dtype=torch.bool).tril(),
    "−inf": lambda x: lower(x, -math.inf),
    "lowest": lambda x: lower(x, torch.finfo(x.dtype).min),
    "−1e4": lambda x: lower(x, -1e4) + torch.randn(10, 10),
}


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_attentions_mask_is_exact_and_nothing_else_is(mask, amp):
    torch.manual_seed(0)
    model, x = Masked(MASKS[mask]), torch.randn(3, 10, 32)
    gradients = []
    for bits in ("off", 8):
        model.zero_grad()
        torch.manual_seed(1)
        handle = nb.compress_activations(model, bits=bits, min_numel=100)
        with handle as saved, torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = model(x)
        y.float().square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert saved.outliers == 0
    exact = 3 * 4 * 10 * (10 * (2 if amp else 4) + 4)  # the mask, and log-sum-exp
    assert saved.by_operator["attention"].kept_bytes == exact + 4 * 3 * 10 * 32
    assert 0 < error(gradients[1], gradients[0]) < (0.05 if amp else 0.02)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float32).min])
def test_a_mask_elsewhere_is_exact_and_counted_and_nothing_else_is(value, learns):
    def attend(h):
        scores = (h if learns else h.detach()).masked_fill(torch.arange(32) >= 20, value)
        return h.tanh() * F.softplus(scores).sum(-1, keepdim=True)

    torch.manual_seed(0)
    model = Calls(attend)
    handle = nb.compress_activations(model, min_numel=SMALL)
    with handle as saved:
        model(torch.randn(256, 32, requires_grad=True)).sum().backward()
    assert saved.outliers == learns  # without gradients none is saved
    assert saved.by_operator["other"].ratio > 1.5


def test_what_is_extreme_without_a_gradient_says_nothing_of_other_tensors():
    model = Calls(lambda h: (h * torch.tensor([[math.inf] + [1.0] * 31] * 256)).tanh() * h)
    with nb.compress_activations(model, min_numel=SMALL) as saved:
        model(torch.randn(256, 32))
    assert saved.outliers == 1
    assert saved.ratio > 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_are_told_from_what_diverges(dtype):
    lowest = torch.finfo(dtype).min
    calm = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert not is_masked(calm)
    for value in (-math.inf, lowest):
        masked = calm.clone()
        masked[:, 20:] = value
        assert is_masked(masked)
        assert not is_masked(-masked)
        for other in (math.inf, math.nan, -lowest):
            spoiled = masked.clone()
            spoiled[3, 3] = other
            assert not is_masked(spoiled)
    assert is_masked(torch.full((64, 32), -math.inf, dtype=dtype))


# ---- the rule --------------------------------------------------------------------------------------------------------


def is_dwarfed(x, rows):
    x = x.contiguous()
    by_range = x.view(rows.parts, rows.outer, rows.groups, rows.inner)
    width = (by_range.amax((1, 3)) - by_range.amin((1, 3))).view(1, -1).float()
    return bool(dwarfed_rows(x.view(-1), rows, width))


FORMS = {
    "tokens": Rows(1, 197, 3, 64),
    "tokens, one range": Rows(1, 64, 1, 768),
    "tokens, single channels": Rows(1, 256, 12, 1),
    "heads": Rows(1, 4, 3, 50 * 16),
    "planes": Rows(1, 8, 16, 14 * 14),
    "planes of one image": Rows(1, 1, 4, 32 * 32),
    "channels last": Rows(1, 500, 16, 1),
    "samples": Rows(4, 20, 3, 32),
    "a prime number": Rows(1, 31, 1, 61),
}


@pytest.mark.parametrize("name", FORMS)
def test_outliers_are_found_wherever_they_are_and_however_the_tensor_is_cut(name):
    rows = FORMS[name]
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        calm = torch.randn(rows.numel, generator=generator)
        assert not is_dwarfed(calm.to(dtype), rows)
        assert not is_dwarfed(calm.relu().to(dtype), rows)
        for place in torch.randint(rows.numel, (5,), generator=generator).tolist():
            for value in (1e3, -1e3, 1e20, -1e30):
                x = calm.clone()
                x[place] = value
                assert is_dwarfed(x.to(dtype), rows)


def test_a_channel_that_dwarfs_the_others_in_every_row_is_found_and_one_that_is_100_times_as_large_is_left():
    rows = Rows(1, 128, 2, 48)
    x = torch.randn(128, 96)
    for size, dwarfs in ((20, False), (50, False), (100, False), (1e4, True), (1e9, True)):
        spoiled = x.clone()
        spoiled[:, 7] *= size
        assert is_dwarfed(spoiled, rows) == dwarfs


def test_rows_of_all_sizes_softmax_and_rows_of_zeros_are_left_alone():
    scores = (torch.randn(2, 4, 96, 96) * 30).softmax(-1)  # nearly one, and nearly zero
    assert not is_dwarfed(scores, Rows(1, 2, 4, 96 * 96))
    tokens = torch.randn(200, 64) * torch.logspace(-3, 1, 200)[torch.randperm(200)].unsqueeze(1)
    assert not is_dwarfed(tokens, Rows(1, 200, 1, 64))
    padded = torch.randn(200, 64)
    padded[10:] = 0
    assert not is_dwarfed(padded, Rows(1, 200, 1, 64))
    assert not is_dwarfed(torch.zeros(200, 64), Rows(1, 200, 1, 64))
    assert not is_dwarfed(torch.full((200, 64), 1e20), Rows(1, 200, 1, 64))
    assert not is_dwarfed(torch.randn(200, 64) * 1e20, Rows(1, 200, 1, 64))


@pytest.mark.parametrize("options", [{}, {"statistics": "sample"}, {"decay": 0.0}, {"symmetric": True}], ids=str)
def test_every_kind_of_range_is_looked_at(options):
    estimates, rows, policy = (
        Estimates(decay=options.get("decay", 0.9)),
        Rows(1, 64, 2, 32),
        ActivationPolicy(**options),
    )

    def taken(x):
        return quantized(x, rows, 4, x.dtype, Arena(), policy, estimates, "a")

    for _ in range(3):
        x = torch.randn(64, 64)
        assert isinstance(taken(x), Payload)
        x[3, 3] = 600
        assert taken(x) == Outliers(extreme=False)
        x[3, 3] = 1e10
        assert taken(x) == Outliers(extreme=True)


def test_a_range_that_widened_little_by_little_is_found_and_forgotten():
    """An outlier that grows by 1 % per batch moves no range far; one batch of 64 is looked at anyway."""
    estimates, rows, policy = Estimates(), Rows(1, 64, 1, 64), ActivationPolicy()
    found, size = None, 4.0
    for _ in range(1500):
        x = torch.randn(64, 64).clamp(-4, 4)
        x[3, 3], x[3, 4] = size, -size
        found = quantized(x, rows, 8, x.dtype, Arena(), policy, estimates, "a")
        if isinstance(found, Outliers):
            break
        size *= 1.01
    assert isinstance(found, Outliers)
    assert size < 128 * 4 * 1.01**300
    x = torch.randn(64, 64)  # and when the outlier has gone, its range goes, too
    made = quantized(x, rows, 8, x.dtype, Arena(), policy, estimates, "a")
    assert isinstance(made, Payload)
    assert made.ranges[1].item() * 255 < 20
    assert estimates.state_dict()["a"][0].item() < 20


def test_a_batch_that_is_much_wider_has_8_bits_and_teaches_as_any_other():
    estimates, rows, policy = Estimates(), Rows(1, 64, 1, 64), ActivationPolicy()
    x = torch.randn(64, 64)
    made = quantized(x, rows, 4, x.dtype, Arena(), policy, estimates, "a")
    width = estimates.state_dict()["a"][0].item()
    assert made.bits == 4
    made = quantized(x * 2 * JUMP, rows, 4, x.dtype, Arena(), policy, estimates, "a")
    assert made.bits == 8
    assert made.nbytes == x.numel()
    assert made.ranges[1].item() == pytest.approx(2 * JUMP * width / 255, rel=0.005)
    assert estimates.state_dict()["a"][0].item() == pytest.approx((0.9 + 0.2 * JUMP) * width)
    made = quantized(x * 2 * JUMP, rows, 4, x.dtype, Arena(), policy, estimates, "a")
    assert made.bits == 8
    for _ in range(3):
        made = quantized(x * 2 * JUMP, rows, 4, x.dtype, Arena(), policy, estimates, "a")
    assert made.bits == 4


@pytest.mark.parametrize("name", ["vit", "vit step by step", "resnet", "encoder", "recurrent"])
def test_in_ordinary_training_nothing_counts_as_an_outlier(name):
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    handle = nb.compress_activations(model, bits=4, min_numel=SMALL)
    for _ in range(5):
        optimizer.zero_grad()
        with handle as saved:
            loss = model(inputs()).square().mean()
        loss.backward()
        optimizer.step()
        assert saved.outliers == 0


# ---- ranges of neighbours --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("bits", [4, 2])
def test_large_tokens_among_neighbours_do_not_make_gradients_several_times_too_large(bits, norm):
    """Four tokens share a range, and of the loss' gradient the small ones have most."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), norm(64), nn.Linear(64, 8))
    x = torch.randn(16, 32, 64)
    x[:, 5] *= 200

    def gradients(model, x, context):
        model.zero_grad()
        with context:
            loss = model(x).square().mean()
        loss.backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    exact = gradients(copy.deepcopy(model).double(), x.double(), contextlib.nullcontext())
    x.requires_grad_()
    found = gradients(model, x * 1, nb.compress_activations(model, bits=bits, granularity=256))
    assert error(found, exact) < {4: 0.9, 2: 2.5}[bits]


# ---- compiled graphs -------------------------------------------------------------------------------------------------


def restored(x, bits, *, signs, stochastic=True):
    codes, low, step = encode(x, bits, stochastic=stochastic, signs=signs)
    return decode(unpacked(codes, bits, x.shape[1]), low, step)


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_beside_an_outlier_a_group_of_a_graph_comes_back_as_zeros_and_the_outlier_as_it_was(bits, signs):
    for outliers in ({3: 1e20}, {3: -1e20}, {3: 1e20, 9: -1e20}, {3: 1e30, 9: 1e30, 11: -1e30}):
        x = torch.randn(64, 256)
        for place, value in outliers.items():
            x[:, place] = value
        found = restored(x, bits, signs=signs)
        large = torch.zeros(256, dtype=torch.bool)
        large[list(outliers)] = True
        torch.testing.assert_close(found[:, large], x[:, large], rtol=2 / 2**bits, atol=0)
        assert (found[:, ~large].abs() <= 2.0**-24).all()
        assert not signs or torch.equal(found > 0, x > 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_sparse_groups_of_a_graph_are_right_on_average_and_keep_their_signs(bits):
    x = (torch.randn(512, 256) - 2).relu() * torch.where(torch.rand(512, 256) < 0.5, -1.0, 1.0)
    for signs in (False, True):
        found = restored(x, bits, signs=signs)
        step = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) / (2**bits - 1)
        assert ((found - x).abs() <= 2 * step).all()
        assert abs((found - x).sum() / x.abs().sum()) < 0.02
        assert not signs or torch.equal(found > 0, x > 0)
        assert (found[x == 0] == 0).all()


@pytest.mark.parametrize(("behind", "bits"), [("gelu", 4), *thorough(("linear", 8), ("relu", 2), ("layer norm", 8))])
def test_gradients_of_a_compiled_model_with_outliers_are_close(behind, bits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, WIDTH), *BEHIND[behind]())
    x = torch.randn(4 * BATCH, 32)
    for row, value in ((0, 1e18), (300, -1e16), (301, 1e17)):
        x[row] = 0
        x[row, row % 32] = value

    def gradients(context):
        model.zero_grad()
        with context:
            y = compiled(x)
        kept = torch.ones(len(x), 1, dtype=torch.bool)
        kept[[0, 300, 301]] = False
        torch.where(kept, y, 0.0).square().mean().backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    compiled = torch.compile(model, backend="aot_eager")
    expected = gradients(torch.enable_grad())
    found = gradients(nb.compress_activations(compiled, bits=bits, min_numel=256))
    assert error(found, expected) < {8: 0.15, 4: 0.25, 2: 0.8}[bits]
