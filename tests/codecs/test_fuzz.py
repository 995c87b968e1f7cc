"""Whatever bytes arrive: they are decoded, or ``PayloadError`` is raised and the output is as it was.

Nothing is ever written outside the output, on any backend.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from narrowband.errors import PayloadError
from tests.codecs.common import CODECS_AND_BACKENDS, DTYPES, SPARSE, SPECS, backend, bits_of

every_codec = pytest.mark.parametrize("spec", SPECS)
every_codec_and_backend = pytest.mark.parametrize(("spec", "name"), CODECS_AND_BACKENDS)
#: Some whose rows, groups and blocks end early.
SHAPES = [(), (1,), (3,), (64,), (129,), (1000,), (3, 50), (2, 3, 5, 7)]
GUARD = 64


class Guarded:
    """An output between guards: 64 elements on each side, and between elements where it is strided."""

    def __init__(self, shape, dtype, strided):
        n = int(torch.Size(shape).numel())
        self.memory = torch.randn(GUARD + 2 * n + GUARD).to(dtype)
        inside = torch.zeros(self.memory.numel(), dtype=torch.bool)
        where = slice(GUARD, GUARD + 2 * n, 2) if strided else slice(GUARD, GUARD + n)
        inside[where] = True
        self.guards = ~inside
        self.out = self.memory[where].view(shape)
        self.before = self.memory.clone()

    def decode(self, codec, payload, **options):
        """True if it was decoded, False if refused; either way all is well with the memory."""
        try:
            codec.decode(payload, self.out, **options)
        except PayloadError:
            assert bits_of(self.memory) == bits_of(self.before), "the output was changed before the error"
            return False
        assert bits_of(self.memory[self.guards]) == bits_of(self.before[self.guards]), "written outside the output"
        return True


@every_codec_and_backend
@settings(max_examples=6)
@given(data=st.data())
def test_random_bytes(spec, name, data):
    codec, shape, dtype = nb.codec(spec), data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(DTYPES))
    nbytes = codec.payload_nbytes(shape, dtype)
    right = codec.fixed_size and data.draw(st.booleans())
    size = nbytes if right else data.draw(st.integers(0, nbytes + 40))
    payload = torch.randint(256, (size,), dtype=torch.uint8, generator=_generator(data))
    if not codec.fixed_size and size >= 4 and data.draw(st.booleans()):
        # a count that might fit, so that the indices are read, too
        payload[:4] = torch.tensor([data.draw(st.integers(-2, 1002))], dtype=torch.int32).view(torch.uint8)
    guarded = Guarded(shape, dtype, data.draw(st.booleans()))
    with backend(name):
        done = guarded.decode(codec, payload, weight=0.5, accumulate=data.draw(st.booleans()))
    if codec.fixed_size and size != nbytes:
        assert not done
    if not spec.startswith(("topk", "threshold")) and size == nbytes:
        assert done, "every byte string of the right length means something"


@every_codec_and_backend
@settings(max_examples=6)
@given(data=st.data())
def test_flipped_bits(spec, name, data):
    codec, shape, dtype = nb.codec(spec), data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(DTYPES))
    payload = codec.encode(torch.randn(shape, generator=_generator(data)).to(dtype))
    for _ in range(data.draw(st.integers(1, 5))):
        if payload.numel():
            payload[data.draw(st.integers(0, payload.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    guarded = Guarded(shape, dtype, data.draw(st.booleans()))
    with backend(name):
        guarded.decode(codec, payload, weight=-1.0, accumulate=data.draw(st.booleans()))


@pytest.mark.parametrize("spec", [spec for spec in SPARSE if spec.startswith(("topk", "threshold"))])
@settings(max_examples=30)
@given(data=st.data())
def test_backends_refuse_and_read_the_same_bytes(spec, data):
    """Damage in the indices, where one backend might be more patient than the other."""
    codec, shape = nb.codec(spec), data.draw(st.sampled_from(SHAPES))
    payload = codec.encode(torch.randn(shape, generator=_generator(data)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = payload.numel() - 1 - data.draw(st.integers(0, min(payload.numel() - 1, 40)))
        payload[at] ^= 1 << data.draw(st.integers(0, 7))
    results = []
    for name in ("cpu", "reference"):
        guarded = Guarded(shape, torch.float32, strided=False)
        guarded.out.zero_()
        guarded.before = guarded.memory.clone()
        with backend(name):
            results.append(bits_of(guarded.out) if guarded.decode(codec, payload) else None)
    assert results[0] == results[1]


@every_codec_and_backend
def test_every_wrong_length(spec, name):
    codec, shape = nb.codec(spec), (3, 50)
    payload = codec.encode(torch.randn(shape))
    n = payload.numel()
    with backend(name):
        for size in [*range(min(n, 40)), *range(max(n - 9, 0), n), *range(n + 1, n + 9), 2 * n, 10_000]:
            if size != n:
                longer = torch.cat([payload, payload, torch.zeros(10_000, dtype=torch.uint8)])[:size]
                assert not Guarded(shape, torch.float32, strided=False).decode(codec, longer)


@every_codec
def test_a_payload_of_another_shape_is_refused_where_its_size_tells(spec):
    codec = nb.codec(spec)
    payload = codec.encode(torch.full((1000,), 3e30))
    for n in (0, 1, 500, 2000):
        if not codec.fixed_size or codec.payload_nbytes(n) != payload.numel():
            assert not Guarded((n,), torch.float32, strided=False).decode(codec, payload)


@every_codec
def test_what_is_not_a_flat_uint8_tensor_is_no_payload(spec):
    codec = nb.codec(spec)
    payload = codec.encode(torch.randn(40))
    for wrong in (payload.view(torch.int8), payload.view(1, -1), payload.view(-1, 4), payload.float()):
        assert not Guarded((40,), torch.float32, strided=False).decode(codec, wrong)
    with pytest.raises(PayloadError, match="flat uint8"):
        codec.decode(payload.view(2, -1), torch.empty(40))


@every_codec
def test_an_empty_tensor_has_an_empty_payload(spec):
    codec = nb.codec(spec)
    for shape in ((0,), (0, 5), (5, 0), (3, 0, 2)):
        assert codec.payload_nbytes(shape) == 0
        assert codec.encode(torch.empty(shape)).numel() == 0
        codec.decode(torch.empty(0, dtype=torch.uint8), torch.empty(shape))
        with pytest.raises(PayloadError):
            codec.decode(torch.zeros(4, dtype=torch.uint8), torch.empty(shape))


def test_the_error_says_what_was_expected():
    codec = nb.codec("qsgd:bits=4")
    with pytest.raises(
        PayloadError, match=r"expected a payload of 56 bytes for 100 elements of qsgd:bits=4, got 3 bytes"
    ):
        codec.decode(torch.zeros(3, dtype=torch.uint8), torch.empty(10, 10))


def _generator(data):
    return torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
