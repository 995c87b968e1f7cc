"""Training of :mod:`reproduce.candidates` where every rank has an optimizer of its own, and what ranks send then.

*Updates*: each rank steps AdamW with its own gradient, and all parameters move along the mean of the updates that
arrive, as with ``nb.compress_updates`` (``outer="auto"``; here the length is measured on all elements).

*Momentum*, as in two papers:

* DeMo (Peng et al. 2024, arXiv 2411.19870, algorithm 1; the step along signs as in the authors' code). Every rank adds
  its gradient to a momentum that decays by 0.999. It takes the largest k coefficients of the discrete cosine transform
  of each chunk of 64 × 64 out of the momentum, and sends them. Parameters move along the sign of the mean.
* 0/1 Adam (Lu et al. 2022, arXiv 2202.06009, algorithm 1). Ranks send the sign of their momentum, with error feedback.
  Parameters move along the mean, divided by the root of a second moment that all ranks share. The second moment is
  updated from uncompressed gradients, at intervals that double after every κ updates. The paper's local steps are left
  out: they begin after tens of thousands of steps.

Shapes: R ranks, N elements of a tensor.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reproduce.candidates_senders import OfLibrary, Sender, Subject, sender

__all__ = ["BETAS", "WEIGHT_DECAY", "Stepping", "demo_coefficients", "stepping"]

BETAS, WEIGHT_DECAY = (0.9, 0.999), 0.01
_EPS = 1e-8
#: DeMo's decay of momentum, and the side of its chunks.
_DECAY, _CHUNK = 0.999, 64
#: Bits of a coefficient that DeMo sends: its value and its index in a chunk.
_COEFFICIENT = 32 + 12
#: Decay of the running sums of squares that the length is measured by, as in the library.
_KEEPS = 0.8


class Stepping(ABC):
    """A way to step parameters by the gradients of all ranks. Tensors that are not compressed are averaged exactly."""

    @abstractmethod
    def moves(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], rate: float, step: int
    ) -> dict[str, Tensor]:
        """Return what to add to each parameter, flat.

        Args:
            gradients: name → gradients of all ranks, (R, N).
            parameters: name → parameter before the step.
            rate: learning rate of this step.
            step: number of this step, from 0.
        """

    @abstractmethod
    def mean_nbytes(self, shapes: Sequence[torch.Size], steps: int) -> float:
        """Return the bytes that one rank sends per step for tensors of these shapes."""


class _Updates(Stepping):
    """AdamW on every rank. Moments are averaged over ranks once in ``moments`` steps; 0: never."""

    def __init__(self, own: Sender, compressed: frozenset[str], moments: int) -> None:
        self.sender, self.compressed, self.moments = own, compressed, moments
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.squares = self.of_mean = 0.0

    def moves(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], rate: float, step: int
    ) -> dict[str, Tensor]:
        updates = {}
        for name, g_RN in gradients.items():
            m_RN = self.first.setdefault(name, torch.zeros_like(g_RN)).lerp_(g_RN, 1 - BETAS[0])
            v_RN = self.second.setdefault(name, torch.zeros_like(g_RN)).lerp_(g_RN.square(), 1 - BETAS[1])
            if self.moments and (step + 1) % self.moments == 0:
                for moment in (m_RN, v_RN):
                    moment.copy_(moment.mean(0, keepdim=True).expand_as(moment))
            root = (v_RN / (1 - BETAS[1] ** (step + 1))).sqrt_().add_(_EPS)
            along = m_RN / (1 - BETAS[0] ** (step + 1)) / root
            updates[name] = along.add_(parameters[name].view(-1), alpha=WEIGHT_DECAY).mul_(-rate)
        length = self._length(updates)
        for name in sorted(updates):
            x_RN = updates[name]
            if name in self.compressed:
                updates[name] = self.sender.send(name, x_RN, parameters[name].shape, step)
            else:
                updates[name] = x_RN.mean(0)
        return {name: x.mul_(length) for name, x in updates.items()}

    def _length(self, updates: Mapping[str, Tensor]) -> float:
        """Return the factor by which to scale the mean of the updates: see :mod:`narrowband.updates.length`."""
        ranks = next(iter(updates.values())).shape[0]
        squares = math.fsum(float(x.square().sum()) for x in updates.values()) / ranks
        of_mean = math.fsum(float(x.mean(0).square().sum()) for x in updates.values())
        self.squares, self.of_mean = _KEEPS * self.squares + squares, _KEEPS * self.of_mean + of_mean
        return min(math.sqrt(ranks), max(1.0, math.sqrt(self.squares / self.of_mean))) if self.of_mean else 1.0

    def mean_nbytes(self, shapes: Sequence[torch.Size], steps: int) -> float:
        of_moments = 2 * 4 * sum(shape.numel() for shape in shapes) / self.moments if self.moments else 0.0
        return self.sender.mean_nbytes(shapes, steps) + of_moments


class _DeMo(Stepping):
    """DeMo, with ``kept`` coefficients of every chunk."""

    def __init__(self, compressed: frozenset[str], kept: int) -> None:
        self.compressed, self.kept = compressed, kept
        self.momentum: dict[str, Tensor] = {}

    def moves(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], rate: float, step: int
    ) -> dict[str, Tensor]:
        moves = {}
        for name, g_RN in gradients.items():
            p = parameters[name]
            if name in self.compressed:
                m_RN = self.momentum.setdefault(name, torch.zeros_like(g_RN)).mul_(_DECAY).add_(g_RN, alpha=rate)
                sent = torch.stack([demo_coefficients(m.view(p.shape), self.kept) for m in m_RN])
                m_RN.sub_(torch.stack([_cosines(chunks, p.shape, back=True).reshape(-1) for chunks in sent]))
                count = (sent != 0).sum(0).clamp_min(1)  # the mean of a coefficient is over the ranks that sent it
                mean = _cosines(sent.sum(0) / count, p.shape, back=True).reshape(-1)
            else:
                mean = g_RN.mean(0)
            moves[name] = mean.sign().add(p.view(-1), alpha=WEIGHT_DECAY).mul_(-rate)
        return moves

    def mean_nbytes(self, shapes: Sequence[torch.Size], steps: int) -> float:
        return sum(shape.numel() // math.prod(_sides(shape)) for shape in shapes) * self.kept * _COEFFICIENT / 8


def demo_coefficients(x: Tensor, kept: int) -> Tensor:
    """Return the discrete cosine transform of a matrix, chunk by chunk, with all but each chunk's largest set to zero.

    ``kept`` is the number of coefficients that stay in a chunk.
    """
    chunks = _cosines(x, x.shape, back=False)
    flat = chunks.reshape(-1, math.prod(chunks.shape[-2:]))
    at = flat.abs().topk(min(kept, flat.shape[1]), dim=1).indices
    return torch.zeros_like(flat).scatter_(1, at, flat.gather(1, at)).view_as(chunks)


def _cosines(x: Tensor, shape: torch.Size, *, back: bool) -> Tensor:
    """Transform a matrix to its chunks' coefficients (chunks down, chunks across, side, side), or back."""
    down, across = _sides(shape)
    rows, columns = _cosine_matrix(down), _cosine_matrix(across)
    if back:
        return (rows.T @ x @ columns).transpose(1, 2).reshape(shape)
    return rows @ x.view(shape[0] // down, down, shape[1] // across, across).transpose(1, 2) @ columns.T


def _sides(shape: torch.Size) -> tuple[int, int]:
    """Return the sides of a chunk: the largest divisors of the matrix's sides that are at most 64."""
    down, across = (max(side for side in range(1, _CHUNK + 1) if length % side == 0) for length in shape)
    return down, across


@functools.cache
def _cosine_matrix(size: int) -> Tensor:
    """Return the orthonormal matrix of the discrete cosine transform of type II."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (k + 0.5) * k[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


class _ZeroOneAdam(Stepping):
    """0/1 Adam; ``kappa``: number of updates of the second moment before the interval between them doubles."""

    def __init__(self, compressed: frozenset[str], ranks: int, seed: int, kappa: int) -> None:
        self.compressed, self.kappa = compressed, kappa
        own = sender(Subject("", "", "sign+ef"), ranks, seed, 0)
        assert isinstance(own, OfLibrary)
        self.sender = own
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def moves(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], rate: float, step: int
    ) -> dict[str, Tensor]:
        moves = {}
        whole = step in _second_moments(self.kappa, step + 1)
        for name in sorted(gradients):
            g_RN, p = gradients[name], parameters[name]
            m_N = self.first.setdefault(name, torch.zeros_like(g_RN[0]))
            v_N = self.second.setdefault(name, torch.zeros_like(g_RN[0]))
            if whole:
                v_N.lerp_(g_RN.mean(0).square(), 1 - BETAS[1])
            m_RN = m_N.expand_as(g_RN).lerp(g_RN, 1 - BETAS[0])
            if name in self.compressed:  # send momentum times rate: the residual then keeps its size when rates change
                m_N.copy_(self.sender.send(name, m_RN * rate, p.shape, step)).div_(rate)
            else:
                m_N.copy_(m_RN.mean(0))
            moves[name] = (m_N / v_N.sqrt().add_(_EPS)).add_(p.view(-1), alpha=WEIGHT_DECAY).mul_(-rate)
        return moves

    def mean_nbytes(self, shapes: Sequence[torch.Size], steps: int) -> float:
        whole = 4 * sum(shape.numel() for shape in shapes) * len(_second_moments(self.kappa, steps)) / steps
        return self.sender.mean_nbytes(shapes, steps) + whole


def _second_moments(kappa: int, steps: int) -> list[int]:
    """Return in which of the first ``steps`` steps the second moment is updated."""
    found, at, count = [], 0, 0
    while at < steps:
        found.append(at)
        at += 2 ** (count // kappa)
        count += 1
    return found


def stepping(subject: Subject, compressed: frozenset[str], ranks: int, seed: int, steps: int) -> Stepping:
    """Make the training of a row whose ranks have optimizers of their own."""
    name, _, given = subject.spec.partition(" of ")
    if name == "0/1 Adam":
        return _ZeroOneAdam(compressed, ranks, seed, int(given))
    if name == "DeMo":
        return _DeMo(compressed, int(given))
    return _Updates(sender(subject, ranks, seed, steps), compressed, subject.moments)
