"""Momentum of parameters that travel uncompressed beside DGC: their averages become the steps of momentum SGD."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Velocities", "wide"]


class Velocities:
    """A velocity for each parameter.

    Attributes:
        of: key → velocity, flat.
    """

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}
        #: By dtype: the sizes of averages, and which of them each element belongs to.
        self._owners: dict[torch.dtype, tuple[tuple[int, ...], Tensor]] = {}

    def advance(
        self, averages: Sequence[tuple[str, Tensor]], *, momentum: float, nesterov: bool, bad: Tensor | None
    ) -> None:
        """Take averages into the velocities, and change them in place to the steps.

        A parameter whose average is exactly zero had no gradient on any rank. Its velocity stays as it is. Steps and
        velocities of finite averages are finite: those that exceed the range of their dtype are cut to it.

        Args:
            averages: (key, average).
            momentum: of the velocities.
            nesterov: whether to use Nesterov's variant.
            bad: one int32 on their device; if it is not zero, nothing changes. None: the step is good.
        """
        kinds: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for key, x in sorted(averages, key=lambda pair: pair[0]):
            if x.numel():
                kinds.setdefault(x.dtype, []).append((key, x.view(-1)))
        for dtype, keyed in kinds.items():
            xs, velocities, sizes = [x for _, x in keyed], [], [x.numel() for _, x in keyed]
            for key, x in keyed:
                if key not in self.of:
                    self.of[key] = torch.zeros(x.numel(), dtype=wide(dtype), device=x.device)
                velocities.append(self.of[key])
            # All parameters end to end: a launch for each of them would take longer, and so would a wait for norms.
            used = torch.stack(torch._foreach_norm(xs, math.inf)) != 0
            if bad is not None:
                used &= bad == 0
            there = used.index_select(0, self._owner_of_each(xs))
            x, velocity = torch.cat(xs), torch.cat(velocities)
            new = _cut(velocity * momentum + x, velocity.dtype)
            step = _cut(new * momentum + x if nesterov else new, dtype)
            torch._foreach_copy_(velocities, torch.split(torch.where(there, new, velocity), sizes))
            torch._foreach_copy_(xs, torch.split(torch.where(there, step, x), sizes))

    def _owner_of_each(self, xs: Sequence[Tensor]) -> Tensor:
        """Return, for each element of these tensors end to end, the number of its tensor."""
        sizes = tuple(x.numel() for x in xs)
        held = self._owners.get(xs[0].dtype)
        if held is None or held[0] != sizes:  # a host that sends it to a GPU waits for it
            of_each = torch.arange(len(sizes), dtype=torch.int64, device="cpu").repeat_interleave(
                torch.tensor(sizes, dtype=torch.int64, device="cpu")
            )
            held = self._owners[xs[0].dtype] = sizes, of_each.to(xs[0].device)
        return held[1]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that velocities of gradients of this dtype have: a rising loss scale must not make them inf."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _cut(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cut elements to the range of a dtype."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most)
