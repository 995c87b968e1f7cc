"""Backends: tables of loops, and the choice of one by a tensor's device.

A backend is a package beside ``reference``, with a file for each family. The file of a family in ``reference`` lists
its loops in ``__all__``. A backend overrides a loop by a function of the same name in the file of the same name; its
table takes every other loop from the reference. So a new backend can grow one loop at a time.
"""

from __future__ import annotations

import os
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Backend", "backend_for", "backend_of", "fuses"]

#: The package of loops for each device type. All other device types run the reference.
PACKAGES = {"cpu": "narrowband.kernels.cpu", "cuda": "narrowband.kernels.cuda"}

_REFERENCE = "narrowband.kernels.reference"

#: The lowest compute capability whose GPUs run the Triton loops.
_CAPABLE = (8, 0)


class Backend:
    """A table of loops: ``backend.select_topk`` is the backend's own function, or else the reference's.

    Attributes:
        name: The package's last name, such as ``"cpu"`` or ``"reference"``.
        FUSES: See :func:`fuses`.
    """

    def __init__(self, package: str) -> None:
        self.name = package.rpartition(".")[2]
        own_families, families = (_files_of(source) for source in (package, _REFERENCE))
        self.FUSES = import_module(package).FUSES
        for family in families:
            plain = import_module(f"{_REFERENCE}.{family}")
            own = import_module(f"{package}.{family}") if family in own_families else plain
            for loop in getattr(plain, "__all__", ()):  # files that families share have no __all__
                setattr(self, loop, getattr(own, loop, getattr(plain, loop)))

    if TYPE_CHECKING:

        def __getattr__(self, loop: str) -> Any: ...


def _files_of(package: str) -> list[str]:
    return [file.name for file in pkgutil.iter_modules(import_module(package).__path__)]


_backends: dict[str, Backend] = {}  # by package
_chosen: dict[str, Backend] = {}  # by device type


def backend_for(device_type: str) -> Backend:
    """Return the table of loops for tensors of this device type.

    ``NARROWBAND_KERNELS=reference`` forces plain torch everywhere, to find out whether a fast loop is at fault. The
    variable is read when a device type is first used.
    """
    package = PACKAGES.get(device_type, _REFERENCE)
    if device_type == "cuda" and not _has_triton():
        package = _REFERENCE
    if os.environ.get("NARROWBAND_KERNELS", "") == "reference":
        package = _REFERENCE
    if package not in _backends:
        _backends[package] = Backend(package)
    return _backends[package]


def _has_triton() -> bool:
    """Whether the Triton loops can run: on this GPU, or in Triton's interpreter if there is no GPU."""
    if find_spec("triton") is None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= _CAPABLE


def backend_of(tensor: Tensor) -> Backend:
    """Return the table of loops that runs this tensor. It is chosen once per process for each device type."""
    # The type of a device is a text that PyTorch makes whenever it is asked for.
    device_type = "cpu" if tensor.is_cpu else "cuda" if tensor.is_cuda else tensor.device.type
    found = _chosen.get(device_type)
    if found is None:
        found = _chosen[device_type] = backend_for(device_type)
    return found


def fuses(x: Tensor) -> bool:
    """Whether this tensor's backend gains from fusing several operations into one pass. Other backends gain from one
    call for several tensors.
    """
    return bool(backend_of(x).FUSES)
