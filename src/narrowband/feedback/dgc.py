"""Deep Gradient Compression: send 0.1 % of a gradient per step, and correct momentum for the delay of the rest.

Source: Lin et al., arXiv 1712.01887. If the optimizer applied momentum to the sparse averages, the gradients of an
element that waited T steps would not be discounted for these steps. So each rank applies momentum before it sends
(equation 7). With gradient g, momentum m, velocity u and accumulated velocity v, each rank computes ::

    u = m·u + g          # momentum correction
    v = v + u
    send the largest of v; where v was sent: v = 0, and u = 0    # momentum factor masking

and the optimizer is plain SGD. Nesterov's variant (appendix B) has u = m·(u + g), v = v + u + g.

``accumulate=steps`` goes beyond the paper: u = m·u + η·g with the learning rate η of the step, and v/η is sent. The
residual is then a step of the parameters, which the optimizer's η·(v/η) applies in full. With ``accumulate=gradients``,
the residual is applied at the rate of the step in which it is sent, and where the rate falls, most of it is lost. Error
feedback is proven for steps (Karimireddy et al. 2019, arXiv 1901.09847, algorithm 1).

The state is two successive sums of velocities: y, and the y of the step before. u is their difference. A step then
reads three arrays and writes two, and can be undone to the bit without a copy
(:func:`narrowband.kernels.momentum_topk`). v is y. In Nesterov's variant v telescopes to y + m·(velocity of the plain
variant), which the two sums also determine. With ``store=bf16`` or ``int8`` they take fewer bits between steps
(:mod:`narrowband.feedback.sums`), and are read into float32 while their tensor is encoded.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs import SelectingCodec, TopK, format_term
from narrowband.codecs.base import dims, squared_norm_late
from narrowband.codecs.spec import check_keys
from narrowband.feedback.base import Feedback, Norms, check_saved
from narrowband.feedback.sums import RoundedSums, Sums
from narrowband.feedback.velocities import Velocities, wide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from narrowband.codecs import Codec, Shape
    from narrowband.feedback.arrivals import Arrivals

__all__ = ["DGC"]

#: Density of the first stretch of warm-up, and the ratio of densities from one stretch to the next (section 3.3).
WARM_UP = 0.25

#: Prefixes of names in a state: the parts of sums, and velocities of uncompressed parameters.
_ROOMS = ("now", "before", "velocity", "uncompressed")

_FP16_MAX = torch.finfo(torch.float16).max

#: Dtypes that the velocity of an uncompressed parameter may have; earlier releases kept those of 16 bits.
_UNCOMPRESSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(eq=False)
class _Sent:
    """What a step in progress has done to one tensor, to be committed or undone."""

    at: Tensor | None = None  # indices of the elements sent; None: all
    rate: float = 1.0  # residual / sent values: the learning rate with ``accumulate=steps``
    commit: Callable[[Tensor | None], None] | None = None  # takes the indices delivered (None: all); None: committed
    #: The sums that the step has changed so far, each with what it held before. They are restored in this order, since
    #: the memory of one may hold what belongs into the next.
    former: Sequence[tuple[Tensor, Tensor]] = ()
    #: The older sum as it was at the elements sent, once the commit has set it to zero there: (sum, values).
    forgotten: tuple[Tensor, Tensor] | None = None
    #: Returns the dot product of the sent values and their rounding errors, in units of what is sent.
    overlap: Callable[[], float | Tensor] = float


@dataclass(unsafe_hash=True)
class DGC(Feedback):
    """Deep Gradient Compression: momentum correction and masking before the wire, for SGD without momentum of its own.

    Costs two float32 per element, or less (``store``); one of them replaces the optimizer's momentum buffer.

    Args:
        density: the share of elements that is sent, after warm-up.
        momentum: momentum of the velocity, as SGD's. The optimizer's own must be 0 (see :class:`narrowband.DGCSGD`).
        nesterov: whether to use Nesterov's variant.
        clip: threshold for the norm of the whole model's averaged gradient. Each of N ranks clips its contribution to
            the average, its gradient / N, at clip/√N before it enters the velocity (section 3.2, where gradients
            include the 1/N): that is, its own gradient at clip·√N. Encoding then waits for the whole gradient.
        warmup_steps: steps over which the density falls: 25 %, 6.25 %, 1.56 % …, as long as that is above ``density``,
            for equally many steps each.
        warmup_epochs: the same, counted in epochs: call the handle's ``set_epoch`` before each.
        masking: whether the velocity is set to zero where elements are sent.
        accumulate: ``gradients``, as in the paper; or ``steps``: gradients times the learning rate at which they were
            computed, so that the residual is applied at that rate. ``steps`` needs ``optimizer=`` at set-up, to read
            the rate when backward begins.
        select: ``exact``; or ``sampled``, as in the paper (section 3): take the elements above a threshold estimated
            from a sample, or the largest of them if they are too many. It may send a few elements less; the size of
            the payload is the same, and known beforehand.
        values: the format of values: see :class:`~narrowband.codecs.TopK`. Rounding errors stay in the residual.
        indices: the format of indices: see :class:`~narrowband.codecs.TopK`.
        store: how the sums of a layer are stored between steps: ``fp32``, ``bf16`` or ``int8``.

    Example:
        >>> handle = nb.compress_gradients(model, "dgc:density=0.01,warmup_steps=100")
    """

    name: ClassVar[str] = "dgc"
    brings_codec: ClassVar[bool] = True
    takes_activations: ClassVar[bool] = False
    mixes: ClassVar[bool] = False  # momentum is applied either here or in the optimizer, for the whole model
    observes_uncompressed: ClassVar[bool] = True
    commits_arrivals: ClassVar[bool] = True
    puts_back: ClassVar[bool] = True

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

    _sums: Sums | RoundedSums = field(init=False, repr=False, compare=False)
    _uncompressed: Velocities = field(default_factory=Velocities, init=False, repr=False, compare=False)
    _sent: dict[str, _Sent] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Key → a magnitude that slightly more elements than wanted reached in the last step: a hint that only saves time.
    _hints: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    #: Key → learning rate of this step, with ``accumulate=steps``; and the last rate above zero.
    rates: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _positive: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_keys(self)
        self._sums = Sums() if self.store == "fp32" else RoundedSums(self.store)
        TopK(density=self.density)  # raises if the density is out of range
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"dgc: momentum={self.momentum} is not in [0, 1)")
        if self.nesterov and not self.momentum:
            raise ValueError("dgc: nesterov=true needs a momentum above 0")
        if not self.clip > 0:
            raise ValueError(f"dgc: clip={self.clip} must be above 0; leave clip out for no clipping")
        if self.warmup_steps < 0 or self.warmup_epochs < 0:
            raise ValueError(
                f"dgc: warmup_steps={self.warmup_steps} and warmup_epochs={self.warmup_epochs} must not be negative"
            )
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError("dgc: give the length of the warm-up as warmup_steps or as warmup_epochs, not as both")
        if (self.warmup_steps or self.warmup_epochs) and self.density >= WARM_UP:
            raise ValueError(
                f"dgc: density={self.density} is not below {WARM_UP:.0%}, with which a warm-up begins, so the density "
                "would grow; leave the warm-up out"
            )
        if self.values == "int8" and self.indices == "runs":
            raise ValueError(
                "dgc: values=int8 cannot be combined with indices=runs, which puts zeros between values that are "
                "rounded together; leave indices out"
            )

    # ---- the schedule ------------------------------------------------------------------------------------------------

    @property
    def codec(self) -> TopK:
        """The codec of v after warm-up."""
        return TopK(density=self.density, select=self.select, values=self.values, indices=self.indices)

    def codec_at(self, step: int, epoch: int | None = None) -> TopK:
        """Return the codec of v in a step (from 0), or in an epoch if warm-up counts epochs.

        Raises:
            ValueError: warm-up counts epochs, and ``epoch`` is None.

        Example:
            >>> DGC(density=0.001, warmup_steps=400).codec_at(100, None).density
            0.0625
        """
        if self.warmup_epochs and epoch is None:
            raise ValueError(
                f"{self.name}: warmup_epochs={self.warmup_epochs} needs to know the epoch: call "
                "handle.set_epoch(epoch) at the beginning of every epoch, counted from 0"
            )
        position, length = (epoch, self.warmup_epochs) if self.warmup_epochs else (step, self.warmup_steps)
        if position is None or position >= length:
            return self.codec
        stretches = math.ceil(math.log(self.density) / math.log(WARM_UP) - 1e-9) - 1
        return replace(self.codec, density=WARM_UP ** (1 + stretches * position // length))

    def codec_of_layer(self, override: Codec, default: Codec) -> Codec:
        """Return the layer's own codec; during warm-up, with at least the density of the other layers."""
        if default == self.codec:
            return override
        assert isinstance(override, TopK)
        assert isinstance(default, TopK)
        return replace(override, density=max(override.density, default.density))

    @property
    def goes_ahead(self) -> bool:
        return True

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
        if commit:
            self._check_commit(x)
        if codec.exact:
            finite, payload = self._encode_velocity(key, x, codec, shape, seed, out)
        elif isinstance(codec, SelectingCodec):
            finite, payload = self._encode_top(key, x, codec, shape, seed, out)
        else:
            raise TypeError(f"dgc needs a codec that selects elements by magnitude, or an exact one; got {codec}")
        if commit and finite:
            self._commit(key, x)
        return finite, payload

    def encodes_all(self, codec: Codec) -> bool:
        """Return whether :meth:`encode_all` works with this codec: if all that is sent has one unit."""
        return self.accumulate == "gradients" and isinstance(codec, TopK) and codec.encodes_several

    def encode_all(
        self, keys: Sequence[str], xs: Sequence[Tensor], codec: Codec, *, seeds: Sequence[int], outs: Sequence[Tensor]
    ) -> bool:
        assert isinstance(codec, TopK)
        nows, befores = self._sums.open_all(keys, xs)
        ks, heads, values = [codec.kept(x.numel()) for x in xs], list[Tensor](), list[Tensor]()
        if codec.values != "fp32":
            heads, outs = codec.cut_all(outs, ks)
            values = [torch.empty(k, dtype=torch.float32, device=xs[0].device) for k in ks]
        finite, indices, olds = kernels.encode_momentum_topk_all(
            xs,
            nows,
            befores,
            ks,
            outs,
            momentum=self.momentum,
            nesterov=self.nesterov,
            masking=self.masking,
            values=values,
        )
        if finite and values:
            finite, left = codec.round_all(values, heads)
            kernels.sparse_accumulate_all([*befores, *nows], [*indices, *indices], [*left, *left])
        if isinstance(self._sums, RoundedSums):
            self._sums.close_all(keys, befores, nows, seeds=seeds, xs=xs)
            self._sent.update((key, _Sent(at)) for key, at in zip(keys, indices, strict=True))
            return finite
        # A new sum has the memory of the sum from before the last one, which the gradient's memory now holds.
        for key, x, now, new, at, old in zip(keys, xs, nows, befores, indices, olds, strict=True):
            self._sent[key] = _Sent(at, former=[(new, now), (now, x)], forgotten=(now, old))
            self._sums.of[key] = new, now
        return finite

    def _encode_top(
        self, key: str, x: Tensor, codec: SelectingCodec, shape: Shape, seed: int, out: Tensor | None
    ) -> tuple[bool, Tensor]:
        """Encode a step of DGC: the largest elements of v are sent."""
        now, before = self._sums.open(key, x)
        in_place = x.dtype == torch.float32
        # The kernel saves the oldest sum in the gradient's memory, which half precision cannot hold. There, it works on
        # a copy of the sum, which becomes the state if the step is good.
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
        if x.dtype == torch.float16:  # averages are float16, too
            sent = whole.clamp(-_FP16_MAX, _FP16_MAX)
        arrives = codec.rounded(sent) if finite else sent
        if arrives is not values:  # dividing and rounding may overflow float32
            finite = finite and kernels.all_finite(whole) and kernels.all_finite(arrives)
        left = None if arrives is whole else values - arrives * unit
        own = self._sent[key] = _Sent(at, unit, former=[(before, gradient)] if in_place else ())

        def commit(arrived: Tensor | None) -> None:
            there = at if arrived is None else arrived
            old = kernels.forget(
                now, newest, there, momentum=self.momentum, nesterov=self.nesterov, masking=self.masking
            )
            own.forgotten = now, old
            own.former = [(newest, now), (now, gradient)] if in_place else ()
            if left is not None:
                late = left if arrived is None else torch.where(torch.isin(at, arrived), left, 0.0)
                newest.index_add_(0, at, late)
                now.index_add_(0, at, late)
            self._sums.close(key, newest, now, seed=seed)
            self._hints[key] = hint

        own.commit = commit
        own.overlap = lambda: 0.0 if left is None else torch.dot(arrives, left).double() / unit
        if not finite:
            nbytes = codec.payload_nbytes(shape, torch.float32)
            return False, out if out is not None else torch.zeros(nbytes, dtype=torch.uint8, device=x.device)
        return True, codec.pack(at, sent, shape=shape, out=out)

    def _rate(self, key: str) -> tuple[float, float]:
        """Return (the factor on a new gradient, the divisor of what is sent).

        At a learning rate of zero a gradient has no effect, and neither has what is sent: the divisor is then the last
        positive rate.
        """
        if self.accumulate == "gradients":
            return 1.0, 1.0
        rate = self.rates[key]
        if rate > 0:
            self._positive[key] = rate
        return rate, self._positive.get(key, 1.0)

    def _encode_velocity(
        self, key: str, x: Tensor, codec: Codec, shape: Shape, seed: int, out: Tensor | None
    ) -> tuple[bool, Tensor]:
        """Encode a plain step of momentum SGD: the whole new velocity is sent, and the residual stays as it is."""
        now, before = self._sums.open(key, x)
        rate, unit = self._rate(key)
        gradient = x.float() * rate
        velocity = (now - before).mul_(self.momentum).add_(gradient)
        step = velocity
        newest = now
        if self.nesterov:
            step = gradient + velocity * self.momentum
            newest = now + (now - before - velocity) * self.momentum
        previous = newest - velocity
        own = self._sent[key] = _Sent(rate=unit)

        def commit(_: Tensor | None) -> None:
            own.former = [(previous, before), *([(newest, now)] if self.nesterov else [])]
            self._sums.close(key, newest, previous, seed=seed)

        own.commit = commit
        sent = (step / unit).to(x.dtype)
        return kernels.all_finite(sent.float()), codec.encode(sent.view(dims(shape)), seed=seed, out=out)

    def commit(
        self, key: str, x: Tensor, codec: Codec, payload: Tensor, *, shape: Shape, seed: int, measure: bool = False
    ) -> Norms | None:
        at, unit, overlap = self._sent[key].at, self._sent[key].rate, self._sent[key].overlap
        self._commit(key, x)
        if not self.can_roll_back(x):
            del self._sent[key]  # decided: free the sums of the step before
        if not measure or at is None:
            return None
        lost = squared_norm_late(self._residual(key)) / unit**2
        arrived = squared_norm_late(
            codec.decode(payload, torch.empty(dims(shape), dtype=torch.float32, device=x.device))
        )
        return Norms(lost + arrived + 2.0 * overlap(), lost)

    def _commit(self, key: str, x: Tensor, arrived: Tensor | None = None) -> None:
        sent = self._sent[key]
        if sent.commit is None:
            return
        if isinstance(self._sums, RoundedSums) and self.can_roll_back(x):
            self._sums.save(key, x)
            sent.commit(arrived)
            self._sent[key] = _Sent(sent.at, sent.rate)  # frees the float32 sums that it refers to
            return
        sent.commit(arrived)
        sent.commit = None

    def commit_arrived(
        self,
        keys: Sequence[str],
        xs: Sequence[Tensor],
        arrivals: Arrivals,
        *,
        bad: Tensor | None = None,
        measure: bool = False,
    ) -> list[Norms]:
        assert bad is None, "the host decides"
        norms = []
        for key, x, (at, values) in zip(keys, xs, arrivals.elements(), strict=True):
            unit = self._sent[key].rate
            self._commit(key, x, at)
            if not self.can_roll_back(x):
                del self._sent[key]
            if measure:
                lost = squared_norm_late(self._residual(key)) / unit**2
                norms.append(Norms(lost + squared_norm_late(values), lost))
        return norms

    def _residual(self, key: str) -> Tensor:
        """Return v."""
        now, before = self._sums.read(key)
        return now + (now - before) * self.momentum if self.nesterov else now

    def can_roll_back(self, x: Tensor) -> bool:
        return x.dtype == torch.float32

    def roll_back(self, key: str, x: Tensor) -> None:
        sent = self._sent.pop(key)
        former = sent.former
        if isinstance(self._sums, RoundedSums):  # what is not committed has changed nothing that is stored
            former = self._sums.saved(key, x) if sent.commit is None else ()
        if sent.forgotten is not None:
            now, old = sent.forgotten
            now[sent.at] = old
        for total, held in former:
            total.copy_(held)

    def roll_back_if(self, bad: Tensor, keys: Sequence[str], xs: Sequence[Tensor]) -> None:
        committed: list[_Sent] = []
        stored: list[tuple[Tensor, Tensor]] = []
        for key, x in zip(keys, xs, strict=True):
            if self._sent[key].commit is not None:  # the host knew that it was not finite
                self.roll_back(key, x)
                continue
            committed.append(self._sent.pop(key))
            if isinstance(self._sums, RoundedSums):
                stored += self._sums.saved(key, x)
        kernels.restore_all_if(bad, [codes for codes, _ in stored], [former for _, former in stored])
        forgotten = [(*own.forgotten, own.at) for own in committed if own.at is not None and own.forgotten is not None]
        nows, olds, indices = zip(*forgotten, strict=True) if forgotten else ((), (), ())
        kernels.remember_all_if(bad, nows, indices, olds)
        for turn in itertools.zip_longest(*(own.former for own in committed)):
            pairs = [pair for pair in turn if pair is not None]
            kernels.restore_all_if(bad, [total for total, _ in pairs], [held for _, held in pairs])

    def residual(self, key: str) -> Tensor | None:
        return self._sums.newest(key)

    def holds(self, key: str) -> bool:
        return key in self._sums.of

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes + sum(x.nbytes for x in self._uncompressed.of.values())

    def entries(self, key: str) -> dict[str, Tensor]:
        found = self._sums.parts(key)
        if key in self._uncompressed.of:
            found["uncompressed"] = self._uncompressed.of[key]
        return {f"{room}/{key}": x for room, x in found.items()}

    def put_back(self, key: str, entries: Mapping[str, Tensor]) -> None:
        rooms = {name.partition("/")[0]: x for name, x in entries.items()}
        self._sums.of.pop(key, None)
        self._uncompressed.of.pop(key, None)
        if "uncompressed" in rooms:
            self._uncompressed.of[key] = rooms["uncompressed"]
        if "now" in rooms:
            self._sums.load(key, rooms)

    # ---- what travels uncompressed -----------------------------------------------------------------------------------

    def advance_uncompressed(self, averages: Sequence[tuple[str, Tensor]], bad: Tensor | None = None) -> None:
        if self.momentum:
            self._uncompressed.advance(averages, momentum=self.momentum, nesterov=self.nesterov, bad=bad)

    # ---- state -------------------------------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        self._sums.scale(factor)
        for velocity in self._uncompressed.of.values():
            velocity.mul_(factor)
        self._hints = {key: hint * factor for key, hint in self._hints.items()}

    def state_dict(self) -> dict[str, Tensor]:
        parts = {key: self._sums.parts(key) for key in self._sums.of}
        sums = {f"{room}/{key}": own[room] for room in _ROOMS for key, own in parts.items() if room in own}
        return sums | {f"uncompressed/{key}": velocity for key, velocity in self._uncompressed.of.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        sums: dict[str, dict[str, Tensor]] = {}
        velocities: dict[str, Tensor] = {}
        for name, value in state.items():
            room, _, key = name.partition("/")
            dtype = wide(value.dtype) if room == "uncompressed" else torch.float32
            own = value.detach().reshape(-1).to(dtype, copy=True, memory_format=torch.contiguous_format)
            if room == "uncompressed":
                velocities[key] = own
            else:
                sums.setdefault(key, {})[room] = own
        self._sums.of, self._uncompressed.of = {}, velocities
        for key, parts in sums.items():
            self._sums.load(key, parts)
        self._hints.clear()

    def check_state(self, state: Mapping[str, object]) -> None:
        keys: dict[str, set[str]] = {room: set() for room in _ROOMS}
        for name, value in state.items():
            room, slash, key = name.partition("/")
            if not slash or room not in keys:
                raise ValueError(f"dgc: the state has the unknown entry {name!r}; it was saved with another spec")
            check_saved(
                self.name, name, value, dtypes=_UNCOMPRESSED_DTYPES if room == "uncompressed" else (torch.float32,)
            )
            keys[room].add(key)
        odd = sorted(keys["now"] ^ (keys["before"] | keys["velocity"]))
        if odd:
            raise ValueError(f"dgc: the state lacks one of the two sums of {', '.join(odd)}")

    def fits(self, name: str, value: Tensor, layers: Mapping[str, Shape], others: Mapping[str, Shape]) -> bool:
        room, _, key = name.partition("/")
        return super().fits(key, value, others if room == "uncompressed" else layers, {})

    def __str__(self) -> str:
        return format_term(self)
