"""A boundary between two pipeline stages, simulated in one process, to measure what compression there does to training.

A boundary compresses and restores tensors with the same channels and seeds as two machines would;
:class:`~narrowband.pipeline.CompressedStage` trains to the same losses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowband.averaging.core import is_in_backward
from narrowband.compiler import unseen
from narrowband.errors import UnsupportedError
from narrowband.pipeline.channel import At, Channel, ChannelStats
from narrowband.pipeline.pairs import ChannelPairs, compressible
from narrowband.pipeline.warmup import warm_up
from narrowband.units import whole_number

if TYPE_CHECKING:
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression

__all__ = ["Boundary"]

log = logging.getLogger("narrowband")


class Boundary(nn.Module):
    """Compress the activation that passes through in forward, and its gradient in backward.

    Put it between layers where a pipeline would cut the model. It takes one tensor or several; each has its own
    buffers. Tensors that are empty or not floating point pass through unchanged.

    Args:
        forward: the spec for activations, see :class:`Channel`. ``topk:density=0.1,scope=sample`` keeps a tenth of
            every sample, so that no sample is dropped altogether.
        backward: the spec for their gradients. ``topk:density=0.1,reuse=forward`` keeps the elements that were chosen
            in forward, so no indices are sent.
        index: which boundary of the model this is, from 0. Boundaries with the same index draw the same random numbers.
        seed: the seed of stochastic rounding.
        warmup_steps: how many training steps are uncompressed at first.
        warmup_epochs: the same in epochs: call :meth:`set_epoch` at the beginning of each.
        microbatches: forward passes per training step; also the number of calls before one backward, as in a siamese
            net.
        compress_in_eval: whether to compress in ``model.eval()``, too, without changing buffers. A model that was
            trained with compression needs it when it is evaluated (Rudakov et al. 2023, arXiv 2401.07788).

    Attributes:
        compress_in_eval: as given; may be changed at any time.
        samples: for ``aq-sgd``: the ids, int64 (B,), of the samples of the next call. Reset to None by that call.

    Raises:
        ValueError: a spec is not valid.
        UnsupportedError: a spec cannot work between stages; or, in backward, activation checkpointing runs the boundary
            again.

    Example:
        >>> model = nn.Sequential(*layers[:4], nb.Boundary("topk:density=0.1", "topk:density=0.1"), *layers[4:])
        >>> loss(model(x), y).backward()
        >>> print(model[4].stats())

    Buffers are in the module's ``state_dict``. Where several ranks train one model, ``torch.distributed.checkpoint``
    keeps the buffers of one rank only; to keep all of them, save one file per rank. Under ``torch.compile`` a boundary
    breaks the graph. Dynamo compiles no loop with a graph break in it, such as that of ``nn.Sequential``: compile the
    parts before and after the boundary instead. A part that activation checkpointing runs twice must not contain a
    boundary: the second run would send another message, and raises an error. A boundary that compresses in neither
    direction logs a warning, once.
    """

    def __init__(
        self,
        forward: str | Codec | Compression = "none",
        backward: str | Codec | Compression = "none",
        *,
        index: int = 0,
        seed: int = 0,
        warmup_steps: int = 0,
        warmup_epochs: int = 0,
        microbatches: int = 1,
        compress_in_eval: bool = True,
    ) -> None:
        super().__init__()
        microbatches = whole_number("microbatches", microbatches)
        if microbatches < 1:
            raise ValueError(f"microbatches={microbatches} must be at least 1")
        config = {"seed": seed, "warmup_steps": warmup_steps, "warmup_epochs": warmup_epochs}
        self._channels = ChannelPairs(forward, backward, boundary=index, end="both", **config)
        self._microbatches = microbatches
        self._passes = 0
        self.compress_in_eval = compress_in_eval
        self.samples: Tensor | None = None
        if self._channels.exact:
            log.warning(
                "this boundary compresses nothing: forward=%r, backward=%r; pass a spec such as uniform:bits=8",
                *map(str, self._channels.of(0)),
            )
        if not torch.cuda.is_available():  # only CPU loops are compiled, and the tensors' device is not known yet
            warm_up(forward, backward)

    def set_epoch(self, epoch: int) -> None:
        """Announce that an epoch begins, from 0 on, where the warm-up counts epochs."""
        self._channels.set_epoch(epoch)

    @unseen
    def forward(self, *tensors: Tensor) -> Any:
        """Return the restored tensors, as they arrive on the other side: a tensor for one, a tuple for several.

        Raises:
            TypeError: an argument is no tensor.
        """
        for number, x in enumerate(tensors):
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"argument {number} of a boundary must be a tensor, got {type(x).__name__}: pass the tensors of a "
                    "tuple one by one, as in boundary(*tensors), and nothing else"
                )
        if self.training and is_in_backward() and not self._channels.exact:
            raise UnsupportedError(
                "this boundary was called inside backward: activation checkpointing recomputes a part that contains "
                "it. The second run would send another message, and gradients would not match the first one. Let the "
                "checkpointed parts end before the boundary and begin after it"
            )
        at = At(*divmod(self._passes, self._microbatches))
        samples, self.samples = self.samples, None
        if self.training:
            self._passes += 1
        elif not self.compress_in_eval:
            return tensors[0] if len(tensors) == 1 else tensors
        cross: Any = _Cross.apply
        out = tuple(
            cross(x, self._channels.of(number), self.training, samples, at) if compressible(x) else x
            for number, x in enumerate(tensors)
        )
        return out[0] if len(out) == 1 else out

    def stats(self) -> dict[str, ChannelStats]:
        """Return the traffic so far of the directions ``forward`` and ``backward``, summed over all tensors."""
        return {direction: self._channels.stats(at) for at, direction in enumerate(("forward", "backward"))}

    def get_extra_state(self) -> dict[str, Any]:
        """Return buffers and the number of training passes done, for ``state_dict``."""
        return {
            "passes": self._passes,
            "channels": self._channels.state_dict(),
        }

    def set_extra_state(self, state: Any) -> None:
        """Restore what :meth:`get_extra_state` returned.

        Raises:
            ValueError: this is not such a state, or is one of another spec. Nothing has been changed then.
        """
        if not isinstance(state, Mapping) or (lacking := {"passes", "channels"} - state.keys()):
            what = f"lacks {', '.join(sorted(lacking))}" if isinstance(state, Mapping) else f"is {type(state).__name__}"
            raise ValueError(f"this is not the state of a boundary: it {what}")
        if type(state["passes"]) is not int or state["passes"] < 0:
            raise ValueError(f"'passes' in the state must be a whole number of at least 0, got {state['passes']!r}")
        self._channels.load_state_dict(state["channels"])
        self._passes = state["passes"]

    def extra_repr(self) -> str:
        there, back = self._channels.of(0)
        return f"forward={str(there)!r}, backward={str(back)!r}"


class _Cross(torch.autograd.Function):
    """Send one tensor through the forward channel, and its gradient through the backward channel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, channels: tuple[Channel, Channel], training: bool, samples: Tensor | None, at: At
    ) -> Tensor:
        there, ctx.back = channels
        ctx.config = {"samples": samples, "training": training}
        ctx.at = at
        arrived = torch.empty_like(x)
        payload = there.pack(x, at, arrived=arrived, **ctx.config)
        # All evaluation passes share one message number, so the channel cannot store their indices by it.
        ctx.places = there.places(payload, tuple(x.shape)) if ctx.needs_input_grad[0] and not training else None
        return arrived

    @staticmethod
    @once_differentiable
    @unseen
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        arrived = torch.empty_like(gradient)
        ctx.back.pack(gradient, ctx.at, arrived=arrived, places=ctx.places, **ctx.config)
        return arrived, None, None, None, None
