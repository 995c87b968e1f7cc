"""Results that backward computes again: from what, to which values, and when they are kept after all."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from narrowband.activations.derived import Derivation
from narrowband.activations.kept import Payload
from tests.activations.models import error, plain_step, same, step


def compress(model, **options):
    return nb.compress_activations(model, **{"min_numel": 64, **options})


class Between(nn.Module):
    """A function between two linear layers, or convolutions. It remembers what went in and came out."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.first, self.function, self.last = (layer or linear)(), function, (layer or linear)()

    def forward(self, x):
        self.x = self.first(x)
        self.y = self.function(self.x)
        return self.last(self.y)


def linear():
    return nn.Linear(32, 32)


def conv():
    return nn.Conv2d(8, 8, 3, padding=1)


def uneven(norm):
    """With parameters that are neither ones nor zeros."""
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        if getattr(norm, "bias", None) is not None:
            norm.bias.normal_()
    return norm


def tokens(samples=10):
    return torch.randn(samples, 8, 32)


def images():
    return torch.randn(4, 8, 6, 6) * torch.logspace(-1, 1, 8).view(8, 1, 1)


#: Name → what is between two layers, and their kind and input.
OPERATORS = {
    "gelu": lambda: Between(F.gelu),
    "gelu, tanh": lambda: Between(nn.GELU("tanh")),
    "silu": lambda: Between(F.silu),
    "layer norm": lambda: Between(uneven(nn.LayerNorm(32))),
    "layer norm of two dimensions": lambda: Between(uneven(nn.LayerNorm((8, 32)))),
    "layer norm, plain": lambda: Between(nn.LayerNorm(32, elementwise_affine=False)),
    "batch norm": lambda: Between(uneven(nn.BatchNorm2d(8)), conv),
    "batch norm, plain": lambda: Between(nn.BatchNorm2d(8, affine=False), conv),
    "batch norm, no running statistics": lambda: Between(nn.BatchNorm2d(8, track_running_stats=False), conv),
    "batch norm, relu": lambda: Between(nn.Sequential(uneven(nn.BatchNorm2d(8)), nn.ReLU()), conv),
    "batch norm, relu in place": lambda: Between(nn.Sequential(uneven(nn.BatchNorm2d(8)), nn.ReLU(inplace=True)), conv),
    "batch norm, silu": lambda: Between(nn.Sequential(uneven(nn.BatchNorm2d(8)), nn.SiLU()), conv),
    "layer norm, relu": lambda: Between(nn.Sequential(uneven(nn.LayerNorm(32)), nn.ReLU(inplace=True))),
}
EVERY = pytest.mark.parametrize("name", OPERATORS)


def made(name):
    torch.manual_seed(0)
    model = OPERATORS[name]()
    return model, tokens() if isinstance(model.first, nn.Linear) else images()


def saved_by(node, *names):
    """What a node has saved under the first of these names that it has."""
    return next(getattr(node, f"_saved_{name}") for name in names if hasattr(node, f"_saved_{name}"))


def behind(y, start):
    """The first node behind a result whose name begins so."""
    queue = [y.grad_fn]
    while queue:
        node = queue.pop(0)
        if node.name().startswith(start):
            return node
        queue += [after for after, _ in node.next_functions if after is not None]
    raise AssertionError(start)


def of_last(y):
    """The input of the last layer, as its node has it."""
    node = behind(y, ("Addmm", "Convolution"))
    return saved_by(node, "mat1", "input")


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(name, *, cast=False):
    model, x = made(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y = model(x)
    y.float().square().sum().backward()
    return y, gradients(model), dict(model.named_buffers())


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
    assert found[True].bytes_plain == found[False].bytes_plain
    channels = model.x.shape[1] if model.x.dim() == 4 else model.x[0].numel() if "two" in name else 32
    extra = {"gelu": 0, "gelu, tanh": 0, "silu": 0, "layer norm, plain": 0}.get(name, 2 * 4 * channels)
    less = model.x.numel() * (2 if name == "batch norm, silu" else 1)  # SiLU keeps batch norm's result
    assert found[False].bytes_kept - found[True].bytes_kept == less - extra


def test_several_who_save_a_result_share_it():
    torch.manual_seed(0)
    layers = nn.ModuleList(linear() for _ in range(3))
    model = Between(uneven(nn.LayerNorm(32)))
    model.last = nn.Sequential(*layers)
    model.last.forward = lambda x: sum(layer(x) for layer in layers)
    with compress(model) as saved:
        model(tokens())
    assert saved.by_operator["matmul"].kept == 2 * 32 * 4
    assert saved.by_operator["layer_norm"].kept == 10 * 8 * 32 + 2 * 10 * 8 * 4


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
    if name in ("gelu", "gelu, tanh", "silu"):
        half = 0.5 * x
        return {
            "gelu": half * (1 + torch.erf(x / 2**0.5)),
            "gelu, tanh": half * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
            "silu": x / (1 + torch.exp(-x)),
        }[name]
    norm = model.function[0] if isinstance(model.function, nn.Sequential) else model.function
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
    start = {"g": "Gelu", "s": "Silu", "l": "NativeLayerNorm", "b": "NativeBatchNorm"}[name[0]]
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


@pytest.mark.parametrize("name", ["gelu", "gelu, tanh", "silu", "layer norm", "layer norm, plain"])
def test_of_an_input_that_is_kept_exactly_the_result_is_exact(name):
    _, expected, _ = plain(name)
    operator = "layer_norm" if "norm" in name else "gelu"
    model, x = made(name)
    with compress(model, bits=4, operators={operator: "off"}) as saved:
        y = model(x)
    y.square().sum().backward()
    assert all(same(value, expected[key]) for key, value in gradients(model).items())
    assert saved.by_operator["matmul"].kept == (2 * 32 * 4 if name == "layer norm" else 0)


@pytest.mark.parametrize("name", ["gelu", "layer norm"])
def test_layers_that_are_off_get_the_exact_result(name):
    model, x = made(name)
    with compress(model, operators={"matmul": "off"}) as saved:
        y = model(x)
    assert same(of_last(y).view(model.y.shape), model.y)
    assert saved.by_operator["matmul"].kept == saved.by_operator["matmul"].plain == model.y.numel() * 4


@pytest.mark.parametrize(
    ("gelu", "matmul", "kept"), [(8, 8, 0), (8, 4, 0), (4, 8, 2560), (4, 4, 0), ("off", 8, 0), (2, "off", 10240)]
)
def test_who_needs_more_bits_than_the_input_has_keeps_the_result(gelu, matmul, kept):
    model, x = made("gelu")
    with compress(model, operators={"gelu": gelu, "matmul": matmul}) as saved:
        model(x)
    assert saved.by_operator["matmul"].kept == kept


@pytest.mark.parametrize(("norm", "matmul", "kept"), [(8, 8, 2560), (8, 4, 128), (4, 4, 1280), ("off", 8, 128)])
def test_of_an_input_whose_rows_differ_codes_are_worth_half(norm, matmul, kept):
    """RMS norm's input is kept as it is, and what it makes equally large it makes err equally."""
    torch.manual_seed(0)
    model = Between(uneven(nn.RMSNorm(32)))
    with compress(model, operators={"layer_norm": norm, "matmul": matmul}) as saved:
        y = model(tokens())
    assert saved.by_operator["matmul"].kept == kept
    if kept == 128:
        expected = model.y.detach()
        found = of_last(y).view(expected.shape)
        assert same(found, expected) == (norm == "off")
        torch.testing.assert_close(found, expected, rtol=0, atol=0.1)


def test_rows_of_all_sizes_come_back_of_a_layer_norm():
    """One code for all rows would be a thousand times as wrong in the small ones."""
    torch.manual_seed(0)
    model = Between(uneven(nn.LayerNorm(32, eps=1e-12)))
    sizes = torch.logspace(-6, 2, 10).view(10, 1, 1)
    with torch.no_grad():
        model.first.bias.zero_()
    with compress(model, rounding="nearest", granularity="layer"):
        y = model(tokens() * sizes)
    exact = model.x.detach()
    restored = saved_by(behind(y, "NativeLayerNorm"), "input")
    spread = exact.std(-1, keepdim=True)
    assert ((restored - exact).abs() <= 8 * spread / 255).all()
    found = of_last(y).view(model.y.shape)
    assert ((found - model.y).abs() <= 2 * 8 / 255).all()


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
    model = Between(lambda x: view(F.gelu(x)).cos())
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["other"].kept == 0
    kept = saved_by(behind(y, "Cos"), "self")
    found = saved_by(behind(y, "Gelu"), "self")
    assert torch.equal(kept, view(F.gelu(found)))


def test_a_part_of_a_result_is_kept():
    torch.manual_seed(0)
    model = Between(lambda x: F.gelu(x)[:, :4].cos())
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["other"].kept == 10 * 4 * 32
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
    assert saved.by_operator["matmul"].kept == 0


def test_channels_last():
    found = []
    for memory in (torch.contiguous_format, torch.channels_last):
        model, x = made("batch norm, relu in place")
        model, x = model.to(memory_format=memory), x.contiguous(memory_format=memory)
        with compress(model, rounding="nearest") as saved:
            y = model(x)
        y.square().sum().backward()
        found.append((saved.bytes_kept, gradients(model)))
    assert found[0][0] == found[1][0]
    assert error(found[1][1], found[0][1]) < 1e-3


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_a_result_that_was_changed_after_it_was_saved_is_an_error():
    def function(x):
        y = F.gelu(x)
        z = y.cos()
        y.add_(1)
        return z

    model = Between(function)
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["other"].kept == 0
    with pytest.raises(RuntimeError, match=r"which other in the model saved for backward, is at version 1; expected"):
        y.sum().backward()


@pytest.mark.parametrize("graph", [False, True])
def test_a_result_that_was_changed_before_it_is_saved_is_another(graph):
    def function(x):
        y = uneven_norm(x)
        with contextlib.nullcontext() if graph else torch.no_grad():
            y.mul_(100)
        return y

    torch.manual_seed(0)
    uneven_norm = uneven(nn.LayerNorm(32))
    for cast in (False, True):
        model = Between(function)
        with compress(model) as saved, torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = model(tokens())
        found = of_last(y).view(model.y.shape).float()
        torch.testing.assert_close(found, model.y.float(), rtol=0, atol=5)
        assert saved.by_operator["matmul"].kept >= model.y.numel()


def test_parameters_may_change_before_backward():
    """Where PyTorch does not need them for the gradient that is asked for, it is that of the former ones."""
    for name in ("layer norm", "batch norm, relu"):
        model, x = made(name)
        norm = model.function if name == "layer norm" else model.function[0]
        found = []
        for change in (False, True):
            torch.manual_seed(1)
            with compress(model, rounding="nearest", decay=0.0) as saved:
                y = model(x)
            assert saved.by_module["last"].kept < 300
            if change:
                with torch.no_grad():
                    norm.weight.mul_(10)
                    norm.bias.data.add_(3)
            (grad,) = torch.autograd.grad(y.square().sum(), model.last.weight)
            found.append(grad)
        assert same(*found)


def test_batch_norm_that_is_evaluated_uses_the_statistics_of_then():
    model, x = made("batch norm, relu")
    norm = model.function[0]
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    model.eval()
    with compress(model) as saved:
        y = model(x)
    exact = model.y.detach().clone()
    assert saved.by_operator["conv"].kept == 2 * 8 * 4
    norm.running_mean.add_(100)
    norm.running_var.mul_(100)
    torch.testing.assert_close(of_last(y), exact, rtol=0.02, atol=0.1)
    assert not same(of_last(y), exact)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("name", ["gelu", "layer norm", "batch norm, relu"])
def test_what_is_not_finite_stays_so(name, bad):
    model, x = made(name)
    with torch.no_grad():
        model.first.bias[3] = bad
    model(x).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with compress(model):
        y = model(x)
    y.square().sum().backward()
    for key, value in gradients(model).items():
        assert torch.equal(value.isfinite(), expected[key].isfinite()), key
    if name != "batch norm, relu":  # whose channels are finite but for one
        assert all(torch.equal(value.isnan(), expected[key].isnan()) for key, value in gradients(model).items())


def test_memory_that_is_used_again_is_not_taken_for_a_result():
    torch.manual_seed(0)
    model, addresses, error_of = Between(F.gelu), [], []
    inputs = [tokens() * 10**at for at in range(4)]
    with compress(model, decay=0.0):
        for x in inputs:
            y = model(x)
            addresses.append(model.y.data_ptr())
            error_of.append((of_last(y).view(model.y.shape) - model.y).norm() / model.y.norm())
            del y, model.x, model.y
            other = torch.full((10, 8, 32), 7.0, requires_grad=True)  # perhaps where the result was
            z = model.last(other)
            addresses.append(other.data_ptr())
            torch.testing.assert_close(saved_by(behind(z, "Addmm"), "mat1").view(10, 8, 32), other)
            del other, z
    assert len(set(addresses)) < len(addresses), "no memory was used again: the test says nothing"
    assert max(error_of) < 0.02


# ---- what a graph may be used for ------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("inside", [False, True])
def test_backward_inside_of_the_context_and_under_autocast_restores_the_same(name, inside):
    found = []
    for within in (False, inside):
        model, x = made(name)
        with contextlib.ExitStack() as stack:
            stack.enter_context(compress(model))
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            loss = model(x).float().square().sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        found.append(gradients(model))
    assert all(same(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("name", ["gelu", "silu", "layer norm", "batch norm"])
def test_double_backward(name):
    def run(**options):
        model, x = made(name)
        x.requires_grad_()
        with compress(model, **options):
            y = model(x).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        return gradients(model)

    assert 0 < error(run(), run(bits="off")) < 0.05


def test_backward_twice_of_a_graph_that_is_retained():
    model, x = made("batch norm, relu in place")
    with compress(model):
        y = model(x).square().sum()
    y.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    y.backward()
    assert all(same(value, first[key]) for key, value in gradients(model).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_derived_in_a_checkpoint(reentrant):
    torch.manual_seed(0)
    norm = uneven(nn.LayerNorm(32))
    model = Between(lambda x: checkpoint(lambda x: F.gelu(norm(x)), x, use_reentrant=reentrant))
    x = tokens()
    model(x).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with compress(model) as saved:
        y = model(x)
    assert saved.by_operator["matmul"].kept == model.y.numel()
    y.square().sum().backward()
    assert 0 < error(gradients(model), expected) < 0.02


# ---- lifetimes -------------------------------------------------------------------------------------------------------


def alive():
    return sum(type(x) in (Payload, Derivation) for x in gc.get_objects())


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@EVERY
@pytest.mark.usefixtures("no_collector")
def test_nothing_lives_longer_than_who_saved_it(name):
    assert alive() == 0
    model, x = made(name)
    with compress(model):
        y = model(x)
        assert alive() > 0
        model.x = model.y = None
        y.sum().backward()
        del y
        assert alive() == 0
        F.gelu(model.first(x))  # nobody saves it
        y = model(x)
        model.x = model.y = None
        del y
        assert alive() == 0


@pytest.mark.usefixtures("no_collector")
def test_a_result_outlives_no_payload_of_its_input():
    """Of a detached result nobody has the input any more, and it is kept as itself."""

    def function(x):
        y = F.gelu(x).detach().requires_grad_()
        assert alive() == 0
        return y

    model = Between(function)
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["matmul"].kept == model.y.numel()
    torch.testing.assert_close(of_last(y).view(model.y.shape), model.y, rtol=0, atol=0.02)


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "encoder", "resnet"])
@pytest.mark.parametrize("bits", [8, 4])
def test_models_keep_less_and_err_about_the_same(name, bits):
    plain = plain_step(name)
    derived = step(name, {"bits": bits})
    kept = step(name, {"bits": bits, "derive": False})
    assert derived.saved.bytes_kept < kept.saved.bytes_kept
    assert error(derived.grads, plain.grads) < 1.5 * error(kept.grads, plain.grads)
