"""Compiles every Triton loop for a GPU, without one, and prints what the machine code must not hold or take, as JSON.

``python -m tests.kernels.backends.compiled CAPABILITY``, without ``TRITON_INTERPRET``. Wrappers are called with small
tensors, and where they would start a loop it is compiled instead: at least once with every dtype of every argument, and
if ``every`` is the second argument with all combinations of dtypes, constants and warps that it is called with.
Other arguments behind the capability are those of ``benchmarks.instructions``, which counts the instructions of some
loops first; what it compiles is looked at, too.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any

import torch

from benchmarks import instructions
from benchmarks.instructions import compiled, instead_of_running, told_of, type_of
from narrowband import kernels
from narrowband.errors import PayloadError
from narrowband.kernels import Affine, Findings, Rows, Standard, Windows
from narrowband.kernels.backends import Backend

cuda = Backend("narrowband.kernels.cuda")

#: Products that are added without being rounded, and divisions and roots that are only near.
_INEXACT = re.compile(r"fma\.rn\.f\d+|\w+\.approx\S*|div\.full\S*")

#: Bytes of a thread that its registers do not hold. A GPU sets them aside for as many threads as it can run at once,
#: an H100 for 270,000, and PyTorch's counters do not show it.
_STACK = 256


def main(capability: int, *, every: bool, counting: list[str]) -> None:
    found: dict[str, list[str]] = {}
    forms: dict[Any, set[Any]] = {}  # loop → what it has been compiled with

    def form_of(loop: Any, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int) -> set[Any]:
        names = [name for name in loop.arg_names if name not in constants]
        types = {name: type_of(value) for name, value in zip(names, arguments, strict=True)}
        whole = frozenset([*types.items(), *constants.items(), ("warps", num_warps)])
        return {whole} if every else {*types.items()}

    def look_at(loop: Any, arguments: tuple[Any, ...], constants: dict[str, Any], _: int, num_warps: int) -> Any:
        forms.setdefault(loop, set()).update(form_of(loop, arguments, constants, num_warps))
        binary = compiled(loop, arguments, constants, capability, num_warps)
        told = f"{loop.__module__.rpartition('.')[2]}.{loop.__name__} {constants}"
        wrong = _INEXACT.findall(binary.asm["ptx"])
        stack = int(re.search(r"STACK:(\d+)", told_of(binary.asm["cubin"], "cuobjdump", "-res-usage"))[1])
        if stack > _STACK:
            wrong.append(f"{stack} bytes of stack")
        found[told] = sorted({*found.get(told, ()), *wrong})  # of any dtypes
        return binary

    def compile_once(loop: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
        del programs, constants["on"]
        if not form_of(loop, arguments, constants, num_warps) <= forms.get(loop, set()):
            look_at(loop, arguments, constants, capability, num_warps)

    if counting:
        instructions.compiled = look_at
        sys.argv[1:] = ["--capability", str(capability), *counting]
        instructions.main()
    instead_of_running(compile_once)
    call_wrappers(every=every)
    print(json.dumps(found))


def call_wrappers(*, every: bool) -> None:
    """Call wrappers so that each loop is started, with small tensors on the CPU; what they return is of no interest."""
    x, half = torch.randn(5000), torch.empty(5000, dtype=torch.bfloat16)
    out = torch.zeros(20_000, dtype=torch.uint8)
    quantizers = [("minmax", 4, True), ("absmax", 8, True), ("l2", 3, True), ("mean", 1, False)]
    for scale, bits, stochastic in [*quantizers, ("minmax", 7, False)] if every else quantizers:
        cuda.quantize_groups(x, out, bits=bits, group=128, scale=scale, stochastic=stochastic)
        for group in (100, 128):
            cuda.dequantize_groups(out, x, bits=bits, group=group, scale=scale, weight=0.5, accumulate=stochastic)
    with Findings(x.device).noting(Findings.OWN):
        cuda.quantize_all(
            [x, x], [out[:3000], out[4000:7000]], bits=4, group=128, scale="minmax", stochastic=True, seeds=[1, 2],
            residuals=[x.clone(), x.clone()],
        )  # fmt: skip
    long = torch.randn(8192)
    cuda.quantize_groups(long, out, bits=8, group=8192, scale="minmax", stochastic=True)
    with Findings(x.device).noting(Findings.OWN):
        form: dict[str, Any] = {"bits": 5, "group": 8192, "scale": "minmax", "stochastic": True, "seeds": [1]}
        cuda.quantize_all([long], [out], residuals=[long.clone()], **form)
    cuda.quantize_all([x], [out], bits=3, group=128, scale="l2", stochastic=False, seeds=[1])
    for adds in (False, True):
        both, form = out[:6000].view(2, 3000), {"bits": 4, "group": 128, "scale": "minmax", "accumulate": adds}
        cuda.dequantize_means(both, [slice(0, 3000)], [x], **form)
    cuda.quantize_rotated(x, out, bits=3, group=512)
    with Findings(x.device).noting(Findings.OWN):
        both = [out[:3004], out[4000:7004]]
        cuda.quantize_rotated_all([x, x], both, bits=4, group=512, seeds=[1, 2], residuals=[x.clone(), x.clone()])
    for group in (512, 4096) if every else (512,):
        cuda.quantize_rotated(long, out, bits=8, group=group)
        cuda.dequantize_rotated(out, long, bits=8, group=group, accumulate=True)
    cuda.dequantize_rotated_means(out[:6000].view(2, 3000), [slice(0, 2564)], [x], bits=4, group=512)
    cuda.restore_all_if(torch.zeros(1, dtype=torch.int32), [x], [x])
    cuda.group_minmax(x, 8192)
    cuda.checksum(out[:-1])
    cuda.keep_in_16(x, half, seed=1)
    codes, exponents = torch.empty(5000, dtype=torch.int8), torch.empty(79, dtype=torch.int8)
    for seed in (1, None):
        cuda.keep_in_8(x, codes, exponents, seed=seed)
    former = torch.empty(5079, dtype=torch.uint8)
    cuda.keep_all([x, x], [(codes, exponents)] * 2, seeds=[1, 2], formers=[former] * 2, least=x[:2])
    cuda.keep_all([x[:4992]], [(codes[:4992], exponents[:78])], seeds=[1], formers=[former[:5070]])
    cuda.keep_all([x, x], [(half, None)] * 2, seeds=[1, 2], formers=[out[:10_000]] * 2)
    cuda.read_from_8(codes, exponents, x)
    cuda.read_all([(codes, exponents)] * 2, [x, x])
    cuda.all_finite(x)
    with Findings(x.device).noting(Findings.OWN):
        cuda.all_finite(x)
    cuda.restore_all_if(torch.zeros(1, dtype=torch.int32), [codes], [codes])
    for own, powers in ((codes, exponents), (half, None)):
        cuda.take_former_all_if(torch.zeros(1, dtype=torch.int32), [x], [own], [powers])
    cuda.poison_all_if(torch.zeros(2, dtype=torch.int32), [x, half, x.half(), x.double()])
    cuda.compensate(x, x.clone(), decay=0.9)
    cuda.difference(x, x.clone(), x.clone())
    cuda.take_difference(x, x.clone())
    at = torch.arange(0, 5000, 5, dtype=torch.int32)
    cuda.sparse_accumulate(x, at, x[: at.numel()].clone())
    payload = torch.zeros(kernels.elias_fano_nbytes(1000, 5000), dtype=torch.uint8)
    cuda.elias_fano_encode(at, 5000, payload)
    with contextlib.suppress(PayloadError):  # nothing was computed
        cuda.elias_fano_decode(payload, 1000, 5000)
    with Findings(x.device).noting(Findings.OWN):
        cuda.sparse_sum_all([x], torch.zeros(2, 8000, dtype=torch.uint8), [0], [1000])
        cuda.encode_topk(x, x.clone(), 1000, torch.zeros(4000 + payload.numel(), dtype=torch.uint8), subtract=True)
    rows, low = Rows(1, 25, 2, 100), torch.zeros(2)
    for y in (x, half):
        for bits in (8, 4, 2):
            cuda.quantize_rows(y, out[: rows.nbytes(bits)], rows, low, low + 1, bits=bits, stochastic=bits > 2)
            affines = [None, Affine(x, x, 200)]
            if bits == 8:
                affines += [Affine(x, None, 200), Affine(None, x, 200), Affine(x, x, 200, True)]
            for affine in affines:
                cuda.dequantize_rows(out[: rows.nbytes(bits)], y, rows, torch.zeros(2, 2), bits=bits, affine=affine)
        cuda.row_extremes(y, rows)
        for standard in (None, Standard(x, x, 200)):
            cuda.quantize_rows_adapting(
                y, out[: rows.nbytes(8)], rows, torch.ones(2, rows.groups), 0.9, torch.zeros(1), drift=0.02, jump=4.0,
                bits=8, stochastic=True, standard=standard, symmetric=standard is None,
            )  # fmt: skip
        cuda.quantize_rows_learning(
            y, out[: rows.nbytes(8)], rows, low.view(1, 2) + x[:2].view(2, 1), 0.9, bits=8, stochastic=True
        )
        cuda.mask_between(y, out[:625])
        cuda.apply_mask(out[:625], y, half)
        whole, lines = Rows(2, 13, 1, 128), Rows(1, 26, 1, 128)
        part, coded = y[: whole.numel], out[: whole.numel]
        cuda.quantize_rows(part, coded, whole, low, low + 1, bits=8, stochastic=True)
        cuda.dequantize_rows(coded, part, whole, torch.zeros(2, 2), bits=8)
        cuda.row_extremes(part, whole)
        cuda.quantize_rows_adapting(
            part, coded, lines, torch.ones(2, 1), 0.9, torch.zeros(1), drift=0.02, jump=4.0, bits=8, stochastic=True,
            standard=Standard(x, x, 128),
        )  # fmt: skip
    for symmetric, zeroed in ((True, False), (False, True), (False, False)):
        cuda.code_ranges(x[:18].view(2, 9), bits=8, symmetric=symmetric, zeroed=zeroed)
    cuda.learn_ranges(torch.zeros(2, 9), low.repeat(5)[:9], low.repeat(5)[:9], 0.9)
    windows, position = Windows(2, 10, 10, 1, 20, 3, (2, 2), (1, 1)), torch.zeros(200, dtype=torch.int64)
    cuda.pool_places(position, out[:200], windows)
    cuda.pool_positions(out[:200], position, windows)
    for dtype in (torch.int32, torch.int16, torch.int8):
        codes = torch.zeros(5000, dtype=dtype)
        cuda.fixed_quantize(x, codes, 0.5, 100)
        for into in (codes[:999], torch.zeros(999, dtype=torch.int32)):
            cuda.fixed_sum(codes, [0, 999, 7], into)
        cuda.fixed_decode(codes[:999], codes, [7], torch.zeros(999, dtype=torch.int32))
    cuda.fixed_dequantize(torch.zeros(999, dtype=torch.int32), x[:999], 0.1)
    table, values = torch.zeros(8, 300, dtype=torch.int32), torch.zeros(8, 300)
    shared = kernels.Shared(5000, 1, slice(0, 150), 0), kernels.Shared(5000, 2, slice(150, 300), 640)
    cuda.split_shares_all(shared, [at] * 2, [x[: at.numel()].clone()] * 2, table, values)
    cuda.add_shares_all([x, x.clone()], shared, table, values)
    cuda.elias_fano_encode_all([at] * 2, [5000] * 2, [payload] * 2)
    cuda.from_share(table, turn=1)
    for bits in (4, 2):
        cuda.levels_encode(x, out, bits=bits, group=256)
        cuda.levels_decode(out, 5000, bits=bits, group=256)
    p, q = torch.randn(4, 50), torch.randn(4, 100)
    for accumulate in (False, True):
        cuda.low_rank_product(x, p, q, weight=-1.0, accumulate=accumulate)
    cuda.compensate_project(x, x.clone(), q, p, sent=(p, q))
    cuda.compensate_project(x, x.clone(), torch.randn(20, 100), torch.randn(20, 50))
    cuda.low_rank_products([x, x], [p, p], [q, q])
    for sent in ((p, q), None):
        cuda.compensate_project_all([x, x], [x, x], [q, q], [p, p], sents=[sent, sent])
    for spares in ((), (torch.randn(4, 1000), torch.randn(4, 1000))):
        cuda.orthonormalize_all([torch.randn(2, 4, 1000)], spares, again=bool(spares))
    y, both = torch.zeros(1 << 20), [out[:4000], torch.zeros(80_000, dtype=torch.uint8)]
    with Findings(y.device).noting(Findings.OWN):  # with candidates and without
        cuda.encode_topk_all([y, y[:20_000]], [100, 18_000], both, residuals=[y, y[:20_000]])
        cuda.encode_topk_all([y, y[:900]], [100, 9], both, residuals=[y, y[:900]], least=y[:2])
        cuda.compensate_select_topk_all([y, y[:900]], [100, 9], both, residuals=[y, y[:900]])
        cuda.sparse_accumulate_all([x, x], [at, at], [x[:1000], x[:1000]])
        for parts, values in ((False, ()), (True, ()), (False, [y[:100], y[:9]])):
            cuda.encode_mixed_all([y, y[:900]], [y, y[:900]], [100, 9], both, parts=parts, values=values)
        several = [y, y[:20_000]]
        for nesterov in (False, True):
            for ks in ([100, 18_000], [100]):
                own = several[-len(ks) :]
                cuda.encode_momentum_topk_all(own, own, own, ks, both[-len(ks) :], momentum=0.9, nesterov=nesterov)
        cuda.encode_momentum_topk_all([y[:900]], [y[:900]], [y[:900]], [9], [out], momentum=0.9, masking=False)
        cuda.remember_all_if(torch.zeros(1, dtype=torch.int32), several, [at, at], [y[:80], y[:80]])
    for n in (1000, 5000, 20_000, 1 << 20):  # 4 warps, 16, several programs for a row, and candidates
        y = torch.zeros(n)
        cuda.select_topk(y, 100)
        cuda.compensate_select_topk(y, y, 100)
        for nesterov in (False, True) if n < 1 << 20 else (True,):
            cuda.momentum_topk(y, y, y, 100, momentum=0.9, nesterov=nesterov)
    cuda.select_topk(y, 100, sampled=True)
    cuda.select_threshold(y, 1.0)
    y = y[:20_000]
    for subtract in (False, True):
        cuda.encode_topk(y, y, 100, out, subtract=subtract, sampled=subtract)
    cuda.compensate_select_topk(y, y, 100, sampled=True)
    for nesterov in (False, True):
        cuda.momentum_topk(y, y, y, 100, momentum=0.9, nesterov=nesterov, sampled=True)
        cuda.forget(y, y, at, momentum=0.9, nesterov=nesterov, masking=nesterov)
    cuda.select_threshold(y, 1.0)
    cuda.randomk_indices(5000, 100, 1, torch.device("cpu"))
    cuda.check_indices(at, 5000)


if __name__ == "__main__":
    main(int(sys.argv[1]), every="every" in sys.argv[2:], counting=[word for word in sys.argv[2:] if word != "every"])
