"""Deep Gradient Compression in one process: its transaction, its schedule, its spec. Its equations: tests/gradients."""

from __future__ import annotations

import gc
import math
import weakref
from importlib.util import find_spec

import pytest
import torch

import narrowband as nb
from narrowband.codecs import BF16, Identity, TopK
from narrowband.feedback import Compression
from narrowband.feedback.dgc import DGC
from narrowband.feedback.kept import Kept
from narrowband.kernels import Findings, backends
from narrowband.kernels.backends import Backend

SHAPE = (20, 30)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KEYS = [
    "",
    ",nesterov=true",
    ",masking=false",
    ",nesterov=true,masking=false",
    ",indices=runs",
    ",momentum=0",
    ",values=int8,masking=false",
    ",nesterov=true,select=sampled,values=fp16",
]


def gradient(step, dtype=torch.float32):
    return torch.randn(600, generator=torch.Generator().manual_seed(step)).to(dtype)


def send(method, step, codec=None, *, dtype=torch.float32, commit=False, measure=False):
    """One good step: what arrives, and the norms."""
    x, codec = gradient(step, dtype), codec or method.codec
    finite, payload = method.encode("w", x, codec, shape=SHAPE, seed=step, commit=commit)
    assert finite
    norms = None if commit else method.commit("w", x, codec, payload, shape=SHAPE, seed=step, measure=measure)
    return codec.decode(payload, torch.empty(SHAPE)).reshape(-1), norms


def state(method):
    return {key: value.clone() for key, value in method.state_dict().items()}


def method(keys=""):
    return nb.compression(f"dgc:density=0.05{keys}").new_feedback()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [None, Identity()])
@pytest.mark.parametrize("moment", ["encoded", "committed early", "committed late", "not finite"])
def test_a_rollback_undoes_a_step_to_the_bit(keys, dtype, codec, moment):
    dgc = method(keys)
    for step in range(5):
        send(dgc, step)
    before, x = state(dgc), gradient(5, dtype)
    if moment == "not finite":
        x[7] = math.nan
    early = moment == "committed early" and dgc.can_roll_back(x)
    codec = codec or dgc.codec
    finite, payload = dgc.encode("w", x, codec, shape=SHAPE, seed=5, commit=early)
    assert finite == (moment != "not finite")
    if moment == "committed late" and dgc.can_roll_back(x):
        dgc.commit("w", x, codec, payload, shape=SHAPE, seed=5)
        assert not same(before, state(dgc))
    dgc.roll_back("w", x)
    assert same(before, state(dgc))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("keys", ["", ",nesterov=true,masking=false,values=fp16"])
def test_a_step_that_goes_on_although_it_is_not_finite_is_undone_to_the_bit(keys, monkeypatch):
    """As on a GPU, whose answer the host does not wait for."""
    monkeypatch.setattr(backends, "_chosen", {"cpu": Backend("narrowband.kernels.cuda")})
    dgc = method(keys)
    for step in range(2):
        send(dgc, step, commit=True)
    before, x, findings = state(dgc), gradient(2), Findings(torch.device("cpu"))
    x[7] = math.inf
    assert dgc.answers_late
    with findings.noting(Findings.OWN):
        assert dgc.encode("w", x, dgc.codec, shape=SHAPE, seed=2, commit=True)[0]
    assert findings.places.tolist() == [1, 0, 0]
    dgc.roll_back("w", x)
    assert same(before, state(dgc))


@pytest.mark.parametrize("keys", KEYS)
def test_absorbing_early_or_late_is_the_same(keys):
    early, late = method(keys), method(keys)
    for step in range(8):
        a, _ = send(early, step, commit=True)
        b, norms = send(late, step, measure=True)
        assert torch.equal(a, b)
        assert same(state(early), state(late))
        now, before = (late.state_dict()[f"{room}/w"] for room in ("now", "before"))
        residual = now + (now - before) * late.momentum * late.nesterov
        assert norms.lost == pytest.approx(float(residual.double().square().sum()))
        assert norms.encoded == pytest.approx(float((b.double() + residual.double()).square().sum()))


def test_half_precision_sends_what_its_float32_would():
    for dtype in DTYPES[1:]:
        half, whole = method(), method()
        for step in range(6):
            a, _ = send(half, step, dtype=dtype)
            x = gradient(step, dtype).float()
            _, payload = whole.encode("w", x, whole.codec, shape=SHAPE, seed=step, commit=True)
            assert torch.equal(a, whole.codec.decode(payload, torch.empty(SHAPE)).reshape(-1))
        assert same(state(half), state(whole))


@pytest.mark.parametrize("keys", ["", ",values=fp16", ",values=int8", ",indices=runs,values=fp16", ",select=sampled"])
def test_what_was_sent_early_or_late_adds_up(keys):
    """With momentum 0, all that went out and the residual make the sum of all gradients: rounding, too, is late."""
    dgc = method(f",momentum=0{keys}")
    sent = sum(send(dgc, step)[0].double() for step in range(30))
    total = sum(gradient(step).double() for step in range(30))
    torch.testing.assert_close(sent + dgc.residual("w"), total, rtol=0, atol=1e-5)
    if keys.endswith(("fp16", "int8")):  # where something was sent at last, what rounding has left
        rounded = dgc.residual("w")[send(dgc, 30)[0] != 0]
        assert 0 < float(rounded.abs().max()) < (0.1 if "int8" in keys else 0.01)


def test_a_velocity_goes_on_as_if_nothing_had_been_rounded():
    """Momentum and masking are of what was sent, and not of how it was written."""
    for keys in (",masking=false", ",masking=false,nesterov=true", ""):
        rounded, whole = method(f"{keys},values=int8"), method(keys)
        for step in range(6):
            send(rounded, step)
            x = gradient(step)
            _, payload = whole.encode("w", x, whole.codec, shape=SHAPE, seed=step)
            whole.commit("w", x, whole.codec, payload, shape=SHAPE, seed=step)
            u, v = (
                [one[f"{room}/w"] for room in ("now", "before")] for one in (rounded.state_dict(), whole.state_dict())
            )
            torch.testing.assert_close(u[0] - u[1], v[0] - v[1], rtol=0, atol=1e-5)
            for state, other in zip(u, v, strict=True):  # so that both choose the same elements in the next step
                state.copy_(other)


def test_a_sampled_choice_sends_large_elements_and_no_more_than_it_may():
    n, k, dgc = 200_000, 200, nb.compression("dgc:density=0.001,momentum=0,select=sampled").new_feedback()
    counts, residual = [], torch.zeros(n)
    for step in range(12):
        x = torch.randn(n, generator=torch.Generator().manual_seed(step))
        residual += x
        finite, payload = dgc.encode("w", x, dgc.codec, shape=(n,), seed=step, commit=True)
        assert finite
        assert payload.numel() == dgc.codec.payload_nbytes(n) == TopK(density=0.001).payload_nbytes(n)
        sent = dgc.codec.decode(payload, torch.empty(n))
        at = sent.nonzero().view(-1)
        assert torch.equal(sent[at], residual[at])
        assert residual[at].abs().min() >= residual.abs().topk(2 * k).values[-1]
        residual -= sent
        assert torch.equal(dgc.residual("w"), residual)
        counts.append(at.numel())
    assert max(counts) == k
    assert min(counts) >= 0.8 * k


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_averages_get_the_momentum_of_sgd(nesterov):
    dgc = method(f",nesterov={nesterov}")
    parameter = torch.nn.Parameter(torch.zeros(7))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, nesterov=nesterov)
    at = torch.zeros(7)
    for step in range(10):
        g = gradient(step)[:7]
        if step == 4:
            parameter.grad = None  # no rank had one
            g.zero_()
        else:
            parameter.grad = g.clone()
        average = g.clone()
        dgc.advance_uncompressed([("bias", average), ("empty", torch.empty(0))])
        at -= average
        optimizer.step()
        torch.testing.assert_close(at, parameter.data)
    assert set(dgc.state_dict()) == {"uncompressed/bias"}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_momentum_of_dense_averages_stays_in_the_range_of_their_dtype(dtype, nesterov):
    """What a step lacks there is not lost in float16: the velocity has more range, and goes on in later steps."""
    dgc, most = method(f",nesterov={nesterov}"), torch.finfo(dtype).max
    velocity = torch.zeros(3, dtype=torch.float64)
    for share in (1.0, 1.0, 0.0625, 0.0, 0.0):
        average = torch.tensor([share * most, -share * most, 1.0], dtype=dtype)
        x = average.double()
        dgc.advance_uncompressed([("bias", average)])
        assert average.isfinite().all()
        if dtype is torch.float16:
            velocity = velocity * 0.9 + x
            step = velocity * 0.9 + x if nesterov else velocity
            torch.testing.assert_close(average, step.clamp(-most, most).to(dtype))
    assert all(value.isfinite().all() for value in dgc.state_dict().values())


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        (0.001, [0.25, 0.0625, 0.015625, 0.00390625, 0.001]),
        (0.01, [0.25, 0.0625, 0.015625, 0.01]),
        (0.0625, [0.25, 0.0625]),
        (0.2, [0.25, 0.2]),
        (1e-4, [0.25**e for e in range(1, 7)] + [1e-4]),
    ],
)
@pytest.mark.parametrize("length", [1, 6, 60, 1000])
def test_warm_up_quarters_the_density(density, expected, length):
    dgc = nb.DGC(density=density, warmup_steps=length)
    densities = [dgc.codec_at(step, None).density for step in range(length + 2)]
    assert densities == sorted(densities, reverse=True)
    assert densities[0] == 0.25
    assert densities[length - 1] > density
    assert densities[length:] == [density] * 2
    if length >= 60:
        assert list(dict.fromkeys(densities)) == expected
        counts = [densities.count(value) for value in expected[:-1]]
        assert max(counts) - min(counts) <= 1


def test_a_spec_is_its_canonical_form():
    for text in (
        "dgc:density=0.001",
        "dgc:density=0.01,momentum=0.5,nesterov=true,clip=2.5,warmup_steps=10,masking=false,indices=runs",
        "dgc:density=0.001,warmup_epochs=4",
        "dgc:density=0.001,select=sampled,values=fp16",
    ):
        whole = nb.compression(text)
        assert str(whole) == text
        assert nb.compression(str(whole)) == whole
    assert str(nb.compression("dgc")) == "dgc:density=0.001"
    assert nb.compression(nb.DGC(density=0.01)) == nb.compression("dgc:density=0.01")
    assert nb.compression("dgc:density=0.01,indices=runs").codec == TopK(density=0.01, indices="runs")
    chosen = nb.compression("dgc:density=0.01,select=sampled,values=int8,warmup_steps=9")
    assert chosen.codec == TopK(density=0.01, select="sampled", values="int8")
    assert chosen.codec_at(0) == TopK(density=0.25, select="sampled", values="int8")
    assert nb.compression("dgc").new_feedback() is not nb.compression("dgc").feedback
    assert isinstance(nb.compression("dgc"), Compression)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dgc:density=0", ["density=0.0", "(0, 1]"]),
        ("dgc:density=2", ["density=2.0"]),
        ("dgc:momentum=1", ["momentum=1.0", "[0, 1)"]),
        ("dgc:momentum=0,nesterov=true", ["nesterov", "momentum above 0"]),
        ("dgc:clip=0", ["clip=0.0", "above 0"]),
        ("dgc:clip=nan", ["clip=nan"]),
        ("dgc:warmup_steps=-1", ["warmup_steps=-1", "negative"]),
        ("dgc:warmup_steps=1,warmup_epochs=1", ["not as both"]),
        ("dgc:density=0.25,warmup_steps=4", ["density=0.25", "25%", "grow"]),
        ("dgc:density=0.5,warmup_epochs=4", ["grow"]),
        ("dgc:rank=4", ["dgc has no key 'rank'", "momentum"]),
        ("dgc+ef", ["dgc has a feedback of its own", "+ef"]),
        ("runs/plan.json", ["nb.Plan.load('runs/plan.json')"]),
        ("dgd:density=0.1", ["unknown codec 'dgd'", "did you mean 'dgc'"]),
        ("dgc:indices=int32", ["elias-fano, runs"]),
        ("dgc:values=int8,indices=runs", ["int8", "leave indices out"]),
    ],
)
def test_what_no_spec_can_mean(spec, words):
    with pytest.raises(ValueError, match=r".") as error:
        nb.compression(spec)
    for word in words:
        assert word in str(error.value)


def test_what_it_cannot_send_is_refused():
    dgc = method()
    with pytest.raises(TypeError, match="bf16"):
        dgc.encode("w", gradient(0), BF16(), shape=SHAPE, seed=0)
    send(dgc, 0)
    with pytest.raises(ValueError, match="600 elements"):
        dgc.encode("w", torch.zeros(5), dgc.codec, shape=(5,), seed=0)
    with pytest.raises(ValueError, match="float16"):
        dgc.encode("w", gradient(0, torch.float16), dgc.codec, shape=SHAPE, seed=0, commit=True)
    with pytest.raises(ValueError, match="set_epoch"):
        nb.DGC(warmup_epochs=2).codec_at(0, None)


@pytest.mark.parametrize("store", ["bf16", "int8"])
def test_what_is_stored_in_fewer_bits_is_not_held_in_float32_until_the_step_is_decided(store, monkeypatch):
    read: list[weakref.ref[torch.Tensor]] = []
    plain = Kept.read

    def noted(self):
        read.append(weakref.ref(found := plain(self)))
        return found

    monkeypatch.setattr(Kept, "read", noted)
    feedback = DGC(density=0.1, store=store)
    x = torch.randn(4096)
    finite, _ = feedback.encode("w", x, feedback.codec, shape=(4096,), seed=1, commit=True)
    assert finite
    gc.collect()
    assert len(read) == 2
    assert [ref() for ref in read] == [None, None]
    before = feedback.state_dict()
    feedback.roll_back("w", x)
    assert any(bool(value.any()) for value in before.values())
    assert not any(bool(value.any()) for value in feedback.state_dict().values())


def test_velocities_of_16_bits_from_an_earlier_release_follow_a_rising_loss_scale():
    dgc = DGC(density=0.1)
    dgc.load_state_dict({"uncompressed/bias": torch.tensor([40_000.0, -60_000.0], dtype=torch.float16)})
    for factor in (4.0, 0.25):
        dgc.scale(factor)
    (velocity,) = dgc.state_dict().values()
    assert velocity.tolist() == [40_000, -60_000]
