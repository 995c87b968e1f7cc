"""RMS norms that a model writes out of simple operators: policies and tables take them for layer normalization."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowband.activations.policy import ActivationPolicy
from tests.activations.derived import (
    Between,
    Multiplied,
    Written,
    behind,
    compress,
    gradients,
    of_last,
    saved_by,
    tokens,
    uneven,
)
from tests.activations.drawing import kept, kept_bytes
from tests.activations.models import error, same

EPS = 1e-12


class Form(nn.Module):
    """RMS normalization by a function, with a weight behind it."""

    def __init__(self, function, *, offset=0.0):
        super().__init__()
        self.weight, self._function, self._offset = nn.Parameter(torch.ones(32)), function, offset

    def forward(self, x):
        y = self._function(x.float())
        return (y * (self._offset + self.weight) if self._offset else self.weight * y).type_as(x)


#: Forms that keep what PyTorch's own norm keeps.
FORMS = {
    "Llama": Written,
    "Gemma": lambda: Form(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), offset=1.0),
    "square": lambda: Form(lambda x: torch.rsqrt(x.square().mean(-1, keepdim=True).add(EPS)) * x),
    "product": lambda: Form(lambda x: torch.mul(x, (EPS + torch.mean(x * x, -1, True)).rsqrt())),
    "Gemma 4": lambda: Form(lambda x: x * torch.pow(x.pow(2).mean(-1, keepdim=True) + EPS, -0.5)),
    "no epsilon": lambda: Form(lambda x: x * torch.rsqrt((x**2).mean(-1, keepdim=True))),
}
#: What forms save beside that: the sum of weight and offset; the operand of a power, of each row.
BESIDE = {"Gemma": 4 * 32, "Gemma 4": 80 * 4}
#: The same in 16 bits, whose casts are saved, too.
NARROW = {"Llama in 16 bits": lambda: Written(torch.bfloat16), "T5 in 16 bits": Multiplied}


def step(norm, **options):
    """What the pass saved, and gradients; of the same model, input and random numbers every time."""
    torch.manual_seed(0)
    model, x = Between(uneven(norm)), tokens()
    with compress(model, **options) as saved:
        y = model(x)
    y.square().sum().backward()
    return saved, gradients(model)


def table(saved):
    return {name: (each.raw_bytes, each.kept_bytes) for name, each in saved.by_operator.items() if each.raw_bytes}


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 8},
        {"bits": 4},
        {"bits": 2},
        {"bits": 4, "operators": {"layer_norm": 4}},
        {"bits": 8, "modules": {"function": 2}},
        {"bits": "off"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FORMS)
def test_it_keeps_what_pytorchs_own_keeps_and_counts_as_that(name, options):
    own, _ = step(nn.RMSNorm(32, eps=EPS), **options)
    saved, _ = step(FORMS[name](), **options)
    beside = {"other": (BESIDE[name], BESIDE[name])} if name in BESIDE else {}
    assert table(saved) == table(own) | beside
    assert ("other" in str(saved)) == bool(beside)


@pytest.mark.parametrize("name", FORMS)
def test_where_others_have_more_bits_the_product_with_the_weight_has_them(name):
    policy = {"bits": 2, "operators": {"layer_norm": 4, "other": 8}}
    own, _ = step(nn.RMSNorm(32, eps=EPS), **policy)
    saved, _ = step(FORMS[name](), **policy)
    assert saved.by_operator["layer_norm"] == own.by_operator["layer_norm"]
    assert saved.by_operator["other"].kept_bytes == 10 * 8 * 32 + BESIDE.get(name, 0)


@pytest.mark.parametrize("name", [*FORMS, *NARROW])
def test_in_four_bits_gradients_err_as_behind_pytorchs_own(name):
    make = (FORMS | NARROW)[name]
    _, exact = step(make(), bits="off")
    _, exact_own = step(nn.RMSNorm(32, eps=EPS), bits="off")
    of_own = error(step(nn.RMSNorm(32, eps=EPS), bits=4)[1], exact_own)
    found = error(step(make(), bits=4)[1], exact)
    assert 0 < found < 1.3 * of_own < 0.01
    # As before norms were told from other operators, and as a policy says that names these.
    assert error(step(make(), bits=4, operators={"other": 4})[1], exact) > 10 * found


@pytest.mark.parametrize("name", [*FORMS, *NARROW])
@pytest.mark.parametrize("bits", [4, "off"])
def test_a_policy_that_names_other_means_norms_too(name, bits):
    saved, _ = step((FORMS | NARROW)[name](), bits=8, operators={"other": bits})
    assert "layer_norm" not in table(saved)
    elements = 10 * 8 * 32
    if bits == 4:
        assert saved.by_operator["other"].kept_bytes == elements // 2 + 80 * 4 + BESIDE.get(name, 0)
    else:
        assert saved.by_operator["other"].kept_bytes == saved.by_operator["other"].raw_bytes > 8 * elements


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"operators": {"other": 4}}, False),
        ({"operators": {"other": 4, "layer_norm": 8}}, True),
        ({"modules": {"norm": 4}}, True),
        ({"modules": {"norm:other": 4}}, False),
        ({"modules": {"norm:other": 4, "*": 8}}, True),
        ({"operators": {"other": 4}, "modules": {"norm:layer_norm": 8}}, True),
        ({"operators": {"other": 4}, "modules": {"attn:layer_norm": 8}}, False),
    ],
    ids=str,
)
def test_a_policy_says_whether_it_means_norms(options, expected):
    assert ActivationPolicy(**options).counts_as_norm("norm") == expected


@pytest.mark.parametrize("name", [*FORMS, *NARROW])
@pytest.mark.parametrize("bits", [8, 4, "off"])
def test_the_bytes_are_those_that_live(name, bits):
    torch.manual_seed(0)
    model, x = Between(uneven((FORMS | NARROW)[name]())), tokens()
    before = kept()
    with compress(model, bits=4, operators={"layer_norm": bits}) as saved:
        y = model(x)
    model.x = model.y = None
    assert saved.kept_bytes == kept_bytes([*model.parameters(), x, y], before)


@pytest.mark.parametrize("name", [*FORMS, *NARROW])
def test_where_norms_are_off_the_input_is_exact_and_the_result_computed_from_it(name):
    make = (FORMS | NARROW)[name]
    _, exact = step(make(), bits="off")
    saved, found = step(make(), bits=4, operators={"layer_norm": "off"})
    assert all(same(found[key], exact[key]) for key in exact)
    size = 2 if name == "T5 in 16 bits" else 4
    assert saved.by_operator["layer_norm"].kept_bytes == size * 10 * 8 * 32 + 80 * 4
    assert saved.by_operator["matmul"].kept_bytes == 4 * 32


@pytest.mark.parametrize(("gelu", "norm", "kept_as"), [(4, 8, 8), (8, 4, 8), (4, 4, 4), (8, "off", 32)])
def test_an_input_that_another_operator_has_saved_has_the_bits_of_who_wants_more(gelu, norm, kept_as):
    torch.manual_seed(0)
    rms = uneven(Written())

    def function(x):
        model.other = F.gelu(x)
        return rms(x) + model.other

    model, x = Between(function), tokens()
    with compress(model, bits=4, operators={"gelu": gelu, "layer_norm": norm}) as saved:
        y = model(x)
    elements = model.x.numel()
    assert saved.by_operator["gelu"].kept_bytes == elements * gelu // 8  # counted with who has saved it first
    more = elements * (kept_as - gelu) // 8
    assert saved.by_operator["layer_norm"].kept_bytes == more + 80 * 4
    restored, exact = saved_by(behind(y, "Gelu"), "self"), model.x.detach()
    assert same(restored, exact) == (norm == "off")
    assert (restored - exact).norm() < exact.norm() * {8: 0.02, 4: 0.3, 32: 1e-9}[kept_as]


#: What begins as RMS normalization, and is none.
BROKEN = {
    "the input is used otherwise": lambda x, rstd: torch.tanh(x) * rstd,
    "the factor is added": lambda x, rstd: x + rstd,
    "the factor is of another tensor": lambda x, rstd: (x * 2) * rstd,
    "the factor is changed": lambda x, rstd: x * (2 * rstd),
    "nothing is multiplied": lambda x, _: F.gelu(x),
    "only one row is multiplied": lambda x, rstd: x[:1] * rstd[:1],
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("bits", [8, 4])
def test_what_begins_as_a_norm_and_is_none_is_kept_as_other(name, bits):
    def function(x):
        return BROKEN[name](x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))

    found = {}
    for now in ("off", bits):
        torch.manual_seed(0)
        model, x = Between(function), tokens()
        with compress(model, bits=now, rounding="nearest") as saved:
            y = model(x)
        assert "layer_norm" not in saved.by_operator
        if now != "off":
            restored, exact = saved_by(behind(y, "Pow" if "nothing" not in name else "Gelu"), "self"), model.x.detach()
            assert ((restored - exact).abs() <= 12 / (2**bits - 1)).all()
        y.square().sum().backward()
        found[now] = gradients(model)
    assert error(found[bits], found["off"]) < {8: 0.02, 4: 0.3}[bits]


def test_a_tensor_that_is_scaled_by_another_power_is_no_norm():
    def function(x):
        return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS)

    torch.manual_seed(0)
    model = Between(function)
    with compress(model, bits=4) as saved:
        y = model(tokens())
    assert "layer_norm" not in saved.by_operator
    assert saved.by_operator["other"].kept_bytes < model.x.numel()
    assert of_last(y).isfinite().all()
