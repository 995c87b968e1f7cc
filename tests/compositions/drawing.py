"""Compositions: a model, what wraps it, an optimizer, a spec and options, drawn from a seed.

A composition is written in one line, and read from it::

    >>> str(draw(7))  # doctest: +SKIP
    'place=gradients seed=7 model=tied spec=topk:density=0.1+ef optimizer=adamw steps=5 save=2 small=fused'

Options that have their default are left out, so a line can be shortened by hand until it shows only what breaks.
"""

from __future__ import annotations

import ast
import random
from typing import Any

from narrowband.collectives import collective
from narrowband.errors import UnsupportedError
from narrowband.feedback import compression
from tests.compositions.models import MODELS

__all__ = ["KEYWORDS", "OPTIONS", "PLACES", "Composition", "draw"]

#: Every place that compresses between ranks; activations may be compressed beside any of them.
PLACES = ("gradients", "updates", "shards", "stages", "coded")

#: What is not written in a composition.
DEFAULTS = {
    "seed": 0, "size": 2, "model": "mlp", "spec": "none", "optimizer": "sgd", "steps": 4,
    "accumulate": 1, "clip": False, "dtype": "float32", "activations": False, "compiled": False, "channels_last": False,
    "schedule": False, "frozen": (), "pause": False, "layers": False, "policy": None, "bad": None, "bad_rank": 0,
    "bad_in": "loss", "save": None, "wrapper": "module",
    "find_unused_parameters": False, "static_graph": False, "gradient_as_bucket_view": False, "bucket_cap_mb": 25.0,
    "every": 1, "outer": 1.0, "fragments": 1, "overlap": 0, "residuals": "apart", "buffers": "average",
    "parameters": "none", "reshard_after_forward": True, "mixed": False, "units": False, "evaluates": False,
    "marks_last": True,
    "forward": "none", "backward": "none", "schedule_name": "GPipe", "microbatches": 4, "inside": None,
    "redundancy": 2, "group": None, "bits": 32, "shares": None, "dropout": False,
}  # fmt: skip

#: Options that are arguments of the place's function, by the same name.
KEYWORDS = {
    "gradients": (
        "min_numel", "warmup_steps", "collective", "small", "message_nbytes", "early_nbytes",
    ),
    "updates": (
        "min_numel", "warmup_rounds", "collective", "small", "every", "outer", "buffers", "fragments", "split",
        "overlap", "alpha", "residuals", "offload", "check_every",
    ),
    "shards": ("min_numel", "references"),
    "stages": ("warmup_steps",),
    "coded": ("redundancy", "group", "bits", "shares"),
}  # fmt: skip

_SMALL = ("fused", "fused", "fp16", "bf16", "uniform:bits=8", "topk:density=0.1", "randomk:density=0.5")
_LOOP = {"clip": (True,), "schedule": (True,)}
_ACCUMULATES, _SAVES = {"accumulate": (2, 3)}, {"activations": (True,)}
_MODEL = {"dtype": ("bfloat16", "float16", "float64"), "channels_last": (True,), "compiled": (True,)}
_HANDLE = {
    "pause": (True,), "layers": (True, True), "min_numel": (1, 100, 5000, 10**9), "small": _SMALL,
    "collective": ("all_gather", "all_gather", "scatter_reduce", "sparse_reduce", "all_reduce"),
    "policy": ("lgreco", "kmeans", "topk", "threshold", "accordion"),
}  # fmt: skip

#: Place → option → values other than its default, one of which it may have.
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gradients": {
        **_LOOP, **_ACCUMULATES, **_SAVES, **_MODEL, **_HANDLE,
        "wrapper": ("ddp", "ddp", "ddp", "averager", "sharded", "nodes"), "frozen": ((1, 3),), "warmup_steps": (1, 3),
        "message_nbytes": (64, 4096), "early_nbytes": (64, 1 << 20),
        "find_unused_parameters": (True,), "static_graph": (True,), "gradient_as_bucket_view": (True,),
        "bucket_cap_mb": (0.001, 0.01),
    },
    "updates": {
        **_LOOP, **_SAVES, **_MODEL, **_HANDLE,
        "wrapper": ("ddp", "sharded"), "frozen": ((1, 3), (2, 9)), "warmup_rounds": (1, 2), "every": (2, 3, 5),
        "outer": ("nesterov", "auto", 0.7), "buffers": ("keep",), "fragments": (2, 3), "split": ("layers",),
        "overlap": (1, 2), "alpha": (0.25, 1.0), "residuals": ("in-place",), "offload": (True,), "check_every": (1, 3),
    },
    "shards": {
        **_LOOP, **_ACCUMULATES, "compiled": (True,), "min_numel": (1, 100), "references": (False,),
        "reshard_after_forward": (False,), "mixed": (True,), "units": (True,), "evaluates": (True,),
        "marks_last": (False,),
    },
    "stages": {
        "schedule": (True,), **_SAVES, "warmup_steps": (1, 2),
        "schedule_name": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), "microbatches": (2,), "evaluates": (True,),
        "inside": ("ddp", "module", "compressed-ddp", "compressed-module"),
    },
    "coded": {
        **_LOOP, **_ACCUMULATES, **_SAVES, "redundancy": (1, 3), "group": (2,), "bits": (16, 8),
        "shares": ("uneven",), "dropout": (True,),
    },
}  # fmt: skip

#: How often an option has another value than its default.
_CHANCE = 0.22
_OFTEN = {"wrapper": 0.8, "every": 0.7, "save": 0.75, "small": 0.4, "layers": 0.35, "units": 0.5, "inside": 0.5}
_OFTEN |= {"schedule_name": 0.7, "compiled": 0.08, "policy": 0.12, "dtype": 0.2, "redundancy": 0.4}

_OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw", "adafactor", "groups", "two")


class Composition(dict[str, Any]):
    """Option → value. An option that is not there has its default."""

    def __missing__(self, option: str) -> Any:
        return DEFAULTS.get(option)

    def keywords(self) -> dict[str, Any]:
        """Arguments of the place's function; those with defaults are left out."""
        return {name: self[name] for name in KEYWORDS[self["place"]] if name in self}

    def __str__(self) -> str:
        return " ".join(f"{name}={str(value).replace(' ', '')}" for name, value in self.items())

    @classmethod
    def parse(cls, line: str) -> Composition:
        """The composition of a line.

        Raises:
            KeyError: an option that no place has.
        """
        found = cls({name: _value(text) for name, text in (word.split("=", 1) for word in line.split())})
        known = {"place", *DEFAULTS, *(name for names in KEYWORDS.values() for name in names)}
        if unknown := found.keys() - known:
            raise KeyError(", ".join(sorted(unknown)))
        return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word, or a spec
        return text


def draw(seed: int, place: str | None = None) -> Composition:
    """The composition of a seed; of a place, if one is given."""
    dice = random.Random(seed)
    chosen = dice.choice(PLACES[:2] * 3 + PLACES[2:])
    c = Composition(place=place or chosen, seed=seed, size=dice.choice((2, 2, 3, 4)))
    c["model"], c["spec"], c["optimizer"] = dice.choice(MODELS), _spec(dice), dice.choice(_OPTIMIZERS)
    c["steps"] = dice.randint(3, 8 if c["place"] == "gradients" else 11)
    if dice.random() < _OFTEN["save"]:
        c["save"] = dice.randint(1, c["steps"] - 1)
    if dice.random() < 0.5:
        c["bad"], c["bad_rank"] = dice.randint(0, 3), dice.randint(0, 3)
        c["bad_in"] = dice.choice(("loss", "element"))
    for option, values in OPTIONS[c["place"]].items():
        if dice.random() < _OFTEN.get(option, _CHANCE):
            c[option] = dice.choice(values)
    _of_place[c["place"]](c, dice)
    return Composition({name: value for name, value in c.items() if value != DEFAULTS.get(name)})


def _spec(dice: random.Random, *, feedback: bool = True) -> str:
    """A spec for gradients or updates."""
    codec = dice.choice(("uniform", "uniform", "qsgd", "sign", "topk", "topk", "threshold", "randomk", "lowrank",
                         "powersgd", "dgc", "none", "fp16", "bf16"))  # fmt: skip
    behind = dice.choice(("+ef",) * 6 + ("+ef:store=bf16", "+ef:store=int8", "+ef21", "", "+ef-mixed"))
    if behind == "+ef-mixed" and codec != "topk":
        behind = "+ef"
    keys = {
        "uniform": lambda: f":bits={dice.randint(2, 8)},group={dice.choice((16, 64, 128, 1000))}"
        + dice.choice(("", ",symmetric=true", ",rounding=stochastic")),
        "qsgd": lambda: f":bits={dice.randint(2, 8)},bucket={dice.choice((16, 128, 512))}"
        + dice.choice(("", ",norm=l2")),
        "sign": lambda: f":bucket={dice.choice((32, 512))}",
        "topk": lambda: f":density={dice.choice((0.01, 0.1, 0.5, 1.0))}"
        + dice.choice(("", "", ",select=sampled", ",values=int8", ",values=int2", ",values=fp16", ",indices=int32",
                       ",tile=16x16", ",mean=senders")),
        "threshold": lambda: f":value={dice.choice((0.0001, 0.01, 1.0))}",
        "randomk": lambda: f":density={dice.choice((0.05, 0.3))}",
        "lowrank": lambda: f":rank={dice.randint(1, 6)},iterations={dice.randint(1, 2)}",
        "powersgd": lambda: f":rank={dice.randint(1, 6)}"
        + dice.choice(("", ",iterations=2", ",warm_start=false", ",halves=3", ",min_ratio=1.0")),
        "dgc": lambda: f":density={dice.choice((0.001, 0.05))},momentum=0.9"
        + dice.choice(("", ",nesterov=true", ",masking=false", ",select=sampled", ",warmup_steps=4")),
    }.get(codec, str)()  # fmt: skip
    return codec + keys + ("" if codec in ("powersgd", "dgc") or not feedback else behind)


# ---- what cannot be combined -----------------------------------------------------------------------------------------


def _drop(c: Composition, *options: str) -> None:
    for option in options:
        c.pop(option, None)


def _of_averages(c: Composition, dice: random.Random) -> None:
    """What gradients and updates refuse alike."""
    try:
        feedback = compression(c["spec"]).feedback
    except (ValueError, UnsupportedError):  # settings that exclude each other
        c["spec"] = "topk:density=0.1+ef"
        feedback = compression(c["spec"]).feedback
    name = c["spec"].split(":")[0].split("+")[0]
    if name in ("powersgd", "dgc"):
        _drop(c, "collective")
    if name == "powersgd" and c["small"] == "fused":
        c["small"] = "uniform:bits=8"
    if c["collective"] is not None and not _carries(c["collective"], c["spec"]):
        c["collective"] = "all_gather"
    if c["collective"] and c["small"] not in (None, "fused") and not _carries(c["collective"], c["small"]):
        c["small"] = "fused"
    if feedback is not None and feedback.incremental:
        _drop(c, "policy")
        if c["small"] is not None:
            c["small"] = "fused"
    if c["policy"] is not None:
        _drop(c, "layers", "collective")
        if c["policy"] in ("lgreco", "kmeans") and name not in ("uniform", "qsgd", "topk", "powersgd"):
            c["spec"] = "uniform:bits=4+ef"
    if c["model"] != "convolutions":
        _drop(c, "channels_last")
    if c["dtype"] != "float32":
        _drop(c, "activations")
    if c["model"] == "sparse":  # its gradients are compressed by nobody, and need no feedback
        c["model"] = (
            "sparse"
            if feedback is None and name not in ("powersgd",) and c["wrapper"] in ("ddp", "module", "averager")
            else "words"
        )
    if c["model"] == "odd" and c["optimizer"] == "adafactor":  # PyTorch's divides by the number of elements
        c["optimizer"] = "adamw"
    if c["model"] == "sparse":
        c["optimizer"] = "sgd"
        c["dtype"] = "bfloat16" if c["dtype"] == "float16" else c["dtype"]  # PyTorch cannot add these up
        _drop(c, "clip", "policy", "layers", "activations", "compiled", "frozen")
    if c["clip"] and c["dtype"] == "float16":
        _drop(c, "clip")


def _carries(name: str, spec: str) -> bool:
    chosen = compression(spec)
    return collective(name).obstacle(chosen.codec, chosen.feedback) is None


def _of_gradients(c: Composition, dice: random.Random) -> None:
    if c["spec"].startswith("dgc"):
        c["optimizer"] = "sgd"
        _drop(c, "policy", "layers", "clip")
        c["small"] = dice.choice(("fused", "topk:density=0.1")) if c["small"] else None
    if c["wrapper"] in ("sharded", "nodes"):
        c["size"] = 4
        _drop(c, "compiled")
    _of_averages(c, dice)
    if c["wrapper"] in ("ddp", "nodes"):
        _drop(c, "frozen")
        if c["model"] == "branches":
            c["find_unused_parameters"] = True
        if c["find_unused_parameters"]:
            _drop(c, "small", "static_graph")
        if c["static_graph"]:
            _drop(c, "accumulate", "compiled")
        if c["compiled"]:
            _drop(c, "bucket_cap_mb")  # Dynamo asserts that the first bucket is the smallest
    else:
        _drop(c, "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")
    if c["wrapper"] == "sharded":
        c["model"] = dice.choice(("mlp", "transformer", "reused"))
        _drop(c, "policy", "layers", "channels_last", "activations", "frozen", "clip", "bad_in")
        c["optimizer"] = "adamw" if c["optimizer"] == "adafactor" else c["optimizer"]  # PyTorch's knows no shards
    if c["wrapper"] == "nodes":
        _drop(c, "policy")
    if c["model"] in ("odd", "row"):
        _drop(c, "policy")


def _of_updates(c: Composition, dice: random.Random) -> None:
    if c["spec"].startswith("dgc"):
        c["spec"] = "uniform:bits=2+ef"
    if c["wrapper"] != "module":
        c["size"] = 4
        _drop(c, "compiled", "frozen")
    _of_averages(c, dice)
    every = c["every"]
    if c["fragments"] > 1:
        c["model"] = dice.choice(("mlp", "transformer", "reused"))
        c["fragments"] = min(c["fragments"], every)
        c["min_numel"] = 1
        _drop(c, "policy", "channels_last")
        if c["dtype"] == "float64":  # of which nothing is compressed
            _drop(c, "dtype")
    if c["fragments"] == 1:
        _drop(c, "split")
    if c["overlap"]:
        c["overlap"] = min(c["overlap"], every // c["fragments"])
        _drop(c, "residuals")
    else:
        _drop(c, "alpha")
    if "+ef" not in c["spec"] or "+ef21" in c["spec"] or "+ef-mixed" in c["spec"]:
        _drop(c, "residuals")
    if c["wrapper"] == "sharded":
        c["model"] = dice.choice(("mlp", "transformer", "reused"))
        _drop(c, "policy", "layers", "channels_last", "activations", "clip")
        c["optimizer"] = "adamw" if c["optimizer"] == "adafactor" else c["optimizer"]
    if c["model"] in ("odd", "row"):
        _drop(c, "policy")


def _of_shards(c: Composition, dice: random.Random) -> None:
    c["model"] = dice.choice(("mlp", "transformer", "reused", "tied", "convolutions", "words"))
    c["spec"] = dice.choice(("none", "bf16", "fp16", f"uniform:bits={dice.randint(2, 8)},group=64", "qsgd:bits=6"))
    c["parameters"] = dice.choice(("none", "bf16", "fp16", f"uniform:bits={dice.randint(4, 8)}"))
    c["optimizer"] = dice.choice(("momentum", "adamw", "groups"))
    _drop(c, "bad_in")
    if c["model"] == "convolutions":
        _drop(c, "mixed")  # PyTorch's batch norm takes no other dtype than that of its buffers


def _of_stages(c: Composition, dice: random.Random) -> None:
    for direction in ("forward", "backward"):
        codec = dice.choice(("none", "bf16", "uniform:bits=8", "uniform:bits=4,scope=tensor", "qsgd:bits=4",
                             "topk:density=0.3", "topk:density=0.1,scope=sample", "sign"))  # fmt: skip
        c[direction] = codec + dice.choice(("", "", "+ef", "+ef21", "+aq-sgd" if direction == "forward" else ""))
    if c["forward"].startswith("topk") and "+" not in c["forward"] and dice.random() < 0.5:
        c["backward"] = c["forward"] + ",reuse=forward"
    c["optimizer"] = dice.choice(("sgd", "momentum", "adamw", "adafactor"))
    _drop(c, "spec", "model", "bad", "bad_rank", "bad_in")
    if c["size"] > 2 and not c["inside"]:
        _drop(c, "microbatches")  # no fewer than stages
    if c["schedule_name"] == "ZBVZeroBubble" and c["inside"] and "ddp" in c["inside"]:
        c["inside"] = "compressed-module"
    if c["inside"]:
        c["size"] = 4
        c["spec"] = dice.choice(("topk:density=0.2+ef", "qsgd:bits=4", "powersgd:rank=2", "uniform:bits=2+ef"))
        _drop(c, "activations")


def _of_coded(c: Composition, dice: random.Random) -> None:
    c["model"] = dice.choice(("mlp", "transformer", "reused", "tied", "row"))
    if c["model"] == "tied":
        _drop(c, "bad", "bad_rank")  # a bad sample holds inf, and words cannot
    _drop(c, "bad_in")
    c["redundancy"] = min(c["redundancy"], c["size"] - 1) or 1
    if c["group"] is not None:
        c["group"] = 2 if c["size"] % 2 == 0 and c["redundancy"] <= 2 else None
    if c["shares"]:
        c["shares"] = (
            (2.0,) + (1.5,) * (c["size"] - 1) if c["group"] is None and c["redundancy"] < c["size"] - 1 else None
        )
    if c["group"] is None:
        _drop(c, "bits")
    c["optimizer"] = dice.choice(("sgd", "momentum", "adamw", "groups", "adafactor"))
    _drop(c, "spec")


_of_place = {
    "gradients": _of_gradients, "updates": _of_updates, "shards": _of_shards, "stages": _of_stages, "coded": _of_coded,
}  # fmt: skip
