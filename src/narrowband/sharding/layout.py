"""The layout of the flat tensors that FSDP2 sends.

FSDP2 sends the parameters of one module together. A rank's flat tensor holds its shards of these parameters, each
padded to the same size on all ranks, one after the other in the module's order. A :class:`Layout` says which elements
belong to matrices, which are compressed, and which to biases, norms and other small parameters, which are sent as they
are. FSDP2 documents neither order nor padding, so :meth:`Layout.check` compares a rank's own shards with what is about
to be sent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from narrowband.averaging.flat import local
from narrowband.averaging.parameters import COMPRESSIBLE
from narrowband.averaging.who import is_unit
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule

__all__ = ["Layout", "Shard", "layouts_of"]


class Shard(NamedTuple):
    """This rank's shard of one parameter.

    Attributes:
        name: name of the parameter.
        parameter: the sharded parameter, a DTensor.
        at: index of the shard's first element in the module's flat tensor.
        numel: number of elements of the shard, padding included.
        compressed: whether the shard is compressed.
    """

    name: str
    parameter: nn.Parameter
    at: int
    numel: int
    compressed: bool


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of the flat tensor that a rank sends for one module that FSDP2 shards.

    Attributes:
        module: name of the module.
        shards: the shards of its parameters, in the order in which they are sent.
        world_size: number of ranks among which parameters are sharded.
    """

    module: str
    shards: tuple[Shard, ...]
    world_size: int

    @property
    def numel(self) -> int:
        """Number of elements of this rank's shards, padding included."""
        return sum(shard.numel for shard in self.shards)

    def trained(self) -> Layout:
        """Return the layout of gradients: of the parameters that get any, those of one dtype after those of another."""
        found, at = [], 0
        trained = [shard for shard in self.shards if shard.parameter.requires_grad]
        if _sends_by_dtype():
            dtypes = list(dict.fromkeys(shard.parameter.grad_dtype for shard in self.shards))
            trained.sort(key=lambda shard: dtypes.index(shard.parameter.grad_dtype))
        for shard in trained:
            found.append(shard._replace(at=at))
            at += shard.numel
        return Layout(self.module, tuple(found), self.world_size)

    def spans(self) -> list[tuple[slice, bool]]:
        """Return where shards lie, and whether they are compressed. Adjacent shards of the same kind are merged."""
        found: list[tuple[slice, bool]] = []
        for shard in self.shards:
            span = slice(shard.at, shard.at + shard.numel)
            if found and found[-1][1] == shard.compressed:
                span = slice(found.pop()[0].start, span.stop)
            found.append((span, shard.compressed))
        return found

    def own(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield each shard with this rank's elements of it, flat, without padding."""
        for shard in self.shards:
            with torch.inference_mode(mode=False):  # FSDP2's parameters cannot be read in inference mode
                own = local(shard.parameter).reshape(-1)
            yield shard, own

    def check(self, sent: Tensor) -> None:
        """Check that a flat tensor that is about to be sent holds these shards, in these places.

        Raises:
            UnsupportedError: it does not.
        """
        for shard, own in self.own():
            there = sent[shard.at : shard.at + own.numel()]
            if not torch.equal(own.to(there.device, there.dtype), there):
                raise UnsupportedError(
                    f"{shard.name} is not at the expected place in the tensor that FSDP2 sends, so this version of "
                    f"PyTorch ({torch.__version__}) has another layout of shards; please report this, and train "
                    "without compress_shards"
                )


def layouts_of(model: nn.Module, norms: Collection[Tensor], min_numel: int) -> list[tuple[FSDPModule, Layout]]:
    """Return every module of a model that ``fully_shard`` was called with, and the layout of what is sent of it.

    Args:
        model: the sharded model.
        norms: parameters of normalization layers.
        min_numel: parameters with fewer elements count as small.
    """
    from torch.distributed.fsdp import fully_shard  # takes half a second

    names = {p: name for name, p in model.named_parameters()}
    small = {id(p) for p in norms}
    together: dict[int, list[nn.Module]] = {}  # fully_shard takes a list of modules, too
    for module in model.modules():
        if is_unit(module):
            together.setdefault(id(fully_shard.state(module)), []).append(module)  # type: ignore[attr-defined]
    found = []
    for modules in together.values():
        shards: list[Shard] = []
        ranks = 1
        for p in _parameters(modules):
            ranks, numel = _ranks_and_numel(p)
            compressed = (
                p.dim() >= 2 and p.numel() >= min_numel and id(p) not in small and p.dtype in COMPRESSIBLE
            )  # fmt: skip
            at = shards[-1].at + shards[-1].numel if shards else 0
            shards.append(Shard(names.get(p, "?"), p, at, numel, compressed))
        if shards and ranks > 1:
            named = next((name for name, each in model.named_modules() if each is modules[0]), "")
            found.append((modules[0], Layout(named, tuple(shards), ranks)))
    return found  # type: ignore[return-value]


def _parameters(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters that FSDP2 sends with these modules, once each; children's before a module's own."""
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Parameter]:
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen and not is_unit(child):
                yield from visit(child)
        for p in module.parameters(recurse=False):
            if id(p) not in seen and hasattr(p, "device_mesh"):
                seen.add(id(p))
                yield p

    for module in modules:
        if id(module) not in seen:
            yield from visit(module)


@functools.cache
def _sends_by_dtype() -> bool:
    """Return whether FSDP2 sorts gradients by their dtypes (``grad_dtype``), as in PyTorch 2.15.

    Older versions send them in the order of the parameters.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return hasattr(FSDPParamGroup, "_init_reduce_scatter_param_order")


def _ranks_and_numel(p: nn.Parameter) -> tuple[int, int]:
    """Return the number of ranks among which a parameter is sharded, and how many elements each sends."""
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    dim = next(at for at, placement in enumerate(placements) if placement.is_shard())
    ranks = mesh.size(dim)
    along = placements[dim].dim
    return ranks, -(-p.shape[along] // ranks) * (p.numel() // max(p.shape[along], 1))
