"""Modules that backward computes again: as if torch.utils.checkpoint were around them, and gone afterwards."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import narrowband as nb
from tests.activations.helpers import payloads
from tests.activations.models import SMALL, ResNet, ViT, error, images, same
from tests.torches import since_2_12

# Dynamo looks at gradients of what it did not compute itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

MLPS = {"blocks.*.mlp": "checkpoint"}


def compress(model, **options):
    return nb.compress_activations(model, **{"min_numel": SMALL, **options})


def step(model, inputs, *, inside=False, autocast=False, **options):
    """Result, gradients and what was saved, of one step; without options a plain one."""
    torch.manual_seed(1)
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(compress(model, **options)) if options else None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(*inputs)
        if inside:
            y.float().square().mean().backward()
    if not inside:
        y.float().square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return y.detach(), grads, saved


def made(build=ViT):
    torch.manual_seed(0)
    return build()


class Counted(nn.Module):
    """Counts its calls, and takes what it is given in many ways."""

    def __init__(self, *inner):
        super().__init__()
        self.inner, self.calls = nn.ModuleList(inner), 0

    def forward(self, x, *others, scale=1.0, more=()):
        self.calls += 1
        for inner in self.inner:
            x = inner(x)
        for other in (*others, *more):
            x = x * other
        return torch.tanh(x) * scale


class Chain(nn.Module):
    def __init__(self, *parts, dim=32):
        super().__init__()
        self.first, self.parts = nn.Linear(dim, dim), nn.ModuleList(parts)

    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("bits", [8, "off"])
def test_it_is_what_a_checkpoint_written_by_hand_is(bits, inside, autocast):
    """Dropout within, which draws the same numbers again."""
    by_hand, model, x = made(), made(), (images(),)
    for block in by_hand.blocks:
        block.mlp.forward = functools.partial(checkpoint, block.mlp.forward, use_reentrant=False)
    how = {"inside": inside, "autocast": autocast}
    y, grads, saved = step(by_hand, x, bits=bits, **how)
    our_y, our_grads, ours = step(model, x, bits=bits, modules=MLPS, **how)
    assert same(our_y, y)
    assert all(same(our_grads[name], grads[name]) for name in grads)
    assert ours.by_operator.keys() == saved.by_operator.keys()
    for name, kept in saved.by_operator.items():
        assert (ours.by_operator[name].raw_bytes, ours.by_operator[name].kept_bytes) == (
            kept.raw_bytes,
            kept.kept_bytes,
        )
    assert ours.by_module["blocks.0.mlp"].raw_bytes == 4 * 16 * 32 * (2 if autocast else 4) or autocast
    plain_y, plain, _ = step(model, x, autocast=autocast)
    assert same(our_y, plain_y)
    assert all(same(our_grads[name], plain[name]) for name in plain) == (bits == "off")
    assert error(our_grads, plain) < 0.05


def saved_products(_, operator, *args, **kwargs):
    """A selective checkpoint's policy: save what linear layers return, and compute everything else again."""
    linear = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if linear else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters,
    reason="selective checkpoints of this PyTorch know nothing of hooks on saved tensors",
)
def test_what_a_selective_checkpoint_saves_is_kept_in_few_bits_if_asked_for():
    """PyTorch 2.15 has users choose, and warns of a choice that was not made."""
    contexts = functools.partial(create_selective_checkpoint_contexts, saved_products)
    found = {}
    for respected in (False, True):
        model = made()
        options = {"use_reentrant": False, "context_fn": contexts, "respect_saved_tensors_hooks": respected}
        for block in model.blocks:
            block.mlp.forward = functools.partial(checkpoint, block.mlp.forward, **options)
        found[respected] = step(model, (images(),), bits=8)
    _, plain, _ = step(made(), (images(),))
    (_, grads, exact), (_, rounded, packed) = found[False], found[True]
    more = packed.raw_bytes - exact.raw_bytes
    assert 0 < packed.kept_bytes - exact.kept_bytes < 0.4 * more
    assert 0 < error(rounded, grads) < 0.05
    assert error(rounded, plain) < 0.05


def test_only_the_inputs_are_kept_and_those_in_their_own_bits():
    model, x = made(), (images(),)
    elements = 4 * 16 * 32
    _, _, saved = step(model, x, bits="off", modules={"blocks.*": "checkpoint"})
    assert {name: kept.kept_bytes for name, kept in saved.by_module.items() if name.startswith("blocks")} == {
        "blocks.0": 4 * elements,
        "blocks.1": 4 * elements,
    }
    _, _, saved = step(model, x, bits=8, modules={"blocks.*": "checkpoint", "blocks.1:checkpoint": 4})
    ranges = 8 * elements // 64  # rows are short here, as patches come out of a convolution: of 64 neighbours
    assert saved.by_module["blocks.0"].kept_bytes == elements + ranges
    assert saved.by_module["blocks.1"].kept_bytes == elements // 2 + ranges
    _, _, saved = step(model, x, bits=8, modules={"blocks.*": "checkpoint", "blocks.0*": 8})
    assert saved.by_module["blocks.0.attn"].kept_bytes
    assert "blocks.1.attn" not in saved.by_module


class Doubled(nn.Module):
    """Backward sees the input itself."""

    def forward(self, x):
        return x.square() + x


@pytest.mark.parametrize("layout", ["rows", "channels", "channels last"])
def test_a_row_that_is_large_takes_nothing_from_the_others(layout):
    """As a class token does, or an image of much contrast. In one range with it, all others would be rounded to it."""
    torch.manual_seed(0)
    if layout == "rows":
        x, large = torch.randn(4, 64, 48), (slice(None), 0)
    else:
        x, large = torch.randn(4, 48, 8, 64), (0,)
        x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x
    x[large] *= 100
    x = (x + 0).detach()
    first, block = nn.Identity(), Doubled()
    model = nn.Sequential(first, block)
    model.register_parameter("one", nn.Parameter(torch.ones(())))
    first.forward = lambda x: x * model.one  # a result of the model: its input would live anyway
    kept = (x * 1).requires_grad_()
    with nb.compress_activations(model, modules={"1": "checkpoint"}) as saved:
        y = model(kept)
    (gradient,) = torch.autograd.grad(y.sum(), kept)
    off = (gradient - (2 * x + 1)).abs()
    off[large] = 0
    assert off.max() < 2 * 2 * x.abs().amax() / 100 * 2 / 255  # a step of the small rows' ranges, doubled by 2·x
    assert off.max() > 0
    row = {"rows": 48, "channels": 64, "channels last": 48}[layout]
    assert saved.by_operator["checkpoint"].kept_bytes == x.numel() + 8 * x.numel() // row


def test_the_model_itself_may_be_one():
    model, x = made(), (images(),)
    _, plain, _ = step(model, x)
    for pattern in ("", "*"):
        _, grads, saved = step(model, x, modules={pattern: "checkpoint"})
        assert saved.kept_bytes == 0
        assert all(same(grads[name], plain[name]) for name in plain)


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_within_is_covered_and_runs_once_more(inside):
    leaf = Counted(nn.Linear(32, 32))
    outer = Counted(leaf)
    by_hand = Counted(nn.Linear(32, 32))
    shared = Counted(nn.Linear(32, 32))

    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = by_hand

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Chain(outer, ByHand(), shared, Counted(shared))
    modules = {"parts.0*": "checkpoint", "parts.1.inner": "checkpoint", "parts.[23]": "checkpoint"}
    x = (torch.randn(20, 32),)
    _, plain, _ = step(model, x)
    counts = (leaf, outer, by_hand, shared)
    for module in counts:
        module.calls = 0
    _, grads, saved = step(model, x, inside=inside, bits="off", modules=modules)
    assert [module.calls for module in counts] == [2, 2, 2, 4]
    assert all(same(grads[name], plain[name]) for name in plain)
    assert saved.by_operator["checkpoint"].kept_bytes == 4 * 20 * 32 * 4


def test_tensors_are_inputs_wherever_they_are_in_the_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part = nn.Linear(32, 32), Counted(nn.Linear(32, 32))

        def forward(self, x):
            x = self.first(x)
            return self.part(x, x * 2, 0.5, scale=x + 1, more=[x + 2, x * 3])

    model, x = made(Model), (torch.randn(20, 32),)
    y, plain, _ = step(model, x)
    our_y, grads, saved = step(model, x, bits=8, modules={"part": "checkpoint"})
    assert same(our_y, y)
    assert 0 < error(grads, plain) < 0.04
    assert saved.by_module["part"].kept_bytes == 5 * (20 * 32 + 20 * 8)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda h: h[:, 1:],
        lambda h: h.chunk(2, -1)[1],
        lambda h: h[..., ::2],
        lambda h: h.transpose(1, 2)[:, ::2],
        lambda h: h.unfold(-1, 16, 4)[:, :, 1],
        lambda h: h.as_strided((4, 16, 16), (512, 17, 2)),
        lambda h: h[:, :1].expand(4, 16, 32),
    ],
    ids=["without first", "half", "every other", "transposed", "part of windows", "windows that overlap", "expanded"],
)
def test_an_input_that_is_a_view_with_gaps_comes_back_with_them(view, by_hand):
    """A linear layer with a bias saves other tensors of an input that it cannot take as one matrix."""

    class Part(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.first, self.part = nn.Linear(32, 32), nn.Sequential(nn.Linear(dim, 24), nn.GELU())

        def forward(self, x):
            h = view(self.first(x))
            return checkpoint(self.part, h, use_reentrant=False) if by_hand else self.part(h)

    x = torch.randn(4, 16, 32)
    model = made(lambda: Part(view(x).shape[-1]))
    y, grads, _ = step(model, (x,), bits=8, modules={} if by_hand else {"part": "checkpoint"})
    plain_y, plain, _ = step(model, (x,))
    assert same(y, plain_y)
    assert error(grads, plain) < 0.05


def test_running_statistics_see_a_batch_once():
    """Where torch.utils.checkpoint has them see it twice."""
    modules = {"layer*": "checkpoint"}
    model, ours, by_hand, x = made(ResNet), made(ResNet), made(ResNet), (images(),)
    for layer in (by_hand.layer1, by_hand.layer2):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    for at in (model, by_hand):
        step(at, x)
    with compress(ours, bits="off", modules=modules):
        y = ours(*x).square().mean()
    y.backward(retain_graph=True)
    y.backward()
    buffers = dict(model.named_buffers())
    assert all(same(buffer, buffers[name]) for name, buffer in ours.named_buffers())
    assert not same(by_hand.layer1.bn1.running_mean, model.layer1.bn1.running_mean)
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step(model, x, modules=modules)
    assert all(same(buffer, before[name]) for name, buffer in model.named_buffers())


def test_nothing_runs_again_where_there_is_no_backward():
    part = Counted(nn.Linear(32, 32))
    model = Chain(part)
    with compress(model, modules={"parts.0": "checkpoint"}) as saved, torch.no_grad():
        model(torch.randn(20, 32))
    assert (part.calls, saved.raw_bytes) == (1, 0)


def test_it_lasts_as_long_as_the_context():
    part = Counted(nn.Linear(32, 32))
    part.forward = own = functools.partial(part.forward, scale=2.0)
    model = Chain(part, nn.Linear(32, 32))
    handle = compress(model, modules={"parts.*": "checkpoint"})
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), handle:
            y = model(torch.randn(20, 32))
            assert part.forward is not own
            if fails:
                raise ZeroDivisionError
        assert part.forward is own
        assert "forward" not in vars(model.parts[1])
        before = part.calls
        y.sum().backward()  # of a forward within
        assert part.calls == before + 1
    part.calls = 0
    model(torch.randn(20, 32)).sum().backward()
    assert part.calls == 1


def test_a_model_is_freed_after_backward():
    model = Chain(Counted(nn.Linear(32, 32)))
    alive = weakref.ref(model.parts[0])
    with compress(model, modules={"parts.0": "checkpoint"}):
        y = model(torch.randn(20, 32)).sum()
    y.backward()
    del model, y
    gc.collect()
    assert alive() is None


def test_each_thread_has_its_own():
    part = Counted(nn.Linear(32, 32))
    model, x = Chain(part), torch.randn(20, 32)
    both, found = threading.Barrier(2, timeout=180), {}

    def run(name, **options):
        with compress(model, **options) as saved:
            both.wait()
            y = model(x)
            both.wait()
        found[name] = torch.autograd.grad(y.square().sum(), list(model.parameters())), saved

    threads = [
        threading.Thread(target=run, args=("again",), kwargs={"bits": "off", "modules": {"parts.0": "checkpoint"}}),
        threading.Thread(target=run, args=("once",), kwargs={"bits": "off"}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(map(same, found["again"][0], plain))
    assert all(map(same, found["once"][0], plain))
    assert "checkpoint" in found["again"][1].by_operator
    assert "checkpoint" not in found["once"][1].by_operator
    assert "forward" not in vars(part)


def test_changing_an_input_in_place_is_an_error():
    model = Chain(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(32, 32)))
    with compress(model, modules={"parts.0": "checkpoint"}):
        y = model(torch.randn(20, 32))
    with pytest.raises(RuntimeError, match=r"which checkpoint in parts\.0 saved for backward, is at version"):
        y.sum().backward()


def test_it_counts_as_compression(caplog):
    model = Chain(Counted(nn.Linear(32, 32)))
    with compress(model, bits="off", modules={"parts.0": "checkpoint"}):
        model(torch.randn(20, 32))
    assert not caplog.records


# ---- with torch.compile ----------------------------------------------------------------------------------------------


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def compiled_in_place(module):
    module.compile(backend="aot_eager")
    return module


@pytest.mark.usefixtures("nothing_compiled_yet")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", [compiled, compiled_in_place])
def test_a_compiled_module_is_computed_again(how, inside):
    torch.manual_seed(0)
    model = Chain(how(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))), nn.Linear(32, 32))
    x = (torch.randn(20, 32),)
    y, plain, _ = step(model, x)
    our_y, grads, saved = step(model, x, inside=inside, bits=8, modules={"parts.0": "checkpoint"})
    assert same(our_y, y)
    assert 0 < error(grads, plain) < 0.02
    assert "compiled" not in saved.by_operator
    assert (saved.by_module["parts.0"].raw_bytes, saved.by_module["parts.0"].kept_bytes) == (4 * 20 * 32, 20 * 40)


@pytest.mark.usefixtures("nothing_compiled_yet")
def test_a_compiled_model_may_be_one():
    model, x = compiled(made()), (images(),)
    _, _, saved = step(model, x, modules={"": "checkpoint"})
    assert saved.kept_bytes == 0


@pytest.mark.parametrize("after", [False, True])
def test_a_module_within_a_compiled_one_is_refused(after):
    model = made()
    message = r"'blocks.0.mlp' cannot be recomputed: it lies inside 'the model', which is compiled.* one by one"
    if after:
        handle = compress(model, modules=MLPS)
        model.compile(backend="aot_eager")
        with pytest.raises(nb.UnsupportedError, match=message):
            handle.__enter__()
        return
    with pytest.raises(nb.UnsupportedError, match=message):
        compress(compiled(model), modules=MLPS)
    model.blocks[1] = compiled(model.blocks[1])
    compress(model, modules={"blocks.0.mlp": "checkpoint", "blocks.1": "checkpoint"})


@pytest.mark.usefixtures("nothing_compiled_yet")
@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
@since_2_12("its guards know no attribute of a thread that is an object")
def test_in_a_compiled_function_it_runs_as_it_is_written():
    part = Counted(nn.Linear(32, 32))
    model, x = Chain(part), torch.randn(20, 32)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with compress(model, bits="off", modules={"parts.0": "checkpoint"}) as saved:
        y = compiled(lambda x: model(x).square().sum())(x)
    assert all(map(torch.allclose, torch.autograd.grad(y, list(model.parameters())), wanted))
    assert saved.by_module["parts.0"].kept_bytes == 4 * 20 * 32


@pytest.mark.usefixtures("nothing_compiled_yet")
def test_a_compiled_module_in_a_checkpoint_is_not_looked_into():
    """Which would compute it again during forward."""
    calls = []
    part = compiled(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))

    def run(x):
        calls.append(x)
        return part(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part = nn.Linear(32, 32), part

        def forward(self, x):
            return checkpoint(run, self.first(x), use_reentrant=False)

    model = Model()
    with compress(model, bits=8) as saved:
        y = model(torch.randn(20, 32))
    assert len(calls) == 1
    assert saved.by_operator.keys() == {"checkpoint"}
    y.sum().backward()
    assert len(calls) == 2


class Routed(nn.Module):
    """Sends each row to the expert with the largest score."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class Around(nn.Module):
    """A checkpoint around a module, if wanted."""

    def __init__(self, module, **options):
        super().__init__()
        self.first, self.module, self.options = nn.Linear(32, 32), module, options

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.module, x, **self.options) if self.options else self.module(x)


@pytest.mark.parametrize("by_policy", [False, True])
def test_routing_that_rounding_changes_is_an_error_that_names_the_remedy_and_the_remedy_works(by_policy):
    torch.manual_seed(0)
    model = Around(Routed(), **({} if by_policy else {"use_reentrant": False}))
    modules = {"module": "checkpoint"} if by_policy else {}
    x = torch.randn(4096, 32)
    with pytest.raises(CheckpointError, match=r'Keep these inputs exact: operators=\{"checkpoint": "off"\}') as raised:
        step(model, (x,), modules=modules, bits=2, operators={"checkpoint": 2})
    assert "metadata" in str(raised.value) or "number of tensors" in str(raised.value)
    model.zero_grad()
    plain = step(model, (x,))
    found = step(model, (x,), modules=modules, operators={"checkpoint": "off"})
    assert all(torch.equal(found[1][name], grad) for name, grad in plain[1].items())


def test_an_error_of_a_checkpoint_with_exact_inputs_is_pytorchs_own_and_nothing_lives_longer():
    class Changes(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x[: len(x) // self.calls]).tanh()

    class OfAnotherType(Changes):
        def forward(self, x):
            self.calls += 1
            return nn.Linear.forward(self, x).to((torch.float32, torch.bfloat16)[self.calls - 1]).tanh().float()

    for operators, remedy, kind in (
        ({"checkpoint": "off"}, False, Changes),
        ({}, True, Changes),
        ({}, False, OfAnotherType),
    ):
        model = Around(kind(32, 32), use_reentrant=False)
        with pytest.raises(CheckpointError) as raised:
            step(model, (torch.randn(64, 32),), operators=operators)
        assert ("Keep these inputs exact" in str(raised.value)) == remedy
    gc.collect()
    before, _ = payloads(), gc.disable()
    try:
        step(Around(nn.Linear(32, 32), use_reentrant=False), (torch.randn(64, 32),), bits=8)
        assert payloads() == before
    finally:
        gc.enable()
