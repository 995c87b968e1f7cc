from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from narrowband.bench import kernels
from narrowband.bench.kernels import Config, count, loops, run
from narrowband.bench.loops import LOOPS, Data
from narrowband.errors import UnsupportedError
from narrowband.kernels.backends import Backend
from tests.kernels.backends.common import assert_same
from tests.thorough import thorough

NUMEL = 5000

#: Other programs read these names.
PUBLISHED = {
    "uniform-4bit-stochastic-encode",
    "uniform-4bit-decode-accumulate",
    "uniform-8bit-nearest-encode",
    "qsgd-4bit-encode",
    "topk-sampled-select",
    "topk-exact-select",
    "ef-topk-encode",
    "elias-fano-encode",
    "elias-fano-decode",
    "sparse-accumulate",
    "fixed-quantize",
    "fixed-encode",
    "fixed-decode",
    "fixed-dequantize",
    "aq-sgd-send",
    "aq-sgd-receive",
    "activation-extremes",
    "activation-quantize-8",
    "activation-quantize-4",
    "activation-quantize-extremes-8",
    "activation-quantize-extremes-4",
    "activation-dequantize-8",
    "activation-dequantize-4",
    "activation-mask",
    "activation-apply-mask",
    "activation-pool-places",
    "activation-pool-positions",
}


def test_every_loop_runs_on_every_backend(monkeypatch):
    monkeypatch.setattr(kernels, "_REST_S", 0.0)  # the times are nobody's
    config = Config(numel=NUMEL, backend="all", repeats=1, baselines=True)
    rows = list(run(config))
    assert len(rows) == count(config)
    assert set(loops()) >= PUBLISHED
    assert {(row["loop"], row["backend"]) for row in rows} >= {
        (loop, backend) for loop in loops() for backend in ("cpu", "reference")
    }
    others = {"bitsandbytes"} if find_spec("bitsandbytes") else set()
    assert {row["backend"] for row in rows} == {"cpu", "reference", "torch", *others}
    for row in rows:
        assert row["numel"] == NUMEL
        assert row["ms"] > 0
        assert row["ratio_to_copy"] == pytest.approx(row["ms"] / row["copy_ms"])


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "name", [name for name in LOOPS if not name.startswith("orthonormalize")] + thorough("orthonormalize-32x4096")
)  # whose interpretation takes long, and which tests of its own compare with the reference
def test_every_loop_does_the_same_on_tritons_backend(name):
    """On the CPU, in Triton's interpreter."""
    outcomes = []
    for backend in ("cuda", "reference"):
        data = Data(1024, 0)
        loop = LOOPS[name](data, Backend(f"narrowband.kernels.{backend}"))
        if loop.restore is not None:
            loop.restore()
        outcomes.append([loop.body(1), data.y])
    if name.startswith("orthonormalize"):  # whose sums have an order of the backend's own
        (own, y), (reference, expected) = outcomes
        torch.testing.assert_close([own, y], [reference, expected], rtol=1e-4, atol=1e-5)
    else:
        assert_same(*outcomes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(UnsupportedError, match="this build of torch finds no GPU"):
        next(run(Config(numel=NUMEL, device="cuda")))


def test_loops_can_be_chosen():
    rows = list(run(Config(numel=NUMEL, repeats=2, loops=("all-finite", "group-minmax"))))
    assert [row["loop"] for row in rows] == ["all-finite", "group-minmax"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numel": 10}, "numel=10"),
        ({"numel": 2**31}, "numel=2147483648"),
        ({"repeats": 0}, "repeats=0"),
        ({"backend": "gpu"}, "backend='gpu'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"loops": ("topk",)}, "unknown loop topk; there are: .*topk-exact-select"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Config(**arguments)
