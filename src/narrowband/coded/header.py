"""The header that each node sends in a step, and the conclusion from all headers, which is the same on all nodes.

The first segment's packets are preceded by a header of 20 + 4·k bytes, little-endian. If sums across groups follow the
packets inside groups, the sums have a second header, without checksums, with the conclusion of a group::

    int32    step                 number of steps that this node has averaged
    int32    samples              samples of the mini-batch
    int32    exponent             the unit is 2**exponent
    int32    trouble              0: none; −1: steps, samples or units differ; block + 1: bits of this block differ;
                                  −2 − block: it is finite on some nodes only
    float32  magnitude            the largest contribution
    uint32   checksum, k times    of the codes of the sender's blocks, ascending; 2**32 − 1 if a block is not finite

So all nodes know the same in the same step, and decide alike:

* A contribution is inf or NaN: the average is NaN on all nodes, and a GradScaler skips the step on all of them.
* A contribution is out of reach: all nodes enlarge the unit by a power of two, and exchange the step again. Nothing is
  lost.
* All contributions are far below what the unit reaches: all nodes make it smaller, and exchange the step again.
* Nodes computed different bits for the same block, or are in different steps or mini-batches: an error on all nodes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from narrowband.coded.assignment import Assignment

__all__ = ["NONE", "NOT_FINITE", "Header", "conclusion", "header_nbytes", "largest_of", "what_differs"]

#: Values of a header's ``trouble``, beside block + 1 and −2 − block.
NONE, OUT_OF_STEP = 0, -1

#: What stands for the checksum of a block that is not finite.
NOT_FINITE = 2**32 - 1


@dataclass(frozen=True)
class Header:
    """The header of a node's packets (the format is at the top of this file)."""

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
    """Return the bytes of a header with this number of checksums."""
    return _FIXED + 4 * checksums


def conclusion(headers: Mapping[int, Header], rank: int, assignment: Assignment) -> Header:
    """Combine headers into one. The result is the same on all nodes that have these headers.

    Args:
        headers: node → its header, this node's included.
        rank: this node.
        assignment: maps a node's checksums to blocks.
    """
    trouble = next((header.trouble for header in headers.values() if header.trouble), NONE)
    if not trouble and len({(header.step, header.samples, header.exponent) for header in headers.values()}) > 1:
        trouble = OUT_OF_STEP
    if not trouble:
        of_block: dict[int, int] = {}
        for node, header in headers.items():
            for block, checksum in zip(assignment.held(node), header.checksums, strict=False):
                other = of_block.setdefault(block, checksum)
                if other != checksum:
                    trouble = trouble or (-2 - block if NOT_FINITE in (checksum, other) else block + 1)
    largest = largest_of(header.magnitude for header in headers.values())
    return replace(headers[rank], trouble=trouble, magnitude=largest, checksums=())


def what_differs(trouble: int, headers: Mapping[int, Header], assignment: Assignment) -> str:
    """Return the error message for a header's ``trouble``."""
    if trouble == OUT_OF_STEP:
        places = (
            f"rank {node}: step {header.step}, {header.samples} samples, exponent {header.exponent}"
            for node, header in headers.items()
        )
        return (
            "ranks are not in the same step. Each rank's step, samples of the mini-batch and exponent of the unit: "
            f"{'; '.join(places)}. Call backward equally often on all ranks, with the same mini-batches"
        )
    if trouble < OUT_OF_STEP:
        block = -2 - trouble
        sums = {node: dict(zip(assignment.held(node), x.checksums, strict=False)) for node, x in headers.items()}
        bad = [node for node in assignment.holders[block] if sums.get(node, {}).get(block) == NOT_FINITE]
        where = f"rank(s) {', '.join(map(str, bad))}" if bad else "some"
        return (
            f"the gradients of block {block} of the mini-batch hold inf or NaN on {where} of the ranks that computed "
            f"it, {assignment.holders[block]}, but not on all. (Where all have inf or NaN, the average is NaN, and a "
            "GradScaler skips the step.) So something on one of these ranks alone is wrong, such as its memory, or its "
            "samples, parameters, kind of processor or versions differ from those of the others"
        )
    return (
        f"the gradients of block {trouble - 1} of the mini-batch differ between the ranks that computed it, "
        f"{assignment.holders[trouble - 1]}, and they must be equal to the bit. Possible causes: "
        "(1) The loss rounds. On CPUs, exponentials and logarithms of single elements, as in BCEWithLogitsLoss, depend "
        "on the element's place in the batch, which differs between ranks: compute the loss of each sample inside of "
        "the model, and only .mean() outside. (2) The loss is not a plain mean over rows: class weights, ignore_index "
        "and comparisons of samples depend on the other rows of a rank. (3) Ranks differ in samples, weights, number "
        "of forward passes, versions, threads or kind of processor. (4) Random numbers are not from torch's own "
        "generators: use compress_activations with granularity=256 and rounding='nearest', and a Boundary with a codec "
        "that draws no random numbers and has no feedback"
    )


def largest_of(magnitudes: Iterable[float]) -> float:
    """Return the largest value; NaN if any is not finite."""
    values = list(magnitudes)
    return max(values) if all(map(math.isfinite, values)) else math.nan
