"""The tensors that are averaged: which are layers, each compressed by itself, and which are small."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from narrowband.averaging.flat import Form, form_of, local
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

__all__ = ["COMPRESSIBLE", "Parameter", "Parameters", "Vector", "norms_of", "refuse_unaveraged", "sparse_of"]

log = logging.getLogger(__name__)

#: What codecs take.
COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)

_NORMS = (
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
    torch.nn.modules.batchnorm._NormBase,
)


class Vector(NamedTuple):
    """Small parameters that travel end to end in one message.

    Which parameters make a vector depends on the model alone, and not on the groups in which gradients become ready. So
    a resumed run adds them up in the same order.

    Attributes:
        dtype: of all of them.
        compressed: whether they are compressed as one.
        early: whether it goes as soon as the last of them is there. Others go at the end of backward, and say in the
            same message whether all that was encoded is finite.
    """

    dtype: torch.dtype
    compressed: bool
    early: bool

    @property
    def key(self) -> str:
        """Names its feedback state."""
        return f"({self.dtype})"


@dataclass(frozen=True, eq=False)
class Parameter:
    """One tensor that is averaged.

    Attributes:
        name: in the model.
        index: among the model's parameters.
        shape: its own; of a sharded one that of this rank's part.
        form: how that lies in flat tensors.
        compressed: whether it is a layer; otherwise it is small.
        vector: that of the small parameters it travels with, if it is small.
        at: where it lies in that.
    """

    name: str
    index: int
    shape: torch.Size
    form: Form
    compressed: bool
    vector: Vector
    at: int


class Parameters:
    """All parameters that need a gradient.

    Args:
        named: name and tensor of each parameter of the model, in its order.
        norms: those that belong to normalization layers; they count as small.
        min_numel: parameters with fewer elements are small.
        fuse_small: whether small parameters are compressed as one vector.
        early_nbytes: from how many bytes on a vector of small parameters goes before backward ends.

    Attributes:
        by_tensor: tensor → parameter, in the model's order.
        by_name: name → parameter.
        vectors: how many elements each vector of small parameters has.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        norms: Collection[Tensor],
        *,
        min_numel: int,
        fuse_small: bool,
        early_nbytes: int,
    ) -> None:
        trained = [(index, name, p) for index, (name, p) in enumerate(named) if p.requires_grad]
        shapes = {p: local(p).shape for _, _, p in trained}
        ids = {id(p) for p in norms}
        small = {p for p, shape in shapes.items() if p.dim() < 2 or shape.numel() < min_numel or id(p) in ids}
        vector_of = _vectors(shapes, small, fuse_small, early_nbytes)
        self._min_numel = min_numel
        self.vectors: dict[Vector, int] = {}
        self.by_tensor: dict[Tensor, Parameter] = {}
        for index, name, p in trained:
            compressed = p not in small and p.dtype in COMPRESSIBLE
            vector = vector_of[p]
            at = self.vectors.get(vector, 0)
            if not compressed:
                self.vectors[vector] = at + shapes[p].numel()
            self.by_tensor[p] = Parameter(name, index, shapes[p], form_of(local(p)), compressed, vector, at)
        self.by_name = {parameter.name: parameter for parameter in self.by_tensor.values()}
        meshes = {getattr(p, "device_mesh", None) for p in self.by_tensor}
        self._meshes = meshes - {None} or meshes  # of shards, if there are any

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all layers, by name."""
        return {p.name: tuple(p.shape) for p in self.by_tensor.values() if p.compressed}

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.shape.numel() for parameter in self.by_tensor.values())

    @property
    def compressed_numel(self) -> int:
        """Elements of all layers."""
        return sum(parameter.shape.numel() for parameter in self.by_tensor.values() if parameter.compressed)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return next((p.device for p in self.by_tensor), torch.device("cpu"))

    def leave_uncompressed(self, names: Collection[str]) -> None:
        """Have these small tensors travel apart from those that are compressed as one vector.

        Args:
            names: of small tensors; what is no small tensor stays as it is.
        """
        self.vectors.clear()
        for x, own in self.by_tensor.items():
            if not own.compressed:
                apart = own.vector._replace(compressed=False, early=False)
                vector = apart if own.name in names else own.vector
                at = self.vectors.get(vector, 0)
                self.vectors[vector] = at + own.shape.numel()
                self.by_tensor[x] = self.by_name[own.name] = replace(own, vector=vector, at=at)

    def check_all_known(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """What requires a gradient now is what did so at set-up: nobody would average the rest.

        Args:
            named: name and tensor of each parameter that there is now. Whole ones of a model that is sharded do not
                count: FSDP2 puts them in the place of their shards while it computes.

        Raises:
            UnsupportedError: some of them were frozen then, or not there.
        """
        new = (name for name, p in named if p.requires_grad and p not in self.by_tensor and self._is_our_kind(p))
        refuse_unaveraged(new, "call remove() on all ranks, and set compression up again")

    def _is_our_kind(self, p: Tensor) -> bool:
        return getattr(p, "device_mesh", None) in self._meshes

    def warnings(self) -> list[str]:
        """What users should know about them."""
        odd = [
            f"{parameter.name} ({p.dtype})" for p, parameter in self.by_tensor.items() if p.dtype not in COMPRESSIBLE
        ]
        found = []
        if odd:
            found.append(
                f"these gradients travel uncompressed, codecs take float32, float16 and bfloat16: {', '.join(odd)}"
            )
        if not self.shapes and not any(vector.compressed for vector in self.vectors):
            found.append(
                "nothing to compress: no parameter in float32, float16 or bfloat16, norms aside, has two dimensions or "
                f"more and at least min_numel={self._min_numel} elements"
            )
        return found

    def learning_rates(self, optimizer: torch.optim.Optimizer, owners: Mapping[str, Tensor]) -> dict[str, float]:
        """Key of feedback state → learning rate. A vector of small parameters has that of the first of them.

        Args:
            owners: the optimizer's own tensor of a parameter, where that is not the one that is averaged.
        """
        by_tensor = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        default = float(optimizer.param_groups[0]["lr"])
        own = {parameter.name: owners.get(parameter.name, p) for p, parameter in self.by_tensor.items()}
        rates = {name: by_tensor.get(p, default) for name, p in own.items()}
        for parameter in reversed(self.by_tensor.values()):
            if not parameter.compressed:
                rates[parameter.vector.key] = rates[parameter.name]
        return rates


def _vectors(
    shapes: Mapping[Tensor, torch.Size], small: Collection[Tensor], fuse_small: bool, early_nbytes: int
) -> dict[Tensor, Vector]:
    """The vector of each parameter, if it is small.

    Gradients of a model's end come first in backward. The small parameters in its last two thirds go while backward is
    still busy with the rest, if they are worth a message of their own.
    """
    total, seen = sum(shape.numel() for shape in shapes.values()), 0
    found: dict[Tensor, Vector] = {}
    early: dict[torch.dtype, int] = {}
    for p, shape in shapes.items():
        compressed = fuse_small and p.dtype in COMPRESSIBLE
        found[p] = Vector(p.dtype, compressed, early=3 * seen >= total and not compressed)
        seen += shape.numel()
        if found[p].early and p in small:
            early[p.dtype] = early.get(p.dtype, 0) + shape.numel() * p.element_size()
    return {p: v._replace(early=v.early and early.get(p.dtype, 0) >= early_nbytes) for p, v in found.items()}


def refuse_unaveraged(names: Iterable[str], then: str) -> None:
    """Refuse to go on where a model has parameters that nobody averages.

    Args:
        names: of those, if there are any.
        then: what to do.

    Raises:
        UnsupportedError: there are some.
    """
    if found := list(names):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UnsupportedError(
            f"nothing averages {found[0]}{more}, which did not require a gradient when compression was set up, or did "
            f"not exist (load_state_dict(assign=True) makes all parameters anew); {then}"
        )


def norms_of(model: nn.Module) -> list[Tensor]:
    """The parameters of a model's normalization layers."""
    return [p for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(recurse=False)]


def sparse_of(model: nn.Module) -> set[Tensor]:
    """The parameters whose gradients are always sparse: of embeddings that say so, and of nothing else."""
    sparse: set[Tensor] = set()
    others: set[Tensor] = set()
    for module in model.modules():
        says_so = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        (sparse if says_so else others).update(module.parameters(recurse=False))
    return sparse - others
