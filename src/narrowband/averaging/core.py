"""The core of averaging: replace tensors by their means over all ranks, compressed, step by step.

The caller, such as a DDP hook or a training loop, passes groups of tensors as they become ready
(:meth:`Averaging.feed`) and gets futures. The core knows the tensors by name, but not where they come from or why they
are grouped as they are. On the engine's thread:

* Matrices of at least ``min_numel`` elements are encoded, exchanged and decoded tensor by tensor. So the bytes do not
  depend on the grouping, and with ``all_gather`` and ``scatter_reduce`` neither does the result. (The order in which an
  all-reduce adds up depends on the layout of the group.)
* All other tensors (biases, norms, small layers) are collected over all groups and travel in one all-reduce, just ahead
  of the last group's payload.
* With ``dgc``, momentum is applied here and not in the optimizer. Uncompressed tensors get the same momentum after they
  were averaged, and so do all tensors in uncompressed steps.
* Before anything of a step is sent, ranks check that they are about to do the same
  (:mod:`~narrowband.averaging.agreement`).
* A step is one transaction (:mod:`~narrowband.averaging.step`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from narrowband.averaging.agreement import Agreement, agree_in_all, agreement_in
from narrowband.averaging.controller import Controller
from narrowband.averaging.layers import Layers
from narrowband.averaging.loss_scale import LossScale
from narrowband.averaging.parameters import refuse_valueless
from narrowband.averaging.stats import StepStats
from narrowband.averaging.step import ADVICE, MEASURE_EVERY, Group, Parts, Step, fill_with_nan
from narrowband.averaging.warmup import FAILED, warm_up
from narrowband.codecs import Identity
from narrowband.collectives import Engine, Loan, Peers, borrow, can_send_from
from narrowband.errors import DisagreementError, PayloadError, UnsupportedError
from narrowband.kernels import Findings, Late

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from narrowband.averaging.agreement import Facts
    from narrowband.averaging.settings import Settings
    from narrowband.averaging.waiting import Waiting
    from narrowband.feedback import Compression
    from narrowband.feedback.base import Norms

__all__ = ["BROKE_OFF", "Averaging", "is_in_backward"]

#: The error text for a step whose backward pass ended early by an error outside of this library.
BROKE_OFF = (
    "a step ended early while gradients were being exchanged, so ranks may have different averages. On all ranks call "
    "remove(), set up compression again, and load a checkpoint. (A model in DistributedDataParallel must be wrapped "
    "again first, after the old wrapper was deleted)"
)


class Averaging:
    """Averages tensors over ranks, step by step. :class:`~narrowband.averaging.handle.Handle` adds what users call.

    Args:
        parameters: name and tensor of everything whose gradient may be averaged, the same on all ranks.
        norms: the tensors among these that belong to normalization layers.
        settings: how to compress and average.
        group: the ranks. The core borrows a process group of its own among them, because collectives that other threads
            issue must not come between its own.
        set_up: the name of the function that users called for the set-up, for errors about disagreement.
        step: the name of the call that runs a step, for the same errors.
        inside: the ranks that hold the parts of one replica, if replicas are sharded.
        mates: process groups in which ranks hold other parts of this replica. They are told if ranks disagree here.
        owners: the optimizer's own tensor of each parameter, if the tensors that are averaged are shards of these.
        later: schedules a function for the end of the pass that feeds tensors, and returns True; or returns False if
            there is no such pass. An error in an exchange is then raised at that time, and futures get NaN, so that the
            pass can complete its work. Without ``later``, futures get the error.
    """

    #: What the error says if ranks disagree about a step.
    _advice: ClassVar[str] = ADVICE

    #: The level at which an error that stops the exchange is logged, with its traceback.
    _error_level: ClassVar[int] = logging.ERROR

    #: Which averages wait for an optimizer; None where that is not followed.
    _waiting: Waiting | None = None

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        norms: Collection[Tensor],
        settings: Settings,
        group: dist.ProcessGroup,
        *,
        set_up: str,
        step: str,
        inside: dist.ProcessGroup | None = None,
        mates: Sequence[dist.ProcessGroup] = (),
        owners: Mapping[str, Tensor] | None = None,
        later: Callable[[Callable[[], None]], bool] | None = None,
    ) -> None:
        self.compression = settings.compression
        self._settings = settings
        self._seed = settings.seed
        self._set_up_name, self._step_name = set_up, step
        self._parameters, self._norms = list(parameters), norms
        refuse_valueless(self._parameters, set_up)
        self._inside_group, self._mates, self._owners = inside, list(mates), owners or {}
        self._later: Callable[[Callable[[], None]], bool] = later or (lambda _: False)
        self._loss_scale = LossScale(settings.grad_scaler)
        self._paused = False
        self._removed = False
        self._epoch: int | None = None
        self._step = 0
        self._current: Step | None = None  # the step whose groups are being fed
        self._open_step: Step | None = None  # the step that the engine has not finished
        self._lock = threading.Lock()
        self._total, self._last = StepStats(), StepStats()
        self._sent: dict[str, int] = {}  # bytes by layer, in the latest step that sent the layer
        self._errors: dict[str, float] = {}
        self._unread: list[_Unread] = []
        self._connect(group)

    def _connect(self, group: dist.ProcessGroup) -> None:
        """Create everything that depends on the group of ranks. A collective."""
        settings = self._settings
        device = next((p.device for _, p in self._parameters if p.requires_grad), torch.device("cpu"))
        self._loan = borrow(group, device)
        self._peers = Peers.of(self._loan.group)
        cpu = torch.device("cpu")  # if the group can send from there, comparing facts needs no GPU
        self._agreement = Agreement(self._peers, cpu if can_send_from(self._peers.group, cpu) else device)
        kinds, facts, failure = self._chosen_on_this_rank()
        try:
            self._compare(
                facts,
                f"Call {self._set_up_name} on all ranks with the same arguments for the same model, which has been "
                "converted to the same memory format before",
                failure,
            )
            self._make_ready(kinds, device)
        except Exception as error:
            if error is failure or not isinstance(error, RuntimeError):
                self._loan.give_back()  # no error of the network: all ranks raise, and no message is left on its way
            raise
        finally:
            del failure  # it refers to this frame, see Agreement.now
        self._open_pairs()

        observer = self.layers.observer
        clips = observer is not None and math.isfinite(observer.clip)
        others = borrow(self._inside_group, device) if clips and self._inside_group is not None else None
        fail, tell = weakref.WeakMethod(self._fail), weakref.WeakMethod(self._tell_of_failure)
        self._engine = Engine(device, lambda error: _call(fail(), error), lambda: _call(tell()), self._error_level)
        self._close = weakref.finalize(self, _close, self._engine, self._loan, *([] if others is None else [others]))
        self._parts = Parts(
            self.layers,
            self._peers,
            self._engine,
            self._agreement,
            self._controller,
            self._loss_scale,
            settings.message_nbytes,
            settings.rates,
            self._owners,
            None if others is None else others.group,
            self._advice,
        )

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _chosen_on_this_rank(self) -> tuple[list[Compression], Facts, Exception | None]:
        """Lay out what is compressed with what, by what this rank was given.

        Returns:
            All specs that layers have now or may get; facts for ranks to compare; and the error, if there was one,
            such as a plan of another model. It is not raised here, because other ranks wait to compare.
        """
        settings = self._settings
        try:
            self.layers = Layers(
                self._parameters,
                self._norms,
                settings.compression,
                min_numel=settings.min_numel,
                small=settings.small,
                early_nbytes=settings.early_nbytes,
                collective=settings.collective,
                size=self._peers.size,
                rank=self._peers.rank,
            )
            self.layers.warn_if_more()
            self._controller = Controller(settings.policy, self.layers, self._peers)
            if settings.plan is not None:
                self._controller.follow(settings.plan)
            return self._kinds(), self._set_up_facts(self._set_up_name), None
        except Exception as error:
            return [], {"call": self._set_up_name}, error

    def _compare(self, facts: Facts, advice: str, failure: Exception | None = None) -> None:
        """Compare facts with the ranks that average, see :meth:`Agreement.now`; and tell the ranks that hold other
        parts of this replica of an error. Those compare with others that their own groups average with, and would go on
        without this rank.
        """
        try:
            try:
                self._agreement.now(facts, advice, failure)
            except Exception as error:
                if not self._mates or (failure is None and not isinstance(error, DisagreementError)):
                    raise
                failure = failure or error
            agree_in_all(map(agreement_in, self._mates), {"call": facts["call"]}, advice, failure)
        finally:
            del failure  # see Agreement.now

    def _make_ready(self, kinds: Sequence[Compression], device: torch.device) -> None:
        """Check the policy and compile loops; and tell the ranks that hold other parts of this replica of an error, as
        :meth:`_compare` does.
        """
        failure = None
        try:
            self._controller.check()
            warm_up(kinds, self._settings.policy, device, self._peers, self._agreement, self.layers.collectives)
        except Exception as error:  # of any kind: mates wait in the comparison below
            failure = error
        try:
            agree_in_all(map(agreement_in, self._mates), {"call": "warm_up"}, FAILED, failure)
        finally:
            del failure  # see Agreement.now

    def _disconnect(self) -> None:
        """Release the group without a collective: some of its ranks may be gone."""
        self._loan.broken = True
        self._close()
        self._peers.close()
        self._current = self._open_step = None

    def _reconnect(
        self, group: dist.ProcessGroup, specs: Mapping[str, str], feedback: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Continue among other ranks after :meth:`_disconnect`, at the same step. A collective.

        Args:
            group: the new ranks.
            specs: specs of layers that do not have the default.
            feedback: the saved state of feedback.
        """
        self._connect(group)
        self.layers.load(specs, feedback)
        self._open_pairs()

    def _set_up_facts(self, call: str) -> Facts:
        """Return what ranks compare at set-up. Ranks with different settings would hang, or decode nonsense."""
        return {
            "call": call,
            **self._settings.facts(),
            "policy": repr(self._controller.identity()),
            **self.layers.identity(),
        }

    def _kinds(self) -> list[Compression]:
        """Return all specs that layers and small parameters have now or that the policy may give them.

        Raises:
            ValueError: the policy has specs that cannot be mixed with the model's.
        """
        specs = [] if self._controller.policy is None else self._controller.policy.specs()
        specs += [] if self._controller.plan is None else list(self._controller.plan.specs().values())
        small = [] if self.layers.small is None else [self.layers.small]
        return [self.compression, *small, *self.layers.all_beside(("a layer", spec) for spec in dict.fromkeys(specs))]

    def _open_pairs(self) -> None:
        self.layers.open_pairs(self._peers)

    # ---- who averages what -------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many ranks average."""
        return self._peers.size

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.layers.parameters.device

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The handle's own process group, of the ranks that average."""
        return self._peers.group

    # ---- a step ------------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether some groups of a step were fed, but not its last one."""
        return self._current is not None

    def feed(
        self,
        buffer: Tensor,
        names: Sequence[str],
        *,
        last: bool,
        out: Tensor | None = None,
        absent: Collection[str] = (),
    ) -> torch.futures.Future[Tensor]:
        """Average a group of tensors. All ranks must feed the same groups in the same order.

        Args:
            buffer: the tensors of these parameters, end to end, in one dtype; or one sparse tensor. The step owns the
                buffer until the future is resolved.
            names: of the parameters.
            last: whether this group ends the step.
            out: where to write the averages, of the same length as the buffer; by default into the buffer.
            absent: names of parameters for which the buffer holds zeros because this rank has no gradient.

        Returns:
            A future. It is resolved with ``out`` or the buffer when the whole step has been averaged.

        Raises:
            UnsupportedError: the tensors have another dtype than at set-up.
        """
        self._check_dtype(buffer, names)
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        result = buffer if out is None else out
        step = self._current
        if step is None and (cause := self._engine.error) is not None:
            return self._refused(result, future, cause, last=last)
        if step is None:
            step = self._current = self._open_step = self._new_step()
        if last:
            # The next call belongs to the next step, even if this one is still on the wire.
            step.closed_at = time.perf_counter()
            self._current = None
        step.results.append((future, result))
        group = Group(buffer, [self.layers.parameters.by_name[name] for name in names], out, absent)
        self._engine.post(lambda: step.add(group, last=last))
        return future

    def _check_dtype(self, buffer: Tensor, names: Sequence[str]) -> None:
        """Refuse tensors that were converted since set-up: they would travel uncompressed, and bypass feedback."""
        for first in names[:1]:
            dtype = self.layers.parameters.by_name[first].vector.dtype
            if buffer.dtype != dtype and not dtype.is_complex:  # complex gradients come as pairs of real numbers
                raise UnsupportedError(
                    f"the gradient of {first} has dtype {buffer.dtype}, but {dtype} when compression was set up; "
                    "convert the model before it is wrapped and compression is set up, or call remove() on all ranks "
                    "and set up compression again"
                )

    def _step_facts(self) -> Facts:
        """Facts that a derived class adds to those that ranks compare before a step."""
        return {}

    def _new_step(self) -> Step:
        self._settle()
        self._loan.follow()
        number, start = self._step, self._settings.warmup_steps
        compressing = not self._paused and number >= start
        codec = self.compression.codec_at(max(0, number - start), self._epoch) if compressing else Identity()
        facts: Facts = {
            "call": self._step_name,
            "step": str(number),
            "compression": "paused" if self._paused else str(codec),
            "epoch": str(self._epoch),
            "seed": str(self._seed),
            "spec of layer": self.layers.override_texts(),
            **self._step_facts(),
        }
        step = Step(
            self._parts,
            number=number,
            codec=codec,
            compressing=compressing,
            measure=compressing and (number % MEASURE_EVERY == 0 or not self._has_measured),
            seed=self._seed,
            thrown=() if self._waiting is None else self._waiting.thrown(),
            keeps=self._waiting is not None and self._waiting.keeps,
            facts=facts,
            finished=self._finished,
        )
        step.raises_later = self._later(step.raise_error)
        if self._zeros_count(in_backward=step.raises_later):
            step.zeros_count = True
            step.go_ahead()
        return step

    @property
    def _has_measured(self) -> bool:
        """Whether the relative error was measured, even if the host does not know it yet."""
        return self._total.relative_error is not None or any(one.measures for one in self._unread)

    def _zeros_count(self, *, in_backward: bool) -> bool:
        """Whether a gradient of zeros counts as a gradient in the new step, unless it is ``absent``.

        If not, it may stand for none, and its average may be dropped. So a rank with a zero gradient must send nothing
        and keep its residual. To test the gradient for zero, the host has to wait for the device.
        """
        return True

    def _settle(self, *, wait: bool = False) -> None:
        """Read the device's findings about steps for which the host did not wait, as far as they have arrived.

        Args:
            wait: whether to wait for all of them.
        """
        with self._lock:
            unread, self._unread = self._unread, []
            for at, one in enumerate(unread):
                if not one.has_arrived(wait=wait):
                    self._unread = unread[at:]
                    break
                if one.is_damaged and not one.is_bad:  # a tensor that is not finite may have no valid payload
                    self._engine.post(_raise_damaged)
                if one.is_bad:
                    one.step.skipped += 1
                    self._total.skipped += 1
                else:
                    self._take_norms(one.step, one.norms)

    def _refused(
        self, result: Tensor, future: torch.futures.Future[Tensor], cause: BaseException, *, last: bool
    ) -> torch.futures.Future[Tensor]:
        """Return a future for a group that is fed after the exchange stopped: NaN now, and an error at the end."""

        def stopped() -> None:
            raise RuntimeError(f"gradient exchange stopped at an earlier step: {cause}") from cause

        if last and not self._later(stopped):
            stopped()  # no pass is running that would have to complete its work
        fill_with_nan(result)
        future.set_result(result)
        return future

    def _take_norms(self, step: StepStats, norms: Mapping[str, tuple[float, float]]) -> None:
        """Take the squared norms that a step has measured, of what was encoded and of what was lost, by layer."""
        encoded = sum(own for own, _ in norms.values())
        if norms and math.isfinite(encoded):
            step.relative_error = sum(lost for _, lost in norms.values()) / encoded if encoded else 0.0
            self._total.relative_error = step.relative_error
        self._errors.update({key: lost / own if own else 0.0 for key, (own, lost) in norms.items()})

    def _finished(
        self, step: StepStats, sent: Mapping[str, int], norms: Mapping[str, Norms], findings: Findings | None
    ) -> None:
        with self._lock:
            if findings is not None:
                self._unread.append(_Unread(step, findings, norms))
            else:
                self._take_norms(step, {key: (float(own.encoded), float(own.lost)) for key, own in norms.items()})
            self._sent.update(sent)
            self._step += 1
            self._open_step = None
            self._last = step
            self._total.add(step)

    def _count_sent(self, nbytes: int) -> None:
        """Add bytes that a derived class sent by itself to the statistics of the last finished step."""
        with self._lock:
            self._last.sent_bytes += nbytes
            self._total.sent_bytes += nbytes

    def _fail(self, error: BaseException) -> None:
        """Abandon the open step: the engine broke."""
        if self._open_step is not None:
            self._open_step.abandon(error)

    def _tell_of_failure(self) -> None:
        """Resolve the futures of the open step, if :meth:`_fail` has abandoned it."""
        if self._open_step is not None and self._open_step.abandoned:
            self._open_step.resolve_abandoned()

    def _broke_off(self) -> bool:
        """Whether a step was left unfinished, because the pass that feeds its tensors ended by an error outside of this
        library.
        """
        return self.in_step and not is_in_backward()

    def _check_not_removed(self, what: str) -> None:
        if self._removed:
            raise RuntimeError(f"{what}: this handle was removed; set up compression again for a new one")

    def _check_between_steps(self, what: str) -> None:
        self._check_not_removed(what)
        if self._broke_off():
            raise RuntimeError(f"{what}: {BROKE_OFF}")
        if self._open_step is not None and not self._open_step.abandoned:
            raise RuntimeError(
                f"{what} was called inside backward, while residuals are being updated; call it between steps"
            )
        if self._open_step is not None and self._open_step.torn:
            raise RuntimeError(
                f"{what}: the exchange failed while a step was being written, so only some residuals were updated; "
                "restart all ranks from the last checkpoint"
            )


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - as torch.autograd.graph does


class _Unread:
    """The device's findings about a step, which are being copied to the host.

    Args:
        step: the step's statistics. They are in the totals already, except for what the findings add (``skipped``).
        findings: the step's findings on the device.
        norms: the norms that the step has measured, by layer.
    """

    def __init__(self, step: StepStats, findings: Findings, norms: Mapping[str, Norms]) -> None:
        self.step, self._keys = step, [*norms]
        device = findings.places.device
        numbers = [torch.as_tensor(x, dtype=torch.float64, device=device) for own in norms.values() for x in own]
        self._late, self._norms = Late(findings.places), Late(torch.stack(numbers)) if numbers else None

    def has_arrived(self, *, wait: bool) -> bool:
        """Whether the values have arrived on the host."""
        late = self._late if self._norms is None else self._norms  # which was copied behind the other
        return wait or late.has_arrived()

    @property
    def measures(self) -> bool:
        """Whether the step has measured the relative error."""
        return bool(self._keys)

    @property
    def norms(self) -> dict[str, tuple[float, float]]:
        """Squared norms of what was encoded and of what was lost, by layer."""
        numbers = iter(() if self._norms is None else self._norms.values())
        return dict(zip(self._keys, zip(numbers, numbers, strict=True), strict=True))

    @property
    def is_bad(self) -> bool:
        """Whether a tensor was not finite on any rank."""
        return bool(self._late.values()[Findings.ANY])

    @property
    def is_damaged(self) -> bool:
        """Whether a payload was damaged."""
        return bool(self._late.values()[Findings.DAMAGED])


def _raise_damaged() -> None:
    raise PayloadError(
        "a payload of an earlier step was damaged on the network, so residuals may be wrong; restart all ranks from a "
        "checkpoint"
    )


def _call(method: Callable[..., None] | None, *given: object) -> None:
    if method is not None:
        method(*given)


def _close(engine: Engine, *loans: Loan) -> None:
    """Release the engine and the borrowed process groups of a handle."""
    engine.close()
    broken = engine.error is not None or any(loan.broken for loan in loans)
    for loan in loans:
        loan.broken |= broken
        loan.give_back()
