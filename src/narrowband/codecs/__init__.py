"""What a tensor becomes on its way: one frozen dataclass per codec, and their spec strings.

A codec is pure: it keeps nothing between calls and knows no process group. What compression loses, and when that is
sent after all, is the business of :mod:`narrowband.feedback`.
"""

from __future__ import annotations

from narrowband.codecs.base import ALIGNMENT, Codec, Shape, aligned, format_term
from narrowband.codecs.dense import BF16, FP16, Identity
from narrowband.codecs.lowrank import LowRank
from narrowband.codecs.quantized import QSGD, Sign, Uniform
from narrowband.codecs.sparse import RandomK, Threshold, TopK
from narrowband.codecs.spec import parse_term

__all__ = [
    "ALIGNMENT",
    "BF16",
    "FP16",
    "QSGD",
    "Codec",
    "Identity",
    "LowRank",
    "RandomK",
    "Shape",
    "Sign",
    "Threshold",
    "TopK",
    "Uniform",
    "aligned",
    "available",
    "codec",
    "format_term",
    "parse_term",
]

_CODECS: tuple[type[Codec], ...] = (Identity, FP16, BF16, Uniform, QSGD, Sign, TopK, Threshold, RandomK, LowRank)


def available() -> dict[str, type[Codec]]:
    """Every codec by its name in a spec string, in the order of the documentation."""
    return {kind.name: kind for kind in _CODECS}


def codec(spec: str | Codec) -> Codec:
    """The codec that a spec string names; ``codec(str(c)) == c``.

    Args:
        spec: ``name[:key=value,…]``, such as ``topk:density=0.01`` or ``qsgd:bits=4``; a codec is returned as it is.

    Raises:
        ValueError: unknown name or key, or a value out of range; the message says what there is.

    Example:
        >>> nb.codec("qsgd:bits=4").payload_nbytes(1_000_000)
        531252
    """
    if isinstance(spec, Codec):
        return spec
    if "+" in str(spec):
        raise ValueError(
            f"{spec!r} names a feedback after '+'; a codec is what stands before it. "
            "Where feedback is possible, as in nb.compress_gradients, pass the whole string"
        )
    return parse_term(spec, available(), "codec")
