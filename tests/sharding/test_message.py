"""Messages between ranks that share a model: at once, as for a GPU, or one payload after the other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import narrowband as nb
from narrowband.collectives import exchange
from narrowband.sharding import exchange as exchanges
from narrowband.sharding.exchange import DIFFERENCES, WHOLE, ParameterExchange
from narrowband.sharding.message import Message

#: Whether what lies there is compressed; and how many elements.
PARTS = [(False, 24), (True, 3000), (True, 640), (False, 10), (True, 130)]


def layout() -> SimpleNamespace:
    ends = torch.tensor([0, *(numel for _, numel in PARTS)]).cumsum(0).tolist()
    spans = [slice(*pair) for pair in itertools.pairwise(ends)]
    return SimpleNamespace(spans=lambda: zip(spans, [compressed for compressed, _ in PARTS], strict=True))


def all_ways(spec, dtype, minus):
    message = Message(layout(), nb.codec(spec), dtype)
    torch.manual_seed(0)
    part, before, total = (torch.randn(sum(numel for _, numel in PARTS)) for _ in range(3))
    part, before = part.to(dtype), before.to(dtype)
    part[700] = torch.inf
    out = torch.zeros(message.nbytes, dtype=torch.uint8)
    message.write(part, out, minus=before if minus else None, seed=5)
    read = torch.zeros_like(part)
    message.read(read, out)
    message.update(before, out)
    message.add_to(total, out, 1 / 3)
    return out, read, before, total


@pytest.mark.parametrize("minus", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["uniform:bits=4", "qsgd:bits=8", "fp16"])
def test_both_ways_give_the_same_bits(spec, dtype, minus, monkeypatch):
    own = all_ways(spec, dtype, minus)
    monkeypatch.setattr(exchange, "ASYNCHRONOUS", {"cpu"})
    calls = []
    codec = type(nb.codec(spec))
    for name in ("encode_all", "decode_means"):
        plain = getattr(codec, name)
        monkeypatch.setattr(codec, name, lambda self, *a, p=plain, n=name, **k: (calls.append(n), p(self, *a, **k))[1])
    theirs = all_ways(spec, dtype, minus)
    several = codec is not type(nb.codec("fp16"))
    assert calls == (["encode_all"] + 3 * ["decode_means"] if several else [])
    for mine, other in zip(own, theirs, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert own[1].isnan().any() == (spec != "fp16")


def test_how_far_shards_have_changed_is_asked_for_all_of_them_at_once(monkeypatch):
    shards = [(SimpleNamespace(at=100 * i, compressed=True), torch.randn(100)) for i in range(9)]
    asked = []
    parameters = ParameterExchange(
        SimpleNamespace(own=lambda: shards),
        nb.codec("uniform:bits=8"),
        0,
        None,
        exchanges.Common(),
        None,
        referenced=True,
    )
    assert parameters.look(0) == WHOLE
    parameters.reference = torch.cat([own for _, own in shards])[None]
    plain = exchanges.squared_norms
    monkeypatch.setattr(exchanges, "squared_norms", lambda xs: (asked.append(1), plain(xs))[1])
    shards[4][1][7] += 0.01
    assert parameters.look(0) == DIFFERENCES
    assert len(asked) == 2  # for the differences and for the parameters
    shards[4][1][:] = torch.nan
    assert parameters.look(0) == WHOLE
