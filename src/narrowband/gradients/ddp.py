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
* a step is one transaction: feedback changes its state only when every bucket of the step turned out finite on every
  rank, and with feedback no average is written before that is known. With ``gather`` it is known early: the dense
  all-reduce carries one element more, NaN where a rank encoded something not finite, so that averages are written
  while the last payload is on the wire. Without feedback each is written when it arrives.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # what dist.GradBucket is, for type checkers
from torch.nn.parallel import DistributedDataParallel

from narrowband.adapt import Plan, Policy
from narrowband.codecs import Codec, Identity
from narrowband.collectives import COLLECTIVES, Engine, Peers, Worker
from narrowband.collectives.exchange import all_gather_single, check
from narrowband.errors import UnsupportedError
from narrowband.feedback import DGC, Compression, PowerSGD
from narrowband.gradients.chooser import Chooser
from narrowband.gradients.layers import Layers, for_gradients
from narrowband.gradients.optim import check_momentum
from narrowband.gradients.stats import Stats, StepStats
from narrowband.gradients.step import Step
from narrowband.gradients.warmup import warm_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.collectives.exchange import Collective
    from narrowband.feedback import Method

__all__ = ["GradientCompression", "compress_gradients"]

log = logging.getLogger(__name__)

#: Models that have a handle; a second one would send every gradient twice.
_handles: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[GradientCompression]] = (
    weakref.WeakKeyDictionary()
)


def compress_gradients(
    ddp_model: DistributedDataParallel,
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    min_numel: int = 1024,
    start_step: int = 0,
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
        start_step: average uncompressed until this many steps are done; early gradients change fast.
        process_group: the ranks to average over; by default the model's own.
        seed: for stochastic rounding and sampling. Equal seeds, equal runs.
        collective: ``auto`` takes the one that sends least (see :mod:`narrowband.collectives.exchange`).
        grad_scaler: the scaler of mixed-precision training, if there is one. What feedback owes is in units of scaled
            gradients, and is rescaled when the scale changes.
        optimizer: the one that will step, to check that momentum is not applied twice (``dgc`` applies it before the
            wire).

    ``model.join()`` works: ranks that have run out of data send zeros, and keep what they owe (with ``ef21``, which
    owes nothing, zero counts as their gradient). Its
    ``divide_by_initial_world_size=False`` is refused by the first backward.

    Returns:
        A handle: :meth:`~GradientCompression.stats`, :meth:`~GradientCompression.pause`,
        :meth:`~GradientCompression.state_dict` …

    Raises:
        TypeError: not a DistributedDataParallel model.
        ValueError: a spec, a number or a collective that does not exist, momentum in both places, or ranks that
            disagree.
        UnsupportedError: the model already has a hook, or does what no hook can follow; or a spec that is not for
            gradients (``aq-sgd``).

    Example:
        >>> model = DistributedDataParallel(net)
        >>> handle = nb.compress_gradients(model, "topk:density=0.01+ef")
        >>> loss(model(x)).backward()  # averages arrive compressed
        >>> print(f"{handle.stats().total.ratio:.0f}x less traffic")
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"compress_gradients takes a DistributedDataParallel model, not {type(ddp_model).__name__}; "
            "wrap it first: DistributedDataParallel(model)"
        )
    policy, plan = spec if isinstance(spec, Policy) else None, spec if isinstance(spec, Plan) else None
    if policy is not None:
        chosen, start_step = for_gradients(policy.start), max(start_step, policy.warmup)
    else:
        chosen = for_gradients(plan.usual if plan is not None else cast("str | Codec | Compression | Method", spec))
    if min_numel < 0 or start_step < 0:
        raise ValueError(f"min_numel={min_numel} and start_step={start_step} must not be negative")
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
    _check_momentum(ddp_model, chosen, optimizer)
    follows = isinstance(chosen.feedback, DGC) and chosen.feedback.accumulate == "steps"
    if follows and optimizer is None:
        raise ValueError(f"{chosen} accumulates steps, gradients times the learning rate: pass optimizer=…")
    return GradientCompression(
        ddp_model,
        chosen,
        min_numel=min_numel,
        start_step=start_step,
        group=process_group or ddp_model.process_group,
        seed=seed,
        collective=collective,
        grad_scaler=grad_scaler,
        small=small,
        policy=policy,
        plan=plan,
        optimizer=optimizer if follows else None,
    )


def _check_model(model: DistributedDataParallel) -> None:
    if model in _handles:
        raise UnsupportedError(
            "this model's gradients are compressed already; keep the first handle, or wrap the module in a new "
            "DistributedDataParallel to start over"
        )
    if model._comm_hooks:  # there is no public way to ask
        name = getattr(model._comm_hooks[0][0], "__qualname__", "a hook")
        raise UnsupportedError(f"this model has a communication hook already ({name}); DDP allows one")
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        raise UnsupportedError(
            "this model's optimizer steps inside backward (_apply_optimizer_in_backward), before the averages arrive; "
            "step it after backward instead"
        )


def _check_momentum(
    model: DistributedDataParallel, chosen: Compression, optimizer: torch.optim.Optimizer | None
) -> None:
    method = chosen.feedback
    if not isinstance(method, DGC):
        return
    if optimizer is not None:
        check_momentum(optimizer, method, model.parameters())
    elif method.momentum:
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
    """The handle of :func:`compress_gradients`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        chosen: Compression,
        *,
        min_numel: int,
        start_step: int,
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
        self._start_step = start_step
        self._seed = seed
        self._collective = collective
        self._grad_scaler = grad_scaler
        self._loss_scale: float | None = None
        self._paused = False
        self._epoch: int | None = None
        self._step = 0
        self._buckets: list[list[str]] = []
        self._coming: list[list[str]] = []
        self._current: Step | None = None  # the step whose buckets are coming in
        self._open_step: Step | None = None  # the step that the engine works on
        self._said_sparse = False
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        self._total, self._last = StepStats(), StepStats()

        size = len(dist.get_process_group_ranks(group))
        self.layers = Layers(model, chosen, min_numel=min_numel, small=small, collective=collective, size=size)
        device = next(iter(self.layers.parameters)).device if self.layers.parameters else torch.device("cpu")
        # A group of our own: DDP's other collectives (buffers, unused parameters) come from other threads, and must
        # not slip between ours.
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(
            ranks, backend=dist.get_backend(group), timeout=_timeout_of(group, device), use_local_synchronization=True
        )
        self._peers = Peers(own, dist.get_rank(own), len(ranks))
        self.layers.warn_if_more()
        self._chooser = Chooser(policy, self.layers, self._peers)
        if plan is not None:
            self._chooser.follow(plan)
        kinds = self._kinds()
        self._find_pairs()
        self._agree(min_numel, device)
        warm_up(kinds, policy, device, self._peers)

        myself = weakref.ref(self)
        self._engine = Engine(device, lambda error: _failed(myself, error))
        weakref.finalize(self, self._engine.close)
        model.register_comm_hook(self, _hook)
        _handles[model] = myself

    # ---- for the user ------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Bytes, seconds and relative error: in total, and of the last finished step."""
        with self._lock:
            return Stats(StepStats(**vars(self._total)), StepStats(**vars(self._last)))

    @property
    def step(self) -> int:
        """How many steps have been averaged."""
        return self._step

    def pause(self) -> None:
        """Average uncompressed from the next step on; what feedback owes stays until :meth:`resume`. Call on all
        ranks.
        """
        self._paused = True

    def resume(self) -> None:
        """Compress again from the next step on. Call on all ranks."""
        self._paused = False

    def set_epoch(self, epoch: int) -> None:
        """Tell a warm-up that counts epochs which one begins, from 0 on, as a DistributedSampler is told. Call on all
        ranks.
        """
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must not be negative")
        self._epoch = epoch

    def set_layers(self, specs: Mapping[str, str | Codec | Compression | Method]) -> None:
        """Compress some layers otherwise than the rest, from the next step on. Call on all ranks, between steps.

        What is owed stays, and so do warm-started factors: a smaller rank leaves columns out, a larger one draws new
        ones.

        Args:
            specs: parameter name → spec, of the model's kind or another. Where the model has feedback, every layer has
                it, and it can be left out; what a layer owes moves along. With ``ef21`` all layers have that. With
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
            "version": 1,
            "spec": str(self.compression),
            "step": self._step,
            "epoch": self._epoch,
            "layers": self.layers.own_specs(),
            "seed": self._seed,
            "loss_scale": self._loss_scale,
            "rank": self._peers.rank,
            "world_size": self._peers.size,
            "owed": self.layers.state.state_dict() if self.layers.state else {},
            "others": {name: state.state_dict() for name, state in self.layers.states.items() if name},
            "chooser": self._chooser.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Args:
            state: this rank's own state; or, when the number of ranks has changed, a list with the states of all the
                ranks there were. What they owed to the average is then shared evenly among the ranks there are, its
                sum kept. (With ``ef21`` every rank starts with what all ranks had in common.)

        Raises:
            ValueError: the state of another rank, another number of ranks or another model, or residuals without a
                feedback to hold them.
        """
        self._check_between_steps("load_state_dict")
        states: list[Mapping[str, Any]] = [state] if isinstance(state, Mapping) else list(state)
        if not states:
            raise ValueError("the list of states is empty; pass this rank's own state, or the states of all ranks")
        first = states[0]
        if isinstance(state, Mapping):
            here, there = (self._peers.rank, self._peers.size), (first["rank"], first["world_size"])
            if here != there:
                raise ValueError(
                    f"this is rank {here[0]} of {here[1]}, the state is of rank {there[0]} of {there[1]}; every "
                    "rank loads its own, or, after a change of the number of ranks, the list of all ranks' states"
                )
            owed = _kept(first)
        else:
            owed = self.layers.merged([_kept(one) for one in _all_of_them(states)], first["spec"])
        self.layers.load(first["layers"], owed, first["spec"])
        self._chooser.load_state_dict(first.get("chooser", {}))
        self._find_pairs()
        self._step, self._epoch = first["step"], first["epoch"]
        self._seed = first["seed"]
        self._loss_scale = first["loss_scale"]
        self._total, self._last = StepStats(), StepStats()

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _agree(self, min_numel: int, device: torch.device) -> None:
        """Ranks that were set up differently would hang, or decode nonsense; find out now."""
        what: list[Any] = [min_numel, self._start_step, self._seed, self._collective]
        what.append("with a scaler" if self._grad_scaler is not None else "no scaler")
        what += [self._chooser.identity(), *self.layers.identity()]
        mine = torch.frombuffer(bytearray(hashlib.sha256(repr(what).encode()).digest()), dtype=torch.uint8).to(device)
        all_of_them = torch.empty(self._peers.size, mine.numel(), dtype=torch.uint8, device=device)
        all_gather_single(all_of_them.view(-1), mine, group=self._peers.group)
        others = [r for r in range(self._peers.size) if not torch.equal(all_of_them[r], mine)]
        if others:
            raise ValueError(
                f"ranks disagree: rank {self._peers.rank} compresses with {what[:-1]}, and rank(s) {others} differ in "
                "that or in the model's parameters"
            )

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
        devices = [bucket.buffer().device] if bucket.buffer().device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        step = self._current
        if step is None and self._engine.error is not None:
            # Through the future: an exception here would leave DDP in the middle of its backward.
            future.set_exception(RuntimeError(f"gradient exchange stopped at an earlier step: {self._engine.error}"))  # type: ignore[arg-type]
            return future
        if step is None:
            model = self._model()
            if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
                raise UnsupportedError(
                    "join(divide_by_initial_world_size=False) divides by the number of ranks that still have data, "
                    "which compressed averages do not know; use join(divide_by_initial_world_size=True), the default"
                )
            compressing = not self._paused and self._step >= self._start_step
            codec = self.compression.codec_at(max(0, self._step - self._start_step), self._epoch)
            step = Step(self, codec if compressing else Identity(), compressing=compressing)
            self._current = self._open_step = step
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        last = bucket.is_last()
        known = [self.layers.parameters[p] for p in parameters]
        self._coming.append([p.name for p in known if p.compressed])
        if last:
            self._buckets, self._coming = [names for names in self._coming if names], []
            # The next call belongs to the next step, even if this one is still on the wire.
            step.closed_at = time.perf_counter()
            self._current = None
        step.futures.append(future)
        self._engine.post(lambda: step.add(buffer, parameters, future, last=last))
        return future

    def _begin_step(self) -> None:
        """Before anything of a step is sent: the unit of its gradients, and what layers have from here on."""
        self._scale_changed()
        if self._optimizer is not None:
            self.layers.follow(self._optimizer)
        if not self._paused and self._step >= self._start_step and self._chooser.decide(self._step):
            self._find_pairs()

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
        """Bring what is owed to the unit of this step's gradients."""
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
        if self._open_step is not None and not self._open_step.abandoned:
            raise RuntimeError(
                f"{what} was called inside backward, where what is owed is half-way; call it between steps"
            )
        if self._open_step is not None and self._open_step.torn:
            raise RuntimeError(
                f"{what}: the exchange broke off while a step was being written, so part of what was owed is sent and "
                "part is not; go on from the last checkpoint"
            )


def _all_of_them(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """In the order of their ranks, if each is there once."""
    size = states[0]["world_size"]
    if sorted(s["rank"] for s in states) != list(range(size)):
        raise ValueError(
            f"the states were saved by {size} ranks, but these are of ranks {[s['rank'] for s in states]}; "
            "pass all, once"
        )
    return sorted(states, key=lambda s: int(s["rank"]))


def _kept(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """What a rank kept, by the names of :attr:`Layers.states`."""
    return {"": state["owed"], **state.get("others", {})}


def _hook(handle: GradientCompression, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return handle._on_bucket(bucket)


# DDP compares annotations with these very types; postponed evaluation would leave strings.
_hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})


def _failed(handle: weakref.ref[GradientCompression], error: BaseException) -> None:
    alive = handle()
    if alive is not None and alive._open_step is not None:
        alive._open_step.abandon(error)


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Our group waits as long as the user's does."""
    try:
        options = group._get_backend(device).options
    except (RuntimeError, AttributeError):  # a backend without options
        return None
    return cast("timedelta | None", getattr(options, "_timeout", None))
