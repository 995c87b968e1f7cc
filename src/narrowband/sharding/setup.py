"""Set up compression inside FSDP2: :func:`compress_shards`, and its checks before anything is changed."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from narrowband import kernels
from narrowband.averaging.agreement import checked_on_all
from narrowband.averaging.parameters import norms_of, refuse_valueless
from narrowband.averaging.replicas import groups_of_replica
from narrowband.averaging.warmup import use_all
from narrowband.averaging.who import bare, reshard, units_of
from narrowband.codecs import Codec, SelectingCodec
from narrowband.errors import UnsupportedError
from narrowband.feedback import Compression, compression
from narrowband.kernels.compiling import announced
from narrowband.sharding.handle import ShardCompression
from narrowband.sharding.layout import layouts_of
from narrowband.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.fsdp import FSDPModule

    from narrowband.feedback import Method
    from narrowband.sharding.layout import Layout

__all__ = ["compress_shards"]

log = logging.getLogger(__name__)

#: Every module that ``fully_shard`` was called with → the handle that compresses what is sent of it.
_handles: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardCompression]] = weakref.WeakKeyDictionary()


def compress_shards(
    model: nn.Module,
    gradients: str | Codec | Compression | Method = "qsgd:bits=8",
    parameters: str | Codec | Compression | Method = "uniform:bits=8",
    *,
    references: bool = True,
    min_numel: int = 1024,
    seed: int = 0,
) -> ShardCompression:
    """Compress what FSDP2 sends between the ranks that share one model. Call it on all ranks, after ``fully_shard``.

    Use it for machines that shard a model over a slow link. (If every machine holds the whole model, or shards it among
    its own ranks, :func:`~narrowband.compress_gradients` sends far less.) Nothing else of the training loop changes.

    Args:
        model: the model that ``fully_shard`` was called with, after its modules, as usual.
        gradients: the codec for gradients, which are sent to the rank that has their shard, such as ``"qsgd:bits=8"``;
            ``"none"``: uncompressed. There is no feedback here: a residual would be as large as the whole model.
        parameters: the codec for parameters, which are sent to all ranks; ``"none"``: uncompressed.
        references: keep all parameters on every rank, as they were last sent, and send what has changed since.
            Gradients and the optimizer's state remain sharded. Nothing is sent if nothing has changed: before
            backward, in further micro-batches, for frozen parameters. ``False``: the parameters themselves are
            compressed each time that they are gathered, and nothing is kept; use 8 bits then.
        min_numel: parameters with fewer elements are sent uncompressed, as are biases and norms.
        seed: seed of stochastic rounding. Equal seeds give equal runs.

    All ranks compute with the same parameters, those that were decoded. The optimizer steps its exact shards. A hook of
    ``register_post_accumulate_grad_hook`` sees this rank's shard of the averaged gradient, as with FSDP2 alone.

    Returns:
        A handle: :meth:`~ShardCompression.stats`, :meth:`~ShardCompression.state_dict` …

    Raises:
        TypeError: ``fully_shard`` was not called with the model.
        ValueError: a spec that does not exist, or ranks that disagree.
        UnsupportedError: a spec with feedback, or a codec that cannot be used here; or a model that is not sharded
            among several ranks, or is on the meta device.

    Example:
        >>> model = fully_shard(model)  # doctest: +SKIP
        >>> handle = nb.compress_shards(model)  # doctest: +SKIP
        >>> print(f"{handle.stats().total.ratio:.1f}x less traffic")  # doctest: +SKIP
    """
    if isinstance(model, nn.Module):
        reshard(model)
    module, modules, chosen, seed = checked_on_all(
        "compress_shards",
        groups_of_replica(model),
        lambda: _prepared(model, gradients, parameters, min_numel, seed),
    )
    codecs = [codec for codec in chosen if codec is not None]
    units: list[Any] = units_of(module)
    failure = _warm_up(codecs, module)
    handle = ShardCompression(
        module,
        modules,
        *chosen,
        referenced=references,
        seed=seed,
        groups=groups_of_replica(module),
        failure=failure,
    )
    _handles.update((unit, weakref.ref(handle)) for unit in units)
    matrices = any(shard.compressed for _, layout in modules for shard in layout.shards)
    if codecs and not matrices and dist.get_rank(handle.process_group) == 0:
        log.warning(
            "nothing is compressed: apart from norms, no parameter in float32, float16 or bfloat16 has two dimensions "
            "or more and at least min_numel=%d elements",
            min_numel,
        )
    return handle


def _prepared(
    model: nn.Module,
    gradients: str | Codec | Compression | Method,
    parameters: str | Codec | Compression | Method,
    min_numel: int,
    seed: int,
) -> tuple[nn.Module, list[tuple[FSDPModule, Layout]], tuple[Codec | None, Codec | None], int]:
    """Check this rank's arguments. Nothing is changed, and no other rank is waited for.

    Returns:
        The model without the wrapper of ``torch.compile``; its sharded modules, each with its layout; the codecs of
        gradients and parameters; and the seed.

    Raises:
        TypeError, ValueError, UnsupportedError: as in :func:`compress_shards`.
    """
    chosen = _codec_of(gradients, "gradients"), _codec_of(parameters, "parameters")
    if chosen[1] is not None and chosen[1].lost_share >= 1:
        raise UnsupportedError(
            f"parameters={str(chosen[1])!r} is too coarse: its squared error is {chosen[1].lost_share:.2g} times the "
            "squared norm of the tensor, and must be below 1, or the parameters in forward and backward would drift "
            "away from those of the optimizer; use more bits"
        )
    module: object = bare(model)
    if not isinstance(module, nn.Module) or not units_of(module):
        raise TypeError(
            f"compress_shards takes a model that fully_shard (FSDP2) was called with, not a {type(module).__name__} "
            "that is not sharded; for DistributedDataParallel and plain modules use compress_gradients"
        )
    units: list[Any] = units_of(module)
    formers = [former() for unit in units if (former := _handles.get(unit)) is not None]
    if any(former is not None and not former.removed for former in formers):
        raise UnsupportedError(
            "this model, or a part of it, has a handle of compress_shards already; keep that handle, or call its "
            "remove() first"
        )
    refuse_valueless(module.named_parameters(), "compress_shards")
    modules = layouts_of(module, norms_of(module), min_numel)
    if not modules:
        raise UnsupportedError(
            "no parameter of this model is sharded among several ranks, so FSDP2 sends nothing that could be "
            "compressed; leave compress_shards out"
        )
    return module, modules, chosen, whole_number("seed", seed)


def _warm_up(codecs: Sequence[Codec], module: nn.Module) -> Exception | None:
    """Compile the kernels that a step needs, so that no step waits for the compiler.

    Returns:
        The error, if there was one. It must not be raised before the other ranks are told, since they wait.
    """
    try:
        with announced(" and ".join(dict.fromkeys(map(str, codecs)))):
            for device in {parameter.device for parameter in module.parameters()}:
                use_all(map(str, codecs), device)
                kernels.checksum(torch.zeros(4, dtype=torch.uint8, device=device))
    except Exception as error:
        return error
    return None


def _codec_of(spec: str | Codec | Compression | Method, what: str) -> Codec | None:
    """Return the codec of a spec; None if it compresses nothing.

    Raises:
        UnsupportedError: the spec cannot be used for shards.
    """
    chosen = compression(spec)
    if chosen.feedback is not None:
        raise UnsupportedError(
            f"{what}={str(chosen)!r}: compress_shards has no feedback, because a residual would be as large as the "
            "whole model on every rank; use a codec alone, such as 'qsgd:bits=8'"
        )
    codec = chosen.codec
    if codec.exact:
        return None
    if isinstance(codec, SelectingCodec) or not (codec.requantizes and codec.fixed_size) or codec.shared_seed:
        raise UnsupportedError(
            f"{what}={str(codec)!r} does not send every element, and without feedback the rest is lost; use one of "
            "qsgd, eden, uniform, fp16, bf16"
        )
    return codec
