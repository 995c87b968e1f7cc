"""Loops that were started before are started again from what is remembered, where Triton would take the same code."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowband.kernels.backends import Backend
from tests.kernels.tables import reference

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

if find_spec("triton"):
    import numpy as np

    from narrowband.kernels.cuda import launching


def views() -> st.SearchStrategy[torch.Tensor]:
    """Tensors of several dtypes, which begin where they like."""
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.int64])
    return st.builds(lambda dtype, first: torch.zeros(64, dtype=dtype)[first:], dtypes, st.integers(0, 17))


VALUES = st.one_of(
    views(), st.integers(-20, 40), st.integers(-(2**63), 2**64 - 1), st.sampled_from([2**31 - 1, 2**31, 2**63]),
    st.floats(), st.booleans(),
)  # fmt: skip


@given(first=VALUES, second=VALUES, plain=st.booleans())
def test_what_triton_tells_apart_is_told_apart(first: Any, second: Any, plain: bool) -> None:
    """Triton's own words for a value, on its way to the machine code."""
    native = pytest.importorskip("triton.runtime.jit").native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    loop = SimpleNamespace(params=[SimpleNamespace(do_not_specialize=plain)])
    words = [native(backend, value, False, not plain, not plain) for value in (first, second)]
    kinds = [launching.kind_of(loop, [value]) for value in (first, second)]
    launching._plain.pop(id(loop))
    if words[0] != words[1]:
        assert kinds[0] != kinds[1]
    if type(first) is type(second) and not isinstance(first, int):
        assert (words[0] == words[1]) == (kinds[0] == kinds[1])


def test_what_is_unknown_is_left_to_triton() -> None:
    loop = SimpleNamespace(params=[SimpleNamespace(do_not_specialize=False)])
    for value in (None, np.int64(1), "text"):
        assert launching.kind_of(loop, [value]) is None
    launching._plain.pop(id(loop))


class _Recorded:
    """A loop, and what it was started with: by Triton's way, by what is remembered of it, and in a profiler's sight."""

    def __init__(self, *names: str, plain: str = "") -> None:
        self.params = [SimpleNamespace(name=name, do_not_specialize=name in plain) for name in names]
        self.anew: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []
        self.seen: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> Any:
            self.anew.append((grid, arguments, constants))
            return self._Compiled(self)

        return start

    class _Compiled:
        function, packed_metadata = 1234, ("metadata",)

        def __init__(self, loop: _Recorded) -> None:
            self._loop = loop

        def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any) -> None:
            assert stream in (17, 18)
            assert (function, metadata) == (self.function, self.packed_metadata)
            assert rest[:3] == (None, None, None)
            self._loop.again.append(((x, y, z), rest[3:]))

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: self._loop.seen.append((grid, arguments))


class _There:
    """A tensor of a GPU, as far as starting a loop asks."""

    is_cuda = True

    def __init__(self, index: int) -> None:
        self._index = index

    def get_device(self) -> int:
        return self._index


@pytest.fixture
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as starting a loop asks."""
    monkeypatch.setattr(launching, "_started", {})
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    driver = SimpleNamespace(get_current_stream=lambda device: 17 + device)
    monkeypatch.setattr(launching.triton.runtime.driver, "_active", driver)


@pytest.mark.usefixtures("_a_gpu")
def test_a_loop_is_looked_at_once_for_each_kind_of_arguments() -> None:
    loop, x = _Recorded("x", "n", "B", "A"), torch.zeros(100)

    def start(x: torch.Tensor, n: int, index: int = 0, **constants: Any) -> bool:
        """Whether Triton looked at it."""
        before = len(loop.anew)
        launching.run(loop, 7, x, n, on=_There(index), **constants)
        return len(loop.anew) > before

    assert start(x, 48, A=1, B=2, num_warps=8)
    assert not start(torch.zeros(100), 96, A=1, B=2, num_warps=8)
    ((grid, (_, n, *constants)),) = loop.again
    assert grid == (7, 1, 1)
    assert n == 96
    assert constants == [2, 1]  # in the order of the loop's parameters, and what is none of them is left out
    for other in (
        lambda: start(x[1:], 48, A=1, B=2, num_warps=8),
        lambda: start(x.double(), 48, A=1, B=2, num_warps=8),
        lambda: start(x, 1, A=1, B=2, num_warps=8),
        lambda: start(x, 49, A=1, B=2, num_warps=8),
        lambda: start(x, 1 << 40, A=1, B=2, num_warps=8),
        lambda: start(x, 48, A=2, B=2, num_warps=8),
        lambda: start(x, 48, A=1, B=2, num_warps=4),
        lambda: start(x, 48, 1, A=1, B=2, num_warps=8),
    ):
        assert other()
        assert not other()


@pytest.mark.usefixtures("_a_gpu")
def test_a_launch_that_is_known_but_for_its_tensors_is_looked_at_once() -> None:
    loop = _Recorded("x", "y", "note", "n", "seed", "A", plain="note seed")
    launch = launching.Launch(loop, 7, (48,), A=1, num_warps=8)
    x, y, note = torch.zeros(100), torch.zeros(100), torch.zeros(100)[1:]
    for seed in (1, 2):
        launch(_There(0), (x, y, note), seed)  # type: ignore[arg-type]
    ((_, first, _),) = loop.anew
    assert first[0] is x
    assert first[3:] == (48, 1)
    # Addresses, where Triton would ask tensors for them; the note's may be any.
    assert loop.again == [((7, 1, 1), (x.data_ptr(), y.data_ptr(), note.data_ptr(), 48, 2, 1))]
    for other, there in ((x[1:], 0), (x, 1)):  # begins elsewhere; lies on another device
        count = len(loop.anew)
        for _ in range(2):
            launch(_There(there), (other, y, note), 3)  # type: ignore[arg-type]
        assert len(loop.anew) == count + 1
    launch(_There(0), (x, y, note), 4)  # type: ignore[arg-type]
    assert loop.again[-1] == ((7, 1, 1), (x.data_ptr(), y.data_ptr(), note.data_ptr(), 48, 4, 1))


@pytest.mark.usefixtures("_a_gpu")
def test_two_loops_of_one_launch_are_started_with_the_same_tensors_of_which_the_second_takes_more() -> None:
    first = _Recorded("x", "y", "n", "seed", plain="y seed")
    second = _Recorded("x", "y", "z", "m", "seed", plain="seed")
    launch = launching.Launch(first, 7, (48,)).then(launching.Launch(second, 5, (3,), num_warps=8), more=1)
    x, y, z = torch.zeros(100), torch.zeros(100), torch.zeros(100)
    for seed in (1, 2):
        launch(_There(0), (x, y, z), seed)  # type: ignore[arg-type]
    (one,), (other,) = first.anew, second.anew
    assert (one[0], one[1][2:], one[2]) == ((7,), (48, 1), {"enable_fp_fusion": False})
    assert (other[0], other[1][3:], other[2]["num_warps"]) == ((5,), (3, 1), 8)
    pointers = x.data_ptr(), y.data_ptr(), z.data_ptr()
    assert first.again == [((7, 1, 1), (*pointers[:2], 48, 2))]
    assert second.again == [((5, 1, 1), (*pointers, 3, 2))]
    launch(_There(0), (x, y, z[1:]), 3)  # type: ignore[arg-type]
    assert (len(first.anew), len(second.anew)) == (1, 2)
    assert first.again[-1][1][2:] == (48, 3)


@pytest.mark.usefixtures("_a_gpu")
def test_a_profiler_sees_launches_that_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, x = _Recorded("x", "n", "A"), torch.zeros(100)
    launch = launching.Launch(loop, 7, (48,), A=1)
    for _ in range(2):
        launch(_There(0), (x,))  # type: ignore[arg-type]
    runtime = launching.triton.knobs.runtime
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, SimpleNamespace(calls=[print]))
            launch(_There(0), (x,))  # type: ignore[arg-type]
    assert loop.seen == 2 * [((7, 1, 1), (x.data_ptr(), 48, 1))]
    assert len(loop.again) == 1


class _Launcher:
    """A launcher as Triton's, with or without memory that the loop needs besides its arguments."""

    def __init__(self, scratch: int = 0) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.asked, self._scratch = 0, scratch
        self.launch = lambda *given: self.launched.append(given)

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, about: Any, enter: Any, leave: Any,
        *arguments: Any,
    ) -> None:  # fmt: skip
        self.asked += 1
        scratch = torch.empty(x * y * z * self._scratch) if self._scratch else None
        self.launch(x, y, z, stream, function, False, metadata, about, enter, leave, scratch, b"kinds", arguments)


class _Spread(_Launcher):
    """One that gives the C function the arguments one by one."""

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, about: Any, enter: Any, leave: Any,
        *arguments: Any,
    ) -> None:  # fmt: skip
        self.asked += 1
        given = function, False, metadata, about, enter, leave, None, b"kinds"
        self.launch(x, y, z, stream, *given, *arguments)


class _Otherwise(_Launcher):
    """One that gives the C function more."""

    def __call__(self, *given: Any) -> None:
        self.asked += 1
        self.launch(*given, "more")


@pytest.mark.parametrize(
    ("launcher", "is_direct"),
    [(_Launcher(), True), (_Launcher(scratch=4), False), (_Spread(), True), (_Otherwise(), False)],
)
@pytest.mark.usefixtures("_a_gpu")
def test_of_a_launcher_that_always_does_the_same_only_the_c_function_is_called(
    launcher: _Launcher, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, x = _Recorded("x", "n", "A"), torch.zeros(100)
    monkeypatch.setattr(_Recorded._Compiled, "run", launcher)
    launch = launching.Launch(loop, 7, (48,), A=1)
    launch(_There(0), (x,))  # type: ignore[arg-type]
    launcher.asked = 0
    launcher.launched.clear()
    for _ in range(3):
        launch(_There(0), (x,))  # type: ignore[arg-type]
    assert launcher.asked == (0 if is_direct else 3)
    between = 1234, False, ("metadata",), None, None, None, None, b"kinds"
    if is_direct:
        given = x.data_ptr(), 48, 1
        given = given if isinstance(launcher, _Spread) else (given,)
        assert launcher.launched == 3 * [(7, 1, 1, 17, *between, *given)]
    assert len(launcher.launched) == 3


@pytest.mark.usefixtures("_a_gpu")
def test_the_launcher_of_this_triton_always_does_the_same() -> None:
    """Otherwise every launch takes the host twice as long as it has to."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    launcher = object.__new__(driver.CudaLauncher)
    vars(launcher).update(dict.fromkeys(("launch_cooperative_grid", "launch_pdl", "gsan_enabled"), False))
    vars(launcher).update(dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0))
    vars(launcher).update(global_scratch_align=1, profile_scratch_align=1, num_ctas=1, launch=print)
    vars(launcher).update(arg_annotations=("any",), kernel_signature=b"kinds")
    found = launching._direct(launcher, 1234, (4, 1, 0), 5)
    assert found is not None
    assert found[0] is print or not hasattr(driver, "make_kernel_signature")  # Triton 3.6
    assert found[1][0] == 1234
    assert (4, 1, 0) in found[1]


class _Stream:
    """Notes what it is waited for: the tables that were put into it before an event."""

    def __init__(self) -> None:
        self.put = 0
        self.waited: list[int] = []

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda at=self.put: self.waited.append(at))


def test_memory_of_tables_is_written_again_once_what_read_it_is_done() -> None:
    stage, stream = launching._Stage(torch.device("cpu")), _Stream()
    half, last = launching._Stage._HALF, {}  # the last table that lies in each half
    for _ in range(40):
        numbers = np.arange(stream.put, stream.put + 1001, dtype=np.int64)
        before = len(stream.waited)
        table = stage.put(numbers, stream)  # type: ignore[arg-type]
        stream.put += 1
        assert np.array_equal(table.numpy(), numbers)
        assert table.data_ptr() % 16 == 0
        begin = (table.data_ptr() - stage._there.data_ptr()) // 8
        own = begin // half
        assert (begin + len(numbers) - 1) // half == own
        if begin % half == 0 and own in last:  # begun again: all that was ever in it has been read
            assert stream.waited[before:]
            assert stream.waited[-1] > last[own]
        last[own] = stream.put - 1
    assert len(stream.waited) >= 3
    longer = np.arange(half + 1, dtype=np.int64)
    assert np.array_equal(stage.put(longer, stream).numpy(), longer)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_on_a_gpu_loops_that_are_started_again_do_the_same() -> None:
    cuda = Backend("narrowband.kernels.cuda")
    for repeat in range(3):
        for first in (0, 1, 2, 4):
            for n in (1, 16, 1000, 4096, 5000):
                x = torch.randn(n + first, generator=torch.Generator().manual_seed(repeat))[first:]
                out = torch.zeros(-(-n // 128) * 8 + n // 2 + 64, dtype=torch.uint8)
                form: Any = {"bits": 4, "group": 128, "scale": "minmax", "stochastic": True, "seed": repeat}
                there = out.cuda()
                begin = torch.randn(n + first).cuda()[first:]
                begin.copy_(x)
                cuda.quantize_groups(begin, there, **form)
                reference.quantize_groups(x, out, **form)
                assert torch.equal(there.cpu(), out)


@pytest.mark.gpu
def test_tables_arrive_whole_however_many_are_on_their_way() -> None:
    """Many times the memory that they go through, with a device that is kept busy."""
    device, busy = torch.device("cuda"), torch.randn(2048, 2048, device="cuda")
    kept, expected = [], []
    for at in range(3000):
        numbers = np.arange(at, at + 1 + at % 97, dtype=np.int64)
        busy = busy @ busy
        kept.append(launching._on_device(numbers, device).clone())
        expected.append(numbers)
    for own, there in zip(expected, kept, strict=True):
        assert np.array_equal(own, there.cpu().numpy())
