"""The core of averaging: tensors of all ranks become their means, compressed, step by step.

A place, such as a hook of DDP or a training loop, hands over groups of tensors as they become ready
(:meth:`Averaging.feed`) and gets futures. The core knows the tensors by name; where they come from, and why in these
groups, it does not know. In the engine's thread:

* matrices of at least ``min_numel`` elements are encoded, exchanged and decoded tensor by tensor, so that the bytes do
  not depend on how the place groups them, nor does the result with ``all_gather`` and ``scatter_reduce`` (an all-reduce
  adds up in an order that the layout of a group decides);
* everything else (biases, norms, small layers) is collected over all groups and travels in one all-reduce, just ahead
  of the last group's payload;
* with ``dgc`` momentum is applied here and not in the optimizer: what travels uncompressed gets the same momentum,
  after its average, and so do steps in which nothing is compressed;
* before anything of a step is sent, ranks make sure that they are about to do the same
  (:mod:`~narrowband.averaging.agreement`);
* a step is one transaction (:mod:`~narrowband.averaging.step`).
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband.averaging.agreement import Agreement
from narrowband.averaging.controller import Controller
from narrowband.averaging.layers import Layers
from narrowband.averaging.loss_scale import LossScale
from narrowband.averaging.stats import StepStats
from narrowband.averaging.step import MEASURE_EVERY, Group, Parts, Step, fill_with_nan
from narrowband.averaging.warmup import warm_up
from narrowband.codecs import Identity
from narrowband.collectives import Engine, Loan, Peers, borrow, can_send_from
from narrowband.errors import DisagreementError, PayloadError, UnsupportedError
from narrowband.kernels import Findings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from narrowband.averaging.agreement import Facts
    from narrowband.averaging.settings import Settings
    from narrowband.feedback import Compression

__all__ = ["BROKE_OFF", "Averaging", "is_in_backward"]

#: What became of a step whose pass ended by an error of somebody else's, and what to do.
BROKE_OFF = (
    "a step broke off while gradients were on their way, so ranks may have averaged different things; on all "
    "ranks call remove(), set compression up again, and go on from a checkpoint. (A DistributedDataParallel has to "
    "be made again before, when the old one is gone)"
)


class Averaging:
    """Averages tensors over ranks, step by step; see :class:`~narrowband.averaging.handle.Handle` for what users call.

    Args:
        parameters: name and tensor of everything whose gradient may be averaged, the same on all ranks.
        norms: those of them that belong to normalization layers.
        settings: how.
        group: the ranks. The core borrows a process group of its own among them: other collectives come from other
            threads, and must not slip between its own.
        set_up: the function that users called to get here, and ``step``, what a step is called: for errors that name
            what ranks disagree on.
        inside: the ranks that hold the other parts of the same replica, where ranks have parts.
        owners: the optimizer's own tensor of each parameter, where what is averaged is another one: a part of it.
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
        inside: dist.ProcessGroup | None = None,
        owners: Mapping[str, Tensor] | None = None,
        later: Callable[[Callable[[], None]], bool] | None = None,
    ) -> None:
        self.compression = settings.compression
        self._settings = settings
        self._seed = settings.seed
        self._set_up_name, self._step_name = set_up, step
        self._parameters, self._norms = list(parameters), norms
        self._inside_group, self._owners = inside, owners or {}
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
        self._sent: dict[str, int] = {}  # bytes of each layer, in the last step that it was in
        self._errors: dict[str, float] = {}
        self._unread: list[_Unread] = []
        self._connect(group)

    def _connect(self, group: dist.ProcessGroup) -> None:
        """Make all that depends on who the ranks are. A collective."""
        settings = self._settings
        ranks = dist.get_process_group_ranks(group)
        self.layers = Layers(
            self._parameters,
            self._norms,
            settings.compression,
            min_numel=settings.min_numel,
            small=settings.small,
            early_nbytes=settings.early_nbytes,
            collective=settings.collective,
            size=len(ranks),
            rank=dist.get_rank(group),
        )
        device = self.layers.parameters.device
        self._loan = borrow(group, device)
        self._peers = Peers.of(self._loan.group)
        everyone = self._peers
        cpu = torch.device("cpu")  # where a group can send from there, comparing facts has nothing to do with a GPU
        self._agreement = Agreement(everyone, cpu if can_send_from(everyone.group, cpu) else device)
        self.layers.warn_if_more()
        self._controller = Controller(settings.policy, self.layers, everyone)
        if settings.plan is not None:
            self._controller.follow(settings.plan)
        kinds = self._kinds()
        self._open_pairs()
        try:
            self._agreement.now(
                self._set_up_facts(self._set_up_name),
                f"Call {self._set_up_name} on all ranks with the same arguments for the same model, which has been "
                "converted to the same memory format before",
            )
            warm_up(kinds, settings.policy, device, everyone, self._agreement, self.layers.collectives)
        except DisagreementError:  # all ranks know of it, and nothing is on its way in the group
            self._loan.give_back()
            raise

        observer = self.layers.observer
        clips = observer is not None and math.isfinite(observer.clip)
        others = borrow(self._inside_group, device) if clips and self._inside_group is not None else None
        fail = weakref.WeakMethod(self._fail)
        self._engine = Engine(device, lambda error: _call(fail(), error))
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
        )

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _disconnect(self) -> None:
        """Let go of the ranks, some of which may be gone: nothing is asked of them."""
        self._loan.broken = True
        self._close()
        self._peers.close()
        self._current = self._open_step = None

    def _reconnect(
        self, group: dist.ProcessGroup, specs: Mapping[str, str], feedback: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Go on among other ranks, after :meth:`_disconnect`: at the same step, with these specs of layers and what
        feedback had kept. A collective.
        """
        self._connect(group)
        self.layers.load(specs, feedback)
        self._open_pairs()

    def _set_up_facts(self, call: str) -> Facts:
        """Ranks that were set up differently would hang, or decode nonsense; find out now."""
        settings = self._settings
        return {
            "call": call,
            "min_numel": str(settings.min_numel),
            "warmup_steps": str(settings.warmup_steps),
            "seed": str(settings.seed),
            "collective": settings.collective,
            "message_nbytes": str(settings.message_nbytes),
            "early_nbytes": str(settings.early_nbytes),
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
        specs += [] if self._controller.plan is None else list(self._controller.plan.specs().values())
        return [self.compression, *self.layers.all_beside(("a layer", spec) for spec in dict.fromkeys(specs))]

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
        """The handle's own, of the ranks that average."""
        return self._peers.group

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

        Raises:
            UnsupportedError: the tensors have another dtype than at set-up.
        """
        self._check_dtype(buffer, names)
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        result = buffer if out is None else out
        step = self._current
        if step is None and (cause := self._stopped_by) is not None:
            return self._refused(result, future, cause, last=last)
        if step is None:
            step = self._current = self._open_step = self._new_step()
        if last:
            # The next call belongs to the next step, even if this one is still on the wire.
            step.closed_at = time.perf_counter()
            self._current = None
        step.results.append((future, result))
        group = Group(buffer, [self.layers.parameters.by_name[name] for name in names], out)
        self._engine.post(lambda: step.add(group, last=last))
        return future

    def _check_dtype(self, buffer: Tensor, names: Sequence[str]) -> None:
        """What was converted since set-up would travel uncompressed, past what feedback keeps."""
        for first in names[:1]:
            dtype = self.layers.parameters.by_name[first].vector.dtype
            if buffer.dtype != dtype and not dtype.is_complex:  # complex gradients come as pairs of real numbers
                raise UnsupportedError(
                    f"{first} comes in {buffer.dtype}, and was in {dtype} when compression was set up; convert a model "
                    "before it is wrapped and compression is set up, or call remove() on all ranks, and set it up again"
                )

    def _step_facts(self) -> Facts:
        """What a place has ranks compare before a step, beside what the core does."""
        return {}

    def _new_step(self) -> Step:
        self._settle()
        total, number, start = self._total, self._step, self._settings.warmup_steps
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
            measure=compressing and (total.relative_error is None or number % MEASURE_EVERY == 0),
            seed=self._seed,
            facts=facts,
            finished=self._finished,
        )
        step.raises_later = self._later(step.raise_error)
        if self._delivers_all(in_backward=step.raises_later):
            step.go_ahead()
        return step

    def _delivers_all(self, *, in_backward: bool) -> bool:
        """Whether the average of every tensor of the step that begins will count, whatever its gradient is.

        Where it may not, a rank whose gradient is zero has to send nothing, and keep its residual: which is asked of
        the gradient, and waited for.
        """
        return True

    def _settle(self, *, wait: bool = False) -> None:
        """Learn what devices have found out of steps that the host did not wait for; of all, if it waits now."""
        with self._lock:
            unread, self._unread = self._unread, []
            for at, one in enumerate(unread):
                if not one.has_arrived(wait=wait):
                    self._unread = unread[at:]
                    break
                if one.is_damaged and not one.is_bad:  # of what is not finite there may be no payload
                    self._engine.post(_raise_damaged)
                skipped = int(one.is_bad)
                one.step.skipped += skipped
                self._total.skipped += skipped

    @property
    def _stopped_by(self) -> BaseException | None:
        """What stopped the exchange. A step knows before the engine does, which is told when all is undone."""
        if self._engine.error is None and self._open_step is not None:
            return self._open_step.error
        return self._engine.error

    def _refused(
        self, result: Tensor, future: torch.futures.Future[Tensor], cause: BaseException, *, last: bool
    ) -> torch.futures.Future[Tensor]:
        """What a place gets in steps after one in which the exchange stopped."""

        def stopped() -> None:
            raise RuntimeError(f"gradient exchange stopped at an earlier step: {cause}") from cause

        if last and not self._later(stopped):
            stopped()  # there is nothing to leave half-done
        fill_with_nan(result)
        future.set_result(result)
        return future

    def _finished(
        self, step: StepStats, sent: Mapping[str, int], errors: Mapping[str, float], findings: Findings | None
    ) -> None:
        with self._lock:
            if findings is not None:
                self._unread.append(_Unread(step, findings))
            self._sent.update(sent)
            self._errors.update(errors)
            self._step += 1
            self._open_step = None
            self._last = step
            self._total.add(step)

    def _count_sent(self, nbytes: int) -> None:
        """Bytes that a place sent beside what the core sends, of the step that was finished last."""
        with self._lock:
            self._last.sent_bytes += nbytes
            self._total.sent_bytes += nbytes

    def _fail(self, error: BaseException) -> None:
        """The engine broke."""
        if self._open_step is not None:
            self._open_step.abandon(error)

    def _broke_off(self) -> bool:
        """Whether a step was left in its middle: whoever feeds its tensors has gone, by an error of somebody else's."""
        return self.in_step and not is_in_backward()

    def _check_between_steps(self, what: str) -> None:
        if self._removed:
            raise RuntimeError(f"{what}: this handle was removed; make a new one")
        if self._broke_off():
            raise RuntimeError(f"{what}: {BROKE_OFF}")
        if self._open_step is not None and not self._open_step.abandoned:
            raise RuntimeError(
                f"{what} was called inside backward, where residuals are half-way; call it between steps"
            )
        if self._open_step is not None and self._open_step.torn:
            raise RuntimeError(
                f"{what}: the exchange broke off while a step was being written, so part of the residuals is sent and "
                "part is not; go on from the last checkpoint"
            )


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - as torch.autograd.graph does


class _Unread:
    """What a device has found out of a step, on its way to the host.

    Args:
        step: its statistics, which go into what is counted without this.
        findings: of the step.
    """

    def __init__(self, step: StepStats, findings: Findings) -> None:
        self.step = step
        places, self._event = findings.places, None
        if places.is_cuda:
            self._values = torch.empty(places.shape, dtype=places.dtype, device="cpu", pin_memory=True)
            self._values.copy_(places, non_blocking=True)
            self._event = torch.cuda.current_stream(places.device).record_event()
        else:
            self._values = places.clone()

    def has_arrived(self, *, wait: bool) -> bool:
        """Whether the values are here."""
        if wait and self._event is not None:
            self._event.synchronize()
        return self._event is None or bool(self._event.query())

    @property
    def is_bad(self) -> bool:
        """Whether something was not finite, on any rank."""
        return bool(self._values[Findings.ANY])

    @property
    def is_damaged(self) -> bool:
        """Whether a payload was damaged."""
        return bool(self._values[Findings.DAMAGED])


def _raise_damaged() -> None:
    raise PayloadError("a payload of an earlier step was damaged on its way, and residuals may be wrong since")


def _call(method: Callable[[BaseException], None] | None, error: BaseException) -> None:
    if method is not None:
        method(error)


def _close(engine: Engine, *loans: Loan) -> None:
    """End what a handle had for itself."""
    engine.close()
    broken = engine.error is not None or any(loan.broken for loan in loans)
    for loan in loans:
        loan.broken |= broken
        loan.give_back()
