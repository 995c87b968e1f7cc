"""What making the context has done already."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.kernels.cpu import cache
from tests.loops import asked_for_from_now
from tests.ranks import run_ranks


def loops(rank, world_size, bits, dtype, cast):
    """Those that were asked for by the first forward pass under the context, and later."""
    asked = asked_for_from_now()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 64),
        nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(1), nn.Dropout(0.1),
    ).to(dtype)  # fmt: skip
    context = nb.compress_activations(model, bits=bits, min_numel=256)
    before = len(asked)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast), context:
            if cast:  # entering under autocast finds out about it
                before = len(asked)
            loss = model(torch.randn(8, 3, 16, 16, dtype=dtype)).float().square().mean()
        loss.backward()
    return asked[:before], asked[before:]


@pytest.mark.parametrize(
    ("bits", "dtype", "cast"), [(8, torch.float32, False), (4, torch.bfloat16, False), (8, torch.float32, True)]
)
def test_no_forward_pass_waits_for_a_compiler(bits, dtype, cast):
    ((before, later),) = run_ranks(loops, 1, bits, dtype, cast, fresh=True, group=False, timeout_s=600)
    assert before
    assert later == []


def compiled_on_a_new_machine(rank, world_size, caches):
    """Loops that were compiled before the first forward pass, and later, by tensors that are worth several threads."""
    cache.numba.config.CACHE_DIR = caches
    cache.folder.cache_clear()
    made, save = [], cache.LoopCache.save_overload

    def noted(self, *types):
        made.append(self.name)
        return save(self, *types)

    cache.LoopCache.save_overload = noted
    torch.set_num_threads(2)
    # Behind the first layer rows have 8 elements, which are taken one by one; behind the second, 32.
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    context = nb.compress_activations(model, min_numel=256)
    before = len(made)
    for batch in (64, 8192, 8192):  # 2 Mi elements behind the last GELU
        with context:
            loss = model(torch.randn(batch, 64)).square().mean()
        loss.backward()
    return made[:before], made[before:]


def test_each_loop_is_compiled_once_and_before_the_first_step(tmp_path):
    ((before, later),) = run_ranks(compiled_on_a_new_machine, 1, str(tmp_path), fresh=True, group=False, timeout_s=600)
    assert len(before) > 10
    assert len(before) == len({*before})
    assert later == []
