"""Under DDP nothing changes where nothing is lost: the same bits as without a handle."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.training import (
    LOSSLESS,
    TINY,
    Branches,
    compress,
    data,
    flat,
    heard,
    loss_of,
    mlp,
    refusal,
    residuals,
    same,
    sgd,
    train,
    wrap,
)
from tests.ranks import run_ranks
from tests.thorough import thorough


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=2), nn.ReLU()
        )
        self.head = nn.Linear(12 * 4, 8)

    def forward(self, x):
        image = x.repeat(1, 5)[:, :108].view(-1, 3, 6, 6).contiguous(memory_format=torch.channels_last)
        return self.head(self.body(image).amax(3).flatten(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(50, 24, sparse=True)
        self.body = mlp()

    def forward(self, x):
        return self.body(self.table((x * 10).long().remainder(50)).mean(1))


class Mixed(nn.Module):
    """float32, then a matrix in float64, then bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(24, 20)
        self.second = nn.Linear(20, 20, dtype=torch.float64)
        self.third = nn.Linear(20, 8, dtype=torch.bfloat16)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)).double())).bfloat16()).float()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(24, 8), nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (self.first(x).to(torch.complex64) @ self.second).real


def plain_steps(model, rank, dtype=torch.float32):
    train(model, rank, range(4), dtype=dtype)


def momentum_steps(model, rank):
    train(model, rank, range(4), torch.optim.AdamW(model.parameters(), lr=0.01))


def bfloat16_steps(model, rank):
    plain_steps(model, rank, torch.bfloat16)


def float16_steps(model, rank):
    plain_steps(model, rank, torch.float16)


def accumulating_steps(model, rank):
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        for micro in range(3):
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                loss_of(model, 3 * step + micro, rank).backward()
        optimizer.step()


def steps_that_leave_out(model, rank):
    """Step 1: rank 1 does not use the right branch; steps 2 and 3: nobody does."""
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        x, y = data(step, rank)
        right = not ((step == 1 and rank == 1) or step in (2, 3))
        (model(x, right=right) - y).square().mean().backward()
        optimizer.step()


def steps_without_right(model, rank):
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        x, y = data(step, rank)
        (model(x, right=False) - y).square().mean().backward()
        optimizer.step()


def uneven_steps(model, rank):
    with model.join():
        plain_steps(model, rank) if rank else train(model, rank, range(2))


def frozen_mlp():
    model = mlp()
    model[3].requires_grad_(False)
    return model


def channels_last_images():
    return Images().to(memory_format=torch.channels_last)


def bfloat16_mlp():
    return mlp(torch.bfloat16)


def float16_mlp():
    return mlp(torch.float16)


#: What DDP can do: a model, the options it is wrapped with, how it is trained.
FEATURES = {
    "plain": (mlp, {}, plain_steps),
    "one bucket per parameter": (mlp, {"cap": TINY}, plain_steps),
    "another optimizer": (mlp, {}, momentum_steps),
    "no_sync and accumulation": (mlp, {"cap": TINY}, accumulating_steps),
    "accumulation into bucket views": (mlp, {"gradient_as_bucket_view": True}, accumulating_steps),
    "gradient_as_bucket_view": (mlp, {"gradient_as_bucket_view": True, "cap": TINY}, plain_steps),
    "static_graph": (mlp, {"static_graph": True, "cap": TINY}, plain_steps),
    "static_graph that leaves out": (Branches, {"static_graph": True}, steps_without_right),
    "find_unused_parameters": (Branches, {"find_unused_parameters": True}, steps_that_leave_out),
    "find_unused_parameters, views": (
        Branches,
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "cap": TINY},
        steps_that_leave_out,
    ),
    "frozen layer": (frozen_mlp, {}, plain_steps),
    "bfloat16": (bfloat16_mlp, {}, bfloat16_steps),
    "float16": (float16_mlp, {"cap": TINY}, float16_steps),
    "channels_last": (channels_last_images, {}, plain_steps),
    "mixed dtypes": (Mixed, {}, plain_steps),
    "complex": (Complex, {}, plain_steps),
    "sparse embedding": (Words, {}, plain_steps),
    "static_graph, mixed dtypes": (Mixed, {"static_graph": True}, plain_steps),
    "static_graph, sparse embedding": (Words, {"static_graph": True}, plain_steps),
    "join": (mlp, {"cap": TINY}, uneven_steps),
}


def beside_plain(rank, world_size, feature, specs):
    """Parameters after plain DDP, then after each spec (or spec and ``small=``); and what was logged."""
    make, options, steps = FEATURES[feature]
    plain = wrap(make(), **options)
    steps(plain, rank)
    results, messages = [flat(plain)], []
    for spec in specs:
        spec, small = (spec, "uncompressed") if isinstance(spec, str) else spec  # noqa: PLW2901
        model = wrap(make(), **options)
        with heard() as said:
            handle = compress(model, spec, min_numel=64, small=small)
            steps(model, rank)
        results.append(flat(model))
        messages.append(said)
        assert handle.step > 0
    return results, messages


HARDEST = ("find_unused_parameters, views", "mixed dtypes")
FEEDBACKS = ["none", "none+ef", LOSSLESS, LOSSLESS + "-mixed"]


@pytest.mark.parametrize(
    ("feature", "specs"),
    [
        *((feature, FEEDBACKS if feature in HARDEST else ["none", LOSSLESS]) for feature in FEATURES),
        *thorough(*((feature, FEEDBACKS) for feature in FEATURES if feature not in HARDEST)),
    ],
)
def test_agrees_with_plain_ddp_to_the_bit(feature, specs):
    specs = [*specs, *([(LOSSLESS, "none")] if feature == "mixed dtypes" else [])]  # vectors of two dtypes
    answers = run_ranks(beside_plain, 2, feature, specs)
    start = flat(FEATURES[feature][0]())
    for results, _ in answers:
        assert not torch.equal(results[0], start)
        for spec, result in zip(specs, results[1:], strict=True):
            assert torch.equal(result, results[0]), f"{spec}: off by {(result - results[0]).abs().max()}"


def later_beside_plain(rank, world_size, feature, specs):
    """Parameters after plain DDP, then after each spec, which is set up when the model has trained for some steps."""
    make, options, steps = FEATURES[feature]
    results = []
    for spec in (None, *specs):
        model = wrap(make(), **options)
        steps(model, rank)
        handle = None if spec is None else compress(model, spec, min_numel=64)
        steps(model, rank)
        results.append(flat(model))
        assert handle is None or handle.step > 0
    return results


EARLY = ("static_graph", "gradient_as_bucket_view", "find_unused_parameters, views")


@pytest.mark.parametrize("feature", [*EARLY, *thorough(*(name for name in FEATURES if name not in EARLY))])
def test_a_model_that_has_trained_already_agrees_with_plain_ddp_to_the_bit(feature):
    for results in run_ranks(later_beside_plain, 2, feature, ["none", LOSSLESS]):
        assert all(torch.equal(result, results[0]) for result in results[1:])


def later_beside_anew(rank, world_size, options, before, spec):
    """What a model and its copy, which DDP wraps anew, have after some steps with a handle each: parameters, residuals,
    bytes sent and steps. The model has trained for ``before`` steps, the copy for none.
    """
    model, copied = wrap(mlp(), **options), mlp()
    train(model, rank, range(before))
    copied.load_state_dict(model.module.state_dict())
    found = []
    for each in (model, wrap(copied, **options)):
        handle = compress(each, spec, min_numel=64)
        train(each, rank, range(10, 14))
        total = handle.stats().total
        found.append((flat(each), residuals(handle), total.sent_bytes, total.steps))
    return found


@pytest.mark.parametrize(
    ("options", "before"),
    [
        ({"cap": TINY}, 1),  # DDP makes its buckets anew in the next forward pass
        ({"static_graph": True}, 1),
        *thorough(({"cap": TINY}, 2), ({"static_graph": True, "cap": TINY}, 2), ({"gradient_as_bucket_view": True}, 1)),
    ],
    ids=str,
)
def test_compression_may_begin_in_the_middle_of_a_run(options, before):
    """As with a model that DDP has just wrapped: all that is sent is compressed, and feedback has all that is lost."""
    spec = "qsgd:bits=3+ef"
    for later, anew in run_ranks(later_beside_anew, 2, options, before, spec):
        assert torch.equal(later[0], anew[0])
        assert same(later[1], anew[1])
        assert later[2] == pytest.approx(anew[2], rel=0.02)  # messages have other buckets, and a few bytes of their own
        assert later[3] == anew[3] == 4


def in_the_middle_of_backward(rank, world_size):
    """What a call inside backward says; and how far the gradients of that pass are from those of plain DDP."""
    model, plain, said = wrap(mlp(), cap=TINY), wrap(mlp(), cap=TINY), []
    train(model, rank, range(2))
    train(plain, rank, range(2))
    model.module[3].weight.register_post_accumulate_grad_hook(
        lambda _: said.append(refusal(lambda: compress(model, "none")))
    )
    for each in (model, plain):
        each.zero_grad()
        loss_of(each, 2, rank).backward()
    apart = [(p.grad - q.grad).abs().max().item() for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    return said, max(apart)


def test_compression_may_not_begin_inside_backward():
    """PyTorch would end with an internal error, since buckets on their way have none of the hook's results."""
    for ((kind, text),), apart in run_ranks(in_the_middle_of_backward, 2):
        assert kind == "RuntimeError"
        assert "compress_gradients was called inside backward" in text
        assert apart == 0


@pytest.mark.parametrize("feature", [*HARDEST, *thorough(*(name for name in FEATURES if name not in HARDEST))])
def test_ef21_agrees_with_plain_ddp_up_to_rounding(feature):
    """Where it keeps all, changes add up to the gradient itself."""
    specs = ["topk:density=1.0+ef21", "none+ef21"]
    coarse = {"bfloat16": 2e-2, "float16": 2e-3}
    for results, _ in run_ranks(beside_plain, 2, feature, specs):
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=0, atol=coarse.get(feature, 1e-5))


def test_agrees_with_plain_ddp_on_four_ranks():
    specs = ["none", LOSSLESS, "fp16", "bf16"]
    answers = run_ranks(beside_plain, 4, "one bucket per parameter", specs)
    for results, _ in answers:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, answers[0][0], strict=True))
        for result, tolerance in zip(results[1:], (1e-6, 1e-6, 1e-4, 1e-3), strict=True):
            torch.testing.assert_close(result, results[0], rtol=0, atol=tolerance)


def test_what_travels_uncompressed_is_said_once_by_rank_0():
    for feature, words in (
        (
            "mixed dtypes",
            (
                "these gradients are sent uncompressed, because codecs take float32, float16 and bfloat16 only: "
                "second.weight (torch.float64), second.bias (torch.float64)"
            ),
        ),
        ("sparse embedding", "sparse gradients are sent uncompressed"),
    ):
        said = [messages for _, messages in run_ranks(beside_plain, 2, feature, ["topk:density=0.1+ef"])]
        assert said == [[[words]], [[]]]


def static_and_accumulated(rank, world_size):
    """How far gradients are from the mean of all ranks' own sums, step by step."""
    model, own = wrap(mlp(), static_graph=True), mlp()
    handle = compress(model, "none")
    apart = []
    for step in range(3):
        for each in (model, own):
            each.zero_grad()
        if step:  # in the first step PyTorch itself stops with an internal error
            with handle.no_sync():
                loss_of(model, 10 * step, rank).backward()
            loss_of(own, 10 * step, rank).backward()
        loss_of(model, 10 * step + 1, rank).backward()
        loss_of(own, 10 * step + 1, rank).backward()
        mean = torch.cat([p.grad.flatten() for p in own.parameters()]) / world_size
        dist.all_reduce(mean)
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        apart.append(float((found - mean).abs().max()))
    return apart, handle.step


def test_accumulation_in_a_static_graph_does_not_stop_the_averages():
    """There was a time when it did, silently (pytorch/pytorch#187732)."""
    for apart, steps in run_ranks(static_and_accumulated, 2):
        assert max(apart) < 1e-6
        assert steps == 3
