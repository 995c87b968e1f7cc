"""Describe a machine's GPU and its software, for records of measurements and for ``narrowband doctor``."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GPU", "driver_version", "gpu", "loops_of", "nccl_version"]

#: The file in which the driver's kernel module reports its version.
_MODULE = Path("/proc/driver/nvidia/version")

_TIMEOUT_S = 10


@dataclass(frozen=True)
class GPU:
    """The first GPU that PyTorch sees.

    Attributes:
        name: of the card.
        count: number of GPUs.
        memory_bytes: of the first GPU.
        capability: its compute capability, such as ``9.0``.
        driver: version of the driver; None if it cannot be found out.
        cuda: version of CUDA that PyTorch was built for.
        triton: version of Triton; None if it is not installed.
        nccl: version of NCCL; None if this build of PyTorch has none.
    """

    name: str
    count: int
    memory_bytes: int
    capability: str
    driver: str | None
    cuda: str | None
    triton: str | None
    nccl: str | None


def gpu() -> GPU | None:
    """Describe the first GPU; None if there is no GPU that PyTorch can use."""
    import torch

    if not torch.cuda.is_available():
        return None
    about = torch.cuda.get_device_properties(0)
    return GPU(
        name=about.name,
        count=torch.cuda.device_count(),
        memory_bytes=about.total_memory,
        capability=f"{about.major}.{about.minor}",
        driver=_driver(),
        cuda=torch.version.cuda,
        triton=_version_of_triton(),
        nccl=nccl_version(),
    )


def loops_of(package: str = "narrowband.kernels.cuda") -> tuple[list[str], list[str]]:
    """Return the names of the loops that a backend implements, and of those that it takes from plain torch.

    Example:
        >>> own, plain = loops_of("narrowband.kernels.cpu")
        >>> "quantize_groups" in own, "restore_all_if" in plain
        (True, True)
    """
    from narrowband.kernels.backends import Backend

    table, loops = Backend(package), Backend("narrowband.kernels.reference")
    names = sorted(name for name, loop in vars(loops).items() if callable(loop))
    own = [name for name in names if getattr(table, name) is not getattr(loops, name)]
    return own, [name for name in names if name not in own]


def nccl_version() -> str | None:
    """Return the version of NCCL, such as ``2.27.3``; None without a GPU, or if this build of PyTorch has no NCCL."""
    import torch
    import torch.distributed as dist

    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def driver_version(told: str) -> str | None:
    """Find the driver's version in the output of nvidia-smi or of the kernel module; None if there is none.

    Example:
        >>> driver_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build")
        '570.86.15'
    """
    found = re.search(r"(?<![\d.])\d{3,}\.\d+(?:\.\d+)?(?![\d.])", told)
    return found[0] if found else None


def _driver() -> str | None:
    if _MODULE.exists():
        return driver_version(_MODULE.read_text(errors="replace"))
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return driver_version(done.stdout)


def _version_of_triton() -> str | None:
    for name in ("triton", "pytorch-triton"):  # the second name is that of Triton in builds of PyTorch
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
