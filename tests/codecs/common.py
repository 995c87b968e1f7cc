"""What the tests of codecs and feedback share: a spec for every value of every key, tensors of every form, backends."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

import narrowband as nb
from narrowband import kernels
from narrowband.kernels import backends
from tests.thorough import thorough

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

QUANTIZED = [
    *(f"uniform:bits={bits}" for bits in range(1, 9)),
    *(f"uniform:bits={bits},symmetric=true" for bits in (2, 3, 7, 8)),
    "uniform:bits=1,group=1,rounding=stochastic",
    "uniform:bits=3,group=7,rounding=stochastic",
    "uniform:bits=4,group=1000,rounding=stochastic",
    "uniform:bits=5,group=33,symmetric=true,rounding=stochastic",
    "uniform:bits=8,group=64,rounding=stochastic",
    "uniform:bits=3,scope=tensor",
    *(f"qsgd:bits={bits}" for bits in range(2, 9)),
    "qsgd:bits=2,bucket=1,norm=l2",
    "qsgd:bits=4,bucket=100,norm=l2",
    "qsgd:bits=7,bucket=513,norm=l2",
    "sign",
    "sign:bucket=1",
    "sign:bucket=50",
]
ROTATED = [*(f"eden:bits={bits}" for bits in (1, 2, 3, 4, 7, 8)), "eden:bits=1,group=32", "eden:bits=5,group=4096"]
SPARSE = [
    "topk:density=0.001",
    "topk:density=0.1",
    "topk:density=1.0",
    "topk:density=0.3,indices=int32",
    "topk:density=0.05,select=sampled",
    "topk:density=0.1,scope=sample",
    "topk:density=0.2,scope=sample,select=sampled,values=fp16,indices=int32",
    "topk:density=0.1,values=fp16",
    "topk:density=0.1,indices=runs",
    "topk:density=0.3,select=sampled,values=fp16,indices=runs",
    "topk:density=0.7,values=int8",
    "topk:density=0.2,values=int8,indices=int32",
    "topk:density=0.3,values=int4,scope=sample",
    "topk:density=0.4,values=int2,indices=int32",
    "topk:density=0.2,values=int2,tile=8x4",
    "topk:density=0.05,tile=64x64",
    "threshold:value=0.5",
    "threshold:value=1e-30",
    "threshold:value=1e30",
    "randomk:density=0.01",
    "randomk:density=0.5",
    "randomk:density=1.0",
]
LOW_RANK = ["lowrank:rank=1", "lowrank:rank=2,iterations=3", "lowrank:rank=1000"]
#: Of codecs from other packages, which the environment may name.
OTHERS = os.environ.get("NARROWBAND_TEST_SPECS", "").split()
SPECS = ["none", "fp16", "bf16", *QUANTIZED, *ROTATED, *SPARSE, *LOW_RANK, *OTHERS]
#: Some of them that together have each value of each key that is no number; where a test is not about numbers.
SOME = [
    "none",
    "fp16",
    "bf16",
    "uniform:bits=1",
    "uniform:bits=8",
    "uniform:bits=3,symmetric=true",
    "uniform:bits=3,group=7,rounding=stochastic",
    "uniform:bits=3,scope=tensor",
    "qsgd:bits=4",
    "qsgd:bits=4,bucket=100,norm=l2",
    "eden:bits=3",
    "eden:bits=1,group=32",
    "sign",
    "topk:density=0.1",
    "topk:density=1.0",
    "topk:density=0.2,scope=sample,select=sampled,values=fp16,indices=int32",
    "topk:density=0.3,select=sampled,values=fp16,indices=runs",
    "topk:density=0.7,values=int8",
    "topk:density=0.3,values=int4,scope=sample",
    "topk:density=0.2,values=int2,tile=8x4",
    "threshold:value=0.5",
    "randomk:density=0.5",
    "lowrank:rank=2,iterations=3",
    *OTHERS,
]
#: All, of which a usual run has those.
THESE_OR_ALL = [*SOME, *thorough(*(spec for spec in SPECS if spec not in SOME))]
#: All on both backends, of which a usual run has those on the reference.
CODECS_AND_BACKENDS = [
    *((spec, "cpu") for spec in SPECS),
    *((spec, "reference") for spec in SOME),
    *thorough(*((spec, "reference") for spec in SPECS if spec not in SOME)),
]
#: Both sums and their order are a backend's own business, so the last bit of a step may differ.
SUMS = [spec for spec in SPECS if "l2" in spec or spec.startswith("sign")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

#: form → the tensor made of n random values of that form
_FORMS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "scalar": lambda values: values(1).reshape(()),
    "empty": lambda values: values(0),
    "no rows": lambda values: values(0).reshape(0, 5),
    "empty rows": lambda values: values(0).reshape(5, 0),
    "one": lambda values: values(1),
    "seven": lambda values: values(7),
    "odd": lambda values: values(1031),
    "matrix": lambda values: values(3 * 130).reshape(3, 130),
    "tensor": lambda values: values(4 * 3 * 5 * 2).reshape(4, 3, 5, 2),
    "offset": lambda values: values(130)[1:],
    "strided": lambda values: values(514)[::2],
    "transposed": lambda values: values(7 * 40).reshape(40, 7).t(),
    "columns": lambda values: values(9 * 20).reshape(9, 20)[:, 3:11],
    "expanded": lambda values: values(6).reshape(6, 1).expand(6, 30),
    "one expanded": lambda values: values(1).expand(200),
    "channels last": lambda values: values(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
}
#: Those that several elements of share memory cannot be written to.
WRITABLE = [form for form in _FORMS if "expanded" not in form]

_KINDS = ["normal", "zeros", "ties", "small", "wide", "positive", "constant"]


def group_of(codec):
    """Elements that share a header, of a quantizer."""
    if getattr(codec, "scope", "group") == "tensor":
        return 1 << 40
    return codec.bucket if hasattr(codec, "bucket") else codec.group


def values(kind: str, n: int, seed: int) -> Tensor:
    """n values, float32, well inside the range of float16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    if kind == "zeros":
        x = torch.copysign(torch.zeros(n), x)
    elif kind == "ties":
        x = x.round()
    elif kind == "small":
        x *= 1e-4
    elif kind == "wide":
        x *= torch.exp(torch.randn(n, generator=generator) * 3).clamp(max=1000)
    elif kind == "positive":
        x = x.abs() + 5
    elif kind == "constant":
        x.fill_(-0.7)
    return x


def tensor(form: str, kind: str = "normal", seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of one form and one kind of values."""
    return _FORMS[form](lambda n: values(kind, n, seed).to(dtype))


def tensors(forms: list[str] | None = None, dtypes: list[torch.dtype] | None = None) -> st.SearchStrategy[Tensor]:
    """Tensors of every form, kind of values and dtype."""
    return st.builds(
        tensor,
        st.sampled_from(forms or list(_FORMS)),
        st.sampled_from(_KINDS),
        st.integers(0, 2**32),
        st.sampled_from(dtypes or DTYPES),
    )


seeds = st.integers(0, 2**64 - 1)


def bits_of(x: Tensor) -> list[int]:
    """The bits of a tensor, to compare NaN and −0 as what they are."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.detach().contiguous().view(-1).view(integers).tolist()


def decoded(codec: nb.Codec, payload: Tensor, like: Tensor, seed: int = 0) -> Tensor:
    """The payload in float32, whatever the dtype of the tensor it was made of (which ``none`` has to know)."""
    dtype = like.dtype if codec.name == "none" else torch.float32
    return codec.decode(payload, torch.full(like.shape, torch.nan, dtype=dtype), seed=seed).float()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """The kernels of ``cpu`` tensors run on this backend, as ``NARROWBAND_KERNELS`` would have it in a new process."""
    before = os.environ.pop("NARROWBAND_KERNELS", None)
    backends._chosen.clear()
    if name == "reference":
        os.environ["NARROWBAND_KERNELS"] = "reference"
    try:
        assert kernels.backend_for("cpu").name == name
        yield
    finally:
        os.environ.pop("NARROWBAND_KERNELS", None)
        if before is not None:
            os.environ["NARROWBAND_KERNELS"] = before
        backends._chosen.clear()
