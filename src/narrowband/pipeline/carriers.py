"""How tensors travel through a channel: without feedback, with it, by sample, or at the other direction's indices.

===============  =====================================================================  ===========================
feedback         what travels for x                                                     kept between two messages
===============  =====================================================================  ===========================
none             C(x)                                                                   nothing
``ef``           C(x + e); e ← x + e − C(x + e)  (Seide et al. 2014)                     e, on the sender
``ef-mixed``     at the ⌈k/2⌉ largest elements of x and the ⌊k/2⌋ largest of e: x + e,  e, on the sender
                 or x at its own and e at its own (Rudakov et al., 2401.07788)
``ef21``         C(x − g); g ← g + C(x − g); the receiver uses g (2106.05203)           g, on both ends
``aq-sgd``       C(xᵢ − mᵢ) for each sample i; mᵢ ← mᵢ + C(xᵢ − mᵢ) (2206.01299)        mᵢ, on both ends
===============  =====================================================================  ===========================

Buffers e and g are kept per shape and shared by all micro-batches of that shape, as in Rudakov et al. ("global"). A
tensor that holds inf or NaN changes no buffer on either end, and is not finite when it arrives either.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from narrowband import kernels
from narrowband.feedback import Feedback, SampleState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from narrowband.codecs import Codec, SelectingCodec

__all__ = ["At", "AtPlaces", "BySample", "Carrier", "Compensated", "Message"]

#: The length of the digest of sample ids: so long that different ids never have the same.
_DIGEST_NBYTES = 8


class At(NamedTuple):
    """The number of a message in its channel: the training step and the micro-batch in it, both from 0."""

    step: int
    microbatch: int


@dataclass(frozen=True)
class Message:
    """What both ends know about a message before it is sent.

    Attributes:
        at: the number of the message.
        seed: the seed of its random numbers.
        training: whether the pass is a training pass, in which feedback buffers are updated.
        samples: (B,), the ids of the samples; None where the caller gave none.
        places: the indices of the elements that the other direction chose; None where the channel stores them by
            message number.
    """

    at: At
    seed: int
    training: bool
    samples: Tensor | None = None
    places: Tensor | None = None


class Carrier:
    """Sends each tensor without feedback: its payload alone restores it.

    Args:
        codec: encodes the tensors.
    """

    #: Whether the carrier needs the sample ids of a tensor.
    by_sample = False

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def payload_nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload, the same number on both ends."""
        return self.codec.payload_nbytes(shape, dtype)

    def label(self, message: Message, nbytes: int) -> bytes:
        """Return what goes before a payload of so many bytes, for the other end to compare with its own."""
        return b""

    def pack(self, x: Tensor, message: Message, arrived: Tensor | None) -> Tensor:
        """Return the payload of a tensor. Write to ``arrived``, if given, what the other end will decode."""
        payload = self.codec.encode(_finite_or_nan(x) if self.codec.shared_seed else x, seed=message.seed)
        if arrived is not None:
            self.codec.decode(payload, arrived, seed=message.seed)
        return payload

    def unpack(self, payload: Tensor, out: Tensor, message: Message) -> None:
        """Decode a payload of the other end into ``out``."""
        self.codec.decode(payload, out, seed=message.seed)

    def whole(self, x: Tensor, message: Message) -> None:
        """Note a tensor that was sent uncompressed."""

    def reference_ids(self) -> Tensor | None:
        """Return the ids of the samples that have a buffer, ascending; None for a carrier without such buffers."""
        return None

    def keep_only(self, samples: Tensor) -> None:
        """Drop the buffers of all samples but these. The dropped ones are sent in full precision the next time."""

    def check_keys(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless the buffers of a feedback state belong to tensors of this carrier."""


class Compensated(Carrier):
    """Sends tensors with feedback: the next message makes up for what a payload lost. All tensors become float32."""

    def __init__(self, codec: Codec, feedback: Feedback) -> None:
        super().__init__(codec)
        self._feedback = feedback

    def payload_nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, message: Message) -> int:
        return self.codec.payload_nbytes(shape, torch.float32)

    def pack(self, x: Tensor, message: Message, arrived: Tensor | None) -> Tensor:
        codec, feedback, key, shape = self.codec, self._feedback, _key(x), tuple(x.shape)
        training, seed = message.training, message.seed
        # A fresh tensor and not a copy like x: of a single expanded element, a copy would keep the stride of 0.
        scratch = torch.empty(x.numel(), dtype=torch.float32, device=x.device).copy_(x.reshape(-1))
        if training or self._has_buffer(key):
            commit = training and feedback.can_roll_back(scratch)
            finite, payload = feedback.encode(key, scratch, codec, shape=shape, seed=seed, commit=commit)
            if not training or not finite:
                feedback.roll_back(key, scratch)
            elif not commit:
                feedback.commit(key, scratch, codec, payload, shape=shape, seed=seed)
        else:
            finite, payload = True, codec.encode(scratch.view(shape), seed=seed)
        if not finite:  # x or x plus its residual overflowed: NaN tells the other end to ignore this message
            payload = codec.encode(torch.full(shape, torch.nan, dtype=torch.float32, device=x.device), seed=seed)
        if arrived is not None:
            if feedback.incremental and finite and training:
                reference = feedback.sent_reference(key)
                assert reference is not None
                arrived.copy_(reference.view(shape))
            else:
                base = feedback.sent_reference(key) if finite else None
                self._decode_onto(base, payload, arrived, seed)
        return payload

    def unpack(self, payload: Tensor, out: Tensor, message: Message) -> None:
        feedback, codec = self._feedback, self.codec
        if not (feedback.incremental and message.training):
            base = feedback.received_reference(_key(out))
            if base is not None and not codec.is_finite(payload, tuple(out.shape)):
                base = None  # as on the sending end
            self._decode_onto(base, payload, out, message.seed)
            return
        change = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        codec.decode(payload, change, seed=message.seed)
        if codec.is_finite(payload, tuple(out.shape)):
            feedback.deliver(_key(out), change.view(-1))
        if change is not out:
            out.copy_(change)

    def check_keys(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            key = name.rpartition("/")[2]
            shape = [int(size) for size in key.split("x") if size.isdecimal()]
            if _key_of(shape) != key or not self._feedback.fits(name, value, {key: shape}, {}):
                raise ValueError(
                    f"the state has {value.numel()} elements under {name!r}, which do not fit the shape in this name"
                )

    def _has_buffer(self, key: str) -> bool:
        feedback = self._feedback
        return (feedback.sent_reference(key) if feedback.incremental else feedback.residual(key)) is not None

    def _decode_onto(self, base: Tensor | None, payload: Tensor, out: Tensor, seed: int) -> None:
        """``out ← base + decoded``, in float32."""
        decoded = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self.codec.decode(payload, decoded, seed=seed)
        if base is not None:
            decoded.add_(base.view(out.shape))
        if decoded is not out:
            out.copy_(decoded)


class BySample(Carrier):
    """Sends in training the difference of each sample to its buffer; in evaluation, tensors without feedback.

    Args:
        codec: encodes the differences.
        state: the buffers.
        name: the name of the channel.
    """

    by_sample = True

    def __init__(self, codec: Codec, state: SampleState, name: str) -> None:
        super().__init__(codec)
        self._state, self._name = state, name

    def label(self, message: Message, nbytes: int) -> bytes:
        """Return in training a digest of the sample ids and of the length, which says what an end holds of them.

        Of ranks that shuffle differently, one would take a sample's buffer for that of another, and no length would
        tell.
        """
        if not message.training:
            return b""
        ids = torch.as_tensor(_named(message), dtype=torch.int64, device="cpu").contiguous().numpy().tobytes()
        return hashlib.blake2b(ids + nbytes.to_bytes(8, "little"), digest_size=_DIGEST_NBYTES).digest()

    def most_nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the most bytes, label included, of a message in training, whatever samples an end holds."""
        return _DIGEST_NBYTES + self._state.most_nbytes(self.codec, shape, dtype)

    def payload_nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, message: Message) -> int:
        if not message.training:
            return super().payload_nbytes(shape, dtype, message)
        return self._state.payload_nbytes(self._name, self.codec, shape, dtype, _named(message))

    def pack(self, x: Tensor, message: Message, arrived: Tensor | None) -> Tensor:
        if not message.training:
            return super().pack(x, message, arrived)
        samples = _named(message)
        return self._state.pack(self._name, x, self.codec, samples=samples, seed=message.seed, arrived=arrived)

    def unpack(self, payload: Tensor, out: Tensor, message: Message) -> None:
        if not message.training:
            super().unpack(payload, out, message)
        else:
            self._state.unpack(self._name, payload, out, self.codec, samples=_named(message), seed=message.seed)

    def whole(self, x: Tensor, message: Message) -> None:
        self._state.fill(self._name, x, _named(message))

    def reference_ids(self) -> Tensor | None:
        return self._state.reference_ids(self._name)

    def keep_only(self, samples: Tensor) -> None:
        self._state.keep_only(self._name, samples)

    def check_keys(self, state: Mapping[str, Any]) -> None:
        if others := ", ".join(sorted(state.keys() - {self._name})):
            raise ValueError(
                f"the state has buffers of {others}, but this channel is {self._name}: the state is of another boundary"
            )


class AtPlaces(Carrier):
    """Sends the values of the elements that the other direction chose, and no indices.

    Args:
        codec: encodes the values.
        chooser: the codec of the other direction, which determines how many elements there are.
        places: message number and shape → a context that yields the indices that the other direction chose, and drops
            them if all goes well. Called for each message, unless :attr:`Message.places` has them.
    """

    def __init__(
        self,
        codec: SelectingCodec,
        chooser: SelectingCodec,
        places: Callable[[At, tuple[int, ...]], AbstractContextManager[Tensor]],
    ) -> None:
        super().__init__(codec)
        self._selecting, self._chooser, self._places = codec, chooser, places

    def payload_nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, message: Message) -> int:
        return self._selecting.values_nbytes(self._chooser.kept(shape))

    def pack(self, x: Tensor, message: Message, arrived: Tensor | None) -> Tensor:
        with self._places_of(message, x) as places:
            payload = self._selecting.encode_at(_finite_or_nan(x), places)
            if arrived is not None:
                self._selecting.decode_at(payload, places, arrived)
        return payload

    def unpack(self, payload: Tensor, out: Tensor, message: Message) -> None:
        with self._places_of(message, out) as places:
            self._selecting.decode_at(payload, places, out)

    def _places_of(self, message: Message, x: Tensor) -> AbstractContextManager[Tensor]:
        if message.places is not None:
            return contextlib.nullcontext(message.places)
        return self._places(message.at, tuple(x.shape))


def _finite_or_nan(x: Tensor) -> Tensor:
    """Return x, or NaN throughout if any element is not finite: for codecs that do not look at every element."""
    return x if kernels.all_finite(x.reshape(-1).float()) else torch.full_like(x, torch.nan)


def _key(x: Tensor) -> str:
    """Return the key of a tensor's buffer: there is one buffer per shape."""
    return _key_of(x.shape)


def _key_of(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _named(message: Message) -> Tensor:
    if message.samples is None:
        raise ValueError(
            "aq-sgd needs the sample ids of every micro-batch: before the step, set .samples to an int64 tensor with "
            "one id for each sample"
        )
    return message.samples
