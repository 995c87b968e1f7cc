"""Checks at the set-up of coded data parallelism: of the model, of the arguments, and that ranks agree."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import batchnorm, instancenorm

from narrowband.averaging.agreement import waiting_for_all
from narrowband.coded.fixed_point import EXPONENTS
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narrowband.transport import Transport

__all__ = [
    "NORMS",
    "check_agreement",
    "check_extra_state",
    "check_failures",
    "check_model",
    "no_batch_norm",
    "other_parameters",
]

log = logging.getLogger(__name__)

#: Normalization layers that compute statistics over several samples.
NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm)


def check_model(module: nn.Module) -> torch.device:
    """Return the device of the parameters. Raise UnsupportedError if the model cannot be trained this way."""
    for name, child in module.named_modules():
        if isinstance(child, NORMS) and child.training:
            if child.track_running_stats:
                raise UnsupportedError(no_batch_norm(name, child))
            log.warning(
                "%s is a %s, which normalizes each block of the mini-batch by itself", name, type(child).__name__
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise UnsupportedError(f"{name} has sparse gradients, which cannot be coded; use sparse=False")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise UnsupportedError("the model has no parameter that requires a gradient: there is nothing to average")
    odd = [name for name, p in trained.items() if p.is_complex()]
    if odd:
        raise UnsupportedError(
            f"only real gradients can be averaged, and these parameters are complex: {', '.join(odd)}"
        )
    devices = {p.device for p in trained.values()}
    if len(devices) > 1:
        raise UnsupportedError(f"the parameters must be on one device, not on {', '.join(sorted(map(str, devices)))}")
    return devices.pop()


def check_failures(
    max_failures: int, silence_timeout: float, rejoin_steps: int, redundancy: int, transport: str | Transport
) -> None:
    """Raise ValueError or UnsupportedError if the arguments about lost ranks cannot be combined."""
    if max_failures not in (0, 1):
        raise ValueError(f"max_failures={max_failures!r}; expected 0 or 1")
    if max_failures and redundancy < 2:
        raise ValueError(
            f"max_failures=1 needs redundancy=2 or more, not {redundancy}: a block that only one rank computes is "
            "lost with that rank"
        )
    if not 0 < silence_timeout < math.inf:
        raise ValueError(f"silence_timeout={silence_timeout!r}; expected seconds above 0")
    if rejoin_steps < 0:
        raise ValueError(f"rejoin_steps={rejoin_steps!r}; expected a number of steps, 0 or more")
    if not isinstance(transport, str) and transport.max_failures != max_failures:
        raise UnsupportedError(
            f"max_failures={max_failures}, but the transport, {transport.name}, has "
            f"max_failures={transport.max_failures}; use Multicast(group, silence_timeout=..., max_failures=1)"
        )


def no_batch_norm(name: str, child: nn.Module) -> str:
    """Return the error message for a norm over several samples."""
    return (
        f"{name} is a {type(child).__name__} in training mode. It would normalize each block of the mini-batch by "
        "itself, and its running averages would differ between ranks. SyncBatchNorm does not help: ranks compute "
        "different blocks at the same time. Use GroupNorm or LayerNorm, or freeze it with .eval()"
    )


def other_parameters(changed: Sequence[str]) -> str:
    """Return the error message for parameters that were frozen or thawed after set-up."""
    return (
        f"requires_grad of {', '.join(changed[:3])}{' …' if len(changed) > 3 else ''} has changed since the model was "
        "wrapped. After freezing or thawing parameters, wrap the model again on all ranks: "
        "CodedDataParallel(model.module, ...). Or leave requires_grad unchanged, and remove the parameters that should "
        "not be trained from the optimizer"
    )


def check_agreement(arguments: dict[str, Any], module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError if ranks have different arguments or models: they would hang, or decode wrong numbers, later."""
    mine: dict[str, Any] = dict(arguments)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            value = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            what = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
            digest = hashlib.blake2b(value.numpy().data, digest_size=8).hexdigest()
            mine[name] = f"{what}, values {digest}"
    everybody: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    with waiting_for_all("CodedDataParallel"):
        dist.all_gather_object(everybody, mine, group=group)
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        differs = [key for key in {**first, **theirs} if first.get(key, "none") != theirs.get(key, "none")]
        if differs:
            raise ValueError(
                f"ranks 0 and {rank} differ in {', '.join(differs[:3])}{' …' if len(differs) > 3 else ''}: "
                f"{first.get(differs[0], 'none')!r} and {theirs.get(differs[0], 'none')!r}. All ranks must start "
                "with the same arguments and the same model, to the bit: set the same seed before the model is "
                "created, or load the same checkpoint"
            )


def check_extra_state(state: object) -> None:
    """Raise ValueError unless ``state`` is a state that :meth:`CodedDataParallel.get_extra_state` returned, on any
    number of ranks.
    """
    wanted = {"step", "exponent", "limit", "assignment", "lengths"}
    if not isinstance(state, Mapping) or (lacking := wanted - state.keys()):
        what = f"lacks {', '.join(sorted(lacking))}" if isinstance(state, Mapping) else f"is {type(state).__name__}"
        raise ValueError(f"the state is not one of CodedDataParallel: it {what}")
    if not isinstance(state["assignment"], str):
        raise ValueError(f"assignment is {state['assignment']!r} in the state; expected a string")
    lengths = state["lengths"]
    if not isinstance(lengths, Mapping) or not all(type(x) is int and x > 0 for pair in lengths.items() for x in pair):
        raise ValueError(f"lengths is {lengths!r} in the state; expected a dict of numbers of rows to samples")
    ranges = {"step": (0, 1 << 62), "limit": (1, 1 << 31), "exponent": EXPONENTS}
    for name, (least, most) in ranges.items():
        if type(state[name]) is not int or not least <= state[name] <= most:
            raise ValueError(f"{name} is {state[name]!r} in the state; expected a whole number from {least} to {most}")
