"""Error texts for models that :func:`~narrowband.compress_gradients` refuses: what the object is, and what to do."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel

from narrowband.averaging.who import ddp_of, ddps_in

__all__ = ["what_it_is"]


def what_it_is(model: object) -> str:
    """Describe an object that is no module, or a model that averages by itself, and say what to do instead.

    Returns:
        The end of an error message; empty if the model is fine.
    """
    if isinstance(model, DistributedDataParallel):
        return ""
    if isinstance(model, torch.nn.Module) and ddp_of(model) is not None:
        return (
            "the torch.compile wrapper of one. Pass the model inside, compress_gradients(model._orig_mod, …), and go "
            "on calling the compiled one; or compile first: DistributedDataParallel(torch.compile(model))"
        )
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if "FullyShardedDataParallel" in kinds:
        return (
            "a FullyShardedDataParallel model, FSDP1, which has flat parameters of its own. Shard with fully_shard "
            "(FSDP2) instead, among the ranks of a node"
        )
    if "ReplicateModule" in kinds or _is_replicated(model):
        return (
            "a model of replicate(), which averages by itself and has no communication hook of its own. Leave "
            "replicate() out: compress_gradients(model, …) averages a plain module"
        )
    if "CodedDataParallel" in kinds:
        return (
            "CodedDataParallel, which averages by packets of its own and leaves nothing to compress. Its bits=16 and "
            "bits=8 send fewer bytes"
        )
    if isinstance(model, torch.nn.DataParallel):
        return (
            "DataParallel, which is one process. Start one process per device with torchrun, and write: "
            "model = DistributedDataParallel(model)"
        )
    if isinstance(model, torch.nn.Module):
        found = ", ".join(f"model.{name}" for name in ddps_in(model))
        return (
            f"a module around DistributedDataParallel. Pass the DistributedDataParallel inside it: {found}"
            if found
            else ""
        )
    return f"{model.__name__}, a class" if isinstance(model, type) else type(model).__name__


def _is_replicated(model: object) -> bool:
    """Whether the composable ``replicate()`` of older PyTorch versions was applied to the model."""
    if not isinstance(model, torch.nn.Module):
        return False
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed._composable.replicate import replicate

        return replicate.state(model) is not None
    return False
