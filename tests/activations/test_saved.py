"""The context: what is quantized how, what stays exact, what is counted; and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import logging
import math
import pickle
import threading
import weakref
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from narrowband.activations.kept import DRIFT, Payload
from tests.activations.models import SMALL, Attention, SelfAttention, ViT, counting, error, mlp, same
from tests.ranks import run_ranks


def compress(model, **options):
    return nb.compress_activations(model, **{"min_numel": SMALL, **options})


def grads_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def linears(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


class Calls(nn.Module):
    """A function of a linear layer's result, as a model; heads where it has them."""

    def __init__(self, function, dim=32, **attributes):
        super().__init__()
        self.first, self.function = nn.Linear(dim, dim), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self.first(x))


# ---- equations -------------------------------------------------------------------------------------------------------


def rederived(x, dims, held, bits, decay):
    """Equations 3 and 5 to 7 in float64 for groups that lie along ``dims``: (x̂ by rounding to nearest, the range (α, β)
    it has, the estimates (α, β)). The range is that of the estimates before, unless an end of it is far from these.
    """
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    alpha, beta = high - low, low
    learned = alpha, beta
    if held is not None:
        learned = alpha, beta = decay * held[0] + (1 - decay) * alpha, decay * held[1] + (1 - decay) * beta
        moved = torch.maximum((held[1] - beta).abs(), (sum(held) - alpha - beta).abs())
        if decay and (moved <= DRIFT * alpha).all():
            alpha, beta = held
    top = 2**bits - 1
    x_tilde = ((x - beta) * top / alpha).round().clamp(0, top)
    return x_tilde * alpha / top + beta, (alpha, beta), learned


def check(found, x, dims, held, *, rounding, bits=8, decay=0.9):
    """What was restored against the equations; returns the estimates."""
    x_hat, (alpha, beta), held = rederived(x.double(), dims, held, bits, decay)
    unit = alpha / (2**bits - 1)
    inside = (x >= beta) & (x <= alpha + beta)
    assert (inside | (found.double() - x_hat).abs().le(1e-5 * alpha)).all(), "clipped to the range"
    if rounding == "nearest":
        assert ((found.double() - x_hat).abs() <= unit * 1e-3).double().mean() > 0.98
    assert ((found.double() - x.double()).abs() <= unit * (1.001 if rounding == "stochastic" else 0.501))[inside].all()
    return held


def estimates_of(handle, name):
    return handle.state_dict()["estimates"][name].double()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("bits", "decay"), [(8, 0.9), (4, 0.5), (2, 0.0)])
def test_a_linear_layer_is_the_equations_over_several_steps(bits, decay, rounding):
    model, held = linears(16, 24, 8), None
    handle = compress(model, bits=bits, decay=decay, rounding=rounding, groups=6)
    generator = torch.Generator().manual_seed(1)
    for scale in (1, 2, 2, 5, 4, 4):
        x = torch.randn(40, 16, generator=generator) * scale
        with handle:
            y = model(x)
        h = model[0](x).detach().view(40, 6, 4)  # four neighbouring channels are a group
        found = y.grad_fn._saved_mat1.view(40, 6, 4)
        held = check(found, h, (0, 2), held, rounding=rounding, bits=bits, decay=decay)
        torch.testing.assert_close(estimates_of(handle, "1:matmul:0"), torch.stack(held).view(2, 6), rtol=1e-5, atol=0)
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(model[1].weight.grad, found.view(40, 24).sum(0).expand(8, 24))
        model.zero_grad()


class Heads(nn.Module):
    """Attention in one call, of heads that differ in size; remembers what it saw."""

    num_heads = 4

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        with torch.no_grad():
            self.qkv.weight.mul_(torch.logspace(-1, 1, 12)[torch.randperm(12)].repeat_interleave(8).view(-1, 1))

    def forward(self, x):
        self.query, self.key, self.value = self.qkv(x).view(3, 10, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        self.output = F.scaled_dot_product_attention(self.query, self.key, self.value)
        return self.output


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_attention_is_the_equations_per_head_over_several_steps(rounding):
    """Queries, keys, values and results have a range for each head of each."""
    torch.manual_seed(0)
    model, held = Heads(), {}
    handle = compress(model, rounding=rounding)
    for _ in range(5):
        with handle:
            model(torch.randn(3, 10, 32))
        for name in ("query", "key", "value", "output"):
            exact = getattr(model, name).detach()
            found = getattr(model.output.grad_fn, f"_saved_{name}")
            held[name] = check(found, exact, (0, 2, 3), held.get(name), rounding=rounding)
    estimates = {
        name: value for name, value in handle.state_dict()["estimates"].items() if name.startswith(":attention:")
    }
    assert len(estimates) == 4
    for alpha_beta in held.values():
        expected = torch.stack(alpha_beta).view(2, 4)
        assert sum(torch.allclose(value.double(), expected, rtol=1e-4) for value in estimates.values()) == 1


def test_stochastic_rounding_of_a_gradient_is_right_on_average():
    model, x, times = linears(8, 16, 4), torch.randn(32, 8), 400
    handle = compress(model, bits=2)
    model(x).square().sum().backward()
    plain = model[1].weight.grad.double()
    found = []
    for _ in range(times):
        model.zero_grad()
        with handle:
            y = model(x)
        y.square().sum().backward()
        found.append(model[1].weight.grad.double())
    found = torch.stack(found)
    assert ((found.mean(0) - plain).abs() <= 5 * found.std(0) / math.sqrt(times) + 1e-6).all()
    assert (found.std(0) > 0).all()


# ---- groups ----------------------------------------------------------------------------------------------------------


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
    assert saved.bytes_kept in (x.numel() + ranges, x.numel() + 5 * groups * 8)


# ---- what is stored once ---------------------------------------------------------------------------------------------


def draws(handle):
    """How many payloads were made."""
    return handle.state_dict()["draws"]


@pytest.mark.parametrize(
    ("function", "payloads"),
    [
        (lambda h: h.tanh() * 0 + h.sin() + h.cos() + h.exp() * 0, 2 + 1),  # the results of tanh and exp, and h
        (lambda h: h.sin() + h.view(-1, 8).sin().view(h.shape) + h.t().sin().t() + h[None].cos()[0], 1),
        (lambda h: h[:, :16].sin() + h[:, 16:].sin() + h[:, :16].cos(), 2),
        (lambda h: h[:10].sin() + h[:10].cos() + h[10:].sin(), 2),
        (lambda h: h.sin() + h.detach().requires_grad_().cos(), 1),
        (lambda h: h.sin() + (h + 0).cos(), 2),
    ],
)
def test_what_several_operators_save_is_stored_once(function, payloads):
    model, x = Calls(function), torch.randn(20, 32)
    handle = compress(model, min_numel=1)
    with counting(model, x) as total:
        model(x)
    with handle as saved:
        y = model(x)
    assert draws(handle) == payloads
    assert saved.bytes_plain == total[0]
    assert saved.bytes_kept <= payloads * 20 * 32
    y.sum().backward()


def test_queries_keys_and_values_of_one_projection_are_stored_once_each():
    model, x = Attention(), torch.randn(2, 8, 32)
    with compress(model) as saved:
        model(x)
    # q, k, v and the result, which is also the projection's input, at a byte per element; log-sum-exp at four.
    assert saved.by_operator["attention"].kept == 4 * x.numel() + 2 * 4 * 8 * 4
    assert saved.by_operator["matmul"].kept == 0


def test_changed_memory_is_another_tensor():
    model = Calls(lambda h: h)
    handle = compress(model, min_numel=1)

    def function(h):
        first = h.sin()
        with torch.no_grad():
            h.mul_(100)
        return first, h.sin()

    model.function = function
    with handle:
        first, second = model(torch.randn(20, 32))
    assert draws(handle) == 2
    second.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("first", "second", "payloads", "kept"),
    [(8, 8, 1, 640), (8, 4, 1, 640), (4, 8, 2, 960), ("off", 8, 0, 2560), (8, "off", 1, 640 + 2560)],
)
def test_who_needs_more_bits_gets_them_and_what_is_exact_anyway_is_not_quantized(first, second, payloads, kept):
    w = nn.Parameter(torch.randn(32, 32))
    model, x = Calls(lambda h: F.gelu(h) + F.linear(h, w)), torch.randn(20, 32)
    handle = compress(model, bits="off", operators={"gelu": first, "matmul": second}, min_numel=1)
    with handle as saved:
        y = model(x)
    assert (draws(handle), saved.bytes_kept, saved.bytes_plain) == (payloads, kept, 20 * 32 * 4)
    y.sum().backward()


#: What an allocator does with memory that was freed is its own affair. So often it is asked to hand it out again, while
#: other tensors of that size come and go.
_ASKED = 1_000
_OTHERS = 5


def test_memory_that_is_freed_and_used_again_is_not_mistaken_for_the_old():
    model, addresses = linears(32, 32, 32), []
    model[0].register_forward_hook(lambda *args: addresses.append(args[2].data_ptr()))
    inputs = [torch.randn(20, 32) * 10**i for i in range(4)]
    expected = []
    for x in inputs:
        model(x).sum().backward()
        expected.append(grads_of(model))
        model.zero_grad()
    addresses.clear()
    handle, others = compress(model, decay=0.0), deque(maxlen=_OTHERS)
    with handle as saved:
        for _ in range(_ASKED):
            others.append(torch.empty(20, 32))
            for x, plain in zip(inputs, expected, strict=True):
                model(x).sum().backward()
                assert error(grads_of(model), plain) < 0.01
                model.zero_grad()
            if len(set(addresses)) < len(addresses):
                break
    assert len(set(addresses)) < len(addresses), "no memory was used again: the test says nothing"
    assert draws(handle) == len(addresses)
    assert saved.bytes_plain == len(addresses) * 20 * 32 * 4


def test_memory_of_an_input_that_is_gone_may_be_an_activations():
    model, hidden, gone = linears(32, 32, 32), [], set()
    model[0].register_forward_hook(lambda *args: hidden.append(args[2].data_ptr()))
    others = deque(maxlen=_OTHERS)
    with compress(model) as saved:
        for _ in range(_ASKED):
            x, other = torch.randn(20, 32), torch.randn(20, 32)
            gone.add(x.data_ptr())
            model(x)
            others.append(x)
            del x
            model(other)
            if hidden[-1] in gone:
                break
    assert hidden[-1] in gone, "no memory was used again: the test says nothing"
    assert saved.bytes_plain == len(hidden) * 20 * 32 * 4


# ---- what stays exact ------------------------------------------------------------------------------------------------


def saved_of(y):
    """What the graph of a result has saved, restored: (place, node, attribute) → tensor."""
    found, seen, queue = {}, set(), [y.grad_fn]
    while queue:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        queue += [after for after, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                if isinstance(value, torch.Tensor):
                    found[len(seen), node.name(), name] = value
    return found


def inexact(model, *inputs, autocast=False, **options):
    """(Node, attribute) of what is not restored to the bit, of all that is saved; and the names of the rest."""
    cast = (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if autocast else contextlib.nullcontext
    with cast():
        plain = model(*inputs)
    with compress(model, **{"min_numel": 1, "bits": 4, **options}), cast():
        y = model(*inputs)
    expected, found = saved_of(plain), saved_of(y)
    assert expected.keys() == found.keys()
    differ = {name[1:] for name in found if not same_values(found[name], expected[name])}
    return differ, {name[1:] for name in found} - differ


def same_values(a, b):
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def test_statistics_of_norms_stay_exact():
    norms = {
        "NativeLayerNormBackward0": nn.LayerNorm(32),
        "NativeBatchNormBackward0": nn.BatchNorm1d(32),
        "NativeGroupNormBackward0": nn.GroupNorm(16, 32),
    }
    for name, norm in norms.items():
        model = nn.Sequential(nn.Linear(32, 32), norm)
        differ, rest = inexact(model, torch.randn(64, 32))
        assert differ == {(name, "_saved_input")}
        assert {(name, "_saved_result1"), (name, "_saved_result2")} <= rest


def test_log_sum_exp_of_attention_stays_exact():
    differ, rest = inexact(Heads(), torch.randn(3, 10, 32))
    node = "ScaledDotProductFlashAttentionForCpuBackward0"
    assert differ == {(node, f"_saved_{name}") for name in ("query", "key", "value", "output")}
    assert (node, "_saved_logsumexp") in rest


class Holds(nn.Module):
    """Calls a function of itself: it has its input x, a linear layer's result h, parameters and buffers."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first = function, nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.frozen = nn.Parameter(torch.randn(32, 32), requires_grad=False)
        self.register_buffer("buffer", torch.randn(32, 32))
        self.register_buffer("places", torch.randint(32, (32, 32)))
        self.register_buffer("sparse", (torch.randn(32, 32) * (torch.rand(32, 32) < 0.1)).to_sparse())

    def forward(self, x):
        self.x, self.h = x, self.first(x)
        return self.function(self)


#: Functions, and what they save beside that must stay exact.
EXACT = {
    "inputs": (lambda m: m.h * m.x + m.x.t().sin().t(), {("MulBackward0", "_saved_self")}),
    "buffers": (lambda m: m.h * m.buffer + m.h * m.buffer.t(), set()),
    "parameters": (lambda m: m.weight.sin() + m.h, set()),
    "parameters, to a product": (lambda m: m.h @ m.weight.t(), {("MmBackward0", "_saved_self")}),
    "frozen parameters": (lambda m: m.h @ m.frozen, set()),
    "integers": (lambda m: F.embedding(m.places, m.weight).mean(0) + m.h.index_select(0, m.places[0]), set()),
    "integers that were computed": (lambda m: m.h.sort(1).values, set()),
    "complex numbers": (lambda m: (m.h * 1j).exp().abs(), set()),
    "float64": (lambda m: m.h.double().exp(), set()),
    "rows that are expanded": (lambda m: (m.h[:1] + 1).expand(32, 32).sin(), set()),
    "columns that are expanded": (lambda m: (m.h[:, :1] + 1).expand(32, 32).cos(), set()),
    "a part that is expanded": (lambda m: (m.h + 1)[:1].expand(3, 32).sin(), set()),
    "windows": (lambda m: (m.h + 1).view(-1).unfold(0, 32, 16).sin(), set()),
    "sparse tensors": (lambda m: torch.sparse.mm(m.sparse, m.h), set()),
    "a sign that is not in memory": (lambda m: (m.h * (1 - 1j)).conj().imag.sin(), set()),
}


@pytest.mark.parametrize("name", EXACT)
def test_it_stays_exact(name):
    torch.manual_seed(0)
    function, but = EXACT[name]
    model = Holds(function)
    differ, rest = inexact(model, torch.randn(32, 32, requires_grad=True))
    assert differ == but
    assert rest


def test_small_tensors_stay_exact():
    differ, _ = inexact(linears(8, 8, 8), torch.randn(8, 8), min_numel=65)
    assert differ == set()
    differ, _ = inexact(linears(8, 8, 8), torch.randn(8, 8), min_numel=64)
    assert differ == {("AddmmBackward0", "_saved_mat1")}


def cast_layers(conv, frozen):
    torch.manual_seed(0)
    layer = (lambda: nn.Conv2d(8, 8, 3, padding=1)) if conv else (lambda: nn.Linear(32, 32))
    first, last = layer(), layer()
    last.requires_grad_(not frozen)
    model = nn.Sequential(first, nn.GELU(), last, nn.GELU(), layer())
    if conv == "channels last":
        model = model.to(memory_format=torch.channels_last)
    return model, torch.randn(2, 8, 6, 6) if conv else torch.randn(32, 32)  # as many elements as the weight has


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("conv", [False, True, "channels last"])
def test_autocasts_copies_of_parameters_come_back_exactly(conv, frozen):
    model, x = cast_layers(conv, frozen)
    differ, rest = inexact(model, x, autocast=True)
    weight = ("ConvolutionBackward0", "_saved_weight") if conv else ("AddmmBackward0", "_saved_mat2")
    assert weight in rest
    assert weight not in differ
    assert ("GeluBackward0", "_saved_self") in differ


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("conv", [False, True, "channels last"])
def test_autocasts_copies_of_parameters_are_cast_again_instead_of_kept(conv, frozen):
    model, x = cast_layers(conv, frozen)
    with compress(model, min_numel=1) as saved, torch.autocast("cpu", torch.bfloat16):
        model(x)
    name, weights = ("conv", 8 * 8 * 9) if conv else ("matmul", 32 * 32)
    assert saved.by_operator[name].plain >= 2 * (2 * x.numel() + 2 * weights)
    assert saved.by_operator[name].kept == x.numel()  # codes of the first layer's input; others' comes of GELU's


LAID_OUT = {
    "transposed": lambda w, x: x @ w.t().to(torch.bfloat16),
    "in another order": lambda w, x: x @ w.t().to(torch.bfloat16, memory_format=torch.contiguous_format),
    "a part": lambda w, x: x[:, :16] @ w.as_strided((16, 32), (32, 1)).to(torch.bfloat16),
    "a part of the copy": lambda w, x: x[:, :16] @ w.to(torch.bfloat16).as_strided((16, 32), (32, 1), 512),
    "twice": lambda w, x: (x @ w.to(torch.bfloat16)) @ w.to(torch.bfloat16).t(),
}


@pytest.mark.parametrize("how", LAID_OUT)
def test_copies_of_parameters_in_another_order_or_of_a_part_come_back_exactly(how):
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    model.forward = lambda x: LAID_OUT[how](model.weight, x)
    _, rest = inexact(model, torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True))
    assert ("MmBackward0", "_saved_mat2") in rest


def test_a_copy_of_a_parameter_in_another_memory_format_comes_back_exactly():
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3)
    model.forward = lambda x: F.conv2d(x, model.weight.to(torch.bfloat16, memory_format=torch.channels_last))
    _, rest = inexact(model, torch.randn(2, 8, 6, 6, dtype=torch.bfloat16, requires_grad=True))
    assert ("ConvolutionBackward0", "_saved_weight") in rest


def test_a_parameter_that_is_cast_again_must_not_change_before():
    model = linears(32, 32, 32)
    with compress(model, min_numel=1), torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(20, 32))
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: float32 \[32, 32\], which matmul in 1"):
        y.sum().backward()


def test_an_input_that_autocast_copies_is_no_parameter():
    """Only parameters live anyway in another dtype: a copy of an input is kept for backward alone."""
    model = linears(32, 32)
    differ, _ = inexact(model, torch.randn(64, 32, requires_grad=True), autocast=True)
    assert differ == {("AddmmBackward0", "_saved_mat1")}


def test_what_a_loss_saves_outside_stays_exact():
    model, x = linears(32, 32, 32), torch.randn(64, 32)
    with compress(model) as saved:
        loss = F.mse_loss(model(x).exp(), torch.zeros(64, 32))
    assert saved.by_module["(outside)"].plain == saved.by_module["(outside)"].kept == 2 * 64 * 32 * 4
    assert set(saved.by_operator) == {"matmul", "other"}
    loss.backward()


def test_lazy_modules_are_initialised_inside():
    model = nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.LazyLinear(32))
    x = torch.randn(20, 16)
    with compress(model, min_numel=1) as saved:
        y = model(x)
    assert saved.bytes_plain == 2 * 20 * 32 * 4
    weight = next(value for name, value in saved_of(y).items() if name[1:] == ("AddmmBackward0", "_saved_mat2"))
    assert torch.equal(weight, model[2].weight.t())


# ---- changed in place ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, "off"])
def test_what_was_changed_after_it_was_saved_is_an_error(bits):
    def function(h):
        y = h.sin()
        h.add_(1)
        return y

    model = Calls(function)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(20, 32)).sum().backward()
    with compress(model, bits=bits, min_numel=1):
        y = model(torch.randn(20, 32))
    message = (
        r"modified by an inplace operation: float32 \[20, 32\], which other in the model saved for backward, "
        r"is at version 1; expected version 0 instead"
    )
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_parameters_changed_between_forward_and_backward_are_an_error():
    model = linears(32, 32, 32)
    with compress(model):
        y = model(torch.randn(20, 32))
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- not finite ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_is_kept_exactly_and_teaches_nothing(bad):
    model = linears(16, 32, 8)
    handle = compress(model, min_numel=1)
    with handle:
        model(torch.randn(20, 16))
    before = handle.state_dict()
    with torch.no_grad():
        model[0].bias[3] = bad
    x = torch.randn(20, 16)
    model(x).sum().backward()
    plain = grads_of(model)
    model.zero_grad()
    with handle as saved:
        y = model(x)
    y.sum().backward()
    assert all(same(p.grad, plain[name]) for name, p in model.named_parameters())
    assert not plain["1.weight"].isfinite().all() or bad == 3e38
    assert saved.bytes_kept == saved.bytes_plain
    after = handle.state_dict()
    assert all(torch.equal(after["estimates"][name], value) for name, value in before["estimates"].items())


# ---- what a graph may be used for ------------------------------------------------------------------------------------


def test_double_backward_works_on_approximate_values():
    def run(bits):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
        x = torch.randn(50, 16, requires_grad=True)
        with compress(model, bits=bits):
            y = model(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    found, plain = run(8), run("off")
    assert found.keys() == plain.keys()
    assert 0 < error(found, plain) < 0.05


def test_double_backward_may_be_inside_of_the_context():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(50, 16, requires_grad=True)
    with compress(model) as saved:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert model[0].weight.grad.isfinite().all()
    assert saved.by_module["(outside)"].plain == saved.by_module["(outside)"].kept > 0
    assert "custom" not in saved.by_operator


def test_backward_twice_of_a_graph_that_is_retained():
    model = linears(16, 32, 8)
    with compress(model):
        y = model(torch.randn(20, 16)).square().sum()
    y.backward(retain_graph=True)
    first = grads_of(model)
    model.zero_grad()
    y.backward()
    assert all(same(p.grad, first[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, inside):
    """Their inputs are quantized, and what is computed again agrees, with ReLU, dropout and attention inside."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.parts = nn.ModuleList(nn.Sequential(mlp()[:-1], nn.Linear(48, 32)) for _ in range(2))
            self.attn = Attention(fused=False)

        def forward(self, x):
            x = self.first(x)
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=reentrant)
            return checkpoint(self.attn, x[None], use_reentrant=reentrant).mean((0, 1))

    def run(**options):
        torch.manual_seed(0)
        model, x = Checkpointed(), torch.randn(40, 32)
        with compress(model, **options) as saved:
            y = model(x)
            if inside:
                y.square().sum().backward()
        if not inside:
            y.square().sum().backward()
        return y.detach(), grads_of(model), saved

    y, plain, counted = run(bits="off")
    found_y, grads, saved = run(bits=8)
    assert same(found_y, y)
    assert 0 < error(grads, plain) < 0.05
    inputs = saved.by_operator["checkpoint"]
    assert (inputs.plain, inputs.kept) == (3 * 40 * 32 * 4, 3 * 40 * 32)
    if not (reentrant and inside):  # there, what an input was restored to is saved again
        assert saved.bytes_plain == counted.bytes_plain
    assert "custom" not in saved.by_operator
    exact, grads, _ = run(operators={"checkpoint": "off"} | ({} if inside else {"matmul": "off"}), bits=8)
    assert same(exact, y)
    if not inside:  # what is computed again is computed from the same, and the rest is outside of checkpoints
        assert all(same(grads[name], plain[name]) for name in plain)


def test_custom_functions_within_a_checkpoint_are_left_alone():
    exact = []

    class Checks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.copy = x.clone()
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            exact.append(torch.equal(ctx.saved_tensors[0], ctx.copy))
            return gradient

    model = Calls(lambda h: checkpoint(lambda h: Checks.apply(h.sin()), h, use_reentrant=True))
    with compress(model):
        model(torch.randn(20, 32)).sum().backward()
    assert exact == [True]


def test_gradient_accumulation():
    """Several forwards in one context or in several: all have the same estimates, and gradients add up."""

    def run(together, **options):
        torch.manual_seed(0)
        model = mlp()
        handle = compress(model, **options)
        with handle if together else contextlib.nullcontext():
            for _ in range(3):
                with contextlib.nullcontext() if together else handle:
                    loss = model(torch.randn(16, 32)).square().mean()
                loss.backward()
        return grads_of(model), handle.state_dict()

    plain, _ = run(True, bits="off")
    grads, state = run(True)
    apart, apart_state = run(False)
    assert 0 < error(grads, plain) < 0.02
    assert all(same(grads[name], apart[name]) for name in plain)
    assert state["draws"] == apart_state["draws"]
    for name, value in state["estimates"].items():
        assert torch.equal(value, apart_state["estimates"][name])


# ---- the context -----------------------------------------------------------------------------------------------------


def is_clean(model):
    """Whether nothing of a context is left: hooks of modules, of saved tensors, modes."""
    everywhere = torch.nn.modules.module
    return not (
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_forward_hooks_always_called
        or any(m._forward_hooks or m._forward_pre_hooks or m._forward_pre_hooks_with_kwargs for m in model.modules())
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._len_torch_function_stack()
    )


def test_an_exception_leaves_everything_clean():
    model = linears(16, 32, 8)
    handle = compress(model)
    for wrong in (torch.randn(3, 5), "no tensor"):
        with pytest.raises((RuntimeError, TypeError)), handle:
            model(wrong)
        assert is_clean(model)
    with handle as saved:  # in the model, and caught there
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        y = model(torch.randn(20, 16)).exp()
    assert is_clean(model)
    assert saved.by_module["(outside)"].plain == saved.by_module["(outside)"].kept == 20 * 8 * 4
    y.sum().backward()


def test_an_interrupt_that_the_model_catches_does_not_confuse_modules():
    class Interrupts(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(16, 32), Interrupts(), nn.Linear(32, 8)

        def forward(self, x):
            x = self.first(x)
            with contextlib.suppress(KeyboardInterrupt):
                self.inner(x)
            return self.last(x)

    model = nn.Sequential(Catches(), nn.GELU())
    with compress(model) as saved:
        model(torch.randn(20, 16)).exp()
    assert set(saved.by_module) == {"0.last", "1", "(outside)"}


def test_ratios():
    assert nb.activations.Kept(12, 3).ratio == 4
    assert nb.activations.Kept(12, 0).ratio == math.inf
    assert nb.activations.Kept().ratio == nb.activations.Saved().ratio == 1


def test_contexts_do_not_nest():
    model = linears(16, 32, 8)
    handle = compress(model)
    for inner in (handle, compress(linears(4, 4))):
        with handle, pytest.raises(nb.UnsupportedError, match="inside of another one in the same thread"), inner:
            pass
        assert is_clean(model)
    with handle as saved:
        model(torch.randn(20, 16))
    assert saved.bytes_kept < saved.bytes_plain


def test_several_threads_have_a_pass_each():
    """They come and go at different times, and each sees only its own."""
    torch.manual_seed(0)
    model = ViT().eval()  # without dropout
    inputs = [torch.randn(2 + i, 3, 16, 16) for i in range(3)]
    alone, found, grads = [], [None] * 3, [None] * 3
    handle = compress(model, decay=0.0)
    for x in inputs:
        with handle as saved:
            model(x)
        alone.append(saved)
    barriers = [threading.Barrier(2) for _ in range(2)]
    failed = []

    def work(i):
        try:
            with compress(model, decay=0.0) if i else handle as saved:
                if i == 0:  # is in the middle of the model while others begin and end
                    release = model.norm.register_forward_pre_hook(lambda *_: meet() if me() else None)
                    y = model(inputs[i])
                    release.remove()
                else:
                    y = model(inputs[i])
                y.exp()  # outside of the model
            found[i] = saved
            grads[i] = torch.autograd.grad(y.sum(), list(model.parameters()))
        except BaseException as error:
            failed.append(error)
            raise

    def wait(which):
        barriers[which].wait(30)

    def meet():
        wait(0)
        wait(1)

    threads = []

    def me():
        return threading.current_thread() is threads[0]

    threads.append(threading.Thread(target=work, args=(0,)))
    threads[0].start()
    wait(0)
    others = [threading.Thread(target=work, args=(i,)) for i in (1, 2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    wait(1)
    threads[0].join()
    assert not failed
    for i in range(3):
        plain = torch.autograd.grad(model(inputs[i]).sum(), list(model.parameters()))
        as_dict = [dict(enumerate(part)) for part in (grads[i], plain)]
        assert error(*as_dict) < 0.03
        outside = found[i].by_module.pop("(outside)")
        assert outside.plain == outside.kept == (2 + i) * 10 * 4
        assert found[i].by_module == alone[i].by_module
    assert is_clean(model)


def test_as_a_decorator():
    model, x = linears(16, 32, 8), torch.randn(20, 16)

    @compress(model, rounding="nearest")
    def loss_of(x):
        """Of the batch."""
        return model(x).square().sum()

    assert loss_of.__doc__ == "Of the batch."
    for _ in range(2):
        loss = loss_of(x)
        assert is_clean(model)
        loss.backward()
    first = grads_of(model)
    model.zero_grad()
    model(x).square().sum().mul(2).backward()
    assert 0 < error(first, grads_of(model)) < 0.01


def test_the_model_can_be_copied_and_pickled_afterwards():
    model, x = mlp(), torch.randn(16, 32)
    with compress(model):
        y = model(x)
    y.sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_clean(other)
        model.eval()
        other.eval()
        assert torch.equal(other(x), model(x))
        state = compress(other).state_dict()  # estimates are the original's
        assert state == {"estimates": {}, "seed": torch.initial_seed() & 0xFFFFFFFF, "draws": 0}


def test_estimates_belong_to_the_model_and_not_to_the_context():
    model, x = linears(16, 32, 8), torch.randn(20, 16)
    for _ in range(3):
        with compress(model):
            model(x * 2)
    assert compress(model).state_dict()["draws"] == 3
    one = linears(16, 32, 8)
    handle = compress(one)
    for _ in range(3):
        with handle:
            one(x * 2)
    expected = handle.state_dict()["estimates"]
    assert all(torch.equal(compress(model).state_dict()["estimates"][name], expected[name]) for name in expected)


def test_names_of_estimates_do_not_change_with_the_batch():
    """A small batch, of which less is compressed, and a long one learn what the first one began."""
    torch.manual_seed(0)
    model = ViT()
    handle = compress(model, min_numel=2000)
    with handle:
        model(torch.randn(8, 3, 16, 16))
    before = handle.state_dict()["estimates"]
    with handle:
        model(torch.randn(2, 3, 16, 16))
    between = handle.state_dict()["estimates"]
    with handle:
        model(torch.randn(5, 3, 16, 32))
    after = handle.state_dict()["estimates"]
    assert before.keys() == between.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], between[name])]
    assert 0 < len(changed) < len(before)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    def train(steps, model, optimizer, handle):
        for at in steps:
            generator = torch.Generator().manual_seed(at)
            torch.manual_seed(at)
            with handle:
                loss = model(torch.randn(16, 32, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def new():
        torch.manual_seed(0)
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.5), compress(model, bits=4)

    whole = new()
    train(range(8), *whole)
    first = new()
    train(range(4), *first)
    torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
    second = new()
    for part, state in zip(second, torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    train(range(4, 8), *second)
    assert all(same(p, q) for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True))
    assert second[2].state_dict()["draws"] == whole[2].state_dict()["draws"]
    forgetful = new()
    for part, state in zip(forgetful[:2], torch.load(tmp_path / "state.pt", weights_only=True)[:2], strict=True):
        part.load_state_dict(state)
    train(range(4, 8), *forgetful)
    assert not all(same(p, q) for p, q in zip(whole[0].parameters(), forgetful[0].parameters(), strict=True))


def test_roundings_follow_the_seed_of_torch():
    def gradients(seed):
        model, x = linears(16, 32, 8), torch.ones(20, 16)
        torch.manual_seed(seed)
        with compress(model, bits=2):
            y = model(x)
        y.square().sum().backward()
        return grads_of(model)["1.weight"]

    assert torch.equal(gradients(1), gradients(1))
    assert not torch.equal(gradients(1), gradients(2))


@pytest.mark.parametrize(
    ("options", "warns"),
    [({"min_numel": 10**6}, True), ({}, False), ({"bits": "off"}, False), ({"modules": {"*": "off"}}, True)],
    ids=str,
)
def test_a_pass_in_which_nothing_was_compressed_warns(options, warns, caplog):
    model = linears(16, 32, 8)
    with caplog.at_level(logging.WARNING), compress(model, **options):
        model(torch.randn(20, 16))
    assert any("nothing was compressed" in record.message for record in caplog.records) == warns
    caplog.clear()
    with caplog.at_level(logging.WARNING), compress(model, **options):
        model(torch.randn(20, 16))
    assert not caplog.records  # it was said, of this model
    model = linears(16, 32, 8)
    with caplog.at_level(logging.WARNING), compress(model, **options), torch.no_grad():
        model(torch.randn(20, 16))
    assert not caplog.records  # nothing was saved
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError), compress(model, min_numel=10**6):
        model(model(torch.randn(20, 16)))
    assert not caplog.records


def test_modules_are_named_and_policies_go_by_these_names():
    torch.manual_seed(0)
    model = ViT(fused=False)
    with compress(model, modules={"blocks.0.*": "off", "blocks.*.attn:softmax": 2}) as saved:
        model(torch.randn(4, 3, 16, 16))
    names = {name for name, _ in model.named_modules()} | {"(outside)"}
    assert set(saved.by_module) <= names
    for name, entry in saved.by_module.items():
        if name.startswith("blocks.0.") and name != "blocks.0.attn":
            assert entry.kept == entry.plain
        elif name in ("blocks.1.norm1", "blocks.1.mlp.1", "norm"):
            assert entry.kept < entry.plain / 2
    softmax = saved.by_operator["softmax"]
    assert softmax.kept * 16 == softmax.plain == 2 * 4 * 4 * 16 * 16 * 4


# ---- lifetimes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def payloads():
    return sum(type(x) is Payload for x in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_held_longer_than_backward_needs_it(backward):
    assert payloads() == 0
    model, hidden = mlp(), []

    def remember(_, args, result):
        hidden.append(StorageWeakRef(result.untyped_storage()))

    for layer in model:
        layer.register_forward_hook(remember)
    handle = compress(model)
    with handle as saved:
        y = model(torch.randn(16, 32))
        assert [memory.expired() for memory in hidden[:-1]] == [True] * 6  # all but the result
    assert payloads() > 0
    if backward:
        y.sum().backward()
    del y
    assert payloads() == 0
    alive = weakref.ref(model), weakref.ref(handle)
    del model, handle, layer
    assert [reference() for reference in alive] == [None, None]
    assert saved.bytes_plain


@pytest.mark.usefixtures("no_collector")
def test_a_graph_does_not_hold_the_model():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    handle = compress(model)
    with handle:
        y = model(torch.randn(20, 16))
    alive = weakref.ref(model)
    del model, handle
    assert alive() is None
    y.sum().backward()
    del y
    assert payloads() == 0


@pytest.mark.usefixtures("no_collector")
def test_a_model_may_hold_what_it_computed():
    """No collector sees through a graph: a model that it held would never be freed."""
    model = Heads()
    with compress(model):
        model(torch.randn(3, 10, 32))
    assert model.output.grad_fn is not None
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert payloads() == 0


# ---- ranks -----------------------------------------------------------------------------------------------------------


def train_ddp(rank, world_size, bits):
    torch.manual_seed(0)
    model = DistributedDataParallel(ViT())
    handle = compress(model, bits=bits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for at in range(3):
        torch.manual_seed(10 * at + rank)
        with handle as saved:
            loss = model(torch.randn(4, 3, 16, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    names = sorted(handle.state_dict()["estimates"])
    return torch.cat([p.detach().flatten() for p in model.parameters()]), names, losses, saved.ratio


def test_ddp():
    (plain, _, losses, _), _ = run_ranks(train_ddp, 2, "off")
    (a, names, found, ratio), (b, *_) = run_ranks(train_ddp, 2, 8)
    assert same(a, b)
    assert not same(a, plain)
    torch.testing.assert_close(a, plain, rtol=0, atol=1e-3)
    assert found[0] == losses[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-2, atol=0)
    assert ratio > 2.5
    assert names
    assert not any(name.startswith("module.") for name in names)
    assert any(name.startswith("blocks.0.attn:attention:") for name in names)


def own_seed(_rank, _size, seed):
    model = linears(4, 4)  # sets the seed itself
    torch.manual_seed(seed)
    return compress(model).state_dict()["seed"]


def test_ranks_round_each_in_its_own_way():
    first, second = run_ranks(own_seed, 2, 3)
    assert first != second
    assert run_ranks(own_seed, 2, 3) == [first, second]
