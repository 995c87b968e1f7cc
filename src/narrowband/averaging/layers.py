"""What each layer of a model is compressed with: codec, feedback and collective.

At first all layers have the model's default. A plan overrides it for some layers, between any two steps; a layer's
residual then moves along to its new feedback.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from narrowband.adapt.policy import as_choice
from narrowband.adapt.traffic import Traffic
from narrowband.averaging.mixing import codec_like, for_gradients, spec_beside
from narrowband.averaging.parameters import Parameters
from narrowband.codecs import Codec, Identity
from narrowband.collectives import Collective, Exchange, LayerCollectives, all_reduce_nbytes, collective
from narrowband.feedback import Compression, Feedback, Layout, State, available, compression, methods
from narrowband.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.averaging.agreement import Facts
    from narrowband.codecs import Shape
    from narrowband.collectives.peers import Peers
    from narrowband.feedback import Method

__all__ = ["Layer", "Layers", "for_gradients"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Layer:
    """What one tensor is sent with.

    Attributes:
        codec: what it is encoded with.
        state: what stays between two steps; None without feedback.
        collective: how payloads travel.
    """

    codec: Codec
    state: State | None
    collective: type[Exchange]

    @property
    def feedback(self) -> Feedback | None:
        """The state, where it takes part in encoding."""
        return self.state if isinstance(self.state, Feedback) else None


class Layers:
    """The layers of a model, its small parameters, and what they are compressed with.

    Args:
        parameters: name and tensor of each parameter of the model, in its order.
        norms: those that belong to normalization layers; they count as small.
        default: what all layers have that no plan overrides.
        min_numel: parameters with fewer elements are small.
        small: ``uncompressed``, ``fused`` or a codec, see :func:`~narrowband.compress_gradients`.
        early_nbytes: from how many bytes on a vector of small parameters goes before backward ends.
        collective: the one to use, or ``auto``.
        size: number of ranks.
        rank: this one; rank 0 logs warnings for all.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        norms: Collection[Tensor],
        default: Compression,
        *,
        min_numel: int,
        small: str | Codec,
        early_nbytes: int,
        collective: Collective | Literal["auto"],
        size: int,
        rank: int,
    ) -> None:
        self.default = default
        self.fuses_small = small != "uncompressed"
        self._small_codec = codec_like(default, small, "small") if small not in ("uncompressed", "fused") else None
        self._collective = collective
        self._size = size
        self._rank = rank
        self.state = default.new_feedback()
        self._other_states: dict[str, State] = {}  # of other kinds of feedback, by name, once a layer needs them
        self._overrides: dict[str, Compression] = {}
        self._override_texts: dict[str, str] | None = None  # until the next change
        self._warned: set[str] = set()
        self._noted = False
        self._goes_ahead: bool | None = None
        self.parameters = Parameters(
            parameters, norms, min_numel=min_numel, fuse_small=self.fuses_small, early_nbytes=early_nbytes
        )
        for warning in self.parameters.warnings():
            self.warn_once(warning)
        self._prepare()

    def warn_once(self, message: str) -> None:
        """Log what holds on all ranks, on one of them, and only the first time."""
        if self._rank == 0 and message not in self._warned:
            log.warning("%s", message)
        self._warned.add(message)

    # ---- what a layer has --------------------------------------------------------------------------------------------

    @property
    def observer(self) -> State | None:
        """The state, if it has to observe everything that is averaged."""
        return self.state if self.state is not None and self.state.observes_uncompressed else None

    @property
    def exact(self) -> bool:
        """Whether no codec loses anything, so that feedback has nothing to do."""
        return self.default.codec.exact and not self._overrides

    @property
    def stateful(self) -> bool:
        """Whether steps are transactions: whether there is any feedback."""
        return self.state is not None

    @property
    def incremental(self) -> bool:
        """Whether payloads are changes of what all ranks hold; then all layers' are."""
        return self.state is not None and self.state.incremental

    @property
    def goes_ahead(self) -> bool:
        """Whether a step can be decided where the tensors are, see :class:`~narrowband.kernels.Findings`."""
        if self._goes_ahead is None:
            self._goes_ahead = self._can_go_ahead()
        return self._goes_ahead

    def _can_go_ahead(self) -> bool:
        if self.observer is not None or self.incremental:
            return False
        if not all(isinstance(state, Feedback) and state.goes_ahead for state in self.states.values()):
            return False
        kinds = {self.spec_for(name) for name in self.parameters.shapes}
        if self._small_codec is not None:
            kinds.add(Compression(self._small_codec, self.default.feedback))
        dtypes = {p.vector.dtype for p in self.parameters.by_name.values() if p.compressed or p.vector.compressed}
        return dtypes <= {torch.float32} and all(self.collective_for(kind).goes_ahead(kind.codec) for kind in kinds)

    @property
    def states(self) -> dict[str, State]:
        """All that stays between steps, by name; the state of the default is ''."""
        return ({} if self.state is None else {"": self.state}) | self._other_states

    def spec_for(self, name: str) -> Compression:
        """What a layer is compressed with from the next step on."""
        return self._overrides.get(name, self.default)

    def layer(self, name: str, codec: Codec) -> Layer:
        """What a layer is sent with in a step whose default codec is ``codec``: that changes while a spec warms up."""
        return self._layer(self._overrides.get(name), codec)

    def vector(self, codec: Codec) -> Layer:
        """The same of the vectors of small parameters."""
        fused = self._small_codec
        return self._layer(None if fused is None else Compression(fused, self.default.feedback), codec)

    def uncompressed(self) -> Layer:
        """What everything is sent with in a step that is not compressed, where feedback has to observe it."""
        return Layer(Identity(), self.state, collective("all_reduce"))

    def _layer(self, override: Compression | None, codec: Codec) -> Layer:
        if override is None:
            return Layer(codec, self.state, self.collective_for(self.default))
        own = override.codec if self.state is None else self.state.codec_of_layer(override.codec, codec)
        return Layer(own, self._state_of(override), self.collective_for(override))

    def _state_of(self, chosen: Compression) -> State | None:
        feedback = chosen.feedback
        if feedback is None or self.state is None or type(feedback) is type(self.state):
            return self.state
        name = feedback.name
        if name not in self._other_states:
            self._other_states[name] = replace(feedback)  # type: ignore[type-var]
        return self._other_states[name]

    def collective_for(self, chosen: Compression) -> type[Exchange]:
        """How payloads of this kind travel."""
        return self._collectives.of(chosen)

    @property
    def traffic(self) -> Traffic:
        """What tells a policy how many bytes its choices would send here."""
        return Traffic(self._size, self.default, self._collective)

    @property
    def collectives(self) -> set[type[Exchange]]:
        """All that layers travel by."""
        return {self.collective_for(chosen) for chosen in (self.default, *self._overrides.values())}

    def open_pairs(self, peers: Peers) -> None:
        """Let ranks send to each other, if that is how layers travel among them."""
        if any(kind.uses_pairs(peers.size) for kind in self.collectives):
            peers.open_pairs(self.parameters.device)

    # ---- plans -------------------------------------------------------------------------------------------------------

    def set(self, specs: Mapping[str, str | Codec | Compression | Method]) -> None:
        """Override the default for these layers; all or nothing.

        Raises:
            ValueError: a name that is no layer, or a spec that this model cannot mix with its own.
        """
        self._check_names(specs)
        chosen = dict(zip(specs, self.all_beside(specs.items()), strict=True))
        before = {name: self._state_of(self.spec_for(name)) for name in chosen}
        overrides = self._overrides | chosen
        self._overrides = {name: override for name, override in overrides.items() if override != self.default}
        self._override_texts = None
        self._prepare()
        for name, was in before.items():
            now = self._state_of(self.spec_for(name))
            if was is not None and now is not None and was is not now:
                residual = was.take_residual(name)
                if residual is not None:
                    now.add_residual(name, residual)

    def _check_names(self, names: Collection[str]) -> None:
        shapes = self.parameters.shapes
        unknown = sorted(set(names) - shapes.keys())
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: no parameters that this handle compresses; there are: {sorted(shapes)}"
            )

    def all_beside(self, specs: Iterable[tuple[str, str | Codec | Compression | Method]]) -> list[Compression]:
        """What layers can have beside the default, what others have, and each other."""
        return self._all_beside(specs, self.states)[0]

    def _all_beside(
        self, specs: Iterable[tuple[str, str | Codec | Compression | Method]], states: Mapping[str, State]
    ) -> tuple[list[Compression], dict[str, State]]:
        """What layers can have, see :func:`~narrowband.averaging.mixing.spec_beside`, where these states are there; and
        the states that then are there.
        """
        chosen, there = [], dict(states)
        for name, spec in specs:
            one = spec_beside(self.default, name, spec, collective=self._collective, states=there)
            if one.feedback is not None and type(one.feedback) is not type(self.state):
                there.setdefault(one.feedback.name, one.feedback)
            chosen.append(one)
        return chosen, there

    def _prepare(self) -> None:
        """Choose the layers' collectives, make room for feedback, and log notes about both."""
        layers: list[tuple[Compression, Shape]] = []
        layouts: dict[int, list[Layout]] = {id(state): [] for state in self.states.values()}
        for p, parameter in reversed(self.parameters.by_tensor.items()):  # about the order in which gradients come
            if not parameter.compressed:
                continue
            chosen = self.spec_for(parameter.name)
            layers.append((chosen, parameter.shape))
            state = self._state_of(chosen)
            if state is not None:
                layout = Layout(parameter.name, chosen.codec, parameter.shape, p.device)
                layouts.setdefault(id(state), []).append(layout)
        self._collectives = LayerCollectives(layers, self._size, asked=self._collective)
        self._goes_ahead = None  # until it is asked
        for state in self.states.values():
            state.reserve(layouts[id(state)])
            note = state.note(layouts[id(state)], whole=not self._overrides)
            if note and not self._noted:
                self._noted = True
                self.warn_once(note)

    def warn_if_more(self) -> None:
        """Log where more would be sent than without compression."""
        size = self._size
        layers = [(p, parameter.shape) for p, parameter in self.parameters.by_tensor.items() if parameter.compressed]
        if size == 1 or not layers or self.exact or not self.default.codec.fixed_size:
            return
        nbytes = sum(self.default.layer_nbytes(shape) for _, shape in layers)
        sent = self.collective_for(self.default).traffic_nbytes(nbytes, size)
        plain = all_reduce_nbytes(sum(p.numel() * p.element_size() for p, _ in layers), size)
        if sent > plain:
            self.warn_once(
                f"{self.default} among {size} ranks sends {format_bytes(sent)} per step and rank, more than the "
                f"{format_bytes(plain)} without compression: do not compress, or keep less"
            )

    # ---- state -------------------------------------------------------------------------------------------------------

    def identity(self) -> Facts:
        """What has to be the same on all ranks."""
        return {
            "spec": str(self.default),
            "small": str(self._small_codec or ("fused" if self.fuses_small else "uncompressed")),
            "spec of layer": self.override_texts(),
            "parameter": {
                p.name: f"{tuple(p.shape)}, {p.vector.dtype}, {'compressed' if p.compressed else 'small'}"
                for p in self.parameters.by_name.values()
            },
            "memory format": {
                p.name: p.form.memory_format for p in self.parameters.by_name.values() if len(p.shape) > 1
            },
        }

    @property
    def memory_formats(self) -> dict[str, str]:
        """Those of what is not contiguous, by name: the order in which residuals have their elements."""
        formats = {p.name: p.form.memory_format for p in self.parameters.by_name.values()}
        return {name: memory_format for name, memory_format in formats.items() if memory_format != "contiguous"}

    def override_texts(self) -> dict[str, str]:
        """The specs of layers that do not have the default, as a plan names them."""
        if self._override_texts is None:
            self._override_texts = {name: str(as_choice(override)) for name, override in self._overrides.items()}
        return dict(self._override_texts)

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

    def check_load(
        self,
        specs: Mapping[str, str],
        saved: Mapping[str, Mapping[str, Tensor]],
        saved_with: str,
        formats: Mapping[str, str] | None,
    ) -> None:
        """Raise ValueError unless :meth:`load` can take all of this; nothing changes.

        Args:
            specs: of layers.
            saved: feedback, under each state's name.
            saved_with: the spec of the model.
            formats: :attr:`memory_formats` when it was saved; None where that is not known.

        Raises:
            ValueError: residuals that nothing here could send, of another model, or with values that are none.
        """
        self._check_kind(saved, saved_with)
        if self.state is None and any(saved.values()):
            raise ValueError(
                f"the state was saved with {saved_with!r} and holds the residual; {str(self.default)!r} "
                "has no feedback that could send it. Use a spec with a feedback, or clear state['feedback'] to drop it"
            )
        if formats is not None and any(saved.values()):
            self._check_formats(formats)
        self._check_names(specs)
        _, states = self._all_beside(specs.items(), {} if self.state is None else {"": self.state})
        for name, values in saved.items():
            if name in states:
                states[name].check_state(values)
                self._check_fits(states[name], values)
            elif values:
                raise ValueError(f"the state holds residuals of {name}, and no layer here has that feedback")

    def load(self, specs: Mapping[str, str], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on with these specs, and the saved feedback under each state's name; :meth:`check_load` has seen both."""
        device = self.parameters.device
        self._overrides, self._other_states = {}, {}
        self.set(specs)
        for name, state in self.states.items():
            state.load_state_dict({key: value.to(device) for key, value in saved.get(name, {}).items()})

    def clear(self) -> None:
        """Give the memory back that feedback takes."""
        self.state = self.default.new_feedback()
        self._other_states.clear()

    def _check_kind(self, saved: Mapping[str, Mapping[str, Tensor]], saved_with: str) -> None:
        """Raise ValueError where a state is there that no feedback of this kind can go on with."""
        before = compression(saved_with).feedback
        if self.state is None or before is None or before.incremental == self.incremental or not any(saved.values()):
            return
        raise ValueError(
            f"the state was saved with {saved_with!r}, and what that keeps means nothing to {str(self.default)!r}; go "
            "on with the former, or clear state['feedback'] on all ranks to begin anew"
        )

    def _check_formats(self, saved: Mapping[str, str]) -> None:
        """Raise ValueError where a residual has its elements in another order."""
        here = self.memory_formats
        for name in {**saved, **here}:
            was, now = (formats.get(name, "contiguous") for formats in (saved, here))
            if was != now and name in self.parameters.by_name:
                raise ValueError(
                    f"the state's residuals are those of a model in which {name} was {was} when compression was set "
                    f"up, and here it was {now}: convert the model to the same memory format before compression is set "
                    "up, or clear state['feedback'] on all ranks to begin without residuals"
                )

    def _check_fits(self, state: State, saved: Mapping[str, Tensor]) -> None:
        """Raise ValueError where a tensor has a size that no state of this model can have."""
        layers = {p.name: p.shape.numel() for p in self.parameters.by_name.values() if p.compressed}
        layers |= {vector.key: n for vector, n in self.parameters.vectors.items() if vector.compressed}
        others = {p.name: p.shape.numel() for p in self.parameters.by_name.values() if p.name not in layers}
        for key, value in saved.items():
            if not state.fits(key, value, layers, others):
                raise ValueError(
                    f"the state holds {value.numel()} elements for {key!r}, which is not what this model compresses "
                    "there; it is the state of another model, or was saved with another feedback or min_numel, or with "
                    "other parameters frozen"
                )
