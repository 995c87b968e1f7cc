"""The two sums that DGC keeps of each tensor between steps, and how they are stored.

They are two successive sums of velocities: y, and the y of the step before. Between steps they are stored as ``fp32``,
both as they are (:class:`Sums`), or as ``bf16`` or ``int8`` (:class:`RoundedSums`): y and its difference from the sum
before, the velocity. These take 2 bytes or about 1 per element each. They are rounded stochastically, so that sums hold
in expectation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.feedback.kept import Kept, Store, keep_all, read_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

__all__ = ["RoundedSums", "Sums"]

#: XORed with the seed of a step, so that rounding the sum, rounding the velocity and encoding draw different random
#: numbers.
_OF_SUMS, _OF_VELOCITIES = 0x6C078965, 0x5D588B65


class Sums:
    """Sums in float32. What :meth:`open` returns is the stored sums themselves, which a step changes in place.

    Attributes:
        of: key → (newest sum, sum of the step before).
    """

    def __init__(self) -> None:
        self.of: dict[str, tuple[Tensor, Tensor]] = {}

    def open(self, key: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the newest sum of a tensor and that of the step before; zeros at first.

        Raises:
            ValueError: they have another size than the tensor.
        """
        held = self.of.get(key)
        if held is None:
            held = self.of[key] = _zeros(x), _zeros(x)
        _check_size(key, held[0].numel(), x)
        return held

    def open_all(self, keys: Sequence[str], xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Do :meth:`open` for several tensors: return the newest sums, and those of the step before."""
        pairs = [self.open(key, x) for key, x in zip(keys, xs, strict=True)]
        return [now for now, _ in pairs], [before for _, before in pairs]

    def read(self, key: str) -> tuple[Tensor, Tensor]:
        """Return the sums of a tensor that has some, as :meth:`open`."""
        return self.of[key]

    def newest(self, key: str) -> Tensor | None:
        """Return the newest sum of a tensor, or None if it has none."""
        return self.of[key][0] if key in self.of else None

    def close(self, key: str, now: Tensor, before: Tensor, *, seed: int) -> None:
        """Store the sums after a step with this seed: the newest, and that of the step before."""
        del seed
        self.of[key] = now, before

    def parts(self, key: str) -> dict[str, Tensor]:
        """Return what :meth:`load` takes; nothing for a tensor without sums."""
        return dict(zip(("now", "before"), self.of[key], strict=True)) if key in self.of else {}

    def load(self, key: str, parts: Mapping[str, Tensor]) -> None:
        """Set the sums of a tensor to saved :meth:`parts`, however they were stored. Their memory becomes the sums'."""
        now, velocity = parts["now"], parts.get("velocity")
        self.of[key] = now, parts["before"] if velocity is None else now - velocity

    def scale(self, factor: float) -> None:
        """Multiply all sums by a factor."""
        for pair in self.of.values():
            for total in pair:
                total.mul_(factor)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the sums take."""
        return sum(total.nbytes for pair in self.of.values() for total in pair)


class RoundedSums:
    """As :class:`Sums`, in ``bf16`` or ``int8``. What :meth:`open` returns is new float32 tensors.

    The memory of a float32 gradient can hold the stored bytes from before a step: two tensors of at most 2 bytes per
    element.

    Attributes:
        of: key → (newest sum, velocity), as they are stored.
    """

    def __init__(self, store: Store) -> None:
        self._store: Store = store
        self.of: dict[str, tuple[Kept, Kept]] = {}

    def _make_sure(self, key: str, x: Tensor) -> None:
        """Make sure that a tensor has sums, of zeros at first; see :meth:`Sums.open`."""
        if key not in self.of:
            self.of[key] = Kept(_zeros(x), self._store), Kept(_zeros(x), self._store)
        _check_size(key, self.of[key][0].numel, x)

    def open(self, key: str, x: Tensor) -> tuple[Tensor, Tensor]:
        self._make_sure(key, x)
        return self.read(key)

    def open_all(self, keys: Sequence[str], xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for key, x in zip(keys, xs, strict=True):
            self._make_sure(key, x)
        states = read_all(self._stored(keys))
        nows, befores = states[: len(keys)], states[len(keys) :]
        _subtract_from(nows, befores)
        return nows, befores

    def _stored(self, keys: Sequence[str]) -> list[Kept]:
        """Return what is stored of several tensors: all sums, then all velocities."""
        return [kept for kind in zip(*(self.of[key] for key in keys), strict=True) for kept in kind]

    def read(self, key: str) -> tuple[Tensor, Tensor]:
        now, velocity = (kept.read() for kept in self.of[key])
        return now, now - velocity

    def newest(self, key: str) -> Tensor | None:
        return self.of[key][0].read() if key in self.of else None

    def close(self, key: str, now: Tensor, before: Tensor, *, seed: int) -> None:
        kept, velocity = self.of[key]
        kept.keep(now, seed=_OF_SUMS ^ seed)
        velocity.keep(now - before, seed=_OF_VELOCITIES ^ seed)

    def close_all(
        self,
        keys: Sequence[str],
        nows: Sequence[Tensor],
        befores: Sequence[Tensor],
        *,
        seeds: Sequence[int],
        xs: Sequence[Tensor],
    ) -> None:
        """Do :meth:`save` and :meth:`close` for several tensors. The memory of ``befores`` is overwritten."""
        memories = [self._memory(key, x) for key, x in zip(keys, xs, strict=True)]
        _subtract_from(nows, befores)
        keep_all(
            self._stored(keys),
            [*nows, *befores],
            seeds=[mark ^ seed for mark in (_OF_SUMS, _OF_VELOCITIES) for seed in seeds],
            formers=[memory for kind in zip(*memories, strict=True) for memory in kind],
        )

    def save(self, key: str, x: Tensor) -> None:
        """Copy the stored bytes into a gradient's memory."""
        for stored, place in self.saved(key, x):
            place.copy_(stored)

    def saved(self, key: str, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the stored bytes, in some parts, each with the part of a gradient's memory that it was saved in."""
        (now, velocity), (first, second) = self.of[key], self._memory(key, x)
        return [*now.places(first), *velocity.places(second)]

    def _memory(self, key: str, x: Tensor) -> list[Tensor]:
        """Return the slices of a gradient's memory for the sum and for the velocity."""
        now, velocity = self.of[key]
        sizes = [now.nbytes, velocity.nbytes]
        return list(torch.split(x.view(-1).view(torch.uint8)[: sum(sizes)], sizes))

    def parts(self, key: str) -> dict[str, Tensor]:
        if key not in self.of:
            return {}
        now, velocity = self.of[key]
        return {"now": now.read(), "velocity": velocity.read()}

    def load(self, key: str, parts: Mapping[str, Tensor]) -> None:
        now, velocity = parts["now"], parts.get("velocity")
        velocity = now - parts["before"] if velocity is None else velocity
        self.of[key] = Kept(now, self._store), Kept(velocity, self._store)

    def scale(self, factor: float) -> None:
        for pair in self.of.values():
            for kept in pair:
                kept.keep(kept.read().mul_(factor), seed=None)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for pair in self.of.values() for kept in pair)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.numel(), dtype=torch.float32, device=x.device)


def _check_size(key: str, numel: int, x: Tensor) -> None:
    if numel != x.numel():
        raise ValueError(
            f"the state of {key!r} has {numel} elements, got a tensor of {x.numel()}; use another key, or load the "
            "state of this model"
        )


def _subtract_from(minuends: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """``x = minuend − x`` for several tensors, without memory for another copy of them."""
    torch._foreach_neg_(list(xs))
    torch._foreach_add_(list(xs), list(minuends))
