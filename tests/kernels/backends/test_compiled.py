"""Triton's loops become machine code for GPUs, also where there is no GPU, and it rounds as the reference does."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from narrowband import kernels
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


#: The most instructions for each element or, where a loop comes back, in all; by loops' and launches' names. Of what a
#: GPU is held up by, this is the part that can be counted without one. Triton 3.6 and 3.9 keep within these limits.
FEW = {
    ("uniform-4bit-stochastic-encode", "_quantize_whole"): 26, ("sign-encode", "_quantize_whole"): 11,
    ("uniform-2bit-stochastic-encode", "_quantize_whole"): 26, ("ef-minmax-4bit-several", "_quantize_segments"): 36,
    ("saved-mlp-bf16-8-dequantize", "_dequantize"): 13, ("saved-norm-bf16-8-dequantize", "_dequantize"): 16,
    ("saved-heads-bf16-8-quantize", "_quantize_group"): 660, ("saved-norm-bf16-8-quantize", "_quantize_group"): 710,
    ("topk-exact-select", "_gather"): 520, ("mean-of-4-4bit-several", "_mean_segments"): 480,
    ("uniform-4bit-decode-accumulate", "_dequantize_whole"): 10, ("residual-keep-8", "_in_8"): 17,
}  # fmt: skip


def all_compiled(*form: str) -> tuple[str, dict[str, list[str]]]:
    """(what was printed about instructions, loop → what is wrong with its machine code)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.backends.compiled", *form]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert not done.returncode, done.stderr[-3000:]
    printed, _, found = done.stdout.rstrip().rpartition("\n")
    return printed, json.loads(found)


def families_of_loops() -> set[str]:
    """Names of files of loops."""
    without = {"groups", "launching", "outliers", "sources", "tables"}  # have no loops of their own
    return {path.stem for path in Path(kernels.__file__).parent.glob("cuda/[a-z]*.py")} - without


def loops_of(family: str) -> set[str]:
    """Names of all loops that a file's wrappers launch."""
    source = inspect.getsource(importlib.import_module(f"narrowband.kernels.cuda.{family}"))
    pattern = r"\b(?:run|_below|\w+\.run(?:_each|_rows)?|Launch)\(\s*(_\w+)[,)]"
    return {f"{family}.{name}" for name in re.findall(pattern, source)}


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """Of the GPU that loops are tuned for: what was printed, what was found, and rows of loops' instructions."""
    record = tmp_path_factory.mktemp("instructions") / "record.json"
    printed, found = all_compiled("90", "--json", str(record), "--only", *map("/".join, FEW))
    return printed, found, json.loads(record.read_text())["rows"]


@pytest.mark.parametrize("form", ["90", *thorough("90 every", "80 every")])
def test_every_loop_compiles_for_a_gpu_rounds_every_operation_and_needs_little_stack(form, request):
    found = request.getfixturevalue("usual")[1] if form == "90" else all_compiled(*form.split())[1]
    assert not {loop: inexact for loop, inexact in found.items() if inexact}
    families = {loop.partition(".")[0] for loop in found}
    assert families == families_of_loops()
    for family in families:
        assert loops_of(family) == {loop.partition(" ")[0] for loop in found if loop.startswith(family)}


def test_no_function_of_tritons_returns_none():
    """Triton 3.6, which comes with PyTorch 2.11, compiles no call of one; newer versions do."""
    seen = 0
    for path in Path(kernels.__file__).parent.glob("cuda/[a-z]*.py"):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
                continue
            if ast.unparse(function.decorator_list[0]).startswith("functools."):
                continue
            seen += 1
            returned = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Return)]
            assert "return None" not in returned, f"{path.name}: {function.name}"
    assert seen > 100


def test_loops_have_few_instructions(usual):
    printed, _, rows = usual
    found = {
        (row["loop"], row["launch"]): row["instructions" if row["comes_back"] else "per_element"] for row in rows
    }  # fmt: skip
    assert found.keys() == FEW.keys()
    assert not {names: count for names, count in found.items() if count > FEW[names]}
    assert "_quantize_whole" in printed
