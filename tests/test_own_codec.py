"""A codec and a feedback of another package, really installed: in spec strings, lists, plans and checkpoints."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from narrowband.cli import main
from narrowband.codecs.registry import Registry
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
SPEC = "ternary+decayed:keep=0.5"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that pip installed the example package into."""
    source, site = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    shutil.copytree(ROOT / "examples" / "own_codec", source, dirs_exist_ok=True)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source)], check=True)
    return site


def ran(rank, world_size, folders, run):
    """What ``run`` returns, and what it writes to stdout and stderr, where these folders are on the path."""
    sys.path[:0] = folders
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = run()
    return found, out.getvalue(), err.getvalue()


def in_a_new_process(run, *folders):
    """As :func:`ran`, in a process that has imported PyTorch and looked for no codec yet."""
    return run_ranks(ran, 1, [str(folder) for folder in folders], run, fresh=True, group=False)[0]


def listed():
    return main(["codecs"])


def test_narrowband_codecs_lists_them(site):
    code, out, err = in_a_new_process(listed, site)
    assert code == 0, err
    assert "ternary" in out
    assert "+decayed" in out


def contract():
    os.environ["NARROWBAND_TEST_SPECS"] = "ternary"
    options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", "--rootdir", str(ROOT)]
    return int(pytest.main(["-q", *options, str(ROOT / "tests/codecs/test_contract.py"), "-k", "ternary"]))


def test_the_contract_of_codecs_holds(site):
    code, said, _ = in_a_new_process(contract, site)
    assert code == 0, said
    assert " passed" in said


def train(rank, world_size):
    """Averages of two steps, one of them after a checkpoint; what the handle says of itself; the way through a plan."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(40, 30))
    handle = nb.compress_gradients(model, SPEC, min_numel=100)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    saved = {"model": model.state_dict(), "handle": handle.state_dict()}
    handle.load_state_dict(saved["handle"])
    model(x).square().mean().backward()
    plan = nb.Constant(SPEC).decide({"weight": torch.randn(30, 40)}, step=0, traffic=nb.adapt.Traffic(2))
    return (
        model.module.weight.grad.clone(),
        saved["handle"]["spec"],
        float(saved["handle"]["feedback"]["weight"].abs().max()),
        [layer.spec for layer in nb.Plan.from_json(plan.to_json()).layers],
        handle.stats().total.ratio,
    )


def test_it_works_over_ddp_in_checkpoints_and_in_plans(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))  # ranks have the path of this process
    (grad, spec, residual, plan, ratio), (other, *_) = run_ranks(train, 2, fresh=True)
    assert spec == SPEC
    assert plan == [SPEC]
    assert residual > 0
    assert ratio > 3
    assert bool(grad.isfinite().all())
    assert torch.equal(grad, other)


def residuals():
    found, x = [], torch.ones(1000)
    for store in ("fp32", "bf16", "int8", "cpu"):
        method = nb.compression(f"topk:density=0.1+decayed:store={store},keep=0.5")
        state = method.new_feedback()
        _, payload = state.encode("w", x.clone(), method.codec, shape=(1000,), seed=0)
        state.commit("w", x.clone(), method.codec, payload, shape=(1000,), seed=0)
        found.append(round(float(state.residual("w").sum())))
    return found


def test_its_residual_fades_wherever_it_is_kept(site):
    assert in_a_new_process(residuals, site)[0] == [450] * 4  # half of the 900 that top-k left


BROKEN = {
    "METADATA": "Metadata-Version: 2.1\nName: broken-codecs\nVersion: 1.0\n",
    "entry_points.txt": "[narrowband.codecs]\nshattered = there_is_no_such_module:Codec\n",
}


def ask():
    for spec in ("shattered", "ternary", "shatterd+ef", "topk:density=0.1+decayed"):
        try:
            print(nb.compression(spec))
        except ValueError as error:
            print(error)


def test_a_package_that_cannot_be_loaded_is_named_and_disturbs_no_other(site, tmp_path):
    info = tmp_path / "broken_codecs-1.0.dist-info"
    info.mkdir()
    for name, content in BROKEN.items():
        (info / name).write_text(content)
    _, said, logged = in_a_new_process(ask, tmp_path, site)
    broken, there, unknown, behind = said.splitlines()
    assert "'shattered' of the package 'broken-codecs' could not be loaded (ModuleNotFoundError" in broken
    assert there == "ternary"
    assert unknown.startswith("unknown codec 'shatterd'")
    assert behind == "topk:density=0.1+decayed"
    assert "broken-codecs" in logged


@dataclass(frozen=True)
class Named(nb.Codec):
    name: ClassVar[str] = "named"


class NoDataclass(nb.Codec):
    name: ClassVar[str] = "plain"


@dataclass
class NotFrozen(nb.Codec):
    name: ClassVar[str] = "thawed"


class NotDecorated(Named):
    name: ClassVar[str] = "bare"
    bits: int = 2


@dataclass(frozen=True)
class WithAList(nb.Codec):
    name: ClassVar[str] = "list"
    bits: tuple[int, ...] = (2, 4)


@dataclass(frozen=True)
class WithNone(nb.Codec):
    name: ClassVar[str] = "maybe"
    bits: int | None = None


def test_what_cannot_be_registered_is_refused():
    registry = Registry("codec", "no.such.group", nb.Codec, [Named])
    assert registry.register(Named) is Named, "once more is fine"
    assert registry.all() == {"named": Named}
    with pytest.raises(ValueError, match=r"'named' is taken by the codec .*Named; choose another"):
        registry.register(type("Other", (Named,), {}))
    with pytest.raises(ValueError, match="must begin with a lower-case letter"):
        registry.register(type("Odd", (Named,), {"name": "Two words"}))
    for wrong in (NoDataclass, nn.Linear, 7):
        with pytest.raises(TypeError, match=r"a dataclass that derives from Codec.*; write @dataclass\(frozen=True\)"):
            registry.register(wrong)
    with pytest.raises(TypeError, match=r"NotFrozen has no hash.*; write @dataclass\(frozen=True\) above it"):
        registry.register(NotFrozen)
    with pytest.raises(TypeError, match=r"NotDecorated\.bits is no field.*; write @dataclass\(frozen=True\) above it"):
        registry.register(NotDecorated)
    for wrong, hint in ((WithAList, "tuple"), (WithNone, "None")):
        with pytest.raises(TypeError, match=rf"\.bits is annotated as .*{hint}.*, and a spec string holds int, float"):
            registry.register(wrong)
    assert registry.all() == {"named": Named}


@dataclass(frozen=True)
class OfTwoVersions(nb.codecs.FP16):
    name: ClassVar[str] = "of-two-versions"

    def _nbytes(self, shape, dtype):
        return super()._nbytes(shape, dtype) + 4 * torch.distributed.get_rank()


def of_two_versions(rank, world_size):
    with pytest.raises(nb.DisagreementError) as error:
        nb.compress_gradients(DDP(nn.Linear(40, 30)), OfTwoVersions(), min_numel=100)
    return str(error.value)


def test_ranks_with_other_versions_of_a_codec_are_told():
    for text in run_ranks(of_two_versions, 2):
        assert "ranks disagree on bytes of payload of 'weight' (2400 on rank 0; 2404 on rank 1)" in text
