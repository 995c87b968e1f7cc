"""What the package promises as a whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import narrowband
from narrowband.errors import DISTRIBUTION, pip_install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRAINERS = ("accelerate", "lightning", "pytorch_lightning", "transformers")
#: Imported where they are used, so that ``import narrowband`` costs next to nothing beside ``import torch``.
LATE = ("numba", "llvmlite", "rich", "tyro", "pyroute2", "matplotlib", "triton", "altair", *TRAINERS)

LOADED_BY = """
import json, sys
import torch
before = set(sys.modules)
import narrowband, narrowband.integrations
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


def test_import_loads_nothing_else_of_other_packages(added):
    """What PyTorch has not loaded anyway takes time of everyone, whoever made it."""
    others = {name.partition(".")[0] for name in added} - {"narrowband", "numpy"}
    assert others - sys.stdlib_module_names == set()


def test_import_leaves_the_upper_floors_and_the_backends_alone(added):
    upper = ("narrowband.cli", "narrowband.bench", "narrowband.report", "narrowband.lab", "narrowband.kernels.cpu")
    assert {name for name in added if name.startswith(upper)} == set()


@pytest.fixture(scope="module")
def project():
    """What pyproject.toml says of the distribution."""
    return tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_the_distribution_has_a_name_of_its_own_and_the_command_that_of_the_package(project):
    assert project["name"] == DISTRIBUTION == "torch-narrowband"
    assert project["scripts"] == {"narrowband": "narrowband.cli:main"}
    assert project["dynamic"] == ["version"]
    assert list(project["urls"]) == ["Repository"]


def test_classifiers_begin_with_the_lowest_python_that_is_promised(project):
    """Of these nox takes the versions that a wheel is tried with."""
    told = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    assert project["requires-python"] == f">={told[0]}"
    assert told == [f"3.{10 + place}" for place in range(len(told))]


def test_the_citation_is_of_this_version(project):
    cited = dict(
        re.findall(r"^([\w-]+): (.+)$", (Path(__file__).parents[1] / "CITATION.cff").read_text(), re.MULTILINE)
    )
    assert cited["version"] == narrowband.__version__
    assert cited["license"] == project["license"]


def test_what_messages_tell_to_install_exists(project):
    extras = project["optional-dependencies"]
    assert pip_install("plots") == "install the extra 'plots' of narrowband: pip install '.[plots]' in the clone"
    optional = "adapt,plots,report,reproduce,accelerate,lightning,transformers"
    assert set(optional.split(",")) <= extras.keys()
    assert f"{DISTRIBUTION}[{optional}]" in extras["dev"]


def test_nothing_recommends_to_install_the_project_that_has_our_name_on_pypi():
    """What `pip install narrowband` fetches is another project."""
    root = Path(__file__).parents[1]
    files = [root / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "mkdocs.yml")]
    for folder in ("src", "reproduce", "docs", "examples"):
        files += [path for ending in ("*.py", "*.md") for path in (root / folder).rglob(ending)]
    wrong = re.compile(r"""pip install [^\n`]*(?<![\w./-])narrowband(?![\w.-])|(?<![\w-])narrowband\[\w|git clone""")
    found = {str(path.relative_to(root)): match[0] for path in files if (match := wrong.search(path.read_text()))}
    assert found == {}


def test_everything_in_all_exists():
    assert [name for name in narrowband.__all__ if not hasattr(narrowband, name)] == []
    assert len(set(narrowband.__all__)) == len(narrowband.__all__)


def test_type_checkers_see_the_types():
    assert files("narrowband").joinpath("py.typed").is_file()
