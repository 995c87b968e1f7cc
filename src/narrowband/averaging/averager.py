"""Averages for loops of one's own: after backward, the gradients of all ranks become their mean, compressed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowband.averaging.flat import empty_like, groups_of, local, parts_of, real
from narrowband.averaging.handle import Handle
from narrowband.averaging.parameters import norms_of
from narrowband.averaging.settings import EARLY_NBYTES, MESSAGE_NBYTES, Settings

if TYPE_CHECKING:
    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.collectives import Collective
    from narrowband.feedback import Compression, Method

__all__ = ["Averager", "deliver", "end_to_end"]


class Averager(Handle):
    """Averages gradients over ranks when it is asked to, in a training loop without DistributedDataParallel.

    Make it on all ranks, from the same model with the same parameters: unlike DDP, it broadcasts nothing. With the same
    gradients, averages have the same bits as those of :func:`~narrowband.compress_gradients` under DDP, but for what
    depends on the layout of DDP's buckets: sums of an all-reduce among more than two ranks, the norm that ``dgc``
    clips, and batched products of PowerSGD without feedback.

    Args:
        tensors: a module, or (name, parameter) pairs, or a mapping of them, to be averaged. Only parameters that
            require gradients take part.
        spec: codec and feedback, such as ``"topk:density=0.01+ef"``; or a plan, or a policy.
        process_group: the ranks to average over; by default all.
        optimizer: the one that will step, to check that momentum is not applied twice.

    The other arguments are those of :func:`~narrowband.compress_gradients`.

    Raises:
        TypeError: something without named parameters.
        ValueError: a spec, a number or a collective that does not exist, nothing to average, momentum in both places,
            or ranks that disagree.
        UnsupportedError: no process group, or a combination that cannot work.

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
        group = process_group or cast("dist.ProcessGroup", dist.group.WORLD)
        settings = settings.with_optimizer(optimizer, pairs, warn=dist.get_rank(group) == 0)
        norms = norms_of(tensors) if isinstance(tensors, nn.Module) else []
        super().__init__(pairs, norms, settings, group, set_up="Averager", step="average")

    @torch.no_grad()
    def average(self) -> None:
        """Replace every gradient by its mean over ranks, and wait for that. Call on all ranks, after backward.

        A parameter without a gradient counts as a gradient of zeros, and then has the average, too: no rank knows
        whether another one has a gradient there.

        Raises:
            DisagreementError: ranks that are about to do different things.
            UnsupportedError: a sparse gradient where feedback needs one for every element.
            RuntimeError: the exchange broke off, or had done so at an earlier step. Gradients are then undefined.
        """
        self._check_between_steps("average")
        if self._engine.error is not None:
            raise RuntimeError(f"average: the exchange stopped at an earlier step: {self._engine.error}")
        groups = list(groups_of(self.layers.parameters.by_tensor, alone=_has_sparse_gradient))
        futures = []
        for at, parameters in enumerate(groups):
            names = [self.layers.parameters.by_tensor[p].name for p in parameters]
            futures.append(self.feed(end_to_end(parameters), names, last=at == len(groups) - 1))
        for parameters, future in zip(groups, futures, strict=True):
            deliver(future.wait(), parameters)


def _named(tensors: object) -> list[tuple[str, Tensor]]:
    """Name and tensor of each parameter.

    Raises:
        TypeError: there are none to be had.
        ValueError: nothing requires a gradient.
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
    if not any(p.requires_grad for _, p in found):
        raise ValueError("nothing to average: no parameter requires a gradient")
    return found


def _has_sparse_gradient(p: Tensor) -> bool:
    return p.grad is not None and p.grad.is_sparse


def end_to_end(parameters: Sequence[Tensor]) -> Tensor:
    """A copy of these parameters' gradients in one flat tensor; or the sparse one that there is."""
    gradients = [_gradient(p) for p in parameters]
    if gradients[0].is_sparse:
        return gradients[0]
    parts = [local(p) for p in parameters]
    flat = empty_like(parts)
    for gradient, part in zip(gradients, parts_of(flat, parts), strict=True):
        part.copy_(real(local(gradient)))
    return flat


def deliver(averages: Tensor, parameters: Sequence[Tensor]) -> None:
    """What was :func:`end_to_end` becomes the gradients."""
    if averages.is_sparse:
        parameters[0].grad = averages
        return
    for p, part in zip(parameters, parts_of(averages, [local(p) for p in parameters]), strict=True):
        real(local(_gradient(p))).copy_(part)


def _gradient(p: Tensor) -> Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad
