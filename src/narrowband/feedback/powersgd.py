"""PowerSGD's state: each rank's residual, and the factors from which power iteration continues.

Source: Vogels et al., arXiv 1905.13727. The codec :class:`~narrowband.codecs.LowRank` factors the matrix of one rank.
PowerSGD factors the average of all ranks' matrices without gathering them: products with the same factor add up. This
module has the state between steps; :mod:`narrowband.collectives.factor_reduce` computes and sends the factors.

With ``halves``, a step makes that many half rounds of power iteration
(:mod:`narrowband.collectives.half_rounds`), as the authors' package does (github.com/epfml/powersgd, where the setting
is ``num_iters_per_step``). Half rounds alternate between the two sides, over steps too, so the factor that is kept is
the left one or the right one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs import LowRank, format_term
from narrowband.codecs.base import numel_of
from narrowband.codecs.lowrank import factors, start
from narrowband.codecs.spec import check_keys
from narrowband.feedback.base import Layout, State, check_saved
from narrowband.feedback.ef import ErrorFeedback
from narrowband.kernels import Late

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from narrowband.codecs import Codec, Shape

__all__ = ["PowerSGD"]


class _Sides(NamedTuple):
    """The factor that a step starts with, on one of two sides."""

    left: Tensor | None
    right: Tensor | None


class _Undecided(NamedTuple):
    """A step of which the host will learn whether it was bad; and, by key, the factors from before it."""

    bad: Late
    former: dict[str, _Sides]


@dataclass(unsafe_hash=True)
class PowerSGD(State):
    """Low-rank factors of the average gradient, by all-reduce, with error feedback and a warm start.

    Costs one float32 per element for the residual, and the factors of one side.

    Args:
        rank: columns of the factors.
        iterations: rounds of power iteration per step; each takes two all-reduces.
        warm_start: whether a step continues from the factors of the step before; one round is then enough.
        min_ratio: a matrix is factored only if it has more than ``min_ratio`` times as many elements as its factors
            (with ``halves``: as the factors that a step sends). Others are averaged uncompressed.
        ef: whether to use error feedback: to add what the factors lack of a matrix to the next gradient.
        halves: number of half rounds per step, in place of whole rounds. A half round is one all-reduce of one factor,
            half the bytes of a round, and its result is part of the average. 0: whole rounds, as in the paper.

    Example:
        >>> handle = nb.compress_gradients(model, "powersgd:rank=8,halves=1")  # the bytes of powersgd:rank=4
    """

    name: ClassVar[str] = "powersgd"
    brings_codec: ClassVar[bool] = True
    takes_activations: ClassVar[bool] = False
    puts_back: ClassVar[bool] = True

    rank: int = field(default=4, metadata={"always": True})
    iterations: int = 1
    warm_start: bool = True
    min_ratio: float = 2.0
    ef: bool = True
    halves: int = 0

    #: Key → (block, index) of its residual. Matrices of one shape share a block, so that one product serves them all.
    _places: dict[str, tuple[Tensor, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Key → factors (r × n, r × m) that were sent, whose product the next step will subtract from the residual.
    _sent: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Key → the factor that the next step starts with: the right one (r × m) or, in ``_left``, the left one (r × n).
    _factors: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _left: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Steps of which the host does not know yet whether they were good: with what is kept if they were not.
    _undecided: list[tuple[Late, dict[str, _Sides]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    #: Key and length → rows that take the place of rows of zeros in a factor.
    _spares: dict[tuple[str, int], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_keys(self)
        for key in ("rank", "iterations"):
            if getattr(self, key) < 1:
                raise ValueError(f"powersgd: {key}={getattr(self, key)} must be at least 1")
        if not 0.0 <= self.min_ratio < math.inf:
            raise ValueError(f"powersgd: min_ratio={self.min_ratio} must be finite and at least 0")
        if self.halves < 0:
            raise ValueError(f"powersgd: halves={self.halves} must be at least 1; leave halves out for whole rounds")
        if self.halves and (self.iterations > 1 or not self.warm_start):
            raise ValueError(
                f"powersgd: halves={self.halves} is the number of half rounds per step, each of which continues from "
                "the one before; leave out iterations and warm_start"
            )

    @property
    def goes_ahead(self) -> bool:
        return True

    @property
    def goes_ahead_in_16(self) -> bool:
        return self.goes_ahead

    @property
    def collective(self) -> str:
        return "half_rounds" if self.halves else "factor_reduce"

    @property
    def codec(self) -> LowRank:
        """The codec that factors one matrix by itself, used to predict sizes and errors."""
        return LowRank(rank=self.rank, iterations=self.iterations)

    def factors(self, codec: Codec, shape: Shape) -> tuple[int, int, int]:
        """Return (n, m, r) of a tensor of this shape; r = 0: it is averaged uncompressed."""
        if not isinstance(codec, LowRank):
            raise TypeError(f"powersgd needs the codec lowrank, got {codec}")
        sent = self.halves / 2 if self.halves else 1.0
        return factors(shape, codec.rank, self.min_ratio * sent)

    @property
    def compensates(self) -> bool:
        return self.ef

    def behind(self, codec: Codec) -> State | None:
        """Return this configuration with the rank of a ``lowrank`` codec; None for other codecs."""
        return replace(self, rank=codec.rank) if isinstance(codec, LowRank) else None

    def includes(self, other: State) -> bool:
        return self.ef and other == ErrorFeedback()

    def shares_state_with(self, other: State) -> bool:
        """Return whether the configurations are equal, except for the rank, which may differ from layer to layer."""
        return isinstance(other, PowerSGD) and replace(other, rank=self.rank) == self

    def layer_nbytes(self, codec: Codec, shape: Shape) -> int:
        """Return the bytes of one rank's factors per step; with an odd number of half rounds, the mean of two steps."""
        n, m, r = self.factors(codec, shape)
        return 2 * r * (n + m) * (self.halves or 2 * self.iterations) or 4 * numel_of(shape)

    def kept_rank(self, codec: Codec, shape: Shape) -> int:
        return self.factors(codec, shape)[2]

    def reserve(self, layers: Sequence[Layout]) -> None:
        """Allocate residuals of equal shape in one block, in this order, so that one product serves them all."""
        if not self.ef:
            return
        alike: dict[tuple[int, int], list[Layout]] = {}
        for layer in layers:
            n, m, r = self.factors(layer.codec, layer.shape)
            if r and not self.has_residual(layer.key):
                alike.setdefault((n, m), []).append(layer)
        for (n, m), some in alike.items():
            room = torch.zeros(len(some), n, m, dtype=torch.float32, device=some[0].device)
            self._places.update({layer.key: (room, at) for at, layer in enumerate(some)})

    def note(self, layers: Sequence[Layout], *, whole: bool) -> str | None:
        """Warn if no matrix can be factored, or if a rank is larger than a matrix has."""
        sizes = [(layer, *self.factors(layer.codec, layer.shape)) for layer in layers]
        if whole and sizes and not any(r for *_, r in sizes):
            return (
                f"{format_term(self)} factors none of this model's matrices: they are too narrow for its rank and "
                "min_ratio, and all travel uncompressed. Do not compress, or use a quantizer such as qsgd:bits=4"
            )
        wanted = {layer.key: layer.codec.rank for layer in layers if isinstance(layer.codec, LowRank)}
        cut = [(layer.key, n, m, r) for layer, n, m, r in sizes if wanted[layer.key] > min(n, m)]
        if not cut:
            return None
        matrices = ", ".join(f"{key} ({n} × {m}: {f'rank {r}' if r else 'averaged as it is'})" for key, n, m, r in cut)
        return f"powersgd: rank {max(wanted[key] for key, *_ in cut)} is more than these matrices have: {matrices}"

    # ---- the residual ------------------------------------------------------------------------------------------------

    def matrix(self, key: str, n: int, m: int, device: torch.device) -> Tensor:
        """Return the residual under ``key``, n × m, zeros at first, without :meth:`sent_factors` subtracted yet."""
        if key not in self._places:
            self._places[key] = (torch.zeros(1, n, m, dtype=torch.float32, device=device), 0)
        room, at = self._places[key]
        if room[at].numel() != n * m:
            raise ValueError(
                f"the residual of {key!r} has {room[at].numel()} elements, got a tensor of {n * m}; use another key, "
                "or load the state of this model"
            )
        return room[at].view(n, m)

    def block(self, keys: Sequence[str]) -> Tensor | None:
        """Return the residuals of these matrices as one tensor, (count, n, m), if they are contiguous in this order."""
        room, first = self._places[keys[0]]
        for step, key in enumerate(keys):
            other, at = self._places[key]
            if other is not room or at != first + step:
                return None
        return room[first : first + len(keys)]

    def order(self, key: str) -> int:
        """Return the index of a matrix in its block."""
        return self._places[key][1] if key in self._places else 0

    def has_residual(self, key: str) -> bool:
        """Return whether a residual is allocated under ``key``."""
        return key in self._places

    def residual(self, key: str) -> Tensor | None:
        if key not in self._places:
            return None
        room, at = self._places[key]
        residual = room[at].view(-1)
        if key in self._sent:
            kernels.low_rank_product(residual, *self._sent.pop(key), weight=-1.0, accumulate=True)
        return residual

    def take_residual(self, key: str) -> Tensor | None:
        residual = self.residual(key)
        if residual is None:
            return None
        residual = residual.clone()
        self._settle()
        del self._places[key]
        self._factors.pop(key, None)
        self._left.pop(key, None)
        return residual

    def add_residual(self, key: str, residual: Tensor) -> None:
        if key in self._places:
            room, at = self._places[key]
            room[at].view(-1).copy_(residual)
        else:
            self._places[key] = (residual.view(1, -1), 0)

    def entries(self, key: str) -> dict[str, Tensor]:
        """Return the residual. Factors are equal on all ranks, and only where the next step starts."""
        residual = self.residual(key)
        return {} if residual is None else {f"residual/{key}": residual}

    def put_back(self, key: str, entries: Mapping[str, Tensor]) -> None:
        self._sent.pop(key, None)
        former = entries.get(f"residual/{key}")
        if former is not None:
            self.add_residual(key, former)
        elif key in self._places:
            room, at = self._places[key]
            room[at].zero_()

    def sent_factors(self, key: str) -> tuple[Tensor, Tensor] | None:
        """Return the factors that were sent and whose product :meth:`matrix` still contains, or None."""
        return self._sent.get(key)

    def record_sent(self, key: str, p: Tensor, q: Tensor) -> None:
        """Record, after a good step, the factors whose product has to be subtracted from the residual."""
        self._sent[key] = p, q

    # ---- the factors -------------------------------------------------------------------------------------------------

    def starts_left(self, key: str) -> bool:
        """Return whether the factor that the next step starts with is the left one."""
        self._settle()
        return key in self._left

    def factor(self, key: str, r: int, length: int, seed: int, device: torch.device) -> Tensor:
        """Return the factor that this step starts with: r × m, or r × n if :meth:`starts_left`; equal on all ranks.

        It is the factor of the step before. Where the rank has changed, rows are left out, or new rows are drawn.
        """
        self._settle()
        before = self._left.get(key, self._factors.get(key)) if self.warm_start else None
        if before is None:
            return start(length, r, seed, device)
        if before.shape[0] < r:
            return torch.cat([before, start(length, r - before.shape[0], seed, device)])
        return before[:r]

    def spare(self, key: str, r: int, length: int, index: int, device: torch.device) -> Tensor:
        """Return r × length drawn numbers for a matrix, the same in every step and on all ranks.

        Args:
            index: of the matrix among all tensors of the model.
        """
        found = self._spares.get((key, length))
        if found is None or found.shape[0] != r:
            found = self._spares[key, length] = start(length, r, ~index, device)
        return found

    def before(self, key: str, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors that a bad step leaves in place of those that it has found, of the same shapes.

        They are those of the step before. If it has sent none, their product is zero, and the second one is the factor
        that the step started with.
        """
        sent = self._sent.get(key)
        if sent is not None:
            return sent
        kept = self._factors.get(key)
        return torch.zeros_like(p), torch.zeros_like(q) if kept is None or kept.shape != q.shape else kept

    def keep(self, key: str, rows: Tensor, *, left: bool = False) -> None:
        """Keep the factor of a good step, to start the next step with."""
        if self.warm_start:
            self._keep(key, _Sides(rows, None) if left else _Sides(None, rows))

    def keep_unless(self, bad: Tensor, factors: Mapping[str, tuple[Tensor, bool]]) -> None:
        """Do :meth:`keep` after a step of which the device alone knows whether it was good.

        The host asks before it next needs a factor, which is in the next step. By then the device has usually finished
        this step. It has other work to do if the host waits for it, so no time is lost on the device.

        Args:
            bad: one int32 on the device: not zero if the step was not good. These factors are then forgotten.
            factors: key → (factor, whether it is the left one).
        """
        former = {key: _Sides(self._left.get(key), self._factors.get(key)) for key in factors}
        self._undecided.append(_Undecided(Late(bad), former))
        for key, (rows, left) in factors.items():
            self._keep(key, _Sides(rows, None) if left else _Sides(None, rows))

    def _settle(self) -> None:
        """Learn whether steps were good, as far as the host does not know, and forget the factors of those that were
        not.
        """
        undecided, self._undecided = self._undecided, []
        for bad, former in undecided:
            if any(bad.values()):
                for key, sides in former.items():
                    self._keep(key, sides)

    def _keep(self, key: str, sides: _Sides) -> None:
        for kept, rows in ((self._left, sides.left), (self._factors, sides.right)):
            if rows is None:
                kept.pop(key, None)
            else:
                kept[key] = rows

    # ---- state -------------------------------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        for key in self._places:
            cast("Tensor", self.residual(key)).mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        self._settle()
        residual = {f"residual/{key}": cast("Tensor", self.residual(key)) for key in self._places}
        factors = {"factor": self._factors, "left": self._left}
        return residual | {f"{room}/{key}": rows for room, some in factors.items() for key, rows in some.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        self._sent.clear()
        for block, at in self._places.values():
            block[at].zero_()
        self._factors, self._left, self._undecided = {}, {}, []
        for name, value in state.items():
            room, _, key = name.partition("/")
            values = value.detach().to(torch.float32)
            if room != "residual":
                kept = self._left if room == "left" else self._factors
                kept[key] = values.clone(memory_format=torch.contiguous_format)
            elif key in self._places:
                place, at = self._places[key]
                place[at].view(-1).copy_(values.reshape(-1))
            else:
                self._places[key] = (values.reshape(1, -1).clone(), 0)

    @staticmethod
    def moved(state: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
        """Keep residuals only: factors have to be equal on all ranks, and other ranks have other factors."""
        del size
        return {name: value for name, value in state.items() if name.startswith("residual/")}

    def check_state(self, state: Mapping[str, object]) -> None:
        for name, value in state.items():
            room, slash, key = name.partition("/")
            if not slash or room not in ("residual", "factor", *(["left"] if self.halves else [])):
                raise ValueError(f"powersgd: the state has the unknown entry {name!r}; it was saved with another spec")
            if room == "residual" and not self.ef:
                raise ValueError(
                    "powersgd: the state holds residuals, which ef=false would never send; use ef=true, or load a "
                    "state that was saved with ef=false"
                )
            if room == "left" and f"factor/{key}" in state:
                raise ValueError(f"powersgd: the state holds two factors of {key!r}, left and right; expected one")
            check_saved(self.name, name, value)

    def fits(self, name: str, value: Tensor, layers: Mapping[str, Shape], others: Mapping[str, Shape]) -> bool:
        room, _, key = name.partition("/")
        if room == "residual":
            return super().fits(key, value, layers, others)
        n, m, _ = factors(layers.get(key, 0), 1)
        return value.dim() == 2 and value.shape[1] == (n if room == "left" else m) and 0 < value.shape[0] <= min(n, m)

    @property
    def nbytes(self) -> int:
        rooms = {id(room): room.nbytes for room, _ in self._places.values()}
        sent = sum(p.nbytes + q.nbytes for p, q in self._sent.values())
        factors = sum(rows.nbytes for some in (self._factors, self._left) for rows in some.values())
        return sum(rooms.values()) + factors + sent

    def __str__(self) -> str:
        return format_term(self)
