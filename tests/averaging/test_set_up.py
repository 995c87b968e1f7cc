"""Set-up: what one rank is given wrongly is an error on all, which names that rank as users know it; and warnings."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.adapt import LayerPlan, Plan
from narrowband.averaging.settings import Settings
from narrowband.collectives import engine
from tests.gradients.training import heard, refusal
from tests.ranks import run_ranks

SPEC = "topk:density=0.1+ef"
NET = {"0.weight": (64, 48), "1.weight": (48, 64)}


def net():
    return nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48))


def plan_of(specs, shapes=NET):
    return Plan(tuple(LayerPlan(name, shapes[name], spec, 1.0, None) for name, spec in specs.items()), "by hand", 2)


GOOD = plan_of(dict.fromkeys(NET, SPEC))
#: What one rank is given, in place of a plan that all have; and what all are told of it.
WRONG = {
    "another model": (
        {"spec": plan_of({"0.weight": SPEC, "2.weight": SPEC}, NET | {"2.weight": (8, 8)})},
        "ValueError: this is the plan of another model: it lacks 1.weight",
    ),
    "mixed": (
        {"spec": plan_of({"0.weight": SPEC, "1.weight": "dgc:density=0.1"})},
        "ValueError: '1.weight' cannot have 'dgc:density=0.1'",
    ),
    "small": ({"spec": SPEC, "small": "qsgd:bits=4+ef21"}, "ValueError: 'small' cannot have 'qsgd:bits=4+ef21'"),
}


def given_wrongly(rank, world_size, way, wrong, on):
    """What ranks raise of which some are given something wrong, and how many steps they make together afterwards."""
    model = net()
    set_up = {"Averager": nb.Averager, "compress_gradients": nb.compress_gradients}[way]
    own = wrong if rank in on else {"spec": GOOD}
    refused = refusal(lambda: set_up(model, own["spec"], **{key: own[key] for key in own if key != "spec"}))
    averager = nb.Averager(net(), GOOD)
    averager.average()
    return refused, averager.step


@pytest.mark.parametrize("way", ["Averager", "compress_gradients"])
@pytest.mark.parametrize("kind", WRONG)
def test_what_one_rank_is_given_wrongly_is_an_error_on_all(way, kind):
    wrong, words = WRONG[kind]
    (told, steps), (own, own_steps) = run_ranks(given_wrongly, 2, way, wrong, [1])
    assert told[0] == "DisagreementError"
    assert f"problem (rank 0: none; rank 1: {words}" in told[1]
    assert f"Call {way} on all ranks with the same arguments" in told[1]
    assert f"{own[0]}: {own[1]}".startswith(words)
    assert steps == own_steps == 1


def test_what_all_ranks_are_given_wrongly_is_the_error_itself():
    wrong, words = WRONG["mixed"]
    for refused, steps in run_ranks(given_wrongly, 2, "Averager", wrong, [0, 1]):
        assert f"{refused[0]}: {refused[1]}".startswith(words)
        assert steps == 1


def in_a_part(rank, world_size):
    """What is said among ranks 1 and 2, which have other ranks in their group, and on a rank that is not in it."""
    group = dist.new_group([1, 2])
    return refusal(lambda: nb.Averager(net(), "qsgd:bits=4", seed=rank, process_group=group))


def test_ranks_are_named_as_in_the_whole_program():
    outside, *refused = run_ranks(in_a_part, 3)
    assert outside[0] == "ValueError"
    assert "this rank is not in process_group" in outside[1]
    for kind, text in refused:
        assert kind == "DisagreementError"
        assert "ranks disagree on seed (1 on rank 1; 2 on rank 2)" in text


def after_one_step(rank, world_size):
    model = nn.Linear(8, 8)
    averager = nb.Averager(model, "none", min_numel=4)
    model(torch.ones(1, 8)).sum().backward()
    averager.average()
    return repr(averager)


def test_a_handle_counts_one_as_one():
    (one,), (two, _) = run_ranks(after_one_step, 1), run_ranks(after_one_step, 2)
    assert "1 rank, 1 layer with 64 of 72 parameters" in one
    assert ", 1 step of " in one
    assert "2 ranks, 1 layer with" in two


def with_wider_gradients(rank, world_size, way, wide):
    """What is said of parameters in 16 bits whose gradients may have 32."""
    model = net().bfloat16()
    if wide:
        for p in model.parameters():
            p.grad_dtype = torch.float32
    with heard() as messages:
        {"Averager": nb.Averager, "compress_gradients": nb.compress_gradients}[way](model, "qsgd:bits=4")
    return messages


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no gradients of another dtype")
@pytest.mark.parametrize("way", ["Averager", "compress_gradients"])
@pytest.mark.parametrize("wide", [True, False])
def test_that_gradients_are_rounded_to_their_parameters_is_said_by_one_rank(way, wide):
    said, others = run_ranks(with_wider_gradients, 2, way, wide)
    assert others == []
    expected = ["gradients of 0.weight and 3 more are rounded to the dtype of their parameters to be averaged"]
    assert said == expected * wide


#: Fields of the settings that ranks compare as facts about the model's layers, or that are not the same on all ranks.
OF_LAYERS = {"compression", "policy", "plan", "small", "rates"}


def test_every_setting_is_compared():
    """Also among peers, which compare before they have a process group."""
    settings = Settings.of(
        "none", min_numel=8, warmup_steps=0, seed=0, collective="auto", small="uncompressed", message_nbytes=0,
        early_nbytes=0, grad_scaler=None, connected=False,
    )  # fmt: skip
    others = {"collective": "all_gather", "grad_scaler": torch.amp.GradScaler("cpu")}
    for field in dataclasses.fields(Settings):
        if field.name not in OF_LAYERS:
            other = dataclasses.replace(settings, **{field.name: others.get(field.name, 7)})
            assert other.facts() != settings.facts(), field.name


def called_late(rank, world_size, way, folder):
    """What is logged on a rank whose set-up waits for another, which comes only when that is logged, or when the first
    has had time enough for it.
    """
    said = Path(folder, "said")
    set_up = {"Averager": nb.Averager, "compress_gradients": nb.compress_gradients}[way]
    former, engine.LONG_S = engine.LONG_S, 0.1

    def seen(record):
        said.touch()
        return record.getMessage()

    with heard(seen) as messages:
        try:
            for _ in range(1000 * rank):  # looks, not seconds
                if said.exists():
                    break
                time.sleep(0.01)
            engine.LONG_S = 60.0 if rank else 0.1
            handle = set_up(net(), GOOD)
        finally:
            engine.LONG_S = former
        handle.remove()
    return messages


@pytest.mark.parametrize("way", ["Averager", "compress_gradients"])
def test_a_set_up_that_waits_for_long_says_for_which_call(way, tmp_path):
    (first, *_), of_late = run_ranks(called_late, 2, way, str(tmp_path))
    assert f"{way} has waited for other ranks for 0.1 s, since all ranks have to call it." in first
    assert of_late == []


def never_called(rank, world_size, way, folder):
    """The error of a rank whose set-up waits for another that never makes that call."""
    group = dist.new_group(timeout=timedelta(seconds=1.0))
    seen = Path(folder, "seen")
    if rank:
        for _ in range(3000):  # looks, not seconds
            if seen.exists():
                break
            time.sleep(0.01)
        return None
    set_up = {
        "CodedDataParallel": lambda: nb.CodedDataParallel(net(), 1, process_group=group),
        "compress_gradients": lambda: nb.compress_gradients(net(), GOOD, process_group=group),
    }[way]
    found = refusal(set_up)
    seen.touch()
    return found


@pytest.mark.parametrize("way", ["CodedDataParallel", "compress_gradients"])
def test_a_set_up_that_waits_in_vain_says_which_call_is_missing(way, tmp_path):
    (kind, text), _ = run_ranks(never_called, 2, way, str(tmp_path))
    assert kind == "RuntimeError", text
    assert text.startswith(f"{way}: other ranks have not answered, but all ranks have to call it.")
