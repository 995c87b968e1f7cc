"""What docs/explanation/faq.md answers beyond what its own code shows: tables, and what works with what."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from narrowband.errors import UnsupportedError
from tests.docs.pages import ROOT
from tests.ranks import run_ranks

TEXT = (ROOT / "docs/explanation/faq.md").read_text()


def table(header):
    """The rows below this line of the page: lists of cells, without backticks."""
    below = TEXT.split(header, 1)[1].splitlines()[2:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), below)
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def tensors(state):
    if isinstance(state, torch.Tensor):
        return [state]
    return [t for value in state.values() for t in tensors(value)] if isinstance(state, dict) else []


def train(ddp, optimizer, rank, steps=5):
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def bytes_kept_per_parameter(rank, world_size, specs):
    found = {}
    for spec in specs:
        ddp = DistributedDataParallel(nn.Linear(64, 512, bias=False))
        handle = nb.compress_gradients(ddp, spec)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank, steps=2)
        kept = handle.state_dict()["feedback"]
        kept = {name: value for name, value in kept.items() if not name.startswith("factor/")}
        found[spec] = sum(t.numel() * t.element_size() for t in tensors(kept)) / (64 * 512)
    return found


def test_residuals_take_the_memory_that_the_table_says():
    shown = table("| spec | bytes per parameter | a billion parameters |")
    rows = [(spec.strip(), each, total) for specs, each, total in shown for spec in specs.split(",")]
    assert len(rows) == 8
    found = run_ranks(bytes_kept_per_parameter, 2, [spec for spec, _, _ in rows], timeout_s=240)[0]
    for spec, each, total in rows:
        assert found[spec] == int(each), spec
        assert total == f"{each} GB", spec


def test_errors_and_losses_are_those_of_the_record():
    rows = json.loads((ROOT / "benchmarks/results/demo/summary.json").read_text())["rows"]
    shown = table("| spec | `relative_error` | held-out loss |")
    assert len(shown) == len(rows)
    record = {row["codec"]: row for row in rows}
    for spec, error, loss in shown:
        assert float(loss) == round(record[spec]["heldout_loss"], 3), spec
        if record[spec]["relative_error"] is None:
            assert error == "–"
        else:
            assert float(error) == pytest.approx(record[spec]["relative_error"], rel=0.1), spec


def under_zero(parameters, kind, **settings):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported, which is an error in a test

    return ZeroRedundancyOptimizer(parameters, kind, **settings)


def sharded_and_whole(rank, world_size, spec):
    ends = []
    for sharded in (False, True):
        ddp = DistributedDataParallel(network())
        nb.compress_gradients(ddp, spec)
        kind, settings = (torch.optim.AdamW, {"lr": 1e-3}) if "dgc" not in spec else (nb.DGCSGD, {"lr": 0.1})
        parameters = ddp.parameters()
        optimizer = under_zero(parameters, kind, **settings) if sharded else kind(parameters, **settings)
        ends.append(train(ddp, optimizer, rank))
    return ends


@pytest.mark.parametrize("spec", ["none", "topk:density=0.05+ef", "qsgd:bits=4", "powersgd:rank=2", "dgc:density=0.05"])
def test_an_optimizer_that_zero_shards_takes_the_same_steps(spec):
    for whole, sharded in run_ranks(sharded_and_whole, 2, spec, timeout_s=240):
        assert torch.equal(whole, sharded)


def fsdp2(rank, world_size):
    net = network()
    fully_shard(net)
    try:
        nb.compress_gradients(net, "qsgd:bits=4")
    except (TypeError, UnsupportedError) as error:
        dist.barrier()
        return str(error)
    return None


def test_an_fsdp2_model_across_all_ranks_is_refused():
    assert all(re.search("train the same replica", said or "") for said in run_ranks(fsdp2, 2))
