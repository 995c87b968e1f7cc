from __future__ import annotations

import pytest
import torch

from reproduce.models import CharLSTM, ResNet


def numel(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("depth", "parameters"), [(8, 75_290), (20, 269_722), (32, 464_154)])
def test_a_residual_network_has_the_parameters_of_the_paper(depth, parameters):
    """He et al., table 6: 0.27 million at depth 20, 0.46 at 32."""
    assert numel(ResNet(depth)) == parameters


def test_a_residual_network_has_as_many_layers_as_it_says():
    layers = [m for m in ResNet(20).modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == 20


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_residual_network_takes_images_of_either_layout(layout):
    torch.manual_seed(0)
    model, x = ResNet(8), torch.randn(4, 3, 32, 32)
    logits = model(x.contiguous(memory_format=layout))
    assert logits.shape == (4, 10)
    torch.testing.assert_close(logits, model(x))
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_shortcuts_have_no_parameters_and_pass_every_second_pixel():
    """Option A: with a residual of zero, a block is every second pixel, and zeros in the new channels."""
    block = ResNet(8).blocks[1]
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.rand(2, 16, 32, 32)
    y = block(x)
    torch.testing.assert_close(y[:, :16], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 16, 16)
    assert not y[:, 16:].any()


@pytest.mark.parametrize("depth", [2, 7, 18])
def test_other_depths_are_refused(depth):
    with pytest.raises(ValueError, match=rf"depth={depth} is not 6n \+ 2"):
        ResNet(depth)


def test_the_character_model_has_between_half_a_million_and_a_million_parameters():
    model = CharLSTM(65, hidden=384)
    assert numel(model) == 65 * 128 + 4 * 384 * (128 + 384 + 1) + 65 * (384 + 1)
    assert 500_000 < numel(model) < 1_000_000


def test_the_character_model_looks_back_and_not_ahead():
    torch.manual_seed(0)
    model, x_BL = CharLSTM(20, dim=8, hidden=16, layers=2), torch.randint(20, (3, 12))
    changed_BL = x_BL.clone()
    changed_BL[:, 6] = (x_BL[:, 6] + 1) % 20
    same = (model(x_BL) - model(changed_BL)).abs().amax((0, 2)) == 0
    assert model(x_BL).shape == (3, 12, 20)
    assert same.tolist() == [True] * 6 + [False] * 6
