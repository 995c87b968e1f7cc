"""With the reference's loops, ``NARROWBAND_KERNELS=reference``, gradients and updates are those of the fast loops."""

from __future__ import annotations

import pytest
import torch

import narrowband as nb
from narrowband.kernels import backends
from narrowband.kernels.backends import Backend
from tests.gradients.training import compress, flat, mlp, sgd, train, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

#: Specs whose bits depend on no sum, which each backend adds up in its own order; and others.
EXACT = ["topk:density=0.1+ef", "qsgd:bits=4", "uniform:bits=8+ef", "fp16", "dgc:density=0.1"]
CLOSE = ["eden:bits=2", "sign:bucket=64+ef", "powersgd:rank=2"]
MORE = [
    "topk:density=0.1,values=int8+ef21", "topk:density=0.2,values=int2,tile=8x8+ef", "threshold:value=0.01+ef",
    "randomk:density=0.2+ef", "topk:density=0.2+ef-mixed", "uniform:bits=4+ef:store=int8",
    "topk:density=0.1,select=sampled+ef",
]  # fmt: skip


def by_both(rank, world_size, specs, updates):
    """Parameters after some steps with the fast loops and with the reference's, by spec."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for backend in ("cpu", "reference"):
            patch.setitem(backends._chosen, "cpu", Backend(f"narrowband.kernels.{backend}"))
            for spec in specs:
                model = mlp() if updates else wrap(mlp())
                optimizer = sgd(model)
                if updates:
                    handle = nb.compress_updates(model, optimizer, spec, every=2, min_numel=64)
                else:
                    handle = compress(model, spec, min_numel=64)
                train(model, rank, range(4), optimizer)
                found.setdefault(spec, []).append(flat(model))
                handle.remove()
    return found


@pytest.mark.parametrize(
    ("specs", "updates"),
    [
        ([*EXACT, *CLOSE], False),
        ([spec for spec in (*EXACT, *CLOSE) if "dgc" not in spec], True),
        *thorough((MORE, False), (MORE, True)),
    ],
    ids=lambda value: {True: "updates", False: "gradients"}.get(value) if isinstance(value, bool) else None,
)
def test_a_model_trains_as_with_the_fast_loops(specs, updates):
    for found in run_ranks(by_both, 2, specs, updates):
        for spec, (fast, reference) in found.items():
            if spec in CLOSE:
                torch.testing.assert_close(
                    reference, fast, rtol=1e-4, atol=1e-5, msg=lambda text, spec=spec: f"{spec}: {text}"
                )
            else:
                assert torch.equal(reference, fast), spec
