from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import narrowband as nb
from reproduce import lgreco, sparsity, training
from reproduce import row as rows
from reproduce.lgreco_links import timed
from reproduce.models import ResNet
from reproduce.row import Row, key, resolved
from reproduce.training import run
from tests.gradients.training import FINGERPRINT

NODES = 2
DENSE = Row("cifar", "dense", "none", epochs=2, batch=32, lr=0.05)
SPARSE = replace(DENSE, name="plain", spec="topk:density=0.01+ef")
WRITES = replace(DENSE, task="lstm", epochs=1, batch=8, lr=1.0, weight_decay=0.0, clip=0.25, limit=4_000)
READS = replace(WRITES, task="gpt", optimizer="adamw", lr=1e-3)
BREAKS = replace(WRITES, name="broken", lr=1e30, clip=None)
PLANNED = replace(SPARSE, name="top-k, lgreco", policy="lgreco", epochs=3, delay=0.2)
FIXED = replace(PLANNED, name="top-k, uniform", policy="uniform")
LARGEST = replace(PLANNED, name="global top-k, once an epoch", policy="global-topk")
AS_ONE = replace(FIXED, name="global top-k, every step", min_numel=1 << 30, small="fused")


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Rows of every task through real ranks: their directory, what they came to, what was told on the way."""
    directory, events = tmp_path_factory.mktemp("results"), []
    rows = run([DENSE, SPARSE, WRITES, READS, BREAKS], directory, nodes=NODES, data_dir=folder, on_event=events.append)
    return directory, rows, events


def test_models_learn_with_and_without_compression(finished):
    _, (dense, sparse, writes, reads, _), _ = finished
    for row in (dense, sparse):
        assert row["metric"] == "test accuracy, %"
        assert row["score"] == row["scores"][-1] > 2 * 10  # ten classes
        assert row["curve"][-1][1] < row["curve"][0][1]
    assert writes["score"] < 30  # of 34 characters that occur
    assert reads["score"] < 256 / 2


def test_ranks_that_train_by_themselves_send_nothing_and_learn_less(finished, folder, tmp_path):
    _, (*_, together, _), _ = finished
    apart, *_ = run([replace(READS, name="nothing is sent", isolated=True)], tmp_path, nodes=NODES, data_dir=folder)
    assert apart["sent_bytes_per_step"] == apart["raw_bytes_per_step"] == 0
    assert apart["ratio"] is apart["payload_ratio"] is apart["mean_ratio"] is None
    assert together["score"] < apart["score"] < 256
    with pytest.raises(ValueError, match="send nothing"):
        replace(READS, isolated=True, updates=2)


@pytest.fixture(scope="module")
def decided(folder, tmp_path_factory):
    """Rows with policies, through real ranks."""
    return run([PLANNED, FIXED, LARGEST, AS_ONE], tmp_path_factory.mktemp("results"), nodes=NODES, data_dir=folder)


@pytest.mark.thorough
def test_policies_plan_once_an_epoch(decided, folder, tmp_path):
    """The pictures of plans, too."""
    row, uniform, *_ = decided
    epoch = row["steps"] // 3
    begins = round(0.2 * row["steps"])
    assert [step for step, _, _ in row["plans"]] == [begins, begins + epoch, begins + 2 * epoch]
    assert len(set(row["plans"][-1][2].values())) > 1
    assert row["compressed_ratio"] > row["mean_ratio"] > 1
    assert row["decide_s"] > 0
    # All of the raw bytes of the first steps, and what is sent in the last epoch in every other.
    assert {spec for _, _, plan in uniform["plans"] for spec in plan.values()} == {"topk:density=0.01+ef"}
    raw, sent = uniform["raw_bytes_per_step"], uniform["sent_bytes_per_step"]
    assert uniform["compressed_ratio"] == pytest.approx(raw / sent, rel=0.01)
    assert uniform["mean_ratio"] == pytest.approx(raw / (0.2 * raw + 0.8 * sent), rel=0.01)
    # What is timed on links sends what the last plan says.
    again = [timed(PLANNED, row, steps=3), timed(FIXED, uniform, steps=3)]
    told, same = run(again, tmp_path / "links", nodes=NODES, data_dir=folder)
    assert json.loads(again[0].plan) == row["plans"][-1][2]
    assert (told["steps"], told["plans"], same["plans"]) == (3, [], [])
    assert same["sent_bytes_per_step"] == sent != told["sent_bytes_per_step"]
    names = {path.name for path in lgreco._draw([row | {"task": "gpt"}], tmp_path)}
    assert names == {"gpt-ratios.png", "gpt-profile.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


@pytest.mark.thorough
def test_global_topk_sends_the_largest_by_shares_of_layers_or_in_every_step_as_one_vector(decided):
    _, uniform, largest, one = decided
    sent = [row["raw_bytes_per_step"] / row["compressed_ratio"] for row in (uniform, largest, one)]
    assert sent[0] == pytest.approx(sparsity._by_layers(0.01, NODES), rel=0.01)
    assert 0.8 * sent[0] < sent[1] < sent[0], "indices are shorter where more of a layer is sent"
    assert sent[2] == pytest.approx(sparsity._as_one(0.01, NODES), rel=0.01)
    layers = {name: p.shape for name, p in ResNet(8).named_parameters() if p.dim() > 1}
    for _, _, plan in largest["plans"]:
        kept = {name: nb.compression(spec).codec.kept(layers[name]) for name, spec in plan.items()}
        assert sum(kept.values()) == pytest.approx(748, abs=len(layers))
        assert len({kept[name] / layers[name].numel() for name in layers}) == len(layers)
    assert [step for step, *_ in largest["plans"]] == [step for step, *_ in uniform["plans"]] + [24, 39]
    assert one["plans"] == []
    assert one["mean_ratio"] < one["compressed_ratio"], "after the same steps as others"
    for row in decided:
        assert row["curve"][-1][1] < row["curve"][0][1]


def test_policies_get_their_choices_and_begin_after_a_delay():
    choices = "powersgd:rank=2 powersgd:rank=16"
    row = replace(DENSE, spec="powersgd:rank=8", delay=0.05, choices=choices, policy="lgreco")
    own = rows.policy_of(row, 390, 4680)
    assert (own.every, own.warmup_steps) == (390, 234)
    assert set(own.specs()) == {"powersgd:rank=2", "powersgd:rank=8", "powersgd:rank=16"}
    both = rows.policy_of(replace(row, policy="lgreco+accordion", high="powersgd:rank=4"), 390, 4680)
    assert set(both.specs()) == {f"powersgd:rank={rank}" for rank in (2, 4, 8, 16)}
    fixed = rows.policy_of(replace(row, policy="uniform"), 390, 4680)
    assert (fixed.warmup_steps, fixed.specs()) == (234, ["powersgd:rank=8"])
    assert rows.policy_of(DENSE, 390, 4680) is None
    largest = rows.policy_of(replace(SPARSE, policy="global-topk", delay=0.05), 390, 4680)
    assert (largest.density, largest.feedback, largest.every, largest.warmup_steps) == (0.01, "ef", 390, 234)


def test_what_the_learning_rate_does():
    cosine, steps = ([training._rate(step, 100, kind) for step in range(100)] for kind in ("cosine", "steps"))
    assert cosine[:5] == steps[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert cosine[52] == pytest.approx(0.5, abs=0.02)
    assert cosine[-1] < 1e-3
    assert (steps[49], steps[50], steps[79], steps[80]) == pytest.approx((1.0, 0.1, 0.1, 0.01))
    half = [training._rate(step, 100, "half-cosine") for step in range(101)]
    assert (half[0], half[-1]) == pytest.approx((1.0, 0.5))
    assert half[50] == pytest.approx(0.5 * (1 + 2**-0.5)), "a quarter of the way that CosineAnnealingLR goes to zero"
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    for expected in half:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        optimizer.step()
        theirs.step()


def test_a_row_that_diverges_is_a_row_too(finished):
    _, rows, _ = finished
    assert rows[-1]["score"] is None
    json.dumps(rows, allow_nan=False)


def test_bytes_are_those_of_a_step_of_the_last_epoch(finished):
    _, (dense, sparse, *_), _ = finished
    assert dense["steps"] == 2 * (480 // 32)
    gradient = 4 * dense["parameters"]
    assert dense["raw_bytes_per_step"] == gradient  # 2·(N−1)/N of it, N = 2
    assert dense["sent_bytes_per_step"] == gradient + FINGERPRINT
    assert dense["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert dense["payload_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert dense["matrix_ratio"] == pytest.approx(1.0, abs=1e-4)
    # One element in a hundred of 74,800, with its index, and 490 norms and biases as they are.
    assert 4 * 490 + 748 * 5 <= sparse["sent_bytes_per_step"] <= 4 * 490 + 760 * 6
    assert sparse["ratio"] == pytest.approx(gradient / sparse["sent_bytes_per_step"])
    assert sparse["payload_ratio"] == pytest.approx(sparse["ratio"], rel=0.01)  # two ranks send a payload once
    assert 4 * 74_800 / (760 * 6) <= sparse["matrix_ratio"] <= 4 * 74_800 / (748 * 5)


def test_every_step_epoch_and_row_is_told(finished):
    _, rows, events = finished
    for number, row in enumerate(rows):
        told = [event for event in events if event["row"] == number]
        steps = [event["step"] for event in told if event["event"] == "step"]
        assert steps == sorted(steps)
        assert steps[-1] == row["steps"] == told[0]["of"]
        assert [event["metric"] for event in told if event["event"] == "epoch"] == row["scores"]
        assert told[-1]["event"] == "row"


def test_a_curve_covers_every_step_of_every_epoch(finished):
    _, (dense, *_), _ = finished
    steps = [step for step, _ in dense["curve"]]
    assert steps == sorted(set(steps))
    assert {dense["steps"] // 2, dense["steps"]} <= set(steps)
    assert len(steps) == 20


def test_finished_rows_are_taken_and_missing_ones_trained_to_the_same_bits(finished, folder):
    directory, rows, _ = finished
    (missing,) = (directory / "rows").glob("cifar-plain-*.json")
    missing.unlink()
    events = []
    again = run([DENSE, SPARSE], directory, nodes=NODES, data_dir=folder, on_event=events.append)
    assert {event["row"] for event in events if event["event"] == "step"} == {1}
    assert again[0] == rows[0]
    for what in ("scores", "curve", "sent_bytes_per_step"):
        assert again[1][what] == rows[1][what]
    assert missing.exists()


def test_without_resume_ranks_are_asked_for_every_row(finished, folder, monkeypatch):
    directory, _, _ = finished

    class AskedError(Exception):
        pass

    def ask(module, config, *_):
        raise AskedError([row["name"] for _, row in config["rows"]])

    monkeypatch.setattr(training, "run_ranks", ask)
    with pytest.raises(AskedError, match=r"\['dense', 'plain'\]"):
        run([DENSE, SPARSE], directory, nodes=NODES, data_dir=folder, resume=False)
    assert run([DENSE], directory, nodes=NODES, data_dir=folder)[0]["name"] == "dense"


@pytest.mark.parametrize(
    "change",
    [
        {"spec": "fp16"},
        {"seed": 1},
        {"optimizer": "adamw"},
        {"epochs": 3},
        {"lr": 0.2},
        {"batch": 64},
        {"momentum": 0.5},
        {"clip": 1.0},
        {"limit": 100},
        {"depth": 20},
        {"weight_decay": 0.0},
        {"warmup_epochs": 1},
        {"schedule": "steps"},
        {"policy": "uniform"},
        {"policy": "uniform", "delay": 0.1},
        {"policy": "lgreco", "spec": "qsgd:bits=4", "choices": "qsgd:bits=2 qsgd:bits=4"},
        {"small": "fused"},
        {"forward": "none", "backward": "none"},
        {"activations": '{"bits": 8}'},
        {"activations": '{"bits": 4}'},
        {"activations": '{"bits": 8}', "trace": True},
    ],
)
def test_a_row_is_kept_under_a_name_that_everything_changes(change):
    assert key(replace(DENSE, **change), 4, "data") != key(DENSE, 4, "data")


def test_rows_that_were_recorded_are_found_again(monkeypatch):
    """More fields of a row change no name."""
    monkeypatch.setattr(rows, "versions", dict)
    images = Row("cifar", "dense", "none", epochs=10, lr=0.4, batch=128, weight_decay=1e-4)
    text = Row("gpt", "rank 4", "powersgd:rank=4", optimizer="adamw", epochs=3, lr=2e-3, batch=32, momentum=0.0,
               weight_decay=0.01, clip=1.0)  # fmt: skip
    planned = replace(
        text, name="powersgd, lgreco+accordion", epochs=2, policy="lgreco+accordion", high="powersgd:rank=1"
    )
    assert [key(row, 4, "data") for row in (images, text, planned)] == [
        "cifar-dense-0-57a22f87b672",
        "gpt-rank-4-0-f60ed59a972e",
        "gpt-powersgd--lgreco-accordion-0-0aa54c680de2",
    ]


def test_other_data_and_other_ranks_are_other_rows():
    assert len({key(DENSE, 4, "data"), key(DENSE, 4, "other"), key(DENSE, 2, "data")}) == 3
    assert key(replace(DENSE), 4, "data") == key(DENSE, 4, "data")


@pytest.mark.parametrize(
    ("spec", "gathered"),
    [
        ("none", False),
        ("fp16", False),
        ("qsgd:bits=4", False),
        ("topk:density=0.001+ef", True),
        ("dgc:density=0.001", True),
        ("powersgd:rank=2", False),
    ],
)
def test_payloads_that_do_not_add_up_are_sent_to_every_rank(spec, gathered):
    """One payload as large as a quarter of the gradient: how often it is sent shows what is taken for a payload."""
    model = torch.nn.Linear(1000, 1000, bias=False)
    sent = 1_000_000 * (3 if gathered else 1.5)
    ratios = training._payload_ratios(model, replace(DENSE, min_numel=1), spec, sent, 4)
    assert ratios == {"payload_ratio": 4.0, "matrix_ratio": 4.0}


@pytest.mark.parametrize(("spec", "times"), [("sign+ef", 1.5), ("qsgd:bits=2", 1.5), ("qsgd:bits=2+ef", 3)])
def test_a_payload_is_sent_as_often_as_by_the_collective_that_its_feedback_allows(spec, times):
    """With feedback a codec that loses more than it is given is not encoded again, but gathered."""
    model = torch.nn.Linear(1000, 1000)
    row = replace(DENSE, min_numel=1, small="fused")
    payload = sum(nb.compression(spec).codec.payload_nbytes(shape) for shape in ((1000, 1000), (1000,)))
    ratios = training._payload_ratios(model, row, spec, times * payload, 4)
    assert ratios["payload_ratio"] == pytest.approx(4_004_000 / payload)


def test_small_parameters_count_as_dense_unless_they_are_compressed():
    model = torch.nn.Linear(1000, 1000)
    vector = nb.compression("topk:density=0.05").codec.payload_nbytes((1000,))
    one = nb.compression("dgc:density=0.001").codec.payload_nbytes((1000,))
    for small, nbytes, sent in (
        ("uncompressed", 4000, 1.5 * 4000),
        ("topk:density=0.05", vector, 3 * vector),
        ("fused", one, 3 * one),
    ):
        row = replace(DENSE, min_numel=1, small=small)
        ratios = training._payload_ratios(model, row, "dgc:density=0.001", 3 * 5500 + sent, 4)
        assert ratios["payload_ratio"] == pytest.approx(4_004_000 / (5500 + nbytes))
        assert ratios["matrix_ratio"] == pytest.approx(4_000_000 / 5500)


def test_warm_up_is_counted_in_steps():
    row = replace(DENSE, spec="dgc:density=0.001,warmup_steps={warmup}", warmup_epochs=1)
    assert resolved(row, steps=390) == "dgc:density=0.001,warmup_steps=390"
    assert resolved(DENSE, steps=390) == "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "mnist"}, "'mnist' is none of cifar, lstm, llama, shakespeare, gpt"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"warmup_epochs": 2}, "warmup_epochs=2 is not below epochs=2"),
        ({"lr": 0.0}, "lr=0.0 must be above 0"),
        ({"width": 64}, "width=64 must be 0, or, where a GPT learns"),
        ({"residuals": "in-place"}, "residuals are of rows whose updates are averaged"),
        ({"task": "gpt", "width": -1}, "width=-1 must be 0"),
        ({"forward": "none"}, "forward='none' and backward='' go together"),
        ({"forward": "none", "backward": "none", "spec": "fp16"}, "one process, .*: spec='fp16'"),
        ({"activations": "{}", "spec": "fp16"}, "one process, .*: spec='fp16'"),
        ({"activations": "{}", "policy": "lgreco", "spec": "qsgd"}, "one process, .*: .* policy='lgreco'"),
        ({"activations": "{}", "forward": "none", "backward": "none"}, "leave out forward or activations"),
        ({"activations": "bits=8"}, "'bits=8' is no JSON"),
        ({"activations": "8"}, "'8' is no policy: expected fields of one"),
        ({"activations": '{"bits": 3}'}, "bits=3 must be 8, 4, 2 or"),
        ({"trace": True}, "trace=True .* needs activations"),
        ({"policy": "none"}, "policy='none' is none of uniform, lgreco"),
        ({"policy": "global-topk", "spec": "qsgd:bits=4+ef"}, "such as topk:density=0.01.ef, not 'qsgd:bits=4.ef'"),
        ({"policy": "global-topk", "spec": "topk:density=0.01"}, "global-topk.* needs a spec"),
        ({"delay": 0.1}, "delay=0.1 needs a policy"),
        ({"delay": 1.0, "policy": "uniform"}, r"delay=1.0 is not in \[0, 1\)"),
        ({"forward": "none", "backward": "uniform:bits=99"}, "bits=99"),
    ],
)
def test_what_cannot_be_trained_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DENSE, **change)
