"""Run all compiled loops that a step may need once at set-up, so that the first step does not wait for a compiler."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from narrowband import kernels
from narrowband.codecs import TopK
from narrowband.collectives import Operand, Peers, collective
from narrowband.feedback import ErrorFeedback, Feedback, compression
from narrowband.kernels.compiling import announced

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from narrowband.adapt import Policy
    from narrowband.averaging.agreement import Agreement
    from narrowband.averaging.settings import Settings
    from narrowband.codecs import Codec
    from narrowband.collectives import Exchange
    from narrowband.feedback import Compression

__all__ = ["FAILED", "use_all", "use_once", "warm_up", "warm_up_alone"]

#: What the error says if a warm-up failed on some ranks.
FAILED = "Set-up runs what a step will run, which failed on some ranks"

#: Sides of square matrices that stand for those of a model. Several sizes, because small tensors take one thread and
#: large ones several, and because sparse codecs sample runs of elements in tensors much larger than the sample, and
#: single elements in others.
_SIDES = (32, 256, 1024)

#: What was warmed up in this process: kinds of codec and feedback, and specs, each with device and number of threads.
_done: set[object] = set()


def warm_up(
    kinds: Sequence[Compression],
    policy: Policy | None,
    device: torch.device,
    peers: Peers,
    agreement: Agreement,
    collectives: Iterable[type[Exchange]] = (),
) -> None:
    """Compile, or load from the cache, every loop that a step may need. A collective.

    One rank of a machine goes first, so that the others find what it compiled. Rank 0 announces a long compilation.

    Args:
        kinds: the specs that layers have or may get; the model's default first.
        policy: the policy that plans, if there is one.
        device: where the gradients are.
        peers: the ranks.
        agreement: of these ranks.
        collectives: those that layers use.

    Raises:
        DisagreementError: the warm-up failed on other ranks.
        Exception: the error of the warm-up on this rank.
    """
    sparse = "sparse_reduce" in {kind.name for kind in collectives}
    method = f"{kinds[0]}" if policy is None else f"{policy.name} over {kinds[0]}"
    first = os.environ.get("LOCAL_RANK", str(peers.rank)) == "0" or peers.rank == 0
    for turn in (True, False):
        failure = None
        if turn == first:
            try:
                with announced(method, say=peers.rank == 0):
                    use_all(kinds, device)
                    if sparse:
                        use_shares(device)
                    if policy is not None:
                        policy.warm_up()
            except Exception as error:  # other ranks wait for this one and must be told
                failure = error
        agreement.now({"call": "warm_up"}, FAILED, failure)


def warm_up_alone(settings: Settings, device: torch.device, others: Iterable[str] = ()) -> None:
    """Compile, or load from the cache, every loop that a step with these settings may need, among any number of ranks.
    No rank is waited for, and :func:`warm_up` finds nothing left to do.

    Args:
        settings: how to compress.
        device: where the gradients are.
        others: further specs that layers may have.
    """
    chosen, plan = settings.compression, settings.plan
    kinds = [chosen, *(compression(spec).beside(chosen) for spec in others)]
    if settings.small not in ("uncompressed", "fused"):
        kinds.append(compression(settings.small).beside(chosen))
    if plan is not None:
        kinds += [compression(spec).beside(chosen) for spec in dict.fromkeys(plan.specs().values())]
    use_all(kinds, device)
    if any(_may_share(kind, settings) for kind in kinds):
        use_shares(device)


def _may_share(kind: Compression, settings: Settings) -> bool:
    """Return whether ``sparse_reduce`` may carry payloads of this compression, among however many ranks."""
    asked = settings.collective in ("auto", "sparse_reduce")
    return asked and collective("sparse_reduce").obstacle(kind.codec, kind.feedback) is None


def use_all(specs: Iterable[str | Compression], device: torch.device) -> None:
    """Call :func:`use_once` for each spec that was not warmed up in this process."""
    here = device, torch.get_num_threads()
    for name, chosen in {str(spec): compression(spec) for spec in specs}.items():
        kind = type(chosen.codec), type(chosen.feedback), getattr(chosen.feedback, "store", None), *here
        if (name, *kind) in _done:
            continue
        for side in _SIDES[: 1 if kind in _done else None]:  # for a known kind, other settings may need other loops
            x = torch.randn(side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
            use_once(x.to(device), chosen)
        _done.update((kind, (name, *kind)))


def use_shares(device: torch.device) -> None:
    """Run the loops of ``sparse_reduce``, which sends elements to their owners. On a GPU, the device may decide."""
    for findings in (None, kernels.Findings(device)) if device.type == "cuda" else (None,):
        x = torch.randn(4096, dtype=torch.float32, device=device)
        feedback = None if findings is None else ErrorFeedback()
        operand = Operand("", x, (64, 64), TopK(0.1), feedback, lambda _: 0)
        exchange = collective("sparse_reduce")([operand], Peers(None, 0, 1), measure=False)
        exchange.findings, exchange.zeros_count = findings, True
        exchange.encode()
        for transfer in exchange.job():
            transfer.issue()
        exchange.deliver(good=True)


def use_ahead(x: Tensor, codec: Codec, feedback: Feedback | None) -> None:
    """Run what a step does with a matrix where the device decides without the host."""
    operand = Operand("", x.flatten().clone(), x.shape, codec, feedback, lambda _: 0)
    exchange = collective("all_gather")([operand], Peers(None, 0, 1), measure=False)
    exchange.findings, exchange.zeros_count = kernels.Findings(x.device), True
    exchange.encode()
    for transfer in exchange.job():
        transfer.issue()
    exchange.deliver(good=True)
    kernels.poison_all_if(exchange.findings.of_all, [operand.average])


def use_once(x: Tensor, chosen: Compression) -> None:
    """Run all that a step does with a matrix, except for sending it."""
    codec, feedback = chosen.codec, chosen.new_feedback()
    kernels.all_zero(x.view(-1))
    kernels.all_finite(x.view(-1))
    if feedback is not None and feedback.collective is not None:
        ways = [None, kernels.Findings(x.device)] if x.is_cuda and feedback.goes_ahead else [None]
        for findings in ways:
            operand = Operand("", x.flatten(), x.shape, codec, None, lambda _: 0)
            exchange = collective(feedback.collective)([operand], Peers(None, 0, 1), measure=False, state=feedback)
            exchange.findings = findings
            exchange.encode()
            for _ in exchange.job():
                pass
            exchange.deliver(good=True)
            if findings is not None:
                kernels.poison_all_if(findings.of_all, [operand.x])
        narrow = [x.new_zeros(1, side) for side in x.shape]  # as of a narrow layer
        kernels.low_rank_product(operand.x, *narrow)
        kernels.low_rank_product(operand.x, *narrow, accumulate=True)  # as when a residual is asked for, or saved
        return
    if feedback is not None and feedback.needs_learning_rates:
        feedback.set_learning_rates({"": 1.0})
    if isinstance(feedback, Feedback):
        # Zeros first, as in gradients of embeddings: selection takes another path where all sampled elements are zero.
        for commit in sorted({False, feedback.can_roll_back(x)}, reverse=True):
            for total in (torch.zeros_like(x).view(-1), x.flatten().clone()):
                payload = feedback.encode("", total, codec, shape=x.shape, seed=0, commit=commit)[1]
                if not commit:
                    feedback.commit("", total, codec, payload, shape=x.shape, seed=0)
    if x.is_cuda and codec.fixed_size and (feedback is None or feedback.goes_ahead):
        assert feedback is None or isinstance(feedback, Feedback)
        use_ahead(x, codec, feedback)
    codec.encode(torch.zeros_like(x))
    payload, out = codec.encode(x), torch.zeros_like(x)
    codec.decode(payload, out, weight=0.5, accumulate=True)
    codec.decode_mean(payload[None] if codec.fixed_size else [payload], out, seeds=[0])
    if x.is_cuda and codec.decodes_several:
        both, whole = torch.stack((payload, payload)), slice(0, payload.numel())
        codec.decode_means(both, [whole], [out.view(-1)], shapes=[x.shape], seeds=[[0, 0]])
