"""EF21 against a float64 derivation of Richtárik, Sokolov & Fatkhullin, algorithm 2, and its transaction to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

import narrowband as nb
from narrowband.collectives import check, choose
from narrowband.errors import UnsupportedError
from narrowband.feedback import EF21
from tests.codecs.common import SPECS, THESE_OR_ALL, bits_of, seeds, tensors

SHAPE = (6, 50)
N = 300
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CONTRACTING = [
    "none",
    "fp16",
    "uniform:bits=4",
    "uniform:bits=8,rounding=stochastic",
    "qsgd:bits=8",
    "sign",
    "topk:density=0.1",
    "topk:density=0.1,select=sampled",
    "topk:density=0.1,scope=sample,values=fp16",
    "threshold:value=0.5",
    "randomk:density=0.1",
    "lowrank:rank=2",
]


def gradient(step, node=0, dtype=torch.float32):
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + node)).to(dtype)


def send(feedback, key, x, codec, seed=0, *, measure=False):
    """One good step of a sender: what is decoded, flat float32, and the norms. ``x`` is used up."""
    finite, payload = feedback.encode(key, x, codec, shape=SHAPE, seed=seed)
    assert finite
    norms = feedback.commit(key, x, codec, payload, shape=SHAPE, seed=seed, measure=measure)
    return codec.decode(payload, torch.empty(SHAPE), seed=seed).reshape(-1), norms


def after_some_steps(codec, steps=3):
    feedback = EF21()
    for step in range(steps):
        feedback.deliver("w", send(feedback, "w", gradient(step), codec, seed=step)[0])
    return feedback


def state(feedback):
    return {key: bits_of(value) for key, value in feedback.state_dict().items()}


# ---- the algorithm ---------------------------------------------------------------------------------------------------


def largest(x, k):
    """C of the paper's experiments: the k elements of largest magnitude, and zeros."""
    kept = torch.zeros_like(x)
    at = x.abs().topk(k).indices
    kept[at] = x[at]
    return kept


@pytest.mark.parametrize("density", [0.02, 0.1, 1.0])
def test_thirty_steps_of_four_nodes_are_the_algorithm(density):
    nodes, codec = 4, nb.codec(f"topk:density={density}")
    senders, receiver = [EF21() for _ in range(nodes)], EF21()
    g = torch.zeros(nodes, N, dtype=torch.float64)
    for step in range(30):
        x = [gradient(step, node) if (step, node) != (7, 2) else torch.zeros(N) for node in range(nodes)]
        for node in range(nodes):
            g[node] += largest(x[node].double() - g[node], codec.kept(N))  # lines 5 and 6
        decoded = [send(senders[node], "w", x[node], codec)[0] for node in range(nodes)]
        delivered = torch.stack(decoded).mean(0)
        receiver.deliver("w", delivered)
        for node in range(nodes):
            torch.testing.assert_close(senders[node].sent_reference("w").double(), g[node], rtol=0, atol=1e-5)
        torch.testing.assert_close(delivered.double(), g.mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", CONTRACTING)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_payload_is_that_of_the_change_and_adds_to_what_was_told(spec, dtype):
    codec, feedback = nb.codec(spec), EF21()
    g = torch.zeros(N)
    for step in range(6):
        x = gradient(step, dtype=dtype)
        expected = codec.encode((x.float() - g).view(SHAPE), seed=step)
        finite, payload = feedback.encode("w", x, codec, shape=SHAPE, seed=step)
        assert finite
        assert torch.equal(payload, expected)
        assert torch.equal(feedback.sent_reference("w"), g), "nothing changes before commit"
        feedback.commit("w", x, codec, payload, shape=SHAPE, seed=step)
        decoded = codec.decode(payload, torch.empty(SHAPE), seed=step).reshape(-1)
        torch.testing.assert_close(
            feedback.sent_reference("w").double(), g.double() + decoded.double(), rtol=0, atol=1e-6
        )
        g = feedback.sent_reference("w").clone()


@pytest.mark.parametrize("spec", SPECS)
def test_one_receiver_holds_to_the_bit_what_the_sender_says_it_told(spec):
    codec, sender, receiver = nb.codec(spec), EF21(), EF21()
    assert sender.sent_reference("w") is None
    for step in range(5):
        x, _ = send(sender, "w", gradient(step), codec, seed=step)
        receiver.deliver("w", x)
        assert bits_of(x) == bits_of(sender.sent_reference("w"))
    assert receiver.sent_reference("w") is None, "it sends nothing"


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision_is_delivered_rounded_and_held_in_float32(dtype):
    receiver, h = EF21(), torch.zeros(N, dtype=torch.float64)
    for step in range(10):
        x = gradient(step, dtype=dtype)
        h += x.double()
        receiver.deliver("w", x)
        assert x.dtype == dtype
        assert torch.equal(x, receiver.state_dict()["shared/w"].to(dtype))
    torch.testing.assert_close(receiver.state_dict()["shared/w"].double(), h, rtol=0, atol=1e-5)


@pytest.mark.parametrize("density", [0.05, 0.3])
def test_a_gradient_that_stays_is_learnt_at_the_rate_of_the_paper(density):
    """‖C(x) − x‖² ≤ (1 − k/d)‖x‖², so after t steps ‖g − x‖² ≤ (1 − k/d)ᵗ‖x‖²; with error feedback it never settles."""
    codec, feedback, x = nb.codec(f"topk:density={density}"), EF21(), gradient(0)
    for step in range(1, 25):
        send(feedback, "w", x.clone(), codec)
        apart = float((feedback.sent_reference("w") - x).double().square().sum())
        assert apart <= (1 - density) ** step * float(x.double().square().sum())


# ---- the transaction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", THESE_OR_ALL)
@settings(max_examples=6)
@given(x=tensors(), seed=seeds)
def test_rollback_undoes_encode_to_the_bit(spec, x, seed):
    codec, feedback = nb.codec(spec), EF21()
    g = x.contiguous().view(-1)
    first = g.clone()
    _, payload = feedback.encode("w", first, codec, shape=x.shape, seed=seed)
    feedback.commit("w", first, codec, payload, shape=x.shape, seed=seed)
    before, again = state(feedback), g.clone()
    finite, _ = feedback.encode("w", again, codec, shape=x.shape, seed=seed + 1)
    assert finite
    feedback.roll_back("w", again)
    assert state(feedback) == before


@pytest.mark.parametrize("spec", ["topk:density=0.05", "qsgd:bits=4", "sign", "randomk:density=0.1", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(spec, dtype, bad):
    codec = nb.codec(spec)
    feedback, undisturbed = after_some_steps(codec), after_some_steps(codec)
    for place in (0, 77, N - 1):
        x = gradient(9, dtype=dtype)
        x[place] = bad
        assert feedback.encode("w", x, codec, shape=SHAPE, seed=9)[0] is False
        feedback.roll_back("w", x)
    assert state(feedback) == state(undisturbed)
    both = [send(one, "w", gradient(10), codec, seed=10)[0] for one in (feedback, undisturbed)]
    assert bits_of(both[0]) == bits_of(both[1])


def test_a_change_that_might_carry_the_sum_out_of_float32_counts_as_not_finite():
    feedback = EF21()
    for value, good in ((1e29, True), (1e31, False), (-1e31, False)):
        assert feedback.encode("w", torch.full((N,), value), nb.codec("sign"), shape=N, seed=0)[0] is good


def test_a_payload_that_overflows_counts_as_not_finite():
    assert not EF21().encode("w", torch.full((N,), 7e4), nb.codec("fp16"), shape=N, seed=0)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_payload_is_taken_in_when_the_step_is_decided_and_not_before(dtype):
    feedback, codec = after_some_steps(nb.codec("topk")), nb.codec("topk")
    before, x = state(feedback), gradient(4, dtype=dtype)
    assert not feedback.can_roll_back(x)
    with pytest.raises(ValueError, match="cannot commit while it encodes"):
        feedback.encode("w", x, codec, shape=SHAPE, seed=0, commit=True)
    assert torch.equal(x, gradient(4, dtype=dtype))
    assert state(feedback) == before


@pytest.mark.parametrize("spec", CONTRACTING)
@pytest.mark.parametrize("dtype", DTYPES)
def test_measure_gives_the_norms_of_the_change_and_of_what_it_lost(spec, dtype):
    codec, feedback = nb.codec(spec), after_some_steps(nb.codec("topk:density=0.3"))
    change = gradient(5, dtype=dtype).double() - feedback.sent_reference("w").double()
    arrived, norms = send(feedback, "w", gradient(5, dtype=dtype), codec, seed=5, measure=True)
    assert norms.encoded == pytest.approx(float(change.square().sum()), rel=1e-5)
    assert norms.lost == pytest.approx(float((change - arrived.double()).square().sum()), rel=1e-4, abs=1e-8)
    same = after_some_steps(nb.codec("topk:density=0.3"))
    assert send(same, "w", gradient(5, dtype=dtype), codec, seed=5)[1] is None
    assert state(same) == state(feedback), "measuring changes nothing"


def test_encode_writes_into_out():
    codec = nb.codec("topk:density=0.05")
    expected = EF21().encode("w", gradient(1), codec, shape=SHAPE, seed=2)[1]
    for offset in (0, 1, 4):
        memory = torch.zeros(codec.payload_nbytes(SHAPE) + offset, dtype=torch.uint8)
        payload = EF21().encode("w", gradient(1), codec, shape=SHAPE, seed=2, out=memory[offset:])[1]
        assert payload.data_ptr() == memory[offset:].data_ptr()
        assert torch.equal(payload, expected)


# ---- state -----------------------------------------------------------------------------------------------------------


def test_there_is_no_residual_and_nothing_moves_elsewhere():
    feedback = after_some_steps(nb.codec("topk"))
    assert feedback.residual("w") is None
    with pytest.raises(TypeError, match="ef21"):
        feedback.take_residual("w")
    with pytest.raises(TypeError, match="ef21"):
        feedback.add_residual("w", torch.zeros(N))


def test_scale_changes_the_unit_of_both_sides():
    feedback = after_some_steps(nb.codec("topk"))
    before = {key: value.clone() for key, value in feedback.state_dict().items()}
    feedback.scale(0.25)
    assert set(before) == {"w", "shared/w"}
    assert all(torch.equal(feedback.state_dict()[key], value * 0.25) for key, value in before.items())
    EF21().scale(2.0)


@pytest.mark.parametrize("spec", CONTRACTING)
def test_a_run_that_is_stopped_and_resumed_goes_on_bit_by_bit(spec):
    codec, resumed = nb.codec(spec), EF21()
    feedback = after_some_steps(codec)
    saved = {key: value.clone() for key, value in feedback.state_dict().items()}
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        arrived = []
        for one in (feedback, resumed):
            x = send(one, "w", gradient(step), codec, seed=step)[0]
            one.deliver("w", x)
            arrived.append(bits_of(x))
        assert arrived[0] == arrived[1]
    assert state(feedback) == state(resumed)
    assert not torch.equal(saved["w"], feedback.sent_reference("w")), "what was loaded is not the state"


def test_loading_replaces_all_state():
    target = after_some_steps(nb.codec("topk"))
    target.load_state_dict({"other": torch.randn(SHAPE).half().t()})
    assert set(target.state_dict()) == {"other"}
    assert target.sent_reference("other").dtype == torch.float32
    assert target.sent_reference("w") is None


def test_merged_states_begin_with_what_all_receivers_held():
    codec = nb.codec("topk:density=0.1")
    nodes = [EF21() for _ in range(3)]
    for step in range(4):
        mean = torch.stack([send(node, "w", gradient(step, i), codec)[0] for i, node in enumerate(nodes)]).mean(0)
        for node in nodes:
            node.deliver("w", mean.clone())
    h = nodes[0].state_dict()["shared/w"]
    merged = EF21.merged([node.state_dict() for node in nodes])
    assert merged.keys() == {"w", "shared/w"}
    assert torch.equal(merged["w"], h)
    assert torch.equal(merged["shared/w"], h)
    assert not torch.equal(nodes[0].sent_reference("w"), h), "which no rank's g was"


@pytest.mark.parametrize("n", [1, N - 1, N + 1])
def test_another_size_is_refused_before_anything_is_written(n):
    feedback = after_some_steps(nb.codec("topk"))
    before, x = state(feedback), torch.ones(n)
    with pytest.raises(ValueError, match=rf"the state of 'w' has {N} elements, got a tensor of {n};"):
        feedback.encode("w", x, nb.codec("topk"), shape=n, seed=0)
    with pytest.raises(ValueError, match=rf"the state of 'w' has {N} elements, got a tensor of {n};"):
        feedback.deliver("w", x)
    assert state(feedback) == before
    assert bool((x == 1).all())


def test_its_spec_and_a_new_one():
    chosen = nb.compression("topk:density=0.05+ef21")
    first = chosen.new_feedback()
    send(first, "w", gradient(0), chosen.codec)
    assert isinstance(first, EF21)
    assert chosen.new_feedback().state_dict() == {}
    assert str(chosen) == "topk:density=0.05+ef21"
    assert (first, hash(first)) == (chosen.feedback, hash(chosen.feedback))
    with pytest.raises(ValueError, match="has a feedback of its own"):
        nb.compression("powersgd:rank=2+ef21")


# ---- how it travels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 10**9])
@pytest.mark.parametrize("size", [2, 64])
def test_auto_never_encodes_sums_again_and_never_rounds_them(nbytes, size):
    ways = {spec: choose(nb.codec(spec), nbytes, size, EF21()).name for spec in SPECS}
    in_float32 = {spec for spec in SPECS if spec.startswith(("none", "randomk"))}
    assert {spec for spec, way in ways.items() if way == "all_reduce"} == in_float32
    assert set(ways.values()) == {"all_reduce", "all_gather"}


@pytest.mark.parametrize("spec", ["none", "fp16", "qsgd:bits=4", "sign", "uniform:bits=4"])
def test_what_would_add_its_own_error_is_refused(spec):
    codec = nb.codec(spec)
    with pytest.raises(UnsupportedError, match=r"encodes sums again, and ef21 .* use 'all_gather'"):
        check(codec, "scatter_reduce", EF21())
    check(codec, "all_gather", EF21())
    if spec == "fp16":
        check(codec, "all_reduce")
        with pytest.raises(UnsupportedError, match="to 16 bits, and ef21"):
            check(codec, "all_reduce", EF21())


def test_means_over_senders_are_refused():
    """Their sum is not the mean of what ranks have added up: what is delivered would settle somewhere else."""
    with pytest.raises(UnsupportedError, match="leave out mean=senders"):
        nb.compression("topk:density=0.05,mean=senders+ef21")
    assert EF21().behind(nb.codec("topk:density=0.05,mean=senders")) is None
    assert nb.compression("topk:density=0.05+ef21").codec.means_add_up
