"""Results that are computed again: the bytes they save, and the values that come back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.activations.derived import (
    EVERY,
    Between,
    Multiplied,
    Written,
    behind,
    compress,
    gradients,
    linear,
    made,
    of_last,
    plain,
    saved_by,
    tokens,
    uneven,
)
from tests.activations.drawing import kept, kept_bytes
from tests.activations.helpers import Calls
from tests.activations.models import error, same

#: PyTorch says so once, of RMS norm under autocast.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [False, True])
@EVERY
def test_a_result_takes_no_bytes_and_what_it_needs_besides_is_counted(name, cast):
    found = {}
    for derive in (False, True):
        model, x = made(name)
        with compress(model, derive=derive) as saved, torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = model(x)
        found[derive] = saved
        y.sum().backward()
    assert found[True].raw_bytes == found[False].raw_bytes
    channels = model.x.shape[1] if model.x.dim() == 4 else model.x[0].numel() if "two" in name else 32
    nothing = dict.fromkeys(("gelu", "gelu, tanh", "silu", "silu, gate", "layer norm, plain", "rms norm, plain"), 0)
    extra = nothing | {"batch norm, plain": 1, "rms norm": 1, "rms norm of two dimensions": 1}
    # SiLU keeps batch norm's result, and a product keeps SiLU's and the normalized form.
    twice = name in ("batch norm, silu", "silu, gate", "rms norm", "rms norm of two dimensions")
    less = model.x.numel() * (2 if twice else 1)
    assert found[False].kept_bytes - found[True].kept_bytes == less - 4 * channels * extra.get(name, 2)


@pytest.mark.parametrize("name", ["layer norm", "batch norm", "batch norm, plain"])
def test_the_bytes_are_those_that_live(name):
    (model, x), before = made(name), kept()
    with compress(model) as saved:
        y = model(x)
    assert saved.kept_bytes == kept_bytes([*model.parameters(), *model.buffers(), x], before)
    del y


def test_a_weight_of_the_inputs_shape_that_comes_from_a_product_is_not_taken_for_the_normalized_input():
    found = []
    for bits in (8, "off"):
        torch.manual_seed(0)
        model, x = Calls(lambda h: F.rms_norm(h, h.shape, 0.5 * h)), 100 * torch.randn(64, 32)
        with compress(model, bits=bits):
            y = model(x)
        (y * torch.linspace(-1, 1, 32)).sum().backward()
        found.append(model.first.weight.grad)
    torch.testing.assert_close(*found, rtol=0, atol=0.05 * float(found[1].abs().max()))


def test_several_who_save_a_result_share_it():
    torch.manual_seed(0)
    layers = nn.ModuleList(linear() for _ in range(3))
    model = Between(uneven(nn.LayerNorm(32)))
    model.last = nn.Sequential(*layers)
    model.last.forward = lambda x: sum(layer(x) for layer in layers)
    with compress(model) as saved:
        model(tokens())
    assert saved.by_operator["matmul"].kept_bytes == 2 * 32 * 4
    assert saved.by_operator["layer_norm"].kept_bytes == 10 * 8 * 32 + 2 * 10 * 8 * 4


def test_without_it_a_result_is_kept_under_the_name_it_has_with_it():
    """So a policy may be changed, and what both keep has the estimates that it had."""
    names = {}
    for derive in (True, False):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(32, 32))
        model = Between(lambda x: F.linear(F.gelu(x), w) + F.linear(x + 1, w))  # noqa: B023
        handle = compress(model, derive=derive)
        with handle:
            model(tokens())
        names[derive] = set(handle.state_dict()["estimates"])
    both = {":gelu:0", ":matmul:1", "last:matmul:0"}
    assert names == {True: both, False: both | {":matmul:0"}}


def test_ranges_are_those_of_normalized_rows_and_of_each_channel():
    for name, key, dims in (
        ("layer norm", "function:layer_norm:0:normalized", (0, 1)),
        ("batch norm", "function:batch_norm:0", (0, 2, 3)),
    ):
        model, x = made(name)
        handle = compress(model, groups=None if name == "batch norm" else 32)
        with handle:
            model(x)
        seen = model.x.detach()
        seen = F.layer_norm(seen, (32,)) if name == "layer norm" else seen
        low, high = seen.amin(dims), seen.amax(dims)
        torch.testing.assert_close(handle.state_dict()["estimates"][key], torch.stack((high - low, low)))
        with compress(model, derive=False):
            model(x)
        assert handle.state_dict()["estimates"].keys() >= {key, key.removesuffix(":normalized")}


# ---- values ----------------------------------------------------------------------------------------------------------


def formula(name, model, x_hat, exact):
    """The result in float64 of what is kept of the input, by the statistics of the exact input."""
    x, exact = x_hat.double(), exact.double()
    if name in ("gelu", "gelu, tanh", "silu", "silu, gate"):
        half = 0.5 * x
        return {
            "gelu": half * (1 + torch.erf(x / 2**0.5)),
            "gelu, tanh": half * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
            "silu": x / (1 + torch.exp(-x)),
            "silu, gate": x * x / (1 + torch.exp(-x)),
        }[name]
    norm = model.function[0] if isinstance(model.function, nn.Sequential) else model.function
    if name.startswith("rms"):
        dims = tuple(range(-len(norm.normalized_shape), 0))
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        y = x / (exact.square().mean(dims, keepdim=True) + eps).sqrt()
        return y if norm.weight is None else y * norm.weight.double()
    dims = (0, 2, 3) if exact.dim() == 4 else tuple(range(exact.dim() - len(norm.normalized_shape), exact.dim()))
    variance, mean = torch.var_mean(exact, dims, correction=0, keepdim=True)
    y = (x - mean) / (variance + norm.eps).sqrt()
    if norm.weight is not None:
        shape = (-1, 1, 1) if exact.dim() == 4 else norm.weight.shape
        y = y * norm.weight.double().view(shape) + norm.bias.double().view(shape)
    if "relu" in name:
        return y.relu()
    return y / (1 + torch.exp(-y)) if "silu" in name else y


@EVERY
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_restored_is_the_operator_of_what_is_kept_in_float64(name, bits):
    model, x = made(name)
    exact = []
    model.first.register_forward_hook(lambda *args: exact.append(args[2].detach().clone()))
    with compress(model, bits=bits, operators={"layer_norm": bits}):
        y = model(x)
    start = {"g": "Gelu", "s": "Silu", "l": "NativeLayerNorm", "r": "Pow", "b": "NativeBatchNorm"}[name[0]]
    x_hat = saved_by(behind(y, start), "self", "input").view(model.x.shape)
    assert not torch.equal(x_hat, exact[0])
    found = of_last(y).view(model.y.shape)
    torch.testing.assert_close(found.double(), formula(name, model, x_hat, exact[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cast", [False, True])
@EVERY
def test_gradients_are_those_of_the_exact_model_and_buffers_change_once(name, cast):
    y, expected, buffers = plain(name, cast=cast)
    model, x = made(name)
    with compress(model), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        found = model(x)
    found.float().square().sum().backward()
    assert same(found, y)
    assert 0 < error(gradients(model), expected) < 0.03
    assert all(same(model.get_buffer(key), value) for key, value in buffers.items())


@pytest.mark.parametrize("name", ["gelu", "gelu, tanh", "silu", "layer norm", "layer norm, plain", "rms norm"])
def test_of_an_input_that_is_kept_exactly_the_result_is_exact(name):
    _, expected, _ = plain(name)
    operator = "layer_norm" if "norm" in name else "gelu"
    model, x = made(name)
    with compress(model, bits=4, operators={operator: "off"}) as saved:
        y = model(x)
    y.square().sum().backward()
    assert all(same(value, expected[key]) for key, value in gradients(model).items())
    copies = {"layer norm": 2, "rms norm": 1}  # of weight and bias
    assert saved.by_operator["matmul"].kept_bytes == copies.get(name, 0) * 32 * 4


@pytest.mark.parametrize("name", ["gelu", "layer norm"])
def test_layers_that_are_off_get_the_exact_result(name):
    model, x = made(name)
    with compress(model, operators={"matmul": "off"}) as saved:
        y = model(x)
    assert same(of_last(y).view(model.y.shape), model.y)
    assert saved.by_operator["matmul"].kept_bytes == saved.by_operator["matmul"].raw_bytes == model.y.numel() * 4


@pytest.mark.parametrize(
    ("gelu", "matmul", "kept"), [(8, 8, 0), (8, 4, 0), (4, 8, 2560), (4, 4, 0), ("off", 8, 0), (2, "off", 10240)]
)
def test_who_needs_more_bits_than_the_input_has_keeps_the_result(gelu, matmul, kept):
    model, x = made("gelu")
    with compress(model, operators={"gelu": gelu, "matmul": matmul}) as saved:
        model(x)
    assert saved.by_operator["matmul"].kept_bytes == kept


@pytest.mark.parametrize(("norm", "matmul", "kept"), [(8, 8, 2560), (8, 4, 128), (4, 4, 1280), ("off", 8, 128)])
def test_of_an_input_whose_rows_differ_codes_are_worth_half(norm, matmul, kept):
    """Of an input that another operator has saved before: what RMS norm makes equally large it makes err equally."""
    torch.manual_seed(0)
    rms = uneven(nn.RMSNorm(32))

    def function(x):
        model.other = F.gelu(x)
        return rms(x)

    model = Between(function)
    with compress(model, operators={"gelu": norm, "layer_norm": norm, "matmul": matmul}) as saved:
        y = model(tokens())
    assert saved.by_operator["matmul"].kept_bytes == kept
    if kept == 128:
        expected = model.y.detach()
        found = of_last(y).view(expected.shape)
        assert same(found, expected) == (norm == "off")
        torch.testing.assert_close(found, expected, rtol=0, atol=0.1)


@pytest.mark.parametrize(("norm", "node"), [
    (nn.LayerNorm(32, eps=1e-12), "NativeLayerNorm"), (nn.RMSNorm(32, eps=1e-12), "Pow"), (Written(), "Pow"),
])  # fmt: skip
def test_rows_of_all_sizes_come_back_of_a_norm(norm, node):
    """One code for all rows would be a thousand times as wrong in the small ones."""
    torch.manual_seed(0)
    model = Between(uneven(norm))
    sizes = torch.logspace(-6, 2, 10).view(10, 1, 1)
    with torch.no_grad():
        model.first.bias.zero_()
    with compress(model, rounding="nearest", granularity="layer"):
        y = model(tokens() * sizes)
    exact = model.x.detach()
    restored = saved_by(behind(y, node), "input", "self")
    spread = exact.std(-1, keepdim=True)
    assert ((restored - exact).abs() <= 9 * spread / 255).all()
    found = of_last(y).view(model.y.shape)
    assert ((found - model.y).abs() <= 2 * 8 / 255).all()


@pytest.mark.parametrize("norm", [Written, Multiplied])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_that_a_model_writes_itself_keeps_one_tensor(dtype, norm):
    """Its input, before and after a cast, the normalized form, also before and after one, and the result: all from
    codes of the normalized form.
    """
    torch.manual_seed(0)
    model, x, found = Between(uneven(norm(dtype))), tokens(), []
    for bits in ("off", 8):
        model.zero_grad()
        before = kept()
        with compress(model, bits=bits) as saved:
            y = model(x)
        if bits == 8:
            alone = {"layer_norm": model.x.numel() + 80 * 4, "matmul": 32 * 4}  # and what rsqrt says of each row
            assert {name: saved.by_operator[name].kept_bytes for name in alone} == alone
            model.x = model.y = None
            assert saved.kept_bytes == kept_bytes([*model.parameters(), x, y], before)
        y.square().sum().backward()
        found.append(gradients(model))
    assert 0 < error(found[1], found[0]) < 0.02


def test_where_an_input_cannot_be_computed_from_its_normalized_form_its_own_codes_stay():
    torch.manual_seed(0)
    model, x = Between(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e9)), tokens()  # NaN
    with compress(model) as saved:
        y = model(x)
    assert saved.by_operator["other"].kept_bytes < 1.2 * model.x.numel()
    restored = saved_by(behind(y, "Pow"), "self")
    torch.testing.assert_close(restored, model.x.detach(), rtol=0, atol=0.02)


def test_a_tensor_in_16_bits_is_computed_from_codes_of_its_cast_unless_either_is_changed():
    """PyTorch saves both where one operator takes the tensor itself, and another one its cast."""

    def function(x):
        h = x.to(torch.bfloat16)
        if changed == "before it is cast":
            h = h.clone().mul_(2)
        wide = h.float()
        if changed == "cast":
            wide = wide.mul_(3)
        model.wide = wide.square()
        if changed == "tensor":
            h.mul_(5)
        model.h = h.detach().clone()
        return h.square().float()

    for changed, shared in (("nothing", 1), ("before it is cast", 1), ("cast", 2), ("tensor", 2)):
        torch.manual_seed(0)
        model = Between(function)
        with compress(model, rounding="nearest") as saved:
            y = model(tokens())
        assert saved.by_operator["other"].kept_bytes == shared * model.h.numel(), changed
        found = saved_by(behind(y, "Pow"), "self")
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.float(), model.h.float(), rtol=0.01, atol=0.1)


@pytest.mark.parametrize(("rows", "width"), [(15, 48), (2, 520), (3, 200)])
def test_rows_of_a_layer_norm_need_not_be_whole_groups_of_neighbours(rows, width):
    """Neither all elements nor those of a row; codes of the last group have padding behind them."""
    model = nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.Linear(width, 8))
    x, gradients = torch.randn(rows, 8), []
    for bits in ("off", 8):
        model.zero_grad()
        with compress(model, bits=bits, granularity=256, min_numel=256, rounding="nearest") as saved:
            y = model(x)
        y.square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert saved.by_operator["layer_norm"].ratio > 2
    off = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    assert 0 < off < 0.02


@pytest.mark.parametrize("bits", [8, 4])
def test_a_product_that_is_computed_again_errs_no_more_than_its_own_codes(bits):
    """Few elements are large in both factors, so that the range of a product is wide for most of its elements."""
    off = {}
    for derive in (True, False):
        torch.manual_seed(0)
        model = Between(lambda x: F.silu(x[..., :16]) * x[..., 16:])
        model.last = nn.Linear(16, 32)
        with compress(model, bits=bits, derive=derive, rounding="nearest"):
            y = model(tokens())
        off[derive] = error({"": of_last(y).detach().view(model.y.shape)}, {"": model.y.detach()})
    assert 0 < off[True] < off[False]


@pytest.mark.parametrize(("factor", "kept"), [
    (lambda _: torch.linspace(1, 2, 32), 32 * 4), (lambda x: x.detach().square().mean(-1, keepdim=True), 2560),
    (lambda _: torch.full((), 2.0), 2560), (lambda _: 2.0, 2560), (lambda x: x.detach()[:1] + 1, 2560),
])  # fmt: skip
def test_a_product_with_one_factor_per_feature_is_computed_again(factor, kept):
    """One per row may scale up small rows, and their errors with them; and scalars are not looked at."""
    torch.manual_seed(0)

    def function(x):
        model.other = F.gelu(x)  # keeps x
        return x * factor(x)

    model = Between(function)
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["matmul"].kept_bytes == kept
    torch.testing.assert_close(of_last(y).view(model.y.shape), model.y.detach(), rtol=0, atol=0.05)


@pytest.mark.parametrize("product", [lambda a, b: a * b, lambda a, b: b * a])
def test_an_outer_product_is_kept(product):
    torch.manual_seed(0)
    model = Between(lambda x: product(F.gelu(x[..., :1]), x.new_ones(32)))
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["matmul"].kept_bytes == model.y.numel()
    y.sum().backward()


@pytest.mark.parametrize("which", [0, 1])
def test_a_factor_that_pytorch_does_not_save_may_change(which):
    torch.manual_seed(0)

    def function(x):
        free, frozen = x.sinh(), x.detach().cosh()  # the product saves frozen only
        model.other = free.abs()  # keeps free as it is, and is not in the loss
        y = free * frozen if which else frozen * free
        free.add_(1)
        return y

    model = Between(function)
    model(tokens()).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with compress(model):
        y = model(tokens())
    y.square().sum().backward()
    assert error(gradients(model), expected) > 0


def test_small_results_stay_exact():
    model, x = made("gelu")
    with compress(model, min_numel=10 * 8 * 32 + 1):
        y = model(x)
    assert same(of_last(y).view(model.y.shape), model.y)


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.view(-1, 32),
        lambda y: y.reshape(40, 64)[None].view(10, 8, 32),
        lambda y: y.transpose(0, 1),
        lambda y: y.unsqueeze(0),
    ],
)
def test_views_of_all_of_a_result_are_known_as_such(view):
    torch.manual_seed(0)
    model = Between(lambda x: view(F.gelu(x)).cosh())
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["other"].kept_bytes == 0
    kept = saved_by(behind(y, "Cos"), "self")
    found = saved_by(behind(y, "Gelu"), "self")
    assert torch.equal(kept, view(F.gelu(found)))


def test_a_part_of_a_result_is_kept():
    torch.manual_seed(0)
    model = Between(lambda x: F.gelu(x)[:, :4].cosh())
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["other"].kept_bytes == 10 * 4 * 32
    exact = F.gelu(model.x)[:, :4]
    torch.testing.assert_close(saved_by(behind(y, "Cos"), "self"), exact, rtol=0, atol=0.02)


@pytest.mark.parametrize("transposed", [False, True])
def test_however_an_input_lies_in_memory(transposed):
    torch.manual_seed(0)
    model = Between(nn.Sequential(uneven(nn.LayerNorm(32)), nn.GELU()))
    model.first = nn.Conv1d(4, 32, 1)
    model.first.register_forward_hook(
        lambda *args: args[2].transpose(1, 2) if transposed else args[2].transpose(1, 2).contiguous()
    )
    x = torch.randn(10, 4, 8)
    model(x).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with compress(model) as saved:
        y = model(x)
    y.square().sum().backward()
    assert 0 < error(gradients(model), expected) < 0.02
    assert saved.by_operator["matmul"].kept_bytes == 0


def test_channels_last():
    found = []
    for memory in (torch.contiguous_format, torch.channels_last):
        model, x = made("batch norm, relu in place")
        model, x = model.to(memory_format=memory), x.contiguous(memory_format=memory)
        with compress(model, rounding="nearest") as saved:
            y = model(x)
        y.square().sum().backward()
        found.append((saved.kept_bytes, gradients(model)))
    assert found[0][0] == found[1][0]
    assert error(found[1][1], found[0][1]) < 1e-3
