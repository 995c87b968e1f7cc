"""Rudakov et al.'s published notebooks, in other words: selection, indices used again, feedback, to the bit.

Compared with github.com/Glemhel/ActivationsGradientsCompressionForMP: ``mp_compression_resnet_cifar.ipynb`` at commit
3732c2d92cac, ``gpt2-finetune-compression.ipynb`` at d9645fc7a43d. Their functions were run on the tensors of these
tests, and gave what the derivations here give. Two of the notebook's lines are not what they seem: feedback of
activations is commented out there, so that EF is of gradients only; and EF21 calls functions that do not exist, so that
here it is taken at its word.
"""

from __future__ import annotations

import pytest
import torch

import narrowband as nb

#: A tenth, and a twentieth, of a sample is a whole number of elements.
SHAPE = (6, 4, 5, 10)
SHARES = [0.1, 0.05]


def inputs(steps):
    return [torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


def largest(x, share):
    """``compress_topk``: of every sample, what is above the magnitude that all but this share do not exceed."""
    flat = x.flatten(1)
    lowest = int(flat.shape[1] * (1 - share))
    pivot = flat.abs().sort(1).values[:, lowest - 1 : lowest]
    mask = (flat.abs() > pivot).view(x.shape)
    return torch.where(mask, x, 0.0), mask


def through(boundary, x, gradient):
    """What arrives of an activation, and of its gradient."""
    leaf = x.clone().requires_grad_()
    arrived = boundary(leaf)
    arrived.backward(gradient)
    return arrived.detach(), leaf.grad


@pytest.mark.parametrize("share", SHARES)
def test_the_largest_of_every_sample(share):
    for x in inputs(4):
        assert torch.equal(nb.codec(f"topk:density={share},scope=sample").roundtrip(x), largest(x, share)[0])


@pytest.mark.parametrize("share", SHARES)
def test_a_gradient_at_the_places_of_its_activation(share):
    """``TopkCompressionFactory``: the mask of the way forward is kept for the way back."""
    boundary = nb.Boundary(f"topk:density={share},scope=sample", f"topk:density={share},scope=sample,reuse=forward")
    for x, gradient in zip(inputs(4), inputs(8)[4:], strict=True):
        kept, mask = largest(x, share)
        arrived, back = through(boundary, x, gradient)
        assert torch.equal(arrived, kept)
        assert torch.equal(back, gradient * mask)


@pytest.mark.parametrize("share", SHARES)
def test_error_feedback_of_gradients(share):
    """``EFCompressor``, whose way forward compresses and keeps nothing."""
    boundary = nb.Boundary(f"topk:density={share},scope=sample", f"topk:density={share},scope=sample+ef")
    e = torch.zeros(SHAPE)
    for x, gradient in zip(inputs(8), inputs(16)[8:], strict=True):
        sent, _ = largest(gradient + e, share)
        e = e + gradient - sent
        arrived, back = through(boundary, x, gradient)
        assert torch.equal(arrived, largest(x, share)[0])
        assert torch.equal(back, sent)


def test_ef21():
    """``EF21Compressor``: what arrived before, and the compressed change of it."""
    boundary = nb.Boundary("topk:density=0.1,scope=sample+ef21", "topk:density=0.1,scope=sample+ef21")
    forward, backward = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for x, gradient in zip(inputs(8), inputs(16)[8:], strict=True):
        forward = forward + largest(x - forward, 0.1)[0]
        backward = backward + largest(gradient - backward, 0.1)[0]
        arrived, back = through(boundary, x, gradient)
        assert torch.equal(arrived, forward)
        assert torch.equal(back, backward)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_levels_between_the_smallest_and_the_largest(bits):
    """``quantize_custom``: one range for a whole tensor, and the nearest of 2^bits levels."""
    for x in inputs(4):
        low, span, levels = x.min(), x.max() - x.min(), 2**bits - 1
        derived = 1 / levels * torch.round(levels * ((x - low) / span)) * span + low
        found = nb.codec(f"uniform:bits={bits},group={x.numel()}").roundtrip(x)
        torch.testing.assert_close(found, derived, rtol=0, atol=1e-6 * float(span))
