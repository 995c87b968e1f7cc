"""Mixed error feedback against a derivation of Rudakov et al., and its transaction to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from narrowband.errors import UnsupportedError
from narrowband.feedback import ErrorFeedback, MixedFeedback
from tests.codecs.common import SPECS, bits_of, seeds, tensors
from tests.thorough import thorough

SHAPE = (6, 50)
N = 300
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOPK = [
    "topk:density=0.05",
    "topk:density=0.05,select=sampled",
    "topk:density=0.1,scope=sample",
    "topk:density=0.1,select=sampled,scope=sample,values=fp16,indices=int32",
    "topk:density=0.1,values=fp16",
    "topk:density=0.2,values=int8,indices=runs",
    "topk:density=0.003",
    "topk:density=1.0",
]
every_topk = pytest.mark.parametrize("spec", TOPK)


def gradient(step, dtype=torch.float32):
    return torch.randn(N, generator=torch.Generator().manual_seed(step)).to(dtype)


def send(feedback, x, codec, seed=0, shape=SHAPE, **options):
    """One good step: what arrives, flat float32, and the norms. ``x`` is used up."""
    finite, payload = feedback.encode("w", x, codec, shape=shape, seed=seed)
    assert finite
    norms = feedback.commit("w", x, codec, payload, shape=shape, seed=seed, **options)
    return codec.decode(payload, torch.empty(shape), seed=seed).reshape(-1), norms


def after_some_steps(codec, steps=3, sends="sum"):
    feedback = MixedFeedback(sends=sends)
    for step in range(steps):
        send(feedback, gradient(step), codec, seed=step)
    return feedback


# ---- the algorithm ---------------------------------------------------------------------------------------------------


def places(x, k):
    """Of the k largest; those of a half-precision tensor may be equal, and then the first count."""
    return set(x.abs().argsort(descending=True, stable=True)[:k].tolist())


@pytest.mark.parametrize("k", [1, 2, 7, 30])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sends", ["sum", "parts"])
def test_each_step_is_the_algorithm(k, rows, dtype, sends):
    """A: ⌈k/2⌉ by |x|, B: ⌊k/2⌋ by |e|. Sent is p = x + e at A ∪ B, or x at A plus e at B; the rest is residual. By
    rows, in float64.
    """
    width = N // rows
    codec = nb.codec(f"topk:density={k / width},scope={'sample' if rows > 1 else 'tensor'}")
    assert codec.kept(SHAPE) == k * rows
    feedback, e = MixedFeedback(sends=sends), torch.zeros(rows, width, dtype=torch.float64)
    overlapping = 0
    for step in range(20):
        x = (gradient(step) ** 3).to(dtype)
        x_RW = x.view(rows, width).double()
        expected = torch.zeros(rows, width, dtype=torch.float64)
        for r in range(rows):
            by_input, by_residual = places(x_RW[r], -(-k // 2) if step else k), places(e[r], k // 2 if step else 0)
            overlapping += len(by_input | by_residual) < k
            for chosen, own in ((by_input, x_RW[r]), (by_residual, e[r])):
                at = sorted(chosen if sends == "parts" else by_input | by_residual)
                expected[r, at] += own[at]
        e = e + x_RW - expected
        arrived, _ = send(feedback, x, codec)
        torch.testing.assert_close(arrived.view(rows, width).double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(feedback.residual("w").view(rows, width).double(), e, rtol=0, atol=1e-5)
    assert overlapping or k < 7, "A and B had places in common now and then"


def test_parts_are_the_sum_of_two_compressed_tensors():
    """C(x) + C(e), as the paper's words are: of a C that keeps half of the elements. And e' = x + e − (C(x) + C(e))."""
    whole, half = nb.codec(f"topk:density={20 / N}"), nb.codec(f"topk:density={10 / N}")
    feedback = after_some_steps(whole, sends="parts")
    for step in range(3, 10):
        x, e = gradient(step), feedback.residual("w").clone()
        expected = half.roundtrip(x) + half.roundtrip(e)
        arrived, _ = send(feedback, x.clone(), whole, seed=step)
        assert torch.equal(arrived, expected)
        torch.testing.assert_close(feedback.residual("w"), x + e - expected, rtol=0, atol=1e-6)
        sum_of = send(after_loading(e), x.clone(), whole, seed=step)[0]
        assert torch.equal(sum_of != 0, expected != 0), "the same places"
        assert not torch.equal(sum_of, expected)


def after_loading(residual):
    feedback = MixedFeedback()
    feedback.add_residual("w", residual.clone())
    return feedback


def test_half_is_chosen_by_the_input_and_half_by_the_residual():
    """The residual outweighs the input everywhere: with plain error feedback, nothing of the input would be chosen."""
    x, e = torch.zeros(N), torch.arange(1.0, N + 1) * 1000
    x[:10] = torch.arange(1.0, 11)  # where the residual is smallest
    codec, sent = nb.codec(f"topk:density={20 / N}"), {}
    for kind in (ErrorFeedback, MixedFeedback):
        feedback = kind()
        feedback.add_residual("w", e.clone())
        sent[kind.name] = send(feedback, x.clone(), codec)[0].nonzero().view(-1).tolist()
    assert sent["ef"] == list(range(N - 20, N))
    assert sent["ef-mixed"] == [*range(10), *range(N - 10, N)]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.startswith("topk") and nb.codec(spec).takes_any])
@settings(max_examples=6)
@given(xs=st.lists(tensors(["odd", "matrix", "tensor", "seven", "one", "empty"]), min_size=3, max_size=3), seed=seeds)
def test_what_was_sent_and_the_residual_is_what_was_given(spec, xs, seed):
    """To the bit where values are float32: an element is sent whole, or residual whole. At most k places are sent."""
    codec, feedback = nb.codec(spec), MixedFeedback()
    shape = xs[0].shape
    for step, other in enumerate(xs):
        x = other.contiguous().view(-1)
        x = torch.nn.functional.pad(x, (0, max(0, shape.numel() - x.numel())))[: shape.numel()].clone()
        residual = feedback.residual("w")
        total = x.float().clone() if residual is None else residual + x.float()
        arrived, _ = send(feedback, x, codec, seed=seed, shape=shape)
        assert int((arrived != 0).sum()) <= codec.kept(shape)
        left = feedback.residual("w")
        if codec.values == "fp32":
            assert torch.equal(torch.where(arrived != 0, arrived, left), total), step
            assert not bool(left[arrived != 0].any())
        else:
            torch.testing.assert_close(arrived + left, total, rtol=1e-6, atol=1e-6)


@every_topk
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sends", ["sum", "parts"])
def test_nothing_is_lost_it_is_late(spec, dtype, sends):
    codec, feedback = nb.codec(spec), MixedFeedback(sends=sends)
    given_, arrived = (torch.zeros(N, dtype=torch.float64) for _ in range(2))
    for step in range(30):
        given_ += gradient(step, dtype).double()
        arrived += send(feedback, gradient(step, dtype), codec, seed=step)[0].double()
    torch.testing.assert_close(arrived + feedback.residual("w").double(), given_, rtol=0, atol=1e-4)


def test_where_all_is_kept_all_is_sent():
    codec, feedback = nb.codec("topk:density=1.0"), MixedFeedback()
    for step in range(4):
        assert torch.equal(send(feedback, gradient(step), codec)[0], gradient(step))
        assert not feedback.residual("w").any()


def test_a_message_that_is_not_compressed_carries_all_the_residual():
    feedback = after_some_steps(nb.codec("topk:density=0.05"))
    expected = feedback.residual("w") + gradient(5)
    assert torch.equal(send(feedback, gradient(5), nb.codec("none"))[0], expected)
    assert not feedback.residual("w").any()


# ---- the transaction -------------------------------------------------------------------------------------------------


@every_topk
@pytest.mark.parametrize("sends", ["sum", "parts"])
def test_absorbing_at_once_is_absorbing_afterwards(spec, sends):
    codec = nb.codec(spec)
    at_once, afterwards = after_some_steps(codec, sends=sends), after_some_steps(codec, sends=sends)
    before, g, same = afterwards.residual("w").clone(), gradient(7), gradient(7)
    finite, payload = at_once.encode("w", g, codec, shape=SHAPE, seed=7, commit=True)
    assert finite
    expected = afterwards.encode("w", same, codec, shape=SHAPE, seed=7)[1]
    afterwards.commit("w", same, codec, expected, shape=SHAPE, seed=7)
    assert torch.equal(payload, expected)
    assert torch.equal(at_once.residual("w"), afterwards.residual("w"))
    at_once.roll_back("w", g)
    assert bits_of(at_once.residual("w")) == bits_of(before)


@every_topk
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, math.nan, *thorough(math.inf, -math.inf)])
def test_rollback_undoes_encode_to_the_bit(spec, dtype, bad):
    codec = nb.codec(spec)
    feedback, undisturbed = after_some_steps(codec), after_some_steps(codec)
    before = bits_of(feedback.residual("w"))
    for place in (0, 77, N - 1):
        x = gradient(9, dtype)
        if bad is not None:
            x[place] = bad
        early = bad is None and feedback.can_roll_back(x)
        assert feedback.encode("w", x, codec, shape=SHAPE, seed=9, commit=early)[0] == (bad is None)
        feedback.roll_back("w", x)
        assert bits_of(feedback.residual("w")) == before
    both = [send(one, gradient(10, dtype), codec, seed=10)[0] for one in (feedback, undisturbed)]
    assert bits_of(both[0]) == bits_of(both[1])


def test_a_first_message_that_was_undone_is_first_again():
    codec, feedback, x = nb.codec("topk:density=0.05"), MixedFeedback(), gradient(0)
    feedback.encode("w", x, codec, shape=SHAPE, seed=0)
    feedback.roll_back("w", x)
    assert torch.equal(send(feedback, gradient(1), codec)[0], codec.roundtrip(gradient(1)))


def test_a_wrong_place_for_the_payload_is_refused_before_anything_changes():
    codec = nb.codec("topk:density=0.05")
    feedback, x = after_some_steps(codec), gradient(4)
    before = bits_of(feedback.residual("w"))
    with pytest.raises(ValueError, match="out has 3 bytes"):
        feedback.encode("w", x, codec, shape=SHAPE, seed=0, out=torch.empty(3, dtype=torch.uint8))
    assert bits_of(feedback.residual("w")) == before
    assert torch.equal(x, gradient(4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_measure_gives_the_norms_of_the_sum_and_of_the_residual(dtype):
    codec = nb.codec("topk:density=0.1")
    feedback = after_some_steps(codec)
    p = feedback.residual("w").double() + gradient(5, dtype).double()
    _, norms = send(feedback, gradient(5, dtype), codec, measure=True)
    assert norms.encoded == pytest.approx(float(p.square().sum()), rel=1e-5)
    assert norms.lost == pytest.approx(float(feedback.residual("w").double().square().sum()), rel=1e-5)


def test_the_residual_moves_from_one_to_the_other():
    plain, mixed = ErrorFeedback(), after_some_steps(nb.codec("topk:density=0.05"))
    residual = mixed.residual("w").clone()
    plain.add_residual("w", mixed.take_residual("w"))
    assert torch.equal(plain.residual("w"), residual)
    assert mixed.residual("w") is None
    resumed = MixedFeedback()
    resumed.load_state_dict(plain.state_dict())
    assert torch.equal(resumed.residual("w"), residual)


# ---- the spec --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("topk")])
def test_it_stands_behind_topk_only(spec):
    with pytest.raises(UnsupportedError, match=r"write '.*\+ef' or 'topk:density=0\.01\+ef-mixed'"):
        nb.compression(f"{spec}+ef-mixed")
    with pytest.raises(UnsupportedError, match="'topk' does"):
        nb.Compression(nb.codec(spec), MixedFeedback())


@pytest.mark.parametrize("method", ["powersgd:rank=2", "dgc:density=0.01"])
def test_methods_have_their_own(method):
    with pytest.raises(ValueError, match="has a feedback of its own"):
        nb.compression(f"{method}+ef-mixed")


@every_topk
def test_a_spec_is_its_string(spec):
    chosen = nb.compression(f"{spec}+ef-mixed")
    assert isinstance(chosen.feedback, MixedFeedback)
    assert str(chosen) == f"{spec}+ef-mixed"
    assert nb.compression(str(chosen)) == chosen
    assert chosen != nb.compression(f"{spec}+ef")
    parts = nb.compression(f"{spec}+ef-mixed:sends=parts")
    assert parts.feedback.sends == "parts" != chosen.feedback.sends
    assert str(parts) == f"{spec}+ef-mixed:sends=parts"
    assert parts != chosen
    with pytest.raises(ValueError, match="sends is one of: sum, parts"):
        nb.compression(f"{spec}+ef-mixed:sends=half")
    assert chosen.new_feedback().state_dict() == {}
