"""A channel: one tensor in one direction over the boundary between two stages, as one of its ends sees it.

The sending end turns a tensor into a payload (:meth:`Channel.pack`), the receiving end turns it back
(:meth:`Channel.unpack`); a process that plays both ends does both in one call. Sizes are known on both ends before
anything is sent, so payloads travel in the fixed buffers that a pipeline schedule wants.

===============  =====================================================================  ===========================
feedback         what travels for x                                                     kept between two messages
===============  =====================================================================  ===========================
none             C(x)                                                                   nothing
``ef``           C(x + e); e ← x + e − C(x + e)  (Seide et al. 2014)                     e, on the sender
``ef-mixed``     the top half k of x and of e, of x + e (Rudakov et al., 2401.07788)    e, on the sender
``ef21``         C(x − g); g ← g + C(x − g), which is what is used (2106.05203)         g, on both ends
``aq-sgd``       C(xᵢ − mᵢ) for each sample i; mᵢ ← mᵢ + C(xᵢ − mᵢ) (2206.01299)        mᵢ, on both ends
===============  =====================================================================  ===========================

Buffers e and g are kept per shape and shared by all micro-batches of that shape, as in Rudakov et al. ("global"), so
both ends have to see micro-batches in one order; the channel checks that. A tensor that holds inf or NaN changes no
buffer on either end, and arrives as something that is not finite.

Shapes: B samples of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from narrowband import kernels
from narrowband.codecs import Codec, Identity, SelectingCodec
from narrowband.errors import UnsupportedError
from narrowband.feedback import Compression, Feedback, SampleState, compression

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

__all__ = ["At", "Channel", "ChannelStats"]

_PLAIN = Identity()
_REUSE = "reuse"
_MASK = (1 << 64) - 1

#: The relative error of the first message is measured, and of one in so many: it takes decoding what was encoded.
_MEASURE_EVERY = 50


class At(NamedTuple):
    """Which message of a channel: the micro-batch of a training step, both from 0."""

    step: int
    microbatch: int


#: Evaluation draws the same numbers every time.
_EVALUATION = At(0, 0)


@dataclass
class ChannelStats:
    """What a channel carried so far.

    Attributes:
        messages: payloads.
        raw_bytes: what these tensors would have been without compression.
        sent_bytes: what the payloads were.
        relative_error: ``‖x − x̂‖² / ‖x‖²`` of a tensor x and of what arrives, x̂, of the latest message that measured it
            (the first, and every 50th); None before. Of several channels: the mean.
    """

    messages: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    relative_error: float | None = field(default=None, compare=False)  # the receiving end cannot know it

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @classmethod
    def total(cls, several: Iterable[ChannelStats]) -> ChannelStats:
        """The sum, and the mean of the relative errors that are known."""
        several = list(several)
        known = [stats.relative_error for stats in several if stats.relative_error is not None]
        return cls(
            messages=sum(stats.messages for stats in several),
            raw_bytes=sum(stats.raw_bytes for stats in several),
            sent_bytes=sum(stats.sent_bytes for stats in several),
            relative_error=sum(known) / len(known) if known else None,
        )


class Channel:
    """One end of a channel, or both.

    Args:
        spec: what to compress with: a codec, with ``+ef``, ``+ef-mixed``, ``+ef21`` or ``+aq-sgd`` if wanted; or, with
            ``reuse=forward`` among the keys of ``topk``, the elements that the other direction chose.
        seed: of stochastic rounding and sampling; the same on both ends.
        index: tells the channels of a model apart.
        name: tells the ends on a machine apart that keep their buffers in one folder.
        warmup_steps: so many steps are uncompressed at first.
        warmup_epochs: the same, counted in epochs: :meth:`set_epoch` says which one it is.
        forward: the channel of the other direction, whose indices ``reuse=forward`` takes.

    Raises:
        ValueError: a spec that is none.
        UnsupportedError: one that cannot work between stages.

    Example:
        >>> here, there = Channel("topk:density=0.1+ef21"), Channel("topk:density=0.1+ef21")
        >>> payload = here.pack(x, At(step, microbatch))
        >>> y = there.unpack(payload, torch.empty_like(x), At(step, microbatch))
    """

    def __init__(
        self,
        spec: str | Codec | Compression,
        *,
        seed: int = 0,
        index: int = 0,
        name: str = "",
        warmup_steps: int = 0,
        warmup_epochs: int = 0,
        forward: Channel | None = None,
    ) -> None:
        if warmup_steps < 0 or warmup_epochs < 0:
            raise ValueError(
                f"warmup_steps={warmup_steps} and warmup_epochs={warmup_epochs} must be at least 0: so many are "
                "uncompressed at first"
            )
        if warmup_steps and warmup_epochs:
            raise ValueError("a warm-up lasts warmup_steps or warmup_epochs; give one of them")
        chosen, self.reuses = _parsed(spec)
        self.compression = chosen
        self.codec = chosen.codec
        self.state = chosen.new_feedback()
        self.stats = ChannelStats()
        self._seed = seed * 0x9E3779B97F4A7C15 + index * 0xD6E8FEB86659FD93
        self._name = name
        self._warmup_steps, self._warmup_epochs = warmup_steps, warmup_epochs
        self._epoch: int | None = None
        self._last = At(-1, -1)
        self._forward = forward if self.reuses else None
        #: Of the messages whose indices the other direction will want: at most a step's.
        self._places: dict[tuple[At, tuple[int, ...]], Tensor] = {}
        self.keeps_places = False
        self._check(forward)

    def _check(self, forward: Channel | None) -> None:
        if not self.codec.fixed_size:
            raise UnsupportedError(
                f"{self}: the length of its payloads depends on the data, and a stage has to know what to receive; "
                "use topk"
            )
        if self.state is not None and not self.state.takes_activations:
            raise UnsupportedError(
                f"{self} is for gradients of data parallelism; between stages use a codec, with +ef, +ef-mixed, +ef21 "
                "or +aq-sgd if wanted"
            )
        if not self.reuses:
            return
        if forward is None:
            raise UnsupportedError("reuse=forward takes the indices of the forward direction, so it is for backward")
        if not isinstance(forward.codec, SelectingCodec) or isinstance(forward.state, SampleState):
            raise UnsupportedError(
                f"reuse=forward takes the indices that topk chose forward, and forward is {str(forward)!r}; use topk "
                "there, or leave out reuse=forward"
            )
        if self.state is not None:
            raise UnsupportedError(f"{self}: reuse=forward works without feedback")
        assert isinstance(self.codec, SelectingCodec)
        if self.codec.density != forward.codec.density:
            raise ValueError(
                f"reuse=forward takes forward's elements, and density={self.codec.density} is not forward's "
                f"{forward.codec.density}"
            )
        forward.keeps_places = True

    def __str__(self) -> str:
        return f"{self.compression},reuse=forward" if self.reuses else str(self.compression)

    @property
    def exact(self) -> bool:
        """Whether tensors arrive as they are, so that nothing is compressed."""
        return self.codec.exact and self.state is None

    @property
    def by_sample(self) -> bool:
        """Whether it needs to know which samples a tensor holds."""
        return isinstance(self.state, SampleState)

    def warming_up(self, at: At) -> bool:
        """Whether this message travels as it is.

        Raises:
            ValueError: warm-up counts epochs, and nobody said which one this is.
        """
        if not self._warmup_epochs:
            return at.step < self._warmup_steps
        if self._epoch is None:
            raise ValueError(
                f"warmup_epochs={self._warmup_epochs} counts epochs: call set_epoch(epoch) at the beginning of each, "
                "from 0 on"
            )
        return self._epoch < self._warmup_epochs

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins, from 0 on; on both ends."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must not be negative")
        self._epoch = epoch

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def payload_nbytes(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        at: At,
        *,
        samples: Tensor | None = None,
        training: bool = True,
    ) -> int:
        """Bytes of this message: as :meth:`pack` will make it and :meth:`unpack` expects it.

        Args:
            shape, dtype: of the tensor, (B, …).
            at: which message.
            samples: (B,), the ids of the samples, for ``aq-sgd``.
            training: see :meth:`pack`.
        """
        if training and self.warming_up(at):
            return _PLAIN.payload_nbytes(shape, dtype)
        if isinstance(self.state, SampleState) and training:
            return self.state.payload_nbytes(self._name, self.codec, shape, dtype, _known(samples))
        if self._forward is not None:
            assert isinstance(self.codec, SelectingCodec)
            return self.codec.values_nbytes(self._forward.kept(shape))
        return self.codec.payload_nbytes(shape, torch.float32 if isinstance(self.state, Feedback) else dtype)

    def kept(self, shape: tuple[int, ...]) -> int:
        """How many elements of a tensor top-k keeps."""
        assert isinstance(self.codec, SelectingCodec)
        return self.codec.kept(shape)

    # ---- the sending end ---------------------------------------------------------------------------------------------

    def pack(
        self,
        x: Tensor,
        at: At,
        *,
        samples: Tensor | None = None,
        training: bool = True,
        arrived: Tensor | None = None,
    ) -> Tensor:
        """The payload of ``x``: flat uint8.

        Args:
            x: (B, …), float32, float16 or bfloat16. Is not changed.
            at: which message; later ones have larger numbers.
            samples: (B,), int64, the ids of the samples, for ``aq-sgd``.
            training: otherwise nothing is remembered, and buffers are used as they are.
            arrived: write here what the other end will get, for a process that is both; x's shape and dtype.

        Raises:
            TypeError: a dtype that no codec takes.
            ValueError: samples that do not fit.
            UnsupportedError: messages out of order, where both ends have to agree on one.
        """
        x = x.detach().contiguous()
        if training:
            self._in_order(at)
        else:
            at = _EVALUATION
        measure = training and self.stats.messages % _MEASURE_EVERY == 0
        flat = torch.empty_like(x) if (arrived is None and measure) else arrived
        if flat is not None and not flat.is_contiguous():
            flat = torch.empty_like(x)
        payload = self._pack(x, at, samples, training, flat)
        if measure and flat is not None:
            self._measure(x, flat)
        if arrived is not None and flat is not None and flat is not arrived:
            arrived.copy_(flat)
        self.stats.messages += 1
        self.stats.raw_bytes += x.numel() * x.element_size()
        self.stats.sent_bytes += payload.numel()
        return payload

    def _measure(self, x: Tensor, arrived: Tensor) -> None:
        norm = float(x.float().norm())
        error = float((x.float() - arrived.float()).norm())
        if norm > 0.0 and math.isfinite(error / norm):
            self.stats.relative_error = (error / norm) ** 2

    def _pack(self, x: Tensor, at: At, samples: Tensor | None, training: bool, arrived: Tensor | None) -> Tensor:
        state, codec, seed = self.state, self.codec, self._seed_of(at)
        if training and self.warming_up(at):
            if isinstance(state, SampleState):
                state.fill(self._name, x, _known(samples))
            if arrived is not None:
                arrived.copy_(x)
            return _PLAIN.encode(x)
        if self._forward is not None:
            assert isinstance(codec, SelectingCodec)
            places = self._forward.take_places(at, tuple(x.shape))
            payload = codec.encode_at(_shown(x), places)
            if arrived is not None:
                codec.decode_at(payload, places, arrived)
            return payload
        if isinstance(state, SampleState) and training:
            return state.pack(self._name, x, codec, samples=_known(samples), seed=seed, arrived=arrived)
        if isinstance(state, Feedback):
            return self._pack_compensated(state, x, at, training, arrived)
        payload = codec.encode(_shown(x) if codec.shared_seed else x, seed=seed)
        if arrived is not None:
            codec.decode(payload, arrived, seed=seed)
        self._keep_places(payload, x, at, training)
        return payload

    def _pack_compensated(self, state: Feedback, x: Tensor, at: At, training: bool, arrived: Tensor | None) -> Tensor:
        """What the feedback makes of x. Buffers are float32, and so is what is encoded."""
        codec, key, shape, seed = self.codec, _key(x), tuple(x.shape), self._seed_of(at)
        scratch = x.reshape(-1).to(torch.float32, copy=True)
        if training or _holds(state, key):
            commit = training and state.can_roll_back(scratch)
            finite, payload = state.encode(key, scratch, codec, shape=shape, seed=seed, commit=commit)
            if not training or not finite:
                state.roll_back(key, scratch)
            elif not commit:
                state.commit(key, scratch, codec, payload, shape=shape, seed=seed)
        else:
            finite, payload = True, codec.encode(scratch.view(shape), seed=seed)
        if not finite:  # whatever it was that overflowed, the other end has to see that this message says nothing
            payload = codec.encode(torch.full(shape, torch.nan, device=x.device), seed=seed)
        if arrived is not None:
            if state.incremental and finite and training:
                reference = state.sent_reference(key)
                assert reference is not None
                arrived.copy_(reference.view(shape))
            else:
                base = state.sent_reference(key) if finite else None
                self._decode_onto(base, payload, arrived, seed)
        self._keep_places(payload, x, at, training)
        return payload

    def _decode_onto(self, base: Tensor | None, payload: Tensor, out: Tensor, seed: int) -> None:
        """``out ← base + decoded``, in float32."""
        decoded = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
        self.codec.decode(payload, decoded, seed=seed)
        if base is not None:
            decoded.add_(base.view(out.shape))
        if decoded is not out:
            out.copy_(decoded)

    # ---- the receiving end -------------------------------------------------------------------------------------------

    def unpack(
        self, payload: Tensor, out: Tensor, at: At, *, samples: Tensor | None = None, training: bool = True
    ) -> Tensor:
        """Write what the payload says into ``out``, and return it.

        Args:
            payload: what :meth:`pack` made of this message on the other end.
            out: (B, …), of the tensor's shape and dtype.
            at, samples, training: as on the other end.

        Raises:
            PayloadError: a payload of another length, or with an index out of range. Nothing has been written then.
        """
        if training:
            self._in_order(at)
        else:
            at = _EVALUATION
        self.stats.messages += 1
        self.stats.raw_bytes += out.numel() * out.element_size()
        self.stats.sent_bytes += payload.numel()
        if out.is_contiguous():
            return self._unpack(payload, out, at, samples, training)
        flat = torch.empty_like(out, memory_format=torch.contiguous_format)
        return out.copy_(self._unpack(payload, flat, at, samples, training))

    def _unpack(self, payload: Tensor, out: Tensor, at: At, samples: Tensor | None, training: bool) -> Tensor:
        state, codec, seed = self.state, self.codec, self._seed_of(at)
        if training and self.warming_up(at):
            _PLAIN.decode(payload, out)
            if isinstance(state, SampleState):
                state.fill(self._name, out, _known(samples))
            return out
        if self._forward is not None:
            assert isinstance(codec, SelectingCodec)
            return codec.decode_at(payload, self._forward.take_places(at, tuple(out.shape)), out)
        if isinstance(state, SampleState) and training:
            return state.unpack(self._name, payload, out, codec, samples=_known(samples), seed=seed)
        if isinstance(state, Feedback) and state.incremental and training:
            change = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
            codec.decode(payload, change, seed=seed)
            if codec.is_finite(payload, tuple(out.shape)):
                state.deliver(_key(out), change.view(-1))
            if change is not out:
                out.copy_(change)
        elif isinstance(state, Feedback):
            base = state.received_reference(_key(out))
            self._decode_onto(base, payload, out, seed)
        else:
            codec.decode(payload, out, seed=seed)
        self._keep_places(payload, out, at, training)
        return out

    # ---- indices for the other direction -----------------------------------------------------------------------------

    def _keep_places(self, payload: Tensor, x: Tensor, at: At, training: bool) -> None:
        if self.keeps_places and training:
            assert isinstance(self.codec, SelectingCodec)
            for key in [key for key in self._places if key[0].step != at.step]:
                del self._places[key]  # a pass without backward
            self._places[at, tuple(x.shape)] = self.codec.places(payload, tuple(x.shape))

    def take_places(self, at: At, shape: tuple[int, ...]) -> Tensor:
        """The indices that this channel chose for a tensor of this shape, which then forgets them."""
        places = self._places.pop((at, shape), None)
        if places is None:
            raise UnsupportedError(
                f"no tensor of shape {shape} went forward at step {at.step}, micro-batch {at.microbatch}, whose "
                "indices the gradient could reuse"
            )
        return places

    # ---- state -------------------------------------------------------------------------------------------------------

    def reference_ids(self) -> Tensor | None:
        """The ids of the samples whose buffers it has, ascending; None where there are no such buffers."""
        return self.state.reference_ids(self._name) if isinstance(self.state, SampleState) else None

    def keep_only(self, samples: Tensor) -> None:
        """Forget all other samples: they travel in full precision again."""
        assert isinstance(self.state, SampleState)
        self.state.keep_only(self._name, samples)

    def _in_order(self, at: At) -> None:
        if self.state is not None and at <= self._last:
            raise UnsupportedError(
                f"step {at.step}, micro-batch {at.microbatch} comes after step {self._last.step}, micro-batch "
                f"{self._last.microbatch}: with {self} both ends must see them in one order. Use a schedule that keeps "
                "it, or a spec without feedback"
            )
        self._last = at

    def _seed_of(self, at: At) -> int:
        return (self._seed + at.step * 0xA0761D6478BD642F + at.microbatch * 0xE7037ED1A0B428DB) & _MASK

    def state_dict(self) -> dict[str, Any]:
        """What is kept between two steps, and the spec it was kept for."""
        state = {} if self.state is None else self.state.state_dict()
        return {"spec": str(self), "state": state, "last": tuple(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it was kept for another spec.
        """
        if state["spec"] != str(self):
            raise ValueError(f"the state was kept for {state['spec']!r}, and this is {str(self)!r}")
        if self.state is not None:
            self.state.load_state_dict(state["state"])
        self._last = At(*state["last"])


def _parsed(spec: str | Codec | Compression) -> tuple[Compression, bool]:
    """What a spec names, and whether it takes its indices from the other direction."""
    if not isinstance(spec, str):
        return compression(spec), False
    term, plus, feedback = spec.partition("+")
    name, _, keys = term.partition(":")
    pairs = [pair for pair in keys.split(",") if pair.partition("=")[0].strip() != _REUSE]
    reused = [pair.partition("=")[2].strip() for pair in keys.split(",") if pair.partition("=")[0].strip() == _REUSE]
    if not reused:
        return compression(spec), False
    if reused != ["forward"]:
        raise ValueError(f"reuse={reused[-1]} in {spec!r}: only reuse=forward exists")
    rest = f"{name}:{','.join(pairs)}" if pairs else name
    chosen = compression(rest + plus + feedback)
    if not isinstance(chosen.codec, SelectingCodec):
        raise UnsupportedError(f"{spec!r}: only topk can take the elements that another direction chose")
    return chosen, True


def _shown(x: Tensor) -> Tensor:
    """x, for an encoding that does not look at all of it; NaN throughout if any of it is not finite."""
    return x if kernels.all_finite(x.reshape(-1).float()) else torch.full_like(x, torch.nan)


def _key(x: Tensor) -> str:
    """Buffers are per shape."""
    return "x".join(map(str, x.shape))


def _holds(state: Feedback, key: str) -> bool:
    return (state.sent_reference(key) if state.incremental else state.residual(key)) is not None


def _known(samples: Tensor | None) -> Tensor:
    if samples is None:
        raise ValueError(
            "aq-sgd needs to know the samples of every micro-batch: set .samples to their ids (int64, one for each) "
            "before the step"
        )
    return samples
