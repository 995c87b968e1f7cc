"""EF21: compress the change of the gradient (Richtárik, Sokolov & Fatkhullin, arXiv 2106.05203, algorithm 2).

With gradient x, codec C, the reference g that the other ranks hold of this rank's gradient, and h, the mean of all g::

    send c = C(x − g)       # encode
    g = g + c               # commit
    h = h + mean of all c   # deliver: the mean of all g, and what is delivered

Error feedback adds up what codecs leave out and sends it later, however late. EF21 has no residual: g follows the
gradient, x − g becomes small where gradients settle, and then so does the error of C. This needs a C whose error is
smaller than its input (``topk``, ``sign``, ``lowrank``, quantizers of enough bits); with any other C, g diverges. EF21
also needs large batches, as error feedback of every kind does in theory (Fatkhullin, Tyurin & Richtárik, Momentum
provably improves error feedback, 2023), because the change of a noisy gradient has more noise than the gradient.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.codecs.base import dims, squared_norm_late
from narrowband.errors import UnsupportedError
from narrowband.feedback.base import Encoded, Feedback, Norms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from narrowband.codecs import Codec, Shape

__all__ = ["EF21"]

#: A change of this magnitude counts as not finite: if g + C(x − g) overflowed float32, g would stay inf forever.
TOO_LARGE = 2.0**100

#: Prefix of h's names in a state. h is the same on all receivers.
_SHARED = "shared/"


@dataclass(unsafe_hash=True)
class EF21(Feedback):
    """What is sent is how the gradient has changed, and there is no residual; costs two float32 per element.

    A sender keeps g and a receiver keeps h; in data parallelism each rank is both (arXiv 2106.05203). Between two
    processes, each side has an object of its own: the sender calls :meth:`encode` and :meth:`commit`, and the receiver
    calls only :meth:`deliver`.

    h is delivered, not the mean of the changes that were just encoded. So a rank that did not use a parameter gets a
    gradient for it if any rank used it, and the rank's own zero counts like any other gradient, in this step and later
    ones. Where no rank used the parameter, DDP ignores what is delivered, and g and h go towards zero.

    Example:
        >>> handle = nb.compress_gradients(model, "topk:density=0.05+ef21")
    """

    name: ClassVar[str] = "ef21"
    incremental: ClassVar[bool] = True

    _sent_references: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _received_references: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def sent_reference(self, key: str) -> Tensor | None:
        """Return g, what the receivers hold of this sender under ``key``, flat float32; None if nothing was ever sent.

        With one sender, g is also what receivers deliver, so a process that is both ends need not decode.
        """
        return self._sent_references.get(key)

    def received_reference(self, key: str) -> Tensor | None:
        """Return h, the sum of all mean changes received under ``key``, flat float32; None if there were none."""
        return self._received_references.get(key)

    def check(self, codec: Codec) -> None:
        if not codec.means_add_up:
            raise UnsupportedError(
                "ef21 adds up means of changes, which is correct only if means are over all ranks, and those of "
                f"'{codec}' are not; leave out mean=senders, or write '{codec}+ef'"
            )

    # ---- the sender --------------------------------------------------------------------------------------------------

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
            raise ValueError(
                "ef21 cannot commit while it encodes (commit=True): what it adds cannot be undone bit by bit"
            )
        g = self._of(self._sent_references, key, x)
        change = x.sub_(g) if x.dtype == torch.float32 else x.float().sub_(g)
        finite = kernels.all_finite(change, below=TOO_LARGE)
        payload = codec.encode(change.view(dims(shape)), seed=seed, out=out)
        return finite and codec.is_finite(payload, shape), payload

    def commit(
        self, key: str, x: Tensor, codec: Codec, payload: Tensor, *, shape: Shape, seed: int, measure: bool = False
    ) -> Norms | None:
        g = self._sent_references[key]
        norms = self._measured(Encoded(key, x, codec, payload, shape, seed)) if measure else None
        codec.decode(payload, g.view(dims(shape)), seed=seed, accumulate=True)
        return norms

    def _measured(self, sent: Encoded) -> Norms:
        """Return the norms of a change and of what its payload lacks. The tensor's memory may be overwritten."""
        x = sent.x
        change = x if x.dtype == torch.float32 else x.float().sub_(self._sent_references[sent.key])
        before = squared_norm_late(change)
        lost = change.view(dims(sent.shape))
        sent.codec.decode(sent.payload, lost, seed=sent.seed, weight=-1.0, accumulate=True)
        return Norms(before, squared_norm_late(change))

    def roll_back(self, key: str, x: Tensor) -> None:
        """Nothing to do: g changes only in :meth:`commit`."""

    @property
    def goes_ahead(self) -> bool:
        return True

    def commit_unless(self, bad: Tensor, sent: Sequence[Encoded], *, measure: bool = False) -> list[Norms]:
        norms = [self._measured(each) for each in sent] if measure else []
        references, xs = [self._sent_references[each.key] for each in sent], [each.x for each in sent]
        torch._foreach_copy_(xs, references)
        for codec in dict.fromkeys(each.codec for each in sent):
            own = [each for each in sent if each.codec == codec]
            ends = [*itertools.accumulate(each.payload.numel() for each in own)]
            codec.decode_means(
                torch.cat([each.payload for each in own]).view(1, -1),
                [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)],
                [self._sent_references[each.key] for each in own],
                shapes=[each.shape for each in own],
                seeds=[[each.seed] for each in own],
                accumulate=True,
            )
        kernels.restore_all_if(bad, references, xs)
        return norms

    def encodes_all(self, codec: Codec) -> bool:
        return codec.encodes_several

    def encode_all(
        self, keys: Sequence[str], xs: Sequence[Tensor], codec: Codec, *, seeds: Sequence[int], outs: Sequence[Tensor]
    ) -> bool:
        """Encode several changes. They are not committed: see :meth:`commit_unless`."""
        changes = list(xs)
        torch._foreach_sub_(changes, [self._of(self._sent_references, key, x) for key, x in zip(keys, xs, strict=True)])
        tops = torch.stack(torch._foreach_norm(changes, math.inf))
        finite = kernels.holds((tops < TOO_LARGE).all())
        return codec.encode_all(xs, outs, seeds=seeds) and finite

    # ---- the receiver ------------------------------------------------------------------------------------------------

    def deliver(self, key: str, x: Tensor) -> None:
        self.deliver_all([key], [x])

    def deliver_all(self, keys: Sequence[str], xs: Sequence[Tensor]) -> None:
        references = [self._of(self._received_references, key, x) for key, x in zip(keys, xs, strict=True)]
        torch._foreach_add_(references, list(xs))
        torch._foreach_copy_(list(xs), references)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _of(self, states: dict[str, Tensor], key: str, x: Tensor) -> Tensor:
        """Return g or h under ``key``, zeros at first."""
        state = states.get(key)
        if state is None:
            state = states[key] = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        elif state.numel() != x.numel():
            raise ValueError(
                f"the state of {key!r} has {state.numel()} elements, got a tensor of {x.numel()}; use another key, "
                "or load the state of this model"
            )
        return state

    def residual(self, key: str) -> None:
        """Return None: there is no residual."""

    def scale(self, factor: float) -> None:
        for states in (self._sent_references, self._received_references):
            for state in states.values():
                state.mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        return self._sent_references | {_SHARED + key: h for key, h in self._received_references.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sent_references, self._received_references = {}, {}
        for name, value in state.items():
            states = self._received_references if name.startswith(_SHARED) else self._sent_references
            states[name.removeprefix(_SHARED)] = (
                value.detach().reshape(-1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            )

    def fits(self, name: str, value: Tensor, layers: Mapping[str, Shape], others: Mapping[str, Shape]) -> bool:
        return super().fits(name.removeprefix(_SHARED), value, layers, others)

    @staticmethod
    def merged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Let every rank start with g = h, where h is equal on all former ranks. So h is again the mean of all g."""
        shared = {name: h for state in states for name, h in state.items() if name.startswith(_SHARED)}
        return shared | {name.removeprefix(_SHARED): h for name, h in shared.items()}
