"""What is known of a GPU and its software."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from narrowband.report.gpu import driver_version, gpu, loops_of, nccl_version
from tests.kernels.tables import reference

#: As the kernel module writes it, in two lines.
MODULE = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


@pytest.mark.parametrize(
    ("told", "version"),
    [
        (MODULE, "535.104.05"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)",
            "570.86.15",
        ),
        ("550.54\n550.54\n", "550.54"),
        ("Failed to initialize NVML: Driver/library version mismatch", None),
        ("", None),
    ],
)
def test_the_drivers_version_is_found_in_what_the_system_says(told, version):
    assert driver_version(told) == version


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_loop_is_the_backends_own_or_plain_torch(backend):
    if backend == "cuda" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    own, plain = loops_of(f"narrowband.kernels.{backend}")
    assert sorted(own + plain) == sorted(name for name, loop in vars(reference).items() if callable(loop))
    assert "quantize_groups" in own
    assert ("cheapest_within" in plain) == (backend == "cuda")  # it is the CPU's


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_said():
    assert gpu() is None
    assert nccl_version() is None


@pytest.mark.gpu
def test_a_gpu_is_described():
    found = gpu()
    assert found is not None
    assert found.memory_bytes > 0
    assert found.capability.count(".") == 1
    assert found.driver is not None
    assert found.cuda == torch.version.cuda
