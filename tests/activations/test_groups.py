"""Where the groups of a tensor are: heads, channels, samples."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.activations.helpers import Calls, compress, saved_of
from tests.activations.models import Attention, SelfAttention


def range_of(x, dim, groups=None, major=1):
    """(2, groups): α and β of groups of a dimension that is (major, groups, rest)."""
    groups = groups or x.shape[dim]
    by_group = x.detach().unflatten(dim, (major, groups, -1)).movedim(dim + 1, 0).flatten(1)
    return torch.stack((by_group.amax(1) - by_group.amin(1), by_group.amin(1)))


def assert_learned(handle, *expected):
    """After a first batch, each of these ranges is what one tensor's estimates begin with."""
    estimates = list(handle.state_dict()["estimates"].values())
    for value in expected:
        matches = [e for e in estimates if e.shape == value.shape and torch.allclose(e, value, rtol=1e-4, atol=1e-5)]
        assert matches, f"{value} is not in {estimates}"


def at_home(function, x, *, attributes=None, **options):
    """The estimates of one pass of a function, as a model with these attributes."""
    model = Calls(function, x.shape[-1], **(attributes or {}))
    handle = compress(model, **options)
    with handle:
        model(x)
    return handle


def uneven(*shape):
    """Different in every place of every dimension."""
    x = torch.randn(*shape)
    for dim, size in enumerate(shape):
        x = x * torch.linspace(0.5, 2, size).view(-1, *[1] * (len(shape) - dim - 1))
    return x


SOME_HEADS = [{"num_heads": 4}, {"n_head": 4}, {"nhead": 4}, {"num_attention_heads": 4}, {"heads": 4}]


@pytest.mark.parametrize("attributes", SOME_HEADS, ids=str)
def test_heads_are_those_of_the_module_in_all_layouts(attributes):
    seen = {}

    def function(x):
        B, N, _ = x.shape
        q = seen["q"] = uneven(B, 4, N, 8) * x.view(B, N, 4, 8).transpose(1, 2)
        maps = seen["maps"] = (q @ q.transpose(-2, -1)).softmax(-1)  # (B, H, N, N); q is (B·H, N, D) to the product
        y = (maps @ q).transpose(1, 2)
        last = seen["last"] = y.contiguous().softmax(-1)  # (B, N, H, D)
        return last.sum()

    handle = at_home(function, torch.randn(3, 10, 32), attributes=attributes)
    assert_learned(handle, range_of(seen["q"], 1), range_of(seen["maps"], 1), range_of(seen["last"], 2))


def test_heads_may_be_set():
    seen = {}

    def function(x):
        q = seen["q"] = uneven(12, 10, 32) * x
        return torch.bmm(q, q.transpose(1, 2)).sum()

    x = torch.randn(12, 10, 32)
    assert_learned(at_home(function, x, heads=3), range_of(seen["q"], 0, 3, 4))
    assert_learned(at_home(function, x, heads=3, attributes={"num_heads": 6}), range_of(seen["q"], 0, 3, 4))
    assert_learned(at_home(function, x, attributes={"num_heads": 6}), range_of(seen["q"], 0, 6, 2))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_heads_of_multihead_attention(need_weights, batch_first):
    torch.manual_seed(0)
    model = SelfAttention(need_weights, batch_first)
    with torch.no_grad():
        model.attn.in_proj_weight.mul_(torch.rand(12).add(0.2).repeat_interleave(8).view(-1, 1))
    x, handle = torch.randn(3, 10, 32), compress(model)
    with handle:
        model(x)
    h = model.first(x)
    projected = F.linear(h, model.attn.in_proj_weight, model.attn.in_proj_bias).unflatten(-1, (3, 4, 8))
    q, k, v = projected.unbind(2)  # (B, N, H, D), or (N, B, H, D)
    ranges = [range_of(part, 2) for part in (q / math.sqrt(8) if need_weights else q, k, v)]
    if need_weights:
        ranges.append(range_of(model.attn(h, h, h, average_attn_weights=False)[1], 1))
    assert_learned(handle, *ranges)


def test_a_product_with_one_matrix_is_a_linear_layer_also_among_heads():
    seen, w = {}, torch.randn(32, 32, requires_grad=True)

    def function(x):
        h = seen["h"] = x * 1
        return (h @ w).sum() + torch.einsum("bnc,cd->bnd", h.tanh(), w).sum()

    handle = at_home(function, torch.randn(8, 10, 32), attributes={"num_heads": 4})
    assert_learned(handle, range_of(seen["h"], 2, 4), range_of(seen["h"].tanh(), 2, 4))


@pytest.mark.parametrize(
    ("options", "attributes", "groups"),
    [
        ({}, {}, 8),
        ({"groups": 4}, {}, 4),
        ({"groups": 5}, {}, 4),
        ({"groups": 100}, {}, 32),
        ({}, {"num_heads": 2}, 2),
        ({}, {"num_heads": True}, 8),
    ],
    ids=str,
)
def test_groups_of_channels(options, attributes, groups):
    seen = {}

    def function(x):
        seen["x"] = x
        return F.gelu(x).sum()

    handle = at_home(function, torch.randn(5, 6, 32), attributes=attributes, **options)
    assert_learned(handle, range_of(seen["x"], 2, groups))


def test_elsewhere_there_are_as_many_groups_as_there_are_heads_in_most_modules():
    model = nn.ModuleDict({"a": Attention(num_heads=4), "b": Attention(num_heads=2), "c": Attention(num_heads=4)})
    model["last"] = Calls(F.gelu)
    model.forward = model["last"].__call__
    handle, x = compress(model), torch.randn(6, 32)
    with handle:
        model(x)
    assert_learned(handle, range_of(model["last"].first(x), 1, 4))


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_and_what_follows_them_have_groups_of_channels(channels_last):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.BatchNorm2d(16), nn.Conv2d(16, 24, 3))
    x = torch.randn(2, 3, 10, 10)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    handle, seen = compress(model, groups=4, derive=False), []
    for layer in model:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with handle:
        model(x)
    assert_learned(handle, *(range_of(h, 1, 4) for h in seen[1:]))
    assert len(handle.state_dict()["estimates"]) == 3


def test_granularity_layer_is_one_range_for_all():
    seen = {}

    def function(x):
        seen["x"] = x
        return F.gelu(x).sum() + x.view(5, 4, 6, 8).softmax(-1).sum()

    handle = at_home(function, torch.randn(5, 6, 32), attributes={"num_heads": 4}, granularity="layer")
    assert_learned(
        handle, range_of(seen["x"].flatten(), 0, 1), range_of(seen["x"].view(5, 4, 6, 8).softmax(-1).flatten(), 0, 1)
    )


@pytest.mark.parametrize(
    ("bits", "rounding", "dtype"),
    [(8, "stochastic", torch.float32), (4, "nearest", torch.bfloat16), (2, "stochastic", torch.float16)],
    ids=str,
)
def test_neighbours_share_a_range_whatever_they_belong_to(bits, rounding, dtype):
    """Equations 3 and 5 in float64, for every 40 elements in memory, the last of which are fewer, of every batch anew:
    of a transposed tensor, too, and of one that is a hundred times as large.
    """
    model = Calls(None).to(dtype)
    seen = []
    model.function = lambda x: F.gelu(seen.append((x * 1).transpose(0, 1)) or seen[-1])
    handle = compress(model, bits=bits, granularity=40, min_numel=40, rounding=rounding, statistics="running")
    for scale in (1, 100):
        with handle as saved:
            y = model((uneven(9, 7, 32) * scale).to(dtype))
        found = next(kept for (_, node, name), kept in saved_of(y).items() if name == "_saved_self" and "Gelu" in node)
        exact = seen[-1].detach()
        assert (found.dtype, found.stride()) == (dtype, exact.stride())
        flat, restored = (x.transpose(0, 1).flatten().double() for x in (exact, found))  # in the order of memory
        assert flat.numel() % 40 == 16
        for one, other in zip(flat.split(40), restored.split(40), strict=True):
            step = (one.max() - one.min()) / (2**bits - 1)
            least = one.abs().max() * torch.finfo(dtype).eps
            assert ((one - other).abs() <= (1.001 if rounding == "stochastic" else 0.501) * step + 2 * least).all()
        ranges = math.ceil(flat.numel() / 40)
        gelu = saved.by_operator["gelu"]
        assert gelu.kept_bytes == ranges * (40 * bits // 8 + 8)
        assert gelu.raw_bytes == flat.numel() * dtype.itemsize
    assert handle.state_dict()["estimates"] == {}


def test_an_outlier_costs_its_neighbours_alone():
    model = Calls(F.gelu)
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(32)), model.first.bias.zero_()
    x = torch.randn(8, 32)
    x[3, 5] = 1e6
    with compress(model, granularity=32, min_numel=32) as saved:
        y = model(x)
    found = next(kept for (_, node, name), kept in saved_of(y).items() if name == "_saved_self")
    assert saved.outliers == 0
    others = torch.arange(8) != 3
    torch.testing.assert_close(found[others], x[others], atol=0.05, rtol=0)
    assert found[3, 5] > 0.9e6


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_beside_an_outlier_neighbours_come_back_as_zeros_and_the_outlier_as_it_was(bits, rounding):
    model = Calls(F.gelu)
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(32)), model.first.bias.zero_()
    for outliers in ({5: 1e20}, {5: -1e20}, {5: 1e20, 9: -1e20}):
        x = torch.randn(8, 32)
        for place, value in outliers.items():
            x[:, place] = value
        with compress(model, bits=bits, granularity=32, min_numel=32, rounding=rounding):
            y = model(x)
        found = next(kept for (_, node, name), kept in saved_of(y).items() if name == "_saved_self")
        large = torch.zeros(32, dtype=torch.bool)
        large[list(outliers)] = True
        torch.testing.assert_close(found[:, large], x[:, large], rtol=2 / 2**bits, atol=0)
        assert (found[:, ~large] == 0).all()


@pytest.mark.parametrize("granularity", ["group", "layer"])
@pytest.mark.parametrize("kind", ["linear", "gelu", "heads", "conv"])
def test_statistics_per_sample(kind, granularity):
    """Samples of very different sizes each err by a step of their own, and nothing is learned."""
    sizes = torch.logspace(0, 4, 5)
    shape = {"linear": (5, 7, 16), "gelu": (5, 7, 16), "heads": (5, 4, 7, 16), "conv": (5, 16, 6, 6)}[kind]
    x = uneven(*shape) * sizes.view(-1, *[1] * (len(shape) - 1))
    conv, linear = nn.Conv2d(16, 4, 3), nn.Linear(16, 4)
    model = Calls(None, num_heads=4)
    model.first = nn.Identity()
    call = {"linear": linear, "gelu": F.gelu, "heads": lambda x: x @ x.transpose(-2, -1), "conv": conv}[kind]
    model.function = lambda x: call(seen.append(x * 1) or seen[0])
    seen = []
    handle = compress(model, statistics="sample", granularity=granularity, rounding="nearest")
    with handle as saved:
        y = model(x.requires_grad_())
    found = next(
        kept for name, kept in saved_of(y).items() if name[2] in ("_saved_mat1", "_saved_self", "_saved_input")
    )
    exact = seen[0].detach()
    error = (found.view(exact.shape) - exact).abs().flatten(1).amax(1)
    width = exact.flatten(1).amax(1) - exact.flatten(1).amin(1)
    assert (error <= width / 255 * 0.51).all()
    assert handle.state_dict()["estimates"] == {}
    groups = 1 if granularity == "layer" else 4
    ranges = 5 * groups * 8 * (2 if kind == "heads" else 1)  # one for each operand; their memory is the same
    assert saved.kept_bytes in (x.numel() + ranges, x.numel() + 5 * groups * 8)
