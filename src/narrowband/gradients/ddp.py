"""Gradient compression for DistributedDataParallel, as one communication hook.

DDP cuts the gradients into buckets and calls the hook when a bucket is complete, while backward goes on. The hook hands
the bucket to the engine's thread and returns a future, for which DDP waits at the end of backward. In the engine:

* matrices of at least ``min_numel`` elements are encoded, exchanged and decoded tensor by tensor, so that neither the
  bytes nor, with ``gather`` and ``scatter_reduce``, the result depend on how DDP laid out its buckets (it does that
  anew after the first step; an all-reduce of a bucket adds up in an order that its layout decides);
* everything else (biases, norms, small layers) is collected over all buckets and travels in one dense all-reduce, just
  ahead of the last bucket's payload;
* with ``dgc`` momentum lives here and not in the optimizer: what travels uncompressed gets the same momentum, after its
  average, and so do steps in which nothing is compressed;
* before anything of a step is sent, ranks make sure that they are about to do the same
  (:mod:`~narrowband.gradients.agreement`);
* a step is one transaction: feedback changes its state only when every bucket of the step turned out finite on every
  rank, and with feedback no average is written before that is known. With ``gather`` it is known early: the dense
  all-reduce carries one element more, NaN where a rank encoded something not finite, so that averages are written
  while the last payload is on the wire. Without feedback each is written when it arrives.

An error in an exchange must not leave DDP in the middle of its backward. So its buckets are filled with NaN, DDP ends
its work, and then the error itself is raised from ``backward()``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowband.adapt import Plan, Policy
from narrowband.codecs import Codec, Identity
from narrowband.collectives import COLLECTIVES, Engine, Loan, Peers, Worker, borrow
from narrowband.collectives.exchange import check
from narrowband.errors import DisagreementError, UnsupportedError
from narrowband.feedback import DGC, Compression, PowerSGD
from narrowband.gradients.agreement import Agreement
from narrowband.gradients.chooser import Chooser
from narrowband.gradients.hook import hook_of
from narrowband.gradients.layers import Layers, for_gradients
from narrowband.gradients.optim import check_momentum
from narrowband.gradients.state import VERSION, check_state, facts_of, kept, states_of_all_ranks
from narrowband.gradients.stats import StepStats
from narrowband.gradients.step import Step, fill_with_nan
from narrowband.gradients.warmup import warm_up
from narrowband.stats import Stats
from narrowband.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket

    from narrowband.collectives.exchange import Collective
    from narrowband.feedback import Method
    from narrowband.gradients.agreement import Facts
    from narrowband.gradients.hook import Hook

__all__ = ["GradientCompression", "compress_gradients"]

log = logging.getLogger(__name__)

#: What the error says that ranks raise which do not agree on a step.
_ADVICE = (
    "Call pause, resume, set_epoch, set_layers, load_state_dict and remove on all ranks, between the same two steps, "
    "with the same arguments; then go on from a checkpoint of all ranks"
)
_LOAD_ADVICE = (
    "Call load_state_dict on all ranks, between the same two steps, with states that were saved together. Nothing has "
    "changed on any rank"
)


def compress_gradients(
    ddp_model: DistributedDataParallel,
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    min_numel: int = 1024,
    warmup_steps: int = 0,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    collective: Literal["auto", "dense", "gather", "scatter_reduce"] = "auto",
    grad_scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    small: str | Codec = "dense",
) -> GradientCompression:
    """Compress the gradients that ``ddp_model`` averages. Call it on all ranks, once, before the first backward.

    Args:
        ddp_model: the wrapped model; nothing else of the training loop changes.
        spec: codec and feedback, such as ``"topk:density=0.01+ef"``, ``"qsgd:bits=4"`` or ``"none"``; or a plan that
            has one for every layer; or a policy such as :class:`~narrowband.LGreCo`, which plans while training runs.
        min_numel: parameters with fewer elements count as small, as do all biases and norms.
        small: what happens to these: ``dense``, they travel uncompressed; ``together``, as one vector of the whole
            model, compressed like any layer; or, as one vector, by a codec of their own, which keeps more, such as
            ``"topk:density=0.03"``. Where 1 in 1,000 is sent, the small ones are most of the bytes otherwise.
        warmup_steps: average uncompressed until this many steps are done; early gradients change fast.
        process_group: the ranks to average over; by default the model's own.
        seed: for stochastic rounding and sampling. Equal seeds, equal runs.
        collective: ``auto`` takes the one that sends least (see :mod:`narrowband.collectives.exchange`).
        grad_scaler: the scaler of mixed-precision training, if there is one. The residual is in units of scaled
            gradients, and is rescaled when the scale changes.
        optimizer: the one that will step, to check that momentum is not applied twice (``dgc`` applies it before the
            wire).

    ``model.join()`` works: ranks that have run out of data send zeros, and keep their residuals (with ``ef21``, which
    has no residual, zero counts as their gradient). Its
    ``divide_by_initial_world_size=False`` is refused by the first backward.

    Returns:
        A handle: :meth:`~GradientCompression.stats`, :meth:`~GradientCompression.pause`,
        :meth:`~GradientCompression.state_dict` …

    Raises:
        TypeError: not a DistributedDataParallel model; says what to do with what it is.
        ValueError: a spec, a number or a collective that does not exist, momentum in both places, or ranks that
            disagree.
        UnsupportedError: the model already has a hook, or does what no hook can follow; or a spec that is not for
            gradients (``aq-sgd``).

    Example:
        >>> model = DistributedDataParallel(model)
        >>> handle = nb.compress_gradients(model, "topk:density=0.01+ef")
        >>> loss(model(x)).backward()  # averages arrive compressed
        >>> print(f"{handle.stats().total.ratio:.0f}x less traffic")
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"compress_gradients takes a DistributedDataParallel model, not {_what_it_is(ddp_model)}")
    policy, plan = spec if isinstance(spec, Policy) else None, spec if isinstance(spec, Plan) else None
    if policy is not None:
        chosen, warmup_steps = for_gradients(policy.start), max(warmup_steps, policy.warmup_steps)
    else:
        chosen = for_gradients(plan.default if plan is not None else cast("str | Codec | Compression | Method", spec))
    if min_numel < 0 or warmup_steps < 0:
        raise ValueError(f"min_numel={min_numel} and warmup_steps={warmup_steps} must not be negative")
    together = small != "dense"
    if together and isinstance(chosen.feedback, PowerSGD):
        raise UnsupportedError("powersgd factors matrices, and small parameters make none; use small='dense'")
    if together and ddp_model.find_unused_parameters:
        raise UnsupportedError(
            f"small={str(small)!r} cannot tell which parts of its vector had no gradient, which "
            "find_unused_parameters=True allows; use small='dense'"
        )
    if collective != "auto":
        if collective not in COLLECTIVES:
            raise ValueError(f"collective={collective!r} is none of auto, {', '.join(COLLECTIVES)}")
        if isinstance(chosen.feedback, PowerSGD):
            raise UnsupportedError(f"{chosen} has a way of its own to travel; use collective='auto'")
        check(chosen.codec, collective, chosen.feedback)
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError("no process group: call torch.distributed.init_process_group(...) first")
    _check_model(ddp_model)
    hook = hook_of(ddp_model)
    group = process_group or ddp_model.process_group
    _check_momentum(ddp_model, chosen, optimizer, warn=dist.get_rank(group) == 0)
    follows = isinstance(chosen.feedback, DGC) and chosen.feedback.accumulate == "steps"
    if follows and optimizer is None:
        raise ValueError(f"{chosen} accumulates steps, gradients times the learning rate: pass optimizer=…")
    return GradientCompression(
        ddp_model,
        chosen,
        hook=hook,
        min_numel=min_numel,
        warmup_steps=warmup_steps,
        group=group,
        seed=seed,
        collective=collective,
        grad_scaler=grad_scaler,
        small=small,
        policy=policy,
        plan=plan,
        optimizer=optimizer if follows else None,
    )


def _what_it_is(model: object) -> str:
    """What was given in place of a DDP model, and what to do."""
    inside = getattr(model, "_orig_mod", None)
    if isinstance(inside, DistributedDataParallel):
        return (
            "the torch.compile wrapper of one. Pass the model inside, compress_gradients(model._orig_mod, …), and go "
            "on calling the compiled one; or compile first: DistributedDataParallel(torch.compile(model))"
        )
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"} and "ReplicateModule" not in kinds:
        return (
            f"an FSDP model ({type(model).__name__}). FSDP reduces gradients into shards by itself, and has no "
            "communication hook. If the model fits on one device, wrap it in DistributedDataParallel instead of "
            "sharding it; compress_activations can make room"
        )
    if "ReplicateModule" in kinds or _is_replicated(model):
        return (
            "a model of replicate(), which averages by itself and has no communication hook of its own. Leave "
            "replicate() out, and write: model = DistributedDataParallel(model)"
        )
    if isinstance(model, torch.nn.DataParallel):
        return (
            "DataParallel, which is one process. Start one process per device with torchrun, and write: "
            "model = DistributedDataParallel(model)"
        )
    if isinstance(model, torch.nn.Module):
        return f"{type(model).__name__}; wrap it first: model = DistributedDataParallel(model)"
    return f"{model.__name__}, a class" if isinstance(model, type) else type(model).__name__


def _is_replicated(model: object) -> bool:
    """Whether the composable replicate() of older versions was applied."""
    if not isinstance(model, torch.nn.Module):
        return False
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed._composable.replicate import replicate

        return replicate.state(model) is not None
    return False


def _check_model(model: DistributedDataParallel) -> None:
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        raise UnsupportedError(
            "this model's optimizer steps inside backward (_apply_optimizer_in_backward), before the averages arrive; "
            "step it after backward instead"
        )


def _check_momentum(
    model: DistributedDataParallel, chosen: Compression, optimizer: torch.optim.Optimizer | None, *, warn: bool
) -> None:
    method = chosen.feedback
    if not isinstance(method, DGC):
        return
    if optimizer is not None:
        check_momentum(optimizer, method, model.parameters())
    elif method.momentum and warn:
        log.warning(
            "dgc applies momentum=%s before the wire, and the optimizer must not apply it again; pass optimizer=… to "
            "have that checked",
            method.momentum,
        )
    odd = [name for name, p in model.module.named_parameters() if p.requires_grad and p.dtype.is_complex]
    if odd and method.momentum:
        raise UnsupportedError(
            f"dgc keeps the momentum of real numbers; these parameters are complex: {', '.join(odd)}"
        )


class GradientCompression:
    """The handle of :func:`compress_gradients`. ``repr(handle)`` says what it does and what it has saved."""

    def __init__(
        self,
        model: DistributedDataParallel,
        chosen: Compression,
        *,
        hook: Hook,
        min_numel: int,
        warmup_steps: int,
        group: dist.ProcessGroup,
        seed: int,
        collective: Collective | Literal["auto"],
        grad_scaler: torch.amp.GradScaler | None,
        small: str | Codec,
        policy: Policy | None,
        plan: Plan | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.compression = chosen
        self._optimizer = optimizer  # whose learning rate is followed, if any is
        self._warmup_steps = warmup_steps
        self._seed = seed
        self._collective = collective
        self._grad_scaler = grad_scaler
        self._loss_scale: float | None = None
        self._paused = False
        self._removed = False
        self._epoch: int | None = None
        self._step = 0
        self._buckets: list[list[str]] = []
        self._coming: list[list[str]] = []
        self._current: Step | None = None  # the step whose buckets are coming in
        self._open_step: Step | None = None  # the step that the engine works on
        self._said_sparse = False
        self._hook = weakref.ref(hook)
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        self._total, self._last = StepStats(), StepStats()

        ranks = dist.get_process_group_ranks(group)
        self.layers = Layers(
            model,
            chosen,
            min_numel=min_numel,
            small=small,
            collective=collective,
            size=len(ranks),
            rank=dist.get_rank(group),
        )
        device = next(iter(self.layers.parameters)).device if self.layers.parameters else torch.device("cpu")
        # A group of our own: DDP's other collectives (buffers, unused parameters) come from other threads, and must
        # not slip between ours.
        self._loan = borrow(group, device)
        self._peers = Peers(self._loan.group, dist.get_rank(self._loan.group), len(ranks))
        self._agreement = Agreement(self._peers, device)
        self.layers.warn_if_more()
        self._chooser = Chooser(policy, self.layers, self._peers)
        if plan is not None:
            self._chooser.follow(plan)
        kinds = self._kinds()
        self._find_pairs()
        try:
            self._agree(min_numel)
        except DisagreementError:  # all ranks know of it, and nothing is on its way in the group
            self._loan.give_back()
            raise
        warm_up(kinds, policy, device, self._peers)

        myself = weakref.ref(self)
        self._engine = Engine(device, lambda error: _failed(myself, error))
        self._close = weakref.finalize(self, _close, self._engine, self._loan)
        hook.attach(self)

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
        return f"GradientCompression({', '.join(said)})"

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
        return self._peers.size

    @property
    def paused(self) -> bool:
        """Whether steps are averaged uncompressed, see :meth:`pause`."""
        return self._paused

    def pause(self) -> None:
        """Average uncompressed from the next step on; the residual stays until :meth:`resume`. Call on all
        ranks.
        """
        self._paused = True

    def resume(self) -> None:
        """Compress again from the next step on. Call on all ranks."""
        self._paused = False

    def remove(self) -> None:
        """Take compression off: the model averages as plain DDP does, to the bit. Call on all ranks, between steps.

        Residuals are dropped, so save :meth:`state_dict` before if you may want to go on. The process group, threads
        and memory of the handle are given back. :meth:`stats` remains, and
        :func:`~narrowband.compress_gradients` may be called for the model again. When the model and the handle are
        garbage, the same happens by itself. (The group is kept for the next handle among the same ranks.)

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
                self._agreement.now({"call": "remove"}, _ADVICE)
            except RuntimeError as error:  # a rank that has gone already is no reason to stay
                self._loan.broken = True
                log.warning("remove: other ranks could not be asked: %s", error)
        self._removed = True
        hook = self._hook()
        if hook is not None:
            hook.detach()
        self._close()
        if self._peers.pairs is not None:
            self._peers.pairs.close()
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

        The residual stays, and so do warm-started factors: a smaller rank leaves columns out, a larger one draws new
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
    def buckets(self) -> list[list[str]]:
        """The layers of each bucket that DDP made, in the order in which they are sent, as of the last step."""
        return [list(names) for names in self._buckets]

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return next(iter(self.layers.parameters)).device

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The handle's own, of the ranks that average."""
        return self._peers.group

    @property
    def plan(self) -> Plan | None:
        """What was decided last, or given; None before and without."""
        return self._chooser.plan

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
            "loss_scale": self._loss_scale,
            "rank": self._peers.rank,
            "world_size": self._peers.size,
            "feedback": self.layers.state.state_dict() if self.layers.state else {},
            "others": {name: state.state_dict() for name, state in self.layers.states.items() if name},
            "chooser": self._chooser.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where :meth:`state_dict` was taken. Call on all ranks.

        A transaction: states are checked on every rank, and ranks compare what they are about to load, before anything
        changes. If any rank cannot load its state, or ranks have states of different steps, all of them raise.

        Args:
            state: this rank's own state, or a list with the states of all ranks there were. If there are as many ranks
                now, each takes its own from the list. After a change of their number, their residuals to the average is
                shared evenly among the ranks there are, its sum kept. (With ``ef21`` every rank starts with what all
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
        self._chooser.load_state_dict(mine["chooser"])
        self._find_pairs()
        self._step, self._epoch = mine["step"], mine["epoch"]
        self._paused = mine["paused"]
        self._seed = mine["seed"]
        self._loss_scale = mine["loss_scale"]
        self._total, self._last = StepStats(), StepStats()

    def _loadable(self, state: object) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        """The state of this rank, and its residuals, if both can be loaded."""
        mine = check_state(state)
        here, there = (self._peers.rank, self._peers.size), (mine["rank"], mine["world_size"])
        if here != there:
            raise ValueError(
                f"this is rank {here[0]} of {here[1]}, the state is of rank {there[0]} of {there[1]}; every "
                "rank loads its own, or, after a change of the number of ranks, the list of all ranks' states"
            )
        residuals = kept(mine)
        self.layers.check_load(mine["layers"], residuals, mine["spec"])
        self._chooser.check_state(mine["chooser"])
        return mine, residuals

    def _loadable_of_all(
        self, states: Sequence[Mapping[str, Any]]
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        """The same from the states of all ranks: this rank's own, if there are as many as there were."""
        if len(states) == self._peers.size:
            return self._loadable(states[self._peers.rank])
        for state in states:
            self.layers.check_load(state["layers"], kept(state), state["spec"])
        self._chooser.check_state(states[0]["chooser"])
        return states[0], self.layers.merged([kept(state) for state in states], states[0]["spec"])

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _agree(self, min_numel: int) -> None:
        """Ranks that were set up differently would hang, or decode nonsense; find out now."""
        facts = {
            "call": "compress_gradients",
            "min_numel": str(min_numel),
            "warmup_steps": str(self._warmup_steps),
            "seed": str(self._seed),
            "collective": self._collective,
            "grad_scaler": "none" if self._grad_scaler is None else "given",
            "policy": repr(self._chooser.identity()),
            **self.layers.identity(),
        }
        self._agreement.now(facts, "Call compress_gradients with the same arguments for the same model on all ranks")

    def _kinds(self) -> list[Compression]:
        """What layers have or may get.

        Raises:
            ValueError: the policy may give layers what cannot be mixed.
        """
        specs = [] if self._chooser.policy is None else self._chooser.policy.specs()
        specs += [] if self.plan is None else list(self.plan.specs().values())
        return [self.compression, *(self.layers.mixed("a layer", spec) for spec in dict.fromkeys(specs))]

    # ---- a step, in DDP's thread -------------------------------------------------------------------------------------

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer, last = bucket.buffer(), bucket.is_last()
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        step = self._current
        if step is None and self._engine.error is not None:
            return self._refused(buffer, future, last=last)
        if step is None:
            step = self._current = self._open_step = self._new_step()
        parameters = bucket.parameters()
        known = [self.layers.parameters[p] for p in parameters]
        self._coming.append([p.name for p in known if p.compressed])
        if last:
            self._buckets, self._coming = [names for names in self._coming if names], []
            # The next call belongs to the next step, even if this one is still on the wire.
            step.closed_at = time.perf_counter()
            self._current = None
        step.results.append((future, buffer))
        self._engine.post(lambda: step.add(buffer, parameters, last=last))
        return future

    def _new_step(self) -> Step:
        model = self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise UnsupportedError(
                "join(divide_by_initial_world_size=False) divides by the number of ranks that still have data, "
                "which compressed averages do not know; use join(divide_by_initial_world_size=True), the default"
            )
        compressing = not self._paused and self._step >= self._warmup_steps
        codec = self.compression.codec_at(max(0, self._step - self._warmup_steps), self._epoch)
        step = Step(self, codec if compressing else Identity(), compressing=compressing)
        step.raises = _at_the_end_of_backward(step.raise_error)
        step.facts = {
            "call": "backward",
            "step": str(self._step),
            "compression": "paused" if self._paused else str(step.codec),
            "epoch": str(self._epoch),
            "seed": str(self._seed),
            "spec of layer": self.layers.own_specs(),
        }
        return step

    def _refused(
        self, buffer: Tensor, future: torch.futures.Future[Tensor], *, last: bool
    ) -> torch.futures.Future[Tensor]:
        """What DDP gets in steps after one in which the exchange stopped."""
        cause = self._engine.error

        def stopped() -> None:
            raise RuntimeError(f"gradient exchange stopped at an earlier step: {cause}") from cause

        if last and not _at_the_end_of_backward(stopped):
            stopped()  # outside of a backward there is nothing to leave half-done
        fill_with_nan(buffer)
        future.set_result(buffer)
        return future

    def _begin_step(self, step: Step) -> None:
        """Before anything of a step is sent: the unit of its gradients, whether ranks agree, and what layers have."""
        self._scale_changed()
        if self._optimizer is not None:
            self.layers.follow(self._optimizer)
        facts = {**step.facts, "loss scale": str(self._loss_scale)}
        if step.compressing and self._chooser.is_due(self._step):
            self._agreement.now(facts, _ADVICE)
            if self._chooser.decide(self._step):
                self._find_pairs()
        else:
            step.agree(self._agreement.job(facts, _ADVICE))
        step.account_agreement(self._agreement.nbytes)

    def _look(self, buffer: Tensor, parameters: Sequence[Tensor]) -> None:
        """Let what decides see a bucket."""
        self._chooser.look(self._step, buffer, parameters, 1.0 / (self._loss_scale or 1.0))

    def _find_pairs(self) -> None:
        """A thread for exchanges from rank to rank, where there are any."""
        if self._peers.pairs is None and self.layers.exchanges_pairs and dist.get_backend(self._peers.group) == "gloo":
            pairs = Worker("narrowband-pairs")
            weakref.finalize(self, pairs.close)
            self._peers = replace(self._peers, pairs=pairs)

    def _scale_changed(self) -> None:
        """Bring the residual to the unit of this step's gradients."""
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return
        scale = self._grad_scaler.get_scale()
        if self._loss_scale is not None and self._loss_scale != scale:
            for state in self.layers.states.values():
                state.scale(scale / self._loss_scale)
        self._loss_scale = scale

    def _finished(self, step: StepStats) -> None:
        with self._lock:
            self._step += 1
            self._open_step = None
            self._last = step
            self._total.add(step)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _check_between_steps(self, what: str) -> None:
        if self._removed:
            raise RuntimeError(f"{what}: this handle was removed; call compress_gradients for a new one")
        if self._open_step is not None and not self._open_step.abandoned:
            raise RuntimeError(
                f"{what} was called inside backward, where the residual is half-way; call it between steps"
            )
        if self._open_step is not None and self._open_step.torn:
            raise RuntimeError(
                f"{what}: the exchange broke off while a step was being written, so part of the residual is sent and "
                "part is not; go on from the last checkpoint"
            )


def _at_the_end_of_backward(what: Callable[[], None]) -> bool:
    """Call ``what`` when the backward that runs here has ended, after DDP has ended its part; False outside of one.

    What it raises, ``backward()`` raises.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    try:
        # DDP queues its own callback when the last bucket is with the hook. A callback that is queued by a callback is
        # called after all that were queued in backward.
        queue(lambda: queue(what))
    except RuntimeError:  # a rank that has run out of data calls hooks without a backward
        return False
    return True


def _failed(handle: weakref.ref[GradientCompression], error: BaseException) -> None:
    alive = handle()
    if alive is not None and alive._open_step is not None:
        alive._open_step.abandon(error)


def _close(engine: Engine, loan: Loan) -> None:
    """End what a handle had for itself."""
    engine.close()
    loan.broken |= engine.error is not None
    loan.give_back()
