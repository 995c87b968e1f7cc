"""Seconds per byte, from durations that are known."""

from __future__ import annotations

import numpy as np
import pytest

import narrowband as nb
from narrowband.adapt import bucket_priority, fit_times
from tests.gradients.training import compress, loss_of, mlp, refusal, sgd, wrap
from tests.ranks import run_ranks

BUCKETS = [["head"], ["body.1", "body.2"], ["stem"]]


@pytest.mark.parametrize("true", [(1e-8, 2e-8, 5e-8), (0.0, 3e-8, 0.0), (1e-8, 0.0, 4e-8)])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_regression_finds_what_bytes_take(true, noise):
    rng = np.random.default_rng(0)
    nbytes = rng.uniform(1e5, 1e7, (200, 3))
    seconds = 0.02 + nbytes @ np.array(true) + noise * rng.standard_normal(200)
    times = fit_times(BUCKETS, nbytes, seconds)
    found = [times.seconds_per_byte[name] for name in ("head", "body.1", "stem")]
    assert found == pytest.approx(true, abs=1e-10 if noise else 1e-13)
    assert times.seconds_per_byte["body.2"] == times.seconds_per_byte["body.1"]
    assert times.fixed_s == pytest.approx(0.02, rel=0.05)
    assert times.r2 > 0.99
    assert min(found) >= 0


def test_nothing_takes_less_than_no_time():
    rng = np.random.default_rng(1)
    nbytes = rng.uniform(1e5, 1e7, (50, 3))
    times = fit_times(BUCKETS, nbytes, 0.1 - 5e-9 * nbytes[:, 0] + 2e-8 * nbytes[:, 2])
    assert times.seconds_per_byte["head"] == 0
    assert times.seconds_per_byte["stem"] == pytest.approx(2e-8, rel=0.2)


def test_r2_of_held_out_samples_is_that_of_fits_without_them():
    rng = np.random.default_rng(2)
    nbytes = rng.uniform(1e5, 1e7, (12, 3))
    seconds = 0.02 + nbytes @ np.array([1e-8, 2e-8, 5e-8]) + 0.05 * rng.standard_normal(12)
    times = fit_times(BUCKETS, nbytes, seconds)
    for out in range(12):
        rest = fit_times(BUCKETS, np.delete(nbytes, out, 0), np.delete(seconds, out))
        prices = [rest.seconds_per_byte[names[0]] for names in BUCKETS]
        assert times.foretold_s[out] == pytest.approx(rest.fixed_s + nbytes[out] @ prices)
    missed = ((seconds - times.foretold_s) ** 2).sum()
    assert times.r2_held_out == pytest.approx(1 - missed / ((seconds - seconds.mean()) ** 2).sum())
    assert times.r2_held_out < times.r2
    assert (np.array(times.nbytes) == nbytes).all()
    assert times.seconds == tuple(seconds)


def test_as_few_samples_as_numbers_leave_none_to_hold_out():
    times = fit_times(BUCKETS, np.eye(4, 3), [4.0, 3.0, 2.0, 1.0])
    assert (times.r2, times.r2_held_out, times.foretold_s) == (pytest.approx(1.0), None, ())


def test_bucket_priority_counts_up():
    assert bucket_priority(BUCKETS) == {"head": 1, "body.1": 2, "body.2": 2, "stem": 3}


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="at least 4"):
        fit_times(BUCKETS, np.ones((3, 3)), np.ones(3))
    with pytest.raises(ValueError, match=r"\(5, 3\)"):
        fit_times(BUCKETS, np.ones((5, 2)), np.ones(5))


def measured_too_early(rank, world_size):
    model = wrap(mlp())
    handle = compress(model, "topk:density=0.1+ef", min_numel=64, warmup_steps=20)
    choices = ["topk:density=0.01", "topk:density=0.3"]
    return refusal(
        lambda: nb.measure_times(
            handle, lambda: loss_of(model, 0, rank).backward(), choices, samples=4, steps=1, warmup_steps=0
        )
    )


def test_measuring_while_nothing_is_compressed_is_an_error():
    for error in run_ranks(measured_too_early, 2):
        assert error[0] == "RuntimeError"
        assert "all choices sent the same bytes" in error[1]


def measured(rank, world_size, spec, choices, collective="auto"):
    model = wrap(mlp(), 1e-6)
    handle = compress(model, spec, min_numel=64, collective=collective)
    optimizer, count = sgd(model), [0]

    def step():
        optimizer.zero_grad()
        loss_of(model, count[0], rank).backward()
        optimizer.step()
        count[0] += 1

    times = nb.measure_times(handle, step, choices, samples=7, steps=3, warmup_steps=1)
    specs = {str(handle.layers.spec_for(name)) for name in handle.layers.parameters.shapes}
    policy = nb.LGreCo(spec, objective="time", seconds_per_byte=times.seconds_per_byte)
    return times, handle.buckets, specs, count[0], sorted(policy.seconds_per_byte)


def test_all_ranks_measure_the_same_times_where_they_send_different_numbers_of_bytes():
    choices = ["qsgd:bits=4", "qsgd:bits=8"]
    results = [found[0] for found in run_ranks(measured, 3, "qsgd:bits=8", choices, "scatter_reduce")]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("spec", "choices"),
    [
        ("topk:density=0.1+ef", ["topk:density=0.01+ef", "qsgd:bits=8"]),
        ("dgc:density=0.1", ["topk:density=0.01", "topk:density=0.3"]),
    ],
)
def test_measuring_trains_and_leaves_everything_as_it_was(spec, choices):
    results = run_ranks(measured, 2, spec, choices)
    for times, buckets, specs, steps, names in results:
        assert specs == {spec}
        assert steps == 2 + 7 * 4
        assert times == results[0][0]
        assert len(times.seconds) == len(times.nbytes) == 7
        assert sorted(name for names in buckets for name in names) == sorted(times.seconds_per_byte)
        assert names == sorted(times.seconds_per_byte)
