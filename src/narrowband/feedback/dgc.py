"""Deep Gradient Compression: 99.9 % of a gradient waits, and momentum does not suffer from it (Lin et al., arXiv
1712.01887).

Momentum that an optimizer applies to sparse averages would forget, for elements that waited T steps, how their
gradients ought to have been discounted in the meantime. So momentum comes before the wire (equation 7): with gradient
g, momentum m, velocity u and accumulated velocity v, each rank ::

    u = m·u + g          # momentum correction
    v = v + u
    send the largest of v; where v was sent: v = 0, and u = 0    # momentum factor masking

and the optimizer is plain SGD. Nesterov's variant (appendix B) has u = m·(u + g), v = v + u + g.

With ``accumulate=steps``, beyond the paper, u = m·u + η·g with the learning rate η of the step, and v/η is sent. The
residual is then a step of the parameters, which the optimizer's η·(v/η) takes in full. Otherwise what waits is taken
at the rate of the step in which it is sent, and where the rate falls, most of it is lost; error feedback is proven
for steps (Karimireddy et al. 2019, arXiv 1901.09847, algorithm 1).

Both states are kept as two successive sums of velocities, y and the y of the step before: u is their difference. A step
then reads three arrays and writes two, and can be undone to the bit with no copy (:func:`narrowband.kernels.
momentum_topk`). v is y; in Nesterov's variant v telescopes to y + m·(velocity of the plain kind), which these two hold
as well.

With ``store=bf16`` or ``int8`` the sum y and the velocity u are kept in 2 bytes or about 1 each between steps, rounded
stochastically, so that sums are kept on average. They are read into float32 while their tensor is encoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs import SelectingCodec, TopK, format_term
from narrowband.codecs.base import dims, squared_norm
from narrowband.codecs.spec import check_keys
from narrowband.feedback.base import Feedback, Norms, check_saved
from narrowband.feedback.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from narrowband.codecs import Codec, Shape

__all__ = ["DGC"]

#: Warm-up begins by sending a quarter, and every later stretch sends a quarter of the one before (section 3.3).
WARM_UP = 0.25

#: What a state holds: sums, where these are kept in fewer bits the sum and the velocity, and what is not compressed.
_ROOMS = ("now", "before", "velocity", "uncompressed")

#: Change a seed, so that rounding what is kept does not draw what encoding has drawn, nor twice the same.
_OF_SUMS, _OF_VELOCITIES = 0x6C078965, 0x5D588B65

_FP16_MAX = torch.finfo(torch.float16).max

#: What the velocity of a parameter that travels uncompressed may be kept in: the dtype of its gradient.
_UNCOMPRESSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(eq=False)
class _Sent:
    """What a step in progress did to one tensor."""

    undo: Callable[[], None] | None  # None: the gradient's memory holds what was kept
    commit: Callable[[Tensor | None], None] | None  # of what has arrived, or all (None); done already where it is None
    at: Tensor | None = None  # what was sent; None: everything
    rate: float = 1.0  # the residual is so many times what is sent
    overlap: float = 0.0  # what was sent times what rounding left of it


@dataclass(unsafe_hash=True)
class DGC(Feedback):
    """Deep Gradient Compression: momentum correction and masking before the wire, for SGD without momentum of its own.

    Costs two float32 per element, or less (``store``), one of which the optimizer no longer needs for its momentum.

    Args:
        density: the share of elements that is sent, after warm-up.
        momentum: of the velocity, as SGD's; the optimizer's own must be 0 (see :class:`narrowband.DGCSGD`).
        nesterov: Nesterov's variant.
        clip: threshold for the norm of the whole model's averaged gradient. Each of N ranks clips what it adds to the
            average, its gradient / N, at clip/√N before it enters the velocity (section 3.2, where gradients have the
            1/N in them): its own gradient at clip·√N. Encoding then waits for the whole gradient.
        warmup_steps: steps over which the density falls: 25 %, 6.25 %, 1.56 % …, as long as that is above ``density``,
            for equally many steps each.
        warmup_epochs: the same, counted in epochs: call the handle's ``set_epoch`` before each.
        masking: whether the velocity is set to zero where elements are sent.
        accumulate: ``gradients``, as in the paper; or ``steps``: gradients times the learning rate at which they were
            computed, so that what has waited is applied at that rate. Needs ``optimizer=`` at set-up, to know the rate:
            that which the optimizer has when backward begins.
        select: ``exact``; or ``sampled``, as in the paper (section 3): by a threshold from a sample, after which the
            largest of what reaches it are chosen where that is too much. It may send a few elements less; a payload has
            the same size, which is known beforehand.
        values: what they are sent in: see :class:`~narrowband.codecs.TopK`. What rounding leaves of a value stays in
            the residual.
        indices: how they are written: see :class:`~narrowband.codecs.TopK`.
        store: what the sums of a layer are kept in between steps: ``fp32``, ``bf16`` or ``int8``.

    Example:
        >>> handle = nb.compress_gradients(model, "dgc:density=0.01,warmup_steps=100")
    """

    name: ClassVar[str] = "dgc"
    brings_codec: ClassVar[bool] = True
    takes_activations: ClassVar[bool] = False
    mixes: ClassVar[bool] = False  # the momentum of a model is in one place
    observes_uncompressed: ClassVar[bool] = True
    commits_arrivals: ClassVar[bool] = True

    density: float = field(default=0.001, metadata={"always": True})
    momentum: float = 0.9
    nesterov: bool = False
    clip: float = math.inf
    warmup_steps: int = 0
    warmup_epochs: int = 0
    masking: bool = True
    accumulate: Literal["gradients", "steps"] = "gradients"
    select: Literal["exact", "sampled"] = "exact"
    values: Literal["fp32", "fp16", "int8"] = "fp32"
    indices: Literal["elias-fano", "runs"] = "elias-fano"
    store: Literal["fp32", "bf16", "int8"] = "fp32"

    _now: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _before: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Where they are kept in fewer bits, instead of these two: the newest sum, and the velocity.
    _kept: dict[str, tuple[Kept, Kept]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _seeds: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _uncompressed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sent: dict[str, _Sent] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Magnitudes that a few more elements than wanted reached in the step before. They save time, and change nothing.
    _hints: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    #: Learning rates of this step, by key, where steps are accumulated; and the last that were above zero.
    rates: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _positive: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_keys(self)
        TopK(density=self.density)  # says what a density may be
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"dgc: momentum={self.momentum} is not in [0, 1)")
        if self.nesterov and not self.momentum:
            raise ValueError("dgc: nesterov=true needs a momentum above 0")
        if not self.clip > 0:
            raise ValueError(f"dgc: clip={self.clip} must be above 0; leave it out for no clipping")
        if self.warmup_steps < 0 or self.warmup_epochs < 0:
            raise ValueError(
                f"dgc: warmup_steps={self.warmup_steps} and warmup_epochs={self.warmup_epochs} must not be negative"
            )
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError("dgc: a warm-up lasts warmup_steps or warmup_epochs; give one of them")
        if (self.warmup_steps or self.warmup_epochs) and self.density >= WARM_UP:
            raise ValueError(
                f"dgc: density={self.density} is no less than the {WARM_UP:.0%} that warm-up begins with, so the "
                "density would grow; leave the warm-up out"
            )
        if self.values == "int8" and self.indices == "runs":
            raise ValueError(
                "dgc: values=int8 rounds 256 values together, and indices=runs puts zeros in between; leave out indices"
            )

    # ---- the schedule ------------------------------------------------------------------------------------------------

    @property
    def codec(self) -> TopK:
        """What v is sent with after warm-up."""
        return TopK(density=self.density, select=self.select, values=self.values, indices=self.indices)

    def codec_at(self, step: int, epoch: int | None = None) -> TopK:
        """What v is sent with in this step (from 0), and this epoch where that is what warm-up counts.

        Raises:
            ValueError: warm-up counts epochs, and there is none.

        Example:
            >>> DGC(density=0.001, warmup_steps=400).codec_at(100, None).density
            0.0625
        """
        if self.warmup_epochs and epoch is None:
            raise ValueError(
                f"{self.name}: warmup_epochs={self.warmup_epochs} counts epochs: call handle.set_epoch(epoch) at the "
                "beginning of each, from 0 on"
            )
        position, length = (epoch, self.warmup_epochs) if self.warmup_epochs else (step, self.warmup_steps)
        if position is None or position >= length:
            return self.codec
        stretches = math.ceil(math.log(self.density) / math.log(WARM_UP) - 1e-9) - 1
        return replace(self.codec, density=WARM_UP ** (1 + stretches * position // length))

    def codec_of_layer(self, override: Codec, default: Codec) -> Codec:
        """The layer's own codec; while the others warm up, with at least their density."""
        if default == self.codec:
            return override
        assert isinstance(override, TopK)
        assert isinstance(default, TopK)
        return replace(override, density=max(override.density, default.density))

    @property
    def needs_learning_rates(self) -> bool:
        return self.accumulate == "steps"

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        self.rates = dict(rates)

    # ---- a step ------------------------------------------------------------------------------------------------------

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
        if commit and not self.can_roll_back(x):
            raise ValueError(f"a step of {x.dtype} can be committed only when it is decided")
        self._seeds[key] = seed
        if not self.holds(key):
            self._close(key, *(torch.zeros(x.numel(), dtype=torch.float32, device=x.device) for _ in range(2)))
        now, before = self._opened(key)
        if now.numel() != x.numel():
            raise ValueError(
                f"the state of {key!r} has {now.numel()} elements, so {x.numel()} cannot be encoded there; "
                "use another key, or load the state of this model"
            )
        if codec.exact:
            finite, payload = self._encode_velocity(key, x, now, before, codec, shape, seed, out)
        elif isinstance(codec, SelectingCodec):
            finite, payload = self._encode_top(key, x, now, before, codec, shape, seed, out)
        else:
            raise TypeError(f"dgc sends what is largest, or everything, and not by {codec}")
        if commit and finite:
            self._commit(key, x)
        return finite, payload

    def _opened(self, key: str) -> tuple[Tensor, Tensor]:
        """The newest sum, and the one of the step before; in memory of their own where they are kept in fewer bits."""
        if self.store == "fp32":
            return self._now[key], self._before[key]
        now, velocity = (kept.read() for kept in self._kept[key])
        return now, now - velocity

    def _close(self, key: str, now: Tensor, before: Tensor) -> None:
        """Let these be the sums."""
        if self.store == "fp32":
            self._now[key], self._before[key] = now, before
            return
        seed, states = self._seeds.get(key, 0), (now, now - before)
        if key not in self._kept:
            self._kept[key] = (Kept(now, self.store), Kept(states[1], self.store))
        for kept, state, mark in zip(self._kept[key], states, (_OF_SUMS, _OF_VELOCITIES), strict=True):
            kept.keep(state, seed=mark ^ seed)

    def _encode_top(
        self,
        key: str,
        x: Tensor,
        now: Tensor,
        before: Tensor,
        codec: SelectingCodec,
        shape: Shape,
        seed: int,
        out: Tensor | None,
    ) -> tuple[bool, Tensor]:
        in_place = x.dtype == torch.float32
        # A half-precision gradient cannot hold the oldest sum: there a copy takes part, and its memory is the state's
        # if the step is good.
        gradient, newest = (x, before) if in_place else (x.float(), before.clone())
        rate, unit = self._rate(key)
        finite, at, values, hint = kernels.momentum_topk(
            gradient,
            now,
            newest,
            codec.kept(shape),
            momentum=self.momentum,
            nesterov=self.nesterov,
            scale=rate,
            threshold=self._hints.get(key, 0.0),
            sampled=codec.sampled,
            seed=seed,
        )
        whole = sent = values if unit == 1.0 else values / unit
        if x.dtype == torch.float16:  # averages are, too
            sent = whole.clamp(-_FP16_MAX, _FP16_MAX)
        arrives = codec.rounded(sent) if finite else sent
        if arrives is not values:  # dividing and rounding may leave float32
            finite = finite and kernels.all_finite(whole) and kernels.all_finite(arrives)
        left = None if arrives is whole else values - arrives * unit
        forgotten: list[Tensor] = []

        def commit(arrived: Tensor | None) -> None:
            there = at if arrived is None else arrived
            old = kernels.forget(
                now, newest, there, momentum=self.momentum, nesterov=self.nesterov, masking=self.masking
            )
            forgotten.append(old)
            if left is not None:
                late = left if arrived is None else torch.where(torch.isin(at, arrived), left, 0.0)
                newest.index_add_(0, at, late)
                now.index_add_(0, at, late)
            self._close(key, newest, now)
            self._hints[key] = hint

        def undo() -> None:
            if forgotten:
                now[at] = forgotten.pop()
            if in_place:
                before.copy_(x)
            self._now[key], self._before[key] = now, before

        overlap = 0.0 if left is None or not finite else float(torch.dot(arrives, left)) / unit
        self._sent[key] = _Sent(undo, commit, at, unit, overlap)
        if not finite:
            nbytes = codec.payload_nbytes(shape, torch.float32)
            return False, out if out is not None else torch.zeros(nbytes, dtype=torch.uint8, device=x.device)
        return True, codec.pack(at, sent, shape=shape, out=out)

    def _rate(self, key: str) -> tuple[float, float]:
        """What a gradient is multiplied by on its way in, and what is sent divided by.

        At a rate of zero a gradient counts for nothing, and so does what is sent; the rate before is its unit.
        """
        if self.accumulate == "gradients":
            return 1.0, 1.0
        rate = self.rates[key]
        if rate > 0:
            self._positive[key] = rate
        return rate, self._positive.get(key, 1.0)

    def _encode_velocity(
        self,
        key: str,
        x: Tensor,
        now: Tensor,
        before: Tensor,
        codec: Codec,
        shape: Shape,
        seed: int,
        out: Tensor | None,
    ) -> tuple[bool, Tensor]:
        """A step of momentum SGD: all of the new velocity travels, and the residual stays as it is."""
        rate, unit = self._rate(key)
        gradient = x.float() * rate
        velocity = (now - before).mul_(self.momentum).add_(gradient)
        step = velocity
        newest = now
        if self.nesterov:
            step = gradient + velocity * self.momentum
            newest = now + (now - before - velocity) * self.momentum
        previous = newest - velocity

        def commit(_: Tensor | None) -> None:
            self._close(key, newest, previous)

        def undo() -> None:
            self._now[key], self._before[key] = now, before

        self._sent[key] = _Sent(undo, commit, rate=unit)
        sent = (step / unit).to(x.dtype)
        return kernels.all_finite(sent.float()), codec.encode(sent.view(dims(shape)), seed=seed, out=out)

    def commit(
        self, key: str, x: Tensor, codec: Codec, payload: Tensor, *, shape: Shape, seed: int, measure: bool = False
    ) -> Norms | None:
        at, unit, overlap = self._sent[key].at, self._sent[key].rate, self._sent[key].overlap
        self._commit(key, x)
        if not self.can_roll_back(x):
            del self._sent[key]  # decided: let go of the sums of the step before
        if not measure or at is None:
            return None
        lost = squared_norm(self._residual(key)) / unit**2
        arrived = squared_norm(codec.decode(payload, torch.empty(dims(shape), dtype=torch.float32, device=x.device)))
        return Norms(lost + arrived + 2.0 * overlap, lost)

    def _commit(self, key: str, x: Tensor, arrived: Tensor | None = None) -> None:
        sent = self._sent[key]
        if sent.commit is None:
            return
        if self.store != "fp32" and self.can_roll_back(x):
            # The gradient's memory has room for what is kept: two sums of at most 2 bytes each.
            for kept, memory in zip(self._kept[key], self._memory(key, x), strict=True):
                kept.copy_to(memory)
            sent.undo = None  # and with it the sums in float32
        sent.commit(arrived)
        sent.commit = None

    def _memory(self, key: str, x: Tensor) -> list[Tensor]:
        """Room for the two that are kept, in a gradient's memory."""
        sizes = [kept.nbytes for kept in self._kept[key]]
        return list(torch.split(x.view(-1).view(torch.uint8)[: sum(sizes)], sizes))

    def commit_arrived(self, key: str, x: Tensor, at: Tensor, values: Tensor, *, measure: bool = False) -> Norms | None:
        unit = self._sent[key].rate
        self._commit(key, x, at)
        if not self.can_roll_back(x):
            del self._sent[key]
        if not measure:
            return None
        lost = squared_norm(self._residual(key)) / unit**2
        return Norms(lost + squared_norm(values), lost)

    def _residual(self, key: str) -> Tensor:
        """v."""
        now, before = self._opened(key)
        return now + (now - before) * self.momentum if self.nesterov else now

    def can_roll_back(self, x: Tensor) -> bool:
        return x.dtype == torch.float32

    def roll_back(self, key: str, x: Tensor) -> None:
        sent = self._sent.pop(key)
        if sent.undo is None:
            for kept, memory in zip(self._kept[key], self._memory(key, x), strict=True):
                kept.copy_from(memory)
        elif self.store == "fp32":
            sent.undo()

    def residual(self, key: str) -> Tensor | None:
        if self.store == "fp32":
            return self._now.get(key)
        return self._kept[key][0].read() if key in self._kept else None

    def holds(self, key: str) -> bool:
        return key in (self._now if self.store == "fp32" else self._kept)

    @property
    def nbytes(self) -> int:
        exact = sum(x.nbytes for states in (self._now, self._before, self._uncompressed) for x in states.values())
        return exact + sum(kept.nbytes for pair in self._kept.values() for kept in pair)

    # ---- what travels uncompressed -----------------------------------------------------------------------------------

    def advance_uncompressed(self, averages: Sequence[tuple[str, Tensor]]) -> None:
        """Put the momentum into uncompressed averages, in place: they become the steps of momentum SGD.

        A parameter whose average is exactly zero had no gradient on any rank. Its velocity waits.
        """
        named = [(name, x) for name, x in averages if x.numel()]
        if not self.momentum or not named:
            return
        used = torch.stack([norm.float() for norm in torch._foreach_norm([x for _, x in named], math.inf)]).tolist()
        for (name, x), norm in zip(named, used, strict=True):
            if norm:
                velocity = self._uncompressed.get(name)
                if velocity is None:
                    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
                    velocity = self._uncompressed[name] = torch.zeros(x.numel(), dtype=dtype, device=x.device)
                flat = x.view(-1)
                velocity.mul_(self.momentum).add_(flat)
                if self.nesterov:
                    flat.add_(velocity, alpha=self.momentum)
                else:
                    flat.copy_(velocity)

    # ---- state -------------------------------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        for states in (self._now, self._before, self._uncompressed):
            for state in states.values():
                state.mul_(factor)
        for kept in (kept for pair in self._kept.values() for kept in pair):
            kept.keep(kept.read().mul_(factor), seed=None)
        self._hints = {key: hint * factor for key, hint in self._hints.items()}

    def state_dict(self) -> dict[str, Tensor]:
        rooms = {"now": self._now, "before": self._before, "uncompressed": self._uncompressed}
        if self.store != "fp32":
            read = {key: (now.read(), velocity.read()) for key, (now, velocity) in self._kept.items()}
            rooms["now"] = {key: now for key, (now, _) in read.items()}
            rooms["velocity"] = {key: velocity for key, (_, velocity) in read.items()}
        return {f"{room}/{key}": state for room, states in rooms.items() for key, state in states.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        rooms: dict[str, dict[str, Tensor]] = {room: {} for room in _ROOMS}
        for name, value in state.items():
            room, _, key = name.partition("/")
            dtype = value.dtype if room == "uncompressed" else torch.float32
            rooms[room][key] = value.detach().reshape(-1).to(dtype, copy=True, memory_format=torch.contiguous_format)
        self._now, self._before, self._kept, self._uncompressed = {}, {}, {}, rooms["uncompressed"]
        for key, now in rooms["now"].items():
            velocity = rooms["velocity"].get(key)
            if self.store == "fp32":
                self._now[key] = now
                self._before[key] = rooms["before"][key] if velocity is None else now - velocity
            else:
                velocity = now - rooms["before"][key] if velocity is None else velocity
                self._kept[key] = (Kept(now, self.store), Kept(velocity, self.store))
        self._hints.clear()

    def check_state(self, state: Mapping[str, object]) -> None:
        keys: dict[str, set[str]] = {room: set() for room in _ROOMS}
        for name, value in state.items():
            room, slash, key = name.partition("/")
            if not slash or room not in keys:
                raise ValueError(
                    f"dgc keeps two sums and a velocity, and the state holds {name!r}: it was saved with another spec"
                )
            check_saved(
                self.name, name, value, dtypes=_UNCOMPRESSED_DTYPES if room == "uncompressed" else (torch.float32,)
            )
            keys[room].add(key)
        odd = sorted(keys["now"] ^ (keys["before"] | keys["velocity"]))
        if odd:
            raise ValueError(f"dgc: the state lacks one of the two sums of {', '.join(odd)}")

    def fits(self, name: str, value: Tensor, layers: Mapping[str, int], others: Mapping[str, int]) -> bool:
        room, _, key = name.partition("/")
        return (others if room == "uncompressed" else layers).get(key, 0) == value.numel()

    def __str__(self) -> str:
        return format_term(self)
