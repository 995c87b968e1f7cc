"""Set-up of gradient compression: what users call, and which handle a model gets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowband.averaging.plans import plan_of_sharded
from narrowband.averaging.replicas import check_parts, check_replica
from narrowband.averaging.settings import EARLY_NBYTES, MESSAGE_NBYTES, Settings
from narrowband.averaging.who import averaged_by, shares_with
from narrowband.errors import UnsupportedError
from narrowband.gradients.ddp import DDPCompression
from narrowband.gradients.hook import hook_of
from narrowband.gradients.levels import TwoLevelCompression, levels_of
from narrowband.gradients.modules import ModuleCompression
from narrowband.gradients.refused import what_it_is

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.collectives import Collective
    from narrowband.feedback import Compression, Method
    from narrowband.gradients.handle import GradientCompression

__all__ = ["compress_gradients"]


def compress_gradients(
    model: nn.Module,
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    min_numel: int = 1024,
    warmup_steps: int = 0,
    process_group: dist.ProcessGroup | None = None,
    nodes: int | Literal["auto"] | DeviceMesh | None = None,
    seed: int = 0,
    collective: Collective | Literal["auto"] = "auto",
    grad_scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    small: str | Codec = "uncompressed",
    message_nbytes: int = MESSAGE_NBYTES,
    early_nbytes: int = EARLY_NBYTES,
) -> GradientCompression:
    """Average gradients over ranks, compressed. Call it on all ranks, once, before the first backward.

    Args:
        model: a model in DistributedDataParallel, whose averages are then compressed. Or a plain module, or one that
            the ranks of a node shard by ``fully_shard`` (FSDP2), with ``process_group`` for the ranks that hold the
            same shard on every node. Without DistributedDataParallel all ranks begin with the parameters and buffers of
            the first, later changes of buffers stay each rank's own, and a parameter without a gradient counts as a
            gradient of zeros. Convert the model to channels_last on all ranks, before it is wrapped and given here.
        spec: codec and feedback, such as ``"topk:density=0.01+ef"``, ``"qsgd:bits=4"`` or ``"none"``; or a plan that
            has one for every layer; or a policy such as :class:`~narrowband.LGreCo`, which plans while training runs.
        min_numel: parameters with fewer elements count as small, as do all biases and norms.
        small: what happens to small parameters: ``"uncompressed"``, they travel as they are; ``"fused"``, they make one
            vector of the whole model, compressed like any layer; or a codec for that vector that sends more of it, such
            as ``"topk:density=0.03"``. If 1 in 1,000 is sent of all else, small parameters are most of the bytes.
        warmup_steps: the first so many steps are averaged uncompressed; early gradients change fast.
        process_group: the ranks to average over; by default DistributedDataParallel's own, or all. Of a mesh of nodes ×
            shards, ``mesh["nodes"].get_group()``.
        nodes: for a model in DistributedDataParallel, if machines have several ranks each: the number of machines, with
            successive ranks on each; ``"auto"``, to count them by what torchrun says or by the names of hosts; or a
            mesh of nodes × ranks. Inside a machine gradients are then summed exactly, and each of its L ranks
            compresses and sends one of L parts (:mod:`narrowband.gradients.levels`). By default every rank is a node.
        seed: for stochastic rounding and sampling. Equal seeds, equal runs.
        collective: ``"auto"`` takes the one that sends least (see :mod:`narrowband.collectives.choice`).
        grad_scaler: the scaler of mixed-precision training, if there is one. The residual is in units of scaled
            gradients, and is rescaled when the scale changes.
        optimizer: the one that will step, to check that momentum is not applied twice (``dgc`` applies it before the
            wire).
        message_nbytes: payloads of several buckets are collected into one message until a rank has so many bytes to
            send.
        early_nbytes: if the small parameters at a model's end have at least so many bytes, they are sent before
            backward ends.

    If a parameter is replaced, added or thawed later, nobody would average it, so the next step is an error. So it is
    if the model is converted to another dtype. Call the handle's ``remove()`` before such a change, and this function
    again afterwards. An optimizer that steps inside backward, in a hook of a parameter, is an error, too.

    ``model.join()`` of DistributedDataParallel works: ranks that have run out of data send zeros, and keep their
    residuals (with ``ef21``, which has no residual, zero counts as their gradient). Its
    ``divide_by_initial_world_size=False`` is refused by the first backward.

    Returns:
        A handle: :meth:`~GradientCompression.stats`, :meth:`~GradientCompression.pause`,
        :meth:`~GradientCompression.state_dict` …

    Raises:
        TypeError: no module, or one that averages by itself; says what to do with what it is.
        ValueError: a spec, a number or a collective that does not exist, momentum in both places, or ranks that
            disagree.
        UnsupportedError: the model already has a hook, or does what no hook can follow; a process group with ranks of
            the same replica; or a spec that is not for gradients (``aq-sgd``).

    Example:
        >>> model = DistributedDataParallel(model)
        >>> handle = nb.compress_gradients(model, "topk:density=0.01+ef")
        >>> loss(model(x)).backward()  # averages arrive compressed
        >>> print(f"{handle.stats().total.ratio:.0f}x less traffic")
    """
    if averages := what_it_is(model):
        raise TypeError(f"compress_gradients takes a module that averages nothing by itself, not {averages}")
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
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        raise UnsupportedError(
            "this model's optimizer steps inside backward (_apply_optimizer_in_backward), before the averages arrive; "
            "step it after backward instead"
        )
    if shares_with(model):
        raise UnsupportedError(
            "gradients of this model are compressed already, by a handle of the module, of a part of it, or of what it "
            "is part of; keep that handle, or call its remove() first"
        )
    if isinstance(model, DistributedDataParallel):
        if small != "uncompressed" and model.find_unused_parameters:
            raise UnsupportedError(
                f"small={str(small)!r} cannot tell which parts of its vector had no gradient, which "
                "find_unused_parameters=True allows; use small='uncompressed'"
            )
        hook = hook_of(model)
        group = process_group or model.process_group
        parameters = averaged_by(model)
        settings = settings.with_optimizer(optimizer, parameters, warn=dist.get_rank(group) == 0)
        levels = None if nodes is None else levels_of(nodes, group, next(model.parameters()).device)
        if levels is None:
            return DDPCompression(model, hook, settings, group)
        _check_shards(model, "on two levels")
        return TwoLevelCompression(model, hook, settings, levels)
    if nodes is not None:
        raise UnsupportedError(
            "nodes= is for models in DistributedDataParallel; shard this one inside its nodes with fully_shard, and "
            "pass process_group= of the ranks that hold the same shard"
        )
    group = process_group or cast("dist.ProcessGroup", dist.group.WORLD)
    check_replica(model, group)
    if any(hasattr(p, "to_local") for p in model.parameters()):
        _check_shards(model, "of a sharded model")
        if settings.policy is not None:
            check_parts(model, "a policy chooses specs", min_numel=settings.min_numel)
        if settings.plan is not None:
            settings = replace(settings, plan=plan_of_sharded(settings.plan, model, settings))
    parameters = list(model.named_parameters())
    settings = settings.with_optimizer(optimizer, parameters, warn=dist.get_rank(group) == 0)
    return ModuleCompression(model, settings, group, _inside(model, settings))


def _check_shards(model: nn.Module, where: str) -> None:
    """What is averaged can be averaged shard by shard.

    Raises:
        UnsupportedError: some have no shards.
    """
    sparse = [name for name, each in model.named_modules() if getattr(each, "sparse", False)]
    if sparse:
        raise UnsupportedError(f"sparse gradients have no shards {where}: give {', '.join(sparse)} sparse=False")
    odd = [name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]
    if odd:
        raise UnsupportedError(f"complex parameters have no shards {where}: {', '.join(odd)}")


def _inside(model: nn.Module, settings: Settings) -> dist.ProcessGroup | None:
    """The ranks that shard a model together, where feedback has to know of all parts; None where it has not, or where
    they are not the same for all parameters.

    Raises:
        UnsupportedError: norms are wanted of whole gradients, and not all parameters are sharded among the same ranks.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    meshes = {name: getattr(p, "device_mesh", None) for name, p in trained.items()}
    found = [mesh for mesh in dict.fromkeys(meshes.values()) if mesh is not None]
    method = settings.compression.feedback
    if not found or method is None:
        return None
    odd = [name for name, mesh in meshes.items() if mesh is None or mesh != found[0]]
    if math.isfinite(method.clip) and (odd or found[0].ndim != 1):
        raise UnsupportedError(
            f"{method.name} with a clip needs the norm of a whole gradient, of which each rank of a node has one part: "
            f"shard all parameters among the same ranks; others are {', '.join(odd) or 'sharded in several dimensions'}"
        )
    group: dist.ProcessGroup | None = found[0].get_group() if len(found) == 1 and found[0].ndim == 1 else None
    return group
