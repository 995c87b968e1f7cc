"""One end of a channel, which carries one tensor in one direction over the boundary between two stages.

The sending end encodes a tensor as a payload (:meth:`Channel.pack`), and the receiving end decodes it
(:meth:`Channel.unpack`). A process that plays both ends does both in one call of ``pack``. Both ends know the size of a
payload before it is sent, so payloads travel in the fixed buffers that a pipeline schedule wants.

The spec's feedback determines how a tensor travels and what is kept between two messages: see :mod:`.carriers`. With
feedback, both ends must see micro-batches in the same order; the channel checks that.

Shapes: B samples of a micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from narrowband.codecs import Codec, Identity, SelectingCodec
from narrowband.errors import PayloadError, UnsupportedError
from narrowband.feedback import Compression, Feedback, SampleState, compression
from narrowband.pipeline.carriers import At, AtPlaces, BySample, Carrier, Compensated, Message
from narrowband.stats import StepRecord, latest
from narrowband.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

__all__ = ["COMPRESSIBLE", "At", "Channel", "ChannelStats"]

#: The dtypes that codecs encode.
COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)

_PLAIN = Identity()
_REUSE = "reuse"
_MASK = (1 << 64) - 1

#: The relative error is measured for the first message and every so many, since measuring must decode the payload.
_MEASURE_EVERY = 50


#: The number of every message in evaluation, so that each evaluation draws the same random numbers.
_EVALUATION = At(0, 0)


@dataclass
class ChannelStats(StepRecord):
    """Traffic of a channel so far.

    Attributes:
        messages: the number of payloads.
        raw_bytes: the bytes of the tensors without compression.
        sent_bytes: the bytes of the payloads.
        relative_error: ``‖x − x̂‖² / ‖x‖²`` of a tensor x and the tensor x̂ that arrives. It is measured for the first
            message and every 50th; this is the latest value, None before the first. Of several channels: the mean.
    """

    messages: int = 0
    relative_error: float | None = latest(compare=False)  # the receiving end cannot know it

    @classmethod
    def total(cls, several: Iterable[ChannelStats]) -> ChannelStats:
        """Sum the counts of several channels, and average the relative errors that were measured."""
        several = list(several)
        measured = [stats.relative_error for stats in several if stats.relative_error is not None]
        return cls(
            messages=sum(stats.messages for stats in several),
            raw_bytes=sum(stats.raw_bytes for stats in several),
            sent_bytes=sum(stats.sent_bytes for stats in several),
            relative_error=sum(measured) / len(measured) if measured else None,
        )


class Channel:
    """One end of a channel, or both ends in one process.

    Args:
        spec: a codec, with ``+ef``, ``+ef-mixed``, ``+ef21`` or ``+aq-sgd`` if wanted. With ``reuse=forward`` among the
            keys of ``topk``, the channel sends the elements that the forward direction chose.
        seed: the seed of stochastic rounding and sampling; the same on both ends.
        index: the number of this channel in the model; channels with different numbers draw different random numbers.
        name: distinguishes channel ends on one machine that keep their buffers in the same folder.
        warmup_steps: how many steps are uncompressed at first.
        warmup_epochs: the same in epochs: announce each epoch with :meth:`set_epoch`.
        forward: the channel of the forward direction, whose indices ``reuse=forward`` takes.

    Raises:
        ValueError: the spec is not valid.
        UnsupportedError: the spec cannot work between stages.

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
            raise ValueError(f"warmup_steps={warmup_steps} and warmup_epochs={warmup_epochs} must be at least 0")
        if warmup_steps and warmup_epochs:
            raise ValueError("warmup_steps and warmup_epochs cannot be given together: give one of them")
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
        #: Message number and shape → the indices that the other direction will take; those of one step at most.
        self._places: dict[tuple[At, tuple[int, ...]], Tensor] = {}
        self.keeps_places = False
        self._carrier = self._carrier_for(forward)

    def _carrier_for(self, forward: Channel | None) -> Carrier:
        """Return the carrier that the spec asks for.

        Raises:
            ValueError, UnsupportedError: the spec cannot work here.
        """
        if not self.codec.fixed_size:
            raise UnsupportedError(
                f"{self} cannot be used between stages: the length of its payloads depends on the data, and the "
                "receiver must know the length in advance. Use topk"
            )
        state = self._state
        if state is not None and not state.takes_activations:
            raise UnsupportedError(
                f"{self} works only for gradients of data parallelism. Between stages use a codec, alone or with +ef, "
                "+ef-mixed, +ef21 or +aq-sgd"
            )
        if not self.reuses:
            if isinstance(state, SampleState):
                return BySample(self.codec, state, self._name)
            return Compensated(self.codec, state) if isinstance(state, Feedback) else Carrier(self.codec)
        if forward is None:
            raise UnsupportedError(
                "reuse=forward is valid only in the backward spec: it uses the indices that the forward direction chose"
            )
        if not isinstance(forward.codec, SelectingCodec) or forward.by_sample:
            raise UnsupportedError(
                f"reuse=forward uses the indices that topk chose in the forward direction, but the forward spec is "
                f"{str(forward)!r}: use topk without aq-sgd there, or remove reuse=forward"
            )
        if state is not None:
            raise UnsupportedError(f"{self}: reuse=forward cannot be combined with feedback")
        assert isinstance(self.codec, SelectingCodec)
        if self.codec.density != forward.codec.density:
            raise ValueError(
                "reuse=forward sends the elements that the forward direction chose: expected forward's density="
                f"{forward.codec.density}, got density={self.codec.density}"
            )
        forward.keeps_places = True
        return AtPlaces(self.codec, forward.codec, forward.take_places)

    def __str__(self) -> str:
        return f"{self.compression},reuse=forward" if self.reuses else str(self.compression)

    @property
    def exact(self) -> bool:
        """Whether the channel compresses nothing, so that tensors arrive unchanged."""
        return self.codec.exact and self._state is None

    @property
    def by_sample(self) -> bool:
        """Whether the channel needs the sample ids of a tensor."""
        return self._carrier.by_sample

    @property
    def warning(self) -> str | None:
        """What users should know before they train with this spec, if anything."""
        return self._state.warning(self.codec) if isinstance(self._state, SampleState) else None

    def warming_up(self, at: At) -> bool:
        """Whether this message is sent uncompressed, as a part of the warm-up.

        Raises:
            ValueError: the warm-up counts epochs, and :meth:`set_epoch` has not been called.
        """
        if not self._warmup_epochs:
            return at.step < self._warmup_steps
        if self._epoch is None:
            raise ValueError(
                f"warmup_epochs={self._warmup_epochs} is set, but set_epoch was not called: call set_epoch(epoch) at "
                "the beginning of every epoch, from 0 on"
            )
        return self._epoch < self._warmup_epochs

    def set_epoch(self, epoch: int) -> None:
        """Announce that an epoch begins, from 0 on; call it on both ends."""
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
        """Return the bytes of the payload that :meth:`pack` makes for this message and :meth:`unpack` expects.

        Args:
            shape, dtype: the tensor's, (B, …).
            at: the number of the message.
            samples: (B,), the ids of the samples, for ``aq-sgd``.
            training: see :meth:`pack`.
        """
        self._check_dtype(dtype)
        message = self._message(at, samples, training)
        if training and self.warming_up(at):
            nbytes = _PLAIN.payload_nbytes(shape, dtype)
        else:
            nbytes = self._carrier.payload_nbytes(shape, dtype, message)
        return len(self._carrier.label(message, nbytes)) + nbytes

    def most_nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the most bytes that a payload of training may have where its length depends on the samples."""
        assert isinstance(self._carrier, BySample)
        return self._carrier.most_nbytes(shape, dtype)

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
        """Encode ``x`` as a payload, flat uint8.

        Args:
            x: (B, …), float32, float16 or bfloat16. It is not changed.
            at: the number of the message; later messages have larger numbers.
            samples: (B,), int64, the ids of the samples, for ``aq-sgd``.
            training: if False, buffers are read and not updated.
            arrived: for a process that plays both ends: receives what the other end will decode; x's shape and dtype.
            places: with ``reuse=forward`` in evaluation: the indices that forward chose, see :meth:`places`.

        Raises:
            TypeError: the codec does not take this dtype; with feedback, no channel takes another than these.
            ValueError: the samples do not fit the tensor.
            UnsupportedError: the message is out of order, and the spec's feedback needs the order.
        """
        self._check_dtype(x.dtype)
        x = x.detach().contiguous().resolve_neg()
        if training:
            self._in_order(at)
        else:
            at = _EVALUATION
        measure = training and self.stats.messages % _MEASURE_EVERY == 0
        flat = torch.empty_like(x) if (arrived is None and measure) else arrived
        if flat is not None and not flat.is_contiguous():
            flat = torch.empty_like(x)
        message = self._message(at, samples, training, places)
        payload = self._pack(x, message, flat)
        if label := self._carrier.label(message, payload.numel()):
            payload = torch.cat((torch.frombuffer(bytearray(label), dtype=torch.uint8).to(x.device), payload))
        if measure and flat is not None:
            self._measure(x, flat)
        if arrived is not None and flat is not None and flat is not arrived:
            arrived.copy_(flat)
        self._done(at, x, payload, training)
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
        """Decode a payload into ``out``, and return ``out``.

        Args:
            payload: what :meth:`pack` returned for this message on the other end.
            out: (B, …), with the tensor's shape and dtype.
            at, samples, training: as on the other end.

        Raises:
            PayloadError: the payload has another length, or an index out of range. Nothing has changed then, and a good
                copy of the message can be unpacked. With ``aq-sgd``, also if it is of other samples.
        """
        self._check_dtype(out.dtype)
        if training:
            self._in_order(at)
        else:
            at = _EVALUATION
        flat = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        message = self._message(at, samples, training)
        self._unpack(self._unlabelled(payload, message), flat, message)
        if flat is not out:
            out.copy_(flat)
        self._done(at, out, payload, training)
        return out

    def _unlabelled(self, payload: Tensor, message: Message) -> Tensor:
        """Return a payload without its label.

        Raises:
            PayloadError: the label is not the one that this end would give it.
        """
        size = len(self._carrier.label(message, 0))
        rest = payload[size:]
        if size and payload[:size].cpu().numpy().tobytes() != self._carrier.label(message, rest.numel()):
            assert message.samples is not None
            ids = torch.as_tensor(message.samples, dtype=torch.int64, device="cpu")
            first = ", ".join(map(str, ids[:4].tolist()))
            raise PayloadError(
                f"step {message.at.step}, micro-batch {message.at.microbatch}: a message of {rest.numel()} bytes does "
                f"not belong to the samples that are expected here, {first}, … ({len(ids)} ids). Set "
                "stage.samples on all ranks to the same ids in the same order, in every step: ranks that shuffle need "
                "the same seed in every epoch"
            )
        return rest

    def _unpack(self, payload: Tensor, out: Tensor, message: Message) -> None:
        if message.training and self.warming_up(message.at):
            _PLAIN.decode(payload, out)
            self._carrier.whole(out, message)
            return
        self._keep_places(payload, out, message.at, message.training)  # first, since it raises for a damaged payload
        self._carrier.unpack(payload, out, message)

    # ---- both ends ---------------------------------------------------------------------------------------------------

    def _done(self, at: At, x: Tensor, payload: Tensor, training: bool) -> None:
        """Count a message that was packed or unpacked."""
        if training:
            self._last = at
        self.stats.messages += 1
        self.stats.raw_bytes += x.numel() * x.element_size()
        self.stats.sent_bytes += payload.numel()

    # ---- indices for the other direction -----------------------------------------------------------------------------

    def _keep_places(self, payload: Tensor, x: Tensor, at: At, training: bool) -> None:
        places = self.places(payload, tuple(x.shape)) if training else None
        if places is not None:
            for key in [key for key in self._places if key[0].step != at.step]:
                del self._places[key]  # of a pass that had no backward
            self._places[at, tuple(x.shape)] = places

    def places(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """Return the indices in a payload of :meth:`pack`; None where the other direction does not reuse them.

        Meant for a gradient in evaluation: messages there have no number of their own to store indices by.
        """
        if not self.keeps_places:
            return None
        assert isinstance(self.codec, SelectingCodec)
        return self.codec.places(payload, shape)

    @contextlib.contextmanager
    def take_places(self, at: At, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield the indices that this channel chose for a tensor of this shape, and drop them if all goes well.

        Raises:
            UnsupportedError: there are none.
        """
        places = self._places.get((at, shape))
        if places is None:
            raise UnsupportedError(
                f"reuse=forward: no indices are left for the gradient of shape {shape} at step {at.step}, micro-batch "
                f"{at.microbatch}: no tensor of this shape was sent forward then, its gradient has been sent already, "
                "or a later step has begun. If a Boundary is called several times before backward, set microbatches "
                "to the number of calls"
            )
        yield places
        del self._places[at, shape]

    # ---- state -------------------------------------------------------------------------------------------------------

    def reference_ids(self) -> Tensor | None:
        """Return the ids of the samples that have a buffer, ascending; None for a channel without such buffers."""
        return self._carrier.reference_ids()

    def keep_only(self, samples: Tensor) -> None:
        """Drop the buffers of all samples but these. The dropped ones are sent in full precision the next time."""
        self._carrier.keep_only(samples)

    def _in_order(self, at: At) -> None:
        if self._state is not None and at <= self._last:
            raise UnsupportedError(
                f"step {at.step}, micro-batch {at.microbatch} comes after step {self._last.step}, micro-batch "
                f"{self._last.microbatch}. With {self} both ends must see micro-batches in one order: use a schedule "
                "that keeps the order, or a spec without feedback"
            )

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Raise TypeError for a dtype that feedback would round: its buffers and messages are in float32."""
        if self._state is not None and dtype not in COMPRESSIBLE:
            raise TypeError(
                f"{self} takes tensors of float32, float16 or bfloat16, not {dtype}, which feedback would round to "
                "float32; convert the tensor, or send it without compression"
            )

    def _message(self, at: At, samples: Tensor | None, training: bool, places: Tensor | None = None) -> Message:
        seed = (self._seed + at.step * 0xA0761D6478BD642F + at.microbatch * 0xE7037ED1A0B428DB) & _MASK
        return Message(at, seed, training, samples, places)

    def state_dict(self) -> dict[str, Any]:
        """Return the spec, the feedback buffers, and the number of the last message."""
        state = {} if self._state is None else self._state.state_dict()
        return {"spec": str(self), "state": state, "last": tuple(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: this is not such a state, or is one of another spec. Nothing has been changed then.
        """
        self.check_state(state)
        if self._state is not None:
            self._state.load_state_dict(state["state"])
        self._last = At(*state["last"])

    def check_state(self, state: object) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this state; nothing changes."""
        if not isinstance(state, Mapping) or (lacking := {"spec", "state", "last"} - state.keys()):
            what = f"lacks {', '.join(sorted(lacking))}" if isinstance(state, Mapping) else f"is {type(state).__name__}"
            raise ValueError(f"this is not the state of a channel: it {what}")
        if state["spec"] != str(self):
            raise ValueError(
                f"the state is of a channel with spec {state['spec']!r}, but this channel has {str(self)!r}"
            )
        last = state["last"]
        if not isinstance(last, Sequence) or len(last) != 2 or not all(type(x) is int and x >= -1 for x in last):
            raise ValueError(f"'last' in the state must be (step, micro-batch), two whole numbers, got {last!r}")
        if not isinstance(state["state"], Mapping):
            raise ValueError(
                f"'state' in the state must be a dictionary of buffers, got {type(state['state']).__name__}"
            )
        if self._state is not None:
            self._state.check_state(state["state"])
            self._carrier.check_keys(state["state"])


def _parsed(spec: str | Codec | Compression) -> tuple[Compression, bool]:
    """Return the compression that a spec names without ``reuse=forward``, and whether that was there."""
    if not isinstance(spec, str):
        return compression(spec), False
    term, plus, feedback = spec.partition("+")
    name, _, keys = term.partition(":")
    pairs = [pair for pair in keys.split(",") if pair.partition("=")[0].strip() != _REUSE]
    reused = [pair.partition("=")[2].strip() for pair in keys.split(",") if pair.partition("=")[0].strip() == _REUSE]
    if not reused:
        return compression(spec), False
    if reused != ["forward"]:
        raise ValueError(f"reuse={reused[-1]} in {spec!r}: only reuse=forward is possible")
    rest = f"{name}:{','.join(pairs)}" if pairs else name
    chosen = compression(rest + plus + feedback)
    if not isinstance(chosen.codec, SelectingCodec):
        raise UnsupportedError(f"{spec!r}: only topk can be combined with reuse=forward")
    return chosen, True
