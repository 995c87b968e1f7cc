"""What ranks on one GPU average, beside what ranks on the CPU do: gloo ranks, which may share a card."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowband as nb
from tests.ranks import run_ranks

RANKS, STEPS = 2, 4

#: Of every kind whose bits do not depend on the order of sums, which is each backend's own. Those of PowerSGD's factors
#: and of ``sign``, whose scale is a mean, do.
SPECS = (
    "none",
    "fp16",
    "uniform:bits=4+ef",
    "uniform:bits=8+ef21",
    "qsgd:bits=4",
    "topk:density=0.01+ef",
    "topk:density=0.05,values=int8+ef:store=int8",
    "randomk:density=0.1+ef",
    "dgc:density=0.01",
    "dgc:density=0.01,store=int8",
)

#: What is encoded twice: its means, too.
SCATTERED = ("qsgd:bits=4", "uniform:bits=5+ef:decay=0.9")

#: Matrices of odd sizes, a convolution, and a bias, which travels uncompressed.
SHAPES = ((300, 200), (1000, 77), (64, 3, 3, 3), (50,))

#: Triton compiles every loop that a spec needs when it is first called.
COMPILING_S = 300.0


def averages(rank, world_size, spec, device, collective):
    """All averages of some steps, end to end and on the CPU: what was lost in one step is part of the next."""
    parameters = [(f"p{i}", nn.Parameter(torch.zeros(shape, device=device))) for i, shape in enumerate(SHAPES)]
    averager = nb.Averager(parameters, spec, seed=7, collective=collective)
    generator = torch.Generator().manual_seed(rank)  # the CPU's, for both devices
    found = []
    for _ in range(STEPS):
        for _, p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        averager.average()
        found += [p.grad.cpu().flatten() for _, p in parameters]
    averager.remove()
    return torch.cat(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "collective"),
    [*((spec, "auto") for spec in SPECS), *((spec, "scatter_reduce") for spec in SCATTERED)],
)
def test_ranks_on_one_card_average_to_the_same_bits_as_ranks_on_the_cpu(spec, collective):
    on_card, on_cpu = (
        run_ranks(averages, RANKS, spec, device, collective, timeout_s=COMPILING_S) for device in ("cuda:0", "cpu")
    )
    assert on_cpu[0].count_nonzero() > 0
    for mine, theirs in zip(on_card, on_cpu, strict=True):
        differ = mine.view(torch.int32) != theirs.view(torch.int32)
        assert not differ.any(), f"{int(differ.sum())} of {differ.numel()} differ"
    assert torch.equal(*on_card)
