"""Launching loops, for one tensor or for several tensors at once, at little cost to the host.

At every launch, Triton inspects all arguments and looks up the machine code by a text that describes them: tens of µs
of Python for a loop that may take the GPU 5 µs. Here, compiled loops are stored by what their machine code depends on,
and launched again from there, by the C function that Triton's launcher ends in (:func:`_direct`). Where all but the
tensors and a seed is known before, :class:`Launch` does not even ask what the machine code depends on.

`tests/kernels/backends/test_direct_launches.py` compares this with Triton's own launcher, on a CUDA driver that notes
launches instead of running them. The driver gets the same function, grid, block, shared memory, stream, attributes, and
bytes of each parameter: for every loop with Triton 3.6 and 3.9, for some of every kind with 3.7 and 3.8.

Tables for launches over several tensors go to the GPU through memory that is allocated once (:class:`_Stage`), because
allocating new pinned memory costs as much as the launch.
"""

from __future__ import annotations

import copy
import functools
import operator
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Launch", "Segments", "kernel", "kind_of", "run", "segment", "start"]

#: Numbers that happen to be 1 do not become constants of the program, since constants have no dtype.
kernel: Any = triton.jit(do_not_specialize=["folded"])


class _Started(NamedTuple):
    """A loop that was started, and the constants that Triton's launcher takes behind the arguments.

    Attributes:
        direct: the C function that Triton's launcher ends in, and what the launcher gives it between the stream and the
            arguments; see :func:`_direct`. None: only the launcher itself can be called.
    """

    compiled: Any
    run: Any
    stream: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    direct: tuple[Any, tuple[Any, ...]] | None


#: What was started before. The keys are what the machine code depends on.
_started: dict[Any, _Started] = {}


def run(loop: Any, programs: int, *arguments: Any, on: Tensor, **constants: Any) -> _Started | None:
    """Launch ``programs`` programs of a loop, on the device of the tensor ``on`` and in its current stream.

    Returns:
        What can be started again; None where nothing can be, as in Triton's interpreter.
    """
    if not programs:
        return None
    if not on.is_cuda:
        with np.errstate(all="ignore"):  # the interpreter uses NumPy, which would warn of every NaN
            loop[(programs,)](*arguments, **constants, enable_fp_fusion=False)
        return None
    if on.get_device() == torch.cuda.current_device():
        return start(loop, programs, arguments, on, constants)
    with torch.cuda.device_of(on):
        return start(loop, programs, arguments, on, constants)


def start(
    loop: Any, programs: int, arguments: tuple[Any, ...], on: Tensor, constants: dict[str, Any]
) -> _Started | None:
    """Launch a loop on the current device; see :func:`run`."""
    kind = kind_of(loop, arguments) if torch.version.hip is None else None  # AMD's machine code depends on more
    if kind is None:
        loop[(programs,)](*arguments, **constants, enable_fp_fusion=False)
        return None
    device = on.get_device()
    key = id(loop), device, kind, tuple(constants), tuple(constants.values())
    found = _started.get(key)
    if found is not None:
        _again(found, device, programs, arguments)
        return found
    compiled = loop[(programs,)](*arguments, **constants, enable_fp_fusion=False)
    rest = tuple(constants[parameter.name] for parameter in loop.params[len(arguments) :])
    function, metadata = compiled.function, compiled.packed_metadata
    found = _started[key] = _Started(
        compiled, compiled.run, triton.runtime.driver.active.get_current_stream, function, metadata, rest,
        _direct(compiled.run, function, metadata, len(arguments) + len(rest)),
    )  # fmt: skip
    return found


def _direct(launcher: Any, function: Any, metadata: Any, count: int) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the C function that a launcher of Triton ends in, and what it gives that between stream and arguments.

    A launcher asks for scratch memory and for profilers before each launch, which takes the host longer than the C
    function does. For a loop without scratch memory, the answers are always the same. A copy of the launcher tells
    them: its C function is replaced by one that notes what it is called with.

    Returns:
        A function that takes the arguments in one tuple, behind all else. None where the launcher is not as expected,
        as another version's may be, or the loop needs memory of its own.
    """
    seen: list[tuple[Any, ...]] = []
    programs, stream, arguments = object(), object(), tuple(object() for _ in range(count))
    try:
        asked, launch = copy.copy(launcher), launcher.launch
        asked.launch = lambda *given: seen.append(given)
        asked(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError, AssertionError):
        return None  # it computes with its arguments, checks them, or is no such object at all
    if len(seen) != 1 or any(hasattr(value, "data_ptr") for value in seen[0]):
        return None
    (given,) = seen
    if given[:4] != (programs, 1, 1, stream):
        return None
    if given[-1] == arguments:
        return launch, given[4:-1]
    if given[-count:] == arguments:  # one by one, as Triton 3.6 gives them
        return lambda *rest: launch(*rest[:-1], *rest[-1]), given[4:-count]
    return None


def _again(found: _Started, device: int, programs: int, arguments: tuple[Any, ...]) -> None:
    """Start a loop again, on the current device. Instead of a tensor, its address may be given."""
    compiled, run, stream, function, metadata, constants, direct = found
    if _is_watched():
        compiled[(programs, 1, 1)](*arguments, *constants)
    elif direct is not None:
        direct[0](programs, 1, 1, stream(device), *direct[1], (*arguments, *constants))
    else:
        run(programs, 1, 1, stream(device), function, metadata, None, None, None, *arguments, *constants)


_runtime = triton.knobs.runtime


def _is_watched() -> bool:
    """Whether a profiler wants to know of every launch."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def kind_of(loop: Any, arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return what the machine code depends on, for the arguments that are no constants.

    This is the dtype of tensors, and whether their memory begins at a multiple of 16 bytes; and of whole numbers,
    whether they are 1, a multiple of 16, and fit into 32 bits. None if an argument is of another kind, which only
    Triton can judge.
    """
    plain = _plain.get(id(loop))
    if plain is None:
        plain = _plain[id(loop)] = tuple(bool(parameter.do_not_specialize) for parameter in loop.params)
    kinds: list[Any] = []
    add = kinds.append
    for value, is_plain in zip(arguments, plain, strict=False):
        kind = type(value)
        if kind is int:
            wide = 0 if -0x80000000 <= value <= 0x7FFFFFFF else 1 if value <= 0x7FFFFFFFFFFFFFFF else 2
            add(wide if is_plain else 4 * wide + 2 * (value == 1) + (value % 16 == 0))
        elif isinstance(value, torch.Tensor):
            add(value.dtype)
            if not is_plain:
                add(value.data_ptr() % 16 == 0)
        elif kind is float or kind is bool:
            add(kind)
        else:
            return None
    return tuple(kinds)


#: For each loop, the parameters that Triton does not specialize. The key is the loop's id; a loop lives as long as its
#: module.
_plain: dict[int, tuple[bool, ...]] = {}


#: Returns the address of a tensor.
_POINTER = torch.Tensor.data_ptr
#: Has what ``torch.cuda.current_device`` asks, after it has made sure that CUDA is initialized; with tensors it is.
_there: Any = torch._C


class Launch:
    """A loop with all arguments but some tensors, and perhaps a number: what a launch has in common with many others.

    Args:
        loop: the loop. Its parameters are pointers, those that are not specialized behind all others; then numbers;
            then perhaps one of 32 bits that differs from launch to launch and is not specialized; then constants.
        programs: how many programs to launch.
        numbers: the numbers.
        constants: the constants, and options of Triton.

    Example:
        >>> launch = Launch(loop, 8, (768, 12), BITS=4)  # doctest: +SKIP
        >>> launch(x, (x, codes, ranges), seed)  # doctest: +SKIP
    """

    __slots__ = ("_aligned", "_known", "_steps")

    def __init__(self, loop: Any, programs: int, numbers: tuple[Any, ...], **constants: Any) -> None:
        self._steps = [_Step(loop, programs, numbers, constants)]
        #: By device: what was started with pointers to multiples of 16 bytes, as far as Triton asks.
        self._known: dict[int, list[_Known]] = {}
        self._aligned = 0  # how many pointers it asks about

    def then(self, other: Launch, *, more: int = 0) -> Launch:
        """Have another loop launched behind this one, with the same tensors and ``more`` behind these, and return self.

        Addresses are looked up once for both.
        """
        self._steps = [step._replace(less=step.less + more) for step in self._steps] + other._steps
        return self

    def __call__(self, on: Tensor, tensors: tuple[Tensor, ...], *last: int) -> None:
        """Launch the loop on the device of ``on``, with these tensors, whose dtypes are always the same."""
        device = on.get_device()
        known = self._known.get(device)
        if known is not None and device == _there._cuda_getDevice():  # noqa: SLF001
            pointers = tuple(map(_POINTER, tensors))
            if not functools.reduce(operator.or_, pointers[: self._aligned], 0) % 16:
                watched = _is_watched()
                for started, programs, count, numbers, (launch, between), stream, constants in known:
                    if launch is None or watched:
                        _again(started, device, programs, (*pointers[:count], *numbers, *last))
                    else:
                        given = *pointers[:count], *numbers, *last, *constants
                        launch(programs, 1, 1, stream(device), *between, given)
                return
        self._look(on, tensors, last)

    def _look(self, on: Tensor, tensors: tuple[Tensor, ...], last: tuple[int, ...]) -> None:
        """Launch as Triton does, and remember what was started."""
        known: list[_Known] = []
        for loop, programs, numbers, constants, less in self._steps:
            own = tensors[: len(tensors) - less]
            started = run(loop, programs, *own, *numbers, *last, on=on, **constants)
            if started is not None:
                plain = [parameter.do_not_specialize for parameter in loop.params[: len(own)]]
                self._aligned = max(self._aligned, plain.index(True) if True in plain else len(plain))
                direct = started.direct or (None, ())
                known.append(_Known(started, programs, len(own), numbers, direct, started.stream, started.constants))
        if len(known) == len(self._steps) and all(x.data_ptr() % 16 == 0 for x in tensors[: self._aligned]):
            self._known[on.get_device()] = known


class _Step(NamedTuple):
    """A loop of a launch, and how many of the last tensors it does not take."""

    loop: Any
    programs: int
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    less: int = 0


class _Known(NamedTuple):
    """A loop that was started: with how many programs and tensors, and with which numbers behind these.

    ``direct``, ``stream`` and ``constants`` are those of :class:`_Started`, at hand for the next launch.
    """

    started: _Started
    programs: int
    tensors: int
    numbers: tuple[Any, ...]
    direct: tuple[Any, tuple[Any, ...]]
    stream: Any
    constants: tuple[Any, ...]


# ---- several tensors -------------------------------------------------------------------------------------------------


class Segments:
    """Several tensors in one launch: a table on their device with a row of int64 numbers for each tensor.

    The first column is the first program of the tensor; by it, a program finds its tensor. If launches differ in how
    many programs work on a tensor, there is such a column for each of these grids. A table is valid only for loops that
    are launched right away, one after the other.

    Args:
        on: one of the tensors.
        grids: how many grids there are.
    """

    def __init__(self, on: Tensor, grids: int = 1) -> None:
        self._on = on
        self._rows: list[tuple[int, ...]] = []
        self._table: Tensor | None = None
        self._programs = [0] * grids

    @property
    def programs(self) -> int:
        """The number of programs of the first grid so far."""
        return self._programs[0]

    def add(self, programs: int | Sequence[int], *numbers: int) -> None:
        """Add a tensor that ``programs`` programs work on, in each grid, and its numbers; nothing if none do."""
        own = (programs,) if isinstance(programs, int) else programs
        if any(own):
            self._rows.append((*self._programs, *numbers))
            self._programs = [before + more for before, more in zip(self._programs, own, strict=True)]
            self._table = None

    def run(self, loop: Any, *arguments: Any, grid: int = 0, **constants: Any) -> None:
        """Launch the programs of a grid, with the table, the number of tensors, and these arguments."""
        programs = self._programs[grid]
        if programs:
            count, most = len(self._rows), triton.next_power_of_2(len(self._rows))
            run(loop, programs, self._on_device(), count, *arguments, on=self._on, SEGMENTS=most, **constants)

    def run_each(self, loop: Any, *arguments: Any, **constants: Any) -> None:
        """Launch a loop with one program per tensor, for which it is a row of the table; and with these arguments."""
        if self._rows:
            run(loop, len(self._rows), self._on_device(), *arguments, on=self._on, **constants)

    def _on_device(self) -> Tensor:
        if self._table is None:
            self._table = _on_device(np.array(self._rows, dtype=np.int64).ravel(), self._on.device)
        return self._table


@kernel
def segment(table, count, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr, GRID: tl.constexpr = 0):
    """Return the row of this program's tensor in the table of :class:`Segments`, and the program's number within the
    tensor.
    """
    own = tl.program_id(0).to(tl.int64)
    at = 0
    begin = own * 0
    if SEGMENTS > 1:
        row = tl.arange(0, SEGMENTS)
        first = tl.load(table + GRID + row * COLUMNS, mask=row < count, other=0x7FFFFFFF)
        at = tl.sum((first <= own).to(tl.int32), 0) - 1  # tensors of no programs begin where the next one does
        begin = tl.load(table + GRID + at * COLUMNS)
    return table + at * COLUMNS, own - begin


def _on_device(numbers: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy int64 numbers to a device. They are valid for work put into the current stream until a few calls later."""
    if device.type != "cuda":
        return torch.from_numpy(numbers)
    stages: dict[torch.cuda.Stream, _Stage] = _mine.__dict__.setdefault("stages", {})
    stream = torch.cuda.current_stream(device)
    stage = stages.get(stream)
    if stage is None:
        stage = stages[stream] = _Stage(device)
    return stage.put(numbers, stream)


#: Per thread.
_mine = threading.local()


class _Stage:
    """Memory for tables, for one thread and one stream: a host part that the GPU can read, and its copy on the GPU.

    Both parts are filled from one end to the other, in two halves. A half is overwritten only after the stream has
    finished the work that it was given while the half was filled; almost always, it has finished long before.
    """

    _HALF = 1 << 13

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pins = device.type == "cuda"
        self._here = torch.empty(2 * self._HALF, dtype=torch.int64, device="cpu", pin_memory=self._pins)
        self._numbers = self._here.numpy()
        self._there = torch.empty(2 * self._HALF, dtype=torch.int64, device=device)
        self._at = 0
        self._done: list[torch.cuda.Event | None] = [None, None]

    def put(self, numbers: np.ndarray[Any, Any], stream: torch.cuda.Stream) -> Tensor:
        """Write numbers to the host part, and copy them to the GPU."""
        size = len(numbers)
        if size > self._HALF:
            long = torch.from_numpy(numbers)
            return (long.pin_memory() if self._pins else long).to(self.device, non_blocking=True)
        half = self._at // self._HALF
        if self._at + size > (half + 1) * self._HALF:
            self._done[half] = stream.record_event()
            half = 1 - half
            self._at = half * self._HALF
            event = self._done[half]
            if event is not None:
                event.synchronize()
        span = slice(self._at, self._at + size)
        self._at += -(-size // 2) * 2  # align the next table to 16 bytes, too
        self._numbers[span] = numbers
        there = self._there[span]
        there.copy_(self._here[span], non_blocking=True)
        return there
