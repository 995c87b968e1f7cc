"""DGC's published code, in other words: its memory of momentum and residuals, step by step.

Compared with github.com/synxlin/deep-gradient-compression at commit 24673d45d11b: ``DGCSGDMemory`` of ``dgc/memory.py``
was run on the gradients of these tests, and gave what the derivation here gives, to the bit. What
``DGCCompressor`` sends was compared where its sample is the whole tensor, so that nothing is left to chance.
"""

from __future__ import annotations

import math

import pytest
import torch

import narrowband as nb

SHAPE, DENSITY = (40, 50), 0.01
NUMEL = math.prod(SHAPE)
STEPS = 25


def gradient(step):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))


class Memory:
    """``compensate`` and ``update``: a momentum, a sum of momenta, and zeros in both where elements were sent."""

    def __init__(self, momentum, nesterov, masking):
        self.momentum, self.nesterov, self.masking = momentum, nesterov, masking
        self.u, self.v = torch.zeros(NUMEL), torch.zeros(NUMEL)

    def step(self, g):
        if self.nesterov:
            self.u.add_(g).mul_(self.momentum)
            self.v.add_(self.u).add_(g)
        else:
            self.u.mul_(self.momentum).add_(g)
            self.v.add_(self.u)
        at = self.v.abs().topk(math.ceil(DENSITY * NUMEL)).indices
        sent = torch.zeros(NUMEL).index_put_((at,), self.v[at])
        self.v[at] = 0.0
        if self.masking:
            self.u[at] = 0.0
        return sent


@pytest.mark.parametrize(
    "keys", ["", ",nesterov=true", ",masking=false", ",nesterov=true,masking=false", ",momentum=0"]
)
@pytest.mark.parametrize("select", ["exact", "sampled"])
def test_every_step_sends_and_keeps_the_same(keys, select):
    method = nb.compression(f"dgc:density={DENSITY},select={select}{keys}").new_feedback()
    memory = Memory(method.momentum, method.nesterov, method.masking)
    for step in range(STEPS):
        expected, x = memory.step(gradient(step)), gradient(step)
        finite, payload = method.encode("w", x, method.codec, shape=SHAPE, seed=step, commit=True)
        assert finite
        sent = method.codec.decode(payload, torch.empty(SHAPE)).view(-1)
        assert torch.equal(sent != 0, expected != 0)
        torch.testing.assert_close(sent, expected, rtol=1e-6, atol=1e-6)
        now, before = (method.state_dict()[f"{room}/w"] for room in ("now", "before"))
        # With Nesterov's momentum their u has another m in it than the velocity that is kept here.
        u = (now - before) * (method.momentum if method.nesterov else 1.0)
        v = now + (now - before) * method.momentum if method.nesterov else now
        close = 2e-6 * float(memory.v.abs().max())  # a velocity is the difference of two sums here
        torch.testing.assert_close(u, memory.u, rtol=0, atol=close)
        torch.testing.assert_close(v, memory.v, rtol=0, atol=close)
