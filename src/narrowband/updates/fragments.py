"""Fragments: the tensors that are averaged at the same time, and what all replicas have in common of them.

A model is one fragment, or several that are averaged in turn (Douillard et al. 2025, Streaming DiLoCo, arXiv
2501.18512). Then a round sends a part of the model, and needs memory for that part alone.

Of every tensor a fragment keeps its *anchor*: what it was on all replicas after the last round. What a replica's
optimizer has changed since then is its update, the tensor minus its anchor. There are two ways through a round:

* The replica waits. Anchors and tensors change places: the tensors are again what all replicas have in common, and the
  anchors' memory holds the updates, which become their mean there, which is added. It takes no memory, and where an
  exchange breaks off, the tensors stay what they were after the last round.
* The replica goes on, and the mean arrives some steps later. Updates get memory of their own until then. The mean is
  added to the anchors, and the tensors, which have changed since, are mixed with them (the paper's equation 3)::

      tensor ← α · tensor + (1 − α) · anchor

  What a replica has changed in the meantime is part of its next update, as far as α keeps it.

Where a round sends a part of an update, error feedback keeps the residual for the next round. There are two places
for it (``residuals=``). *Apart*, as SparseLoCo has it (arXiv 2508.15706): after a round a replica trains on from the
parameters that all have in common, and learns anew what it had learned and not sent. Its next update has the same news
again, so that the residual adds up, and what was sent late is sent several times over. *In place*: before the first
step after a round the residual goes into the replica's own parameters::

    tensor ← anchor + residual

and its next update, the tensor minus its anchor, holds the residual once. Right after a round replicas are equal all
the same, since residuals are put in place as late as anchors are copied. A replica whose update is not finite loses
with it what was in place.

Anchors may lie in the memory of the CPU (``offload``) when the model is on a GPU. They are copied to the GPU for the
round.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowband import kernels
from narrowband.averaging.flat import Form, empty_like, form_of, groups_of, in_memory_order, parts_of, real
from narrowband.updates.length import MeasuredLength

__all__ = ["Fragment", "OuterStep", "compile_loops", "due_after", "split"]


def split(
    layers: Mapping[str, int], together: int, count: int, how: Literal["strided", "layers"] = "strided"
) -> list[list[str]]:
    """Divide a model's layers into fragments of about the same size.

    Blocks stay whole: tensors whose names begin alike up to their first number, such as ``blocks.3``. Where there are
    fewer blocks than fragments, tensors take their place. There are two ways (Streaming DiLoCo, section 2.2):

    * *strided*: the largest goes to the smallest fragment, and so on, so blocks of one size are dealt out in turn;
    * *layers* ("sequential" there): blocks that follow each other stay together. Fragments are as equal as that allows.

    Args:
        layers: name → elements, in the model's order.
        together: elements of what travels with the first fragment in any case.
        count: of fragments.
        how: strided or layers.

    Returns:
        The names of each, in the model's order. No fragment is empty.

    Raises:
        ValueError: more fragments than layers.

    Example:
        >>> split({"blocks.0.w": 4, "blocks.1.w": 4, "blocks.2.w": 4, "blocks.3.w": 4}, 1, 2)
        [['blocks.1.w', 'blocks.3.w'], ['blocks.0.w', 'blocks.2.w']]
        >>> split({"blocks.0.w": 4, "blocks.1.w": 4, "blocks.2.w": 4, "blocks.3.w": 4}, 1, 2, "layers")
        [['blocks.0.w', 'blocks.1.w'], ['blocks.2.w', 'blocks.3.w']]
    """
    if count == 1:
        return [list(layers)]
    if count > len(layers):
        raise ValueError(
            f"fragments={count} are more than the {len(layers)} matrices that are compressed by themselves; give fewer"
        )
    blocks: dict[str, list[str]] = {}
    for name in layers:
        found = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
        blocks.setdefault(found[0] if found else name, []).append(name)
    units = list(blocks.values()) if len(blocks) >= count else [[name] for name in layers]
    sizes = [sum(layers[name] for name in unit) for unit in units]
    if how == "layers":
        return [[name for unit in units[a:b] for name in unit] for a, b in _in_a_row(sizes, together, count)]
    loads, own = [together, *[0] * (count - 1)], [[] for _ in range(count)]  # type: list[int], list[list[int]]
    for at in sorted(range(len(units)), key=lambda at: (-sizes[at], at)):
        # An empty fragment first, so that none stays empty.
        least = min(range(count), key=lambda fragment: (bool(own[fragment]), loads[fragment], fragment))
        own[least].append(at)
        loads[least] += sizes[at]
    return [[name for at in sorted(ats) for name in units[at]] for ats in own]


def due_after(at: int, every: int, count: int) -> int:
    """Steps after which a fragment has its round, of as many fragments: rounds come at equal distances, the last one
    after every ``every``-th step.
    """
    return (at + 1) * every // count


def _in_a_row(sizes: Sequence[int], together: int, count: int) -> Iterator[tuple[int, int]]:
    """Where runs of units begin and end, whose largest is as small as can be. None is empty.

    Args:
        sizes: of units.
        together: what the first run has beside them.
        count: of runs.
    """
    ends = [0, *itertools.accumulate(sizes)]
    ends[1:] = [end + together for end in ends[1:]]
    # best[n]: of the first n units in so many runs, the largest run, and where the last one begins.
    best = [(end, 0) for end in ends]
    begins = []
    for runs in range(2, count + 1):
        best = [
            min((max(best[at][0], ends[n] - ends[at]), at) for at in range(runs - 1, n)) if n >= runs else (0, 0)
            for n in range(len(ends))
        ]
        begins.append([at for _, at in best])
    bounds = [len(sizes)]
    for of_last in reversed(begins):
        bounds.append(of_last[bounds[-1]])
    yield from itertools.pairwise([0, *reversed(bounds)])


@dataclass(frozen=True, eq=False)
class OuterStep:
    """How parameters go along the mean of the updates.

    Attributes:
        optimizer: to which −mean is the gradient; None where they go along it by a length.
        parameters: name → what the optimizer steps, in whose place the fragment puts its own memory.
    """

    optimizer: Optimizer | None
    parameters: Mapping[str, nn.Parameter]


@dataclass(eq=False)
class Group:
    """Tensors of one dtype that travel together.

    Attributes:
        forms: name → how it lies in flat tensors; in the order in which they lie there.
        anchor: end to end, what they were after the last round. In a round in which the replica waits it may hold the
            updates.
        update: in a round their updates, and then the means of these.
    """

    forms: Mapping[str, Form]
    anchor: Tensor
    update: Tensor

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self.forms)

    def parts(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, tensor and part of a flat tensor, as real numbers."""
        for name, part in zip(self.forms, parts_of(flat, self.forms.values()), strict=True):
            yield name, real(tensors[name]), part


class Fragment:
    """Tensors that are averaged at the same time.

    Args:
        tensors: by name, detached.
        buffers: names of those that are buffers. Their mean is always taken as it is.
        length: how far parameters go along the mean.
        offload: whether anchors lie in the memory of the CPU, and are copied for a round.

    Attributes:
        names: of the tensors.
        groups: these that travel together.
        length: how far parameters go along the mean, or what measures it.
        anchored: whether the anchors of parameters are there. They are copied as late as can be, since a state may be
            loaded into the model until then; those of buffers right after a round, since forward passes change them
            before the first step. Whatever a buffer's anchor is, as long as all replicas have the same, anchor + mean
            of (buffer − anchor) is the mean of the buffers.
    """

    def __init__(self, tensors: Mapping[str, Tensor], buffers: Iterable[str], *, length: float, offload: bool) -> None:
        self.names = list(tensors)
        self.length: float | MeasuredLength = length
        self.anchored = False
        self._buffers = frozenset(buffers)
        named = {id(x): name for name, x in tensors.items()}
        self._away = offload
        self.groups = []
        for together in groups_of(tensors.values()):
            anchor = self._room(empty_like(together))
            self.groups.append(Group({named[id(x)]: form_of(x) for x in together}, anchor, anchor))

    def _room(self, flat: Tensor) -> Tensor:
        """Memory for anchors."""
        if not self._away:
            return flat
        return torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=flat.device.type == "cuda")

    def parameter_parts(self) -> list[list[tuple[int, int]]]:
        """Where parameters lie in each group: (first element, number of elements)."""
        found = []
        for group in self.groups:
            numels = [form.numel for form in group.forms.values()]
            begins = itertools.accumulate(numels, initial=0)
            places = zip(group.forms, begins, numels, strict=False)  # behind the last one begins nothing
            found.append([(begin, numel) for name, begin, numel in places if name not in self._buffers])
        return found

    @property
    def updates(self) -> list[Tensor]:
        """In a round, the updates of each group, and then their means."""
        return [group.update for group in self.groups]

    def keep(self, tensors: Mapping[str, Tensor], *, parameters: bool) -> None:
        """Copy what all replicas have in common now: the parameters, or the buffers."""
        for group in self.groups:
            for name, x, part in group.parts(group.anchor, tensors):
                if (name not in self._buffers) == parameters:
                    part.copy_(x)
        self.anchored |= parameters

    @staticmethod
    def put_in_place(x: Tensor, residual: Tensor, form: Form) -> None:
        """Add a flat residual, of this form, to a tensor. What rounding leaves of it stays in the residual."""
        whole = real(x)
        (part,) = parts_of(residual, [form])
        before = whole.clone()
        whole.add_(part)
        part.sub_(whole - before)

    def in_common(self, tensors: Mapping[str, Tensor], *, waiting: bool) -> Iterator[Tensor]:
        """In a round, the parameters that all replicas have in common: those of the last one."""
        for group in self.groups:
            for name, x, part in group.parts(group.anchor, tensors):
                if name not in self._buffers:
                    yield x if waiting else part

    # ---- the replica waits -------------------------------------------------------------------------------------------

    def take(self, tensors: Mapping[str, Tensor]) -> bool:
        """Anchors and tensors change places.

        Returns:
            Whether the updates are finite.
        """
        finite = True
        for group in self.groups:
            group.update = self._here(group, tensors)
            for _, x, part in group.parts(group.update, tensors):
                finite &= _take_difference(x, part)
        self.anchored = False
        return finite

    def go_along(self, tensors: Mapping[str, Tensor], outer: OuterStep) -> None:
        """From what the tensors were after the last round along the mean of the updates."""
        self._step(outer, (each for group in self.groups for each in group.parts(group.update, tensors)), tensors)

    # ---- the replica goes on -----------------------------------------------------------------------------------------

    def take_a_copy(self, tensors: Mapping[str, Tensor]) -> bool:
        """The updates, in memory of their own.

        Returns:
            Whether they are finite.
        """
        for group in self.groups:
            anchor = self._here(group, tensors)
            group.update = torch.empty_like(anchor)
            for (_, x, part), (_, _, base) in zip(
                group.parts(group.update, tensors), group.parts(anchor, tensors), strict=True
            ):
                torch.sub(x, base, out=part)
        return all(_all_finite(group.update) for group in self.groups)

    def mix(self, tensors: Mapping[str, Tensor], outer: OuterStep, *, along: bool, alpha: float) -> None:
        """The anchors go along the mean of the updates, and tensors are mixed with them.

        Args:
            tensors: as they are now.
            outer: how far.
            along: whether they go anywhere.
            alpha: what is left of the tensors.
        """
        anchors = [self._here(group, tensors) for group in self.groups]
        if along:
            moves = []
            for group, anchor in zip(self.groups, anchors, strict=True):
                bases = (base for _, _, base in group.parts(anchor, tensors))
                for (name, _, mean), base in zip(group.parts(group.update, tensors), bases, strict=True):
                    moves.append((name, base, mean))
            self._step(outer, moves, tensors)
        for group, anchor in zip(self.groups, anchors, strict=True):
            for _, x, base in group.parts(anchor, tensors):
                if alpha:
                    x.lerp_(base, 1.0 - alpha)
                else:
                    x.copy_(base)  # lerp leaves a NaN
            if anchor is not group.anchor:
                group.anchor.copy_(anchor)
        self.end()

    # ---- both --------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Give the memory of a round back."""
        for group in self.groups:
            group.update = group.anchor

    def bring_nothing(self) -> None:
        """Zeros in place of the updates."""
        for group in self.groups:
            group.update.zero_()

    def go_back(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors are what they were after the last round."""
        for group in self.groups:
            for _, x, part in group.parts(group.anchor, tensors):
                x.copy_(part)

    def not_finite(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of the tensors whose updates are not finite, in the model's order."""
        parts = (each for group in self.groups for each in group.parts(group.update, tensors))
        found = {name for name, _, part in parts if not bool(part.isfinite().all())}
        return [name for name in self.names if name in found]

    def is_finite(self) -> bool:
        """Whether the means are."""
        return all(_all_finite(group.update) for group in self.groups)

    def _here(self, group: Group, tensors: Mapping[str, Tensor]) -> Tensor:
        """Anchors where the model is: themselves, or a copy."""
        if not self._away:
            return group.anchor
        return torch.empty_like(group.anchor, device=tensors[group.names[0]].device).copy_(group.anchor)

    def _step(
        self, outer: OuterStep, moves: Iterable[tuple[str, Tensor, Tensor]], tensors: Mapping[str, Tensor]
    ) -> None:
        """Go along means: (name, what goes, mean), as real numbers."""
        along = self.length.value if isinstance(self.length, MeasuredLength) else self.length
        stepped = []
        for name, x, mean in moves:
            own = outer.parameters.get(name)
            if own is None:
                x.add_(mean, alpha=1.0 if name in self._buffers else along)
                continue
            gradient = mean.neg_()
            own.data = torch.view_as_complex(x) if own.is_complex() else x  # which may lie elsewhere now
            own.grad = torch.view_as_complex(gradient) if own.is_complex() else gradient
            stepped.append((name, own))
        if outer.optimizer is not None:
            outer.optimizer.step()
            for name, own in stepped:
                own.grad = None
                own.data = tensors[name]  # what went may have been a copy for this round, which is not to stay

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def copies(self, tensors: Mapping[str, Tensor], *, of_updates: bool = False) -> dict[str, Tensor]:
        """Name → a copy of its anchor, or of its update."""
        return {
            name: part.clone()
            for group in self.groups
            for name, _, part in group.parts(group.update if of_updates else group.anchor, tensors)
        }

    def load(
        self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor], updates: Mapping[str, Tensor] | None
    ) -> None:
        """Go on from copies of anchors, and, in a round, of updates."""
        for group in self.groups:
            for name, _, part in group.parts(group.anchor, tensors):
                part.copy_(anchors[name])
            group.update = group.anchor
            if updates is not None:
                group.update = torch.empty_like(self._here(group, tensors))
                for name, _, part in group.parts(group.update, tensors):
                    part.copy_(updates[name])
        self.anchored = True


def compile_loops(device: torch.device) -> None:
    """Make what rounds use ready."""
    two = [torch.zeros(1, dtype=torch.float32, device=device) for _ in range(2)]
    _take_difference(*two)
    kernels.checksum(two[0])


def _take_difference(x: Tensor, base: Tensor) -> bool:
    """``(x, base) ← (base, x − base)``; whether all of the difference is finite."""
    flat, other = in_memory_order(x), in_memory_order(base)
    if x.dtype == torch.float32 and flat is not None and other is not None and x.stride() == base.stride():
        return kernels.take_difference(flat, other)
    difference = x - base
    x.copy_(base)
    base.copy_(difference)
    return bool(difference.isfinite().all())


def _all_finite(x: Tensor) -> bool:
    return kernels.all_finite(x) if x.dtype == torch.float32 else bool(x.isfinite().all())
