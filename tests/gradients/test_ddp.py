"""Training with compressed gradients, beside plain DistributedDataParallel."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.training import (
    FINGERPRINT,
    HUGE,
    LOSSLESS,
    TINY,
    buckets,
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

SPECS = [
    ("none", "auto"),
    ("none+ef", "auto"),
    ("fp16", "auto"),
    ("bf16", "all_gather"),
    ("fp16", "scatter_reduce"),
    ("uniform:bits=8", "auto"),
    ("uniform:bits=4,rounding=stochastic+ef", "scatter_reduce"),
    ("qsgd:bits=8", "all_gather"),
    ("qsgd:bits=8,bucket=64,norm=max", "scatter_reduce"),
    ("sign:bucket=64+ef", "all_gather"),
    ("topk:density=0.1+ef", "auto"),
    ("topk:density=0.1,select=sampled,values=fp16+ef", "all_gather"),
    ("topk:density=0.2,scope=sample,values=int8,indices=int32+ef", "auto"),
    ("threshold:value=0.01+ef", "auto"),
    ("randomk:density=0.2+ef", "auto"),
    ("lowrank:rank=2+ef", "auto"),
    ("topk:density=0.2+ef-mixed", "auto"),
    ("topk:density=0.2+ef21", "auto"),
    ("qsgd:bits=8+ef21", "auto"),
]


# ---- the same as plain DDP where nothing is lost ---------------------------------------------------------------------


class Branches(nn.Module):
    """A model of which some steps, or some ranks, leave one branch out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.Linear(24, 24)
        self.left, self.right = nn.Linear(24, 8), nn.Linear(24, 8)

    def forward(self, x, right=True):
        h = torch.tanh(self.trunk(x))
        return self.left(h) + self.right(h) if right else self.left(h)


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
    "join": (mlp, {"cap": TINY}, uneven_steps),
}


def beside_plain(rank, world_size, feature, specs):
    """Parameters after plain DDP, then after each spec; and what was logged."""
    make, options, steps = FEATURES[feature]
    plain = wrap(make(), **options)
    steps(plain, rank)
    results, messages = [flat(plain)], []
    for spec in specs:
        model = wrap(make(), **options)
        with heard() as said:
            handle = compress(model, spec, min_numel=64)
            steps(model, rank)
        results.append(flat(model))
        messages.append(said)
        assert handle.step > 0
    return results, messages


@pytest.mark.parametrize("feature", FEATURES)
def test_agrees_with_plain_ddp_to_the_bit(feature):
    specs = ["none", "none+ef", LOSSLESS, LOSSLESS + "-mixed"]
    answers = run_ranks(beside_plain, 2, feature, specs)
    start = flat(FEATURES[feature][0]())
    for results, _ in answers:
        assert not torch.equal(results[0], start)
        for spec, result in zip(specs, results[1:], strict=True):
            assert torch.equal(result, results[0]), f"{spec}: off by {(result - results[0]).abs().max()}"


@pytest.mark.parametrize("feature", FEATURES)
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
                "these gradients travel uncompressed, codecs take float32, float16 and bfloat16: "
                "second.weight (torch.float64), second.bias (torch.float64)"
            ),
        ),
        ("sparse embedding", "sparse gradients travel uncompressed"),
    ):
        said = [messages for _, messages in run_ranks(beside_plain, 2, feature, ["topk:density=0.1+ef"])]
        assert said == [[[words]], [[]]]


# ---- every codec -----------------------------------------------------------------------------------------------------


def train_with_each(rank, world_size, specs):
    answers = []
    for spec, collective in specs:
        model = wrap(mlp(), cap=TINY)
        handle = compress(model, spec, min_numel=64, collective=collective)
        before = sum(loss_of(model, 0, r).item() for r in range(world_size))
        optimizer = sgd(model, lr=0.1)
        for _ in range(15):
            optimizer.zero_grad()
            loss_of(model, 0, rank).backward()
            optimizer.step()
        after = sum(loss_of(model, 0, r).item() for r in range(world_size))
        answers.append((flat(model), before, after, handle.stats().total))
    return answers


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_codec_trains_and_keeps_the_ranks_together(world_size):
    answers = run_ranks(train_with_each, world_size, SPECS)
    for index, (spec, collective) in enumerate(SPECS):
        for rank in range(world_size):
            parameters, before, after, total = answers[rank][index]
            assert torch.equal(parameters, answers[0][index][0]), f"{spec} {collective}: rank {rank} has drifted away"
            assert after < 0.95 * before, f"{spec} {collective}: loss {before} → {after}"
            assert total.steps == 15
            if spec.startswith("none"):
                assert total.relative_error is None
            else:
                assert 0.0 <= total.relative_error < 1.0, f"{spec}: {total.relative_error}"


def train_in_buckets(rank, world_size, specs, caps):
    answers = []
    for spec, collective in specs:
        for cap, coalesced in caps:
            model = wrap(mlp(), cap=cap)
            handle = compress(model, spec, min_numel=64, collective=collective, seed=3, coalesced=coalesced)
            train(model, rank, range(4))
            answers.append((flat(model), residuals(handle), buckets(model)))
    return answers


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_result_does_not_depend_on_the_buckets(world_size):
    specs = [(spec, way) for spec, way in SPECS if way in ("all_gather", "scatter_reduce")]
    specs += [("topk:density=0.1+ef", "auto"), ("threshold:value=0.01+ef", "auto"), ("qsgd:bits=4", "auto")]
    specs += [("lowrank:rank=2+ef", "auto"), ("lowrank:rank=2", "auto")]
    caps = ((HUGE, False), (TINY, False), (TINY, True), (0.004, False))
    for answers in run_ranks(train_in_buckets, world_size, specs, caps):
        for index, (spec, way) in enumerate(specs):
            huge, *others = answers[index * len(caps) : (index + 1) * len(caps)]
            assert huge[2] == 1
            for other in others:
                assert other[2] > 1
                assert torch.equal(other[0], huge[0]), f"{spec} {way}: other parameters"
                assert same(other[1], huge[1]), f"{spec} {way}: has another residual"


def large_layers_in_buckets(rank, world_size, cap):
    """Large enough that, one by one, layers would be gathered, and together be reduced in chunks."""
    torch.manual_seed(1)
    model = wrap(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), cap=cap)
    compress(model, "qsgd:bits=4")
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
    return flat(model), buckets(model)


def test_the_collective_that_is_chosen_does_not_depend_on_the_buckets():
    huge, tiny = (run_ranks(large_layers_in_buckets, 4, cap)[0] for cap in (HUGE, TINY))
    assert huge[1] < tiny[1]
    assert torch.equal(huge[0], tiny[0])


def runs_with_seeds(rank, world_size, seeds):
    results = []
    for seed in seeds:
        model = wrap(mlp())
        compress(model, "qsgd:bits=4", min_numel=64, seed=seed)
        train(model, rank, range(2))
        results.append(flat(model))
    return results


def test_equal_seeds_are_equal_runs():
    first, second, other = run_ranks(runs_with_seeds, 2, (7, 7, 8))[0]
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


# ---- layers that are left out ----------------------------------------------------------------------------------------


def leave_out(rank, world_size, options):
    model = wrap(Branches(), find_unused_parameters=True, **options)
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    history = []
    for step in range(6):
        model.zero_grad(set_to_none=True)
        x, y = data(step, rank)
        right = not ((step == 2 and rank == 1) or step in (3, 4))
        (model(x, right=right) - y).square().mean().backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.module.named_parameters()}
        history.append((grads, residuals(handle)))
    return history


@pytest.mark.parametrize("options", [{}, {"cap": TINY, "gradient_as_bucket_view": True}], ids=["one bucket", "views"])
def test_a_layer_that_is_left_out_keeps_the_residual(options):
    by_rank = run_ranks(leave_out, 2, options)
    name = "right.weight"
    for history in by_rank:
        assert all(history[step][1][name].any() for step in range(6))
        for step in (3, 4):  # used by nobody
            assert torch.equal(history[step][1][name], history[2][1][name])
            assert not torch.equal(history[step][1]["left.weight"], history[step - 1][1]["left.weight"])
            grad = history[step][0][name]
            assert grad is None or not grad.any()
    # Used by rank 0 only: rank 1 keeps its residual, and both get the average of one.
    assert torch.equal(by_rank[1][2][1][name], by_rank[1][1][1][name])
    assert not torch.equal(by_rank[0][2][1][name], by_rank[0][1][1][name])
    for step in range(6):
        for a, b in zip(by_rank[0][step][0].values(), by_rank[1][step][0].values(), strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


# ---- beginning, pausing, joining -------------------------------------------------------------------------------------


def begin_late(rank, world_size):
    plain, model = wrap(mlp()), wrap(mlp())
    handle = compress(model, "topk:density=0.05+ef", min_numel=64, warmup_steps=2)
    history = []
    for step in range(4):
        train(plain, rank, [step])
        train(model, rank, [step])
        history.append((torch.equal(flat(plain), flat(model)), len(residuals(handle)), handle.stats().last))
    return history


def test_start_step_averages_uncompressed_until_then():
    for history in run_ranks(begin_late, 2):
        assert [equal for equal, _, _ in history] == [True, True, False, False]
        assert [count for _, count, _ in history] == [0, 0, 4, 4]
        plain = [step.sent_bytes == step.raw_bytes + FINGERPRINT for _, _, step in history]
        assert plain == [True, True, False, False]
        assert [step.relative_error is None for _, _, step in history] == [True, True, False, True]


def pause_and_resume(rank, world_size):
    model = wrap(mlp())
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    train(model, rank, range(2))
    before = residuals(handle)
    plain = wrap(mlp())
    plain.module.load_state_dict(model.module.state_dict())
    handle.pause()
    train(model, rank, range(2, 4))
    train(plain, rank, range(2, 4))
    answers = [torch.equal(flat(model), flat(plain)), same(before, residuals(handle))]
    paused = handle.stats().last
    handle.resume()
    train(model, rank, range(4, 5))
    answers.append(not same(before, residuals(handle)))
    return answers, paused, handle.stats().last, flat(model)


def test_paused_is_plain_ddp_and_keeps_the_residual():
    answers = run_ranks(pause_and_resume, 2)
    for facts, paused, resumed, parameters in answers:
        assert facts == [True, True, True]
        assert paused.sent_bytes == paused.raw_bytes + FINGERPRINT
        assert resumed.sent_bytes < resumed.raw_bytes / 2
        assert torch.equal(parameters, answers[0][3])


def join_with_effective_world_size(rank, world_size):
    model = wrap(mlp())
    compress(model, LOSSLESS, min_numel=64)

    def steps():
        with model.join(divide_by_initial_world_size=False):
            train(model, rank, range(2))

    return refusal(steps)


def test_join_that_divides_by_the_ranks_still_there_is_refused():
    for refused in run_ranks(join_with_effective_world_size, 2):
        assert refused is not None
        assert refused[0] == "UnsupportedError"
        assert "divide_by_initial_world_size=True" in refused[1]


# ---- several models, several groups ----------------------------------------------------------------------------------


def two_models(rank, world_size):
    specs = ("topk:density=0.1+ef", "qsgd:bits=4")

    def make():
        models = [wrap(mlp(), cap=TINY), wrap(Branches())]
        handles = [compress(m, s, min_numel=64) for m, s in zip(models, specs, strict=True)]
        return models, handles

    alone, _alone_handles = make()
    for model in alone:
        train(model, rank, range(4))
    turns, _turn_handles = make()
    for step in range(4):
        for model in turns:
            train(model, rank, [step])
    together, _together_handles = make()
    optimizers = [sgd(model) for model in together]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(model, step, rank) for model in together).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [[flat(model) for model in models] for models in (alone, turns, together)]


def test_two_models_train_in_turns_and_in_one_backward_as_they_do_alone():
    for alone, turns, together in run_ranks(two_models, 2):
        for which in range(2):
            assert torch.equal(turns[which], alone[which])
            assert torch.equal(together[which], alone[which])


def two_groups(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    results = []
    for spec in (None, LOSSLESS, "topk:density=0.1+ef"):
        model = wrap(mlp(), process_group=mine)
        if spec is not None:
            compress(model, spec, min_numel=64)
        train(model, rank, range(3))
        results.append(flat(model))
    return results


def test_groups_average_among_themselves():
    answers = run_ranks(two_groups, 4)
    for rank in range(4):
        plain, lossless, sparse = answers[rank]
        assert torch.equal(lossless, plain)
        partner = answers[rank ^ 1]
        assert torch.equal(sparse, partner[2])
    assert not torch.equal(answers[0][2], answers[2][2])


def a_group_by_name(rank, world_size):
    """The model's own group is replaced, after DDP has made the replicas equal."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrap(mlp())
    compress(model, LOSSLESS, min_numel=64, process_group=groups[rank // 2])
    train(model, rank, range(2))
    reference = wrap(mlp(), process_group=groups[rank // 2])
    train(reference, rank, range(2))
    return torch.equal(flat(model), flat(reference))


def test_process_group_says_who_averages():
    assert run_ranks(a_group_by_name, 4) == [True] * 4


# ---- what set-up has done already ------------------------------------------------------------------------------------

WARM = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import narrowband as nb
from narrowband.kernels.cpu.cache import LoopCache

asked, load = [], LoopCache.load_overload
LoopCache.load_overload = lambda self, *types: (asked.append(self.name), load(self, *types))[1]

spec, store, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(700, 600), torch.nn.Linear(600, 50)))
nb.compress_gradients(model, spec)
before = len(asked)
for _ in range(3):
    model(torch.randn(8, 700)).square().mean().backward()
print(asked[before:], before > 0)
"""


@pytest.mark.parametrize(
    ("spec", "threads"),
    [
        ("topk:density=0.01+ef", 1),
        ("topk:density=0.01+ef", 2),
        ("topk:density=0.01+ef-mixed", 2),
        ("qsgd:bits=4+ef21", 2),
        ("qsgd:bits=4", 2),
        ("lowrank:rank=2+ef", 1),
        ("dgc:density=0.01,warmup_steps=2", 1),
        ("dgc:density=0.001,nesterov=true,masking=false", 2),
        ("powersgd:rank=4", 1),
        ("powersgd:rank=2,ef=false,iterations=2", 2),
    ],
)
def test_no_step_waits_for_a_compiler(tmp_path, spec, threads):
    """Set-up loads or compiles every loop that a step needs, so that ranks do not do it all at once in the first."""
    command = [sys.executable, "-c", WARM, spec, str(tmp_path / "store"), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "[] True\n", done.stderr
