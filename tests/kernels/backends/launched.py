"""Launches loops on a driver that only notes launches, by Triton's launcher and by what is remembered of it.

``python -m tests.kernels.backends.launched [every]``, without ``TRITON_INTERPRET``, where ``libcuda.so.1`` is that of
``driver.c``. Prints as JSON what was noted: of some loops, or if ``every`` is given of all loops that wrappers launch.
Tensors lie in the host's memory and say that they are a GPU's; all else is Triton as it launches loops on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from narrowband.kernels import Rows
from narrowband.kernels.backends import Backend
from narrowband.kernels.cuda import launching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The current device, the device of all tensors, and the current stream of each device.
now = SimpleNamespace(device=0, place=0, streams=[0, 0])


@contextlib.contextmanager
def _device_of(_: Any) -> Iterator[None]:
    before, now.device = now.device, now.place
    yield
    now.device = before


torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda _device=None: (9, 0)  # type: ignore[assignment]
torch.cuda.current_device = lambda: now.device
torch.cuda.device_of = _device_of  # type: ignore[assignment,misc]
torch._C._cuda_getDevice = lambda: now.device  # type: ignore[attr-defined]
torch._C._cuda_getCurrentRawStream = lambda device: now.streams[device]  # type: ignore[attr-defined]
torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment,misc]
torch.Tensor.get_device = lambda _: now.place  # type: ignore[assignment,method-assign]

sys.setdlopenflags(os.RTLD_LAZY)  # what Triton does not call, the driver need not have
driver = ctypes.CDLL("libcuda.so.1")
driver.take_noted.restype = ctypes.c_char_p
cuda = Backend("narrowband.kernels.cuda")
start, call = launching.start, launching.Launch.__call__

#: (loop, whether its launcher's C function is called, way → lines that the driver noted)
found: list[tuple[str, bool, dict[str, list[str]]]] = []
_log: list[str] = []


def noted(body: Callable[[], object]) -> list[str]:
    """Return what the driver noted of this."""
    begin = len(_log)
    body()
    _log.extend(driver.take_noted().decode().splitlines())
    own = _log[begin:]
    del _log[begin:]
    return own


_FORMATS = {"i32": "<i", "i64": "<q", "u64": "<Q", "i1": "<B", "u1": "<B", "fp32": "<f"}


def expected(started: Any, programs: int, arguments: tuple[Any, ...], before: str) -> str:
    """Return the line of a launch, computed from its arguments; function and attributes are taken from ``before``."""
    name, *_, attributes, _ = before.split()
    values = []
    for kind, value in zip(started.compiled.src.signature.values(), (*arguments, *started.constants), strict=True):
        if kind != "constexpr":
            plain = value.data_ptr() if isinstance(value, torch.Tensor) else value
            values.append(struct.pack("<Q" if kind[0] == "*" else _FORMATS[kind], plain).hex())
    about = started.compiled.metadata
    return (
        f"{name} grid={programs * about.num_ctas},1,1 block={32 * about.num_warps},1,1 shared={about.shared} "
        f"stream={now.streams[now.device]} extra=0 {attributes} parameters={','.join([*values, '0' * 16, '0' * 16])}"
    )


def start_every_way(loop: Any, programs: int, arguments: tuple[Any, ...], on: Any, constants: dict[str, Any]) -> Any:
    """Start a loop, instead of :func:`launching.start`."""
    started = None

    def once() -> None:
        nonlocal started
        started = start(loop, programs, arguments, on, constants)

    first = noted(once)
    ways = {"first": first, "again": noted(once)}
    ways["Triton"] = noted(lambda: loop[(programs,)](*arguments, **constants, enable_fp_fusion=False))
    if started is not None and not started.compiled.metadata.global_scratch_size:
        ways["expected"] = [expected(started, programs, arguments, first[0])]
    found.append((loop.__name__, started is not None and started.direct is not None, ways))
    _log.extend(first)
    return started


def call_every_way(launch: Any, on: Any, tensors: tuple[Any, ...], *last: int) -> None:
    """Start loops, instead of :meth:`launching.Launch.__call__`."""
    first = noted(lambda: call(launch, on, tensors, *last))
    ways = {"first": first, "again": noted(lambda: call(launch, on, tensors, *last))}

    def by_triton() -> None:
        with torch.cuda.device_of(on):
            for loop, programs, numbers, constants, less in launch._steps:
                own = tensors[: len(tensors) - less]
                loop[(programs,)](*own, *numbers, *last, **constants, enable_fp_fusion=False)

    ways["Triton"] = noted(by_triton)
    known = launch._known.get(now.place, ())
    names = "+".join(step.loop.__name__ for step in launch._steps)
    found.append((f"Launch {names}", bool(known) and all(each.started.direct for each in known), ways))
    _log.extend(first)


launching.start = start_every_way  # type: ignore[assignment]
launching.Launch.__call__ = call_every_way  # type: ignore[method-assign]


# ---- loops of all kinds of arguments ---------------------------------------------------------------------------------


@launching.kernel
def _any_kind(x, y, note, n, one, even, wide, unsigned, flag, factor, folded, WIDTH: tl.constexpr, TWICE: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + i, mask=i < n) * factor + one + even + wide + unsigned + folded
    if flag and TWICE:
        value *= 2
    tl.store(y + i, value.to(tl.uint8), mask=i < n)
    tl.store(note, n)


@launching.kernel
def _only_pointers(x, y, WIDTH: tl.constexpr):
    tl.store(y + tl.arange(0, WIDTH), tl.load(x + tl.arange(0, WIDTH)))


@launching.kernel
def _with_scratch(x, n, WIDTH: tl.constexpr):
    rows = tl.make_tensor_descriptor(x, shape=[n, WIDTH], strides=[WIDTH, 1], block_shape=[8, WIDTH])
    rows.store([0, 0], rows.load([8, 0]))


def launch_any_kind() -> None:
    """Arguments that Triton tells apart, attributes of launches, streams, devices and a profiler's sight."""
    constants: dict[str, Any] = {"WIDTH": 128, "TWICE": 1, "num_warps": 8}
    memory = [torch.zeros(4096, dtype=torch.uint8) for _ in range(9)]

    def run(
        n: int = 99, first: int = 0, wide: int = 1 << 40, flag: bool = True, factor: float = 0.1, folded: int = -7,
        **more: Any,
    ) -> None:  # fmt: skip
        x, y, note, *rest = memory
        memory[:] = [*rest, x, y, note]  # other tensors each time
        given = x[first:].view(torch.float32) if not first % 4 else x, y, note.view(torch.int32)
        launching.run(
            _any_kind, 7, *given, n, 1, 48, wide, (1 << 64) - 3, flag, factor, folded, on=x, **{**constants, **more}
        )  # fmt: skip

    run()
    for at, stream in enumerate((0x7F0012345678, 1, 0)):
        now.streams[0] = stream
        run(n=100 + at)
        for folded in (1, 0, 16, 2**31 - 1, -(2**31)):
            run(folded=folded, flag=bool(at % 2), factor=[1.0, 1 / 3, float("nan")][at])
        run(folded=2**31 + at)
        run(folded=2**63 + at)
    run(n=1)
    run(n=1)
    run(n=4096)
    run(n=2**31 + 1)
    run(wide=2**40 + 1)
    run(first=4)
    run(first=8)
    run(TWICE=0)
    for options in ({"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True}):
        run(**options)
        run(**options)
    launch = launching.Launch(_only_pointers, 5, (), WIDTH=64)
    launch(memory[0], (memory[0], memory[1]))
    runtime, seen = triton.knobs.runtime, []
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hook.add(seen.append)
        run()
        launch(memory[0], (memory[0], memory[1]))
        hook.remove(seen.append)
    assert [about.get()["name"] for about in seen] == 2 * [*3 * ["_any_kind"], *3 * ["_only_pointers"]]
    for at in range(4):
        now.streams[0] = 64 * at
        launch(memory[at], (memory[at], memory[at + 1]))
    launch(memory[0], (memory[0][1:], memory[1]))
    now.streams[1], now.place = 77, 1
    for device in (0, 1):  # the current one; the tensor's is 1
        now.device = device
        for at in range(2):
            launch(memory[at], (memory[at], memory[at + 1]))
            run()
    now.device = now.place = 0
    triton.set_allocator(lambda _size, _alignment, _stream: memory[8])
    for n in (99, 100):
        launching.run(_with_scratch, 3, memory[0], n, on=memory[0], WIDTH=64)


# ---- loops that wrappers launch --------------------------------------------------------------------------------------


def launch_some() -> None:
    """One tensor, several at once, rows by one loop and by two, and a folded seed."""
    for seed in (1, 16, 2**40 + 5, 2**64 - 1):
        x, out = torch.zeros(5000), torch.zeros(20_000, dtype=torch.uint8)
        cuda.quantize_groups(x, out, bits=4, group=128, scale="minmax", stochastic=True, seed=seed)
        cuda.checksum(out[: 4000 + seed % 7])
        form: dict[str, Any] = {"bits": 5, "group": 128, "scale": "minmax", "stochastic": True}
        cuda.quantize_all([x], [out], seeds=[seed], **form)
        for rows in (Rows(1, 25, 2, 100), Rows(2, 25, 1, 100)):
            y, codes = x.to(torch.bfloat16), out[: rows.nbytes(8)]
            cuda.dequantize_rows(codes, y, rows, torch.zeros(2, 2), bits=8)
        cuda.quantize_rows_adapting(
            y, codes, Rows(1, 50, 1, 100), torch.ones(2, 1), 0.9, torch.zeros(1), drift=0.02, jump=4.0, bits=8,
            stochastic=True, seed=seed,
        )  # fmt: skip
        cuda.learn_ranges(torch.zeros(2, 9), torch.zeros(9), torch.zeros(9), 0.9)


def calls_of(body: Callable[[], object]) -> dict[str, int]:
    """Return how many functions of Python and of C the second of two calls enters, and about how many pointers the
    driver is asked.
    """
    counts = {"Python": 0, "C": 0}

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "c_call":
            counts["C"] += frame.f_code.co_filename != __file__
        elif event == "call":  # on a GPU, what this file has instead is C
            counts["C" if frame.f_code.co_filename == __file__ else "Python"] += 1

    body()
    asked = driver.count_pointers()
    sys.setprofile(profile)
    body()
    sys.setprofile(None)
    # Without the body itself.
    return {"Python": counts["Python"], "C": counts["C"] - 1, "pointers": driver.count_pointers() - asked}


def calls_of_ways() -> dict[str, dict[str, int]]:
    """Return what a launch of three pointers and eight numbers takes the host, by each way."""
    launching.start, launching.Launch.__call__ = start, call  # type: ignore[method-assign]
    x = [torch.zeros(4096, dtype=torch.uint8) for _ in range(3)]
    numbers, constants = (99, 3, 48, 1 << 40, (1 << 64) - 3, True, 0.5), {"WIDTH": 128, "TWICE": 1}
    tensors = x[0].view(torch.float32), x[1], x[2].view(torch.int32)
    ways: dict[str, Callable[[], object]] = {
        "Triton": lambda: _any_kind[(7,)](*tensors, *numbers, 5, **constants, enable_fp_fusion=False),
        "run": lambda: launching.run(_any_kind, 7, *tensors, *numbers, 5, on=x[0], **constants),
    }
    launch = launching.Launch(_any_kind, 7, numbers, **constants)
    ways["Launch"] = lambda: launch(x[0], tensors, 5)
    counts = {way: calls_of(body) for way, body in ways.items()}
    launching._direct = lambda *_: None  # type: ignore[assignment]
    launching._started.clear()
    launch = launching.Launch(_any_kind, 7, numbers, **constants)
    return counts | {f"{way} by the launcher": calls_of(ways[way]) for way in ("run", "Launch")}


if __name__ == "__main__":
    if "every" in sys.argv[1:]:
        from tests.kernels.backends.compiled import call_wrappers

        torch.empty = torch.zeros  # what is read should be possible
        call_wrappers(every=True)
        print(json.dumps({"found": found}))
    else:
        launch_any_kind()
        launch_some()
        print(json.dumps({"found": found, "calls": calls_of_ways()}))
