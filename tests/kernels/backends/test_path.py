"""The whole way of a gradient over Triton's loops: hook, engine, payload, average."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from narrowband.averaging import step as steps
from narrowband.averaging import warmup
from narrowband.collectives import exchange
from narrowband.kernels import backends
from tests.gradients.training import compress, flat, loss_of, sgd, train, wrap
from tests.interpreter import hasten
from tests.ranks import run_ranks
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


SPECS = (
    "qsgd:bits=4",
    "uniform:bits=3+ef",
    "eden:bits=2+ef",
    "topk:density=0.1+ef:store=int8",
    "dgc:density=0.1,nesterov=true",
    "topk:density=0.1,values=int8+ef:store=bf16",
    "dgc:density=0.1,store=int8,clip=2",
    "uniform:bits=3+ef21",
    "uniform:bits=5+ef:decay=0.9",
    "powersgd:rank=2",
    "powersgd:rank=2,halves=1",
    "topk:density=0.2+ef",
)

#: Further combinations of what those have.
MORE = ("dgc:density=0.1,values=fp16,masking=false", "uniform:bits=5+ef:store=int8", "dgc:density=0.2")

#: What is encoded once more by its owners, or added up by them.
COLLECTIVES = {
    "uniform:bits=5+ef:decay=0.9": "scatter_reduce", "topk:density=0.2+ef": "sparse_reduce",
    "dgc:density=0.2": "sparse_reduce",
}  # fmt: skip


def small():
    """Two matrices to compress, and biases that travel dense: the interpreter takes its time."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(24, 20), torch.nn.Tanh(), torch.nn.Linear(20, 8))


def trained(rank, world_size, package, specs):
    """Spec → parameters, residuals and losses after some steps on the CPU, and whose loops these were. In one step a
    gradient of one rank is inf, and no optimizer uses the averages. With Triton's loops, steps are decided by what the
    loops note.
    """
    hasten()
    backends.PACKAGES["cpu"] = package
    exchange.ASYNCHRONOUS = {"cpu"}
    steps.AHEAD = {"cpu"} if package.endswith("cuda") else set()
    backends._chosen.clear()
    found = {}
    for spec in specs:
        # The interpreter takes its time, and set-up runs what training runs; some of it shows that it does.
        warmup._SIDES = (32,) if spec.startswith("uniform:bits=3") else ()
        model = wrap(small())
        handle = compress(model, spec, min_numel=64, collective=COLLECTIVES.get(spec, "auto"))
        optimizer = sgd(model, 0.2)
        losses = train(model, rank, [0], optimizer)
        (loss_of(model, 1, rank) + (torch.inf * model.module[0].weight[0, 0] if rank else 0.0)).backward()
        losses += train(model, rank, [0], optimizer)
        if "ef" in spec or "dgc" in spec or "powersgd" in spec:
            assert handle.stats().total.skipped == 1, spec
        name = backends.backend_for("cpu").name
        residual = torch.cat([x.flatten() for x in handle.state_dict()["feedback"].values()] or [torch.zeros(1)])
        found[spec] = flat(model), residual, losses, name
        handle.remove()
    return found


def trained_twice(rank, world_size, specs):
    """With Triton's loops, and with the reference's."""
    return [trained(rank, world_size, f"narrowband.kernels.{name}", specs) for name in ("cuda", "reference")]


def on_ranks(specs):
    """What ranks find with Triton's loops, in rank order, and with the reference's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # on machines with a GPU, too: Triton asks as it is imported
        return list(zip(*run_ranks(trained_twice, 2, specs, fresh=True, timeout_s=300), strict=True))


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(SPECS)


@pytest.fixture(scope="module")
def ranks_of_more():
    return on_ranks(MORE)


@pytest.mark.parametrize("spec", [*(spec for spec in SPECS if not spec.startswith("powersgd")), *thorough(*MORE)])
def test_models_trained_by_tritons_loops_are_those_trained_by_the_reference(spec, request):
    ranks = request.getfixturevalue("ranks_of_more" if spec in MORE else "ranks")
    for own, theirs in zip(*ranks, strict=True):
        (parameters, residual, losses, name), (expected, waits, its, _) = own[spec], theirs[spec]
        assert name == "cuda"
        assert torch.equal(parameters, expected)
        assert torch.equal(residual, waits)
        assert losses == its
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.startswith("powersgd")])
def test_ranks_whose_factors_are_tritons_stay_equal_and_near_the_reference(spec, ranks):
    """Sums of a projection have an order of the backend's own, so only ranks of one backend have equal bits."""
    own, theirs = ([of_rank[spec] for of_rank in run] for run in ranks)
    assert own[0][3] == "cuda"
    assert torch.equal(own[0][0], own[1][0])
    torch.testing.assert_close(own[0][0], theirs[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own[0][1], theirs[0][1], rtol=1e-3, atol=1e-4)
    assert own[0][2][-1] < own[0][2][0]
