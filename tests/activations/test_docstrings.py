"""What the docstrings show is what happens."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.activations import policy, saved

NAMES = {"nb": nb, "nn": nn, "torch": torch, "ActivationPolicy": nb.ActivationPolicy}


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for module in (policy, saved) for test in finder.find(module, extraglobs=NAMES) if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name.rpartition(".")[2])
def test_example(example):
    report = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert not report, "".join(report)


def test_there_are_some():
    assert len(examples()) == 2
