"""Counts the instructions of loops for NVIDIA GPUs, without a GPU.

A GPU is held up by its memory or by its instructions. An H100 issues 132 multiprocessors · 128 threads · 1.755 GHz = 30
billion instructions of threads per millisecond, while its memory moves 3.35 GB: 8.9 for each byte. An H200 with its
4.8 GB has 6.2. A loop with more instructions for each byte that it has to move is held up by instructions.

Loops are compiled for the tensors of `narrowband bench kernels` (8 million elements), for several tensors with error
feedback, and for saved activations of a transformer in bfloat16. An instruction is counted once: where a loop comes
back to it, a row says so, and its count is too low. What follows the loop's end, such as divisions of rare numbers, is
not counted.

.venv/bin/python -m benchmarks.instructions --json benchmarks/results/kernels-instructions.json
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # of the tests' environment; read when Triton is imported

import torch
import triton
import triton.backends.nvidia
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from narrowband import kernels
from narrowband.bench.loops import LOOPS, Data
from narrowband.errors import PayloadError
from narrowband.kernels import Affine, Findings, Rows, Standard
from narrowband.kernels.backends import Backend
from narrowband.report.record import provenance, write_json

#: Files of loops.
FAMILIES = (
    "candidates", "checksums", "common", "compensation", "fixed", "kept", "levels", "lowrank", "masks", "mixed",
    "momentum", "quantized", "rotated", "rows", "selection", "shares", "sparse", "stores",
)  # fmt: skip

_TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip

#: Elements of the tensors, and of a batch of tokens of a transformer with 768 features.
_NUMEL, _TOKENS = 1 << 23, 8192


def type_of(value: Any) -> str:
    """The type of an argument, as Triton writes it."""
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compiled(loop: Any, arguments: tuple[Any, ...], constants: dict[str, Any], capability: int, warps: int) -> Any:
    """Compile a loop as a launch with these arguments would."""
    names = [name for name in loop.arg_names if name not in constants]
    given = dict(zip(names, arguments, strict=True))
    types = {name: type_of(value) for name, value in given.items()} | dict.fromkeys(constants, "constexpr")
    plain = {parameter.name for parameter in loop.params if parameter.do_not_specialize}
    even = {
        (loop.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, value in given.items()
        if name not in plain and not isinstance(value, float)
        if (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0
    }
    source = ASTSource(fn=loop, signature=types, constexprs=constants, attrs=even)
    options = {"enable_fp_fusion": False, "num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def told_of(cubin: bytes, tool: str, *flags: str) -> str:
    """What a tool of NVIDIA's says about machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = Path(triton.backends.nvidia.__path__[0]) / "bin" / tool
        return subprocess.run([path, *flags, file.name], capture_output=True, text=True, check=True).stdout


def instead_of_running(hook: Callable[..., None]) -> None:
    """From now on, where a wrapper would start a loop, call ``hook`` with it. Nothing is computed."""
    torch.empty = torch.zeros  # what is read should be possible
    for family in (*FAMILIES, "launching"):  # which starts those of several tensors
        importlib.import_module(f"narrowband.kernels.cuda.{family}").run = hook


def _row(name: str, numel: int, nbytes: float | None, loop: Any, programs: int, compiled: Any) -> dict[str, Any]:
    """Count a launch."""
    told = told_of(compiled.asm["cubin"], "nvdisasm", "-c")
    used = told_of(compiled.asm["cubin"], "cuobjdump", "-res-usage")
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);|^(\.L_x_\d+):", told, re.MULTILINE)
    labels: set[str] = set()
    count, loops = 0, False
    for instruction, label in lines:
        labels.add(label)
        count += bool(instruction)
        loops |= any(f"`({at})" in instruction for at in labels if at)
        if instruction.strip() == "EXIT":
            break
    warps = compiled.metadata.num_warps
    each = count * 32 * warps * programs / numel
    return {
        "loop": name, "launch": loop.__name__, "programs": programs, "warps": warps,
        "registers": int(re.search(r"REG:(\d+)", used)[1]), "stack_bytes": int(re.search(r"STACK:(\d+)", used)[1]),
        "instructions": count, "comes_back": loops, "per_element": round(each, 2),
        "bytes_per_element": None if nbytes is None else round(nbytes / numel, 4),
        "per_byte": None if nbytes is None else round(each * numel / nbytes, 2),
    }  # fmt: skip


def _several(cuda: Any, bits: int, scale: str) -> tuple[int, float, Callable[[], object]]:
    """Quantize several tensors with error feedback: reads and writes a gradient and a residual."""
    x, residual = torch.zeros(_NUMEL), torch.zeros(_NUMEL)
    nbytes = kernels.packed_nbytes(_NUMEL, bits, 128) + _NUMEL // 128 * (8 if scale == "minmax" else 4)
    out = torch.zeros(nbytes, dtype=torch.uint8)

    def body() -> None:
        with Findings(x.device).noting(Findings.OWN):
            cuda.quantize_all(
                [x], [out], bits=bits, group=128, scale=scale, stochastic=True, seeds=[1], residuals=[residual]
            )

    return _NUMEL, 4 * x.nbytes + nbytes, body


def _mean(cuda: Any, bits: int, ranks: int) -> tuple[int, float, Callable[[], object]]:
    nbytes = kernels.packed_nbytes(_NUMEL, bits, 128) + _NUMEL // 16
    payloads, out = torch.zeros(ranks, nbytes, dtype=torch.uint8), torch.zeros(_NUMEL)
    form = {"bits": bits, "group": 128, "scale": "minmax"}
    return (
        _NUMEL,
        out.nbytes + payloads.nbytes,
        lambda: cuda.dequantize_means(payloads, [slice(0, nbytes)], [out], **form),
    )


def _saved(
    cuda: Any, groups: int, inner: int, bits: int, *, norm: bool, decode: bool
) -> tuple[int, float, Callable[[], object]]:
    """Quantize or decode saved activations in bfloat16, of a normalization if ``norm``."""
    rows, width = Rows(1, _TOKENS, groups, inner), groups * inner
    x, codes = torch.zeros(_TOKENS, width, dtype=torch.bfloat16), torch.zeros(rows.nbytes(bits), dtype=torch.uint8)
    known, lines, columns = torch.ones(2, groups), torch.zeros(_TOKENS), torch.zeros(width)

    def quantize() -> None:
        cuda.quantize_rows_adapting(
            x, codes, rows, known, 0.9, torch.zeros(1), drift=0.02, jump=4.0, bits=bits, stochastic=True,
            standard=Standard(lines, lines, width) if norm else None,
        )  # fmt: skip

    def restore() -> None:
        affine = Affine(columns, columns, width) if norm else None
        cuda.dequantize_rows(codes, x, rows, known, bits=bits, affine=affine)

    return rows.numel, x.nbytes + codes.nbytes, restore if decode else quantize


def _cases(cuda: Any, words: list[str]) -> Iterator[tuple[str, Callable[[], tuple[int, float | None, Any]]]]:
    """Names of cases, and how to make (elements, the bytes that have to be moved, what launches loops)."""
    data = Data(_NUMEL, 0)

    def shared(maker: Any) -> tuple[int, float | None, Any]:
        made = maker(data, cuda)
        return _NUMEL, made.nbytes, lambda: made.body(0)

    cases: dict[str, Callable[[], tuple[int, float | None, Any]]] = {
        name: functools.partial(shared, maker) for name, maker in LOOPS.items()
    }
    for bits, scale in ((8, "minmax"), (4, "minmax"), (2, "minmax"), (4, "absmax"), (1, "mean")):
        cases[f"ef-{scale}-{bits}bit-several"] = functools.partial(_several, cuda, bits, scale)
    for bits in (8, 4):
        cases[f"mean-of-4-{bits}bit-several"] = functools.partial(_mean, cuda, bits, 4)
    for kind, groups, inner in (("heads", 12, 64), ("mlp", 1, 3072), ("norm", 1, 768)):
        for bits, what in itertools.product((8, 4), ("quantize", "dequantize")):
            form = {"norm": kind == "norm", "decode": what == "dequantize"}
            cases[f"saved-{kind}-bf16-{bits}-{what}"] = functools.partial(_saved, cuda, groups, inner, bits, **form)
    return ((name, case) for name, case in cases.items() if _is_meant(words, name))


def _is_meant(words: list[str], loop: str, launch: str | None = None) -> bool:
    """Whether a loop, or one of its launches, is among those that words name."""
    for word in words:
        own, both, its = word.partition("/")
        if loop == own and launch in (its, None) if both else word in loop:
            return True
    return not words


def measured(capability: int, words: list[str], *, progress: bool = False) -> list[dict[str, Any]]:
    """Rows of all launches of the loops whose names have one of these words; of all loops if there is none.

    A word such as ``sign-encode/_quantize_whole`` names one launch alone.
    """
    cuda, rows = Backend("narrowband.kernels.cuda"), []
    now: list[Any] = []

    def count(loop: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
        del constants["on"]
        if now and programs and _is_meant(words, now[0], loop.__name__):
            rows.append(_row(*now, loop, programs, compiled(loop, arguments, constants, capability, num_warps)))

    instead_of_running(count)
    cases = list(_cases(cuda, words))
    for name, case in track(cases, "Compiling", disable=not progress, transient=True):
        now.clear()
        numel, nbytes, body = case()
        now[:] = name, numel, nbytes
        try:
            body()
        except (PayloadError, RuntimeError, ValueError, IndexError):  # nothing was computed
            continue
    return rows


def main() -> None:
    """Count, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="80: A100; 89: RTX 40; 90: H100 and H200 (default)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only loops with such a word in the name, or LOOP/LAUNCH"
    )
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    given = parser.parse_args()
    began = provenance(0, ["python", "-m", "benchmarks.instructions", *sys.argv[1:]])
    rows = measured(given.capability, given.only, progress=sys.stderr.isatty())
    print(f"{'loop':38}{'launch':24}{'registers':>10}{'each element':>14}{'each byte':>11}")
    for row in rows:
        each = "-" if row["per_byte"] is None else f"{row['per_byte']:.1f}"
        more = " and more: comes back" if row["comes_back"] else ""
        print(f"{row['loop']:38}{row['launch']:24}{row['registers']:>10}{row['per_element']:>14.1f}{each:>11}{more}")
    if given.json is not None:
        config = {"capability": given.capability, "only": given.only, "triton": triton.__version__}
        write_json(given.json, began | {"config": config, "rows": rows})


if __name__ == "__main__":
    main()
