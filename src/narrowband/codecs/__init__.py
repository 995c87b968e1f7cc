"""Codecs turn tensors into payloads and back: one frozen dataclass per codec, named by a spec string.

A codec is pure: it keeps no state between calls and knows no process group. :mod:`narrowband.feedback` keeps what
compression loses and decides when to send it after all.
"""

from __future__ import annotations

from narrowband.codecs.base import ALIGNMENT, Codec, Shape, aligned, numel_of
from narrowband.codecs.floats import BF16, FP16, Identity
from narrowband.codecs.lowrank import LowRank
from narrowband.codecs.quantized import QSGD, Sign, Uniform
from narrowband.codecs.registry import Registry
from narrowband.codecs.rotated import EDEN
from narrowband.codecs.selecting import SelectingCodec
from narrowband.codecs.sparse import RandomK, TopK
from narrowband.codecs.spec import check_plus, format_term, name_of, parse_term
from narrowband.codecs.threshold import Threshold

__all__ = [
    "ALIGNMENT",
    "BF16",
    "EDEN",
    "FP16",
    "QSGD",
    "Codec",
    "Identity",
    "LowRank",
    "RandomK",
    "SelectingCodec",
    "Shape",
    "Sign",
    "Threshold",
    "TopK",
    "Uniform",
    "aligned",
    "available",
    "codec",
    "find",
    "format_term",
    "name_of",
    "numel_of",
    "parse_term",
    "register_codec",
]

_REGISTRY: Registry[Codec] = Registry(
    "codec",
    "narrowband.codecs",
    Codec,  # type: ignore[type-abstract]
    (Identity, FP16, BF16, Uniform, QSGD, EDEN, Sign, TopK, Threshold, RandomK, LowRank),
)


def register_codec(kind: type[Codec]) -> type[Codec]:
    """Let spec strings name this codec by ``kind.name``.

    A package that is installed can name its class as an entry point of the group ``narrowband.codecs`` instead.

    Args:
        kind: a frozen dataclass whose fields are the keys; :class:`Codec` says what it has to do.

    Returns:
        ``kind``, so that this can be a decorator.

    Raises:
        TypeError: ``kind`` is not a dataclass that derives from :class:`Codec`, has no hash, or has a field that is not
            int, float, bool, str or a Literal of strings.
        ValueError: ``kind`` has no name, a name that a spec string cannot hold, or the name of another codec.

    ``docs/how-to/own-codec.md`` shows how to write a codec.
    """
    return _REGISTRY.register(kind)


def available() -> dict[str, type[Codec]]:
    """Return every codec by its name in a spec string: first narrowband's, in the order of the documentation, then
    those of other packages.
    """
    return _REGISTRY.all()


def find(name: str) -> type[Codec] | None:
    """Return the codec class of this name, or None.

    Raises:
        ValueError: an installed package provides a codec of this name, but its class could not be loaded.
    """
    return _REGISTRY.find(name)


def codec(spec: str | Codec) -> Codec:
    """Return the codec that a spec string names; ``codec(str(c)) == c``.

    Args:
        spec: ``name[:key=value,…]``, such as ``topk:density=0.01`` or ``qsgd:bits=4``; a codec is returned as it is.

    Raises:
        ValueError: unknown name or key, or a value out of range; the message lists what exists.

    Example:
        >>> nb.codec("qsgd:bits=4").payload_nbytes(1_000_000)
        531252
    """
    if isinstance(spec, Codec):
        return spec
    if "+" in str(spec):
        check_plus(str(spec))
        raise ValueError(
            f"{spec!r} names a feedback after '+', but only a codec is expected here. Pass the part before '+', or "
            "pass the whole string where feedback is possible, as in nb.compress_gradients"
        )
    kind = find(name_of(spec))
    return parse_term(spec, available() if kind is None else {kind.name: kind}, "codec")
