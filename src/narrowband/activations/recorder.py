"""The recorder of one forward pass, which decides for each tensor saved for backward whether and how it is packed.

Autograd hands every tensor that an operator saves to :meth:`Recorder.pack`. These are kept unchanged: parameters,
buffers, constants in attributes of modules and the model's inputs, which live anyway; integers; small tensors; and
tensors saved outside of the model, for example by a loss. A tensor that several operators save is packed once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from narrowband.activations.arena import Arena, Pieces
from narrowband.activations.calls import (
    CHECKPOINT,
    COMPILED,
    CUSTOM,
    NO_CALL,
    OTHER,
    ROUGH,
    Call,
    Operator,
    saved_by_checkpoint,
    says_what_rounding_does,
)
from narrowband.activations.dynamo import is_in_compiled_code
from narrowband.activations.layout import Arrangement, neighbours
from narrowband.activations.log_probabilities import from_roots, roots
from narrowband.activations.modules import Modules
from narrowband.activations.normalization import Normalization, before_normalization, scaled
from narrowband.activations.outliers import Outliers, is_masked
from narrowband.activations.packed import Exact, Packed, Payload, Place, Source, ahead, promised, quantized
from narrowband.activations.policy import ActivationPolicy, Bits
from narrowband.activations.ranges import Estimates
from narrowband.activations.recompute import Cast, Origin, Original, Recipe, is_normalized, original
from narrowband.activations.scores import bits_of_scores
from narrowband.activations.sites import Site, Sites, Spot
from narrowband.activations.stats import Saved
from narrowband.activations.storages import (
    Storage,
    Storages,
    base_of,
    is_cast_of,
    is_of_a_parameter,
    is_plain,
    is_strided,
    tensors_in,
    values_of,
)
from narrowband.compiler import unseen

__all__ = ["Recorder"]

_now, _Parameter = time.perf_counter, nn.Parameter


class Recorder:
    """Records what one run through the context saves, in one thread.

    Args:
        modules: the modules of the model, whose parameters and buffers live anyway.
        there: all of these modules, as :meth:`Modules.walk` returns them.
        sites: what is known beforehand of the tensors that they save.
        policy: which tensors are kept in how many bits.
        estimates: the estimates of the model's ranges.
        pieces: memory for codes.

    Attributes:
        saved: the bytes that were saved so far.
        packed: how many tensors were packed.
        called: whether the model, or a module of it, was called.
        covered: whether the model ran inside of other hooks on saved tensors, which PyTorch calls instead of these.
        uncompiled: whether the model was called by compiled code. With the hooks of the pass, that runs as Python.
        between_graphs: how many tensors a compiled module saved outside of its graphs that the policy would pack. They
            are kept unchanged.
        call: the call of the running operator, as far as the function mode sees it.
        normalization: the running call of layer normalization.
        hooks: pack and unpack, for :class:`torch.autograd.graph.saved_tensors_hooks`.
    """

    def __init__(
        self,
        modules: Modules,
        there: list[nn.Module],
        sites: Sites,
        policy: ActivationPolicy,
        estimates: Estimates,
        pieces: Pieces,
    ) -> None:
        self.modules, self.sites, self.policy, self.estimates = modules, sites, policy, estimates
        self.saved = Saved()
        self.arena = Arena(pieces)
        self.packed = self.between_graphs = 0
        self.called = self.covered = self.uncompiled = False
        self.call = NO_CALL
        self.normalization: Normalization | None = None
        self.storages = Storages()
        self.storages.live(modules.tensors(there))
        # A graph holds the hooks, and a model may hold a graph: a weak reference avoids a cycle.
        self.hooks = functools.partial(_pack, weakref.ref(self)), _unpack
        self._thread = threading.get_ident()
        self._at_work: list[tuple[int, str]] = []  # id and name of the running modules; the innermost is last
        self._spots: dict[Place, Spot] = {}
        #: Whether a tensor had extreme outliers, which would make errors in all tensors computed from it unbounded.
        self._extreme = False
        self._least = policy.min_numel

    # ---- where we are ------------------------------------------------------------------------------------------------
    # Module hooks are called in all threads: each recorder ignores calls from threads other than its own.

    @unseen
    def entering(self, module: nn.Module, _: Any) -> None:
        """Note that a module's forward begins."""
        if self._thread != threading.get_ident():
            return
        name, at_work = self.modules.name_of(module), self._at_work
        if not at_work:
            if name is None:
                return
            self.called = True
            for spot in self._spots.values():
                spot.nth = -1
        # A module that was added after the names were collected goes by the name of the module around it.
        at_work.append((id(module), at_work[-1][1] if name is None else name))

    @unseen
    def leaving(self, module: nn.Module, _: Any = None, outputs: Any = None) -> None:
        """Note that a module's forward has ended."""
        if self._thread != threading.get_ident():
            return
        own, at_work = id(module), self._at_work
        if at_work and at_work[-1][0] == own:
            at_work.pop()
            if not at_work:
                self.ran(outputs)
                self._keep_probabilities(outputs)
            return
        for place in reversed(range(len(at_work))):
            if at_work[place][0] == own:
                del at_work[place:]  # also modules inside of it whose end a KeyboardInterrupt prevented
                return

    def ran(self, outputs: Any) -> None:
        """Note whether other hooks got what was saved for these outputs. A checkpoint's do not count: it saves less."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or hooks == self.hooks:
            return
        if getattr(hooks[0], "__module__", None) != torch.utils.checkpoint.__name__:  # a builtin function has no module
            self.covered |= any(x.grad_fn is not None for x in tensors_in(outputs))

    @unseen
    def begins(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the model's inputs: the caller decides how long they live, so they are not counted.

        If none of them has a gradient, nothing in this call is computed from what former calls have saved.
        """
        if self._thread != threading.get_ident():
            return
        inputs = tensors_in((args, kwargs))
        self.storages.live(inputs)
        if len(self._at_work) <= 1 and not any(x.requires_grad for x in inputs):
            self._extreme = False
        self.uncompiled = self.uncompiled or is_in_compiled_code()

    @contextlib.contextmanager
    def inside(self, module: nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Iterator[None]:
        """Note the call of a module that has no hooks on it. If ``call`` is given, it becomes the running operator."""
        if not self._at_work:
            self.begins(module, args, kwargs)
        before = self.call
        self.entering(module, args)
        if call is not None:
            self.call = call
        try:
            yield
        finally:
            self.leaving(module)
            self.call = before

    def knows(self, module: nn.Module) -> bool:
        """Whether a module belongs to the model, or is called by a module that does."""
        return bool(self._at_work) or self.modules.name_of(module) is not None

    def saves_here(self) -> bool:
        """Whether autograd hands saved tensors to this recorder; inside of a checkpoint it does not."""
        return bool(torch._C._autograd._top_saved_tensors_default_hooks(True) == self.hooks)

    def place(self) -> tuple[Operator, str]:
        """Return the running operator and the name of the running module."""
        operator = self.call.operator
        if operator is None:  # not an operator of PyTorch, or one in backward
            operator = CHECKPOINT if saved_by_checkpoint() else CUSTOM if self._at_work else OTHER
        return operator, self._at_work[-1][1] if self._at_work else "(outside)"

    def bits(self) -> Bits:
        """Return the bits for a tensor that is saved now."""
        operator, module = self.place()
        return self.modules.bits((operator.name, module))

    # ---- operators and graphs that pack by themselves ----------------------------------------------------------------

    def replaces(self, x: Any) -> bool:
        """Whether an operator of this package shall replace PyTorch's for this input."""
        return (
            bool(self._at_work)
            and type(x) is Tensor
            and x.requires_grad
            and torch.is_grad_enabled()
            and is_plain(x)
            and x.numel() >= self.policy.min_numel
            and self.bits() != "off"
            # Not in a checkpoint: PyTorch compares what a checkpoint saves in the first run and in the second.
            and self.saves_here()
        )

    def keeps(self, kept: Tensor, *, plain: Tensor | int, and_bytes: int = 0) -> None:
        """Count the tensor ``kept`` that an operator of this package saves.

        ``plain`` and ``and_bytes`` are what PyTorch's operator would save: a tensor, bytes, or both.
        """
        self.storages.of(kept).lives = True  # counted here, and kept unchanged
        operator, module = self.place()
        if isinstance(plain, Tensor):
            plain = self.storages.of(plain).count(plain.untyped_storage().nbytes())
        self.saved.add(operator.name, module, plain + and_bytes, kept.numel())
        self.packed += 1

    def keeps_graph(self, tensors: Iterable[Tensor], plain: int, packed: int) -> None:
        """Count what a compiled graph keeps.

        Args:
            tensors: all tensors that the graph keeps, codes among them.
            plain: bytes of the tensors that were packed.
            packed: bytes of their codes.
        """
        exact = -packed
        for x in tensors:
            storage = self.storages.of(x)
            if not storage.lives:
                exact += storage.count(x.untyped_storage().nbytes())
        operator, module = self.place()
        self.saved.add(operator.name, module, exact + plain, exact + packed)
        self.packed += bool(packed)

    # ---- results that are computed again -----------------------------------------------------------------------------

    def origin(self, x: Any, *, may_change: bool = False) -> Origin | None:
        """Return where to find the codes of an operator's input, from which its result can be recomputed.

        Returns None where there are no codes, or the policy has ``derive=False``. An input that is kept as it is takes
        the place of codes, but not if it ``may_change`` before backward.
        """
        if (
            not self.policy.derive
            or not self._at_work
            or type(x) is not Tensor
            or not is_plain(x)
            or x.numel() < self.policy.min_numel
            or not self.saves_here()
        ):
            return None
        storage, arrangement = self.storages.of(x), Arrangement.of(x)
        values = values_of(x, arrangement)
        exact = None if storage.exact is None else storage.exact()
        if exact is not None and arrangement.without_gaps and exact.holds(x):
            return None if may_change else original(weakref.ref(exact))
        payload = storage.payload(values)
        if payload is not None:
            return weakref.ref(payload)
        recipe = storage.recipe(values)
        return None if recipe is None else recipe.derivation

    def origin_later(self, x: Tensor) -> Origin:
        """Return where to find the codes of a tensor that has none yet, in case that another operator saves it."""
        storage, values = self.storages.of(x), values_of(x, Arrangement.of(x))
        return lambda: storage.payload(values)

    def normalizes(self, x: Tensor, y: Tensor, rstd: Tensor) -> None:
        """Keep the normalized form y = x · rstd, with one factor per row, instead of x, if codes of x have been made.

        A row of small numbers errs less then, and so does what is computed from ``y``. If this is RMS normalization, it
        is known only now, after x was saved as a tensor of "other". From here on it counts as layer normalization and
        has the bits of that, unless another operator has saved x before and has more.
        """
        given, storage = Arrangement.of(x), self.storages.of(x)
        values = values_of(x, given)
        payload, recipe = storage.payload(values), storage.recipe(values)
        made = None if payload is not None or recipe is None else recipe.derivation()
        if made is not None:
            payload = made.cast_codes()
        operator, module = self.place()
        codes = self.storages.of(rstd).payload(values_of(rstd, Arrangement.of(rstd)))
        if codes is not None and codes.instead is None:  # a power's result; rsqrt itself keeps what it returns
            self._keep_exactly(rstd, codes, (operator.name, module))
        norm = self.modules.norm(module) if is_normalized(y) else None
        if norm is not None:
            self.counts_as_norm(x, rstd, codes=payload)
        if payload is None or payload.instead is not None or not (given.without_gaps and given.is_usual):
            return
        place, bits = (operator.name, module) if norm is None else norm, payload.bits
        if norm is not None:
            wanted = self.modules.bits(norm)
            if wanted == "off":
                origin = self._keep_exactly(x, payload, norm)
                if self.policy.derive:
                    self.derive(y, Recipe(scaled(x, rstd), origin))
                return
            bits = wanted if payload.place == norm else max(wanted, bits)
        if not ahead(x) and not bool(torch.isfinite(rstd.detach().reciprocal()).all()):
            return  # x cannot be computed from y
        spot = self._spots.get((operator.name, module))
        site = self.sites.at(y, self.call, operator, module, 0 if spot is None else max(0, spot.nth))
        normalized = self._quantized(y, site, site.name + ":normalized", bits, of=x)
        if normalized is None:
            return
        normalized.place = place
        self.storages.of(y).has_payload(values_of(y, Arrangement.of(y)), normalized)
        more = normalized.nbytes - payload.nbytes
        storage.spent += more
        if not self.storages.of(rstd).is_exact:
            more += rstd.nbytes
        self.saved.add(*place, 0, more)
        self.arena.give(payload.replaced(before_normalization(normalized, rstd, payload.dtype)))

    def _keep_exactly(self, x: Tensor, payload: Payload, place: Place) -> Origin:
        """Keep a tensor unchanged in place of its codes, or of those of a cast of it."""
        exact, storage = Exact(x, place), self.storages.of(x)
        storage.exact = weakref.ref(exact)
        self.saved.add(*place, 0, x.untyped_storage().nbytes() - payload.nbytes)
        self.arena.give(payload.replaced(Original(exact, payload.dtype)))
        return original(weakref.ref(exact))

    def counts_as_norm(self, *tensors: Tensor, codes: Payload | None = None) -> None:
        """Count tensors, and codes, as layer normalization's that were counted as those of "other" in this module."""
        operator, module = self.place()
        norm, before = self.modules.norm(module), (operator.name, module)
        if norm is None:
            return
        moved = [self.storages.of(x).recount(x.untyped_storage().nbytes(), before, norm) for x in tensors]
        if codes is not None and codes.place == before:
            codes.place = norm
            moved.append((0, codes.nbytes))
        for raw, kept in filter(any, moved):
            self.saved.add(*before, -raw, -kept)
            self.saved.add(*norm, raw, kept)

    def derive(self, y: Tensor, recipe: Recipe) -> None:
        """Note how an operator's result can be recomputed."""
        arrangement = Arrangement.of(y)
        if type(y) is Tensor and y.requires_grad and arrangement.without_gaps:
            self.storages.of(y).has_recipe(values_of(y, arrangement), recipe)

    def _recipe_before_cast(
        self, x: Tensor, base: Tensor, arrangement: Arrangement, storage: Storage, values: tuple[Any, ...]
    ) -> Recipe | None:
        """Return how to recompute a tensor from the recipe of the operand that autocast cast to it, or to its base; or
        None.
        """
        if (
            x._version != 0
            or not arrangement.without_gaps
            or (x.numel(), x.storage_offset()) != (base.numel(), base.storage_offset())
        ):
            return None
        node: Any = base.grad_fn
        before, form = node.next_functions[0], Arrangement.of(base)
        for given in self.call.operands():
            if (given.grad_fn, given.output_nr) == before and Arrangement.of(given) == form:
                known = self.storages.of(given).recipe(values_of(given, form))
                if known is None:
                    return None
                recipe = Recipe(Cast(x.dtype), known.derivation)
                storage.has_recipe(values, recipe)
                return recipe
        return None

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def pack(self, x: Tensor) -> Exact | Packed:
        """Decide what to keep of a tensor that autograd saves, and return it."""
        call, at_work = self.call, self._at_work
        operator = call.operator
        if operator is None or not at_work:
            operator, module = self.place()
        else:
            module = at_work[-1][1]
        kind, place = type(x), (operator.name, module)
        if (kind is not Tensor and kind is not _Parameter) or not is_strided(x) or forward_ad._current_level >= 0:
            return Exact(x, place)  # with forward-mode AD, tensors have tangents, which codes lack
        memory, base = x.untyped_storage(), x._base
        storage = self.storages.at(memory)
        if storage.lives:
            return Exact(x, place)
        if (base is not None or kind is not Tensor) and is_of_a_parameter(x):
            storage.lives = storage.counted = True  # of a parameter that was created after the pass began
            return Exact(x, place)
        nbytes = memory.nbytes()
        if nbytes == 0:
            return Exact(x, place)
        plain = 0
        if not storage.counted:
            plain, storage.counted, storage.place = nbytes, True, place
        spot = self._spots.get(place)
        if spot is None:
            spot = self._spots[place] = self.sites.spot(place, self.saved.tallies(*place))
        # The number of this tensor among those that the operator saves in this module; each number has its own
        # estimates. Tensors that are kept unchanged count, too, so that names do not depend on sizes.
        spot.nth += 1
        keeper = storage.exact
        is_exact = keeper is not None and keeper() is not None
        of_operator, of_module = spot.tallies
        if x.numel() >= self._least and operator is not ROUGH and not is_exact:
            begin = _now()
            site = self.sites.of(x, call, operator, spot)
            source, added = self._source(x, site, storage, base)
            if source is not None:
                if operator is CHECKPOINT and source.bits != Original.bits:
                    says_what_rounding_does()
                packed = Packed(x, site.arrangement, source, place, spot.tallies, gaps=operator is CHECKPOINT)
                self.packed += 1
                taken = _now() - begin
                of_operator.raw_bytes += plain
                of_operator.kept_bytes += added
                of_operator.seconds += taken
                of_module.raw_bytes += plain
                of_module.kept_bytes += added
                of_module.seconds += taken
                return packed
        exact = Exact(x, place)
        kept = 0 if is_exact else nbytes
        if kept:
            storage.exact = weakref.ref(exact)
        if storage.payloads is not None:
            self._spare_codes(x, storage, exact)
        if plain or kept:
            of_operator.add(plain, kept)
            of_module.add(plain, kept)
        return exact

    def _spare_codes(self, x: Tensor, storage: Storage, exact: Exact) -> None:
        """Have codes that were made of a tensor before decode to the tensor itself, which is now kept unchanged."""
        payload = storage.payload(values_of(x, Arrangement.of(x)))
        if payload is not None and not isinstance(payload.instead, Original):
            payload.instead = Original(exact)

    def _keep_probabilities(self, outputs: Any) -> None:
        """Keep the model's outputs unchanged where softmax or sigmoid made them.

        A loss may take their logarithm, whose gradient is one over the probability. The codes of small probabilities
        do not tell that.
        """
        for output in tensors_in(outputs):
            if type(output) is not Tensor or output.grad_fn is None or not is_strided(output):
                continue
            x = base_of(output)
            operator = None if x.grad_fn is None else _PROBABILITIES.get(x.grad_fn.name())
            storage = self.storages.of(x)
            if operator is not None and storage.payloads is not None and not storage.is_exact:
                exact = Exact(x, (operator, ""))
                self._spare_codes(x, storage, exact)
                storage.exact = weakref.ref(exact)
                self.saved.add(operator, "", 0, x.untyped_storage().nbytes())

    def _source(self, x: Tensor, site: Site, storage: Storage, base: Tensor | None) -> tuple[Source | None, int]:
        """Return the codes of a tensor, or how to recompute it; and how many more bytes are kept for it.

        None instead of codes means: keep the tensor unchanged. ``base`` is what the tensor is a view of.
        """
        bits, operator, arrangement = site.bits, site.operator, site.arrangement
        if bits == "off":
            return None, 0
        self.between_graphs += operator is COMPILED
        if not site.takes_codes or not self._at_work or x.is_meta or x.is_neg() or x.is_inference():
            return None, 0
        if site.may_be_mask and self.call.is_mask(x):
            return None, 0
        needed = self._bits_of_scores(site, bits) if operator.name == "attention" else bits
        if self._extreme or not needed:
            self.saved.add(operator.name, site.module, 0, 0, outliers=1)
            return None, 0
        bits = needed
        values = x.storage_offset(), x._version, x.dtype, site.elements
        payload = None if storage.payloads is None else storage.payload(values)
        if payload is not None and payload.bits >= bits:
            return payload, 0
        recipe = None if storage.recipes is None else storage.recipe(values)
        if recipe is None:
            if site.may_be_parameter:
                key = operator, site.module, site.nth
                parameter = self.call.parameter_before_cast(x, key, self.modules.casts)
                if parameter is not None:  # the parameter lives anyway, and backward can cast it again
                    there = is_cast_of(x, arrangement, parameter)
                    return Original(Exact(parameter, site.place), x.dtype) if there else None, 0
            base = x if base is None else base
            node = base.grad_fn
            if node is not None and node.name() == "ToCopyBackward0":
                recipe = self._recipe_before_cast(x, base, arrangement, storage, values)
        derivation = None if recipe is None else recipe.derivation()
        if derivation is not None and derivation.bits >= bits:
            return derivation, derivation.count()
        if storage.spent and storage.spent + x.numel() * bits // 8 > x.untyped_storage().nbytes():
            return None, 0  # of views that overlap: all of the memory takes less than codes of each view
        normalization = self.normalization
        if normalization is not None and normalization.made(x):
            assert normalization.origin is not None
            return normalization.origin(), 0
        function = None  # computes x from what is packed; None: x itself is packed
        if normalization is not None and normalization.takes(x):
            payload, function = self._normalized_form(x, site, bits, normalization), normalization.input(x)
        elif self.call.normalizes and self.call.is_log_probabilities(x):
            payload, function = self._quantized(roots(x), site, site.name + ":roots", bits, of=x), from_roots(x.dtype)
        else:
            payload = self._quantized(x, site, site.name, bits, of=x)
        if payload is None:
            return None, 0
        nbytes = payload.nbytes
        storage.spent += nbytes
        if function is None:
            storage.has_payload(values, payload)
            return payload, nbytes
        recipe = Recipe(function, weakref.ref(payload))
        storage.has_recipe(values, recipe)
        return recipe.derivation(), nbytes

    def _bits_of_scores(self, site: Site, bits: Literal[8, 4, 2]) -> Literal[8, 4, 2, 0]:
        """Return the bits for what fused attention saves: more than ``bits``, or 0, where scores are too large."""
        call = self.call
        if call.bits is None:
            call.bits = bits_of_scores(call, bits, self.policy, self.estimates, site.name + ":scores")
        return call.bits

    def _quantized(
        self, x: Tensor | None, site: Site, name: str, bits: Literal[8, 4, 2], *, of: Tensor
    ) -> Payload | None:
        """Return the codes of ``x``; None where it has outliers, or ``x`` is None. None is counted as an outlier.

        ``of`` is the tensor that the operator saves: ``x`` itself, or the one that ``x`` is the normalized form of.
        """
        made: Payload | Outliers | None = None
        if x is not None:
            count, apart, lines = site.neighbours, None, x
            if count is not None:
                lines, rows = neighbours(Arrangement.of(x).flat(x.detach()), count)
            else:
                rows, apart = (site.own if x is of else None) or site.cut(x, self.call)
                if apart is None:
                    lines = Arrangement.of(x).lines(x.detach(), rows)
            if x.dtype is torch.float16:
                if apart is not None:
                    lines, apart = Arrangement.of(x).lines(x.detach(), rows), None
                lines = lines.float()
            made = quantized(
                lines, rows, bits, x.dtype, self.arena, self.policy, self.estimates, name, own=count is not None,
                apart=apart,
            )  # fmt: skip
            if type(made) is Payload:
                made.numel, made.place = x.numel(), site.place
                return made
        assert not isinstance(made, Payload)
        # Extreme values say nothing of other tensors where the tensor has no gradient, since no parameter took part in
        # it, or where they are the −inf of a mask.
        extreme = made is None or made.extreme
        self._extreme |= extreme and of.requires_grad and not is_masked(of)
        self.saved.add(*site.place, 0, 0, outliers=1)
        return None

    def _normalized_form(
        self, x: Tensor, site: Site, bits: Literal[8, 4, 2], normalization: Normalization
    ) -> Payload | None:
        """Return the codes of an input's normalized form; None where it has outliers, or the input cannot be computed
        from it.

        Where the host need not look at the normalized form first, its codes are made when the operator has computed its
        statistics.
        """
        name, arrangement, payload = site.name + ":normalized", site.arrangement, None
        if x.dtype is not torch.float16 and arrangement.is_usual and arrangement.without_gaps and ahead(x):
            rows, apart = site.own or site.cut(x, self.call)
            assert apart is not None
            made = promised(x, rows, bits, self.arena, self.policy, self.estimates, name, apart)
            if made is not None:
                payload, normalization.owed = made
        if payload is None:
            with torch.no_grad():
                n = normalization.normalized(x)
            payload = self._quantized(n, site, name, bits, of=x)
        if payload is not None:
            normalization.origin = weakref.ref(payload)
        return payload


#: Autograd nodes of operators that return probabilities → the operator's name in a policy.
_PROBABILITIES = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "other"}


@unseen
def _pack(recorder: weakref.ref[Recorder], x: Tensor) -> Exact | Packed:
    there = recorder()
    return Exact(x, ("an operator", "the model")) if there is None else there.pack(x)


@unseen
def _unpack(kept: Exact | Packed) -> Tensor:
    return kept.restore()
