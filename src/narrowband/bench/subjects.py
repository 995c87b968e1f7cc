"""The models whose memory is measured: those of narrowband, and users' own from a file.

An error in a user's file becomes one sentence that names the line.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowband.bench.architectures import ZOO
from narrowband.bench.devices import moved
from narrowband.bench.models import GPT, GPTConfig, ResNet18, ViT
from narrowband.errors import users_errors
from narrowband.units import format_count

__all__ = ["SUBJECTS", "Subject", "numel_of", "remark", "subject", "tried"]

#: A model and the inputs of its forward.
Subject = tuple[nn.Module, tuple[Any, ...]]


def _vit(batch: int, **shape: Any) -> Subject:
    return ViT(**shape), (torch.randn(batch, 3, 224, 224),)


def _gpt(batch: int) -> Subject:
    shape = GPTConfig(vocab=8000, dim=384, blocks=6, heads=6, sequence=256, batch=batch)
    return GPT(shape), (torch.randint(shape.vocab, (batch, shape.sequence)),)


def _resnet(batch: int) -> Subject:
    return ResNet18(), (torch.randn(batch, 3, 224, 224),)


#: The models that come with narrowband, made for a batch size.
SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "deit-tiny": _vit,
    "deit-small": functools.partial(_vit, dim=384, heads=6),
    "gpt": _gpt,
    "resnet18": _resnet,
}


def subject(name: str, batch: int) -> Subject:
    """A model and its inputs.

    Args:
        name: deit-tiny, deit-small, gpt or resnet18; one of the zoo; or ``file.py:function``, which is called with the
            batch size and returns a module and the tuple of its inputs.
        batch: samples.

    Raises:
        ValueError: there is no such model, file or function; the file cannot be imported; the function cannot be called
            so, raises an error, or returns something else.
    """
    if name in SUBJECTS:
        return SUBJECTS[name](batch)
    if name in ZOO:
        if not ZOO[name].is_installed:
            raise ValueError(f"{name} needs {ZOO[name].package}: pip install {ZOO[name].package}")
        return ZOO[name].build(batch)
    path, colon, function = name.rpartition(":")
    if name.removesuffix(":").endswith(".py"):
        raise ValueError(
            f"{name.removesuffix(':')} lacks the name of a function: write {name.removesuffix(':')}:function"
        )
    if not colon or not path:
        close = get_close_matches(name.lower(), (*SUBJECTS, *ZOO), n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        there = ", ".join((*SUBJECTS, *ZOO))
        raise ValueError(f"unknown model {name!r}{meant}; write file.py:function for yours, or one of: {there}")
    build = _function(path, function, name)
    try:
        inspect.signature(build).bind(batch)
    except TypeError as error:
        raise ValueError(
            f"{name}: {function} must take the batch size as its only argument, as in {function}({batch}): {error}"
        ) from error
    with users_errors(f"{name}: {function}({batch}) raised", path):
        made = build(batch)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(
            f"{name}: {function}({batch}) must return a module and the tuple of its inputs, such as model, (x,)"
        )
    model, inputs = made
    empty = [each for each, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    if empty:
        raise ValueError(f"{name}: {empty[0]} of the model has no values (meta device); build the model on the CPU")
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def numel_of(model: nn.Module) -> int:
    """Return how many parameters a model has, frozen ones included."""
    return sum(p.numel() for p in model.parameters())


def remark(name: str, model: nn.Module) -> str:
    """Say which model a name of the zoo stands for, since published models have the same names; empty for others."""
    if name in SUBJECTS or name not in ZOO:
        return ""
    return (
        f"{name} is that architecture of {ZOO[name].package} in a small size, with {format_count(numel_of(model))} "
        "parameters of random values. For the size that you train, give yours: file.py:function."
    )


def tried(name: str, batch: int, device: str = "cpu") -> Subject:
    """Make a :func:`subject` on a device. Run its forward once, without gradients, to check its inputs.

    Models that come with narrowband are not checked.

    Raises:
        ValueError: as :func:`subject` does, or forward raises an error.
    """
    model, inputs = subject(name, batch)
    model, inputs = model.to(device), tuple(moved(x, device) for x in inputs)
    if name not in SUBJECTS:
        by_name = any(isinstance(x, dict) for x in inputs)
        hint = " (a dictionary is one input: return a tuple, in the order of forward's arguments)" if by_name else ""
        what = f"{name}: the model's forward does not take the inputs that came with it{hint}:"
        with users_errors(what), torch.no_grad():
            model(*inputs)
    return model, inputs


def _function(path: str, function: str, name: str) -> Callable[[int], Any]:
    if not Path(path).is_file():
        raise ValueError(f"{name}: there is no file {path}; write file.py:function")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{name}: {path} is not a Python file (its name does not end in .py); write file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        with _importing_beside(path), users_errors(f"{name}: {path} cannot be imported:", path):
            spec.loader.exec_module(module)
    except ValueError as error:
        if isinstance(error.__cause__, (ImportError, SyntaxError)):
            raise
        raise ValueError(
            f"{error}. If the file trains when it is imported, move {function} to a file of its own"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        there = f"; there are: {', '.join(defined)}" if defined else ""
        raise ValueError(f"{name}: {path} has no function {function!r}{there}")
    build: Callable[[int], Any] = found
    return build


@contextlib.contextmanager
def _importing_beside(path: str) -> Iterator[None]:
    """Let a script import modules from its own folder."""
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
