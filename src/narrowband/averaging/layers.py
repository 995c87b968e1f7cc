"""What each layer of a model is compressed with: codec, feedback, and the way it travels.

At first all have what the model was given; a plan gives layers something of their own, at any time between two steps.
the layer's residual then moves along to its new feedback.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from narrowband.adapt.policy import as_choice
from narrowband.codecs import Codec, Identity
from narrowband.collectives import COLLECTIVES, allreduce_nbytes, choose
from narrowband.collectives.exchange import Collective, check
from narrowband.errors import UnsupportedError
from narrowband.feedback import (
    Compression,
    ErrorFeedback,
    Feedback,
    Layout,
    State,
    available,
    compression,
    methods,
)
from narrowband.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from narrowband.averaging.agreement import Facts
    from narrowband.feedback import Method

__all__ = ["COMPRESSIBLE", "Layer", "Layers", "Parameter", "Vector", "Way", "for_gradients", "norms_of"]

log = logging.getLogger(__name__)

#: The name of a collective: one of ``COLLECTIVES``, or what a feedback brings.
Way = str

COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)

#: From here on a vector of small parameters is worth a message in the middle of backward: what it would take at its
#: end is 2 ms at 200 Mbit/s.
EARLY_NBYTES = 1 << 15
_NORMS = (
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
    torch.nn.modules.batchnorm._NormBase,  # the common base of all batch and instance norms
)


class Vector(NamedTuple):
    """Small parameters that travel end to end in one message. What they are depends on the model alone, not on how
    DDP makes its buckets, so that a resumed run adds them up in the same order.

    Attributes:
        dtype: of all of them.
        compressed: whether they are compressed as one.
        early: whether it goes as soon as the last of them is there. Others go at the end of backward, with the news
            whether all that was encoded is finite.
    """

    dtype: torch.dtype
    compressed: bool
    early: bool

    @property
    def key(self) -> str:
        """Names its feedback state."""
        return f"({self.dtype})"


@dataclass(frozen=True, eq=False)
class Parameter:
    """What the hook needs to know of a parameter.

    Attributes:
        name: in the model.
        index: among the model's parameters.
        shape: its own.
        compressed: whether it is a layer; otherwise it is small.
        vector: that of the small parameters it travels with, if it is small.
        at: where it lies in that.
    """

    name: str
    index: int
    shape: torch.Size
    compressed: bool
    vector: Vector
    at: int


@dataclass(frozen=True, eq=False)
class Layer:
    """What one tensor is sent with, and how.

    Attributes:
        codec: what it is encoded with.
        state: what stays between two steps; None without feedback.
        way: how payloads travel.
    """

    codec: Codec
    state: State | None
    way: Way

    @property
    def feedback(self) -> Feedback | None:
        """The state, if encoding is its business."""
        return self.state if isinstance(self.state, Feedback) else None


class Layers:
    """The layers of a model, its small parameters, and what they are compressed with.

    Args:
        parameters: name and tensor of each parameter of the model, in its order.
        norms: those that belong to normalization layers; they count as small.
        chosen: what all layers have that have nothing of their own.
        min_numel: parameters with fewer elements are small.
        small: ``dense``, ``together`` or a codec, see :func:`~narrowband.compress_gradients`.
        collective: the one to use, or ``auto``.
        size: number of ranks.
        rank: this one; rank 0 logs warnings for all.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        norms: Collection[Tensor],
        chosen: Compression,
        *,
        min_numel: int,
        small: str | Codec,
        collective: Collective | Literal["auto"],
        size: int,
        rank: int,
    ) -> None:
        self.usual = chosen
        self.together = small != "dense"
        self._small = like(chosen, small, "small") if self.together and small != "together" else None
        self._collective = collective
        self._size = size
        self._rank = rank
        self.state = chosen.new_feedback()
        #: The state, if it has to observe everything that is averaged.
        self.observer = _observer(self.state)
        #: Those of other kinds, by name, once a layer needs them.
        self._others: dict[str, State] = {}
        self._own: dict[str, Compression] = {}
        self._own_specs: dict[str, str] | None = None  # until the next change
        self._ways: dict[type, Way] = {}
        #: How many elements each vector of small parameters has.
        self.vectors: dict[Vector, int] = {}
        self.parameters = self._classify(list(parameters), {id(p) for p in norms}, min_numel)
        self.named = {parameter.name: parameter for parameter in self.parameters.values()}
        self._warned: set[str] = set()
        self._noted = False
        self._settle()

    def _classify(
        self, parameters: Sequence[tuple[str, Tensor]], norms: Collection[int], min_numel: int
    ) -> dict[Tensor, Parameter]:
        known = [(index, *one) for index, one in enumerate(parameters) if one[1].requires_grad]
        small = {p for _, _, p in known if p.dim() < 2 or p.numel() < min_numel or id(p) in norms}
        odd = [f"{name} ({p.dtype})" for _, name, p in known if p.dtype not in COMPRESSIBLE]
        vectors = self._vectors([p for _, _, p in known], small)
        found: dict[Tensor, Parameter] = {}
        for index, name, p in known:
            compressed = p not in small and p.dtype in COMPRESSIBLE
            vector = vectors[p]
            at = self.vectors.get(vector, 0)
            if not compressed:
                self.vectors[vector] = at + p.numel()
            found[p] = Parameter(name, index, p.shape, compressed, vector, at)
        if odd:
            self.warn(
                "these gradients travel uncompressed, codecs take float32, float16 and bfloat16: %s", ", ".join(odd)
            )
        if not any(p.compressed for p in found.values()):
            self.warn(
                "nothing to compress: no parameter has 2 dimensions and at least min_numel=%d elements", min_numel
            )
        return found

    def warn(self, message: str, *args: object) -> None:
        """Log what holds on all ranks, on one of them."""
        if self._rank == 0:
            log.warning(message, *args)

    def warn_once(self, message: str) -> None:
        """:meth:`warn`, but not again."""
        if message not in self._warned:
            self._warned.add(message)
            self.warn("%s", message)

    def _vectors(self, parameters: Sequence[Tensor], small: Collection[Tensor]) -> dict[Tensor, Vector]:
        """The vector of each parameter, if it is small.

        Gradients of a model's end come first in backward. What is small in its last two thirds goes while backward is
        still busy with the rest, if it is worth a message of its own.
        """
        total, seen = sum(p.numel() for p in parameters), 0
        found: dict[Tensor, Vector] = {}
        early: dict[torch.dtype, int] = {}
        for p in parameters:
            compressed = self.together and p.dtype in COMPRESSIBLE
            found[p] = Vector(p.dtype, compressed, early=3 * seen >= total and not compressed)
            seen += p.numel()
            if found[p].early and p in small:
                early[p.dtype] = early.get(p.dtype, 0) + p.numel() * p.element_size()
        return {p: v._replace(early=v.early and early.get(p.dtype, 0) >= EARLY_NBYTES) for p, v in found.items()}

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the feedback the learning rates of this step. Small parameters that travel as one vector have that of
        the first of them.
        """
        assert self.state is not None
        of = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        usual = float(optimizer.param_groups[0]["lr"])
        rates = {known.name: of.get(p, usual) for p, known in self.parameters.items()}
        for known in reversed(self.parameters.values()):
            if not known.compressed:
                rates[known.vector.key] = rates[known.name]
        self.state.set_learning_rates(rates)

    # ---- what a layer has --------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that is compressed layer by layer."""
        return {p.name: tuple(p.shape) for p in self.parameters.values() if p.compressed}

    @property
    def plain(self) -> bool:
        """Whether nothing is lost anywhere, so that no feedback has anything to do."""
        return self.usual.codec.exact and not self._own

    @property
    def stateful(self) -> bool:
        """Whether steps are transactions: whether there is any feedback."""
        return self.state is not None

    @property
    def incremental(self) -> bool:
        """Whether payloads are changes of what all ranks hold; then all layers' are."""
        return self.state is not None and self.state.incremental

    @property
    def states(self) -> dict[str, State]:
        """All that stays between steps, by name; the model's own is ''."""
        return ({} if self.state is None else {"": self.state}) | self._others

    def has(self, name: str) -> Compression:
        """What a layer is compressed with from the next step on."""
        return self._own.get(name, self.usual)

    def of(self, name: str, usual: Codec) -> Layer:
        """What a layer is sent with in a step in which the others have ``usual``."""
        return self._layer(self._own.get(name), usual)

    def vector(self, usual: Codec) -> Layer:
        """The same of the vectors that small parameters make together."""
        return self._layer(None if self._small is None else Compression(self._small, self.usual.feedback), usual)

    def uncompressed(self) -> Layer:
        """What everything is sent with in a step that is not compressed, where feedback has to hear of it."""
        return Layer(Identity(), self.state, "dense")

    def _layer(self, own: Compression | None, usual: Codec) -> Layer:
        if own is None:
            return Layer(usual, self.state, self.way(self.usual))
        codec = own.codec
        if self.state is not None:
            codec = self.state.codec_of_layer(codec, usual)
        return Layer(codec, self._state_of(own), self.way(own))

    def _state_of(self, chosen: Compression) -> State | None:
        wanted = chosen.feedback
        if wanted is None or self.state is None or type(wanted) is type(self.state):
            return self.state
        name = wanted.name
        if name not in self._others:
            self._others[name] = replace(wanted)  # type: ignore[type-var]
        return self._others[name]

    def way(self, chosen: Compression) -> Way:
        """How payloads of this kind travel: chosen for all of a kind together, by the bucket it would make the result
        depend on buckets.
        """
        if chosen.feedback is not None and chosen.feedback.collective is not None:
            return chosen.feedback.collective
        if self._collective != "auto":
            return self._collective
        return self._ways.get(type(chosen.codec)) or choose(chosen.codec, 0, self._size, self.state)

    @property
    def decided_early(self) -> bool:
        """Whether some exchange leaves it to another one to tell whether the step is good."""
        return any(way in ("gather", "lowrank") for way in self._all_ways())

    @property
    def exchanges_pairs(self) -> bool:
        """Whether anything travels from rank to rank."""
        return "scatter_reduce" in self._all_ways()

    def _all_ways(self) -> set[Way]:
        return {self.way(self.usual)} | {self.way(own) for own in self._own.values()}

    # ---- plans -------------------------------------------------------------------------------------------------------

    def set(self, specs: Mapping[str, str | Codec | Compression | Method]) -> None:
        """Give layers something of their own; all or nothing.

        Raises:
            ValueError: a name that is no layer, or a spec that this model cannot mix with its own.
        """
        self._check_layers(specs)
        chosen = {name: self.mixed(name, spec) for name, spec in specs.items()}
        before = {name: self._state_of(self.has(name)) for name in chosen}
        self._own |= chosen
        self._own = {name: own for name, own in self._own.items() if own != self.usual}
        self._own_specs = None
        self._settle()
        for name, was in before.items():
            now = self._state_of(self.has(name))
            if was is not None and now is not None and was is not now:
                residual = was.take_residual(name)
                if residual is not None:
                    now.add_residual(name, residual)

    def _check_layers(self, names: Collection[str]) -> None:
        unknown = sorted(set(names) - self.shapes.keys())
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: no parameters that this handle compresses; there are: {sorted(self.shapes)}"
            )

    def mixed(self, name: str, spec: str | Codec | Compression | Method) -> Compression:
        """What a layer can have beside what the model has: the spec, with the model's feedback where it names none.

        Raises:
            ValueError: it cannot have that.
            UnsupportedError: no gradient can.
        """
        layer = for_gradients(spec)
        if layer == self.usual:
            return layer
        if self._collective != "auto":
            if layer.feedback is not None and layer.feedback.collective is not None:
                raise ValueError(f"{name!r} cannot have {str(layer)!r} with collective={self._collective!r}")
            check(layer.codec, self._collective, self.state)
        if self.usual.feedback is not None and not self.usual.feedback.mixes:
            if layer.feedback == self.usual.feedback:  # as :meth:`has` gave it
                return layer
            return Compression(like(self.usual, layer, name), self.usual.feedback)
        if self.state is None:
            if layer.feedback is not None:
                raise ValueError(
                    f"{name!r} cannot have {str(layer)!r} in a model that has {str(self.usual)!r}, without feedback: "
                    "give the model one, and every layer has it"
                )
            return layer
        if layer.feedback is not None and not layer.feedback.mixes:
            raise ValueError(
                f"{name!r} cannot have {str(layer)!r}: {layer.feedback.name} is for a whole model, not for one "
                "layer of it"
            )
        if layer.feedback is None:
            assert self.usual.feedback is not None
            behind = self.usual.feedback.behind(layer.codec) or ErrorFeedback()
            layer = Compression(behind.codec if behind.brings_codec else layer.codec, behind)
        assert layer.feedback is not None
        if layer.feedback.incremental != self.incremental:
            raise ValueError(
                f"{name!r} cannot have {str(layer)!r} in a model that has {str(self.usual)!r}: what ef21 keeps cannot "
                "become others' residuals, nor the other way round; leave this layer's feedback out"
            )
        if not layer.feedback.compensates:
            raise ValueError(f"{name!r} cannot have {str(layer)!r}: in this model every layer has feedback")
        there = next((state for state in self.states.values() if type(state) is type(layer.feedback)), None)
        if there is not None and not there.shares_state_with(layer.feedback):
            raise ValueError(
                f"{name!r} cannot have {str(layer)!r} in a model that has {str(there)!r}: {there.name} keeps one state "
                "for all layers that have it, which these settings cannot share"
            )
        return layer

    def _settle(self) -> None:
        """Choose the ways of what there is now, and make room for low rank's residuals."""
        kinds: dict[type, tuple[Codec, int]] = {}
        for known in self.parameters.values():
            if known.compressed:
                chosen = self.has(known.name)
                _, nbytes = kinds.get(type(chosen.codec), (chosen.codec, 0))
                kinds[type(chosen.codec)] = chosen.codec, nbytes + chosen.codec.payload_nbytes(known.shape)
        self._ways = {kind: choose(codec, nbytes, self._size, self.state) for kind, (codec, nbytes) in kinds.items()}
        self._reserve()

    def _reserve(self) -> None:
        """Make room for what feedback will keep, and log what it has to say of these layers."""
        layouts: dict[int, list[Layout]] = {}
        for parameter, known in reversed(self.parameters.items()):  # about the order in which gradients come
            chosen = self.has(known.name)
            state = self._state_of(chosen) if known.compressed else None
            if state is not None:
                layout = Layout(known.name, chosen.codec, known.shape, parameter.device)
                layouts.setdefault(id(state), []).append(layout)
        for state in self.states.values():
            announced = layouts.get(id(state), [])
            state.reserve(announced)
            note = state.note(announced, whole=not self._own)
            if note and not self._noted:
                self._noted = True
                self.warn("%s", note)

    def warn_if_more(self) -> None:
        """Say so when more would be sent than without compression."""
        codec, size = self.usual.codec, self._size
        items = [(p.numel() * p.element_size(), q) for p, q in self.parameters.items() if q.compressed]
        if size == 1 or not items or not codec.fixed_size or self.way(self.usual) not in COLLECTIVES:
            return  # a collective of the feedback's own has no size that is known here
        nbytes = sum(codec.payload_nbytes(q.shape) for _, q in items)
        sent = (size - 1) * nbytes if self.way(self.usual) == "gather" else allreduce_nbytes(nbytes, size)
        plain = allreduce_nbytes(sum(raw for raw, _ in items), size)
        if sent > plain:
            self.warn(
                "%s among %d ranks sends %s per step and rank, more than the %s without compression: do not compress, "
                "or keep less",
                self.usual, size, format_bytes(sent), format_bytes(plain),
            )  # fmt: skip

    # ---- state -------------------------------------------------------------------------------------------------------

    def identity(self) -> Facts:
        """What has to be the same on all ranks."""
        return {
            "spec": str(self.usual),
            "small": "dense" if not self.together else str(self._small or "together"),
            "spec of layer": self.own_specs(),
            "parameter": {
                p.name: f"{tuple(p.shape)}, {p.vector.dtype}, {'compressed' if p.compressed else 'small'}"
                for p in self.parameters.values()
            },
        }

    def own_specs(self) -> dict[str, str]:
        """Of layers that have something of their own."""
        if self._own_specs is None:
            self._own_specs = {name: str(as_choice(own)) for name, own in self._own.items()}
        return dict(self._own_specs)

    @property
    def residual_nbytes(self) -> int:
        """Bytes of memory that feedback takes on this rank."""
        return sum(state.nbytes for state in self.states.values())

    def merged(
        self, states: Sequence[Mapping[str, Mapping[str, Tensor]]], saved_with: str
    ) -> dict[str, dict[str, Tensor]]:
        """What every rank goes on with, from what all former ranks kept under each state's name.

        Raises:
            ValueError: it was kept by another kind of feedback.
        """
        for state in states:
            self._check_kind(state, saved_with)
        kinds: dict[str, type[State]] = {**available(), **methods()}
        if self.state is not None:
            kinds[""] = type(self.state)
        names = dict.fromkeys(name for state in states for name in state)
        return {name: kinds.get(name, State).merged([state.get(name, {}) for state in states]) for name in names}

    def check_load(self, specs: Mapping[str, str], saved: Mapping[str, Mapping[str, Tensor]], saved_with: str) -> None:
        """Raise ValueError unless :meth:`load` can take all of this; nothing changes.

        Raises:
            ValueError: residuals that nothing here could send, of another model, or with values that are none.
        """
        self._check_kind(saved, saved_with)
        if self.state is None and any(saved.values()):
            raise ValueError(
                f"the state was saved with {saved_with!r} and holds the residual; {str(self.usual)!r} "
                "has no feedback that could send it. Use a spec with a feedback, or clear state['feedback'] to drop it"
            )
        self._check_layers(specs)
        others, self._others = self._others, {}
        try:
            own = [self.mixed(name, spec) for name, spec in specs.items()]
        finally:
            self._others = others
        states = {} if self.state is None else {"": self.state}
        states |= {
            chosen.feedback.name: chosen.feedback
            for chosen in own
            if chosen.feedback is not None and type(chosen.feedback) is not type(self.state)
        }
        for name, values in saved.items():
            if name in states:
                states[name].check_state(values)
                self._check_fits(values)
            elif values:
                raise ValueError(f"the state holds residuals of {name}, and no layer here has that feedback")

    def load(self, specs: Mapping[str, str], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on with these specs, and the saved feedback under each state's name; :meth:`check_load` has seen both."""
        device = next(iter(self.parameters)).device
        self._own, self._others = {}, {}
        self.set(specs)
        for name, state in self.states.items():
            state.load_state_dict({key: value.to(device) for key, value in saved.get(name, {}).items()})

    def clear(self) -> None:
        """Give the memory back that feedback takes."""
        self.state = self.usual.new_feedback()
        self.observer = _observer(self.state)
        self._others.clear()

    def _check_kind(self, saved: Mapping[str, Mapping[str, Tensor]], saved_with: str) -> None:
        """Raise ValueError where a state is there that no feedback of this kind can go on with."""
        before = compression(saved_with).feedback
        if self.state is None or before is None or before.incremental == self.incremental or not any(saved.values()):
            return
        raise ValueError(
            f"the state was saved with {saved_with!r}, and what that keeps means nothing to {str(self.usual)!r}; go on "
            "with the former, or clear state['feedback'] on all ranks to begin anew"
        )

    def _check_fits(self, saved: Mapping[str, Tensor]) -> None:
        """Raise ValueError where a state has a size that no state of this model can have."""
        numel = {p.name: p.shape.numel() for p in self.parameters.values()}
        compressed = {p.name for p in self.parameters.values() if p.compressed}
        if self.together:
            together = {vector.key: n for vector, n in self.vectors.items() if vector.compressed}
            numel |= together
            compressed |= together.keys()
        for key, value in saved.items():
            room, _, name = key.rpartition("/")
            here = numel.get(name, 0) if (name in compressed) != (room == "dense") else 0
            if room == "factor":
                fits = here > 0 and value.dim() == 2 and here % value.shape[1] == 0
            else:
                fits = here == value.numel()
            if not fits:
                raise ValueError(
                    f"the state holds {value.numel()} elements for {key!r}, of which this model compresses {here}; "
                    "it is the state of another model, or was saved with another min_numel"
                )


def norms_of(model: nn.Module) -> list[Tensor]:
    """The parameters of a model's normalization layers."""
    return [p for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(recurse=False)]


def _observer(state: State | None) -> State | None:
    return state if state is not None and state.observes_uncompressed else None


def for_gradients(spec: str | Codec | Compression | Method) -> Compression:
    """What a spec names, if gradients can be compressed with it.

    Raises:
        UnsupportedError: it is for something else.
    """
    chosen = compression(spec)
    if chosen.feedback is not None and chosen.feedback.per_sample:
        raise UnsupportedError(
            f"{str(chosen)!r} cannot compress gradients: {chosen.feedback.name} keeps buffers per sample, and "
            "gradients are sums over samples; it is for activations between pipeline stages. "
            "Use a codec with '+ef' here"
        )
    return chosen


def like(chosen: Compression, spec: str | Codec | Compression | Method, name: str) -> Codec:
    """What part of a model may have where the whole model has ``chosen``: another codec of that kind.

    Raises:
        ValueError: a spec of another kind.
    """
    layer = for_gradients(spec)
    same_codec = type(layer.codec) is type(chosen.codec)
    same_feedback = layer.feedback is None or type(layer.feedback) is type(chosen.feedback)
    if layer.feedback is not None and not layer.feedback.mixes:
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r}: the settings of {layer.feedback.name} are the whole model's, so "
            f"name the codec alone, as in {str(layer.codec)!r}"
        )
    if not (same_codec and same_feedback):
        raise ValueError(f"{name!r} cannot have {str(layer)!r} in a model that has {str(chosen)!r}")
    return layer.codec
