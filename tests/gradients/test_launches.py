"""What one step of a transformer starts on a GPU: each launch costs the host some µs, and an answer that it waits for
much more. Loops are not run; the CPU's tensors play those of a GPU.
"""

from __future__ import annotations

import pkgutil
from collections import Counter
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import narrowband as nb
from narrowband.averaging import core, warmup
from narrowband.averaging import step as steps
from narrowband.collectives import Engine, exchange
from narrowband.gradients.levels import TwoLevelCompression
from narrowband.kernels import backends, cuda
from tests.ranks import ranks_apart
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

#: As many tensors as the smallest GPT-2 has, a third as wide; and buckets of as many of them.
_WIDTH, _BLOCKS, _TOKENS, _PLACES, _BUCKET_MB = 256, 12, 16_752, 344, 25 / 3**2

#: Operators that give memory, or another view of it, and start nothing. Here ``zeros`` takes the place of ``empty``.
_FREE = {
    "zeros", "empty", "new_empty", "empty_like", "view", "slice", "select", "unbind", "as_strided", "alias", "detach",
    "split", "split_with_sizes", "transpose", "t", "permute", "_unsafe_view", "unsqueeze", "lift_fresh",
}  # fmt: skip


def _waits(name, arguments):
    """Whether the host waits for the device, as it has to know a number, or how many elements there are."""
    chosen = name == "index" and any(at is not None and at.dtype == torch.bool for at in arguments[1])
    return chosen or name in {"_local_scalar_dense", "nonzero", "masked_select", "unique"}


class _Operators(TorchDispatchMode):
    """Counts the operators of PyTorch that start something, or wait."""

    def __init__(self, started: Counter[str]) -> None:
        super().__init__()
        self._started = started

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        name = operator.overloadpacket.__name__
        if name not in _FREE:
            self._started["waits" if _waits(name, arguments) else "operators"] += 1
        return operator(*arguments, **(options or {}))


class _Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        d = _WIDTH
        self.tokens, self.places = nn.Parameter(torch.zeros(_TOKENS, d)), nn.Parameter(torch.zeros(_PLACES, d))
        pairs = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
        self.blocks = nn.ModuleList(
            nn.ModuleList([*(nn.Linear(*pair) for pair in pairs), nn.LayerNorm(d), nn.LayerNorm(d)])
            for _ in range(_BLOCKS)
        )
        self.norm = nn.LayerNorm(d)

    def forward(self):
        return sum(p.sum() for p in self.parameters())


def counted(rank, world_size, spec, nodes=None, dtype=torch.float32, collective="auto", measure=False):
    """What a step starts: loops, tables of tensors, operators, waits; once buckets have settled. With ``nodes``, what
    is done inside a node counts, too. With ``measure``, the step measures the error of compression.
    """
    started: Counter[str] = Counter()
    counting = [False]
    assert nb.compression(spec).codec.lost_share is not None  # is measured once, by loops that run
    # All are imported before anything is replaced: what one imports from another stays as it is.
    modules = {name: import_module(f"{cuda.__name__}.{name}") for _, name, _ in pkgutil.iter_modules(cuda.__path__)}
    launching, candidates = modules["launching"], modules["candidates"]
    families = [module for module in modules.values() if getattr(module, "run", None) is launching.run]
    plain_list, plain_table = torch.Tensor.tolist, launching._on_device
    plain_try, plain_reduce = Engine._try, TwoLevelCompression._reduce

    def run(loop, programs, *_arguments, **_options):
        if programs:
            started["loops"] += 1
            started[loop.__name__] += 1

    def table(numbers, device):
        started["tables"] += 1
        return plain_table(numbers, device)

    def counting_try(self, what):
        if not counting[0]:
            return plain_try(self, what)
        with _Operators(started):
            return plain_try(self, what)

    def counting_reduce(self, *arguments, **options):
        with _Operators(started) if counting[0] else nullcontext():
            plain_reduce(self, *arguments, **options)

    def tolist(self):
        started["waits"] += counting[0]
        return plain_list(self)

    with pytest.MonkeyPatch.context() as patch:
        for family in families:
            patch.setattr(family, "run", run)
        patch.setattr(torch.Tensor, "tolist", tolist)  # it calls no operator
        patch.setattr(torch, "empty", torch.zeros)  # what no loop has written should be possible
        patch.setattr(launching, "_on_device", table)
        patch.setattr(Engine, "_try", counting_try)
        patch.setattr(TwoLevelCompression, "_reduce", counting_reduce)
        patch.setattr(candidates, "LONG", candidates.LONG // 3**2)
        patch.setattr(exchange, "ASYNCHRONOUS", {"cpu"})
        patch.setattr(steps, "AHEAD", {"cpu"})
        patch.setitem(backends.PACKAGES, "cpu", "narrowband.kernels.cuda")
        patch.setattr(backends, "_chosen", {})
        patch.setattr(core, "warm_up", lambda *_, **__: None)
        patch.setattr(warmup, "use_all", lambda *_, **__: None)
        patch.setattr(core, "MEASURE_EVERY", 1 if measure else 50)
        model = DistributedDataParallel(_Transformer().to(dtype), bucket_cap_mb=_BUCKET_MB)
        handle = nb.compress_gradients(model, spec, min_numel=1024, nodes=nodes, collective=collective)
        for step in range(4):
            handle._total.relative_error = 0.0  # otherwise every step would measure it: there is none to be seen
            started.clear()
            counting[0] = step == 3
            model().backward()
        assert len(list(model.parameters())) == 148
        counting[0] = False
        assert not measure or len(handle.layer_stats()) == len(handle._errors) == 50
        handle.remove()
    return dict(started)


@pytest.fixture(scope="module")
def run():
    """Ranks that import the loops once, and keep what codecs measure with loops that are not run."""
    with ranks_apart() as ranks:
        yield ranks


#: Spec → the most loops, tables and operators of a step.
MOST = {
    "uniform:bits=4+ef": (17, 17, 40),
    "uniform:bits=8+ef21": (19, 19, 150),
    "uniform:bits=4+ef:store=int8": (43, 43, 40),
    "powersgd:rank=4": (132, 31, 65),
    "powersgd:rank=4,halves=1": (136, 30, 65),
    "powersgd:rank=4,halves=2": (145, 31, 110),
    "topk:density=0.01+ef": (110, 18, 45),
    "topk:density=0.01+ef21": (114, 21, 155),
    "topk:density=0.01+ef:store=int8": (136, 44, 45),
    "topk:density=0.01+ef:store=bf16": (123, 31, 60),
    "topk:density=0.01,values=int8+ef": (151, 59, 60),
    "topk:density=0.01,values=int8+ef:store=int8": (177, 85, 60),
    "eden:bits=3": (15, 15, 25),
    "eden:bits=1+ef": (17, 17, 40),
    "topk:density=0.01+ef-mixed": (201, 31, 45),
    "topk:density=0.01,values=int8+ef-mixed:sends=parts": (268, 98, 70),
    "dgc:density=0.01": (112, 20, 75),
    "dgc:density=0.01,nesterov=true": (112, 20, 77),
    "dgc:density=0.01,clip=1": (112, 20, 100),
    "dgc:density=0.01,store=int8": (136, 44, 111),
    "dgc:density=0.01,values=fp16": (125, 33, 222),
}


@pytest.mark.parametrize("spec", MOST)
def test_a_step_starts_little_and_waits_for_nothing(spec, run):
    (found,) = run(counted, 1, spec)
    loops, tables, operators = MOST[spec]
    assert found.get("waits", 0) == 0
    assert found["loops"] <= loops, found
    assert found["tables"] <= tables
    assert found["operators"] <= operators


def test_among_four_ranks_a_step_starts_little_more(run):
    """Owners encode their means: with one loop for all of a message, and for those of all owners. Ranks compare once
    what they are about to do.
    """
    found, *_ = run(counted, 4, "qsgd:bits=4")
    assert found["waits"] == 1
    assert found["loops"] == found["tables"] <= 57, found
    assert found["operators"] <= 162


def test_gradients_in_16_bits_cost_a_copy_each(run):
    (found,) = run(counted, 1, "qsgd:bits=4", None, torch.bfloat16)
    assert found.get("waits", 0) == 0
    assert found["loops"] == found["tables"] <= 15, found
    assert found["operators"] <= 90, found


def test_loops_for_one_tensor_take_no_table(run):
    """Those that read and store residuals in 8 bits start tensor by tensor where gradients have 16 bits."""
    (found,) = run(counted, 1, "uniform:bits=4+ef:store=int8", None, torch.bfloat16)
    assert found["_in_8"] == 50
    assert found["tables"] <= 53, found


def test_inside_of_nodes_nobody_waits_for_the_device(run):
    found, *_ = run(counted, 4, "uniform:bits=4+ef", 2)
    assert found["waits"] == 1  # for nodes to compare what they do


def test_payloads_as_long_as_the_data_asks_make_the_host_wait_twice_for_each_tensor(run):
    """For how many elements of each of 50 reach the threshold, and for how many have arrived; once for what is not
    finite in each of 13 buckets; and for the sizes of a message, its flag, and two vectors of small parameters.
    """
    (found,) = run(counted, 1, "threshold:value=0.001+ef")
    assert found["waits"] <= 2 * 50 + 13 + 4, found


@pytest.mark.parametrize(
    ("spec", "ranks", "dtype", "collective"),
    [
        ("qsgd:bits=4", 1, torch.float32, "auto"),
        ("topk:density=0.01,values=int8+ef:store=int8", 1, torch.float32, "auto"),
        ("dgc:density=0.01,values=fp16,store=int8", 1, torch.float32, "auto"),
        ("uniform:bits=8+ef21", 1, torch.float32, "auto"),
        ("topk:density=0.01+ef", 1, torch.bfloat16, "auto"),
        ("topk:density=0.01+ef", 2, torch.float32, "sparse_reduce"),
        *thorough(
            ("uniform:bits=4+ef", 2, torch.float32, "scatter_reduce"),
            ("topk:density=0.01+ef:store=bf16", 1, torch.float32, "auto"),
            ("dgc:density=0.01", 1, torch.float32, "auto"),
            ("fp16+ef", 1, torch.float32, "auto"),
        ),
    ],
)
def test_a_step_that_measures_the_error_does_not_wait_for_it(spec, ranks, dtype, collective, run):
    found, *_ = run(counted, ranks, spec, None, dtype, collective, True)
    assert found.get("waits", 0) == (ranks > 1), found  # for ranks to compare what they do


#: Spec → the most loops, tables and operators of a step whose elements are added up by two owners.
SUMS = {"topk:density=0.01+ef": (157, 38, 107), "topk:density=0.01+ef:store=int8": (172, 53, 107)}


@pytest.mark.parametrize("spec", SUMS)
def test_sums_of_owners_take_little_more_than_an_all_gather_and_wait_only_to_compare_steps(spec, run):
    found, *_ = run(counted, 2, spec, None, torch.float32, "sparse_reduce")
    loops, tables, operators = SUMS[spec]
    assert found["waits"] == 1  # for ranks to compare what they do
    assert found["loops"] <= loops, found
    assert found["tables"] <= tables
    assert found["operators"] <= operators


#: Spec → the most waits where the host has to know something of each tensor: how many elements reach a threshold, or
#: how many were delivered; and once for each of 13 buckets and some times for each message, what is not finite.
SUMS_KNOWN = {"topk:density=0.01,select=sampled+ef": 74, "dgc:density=0.01": 26}


@pytest.mark.parametrize("spec", SUMS_KNOWN)
def test_sums_of_owners_wait_where_the_host_has_to_know(spec, run):
    found, *_ = run(counted, 2, spec, None, torch.float32, "sparse_reduce")
    assert 1 < found["waits"] <= SUMS_KNOWN[spec], found
