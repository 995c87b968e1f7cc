"""Counts and times what saved activations cost the host of a GPU, without a GPU.

The host of a GPU runs ahead of it. If Python takes longer for a step than the GPU does, the GPU waits for Python. Here
a small vision transformer under bfloat16 autocast goes the way that it goes on a GPU: Triton compiles the loops for
sm_90, binds their arguments and starts them. Only NVIDIA's driver is replaced, by one that does nothing
(:data:`_DRIVER`), and tensors lie on the CPU. So Triton needs a C compiler, as it does on a GPU.

Loops compute nothing, so gradients are meaningless. What NVIDIA's driver itself takes for a launch is not counted.

.venv/bin/python -m benchmarks.host --json host.json
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import gc
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # of the tests' environment; read when Triton is imported

import torch
import triton
import triton.backends.nvidia.driver
from torch.utils._python_dispatch import TorchDispatchMode

import narrowband as nb
from narrowband.activations import packed, scores
from narrowband.activations.arena import Arena
from narrowband.activations.normalization import Normalization
from narrowband.activations.packed import Packed
from narrowband.activations.recorder import Recorder
from narrowband.activations.regions import active
from narrowband.bench.models import ViT
from narrowband.kernels import backends
from narrowband.kernels.backends import Backend
from narrowband.kernels.cuda import launching, masks, rows
from narrowband.report.record import provenance, write_json

#: What of NVIDIA's driver has to answer for loops to be loaded and started. All else only returns 0, for success.
_DRIVER = """
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDeviceGetAttribute(int *value) { *value = 227 << 10; return 0; }
int cuFuncGetAttribute(int *value) { *value = 1 << 10; return 0; }
int cuModuleLoadData(void **module) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function) { *function = (void *)1; return 0; }
int cuPointerGetAttribute(void **data, int what, void *pointer) { *data = pointer; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no driver"; return 0; }
"""

#: Where a function is counted: the first of these that is in the name of its file. What is written in C counts where it
#: is called, but PyTorch's functions count for themselves.
_PARTS = {
    "Triton": "/triton/", "launching": "/narrowband/kernels/cuda/launching.py", "loops": "/narrowband/kernels/",
    "function mode": "/narrowband/activations/operators.py", "packing": "/narrowband/activations/",
}  # fmt: skip
_OPERATORS = "PyTorch"
#: Operators of PyTorch that allocate memory.
_ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "zeros", "clone", "_to_copy", "cat", "stack")
#: Those for which the host waits until the device is done.
_WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
#: Steps before ranges are known.
_FIRST = 3


def drive() -> None:
    """From now on, Triton takes this machine for one with an H100, whose driver does nothing."""
    source = Path(triton.backends.nvidia.driver.__file__)
    text = source.read_text() + source.with_suffix(".c").read_text()
    own = {*re.findall(r"\bcu[A-Z]\w*(?=\()", _DRIVER)}
    rest = {*re.findall(r"\b(cu[A-Z]\w*)(?:_t\b|\()", text)} - own
    folder = Path(triton.knobs.cache.dir) / "narrowband-host"  # where Triton finds again what it has linked with this
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:
        code, library = Path(new, "libcuda.c"), folder / "libcuda.so.1"
        code.write_text(_DRIVER + "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(rest)))
        command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", code]
        subprocess.run([*command, "-o", Path(new, library.name)], check=True)
        Path(new, library.name).replace(library)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    triton.knobs.nvidia.libcuda_path = str(folder)
    own_torch: Any = torch._C
    own_torch._cuda_getDevice = lambda: -1  # what CPU tensors say of their device
    own_torch._cuda_getCurrentRawStream = lambda _: 0
    torch.cuda._initialized = True
    torch.cuda.get_device_capability = lambda _=None: (9, 0)
    triton.runtime.driver.set_active(triton.backends.nvidia.driver.CudaDriver())


class Step:
    """Steps of a small transformer whose saved activations go the way that they go on a GPU.

    Args:
        bits: of saved activations; None: nothing is packed.
        run: starts loops, instead of :func:`narrowband.kernels.cuda.launching.run`.

    Attributes:
        packed: how many tensors the last step packed.
    """

    def __init__(self, bits: Literal[8, 4, 2] | None, run: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self._model, self._x = ViT(dim=64, heads=2, blocks=2, image=64, patch=8, classes=10), torch.randn(2, 3, 64, 64)
        self._context = None if bits is None else nb.compress_activations(self._model, bits=bits)
        self._run = run
        self.packed = 0
        with mock.patch.object(packed, "AHEAD", {"cpu"}):
            for _ in range(_FIRST):  # with loops that do compute ranges
                self.forward().backward()

    @contextmanager
    def as_on_a_gpu(self) -> Iterator[None]:
        """Steps take the GPU's way meanwhile."""
        with ExitStack() as stack:
            patched: Callable[..., Any] = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
            stack.enter_context(mock.patch.dict(backends._chosen, {"cpu": Backend("narrowband.kernels.cuda")}))
            patched(packed, "AHEAD", {"cpu"})
            patched(Arena, "pools", False)
            for module in (packed, scores):
                patched(module, "by_chance", lambda _: False)  # one tensor in 64 costs more
            for module in (launching, rows, masks):
                patched(module, "run", self._run)
            _forget()
            yield
            _forget()

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        for parameter in self._model.parameters():
            parameter.grad = None
        with self._context or nullcontext(), torch.autocast("cpu", torch.bfloat16):
            y = self._model(self._x)
            if active.regions is not None:
                self.packed = active.regions.recorder.packed
        loss: torch.Tensor = y.float().square().mean()
        return loss


def _forget() -> None:
    """Forget how loops were started."""
    for prepared in (rows._adapting, rows._decoding):
        prepared.cache_clear()


class _Operators(TorchDispatchMode):
    """Counts operators of PyTorch, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def counted(bits: Literal[8, 4, 2]) -> dict[str, Any]:
    """Count what a step that packs does more than one that does not, in forward and in backward.

    Returns:
        ``bits``; ``packed``, the number of tensors that were packed; and for ``forward`` and ``backward`` the
        ``launches`` and PyTorch's ``operators`` by name, views among them, and the ``allocations`` and ``waits`` among
        these.
    """
    launches: Counter[str] = Counter()

    def note(loop: Any, programs: int, *_arguments: Any, **_constants: Any) -> None:
        launches[loop.__name__] += bool(programs)

    plain, step = Step(None, note), Step(bits, note)
    called: dict[Step, list[Counter[str]]] = {}
    for each in (plain, step):
        with each.as_on_a_gpu():
            each.forward().backward()
            launches.clear()
            with _Operators() as forward:
                loss = each.forward()
            between = Counter(launches)
            with _Operators() as backward:
                loss.backward()
            called[each] = [forward.called, backward.called]
    row: dict[str, Any] = {"bits": bits, "packed": step.packed}
    for name, own, less, started in zip(
        ("forward", "backward"), called[step], called[plain], (between, launches - between), strict=True
    ):
        more = own - less
        row[name] = {
            "launches": dict(started), "operators": dict(more),
            "allocations": sum(more[each] for each in _ALLOCATING), "waits": sum(more[each] for each in _WAITING),
        }  # fmt: skip
    return row


def calls_of(step: Step) -> dict[str, Any]:
    """Return how many functions, in Python and in C, a step calls to pack and to restore, by where they are."""
    profile = cProfile.Profile(time.thread_time)
    with step.as_on_a_gpu():
        for _ in range(2):
            step.forward().backward()
        profile.runcall(lambda: step.forward().backward())
    found: Counter[str] = Counter()
    for (file, _, name), (_, count, _, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        part = _part_of(file)
        if part is not None:
            found[part] += count
            continue
        for (caller, _, _), (_, of_it, _, _) in callers.items():
            part = _part_of(caller)
            if part is not None and not (part == "function mode" and "torch" in name):  # the model's own operators
                found[_OPERATORS if part != "Triton" and "torch" in name + file else part] += of_it
    return {part: found[part] for part in (*_PARTS, _OPERATORS)}


def _part_of(file: str) -> str | None:
    inside = file.replace(str(Path(nb.__file__).parent), "/narrowband")
    own = inside.startswith("/narrowband/") or "/triton/" in file
    return next((part for part, where in _PARTS.items() if own and where in inside), None)


def timed(step: Step, repeats: int) -> dict[str, float]:
    """Return how many µs it takes to pack and to restore a tensor.

    Of each call in a step the least time over all steps counts, so that other processes disturb little.
    """
    least: dict[str, dict[int, float]] = {}
    place: Counter[str] = Counter()

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        times = least.setdefault(name, {})

        def call(*args: Any, **kwargs: Any) -> Any:
            at = place[name] = place[name] + 1
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - begin
                times[at] = min(times.get(at, taken), taken)

        return call

    gc.collect()
    gc.disable()
    with step.as_on_a_gpu(), ExitStack() as stack:
        for name, where, method in (
            ("pack", Recorder, "pack"), ("pack normalized", Normalization, "derive"), ("restore", Packed, "restore"),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(where, method, clocked(name, getattr(where, method))))
        for _ in range(repeats):
            place.clear()
            step.forward().backward()
    gc.enable()
    return {name: 1e6 * sum(times.values()) / step.packed for name, times in least.items()}


def measured(repeats: int) -> list[dict[str, Any]]:
    """Return rows for 8 and for 4 bits. Call :func:`drive` before."""
    made = []
    for bits in (8, 4):
        row = counted(bits)
        row["calls"] = calls_of(Step(bits, _start))
        if repeats:
            row["us"] = timed(Step(bits, _start), repeats)
        made.append(row)
    return made


def _start(loop: Any, programs: int, *arguments: Any, on: Any, **constants: Any) -> Any:
    return launching.start(loop, programs, arguments, on, constants)


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300, help="steps whose times are taken")
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    given = parser.parse_args()
    began = provenance(0, ["python", "-m", "benchmarks.host", *sys.argv[1:]])
    drive()
    torch.set_num_threads(1)
    made = measured(given.repeats)
    for row in made:
        print(f"{row['bits']} bits, for each of {row['packed']} tensors that are packed:")
        each: dict[str, float] = {}
        for way in ("forward", "backward"):
            each |= {
                f"launches in {way}": sum(row[way]["launches"].values()),
                f"operators of PyTorch in {way}": sum(row[way]["operators"].values()),
                f"allocations in {way}": row[way]["allocations"],
                f"waits in {way}": row[way]["waits"],
            }
        each |= {f"calls in {part}": count for part, count in row["calls"].items()}
        each |= {f"µs to {way}": row["packed"] * us for way, us in row.get("us", {}).items()}
        for what, number in each.items():
            print(f"  {what:36}{number / row['packed']:8.1f}")
    if given.json is not None:
        config = {"repeats": given.repeats, "triton": triton.__version__}
        write_json(given.json, began | {"config": config, "rows": made})


if __name__ == "__main__":
    main()
