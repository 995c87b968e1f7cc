"""Saved activations under torch.compile: what is packed, and what stays as it was."""

from __future__ import annotations

import gc
import os
import shutil
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

from narrowband.activations.compiled import compiled_hooks, compiled_saving, graph_bytes
from narrowband.activations.dynamo import obstacle
from tests.activations.compiling import BATCH, HIDDEN, WIDTH, broken, error, hooks, mlp, nbytes, run, saved, saving
from tests.thorough import thorough

COMPILER = os.environ.get("CXX", "g++")


needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"Inductor needs a C++ compiler, and there is no {COMPILER}"
)


pytestmark = pytest.mark.usefixtures("nothing_compiled_yet")


class Attention(nn.Module):
    def __init__(self, width=WIDTH, heads=2):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, s, d = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(b, s, self.heads, d // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(F.gelu(y.transpose(1, 2).reshape(b, s, d)))


# ---- gradients and bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "bound", "stochastic"),
    [(8, 0.01, True), (2, 0.5, False), *thorough((4, 0.1, True), (8, 0.01, False), (4, 0.1, False), (2, 0.5, True))],
)
def test_gradients_of_an_mlp_are_close_its_output_is_the_same_and_bytes_are_as_many_as_they_have_to_be(
    bits, bound, stochastic
):
    model = mlp()
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(BATCH, WIDTH)
    y, kept, wanted = run(compiled, x)
    packed_y, packed, gradients = run(compiled, x, saving(bits, stochastic=stochastic))
    assert torch.equal(packed_y, y)
    assert 0 < error(gradients, wanted) < bound
    elements = 2 * BATCH * HIDDEN
    assert kept == 4 * elements
    assert packed == elements * bits // 8 + elements // 64 * 8
    with saving(bits, stochastic=stochastic):
        assert graph_bytes(saved(compiled(x))) == (kept, packed)


@pytest.mark.parametrize("autocast", [False, *thorough(True)])
def test_gradients_of_attention_are_close_and_its_output_is_the_same(autocast):
    model = Attention()
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(4, 32, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, kept, wanted = run(compiled, x)
        eight_y, eight, at_eight = run(compiled, x, saving(8))
        four_y, four, at_four = run(compiled, x, saving(4))
    assert torch.equal(eight_y, y)
    assert torch.equal(four_y, y)
    assert error(at_eight, wanted) < 0.02
    assert error(at_eight, wanted) < error(at_four, wanted) < 0.2
    # With autocast half as much is kept, and the weights in bfloat16 besides.
    assert eight < kept * (0.8 if autocast else 0.4)
    assert four < kept * (0.7 if autocast else 0.28)


@pytest.mark.parametrize("bits", [2, *thorough(4)])
def test_queries_and_keys_have_8_bits_since_errors_of_scores_are_factors(bits):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 32, WIDTH)
    with torch.no_grad():
        model.qkv.weight[: 2 * WIDTH] *= 5
    compiled = torch.compile(model, backend="aot_eager")
    wanted = run(model, x)[2]
    assert error(run(compiled, x, saving(bits, stochastic=False))[2], wanted) < 1.0


class Of(nn.Module):
    """A function of what a linear layer makes."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(WIDTH, HIDDEN), function

    def forward(self, x):
        return self.function(self.layer(x))


EXACT = {
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(),
    "div": lambda x: x.roll(1, 0) / x,
    "log": lambda x: (x.detach().abs() + x + 0.001).log(),
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.1),
    "clamp": lambda x: x.clamp(min=0.1),
    "maximum": lambda x: torch.maximum(x, x.roll(1, 0)),
    "cumprod": lambda x: x.cumprod(1),
    "sin": lambda x: (x @ (100 * torch.eye(HIDDEN))).sin(),  # a product, which the compiler does not compute again
    "cos": lambda x: (x @ (100 * torch.eye(HIDDEN))).cos(),
    "mse_loss": lambda x: F.mse_loss(x, 1.001 * x.detach()),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, 1.001 * x.detach()),
    "huber_loss": lambda x: F.huber_loss(x, 1.001 * x.detach()),
    # Of what backward computes again from something that is saved:
    "amax of gelu": lambda x: F.gelu(x).amax(1),
    "log of relu": lambda x: (F.relu(x) + 1e-6).log(),
    "division by abs": lambda x: x / (x.abs() + 1e-3),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_bears_no_rounding_is_kept_as_it_is(name):
    model, x = Of(EXACT[name]), torch.randn(BATCH, WIDTH)
    _, _, wanted = run(model, x)
    _, _, ours = run(torch.compile(model, backend="aot_eager"), x, saving(8))
    assert error(ours, wanted) < 0.02  # of what else is saved


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor imports what PyTorch has deprecated
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.silu(x).square(),  # a quotient, as Inductor takes it apart
        lambda x: F.relu(x).square(),
        lambda x: torch.cat([half.relu().square() for half in x.chunk(2, -1)]),
        lambda x: torch.cat([F.gelu(half) for half in (2 * x + 1).chunk(2, -1)]),  # parts of what is computed again
    ],
)
def test_what_is_far_from_zero_or_has_the_same_signs_is_packed_all_the_same(function):
    model = Of(function)
    compiled, x = torch.compile(model, backend="aot_eager_decomp_partition"), torch.randn(BATCH, WIDTH)
    _, kept, wanted = run(compiled, x)
    _, packed, ours = run(compiled, x, saving(8))
    assert packed < kept / 2
    assert error(ours, wanted) < 0.02


def test_gradients_of_convolutions_that_lie_channels_last_are_close():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)
    ).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 11, 13).to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="aot_eager")
    y, kept, wanted = run(compiled, x)
    packed_y, packed, gradients = run(compiled, x, saving(8))
    assert torch.equal(packed_y, y)
    assert packed < kept / 2
    assert error(gradients, wanted) < 0.02


@pytest.mark.parametrize(
    ("make", "shapes", "dynamic"),
    [
        (mlp, [(96, WIDTH), (128, WIDTH), (77, WIDTH)], None),
        *thorough((Attention, [(3, 33, WIDTH), (4, 50, WIDTH)], True)),
    ],
)
def test_batches_of_other_sizes_are_packed_too(make, shapes, dynamic):
    model = make()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, dynamic=dynamic)
    for shape in shapes:
        compiled_before, x = counter.frame_count, torch.randn(shape)
        _, kept, _ = run(compiled, x)
        _, packed, gradients = run(compiled, x, saving(8))
        assert packed < kept * 0.4
        assert error(gradients, run(model, x)[2]) < 0.02
    assert counter.frame_count == compiled_before, "sizes are compiled one by one"


# ---- what is left alone ----------------------------------------------------------------------------------------------


def test_parameters_and_inputs_are_kept_as_they_are():
    model, x = mlp(), torch.randn(BATCH, WIDTH)
    with saving():
        y = torch.compile(model, backend="aot_eager")(x)
    places = {tensor.untyped_storage().data_ptr() for tensor in saved(y)}
    assert x.untyped_storage().data_ptr() in places
    for layer in (2, 4):
        assert model[layer].weight.untyped_storage().data_ptr() in places


def test_parameters_in_the_dtype_of_autocast_are_kept_as_they_are():
    model, x = mlp(), torch.randn(BATCH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16), saving(2):
        y = torch.compile(model, backend="aot_eager")(x)
    kept = [tensor for tensor in saved(y) if tensor.dtype == torch.bfloat16]
    for layer in (2, 4):
        weight = model[layer].weight.bfloat16()
        assert any(torch.equal(tensor, weight) or torch.equal(tensor.T, weight) for tensor in kept)


def test_one_number_per_row_is_kept_as_it_is():
    def function(x, w):
        x = x @ w
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    compiled = torch.compile(function, backend="aot_eager")
    x, w = torch.randn(1024, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
    with saving(2):
        y = compiled(x, w)
    kept, wanted = ([t for t in saved(of) if t.shape == (1024, 1)] for of in (y, compiled(x, w)))
    assert len(kept) >= len(wanted) > 0
    assert all(any(torch.equal(one, other) for one in kept) for other in wanted)


def test_integers_small_tensors_and_other_dtypes_are_kept_as_they_are():
    def function(x, one, w):
        largest = (x @ one).max(1).values  # of which indices are saved, int64
        return largest.sum() + ((x @ one) * w).sum()

    compiled = torch.compile(function, backend="aot_eager")
    for dtype, min_numel, packed in (
        (torch.float32, 1024, True),
        (torch.float32, 1025, False),
        (torch.float64, 512, False),
    ):
        x, one = torch.randn(1024 // 32, 32, dtype=dtype), torch.eye(32, dtype=dtype, requires_grad=True)
        w = torch.randn_like(x, requires_grad=True)
        plain = compiled(x, one, w)
        with saving(min_numel=min_numel):
            y = compiled(x, one, w)
        indices = [[t for t in saved(of) if t.dtype == torch.int64] for of in (y, plain)]
        assert len(indices[0]) == len(indices[1]) == 1
        assert torch.equal(indices[0][0], indices[1][0])
        assert any(t.dtype == torch.uint8 for t in saved(y)) == packed
        assert packed or nbytes(y) == nbytes(plain)


def test_what_operators_of_others_read_is_kept_as_it_is():
    @torch.library.custom_op("narrowband_tests::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    @torch.library.custom_op("narrowband_tests::cube_backward", mutates_args=())
    def cube_backward(x: Tensor, g: Tensor) -> Tensor:
        return 3 * x**2 * g

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    cube.register_fake(torch.empty_like)
    cube_backward.register_fake(lambda x, g: torch.empty_like(x + g))
    cube.register_autograd(lambda ctx, g: cube_backward(*ctx.saved_tensors, g), setup_context=save)
    model, x = nn.Linear(WIDTH, HIDDEN), torch.randn(BATCH, WIDTH)
    compiled = torch.compile(lambda x: cube(model(x)), backend="aot_eager")
    parameters = list(model.parameters())
    _, kept, wanted = run(compiled, x, wanted=parameters)
    _, packed, gradients = run(compiled, x, saving(2), wanted=parameters)
    assert packed == kept == 4 * BATCH * HIDDEN
    assert all(map(torch.equal, gradients, wanted))


# ---- what compiles, and what is in between ---------------------------------------------------------------------------


def test_outside_of_the_hooks_the_model_is_as_it_was_and_nothing_is_compiled_twice():
    counter = CompileCounterWithBackend("aot_eager")
    model = mlp()
    compiled, x = torch.compile(model, backend=counter), torch.randn(BATCH, WIDTH)
    _, kept, wanted = run(compiled, x)
    for times in range(2):
        _, eight, _ = run(compiled, x, saving(8))
        _, four, _ = run(compiled, x, saving(4))
        _, again, gradients = run(compiled, x)
        assert four < eight < kept == again
        assert all(map(torch.equal, gradients, wanted))
        assert counter.frame_count == 3, times


def test_graphs_are_freed_with_what_was_compiled(monkeypatch):
    context, graphs = graph_compile._get_saved_tensor_hook_context, weakref.WeakSet()

    def watched():
        found = context()
        graphs.add(found["_bw_graph"])
        return found

    monkeypatch.setattr(graph_compile, "_get_saved_tensor_hook_context", watched)
    compiled = torch.compile(mlp(), backend="aot_eager")
    run(compiled, torch.randn(BATCH, WIDTH), saving(8))
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert not graphs


def test_the_same_hooks_come_back():
    assert compiled_hooks(8) is compiled_hooks(8, min_numel=4096)
    assert compiled_hooks(8) is not compiled_hooks(4)


class Layers(nn.Module):
    """Layers of PyTorch alone would not be compiled one by one."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x)


def parts():
    first, second = torch.compile(Layers(), backend="aot_eager"), Layers()
    second.compile(backend="aot_eager")
    return nn.Sequential(first, nn.Tanh(), second)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo looks at it where a graph breaks
@pytest.mark.parametrize("make", [parts, broken])
def test_models_that_are_compiled_in_parts_use_other_hooks_in_between(make):
    model, x = make(), torch.randn(BATCH, WIDTH)
    _, kept, wanted = run(model, x)
    seen = []

    def pack(tensor):
        seen.append(tuple(tensor.shape))
        return tensor.detach(), "told"

    def unpack(packed):
        assert packed[1] == "told"
        return packed[0]

    _, packed, gradients = run(model, x, compiled_saving(hooks(8), (pack, unpack)))
    assert packed < kept / 2
    assert 0 < error(gradients, wanted) < 0.02
    assert set(seen) <= {(BATCH, WIDTH)}
    assert bool(seen) == (make is parts)
    calls = len(seen)
    _, packed_alone, alone = run(model, x, saving(8))  # and there are no other hooks any more
    assert packed_alone == packed
    assert all(map(torch.equal, alone, gradients))
    assert len(seen) == calls


def test_the_hooks_themselves_are_not_compiled():
    context = saving(8)

    @torch.compile(backend="aot_eager")
    def function(x):
        with context:  # Dynamo gives the frame up at that, and looks into every other that is called from it
            return x.exp().sum()

    counters.clear()
    x = torch.randn(64, 64, requires_grad=True)
    y = function(x)
    assert counters["frames"]["total"] == 1
    assert torch.equal(torch.autograd.grad(y, x)[0], x.exp())


def test_a_tensor_that_changed_between_graphs_is_noticed():
    x = torch.randn(64, 64, requires_grad=True)
    with compiled_saving(hooks(8)):
        y = x.exp()  # saves its result
        y.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: torch.float32 \[64, 64\]"):
            y.sum().backward()


def test_a_backend_that_does_not_compile_saves_between_graphs():
    model, x = mlp(), torch.randn(BATCH, WIDTH)
    seen = []
    compiled = torch.compile(model, backend="eager")
    wanted = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()))
    between = lambda tensor: seen.append(1) or tensor.detach(), lambda tensor: tensor
    with compiled_saving(hooks(8), between):
        y = compiled(x)
    assert seen
    assert all(map(torch.equal, torch.autograd.grad(y.square().mean(), list(model.parameters())), wanted))


def test_checkpoint_around_compiled_layers_works_and_within_them_randomness_is_refused():
    inner, x = Attention(), torch.randn(4, 32, WIDTH)
    wanted = torch.autograd.grad(inner(x).square().mean(), list(inner.parameters()))
    compiled = torch.compile(inner, backend="aot_eager")
    with compiled_saving(hooks(8)):
        y = checkpoint(compiled, x, use_reentrant=False)
    gradients = torch.autograd.grad(y.square().mean(), list(inner.parameters()))
    assert error(gradients, wanted) < 1e-5  # recomputed in full, so nothing of it is kept

    def dropped(x):
        return F.dropout(inner(x), 0.1)

    within = torch.compile(lambda x: checkpoint(dropped, x, use_reentrant=False), backend="aot_eager")
    with saving(8), pytest.raises(Exception, match=r"UnsupportedError: .*torch\.utils\.checkpoint") as caught:
        within(x)
    assert "compile what is inside torch.utils.checkpoint" in str(caught.value)


# ---- set-up ----------------------------------------------------------------------------------------------------------


def test_an_obstacle_is_named(monkeypatch):
    assert obstacle() is None
    monkeypatch.delattr("torch._functorch._aot_autograd.graph_compile._get_saved_tensor_hook_context")
    assert f"compiled models with PyTorch {torch.__version__}" in obstacle()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits=3 must be 8, 4 or 2"),
        ({"bits": 8, "group": 12}, "group=12"),
        ({"bits": 8, "group": 0}, "group=0"),
        ({"bits": 8, "min_numel": 255}, "min_numel=255 must be at least group=256"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        compiled_hooks(**options)


# ---- Inductor --------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor imports what PyTorch has deprecated
def test_inductor_packs_and_its_cache_on_disk_knows_one_packing_from_another():
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    x = torch.randn(BATCH, WIDTH)
    y, _, wanted = run(model, x)
    elements = BATCH * HIDDEN
    ends = []
    for bits, hit in ((8, None), (8, 1), (4, None)):
        torch._dynamo.reset()
        counters.clear()
        with inductor.patch({"cpp.simdlen": 1}):  # headers of vectors take long to compile
            packed_y, packed, gradients = run(torch.compile(model), x, saving(bits))
        assert torch.allclose(packed_y, y, atol=1e-5)
        assert packed == elements * bits // 8 + elements // 64 * 8
        assert error(gradients, wanted) < (0.01 if bits == 8 else 0.1)
        assert hit is None or counters["aot_autograd"]["autograd_cache_hit"] == hit
        ends.append(gradients)
    assert all(map(torch.equal, ends[0], ends[1]))


@pytest.mark.thorough
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor imports what PyTorch has deprecated
def test_inductor_packs_attention():
    model, x = Attention(), torch.randn(4, 32, WIDTH)
    y, _, wanted = run(model, x)
    packed_y, packed, gradients = run(torch.compile(model), x, saving(4, stochastic=False))
    assert torch.allclose(packed_y, y, atol=1e-4)
    assert error(gradients, wanted) < 0.2
    assert packed < x.numel() * 12
