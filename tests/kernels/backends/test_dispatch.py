"""Which backend runs a tensor, what that imports, and that all of them are called alike."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from narrowband import kernels
from narrowband.kernels import backends
from tests.kernels.backends.common import BACKENDS, NAMES
from tests.kernels.tables import reference

LOOPS = [name for name, loop in vars(reference).items() if inspect.isfunction(loop)]


def test_the_backend_is_chosen_by_device_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NARROWBAND_KERNELS", raising=False)
    assert kernels.backend_for("cpu").name == "cpu"
    assert kernels.backend_for("cuda").name == ("cuda" if find_spec("triton") else "reference")
    assert kernels.backend_for("mps").name == "reference"
    monkeypatch.setenv("NARROWBAND_KERNELS", "reference")
    assert kernels.backend_for("cpu").name == kernels.backend_for("cuda").name == "reference"


def test_where_triton_is_missing_plain_torch_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    assert kernels.backend_for("cuda").name == "reference"


def test_on_a_gpu_too_old_for_triton_plain_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert kernels.backend_for("cuda").name == "reference"


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults, in their order."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_called_alike_in_public_and_in_every_backend(name: str) -> None:
    form = parameters(getattr(kernels, name))
    for backend in BACKENDS:
        found = parameters(getattr(backend, name))
        if name == "randomk_indices":  # backends are given a device, users may leave it out
            assert [entry[:2] for entry in found] == [entry[:2] for entry in form]
        else:
            assert found == form


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_a_backend_has_all_loops_that_its_files_define(name: str) -> None:
    package = import_module(f"narrowband.kernels.{name}")
    table = backends.Backend(package.__name__)
    for file in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for loop, function in inspect.getmembers(import_module(file.name), inspect.isfunction):
            if function.__module__ == file.name and loop in kernels.__all__:
                assert getattr(table, loop) is function, loop


def test_importing_the_package_does_not_import_numba_nor_what_runs_on_the_cpu_triton() -> None:
    code = (
        "import sys, narrowband.kernels; assert 'numba' not in sys.modules; "
        "import torch, narrowband as nb; nb.codec('qsgd:bits=4').roundtrip(torch.randn(100)); "
        "assert not {'triton', 'narrowband.kernels.cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_where_numba_compiles_nothing_that_is_said() -> None:
    code = "from narrowband import kernels; kernels.backend_for('cpu')"
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True)
    assert "UnsupportedError: NUMBA_DISABLE_JIT is set" in done.stderr
