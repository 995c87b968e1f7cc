"""Store one row of numbers per sample, in memory or in a file: the buffers of :mod:`narrowband.feedback.aqsgd`.

Rows lie in chunks. A store that grows adds a chunk as large as all chunks before together, so no row is ever copied,
and at most half of the memory is spare. A file is memory-mapped chunk by chunk, and takes disk space only for rows that
were put.

The file begins with a header page (``_HEADER``): the format, how rows are stored, their length, the token of the run
that created the file, and how many changes of rows there were. The state of such a store has the token and the count,
not the rows: the file's rows are those of the state as long as both are equal. The count is increased before a row
changes. The first increase after a state was taken is flushed to the disk. So if the process or the machine is killed,
the file never has a changed row together with a count that a state knows.
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
from narrowband.units import counted

__all__ = ["Keep", "SampleStore"]

log = logging.getLogger(__name__)

Keep: TypeAlias = Literal["fp32", "fp16", "int8"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.uint8}
_INT8 = Uniform(bits=8, group=256, symmetric=True)
_FP16_MAX = 65504.0

#: Largest chunk in bytes (or one row, if that is larger): in memory, where it may be spare, and of one file mapping.
_MEMORY_CHUNK, _FILE_CHUNK = 1 << 26, 1 << 30

#: Format, how rows are stored, elements of a row, token, count of changes. Rows begin at ``_HEADER_NBYTES``.
_HEADER = struct.Struct("<16s8sQ32sQ")
_HEADER_NBYTES = 4096
_FORMAT = b"narrowband rows1"


class SampleStore:
    """A store of one row of ``numel`` numbers per sample id.

    A row of n elements takes :attr:`nbytes_per_sample` bytes: 4·n with ``fp32``, 2·n with ``fp16``, and with ``int8``
    n + 4·⌈n/256⌉, rounded up to a multiple of 4, which is 1.016 bytes per element.

    When the budget is used up, new samples are not stored, and stored samples stay. Evicting the oldest would not help:
    an epoch visits all samples before it visits one again, so every row would be evicted before it is needed.

    Args:
        numel: elements of a row.
        keep: how rows are stored. Values are rounded to ``fp16`` (clamped to ±65,504), or to ``int8`` in steps of 1/127
            of the largest magnitude among 256 neighbours. Rounding is to nearest, so that two stores that are given the
            same numbers store the same.
        budget_nbytes: limit of the bytes of all rows; None: no limit.
        folder: keep rows in a file in this folder, used by this store alone, instead of in memory. The file is created
            when the first row is put.
        name: name of the file, without its suffix.
        chunk_nbytes: largest size of a chunk, at least one row. None: 64 MiB in memory, 1 GiB in a file.

    Raises:
        ValueError: an argument is out of range, or the budget has no room for one row.

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
            raise ValueError(f"numel={numel} must be at least 1")
        if keep not in get_args(Keep):
            raise ValueError(f"keep={keep!r} is none of {', '.join(get_args(Keep))}")
        if not name or Path(name).name != name:
            raise ValueError(f"name={name!r} is not the name of a file")
        self.numel = numel
        self.keep = keep
        if budget_nbytes is not None and budget_nbytes < self.nbytes_per_sample:
            raise ValueError(
                f"budget_nbytes={budget_nbytes} is too small for one sample: {numel} elements in {keep} take "
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
        """Replace the rows: ``places`` says where each sample's row is in the chunks."""
        self._places = places
        self._chunks: list[Tensor] = []
        self._starts = [0]  # the first place of each chunk, and of the next one
        for chunk in chunks:
            self._append(chunk)
        #: All places below this one have, or had, a row. ``_free`` lists those that are free now.
        self._top = max(places.values(), default=-1) + 1
        self._free = list(set(range(self._top)) - set(places.values()))
        #: (sample, row) that :meth:`row` lent for writing: :meth:`put` need neither count nor copy it.
        self._lent: tuple[int, Tensor] | None = None

    def _append(self, chunk: Tensor) -> None:
        self._chunks.append(chunk)
        self._starts.append(self._starts[-1] + len(chunk))

    # ---- what there is -----------------------------------------------------------------------------------------------

    @property
    def nbytes_per_sample(self) -> int:
        """Bytes of a row in memory or in the file."""
        return _width(self.keep, self.numel) * _DTYPES[self.keep].itemsize

    @property
    def full(self) -> bool:
        """Whether the budget has no room for another sample."""
        return len(self._places) >= self._capacity

    def __len__(self) -> int:
        """Return the number of samples that are held."""
        return len(self._places)

    def ids(self) -> Tensor:
        """Return the ids of samples that are held: int64, ascending."""
        return torch.tensor(sorted(self._places), dtype=torch.int64, device="cpu")

    def has(self, ids: Tensor | Iterable[int]) -> list[bool]:
        """Return for each of these samples whether it is held."""
        return [sample in self._places for sample in _listed(ids)]

    # ---- rows --------------------------------------------------------------------------------------------------------

    def row(self, sample: int, *, write: bool = False) -> Tensor:
        """Return the row of a sample that is held: float32 (numel,).

        With ``fp32`` it is the stored row itself. Otherwise it is decoded into a tensor that the next call overwrites,
        and changes have to be stored by :meth:`put`.

        Args:
            write: whether the caller will write to the row.

        Raises:
            ValueError: the sample is not held.
        """
        place = self._places.get(sample)
        if place is None:
            raise ValueError(f"sample {sample} is not held; check with has() before")
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
        """Store these numbers, rounded, as the row of a sample, and return whether they were stored.

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
            raise TypeError(f"a row must be float32, float16 or bfloat16, not {x.dtype}")
        if x.numel() != self.numel:
            raise ValueError(f"a row must have {self.numel} elements, not {x.numel()}")
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
        """Drop all samples but these. The memory of dropped rows is reused."""
        self._lent = None
        wanted = set(_listed(ids))
        for sample in [sample for sample in self._places if sample not in wanted]:
            self._free.append(self._places.pop(sample))

    def _at(self, place: int) -> Tensor:
        at = bisect.bisect_right(self._starts, place) - 1
        return self._chunks[at][place - self._starts[at]]

    def _count(self) -> None:
        """Count a change of a row, before it happens."""
        self._updates += 1
        if self._file is not None:
            self._file.count(self._updates)

    def _new_place(self, sample: int) -> int:
        """Return the place of a new sample's row, and allocate it if needed."""
        if not -(2**63) <= sample < 2**63:
            raise ValueError(f"{sample} is not the id of a sample: ids are 64-bit integers")
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
        """Return the number of rows of the next chunk."""
        there = self._starts[-1]
        return int(min(max(1, there), max(1, self._chunk_nbytes // self.nbytes_per_sample), self._capacity - there))

    def _say_full(self) -> None:
        if not self._warned_full:
            self._warned_full = True
            log.warning(
                "the store is full: it holds %d samples of %d bytes each, and further samples are not stored",
                len(self), self.nbytes_per_sample,
            )  # fmt: skip

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings and tensors (not copies): the samples, their places, and rows that are in memory.

        Rows in a file stay there, and are flushed to the disk when this returns. The state is valid until one of them
        changes.
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
        """Replace all rows by those of the state.

        If the file has changed since the state was taken, or is missing or incomplete, its rows are not those of the
        state: all are dropped with a warning.

        Raises:
            ValueError: not a state; a state of other rows, of more rows than the budget allows, or of rows in memory
                where this store has a file, or the reverse; or a file of another run. Nothing has changed then.
        """
        places = self._places_of(state)
        if self._path is None:
            self._hold(places, [chunk.detach().contiguous().to("cpu", copy=True) for chunk in state["rows"]])
            return
        file = _File.old(self._path, (self.keep, self.numel, state["token"]))
        updates = state["updates"]
        if places and (file is None or file.updates != updates or max(places.values()) >= file.length):
            what = "is missing" if file is None else "has changed since the state was saved, or was truncated"
            dropped = counted(len(places), "sample is dropped, and is", "samples are dropped, and are")
            log.warning("%s %s: %s sent in full once more", self._path, what, dropped)
            places = {}
        self._token, self._file = state["token"], file
        self._updates = updates if file is None else file.updates
        self._hold(places, [] if file is None or not file.length else [file.rows(0, file.length)])

    def check_state(self, state: object) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this state. The file is not checked."""
        self._places_of(state)

    def _places_of(self, state: object) -> dict[int, int]:
        """Return sample → place of a state.

        Raises:
            ValueError: this store cannot hold the state's samples.
        """
        if not isinstance(state, Mapping) or (lacking := {"numel", "keep", "ids", "places"} - state.keys()):
            what = (
                f"a dict without {', '.join(sorted(lacking))}" if isinstance(state, Mapping) else type(state).__name__
            )
            raise ValueError(f"expected the state of rows by sample that state_dict() returned, got {what}")
        if (state["numel"], state["keep"]) != (self.numel, self.keep):
            raise ValueError(
                f"the state holds rows of {state['numel']} elements in {state['keep']}, but this store holds rows of "
                f"{self.numel} in {self.keep}; use the settings that the state was saved with"
            )
        places = _paired(state["ids"], state["places"])
        if len(places) > self._capacity:
            raise ValueError(
                f"the state holds {len(places)} samples, but the budget has room for {self._capacity}; allow "
                f"{len(places) * self.nbytes_per_sample} bytes"
            )
        if ("rows" in state) != (self._path is None):
            there, here = ("memory", "a file") if "rows" in state else ("a file", "memory")
            raise ValueError(f"the state holds its rows in {there}, but this store keeps them in {here}")
        if self._path is not None:
            token, updates = state.get("token"), state.get("updates")
            if not isinstance(token, str) or type(updates) is not int or updates < 0:
                raise ValueError(
                    f"the state does not say which file holds its rows: token is {token!r}, and updates is {updates!r}"
                )
            return places
        if not isinstance(state["rows"], Sequence):
            raise ValueError(f"the state holds {type(state['rows']).__name__} for rows, expected a list of tensors")
        for rows in state["rows"]:
            self._check_rows(rows)
        if max(places.values(), default=-1) >= (length := sum(map(len, state["rows"]))):
            raise ValueError(f"the state holds {length} rows, but says that a sample is in row {max(places.values())}")
        return places

    def _check_rows(self, rows: object) -> None:
        """Raise ValueError unless these are finite rows in this store's format."""
        dtype, width = _DTYPES[self.keep], _width(self.keep, self.numel)
        if not isinstance(rows, Tensor):
            raise ValueError(f"the state holds {type(rows).__name__} in the list of rows, expected a tensor")
        if rows.layout != torch.strided or rows.dtype != dtype or rows.dim() != 2 or rows.shape[1] != width:
            raise ValueError(
                f"the state holds rows of {rows.dtype} and shape {tuple(rows.shape)}, expected {dtype} and shape "
                f"(rows, {width})"
            )
        steps = rows
        if self.keep == "int8":
            steps = rows[:, : 4 * -(-self.numel // _INT8.group)].contiguous().view(torch.float32)
        if not bool(steps.isfinite().all()):
            raise ValueError("the state holds inf or NaN in its rows; load an earlier state")


def _paired(ids: object, places: object) -> dict[int, int]:
    """Return sample → place, where no two samples have one place.

    Raises:
        ValueError: the arguments do not say that.
    """
    for name, value in (("ids", ids), ("places", places)):
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not isinstance(value, Tensor) or not dense or value.dtype != torch.int64 or value.dim() != 1:
            what = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the state holds {what} for {name}, expected a vector of int64 numbers, one per sample")
    assert isinstance(ids, Tensor)
    assert isinstance(places, Tensor)
    found = dict(zip(ids.tolist(), places.tolist(), strict=False))
    alone = len(set(found.values())) == len(found) == len(ids) == len(places)
    if not alone or min(found.values(), default=0) < 0:
        raise ValueError("the state does not give every sample a row of its own: ids or places are missing or repeated")
    return found


def _width(keep: Keep, numel: int) -> int:
    """Return the number of stored elements of a row."""
    return _INT8.payload_nbytes(numel) if keep == "int8" else numel


#: (how rows are stored, elements of a row, token of the run).
_Form: TypeAlias = "tuple[Keep, int, str]"


class _File:
    """The file of a store: its header, and memory mappings of its rows."""

    def __init__(self, path: Path, form: _Form, updates: int) -> None:
        self.updates = updates
        self._path = path
        keep, numel, _ = form
        self._dtype, self._width = _DTYPES[keep], _width(keep, numel)
        self._row_nbytes = self._width * self._dtype.itemsize
        with path.open("r+b") as file:
            self._header = mmap.mmap(file.fileno(), _HEADER_NBYTES)
            #: Rows that the file had room for when it was opened.
            self.length = (os.fstat(file.fileno()).st_size - _HEADER_NBYTES) // self._row_nbytes
        self._maps: list[mmap.mmap] = []
        #: Whether a state may have the count that is on the disk: the next one must then be flushed.
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
        """Open the file if it exists, else return None.

        Raises:
            ValueError: the file belongs to another run.
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
        """Refuse copying and pickling with a message that says what to do."""
        raise TypeError(
            f"a store with the file {self._path} cannot be copied or pickled, because both would change the same rows: "
            "save and load state_dict(), or keep rows in memory"
        )

    def rows(self, first: int, count: int) -> Tensor:
        """Map ``count`` rows from the place ``first`` on; the file grows as needed."""
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
        """Allocate disk space for a row: writing to a mapping without disk space would kill the process."""
        with self._path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), _HEADER_NBYTES + place * self._row_nbytes, self._row_nbytes)

    def count(self, updates: int) -> None:
        """Write the count of changes, before the row changes."""
        self.updates = updates
        struct.pack_into("<Q", self._header, _HEADER.size - 8, updates)
        if self._state_has_count:
            self._state_has_count = False
            self._header.flush()

    def flush(self) -> None:
        """Flush everything to the disk, because a state is about to record the count."""
        for memory in (*self._maps, self._header):
            memory.flush()
        self._state_has_count = True


def _of_another_run(path: Path) -> str:
    return (
        f"{path} exists already and belongs to another run, or to the other end of a boundary: to continue that run, "
        "load its state; otherwise choose another folder, or delete the file"
    )


def _listed(ids: Tensor | Iterable[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)
