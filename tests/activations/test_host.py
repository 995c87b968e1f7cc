"""What saved activations cost the host of a GPU, in counts: ``benchmarks/host.py`` has them, and times, too."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec

import pytest

import narrowband

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_step_starts_little_on_a_gpu_and_never_waits_for_it(bits):
    from benchmarks.host import counted

    row = counted(bits)
    forward, backward = row["forward"], row["backward"]
    # Of a block: two inputs of layer norms in their normalized form, three of attention, its result and GELU's input;
    # beside them four weights in autocast's dtype, and five tensors that are computed again or share codes.
    codes = 2 * 7 + 2  # of two blocks, of the patches, and of the last norm
    assert row["packed"] == 33
    assert forward["launches"] == {"_quantize_group": codes, "_quantize_group_again": codes}
    assert sum(backward["launches"].values()) <= 24
    assert forward["waits"] == backward["waits"] == 0
    assert forward["allocations"] <= 2 * codes + 11  # codes, and ranges; copies of layer norms' parameters
    # Views among them; versions of PyTorch differ by a few.
    assert sum(forward["operators"].values()) < 4.5 * row["packed"]
    assert sum(backward["operators"].values()) < 3.5 * row["packed"]


@pytest.mark.parametrize("way", ["cpu", "gpu"])
def test_python_calls_few_functions_for_a_packed_tensor(way):
    """Where a step is like the last one, as almost all are."""
    from benchmarks.host import Step

    room, calls = narrowband.__path__[0], Counter()

    def count(frame, event, _):
        """Count functions in Python, and those in C that this package calls, views and other operators among them."""
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(room):
            calls[event] += 1

    def counted(run):
        calls.clear()
        sys.setprofile(count)
        try:
            result = run()
        finally:
            sys.setprofile(before)
        return result, {event: number / step.packed for event, number in calls.items()}

    step, before = Step(8, lambda *_, **__: None), sys.getprofile()
    with step.as_on_a_gpu() if way == "gpu" else nullcontext():
        step.forward().backward()
        loss, forward = counted(step.forward)
        _, backward = counted(loss.backward)
    # Of all calls in a step: of modules and functions that save nothing, too, and of what cannot be packed.
    assert forward["call"] < 60
    assert forward["c_call"] < 82
    assert backward["call"] < 13
    assert backward["c_call"] < 12
