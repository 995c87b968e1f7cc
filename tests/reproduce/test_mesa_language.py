"""A small Llama with activations in few bits: it computes as Transformers' does, and claims turn with its figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import narrowband as nb
from reproduce import mesa_language
from reproduce.activations import read_policy
from reproduce.command import Options, chosen
from reproduce.groups import DENSE, groups
from reproduce.models import Llama, LlamaConfig
from reproduce.report import table
from reproduce.training import run

EXPERIMENT = mesa_language.EXPERIMENT
MIXED = "4 bits, norms and attention in 8"
SHAPE = LlamaConfig(dim=64, blocks=2, heads=4, hidden=96, sequence=32)


def ours():
    torch.manual_seed(0)
    return Llama(65, SHAPE)


def theirs(model):
    """Of Transformers, with the parameters of ours."""
    transformers = pytest.importorskip("transformers", reason="the architecture comes from it")
    config = transformers.LlamaConfig(
        vocab_size=65, hidden_size=SHAPE.dim, intermediate_size=SHAPE.hidden, num_hidden_layers=SHAPE.blocks,
        num_attention_heads=SHAPE.heads, max_position_embeddings=SHAPE.sequence, rms_norm_eps=1e-6, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    same = transformers.LlamaForCausalLM(config)
    own = model.state_dict()
    names = {"tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    names["head.weight"] = "lm_head.weight"
    parts = {f"{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkvo"}
    parts |= {f"{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    parts |= {"norm1.weight": "input_layernorm.weight", "norm2.weight": "post_attention_layernorm.weight"}
    for at in range(SHAPE.blocks):
        names |= {f"blocks.{at}.{part}": f"model.layers.{at}.{other}" for part, other in parts.items()}
    assert own.keys() == names.keys()
    missing = same.load_state_dict({names[name]: value for name, value in own.items()}, strict=True)
    assert not missing.missing_keys
    return same


def kept(model, call, bits):
    with nb.compress_activations(model, bits=bits) as saved:
        loss = call(model).logsumexp(-1).mean()
    loss.backward()
    return saved.raw_bytes, saved.kept_bytes


def test_the_model_is_transformers_and_keeps_as_many_bytes():
    model, tokens = ours(), torch.randint(65, (8, SHAPE.sequence))
    other = theirs(model)
    torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=1e-4, atol=1e-5)
    raw, eight = kept(model, lambda own: own(tokens), 8)
    raw_there, eight_there = kept(other, lambda own: own(tokens).logits, 8)
    assert raw == pytest.approx(raw_there, rel=0.01)
    tables = 2 * 4 * SHAPE.sequence * SHAPE.dim // SHAPE.heads  # of positions, which Transformers computes in forward
    assert eight == eight_there - tables


def test_a_token_sees_only_those_before_it():
    model, tokens = ours(), torch.randint(65, (2, SHAPE.sequence))
    changed = tokens.clone()
    changed[:, 20] = (tokens[:, 20] + 1) % 65
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert all((before[:, at] != after[:, at]).any() for at in range(20, SHAPE.sequence))


def test_policies_fit_the_model_and_mean_all_of_its_norms():
    rows = {row.name: row for row in chosen(EXPERIMENT, Options(seeds=(0,)))}
    model, tokens = ours(), torch.randint(65, (8, SHAPE.sequence))
    found = {}
    for name, row in rows.items():
        policy = read_policy(row.activations)
        assert policy.derive or policy.is_off, name  # the library's default
        with nb.compress_activations(model, policy=policy) as saved:
            model(tokens).sum().backward()
        found[name] = saved
    # Of each norm one tensor, and a factor per token; and queries, keys, values and results of attention.
    elements, norms = tokens.numel() * SHAPE.dim, 2 * SHAPE.blocks + 1
    for name in ("8 bits", "4 bits", MIXED):
        assert found[name].by_operator["layer_norm"].kept_bytes == norms * (elements + tokens.numel() * 4), name
        assert found[name].by_operator["layer_norm"].raw_bytes == found[DENSE].by_operator["layer_norm"].raw_bytes
    assert found[MIXED].kept_bytes - found["4 bits"].kept_bytes == 4 * SHAPE.blocks * elements // 2
    sizes = [found[name].kept_bytes for name in ("4 bits", MIXED, "8 bits", DENSE)]
    assert sizes == sorted(set(sizes))
    assert found["checkpointing"].by_operator["checkpoint"].kept_bytes == SHAPE.blocks * tokens.numel() * SHAPE.dim * 4


#: Loss in nats, and share of bytes: numbers with which every claim holds.
NUMBERS = {
    DENSE: (1.700, 1.0), "8 bits": (1.702, 0.14), "4 bits": (1.704, 0.08), MIXED: (1.703, 0.1),
    "checkpointing": (1.700, 0.08),
}  # fmt: skip


def made_up(**changes):
    rows = []
    for name, numbers in NUMBERS.items():
        loss, share = changes.get(name, numbers)
        rows += [
            {
                "task": "llama", "name": name, "spec": "{}", "seed": seed, "metric": "held-out perplexity",
                "higher_is_better": False, "epochs": 1, "nodes": 1, "parameters": 1000,
                "score": math.exp(loss + 0.02 * seed), "sent_bytes_per_step": 0.0, "ratio": None,
                "payload_ratio": None, "matrix_ratio": None, "step_s": 0.1,
                "plain_bytes": 80 if name == "checkpointing" else 1000, "kept_bytes": int(1000 * share),
                "gradient_error": 0.01 * (name not in (DENSE, "checkpointing")), "commit": "0123456789abcdef",
            }
            for seed in range(1 if name == "checkpointing" else 3)
        ]  # fmt: skip
    return rows


def verdicts(rows):
    return [claim.held for claim in EXPERIMENT.claims(groups(rows))]


def test_claims_turn_with_losses_and_bytes():
    assert verdicts(made_up()) == [True] * 5
    for at, (name, numbers) in enumerate(
        [
            ("8 bits", (1.73, 0.14)),
            ("4 bits", (1.73, 0.08)),
            (MIXED, (1.73, 0.1)),
            ("8 bits", (1.702, 0.2)),
            ("checkpointing", (1.7001, 0.08)),
        ]
    ):
        assert verdicts(made_up(**{name: numbers})) == [each != at for each in range(5)], name
    assert verdicts([row for row in made_up() if row["name"] == DENSE]) == [None] * 5


def test_shares_are_of_what_the_uncompressed_row_keeps():
    (shown,) = table(groups(made_up()), EXPERIMENT.titles, EXPERIMENT.layout)
    columns = {column.header: list(column.cells) for column in shown.columns}
    assert dict(zip(columns["row"], columns["share"], strict=True)) == {
        DENSE: "100%", "8 bits": "14%", "4 bits": "8%", MIXED: "10%", "checkpointing": "8%",
    }  # fmt: skip


def test_checkpoints_are_exact_to_the_bit_and_bytes_are_counted(folder, tmp_path):
    rows = [recipe.row for recipe in EXPERIMENT.recipes if recipe.row.name in (DENSE, "8 bits", "checkpointing")]
    small = [replace(row, batch=2, limit=400) for row in rows]
    dense, eight, again = run(small, tmp_path, nodes=1, data_dir=folder)
    assert [row["name"] for row in (dense, eight, again)] == [DENSE, "8 bits", "checkpointing"]
    assert again["curve"] == dense["curve"]
    assert again["score"] == dense["score"] != eight["score"]
    assert again["gradient_error"] == 0 < eight["gradient_error"] < 0.05
    assert again["kept_bytes"] < eight["kept_bytes"] < 0.2 * dense["kept_bytes"]
