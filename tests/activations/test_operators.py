"""Which operator is at work, and those that keep a bit or a byte per element: to the bit as PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import narrowband as nb
from tests.activations.helpers import Checks
from tests.activations.models import same
from tests.torches import OLDEST

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

ODD = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-42, -1e-42])


class Calls(nn.Module):
    """A function of a copy of the input, as a model."""

    num_heads = 4

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x * 1)


def compressing(function, **options):
    model = Calls(function)
    return model, nb.compress_activations(model, **{"min_numel": 1, **options})


RELUS = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "method": lambda x: x.relu(),
    "method in place": lambda x: x.relu_(),
    "keyword": lambda x: F.relu(input=x, inplace=True),
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "of a view, in place": lambda x: (x.view(-1).relu_(), x)[1],
    "hardtanh": F.hardtanh,
    "hardtanh, bounds": lambda x: F.hardtanh(x, 0.25, max_val=0.75),
    "hardtanh, in place": lambda x: F.hardtanh(x, -0.5, 0.5, True),
    "hardtanh_": lambda x: F.hardtanh_(x, -0.5, 0.0),
    "hardtanh, bounds that bfloat16 does not have": lambda x: F.hardtanh(x, -0.1, 0.7),
    "relu6": F.relu6,
    "relu6 in place": lambda x: F.relu6(x, inplace=True),
    "ReLU6": nn.ReLU6(),
    "leaky": F.leaky_relu,
    "leaky, slope": lambda x: F.leaky_relu(x, 0.25),
    "leaky in place": nn.LeakyReLU(0.1, inplace=True),
    "leaky_": lambda x: F.leaky_relu_(x, negative_slope=2.0),
}
DROPOUTS = {
    "F.dropout": F.dropout,
    "F.dropout, p": lambda x: F.dropout(x, 0.1),
    "F.dropout in place": lambda x: F.dropout(x, 0.3, True, True),
    "torch.dropout": lambda x: torch.dropout(x, 0.9, True),
    "keyword": lambda x: torch.dropout(x, p=0.25, train=True),
    "module": nn.Dropout(0.2),
    "module in place": nn.Dropout(0.2, inplace=True),
}
#: How input, and the gradient of the output, lie in memory.
LAYOUTS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(1, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "slice": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "expanded": lambda x: x[:1, :, :1, :1].expand_as(x),
    "one number": lambda x: x[:1, :1, :1, :1].expand_as(x),
}


def both(function, x, gradient, **options):
    """(Result, gradient, saved) of a plain call and of one in the context."""
    found = []
    for compressed in (False, True):
        model, handle = compressing(function, **options)
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        torch.manual_seed(0)
        if compressed:
            with handle as saved:
                y = model(leaf)
        else:
            y, saved = model(leaf), None
        y.backward(gradient)
        found.append((y.detach(), leaf.grad, saved))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RELUS)
def test_relu_is_that_of_pytorch_to_the_bit(name, dtype):
    torch.manual_seed(1)
    x = torch.cat([torch.randn(53), ODD]).to(dtype).view(2, 5, 3, 2)
    gradient = torch.cat([ODD, torch.randn(53)]).to(dtype).view(2, 5, 3, 2)
    (y, grad, _), (ours, our_grad, saved) = both(RELUS[name], x, gradient)
    assert same(ours, y)
    assert same(our_grad, grad)
    assert y.isnan().any()
    assert (saved.by_operator["relu"].kept_bytes == 8) == (
        dtype != torch.float64
    )  # 60 bits; other dtypes are left alone
    assert saved.by_operator["relu"].raw_bytes == 60 * x.element_size()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_that_of_pytorch_to_the_bit(name, dtype):
    torch.manual_seed(1)
    x = torch.cat([torch.randn(593), ODD]).to(dtype).view(4, 5, 6, 5)
    gradient = torch.cat([ODD.repeat(20), torch.randn(460)]).to(dtype).view(4, 5, 6, 5)
    (y, grad, _), (ours, our_grad, saved) = both(DROPOUTS[name], x, gradient)
    assert same(ours, y)
    assert same(our_grad, grad)
    assert (saved.by_operator["dropout"].kept_bytes == 75) == (dtype != torch.float64)
    assert saved.by_operator["dropout"].raw_bytes == 600 * x.element_size()


@pytest.mark.parametrize("function", [F.relu, F.dropout, nn.ReLU(inplace=True)], ids=["relu", "dropout", "in place"])
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_input", LAYOUTS)
def test_however_input_and_gradient_lie_in_memory(of_input, of_gradient, function):
    torch.manual_seed(2)
    x, gradient = LAYOUTS[of_input](torch.randn(3, 4, 5, 4)), LAYOUTS[of_gradient](torch.randn(3, 4, 5, 4))
    if x.shape != gradient.shape:
        gradient = gradient.contiguous().view(x.shape)
    (y, grad, _), (ours, our_grad, _) = both(function, x, gradient)
    assert same(ours, y)
    assert ours.stride() == y.stride()
    assert same(our_grad, grad)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    p=st.sampled_from([0.0, 1e-3, 0.1, 0.5, 0.9, 1.0]),
    training=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_any_probability(shape, p, training, seed):
    x, gradient = torch.randn(shape), torch.randn(shape)

    def function(x):
        torch.manual_seed(seed)
        return F.dropout(F.relu(x), p, training)

    (y, grad, _), (ours, our_grad, saved) = both(function, x, gradient)
    assert same(ours, y)
    assert same(our_grad, grad)
    masks = 1 + (training and 0 < p < 1)
    assert sum(saved.by_operator[name].kept_bytes for name in ("relu", "dropout") if name in saved.by_operator) >= (
        masks * -(-x.numel() // 8)
    )


def test_the_same_seed_goes_on_the_same():
    """Dropout takes as many random numbers as PyTorch's: what comes behind it is the same."""
    model, handle = compressing(lambda x: F.dropout(x, 0.3))
    x = torch.randn(100, requires_grad=True)
    torch.manual_seed(3)
    model(x)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with handle:
        model(x)
    assert torch.equal(torch.rand(4), expected)


def test_what_a_mask_is_of_may_change():
    """PyTorch needs the result of ReLU and the input of dropout's product as they were; a mask needs neither."""
    model, handle = compressing(lambda x: F.dropout(F.relu(x).add_(1), 0.5).mul_(2))
    x = torch.randn(10, 10, requires_grad=True)
    with handle:
        torch.manual_seed(0)
        y = model(x)
    y.sum().backward()
    torch.manual_seed(0)
    assert torch.equal(x.grad, (x > 0) * F.dropout(torch.ones(10, 10), 0.5) * 2)


def test_masks_are_neither_for_small_tensors_nor_for_modules_that_are_off():
    x = torch.randn(10, 10, requires_grad=True)
    for options in ({"min_numel": 101}, {"operators": {"relu": "off"}}, {"modules": {"": "off"}}):
        model, handle = compressing(F.relu, **options)
        with handle as saved:
            model(x)
        assert saved.by_operator["relu"].kept_bytes == saved.by_operator["relu"].raw_bytes == 400


def test_no_mask_where_there_is_no_backward():
    model, handle = compressing(F.relu)
    with handle as saved:
        model(torch.randn(10, 10))
        with torch.no_grad():
            model(torch.randn(10, 10, requires_grad=True))
    assert (saved.raw_bytes, saved.kept_bytes) == (0, 0)


def test_a_function_that_was_replaced_is_called(monkeypatch):
    """As attention is by libraries that have a faster one."""
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    plain = F.scaled_dot_product_attention
    handle = nb.compress_activations(model, min_numel=1)
    with handle:
        before, _ = model(x, x, x, need_weights=False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args: plain(*args) + 1)
    with handle as saved:
        after, _ = model(x, x, x, need_weights=False)
    assert same(after, model(x, x, x, need_weights=False)[0])
    assert not same(after, before)
    assert saved.by_operator["attention"].kept_bytes < saved.by_operator["attention"].raw_bytes


# ---- max pooling -----------------------------------------------------------------------------------------------------

POOLS = {
    "F.max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "stride of the kernel": lambda x: F.max_pool2d(x, 2),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, (2, 3), (), (1, 1)),
    "keyword": lambda x: F.max_pool2d(input=x, kernel_size=[3], padding=(1,), ceil_mode=True),
    "module": nn.MaxPool2d(3, (1, 2), 1, ceil_mode=True),
    "of one sample": lambda x: F.max_pool2d(x[0], 3, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLS)
def test_max_pooling_is_that_of_pytorch_to_the_bit(name, dtype):
    torch.manual_seed(1)
    x = torch.cat([torch.randn(353), ODD]).to(dtype)[torch.randperm(360)].view(2, 3, 6, 10)
    x[0, 1, 2, 3] = float("nan")
    gradient = torch.randn_like(POOLS[name](x))
    gradient.view(-1)[:7] = ODD
    (y, grad, _), (ours, our_grad, saved) = both(POOLS[name], x, gradient)
    assert same(ours, y)
    assert same(our_grad, grad)
    assert y.isnan().any()
    kept = saved.by_operator["max_pool"]
    assert kept.raw_bytes == x.nbytes + 8 * y.numel()
    assert kept.kept_bytes == (y.numel() if dtype != torch.float64 else kept.raw_bytes)


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_input", LAYOUTS)
def test_max_pooling_however_input_and_gradient_lie_in_memory(of_input, of_gradient):
    torch.manual_seed(2)
    x, gradient = LAYOUTS[of_input](torch.randn(3, 4, 5, 4)), LAYOUTS[of_gradient](torch.randn(3, 4, 5, 4))
    if x.shape != gradient.shape:
        gradient = gradient.contiguous().view(x.shape)
    (y, grad, _), (ours, our_grad, saved) = both(lambda x: F.max_pool2d(x, 3, 1, 1), x, gradient)
    assert same(ours, y)
    assert ours.stride() == y.stride()
    assert same(our_grad, grad)
    assert our_grad.stride() == grad.stride()
    assert saved.by_operator["max_pool"].kept_bytes == y.numel()


@given(data=st.data(), last=st.booleans(), ceil_mode=st.booleans(), dtype=st.sampled_from(DTYPES[:3]))
def test_max_pooling_of_any_windows(data, last, ceil_mode, dtype):
    """Few values, so that many are equal; and windows in which nothing is above −inf."""
    draw = data.draw
    kernel = draw(st.tuples(st.integers(1, 17), st.integers(1, 17)))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)) | st.none())
    plane = tuple(draw(st.integers(max(1, k - 2 * p), 24)) for k, p in zip(kernel, padding, strict=True))
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), -float("inf"), float("inf")][: draw(st.integers(1, 7))])
    torch.manual_seed(draw(st.integers(0, 2**31)))
    values = values if draw(st.booleans()) else -values.abs() / 0
    x = values[torch.randint(len(values), (2, 3, *plane))].to(dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)

    def function(x):
        return F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)

    gradient = torch.randn_like(function(x))
    (y, grad, _), (ours, our_grad, saved) = both(function, x, gradient)
    assert same(ours, y)
    assert same(our_grad, grad)
    fits = kernel[0] * kernel[1] <= 256
    assert (saved.by_operator["max_pool"].kept_bytes == y.numel()) == fits


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, 2, dilation=2),
        lambda x: F.max_pool2d(x, 17, 1),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: F.max_pool1d(x[0], 2),
        lambda x: F.max_pool3d(x, 2),
    ],
    ids=["dilation", "large windows", "indices", "lines", "volumes"],
)
def test_other_max_pooling_is_left_to_pytorch_and_has_the_name(function):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 20, 20)
    (y, grad, _), (ours, our_grad, saved) = both(function, x, torch.randn_like(function(x)))
    assert same(ours, y)
    assert grad.count_nonzero() == our_grad.count_nonzero()
    kept = saved.by_operator["max_pool"]
    assert kept.raw_bytes >= x[0].nbytes + 8 * y.numel()
    assert kept.kept_bytes >= kept.raw_bytes - 4 * x.numel() + x[0].numel()


def test_an_error_of_max_pooling_is_that_of_pytorch():
    model, handle = compressing(lambda x: F.max_pool2d(x, 2, padding=2))
    with handle, pytest.raises(RuntimeError, match="pad should be at most half"):
        model(torch.randn(2, 2, 8, 8, requires_grad=True))


# ---- names -----------------------------------------------------------------------------------------------------------

W = torch.randn(16, 16)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


@torch.library.custom_op("narrowband_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.register_autograd(
    lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),  # noqa: ARG005
)


def images(x):
    return x.view(2, 4, 16, 16)


OPERATORS = {
    "matmul": [
        lambda x: F.linear(x, nn.Parameter(W)),
        lambda x: x @ x.transpose(1, 2),
        lambda x: torch.matmul(x, x.transpose(1, 2)),
        lambda x: torch.bmm(x, x.transpose(1, 2)),
        lambda x: torch.baddbmm(x, x, x.transpose(1, 2)),
        lambda x: torch.einsum("bnd,bmd->bnm", x, x),
        lambda x: torch.addmm(W, x[0], x[1]),
    ],
    "attention": [lambda x: F.scaled_dot_product_attention(images(x), images(x), images(x))],
    "softmax": [lambda x: F.softmax(x, -1), lambda x: torch.softmax(x, -1), lambda x: x.softmax(-1), nn.Softmax(-1)],
    "layer_norm": [
        nn.LayerNorm(16),
        lambda x: F.layer_norm(x, (16,)),
        lambda x: nn.GroupNorm(2, 4)(images(x)),
        lambda x: F.rms_norm(x, (16,)),
    ],
    "gelu": [F.gelu, nn.GELU("tanh"), F.silu, nn.SiLU()],
    "conv": [
        lambda x: F.conv2d(images(x), nn.Parameter(torch.randn(4, 4, 3, 3))),
        lambda x: F.conv1d(x.view(8, 16, 16), nn.Parameter(torch.randn(4, 16, 3))),
        lambda x: F.conv_transpose2d(images(x), nn.Parameter(torch.randn(4, 4, 3, 3))),
    ],
    "batch_norm": [nn.BatchNorm1d(16), lambda x: nn.BatchNorm2d(4)(images(x)), lambda x: F.instance_norm(images(x))],
    "other": [torch.tanh, lambda x: x * x, lambda x: x.exp(), lambda x: torch.ops.aten.mul(x, x), F.softplus],
    "custom": [Square.apply, square, torch.ops.narrowband_tests.square],
}


def test_relu6_is_computed_again_for_what_follows():
    """Of a normalized input: neither the result nor the input of the convolution behind it is kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 4, 3))
    x = torch.randn(4, 4, 16, 16)
    model(x).square().mean().backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with nb.compress_activations(model, min_numel=64) as saved:
        y = model(x)
    y.square().mean().backward()
    assert saved.by_operator["relu"].kept_bytes == 4 * 8 * 14 * 14 // 8
    assert saved.by_operator["conv"].kept_bytes < 200
    for p, own in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(p.grad, own, rtol=0.03, atol=0.03 * float(own.abs().max()) + 1e-6)


#: What is no smooth function of what it saves: a value that is rounded is another extreme, or none, lies on the other
#: side of a bound, or is a zero that is divided by.
ROUGH = {
    "amax": lambda x: x.amax(1),
    "aminmax": lambda x: torch.stack(x.aminmax(dim=1)),
    "max": lambda x: x.max(),
    "infinite norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "norm": lambda x: x.norm(dim=0),
    "clamp": lambda x: x.clamp(min=0.1),
    "abs": lambda x: x.abs(),
    "maximum": lambda x: torch.maximum(x, x.roll(1, 0)),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "softshrink": F.softshrink,
    "selu": F.selu,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25])),
    "div": lambda x: 1 / x,
    "div by": lambda x: x.roll(1, 0) / x,
    "reciprocal": torch.reciprocal,
    "log": lambda x: (x.detach().abs() + x).log(),
    "root": lambda x: (x.detach().abs() + x + 0.001) ** 0.5,
    "power of a number": lambda x: 2**x,
    "power": lambda x: x.pow(-1),
    "cumprod": lambda x: x.cumprod(0),
    "prod": lambda x: x[:4].prod(0),
    "atan2": lambda x: torch.atan2(x, x.roll(1, 0)),
    "normalize": lambda x: F.normalize(x, dim=1),
    "std": lambda x: x.std(1),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
}


#: Smooth, but codes of the range's 8 bits make gradients of another size: of what is nearly predicted, in radians.
DELICATE = {
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 0.01),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() + 0.01),
    "huber_loss": lambda x: F.huber_loss(x, x.detach() + 0.01),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log_softmax of tensors": lambda x: x.log_softmax(dim=1),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "softmin": lambda x: -F.softmin(x, 1),  # what is returned as it is, is exact
    "cross_entropy": lambda x: F.cross_entropy(20 * x, x.argmax(1)),
    "cross_entropy of planes": lambda x: F.cross_entropy(20 * x.view(2, 4, -1), x.view(2, 4, -1).argmax(1)),
    "kl_div": lambda x: F.kl_div(x, x.detach().softmax(1), reduction="sum"),
    "logsigmoid": lambda x: F.logsigmoid(20 * x),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(20 * x, (x > 0).to(x.dtype)),
    "sin": lambda x: x.sin(),
    "cos": lambda x: torch.cos(100 * x),
}


@pytest.mark.parametrize("name", DELICATE)
def test_what_8_bits_are_too_few_for_is_exact_unless_the_policy_names_it(name):
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    weight = torch.randn(DELICATE[name](x).shape)
    (_, grad, _), (_, ours, saved) = both(DELICATE[name], x, weight)
    assert same(ours, grad)
    assert saved.kept_bytes >= saved.raw_bytes > 0
    for named in ({"operators": {"other": 8}}, {"modules": {"*": "off", "*:other": 8}}):
        _, (_, _, saved) = both(DELICATE[name], x, weight, **named)
        assert saved.kept_bytes < saved.raw_bytes
    for unnamed in ({"operators": {"other": "off"}}, {"modules": {"*:other": 8, "*": 8}}):
        _, (_, ours, _) = both(DELICATE[name], x, weight, **unnamed)
        assert same(ours, grad)


#: Over 1,024 elements.
WIDE = {
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log_softmax of tensors": lambda x: x.log_softmax(dim=1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmin": lambda x: -F.softmin(x, 1),  # what is returned as it is, is exact
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(len(x))),
    "cross_entropy of planes": lambda x: F.cross_entropy(x.unsqueeze(-1), torch.arange(len(x)).unsqueeze(-1)),
}


@pytest.mark.parametrize("name", WIDE)
def test_rows_as_wide_as_a_vocabulary_have_codes(name):
    for classes, has_codes in ((1024, True), (1023, False)):
        x = torch.randn(8, classes)
        _, (_, _, saved) = both(WIDE[name], x, torch.ones_like(WIDE[name](x)))
        assert (saved.kept_bytes < saved.raw_bytes / 3) == has_codes


def certain(x):
    """Logits of a model that is almost certain of the first class."""
    return torch.cat([x, x]) + 12 * F.one_hot(torch.zeros(2 * len(x), dtype=torch.long), x.shape[-1]).to(x.dtype)


def first(x):
    """The class of all targets."""
    return torch.zeros(2 * len(x), dtype=torch.long)


def weights(x):
    return torch.linspace(0.5, 2, x.shape[-1], dtype=x.dtype)


def spread(x):
    """Targets that are probabilities, close to those of the model."""
    return (certain(x) * 0.9).detach().softmax(-1)


LOSSES = {
    "indices": lambda x: F.cross_entropy(certain(x), first(x)),
    "probabilities": lambda x: F.cross_entropy(certain(x), spread(x)),
    "smoothing": lambda x: F.cross_entropy(certain(x), first(x), label_smoothing=0.01),
    "weights": lambda x: F.cross_entropy(certain(x), first(x), weight=weights(x), ignore_index=3),
    "planes": lambda x: F.cross_entropy(certain(x).mT.unsqueeze(0), first(x).unsqueeze(0)),
    "divergence": lambda x: F.kl_div(certain(x).log_softmax(-1), spread(x), reduction="batchmean"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_a_vocabulary_tell_probabilities_near_one_apart(name, dtype):
    """Levels at equal distances would make these gradients wrong by 30 % and more."""
    torch.manual_seed(0)
    x = torch.randn(32, 2048).to(dtype)
    (_, grad, _), (_, ours, saved) = both(LOSSES[name], x, torch.ones((), dtype=dtype))
    assert saved.kept_bytes < 0.8 * saved.raw_bytes  # targets that are probabilities are kept as they are
    assert (ours.double() - grad.double()).norm() < 0.06 * grad.double().norm()


def test_logits_of_minus_infinity_keep_a_loss_exact():
    torch.manual_seed(0)
    x = torch.randn(32, 2048)

    def masked(x):
        return F.cross_entropy(x.masked_fill(torch.arange(2048) > 2000, -torch.inf), torch.arange(32))

    (_, grad, _), (_, ours, _) = both(masked, x, torch.ones(()))
    assert same(ours, grad)


@pytest.mark.parametrize("name", [name for name in ROUGH if not (OLDEST and name == "aminmax")])  # has no derivative
def test_what_bears_no_rounding_is_kept_as_it_is(name):
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    y = ROUGH[name](x)
    (_, grad, _), (_, ours, saved) = both(ROUGH[name], x, torch.randn(y.shape))
    assert same(ours, grad)
    assert saved.raw_bytes >= x.nbytes
    assert saved.kept_bytes >= saved.raw_bytes


@pytest.mark.parametrize("power", [1, 2, 2.0, 3])
def test_whole_powers_bear_rounding(power):
    x = torch.randn(64, 32)
    (_, grad, _), (_, ours, saved) = both(lambda x: x**power, x, torch.randn(64, 32))
    assert (ours - grad).norm() <= 0.02 * grad.norm()
    assert saved.kept_bytes <= saved.raw_bytes / 3 or power == 1


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(("name", "function"), [(n, f) for n in OPERATORS for f in OPERATORS[n]])
def test_operators_by_name(name, function):
    """Only the one named is compressed, and nothing else was saved but what * 1 in front of it does not save."""
    x = torch.randn(8, 16, 16, requires_grad=True)
    # -, which saves nothing: probabilities that a model returns are exact.
    model, handle = compressing(lambda x: -function(x), bits="off", operators={name: 8}, min_numel=64)
    with handle as saved:
        y = model(x)
    y.sum().backward()
    assert list(saved.by_operator) == [name]
    assert saved.kept_bytes < saved.raw_bytes


def test_custom_functions_are_left_alone_unless_named():
    exact = []
    x = torch.randn(16, 16, requires_grad=True)
    for options in ({"bits": 4}, {"bits": 4, "modules": {"*": 4}}, {"bits": 4, "operators": {"custom": 4}}):
        model, handle = compressing(lambda x: Checks.apply(torch.tanh(x * 2), exact), **options)
        with handle:
            y = model(x)
        y.sum().backward()
    assert exact == [True, True, False]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_only_floats_are_ever_quantized():
    """Of all that a function that is named may save."""
    others = [
        torch.randint(100, (8, 8)),
        torch.randint(100, (8, 8), dtype=torch.int8),
        torch.rand(8, 8) < 0.5,
        torch.randn(8, 8, dtype=torch.complex64),
        torch.randn(8, 8, dtype=torch.float64),
        torch.randn(8, 8).to_sparse(),
        torch.randn(8, 8).to(torch.float8_e4m3fn),
        torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 0, torch.qint8),
    ]
    found = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *those):
            ctx.save_for_backward(x, *those)
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            found.extend(ctx.saved_tensors)
            return gradient, *[None] * len(others)

    model, handle = compressing(
        lambda x: Saves.apply(x.tanh(), *[other.clone() for other in others]), bits=2, operators={"custom": 2}
    )
    x = torch.randn(8, 8, requires_grad=True)
    with handle:
        y = model(x)
    y.sum().backward()
    assert not torch.equal(found[0], x.tanh())
    for kept, other in zip(found[1:], others, strict=True):
        assert kept.dtype == other.dtype
        if other.is_sparse:
            kept, other = kept.to_dense(), other.to_dense()  # noqa: PLW2901
        if other.is_quantized:
            kept, other = kept.int_repr(), other.int_repr()  # noqa: PLW2901
        assert torch.equal(kept.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
