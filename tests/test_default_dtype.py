"""``torch.set_default_dtype`` changes nothing: each tensor says what its elements are.

Models and data are float32 here, and made before the default is another one, as those of users are who load them.
"""

from __future__ import annotations

import ast
import contextlib
import os
from pathlib import Path

import pytest
import torch

import narrowband as nb
from tests import test_default_device as runs
from tests.ranks import run_ranks


@contextlib.contextmanager
def default(dtype):
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


def by_both(dtype, run, *args):
    """What ``run`` returns under this default, and under float32. In this order, so that what is done once in a process
    is done under the other one.
    """
    found = []
    for each in (dtype, torch.float32):
        torch.manual_seed(0)
        found.append(run(lambda each=each: default(each), *args))
    return found


def gradients(rank, world_size, kernels, dtype):
    os.environ["NARROWBAND_KERNELS"] = kernels
    cases = [*((spec, {}) for spec in runs.GRADIENTS), *runs.WITH_OPTIONS]
    return {f"{spec} {options}": by_both(dtype, runs.under_ddp, spec, rank, options) for spec, options in cases}


@pytest.mark.parametrize(("kernels", "dtype"), [("", torch.float64), ("reference", torch.bfloat16)])
def test_gradients_under_ddp(kernels, dtype):
    runs.assert_equal(run_ranks(gradients, 2, kernels, dtype, timeout_s=120.0, fresh=True))


def averages(rank, world_size):
    found = {
        "averager": by_both(torch.bfloat16, runs.by_averager, rank),
        "times": by_both(torch.bfloat16, runs.times_of_buckets, rank),
    }
    for spec, options in runs.UPDATES:
        found[f"updates {spec} {options}"] = by_both(torch.bfloat16, runs.updates, rank, spec, options)
    return found | {"shards": by_both(torch.bfloat16, runs.shards, rank)}


def test_averages_updates_and_shards():
    runs.assert_equal(run_ranks(averages, 2, fresh=True))


def saved(rank, world_size, cases):
    return {str(options): by_both(torch.float64, runs.activations, options) for options in cases}


def test_activations():
    cases = [{"bits": 8}, {"bits": 4, "rounding": "stochastic"}, {"bits": 2}]
    runs.assert_equal(run_ranks(saved, 1, cases, fresh=True))


def pipelines(rank, world_size):
    found = {}
    for spec in ("topk:density=0.2+ef21", "qsgd:bits=6+aq-sgd", "topk:density=0.2,scope=sample"):
        found[f"boundary {spec}"] = by_both(torch.bfloat16, runs.in_one_place, spec)
        found[f"stages {spec}"] = by_both(torch.bfloat16, runs.in_stages, rank, spec)
    return found


def test_pipelines():
    runs.assert_equal(run_ranks(pipelines, 2, fresh=True))


def coded(rank, world_size):
    cases = {"shuffled": (True, {}), "in order": (False, {"bits": 16})}
    return {name: by_both(torch.float64, runs.coded, *case) for name, case in cases.items()}


def test_coded_data_parallelism():
    runs.assert_equal(run_ranks(coded, 3, fresh=True))


# ---- in the source ---------------------------------------------------------------------------------------------------

SOURCE = Path(nb.__file__).parent

#: Those whose integers are int64 whatever the default is.
OF_INTEGERS = {"randint", "randperm", "tril_indices", "triu_indices"}


def without_dtype(source):
    """The lines on which a tensor is made of which nothing says what its elements are."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name), keywords=keywords):
                if name in runs.CONSTRUCTORS - OF_INTEGERS and not any(k.arg == "dtype" for k in keywords):
                    found.append(node.lineno)
    return found


def test_what_has_no_dtype_is_found():
    source = """
import torch

x = torch.empty(3, device="cpu")
y = torch.tensor([1], dtype=torch.int32, device=x.device), torch.randperm(3)
z = torch.zeros_like(torch.full((2,), 1.0)), x.new_empty(3)
"""
    assert sorted(without_dtype(source)) == [4, 6]


def test_every_tensor_says_its_dtype():
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in runs.PROGRAMS]
    assert len(files) > 100
    found = {f"{path}:{line}" for path in files for line in without_dtype(path.read_text())}
    assert not found
