"""The settings of a training run: everything that its result depends on.

A finished row is kept under a name that depends on all settings (:func:`key`). So a run that was stopped resumes with
the next row, and a row whose settings changed is trained again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, cast

import narrowband as nb
from narrowband.adapt import search_space
from narrowband.codecs import TopK
from narrowband.collectives import Collective
from narrowband.pipeline import Channel
from narrowband.report.record import versions
from reproduce.activations import read_policy

__all__ = [
    "BETA2",
    "CURVE_POINTS",
    "DROPS",
    "MUON_ADAMW_LR",
    "WARM_UP",
    "Row",
    "Schedule",
    "files_of",
    "key",
    "outer_of",
    "policy_of",
    "resolved",
]

#: Share of steps over which the learning rate rises, before it falls.
WARM_UP = 0.05

#: Shares of steps after which the schedule ``steps`` divides the learning rate by ten.
DROPS = (0.5, 0.8)

#: AdamW's second beta, unless a row sets it.
BETA2 = 0.999

#: AdamW's learning rate for parameters that Muon leaves to AdamW.
MUON_ADAMW_LR = 3e-3

#: Points per epoch of the curve of training losses.
CURVE_POINTS = 10

#: Task → files that it reads.
_FILES = {
    "cifar": ("cifar10/train.parquet", "cifar10/test.parquet"),
    "lstm": ("tinyshakespeare/input.txt",),
    "llama": ("tinyshakespeare/input.txt",),
    "shakespeare": ("tinyshakespeare/input.txt",),
    "gpt": ("wikitext2/validation.parquet", "wikitext2/test.parquet"),
    "tuned": ("wikitext2/validation.parquet", "wikitext2/test.parquet", "tinyshakespeare/input.txt"),
    "vit": ("cifar10/train.parquet", "cifar10/test.parquet"),
}


#: How a learning rate falls.
Schedule: TypeAlias = Literal["cosine", "steps", "half-cosine"]


@dataclass(frozen=True)
class Row:
    """Settings of one training run.

    Attributes:
        task: cifar, lstm, llama, shakespeare, gpt, tuned or vit.
        name: name of the row in tables.
        spec: for ``nb.compress_gradients``, or for ``nb.compress_updates`` if ``updates`` is set. ``{warmup}`` in it
            becomes the number of steps in ``warmup_epochs``.
        seed: of parameters, order of samples and codecs.
        optimizer: ``sgd`` and ``adamw`` are PyTorch's, and work on averages. ``dgc`` is ``nb.DGCSGD``, whose momentum
            is part of the compression. ``muon`` is PyTorch's Muon for the matrices of blocks, with AdamW at
            :data:`MUON_ADAMW_LR` for the rest.
        epochs: passes over the data.
        lr: peak learning rate.
        batch: global batch size.
        momentum: of SGD and Muon; AdamW's first beta.
        beta2: AdamW's second beta.
        nesterov: whether to use Nesterov momentum.
        weight_decay: of all parameters.
        clip: norm above which averaged gradients are scaled down to it, or each rank's own gradients if they are not
            averaged; None: never. A spec can clip before sending.
        warmup_epochs: epochs in which the compression warms up.
        min_numel: tensors with fewer elements are small, as are biases and norms.
        small: how small tensors travel: uncompressed, together as one vector that is compressed like a layer, or as one
            vector with a codec of their own.
        depth: of the ResNet.
        width: of the GPT of shakespeare and gpt; 0: the task's width.
        limit: use at most this many samples; None: all.
        policy: policy that plans for every layer, once an epoch, with ``spec`` as its reference (see
            :func:`policy_of`); empty: none.
        high: for Accordion, the spec of the high compression level.
        choices: for L-GreCo and k-means, the specs that layers may get, separated by spaces; empty: those around
            ``spec`` that the paper searches.
        delay: share of steps before compression begins. Until then everything travels uncompressed; the policy decides
            first at their end. Needs a policy, such as ``uniform``.
        plan: specs of layers from the first step on, as JSON: layer → spec; empty: the row's spec for all layers.
        schedule: how the learning rate falls. ``cosine``: after its rise, along a cosine to zero. ``steps``: after its
            rise, to a tenth after half of the steps, and again after four fifths. ``half-cosine``: from the first step
            on, along a cosine twice as long as training, to half of its peak.
        forward: codec for activations at the boundaries of four stages; empty: there are no boundaries.
        backward: the same for the activations' gradients.
        activations: how activations are kept for backward: an ``nb.ActivationPolicy`` as JSON (its ``to_dict``); empty:
            as PyTorch keeps them, without counting them.
        trace: whether the result has the policy's estimates of ranges over training.
        amp: whether forward and the loss run under bfloat16 autocast. Scores are in float32.
        updates: ranks step by themselves, and their updates are averaged after this many steps; 0: gradients are
            averaged in every step.
        outer: how the mean of updates is applied: with a step length such as ``1.5``, with ``auto``, or by
            ``nesterov``, an outer SGD with the settings of DiLoCo.
        fragments: number of parts of the model whose updates are averaged in turn.
        overlap: steps that ranks take while updates are on their way.
        residuals: where residuals of updates are kept: separately, or in each rank's own parameters.
        isolated: each rank trains by itself on its share of the data, and sends nothing. The score is over all ranks,
            each on its share of the held-out data.
        shards: number of ranks that share one replica, sharded by FSDP2; 1: each rank is a replica.
        gathered: codec with which FSDP2 gathers parameters. All ranks are then one replica, whatever ``shards`` is,
            and ``spec`` is for reducing gradients. Empty: nothing is sharded in this way.
        references: whether differences of parameters are gathered (``nb.compress_shards``).
        collective: how gradients travel; ``auto``: by the collective that sends least.
    """

    task: str
    name: str
    spec: str
    seed: int = 0
    optimizer: Literal["sgd", "dgc", "adamw", "muon"] = "sgd"
    epochs: int = 10
    lr: float = 0.1
    batch: int = 128
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    clip: float | None = None
    warmup_epochs: int = 0
    min_numel: int = 1
    small: str = "uncompressed"
    depth: int = 8
    width: int = 0
    limit: int | None = None
    policy: str = ""
    high: str = ""
    choices: str = ""
    delay: float = 0.0
    plan: str = ""
    schedule: Schedule = "cosine"
    forward: str = ""
    backward: str = ""
    activations: str = ""
    trace: bool = False
    amp: bool = False
    beta2: float = BETA2
    updates: int = 0
    outer: str = "1"
    fragments: int = 1
    overlap: int = 0
    residuals: Literal["apart", "in-place"] = "apart"
    isolated: bool = False
    shards: int = 1
    gathered: str = ""
    references: bool = True
    collective: Collective | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.task not in _FILES:
            raise ValueError(f"task={self.task!r} is none of {', '.join(_FILES)}")
        policy_of(self, 1, 1)
        if not 0 <= self.delay < 1:
            raise ValueError(f"delay={self.delay} is not in [0, 1): it is a share of the steps")
        if self.delay and not self.policy:
            raise ValueError(f"delay={self.delay} needs a policy that begins then: uniform is one")
        for field in ("epochs", "batch"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs} is not below epochs={self.epochs}: bytes are taken in the last "
                "epoch, when warm-up has to be over"
            )
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr} must be above 0")
        if bool(self.forward) != bool(self.backward):
            raise ValueError(
                f"forward={self.forward!r} and backward={self.backward!r} go together; none is a spec, too"
            )
        if self.forward:
            Channel(self.backward, forward=Channel(self.forward))  # checks both; a Boundary also compiles its loops
        if self.activations:
            read_policy(self.activations)
        if self.forward and self.activations:
            raise ValueError("a row has boundaries or keeps activations in few bits: leave out forward or activations")
        if self.updates < 0 or (self.updates and (self.alone or self.policy or self.plan or self.optimizer == "dgc")):
            raise ValueError(
                f"updates={self.updates} is steps from one average of updates to the next; leave out boundaries, "
                "activations, policy, plan and dgc, which are of gradients"
            )
        if self.isolated and (
            self.alone or self.updates or self.policy or self.plan or self.shards > 1 or self.spec != "none"
        ):
            raise ValueError("ranks that train apart send nothing: leave out what compresses, averages or shards")
        if self.width < 0 or (self.width and self.task not in ("shakespeare", "gpt")):
            raise ValueError(
                f"width={self.width} must be 0, or, where a GPT learns from scratch, at least 1: task {self.task}"
            )
        outer_of(self.outer)
        if not self.updates and (self.fragments, self.overlap, self.residuals) != (1, 0, "apart"):
            raise ValueError("fragments, overlap and residuals are of rows whose updates are averaged")
        if bool(self.gathered) != (self.shards > 1 and not self.updates):
            raise ValueError(
                f"gathered={self.gathered!r} is what all ranks gather that are the shards of one replica; with "
                f"shards={self.shards} and updates={self.updates} it is one or the other"
            )
        if self.gathered and (self.alone or self.policy or self.plan or self.optimizer == "dgc"):
            raise ValueError("with gathered leave out boundaries, activations, policy, plan and dgc")
        if self.trace and not self.activations:
            raise ValueError("trace=True notes ranges of activations, and needs activations: a policy as JSON")
        if self.alone and (self.spec != "none" or self.policy):
            raise ValueError(
                f"a row with boundaries or a policy for activations is trained by one process, which averages with "
                f"none: spec={self.spec!r} and policy={self.policy!r} would do nothing"
            )

    @property
    def alone(self) -> bool:
        """Whether one process trains the row alone, without other ranks to send to."""
        return bool(self.forward or self.activations)


def policy_of(row: Row, every: int, total: int) -> nb.Policy | None:
    """Return the policy that plans for the row; None if it has none.

    Args:
        row: the row to train.
        every: steps between two decisions.
        total: steps of training, of which the row's ``delay`` is a share.

    Raises:
        ValueError: the policy does not exist, or lacks the choices, the level or the density that it needs.
    """
    if not row.policy:
        return None
    choices = row.choices.split() or None
    begins = round(row.delay * total)
    made: dict[str, Callable[[], nb.Policy]] = {
        "uniform": lambda: nb.Constant(row.spec, warmup_steps=begins),
        "lgreco": lambda: nb.LGreCo(row.spec, choices, every=every, warmup_steps=begins),
        "kmeans": lambda: nb.KMeans(row.spec, choices, every=every, warmup_steps=begins),
        "accordion": lambda: nb.Accordion(low=row.spec, high=row.high, every=every, warmup_steps=begins),
        "lgreco+accordion": lambda: nb.LGreCo(
            nb.Accordion(low=row.spec, high=row.high, every=every, warmup_steps=begins),
            choices or search_space(row.spec),
            every=every,
            warmup_steps=begins,
        ),
        "global-topk": lambda: _global_topk(row.spec, every, begins),
    }
    if row.policy not in made:
        raise ValueError(f"policy={row.policy!r} is none of {', '.join(made)}")
    return made[row.policy]()


def outer_of(said: str) -> float | Literal["auto", "nesterov"]:
    """Parse a row's outer step of updates: ``nesterov``, ``auto``, or a length.

    Raises:
        ValueError: it is none of these.
    """
    if said in ("auto", "nesterov"):
        return cast("Literal['auto', 'nesterov']", said)
    try:
        return float(said)
    except ValueError:
        raise ValueError(f"outer={said!r} is neither a length, such as 1.5, nor auto, nor nesterov") from None


def _global_topk(spec: str, every: int, begins: int) -> nb.GlobalTopK:
    """Return the policy with the density and the feedback of the spec."""
    codec, feedback = nb.compression(spec).codec, spec.partition("+")[2]
    if not isinstance(codec, TopK) or not feedback:
        raise ValueError(f"policy='global-topk' needs a spec such as topk:density=0.01+ef, not {spec!r}")
    return nb.GlobalTopK(codec.density, feedback, every=every, warmup_steps=begins)


def key(row: Any, nodes: int, digest: str) -> str:
    """Return a file name that changes with everything a row depends on: its fields, the ranks, the data, the versions.

    Fields with their default values do not count, so that fields can be added later.

    Args:
        row: a dataclass that has a task, a name and a seed.
        nodes: number of ranks that train it.
        digest: digest of its data.
    """
    told = {f.name: getattr(row, f.name) for f in fields(row) if getattr(row, f.name) != f.default}
    identity = {"row": told, "nodes": nodes, "data": digest, "curve": CURVE_POINTS, "versions": versions()}
    text = json.dumps(identity, sort_keys=True)
    name = "".join(c if c.isalnum() else "-" for c in f"{row.task}-{row.name}-{row.seed}")
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def files_of(task: str) -> tuple[str, ...]:
    """Return the files of the data folder that a task reads."""
    return _FILES[task]


def resolved(row: Row, steps: int) -> str:
    """Return the row's spec with its warm-up in steps; an epoch has ``steps``."""
    return row.spec.replace("{warmup}", str(row.warmup_epochs * steps))
