"""Rows of numbers by sample, in memory or in a file: the buffers of AQ-SGD (see :mod:`narrowband.feedback.aqsgd`).

Rows lie in chunks, and a store that grows adds a chunk as large as all it has, so nothing is ever copied and at most
half is spare. A file is mapped chunk by chunk, and has room on the disk only for rows that were put.

The file begins with a page that says what it holds (``_HEADER``): the format, how rows are kept, their length, the
token of the run that made it, and how often rows were changed. A state of the store holds token and count, not the
rows: they are those of the state as long as both are equal. The count goes up before a row changes, and is written
through to the disk the first time after a state was taken, so a run that was killed, or whose machine was, leaves no
changed row behind a count that a state knows.
"""

from __future__ import annotations

import bisect
import logging
import math
import mmap
import operator
import os
import struct
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor

from narrowband.codecs import Uniform

__all__ = ["Keep", "SampleStore"]

log = logging.getLogger(__name__)

Keep: TypeAlias = Literal["fp32", "fp16", "int8"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.uint8}
_INT8 = Uniform(bits=8, group=256, symmetric=True)
_FP16_MAX = 65504.0

#: A chunk is at most so large, or one row: what may be spare in memory, and what one mapping of a file covers.
_MEMORY_CHUNK, _FILE_CHUNK = 1 << 26, 1 << 30

#: Format, how rows are kept, elements of a row, token, count of updates. Rows begin at ``_HEADER_NBYTES``.
_HEADER = struct.Struct("<16s8sQ32sQ")
_HEADER_NBYTES = 4096
_FORMAT = b"narrowband rows1"


class SampleStore:
    """Rows of ``numel`` numbers, each under the id of a sample.

    A row takes :attr:`nbytes_per_sample` bytes: for n elements 4·n with ``fp32``, 2·n with ``fp16``, and with ``int8``
    n + 4·⌈n/256⌉, rounded up to a multiple of 4: 1.016 bytes an element.

    When the budget is used up, new samples are not kept, and those that are there stay. An epoch visits all samples
    before it visits one again, so if the oldest made room, every one would be gone before its turn.

    Args:
        numel: elements of a row.
        keep: how rows are kept. What was put is rounded to ``fp16`` (clamped to ±65,504), or to ``int8`` in steps of
            1/127 of the largest magnitude among 256 neighbours; to the nearest, so that two stores that are given the
            same numbers keep the same.
        budget_nbytes: bytes that rows may take; None: no limit.
        folder: keep rows there, in a file of this store alone, instead of in memory. It is made when the first row is
            put.
        name: of that file, without its ending.
        chunk_nbytes: by how much memory, or a file's mapping, grows at most; at least one row. None: 64 MiB of memory,
            1 GiB of a file.

    Raises:
        ValueError: a number or word out of range, or a budget that has not room for one row.

    Example:
        >>> store = SampleStore(1024, keep="fp16", budget_nbytes=10**9)
        >>> store.put(7, torch.randn(1024))
        True
        >>> store.has([7, 8])
        [True, False]
    """

    def __init__(
        self,
        numel: int,
        *,
        keep: Keep = "fp32",
        budget_nbytes: int | None = None,
        folder: Path | None = None,
        name: str = "samples",
        chunk_nbytes: int | None = None,
    ) -> None:
        if numel < 1:
            raise ValueError(f"numel={numel}: a row has at least one element")
        if keep not in get_args(Keep):
            raise ValueError(f"keep={keep!r} is none of {', '.join(get_args(Keep))}")
        if not name or Path(name).name != name:
            raise ValueError(f"name={name!r} is not the name of a file")
        self.numel = numel
        self.keep = keep
        if budget_nbytes is not None and budget_nbytes < self.nbytes_per_sample:
            raise ValueError(
                f"budget_nbytes={budget_nbytes} has not room for one sample: {numel} elements in {keep} take "
                f"{self.nbytes_per_sample} bytes; give more, or keep samples in fewer bits"
            )
        self._capacity = math.inf if budget_nbytes is None else budget_nbytes // self.nbytes_per_sample
        self._chunk_nbytes = chunk_nbytes or (_MEMORY_CHUNK if folder is None else _FILE_CHUNK)
        self._path = None if folder is None else Path(folder).absolute() / f"{name}.rows"
        self._token = uuid.uuid4().hex
        self._updates = 0
        self._file: _File | None = None
        self._scratch = torch.empty(0 if keep == "fp32" else numel, dtype=torch.float32, device="cpu")
        self._warned_full = False
        self._hold({}, [])

    def _hold(self, places: dict[int, int], chunks: list[Tensor]) -> None:
        """From now on, have these rows, at their places in these chunks."""
        self._places = places
        self._chunks: list[Tensor] = []
        self._starts = [0]  # the first place of each chunk, and of the next one
        for chunk in chunks:
            self._append(chunk)
        #: Places below this one have, or had, a row; those of them that are free now.
        self._top = max(places.values(), default=-1) + 1
        self._free = list(set(range(self._top)) - set(places.values()))
        #: The stored row that is being written to, and its sample: a change that was counted, and needs no copy.
        self._lent: tuple[int, Tensor] | None = None

    def _append(self, chunk: Tensor) -> None:
        self._chunks.append(chunk)
        self._starts.append(self._starts[-1] + len(chunk))

    # ---- what there is -----------------------------------------------------------------------------------------------

    @property
    def nbytes_per_sample(self) -> int:
        """Bytes of a row, in memory or in the file."""
        return _width(self.keep, self.numel) * _DTYPES[self.keep].itemsize

    @property
    def full(self) -> bool:
        """Whether the budget has no room for another sample."""
        return len(self._places) >= self._capacity

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._places)

    def ids(self) -> Tensor:
        """The samples that are held: int64, ascending."""
        return torch.tensor(sorted(self._places), dtype=torch.int64, device="cpu")

    def has(self, ids: Tensor | Iterable[int]) -> list[bool]:
        """Which of these samples are held."""
        return [sample in self._places for sample in _listed(ids)]

    # ---- rows --------------------------------------------------------------------------------------------------------

    def row(self, sample: int, *, write: bool = False) -> Tensor:
        """The row of a sample that is held: float32 (numel,).

        With ``fp32`` that is the stored row itself. Otherwise it is decoded into a tensor that the next call uses
        again, and what is to stay has to be :meth:`put`.

        Args:
            write: whether the caller will write to the row.

        Raises:
            ValueError: the sample is not held.
        """
        place = self._places.get(sample)
        if place is None:
            raise ValueError(f"sample {sample} is not held; ask has() first")
        if write:
            self._count()
        stored = self._at(place)
        if self.keep == "fp32":
            if write:
                self._lent = sample, stored
            return stored
        if self.keep == "fp16":
            return self._scratch.copy_(stored)
        return _INT8.decode(stored, self._scratch)

    def put(self, sample: int, x: Tensor) -> bool:
        """Keep these numbers, rounded, as the row of a sample; whether they are kept.

        They are not if the sample is new and the store is full.

        Args:
            x: float32, float16 or bfloat16, ``numel`` elements, of any shape and device; may be what :meth:`row`
                returned.

        Raises:
            TypeError: another dtype.
            ValueError: another number of elements, an id beyond 64 bits, or a file that belongs to another run.
            OSError: the disk is full; nothing has changed then.
        """
        if self._lent is not None and self._lent[1] is x and self._lent[0] == sample:
            self._lent = None
            return True
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"rows are made of float32, float16 or bfloat16, not {x.dtype}")
        if x.numel() != self.numel:
            raise ValueError(f"rows have {self.numel} elements here, so {x.numel()} cannot be one")
        sample = operator.index(sample)
        place = self._places.get(sample)
        if place is None:
            if self.full:
                self._say_full()
                return False
            place = self._new_place(sample)
        self._count()
        stored, flat = self._at(place), x.detach().reshape(-1)
        if self.keep == "int8":
            _INT8.encode(flat.to(stored.device), out=stored)
        elif flat.data_ptr() != stored.data_ptr():
            stored.copy_(flat)
            if self.keep == "fp16":
                stored.clamp_(-_FP16_MAX, _FP16_MAX)  # what is too large has become inf
        self._places[sample] = place
        return True

    def keep_only(self, ids: Tensor | Iterable[int]) -> None:
        """Let go of all samples but these. Their room is used again."""
        self._lent = None
        wanted = set(_listed(ids))
        for sample in [sample for sample in self._places if sample not in wanted]:
            self._free.append(self._places.pop(sample))

    def _at(self, place: int) -> Tensor:
        at = bisect.bisect_right(self._starts, place) - 1
        return self._chunks[at][place - self._starts[at]]

    def _count(self) -> None:
        """A row is going to change."""
        self._updates += 1
        if self._file is not None:
            self._file.count(self._updates)

    def _new_place(self, sample: int) -> int:
        """Where a new sample goes, with room made for it."""
        if not -(2**63) <= sample < 2**63:
            raise ValueError(f"{sample} is no id of a sample: ids are 64-bit integers")
        if self._free:
            return self._free.pop()
        there = self._starts[-1]
        if self._path is not None:
            if self._file is None:
                self._file = _File.new(self._path, (self.keep, self.numel, self._token), self._updates)
            if self._top == there:
                self._append(self._file.rows(there, self._more()))
            self._file.reserve(self._top)
        elif self._top == there:
            shape = self._more(), _width(self.keep, self.numel)
            self._append(torch.zeros(shape, dtype=_DTYPES[self.keep], device="cpu"))
        self._top += 1
        return self._top - 1

    def _more(self) -> int:
        """Rows of the next chunk."""
        there = self._starts[-1]
        return int(min(max(1, there), max(1, self._chunk_nbytes // self.nbytes_per_sample), self._capacity - there))

    def _say_full(self) -> None:
        if not self._warned_full:
            self._warned_full = True
            log.warning(
                "the store is full with %d samples of %d bytes; those that are new from now on are not kept",
                len(self), self.nbytes_per_sample,
            )  # fmt: skip

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers, words and tensors (not copies): the samples and where they are, and the rows if they are in memory.

        Rows in a file stay there, and are on the disk when this returns. They are those of this state until one of
        them changes.
        """
        self._lent = None
        ids = self.ids()
        places = torch.tensor([self._places[sample] for sample in ids.tolist()], dtype=torch.int64, device="cpu")
        state: dict[str, Any] = {"numel": self.numel, "keep": self.keep, "ids": ids, "places": places}
        if self._path is None:
            return state | {"rows": list(self._chunks)}
        if self._file is not None:
            self._file.flush()
        return state | {"token": self._token, "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what the state holds, and nothing else.

        If the file has gone on since the state was taken, or is missing or incomplete, its rows are not those of the
        state: all are dropped, and a warning says so.

        Raises:
            ValueError: what is no state, or one of other rows, of more than the budget, or of a store in another place;
                a file of another run. Nothing has changed then.
        """
        places = self._places_of(state)
        if self._path is None:
            self._hold(places, [chunk.detach().contiguous().to("cpu", copy=True) for chunk in state["rows"]])
            return
        file = _File.old(self._path, (self.keep, self.numel, state["token"]))
        updates = state["updates"]
        if places and (file is None or file.updates != updates or max(places.values()) >= file.length):
            what = "is missing" if file is None else "has gone on since the state was taken, or was cut"
            log.warning("%s %s: %d samples are dropped, and travel in full once more", self._path, what, len(places))
            places = {}
        self._token, self._file = state["token"], file
        self._updates = updates if file is None else file.updates
        self._hold(places, [] if file is None or not file.length else [file.rows(0, file.length)])

    def check_state(self, state: object) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this state; a file it looks at by itself."""
        self._places_of(state)

    def _places_of(self, state: object) -> dict[int, int]:
        """The samples of a state, and where they are, if this store can hold them.

        Raises:
            ValueError: it cannot.
        """
        if not isinstance(state, Mapping) or (lacking := {"numel", "keep", "ids", "places"} - state.keys()):
            what = f"one without {', '.join(sorted(lacking))}" if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"the state of rows by sample is what state_dict() returned, and this is {what}")
        if (state["numel"], state["keep"]) != (self.numel, self.keep):
            raise ValueError(
                f"the state holds rows of {state['numel']} elements in {state['keep']}, this store has rows of "
                f"{self.numel} in {self.keep}; use the settings that it was saved with"
            )
        places = _paired(state["ids"], state["places"])
        if len(places) > self._capacity:
            raise ValueError(
                f"the state holds {len(places)} samples, the budget has room for {self._capacity}; allow "
                f"{len(places) * self.nbytes_per_sample} bytes"
            )
        if ("rows" in state) != (self._path is None):
            there, here = ("memory", "a file") if "rows" in state else ("a file", "memory")
            raise ValueError(f"the state is of rows in {there}, and this store has them in {here}")
        if self._path is not None:
            token, updates = state.get("token"), state.get("updates")
            if not isinstance(token, str) or type(updates) is not int or updates < 0:
                raise ValueError(f"the state does not say which file its rows are in: {token!r}, {updates!r}")
            return places
        if not isinstance(state["rows"], Sequence):
            raise ValueError(
                f"the state holds {type(state['rows']).__name__} for rows, and a list of tensors belongs there"
            )
        for rows in state["rows"]:
            self._check_rows(rows)
        if max(places.values(), default=-1) >= (length := sum(map(len, state["rows"]))):
            raise ValueError(f"the state holds {length} rows, and a sample in row {max(places.values())}")
        return places

    def _check_rows(self, rows: object) -> None:
        """Raise ValueError unless these are rows as this store keeps them, and finite."""
        dtype, width = _DTYPES[self.keep], _width(self.keep, self.numel)
        if not isinstance(rows, Tensor):
            raise ValueError(f"the state holds {type(rows).__name__} for rows, where a tensor belongs")
        if rows.layout != torch.strided or rows.dtype != dtype or rows.dim() != 2 or rows.shape[1] != width:
            raise ValueError(
                f"the state holds rows of {rows.dtype} and shape {tuple(rows.shape)}, and these are (rows, {width}) of "
                f"{dtype} here"
            )
        steps = rows
        if self.keep == "int8":
            steps = rows[:, : 4 * -(-self.numel // _INT8.group)].contiguous().view(torch.float32)
        if not bool(steps.isfinite().all()):
            raise ValueError("the state holds inf or NaN in its rows; load an earlier state")


def _paired(ids: object, places: object) -> dict[int, int]:
    """Samples, and where each of them is: no two in one place.

    Raises:
        ValueError: they are something else.
    """
    for name, value in (("ids", ids), ("places", places)):
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not isinstance(value, Tensor) or not dense or value.dtype != torch.int64 or value.dim() != 1:
            what = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the state holds {what} for {name}, where int64 numbers belong, one for each sample")
    assert isinstance(ids, Tensor)
    assert isinstance(places, Tensor)
    found = dict(zip(ids.tolist(), places.tolist(), strict=False))
    alone = len(set(found.values())) == len(found) == len(ids) == len(places)
    if not alone or min(found.values(), default=0) < 0:
        raise ValueError("the state does not say of each sample where it is: some are there twice, or nowhere")
    return found


def _width(keep: Keep, numel: int) -> int:
    """Stored elements of a row."""
    return _INT8.payload_nbytes(numel) if keep == "int8" else numel


#: How rows are kept, their elements, the token of the run.
_Form: TypeAlias = "tuple[Keep, int, str]"


class _File:
    """The file of a store: its header, and mappings of its rows."""

    def __init__(self, path: Path, form: _Form, updates: int) -> None:
        self.updates = updates
        self._path = path
        keep, numel, _ = form
        self._dtype, self._width = _DTYPES[keep], _width(keep, numel)
        self._row_nbytes = self._width * self._dtype.itemsize
        with path.open("r+b") as file:
            self._header = mmap.mmap(file.fileno(), _HEADER_NBYTES)
            #: Rows that it has room for, as of when it was opened.
            self.length = (os.fstat(file.fileno()).st_size - _HEADER_NBYTES) // self._row_nbytes
        self._maps: list[mmap.mmap] = []
        #: Whether a state knows the count that is on the disk.
        self._state_has_count = True

    @classmethod
    def new(cls, path: Path, form: _Form, updates: int) -> _File:
        keep, numel, token = form
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                file.write(_HEADER.pack(_FORMAT, keep.encode(), numel, token.encode(), updates))
                file.truncate(_HEADER_NBYTES)
        except FileExistsError:
            raise ValueError(_of_another_run(path)) from None
        return cls(path, form, updates)

    @classmethod
    def old(cls, path: Path, form: _Form) -> _File | None:
        """The file that is there, or None.

        Raises:
            ValueError: it belongs to another run.
        """
        if not path.exists():
            return None
        keep, numel, token = form
        with path.open("rb") as file:
            header = file.read(_HEADER.size).ljust(_HEADER.size)
            size = file.seek(0, os.SEEK_END)
        *said, updates = _HEADER.unpack(header)
        if said != [_FORMAT, keep.encode().ljust(8, b"\0"), numel, token.encode()] or size < _HEADER_NBYTES:
            raise ValueError(_of_another_run(path))
        return cls(path, form, updates)

    def __reduce__(self) -> NoReturn:
        """Copies and pickles are refused, in words."""
        raise TypeError(
            f"{self._path} belongs to one store, and a copy would change the same rows: save state_dict() and load it, "
            "or keep rows in memory"
        )

    def rows(self, first: int, count: int) -> Tensor:
        """``count`` rows from the place ``first`` on; the file grows as needed."""
        begin, nbytes = _HEADER_NBYTES + first * self._row_nbytes, count * self._row_nbytes
        skew = begin % mmap.ALLOCATIONGRANULARITY
        with self._path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < begin + nbytes:
                file.truncate(begin + nbytes)
            memory = mmap.mmap(file.fileno(), skew + nbytes, offset=begin - skew)
        self._maps.append(memory)
        flat = torch.frombuffer(memory, dtype=self._dtype, count=count * self._width, offset=skew)
        return flat.view(count, self._width)

    def reserve(self, place: int) -> None:
        """Have room for a row on the disk: writing to a mapping of what has none would end the process."""
        with self._path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), _HEADER_NBYTES + place * self._row_nbytes, self._row_nbytes)

    def count(self, updates: int) -> None:
        """Write the count of updates, before the row that changes."""
        self.updates = updates
        struct.pack_into("<Q", self._header, _HEADER.size - 8, updates)
        if self._state_has_count:
            self._state_has_count = False
            self._header.flush()

    def flush(self) -> None:
        """Have all on the disk: a state is going to know the count."""
        for memory in (*self._maps, self._header):
            memory.flush()
        self._state_has_count = True


def _of_another_run(path: Path) -> str:
    return (
        f"{path} is there already and belongs to another run, or to the other end of a boundary: load that run's state "
        "to go on with it, choose another folder, or delete the file"
    )


def _listed(ids: Tensor | Iterable[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)
