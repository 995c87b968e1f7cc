"""Spec strings: ``nb.codec(str(c)) == c``, and every mistake answered with what would have been right."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import narrowband as nb
from narrowband import codecs, feedback
from tests.codecs.common import SPECS

NAMES = ["none", "fp16", "bf16", "uniform", "qsgd", "eden", "sign", "topk", "threshold", "randomk", "lowrank"]
_size = st.integers(1, 1 << 20)
_density = st.floats(0, 1, exclude_min=True)
any_codec = st.one_of(
    st.sampled_from([codecs.Identity(), codecs.FP16(), codecs.BF16()]),
    st.builds(
        codecs.Uniform,
        bits=st.integers(2, 8),
        group=_size,
        rounding=st.sampled_from(["nearest", "stochastic"]),
        symmetric=st.booleans(),
    ),
    st.builds(codecs.Uniform, bits=st.just(1), group=_size),
    st.builds(codecs.QSGD, bits=st.integers(2, 8), bucket=_size, norm=st.sampled_from(["max", "l2"])),
    st.builds(codecs.Sign, bucket=_size),
    st.builds(
        codecs.TopK,
        density=_density,
        select=st.sampled_from(["exact", "sampled"]),
        scope=st.sampled_from(["tensor", "sample"]),
        values=st.sampled_from(["fp32", "fp16", "int8"]),
        indices=st.sampled_from(["elias-fano", "int32"]),
    ),
    st.builds(codecs.Threshold, value=st.floats(2.0**-126, 3.4e38)),
    st.builds(codecs.RandomK, density=_density),
)


@given(codec=any_codec)
def test_a_codec_is_its_string(codec):
    text = str(codec)
    again = nb.codec(text)
    assert again == codec
    assert type(again) is type(codec)
    assert hash(again) == hash(codec)
    assert str(again) == text
    assert nb.compression(text) == nb.Compression(codec)
    assert str(nb.compression(text + "+ef")) == text + "+ef"
    assert not set(text) & set(" +'\"")


@given(codec=any_codec, seed=st.integers(0, 1000))
def test_keys_come_in_any_order_and_defaults_may_be_said(codec, seed):
    pairs = [f" {f.name} = {_word(getattr(codec, f.name))} " for f in dataclasses.fields(codec)]
    random.Random(seed).shuffle(pairs)
    assert nb.codec(f" {codec.name}{':' if pairs else ''}{','.join(pairs)} ") == codec


def _word(value):
    if isinstance(value, bool):
        return "True" if value else "no"
    return f"{value:.17g}".replace("+", "") if isinstance(value, float) else value


@given(codec=any_codec)
def test_a_codec_can_be_pickled_and_is_frozen(codec):
    again = pickle.loads(pickle.dumps(codec))
    assert again == codec
    assert hash(again) == hash(codec)
    for f in dataclasses.fields(codec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(codec, f.name, getattr(codec, f.name))


def test_codecs_differ_where_their_configuration_does():
    all_of_them = [nb.codec(spec) for spec in SPECS]
    assert len(set(all_of_them)) == len(SPECS)
    assert len({str(codec) for codec in all_of_them}) == len(SPECS)
    assert nb.codec("fp16") != nb.codec("bf16")


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("none", "none"),
        ("uniform", "uniform:bits=8"),
        ("uniform:symmetric=yes,group=128,bits=4", "uniform:bits=4,symmetric=true"),
        ("uniform:bits=4,rounding=stochastic", "uniform:bits=4,rounding=stochastic"),
        ("uniform:scope=tensor,group=128,bits=4", "uniform:bits=4,scope=tensor"),
        ("qsgd", "qsgd:bits=4"),
        ("qsgd:norm=l2,bits=2,bucket=512", "qsgd:bits=2,bucket=512,norm=l2"),
        ("sign:bucket=512", "sign"),
        ("topk", "topk:density=0.01"),
        ("topk:density=1e-3", "topk:density=0.001"),
        ("topk:density=1", "topk:density=1.0"),
        ("topk:indices=int32,select=sampled,density=.5", "topk:density=0.5,select=sampled,indices=int32"),
        ("threshold:value=1", "threshold:value=1.0"),
        ("threshold:value=1e30", "threshold:value=1e30"),
        ("randomk:density=0.25", "randomk:density=0.25"),
        ("lowrank", "lowrank:rank=4"),
        ("lowrank:iterations=2,rank=1", "lowrank:rank=1,iterations=2"),
    ],
)
def test_the_canonical_form(spec, canonical):
    assert str(nb.codec(spec)) == canonical


@pytest.mark.parametrize(
    ("codec", "canonical"),
    [
        (lambda: codecs.TopK(density=1), "topk:density=1.0"),
        (lambda: codecs.TopK(density=np.float64(0.25)), "topk:density=0.25"),
        (lambda: codecs.RandomK(density=np.float32(0.5)), "randomk:density=0.5"),
        (lambda: codecs.Uniform(bits=np.int64(4), group=np.uint8(64)), "uniform:bits=4,group=64"),
        (lambda: codecs.Threshold(2), "threshold:value=2.0"),
    ],
)
def test_numbers_of_other_types_become_what_the_string_says(codec, canonical):
    assert str(codec()) == canonical
    assert nb.codec(canonical) == codec()
    for f in dataclasses.fields(codec()):
        assert type(getattr(codec(), f.name)) in (int, float, str, bool)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topq:density=0.1", ["unknown codec 'topq'", "did you mean 'topk'", "qsgd", "randomk"]),
        ("", ["unknown codec ''", "none, fp16"]),
        ("zzz", ["unknown codec 'zzz'", "there are: none"]),
        ("topk:densty=0.1", ["topk has no key 'densty'", "did you mean 'density'", "select", "indices"]),
        ("none:bits=3", ["none has no key 'bits'", "no keys"]),
        ("fp16:", ["ends with ':'", "no keys"]),
        ("topk:", ["ends with ':'", "density"]),
        ("topk:density", ["'density'", "needs a value"]),
        ("topk:density=", ["'density'", "needs a value"]),
        ("topk:=0.1", ["no key ''"]),
        ("none,fp16", ["unknown codec 'none,fp16' (give several specs one by one, with no comma between them)"]),
        ("topk:density=0.1,none", ["no key 'none'", "; give several specs one by one, with no comma between them"]),
        ("topk:density:0.1", ["no key 'density:0.1'", "; write density=0.1"]),
        ("topk:density=0,01", ["no key '01'", "; write numbers with a point"]),
        ("topk:density=0.1,ef21", ["; a feedback stands behind a '+', as in 'topk:density=…+ef21'"]),
        ("1bit", ["(did you mean 'eden:bits=1'?)"]),
        ("float16", ["(did you mean 'fp16'?)"]),
        ("qsgd:4", ["no key '4'", "a value stands behind its key: qsgd:bits=…"]),
        ("fp16:4", ["no key '4'", "it has: no keys"]),
        ("topk:density=0.1,density=0.2", ["'density' is given twice"]),
        ("topk:density=1%", ["density=1% in 'topk:density=1%' is not a number; write density=0.01"]),
        ("uniform:bits=8%", ["bits=8% in 'uniform:bits=8%' is not a whole number"]),
        ("qsgd bits=4", ["unknown codec 'qsgd bits=4' (did you mean 'qsgd:bits=4'?)"]),
        ("topk(density=0.1)", ["(did you mean 'topk:density=0.1'?)"]),
        ("qsgd=4", ["(did you mean 'qsgd:bits=4'?)"]),
        ("none 4", ["(did you mean 'none'?)"]),
        ("int8", ["unknown codec 'int8' (did you mean 'uniform:bits=8'?)"]),
        ("fp32", ["(did you mean 'none'?)"]),
        ("topk:density=lots", ["density=lots", "not a number"]),
        ("uniform:bits=4.0", ["bits=4.0", "not a whole number"]),
        ("uniform:symmetric=maybe", ["symmetric=maybe", "neither true nor false"]),
        ("topk:select=exakt", ["select=exakt", "did you mean 'exact'", "sampled"]),
        ("topk:values=fp8", ["values=fp8", "fp32, fp16, int8"]),
        ("topk:density=0", ["density=0.0", "(0, 1]"]),
        ("topk:density=1.01", ["density=1.01", "(0, 1]"]),
        ("topk:density=-0.5", ["(0, 1]"]),
        ("topk:density=nan", ["density=nan", "(0, 1]"]),
        ("TopK:density=0.1", ["unknown codec 'TopK'", "did you mean 'topk'?"]),
        ("QSGD:bits=4", ["unknown codec 'QSGD'", "did you mean 'qsgd'?"]),
        ("qsgd:Bits=4", ["qsgd has no key 'Bits'", "did you mean 'bits'?"]),
        ("randomk:density=inf", ["(0, 1]"]),
        ("lowrank:rank=0", ["rank=0", "at least 1"]),
        ("lowrank:iterations=0", ["iterations=0", "at least 1"]),
        ("threshold", ["threshold needs value", "threshold:value="]),
        ("threshold:value=0", ["value=0.0"]),
        ("threshold:value=-1", ["value=-1.0"]),
        ("threshold:value=inf", ["value=inf"]),
        ("threshold:value=1e39", ["value=1e+39", "float32"]),
        ("threshold:value=1e-46", ["value=1e-46", "float32"]),
        ("uniform:bits=0", ["bits=0", "[1, 8]"]),
        ("uniform:bits=9", ["bits=9", "[1, 8]"]),
        ("uniform:bits=1,symmetric=true", ["bits=1", "[2, 8]"]),
        ("uniform:group=0", ["group=0"]),
        ("uniform:group=1048577", ["group=1048577", "1048576"]),
        ("uniform:group=64,scope=tensor", ["group=64", "leave one of them out"]),
        ("uniform:scope=sample", ["scope=sample", "group, tensor"]),
        ("qsgd:bits=1", ["bits=1", "[2, 8]", "for one bit per element use eden:bits=1"]),
        ("eden:bits=9", ["eden: bits=9", "[1, 8]"]),
        ("eden:group=100", ["group=100", "power of two", "32", "4096"]),
        ("qsgd:bits=16", ["bits=16", "[2, 8]", "for 16 use fp16"]),
        ("qsgd:bits=9", ["bits=9", "[2, 8]"]),
        ("qsgd:bucket=-1", ["bucket=-1"]),
        ("qsgd:norm=l1", ["norm=l1", "max, l2"]),
        ("sign:bucket=0", ["bucket=0"]),
        ("topk+ef", ["'+'", "feedback"]),
    ],
)
def test_mistakes(spec, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - every word is looked for below
        nb.codec(spec)
    for word in words:
        assert word in str(caught.value)
    if "+" not in spec:
        with pytest.raises(ValueError) as again:  # noqa: PT011
            nb.compression(spec + "+ef")
        assert words[0] in str(again.value)


@pytest.mark.parametrize(
    ("kind", "values", "error"),
    [
        (codecs.Uniform, {"bits": 4.5}, TypeError),
        (codecs.Uniform, {"bits": "4"}, TypeError),
        (codecs.Uniform, {"bits": True}, TypeError),
        (codecs.Uniform, {"group": 64.0}, TypeError),
        (codecs.Uniform, {"symmetric": "false"}, TypeError),
        (codecs.Uniform, {"rounding": "up"}, ValueError),
        (codecs.QSGD, {"bits": None}, TypeError),
        (codecs.QSGD, {"norm": "l1"}, ValueError),
        (codecs.Sign, {"bucket": 2.0}, TypeError),
        (codecs.TopK, {"density": "0.1"}, TypeError),
        (codecs.TopK, {"values": "fp8"}, ValueError),
        (codecs.Threshold, {"value": None}, TypeError),
        (codecs.RandomK, {"density": 2}, ValueError),
    ],
)
def test_mistakes_without_a_string(kind, values, error):
    with pytest.raises(error, match=next(iter(values))):
        kind(**values)


@pytest.mark.parametrize("what", [None, 7, b"topk", ["topk"], codecs.TopK])
def test_what_is_no_string(what):
    with pytest.raises(TypeError, match="string such as"):
        nb.codec(what)
    with pytest.raises(TypeError, match="string such as"):
        nb.compression(what)


def test_a_class_in_the_place_of_a_spec_has_to_be_called():
    with pytest.raises(TypeError, match=r"not the class TopK: call it, TopK\(…\)"):
        nb.compression(codecs.TopK)


def test_a_codec_stands_for_itself():
    codec = nb.codec("topk:density=0.5")
    assert nb.codec(codec) is codec
    assert nb.compression(codec) == nb.Compression(codec, None)
    whole = nb.compression("topk+ef")
    assert nb.compression(whole) is whole


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("threshold:value=1e+3+ef", ["after '+'", "got '3'", "'threshold:value=1e3+ef'"]),
        ("topk+", ["unknown feedback ''", "ef"]),
        ("topk+eff", ["unknown feedback 'eff'", "did you mean 'ef'"]),
        ("topk+momentum", ["unknown feedback 'momentum'", "there are: ef"]),
        ("topk+ef:beta=1", ["ef has no key 'beta'", "it has: decay"]),
        ("topk+ef+ef", ["unknown feedback 'ef+ef'"]),
        ("+ef", ["unknown codec ''"]),
    ],
)
def test_mistakes_behind_the_plus(spec, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - every word is looked for below
        nb.compression(spec)
    for word in words:
        assert word in str(caught.value)


def test_a_plus_in_a_number_is_named_where_no_feedback_can_be():
    with pytest.raises(ValueError, match=r"write numbers without '\+': 'threshold:value=1e30'"):
        nb.codec("threshold:value=1e+30")


def test_a_compression_is_its_string():
    for spec in SPECS:
        for text in (spec, f"{spec}+ef"):
            whole = nb.compression(text)
            assert nb.compression(str(whole)) == whole
            assert hash(nb.compression(str(whole))) == hash(whole)
            assert whole.codec == nb.codec(spec)
            assert (whole.feedback is None) == ("+" not in text)
            assert pickle.loads(pickle.dumps(whole)) == whole
    assert nb.compression("topk+ef") != nb.compression("topk")
    assert nb.compression(" topk:density=0.5 + ef ") == nb.compression("topk:density=0.5+ef")


def test_available_names_everything_there_is_with_a_line_about_it():
    assert list(codecs.available()) == NAMES
    assert list(feedback.available()) == ["ef", "ef-mixed", "ef21", "aq-sgd"]
    for name, kind in {**codecs.available(), **feedback.available()}.items():
        assert kind.name == name
        assert dataclasses.is_dataclass(kind)
        first = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
        assert len(first) > 10
        assert not first.startswith(f"{kind.__name__}("), "that is what dataclasses make up"
        assert first.endswith("."), "the summary is one line"
        for f in dataclasses.fields(kind):
            if f.init:
                assert f"{f.name}:" in kind.__doc__, f"{name} does not explain {f.name}"
    assert all(issubclass(kind, nb.Codec) for kind in codecs.available().values())


def test_the_battery_covers_every_value_of_every_key():
    configurations = [nb.codec(spec) for spec in SPECS]
    assert {type(codec) for codec in configurations} == set(codecs.available().values())
    for kind, key, values in [
        (codecs.Uniform, "bits", set(range(1, 9))),
        (codecs.Uniform, "rounding", {"nearest", "stochastic"}),
        (codecs.Uniform, "symmetric", {True, False}),
        (codecs.QSGD, "bits", set(range(2, 9))),
        (codecs.QSGD, "norm", {"max", "l2"}),
        (codecs.TopK, "select", {"exact", "sampled"}),
        (codecs.TopK, "scope", {"tensor", "sample"}),
        (codecs.TopK, "values", {"fp32", "fp16", "int8", "int4", "int2"}),
        (codecs.TopK, "indices", {"elias-fano", "int32", "runs"}),
        (codecs.TopK, "tile", {"none", "8x4", "64x64"}),
    ]:
        assert {getattr(codec, key) for codec in configurations if isinstance(codec, kind)} == values
