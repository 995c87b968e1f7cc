"""The settings of averaging that users pass at set-up, and their validation."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.distributed as dist

from narrowband.adapt import Plan, Policy
from narrowband.averaging.mixing import for_gradients
from narrowband.averaging.optim import check_momentum, check_steps
from narrowband.collectives import COLLECTIVES, check
from narrowband.errors import UnsupportedError
from narrowband.feedback import Compression
from narrowband.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.collectives import Collective
    from narrowband.feedback import Method

__all__ = ["EARLY_NBYTES", "MESSAGE_NBYTES", "Settings", "check_scaler"]

#: Takes 5 ms at 200 Mbit/s, about the latency of any collective among busy machines.
MESSAGE_NBYTES = 1 << 17
#: An all-reduce of this many bytes takes 1.3 ms (2 ranks) to 2.6 ms (many ranks) at 200 Mbit/s.
EARLY_NBYTES = 1 << 15

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The checked arguments of :func:`~narrowband.compress_gradients` and :class:`~narrowband.Averager`.

    Attributes:
        compression: codec and feedback of layers that the plan does not list.
        policy: the policy that plans during training, if there is one.
        plan: the plan to begin with, if there is one.
        rates: the optimizer, if the feedback needs its learning rates.
    """

    compression: Compression
    policy: Policy | None
    plan: Plan | None
    min_numel: int
    warmup_steps: int
    seed: int
    collective: Collective | Literal["auto"]
    small: str | Codec
    message_nbytes: int
    early_nbytes: int
    grad_scaler: torch.amp.GradScaler | None
    rates: torch.optim.Optimizer | None

    @classmethod
    def of(
        cls,
        spec: str | Codec | Compression | Method | Plan | Policy,
        *,
        min_numel: int,
        warmup_steps: int,
        seed: int,
        collective: Collective | Literal["auto"],
        small: str | Codec,
        message_nbytes: int,
        early_nbytes: int,
        grad_scaler: torch.amp.GradScaler | None,
        connected: bool = True,
    ) -> Settings:
        """Check all arguments that do not depend on the tensors, and return the settings.

        Args:
            connected: whether a process group must exist by now.

        Raises:
            TypeError: a number that is not a whole one; or no gradient scaler.
            ValueError: a spec, a number or a collective that does not exist.
            UnsupportedError: a spec that is not for gradients, or a combination that cannot work.
        """
        policy, plan = spec if isinstance(spec, Policy) else None, spec if isinstance(spec, Plan) else None
        if policy is not None:
            chosen, warmup_steps = for_gradients(policy.start), max(warmup_steps, policy.warmup_steps)
        else:
            chosen = for_gradients(
                plan.default if plan is not None else cast("str | Codec | Compression | Method", spec)
            )
        min_numel, warmup_steps = whole_number("min_numel", min_numel), whole_number("warmup_steps", warmup_steps)
        message_nbytes = whole_number("message_nbytes", message_nbytes)
        early_nbytes = whole_number("early_nbytes", early_nbytes)
        check_scaler(grad_scaler)
        if min_numel < 0 or warmup_steps < 0:
            raise ValueError(f"min_numel={min_numel} and warmup_steps={warmup_steps} must not be negative")
        if message_nbytes < 0 or early_nbytes < 0:
            raise ValueError(f"message_nbytes={message_nbytes} and early_nbytes={early_nbytes} must not be negative")
        brings = chosen.feedback if chosen.feedback is not None and chosen.feedback.collective is not None else None
        for_small = _of_small(small).feedback if small not in ("uncompressed", "fused") else brings
        if small != "uncompressed" and for_small is not None and for_small.collective is not None:
            raise UnsupportedError(
                f"{for_small.name} averages matrices only, by a collective of its own, and cannot compress the vector "
                "of small parameters; use small='uncompressed', or another codec, as in small='uniform:bits=8'"
            )
        if collective != "auto":
            if collective not in COLLECTIVES:
                raise ValueError(
                    f"collective={collective!r} is unknown; expected one of auto, {', '.join(COLLECTIVES)}"
                )
            if brings is not None:
                raise UnsupportedError(f"{chosen} has a collective of its own; use collective='auto'")
            check(chosen.codec, collective, chosen.feedback)
        if connected and not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError("no process group: call torch.distributed.init_process_group(...) first")
        return cls(
            compression=chosen,
            policy=policy,
            plan=plan,
            min_numel=min_numel,
            warmup_steps=warmup_steps,
            seed=whole_number("seed", seed),
            collective=collective,
            small=small,
            message_nbytes=message_nbytes,
            early_nbytes=early_nbytes,
            grad_scaler=grad_scaler,
            rates=None,
        )

    def facts(self) -> dict[str, str]:
        """Return name → value of the settings that must be the same on all ranks, whatever the model is."""
        return {
            "min_numel": str(self.min_numel),
            "warm-up": str(self.warmup_steps),
            "seed": str(self.seed),
            "collective": self.collective,
            "message_nbytes": str(self.message_nbytes),
            "early_nbytes": str(self.early_nbytes),
            "grad_scaler": "none" if self.grad_scaler is None else "given",
        }

    def with_optimizer(
        self, optimizer: torch.optim.Optimizer | None, parameters: Sequence[tuple[str, Tensor]], *, warn: bool
    ) -> Settings:
        """Check the settings against the parameters and their optimizer; return them with ``rates`` set if needed.

        Raises:
            TypeError: no optimizer.
            ValueError: an optimizer with none of the parameters; momentum in both the optimizer and the spec, or in
                none; or a feedback that needs the optimizer's learning rate and got no optimizer.
            UnsupportedError: momentum of complex parameters.
        """
        method = self.compression.feedback
        if method is not None and not method.observes_uncompressed:
            method = None
        if optimizer is not None:
            check_steps(optimizer, [p for _, p in parameters])
            check_momentum(optimizer, method, (p for _, p in parameters))
        if method is None:
            return self
        if optimizer is None and method.momentum and warn:
            log.warning(
                "%s applies momentum=%s to gradients before they are sent, so the optimizer must not apply momentum "
                "again; pass optimizer=… to have this checked",
                method.name,
                method.momentum,
            )
        odd = [name for name, p in parameters if p.requires_grad and p.dtype.is_complex]
        if odd and method.momentum:
            raise UnsupportedError(
                f"{method.name} supports momentum for real parameters only; these parameters are complex: "
                f"{', '.join(odd)}"
            )
        if not method.needs_learning_rates:
            return self
        if optimizer is None:
            raise ValueError(
                f"{self.compression} needs the learning rate, because its residuals are in units of steps: pass "
                "optimizer=…"
            )
        return replace(self, rates=optimizer)


def check_scaler(grad_scaler: object) -> None:
    """Check that this is a gradient scaler, or None.

    Raises:
        TypeError: it is neither.
    """
    if grad_scaler is not None and not callable(getattr(grad_scaler, "get_scale", None)):
        raise TypeError(
            f"grad_scaler={grad_scaler!r} is no gradient scaler; pass the torch.amp.GradScaler of your loop, or leave "
            "it out"
        )


def _of_small(small: str | Codec) -> Compression:
    try:
        return for_gradients(small)
    except ValueError as error:
        raise ValueError(f"small={small!r} is neither 'uncompressed' nor 'fused' nor a spec: {error}") from None
