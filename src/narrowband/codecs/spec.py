"""Spec strings: the readable name of a codec, the same in code, on the command line, in plots and in checkpoints.

``name[:key=value,…]`` — for instance ``topk:density=0.01``, ``qsgd:bits=4,bucket=512``, ``none``. Keys are the fields
of the dataclass that the name stands for; ``str(codec)`` writes the canonical form, and :func:`parse_term` reads it
back.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KEY_TYPES", "check_keys", "check_plus", "format_term", "keys_of", "name_of", "parse_term"]

T = TypeVar("T")

#: The types that the field of a key may have, beside a ``Literal`` of strings.
KEY_TYPES = (int, float, bool, str)

#: What people call formats of numbers, and what has as many bits.
_FORMATS = {
    "fp32": "none", "float32": "none", "float16": "fp16", "half": "fp16", "int8": "uniform:bits=8",
    "fp8": "uniform:bits=8", "int4": "qsgd:bits=4", "4bit": "qsgd:bits=4", "1bit": "eden:bits=1",
    "onebit": "eden:bits=1",
}  # fmt: skip

_ONE_BY_ONE = "give several specs one by one, with no comma between them"

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def name_of(text: object) -> str:
    """Return the name at the beginning of a term; empty if ``text`` is not a string."""
    return text.strip().partition(":")[0] if isinstance(text, str) else ""


def check_plus(spec: str) -> None:
    """Check that a plus sign begins a feedback, and does not belong to a number such as ``1e+3``.

    Raises:
        ValueError: the plus sign belongs to a number; the message has the spec without it.
    """
    text, _, feedback = spec.partition("+")
    power = re.match(r"\d+", feedback)
    if power is not None and re.search(r"\d\.?[eE]$", text):
        raise ValueError(
            f"expected a feedback after '+' in {spec!r}, got {power[0]!r}; write numbers without '+': "
            f"{(text + feedback)!r}"
        )


def parse_term(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    """Return the dataclass instance that ``text`` describes.

    Args:
        text: ``name[:key=value,…]``.
        kinds: the known classes by name.
        what: the word for these classes in an error ("codec").

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: an unknown name or key (with the nearest match and what exists), or a value that does not fit.

    Example:
        >>> parse_term("qsgd:bits=4", {"qsgd": QSGD}, "codec")
        QSGD(bits=4, bucket=128, norm='max')
    """
    given: Any = text  # callers' types are unchecked
    if not isinstance(given, str):
        is_class = isinstance(given, type)
        got = f"the class {given.__name__}: call it, {given.__name__}(…)" if is_class else type(given).__name__
        raise TypeError(f"a {what} spec is a string such as {_example(kinds)!r}, not {got}")
    name, colon, rest = text.strip().partition(":")
    if name not in kinds:
        among = "" if name == text else f" in {text!r}"
        raise ValueError(f"unknown {what} {name!r}{among}{_meant(name, kinds)}; there are: {', '.join(kinds)}")
    kind = kinds[name]
    if colon and not rest:
        raise ValueError(f"{text!r} ends with ':'; write {name!r}, or {name}:key=value with {_keys(kind)}")
    hints = _hints(kind)  # type: ignore[arg-type]
    keys = {f.name: f for f in keys_of(kind)}
    values: dict[str, Any] = {}
    for pair in rest.split(",") if rest else ():
        if not pair.strip():
            raise ValueError(f"{text!r} has a comma without a key=value next to it")
        key, equals, value = pair.partition("=")
        key = key.strip()
        if key not in keys:
            write = "" if equals or not keys else f", and a value stands behind its key: {name}:{next(iter(keys))}=…"
            word, colon, number = key.partition(":")
            if word in keys:
                write = f"; write {word}={number}"
            elif values and key.isdecimal():
                write = "; write numbers with a point"
            elif values and not equals and key.startswith("ef"):
                write = f"; a feedback stands behind a '+', as in '{name}:{next(iter(keys))}=…+{key}'"
            elif colon or (values and not equals):  # as on a command line that takes several
                write = f"; {_ONE_BY_ONE}"
            raise ValueError(
                f"{name} has no key {key!r} (in {text!r}){_nearest(key, keys)}; it has: {_keys(kind)}{write}"
            )
        if not equals or not value.strip():
            raise ValueError(f"{key!r} in {text!r} needs a value: {key}=…")
        if key in values:
            raise ValueError(f"{key!r} is given twice in {text!r}")
        values[key] = _convert(value.strip(), hints[key], key, text)
    missing = [key for key, f in keys.items() if f.default is MISSING and key not in values]
    if missing:
        raise ValueError(f"{name} needs {' and '.join(missing)}: {name}:{','.join(f'{key}=…' for key in missing)}")
    return kind(**values)


def _convert(value: str, hint: Any, key: str, text: str) -> Any:
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value not in choices:
            raise ValueError(
                f"{key}={value} in {text!r}{_nearest(value, choices)}; {key} is one of: {', '.join(choices)}"
            )
        return value
    if hint is bool:
        if value.lower() not in _BOOLEANS:
            raise ValueError(f"{key}={value} in {text!r} is neither true nor false")
        return _BOOLEANS[value.lower()]
    try:
        return hint(value)
    except ValueError:
        word = "a whole number" if hint is int else "a number"
        share = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value) if hint is float else None
        write = "" if share is None else f"; write {key}={float(share[1]) / 100:g}"
        raise ValueError(f"{key}={value} in {text!r} is not {word}{write}") from None


def _keys(kind: type) -> str:
    names = [f.name for f in keys_of(kind)]
    return ", ".join(names) if names else "no keys"


def _meant(name: str, kinds: Mapping[str, type]) -> str:
    """Return in words what was meant by a name that does not exist: several specs, a number format, or a term without
    its colon.
    """
    if name.partition(",")[0].strip() in kinds:
        return f" ({_ONE_BY_ONE})"
    term = re.fullmatch(r"([\w-]+)[ (=]+([^()]*)\)?", name)
    other = _FORMATS.get(name.lower(), "")
    if term is not None and term[1] in kinds:
        keys = [f.name for f in keys_of(kinds[term[1]])]
        other = f"{term[1]}:{term[2] if '=' in term[2] else f'{keys[0]}={term[2]}'}" if keys else term[1]
    return f" (did you mean {other!r}?)" if name_of(other) in kinds else _nearest(name, kinds)


def _nearest(word: str, among: Any) -> str:
    close = get_close_matches(word.lower(), list(among), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _example(kinds: Mapping[str, Any]) -> str:
    return next(iter(kinds))


def keys_of(term: object) -> list[Field[Any]]:
    """Return the fields of a dataclass (or of its instance) that a spec string may set."""
    return [f for f in fields(term) if f.init]  # type: ignore[arg-type]


def check_keys(term: object) -> None:
    """Convert every key to the exact type of its annotation, so that ``str(codec)`` reads back as the same codec.

    A NumPy number becomes a Python number, and a whole number becomes a float where the annotation is float.

    Raises:
        TypeError: a value has another type.
        ValueError: a word is not one of those that its key takes.
    """
    hints = _hints(type(term))  # type: ignore[arg-type]
    for f in keys_of(term):
        value, hint = getattr(term, f.name), hints[f.name]
        where = f"{term.name}: {f.name}={value!r}"  # type: ignore[attr-defined]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise ValueError(f"{where} is none of {', '.join(get_args(hint))}")
        elif hint is bool:
            if not isinstance(value, bool):
                raise TypeError(f"{where} is neither True nor False")
        elif hint is str:
            if not isinstance(value, str):
                raise TypeError(f"{where} is not a string")
        elif isinstance(value, bool) or not isinstance(value, Integral if hint is int else Real):
            raise TypeError(f"{where} is not {'a whole number' if hint is int else 'a number'}")
        else:
            try:
                object.__setattr__(term, f.name, hint(value))  # the dataclass is frozen; this is part of its __init__
            except OverflowError:
                raise ValueError(f"{where} is too large for a float") from None


def format_term(term: object) -> str:
    """Return the canonical ``name:key=value,…`` of a codec or feedback: its required keys, and those that differ from
    their default.
    """
    pairs = [
        f"{f.name}={_format_value(value)}"
        for f in keys_of(term)
        if (value := getattr(term, f.name)) != f.default or f.metadata.get("always")
    ]
    name: str = term.name  # type: ignore[attr-defined]
    return f"{name}:{','.join(pairs)}" if pairs else name


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # 1e+30 is written 1e30, because a plus sign begins a feedback
    return repr(value).replace("+", "") if isinstance(value, float) else str(value)
