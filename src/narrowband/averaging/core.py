"""The core of averaging: tensors of all ranks become their means, compressed, step by step.

A place, such as a hook of DDP or a training loop, hands over groups of tensors as they become ready
(:meth:`Averaging.feed`) and gets futures. The core knows the tensors by name; where they come from, and why in these
groups, it does not know. In the engine's thread:

* matrices of at least ``min_numel`` elements are encoded, exchanged and decoded tensor by tensor, so that neither the
  bytes nor, with ``gather`` and ``scatter_reduce``, the result depend on how the place groups them (an all-reduce adds
  up in an order that the layout of a group decides);
* everything else (biases, norms, small layers) is collected over all groups and travels in one all-reduce, just ahead
  of the last group's payload;
* with ``dgc`` momentum is applied here and not in the optimizer: what travels uncompressed gets the same momentum,
  after its average, and so do steps in which nothing is compressed;
* before anything of a step is sent, ranks make sure that they are about to do the same
  (:mod:`~narrowband.averaging.agreement`);
* a step is one transaction (:mod:`~narrowband.averaging.step`).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from narrowband.averaging.agreement import Agreement
from narrowband.averaging.controller import Controller
from narrowband.averaging.layers import Layers
from narrowband.averaging.loss_scale import LossScale
from narrowband.averaging.state import VERSION, check_state, facts_of, kept, states_of_all_ranks
from narrowband.averaging.stats import StepStats
from narrowband.averaging.step import ADVICE, MEASURE_EVERY, Group, Parts, Step, fill_with_nan
from narrowband.averaging.warmup import warm_up
from narrowband.codecs import Codec, Identity
from narrowband.collectives import Engine, Loan, Peers, borrow
from narrowband.errors import DisagreementError
from narrowband.stats import Stats
from narrowband.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch import Tensor

    from narrowband.adapt import Plan
    from narrowband.averaging.agreement import Facts
    from narrowband.averaging.settings import Settings
    from narrowband.feedback import Compression, Method

__all__ = ["Averaging"]

log = logging.getLogger(__name__)

_LOAD_ADVICE = (
    "Call load_state_dict on all ranks, between the same two steps, with states that were saved together. Nothing has "
    "changed on any rank"
)


class Averaging:
    """Averages tensors over ranks. ``repr(handle)`` says what it does and what it has saved.

    Args:
        parameters: name and tensor of everything whose gradient may be averaged, the same on all ranks.
        norms: those of them that belong to normalization layers.
        settings: how.
        group: the ranks. The core borrows a process group of its own among them: other collectives come from other
            threads, and must not slip between its own.
        set_up: the function that users called to get here, and ``step``, what a step is called: for errors that name
            what ranks disagree on.
        later: runs a function when the pass that feeds tensors has ended, and returns True; or returns False where
            there is no such moment. An error in an exchange is then raised there, and futures get NaN, so that the pass
            can end its work. Without it, futures get the error.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        norms: Collection[Tensor],
        settings: Settings,
        group: dist.ProcessGroup,
        *,
        set_up: str,
        step: str,
        later: Callable[[Callable[[], None]], bool] | None = None,
    ) -> None:
        self.compression = settings.compression
        self._settings = settings
        self._seed = settings.seed
        self._step_name = step
        self._later: Callable[[Callable[[], None]], bool] = later or (lambda _: False)
        self._loss_scale = LossScale(settings.grad_scaler)
        self._paused = False
        self._removed = False
        self._epoch: int | None = None
        self._step = 0
        self._current: Step | None = None  # the step whose groups are coming in
        self._open_step: Step | None = None  # the step that the engine works on
        self._lock = threading.Lock()
        self._total, self._last = StepStats(), StepStats()

        ranks = dist.get_process_group_ranks(group)
        self.layers = Layers(
            parameters,
            norms,
            settings.compression,
            min_numel=settings.min_numel,
            small=settings.small,
            collective=settings.collective,
            size=len(ranks),
            rank=dist.get_rank(group),
        )
        device = next(iter(self.layers.parameters)).device if self.layers.parameters else torch.device("cpu")
        self._loan = borrow(group, device)
        self._ranks = Peers(self._loan.group, dist.get_rank(self._loan.group), len(ranks))
        self._agreement = Agreement(self._ranks, device)
        self.layers.warn_if_more()
        self._controller = Controller(settings.policy, self.layers, self._ranks)
        if settings.plan is not None:
            self._controller.follow(settings.plan)
        kinds = self._kinds()
        self._find_pairs()
        try:
            self._agreement.now(
                self._set_up_facts(set_up), f"Call {set_up} with the same arguments for the same model on all ranks"
            )
        except DisagreementError:  # all ranks know of it, and nothing is on its way in the group
            self._loan.give_back()
            raise
        warm_up(kinds, settings.policy, device, self._ranks)

        fail = weakref.WeakMethod(self._fail)
        self._engine = Engine(device, lambda error: _call(fail(), error))
        self._close = weakref.finalize(self, _close, self._engine, self._loan)
        self._parts = Parts(
            self.layers, self._ranks, self._engine, self._agreement, self._controller, self._loss_scale, settings.rates
        )

    def __repr__(self) -> str:
        total, shapes = self.stats().total, self.layers.shapes
        numel = sum(p.numel() for p in self.layers.parameters)
        compressed = sum(p.numel() for p, known in self.layers.parameters.items() if known.compressed)
        said = [
            f"{str(self.compression)!r}",
            f"{self.size} rank{'s' if self.size != 1 else ''}",
            f"{len(shapes)} layers with {format_count(compressed)} of {format_count(numel)} parameters",
            f"residuals of {format_bytes(self.residual_nbytes)}",
        ]
        if self._removed:
            said.append("removed")
        elif self._paused:
            said.append("paused")
        if total.steps:
            said.append(f"{total.steps} steps of {format_bytes(total.sent_bytes / total.steps)}")
            said.append(f"{total.ratio:.3g} times less than uncompressed")
        if total.relative_error is not None:
            said.append(f"relative error {total.relative_error:.2g}")
        return f"{type(self).__name__}({', '.join(said)})"

    # ---- for the user ------------------------------------------------------------------------------------------------

    def stats(self) -> Stats[StepStats]:
        """Bytes, seconds and relative error: in total, and of the last finished step."""
        with self._lock:
            return Stats(StepStats(**vars(self._total)), StepStats(**vars(self._last)))

    def log_dict(self, prefix: str = "") -> dict[str, float]:
        """What a logger plots, as numbers by name: of the last step, and ``total_…`` since the start.

        Args:
            prefix: before every name, such as ``"compression/"``.

        Returns:
            ``ratio`` (times less than uncompressed), ``sent_bytes`` and ``raw_bytes`` (of this rank),
            ``waiting_seconds`` (between the end of backward's own work and the last average), ``relative_error`` (the
            latest; not there before it was measured), ``residual_bytes``, ``total_ratio``, ``total_sent_bytes`` and
            ``total_skipped_steps``.

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
        """Bytes of this rank's memory that feedback takes: residuals, velocities, factors. 0 before the first step."""
        return self.layers.residual_nbytes

    @property
    def step(self) -> int:
        """How many steps have been averaged."""
        return self._step

    @property
    def size(self) -> int:
        """How many ranks average."""
        return self._ranks.size

    @property
    def paused(self) -> bool:
        """Whether steps are averaged uncompressed, see :meth:`pause`."""
        return self._paused

    def pause(self) -> None:
        """Average uncompressed from the next step on; the residuals stay until :meth:`resume`. Call on all
        ranks.
        """
        self._paused = True

    def resume(self) -> None:
        """Compress again from the next step on. Call on all ranks."""
        self._paused = False

    def remove(self) -> None:
        """End compression. Call on all ranks, between steps.

        Residuals are dropped, so save :meth:`state_dict` before if you may want to go on. The process group, threads
        and memory are given back; :meth:`stats` remains. When this object is garbage, the same happens by itself. (The
        group is kept for the next one among the same ranks.)

        Raises:
            RuntimeError: called inside backward.
            DisagreementError: some rank does something else.
        """
        if self._removed:
            return
        if self._open_step is None or not self._open_step.abandoned:
            self._check_between_steps("remove")
        if self._engine.error is None:
            try:
                self._agreement.now({"call": "remove"}, ADVICE)
            except RuntimeError as error:  # a rank that has gone already is no reason to stay
                self._loan.broken = True
                log.warning("remove: other ranks could not be asked: %s", error)
        self._removed = True
        self._close()
        self._ranks.close()
        self.layers.clear()

    def set_epoch(self, epoch: int) -> None:
        """Tell a warm-up that counts epochs which one begins, from 0 on, as a DistributedSampler is told. Call on all
        ranks.
        """
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must not be negative")
        self._epoch = epoch

    def set_layers(self, specs: Mapping[str, str | Codec | Compression | Method]) -> None:
        """Compress some layers otherwise than the rest, from the next step on. Call on all ranks, between steps.

        Residuals stay, and so do warm-started factors: a smaller rank leaves columns out, a larger one draws new
        ones.

        Args:
            specs: parameter name → spec, of the model's kind or another. Where the model has feedback, every layer has
                it, and it can be left out; its residual moves along. With ``ef21`` all layers have that. With
                ``dgc`` only ``topk`` will do, as in ``"topk:density=0.01"``, and no layer sends less than the rest does
                while that warms up. A later call adds to an earlier one.

        Raises:
            ValueError: a name that is not compressed, or a spec that cannot be mixed with the model's.
            UnsupportedError: a spec that is not for gradients.

        Example:
            >>> handle = nb.compress_gradients(model, "powersgd:rank=4")
            >>> handle.set_layers({"head.weight": "powersgd:rank=1"})
        """
        self._check_between_steps("set_layers")
        self.layers.set(specs)
        self._find_pairs()

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return next(iter(self.layers.parameters)).device

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The handle's own, of the ranks that average."""
        return self._ranks.group

    @property
    def plan(self) -> Plan | None:
        """What was decided last, or given; None before and without."""
        return self._controller.plan

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on to the bit. Every rank has its own: save one file per rank.

        Tensors are those in use, not copies; save or clone them before the next step.
        """
        self._check_between_steps("state_dict")
        return {
            "version": VERSION,
            "spec": str(self.compression),
            "step": self._step,
            "epoch": self._epoch,
            "paused": self._paused,
            "layers": self.layers.own_specs(),
            "seed": self._seed,
            "loss_scale": self._loss_scale.value,
            "rank": self._ranks.rank,
            "world_size": self._ranks.size,
            "feedback": self.layers.state.state_dict() if self.layers.state else {},
            "others": {name: state.state_dict() for name, state in self.layers.states.items() if name},
            "controller": self._controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where :meth:`state_dict` was taken. Call on all ranks.

        A transaction: states are checked on every rank, and ranks compare what they are about to load, before anything
        changes. If any rank cannot load its state, or ranks have states of different steps, all of them raise.

        Args:
            state: this rank's own state, or a list with the states of all ranks there were. If there are as many ranks
                now, each takes its own from the list. After a change of their number, the sum of their residuals is
                shared evenly among the ranks there are. (With ``ef21`` every rank starts with what all
                ranks had in common.)

        Raises:
            ValueError: the state of another rank, number of ranks or model, one that lacks something or holds what
                cannot be, states of different moments, or residuals without a feedback to hold them.
            RuntimeError: called inside backward, or after an exchange broke off.
        """
        self._check_between_steps("load_state_dict")
        if self._engine.error is not None:
            raise RuntimeError(
                f"load_state_dict: the exchange stopped at an earlier step ({self._engine.error}); start all ranks "
                "again, and load the state there"
            ) from self._engine.error
        # A list is the same on all ranks; what is wrong within it each finds out by itself.
        states = None if isinstance(state, Mapping) else states_of_all_ranks(list(state))
        error: ValueError | None = None
        facts: Facts = {"call": "load_state_dict"}
        try:
            mine, residuals = self._loadable(state) if states is None else self._loadable_of_all(states)
            facts = {**facts, "problem": "none", **facts_of(mine)}
        except ValueError as problem:
            error = problem
            facts = {**facts, "problem": str(problem)}
        try:
            self._agreement.now(facts, _LOAD_ADVICE)
        except ValueError as disagreement:
            raise (error or disagreement) from (disagreement if error is not None else None)
        if error is not None:
            raise error
        self.layers.load(mine["layers"], residuals)
        self._controller.load_state_dict(mine["controller"])
        self._find_pairs()
        self._step, self._epoch = mine["step"], mine["epoch"]
        self._paused = mine["paused"]
        self._seed = mine["seed"]
        self._loss_scale.value = mine["loss_scale"]
        self._total, self._last = StepStats(), StepStats()

    def _loadable(self, state: object) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        """The state of this rank, and its residuals, if both can be loaded."""
        mine = check_state(state)
        here, there = (self._ranks.rank, self._ranks.size), (mine["rank"], mine["world_size"])
        if here != there:
            raise ValueError(
                f"this is rank {here[0]} of {here[1]}, the state is of rank {there[0]} of {there[1]}; every "
                "rank loads its own, or, after a change of the number of ranks, the list of all ranks' states"
            )
        residuals = kept(mine)
        self.layers.check_load(mine["layers"], residuals, mine["spec"])
        self._controller.check_state(mine["controller"])
        return mine, residuals

    def _loadable_of_all(
        self, states: Sequence[Mapping[str, Any]]
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        """The same from the states of all ranks: this rank's own, if there are as many as there were."""
        if len(states) == self._ranks.size:
            return self._loadable(states[self._ranks.rank])
        for state in states:
            self.layers.check_load(state["layers"], kept(state), state["spec"])
        self._controller.check_state(states[0]["controller"])
        return states[0], self.layers.merged([kept(state) for state in states], states[0]["spec"])

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _set_up_facts(self, call: str) -> Facts:
        """Ranks that were set up differently would hang, or decode nonsense; find out now."""
        settings = self._settings
        return {
            "call": call,
            "min_numel": str(settings.min_numel),
            "warmup_steps": str(settings.warmup_steps),
            "seed": str(settings.seed),
            "collective": settings.collective,
            "grad_scaler": "none" if settings.grad_scaler is None else "given",
            "policy": repr(self._controller.identity()),
            **self.layers.identity(),
        }

    def _kinds(self) -> list[Compression]:
        """What layers have or may get.

        Raises:
            ValueError: the policy may give layers what cannot be mixed.
        """
        specs = [] if self._controller.policy is None else self._controller.policy.specs()
        specs += [] if self.plan is None else list(self.plan.specs().values())
        return [self.compression, *(self.layers.mixed("a layer", spec) for spec in dict.fromkeys(specs))]

    def _find_pairs(self) -> None:
        if self.layers.exchanges_pairs:
            self._ranks.open_pairs()

    # ---- a step, for places ------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether groups of a step were fed, and its last group was not."""
        return self._current is not None

    def feed(
        self, buffer: Tensor, names: Sequence[str], *, last: bool, out: Tensor | None = None
    ) -> torch.futures.Future[Tensor]:
        """Average a group of tensors that are ready. Groups are the same on all ranks, and come in the same order.

        Args:
            buffer: the tensors of these parameters, end to end, in one dtype; or one sparse tensor. Its content belongs
                to the step until the future is resolved.
            names: of the parameters.
            last: whether this group ends the step.
            out: where the averages go, as long as the buffer; by default into it.

        Returns:
            Resolved, with what holds the averages, when the whole step has been averaged.
        """
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        result = buffer if out is None else out
        step = self._current
        if step is None and self._engine.error is not None:
            return self._refused(result, future, last=last)
        if step is None:
            step = self._current = self._open_step = self._new_step()
        if last:
            # The next call belongs to the next step, even if this one is still on the wire.
            step.closed_at = time.perf_counter()
            self._current = None
        step.results.append((future, result))
        group = Group(buffer, [self.layers.named[name] for name in names], out)
        self._engine.post(lambda: step.add(group, last=last))
        return future

    def _new_step(self) -> Step:
        total, number, start = self._total, self._step, self._settings.warmup_steps
        compressing = not self._paused and number >= start
        codec = self.compression.codec_at(max(0, number - start), self._epoch) if compressing else Identity()
        facts: Facts = {
            "call": self._step_name,
            "step": str(number),
            "compression": "paused" if self._paused else str(codec),
            "epoch": str(self._epoch),
            "seed": str(self._seed),
            "spec of layer": self.layers.own_specs(),
        }
        step = Step(
            self._parts,
            number=number,
            codec=codec,
            compressing=compressing,
            measure=compressing and (total.relative_error is None or number % MEASURE_EVERY == 0),
            seed=self._seed,
            facts=facts,
            finished=self._finished,
        )
        step.raises_later = self._later(step.raise_error)
        return step

    def _refused(
        self, result: Tensor, future: torch.futures.Future[Tensor], *, last: bool
    ) -> torch.futures.Future[Tensor]:
        """What a place gets in steps after one in which the exchange stopped."""
        cause = self._engine.error

        def stopped() -> None:
            raise RuntimeError(f"gradient exchange stopped at an earlier step: {cause}") from cause

        if last and not self._later(stopped):
            stopped()  # there is nothing to leave half-done
        fill_with_nan(result)
        future.set_result(result)
        return future

    def _finished(self, step: StepStats) -> None:
        with self._lock:
            self._step += 1
            self._open_step = None
            self._last = step
            self._total.add(step)

    def _fail(self, error: BaseException) -> None:
        """The engine broke."""
        if self._open_step is not None:
            self._open_step.abandon(error)

    def _check_between_steps(self, what: str) -> None:
        if self._removed:
            raise RuntimeError(f"{what}: this handle was removed; make a new one")
        if self._open_step is not None and not self._open_step.abandoned:
            raise RuntimeError(
                f"{what} was called inside backward, where residuals are half-way; call it between steps"
            )
        if self._open_step is not None and self._open_step.torn:
            raise RuntimeError(
                f"{what}: the exchange broke off while a step was being written, so part of the residuals is sent and "
                "part is not; go on from the last checkpoint"
            )


def _call(method: Callable[[BaseException], None] | None, error: BaseException) -> None:
    if method is not None:
        method(error)


def _close(engine: Engine, loan: Loan) -> None:
    """End what a handle had for itself."""
    engine.close()
    loan.broken |= engine.error is not None
    loan.give_back()
