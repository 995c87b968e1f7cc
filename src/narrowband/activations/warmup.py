"""Compiles the loops that packing and unpacking need, once at set-up, so that no forward pass waits for a compiler."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.modules import batchnorm, pooling

from narrowband import kernels
from narrowband.kernels import Rows, Windows
from narrowband.kernels.compiling import announced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from narrowband.activations.policy import ActivationPolicy

__all__ = ["warm_up"]

#: Model → the combinations of options that are warmed up, since every step may create a new context.
_done: weakref.WeakKeyDictionary[nn.Module, set[object]] = weakref.WeakKeyDictionary()

_MAX_POOLS = tuple(kind for name, kind in vars(pooling).items() if "MaxPool" in name and isinstance(kind, type))


def warm_up(model: nn.Module, policy: ActivationPolicy) -> None:
    """Compile or load every loop that a policy needs for a model; announce it if that takes time.

    There are loops for each number of bits and for float32 and bfloat16. The dtypes are those of the parameters, and of
    autocast where it is on. Loops for other dtypes, which are not known yet, are compiled at their first use.
    """
    if policy.is_off:
        return
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    named = {policy.bits, *policy.operators.values(), *policy.modules.values()}
    bits = sorted(each for each in named | {policy.bits_for("layer_norm", "")} if isinstance(each, int))
    what = (*bits, policy.rounding, policy.learns, cast)
    if what in _done.setdefault(model, set()):
        return
    parameters = list(model.parameters())
    if all(p.device.type == "cpu" for p in parameters):
        dtypes = {p.dtype for p in parameters if p.is_floating_point()} | ({cast} if cast is not None else set())
        kinds = {torch.bfloat16 if dtype == torch.bfloat16 else torch.float32 for dtype in dtypes or {torch.float32}}
        with announced(f"activations in {' and '.join(map(str, bits)) or 'few'} bits"):
            _use_once(model, policy, bits, sorted(kinds, key=str))
    _done[model].add(what)


def _use_once(
    model: nn.Module, policy: ActivationPolicy, bits: Sequence[Literal[8, 4, 2]], dtypes: Sequence[torch.dtype]
) -> None:
    shapes = [Rows(1, 8, 2, 16)]
    # This shape has a range for every channel. Kernels also read rows of a few elements so, where codes are bytes.
    if 8 in bits or any(isinstance(module, batchnorm._BatchNorm) for module in model.modules()):
        shapes.append(Rows(1, 8, 32, 1))
    stochastic, running = policy.rounding == "stochastic", policy.learns
    for dtype in dtypes:
        x = torch.arange(256, dtype=torch.float32, device="cpu").to(dtype)
        out, mask = torch.empty_like(x), torch.empty(x.numel() // 8, dtype=torch.uint8, device="cpu")
        for rows in shapes:
            low, high = kernels.row_extremes(x, rows)
            for width in bits:
                known = torch.stack((high - low, low))
                ranges = kernels.code_ranges(known, bits=width, symmetric=policy.symmetric, zeroed=True)
                codes = torch.empty(rows.nbytes(width), dtype=torch.uint8, device="cpu")
                kernels.quantize_rows(x, codes, rows, *ranges, bits=width, stochastic=stochastic)
                if running:
                    kernels.quantize_rows_learning(
                        x, codes, rows, known, policy.decay, bits=width, stochastic=stochastic,
                        symmetric=policy.symmetric,
                    )  # fmt: skip
                for result in (out, out.float()) if policy.derive else (out,):  # derived results are rounded last
                    kernels.dequantize_rows(codes, result, rows, ranges, bits=width)
        low, high = kernels.row_extremes(x, shapes[0])
        kernels.dwarfed_rows(x, shapes[0], (high - low)[None])
        if running:
            kernels.learn_ranges(torch.stack((high - low, low)), low, high, policy.decay)
        if {policy.bits_for("relu", ""), policy.bits_for("dropout", "")} != {"off"}:
            kernels.mask_between(x, mask)
            kernels.apply_mask(mask, x, out)
            # Dropout's factors are made in float32, whatever the dtype of its input.
            ones = torch.ones(256, dtype=torch.float32, device="cpu")
            kernels.apply_mask(mask, ones, ones)
    if any(isinstance(module, _MAX_POOLS) for module in model.modules()):
        windows = Windows(1, 2, 2, 1, 4, 2, (2, 2), (0, 0))
        places = torch.empty(4, dtype=torch.uint8, device="cpu")
        position = torch.tensor([0, 2, 8, 10], dtype=torch.int64, device="cpu")
        kernels.pool_places(position, places, windows)
        kernels.pool_positions(places, position, windows)
