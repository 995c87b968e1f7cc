"""Express a policy with fewer patterns.

A search names every block of a model separately. Blocks whose names differ in numbers alone often have the same rule,
and one pattern may match them: ``blocks.*`` for all, or ``blocks.[0-9]`` and ``blocks.1[01]`` for the first twelve.
Patterns are those of :mod:`fnmatch`, where ``*`` matches dots, too. So a shorter policy is verified by comparing what
both policies decide for every module of the model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from narrowband.activations import OPERATORS, ActivationPolicy

__all__ = ["compact", "decisions", "globbed", "numberless"]

_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


def numberless(name: str) -> str:
    """The pattern of a module's name and of those that differ in numbers alone.

    Example:
        >>> numberless("stages.0.blocks.11.mlp")
        'stages.*.blocks.*.mlp'
    """
    return _NUMBER.sub("*", name)


def globbed(names: Iterable[str]) -> list[str]:
    """Patterns that match these names and nothing else. Names that differ in a number share one.

    Example:
        >>> globbed(f"blocks.{at}" for at in (0, 1, 2, 3, 5, 10, 11))
        ['blocks.[0-35]', 'blocks.1[01]']
    """
    found = [name.split(".") for name in names]
    for at in reversed(range(max(map(len, found), default=0))):
        alike: dict[tuple[tuple[str, ...], tuple[str, ...] | None], list[str]] = {}
        for parts in found:
            numbers = alike.setdefault((tuple(parts[:at]), tuple(parts[at + 1 :]) if at < len(parts) else None), [])
            numbers += parts[at : at + 1]
        found = []
        for (before, behind), own in alike.items():
            numbers = [part for part in own if _NUMBER.fullmatch(part)]
            here = [part for part in own if part not in numbers] + (_of_numbers(numbers) if numbers else [])
            found += [[*before]] if behind is None else [[*before, part, *behind] for part in here]
    return [".".join(parts) for parts in found]


def _of_numbers(numbers: Iterable[str]) -> list[str]:
    """Patterns of numbers: those that differ in the last digit share one, and so do those of the digits before."""
    digits: dict[str, set[str]] = {}
    for number in numbers:
        digits.setdefault(number[:-1], set()).add(number[-1])
    before: dict[tuple[bool, str], list[str]] = {}
    for first, own in digits.items():
        before.setdefault((first == "", _one_of(sorted(own))), []).append(first)
    return [first + last for (alone, last), own in before.items() for first in ([""] if alone else _of_numbers(own))]


def _one_of(digits: Sequence[str]) -> str:
    """The pattern of one of some digits, in their order."""
    if len(digits) == 1:
        return digits[0]
    runs = [
        [digit for _, digit in run]
        for _, run in itertools.groupby(enumerate(digits), lambda each: int(each[1]) - each[0])
    ]
    return f"[{''.join(f'{run[0]}-{run[-1]}' if len(run) > 2 else ''.join(run) for run in runs)}]"


def decisions(policy: ActivationPolicy, modules: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """What a policy does with every module: whether backward computes it again, and the bits of what operators save.

    Within a module that is computed again nothing more is decided about that: the outermost one counts.

    Args:
        policy: it.
        modules: names, each after that of the module around it, as ``model.named_modules()`` has them.
    """
    found: dict[str, tuple[Any, ...]] = {}
    outermost: list[str] = []
    for name in modules:
        inside = any(not around or name.startswith(f"{around}.") for around in outermost)
        again = not inside and policy.checkpoints(name)
        if again:
            outermost.append(name)
        own = (policy.bits_for(operator, name) for operator in OPERATORS if not (inside and operator == "checkpoint"))
        found[name] = (again, *own)
    return found


def compact(policy: ActivationPolicy, modules: Iterable[str]) -> ActivationPolicy:
    """The same policy in fewer patterns, which decides the same about every module (:func:`decisions`).

    Args:
        policy: with patterns of modules.
        modules: names of all modules of the model, as ``model.named_modules()`` has them.

    Example:
        >>> long = ActivationPolicy(bits="off", modules={f"blocks.{at}": "checkpoint" for at in range(12)})
        >>> names = ["", "blocks", *(f"blocks.{at}" for at in range(12))]
        >>> compact(long, names).modules
        {'blocks.*': 'checkpoint'}
        >>> compact(long, [*names, "blocks.12"]).modules
        {'blocks.[0-9]': 'checkpoint', 'blocks.1[01]': 'checkpoint'}
    """
    names = list(modules)
    wanted = decisions(policy, names)
    families: dict[tuple[str, str, Any], list[str]] = {}
    for pattern, bits in policy.modules.items():
        name, colon, operator = pattern.partition(":")
        families.setdefault((numberless(name.removesuffix(".*")), colon + operator, bits), []).append(pattern)
    for (all_of_them, of, bits), family in families.items():
        own = [pattern.partition(":")[0] for pattern in family]
        for fewer in ([all_of_them], globbed(own)):
            if len(fewer) >= len(family):
                continue
            short = dict.fromkeys((pattern + of for pattern in fewer), bits)
            at = list(policy.modules).index(family[0])
            rest = [(pattern, bits) for pattern, bits in policy.modules.items() if pattern not in family]
            tried = replace(policy, modules=dict([*rest[:at], *short.items(), *rest[at:]]))
            if decisions(tried, names) == wanted:
                policy = tried
                break
    return policy
