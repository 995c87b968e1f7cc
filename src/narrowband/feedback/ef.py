"""Error feedback: add what a codec lost of one gradient to the next gradient.

Sources: Seide et al. 2014; Karimireddy et al., arXiv 1901.09847, algorithm 1.

With gradient g, codec C and residual e::

    p = e + g          # encode
    send C(p)
    e = p − C(p)       # commit

so that the sum of everything sent plus the residual is the sum of all gradients. Nothing is lost; it only arrives late.

Where a rank owns a chunk, averages it for all ranks and encodes the mean m again, it also keeps the error of that
encoding, as 1-bit Adam's server does (Tang et al., arXiv 2102.02888, algorithm 1). With its owner error s of that
chunk::

    q = s + m
    send C(q)
    s = q − C(q)

Over N ranks, what was delivered plus the mean of all residuals plus the owners' errors is the sum of all means. An
owner error s has the same effect as an addition of N · s to one rank's residual, so one can replace the other.

With ``decay=β`` the residual shrinks in every step: p = β·e + g, and q = β·s + m. What has waited for t steps counts
β^t, so the sum above is no longer exact. SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706) does this with β = 0.95, for
updates instead of gradients. There is no γ as in p = β·e + γ·g: where C(γ·x) = γ·C(x), all of e, p and C(p) are γ times
as large, so γ would only change the learning rate.

With ``store=bf16`` or ``int8`` the residual takes 2 bytes or about 1 per element between steps. It is rounded
stochastically, so that the sum holds in expectation: E[e] = p − C(p). Behind top-k with float32 values, one pass over
gradient and residual does everything (:func:`narrowband.kernels.compensate_kept`). Otherwise the residual is read into
float32 while its tensor is encoded. On a GPU, a few launches do so with several tensors: one reads their residuals, and
one stores what is left.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs import SelectingCodec, TopK
from narrowband.codecs.base import dims, numel_of, squared_norm_late
from narrowband.codecs.spec import check_keys
from narrowband.feedback.base import Feedback, Norms
from narrowband.feedback.kept import Kept, Store, keep_all, read_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from narrowband.codecs import Codec, Shape
    from narrowband.feedback.arrivals import Arrivals
    from narrowband.feedback.base import Encoded, Layout

__all__ = ["ErrorFeedback"]


#: XORed with the seed, so that rounding the residual draws other random numbers than encoding.
_OF_STORES = 0x6C078965

#: The name of an owner error in a state: its chunk's start, the number of ranks and, last, the tensor's key.
_OWNER = re.compile(r"owner/(?P<start>\d+)/(?P<ranks>\d+)/(?P<key>.+)")


def _what_fits(residual: Tensor, x: Tensor, decay: float) -> Tensor:
    """Return a clamped copy of a residual, such that ``decay · residual + x`` does not overflow the dtype of x.

    Where x is not finite, neither is the sum.
    """
    most, own = torch.finfo(x.dtype).max, x.float()
    return residual.clamp((-most - own).div_(decay), (most - own).div_(decay))


@functools.cache
def _has(kind: type[ErrorFeedback], *calls: str) -> bool:
    """Return whether a class does these as ``ef`` does, so that kernels may do and undo a step on the device."""
    return all(getattr(kind, name) is getattr(ErrorFeedback, name) for name in calls)


class _OwnerError(NamedTuple):
    """The error of a mean that this rank encoded, of a chunk from element ``start`` on, among ``ranks`` ranks."""

    start: int
    ranks: int
    error: Tensor

    @property
    def cut(self) -> slice:
        return slice(self.start, self.start + self.error.numel())

    def name(self, key: str) -> str:
        """Return the name of this error in a state."""
        return f"owner/{self.start}/{self.ranks}/{key}"


@dataclass(unsafe_hash=True)  # equal configurations hash alike; the residuals are not part of it
class ErrorFeedback(Feedback):
    """What a codec leaves out is added to the next gradient; costs one float32 per element, or less.

    With float16 gradients, only as much of the residual is added as keeps the sum in the range of float16. The rest
    waits.

    For a float32 gradient, :meth:`encode` swaps memory: the residual's memory then holds p, and the gradient's memory
    holds e, which makes :meth:`roll_back` exact without a copy. A half-precision gradient cannot hold e, so p is
    computed in a scratch tensor. Nothing changes before :meth:`commit`, and :meth:`roll_back` has nothing to do.

    Args:
        decay: the factor on the residual in each step that it waits, above 0 and up to 1.
        store: how the residual is stored between steps: ``fp32``, ``bf16``, ``int8``; or ``cpu``: in float32, in CPU
            memory, for models on GPUs.

    Example:
        >>> handle = nb.compress_gradients(model, "topk:density=0.01+ef:store=int8")  # one byte per element
    """

    name: ClassVar[str] = "ef"
    keeps_owner_errors: ClassVar[bool] = True
    commits_arrivals: ClassVar[bool] = True
    puts_back: ClassVar[bool] = True
    #: Whether the residual by itself chooses a part of what is sent. Then it must be kept apart from the tensor: an
    #: update that already contains the residual leaves nothing to choose by.
    chooses_by_residual: ClassVar[bool] = False

    decay: float = 1.0
    store: Store = "fp32"

    _kept: dict[str, Kept] = field(default_factory=dict, init=False, repr=False, compare=False)
    _seeds: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Key → residual in float32 of a tensor whose step is not decided yet, where it is not stored so.
    _undecided: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Tensors that were encoded and committed in one pass → whether their stored residual has changed.
    _in_one_pass: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    _owner_errors: dict[str, _OwnerError] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_keys(self)
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(
                f"{self.name}: decay={self.decay} is not in (0, 1]; 1 keeps the whole residual, and a codec without "
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
        self._open(key, x, seed)
        if commit:
            self._check_commit(x)
        if commit and self._keeps_in_one_pass(codec, shape):
            assert isinstance(codec, SelectingCodec)
            return self._encode_kept(key, x, codec, shape=shape, seed=seed, out=out)
        residual = self._kept[key].read()
        if x.dtype != torch.float32:
            if x.dtype == torch.float16:
                residual = _what_fits(residual, x, self.decay)
            if codec.exact:  # 16-bit elements are sent in 16 bits
                total = (residual * self.decay + x).to(x.dtype)
                return kernels.all_finite(total.float()), codec.encode(total.view(dims(shape)), seed=seed, out=out)
            x, residual = x.float(), residual.clone()
            return self._encode(x, residual, codec, shape=shape, seed=seed, out=out, subtract=commit)
        finite, payload = self._encode(x, residual, codec, shape=shape, seed=seed, out=out, subtract=commit)
        if not commit:
            self._leave_open([key], [residual])
        else:
            self._save(key, x)
            if finite:
                self._close(key, residual)
        return finite, payload

    def _leave_open(self, keys: Sequence[str], residuals: Sequence[Tensor]) -> None:
        """Hold residuals until their step is decided."""
        if self.store != "fp32":  # where the stored ones have changed in place
            self._undecided.update(zip(keys, residuals, strict=True))

    def _save(self, key: str, x: Tensor) -> None:
        """Before a residual is stored: let the gradient's memory, which holds the former one, hold its stored bytes."""
        if self._kept[key].rounded:
            self._kept[key].copy_to(self._memory(key, x))

    def _memory(self, key: str, x: Tensor) -> Tensor:
        """Return the part of a gradient's memory that holds what was stored before."""
        kept = self._kept[key]
        return x.view(torch.uint8)[: kept.nbytes] if kept.rounded else x

    def _open(self, key: str, x: Tensor, seed: int) -> None:
        """Make sure that a tensor that is about to be encoded has a residual, of zeros at first.

        Raises:
            ValueError: its residual has another size.
        """
        if not self.holds(key):
            self.add_residual(key, torch.zeros(x.numel(), dtype=torch.float32, device=x.device))
        numel = self._kept[key].numel
        if numel != x.numel():
            raise ValueError(
                f"the residual of {key!r} has {numel} elements, got a tensor of {x.numel()}; use another key, or "
                "load the state of this model"
            )
        self._seeds[key] = seed
        self._in_one_pass.pop(key, None)

    def _keeps_in_one_pass(self, codec: Codec, shape: Shape) -> bool:
        """Return whether one pass can encode and commit: the codec sends the k largest sums, without rounding."""
        selects = self.store in ("bf16", "int8") and isinstance(codec, SelectingCodec)
        return selects and bool(codec.kept_largest(shape))

    def _encode_kept(
        self, key: str, x: Tensor, codec: SelectingCodec, *, shape: Shape, seed: int, out: Tensor | None
    ) -> tuple[bool, Tensor]:
        """Encode and commit in one pass. If it was finite, the gradient's memory then holds the former residual."""
        finite, at, values = self._kept[key].compensate(
            x, codec.kept(shape), decay=self.decay, sampled=codec.sampled, seed=seed, rounding=_OF_STORES ^ seed
        )
        self._in_one_pass[key] = finite
        if not finite:
            nbytes = codec.payload_nbytes(shape)
            return False, out if out is not None else torch.zeros(nbytes, dtype=torch.uint8, device=x.device)
        return True, codec.pack(at, values, shape=shape, out=out)

    def _close(self, key: str, residual: Tensor) -> None:
        """Store a new residual."""
        self._undecided.pop(key, None)
        self._kept[key].keep(residual, seed=_OF_STORES ^ self._seeds[key])

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
        """Compute ``(x, residual) ← (residual, decay · residual + x)`` and encode that sum.

        See :meth:`~narrowband.codecs.Codec.encode_compensated`.
        """
        return codec.encode_compensated(
            x, residual, shape=shape, seed=seed, out=out, decay=self.decay, subtract=subtract
        )

    def commit(
        self, key: str, x: Tensor, codec: Codec, payload: Tensor, *, shape: Shape, seed: int, measure: bool = False
    ) -> Norms | None:
        residual = self._opened(key)
        if x.dtype != torch.float32:
            residual.mul_(self.decay).add_(x)
        before = squared_norm_late(residual) if measure else 0.0
        if x.dtype != torch.float32 and codec.exact:
            residual.sub_(codec.decode(payload, torch.empty_like(x), seed=seed))
        else:
            codec.decode(payload, residual.view(dims(shape)), seed=seed, weight=-1.0, accumulate=True)
        norms = Norms(before, squared_norm_late(residual)) if measure else None
        if x.dtype == torch.float32:
            self._save(key, x)
        if x.dtype == torch.float32 and self._keeps_in_one_pass(codec, shape):
            assert isinstance(codec, SelectingCodec)
            self._undecided.pop(key, None)
            at, values = codec.elements(payload, shape)
            if codec.sampled:  # padding of a payload was not sent
                sent = (at < x.numel() - 1) | (values != 0)
                at, values = at[sent], values[sent]
            self._kept[key].keep_rest(residual, at, values, seed=_OF_STORES ^ seed)
        else:
            self._close(key, residual)
        return norms

    def _opened(self, key: str) -> Tensor:
        """Return the residual as :meth:`encode` left it."""
        residual = self._undecided.get(key)
        return self._kept[key].read() if residual is None else residual

    def commit_arrived(
        self,
        keys: Sequence[str],
        xs: Sequence[Tensor],
        arrivals: Arrivals,
        *,
        bad: Tensor | None = None,
        measure: bool = False,
    ) -> list[Norms]:
        wide = xs[0].dtype == torch.float32
        formers = [] if bad is None or wide else [pair for key in keys for pair in self._copied(key)]
        residuals = [self._opened(key) for key in keys]
        if not wide:
            torch._foreach_mul_(residuals, self.decay)
            torch._foreach_add_(residuals, list(xs))
        before = [squared_norm_late(residual) for residual in residuals] if measure else []
        arrivals.subtract_from(residuals)
        if bad is not None and wide:
            seeds = [_OF_STORES ^ self._seeds[key] for key in keys]
            keep_all([self._kept[key] for key in keys], residuals, seeds=seeds, formers=map(self._memory, keys, xs))
            for key in keys:
                self._undecided.pop(key, None)
        else:
            for key, residual in zip(keys, residuals, strict=True):
                self._close(key, residual)
        if bad is not None and wide:
            self.roll_back_if(bad, keys, xs)
        elif bad is not None:
            kernels.restore_all_if(bad, [own for own, _ in formers], [former for _, former in formers])
        after = [squared_norm_late(residual) for residual in residuals] if measure else []
        return [Norms(*pair) for pair in zip(before, after, strict=True)]

    def can_roll_back(self, x: Tensor) -> bool:
        return x.dtype == torch.float32

    def roll_back(self, key: str, x: Tensor) -> None:
        changed = self._in_one_pass.pop(key, None)
        if changed is not None:
            if changed:
                self._kept[key].take_former(x)
        # If the new residual is only held open, the former one is still stored. Otherwise x holds it.
        elif self._undecided.pop(key, None) is None and x.dtype == torch.float32:
            self._kept[key].copy_from(self._memory(key, x))

    @property
    def goes_ahead(self) -> bool:
        return self.store != "cpu" and self.answers_late

    @property
    def answers_late(self) -> bool:
        return _has(type(self), "encode", "commit", "can_roll_back", "roll_back", "roll_back_if")

    def roll_back_if(self, bad: Tensor, keys: Sequence[str], xs: Sequence[Tensor]) -> None:
        ways = [(self._in_one_pass.pop(key, None), key, x) for key, x in zip(keys, xs, strict=True)]
        changed = [(self._kept[key], x) for in_one_pass, key, x in ways if in_one_pass]
        codes, exponents = [kept.stored[0] for kept, _ in changed], [kept.stored[1] for kept, _ in changed]
        kernels.take_former_all_if(bad, [x for _, x in changed], codes, exponents)
        others = [(self._kept[key], self._memory(key, x)) for in_one_pass, key, x in ways if in_one_pass is None]
        pairs = [pair for kept, memory in others for pair in kept.places(memory)]
        kernels.restore_all_if(bad, [own for own, _ in pairs], [former for _, former in pairs])

    @property
    def goes_ahead_in_16(self) -> bool:
        return self.goes_ahead

    def commit_unless(self, bad: Tensor, sent: Sequence[Encoded], *, measure: bool = False) -> list[Norms]:
        found = []
        for each in sent:
            pairs = self._copied(each.key)
            shape, seed = each.shape, each.seed
            norms = self.commit(each.key, each.x, each.codec, each.payload, shape=shape, seed=seed, measure=measure)
            found += [] if norms is None else [norms]
            kernels.restore_all_if(bad, [own for own, _ in pairs], [former for _, former in pairs])
        return found

    def _copied(self, key: str) -> list[tuple[Tensor, Tensor]]:
        """Return a residual as it is stored, in two parts at most, each with a copy."""
        return [(part, part.clone()) for part in self._kept[key].stored if part is not None]

    def encodes_all(self, codec: Codec) -> bool:
        several = codec.encodes_several and _has(type(self), "_encode", "encode_all") and self.goes_ahead
        # What is kept in one pass is kept otherwise than what is encoded first.
        return several and (isinstance(codec, TopK) or not self._keeps_in_one_pass(codec, 1))

    def encode_all(
        self, keys: Sequence[str], xs: Sequence[Tensor], codec: Codec, *, seeds: Sequence[int], outs: Sequence[Tensor]
    ) -> bool:
        for key, x, seed in zip(keys, xs, seeds, strict=True):
            self._open(key, x, seed)
        kepts, least = [self._kept[key] for key in keys], None
        residuals = read_all(kepts)
        if self.store == "int8" and self._keeps_in_one_pass(codec, 1):
            assert isinstance(codec, TopK)
            least = torch.empty(len(keys), dtype=torch.float32, device=xs[0].device)
            ks = [codec.kept(x.numel()) for x in xs]
            finite = kernels.encode_topk_all(xs, ks, outs, residuals=residuals, decay=self.decay, least=least)
        else:
            finite = self._encode_each(xs, residuals, codec, seeds=seeds, outs=outs)
        formers = map(self._memory, keys, xs)
        keep_all(kepts, residuals, seeds=[_OF_STORES ^ seed for seed in seeds], formers=formers, least=least)
        return finite

    def _encode_each(
        self,
        xs: Sequence[Tensor],
        residuals: Sequence[Tensor],
        codec: Codec,
        *,
        seeds: Sequence[int],
        outs: Sequence[Tensor],
    ) -> bool:
        """Do :meth:`_encode` with ``subtract`` for several tensors; return whether all are finite."""
        return codec.encode_all(xs, outs, seeds=seeds, residuals=residuals, decay=self.decay)

    @property
    def commits_arrivals_ahead(self) -> bool:
        return self.goes_ahead and _has(type(self), "_encode", "commit_arrived", "encode_for_arrivals")

    def encode_for_arrivals(
        self, keys: Sequence[str], xs: Sequence[Tensor], codec: Codec, *, seeds: Sequence[int], outs: Sequence[Tensor]
    ) -> bool:
        assert isinstance(codec, TopK)
        for key, x, seed in zip(keys, xs, seeds, strict=True):
            self._open(key, x, seed)
        residuals, ks = read_all([self._kept[key] for key in keys]), [codec.kept(x.numel()) for x in xs]
        self._leave_open(keys, residuals)
        return kernels.encode_topk_all(xs, ks, outs, residuals=residuals, decay=self.decay, subtract=False)

    def residual(self, key: str) -> Tensor | None:
        kept = self._kept.get(key)
        return None if kept is None else kept.read()

    def holds(self, key: str) -> bool:
        return key in self._kept

    @property
    def nbytes(self) -> int:
        tensors = [*self._undecided.values(), *(own.error for own in self._owner_errors.values())]
        return sum(x.nbytes for x in tensors) + sum(kept.nbytes for kept in self._kept.values())

    def owner_error(self, key: str, cut: slice) -> Tensor | None:
        own = self._owner_errors.get(key)
        return None if own is None or own.cut != cut else own.error

    @property
    def owner_decay(self) -> float:
        return self.decay

    def set_owner_error(self, key: str, cut: slice, error: Tensor, *, numel: int, ranks: int) -> None:
        if self.owner_error(key, cut) is None:
            self.reclaim_owner_error(key)
        if not self.holds(key):  # an owner's error always has a residual to go into
            self.add_residual(key, torch.zeros(numel, dtype=torch.float32, device=error.device))
        self._owner_errors[key] = _OwnerError(cut.start, ranks, error)

    def reclaim_owner_error(self, key: str) -> None:
        own = self._owner_errors.pop(key, None)
        if own is not None:
            residual = self._opened(key)
            residual[own.cut].add_(own.error, alpha=own.ranks)
            self._undecided.pop(key, None)
            # To nearest: this is before a step draws its seed, and a run that resumes does not know the last one.
            self._kept[key].keep(residual, seed=None)

    def take_residual(self, key: str) -> Tensor | None:
        self.reclaim_owner_error(key)
        kept = self._kept.pop(key, None)
        return None if kept is None else kept.read()

    def add_residual(self, key: str, residual: Tensor) -> None:
        self._kept[key] = Kept(residual, self.store)

    def entries(self, key: str) -> dict[str, Tensor]:
        residual, own = self.residual(key), self._owner_errors.get(key)
        return ({} if residual is None else {key: residual}) | ({} if own is None else {own.name(key): own.error})

    def put_back(self, key: str, entries: Mapping[str, Tensor]) -> None:
        for held in (self._undecided, self._kept, self._owner_errors):
            held.pop(key, None)
        self._add(entries)

    def scale(self, factor: float) -> None:
        for residual in self._undecided.values():
            residual.mul_(factor)
        for kept in self._kept.values():
            kept.keep(kept.read().mul_(factor), seed=None)
        for own in self._owner_errors.values():
            own.error.mul_(factor)

    def note(self, layers: Sequence[Layout], *, whole: bool) -> str | None:
        """Warn of codecs with which the residual may grow: their squared error, times decay², exceeds their input's."""
        for codec in dict.fromkeys(layer.codec for layer in layers):
            if codec.lost_share * self.decay**2 >= 1:
                return (
                    f"{codec}+{self.name}: the residual may grow from step to step, because the squared error of "
                    f"{codec} is {codec.lost_share:.3g} times the squared norm of normally distributed values: watch "
                    "the residual's norm, or use more bits, smaller groups or another codec"
                )
        return None

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        errors = {own.name(key): own.error for key, own in self._owner_errors.items()}
        return {key: kept.read() for key, kept in self._kept.items()} | errors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._undecided, self._owner_errors, self._kept = {}, {}, {}
        flat = torch.contiguous_format
        self._add(
            {
                name: value.detach().reshape(-1).to(torch.float32, copy=True, memory_format=flat)
                for name, value in state.items()
            }
        )

    def _add(self, entries: Mapping[str, Tensor]) -> None:
        """Add entries of a state, whose memory becomes this state's."""
        for name, value in entries.items():
            place = _OWNER.fullmatch(name)
            if place is None:
                self.add_residual(name, value)
            else:
                self._owner_errors[place["key"]] = _OwnerError(int(place["start"]), int(place["ranks"]), value)

    def check_state(self, state: Mapping[str, object]) -> None:
        super().check_state(state)
        for name in state:
            place = _OWNER.fullmatch(name)
            if place is not None and place["key"] not in state:
                raise ValueError(
                    f"{self.name}: the state holds {name!r} but no residual of {place['key']!r}; load all of the state"
                )

    def fits(self, name: str, value: Tensor, layers: Mapping[str, Shape], others: Mapping[str, Shape]) -> bool:
        place = _OWNER.fullmatch(name)
        if place is None:
            return super().fits(name, value, layers, others)
        return int(place["start"]) + value.numel() <= numel_of(layers.get(place["key"], 0))

    @staticmethod
    def moved(state: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
        """Move owner errors, times the number of ranks, into this rank's own residual."""
        own = {name: value for name, value in state.items() if _OWNER.fullmatch(name) is None}
        for name, error in state.items():
            place = _OWNER.fullmatch(name)
            if place is not None and place["key"] in own:
                start = int(place["start"])
                own[place["key"]] = own[place["key"]].clone()
                own[place["key"]][start : start + error.numel()].add_(error, alpha=size)
        return own

    @staticmethod
    def merged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the mean of all residuals, plus every owner error at its chunk.

        An owner error counts N times as much as one rank's residual.
        """
        total: dict[str, Tensor] = {}
        errors: list[tuple[re.Match[str], Tensor]] = []
        for state in states:
            for name, value in state.items():
                place = _OWNER.fullmatch(name)
                if place is not None:
                    errors.append((place, value))
                else:
                    total[name] = total[name] + value if name in total else value.clone()
        merged = {name: value / len(states) for name, value in total.items()}
        for place, error in errors:
            start = int(place["start"])
            merged[place["key"]][start : start + error.numel()] += error
        return merged
