"""Memory that a step of feedback takes for a moment, on a GPU, whose part the CPU plays: loops are not run."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import narrowband as nb
from narrowband.kernels import Findings, backends

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def on_a_gpu(monkeypatch):
    for family in ("candidates", "common", "compensation", "launching", "momentum", "selection", "sparse", "stores"):
        monkeypatch.setattr(
            import_module(f"narrowband.kernels.cuda.{family}"), "run", lambda *_, **__: None, raising=False
        )
    monkeypatch.setitem(backends._chosen, "cpu", backends.Backend("narrowband.kernels.cuda"))


def most_allocated(call) -> int:
    """The most bytes of PyTorch's memory that a call holds at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("store", ["int8", "bf16"])
def test_sums_of_dgc_in_fewer_bits_are_read_into_two_float32_for_each_element(on_a_gpu, store):
    feedback = nb.compression(f"dgc:density=0.001,store={store}").new_feedback()
    codec, numel = feedback.codec, 1 << 18
    keys, xs = ["a", "b"], [torch.zeros(numel), torch.zeros(numel)]
    outs = [torch.empty(codec.payload_nbytes(numel), dtype=torch.uint8) for _ in xs]
    findings = Findings(xs[0].device)

    def step():
        with findings.noting(Findings.OWN):
            feedback.encode_all(keys, xs, codec, seeds=[1, 2], outs=outs)

    step()
    bucket = sum(x.nbytes for x in xs)
    assert 1.9 * bucket < most_allocated(step) < 2.3 * bucket
