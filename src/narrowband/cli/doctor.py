"""``narrowband doctor``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from narrowband.cli.exits import DONE, FAILED, check_output
from narrowband.cli.records import written_first
from narrowband.errors import DISTRIBUTION, UnsupportedError, pip_install
from narrowband.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from narrowband.report.gpu import GPU

__all__ = ["Doctor"]

#: The distribution on PyPI that has the name of our package.
_NAMESAKE = "narrowband"

#: The oldest and the newest PyTorch that was tested, as minor versions of 2.
_TRIED = 11, 15

#: Package → (what needs it, how to get it).
_PACKAGES = {
    "numba": ("fast loops on CPU", "pip install numba, or NARROWBAND_KERNELS=reference to do without"),
    "pyroute2": ("narrowband lab and narrowband bench ddp behind links", "pip install pyroute2"),
    "matplotlib": ("pictures", pip_install("plots")),
}


#: One spec of every kind. Only bits change which loops are compiled; other numbers do not.
_SPECS = (
    "none", "fp16", "qsgd:bits=4", "qsgd:bits=8", "qsgd:bits=2", "uniform:bits=4", "uniform:bits=8", "sign+ef",
    "topk:density=0.01+ef", "topk:density=0.04,values=int8+ef-mixed", "randomk:density=0.01+ef", "qsgd:bits=4+ef21",
    "lowrank:rank=4+ef", "dgc:density=0.001", "powersgd:rank=4",
)  # fmt: skip


@dataclass(frozen=True)
class _Finding:
    """One line of the report: a name, whether it is there, and details."""

    name: str
    good: bool
    detail: str


@dataclass(frozen=True)
class Doctor:
    """Say what this machine can do, what is missing, and how to get it.

    Whether links can be emulated is tried, not guessed: one rank's namespaces are made and removed again. With --peers
    it looks at the ranks that torchrun has started instead, and at the links between them: who is where, which ports
    are closed, how fast each way is. Exit code 1 then says that there is something to put right.

    Examples:
      narrowband doctor
      narrowband doctor --compile
      torchrun --nnodes 2 --rdzv-endpoint 10.0.0.1:29500 --rdzv-backend c10d -m narrowband.cli doctor --peers
      narrowband lab --nodes 3 --rate 50mbit -- python -m narrowband.cli doctor --peers
    """

    compile: bool = False
    """Compile the loops on CPU now, for all usual specs, so that no program waits for that later."""
    peers: bool = False
    """Look at the ranks that torchrun has started, and at the links between them."""
    limit: float = 10.0
    """With --peers: seconds after which what has not answered counts as unreachable."""
    wait: float = 60.0
    """With --peers: seconds in which all ranks have to come."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write all that was found to this file, with machine, versions and command."""

    def unused(self) -> dict[str, str]:
        """Return why some options say nothing beside the others."""
        if self.peers:
            return {"compile": "compiles the loops of this machine: run narrowband doctor --compile by itself"}
        return dict.fromkeys(("limit", "wait"), "is for --peers: give that, too, or leave it out")

    def __call__(self, console: Console) -> int:
        for name in ("limit", "wait"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} {getattr(self, name)} must be a number of seconds above 0")
        check_output(self.json)
        return self._look_around(console) if self.peers else self._look_here(console)

    def _look_here(self, console: Console) -> int:
        from rich.markup import escape
        from rich.table import Column, Table

        from narrowband.report.record import machine, versions

        table = Table("", "", Column(overflow="fold"), box=None, show_header=False, padding=(0, 1))
        findings = [*_namesake(), *_pytorch(), *_backends(), *_packages(), *_allocator(), *_links()]
        for finding in findings:
            mark = "[green]yes" if finding.good else "[yellow]no"
            table.add_row(mark, f"[bold]{finding.name}", escape(finding.detail))
        with written_first(lambda: self._write({"findings": [asdict(finding) for finding in findings]})):
            about = machine()
            console.print(f"{about['cpu']}, {about['usable_cores']} cores, {about['memory_gib']} GiB", highlight=False)
            console.print(", ".join(f"{name} {version}" for name, version in versions().items()), highlight=False)
            console.print(table)
        self._say_where(console)
        if self.compile:
            _compile()
        return DONE

    def _look_around(self, console: Console) -> int:
        from narrowband.bench.ranks import RankError
        from narrowband.planning.meeting import MeetingError, join
        from narrowband.planning.probe import probe
        from narrowband.planning.troubles import notes_of, troubles_of
        from narrowband.report.tables import seats_table, ways_table

        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ValueError(
                "--peers must be started by torchrun. Run on every machine: torchrun --nnodes 2 "
                "--nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 -m narrowband.cli doctor "
                "--peers (with the number of your machines, and the address of the first)"
            )
        try:
            meeting = join(self.wait)
            with console.status("meeting") as status:
                found = probe(meeting, self.limit, status.update if meeting.rank == 0 else lambda _: None)
        except MeetingError as error:
            raise RankError(str(error)) from None
        troubles, notes = troubles_of(found), notes_of(found)
        code = FAILED if troubles else DONE
        if meeting.rank:  # all ranks have the same results, and one prints them
            meeting.leave(code)
            return code
        with written_first(lambda: self._write({"troubles": troubles, "notes": notes, **asdict(found)})) as written:
            console.print(seats_table([asdict(seat) for seat in found.seats]))
            if found.ways:
                console.print(ways_table([asdict(way) for way in found.ways]))
            for sentences, style in ((notes, "yellow"), (troubles, "bold red")):
                for sentence in sentences:
                    console.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)
            if not troubles:
                console.print("All ranks reach each other.", style="green", highlight=False)
            if written:
                self._say_where(console)
            console.file.flush()
            meeting.leave(code)
        return code

    def _write(self, found: dict[str, Any]) -> None:
        if self.json is not None:
            from narrowband.report.record import provenance, write_json

            write_json(self.json, provenance() | found)

    def _say_where(self, console: Console) -> None:
        if self.json is not None:
            console.print(f"written: {self.json}", style="dim", markup=False, highlight=False)


def _namesake() -> Iterator[_Finding]:
    """Report if another project's distribution is installed that has a package of the same name as this one."""
    try:
        version = importlib.metadata.version(_NAMESAKE)
    except importlib.metadata.PackageNotFoundError:
        return
    yield _Finding(
        "import narrowband",
        False,
        f"the distribution {_NAMESAKE!r} {version} is installed: another project (for NB-IoT modems), with files in "
        f"the same folder as ours. Run: pip uninstall {_NAMESAKE} {DISTRIBUTION}; pip install . in the clone",
    )


def _pytorch() -> Iterator[_Finding]:
    """Report on PyTorch's version. Each has to be tested, because hooks, collectives and graphs use unstable APIs."""
    import torch

    version = torch.__version__
    oldest, newest = ((2, minor) for minor in _TRIED)
    own = tuple(map(int, version.split(".")[:2]))
    tried = f"tried with 2.{_TRIED[0]} to 2.{_TRIED[1]}"
    if own < oldest:
        yield _Finding("PyTorch", False, f"{version} is too old: {tried}")
    elif own > newest:
        yield _Finding(
            "PyTorch",
            False,
            f"{version} is newer than any that was tried. Where something goes wrong that goes well elsewhere, "
            f"pip install 'torch<2.{_TRIED[1] + 1}'",
        )
    else:
        yield _Finding("PyTorch", True, f"{version}: {tried}")


def _compile() -> None:
    import torch
    from torch import nn

    from narrowband import ActivationPolicy
    from narrowband.activations import warmup as activations
    from narrowband.averaging import warmup as averaging
    from narrowband.kernels.compiling import announced

    model = nn.Sequential(nn.BatchNorm1d(1), nn.MaxPool2d(2), nn.Linear(1, 1, dtype=torch.bfloat16))
    with announced("all usual specs", say=True):
        averaging.use_all(_SPECS, torch.device("cpu"))
        for bits in (8, 4, 2):
            activations.warm_up(model, ActivationPolicy(bits=bits))


def _backends() -> Iterator[_Finding]:
    import torch
    import torch.distributed as dist

    from narrowband import kernels
    from narrowband.report.gpu import gpu, loops_of, nccl_version

    threads = torch.get_num_threads()
    try:
        backend = kernels.backend_for("cpu").name
    except (ImportError, UnsupportedError) as error:  # Numba is missing, needs another NumPy, or cannot compile
        yield _Finding("loops on CPU", False, f"{error} (NARROWBAND_KERNELS=reference does without, slowly)")
    else:
        loops = f"{'Numba' if backend == 'cpu' else 'plain torch'}, {counted(threads, 'thread')}"
        yield _Finding("loops on CPU", True, f"{loops} (torch.set_num_threads or OMP_NUM_THREADS changes that)")
    found = gpu()
    if found is not None:
        fast = kernels.backend_for("cuda").name == "cuda"
        yield from _about_gpu(found, loops_of("narrowband.kernels.cuda") if fast else None)
    else:
        built = torch.version.cuda
        why = (
            "this build of torch is for CPU" if built is None else f"torch is built for CUDA {built}, no GPU was found"
        )
        yield _Finding("CUDA", False, why)
    if not dist.is_available():
        yield _Finding("torch.distributed", False, "this build of torch has none: install torch from pytorch.org")
        return
    yield _Finding("gloo", dist.is_gloo_available(), "collectives on CPU")
    version = nccl_version()
    nccl = (
        "collectives on GPU; comes with CUDA builds of torch" if version is None else f"{version}: collectives on GPU"
    )
    yield _Finding("NCCL", dist.is_nccl_available(), nccl)


def _about_gpu(found: GPU, loops: tuple[list[str], list[str]] | None) -> Iterator[_Finding]:
    """Report on a GPU. ``loops`` are those in Triton and those in plain torch; None: Triton is not used."""
    from narrowband.units import format_bytes

    card = f"{found.count} × {found.name}, {format_bytes(found.memory_bytes)}, compute capability {found.capability}"
    yield _Finding("CUDA", True, card)
    driver = found.driver or "of a version that neither the system nor nvidia-smi tells"
    yield _Finding("driver", True, f"{driver}; torch is built for CUDA {found.cuda}")
    if loops is None:
        yield _Finding("loops on GPU", False, "plain torch: Triton is missing, or this GPU is too old for it")
        return
    own, plain = loops
    rest = f"; {len(plain)} in plain torch: {', '.join(plain)}" if plain else ""
    yield _Finding("loops on GPU", True, f"{len(own)} in Triton {found.triton or ''}".strip() + rest)


def _packages() -> Iterator[_Finding]:
    for name, (purpose, remedy) in _PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            yield _Finding(name, False, f"needed for {purpose}: {remedy}")
        else:
            yield _Finding(name, True, importlib.metadata.version(name))


def _allocator() -> Iterator[_Finding]:
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return
    found = next((name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in mapped), None)
    if found is not None:
        yield _Finding("allocator", True, f"{found}: memory that forward frees is used again")
    elif platform.libc_ver()[0] == "glibc":
        yield _Finding(
            "allocator",
            False,
            "glibc's malloc, with which compress_activations hardly lowers a process's peak on CPU; "
            "docs/how-to/activations.md says how to use jemalloc",
        )


def _links() -> Iterator[_Finding]:
    from narrowband.lab import LabConfig, requirements

    said: list[str] = []
    for name, config in (
        ("emulated rates", LabConfig(nodes=2)),
        ("emulated delay and loss", LabConfig(nodes=2, delay="1ms", loss="0.1%")),
    ):
        missing = requirements(config)
        new = [problem for problem in missing if problem not in said] or ["need the same as emulated rates"]
        said += missing
        yield _Finding(name, not missing, "\n".join(new) if missing else "narrowband lab, narrowband bench ddp")
