"""The channels of one boundary: for each tensor that crosses it, one for the activation and one for the gradient."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from narrowband.pipeline.channel import COMPRESSIBLE, Channel, ChannelStats
from narrowband.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.feedback import Compression

__all__ = ["ChannelPairs", "compressible"]

log = logging.getLogger("narrowband")

#: Warnings that have been logged: each is logged once per process.
_said: set[str] = set()

#: The most tensors per boundary. A channel's index in the model is (boundary · _MOST_TENSORS + tensor) · 2 + direction.
_MOST_TENSORS = 1 << 10


def compressible(x: Tensor) -> bool:
    """Whether a codec can encode the tensor; all others cross a boundary unchanged."""
    return x.dtype in COMPRESSIBLE and x.numel() > 0


class ChannelPairs:
    """The channels at one end of a boundary, created when a tensor first needs them.

    Args:
        forward: the spec for activations.
        backward: the spec for gradients.
        boundary: which boundary of the model this is, from 0.
        end: ``before``, ``behind`` or ``both``; a part of file names, since two ends on one machine need two files.
        seed, warmup_steps, warmup_epochs: as for :class:`Channel`.
    """

    def __init__(
        self,
        forward: str | Codec | Compression,
        backward: str | Codec | Compression,
        *,
        boundary: int,
        end: str,
        seed: int = 0,
        warmup_steps: int = 0,
        warmup_epochs: int = 0,
    ) -> None:
        self._specs = forward, backward
        self._boundary, self._end = whole_number("index", boundary), end
        config = {"seed": seed, "warmup_steps": warmup_steps, "warmup_epochs": warmup_epochs}
        self._config: dict[str, Any] = {name: whole_number(name, value) for name, value in config.items()}
        self._epoch: int | None = None
        self._pairs: list[tuple[Channel, Channel]] = []
        for channel in self.of(0):  # created here already, so that an invalid spec raises here
            warning = channel.warning
            if warning is not None and warning not in _said:
                _said.add(warning)
                log.warning("%s", warning)

    def of(self, tensor: int) -> tuple[Channel, Channel]:
        """Return the channels of the n-th tensor, from 0: the activation's, and the gradient's."""
        while len(self._pairs) <= tensor:
            self._pairs.append(self._pair(len(self._pairs)))
        return self._pairs[tensor]

    def _pair(self, tensor: int) -> tuple[Channel, Channel]:
        index = (self._boundary * _MOST_TENSORS + tensor) * 2
        names = (f"{direction}-{self._boundary}-{tensor}-{self._end}" for direction in ("forward", "backward"))
        there = Channel(self._specs[0], index=index, name=next(names), **self._config)
        back = Channel(self._specs[1], index=index + 1, name=next(names), forward=there, **self._config)
        if self._epoch is not None:
            there.set_epoch(self._epoch)
            back.set_epoch(self._epoch)
        return there, back

    def __iter__(self) -> Iterator[Channel]:
        return (channel for pair in self._pairs for channel in pair)

    def set_epoch(self, epoch: int) -> None:
        """Announce that an epoch begins, from 0 on."""
        self._epoch = epoch = whole_number("epoch", epoch)
        for channel in self:
            channel.set_epoch(epoch)

    @property
    def exact(self) -> bool:
        """Whether neither direction compresses anything."""
        return all(channel.exact for channel in self.of(0))

    @property
    def by_sample(self) -> bool:
        """Whether a direction needs to know which samples a tensor holds."""
        return any(channel.by_sample for channel in self.of(0))

    def identity(self) -> list[object]:
        """Return the configuration that both ends must have in common."""
        return [*map(str, self.of(0)), self._boundary, sorted(self._config.items())]

    def stats(self, direction: int) -> ChannelStats:
        """Return the traffic so far in a direction: 0 forward, 1 backward."""
        return ChannelStats.total(pair[direction].stats for pair in self._pairs)

    def state_dict(self) -> tuple[list[dict[str, Any]], ...]:
        """Return what the channels keep between two steps.

        The outer container is a tuple, since ``torch.distributed.checkpoint`` stores a tuple as one value. It descends
        into a list, and loads only those entries that a new model's state has, which does not have any buffers yet.
        """
        return tuple([channel.state_dict() for channel in pair] for pair in self._pairs)

    def load_state_dict(self, state: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Restore what :meth:`state_dict` returned. Channels that did not exist in it are reset.

        Raises:
            ValueError: this is not such a state, or is one of another spec. Nothing has been changed then.
        """
        self.check_state(state)
        for tensor in range(max(len(state), len(self._pairs))):
            pair = state[tensor] if tensor < len(state) else [new.state_dict() for new in self._pair(tensor)]
            for channel, one in zip(self.of(tensor), pair, strict=True):
                channel.load_state_dict(one)

    def check_state(self, state: object) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this state; nothing changes."""
        if not isinstance(state, Sequence) or len(state) > _MOST_TENSORS:
            raise ValueError(f"the state must hold two channels for each tensor, got {type(state).__name__}")
        for tensor, pair in enumerate(state):
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"the state of tensor {tensor} must hold two channels, got {type(pair).__name__}")
            own = self._pairs[tensor] if tensor < len(self._pairs) else self._pair(tensor)
            for channel, one in zip(own, pair, strict=True):
                channel.check_state(one)
