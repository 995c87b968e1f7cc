"""Loops that are started without Triton's launcher reach the driver as they do with it: on a driver that only notes
launches, since there may be no GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.backends.test_compiled import families_of_loops, loops_of

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver and Triton's launcher need gcc"),
    pytest.mark.skipif(
        not Path(sysconfig.get_paths()["include"], "Python.h").exists(), reason="Triton's launcher needs Python.h"
    ),
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run :mod:`tests.kernels.backends.launched` with words, and return what it prints."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    if torch.version.hip is not None:
        pytest.skip("with PyTorch for AMD's GPUs, Triton itself launches every loop")
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 6):
        pytest.skip("PyTorch 2.11, the oldest one that is supported, brings Triton 3.6")
    folder = tmp_path_factory.mktemp("driver")
    source, include = Path(__file__).with_name("driver.c"), Path(nvidia.__path__[0], "include")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-I", include, "-o", folder / "libcuda.so.1"]
    subprocess.run([*command, source], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}", "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"), "CC": "gcc", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip

    def run(*words: str) -> Any:
        command = [sys.executable, "-m", "tests.kernels.backends.launched", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert not done.returncode, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def some(launched: Any) -> Any:
    return launched()


def assert_same(found: list[Any]) -> None:
    """All ways reach the driver with the same, once for each loop."""
    for name, _, ways in found:
        assert [len(lines) for lines in ways.values()] == [1 + name.count("+")] * len(ways), name
        assert all(lines == ways["Triton"] for lines in ways.values()), (name, ways)


def test_every_way_reaches_the_driver_with_the_same(some: Any) -> None:
    assert_same(some["found"])
    lines = [line for *_, ways in some["found"] for line in ways["first"]]
    words = [dict(word.split("=") for word in line.split()[1:]) for line in lines]
    assert {word["attributes"] for word in words} == {"", "4:2,1,1;5:1;", "6:1;", "2:1;"}
    assert {int(word["stream"]) for word in words} >= {0, 1, 64, 77, 0x7F0012345678}
    widths = {len(value) // 2 for word in words for value in word["parameters"].split(",")}
    assert widths == {1, 4, 8}


def test_only_the_c_function_is_called_but_for_loops_with_memory_of_their_own(some: Any) -> None:
    direct = {name: is_direct for name, is_direct, _ in some["found"]}
    assert not direct.pop("_with_scratch")
    assert all(direct.values())
    assert len(direct) >= 14


def test_the_host_enters_few_functions(some: Any) -> None:
    calls = {way: own["Python"] for way, own in some["calls"].items()}
    assert calls["Launch"] <= 3  # itself, whether a profiler wants to know, and what hands arguments to Triton 3.6
    assert calls["run"] <= 6
    assert calls["run by the launcher"] - calls["run"] >= 2
    assert calls["Launch by the launcher"] - calls["Launch"] >= 4
    assert calls["Triton"] > calls["run by the launcher"]
    pointers = {way: own["pointers"] for way, own in some["calls"].items()}
    assert pointers["Launch"] == pointers["Launch by the launcher"] == 0
    assert pointers["Triton"] == 3


@pytest.mark.thorough
def test_every_loop_reaches_the_driver_with_the_same(launched: Any) -> None:
    found = launched("every")["found"]
    assert_same(found)
    assert all(is_direct for _, is_direct, _ in found)
    names = {name for name, *_ in found if not name.startswith("Launch")}
    assert names == {loop.partition(".")[2] for family in families_of_loops() for loop in loops_of(family)}
