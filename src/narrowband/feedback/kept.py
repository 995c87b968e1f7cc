"""Store a residual between two steps: as it is, in fewer bits, or in CPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from narrowband import kernels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["Kept", "Store", "keep_all", "read_all"]

#: How residuals may be stored.
Store: TypeAlias = Literal["fp32", "bf16", "int8", "cpu"]


class Kept:
    """A flat float32 tensor, stored as it is, in fewer bits (:mod:`narrowband.kernels.stores`) or in CPU memory.

    With ``fp32``, what :meth:`read` returns is the stored tensor itself, which a step changes in place. With ``cpu`` it
    is stored in float32, and read back onto its own device. A tensor that is read and stored again without a seed stays
    the same to the bit.

    Args:
        x: the tensor; with ``fp32`` its memory becomes this one's.
        store: how to store it. It is rounded to nearest.

    Attributes:
        in_place: whether it is stored as it is, where it is.
        rounded: whether it is stored in fewer bits.
    """

    def __init__(self, x: Tensor, store: Store) -> None:
        self.in_place, self.rounded = store == "fp32", store in ("bf16", "int8")
        self._exponents: Tensor | None = None
        self._device = x.device
        if self.in_place:
            self._codes = x
        elif store == "cpu":
            self._codes = torch.empty(x.numel(), dtype=torch.float32, device="cpu", pin_memory=x.is_cuda)
        elif store == "int8":
            self._codes = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
            groups = -(-x.numel() // kernels.STORE_GROUP)
            self._exponents = torch.empty(groups, dtype=torch.int8, device=x.device)
        else:
            self._codes = torch.empty(x.numel(), dtype=torch.bfloat16, device=x.device)
        self.keep(x, seed=None)

    def keep(self, x: Tensor, *, seed: int | None) -> None:
        """Store ``x`` in place of the former tensor. A seed is for stochastic rounding; None: round to nearest."""
        if not self.rounded:
            if x is not self._codes:  # else it has changed in place
                self._codes.copy_(x, non_blocking=True)  # safe: reads are queued on the same stream
        elif self._exponents is None:
            kernels.keep_in_16(x, self._codes, seed=seed)
        else:
            kernels.keep_in_8(x, self._codes, self._exponents, seed=seed)

    def compensate(
        self, x: Tensor, k: int, *, decay: float, sampled: bool, seed: int, rounding: int
    ) -> tuple[bool, Tensor, Tensor]:
        """Add a gradient, take the k largest, and store the rest, in one pass; for ``bf16`` and ``int8`` only.

        See :func:`narrowband.kernels.compensate_kept`.
        """
        return kernels.compensate_kept(
            x, self._codes, self._exponents, k, decay=decay, sampled=sampled, seed=seed, rounding=rounding
        )

    def keep_rest(self, x: Tensor, at: Tensor, values: Tensor, *, seed: int) -> None:
        """Store what :meth:`compensate` would store, to the bit, if it took these elements. Changes ``x``."""
        if at.numel():
            x[at] = values.abs().amin()
        self.keep(x, seed=seed)
        self._codes[at] = 0

    def take_former(self, x: Tensor) -> None:
        """Restore the codes from before :meth:`compensate`, which has saved them in the gradient's memory."""
        kernels.take_former(x, self._codes, self._exponents)

    @property
    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Its codes and, with ``int8``, their powers of two."""
        return self._codes, self._exponents

    def read(self) -> Tensor:
        """Return the stored tensor: as a new float32 tensor, or itself where it is stored :attr:`in_place`."""
        if self.in_place:
            return self._codes
        if self._exponents is None:
            return self._codes.to(self._device, torch.float32, non_blocking=True, copy=True)
        out = torch.empty(self.numel, dtype=torch.float32, device=self._codes.device)
        kernels.read_from_8(self._codes, self._exponents, out)
        return out

    def copy_to(self, memory: Tensor) -> None:
        """Copy the stored bytes into memory as :meth:`places` takes it."""
        for codes, place in self.places(memory):
            place.copy_(codes)

    def copy_from(self, memory: Tensor) -> None:
        """Restore the bytes that :meth:`copy_to` has written to ``memory``."""
        for codes, place in self.places(memory):
            codes.copy_(place, non_blocking=True)  # as in keep

    def places(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what is stored, in two parts at most, each with the part of ``memory`` that :meth:`copy_to` writes.

        Args:
            memory: flat, of :attr:`nbytes` bytes: uint8 where :attr:`rounded`, else float32.
        """
        if not self.rounded:
            return [(self._codes, memory)]
        codes, exponents = self._codes.view(torch.uint8), self._exponents
        cut = codes.numel()
        pairs = [(codes, memory[:cut])]
        return pairs if exponents is None else [*pairs, (exponents.view(torch.uint8), memory[cut:])]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self._codes.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, on whatever device."""
        return self._codes.nbytes + (0 if self._exponents is None else self._exponents.nbytes)


def read_all(kepts: Sequence[Kept]) -> list[Tensor]:
    """Do :meth:`Kept.read` for several tensors of one store, which is not ``cpu``; on a GPU, in one launch."""
    if all(kept.in_place for kept in kepts):
        return [kept.read() for kept in kepts]
    outs = [torch.empty(kept.numel, dtype=torch.float32, device=kept.stored[0].device) for kept in kepts]
    kernels.read_all([kept.stored for kept in kepts], outs)
    return outs


def keep_all(
    kepts: Sequence[Kept],
    xs: Sequence[Tensor],
    *,
    seeds: Sequence[int],
    formers: Iterable[Tensor],
    least: Tensor | None = None,
) -> None:
    """Do :meth:`Kept.copy_to` into ``formers``, and then :meth:`Kept.keep`; on a GPU, in one launch for all.

    Nothing is done where tensors are stored in place, and a step has changed them.

    Args:
        kepts: of one store, which is not ``cpu``.
        xs: what to store.
        seeds: of stochastic rounding.
        formers: memory for the stored bytes: flat uint8.
        least: see :func:`narrowband.kernels.keep_all`.
    """
    if not all(kept.in_place for kept in kepts):
        kernels.keep_all(xs, [kept.stored for kept in kepts], seeds=seeds, formers=[*formers], least=least)
