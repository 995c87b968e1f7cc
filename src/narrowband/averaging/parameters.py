"""Divide the tensors that are averaged into layers, each compressed by itself, and small parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from narrowband.averaging.flat import Form, form_of, local
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

__all__ = [
    "COMPRESSIBLE",
    "Parameter",
    "Parameters",
    "Vector",
    "norms_of",
    "refuse_unaveraged",
    "refuse_valueless",
    "rounded",
    "sparse_of",
]

log = logging.getLogger(__name__)

#: The dtypes that codecs take.
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
        dtype: of all its parameters.
        compressed: whether the vector is compressed as one tensor.
        early: whether it is sent as soon as its last parameter has arrived. Other vectors are sent at the end of
            backward. Their message also carries the flag that all encoded tensors are finite.
    """

    dtype: torch.dtype
    compressed: bool
    early: bool

    @property
    def key(self) -> str:
        """The name of the vector in feedback states."""
        return f"({self.dtype})"


@dataclass(frozen=True, eq=False)
class Parameter:
    """One tensor that is averaged.

    Attributes:
        name: its name in the model.
        index: its index among the model's parameters.
        shape: its shape; of a sharded parameter, the shape of this rank's shard.
        form: its layout in flat tensors.
        compressed: whether it is a layer; otherwise it is small.
        vector: if it is small: the vector that it travels in.
        at: if it is small: where it begins in the vector, in elements.
    """

    name: str
    index: int
    shape: torch.Size
    form: Form
    compressed: bool
    vector: Vector
    at: int


class Parameters:
    """All parameters that require a gradient.

    Args:
        named: name and tensor of each parameter of the model, in its order.
        norms: the parameters that belong to normalization layers; they count as small.
        min_numel: parameters with fewer elements are small.
        fuse_small: whether small parameters are compressed as one vector.
        early_nbytes: vectors of small parameters with at least this many bytes may be sent before backward ends.

    Attributes:
        by_tensor: tensor → parameter, in the model's order.
        by_name: name → parameter.
        vectors: vector of small parameters → how many elements it has.
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
        self._meshes = meshes - {None} or meshes  # if some parameters are sharded, only their meshes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all layers, by name."""
        return {p.name: tuple(p.shape) for p in self.by_tensor.values() if p.compressed}

    @property
    def numel(self) -> int:
        """How many elements all parameters have."""
        return sum(parameter.shape.numel() for parameter in self.by_tensor.values())

    @property
    def compressed_numel(self) -> int:
        """How many elements all layers have."""
        return sum(parameter.shape.numel() for parameter in self.by_tensor.values() if parameter.compressed)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((p.device for p in self.by_tensor), torch.device("cpu"))

    def leave_uncompressed(self, names: Collection[str]) -> None:
        """Take small tensors out of the vector that is compressed, so that they travel uncompressed.

        Args:
            names: of small tensors; names of layers are ignored.
        """
        self.vectors.clear()
        for x, own in self.by_tensor.items():
            if not own.compressed:
                apart = own.vector._replace(compressed=False, early=False)
                vector = apart if own.name in names else own.vector
                at = self.vectors.get(vector, 0)
                self.vectors[vector] = at + own.shape.numel()
                self.by_tensor[x] = self.by_name[own.name] = replace(own, vector=vector, at=at)

    def frozen(self) -> dict[str, str]:
        """Return name → "frozen" of each parameter that was frozen after set-up, for ranks to compare."""
        return {own.name: "frozen" for p, own in self.by_tensor.items() if not p.requires_grad}

    def check_all_known(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Check that all parameters that require a gradient now did so at set-up: others would not be averaged.

        Args:
            named: name and tensor of each present parameter. If the model was sharded at set-up, unsharded parameters
                are ignored, because FSDP2 puts them in the place of their shards while it computes.

        Raises:
            UnsupportedError: some were frozen at set-up, or did not exist.
        """
        new = (name for name, p in named if p.requires_grad and p not in self.by_tensor and self._can_be_ours(p))
        refuse_unaveraged(new, "call remove() on all ranks, and set compression up again")

    def _can_be_ours(self, p: Tensor) -> bool:
        return None in self._meshes or getattr(p, "device_mesh", None) in self._meshes

    def warnings(self) -> list[str]:
        """Return warnings for users about parameters that are not compressed."""
        odd = [
            f"{parameter.name} ({p.dtype})" for p, parameter in self.by_tensor.items() if p.dtype not in COMPRESSIBLE
        ]
        found = []
        if not self.by_tensor:
            return ["nothing is averaged: no parameter requires a gradient"]
        if odd:
            found.append(
                f"these gradients are sent uncompressed, because codecs take float32, float16 and bfloat16 only: "
                f"{', '.join(odd)}"
            )
        if not self.shapes and not any(vector.compressed for vector in self.vectors):
            found.append(
                "nothing is compressed: apart from norms, no parameter in float32, float16 or bfloat16 has two "
                f"dimensions or more and at least min_numel={self._min_numel} elements"
            )
        return found

    def learning_rates(self, optimizer: torch.optim.Optimizer, owners: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the learning rate of each layer and vector, by its name in feedback states. A vector of small
        parameters has the rate of its first parameter.

        Args:
            optimizer: has the learning rates.
            owners: the optimizer's own tensor of a parameter, by name, if another tensor is averaged: its shard.
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
    """Return the vector that each parameter travels in if it is small.

    Backward computes the gradients of the model's end first. The small parameters in the model's last two thirds are
    sent while backward computes the rest, if they have enough bytes (``early_nbytes``) for a message of their own.
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
    """Raise an error if a model has parameters that are not averaged.

    Args:
        names: of these parameters; may be empty.
        then: what to do, for the error.

    Raises:
        UnsupportedError: there are such parameters.
    """
    if found := list(names):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UnsupportedError(
            f"gradients of {found[0]}{more} are not averaged: when compression was set up, these parameters did not "
            "exist or did not require a gradient (fully_shard and load_state_dict(assign=True) replace all "
            f"parameters); {then}"
        )


def refuse_valueless(named: Iterable[tuple[str, Tensor]], set_up: str) -> None:
    """Raise an error if parameters have no values yet.

    Args:
        named: name and tensor of each parameter.
        set_up: the function that the user called, for the error.

    Raises:
        UnsupportedError: some are on the meta device, or belong to lazy modules.
    """
    found = [name for name, p in named if is_lazy(p) or p.is_meta]
    if found:
        more = f" and {len(found) - 1} more have" if len(found) > 1 else " has"
        raise UnsupportedError(
            f"{found[0]}{more} no values yet (meta device, or a lazy module). Initialize the model before {set_up}: "
            "call to_empty() and set the parameters, or run a forward pass of lazy modules"
        )


def rounded(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a warning about parameters whose gradients have another dtype than they (``grad_dtype``), since gradients
    are averaged in the dtype of the parameter; an empty text if there are none.
    """
    found = [name for name, p in named if p.requires_grad and getattr(p, "grad_dtype", None) not in (None, p.dtype)]
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"gradients of {found[0]}{more} are rounded to the dtype of their parameters to be averaged"


def norms_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters of a model's normalization layers."""
    return [p for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(recurse=False)]


def sparse_of(model: nn.Module) -> set[Tensor]:
    """Return the parameters whose gradients are always sparse: those used only by embeddings with ``sparse=True``."""
    sparse: set[Tensor] = set()
    others: set[Tensor] = set()
    for module in model.modules():
        says_so = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        (sparse if says_so else others).update(module.parameters(recurse=False))
    return sparse - others
