"""How many times a call starts something on a GPU: each costs the host as much as the loop takes for a small tensor."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowband import kernels
from narrowband.kernels.backends import Backend

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

#: Operators that give memory, or another view of it, and start nothing.
_FREE = {"empty", "new_empty", "view", "slice", "select", "unbind", "as_strided", "alias", "detach"}
LONG, MEDIUM, SHORT = 1 << 20, 100_000, 10_000


class Operators(TorchDispatchMode):
    """Notes the operators of PyTorch that start something."""

    def __init__(self, started: list[str]) -> None:
        super().__init__()
        self._started = started

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        if name not in _FREE:
            self._started.append(name)
        return operator(*arguments, **(options or {}))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What a call starts: loops, which are not run, and operators. What the host would ask for is as it should be."""
    from narrowband.kernels.cuda import candidates, compensation, launching, momentum, rows, selection, sparse

    names: list[str] = []
    table = Backend("narrowband.kernels.cuda")

    def run(loop: Any, *_arguments: Any, **_options: Any) -> None:
        names.append(loop.__name__)

    for family in (candidates, compensation, launching, momentum, rows, selection, sparse):
        monkeypatch.setattr(family, "run", run)
    for family in (compensation, momentum):
        monkeypatch.setattr(family, "all_below", lambda _tops, _below: True)
    monkeypatch.setattr(sparse, "raise_if", lambda _damaged, _message: None)

    def call(name: str, *arguments: Any, **options: Any) -> list[str]:
        names.clear()
        with Operators(names):
            getattr(table, name)(*arguments, **options)
        return list(names)

    return call


@pytest.mark.parametrize(("n", "most"), [(LONG, 9), (MEDIUM, 8), (SHORT, 2)])
def test_top_k_with_error_feedback(started: Any, n: int, most: int) -> None:
    k = n // 1000
    x, out = torch.zeros(n), torch.empty(4 * k + -(-kernels.elias_fano_nbytes(k, n) // 4) * 4, dtype=torch.uint8)
    assert len(started("encode_topk", x, x.clone(), k, out, subtract=True)) <= most
    assert len(started("compensate_select_topk", x, x.clone(), k)) <= most
    assert len(started("momentum_topk", x, x.clone(), x.clone(), k, momentum=0.9)) <= most
    assert len(started("select_topk", x, k)) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_activations_are_taken_as_they_are(
    started: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loops that make codes and one that reads them; and of all that PyTorch does, memory for ranges."""
    monkeypatch.setattr(sys.modules[__name__], "_FREE", set())  # also what starts nothing takes the host some time
    rows = kernels.Rows(1, 400, 4, 64)
    x = torch.zeros(4, 100, 3, 256, dtype=dtype)[:, :, 1]  # 100 lines of 256 lie 768 apart, and so do the samples
    codes, ranges = torch.empty(rows.nbytes(8), dtype=torch.uint8), torch.ones(2, 4)
    options = {"drift": 0.02, "jump": 4.0, "bits": 8, "stochastic": True}
    loops = ["_quantize_group", "_quantize_group_again"]
    for standard in (None, kernels.Standard(torch.zeros(400), torch.ones(400), 256)):
        found = started(
            "quantize_rows_adapting", x, codes, rows, ranges, 0.9, torch.zeros(1), **options, apart=768,
            standard=standard,
        )  # fmt: skip
        assert sorted(found) == sorted([*loops, "empty", "as_strided"])
    for affine in (None, kernels.Affine(torch.ones(256), torch.zeros(256), 256)):
        out = torch.empty(4, 100, 256, dtype=dtype)
        assert started("dequantize_rows", codes, out, rows, ranges, bits=8, affine=affine) == ["_dequantize"]


def test_sparse_payloads(started: Any) -> None:
    k, out = LONG // 1000, torch.zeros(LONG)
    indices, payload = (
        torch.arange(k, dtype=torch.int32),
        torch.empty(kernels.elias_fano_nbytes(k, LONG), dtype=torch.uint8),
    )
    assert len(started("elias_fano_encode", indices, LONG, payload)) == 1
    assert len(started("elias_fano_decode", payload, k, LONG)) == 1 + 2  # a table
    assert len(started("sparse_accumulate", out, indices, torch.ones(k))) == 1
    assert len(started("check_indices", indices, LONG)) == 1
    payloads = torch.empty(5, 4 * k + payload.numel(), dtype=torch.uint8)
    assert len(started("sparse_sum_rows", out, payloads, k)) == 1 + 2 + 1 + 1 + 5  # zeros, and each part
    outs, begins = [torch.zeros(LONG) for _ in range(7)], [0] * 7
    assert len(started("sparse_sum_all", outs, payloads, begins, [k] * 7)) == 1 + 2 + 1 + 1 + 5  # of several


@pytest.mark.parametrize("several", [1, 7])
def test_quantized_payloads_of_tensors_whose_last_groups_are_short(started: Any, several: int) -> None:
    form: dict[str, Any] = {"bits": 4, "group": 128, "scale": "minmax"}
    xs = [torch.zeros(5001 + at) for at in range(several)]
    nbytes = [4 * -(-(8 * -(-x.numel() // 128) + kernels.packed_nbytes(x.numel(), 4, 128)) // 4) for x in xs]
    places = [slice(sum(nbytes[:at]), sum(nbytes[: at + 1])) for at in range(several)]
    payloads = torch.zeros(2, sum(nbytes), dtype=torch.uint8)
    with kernels.Findings(xs[0].device).noting(kernels.Findings.OWN):
        found = started(
            "quantize_all", xs, [payloads[0, place] for place in places], **form, stochastic=True, seeds=[1] * several,
            residuals=[x.clone() for x in xs],
        )  # fmt: skip
    table = "lift_fresh"
    assert found == [table, "_quantize_segments", table, "_quantize_rests"]
    found = started("dequantize_means", payloads, places, xs, **form)
    assert found == [table, "_mean_segments", table, "_mean_rests"]
