"""What a stranger installs, in environments that hold nothing of a checkout.

``make package`` runs the first two sessions, as continuous integration does: it takes seconds, and downloads next to
nothing. The others are for releases. They install PyTorch anew for every pair of versions, so name an index with builds
for CPU in ``PIP_INDEX_URL``, or have gigabytes to spare. A pair that cannot be had here is skipped, and says why.

nox --list
nox -s install                                  # all pairs of Python and PyTorch
nox -s "install-3.11(torch='2.13')"             # one of them
nox -s lowest-3.11 -- torch==2.13.0             # the oldest of every dependency, but for PyTorch
"""

from __future__ import annotations

import email.parser
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import nox
from packaging.metadata import Metadata
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["dist", "smoke"]
nox.options.error_on_missing_interpreters = False  # in CI, too: each that is missing is named

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
#: Every Python that the classifiers promise.
PYTHONS = nox.project.python_versions(PROJECT)
#: From the lowest PyTorch that pyproject.toml allows to the newest there was when this line was last changed.
TORCHES = [f"2.{minor}" for minor in range(11, 16)]

#: Of the suite, what leans on PyTorch's and Numba's insides: hooks of DDP, collectives of FSDP2, saved tensors, loops.
TESTS = (
    "tests/test_package.py",
    "tests/codecs/test_contract.py",
    "tests/gradients/test_ddp.py",
    "tests/pipeline/test_stage.py",
    "tests/collectives/test_groups.py",
    "tests/sharding/test_shards.py",
    "tests/activations/test_compiled.py",
    "tests/activations/test_context.py",
)
#: Tracked files that need not be in the sdist.
NOT_SHIPPED = (".ci/", ".pre-commit-config.yaml")


@nox.session(reuse_venv=True)
def dist(session: nox.Session) -> None:
    """Build the sdist, and the wheel of what the sdist holds; look at what is in both."""
    session.install("-c", "constraints.txt", "build", *PROJECT["build-system"]["requires"])
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation", silent=True)
    wheel, sdist = _built()
    tracked = _tracked()
    shipped = {name for name in tracked if not name.startswith(NOT_SHIPPED)}

    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    _none(session, "tracked, but not in the sdist", shipped - packed)
    _none(session, "in the sdist, but not tracked", packed - tracked - {"PKG-INFO"})

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = next(name for name in names if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
        said = archive.read(f"{about}/METADATA")
        entry = archive.read(f"{about}/entry_points.txt").decode()
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    _none(session, "in src/, but not in the wheel", package - names)
    beside = {name for name in names - package if not name.startswith(f"{about}/")}
    _none(session, "in the wheel, but not in src/", beside)
    if "narrowband/py.typed" not in names:
        session.error("the wheel lacks narrowband/py.typed: type checkers would not look at it")
    if "narrowband = narrowband.cli:main" not in entry:
        session.error(f"the wheel has another command than narrowband: {entry}")
    _look_at(session, said)
    session.log(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB; {wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")


@nox.session(reuse_venv=True, requires=["dist"])
def smoke(session: nox.Session) -> None:
    """Install the wheel beside the dependencies of the Python that runs nox: import it, and ask the doctor."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        session.skip(f"{sys.executable} has no PyTorch: `make package` has one, and `nox -s install` installs it")
    wheel, _ = _built()
    session.install("--no-deps", "--no-index", "--force-reinstall", str(wheel))
    # Only the folder's packages, not what its own .pth files name: an editable install of a checkout stays outside.
    (Path(_site(session)) / "dependencies.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    _first_look(session)


@nox.session(python=PYTHONS, requires=["dist"])
@nox.parametrize("torch", TORCHES)
def install(session: nox.Session, torch: str) -> None:
    """Install the wheel with what pip finds for it: import, doctor, two ranks that train, and a part of the tests."""
    _use(session, f"torch=={torch}.*", [])


@nox.session(python=PYTHONS[:2], requires=["dist"])
def lowest(session: nox.Session) -> None:
    """The same with the oldest version of every dependency; a requirement after ``--`` replaces its own."""
    own = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    exact = {each.name: f"{each.name}=={_floor(each)}.*" for each in own}
    exact |= {Requirement(text).name: text for text in session.posargs}
    torch = exact.pop("torch")
    _use(session, torch, [exact[each.name] for each in own if each.name in exact and each.name != "tomli"])


@nox.session(requires=["dist"])
def metadata(session: nox.Session) -> None:
    """What the index checks before it takes a release, and the citation."""
    session.install("twine", "cffconvert")
    session.run("twine", "check", "--strict", *map(str, _built()))
    session.run("cffconvert", "--validate", "-i", "CITATION.cff")


def _use(session: nox.Session, torch: str, others: list[str]) -> None:
    """Install the wheel beside these, and everything that a stranger does first."""
    said = session.run(
        "python", "-m", "pip", "install", "--only-binary=:all:", torch, *others, silent=True, success_codes=[0, 1]
    )
    if said and re.search(r"ERROR: (No matching distribution|Cannot install|.*requires a different Python)", str(said)):
        session.skip(f"pip finds no {' '.join([torch, *others])} for Python {session.python}")
    wheel, _ = _built()
    session.install(str(wheel), "pytest>=8.3", "hypothesis>=6.120")
    session.run("python", "-m", "pip", "check")
    _first_look(session)
    ranks = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    session.run(*ranks, "examples/train_ddp.py", "--steps", "20")
    # A warning of a version that the project is not developed with is no error of the package.
    session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", *TESTS)


def _first_look(session: nox.Session) -> None:
    """From a folder that is no checkout."""
    with session.chdir(session.create_tmp()):
        where = session.run("python", "-c", "import narrowband; print(narrowband.__file__)", silent=True)
        if not str(where).strip().startswith(_site(session)):
            session.error(f"narrowband was imported from {where}, not from the wheel")
        session.run("narrowband", "doctor")


def _look_at(session: nox.Session, said: bytes) -> None:
    """Metadata that an index would refuse, and links that lead nowhere."""
    about = Metadata.from_email(said, validate=True)
    expected = {"name": PROJECT["project"]["name"], "requires_python": PROJECT["project"]["requires-python"]}
    for field, value in expected.items():
        if str(getattr(about, field)) != value:
            session.error(f"{field} is {getattr(about, field)} in the wheel and {value} in pyproject.toml")
    if about.license_expression != PROJECT["project"]["license"] or about.license_files != ["LICENSE"]:
        session.error(f"licence: {about.license_expression}, in {about.license_files}")
    page = email.parser.BytesParser().parsebytes(said).get_payload()
    if not isinstance(page, str) or "```python" not in page:
        session.error("the long description is not the README")
    for name, place in (about.project_urls or {}).items():
        if not place.startswith("https://"):
            session.error(f"{name} is no address: {place}")
        if "example.org" in place:
            session.warn(f"{name} is a placeholder ({place}): name the real one before a release")
    inside = {place.partition("#")[0] for place in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", page)}
    _none(session, "linked from the README, but not there", {place for place in inside if not (ROOT / place).exists()})


def _built() -> tuple[Path, Path]:
    """(wheel, sdist)."""
    (wheel,), (sdist,) = ROOT.glob("dist/*.whl"), ROOT.glob("dist/*.tar.gz")
    return wheel, sdist


def _tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def _site(session: nox.Session) -> str:
    """Where this session's environment has its packages."""
    found = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    return str(found).strip()


def _floor(requirement: Requirement) -> str:
    return next(each.version for each in requirement.specifier if each.operator == ">=")


def _none(session: nox.Session, what: str, names: set[str]) -> None:
    if names:
        session.error(f"{what}: {', '.join(sorted(names)[:20])}{' …' if len(names) > 20 else ''}")
