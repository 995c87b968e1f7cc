"""What is used at set-up, and how often."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.averaging import warmup
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
    assert f"MemoryError: no room on rank {failing}" in refused[1 - failing][1]
