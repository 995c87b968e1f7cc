"""`make lint` finds files that import each other, however they do it."""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest

from tests.imports import circles

CONFIG = """
[tool.importlinter]
root_package = "{package}"
contract_types = ["no_circles: tests.imports.NoCircles"]

[[tool.importlinter.contracts]]
name = "no circles"
type = "no_circles"
"""

FILES = {
    "straight": ({"__init__": "from {package} import a", "a": "from {package} import b", "b": ""}, []),
    "function": (
        {"__init__": "", "a": "from {package} import b", "b": "def late():\n    from {package} import a"},
        ["a", "b"],
    ),
    "typed": (
        {
            "__init__": "",
            "a": "import {package}.b",
            "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {package}.a",
        },
        ["a", "b"],
    ),
    "front": ({"__init__": "from {package} import a", "a": "from {package} import late"}, ["", "a"]),
    "three": (
        {
            "__init__": "",
            "a": "from {package} import b",
            "b": "from {package} import c",
            "c": "from {package} import a",
            "d": "from {package} import a",
        },
        ["a", "b", "c"],
    ),
}


@pytest.fixture(params=FILES)
def package(request, tmp_path, monkeypatch):
    """(name, the circle that it has) of a package that can be imported."""
    name = f"circle_{request.param}"
    files, circle = FILES[request.param]
    (tmp_path / name).mkdir()
    for module, text in files.items():
        (tmp_path / name / f"{module}.py").write_text(text.format(package=name) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name, tuple(f"{name}.{module}".rstrip(".") for module in circle)


def test_a_circle_is_found_once(package):
    name, circle = package
    assert circles(grimp.build_graph(name, cache_dir=None)) == ([circle] if circle else [])


@pytest.mark.parametrize("package", ["straight", "front"], indirect=True)
def test_the_contract_names_the_files(package, tmp_path):
    name, circle = package
    config = tmp_path / "lint.toml"
    config.write_text(CONFIG.format(package=name))
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from importlinter.cli import lint_imports_command; "
    command = [sys.executable, "-c", start + "lint_imports_command()", "--config", str(config), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == bool(circle), done.stderr
    assert (f"{name} imports {name}.a imports {name}" in done.stdout) == bool(circle)
