"""Set up gradient compression: :func:`compress_gradients`, which chooses the handle for a model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowband.averaging.agreement import checked_on_all
from narrowband.averaging.core import is_in_backward
from narrowband.averaging.parameters import norms_of
from narrowband.averaging.plans import plan_of_sharded, plan_of_shards
from narrowband.averaging.replicas import check_once, check_parts, check_replica, groups_of_replica
from narrowband.averaging.settings import EARLY_NBYTES, MESSAGE_NBYTES, Settings
from narrowband.averaging.who import averaged_by, reshard, shares_with
from narrowband.collectives import group_or, waiting_in
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
    """Average gradients over ranks with compression. Call it once on all ranks, before the first backward.

    Only ``model`` and ``spec`` are needed to begin with. A later call, between two steps of all ranks, works as well:
    compression then begins with the next backward.

    Args:
        model: a model in DistributedDataParallel, whose all-reduce is then compressed. Or a plain module. Or a module
            that the ranks of a node shard with ``fully_shard`` (FSDP2); then ``process_group`` has the ranks that hold
            the same shard on every node. Without DistributedDataParallel, all ranks begin with the parameters and
            buffers of the first rank, later changes of buffers stay local to a rank, and a parameter without a gradient
            counts as a gradient of zeros. Convert the model to channels_last on all ranks before it is wrapped and
            passed here.
        spec: codec and feedback, such as ``"topk:density=0.01+ef"``, ``"qsgd:bits=4"`` or ``"none"``; or a plan, which
            has a spec for every layer; or a policy such as :class:`~narrowband.LGreCo`, which plans while training
            runs.
        min_numel: parameters with fewer elements count as small, as do all biases and norms.
        small: how to send small parameters. ``"uncompressed"`` sends them as they are. ``"fused"`` joins those of the
            whole model into one vector, which is compressed like a layer. A codec, such as ``"topk:density=0.03"`` or
            ``"fp16"``, compresses that vector in its own way, with the model's feedback if there is one. (Where layers
            send 1 element in 1,000, uncompressed small parameters are most of the bytes.) With ``dgc``, only ``topk``
            is allowed.
        warmup_steps: how many steps at the start are averaged uncompressed, since early gradients change fast.
        process_group: the ranks to average over; by default those of DistributedDataParallel, or all. For a mesh of
            nodes × shards: ``mesh["nodes"].get_group()``.
        nodes: for a model in DistributedDataParallel on machines with several ranks each: the number of machines, with
            successive ranks on each; or ``"auto"``, which tells them apart by torchrun's environment and host names; or
            a mesh of nodes × ranks. Inside a machine gradients are then summed exactly, and each of its L ranks
            compresses and sends 1/L of them (:mod:`narrowband.gradients.levels`). By default every rank is a node.
        seed: for stochastic rounding and sampling. Runs with equal seeds are equal.
        collective: by what operation payloads reach all ranks: ``"all_reduce"``, ``"all_gather"``,
            ``"scatter_reduce"`` or ``"sparse_reduce"`` (:mod:`narrowband.collectives.choice`). ``"auto"`` takes the one
            that sends least; name another one only to compare.
        grad_scaler: the gradient scaler of mixed-precision training, if there is one. Residuals are in units of scaled
            gradients, and are rescaled when the scale changes.
        optimizer: the optimizer that will step, to check that momentum is applied once (``dgc`` applies it before
            the wire).
        message_nbytes: payloads of several buckets are collected into one message until a rank has this many bytes to
            send; 131,072 by default.
        early_nbytes: the small parameters at the model's end are sent before backward ends if they have at least this
            many bytes; 32,768 by default.

    A parameter that is replaced, added or thawed later would not be averaged, so the next step raises an error. So does
    the next step after the model was converted to another dtype. Call the handle's ``remove()`` before such a change,
    and this function again afterwards.

    A hook that you register with ``register_post_accumulate_grad_hook`` sees this rank's own gradient (with FSDP2: the
    mean of the ranks that share the model), and what it leaves in ``.grad`` is averaged; averages are there when
    ``backward()`` has returned. So an optimizer that steps in such a hook is an error.

    ``model.join()`` of DistributedDataParallel works: ranks that have run out of data send zeros and keep their
    residuals (with ``ef21``, which has no residual, zero counts as their gradient). The first backward refuses its
    ``divide_by_initial_world_size=False``.

    Returns:
        A handle: :meth:`~GradientCompression.stats`, :meth:`~GradientCompression.pause`,
        :meth:`~GradientCompression.state_dict` …

    Raises:
        TypeError: no module, or one that averages by itself; the message says what to do instead.
        ValueError: a spec, a number or a collective that does not exist; an optimizer of another model; momentum in
            both the optimizer and the spec, or in none; or ranks that disagree.
        RuntimeError: called inside backward.
        UnsupportedError: the model already has a hook, or a handle of ``compress_updates`` with the same ranks, or
            works in a way that a hook cannot follow; a process group with ranks of the same replica; or a spec that is
            not for gradients (``aq-sgd``).

    Example:
        >>> model = DistributedDataParallel(model)
        >>> handle = nb.compress_gradients(model, "topk:density=0.01+ef")
        >>> loss(model(x)).backward()  # averages arrive compressed
        >>> print(f"{handle.stats().total.ratio:.0f}x less traffic")
    """

    def prepared() -> Settings:
        if is_in_backward():  # some buckets are on their way, and PyTorch would look for a hook's results in them
            raise RuntimeError(
                "compress_gradients was called inside backward, which has begun to average uncompressed; call it "
                "between two steps"
            )
        if averages := what_it_is(model):
            raise TypeError(
                "compress_gradients takes a model in DistributedDataParallel, or one that averages nothing by itself, "
                f"not {averages}"
            )
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
        return _prepared(model, settings, process_group, nodes, optimizer)

    if isinstance(model, DistributedDataParallel):
        groups: list[dist.ProcessGroup | None] = [model.process_group]
    else:
        if isinstance(model, nn.Module):
            reshard(model)
        groups = [*groups_of_replica(model), waiting_in(process_group)]
    settings = checked_on_all("compress_gradients", groups, prepared, {"nodes": str(nodes)})
    if not isinstance(model, DistributedDataParallel):
        return ModuleCompression(model, settings, group_or(process_group), _inside(model, settings))
    group = group_or(process_group, model.process_group)
    levels = None if nodes is None else levels_of(nodes, group, next(model.parameters()).device)
    if levels is None:
        return DDPCompression(model, hook_of(model), settings, group)
    return TwoLevelCompression(model, hook_of(model), settings, levels)


def _prepared(
    model: nn.Module,
    settings: Settings,
    process_group: dist.ProcessGroup | None,
    nodes: int | Literal["auto"] | DeviceMesh | None,
    optimizer: torch.optim.Optimizer | None,
) -> Settings:
    """Check a model, and return the settings for it. Nothing is changed, and no other rank is waited for.

    Raises:
        TypeError, ValueError, UnsupportedError: as in :func:`compress_gradients`.
    """
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        raise UnsupportedError(
            "this model's optimizer steps inside backward (_apply_optimizer_in_backward), before gradients are "
            "averaged; step the optimizer after backward instead"
        )
    if shares_with(model):
        raise UnsupportedError(
            "gradients of this model are compressed already: the model, a part of it, or a model around it has a "
            "handle; keep that handle, or call its remove() first"
        )
    if isinstance(model, DistributedDataParallel):
        check_once(model, group_or(process_group, model.process_group), "compress_updates", "CodedDataParallel")
        if settings.small != "uncompressed" and model.find_unused_parameters:
            raise UnsupportedError(
                f"small={str(settings.small)!r} does not work with find_unused_parameters=True, because a compressed "
                "vector does not show which parameters had no gradient; use small='uncompressed'"
            )
        hook_of(model)
        parameters = averaged_by(model)
        if nodes is not None:
            _check_shards(model, "as with nodes=")
            if settings.plan is not None:
                plan_of_shards(settings.plan, parameters, parameters, norms_of(model.module), settings)
        warn = dist.get_rank(group_or(process_group, model.process_group)) == 0
        return settings.with_optimizer(optimizer, parameters, warn=warn)
    if nodes is not None:
        raise UnsupportedError(
            "nodes= is for models in DistributedDataParallel; shard this model among the ranks of each node with "
            "fully_shard instead, and pass process_group= of the ranks that hold the same shard"
        )
    group = group_or(process_group)
    check_replica(model, group)
    check_once(model, group, "compress_updates", "CodedDataParallel")
    if any(hasattr(p, "to_local") for p in model.parameters()):
        _check_shards(model, "as in a sharded model")
        if settings.policy is not None:
            check_parts(model, "a policy chooses specs", min_numel=settings.min_numel)
        if settings.plan is not None:
            settings = replace(settings, plan=plan_of_sharded(settings.plan, model, settings))
    parameters = list(model.named_parameters())
    settings = settings.with_optimizer(optimizer, parameters, warn=dist.get_rank(group) == 0)
    _inside(model, settings)
    return settings


def _check_shards(model: nn.Module, where: str) -> None:
    """Check that all gradients can be averaged shard by shard.

    Raises:
        UnsupportedError: some are sparse or complex, which cannot be sharded.
    """
    sparse = [name for name, each in model.named_modules() if getattr(each, "sparse", False)]
    if sparse:
        raise UnsupportedError(
            f"sparse gradients cannot be averaged shard by shard, {where}: set sparse=False for {', '.join(sparse)}"
        )
    odd = [name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]
    if odd:
        raise UnsupportedError(
            f"gradients of complex parameters cannot be averaged shard by shard, {where}: {', '.join(odd)}"
        )


def _inside(model: nn.Module, settings: Settings) -> dist.ProcessGroup | None:
    """Return the ranks that shard a model together, which feedback needs in order to hear of all shards.

    None without shards or feedback, or if parameters are sharded over several meshes or in several dimensions.

    Raises:
        UnsupportedError: the feedback clips by the norm of whole gradients, and not all parameters are sharded among
            the same ranks.
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
            f"{method.name} with a clip needs the norm of whole gradients, but each rank of a node has only shards: "
            "shard all parameters among the same ranks, in one dimension; others are "
            f"{', '.join(odd) or 'sharded in several dimensions'}"
        )
    group: dist.ProcessGroup | None = found[0].get_group() if len(found) == 1 and found[0].ndim == 1 else None
    return group
