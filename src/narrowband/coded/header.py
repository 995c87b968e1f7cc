"""What each node says of itself in a step, and what follows from that: the same on all nodes.

In front of the first segment's packets travels a header of 20 + 4·k bytes, little-endian. Where packets inside groups
are followed by sums across groups, these have another, without checksums, for what a group has found::

    int32    step                 how many steps this node has averaged
    int32    samples              of the mini-batch
    int32    exponent             the unit is 2**exponent
    int32    trouble              0, −1: other steps, samples or units; block + 1: other bits for a block
    float32  magnitude            the largest contribution
    uint32   checksum, k times    of the codes of the sender's blocks, ascending

So all nodes learn in the same step, and decide alike:

* a contribution is inf or NaN: the average is NaN on all nodes, and a GradScaler skips the step on all of them;
* one is out of reach: the unit grows on all nodes by powers of two, and the step is exchanged again, with nothing lost;
* all are far below what the unit reaches: it shrinks on all nodes, and the step is exchanged again, likewise;
* nodes that computed the same block have other bits, or another step or mini-batch: an error on all nodes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from narrowband.coded.assignment import Assignment

__all__ = ["NONE", "Header", "conclusion", "header_nbytes", "largest_of", "what_differs"]

#: Values of a header's ``trouble``, beside block + 1.
NONE, OUT_OF_STEP = 0, -1


@dataclass(frozen=True)
class Header:
    """What a node says in a step, beside its packets (the format is at the top of this file)."""

    step: int
    samples: int
    exponent: int
    trouble: int
    magnitude: float
    checksums: tuple[int, ...]

    def to_bytes(self) -> bytes:
        place = (self.step & 0x7FFFFFFF, self.samples & 0x7FFFFFFF, self.exponent, self.trouble, self.magnitude)
        return struct.pack(f"<4if{len(self.checksums)}I", *place, *self.checksums)

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        step, samples, exponent, trouble, magnitude = struct.unpack_from("<4if", data)
        checksums = struct.unpack_from(f"<{(len(data) - _FIXED) // 4}I", data, _FIXED)
        return cls(step, samples, exponent, trouble, magnitude, checksums)


_FIXED = struct.calcsize("<4if")


def header_nbytes(checksums: int) -> int:
    """Bytes of a header."""
    return _FIXED + 4 * checksums


def conclusion(headers: Mapping[int, Header], rank: int, assignment: Assignment) -> Header:
    """What follows from these headers: the same on all nodes that have them.

    Args:
        headers: node → its header, this node's included.
        rank: this node.
        assignment: says which blocks a node's checksums are of.
    """
    trouble = next((header.trouble for header in headers.values() if header.trouble), NONE)
    if not trouble and len({(header.step, header.samples, header.exponent) for header in headers.values()}) > 1:
        trouble = OUT_OF_STEP
    if not trouble:
        of_block: dict[int, int] = {}
        for node, header in headers.items():
            for block, checksum in zip(assignment.held(node), header.checksums, strict=False):
                if of_block.setdefault(block, checksum) != checksum:
                    trouble = trouble or block + 1
    largest = largest_of(header.magnitude for header in headers.values())
    return replace(headers[rank], trouble=trouble, magnitude=largest, checksums=())


def what_differs(trouble: int, headers: Mapping[int, Header], assignment: Assignment) -> str:
    """The error for a header's trouble, in words."""
    if trouble == OUT_OF_STEP:
        places = {node: (header.step, header.samples, header.exponent) for node, header in headers.items()}
        return (
            "ranks are not in the same step; of each rank its step, the samples of its mini-batch and the exponent "
            f"of its unit: {places}"
        )
    return (
        f"block {trouble - 1} of the mini-batch has other gradients on some of the ranks that computed it, "
        f"{assignment.holders[trouble - 1]}, and packets of them cannot be taken apart. They have to be equal "
        "to the bit. Either the loss rounds: on CPUs exponentials and logarithms of single elements, as in "
        "BCEWithLogitsLoss, depend on where in the batch the element is, which is not the same on all ranks. Then "
        "compute the loss of each sample inside of the model, and outside only .mean(). Or ranks differ: it takes the "
        "same samples, weights, versions, threads and kind of processor on all of them, a loss that is a mean over "
        "rows, and no randomness but that of torch's own generators: compress_activations takes granularity=256 and "
        "rounding='nearest', and a Boundary a codec that draws nothing and has no feedback"
    )


def largest_of(magnitudes: Iterable[float]) -> float:
    """The largest; NaN where one of them is not finite."""
    values = list(magnitudes)
    return max(values) if all(map(math.isfinite, values)) else math.nan
