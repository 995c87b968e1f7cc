"""The whole way of a gradient over Triton's loops: hook, engine, payload, average."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from narrowband.averaging import warmup
from narrowband.kernels import backends
from tests.gradients.training import compress, flat, mlp, sgd, train, wrap
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks begin with Triton's interpreter, on machines with a GPU, too: it asks as it is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def trained(rank, world_size, spec, package, steps=6):
    """Parameters after some steps on the CPU, by the loops of a package."""
    backends.PACKAGES["cpu"] = package
    backends.choose_anew()
    warmup._SIDES = (32,)  # the interpreter takes its time
    model = wrap(mlp())
    handle = compress(model, spec, min_numel=64)
    losses = train(model, rank, [0] * steps, sgd(model, 0.2))
    name = backends.backend_for("cpu").name
    residual = torch.cat([x.flatten() for x in handle.state_dict()["feedback"].values()] or [torch.zeros(1)])
    return flat(model), residual, losses, name


SPECS = ["qsgd:bits=4", "uniform:bits=3+ef", "topk:density=0.1+ef:store=int8", "dgc:density=0.1,nesterov=true"]


@pytest.mark.parametrize("spec", SPECS)
def test_models_trained_by_tritons_loops_are_those_trained_by_the_reference(spec):
    own, theirs = (
        run_ranks(trained, 2, spec, f"narrowband.kernels.{name}", fresh=True, timeout_s=180)
        for name in ("cuda", "reference")
    )
    for (parameters, residual, losses, name), (expected, waits, its, _) in zip(own, theirs, strict=True):
        assert name == "cuda"
        assert torch.equal(parameters, expected)
        assert torch.equal(residual, waits)
        assert losses == its
        assert losses[-1] < losses[0]


def test_ranks_whose_factors_are_tritons_stay_equal_and_near_the_reference():
    """Sums of a projection have an order of the backend's own, so only ranks of one backend have equal bits."""
    own, theirs = (
        run_ranks(trained, 2, "powersgd:rank=2", f"narrowband.kernels.{name}", 3, fresh=True, timeout_s=180)
        for name in ("cuda", "reference")
    )
    assert own[0][3] == "cuda"
    assert torch.equal(own[0][0], own[1][0])
    torch.testing.assert_close(own[0][0], theirs[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own[0][1], theirs[0][1], rtol=1e-3, atol=1e-4)
    assert own[0][2][-1] < own[0][2][0]
