"""The codec, feedback and collective of each layer of a model.

At first all layers have the model's default. Between any two steps, a plan may override it for some layers. A layer's
residual then moves to its new feedback.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from narrowband.adapt.policy import as_choice
from narrowband.adapt.traffic import Traffic
from narrowband.averaging.mixing import for_gradients, spec_beside
from narrowband.averaging.parameters import Parameters
from narrowband.averaging.unused import Unused
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

#: A codec without feedback that loses this share of what it is given, or more, is warned of.
_MUCH = 0.5


@dataclass(frozen=True, eq=False)
class Layer:
    """How one tensor is sent.

    Attributes:
        codec: encodes it.
        state: the feedback state that is kept between steps; None without feedback.
        collective: exchanges the payloads.
    """

    codec: Codec
    state: State | None
    collective: type[Exchange]

    @property
    def feedback(self) -> Feedback | None:
        """The state, if it takes part in encoding; else None."""
        return self.state if isinstance(self.state, Feedback) else None


#: What ``torch.compile`` puts before the names of a module that it wraps.
_COMPILED = "_orig_mod."


class Layers:
    """The layers of a model, its small parameters, and what they are compressed with.

    Args:
        parameters: name and tensor of each parameter of the model, in its order.
        norms: the parameters that belong to normalization layers; they count as small.
        default: codec and feedback of all layers that no plan overrides.
        min_numel: parameters with fewer elements are small.
        small: ``uncompressed``, ``fused`` or a codec, see :func:`~narrowband.compress_gradients`.
        early_nbytes: vectors of small parameters with at least this many bytes may be sent before backward ends.
        collective: the one to use, or ``auto``.
        size: number of ranks.
        rank: this rank; rank 0 logs warnings for all.
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
        self._collective = collective
        self._size = size
        self._rank = rank
        self.state = default.new_feedback()
        self._other_states: dict[str, State] = {}  # other kinds of feedback, by name, created when a layer needs them
        #: What the vectors of small parameters have if it is not the default.
        self.small = self.all_beside([("small", small)])[0] if small not in ("uncompressed", "fused") else None
        #: What feedback held before averages that no optimizer has used yet.
        self.unused = Unused()
        self._overrides: dict[str, Compression] = {}
        self._override_texts: dict[str, str] | None = None  # a cache; None after a change
        self._warned: set[str] = set()
        self._noted = False
        self._goes_ahead: bool | None = None
        self.parameters = Parameters(
            parameters, norms, min_numel=min_numel, fuse_small=self.fuses_small, early_nbytes=early_nbytes
        )
        for warning in self.parameters.warnings():
            self.warn_once(warning)
        if self.parameters.shapes and default.feedback is None and _leaves_out(default.codec):
            self.warn_once(
                f"{default} has no feedback: what it leaves out of a step is lost. Write '{default}+ef', which keeps "
                "it and sends it later"
            )
        self._prepare()

    def warn_once(self, message: str) -> None:
        """Log a warning that holds on all ranks, on rank 0 only, and only the first time."""
        if self._rank == 0 and message not in self._warned:
            log.warning("%s", message)
        self._warned.add(message)

    # ---- what a layer has --------------------------------------------------------------------------------------------

    @property
    def observer(self) -> State | None:
        """The default's state, if it must observe all averages, also uncompressed ones (as ``dgc``); else None."""
        return self.state if self.state is not None and self.state.observes_uncompressed else None

    @property
    def exact(self) -> bool:
        """Whether no codec is lossy and no residual can wait, so that feedback has nothing to do.

        Behind ``none+ef`` a residual can wait: a state that is loaded may hold one, and former specs may have left one.
        """
        lossless = self.default.codec.exact and (self.small is None or self.small.codec.exact)
        return lossless and not self._overrides and (self.state is None or self.incremental)

    @property
    def stateful(self) -> bool:
        """Whether there is any feedback, so that steps are transactions."""
        return self.state is not None

    @property
    def incremental(self) -> bool:
        """Whether payloads are increments to a state that all ranks hold (``ef21``); true of all layers or of none."""
        return self.state is not None and self.state.incremental

    @property
    def goes_ahead(self) -> bool:
        """Whether the device can decide about a step's commit, see :class:`~narrowband.kernels.Findings`."""
        if self._goes_ahead is None:
            self._goes_ahead = self._can_go_ahead()
        return self._goes_ahead

    def _can_go_ahead(self) -> bool:
        if not all(state.goes_ahead for state in self.states.values()):
            return False
        kinds = {self.spec_for(name) for name in self.parameters.shapes}
        if self.small is not None:
            kinds.add(self.small)
        dtypes = {p.vector.dtype for p in self.parameters.by_name.values() if p.compressed or p.vector.compressed}
        if dtypes - {torch.float32} and not all(state.goes_ahead_in_16 for state in self.states.values()):
            return False
        known = dtypes <= {torch.float32, torch.float16, torch.bfloat16}
        return known and all(self._decides_late(kind) for kind in kinds)

    def _decides_late(self, kind: Compression) -> bool:
        """Return whether layers with this codec and feedback can be sent before the host knows what is finite."""
        own, feedback = self.collective_for(kind), kind.feedback
        arrives = own.delivers_all or (feedback is not None and feedback.commits_arrivals_ahead)
        return arrives and own.goes_ahead(kind.codec)

    @property
    def states(self) -> dict[str, State]:
        """All feedback states, by name; the name of the default's state is ''."""
        return ({} if self.state is None else {"": self.state}) | self._other_states

    def spec_for(self, name: str) -> Compression:
        """Return a layer's codec and feedback from the next step on."""
        return self._overrides.get(name, self.default)

    def layer(self, name: str, codec: Codec) -> Layer:
        """Return how a layer is sent in a step whose default codec is ``codec`` (it changes while a spec warms up)."""
        return self._layer(self._overrides.get(name), codec)

    def vector(self, codec: Codec) -> Layer:
        """The same for the vectors of small parameters."""
        return self._layer(self.small, codec)

    def uncompressed(self) -> Layer:
        """Return how everything is sent in an uncompressed step that feedback has to observe."""
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

    def state_of_parameter(self, name: str) -> State | None:
        """Return the feedback that a parameter's average changes: of small parameters, only what observes all; of
        parameters that this rank has no shard of, none.
        """
        own = self.parameters.by_name.get(name)
        if own is None:
            return None
        return self._state_of(self.spec_for(name)) if own.compressed else self.observer

    def collective_for(self, chosen: Compression) -> type[Exchange]:
        """Return the collective for payloads of this codec and feedback."""
        return self._collectives.of(chosen)

    @property
    def traffic(self) -> Traffic:
        """An object that tells a policy how many bytes its choices would send among these ranks."""
        return Traffic(self._size, self.default, self._collective)

    @property
    def collectives(self) -> set[type[Exchange]]:
        """The collectives that layers and vectors of small parameters use."""
        small = [] if self.small is None else [self.small]
        return {self.collective_for(chosen) for chosen in (self.default, *self._overrides.values(), *small)}

    def open_pairs(self, peers: Peers) -> None:
        """Open point-to-point connections between ranks if a collective of the layers uses them."""
        if any(kind.uses_pairs(peers.size) for kind in self.collectives):
            peers.open_pairs(self.parameters.device)

    # ---- plans -------------------------------------------------------------------------------------------------------

    def set(self, specs: Mapping[str, str | Codec | Compression | Method]) -> None:
        """Override the default for these layers: for all of them, or on an error for none.

        Raises:
            ValueError: a name that is no layer, or a spec that this model cannot mix with its own.
        """
        chosen = self.checked(specs)
        before = {name: self._state_of(self.spec_for(name)) for name in chosen}
        overrides = self._overrides | chosen
        self._overrides = {name: override for name, override in overrides.items() if override != self.default}
        self._override_texts = None
        self._prepare()
        for name, was in before.items():
            now = self._state_of(self.spec_for(name))
            if was is not None and now is not None and was is not now:
                self.unused.move(name, was, now)

    def checked(self, specs: Mapping[str, str | Codec | Compression | Method]) -> dict[str, Compression]:
        """Return what :meth:`set` would give to layers, and change nothing.

        Raises:
            ValueError: as in :meth:`set`.
        """
        self._check_names(specs)
        return dict(zip(specs, self.all_beside(specs.items()), strict=True))

    def _check_names(self, names: Collection[str]) -> None:
        shapes = self.parameters.shapes
        unknown = sorted(set(names) - shapes.keys())
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: this handle compresses no parameters of these names; it has: {sorted(shapes)}"
            )

    def all_beside(self, specs: Iterable[tuple[str, str | Codec | Compression | Method]]) -> list[Compression]:
        """Check that layers' specs can be mixed with the default, the other layers and each other, and return them."""
        return self._all_beside(specs, self.states)[0]

    def _all_beside(
        self, specs: Iterable[tuple[str, str | Codec | Compression | Method]], states: Mapping[str, State]
    ) -> tuple[list[Compression], dict[str, State]]:
        """Return the specs that layers get in a model with these states, see
        :func:`~narrowband.averaging.mixing.spec_beside`; and the states after that.
        """
        chosen, there = [], dict(states)
        for name, spec in specs:
            one = spec_beside(self.default, name, spec, collective=self._collective, states=there)
            if one.feedback is not None and type(one.feedback) is not type(self.state):
                there.setdefault(one.feedback.name, one.feedback)
            chosen.append(one)
        return chosen, there

    def _prepare(self) -> None:
        """Choose the layers' collectives, allocate feedback, and log the feedback's first note."""
        layers: list[tuple[Compression, Shape]] = []
        if self.small is not None:
            self._state_of(self.small)  # it counts among the states from the start
            vectors = self.parameters.vectors.items()
            layers += [(self.small, (numel,)) for vector, numel in vectors if vector.compressed]
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
        self._goes_ahead = None  # computed when asked for
        for state in self.states.values():
            state.reserve(layouts[id(state)])
            note = state.note(layouts[id(state)], whole=not self._overrides)
            if note and not self._noted:
                self._noted = True
                self.warn_once(note)

    def warn_if_more(self) -> None:
        """Warn if the default sends more than no compression would."""
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
        """Return what must be equal on all ranks."""
        compressed = [p for p in self.parameters.by_name.values() if p.compressed]
        return {
            "spec": str(self.default),
            "small": str(self.small or ("fused" if self.fuses_small else "uncompressed")),
            "spec of layer": self.override_texts(),
            "parameter": {
                p.name: f"{tuple(p.shape)}, {p.vector.dtype}, {'compressed' if p.compressed else 'small'}"
                for p in self.parameters.by_name.values()
            },
            # Other versions of a codec's package could write other sizes under the same spec.
            "bytes of payload": {p.name: str(self.spec_for(p.name).layer_nbytes(p.shape)) for p in compressed},
            "memory format": {
                p.name: p.form.memory_format for p in self.parameters.by_name.values() if len(p.shape) > 1
            },
        }

    @property
    def memory_formats(self) -> dict[str, str]:
        """The memory formats of parameters that are not contiguous, by name. Residuals have the same element order."""
        formats = {p.name: p.form.memory_format for p in self.parameters.by_name.values()}
        return {name: memory_format for name, memory_format in formats.items() if memory_format != "contiguous"}

    def override_texts(self) -> dict[str, str]:
        """Return the specs of layers that do not have the default, by name, as a plan writes them."""
        if self._override_texts is None:
            self._override_texts = {name: str(as_choice(override)) for name, override in self._overrides.items()}
        return dict(self._override_texts)

    @property
    def residual_nbytes(self) -> int:
        """Bytes of memory that feedback takes on this rank."""
        return sum(state.nbytes for state in self.states.values()) + self.unused.nbytes

    def saved(self, state: State, used: Collection[str]) -> dict[str, Tensor]:
        """Return what is saved of one of the feedback states: without averages that wait for an optimizer.

        Args:
            state: the feedback.
            used: names of parameters whose averages wait, but count as used.
        """
        return self.unused.saved(state, self.state_of_parameter, used)

    def merged(self, states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
        """Merge the saved feedback of all former ranks into what each present rank starts with, by state name. Call
        :meth:`check_load` on each before.
        """
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
        """Raise ValueError unless :meth:`load` can take all of this. Changes nothing.

        Args:
            specs: of layers.
            saved: the saved feedback, by state name.
            saved_with: the model's default spec at that time.
            formats: :attr:`memory_formats` at that time; None if unknown.

        Raises:
            ValueError: residuals without a feedback here that could send them, residuals of another model, or invalid
                values.
        """
        self._check_kind(saved, saved_with)
        if self.state is None and any(saved.values()):
            raise ValueError(
                f"the state was saved with {saved_with!r} and has residuals, but {str(self.default)!r} has no feedback "
                "that could send them. Use a spec with feedback, or clear state['feedback'] to drop the residuals"
            )
        if formats is not None and any(saved.values()):
            self._check_formats(formats)
        self._check_names(specs)
        small = [] if self.small is None else [("small", self.small)]
        _, states = self._all_beside([*small, *specs.items()], {} if self.state is None else {"": self.state})
        for name, values in self._by_state(saved).items():
            if name in states:
                states[name].check_state(values)
                self._check_fits(states[name], values)
            elif values:
                raise ValueError(f"the state has residuals of the feedback {name}, but no layer here has this feedback")

    def load(self, specs: Mapping[str, str], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Resume with these specs and the saved feedback by state name. Call :meth:`check_load` on both before."""
        device = self.parameters.device
        self._overrides, self._other_states = {}, {}
        self.unused.clear()
        self.set(specs)
        saved = self._by_state(saved)
        for name, state in self.states.items():
            state.load_state_dict({key: value.to(device) for key, value in saved.get(name, {}).items()})

    def _by_state(self, saved: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the saved feedback by the name of the state here that takes it. Feedback that only some layers had is
        now the model's, if the default spec has become one with this feedback.
        """
        own = "" if self.state is None else self.state.name
        if not own or own not in saved:
            return saved
        return {
            **{name: values for name, values in saved.items() if name != own},
            "": {**saved.get("", {}), **saved[own]},
        }

    def clear(self) -> None:
        """Free the memory that feedback takes."""
        self.state = self.default.new_feedback()
        self._other_states.clear()
        self.unused.clear()

    def _check_kind(self, saved: Mapping[str, Mapping[str, Tensor]], saved_with: str) -> None:
        """Raise ValueError if the saved feedback is incremental and the model's is not, or the other way round."""
        before = compression(saved_with).feedback
        if self.state is None or before is None or before.incremental == self.incremental or not any(saved.values()):
            return
        raise ValueError(
            f"the state was saved with {saved_with!r}, and its feedback cannot be converted to that of "
            f"{str(self.default)!r}; use {saved_with!r}, or clear state['feedback'] on all ranks to drop it"
        )

    def _check_formats(self, saved: Mapping[str, str]) -> None:
        """Raise ValueError if a saved residual has another order of elements than the parameter here."""
        here = self.memory_formats
        for name in {**saved, **here}:
            was, now = (formats.get(name, "contiguous") for formats in (saved, here))
            if was != now and name in self.parameters.by_name:
                raise ValueError(
                    f"the state was saved with {name} in the memory format {was}, but compression was set up here with "
                    f"{name} in the memory format {now}: convert the model to the same memory format before "
                    "compression is set up, or clear state['feedback'] on all ranks to begin without residuals"
                )

    def _check_fits(self, state: State, saved: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a saved tensor has a size that does not belong to this model."""
        layers: dict[str, Shape] = {p.name: p.shape for p in self.parameters.by_name.values() if p.compressed}
        layers |= {vector.key: n for vector, n in self.parameters.vectors.items() if vector.compressed}
        others = {p.name: p.shape for p in self.parameters.by_name.values() if p.name not in layers}
        for key, value in saved.items():
            if not state.fits(key, value, layers, others):
                names = {name.replace(_COMPILED, "") for name in self.parameters.by_name}
                renamed = any((_COMPILED in name) != (_COMPILED in key) for name in self.parameters.by_name)
                if renamed and key.replace(_COMPILED, "").rsplit("/", 1)[-1] in names:
                    raise ValueError(
                        f"the state has {key!r}: it was saved with torch.compile and is loaded without, or the other "
                        "way round. Wrap the model as when it was saved; model.compile() changes no names"
                    )
                raise ValueError(
                    f"the state has {value.numel()} elements for {key!r}, which does not fit this model; the state is "
                    "of another model, or was saved with another feedback or min_numel, or with other parameters frozen"
                )


def _leaves_out(codec: Codec) -> bool:
    """Return whether a codec leaves out much of what it is given, for good if there is no feedback."""
    if codec.exact or codec.requantizes:
        return False
    by_data = codec.keeps_elements and not codec.fixed_size  # a threshold, which may leave out anything
    return by_data or _MUCH <= codec.lost_share < 1
