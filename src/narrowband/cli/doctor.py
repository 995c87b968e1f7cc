"""``narrowband doctor``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from narrowband.cli.exits import DONE
from narrowband.errors import DISTRIBUTION, pip_install

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

__all__ = ["Doctor"]

#: What PyPI has under the name of our package.
_NAMESAKE = "narrowband"

#: Package → (what goes without it, how to get it).
_PACKAGES = {
    "numba": ("fast loops on CPU", "pip install numba, or NARROWBAND_KERNELS=reference to do without"),
    "pyroute2": ("narrowband lab and narrowband bench ddp behind links", "pip install pyroute2"),
    "matplotlib": ("pictures", pip_install("plots")),
}


#: One of every kind; numbers make no difference, but for bits.
_SPECS = (
    "none", "fp16", "qsgd:bits=4", "qsgd:bits=8", "qsgd:bits=2", "uniform:bits=4", "uniform:bits=8", "sign+ef",
    "topk:density=0.01+ef", "topk:density=0.04,values=int8+ef-mixed", "randomk:density=0.01+ef", "qsgd:bits=4+ef21",
    "lowrank:rank=4+ef", "dgc:density=0.001", "powersgd:rank=4",
)  # fmt: skip


@dataclass(frozen=True)
class _Finding:
    """One line: a name, whether it is there, and more about it."""

    name: str
    good: bool
    detail: str


@dataclass(frozen=True)
class Doctor:
    """Say what this machine can do, what is missing, and how to get it.

    Whether links can be emulated is tried, not guessed: one rank's namespaces are made and removed again.

    Args:
        compile: compile the loops on CPU now, for all usual specs, so that no program waits for that later.

    Examples:
      narrowband doctor
      narrowband doctor --compile
    """

    compile: bool = False

    def __call__(self, console: Console, behind: list[str] | None) -> int:
        from rich.markup import escape
        from rich.table import Table

        from narrowband.report.record import machine, versions

        table = Table(box=None, show_header=False, padding=(0, 1))
        for finding in (*_namesake(), *_backends(), *_packages(), *_allocator(), *_links()):
            mark = "[green]yes" if finding.good else "[yellow]no"
            table.add_row(mark, f"[bold]{finding.name}", escape(finding.detail))
        about = machine()
        console.print(f"{about['cpu']}, {about['usable_cores']} cores, {about['memory_gib']} GiB", highlight=False)
        console.print(", ".join(f"{name} {version}" for name, version in versions().items()), highlight=False)
        console.print(table)
        if self.compile:
            _compile()
        return DONE


def _namesake() -> Iterator[_Finding]:
    """Another project's distribution is called as this one's package is, and brings a package of the same name."""
    try:
        version = importlib.metadata.version(_NAMESAKE)
    except importlib.metadata.PackageNotFoundError:
        return
    yield _Finding(
        "import narrowband",
        False,
        f"the distribution {_NAMESAKE!r} {version} is installed: another project (for NB-IoT modems), with files in "
        f"the same folder as ours. Run: pip uninstall {_NAMESAKE} {DISTRIBUTION}; pip install {DISTRIBUTION}",
    )


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

    threads = torch.get_num_threads()
    backend = kernels.backend_for("cpu").name
    loops = f"{'Numba' if backend == 'cpu' else 'plain torch'}, {threads} thread{'s' if threads != 1 else ''}"
    yield _Finding("loops on CPU", True, f"{loops} (torch.set_num_threads or OMP_NUM_THREADS changes that)")
    if torch.cuda.is_available():
        yield _Finding("CUDA", True, f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}")
        fast = kernels.backend_for("cuda").name == "cuda"
        how = (
            "Triton, and plain torch where Triton has none"
            if fast
            else "plain torch: Triton is missing, or this GPU is too old for it"
        )
        yield _Finding("loops on GPU", fast, how)
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
    yield _Finding("NCCL", dist.is_nccl_available(), "collectives on GPU; comes with CUDA builds of torch")


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

    for name, config in (
        ("emulated rates", LabConfig(nodes=2)),
        ("emulated delay and loss", LabConfig(nodes=2, delay="1ms", loss="0.1%")),
    ):
        missing = requirements(config)
        yield _Finding(name, not missing, "\n".join(missing) or "narrowband lab, narrowband bench ddp")
