"""What cannot work is refused at set-up, with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.gradients.training import compress, flat, heard, loss_of, mlp, refusal, train, wrap
from tests.ranks import run_ranks


def wrong_calls(rank, world_size):
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns of torch.jit when it is imported

    model = wrap(mlp())
    compress = nb.compress_gradients
    errors = {
        "no module": refusal(lambda: compress([model], "none")),
        "unknown codec": refusal(lambda: compress(model, "topkk:density=0.1")),
        "unknown key": refusal(lambda: compress(model, "topk:densty=0.1")),
        "unknown feedback": refusal(lambda: compress(model, "topk:density=0.1+eff")),
        "value out of range": refusal(lambda: compress(model, "qsgd:bits=9")),
        "unknown collective": refusal(lambda: compress(model, "qsgd:bits=4", collective="ring")),
        "all_reduce cannot": refusal(lambda: compress(model, "qsgd:bits=4", collective="all_reduce")),
        "scatter_reduce cannot": refusal(lambda: compress(model, "topk:density=0.1", collective="scatter_reduce")),
        "negative min_numel": refusal(lambda: compress(model, "none", min_numel=-1)),
        "negative warmup_steps": refusal(lambda: compress(model, "none", warmup_steps=-1)),
        "no number": refusal(lambda: compress(model, "none", min_numel="1000")),
        "no whole number": refusal(lambda: compress(model, "none", warmup_steps=1.5)),
        "no scaler": refusal(lambda: compress(model, "none", grad_scaler=True)),
        "per sample": refusal(lambda: compress(model, "qsgd:bits=4+aq-sgd")),
        "per sample, small": refusal(lambda: compress(model, "qsgd:bits=4", small="qsgd:bits=8+aq-sgd")),
        "per sample, by a policy": refusal(lambda: compress(model, nb.Constant("qsgd:bits=4+aq-sgd"))),
    }
    errors["a path"] = refusal(lambda: compress(model, Path("plan.json")))
    errors["unknown small"] = refusal(lambda: compress(model, "qsgd:bits=4", small="fuse"))
    rates = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    errors["no optimizer"] = refusal(lambda: compress(model, "dgc", optimizer=rates))
    theirs = torch.optim.SGD(mlp().parameters())
    errors["another's optimizer"] = refusal(lambda: compress(model, "qsgd:bits=4", optimizer=theirs))
    errors["another's, averager"] = refusal(lambda: nb.Averager(mlp(), "dgc", optimizer=theirs))
    train(model, rank, range(1))  # none of these has touched the model
    ended = compress(model, "none")
    ended.remove()
    errors["resumed after its end"] = refusal(ended.resume)
    hooked = wrap(mlp())
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    errors["hook"] = refusal(lambda: compress(hooked, "none"))
    in_backward = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
    in_backward = wrap(in_backward)
    errors["optimizer in backward"] = refusal(lambda: compress(in_backward, "none"))
    later = mlp()
    options = {
        "delay_all_reduce_named_params": [("6.bias", later[6].bias)],
        "param_to_hook_all_reduce": later[0].weight,
    }
    errors["averages that nobody waits for"] = refusal(lambda: compress(wrap(later, 100, **options), "none"))
    skips = wrap(mlp(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    errors["buckets that are left out"] = refusal(lambda: compress(skips, "none"))
    twice = wrap(mlp())
    handle = compress(twice, "topk:density=0.1+ef", min_numel=64)
    errors["twice"] = refusal(lambda: compress(twice, "topk:density=0.1+ef"))
    train(twice, rank, range(2))  # the first goes on
    errors["steps of the first"] = handle.step
    errors["no layers"] = refusal(lambda: handle.set_layers("0.weight"))
    errors["per sample, one layer"] = refusal(lambda: handle.set_layers({"0.weight": "topk:density=0.1+aq-sgd"}))
    with torch.device("meta"):
        empty = mlp()
    errors["no values"] = refusal(lambda: compress(empty, "none"))
    errors["no values yet"] = refusal(lambda: nb.Averager(nn.LazyLinear(3), "none"))
    left = wrap(mlp())
    dist.destroy_process_group()
    errors["no process group"] = refusal(lambda: compress(left, "none"))
    return errors


def test_what_cannot_work_is_an_error_that_says_what_to_do():
    errors = run_ranks(wrong_calls, 1)[0]
    expected = {
        "no module": (
            "TypeError",
            "takes a model in DistributedDataParallel, or one that averages nothing by itself, not",
        ),
        "a path": ("TypeError", "pass nb.Plan.load('plan.json')"),
        "unknown small": ("ValueError", "small='fuse' is neither 'uncompressed' nor 'fused' nor a spec: unknown codec"),
        "no optimizer": ("TypeError", "optimizer= takes the optimizer that steps the model, not StepLR"),
        "another's optimizer": (
            "ValueError",
            "this SGD has none of its parameters: it was created for another mod",
        ),
        "another's, averager": ("ValueError", "Create the optimizer after that, from model.parameters()"),
        "resumed after its end": ("RuntimeError", "resume: this handle was removed"),
        "unknown codec": ("ValueError", "did you mean 'topk'?"),
        "unknown key": ("ValueError", "did you mean 'density'?"),
        "unknown feedback": ("ValueError", "did you mean 'ef'?"),
        "value out of range": ("ValueError", "bits=9 is not in [2, 8]"),
        "unknown collective": ("ValueError", "expected one of auto, all_reduce, all_gather, scatter_reduce"),
        "all_reduce cannot": ("UnsupportedError", "use 'auto'"),
        "scatter_reduce cannot": ("UnsupportedError", "use 'all_gather' or 'auto'"),
        "negative min_numel": ("ValueError", "min_numel=-1"),
        "negative warmup_steps": ("ValueError", "warmup_steps=-1"),
        "no number": ("TypeError", "min_numel='1000' is not a whole number"),
        "no whole number": ("TypeError", "warmup_steps=1.5 is not a whole number"),
        "no scaler": (
            "TypeError",
            "grad_scaler=True is no gradient scaler; pass the torch.amp.GradScaler",
        ),
        "no layers": ("TypeError", "set_layers takes a dictionary from parameter names to specs"),
        "hook": ("UnsupportedError", "fp16_compress_hook"),
        "optimizer in backward": ("UnsupportedError", "step the optimizer after backward instead"),
        "averages that nobody waits for": ("UnsupportedError", "Wrap the model without delay_all_reduce_named_params"),
        "buckets that are left out": ("UnsupportedError", "find_unused_parameters=True works"),
        "twice": ("UnsupportedError", "compressed already"),
        "per sample": ("UnsupportedError", "'qsgd:bits=4+aq-sgd' cannot compress gradients: aq-sgd keeps a buffer for"),
        "per sample, small": ("UnsupportedError", "gradients are sums over samples"),
        "per sample, by a policy": ("UnsupportedError", "for activations between pipeline stages"),
        "per sample, one layer": ("UnsupportedError", "use a codec with '+ef'"),
        "no values": ("UnsupportedError", "0.weight and 9 more have no values yet"),
        "no values yet": ("UnsupportedError", "Initialize the model before Averager"),
        "no process group": ("UnsupportedError", "init_process_group"),
    }
    assert errors.pop("steps of the first") == 2
    assert errors.keys() == expected.keys()
    for name, (kind, words) in expected.items():
        assert errors[name] is not None, name
        assert errors[name][0] == kind, f"{name}: {errors[name]}"
        assert words in errors[name][1], f"{name}: {errors[name][1]}"


def optimizers_of_a_part(rank, world_size):
    """What is said of optimizers that have a part of a model, or copies of its parameters in more bits."""
    spec = "dgc:density=0.1,momentum=0.9"

    def said(module, make):
        return refusal(lambda: compress(wrap(module), spec, optimizer=make(module)))

    def copies(module, **options):
        return torch.optim.SGD([p.detach().float() for p in module.parameters()], lr=0.1, **options)

    return {
        "a layer": said(mlp(), lambda module: torch.optim.SGD(module[3].parameters(), lr=0.1)),
        "copies": said(mlp(torch.bfloat16), copies),
        "copies with momentum": said(mlp(torch.bfloat16), lambda module: copies(module, momentum=0.9)),
        "copies in as many bits": said(mlp(), copies),
        "copies of another": said(mlp(torch.bfloat16), lambda _: copies(nn.Linear(4, 4))),
    }


def test_an_optimizer_may_have_a_part_of_the_model_or_copies_in_more_bits():
    for said in run_ranks(optimizers_of_a_part, 2):
        assert said["a layer"] is said["copies"] is None
        assert "momentum is applied twice: SGD has momentum=0.9" in said["copies with momentum"][1]
        for name in ("copies in as many bits", "copies of another"):
            assert said[name][0] == "ValueError"
            assert "SGD has none of its parameters" in said[name][1]


def averaged_by_others(rank, world_size):
    """What is said of modules around a DistributedDataParallel, and of those that share parameters with another."""
    inside = nn.Sequential(wrap(mlp()), nn.Linear(8, 8))
    found = {
        "around": refusal(lambda: compress(inside, "none")),
        "around, compiled": refusal(lambda: compress(torch.compile(inside, backend="eager"), "none")),
        "compiled": refusal(lambda: compress(torch.compile(inside[0], backend="eager"), "none")),
    }
    model = mlp()
    first = model[:4]
    handle = compress(first, "none")
    found["whole"] = refusal(lambda: compress(model, "none"))
    found["part"] = refusal(lambda: compress(model[3], "none"))
    found["in DDP"] = refusal(lambda: compress(wrap(model), "none"))
    compress(model[4:], "none")
    model[3].requires_grad_(False)
    compress(model[3:4].append(nn.Linear(2, 2)), "none")  # what is frozen may be shared
    handle.remove()
    compress(model[:3], "none")
    wrapped = wrap(mlp())
    handle = compress(wrapped, "none")
    found["inside DDP"] = refusal(lambda: compress(wrapped.module, "none"))
    found["part of DDP"] = refusal(lambda: compress(wrapped.module[0], "none"))
    handle.remove()
    part = wrapped.module[:4]
    compress(part, "none")
    found["around a part"] = refusal(lambda: compress(wrapped, "none"))
    ignoring = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.weight", "0.bias"])
    compress(wrap(ignoring), "none")
    compress(ignoring[0], "none")  # what DDP ignores may have a handle of its own
    return found


def test_a_gradient_is_averaged_by_one_handle_and_nobody_else():
    for found in run_ranks(averaged_by_others, 2):
        for name in ("around", "around, compiled", "compiled"):
            assert found[name][0] == "TypeError", name
        assert "Pass the DistributedDataParallel inside it: model.0" in found["around"][1]
        assert "model._orig_mod.0" in found["around, compiled"][1]
        assert "compress_gradients(model._orig_mod, …)" in found["compiled"][1]
        for name in ("whole", "part", "in DDP", "inside DDP", "part of DDP", "around a part"):
            assert found[name][0] == "UnsupportedError", name
            assert "compressed already" in found[name][1]


def disagree(rank, world_size):
    odd = rank == world_size - 1
    differences = [
        {"spec": "topk:density=0.02+ef" if odd else "topk:density=0.01+ef"},
        {"spec": "topk:density=0.01" if odd else "topk:density=0.01+ef"},
        {"seed": 1 if odd else 0},
        {"min_numel": 10 if odd else 100},
        {"warmup_steps": 5 if odd else 0},
        {"collective": "all_gather" if odd else "auto"},
    ]
    errors = []
    for difference in differences:
        model = wrap(mlp())
        arguments = {"spec": "qsgd:bits=4", **difference}
        errors.append(refusal(lambda m=model, a=arguments: compress(m, **a)))
    model = wrap(mlp())
    compress(model, "none")  # the next attempt, in agreement, works
    train(model, rank, range(1))
    return errors, flat(model)


def disagree_often(rank, world_size):
    groups = set()
    for _ in range(3):
        refusal(lambda: compress(wrap(mlp()), "none", seed=rank))
        handle = compress(wrap(mlp()), "none")
        groups.add(id(handle.process_group))
        handle.remove()
    return len(groups)


def test_a_set_up_that_was_refused_gives_its_process_group_back():
    assert run_ranks(disagree_often, 2) == [1, 1]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_disagree_all_hear_of_it(world_size):
    answers = run_ranks(disagree, world_size)
    for errors, parameters in answers:
        assert [error and error[0] for error in errors] == ["DisagreementError"] * 6
        assert all("ranks disagree" in error[1] for error in errors)
        assert torch.equal(parameters, answers[0][1])
    others = "rank 0" if world_size == 2 else "ranks 0, 1, 2"
    named = f"spec (topk:density=0.01+ef on {others}; topk:density=0.02+ef on rank {world_size - 1})"
    assert all(named in errors[0][1] for errors, _ in answers)


def whole_model_as_one_vector(rank, world_size):
    model = mlp()
    exact = torch.autograd.grad(model(torch.ones(2, 24)).square().sum(), list(model.parameters()))
    wrapped = wrap(model)
    compress(wrapped, "topk:density=0.1+ef", min_numel=1 << 30, small="fused")
    wrapped(torch.ones(2, 24)).square().sum().backward()
    return [x.flatten() for x in exact], [p.grad.flatten() for p in model.parameters()]


def test_small_tensors_fused_and_all_small_is_top_k_over_the_whole_model_in_every_step():
    ((exact, sent),) = run_ranks(whole_model_as_one_vector, 1)
    exact, sent = torch.cat(exact), torch.cat(sent)
    largest = exact.abs().topk(round(0.1 * exact.numel())).indices
    kept = torch.zeros_like(exact).index_copy_(0, largest, exact[largest])
    torch.testing.assert_close(sent, kept, rtol=1e-6, atol=0)


def what_is_said(rank, world_size):
    said = {}
    for name, make, arguments in (
        ("nothing to compress", mlp, {"spec": "topk:density=0.01", "min_numel": 10**6}),
        ("only norms", lambda: nn.LayerNorm((40, 40)), {"spec": "topk:density=0.01"}),
        ("only float64", lambda: nn.Linear(64, 64).double(), {"spec": "topk:density=0.01"}),
        ("one vector", mlp, {"spec": "topk:density=0.01+ef", "min_numel": 10**6, "small": "fused"}),
        ("too dense", mlp, {"spec": "topk:density=1.0", "min_numel": 64}),
        ("nothing trained", lambda: mlp().requires_grad_(False), {"spec": "topk:density=0.01"}),
        ("lost", mlp, {"spec": "topk:density=0.01", "min_numel": 64}),
        ("lost by chance", mlp, {"spec": "randomk:density=0.01", "min_numel": 64}),
        ("rounded", mlp, {"spec": "qsgd:bits=2", "min_numel": 64}),
        ("worth it", mlp, {"spec": "topk:density=0.01+ef", "min_numel": 64}),
        ("as they are", lambda: mlp(torch.bfloat16), {"spec": "none", "min_numel": 64}),
    ):
        with heard() as messages:
            model = make() if name == "nothing trained" else wrap(make())
            handle = compress(model, **arguments)
        said[name] = messages
    loss_of(model, 0, rank, torch.bfloat16).backward()
    for layer in handle.layer_stats().values():
        assert layer.sent_bytes == layer.raw_bytes == 2 * layer.numel
    return said


def test_what_makes_no_sense_is_said_by_one_rank():
    said, others = run_ranks(what_is_said, 2)
    assert not any(others.values())
    assert said["worth it"] == said["one vector"] == said["as they are"] == said["rounded"] == []
    assert said["nothing trained"] == ["nothing is averaged: no parameter requires a gradient"]
    for name, spec in (("lost", "topk:density=0.01"), ("lost by chance", "randomk:density=0.01")):
        assert len(said[name]) == 1
        assert f"what it leaves out of a step is lost. Write '{spec}+ef'" in said[name][0]
    assert len(said["nothing to compress"]) == 1
    assert "nothing is compressed" in said["nothing to compress"][0]
    for matrices_of_enough_elements in ("only norms", "only float64"):
        assert "no parameter in float32, float16 or bfloat16 has two dim" in said[matrices_of_enough_elements][-1]
    assert len(said["too dense"]) == 1
    assert "do not compress, or keep less" in said["too dense"][0]
    assert "topk:density=1.0 among 2 ranks sends 12" in said["too dense"][0]
