"""Starting loops: one tensor, or several in one launch, at little cost to the host.

Triton looks at every argument of every launch, and finds the machine code for these by the text of all that it saw:
tens of µs of Python for a loop that the GPU may do in 5. Here a loop that was started once is remembered by what its
machine code depends on, and started again from there.

What a launch reads beside tensors, a table of several of them for one, goes to the GPU through memory that is taken
once (:class:`_Stage`): to take new memory that a GPU can read from costs as much as the launch.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Segments", "kernel", "kind_of", "run", "segment"]

#: Numbers that happen to be 1 are not made constants of the program, since those have no dtype.
kernel: Any = triton.jit(do_not_specialize=["folded"])

#: Compiled loops and their constants, in the order of their parameters, by what the machine code depends on.
_started: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def run(loop: Any, programs: int, *arguments: Any, on: Tensor, **constants: Any) -> None:
    """Start so many programs of a loop, on the device of a tensor and on the stream that is current there."""
    if not programs:
        return
    if not on.is_cuda:
        with np.errstate(all="ignore"):  # the interpreter computes in NumPy, which would speak of every NaN
            loop[(programs,)](*arguments, **constants, enable_fp_fusion=False)
    elif on.get_device() == torch.cuda.current_device():
        _start(loop, programs, arguments, on, constants)
    else:
        with torch.cuda.device_of(on):
            _start(loop, programs, arguments, on, constants)


def _start(loop: Any, programs: int, arguments: tuple[Any, ...], on: Tensor, constants: dict[str, Any]) -> None:
    """On the current device."""
    kind = kind_of(loop, arguments) if torch.version.hip is None else None  # AMD's code depends on more
    if kind is None:
        loop[(programs,)](*arguments, **constants, enable_fp_fusion=False)
        return
    key = id(loop), on.get_device(), kind, tuple(constants), tuple(constants.values())
    found = _started.get(key)
    if found is not None:
        compiled, rest = found
        compiled[(programs, 1, 1)](*arguments, *rest)
        return
    compiled = loop[(programs,)](*arguments, **constants, enable_fp_fusion=False)
    rest = tuple(constants[parameter.name] for parameter in loop.params[len(arguments) :])
    _started[key] = compiled, rest


def kind_of(loop: Any, arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """What the machine code depends on, of the arguments that are no constants: dtypes and whether memory begins at a
    multiple of 16 bytes; of whole numbers whether they are 1, a multiple of 16, and fit into 32 bits. None where an
    argument is something else, of which only Triton knows.
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


#: Of each loop, which parameters Triton does not look at: by the identity of the loop, which lives as long as its file.
_plain: dict[int, tuple[bool, ...]] = {}


# ---- several tensors -------------------------------------------------------------------------------------------------


class Segments:
    """Several tensors in one launch: a table of numbers of each, int64, on their device.

    A program finds its tensor by the table's first column, which says with which program it begins. A table is for
    loops that are started at once, one after the other.

    Args:
        on: one of the tensors.

    Attributes:
        programs: how many there are so far.
    """

    def __init__(self, on: Tensor) -> None:
        self._on = on
        self._rows: list[tuple[int, ...]] = []
        self._table: Tensor | None = None
        self.programs = 0

    def add(self, programs: int, *numbers: int) -> None:
        """A tensor that so many programs work on, and its numbers; none where there are no programs."""
        if programs:
            self._rows.append((self.programs, *numbers))
            self.programs += programs
            self._table = None

    def run(self, loop: Any, *arguments: Any, **constants: Any) -> None:
        """Start a loop, which is given the table, the number of tensors, and these."""
        if not self.programs:
            return
        if self._table is None:
            self._table = _on_device(np.array(self._rows, dtype=np.int64).ravel(), self._on.device)
        count, most = len(self._rows), triton.next_power_of_2(len(self._rows))
        run(loop, self.programs, self._table, count, *arguments, on=self._on, SEGMENTS=most, **constants)


@kernel
def segment(table, count, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr):
    """The row of a program's tensor in the table of :class:`Segments`, and which of its programs this is."""
    own = tl.program_id(0)
    row = tl.arange(0, SEGMENTS)
    first = tl.load(table + row * COLUMNS, mask=row < count, other=0x7FFFFFFF)
    at = tl.sum((first <= own).to(tl.int32), 0) - 1
    return table + at * COLUMNS, own - tl.load(table + at * COLUMNS)


def _on_device(numbers: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Numbers, int64, on a device: valid for what is put into the current stream until the next call but a few."""
    if device.type != "cuda":
        return torch.from_numpy(numbers)
    stages: dict[torch.cuda.Stream, _Stage] = _mine.__dict__.setdefault("stages", {})
    stream = torch.cuda.current_stream(device)
    stage = stages.get(stream)
    if stage is None:
        stage = stages[stream] = _Stage(device)
    return stage.put(numbers, stream)


#: A thread's own.
_mine = threading.local()


class _Stage:
    """Memory that the host writes and the GPU reads, in one thread and one stream, and where what is written goes.

    Both are filled from one end to the other, in halves. A half is written again when the stream has done what it was
    given while that half was filled, which it has nearly always long since.
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
        """Write numbers, and have them brought over."""
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
        self._at += -(-size // 2) * 2  # the next table begins at a multiple of 16 bytes, too
        self._numbers[span] = numbers
        there = self._there[span]
        there.copy_(self._here[span], non_blocking=True)
        return there
