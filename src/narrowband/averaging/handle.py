"""The base class of handles: statistics, pause and resume, plans, checkpoints, and removal.

:class:`Handle` adds to the core of averaging the methods that users call between two steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from narrowband.averaging.core import Averaging
from narrowband.averaging.state import VERSION, check_state, facts_of, kept, states_of_all_ranks
from narrowband.averaging.stats import LayerStats, StepStats
from narrowband.averaging.waiting import Rest
from narrowband.codecs.base import squared_norm
from narrowband.collectives import all_reduce_nbytes
from narrowband.stats import Stats
from narrowband.units import counted, format_bytes, format_count, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from torch import Tensor

    from narrowband.adapt import Plan
    from narrowband.averaging.agreement import Facts
    from narrowband.averaging.saved import Saved
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method

__all__ = ["Handle"]

log = logging.getLogger(__name__)

_LOAD_ADVICE = (
    "Call load_state_dict on all ranks, between the same two steps, with states that were saved at the same step. No "
    "state was loaded on any rank"
)


class Handle(Averaging):
    """Averages tensors over ranks. ``repr(handle)`` shows its settings and how much traffic it saved."""

    def __repr__(self) -> str:
        total, parameters = self.stats().total, self.layers.parameters
        compressed, numel = format_count(parameters.compressed_numel), format_count(parameters.numel)
        facts = [
            f"{str(self.compression)!r}",
            counted(self.size, "rank"),
            f"{counted(len(parameters.shapes), 'layer')} with {compressed} of {numel} parameters",
            f"residuals of {format_bytes(self.residual_nbytes)}",
        ]
        if self._removed:
            facts.append("removed")
        elif self._paused:
            facts.append("paused")
        if total.steps:
            facts.append(f"{counted(total.steps, 'step')} of {format_bytes(total.sent_bytes / total.steps)}")
            facts.append(f"{total.ratio:.3g} times less than uncompressed")
        if total.relative_error is not None:
            facts.append(f"relative error {total.relative_error:.2g}")
        return f"{type(self).__name__}({', '.join(facts)})"

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles, with an error that says what to do instead."""
        raise TypeError(
            f"a {type(self).__name__} belongs to one process and its process group, and cannot be copied or pickled: "
            "save handle.state_dict(), and load it into a handle of the other model"
        )

    def stats(self) -> Stats[StepStats]:
        """Return bytes, seconds and relative error: in total, and of the last finished step. Waits for a GPU."""
        self._settle(wait=True)
        with self._lock:
            return Stats(StepStats(**vars(self._total)), StepStats(**vars(self._last)))

    def layer_stats(self) -> dict[str, LayerStats]:
        """Return statistics of each compressed parameter, by name. Call between steps; reads all residuals once.

        Raises:
            RuntimeError: called inside backward.

        Example:
            >>> worst = max(handle.layer_stats().items(), key=lambda item: item[1].relative_error or 0.0)
        """
        self._check_between_steps("layer_stats")
        layers, found = self.layers, {}
        with self._lock:
            sent, errors = dict(self._sent), dict(self._errors)
        for p, own in layers.parameters.by_tensor.items():
            if not own.compressed:
                continue
            name, numel = own.name, own.shape.numel()
            kept = [x for state in layers.states.values() if (x := state.residual(name)) is not None]
            found[name] = LayerStats(
                spec=str(layers.spec_for(name)),
                numel=numel,
                raw_bytes=all_reduce_nbytes(numel * p.element_size(), self.size),
                sent_bytes=sent.get(name, 0),
                relative_error=errors.get(name),
                residual_norm=math.sqrt(math.fsum(squared_norm(x) for x in kept)) if kept else None,
            )
        return found

    def log_dict(self, prefix: str = "") -> dict[str, float]:
        """Return numbers for a logger, by name: of the last step, and ``total_…`` since the start.

        Args:
            prefix: put before every name, such as ``"compression/"``.

        Returns:
            ``ratio`` (raw / sent bytes), ``sent_bytes`` and ``raw_bytes`` (of this rank), ``waiting_seconds`` (between
            the end of backward's own work and the last average), ``relative_error`` (the latest; missing until it was
            measured), ``residual_bytes``, ``total_ratio``, ``total_sent_bytes`` and ``total_skipped_steps``.

        Example:
            >>> for name, value in handle.log_dict("compression/").items():
            ...     writer.add_scalar(name, value, step)
        """
        stats = self.stats()
        last, total = stats.last, stats.total
        values = {
            "ratio": last.ratio,
            "sent_bytes": last.sent_bytes,
            "raw_bytes": last.raw_bytes,
            "waiting_seconds": last.waiting_s,
            "relative_error": total.relative_error,
            "residual_bytes": self.residual_nbytes,
            "total_ratio": total.ratio,
            "total_sent_bytes": total.sent_bytes,
            "total_skipped_steps": total.skipped,
        }
        return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}

    @property
    def residual_nbytes(self) -> int:
        """Bytes of memory that feedback takes on this rank: residuals, velocities, factors. 0 before the first step."""
        return self.layers.residual_nbytes

    @property
    def step(self) -> int:
        """How many steps have been averaged."""
        return self._step

    @property
    def paused(self) -> bool:
        """Whether steps are averaged uncompressed, see :meth:`pause`."""
        return self._paused

    @property
    def removed(self) -> bool:
        """Whether compression has ended, see :meth:`remove`."""
        return self._removed

    def pause(self) -> None:
        """Average uncompressed from the next step on. Residuals are kept until :meth:`resume`. Call on all ranks."""
        self._paused = True

    def resume(self) -> None:
        """Compress again from the next step on. Call on all ranks.

        Raises:
            RuntimeError: the handle was removed.
        """
        self._check_not_removed("resume")
        self._paused = False

    def remove(self) -> None:
        """End compression. Call on all ranks, between steps, or after a step that broke off.

        Residuals are dropped, so save :meth:`state_dict` first if you may want to resume. The process group, threads
        and memory are released; :meth:`stats` stays available. Garbage collection of this object does the same. (The
        group is kept for the next handle among the same ranks.)

        Raises:
            RuntimeError: called inside backward.
            DisagreementError: another rank makes another call.
        """
        if self._removed:
            return
        broke_off = self._broke_off()
        if not broke_off and (self._open_step is None or not self._open_step.abandoned):
            self._check_between_steps("remove")
        if broke_off:  # other ranks may be in any call, so none can be compared with
            self._loan.broken = True
        elif self._engine.error is None:
            try:
                self._agree({"call": "remove"}, self._advice)
            except RuntimeError as error:  # go on even if other ranks have gone
                self._loan.broken = True
                log.warning("remove: this rank could not compare its call with those of other ranks: %s", error)
        self._removed = True
        self._close()
        self._peers.close()
        self.layers.clear()
        if self._waiting is not None:
            self._waiting.stop()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that begins, from 0 on, for a warm-up that counts epochs; as ``DistributedSampler.set_epoch``.
        Call on all ranks.
        """
        epoch = whole_number("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must not be negative")
        self._epoch = epoch

    def set_layers(self, specs: Mapping[str, str | Codec | Compression | Method]) -> None:
        """Give some layers specs of their own, from the next step on. Call on all ranks, between steps.

        Residuals are kept, and so are warm-started factors: a smaller PowerSGD rank drops columns, a larger one draws
        new ones.

        Args:
            specs: parameter name → spec, with the model's codec or another one. If the model has feedback, every layer
                has feedback; a spec may omit it, and residuals move along. With ``ef21``, all layers have ``ef21``.
                With ``dgc``, only ``topk`` is allowed, as in ``"topk:density=0.01"``, and during the warm-up no layer
                sends less than the rest does. A later call adds to earlier ones.

        Raises:
            TypeError: no dictionary.
            ValueError: a name that is not compressed, or a spec that cannot be mixed with the model's.
            UnsupportedError: a spec that is not for gradients.
            DisagreementError: another rank has such an error, other specs, or makes another call. With any of these
                errors, no layer has changed on any rank.

        Example:
            >>> handle = nb.compress_gradients(model, "powersgd:rank=4")
            >>> handle.set_layers({"head.weight": "powersgd:rank=1"})
        """
        self._check_between_steps("set_layers")
        chosen: Mapping[str, Compression] = {}
        failure: Exception | None = None
        try:
            given: object = specs
            if not isinstance(given, Mapping):
                raise TypeError(
                    "set_layers takes a dictionary from parameter names to specs, such as "
                    f'{{"head.weight": "fp16"}}, not {type(given).__name__}'
                )
            chosen = self._checked_layers(specs)
        except Exception as error:  # of any kind: other ranks wait in the comparison
            failure = error
        texts = {name: str(spec) for name, spec in chosen.items()}
        self._agree({"call": "set_layers", "spec of layer": texts}, self._advice, failure)
        self.layers.set(chosen)
        self._open_pairs()

    def _checked_layers(self, specs: Mapping[str, str | Codec | Compression | Method]) -> Mapping[str, Compression]:
        """Return the specs that :meth:`set_layers` gives to layers of this rank.

        Raises:
            ValueError, UnsupportedError: they cannot be given.
        """
        return self.layers.checked(specs)

    def _agree(self, facts: Facts, advice: str, failure: Exception | None = None) -> None:
        """Compare with the other ranks what users have called, between steps; see :meth:`Agreement.now`."""
        if self._engine.error is None:
            self._compare(facts, advice, failure)
        elif failure is not None:  # no rank takes another step
            raise failure

    @property
    def plan(self) -> Plan | None:
        """The plan that was decided last, or given at set-up; None if there is none."""
        return self._controller.plan

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to resume bit for bit. The state differs by rank: save one file per rank.

        Exception: under DDP among more than two ranks, sums of an all-reduce (``none``, ``fp16`` and ``bf16``) may
        differ in the last bits. Their order depends on DDP's buckets, and a resumed process begins with DDP's first
        layout of buckets.

        Call it after an optimizer's step, when there are no gradients that one would still step with: a checkpoint has
        none. Where optimizers take turns, averages that wait for one count as thrown away.

        Tensors in the state are those in use, not copies; save or clone them before the next step.
        """
        self._check_between_steps("state_dict")
        rest = Rest() if self._waiting is None else self._waiting.rest()
        return {
            "version": VERSION,
            "spec": str(self.compression),
            "step": self._step,
            "epoch": self._epoch,
            "paused": self._paused,
            "layers": self.layers.override_texts(),
            "seed": self._seed,
            "loss_scale": self._loss_scale.value,
            "rank": self._peers.rank,
            "world_size": self._peers.size,
            "memory formats": self.layers.memory_formats,
            "feedback": self.layers.saved(self.layers.state, rest.used) if self.layers.state else {},
            "others": {name: self.layers.saved(state, rest.used) for name, state in self.layers.states.items() if name},
            **rest.state_dict(),
            "controller": self._controller.state_dict(),
        }

    @property
    def stateful(self) -> Saved:
        """The object that ``torch.distributed.checkpoint`` saves and loads, beside model and optimizer, on the same
        number of ranks; for another number, see :meth:`load_saved`.

        Example:
            >>> import torch.distributed.checkpoint as dcp
            >>> dcp.save({"model": own, "handle": handle.stateful}, checkpoint_id="step-0")  # doctest: +SKIP
            >>> dcp.load({"handle": handle.stateful}, checkpoint_id="step-0")  # doctest: +SKIP
        """
        from narrowband.averaging.saved import Saved

        return Saved(self)

    def load_saved(self, folder: str | PathLike[str], key: str = "handle") -> None:
        """Load what ``dcp.save`` wrote of :attr:`stateful`, on any number of ranks. Call on all ranks.

        Args:
            folder: the checkpoint's folder.
            key: the name that :attr:`stateful` was saved under.

        Raises:
            ValueError: there is no such state, or the errors of :meth:`load_state_dict`.
        """
        from narrowband.averaging.saved import states_in

        try:
            states = states_in(folder, key, self)
        except Exception as failure:  # of any kind: other ranks wait in the comparison
            self._check_between_steps("load_saved")
            self._agree({"call": "load_state_dict"}, _LOAD_ADVICE, failure)
            raise
        self.load_state_dict(states)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from what :meth:`state_dict` returned. Call on all ranks.

        This is a transaction. Before anything changes, every rank checks its state, and ranks compare what they are
        about to load. If any rank cannot load its state, or the ranks have states of different steps, all of them
        raise.

        Args:
            state: this rank's own state, or a list with the states of all former ranks. If there are as many ranks as
                then, each takes its own from the list. Otherwise the sum of the residuals is shared evenly among the
                present ranks. (With ``ef21``, every rank starts with what all ranks had in common.)

        Raises:
            ValueError: a state of another rank, number of ranks or model; an incomplete or invalid state; states of
                different steps; or residuals in a model without feedback.
            RuntimeError: called inside backward, or after an exchange broke off.
        """
        self._check_between_steps("load_state_dict")
        if self._engine.error is not None:
            raise RuntimeError(
                f"load_state_dict: the exchange stopped at an earlier step ({self._engine.error}); restart all ranks, "
                "and load the state in the new processes"
            ) from self._engine.error
        given: Any = state
        of_all = isinstance(given, Iterable) and not isinstance(given, (Mapping, str, bytes))
        failure: ValueError | None = None
        facts: Facts = {"call": "load_state_dict"}
        try:
            states = states_of_all_ranks(list(given), self._state_facts) if of_all else None
            mine, residuals = self._loadable(state) if states is None else self._loadable_of_all(states)
            facts = {**facts, **self._state_facts(mine)}
        except ValueError as problem:
            failure = problem
        except Exception as problem:  # of any kind: other ranks wait in the comparison below
            failure = ValueError(f"the state cannot be loaded: {problem!r}")
        self._agree(facts, _LOAD_ADVICE, failure)
        self.layers.load(mine["layers"], residuals)
        self._controller.load_state_dict(mine["controller"])
        self._open_pairs()
        self._step, self._epoch = mine["step"], mine["epoch"]
        self._paused = mine["paused"]
        if self._waiting is not None:
            self._waiting.restart(Rest.of(mine))
        self._seed = mine["seed"]
        self._loss_scale.value = mine["loss_scale"] or 1.0  # None in older states: gradients were not scaled
        self._total, self._last, self._sent, self._errors, self._unread = StepStats(), StepStats(), {}, {}, []

    def _state_facts(self, state: Mapping[str, Any]) -> Facts:
        """Return what must be equal in the states that ranks load."""
        return facts_of(state)

    def _loadable(self, state: object) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        """Return this rank's state and residuals, after checking that both can be loaded."""
        mine = check_state(state)
        here, there = (self._peers.rank, self._peers.size), (mine["rank"], mine["world_size"])
        if here != there:
            raise ValueError(
                f"this is rank {here[0]} of {here[1]}, but the state is of rank {there[0]} of {there[1]}; load each "
                "rank's own state, or, if the number of ranks has changed, the list of all ranks' states on every "
                "rank. If one rank alone had saved its state, do not load it on any rank: residuals then "
                "begin empty"
            )
        residuals = kept(mine)
        self.layers.check_load(mine["layers"], residuals, mine["spec"], mine.get("memory formats"))
        self._controller.check_state(mine["controller"])
        return mine, residuals

    def _loadable_of_all(
        self, states: Sequence[Mapping[str, Any]]
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        """The same for the states of all former ranks: this rank's own if the number of ranks is unchanged, else merged
        residuals.
        """
        if len(states) == self._peers.size:
            return self._loadable(states[self._peers.rank])
        for state in states:
            self.layers.check_load(state["layers"], kept(state), state["spec"], state.get("memory formats"))
        self._controller.check_state(states[0]["controller"])
        return states[0], self.layers.merged([kept(state) for state in states])
