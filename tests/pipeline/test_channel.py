"""Both ends of a channel in step, for every kind of compression: to the bit, in every dtype, whatever goes through."""

from __future__ import annotations

import pytest
import torch

import narrowband as nb
from narrowband.pipeline import At, Channel, ChannelStats

SHAPE = (4, 3, 50)
SPECS = [
    "none",
    "bf16",
    "uniform:bits=4",
    "qsgd:bits=4",
    "topk:density=0.1",
    "topk:density=0.1,scope=sample,values=fp16",
    "topk:density=0.2+ef",
    "topk:density=0.2,scope=sample+ef-mixed",
    "topk:density=0.2+ef21",
    "uniform:bits=4,rounding=stochastic+ef21",
    "randomk:density=0.1+ef",
    "qsgd:bits=4+aq-sgd",
    "topk:density=0.3+aq-sgd:store=fp16",
    "uniform:bits=2+aq-sgd:store=int8",
]
STATEFUL = [spec for spec in SPECS if "+" in spec]
every = pytest.mark.parametrize("spec", SPECS)
stateful = pytest.mark.parametrize("spec", STATEFUL)
MESSAGES = [At(step, microbatch) for step in range(4) for microbatch in range(2)]


def activation(at, dtype=torch.float32):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(at.step * 10 + at.microbatch)).to(dtype)


def samples_of(at):
    """Two micro-batches an epoch of two steps; the last of an epoch brings a sample that is new."""
    first = (at.step % 2) * 8 + at.microbatch * 4
    ids = torch.arange(first, first + 4)
    return torch.where(ids == 15, 100 + at.step, ids)


def send(here, there, x, at, **options):
    """What arrives, by both accounts, and the payload."""
    known = torch.empty_like(x)
    payload = here.pack(x, at, samples=samples_of(at), arrived=known, **options)
    got = there.unpack(payload, torch.full_like(x, 7.0), at, samples=samples_of(at), **options)
    return known, got, payload


@every
def test_the_relative_error_is_that_of_what_arrives(spec):
    here, there = Channel(spec, seed=3), Channel(spec, seed=3)
    assert here.stats.relative_error is None
    x = activation(MESSAGES[0], torch.float32)
    _, got, _ = send(here, there, x, MESSAGES[0])
    first = here.stats.relative_error
    assert first == pytest.approx(float((x - got).norm() / x.norm()) ** 2, rel=1e-5)
    send(here, there, activation(MESSAGES[1], torch.float32), MESSAGES[1])
    assert here.stats.relative_error == first  # the next is measured 50 messages later
    alone = Channel(spec, seed=3)
    alone.pack(x, MESSAGES[0], samples=samples_of(MESSAGES[0]))  # nobody asked what arrives
    assert alone.stats.relative_error == first
    both = ChannelStats.total([ChannelStats(messages=1, raw_bytes=8, sent_bytes=4), alone.stats])
    assert (both.messages, both.relative_error) == (2, first)
    assert ChannelStats.total([alone.stats, alone.stats]).relative_error == first


def test_the_relative_error_is_measured_again_in_every_fifty_messages():
    channel = Channel("uniform:bits=4")
    for number in range(101):
        channel.pack(torch.zeros(SHAPE) if number == 50 else activation(At(0, number % 10)), At(number, 0))
        if number % 50 == 1:
            channel.stats.relative_error = None
        assert (channel.stats.relative_error is None) == (number not in (0, 100))  # of zeros there is none


@stateful
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_feedback_rounds_no_dtype_silently(spec, dtype):
    channel, x = Channel(spec), activation(MESSAGES[0], torch.float32).to(dtype)
    samples, words = samples_of(MESSAGES[0]), f"takes tensors of float32, float16 or bfloat16, not {dtype}"
    with pytest.raises(TypeError, match=words):
        channel.pack(x, MESSAGES[0], samples=samples)
    with pytest.raises(TypeError, match=words):
        channel.payload_nbytes(SHAPE, dtype, MESSAGES[0], samples=samples)
    payload = Channel(spec).pack(x.float(), MESSAGES[0], samples=samples)
    with pytest.raises(TypeError, match=words):
        channel.unpack(payload, torch.empty_like(x), MESSAGES[0], samples=samples)
    channel.pack(x.float(), MESSAGES[0], samples=samples)  # nothing has changed


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_ends_are_in_step(spec, dtype):
    here, there = Channel(spec, seed=3), Channel(spec, seed=3)
    for at in MESSAGES:
        x = activation(at, dtype)
        before = x.clone()
        expected = here.payload_nbytes(SHAPE, dtype, at, samples=samples_of(at))
        assert there.payload_nbytes(SHAPE, dtype, at, samples=samples_of(at)) == expected
        known, got, payload = send(here, there, x, at)
        assert torch.equal(known, got)
        assert torch.equal(x, before)
        assert payload.dtype == torch.uint8
        assert payload.numel() == expected
    assert here.stats == there.stats
    assert here.stats.messages == len(MESSAGES)
    assert here.stats.raw_bytes == len(MESSAGES) * 600 * dtype.itemsize


@every
def test_channels_last_is_another_layout_and_not_other_values(spec):
    images = torch.randn(4, 3, 5, 10).to(memory_format=torch.channels_last)
    for at in MESSAGES[:3]:
        pairs = Channel(spec), Channel(spec)
        flat = Channel(spec)
        known = torch.empty_like(images)
        payload = pairs[0].pack(images, at, samples=samples_of(at), arrived=known)
        assert torch.equal(payload, flat.pack(images.contiguous(), at, samples=samples_of(at)))
        got = pairs[1].unpack(payload, torch.empty_like(images), at, samples=samples_of(at))
        assert torch.equal(got, known)
        assert got.is_contiguous(memory_format=torch.channels_last)


def test_ef_and_ef21_are_what_the_papers_say():
    ef, ef21 = Channel("topk:density=0.1+ef"), Channel("topk:density=0.1+ef21")
    e = torch.zeros(600, dtype=torch.float64)
    g = torch.zeros(600, dtype=torch.float64)
    for at in MESSAGES:
        x = activation(at)
        arrived = torch.empty_like(x)
        ef.pack(x, at, arrived=arrived)
        p = x.flatten().double() + e
        sent = torch.zeros_like(p).scatter(0, p.abs().topk(60).indices, 1.0) * p
        e = p - sent
        torch.testing.assert_close(arrived.flatten().double(), sent, rtol=1e-5, atol=1e-6)
        ef21.pack(x, at, arrived=arrived)
        d = x.flatten().double() - g
        g = g + torch.zeros_like(d).scatter(0, d.abs().topk(60).indices, 1.0) * d
        torch.testing.assert_close(arrived.flatten().double(), g, rtol=1e-5, atol=1e-6)


def test_what_is_reused_are_the_places():
    spec = "topk:density=0.1,scope=sample,values=fp16"
    forward = [Channel(spec), Channel(spec)]
    back = [Channel(f"{spec},reuse=forward", forward=channel) for channel in forward]
    for at in MESSAGES:
        _, got, payload = send(*forward, activation(at), at)
        gradient = torch.randn(SHAPE)
        # The receiver of the activation is who sends its gradient.
        known, arrived, values = send(back[1], back[0], gradient, at)
        assert torch.equal(known, arrived)
        assert torch.equal(arrived, torch.where(got != 0, gradient.half().float(), 0.0))
        assert values.numel() == 2 * 60 == back[0].payload_nbytes(SHAPE, torch.float32, at)
        assert values.numel() < payload.numel()
    with pytest.raises(nb.UnsupportedError, match="its gradient has been sent already"):
        back[1].pack(gradient, MESSAGES[-1])
    for step in (10, 11):
        send(*forward, activation(At(step, 0)), At(step, 0))
    with pytest.raises(nb.UnsupportedError, match="or a later step has begun"):
        back[1].pack(gradient, At(10, 0))
    assert str(back[0]) == f"{spec},reuse=forward"


@pytest.mark.parametrize("gap", [65_536, 65_537, 150_000])
def test_runs_that_16_bits_cannot_say_are_no_places_to_reuse(gap):
    """A stage makes room for k values, whatever lies between them."""
    forward, back = [], []
    for _ in range(2):
        forward.append(Channel("topk:density=1e-5,indices=runs"))
        back.append(Channel("topk:density=1e-5,reuse=forward", forward=forward[-1]))
    x, at = torch.zeros(1, 200_000), At(0, 0)
    x[0, [3, 3 + gap]] = 1.0
    send(*forward, x, at)
    _, arrived, values = send(back[1], back[0], torch.randn_like(x), at)
    assert values.numel() == back[0].payload_nbytes((1, 200_000), torch.float32, at)
    assert torch.equal(arrived != 0, x != 0)


def test_places_of_a_sampled_selection_may_repeat_and_count_once():
    spec = "topk:density=0.3,select=sampled"
    forward = Channel(spec)
    back = Channel(f"{spec},reuse=forward", forward=forward)
    x = torch.zeros(40, 25)
    x[3] = 1.0  # far less than k elements differ from zero, so the selection has to be filled up
    forward.pack(x, At(0, 0))
    gradient, arrived = torch.randn(40, 25), torch.empty(40, 25)
    back.pack(gradient, At(0, 0), arrived=arrived)
    sent = arrived != 0
    assert torch.equal(arrived[sent], gradient[sent])
    assert sent[3].all()


@stateful
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_arrives_as_that_and_changes_nothing(spec, bad, dtype):
    ends = [Channel(spec), Channel(spec)]
    others = [Channel(spec), Channel(spec)]
    for at in MESSAGES:
        x = activation(at, dtype)
        if at == MESSAGES[5]:
            broken = x.clone()
            broken[2, 1, 7] = bad
            for training in (False, True):
                known, got, _ = send(*ends, broken, at, training=training)
                assert not known.isfinite().all()
                assert torch.equal(known.isfinite(), got.isfinite())
                assert torch.equal(known.nan_to_num(), got.nan_to_num())
            if "aq-sgd" not in spec:
                continue  # the others did not see this message at all
            send(*others, broken, at)
            continue
        assert torch.equal(send(*ends, x, at)[1], send(*others, x, at)[1])


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_seen_where_it_is_not_sent(bad, dtype):
    x = torch.ones(100, dtype=dtype)
    x[:10] = 5.0
    gradient = torch.ones(100, dtype=dtype)
    gradient[50] = bad
    forward = [Channel("topk:density=0.1"), Channel("topk:density=0.1")]
    back = [Channel("topk:density=0.1,values=int8,reuse=forward", forward=channel) for channel in forward]
    send(*forward, x, At(0, 0))
    sampled = [Channel("randomk:density=0.01"), Channel("randomk:density=0.01")]
    for ends in (back[::-1], sampled):
        known, got, _ = send(*ends, gradient, At(0, 0))
        assert not got.isfinite().all()
        assert torch.equal(known.isfinite(), got.isfinite())


@every
def test_evaluation_changes_nothing(spec):
    ends, others = [Channel(spec), Channel(spec)], [Channel(spec), Channel(spec)]
    for at in MESSAGES:
        x = activation(at)
        assert torch.equal(send(*ends, x, at)[1], send(*others, x, at)[1])
        for shape in (SHAPE, (7, 3, 50)):  # the second is a shape that no buffer has
            y = torch.randn(shape)
            payload = ends[0].pack(y, at, training=False, arrived=(known := torch.empty_like(y)))
            assert payload.numel() == ends[1].payload_nbytes(shape, y.dtype, at, training=False)
            assert torch.equal(ends[1].unpack(payload, torch.empty_like(y), at, training=False), known)


@every
def test_warm_up_is_exact(spec):
    here, there = (Channel(spec, warmup_steps=2) for _ in range(2))
    for at in MESSAGES:
        x = activation(at)
        known, got, payload = send(here, there, x, at)
        assert torch.equal(known, got)
        if at.step < 2:
            assert torch.equal(got, x)
            digest = 8 if "aq-sgd" in spec else 0
            sizes = payload.numel(), here.payload_nbytes(SHAPE, x.dtype, at, samples=samples_of(at))
            assert sizes == (4 * x.numel() + digest,) * 2
        sizes = [end.payload_nbytes(SHAPE, x.dtype, at, training=False) for end in (here, Channel(spec))]
        assert here.pack(x, at, training=False).numel() == sizes[0] == sizes[1]  # evaluation has no warm-up


@stateful
def test_a_channel_goes_on_from_its_state_to_the_bit(spec):
    ends = [Channel(spec), Channel(spec)]
    for at in MESSAGES[:5]:
        send(*ends, activation(at), at)
    resumed = []
    for end in ends:
        resumed.append(Channel(spec))
        resumed[-1].load_state_dict(nb_copy(end.state_dict()))
        with pytest.raises(nb.UnsupportedError, match="in one order"):
            resumed[-1].pack(activation(MESSAGES[4]), MESSAGES[4], samples=samples_of(MESSAGES[4]))
    for at in MESSAGES[5:]:
        x = activation(at)
        expected, got = send(*ends, x, at), send(*resumed, x, at)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    with pytest.raises(ValueError, match="of a channel with spec"):
        Channel("sign+ef").load_state_dict(ends[0].state_dict())


def nb_copy(state):
    """As it would come from a file."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: nb_copy(value) for key, value in state.items()}
    return state


@stateful
def test_out_of_order(spec):
    channel = Channel(spec)
    x = activation(MESSAGES[0])
    channel.pack(x, At(0, 1), samples=samples_of(At(0, 0)))
    channel.pack(x, At(0, 0), training=False)  # evaluation has no order
    for late in (At(0, 0), At(0, 1)):
        with pytest.raises(nb.UnsupportedError, match="in one order"):
            channel.pack(x, late, samples=samples_of(At(0, 0)))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("powersgd:rank=2", nb.UnsupportedError, "for gradients of data parallelism"),
        ("dgc:density=0.01", nb.UnsupportedError, "for gradients of data parallelism"),
        ("threshold:value=1", nb.UnsupportedError, "length of its payloads"),
        ("topk:density=0.1,reuse=backward", ValueError, "only reuse=forward"),
        ("qsgd:bits=4,reuse=forward", nb.UnsupportedError, "only topk"),
        ("topk:density=0.1,reuse=forward", nb.UnsupportedError, "only in the backward spec"),
        ("topp:density=0.1", ValueError, "did you mean 'topk'"),
    ],
)
def test_specs_that_cannot_be(spec, error, message):
    with pytest.raises(error, match=message):
        Channel(spec)


@pytest.mark.parametrize(
    ("forward", "backward", "error", "message"),
    [
        ("qsgd:bits=4", "topk:density=0.1,reuse=forward", nb.UnsupportedError, "use topk without aq-sgd"),
        (
            "topk:density=0.1+aq-sgd",
            "topk:density=0.1,reuse=forward",
            nb.UnsupportedError,
            "use topk without aq-sgd",
        ),
        (
            "topk:density=0.1",
            "topk:density=0.1,reuse=forward+ef",
            nb.UnsupportedError,
            "cannot be combined",
        ),
        (
            "topk:density=0.1",
            "topk:density=0.2,reuse=forward",
            ValueError,
            "density=0.1, got density=0.2",
        ),
    ],
)
def test_what_cannot_be_reused(forward, backward, error, message):
    with pytest.raises(error, match=message):
        Channel(backward, forward=Channel(forward))


def test_a_payload_of_another_length():
    channel = Channel("qsgd:bits=4")
    with pytest.raises(nb.PayloadError):
        channel.unpack(torch.zeros(3, dtype=torch.uint8), torch.empty(SHAPE), At(0, 0))


@every
def test_a_damaged_payload_leaves_no_trace(spec):
    """A good copy after it is taken as if the damaged one had never come."""
    here, there = Channel(spec, seed=3), Channel(spec, seed=3)
    for at in MESSAGES:
        x = activation(at)
        payload = here.pack(x, at, samples=samples_of(at), arrived=(known := torch.empty_like(x)))
        damaged = [payload[:-4]]
        if spec.startswith("topk") and "aq-sgd" not in spec:
            damaged.append(payload.clone())
            damaged[-1][-(payload.numel() // 4) :] = 255  # indices that lead out of the tensor
        before = str((there.state_dict(), there.stats))
        for broken in damaged:
            with pytest.raises(nb.PayloadError):
                there.unpack(broken, torch.empty_like(x), at, samples=samples_of(at))
        assert str((there.state_dict(), there.stats)) == before
        assert torch.equal(there.unpack(payload, torch.empty_like(x), at, samples=samples_of(at)), known)


def test_a_damaged_payload_takes_no_places():
    spec = "topk:density=0.1"
    forward = [Channel(spec), Channel(spec)]
    back = [Channel(f"{spec},reuse=forward", forward=channel) for channel in forward]
    at, gradient = At(0, 0), activation(At(0, 1))
    send(*forward, activation(at), at)
    values = back[1].pack(gradient, at, arrived=(known := torch.empty_like(gradient)))
    with pytest.raises(nb.PayloadError):
        back[0].unpack(values[:-4], torch.empty_like(gradient), at)
    assert torch.equal(back[0].unpack(values, torch.empty_like(gradient), at), known)


def test_samples_are_needed():
    channel, other, at = Channel("qsgd:bits=4+aq-sgd"), Channel("qsgd:bits=4+aq-sgd"), At(0, 0)
    x = activation(at)
    with pytest.raises(ValueError, match=r"set \.samples"):
        channel.pack(x, at)
    assert channel.stats == other.stats
    assert torch.equal(channel.pack(x, at, samples=samples_of(at)), other.pack(x, at, samples=samples_of(at)))
