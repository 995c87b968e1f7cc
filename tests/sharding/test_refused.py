"""What compression inside FSDP2 refuses, on all ranks and before anything is touched, and how it ends with a rank."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from narrowband.sharding import setup
from tests.gradients.shards import shard
from tests.gradients.training import heard, mlp, refusal
from tests.ranks import RankError, run_ranks
from tests.sharding.training import FINE, adamw, compress, mesh_of, train


def refusals(rank, world_size):
    sharded = shard(mlp(), mesh_of(world_size))
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("nodes", "shards"))
    return {
        "feedback": refusal(lambda: compress(sharded, gradients="qsgd:bits=4+ef")),
        "sparse": refusal(lambda: compress(sharded, gradients="topk:density=0.01")),
        "rank": refusal(lambda: compress(sharded, parameters="powersgd:rank=2")),
        "coarse": refusal(lambda: compress(sharded, parameters="qsgd:bits=2")),
        "no shards": refusal(lambda: compress(mlp())),
        "no module": refusal(lambda: compress(7)),
        "one rank": refusal(lambda: compress(shard(mlp(), alone["shards"]))),
        "ranks disagree": refusal(lambda: compress(sharded, gradients=f"qsgd:bits={4 + rank}")),
        "unknown": refusal(lambda: compress(sharded, gradients="zip")),
        "unknown on one rank": refusal(lambda: compress(sharded, gradients="zip" if rank else "qsgd:bits=8")),
    }


def test_what_cannot_be_done_is_said_before_anything_is_touched():
    for rank, refused in enumerate(run_ranks(refusals, 2)):
        kinds = {name: each and each[0] for name, each in refused.items()}
        assert kinds == {
            "feedback": "UnsupportedError",
            "sparse": "UnsupportedError",
            "rank": "UnsupportedError",
            "coarse": "UnsupportedError",
            "no shards": "TypeError",
            "no module": "TypeError",
            "one rank": "UnsupportedError",
            "ranks disagree": "DisagreementError",
            "unknown": "ValueError",
            "unknown on one rank": "ValueError" if rank else "DisagreementError",
        }
        assert "qsgd:bits=4 on rank 0" in refused["ranks disagree"][1]
        assert "unknown codec 'zip'" in refused["unknown on one rank"][1]


def left_as_they_are(rank, world_size):
    """What is said of models whose parameters are large enough, and are of no kind that codecs take."""
    mesh, said = mesh_of(world_size), []
    for layer in (nn.LayerNorm((40, 40)), nn.Linear(64, 64).double(), nn.Linear(64, 64)):
        with heard() as messages:
            compress(shard(nn.Sequential(layer), mesh))
        said.append(messages)
    return said


def test_why_nothing_is_compressed_is_said_by_one_rank():
    (of_norms, of_float64, of_float32), others = run_ranks(left_as_they_are, 2)
    assert not any(others)
    for (said,) in (of_norms, of_float64):
        assert "no parameter in float32, float16 or bfloat16 has two dimensions" in said
    assert of_float32 == []


class PartlyUsed(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.used, self.other = nn.Linear(24, 40), nn.Linear(40, 8, dtype=dtype)
        self.other.requires_grad_(dtype == torch.float32)  # FSDP2 trains no module in several dtypes
        self.part = 0

    def forward(self, x):
        h = self.used(x)
        return h[:, :8] if self.part else self.other(h.to(self.other.weight.dtype))


def of_other_sizes(rank, world_size, apart):
    """What is said of modules of which FSDP2 sends something else than all parameters in one dtype."""
    said = []
    for dtype, parts in ((torch.float32, (0, 1, 0, 1)), (torch.bfloat16, (0, 0))):
        torch.manual_seed(0)
        model = nn.Sequential(PartlyUsed(dtype))
        for layer in (model[0].used, model[0].other) if apart else ():
            fully_shard(layer, mesh=mesh_of(world_size))
        fully_shard(model[0], mesh=mesh_of(world_size))
        fully_shard(model, mesh=mesh_of(world_size))
        handle = compress(model)
        with heard() as messages:
            for model[0].part in parts:
                model(torch.ones(3, 24)).float().square().mean().backward()
        total = handle.stats().total
        raw, sent = total.raw_bytes - total.raw_gradient_bytes, total.sent_bytes - total.sent_gradient_bytes
        said.append((messages, raw / sent))
    return said


def test_what_is_sent_uncompressed_because_of_its_size_is_said_by_one_rank():
    ((of_gradients,), _), ((of_parameters,), ratio) = run_ranks(of_other_sizes, 2, False)[0]
    assert of_gradients.startswith("gradients of 0 are sent uncompressed at times: some of its parameters get no grad")
    assert of_parameters.startswith("parameters of 0 are sent uncompressed at times: FSDP2 gathers them in several dt")
    assert 0.9 < ratio <= 1
    apart, others = run_ranks(of_other_sizes, 2, True)
    for (messages, ratio), (of_other, _) in zip(apart, others, strict=True):
        assert messages == of_other == []
        assert ratio > 2


def without_anything(rank, world_size):
    """What is said of models of which FSDP2 sends nothing, or nothing yet, and where nothing is asked for."""
    mesh = mesh_of(world_size)
    with torch.device("meta"):
        empty = mlp()
    with heard() as messages:
        compress(shard(mlp(), mesh), gradients="none", parameters="none", min_numel=10**6)
    nothing = fully_shard(nn.Sequential(nn.ReLU()), mesh=mesh)
    return refusal(lambda: compress(nothing)), refusal(lambda: compress(shard(empty, mesh))), messages


def test_models_without_parameters_or_without_their_values():
    for nothing, empty, messages in run_ranks(without_anything, 2):
        assert nothing[0] == empty[0] == "UnsupportedError"
        assert "no parameter of this model is sharded among several ranks" in nothing[1]
        assert "call to_empty()" in empty[1]
        assert messages == []


def refused_and_trained(rank, world_size, kind):
    """A refusal on all ranks, and losses of the model afterwards, beside those of FSDP2 alone."""
    model, plain = shard(mlp(), mesh_of(world_size)), shard(mlp(), mesh_of(world_size))
    former = setup.use_all

    def use_all(*arguments):
        if rank == 1:
            raise MemoryError("no room")
        former(*arguments)

    options = {"codec": {"gradients": f"qsgd:bits={4 + rank}"}, "min_numel": {"min_numel": 64 if rank else 10**6}}
    if kind == "warm-up":
        setup.use_all = use_all
    try:
        refused = refusal(lambda: compress(model, **FINE | options.get(kind, {})))
    finally:
        setup.use_all = former
    losses = train(model, rank, range(3), adamw(model)), train(plain, rank, range(3), adamw(plain))
    handle = compress(model, **FINE)
    train(model, rank, range(2), adamw(model))
    return refused, losses, handle.stats().total.steps


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("codec", "gradients (qsgd:bits=4 on rank 0; qsgd:bits=5 on rank 1)"),
        ("min_numel", "compressed parameters of '0' (none on rank 0; 0.weight on rank 1)"),
        ("warm-up", "rank 1: MemoryError: no room"),
    ],
)
def test_a_model_that_was_refused_on_one_rank_is_refused_on_all_and_trains_as_before(kind, words):
    for rank, (refused, (losses, native), steps) in enumerate(run_ranks(refused_and_trained, 2, kind)):
        if rank == 1 and kind == "warm-up":
            assert refused == ("MemoryError", "no room")
        else:
            assert refused[0] == "DisagreementError"
            assert words in refused[1]
        assert losses == native
        assert steps == 2


def refused_in_one_of_two_groups(rank, world_size):
    """A warm-up fails on one rank of a model whose first layer is shared by ranks 0 and 2, and by 1 and 3."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "pairs"))["shards"]
    model = mlp()
    fully_shard(model[0], mesh=pairs)
    shard(model[1:], mesh_of(world_size))
    former = setup.use_all

    def use_all(*arguments):
        if rank == 1:
            raise MemoryError("no room")
        former(*arguments)

    setup.use_all = use_all
    try:
        refused = refusal(lambda: compress(model, **FINE))
    finally:
        setup.use_all = former
    handle = compress(model, **FINE)
    state = handle.state_dict()
    if rank == 2:
        state["version"] = 0
    unloaded = refusal(lambda: handle.load_state_dict(state))
    handle.remove()
    return refused, unloaded


def test_ranks_in_other_groups_are_told_of_a_refusal():
    """A rank has to tell all its groups before it raises, or those that are not in the first would wait for it."""
    answers = run_ranks(refused_in_one_of_two_groups, 4)
    for rank, (refused, unloaded) in enumerate(answers):
        assert refused[0] == ("MemoryError" if rank == 1 else "DisagreementError")
        assert "no room" in refused[1]
        assert unloaded[0] in ("ValueError", "DisagreementError")
    assert answers[2][1][1].startswith("expected a state of a handle of compress_shards")


def parts_of_a_model(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    part = compress(model[0], **FINE)
    whole = refusal(lambda: compress(model, **FINE))
    compress(model[3], **FINE)
    part.remove()
    of_another = refusal(lambda: compress(model, **FINE))
    return whole, of_another


def test_a_part_of_a_model_is_compressed_by_one_handle():
    for refused in run_ranks(parts_of_a_model, 2):
        for kind, text in refused:
            assert kind == "UnsupportedError"
            assert "or a part of it, has a handle of compress_shards already" in text


def leaves(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    optimizer = adamw(model)
    train(model, rank, range(2), optimizer)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return [refusal(lambda: train(model, rank, range(2, 4), optimizer)) for _ in range(2)]


def test_a_rank_that_leaves_is_an_error():
    with pytest.raises(RankError) as caught:
        run_ranks(leaves, 2, fresh=True, grace_s=180.0)
    assert [kind for kind, _ in caught.value.results[0]] == ["RuntimeError"] * 2
