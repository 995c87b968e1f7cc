"""Compressed averages for custom training loops: a call after backward replaces gradients by their mean over ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowband.averaging.agreement import checked_on_all
from narrowband.averaging.flat import groups_of
from narrowband.averaging.gradient_group import GradientGroup, has_sparse_gradient, says_something
from narrowband.averaging.handle import Handle
from narrowband.averaging.listening import STEPS_WITHOUT_AVERAGE, Listener, ignore, listen, living
from narrowband.averaging.parameters import norms_of, rounded, sparse_of
from narrowband.averaging.replicas import check_once, check_outside_ddp, check_replica, differ, groups_of_replica
from narrowband.averaging.settings import EARLY_NBYTES, MESSAGE_NBYTES, Settings
from narrowband.averaging.waiting import Waiting
from narrowband.averaging.who import reshard
from narrowband.collectives import group_or, waiting_in
from narrowband.compiler import unseen

if TYPE_CHECKING:
    from narrowband.adapt import Plan, Policy
    from narrowband.averaging.agreement import Facts
    from narrowband.codecs import Codec
    from narrowband.collectives import Collective
    from narrowband.feedback import Compression, Method

__all__ = ["Averager"]


class Averager(Handle):
    """Averages gradients over ranks when :meth:`average` is called, in a training loop without DistributedDataParallel.

    Create it on all ranks, from the same model with the same parameters in the same memory format: unlike DDP, it
    broadcasts nothing. For the same gradients, the averages are those of :func:`~narrowband.compress_gradients` under
    DDP, bit for bit, except for what depends on the layout of DDP's buckets: sums of an all-reduce among more than two
    ranks, the norm by which ``dgc`` clips, and batched products of PowerSGD without feedback.

    Args:
        tensors: a module, or (name, parameter) pairs, or a mapping from names to parameters. Only parameters that
            require gradients are averaged.
        spec: codec and feedback, such as ``"topk:density=0.01+ef"``; or a plan, or a policy.
        process_group: the ranks to average over; by default all. For a sharded model (FSDP2): the ranks that hold the
            same shard of each replica.
        optimizer: the optimizer that will step, to check that momentum is applied once.

    The other arguments are those of :func:`~narrowband.compress_gradients`.

    A hook of ``register_post_accumulate_grad_hook`` runs in backward, so it sees this rank's own gradient.

    A log line says so once if an optimizer makes several steps with gradients that were not averaged, or if they are
    averaged after its step. So it does if ranks have different parameters at the first average.

    Where optimizers take turns, as those of a GAN, create an averager for each, and average with that of the optimizer
    that steps. If one averager serves all, residuals get back what averages took or left that no optimizer used. A log
    line says once that such averages are sent for nothing.

    Raises:
        TypeError: something without named parameters.
        ValueError: a spec, a number or a collective that does not exist; nothing to average; two parameters of one
            name; an optimizer of other parameters; momentum in both the optimizer and the spec, or in none; or ranks
            that disagree.
        UnsupportedError: no process group, one with ranks that hold parts of the same sharded parameters; a module
            whose gradients others average among the same ranks, such as a DistributedDataParallel; or a combination
            that cannot work.

    Example:
        >>> averager = nb.Averager(model, "qsgd:bits=4")
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     loss(model(x), y).backward()
        ...     averager.average()  # every .grad is the mean over ranks
        ...     optimizer.step()
    """

    def __init__(
        self,
        tensors: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        spec: str | Codec | Compression | Method | Plan | Policy,
        *,
        min_numel: int = 1024,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        collective: Collective | Literal["auto"] = "auto",
        grad_scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        small: str | Codec = "uncompressed",
        message_nbytes: int = MESSAGE_NBYTES,
        early_nbytes: int = EARLY_NBYTES,
    ) -> None:
        def prepared() -> tuple[list[tuple[str, Tensor]], Settings]:
            pairs = _named(tensors)
            settings = Settings.of(
                spec,
                min_numel=min_numel,
                warmup_steps=warmup_steps,
                seed=seed,
                collective=collective,
                small=small,
                message_nbytes=message_nbytes,
                early_nbytes=early_nbytes,
                grad_scaler=grad_scaler,
            )
            group = group_or(process_group)
            check_replica((p for _, p in pairs), group)
            if isinstance(tensors, nn.Module):
                check_outside_ddp(tensors, group)
                check_once(tensors, group, "compress_gradients", "CodedDataParallel")
            return pairs, settings.with_optimizer(optimizer, pairs, warn=dist.get_rank(group) == 0)

        if isinstance(tensors, nn.Module):
            reshard(tensors)
        groups = [*groups_of_replica(tensors), waiting_in(process_group)]
        pairs, settings = checked_on_all("Averager", groups, prepared)
        norms = norms_of(tensors) if isinstance(tensors, nn.Module) else []
        self._sparse = sparse_of(tensors) if isinstance(tensors, nn.Module) else set()
        self._module = weakref.ref(tensors) if isinstance(tensors, nn.Module) else None
        self._compared = False
        super().__init__(pairs, norms, settings, group_or(process_group), set_up="Averager", step="average")
        if warning := rounded(pairs):
            self.layers.warn_once(warning)
        if self.size > 1:
            instead = "create an Averager for each optimizer, and call that of the optimizer that steps"
            named = [(name, p) for name, p in pairs if p.requires_grad]
            scaled = grad_scaler is not None and grad_scaler.is_enabled()
            self._waiting = Waiting(self, named, old="assigned", scaled=scaled, instead=instead)
            self._forgotten = _Forgotten(self, self._waiting)
            _averagers[self] = None
            for listener in (self._forgotten, self._waiting):  # the first needs to know what the second then forgets
                listen(listener)
            if isinstance(tensors, nn.Module) and any(hasattr(p, "device_mesh") for _, p in named):
                _tell_of_backward(tensors, self._waiting)

    @torch.no_grad()
    def average(self) -> None:
        """Replace every gradient by its mean over ranks, and wait for that. Call on all ranks, after backward.

        A parameter without a gradient counts as a gradient of zeros and gets the average, too, because no rank knows
        whether another rank has a gradient there. A parameter that was frozen after set-up still gets none.

        Raises:
            DisagreementError: ranks are about to do different things; or some ranks lack a sparse gradient of a
                parameter that was passed without its module (only the module tells in advance that it is sparse).
            UnsupportedError: a sparse gradient where feedback needs one for every element; or a parameter that requires
                a gradient and did not, or did not exist, when the averager was created. (New parameters of a model are
                detected only if the module was passed, not its parameters.)
            RuntimeError: the exchange broke off, now or at an earlier step. Gradients are then undefined.
        """
        self._check_between_steps("average")
        if self._engine.error is not None:
            raise RuntimeError(f"average: the exchange stopped at an earlier step: {self._engine.error}")
        module = None if self._module is None else self._module()
        self.layers.parameters.check_all_known(self._parameters if module is None else module.named_parameters())
        by_tensor = self.layers.parameters.by_tensor
        if not self.step and all(p.grad is None for p in by_tensor):
            self.layers.warn_once(
                "average() found no gradient, so it has averaged nothing but zeros. Call it after backward(), before "
                "optimizer.step() and optimizer.zero_grad(). If this rank had no data, ignore this warning"
            )
        gradients = [p for p in by_tensor if p.grad is not None]
        if self._waiting is not None and gradients and all(map(self._waiting.is_used_up, gradients)):
            self.layers.warn_once(
                "average() was called with gradients that an optimizer has stepped with already. So steps use those "
                "that are not averaged, and replicas become different: call it between backward() and step(), on all "
                "ranks. If this rank had no data, ignore this warning"
            )
        if self._waiting is not None:
            self._waiting.begins()
        groups = [GradientGroup(some, by_tensor, self._sparse) for some in groups_of(by_tensor, alone=self._is_sparse)]
        futures = []
        for group in groups:
            buffer, absent = group.collect(self._waiting)
            futures.append(self.feed(buffer, group.names, last=group is groups[-1], absent=absent))
        for group, future in zip(groups, futures, strict=True):
            group.deliver(future.wait())
        if self._waiting is not None:
            self._forgotten.averaged()
            self._waiting.averaged([p for group in groups for p in group.left_out])
        if not self._compared:  # here and not at set-up, after which ranks may still load a checkpoint
            self._compared = True
            self._warn_of_other_parameters()

    def _warn_of_other_parameters(self) -> None:
        """Say so if ranks have different parameters: averages make the same change to all, so these remain different. A
        collective.
        """
        by_tensor = self.layers.parameters.by_tensor
        different = differ(by_tensor, self._peers)
        if names := [own.name for own, differs in zip(by_tensor.values(), different, strict=True) if differs]:
            named = ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
            self.layers.warn_once(
                f"ranks have different parameters: {named}. They get the same averages, so they stay different, and "
                "gradients are those of different models. Begin with the same seed or checkpoint on all ranks, or "
                "broadcast the parameters first: an Averager does not. If they are different on purpose, ignore this "
                "warning"
            )

    def _step_facts(self) -> Facts:
        """Return which gradients are sparse: a rank's sparse message must not meet another rank's dense one. And which
        parameters are frozen, since these do not get the averages of other ranks.
        """
        sparse = "sparse, which Averager knows beforehand if it is given the module,"
        by_tensor = self.layers.parameters.by_tensor
        gradients = {own.name: sparse for p, own in by_tensor.items() if self._is_sparse(p)}
        return {"gradient": gradients, "training": self.layers.parameters.frozen()}

    def _is_sparse(self, p: Tensor) -> bool:
        return p in self._sparse or has_sparse_gradient(p)


class _Forgotten(Listener):
    """Warns once if an optimizer steps several times in a row with gradients that nobody has averaged.

    It is no error: the loop may step a replica alone for a while, and average what that has changed.

    Args:
        averager: whose parameters count.
        waiting: knows which gradients an optimizer has stepped with before.
    """

    def __init__(self, averager: Averager, waiting: Waiting) -> None:
        self._averager, self._waiting = weakref.ref(averager), waiting
        #: How many such steps each optimizer has made in a row.
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._start = 0

    def averaged(self) -> None:
        """Note that gradients were averaged: the next step of each optimizer is one with averages."""
        self._steps.clear()
        self._start = -1

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step with gradients of the averager's parameters."""
        averager = self._averager()
        if averager is None or averager.removed:
            ignore(self)
            return
        if averager.paused or not any(p.grad is not None for p in self._waiting.of(optimizer)):
            return
        self._steps[optimizer] = steps = self._steps.get(optimizer, self._start) + 1
        if steps < STEPS_WITHOUT_AVERAGE:
            return
        if not any(says_something(p) for p in self._waiting.of(optimizer) if not self._waiting.is_used_up(p)):
            self._steps[optimizer] = 0  # zeros, or gradients of the step before: nothing new was left out
            return
        ignore(self)
        others = [each for each in living(_averagers) if each is not averager and not each.removed]
        if any(p in each.layers.parameters.by_tensor for each in others for p in self._waiting.of(optimizer)):
            return  # the other one may average for both
        averager.layers.warn_once(
            f"{type(optimizer).__name__} has made {steps} steps in a row with gradients that were not averaged, so "
            "replicas become different: call average() between backward() and step(), on all ranks. If these steps are "
            "local on purpose, ignore this warning"
        )


#: All that there are.
_averagers: weakref.WeakKeyDictionary[Averager, None] = weakref.WeakKeyDictionary()


def _named(tensors: object) -> list[tuple[str, Tensor]]:
    """Return name and tensor of each parameter.

    Raises:
        TypeError: the object has no named parameters.
        ValueError: nothing requires a gradient, or two parameters that do have the same name.
    """
    if isinstance(tensors, nn.Module):
        pairs: list[object] = list(tensors.named_parameters())
    elif isinstance(tensors, Mapping):
        pairs = list(tensors.items())
    elif isinstance(tensors, Iterable) and not isinstance(tensors, (str, Tensor)):
        pairs = list(tensors)
    else:
        pairs = [tensors]
    found: list[tuple[str, Tensor]] = []
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                f"Averager takes a module or its named parameters, not {type(pair).__name__}; pass the model, or "
                "model.named_parameters()"
            )
        found.append((pair[0], pair[1]))
    times = Counter(name for name, p in found if p.requires_grad)
    if not times:
        raise ValueError("nothing to average: no parameter requires a gradient")
    if twice := sorted(name for name, count in times.items() if count > 1):
        raise ValueError(
            f"several parameters have the same name: {', '.join(twice)}; put a prefix for each model before the names, "
            "as in [('first.' + name, p) for name, p in first.named_parameters()]"
        )
    return found


def _tell_of_backward(module: nn.Module, waiting: Waiting) -> None:
    """Tell what follows averages when a backward pass begins. Hooks of parameters do so elsewhere, but FSDP2 adds to
    the gradients of its shards without them.
    """
    own = weakref.ref(waiting)

    @unseen
    def begins(_: Tensor) -> None:
        if (alive := own()) is not None:
            alive.begins()

    @unseen
    def called(_: nn.Module, __: object, outputs: object) -> None:
        for x in torch.utils._pytree.tree_leaves(outputs) if own() is not None else ():
            if isinstance(x, Tensor) and x.grad_fn is not None:  # a leaf outlives the step, and would collect hooks
                x.register_hook(begins)  # type: ignore[no-untyped-call]

    module.register_forward_hook(called)
