"""What is used at set-up, and how often."""

from __future__ import annotations

import torch

from narrowband.averaging import warmup


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
