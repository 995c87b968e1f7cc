from __future__ import annotations

import pytest
import torch

from narrowband.bench.text import batch_of, standard_library


def write_library(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" + "x = 1\n" * 8000)


NAMES = [f"module{i}.py" for i in range(40)]


def test_files_are_either_trained_on_or_held_out(tmp_path):
    write_library(tmp_path, NAMES)
    text = standard_library(tmp_path)
    train, heldout = bytes(text.train.tolist()), bytes(text.heldout.tolist())
    assert text.files == len(NAMES)
    for name in NAMES:
        assert (f"# {name}\n".encode() in train) != (f"# {name}\n".encode() in heldout)
    assert b"# module" in heldout


def test_the_split_of_a_file_does_not_depend_on_the_others(tmp_path):
    write_library(tmp_path, NAMES)
    before = bytes(standard_library(tmp_path).heldout.tolist())
    write_library(tmp_path, ["another.py", "package/one.py"])
    after = bytes(standard_library(tmp_path).heldout.tolist())
    assert before in after or all(part in after for part in before.split(b"# ")[1:])


def test_tests_packages_and_tables_are_left_out(tmp_path):
    write_library(tmp_path, NAMES)
    identity = standard_library(tmp_path).identity()
    write_library(tmp_path, ["test/a.py", "site-packages/b.py", "deep/tests/c.py", "encodings/d.py"])
    assert standard_library(tmp_path).identity() == identity


def test_a_stripped_interpreter_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "small.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError, match="installed as files"):
        standard_library(tmp_path)


def test_this_interpreter_has_enough():
    text = standard_library()
    assert text.train.numel() > 5 * text.heldout.numel() > 0


def test_targets_are_the_next_bytes():
    text = torch.arange(200, dtype=torch.uint8)
    x_BL, y_BL = batch_of(text, 3, 16, torch.Generator().manual_seed(0))
    assert x_BL.shape == (3, 16)
    assert x_BL.dtype == torch.int64
    torch.testing.assert_close(y_BL, x_BL + 1)


def test_the_last_byte_can_be_a_target():
    text = torch.arange(5, dtype=torch.uint8)
    x_BL, y_BL = batch_of(text, 2, 4, torch.Generator())
    assert x_BL[0].tolist() == [0, 1, 2, 3]
    assert y_BL[0].tolist() == [1, 2, 3, 4]
