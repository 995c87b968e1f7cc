from __future__ import annotations

import pytest
import torch

from narrowband.bench.models import GPT, MODELS, Block, GPTConfig

TINY = MODELS["gpt-tiny"]


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_parameters_is_the_formula(name):
    with torch.device("meta"):  # some have no room in a small machine
        model = GPT(MODELS[name])
    assert sum(p.numel() for p in model.parameters()) == MODELS[name].numel()


def test_the_benchmark_model_is_the_one_that_is_quoted():
    assert MODELS["gpt-13m"] == GPTConfig(vocab=8000, dim=384, blocks=4, heads=6, sequence=64, batch=4)
    assert round(MODELS["gpt-13m"].numel() / 1e6, 1) == 13.3


def test_the_demo_model_is_of_a_size_worth_compressing():
    assert 3e6 <= MODELS["gpt-demo"].numel() <= 10e6


def test_a_token_sees_only_those_before_it():
    model = GPT(TINY)
    tokens_BL = torch.randint(TINY.vocab, (2, TINY.sequence))
    changed_BL = tokens_BL.clone()
    changed_BL[:, 10] = (changed_BL[:, 10] + 1) % TINY.vocab
    before, after = model(tokens_BL), model(changed_BL)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_step_by_step_is_attention_in_one_call(causal):
    torch.manual_seed(0)
    fused, steps = (Block(12, 3, causal=causal, fused=fused).double() for fused in (True, False))
    steps.load_state_dict(fused.state_dict())
    x_BLD = torch.randn(2, 5, 12, dtype=torch.float64)
    results = [block(x_BLD) for block in (fused, steps)]
    torch.testing.assert_close(*results)
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(fused.qkv.weight.grad, steps.qkv.weight.grad)


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    tokens_BL = torch.randint(TINY.vocab, (8, TINY.sequence))
    logits_BLV = GPT(TINY)(tokens_BL)
    loss = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL.flatten())
    assert loss.item() == pytest.approx(torch.tensor(float(TINY.vocab)).log().item(), abs=0.2)


@pytest.mark.parametrize(("change", "message"), [({"blocks": 0}, "blocks=0"), ({"heads": 3}, "multiple of heads=3")])
def test_shapes_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{"vocab": 8, "dim": 16, "blocks": 1, "heads": 2, "sequence": 4, "batch": 1} | change)
