"""Set up rounds of updates: :func:`compress_updates`, and its checks of all arguments before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from narrowband.averaging.agreement import checked_on_all
from narrowband.averaging.flat import local
from narrowband.averaging.plans import plan_of_sharded
from narrowband.averaging.replicas import check_once, check_parts, check_replica, groups_of_replica
from narrowband.averaging.settings import EARLY_NBYTES, MESSAGE_NBYTES, Settings
from narrowband.averaging.who import ddp_of, reshard
from narrowband.collectives import group_or, waiting_in
from narrowband.errors import UnsupportedError
from narrowband.feedback import compression
from narrowband.units import whole_number
from narrowband.updates.averaged import floating_buffers, some
from narrowband.updates.elastic import ElasticUpdateCompression
from narrowband.updates.rounds import UpdateCompression
from narrowband.updates.settings import Rounds, check_in_place
from narrowband.updates.stepping import taken
from narrowband.updates.switched_off import check_can_be_off, ddp_among

if TYPE_CHECKING:
    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.collectives import Collective
    from narrowband.feedback import Compression, Method
    from narrowband.updates.rendezvous import Rendezvous

__all__ = ["compress_updates"]


def compress_updates(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    every: int | str = 1,
    outer: float | Literal["auto", "nesterov"] | Callable[[list[nn.Parameter]], Optimizer] = 1.0,
    buffers: Literal["average", "keep"] = "average",
    fragments: int = 1,
    split: Literal["strided", "layers"] = "strided",
    overlap: int = 0,
    alpha: float = 0.5,
    offload: bool = False,
    residuals: Literal["apart", "in-place"] = "apart",
    min_numel: int = 1024,
    warmup_rounds: int = 0,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    collective: Collective | Literal["auto"] = "auto",
    small: str | Codec = "uncompressed",
    message_nbytes: int = MESSAGE_NBYTES,
    early_nbytes: int = EARLY_NBYTES,
    grad_scaler: torch.amp.GradScaler | None = None,
    peers: Rendezvous | None = None,
    weigh: str = "steps",
    check_every: int | None = None,
) -> UpdateCompression:
    """Average updates, what the optimizer has changed, instead of gradients. Call it once on all ranks, before the
    first step.

    It is for training with AdamW over slow links, in which replicas take several steps between two exchanges.

    The training loop stays as it is: backward, ``optimizer.step()``. After every ``every``-th step the handle averages
    the updates of all replicas, and their parameters are equal again, bit for bit. At set-up all replicas get the
    parameters of the first.

    Args:
        model: a plain module; or one in DistributedDataParallel among all replicas, whose averaging of gradients is
            switched off until ``remove()``; or one that the ranks of a replica train together, in
            DistributedDataParallel or sharded by ``fully_shard`` (FSDP2). In this last case ``process_group`` has the
            ranks that hold the same part of each replica. The memory format must be the same on all ranks.
        optimizer: the optimizer that steps the parameters, of any type; or several, in the order in which they step.
        spec: codec and feedback, such as ``"qsgd:bits=2+ef"``; or a plan, or a policy.
        every: optimizer steps from one round to the next; with ``peers`` also a time, such as ``"20min"`` (``s``,
            ``min`` or ``h``), so that fast and slow peers reach a round together, each with the steps it has taken.
        outer: how the mean of the updates is applied. A number: this many times the mean is added to the parameters.
            ``"auto"``, for Adam and similar optimizers: the mean is lengthened, by measurement, to the step of one
            optimizer that sees all batches (:mod:`narrowband.updates.length`). ``"nesterov"``, for rounds of ten steps
            and more: DiLoCo's SGD with learning rate 0.7 and Nesterov momentum 0.9 (arXiv 2311.08105, table 5). Or a
            function that takes the parameters and returns an optimizer, which gets −mean as their gradients.
        buffers: whether floating-point buffers, such as those of batch norm, are averaged in every round, or kept as
            each replica has them. They are sent uncompressed, whatever ``small`` is. Integer buffers, and those that
            hold an inf or NaN now, such as a mask, are not averaged.
        fragments: number of parts of the model that have their rounds in turn, equally spaced, each once per ``every``
            steps (Streaming DiLoCo). A round then sends, and needs memory for, a part of the model.
        split: whether blocks of the model are dealt out to the fragments in turn (``"strided"``), or consecutive blocks
            stay together (``"layers"``).
        overlap: steps that a replica takes while a fragment is exchanged, up to ``every // fragments``; 0: it waits.
        alpha: the weight of a replica's own parameters when a mean arrives ``overlap`` steps late: the parameters
            become alpha · own + (1 − alpha) · common. With 1 replicas never become equal; the paper uses 0.5.
        offload: keep the anchors, a copy of the parameters, in CPU memory when the model is on a GPU.
        residuals: where the residuals of ``+ef`` are kept until the next round: ``"apart"`` from the model; or
            ``"in-place"``, in the replica's own parameters, so that it does not learn again what it has not sent yet.
            With few bytes and many steps per round, ``"in-place"`` gives the lower loss
            (:mod:`narrowband.updates.fragments`). Right after a round replicas are equal either way.
        warmup_rounds: number of rounds at the beginning that are not compressed.
        process_group: the replicas; by default each rank is one. If several ranks train one replica: the ranks that
            hold the same part of each; for a mesh of replicas × shards, ``mesh["replicas"].get_group()``.
        grad_scaler: the scaler that may skip the optimizer's step, at different times on different replicas. A skipped
            step is counted, too, when ``grad_scaler.update()`` is called, so that all replicas reach a round together.
            Several models may share a scaler: its update counts only if the scaler was asked to step this optimizer
            before.
        peers: where replicas that come and go meet (:class:`~narrowband.Rendezvous`), in place of a process group. Do
            not initialize ``torch.distributed`` then: the handle creates and destroys its default group. The call
            returns when this replica has been in a round, with the others' parameters.
        weigh: what weights the peers in the mean of a round: ``"steps"``, the optimizer steps that a peer has taken
            since it was last in a round; or any other word, such as ``"tokens"`` or ``"samples"``, for the numbers that
            each peer passes to :meth:`~narrowband.ElasticUpdateCompression.count` before it steps. All peers give the
            same word.
        check_every: rounds from one comparison of the replicas' checksums to the next; 1: in every round. By default
            once in 10 optimizer steps, and so in every round if rounds have at least 10.

    The other arguments are those of :func:`~narrowband.compress_gradients`.

    Returns:
        A handle with statistics (its steps are rounds), checkpoints and :meth:`~UpdateCompression.average`.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer.
        ValueError: a number out of range, a spec that does not exist, a parameter that no optimizer steps, an
            optimizer that has a handle already, or a buffer to which no mean can be written.
        UnsupportedError: no process group, one with ranks of the same replica, a handle of ``compress_gradients`` or a
            ``CodedDataParallel`` for the same parameters and ranks, or a combination that cannot work.
        DisagreementError: ranks passed different models or arguments.

    Example:
        >>> handle = nb.compress_updates(model, optimizer, "qsgd:bits=2+ef", every=10)
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     loss(model(x), y).backward()
        ...     optimizer.step()  # the tenth time, replicas become equal
        >>> handle.step
        1
    """

    def prepared() -> tuple[nn.Module, list[Optimizer], Settings, Rounds]:
        optimizers = _optimizers_of(model, optimizer)
        rounds = Rounds.of(
            with_peers=peers is not None, every=every, outer=outer, buffers=buffers, fragments=fragments, split=split,
            overlap=overlap, alpha=alpha, offload=offload, residuals=residuals, grad_scaler=grad_scaler, weigh=weigh,
            check_every=check_every,
        )  # fmt: skip
        settings = Settings.of(
            spec,
            min_numel=min_numel,
            warmup_steps=whole_number("warmup_rounds", warmup_rounds) * rounds.fragments,
            seed=seed,
            collective=collective,
            small=small,
            message_nbytes=message_nbytes,
            early_nbytes=early_nbytes,
            grad_scaler=None,
            connected=peers is None,
        )
        _check_settings(settings, rounds)
        around = ddp_of(replica)
        net = replica if around is None else around.module
        _check_parameters(net, optimizers)
        if rounds.buffers == "average":
            _check_buffers(net)
        if peers is not None:
            if process_group is not None:
                raise ValueError("peers=... and process_group=... cannot be combined: leave one of the two out")
            _check_with_peers(net, settings, rounds)
            return net, optimizers, settings, rounds
        if among is not None:
            check_can_be_off(among)
        check_replica(replica, group_or(process_group))
        check_once(net, group_or(process_group), "compress_gradients", "CodedDataParallel")
        if settings.policy is not None:
            check_parts(net, "a policy chooses specs", min_numel=settings.min_numel)
        if rounds.outer == "auto":
            check_parts(net, "outer='auto' measures how far to go")
        if settings.plan is not None:
            settings = replace(settings, plan=plan_of_sharded(settings.plan, net, settings))
        return net, optimizers, settings, rounds

    if isinstance(model, nn.Module):
        reshard(model)
    if peers is not None:
        replica = model
        net, optimizers, settings, rounds = prepared()
        return ElasticUpdateCompression(net, optimizers, settings, peers, rounds)
    among = ddp_among(model, process_group)
    replica = model if among is None else among.module
    mates = groups_of_replica(replica)
    net, optimizers, settings, rounds = checked_on_all(
        "compress_updates", [*mates, waiting_in(process_group)], prepared
    )
    return UpdateCompression(net, optimizers, settings, group_or(process_group), rounds, mates, among=among)


def _optimizers_of(model: object, given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Check a model and its optimizers, and return these as a list.

    Raises:
        TypeError: it is no module, or one of them is no optimizer.
        ValueError: an optimizer has a handle already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compress_updates takes a module, not {type(model).__name__}; pass the model")
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(f"compress_updates takes optimizers of torch.optim's kind, not {type(each).__name__}")
        if each in taken:
            raise ValueError(
                f"this {type(each).__name__} has a handle of compress_updates already; remove() that first"
            )
    return optimizers


def _check_settings(settings: Settings, rounds: Rounds) -> None:
    """Check what specs, plans and policies have to do with rounds.

    Raises:
        ValueError, UnsupportedError: they cannot be combined.
    """
    method = settings.compression.feedback
    if method is not None and method.observes_uncompressed:
        raise UnsupportedError(
            f"{method.name} corrects momentum in gradients, but updates already contain the optimizer's; use '+ef'"
        )
    if rounds.residuals == "in-place":
        _check_residuals(rounds, settings)
    if rounds.fragments > 1 and settings.policy is not None:
        raise UnsupportedError(
            f"a policy needs rounds of the whole model, and here fragments={rounds.fragments}; use a plan, or "
            "fragments=1"
        )


def _check_residuals(rounds: Rounds, settings: Settings) -> None:
    """Check ``residuals="in-place"``: it needs specs with error feedback, and rounds in which the replica waits.

    Raises:
        ValueError: arguments that cannot be combined.
    """
    of_layers = [] if settings.plan is None else list(settings.plan.specs().values())
    of_layers += [] if settings.policy is None else settings.policy.specs()
    check_in_place([settings.compression, *(compression(spec).beside(settings.compression) for spec in of_layers)])
    if rounds.overlap:
        raise ValueError(
            f"overlap={rounds.overlap} cannot be combined with residuals='in-place'; use overlap=0 or residuals='apart'"
        )
    if rounds.weigh != "steps":
        raise ValueError(
            f"weigh={rounds.weigh!r} cannot be combined with residuals='in-place': an update of weight 0 would lose "
            "the residuals that it contains; use weigh='steps' or residuals='apart'"
        )


def _check_with_peers(model: nn.Module, settings: Settings, rounds: Rounds) -> None:
    """Check that rounds among peers can work with all that was given.

    Raises:
        UnsupportedError: they cannot; the message says why.
    """
    method = settings.compression.feedback
    if method is not None and method.incremental:
        raise UnsupportedError(
            f"peers=... cannot be combined with {method.name}, which keeps estimates that must be equal on all peers; "
            "use '+ef'"
        )
    if settings.policy is not None:
        raise UnsupportedError(
            "peers=... cannot be combined with a policy: peers that join later lack its history; use a plan"
        )
    if rounds.fragments > 1 or rounds.overlap or rounds.offload:
        raise UnsupportedError("peers=... cannot be combined with fragments, overlap or offload; leave them out")
    if any(hasattr(p, "to_local") for p in model.parameters()):
        raise UnsupportedError(
            "peers=... needs the whole model in each process, and this model is sharded among several"
        )
    if dist.is_initialized():
        raise UnsupportedError(
            "peers=... creates the default process group itself, and there is one already; do not call "
            "init_process_group"
        )


def _check_buffers(model: nn.Module) -> None:
    """Check that a mean can be written to every buffer that is averaged.

    Raises:
        ValueError: several elements of a buffer share memory.
    """
    for name, buffer in floating_buffers(model)[0]:
        own = local(buffer)
        if any(size > 1 and not stride for size, stride in zip(own.shape, own.stride(), strict=True)):
            raise ValueError(
                f"buffer {name} has elements that share memory, as after expand(), so a mean cannot be written to it; "
                "register its clone() as the buffer, or pass buffers='keep'"
            )


def _check_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that an optimizer steps every trained parameter.

    Raises:
        ValueError: nothing is trained, or no optimizer steps a trained parameter.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("nothing to average: no parameter requires a gradient")
    stepped = {p for each in optimizers for group in each.param_groups for p in group["params"]}
    lacking = [name for name, p in trained.items() if p not in stepped]
    if lacking:
        raise ValueError(
            f"parameters that require a gradient are in none of the optimizers: {some(lacking)}; pass all optimizers "
            "of the model, or freeze parameters that are not trained with requires_grad_(False)"
        )
