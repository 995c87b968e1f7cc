"""What a policy decides, what it refuses, and that it is data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import narrowband as nb
from narrowband.activations import OPERATORS, ActivationPolicy

bits = st.sampled_from([8, 4, 2, "off"])
operators = st.sampled_from(sorted(OPERATORS))
names = st.text(max_size=8).map(lambda name: name.replace(":", "."))
policies = st.builds(
    ActivationPolicy,
    bits=bits,
    operators=st.dictionaries(operators, bits, max_size=3),
    modules=st.builds(
        dict.__or__,
        st.dictionaries(names, bits | st.sampled_from(["checkpoint", "checkpoint:bits=4"]), max_size=3),
        st.dictionaries(st.builds("{}:{}".format, names, operators), bits, max_size=3),
    ),
    min_numel=st.integers(1, 10**9),
    granularity=st.sampled_from(["group", "layer"]),  # neighbours are at most min_numel
    heads=st.none() | st.integers(1, 64),
    groups=st.none() | st.integers(1, 64),
    statistics=st.sampled_from(["running", "sample"]),
    decay=st.floats(0, 1, exclude_max=True),
    symmetric=st.booleans(),
    rounding=st.sampled_from(["stochastic", "nearest"]),
    derive=st.booleans(),
)  # fmt: skip


def test_the_last_pattern_that_matches_wins_over_operators_and_those_over_the_rest():
    policy = ActivationPolicy(
        bits=8,
        operators={"softmax": 4, "dropout": "off"},
        modules={"blocks.*": 2, "blocks.0.*": "off", "blocks.*.attn:softmax": 8, "norm:gelu": 4},
    )
    found = {
        (operator, module): policy.bits_for(operator, module)
        for operator in ("matmul", "softmax", "dropout")
        for module in ("head", "norm", "blocks.0.attn", "blocks.1.attn")
    }
    assert found == {
        ("matmul", "head"): 8,
        ("matmul", "norm"): 8,
        ("matmul", "blocks.0.attn"): "off",
        ("matmul", "blocks.1.attn"): 2,
        ("softmax", "head"): 4,
        ("softmax", "norm"): 4,
        ("softmax", "blocks.0.attn"): 8,
        ("softmax", "blocks.1.attn"): 8,
        ("dropout", "head"): "off",
        ("dropout", "norm"): "off",
        ("dropout", "blocks.0.attn"): "off",
        ("dropout", "blocks.1.attn"): 2,
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "off"),
        ({"bits": 4}, "off"),
        ({"modules": {"*": 4}}, "off"),  # it does not name it
        ({"operators": {"custom": 4}}, 4),
        ({"operators": {"custom": 4}, "modules": {"a*": 8}}, 8),
        ({"operators": {"custom": 4}, "modules": {"a*": "off"}}, "off"),
        ({"modules": {"a*:custom": 8}}, 8),
        ({"modules": {"a*:custom": 8, "*": 2}}, 8),
    ],
    ids=str,
)
def test_custom_functions_are_off_unless_named(options, expected):
    assert ActivationPolicy(**options).bits_for("custom", "attn") == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8),
        ({"bits": 4}, 8),
        ({"bits": 2}, 8),
        ({"bits": "off"}, "off"),
        ({"bits": 4, "operators": {"layer_norm": 4}}, 4),
        ({"bits": 4, "operators": {"layer_norm": "off"}}, "off"),
        ({"bits": 4, "modules": {"norm*": 2}}, 2),
        ({"bits": 4, "modules": {"attn": 2}}, 8),
    ],
    ids=str,
)
def test_layer_norms_keep_eight_bits_unless_named(options, expected):
    assert ActivationPolicy(**options).bits_for("layer_norm", "norm1") == expected


def test_the_last_pattern_of_whole_modules_says_which_are_computed_again():
    policy = ActivationPolicy(
        bits=4,
        modules={
            "a": "checkpoint",
            "a.b": 8,
            "a.*": "checkpoint",
            "a.c": "off",
            "d": 2,
            "d:gelu": 8,
            "d*": "checkpoint",
        },
    )
    assert [name for name in ("", "a", "a.b", "a.b.x", "a.c", "d", "e") if policy.checkpoints(name)] == [
        "a", "a.b", "a.b.x", "d",
    ]  # fmt: skip
    assert not policy.is_off


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"modules": {"a": "checkpoint"}}, 8),
        ({"bits": 4, "modules": {"a": "checkpoint"}}, 4),
        ({"operators": {"checkpoint": "off"}, "modules": {"a": "checkpoint"}}, "off"),
        ({"modules": {"*": 2, "a": "checkpoint"}}, 2),
        ({"modules": {"a:checkpoint": 4, "a": "checkpoint"}}, 4),
        ({"modules": {"a:gelu": 4, "a": "checkpoint"}}, 8),
        ({"modules": {"a": "checkpoint:bits=4"}}, 4),
        ({"bits": "off", "modules": {"a": "checkpoint:bits=8"}}, 8),
        ({"operators": {"checkpoint": "off"}, "modules": {"a": "checkpoint:bits=2"}}, 2),
        ({"modules": {"a": "checkpoint:bits=4", "a:checkpoint": 2}}, 2),
        ({"modules": {"a:checkpoint": 2, "a": "checkpoint:bits=4"}}, 4),
    ],
    ids=str,
)
def test_inputs_of_what_is_computed_again_have_the_bits_of_their_operator(options, expected):
    policy = ActivationPolicy(**options)
    assert policy.checkpoints("a")
    assert policy.bits_for("checkpoint", "a") == expected


@given(policy=policies)
def test_toml_says_all_of_a_policy(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(policy.to_toml(), encoding="utf-8")
    read = ActivationPolicy.load(path)
    assert read == policy
    assert list(read.modules) == list(policy.modules)  # their order decides
    assert ActivationPolicy.from_dict(policy.to_dict()) == policy


def test_neighbours_are_a_number_in_toml_and_learn_nothing(tmp_path):
    policy = ActivationPolicy(granularity=64)
    (tmp_path / "policy.toml").write_text(policy.to_toml())
    assert policy.to_toml() == "granularity = 64\n"
    assert ActivationPolicy.load(tmp_path / "policy.toml") == policy
    assert (policy.neighbours, policy.learns) == (64, False)
    assert (ActivationPolicy().neighbours, ActivationPolicy().learns) == (None, True)
    assert not ActivationPolicy(statistics="sample").learns


def test_what_is_default_is_not_written():
    assert ActivationPolicy().to_dict() == {}
    assert ActivationPolicy(bits=4, operators={"softmax": 8}).to_toml() == 'bits = 4\n\n[operators]\n"softmax" = 8\n'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, r"bits=3 must be 8, 4, 2 or \"off\""),
        ({"bits": 8.0}, r"bits=8.0 must be"),
        ({"bits": True}, r"bits=True must be"),
        ({"bits": "Off"}, r"bits='Off' must be"),
        ({"operators": {"softmax": 16}}, r"softmax=16 must be"),
        (
            {"modules": {"head": 1}},
            r"head=1 must be 8, 4, 2 or \"off\", or for modules \"checkpoint\" or",
        ),
        ({"modules": {"head": "checkpoint:bits=3"}}, r"head='checkpoint:bits=3' must be 8, 4, 2 or"),
        ({"modules": {"head:gelu": "checkpoint:bits=8"}}, r"head:gelu='checkpoint:bits=8': only whole modules"),
        ({"modules": {"head:softmax": 1}}, r"head:softmax=1 must be 8, 4, 2 or \"off\"$"),
        ({"bits": "checkpoint"}, r"bits='checkpoint': only whole modules can be recomputed"),
        ({"operators": {"gelu": "checkpoint"}}, r"gelu='checkpoint': only whole modules"),
        ({"modules": {"head:gelu": "checkpoint"}}, r"head:gelu='checkpoint': only whole modules .* modules={\"blocks"),
        ({"operators": {"softmx": 8}}, r"unknown operator 'softmx'; did you mean 'softmax'\? Valid names: matmul, "),
        ({"operators": {"zzz": 8}}, r"unknown operator 'zzz'\. Valid names: matmul, "),
        ({"modules": {"head:softmx": 8}}, r"unknown operator 'softmx'; did you mean 'softmax'"),
        ({"granularity": "channel"}, r"granularity='channel' must be 'group', 'layer', or a number of neighbours"),
        ({"granularity": 12}, r"granularity=12 must be 'group', 'layer', or a number .* a multiple of 8"),
        ({"granularity": 0}, r"granularity=0 must be"),
        ({"granularity": True}, r"granularity=True must be"),
        (
            {"granularity": 256, "min_numel": 255},
            r"granularity=256 must not be above min_numel=255: .* Raise min_numel",
        ),
        ({"statistics": "batch"}, r"statistics='batch' must be one of running, sample"),
        ({"rounding": "floor"}, r"rounding='floor' must be one of stochastic, nearest"),
        ({"min_numel": 0}, r"min_numel=0 must be a whole number, at least 1"),
        ({"min_numel": None}, r"min_numel=None must be a whole number"),
        ({"min_numel": 0.5}, r"min_numel=0.5 must be a whole number"),
        ({"heads": 0}, r"heads=0 must be a whole number"),
        ({"groups": 2.0}, r"groups=2.0 must be a whole number"),
        ({"decay": 1.0}, r"decay=1.0 must be at least 0 and below 1"),
        ({"decay": float("nan")}, r"decay=nan must be"),
        ({"derive": 1}, r"derive=1 must be True or False"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ActivationPolicy(**options)


def test_a_key_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="unknown key 'bit'; did you mean 'bits'"):
        ActivationPolicy.from_dict({"bit": 8})


@pytest.mark.parametrize("text", ["bits = ", "bits = 3", "bit = 8", '[modules]\n"a" = 3'])
def test_an_error_in_a_file_says_in_which(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.toml: "):
        ActivationPolicy.load(path)


def test_a_pattern_that_matches_no_module_is_an_error():
    names = ["", "blocks.0.attn", "blocks.1.attn", "head"]
    ActivationPolicy(modules={"blocks.*": 4, "head": 8, "": 2, "*.attn:softmax": "off"}).check(names)
    with pytest.raises(ValueError, match=r"modules: 'heads' matches no module of the model; did you mean 'head'\?"):
        ActivationPolicy(modules={"blocks.*": 4, "heads": 8}).check(names)
    with pytest.raises(ValueError, match=r"'layers\.\*' matches no module of the model$"):
        ActivationPolicy(modules={"layers.*:softmax": 8}).check(names)


def test_numpys_numbers_are_those_of_python():
    own = {"bits": 4, "min_numel": 512, "granularity": 64, "heads": 2, "groups": 4}
    numpys = {name: np.int64(value) for name, value in own.items()}
    numpys |= {"operators": {"softmax": np.int8(8)}, "modules": {"a": np.int64(2)}, "decay": np.float32(0.5)}
    own |= {"operators": {"softmax": 8}, "modules": {"a": 2}, "decay": 0.5}
    made, expected = ActivationPolicy(**numpys), ActivationPolicy(**own)
    assert (made, made.to_toml()) == (expected, expected.to_toml())
    for wrong in (np.int64(3), np.float64(8.0), np.bool_(1)):
        with pytest.raises(ValueError, match=r"must be 8, 4, 2 or"):
            ActivationPolicy(bits=wrong)


def test_off_is_known_as_such():
    assert ActivationPolicy(bits="off").is_off
    assert ActivationPolicy(bits="off", operators={"softmax": "off"}, modules={"a": "off"}).is_off
    assert not ActivationPolicy(bits="off", modules={"a": 8}).is_off


class WithLoss(nn.Module):
    """A language model that computes its own loss, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 2048))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), labels)


def test_the_empty_name_keeps_what_the_models_own_forward_saves_and_nothing_else():
    model, x, labels = WithLoss(), torch.randn(128, 64), torch.randint(2048, (128,))
    with nb.compress_activations(model, bits=8) as packed:
        model(x, labels).backward()
    policy = nb.ActivationPolicy(bits=8, modules={"": "off"})
    with nb.compress_activations(model, policy=policy) as exact:
        model(x, labels).backward()
    loss = exact.by_module.pop("")
    assert loss.kept_bytes == loss.raw_bytes > 4 * 128 * 2048 * 0.99
    assert packed.by_module.pop("").kept_bytes < 0.3 * loss.raw_bytes
    assert exact.by_module == packed.by_module
