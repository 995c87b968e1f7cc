"""Rounds: each replica trains by itself for some steps, then all replicas exchange their updates and apply the mean.

An *update* is the change that a replica's optimizer has made to the parameters since the last round. θ are the
parameters that all replicas had after that round. One round computes (Douillard et al. 2023, DiLoCo, arXiv 2311.08105,
algorithm 1; an update is minus the paper's outer gradient)::

    Δᵢ = θᵢ − θ                  on each replica, compressed with feedback
    θ ← outer(θ, mean of Δᵢ)     by default θ + mean

Adam divides by the second moment of the gradients that it sees. Here it sees the replica's own gradients, complete and
on time. If gradients were compressed and averaged instead, it would see sparse and late ones.

The model may be divided into fragments that have their rounds in turn, and a replica may train on while a fragment is
being exchanged (Streaming DiLoCo, arXiv 2501.18512, algorithm 2). This module decides when rounds happen;
:mod:`narrowband.updates.fragments` keeps θ and applies the means.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowband import kernels
from narrowband.averaging.handle import Handle
from narrowband.averaging.replicas import begin_with_the_first
from narrowband.averaging.settings import Settings
from narrowband.averaging.step import ADVICE
from narrowband.averaging.who import forget, remember_updates
from narrowband.collectives import all_reduce_nbytes
from narrowband.errors import UnsupportedError
from narrowband.feedback import ErrorFeedback
from narrowband.kernels.compiling import announced
from narrowband.units import counted
from narrowband.updates.averaged import Averaged, some
from narrowband.updates.fragments import Fragment, OuterStep, compile_loops, due_after, split
from narrowband.updates.length import MeasuredLength
from narrowband.updates.repeated import Repeated
from narrowband.updates.settings import Rounds, check_in_place
from narrowband.updates.state import SavedRounds, UnderWay
from narrowband.updates.stepping import Steps, facts_of
from narrowband.updates.switched_off import SwitchedOff

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from narrowband.averaging.agreement import Facts
    from narrowband.averaging.saved import Saved
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method

__all__ = ["UpdateCompression"]

log = logging.getLogger(__name__)


class UpdateCompression(Handle):
    """The handle of :func:`compress_updates`. ``repr(handle)`` shows its settings and the bytes that it has saved.

    Its ``step`` and its statistics count rounds; with several fragments, each fragment's round counts as one.
    ``stats().total.ratio`` compares with one uncompressed all-reduce per round. Compared with one all-reduce per
    optimizer step, training sends ``every`` times less again.

    Attributes:
        every: optimizer steps from one round to the next.
        outer: the outer optimizer, which applies the mean of the updates; attach learning rate schedules to it. None
            where ``outer=`` was a number or ``"auto"``.
    """

    #: Whether the first round compares the updates of all replicas. All must be in it then.
    _compares_updates = True

    _advice = (
        "All replicas have to take the same number of steps, and parameters may only be changed by these, or in the "
        f"same way on all replicas. {ADVICE}"
    )

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        group: dist.ProcessGroup,
        rounds: Rounds,
        mates: Sequence[dist.ProcessGroup] = (),
        *,
        among: DistributedDataParallel | None = None,
    ) -> None:
        self.every = cast("int", rounds.every)
        self._rounds = rounds
        self._stepped_by = facts_of(model, optimizers)
        self._steps = self._steps_in_round = 0
        self._skipped = 0
        self._check_next = False
        self._last_length = 1.0  # what `length` returns once the handle is removed
        self._scaled_by = 1.0  # by which this replica's last update was scaled
        self._under_way: UnderWay | None = None
        self._in_round: tuple[Sequence[Fragment], bool] = ((), True)
        self._averaged = Averaged(model, rounds.buffers)
        self.outer: Optimizer | None = None
        outer_parameters: dict[str, nn.Parameter] = {}
        if callable(rounds.outer):
            stand_ins = dict(self._averaged.stand_ins)
            outer_parameters = {name: nn.Parameter(stand_ins[name].detach()) for name in self._averaged.trained}
            self.outer = rounds.outer(list(outer_parameters.values()))
            if not isinstance(self.outer, Optimizer):
                raise TypeError(f"outer={rounds.outer!r} returned {self.outer!r}; it must return an optimizer")
        self._outer_step = OuterStep(self.outer, outer_parameters)
        super().__init__(
            self._averaged.stand_ins,
            self._averaged.small,
            settings,
            group,
            set_up="compress_updates",
            step="round",
            mates=mates,
        )
        with announced("updates", say=self._peers.rank == 0):
            compile_loops(self.device)

        tensors = self._averaged.tensors()
        self._fragments = [self._fragment(names, tensors, at) for at, names in enumerate(self._names)]
        self._saved = SavedRounds(
            self._fragments, self.every, rounds.split, rounds.residuals, rounds.overlap, self.outer
        )
        self._begin_with_the_first()
        for fragment in self._fragments:
            fragment.keep(tensors, parameters=False)
        self._repeated = Repeated(self.device, looks=self._compares_updates)
        self._stepping = Steps(model, optimizers, rounds.grad_scaler, before=self._before_step, after=self._after_step)
        self._off = None if among is None else SwitchedOff(among)
        remember_updates(model, self, group)

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _connect(self, group: dist.ProcessGroup) -> None:
        super()._connect(group)
        if self.layers.fuses_small:
            # Compression errors could make a variance negative.
            self.layers.parameters.leave_uncompressed(self._averaged.buffers)

    def _set_up_facts(self, call: str) -> Facts:
        own = self._rounds.facts(self.outer, self._averaged.left_out)
        # Here, where ranks that hold other shards learn of an error: they may have more layers.
        self._names = self._split(self._averaged.tensors())
        return {**super()._set_up_facts(call), **own, **self._stepped_by}

    def _begin_with_the_first(self) -> None:
        """Copy the first replica's parameters and buffers to all replicas. A collective."""
        begin_with_the_first(self._averaged.model, self.process_group)

    def _split(self, tensors: Mapping[str, Tensor]) -> list[list[str]]:
        """Return the names of each fragment's tensors. All tensors that are no layers go into the first fragment: they
        are one message, however few they are.
        """
        by_name = self.layers.parameters.by_name
        layers = {name: tensors[name].numel() for name, parameter in by_name.items() if parameter.compressed}
        small = sum(x.numel() for name, x in tensors.items() if name not in layers)
        own = [set(names) for names in split(layers, small, self._rounds.fragments, self._rounds.split)]
        own[0].update(name for name in tensors if name not in layers)
        return [[name for name in tensors if name in names] for names in own]

    def _fragment(self, names: Sequence[str], tensors: Mapping[str, Tensor], at: int) -> Fragment:
        own = {name: tensors[name] for name in names}
        fixed = self._rounds.outer if isinstance(self._rounds.outer, (int, float)) else 1.0
        away = self._rounds.offload and self.device.type != "cpu"
        fragment = Fragment(own, self._averaged.buffers, length=fixed, offload=away)
        if self._rounds.outer == "auto":
            fragment.length = MeasuredLength(fragment.parameter_parts(), self._settings.seed + at, self.device)
        return fragment

    def _checked_layers(self, specs: Mapping[str, str | Codec | Compression | Method]) -> Mapping[str, Compression]:
        """See :meth:`Handle._checked_layers`. Some feedback cannot be combined with ``residuals="in-place"``."""
        chosen = super()._checked_layers(specs)
        if self._rounds.residuals == "in-place":
            check_in_place(chosen.values())
        return chosen

    @property
    def model(self) -> nn.Module:
        """The module that this replica trains, without what is around it."""
        return self._averaged.model

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that step it, in order."""
        return self._stepping.optimizers

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler that may skip their steps."""
        return self._rounds.grad_scaler

    # ---- when --------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps since the last round; with several fragments, since the last fragment's round."""
        return self._steps

    @property
    def skipped_updates(self) -> int:
        """Number of rounds to which this replica contributed nothing because its update held inf or NaN."""
        return self._skipped

    @property
    def length(self) -> float:
        """The factor by which the mean of the updates is multiplied before it is added; with several fragments, their
        average. 1 where an outer optimizer applies the mean.
        """
        if not self._fragments:
            return self._last_length
        return sum(each.length.value for each in self._fragments) / len(self._fragments)

    @torch.no_grad()
    def _before_step(self, *, stepping: bool = True) -> None:
        """Copy the parameters into the anchors that are missing, before the first step since the last round.

        Args:
            stepping: whether an optimizer step follows, so that residuals may be put in place.

        Raises:
            RuntimeError: gradients are averaged again, too.
        """
        if self._off is not None:
            self._off.check()
        if not all(fragment.anchored for fragment in self._fragments):
            tensors = self._averaged.tensors()
            for fragment in self._fragments:
                if not fragment.anchored:
                    fragment.keep(tensors, parameters=True)
                    if stepping and self._rounds.residuals == "in-place":
                        self._put_in_place(fragment, tensors)

    def _put_in_place(self, fragment: Fragment, tensors: Mapping[str, Tensor]) -> None:
        """Move the layers' residuals into the replica's own parameters. What rounding loses stays in the residuals."""
        by_name = self.layers.parameters.by_name
        for state in self.layers.states.values():
            if isinstance(state, ErrorFeedback):
                for name in fragment.names:
                    residual = state.residual(name)
                    if residual is not None:
                        residual.mul_(state.decay / self._scaled_by)
                        fragment.put_in_place(tensors[name], residual, by_name[name].form)
                        state.add_residual(name, residual.mul_(self._scaled_by))

    def _after_step(self) -> None:
        self._steps += 1
        if self._under_way is not None:
            self._under_way.steps += 1
            if self._under_way.steps == self._rounds.overlap:
                self._land()
        due = self._due()
        if due is not None:
            self._begin_round(due)

    def _due(self) -> int | None:
        """Return the index of the fragment whose round is due now, or None. Rounds are equally spaced. The last
        fragment's round is due after every ``every``-th step, or later if it could not begin then.
        """
        count = len(self._fragments)
        if self._steps >= self.every:
            return count - 1
        return next((at for at in range(count) if self._steps == due_after(at, self.every, count)), None)

    def _begin_round(self, at: int) -> None:
        if len(self._fragments) == 1 and not self._rounds.overlap:
            self.average()
            return
        self._check_between_steps("step")
        tensors = self._averaged.tensors()
        if self._rounds.overlap:
            self._depart(at, tensors)
        else:
            self._hold_round([self._fragments[at]], tensors)

    # ---- rounds in which the replica waits ---------------------------------------------------------------------------

    @torch.no_grad()
    def average(self) -> None:
        """Hold a round of the whole model now, and wait until it is applied. Replicas are equal afterwards. Call it on
        all ranks, between steps.

        Without fragments and overlap this happens automatically after every ``every``-th step. Call it after the last
        step, and before a replica is saved or evaluated. If no replica has taken a step since the last round, nothing
        changes.

        A replica whose update holds inf or NaN logs a warning and contributes zeros: all replicas move by the sum of
        the other updates, divided by the number of all replicas. If the mean itself is not finite, the parameters stay
        as they were after the last round.

        Raises:
            DisagreementError: ranks are about to do different things, or replicas differ.
            UnsupportedError: a parameter requires a gradient that did not when ``compress_updates`` was called.
            ValueError: an averaged tensor has another size or dtype than at that time. Nothing has changed then.
            RuntimeError: the exchange broke off, now or at an earlier round. The parameters are then as they were after
                the last round; with several fragments, those of the fragments in this exchange.
        """
        self._check_between_steps("average")
        if self._under_way is None and not any(fragment.anchored for fragment in self._fragments):
            # Replicas that have taken other numbers of steps wait in a round.
            self._agree({"call": "average without a step since the last round"}, self._advice)
            return
        tensors = self._averaged.tensors()
        if self._under_way is not None:
            self._land()
        self._before_step(stepping=False)
        self._hold_round(self._fragments, tensors)

    @torch.no_grad()
    def _hold_round(self, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor]) -> None:
        brings = self._take_updates(fragments, tensors)
        self._count_anew(fragments[-1])
        try:
            self._exchange(fragments, share=float(brings))
            self._apply(fragments, tensors)
        finally:
            for fragment in fragments:
                fragment.end()
                fragment.keep(tensors, parameters=False)

    def _count_anew(self, fragment: Fragment) -> None:
        """Count steps from 0 if this is the last fragment, whose update was taken. Not before: if memory is short, the
        round is due again after the next step.
        """
        self._steps_in_round = min(self._steps, self.every)  # a round that is held late counts as held in time
        if fragment is self._fragments[-1]:
            self._steps = 0

    def _take_updates(self, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor]) -> bool:
        """Compute the fragments' updates, and reset the tensors to their values after the last round.

        Returns:
            Whether the updates are finite. Otherwise they are zeros now.
        """
        return self._are_brought(fragments, tensors, finite=[fragment.take(tensors) for fragment in fragments])

    def _are_brought(
        self, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor], *, finite: Sequence[bool]
    ) -> bool:
        """Return whether this replica contributes its updates: they must be finite on all of its ranks. Otherwise set
        them to zero, and reset the whole replica to the anchors, which all replicas have in common.
        """
        if self._averaged.on_all_parts(all(finite), self.device):
            return True
        self._skipped += 1
        names = [name for fragment in fragments for name in fragment.not_finite(tensors)]
        log.warning(
            "round %d: the update of rank %d holds inf or NaN in %s, so this rank contributes zeros to the round; the "
            "state of its optimizer may hold inf or NaN, too",
            self.step,
            self._peers.rank,
            some(names) or "a part of the model that another rank of this replica holds",
        )
        for fragment in fragments:
            fragment.bring_nothing()
        for fragment in self._fragments:
            if fragment.anchored:  # otherwise its tensors are equal on all replicas already
                fragment.go_back(tensors)
        return False

    def _exchange(self, fragments: Sequence[Fragment], *, share: float) -> None:
        """Exchange the updates and replace them with their means, in the same memory.

        Args:
            fragments: whose updates are exchanged, as one step of the averaging core.
            share: the factor by which this replica's update was scaled; 0 where it contributes none.
        """
        samples = [each.length.begin(each.updates, share=share, size=self.size) for each in fragments]
        self._note_updates(fragments)
        for future in self._send(fragments, waiting=True):
            future.wait()
        for fragment, sample in zip(fragments, samples, strict=True):
            self._measure(fragment, sample)
        self._compare_updates()

    def _note_updates(self, fragments: Sequence[Fragment]) -> None:
        """Note what this replica brings of parameters: buffers may differ though all gradients are equal."""
        tensors = self._averaged.tensors()
        groups = [group for fragment in fragments for group in fragment.groups]
        parts = (part for group in groups for part in group.parts(group.update, tensors))
        self._repeated.note(update for name, _, update in parts if name not in self._averaged.buffers)

    def _compare_updates(self) -> None:
        """Warn if all replicas brought the same. Every rank calls this when no other message is in flight."""
        self._repeated.compare(self.process_group, size=self.size, say=self._peers.rank == 0)

    def _send(self, fragments: Sequence[Fragment], *, waiting: bool) -> list[torch.futures.Future[Tensor]]:
        self._in_round = fragments, waiting
        groups = [group for fragment in fragments for group in fragment.groups]
        return [self.feed(group.update, group.names, last=group is groups[-1]) for group in groups]

    def _measure(self, fragment: Fragment, sample: Tensor | None) -> None:
        """Measure the fragment's length by an all-reduce of the samples, if there are any. Every rank calls this in the
        same round, when no other message is in flight.
        """
        if sample is not None:
            fragment.length.take(sample, self.process_group, self.size)
            self._count_sent(all_reduce_nbytes(sample.nbytes, self.size))

    def _apply(self, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor]) -> None:
        """Apply the means, if they are finite."""
        if self._are_finite(fragments):
            for fragment in fragments:
                fragment.go_along(tensors, self._outer_step)

    def _are_finite(self, fragments: Sequence[Fragment]) -> bool:
        if all(fragment.is_finite() for fragment in fragments):
            return True
        log.warning(
            "round %d: the mean of the updates holds inf or NaN; parameters stay as they were after the last round",
            self.step - 1,
        )
        return False

    def _step_facts(self) -> Facts:
        """Return what ranks compare before a round: the steps that each has taken, since one that is in the round of
        another fragment would send other messages; and, every ``check_every`` rounds, a checksum of the parameters
        after the last round, since replicas that differ would train different models unnoticed.
        """
        facts = {"steps since the last round": str(self._steps_in_round)}
        turn = self.step // len(self._fragments)
        if not self._check_next and turn % self._rounds.checked_every:
            return facts
        self._check_next = False
        tensors = self._averaged.tensors()
        fragments, waiting = self._in_round
        sums: list[Tensor] = []
        for fragment in fragments:
            sums.extend(map(kernels.checksum, fragment.in_common(tensors, waiting=waiting)))
        digest = hashlib.sha256(repr(torch.stack(sums).tolist() if sums else []).encode())
        return facts | {"parameters of the last round": digest.hexdigest()[:16]}

    # ---- rounds in which the replica trains on -----------------------------------------------------------------------

    @torch.no_grad()
    def _depart(self, at: int, tensors: Mapping[str, Tensor]) -> None:
        """Start the exchange of a fragment's updates."""
        fragment = self._fragments[at]
        brings = self._are_brought([fragment], tensors, finite=[fragment.take_a_copy(tensors)])
        self._count_anew(fragment)
        sample = fragment.length.begin(fragment.updates, share=float(brings), size=self.size)
        self._note_updates([fragment])
        self._under_way = UnderWay(at, self._send([fragment], waiting=False), sample)

    def _wait(self) -> None:
        """Wait until the means of the fragment that is under way have arrived. :meth:`_land` applies them."""
        if self._under_way is not None:
            futures, self._under_way.futures = self._under_way.futures, []
            try:
                for future in futures:
                    future.wait()
            except BaseException:
                self._under_way = None  # its means must not be applied
                raise

    @torch.no_grad()
    def _land(self) -> None:
        """Wait for the fragment that is under way, and apply its means."""
        self._wait()
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        fragment = self._fragments[under_way.at]
        self._measure(fragment, under_way.sample)
        self._compare_updates()
        good = self._are_finite([fragment])
        fragment.mix(self._averaged.tensors(), self._outer_step, along=good, alpha=self._rounds.alpha)

    def _check_between_steps(self, what: str) -> None:
        """Check as the base class does, after waiting for a fragment that is under way: once its means have arrived,
        nothing of it is left to send. Also refuse a round after a broken exchange, or with newly trained parameters.
        """
        if not self._removed:
            self._wait()
        super()._check_between_steps(what)
        if what not in ("average", "step"):
            return
        if self._engine.error is not None:
            raise RuntimeError(
                f"{what}: the exchange of an earlier round broke off ({self._engine.error}); restart all ranks from a "
                "checkpoint"
            )
        if thawed := self._averaged.thawed():
            raise UnsupportedError(
                f"{what}: parameters that require a gradient now, but did not when compress_updates was called, are "
                f"not averaged: {some(thawed)}; call remove() on all ranks, and compress_updates again"
            )

    # ---- ends and checkpoints ----------------------------------------------------------------------------------------

    def remove(self) -> None:
        """End the averaging: the optimizer steps this replica alone from now on, and may get another handle. Call it on
        all ranks, between steps.

        Steps since the last round stay this replica's own, and a warning says so. Call :meth:`average` before to make
        replicas equal.

        Raises:
            DisagreementError: another rank is doing something else.
        """
        self._warn_of_own_steps(say=self._peers.rank == 0)
        if self._under_way is not None:
            try:
                self._land()
            except (RuntimeError, ValueError) as error:
                log.warning("remove: the exchange of a fragment broke off, so its mean is not applied: %s", error)
        super().remove()
        self._let_go()

    def _warn_of_own_steps(self, *, say: bool) -> None:
        if say and self._steps and not self._removed:
            log.warning(
                "remove: %s this replica's own, so replicas differ; call average() before remove() to include them",
                counted(
                    self._steps,
                    "optimizer step since the last round stays",
                    "optimizer steps since the last round stay",
                ),
            )

    def _let_go(self) -> None:
        """Release the optimizers and the anchors."""
        self._stepping.end()
        if self._off is not None:
            self._off.end()
        forget(self._averaged.model, self)
        self._last_length = self.length
        self._fragments.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs, beside the states of model and optimizer, to resume bit for bit. Every rank has
        its own state.

        Right after :meth:`average` the state is small, and a different number of replicas can load it. At other times
        it also holds the parameters of the last round, and the means of a fragment that is under way.
        """
        state, tensors = super().state_dict(), self._averaged.tensors()
        steps, skipped, under_way = self._steps, self._skipped, self._under_way
        return state | {"updates": self._saved.written(tensors, steps=steps, skipped=skipped, under_way=under_way)}

    @property
    def stateful(self) -> Saved:
        """See :attr:`Handle.stateful`. Save right after :meth:`average`: of parameters, that differ between two rounds,
        ``torch.distributed.checkpoint`` keeps those of one replica for all.
        """
        from narrowband.averaging.saved import Saved

        return Saved(self, self._warn_of_one_for_all)

    def _warn_of_one_for_all(self) -> None:
        if self._peers.rank == 0 and any(fragment.anchored for fragment in self._fragments):
            log.warning(
                "stateful: replicas have taken steps since the last round, so their parameters differ. What "
                "torch.distributed.checkpoint saves now has, for each parameter, that of one replica alone, and a run "
                "that resumes from it loses the steps of the others: call average() on all ranks first, or save one "
                "file per rank by torch.save"
            )

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from a :meth:`state_dict`. Call it on all ranks, after loading the states of model and optimizer.

        If the number of replicas has changed, the states must have been saved right after a round.

        Raises:
            ValueError: a state that does not fit, on any rank, or states of different moments: of different rounds, or
                of different numbers of steps since the last one. Nothing has changed then.
            RuntimeError: called inside a round, or after an exchange broke off.
        """
        super().load_state_dict(state)
        mine = self._own_updates(state)
        self._steps, self._skipped = mine["steps"], mine["skipped"]
        self._under_way = self._saved.read(mine, self._averaged.tensors(), self.device)

    def _own_updates(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the part about updates that this rank loads, from its own state or from the states of all ranks."""
        if isinstance(state, Mapping):
            return cast("Mapping[str, Any]", state["updates"])
        by_rank = {each["rank"]: each["updates"] for each in state}
        return cast("Mapping[str, Any]", by_rank[self._peers.rank if len(by_rank) == self.size else 0])

    def _state_facts(self, state: Mapping[str, Any]) -> Facts:
        return {**super()._state_facts(state), **self._moment_of(state)}

    def _moment_of(self, state: Mapping[str, Any]) -> Facts:
        """Return where between two rounds a state was saved, for ranks to compare: it must be the same on all."""
        return self._saved.moment_of(state)

    def _loadable(self, state: object) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        found = super()._loadable(state)
        self._check_updates(found[0])
        return found

    def _loadable_of_all(
        self, states: Sequence[Mapping[str, Any]]
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        found = super()._loadable_of_all(states)
        for state in states:
            self._check_updates(state)
            if len(states) != self.size and state["updates"]["anchor"]:
                raise ValueError(
                    f"the states were saved between two rounds, by {len(states)} replicas, and here are {self.size}; "
                    "states for another number of replicas must be saved right after average()"
                )
        return found

    def _check_updates(self, state: Mapping[str, Any]) -> None:
        self._saved.check(state, self._averaged.tensors())
