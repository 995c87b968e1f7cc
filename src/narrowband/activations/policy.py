"""How many bits each saved activation is kept in: by operator, by module, by size.

A policy is data. In TOML it reads::

    bits = 8                        # for all that is not named below (layer_norm: at least 8)
    min_numel = 4096                # smaller tensors are kept unchanged

    [operators]
    softmax = 4
    dropout = "off"                 # as PyTorch keeps it

    [modules]                       # patterns of module names: they override operators, and the last match decides
    "blocks.0.*" = "off"
    "blocks.*.attn:softmax" = 8     # one operator in these modules
    "blocks.*.mlp" = "checkpoint"   # keep only their inputs; backward runs them again
"""

from __future__ import annotations

import fnmatch
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast, get_args

from narrowband.units import plain_number

__all__ = ["OPERATORS", "ActivationPolicy", "Bits", "ModuleBits"]

Bits = Literal[8, 4, 2, "off"]
#: Bits of a module. "checkpoint": only its inputs are kept, in so many bits, and backward runs the module again.
ModuleBits = Literal[8, 4, 2, "off", "checkpoint", "checkpoint:bits=8", "checkpoint:bits=4", "checkpoint:bits=2"]

#: Operators that a policy can name, and what they are.
OPERATORS: dict[str, str] = {
    "matmul": "linear layers and products of matrices",
    "attention": "scaled dot-product attention in one call",
    "softmax": "softmax, as attention computed step by step uses it",
    "layer_norm": "layer, group and RMS normalization, also an RMS norm that a model writes out",
    "gelu": "GELU and SiLU",
    "relu": "ReLU, leaky, or cut off above: one bit per element, whatever the bits",
    "dropout": "dropout: one bit per element, whatever the bits",
    "max_pool": "max pooling: over planes one byte per result, whatever the bits",
    "conv": "convolutions",
    "batch_norm": "batch normalization",
    "compiled": "what a graph of torch.compile saves, whatever its operators",
    "checkpoint": "inputs of modules that are computed again, and of torch.utils.checkpoint",
    "other": "all other operators of PyTorch; of those whose derivatives bear no rounding, such as amax, div and log, "
    "nothing is compressed, whatever the bits, and of sin, cos and losses only where this is named",
    "custom": "autograd functions of users and of other libraries",
}


@dataclass(frozen=True)
class ActivationPolicy:
    """How many bits each saved tensor is kept in, and how the range of its codes is found.

    Attributes:
        bits: for all that is not named below: 8, 4, 2, or "off" to keep tensors as PyTorch does. Layer normalization
            keeps 8 bits if this is 4 or 2, unless it is named: it would cause most of the error, and has few of the
            bytes.
        operators: operator → bits; see :data:`OPERATORS`. An RMS norm that a model writes out, x · rsqrt(mean of x² +
            ε), is "layer_norm", unless "other" is named and "layer_norm" is not; where "other" is off, so is it.
            Autograd functions of users and of other libraries ("custom") are off unless named: rounding might spoil
            their gradients. A tensor that several operators save is kept once, in the bits of the first operator,
            unless a later one has more.
        modules: pattern of module names → bits. Names are as in ``model.named_modules()``; ``*`` matches anything, and
            ``[0-3]`` one of these characters. A pattern with ``:operator`` behind it applies to that operator only. The
            last pattern that matches decides. "custom" must be named here, too. "checkpoint": nothing that these
            modules and the modules inside of them compute is kept; backward runs them again from their inputs, as
            :func:`torch.utils.checkpoint.checkpoint` does. The inputs are kept in the bits of the operator "checkpoint"
            there, or in the bits given with it, as in "checkpoint:bits=8". The model itself is a module, too: its name
            is "", and "*" matches it.
        min_numel: tensors with fewer elements are kept unchanged.
        granularity: which elements share a range. ``group``: those of an attention head, or of a group of channels; for
            an input that a checkpoint keeps, those of a row or of an even part of it, at most 256. ``layer``: the whole
            tensor. A number, a multiple of 8: so many neighbours in memory. Ranges of rows and neighbours are computed
            for every tensor and kept beside its codes, 8 bytes each, without a check for outliers. Graphs of
            ``torch.compile`` always use neighbours: 256, unless there is a number here.
        heads: the number of attention heads; None: the module's own ``num_heads``, ``n_head``, …
        groups: the number of groups of channels where there are no heads; None: as many as heads (8 without attention).
            If channels lie side by side in memory and each is a group, codes take whole bytes, whatever the bits.
        statistics: ``running``: ranges are estimated from all batches so far, equations 6 and 7 of the paper;
            ``sample``: ranges are computed for every sample and kept beside it.
        decay: the decay of running estimates, the paper's μ; 0 uses every batch's own range. A batch is quantized with
            the estimates before it, which saves a pass, unless it moves an end by more than 2 % of the width.
        symmetric: make ranges as wide below zero as above.
        rounding: ``stochastic`` (equation 4) is unbiased; ``nearest`` has smaller errors in single elements.
        derive: do not keep the results of GELU, SiLU, ReLU, layer, RMS and batch normalization; backward recomputes
            them from their inputs, if these have at least as many bits. The input of layer normalization is then kept
            in its normalized form, and each channel of batch normalization's input has its own range. The paper does
            not do this; ``derive=False`` turns it off.

    Raises:
        ValueError: an operator or a number of bits does not exist, a number is out of its range, or "checkpoint" is
            given for something else than modules.

    Example:
        >>> ActivationPolicy(bits=4, operators={"softmax": 8}, modules={"head": "off"}).bits_for(
        ...     "softmax", "blocks.3.attn"
        ... )
        8

    Source: Pan et al. 2021, Mesa (arXiv 2111.11124), section 3.2.
    """

    bits: Bits = 8
    operators: Mapping[str, Bits] = field(default_factory=dict)
    modules: Mapping[str, ModuleBits] = field(default_factory=dict)
    min_numel: int = 4096
    granularity: Literal["group", "layer"] | int = "group"
    heads: int | None = None
    groups: int | None = None
    statistics: Literal["running", "sample"] = "running"
    decay: float = 0.9
    symmetric: bool = False
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    derive: bool = True

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, plain_number(getattr(self, each.name)))  # the dataclass is frozen
        for field_, value in (("operators", self.operators), ("modules", self.modules)):
            if not isinstance(value, Mapping):
                raise ValueError(f'{field_}={value!r} must be a dictionary of bits by name, such as {{"softmax": 4}}')
            object.__setattr__(self, field_, {name: plain_number(bits) for name, bits in value.items()})
        for name in self.operators:
            _check_name("operator", name, OPERATORS)
        for pattern in self.modules:
            _, colon, operator = pattern.partition(":")
            if colon:
                _check_name("operator", operator, OPERATORS)
            _check(pattern, self.modules[pattern], Bits if colon else ModuleBits)
        for where, bits in (("bits", self.bits), *self.operators.items()):
            _check(where, bits, Bits)
        for name, choices in (("statistics", ("running", "sample")), ("rounding", ("stochastic", "nearest"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        for name in ("min_numel", "heads", "groups"):
            value = getattr(self, name)
            if value is None and name != "min_numel":
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
        self._check_granularity()
        if not isinstance(self.derive, bool):
            raise ValueError(f"derive={self.derive!r} must be True or False")
        if type(self.decay) not in (int, float) or not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r} must be at least 0 and below 1")

    def _check_granularity(self) -> None:
        given = self.granularity
        if given in ("group", "layer"):
            return
        if type(given) is not int or given < 8 or given % 8:
            raise ValueError(
                f"granularity={given!r} must be 'group', 'layer', or a number of neighbours that is a multiple of 8"
            )
        if given > self.min_numel:
            raise ValueError(
                f"granularity={given} must not be above min_numel={self.min_numel}: smaller tensors would be padded. "
                "Raise min_numel, or lower granularity"
            )

    @functools.cached_property
    def neighbours(self) -> int | None:
        """How many neighbouring elements share a range; None: ranges belong to heads, groups or layers."""
        return self.granularity if isinstance(self.granularity, int) else None

    @functools.cached_property
    def learns(self) -> bool:
        """Whether ranges are running estimates over batches, and not computed for every tensor."""
        return self.statistics == "running" and self.neighbours is None

    def bits_for(self, operator: str, module: str) -> Bits:
        """Return the bits for the tensors that an operator saves in the module of that name."""
        usual: Bits = self.operators.get(operator, self._unnamed(operator))
        unnamed = operator == "custom" and usual == "off"  # patterns without an operator then do not apply to it
        for pattern, bits in reversed(list(self.modules.items())):
            name, _, only = pattern.partition(":")
            if not fnmatch.fnmatchcase(module, name):
                continue
            if _recomputes(bits):
                _, _, inputs = f"{bits}".partition(":bits=")
                if inputs and operator == "checkpoint":
                    return cast("Bits", int(inputs))
                continue
            if only == operator or (not only and not unnamed):
                return cast("Bits", bits)
        return usual

    def names(self, operator: str, module: str) -> bool:
        """Whether the entry that decides about an operator in a module names the operator explicitly."""
        for pattern in reversed(list(self.modules)):
            name, colon, only = pattern.partition(":")
            if only in ("", operator) and fnmatch.fnmatchcase(module, name) and not _recomputes(self.modules[pattern]):
                return bool(colon)
        return operator in self.operators

    def counts_as_norm(self, module: str) -> bool:
        """Whether an RMS norm that the module of that name writes out has the bits of layer normalization.

        It has those of "other" where the policy names "other", and does not name "layer_norm".
        """
        return self.names("layer_norm", module) or not self.names("other", module)

    def checkpoints(self, module: str) -> bool:
        """Whether backward recomputes the module of that name."""
        whole = (pattern for pattern in reversed(list(self.modules)) if ":" not in pattern)
        last = next((pattern for pattern in whole if fnmatch.fnmatchcase(module, pattern)), None)
        return last is not None and _recomputes(self.modules[last])

    def _unnamed(self, operator: str) -> Bits:
        """Return the bits of an operator that no entry names."""
        if operator == "custom":
            return "off"
        return 8 if operator == "layer_norm" and self.bits in (4, 2) else self.bits

    def check(self, modules: Iterable[str]) -> None:
        """Raise ValueError where a pattern matches none of these module names."""
        names = list(modules)
        for pattern in self.modules:
            wanted = pattern.partition(":")[0]
            if not fnmatch.filter(names, wanted) and wanted not in names:
                close = get_close_matches(wanted, names, n=3)
                hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
                raise ValueError(f"modules: {wanted!r} matches no module of the model{hint}")

    @property
    def is_off(self) -> bool:
        """Whether the policy compresses nothing, whatever the model."""
        return {self.bits, *self.operators.values(), *self.modules.values()} == {"off"}

    # ---- as data -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from the default; :meth:`from_dict` is the inverse."""
        default = ActivationPolicy()
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in asdict(self).items()
            if value != getattr(default, name)
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ActivationPolicy:
        """Make a policy from the dictionary that a TOML file holds.

        Raises:
            ValueError: a key does not exist, or a value is not valid.
        """
        for key in values:
            _check_name("key", key, [f.name for f in fields(cls)])
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> ActivationPolicy:
        """Read a TOML file.

        Raises:
            ValueError: the file is not valid TOML, or not a valid policy; the message names the file.
        """
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            return cls.from_dict(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_toml(self) -> str:
        """Return the policy as TOML, which :meth:`load` reads."""
        values = self.to_dict()
        tables = {name: values.pop(name) for name in ("operators", "modules") if name in values}
        lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{_toml(key)} = {_toml(value)}" for key, value in table.items())]
        return "\n".join(lines).strip() + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # the only character that TOML escapes and JSON does not
    return str(value).lower()


def _recomputes(bits: ModuleBits) -> bool:
    return f"{bits}".startswith("checkpoint")


def _check(where: str, bits: Any, kind: Any) -> None:
    if type(bits) in (int, str) and bits in get_args(kind):  # 8.0 == 8
        return
    if bits in get_args(ModuleBits) and _recomputes(bits):
        raise ValueError(
            f'{where}={bits!r}: only whole modules can be recomputed, such as modules={{"blocks.*.mlp": "checkpoint"}}'
        )
    modules = ', or for modules "checkpoint" or "checkpoint:bits=8" (4, 2)' if kind is ModuleBits else ""
    raise ValueError(f'{where}={bits!r} must be 8, 4, 2 or "off"{modules}')


def _check_name(what: str, name: str, there: Iterable[str]) -> None:
    names = list(there)
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"unknown {what} {name!r}{hint} Valid names: {', '.join(names)}")
