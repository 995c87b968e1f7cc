"""What is stored once: tensors that share memory, and memory that is used again."""

from __future__ import annotations

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.activations.helpers import Calls, compress, grads_of, linears
from tests.activations.models import Attention, counting, error


def draws(handle):
    """How many payloads were made."""
    return handle.state_dict()["draws"]


@pytest.mark.parametrize(
    ("function", "payloads"),
    [
        (lambda h: h.tanh() * 0 + h.sinh() + h.cosh() + h.exp() * 0, 2 + 1),  # the results of tanh and exp, and h
        (lambda h: h.sinh() + h.view(-1, 8).sinh().view(h.shape) + h.t().sinh().t() + h[None].cosh()[0], 1),
        (lambda h: h[:, :16].sinh() + h[:, 16:].sinh() + h[:, :16].cosh(), 2),
        (lambda h: h[:10].sinh() + h[:10].cosh() + h[10:].sinh(), 2),
        (lambda h: h.sinh() + h.detach().requires_grad_().cosh(), 1),
        (lambda h: h.sinh() + (h + 0).cosh(), 2),
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
    assert saved.raw_bytes == total[0]
    assert saved.kept_bytes <= payloads * 20 * 32
    y.sum().backward()


def test_queries_keys_and_values_of_one_projection_are_stored_once_each():
    model, x = Attention(), torch.randn(2, 8, 32)
    with compress(model) as saved:
        model(x)
    # q, k, v and the result, which is also the projection's input, at a byte per element; log-sum-exp at four.
    assert saved.by_operator["attention"].kept_bytes == 4 * x.numel() + 2 * 4 * 8 * 4
    assert saved.by_operator["matmul"].kept_bytes == 0


@pytest.mark.parametrize("norm", [False, True])
def test_of_views_that_overlap_all_of_the_memory_is_kept_where_that_is_less_than_their_codes(norm):
    def function(h):  # as attention of each token to those before it
        parts = [h[:, :end] for end in range(1, 33)]
        return sum((F.layer_norm(x, x.shape[1:])[:, ::2] if norm else x.sinh()).mean() for x in parts)

    model, x = Calls(function), torch.randn(64, 32)
    with counting(model, x) as total:
        loss = model(x)
    loss.backward()
    exact = grads_of(model)
    model.zero_grad()
    with compress(model, min_numel=1) as saved:
        loss = model(x)
    loss.backward()
    assert saved.raw_bytes == total[0]
    assert saved.kept_bytes <= (1.5 if norm else 2) * total[0]  # codes until then, and the memory
    assert error(grads_of(model), exact) < 0.02


def test_changed_memory_is_another_tensor():
    model = Calls(lambda h: h)
    handle = compress(model, min_numel=1)

    def function(h):
        first = h.sinh()
        with torch.no_grad():
            h.mul_(100)
        return first, h.sinh()

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
    assert (draws(handle), saved.kept_bytes, saved.raw_bytes) == (payloads, kept, 20 * 32 * 4)
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
    assert saved.raw_bytes == len(addresses) * 20 * 32 * 4


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
    assert saved.raw_bytes == len(hidden) * 20 * 32 * 4
