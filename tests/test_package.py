"""What the package promises as a whole."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from importlib.resources import files

import pytest

import narrowband

#: Imported where they are used, so that ``import narrowband`` costs next to nothing beside ``import torch``.
LATE = ("numba", "llvmlite", "rich", "tyro", "pyroute2", "matplotlib", "triton")

LOADED_BY = """
import json, sys
import torch
before = set(sys.modules)
import narrowband
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def added():
    """Modules that ``import narrowband`` loads in a new process, beyond those of ``import torch``."""
    answer = subprocess.run([sys.executable, "-c", LOADED_BY], capture_output=True, text=True, check=True)
    return set(json.loads(answer.stdout))


def test_import_loads_no_heavy_dependency(added):
    assert "narrowband.codecs" in added
    assert {name for name in added if name.partition(".")[0] in LATE} == set()


def test_import_leaves_the_upper_floors_and_the_backends_alone(added):
    upper = ("narrowband.cli", "narrowband.bench", "narrowband.report", "narrowband.lab", "narrowband.kernels.cpu")
    assert {name for name in added if name.startswith(upper)} == set()


def test_version_is_that_of_the_installed_distribution():
    assert narrowband.__version__ == importlib.metadata.version("narrowband")


def test_everything_in_all_exists():
    assert [name for name in narrowband.__all__ if not hasattr(narrowband, name)] == []
    assert len(set(narrowband.__all__)) == len(narrowband.__all__)


def test_type_checkers_see_the_types():
    assert files("narrowband").joinpath("py.typed").is_file()
