"""Fragments: sets of tensors that are averaged together, and the anchors that all replicas have in common.

A model is one fragment, or several that are averaged in turn (Douillard et al. 2025, Streaming DiLoCo, arXiv
2501.18512). With several, a round sends a part of the model, and needs memory for that part only.

A fragment keeps an *anchor* of every tensor: the value that the tensor had on all replicas after the last round. A
replica's update is the tensor minus its anchor: the change that its optimizer has made since. A round takes one of two
courses:

* The replica waits. Tensors and anchors swap: the tensors return to their values after the last round, and the anchors'
  memory holds the updates. The exchange replaces the updates with their mean, which is then added to the tensors. This
  takes no extra memory, and if the exchange breaks off, the tensors keep their values after the last round.
* The replica trains on, and the mean arrives some steps later. Until then the updates have memory of their own. The
  mean is added to the anchors. The tensors, which have changed meanwhile, are mixed with the anchors (the paper's
  equation 3)::

      tensor ← α · tensor + (1 − α) · anchor

  The changes made in the meantime become part of the replica's next update, scaled by α.

If a round sends only a part of an update, error feedback keeps the rest, the residual, for the next round. It is kept
in one of two places (``residuals=``). *Apart*, as in SparseLoCo (arXiv 2508.15706): after a round a replica trains on
from the parameters that all have in common, and learns again what it had learned but not sent. Its next update repeats
that change, so the residual accumulates, and changes that are sent late are sent several times over. *In place*: before
the first step after a round, the residual is added to the replica's own parameters::

    tensor ← anchor + residual

and the next update, the tensor minus its anchor, holds the residual once. Replicas are equal right after a round all
the same, because residuals are put in place only when anchors are copied, just before the next step. A replica whose
update is not finite loses the residuals that were in place along with that update.

With ``offload``, anchors lie in CPU memory while the model is on a GPU. They are copied to the GPU for a round.
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
from narrowband.updates.length import Length

__all__ = ["Fragment", "OuterStep", "compile_loops", "due_after", "split"]


def split(
    layers: Mapping[str, int], together: int, count: int, how: Literal["strided", "layers"] = "strided"
) -> list[list[str]]:
    """Divide a model's layers into fragments of about the same size.

    Blocks stay whole. A block is the set of tensors whose names are equal up to their first number, such as
    ``blocks.3``. If there are fewer blocks than fragments, single tensors are divided instead. There are two ways
    (Streaming DiLoCo, section 2.2):

    * *strided*: blocks go, largest first, to the fragment that is smallest so far, so blocks of equal size are dealt
      out in turn;
    * *layers* ("sequential" in the paper): consecutive blocks stay together. Fragments are as equal as that allows.

    Args:
        layers: name → number of elements, in the model's order.
        together: number of elements that travel with the first fragment in any case.
        count: number of fragments.
        how: ``"strided"`` or ``"layers"``.

    Returns:
        The names in each fragment, in the model's order. No fragment is empty.

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
            f"fragments={count} is more than the number of layers that are compressed separately, which is "
            f"{len(layers)}; use fragments={max(1, len(layers))}, or fewer"
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
        # Prefer empty fragments, so that none stays empty.
        least = min(range(count), key=lambda fragment: (bool(own[fragment]), loads[fragment], fragment))
        own[least].append(at)
        loads[least] += sizes[at]
    return [[name for at in sorted(ats) for name in units[at]] for ats in own]


def due_after(at: int, every: int, count: int) -> int:
    """Return the number of steps after which fragment ``at`` of ``count`` has its round. Rounds are equally spaced, and
    the last fragment's comes after every ``every``-th step.
    """
    return (at + 1) * every // count


def _in_a_row(sizes: Sequence[int], together: int, count: int) -> Iterator[tuple[int, int]]:
    """Divide units into ``count`` runs of consecutive units such that the largest run is as small as possible. No run
    is empty. Yields where each run begins and ends.

    Args:
        sizes: the size of each unit.
        together: what is added to the size of the first run.
        count: number of runs.
    """
    ends = [0, *itertools.accumulate(sizes)]
    ends[1:] = [end + together for end in ends[1:]]
    # best[n]: for the first n units divided into `runs` runs, the size of the largest run, and where the last begins.
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
    """How the mean of the updates is applied to the parameters.

    Attributes:
        optimizer: the outer optimizer, which gets −mean as the gradient; None where length · mean is added.
        parameters: name → parameter of the outer optimizer. For each step, the fragment makes it point to the
            fragment's own memory.
    """

    optimizer: Optimizer | None
    parameters: Mapping[str, nn.Parameter]


@dataclass(eq=False)
class Group:
    """Tensors of one dtype that are sent together.

    Attributes:
        forms: name → how the tensor is laid out in the flat tensors, in the order in which the tensors lie there.
        anchor: flat: the tensors' values after the last round, end to end. In a round in which the replica waits, it
            may hold the updates instead.
        update: flat: during a round the updates, and then their means.
    """

    forms: Mapping[str, Form]
    anchor: Tensor
    update: Tensor

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self.forms)

    def parts(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each tensor's name, the tensor, and its part of ``flat``; both as real numbers."""
        for name, part in zip(self.forms, parts_of(flat, self.forms.values()), strict=True):
            yield name, real(tensors[name]), part


class Fragment:
    """Tensors that are averaged together.

    Args:
        tensors: the tensors by name, detached.
        buffers: names of those that are buffers. Their mean is always added with length 1.
        length: the factor by which the mean is multiplied before it is added to parameters.
        offload: whether anchors lie in CPU memory, and are copied to the GPU for a round.

    Attributes:
        names: names of the tensors.
        groups: the tensors that are sent together, one group for each dtype.
        length: holds the factor for the mean of parameters, and perhaps measures it.
        anchored: whether the anchors of parameters have been copied. They are copied as late as possible, since the
            user may load a state into the model until the first step. Those of buffers are copied right after a round,
            since forward passes change buffers before the first step. Any value serves as a buffer's anchor if all
            replicas have the same: anchor + mean of (buffer − anchor) is the mean of the buffers.
        buffers_anchored: whether the anchors of buffers have been copied since the last round.
    """

    def __init__(self, tensors: Mapping[str, Tensor], buffers: Iterable[str], *, length: float, offload: bool) -> None:
        self.names = list(tensors)
        self.length = Length(length)
        self.anchored = self.buffers_anchored = False
        self._buffers = frozenset(buffers)
        named = {id(x): name for name, x in tensors.items()}
        self._away = offload
        self.groups = []
        for together in groups_of(tensors.values()):
            anchor = self._room(empty_like(together))
            self.groups.append(Group({named[id(x)]: form_of(x) for x in together}, anchor, anchor))

    def _room(self, flat: Tensor) -> Tensor:
        """Return memory for anchors: ``flat`` itself, or pinned CPU memory of its shape if anchors are offloaded."""
        if not self._away:
            return flat
        return torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=flat.device.type == "cuda")

    def parameter_parts(self) -> list[list[tuple[int, int]]]:
        """Where parameters lie in each group: (first element, number of elements)."""
        found = []
        for group in self.groups:
            numels = [form.numel for form in group.forms.values()]
            begins = itertools.accumulate(numels, initial=0)
            places = zip(group.forms, begins, numels, strict=False)  # `begins` has one more: the end of the last part
            found.append([(begin, numel) for name, begin, numel in places if name not in self._buffers])
        return found

    @property
    def updates(self) -> list[Tensor]:
        """During a round the updates of each group, and after the exchange their means."""
        return [group.update for group in self.groups]

    def keep(self, tensors: Mapping[str, Tensor], *, parameters: bool) -> None:
        """Copy parameters (or, with ``parameters=False``, buffers) to the anchors. They must be equal on all replicas
        now; of buffers see :attr:`anchored`.
        """
        for group in self.groups:
            for name, x, part in group.parts(group.anchor, tensors):
                if (name not in self._buffers) == parameters:
                    part.copy_(x)
        self.anchored |= parameters
        self.buffers_anchored |= not parameters

    @staticmethod
    def put_in_place(x: Tensor, residual: Tensor, form: Form) -> None:
        """Add a flat residual, laid out as ``form``, to a tensor. What rounding loses stays in the residual."""
        whole = real(x)
        (part,) = parts_of(residual, [form])
        before = whole.clone()
        whole.add_(part)
        part.sub_(whole - before)

    def in_common(self, tensors: Mapping[str, Tensor], *, waiting: bool) -> Iterator[Tensor]:
        """Yield, during a round, the parameters as they were after the last round, equal on all replicas."""
        for group in self.groups:
            for name, x, part in group.parts(group.anchor, tensors):
                if name not in self._buffers:
                    yield x if waiting else part

    # ---- the replica waits -------------------------------------------------------------------------------------------

    def take(self, tensors: Mapping[str, Tensor]) -> bool:
        """Swap: tensors get the values of their anchors, and the anchors' memory gets the updates.

        Returns:
            Whether the updates are finite.
        """
        finite = True
        here = [self._here(group, tensors) for group in self.groups]  # may need memory, so before anything changes
        self.anchored = self.buffers_anchored = False  # first, since what is interrupted has swapped a part of them
        for group, update in zip(self.groups, here, strict=True):
            group.update = update
            for _, x, part in group.parts(group.update, tensors):
                finite &= _take_difference(x, part)
        return finite

    def go_along(self, tensors: Mapping[str, Tensor], outer: OuterStep) -> None:
        """Apply the mean of the updates to the tensors, which have their values after the last round."""
        self._step(outer, (each for group in self.groups for each in group.parts(group.update, tensors)), tensors)

    # ---- the replica goes on -----------------------------------------------------------------------------------------

    def take_a_copy(self, tensors: Mapping[str, Tensor]) -> bool:
        """Compute the updates in memory of their own. Tensors and anchors stay as they are.

        Returns:
            Whether the updates are finite.
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
        """Apply the mean of the updates to the anchors, then mix the tensors with the anchors.

        Args:
            tensors: the tensors, with their current values.
            outer: how the mean is applied.
            along: whether the mean is applied at all.
            alpha: the weight of the tensors in the mix; that of the anchors is 1 − ``alpha``.
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
                    x.copy_(base)  # lerp_ with weight 1 would keep a NaN of x
            if anchor is not group.anchor:
                group.anchor.copy_(anchor)
        self.end()

    # ---- both --------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Release the memory that a round used."""
        for group in self.groups:
            group.update = group.anchor

    def bring_nothing(self) -> None:
        """Set the updates to zero."""
        for group in self.groups:
            group.update.zero_()

    def go_back(self, tensors: Mapping[str, Tensor]) -> None:
        """Reset the tensors to their anchors, the values after the last round."""
        for group in self.groups:
            for _, x, part in group.parts(group.anchor, tensors):
                x.copy_(part)

    def not_finite(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the tensors whose updates are not finite, in the model's order."""
        parts = (each for group in self.groups for each in group.parts(group.update, tensors))
        found = {name for name, _, part in parts if not bool(part.isfinite().all())}
        return [name for name in self.names if name in found]

    def is_finite(self) -> bool:
        """Return whether all means are finite."""
        return all(_all_finite(group.update) for group in self.groups)

    def _here(self, group: Group, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a group's anchors on the model's device: the anchors themselves, or a copy if they are offloaded."""
        if not self._away:
            return group.anchor
        return torch.empty_like(group.anchor, device=tensors[group.names[0]].device).copy_(group.anchor)

    def _step(
        self, outer: OuterStep, moves: Iterable[tuple[str, Tensor, Tensor]], tensors: Mapping[str, Tensor]
    ) -> None:
        """Apply means. Each move is (name, the tensor that is stepped, its mean), as real numbers."""
        stepped = []
        for name, x, mean in moves:
            own = outer.parameters.get(name)
            if own is None:
                x.add_(mean, alpha=1.0 if name in self._buffers else self.length.value)
                continue
            gradient = mean.neg_()
            own.data = torch.view_as_complex(x) if own.is_complex() else x  # x may lie elsewhere than in the last round
            own.grad = torch.view_as_complex(gradient) if own.is_complex() else gradient
            stepped.append((name, own))
        if outer.optimizer is not None:
            outer.optimizer.step()
            for name, own in stepped:
                own.grad = None
                own.data = tensors[name]  # x may be a copy made for this round, whose memory must be released

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def copies(self, tensors: Mapping[str, Tensor], *, of_updates: bool = False) -> dict[str, Tensor]:
        """Return name → a copy of the tensor's anchor, or of its update."""
        return {
            name: part.clone()
            for group in self.groups
            for name, _, part in group.parts(group.update if of_updates else group.anchor, tensors)
        }

    def copies_of_buffers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name → a copy of the anchor, of buffers only."""
        return {
            name: part.clone()
            for group in self.groups
            for name, _, part in group.parts(group.anchor, tensors)
            if name in self._buffers
        }

    def load_buffers(self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor]) -> None:
        """Load :meth:`copies_of_buffers`, right after a round. Buffers without a copy are their own anchors."""
        self.anchored = False
        self.keep(tensors, parameters=False)
        for group in self.groups:
            for name, _, part in group.parts(group.anchor, tensors):
                if name in self._buffers and name in anchors:
                    part.copy_(anchors[name])

    def load(
        self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor], updates: Mapping[str, Tensor] | None
    ) -> None:
        """Load copies of the anchors and, for a fragment whose round is under way, of the updates (or their means)."""
        for group in self.groups:
            for name, _, part in group.parts(group.anchor, tensors):
                part.copy_(anchors[name])
            group.update = group.anchor
            if updates is not None:
                group.update = torch.empty_like(self._here(group, tensors))
                for name, _, part in group.parts(group.update, tensors):
                    part.copy_(updates[name])
        self.anchored = self.buffers_anchored = True


def compile_loops(device: torch.device) -> None:
    """Compile the kernels that rounds use, by calling each once."""
    two = [torch.zeros(1, dtype=torch.float32, device=device) for _ in range(2)]
    _take_difference(*two)
    kernels.checksum(two[0])


def _take_difference(x: Tensor, base: Tensor) -> bool:
    """Compute ``(x, base) ← (base, x − base)``. Return whether all of the difference is finite."""
    flat, other = in_memory_order(x), in_memory_order(base)
    if x.dtype == torch.float32 and flat is not None and other is not None and x.stride() == base.stride():
        return kernels.take_difference(flat, other)
    difference = x - base
    x.copy_(base)
    base.copy_(difference)
    return bool(difference.isfinite().all())


def _all_finite(x: Tensor) -> bool:
    return kernels.all_finite(x) if x.dtype == torch.float32 else bool(x.isfinite().all())
