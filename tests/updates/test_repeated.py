"""Replicas that all bring the same update are told so, once."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.gradients.training import adamw, flat, heard, loss_of, mlp, sgd
from tests.ranks import run_ranks
from tests.updates.test_replicas import mesh_of


class WithStatistics(nn.Module):
    """Its buffer, which is averaged, differs between ranks in any case."""

    def __init__(self):
        super().__init__()
        self.inside = mlp()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += x.sum()
        return self.inside(x)


def rounds(rank, net, called, of, *, options=None, idle=0):
    """What is logged in some rounds, of which the first ``idle`` change nothing."""
    optimizer = sgd(net) if idle else adamw(net)
    handle = nb.compress_updates(net, optimizer, "topk:density=0.1+ef", min_numel=64, **(options or {}))
    with heard() as said:
        for step in range(idle, 6):
            optimizer.zero_grad()
            loss_of(called, step, of).backward()
            for p in net.parameters() if step - idle < idle else ():
                p.grad.zero_()
            optimizer.step()
        if handle.steps:
            handle.average()
    handle.remove()
    return [text for text in said if "the same update" in text], flat(net)


OPTIONS = {"each": {}, "wait": {"every": 2}, "overlap": {"every": 4, "fragments": 2, "overlap": 1}}


def one_each(rank, world_size):
    """A replica per rank: inside DistributedDataParallel, on the same batches, on batches of their own."""
    found = {}
    for kind, options in OPTIONS.items():
        net = WithStatistics()
        around = DistributedDataParallel(net, broadcast_buffers=False)
        found[f"ddp {kind}"], _ = rounds(rank, net, around, rank, options=options)
        net = mlp()
        found[f"same {kind}"], _ = rounds(rank, net, net, 0, options=options)
        found[f"own {kind}"], _ = rounds(rank, net := mlp(), net, rank, options=options)
    found["same idle"], _ = rounds(rank, net := mlp(), net, 0, idle=2)
    found["own idle"], _ = rounds(rank, net := mlp(), net, rank, idle=2)
    around = DistributedDataParallel(net := mlp())
    with around.no_sync():  # averages nothing
        found["own no_sync"], _ = rounds(rank, net, around, rank)
    return found


def test_replicas_that_bring_the_same_are_told_so_once():
    for rank, found in enumerate(run_ranks(one_each, 2)):
        for kind, said in found.items():
            assert len(said) == (rank == 0 and not kind.startswith("own")), (kind, said)
        for text in found["ddp wait"] if rank == 0 else ():
            assert "all 2 replicas brought the same update, bit for bit" in text
            assert "DistributedDataParallel around the model" in text
            assert "train on the same batches" in text


def two_each(rank, world_size):
    mesh = mesh_of(2, 2)
    net = DistributedDataParallel(mlp(), process_group=mesh["ranks"].get_group())
    return rounds(rank, net, net, rank, options={"every": 2, "process_group": mesh["replicas"].get_group()})[0]


def test_what_a_replica_averages_inside_is_its_own():
    assert run_ranks(two_each, 4) == [[]] * 4
