"""Error feedback: what a codec leaves out is added to the next gradient (Seide et al. 2014; Karimireddy et al.,
arXiv 1901.09847, algorithm 1).

With gradient g, codec C and residual e::

    p = e + g          # encode
    send C(p)
    e = p − C(p)       # commit

so that the sum of everything sent plus the residual is the sum of all gradients: nothing is lost, it is late.

With ``decay=β`` what waits counts for less in every step: p = β·e + g. The sum is then no longer kept; what has waited
for t steps counts β^t. SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706) does so with β = 0.95 where updates, and not
gradients, are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs.base import dims, squared_norm
from narrowband.codecs.spec import check_keys
from narrowband.feedback.base import Feedback, Norms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narrowband.codecs import Codec, Shape

__all__ = ["ErrorFeedback"]


@dataclass(unsafe_hash=True)  # equal configurations hash alike; the residuals are not part of it
class ErrorFeedback(Feedback):
    """What a codec leaves out is added to the next gradient; costs one float32 per element.

    For a float32 gradient, :meth:`encode` swaps: the residual's memory then holds p and the gradient's memory holds e,
    which makes :meth:`roll_back` exact without a copy. A half-precision gradient cannot hold e, so there p is made in a
    scratch tensor, nothing changes before :meth:`commit`, and rolling back is nothing to do.

    Args:
        decay: what is left of the residual after a step in which it waited, above 0 and up to 1.
    """

    name: ClassVar[str] = "ef"

    decay: float = 1.0

    _residuals: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_keys(self)
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(
                f"{self.name}: decay={self.decay} is not in (0, 1]; 1 keeps all that waits, and a codec without "
                "feedback keeps none"
            )

    def encode(
        self,
        key: str,
        x: Tensor,
        codec: Codec,
        *,
        shape: Shape,
        seed: int,
        out: Tensor | None = None,
        commit: bool = False,
    ) -> tuple[bool, Tensor]:
        residual = self._residuals.get(key)
        if residual is None:
            residual = self._residuals[key] = torch.zeros(x.numel(), device=x.device)
        elif residual.numel() != x.numel():
            raise ValueError(
                f"the residual of {key!r} has {residual.numel()} elements, so {x.numel()} cannot be encoded there; "
                "use another key, or load the state of this model"
            )
        if commit and not self.can_roll_back(x):
            raise ValueError(f"what {x.dtype} loses can be committed only when the step is decided")
        if x.dtype != torch.float32:
            if codec.exact:  # sends what has 16 bits in 16 bits
                total = (residual * self.decay + x).to(x.dtype)
                return kernels.all_finite(total.float()), codec.encode(total.view(dims(shape)), seed=seed, out=out)
            x, residual = x.float(), residual.clone()
        return self._encode(x, residual, codec, shape=shape, seed=seed, out=out, subtract=commit)

    def _encode(
        self,
        x: Tensor,
        residual: Tensor,
        codec: Codec,
        *,
        shape: Shape,
        seed: int,
        out: Tensor | None,
        subtract: bool,
    ) -> tuple[bool, Tensor]:
        """``(x, residual) ← (residual, decay · residual + x)``, and a payload of that sum: see
        :meth:`~narrowband.codecs.Codec.encode_compensated`.
        """
        return codec.encode_compensated(
            x, residual, shape=shape, seed=seed, out=out, decay=self.decay, subtract=subtract
        )

    def commit(
        self, key: str, x: Tensor, codec: Codec, payload: Tensor, *, shape: Shape, seed: int, measure: bool = False
    ) -> Norms | None:
        residual = self._residuals[key]
        if x.dtype != torch.float32:
            residual.mul_(self.decay).add_(x)
        before = squared_norm(residual) if measure else 0.0
        if x.dtype != torch.float32 and codec.exact:
            residual.sub_(codec.decode(payload, torch.empty_like(x), seed=seed))
            return Norms(before, squared_norm(residual)) if measure else None
        codec.decode(payload, residual.view(dims(shape)), seed=seed, weight=-1.0, accumulate=True)
        return Norms(before, squared_norm(residual)) if measure else None

    def can_roll_back(self, x: Tensor) -> bool:
        return x.dtype == torch.float32

    def roll_back(self, key: str, x: Tensor) -> None:
        if x.dtype == torch.float32:
            self._residuals[key].copy_(x)

    def residual(self, key: str) -> Tensor | None:
        return self._residuals.get(key)

    def take_residual(self, key: str) -> Tensor | None:
        return self._residuals.pop(key, None)

    def add_residual(self, key: str, residual: Tensor) -> None:
        self._residuals[key] = residual

    def scale(self, factor: float) -> None:
        for residual in self._residuals.values():
            residual.mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._residuals)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._residuals = {
            key: value.detach().reshape(-1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for key, value in state.items()
        }
