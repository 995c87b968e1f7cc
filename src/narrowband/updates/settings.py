"""The settings of rounds that users pass at set-up, and their validation."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from narrowband.averaging.settings import check_scaler
from narrowband.feedback import ErrorFeedback, compression
from narrowband.units import plain_number, whole_number

if TYPE_CHECKING:
    from narrowband.feedback import Compression

__all__ = ["Rounds", "check_in_place"]

log = logging.getLogger(__name__)

#: Default interval, in optimizer steps, between two checks that replicas are equal. Where rounds are farther apart than
#: that, every round checks. A check reads all parameters once, while every step of AdamW reads and writes them and two
#: moments.
CHECK_EVERY = 10

#: Rounds of fewer steps than this count as short. In ``reproduce.local``, DiLoCo's outer step does harm in rounds of 3
#: steps and none in rounds of 15; where the border lies has not been measured.
_FEW_STEPS = 10

#: The words that an argument may be.
_WORDS = {"buffers": ("average", "keep"), "split": ("strided", "layers"), "residuals": ("apart", "in-place")}


@dataclass(frozen=True)
class Rounds:
    """When rounds happen and what they do. The fields are arguments of :func:`compress_updates`."""

    every: int | float
    outer: float | Literal["auto", "nesterov"] | Callable[[list[nn.Parameter]], Optimizer] = 1.0
    buffers: Literal["average", "keep"] = "average"
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.5
    offload: bool = False
    grad_scaler: torch.amp.GradScaler | None = None
    split: Literal["strided", "layers"] = "strided"
    check_every: int | None = None
    weigh: str = "steps"
    residuals: Literal["apart", "in-place"] = "apart"

    @classmethod
    def of(cls, *, with_peers: bool, **given: Any) -> Rounds:
        """Check all arguments that do not depend on the model or the spec, and return the settings.

        Args:
            with_peers: whether replicas come and go.
            given: the fields, as users gave them: ``every`` may be a time, and ``outer`` "nesterov".

        Raises:
            TypeError: an object that is none of its kind.
            ValueError: a number out of range, a word that does not exist, or what works only with peers.
        """
        every = given.pop("every")
        if isinstance(every, SupportsIndex):  # NumPy's numbers, too
            every = whole_number("every", every)
        elif not isinstance(every, str):
            raise ValueError(
                f"every={every!r} is neither a whole number of steps nor, with peers=..., a time, as '20min'"
            )
        rounds = cls(
            _seconds(every) if isinstance(every, str) else every, **{n: plain_number(x) for n, x in given.items()}
        )
        if isinstance(every, str) and not with_peers:
            raise ValueError(f"every={every!r} is a time, which works only with peers=...; give a number of steps")
        check_scaler(rounds.grad_scaler)
        rounds._check_words(with_peers=with_peers)
        rounds._check_numbers()
        if rounds.outer == "nesterov":
            if isinstance(every, int) and every < _FEW_STEPS:
                log.warning(
                    "every=%d is short for outer='nesterov': with rounds of 3 steps the loss of a small GPT was half "
                    "as high again, with rounds of 15 steps it was not; use outer='auto' for short rounds",
                    every,
                )
            return replace(rounds, outer=_nesterov)
        return rounds

    def _check_words(self, *, with_peers: bool) -> None:
        for name, words in _WORDS.items():
            if (word := getattr(self, name)) not in words:
                raise ValueError(f"{name}={word!r} is neither {words[0]!r} nor {words[1]!r}")
        weigh: object = self.weigh
        if not (isinstance(weigh, str) and weigh):
            raise ValueError(
                f"weigh={weigh!r} must be a word: 'steps', or the unit of handle.count(), such as 'tokens'"
            )
        if weigh != "steps" and not with_peers:
            raise ValueError(
                f"weigh={weigh!r} works only with peers=...; replicas of a process group have equal weights"
            )

    def _check_numbers(self) -> None:
        """Check numbers: all fragments must have their rounds within ``every`` steps, and each must arrive before the
        next one starts.
        """
        every, outer, words = self.every, self.outer, ("auto", "nesterov")
        fragments, overlap = self.fragments, self.overlap
        if isinstance(every, int) and every < 1:
            raise ValueError(f"every={every} must be at least 1: optimizer steps from one round to the next")
        check_every: Any = self.check_every
        if check_every is not None and not (isinstance(check_every, int) and check_every >= 1):
            raise ValueError(f"check_every={check_every!r} must be a whole number of rounds of at least 1")
        given: object = outer
        if isinstance(given, Optimizer):
            kind = type(given).__name__
            raise TypeError(
                f"outer is an optimizer, {kind}; pass a function that makes one, as in outer=lambda parameters: "
                f"{kind}(parameters, …)"
            )
        if not callable(outer) and outer not in words and not (_is_number(outer) and 0 < outer < math.inf):
            raise ValueError(
                f"outer={outer!r} must be a number above 0, 'auto', 'nesterov', or a function that makes an optimizer"
            )
        numbers: list[tuple[str, Any, int]] = [("fragments", fragments, 1), ("overlap", overlap, 0)]
        for name, value, least in numbers:
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if not (_is_number(self.alpha) and 0 <= self.alpha <= 1):
            raise ValueError(f"alpha={self.alpha!r} must be between 0 and 1: the weight of a replica's own parameters")
        if isinstance(self.every, float):
            return
        if fragments > self.every:
            raise ValueError(
                f"fragments={fragments} must be at most every={self.every}: each fragment needs a step for its round"
            )
        if overlap > self.every // fragments:
            raise ValueError(
                f"overlap={overlap} must be at most {self.every // fragments} (every={self.every} // "
                f"fragments={fragments}): a fragment must arrive before the exchange of the next one begins"
            )

    @property
    def checked_every(self) -> int:
        """Rounds from one comparison of the replicas' checksums to the next."""
        return self.check_every or (1 if isinstance(self.every, float) else max(1, math.ceil(CHECK_EVERY / self.every)))

    def facts(self, outer: Optimizer | None, left_out: Iterable[str]) -> dict[str, str]:
        """Return name → value of what must be the same on all replicas.

        Args:
            outer: the outer optimizer, if :attr:`outer` makes one.
            left_out: names of buffers that are not averaged because they hold inf or NaN.
        """
        return {
            "every": str(self.every),
            "outer": repr(self.outer) if outer is None else _said_of(outer),
            "buffers": self.buffers,
            "buffers that are not finite": ", ".join(left_out),
            "fragments": f"{self.fragments}, {self.split}" if self.fragments > 1 else "1",
            "overlap": str(self.overlap),
            "alpha": str(self.alpha),
            "residuals": self.residuals,
            "check_every": str(self.checked_every),
            "weigh": self.weigh,
            "grad_scaler": "none" if self.grad_scaler is None else "given",
        }


def _nesterov(parameters: list[nn.Parameter]) -> Optimizer:
    """DiLoCo's outer optimizer."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def _seconds(text: str) -> float:
    """Return the seconds of a time such as ``20min``.

    Raises:
        ValueError: the text is no time.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(s|min|h)", text.strip())
    if found is None or not float(found[1]):
        steps = f", or a number of steps without quotes: every={text.strip()}" if text.strip().isdecimal() else ""
        raise ValueError(f"every={text!r} is not a time; expected a number and s, min or h, such as '20min'{steps}")
    return float(found[1]) * {"s": 1.0, "min": 60.0, "h": 3600.0}[found[2]]


def _is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, (int, float))


def check_in_place(specs: Iterable[str | Compression]) -> None:
    """Check that the specs' residuals can be kept in the parameters.

    Raises:
        ValueError: one of the specs has no residuals, or a feedback that needs them separate from the update.
    """
    for spec in specs:
        method = compression(spec).feedback
        if not isinstance(method, ErrorFeedback):
            raise ValueError(
                f"residuals='in-place' needs error feedback, and {str(spec)!r} has none; use a spec with +ef"
            )
        if method.chooses_by_residual:
            raise ValueError(
                f"residuals='in-place' cannot be combined with {method.name} in {str(spec)!r}, which needs residuals "
                "apart from the updates to choose what it sends; use a spec with +ef"
            )


def _said_of(optimizer: Optimizer) -> str:
    """Return the optimizer's type and default settings as text, for ranks to compare."""
    return f"{type(optimizer).__name__} {sorted((k, repr(v)) for k, v in optimizer.defaults.items())}"
