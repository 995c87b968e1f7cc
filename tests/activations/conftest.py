"""One thread for small tensors: two of them spend their time waiting for each other."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_collector():
    """What lives is what is referred to: nothing is collected in between."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def nothing_compiled_yet():
    torch._dynamo.reset()
    torch.manual_seed(0)
