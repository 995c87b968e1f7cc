"""How commands end: one sentence and an exit code for whatever was given wrong, whichever command it was given to."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import narrowband
from narrowband.bench.models import GPT, MODELS
from narrowband.bench.ranks import Loopback, RankError, run_ranks
from narrowband.cli.exits import CONVENTION, check_folder, check_output, finish
from narrowband.errors import PayloadError, UnsupportedError
from tests.thorough import thorough

MODEL = """
import sys
import torch
from torch import nn

def fits(batch): return nn.Linear(8, 8), (torch.randn(batch, 8),)
def does_not_fit(batch): return nn.Linear(8, 8), (torch.randn(batch, 9),)
def one_too_many(batch): return nn.Linear(8, 8), (torch.randn(batch, 8), torch.randn(batch, 8))
def takes_nothing(): return fits(1)
def takes_two(batch, classes): return fits(batch)
def returns_nothing(batch): pass
def returns_no_inputs(batch): return nn.Linear(8, 8), 42
def raises(batch):
    raise KeyError("deep")
def exits(batch): sys.exit(0)
class NoBackward(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad: y.register_hook(no_way_back)
        return y
def no_way_back(grad): raise RuntimeError("no way back")
def no_backward(batch): return NoBackward(8, 8), (torch.randn(batch, 8),)
class NoTraining(nn.Linear):
    def forward(self, x): return super().forward(x) if not torch.is_grad_enabled() else {}["grads"]
def no_training(batch): return NoTraining(8, 8), (torch.randn(batch, 8),)
def frozen(batch): return nn.Linear(8, 8).requires_grad_(False), (torch.randn(batch, 8),)
def by_name(batch): return nn.Linear(8, 8), {"input": torch.randn(batch, 8)}
number = 3
"""

RUN = """{"kind": "start", "narrowband_run": 1, "spec": "none", "ranks": 2}
{"kind": "step", "step": 1, "steps": 1, "values": {"loss": 0.5}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of all sorts, few of which are what a command wants."""
    place = tmp_path_factory.mktemp("given")
    (place / "folder").mkdir()
    (place / "folder.json").mkdir()
    (place / "file").write_text("x")
    os.mkfifo(place / "pipe")
    (place / "text.pt").write_text("Beautiful is better than ugly.\n")
    (place / "bytes.pt").write_bytes(bytes(range(256)) * 20)
    (place / "empty.pt").touch()
    torch.save({"a.weight": torch.randn(64, 96), "b.weight": torch.randn(64, 96)}, place / "good.pt")
    whole = (place / "good.pt").read_bytes()
    (place / "torn.pt").write_bytes(whole[: len(whole) // 2])
    (place / "head.pt").write_bytes(whole[:100])
    (place / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    torch.save(torch.nn.Linear(2, 2), place / "module.pt")
    torch.save({"a.weight": torch.full((64, 96), torch.nan)}, place / "nan.pt")
    torch.save({"a.weight": torch.ones(64, 96, dtype=torch.int64)}, place / "whole.pt")
    torch.save({"a.weight": torch.ones(64, 96).to_sparse()}, place / "sparse.pt")
    torch.save({1: torch.ones(64, 96)}, place / "number.pt")
    torch.save({"c.weight": torch.randn(64, 96)}, place / "other.pt")
    (place / "torn.json").write_text('{"version": 1, "lay')
    (place / "bytes.json").write_bytes(bytes(range(128, 256)))
    (place / "newer.json").write_text('{"version": 9}')
    layer = {"name": "a", "spec": "qsgd:bits=4", "nbytes": 3, "error": None, "shape": [3, 3]}
    (place / "other.json").write_text(json.dumps({"version": 2, "policy": "mine", "world_size": 4, "layers": [layer]}))
    shapes = {name: list(x.shape) for name, x in GPT(MODELS["gpt-tiny"]).named_parameters() if x.dim() > 1}
    layers = [layer | {"name": name, "shape": shape} for name, shape in shapes.items() if math.prod(shape) >= 1024]
    (place / "plan.json").write_text(json.dumps({"version": 2, "policy": "mine", "world_size": 4, "layers": layers}))
    torch.save({"a.weight": torch.randn(64, 96), "b.weight": torch.randn(64, 96)}, place / "same.pt")
    for name in ("run.jsonl", "plain.jsonl", "page.html"):
        (place / name).write_text(RUN)
    (place / "link.jsonl").symlink_to("run.jsonl")
    (place / "model.py").write_text(MODEL)
    (place / "model.txt").write_text(MODEL)
    (place / "imports.py").write_text("\nimport nothing_of_this_name\n")
    (place / "syntax.py").write_text("def build(:\n")
    (place / "exits.py").write_text("import sys; sys.exit(0)\n")
    (place / "binary.py").write_bytes(bytes(range(256)))
    return place


@pytest.fixture
def given(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


WRONG = [
    # gradients
    ("adapt nowhere.pt", "there is no file nowhere.pt; torch.save({name: p.grad"),
    ("adapt folder", "folder is a folder; give a file that"),
    ("doctor --json pipe", "pipe is a device or a pipe, not a regular file"),
    ("report .", ". is a folder; give the file of an nb.Recorder"),
    *((f"adapt {name}.pt", f"{name}.pt does not hold gradients: it was not written by torch.save")
      for name in ("text", "bytes", "empty", "torn", "head", "pickle", "module")),
    ("adapt nan.pt", "the gradient of 'a.weight' is not finite"),
    ("adapt whole.pt", "'a.weight' is a tensor of torch.int64"),
    ("adapt sparse.pt", "torch.sparse_coo; expected a dense tensor"),
    ("adapt number.pt", "must hold a dict of tensors"),
    ("adapt good.pt --policy accordion --before nowhere.pt", "there is no file nowhere.pt"),
    ("adapt good.pt --policy accordion --before other.pt", "other.pt and good.pt are gradients of different models"),
    ("adapt good.pt --min-numel 0", "min_numel=0 must be at least 1"),
    ("adapt good.pt --alpha inf", "alpha=inf must be a finite number above 0"),
    ("adapt good.pt --reference nope", "unknown codec 'nope'"),
    ("adapt good.pt --density 0.001", "--density says nothing to --policy lgreco: it is for global-topk. Leave it out"),
    ("adapt good.pt --before same.pt", "--before says nothing to --policy lgreco: it is for accordion and lgreco+acc"),
    ("adapt good.pt --policy threshold --alpha 2", "--alpha says nothing to --policy threshold: it is for lgreco and"),
    ("adapt good.pt --choices powersgd:rank=2,none", "give several specs one by one, with no comma between them"),
    ("adapt good.pt --choices powersgd:rank=2,topk:density=0.1", "has no key 'topk:density'"),
    # options that are not looked at, given as they are by default
    ("adapt good.pt --density 0.01", "--density says nothing to --policy lgreco: it is for global-topk. Leave it out"),
    ("adapt good.pt --policy constant --choices", "--choices says nothing to --policy constant: it is for lgreco"),
    ("doctor --limit=10", "--limit is for --peers: give that, too, or leave it out"),
    ("doctor --wait 60", "--wait is for --peers: give that, too, or leave it out"),
    ("doctor --peers --compile", "--compile compiles the loops of this machine: run narrowband doctor"),
    ("lab --rate 200mbit --up 20mbit --down 100mbit -- true", "--rate is that of both directions, and --up and --down"),
    ("bench ddp --rate none --optimizer adamw --momentum 0.9", "--momentum is that of SGD, and here ranks step by"),
    ("bench ddp --rate none --amp --optimizer sgd", "--optimizer is AdamW with --amp: leave it out"),
    ("bench ddp --sharded --codecs none/none --collective auto", "--collective says nothing to --sharded, whose"),
    ("bench peers --kill 0 --rejoin 60", "--rejoin says when the killed peer is replaced, and --kill 0 kills none"),
    ("bench peers --freeze 0 --freeze-s 60", "--freeze-s says how long a peer is stopped, and --freeze 0 stops none"),
    ("bench peers --freeze 0 --freeze_s 60", "--freeze-s says how long a peer is stopped"),
    ("bench memory --zoo --model deit-tiny", "--model is for one model alone: name models behind --zoo, or leave out"),
    ("bench memory --zoo --batch 32", "--batch is for one model: leave it out, or leave out --zoo"),
    ("bench memory --zoo --no-baselines", "--baselines is for one model"),
    ("bench memory --zoo --bits 8 4", "--bits takes one number here, such as --bits 4"),
    ("bench memory --zoo --shares 0.5 --peaks", "--peaks says nothing to --shares: leave it out"),
    ("bench memory --tensors --device cpu", "--device says nothing to --tensors, which measures no model"),
    # outputs
    ("adapt good.pt --output folder", "folder is a folder; give the name of a file"),
    ("adapt good.pt --output file/plan.json", "file is a file and not a folder; give another place"),
    ("adapt good.pt --plot file/plan.png", "give another place"),
    ("adapt good.pt --json folder", "folder is a folder; give the name of a file"),
    ("bench kernels --json folder", "folder is a folder"),
    ("bench ddp --rate none --json file/rows.json", "give another place"),
    ("bench pipeline --rate none --json file/rows.json", "give another place"),
    ("bench adapt --json folder", "folder is a folder"),
    ("bench adapt --plans file", "give another place"),
    ("bench memory --json folder", "folder is a folder"),
    ("bench gpu --json folder", "folder is a folder"),
    ("memory model.py:fits --json folder", "folder is a folder"),
    ("memory model.py:fits --budget 1GB --output folder", "folder is a folder"),
    ("demo --out file", "give another place"),
    ("lab --json folder -- true", "folder is a folder"),
    # outputs that would take the place of inputs, or of each other
    ("report run.jsonl --output run.jsonl", "run.jsonl is read by this command and would be overwritten"),
    ("report run.jsonl --output ./folder/../run.jsonl", "run.jsonl is read by this command"),
    ("report run.jsonl --output link.jsonl", "link.jsonl is read by this command"),
    ("report run.jsonl --beside plain.jsonl --output plain.jsonl", "plain.jsonl is read by this command"),
    ("report page.html", "page.html is read by this command and would be overwritten; give another"),
    ("adapt good.pt --output good.pt", "good.pt is read by this command"),
    ("adapt good.pt --policy accordion --before same.pt --plot same.pt", "same.pt is read by this command"),
    ("adapt good.pt --output a.png --plot a.png", "a.png would be written twice"),
    ("adapt good.pt --output a.json --json a.json", "a.json would be written twice"),
    ("plan model.py:fits --json model.py", "model.py is read by this command"),
    ("plan model.py:fits --apply a.json --json a.json", "a.json would be written twice"),
    ("memory model.py:fits --json model.py", "model.py is read by this command"),
    ("bench memory --model model.py:fits --json model.py", "model.py is read by this command"),
    ("bench ddp --rate none --model gpt-tiny --codecs plan.json --json plan.json", "plan.json is read by this command"),
    ("bench gpu --json model.py -- python model.py", "model.py is read by this command"),
    ("lab --json model.py -- python model.py", "model.py is read by this command"),
    ("bench kernels --json rows.html", "rows.html is also the name of the page"),
    # plans
    ("bench ddp --rate none --codecs nowhere.json", "nowhere.json: No such file or directory; check the path"),
    ("bench ddp --rate none --codecs folder.json", "folder.json: Is a directory; check the path"),
    ("bench ddp --rate none --codecs torn.json", "torn.json: this is not a plan, or only a part of one"),
    ("bench ddp --rate none --codecs bytes.json", "bytes.json: this is not a plan: it is not text"),
    ("bench ddp --rate none --codecs newer.json", "newer.json: the plan has version 9"),
    ("bench ddp --rate none --codecs other.json", "other.json, for model gpt-13m: this is the plan of another model"),
    # models
    ("memory nowhere.py:fits", "nowhere.py:fits: there is no file nowhere.py"),
    ("memory folder:fits", "there is no file folder"),
    ("memory build", "unknown model 'build'; write file.py:function for yours, or one of: deit-tiny, deit-small"),
    ("memory model.py", "model.py lacks the name of a function: write model.py:function"),
    ("memory model.py:", "model.py lacks the name of a function: write model.py:function"),
    ("memory model.txt:fits", "model.txt is not a Python file"),
    ("memory imports.py:f", "imports.py cannot be imported: ModuleNotFoundError: No module named 'nothing"),
    ("memory imports.py:f", "(imports.py, line 2)"),
    ("memory syntax.py:f", "syntax.py cannot be imported: SyntaxError"),
    ("memory exits.py:f", "exits.py cannot be imported: SystemExit: 0"),
    ("memory exits.py:f", "If the file trains when it is imported, move f to a file of its own"),
    ("memory binary.py:f", "binary.py cannot be imported: "),
    ("memory model.py:missing", "model.py has no function 'missing'; there are: fits, does_not_fit"),
    ("memory model.py:number", "model.py has no function 'number'"),
    ("memory model.py:takes_nothing", "must take the batch size as its only argument, as in takes_nothing(8)"),
    ("memory model.py:takes_two", "missing a required argument: 'classes'"),
    ("memory model.py:returns_nothing", "returns_nothing(8) must return a module and the tuple of its inputs"),
    ("memory model.py:returns_no_inputs", "forward does not take the inputs that came with it: TypeError"),
    ("memory model.py:does_not_fit", "forward does not take the inputs that came with it: RuntimeError: "),
    ("memory model.py:by_name", "(a dictionary is one input: return a tuple, in the order of forward's arguments): "),
    ("memory model.py:one_too_many", "forward does not take the inputs that came with it: TypeError"),
    ("memory model.py:raises", "raises(8) raised KeyError: 'deep' (model.py, line 14)"),
    ("memory model.py:exits", "exits(8) raised SystemExit: 0"),
    ("memory model.py:no_backward", "the model's backward raised RuntimeError: no way back"),
    ("memory model.py:no_training", "the model's forward raised KeyError: 'grads'"),
    ("memory model.py:frozen", "in which no tensor requires gradients"),
    ("memory model.py:fits --budget 8", "budget='8' is not an amount of memory; give a number and a unit, such as 8GB"),
    ("bench memory --model model.py:does_not_fit", "forward does not take the inputs"),
    ("bench memory --model nowhere.py:fits", "there is no file nowhere.py"),
    ("bench memory --bits", "nothing to measure"),
    ("bench memory --zoo --only bf16", "--only is for one model: leave it out, or leave out --zoo"),
    ("bench memory --tensors --zoo", "--zoo says nothing to --tensors, which measures no model: leave it out"),
    ("bench memory --shares 0.5", "--shares needs --zoo; for one model use narrowband memory --budget"),
    ("bench gpu --parts battery", "the part battery needs a pytest command after '--'"),
    ("bench gpu --parts kernels -- pytest tests", "the command behind '--' is the part battery, which --parts"),
    ("bench ddp --device cuda --rate 1gbit", "links cannot be emulated between GPUs; leave out rate"),
    ("bench peers --spec nope", "unknown codec 'nope'"),
    ("rendezvous --host nowhere.invalid", "cannot listen at host nowhere.invalid, port 29400: "),
    ("rendezvous --host 192.0.2.1 --port 0", "cannot listen at host 192.0.2.1, port 0: Cannot assign requested"),
    # links, ranks, seeds, numbers
    *((f"{command} --rate {rate}", f"rate '{rate}'")
      for command in ("bench ddp", "bench pipeline") for rate in ("0", "0mbit", "nonsense", "nan")),
    *((f"{command} --nodes {nodes}", f"nodes={nodes} must be at least")
      for command in ("bench ddp", "bench pipeline", "demo") for nodes in (0, -1)),
    ("demo --nodes 257", "nodes=257 must be at most 256"),
    *((f"lab {option} -- true", said) for option, said in (
        ("--nodes 0", "nodes is 0; expected 1 to 256"), ("--nodes -1", "nodes is -1"), ("--rate 0", "rate '0'"),
        ("--timeout nan", "timeout_s is nan"), ("--delay soon", "delay 'soon'"), ("--loss 100%", "loss '100%'"))),
    *((f"{command} --seed -1", "seed=-1 is not in [0, 2**31)")
      for command in ("demo", *map("bench {}".format, ("kernels", "ddp", "pipeline", "peers", "adapt", "memory")))),
    ("demo --learning-rate nan", "learning_rate=nan must be a number above 0"),
    ("demo --learning-rate inf", "learning_rate=inf must be a number above 0"),
    ("bench ddp --momentum nan", "momentum=nan is not in [0, 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_what_is_given_wrong_is_one_sentence_and_exit_code_2(narrow, given, line, message):
    before = contents(given)
    code, out, err = narrow(*line.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not out.strip()
    assert contents(given) == before


def contents(folder):
    """Name → bytes of every file, and of those in folders, but for what Python keeps of modules that were imported."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("dgc", "--nodes 0", "nodes=0 must be at least 1"),
        ("dgc", "--seeds -1", "seed=-1"),
        ("dgc", "--markdown folder", "folder is a folder"),
        ("dgc", "--output file", "give another place"),
        ("dgc", "--quick --data-dir torn", "train.parquet is no parquet file, or a part of one"),
        ("dgc", "--quick --data-dir nowhere", "there is no nowhere/cifar10/train.parquet; pass --data-dir"),
        ("cssgd", "--slow 0", "rate '0' cannot be read"),
        ("fidelity", "--quick --data-dir file", "there is no file/"),
        ("lgreco_links", "--rate nonsense", "rate 'nonsense' cannot be read"),
        ("lgreco_links", "--nodes 0", "nodes=0 must be at least 1"),
        ("mesa_memory", "--rounds 0", "rounds=0 must be at least 1"),
        ("sensitivity", "--lr nan", "lr=nan must be above 0"),
        ("sensitivity", "--quick --output sensitive", "incomplete or not a JSON file"),
        ("local_times", "--losses torn.json", "torn.json is incomplete or not a JSON file"),
        ("dgc", "--data-dir data --markdown data/tinyshakespeare/input.txt", "input.txt is read by this command"),
        ("dgc", "--output data --markdown data/rows/row.json", "data/rows/row.json is read by this command"),
        ("dgc", "--output data --markdown data/summary.json", "data/summary.json would be written twice"),
        ("local_times", "--losses sensitive/summary.json --output sensitive", "summary.json is read by this command"),
        ("lgreco", "--nodes 0 --markdown record.json", "record.json is read by this command"),
        ("facts", "--file record.json", "record.json is read by this command"),
    ],
)
def test_reproductions_end_in_the_same_way(given, capsys, monkeypatch, module, words, message):
    from importlib import import_module

    from reproduce import command

    (given / "torn" / "cifar10").mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        (given / "torn" / "cifar10" / f"{name}.parquet").write_text("PAR1 and no more")
    for name in ("sensitive/summary.json", "data/tinyshakespeare/input.txt", "data/rows/row.json"):
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).write_text('{"config": ')
    (given / "record.json").unlink(missing_ok=True)
    (given / "record.json").symlink_to(command.RESULTS / "local" / "summary.json")  # by whatever name
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(given / "cache"))
    monkeypatch.delenv("NARROWBAND_DEBUG", raising=False)
    run = import_module(f"reproduce.{module}")
    before = contents(given)
    try:
        code = command.main(run.EXPERIMENT, words.split()) if run.main is command.main else run.main(words.split())
    except SystemExit as end:  # tyro's
        code = end.code
    err = capsys.readouterr().err
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert contents(given) == before


# ---- the convention --------------------------------------------------------------------------------------------------


def finished(work, **options):
    errors = Console(record=True, width=200, file=io.StringIO())
    code = finish(work, errors, **options)
    return code, errors.export_text()


def ended(error, **options):
    def work():
        raise error

    return finished(work, **options)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("no"), 2, "no\n"),
        (PayloadError("short"), 2, "short\n"),
        (UnsupportedError("cannot"), 2, "cannot\n"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "here"), 2, "here: No such file or directory"),
        (PermissionError(errno.EACCES, "Permission denied", "there"), 2, "there: Permission denied; check the path"),
        (OSError(errno.ENOSPC, "No space left on device", "full"), 1, "full: No space left on device; make room"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the output: No space left on device; make room"),
        (RankError("a rank ended", "Traceback of a rank"), 1, "a rank ended\n"),
        (MemoryError(), 1, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "A smaller batch or model needs less"),
        (KeyError("ours"), 1, "this is an error in narrowband, please report it: KeyError: 'ours'"),
        (KeyboardInterrupt(), 130, "Stopped."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_error_has_its_exit_code_and_no_traceback(monkeypatch, error, code, said):
    monkeypatch.delenv("NARROWBAND_DEBUG", raising=False)
    found, text = ended(error)
    assert found == code
    assert said in text
    assert "Traceback" not in text


TERMINATED = """
import multiprocessing, signal, time
from concurrent.futures import ProcessPoolExecutor
from rich.console import Console
from narrowband.cli.exits import finish

def work():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as others:
        others.submit(time.sleep, 3600)
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)  # a second one ends the process at once

print(finish(work, Console(), stopped="Rows are kept."), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


def test_sigterm_ends_a_command_as_ctrl_c_does():
    """It ends the processes that the command has started, and would wait for: so this has a process of its own."""
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, check=True, timeout=180.0)
    assert done.stdout == "True\nStopped. Rows are kept.\n143 True\n"


IN_A_CALLBACK = """
import ctypes, signal, sys
from rich.console import Console
from narrowband.cli.exits import finish

def work():
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(getattr(signal, sys.argv[1])))()
    raise RuntimeError("no compiled object yet")  # as Numba says

print(finish(work, Console(stderr=True)))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_comes_while_llvm_compiles_a_loop_ends_a_command_too(name, code):
    command = [sys.executable, "-c", IN_A_CALLBACK, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180.0)
    assert (done.stdout, done.stderr) == (f"{code}\n", "Stopped.\n")


def test_a_handler_of_sigterm_that_was_there_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        assert finish(lambda: signal.raise_signal(signal.SIGTERM) or 0, Console(file=io.StringIO())) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]


@pytest.mark.parametrize("line", ["from torch import lacking", "import torch.lacking"])
def test_what_our_own_files_do_not_find_in_pytorch_is_an_error_of_ours(line):
    code, text = finished(lambda: exec(line, {"__name__": "narrowband.ours"}))
    assert code == 1
    assert "this is an error in narrowband, please report it" in text


def test_debug_raises_what_would_be_a_sentence(monkeypatch):
    with pytest.raises(ValueError, match="no"):
        ended(ValueError("no"), debug=True)
    monkeypatch.setenv("NARROWBAND_DEBUG", "1")
    with pytest.raises(RankError, match="Traceback of a rank"):
        ended(RankError("a rank ended", "Traceback of a rank"))


@pytest.mark.parametrize("output", [io.StringIO(), None], ids=["in memory", "closed"])
def test_another_pipe_that_breaks_is_told_wherever_output_goes(monkeypatch, output):
    monkeypatch.setattr(sys, "stdout", output)
    code, text = ended(BrokenPipeError(errno.EPIPE, "Broken pipe", "of a rank"))
    assert code == 1
    assert "of a rank: Broken pipe" in text


def test_the_convention_stands_in_the_help(narrow):
    _, out, _ = narrow("--help")
    assert " ".join(CONVENTION.split()) in " ".join(out.split())
    assert re.findall(r"\d+", CONVENTION) == ["0", "1", "2", "130", "143"]


def test_a_path_that_looks_like_a_smiley_stays_a_path(narrow, given):
    assert "model.py:ok" in narrow("memory", "model.py:ok")[2]


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("adapt good.pt --output told.json", "told.json"),
        ("adapt good.pt --json rows.json", "rows.json"),
        ("bench ddp --nodes 2 --rate none --model gpt-tiny --codecs none --rounds 1 --steps 1 --json x.json", "x.json"),
        ("doctor --json doctor.json", "doctor.json"),
        ("memory model.py:fits --batch 2 --json memory.json", "memory.json"),
    ],
)
def test_what_was_measured_is_kept_though_it_cannot_be_shown(narrow, given, monkeypatch, line, written):
    full = open("/dev/full", "w")  # noqa: SIM115 -- that it cannot be closed without an error is its use
    monkeypatch.setattr("sys.stdout", full)
    code, _, err = narrow(*line.split())
    with contextlib.suppress(OSError):
        full.close()
    assert (code, "No space left on device" in err) == (1, True)
    assert json.loads((given / written).read_text())


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("bench kernels --loops all-finite --repeats 1 --numel 4096 --json kept.json", "all-finite"),
        ("adapt good.pt --output kept.json", "for all layers"),
        ("doctor --json kept.json", "PyTorch"),
        ("memory model.py:fits --batch 2 --json kept.json", "parameters"),
        *thorough(("plan model.py:fits --steps 1 --codecs none --json kept.json", "predicted steps")),
    ],
)
def test_what_was_measured_is_shown_though_it_cannot_be_kept(narrow, given, line, shown):
    """Files of a process may be no longer than it says, as on a full disk."""
    assert narrow(*line.split())[0] == 0  # loops are compiled, and kept in files
    (given / "kept.json").unlink()
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
    try:
        code, out, err = narrow(*line.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert (code, err) == (1, "kept.json: File too large; make room, or give another place\n")
    assert shown in out


def test_a_python_without_the_packages_that_commands_need_says_so():
    """Without ``site`` there are none, as where the clone is on the path of another Python."""
    env = {**os.environ, "PYTHONPATH": str(Path(narrowband.__file__).parents[1])}
    command = [sys.executable, "-S", "-m", "narrowband", "--version"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"\S+ lacks the package rich: pip install \. in the clone installs it\n", done.stderr)


@pytest.mark.parametrize("line", ["lab --help", *thorough("bench ddp --help", "codecs")])
def test_who_stops_to_read_hears_nothing_of_it(line):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "narrowband", *line.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_lacks_characters_gets_question_marks(narrow, monkeypatch, encoding):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding))
    assert narrow("codecs")[0] == 0
    said = shown.getvalue().decode(encoding)
    assert "5,000 × 5,000 float32" in said.replace("?", "×")
    assert ("×" in said) == (encoding != "ascii")


def test_a_terminal_that_does_not_know_its_width_has_80_columns(narrow, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    code, out, _ = narrow("codecs")
    assert code == 0
    assert "qsgd" in out
    assert max(map(len, out.splitlines())) <= 80


def test_what_can_be_written_is_not_refused(tmp_path):
    (tmp_path / "old.json").touch()
    words = ["python", "-c", "print(1);" * 1000, "a\0b", None]
    check_output(None, tmp_path / "old.json", tmp_path / "new" / "deep" / "one.json", reads=words)
    check_folder(None, tmp_path, tmp_path / "new" / "deep")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]  # looking makes nothing


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path, monkeypatch):
    def write(code):
        (tmp_path / "worker_under_test.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        return "worker_under_test"

    return write


def test_a_rank_that_fails_is_one_sentence_and_all_that_it_said_is_in_a_file(worker):
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('unwell\\nindeed') from e\n"
    with pytest.raises(RankError) as caught:
        run_ranks(worker(code), {}, Loopback(1))
    sentence = caught.value.sentence
    assert sentence.startswith("a rank ended with exit code 1: ValueError: unwell (all that the ranks said is in ")
    assert "\n" not in sentence
    log = sentence.rpartition(" is in ")[2].removesuffix(")")
    with open(log) as file:
        assert "ZeroDivisionError" in file.read()


def test_a_rank_that_was_killed_is_said_to_have_been(worker):
    with pytest.raises(RankError, match="ended by SIGKILL, which is what the system does when memory runs out"):
        run_ranks(worker("import os\nos.kill(os.getpid(), 9)\n"), {}, Loopback(1))


def test_as_a_process_too(given):
    """Exit codes reach the shell, and nothing is said but the sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "narrowband.cli", "adapt", "text.pt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("text.pt does not hold gradients")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_while_the_process_exits_prints_no_traceback():
    program = (
        "import atexit, os, signal, sys; from narrowband.cli import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT); sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
