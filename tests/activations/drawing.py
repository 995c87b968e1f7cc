"""Models, policies and steps drawn from a seed, and what always holds of them.

``python -m tests.activations.drawing 0 300`` checks the seeds from 0 to 299, and prints what does not hold.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import random
import sys
import threading
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import narrowband as nb
from narrowband.activations import recorder
from narrowband.activations.packed import Exact, Packed, Payload
from narrowband.activations.recompute import Derivation

WIDTH, TOKENS, CLASSES = 32, 16, 10


# ---- models ----------------------------------------------------------------------------------------------------------


def heads(h):
    return h.unflatten(-1, (4, 8)).transpose(1, 2)


def merged(o):
    return o.transpose(1, 2).flatten(2)


def causal(h):
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=h.device).tril()


def by_steps(h, training):
    scores = (heads(h) @ heads(h).roll(1, 1).transpose(-1, -2)) / 8**0.5
    shares = scores.masked_fill(~causal(h), float("-inf")).softmax(-1)
    return merged(F.dropout(shares, 0.1, training) @ heads(h))


def attention(h, **options):
    q = heads(h)
    return merged(F.scaled_dot_product_attention(q, q.roll(1, 1), q.flip(1), **options))


def grouped_queries(h):
    few = heads(h)[:, :2]
    return merged(F.scaled_dot_product_attention(heads(h), few.roll(1, 1), few, enable_gqa=True))


def cell(h, step):
    state, states = torch.zeros_like(h[:, 0]), []
    for token in h.unbind(1):
        state = torch.tanh(step(state) + token)
        states.append(state)
    return torch.stack(states, 1)


def planes(function):
    """A function of (batch, channels, rows, columns) as one of (batch, tokens, channels)."""
    return lambda h, m: function(h.transpose(1, 2).unflatten(2, (4, 4)), m).flatten(2).transpose(1, 2)


def unseen(h):
    with torch.no_grad():
        gate = F.gelu(h)
    return h * gate


def written(h):
    h = h.clone()
    h[:, 0], h[:, :, 3] = 0, h[:, :, 3] * 2
    return F.gelu(h)


def steps_of_lstm(h, cell):
    state, states = None, []
    for token in h.unbind(1):
        state = cell(token, state)
        states.append(state[0])
    return torch.stack(states, 1)


def frozen(encoder, h):
    """A layer in evaluation, whose result counts as a constant: it takes PyTorch's fast path."""
    was = encoder.training
    with torch.no_grad():
        shift = encoder.eval()(h.detach())
    encoder.train(was)
    return h * torch.sigmoid(shift)


def routed(h, m):
    """Two experts, each of which sees those tokens that it is best for; there may be none."""
    with torch.no_grad():
        best = m.norm(h).mean(-1) > 0
    y = torch.zeros_like(h)
    y[best] = F.gelu(m.last(h[best])).to(y.dtype)
    y[~best] = m.last(F.silu(h[~best])).to(y.dtype)
    return y


def viewed(h):
    h = h * 1
    h[:, ::2].mul_(0.5)
    h.view(-1)[: WIDTH * 3].add_(1)
    return F.silu(h.unflatten(-1, (4, 8))[..., :7]).flatten(2).repeat(1, 1, 2)[..., :WIDTH]


def rms(h):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def rms_of_cast(h):
    return h * torch.rsqrt(h.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)


def gate(function, a, b):
    return (function(a) * b).repeat(1, 1, 2)


def hooked(h):
    h = F.gelu(h)
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.5)
    return h * h


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * 0.3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 0.6 * x * gradient


#: Name → a function of a linear layer's result, and of the module with that layer.
FUNCTIONS = {
    "attention": lambda h, _: attention(h),
    "attention, causal": lambda h, _: attention(h, is_causal=True),
    "attention, dropout": lambda h, m: attention(h, dropout_p=0.2 * m.training),
    "attention, masked": lambda h, _: attention(h, attn_mask=causal(h)),
    "attention, added mask": lambda h, _: attention(
        h, attn_mask=h.new_zeros(TOKENS, TOKENS).masked_fill(~causal(h), -1e4)
    ),
    "attention, grouped queries": lambda h, _: grouped_queries(h),
    "attention, step by step": lambda h, m: by_steps(h, m.training),
    "self": lambda h, _: (h @ h.transpose(1, 2)) @ h * 0.05,
    "gelu": lambda h, _: F.gelu(h),
    "gelu, tanh": lambda h, _: F.gelu(h, approximate="tanh"),
    "gelu of parts": lambda h, _: torch.cat([F.gelu(h[:, :5]), F.silu(h[:, 5:])], 1),
    "silu, in place": lambda h, _: F.silu(h, inplace=True),
    "silu of a transposed": lambda h, _: F.silu(h.transpose(1, 2)).transpose(1, 2) * h,
    "gated": lambda h, _: F.silu(h[..., ::2]).repeat(1, 1, 2) * h,
    "gate of halves": lambda h, _: gate(F.silu, *h.chunk(2, -1)),
    "gate of halves, other order": lambda h, _: gate(lambda x: x, *h.flip(-1).chunk(2, -1)[::-1]),
    "gate, shared": lambda h, _: (g := F.gelu(h)) * h + torch.tanh(g * h),
    "scaled": lambda h, m: F.gelu(h) * m.last.bias + h * m.norm.weight,
    "product, in place": lambda h, m: h.mul_(m.last.bias),
    "glu": lambda h, _: F.glu(torch.cat([h, h.flip(1)], -1)),
    "relu, in place": lambda h, _: F.relu_(h),
    "relu, squared": lambda h, _: F.relu(h).square(),
    "relu, shared": lambda h, _: (r := F.relu(h)) + r * torch.tanh(r),
    "relu6": lambda h, _: F.relu6(h),
    "leaky relu, in place": lambda h, _: F.leaky_relu_(h, 0.1),
    "hardtanh": lambda h, _: F.hardtanh(h),
    "elu, in place": lambda h, _: F.elu_(h),
    "mish": lambda h, _: F.mish(h),
    "dropout": lambda h, m: F.dropout(F.gelu(h), 0.1, m.training),
    "dropout, in place": lambda h, m: F.dropout(h, 0.2, m.training, inplace=True),
    "softmax": lambda h, _: h.softmax(-1) * 8,
    "log-softmax": lambda h, _: h.log_softmax(-1),
    "normalize": lambda h, _: F.normalize(h, dim=-1) * 4,
    "division": lambda h, _: h / (1 + h.abs()),
    "largest": lambda h, _: h - h.amax(-1, keepdim=True),
    "sort": lambda h, _: h.sort(-1).values,
    "sum": lambda h, _: h.cumsum(1) * 0.2,
    "expanded": lambda h, _: h * h.mean(1, keepdim=True).expand_as(h),
    "einsum": lambda h, _: torch.einsum("btc,btd->bcd", h, h).tanh()[:, ::2],
    "written": lambda h, _: written(h),
    "no_grad": lambda h, _: unseen(h),
    "float32": lambda h, _: F.gelu(h.float()).to(h.dtype) * h,
    "vmap": lambda h, _: torch.vmap(F.gelu)(h),
    "custom": lambda h, _: Square.apply(h),
    "layer norm": lambda h, m: m.norm(h),
    "layer norm, shared": lambda h, m: m.last(n := m.norm(h)) + F.gelu(n) + n * h,
    "layer norm, twice": lambda h, m: m.norm(m.norm(h)),
    "layer norm of both": lambda h, _: F.layer_norm(h, (TOKENS, WIDTH)),
    "layer norm of parts": lambda h, _: F.layer_norm(h.unflatten(-1, (4, 8)), (8,)).flatten(2),
    "rms norm": lambda h, _: F.rms_norm(h, (WIDTH,)),
    "rms norm, weighted": lambda h, m: F.rms_norm(h, (WIDTH,), m.norm.weight, 1e-6),
    "rms norm, shared": lambda h, m: m.last(n := F.rms_norm(h, (WIDTH,), m.norm.weight)) + F.gelu(n) + n * h,
    "rms norm of parts": lambda h, m: F.rms_norm(h.unflatten(-1, (4, 8)), (8,), m.norm.weight[:8]).flatten(2),
    "rms norm, written": lambda h, m: m.norm.weight * rms(h),
    "rms norm, written, shared": lambda h, m: m.last(n := rms(F.silu(h))) + F.gelu(n) * h,
    "rms norm, written in float32": lambda h, m: m.norm.weight * rms(h.to(torch.float32)).to(h.dtype),
    "rms norm, written of 16 bits": lambda h, m: m.norm.weight * rms_of_cast(h).to(h.dtype),
    "rms norm, written for parts": lambda h, _: rms(h.unflatten(-1, (4, 8))).flatten(2),
    "rms norm, written for heads": lambda h, _: merged(rms(heads(h))),
    "rms norm, of a tensor that is cast": lambda h, m: (rms(h.float()) * (1 + m.norm.weight)).type_as(h) * h,
    "group norm": lambda h, _: F.group_norm(h, 4),
    "batch norm of tokens": lambda h, _: F.batch_norm(h, None, None, training=True),
    "conv": planes(lambda p, m: m.conv(p)),
    "conv, channels last": planes(lambda p, m: F.relu_(m.conv(p.contiguous(memory_format=torch.channels_last)))),
    "conv, groups": planes(lambda p, m: F.silu(F.conv2d(p, m.conv.weight[:, :8], m.conv.bias, padding=1, groups=4))),
    "conv, transposed": planes(lambda p, m: F.conv_transpose2d(p, m.conv.weight, padding=1)),
    "conv, one dimension": lambda h, m: F.gelu(
        F.conv1d(h.transpose(1, 2), m.conv.weight[:, :, 1], padding=1)
    ).transpose(1, 2),
    "conv, depthwise": planes(lambda p, m: F.gelu(F.conv2d(p, m.conv.weight[:, :1], padding=1, groups=WIDTH))),
    "batch norm": planes(lambda p, m: F.relu_(m.batch_norm(m.conv(p)))),
    "instance norm": planes(lambda p, m: F.instance_norm(m.conv(p))),
    "max pool": planes(lambda p, _: F.interpolate(F.max_pool2d(p, 2), scale_factor=2)),
    "average pool": planes(lambda p, _: p * torch.sigmoid(F.adaptive_avg_pool2d(p, 1))),
    "recurrent": lambda h, m: cell(h, m.last),
    "gru": lambda h, m: m.gru(h)[0],
    "lstm": lambda h, m: m.lstm(h)[0],
    "lstm, step by step": lambda h, m: steps_of_lstm(h, m.cell),
    "multi-head attention": lambda h, m: m.heads(h, h, h)[0],
    "multi-head attention, no weights": lambda h, m: m.heads(h, h.flip(1), h, need_weights=False)[0],
    "encoder": lambda h, m: m.encoder(h),
    "frozen encoder": lambda h, m: frozen(m.encoder, h),
    "same weight twice": lambda h, m: F.linear(F.gelu(F.linear(h, m.last.weight)), m.last.weight.T),
    "sparse mixture": routed,
    "views in place": lambda h, _: viewed(h),
    "empty parts": lambda h, _: torch.cat([F.gelu(h[:, :0]), F.silu(h)], 1),
    "tensor hook": lambda h, _: hooked(h),
    "baddbmm": lambda h, _: torch.baddbmm(h, h @ h.transpose(1, 2), h, beta=0.5, alpha=0.02),
    "complex": lambda h, _: torch.fft.irfft(torch.fft.rfft(h.float(), dim=1) * 0.9, n=TOKENS, dim=1).to(h.dtype),
    "loss inside": lambda h, _: h * (1 + F.mse_loss(h, h.roll(1, 0).detach())),
}


#: Functions that compute in float32 whatever they are given.
IN_FLOAT32 = (
    "float32",
    "rms norm, written in float32",
    "rms norm, written of 16 bits",
    "rms norm, of a tensor that is cast",
)


class Between(nn.Module):
    """A function between two linear layers, around it what ``residual`` says, and a checkpoint where there is one."""

    num_heads = 4

    def __init__(self, name, residual, checkpointed):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.before = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(WIDTH, track_running_stats=checkpointed is None)
        self.gru, self.lstm = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.heads = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.name, self.residual, self.checkpointed = name, residual, checkpointed

    def inner(self, x):
        return self.last(FUNCTIONS[self.name](self.first(x), self))

    def whole(self, x):
        if self.residual == "pre":
            return x + self.inner(self.before(x))
        if self.residual == "post":
            return self.before(x + self.inner(x))
        if self.residual == "twice":
            return self.inner(self.inner(self.before(x))).add_(x)
        if self.residual == "parallel":
            return x + self.inner(n := self.before(x)) + F.silu(n)
        return self.inner(x)

    def forward(self, x):
        if self.checkpointed is None:
            return self.whole(x)
        return checkpoint(self.whole, x, use_reentrant=self.checkpointed)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.inputs, self.probabilities = c["inputs"], c["probabilities"]
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Between(*layer) for layer in c["layers"])
        self.head = nn.Linear(WIDTH, CLASSES)
        if c["tied"]:
            self.head = nn.Linear(WIDTH, 50)
            self.head.weight = self.embedding.weight
        if c["frozen"]:
            self.layers[0].requires_grad_(False)
        if c["hooks"]:
            self.layers[0].register_full_backward_hook(lambda _, given, __: (given[0] * 1,))
            self.layers[0].last.register_forward_hook(lambda _, __, y: y * 1.5)
            self.head.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))

    def forward(self, x):
        x = self.embedding(x) if self.inputs == "tokens" else x[..., ::2] if self.inputs == "strided" else x
        x = x + self.embedding.weight[:TOKENS].to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        return y.softmax(-1) if self.probabilities else y


# ---- drawing ---------------------------------------------------------------------------------------------------------

MODES = (
    "plain",
    "plain",
    "inside",
    "retain",
    "twice",
    "dropped",
    "second",
    "batched",
    "evaluates",
    "anew",
    "thread",
    "functional",
)
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def draw(seed):
    rng = random.Random(seed)
    layers = [
        (
            rng.choice(list(FUNCTIONS)), rng.choice((None, "pre", "post", "twice", "parallel")),
            rng.choice((None, None, None, None, False, True)),
        )
        for _ in range(rng.randint(1, 3))
    ]  # fmt: skip
    granularity = rng.choice(("group", "group", "layer", 8, 64, 256))
    least = granularity if isinstance(granularity, int) else 1
    some = rng.sample(sorted(nb.activations.OPERATORS), 2) if rng.random() < 0.4 else ()
    policy = {
        "bits": rng.choice((8, 8, 8, 4, 2, "off")), "operators": {name: rng.choice((8, 4, 2, "off")) for name in some},
        "min_numel": max(least, rng.choice((1, 64, 1000))), "granularity": granularity,
        "statistics": rng.choice(("running", "running", "sample")), "decay": rng.choice((0.9, 0.9, 0, 0.99)),
        "symmetric": rng.random() < 0.2, "rounding": rng.choice(("nearest", "stochastic")),
        "derive": rng.random() < 0.75,
    }  # fmt: skip
    if rng.random() < 0.3:
        pattern, bits = rng.choice(("layers.0*", "*", "head")), rng.choice((8, 4, "off", "checkpoint"))
        policy["modules"] = {pattern: bits}
    again = "checkpoint" in policy.get("modules", {}).values() or any(how is not None for *_, how in layers)
    if again:  # a router may send tokens elsewhere in the second run, which is an error that says so
        layers = [("gelu" if name == "sparse mixture" else name, *rest) for name, *rest in layers]
    fused = any(("attention" in name and "step" not in name) or name == "encoder" for name, *_ in layers)
    # PyTorch has no gradients of gradients of fused attention on a CPU, and no batches of gradients where backward
    # runs a dropout again.
    unable = ("second", "batched") if again else ("second",) if fused else ()
    mode = rng.choice([mode for mode in MODES if mode not in unable])
    sizes = rng.choice(((4, 4, 4, 4), (4, 3, 1, 6), (4, 3, 0, 2)))
    names = {name for name, *_ in layers}
    inputs = rng.choice(("tokens", "floats", "strided", "expanded", "with gradients"))
    # Nor does it transform nothing, or embed nothing in gradients of gradients, and its graphs take one image for
    # contiguous that lies channels last.
    if 0 in sizes and ("complex" in names or (inputs == "tokens" and mode == "second")):
        sizes = (4, 4, 4, 4)
    return {
        "seed": seed, "layers": layers, "policy": policy, "inputs": inputs,
        "tied": rng.random() < 0.2, "frozen": rng.random() < 0.15, "hooks": rng.random() < 0.15,
        "probabilities": rng.random() < 0.2,
        "dtype": rng.choice(("float32",) * 4 + ("float64", "bfloat16", "float16", "autocast")),
        "sizes": sizes,
        "mode": mode,
        "bad": rng.choice((None, "inf", "nan")),
        "compiled": (
            rng.random() < 0.05 and not again and mode not in ("second", "batched", "retain")
            and "conv, channels last" not in names
        ),
    }  # fmt: skip


# ---- steps -----------------------------------------------------------------------------------------------------------


class Run:
    """A model that is trained from a seed, with compressed activations or without."""

    def __init__(self, c, *, compressed=True):
        self.c = c
        torch.manual_seed(c["seed"])
        self.dtype = torch.float64 if c["dtype"] == "float64" else HALVES.get(c["dtype"], torch.float32)
        self.model = Model(c).to(self.dtype)
        self.net = self.model
        if c["compiled"]:
            torch._dynamo.reset()
            self.net = torch.compile(self.model, backend="aot_eager")
        self.saving = None
        if compressed:
            self.saving = nb.compress_activations(self.net, policy=nb.ActivationPolicy(**c["policy"]))
        self.outputs, self.gradients = [], []

    def batch(self, at):
        rng, size = torch.Generator().manual_seed(1000 * self.c["seed"] + at), self.c["sizes"][at % 4]
        y = torch.randint(CLASSES, (size, TOKENS), generator=rng)
        if self.c["inputs"] == "tokens":
            return torch.randint(50, (size, TOKENS), generator=rng), y
        width = 2 * WIDTH if self.c["inputs"] == "strided" else WIDTH
        x = torch.randn(size, TOKENS, width, generator=rng).to(self.dtype)
        if self.c["inputs"] == "expanded":
            x = x[:, :1].expand(-1, TOKENS, -1)
        return x.requires_grad_(self.c["inputs"] == "with gradients"), y

    def context(self):
        if self.saving is not None and self.c["mode"] == "anew":
            self.saving = nb.compress_activations(self.net, policy=self.saving.policy)
        return contextlib.nullcontext() if self.saving is None else self.saving

    def called(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.c["dtype"] == "autocast"):
            if self.c["mode"] == "functional":
                return functional_call(self.net, dict(self.net.named_parameters()), (x,))
            return self.net(x)

    def loss(self, y, target):
        logits = (y.float() + 1e-6).log() if self.c["probabilities"] else y.float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    def step(self, at, bad=None):
        """One step; its outputs and gradients are noted."""
        mode, (x, target) = self.c["mode"], self.batch(at)
        if bad:
            x = x.detach().clone().requires_grad_(x.requires_grad)
            x.data[0, 0, 0] = float(bad)
        torch.manual_seed(1000 * self.c["seed"] + at)
        leaves = [p for p in (*self.model.parameters(), x) if p.requires_grad]
        if mode == "evaluates":
            with torch.no_grad(), self.context():
                self.outputs.append(self.called(x))
        with self.context():
            y = self.called(x)
            loss = self.loss(y, target)
            if mode == "dropped":
                self.called(x)
            if mode == "twice":
                loss = loss + self.loss(self.called(x), target)
            if mode == "inside":
                loss.backward()
        if mode == "retain":
            loss.backward(retain_graph=True)
        if mode == "second":
            first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            loss = loss + sum(g.float().square().sum() for g in first if g is not None)
        if mode == "batched":
            losses = torch.stack([loss, y.float().square().mean()])
            gradients = torch.autograd.grad(losses, leaves, torch.eye(2), is_grads_batched=True, allow_unused=True)
        else:
            if mode == "thread":
                other = threading.Thread(target=loss.backward)
                other.start()
                other.join()
            elif mode != "inside":
                loss.backward()
            gradients = [p.grad for p in leaves]
        self.model.zero_grad()
        self.outputs.append(y.detach())
        self.gradients.append([None if g is None else g.detach() for g in gradients])

    def bad_step(self, at):
        """A step with an input that is not finite, of which the model keeps nothing."""
        buffers = copy.deepcopy(dict(self.model.named_buffers()))
        self.step(at, self.c["bad"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        del self.outputs[-1], self.gradients[-1]

    def steps(self, *those):
        for at in those:
            self.step(at)
        return self


# ---- what always holds -----------------------------------------------------------------------------------------------


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(
        a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in zip(ours, theirs, strict=True)
    )


def error(ours, theirs):
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True) if b is not None]
    size = sum(b.square().sum() for _, b in pairs)
    return float((sum((a - b).square().sum() for a, b in pairs) / size).sqrt()) if size else 0.0


def kept():
    """What is kept of saved tensors now, in all of the process."""
    return [each for each in gc.get_objects() if type(each) in (Exact, Packed, Payload, Derivation)]


@contextlib.contextmanager
def comparing(found, policy):
    """Adds a sentence to ``found`` for each packed tensor that backward gets otherwise than it may."""

    class Compared(Packed):
        def __init__(self, x, arrangement, source, place, *args, **options):
            super().__init__(x, arrangement, source, place, *args, **options)
            self.saved, self.source, self.where = x.detach().clone(), source, f"{place} of {x.dtype} {[*x.shape]}"

        def restore(self):
            restored, x = super().restore(), self.saved
            with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
                if (restored.shape, restored.dtype) != (x.shape, x.dtype):
                    found.append(f"{self.where} comes back as {restored.dtype} {[*restored.shape]}")
                elif x.numel() and x.isfinite().all():
                    off, most = float((restored.double() - x.double()).abs().max()), most_off(self.source, x, policy)
                    if not off <= most:
                        found.append(f"{self.where} comes back {off:.3g} off, and {most:.3g} is the most")
            return restored

    recorder.Packed = Compared
    try:
        yield
    finally:
        recorder.Packed = Packed


def most_off(source, x, policy):
    """By how much codes with the ranges of x, or of batches like it, may be off; derived values, by six times that."""
    largest, levels = float(x.double().abs().max()), (1 << min(source.bits, 8)) - 1
    exact = 8 * torch.finfo(x.dtype).eps * largest
    if source.bits > 8:
        return exact
    width = 2 * largest if policy.symmetric else float(x.double().max() - x.double().min())
    step = max(width, 2 * largest * 1.05) / (levels - 1)  # of neighbours, one level may be zero
    coded = type(source) is Payload and source.instead is None
    return exact + step * (1 if coded else 6) + 0.3 * width * policy.learns


def kept_bytes(live, before):
    """Bytes that saved tensors, codes and derivations hold, without tensors that live anyway, and what was kept before.

    ``live`` are tensors, and ``before`` is what :func:`kept` returned.
    """
    storages, alive, old = {}, {x.untyped_storage()._cdata for x in live}, {*map(id, before)}
    new = [each for each in kept() if id(each) not in old]
    left, seen = [each._watch for each in new if type(each) is Exact], set()
    left += [each._function for each in new if type(each) is Derivation]
    codes = sum(each.nbytes for each in new if type(each) is Payload)
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
        elif isinstance(each, (tuple, list)):
            left += each
        elif id(each) not in seen:
            seen.add(id(each))
            left += [cell.cell_contents for cell in getattr(each, "__closure__", None) or ()]
    return codes + sum(nbytes for storage, nbytes in storages.items() if storage not in alive)


def problems(c):
    """What does not hold of a model and a policy, as sentences."""
    found = []

    def holds(condition, sentence):
        if not condition:
            found.append(sentence)

    before = kept()
    plain, run = Run(c, compressed=False).steps(0, 1, 2), Run(c).steps(0, 1, 2)
    gc.collect()
    holds(len(kept()) == len(before), "what was saved lives after backward")
    holds(equal(run.outputs, plain.outputs), "forward differs from that without compression")
    policy, errors = run.saving.policy, [error(*pair) for pair in zip(run.gradients, plain.gradients, strict=True)]
    given = {policy.bits, *policy.operators.values(), *policy.modules.values()}
    if policy.is_off or (c["dtype"] == "float64" and not {*IN_FLOAT32} & {name for name, *_ in c["layers"]}):
        holds(all(map(equal, run.gradients, plain.gradients)), f"gradients are not exact: {errors}")
    if given <= {8, "off", "checkpoint"}:
        holds(max(errors) < 0.25, f"gradients are off by {errors}")
    with comparing(found, policy):
        again = Run(c).steps(0, 1, 2)
    holds(all(map(equal, again.gradients, run.gradients)), "a second run differs")

    first, second = Run(c).steps(0), Run(c)
    second.saving.load_state_dict(copy.deepcopy(first.saving.state_dict()))
    second.model.load_state_dict(first.model.state_dict())
    second.steps(1, 2)
    holds(all(map(equal, second.gradients, run.gradients[1:])), "a resumed run differs")

    # Stochastic rounding has drawn more often after another step.
    if c["bad"] and c["inputs"] != "tokens" and policy.rounding == "nearest":
        other = Run(c).steps(0)
        other.bad_step(5)
        other.steps(1, 2)
        holds(all(map(equal, other.gradients, run.gradients)), "a batch that is not finite changes later ones")

    failing = run.model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError), run.saving:
        run.net(run.batch(3)[0])
    failing.remove()
    gc.collect()
    same, left = Run(c, compressed=False), len(kept())
    holds(left == len(before), "what was saved lives after an error")
    same.model.load_state_dict(run.model.state_dict())
    run.saving, run.outputs = None, []
    run.step(3)
    same.step(3)
    holds(equal(run.outputs, same.outputs), "a model differs after an error in the context")

    if not c["compiled"]:
        run, (x, _), before = Run(c).steps(0, 1, 2), run.batch(3), kept()
        with run.saving as saved:
            y = run.called(x)
        bytes_there = kept_bytes([*run.model.parameters(), *run.model.buffers(), x], before)
        holds(saved.kept_bytes == bytes_there, f"{saved.kept_bytes} bytes are said to be kept, {bytes_there} are")
        del y
    return found


def main(begin, end):
    warnings.simplefilter("ignore")
    logging.getLogger("narrowband").setLevel(logging.ERROR)  # a model of which nothing is compressed is fine here
    broken = 0
    for seed in range(int(begin), int(end)):
        c = draw(seed)
        try:
            found = problems(c)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        broken += bool(found)
        if found:
            print(c, *found, sep="\n    ", flush=True)
    print(f"{broken} of {int(end) - int(begin)} are broken")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
