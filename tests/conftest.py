"""Fixtures and settings of the whole suite. Distributed tests: see ``tests/ranks.py``."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import garbage, guards
from tests.lab.processes import lacking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# No deadline: the first example compiles kernels, and tests never assert on the clock. Fixed examples in CI, so that a
# red run means a change and not a die; new ones, and more of them, on every run elsewhere.
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=25, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Inductor compiles in processes of its own, each of which would import PyTorch first; tests have a few small graphs.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# What it has compiled is worth keeping from session to session, unlike all else in the temporary folder.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")))
# Tests that give programs a cache folder of their own, for data, are no reason to compile every loop there once more.
os.environ.setdefault("NUMBA_CACHE_DIR", os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser()))

# Without a GPU, Triton's loops run in its interpreter; it asks as it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # What a test compiles for a GPU all the same is worth keeping, too.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir(), f"triton_{os.getuid()}")))

# A shell starts what it runs in the background with SIGINT ignored, and programs that tests start would inherit that:
# those that tests end by Ctrl-C have to hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two threads are enough to see what only goes wrong with threads, and do not swamp a small machine.
torch.set_num_threads(min(2, os.cpu_count() or 1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="also run tests that are marked as thorough (make thorough)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave thorough tests out, unless they are asked for, by the option or by name."""
    if config.getoption("--thorough") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def imports_trainers(nodeid: str) -> bool:
    return nodeid.startswith("tests/integrations/") or "[docs/how-to/trainers.md]" in nodeid


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one of the processes that run files have all tests whose ranks import Accelerate, Lightning or Transformers:
    that takes each rank seconds, and ranks are used again within a process.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TrainersTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "trainers" if imports_trainers(nodeid) else super()._split_scope(nodeid)

    return TrainersTogether(config, log)


def pytest_collection_finish() -> None:
    """Modules and tests are nobody's garbage."""
    guards.measure_none()
    garbage.pass_by_what_is_here()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    garbage.pass_by_what_came()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: network namespaces and traffic shaping")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: PyTorch finds none here")
    lab = item.get_closest_marker("lab")
    if lab is not None and (missing := lacking(**lab.kwargs)):
        pytest.skip(" ".join(missing))


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let all temporary files lie in pytest's folder, of which pytest keeps the last few. Some stay behind on purpose:
    those of processes that tests kill, and logs of benchmarks whose ranks fail.
    """
    with pytest.MonkeyPatch.context() as patch:
        # A short name, since Unix sockets lie there, whose paths have 107 characters at most.
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        patch.setattr(tempfile, "tempdir", None)  # so that TMPDIR is read again
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets that NARROWBAND_DATA names."""
    folder = os.environ.get("NARROWBAND_DATA")
    if not folder:
        pytest.skip("real data needed: NARROWBAND_DATA names no folder")
    if not Path(folder).is_dir():
        pytest.skip(f"real data needed: NARROWBAND_DATA={folder} is no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def data_file(data_dir: Path) -> Callable[[str], Path]:
    """``data_file("tinyshakespeare/input.txt")``: its path, or a skip that names it."""

    def find(name: str) -> Path:
        path = data_dir / name
        if not path.is_file():
            pytest.skip(f"real data needed: {path} is missing")
        return path

    return find
