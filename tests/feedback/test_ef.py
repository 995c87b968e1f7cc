"""Error feedback against a float64 derivation of Karimireddy et al., algorithm 1, and its transaction to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

import narrowband as nb
from narrowband import kernels
from narrowband.codecs.base import squared_norm
from narrowband.feedback import ErrorFeedback
from narrowband.feedback.arrivals import Arrivals
from narrowband.kernels import Shared
from tests.codecs.common import THESE_OR_ALL, backend, bits_of, seeds, tensors

MOST = torch.finfo(torch.float32).max

every_codec = pytest.mark.parametrize(
    "spec",
    [
        "none",
        "fp16",
        "bf16",
        "uniform:bits=2",
        "uniform:bits=4,rounding=stochastic,symmetric=true",
        "qsgd:bits=4,bucket=64",
        "qsgd:bits=8,norm=l2",
        "sign",
        "topk:density=0.05",
        "topk:density=0.05,select=sampled",
        "topk:density=0.05,scope=sample",
        "topk:density=0.1,values=fp16",
        "topk:density=0.1,values=int8,indices=int32",
        "threshold:value=1.5",
        "randomk:density=0.1",
        "lowrank:rank=2",
    ],
)
SHAPE = (6, 50)
N = 300
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def gradient(step, dtype=torch.float32):
    return torch.randn(N, generator=torch.Generator().manual_seed(step)).to(dtype)


def sent_as(codec, dtype):
    """The dtype of what a codec is given: sums are float32, but what is not compressed is sent as it came."""
    return dtype if codec == nb.codec("none") else torch.float32


def send(feedback, key, g, codec, seed=0, shape=SHAPE):
    """One good step: what arrives on the other side, flat float32. ``g`` is used up."""
    finite, payload = feedback.encode(key, g, codec, shape=shape, seed=seed)
    assert finite
    feedback.commit(key, g, codec, payload, shape=shape, seed=seed)
    return codec.decode(payload, torch.empty(shape, dtype=sent_as(codec, g.dtype)), seed=seed).reshape(-1).float()


def after_some_steps(codec, steps=3):
    feedback = ErrorFeedback()
    for step in range(steps):
        send(feedback, "w", gradient(step), codec, seed=step)
    return feedback


@every_codec
def test_absorbing_at_once_is_absorbing_afterwards(spec):
    """The same payload and the same residual to the bit, and as easily undone."""
    codec = nb.codec(spec)
    at_once, afterwards = after_some_steps(codec), after_some_steps(codec)
    before = afterwards.residual("w").clone()
    g, same = gradient(7), gradient(7)
    finite, payload = at_once.encode("w", g, codec, shape=SHAPE, seed=7, commit=True)
    assert finite
    expected = afterwards.encode("w", same, codec, shape=SHAPE, seed=7)[1]
    assert not torch.equal(at_once.residual("w"), afterwards.residual("w"))
    afterwards.commit("w", same, codec, expected, shape=SHAPE, seed=7)
    assert torch.equal(payload, expected)
    assert torch.equal(at_once.residual("w"), afterwards.residual("w"))
    at_once.roll_back("w", g)
    assert torch.equal(at_once.residual("w"), before)


@every_codec
def test_what_is_not_finite_is_not_absorbed(spec):
    codec = nb.codec(spec)
    feedback = after_some_steps(codec)
    before, g = feedback.residual("w").clone(), gradient(7)
    g[5] = torch.inf
    assert not feedback.encode("w", g, codec, shape=SHAPE, seed=7, commit=True)[0]
    feedback.roll_back("w", g)
    assert torch.equal(feedback.residual("w"), before)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision_waits_for_the_step(dtype):
    codec, feedback = nb.codec("topk:density=0.05"), ErrorFeedback()
    with pytest.raises(ValueError, match="only after it is decided"):
        feedback.encode("w", gradient(0, dtype), codec, shape=SHAPE, seed=0, commit=True)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_step_is_the_algorithm(spec, dtype):
    """p = e + g; send C(p); e = p − C(p), followed in float64 with the payloads that were sent."""
    codec, feedback = nb.codec(spec), ErrorFeedback()
    e = torch.zeros(N, dtype=torch.float64)
    for step in range(10):
        g = gradient(step, dtype)
        p = e + g.double()
        finite, payload = feedback.encode("w", g, codec, shape=SHAPE, seed=step)
        assert finite
        # C is applied to p: the same payload as that of p rounded to float32, up to what rounding differently decides
        wire = sent_as(codec, dtype)
        again = codec.roundtrip(p.to(wire).view(SHAPE), seed=step).view(-1)
        sent = codec.decode(payload, torch.empty(SHAPE, dtype=wire), seed=step).view(-1).double()
        assert ((sent - again.double()).abs() > 1e-5).float().mean() <= 0.01
        feedback.commit("w", g, codec, payload, shape=SHAPE, seed=step)
        e = p - sent
        torch.testing.assert_close(feedback.residual("w").double(), e, rtol=0, atol=1e-5)
        e = feedback.residual("w").double()


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_lost_it_is_late(spec, dtype):
    """Over 30 steps: everything sent, plus the residual, is the sum of all gradients."""
    codec, feedback = nb.codec(spec), ErrorFeedback()
    gradients = torch.zeros(N, dtype=torch.float64)
    arrived = torch.zeros(N, dtype=torch.float64)
    for step in range(30):
        g = gradient(step, dtype)
        gradients += g.double()
        arrived += send(feedback, "w", g, codec, seed=step).double()
    residual = feedback.residual("w")
    assert residual.dtype == torch.float32
    assert residual.shape == (N,)
    torch.testing.assert_close(arrived + residual.double(), gradients, rtol=0, atol=1e-4)
    if spec == "none":
        assert float(residual.norm()) < (1e-9 if dtype == torch.float32 else 0.1), (
            "at most what rounding to 16 bits loses"
        )
    elif spec.startswith(("topk", "randomk", "sign")):
        assert float(residual.norm()) > 1.0, "this codec loses much in each step"


@pytest.mark.parametrize("spec", ["none", "topk:density=0.05", "topk:density=0.05,scope=sample", "qsgd:bits=2", "sign"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["ef", "ef-mixed"])
def test_what_waits_decays(spec, dtype, name):
    """p = β·e + g; send C(p); e = p − C(p), followed in float64 with the payloads that were sent."""
    if name == "ef-mixed" and not spec.startswith("topk"):
        spec = spec.replace(spec, "topk:density=0.1,values=fp16")
    codec, feedback = nb.codec(spec), nb.compression(f"topk+{name}:decay=0.75").new_feedback()
    e = torch.zeros(N, dtype=torch.float64)
    for step in range(6):
        g = gradient(step, dtype)
        p = 0.75 * e + g.double()
        if step == 3:  # a step that does not count leaves what was there
            before, lost = bits_of(feedback.residual("w")), gradient(9, dtype)
            feedback.encode("w", lost, codec, shape=SHAPE, seed=9)
            feedback.roll_back("w", lost)
            assert bits_of(feedback.residual("w")) == before
        arrived = send(feedback, "w", g, codec, seed=step)
        e = p - arrived.double()
        torch.testing.assert_close(feedback.residual("w").double(), e, rtol=0, atol=1e-5)
        e = feedback.residual("w").double()


def test_where_a_residual_would_grow_for_ever_a_decay_bounds_it():
    """Two bits of 4,096 elements round to more than they are given: β < 1 forgets as fast as that adds up."""
    codec, norms = nb.codec("qsgd:bits=2,bucket=4096"), {}
    for decay in (1.0, 0.75):
        feedback = ErrorFeedback(decay=decay)
        for step in range(100):
            x = torch.randn(4096, generator=torch.Generator().manual_seed(step))
            send(feedback, "w", x, codec, seed=step, shape=4096)
        norms[decay] = float(feedback.residual("w").norm())
    assert norms[1.0] > 20 * 4096**0.5
    assert norms[0.75] < 6 * 4096**0.5


def test_a_decay_is_part_of_the_configuration():
    decaying = nb.compression("topk:density=0.01+ef:decay=0.95")
    assert str(decaying) == "topk:density=0.01+ef:decay=0.95"
    assert nb.compression(str(decaying)) == decaying != nb.compression("topk:density=0.01+ef")
    assert str(nb.compression("sign+ef:decay=1")) == "sign+ef"
    assert decaying.new_feedback().decay == 0.95
    for value in ("0", "1.01", "nan", "-1"):
        with pytest.raises(ValueError, match=r"ef: decay=.* is not in \(0, 1\]"):
            nb.compression(f"sign+ef:decay={value}")
    with pytest.raises(ValueError, match="has a feedback of its own"):
        nb.compression("powersgd:rank=4+ef:decay=0.5")


@pytest.mark.parametrize("spec", ["topk:density=0.1", "topk:density=0.1,select=sampled", "sign", "randomk:density=0.1"])
def test_the_residual_stays_bounded(spec):
    """A contraction by δ keeps ‖e‖ below 2/δ · ‖g‖ (Karimireddy et al., lemma 3), however long the run."""
    codec, feedback = nb.codec(spec), ErrorFeedback()
    norms = []
    for step in range(200):
        g = gradient(step)
        send(feedback, "w", g, codec, seed=step)
        norms.append(float(feedback.residual("w").norm()))
    assert max(norms) < 2 / 0.1 * (N**0.5 * 1.2)
    assert max(norms[100:]) < 2 * max(norms[50:100])


@pytest.mark.parametrize("spec", THESE_OR_ALL)
@settings(max_examples=6)
@given(x=tensors(), seed=seeds)
def test_rollback_undoes_encode_to_the_bit(spec, x, seed):
    codec, feedback = nb.codec(spec), ErrorFeedback()
    g = x.contiguous().view(-1)
    first = g.clone()
    feedback.encode("w", first, codec, shape=x.shape, seed=seed)
    feedback.roll_back("w", first)
    assert not any(bits_of(feedback.residual("w"))), "there was no residual"
    first = g.clone()
    _, payload = feedback.encode("w", first, codec, shape=x.shape, seed=seed)
    feedback.commit("w", first, codec, payload, shape=x.shape, seed=seed)
    before = bits_of(feedback.residual("w"))
    again = g.clone()
    finite, _ = feedback.encode("w", again, codec, shape=x.shape, seed=seed + 1)
    assert finite
    feedback.roll_back("w", again)
    assert bits_of(feedback.residual("w")) == before


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_gradient_that_is_not_finite_is_reported_and_can_be_rolled_back(spec, dtype, name):
    codec = nb.codec(spec)
    with backend(name):
        feedback = after_some_steps(codec)
        before = bits_of(feedback.residual("w"))
        for place, bad in itertools.product((0, 77, N - 1), (torch.inf, -torch.inf, torch.nan)):
            g = gradient(9, dtype)
            g[place] = bad
            finite, _ = feedback.encode("w", g, codec, shape=SHAPE, seed=9)
            assert finite is False
            feedback.roll_back("w", g)
            assert bits_of(feedback.residual("w")) == before
        arrived = send(feedback, "w", gradient(10), codec, seed=10)
    undisturbed = after_some_steps(codec)
    with backend(name):
        assert bits_of(arrived) == bits_of(send(undisturbed, "w", gradient(10), codec, seed=10))


def test_a_sum_that_overflows_is_reported_although_both_parts_are_finite():
    feedback, codec = ErrorFeedback(), nb.codec("randomk:density=0.01")
    large = torch.full((N,), 3e38)
    finite, payload = feedback.encode("w", large.clone(), codec, shape=SHAPE, seed=0)
    assert finite
    feedback.commit("w", large, codec, payload, shape=SHAPE, seed=0)
    g = torch.full((N,), 3e38)
    before = bits_of(feedback.residual("w"))
    assert not feedback.encode("w", g, codec, shape=SHAPE, seed=1)[0]
    feedback.roll_back("w", g)
    assert bits_of(feedback.residual("w")) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_gradient_is_left_as_it_is(dtype):
    feedback, codec = after_some_steps(nb.codec("topk:density=0.05")), nb.codec("topk:density=0.05")
    g = gradient(4, dtype)
    before, residual = g.clone(), bits_of(feedback.residual("w"))
    _, payload = feedback.encode("w", g, codec, shape=SHAPE, seed=4)
    assert bits_of(feedback.residual("w")) == residual, "nothing changes before commit"
    assert torch.equal(g, before)
    feedback.commit("w", g, codec, payload, shape=SHAPE, seed=4)
    assert torch.equal(g, before)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_measure_gives_the_norms_of_what_was_encoded_and_what_was_lost(spec, dtype):
    codec, feedback = nb.codec(spec), after_some_steps(nb.codec("topk:density=0.05"))
    e, g = feedback.residual("w").double(), gradient(5, dtype)
    p = e + g.double()
    _, payload = feedback.encode("w", g, codec, shape=SHAPE, seed=5)
    norms = feedback.commit("w", g, codec, payload, shape=SHAPE, seed=5, measure=True)
    sent = codec.decode(payload, torch.empty(SHAPE, dtype=sent_as(codec, dtype)), seed=5).view(-1).double()
    assert norms.encoded == pytest.approx(float((p**2).sum()), rel=1e-5)
    assert norms.lost == pytest.approx(float(((p - sent) ** 2).sum()), rel=1e-4, abs=1e-8)
    assert norms.lost == squared_norm(feedback.residual("w"))


def test_without_measure_there_are_no_norms():
    feedback, codec, g = ErrorFeedback(), nb.codec("sign"), gradient(0)
    _, payload = feedback.encode("w", g, codec, shape=SHAPE, seed=0)
    assert feedback.commit("w", g, codec, payload, shape=SHAPE, seed=0) is None


@every_codec
def test_encode_writes_into_out(spec):
    codec = nb.codec(spec)
    expected = ErrorFeedback().encode("w", gradient(1), codec, shape=SHAPE, seed=2)[1]
    for offset in (0, 1, 4):
        memory = torch.zeros(codec.payload_nbytes(SHAPE) + offset, dtype=torch.uint8)
        finite, payload = ErrorFeedback().encode("w", gradient(1), codec, shape=SHAPE, seed=2, out=memory[offset:])
        assert finite
        assert payload.data_ptr() == memory[offset:].data_ptr()
        assert torch.equal(payload, expected)


def test_keys_are_independent():
    codec, both, alone = nb.codec("topk:density=0.05"), ErrorFeedback(), ErrorFeedback()
    for step in range(5):
        send(both, "a", gradient(step), codec)
        send(both, "b", gradient(100 + step)[:77].clone(), codec, shape=77)
        send(alone, "a", gradient(step), codec)
    assert set(both.state_dict()) == {"a", "b"}
    assert torch.equal(both.residual("a"), alone.residual("a"))
    g = gradient(9)
    both.encode("a", g, codec, shape=SHAPE, seed=0)
    before = both.residual("b").clone()
    both.roll_back("a", g)
    assert torch.equal(both.residual("b"), before)
    assert torch.equal(both.residual("a"), alone.residual("a"))


def test_the_residual_is_none_where_nothing_ever_was_and_the_state_itself_otherwise():
    feedback, codec = ErrorFeedback(), nb.codec("topk:density=0.05")
    assert feedback.residual("w") is None
    send(feedback, "w", gradient(0), codec)
    feedback.residual("w").zero_()
    arrived = send(feedback, "w", gradient(1), codec)
    assert torch.equal(arrived, codec.roundtrip(gradient(1)))


def test_scale_changes_the_unit_of_all_the_residual():
    feedback, codec = ErrorFeedback(), nb.codec("topk:density=0.05")
    for key in ("a", "b"):
        send(feedback, key, gradient(len(key)), codec)
    before = {key: value.clone() for key, value in feedback.state_dict().items()}
    feedback.scale(0.25)
    for key, value in before.items():
        assert torch.equal(feedback.residual(key), value * 0.25)
    ErrorFeedback().scale(2.0)  # nothing residual: nothing to do


@every_codec
def test_a_run_that_is_stopped_and_resumed_goes_on_bit_by_bit(spec):
    codec = nb.codec(spec)
    feedback, resumed = after_some_steps(codec), ErrorFeedback()
    resumed.load_state_dict({key: value.clone() for key, value in feedback.state_dict().items()})
    assert bits_of(resumed.residual("w")) == bits_of(feedback.residual("w"))
    for step in range(3, 6):
        arrived = [bits_of(send(one, "w", gradient(step), codec, seed=step)) for one in (feedback, resumed)]
        assert arrived[0] == arrived[1]


def test_loading_replaces_all_state_and_keeps_nothing_of_what_was_given():
    codec = nb.codec("topk:density=0.05")
    source, target = after_some_steps(codec), ErrorFeedback()
    send(target, "other", gradient(0), codec)
    state = source.state_dict()
    target.load_state_dict(state)
    assert set(target.state_dict()) == {"w"}
    assert target.residual("other") is None
    before = target.residual("w").clone()
    send(source, "w", gradient(7), codec)  # changes the tensors in state
    state["w"].fill_(5)
    assert torch.equal(target.residual("w"), before)
    target.residual("w").fill_(3)
    assert (state["w"] == 5).all()


def test_the_state_dict_is_plain_tensors_of_the_state_itself():
    feedback = after_some_steps(nb.codec("topk:density=0.05"))
    state = feedback.state_dict()
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    assert state["w"].data_ptr() == feedback.residual("w").data_ptr()
    state.clear()
    assert feedback.residual("w") is not None, "the dictionary is not"


def test_a_state_saved_in_another_form_is_loaded_as_float32():
    feedback = ErrorFeedback()
    saved = torch.randn(SHAPE).half()
    feedback.load_state_dict({"w": saved.t()})
    assert feedback.residual("w").dtype == torch.float32
    assert torch.equal(feedback.residual("w"), saved.t().reshape(-1).float())
    send(feedback, "w", gradient(0), nb.codec("sign"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [1, N - 1, N + 1])
def test_a_state_of_another_size_is_refused_before_anything_is_written(dtype, residual):
    feedback, g = ErrorFeedback(), gradient(0, dtype)
    feedback.load_state_dict({"w": torch.ones(residual)})
    with pytest.raises(ValueError, match=rf"the residual of 'w' has {residual} elements"):
        feedback.encode("w", g, nb.codec("topk"), shape=SHAPE, seed=0)
    assert torch.equal(g, gradient(0, dtype))
    assert (feedback.residual("w") == 1).all()


def test_new_feedback_has_no_state():
    compression = nb.compression("topk:density=0.05+ef")
    first = compression.new_feedback()
    send(first, "w", gradient(0), compression.codec)
    second = compression.new_feedback()
    assert second is not first
    assert second.state_dict() == {}
    assert second.residual("w") is None
    assert compression.feedback.residual("w") is None
    assert nb.compression("topk").new_feedback() is None
    assert first == second, "configuration is identity, state is not"
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("fp16", 7e4),
        ("uniform:bits=4", 3.3e38),
        ("sign", 3e38),
        ("qsgd:bits=2,norm=l2", 1e38),
        ("qsgd:bits=8", MOST),
        ("uniform:bits=8,symmetric=true", MOST),
        ("topk:density=0.1,values=int8", MOST),
    ],
)
def test_a_payload_that_overflows_counts_as_not_finite(spec, value):
    """Every element is finite, what the codec makes of them is not: absorbing it would poison the residual for good."""
    x = torch.full((256,), value)
    x[::2] *= -1
    feedback = ErrorFeedback()
    for commit in (False, True):
        finite, _ = feedback.encode("w", x.clone(), nb.codec(spec), shape=256, seed=0, commit=commit)
        assert not finite


@pytest.mark.parametrize("method", ["topk:density=0.1,values=int8+ef-mixed", "dgc:density=0.1,values=int8"])
@pytest.mark.parametrize("commit", [False, True])
def test_values_in_8_bits_that_overflow_change_nothing(method, commit):
    """127 steps of 1/127 of the largest float are more than that."""
    compression = nb.compression(method)
    feedback, usual = compression.new_feedback(), torch.randn(256, generator=torch.Generator().manual_seed(0))
    assert feedback.encode("w", usual.clone(), compression.codec, shape=256, seed=0, commit=True)[0]
    before = bits_of(feedback.residual("w"))
    x = usual.clone()
    x[7] = MOST
    finite, _ = feedback.encode("w", x, compression.codec, shape=256, seed=1, commit=commit)
    feedback.roll_back("w", x)
    assert not finite
    assert bits_of(feedback.residual("w")) == before


def test_a_step_of_parameters_that_is_too_large_as_a_gradient_is_not_finite():
    """What waits is a step; divided by its learning rate it may leave float32."""
    compression = nb.compression("dgc:density=0.1,accumulate=steps,momentum=0")
    feedback = compression.new_feedback()
    feedback.set_learning_rates({"w": 1.0})
    x = torch.full((256,), 1e38)
    assert feedback.encode("w", x, compression.codec, shape=256, seed=0, commit=True)[0]
    feedback.set_learning_rates({"w": 0.1})
    assert not feedback.encode("w", torch.zeros(256), compression.codec, shape=256, seed=1, commit=True)[0]


@pytest.mark.parametrize(
    ("method", "arrived"),
    [
        *itertools.product(["topk:density=0.1+ef", "topk:density=0.1+ef-mixed", "dgc:density=0.1"], [False, True]),
        ("uniform:bits=8+ef", False),
        ("none", False),
    ],
)
def test_what_has_waited_leaves_room_for_averages_in_float16(method, arrived):
    """What is sent fits into the gradient's dtype, and what does not fit waits on: nothing is lost."""
    compression = nb.compression(method)
    codec, feedback = compression.codec, compression.new_feedback() or ErrorFeedback()
    if method.startswith("dgc"):
        feedback = nb.compression("dgc:density=0.1,momentum=0").new_feedback()
    state = {"w": torch.linspace(-2e5, 2e5, 100)}
    feedback.load_state_dict({"now/w": state["w"], "before/w": state["w"]} if feedback.name == "dgc" else state)
    x = torch.full((100,), 1000.0, dtype=torch.float16)
    finite, payload = feedback.encode("w", x, codec, shape=(100,), seed=0)
    assert finite
    sent = codec.decode(payload, torch.empty(100, dtype=x.dtype if codec.exact else torch.float32), seed=0).float()
    assert sent.half().isfinite().all()
    assert sent.abs().max() > 65_000
    if arrived:
        at, values = (part[::2] for part in codec.elements(payload, (100,)))
        local, room = torch.empty(1, 20, dtype=torch.int32), torch.empty(1, 20)
        tensor = Shared(100, 0, slice(0, 20), 0)
        kernels.split_shares_all([tensor], [at], [values], local, room)
        feedback.commit_arrived(["w"], [x], Arrivals([tensor], local, room))
        sent = torch.zeros(100).index_add_(0, at, values)
    else:
        feedback.commit("w", x, codec, payload, shape=(100,), seed=0)
    torch.testing.assert_close(sent + feedback.residual("w"), state["w"] + 1000.0, rtol=1e-6, atol=0.1)
    for bad in (torch.inf, torch.nan):
        x[3] = bad
        assert not feedback.encode("w", x, codec, shape=(100,), seed=1)[0]
        feedback.roll_back("w", x)


@pytest.mark.parametrize("name", ["encode", "commit", "can_roll_back", "roll_back"])
def test_a_step_that_a_subclass_changes_is_not_taken_by_others(name):
    """On a GPU loops commit by themselves, which would leave out what the subclass does."""
    codec, own = nb.codec("qsgd:bits=4"), ErrorFeedback()
    assert own.goes_ahead
    assert own.encodes_all(codec)
    changed = type("Changed", (ErrorFeedback,), {name: lambda self, *arguments: False})()  # noqa: ARG005
    assert not changed.goes_ahead
    assert not changed.encodes_all(codec)
    kept = type("Kept", (ErrorFeedback,), {"scale": lambda self, factor: None})()  # noqa: ARG005
    assert kept.goes_ahead, "what is no part of a step changes nothing"
    assert kept.encodes_all(codec)
