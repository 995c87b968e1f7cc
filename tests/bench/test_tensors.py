"""What one saved tensor costs."""

from __future__ import annotations

import json

import pytest

from narrowband.bench import tensors
from narrowband.cli import main


def test_each_size_has_a_row_and_packing_leaves_a_byte_per_element():
    rows = list(tensors.run(tensors.Config(sizes=(256, 8192), layers=4, rounds=2)))
    assert [row["numel"] for row in rows] == [256, 8192]
    assert [row["saved_nbytes"] for row in rows] == [3 * 256, 3 * 8192]
    assert all(row["plain_us"] > 0 for row in rows)


def test_the_command_writes_a_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensors.Config, "sizes", (256,))
    monkeypatch.setattr(tensors.Config.__init__, "__defaults__", ((256,), 4, 8, 2, 0))
    path = tmp_path / "tensors.json"
    assert main(["bench", "memory", "--tensors", "--rounds", "1", "--json", str(path)]) == 0
    assert "packed in 8 bits" in " ".join(capsys.readouterr().out.split())
    record = json.loads(path.read_text())
    assert record["config"]["rounds"] == 1
    assert [row["numel"] for row in record["rows"]] == [256]


@pytest.mark.parametrize("options", [{"sizes": ()}, {"sizes": (100,)}, {"layers": 0}, {"rounds": 0}])
def test_what_cannot_be_measured_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        tensors.Config(**options)
