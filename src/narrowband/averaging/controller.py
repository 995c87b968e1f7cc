"""Show gradients to a policy, and bring its decisions to all ranks.

A policy sees the sum of the averages that were delivered since its last decision. Every rank has these averages, so
they cost no communication. The L-GreCo paper speaks of accumulated gradients. The authors' hooks for PowerSGD
(github.com/LGrCo/L-GreCo, commit 13942f0) add up the gradients of rank 0 alone, each with the residual, over the last
ten steps of a window. Averages cover the data of all ranks instead, and with error feedback their sum over a window is
that of the exact averages, up to the change of the residual. A policy may restrict itself to the ``last`` steps of a
window.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from narrowband import kernels
from narrowband.adapt import Plan
from narrowband.feedback.base import check_saved
from narrowband.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from narrowband.adapt import Policy
    from narrowband.averaging.layers import Layers
    from narrowband.averaging.parameters import Parameter
    from narrowband.collectives import Peers

__all__ = ["Controller"]

log = logging.getLogger(__name__)

#: What rank 0 sends in place of a plan if no average that the policy looks at was finite.
_NOTHING_SEEN = b"nothing"

#: Held while a policy has the state of a handle.
_deciding = threading.Lock()


class Controller:
    """Adds up averages on rank 0, lets the policy decide there, and applies the plan on all ranks in the same step.

    Args:
        policy: the policy that decides; None: the plan never changes.
        layers: of the model.
        peers: the ranks.
    """

    def __init__(self, policy: Policy | None, layers: Layers, peers: Peers) -> None:
        self.policy = policy
        self.plan: Plan | None = None
        self._layers = layers
        self._peers = peers
        self._looked = False
        self._sums: dict[str, Tensor] = {}
        #: What the policy's next decision here depends on besides gradients; other handles have their own.
        self._kept: Mapping[str, object] = {} if policy is None else copy.deepcopy(policy.state_dict())

    def identity(self) -> list[object]:
        """Return what must be equal on all ranks. Other settings matter on rank 0 only, which decides."""
        policy = self.policy
        return [] if policy is None else [policy.name, policy.every, policy.warmup_steps, policy.specs()]

    def check(self) -> None:
        """Let rank 0, which decides, find out whether the policy can decide for these layers. A collective.

        Raises:
            ValueError: it cannot; on all ranks.
        """
        if self.policy is None:
            return
        problem = ""
        if self._peers.rank == 0:
            try:
                self.policy.check(self._layers.parameters.shapes)
            except Exception as error:  # a user's policy may raise anything, and other ranks are waiting
                problem = str(error) or repr(error)
        if problem := _broadcast(problem.encode(), self._peers, self._device).decode():
            raise ValueError(problem)

    def follow(self, plan: Plan) -> None:
        """Give layers the specs of a plan.

        Raises:
            ValueError: a plan of another model, or with specs that cannot be mixed with the model's.
        """
        plan.check(self._layers.parameters.shapes)
        if plan.world_size != self._peers.size:
            self._layers.warn_once(
                f"the plan was made for {counted(plan.world_size, 'rank')}, but this run has {self._peers.size}, for "
                "which another plan may send less; make one, for example with "
                f"`narrowband adapt --ranks {self._peers.size}`"
            )
        self._layers.set(plan.specs())
        self.plan = plan

    def look(self, averages: Iterable[tuple[Parameter, Tensor]], weight: float, step: int) -> None:
        """Add a step's averages of layers, times ``weight``, to the sums. Averages that are not finite are left out."""
        if self.policy is None:
            return
        self._looked = True
        if self._peers.rank or not self.policy.sees(step):
            return
        for parameter, average in averages:
            part = average.float()
            if not kernels.all_finite(part):
                continue
            if parameter.name not in self._sums:
                self._sums[parameter.name] = torch.zeros_like(part)
            self._sums[parameter.name].add_(part, alpha=weight)

    def is_due(self, step: int) -> bool:
        """Whether :meth:`decide` is to be called before this step. Never without layers."""
        policy = self.policy
        if policy is None or not self._looked or step < policy.warmup_steps:
            return False
        return (step - policy.warmup_steps) % policy.every == 0 and bool(self._layers.parameters.shapes)

    def decide(self, step: int) -> bool:
        """Let rank 0 decide, and follow its plan on all ranks. A collective; call it if :meth:`is_due`.

        Returns:
            False if rank 0 could not decide, or has seen nothing to decide by: the plan then stays as it was.
        """
        text = self._decided(step) if self._peers.rank == 0 else b""
        text = _broadcast(text, self._peers, self._device)
        self._looked = False
        self._sums.clear()
        if text == _NOTHING_SEEN:
            if self._peers.rank == 0:
                log.warning(
                    "step %d: all averages since the policy's last plan had inf or NaN, so it has nothing to plan by; "
                    "every layer keeps its spec",
                    step,
                )
            return False
        if not text:
            first = 0 if self._peers.group is None else dist.get_global_rank(self._peers.group, 0)
            log.error("step %d: the policy failed on rank %d (see its log); every layer keeps its spec", step, first)
            return False
        self.follow(Plan.from_json(text.decode()))
        return True

    def _decided(self, step: int) -> bytes:
        """Return the policy's plan as text; empty if deciding failed. Raises nothing, since other ranks wait."""
        assert self.policy is not None
        if not self._sums:
            return _NOTHING_SEEN
        try:
            gradients = {
                name: self._sums[name].view(shape)
                if name in self._sums
                else torch.zeros(shape, dtype=torch.float32, device=self._device)
                for name, shape in self._layers.parameters.shapes.items()
            }
            plan = self._plan_of(self.policy, gradients, step)
            plan.check(self._layers.parameters.shapes)
            return plan.to_json().encode()
        except Exception:  # a user's policy may raise anything, and other ranks are waiting
            log.exception("step %d: the policy failed to make a plan", step)
            return b""

    def _plan_of(self, policy: Policy, gradients: Mapping[str, Tensor], step: int) -> Plan:
        """Let the policy decide by what it has seen of this handle alone."""
        with _having(policy, self._kept):
            try:
                return policy.decide(gradients, step=step, traffic=self._layers.traffic)
            finally:
                self._kept = copy.deepcopy(policy.state_dict())

    @property
    def _device(self) -> torch.device:
        return self._layers.parameters.device

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and what the next decision depends on. Only rank 0's state has the sums."""
        if self.policy is None and self.plan is None:
            return {}
        return {
            "plan": None if self.plan is None else self.plan.to_json(),
            "policy": copy.deepcopy(self._kept),
            "looked": self._looked,
            "sums": dict(self._sums),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this state; nothing changes."""
        shapes = self._layers.parameters.shapes
        try:
            if state.get("plan") is not None:
                Plan.from_json(state["plan"])
            for name, value in state.get("sums", {}).items():
                check_saved("the policy", name, value)
                if name not in shapes:
                    raise ValueError(
                        f"the state has a sum of gradients of {name!r}, but this model has no layer of that name"
                    )
                if value.numel() != (numel := math.prod(shapes[name])):
                    raise ValueError(
                        f"the state has a sum of gradients of {name!r} with {value.numel()} elements, but the layer "
                        f"has {numel} elements here; this is the state of another model"
                    )
            if self.policy is not None:
                with _having(self.policy, state.get("policy", {})):
                    pass
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of the policy is invalid: {error!r}") from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned. Layers are loaded elsewhere (:meth:`Layers.load`)."""
        plan = state.get("plan")
        self.plan = None if plan is None else Plan.from_json(plan)
        self._looked = state.get("looked", False)
        self._sums = {name: value.clone().to(self._device) for name, value in state.get("sums", {}).items()}
        if self.policy is not None:
            self._kept = copy.deepcopy(state.get("policy", {}))


@contextlib.contextmanager
def _having(policy: Policy, state: Mapping[str, object]) -> Iterator[None]:
    """Let a policy have this state in the block, and its own again afterwards. One object may serve several handles, at
    the same time, in a thread of each, or in turn.
    """
    with _deciding:
        before = copy.deepcopy(policy.state_dict())
        try:
            policy.load_state_dict(copy.deepcopy(state))
            yield
        finally:
            policy.load_state_dict(before)


def _broadcast(text: bytes, peers: Peers, device: torch.device) -> bytes:
    """Return rank 0's text on all ranks. A collective."""
    source = dist.get_global_rank(peers.group, 0) if peers.group is not None else 0
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, source, group=peers.group)
    room = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    if peers.rank == 0 and text:
        room.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    if room.numel():
        room = room.to(device)
        dist.broadcast(room, source, group=peers.group)
    return bytes(room.cpu().numpy())
