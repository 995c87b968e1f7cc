"""What the package promises as a whole."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import narrowband
from narrowband.errors import DISTRIBUTION, pip_install
from tests.ranks import run_ranks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRAINERS = ("accelerate", "lightning", "pytorch_lightning", "transformers")
#: Imported where they are used, so that ``import narrowband`` costs next to nothing beside ``import torch``.
LATE = ("numba", "llvmlite", "rich", "tyro", "pyroute2", "matplotlib", "triton", "altair", *TRAINERS)

LOADED_BY = """
import json, sys
before = set(sys.modules)
import narrowband
alone = set(sys.modules) - before
import torch
before = set(sys.modules)
import narrowband.integrations
for name in narrowband.__all__:
    if name not in ("CompressedStage", "Recorder"):
        getattr(narrowband, name)
print(json.dumps([sorted(alone), sorted(set(sys.modules) - before)]))
"""


@pytest.fixture(scope="module")
def loaded():
    """Modules that ``import narrowband`` loads in a new process, and those that its names load beside PyTorch's."""
    answer = subprocess.run([sys.executable, "-c", LOADED_BY], capture_output=True, text=True, check=True)
    return [set(modules) for modules in json.loads(answer.stdout)]


@pytest.fixture(scope="module")
def added(loaded):
    return loaded[1]


def test_import_alone_loads_nothing_that_is_not_used(loaded):
    assert {name.partition(".")[0] for name in loaded[0]} - sys.stdlib_module_names == {"narrowband"}
    assert {name for name in loaded[0] if name.startswith("narrowband.")} == set()


def test_every_name_has_one_home_that_type_checkers_know():
    """The table for type checkers, and the one by which names are found."""
    tree = ast.parse(Path(narrowband.__file__).read_text())
    typed = [node for part in tree.body if isinstance(part, ast.If) for node in part.body]
    told = {alias.name: node.module.removeprefix("narrowband.") for node in typed for alias in node.names}
    assert told == narrowband._HOME_OF
    assert told.keys() | {"__version__"} == set(narrowband.__all__)
    assert set(narrowband.__all__) <= set(dir(narrowband))


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'narrowband' has no attribute 'compress_gradient'") as caught:
        narrowband.compress_gradient  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("compress_gradient", narrowband)  # for Python's "Did you mean"


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


def imported_by_names(rank, world_size):
    before = set(sys.modules)
    for name in narrowband.__all__:
        if name not in ("CompressedStage", "Recorder"):
            getattr(narrowband, name)
    return sorted(set(sys.modules) - before)


def test_ranks_that_are_forked_have_imported_all_of_it():
    assert run_ranks(imported_by_names, 1, fresh=True, group=False) == [[]]


def test_command_lines_that_train_nothing_do_not_wait_for_pytorch():
    lines = ["--version", "--help", "bench", "lab --help", "report --help", "frobnicate"]
    code = (
        "import sys; from narrowband.cli import main\n"
        f"for line in {lines}:\n"
        "    try: main(line.split())\n"
        "    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "unknown command 'frobnicate'" in done.stderr


STOP = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
#: PyTorch goes on without NumPy, whatever its import raises.
SWALLOWED = f"""
try:
    exec({STOP!r})
except BaseException:
    raise ImportError("no NumPy")
"""


@pytest.mark.parametrize(
    ("module", "source", "code", "said"),
    [("rich", STOP, -signal.SIGINT, ""), ("torch", STOP, 130, "Stopped.\n"), ("torch", SWALLOWED, 130, "Stopped.\n")],
    ids=["before the command", "of PyTorch", "that PyTorch swallows"],
)
def test_ctrl_c_while_modules_are_imported_ends_the_command_without_a_traceback(tmp_path, module, source, code, said):
    (tmp_path / f"{module}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "narrowband", "codecs"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


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


def test_the_reference_says_where_every_public_name_is_described():
    index = (Path(__file__).parents[1] / "docs/reference/index.md").read_text()
    assert [name for name in narrowband.__all__ if name != "__version__" and f"`nb.{name}`" not in index] == []


def test_type_checkers_see_the_types():
    assert files("narrowband").joinpath("py.typed").is_file()
