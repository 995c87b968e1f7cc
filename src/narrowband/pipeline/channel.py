"""A channel: one tensor in one direction over the boundary between two stages, as one of its ends sees it.

The sending end turns a tensor into a payload (:meth:`Channel.pack`), the receiving end turns it back
(:meth:`Channel.unpack`); a process that plays both ends does both in one call. Sizes are known on both ends before
anything is sent, so payloads travel in the fixed buffers that a pipeline schedule wants.

How a tensor travels, and what is kept between two messages, depends on the spec's feedback: see :mod:`.carriers`. With
feedback both ends have to see micro-batches in one order; the channel checks that.

Shapes: B samples of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from narrowband.codecs import Codec, Identity, SelectingCodec
from narrowband.errors import UnsupportedError
from narrowband.feedback import Compression, Feedback, SampleState, compression
from narrowband.pipeline.carriers import At, AtPlaces, BySample, Carrier, Compensated, Message
from narrowband.stats import StepRecord, latest
from narrowband.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["At", "Channel", "ChannelStats"]

_PLAIN = Identity()
_REUSE = "reuse"
_MASK = (1 << 64) - 1

#: The relative error of the first message is measured, and of one in so many: it takes decoding what was encoded.
_MEASURE_EVERY = 50


#: Evaluation draws the same numbers every time.
_EVALUATION = At(0, 0)


@dataclass
class ChannelStats(StepRecord):
    """What a channel carried so far.

    Attributes:
        messages: payloads.
        raw_bytes: what these tensors would have been without compression.
        sent_bytes: what the payloads were.
        relative_error: ``‖x − x̂‖² / ‖x‖²`` of a tensor x and of what arrives, x̂, of the latest message that measured it
            (the first, and every 50th); None before. Of several channels: the mean.
    """

    messages: int = 0
    relative_error: float | None = latest(compare=False)  # the receiving end cannot know it

    @classmethod
    def total(cls, several: Iterable[ChannelStats]) -> ChannelStats:
        """The sum, and the mean of the relative errors that were measured."""
        several = list(several)
        measured = [stats.relative_error for stats in several if stats.relative_error is not None]
        return cls(
            messages=sum(stats.messages for stats in several),
            raw_bytes=sum(stats.raw_bytes for stats in several),
            sent_bytes=sum(stats.sent_bytes for stats in several),
            relative_error=sum(measured) / len(measured) if measured else None,
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
        self._state = chosen.new_feedback()
        self.stats = ChannelStats()
        self._seed = whole_number("seed", seed) * 0x9E3779B97F4A7C15 + index * 0xD6E8FEB86659FD93
        self._name = name
        self._warmup_steps, self._warmup_epochs = warmup_steps, warmup_epochs
        self._epoch: int | None = None
        self._last = At(-1, -1)
        #: Of the messages whose indices the other direction will want: at most a step's.
        self._places: dict[tuple[At, tuple[int, ...]], Tensor] = {}
        self.keeps_places = False
        self._carrier = self._carrier_for(forward)

    def _carrier_for(self, forward: Channel | None) -> Carrier:
        """How tensors travel, or an error."""
        if not self.codec.fixed_size:
            raise UnsupportedError(
                f"{self}: the length of its payloads depends on the data, and a stage has to know what to receive; "
                "use topk"
            )
        state = self._state
        if state is not None and not state.takes_activations:
            raise UnsupportedError(
                f"{self} is for gradients of data parallelism; between stages use a codec, with +ef, +ef-mixed, +ef21 "
                "or +aq-sgd if wanted"
            )
        if not self.reuses:
            if isinstance(state, SampleState):
                return BySample(self.codec, state, self._name)
            return Compensated(self.codec, state) if isinstance(state, Feedback) else Carrier(self.codec)
        if forward is None:
            raise UnsupportedError("reuse=forward takes the indices of the forward direction, so it is for backward")
        if not isinstance(forward.codec, SelectingCodec) or forward.by_sample:
            raise UnsupportedError(
                f"reuse=forward takes the indices that topk chose forward, and forward is {str(forward)!r}; use topk "
                "there, or leave out reuse=forward"
            )
        if state is not None:
            raise UnsupportedError(f"{self}: reuse=forward works without feedback")
        assert isinstance(self.codec, SelectingCodec)
        if self.codec.density != forward.codec.density:
            raise ValueError(
                f"reuse=forward takes forward's elements, and density={self.codec.density} is not forward's "
                f"{forward.codec.density}"
            )
        forward.keeps_places = True
        return AtPlaces(self.codec, forward.codec, forward.take_places)

    def __str__(self) -> str:
        return f"{self.compression},reuse=forward" if self.reuses else str(self.compression)

    @property
    def exact(self) -> bool:
        """Whether tensors arrive as they are, so that nothing is compressed."""
        return self.codec.exact and self._state is None

    @property
    def by_sample(self) -> bool:
        """Whether it needs to know which samples a tensor holds."""
        return self._carrier.by_sample

    @property
    def warning(self) -> str | None:
        """What users should know before they train with this spec, if anything."""
        return self._state.warning(self.codec) if isinstance(self._state, SampleState) else None

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
        epoch = whole_number("epoch", epoch)
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
        return self._carrier.payload_nbytes(shape, dtype, self._message(at, samples, training))

    # ---- the sending end ---------------------------------------------------------------------------------------------

    def pack(
        self,
        x: Tensor,
        at: At,
        *,
        samples: Tensor | None = None,
        training: bool = True,
        arrived: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """The payload of ``x``: flat uint8.

        Args:
            x: (B, …), float32, float16 or bfloat16. Is not changed.
            at: which message; later ones have larger numbers.
            samples: (B,), int64, the ids of the samples, for ``aq-sgd``.
            training: otherwise nothing is remembered, and buffers are used as they are.
            arrived: write here what the other end will get, for a process that is both; x's shape and dtype.
            places: with ``reuse=forward`` in evaluation: the elements that went forward, see :meth:`places`.

        Raises:
            TypeError: a dtype that no codec takes.
            ValueError: samples that do not fit.
            UnsupportedError: messages out of order, where both ends have to agree on one.
        """
        x = x.detach().contiguous().resolve_neg()
        if training:
            self._in_order(at)
        else:
            at = _EVALUATION
        measure = training and self.stats.messages % _MEASURE_EVERY == 0
        flat = torch.empty_like(x) if (arrived is None and measure) else arrived
        if flat is not None and not flat.is_contiguous():
            flat = torch.empty_like(x)
        payload = self._pack(x, self._message(at, samples, training, places), flat)
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

    def _pack(self, x: Tensor, message: Message, arrived: Tensor | None) -> Tensor:
        if message.training and self.warming_up(message.at):
            self._carrier.whole(x, message)
            if arrived is not None:
                arrived.copy_(x)
            return _PLAIN.encode(x)
        payload = self._carrier.pack(x, message, arrived)
        self._keep_places(payload, x, message.at, message.training)
        return payload

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
            PayloadError: a payload of another length, or with an index out of range. Nothing has been written then, but
                with ``aq-sgd`` the samples in front of the damaged one.
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
        message = self._message(at, samples, training)
        if training and self.warming_up(at):
            _PLAIN.decode(payload, out)
            self._carrier.whole(out, message)
            return out
        self._carrier.unpack(payload, out, message)
        self._keep_places(payload, out, at, training)
        return out

    # ---- indices for the other direction -----------------------------------------------------------------------------

    def _keep_places(self, payload: Tensor, x: Tensor, at: At, training: bool) -> None:
        places = self.places(payload, tuple(x.shape)) if training else None
        if places is not None:
            for key in [key for key in self._places if key[0].step != at.step]:
                del self._places[key]  # a pass without backward
            self._places[at, tuple(x.shape)] = places

    def places(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """The indices that a payload of :meth:`pack` has, for a gradient in evaluation, whose messages have no number
        to keep them by; None where the other direction takes none.
        """
        if not self.keeps_places:
            return None
        assert isinstance(self.codec, SelectingCodec)
        return self.codec.places(payload, shape)

    def take_places(self, at: At, shape: tuple[int, ...]) -> Tensor:
        """The indices that this channel chose for a tensor of this shape, which then forgets them."""
        places = self._places.pop((at, shape), None)
        if places is None:
            raise UnsupportedError(
                f"no indices are left for a gradient of shape {shape} at step {at.step}, micro-batch {at.microbatch}: "
                "nothing of that shape went forward there, or another step has begun since. A Boundary that is called "
                "several times before backward has to know how often: microbatches=2 for two calls"
            )
        return places

    # ---- state -------------------------------------------------------------------------------------------------------

    def reference_ids(self) -> Tensor | None:
        """The ids of the samples whose buffers it has, ascending; None where there are no such buffers."""
        return self._carrier.reference_ids()

    def keep_only(self, samples: Tensor) -> None:
        """Forget all other samples: they travel in full precision again."""
        self._carrier.keep_only(samples)

    def _in_order(self, at: At) -> None:
        if self._state is not None and at <= self._last:
            raise UnsupportedError(
                f"step {at.step}, micro-batch {at.microbatch} comes after step {self._last.step}, micro-batch "
                f"{self._last.microbatch}: with {self} both ends must see them in one order. Use a schedule that keeps "
                "it, or a spec without feedback"
            )
        self._last = at

    def _message(self, at: At, samples: Tensor | None, training: bool, places: Tensor | None = None) -> Message:
        seed = (self._seed + at.step * 0xA0761D6478BD642F + at.microbatch * 0xE7037ED1A0B428DB) & _MASK
        return Message(at, seed, training, samples, places)

    def state_dict(self) -> dict[str, Any]:
        """What is kept between two steps, and the spec it was kept for."""
        state = {} if self._state is None else self._state.state_dict()
        return {"spec": str(self), "state": state, "last": tuple(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is none, or was kept for another spec. Nothing has changed then.
        """
        self.check_state(state)
        if self._state is not None:
            self._state.load_state_dict(state["state"])
        self._last = At(*state["last"])

    def check_state(self, state: object) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this state; nothing changes."""
        if not isinstance(state, Mapping) or (lacking := {"spec", "state", "last"} - state.keys()):
            what = f"lacks {', '.join(sorted(lacking))}" if isinstance(state, Mapping) else f"is {type(state).__name__}"
            raise ValueError(f"this is no state of a channel: it {what}")
        if state["spec"] != str(self):
            raise ValueError(f"the state was kept for {state['spec']!r}, and this is {str(self)!r}")
        last = state["last"]
        if not isinstance(last, Sequence) or len(last) != 2 or not all(type(x) is int and x >= -1 for x in last):
            raise ValueError(f"the state has {last!r} as the last message, and a step and a micro-batch belong there")
        if not isinstance(state["state"], Mapping):
            raise ValueError(f"the state has {type(state['state']).__name__} where a dictionary of buffers belongs")
        if self._state is not None:
            self._state.check_state(state["state"])
            self._carrier.check_keys(state["state"])


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
