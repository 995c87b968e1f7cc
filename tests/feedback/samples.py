"""Batches of samples, and a pair of ends that AQ-SGD connects."""

from __future__ import annotations

import pytest
import torch

import narrowband as nb
from narrowband.feedback import AQSGD
from tests.codecs.common import DTYPES, bits_of

FIXED_SIZE = [
    "none",
    "fp16",
    "bf16",
    "uniform:bits=4",
    "uniform:bits=8,symmetric=true,rounding=stochastic",
    "qsgd:bits=4",
    "qsgd:bits=2,norm=l2",
    "sign:bucket=64",
    "topk:density=0.1",
    "topk:density=0.1,select=sampled,values=fp16",
    "topk:density=0.1,values=int8,indices=int32",
    "topk:density=0.1,values=int2,tile=8x8",
    "topk:density=0.1,scope=sample,indices=runs",
    "randomk:density=0.1",
    "lowrank:rank=1",
]


every_codec = pytest.mark.parametrize("spec", FIXED_SIZE)


every_keep = pytest.mark.parametrize("keep", ["fp32", "fp16", "int8"])


every_dtype = pytest.mark.parametrize("dtype", DTYPES)


SHAPE = (6, 50)


KEY = "boundary 1"


def one_sample(sample, epoch):
    """An activation that changes less and less."""
    first, then = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(s)) for s in (sample, 999 + sample))
    return first + then * 0.5**epoch


def batches(epochs=3, size=3):
    """(step, ids, x): random batches, each epoch of more samples than the one before."""
    step = 0
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(4 + 3 * epoch, generator=generator)
        for ids in order.split(size):
            yield step, ids * 7 - 5, torch.stack([one_sample(int(sample), epoch) for sample in ids])
            step += 1


class Pair:
    """Two ends, each with its own buffers, and what they made of each batch."""

    def __init__(self, spec, tmp_path=None, **settings):
        self.codec = nb.codec(spec)
        folders = [{} if tmp_path is None else {"folder": str(tmp_path / end)} for end in ("sender", "receiver")]
        self.sender, self.receiver = (AQSGD(**settings, **folder) for folder in folders)

    def send(self, x, ids, seed=0, key=KEY):
        """(the payload, what arrived)."""
        before = x.clone()
        told = torch.full_like(x, 7)
        announced = self.receiver.payload_nbytes(key, self.codec, x.shape, x.dtype, ids)
        assert announced == self.sender.payload_nbytes(key, self.codec, x.shape, x.dtype, ids)
        payload = self.sender.pack(key, x, self.codec, samples=ids, seed=seed, arrived=told)
        assert payload.dtype == torch.uint8
        assert payload.shape == (announced,)
        assert bits_of(x) == bits_of(before)
        out = torch.full_like(x, 3)
        assert self.receiver.unpack(key, payload, out, self.codec, samples=ids, seed=seed) is out
        assert bits_of(told) == bits_of(out)
        return payload, out

    def buffers(self, key=KEY):
        """Sample → its buffer's bits, which must be the same on both ends."""
        ends = [
            {sample: bits_of(end._stores[key].row(sample)) for sample in end.reference_ids(key).tolist()}
            for end in (self.sender, self.receiver)
        ]
        assert ends[0] == ends[1]
        return ends[0]
