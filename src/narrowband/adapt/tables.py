"""Tables of the size and error of every choice of compression for every layer.

Sizes are the bytes that a rank sends, see :mod:`~narrowband.adapt.traffic`. Errors are those of one encoding without
feedback, which L-GreCo limits by its budget. For two families, one computation gives the errors of all choices:

* **top-k**: sort the largest magnitudes; the squared error is what remains of the squared norm behind each k;
* **low rank**: compute the singular values (paper, appendix B.1), or approximate them by a few rounds of power
  iteration (B.2), whichever takes less work (B.3); the squared error is what remains behind each rank;
* everything else is encoded and decoded, choice by choice.

Shapes: L layers, C choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowband import kernels
from narrowband.adapt.traffic import Traffic
from narrowband.codecs.base import squared_norm
from narrowband.codecs.lowrank import next_start, start
from narrowband.feedback import Compression, compression

__all__ = ["POWER_STEPS", "ErrorTable", "error_table"]

#: Rounds of power iteration after which errors are within a few percent of the best (appendix B.2).
POWER_STEPS = 5


@dataclass(frozen=True, eq=False)
class ErrorTable:
    """Sizes and errors of every choice for every layer.

    Attributes:
        layers: names of the L layers.
        shapes: shapes of the L layers.
        choices: the C choices.
        sizes: (L, C), bytes that a rank sends for the layer per step, if all layers have that choice; inf where a layer
            cannot have it.
        errors: (L, C), L2 norms of the errors of one encoding.
        norms: (L,), L2 norms of the gradients.
    """

    layers: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    choices: tuple[Compression, ...]
    sizes: NDArray[np.float64]
    errors: NDArray[np.float64]
    norms: NDArray[np.float64]

    def column(self, choice: str | Compression) -> int:
        """Return the column of a choice.

        Raises:
            ValueError: the table does not have this choice.
        """
        wanted = str(compression(choice))
        for at, there in enumerate(self.choices):
            if str(there) == wanted:
                return at
        raise ValueError(f"{wanted!r} is not among the choices: {', '.join(map(str, self.choices))}")


#: The default number of ranks for sizes.
_AMONG_TWO = Traffic(2)


def error_table(
    gradients: Mapping[str, Tensor],
    choices: Sequence[str | Compression],
    *,
    traffic: Traffic = _AMONG_TWO,
    seed: int = 0,
) -> ErrorTable:
    """Compute sizes and errors of all choices for all layers.

    Args:
        gradients: layer name → gradient, or a sum of gradients, of any shape.
        choices: specs; their feedback does not affect errors.
        traffic: predicts sizes. The default is for two ranks, where a rank sends as many bytes as its payload has, by
            whatever collective.
        seed: seed of codecs that draw random numbers.

    Raises:
        ValueError: there are no choices or no gradients, a choice is given twice, or a gradient is not finite.

    Example:
        >>> table = error_table({"w": torch.randn(64, 64)}, ["topk:density=0.1+ef", "none"])
        >>> table.errors.shape
        (1, 2)
    """
    made = tuple(compression(choice) for choice in choices)
    names = [str(choice) for choice in made]
    if not made:
        raise ValueError("there are no choices")
    if not gradients:
        raise ValueError("no gradients were given, so there is no layer to choose for")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"these choices are given twice: {', '.join(twice)}")
    shapes = tuple(tuple(gradient.shape) for gradient in gradients.values())
    sizes = np.array([traffic.nbytes([(choice, shape) for shape in shapes]) for choice in made], dtype=np.float64).T
    errors = np.empty((len(gradients), len(made)))
    norms = np.empty(len(gradients))
    for row, (name, gradient) in enumerate(gradients.items()):
        x = gradient.detach().to(torch.float32).contiguous()
        norms[row] = math.sqrt(squared_norm(x))
        if not math.isfinite(norms[row]):
            raise ValueError(f"the gradient of {name!r} is not finite")
        errors[row] = np.sqrt(_squared_errors(x, made, norms[row] ** 2, seed))
    return ErrorTable(tuple(gradients), shapes, made, sizes, errors, norms)


def _squared_errors(x: Tensor, choices: Sequence[Compression], energy: float, seed: int) -> NDArray[np.float64]:
    found = np.full(len(choices), math.nan)
    if not energy:
        return np.zeros(len(choices))
    sparse: dict[int, int] = {}
    ranks: dict[int, int] = {}
    for at, choice in enumerate(choices):
        codec = choice.codec
        k, rank = codec.kept_largest(x.shape), choice.kept_rank(x.shape)
        if codec.exact:
            found[at] = 0.0
        elif k is not None:
            sparse[at] = k
        elif rank is not None:
            ranks[at] = rank
        else:
            found[at] = codec.squared_error(x, seed=seed)
    if sparse:
        found[list(sparse)] = _behind_k(x.view(-1), np.array(list(sparse.values())), energy)
    if ranks:
        found[list(ranks)] = _behind_rank(x, np.array(list(ranks.values())), energy, seed)
    return found


def _behind_k(x: Tensor, ks: NDArray[np.intp], energy: float) -> NDArray[np.float64]:
    """Return, for each k, what remains of the squared norm without the k largest elements."""
    most = int(ks.max())
    if most >= x.numel():
        squares = x.numpy(force=True).astype(np.float64) ** 2
    else:
        squares = x[kernels.select_topk(x, most).long()].numpy(force=True).astype(np.float64) ** 2
    squares[::-1].sort()
    # Add up from the smallest, so that small remainders keep their precision.
    behind = np.concatenate([np.cumsum(squares[::-1])[::-1], [0.0]])
    rest = 0.0 if most >= x.numel() else max(0.0, energy - behind[0])
    return behind[np.minimum(ks, x.numel())] + rest


def _behind_rank(x: Tensor, ranks: NDArray[np.intp], energy: float, seed: int) -> NDArray[np.float64]:
    """Return, for each r, what remains of the squared norm without the first r singular values; 0 where r is 0.

    r = 0 means that the matrix is not factored but sent as it is.
    """
    most = int(ranks.max())
    if not most:
        return np.zeros(len(ranks))
    matrix = x.reshape(x.shape[0], -1)
    n, m = matrix.shape
    small, large = min(n, m), max(n, m)
    by_singular_values = small * small * large + 10 * small**3
    by_power_iteration = 2 * POWER_STEPS * n * m * most
    if by_singular_values <= by_power_iteration:
        behind = _behind_singular_values(matrix)
    else:
        behind = _behind_power_iteration(matrix, most, energy, seed)
    return np.where(ranks > 0, behind[np.minimum(ranks, len(behind) - 1)], 0.0)


def _behind_singular_values(matrix: Tensor) -> NDArray[np.float64]:
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    gram = (wide.double() @ wide.double().T) if wide.shape[0] <= _DOUBLE else (wide @ wide.T).double()
    squares = torch.linalg.eigvalsh(gram).clamp(min=0.0).numpy(force=True)  # ascending
    return np.concatenate([[0.0], np.cumsum(squares)])[::-1]


def _behind_power_iteration(matrix: Tensor, rank: int, energy: float, seed: int) -> NDArray[np.float64]:
    q = start(matrix.shape[1], rank, seed, matrix.device)
    for _ in range(POWER_STEPS):
        p = kernels.orthonormalize((next_start(q) @ matrix.T)[None])[0]
        q = p @ matrix
    squares = torch.linalg.svdvals(q.double()).square().numpy(force=True)
    return np.maximum(energy - np.concatenate([[0.0], np.cumsum(squares)]), 0.0)


#: Gram matrices of up to this many rows are computed in float64.
_DOUBLE = 512
