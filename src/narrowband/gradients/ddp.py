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
import math
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # what dist.GradBucket is, for type checkers
from torch.nn.parallel import DistributedDataParallel

from narrowband import kernels
from narrowband.codecs import Codec, Identity, LowRank, TopK
from narrowband.codecs.base import squared_norm
from narrowband.collectives import (
    COLLECTIVES,
    Engine,
    Exchange,
    Item,
    LowRankReduce,
    Peers,
    Wire,
    Worker,
    allreduce_nbytes,
    choose,
    exchange,
)
from narrowband.collectives.exchange import all_gather_single, check
from narrowband.errors import UnsupportedError
from narrowband.feedback import DGC, Compression, Feedback, PowerSGD, compression
from narrowband.gradients.optim import check_momentum
from narrowband.gradients.stats import Stats, StepStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from narrowband.codecs import Shape
    from narrowband.collectives import Job
    from narrowband.collectives.exchange import Collective

    Way = Collective | Literal["lowrank"]

__all__ = ["GradientCompression", "compress_gradients"]

log = logging.getLogger(__name__)

#: The relative error costs two passes over the gradients, so it is measured in one step of this many.
MEASURE_EVERY = 50

#: The square matrices that loops are warmed up with: small tensors take one thread and large ones several, and sparse
#: codecs look at a sample where that is much smaller than the tensor.
_WARM_UP_SIDES = (64, 256, 1024)

#: Factors of several buckets travel together until they are so many bytes: 10 ms at 200 Mbit/s, about what an
#: all-reduce among busy machines takes anyway.
_ENOUGH_NBYTES = 1 << 18

_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
_NORMS = (
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
    torch.nn.modules.batchnorm._NormBase,  # the common base of all batch and instance norms
)

#: Models that have a handle; a second one would send every gradient twice.
_handles: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[GradientCompression]] = (
    weakref.WeakKeyDictionary()
)


def compress_gradients(
    ddp_model: DistributedDataParallel,
    spec: str | Codec | Compression | DGC | PowerSGD,
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
        spec: codec and feedback, such as ``"topk:density=0.01+ef"``, ``"qsgd:bits=4"`` or ``"none"``.
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

    ``model.join()`` works: ranks that have run out of data send zeros, and keep what they owe. Its
    ``divide_by_initial_world_size=False`` is refused by the first backward.

    Returns:
        A handle: :meth:`~GradientCompression.stats`, :meth:`~GradientCompression.pause`,
        :meth:`~GradientCompression.state_dict` …

    Raises:
        TypeError: not a DistributedDataParallel model.
        ValueError: a spec, a number or a collective that does not exist, momentum in both places, or ranks that
            disagree.
        UnsupportedError: the model already has a hook, or does what no hook can follow.

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
    chosen = compression(spec)
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
    small_codec = _codec_like(chosen, small, "small") if together and small != "together" else None
    if collective != "auto":
        if collective not in COLLECTIVES:
            raise ValueError(f"collective={collective!r} is none of auto, {', '.join(COLLECTIVES)}")
        if isinstance(chosen.feedback, PowerSGD):
            raise UnsupportedError(f"{chosen} has a way of its own to travel; use collective='auto'")
        check(chosen.codec, collective)
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError("no process group: call torch.distributed.init_process_group(...) first")
    _check_model(ddp_model)
    _check_momentum(ddp_model, chosen, optimizer)
    return GradientCompression(
        ddp_model,
        chosen,
        min_numel=min_numel,
        start_step=start_step,
        group=process_group or ddp_model.process_group,
        seed=seed,
        collective=collective,
        grad_scaler=grad_scaler,
        together=together,
        small_codec=small_codec,
    )


def _codec_like(chosen: Compression, spec: str | Codec | Compression | DGC | PowerSGD, name: str) -> Codec:
    """What part of a model may have where the whole model has ``chosen``: another codec of that kind."""
    layer = compression(spec)
    same_codec = type(layer.codec) is type(chosen.codec)
    same_feedback = layer.feedback is None or type(layer.feedback) is type(chosen.feedback)
    if isinstance(layer.feedback, DGC):
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r}: momentum and warm-up are the model's, so name what is kept, as in "
            f"{str(layer.codec)!r}"
        )
    if not (same_codec and same_feedback):
        raise ValueError(f"{name!r} cannot have {str(layer)!r} in a model that has {str(chosen)!r}")
    return layer.codec


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


@dataclass(frozen=True, eq=False)
class _Parameter:
    """What the hook needs to know of a parameter."""

    name: str
    index: int
    shape: torch.Size
    codec: Codec | None  # None: travels dense
    dense_at: int  # where, among the dense parameters of its dtype


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
        collective: str,
        grad_scaler: torch.amp.GradScaler | None,
        together: bool,
        small_codec: Codec | None,
    ) -> None:
        self.compression = chosen
        self._together = together
        self._small_codec = small_codec
        self._start_step = start_step
        self._seed = seed
        self._collective = collective
        self._grad_scaler = grad_scaler
        self._loss_scale: float | None = None
        self._paused = False
        self._feedback = chosen.new_feedback()
        #: The feedback, if momentum is its business: it then has to hear of everything that is averaged.
        self._method = self._feedback if isinstance(self._feedback, DGC) else None
        self._epoch: int | None = None
        self._layers: dict[str, Codec] = {}  # those that differ from the rest
        self._step = 0
        self._current: _Step | None = None  # the step whose buckets are coming in
        self._open_step: _Step | None = None  # the step that the engine works on
        self._said_sparse = self._said_rank = False
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        self._total, self._last = StepStats(), StepStats()

        self._dense_numel: dict[torch.dtype, int] = {}
        self._parameters = self._classify(model, min_numel)
        device = next(iter(self._parameters)).device if self._parameters else torch.device("cpu")
        # A group of our own: DDP's other collectives (buffers, unused parameters) come from other threads, and must
        # not slip between ours.
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(
            ranks, backend=dist.get_backend(group), timeout=_timeout_of(group, device), use_local_synchronization=True
        )
        self._peers = Peers(own, dist.get_rank(own), len(ranks))
        self._kind = self._choose()
        if self._kind == "scatter_reduce" and device.type == "cpu" and dist.get_backend(own) == "gloo":
            pairs = Worker("narrowband-pairs")
            weakref.finalize(self, pairs.close)
            self._peers = replace(self._peers, pairs=pairs)
        self._agree(min_numel, device)
        self._check_ranks()
        self._warm_up(device)

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

    def set_layers(self, specs: Mapping[str, str | Codec | Compression | DGC | PowerSGD]) -> None:
        """Compress some layers more or less than the rest, from the next step on. Call on all ranks, between steps.

        What is owed stays, and so do warm-started factors: a smaller rank leaves columns out, a larger one draws new
        ones.

        Args:
            specs: parameter name → spec, which may differ from the model's in what its codec keeps: another density,
                bits or rank. The feedback is the model's and can be left out; with ``dgc`` it has to be, as in
                ``"topk:density=0.01"``, and no layer sends less than the rest does while that warms up. A later call
                adds to an earlier one.

        Raises:
            ValueError: a name that is not compressed, or a spec of another kind.

        Example:
            >>> handle = nb.compress_gradients(model, "powersgd:rank=4")
            >>> handle.set_layers({"head.weight": "powersgd:rank=1"})
        """
        self._check_between_steps("set_layers")
        compressed = {p.name for p in self._parameters.values() if p.codec is not None}
        unknown = sorted(specs.keys() - compressed)
        if unknown:
            raise ValueError(
                f"{unknown} are no parameters that this handle compresses; there are: {sorted(compressed)}"
            )
        self._layers |= {name: _codec_like(self.compression, spec, name) for name, spec in specs.items()}
        self._check_ranks()

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
            "layers": {name: str(layer) for name, layer in self._layers.items()},
            "seed": self._seed,
            "loss_scale": self._loss_scale,
            "rank": self._peers.rank,
            "world_size": self._peers.size,
            "owed": self._feedback.state_dict() if self._feedback else {},
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Args:
            state: this rank's own state; or, when the number of ranks has changed, a list with the states of all the
                ranks there were. What they owed to the average is then shared evenly among the ranks there are, its
                sum kept.

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
            owed = dict(first["owed"])
        else:
            owed = self._shared_out(states)
        if owed and self._feedback is None:
            raise ValueError(
                f"the state was saved with {first['spec']!r} and holds what was still owed; {str(self.compression)!r} "
                "has no feedback that could send it. Use a spec with a feedback, or clear state['owed'] to drop it"
            )
        self._check_fits(owed)
        if self._feedback is not None:
            device = next(iter(self._parameters)).device
            self._feedback.load_state_dict({name: residual.to(device) for name, residual in owed.items()})
        self._step, self._epoch = first["step"], first["epoch"]
        self._layers = {}
        self.set_layers(first["layers"])
        self._seed = first["seed"]
        self._loss_scale = first["loss_scale"]
        self._total, self._last = StepStats(), StepStats()

    def _check_fits(self, owed: Mapping[str, Tensor]) -> None:
        """Raise ValueError where a state has a size that no state of this model can have."""
        numel = {p.name: p.shape.numel() for p in self._parameters.values()}
        compressed = {p.name for p in self._parameters.values() if p.codec is not None}
        if self._together:
            together = {f"({dtype})": n for dtype, n in self._dense_numel.items() if dtype in _COMPRESSIBLE}
            numel |= together
            compressed |= together.keys()
        for key, value in owed.items():
            room, _, name = key.rpartition("/")
            here = numel.get(name, 0) if (name in compressed) != (room == "dense") else 0
            if room == "factor":
                fits = here > 0 and value.dim() == 2 and here % value.shape[1] == 0
            else:
                fits = here == value.numel()
            if not fits:
                raise ValueError(
                    f"the state holds {value.numel()} elements for {key!r}, of which this model compresses {here}; "
                    "it is the state of another model, or was saved with another min_numel"
                )

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _classify(self, model: DistributedDataParallel, min_numel: int) -> dict[Tensor, _Parameter]:
        norms = {id(p) for m in model.module.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}
        found: dict[Tensor, _Parameter] = {}
        odd: list[str] = []
        for index, (name, p) in enumerate(model.module.named_parameters()):
            if not p.requires_grad:
                continue
            if p.dtype not in _COMPRESSIBLE:
                odd.append(f"{name} ({p.dtype})")
            small = p.dim() < 2 or p.numel() < min_numel or id(p) in norms
            codec = None if small or p.dtype not in _COMPRESSIBLE else self.compression.codec
            at = self._dense_numel.get(p.dtype, 0)
            if codec is None:
                self._dense_numel[p.dtype] = at + p.numel()
            found[p] = _Parameter(name, index, p.shape, codec, at)
        if odd:
            log.warning(
                "these gradients travel uncompressed, codecs take float32, float16 and bfloat16: %s", ", ".join(odd)
            )
        if not any(p.codec for p in found.values()):
            log.warning(
                "nothing to compress: no parameter has 2 dimensions and at least min_numel=%d elements", min_numel
            )
        return found

    def _check_ranks(self) -> None:
        """Make room for what low rank will owe, and say where a rank is more than a matrix has."""
        method = self._feedback
        if not isinstance(method, PowerSGD):
            return
        rooms: list[tuple[str, int, int, torch.device]] = []
        cut: list[str] = []
        for parameter, known in reversed(self._parameters.items()):  # about the order in which gradients come
            if known.codec is None:
                continue
            codec = cast("LowRank", self._codec_of(known.name, self.compression.codec))
            n, m, r = method.factors(codec, known.shape)
            if r and method.owed(known.name) is None:
                rooms.append((known.name, n, m, parameter.device))
            if codec.rank > min(n, m):
                cut.append(f"{known.name} ({n} × {m}: {f'rank {r}' if r else 'averaged as it is'})")
        method.prepare(rooms)
        if cut and not self._said_rank:
            self._said_rank = True
            log.warning("powersgd: rank %d is more than these matrices have: %s", method.rank, ", ".join(cut))

    def _codec_of(self, name: str, usual: Codec) -> Codec:
        """What a layer is compressed with where the rest has ``usual``."""
        return self._own_codec(self._layers.get(name), usual)

    def _own_codec(self, own: Codec | None, usual: Codec) -> Codec:
        if own is None:
            return usual
        if self._method is None:
            return own
        return self._method.codec_of_layer(cast("TopK", own), cast("TopK", usual))

    def _choose(self) -> Way:
        """The collective, once for the whole model: chosen by the bucket, it would make the result depend on buckets.

        Says so when more would be sent than without compression.
        """
        codec, size = self.compression.codec, self._peers.size
        items = [(p.numel() * p.element_size(), q) for p, q in self._parameters.items() if q.codec is not None]
        if isinstance(self._feedback, PowerSGD):
            return "lowrank"  # what it would not shorten it does not factor
        nbytes = sum(codec.payload_nbytes(q.shape) for _, q in items)
        kind = choose(codec, nbytes, size) if self._collective == "auto" else cast("Collective", self._collective)
        if size == 1 or not items or not codec.fixed_size:
            return kind
        sent = (size - 1) * nbytes if kind == "gather" else allreduce_nbytes(nbytes, size)
        plain = allreduce_nbytes(sum(raw for raw, _ in items), size)
        if sent > plain:
            log.warning(
                "%s among %d ranks sends %.1f MB per step and rank where no compression sends %.1f MB: do not "
                "compress, or keep less",
                self.compression, size, sent / 1e6, plain / 1e6,
            )  # fmt: skip
        return kind

    def _agree(self, min_numel: int, device: torch.device) -> None:
        """Ranks that were set up differently would hang, or decode nonsense; find out now."""
        what: list[Any] = [str(self.compression), min_numel, self._start_step, self._seed, self._collective]
        what.append("with a scaler" if self._grad_scaler is not None else "no scaler")
        what.append("dense" if not self._together else str(self._small_codec or "together"))
        what += [(p.name, tuple(p.shape), p.codec is None) for p in self._parameters.values()]
        mine = torch.frombuffer(bytearray(hashlib.sha256(repr(what).encode()).digest()), dtype=torch.uint8).to(device)
        all_of_them = torch.empty(self._peers.size, mine.numel(), dtype=torch.uint8, device=device)
        all_gather_single(all_of_them.view(-1), mine, group=self._peers.group)
        others = [r for r in range(self._peers.size) if not torch.equal(all_of_them[r], mine)]
        if others:
            raise ValueError(
                f"ranks disagree: rank {self._peers.rank} compresses with {what[:7]}, and rank(s) {others} differ in "
                "that or in the model's parameters"
            )

    def _warm_up(self, device: torch.device) -> None:
        """Compile the loops now, on one rank first, so that the others find them in the cache."""
        for turn in (True, False):
            if turn == (self._peers.rank == 0):
                for side in _WARM_UP_SIDES:
                    self._use_once(torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(device))
            dist.barrier(self._peers.group)

    def _use_once(self, x: Tensor) -> None:
        """All that a step does with a tensor, but for sending it."""
        codec, feedback = self.compression.codec, self.compression.new_feedback()
        kernels.all_zero(x.view(-1))
        kernels.all_finite(x.view(-1))
        if isinstance(feedback, PowerSGD):
            item = Item("", x.flatten(), x.shape, codec, None, lambda _: 0)
            work = LowRankReduce([item], Peers(None, 0, 1), False, feedback)
            work.encode()
            for _ in work.job():
                pass
            work.deliver(good=True)
            kernels.low_rank_product(item.x, *(torch.zeros(1, side) for side in x.shape))
            return
        if isinstance(feedback, Feedback):
            for absorb in {False, feedback.can_roll_back(x)}:
                total = x.flatten()
                payload = feedback.encode("", total, codec, shape=x.shape, seed=0, absorb=absorb)[1]
                if not absorb:
                    feedback.absorb("", total, codec, payload, shape=x.shape, seed=0)
        payload, out = codec.encode(x), torch.zeros_like(x)
        codec.decode(payload, out, weight=0.5, accumulate=True)
        codec.decode_mean(payload[None] if codec.fixed_size else [payload], out, seeds=[0])

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
            step = _Step(self, codec if compressing else Identity(), compressing=compressing)
            self._current = self._open_step = step
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        last = bucket.is_last()
        if last:
            # The next call belongs to the next step, even if this one is still on the wire.
            step.closed_at = time.perf_counter()
            self._current = None
        step.futures.append(future)
        self._engine.post(lambda: step.add(buffer, parameters, future, last=last))
        return future

    def _scale_changed(self) -> None:
        """Bring what is owed to the unit of this step's gradients."""
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return
        scale = self._grad_scaler.get_scale()
        if self._loss_scale is not None and self._loss_scale != scale and self._feedback is not None:
            self._feedback.scale(scale / self._loss_scale)
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

    def _shared_out(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The sum of (what each rank owed / number of ranks) is what the average still lacks; keep it."""
        size = states[0]["world_size"]
        if sorted(s["rank"] for s in states) != list(range(size)):
            raise ValueError(
                f"the states were saved by {size} ranks, but these are of ranks {[s['rank'] for s in states]}; "
                "pass all, once"
            )
        total: dict[str, Tensor] = {}
        for state in sorted(states, key=lambda s: int(s["rank"])):
            for name, residual in state["owed"].items():
                total[name] = total[name] + residual if name in total else residual.clone()
        return {name: residual / size for name, residual in total.items()}


class _Step:
    """One backward pass: its exchanges, its dense remainder, and the decision whether it counts. On the engine's
    thread.
    """

    def __init__(self, handle: GradientCompression, codec: Codec, *, compressing: bool) -> None:
        self.handle = handle
        self.codec = codec
        self.compressing = compressing
        self._way: Way = handle._kind if compressing else "dense"
        self._held: list[tuple[Tensor, Sequence[Tensor]]] = []  # buckets that wait for the norm of all
        self._held_norm = 0.0
        self.futures: list[torch.futures.Future[Tensor]] = []
        self.closed_at = 0.0
        self._closed = False
        self._begun = False
        self._open_jobs = 0
        self._undecided_jobs = 0  # those that may still show that the step does not count
        self._encoded_finite = True
        self._flagged = handle._feedback is not None and compressing and self._way in ("gather", "lowrank")
        self._good: bool | None = None  # whether the step counts, once that is known
        self._exchanges: list[Exchange] = []
        self._gathering: LowRankReduce | None = None  # what has not enough to send yet
        self._arrived: list[Exchange] = []
        self._results: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._dense: dict[torch.dtype, Tensor] = {}
        self._dense_back: list[tuple[_Parameter, Tensor, Tensor]] = []
        self._together: set[torch.dtype] = set()  # of what travels as one vector, compressed
        self._dense_finite = True
        self._stats = StepStats(steps=1)
        self._wire_before = handle._engine.wire_seconds
        self._measure = compressing and (handle._total.relative_error is None or handle.step % MEASURE_EVERY == 0)
        #: Whether the engine broke in this step. The feedback is then again what it was before, unless ``torn``.
        self.abandoned = False
        #: Whether the engine broke between the decision that the step counts and its end.
        self.torn = False

    def add(
        self, buffer: Tensor, parameters: Sequence[Tensor], future: torch.futures.Future[Tensor], *, last: bool
    ) -> None:
        """A bucket is complete: start what it needs."""
        handle = self.handle
        if not self._begun:
            self._begun = True
            handle._scale_changed()
        self._results.append((future, buffer))
        method = handle._method
        if method is not None and math.isfinite(method.clip):
            self._held.append((buffer, parameters))
            self._held_norm = math.hypot(self._held_norm, _norm(buffer._values() if buffer.is_sparse else buffer))
            if last:
                self._clip(method.clip)
                held, self._held = self._held, []
                for at, (held_buffer, held_parameters) in enumerate(held):
                    self._exchange(held_buffer, held_parameters, last=at == len(held) - 1)
        else:
            self._exchange(buffer, parameters, last=last)

    def _clip(self, threshold: float) -> None:
        """Local gradient clipping: each rank's own gradient at its share of the threshold."""
        threshold /= math.sqrt(self.handle._peers.size)
        threshold *= self.handle._loss_scale or 1.0
        if threshold < self._held_norm < math.inf:
            for buffer, _ in self._held:
                buffer.mul_(threshold / self._held_norm)

    def _exchange(self, buffer: Tensor, parameters: Sequence[Tensor], *, last: bool) -> None:
        """Start what a bucket needs."""
        handle = self.handle
        size, method = handle._peers.size, handle._method
        work: Exchange | None = None
        if buffer.is_sparse:
            if method is not None and method.momentum:
                raise UnsupportedError(
                    "dgc keeps momentum for every element, and this gradient is sparse; use a dense gradient "
                    "(sparse=False), or dgc with momentum=0"
                )
            if not handle._said_sparse:
                handle._said_sparse = True
                log.warning("sparse gradients travel uncompressed")
            nbytes = buffer._nnz() * buffer.element_size()
            self._stats.raw_bytes += allreduce_nbytes(nbytes, size)
            self._start(self._all_reduce(buffer, allreduce_nbytes(nbytes, size), check=self.compressing))
        else:
            nbytes = buffer.numel() * buffer.element_size()
            self._stats.raw_bytes += allreduce_nbytes(nbytes, size)
            plain = isinstance(handle.compression.codec, Identity)  # loses nothing, so feedback has nothing to do
            known = buffer.dtype == parameters[0].dtype  # complex gradients come as pairs of real numbers
            if known and ((self.compressing and not plain) or method is not None):
                work = self._encode(buffer, parameters)
            else:
                self._start(self._all_reduce(buffer, allreduce_nbytes(nbytes, size), check=self.compressing))
        if self._gathering is not None:  # small buckets travel together
            enough = last or self._gathering.first_nbytes >= _ENOUGH_NBYTES
            work, self._gathering = (self._gathering, None) if enough else (None, self._gathering)
        if last:
            self._send_small()
        if work is not None:
            self._send(work)
        self._closed = last
        self._settle()

    def _encode(self, buffer: Tensor, parameters: Sequence[Tensor]) -> Exchange | None:
        handle = self.handle
        items: list[Item] = []
        at = 0
        for p in parameters:
            known = handle._parameters[p]
            part = buffer[at : at + p.numel()]
            at += p.numel()
            if known.codec is None:
                self._is_small(part, known)
            else:
                items.append(self._item(known.name, part, known.shape, self._codec_of(known.name), known.index))
        return self._encoded(items) if items else None

    def _item(self, name: str, x: Tensor, shape: Shape, codec: Codec, index: int) -> Item:
        feedback = self.handle._feedback
        return Item(name, x, shape, codec, feedback if isinstance(feedback, Feedback) else None, self._seeds(index))

    def _encoded(self, items: Sequence[Item]) -> Exchange:
        handle = self.handle
        work: Exchange
        if self._way != "lowrank":
            work = exchange(self._way, items, handle._peers, measure=self._measure)
        elif self._gathering is not None:
            work = self._gathering
            work.extend(items)
        else:
            assert isinstance(handle._feedback, PowerSGD)
            work = self._gathering = LowRankReduce(items, handle._peers, self._measure, handle._feedback)
        if work not in self._exchanges:
            self._exchanges.append(work)
        self._encoded_finite &= work.encode()
        return work

    def _codec_of(self, name: str) -> Codec:
        return self.handle._codec_of(name, self.codec) if self.compressing else self.codec

    def _send(self, work: Exchange) -> None:
        if self.handle._feedback is None:  # nothing to commit: write the averages as soon as they are here
            self._start(work.job(), lambda: work.deliver(good=True))
        else:
            decides = not (self._flagged and work.decided_by_encoding)
            self._start(work.job(), lambda: self._arrived.append(work), decides=decides)

    def _send_small(self) -> None:
        """What is small: one vector per dtype, averaged as it is or compressed. With it goes the news whether all that
        this rank has encoded is finite, if others wait for that.
        """
        handle = self.handle
        together = sorted(self._together, key=str)
        if together:
            number = len(handle._parameters)
            codec = handle._own_codec(handle._small_codec, self.codec) if self.compressing else self.codec
            work = self._encoded(
                [
                    self._item(f"({dtype})", flat, flat.shape, codec, number + at)
                    for at, (dtype, flat) in enumerate((dtype, self._dense[dtype]) for dtype in together)
                ]
            )
            work.flag(self._encoded_finite)
            if handle._feedback is None:
                self._start(work.job(), lambda: work.deliver(good=True))
            else:
                self._start(work.job(), lambda: self._arrived.append(work))
        elif self._flagged:
            if not self._dense:
                self._dense[torch.float32] = torch.zeros(1, device=self._results[0][1].device)
            for flat in self._dense.values():
                flat[-1] = 0.0 if self._encoded_finite else math.nan
        for dtype in sorted(self._dense.keys() - self._together, key=str):
            flat = self._dense[dtype]
            nbytes = allreduce_nbytes(flat.numel() * flat.element_size(), handle._peers.size)
            self._start(self._all_reduce(flat, nbytes, check=True))

    def _is_small(self, part: Tensor, known: _Parameter) -> None:
        flat = self._dense.get(part.dtype)
        if flat is None:
            together = self.handle._together and part.dtype in _COMPRESSIBLE
            if together:
                self._together.add(part.dtype)
            # Zero where a bucket did not come: all ranks have the same layout whatever the buckets.
            numel = self.handle._dense_numel[part.dtype] + (self._flagged and not together)
            flat = self._dense[part.dtype] = torch.zeros(numel, dtype=part.dtype, device=part.device)
        place = flat[known.dense_at : known.dense_at + part.numel()]
        place.copy_(part)
        self._dense_back.append((known, part, place))

    def _seeds(self, index: int) -> Callable[[int], int]:
        seed, step = self.handle._seed, self.handle.step
        # 64 bits of (seed, step, parameter, rank); the kernels' hash does the mixing.
        return lambda rank: (seed * 0x9E3779B97F4A7C15 + (step << 32) + (index << 12) + rank) & 0xFFFFFFFFFFFFFFFF

    def _all_reduce(self, x: Tensor, nbytes: int, *, check: bool = False) -> Job:
        """Average in place, uncompressed."""
        peers = self.handle._peers
        x.div_(peers.size)
        if peers.size > 1:
            self._stats.sent_bytes += nbytes
            yield Wire(lambda: dist.all_reduce(x, group=peers.group, async_op=True))
        if check and self.handle._feedback is not None:
            self._dense_finite &= bool((x._values() if x.is_sparse else x).isfinite().all())

    def _start(self, job: Job, then: Callable[[], None] | None = None, *, decides: bool = True) -> None:
        self._open_jobs += 1
        self._undecided_jobs += decides

        def done() -> None:
            if then is not None:
                then()
            self._open_jobs -= 1
            self._undecided_jobs -= decides
            self._settle()

        self.handle._engine.start(job, done)

    def _settle(self) -> None:
        """Deliver what can be delivered, and end the step when that was all."""
        if not self._closed or self._undecided_jobs or not self._results:
            return
        decided, good = self._good is not None, self._good
        if good is None:
            good = self._good = self._dense_finite and all(work.finite for work in self._exchanges)
        arrived, self._arrived = self._arrived, []
        for work in arrived:
            work.deliver(good)
        if not decided:  # what is small is here: it decides, too
            method = self.handle._method
            if method is not None and good:
                dense = [
                    (known.name, place) for known, _, place in self._dense_back if place.dtype not in self._together
                ]
                method.advance_dense(dense)
            for _, part, place in self._dense_back:
                part.copy_(place)
        if self._open_jobs:
            return
        self._account()
        results, self._results = self._results, []
        for future, buffer in results:
            future.set_result(buffer)

    def _account(self) -> None:
        stats = self._stats
        for work in self._exchanges:
            stats.sent_bytes += work.sent_nbytes
            stats.encode_s += work.encode_seconds
            stats.decode_s += work.decode_seconds
        stats.wire_s = self.handle._engine.wire_seconds - self._wire_before
        stats.waiting_s = time.perf_counter() - self.closed_at
        norms = [n for work in self._exchanges for n in work.norms]
        encoded = sum(n.encoded for n in norms)
        if norms and math.isfinite(encoded):
            stats.relative_error = sum(n.lost for n in norms) / encoded if encoded else 0.0
        self.handle._finished(stats)

    def abandon(self, error: BaseException) -> None:
        """The engine broke: put the feedback back, and let DDP hear why."""
        if not self.abandoned:
            for work in self._exchanges:
                work.abandon()
            self.abandoned = True
            self.torn = self._good is True
        for future in self.futures:
            if not future.done():
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]


def _norm(x: Tensor) -> float:
    """The norm, in float64 where float32 is too small for it."""
    norm = float(torch.linalg.vector_norm(x.float()))
    return norm if math.isfinite(norm) else math.sqrt(squared_norm(x))


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
