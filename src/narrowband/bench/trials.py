"""Try policies for activations on a model: what a step takes, its gradients, and whether modules can run again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowband.activations import ActivationPolicy, Saved, compress_activations
from narrowband.bench.devices import default_device, moved, wait_for
from narrowband.bench.peaks import most_alive
from narrowband.bench.reruns import Reruns
from narrowband.bench.subjects import Subject
from narrowband.bench.ways import gradients_of, result_of, scalar_of

__all__ = ["SAME", "Bench", "Job", "Objection", "Step", "first_line", "gradient_error"]

#: Steps under every policy: untimed ones, and timed ones, of which the shortest counts.
_WARM_UP, _TIMED = 2, 3
#: If recomputation changes gradients by more than this share, it does not compute the same as the first run.
SAME = 1e-3


@dataclass(frozen=True)
class Job:
    """A training job to find a policy for.

    Attributes:
        build: makes the model and its inputs. It must be a function of a module, or a partial of one, because other
            processes call it, too.
        amp: whether forward runs under bfloat16 autocast.
        optimizer: adamw, sgd, adafactor or adamw-8bit.
        codec: spec of the gradient compression, whose residuals take memory; None: gradients are not compressed.
        device: cpu or cuda; CUDA where there is any, if not given.
        seed: of parameters and data.
        alone: whether to measure the memory of a process that only trains with the choice.
    """

    build: Callable[[], Subject]
    amp: bool = False
    optimizer: str = "adamw"
    codec: str | None = None
    device: str | None = None
    seed: int = 0
    alone: bool = True


@dataclass(frozen=True)
class Step:
    """The measurements of a step under a policy.

    Attributes:
        saved: what the step's forward saved.
        seconds: time of the shortest step.
        alive: two peaks of bytes of tensors, above those that exist throughout: until the gradient of the model's
            result exists, and from then on.
        gradients: gradients of all parameters, flat.
    """

    saved: Saved
    seconds: float
    alive: tuple[int, int]
    gradients: Tensor


@dataclass(frozen=True)
class Objection:
    """The reason why modules cannot be recomputed.

    Attributes:
        kind: of the reason. Modules with the same kind share a sentence.
        text: the reason, as the end of a sentence.
    """

    kind: str
    text: str


class Bench:
    """A model on which policies are tried."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        model, inputs = job.build()
        self.device = job.device or default_device()
        self.model = model.to(self.device).train()
        self.inputs = tuple(moved(x, self.device) for x in inputs)
        self._job = job

    def step(self, policy: ActivationPolicy) -> Step:
        """Train under a policy for some steps."""
        compressing = None if policy.is_off else compress_activations(self.model, policy=policy)
        context = compressing or contextlib.nullcontext()
        for _ in range(_WARM_UP):
            self._step(context)
        seconds = min(self._step(context) for _ in range(_TIMED))
        loss, backward = most_alive(lambda mark: self._step(context, mark), self.device)
        with compressing or compress_activations(self.model, policy=policy) as saved:
            output = self._forward()
        torch.autograd.backward(scalar_of(output))
        found = gradients_of(self.model)
        self.model.zero_grad()
        return Step(saved, seconds, (loss, backward), found)

    def gradients(self) -> Tensor:
        """Return the gradients of all parameters, flat, in a plain step."""
        torch.autograd.backward(scalar_of(self._forward()))
        found = gradients_of(self.model)
        self.model.zero_grad()
        return found

    def objection(
        self, policy: ActivationPolicy, names: Iterable[str], *, exact: bool, wanted: Tensor | None
    ) -> Objection | None:
        """Try in one step whether modules can be recomputed under a policy; return why not, or None if they can.

        Args:
            policy: a policy that recomputes the modules.
            names: names of the modules.
            exact: whether inputs are exact, so that the second run should give the same results as the first.
            wanted: exact gradients to compare with; None: gradients are not compared.
        """
        reruns = Reruns(self.model, names, most=SAME)
        try:
            with reruns.watched():
                with compress_activations(self.model, policy=policy):
                    output = self._forward()
                reruns.forward_is_done()
                torch.autograd.backward(scalar_of(output))
            found = gradients_of(self.model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that is called twice may raise anything
            return Objection(type(error).__name__, first_line(error))
        finally:
            self.model.zero_grad()
        if not exact:
            return None
        text = reruns.objection
        if text is None and wanted is not None and not gradient_error(found, wanted) <= SAME:  # NaN, too
            text = "gradients are others than without it"
        return None if text is None else Objection(text, text)

    def forward_seconds(self, names: Iterable[str]) -> dict[str, float]:
        """Return the seconds that the forward of each of these modules takes."""
        found = dict.fromkeys(names, 0.0)
        begun: dict[str, float] = {}

        def watch(name: str, *, ends: bool) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                wait_for(self.device)
                now = time.perf_counter()
                if ends:
                    found[name] += now - begun[name]
                begun[name] = now

            return hook

        with contextlib.ExitStack() as stack:
            for name in found:
                module = self.model.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(watch(name, ends=False)).remove)
                stack.callback(module.register_forward_hook(watch(name, ends=True)).remove)
            self._forward()
        return found

    def _step(self, context: contextlib.AbstractContextManager[Any], mark: Callable[[], None] | None = None) -> float:
        begin = time.perf_counter()
        with context:
            output = self._forward()
        if mark is not None:
            result_of(output).register_hook(lambda _: mark())  # type: ignore[no-untyped-call]
        torch.autograd.backward(scalar_of(output))
        wait_for(self.device)
        taken = time.perf_counter() - begin
        self.model.zero_grad()
        return taken

    def _forward(self) -> Any:
        torch.manual_seed(self._job.seed)  # dropout leaves out the same elements with every policy
        with torch.autocast(self.device, torch.bfloat16, enabled=self._job.amp):
            return self.model(*self.inputs)


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def gradient_error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the gradients' error relative to the norm of exact ones."""
    difference = (found - exact).norm()
    return float(difference / exact.norm()) if difference else 0.0  # of zeros, too
