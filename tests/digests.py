"""Digests of what compression computes, to hold two versions of the code against each other bit by bit.

::

    python -m tests.digests record FILE           # of the code as it stands
    python -m tests.digests check FILE            # says what differs, and exits with 1 if anything does
    python -m tests.digests check FILE --only ddp pipeline

A digest belongs to the machine it was recorded on: another processor adds up in another order. So digests are not
part of the test suite. They are recorded before code is moved, and checked after each step of the move.

For every specification that the documentation names, three gloo ranks train a small odd model for 20 steps (tied,
frozen, unused and non-contiguous parameters); boundaries, pipeline stages, saved activations and coded averages follow.
A digest covers the averages of all steps, the tensors of the final state, and the bytes that reached the process group.
Names and keys are left out, so they may change.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from narrowband.collectives import primitives
from tests.activations import models as activation_models
from tests.ranks import run_ranks

STEPS = 20
WORLD_SIZE = 3

#: Codecs with the feedback behind them, and methods, as the documentation lists them.
GRADIENTS = [
    "none",
    "fp16",
    "bf16",
    "uniform:bits=8",
    "uniform:bits=4,rounding=stochastic+ef",
    "uniform:bits=2,symmetric=true+ef",
    "qsgd:bits=4",
    "qsgd:bits=2,norm=l2",
    "qsgd:bits=2+ef",
    "eden:bits=2",
    "eden:bits=1+ef",
    "sign+ef",
    "topk:density=0.01+ef",
    "topk:density=0.05,select=sampled+ef",
    "topk:density=0.04,values=int8+ef",
    "topk:density=0.05,values=fp16,indices=int32+ef",
    "topk:density=0.05,indices=runs+ef",
    "topk:density=0.05+ef-mixed",
    "topk:density=0.05+ef21",
    "uniform:bits=4+ef21",
    "none+ef21",
    "threshold:value=0.001+ef",
    "randomk:density=0.05+ef",
    "lowrank:rank=2+ef",
    "dgc:density=0.01,warmup_steps=6",
    "dgc:density=0.05,momentum=0.5,nesterov=true,clip=1.0",
    "dgc:density=0.05,momentum=0",
    "powersgd:rank=2",
    "powersgd:rank=2,iterations=2",
    "powersgd:rank=1,ef=false",
    "powersgd:rank=2,halves=1",
    "powersgd:rank=1,halves=2",
    "topk:density=0.05+ef:decay=0.95",
    "dgc:density=0.05,select=sampled,values=fp16",
]
#: (specification, options of compress_gradients) beside the defaults.
WITH_OPTIONS = [
    ("qsgd:bits=4+ef", {"collective": "scatter_reduce"}),
    ("qsgd:bits=4+ef", {"collective": "all_gather"}),
    ("randomk:density=0.05+ef", {"collective": "all_gather"}),
    ("topk:density=0.05+ef", {"small": "topk:density=0.2"}),
    ("dgc:density=0.05", {"small": "fused"}),
    ("topk:density=0.05+ef", {"warmup_steps": 5}),
]
ACTIVATIONS = [None, 8, 4, 2]
BOUNDARIES = [
    ("none", "none"),
    ("bf16", "uniform:bits=8"),
    ("uniform:bits=4", "qsgd:bits=4"),
    ("eden:bits=4", "eden:bits=4"),
    ("topk:density=0.1", "topk:density=0.1,scope=sample,values=fp16"),
    ("topk:density=0.2+ef", "topk:density=0.2,scope=sample+ef-mixed"),
    ("topk:density=0.2+ef21", "uniform:bits=4,rounding=stochastic+ef21"),
    ("qsgd:bits=4+aq-sgd", "randomk:density=0.1+ef"),
    ("topk:density=0.3+aq-sgd:store=fp16", "uniform:bits=8"),
    ("uniform:bits=2+aq-sgd:store=int8", "uniform:bits=8"),
]


class Digest:
    """A hash of the bytes of tensors, in order."""

    def __init__(self):
        self._hash = hashlib.sha256()

    def add(self, *tensors):
        for x in tensors:
            flat = x.detach().contiguous().view(-1)
            self._hash.update(flat.view(torch.uint8).numpy().tobytes())
        return self

    def __str__(self):
        return self._hash.hexdigest()[:16]


def of_state(state):
    """The digest of all tensors in nested containers, whatever they are called."""
    found = []

    def walk(value):
        if isinstance(value, torch.Tensor):
            found.append(str(Digest().add(value)))
        elif isinstance(value, Mapping):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                walk(inner)

    walk(state)
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()[:16]


@contextlib.contextmanager
def sent_payloads():
    """What this rank hands to the process group meanwhile, as one digest per call's name.

    Messages of up to eight bytes are left out: they say that ranks agree, and depend on names.
    """
    digests = {}
    functions = {
        "all_reduce": (dist, "all_reduce", 0),
        "isend": (dist, "isend", 0),
        "send": (dist, "send", 0),
    }
    before = {}

    def watched(name, function, place):
        @functools.wraps(function)
        def call(*args, **kwargs):
            x = args[place]
            if isinstance(x, torch.Tensor) and x.nbytes > 8:
                digests.setdefault(name, Digest()).add(x._values() if x.is_sparse else x)
            return function(*args, **kwargs)

        return call

    for name, (module, attribute, place) in functions.items():
        before[name] = getattr(module, attribute)
        setattr(module, attribute, watched(name, before[name], place))
    gather = primitives.all_gather_single
    primitives.all_gather_single = watched("all_gather", gather, 1)
    try:
        yield digests
    finally:
        for name, (module, attribute, _) in functions.items():
            setattr(module, attribute, before[name])
        primitives.all_gather_single = gather


class Odd(nn.Module):
    """Tied, frozen, unused and non-contiguous parameters, odd sizes, norms and biases."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(24, 40)
        self.conv = nn.Conv2d(1, 37, 3, padding=1).to(memory_format=torch.channels_last)
        self.mix = nn.Linear(37, 40)
        self.norm = nn.LayerNorm(40)
        self.back = nn.Linear(40, 24)
        self.back.weight = nn.Parameter(torch.randn(40, 24).t() / 5)  # its memory is that of the transposed matrix
        self.tied = nn.Linear(24, 40)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Linear(40, 40)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(33, 33)
        self.head = nn.Linear(40, 33)

    def forward(self, x):
        h = self.embed(x).tanh()
        pooled = self.conv(h.view(-1, 1, 5, 8)).mean((2, 3))
        h = self.norm(h + self.mix(pooled))
        h = self.tied(self.back(h).relu())
        return self.head(self.frozen(h) + h)


def data(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 24, generator=generator), torch.randn(6, 33, generator=generator)


def train_ddp(rank, world_size, spec, options):
    unused = "small" not in options
    model = DDP(Odd(), find_unused_parameters=unused, bucket_cap_mb=0.01)
    if not unused:
        model = Odd()
        model.unused.requires_grad_(False)
        model = DDP(model, bucket_cap_mb=0.01)
    averages = Digest()
    with sent_payloads() as payloads:
        handle = nb.compress_gradients(model, spec, min_numel=200, seed=7, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(step, rank)
            (model(x) - y).square().mean().backward()
            averages.add(*(p.grad for p in model.parameters() if p.grad is not None))
            optimizer.step()
    stats = handle.stats().total
    error = "none" if stats.relative_error is None else f"{stats.relative_error:.6g}"
    return {
        "averages": str(averages),
        "state": of_state(handle.state_dict()),
        "parameters": str(Digest().add(*model.parameters())),
        "bytes": f"{stats.sent_bytes} of {stats.raw_bytes}, error {error}",
        **{f"sent by {name}": str(digest) for name, digest in sorted(payloads.items())},
    }


def train_policy(rank, world_size, name):
    policy = {
        "lgreco": lambda: nb.LGreCo("powersgd:rank=4", every=6),
        "lgreco of topk": lambda: nb.LGreCo("topk:density=0.05+ef", every=6),
        "accordion": lambda: nb.Accordion("topk:density=0.05+ef", "topk:density=0.2+ef", every=5),
        "kmeans": lambda: nb.KMeans("qsgd:bits=4+ef", every=6),
        "global topk": lambda: nb.GlobalTopK(0.05, every=6),
    }[name]()
    return train_ddp(rank, world_size, policy, {})


def pass_boundaries(rank, world_size, forward, backward):
    torch.manual_seed(0)
    boundary = nb.Boundary(forward, backward, microbatches=2)
    model = nn.Sequential(nn.Linear(10, 24), boundary, nn.GELU(), nn.Linear(24, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    digest = Digest()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step % 4)
        x, y = torch.randn(8, 10, generator=generator), torch.randn(8, 8, generator=generator)
        boundary.set_epoch(step // 4)
        optimizer.zero_grad()
        for at in range(2):
            boundary.samples = torch.arange(4) + 4 * at + 8 * (step % 4)
            part = slice(4 * at, 4 * at + 4)
            (model(x[part]) - y[part]).square().mean().backward()
        digest.add(*(p.grad for p in model.parameters()))
        optimizer.step()
    return {"gradients": str(digest), "state": of_state(boundary.state_dict())}


def run_stages(rank, world_size, forward, backward):
    from torch.distributed.pipelining import Schedule1F1B

    torch.manual_seed(0)
    parts = [nn.Linear(10, 24), nn.Sequential(nn.GELU(), nn.Linear(24, 24)), nn.Sequential(nn.GELU(), nn.Linear(24, 8))]
    part = parts[rank]
    stage = nb.CompressedStage(part, rank, world_size, torch.device("cpu"), forward=forward, backward=backward)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, y: (out - y).square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    digest = Digest()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 10, generator=generator), torch.randn(8, 8, generator=generator)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            schedule.step(target=y)
        else:
            schedule.step()
        digest.add(*(p.grad for p in part.parameters()))
        optimizer.step()
    return {"gradients": str(digest)}


def save_activations(rank, world_size, name, bits):
    torch.manual_seed(0)
    model, x = _ACTIVATION_MODELS[name]()
    digest = Digest()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    context = contextlib.nullcontext() if bits is None else nb.compress_activations(model, bits)
    for step in range(STEPS // 2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with context:
            loss = model(x).float().square().mean()
        loss.backward()
        digest.add(loss, *(p.grad for p in model.parameters() if p.grad is not None))
        optimizer.step()
    return {"gradients": str(digest)}


def _vit(fused):
    return activation_models.ViT(fused), torch.randn(4, 3, 16, 16)


def _mlp():
    return nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.SiLU(), nn.Dropout(0.2),
        nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8),
    ), torch.randn(32, 64)  # fmt: skip


def _convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.GroupNorm(4, 16), nn.Hardswish(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(256, 10),
    ), torch.randn(4, 3, 16, 16)  # fmt: skip


_ACTIVATION_MODELS = {
    "vit": lambda: _vit(True),
    "vit step by step": lambda: _vit(False),
    "mlp": _mlp,
    "convolutions": _convolutions,
}


def average_coded(rank, world_size, options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 5))
    coded = nb.CodedDataParallel(model, transport="broadcast", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digest = Digest()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 + step)
        x, y = torch.randn(18, 12, generator=generator), torch.randint(5, (18,), generator=generator)
        optimizer.zero_grad()
        x, y = coded.split(x, y)
        nn.functional.cross_entropy(coded(x), y).backward()
        digest.add(*(p.grad for p in model.parameters()))
        optimizer.step()
    stats = coded.stats().total
    return {"averages": str(digest), "bytes": f"{stats.sent_bytes}"}


def cases():
    """(place, name, function, world size, arguments) of everything."""
    for spec in GRADIENTS:
        yield "ddp", spec, train_ddp, WORLD_SIZE, (spec, {})
    for spec, options in WITH_OPTIONS:
        yield "ddp", f"{spec} {options}", train_ddp, WORLD_SIZE, (spec, options)
    for policy in ("lgreco", "lgreco of topk", "accordion", "kmeans", "global topk"):
        yield "ddp", policy, train_policy, WORLD_SIZE, (policy,)
    for forward, backward in BOUNDARIES:
        yield "pipeline", f"boundary {forward} / {backward}", pass_boundaries, 1, (forward, backward)
    for forward, backward in BOUNDARIES[1:6]:
        yield "pipeline", f"stage {forward} / {backward}", run_stages, WORLD_SIZE, (forward, backward)
    for name in _ACTIVATION_MODELS:
        for bits in ACTIVATIONS:
            yield "activations", f"{name} in {bits} bits", save_activations, 1, (name, bits)
    for options in ({"redundancy": 1}, {"redundancy": 2}, {"redundancy": 2, "bits": 16}, {"redundancy": 2, "bits": 8}):
        yield "coded", str(options), average_coded, WORLD_SIZE, (options,)


def collect(places):
    digests = {}
    for place, name, function, size, arguments in cases():
        if places and place not in places:
            continue
        begin = time.perf_counter()
        ranks = run_ranks(function, size, *arguments, timeout_s=300.0)
        digests[f"{place}: {name}"] = {f"rank {rank}": found for rank, found in enumerate(ranks)}
        print(f"{time.perf_counter() - begin:6.1f} s  {place}: {name}", flush=True)
    return digests


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", choices=["ddp", "pipeline", "activations", "coded"], default=[])
    options = parser.parse_args()
    found = collect(options.only)
    if options.what == "record":
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"recorded {len(found)} cases")
        return 0
    expected = json.loads(options.file.read_text())
    different = 0
    for name, ranks in found.items():
        if name not in expected:
            print(f"new: {name}")
        elif ranks != expected[name]:
            different += 1
            parts = sorted(
                {key for rank in ranks for key in ranks[rank] if ranks[rank][key] != expected[name][rank].get(key)}
            )
            print(f"DIFFERENT: {name}: {', '.join(parts)}")
    print(f"{different} of {len(found)} cases differ" if different else f"equal: {len(found)} cases")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
