"""Fused attention in compiled graphs: gradients are those of the queries, keys and values that codes stand for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from narrowband.activations import graph_codes
from narrowband.activations.compiled import graph_bytes
from tests.activations.compiling import error, nbytes, run, saved, saving
from tests.thorough import thorough

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled_yet"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Inductor imports what PyTorch has deprecated
]

BATCH, TOKENS, HEADS, SIZE = 4, 64, 4, 16
WIDTH = HEADS * SIZE


def causal(q, k, v, x):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q, k, v, x):
    """The mask is computed in the graph, which saves it with −inf in it."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(x[:, :, 0] < 0.5)[:, None, None, :])


def grouped(q, k, v, x):
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def _only_former(score, _, __, query, key):
    return torch.where(query >= key, score, -math.inf)


def flexible(q, k, v, x):
    return flex.flex_attention(q, k, v, score_mod=_only_former)


def with_dropout(q, k, v, x):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)


def twice(q, k, v, x):
    """The result is a query, too."""
    return causal(causal(q, k, v, x), k, v, x)


class Model(nn.Module):
    """Attention without normalization before it."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), attend

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v, x).transpose(1, 2).reshape(x.shape))


def batch(times=1.0):
    """Inputs with one token that is so many times as large as the others."""
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    x[2, 5] *= times
    return x


@pytest.fixture
def flex_on_the_cpu(monkeypatch):
    """PyTorch has a backward of it there, which is plain arithmetic, and lets nobody call it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


@pytest.mark.usefixtures("flex_on_the_cpu")
@pytest.mark.parametrize(
    ("attend", "bits", "partition"),
    [
        *((causal, 4, False), (masked, 8, True), (grouped, 8, False), (flexible, 8, False), (twice, 8, True)),
        *thorough((causal, 8, True), (masked, 8, False), (grouped, 4, True), (flexible, 4, True), (twice, 4, False)),
    ],
)
def test_one_token_that_is_much_larger_than_the_others_does_not_spoil_gradients(attend, bits, partition):
    """They were off by any factor, inf or NaN."""
    model = Model(attend)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition" if partition else "aot_eager")
    for times, most in ((1, 0.02), (10, 0.15), (200, 1)):
        x = batch(times)
        y, _, wanted = run(compiled, x)
        packed_y, _, gradients = run(compiled, x, saving(bits, group=256))
        assert torch.equal(packed_y, y)
        assert error(gradients, wanted) < most * (1 if bits == 8 or times == 200 else 5)


@pytest.mark.parametrize("times", [200, *thorough(1)])
def test_gradients_are_the_exact_ones_of_what_codes_stand_for(times):
    model, x = Model(causal), batch(times)
    _, _, found = run(torch.compile(model, backend="aot_eager"), x, saving(8, stochastic=False), [model.qkv.weight])

    def restored(z):
        lines = graph_codes.groups(z.detach().transpose(1, 2).reshape(-1), 64)
        codes = graph_codes.encode(lines, 8, stochastic=False, signs=False)
        return graph_codes.decode(codes[0].int(), *codes[1:]).view(BATCH, TOKENS, HEADS, SIZE).transpose(1, 2)

    y = model(x).detach().double()
    made = model.qkv(x).view(BATCH, TOKENS, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    q, k, v = (restored(z).double().requires_grad_() for z in made)
    scores = (q @ k.mT / math.sqrt(SIZE)).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -math.inf)
    result = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
    upstream = (2 * y / y.numel()) @ model.out.weight.double()  # of the mean square
    each = torch.autograd.grad(result, (q, k, v), upstream)
    of_all = torch.stack([z.transpose(1, 2) for z in each], 2).reshape(-1, 3 * WIDTH)
    assert error(found, [of_all.mT @ x.double().reshape(-1, WIDTH)]) < 1e-4


def test_neither_result_nor_logarithms_are_kept():
    model, x = Model(causal), batch()
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    _, kept, _ = run(compiled, x)
    with saving(8):
        y = compiled(x)
    assert nbytes(y, x, *model.parameters()) == 3 * x.numel() * (1 + 8 / 64)
    assert graph_bytes(saved(y))[0] == kept == 4 * (4 * x.numel() + x.numel() // SIZE)


def test_attention_of_inputs_does_not_run_again():
    """They are exact, and so is what it saved."""
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, SIZE, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda q, k, v: causal(q, k, v, None).sin(), backend="aot_eager")
    with saving(8):
        y = compiled(q, k, v)
    assert nbytes(y, q, k, v) == nbytes(compiled(q, k, v), q, k, v)


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_dropout_drops_the_same_elements_in_backward(backend):
    """On a CPU such attention is made of simple operators. Softmax may be one, or be taken apart as well."""
    model = Model(with_dropout)
    compiled = torch.compile(model, backend=backend)
    for times, most in ((1, 0.01), (200, 1)):
        x = batch(times)
        torch.manual_seed(1)
        y, _, wanted = run(compiled, x)
        torch.manual_seed(1)
        packed_y, _, gradients = run(compiled, x, saving(8, group=256))
        assert torch.equal(packed_y, y)
        assert 0 < error(gradients, wanted) < most


@pytest.fixture
def flash_on_the_cpu():
    """The operator that GPUs have, whose dropout is drawn from a seed that it returns."""
    library = torch.library.Library("aten", "IMPL")

    def parts(q, k, p, is_causal, seed):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        generator = torch.Generator().manual_seed(int(seed))
        return scores, (torch.rand(scores.shape, generator=generator) >= p) / (1 - p)

    def forward(q, k, v, p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        seed = torch.randint(1 << 30, (2,)) if p else torch.zeros(2, dtype=torch.int64)
        scores, noise = parts(q, k, p, is_causal, seed[0])
        none = torch.empty(0)
        tokens = q.shape[-2]
        result = ((noise * scores.softmax(-1)) @ v).transpose(1, 2).contiguous().transpose(1, 2)
        return (
            result, scores.logsumexp(-1), none, none, tokens, tokens, seed.to(torch.uint64),
            torch.empty((), dtype=torch.uint64), none,
        )  # fmt: skip

    def backward(g, q, k, v, out, lse, _, __, ___, ____, p, is_causal, seed, _____, *, scale=None):
        scores, noise = parts(q, k, p, is_causal, seed[0].to(torch.int64))
        likely = (scores - lse.unsqueeze(-1)).exp()
        of_scores = likely * (noise * (g @ v.mT) - (g * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return of_scores @ k, of_scores.mT @ q, (noise * likely).mT @ g

    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("flash_on_the_cpu")
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_attention_of_gpus_runs_again_without_dropout_and_draws_nothing(p):
    def attend(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, p, True)[0]
        return result

    model = Model(attend)
    compiled = torch.compile(model, backend="aot_eager")
    for times, most in ((1, 0.02), (200, 0.7 if p == 0 else 10)):
        x = batch(times)
        torch.manual_seed(1)
        y, _, wanted = run(compiled, x)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        packed_y, kept, gradients = run(compiled, x, saving(8, group=256))
        assert torch.equal(packed_y, y)
        assert error(gradients, wanted) < most
        assert torch.equal(torch.get_rng_state(), state)
        codes = x.numel() * (1 + 8 / 256)
        assert 3 * codes <= kept < 3.1 * codes if p == 0 else kept >= 4 * codes
