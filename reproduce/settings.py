"""Describe every hyper-parameter of a row in words, for its page. All come from the row's record, so none is lost."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reproduce.pretrained import PRETRAINING
from reproduce.row import BETA2, DROPS, MUON_ADAMW_LR, WARM_UP
from reproduce.tasks import in_words

__all__ = ["in_common", "settings"]

#: AdamW's default, because no row sets it.
_EPSILON: float = inspect.signature(torch.optim.AdamW).parameters["eps"].default


def settings(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row's settings: name of the setting → its value in words. What the row did not record is left out.

    Args:
        row: a row that :func:`reproduce.training.run` returned.

    Example:
        >>> settings({"optimizer": "sgd", "momentum": 0.9, "nesterov": False})
        {'optimizer': 'SGD, momentum 0.9'}
    """
    return {
        name: words(row)
        for name, (needs, words) in _WORDS.items()
        if all(field in row for field in needs) and words(row)
    }


def in_common(rows: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the settings that all rows share, and for each row its other settings.

    Example:
        >>> in_common([{"batch": "128", "epochs": "10"}, {"batch": "64", "epochs": "10"}])
        ({'epochs': '10'}, [{'batch': '128'}, {'batch': '64'}])
    """
    shared = {name: value for name, value in rows[0].items() if all(row.get(name) == value for row in rows)}
    return shared, [{name: value for name, value in row.items() if name not in shared} for row in rows]


def _optimizer(row: Mapping[str, Any]) -> str:
    momentum = f"momentum {row['momentum']:g}"
    nesterov = " (Nesterov's)" if row["nesterov"] else ""
    beta2 = row.get("beta2", BETA2)
    return {
        "sgd": f"SGD, {momentum}{nesterov}",
        "dgc": f"SGD, {momentum}{nesterov} on each rank, before compression",
        "adamw": f"AdamW, β₁ {row['momentum']:g}, β₂ {beta2:g}, ε {_EPSILON:g}",
        "muon": (
            f"Muon, {momentum}, for matrices of blocks; AdamW, β₁ 0.9, β₂ {beta2:g}, learning rate {MUON_ADAMW_LR:g}, "
            "for the rest"
        ),
    }[row["optimizer"]]


def _rate(row: Mapping[str, Any]) -> str:
    if row["schedule"] == "half-cosine":
        return f"{row['lr']:g} at first, falls along a cosine to half of it"
    rises = f"rises to {row['lr']:g} over the first {WARM_UP:.0%} of steps"
    if row["schedule"] == "cosine":
        return f"{rises}, then falls along a cosine to zero"
    falls = (f"{0.1**times:g} times that from {drop:.0%} on" for times, drop in enumerate(DROPS, 1))
    return f"{rises}; {', '.join(falls)}"


def _pretraining(row: Mapping[str, Any]) -> str:
    before = "diverged" if row["score_before"] is None else f"{row['score_before']:.2f}"
    return (
        f"on the second of these, {PRETRAINING.words()}; {row['metric']} before fine-tuning {before} (seed "
        f"{row['seed']})"
    )


def _small(row: Mapping[str, Any]) -> str:
    which = "norms and biases" + (f", and tensors below {row['min_numel']:,} elements" if row["min_numel"] > 1 else "")
    how = {
        "uncompressed": "uncompressed",
        "dense": "uncompressed",  # the name of "uncompressed" in the oldest records
        "fused": "as one vector, compressed like a layer",
    }
    return f"{which}: " + how.get(row["small"], f"as one vector, by {row['small']}")


def _policy(row: Mapping[str, Any]) -> str:
    if not row["policy"] or row["policy"] == "uniform":
        return ""
    said = f"{row['policy']}, once an epoch, of {row['spec']}"
    if row["high"]:
        said += f", and {row['high']} outside of critical regimes"
    choices = row.get("choices", "").split()
    return said + (f", with {len(choices)} choices from {choices[0]} to {choices[-1]}" if choices else "")


def _clipping(row: Mapping[str, Any]) -> str:
    return "none" if row["clip"] is None else f"at norm {row['clip']:g}"


def _updates(row: Mapping[str, Any]) -> str:
    if not row["updates"]:
        return ""
    when = "in every step" if row["updates"] == 1 else f"after every {row['updates']} steps"
    if row["outer"] == "nesterov":
        outer = "an outer SGD, learning rate 0.7, Nesterov's momentum 0.9"
    elif row["outer"] == "auto":
        outer = "an outer length that is measured"
    else:
        outer = f"an outer length of {float(row['outer']):g}"
    said = f"updates, {when}, with {outer}"
    fragments, overlap = row.get("fragments", 1), row.get("overlap", 0)
    if row.get("residuals", "apart") == "in-place":
        said += ", residuals in place"
    if fragments > 1:
        said += f", in {fragments} fragments in turn"
    return said + (f", on their way for {_count(overlap, 'step')}" if overlap else "")


def _replicas(row: Mapping[str, Any]) -> str:
    if row.get("gathered"):
        return f"one, of {row['nodes']} ranks, sharded by FSDP2"
    shards = row.get("shards", 1)
    return "" if shards == 1 else f"{row['nodes'] // shards} of {shards} ranks each, sharded by FSDP2"


def _gathered(row: Mapping[str, Any]) -> str:
    if row["gathered"] in ("", "none"):
        return row["gathered"] and "as they are"
    return f"{'differences' if row['references'] else 'parameters themselves'}, {row['gathered']}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


#: Setting → the fields that it needs, and a function from them to words; an empty string means that there is none.
_WORDS: dict[str, tuple[tuple[str, ...], Any]] = {
    **{
        what: (
            ("task", "depth"),
            lambda row, what=what: in_words(row["task"], row["depth"], row.get("width", 0)).get(what, ""),
        )
        for what in ("model", "windows", "augmentation")
    },
    "optimizer": (("optimizer", "momentum", "nesterov"), _optimizer),
    "learning rate": (("lr", "schedule"), _rate),
    "weight decay": (("weight_decay",), lambda row: f"{row['weight_decay']:g}"),
    "global batch": (("batch",), lambda row: f"{row['batch']}"),
    "clipping of averaged gradients": (("clip",), lambda row: "" if row.get("updates") else _clipping(row)),
    "clipping of each rank's gradients": (("clip", "updates"), lambda row: _clipping(row) if row["updates"] else ""),
    "averaged": (("updates", "outer"), _updates),
    "replicas": (("updates", "nodes"), _replicas),
    "collective": (("collective",), lambda row: "" if row["collective"] == "auto" else row["collective"]),
    "parameters gathered": (("gathered", "references"), _gathered),
    "length": (("epochs",), lambda row: _count(row["epochs"], "epoch")),
    "compression's warm-up": (
        ("warmup_epochs",),
        lambda row: _count(row["warmup_epochs"], "epoch") if row["warmup_epochs"] else "none",
    ),
    "small tensors": (
        ("small", "min_numel", "forward", "activations"),
        lambda row: "" if row["forward"] or row["activations"] else _small(row),
    ),
    "policy": (("policy", "high", "spec"), _policy),
    "arithmetic": (
        ("amp",),
        lambda row: "forward and loss under bfloat16 autocast, scores in float32" if row["amp"] else "",
    ),
    "uncompressed at first": (("delay",), lambda row: f"{row['delay']:.0%} of steps" if row["delay"] else ""),
    "samples": (
        ("limit",),
        lambda row: (
            "" if row["limit"] is None else f"no more than the first {row['limit']:,} to train on, and to judge by"
        ),
    ),
    "data": (("data",), lambda row: str(row["data"])),
    "pre-training": (("score_before", "metric", "seed"), _pretraining),
}
