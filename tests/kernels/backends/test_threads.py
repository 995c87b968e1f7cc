"""Large tensors: the same bytes on any number of threads, in several threads at once and in a forked child."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kernels.backends.common import on_all
from tests.kernels.tables import cpu, reference

if TYPE_CHECKING:
    pass

from tests.kernels.backends.common import (
    FAST_BACKENDS,
    MILLION,
    activations,
    assert_close_payload,
    assert_same,
    dequantize,
    everything,
    make,
    quantize,
    threads,
)
from tests.thorough import thorough


def test_a_million_elements_on_any_number_of_threads() -> None:
    with threads(1):
        expected = everything(1)
    for count in (2, 3, 7):
        with threads(count):
            assert_same(everything(1), expected)


@pytest.mark.parametrize(("scale", "bits", "stochastic"), [
    ("minmax", 4, True), ("minmax", 8, False), ("minmax", 3, True), ("absmax", 4, True), ("l2", 4, True),
    ("mean", 1, False),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["normal", "around-tiny", "any-bits"])
def test_quantizing_a_million(kind: str, scale: str, bits: int, stochastic: bool) -> None:
    x, pair = make(kind, MILLION), (cpu, reference)
    got, expected = (quantize(b, x, bits, 128, scale, stochastic=stochastic, seed=2**33 + 1) for b in pair)
    assert_close_payload(got, expected, MILLION, bits, 128, scale)
    payload = quantize(cpu, x, bits, 128, scale, stochastic=stochastic)
    into = make("normal", MILLION, 1)
    options: dict[str, Any] = {"weight": 0.25, "accumulate": True}
    got, expected = (dequantize(b, payload, into, bits, 128, scale, **options) for b in pair)
    assert_same(got, expected)


@pytest.mark.parametrize("kind", ["normal", "nan", *thorough("around-tiny")])
def test_activations_of_a_million(kind: str) -> None:
    x = make(kind, MILLION)
    assert_same(activations(cpu, x, 2**33 + 1), activations(reference, x, 2**33 + 1))


def test_sparse_vectors_of_a_million() -> None:
    x = make("normal", MILLION)
    fast = FAST_BACKENDS
    on_all("compensate_select_topk", x, make("normal", MILLION, 1), 10_000, sampled=True, seed=2, backends=fast)
    on_all("select_threshold", x, 1e-3, backends=fast)
    on_all("compensate", x, make("normal", MILLION, 1), backends=fast)
    indices = on_all("randomk_indices", MILLION, 200_000, 7, torch.device("cpu"), backends=fast)
    on_all(
        "sparse_accumulate",
        x,
        torch.sort(torch.cat([indices, indices])).values,
        x[:400_000].clone(),
        0.3,
        backends=fast,
    )


def test_equal_indices_across_a_cut_between_threads() -> None:
    """Runs of one index longer than a thread's share: no thread may add to an element that another one adds to."""
    indices = torch.arange(3, dtype=torch.int32).repeat_interleave(100_000)
    totals = [torch.zeros(3) for _ in range(2)]
    with threads(4):
        for backend, total in zip((cpu, reference), totals, strict=True):
            backend.sparse_accumulate(total, indices, make("normal", 300_000))
    assert_same(*totals)


@pytest.mark.parametrize("count", [2, *thorough(1)])
def test_several_python_threads_at_once(count: int) -> None:
    n = 300_001
    with threads(count):
        expected = [everything(seed, n) for seed in range(4)]

        def repeat(seed: int) -> list[Any]:
            torch.set_num_threads(count)  # as every thread of a program may have its own
            return [everything(seed, n) for _ in range(3)]

        with ThreadPoolExecutor(4) as pool:
            for seed, results in enumerate(pool.map(repeat, range(4))):
                for result in results:
                    assert_same(result, expected[seed])


def test_a_forked_child_computes_the_same() -> None:
    script = """
        import hashlib, os, sys
        import numpy as np
        import torch
        from narrowband import kernels

        torch.set_num_threads(2)
        x = torch.from_numpy(np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32))
        payload = torch.empty(8 * 7813 + kernels.packed_nbytes(x.numel(), 4, 128), dtype=torch.uint8)

        def digest():
            kernels.quantize_groups(x, payload, bits=4, group=128, scale="minmax", stochastic=True, seed=1)
            indices = kernels.select_topk(x, 1000, seed=2)
            return hashlib.sha256(payload.numpy().tobytes() + indices.numpy().tobytes()).hexdigest().encode()

        expected = digest()  # the parent's threads exist now
        for _ in range(2):
            read, write = os.pipe()
            child = os.fork()
            if not child:
                os.write(write, digest())
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert status == 0, status
            assert os.read(read, 64) == expected
            assert digest() == expected
        print("same")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"
