"""What is used at set-up, and how often."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.averaging import warmup
from narrowband.feedback import compression
from narrowband.kernels import backends
from narrowband.kernels.backends import Backend
from tests.gradients.training import refusal
from tests.ranks import run_ranks


def test_a_process_uses_the_loops_of_a_spec_once(monkeypatch):
    used = []
    monkeypatch.setattr(warmup, "_done", set())
    monkeypatch.setattr(warmup, "use_once", lambda x, chosen: used.append((str(chosen), x.numel())))
    device = torch.device("cpu")
    warmup.use_all(["topk:density=0.01+ef", "qsgd:bits=4"], device)
    sizes = [side**2 for side in warmup._SIDES]
    assert used == [(spec, size) for spec in ("topk:density=0.01+ef", "qsgd:bits=4") for size in sizes]
    used.clear()
    warmup.use_all(["topk:density=0.01+ef", "qsgd:bits=4"], device)
    assert used == []
    warmup.use_all(["qsgd:bits=2"], device)  # other numbers of a kind: the smallest size alone
    assert used == [("qsgd:bits=2", sizes[0])]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        warmup.use_all(["qsgd:bits=2"], device)
    finally:
        torch.set_num_threads(threads)
    assert len(used) == 1 + len(sizes)


def fails_on(rank, world_size, failing):
    """What ranks raise where one of them cannot make its loops ready, and whether they go on together afterwards."""
    net, former = nn.Linear(64, 64), warmup.use_all

    def use_all(*arguments):
        if rank == failing:
            raise MemoryError("no room")
        former(*arguments)

    warmup.use_all = use_all
    try:
        refused = refusal(lambda: nb.Averager(net, "qsgd:bits=4"))
    finally:
        warmup.use_all = former
    averager = nb.Averager(net, "qsgd:bits=4")
    net(torch.ones(1, 64)).sum().backward()
    averager.average()
    averager.remove()
    return refused


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_make_loops_ready_is_an_error_on_all(failing):
    refused = run_ranks(fails_on, 2, failing)
    assert refused[failing] == ("MemoryError", "no room")
    assert refused[1 - failing][0] == "DisagreementError"
    assert f"rank {failing}: MemoryError: no room" in refused[1 - failing][1]


@pytest.mark.parametrize(
    "spec",
    ["qsgd:bits=4", "fp16", "topk:density=0.1+ef", "topk:density=0.1+ef:store=int8", "uniform:bits=8+ef:store=bf16",
     "uniform:bits=8+ef21", "dgc:density=0.1", "dgc:density=0.1,accumulate=steps,store=int8"],
)  # fmt: skip
def test_what_the_device_decides_is_used_at_set_up(spec):
    chosen = compression(spec)
    feedback = chosen.new_feedback()
    if feedback is not None and feedback.needs_learning_rates:
        feedback.set_learning_rates({"": 1.0})
    calls = Counter()

    class Loops(Backend):
        def __getattribute__(self, name):
            if not name.startswith("_"):
                calls[name] += 1
            return super().__getattribute__(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends._chosen, "cpu", Loops("narrowband.kernels.reference"))
        warmup.use_ahead(torch.randn(40, 50), chosen.codec, feedback)
    assert calls["poison_all_if"] == 1
    restored = calls["restore_all_if"] + calls["take_former_all_if"] + calls["remember_all_if"]
    assert bool(restored) == (feedback is not None)
    assert calls["clear_all_if"] == ("ef21" in spec)
