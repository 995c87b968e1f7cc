"""Every hyper-parameter of a row in words, for its page: made of what the row recorded, so that none is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reproduce.training import BETA2, DROPS, WARM_UP

__all__ = ["in_common", "settings"]


def settings(row: Mapping[str, Any]) -> dict[str, str]:
    """What a row was trained with: name of the setting → its value in words. What it did not record is left out.

    Args:
        row: what :func:`reproduce.training.run` returns.

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
    """Settings that all rows share, and for each row the others.

    Example:
        >>> in_common([{"batch": "128", "epochs": "10"}, {"batch": "64", "epochs": "10"}])
        ({'epochs': '10'}, [{'batch': '128'}, {'batch': '64'}])
    """
    shared = {name: value for name, value in rows[0].items() if all(row.get(name) == value for row in rows)}
    return shared, [{name: value for name, value in row.items() if name not in shared} for row in rows]


def _optimizer(row: Mapping[str, Any]) -> str:
    momentum = f"momentum {row['momentum']:g}"
    nesterov = " (Nesterov's)" if row["nesterov"] else ""
    return {
        "sgd": f"SGD, {momentum}{nesterov}",
        "dgc": f"SGD, {momentum}{nesterov} on each rank, before compression",
        "adamw": f"AdamW, β₁ {row['momentum']:g}, β₂ {BETA2:g}",
    }[row["optimizer"]]


def _rate(row: Mapping[str, Any]) -> str:
    rises = f"{row['lr']:g}, which it rises to over the first {WARM_UP:.0%} of steps"
    if row["schedule"] == "cosine":
        return f"{rises}, then falls from along a cosine to zero"
    after = " and ".join(f"{drop:.0%}" for drop in DROPS)
    return f"{rises}, a tenth of it after {after} of steps each"


def _small(row: Mapping[str, Any]) -> str:
    which = "norms and biases" + (f", and tensors below {row['min_numel']:,} elements" if row["min_numel"] > 1 else "")
    how = {"uncompressed": "uncompressed", "fused": "as one vector, compressed like a layer"}
    return f"{which}: " + how.get(row["small"], f"as one vector, by {row['small']}")


def _policy(row: Mapping[str, Any]) -> str:
    if not row["policy"]:
        return ""
    high = f", and {row['high']} outside of critical regimes" if row["high"] else ""
    return f"{row['policy']}, once an epoch, with {row['spec']} as its reference{high}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


#: Setting → the fields that it needs, and what it says of them; an empty string where there is nothing to say.
_WORDS: dict[str, tuple[tuple[str, ...], Any]] = {
    "optimizer": (("optimizer", "momentum", "nesterov"), _optimizer),
    "learning rate": (("lr", "schedule"), _rate),
    "weight decay": (("weight_decay",), lambda row: f"{row['weight_decay']:g}"),
    "global batch": (("batch",), lambda row: f"{row['batch']}"),
    "clipping": (
        ("clip",),
        lambda row: (
            "none of averaged gradients" if row["clip"] is None else f"averaged gradients at norm {row['clip']:g}"
        ),
    ),
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
    "samples": (
        ("limit",),
        lambda row: (
            "" if row["limit"] is None else f"the first {row['limit']:,} of the data to train on and to judge by"
        ),
    ),
    "data": (("data",), lambda row: str(row["data"])),
}
