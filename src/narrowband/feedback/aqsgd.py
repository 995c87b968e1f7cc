"""AQ-SGD: between two stages of a pipeline, send how a sample's activation has changed since its last visit.

Source: Wang, Yuan, Rimanic et al., arXiv 2206.01299, algorithm 1. Both ends of a boundary keep a buffer m(i) for every
sample i. With activation x and codec C::

    first visit of i:   send x                  m(i) = x
    later:              send C(x − m(i))        m(i) = m(i) + C(x − m(i))

and the receiver's stage computes with m(i). As training converges, activations change less and less, and the error of
the payload shrinks with the change; the error of C(x) would not shrink. Both ends do the same arithmetic on the same
numbers, so their buffers are equal to the bit, and are never sent.

Buffers may be stored in 16 or 8 bits. The receiver's stage computes with m(i) before it is rounded, so that only C
contributes an error. The rounding of m(i) becomes part of the next difference.

How fast a buffer follows its sample depends on how much smaller C's error is than its input. The table shows a sample
that changes once, from one tensor of normal numbers to another: the share of the change (of its norm) that is still
missing at the ninth visit:

=========================  =======    =============================  =======
codec                      missing    codec                          missing
=========================  =======    =============================  =======
``qsgd:bits=4``            0.00       ``topk:density=0.3``           0.00
``qsgd:bits=3``            0.00       ``topk:density=0.1``           0.06
``qsgd:bits=2``            0.61       ``topk:density=0.05``          0.36
``uniform:bits=2``         0.00       ``topk:density=0.01``          0.79
``uniform:bits=1``         0.95       ``sign``                       0.10
=========================  =======    =============================  =======

:meth:`AQSGD.missing` measures this share. A channel whose codec leaves more than a quarter logs a warning at set-up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import quote

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs import Identity, SelectingCodec
from narrowband.codecs.spec import check_keys
from narrowband.errors import PayloadError, UnsupportedError
from narrowband.feedback.base import SampleState
from narrowband.feedback.store import SampleStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from narrowband.codecs import Codec

__all__ = ["AQSGD"]

#: Encodes samples that have no buffer.
_WHOLE = Identity()
#: Values of this magnitude count as not finite. With differences below it, no codec's output is large enough that a
#: buffer could overflow float32.
_TOO_LARGE = 2.0**100

#: Visits of a sample after which :meth:`AQSGD.missing` measures, and the missing share above which users are warned.
_VISITS = 9
_MISSING = 0.25
#: Rows and columns of its sample: large enough that other random numbers change the share by a few hundredths only.
_SIDE = 64


@dataclass(unsafe_hash=True)
class AQSGD(SampleState):
    """For activations between stages: sends how each sample has changed since its last visit, and keeps a buffer of it.

    Each end of a boundary has an object of its own; if both ends are in one process, they may share one. A key names
    the boundary. Behind a codec whose error is as large as its input, such as ``qsgd:bits=2``, buffers hardly follow
    their samples: see :meth:`missing`.

    Args:
        store: how buffers are stored: ``fp32``, ``fp16`` or ``int8``: 4, 2 or 1.016 bytes per element on each end.
        budget_gb: limit of the size of a key's buffers on each end, in 10⁹ bytes. Samples beyond it are always sent in
            full. Both ends need the same limit.
        folder: keep buffers in this folder, in a file for each key, instead of in memory. Two ends on one machine need
            different folders or keys.

    Example:
        >>> sender, receiver = AQSGD(), AQSGD()
        >>> codec, ids = nb.codec("qsgd:bits=4"), torch.tensor([3, 1])
        >>> payload = sender.pack("boundary", x, codec, samples=ids, seed=step)
        >>> arrived = receiver.unpack("boundary", payload, torch.empty_like(x), codec, samples=ids, seed=step)
    """

    name: ClassVar[str] = "aq-sgd"

    store: Literal["fp32", "fp16", "int8"] = "fp32"
    budget_gb: float = math.inf
    folder: str = ""

    _stores: dict[str, SampleStore] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Key → scratch memory for a difference.
    _scratch: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_keys(self)
        if not self.budget_gb > 0:
            raise ValueError(f"aq-sgd: budget_gb={self.budget_gb} must be above 0; leave budget_gb out for no limit")
        if "," in self.folder or self.folder != self.folder.strip():
            raise ValueError(
                f"aq-sgd: folder={self.folder!r} cannot be part of a spec string: it must have no commas, and no "
                "spaces at the beginning or the end"
            )

    def check(self, codec: Codec) -> None:
        """Raise UnsupportedError for a codec without a fixed payload size, which the receiver has to know."""
        if not codec.fixed_size:
            raise UnsupportedError(
                f"aq-sgd needs payloads of a fixed size, which the receiver knows in advance, and the size of {codec} "
                "depends on the data; use topk"
            )

    @staticmethod
    @functools.cache
    def missing(codec: Codec) -> float:
        """Measure how far a buffer is from its sample at the ninth visit, after the sample has changed once.

        At the first visit the sample is a tensor of 64 × 64 normal numbers, and at all later visits another one.

        Returns:
            ‖x − m‖ / ‖x − x₁‖, where x₁ is the sample at the first visit, x the sample at later visits, and m the
            buffer. 0: the buffer equals x; 1 or more: the buffer does not follow at all.

        Example:
            >>> AQSGD.missing(nb.codec("qsgd:bits=2")) > 0.5
            True
        """
        draw = torch.Generator().manual_seed(0)
        first, x = torch.randn(2, 1, _SIDE, _SIDE, generator=draw, dtype=torch.float32, device="cpu")
        both, samples, arrived = AQSGD(), torch.zeros(1, dtype=torch.int64, device="cpu"), torch.empty_like(x)
        for visit in range(_VISITS):
            both.pack("missing", x if visit else first, codec, samples=samples, seed=visit, arrived=arrived)
        return float((x - arrived).norm() / (x - first).norm())

    def warning(self, codec: Codec) -> str | None:
        missing = self.missing(codec)
        if missing <= _MISSING:
            return None
        if missing < 1.0:
            found = f"hardly follows a sample that has changed: {missing:.0%} of the change was still missing"
        else:
            found = f"does not follow a sample that has changed: its buffer was {missing:.0f} times as far from it"
        return (
            f"{codec}+{self.name} {found} after {_VISITS} visits, measured on normal numbers; take more bits, as in "
            "qsgd:bits=4, or a larger density, as in topk:density=0.3"
        )

    # ---- a batch -----------------------------------------------------------------------------------------------------

    def payload_nbytes(
        self, key: str, codec: Codec, shape: Sequence[int], dtype: torch.dtype, samples: Tensor | None
    ) -> int:
        return sum(self._sizes(key, codec, shape, dtype, self._checked(shape, dtype, samples)))

    def pack(
        self,
        key: str,
        x: Tensor,
        codec: Codec,
        *,
        samples: Tensor | None,
        seed: int,
        out: Tensor | None = None,
        arrived: Tensor | None = None,
    ) -> Tensor:
        """Return the payload of a batch, flat uint8, and update the sender's buffers.

        The sender's buffers are then equal to the receiver's after :meth:`unpack`.

        The payload has one part per sample, in order. A sample without a buffer is encoded as by ``none``. For other
        samples, the codec encodes the difference (float32, of one sample's shape, with seed + the sample's index in the
        batch).

        A sample that is not finite, or so large (2¹⁰⁰) that its buffer might not stay finite, arrives unchanged on its
        first visit, and as NaN on later visits. Its buffer does not change on either end.

        Args:
            key: names the boundary.
            x: (B, …), float32, float16 or bfloat16.
            codec: encodes differences; its payloads must have a fixed size.
            samples: int64 (B,): an id for each sample, the same in every epoch; no id twice.
            seed: the batch's seed; the receiver needs the same.
            out: where to write: uint8, flat, contiguous, exactly :meth:`payload_nbytes` long.
            arrived: filled with what :meth:`unpack` will give the receiver, to the bit, for a process that is both
                ends. Of x's shape and dtype; may be x.

        Raises:
            TypeError: a dtype that does not fit.
            ValueError: no samples, not one for each row, or one of them twice; a size that does not fit.
            UnsupportedError: a codec whose payloads have no fixed size.

        Example:
            >>> AQSGD().pack(
            ...     "boundary", torch.ones(2, 3), nb.codec("sign"), samples=torch.tensor([7, 8]), seed=0
            ... ).numel()
            24
        """
        ids = self._checked(x.shape, x.dtype, samples)
        sizes = self._sizes(key, codec, x.shape, x.dtype, ids)
        if arrived is not None:
            _check_like(arrived, x)
            arrived = arrived.detach()
        if out is None:
            out = torch.empty(sum(sizes), dtype=torch.uint8, device=x.device)
        elif out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous():
            raise TypeError(f"out must be flat, contiguous uint8, not {out.dtype} of shape {tuple(out.shape)}")
        elif out.numel() != sum(sizes):
            raise ValueError(f"out has {out.numel()} bytes; this batch needs {sum(sizes)}")
        if not ids or not x.numel():
            return out
        store, x = self._store_for(key, x[0].numel()), x.detach()
        for at, (sample, has_buffer, part) in enumerate(zip(ids, store.has(ids), _cut(out, sizes), strict=True)):
            target = None if arrived is None else arrived[at]
            if has_buffer:
                base = self._buffer(store, sample, x.device)
                self._encode(key, x[at], base, codec, part, (seed + at) % 2**64)
                self._advance(store, sample, base, codec, part, (seed + at) % 2**64, target, x.shape[1:])
            else:
                _WHOLE.encode(x[at], out=part)
                self._learn(store, sample, x[at])  # before target, which may be x, is written
                if target is not None:
                    _WHOLE.decode(part, target)
        return out

    def unpack(
        self, key: str, payload: Tensor, out: Tensor, codec: Codec, *, samples: Tensor | None, seed: int
    ) -> Tensor:
        """Decode a payload of :meth:`pack` into ``out``, update the buffers, and return ``out``.

        Args:
            key: names the boundary.
            payload: the sender's payload.
            out: (B, …), of the shape and dtype of the sender's batch.
            codec, samples, seed: the same as the sender's.

        Raises:
            PayloadError: the length is not :meth:`payload_nbytes`, or the codec cannot decode a part. No buffer has
                changed then.
            UnsupportedError, TypeError, ValueError: as :meth:`pack`.
        """
        ids = self._checked(out.shape, out.dtype, samples)
        sizes = self._sizes(key, codec, out.shape, out.dtype, ids)
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise PayloadError(f"a payload is a flat uint8 tensor, not {payload.dtype} of shape {tuple(payload.shape)}")
        if payload.numel() != sum(sizes):
            raise PayloadError(
                f"expected a payload of {sum(sizes)} bytes for these samples, got {payload.numel()} bytes: both ends "
                "need the same spec and must hold the same samples. Compare reference_ids() of both ends, and call "
                "keep_only() on both with the samples that both hold"
            )
        if not ids or not out.numel():
            return out
        store, values = self._store_for(key, out[0].numel()), out.detach()
        have, parts = store.has(ids), list(_cut(payload, sizes))
        added: list[tuple[Tensor, Tensor] | None] = [None] * len(parts)
        if isinstance(codec, SelectingCodec):  # indices are all that can be damaged in a payload of the right length
            for at, (has_buffer, part) in enumerate(zip(have, parts, strict=True)):
                if has_buffer:
                    added[at] = codec.added(part, out.shape[1:])
                    if added[at] is None:
                        codec.places(part, out.shape[1:])
        for at, (sample, has_buffer, part) in enumerate(zip(ids, have, parts, strict=True)):
            if has_buffer:
                base = self._buffer(store, sample, out.device)
                self._advance(
                    store, sample, base, codec, part, (seed + at) % 2**64, values[at], out.shape[1:], added[at]
                )
            else:
                _WHOLE.decode(part, values[at])
                self._learn(store, sample, values[at])
        return out

    def fill(self, key: str, x: Tensor, samples: Tensor | None) -> None:
        """Set m(i) = x for samples that were sent uncompressed, so that both ends have them exactly.

        Raises:
            TypeError, ValueError: as :meth:`pack`.
        """
        ids = self._checked(x.shape, x.dtype, samples)
        if ids and x.numel():
            store = self._store_for(key, x[0].numel())
            for sample, one in zip(ids, x.detach(), strict=True):
                self._learn(store, sample, one)

    def _learn(self, store: SampleStore, sample: int, x: Tensor) -> None:
        """Set the buffer of a sample that both ends know exactly, unless the sample is not finite or too large."""
        if kernels.all_finite(x.reshape(-1).float(), below=_TOO_LARGE):
            store.put(sample, x)

    def _encode(self, key: str, x: Tensor, base: Tensor, codec: Codec, part: Tensor, seed: int) -> None:
        """Encode the difference of a sample from its buffer."""
        difference = self._scratch.get(key)
        if difference is None or difference.device != x.device:
            difference = self._scratch[key] = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
        flat = x.reshape(-1)
        if flat.dtype != torch.float32:
            flat = difference.copy_(flat)
        if not kernels.difference(flat, base, difference, below=_TOO_LARGE):
            difference.fill_(torch.nan)  # in every element, so that every codec's payload shows it
        codec.encode(difference.view(x.shape), seed=seed, out=part)

    def _advance(
        self,
        store: SampleStore,
        sample: int,
        base: Tensor,
        codec: Codec,
        part: Tensor,
        seed: int,
        out: Tensor | None,
        shape: torch.Size,
        added: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Update m(i) ← m(i) + the decoded difference, with the same bits on both ends; write the result to ``out``.

        Args:
            added: the difference, if it has been read from the payload already.
        """
        if not codec.is_finite(part, shape):
            if out is not None:
                out.fill_(torch.nan)
            return
        if added is not None:
            kernels.sparse_accumulate(base, *added)
        else:
            codec.decode(part, base.view(shape), seed=seed, accumulate=True)
        if out is not None:
            out.copy_(base.view(shape))
        store.put(sample, base)

    def _buffer(self, store: SampleStore, sample: int, device: torch.device) -> Tensor:
        """Return m(i) on the activations' device, to be changed and put back."""
        return store.row(sample, write=True).to(device)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _checked(self, shape: Sequence[int], dtype: torch.dtype, samples: Tensor | None) -> list[int]:
        """Return the sample ids of a batch as a list; raise if they, the shape or the dtype are not valid."""
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"aq-sgd takes float32, float16 or bfloat16 activations, not {dtype}; convert them")
        if not len(shape):
            raise ValueError(
                "aq-sgd takes a batch whose first dimension is the samples, got a tensor without dimensions"
            )
        if samples is None:
            raise ValueError(
                "aq-sgd keeps a buffer per sample and needs to know which samples a batch holds: pass samples=…, an "
                "int64 tensor with one id per sample. A sample must have the same id in every epoch; its index in the "
                "data set will do"
            )
        given: Any = samples
        if not isinstance(given, Tensor) or given.dtype != torch.int64:
            what = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise TypeError(f"samples must be an int64 tensor with one id per sample, not {what}")
        if tuple(samples.shape) != (shape[0],):
            raise ValueError(
                f"a batch of shape {tuple(shape)} has {shape[0]} samples, but samples=… has shape "
                f"{tuple(samples.shape)}; give one id per sample"
            )
        ids: list[int] = samples.tolist()
        if len(set(ids)) < len(ids):
            twice = next(sample for at, sample in enumerate(ids) if sample in ids[:at])
            raise ValueError(f"sample {twice} is in this batch twice; give every sample its own id")
        return ids

    def _sizes(self, key: str, codec: Codec, shape: Sequence[int], dtype: torch.dtype, ids: list[int]) -> list[int]:
        """Return the bytes of each sample's part of the payload."""
        self.check(codec)
        one = tuple(shape[1:])
        store = self._stores.get(key)
        if store is None:
            have = [False] * len(ids)
        else:
            self._check_numel(key, store, math.prod(one))
            have = store.has(ids)
        whole, difference = _WHOLE.payload_nbytes(one, dtype), codec.payload_nbytes(one)
        return [difference if has_buffer else whole for has_buffer in have]

    def _check_numel(self, key: str, store: SampleStore, numel: int) -> None:
        if store.numel != numel:
            raise ValueError(
                f"the samples held under {key!r} have {store.numel} elements, got samples of {numel} elements; pad "
                "them, or use another key"
            )

    def _store_for(self, key: str, numel: int) -> SampleStore:
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = self._new_store(key, numel)
        self._check_numel(key, store, numel)
        return store

    def _new_store(self, key: str, numel: int) -> SampleStore:
        return SampleStore(
            numel,
            keep=self.store,
            budget_nbytes=None if math.isinf(self.budget_gb) else int(self.budget_gb * 1e9),
            folder=Path(self.folder).expanduser() if self.folder else None,
            name=f"aq-sgd-{quote(key, safe='')}",
        )

    # ---- what both ends hold -----------------------------------------------------------------------------------------

    def reference_ids(self, key: str) -> Tensor:
        store = self._stores.get(key)
        return torch.empty(0, dtype=torch.int64, device="cpu") if store is None else store.ids()

    def keep_only(self, key: str, ids: Tensor | Iterable[int]) -> None:
        if key in self._stores:
            self._stores[key].keep_only(ids)

    # ---- state -------------------------------------------------------------------------------------------------------

    def residual(self, key: str) -> None:
        """Return None: what a payload left out of a sample is part of the next difference."""
        return

    def scale(self, factor: float) -> None:
        raise TypeError("aq-sgd keeps activations, which have no loss scale")

    def state_dict(self) -> dict[str, Any]:
        """Return key → the state of its :class:`~narrowband.feedback.SampleStore`."""
        return {key: store.state_dict() for key, store in self._stores.items()}

    def check_state(self, state: Mapping[str, object]) -> None:
        for key, rows in state.items():
            self._store_of(key, rows).check_state(rows)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all buffers by those of the state.

        If a file has changed since the state was taken, or is missing, its buffers are dropped with a warning. Both
        ends then have to agree on the samples that both hold.

        Raises:
            ValueError: not a state, a state of other settings, or a file of another run. Nothing has changed then.
        """
        stores = {}
        for key, rows in state.items():
            stores[key] = self._store_of(key, rows)
            stores[key].load_state_dict(rows)
        self._stores = stores
        self._scratch.clear()

    def _store_of(self, key: str, rows: object) -> SampleStore:
        """Return a new store for rows of the length that a state says."""
        numel = rows.get("numel") if isinstance(rows, Mapping) else None
        if type(key) is not str or type(numel) is not int:
            raise ValueError(
                f"{self.name}: the state has no rows by sample for {key!r}; pass the state as state_dict() returned it"
            )
        return self._new_store(key, numel)


def _cut(payload: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    """Yield the parts of a payload, which lie end to end."""
    begin = 0
    for nbytes in sizes:
        yield payload[begin : begin + nbytes]
        begin += nbytes


def _check_like(out: Tensor, x: Tensor) -> None:
    if out.dtype != x.dtype:
        raise TypeError(f"arrived must have the dtype of the batch, {x.dtype}, not {out.dtype}")
    if out.shape != x.shape:
        raise ValueError(f"arrived must have the shape of the batch, {tuple(x.shape)}, not {tuple(out.shape)}")
