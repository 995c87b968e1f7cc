from __future__ import annotations

import sys

import pytest

from narrowband.errors import UnsupportedError
from narrowband.report import plots

ROWS = [
    {"codec": "none", "sent_bytes_per_step": 1e6, "curve": [[1, 5.0], [10, 3.0]]},
    {"codec": "topk:density=0.01+ef", "sent_bytes_per_step": 1e4, "curve": [[1, 5.0], [10, 3.1]]},
]


def test_a_picture_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plots.loss_curves(ROWS, tmp_path / "new" / "loss.png")
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")
    plots.loss_curves(
        [row | {"sent_bytes_per_step": 0.0} for row in ROWS], tmp_path / "one-rank.png"
    )  # warns of nothing


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[plots\]' in the clone"):
        plots.loss_curves(ROWS, tmp_path / "loss.png")
